"""Modules that do not fit: what runs is what was planned, and gives what the module gives."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import random
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file
from torch import nn

import placewright.torch as pt
from placewright.backends.pytorch.modules import units_of
from placewright.backends.pytorch.offload import checkpoint, links, products
from placewright.backends.pytorch.offload.estimating import estimated_costs
from placewright.backends.pytorch.offload.homes import Blocks, Home
from placewright.backends.pytorch.offload.links import SlowLink
from placewright.backends.pytorch.offload.plan import HOST, OffloadPlan, Shape, UnitPlan
from placewright.backends.pytorch.offload.planner import Choice, Limits, Planner
from placewright.backends.pytorch.offload.products import HostProducts, product
from placewright.backends.pytorch.offload.recording import record
from placewright.backends.pytorch.offload.runtime import offload
from placewright.backends.pytorch.offload.timeline import Copy, Costs, Step, UnitCost, pass_seconds
from placewright.backends.pytorch.offload.window import Route, Source, Window, arrange
from placewright.cluster import Cluster
from placewright.errors import ModelError, PlacementError, SearchError
from placewright.evaluators.simulated import SimulatedEvaluator
from tests.test_homes import layers, machine, posed
from tests.test_homes import placed as placed_on

DEVICE = "cpu:1"
FAST = 1e9


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = x + self.dropout(self.down(torch.relu(self.up(x))))
        return made if scale is None else made * scale


class Stack(nn.Module):
    _no_split_modules = ("Block", "LSTM")

    def __init__(self, depth: int = 6, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale)
        y: torch.Tensor = self.head(x)
        return y


def plan_for(
    model: nn.Module, ways: Mapping[str, str], *, slots: float = 2, shapes: Sequence[Shape] = ()
) -> OffloadPlan:
    """`ways`: unit -> for each shape `s` (its weights travel) or `c` (the host computes)."""
    shapes = shapes or (Shape(name="all", rows=8),)
    units, largest = [], 0
    for path in units_of(model, None).order:
        module = dict(model.named_modules()).get(path)
        tensors = (
            [dict(model.named_parameters())[path]]
            if module is None
            else list({id(t): t for t in [*module.parameters(), *module.buffers()]}.values())
        )
        size = sum(t.numel() * t.element_size() for t in tensors)
        way = ways.get(path, "")
        on = {s.name: HOST if w == "c" else DEVICE for s, w in zip(shapes, way, strict=False)}
        units.append(
            UnitPlan(
                path=path, size=size, home=HOST if way else DEVICE,
                computed_on=on or {s.name: DEVICE for s in shapes},
            )
        )  # fmt: skip
        if "s" in way:
            largest = max(largest, size + 512 * len(tensors))
    return OffloadPlan(
        model=type(model).__name__, device=DEVICE, units=tuple(units), shapes=tuple(shapes),
        window_bytes=int(slots * largest),
    )  # fmt: skip


def stack_and_plan(ways: str = "_sscsc", **settings: Any) -> tuple[Stack, Stack, OffloadPlan]:
    """A model, another like it, and a plan: `_` stays."""
    torch.manual_seed(0)
    model = Stack(len(ways), **settings)
    named = {f"blocks.{n}": way for n, way in enumerate(ways) if way != "_"}
    return model, copy.deepcopy(model), plan_for(model, named)


# --- what runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", ["______", "ssssss", "cccccc", "_sscsc", "cs_cs_"])
def test_outputs_are_those_of_the_module(ways: str) -> None:
    model, other, plan = stack_and_plan(ways)
    placed = offload(model, plan, SlowLink(FAST))
    for size in (8, 3, 8):
        x = torch.randn(size, 16)
        with torch.no_grad():
            torch.testing.assert_close(placed(x), other(x))


def test_parameters_keep_their_names_and_values() -> None:
    model, other, plan = stack_and_plan()
    placed = offload(model, plan, SlowLink(FAST))
    assert isinstance(placed, Stack)
    with torch.no_grad():
        placed(torch.randn(8, 16))
    state, before = placed.state_dict(), other.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert {id(p) for p in placed.parameters()} == {id(p) for p in model.parameters()}


def test_weights_that_are_loaded_or_written_to_are_used_from_then_on() -> None:
    model, other, plan = stack_and_plan()
    placed = offload(model, plan, SlowLink(FAST))
    x = torch.randn(8, 16)
    with torch.no_grad():
        placed(x)
        for tensor in other.parameters():
            tensor.mul_(1.5)
        placed.load_state_dict(other.state_dict())
        torch.testing.assert_close(placed(x), other(x))
        for one, two in zip(placed.parameters(), other.parameters(), strict=True):
            one.add_(0.1)
            two.add_(0.1)
        torch.testing.assert_close(placed(x), other(x))


def test_restored_it_is_the_module_that_it_was() -> None:
    model, other, plan = stack_and_plan()
    placed = offload(model, plan, SlowLink(FAST))
    x = torch.randn(8, 16)
    assert placed.restore() is model
    torch.testing.assert_close(model(x), other(x))
    with pytest.raises(PlacementError, match="was restored"):
        placed(x)


def test_another_plan_can_follow() -> None:
    model, other, plan = stack_and_plan("_sscsc")
    link = SlowLink(FAST)
    placed = offload(model, plan, link)
    x = torch.randn(8, 16)
    for ways in ("s__cs_", "cccccc", "______", "ssssss", "_sscs_"):
        named = {f"blocks.{n}": way for n, way in enumerate(ways) if way != "_"}
        placed.offload.use(plan_for(other, named))
        with torch.no_grad():
            for _ in range(4):
                torch.testing.assert_close(placed(x), other(x))
        # Nothing holds on to the buffer of a plan before.
        assert link.live_bytes == placed.offload.plan.window_bytes


def test_who_computes_may_differ_from_shape_to_shape() -> None:
    model, other, _ = stack_and_plan()
    shapes = (Shape(name="many", rows=64), Shape(name="one", rows=1))
    ways = {f"blocks.{n}": way for n, way in enumerate(("ss", "sc", "ss", "sc", "sc"))}
    plan = plan_for(other, ways, shapes=shapes)
    link = SlowLink(FAST)
    placed = offload(model, plan, link)
    with torch.no_grad():
        for rows in (60, 1, 1, 2, 100, 1):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(placed(x), other(x))


def test_the_buffer_is_as_large_as_planned_and_all_there_is() -> None:
    model, _, plan = stack_and_plan("ssssss")
    link = SlowLink(FAST)
    placed = offload(model, plan, link)
    with torch.no_grad():
        for _ in range(3):
            placed(torch.randn(8, 16))
    assert link.peak_bytes == plan.window_bytes < plan.host_bytes / 2


def test_weights_travel_once_in_each_pass_and_ahead_of_use() -> None:
    model, _, plan = stack_and_plan("s_ss_s")
    link = _Noting(FAST)
    placed = offload(model, plan, link)
    with torch.no_grad():
        placed(torch.randn(8, 16))
        link.finish()
        first = len(link.copied)
        placed(torch.randn(8, 16))
        link.finish()
    # Two slots: all four of a pass, and the first two of the next one already.
    assert first == 6
    assert len(link.copied) == 10
    # When the first is waited for, the second is on its way.
    assert link.queued_at_waits[0] == 2


class _Noting(SlowLink):
    def __init__(self, bytes_per_second: float) -> None:
        super().__init__(bytes_per_second)
        self.queued = 0
        self.queued_at_waits: list[int] = []

    def copy(self, pairs: Any, after: Any) -> Any:
        self.queued += 1
        return super().copy(pairs, after)

    def wait(self, mark: Any) -> None:
        self.queued_at_waits.append(self.queued)
        super().wait(mark)


def test_a_recurrent_module_travels() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTM(8, 8), nn.LSTM(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.second(self.first(x)[0])[0]
            return y

    model = Recurrent()
    other = copy.deepcopy(model)
    placed = offload(model, plan_for(model, {"first": "s", "second": "s"}), SlowLink(FAST))
    x = torch.randn(5, 2, 8)
    with torch.no_grad():
        torch.testing.assert_close(placed(x), other(x))
    placed(x).sum().backward()
    other(x).sum().backward()
    for one, two in zip(placed.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_tied_weights_live_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(10, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.body(self.embed(ids)))
            return y

    model = Tied()
    other = copy.deepcopy(model)
    plan = plan_for(model, {"embed": "c", "head": "s", "body": "s"})
    placed = offload(model, plan, SlowLink(FAST))
    ids = torch.arange(8)
    with torch.no_grad():
        torch.testing.assert_close(placed(ids), other(ids))
    assert placed.head.weight is placed.embed.weight
    with pytest.raises(PlacementError, match=r"head\.weight is tied .* two homes: cpu:1 and cpu"):
        offload(Tied(), plan_for(model, {"head": "s"}), SlowLink(FAST))


# --- captured units -------------------------------------------------------------------------------


def test_units_are_captured_and_follow_their_inputs() -> None:
    model, other, plan = stack_and_plan("_s_s__")
    placed = offload(model, plan, SlowLink(FAST))
    scale = torch.full((16,), 0.5)
    with torch.no_grad():
        for n in range(6):
            x = torch.randn(2, 16)
            scale = scale if n % 2 else torch.rand(16)
            torch.testing.assert_close(placed(x, scale), other(x, scale))
            scale.mul_(1.1)
            torch.testing.assert_close(placed(x, scale), other(x, scale))
    assert placed.offload.graphs.count >= 7


def test_outputs_that_somebody_holds_do_not_change() -> None:
    model, other, plan = stack_and_plan("_s_s__")
    placed = offload(model, plan, SlowLink(FAST))
    xs = [torch.randn(2, 16) for _ in range(8)]
    with torch.no_grad():
        kept = [placed(x) for x in xs]
        part = placed(xs[0])[:, :2]
        placed(xs[1])
        placed(xs[2])
        for x, y in zip(xs, kept, strict=True):
            torch.testing.assert_close(y, other(x))
        torch.testing.assert_close(part, other(xs[0])[:, :2])
    assert placed.offload.graphs.count


def test_a_unit_that_writes_to_its_input_is_not_captured() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True)
            self.c = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.c(self.b(self.a(x)))
            return y

    model = Writes()
    other = copy.deepcopy(model)
    placed = offload(model, plan_for(model, {"a": "s", "c": "s"}), SlowLink(FAST))
    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(2, 4)
            torch.testing.assert_close(placed(x), other(x))


def test_units_with_hooks_inside_are_not_captured() -> None:
    """What is captured does not call them again."""

    class Captures(SlowLink):
        replays = 0

        def capture(self, run: Any) -> Any:
            replay, outputs = super().capture(run)

            def counted() -> None:
                self.replays += 1
                replay()

            return counted, outputs

    model, other, plan = stack_and_plan("_s____")
    link = Captures(FAST)
    placed = offload(model, plan, link)
    x = torch.randn(2, 16)
    seen: list[torch.Tensor] = []

    def calls(times: int) -> int:
        before = link.replays
        with torch.no_grad():
            for _ in range(times):
                torch.testing.assert_close(placed(x), other(x))
        return link.replays - before

    assert calls(6) >= 3 * 7
    hooks = [block.up.register_forward_hook(lambda *given: seen.append(given[2]))
             for block in placed.blocks]  # fmt: skip
    assert calls(2) == 0  # the head, too: its input is no longer where it was
    assert len(seen) == 2 * 6
    for hook in hooks:
        hook.remove()
    assert calls(2) == 2 * 7


@pytest.mark.parametrize("way", ["c", "s"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_unit_writes_to_its_input_is_seen(way: str, mode: Any) -> None:
    """By the host, and on the device, also in the call in which it would be captured."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(self.weight)
            return x * 2

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Adds(), Adds()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0
            y: torch.Tensor = self.a(x) + self.b(x) + x
            return y

    model = Twice()
    other = copy.deepcopy(model)
    placed = offload(model, plan_for(model, {"a": way, "b": way}), SlowLink(FAST))
    with mode():
        for _ in range(5):
            torch.testing.assert_close(placed(torch.ones(2, 4)), other(torch.ones(2, 4)))


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("frozen", [False, True])
def test_training_steps_are_those_of_the_module(optimizer: Any, frozen: bool) -> None:
    model, other, plan = stack_and_plan("_sscsc")
    each: Any
    for each in (model, other):
        if frozen:
            each.blocks[1].requires_grad_(False)
            each.blocks[3].up.weight.requires_grad_(False)
    placed = offload(model, plan, SlowLink(FAST))
    ours = optimizer(placed.parameters(), lr=0.01)
    theirs = optimizer(other.parameters(), lr=0.01)
    for _ in range(3):
        x = torch.randn(8, 16)
        for module, update in ((placed, ours), (other, theirs)):
            update.zero_grad()
            module(x).square().mean().backward()
            update.step()
    for one, two in zip(placed.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert all(p.grad is None for p in placed.parameters() if not p.requires_grad)


def test_dropout_is_the_same_backwards() -> None:
    model, other, plan = stack_and_plan("ssss", dropout=0.5)
    placed = offload(model, plan, SlowLink(FAST))
    x = torch.randn(8, 16)
    for module in (placed, other):
        torch.manual_seed(7)
        module(x).square().mean().backward()
    for one, two in zip(placed.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


# --- what cannot be ------------------------------------------------------------------------------


def test_a_unit_that_moves_its_own_weights_is_named() -> None:
    class Moves(Block):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            self.up.weight.data = self.up.weight.data.clone()
            return super().forward(x, scale)

    for way in "sc":
        model, _, plan = stack_and_plan(f"__{way}_")
        model.blocks[2].__class__ = Moves
        placed = offload(model, plan, SlowLink(FAST))
        with (
            torch.no_grad(),
            pytest.raises(PlacementError, match=r"blocks\.2 moved its own weights .*up\.weight"),
        ):
            placed(torch.randn(8, 16))


def test_a_buffer_that_is_written_to_must_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    placed = offload(model, plan_for(model, {"1": "s"}), SlowLink(FAST))
    with torch.no_grad(), pytest.raises(PlacementError, match="1 writes to its buffer"):
        placed(torch.randn(8, 4))


def test_a_placed_module_is_not_moved_or_copied() -> None:
    model, _, plan = stack_and_plan()
    placed = offload(model, plan, SlowLink(FAST))
    with pytest.raises(PlacementError, match=r"call restore\(\) first"):
        placed.half()
    with pytest.raises(PlacementError, match="cannot be copied"):
        copy.deepcopy(placed)
    with pytest.raises(PlacementError, match="cannot be pickled; save its state_dict"):
        pickle.dumps(placed)


def test_a_plan_that_does_not_hold_together_is_refused() -> None:
    _, _, plan = stack_and_plan()
    with pytest.raises(PlacementError, match="the plan is for a Stack, and this is a Linear"):
        offload(nn.Linear(2, 2), plan, SlowLink(FAST))
    with pytest.raises(PlacementError, match=r"no place for 'blocks\.6"):
        offload(Stack(8), plan, SlowLink(FAST))
    with pytest.raises(PlacementError, match=r"travels and has .* the buffer for that is 10 B"):
        OffloadPlan(**{**vars(plan), "window_bytes": 10})
    document = plan.to_json()
    assert OffloadPlan.from_json(document) == plan
    unit, shape = document["units"][0], document["shapes"][0]
    for change, said in (
        ({"units": [{"path": "blocks.0"}]}, "'units.0' has no 'bytes'"),
        ({"units": [unit | {"path": ["blocks.0"]}]}, "'units.0.path' must be a text"),
        (
            {"units": [unit | {"computed_on": {"all": 1}}]},
            r"'units.0.computed_on.all' must be a te",
        ),
        ({"units": [unit | {"bytes": -1}]}, "'units.0.bytes' must be a whole number"),
        ({"shapes": [shape | {"weight": math.nan}]}, "'shapes.0.weight' must be a positive"),
        ({"window_bytes": math.inf}, "'window_bytes' must be a whole number"),
        ({"window_bytes": 10**400}, "'window_bytes' must be .* more than sixty digits"),
        ({"notes": "abc"}, "'notes' must be a list"),
    ):
        with pytest.raises(PlacementError, match=f"p.json: malformed plan: {said}"):
            OffloadPlan.from_json({**document, **change}, where="p.json")


def test_system_refuses_to_lock_memory() -> None:
    model, other, plan = stack_and_plan()
    placed = offload(model, plan, SlowLink(FAST, pins=False))
    assert not placed.offload.link.pinned
    with torch.no_grad():
        torch.testing.assert_close(placed(torch.ones(2, 16)), other(torch.ones(2, 16)))


# --- the buffer ----------------------------------------------------------------------------------


class _Numbers(Source):
    def __init__(self, size: int, number: int) -> None:
        self.memory = torch.full((size,), number, dtype=torch.uint8)

    def size(self) -> int:
        return self.memory.numel()

    def version(self) -> int:
        return self.memory._version

    def pairs(self, region: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        return [(region, self.memory)]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_asked_for_in_whatever_order_is_there(seed: int) -> None:
    draw = random.Random(seed)
    sources = {f"u{n}": _Numbers(draw.choice([512, 1024, 700, 4096]), n) for n in range(9)}
    names = list(sources)
    window = Window(SlowLink(1e8), 4096 + draw.choice([0, 512, 3000]), sources)
    for _ in range(12):
        order = draw.sample(names, draw.randint(1, 9))
        if draw.random() < 0.3:
            order = [*order, *order[::-1]]
        sizes = {name: sources[name].size() for name in order}
        route = Route(order=tuple(order), starts=arrange(sizes, window.memory.numel()))
        for _ in range(draw.randint(1, 3)):
            window.follow(route)
            for name in _with_surprises(order, names, draw):
                if draw.random() < 0.1:
                    sources[name].memory.add_(16)
                region = window.take(name)
                assert torch.equal(region, sources[name].memory), name
                window.give_back(name)


def _with_surprises(order: list[str], names: list[str], draw: random.Random) -> Iterator[str]:
    for name in order:
        if draw.random() < 0.9:
            yield name
        if draw.random() < 0.1:
            yield draw.choice(names)


class _Recording(SlowLink):
    """Says after which marks of the device each copy begins."""

    def __init__(self) -> None:
        super().__init__(float("inf"))
        self.marks: list[Any] = []
        self.after: list[Sequence[Any]] = []

    def mark(self) -> Any:
        self.marks.append(super().mark())
        return self.marks[-1]

    def copy(self, pairs: Any, after: Sequence[Any]) -> Any:
        self.after.append(after)
        return super().copy(pairs, after)


def test_a_copy_waits_for_what_computed_with_the_bytes_before() -> None:
    link = _Recording()
    sources = {"a": _Numbers(1024, 1), "b": _Numbers(1024, 2)}
    window = Window(link, 1024, sources)
    window.follow(Route(order=("a",), starts={"a": 0}))
    window.take("a")
    window.give_back("a")  # and is ready for the next pass, without another copy
    window.follow(Route(order=("b",), starts={"b": 0}))
    assert len(link.after) == 2
    assert link.marks[-1] in link.after[-1]


def test_many_small_tensors_go_through_the_mailbox_in_turns() -> None:
    sent: list[int] = []

    class Mailbox:
        def send(self, value: torch.Tensor) -> int:
            sent.append(int(value))
            return len(sent) - 1

        def read(self, place: int) -> torch.Tensor:
            assert len(sent) - place <= links._Mailbox.SLOTS, "overwritten"
            return torch.tensor(sent[place])

    class Event:
        def record(self, stream: Any) -> None: ...
        def synchronize(self) -> None: ...

    link = object.__new__(links.CudaLink)
    link.device, link._mailbox = torch.device("cpu"), Mailbox()  # type: ignore[assignment]
    cuda = types.SimpleNamespace(Event=Event, current_stream=lambda device: None)
    values = [torch.tensor(n) for n in range(150)]
    with mock.patch.object(links, "_cuda", cuda):
        assert [int(t) for t in link.to_host(values)] == list(range(150))


def test_weights_are_read_into_tensors_of_other_strides(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 2, 2)
    file = tmp_path / "a.safetensors"
    save_file({"w": weight}, file)
    target = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    with file.open("rb") as handle:
        checkpoint._read(handle, checkpoint._stored(file)["w"], target)
    assert torch.equal(target, weight)


def test_regions_lie_within_the_buffer() -> None:
    sizes = {"a": 600, "b": 500, "c": 1024, "d": 10}
    assert arrange(sizes, 2048) == {"a": 0, "b": 1024, "c": 0, "d": 1024}


def test_a_home_gives_what_it_was_given() -> None:
    tensors = {
        "a": nn.Parameter(torch.randn(3, 5)),
        "b": nn.Parameter(torch.empty(0, 2)),
        "c": nn.Parameter(torch.randn(7).to(torch.bfloat16), requires_grad=False),
    }
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    home = Home("u", tensors, {})
    home.to_host(Blocks(SlowLink()))
    assert all(torch.equal(tensors[n], before[n]) for n in before)
    assert home.block is not None
    assert tensors["c"].data_ptr() == home.block.data_ptr() + 512
    home.to_device(torch.device("cpu"), Blocks(SlowLink()))
    assert all(torch.equal(tensors[n], before[n]) for n in before)


# --- transformers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=5, vocab_size=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_works(llama: Any, cache: str | None) -> None:
    ways = {f"model.layers.{n}": way for n, way in enumerate(["ss", "sc", "sc", "ss"])}
    shapes = (Shape(name="prefill", rows=8), Shape(name="decode", rows=1))
    plan = plan_for(llama, ways | {"model.embed_tokens": "cc"}, shapes=shapes)
    placed = offload(copy.deepcopy(llama), plan, SlowLink(FAST))
    ids = torch.randint(0, 64, (1, 8))
    settings = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": cache,
                "pad_token_id": 0}  # fmt: skip
    expected = llama.generate(ids, **settings)
    for _ in range(2):
        assert torch.equal(placed.generate(ids, **settings), expected)
    assert (placed.offload.graphs.count > 5) == (cache == "static")


def test_parts_of_layers_can_be_units(llama: Any) -> None:
    workload = pt.generation(prompt=8, new=8, static_cache=True)
    parts = ("LlamaAttention", "LlamaMLP")
    model = copy.deepcopy(llama)
    planned = pt.plan_offload(model, workload, memory={DEVICE: "1GB"}, whole=parts)
    paths = {unit.path for unit in planned.plan.units}
    assert {"model.layers.0.self_attn", "model.layers.0.mlp"} <= paths
    assert "model.layers.0" not in paths
    ways = {path: "cs"[n % 2] * 2 for n, path in enumerate(sorted(paths)) if "mlp" in path}
    units = tuple(
        replace(u, home=HOST, computed_on=dict(zip(
            ("prefill", "decode"), (DEVICE, HOST if ways[u.path] == "cc" else DEVICE), strict=True
        )))
        if u.path in ways else u
        for u in planned.plan.units
    )  # fmt: skip
    plan = replace(planned.plan, units=units, window_bytes=max(u.size for u in units))
    placed = offload(model, plan, SlowLink(FAST))
    ids = torch.randint(0, 64, (1, 8))
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static",
                "pad_token_id": 0}  # fmt: skip
    for _ in range(2):
        assert torch.equal(placed.generate(ids, **settings), llama.generate(ids, **settings))
    with pytest.raises(ModelError, match=r"has no module of class 'Block'; it has .*LlamaMLP"):
        pt.plan_offload(model, workload, memory={DEVICE: "1GB"}, whole=("Block",))


def test_experts_of_any_type_are_recorded_and_run() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=3, num_local_experts=4, vocab_size=64,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    recorded = record(model, pt.generation(prompt=8, new=4))
    layer = next(unit for unit in recorded.units if unit.path == "model.layers.1")
    # Two of four experts for each token, each of three matrices of 32 by 32.
    assert layer.of["decode"].flops >= 2 * 2 * 3 * 32 * 32
    assert layer.of["decode"].read_bytes < 0.8 * layer.size
    other = copy.deepcopy(model)
    plan = plan_for(model, {f"model.layers.{n}": way for n, way in enumerate("sc")})
    placed = offload(model, plan, SlowLink(FAST))
    ids = torch.randint(0, 64, (1, 8))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(placed.generate(ids, **settings), other.generate(ids, **settings))


# --- planning ------------------------------------------------------------------------------------


WORKLOAD = pt.Workload(
    calls={
        "many": pt.Call(inputs=pt.Inputs((torch.zeros(64, 16),))),
        "one": pt.Call(inputs=pt.Inputs((torch.zeros(1, 16),)), weight=8.0),
    }
)


def planner_of(
    model: nn.Module,
    share: float,
    *,
    link: float,
    host: float,
    host_bytes: int = 10**12,
    **more: Any,
) -> Planner:
    """For a device that does a unit at once, a host that takes `host` seconds for a block's weights
    times the rows of a call, and a link that takes `link` seconds for them."""
    recorded = record(model, WORKLOAD)
    size = sum(unit.own_size for unit in recorded.units)
    block = max(unit.size for unit in recorded.units)
    of = {
        call: {
            unit.path: UnitCost(
                device_seconds=1e-6,
                host_seconds=host * unit.size / block * recorded.rows[call],
            )
            for unit in recorded.units
        }
        for call in WORKLOAD.calls
    }
    return Planner(
        recorded=recorded,
        weights={name: call.weight for name, call in WORKLOAD.calls.items()},
        limits=Limits(
            device=DEVICE,
            device_bytes=int(size * share) + max(recorded.between_bytes.values()),
            host_bytes=host_bytes,
            **more,
        ),
        costs=Costs(of=of, link_bytes_per_second=block / link, copy_latency_seconds=0,
                    hop_seconds=0),
    )  # fmt: skip


def test_a_mix_is_found_where_it_is_best() -> None:
    planner = planner_of(Stack(16), 0.6, link=1.0, host=1.0)
    plan: Any = planner.search(20)
    one = plan.shape("one")
    off = [unit for unit in plan.units if unit.home == HOST]
    assert plan.resident_bytes + plan.window_bytes + plan.working_bytes <= plan.memory_bytes
    # One row: link and host are as fast, and work side by side. Many rows: the host is too slow.
    assert len(plan.travelling("one")) in range(len(off) // 2 - 1, len(off) // 2 + 2)
    assert len(plan.travelling("many")) >= len(off) - 1
    assert one.seconds < 0.65 * len(off)
    for shape in plan.shapes:
        assert shape.floor_seconds <= shape.seconds + 1e-9


@pytest.mark.parametrize(("link", "host"), [(100.0, 0.01), (0.01, 100.0)])
def test_pure_plans_are_found_where_they_are_best(link: float, host: float) -> None:
    plan = planner_of(Stack(12), 0.5, link=link, host=host).search(20)
    by_host = {u.path for u in plan.units if u.computed_on["one"] == HOST}
    if link > host:
        assert not plan.travelling("one")
        assert not plan.window_bytes
    else:
        assert not by_host
        assert plan.travelling("one")


def test_a_module_that_fits_stays() -> None:
    plan = planner_of(Stack(6), 1.5, link=1.0, host=1.0).search(20)
    assert not plan.host_bytes
    assert not plan.window_bytes


def test_no_plan_is_faster_than_the_floor() -> None:
    planner = planner_of(Stack(8), 0.5, link=1.0, host=0.7)
    floors = {call: planner.floor_seconds(call) for call in WORKLOAD.calls}
    choices = [choice for choice in planner.by_rule() if planner.fits(choice)]
    assert len(choices) > 3
    for choice in choices:
        for call, floor in floors.items():
            assert planner.seconds(choice, call) >= floor - 1e-9


def test_the_same_seed_gives_the_same_plan() -> None:
    plans = [planner_of(Stack(10), 0.5, link=1.0, host=0.6).search(60, seed=3) for _ in range(2)]
    assert plans[0] == plans[1]


def test_too_little_memory_is_said_with_numbers() -> None:
    with pytest.raises(SearchError, match=r"does not fit however .* cpu:1 would have to hold .*B"):
        planner_of(Stack(6), 0.01, link=1.0, host=1.0, reserved_bytes=10**6)
    with pytest.raises(SearchError, match=r"would have to live on the host, which may give 100 B"):
        planner_of(Stack(6), 0.5, link=1.0, host=1.0, host_bytes=100)
    with pytest.raises(SearchError, match=r"keep='blocks\.9' is no unit of Stack"):
        planner_of(Stack(6), 0.5, link=1.0, host=1.0, keep=("blocks.9",))


def test_a_limit_below_a_unit_and_a_buffer_lets_nothing_travel() -> None:
    plan = planner_of(Stack(6), 0.1, link=0.01, host=1.0).search(10)
    largest = max(plan.units, key=lambda unit: unit.size)
    assert largest.home == HOST
    assert set(largest.computed_on.values()) == {HOST}
    assert any("no room for a buffer" in note for note in plan.notes)


def test_units_that_are_kept_stay() -> None:
    planner = planner_of(Stack(6), 0.5, link=1.0, host=1.0, keep=("blocks.2", "blocks.4"))
    homes = {unit.path: unit.home for unit in planner.search(10).units}
    assert homes["blocks.2"] == homes["blocks.4"] == DEVICE


def test_the_timeline_adds_up() -> None:
    def took(ways: str, slots: int, host: float = 1.0, **more: Any) -> float:
        copies = [
            Copy(seconds=1.0, start=(n % slots) * 10, stop=(n % slots) * 10 + 10)
            for n in range(ways.count("s"))
        ]
        numbers = iter(range(len(copies)))
        steps = [
            Step(seconds=host if w == "c" else 0.1, on_host=w == "c",
                 copy=next(numbers) if w == "s" else -1)
            for w in ways
        ]  # fmt: skip
        return pass_seconds(steps, copies, **more)

    assert took("____", 1) == pytest.approx(0.4)
    assert took("cccc", 1) == pytest.approx(4.0)
    # One slot: a copy waits for the unit before it. Two: the link never waits.
    assert took("ssss", 1) == pytest.approx(4.4)
    assert took("ssss", 2) == pytest.approx(4.0)
    # Copies beside what the host computes.
    assert took("scsc", 2) == pytest.approx(2.2)
    assert took("ssss____", 2) == pytest.approx(4.0, abs=0.45)
    assert took("scscscsc", 2) == pytest.approx(4.4)
    assert took("scscscsc", 2, host_slowdown=1.5) > 5
    assert took("sccccs", 2, copy_slowdown=2.0) == pytest.approx(4.2)
    # A buffer that holds all that travels is filled once.
    assert took("ss", 2) == pytest.approx(0.2)


def test_a_recording_sees_work_caches_and_memory(llama: Any) -> None:
    recorded = record(llama, pt.generation(prompt=8, new=24))
    units = {unit.path: unit for unit in recorded.units}
    layer = units["model.layers.2"]
    weights = sum(p.numel() for p in llama.model.layers[2].parameters() if p.dim() > 1)
    assert layer.of["decode"].flops == pytest.approx(2 * weights, rel=0.2)
    assert layer.of["prefill"].flops == pytest.approx(8 * 2 * weights, rel=0.2)
    # Keys and values of 32 tokens, 2 heads of 8 numbers of 4 bytes.
    assert layer.cache_bytes == 32 * 2 * 2 * 8 * 4
    assert units["model.embed_tokens"].of["decode"].read_bytes < 200
    assert recorded.rows == {"prefill": 8, "decode": 1}
    assert len({unit.kind for unit in recorded.units if "layers" in unit.path}) == 1


def test_measuring_gives_a_plan_that_runs(llama: Any) -> None:
    model = copy.deepcopy(llama)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    workload = pt.generation(prompt=8, new=4, static_cache=True)
    working = pt.plan_offload(model, workload, memory={DEVICE: "1GB"}).plan.working_bytes
    planned = pt.plan_offload(model, workload, memory={DEVICE: int(0.6 * size) + working})
    assert planned.plan.host_bytes
    placed = planned.apply(model, evaluate="measure", link=SlowLink(1e8))
    plan: Any = placed.offload.plan
    assert plan.source == "measured"
    assert plan.resident_bytes + plan.window_bytes + plan.working_bytes <= plan.memory_bytes
    assert planned.planner.costs.link_bytes_per_second < 2e8
    assert "measured; the floor is" in "\n".join(plan.describe())
    ids = torch.randint(0, 64, (1, 8))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(placed.generate(ids, **settings), llama.generate(ids, **settings))


def test_a_module_is_offloaded_in_one_call() -> None:
    torch.manual_seed(0)
    model = Stack(8, width=64)
    other = copy.deepcopy(model)
    x = torch.randn(4, 64)
    placed = pt.offload(model, x, memory={DEVICE: "200kB", "cpu": "1GB"})
    assert placed.offload.plan.host_bytes
    with torch.no_grad():
        torch.testing.assert_close(placed(x), other(x))
    with pytest.raises(PlacementError, match=r"one device may give .* not cuda:0, cuda:1"):
        pt.offload(model, x, memory={"cuda:0": 1, "cuda:1": 1})


# --- checkpoints ---------------------------------------------------------------------------------


def saved(llama: Any, path: Path, **settings: Any) -> Path:
    llama.save_pretrained(path, **settings)
    return path


@pytest.mark.parametrize("shards", ["10GB", "40kB"])
def test_weights_are_read_to_their_homes(llama: Any, tmp_path: Path, shards: str) -> None:
    path = saved(llama, tmp_path, max_shard_size=shards)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (shards == "40kB")
    with torch.device("meta"):
        empty = type(llama)(llama.config).eval()
    size = sum(p.numel() * p.element_size() for p in empty.parameters())
    workload = pt.generation(prompt=8, new=4)
    working = pt.plan_offload(empty, workload, memory={DEVICE: "1GB"}).plan.working_bytes
    planned = pt.plan_offload(empty, workload, memory={DEVICE: int(0.6 * size) + working})
    assert planned.plan.host_bytes
    assert planned.plan.resident_bytes
    with pytest.raises(PlacementError, match="has no values; give checkpoint="):
        planned.apply(empty)
    placed = planned.apply(empty, checkpoint=path)
    before, after = llama.state_dict(), placed.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    ids = torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        torch.testing.assert_close(placed(ids).logits, llama(ids).logits)


def test_a_checkpoint_that_does_not_fit_the_module_is_refused(llama: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, _, plan = stack_and_plan()
    placed = offload(model, plan, SlowLink(FAST))
    state = {name: tensor.clone() for name, tensor in placed.state_dict().items()}
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file({name: tensor.to(torch.float64) for name, tensor in state.items()}, good)
    pt.load_checkpoint(placed, good)
    assert all(torch.equal(tensor, state[n]) for n, tensor in placed.state_dict().items())
    save_file({n: t for n, t in state.items() if n != "head.bias"}, bad)
    with pytest.raises(ModelError, match=r"bad\.safetensors: has no 'head\.bias'"):
        pt.load_checkpoint(placed, bad)
    save_file(state | {"head.bias": torch.zeros(5)}, bad)
    with pytest.raises(ModelError, match=r"'head\.bias' has the shape \[5\], .* \[4\]"):
        pt.load_checkpoint(placed, bad)
    bad.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(ModelError, match="lies outside the file"):
        pt.load_checkpoint(placed, bad)
    for content in (b"\xff" * 100, (10_000).to_bytes(8, "little") + b"[" * 10_000):
        bad.write_bytes(content)
        with pytest.raises(ModelError, match="not a safetensors file"):
            pt.load_checkpoint(placed, bad)
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for header, said in (
        ([], "it must be an object"),
        ({"w": {"dtype": "F32"}}, "'w' has no 'shape'"),
        ({"w": entry | {"dtype": ["F32"]}}, "'w.dtype' must be a text"),
        ({"w": entry | {"dtype": "Q3"}}, "'w' is of type 'Q3'"),
        ({"w": entry | {"shape": [2**62] * 20_000}}, "'w' has 20,000 dimensions"),
        ({"w": entry | {"shape": [-2]}}, "'w.shape.0' must be a whole number"),
        ({"w": entry | {"data_offsets": [0]}}, "'w.data_offsets' must have 2 values, not 1"),
        ({"w": entry | {"data_offsets": [0, 1e999]}}, "'w.data_offsets.1' must be a whole number"),
        ({"w": entry | {"data_offsets": [8, 16]}}, "'w' lies outside the file"),
    ):
        text = json.dumps(header).encode()
        bad.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with pytest.raises(ModelError, match=f"malformed safetensors header: {said}"):
            pt.load_checkpoint(placed, bad)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(ModelError, match=r"names the file '\.\./b', which is not beside it"):
        pt.load_checkpoint(placed, tmp_path)


def test_loading_takes_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    script = f"""
import resource, torch
from torch import nn
import placewright.torch as pt
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def make(): return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
with torch.device("meta"): model = make()
x = torch.zeros(1, 2048)
planned = pt.plan_offload(model, x, memory={{"cpu:1": "60MB"}})
torch.zeros(1 << 20).sum()
before = peak()
placed = planned.apply(model, checkpoint={str(tmp_path / "m.safetensors")!r})
print(peak() - before, sum(p.numel() * 4 for p in model.parameters()))
"""
    state = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).state_dict()
    save_file(state, tmp_path / "m.safetensors")
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    grown, size = map(int, found.stdout.split()[-2:])
    assert size > 200_000_000
    assert grown < 1.3 * size


# --- products on the host ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(1,), (1, 3), (4,)])
@pytest.mark.parametrize("shape", [(64, 48), (5, 64), (1030, 1024)])
def test_products_are_those_of_torch(rows: tuple[int, ...], shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, shape[1]).to(torch.bfloat16)
    weight = torch.randn(shape).to(torch.bfloat16)
    bias = torch.randn(shape[0]).to(torch.bfloat16)
    for of in (None, bias):
        exact = nn.functional.linear(
            x.double(), weight.double(), None if of is None else of.double()
        )
        found = product(x, weight, of)
        assert found.dtype == torch.bfloat16
        assert found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=0.05)


def test_linear_layers_of_the_host_use_the_quicker_product() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).to(torch.bfloat16)
    other = copy.deepcopy(model)
    placed = offload(model, plan_for(model, {"0": "c", "1": "s"}), SlowLink(FAST))
    products = placed.offload.products
    products._tries = False
    with torch.no_grad():
        for rows in (1, 2, 9, 1):
            x = torch.randn(rows, 1024).to(torch.bfloat16)
            torch.testing.assert_close(placed(x), other(x), rtol=0.02, atol=0.02)
    # One row and two, in the layer that the host computes; nothing with gradients or many rows.
    assert products.quicker == {1: True, 2: True}
    threads = torch.get_num_threads()
    with torch.no_grad(), products.active(1):
        assert torch.get_num_threads() == 1
    with torch.no_grad(), products.active(1, cached_bytes=10**9):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == threads
    x = torch.randn(1, 1024).to(torch.bfloat16)
    placed(x).float().sum().backward()
    assert model[0].weight.grad is not None
    products._tries, products.quicker = True, {}
    with torch.no_grad():
        torch.testing.assert_close(placed(x), other(x), rtol=0.02, atol=0.02)
    assert list(products.quicker) == [1]
    assert torch.get_num_threads() == threads


