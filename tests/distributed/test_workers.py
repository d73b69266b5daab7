"""Workers that die, hang or are slow: nothing is lost, nothing is tried for nothing."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from placewright.budget import Budget
from placewright.distributed import watch
from placewright.distributed.config import TeamConfig
from placewright.distributed.session import _check_room
from placewright.distributed.workers import Workers
from placewright.errors import SearchError, WorkerError
from placewright.evaluators.base import Request
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.journal import Journal, read_trials
from placewright.measurement import Outcome
from placewright.placement import Placement
from placewright.placers.random_placement import RandomPlacement
from placewright.problem import Problem
from placewright.session.config import RoundsConfig, SearchConfig
from placewright.session.driver import Session
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
) -> Workers:
    make = functools.partial(Busiest, problem, folder, seconds, poison)
    options: dict[str, Any] = {"workers": 2, "resources": {"CPU": 1.0}, "trial_seconds": 60.0}
    return Workers(problem, make, TeamConfig(**(options | settings)), cheap=False)


def run(problem: Problem, evaluator: Workers, folder: Path, trials: int) -> None:
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
    workers = Workers(problem, make, TeamConfig(workers=2), cheap=True)
    check_evaluator(workers)
    workers.close()


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    problem = wide()
    workers = hired(problem, tmp_path)
    (tmp_path / "die").touch()
    run(problem, workers, tmp_path, 40)
    assert workers.replaced == 1
    assert len(calls(tmp_path)) == 41  # the one it had was tried again
    workers.close()


def test_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    problem = wide()
    workers = hired(problem, tmp_path, trial_seconds=2.0)
    (tmp_path / "hang").touch()
    run(problem, workers, tmp_path, 40)
    assert workers.replaced == 1
    assert len(calls(tmp_path)) == 41
    workers.close()


def test_a_placement_that_kills_two_workers_has_failed(tmp_path: Path) -> None:
    problem = wide()
    workers = hired(problem, tmp_path, poison=True)
    good, bad = (Placement.of(problem, [device] * problem.num_groups) for device in (0, 2))
    fine, failed = workers.evaluate([good, bad])
    assert fine.ok
    assert failed.outcome is Outcome.FAILED
    assert "worker died" in failed.reason
    assert len(calls(tmp_path)) == 3
    workers.close()


def test_workers_that_are_gone_with_their_machine_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = iter([False, True, True])
    monkeypatch.setattr(watch, "machine_died", lambda fault: next(gone, False))
    problem = wide()
    workers = hired(problem, tmp_path, poison=True, workers=1)
    [failed] = workers.evaluate([Placement.of(problem, [2] * problem.num_groups)])
    assert failed.outcome is Outcome.FAILED
    assert len(calls(tmp_path)) == 4
    workers.close()


def test_a_placement_that_takes_machine_after_machine_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "machine_died", lambda fault: True)
    problem = wide()
    workers = hired(problem, tmp_path, poison=True, workers=1)
    good, bad = (Placement.of(problem, [device] * problem.num_groups) for device in (0, 2))
    failed, fine = workers.evaluate([bad, good])
    assert failed.outcome is Outcome.FAILED
    assert fine.ok
    assert len(calls(tmp_path)) == 4
    workers.close()


def test_what_hangs_twice_has_timed_out(tmp_path: Path) -> None:
    problem = wide()
    # Slower for everybody than anybody may be.
    workers = hired(problem, tmp_path, seconds=3600.0, trial_seconds=1.0, workers=1)
    [measurement] = workers.evaluate([Placement.of(problem, [0] * problem.num_groups)])
    assert measurement.outcome is Outcome.TIMED_OUT
    assert len(calls(tmp_path)) == 2
    workers.close()


def test_the_same_trials_as_in_one_process(tmp_path: Path) -> None:
    """Who was quick does not matter to what a method proposes, nor to the order it is recorded."""
    problem = wide()
    workers = hired(problem, tmp_path)
    found = []
    for number, evaluator in enumerate((workers, Busiest(problem, tmp_path, 0.0, False))):
        with Journal(tmp_path / f"{number}.jsonl", problem) as journal:
            search([RandomPlacement(problem)], evaluator, Budget(trials=30), journal=journal)
        trials = read_trials(tmp_path / f"{number}.jsonl", problem)
        found.append([(trial.placement, trial.measurement) for trial in trials])
    assert found[0] == found[1]
    workers.close()


def test_what_is_dropped_is_never_answered(tmp_path: Path) -> None:
    problem = wide()
    workers = hired(problem, tmp_path, seconds=0.2)
    first, second = (Placement.of(problem, [device] * problem.num_groups) for device in (0, 1))
    workers.wait_until_ready()
    workers.submit([Request(first)])
    workers.drop()
    workers.submit([Request(second)])
    assert [placement for placement, _ in workers.collect(60.0)] == [second]
    assert workers.collect(1.0) == []
    workers.close()


@pytest.mark.parametrize("how", ["measure", "simulate+measure"])
def test_what_workers_measure_has_a_final(tmp_path: Path, how: Any) -> None:
    problem = wide()
    workers = hired(problem, tmp_path)
    config = SearchConfig(
        method="random", trials=40, evaluate=how, rounds=RoundsConfig(simulate_seconds=0.5)
    )
    result = Session(problem, config, team=workers, directory=tmp_path / "out").run()
    assert result.best is not None
    assert len(result.best.measurement.step_seconds) == RoundsConfig.final_rounds
    assert result.comparisons
    recorded = read_trials(tmp_path / "out" / "journal.jsonl", problem)
    assert len(recorded) == result.trials <= 40
    workers.close()


def broken() -> Busiest:
    raise RuntimeError("no device here")


def test_workers_that_cannot_start_say_why() -> None:
    problem = wide()
    workers = Workers(problem, broken, TeamConfig(resources={"CPU": 1.0}), cheap=False)
    with pytest.raises(WorkerError, match=r"no worker can be started: .*no device here"):
        workers.evaluate([Placement.of(problem, [0] * problem.num_groups)])


def test_more_than_the_cluster_has() -> None:
    with pytest.raises(SearchError, match=r"2 workers need 8 GPU \(4 each\), the cluster has 0"):
        _check_room(TeamConfig(workers=2, resources={"GPU": 4.0}))
    with pytest.raises(SearchError, match=r"1 workers need 1 board \(1 each\), the cluster has 0"):
        _check_room(TeamConfig(resources={"board": 1.0}))
    _check_room(TeamConfig(workers=8, resources={"CPU": 1.0}))
