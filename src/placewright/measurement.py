"""What happened when a placement was run, and the record of one attempt."""

from __future__ import annotations

import enum
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placewright.errors import PlacementError
from placewright.placement import Placement

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for a 95% confidence interval with 1, 2, ... degrees of freedom."""


def half_width(seconds: Sequence[float]) -> float:
    """Half the 95% confidence interval of the mean of these step times."""
    if len(seconds) < 2:
        return math.inf
    free = len(seconds) - 1
    t = _T95[free - 1] if free <= len(_T95) else 1.96 + 2.7 / free
    return t * statistics.stdev(seconds) / math.sqrt(len(seconds))


class Outcome(enum.Enum):
    """How a run ended. Only `OK` has a time."""

    OK = "ok"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What happened when a placement was run. Failures carry no time."""

    outcome: Outcome
    step_seconds: tuple[float, ...] = ()
    """Wall-clock of each timed step, warm-up excluded; one entry when simulated without noise.
    Where several runs of a placement are pooled, the mean of each."""
    peak_bytes: tuple[int, ...] = ()
    """Most memory in use on each device, where known."""
    reason: str = ""
    """For a failure: what went wrong, on which device."""

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.OK) != bool(self.step_seconds):
            raise PlacementError(
                f"a measurement that ended {self.outcome.value!r} with "
                f"{len(self.step_seconds)} step times; exactly those that ran have times"
            )
        for seconds in self.step_seconds:
            if not (math.isfinite(seconds) and seconds >= 0):
                raise PlacementError(f"a step cannot take {seconds} seconds")

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @functools.cached_property  # every part of a search asks for it
    def mean_seconds(self) -> float:
        """Mean step time; infinite for a failure, so that failures sort last."""
        return statistics.fmean(self.step_seconds) if self.ok else math.inf

    @property
    def half_width_seconds(self) -> float | None:
        """Half the 95% confidence interval of the mean; None for fewer than two steps."""
        return half_width(self.step_seconds) if len(self.step_seconds) > 1 else None

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"outcome": self.outcome.value}
        if self.step_seconds:
            record["step_seconds"] = list(self.step_seconds)
        if self.peak_bytes:
            record["peak_bytes"] = list(self.peak_bytes)
        if self.reason:
            record["reason"] = self.reason
        return record

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Measurement:
        try:
            return Measurement(
                outcome=Outcome(record["outcome"]),
                step_seconds=tuple(float(s) for s in record.get("step_seconds", ())),
                peak_bytes=tuple(int(b) for b in record.get("peak_bytes", ())),
                reason=str(record.get("reason", "")),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise PlacementError(f"malformed measurement: {fault!r}") from None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One placement, what came of it, and who proposed it."""

    placement: Placement
    measurement: Measurement
    placer: str
    seed: int = 0
    at_seconds: float = 0.0
    """When it ended, in seconds since its search began."""


def better(a: Trial | None, b: Trial) -> Trial:
    """The faster trial; of equals, and of two that failed, the earlier one."""
    return b if a is None or b.measurement.mean_seconds < a.measurement.mean_seconds else a
