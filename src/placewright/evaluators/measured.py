"""Measures placements by running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np

from placewright.backends.base import Run, Runner
from placewright.errors import PlacementError
from placewright.evaluators.base import Evaluator, Request
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator.engine import why_not
from placewright.stopping import Stopped

_R = TypeVar("_R")


class MeasuredEvaluator(Evaluator):
    """Runs placements one after another on real devices. Closing the runner is the caller's.

    What is submitted runs in a thread, so that a search that is stopped need not wait for a run
    that takes minutes. The thread lives as long as the evaluator does: Linux ends the processes
    that a runner starts with the thread that started them.
    """

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
        self._thread = ThreadPoolExecutor(1, "runs")
        self._trying: tuple[Request, Future[Run]] | None = None

    @property
    def problem(self) -> Problem:
        return self._problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        return [run.measurement for run in self.run([Request(p) for p in placements])]

    def run(self, requests: Sequence[Request]) -> list[Run]:
        for request in requests:
            request.placement.check(self._problem)
        return [self._run(request) for request in requests]

    def collect(self, seconds: float) -> list[tuple[Placement, Run]]:
        if self._trying is None:
            if not self._requests:
                return []
            first, *later = self._requests
            self._requests = tuple(later)
            first.placement.check(self._problem)
            self._trying = first, self._thread.submit(self._run, first)
        request, running = self._trying
        if not wait([running], timeout=seconds).done:
            return []
        self._trying = None
        return [(request.placement, running.result())]

    def patiently(self, function: Callable[[], _R], stop: Callable[[], bool]) -> _R:
        """Calls in the thread of the runs what takes long with the runner, such as starting it;
        raises `Stopped` after a stop, while it goes on as in `drop`."""
        running = self._thread.submit(function)
        while not wait([running], timeout=0.1).done:
            if stop():
                raise Stopped
        return running.result()

    def drop(self) -> None:
        """What runs goes on, for nobody, until it ends or its runner is closed."""
        super().drop()
        self._trying = None

    def _run(self, request: Request) -> Run:
        placement, problem = request.placement, self._problem
        devices = placement.devices[problem.grouping.group_of]
        groups = np.arange(problem.num_groups)
        wrong = np.flatnonzero(~problem.allowed[groups, placement.devices])
        if wrong.size:  # the framework would say the same of kernels, but knows no constraints
            members = problem.grouping.members(int(wrong[0]))
            missing = members[np.isinf(problem.op_seconds[devices[members], members])]
            op = int(missing[0] if missing.size else members[0])
            reason = why_not(problem, op, int(devices[op]))
            return Run(measurement=Measurement(outcome=Outcome.FAILED, reason=reason))
        run = self.runner.measure(
            devices,
            best_seconds=None if request.compared else self._best_seconds,
            traces=request.traces,
            adaptive=not request.compared,
        )
        if run.measurement.ok and run.measurement.mean_seconds < (self._best_seconds or np.inf):
            self._best_seconds = run.measurement.mean_seconds
        return run
