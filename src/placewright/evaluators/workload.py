"""Measures placements of a workload: the weighted sum of its parts' steps, in the simulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placewright.evaluators.base import Evaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import IndexArray
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.workload import Workload

_MOST_REMEMBERED = 50_000
"""Placements of a part whose measurements are kept: most changes concern one part."""


class WorkloadEvaluator(Evaluator):
    """What a placement of the whole is worth: each part simulated by itself, with all of the
    weights at home. A part that does not run makes the whole not run; of memory, the most that any
    part needs counts."""

    def __init__(self, workload: Workload, *, threads: int | None = None) -> None:
        self.workload = workload
        self._evaluators = {
            part.name: SimulatedEvaluator(part.problem, threads=threads) for part in workload.parts
        }
        self._known: dict[str, dict[bytes, Measurement]] = {p.name: {} for p in workload.parts}

    @property
    def problem(self) -> Problem:
        return self.workload.problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        for placement in placements:
            placement.check(self.problem)
        if not placements:
            return []
        rows = np.stack([placement.devices for placement in placements])
        of_part = {
            part.name: self._of_part(part.name, part.problem, rows) for part in self.workload.parts
        }
        pinned = self.problem.pinned_bytes(rows)
        return [
            self._whole({name: found[i] for name, found in of_part.items()}, pinned[i].tolist())
            for i in range(len(placements))
        ]

    def parts(self, placement: Placement) -> dict[str, Measurement]:
        """Part -> what it measures by itself."""
        return {
            name: self._evaluators[name].evaluate([own])[0]
            for name, own in self.workload.divided(placement).items()
        }

    def _of_part(self, name: str, problem: Problem, rows: IndexArray) -> list[Measurement]:
        own = np.ascontiguousarray(rows[:, self.workload.groups[name]])
        keys = [row.tobytes() for row in own]
        known = self._known[name]
        new = {key: row for key, row in zip(keys, own, strict=True) if key not in known}
        if new:
            made = self._evaluators[name].evaluate(
                [Placement.of(problem, row) for row in new.values()]
            )
            known.update(zip(new, made, strict=True))
        found = [known[key] for key in keys]
        while len(known) > _MOST_REMEMBERED:
            del known[next(iter(known))]
        return found

    def _whole(self, found: dict[str, Measurement], pinned: list[int]) -> Measurement:
        peaks = [m.peak_bytes for m in found.values() if m.peak_bytes]
        peak_bytes = tuple(max(column) for column in zip(*peaks, strict=True))
        failed = next((m for m in found.values() if m.outcome is Outcome.FAILED), None)
        if failed is not None:
            return failed
        for name, measurement in found.items():
            if not measurement.ok:
                return Measurement(
                    outcome=measurement.outcome,
                    peak_bytes=peak_bytes,
                    reason=f"{name}: {measurement.reason}",
                )
        for device, size in zip(self.problem.cluster.devices, pinned, strict=True):
            if size > device.pinnable_bytes:
                return Measurement(
                    outcome=Outcome.OUT_OF_MEMORY,
                    peak_bytes=peak_bytes,
                    reason=f"all parts together pin more than {device.name} can",
                )
        total = sum(part.weight * found[part.name].mean_seconds for part in self.workload.parts)
        return Measurement(outcome=Outcome.OK, step_seconds=(total,), peak_bytes=peak_bytes)
