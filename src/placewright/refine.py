"""Searches in the simulator, measures what looks best, corrects the simulator, and again.

A real run takes seconds, a simulated one a millisecond or less. So the simulator does the
searching, and the machine has the last word: the answer is a placement that was measured, in turns
with what it is compared with, so that whatever else the machine did hit all alike.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placewright import methods as registry
from placewright.api import Result, open_journal
from placewright.calibration import Calibration, corrected, everything_on, op_table
from placewright.errors import WorkerError
from placewright.evaluators.base import Evaluator
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.finals import Finals, in_rounds
from placewright.journal import Journal
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.runners.tensorflow import Run, TensorFlowRunner
from placewright.search import Budget, MethodResult, Progress, search

logger = logging.getLogger(__name__)

REFERENCES = ("single", "expert")
"""What every answer is compared with."""


@dataclass(frozen=True, kw_only=True)
class RefineConfig:
    """How the budget is spent."""

    simulate_share: float = 0.25
    """Of the time, for searching in the simulator."""
    simulate_seconds: float = 15.0
    """Most time for one search in the simulator."""
    candidates: int = 4
    """Placements measured between two searches."""
    distance: float = 0.02
    """Share of the groups by which candidates of one round differ at least; otherwise they would
    all be variations of one."""
    traces: int = 3
    """Traced steps for the costs of ops."""
    finalists: int = 3
    """The best placements, which are measured again at the end, with the references in between."""
    final_rounds: int = 4
    """How often; what is left to chance is judged by how much the rounds differ."""


class Remembering(Evaluator):
    """The simulator, but what was measured keeps its measured time; remembers the best."""

    def __init__(self, problem: Problem, known: dict[Placement, Measurement]) -> None:
        self._simulated = SimulatedEvaluator(problem)
        self._known = known
        self.best: dict[Placement, float] = {}

    @property
    def problem(self) -> Problem:
        return self._simulated.problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        measurements = [
            self._known.get(placement, simulated)
            for placement, simulated in zip(
                placements, self._simulated.evaluate(placements), strict=True
            )
        ]
        for placement, measurement in zip(placements, measurements, strict=True):
            if measurement.ok:
                self.best[placement] = measurement.mean_seconds
        if len(self.best) > 4 * _REMEMBERED:
            kept = sorted(self.best.items(), key=lambda item: item[1])[:_REMEMBERED]
            self.best = dict(kept)
        return measurements


_REMEMBERED = 2000


def refine(
    problem: Problem,
    runner: TensorFlowRunner,
    methods: Sequence[str],
    budget: Budget,
    *,
    seed: int = 0,
    directory: str | Path | None = None,
    learner: Sequence[str] = (),
    policy: str | Path | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    config: RefineConfig | None = None,
) -> Result:
    """Finds a placement by turns of simulating and measuring; the trials are real runs.

    Args:
        problem: under whatever costs there are; they are replaced by measured ones.
        runner: of the problem's graph and cluster.
        methods: what searches in the simulator.
        budget: of time, or of real runs (those of references and repetitions included), or both.
    """
    with open_journal(directory, problem) as journal:
        refinement = _Refinement(
            problem, runner, methods, budget, seed, journal, observe, stop, config or RefineConfig()
        )
        refinement.options = {
            "learner": learner,
            "policy": None if policy is None else str(policy),
        }
        return refinement.run()


class _Refinement:
    def __init__(
        self,
        problem: Problem,
        runner: TensorFlowRunner,
        methods: Sequence[str],
        budget: Budget,
        seed: int,
        journal: Journal | None,
        observe: Callable[[Progress], None],
        stop: Callable[[], bool],
        config: RefineConfig,
    ) -> None:
        self.problem = problem
        self.runner = runner
        self.methods = methods
        self.budget = budget
        self.seed = seed
        self.journal = journal
        self.observe = observe
        self.interrupted = stop
        self.config = config
        self.evaluator = MeasuredEvaluator(problem, runner)
        self.progress = Progress(budget=budget, started=time.monotonic())
        self.samples: dict[Placement, list[Measurement]] = {}
        self.found_by: dict[Placement, str] = {}
        self.references: dict[str, list[Placement]] = {name: [] for name in REFERENCES}
        self.finals = Finals()
        self.measured_seconds = 0.0
        self.options: dict[str, Any] = {}
        """Of the learned methods."""
        for trial in journal.trials if journal is not None else ():
            self._count(trial)
        self.progress.resumed = self.progress.trials

    def _count(self, trial: Trial) -> None:
        self.samples.setdefault(trial.placement, []).append(trial.measurement)
        self.found_by.setdefault(trial.placement, trial.placer)
        self.progress.count(trial)

    def stop(self) -> bool:
        return bool(self.progress.fault) or self.interrupted()

    # --- budget ---

    @property
    def runs_left(self) -> float:
        """How many more real runs fit, those of the end included."""
        left = math.inf
        if self.budget.trials is not None:
            left = self.budget.trials - self.progress.trials
        if self.budget.seconds is not None:
            each = self.run_seconds
            seconds = self.budget.seconds - self.progress.elapsed_seconds
            left = min(left, seconds / each if each else (math.inf if seconds > 0 else 0.0))
        return left

    @property
    def run_seconds(self) -> float:
        """What a real run takes, on average; 0 before the first."""
        done = self.progress.trials - self.progress.resumed
        return self.measured_seconds / done if done else 0.0

    @property
    def runs_reserved(self) -> float:
        """For the final; half of a budget that is too small for it."""
        final = self.config.final_rounds * (self.config.finalists + len(REFERENCES))
        return min(final, (self.progress.trials + self.runs_left) / 2)

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
        self.measured_seconds += time.monotonic() - began
        trial = Trial(
            placement=placement,
            measurement=run.measurement,
            placer=self.found_by.setdefault(placement, placer),
            seed=self.seed,
            at_seconds=self.progress.elapsed_seconds,
        )
        self._count(trial)
        self.progress.placer = trial.placer
        self.progress.seconds_of[trial.placer] += time.monotonic() - began
        if self.journal is not None:
            self.journal.append([trial])
        self.observe(self.progress)
        return run

    def pooled(self, placement: Placement) -> Measurement:
        """All that was measured of a placement; what the final rounds say goes first."""
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

    # --- the phases ---

    def run(self) -> Result:
        self._find_references()
        calibration = self._calibrate()
        while not self.stop() and self.runs_left >= self.runs_reserved + 1:
            if not self._round(calibration):
                break  # nothing new to measure
            calibration = self._corrected(calibration)
        self._finals()
        return self._result()

    def _find_references(self) -> None:
        """Computed before anything is known of real costs, as a user without measurements would."""
        for name in REFERENCES:
            (placer,) = registry.make([name], self.problem, seed=self.seed)
            self.references[name] = placer.ask(self.problem.num_devices)
            self.progress.trials_of.setdefault(name, 0)
            self.progress.seconds_of.setdefault(name, 0.0)

    def _calibrate(self) -> Calibration:
        """Single devices are traced: that is where the costs of ops come from."""
        traced = {}
        for device in range(self.problem.num_devices):
            single = everything_on(self.problem, device)
            run = self.measure(single, "single", traces=self.config.traces)
            if run is not None and run.trace is not None:
                traced[device] = run
        table = op_table(self.problem, traced)
        return Calibration(table=table, cluster=self.problem.cluster)

    def _corrected(self, calibration: Calibration) -> Calibration:
        known = {p: self.pooled(p).mean_seconds for p in self.samples if self.pooled(p).ok}
        if len(known) < 3:
            return calibration
        return corrected(self.problem, calibration, list(known), list(known.values()))

    def _round(self, calibration: Calibration) -> bool:
        """Searches in the simulator and measures what it found; False when that is nothing new."""
        waiting = [(p, name) for name, found in self.references.items() for p in found]
        new = [(p, name) for p, name in waiting if p not in self.samples]
        if not new:
            new = self._candidates(calibration)
        best = self._best_placements(1)
        measured = 0
        for placement, name in new:
            if self.runs_left <= self.runs_reserved:
                break
            measured += self.measure(placement, name) is not None
        # In turns with the best so far, whose time is the one that counts.
        if measured and best and best[0] not in dict(new) and self.runs_left > self.runs_reserved:
            self.measure(best[0])
        return measured > 0

    def _candidates(self, calibration: Calibration) -> list[tuple[Placement, str]]:
        under = calibration.problem(self.problem)
        known = {
            Placement.of(under, placement.devices): self.pooled(placement)
            for placement in self.samples
        }
        simulator = Remembering(under, known)
        seconds = self._simulate_seconds()
        placers = registry.make(
            self.methods,
            under,
            seed=self.seed + self.progress.trials,
            seconds=seconds,
            **self.options,
        )
        told = [
            Trial(placement=p, measurement=m, placer="measured", seed=self.seed)
            for p, m in known.items()
        ]
        for placer in placers:
            placer.tell(told)
        found = search(
            placers,
            simulator,
            Budget(seconds=seconds),
            seed=self.seed,
            stop=self.stop,
        )
        by = {
            result.best.placement: result.method
            for result in found.results()
            if result.best is not None
        }
        searcher = placers[-1].name if placers else "random"
        apart = max(1, round(self.config.distance * self.problem.num_groups))
        chosen: list[tuple[Placement, str]] = []
        ordered = sorted(simulator.best, key=simulator.best.__getitem__)
        for placement in ordered:
            devices = placement.devices
            ours = Placement.of(self.problem, devices)
            near = any(np.sum(devices != other.devices) < apart for other, _ in chosen)
            if ours in self.samples or near:
                continue
            chosen.append((ours, by.get(placement, searcher)))
            if len(chosen) == self.config.candidates:
                break
        return chosen

    def _simulate_seconds(self) -> float:
        seconds = self.config.simulate_seconds
        if self.budget.seconds is not None:
            reserved = self.runs_reserved * self.run_seconds
            left = self.budget.seconds - self.progress.elapsed_seconds - reserved
            seconds = min(seconds, self.config.simulate_share * max(left, 1.0))
        return max(1.0, seconds)

    def _best_placements(self, count: int) -> list[Placement]:
        good = [p for p in self.samples if self.pooled(p).ok]
        return sorted(good, key=lambda p: self.pooled(p).mean_seconds)[:count]

    def _finalists(self) -> list[Placement]:
        """The best of all, and the best of each reference."""
        finalists = [*self._best_placements(self.config.finalists), *self._best_references()]
        return list(dict.fromkeys(finalists))

    def _best_references(self) -> dict[Placement, str]:
        best = {}
        for name in REFERENCES:
            tried = [p for p in self.references[name] if p in self.samples and self.pooled(p).ok]
            if tried:
                best[min(tried, key=lambda p: self.pooled(p).mean_seconds)] = name
        return best

    def _finals(self) -> None:
        """The finalists in turns, several times."""

        def measure(placement: Placement) -> Measurement | None:
            run = self.measure(placement, compared=True)
            return None if run is None else run.measurement

        self.finals = in_rounds(
            self._finalists(), measure, self.config.final_rounds, seed=self.seed
        )

    def _result(self) -> Result:
        pooled = [
            Trial(placement=p, measurement=self.pooled(p), placer=self.found_by[p], seed=self.seed)
            for p in self.samples
        ]
        # Only finalists can win, where there was a final: their times were measured side by side.
        good = [
            trial
            for trial in pooled
            if trial.measurement.ok
            and (not self.finals.means or trial.placement in self.finals.means)
        ]
        best = min(good, key=lambda t: t.measurement.mean_seconds, default=None)
        comparisons = [
            self.finals.compare(best.placement, placement, name)
            for placement, name in self._best_references().items()
            if best is not None
            and placement != best.placement
            and placement in self.finals.means
        ]
        methods = []
        for name, count in self.progress.trials_of.items():
            own = [t for t in pooled if t.placer == name]
            own = [t for t in own if t.placement in self.finals.means] or own
            methods.append(
                MethodResult(
                    method=name,
                    best=min(own, key=lambda t: t.measurement.mean_seconds, default=None),
                    trials=count,
                    seconds=self.progress.seconds_of.get(name, 0.0),
                )
            )
        return Result(
            problem=self.problem,
            best=best,
            comparisons=tuple(comparisons),
            methods=tuple(methods),
            lower_bound_seconds=0.0,
            seconds=self.progress.elapsed_seconds,
            seed=self.seed,
            interrupted=self.interrupted(),
            fault=self.progress.fault,
            measured=True,
        )


def enough_for(budget: Budget, step_seconds: float, steps: int) -> bool:
    """Whether a budget is worth measuring with: time for ten placements, at the simulated speed.

    A budget of trials alone says nothing about time: thousands of them take seconds in the
    simulator and hours on real devices.
    """
    if budget.seconds is None:
        return False
    return 10 * (1.0 + steps * step_seconds) <= budget.seconds
