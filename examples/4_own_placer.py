"""A placer of one's own: it proposes placements and is told what came of them.

    python examples/4_own_placer.py

docs/guides/placer.md explains it, and how to check that a placer keeps the rules.
"""

from collections.abc import Sequence

import numpy as np

import placewright
from placewright import Placement, Placer, Problem, Trial
from placewright.methods import METHODS, Method
from placewright.testing import layered_graph


class HillClimb(Placer):
    """Moves one group at a time, and keeps what is faster."""

    name = "hill-climb"
    endless = True  # proposes until the budget is used

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem)
        self._random = np.random.default_rng(seed)
        self._devices = problem.allowed.argmax(axis=1)
        self._seconds = float("inf")

    def ask(self, count: int) -> list[Placement]:
        return [self._neighbour() for _ in range(count)]

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:  # also those of other placers; one that failed has no time
            if trial.measurement.ok and trial.measurement.mean_seconds < self._seconds:
                self._devices = trial.placement.devices
                self._seconds = trial.measurement.mean_seconds

    def _neighbour(self) -> Placement:
        devices = self._devices.copy()
        group = self._random.integers(self.problem.num_groups)
        devices[group] = self._random.choice(np.flatnonzero(self.problem.allowed[group]))
        return Placement.of(self.problem, devices)


METHODS["hill-climb"] = Method(
    "one group at a time", lambda settings: HillClimb(settings.problem, settings.seed)
)

graph = layered_graph(200, 8)
result = placewright.place(graph, "k80x4", method="single,hill-climb,random", trials=1500)
for row in result.table:
    print(f"{row['method']:12} {row['step_seconds']:.4f} s after {row['trials']} trials")
