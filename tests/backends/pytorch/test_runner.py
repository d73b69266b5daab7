"""Placements of PyTorch steps on the CPU, for real: two shares of its cores as devices."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import placewright.backends as backends
from placewright.backends.base import LoadOptions
from placewright.backends.pytorch import TorchRunConfig
from placewright.backends.pytorch.client import executed, prepare
from placewright.backends.pytorch.execution import Opened
from placewright.backends.pytorch.exporting import Inputs, Task
from placewright.backends.pytorch.places import places_of
from placewright.backends.pytorch.program import TorchModel, TorchProgram, read_program
from placewright.backends.pytorch.runner import TorchRunner
from placewright.backends.pytorch.steps import Step
from placewright.cluster import Cluster
from placewright.errors import ClusterError, WorkerError
from placewright.measurement import Outcome
from placewright.problem import make_problem
from placewright.session.config import How, Machine, SearchConfig
from placewright.session.driver import Session
from placewright.testing import check_runner


class Towers(torch.nn.Module):
    """Two towers that meet, with batch norms and an embedding that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50, 16)
        self.left = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32))
        self.right = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh())
        self.top = torch.nn.Linear(64, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.words(ids)
        both = torch.cat([self.left(words), self.right(words)], 1)
        return torch.nn.functional.cross_entropy(self.top(both), ids)


def towers(**task: object) -> TorchModel:
    torch.manual_seed(0)
    inputs = Inputs((torch.arange(24) % 50,))
    return TorchModel(Towers(), inputs, Task(train=True, **task), "towers")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def program() -> TorchProgram:
    return read_program(towers(optimizer=torch.optim.Adam))


CONFIG = TorchRunConfig(steps=3, max_steps=4, time_limit_seconds=20.0)


@pytest.fixture(scope="module")
def runner(program: TorchProgram) -> Iterator[TorchRunner]:
    feeds = {"0": np.arange(24) % 50}
    with TorchRunner(program, Cluster.load("cpu2"), CONFIG, feeds=feeds) as made:
        yield made


def placements(program: TorchProgram, count: int) -> list[list[int]]:
    rng = random.Random(0)
    ops = range(program.graph.num_ops)
    return [[0 for _ in ops], *([rng.randrange(2) for _ in ops] for _ in range(count))]


def test_a_step_is_read_back_from_json(program: TorchProgram) -> None:
    assert program.step is not None
    assert Step.from_json(program.step.to_json()) == program.step


def test_every_placement_trains_as_the_module_does(
    program: TorchProgram, runner: TorchRunner
) -> None:
    model = towers().module
    optimizer = torch.optim.Adam(model.parameters())
    wanted = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.arange(24) % 50)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for devices in placements(program, 3):
        returned = runner.measure(devices, train_steps=4).returned
        assert returned is not None
        assert returned["loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_trace_has_every_call_where_it_was_put(
    program: TorchProgram, runner: TorchRunner
) -> None:
    devices = placements(program, 1)[1]
    trace = runner.measure(devices, traces=2).trace
    assert trace is not None
    numbers = program.graph.op_index
    assert {devices[numbers[name]] == at for name, at in trace.device_of.items()} == {True}
    assert program.step is not None
    ran = {program.graph.op_names[call.op] for call in program.step.calls}
    updated = {program.graph.op_names[update.op] for update in program.step.updates}
    assert set(trace.op_seconds) == ran | updated
    assert trace.transfers
    assert all(0 <= span.begin <= span.end for span in trace.spans)


def test_what_needs_more_memory_than_a_device_has_says_so(program: TorchProgram) -> None:
    cluster = Cluster.load("cpu2")
    small = dataclasses.replace(
        cluster,
        devices=tuple(dataclasses.replace(d, memory_bytes=100_000) for d in cluster.devices),
    )
    with TorchRunner(program, small, CONFIG) as runner:
        whole = runner.measure([0] * program.graph.num_ops)
        assert whole.measurement.outcome is Outcome.OUT_OF_MEMORY
        assert "cpu:0 has" in whole.measurement.reason
        assert runner.restarts == 0


def test_a_step_that_fails_anywhere_is_said_at_once(program: TorchProgram) -> None:
    feeds = {"0": np.full(24, 49)}
    feeds["0"][3] = 50  # one word too many
    runner = TorchRunner(program, Cluster.load("cpu2"), CONFIG, feeds=feeds)
    with runner, pytest.raises(WorkerError, match=r"did not start.*out of range"):
        runner.measure([0] * program.graph.num_ops)


def test_keeps_the_promises_of_a_runner(program: TorchProgram) -> None:
    runner = TorchRunner(program, Cluster.load("cpu2"), CONFIG)

    def kill() -> None:
        for pid in runner.pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)

    check_runner(runner, kill=kill)


def test_a_process_that_hangs_is_replaced(program: TorchProgram) -> None:
    with TorchRunner(program, Cluster.load("cpu2"), CONFIG) as runner:
        devices = [0] * program.graph.num_ops
        assert runner.measure(devices).measurement.ok
        os.kill(runner.pids[0], signal.SIGSTOP)
        # For this one only: what runs may take longer than that on a busy machine.
        runner.config = dataclasses.replace(CONFIG, time_limit_seconds=1.0)
        assert runner.measure(devices).measurement.outcome is Outcome.TIMED_OUT
        runner.config = CONFIG
        assert runner.measure(devices).measurement.ok


