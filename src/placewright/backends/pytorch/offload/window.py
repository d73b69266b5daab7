"""Copies of weights ahead of their use, through a buffer of bounded size on the device.

Each unit whose weights travel has a fixed region of the buffer in a pass, so that what computes
with them finds them at the same address each time. A copy is queued as soon as all that used its
region before has been asked of the device, and begins when that is done: the next pass's first
copies begin while this one's last units compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from placewright.backends.pytorch.offload.links import Link, Mark

ALIGNMENT = 512
"""Of tensors within a buffer, in bytes: what CUDA's own allocator keeps."""


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def arrange(sizes: Mapping[str, int], window_bytes: int) -> dict[str, int]:
    """Where each of some units begins in a buffer that is gone through in rounds.

    `sizes` is in order of use; none may be larger than the buffer.
    """
    starts: dict[str, int] = {}
    at = 0
    for name, size in sizes.items():
        if at + size > window_bytes:
            at = 0
        assert size <= window_bytes, (name, size, window_bytes)
        starts[name] = at
        at += aligned(size)
    return starts


@dataclass(eq=False)
class _Region:
    """Bytes of the buffer that a unit's weights are in, or will be."""

    unit: str
    start: int
    stop: int
    copied: Mark
    version: int
    """Of the weights that were copied."""
    uses: int = 1
    """How often it is waited for still."""
    freed: Mark | None = None
    """Set when what computes with them has been asked of the device: the last time, where they are
    used again without another copy."""

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop


@dataclass(frozen=True, kw_only=True)
class Route:
    """The units whose weights travel in a pass, in order of use, and where to."""

    order: tuple[str, ...]
    """A unit that is called twice is there twice."""
    starts: Mapping[str, int]


class Source:
    """Where the weights of a unit come from."""

    def pairs(self, region: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) of each copy into a region."""
        raise NotImplementedError

    def size(self) -> int:
        raise NotImplementedError

    def version(self) -> int:
        """Another when the weights have changed."""
        raise NotImplementedError


class Window:
    """The buffer, and what is in it or on the way."""

    def __init__(self, link: Link, window_bytes: int, sources: Mapping[str, Source]) -> None:
        self._link = link
        self._sources = sources
        self.memory = link.device_memory(window_bytes)
        self._route = Route(order=(), starts={})
        self._next = 0
        """In the order of the route: whose copy is queued next."""
        self._regions: list[_Region] = []
        """In the order of their copies. No two that overlap are both waited for."""
        self.copied_bytes = 0

    def follow(self, route: Route) -> None:
        """What is used from now on, over and over. What is on the way for another order stays there
        for whoever still asks for it, and is copied over otherwise."""
        if route == self._route:
            return
        self._route, self._next = route, 0
        for region in self._regions:
            self._let_go(region)
        self.pump()

    def forget(self) -> None:
        """Nothing in the buffer is what it should be any more."""
        for region in self._regions:
            self._let_go(region)
            region.version = -1
        self._next = 0

    def take(self, unit: str) -> torch.Tensor:
        """The bytes of a unit; what the device is asked for next begins when they are there."""
        region = self._waited_for(unit)
        if region is None or region.version != self._sources[unit].version():
            region = self._fetch_now(unit)
        self._link.wait(region.copied)
        return self.memory[region.start : region.stop]

    def give_back(self, unit: str) -> None:
        """All that computes with the bytes of a unit has been asked of the device."""
        region = self._waited_for(unit)
        assert region is not None, unit
        region.uses -= 1
        if not region.uses:
            region.freed = self._link.mark()
        self.pump()

    def pump(self) -> None:
        """Queues all copies that can be."""
        while self._route.order and self._queue(self._route.order[self._next]):
            self._next = (self._next + 1) % len(self._route.order)

    def _waited_for(self, unit: str) -> _Region | None:
        return next((r for r in self._regions if r.unit == unit and r.uses), None)

    def _queue(self, unit: str) -> bool:
        """Whether a unit's weights are on the way now, for one more use."""
        source = self._sources[unit]
        start = self._route.starts.get(unit, 0)
        stop = start + source.size()
        for region in self._regions:
            if region.unit == unit and region.start == start:
                # Asked for twice, with nothing else in between that needs the same bytes.
                if region.uses or region.version != source.version():
                    break
                region.uses = 1
                return True
        crossed = [r for r in self._regions if r.overlaps(start, stop)]
        if any(region.uses for region in crossed):
            return False
        after = [mark for r in crossed for mark in (r.freed, r.copied) if mark is not None]
        self._regions = [r for r in self._regions if r not in crossed]
        region = _Region(
            unit=unit, start=start, stop=stop, version=source.version(),
            copied=self._link.copy(source.pairs(self.memory[start:stop]), after),
        )  # fmt: skip
        self.copied_bytes += stop - start
        self._regions.append(region)
        return True

    def _fetch_now(self, unit: str) -> _Region:
        """For whoever is not next in the route, or whose weights have changed since the copy."""
        for region in self._regions:
            self._let_go(region)
        if not self._queue(unit):
            raise AssertionError(unit)
        order = self._route.order
        if unit in order:
            self._next = (order.index(unit, self._at(unit)) + 1) % len(order)
        found = self._waited_for(unit)
        assert found is not None, unit
        return found

    def _at(self, unit: str) -> int:
        """Where to look for a unit in the route: after what was queued last, if it comes there."""
        return self._next if unit in self._route.order[self._next :] else 0

    def _let_go(self, region: _Region) -> None:
        # Nobody will compute with it: only the copy itself has to be over, and what came before.
        region.uses = 0
