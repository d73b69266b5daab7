"""Streams that wait for each other, and when a tensor may be freed.

A lane is a stream that work is issued to. Each has a clock: how far it has come, and how far every
other lane had come when it last waited for it, directly or through others (a vector clock). So a
wait that says nothing new is left out. And a tensor is let go of only when the lane that owns its
memory has waited for the last use on every other lane: torch's allocator gives memory of a stream
out again in the order of that stream, so that no lane can read what has been overwritten. The same
holds when the work is captured as a graph, whose edges are these waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from placewright.errors import PlacewrightError
from placewright.units import format_bytes


class OverLimitError(PlacewrightError):
    """A placement needs more memory on a device than the cluster says it has."""


class Hardware(Protocol):
    """What a lane does when it is really there."""

    def switch(self, lane: int) -> None:
        """What is called from now on runs on this lane, and what it makes belongs to it."""

    def record(self, lane: int) -> Any:
        """An event after all that the lane has been given so far."""

    def wait(self, lane: int, event: Any) -> None:
        """The lane goes on when the event has happened."""

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        """The lane goes on when a thread of the host has posted the semaphore at this address."""


class Mark(NamedTuple):
    """A moment of a lane."""

    lane: int
    position: int
    clock: tuple[int, ...]
    event: Any


class Lanes:
    """The clocks of all lanes."""

    def __init__(self, count: int, hardware: Hardware) -> None:
        self._clocks = [[0] * count for _ in range(count)]
        self._marks: list[Mark | None] = [None] * count
        self._hardware = hardware
        self._on = -1

    def work(self, lane: int) -> int:
        """Something is about to be issued to the lane; gives its position."""
        if lane != self._on:
            self._hardware.switch(lane)
            self._on = lane
        clock = self._clocks[lane]
        clock[lane] += 1
        return clock[lane]

    def mark(self, lane: int) -> Mark:
        """After all that has been issued to the lane."""
        clock, last = self._clocks[lane], self._marks[lane]
        if last is None or last.position != clock[lane] or last.clock != tuple(clock):
            last = Mark(lane, clock[lane], tuple(clock), self._hardware.record(lane))
            self._marks[lane] = last
        return last

    def wait(self, lane: int, mark: Mark) -> None:
        """The lane waits for a moment of another, unless it has already."""
        clock = self._clocks[lane]
        if mark.lane == lane or clock[mark.lane] >= mark.position:
            return
        self._hardware.wait(lane, mark.event)
        self._clocks[lane] = [max(own, other) for own, other in zip(clock, mark.clock, strict=True)]

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        self.work(lane)
        self._hardware.wait_for_host(lane, semaphore)

    def has_passed(self, lane: int, uses: Mapping[int, int]) -> bool:
        """Whether the lane comes after these positions of others."""
        clock = self._clocks[lane]
        return all(other == lane or clock[other] >= at for other, at in uses.items())


@dataclass
class _Held:
    """A tensor whose last use is issued, and whose memory cannot be given out yet."""

    tensor: Any
    uses: Mapping[int, int]
    pool: int
    bytes: int


@dataclass
class Ledger:
    """What the places on GPUs hold at each moment of the program, and the most of it."""

    lanes: Lanes
    limits: Mapping[int, int]
    """Pool -> bytes that it has."""
    names: Mapping[int, str]
    live: dict[int, int] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, list[_Held]] = field(default_factory=dict)
    """Lane that owns the memory -> what it holds."""

    def hold(self, pool: int, size: int) -> None:
        """Memory that is taken; raises `OverLimitError` where there is not enough."""
        live = self.live.get(pool, 0) + size
        if live > self.limits[pool]:
            self._reclaim(pool)
            live = self.live.get(pool, 0) + size
            if live > self.limits[pool]:
                raise OverLimitError(
                    f"{self.names[pool]} has {format_bytes(self.limits[pool])}, and at this moment "
                    f"of the step {format_bytes(live)} are needed there"
                )
        self.live[pool] = live
        if live > self.peak.get(pool, 0):
            self.peak[pool] = live

    def release(
        self, owner: int, tensor: Any, uses: Mapping[int, int], pool: int, size: int
    ) -> None:
        """The last use of a tensor has been issued; `uses` has the last position on each lane."""
        if self.lanes.has_passed(owner, uses):
            self.live[pool] -= size
            return
        self._waiting.setdefault(owner, []).append(_Held(tensor, uses, pool, size))

    def settle(self, owner: int) -> None:
        """The lane has waited for others: what it came after is let go of."""
        waiting = self._waiting.get(owner)
        if not waiting:
            return
        kept = []
        for held in waiting:
            if self.lanes.has_passed(owner, held.uses):
                self.live[held.pool] -= held.bytes
            else:
                kept.append(held)
        self._waiting[owner] = kept

    def _reclaim(self, pool: int) -> None:
        """Makes owners wait for what uses their tensors still: time is spent for memory."""
        for owner, waiting in self._waiting.items():
            lanes: set[int] = set()
            for held in waiting:
                if held.pool == pool:
                    lanes.update(held.uses)
            for lane in sorted(lanes):
                self.lanes.wait(owner, self.lanes.mark(lane))
            self.settle(owner)


def sum_by_pool(pools: Sequence[int], sizes: Iterable[int]) -> dict[int, int]:
    """Bytes of several places, added up where they share their memory."""
    result: dict[int, int] = {}
    for pool, size in zip(pools, sizes, strict=True):
        result[pool] = result.get(pool, 0) + size
    return result