def test_products_are_compared_on_all_weights_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    # One after another, as they are used: a single one would be read from a cache.
    read: dict[str, list[int]] = {"torch": [], "here": []}

    def noting(name: str, of: Any) -> Any:
        def run(inputs: Any, weight: Any, bias: Any = None) -> Any:
            read[name].append(weight.data_ptr())
            return of(inputs, weight, bias)

        return run

    unit: Any = nn.Sequential(
        nn.Linear(1024, 1024), nn.Linear(1024, 2048), nn.Linear(2048, 8)
    )  # fmt: skip
    unit.to(torch.bfloat16)
    served = products.HostProducts()
    assert served.serve(unit)
    monkeypatch.setattr(products, "product", noting("here", product))
    monkeypatch.setattr(nn.functional, "linear", noting("torch", nn.functional.linear))
    with torch.no_grad(), served.active(1):
        unit[0](torch.ones(1, 1024, dtype=torch.bfloat16))
    both = [unit[n].weight.data_ptr() for n in (0, 1)]  # the third is too small to matter
    for name, found in read.items():
        assert len(found) >= 10, name
        assert found[:10] == both * 5, name


# --- the benchmark, small ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [("llama", "decode-1"), ("dit", "step")])
def test_the_benchmark_runs_on_two_memories(name: str, shape: str) -> None:
    pytest.importorskip("transformers")
    from benchmarks.offload import Bench

    bench = Bench(name, small=True, deadline=float("inf"))
    (whole,) = bench.prepare([shape])
    assert whole["largest_difference"] == 0
    columns = ["simulated", "measured", "floor", "all-travel", "all-by-host"]
    found = list(bench.cell(0.75, shape, columns))
    first, again = found[: len(columns)], found[len(columns) :]
    rows = {row["column"]: row for row in first}
    assert list(rows) == columns
    assert not any("fault" in row for row in rows.values())
    for row in again:  # of plans that are close to each other, run in turns
        before = rows[row["column"]]
        assert row["calls"] == 3 * before["calls"]
        assert row["plan"] == before["plan"]
    assert [row["column"] for row in again] != ["measured"]
    # The same numbers as without a limit, within those of 16 bits.
    assert all(rows[c]["largest_difference"] < 0.05 for c in columns if c != "floor")
    assert all(0 < rows[c]["from_float32"] < 0.1 for c in columns if c != "floor")
    assert all(row["seconds"] > 0 for row in rows.values())


