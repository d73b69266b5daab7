"""How long a pass takes by a plan: what computes and what copies, one beside the other.

Units come one after another, on the device or on the host; copies of weights go on beside them, in
order, as soon as there is room in the buffer. This is what `runtime` and `window` do, in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_PASSES = 3
"""The first fills the buffer; from then on passes are alike, but for a remainder of a round."""


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """Seconds of a unit in a call."""

    device_seconds: float
    host_seconds: float
    input_bytes: int = 0
    output_bytes: int = 0
    device_update_seconds: float = 0.0
    """Of the update of its weights, where they live on the device."""
    host_update_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a plan is judged by."""

    of: Mapping[str, Mapping[str, UnitCost]]
    """Call -> unit -> its cost; the units that it calls, in order."""
    link_bytes_per_second: float
    copy_latency_seconds: float = 20e-6
    """Of each copy of a unit's weights."""
    hop_seconds: float = 30e-6
    """For activations to change sides, besides their bytes."""
    host_slowdown: float = 1.0
    """How much longer the host takes for a unit while weights are copied from its memory."""
    copy_slowdown: float = 1.0
    """How much longer a copy takes while the host computes."""
    between_seconds: Mapping[str, float] = field(default_factory=dict)
    """Of a call, outside its units."""
    source: str = "estimated"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One unit of a pass."""

    seconds: float
    on_host: bool
    copy: int = -1
    """Which of the copies brings its weights; none where they are there."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """The weights of a unit on their way into the buffer."""

    seconds: float
    start: int
    stop: int

    def overlaps(self, other: Copy) -> bool:
        return self.start < other.stop and other.start < self.stop


def pass_seconds(
    steps: Sequence[Step],
    copies: Sequence[Copy],
    *,
    host_slowdown: float = 1.0,
    copy_slowdown: float = 1.0,
    passes: int = _PASSES,
) -> float:
    """Of the last of some passes."""
    number = len(copies)
    # Whose use has to be over before a copy begins: (how many passes ago, copy).
    before: list[list[tuple[int, int]]] = []
    stays: list[bool] = []
    for index, copy in enumerate(copies):
        crossed = [
            (0 if other < index else 1, other)
            for other in range(number)
            if copies[other].overlaps(copy)
        ]
        before.append(crossed)
        stays.append(crossed == [(1, index)])
    used = [-1] * number
    """The last pass in which what a copy brought was used."""
    there = [-1] * number
    """The last pass for which it is there."""
    now = begun = 0.0
    copying, left_to_copy = 0, -1.0
    """The next copy, over all passes; seconds it still takes, or -1 before it begins."""
    for turn in range(passes):
        begun = now
        for step in steps:
            left = step.seconds
            waiting = step.copy >= 0 and there[step.copy] < turn
            while left > 0 or waiting:
                # Which copy can go on beside it?
                while number and left_to_copy < 0:
                    at, index = divmod(copying, number)
                    if at > turn + 1 or any(used[o] < at - ago for ago, o in before[index]):
                        break
                    if stays[index] and at:
                        there[index] = at
                        copying += 1
                        waiting = step.copy >= 0 and there[step.copy] < turn
                        continue
                    left_to_copy = copies[index].seconds
                copies_now = left_to_copy >= 0
                if waiting:
                    assert copies_now, "a plan whose copies wait for one another"
                    now += left_to_copy
                    left_to_copy = 0.0
                else:
                    beside = copies_now and step.on_host
                    slower = host_slowdown if beside else 1.0
                    copy_slower = copy_slowdown if beside else 1.0
                    span = left * slower
                    if copies_now:
                        span = min(span, left_to_copy * copy_slower)
                        left_to_copy -= span / copy_slower
                    now += span
                    left -= span / slower
                    if left < 1e-12:
                        left = 0.0
                if copies_now and left_to_copy <= 1e-12:
                    at, index = divmod(copying, number)
                    there[index] = at
                    copying += 1
                    left_to_copy = -1.0
                    waiting = step.copy >= 0 and there[step.copy] < turn
            if step.copy >= 0:
                used[step.copy] = turn
    return now - begun
