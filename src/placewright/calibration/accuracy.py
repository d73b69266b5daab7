"""How well the simulator predicts what is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from placewright.backends import Runner
from placewright.calibration.drift import Pace, Timed, in_turns
from placewright.errors import CostsError
from placewright.graph import FloatArray
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator import Simulator


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Prediction against reality."""

    predicted: tuple[float, ...]
    first: tuple[float, ...]
    """As measured in a first pass over all placements; the mean of every second one, if there were
    several."""
    second: tuple[float, ...]
    """And in another one after it, or the mean of the others."""
    raw: tuple[float, ...]
    """The mean of all as they were, not scaled by how fast the machine was just then."""

    @property
    def measured(self) -> tuple[float, ...]:
        return tuple((a + b) / 2 for a, b in zip(self.first, self.second, strict=True))

    def of(self, numbers: Sequence[int]) -> Fidelity:
        """Of some of the placements."""
        return Fidelity(
            predicted=tuple(self.predicted[n] for n in numbers),
            first=tuple(self.first[n] for n in numbers),
            second=tuple(self.second[n] for n in numbers),
            raw=tuple(self.raw[n] for n in numbers),
        )

    @property
    def fastest_half(self) -> Fidelity:
        """Among those a search has to choose, where ranks are harder to get right."""
        order = np.argsort(self.measured, kind="stable").tolist()
        return self.of(order[: (len(order) + 1) // 2])

    @property
    def fastest_quarter(self) -> Fidelity:
        """What a search has to tell apart in the end."""
        order = np.argsort(self.measured, kind="stable").tolist()
        return self.of(order[: (len(order) + 3) // 4])

    @property
    def error(self) -> float:
        """Mean absolute error as a share of the measured time."""
        truth = np.array(self.measured)
        return float(np.mean(np.abs(np.array(self.predicted) - truth) / truth))

    @property
    def repeated(self) -> float:
        """Rank correlation of the passes: about as well as a prediction could do."""
        return rank_correlation(self.first, self.second)

    @property
    def spearman(self) -> float:
        return rank_correlation(self.predicted, self.measured)

    @property
    def kendall(self) -> float:
        """Of all pairs, the share that prediction and measurement order alike, less the others."""
        return pair_agreement(self.predicted, self.measured)

    @property
    def kendall_repeated(self) -> float:
        """The same of the passes."""
        return pair_agreement(self.first, self.second)


def fidelity(
    problem: Problem, passes: Sequence[Mapping[Placement, Timed]]
) -> tuple[list[Placement], Fidelity]:
    """How the problem's costs predict several passes over the same placements; of those that ran in
    all. A single pass counts as both halves."""
    placements = [p for p in passes[0] if all(p in times for times in passes)]
    if not placements:
        raise CostsError("none of the placements ran, so there is nothing to compare")
    rows = np.stack([placement.devices for placement in placements])
    predicted = Simulator(problem).run(rows).step_seconds
    return placements, Fidelity(
        predicted=tuple(predicted.tolist()),
        first=tuple(fmean(t[p].seconds for t in passes[::2]) for p in placements),
        second=tuple(fmean(t[p].seconds for t in passes[1::2] or passes) for p in placements),
        raw=tuple(fmean(t[p].raw_seconds for t in passes) for p in placements),
    )


def check(
    problem: Problem,
    runner: Runner,
    placements: Sequence[Placement],
    pace: Pace | None = None,
    *,
    passes: int = 2,
) -> tuple[list[Placement], Fidelity]:
    """Measures the placements, all of them twice or more often, every second time backwards: what
    is close together in one pass has little in common with it in the other. With the `pace` of a
    calibration, times are as if the machine were as fast as it was then."""
    made: list[Mapping[Placement, Timed]] = []
    for _ in range(passes):
        times, pace = in_turns(problem, runner, placements, pace)
        placements = list(times)[::-1]
        made.append(times)
        if not times:
            break
    return fidelity(problem, made)


MOST_FOREIGN_LOAD = 0.25
"""Share of the cores that others may take while ops are timed."""
LEAST_RANK_CORRELATION = 0.5
"""Of prediction and measurement, among the faster half of what was measured: below it, a search
under these costs would choose among the best as if by lot."""
_LEAST_TO_RANK = 6
"""Placements of which a rank correlation says anything."""
_LEAST_SPREAD = 0.1
"""Where the slowest of them takes only so much longer than the fastest, ranks are noise."""


def why_distrusted(
    predicted: Sequence[float], measured: Sequence[float], foreign_load: float
) -> str:
    """Why costs that predict these step times should not be used; empty where nothing speaks
    against it."""
    if foreign_load > MOST_FOREIGN_LOAD:
        return f"other processes took {foreign_load:.0%} of the cores while ops were timed"
    fastest = np.argsort(measured, kind="stable")[: (len(measured) + 1) // 2]
    best = [measured[number] for number in fastest]
    if len(best) < _LEAST_TO_RANK or max(best) < (1 + _LEAST_SPREAD) * min(best):
        return ""
    agreement = rank_correlation([predicted[number] for number in fastest], best)
    if agreement < LEAST_RANK_CORRELATION:
        return (
            f"among the faster half of {len(measured)} placements, prediction and measurement "
            f"agree with a rank correlation of only {agreement:.2f}"
        )
    return ""


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; ties share their mean rank. NaN for fewer than two, or all equal."""
    if len(a) < 2:
        return math.nan
    x, y = _ranks(np.asarray(a)), _ranks(np.asarray(b))
    if x.std() == 0 or y.std() == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def pair_agreement(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau (b): of the pairs that are ordered in both, those ordered alike less the
    others, where ties count as half a pair. NaN for fewer than two, or all equal."""
    x = np.sign(np.subtract.outer(np.asarray(a), np.asarray(a)))
    y = np.sign(np.subtract.outer(np.asarray(b), np.asarray(b)))
    pairs = math.sqrt(float(np.abs(x).sum()) * float(np.abs(y).sum()))
    return float((x * y).sum()) / pairs if pairs else math.nan


def _ranks(values: FloatArray) -> FloatArray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2.0)[inverse], dtype=np.float64)