def test_inference_with_attention_returns_what_the_module_does() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    program = read_program(TorchModel(layer, Inputs((torch.randn(2, 8, 32),))))
    config = dataclasses.replace(CONFIG, check=True)
    with TorchRunner(program, Cluster.load("cpu2"), config) as runner:
        for devices in placements(program, 2):
            run = runner.measure(devices)
            assert run.measurement.ok, run.measurement.reason
            assert run.misplaced == ()


def test_a_module_that_is_no_graph_cannot_be_measured(caplog: pytest.LogCaptureFixture) -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.a(x) if x.sum() > 0 else self.b(x)
            return y

    program = read_program(TorchModel(Branches(), Inputs((torch.ones(2, 4),))))
    with pytest.raises(WorkerError, match="Branches cannot be measured"):
        backends.get("pytorch").runner(program, Cluster.load("cpu2"))
    # Where nobody has asked for real runs, there are none.
    session = Session(
        make_problem(program.graph, Cluster.load("cpu2")), SearchConfig(budget=60.0),
        machine=Machine(program),
    )  # fmt: skip
    assert session.evaluate == "simulate"
    assert "simulated only: it cannot be exported as one graph" in caplog.text


def test_an_op_of_another_library_is_placed_and_not_measured() -> None:
    @torch.library.custom_op("placewright_runner::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = twice(x)
            return y

    program = read_program(TorchModel(Doubled(), Inputs((torch.ones(2, 4),))))
    assert [bool(f) for f in np.isnan(program.graph.flops)].count(True) == 1
    with pytest.raises(WorkerError, match="it calls placewright_runner::twice, which is no op of"):
        backends.get("pytorch").runner(program, Cluster.load("cpu2"))


def test_benchmark_models_can_be_loaded_and_run() -> None:
    backend = backends.get("pytorch")
    program = backend.load("rnnlm", LoadOptions(scale="small", batch=4))
    with backend.runner(program, Cluster.load("cpu2"), CONFIG) as runner:
        assert runner.measure([1] * program.graph.num_ops).measurement.ok


@pytest.mark.parametrize("evaluate", ["measure", "simulate+measure"])
def test_a_module_is_placed_by_real_runs(evaluate: How) -> None:
    import placewright.torch

    source = towers(optimizer=torch.optim.SGD)
    seen: list[int] = []
    planned = placewright.torch.plan(
        source, devices=["cpu:0", "cpu:1"], evaluate=evaluate, budget=4, method="single,expert",
        run=CONFIG, observe=lambda progress: seen.append(progress.trials),
    )  # fmt: skip
    assert planned.result.evaluate == evaluate
    assert seen
    assert seen[-1] == sum(method.trials for method in planned.result.methods)
    placed = planned.apply(source.module)
    assert torch.isfinite(placed(torch.arange(24) % 50))


def test_ways_to_a_switch_are_timed_by_routes_over_them(program: TorchProgram) -> None:
    direct = TorchRunner(program, Cluster.load("cpu2"), CONFIG)
    parts = TorchRunner(program, Cluster.load("h200-parts4"), CONFIG)  # not started: no GPU
    devices = set(parts.cluster.device_names)
    assert not any(set(link.pairs[0]) <= devices for link in parts.cluster.links)
    # From partition to partition, and to the CPU: through the memory of the host.
    assert parts.seconds_for_links(5) > direct.seconds_for_links(5) > 0


def test_a_placement_that_was_run_holds_no_memory_any_more(program: TorchProgram) -> None:
    """Without help of the garbage collector, which is off where steps are timed."""
    assert program.step is not None
    opened = Opened(places_of(Cluster.load("cpu2")))
    prepared = prepare(program.step, {}, [0] * program.graph.num_ops, opened)
    apart = [[False] * 2] * 2
    gc.disable()
    try:
        for devices in placements(program, 1):
            execution = executed(prepared, opened, devices, apart, False)
            with torch.no_grad():
                execution.step()
            gone = weakref.ref(execution)
            del execution
            assert gone() is None
    finally:
        gc.enable()
        opened.close()


def test_devices_that_are_not_here_cannot_be_measured_on() -> None:
    import placewright.torch

    with pytest.raises(ClusterError, match=r"cannot be measured on this machine: it has no gpu:0"):
        placewright.torch.plan(towers(), devices="a100x4", evaluate="measure")


def test_steps_on_several_gpus_are_not_captured(program: TorchProgram) -> None:
    cluster = Cluster.load("a100x4")
    with pytest.raises(WorkerError, match="a step on 4 GPUs cannot be captured as one CUDA graph"):
        TorchRunner(program, cluster, dataclasses.replace(CONFIG, capture=True))
    TorchRunner(program, cluster, dataclasses.replace(CONFIG, capture=False)).close()
    TorchRunner(program, cluster, CONFIG).close()  # the host issues what PyTorch does
    # Parts of one GPU are one memory.
    parts = Cluster.load("h200-parts4")
    TorchRunner(program, parts, dataclasses.replace(CONFIG, capture=True)).close()
