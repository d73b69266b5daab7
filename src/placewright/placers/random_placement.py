"""Placements drawn at random: the floor that any method has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.problem import Problem


class RandomPlacement(Placer):
    """Every group independently on one of the devices it may go to, all equally likely. Endless."""

    name = "random"
    endless = True

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        super().__init__(problem)
        self._random = np.random.default_rng(seed)
        # [G, D] the devices of each group, allowed ones first, and [G] how many those are.
        self._choices = np.argsort(~problem.allowed, axis=1, kind="stable")
        self._counts = problem.allowed.sum(axis=1)

    def ask(self, count: int) -> list[Placement]:
        groups = np.arange(self.problem.num_groups)
        placements = []
        for _ in range(count):
            # One draw per placement, so that asking for 2 and 3 is the same as asking for 5.
            picked = self._random.integers(self._counts)
            placements.append(Placement.of(self.problem, self._choices[groups, picked]))
        return placements

    def tell(self, trials: Sequence[Trial]) -> None:
        pass