def test_the_benchmark_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import offload as bench
    from benchmarks.common import read_csv

    def run(*options: str) -> list[tuple[str, str, str]]:
        settings = ["--small", "--models", "dit", "--shares", "0.75", "--output", str(tmp_path)]
        monkeypatch.setattr("sys.argv", ["offload", *settings, *options])
        assert bench.main() == 0
        rows = read_csv(tmp_path / "offload.csv")
        return [(row["column"], row["seconds"], row["fault"]) for row in rows]

    assert run("--columns", "all-by-host", "--seconds", "0") == []
    first = run("--columns", "all-by-host")
    assert [column for column, _, _ in first] == ["all-on-gpu", "all-by-host"]
    again = run("--columns", "all-by-host", "group-offload")
    assert again[:2] == first  # as they were
    assert [column for column, _, _ in again[2:]] == ["group-offload"]
    # What could not be made before is tried again, and its row replaced.
    assert [column for column, _, _ in run("--columns", "group-offload")] == [
        c for c, _, _ in again
    ]


def test_the_benchmark_begins_with_what_matters_most() -> None:
    from benchmarks import offload as bench

    cells = [
        (name, share, shape)
        for name, some in bench.in_order(["llama", "dit"], [0.5, 0.25], ["decode-1", "decode-8"])
        for share, shape in some
    ]
    assert cells == [
        ("llama", 0.5, "decode-1"), ("llama", 0.25, "decode-1"),
        ("dit", 0.5, "step"), ("dit", 0.25, "step"),
        ("llama", 0.5, "decode-8"), ("llama", 0.25, "decode-8"),
    ]  # fmt: skip


