"""Polishing where times are noisy: a local search on what placements are estimated to take.

A trial says little there, and a local search that compares one trial with another mostly collects
the lucky ones. What all trials together say of a placement (`Smoother`) costs nothing to ask, so
the search is done there, over thousands of placements, and only what looks best is tried. How sure
the estimate is counts too: most of what is tried is what may be fast, as far as is known, so that
trials go where there is something to learn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from placewright.graph import FloatArray
from placewright.learning.smoothing import Smoother
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers._moves import Moves
from placewright.problem import Problem

_WALKS = 16
"""Walks at a time, each from one of the best placements known."""

_STEPS = 30
"""How far each goes. Further away the estimates are guesses."""

_CHANGES = 8
"""Changes that a step is the best of."""

_BOLDEST = 3.0
"""Standard deviations of its estimate by which the boldest walk takes a placement to be faster; the
others are anywhere between that and 0."""

_MOST_FAILED = 100_000
"""Placements that are remembered to have failed."""

_PEAKS = 500
"""Trials whose peaks of memory count, the latest ones."""

_OVERFULL = 10.0
"""By how much the logarithm of the time counts as larger for each time that a device's memory is
needed once more than it is there."""


class Imagination:
    """Proposes placements that are likely to be fast, or may be."""

    def __init__(self, problem: Problem, smoother: Smoother, seed: int) -> None:
        self._problem = problem
        self._smoother = smoother
        self._seed = seed
        self._random = random.Random()
        self._moves = Moves(problem, self._random)
        self._memory = _Memory(problem)
        # What failed (by digest) has no time, and the estimates of its like would propose it for
        # ever.
        self._failed: dict[int, None] = {}

    def tell(self, trial: Trial) -> None:
        if not trial.measurement.ok:
            self._failed[trial.placement.digest] = None
            if len(self._failed) > _MOST_FAILED:
                del self._failed[next(iter(self._failed))]
        self._memory.learn(trial.placement, trial.measurement)

    def propose(self, count: int, number: int) -> list[Placement]:
        """Placements that are not known to have been tried. The same trials and the same number
        give the same."""
        # By a text, which gives the same numbers in every process.
        self._random.seed(f"{self._seed}/{number}")
        known = [placement for _, placement in self._smoother.best(_WALKS)]
        if not known or not self._moves.free:
            return []
        walks = list(known)
        boldness = np.array([self._random.uniform(0.0, _BOLDEST) for _ in walks])
        now = self._promise(walks, boldness)
        seen: dict[Placement, float] = {}
        for _ in range(_STEPS):
            changed: list[Placement] = []
            walk_of: list[int] = []
            for walk, placement in enumerate(walks):
                for _ in range(_CHANGES):
                    other = self._random.choice(known).devices
                    _, devices = self._moves.draw(placement.devices, None, other)
                    if devices is not None:
                        changed.append(Placement.of(self._problem, devices))
                        walk_of.append(walk)
            if not changed:
                break
            promise = self._promise(changed, boldness[walk_of])
            for walk, placement, value in zip(walk_of, changed, promise.tolist(), strict=True):
                seen[placement] = min(value, seen.get(placement, np.inf))
                if value < now[walk]:
                    now[walk], walks[walk] = value, placement
        # Where the walks ended, the most promising first, by what each of them goes by: the bold
        # ones promise more. Then what they came by.
        ended = sorted(zip(now.tolist(), range(len(walks)), strict=True))
        passed = sorted(seen, key=seen.__getitem__)
        proposed: list[Placement] = []
        for placement in [*(walks[walk] for _, walk in ended), *passed]:
            if len(proposed) == count:
                break
            if self._is_new(placement) and _differs(placement, proposed):
                proposed.append(placement)
        return proposed

    def _is_new(self, placement: Placement) -> bool:
        return placement not in self._smoother and placement.digest not in self._failed

    def _promise(self, placements: Sequence[Placement], boldness: FloatArray) -> FloatArray:
        """[n] logarithm of what each may take; less is better."""
        missing = self._memory.missing(placements)
        return self._smoother.optimistic(placements, boldness) + _OVERFULL * missing

    # --- checkpoints ---

    def state(self) -> dict[str, Tensor]:
        failed = torch.tensor(list(self._failed), dtype=torch.int64)
        return {"failed": failed} | self._memory.state()

    def take_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._failed = dict.fromkeys(tensors["failed"].tolist())
        self._memory.take_state(tensors)


def _differs(placement: Placement, others: Sequence[Placement]) -> bool:
    """In more than one group from each: trials of nearly the same tell little more than one."""
    return all(int((placement.devices != other.devices).sum()) > 1 for other in others)


class _Memory:
    """How much memory placements need: as much as their groups, each of which needs about as much
    wherever it is. How much that is comes from the peaks measured last (ridge regression)."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        room = [device.memory_bytes for device in problem.cluster.devices]
        self._unit = float(max(room))
        self._room = np.array(room, dtype=np.float64) / self._unit
        self._resident = problem.group_resident_bytes / self._unit
        # [D] peaks of placements, not a number where unknown, the latest last.
        self._peaks: dict[Placement, FloatArray] = {}
        self._needs, self._error = self._resident, 0.0
        self._stale = False

    def learn(self, placement: Placement, measurement: Measurement) -> None:
        """What is told twice is still one measurement."""
        if placement in self._peaks:
            return
        if len(measurement.peak_bytes) == len(self._room):
            peaks = np.array(measurement.peak_bytes) / self._unit
        elif measurement.outcome is Outcome.OUT_OF_MEMORY:
            # Nobody says where: on the device that was to be the fullest, a bit too much.
            needed = np.bincount(placement.devices, self._needs, minlength=len(self._room))
            fullest = np.arange(len(needed)) == (needed / self._room).argmax()
            peaks = np.where(fullest, 1.1 * self._room, np.nan)
        else:
            return
        self._peaks[placement] = peaks
        if len(self._peaks) > _PEAKS:
            del self._peaks[next(iter(self._peaks))]
        self._stale = True

    def missing(self, placements: Sequence[Placement]) -> FloatArray:
        """[n] how many times the memory of a device is needed beyond what there is, all devices
        together. The usual error of this is added, to be on the safe side."""
        if self._stale:
            self._fit()
        rows = np.stack([placement.devices for placement in placements])
        missing = np.zeros(len(rows))
        for device, room in enumerate(self._room):
            needed = (rows == device) @ self._needs + self._error
            missing += np.maximum(needed / room - 1, 0.0)
        return missing

    def _fit(self) -> None:
        """What each group needs, and by how much the sums are off."""
        rows = np.stack([placement.devices for placement in self._peaks])
        peaks = np.stack(list(self._peaks.values()))
        groups = rows.shape[1]
        squares, products = 0.01 * np.eye(groups), np.zeros(groups)
        # What is needed beyond the variables; device by device, which takes less memory.
        measured = []
        for device in range(len(self._room)):
            known = np.isfinite(peaks[:, device])
            here = (rows[known] == device).astype(np.float64)
            beyond = peaks[known, device] - here @ self._resident
            squares += here.T @ here
            products += here.T @ beyond
            measured.append((known, beyond))
        needs = np.linalg.solve(squares, products)
        errors = [
            beyond - (rows[known] == device) @ needs
            for device, (known, beyond) in enumerate(measured)
        ]
        self._needs = self._resident + needs
        self._error = float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))
        self._stale = False

    def state(self) -> dict[str, Tensor]:
        rows = np.array([placement.devices for placement in self._peaks], dtype=np.int32)
        peaks = np.array(list(self._peaks.values()), dtype=np.float64)
        return {
            "peak_devices": torch.from_numpy(rows.reshape(-1, self._problem.num_groups)),
            "peaks": torch.from_numpy(peaks.reshape(-1, len(self._room))),
        }

    def take_state(self, tensors: Mapping[str, Tensor]) -> None:
        placements = [
            Placement.of(self._problem, devices) for devices in tensors["peak_devices"].tolist()
        ]
        self._peaks = dict(zip(placements, tensors["peaks"].numpy(), strict=True))
        self._stale = bool(placements)
