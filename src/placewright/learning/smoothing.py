"""What placements really take, where every measurement is off by some share: a Gaussian process
over the trials so far.

Placements that differ in little take about as long, so the neighbours of one tell about it too; and
so do those that, whatever they put where, leave the devices as much to compute and to send. The
fastest of a thousand noisy times is mostly luck; what its like confirm is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from placewright.graph import FloatArray
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.base import Again
from placewright.placers.group_graph import group_graph
from placewright.problem import Problem

_MOST = 2000
"""Trials that count, the latest ones: the policy has moved away from the older ones, and the work
grows with their cube."""

_FASTEST = 100
"""Older trials that count as well, those with the shortest times. Whoever searched before may have
told of thousands, the good ones first."""

_FIRST = 30
"""The first trials count for ever. Where there are teachers they are theirs, which are worth more
than one unlucky time says."""

_LENGTHS = (0.03, 0.1, 0.3, 1.0)
"""Shares of the graph that have to be placed otherwise until two times have little to do with each
other; the likeliest of these is taken."""

_REACHES = (1.0, 2.0)
"""The same for what devices have to do: how far apart, as `_Points.loads` has it."""

_FIT_WITH = 300
"""How many of the latest trials these choices are made with."""

_AT_A_TIME = 5000
"""Placements whose times are estimated at a time: a journal may hold many more than fit."""

_SHORTEST_SECONDS = 1e-12
"""Steps of a graph that costs nothing take none, and have no logarithm."""


class _Likeness(NamedTuple):
    """How much the times of two placements have to do with each other."""

    variance: float
    length: float
    """One of `_LENGTHS`."""
    reach: float
    """One of `_REACHES`."""

    def covariance(self, apart: _Distances) -> FloatArray:
        """Half of it by what is placed alike, half by what there is to do for the devices."""
        alike = np.exp(apart.placed / -self.length)
        near = np.exp(apart.squares / (-2 * self.reach**2))
        return np.asarray(self.variance / 2 * (alike + near))


class _Distances(NamedTuple):
    """Of each of some placements from each of some others."""

    placed: FloatArray
    """Share of the graph that is placed otherwise."""
    squares: FloatArray
    """Of the distance between the loads."""

    def last(self, count: int) -> _Distances:
        """Those among the last so many, of placements from themselves."""
        few = (slice(-count, None), slice(-count, None))
        return _Distances(self.placed[few], self.squares[few])


class _Points(NamedTuple):
    """Placements, as the process sees them."""

    coded: FloatArray
    """[n, G*D] such that the product of two is the share of the graph that they place alike."""
    loads: FloatArray
    """[n, F] what the devices have to do: each column in standard deviations of the trials',
    divided by the root of F, so that two are as far apart as the columns are on average."""

    def apart(self, other: _Points) -> _Distances:
        squares = (self.loads**2).sum(axis=1)[:, None] + (other.loads**2).sum(axis=1)
        squares -= 2 * self.loads @ other.loads.T
        placed = np.maximum(1 - self.coded @ other.coded.T, 0.0)
        return _Distances(placed, np.maximum(squares, 0.0))


class _Fit(NamedTuple):
    """What was learned of the trials so far."""

    known: _Points
    load_mean: FloatArray
    load_scale: FloatArray
    mean: float
    likeness: _Likeness
    factor: Tensor
    """Of the covariance of what was measured."""
    weights: FloatArray


class Smoother:
    """Remembers trials that ran, and estimates what they take without the noise."""

    def __init__(self, problem: Problem, noise: float) -> None:
        """`noise`: standard deviation of the logarithm of a measured time."""
        self._problem = problem
        self._noise = noise
        self._loads = _Loads(problem)
        # What a group weighs: half as one of many, half by its part of the computing.
        work = self._loads.seconds.mean(axis=0)
        share = work / work.sum() if work.sum() > 0 else np.zeros(problem.num_groups)
        self._root_weights = np.sqrt((share + 1 / problem.num_groups) / 2)
        # Logarithms of the measured seconds of each, the latest placement last.
        self._runs: dict[Placement, tuple[float, ...]] = {}
        self._best: list[Placement] = []
        self._known_loads: dict[Placement, FloatArray] = {}
        self._fitted: _Fit | None = None

    def add(self, placement: Placement, seconds: float) -> None:
        """One more time of a placement. What is told twice is still one measurement: two have the
        same time to the last bit only where all times are alike."""
        log = math.log(max(seconds, _SHORTEST_SECONDS))
        known = self._runs.get(placement, ())
        if log not in known:
            self._runs[placement] = (*known, log)
            self._fitted = None

    def __contains__(self, placement: Placement) -> bool:
        return placement in self._runs

    def doubtful(self, count: int, most_runs: int) -> list[Again]:
        """Up to so many of the best that might be the very best or might not, as far as their own
        times say, and were tried less than `most_runs` times: those that were tried least first."""
        best = self.best(max(count, 1) * 4)
        if len(best) < 2:
            return []

        def deviation(placement: Placement) -> float:
            return self._noise / math.sqrt(len(self._runs[placement]))

        first = math.log(best[0][0]) + 2 * deviation(best[0][1])
        near = [p for s, p in best if math.log(s) - 2 * deviation(p) < first]
        if len(near) < 2:
            return []  # nobody comes near the best
        near.sort(key=lambda placement: len(self._runs[placement]))
        wanted = [Again(p, len(self._runs[p])) for p in near if len(self._runs[p]) < most_runs]
        return wanted[:count]

    def best(self, count: int) -> list[tuple[float, Placement]]:
        """The fastest by all that is known, with what each is estimated to take. They are kept,
        however old they get."""
        self.forget()
        placements = list(self._runs)
        estimates = np.empty(0)
        if placements:
            # What `estimate` would say of those that were measured, without comparing them all.
            fit = self._fit()
            logs, runs = self._means()
            estimates = np.exp(logs - self._trace(fit.likeness, runs) * fit.weights)
        order = np.argsort(estimates, kind="stable")[:count]
        self._best = [placements[number] for number in order]
        return [(float(estimates[number]), placements[number]) for number in order]

    def forget(self) -> None:
        """Old trials that are none of the best."""
        old = list(self._runs)[_FIRST:-_MOST]
        kept = {*self._best, *sorted(old, key=lambda p: fmean(self._runs[p]))[:_FASTEST]}
        for placement in old:
            if placement not in kept:
                del self._runs[placement]
                self._fitted = None

    def know_until(self, told: Sequence[Trial]) -> int:
        """How many of a journal's trials, from its beginning, came before the checkpoint that this
        state is from. What was made of them came with it, and what is forgotten must not count as
        new."""
        # The first of each: the final of real runs measures the best again.
        number_of: dict[Placement, int] = {}
        for number, trial in enumerate(told, 1):
            number_of.setdefault(trial.placement, number)
        return max((n for p, n in number_of.items() if p in self), default=0)

    def estimate(self, placements: Sequence[Placement]) -> FloatArray:
        """What each takes, in seconds. There must be a trial that ran."""
        fit = self._fit()
        estimates = [np.empty(0)]
        for start in range(0, len(placements), _AT_A_TIME):
            some = placements[start : start + _AT_A_TIME]
            covariance = self._covariance(fit, some, self._loads_of(some))
            estimates.append(fit.mean + covariance @ fit.weights)
        return np.asarray(np.exp(np.concatenate(estimates)))

    def optimistic(self, placements: Sequence[Placement], boldness: FloatArray) -> FloatArray:
        """[n] logarithm of the seconds that each may take if it is faster than estimated, by so
        many standard deviations of the estimate. There must be a trial that ran."""
        fit = self._fit()
        covariance = self._covariance(fit, placements, self._loads.of(placements))
        known = torch.linalg.solve_triangular(
            fit.factor, torch.from_numpy(covariance.T), upper=False
        )
        unknown = fit.likeness.variance - (known**2).sum(dim=0).numpy()
        deviation = np.sqrt(np.maximum(unknown, 0.0))
        return np.asarray(fit.mean + covariance @ fit.weights - boldness * deviation)

    def _covariance(
        self, fit: _Fit, placements: Sequence[Placement], loads: FloatArray
    ) -> FloatArray:
        """With what was measured."""
        points = _Points(self._coded(placements), (loads - fit.load_mean) / fit.load_scale)
        return fit.likeness.covariance(points.apart(fit.known))

    def _fit(self) -> _Fit:
        if self._fitted is not None:
            return self._fitted
        placements = list(self._runs)
        self._known_loads = {p: self._known_loads[p] for p in placements if p in self._known_loads}
        loads = self._loads_of(placements)
        load_mean = loads.mean(axis=0)
        # Where all trials agree there is no scale, and rounding must not become one.
        spread = loads.std(axis=0)
        load_scale = np.where(spread > 1e-9 * loads.max(axis=0), spread, np.inf)
        load_scale *= math.sqrt(loads.shape[1])
        known = _Points(self._coded(placements), (loads - load_mean) / load_scale)
        logs, runs = self._means()
        mean = float(logs.mean())
        # What the noise does not explain; never quite nothing.
        variance = max(float(logs.var()) - self._noise**2, (0.1 * self._noise) ** 2)
        apart = known.apart(known)
        latest = slice(-_FIT_WITH, None)
        likeness = self._likeliest(
            apart.last(_FIT_WITH), logs[latest] - mean, runs[latest], variance
        )
        factor = self._factor(apart, likeness, runs)
        weights = torch.cholesky_solve(torch.from_numpy(logs - mean)[:, None], factor)[:, 0]
        self._fitted = _Fit(known, load_mean, load_scale, mean, likeness, factor, weights.numpy())
        return self._fitted

    def _means(self) -> tuple[FloatArray, FloatArray]:
        """[n] mean logarithm of the times of each, and [n] how many there are."""
        means = np.array([fmean(logs) for logs in self._runs.values()])
        return means, np.array([len(logs) for logs in self._runs.values()], dtype=np.float64)

    def _loads_of(self, placements: Sequence[Placement]) -> FloatArray:
        """[n, F]; calculated once for each: most trials are those of the last time."""
        new = [p for p in dict.fromkeys(placements) if p not in self._known_loads]
        if new:
            self._known_loads |= zip(new, self._loads.of(new), strict=True)
        return np.stack([self._known_loads[placement] for placement in placements])

    def _coded(self, placements: Sequence[Placement]) -> FloatArray:
        rows = np.stack([placement.devices for placement in placements]).astype(np.int64)
        coded = np.zeros((*rows.shape, self._problem.num_devices))
        np.put_along_axis(coded, rows[..., None], self._root_weights[None, :, None], axis=2)
        return coded.reshape(len(rows), -1)

    def _factor(self, apart: _Distances, likeness: _Likeness, runs: FloatArray) -> Tensor:
        """Of the covariance of what was measured."""
        among = likeness.covariance(apart)
        among[np.diag_indices_from(among)] += self._trace(likeness, runs)
        factor: Tensor = torch.linalg.cholesky(torch.from_numpy(among))
        return factor

    def _trace(self, likeness: _Likeness, runs: FloatArray) -> FloatArray:
        """[n] variance of the means of so many times. A trace of noise there must be: without any,
        two placements alike make the covariance singular."""
        return np.maximum(self._noise**2 / runs, 1e-8 * likeness.variance)

    def _likeliest(
        self, apart: _Distances, centred: FloatArray, runs: FloatArray, variance: float
    ) -> _Likeness:
        column = torch.from_numpy(centred)[:, None]

        def badness(likeness: _Likeness) -> float:
            factor = self._factor(apart, likeness, runs)
            fit = float((column * torch.cholesky_solve(column, factor)).sum())
            return fit / 2 + float(factor.diagonal().log().sum())

        choices = itertools.product(_LENGTHS, _REACHES)
        return min((_Likeness(variance, *choice) for choice in choices), key=badness)

    # --- checkpoints ---

    def state(self) -> dict[str, Tensor]:
        devices = [placement.devices for placement in self._runs]
        shape = (len(devices), self._problem.num_groups)
        numbers = {placement: number for number, placement in enumerate(self._runs)}
        logs = [log for runs in self._runs.values() for log in runs]
        return {
            "smoothed_devices": torch.from_numpy(np.array(devices, dtype=np.int32).reshape(shape)),
            "smoothed_logs": torch.tensor(logs, dtype=torch.float64),
            "smoothed_runs": torch.tensor([len(r) for r in self._runs.values()]),
            "smoothed_best": torch.tensor([numbers[p] for p in self._best], dtype=torch.int64),
        }

    def take_state(self, tensors: Mapping[str, Tensor]) -> None:
        rows = tensors["smoothed_devices"].tolist()
        placements = [Placement.of(self._problem, devices) for devices in rows]
        logs = iter(tensors["smoothed_logs"].tolist())
        # Version 0.1.0 knew one time of each.
        runs = tensors["smoothed_runs"].tolist() if "smoothed_runs" in tensors else [1] * len(rows)
        if sum(runs) != len(tensors["smoothed_logs"]):
            raise ValueError("as many times are expected as there are said to be")
        self._runs = {
            placement: tuple(itertools.islice(logs, count))
            for placement, count in zip(placements, runs, strict=True)
        }
        self._best = [placements[number] for number in tensors["smoothed_best"].tolist()]
        self._fitted = None


class _Loads:
    """What a placement gives each device to do, by the costs that the policy sees as well."""

    def __init__(self, problem: Problem) -> None:
        graph = group_graph(problem)
        source = np.repeat(np.arange(problem.num_groups), np.diff(graph.offsets))
        once = source < graph.neighbour
        self._source, self._target = source[once], graph.neighbour[once]
        elsewhere = ~np.eye(problem.num_devices, dtype=np.bool_)
        per_byte = problem.cluster.routes.seconds_per_byte[elsewhere]
        self._sending = graph.cost[once] * (float(per_byte.mean()) if len(per_byte) else 0.0)
        self.seconds = np.where(np.isfinite(problem.group_seconds), problem.group_seconds, 0.0)
        """[D, G] to compute; 0 where a group cannot run."""
        kinds = np.asarray(problem.cluster.kind_of_device)
        self._of_a_kind = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]

    def of(self, placements: Sequence[Placement]) -> FloatArray:
        """[n, F] seconds that each device computes, and those that it sends and receives over a
        typical route, each the longest first: which of several devices of a kind is which makes no
        difference. The largest and the sums as well."""
        rows = np.stack([placement.devices for placement in placements])
        here_DnG = rows == np.arange(len(self.seconds))[:, None, None]
        computes = np.stack(
            [here @ seconds for here, seconds in zip(here_DnG, self.seconds, strict=True)], axis=1
        )
        sends = np.stack(
            [(here[:, self._source] != here[:, self._target]) @ self._sending for here in here_DnG],
            axis=1,
        )
        busiest = (computes + sends).max(axis=1)
        for seconds, devices in itertools.product((computes, sends), self._of_a_kind):
            seconds[:, devices] = -np.sort(-seconds[:, devices], axis=1)
        return np.column_stack(
            [
                computes, computes.max(axis=1), computes.sum(axis=1),
                sends, sends.max(axis=1), sends.sum(axis=1), busiest,
            ]
        )  # fmt: skip