def test_homes_by_accelerate_s_device_map() -> None:
    from benchmarks import offload as bench

    recorded = record(Stack(3), WORKLOAD)
    assert bench._away({"": 0}, recorded) == set()
    assert bench._away({"blocks.0": 0, "blocks": "cpu", "head": 0}, recorded) == {
        "blocks.1", "blocks.2",
    }  # fmt: skip


def test_copies_and_the_host_slow_each_other_down_in_estimates() -> None:
    planner = planner_of(Stack(10), 0.5, link=1.0, host=1.0)
    estimated = estimated_costs(planner.recorded, Cluster.load("h200"), "gpu:0")
    alone = replace(estimated, host_slowdown=1.0, copy_slowdown=1.0)
    ways = {by_host: next(planner.one_way(by_host=by_host)) for by_host in (True, False)}
    away = planner.away(ways[False])
    half = dict.fromkeys(WORKLOAD.calls, frozenset(away[::2]))
    for choice, slower in (*((c, False) for c in ways.values()),
                           (replace(ways[False], by_host=half), True)):  # fmt: skip
        seconds = []
        for planner.costs in (alone, estimated):
            seconds.append(planner.seconds(choice, "many"))
        assert (seconds[1] > seconds[0]) == slower


def test_other_costs_make_another_plan() -> None:
    planner = planner_of(Stack(10), 0.5, link=100.0, host=0.01)
    before = planner.search(20)
    planner.costs = planner_of(Stack(10), 0.5, link=0.01, host=100.0).costs
    after = planner.search(20)
    assert len(after.travelling("one")) > len(before.travelling("one"))


