"""The part of a search that places every op for itself, before and after the search by groups.

Groups make a search of hundreds of choices out of one of thousands, and bound what it can find.
So op-level HEFT and m-ETF are tried first: how they compare with the best that is known by groups
tells whether groups are what limits the result, and how the budget is best spent. After the search
by groups, a local search over single ops goes on from the best of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from placewright.budget import Budget
from placewright.cluster import Cluster
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Edge, Graph, Op, Tensor
from placewright.measurement import Trial, better
from placewright.placement import Placement
from placewright.placers.base import OneShot, Placer
from placewright.placers.op_level import bytes_needed, op_heft, op_m_etf
from placewright.placers.op_search import OpSearch
from placewright.problem import Problem, make_problem
from placewright.room import why_no_room
from placewright.session.search import Progress, Record, search
from placewright.stopping import never

SCHEDULERS = {"op-heft": op_heft, "op-m-etf": op_m_etf}
"""The methods that place every op in one go."""

MOST_OPS = 200_000
"""Larger graphs are placed by groups alone."""

_FEW_GROUPS = 1000
"""A problem whose groups are single ops, and no more than these, needs no stage of its own: every
method places them op by op."""

_OPENING = 0.25
"""Share of the budget that the schedulers may take."""


def is_worthwhile(problem: Problem) -> bool:
    """Whether placing op by op is anything else than placing by groups."""
    if problem.graph.num_ops > MOST_OPS or problem.homes is not None:
        return False  # the schedulers know nothing of weights that travel
    return problem.num_groups > _FEW_GROUPS or problem.refined is not problem


def compile_schedulers(cluster: Cluster) -> None:
    """The first call of each compiles it, which takes seconds once on a machine; that is nobody's
    search time."""
    ops = [Op(name="first", type="Op", outputs=(Tensor(1),)), Op(name="last", type="Op")]
    tiny = make_problem(Graph.from_ops("tiny", ops, [Edge("first", "last")]), cluster)
    for schedule in SCHEDULERS.values():
        schedule(tiny, never)


def share_for_groups(by_groups_seconds: float, by_ops_seconds: float) -> float:
    """The share of a budget that the search by groups gets, judged by the best that schedulers find
    by groups and op by op. It finds much that they do not, but never what groups rule out."""
    ratio = by_groups_seconds / by_ops_seconds if by_ops_seconds > 0 else 1.0
    if not ratio > 0.95:  # also where neither runs
        return 0.8
    return 0.5 if ratio < 1.1 else 0.25


@dataclass(kw_only=True)
class OpStage:
    """Both parts of the stage, for one search."""

    problem: Problem
    """By groups; it is `problem.refined` that is placed."""
    budget: Budget
    """Of the whole search."""
    seed: int = 0
    journal: Record | None = None
    observe: Callable[[Progress], None] = lambda progress: None
    stop: Callable[[], bool] = never
    lower_bound_seconds: float = 0.0
    """Of the problem op by op."""
    started: float = field(default_factory=time.monotonic)
    opening: Progress | None = None
    """What the schedulers did, once they have run."""

    def __post_init__(self) -> None:
        self._evaluator = SimulatedEvaluator(self.problem.refined)

    def open(self) -> Progress:
        """Tries what the schedulers plan."""
        refined = self.problem.refined
        placers = [_scheduler(name, refined, self.stop) for name in SCHEDULERS]
        budget = self._part(_OPENING)
        assert budget is not None, "a budget is of one trial at least"
        self.opening = search(
            placers,
            self._evaluator,
            budget,
            journal=self.record(self._is_of_schedulers),
            seed=self.seed,
            observe=self.observe,
            stop=self.stop,
            lower_bound_seconds=self.lower_bound_seconds,
        )
        return self.opening

    def budget_for_groups(self, reference_seconds: float) -> Budget | None:
        """What the search by groups may use, given the best step by groups that is known; None for
        nothing."""
        assert self.opening is not None
        if self.opening.proven:
            return None
        best = self.opening.best
        by_ops = float("inf") if best is None else best.measurement.mean_seconds
        share = share_for_groups(reference_seconds, by_ops)
        return self._part(share, spent_trials=self.opening.trials)

    def close(self, by_groups: Progress | None) -> Progress | None:
        """Goes on from the best of both for the rest of the budget, op by op; None where nothing of
        it is left, or nothing to gain."""
        assert self.opening is not None
        parts = [part for part in (self.opening, by_groups) if part is not None]
        # What is proved of groups holds for single ops where these are the groups.
        proofs = parts if self.problem.refined is self.problem else parts[:1]
        if self.stop() or any(part.proven for part in proofs):
            return None
        budget = self._part(1.0, spent_trials=sum(part.trials for part in parts))
        if budget is None:
            return None
        placer = OpSearch(self.problem.refined, seed=self.seed)
        known = [self._lifted(part.best) for part in parts if part.best is not None]
        if known:
            placer.tell(known)
        return search(
            [placer],
            self._evaluator,
            budget,
            journal=self.record(self._is_of_search),
            seed=self.seed,
            observe=lambda progress: self.observe(merged([*parts, progress], self.budget)),
            stop=self.stop,
            lower_bound_seconds=self.lower_bound_seconds,
        )

    def record(self, belongs: Callable[[Trial], bool]) -> Record | None:
        """The journal as one part of the search sees it."""
        if self.journal is None:
            return None
        return _Part(self.journal, belongs, self.started)

    def is_by_groups(self, trial: Trial) -> bool:
        return not self._is_of_schedulers(trial) and not self._is_of_search(trial)

    def _is_of_schedulers(self, trial: Trial) -> bool:
        return trial.placer in SCHEDULERS

    def _is_of_search(self, trial: Trial) -> bool:
        return trial.placer == OpSearch.name

    def _part(self, share: float, spent_trials: int = 0) -> Budget | None:
        """A share of what is left, None where no trials are; otherwise at least something, so that
        the search says what it tried."""
        seconds, trials = self.budget.seconds, self.budget.trials
        if seconds is not None:
            left = seconds - (time.monotonic() - self.started)
            seconds = max(1e-3, left * share)
        if trials is not None:
            if trials <= spent_trials:
                return None
            trials = max(1, int((trials - spent_trials) * share))
        return Budget(seconds=seconds, trials=trials)

    def _lifted(self, trial: Trial) -> Trial:
        """The same step, op by op: nothing runs elsewhere, so nothing needs to be tried."""
        refined = self.problem.refined
        if trial.placement.space == refined.space.fingerprint:
            return trial
        devices = self.problem.lifted(trial.placement.devices)
        return replace(trial, placement=Placement.of(refined, devices))


class _Part:
    """Those trials of a journal that belong to a part of a search, as its `Record`; what is
    appended is dated from the beginning of the whole search."""

    def __init__(self, journal: Record, belongs: Callable[[Trial], bool], started: float) -> None:
        self._journal, self._started = journal, started
        self._earlier_seconds = max((trial.at_seconds for trial in journal.trials), default=0.0)
        self.trials: Sequence[Trial] = [trial for trial in journal.trials if belongs(trial)]

    def append(self, trials: Sequence[Trial]) -> None:
        now = self._earlier_seconds + time.monotonic() - self._started
        self._journal.append([replace(trial, at_seconds=now) for trial in trials])


def _scheduler(name: str, refined: Problem, stop: Callable[[], bool]) -> Placer:
    schedule = SCHEDULERS[name]
    reason = why_no_room(bytes_needed(refined))
    placer = OneShot(name, refined, lambda p: [] if reason else schedule(p, stop))
    placer.notes.why_not = reason
    return placer


def merged(parts: Sequence[Progress], budget: Budget) -> Progress:
    """Where a search stands that is made in several parts."""
    result = Progress(budget=budget, started=parts[0].started)
    for part in parts:
        result.trials += part.trials
        result.resumed += part.resumed
        result.placer = part.placer
        if part.best is not None:
            result.best = better(result.best, part.best)
        result.best_of |= part.best_of
        result.trials_of |= part.trials_of
        result.seconds_of |= part.seconds_of
        result.why_not_of |= part.why_not_of
        result.metrics_of |= part.metrics_of
        result.fault = result.fault or part.fault
        result.proven = part.proven
        result.contenders.trials += part.contenders.near_the_best()
    return result
