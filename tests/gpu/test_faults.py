"""What goes wrong on a real GPU is an outcome, and the search goes on."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import placewright.backends as backends
from placewright.backends.base import LoadOptions
from placewright.backends.pytorch import TorchRunConfig
from placewright.backends.pytorch.exporting import Inputs
from placewright.backends.pytorch.program import TorchModel, TorchProgram, read_program
from placewright.backends.pytorch.runner import TorchRunner
from placewright.cluster import Cluster, chosen
from placewright.errors import WorkerError
from placewright.measurement import Outcome

pytestmark = pytest.mark.gpu

CONFIG = TorchRunConfig(steps=4, max_steps=4, check=True, tf32=False, time_limit_seconds=60.0)


def cluster_of(*names: str, sms: int | None = None) -> Cluster:
    return chosen(names, issue="none", sms=sms)


@pytest.fixture(scope="module")
def rnnlm() -> TorchProgram:
    return backends.get("pytorch").load("rnnlm", LoadOptions(scale="small"))  # type: ignore[return-value]


class Tall(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [x * float(i) for i in range(8)]
        return torch.stack(rows).sum()


def test_more_than_a_part_has_is_an_outcome() -> None:
    program = read_program(TorchModel(Tall(), Inputs((torch.ones(1 << 20),))))
    small = cluster_of("cuda:0/part:0-1", sms=32)
    small = dataclasses.replace(
        small,
        devices=tuple(dataclasses.replace(d, memory_bytes=40_000_000) for d in small.devices),
    )
    with TorchRunner(program, small, CONFIG) as runner:
        run = runner.measure([0] * program.graph.num_ops)
        assert run.measurement.outcome is Outcome.OUT_OF_MEMORY, run.measurement
        assert runner.restarts == 0


def test_memory_that_another_process_takes_is_an_outcome_and_no_end() -> None:
    program = read_program(TorchModel(Tall(), Inputs((torch.ones(1 << 25),))))
    with TorchRunner(program, cluster_of("cuda:0"), CONFIG) as runner:
        runner.start()
        taken = torch.empty(
            torch.cuda.mem_get_info()[0] - (400 << 20), dtype=torch.int8, device="cuda"
        )
        devices = [0] * program.graph.num_ops
        run = runner.measure(devices)
        assert run.measurement.outcome is Outcome.OUT_OF_MEMORY, run.measurement
        del taken
        torch.cuda.empty_cache()
        run = runner.measure(devices)
        assert run.measurement.ok, run.measurement


def has_ended(process: int) -> bool:
    """Whether it is gone, or waits for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_killed_and_stopped_processes_are_replaced_and_leave_no_memory(
    rnnlm: TorchProgram,
) -> None:
    before = torch.cuda.mem_get_info()[0]
    with TorchRunner(rnnlm, cluster_of("cuda:0/stream:0-3"), CONFIG) as runner:
        devices = [0] * rnnlm.graph.num_ops
        assert runner.measure(devices).measurement.ok
        killed = runner.pids[0]
        os.kill(killed, signal.SIGKILL)
        # The driver takes its time to give back what a process had.
        until = time.monotonic() + 60.0
        while not has_ended(killed) and time.monotonic() < until:
            time.sleep(0.05)
        assert runner.measure(devices).measurement.ok
        os.kill(runner.pids[0], signal.SIGSTOP)
        runner.config = dataclasses.replace(CONFIG, time_limit_seconds=3.0)
        assert runner.measure(devices).measurement.outcome is Outcome.TIMED_OUT
        runner.config = CONFIG
        assert runner.measure(devices).measurement.ok
    time.sleep(1.0)
    assert torch.cuda.mem_get_info()[0] > before - (1 << 28)


def test_an_assertion_on_the_gpu_is_said_and_harms_nobody_else() -> None:
    """An index out of range is an assertion on the GPU, after which nothing works there."""

    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 8)

        def forward(self, rows: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.table(rows + add)
            return found

    rows, add = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    program = read_program(TorchModel(Lookup(), Inputs((rows, add))))
    cluster = cluster_of("cuda:0/stream:0-1")
    with TorchRunner(program, cluster, CONFIG) as runner:
        devices = [0] * program.graph.num_ops
        assert runner.measure(devices).measurement.ok
    runner = TorchRunner(program, cluster, CONFIG, feeds={"1": add.numpy() + 9})
    with runner, pytest.raises(WorkerError, match="did not start"):
        runner.measure(devices)


class Walk(torch.nn.Module):
    """Takes the next row of a table in each step, and has six."""

    at: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(6, 8)
        self.register_buffer("at", torch.zeros(16, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(self.at) + x
        self.at.add_(1)
        return found


def test_an_assertion_in_the_midst_of_a_search_is_an_outcome() -> None:
    program = read_program(TorchModel(Walk(), Inputs((torch.ones(16, 8),))))
    config = dataclasses.replace(CONFIG, check=False)  # that would begin with the first row again
    with TorchRunner(program, cluster_of("cuda:0/stream:0-1"), config) as runner:
        # On both: what is on one alone is compared each time, and begins with the first row, too.
        devices = [number % 2 for number in range(program.graph.num_ops)]
        assert runner.measure(devices).measurement.ok  # rows 0 to 3
        hit = runner.measure(devices).measurement
        assert hit.outcome is Outcome.FAILED, hit
        assert "does not answer any more" in hit.reason
        assert runner.restarts == 1
        assert runner.measure(devices).measurement.ok
