"""Groups on streams: what is fused computes the same, no stream reads freed memory, plans last."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import placewright.torch
from placewright import acceleration
from placewright.acceleration import AccelerateConfig, accelerated
from placewright.backends.pytorch.exporting import Inputs, Task
from placewright.backends.pytorch.lanes import OverLimitError
from placewright.backends.pytorch.outputs import OutputTree
from placewright.backends.pytorch.streams import kernels, own, passes, schedule
from placewright.backends.pytorch.streams import plan as plans
from placewright.backends.pytorch.streams.accelerated import Accelerated, Entry
from placewright.backends.pytorch.streams.built import Lowered, build, lower
from placewright.backends.pytorch.streams.device import Cpu, Gpu, OneAfterAnother, Turns
from placewright.backends.pytorch.streams.groups import Fusion, Grouped, group
from placewright.backends.pytorch.streams.issue import Run, issue
from placewright.backends.pytorch.streams.net import Net, UnsuitableError, trace
from placewright.backends.pytorch.streams.plan import StreamPlan
from placewright.backends.pytorch.streams.schedule import Schedule, Work
from placewright.backends.pytorch.streams.training import split_gradients, trace_step
from placewright.backends.pytorch.streams.tuning import Tuner, distance, untuned
from placewright.errors import ClusterError, PlacementError, SearchError


class Branches(nn.Module):
    """Four convolutions side by side, twice; then what networks of that kind have."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(True))
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, k, padding=k // 2), nn.BatchNorm2d(8), nn.ReLU())
            for k in (1, 3, 1, 3)
        )
        self.head = nn.Linear(32, 5)
        _disturb(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.branches[0](x) + self.branches[1](x) + F.max_pool2d(x, 3, 1, 1)
        x = torch.cat([branch(x) for branch in self.branches], 1)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


class Residual(nn.Module):
    """Sums before ReLUs, convolutions of each channel by itself, other activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.each = nn.Conv2d(8, 8, 5, padding=2, stride=2, groups=8)
        self.wide = nn.Conv2d(8, 12, 1)
        self.norm = nn.BatchNorm2d(8)
        _disturb(self)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.relu(self.inner(x) + x)
        y = F.relu(self.norm(y))
        z = self.each(F.relu(y))
        return {"z": F.silu(self.wide(z)), "y": y, "x": x}


class Attention(nn.Module):
    """Views of all kinds between products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.qkv = nn.Linear(16, 48)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (
            t.view(*x.shape[:2], 4, 4).transpose(1, 2)
            for t in self.qkv(self.norm(x) * scale).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        x = x + self.narrow(F.gelu(self.wide(x), approximate="tanh"))
        return x, x.mean(1)[:, ::2]


def _disturb(module: nn.Module) -> None:
    """Batch norms that do something."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            nn.init.normal_(norm.running_mean, 0, 0.3)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "branches": (Branches, lambda: torch.randn(2, 3, 12, 12)),
    "residual": (Residual, lambda: torch.randn(2, 8, 9, 9)),
    "attention": (Attention, lambda: torch.randn(2, 6, 16)),
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, inputs = MODELS[name]
    return model().eval(), inputs()


def lowered(module: nn.Module, *inputs: torch.Tensor, fusion: Fusion) -> Lowered:
    return lower(trace(module, inputs, {}), inputs, {}, fusion)


def flat(value: Any) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = torch.utils._pytree.tree_leaves(value)
    return leaves


def assert_close(value: Any, wanted: Any, share: float = 1e-5) -> None:
    assert distance(flat(value), flat(wanted)) <= share


# --- what is fused computes the same -------------------------------------------------------------


@pytest.mark.parametrize("fusion", Fusion)
@pytest.mark.parametrize("name", MODELS)
def test_groups_compute_what_the_module_does(name: str, fusion: Fusion) -> None:
    model, x = made(name)
    low = lowered(model, x, fusion=fusion)
    tuned = untuned(low.grouped)
    work = Work(seconds=tuned.seconds, before=low.grouped.before)
    for streams in (1, 3):
        built = build(low, Cpu(), tuned.runs, schedule.list_schedule(work, streams))
        other = torch.randn_like(x)
        with torch.no_grad():
            got, wanted = built([other]), model(other)
        if fusion is Fusion.NONE:
            for a, b in zip(flat(got), flat(wanted), strict=True):
                assert torch.equal(a, b)
                assert a.stride() == torch.empty_like(b).stride()  # copies have no gaps
        assert_close(got, wanted)


def test_fusion_leaves_fewer_groups() -> None:
    model, x = made("branches")
    counts = [len(lowered(model, x, fusion=f).grouped.groups) for f in Fusion]
    assert counts[0] > counts[1] > counts[2]
    assert lowered(model, x, fusion=Fusion.FOLDED).folded == 7


@pytest.mark.filterwarnings("ignore")  # of Inductor, about torch itself
def test_every_kernel_computes_what_torch_does() -> None:
    seen: dict[str, int] = {}
    for name in MODELS:
        model, x = made(name)
        low = lowered(model, x, fusion=Fusion.REGIONS)
        values: dict[str, Any] = dict(low.given)
        with torch.no_grad():
            for one in low.grouped.groups:
                inputs = [values[i] for i in one.inputs]
                wanted = kernels.make(one, kernels.ATEN)(*inputs)
                for kernel in kernels.names_for(one, "cpu")[1:]:
                    if kernel in kernels.COMPILED and seen.get(kernel, 0) >= 2:
                        continue  # compiling takes a second
                    assert_close(kernels.make(one, kernel)(*inputs), wanted, 1e-3)
                    seen[kernel] = seen.get(kernel, 0) + 1
                values.update(zip(one.outputs, wanted, strict=True))
    assert set(seen) == {"product", "region", "tail"}


def test_convolutions_with_relu_are_one_call_of_cudnn() -> None:
    model, x = made("residual")
    grouped = lowered(model, x, fusion=Fusion.FOLDED).grouped
    sums = [g for g in grouped.groups if "cudnn" in kernels.names_for(g, "cuda")]
    assert sums
    code = kernels.make(sums[0], "cudnn").code  # type: ignore[attr-defined]
    assert "cudnn_convolution_add_relu" in code
    assert "aten.relu" not in code


@pytest.mark.filterwarnings("ignore")  # of Inductor, about torch itself
def test_many_regions_are_compiled_one_by_one() -> None:
    """torch.compile gives up on a function that it has compiled too often."""
    graph = group_of(lambda x: x.sin().cos()).module
    compiled = []
    for _ in range(12):
        one = torch.fx.GraphModule(nn.Module(), graph.graph)
        compiled.append(kernels._compiled(one))
    for i, run in enumerate(compiled):
        x = torch.randn(3, i + 1)
        assert_close(run(x), x.sin().cos())


def group_of(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    grouped = lowered(Module(), torch.randn(3, 4), fusion=Fusion.REGIONS).grouped
    (only,) = grouped.groups
    return only


@pytest.mark.parametrize("fusion", Fusion)
def test_parameters_are_followed_where_they_are_written_to(fusion: Fusion) -> None:
    model, x = made("branches")
    low = lowered(model, x, fusion=fusion)
    assert bool(low.sources) == (fusion is not Fusion.NONE)
    tuned = untuned(low.grouped)
    work = Work(seconds=tuned.seconds, before=low.grouped.before)
    built = build(low, Cpu(), tuned.runs, schedule.one_stream(work))
    state = {name: value * 1.1 for name, value in model.state_dict().items()}
    with torch.no_grad():
        for change in (
            lambda: [parameter.mul_(1.1) for parameter in model.parameters()],
            lambda: model.get_buffer("stem.1.running_mean").add_(1),
            lambda: model.load_state_dict(state),
        ):
            assert_close(built([x]), model(x))
            change()
        assert low.is_current() == (fusion is Fusion.NONE)
        assert_close(built([x]), model(x))
        assert low.is_current()
        for parameter in model.parameters():
            parameter.data.mul_(0.9)  # of this torch does not keep count
        low.refresh()
        assert_close(built([x]), model(x))


def test_parameters_made_in_inference_mode_can_be_folded() -> None:
    with torch.inference_mode():
        model = made("branches")[0].requires_grad_(False)
    low = lowered(model, made("branches")[1], fusion=Fusion.FOLDED)
    assert low.folded
    assert low.is_current()


class Kept(Cpu):
    """What groups make is in the same memory after each run, as that of a captured graph."""

    def ready(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> Any:
        run = Cpu.ready(self, grouped, runs, schedule, given)
        run.replay()
        return _Kept(run, {name: value.clone() for name, value in run.values.items()})


@dataclass
class _Kept:
    inner: Any
    values: Mapping[str, Any]
    place: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def replay(self) -> None:
        self.inner.replay()
        for name, value in self.inner.values.items():
            self.values[name].copy_(value)


class Many(nn.Module):
    """Outputs of all kinds, and an input that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, unread: torch.Tensor, other: torch.Tensor
    ) -> Any:
        y = x.sin() * other
        views = {"t": y.t(), "row": y[0], "every": y[:, ::2]}
        return [y, views, ids, (x.cos(), x.exp(), 3), ids + 1, None, self.table, y.double()]


@pytest.mark.parametrize("copies", [True, False])
def test_outputs_in_memory_that_stays_are_handed_out_as_others_are(copies: bool) -> None:
    def inputs() -> list[torch.Tensor]:
        ids = torch.randint(0, 9, (3,))
        return [torch.randn(3, 4), ids, torch.randn(2), torch.randn(3, 4)]

    model, first = Many(), inputs()
    low = lower(trace(model, first, {}), first, {}, Fusion.NONE)
    tuned = untuned(low.grouped)
    work = Work(seconds=tuned.seconds, before=low.grouped.before)
    runs = tuned.runs, schedule.one_stream(work)
    built, plain = (build(low, device, *runs, copies=copies) for device in (Kept(), Cpu()))
    # Those of a type are copied at once, and not what nobody reads.
    assert [numbers for numbers, _ in built._inputs] == [[0, 3], [1]]
    seen: list[Any] = []
    for _ in range(3):
        now = inputs()
        with torch.no_grad():
            wanted = model(*now)
        got = built(now)  # where gradients are wanted of others
        torch.utils._pytree.tree_map(assert_equal, got, wanted)
        torch.utils._pytree.tree_map(assert_equal, plain(now), wanted)
        assert got[2] is now[1]
        seen.append((got, wanted))
    for got, wanted in seen[:-1] if copies else ():
        torch.utils._pytree.tree_map(assert_equal, got, wanted)
    (a, *_), (b, *_) = (got for got, _ in seen[1:])
    assert (a.data_ptr() == b.data_ptr()) == (not copies)
    assert got[6].data_ptr() != model.table.data_ptr()


def assert_equal(value: Any, wanted: Any) -> None:
    assert type(value) is type(wanted) or isinstance(wanted, torch.Tensor)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(value, wanted)
        assert value.dtype == wanted.dtype
        assert value.stride() == torch.empty_like(wanted).stride()
        assert not value.requires_grad
    else:
        assert value == wanted


def test_a_group_that_gives_back_its_input_gets_memory_of_its_own() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().contiguous().flatten().cos()

    model, x = Model(), torch.randn(4, 5)
    low = lowered(model, x, fusion=Fusion.NONE)
    tuned = untuned(low.grouped)
    work = Work(seconds=tuned.seconds, before=low.grouped.before)
    built = build(low, Cpu(), tuned.runs, schedule.list_schedule(work, 2))
    assert torch.equal(built([x]), model(x))


def test_distance_sees_what_differs() -> None:
    a = torch.ones(4)
    assert distance([a], [a]) == 0
    assert distance([a * 2], [a]) == pytest.approx(1)
    assert distance([a.double()], [a]) == float("inf")
    assert distance([a.int()], [a.int() + 1]) == float("inf")
    nan = torch.tensor([1.0, float("nan")])
    assert distance([nan], [nan]) == 0
    assert distance([torch.ones(2)], [nan]) == float("inf")


# --- schedules -----------------------------------------------------------------------------------


@st.composite
def works(draw: st.DrawFn) -> Work:
    count = draw(st.integers(1, 25))
    return Work(
        seconds=tuple(draw(st.integers(1, 9)) * 1e-6 for _ in range(count)),
        before=tuple(
            tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else ()
            for i in range(count)
        ),
    )


@given(works(), st.integers(1, 5), st.booleans())
def test_list_schedules_keep_what_waits_for_what(work: Work, streams: int, rank: bool) -> None:
    made = schedule.list_schedule(work, streams, by_rank=rank)
    assert sorted(made.order) == list(range(len(work.seconds)))
    assert 1 <= made.num_streams <= streams
    assert max(made.streams) == made.num_streams - 1
    place = {number: i for i, number in enumerate(made.order)}
    for number, sources in enumerate(work.before):
        for source in sources:
            assert place[source] < place[number]
            assert made.end_seconds[source] <= made.start_seconds[number] + 1e-12
    assert made.seconds >= work.critical_seconds - 1e-12
    if streams == 1:
        assert made.seconds == pytest.approx(work.total_seconds)


def test_a_chain_has_no_schedules() -> None:
    work = Work(seconds=(1e-5,) * 4, before=((), (0,), (1,), (2,)))
    assert acceleration.schedules(work, 4) == []
    wide = Work(seconds=(1e-5,) * 4, before=((), (), (), ()))
    assert max(s.num_streams for s in acceleration.schedules(wide, 4)) == 4


@given(works(), st.integers(1, 4), st.data())
def test_groups_that_demand_the_chip_slow_each_other_down(
    work: Work, streams: int, data: st.DataObject
) -> None:
    demand = tuple(data.draw(st.sampled_from((0.1, 0.5, 1.0))) for _ in work.seconds)
    crowded = replace(work, demand=demand)
    plain = schedule.list_schedule(work, streams)
    made = schedule.timed(crowded, plain.streams, plain.order)
    busy = sum(s * d for s, d in zip(work.seconds, demand, strict=True))
    assert made.seconds >= max(work.critical_seconds, busy) - 1e-12
    if streams == 1:
        assert made.seconds == pytest.approx(work.total_seconds)
    for number, sources in enumerate(work.before):
        took = made.end_seconds[number] - made.start_seconds[number]
        assert took >= work.seconds[number] - 1e-12
        for source in sources:
            assert made.end_seconds[source] <= made.start_seconds[number] + 1e-12
    better = schedule.refined(crowded, plain, streams, seed=1)
    assert better.seconds <= made.seconds
    assert sorted(better.order) == list(range(len(work.seconds)))


def test_work_that_fills_the_chip_gains_nothing_from_streams() -> None:
    work = Work(seconds=(1e-5,) * 4, before=((),) * 4, demand=(1.0,) * 4)
    assert schedule.timed(work, (0, 1, 2, 3), range(4)).seconds == pytest.approx(4e-5)
    half = replace(work, demand=(0.5,) * 4)
    assert schedule.timed(half, (0, 1, 2, 3), range(4)).seconds == pytest.approx(2e-5)
    assert schedule.timed(half, (0, 1, 0, 1), range(4)).seconds == pytest.approx(2e-5)


# --- memory --------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """`lanes.Hardware` that notes what happens before what."""

    current: int = 0
    points: list[list[Any]] = field(default_factory=list)
    """For each lane what it was given: groups and, as (lane, position), what it waits for."""

    def lane(self, number: int) -> list[Any]:
        while len(self.points) <= number:
            self.points.append([])
        return self.points[number]

    def switch(self, lane: int) -> None:
        self.current = lane

    def record(self, lane: int) -> tuple[int, int]:
        return lane, len(self.lane(lane))

    def wait(self, lane: int, event: Any) -> None:
        self.lane(lane).append(event)

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        raise AssertionError

    def before(self, lane: int, position: int) -> set[tuple[int, int]]:
        """Every point that a point of a lane comes after."""
        seen: set[tuple[int, int]] = set()
        open_ = [(lane, position)]
        while open_:
            at, end = open_.pop()
            for i in range(end):
                if (at, i) in seen:
                    continue
                seen.add((at, i))
                point = self.lane(at)[i]
                if isinstance(point, tuple):
                    open_.append(point)
        return seen


def diamonds(before: Sequence[Sequence[int]]) -> Grouped:
    """A graph of sums, each group an op."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made: list[torch.fx.Node] = []
    for i, sources in enumerate(before):
        y = graph.call_function(aten.mul.Tensor, (x, i + 1))
        for source in sources:
            y = graph.call_function(aten.add.Tensor, (y, made[source]))
        made.append(y)
    total = made[-1]
    for one in made[::3]:
        total = graph.call_function(aten.add.Tensor, (total, one))
    graph.output((total,))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(3)
    tree = OutputTree(torch.utils._pytree.tree_structure([0]))
    return group(Net(graph=graph, constants={}, leaves=("x",), tree=tree), Fusion.NONE)


@settings(max_examples=30)
@given(works(), st.integers(0, 10**6))
def test_no_stream_reads_memory_that_another_may_have_taken(work: Work, seed: int) -> None:
    x, grouped = torch.arange(3.0), diamonds(work.before)
    count = len(grouped.groups)
    draw = random.Random(seed)
    streams = [draw.randrange(4) for _ in range(count)]
    order = sorted(range(count))
    hardware = Recorder()
    point_of: dict[int, tuple[int, int]] = {}
    freed: list[tuple[str, int, int]] = []
    """Value, the lane that owns it, and how many points that lane had when it was let go of."""
    alive: set[str] = set()
    most = [0]

    def watched(number: int, run: Run) -> Run:
        def call(*inputs: Any) -> list[Any]:
            lane = streams[number]
            assert hardware.current == lane
            point_of[number] = (lane, len(hardware.lane(lane)))
            hardware.lane(lane).append(number)
            outputs = [value.clone() for value in run(*inputs)]
            for name, value in zip(grouped.groups[number].outputs, outputs, strict=True):
                alive.add(name)
                weakref.finalize(value, gone, name, lane)
            most[0] = max(most[0], len(alive))
            return outputs

        return call

    def gone(name: str, lane: int) -> None:
        alive.discard(name)
        if len(point_of) < count:  # after the last one nothing is made any more
            freed.append((name, lane, len(hardware.lane(lane))))

    runs = [watched(i, g.module) for i, g in enumerate(grouped.groups)]
    plan = Schedule(streams=tuple(streams), order=tuple(order))
    issued = issue(grouped, runs, plan, {"x": x}, hardware)
    done = list(freed)
    (value,) = grouped.finish(*[issued.values[name] for name in grouped.kept])
    plain: dict[str, Any] = {"x": x}
    for one in grouped.groups:
        inputs = [plain[name] for name in one.inputs]
        plain.update(zip(one.outputs, one.module(*inputs), strict=True))
    assert torch.equal(value, plain[grouped.kept[0]])
    readers: dict[str, list[int]] = {}
    for number, one in enumerate(grouped.groups):
        for name in one.inputs:
            readers.setdefault(name, []).append(number)
    for number, sources in enumerate(grouped.before):
        seen = hardware.before(*point_of[number])
        assert all(point_of[source] in seen for source in sources)
    for name, lane, length in done:
        # What the lane is given next may get the memory.
        seen = hardware.before(lane, length)
        assert all(point_of[number] in seen for number in readers.get(name, ()))
    if set(streams) == {0}:
        assert most[0] < count
    ends = hardware.before(0, len(hardware.lane(0)))
    assert all(point in ends for point in point_of.values())


def test_memory_is_short() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x
            for i in range(6):
                total = total + (x * i).sin()
            return total

    model, x = Wide(), torch.ones(1000)
    low = lowered(model, x, fusion=Fusion.NONE)
    tuned = untuned(low.grouped)
    work = Work(seconds=tuned.seconds, before=low.grouped.before)
    wide = schedule.list_schedule(work, 4)
    free = issue(low.grouped, tuned.runs, wide, low.given, OneAfterAnother())
    narrow = schedule.timed(work, [0] * len(wide.order), range(len(wide.order)))
    least = issue(low.grouped, tuned.runs, narrow, low.given, OneAfterAnother()).peak_bytes
    assert least < free.peak_bytes
    with pytest.raises(OverLimitError, match="needed"):
        issue(
            low.grouped, tuned.runs, wide, low.given, OneAfterAnother(), limit_bytes=least - 1
        )  # fmt: skip


# --- what cannot be captured ---------------------------------------------------------------------


class ByData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


class Sized(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Counts(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x * 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ByData(), "cannot be exported"),
        (InPlace(), "writes to its input"),
        (Sized(), "sizes depend"),
        (nn.Sequential(nn.BatchNorm1d(4)), "in training mode"),
        (nn.Sequential(Counts()), "changes its buffer '0.seen'"),
    ],
    ids=["control flow", "in place", "sizes", "training", "assigned buffer"],
)
def test_what_cannot_be_captured_runs_as_it_is(
    model: nn.Module, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), torch.no_grad():
        fast = fake(model)
        x = torch.randn(3, 4)
        a, b = fast(x.clone()), model(x.clone())
        fast(x.clone())
    assert_close(a, b)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said in line
    assert "\n" not in line
    assert fast.entries[0].built is None
    assert said in fast.verdict


def test_without_cuda() -> None:
    model, x = made("branches")
    with pytest.raises(ClusterError, match="not on a CUDA device"):
        placewright.torch.accelerate(model, x)
    assert placewright.torch.accelerate(model, x, without_cuda="model") is model
    with pytest.raises(SearchError, match="without_cuda"):
        placewright.torch.accelerate(model, x, without_cuda="maybe")


def test_dropout_draws_what_the_module_draws() -> None:
    class Drops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5, True) + F.dropout(x.sin(), 0.3, True)

    model, x = Drops(), torch.randn(64)
    low = lowered(model, x, fusion=Fusion.REGIONS)
    tuned = untuned(low.grouped)
    work = Work(seconds=tuned.seconds, before=low.grouped.before)
    built = build(low, Cpu(), tuned.runs, schedule.list_schedule(work, 3))
    torch.manual_seed(3)
    got = [built([x]), built([x])]
    torch.manual_seed(3)
    assert all(torch.equal(a, model(x)) for a in got)
    assert not torch.equal(*got)


@pytest.mark.parametrize(
    "settings", [{"streams": 0}, {"seconds": 0}, {"rounds": 0}, {"method": "magic"}], ids=str
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(SearchError):
        AccelerateConfig(**settings)


# --- the search, on a device whose times are what the schedule says -------------------------------


@dataclass(kw_only=True)
class Fake(Cpu):
    """Groups take 10 us, streams really run side by side, and the module itself takes 1 ms."""

    clock: float = 0.0
    trials: int = 0
    timed: int = 0

    def seconds_of(self, run: Run, inputs: Sequence[Any]) -> float:
        self.timed += 1
        return 1e-5

    def ready(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> Any:
        self.trials += 1
        inner = Cpu.ready(self, grouped, runs, schedule, given)
        return _Timed(
            self, inner, Work(seconds=(1e-5,) * len(runs), before=grouped.before), schedule
        )

    def times(self, replays: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
        found = []
        for replay in replays:
            self.clock = 0.0
            replay()
            found.append([self.clock or 1e-3] * rounds)
        return found


class _Timed:
    place = None

    def __init__(self, device: Fake, inner: Any, work: Work, plan: Schedule) -> None:
        self.device, self.inner = device, inner
        self.seconds = schedule.timed(work, plan.streams, plan.order).seconds

    @property
    def values(self) -> Mapping[str, Any]:
        values: Mapping[str, Any] = self.inner.values
        return values

    def replay(self) -> None:
        self.inner.replay()
        self.device.clock += self.seconds


def fake(
    model: nn.Module,
    device: Fake | None = None,
    *,
    known: Sequence[StreamPlan] = (),
    candidates: Mapping[str, Callable[..., Any]] | None = None,
    **settings: Any,
) -> Accelerated:
    given: dict[str, Any] = {"method": "list", "fusion": Fusion.FOLDED, "rounds": 2}
    config = AccelerateConfig(**(given | settings))
    return accelerated(model, device or Fake(), config, known=known, candidates=candidates)


def test_branches_go_on_streams() -> None:
    model, x = made("branches")
    fast = fake(model)
    with torch.no_grad():
        assert_close(fast(x), model(x))
        other = torch.randn_like(x)
        assert_close(fast(other), model(other))
    (plan,) = fast.plans
    assert plan.chosen == "streams"
    assert plan.schedule.num_streams > 1
    assert plan.seconds["streams"] < plan.seconds["one stream"] < plan.seconds["eager"]
    assert "streams" in fast.verdict


def test_a_chain_stays_on_one_stream() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()).eval()
    fast = fake(model)
    fast.prepare((torch.randn(2, 4),), {})
    assert fast.plans[0].chosen == "one stream"
    assert "nothing to gain" in fast.verdict


def test_the_fastest_candidate_is_taken_and_a_wrong_one_is_not() -> None:
    model, x = made("branches")
    device = Fake()

    def quick(x: torch.Tensor) -> torch.Tensor:
        device.clock = 1e-9
        made: torch.Tensor = model(x)
        return made

    fast = fake(model, device, candidates={"quick": quick})
    with torch.no_grad():
        fast(x)
        assert fast.plans[0].chosen == "quick"
        assert "no streams" in fast.verdict
        wrong = fake(model, device, candidates={"wrong": lambda x: quick(x) * 2})
        wrong(x)
    assert wrong.plans[0].chosen == "streams"
    assert any("wrong: is off by" in note for note in wrong.plans[0].notes)


class Slowed(Fake):
    """Groups of fused ops take so long that the module's own ops on streams are faster."""

    def ready(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> Any:
        made = Fake.ready(self, grouped, runs, schedule, given)
        if not any("batch_norm" in one.code for one in grouped.groups):
            made.seconds *= 20
        return made


def test_plain_ops_on_streams_are_a_candidate() -> None:
    """What is fused joins groups that would have run side by side; so it need not be faster."""
    model, x = made("branches")
    fast = fake(model)
    fast.prepare((x,), {})
    (plan,) = fast.plans
    assert plan.chosen == "streams"
    assert plan.fusion is Fusion.FOLDED
    assert plan.seconds["streams"] < plan.seconds["streams, plain"]
    assert plan.seconds["streams, plain"] < plan.seconds["one stream, plain"]
    slowed = fake(model, Slowed())
    slowed.prepare((x,), {})
    (plan,) = slowed.plans
    assert plan.fusion is Fusion.NONE
    assert len(set(plan.streams)) > 1
    with torch.no_grad():
        assert_close(slowed(x), model(x))


@pytest.mark.parametrize(("factor", "least"), [(1.0, 12), (1e5, 3)])
def test_what_takes_long_is_repeated_less_often(factor: float, least: int) -> None:
    rounds: list[int] = []

    class Long(Fake):
        def ready(
            self,
            grouped: Grouped,
            runs: Sequence[Run],
            schedule: Schedule,
            given: Mapping[str, Any],
        ) -> Any:
            made = Fake.ready(self, grouped, runs, schedule, given)
            made.seconds *= factor
            return made

        def times(self, replays: Sequence[Callable[[], Any]], count: int) -> list[list[float]]:
            rounds.append(count)
            return Fake.times(self, replays, count)

    model, x = made("branches")
    fast = fake(model, Long(), rounds=30, seconds=1000.0 / factor + 5)
    fast.prepare((x,), {})
    *trials, once, compared = rounds
    assert once == 1
    assert set(trials) == {least, 12}
    if least < 12:  # nothing is known of the first one at each of the two levels of fusion
        assert trials.count(12) == 2
    assert compared == (30 if least == 12 else 3)


def test_a_search_leaves_the_random_numbers_as_they_were() -> None:
    class Drops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5, True) + x.sin()

    fast, x = fake(Drops()), torch.randn(64)
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    fast.prepare((x,), {})
    assert torch.equal(torch.rand(3), wanted)


def test_inference_mode_may_end_between_the_search_and_the_calls() -> None:
    model, x = made("branches")
    fast = fake(model)
    with torch.inference_mode():
        inner = x + 1
        assert_close(fast(inner), model(inner))
    with torch.no_grad():
        assert_close(fast(x), model(x))
        assert_close(fast(inner), model(inner))
    with torch.inference_mode():
        assert_close(fast(x), model(x))


class Held:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Holder(Branches):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, Held(y * 2)


def test_objects_among_the_outputs_are_compared_and_made_anew() -> None:
    model = Holder().eval()
    x = made("branches")[1]
    names = set(model.__dict__)
    fast = fake(model, candidates={"wrong": lambda x: (model(x)[0], Held(x))})
    with torch.no_grad():
        y, held = fast(x)
        wanted = model(x)[0]
    assert_close([y, held.value], [wanted, wanted * 2])
    assert type(held) is Held
    assert any("wrong" in note for note in fast.plans[0].notes)
    assert set(model.__dict__) == names


@pytest.mark.parametrize("method", ["local-search", "ppo"])
def test_methods_improve_by_measured_times(method: str) -> None:
    model, x = made("branches")
    device = Fake()
    fast = fake(model, device, method=method, seconds=20.0)
    fast.prepare((x,), {})
    listed = fake(model)
    listed.prepare((x,), {})
    assert device.trials > 12  # list scheduling alone tries fewer
    assert fast.plans[0].seconds["streams"] <= listed.plans[0].seconds["streams"] * 1.001


def test_each_shape_has_its_own_graph(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = made("attention")
    fast = fake(model, most_shapes=2)
    with torch.no_grad():
        for size in (2, 3, 2, 3):
            y = torch.randn(size, 6, 16)
            assert_close(fast(y), model(y))
        assert len(fast.entries) == 2
        with caplog.at_level(logging.WARNING):
            y = torch.randn(5, 6, 16)
            assert_close(fast(y, scale=0.5), model(y, scale=0.5))
            fast(y, scale=0.5)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "more than 2 shapes" in said
    assert len(fast.entries) == 2


def test_inputs_with_gradients_run_as_they_are() -> None:
    model, x = made("attention")
    fast = fake(model)
    fast.prepare((x,), {})
    assert not fast(x)[0].requires_grad
    assert fast(x.requires_grad_())[0].requires_grad


@dataclass
class Line:
    """A stream of a GPU that is not there."""

    waited_for: list[Any] = field(default_factory=list)

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


def test_calls_on_another_stream_come_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now, place = Line(), torch.device("cuda", 1)
    asked: list[Any] = []

    def handle(index: int) -> int:
        asked.append(index)
        return id(now)

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handle, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda at: now)
    turns = Turns()
    turns.take(None)  # not on a GPU
    assert asked == []
    turns.take(place)
    turns.take(place)
    first, now = now, Line()
    turns.take(place)
    second, now = now, first
    turns.take(place)
    assert first.waited_for == [second]
    assert second.waited_for == [first]
    assert asked == [1] * 4


def test_streams_are_those_of_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Streams:
        def __init__(self, index: int) -> None:
            self.index = index

    monkeypatch.setattr(own, "OwnStreams", Streams)
    monkeypatch.setattr(own, "_idle", {})
    first, second, other = own.Lease(0), own.Lease(0), own.Lease(1)
    assert first.own is not second.own
    assert other.own.index == 1
    known = {id(first.own), id(second.own)}
    holder = [first]  # as a graph that is there for longer than who captured it
    del first
    third = own.Lease(0)
    assert id(third.own) not in known
    free = holder.pop().own
    gc.collect()
    assert own.Lease(0).own is free


def test_memory_for_workspaces_is_that_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        done.append(index)
        yield
        done.append("end")

    monkeypatch.setattr(own, "new_stream", lambda index: object())
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: done.append("memory"))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: done.append("matrix"))
    own.OwnStreams(1)
    assert done == [1, "memory", "matrix", "end"]

    def refuses() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support createOrIncrefPool. If you")

    monkeypatch.setattr(torch.cuda, "MemPool", refuses)
    with pytest.raises(
        UnsuitableError, match=r"apart: .* does not yet support createOrIncrefPool$"
    ):
        own.OwnStreams(1)


