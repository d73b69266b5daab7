"""Step times over several orders of ties, which decide the schedule where costs do not.

Which of two ops goes first that become ready at the same moment is settled by their place in the
graph, and nothing on a real machine keeps to that. So the figure for an answer is the mean over
several orders, with its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator.engine import Simulator

ORDERS = 8
"""Orders of ties that an answer is simulated in: that of the graph, and random ones."""
FINALISTS = 8
"""Placements of a problem that are compared in all of these, beside the best of each method."""
MOST_SIMULATED = 6_000_000
"""Ops that may be simulated to choose these: about a second."""
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


def shortlisted(
    problem: Problem,
    trials: Sequence[Trial],
    *,
    most: int = FINALISTS,
    orders: int = ORDERS,
    seed: int = 0,
    simulator: Simulator | None = None,
) -> list[Trial]:
    """The best of these trials, each placement once, by their mean over several orders of ties.

    Trials that did not run are left out. Among equals the order is that of the trials' own times,
    then that in which they come. Orders of another seed than those of the final figures should
    choose: the least of many means is too good to be true.
    """
    best: dict[Placement, Trial] = {}
    for trial in sorted(
        (trial for trial in trials if trial.measurement.ok),
        key=lambda trial: trial.measurement.mean_seconds,
    ):
        best.setdefault(trial.placement, trial)
    # Of too many, those that are best in their own order.
    chosen = list(best.values())[
        : max(most, MOST_SIMULATED // max(1, problem.graph.num_ops * orders))
    ]
    if len(chosen) <= most:
        return chosen
    placements = [trial.placement for trial in chosen]
    ranges = over_orders(problem, placements, orders, seed, simulator=simulator)
    numbers = sorted(range(len(chosen)), key=lambda number: ranges[number].mean_seconds)
    return [chosen[number] for number in numbers[:most]]
