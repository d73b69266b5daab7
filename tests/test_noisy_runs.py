"""Learning and searching where every trial is a real run, whose time is noisy: on a simulated
machine, so that the true times are known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placewright.errors import SearchError
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.journal import Journal, read_trials
from placewright.learning.config import PPO, configured
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.local_search import MEASURED, LocalSearch
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.session.config import RoundsConfig, SearchConfig
from placewright.session.driver import Session
from placewright.session.real import RealRuns
from placewright.session.result import Result
from placewright.testing import gpu_boards, layered_graph
from tests.simulated_machine import SimulatedRunner, as_it_is

SMALL = configured(PPO, ["policy.hidden=16", "policy.attention=4"])
ROUNDS = RoundsConfig(finalists=2, final_rounds=2, candidates=4)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(layered_graph(120, 6), gpu_boards(4), ProblemConfig(groups=30))


def _search(
    problem: Problem, runner: SimulatedRunner, method: str, trials: int, **more: object
) -> Result:
    learner = SMALL if "ppo" in method else None
    settings = {"learner": learner, "evaluate": "measure", "rounds": ROUNDS} | more
    folder = settings.pop("directory", None)
    config = SearchConfig(method=method, trials=trials, **settings)  # type: ignore[arg-type]
    return Session(problem, config, runner=runner, directory=folder).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.005, 0.03])
def test_how_much_times_differ_is_found_out_by_measuring_twice(
    problem: Problem, noise: float, tmp_path: Path
) -> None:
    runner = SimulatedRunner(as_it_is(problem), noise=noise)
    config = SearchConfig(method="random", trials=100, evaluate="measure")
    with Journal(tmp_path / "journal.jsonl", problem) as journal:
        real = RealRuns(problem, MeasuredEvaluator(problem, runner), config, journal=journal)
        real.find_references()
        real.measure(real.unmeasured_references())
        assert real.noise == MeasuredEvaluator.noise  # nothing is known yet
        real.repeat_references()
    assert Counter(len(runs) for runs in real.samples.values())[2] == 3
    assert noise / 2 < real.noise < 4 * noise
    # One that goes on comes to the same, whatever was measured since.
    with Journal(tmp_path / "journal.jsonl", problem) as journal:
        again = RealRuns(problem, MeasuredEvaluator(problem, runner), config, journal=journal)
        again.find_references()
        again.repeat_references()
        assert again.noise == real.noise
        again.measure([(p, "single") for p in again.references["single"]])
        assert again.noise == real.noise


def test_the_best_of_a_policy_are_tried_again(problem: Problem, tmp_path: Path) -> None:
    runner = SimulatedRunner(as_it_is(problem), noise=0.03)
    _search(problem, runner, "ppo", 150, directory=tmp_path)
    trials = [t for t in read_trials(tmp_path / "journal.jsonl", problem) if t.placer == "ppo"]
    runs = Counter(trial.placement for trial in trials)
    often = [placement for placement, count in runs.items() if count > 1]
    assert often
    # They are of the best, by what they took the first time.
    first = {t.placement: t.measurement.mean_seconds for t in reversed(trials)}
    ranked = sorted(first, key=first.__getitem__)
    assert np.mean([ranked.index(p) for p in often]) < len(ranked) / 4


def test_a_search_in_the_calibrated_simulator_saves_real_runs(
    problem: Problem, tmp_path: Path
) -> None:
    """By the true times of the first that a policy proposes for real runs."""
    truth = as_it_is(problem, seed=3)
    found = {}
    for first in (None, 1.0):
        runner = SimulatedRunner(truth, noise=0.01)
        folder = tmp_path / str(first)
        result = _search(problem, runner, "ppo", 60, simulate_first=first, directory=folder)
        assert 40 <= result.trials <= 60
        own = [t for t in read_trials(folder / "journal.jsonl", problem) if t.placer == "ppo"]
        group_of = problem.grouping.group_of
        true = [runner.true(t.placement.devices[group_of]).mean_seconds for t in own[:12]]
        found[first] = np.mean(sorted(true)[:6])
    assert found[1.0] < found[None]


def test_simulating_first_is_for_real_runs() -> None:
    with pytest.raises(SearchError, match="`simulate_first` is for evaluate='measure'"):
        SearchConfig(method="ppo", simulate_first=5.0, evaluate="simulate")
    with pytest.raises(SearchError, match="leaves no time"):
        SearchConfig(method="ppo", simulate_first=0.0, evaluate="measure")


# --- local search --------------------------------------------------------------------------------


def _told(placement: Placement, seconds: float | None) -> list[Trial]:
    measurement = (
        Measurement(outcome=Outcome.FAILED, reason="test")
        if seconds is None
        else Measurement(outcome=Outcome.OK, step_seconds=(seconds,))
    )
    return [Trial(placement=placement, measurement=measurement, placer="local-search")]


def _beginning(problem: Problem) -> tuple[LocalSearch, Placement]:
    search = LocalSearch(problem, replace(MEASURED, noise=0.05, chains=1))
    start = Placement.of(problem, problem.allowed.argmax(axis=1))
    search.tell(_told(start, 1.0))
    while True:
        (change,) = search.ask(1)
        asked = search._tried[change.digest]
        assert asked is not None
        if asked.change is not None:
            return search, change
        search.tell(_told(change, 2.0))  # one of those that it begins with


def test_a_lucky_change_is_not_taken(problem: Problem) -> None:
    search, change = _beginning(problem)
    before = search._home.chains[0].now
    search.tell(_told(change, 0.97))
    assert search._home.chains[0].now is before
    assert [(again.placement, again.known) for again in search.notes.again] == [(change, 1)]
    search.tell(_told(change, 0.97))  # the very same time: it was told before
    assert search.notes.again
    search.tell(_told(change, 1.2))
    assert not search.notes.again
    assert search._home.chains[0].now is before


def test_a_change_that_keeps_winning_is_taken(problem: Problem) -> None:
    search, change = _beginning(problem)
    for seconds in (0.97, 0.971):
        search.tell(_told(change, seconds))
        assert search.notes.again
    search.tell(_told(change, 0.972))
    assert not search.notes.again
    now = search._home.chains[0].now
    assert (now.devices == change.devices).all()
    assert now.score.value == pytest.approx(0.971)


def test_a_change_that_is_clearly_better_is_taken_at_once(problem: Problem) -> None:
    search, change = _beginning(problem)
    search.tell(_told(change, 0.5))
    assert not search.notes.again
    assert (search._home.chains[0].now.devices == change.devices).all()


def test_a_change_that_fails_the_second_time_is_not_taken(problem: Problem) -> None:
    search, change = _beginning(problem)
    before = search._home.chains[0].now
    search.tell(_told(change, 0.97))
    search.tell(_told(change, None))
    assert not search.notes.again
    assert search._home.chains[0].now is before
    ran = [elite.devices for elite in search._home.elites if elite.score.failure == 0]
    assert all((devices != change.devices).any() for devices in ran)


# --- going on ------------------------------------------------------------------------------------

_RUN = """
import sys
from pathlib import Path
from placewright.learning.config import PPO, configured
from placewright.problem import ProblemConfig, make_problem
from placewright.session import driver, search
from placewright.session.config import RoundsConfig, SearchConfig
from placewright.testing import gpu_boards, layered_graph
from tests.simulated_machine import SimulatedRunner, as_it_is