# --- beside the simulator ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_timeline_agrees_with_the_simulator(seed: int) -> None:
    """Of a first pass, with nothing in the buffer yet: whole modules by the one, ops and tensors by
    the other. There, what the host has computed may wait for a tensor that is on the link, which
    small activations of the runtime do not."""
    draw = random.Random(seed)
    ways = draw.choices("scr", [3, 2 if seed % 2 else 0, 2], k=9)
    slots, host, device = draw.randint(1, 3), draw.uniform(0.3, 2.0), draw.uniform(0.01, 0.5)
    graph = layers(len(ways), size=10**6, gpu=device, cpu=host)
    problem = posed(graph, machine(bandwidth=1e6), window=slots * 10**6)
    where = {"s": "gpu:0 cpu:0", "c": "cpu:0", "r": "gpu:0"}
    placement = placed_on(problem, **{f"l{n}": where[way] for n, way in enumerate(ways)})
    simulated = SimulatedEvaluator(problem).evaluate([placement])[0]
    numbers = iter(range(len(ways)))
    steps = [
        Step(seconds=host if way == "c" else device, on_host=way == "c",
             copy=next(numbers) if way == "s" else -1)
        for way in ways
    ]  # fmt: skip
    copies = [
        Copy(seconds=1.0, start=n % slots, stop=n % slots + 1) for n in range(ways.count("s"))
    ]
    expected = pass_seconds(steps, copies, passes=1)
    waits = sum(a == "c" != b for a, b in itertools.pairwise(ways))
    assert expected * (1 - 1e-3) <= simulated.mean_seconds <= expected * (1 + 1e-3) + waits
    if not waits:
        assert simulated.mean_seconds == pytest.approx(expected, rel=1e-3)