class Captures:
    """Torch's graphs and streams, on a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collects: list[bool] = []
        """Whether the garbage collector was on, whenever something was done."""
        self.pools: list[Any] = []
        """Of the captures."""
        self.gpu = Gpu(index=0)
        self.gpu._lease = SimpleNamespace(own=self)  # type: ignore[assignment]
        nothing: Any = lambda *_: contextlib.nullcontext()  # noqa: E731
        for name in ("stream", "synchronize", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, nothing)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)

    def streams(self, count: int) -> list[Any]:
        return [None] * count

    def hold_workspaces(self) -> None:
        self.collects.append(gc.isenabled())

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.collects.append(gc.isenabled())
        self.pools.append(pool)

    def capture_end(self) -> None:
        self.collects.append(gc.isenabled())


def test_no_graph_goes_between_its_workspaces_and_what_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When one goes, torch lets go of the workspaces of its stream."""
    there = Captures(monkeypatch)

    def body() -> None:
        there.collects.append(gc.isenabled())

    def fails() -> None:
        raise RuntimeError("an op that cannot be captured")

    assert gc.isenabled()
    there.gpu._warm(body, 2)
    assert there.collects == [False] * 3
    there.gpu._capture(body)
    assert there.collects == [False] * 7
    for run in (lambda: there.gpu._warm(fails, 1), lambda: there.gpu._capture(fails)):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            run()
        assert gc.isenabled()


