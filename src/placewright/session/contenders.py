"""Trials that are nearly as good as the best, of which the answer is chosen.

A search judges placements by one order of ties, and so fits that order more than others: of those
that are equally good in it, some are better than the best in the mean over many orders. Those found
last differ from the best by a move or two, so these are of all its stretches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from placewright.measurement import Trial

MOST_TRIALS = 128
"""Kept of a part of a search."""
_MOST_BYTES = 64_000_000
"""Of what their placements take: those of a graph placed op by op are long."""
_WITHIN = 0.02
"""How much slower than the best they may be, as a share."""


@dataclass(kw_only=True)
class Contenders:
    """Every trial near the best until there are too many, then every second, every fourth, ...

    What is kept follows from the trials and their order alone.
    """

    trials: list[Trial] = field(default_factory=list)
    _limit_seconds: float = float("inf")
    _best_seconds: float = float("inf")
    _seen: int = 0
    _stride: int = 1

    def add(self, trial: Trial) -> None:
        seconds = trial.measurement.mean_seconds
        if seconds > self._limit_seconds or not trial.measurement.ok:
            return
        if seconds < self._best_seconds:
            self._best_seconds, self._limit_seconds = seconds, seconds * (1.0 + _WITHIN)
        self._seen += 1
        if self._seen % self._stride:
            return
        self.trials.append(trial)
        most = max(8, min(MOST_TRIALS, _MOST_BYTES // max(1, trial.placement.devices.nbytes)))
        if len(self.trials) <= most:
            return
        self.trials = self.near_the_best()
        if len(self.trials) > most // 2:
            self.trials = self.trials[::2]
            self._stride *= 2
        else:  # what was slower is of no use any more
            self._stride = 1

    def add_all(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self.add(trial)

    def near_the_best(self) -> list[Trial]:
        """Those that still are, oldest first."""
        return [t for t in self.trials if t.measurement.mean_seconds <= self._limit_seconds]
