"""Real runs, within a budget: each is recorded, and the best have to show it side by side.

The fastest of many single runs is, as often as not, the luckiest. So the last part of the budget is
for a final: the best placements and the references in turns, and only that decides.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from placewright import methods as registry
from placewright.backends.base import Run
from placewright.budget import Budget
from placewright.calibration import Calibration
from placewright.errors import WorkerError
from placewright.evaluators.base import Evaluator, Request
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.journal import Journal
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.session.config import How, SearchConfig
from placewright.session.finals import Finals, in_rounds
from placewright.session.result import Result
from placewright.session.search import MethodResult, Progress

REFERENCES = ("single", "expert")
"""What every answer is compared with."""


_REPEATED = 3
"""References that are run twice."""

_NEAR = 3.0
"""Not those that take so many times the fastest one's time: a CPU can take a minute."""

_FEW_OF = 10
"""That is done where at least so many times as many runs are left."""

_UPPER = {1: 15.6, 2: 4.48, 3: 2.98}
"""Pairs of runs -> what the mean of their variances is multiplied by for its upper limit: their
number through the 20% quantile of the chi-square distribution."""

_LEAST_NOISE = 0.002
"""A step of a few milliseconds is not timed better than that."""


class RealRuns:
    """All that was measured in a session, and what follows from it.

    A search among real runs writes its trials down here, and so in the journal.
    """

    def __init__(
        self,
        problem: Problem,
        evaluator: Evaluator,
        config: SearchConfig,
        *,
        journal: Journal | None = None,
        observe: Callable[[Progress], None] = lambda progress: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem = problem
        self.evaluator = evaluator
        self.budget = config.limits
        self.seed = config.seed
        self.rounds = config.rounds
        self.observe = observe
        self.interrupted = stop
        self.progress = Progress(budget=self.budget, started=time.monotonic())
        self.trials: list[Trial] = []
        self.samples: dict[Placement, list[Measurement]] = {}
        self.found_by: dict[Placement, str] = {}
        self.references: dict[str, list[Placement]] = {name: [] for name in REFERENCES}
        self.favourites: list[Placement] = []
        """What the methods hold for the best, where they know better than the fastest run."""
        self.finals = Finals()
        self._journal = journal
        self._measured_seconds = 0.0
        self._timed_runs = 0
        for trial in journal.trials if journal is not None else ():
            self._count(trial)
        self.progress.resumed = self.progress.trials
        self._earlier_seconds = max((trial.at_seconds for trial in self.trials), default=0.0)

    def _count(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.samples.setdefault(trial.placement, []).append(trial.measurement)
        self.found_by.setdefault(trial.placement, trial.placer)
        self.progress.count(trial)

    def append(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._count(trial)
        if self._journal is not None:
            self._journal.append(trials)

    def stop(self) -> bool:
        return bool(self.progress.fault) or self.interrupted()

    # --- budget ---

    @property
    def run_seconds(self) -> float:
        """What a real run takes, on average; 0 before the first."""
        return self._measured_seconds / self._timed_runs if self._timed_runs else 0.0

    @property
    def seconds_left(self) -> float:
        if self.budget.seconds is None:
            return math.inf
        return self.budget.seconds - self.progress.elapsed_seconds

    @property
    def runs_left(self) -> float:
        """How many more real runs fit one after another, those of the end included."""
        left = math.inf
        if self.budget.trials is not None:
            left = self.budget.trials - self.progress.trials
        each, seconds = self.run_seconds, self.seconds_left
        return min(left, seconds / each if each else (math.inf if seconds > 0 else 0.0))

    @property
    def runs_reserved(self) -> float:
        """For the final; half of a budget that is too small for it."""
        final = self.rounds.final_rounds * (self.rounds.finalists + len(REFERENCES))
        return min(final, (self.progress.trials + self.runs_left) / 2)

    @property
    def has_room_to_search(self) -> bool:
        """Whether anything can be tried that leaves enough for the final."""
        return self.before_the_final() is not None and self.runs_left >= self.runs_reserved + 1

    def only_references(self, methods: Sequence[str]) -> bool:
        """Whether nothing else was tried, though there are other methods."""
        others = set(methods) - set(REFERENCES)
        tried = {name for name, count in self.progress.trials_of.items() if count}
        return bool(others) and tried <= set(REFERENCES)

    def before_the_final(self) -> Budget | None:
        """What is left to search with; the trials so far count, as those of a journal do."""
        reserved = self.runs_reserved
        seconds, trials = None, None
        if self.budget.seconds is not None:
            seconds = self.seconds_left - reserved * self.run_seconds
        if self.budget.trials is not None:
            trials = int(self.budget.trials - reserved)
        if (seconds is not None and seconds <= 0) or (trials is not None and trials < 1):
            return None
        return Budget(seconds=seconds, trials=trials)

    # --- measuring ---

    def measure(
        self,
        wanted: Iterable[tuple[Placement, str]],
        *,
        traces: int = 0,
        compared: bool = False,
        leave: float = 0.0,
    ) -> dict[Placement, Run]:
        """Real runs of placements and who found them, each recorded as it ends; as many at a time
        as the evaluator can.

        Fewer than wanted where the budget but for `leave` runs is used up, where the user says
        stop, or where nothing can be measured any more (without any run so far, that is an error).
        """
        queue = deque(wanted)
        began: dict[Placement, float] = {}
        runs: dict[Placement, Run] = {}
        try:
            while queue or began:
                while queue and len(began) < self.evaluator.parallel:
                    left = self.runs_left - len(began)
                    if self.stop() or left < 1 or left <= leave:
                        queue.clear()
                        break
                    placement, placer = queue.popleft()
                    self.found_by.setdefault(placement, placer)
                    began[placement] = time.monotonic()
                    self.evaluator.submit([Request(placement, traces, compared)])
                for placement, run in self.evaluator.collect(1.0):
                    if placement in began:
                        self._ran(placement, run, time.monotonic() - began.pop(placement))
                        runs[placement] = run
                if began and self.stop():
                    self.evaluator.drop()
                    break
        except WorkerError as fault:
            if not self.progress.trials:
                raise
            self.progress.fault = str(fault)
        return runs

    def _ran(self, placement: Placement, run: Run, seconds: float) -> None:
        self._measured_seconds += seconds
        self._timed_runs += 1
        trial = Trial(
            placement=placement,
            measurement=run.measurement,
            placer=self.found_by[placement],
            seed=self.seed,
            at_seconds=self._earlier_seconds + self.progress.elapsed_seconds,
        )
        self.append([trial])
        self.progress.placer = trial.placer
        self.progress.seconds_of[trial.placer] += seconds
        self.observe(self.progress)

    def pooled(self, placement: Placement) -> Measurement:
        """All that was measured of a placement; what the final says goes first."""
        if placement in self.finals.means or placement in self.finals.failed:
            return self.finals.measurement(placement)
        # A placement that failed once and ran another time has run.
        good = [m for m in self.samples[placement] if m.ok]
        if len(good) < 2:
            return good[0] if good else self.samples[placement][0]
        return Measurement(
            outcome=Outcome.OK,
            step_seconds=tuple(m.mean_seconds for m in good),
            peak_bytes=good[-1].peak_bytes,
        )

    def find_references(self) -> None:
        """Computed before anything is known of real costs, as a user without measurements would."""
        for name in REFERENCES:
            (placer,) = registry.make([name], self.problem, seed=self.seed)
            self.references[name] = self.without_twins(placer.ask(self.problem.num_devices))
            self.progress.expect(name)

    def without_twins(self, placements: Sequence[Placement]) -> list[Placement]:
        """Of those with everything on one partition of a GPU, or on one of its streams, the first:
        the others are the same hardware by other names."""
        found: dict[object, Placement] = {}
        for placement in placements:
            device = self.problem.cluster.devices[placement.main_device]
            twin = device.sharing and (device.chip, device.kind.name, device.memory_bytes)
            alone = len(np.unique(placement.devices)) == 1
            found.setdefault(twin if twin and alone else placement, placement)
        return list(found.values())

    def unmeasured_references(self) -> list[tuple[Placement, str]]:
        waiting: dict[Placement, str] = {}
        for name, found in self.references.items():
            for placement in found:
                if placement not in self.samples:
                    waiting.setdefault(placement, name)
        return list(waiting.items())

    def repeat_references(self) -> None:
        """Runs the fastest references once more, where there is the budget for it: so it is known
        how much times of the same placement differ."""
        wanted = [p for p in self._repeated() if len(self.samples[p]) < 2]
        if self.runs_left >= _FEW_OF * len(wanted):
            self.measure([(p, self.found_by[p]) for p in wanted], compared=True)

    def _repeated(self) -> list[Placement]:
        """By their first runs alone: a session that goes on comes to the same."""
        first = {p: self.samples[p][0] for p in self._all_references() if p in self.samples}
        seconds = {p: run.mean_seconds for p, run in first.items() if run.ok}
        near = [p for p, own in seconds.items() if own <= _NEAR * min(seconds.values())]
        return sorted(near, key=seconds.__getitem__)[:_REPEATED]

    def _all_references(self) -> list[Placement]:
        return list(dict.fromkeys(p for found in self.references.values() for p in found))

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of a time over runs of the same placement: the upper
        limit that the first two runs of the references put on it, with a confidence of 80%. Few
        pairs say little, and less noise than there is would have luck believed."""
        pairs = [self.samples[p][:2] for p in self._repeated()]
        logs = [
            math.log(first.mean_seconds / second.mean_seconds)
            for first, second in (pair for pair in pairs if len(pair) == 2)
            if second.ok and min(first.mean_seconds, second.mean_seconds) > 0
        ]
        if not logs:
            return self.evaluator.noise or MeasuredEvaluator.noise
        variance = statistics.fmean(log**2 / 2 for log in logs)
        upper = math.sqrt(variance * _UPPER[len(logs)])
        return max(_LEAST_NOISE, min(upper, max(MeasuredEvaluator.noise, math.sqrt(variance))))

    def credit(self, found: Progress) -> None:
        """Takes over what a search says of its methods; their trials are here already."""
        for name in found.trials_of:
            self.progress.expect(name)
        self.progress.seconds_of.update(found.seconds_of)
        self.progress.why_not_of.update(found.why_not_of)
        # Of what others had tried before as well.
        self.progress.best_of.update(found.best_of)
        self.progress.fault = found.fault

    # --- the end ---

    def best_placements(self, count: int) -> list[Placement]:
        good = [p for p in self.samples if self.pooled(p).ok]
        return sorted(good, key=lambda p: self.pooled(p).mean_seconds)[:count]

    def _best_references(self) -> dict[str, Placement]:
        best = {}
        for name in REFERENCES:
            tried = [p for p in self.references[name] if p in self.samples and self.pooled(p).ok]
            # After the final, the one that was in it: times of before are of another machine, as
            # it were, and nothing can be compared with them.
            tried = [p for p in tried if p in self.finals.means] or tried
            if tried:
                best[name] = min(tried, key=lambda p: self.pooled(p).mean_seconds)
        return best

    def final(self) -> None:
        """The best of all and of each reference in turns, as often as the budget allows. With
        several workers it is one after another all the same: the first of them has all the runs,
        and none has to share the machine."""

        def measure(placement: Placement) -> Measurement | None:
            run = self.measure([(placement, "")], compared=True).get(placement)
            return None if run is None else run.measurement

        best = self.best_placements(self.rounds.finalists)
        favourite = [p for p in self.favourites[:1] if p in self.samples and p not in best]
        if len(best) > 1:  # the fastest run is in any case
            best = [*best[: len(best) - len(favourite)], *favourite]
        finalists = list(dict.fromkeys([*best, *self._best_references().values()]))
        if finalists:
            rounds = int(min(self.rounds.final_rounds, self.runs_left / len(finalists)))
            self.finals = in_rounds(finalists, measure, rounds, seed=self.seed)

    def result(self, evaluate: How, calibration: Calibration | None = None) -> Result:
        pooled = {
            p: Trial(
                placement=p, measurement=self.pooled(p), placer=self.found_by[p], seed=self.seed
            )
            for p in self.samples
        }
        # Only finalists can win, where there was a final: their times were measured side by side.
        good = [
            trial
            for trial in pooled.values()
            if trial.measurement.ok
            and (not self.finals.means or trial.placement in self.finals.means)
        ]
        best = min(good, key=lambda t: t.measurement.mean_seconds, default=None)
        comparisons = [
            self.finals.compare(best.placement, placement, name)
            for name, placement in self._best_references().items()
            if best is not None and placement != best.placement and placement in self.finals.means
        ]
        return Result(
            problem=self.problem,
            best=best,
            comparisons=tuple(comparisons),
            methods=tuple(self._method(name, pooled) for name in self.progress.trials_of),
            lower_bound_seconds=0.0,
            seconds=self.progress.elapsed_seconds,
            seed=self.seed,
            evaluate=evaluate,
            interrupted=self.interrupted(),
            fault=self.progress.fault,
            calibration=calibration,
        )

    def _method(self, name: str, pooled: dict[Placement, Trial]) -> MethodResult:
        own = [trial for trial in pooled.values() if trial.placer == name]
        if name in self.progress.best_of:
            own.append(pooled[self.progress.best_of[name].placement])
        own = [t for t in own if t.placement in self.finals.means] or own
        return MethodResult(
            method=name,
            best=min(own, key=lambda t: t.measurement.mean_seconds, default=None),
            trials=self.progress.trials_of[name],
            why_not=self.progress.why_not_of.get(name, ""),
            seconds=self.progress.seconds_of.get(name, 0.0),
        )
