"""A search in the simulator: references, the stage that places op by op, the methods by groups."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from placewright.budget import Budget
from placewright.errors import SearchError
from placewright.evaluators.base import Evaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.journal import Journal
from placewright.measurement import Measurement, Trial, better
from placewright.placement import Placement, everything_on
from placewright.placers.base import Placer
from placewright.placers.heft import heft
from placewright.placers.single_device import single_device
from placewright.problem import Problem
from placewright.session import op_stage
from placewright.session.config import SIMULATE, SearchConfig
from placewright.session.directory import open_journal
from placewright.session.result import Result
from placewright.session.search import ROUNDING, MethodResult, Progress, Record, search
from placewright.simulator import (
    LowerBounds,
    Makeup,
    Parts,
    Simulator,
    StepRange,
    lower_bounds,
    makeup,
    over_orders,
    shortlisted,
)
from placewright.simulator.makeup import parts_of_used
from placewright.stopping import GRACE_SECONDS, Stopped, never, patiently

_R = TypeVar("_R")

_CHECKED_BEST = 4
_CHECKED_OTHERS = 12
"""Trials of a journal that are simulated again before any of it is believed: enough to notice a
journal of another simulator, in far less time than it took to try them all."""
_MOST_EXPLAINED = 50_000
"""Ops of whose steps can be said within a second or two what they are made of."""
_GRACE_AT_THE_END_SECONDS = 0.5
"""How long whoever stopped the search waits for each of the figures beside the answer."""


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
        with open_journal(self.directory, problem, SIMULATE, self._patiently) as journal:
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

    def _patiently(self, function: Callable[[], _R], grace_seconds: float = GRACE_SECONDS) -> _R:
        return patiently(function, self.stop, grace_seconds)

    # --- what came of it ---

    def _result(self, progress: Progress) -> Result:
        methods = progress.results()
        found = [m.best for m in methods if m.best is not None and m.best.measurement.ok]
        ranges: dict[Placement, StepRange] = {}
        if found:
            with contextlib.suppress(Stopped):
                ranges = self._patiently(
                    functools.partial(self._ranges, progress), _GRACE_AT_THE_END_SECONDS
                )
        first = min(found, key=lambda trial: trial.measurement.mean_seconds, default=None)
        bound, proven = self._bound(progress, first)
        if ranges:
            methods = [self._by_the_mean(m, progress, ranges, bound, proven) for m in methods]
        best = min(
            (m.best for m in methods if m.best is not None and m.best.measurement.ok),
            key=lambda trial: _rank(trial, ranges),
            default=None,
        )
        makeup_of_best = None
        parts: dict[Placement, Parts] = {}
        with contextlib.suppress(Stopped):
            if best is not None:
                makeup_of_best, parts = self._patiently(
                    functools.partial(self._made_of, best, methods), _GRACE_AT_THE_END_SECONDS
                )
        return Result(
            problem=self.problem,
            best=best,
            ranges=ranges,
            parts=parts,
            makeup=makeup_of_best,
            methods=tuple(methods),
            lower_bound_seconds=bound,
            bound_by_groups=not self._by_ops and self.problem.refined is not self.problem,
            seconds=time.monotonic() - self.started,
            seed=self.config.seed,
            interrupted=self.stop(),
            fault=progress.fault,
            references=tuple(t for t in self.references if t.placer not in progress.trials_of),
            proven=proven,
        )

    def _bound(self, progress: Progress, first: Trial | None) -> tuple[float, bool]:
        """What no placement can be faster than, and whether the first in the graph's order of ties
        is as fast."""
        bound = self.bound_seconds
        if first is None:
            return bound, False
        if not self._by_ops or self.problem.refined is self.problem:
            # What a placer proved may be better than the general bounds.
            proved = [placer.notes.lower_bound_seconds for placer in self.placers]
            bound = max([bound, *proved])
        seconds = first.measurement.mean_seconds
        # A proof by groups proves nothing where ops are placed one by one as well.
        proven = progress.proven and seconds <= bound * (1.0 + ROUNDING)
        # Proofs and simulation round differently in the last digits.
        return min(bound, seconds), proven

    def _ranges(self, progress: Progress) -> dict[Placement, StepRange]:
        """Step times over several orders of ties: of the best of each method, of the references,
        and of those of all trials near the best that other orders say most for."""
        bests = [m.best for m in progress.results() if m.best is not None]
        bests = [trial for trial in (*bests, *self.references) if trial.measurement.ok]
        others = progress.contenders.near_the_best()
        seed = self.config.seed
        ranges: dict[Placement, StepRange] = {}
        for posed in _posed(self.problem, {t.placement.space for t in (*bests, *others)}):
            space = posed.space.fingerprint
            simulator = Simulator(posed)
            chosen = shortlisted(
                posed, [t for t in others if t.placement.space == space],
                seed=seed + 1, simulator=simulator,
            )  # fmt: skip
            chosen += [trial for trial in bests if trial.placement.space == space]
            placements = list(dict.fromkeys(trial.placement for trial in chosen))
            found = over_orders(posed, placements, seed=seed, simulator=simulator)
            ranges.update(zip(placements, found, strict=True))
        return ranges

    def _by_the_mean(
        self,
        method: MethodResult,
        progress: Progress,
        ranges: Mapping[Placement, StepRange],
        bound: float,
        proven: bool,
    ) -> MethodResult:
        """The same with the best by the mean over orders of ties; where the optimum is proven, of
        those that reach it."""
        if method.best is None or not method.best.measurement.ok:
            return method
        most = bound * (1.0 + ROUNDING) if proven else math.inf
        own = [
            trial
            for trial in progress.contenders.near_the_best()
            if trial.placer == method.method
            and trial.placement in ranges
            and trial.measurement.mean_seconds <= most
        ]
        best = min([method.best, *own], key=lambda trial: _rank(trial, ranges))
        return replace(method, best=best)

    def _made_of(
        self, best: Trial, methods: Sequence[MethodResult]
    ) -> tuple[Makeup | None, dict[Placement, Parts]]:
        """What the steps of the answer and of each method's best are made of; nothing for a large
        graph after a stop, as whoever stopped it waits."""
        placed = self._posed_for(best)
        ops = placed.graph.num_ops
        if self.stop() and ops > _MOST_EXPLAINED:
            return None, {}
        singles = [m.best for m in methods if m.method == "single" and m.best is not None]
        singles += [trial for trial in self.references if trial.placer == "single"]
        single = next((trial for trial in singles if trial.measurement.ok), None)
        compared: list[Placement] = []
        if single is not None:
            chosen = [single.placement, *_of_other_kinds(self.problem, single.placement)]
            compared = [self._as_placed(placed, placement) for placement in chosen]
        made = makeup(
            placed, best.placement, compared[0] if compared else None, compared[1:],
            seed=self.config.seed,
        )  # fmt: skip
        parts: dict[Placement, Parts] = {}
        if ops * len(methods) <= _MOST_EXPLAINED:
            simulators: dict[str, Simulator] = {}
            for trial in (m.best for m in methods):
                if trial is None or not trial.measurement.ok:
                    continue
                posed = self._posed_for(trial)
                simulator = simulators.setdefault(trial.placement.space, Simulator(posed))
                parts[trial.placement] = parts_of_used(simulator.timeline(trial.placement))
        return made, parts

    def _as_placed(self, placed: Problem, placement: Placement) -> Placement:
        """A placement by groups as one of what is placed, which may be single ops."""
        if placed is self.problem:
            return placement
        return Placement.of(placed, self.problem.lifted(placement.devices))

    def _posed_for(self, trial: Trial) -> Problem:
        own = trial.placement.space == self.problem.space.fingerprint
        return self.problem if own else self.problem.refined


def _rank(trial: Trial, ranges: Mapping[Placement, StepRange]) -> tuple[bool, float, float]:
    """Those first that fit into memory in every order, then by the mean, then in the graph's."""
    seconds = trial.measurement.mean_seconds
    found = ranges.get(trial.placement)
    if found is None:
        return False, seconds, seconds
    return found.overflows > 0, found.mean_seconds, seconds


def _of_other_kinds(problem: Problem, single: Placement) -> list[Placement]:
    """Everything on one device, for each kind of device but that of the placement given."""
    devices = problem.cluster.devices
    first = {device.kind.name: number for number, device in reversed([*enumerate(devices)])}
    del first[devices[single.main_device].kind.name]
    return [everything_on(problem, number) for number in first.values()]


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
