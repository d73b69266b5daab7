"""How steps are timed: one to warm up, then as many as it takes for a mean that can be trusted."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from placewright.backends.base import RunConfig
from placewright.measurement import half_width


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How many steps of a placement are timed, besides the one before that warms up."""

    least: int
    """Timed steps, however much they agree."""
    most: int
    """Timed steps, however much they differ."""
    precision: float = 0.05
    """Steps are added until the 95% confidence interval of the mean is within this share of it."""
    give_up_seconds: float = math.inf
    """Where two steps and all later ones took longer, no more are run."""

    @staticmethod
    def of(
        config: RunConfig,
        best_seconds: float | None = None,
        *,
        adaptive: bool = True,
        train_steps: int = 0,
    ) -> Timing:
        """As `Runner.measure` was asked; training has exactly its own number of steps."""
        assert train_steps == 0 or train_steps >= 2, "the first step is not timed"
        if train_steps:
            return Timing(least=train_steps - 1, most=train_steps - 1)
        return Timing(
            least=config.steps - 1,
            most=(config.max_steps if adaptive else config.steps) - 1,
            precision=config.precision,
            give_up_seconds=math.inf
            if best_seconds is None
            else best_seconds * config.give_up_factor,
        )

    def wants_more(self, seconds: Sequence[float]) -> bool:
        """Whether one more step is to be timed after these."""
        if len(seconds) >= 2 and min(seconds) > self.give_up_seconds:
            return False
        if len(seconds) < self.least:
            return True
        if len(seconds) >= self.most:
            return False
        return half_width(seconds) > self.precision * statistics.fmean(seconds)

    def time(self, step: Callable[[], float | None]) -> list[float]:
        """Seconds of each timed step, by the step's own clock where it has one; the one that warms
        up has run before."""
        seconds: list[float] = []
        while self.wants_more(seconds):
            started = time.monotonic()
            own = step()
            seconds.append(time.monotonic() - started if own is None else own)
        return seconds
