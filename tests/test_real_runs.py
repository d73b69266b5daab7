"""How real runs are spent, on devices that do as they are told: no process is started."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placewright import methods as registry
from placewright import place
from placewright.backends import Run, Trace
from placewright.backends.tensorflow import TensorFlowRunConfig as RunConfig
from placewright.budget import Budget
from placewright.calibration import Calibration
from placewright.cluster import Cluster
from placewright.errors import SearchError, WorkerError
from placewright.evaluators.base import Evaluator, Request
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import frozen
from placewright.journal import read_trials
from placewright.learning.config import PPO, LearnerConfig
from placewright.learning.learner import Learner
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.session import rounds as rounds_module
from placewright.session.config import RoundsConfig, SearchConfig
from placewright.session.directory import began_with
from placewright.session.driver import (
    NOTHING_SEARCHED,
    Session,
    enough_for,
    unaffordable,
    wanted_in,
)
from placewright.session.metrics import read_metrics
from placewright.session.real import RealRuns
from placewright.session.result import Result
from placewright.session.rounds import Best, Rounds
from placewright.session.search import Progress, search
from placewright.simulator import Simulator
from placewright.testing import layered_graph

QUICK = RoundsConfig(simulate_seconds=1.0, candidates=2, finalists=2)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(layered_graph(60, 4), Cluster.load("cpu2"), ProblemConfig(groups=8))


class Devices:
    """Takes the place of a runner: as fast as the simulator, but for what `behave` makes of it."""

    def __init__(
        self,
        problem: Problem,
        behave: Callable[[Devices, Placement, float], Measurement] | None = None,
    ) -> None:
        self.problem = problem
        self.program = SimpleNamespace(graph=problem.graph)
        self.cluster = problem.cluster
        self.runs: list[Placement] = []
        self.traced = 0
        self.config = RunConfig()
        self.events: list[str] = []
        self.silent = False
        self._first = np.full(problem.num_groups, problem.graph.num_ops)
        np.minimum.at(self._first, problem.grouping.group_of, np.arange(problem.graph.num_ops))
        self._simulator = Simulator(problem)
        self._behave = behave

    def close(self) -> None:
        self.events.append("closed")

    def start(self) -> None:
        self.events.append("started")

    def demands(self) -> Mapping[int, Mapping[str, float]]:
        return {}

    def seconds_for_links(self, sizes: int) -> float:
        return 16.9 / 5 * sizes

    def time_links(self, sizes: Sequence[int]) -> dict[str, list[float]]:
        if self.silent:
            raise WorkerError("links could not be timed: no route")
        self.events.append("timed")
        return {link.name: [1e-6 + size / 1e12 for size in sizes] for link in self.cluster.links}

    def measure(self, devices: Sequence[int], **how: Any) -> Run:
        self.traced += bool(how.get("traces"))
        placement = Placement.of(self.problem, np.asarray(devices, np.int32)[self._first])
        self.runs.append(placement)
        seconds = float(self._simulator.run(placement.devices[np.newaxis]).step_seconds[0])
        if self._behave is not None:
            return Run(measurement=self._behave(self, placement, seconds))
        return Run(measurement=steady(seconds))


def evaluator(devices: Devices, problem: Problem | None = None) -> MeasuredEvaluator:
    return MeasuredEvaluator(problem or devices.problem, devices)  # type: ignore[arg-type]


def refined(devices: Devices, method: str, trials: int, **options: Any) -> Result:
    """Turns of simulating and measuring."""
    of_session = {name: options.pop(name) for name in ("directory", "stop") if name in options}
    config = SearchConfig(
        method=method, trials=trials, evaluate="simulate+measure", rounds=QUICK, **options
    )
    return Session(devices.problem, config, runner=devices, **of_session).run()  # type: ignore[arg-type]


def measured(devices: Devices, trials: int, **of_session: Any) -> Result:
    """Every trial of a random search a real run."""
    config = SearchConfig(method="random", trials=trials, evaluate="measure")
    return Session(devices.problem, config, runner=devices, **of_session).run()  # type: ignore[arg-type]


def real_runs(devices: Devices, problem: Problem | None = None, **config: Any) -> RealRuns:
    return RealRuns(problem or devices.problem, evaluator(devices, problem), SearchConfig(**config))


def steady(seconds: float) -> Measurement:
    return Measurement(outcome=Outcome.OK, step_seconds=(seconds,) * 9, peak_bytes=(1, 1))


def test_what_fails_in_the_final_cannot_win_and_does_not_spoil_it(problem: Problem) -> None:
    best: list[Placement] = []

    def behave(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        # The fastest of all, until it is run for the second time.
        if not best and len(set(placement.devices.tolist())) > 1:
            best.append(placement)
        if placement not in best:
            return steady(seconds)
        if devices.runs.count(placement) > 1:
            return Measurement(outcome=Outcome.FAILED, reason="it never did again")
        return steady(1e-3 * seconds)

    devices = Devices(problem, behave)
    result = refined(devices, "expert", 30)
    assert best
    assert result.best is not None
    assert result.placement not in best
    # The others went through all rounds.
    assert devices.runs.count(result.placement) >= QUICK.final_rounds
    failed = next(m.best for m in result.methods if m.best and m.best.placement in best)
    assert failed.measurement.reason == "it never did again"


def test_devices_that_break_leave_what_was_found(problem: Problem) -> None:
    def behave(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        if len(devices.runs) > 3:
            raise WorkerError("the devices are gone")
        return steady(seconds)

    devices = Devices(problem, behave)
    result = refined(devices, "expert", 30)
    assert result.trials == 3
    assert result.fault == "the devices are gone"
    assert not result.interrupted
    assert result.best is not None


def test_the_answer_is_compared_round_by_round(problem: Problem) -> None:
    def behave(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        # A machine that gets slower with every run.
        return steady(seconds * 1.02 ** len(devices.runs))

    devices = Devices(problem, behave)
    result = refined(devices, "local-search", 40)
    assert result.best is not None
    assert len(result.best.measurement.step_seconds) == QUICK.final_rounds
    assert devices.runs.count(result.placement) > QUICK.final_rounds
    # Also with the single device of the final, though another one was faster before.
    compared = {other.method for other in result.comparisons}
    assert compared | {result.best.placer} >= {"single", "expert"}
    for other in result.comparisons:
        assert other.half_width is not None
    assert result.summary()["comparisons"][0]["method"] in ("single", "expert")


def test_searching_leaves_the_time_of_the_final(problem: Problem) -> None:
    config = SearchConfig(budget=100.0, rounds=RoundsConfig(simulate_seconds=1000.0))
    real = RealRuns(problem, evaluator(Devices(problem)), config)
    rounds = Rounds(real=real, config=config, runner=None)
    real.measure([(Placement.of(problem, np.zeros(problem.num_groups, np.int32)), "single")])
    # As if that run had taken two seconds: twenty of them are the final's.
    real._measured_seconds = 2.0
    assert rounds._simulate_seconds() == pytest.approx(0.25 * (100.0 - 40.0), rel=0.05)


@pytest.mark.parametrize("how", ["measure", "simulate+measure"])
def test_a_budget_that_leaves_no_search_says_so(problem: Problem, how: Any) -> None:
    def search(trials: int) -> Result:
        config = SearchConfig(method="local-search", trials=trials, evaluate=how, rounds=QUICK)
        return Session(problem, config, runner=Devices(problem)).run()  # type: ignore[arg-type]

    few = search(3)
    assert few.remarks == (NOTHING_SEARCHED,)
    assert NOTHING_SEARCHED in few.notes()
    assert few.summary()["remarks"] == [NOTHING_SEARCHED]
    assert search(60).remarks == ()


def test_candidates_are_credited_to_who_proposed_them(problem: Problem) -> None:
    best = Best()
    placers = registry.make(["expert", "random", "local-search"], problem, seed=3, trials=400)
    seen: dict[Placement, str] = {}
    for placer in placers:
        ask = placer.ask

        def asked(
            count: int,
            ask: Callable[[int], list[Placement]] = ask,
            name: str = placer.name,
        ) -> list[Placement]:
            found = ask(count)
            for placement in found:
                seen.setdefault(placement, name)
            return found

        placer.ask = asked  # type: ignore[method-assign]
    search(placers, SimulatedEvaluator(problem), Budget(trials=200), journal=best)
    assert set(best.found_by.values()) == {"expert", "random", "local-search"}
    assert best.found_by == {p: seen[p] for p in best.seconds}
    seconds = [best.seconds[p] for p in best.ordered()]
    assert seconds == sorted(seconds)


def test_as_much_time_is_measured_as_simulated_where_runs_are_short(problem: Problem) -> None:
    """Between the number of candidates asked for and four times as many."""
    config = SearchConfig(evaluate="simulate+measure", rounds=RoundsConfig(candidates=3))
    real = RealRuns(problem, MeasuredEvaluator(problem, Devices(problem)), config)  # type: ignore[arg-type]
    rounds = Rounds(real=real, config=config, runner=None)
    assert rounds._num_candidates(2.0) == 3  # nobody knows yet what a run takes
    real._timed_runs = 10
    for run_seconds, count in ((5.0, 3), (0.25, 8), (0.01, 12)):
        real._measured_seconds = 10 * run_seconds
        assert rounds._num_candidates(2.0) == count


@pytest.mark.parametrize(("failing", "ran"), [(0, 8), (1, 8), (2, 2)])
def test_the_like_of_candidates_that_cannot_run_are_not_tried(
    problem: Problem, failing: int, ran: int
) -> None:
    def behave(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        if len(devices.runs) <= failing:
            return Measurement(outcome=Outcome.OUT_OF_MEMORY, reason="no room")
        return Measurement(outcome=Outcome.OK, step_seconds=(seconds,))

    devices = Devices(problem, behave)
    config = SearchConfig(evaluate="simulate+measure", rounds=RoundsConfig(candidates=2), trials=99)
    real = RealRuns(problem, MeasuredEvaluator(problem, devices), config)  # type: ignore[arg-type]
    proposed = registry.make(["random"], problem, seed=1)[0].ask(20)
    candidates = [(placement, "random") for placement in list(dict.fromkeys(proposed))[:8]]
    runs = Rounds(real=real, config=config, runner=None)._measure(candidates)
    assert list(runs) == [placement for placement, _ in candidates[:ran]]


def test_costs_are_fitted_to_references_and_the_fastest(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[Sequence[Placement]] = []

    def corrected(
        problem: Problem, calibration: Calibration, placements: Sequence[Placement],
        seconds: Sequence[float], *, most_tries: float,
    ) -> Calibration:  # fmt: skip
        assert len(placements) == len(seconds)
        fitted.append(placements)
        return calibration

    monkeypatch.setattr(rounds_module, "corrected", corrected)
    config = SearchConfig(evaluate="simulate+measure")
    real = RealRuns(problem, MeasuredEvaluator(problem, Devices(problem)), config)  # type: ignore[arg-type]
    real.find_references()
    references = [placement for placement, _ in real.unmeasured_references()]
    # The slowest of all, but it says what a device does alone.
    proposed = registry.make(["random"], problem, seed=1)[0].ask(100)
    others = [p for p in dict.fromkeys(proposed) if p not in references]
    for number, placement in enumerate([*others, *references]):
        measurement = Measurement(outcome=Outcome.OK, step_seconds=(1.0 + number,))
        real.append([Trial(placement=placement, measurement=measurement, placer="random")])
    calibration = Calibration(table=problem.costs, cluster=problem.cluster)
    Rounds(real=real, config=config, runner=None, calibration=calibration).correct()
    (chosen,) = fitted
    assert set(references) <= set(chosen)
    assert set(chosen) - set(references) == set(others[: 32 - len(references)])


def test_what_was_measured_counts_in_the_simulator(problem: Problem) -> None:
    (slow,) = registry.make(["expert"], problem)[0].ask(1)
    known = Trial(
        placement=slow,
        measurement=Measurement(outcome=Outcome.OK, step_seconds=(100.0, 300.0)),
        placer="measured",
    )
    best = Best([known])
    told: list[Trial] = []
    placers = registry.make(["expert", "local-search"], problem)
    for placer in placers:
        placer.tell = told.extend  # type: ignore[method-assign,assignment]
    search(placers[:1], SimulatedEvaluator(problem), Budget(trials=10), journal=best)
    # It is told of what was measured, and that is also what its own proposal is answered with.
    assert [trial.measurement.mean_seconds for trial in told] == [200.0, 200.0]
    assert best.seconds == {}


def test_the_luckiest_of_many_runs_is_not_the_answer(problem: Problem) -> None:
    lucky: list[Placement] = []

    def behave(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        # The tenth run is ten times as fast as it will ever be again.
        if len(devices.runs) == 10:
            lucky.append(placement)
            return steady(0.1 * seconds)
        return steady(seconds * (3.0 if placement in lucky else 1.0))

    devices = Devices(problem, behave)
    result = measured(devices, 60)
    assert lucky[0] not in devices.runs[:9]
    assert result.best is not None
    assert result.placement not in lucky
    assert devices.runs.count(lucky[0]) == 5  # it was in the final
    # The references are always there, measured in the same rounds.
    assert {m.method for m in result.methods} == {"single", "expert", "random"}
    assert {c.method for c in result.comparisons} | {result.best.placer} >= {"single", "expert"}
    assert result.trials == len(devices.runs) <= 60  # and no run is not counted


def test_what_a_method_holds_for_the_best_is_in_the_final(problem: Problem) -> None:
    rounds = RoundsConfig(finalists=2, final_rounds=1)
    real = real_runs(Devices(problem), trials=60, rounds=rounds)
    (random,) = registry.make(["random"], problem)
    real.measure([(placement, "random") for placement in random.ask(8)])
    fastest = real.best_placements(8)
    real.favourites = [fastest[5], fastest[6]]
    real.final()
    assert set(real.finals.means) == {fastest[0], fastest[5]}
    # Where it is among the fastest already, nobody gives way.
    real.favourites = [fastest[1], fastest[5]]
    real.final()
    assert set(real.finals.means) == {fastest[0], fastest[1]}


class Several(Evaluator):
    """Workers, as it were: it tries three at a time, and answers in another order."""

    cheap = False
    parallel = 3

    def __init__(self, devices: Devices) -> None:
        self._one = evaluator(devices)
        self._tried: list[tuple[Placement, Run]] = []
        self.most = 0

    @property
    def problem(self) -> Problem:
        return self._one.problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        return self._one.evaluate(placements)

    def submit(self, requests: Sequence[Request]) -> None:
        runs = self._one.run(requests)
        self._tried += [(r.placement, run) for r, run in zip(requests, runs, strict=True)]
        self.most = max(self.most, len(self._tried))

    def collect(self, seconds: float) -> list[tuple[Placement, Run]]:
        return [self._tried.pop()] if self._tried else []

    def drop(self) -> None:
        self._tried.clear()


@pytest.mark.parametrize("how", ["measure", "simulate+measure"])
def test_several_at_a_time_have_a_final_too(problem: Problem, how: Any, tmp_path: Path) -> None:
    devices = Devices(problem)
    several = Several(devices)
    config = SearchConfig(method="local-search", trials=60, evaluate=how, rounds=QUICK)
    result = Session(problem, config, team=several, directory=tmp_path).run()
    assert result.best is not None
    assert several.most >= 2
    assert len(result.best.measurement.step_seconds) == QUICK.final_rounds
    assert {c.method for c in result.comparisons} | {result.best.placer} >= {"single", "expert"}
    assert result.trials == len(devices.runs) <= 60
    assert len(read_trials(tmp_path / "journal.jsonl", problem)) == result.trials


@pytest.mark.parametrize("how", ["measure", "simulate+measure"])
def test_a_stop_does_not_wait_for_a_run(problem: Problem, how: Any) -> None:
    """A run of a slow model takes minutes."""
    hanging, ended = threading.Event(), threading.Event()

    def behave(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        if len(devices.runs) == 6:
            hanging.set()
            assert ended.wait(60), "the search waited for it"
        return steady(seconds)

    devices = Devices(problem, behave)
    config = SearchConfig(method="random", trials=60, evaluate=how, rounds=QUICK)
    runner: Any = devices
    result = Session(problem, config, runner=runner, stop=hanging.is_set).run()
    ended.set()
    assert result.interrupted
    assert result.best is not None
    assert result.trials == 5


def test_a_run_goes_on_as_it_began(problem: Problem, tmp_path: Path) -> None:
    def broken(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        return Measurement(outcome=Outcome.FAILED, reason="no step ever ended")

    # No step times in its journal, from which one might guess that they were real.
    measured(Devices(problem, broken), 8, directory=tmp_path)
    assert began_with(tmp_path) == "measure"
    assert wanted_in(SearchConfig(), tmp_path) == "measure"
    for wanted in ("simulate", "simulate+measure"):
        with pytest.raises(SearchError, match="began with measure; it cannot go on with simulate"):
            wanted_in(SearchConfig(evaluate=wanted), tmp_path)
    with pytest.raises(SearchError, match="began with measure; it cannot go on with simulate"):
        place(problem, trials=9, directory=tmp_path, evaluate="simulate")
    (tmp_path / "run.json").unlink()
    with pytest.raises(SearchError, match="does not say how it began"):
        place(problem, trials=9, directory=tmp_path)


def test_real_runs_need_a_model_that_can_be_run(problem: Problem) -> None:
    with pytest.raises(SearchError, match="needs a model that can be run, not only a graph"):
        place(problem, evaluate="measure", trials=9)


def test_a_measured_search_goes_on_where_it_was(problem: Problem, tmp_path: Path) -> None:
    for trials in (40, 50, 50):
        devices = Devices(problem)
        result = measured(devices, trials, directory=tmp_path)
        assert result.trials <= trials
        assert result.best is not None
    assert devices.runs == []
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == result.trials


def test_real_runs_go_on_under_other_costs(problem: Problem, tmp_path: Path) -> None:
    """Their times stay what they are, whatever is thought of the costs."""
    first = measured(Devices(problem), 40, directory=tmp_path)
    costs = dataclasses.replace(problem.costs, op_seconds=frozen(2 * problem.costs.op_seconds))
    dearer = Devices(dataclasses.replace(problem, costs=costs))
    again = measured(dearer, 50, directory=tmp_path)
    assert first.trials + len(dearer.runs) == again.trials


def test_a_budget_that_is_worth_it(problem: Problem) -> None:
    assert not enough_for(Budget(trials=5), 1e-3, 10)
    assert enough_for(Budget(seconds=60), 0.3, 10)
    assert not enough_for(Budget(seconds=60), 3.0, 10)
    assert unaffordable(problem, Budget(seconds=1.0)).startswith("the budget gives no time")
    assert unaffordable(problem, Budget(seconds=1000.0)) == ""


def test_what_nobody_asked_for_is_only_simulated(
    problem: Problem, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Devices(problem)

    def how(**config: Any) -> str:
        return Session(problem, SearchConfig(**config), runner=devices).evaluate  # type: ignore[arg-type]

    assert how(budget=1000.0) == "simulate+measure"
    assert how(trials=1000) == "simulate"
    assert caplog.text == ""
    assert how(budget=1.0) == "simulate"
    assert "simulated only: the budget gives no time to measure ten placements" in caplog.text
    assert how(budget=1.0, evaluate="measure") == "measure"


# --- learned placers -----------------------------------------------------------------------------


def test_the_learned_placer_lives_through_all_rounds(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners: list[Learner] = []
    problems: list[str] = []
    before: list[list[np.ndarray[Any, Any]]] = []
    after: list[list[np.ndarray[Any, Any]]] = []
    told: list[set[float]] = []

    def weights(learner: Learner) -> list[np.ndarray[Any, Any]]:
        return [p.detach().numpy().copy() for p in learner.policy.parameters()]

    def searching(
        placers: Sequence[Placer], evaluator: Evaluator, budget: Budget, **how: Any
    ) -> Progress:
        (learner,) = placers
        assert isinstance(learner, Learner)
        learners.append(learner)
        problems.append(evaluator.problem.fingerprint)
        before.append(weights(learner))
        told.append({trial.measurement.mean_seconds for trial in how["journal"].trials})
        known = len(how["journal"].trials)
        found = search(placers, evaluator, Budget(trials=known + 40), **how)
        after.append(weights(learner))
        return found

    def behave(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        return steady(3.0 * seconds)  # so that costs are corrected

    monkeypatch.setattr(rounds_module, "search", searching)
    devices = Devices(problem, behave)
    small = LearnerConfig(
        policy=dataclasses.replace(PPO.policy, hidden=16), samples=8, warm_start=2, polish=8,
        imitation_steps=1,
    )  # fmt: skip
    refined(devices, "ppo", 32, learner=small, directory=tmp_path)
    assert len(learners) >= 2
    assert len(set(problems)) > 1
    for first, second in zip(after, before[1:], strict=False):
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    # It begins every round with what was measured, and with nothing else.
    simulator = Simulator(problem)
    ran = np.stack([run.devices for run in devices.runs])
    real = 3.0 * simulator.run(ran).step_seconds
    assert all(np.isclose(real, seconds, rtol=1e-6).any() for known in told for seconds in known)
    # Its updates are one curve.
    updates = [record["update"] for record in read_metrics(tmp_path)]
    assert updates == list(range(1, learners[-1].updates + 1))


# --- costs ---------------------------------------------------------------------------------------


def test_costs_are_kept_and_a_run_goes_on_under_them(problem: Problem, tmp_path: Path) -> None:
    def behave(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        return steady(3.0 * seconds)

    first = Devices(problem, behave)
    result = refined(first, "local-search", 28, directory=tmp_path)
    # Both devices, and as these give no traces, what a person would spread over them.
    assert first.traced == 3
    assert result.calibration is not None
    # Without `save`: also a run that is killed has them.
    kept = Calibration.load(tmp_path / "costs.json", problem).problem(problem)
    assert kept == result.calibration.problem(problem)
    assert kept != problem
    # And they agree with the final.
    predicted = Simulator(kept).run(result.placement.devices[np.newaxis]).step_seconds[0]
    assert predicted == pytest.approx(result.step_seconds, rel=0.1)
    second = Devices(problem, behave)
    again = refined(second, "local-search", result.trials, directory=tmp_path)
    assert second.traced == 0
    assert again.calibration is not None
    assert again.calibration.problem(problem) == kept


class Traced(Devices):
    """Says what each op took, too."""

    def measure(self, devices: Sequence[int], **how: Any) -> Run:
        run = super().measure(devices, **how)
        names = self.problem.graph.op_names
        numbers = [int(device) for device in devices]
        where = dict(zip(names, numbers, strict=True))
        trace = Trace(op_seconds=dict.fromkeys(names, 1e-3), device_of=where)
        return dataclasses.replace(run, trace=trace)


def test_a_calibration_that_was_stopped_is_begun_anew(problem: Problem, tmp_path: Path) -> None:
    first = Traced(problem)
    refined(first, "expert", 20, directory=tmp_path, stop=lambda: bool(first.runs))
    assert first.traced == 1
    assert not (tmp_path / "costs.json").exists()
    second = Traced(problem)
    refined(second, "expert", 20, directory=tmp_path)
    assert second.traced == 2
    assert (tmp_path / "costs.json").exists()


def test_nothing_is_called_a_calibration_that_is_none(problem: Problem, tmp_path: Path) -> None:
    def broken(devices: Devices, placement: Placement, seconds: float) -> Measurement:
        return Measurement(outcome=Outcome.FAILED, reason="no step ever ended")

    devices = Devices(problem, broken)
    result = refined(devices, "expert", 8, directory=tmp_path)
    assert result.calibration is None
    assert not (tmp_path / "costs.json").exists()


def _rounds(problem: Problem, devices: Devices, budget: Budget) -> Rounds:
    """As if the run that it has behind it had taken two seconds."""
    config = SearchConfig(budget=budget.seconds, trials=budget.trials, rounds=QUICK)
    real = RealRuns(problem, evaluator(devices, problem), config)
    real.measure([(Placement.of(problem, np.zeros(problem.num_groups, np.int32)), "single")])
    real._measured_seconds = 2.0
    return Rounds(real=real, config=config, runner=devices)  # type: ignore[arg-type]


def _bandwidth(cluster: Cluster) -> float:
    return cluster.links[0].bandwidth


@pytest.mark.parametrize(
    ("budget", "timed"),
    [
        (Budget(seconds=60), False),
        (Budget(seconds=600), True),
        (Budget(trials=30), False),  # of two seconds each
        (Budget(trials=300), True),
        (Budget(trials=30, seconds=600), False),
    ],
)
def test_links_are_timed_where_the_budget_is_worth_it(
    problem: Problem, budget: Budget, timed: bool
) -> None:
    devices = Devices(problem)
    found = _rounds(problem, devices, budget)._with_timed_links()
    # No run is blamed for the time in which the model's processes start again.
    assert devices.events == (["timed", "started"] if timed else [])
    assert _bandwidth(found) == pytest.approx(1e12 if timed else _bandwidth(problem.cluster))


def test_links_of_a_calibration_are_not_timed_again(
    problem: Problem,
) -> None:
    devices = Devices(problem)
    faster = (dataclasses.replace(problem.cluster.links[0], bandwidth=1e12),)
    given = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, links=faster))
    rounds = _rounds(given, devices, Budget(seconds=600))
    assert rounds._with_timed_links() == given.cluster
    assert devices.events == []


def test_links_that_cannot_be_timed_are_as_the_cluster_says(
    problem: Problem, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Devices(problem)
    devices.silent = True
    rounds = _rounds(problem, devices, Budget(seconds=600))
    with caplog.at_level(logging.WARNING):
        assert rounds._with_timed_links() == problem.cluster
    assert "no route" in caplog.text


def test_a_stop_does_not_wait_for_processes_that_start(problem: Problem) -> None:
    devices = Devices(problem)
    begun, released = threading.Event(), threading.Event()

    def start() -> None:
        begun.set()
        released.wait()

    devices.start = start  # type: ignore[method-assign]
    rounds = _rounds(problem, devices, Budget(seconds=600))
    rounds.real.interrupted = begun.is_set
    found = rounds._with_timed_links()
    assert devices.events == ["timed"]
    assert _bandwidth(found) == pytest.approx(1e12)
    rounds._start()  # nothing is started after a stop
    released.set()
