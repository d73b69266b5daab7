"""Placements side by side: run in turns, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from placewright.measurement import Measurement, Outcome, half_width
from placewright.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An answer against another placement, both run in the same rounds."""

    method: str
    """Who proposed the other."""
    ratio: float
    """How many times as fast the answer is: the mean over the rounds."""
    half_width: float | None
    """Half the 95% confidence interval of that, over the rounds; None where there was only one."""

    @property
    def within_noise(self) -> bool:
        """Whether the rounds leave it open which of the two is faster."""
        return self.half_width is not None and abs(self.ratio - 1.0) <= self.half_width


@dataclass(kw_only=True)
class Finals:
    """What came of some rounds."""

    means: dict[Placement, list[float]] = field(default_factory=dict)
    """Mean step seconds in each round, of those that ran in all of them."""
    failed: dict[Placement, Measurement] = field(default_factory=dict)
    """Of those that did not: out of the running, however fast they were before."""
    _peaks: dict[Placement, tuple[int, ...]] = field(default_factory=dict)

    def measurement(self, placement: Placement) -> Measurement:
        """Of one that took part. Its times are the means of the rounds: steps of one round are no
        independent draws, and a round must not count for more because it had more steps."""
        if placement in self.failed:
            return self.failed[placement]
        return Measurement(
            outcome=Outcome.OK,
            step_seconds=tuple(self.means[placement]),
            peak_bytes=self._peaks[placement],
        )

    def compare(self, answer: Placement, other: Placement, method: str) -> Comparison:
        """Round by round, which leaves out how fast the machine was in each."""
        pairs = zip(self.means[other], self.means[answer], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        return Comparison(
            method=method,
            ratio=statistics.fmean(ratios),
            half_width=half_width(ratios) if len(ratios) > 1 else None,
        )


def in_rounds(
    placements: Sequence[Placement],
    measure: Callable[[Placement], Measurement | None],
    rounds: int,
    *,
    seed: int = 0,
) -> Finals:
    """Runs the placements in turns. One that fails drops out and the others go on; a round in which
    `measure` gives None ends it all and does not count, as it was not fair to all.

    Every second round goes the way of the one before backwards, so that nobody always comes after
    the same, nor always first.
    """
    rng = np.random.default_rng(seed)
    finals = Finals()
    order = list(dict.fromkeys(placements))
    for number in range(rounds):
        order = order[::-1] if number % 2 else [order[i] for i in rng.permutation(len(order))]
        ran: dict[Placement, Measurement] = {}
        for placement in order:
            measurement = measure(placement)
            if measurement is None:
                return finals
            if measurement.ok:
                ran[placement] = measurement
            else:
                finals.failed[placement] = measurement
                finals.means.pop(placement, None)
        order = list(ran)
        for placement, measurement in ran.items():
            finals.means.setdefault(placement, []).append(measurement.mean_seconds)
            finals._peaks[placement] = measurement.peak_bytes
    return finals
