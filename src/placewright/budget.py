"""How long a search may take."""

from __future__ import annotations

from dataclasses import dataclass

from placewright.errors import SearchError

BATCH = 64
"""Placements asked for at a time: enough to keep all cores busy, few enough to stop at once."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When to stop: after some time, after some trials, or whichever comes first."""

    seconds: float | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is None and self.trials is None:
            raise SearchError("a search needs a budget: seconds, trials or both")
        if self.seconds is not None and not self.seconds > 0:
            raise SearchError(f"a budget of {self.seconds:g} seconds leaves no time to search")
        if self.trials is not None and self.trials < 1:
            raise SearchError(f"a budget of {self.trials} trials leaves nothing to try")
