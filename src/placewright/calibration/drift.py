"""Machines drift: placements are timed in turns with one that says how fast it was just then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from placewright.backends import Runner
from placewright.placement import Placement
from placewright.problem import Problem


class Pace(NamedTuple):
    """How fast a machine usually is, told by how long it takes for one placement."""

    devices: tuple[int, ...]
    """Of the groups."""
    seconds: float


_TURN = 3
"""Placements between two runs of the reference."""
_AROUND = 3
"""Runs of the reference before a turn, and after it, that say how fast the machine was then. One
alone varies by some percent even on a machine that is as fast as ever."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The steps of a placement."""

    steps: Sequence[float]
    factor: float
    """How fast the machine usually was, against just then."""

    @property
    def raw_seconds(self) -> float:
        """The lower quartile: whatever else a machine does makes steps slower, never faster, so
        that it differs less from run to run than the median."""
        return float(np.quantile(self.steps, 0.25))

    @property
    def seconds(self) -> float:
        """As if the machine had been as fast as usual."""
        return self.factor * self.raw_seconds


def in_turns(
    problem: Problem,
    runner: Runner,
    placements: Sequence[Placement],
    pace: Pace | None = None,
) -> tuple[dict[Placement, Timed], Pace | None]:
    """Times the placements, those that run; says also how fast the machine was.

    A machine drifts by 20% and more, by its temperature and by what else it does. So a reference is
    run in between, and the times are scaled by how fast that was just then: against how fast it was
    most of the time, or, with `pace`, at another time. It uses all devices: those that use one
    notice less.
    """
    if not placements:
        return {}, pace
    group_of = problem.grouping.group_of
    if pace is not None:
        reference = np.array(pace.devices, dtype=np.int32)
    else:
        reference = max(placements, key=lambda p: len(np.unique(p.devices))).devices

    def speed() -> float:
        measurement = runner.measure(reference[group_of]).measurement
        if not measurement.ok:
            return math.nan
        return Timed(steps=measurement.step_seconds, factor=1.0).raw_seconds

    speeds = [speed()]
    turns: list[dict[Placement, list[float]]] = []
    for first in range(0, len(placements), _TURN):
        turn = {}
        for placement in placements[first : first + _TURN]:
            measurement = runner.measure(placement.devices[group_of]).measurement
            if measurement.ok:
                turn[placement] = list(measurement.step_seconds)
        turns.append(turn)
        speeds.append(speed())
    usual = float(np.nanmedian(speeds)) if not np.isnan(speeds).all() else math.nan
    if pace is None and not math.isnan(usual):
        pace = Pace(tuple(reference.tolist()), usual)
    result: dict[Placement, Timed] = {}
    for number, turn in enumerate(turns):
        near = speeds[max(0, number + 1 - _AROUND) : number + 1 + _AROUND]
        around = [s for s in near if not math.isnan(s)]
        factor = pace.seconds / float(np.median(around)) if around and pace else 1.0
        for placement, steps in turn.items():
            result[placement] = Timed(steps=steps, factor=factor)
    return result, pace
