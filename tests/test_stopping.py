"""Ctrl-C and SIGTERM end whatever runs, with the best so far saved."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from placewright.budget import Budget
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.base import OneShot, Placer
from placewright.placers.single_device import single_device
from placewright.problem import ProblemConfig, make_problem
from placewright.session.config import SearchConfig
from placewright.session.driver import Session
from placewright.session.search import search
from placewright.stopping import Stopped, Worker, run_compiled
from placewright.testing import four_accelerators, timed_layers, uniform_cluster

PROBLEM = make_problem(
    timed_layers(60, 6), uniform_cluster(2, bandwidth=1e9), ProblemConfig(groups=10)
)


def test_a_worker_passes_on_results_and_errors() -> None:
    worker = Worker()
    assert worker.run(lambda: 7, lambda: False) == 7
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda: 1 / 0, lambda: False)
    assert worker.run(lambda: 8, lambda: False) == 8
    worker.close()


def test_work_that_ends_soon_after_the_stop_is_kept() -> None:
    worker = Worker()
    assert worker.run(lambda: threading.Event().wait(0.3), lambda: True) is False
    worker.close()


def test_work_that_does_not_end_is_abandoned() -> None:
    worker = Worker(grace_seconds=0.1)
    never_set = threading.Event()
    with pytest.raises(Stopped):
        worker.run(never_set.wait, lambda: True)
    with pytest.raises(Stopped):
        worker.run(lambda: 1, lambda: False)
    never_set.set()


def _exit(script: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("stop", ["return True", "raise KeyboardInterrupt"])
def test_a_process_ends_with_its_code_though_work_goes_on(stop: str) -> None:
    """Also where a second Ctrl-C ends the waiting."""
    script = (
        "import torch\n"
        "from placewright.stopping import Stopped, Worker, leave\n"
        f"def stop(): {stop}\n"
        "def work():\n"
        "    matrix = torch.ones(200, 200)\n"
        "    while True: matrix @ matrix\n"
        "worker = Worker(0.1)\n"
        "try: worker.run(work, stop)\n"
        "except (Stopped, KeyboardInterrupt): print('given up')\n"
        "worker.close()\n"
        "leave(130)"
    )
    assert _exit(script) == (130, "given up\n", "")


def test_a_process_ends_with_its_code_though_a_worker_has_much_to_free() -> None:
    """As a policy of many tensors is; here what is freed takes its time within torch."""
    script = (
        "import time, torch\n"
        "from placewright.stopping import Worker, leave\n"
        "class Policy:\n"
        "    def ask(self): return 'asked'\n"
        "    def __del__(self):\n"
        "        matrix = torch.ones(200, 200)\n"
        "        for _ in range(2000): matrix @ matrix\n"
        "worker = Worker()\n"
        "print(worker.run(Policy().ask, lambda: False))\n"
        "worker.close()\n"
        "time.sleep(0.1)\n"
        "leave(0)"
    )
    assert _exit(script) == (0, "asked\n", "")


def test_compiled_code_is_told() -> None:
    def until_told(flag: object) -> str:
        while not flag[0]:  # type: ignore[index]
            time.sleep(0.01)
        return "told"

    assert run_compiled(until_told, lambda: True) == "told"


class Stuck(Placer):
    """Computes for ever when it is asked, or told."""

    name = "stuck"

    def __init__(self, where: str) -> None:
        super().__init__(PROBLEM)
        self.begun = threading.Event()
        self.released = threading.Event()
        self._where = where

    def ask(self, count: int) -> list[Placement]:
        if self._where == "ask":
            self._stick()
        return single_device(self.problem)

    def tell(self, trials: Sequence[Trial]) -> None:
        if self._where == "tell":
            self._stick()

    def _stick(self) -> None:
        self.begun.set()
        self.released.wait()


@pytest.mark.parametrize("where", ["ask", "tell"])
def test_a_search_does_not_wait_for_a_placer_that_computes(where: str) -> None:
    stuck = Stuck(where)
    progress = search(
        [OneShot("single", PROBLEM, single_device), stuck, OneShot("late", PROBLEM, single_device)],
        SimulatedEvaluator(PROBLEM),
        Budget(seconds=3600),
        stop=stuck.begun.is_set,
    )
    stuck.released.set()
    assert progress.best is not None
    assert progress.best.placer == "single"
    assert progress.why_not_of["stuck"] == "stopped while it was computing"


def test_a_search_that_is_stopped_at_once_has_no_answer() -> None:
    result = Session(
        PROBLEM, SearchConfig(method="single", budget=60, op_level=True), stop=lambda: True
    ).run()
    assert result.interrupted
    assert not result.trials


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_large_search_with_the_best_so_far(tmp_path: Path, number: int) -> None:
    timed_layers(20_000, 20).save(tmp_path / "graph.json")
    four_accelerators().save(tmp_path / "cluster.yaml")
    process = subprocess.Popen(
        [
            sys.executable, "-c", "from placewright.cli import main; main()", "place",
            "graph.json", "--cluster", "cluster.yaml", "--budget", "1h", "-o", "out",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    journal = tmp_path / "out" / "journal.jsonl"
    while process.poll() is None and not (journal.is_file() and journal.stat().st_size):
        time.sleep(0.05)
    process.send_signal(number)
    # It takes less than 5 s where it has a core to itself.
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert (tmp_path / "out" / "placement.json").is_file()
    assert (tmp_path / "out" / "summary.json").is_file()
