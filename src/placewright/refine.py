"""Searches in the simulator, measures what looks best, corrects the simulator, and again.

A real run takes seconds, a simulated one a millisecond or less. So the simulator does the
searching, and the machine has the last word: the answer is a placement that was measured, in turns
with what it is compared with, so that whatever else the machine did hit all alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from placewright import methods as registry
from placewright.api import COSTS_FILE, Result, open_journal
from placewright.backends import Runner
from placewright.calibration import (
    LINK_BYTES,
    Calibration,
    corrected,
    measure_links,
    op_table,
)
from placewright.cluster import Cluster
from placewright.costs import Source
from placewright.errors import WorkerError
from placewright.evaluators.base import Evaluator
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.measurement import Measurement, Trial
from placewright.measuring import FinalConfig, Measuring
from placewright.metrics import MetricsLog
from placewright.placement import Placement, everything_on
from placewright.placers.base import Placer
from placewright.problem import Problem
from placewright.search import Budget, Progress, search

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RefineConfig(FinalConfig):
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
    links_share: float = 0.1
    """Links are timed where that takes no more than this share of the time left. The fit of step
    times corrects links as well, all by the same factor; a search that is short does better to
    measure a few candidates more."""


class Remembering(Evaluator):
    """The simulator, but what was measured keeps its measured time; remembers the best.

    To a `search` it is also the journal, which is told who proposed what.
    """

    trials: Sequence[Trial] = ()

    def __init__(self, problem: Problem, known: dict[Placement, Measurement]) -> None:
        self._simulated = SimulatedEvaluator(problem)
        self._known = known
        self.best: dict[Placement, float] = {}
        self.found_by: dict[Placement, str] = {}

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
            self.found_by = {p: name for p, name in self.found_by.items() if p in self.best}
        return measurements

    def append(self, trials: Sequence[Trial]) -> None:
        self.found_by.update({t.placement: t.placer for t in trials if t.placement in self.best})


_REMEMBERED = 2000

_START_SECONDS = 6.0
"""What it takes to start the devices' processes, about."""

_LINK_RUN_SECONDS = 0.7
"""What timing a link with one size of tensor takes, about."""


