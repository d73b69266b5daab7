"""Workers that die, hang or are slow: nothing is lost, nothing is tried for nothing."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from placewright.budget import Budget
from placewright.distributed.config import TeamConfig
from placewright.distributed.session import _check_room
from placewright.distributed.workers import ParallelEvaluator, Workers
from placewright.errors import SearchError, WorkerError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.journal import Journal, read_trials
from placewright.measurement import Outcome
from placewright.placement import Placement
from placewright.placers.random_placement import RandomPlacement
from placewright.problem import Problem
from placewright.session.search import search
from placewright.testing import check_evaluator, tiny_problems
from tests.distributed.helpers import Busiest, calls, wide

pytestmark = pytest.mark.usefixtures("ray")


def hired(
    problem: Problem,
    folder: Path,
    *,
    seconds: float = 0.01,
    poison: bool = False,
    **settings: Any,
) -> tuple[Workers, ParallelEvaluator]:
    make = functools.partial(Busiest, problem, folder, seconds, poison)
    options: dict[str, Any] = {
        "per_group": 2, "resources": {"CPU": 1.0}, "trial_seconds": 60.0, "cheap": False,
    }  # fmt: skip
    workers = Workers(make, **(options | settings))
    return workers, ParallelEvaluator(problem, workers, cheap=False)


def run(problem: Problem, evaluator: ParallelEvaluator, folder: Path, trials: int) -> None:
    """A search whose journal must hold every trial once."""
    path = folder / "journal.jsonl"
    with Journal(path, problem) as journal:
        search([RandomPlacement(problem)], evaluator, Budget(trials=trials), journal=journal)
    recorded = read_trials(path, problem)
    assert len(recorded) == trials
    assert len({trial.placement for trial in recorded}) == trials
    assert all(trial.measurement.ok for trial in recorded)


def test_an_evaluator_like_any_other() -> None:
    problem = tiny_problems()[0].problem
    make = functools.partial(SimulatedEvaluator, problem, threads=1)
    workers = Workers(make, per_group=2, resources={"CPU": 1.0}, trial_seconds=60.0, cheap=True)
    check_evaluator(ParallelEvaluator(problem, workers, cheap=True))
    workers.close()


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    problem = wide()
    workers, evaluator = hired(problem, tmp_path)
    (tmp_path / "die").touch()
    run(problem, evaluator, tmp_path, 40)
    assert workers.replaced == 1
    assert len(calls(tmp_path)) == 41  # the one it had was tried again
    workers.close()


def test_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    problem = wide()
    workers, evaluator = hired(problem, tmp_path, trial_seconds=2.0)
    (tmp_path / "hang").touch()
    run(problem, evaluator, tmp_path, 40)
    assert workers.replaced == 1
    assert len(calls(tmp_path)) == 41
    workers.close()


def test_a_placement_that_kills_two_workers_has_failed(tmp_path: Path) -> None:
    problem = wide()
    workers, evaluator = hired(problem, tmp_path, poison=True)
    good, bad = (Placement.of(problem, [device] * problem.num_groups) for device in (0, 2))
    fine, failed = evaluator.evaluate([good, bad])
    assert fine.ok
    assert failed.outcome is Outcome.FAILED
    assert "worker died" in failed.reason
    assert len(calls(tmp_path)) == 3
    workers.close()


def test_what_hangs_twice_has_timed_out(tmp_path: Path) -> None:
    problem = wide()
    # Slower for everybody than anybody may be.
    workers, evaluator = hired(problem, tmp_path, seconds=3600.0, trial_seconds=1.0, per_group=1)
    [measurement] = evaluator.evaluate([Placement.of(problem, [0] * problem.num_groups)])
    assert measurement.outcome is Outcome.TIMED_OUT
    assert len(calls(tmp_path)) == 2
    workers.close()


def broken() -> Busiest:
    raise RuntimeError("no device here")


def test_workers_that_cannot_start_say_why() -> None:
    problem = wide()
    workers = Workers(broken, per_group=1, resources={"CPU": 1.0}, trial_seconds=60.0, cheap=False)
    evaluator = ParallelEvaluator(problem, workers, cheap=False)
    with pytest.raises(WorkerError, match=r"no worker can be started: .*no device here"):
        evaluator.evaluate([Placement.of(problem, [0] * problem.num_groups)])


def test_more_than_the_cluster_has() -> None:
    with pytest.raises(SearchError, match=r"2 workers need 8 GPU \(4 each\), the cluster has 0"):
        _check_room(TeamConfig(workers=2, resources={"GPU": 4.0}))
    with pytest.raises(SearchError, match=r"1 workers need 1 board \(1 each\), the cluster has 0"):
        _check_room(TeamConfig(resources={"board": 1.0}))
    _check_room(TeamConfig(workers=8))
