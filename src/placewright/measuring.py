"""Searching with real runs: each is recorded, and the best of them have to show it side by side.

The fastest of many single runs is, as often as not, the luckiest. So the last part of the budget is
for a final: the best placements and the references in turns, and only that decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from placewright import methods as registry
from placewright.api import Result, open_journal
from placewright.backends import Run
from placewright.errors import WorkerError
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.finals import Finals, in_rounds
from placewright.journal import Journal
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.search import Budget, MethodResult, Progress, search

REFERENCES = ("single", "expert")
"""What every answer is compared with."""


@dataclass(frozen=True, kw_only=True)
class FinalConfig:
    """What happens at the end of a search with real runs."""

    finalists: int = 3
    """The best placements, which are measured again at the end, with the references in between."""
    final_rounds: int = 4
    """How often; what is left to chance is judged by how much the rounds differ."""


def search_measured(
    problem: Problem,
    evaluator: MeasuredEvaluator,
    methods: Sequence[str],
    budget: Budget,
    *,
    seed: int = 0,
    directory: str | Path | None = None,
    learner: Sequence[str] = (),
    policy: str | Path | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    config: FinalConfig | None = None,
) -> Result:
    """Runs the methods one after another, every trial a real run, between the references and the
    final. The budget is for all of it."""
    with open_journal(directory, problem, "measure") as journal:
        real = Measuring(
            problem, evaluator, budget, seed, journal, observe, stop, config or FinalConfig()
        )
        real.find_references()
        for placement, name in real.unmeasured_references():
            real.measure(placement, name)
        limits = real.before_the_final()
        if limits is not None:
            placers = registry.make(
                methods, problem, seed=seed, seconds=limits.seconds, trials=limits.trials,
                learner=learner, policy=policy, cheap=False,
                noise=evaluator.noise,
            )  # fmt: skip
            found = search(
                placers, evaluator, limits, journal=real, seed=seed, observe=observe,
                stop=real.stop, directory=directory,
            )  # fmt: skip
            real.credit(found)
            real.favourites = [p for placer in placers for p in placer.favourites()]
        real.final()
        return real.result()


class Measuring:
    """The real runs of a search, within a budget: all that was measured, and what follows from it.

    To a `search` it is the journal.
    """

    def __init__(
        self,
        problem: Problem,
        evaluator: MeasuredEvaluator,
        budget: Budget,
        seed: int,
        journal: Journal | None,
        observe: Callable[[Progress], None],
        stop: Callable[[], bool],
        config: FinalConfig,
    ) -> None:
        self.problem = problem
        self.evaluator = evaluator
        self.budget = budget
        self.seed = seed
        self.observe = observe
        self.interrupted = stop
        self.progress = Progress(budget=budget, started=time.monotonic())
        self.trials: list[Trial] = []
        self.samples: dict[Placement, list[Measurement]] = {}
        self.found_by: dict[Placement, str] = {}
        self.references: dict[str, list[Placement]] = {name: [] for name in REFERENCES}
        self.favourites: list[Placement] = []
        """What the methods hold for the best, where they know better than the fastest run."""
        self.finals = Finals()
        self._final_config = config
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
        """Records real runs."""
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
        """How many more real runs fit, those of the end included."""
        left = math.inf
        if self.budget.trials is not None:
            left = self.budget.trials - self.progress.trials
        each, seconds = self.run_seconds, self.seconds_left
        return min(left, seconds / each if each else (math.inf if seconds > 0 else 0.0))

    @property
    def runs_reserved(self) -> float:
        """For the final; half of a budget that is too small for it."""
        config = self._final_config
        final = config.final_rounds * (config.finalists + len(REFERENCES))
        return min(final, (self.progress.trials + self.runs_left) / 2)

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
        self, placement: Placement, placer: str = "", *, traces: int = 0, compared: bool = False
    ) -> Run | None:
        """One real run, recorded; None when the budget or the user says stop, or the devices'
        processes cannot be started any more (without any run so far that is an error)."""
        if self.stop() or self.runs_left < 1:
            return None
        began = time.monotonic()
        try:
            run = self.evaluator.run(placement, traces=traces, compared=compared)
        except WorkerError as fault:
            if not self.progress.trials:
                raise
            self.progress.fault = str(fault)
            return None
        self._measured_seconds += time.monotonic() - began
        self._timed_runs += 1
        trial = Trial(
            placement=placement,
            measurement=run.measurement,
            placer=self.found_by.setdefault(placement, placer),
            seed=self.seed,
            at_seconds=self._earlier_seconds + self.progress.elapsed_seconds,
        )
        self.append([trial])
        self.progress.placer = trial.placer
        self.progress.seconds_of[trial.placer] += time.monotonic() - began
        self.observe(self.progress)
        return run

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
            self.references[name] = placer.ask(self.problem.num_devices)
            self.progress.trials_of.setdefault(name, 0)
            self.progress.seconds_of.setdefault(name, 0.0)

    def unmeasured_references(self) -> list[tuple[Placement, str]]:
        waiting = [(p, name) for name, found in self.references.items() for p in found]
        return [(p, name) for p, name in waiting if p not in self.samples]

    def credit(self, found: Progress) -> None:
        """Takes over what a search says of its methods; their trials are here already."""
        for name in found.trials_of:
            self.progress.trials_of.setdefault(name, 0)
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
        """The best of all and of each reference in turns, as often as the budget allows."""

        def measure(placement: Placement) -> Measurement | None:
            run = self.measure(placement, compared=True)
            return None if run is None else run.measurement

        best = self.best_placements(self._final_config.finalists)
        favourite = [p for p in self.favourites[:1] if p in self.samples and p not in best]
        if len(best) > 1:  # the fastest run is in any case
            best = [*best[: len(best) - len(favourite)], *favourite]
        finalists = list(dict.fromkeys([*best, *self._best_references().values()]))
        if finalists:
            rounds = int(min(self._final_config.final_rounds, self.runs_left / len(finalists)))
            self.finals = in_rounds(finalists, measure, rounds, seed=self.seed)

    def result(self) -> Result:
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
            interrupted=self.interrupted(),
            fault=self.progress.fault,
            measured=True,
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
