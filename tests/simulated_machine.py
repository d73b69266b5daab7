"""A machine that is simulated, with noise, and a runner that measures on it: for searches with
"real" runs that take milliseconds and whose true times are known."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placewright.backends.base import Input, Run, RunConfig, Trace, Transfer
from placewright.cluster import Cluster
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Graph, frozen
from placewright.measurement import Measurement
from placewright.placement import Placement
from placewright.problem import Problem


@dataclass(frozen=True)
class SimulatedProgram:
    graph: Graph
    inputs: tuple[Input, ...] = ()
    backend: str = "simulated"


class SimulatedRunner(contextlib.ExitStack):
    """Measures as a machine would whose true costs are those of a problem."""

    def __init__(self, truth: Problem, *, noise: float = 0.01, steps: int = 4, seed: int = 0):
        """`noise`: standard deviation of the logarithm of a run's mean, and of a step's beside
        it."""
        super().__init__()
        self.truth = truth.refined
        self.program = SimulatedProgram(truth.graph)
        self.cluster: Cluster = truth.cluster
        self.config = RunConfig(steps=steps + 1, max_steps=steps + 1)
        self.runs: list[tuple[int, ...]] = []
        self._steps, self._noise = steps, noise
        self._rng = np.random.default_rng(seed)
        self._evaluator = SimulatedEvaluator(self.truth, threads=1)

    def start(self) -> None:
        pass

    def true(self, devices: Sequence[int] | Any) -> Measurement:
        groups = self.truth.grouping.group_of
        placed = np.zeros(self.truth.num_groups, dtype=np.int32)
        placed[groups] = np.asarray(devices, dtype=np.int32)
        (measurement,) = self._evaluator.evaluate([Placement.of(self.truth, placed)])
        return measurement

    def measure(
        self,
        devices: Sequence[int] | Any,
        *,
        best_seconds: float | None = None,
        traces: int = 0,
        adaptive: bool = True,
        train_steps: int = 0,
    ) -> Run:
        self.runs.append(tuple(int(device) for device in devices))
        measurement = self.true(devices)
        # As many numbers each time, so that what one placement does not use is not the next one's.
        usual, steps = self._rng.standard_normal(), self._rng.standard_normal(self._steps)
        if not measurement.ok:
            return Run(measurement=measurement)
        mean = measurement.mean_seconds * math.exp(self._noise * usual)
        seconds = tuple(float(mean * math.exp(self._noise * step)) for step in steps)
        trace = None
        if traces:
            op_seconds = self.truth.busy_seconds[np.asarray(devices), np.arange(len(devices))]
            names = self.program.graph.op_names
            trace = Trace(
                op_seconds=dict(zip(names, op_seconds.tolist(), strict=True)),
                device_of=dict(zip(names, self.runs[-1], strict=True)),
                transfers=self._transfers(devices),
                step_seconds=seconds[:1],
            )
        if train_steps:
            seconds = (mean,) * (train_steps - 1)
        losses = tuple(1.0 / (1 + step) for step in range(train_steps))
        return Run(
            measurement=Measurement(
                outcome=measurement.outcome, step_seconds=seconds, peak_bytes=measurement.peak_bytes
            ),
            trace=trace,
            returned={"loss": losses} if train_steps else None,
        )

    def _transfers(self, devices: Sequence[int]) -> tuple[Transfer, ...]:
        """The first from each device to each other, called as the runners call them."""
        graph, names = self.truth.graph, self.cluster.device_names
        found: dict[str, Transfer] = {}
        for source, target in zip(graph.edge_src, graph.edge_dst, strict=True):
            if devices[source] != devices[target]:
                way = f"({names[devices[source]]} -> {names[devices[target]]})"
                found.setdefault(way, Transfer(f"{graph.op_names[source]} {way}", 4, 1e-4))
        return tuple(found.values())

    def demands(self) -> Mapping[int, Mapping[str, float]]:
        cluster, demand = self.cluster, self.truth.costs.demand
        first = {
            int(chip): number
            for number, chip in reversed(list(enumerate(cluster.chip_of_device)))
            if chip >= 0
        }
        names = self.program.graph.op_names
        return {
            device: dict(zip(names, demand[cluster.kind_of_device[device]].tolist(), strict=True))
            for device in first.values()
        }

    def seconds_for_links(self, sizes: int) -> float:
        return 0.1 * sizes * len(self.cluster.links)

    def time_links(self, sizes: Sequence[int]) -> Mapping[str, Sequence[float]]:
        return {
            link.name: [link.latency_seconds + size / link.bandwidth for size in sizes]
            for link in self.cluster.links
        }


def as_it_is(problem: Problem, seed: int = 0) -> Problem:
    """What a machine might really be where a problem says what it is thought to be: ops take up to
    a few times longer or less long, by their type, and links are slower."""
    rng = np.random.default_rng(seed)
    types = sorted(set(problem.graph.op_types))
    factor_of = dict(zip(types, np.exp(0.4 * rng.standard_normal(len(types))), strict=True))
    factors = np.array([factor_of[t] for t in problem.graph.op_types])
    factors = factors * np.exp(0.2 * rng.standard_normal(len(factors)))
    links = tuple(
        replace(link, latency_seconds=2 * link.latency_seconds, bandwidth=link.bandwidth / 2)
        for link in problem.cluster.links
    )
    costs = replace(problem.costs, op_seconds=frozen(problem.costs.op_seconds * factors))
    return replace(problem, costs=costs, cluster=replace(problem.cluster, links=links))