def refine(
    problem: Problem,
    runner: Runner,
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
        runner: of the problem's graph and cluster. Where the problem's links differ from the
            runner's, they come from a calibration, and are not timed again.
        methods: what searches in the simulator.
        budget: of time, or of real runs (those of references and repetitions included), or both.
    """
    with open_journal(directory, problem, "simulate+measure") as journal:
        config = config or RefineConfig()
        evaluator = MeasuredEvaluator(problem, runner)
        refinement = _Refinement(
            real=Measuring(problem, evaluator, budget, seed, journal, observe, stop, config),
            config=config,
            methods=tuple(dict.fromkeys(methods)),
            options={"learner": learner, "policy": policy},
            directory=None if directory is None else Path(directory),
            metrics=None if directory is None else MetricsLog(Path(directory)),
        )
        try:
            return refinement.run()
        finally:
            if refinement.metrics is not None:
                refinement.metrics.close()


@dataclass(frozen=True, kw_only=True)
class _Refinement:
    real: Measuring
    config: RefineConfig
    methods: Sequence[str]
    options: Mapping[str, Any]
    """Of the learned methods."""
    directory: Path | None = None
    metrics: MetricsLog | None = None
    placers: dict[str, Placer] = field(default_factory=dict)
    """Of the last search in the simulator, by method."""

    def run(self) -> Result:
        self.real.find_references()
        calibration = self._begun() or self._calibrate()
        for placement, name in self.real.unmeasured_references():
            self.real.measure(placement, name)
        while not self.real.stop() and self.real.runs_left >= self.real.runs_reserved + 1:
            if not self._round(calibration):
                break  # nothing new to measure
            calibration = self._kept(self._corrected(calibration))
        self.real.final()
        if self.real.finals.means:
            # Those are the times that count: what is drawn of the answer should agree with them.
            calibration = self._kept(self._corrected(calibration))
        found = calibration if self._says_anything(calibration) else None
        return dataclasses.replace(self.real.result(), calibration=found)

    # --- costs ---

    def _begun(self) -> Calibration | None:
        """The costs that a run which goes on had come to."""
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
        self.real.evaluator.runner.start()  # its time is none of the first run's
        traced = {}
        whole = True
        for device in range(self.real.problem.num_devices):
            single = everything_on(self.real.problem, device)
            run = self.real.measure(single, "single", traces=self.config.traces)
            whole = whole and run is not None
            if run is not None and run.trace is not None:
                traced[device] = run
        table = op_table(self.real.problem, traced)
        found = Calibration(table=table, cluster=self._with_timed_links())
        # What was stopped in the middle is not kept: who goes on with the run begins this anew.
        return self._kept(found) if whole else found

    def _with_timed_links(self) -> Cluster:
        cluster, runner = self.real.problem.cluster, self.real.evaluator.runner
        if cluster.links != runner.cluster.links or not self._time_for_links():
            return cluster
        try:
            cluster = measure_links(runner, cluster)
        except WorkerError as fault:
            logger.warning("links are taken to be as the cluster says: %s", fault)
        with contextlib.suppress(WorkerError):  # the next run tries again, and says what is wrong
            runner.start()  # now: no run is to blame for the time it takes
        return cluster

    def _time_for_links(self) -> bool:
        """Whether the budget is worth timing the links first."""
        real, cluster = self.real, self.real.problem.cluster
        # Only whole routes can be timed, not ways to a switch.
        links = sum(set(link.pairs[0]) <= set(cluster.device_names) for link in cluster.links)
        if not links or not real.run_seconds or real.stop():
            return False
        # The processes for the links are others, and those of the model start again after that.
        runs = 1 + links * (1 + len(LINK_BYTES))
        takes = 2 * _START_SECONDS + runs * _LINK_RUN_SECONDS
        return takes <= self.config.links_share * real.runs_left * real.run_seconds

    def _corrected(self, calibration: Calibration) -> Calibration:
        known = {
            p: self.real.pooled(p).mean_seconds for p in self.real.samples if self.real.pooled(p).ok
        }
        if len(known) < 3:
            return calibration
        return corrected(self.real.problem, calibration, list(known), list(known.values()))

    # --- candidates ---

    def _round(self, calibration: Calibration) -> bool:
        """Searches in the simulator and measures what it found; False when that is nothing new."""
        new = self._candidates(calibration)
        best = self.real.best_placements(1)
        measured = 0
        for placement, name in new:
            if self.real.runs_left <= self.real.runs_reserved:
                break
            measured += self.real.measure(placement, name) is not None
        # In turns with the best so far, whose time is the one that counts.
        if (
            measured
            and best
            and best[0] not in dict(new)
            and self.real.runs_left > self.real.runs_reserved
        ):
            self.real.measure(best[0])
        return measured > 0

    def _candidates(self, calibration: Calibration) -> list[tuple[Placement, str]]:
        under = calibration.problem(self.real.problem)
        known = {
            Placement.of(under, placement.devices): self.real.pooled(placement)
            for placement in self.real.samples
        }
        simulator = Remembering(under, known)
        seconds = self._simulate_seconds()
        placers = self._placers(under, seconds)
        told = [
            Trial(placement=p, measurement=m, placer="measured", seed=self.real.seed)
            for p, m in known.items()
        ]
        for placer in placers:
            placer.tell(told)
        search(
            placers,
            simulator,
            Budget(seconds=seconds),
            journal=simulator,
            seed=self.real.seed,
            observe=self._watch,
            stop=self.real.stop,
        )
        apart = max(1, round(self.config.distance * self.real.problem.num_groups))
        chosen: list[tuple[Placement, str]] = []
        ordered = sorted(simulator.best, key=simulator.best.__getitem__)
        for placement in ordered:
            devices = placement.devices
            ours = Placement.of(self.real.problem, devices)
            near = any(np.sum(devices != other.devices) < apart for other, _ in chosen)
            if ours in self.real.samples or near:
                continue
            chosen.append((ours, simulator.found_by[placement]))
            if len(chosen) == self.config.candidates:
                break
        return chosen

    def _placers(self, under: Problem, seconds: float) -> list[Placer]:
        """Those that learn go on under the costs as they are now; the others are made anew."""
        # As if asked for: those that learn go on in later rounds, so this one is not all they have.
        names = [
            str(name)
            for name in self.methods
            if name not in self.placers or not self.placers[name].continue_under(under)
        ]
        made = registry.make(
            names,
            under,
            seed=self.real.seed + self.real.progress.trials,
            seconds=seconds,
            **self.options,
        )
        self.placers.update(zip(names, made, strict=True))
        return [self.placers[name] for name in self.methods]

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
        left = self.real.seconds_left - self.real.runs_reserved * self.real.run_seconds
        return max(1.0, min(self.config.simulate_seconds, self.config.simulate_share * left))


def enough_for(budget: Budget, step_seconds: float, steps: int) -> bool:
    """Whether a budget is worth measuring with: time for ten placements, at the simulated speed.

    A budget of trials alone says nothing about time: thousands of them take seconds in the
    simulator and hours on real devices.
    """
    if budget.seconds is None:
        return False
    return 10 * (1.0 + steps * step_seconds) <= budget.seconds
