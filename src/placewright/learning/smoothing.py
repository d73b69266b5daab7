"""What placements really take, where every measurement is off by some share: a Gaussian process
over the trials so far.

Placements that differ in little take about as long, so the neighbours of one tell about it too. The
fastest of a thousand noisy times is mostly luck; what its neighbours confirm is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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

_FASTEST = 100
"""Older trials that count as well, those with the shortest times. Whoever searched before may have
told of thousands, the good ones first."""

_LENGTHS = (0.03, 0.1, 0.3, 1.0)
"""Shares of the graph that have to be placed otherwise until two times have little to do with each
other; the likeliest of these is taken."""

_FIT_WITH = 300
"""How many of the latest trials that choice is made with."""

_SHORTEST_SECONDS = 1e-12
"""Steps of a graph that costs nothing take none, and have no logarithm."""


class _Fit(NamedTuple):
    """What was learned of the trials so far."""

    known: Floats
    mean: float
    variance: float
    length: float
    weights: Floats


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
        self._best: list[Placement] = []
        self._fitted: _Fit | None = None

    def add(self, placement: Placement, seconds: float) -> None:
        """What is told twice is still one measurement."""
        if placement not in self._logs:
            self._logs[placement] = math.log(max(seconds, _SHORTEST_SECONDS))
            self._fitted = None

    def best(self, count: int) -> list[tuple[float, Placement]]:
        """The fastest by all that is known, with what each is estimated to take. They are kept,
        however old they get."""
        self._forget()
        placements = list(self._logs)
        estimates = self.estimate(placements) if placements else np.empty(0)
        order = np.argsort(estimates, kind="stable")[:count]
        self._best = [placements[number] for number in order]
        return [(float(estimates[number]), placements[number]) for number in order]

    def _forget(self) -> None:
        old = list(self._logs)[:-_MOST]
        kept = {*self._best, *sorted(old, key=self._logs.__getitem__)[:_FASTEST]}
        for placement in old:
            if placement not in kept:
                del self._logs[placement]
                self._fitted = None

    def estimate(self, placements: Sequence[Placement]) -> Floats:
        """What each takes, in seconds. There must be a trial that ran."""
        if self._fitted is None:
            self._fitted = self._fit()
        known, mean, variance, length, weights = self._fitted
        alike = _covariance(self._coded(placements), known, variance, length)
        return np.asarray(np.exp(mean + alike @ weights))

    def _fit(self) -> _Fit:
        known = self._coded(list(self._logs))
        logs = np.array(list(self._logs.values()))
        mean = float(logs.mean())
        # What the noise does not explain; never quite nothing.
        variance = max(float(logs.var()) - self._noise**2, (0.1 * self._noise) ** 2)
        few = slice(-_FIT_WITH, None)
        length = self._likeliest(known[few], logs[few] - mean, variance)
        factor = self._factor(known, variance, length)
        weights = torch.cholesky_solve(torch.from_numpy(logs - mean)[:, None], factor)[:, 0]
        return _Fit(known, mean, variance, length, weights.numpy())

    def _coded(self, placements: Sequence[Placement]) -> Floats:
        """[n, G*D] such that the product of two is the share of the graph that they place alike."""
        rows = np.stack([placement.devices for placement in placements]).astype(np.int64)
        coded = np.zeros((*rows.shape, self._problem.num_devices))
        np.put_along_axis(coded, rows[..., None], self._root_weights[None, :, None], axis=2)
        return coded.reshape(len(rows), -1)

    def _factor(self, known: Floats, variance: float, length: float) -> Tensor:
        """Of the covariance of what was measured."""
        among = _covariance(known, known, variance, length)
        # A trace of noise there must be: without any, two placements alike make it singular.
        among[np.diag_indices_from(among)] += max(self._noise**2, 1e-8 * variance)
        factor: Tensor = torch.linalg.cholesky(torch.from_numpy(among))
        return factor

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
        numbers = {placement: number for number, placement in enumerate(self._logs)}
        return {
            "smoothed_devices": torch.from_numpy(np.array(devices, dtype=np.int32).reshape(shape)),
            "smoothed_logs": torch.tensor(list(self._logs.values()), dtype=torch.float64),
            "smoothed_best": torch.tensor([numbers[p] for p in self._best], dtype=torch.int64),
        }

    def take_state(self, tensors: Mapping[str, Tensor]) -> None:
        rows = tensors["smoothed_devices"].tolist()
        placements = [Placement.of(self._problem, devices) for devices in rows]
        self._logs = dict(zip(placements, tensors["smoothed_logs"].tolist(), strict=True))
        self._best = [placements[number] for number in tensors["smoothed_best"].tolist()]
        self._fitted = None


def _covariance(one: Floats, other: Floats, variance: float, length: float) -> Floats:
    return np.asarray(variance * np.exp(np.minimum(one @ other.T - 1, 0.0) / length))