def test_units_that_are_not_products_are_left_to_torch() -> None:
    products = HostProducts()
    experts = nn.Module()
    experts.weights = nn.Parameter(torch.zeros(8, 64, 64))
    experts.gate = nn.Linear(64, 8)
    assert not products.serve(experts)
    assert "forward" not in experts.gate.__dict__
    assert products.serve(Block(64))
    assert not products.serve(nn.ReLU())


# --- plans for training --------------------------------------------------------------------------


def test_a_recording_sees_what_training_takes() -> None:
    model = Stack(4)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    recorded = record(model, pt.training(torch.zeros(8, 16), torch.optim.Adam))
    units = {unit.path: unit for unit in recorded.units}
    weights = sum(p.numel() * 4 for p in Block(16).parameters())
    assert [units[f"blocks.{n}"].gradient_bytes for n in range(4)] == [0, weights, 0, weights]
    assert [units[f"blocks.{n}"].state_bytes for n in range(4)] == [0, 2 * weights, 0, 2 * weights]
    # The first is neither trained nor on the way to what is; the third is on the way.
    assert [units[f"blocks.{n}"].of["step"].passes for n in range(4)] == [1, 3, 2, 3]
    # Of each row, what the second product of a block is made from.
    assert units["blocks.0"].kept_bytes == 0
    assert units["blocks.1"].kept_bytes >= 8 * 32 * 4
    plain = record(model, pt.training(torch.zeros(8, 16), torch.optim.SGD))
    assert all(unit.state_bytes == 0 for unit in plain.units)
    with pytest.raises(PlacementError, match="continues a cache, which training steps cannot"):
        pt.Workload(calls=pt.generation().calls, train=True)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_and_state_are_planned_for_where_weights_live(optimizer: Any) -> None:
    torch.manual_seed(0)
    model, x = Stack(10, width=64), torch.randn(4, 64)
    other = copy.deepcopy(model)
    limit = 600_000
    called = pt.plan_offload(model, x, memory={DEVICE: limit})
    planned = pt.plan_offload(model, pt.training(x, optimizer), memory={DEVICE: limit})
    plan = planned.plan
    assert 0 < plan.resident_bytes < called.plan.resident_bytes
    assert plan.resident_bytes + plan.window_bytes + plan.working_bytes <= limit
    assert any("optimizer keeps" in note for note in plan.notes)
    floor = plan.shapes[0].floor_seconds
    assert floor is not None
    assert plan.shapes[0].seconds is not None
    assert floor <= plan.shapes[0].seconds

    placed = planned.apply(model)
    ours, theirs = optimizer(placed.parameters(), lr=0.1), optimizer(other.parameters(), lr=0.1)
    for module, update in ((placed, ours), (other, theirs)):
        for _ in range(2):
            update.zero_grad()
            module(x).square().mean().backward()
            update.step()
    for one, two in zip(placed.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    # What is there beside the weights that live on the device is what was planned for.
    there = [
        tensor
        for unit in placed.offload.units.values() if unit.plan.home == DEVICE
        for tensor in unit.home.tensors.values()
    ]  # fmt: skip
    state = [s for t in there for s in ours.state[t].values() if s.dim()]
    beside = sum(t.numel() * 4 for t in [*(t.grad for t in there), *state])
    assert 0 < beside <= plan.working_bytes
    with pytest.raises(PlacementError, match=r"training steps .* use evaluate='simulate'"):
        planned.apply(copy.deepcopy(other), evaluate="measure")


def test_a_training_step_is_planned_with_its_way_back() -> None:
    x = torch.zeros(1, 16)
    model = Stack(6)
    simple = planner_of(model, 4.0, link=1.0, host=100.0)
    planner = replace(
        simple, recorded=record(model, pt.training(x)), weights={"step": 1.0},
        costs=replace(simple.costs, of={"step": simple.costs.of["one"]}),
    )  # fmt: skip
    block = max(unit.size for unit in planner.recorded.units)
    travel = Choice(frozenset(), {"step": frozenset()}, 2 * block)
    # All weights come twice; gradients of a unit go home while weights of the next one come, but
    # for the last of them.
    assert planner.seconds(travel, "step") == pytest.approx(2 * 6 + 1, rel=0.1)
    by_host = Choice(frozenset(), {"step": frozenset(u.path for u in planner.recorded.units)}, 0)
    assert planner.seconds(by_host, "step") == pytest.approx(3 * 600, rel=0.1)
    planner.recorded = replace(planner.recorded, train=False)
    assert planner.seconds(travel, "step") == pytest.approx(6, rel=0.1)
    assert planner.seconds(by_host, "step") == pytest.approx(600, rel=0.1)


def test_weights_come_back_only_for_those_that_want_them() -> None:
    model, _, plan = stack_and_plan("ssssss")
    for block in model.blocks[:4]:
        block.requires_grad_(False)
    link = SlowLink(FAST)
    placed = offload(model, plan, link)
    counts = []
    for _ in range(4):
        before = len(link.copied)
        placed(torch.randn(8, 16)).sum().backward()
        link.finish()
        counts.append(len(link.copied) - before)
    # Six on the way there. The last two are in the buffer still when their way back begins; and
    # from the first step it is known that no others come back.
    assert counts[2:] == [6, 6]
