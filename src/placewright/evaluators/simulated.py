"""Measures placements in the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placewright.errors import PlacementError
from placewright.evaluators.base import Evaluator
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator.engine import Simulation, Simulator, why_not
from placewright.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Makes the simulator about as unreliable as a real machine, to see how a search copes. What
    changes more slowly than from step to step, such as a machine that is busier for an hour, is
    left out."""

    spread: float = 0.1
    """Standard deviation of the logarithm of each step time."""
    steps: int = 4
    """Steps that a trial times, each with noise of its own. A real trial times nine or more unless
    it is cut short, but these have part of their noise in common: their mean is off by about as
    much as that of four (`MeasuredEvaluator.noise`)."""
    failure_rate: float = 0.05
    """Share of the placements that fail for no reason of their own."""
    seed: int = 0
    """The same seed and the same calls give the same noise."""

    def __post_init__(self) -> None:
        if not (np.isfinite(self.spread) and self.spread >= 0):
            raise PlacementError(f"spread of the noise must not be negative, not {self.spread}")
        if self.steps < 1:
            raise PlacementError(f"a noisy trial times at least one step, not {self.steps}")
        if not 0 <= self.failure_rate <= 1:
            raise PlacementError(f"failure rate must be between 0 and 1, not {self.failure_rate}")


class SimulatedEvaluator(Evaluator):
    """Simulates all placements of a call at once, on all cores."""

    def __init__(
        self, problem: Problem, noise: Noise | None = None, *, threads: int | None = None
    ) -> None:
        self._simulator = Simulator(problem, threads=threads)
        self._noise = noise
        self.noise = noise.spread / math.sqrt(noise.steps) if noise else 0.0
        self._rng = np.random.default_rng(noise.seed if noise else 0)

    @property
    def problem(self) -> Problem:
        return self._simulator.problem

    @property
    def simulator(self) -> Simulator:
        return self._simulator

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        for placement in placements:
            placement.check(self.problem)
        if not placements:
            return []
        simulation = self._simulator.run(np.stack([p.devices for p in placements]))
        return [
            self._measurement(simulation, row, placement)
            for row, placement in enumerate(placements)
        ]

    def _measurement(self, simulation: Simulation, row: int, placement: Placement) -> Measurement:
        factors = [1.0]
        if self._noise is not None:
            # Drawn for every placement, so that what happens to one does not move the next.
            normal, uniform = self._rng.standard_normal(self._noise.steps), self._rng.random()
            factors = np.exp(self._noise.spread * normal).tolist()
            if uniform < self._noise.failure_rate:
                return Measurement(
                    outcome=Outcome.FAILED, reason="simulated failure of the machine"
                )
        op = int(simulation.failed_op[row])
        if op >= 0:
            device = int(placement.devices[self.problem.grouping.group_of[op]])
            return Measurement(outcome=Outcome.FAILED, reason=why_not(self.problem, op, device))
        peak_bytes = tuple(simulation.peak_bytes[row].tolist())
        if simulation.overflow_device[row] >= 0:
            reason = out_of_memory(self.problem, placement, simulation, row)
            return Measurement(outcome=Outcome.OUT_OF_MEMORY, peak_bytes=peak_bytes, reason=reason)
        seconds = float(simulation.step_seconds[row])
        return Measurement(
            outcome=Outcome.OK,
            step_seconds=tuple(seconds * factor for factor in factors),
            peak_bytes=peak_bytes,
        )


def out_of_memory(problem: Problem, placement: Placement, simulation: Simulation, row: int) -> str:
    """Which device runs out of memory, by how much, and what lies in it."""
    number = int(simulation.overflow_device[row])
    device = problem.cluster.devices[number]
    pinned = int(simulation.pinned_bytes[row, number])
    if pinned > device.pinnable_bytes:
        return (
            f"{device.name} would have to pin {format_bytes(pinned)} of weights that travel from "
            f"there, can pin {format_bytes(device.pinnable_bytes)}"
        )
    need, room = int(simulation.peak_bytes[row, number]), device.memory_bytes
    digits = 3
    while format_bytes(need, digits) == format_bytes(room, digits):
        digits += 1
    parts = [f"{device.name} needs {format_bytes(need, digits)}, has {format_bytes(room, digits)}"]
    live = [
        f"{_tensor_name(problem, tensor)} {format_bytes(size)}"
        for tensor, size in zip(
            simulation.overflow_tensors[row].tolist(),
            simulation.overflow_bytes[row].tolist(),
            strict=True,
        )
        if tensor >= 0
    ]
    if live:
        parts.append(f"largest live tensors: {', '.join(live)}")
    variables = int(problem.group_resident_bytes[placement.devices == number].sum())
    if variables:
        parts.append(f"variables: {format_bytes(variables)}")
    return "; ".join(parts)


def _tensor_name(problem: Problem, tensor: int) -> str:
    producer = int(problem.graph.tensor_producer[tensor])
    output = tensor - int(problem.graph.output_offsets[producer])
    name = problem.graph.op_names[producer]
    return f"{name}:{output}" if output else name
