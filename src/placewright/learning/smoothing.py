"""What placements really take, where every measurement is off by some share: a Gaussian process
over the trials so far.

Placements that differ in little take about as long, so the neighbours of one tell about it too. The
fastest of a thousand noisy times is mostly luck; what its neighbours confirm is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placewright.placement import Placement
from placewright.problem import Problem

Floats = npt.NDArray[np.float64]

_MOST = 1000
"""Trials that count, the latest ones: the policy has moved away from the older ones, and the work
grows with their cube."""

_LENGTHS = (0.03, 0.1, 0.3, 1.0)
"""Shares of the graph that have to be placed otherwise until two times have little to do with each
other; the likeliest of these is taken."""

_FIT_EVERY = 200
"""Trials after which that choice is made anew."""

_FIT_WITH = 300
"""How many of the latest trials it is made with."""


class Smoother:
    """Remembers trials that ran, and estimates what they take without the noise."""

    def __init__(self, problem: Problem, noise: float) -> None:
        """`noise`: standard deviation of the logarithm of a measured time."""
        self._problem = problem
        self._noise = noise
        # What a group weighs: half as one of many, half by its part of the computing.
        finite = np.where(np.isfinite(problem.group_seconds), problem.group_seconds, 0.0)
        work = finite.mean(axis=0)
        share = work / work.sum() if work.sum() > 0 else np.zeros(problem.num_groups)
        self._root_weights = np.sqrt((share + 1 / problem.num_groups) / 2)
        # Logarithms of the measured seconds, the latest last.
        self._logs: dict[Placement, float] = {}
        self._length = _LENGTHS[-1]
        self._new = _FIT_EVERY

    def add(self, placement: Placement, seconds: float) -> None:
        """What is told twice is still one measurement."""
        if placement not in self._logs:
            self._logs[placement] = math.log(seconds)
            self._new += 1

    def best(self, count: int) -> list[tuple[float, Placement]]:
        """The fastest by all that is known, with what each is estimated to take. They are kept,
        however old they get."""
        for old in list(self._logs)[:-_MOST]:
            del self._logs[old]
        placements = list(self._logs)
        if not placements:
            return []
        estimates = self.estimate(placements)
        order = np.argsort(estimates, kind="stable")[:count]
        for number in reversed(order):
            kept = placements[number]
            self._logs[kept] = self._logs.pop(kept)
        return [(float(estimates[number]), placements[number]) for number in order]

    def estimate(self, placements: Sequence[Placement]) -> Floats:
        """What each takes, in seconds. There must be a trial that ran."""
        known = self._coded(list(self._logs))
        logs = np.array(list(self._logs.values()))
        mean = float(logs.mean())
        # What the noise does not explain; never quite nothing.
        variance = max(float(logs.var()) - self._noise**2, (0.1 * self._noise) ** 2)
        if self._new >= _FIT_EVERY:
            self._new = 0
            few = slice(-_FIT_WITH, None)
            self._length = self._likeliest(known[few], logs[few] - mean, variance)
        factor = self._factor(known, variance, self._length)
        weights = torch.cholesky_solve(torch.from_numpy(logs - mean)[:, None], factor)[:, 0]
        alike = self._covariance(self._coded(placements), known, variance, self._length)
        return np.asarray(np.exp(mean + alike @ weights.numpy()))

    def _coded(self, placements: Sequence[Placement]) -> Floats:
        """[n, G*D] such that the product of two is the share of the graph that they place alike."""
        rows = np.stack([placement.devices for placement in placements]).astype(np.int64)
        coded = np.zeros((*rows.shape, self._problem.num_devices))
        np.put_along_axis(coded, rows[..., None], self._root_weights[None, :, None], axis=2)
        return coded.reshape(len(rows), -1)

    def _covariance(self, one: Floats, other: Floats, variance: float, length: float) -> Floats:
        return np.asarray(variance * np.exp(np.minimum(one @ other.T - 1, 0.0) / length))

    def _factor(self, known: Floats, variance: float, length: float) -> Tensor:
        """Of the covariance of what was measured."""
        among = self._covariance(known, known, variance, length)
        among[np.diag_indices_from(among)] += self._noise**2
        return torch.linalg.cholesky(torch.from_numpy(among))

    def _likeliest(self, known: Floats, centred: Floats, variance: float) -> float:
        def badness(length: float) -> float:
            factor = self._factor(known, variance, length)
            column = torch.from_numpy(centred)[:, None]
            fit = float((column * torch.cholesky_solve(column, factor)).sum())
            return fit / 2 + float(factor.diagonal().log().sum())

        return min(_LENGTHS, key=badness)

    # --- checkpoints ---

    def state(self) -> dict[str, Tensor]:
        devices = [placement.devices for placement in self._logs]
        shape = (len(devices), self._problem.num_groups)
        return {
            "smoothed_devices": torch.from_numpy(np.array(devices, dtype=np.int32).reshape(shape)),
            "smoothed_logs": torch.tensor(list(self._logs.values()), dtype=torch.float64),
            "smoothing": torch.tensor([self._length, self._new], dtype=torch.float64),
        }

    def take_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._logs = {
            Placement.of(self._problem, devices): log
            for devices, log in zip(
                tensors["smoothed_devices"].tolist(), tensors["smoothed_logs"].tolist(), strict=True
            )
        }
        self._length, self._new = float(tensors["smoothing"][0]), int(tensors["smoothing"][1])
