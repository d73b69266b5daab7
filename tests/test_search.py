from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from placewright.budget import Budget
from placewright.cluster import Cluster
from placewright.errors import PlacementError, SearchError, WorkerError
from placewright.evaluators.base import Evaluator
from placewright.graph import Graph, Op
from placewright.journal import Journal, read_trials
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import OneShot, Placer
from placewright.problem import Problem, make_problem
from placewright.session.search import Progress, search


def problem() -> Problem:
    ops = [Op(name=f"op{i}", type="t") for i in range(6)]
    return make_problem(Graph.from_ops("m", ops, []), Cluster.load("k80x2"))


class Summing(Evaluator):
    """A step takes as long as the sum of the device numbers; all on device 0 fails."""

    def __init__(self, made: Problem) -> None:
        self._problem = made
        self.seen: list[Placement] = []

    @property
    def problem(self) -> Problem:
        return self._problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        self.seen += placements
        return [
            Measurement(outcome=Outcome.OK, step_seconds=(float(total),))
            if (total := p.devices.sum())
            else Measurement(outcome=Outcome.FAILED, reason="all on 0")
            for p in placements
        ]


class Counting(Placer):
    """Proposes the numbers in base 3, for ever; remembers what it was told."""

    name = "counting"
    endless = True

    def __init__(self, made: Problem, start: int = 0, name: str = "counting") -> None:
        super().__init__(made)
        self.name = name
        self.told: list[Trial] = []
        self._next = start

    def ask(self, count: int) -> list[Placement]:
        numbers = range(self._next, self._next + count)
        self._next += count
        return [
            Placement.of(self.problem, [(n % 729) // 3**k % 3 for k in range(6)]) for n in numbers
        ]

    def tell(self, trials: Sequence[Trial]) -> None:
        self.told += trials


def one(made: Problem, name: str, *devices: list[int]) -> OneShot:
    return OneShot(name, made, lambda p: [Placement.of(p, d) for d in devices])


def test_the_best_of_each_and_of_all() -> None:
    made = problem()
    progress = search(
        [one(made, "a", [0] * 6, [2] * 6, [1] * 6), one(made, "b", [0] * 5 + [1])],
        Summing(made),
        Budget(trials=100),
    )
    assert progress.best is not None
    assert progress.best.placer == "b"
    assert [(r.method, r.trials) for r in progress.results()] == [("a", 3), ("b", 1)]
    best = progress.results()[0].best
    assert best is not None
    assert best.measurement.mean_seconds == 6.0


def test_nothing_is_evaluated_twice_but_credit_is_shared() -> None:
    made = problem()
    evaluator = Summing(made)
    progress = search(
        [one(made, "a", [1] * 6), one(made, "b", [1] * 6)], evaluator, Budget(trials=9)
    )
    assert len(evaluator.seen) == 1
    a, b = progress.results()
    assert (a.trials, b.trials) == (1, 0)
    assert b.best is not None
    assert b.best.measurement.mean_seconds == 6.0


def test_later_placers_are_told_what_earlier_ones_tried() -> None:
    made = problem()
    late = Counting(made)
    search([one(made, "a", [1] * 6), late], Summing(made), Budget(trials=5))
    assert [trial.placer for trial in late.told] == ["a"] + ["counting"] * 4


def test_endless_placers_share_the_trials() -> None:
    made = problem()
    progress = search(
        [one(made, "a", [2] * 6), Counting(made, name="x"), Counting(made, 300, name="y")],
        Summing(made),
        Budget(trials=201),
    )
    assert [(r.method, r.trials) for r in progress.results()] == [("a", 1), ("x", 100), ("y", 100)]


def test_one_with_half_a_share_gets_half_as_much() -> None:
    made = problem()
    x, y = Counting(made, name="x"), Counting(made, 300, name="y")
    x.share = 0.5
    progress = search([one(made, "a", [2] * 6), x, y], Summing(made), Budget(trials=181))
    assert [(r.method, r.trials) for r in progress.results()] == [("a", 1), ("x", 60), ("y", 120)]


def test_a_placer_that_only_repeats_itself_ends() -> None:
    made = problem()
    progress = search([Counting(made)], Summing(made), Budget(trials=10_000))
    assert progress.trials == 729


def test_a_placer_whose_turn_never_came_says_so() -> None:
    made = problem()
    nothing = one(made, "nothing")
    placers = [nothing, Counting(made, name="x"), one(made, "late", [1] * 6)]
    stopped = False

    def watch(progress: Progress) -> None:
        nonlocal stopped
        stopped = True

    progress = search(
        placers, Summing(made), Budget(trials=500), observe=watch, stop=lambda: stopped
    )
    reasons = {result.method: result.why_not for result in progress.results()}
    assert reasons == {"nothing": "", "x": "", "late": "the search was over before its turn"}


def test_time_runs_out() -> None:
    made = problem()
    progress = search([Counting(made)], Summing(made), Budget(seconds=1e-9))
    assert progress.trials == 0


def test_stop_is_heard_after_every_batch() -> None:
    made = problem()
    seen: list[int] = []

    def observe(progress: Progress) -> None:
        seen.append(progress.trials)

    search(
        [Counting(made)], Summing(made), Budget(trials=700), observe=observe,
        stop=lambda: len(seen) >= 2,
    )  # fmt: skip
    assert len(seen) == 2


def test_resuming_ends_where_the_whole_run_would(tmp_path: Path) -> None:
    made = problem()

    def run(path: Path, trials: int) -> list[Trial]:
        with Journal(path, made) as journal:
            search(
                [one(made, "a", [1] * 6, [2] * 6), Counting(made)],
                Summing(made),
                Budget(trials=trials),
                journal=journal,
            )
        return read_trials(path, made)

    whole = run(tmp_path / "whole.jsonl", 150)
    first = run(tmp_path / "parts.jsonl", 70)
    both = run(tmp_path / "parts.jsonl", 150)
    assert both[:70] == first
    assert [t.placement for t in both] == [t.placement for t in whole]
    assert [t.measurement for t in both] == [t.measurement for t in whole]
    assert both[70].at_seconds >= first[-1].at_seconds


def test_replaying_a_journal_gives_the_same_numbers(tmp_path: Path) -> None:
    made = problem()
    with Journal(tmp_path / "j.jsonl", made) as journal:
        search([Counting(made)], Summing(made), Budget(trials=100), journal=journal)
    trials = read_trials(tmp_path / "j.jsonl", made)
    again = Summing(made).evaluate([trial.placement for trial in trials])
    assert again == [trial.measurement for trial in trials]


class Breaking(Summing):
    """Devices that break after some runs, which take long."""

    cheap = False

    def __init__(self, made: Problem, runs: int, path: Path) -> None:
        super().__init__(made)
        self._runs = runs
        self._path = path
        self.recorded: list[int] = []
        """Trials in the journal before each run."""

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        self.recorded += [len(read_trials(self._path, self.problem))] * len(placements)
        if len(self.seen) + len(placements) > self._runs:
            raise WorkerError("the devices are gone")
        return super().evaluate(placements)


def test_no_real_run_is_lost_when_the_devices_break(tmp_path: Path) -> None:
    made = problem()
    path = tmp_path / "j.jsonl"
    evaluator = Breaking(made, 6, path)
    placers = [one(made, "a", [1] * 6), Counting(made), Counting(made, 300, name="late")]
    with Journal(path, made) as journal:
        progress = search(placers, evaluator, Budget(trials=100), journal=journal)
    assert progress.fault == "the devices are gone"
    assert progress.trials == 6
    assert progress.best is not None
    # Each was recorded before the next began, and nobody tried again after the break.
    assert evaluator.recorded == list(range(7))


def test_devices_that_never_worked_are_an_error(tmp_path: Path) -> None:
    made = problem()
    with (
        Journal(tmp_path / "j.jsonl", made) as journal,
        pytest.raises(WorkerError, match="the devices are gone"),
    ):
        search(
            [Counting(made)],
            Breaking(made, 0, tmp_path / "j.jsonl"),
            Budget(trials=100),
            journal=journal,
        )


def test_budgets_that_leave_nothing_to_do() -> None:
    for budget in ({}, {"seconds": 0.0}, {"seconds": -1.0}, {"trials": 0}):
        with pytest.raises(SearchError, match="budget"):
            Budget(**budget)


def test_a_placer_of_another_problem_is_refused() -> None:
    made = problem()
    other = make_problem(made.graph, Cluster.load("k80x4"))
    with pytest.raises(PlacementError, match="was made for space"):
        search([one(other, "a", [0] * 6)], Summing(made), Budget(trials=1))
