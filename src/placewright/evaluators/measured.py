"""Measures placements by running them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placewright.backends import Run, Runner
from placewright.errors import PlacementError
from placewright.evaluators.base import Evaluator
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator.engine import why_not


class MeasuredEvaluator(Evaluator):
    """Runs placements one after another on real devices. Closing the runner is the caller's."""

    cheap = False
    noise = 0.05
    """Between two passes over the same placements, times of rnnlm and nmt on two shared cores
    differed so that it is 0.04 and 0.06 (`benchmarks/results/fidelity`)."""

    def __init__(self, problem: Problem, runner: Runner) -> None:
        if runner.program.graph != problem.graph:
            raise PlacementError(
                f"the runner runs graph {runner.program.graph.fingerprint}, the problem is of "
                f"{problem.graph.fingerprint}; another batch or scale?"
            )
        if runner.cluster.device_names != problem.cluster.device_names:
            raise PlacementError(
                f"the runner has devices {', '.join(runner.cluster.device_names)}, the problem "
                f"{', '.join(problem.cluster.device_names)}"
            )
        self._problem = problem
        self.runner = runner
        self._best_seconds: float | None = None

    @property
    def problem(self) -> Problem:
        return self._problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        for placement in placements:
            placement.check(self._problem)
        return [self.run(placement).measurement for placement in placements]

    def run(self, placement: Placement, *, traces: int = 0, compared: bool = False) -> Run:
        """One placement, with what the framework told on the way.

        One that is `compared` with others side by side has as many steps as they have, however
        slow it is and however much its times differ.
        """
        placement.check(self._problem)
        devices = placement.devices[self._problem.grouping.group_of]
        groups = np.arange(self._problem.num_groups)
        wrong = np.flatnonzero(~self._problem.allowed[groups, placement.devices])
        if wrong.size:  # the framework would say so of kernels, but knows no constraints
            op = int(self._problem.grouping.members(int(wrong[0]))[0])
            for member in self._problem.grouping.members(int(wrong[0])):
                if np.isinf(self._problem.op_seconds[devices[member], member]):
                    op = int(member)
                    break
            reason = why_not(self._problem, op, int(devices[op]))
            return Run(measurement=Measurement(outcome=Outcome.FAILED, reason=reason))
        run = self.runner.measure(
            devices,
            best_seconds=None if compared else self._best_seconds,
            traces=traces,
            adaptive=not compared,
        )
        if run.measurement.ok and run.measurement.mean_seconds < (self._best_seconds or np.inf):
            self._best_seconds = run.measurement.mean_seconds
        return run