search._CHECKPOINT_SECONDS = 0.0  # at every update
problem = make_problem(layered_graph(120, 6), gpu_boards(4), ProblemConfig(groups=30))
config = SearchConfig(
    method="ppo", trials=int(sys.argv[2]), evaluate="measure",
    simulate_first=float(sys.argv[3]) or None,
    learner=configured(PPO, ["policy.hidden=16", "policy.attention=4"]),
    rounds=RoundsConfig(finalists=2, final_rounds=2),
)
runner = SimulatedRunner(as_it_is(problem), noise=0.02, seed=int(sys.argv[4]))
result = driver.Session(problem, config, runner=runner, directory=sys.argv[1]).run()
print(result.trials, flush=True)
"""


@pytest.mark.parametrize("simulate_first", ["0", "1"])
def test_a_killed_machine_goes_on_with_what_was_measured(
    tmp_path: Path, simulate_first: str, problem: Problem
) -> None:
    folder, script = tmp_path / "run", tmp_path / "run.py"
    script.write_text(textwrap.dedent(_RUN))
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'src'}"}

    def command(seed: int) -> list[str]:
        return [sys.executable, str(script), str(folder), "130", simulate_first, str(seed)]

    with subprocess.Popen(command(0), env=environment) as first:
        journal = folder / "journal.jsonl"
        while not list(folder.glob("checkpoint-*")) or journal.read_bytes().count(b"\n") < 50:
            assert first.poll() is None
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
    before = read_trials(journal, problem)
    done = subprocess.run(
        command(1), env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=120
    )
    after = read_trials(journal, problem)
    assert after[: len(before)] == before  # nothing is lost
    assert 120 <= len(after) <= 130
    assert int(done.stdout) == len(after)
    # What is tried more often than that was in the final as well.
    searched = [trial for trial in after[: -2 * 4] if trial.placer == "ppo"]
    assert max(Counter(trial.placement for trial in searched).values()) <= 4
    updates = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if line]
    assert len(updates) >= 3
