"""Evaluators that break on demand, and the processes of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from placewright.evaluators.base import Evaluator
from placewright.graph import Edge, Op, Tensor
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.testing import make_problem, uniform_cluster

CHAINS, LENGTH = 2, 4


def chains() -> Problem:
    """Chains on as many devices, with slow links: the best is each chain on a device of its own."""
    ops = [
        Op(name=f"c{c}/op{i}", type="t", outputs=(Tensor(4),), seconds={"dev": 1.0})
        for c in range(CHAINS)
        for i in range(LENGTH)
    ]
    edges = [
        Edge(f"c{c}/op{i}", f"c{c}/op{i + 1}") for c in range(CHAINS) for i in range(LENGTH - 1)
    ]
    return make_problem(ops, edges, uniform_cluster(CHAINS + 1, bandwidth=1.0))


BEST_SECONDS = float(LENGTH)


def wide(groups: int = 12) -> Problem:
    """More placements than any test tries."""
    ops = [Op(name=f"op{i}", type="t", seconds={"dev": 1.0}) for i in range(groups)]
    return make_problem(ops, [], uniform_cluster(3))


class Busiest(Evaluator):
    """Takes the time of the busiest device for the step time, and breaks when a file says so.

    A file `die` or `hang` in `folder` makes one worker do that, once; `slow` makes one slow for
    good. Groups that are all on the last device (`poison`) kill whoever tries them.
    """

    cheap = False

    def __init__(self, problem: Problem, folder: Path, seconds: float, poison: bool) -> None:
        self._problem = problem
        self._folder = folder
        self._seconds = seconds * (100 if self._is_first("slow") else 1)
        self._poison = poison

    @property
    def problem(self) -> Problem:
        return self._problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        return [self._one(placement) for placement in placements]

    def _one(self, placement: Placement) -> Measurement:
        devices = placement.devices
        with (self._folder / f"calls-{os.getpid()}").open("a") as calls:
            calls.write(f"{devices.tolist()}\n")
        if self._is_first("die") or (
            self._poison and (devices == self._problem.num_devices - 1).all()
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is_first("hang"):
            time.sleep(3600)
        time.sleep(self._seconds)
        busiest = np.bincount(devices).max()
        return Measurement(outcome=Outcome.OK, step_seconds=(float(busiest),))

    def _is_first(self, order: str) -> bool:
        try:
            (self._folder / order).unlink()
        except FileNotFoundError:
            return False
        return True


def calls(folder: Path) -> list[str]:
    """Every placement that any worker began to try."""
    return [line for path in folder.glob("calls-*") for line in path.read_text().splitlines()]


def processes(of: int, name: str = "") -> list[int]:
    """The living descendants of a process, or those whose title begins like this."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                titles[int(path.name)] = (path / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if stat[0] != "Z":
                parents[int(path.name)] = int(stat[1])
    found = []
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != of:
            ancestor = parents[ancestor]
        if ancestor == of and pid != of and titles[pid].startswith(name):
            found.append(pid)
    return found


def until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    """Waits for something that must come; the limit only keeps a broken test from hanging."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


# Checkpoints come so often that there is one when the driver is killed.
DRIVER = """
import sys
import placewright.session.search
from placewright.cli import main
placewright.session.search._CHECKPOINT_SECONDS = 0.2
main(sys.argv[1:])
"""


@contextmanager
def driver(
    *arguments: str | Path, stderr: IO[bytes] | None = None, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    command = [*prefix, sys.executable, "-c", DRIVER, *map(str, arguments)]
    # A session of its own, so that signals reach its whole process group, as from a terminal.
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=stderr
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)
