"""Modules captured on the streams of a real GPU: the same outputs, again and again."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import placewright.torch
from placewright.acceleration import plain_schedules
from placewright.backends.pytorch.streams.accelerated import Accelerated
from placewright.backends.pytorch.streams.built import build, lower
from placewright.backends.pytorch.streams.device import Gpu
from placewright.backends.pytorch.streams.groups import Fusion
from placewright.backends.pytorch.streams.net import trace
from placewright.backends.pytorch.streams.schedule import list_schedule, one_stream
from placewright.backends.pytorch.streams.tuning import Tuner, distance
from placewright.torch import AccelerateConfig

pytestmark = [
    pytest.mark.gpu,
    # What torch keeps of traced modules is collected at odd times, and says so.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Of torch itself, where its compiler is first imported, and about how fast it could be.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Mixed(nn.Module):
    """Branches of convolutions with batch norms, twice."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()

        def conv(a: int, b: int, k: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, k, padding=k // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)
            )

        self.stem = conv(3, width, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [conv(width, width // 4, 1),
                 nn.Sequential(conv(width, 32, 1), conv(32, width // 4, 3)),
                 nn.Sequential(conv(width, 16, 1), conv(16, width // 4, 5)),
                 nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(width, width // 4, 1))]
            )
            for _ in range(3)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleList)
            x = torch.cat([branch(x) for branch in block], 1)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def mixed(dtype: torch.dtype = torch.float16) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixed()
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = None  # the mean over what it sees
        model.train()(torch.randn(4, 3, 56, 56))
    model = model.eval().to("cuda", dtype)
    x = torch.randn(1, 3, 56, 56, device="cuda", dtype=dtype)
    return model.to(memory_format=torch.channels_last), x  # type: ignore[call-overload]


def fast_of(model: nn.Module, x: torch.Tensor, **settings: Any) -> Accelerated:
    given: dict[str, Any] = {"seconds": 12.0, "method": "list", "fusion": Fusion.FOLDED}
    fast = placewright.torch.accelerate(model, x, **(given | settings))
    assert isinstance(fast, Accelerated)
    return fast


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_plain_ops_on_streams_are_bitwise_the_same(streams: int) -> None:
    model, x = mixed()
    gpu = Gpu(index=0)
    with gpu.settings():
        low = lower(trace(model, (x,), {}), (x,), {}, Fusion.NONE)
        tuned = Tuner(device=gpu).tune(low.grouped, low.given, Fusion.NONE)
    work = tuned.work(low.grouped)
    one = build(low, gpu, tuned.runs, one_stream(work))
    many = build(low, gpu, tuned.runs, list_schedule(work, streams))
    for _ in range(5):
        x = torch.randn_like(x)
        assert torch.equal(one([x]), many([x]))
    with torch.no_grad():
        assert distance([one([x])], [model(x)]) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_accelerated_gives_what_the_module_does(dtype: torch.dtype) -> None:
    model, x = mixed(dtype)
    fast = fast_of(model, x)
    (plan,) = fast.plans
    assert plan.on_streams, fast.verdict
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn_like(x)
            assert distance([fast(x)], [model(x)]) < 2e-2
    assert "cudnn" in plan.kernels or "product" in plan.kernels, plan.notes


def test_regions_of_inductor() -> None:
    class Chains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.Conv2d(32, 32, 5, padding=2, groups=32)
            self.wide = nn.Conv2d(32, 64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.silu(self.wide(self.each(F.relu(x))))
            return F.layer_norm(y * torch.sigmoid(y) + 1, y.shape[1:])

    torch.manual_seed(0)
    model = Chains().eval().cuda().half()
    x = torch.randn(2, 32, 28, 28, device="cuda").half()
    fast = fast_of(model, x, fusion=Fusion.REGIONS, seconds=40.0)
    with torch.no_grad():
        assert distance([fast(x)], [model(x)]) < 2e-2
    assert "region" in fast.plans[0].kernels, fast.plans[0].notes


def test_many_replays_under_memory_pressure_are_the_same() -> None:
    model, x = mixed()
    fast = fast_of(model, x)
    with torch.no_grad():
        wanted = fast(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        different = torch.zeros((), device="cuda", dtype=torch.int64)
        for number in range(500):
            noise = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(number % 7)]
            different += (fast(x) != wanted).any()
            del noise
        torch.cuda.synchronize()
    assert int(different) == 0
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_calls_from_other_streams_do_not_mix() -> None:
    model, x = mixed()
    fast = fast_of(model, x)
    inputs = [torch.randn_like(x) for _ in range(8)]
    with torch.no_grad():
        wanted = [fast(value) for value in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        got = []
        for number, value in enumerate(inputs):
            with torch.cuda.stream(streams[number % 3]):
                got.append(fast(value))
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_graphs_share_no_workspace_with_what_is_captured_later() -> None:
    """Products on several streams; then torch.compile captures, which gives workspaces back, and
    what else is computed gets their memory."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ModuleList(nn.Linear(4096, 512) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([one(x).tanh() for one in self.all]).sum(0)

    torch.manual_seed(0)
    model = Products().eval().cuda().half()
    x = torch.randn(8, 4096, device="cuda").half()
    fast = fast_of(model, x, fusion=Fusion.NONE)
    compiled = torch.compile(nn.Linear(64, 64).cuda(), mode="reduce-overhead")
    with torch.no_grad():
        wanted = fast(x)
        for _ in range(3):
            compiled(torch.randn(8, 64, device="cuda"))
        torch.cuda.synchronize()
        ones = [torch.ones(1 << 20, device="cuda") for _ in range(256)]
        assert all(torch.equal(fast(x), wanted) for _ in range(20))
        assert all(bool((one == 1).all()) for one in ones)


def test_graphs_of_others_keep_their_workspaces() -> None:
    """Captured before, on a stream that had a workspace: whose memory nobody else may get."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 8192, device="cuda").half(), torch.randn(8192, 512, device="cuda").half()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        a @ b
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made = [a @ b for _ in range(8)]
    graph.replay()
    wanted = [value.clone() for value in made]
    fast = fast_of(*mixed())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ones = [torch.ones(1 << 20, device="cuda") for _ in range(256)]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert fast.plans
    assert all(torch.equal(x, y) for x, y in zip(made, wanted, strict=True))
    assert all(bool((one == 1).all()) for one in ones)


def test_what_is_dropped_gives_its_memory_and_its_streams_back() -> None:
    model, x = mixed()
    gc.collect()  # what tests before left
    kept = fast_of(model, x)
    used, seen = [], set()
    for _ in range(4):
        fast = fast_of(model, x)
        own = fast.entries[0].built.ready.lease.own  # type: ignore[union-attr]
        own.streams(8)  # more than a search takes, so that none finds that it needs another one
        own.hold_workspaces()
        seen.add(id(own))
        del fast, own
        gc.collect()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_allocated())
    assert len(seen) == 1
    assert id(kept.entries[0].built.ready.lease.own) not in seen  # type: ignore[union-attr]
    assert used[-1] - used[1] < 1 << 20


def test_parameters_that_are_written_to_are_followed() -> None:
    model, x = mixed()
    fast = fast_of(model, x)
    with torch.no_grad():
        before = fast(x)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        assert distance([fast(x)], [model(x)]) < 2e-2
        assert distance([fast(x)], [before]) > 2e-2


def test_a_plan_is_applied_again(tmp_path: Path) -> None:
    model, x = mixed()
    fast = fast_of(model, x)
    fast.save(tmp_path / "plan.json")
    again = placewright.torch.accelerate(model, x, plan=tmp_path / "plan.json")
    assert again.plans == fast.plans
    with torch.no_grad():
        assert distance([again(x)], [fast(x)]) < 1e-2


def test_timelines_are_measured() -> None:
    model, x = mixed()
    fast = fast_of(model, x)
    lines = fast.timelines()
    assert all(0 <= start <= end for start, end in lines.measured)
    assert 0 < lines.measured_seconds < 1
    before = {name: i for i, name in enumerate(lines.names)}
    assert len(before) == len(lines.names)


def test_dropout_is_random_again_and_again() -> None:
    class Drops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x * 2, 0.5, True) + F.dropout(x.sin(), 0.5, True)

    x = torch.randn(4096, device="cuda")
    fast = fast_of(Drops(), x)
    with torch.no_grad():
        torch.manual_seed(5)
        first, second = fast(x), fast(x)
        torch.manual_seed(5)
        again = fast(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_torch_compile_takes_it() -> None:
    model, x = mixed()
    torch._dynamo.reset()
    options: dict[str, Any] = {"method": "list", "fusion": "folded", "seconds": 12.0}
    compiled = torch.compile(model, backend="placewright", options=options)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn_like(x)
            assert distance([compiled(x)], [model(x)]) < 2e-2


def test_too_little_memory_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, x = mixed()
    with caplog.at_level(logging.WARNING):
        fast = fast_of(model, x, memory_bytes=1000.0)
    with torch.no_grad():
        assert distance([fast(x)], [model(x)]) < 2e-2
    assert fast.entries[0].built is None


def test_one_stream_and_list_scheduling_for_comparison() -> None:
    model, x = mixed()
    built, seconds = plain_schedules(model, x, AccelerateConfig())
    assert set(built) == {"one stream", "list"}
    assert all(value > 0 for value in seconds.values())
    assert torch.equal(built["list"]([x]), built["one stream"]([x]))


def test_fused_kernels_are_tried_on_this_gpu() -> None:
    """What the notes say of kernels that do not work would be a fault of this project."""
    model, x = mixed()
    gpu = Gpu(index=0)
    with gpu.settings():
        low = lower(trace(model, (x,), {}), (x,), {}, Fusion.FOLDED)
        tuner = Tuner(device=gpu)
        tuner.tune(low.grouped, low.given, Fusion.FOLDED)
    assert tuner.notes == []


def test_a_training_step_on_streams() -> None:
    model, _ = mixed(torch.float32)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 0.1  # a mean over all steps depends on how many there were
    x = torch.randn(8, 3, 56, 56, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (8,), device="cuda")
    other = copy.deepcopy(model).train()
    step = placewright.torch.accelerate_step(
        model.train(), x, loss_fn=F.cross_entropy, targets=y, seconds=20.0, method="list",
        fusion=Fusion.FOLDED,
    )  # fmt: skip
    for _ in range(3):
        loss = step(x, targets=y)
        wanted = F.cross_entropy(other(x), y)
        other.zero_grad()
        wanted.backward()
        assert distance([loss], [wanted.detach()]) < 1e-2
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert distance([a.grad], [b.grad]) < 5e-2
        for c, d in zip(model.buffers(), other.buffers(), strict=True):
            assert distance([c], [d]) < 1e-2
    assert step.fast.entries[0].built is not None, step.verdict
