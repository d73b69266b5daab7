"""Step times over several orders of ties, which decide the schedule where costs do not.

Which of two ops goes first that become ready at the same moment is settled by their place in the
graph, and nothing on a real machine keeps to that. So the figure for an answer is the mean over
several orders, with its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator.engine import Simulator

ORDERS = 8
"""Orders of ties that an answer is simulated in: that of the graph, and random ones."""
FINALISTS = 8
"""Placements that are compared in all of these."""
_SURE_WITHIN = 0.03
"""A placement whose step times differ by more than this share of their mean says so."""


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Step times of one placement over several orders of ties."""

    mean_seconds: float
    least_seconds: float
    most_seconds: float
    orders: int
    overflows: int = 0
    """In how many of them some device runs out of memory, which has an order of its own, too."""

    @property
    def spread(self) -> float:
        """The range as a share of the mean."""
        if not self.mean_seconds:
            return 0.0
        return (self.most_seconds - self.least_seconds) / self.mean_seconds

    @property
    def unsure(self) -> bool:
        """Whether the order of ties moves the figure by more than 3%."""
        return self.spread > _SURE_WITHIN


class Finalist(NamedTuple):
    """One of the best trials, and its step times over several orders of ties."""

    trial: Trial
    range: StepRange


def over_orders(
    problem: Problem,
    placements: Sequence[Placement],
    orders: int = ORDERS,
    seed: int = 0,
    *,
    simulator: Simulator | None = None,
) -> list[StepRange]:
    """Simulates placements in as many orders of ties; the first is that of the graph.

    The orders depend on the seed alone and are the same for all placements. `simulator` is one of
    the problem, where there is one already.
    """
    if not placements:
        return []
    simulator = simulator or Simulator(problem)
    rows = np.stack([placement.devices for placement in placements])
    rng = np.random.default_rng(seed)
    runs = [simulator.run(rows)]
    for _ in range(orders - 1):
        runs.append(simulator.run(rows, rng.permutation(problem.graph.num_ops)))
    table = np.stack([run.step_seconds for run in runs], axis=1)
    overflows = np.sum([run.overflow_device >= 0 for run in runs], axis=0)
    return [
        StepRange(
            # The mean of equal numbers can be off by their last bit.
            mean_seconds=float(row[0] if row.min() == row.max() else row.mean()),
            least_seconds=float(row.min()),
            most_seconds=float(row.max()),
            orders=orders,
            overflows=int(count),
        )
        for row, count in zip(table, overflows, strict=True)
    ]


def ranked_finalists(
    problem: Problem,
    trials: Sequence[Trial],
    *,
    most: int = FINALISTS,
    orders: int = ORDERS,
    seed: int = 0,
    simulator: Simulator | None = None,
) -> list[Finalist]:
    """The best of these trials, each placement once, by their mean over several orders of ties.

    Trials that did not run are left out. Among equals the order is that of the trials' own times,
    then that in which they come.
    """
    best: dict[Placement, Trial] = {}
    for trial in sorted(
        (trial for trial in trials if trial.measurement.ok),
        key=lambda trial: trial.measurement.mean_seconds,
    ):
        best.setdefault(trial.placement, trial)
    chosen = list(best.values())[:most]
    ranges = over_orders(
        problem, [trial.placement for trial in chosen], orders, seed, simulator=simulator
    )
    finalists = [Finalist(trial, of) for trial, of in zip(chosen, ranges, strict=True)]
    return sorted(finalists, key=lambda finalist: finalist.range.mean_seconds)
