"""Issues groups on streams: which waits for which, and when memory may be used again.

Clocks and the ledger of memory are those of every execution (`lanes`): a tensor is let go of when
the stream that owns it has waited for the last reader on every other one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placewright.backends.pytorch.exporting import storages
from placewright.backends.pytorch.lanes import Hardware, Lanes, Ledger, Mark
from placewright.backends.pytorch.streams.groups import Grouped
from placewright.backends.pytorch.streams.schedule import Schedule

Run = Callable[..., Sequence[Any]]
Around = Callable[[int, Callable[[], Any]], Any]

_POOL = 0
"""All streams of a GPU share its memory."""


@dataclass(frozen=True, kw_only=True)
class Issued:
    """What came of it."""

    values: dict[str, Any]
    """Those that were to be kept."""
    peak_bytes: int
    """The most that was held at a time of what groups made."""


def issue(
    grouped: Grouped,
    runs: Sequence[Run],
    schedule: Schedule,
    given: Mapping[str, Any],
    hardware: Hardware,
    *,
    limit_bytes: float = math.inf,
    around: Around | None = None,
) -> Issued:
    """Issues all groups once. The streams begin after the first one, which ends after all others.

    Args:
        grouped: the groups.
        runs: what computes each.
        schedule: where each is, and in which order they are issued.
        given: inputs and constants by name.
        hardware: the streams; the first is the current one.
        limit_bytes: of memory for what groups make; where it gets short streams wait for each
            other, and `OverLimitError` says that this does not help.
        around: calls a group, by its number: for taking times.
    """
    count = max(schedule.streams, default=0) + 1
    lanes = Lanes(count, hardware)
    ledger = Ledger(lanes, {_POOL: limit_bytes}, {_POOL: "the GPU"})  # type: ignore[dict-item]
    state = _Issuing(grouped, schedule, dict(given), lanes, ledger)
    lanes.work(0)
    begin = lanes.mark(0)
    for lane in range(1, count):
        lanes.wait(lane, begin)
    try:
        for number in schedule.order:
            state.run(number, runs[number], around)
    finally:
        # A capture cannot end before all its streams have come together, whatever happened.
        for lane in range(1, count):
            lanes.wait(0, lanes.mark(lane))
        hardware.switch(0)
    return Issued(
        values={name: state.values[name] for name in grouped.kept},
        peak_bytes=int(ledger.peak.get(_POOL, 0)),
    )


class _Issuing:
    def __init__(
        self,
        grouped: Grouped,
        schedule: Schedule,
        values: dict[str, Any],
        lanes: Lanes,
        ledger: Ledger,
    ) -> None:
        self.grouped, self.schedule, self.values = grouped, schedule, values
        self.lanes, self.ledger = lanes, ledger
        self.after = grouped.users()
        self.marks: dict[int, Mark] = {}
        self.owner = {
            name: schedule.streams[number]
            for number, group in enumerate(grouped.groups) for name in group.outputs
        }  # fmt: skip
        self.uses: dict[str, dict[int, int]] = {name: {} for name in self.owner}
        """Value -> for each stream, the position of its last reader or maker there."""
        self.left = dict.fromkeys(self.owner, 0)
        """Value -> how often it is still read."""
        for name in (*(n for g in grouped.groups for n in g.inputs), *grouped.kept):
            if name in self.left:
                self.left[name] += 1

    def run(self, number: int, run: Run, around: Around | None) -> None:
        group = self.grouped.groups[number]
        lane = self.schedule.streams[number]
        # The latest first: it often makes waiting for the others needless.
        for source in sorted(self.grouped.before[number], reverse=True):
            if source in self.marks:
                self.lanes.wait(lane, self.marks[source])
        self.ledger.settle(lane)
        position = self.lanes.work(lane)

        def call() -> list[Any]:
            return fresh(run, [self.values[name] for name in group.inputs])

        made = call() if around is None else around(number, call)
        for name, value in zip(group.outputs, made, strict=True):
            self.values[name] = value
            self.uses[name][lane] = position
            self.ledger.hold(_POOL, _bytes(value))
        del made
        if any(self.schedule.streams[user] != lane for user in self.after[number]):
            self.marks[number] = self.lanes.mark(lane)
        for name in group.inputs:
            if name in self.left:
                self.left[name] -= 1
                self.uses[name][lane] = position
        for name in dict.fromkeys((*group.inputs, *group.outputs)):
            if self.left.get(name) == 0:
                value = self.values.pop(name)
                owner = self.owner[name]
                self.ledger.release(owner, value, self.uses[name], _POOL, _bytes(value))
                del value


def fresh(run: Run, inputs: Sequence[Any]) -> list[Any]:
    """What a group makes, in memory of its own: where an op gives back what it was given, or looks
    at it, its memory would be freed with the clock of another stream."""
    given = {storage for value in inputs for storage in storages(value)}
    return [
        value.clone() if not given.isdisjoint(storages(value)) else value for value in run(*inputs)
    ]


def _bytes(value: Any) -> int:
    return int(value.untyped_storage().nbytes())
