"""Searches in the simulator, measures what looks best, corrects the simulator, and again.

A real run takes seconds, a simulated one a millisecond or less. So the simulator does the
searching, and the machine has the last word: the answer is a placement that was measured, in turns
with what it is compared with, so that whatever else the machine did hit all alike.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from placewright import methods as registry
from placewright.backends.base import Run, Runner
from placewright.budget import Budget
from placewright.calibration import (
    LINK_BYTES,
    SPREAD,
    Calibration,
    corrected,
    measure_links,
    op_table,
)
from placewright.cluster import Cluster
from placewright.costs import Source
from placewright.errors import WorkerError
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.measurement import Trial
from placewright.placement import Placement, everything_on
from placewright.placers.base import Placer
from placewright.problem import Problem
from placewright.session.config import SearchConfig
from placewright.session.directory import COSTS_FILE
from placewright.session.metrics import MetricsLog
from placewright.session.real import RealRuns
from placewright.session.search import Progress, search
from placewright.stopping import Stopped

_R = TypeVar("_R")

logger = logging.getLogger(__name__)

_REMEMBERED = 2000

_MOST_CANDIDATES = 4
"""Where real runs are short, so many times as many candidates are measured in a round at most:
more would all come of the same costs, which their times are to correct."""

_LAST_SHARE = 0.7
"""Of the time left, for the search of the last round."""

_FITTED = 32
"""Placements that costs are fitted to at most, the references and the fastest: each try of a fit
simulates all of them."""

_FIT_WORK = 2e7
"""Of a fit between two rounds, in ops simulated: a second or two, which its round takes as well."""

_LEAST_TRIES = 100
"""Of a fit, however large the model is."""


class Best:
    """The fastest simulated placements of a search, and who proposed them."""

    def __init__(self, known: Sequence[Trial] = ()) -> None:
        self.trials = known
        """What was measured, and so keeps its measured time."""
        self.seconds: dict[Placement, float] = {}
        self.found_by: dict[Placement, str] = {}

    def append(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.measurement.ok:
                self.seconds[trial.placement] = trial.measurement.mean_seconds
                self.found_by[trial.placement] = trial.placer
        if len(self.seconds) > 4 * _REMEMBERED:
            self.seconds = {p: self.seconds[p] for p in self.ordered()[:_REMEMBERED]}
            self.found_by = {p: self.found_by[p] for p in self.seconds}

    def ordered(self) -> list[Placement]:
        return sorted(self.seconds, key=self.seconds.__getitem__)


@dataclass(kw_only=True)
class Rounds:
    """Turns of simulating and measuring; its trials are real runs."""

    real: RealRuns
    config: SearchConfig
    runner: Runner | None
    """For the links; None where workers measure, whose links are then taken to be as the cluster
    describes them until step times correct them."""
    directory: Path | None = None
    metrics: MetricsLog | None = None
    placers: dict[str, Placer] = field(default_factory=dict)
    """Of the last search in the simulator, by method."""
    calibration: Calibration | None = None
    """What is known of costs; given by who had them measured before."""

    def prepare(self) -> None:
        """The costs that a run which goes on had come to, or that are given, or those of traced
        runs."""
        self.calibration = self._begun() or self.calibration or self._calibrate()

    def run(self) -> None:
        real = self.real
        while not real.stop() and real.runs_left >= real.runs_reserved + 1:
            if not self._round():
                break  # nothing new to measure
            self.correct()

    # --- costs ---

    def _begun(self) -> Calibration | None:
        path = None if self.directory is None else self.directory / COSTS_FILE
        if path is None or not self.real.progress.resumed or not path.is_file():
            return None
        return Calibration.load(path, self.real.problem)

    def _kept(self, calibration: Calibration) -> Calibration:
        """Writes it down: also a run that is killed is looked at and goes on under its costs."""
        if self.directory is not None and self._says_anything(calibration):
            calibration.save(self.directory / COSTS_FILE, self.real.problem.graph)
        return calibration

    def _says_anything(self, calibration: Calibration) -> bool:
        """Not so where no device could run the model alone, and nothing was fitted yet."""
        timed = bool((calibration.table.source == Source.TABLE).any())
        return timed or calibration.cluster != self.real.problem.cluster

    def _calibrate(self) -> Calibration:
        """Single devices are traced: that is where the costs of ops come from."""
        problem = self.real.problem
        self._start()  # its time is none of the first run's
        device_of: dict[Placement, int] = {}
        for device in range(problem.num_devices):
            device_of.setdefault(everything_on(problem, device), device)
        singles = self.real.without_twins(list(device_of))
        runs = self._traced(singles, "single")
        traced = {
            device_of[single]: runs[single]
            for single in singles
            if single in runs and runs[single].trace is not None
        }
        kinds = problem.cluster.kind_of_device
        if len({int(kinds[device]) for device in traced}) < len(problem.cluster.kinds):
            # Too large for one device: then of what a person would spread over several.
            for spread, run in self._traced(self.real.references["expert"], "expert").items():
                if run.trace is not None and len(np.unique(spread.devices)) > 1:
                    traced[SPREAD] = run
        table = op_table(problem, traced)
        found = Calibration(table=table, cluster=self._with_timed_links())
        # What was stopped in the middle is not kept: who goes on with the run begins this anew.
        return self._kept(found) if all(single in runs for single in singles) else found

    def _traced(self, placements: Sequence[Placement], placer: str) -> dict[Placement, Run]:
        wanted = [(placement, placer) for placement in placements]
        return self.real.measure(wanted, traces=self.config.rounds.traces)

    def _with_timed_links(self) -> Cluster:
        cluster, runner = self.real.problem.cluster, self.runner
        if runner is None or cluster.links != runner.cluster.links or not self._time_for_links():
            return cluster
        try:
            cluster = self._patiently(functools.partial(measure_links, runner, cluster))
        except WorkerError as fault:
            logger.warning("links are taken to be as the cluster says: %s", fault)
        except Stopped:
            return cluster
        with contextlib.suppress(WorkerError):  # the next run tries again, and says what is wrong
            self._start()  # now: no run is to blame for the time it takes
        return cluster

    def _start(self) -> None:
        if self.runner is not None and not self.real.stop():
            with contextlib.suppress(Stopped):
                self._patiently(self.runner.start)

    def _patiently(self, function: Callable[[], _R]) -> _R:
        evaluator = self.real.evaluator
        assert isinstance(evaluator, MeasuredEvaluator)  # the one whose runner this is
        return evaluator.patiently(function, self.real.stop)

    def _time_for_links(self) -> bool:
        """Whether the budget is worth timing the links first."""
        real = self.real
        takes = self.runner.seconds_for_links(len(LINK_BYTES)) if self.runner is not None else 0.0
        if not takes or not real.run_seconds or real.stop():
            return False
        return takes <= self.config.rounds.links_share * real.runs_left * real.run_seconds

    def correct(self) -> None:
        """Fits the costs to all that was measured so far."""
        real = self.real
        assert self.calibration is not None
        references = [p for found in real.references.values() for p in found]
        wanted = dict.fromkeys([*references, *real.best_placements(_FITTED)])
        measured = {p: real.pooled(p) for p in list(wanted)[:_FITTED] if p in real.samples}
        seconds = {p: pooled.mean_seconds for p, pooled in measured.items() if pooled.ok}
        if len(seconds) >= 3:
            tries = max(_LEAST_TRIES, _FIT_WORK / (len(seconds) * real.problem.graph.num_ops))
            self.calibration = self._kept(
                corrected(
                    real.problem, self.calibration, list(seconds), list(seconds.values()),
                    most_tries=tries,
                )
            )  # fmt: skip

    def found(self) -> Calibration | None:
        """What was found out about costs, where that is anything."""
        calibration = self.calibration
        return calibration if calibration and self._says_anything(calibration) else None

    # --- candidates ---

    def first(self, seconds: float) -> Problem:
        """Searches in the simulator before a search with real runs, which goes on from `placers`;
        the best of what was found is measured. Gives the problem under the costs as they are."""
        real = self.real
        self.correct()
        self._measure(self._candidates(seconds, real.seed, methods=self.config.chosen))
        assert self.calibration is not None
        return self.calibration.problem(real.problem)

    def _round(self) -> bool:
        """Searches in the simulator and measures what it found; False when that is nothing new."""
        real = self.real
        new = self._candidates(self._simulate_seconds(), real.seed + real.progress.trials)
        best = real.best_placements(1)
        measured = self._measure(new)
        # In turns with the best so far, whose time is the one that counts.
        if measured and best and best[0] not in dict(new):
            real.measure([(best[0], "")], leave=real.runs_reserved)
        return bool(measured)

    def _measure(self, candidates: Sequence[tuple[Placement, str]]) -> dict[Placement, Run]:
        """Runs them, but no more after the first few where none of these could run: the others are
        their like."""
        real = self.real
        few = max(self.config.rounds.candidates, real.evaluator.parallel)
        runs = real.measure(candidates[:few], leave=real.runs_reserved)
        if any(run.measurement.ok for run in runs.values()):
            runs |= real.measure(candidates[few:], leave=real.runs_reserved)
        return runs

    def _candidates(
        self, seconds: float, seed: int, methods: registry.Chosen | None = None
    ) -> list[tuple[Placement, str]]:
        """The best that a search in the simulator finds, and who found them. By default as if all
        methods were asked for: those that learn go on in later rounds, so that this one is not all
        they have."""
        real, rounds = self.real, self.config.rounds
        if real.stop():
            return []
        assert self.calibration is not None
        under = self.calibration.problem(real.problem)
        budget = Budget(seconds=seconds)
        simulated = Best(
            [
                Trial(placement=p, measurement=real.pooled(p), placer="measured", seed=real.seed)
                for p in real.samples
            ]
        )
        search(
            self._placers(under, budget, seed, methods), SimulatedEvaluator(under), budget,
            journal=simulated, seed=real.seed, observe=self._watch, stop=real.stop,
            lower_bound_seconds=None,  # it says nothing of times that were measured
        )  # fmt: skip
        apart = max(1, round(rounds.distance * real.problem.num_groups))
        chosen: dict[Placement, str] = {}
        most = self._num_candidates(seconds)
        for placement in simulated.ordered():
            near = any(np.sum(placement.devices != other.devices) < apart for other in chosen)
            if placement not in real.samples and not near:
                chosen[placement] = simulated.found_by[placement]
            if len(chosen) == most:
                break
        return list(chosen.items())

    def _num_candidates(self, simulated_seconds: float) -> int:
        """As many as are run in about the time that was simulated."""
        each, least = self.real.run_seconds, self.config.rounds.candidates
        many = simulated_seconds / each if each else 0.0
        return int(min(max(least, many), _MOST_CANDIDATES * least))

    def _placers(
        self, under: Problem, budget: Budget, seed: int, methods: registry.Chosen | None
    ) -> list[Placer]:
        """Made anew under the costs as they are now; those that learn go on with what they have
        learned."""
        names = self.config.chosen.names
        made = registry.make(
            methods or names,
            under,
            seed=seed,
            seconds=budget.seconds,
            learners=self.config.learner,
            policy=self.config.policy,
            previous=self.placers,
            beside_runs=True,
        )
        self.placers = dict(zip(names, made, strict=True))
        return made

    def _watch(self, simulating: Progress) -> None:
        """Lets the watcher of the whole see who searches, and how learning goes."""
        progress = self.real.progress
        progress.placer = simulating.placer
        for name, record in simulating.metrics_of.items():
            progress.metrics_of[name] = record
            if self.metrics is not None:
                self.metrics.append(name, progress.trials, progress.elapsed_seconds, record)
        self.real.observe(progress)

    def _simulate_seconds(self) -> float:
        real, rounds = self.real, self.config.rounds
        left = max(0.0, real.seconds_left - real.runs_reserved * real.run_seconds)
        usual = max(1.0, min(rounds.simulate_seconds, rounds.simulate_share * left))
        # What it finds has to be measured, too; a budget of nothing is none.
        return max(0.01, min(usual, _LAST_SHARE * left))
