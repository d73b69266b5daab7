"""A search in the simulator: references, the stage that places op by op, the methods by groups."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from placewright.budget import Budget
from placewright.errors import SearchError
from placewright.evaluators.base import Evaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.journal import Journal
from placewright.measurement import Measurement, Trial, better
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.placers.heft import heft
from placewright.placers.single_device import single_device
from placewright.problem import Problem
from placewright.session import op_stage
from placewright.session.config import SIMULATE, SearchConfig
from placewright.session.directory import open_journal
from placewright.session.result import Result
from placewright.session.search import ROUNDING, Progress, Record, search
from placewright.simulator import LowerBounds, lower_bounds, makeup, ranked_finalists
from placewright.stopping import Stopped, Worker, never

_R = TypeVar("_R")

_CHECKED_BEST = 4
_CHECKED_OTHERS = 12
"""Trials of a journal that are simulated again before any of it is believed: enough to notice a
journal of another simulator, in far less time than it took to try them all."""
_MOST_EXPLAINED = 50_000
"""Ops of whose step can be said within a second or two what it is made of."""


@dataclass(kw_only=True)
class SimulatedSearch:
    """One search, from the bounds to the result. Whatever takes long ends soon after a stop."""

    problem: Problem
    config: SearchConfig
    evaluator: Evaluator
    make_placers: Callable[[Budget], list[Placer]]
    """The placers by groups, for their part of the budget."""
    alone: bool
    """Whether this process alone tries placements: then there are references, and ops are placed
    one by one where that is worth it."""
    exact: bool
    """Whether what tries them is the simulator itself, which gives the same times again."""
    directory: Path | None = None
    observe: Callable[[Progress], None] = lambda progress: None
    stop: Callable[[], bool] = never
    parts: list[Progress] = field(default_factory=list)
    """What was searched so far: by groups, and before and after that op by op."""
    placers: list[Placer] = field(default_factory=list)
    references: tuple[Trial, ...] = ()
    bound_seconds: float = 0.0
    """No placement is faster, op by op where ops are placed one by one."""
    started: float = field(default_factory=time.monotonic)

    def run(self) -> Result:
        try:
            bounds = self._patiently(functools.partial(lower_bounds, self.problem))
            if bounds.forced_out_of_memory is not None:
                raise SearchError(bounds.forced_out_of_memory)
            self._search(bounds)
        except Stopped:
            if not self.parts:
                return self._result(Progress(budget=self.config.limits, started=self.started))
        return self._result(op_stage.merged(self.parts, self.config.limits))

    @property
    def _by_ops(self) -> bool:
        """Whether ops are placed one by one as well."""
        return self.alone and self.config.places_ops and op_stage.is_worthwhile(self.problem)

    def _search(self, bounds: LowerBounds) -> None:
        problem, limits = self.problem, self.config.limits
        self.bound_seconds = bounds.best
        if self.evaluator.cheap:
            # The first evaluation compiles the simulator, which is nobody's search time.
            first = Placement.of(problem, problem.allowed.argmax(axis=1))
            self._patiently(functools.partial(self.evaluator.evaluate, [first]))
        if self.alone:
            self.references = self._patiently(self._find_references)
        by_ops = self._by_ops
        if by_ops:
            compiling = functools.partial(op_stage.compile_schedulers, problem.cluster)
            self._patiently(compiling)
        if by_ops and problem.refined is not problem:
            # What is proved of groups does not hold for single ops.
            refined = self._patiently(functools.partial(lower_bounds, problem.refined))
            self.bound_seconds = refined.best
        if not by_ops or self.config.policy is not None:
            # What is wrong with a policy's file is said before a directory is made.
            self.placers = self._patiently(functools.partial(self.make_placers, limits))
        with open_journal(self.directory, problem, SIMULATE) as journal:
            if journal is not None and self.exact:
                self._patiently(functools.partial(check_simulated, problem, journal))
            self.started = time.monotonic()
            if not by_ops:
                self._by_groups(limits, journal, bounds.best)
                return
            stage = op_stage.OpStage(
                problem=problem, budget=limits, seed=self.config.seed, journal=journal,
                observe=self.observe, stop=self.stop, lower_bound_seconds=self.bound_seconds,
            )  # fmt: skip
            self.parts.append(stage.open())
            known = min((t.measurement.mean_seconds for t in self.references), default=math.inf)
            part = stage.budget_for_groups(known)
            if part is not None and not self.stop():
                self._by_groups(part, stage.record(stage.is_by_groups), bounds.best)
            closing = stage.close(self.parts[1] if len(self.parts) > 1 else None)
            if closing is not None:
                self.parts.append(closing)

    def _by_groups(self, limits: Budget, journal: Record | None, bound_seconds: float) -> None:
        if not self.placers:
            self.placers = self._patiently(functools.partial(self.make_placers, limits))
        before = tuple(self.parts)
        self.parts.append(
            search(
                self.placers, self.evaluator, limits, journal=journal, directory=self.directory,
                seed=self.config.seed, stop=self.stop, lower_bound_seconds=bound_seconds,
                observe=lambda now: self.observe(
                    op_stage.merged([*before, now], self.config.limits)
                ),
            )
        )  # fmt: skip

    def _find_references(self) -> tuple[Trial, ...]:
        """The best of `single` and of `heft`. They take no time, and no answer means much
        without."""
        found = []
        for name, function in (("single", single_device), ("heft", heft)):
            placements = function(self.problem)
            best = None
            measurements = self.evaluator.evaluate(placements)
            for placement, measurement in zip(placements, measurements, strict=True):
                trial = Trial(placement=placement, measurement=measurement, placer=name)
                best = better(best, trial)
            if best is not None:
                found.append(best)
        return tuple(found)

    def _patiently(self, function: Callable[[], _R]) -> _R:
        """Calls it so that it can be abandoned after a stop; raises `Stopped` then."""
        if self.stop is never:
            return function()
        worker = Worker()
        try:
            return worker.run(function, self.stop)
        finally:
            worker.close()

    def _result(self, progress: Progress) -> Result:
        best: Trial | None = None
        found = [result.best for result in progress.results() if result.best is not None]
        for trial in found:
            if trial.measurement.ok:
                best = better(best, trial)
        step_range = composition = None
        bound, proven = self.bound_seconds, False
        if best is not None:
            placed = self.problem
            if best.placement.space != placed.space.fingerprint:
                placed = placed.refined
            if not self._by_ops or self.problem.refined is self.problem:
                # What a placer proved may be better than the general bounds.
                proved = [placer.notes.lower_bound_seconds for placer in self.placers]
                bound = max([bound, *proved])
            # A proof by groups proves nothing where ops are placed one by one as well.
            reached = best.measurement.mean_seconds <= bound * (1.0 + ROUNDING)
            proven = progress.proven and reached
            of_its_kind = [t for t in found if t.placement.space == best.placement.space]
            best, step_range = ranked_finalists(placed, of_its_kind, seed=self.config.seed)[0]
            singles = [t for t in (*found, *self.references) if t.placer == "single"]
            single = next((t for t in singles if t.measurement.ok), None)
            reference = None if single is None else single.placement
            if reference is not None and placed is not self.problem:
                reference = Placement.of(placed, self.problem.lifted(reference.devices))
            # Whoever stopped it waits.
            if not self.stop() or placed.graph.num_ops <= _MOST_EXPLAINED:
                composition = makeup(placed, best.placement, reference)
            # Proofs and simulation round differently in the last digits.
            bound = min(bound, best.measurement.mean_seconds)
        return Result(
            problem=self.problem,
            best=best,
            step_range=step_range,
            makeup=composition,
            methods=tuple(progress.results()),
            lower_bound_seconds=bound,
            seconds=time.monotonic() - self.started,
            seed=self.config.seed,
            interrupted=self.stop(),
            fault=progress.fault,
            references=tuple(t for t in self.references if t.placer not in progress.trials_of),
            proven=proven,
        )


def check_simulated(problem: Problem, journal: Journal) -> None:
    """Simulates the best trials of each space, and some others, again; raises where something else
    comes of one."""
    trials = journal.trials
    rng = np.random.default_rng(len(trials))
    spaces = {trial.placement.space for trial in trials}
    for posed in _posed(problem, spaces):
        of_it = [n for n, t in enumerate(trials) if t.placement.space == posed.space.fingerprint]
        best = sorted(of_it, key=lambda n: trials[n].measurement.mean_seconds)[:_CHECKED_BEST]
        others = rng.permutation(of_it)[:_CHECKED_OTHERS].astype(int).tolist()
        numbers = list(dict.fromkeys([*best, *others]))
        evaluator = SimulatedEvaluator(posed)
        again = evaluator.evaluate([trials[number].placement for number in numbers])
        for number, now in zip(numbers, again, strict=True):
            then = trials[number].measurement
            near = math.isclose(then.mean_seconds, now.mean_seconds, rel_tol=1e-6)
            if then.outcome is not now.outcome or not near:
                raise SearchError(
                    f"{journal.path}: line {number + 1} says {_said(then)}, the simulator says "
                    f"{_said(now)}; was the file edited, or written by another version?"
                )


def _posed(problem: Problem, spaces: set[str]) -> list[Problem]:
    """The problem by groups and op by op, as far as trials are of them: the second takes a while to
    make."""
    own = problem.space.fingerprint
    posed = [problem] if own in spaces else []
    return [*posed, problem.refined] if spaces - {own} else posed


def _said(measurement: Measurement) -> str:
    return f"{measurement.mean_seconds:.9g} s" if measurement.ok else measurement.outcome.value
