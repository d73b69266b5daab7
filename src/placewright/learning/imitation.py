"""The best placements known, which a policy imitates (self-imitation, Oh et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from placewright.learning.smoothing import Smoother
from placewright.learning.updater import one_thread
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem


@dataclass(frozen=True)
class Elite:
    """A placement worth imitating."""

    seconds: float
    """What its step takes, or is estimated to take."""
    placement: Placement

    @property
    def trial(self) -> Trial:
        measurement = Measurement(outcome=Outcome.OK, step_seconds=(self.seconds,))
        return Trial(placement=self.placement, measurement=measurement, placer="elite")


class Elites:
    """Keeps the best placements, whoever proposed them, the best first."""

    def __init__(self, problem: Problem, most: int, smoother: Smoother | None) -> None:
        """With a smoother, what all trials together say decides, once there are some."""
        self._problem = problem
        self._most = max(most, 1)  # one at least, to say what the best is
        self._smoother = smoother
        self.best: list[Elite] = []

    def keep(self, trial: Trial, *, by_time: bool) -> None:
        """A trial, if it is one of the best. `by_time`: by the time it took itself; otherwise a
        smoother, if there is one, says later which are the best."""
        seconds = trial.measurement.mean_seconds
        good = len(self.best) < self._most or seconds < self.best[-1].seconds
        if not trial.measurement.ok or not (good or self._smoother is not None):
            return
        groups = np.arange(self._problem.num_groups)
        if not self._problem.allowed[groups, trial.placement.devices].all():
            return
        if self._smoother is not None:
            self._smoother.add(trial.placement, seconds)
            if not by_time:
                return
        if not good or any(elite.placement == trial.placement for elite in self.best):
            return
        self.best.append(Elite(seconds, trial.placement))
        self.best.sort(key=lambda elite: elite.seconds)
        del self.best[self._most :]

    def smoothed(self) -> list[Elite]:
        """The best by all that is known of them and of their like; none without a smoother."""
        if self._smoother is None:
            return []
        with one_thread():
            return [Elite(*found) for found in self._smoother.best(self._most)]


def distance(logp_KG: Tensor) -> Tensor:
    """How far a policy is from the elites, best first: each counts half of the one before.

    Good placements may differ in no more than which of two equal devices is which; their mean
    would be no good placement at all."""
    weights_K = 0.5 ** torch.arange(len(logp_KG), device=logp_KG.device)
    return -(weights_K * logp_KG.mean(dim=1)).sum() / weights_K.sum()