def test_shared_memory_of_captures_is_kept_though_the_first_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Captures(monkeypatch)

    def short() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(there, "hold_workspaces", short)
    with pytest.raises(torch.OutOfMemoryError):
        there.gpu.capture(lambda: None)
    monkeypatch.setattr(there, "hold_workspaces", lambda: None)
    there.gpu.capture(lambda: None)
    there.gpu.capture(lambda: None)
    assert there.pools == [there.gpu._pool] * 3  # of what keeps it, and of the two


def test_streams_that_there_are_none_of_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Bare(Fake):
        @contextlib.contextmanager
        def settings(self) -> Iterator[None]:
            own.new_stream(0)
            yield

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    model, x = made("branches")
    for fusion in (Fusion.NONE, Fusion.FOLDED):
        caplog.clear()
        fast = fake(model, Bare(), fusion=fusion)
        with torch.no_grad():
            assert_close(fast(x), model(x))
        (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert "need the package cuda-bindings" in line


def test_outputs_are_copies() -> None:
    model, x = made("branches")
    with torch.no_grad():
        fast = fake(model)
        first = fast(x)
        kept = first.clone()
        fast(torch.randn_like(x))
        assert torch.equal(first, kept)


def test_timelines_name_each_group_twice(tmp_path: Path) -> None:
    model, x = made("branches")
    fast = fake(model)
    fast.prepare((x,), {})
    lines = fast.timelines()
    assert len(lines.measured) == len(lines.expected) == len(fast.plans[0].groups)
    assert lines.expected_seconds > 0
    events = [e for e in lines.chrome_trace()["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 2 * len(lines.names)
    assert {e["tid"] for e in events} == set(fast.plans[0].streams)
    assert "stream 0" in lines.table()
    page = fast.report(tmp_path / "page.html").read_text("utf-8")
    assert "Branches on cpu - Placewright" in page
    assert fast.plans[0].groups[-1] in page


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_is_applied_without_a_search(tmp_path: Path) -> None:
    model, x = made("branches")
    fast = fake(model)
    fast.prepare((x,), {})
    fast.save(tmp_path / "plan.json")
    known = plans.load(tmp_path / "plan.json")
    assert known == fast.plans
    device = Fake()
    again = fake(model, device, known=known)
    with torch.no_grad():
        assert_close(again(x), model(x))
    assert (device.trials, device.timed) == (1, 0)
    assert again.plans == fast.plans
    other = Branches().eval()
    other.branches[0] = nn.Identity()
    with pytest.raises(PlacementError, match="other groups"):
        fake(other, known=known)(x)


def test_plans_that_are_none_are_refused(tmp_path: Path) -> None:
    model, x = made("branches")
    fast = fake(model)
    fast.prepare((x,), {})
    path = tmp_path / "plan.json"
    fast.save(path)
    whole = json.loads(path.read_text())

    def refused(document: object) -> None:
        path.write_text(json.dumps(document))
        with pytest.raises(PlacementError, match=r"plan\.json"):
            plans.load(path)

    refused([])
    refused(whole | {"format": "another"})
    refused(whole | {"plans": 3})
    for key, value in (
        ("order", [0]), ("fusion", "much"), ("streams", ["a"]), ("kernels", []), ("more", 1),
        ("seconds", {"eager": 0.0}), ("inputs", [[[1]]]), ("chosen", ["eager"]), ("trials", 1e999),
    ):  # fmt: skip
        refused(whole | {"plans": [whole["plans"][0] | {key: value}]})
    bad = dict(whole["plans"][0])
    bad.pop("chosen")
    refused(whole | {"plans": [bad]})
    for name in ("group_seconds", "group_demand"):
        for number in (-1.0, float("nan"), float("inf")):
            times = [number] * len(whole["plans"][0][name])
            refused(whole | {"plans": [whole["plans"][0] | {name: times}]})
    streams = [99] * len(whole["plans"][0]["streams"])
    refused(whole | {"plans": [whole["plans"][0] | {"streams": streams}]})


def test_plans_with_kernels_or_an_order_that_cannot_be_are_refused() -> None:
    model, x = made("branches")
    fast = fake(model)
    fast.prepare((x,), {})
    (plan,) = fast.plans
    for kernel in ("magic", "region"):
        bad = replace(plan, kernels=(kernel,) * len(plan.kernels))
        with pytest.raises(PlacementError, match=f"kernel '{kernel}' for "):
            fake(model, known=[bad])(x)
    with pytest.raises(PlacementError, match="before one that it waits for"):
        fake(model, known=[replace(plan, order=plan.order[::-1])])(x)


def test_torch_compile_calls_it() -> None:
    model, x = made("branches")
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        config = AccelerateConfig(method="list", fusion=Fusion.FOLDED)
        found.append(acceleration.on_first_call(graph, Fake(), config))
        call: Callable[..., Any] = found[-1]
        return call

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn_like(x)
            assert_close(compiled(x), model(x))
    assert len(found) == 1
    assert "placewright" in torch._dynamo.list_backends(exclude_tags=())


def test_what_torch_compile_cannot_make_one_graph_of_is_several() -> None:
    class Parts(Branches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).relu()
            torch._dynamo.graph_break()
            y = self.head(torch.cat([y] * 7, 1)[:, :32]) + y
            y.add_(1)
            made: torch.Tensor = y * 2 if y.sum() > 0 else y - 1
            return made

    model, x = Parts().eval(), made("branches")[1]
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        found.append(graph)
        config = AccelerateConfig(method="list", fusion=Fusion.FOLDED, rounds=2)
        return acceleration.on_first_call(graph, Fake(), config)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    state = {name: value * 1.1 for name, value in model.state_dict().items()}
    with torch.no_grad():
        for size in (2, 3, 2, 5):
            x = torch.randn(size, 3, 12, 12)
            assert_close(compiled(x), model(x))
        # Nobody can ask a compiled module to take over its parameters.
        model.load_state_dict(state)
        assert_close(compiled(x), model(x))
    assert len(found) > 2


def test_a_compiled_module_that_writes_to_its_input_runs_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def backend(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        return acceleration.on_first_call(graph, Fake(), AccelerateConfig(method="list"))

    torch._dynamo.reset()
    compiled = torch.compile(InPlace(), backend=backend)
    with torch.no_grad():
        for _ in range(3):
            x = torch.zeros(3)
            assert compiled(x).tolist() == [2.0] * 3
            assert x.tolist() == [1.0] * 3
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.startswith("a graph of torch.compile runs as it is: it writes to its input")


def test_an_option_that_there_is_not_is_said() -> None:
    model, x = made("branches")
    torch._dynamo.reset()
    options: dict[str, Any] = {"second": 3.0}
    compiled = torch.compile(model, backend="placewright", options=options)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="no argument 'second'; did you mean seconds"),
    ):
        compiled(x)


def test_modules_of_the_same_code_have_their_own_parameters_under_compile() -> None:
    config = AccelerateConfig(method="list", fusion=Fusion.FOLDED, most_shapes=2)
    device = Fake()

    def backend(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        return acceleration.on_first_call(graph, device, config)

    torch._dynamo.reset()
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval() for _ in range(3)]

    @torch.compile(backend=backend)
    def compiled(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x)

    x = torch.randn(2, 4)
    with torch.no_grad():
        for model in [*models, *models]:
            assert_close(compiled(model, x), model(x))
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]

    class Product(nn.Module):
        def forward(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return x @ weight

    call = acceleration.on_first_call(torch.fx.symbolic_trace(Product()), device, config)
    with torch.no_grad():
        for weight in [*weights, *weights]:
            assert_close(call(weight, x), x @ weight)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, by: Any) -> torch.Tensor:
        return x * float(by.sum()) if not isinstance(by, torch.Tensor) else x * by


def test_a_number_on_the_cpu_is_not_captured() -> None:
    with pytest.raises(UnsuitableError, match="'by' is on the CPU"):
        trace(Scaled(), (torch.zeros(3, device="meta"), torch.tensor(2.0)), {})
    trace(Scaled(), (torch.zeros(3), torch.tensor(2.0)), {})


def test_inputs_that_cannot_be_compared_run_as_the_module_each_time() -> None:
    fast = accelerated(Scaled(), Fake(), AccelerateConfig(method="list"))
    for _ in range(3):
        assert_close(fast(torch.ones(3), np.ones(2)), torch.full((3,), 2.0))


def test_a_copy_of_an_input_is_no_input() -> None:
    class Copies(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.clone(), x, x.clone().detach(), x.detach(), x + 1

    fast = accelerated(Copies(), Fake(), AccelerateConfig(method="list", fusion=Fusion.NONE))
    x = torch.zeros(3)
    first, itself, second, same, _ = fast(x)
    assert fast.entries[0].built is not None
    assert itself.data_ptr() == same.data_ptr() == x.data_ptr()
    first.add_(1)
    second.add_(2)
    assert_close(x, torch.zeros(3))
    assert_close(first, torch.ones(3))
    assert_close(second, torch.full((3,), 2.0))


def test_plans_are_told_apart_where_only_plain_arguments_differ() -> None:
    class Either(nn.Module):
        def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
            return torch.tanh(x).cumsum(0) if other else torch.sigmoid(x).cumprod(0)

    model, x, config = Either(), torch.randn(3, 4), AccelerateConfig(method="list")
    first = accelerated(model, Fake(), config)
    for other in (True, False):
        first(x, other)
    assert len(first.plans) == 2
    for known in (first.plans, first.plans[::-1]):
        again = accelerated(model, Fake(), config, known=known)
        for other in (True, False):
            assert_close(again(x, other), model(x, other))
    again = accelerated(model, Fake(), config, known=first.plans[:1])
    with pytest.raises(PlacementError, match="other groups"):
        again(x, False)
    again = accelerated(model, Fake(), config, known=first.plans[:1], strict=False)
    assert_close(again(x, False), model(x, False))


class Sums(nn.Module):
    """Two parameters with the same gradient, one whose gradient is that of the loss, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.offset, self.unused = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.tanh(x * (self.left + self.right)).sum() + self.offset
        return made


@pytest.mark.parametrize("captured", [True, False])
def test_gradients_of_a_step_can_be_written_to(captured: bool) -> None:
    model = Sums()
    config = AccelerateConfig(method="list", fusion=Fusion.NONE, copy_outputs=False)
    x = torch.randn(3, 4)
    device = Fake() if captured else Cpu()
    step = acceleration.train_step(model, device, config, Task(train=True), Inputs((x,)))
    if not captured:
        step.fast._maker = lambda args, kwargs: Entry(why_not="a test")
    wanted = Sums()
    wanted.load_state_dict(model.state_dict())
    for _ in range(3):
        for parameter in wanted.parameters():
            parameter.grad = None
        loss = wanted(x)
        loss.backward()
        assert_close(step(x), loss.detach())
        for (name, mine), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                assert_close(mine.grad, theirs.grad)
                assert mine.grad is not None
                mine.grad.zero_()  # as an optimizer may
    assert (step.fast.entries[0].built is not None) == captured


def test_the_backend_says_why_it_leaves_a_module_alone(caplog: pytest.LogCaptureFixture) -> None:
    model, x = made("attention")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="placewright")
    with caplog.at_level(logging.WARNING):
        assert compiled(x)[0].requires_grad
        with torch.no_grad():
            assert_close(compiled(x), model(x))
    said = [r.getMessage() for r in caplog.records if "placewright" in r.getMessage()]
    assert len(said) == 2
    assert "gradients are wanted" in said[0]
    assert "not on a CUDA device" in said[1]


def test_simplify_and_fold_do_not_touch_what_was_traced() -> None:
    model, x = made("branches")
    net = trace(model, (x,), {})
    before = str(net.graph)
    copy = net.copy()
    passes.simplify(copy)
    assert passes.fold(copy) == 7
    group(copy, Fusion.REGIONS)
    assert str(net.graph) == before


def test_an_unsuitable_module_says_so() -> None:
    with pytest.raises(UnsuitableError, match="exported"):
        trace(ByData(), (torch.ones(2),), {})


def test_the_tuner_drops_what_fails() -> None:
    class Broken(Cpu):
        def seconds_of(self, run: Run, inputs: Sequence[Any]) -> float:
            code = run.code if isinstance(run, torch.fx.GraphModule) else ""
            if "addmm" in code:
                raise RuntimeError("no such kernel")
            return 1e-7 if "pointwise_product" in code else 1e-5

    model, x = made("residual")
    low = lowered(model, x, fusion=Fusion.FOLDED)
    with torch.no_grad():
        tuned = Tuner(device=Broken()).tune(low.grouped, low.given, Fusion.FOLDED)
    assert "product" in tuned.names


# --- training ------------------------------------------------------------------------------------


def loss_of_branches(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels)


@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.FOLDED])
def test_a_training_step_leaves_the_gradients_of_autograd(fusion: Fusion) -> None:
    model = Branches()
    other = copy.deepcopy(model)
    x, y = torch.randn(4, 3, 12, 12), torch.randint(0, 5, (4,))
    task = Task(train=True, loss_fn=loss_of_branches, targets=y)
    config = AccelerateConfig(method="list", rounds=2, copy_outputs=False, fusion=fusion)
    step = acceleration.train_step(model, Fake(), config, task, Inputs.of(x))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, other)]
    for _ in range(3):
        x, y = torch.randn_like(x), torch.randint(0, 5, (4,))
        loss = step(x, targets=y)
        wanted = loss_of_branches(other(x), y)
        optimizers[1].zero_grad()
        wanted.backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert_close(a.grad, b.grad, 1e-4)
        for optimizer in optimizers:
            optimizer.step()
        for c, d in zip(model.buffers(), other.buffers(), strict=True):
            assert_close(c, d, 1e-5)
    assert step.fast.plans[0].chosen == "streams"
    assert "streams" in step.verdict


def test_the_plan_of_a_step_is_applied_again(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), torch.randn(4, 4)
    task = Task(train=True, loss_fn=loss_of_branches, targets=torch.randint(0, 5, (4,)))
    config = AccelerateConfig(method="list", copy_outputs=False, fusion=Fusion.FOLDED)
    step = acceleration.train_step(model, Fake(), config, task, Inputs.of(x))
    wanted = step(x)
    step.save(tmp_path / "plan.json")
    device = Fake()
    again = acceleration.train_step(
        model, device, config, task, Inputs.of(x), known=plans.given(tmp_path / "plan.json")
    )
    assert_close(again(x), wanted)
    assert (device.trials, device.timed) == (1, 0)
    assert again.fast.plans == step.fast.plans
    document = json.loads((tmp_path / "plan.json").read_text())
    assert (document["model"], document["device"]) == ("Sequential", "cpu")


def test_gradients_of_weights_run_beside_the_backward_chain() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)))
    x = torch.randn(2, 4, 8, 8)
    task = Task(train=True, loss_fn=lambda y: y.square().mean())
    traced = trace_step(model, (x,), {}, task)
    net = traced.net
    before = untuned(group(net.copy(), Fusion.NONE)).work(group(net.copy(), Fusion.NONE))
    split = net.copy()
    assert split_gradients(split) == 3  # the first one's input needs none
    grouped = group(split, Fusion.NONE)
    after = untuned(grouped).work(grouped)
    assert len(after.seconds) == len(before.seconds) + 3
    assert after.critical_seconds <= before.critical_seconds


def test_a_step_that_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Weighted(ByData):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.weight)

    model, x = Weighted(), torch.ones(4)
    task = Task(train=True, loss_fn=lambda y: y.sum())
    step = acceleration.train_step(model, Fake(), AccelerateConfig(), task, Inputs.of(x))
    with caplog.at_level(logging.WARNING):
        assert step(x).item() == 8
        assert step(-x).item() == -8
    assert torch.equal(model.weight.grad, -torch.ones(4))  # type: ignore[arg-type]
    said = [r.getMessage() for r in caplog.records if "runs as it is" in r.getMessage()]
    assert len(said) == 1


def test_what_rounds_otherwise_is_as_exact() -> None:
    """Far from the module's outputs in float16, and as near to the exact ones: it is right."""

    class Sharp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x + 1000) - 1000) * 3  # what is left has lost most of its digits

    model, x = Sharp(), torch.randn(64).half()
    device = Fake()

    def other(x: torch.Tensor) -> torch.Tensor:
        device.clock = 1e-9
        return x * 3

    fast = fake(model, device, candidates={"other": other, "wrong": lambda x: other(x) * 0})
    with torch.no_grad():
        fast(x)
    assert fast.plans[0].chosen == "other"
    assert [note for note in fast.plans[0].notes if note.startswith("wrong: is off")]
