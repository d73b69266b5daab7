"""Which stream each group is on, and in which order they are issued: list scheduling.

The time of a group is what it takes alone. Groups that run at once slow each other down where they
demand more than the whole chip together: all of them by what their demands add up to, as in the
project's simulator.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Work:
    """What there is to schedule: groups in an order in which they can run."""

    seconds: tuple[float, ...]
    """What each takes alone."""
    before: tuple[tuple[int, ...], ...]
    """For each group, those it waits for."""
    demand: tuple[float, ...] = ()
    """For each group, the share of the chip that it takes when alone; nothing where that is not
    known, and then none slows another down."""

    @property
    def total_seconds(self) -> float:
        """On one stream."""
        return sum(self.seconds)

    def ranks(self) -> list[float]:
        """For each group, the longest way from its start to the end."""
        ranks = list(self.seconds)
        for number in range(len(self.seconds) - 1, -1, -1):
            for source in self.before[number]:
                ranks[source] = max(ranks[source], self.seconds[source] + ranks[number])
        return ranks

    @property
    def critical_seconds(self) -> float:
        """The longest way: no number of streams is faster, but for what the times leave out."""
        return max(self.ranks(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Groups on streams, and when they are expected to run."""

    streams: tuple[int, ...]
    """For each group, its stream."""
    order: tuple[int, ...]
    """In which groups are issued."""
    start_seconds: tuple[float, ...] = ()
    """Of each group, as predicted."""
    end_seconds: tuple[float, ...] = ()
    """Of each group, as predicted."""

    @property
    def seconds(self) -> float:
        """As predicted."""
        return max(self.end_seconds, default=0.0)

    @property
    def num_streams(self) -> int:
        return len(set(self.streams))


HOP_SECONDS = 1.5e-6
"""What a group waits longer for one on another stream than for one on its own."""


def one_stream(work: Work) -> Schedule:
    """Everything one after another."""
    return timed(work, [0] * len(work.seconds), range(len(work.seconds)))


def timed(
    work: Work, streams: Sequence[int], order: Sequence[int], hop_seconds: float = HOP_SECONDS
) -> Schedule:
    """When groups run that are on these streams and are issued in this order."""
    if any(work.demand):
        return _contended(work, tuple(streams), tuple(order), hop_seconds)
    count = len(work.seconds)
    start, end, free = [0.0] * count, [0.0] * count, dict.fromkeys(streams, 0.0)
    for number in order:
        stream = streams[number]
        ready = free[stream]
        for source in work.before[number]:
            ready = max(ready, end[source] + (hop_seconds if streams[source] != stream else 0.0))
        start[number] = ready
        end[number] = free[stream] = ready + work.seconds[number]
    return Schedule(
        streams=tuple(streams), order=tuple(order), start_seconds=tuple(start),
        end_seconds=tuple(end),
    )  # fmt: skip


def _contended(
    work: Work, streams: tuple[int, ...], order: tuple[int, ...], hop_seconds: float
) -> Schedule:
    """`timed` where groups slow each other down: from event to event."""
    count = len(work.seconds)
    start, end = [0.0] * count, [-1.0] * count
    queues: dict[int, list[int]] = {stream: [] for stream in streams}
    for number in reversed(order):
        queues[streams[number]].append(number)
    running: dict[int, float] = {}
    """Group -> what is left of its seconds."""
    now, left = 0.0, count
    while left:
        coming = []
        busy = {streams[number] for number in running}
        for stream, queue in queues.items():
            if not queue or stream in busy:
                continue
            number = queue[-1]
            sources = work.before[number]
            if any(end[source] < 0 for source in sources):
                continue
            ready = max(
                (end[s] + (hop_seconds if streams[s] != stream else 0.0) for s in sources),
                default=0.0,
            )
            if ready <= now:
                queue.pop()
                running[number], start[number] = work.seconds[number], now
            else:
                coming.append(ready)
        slowed = max(1.0, sum(work.demand[number] for number in running))
        first = min(running, key=running.__getitem__, default=-1)
        ends = now + running[first] * slowed if running else float("inf")
        until = min(ends, min(coming, default=float("inf")))
        if until == float("inf"):
            raise AssertionError("groups are issued before what they wait for")
        for number in running:
            running[number] -= (until - now) / slowed
        now = until
        if running and ends <= now:
            del running[first]
            end[first] = now
            left -= 1
    return Schedule(
        streams=streams, order=order, start_seconds=tuple(start), end_seconds=tuple(end)
    )


_MOVED_TOGETHER = 6
_PREDICTIONS = 60_000
"""Groups timed in all while a schedule is improved on: a second or so."""


def refined(work: Work, schedule: Schedule, streams: int, seed: int = 0) -> Schedule:
    """A schedule that is predicted to be faster: groups, alone or with what follows them on their
    stream, move to other streams as long as that helps."""
    draw = random.Random(seed)
    count = len(work.seconds)
    best = timed(work, schedule.streams, schedule.order)
    for _ in range(max(20, _PREDICTIONS // max(1, count))):
        moved = list(best.streams)
        at = draw.randrange(count)
        source, target = best.streams[best.order[at]], draw.randrange(streams)
        if target == source:
            continue
        together = draw.choice((1, 1, draw.randint(2, _MOVED_TOGETHER)))
        followers = [n for n in best.order[at:] if best.streams[n] == source]
        for number in followers[:together]:
            moved[number] = target
        made = timed(work, renumbered(moved, best.order), best.order)
        if made.seconds < best.seconds:
            best = made
    return best


def list_schedule(
    work: Work, streams: int, *, hop_seconds: float = HOP_SECONDS, by_rank: bool = True
) -> Schedule:
    """Each group in turn on the stream where it ends first; on a stream where what it waits for
    ran last, where that makes no difference.

    Args:
        work: groups, their times and what they wait for.
        streams: how many there are.
        hop_seconds: see `HOP_SECONDS`.
        by_rank: whether the group with the longest way to the end goes first, or the module's order
            is kept.
    """
    count = len(work.seconds)
    ranks = work.ranks()
    waits = [len(sources) for sources in work.before]
    after: list[list[int]] = [[] for _ in range(count)]
    for number, sources in enumerate(work.before):
        for source in sources:
            after[source].append(number)
    key = [(-ranks[i] if by_rank else 0.0, i) for i in range(count)]
    open_ = [key[i] for i in range(count) if not waits[i]]
    heapq.heapify(open_)
    free, last = [0.0] * streams, [-1] * streams
    chosen, end, order = [0] * count, [0.0] * count, []
    while open_:
        _, number = heapq.heappop(open_)
        best: tuple[float, bool, float, int] | None = None
        for stream in range(streams):
            ready = free[stream]
            for source in work.before[number]:
                hop = hop_seconds if chosen[source] != stream else 0.0
                ready = max(ready, end[source] + hop)
            follows = last[stream] in work.before[number]
            # Of equal ones the stream that was busy last: the others stay free for longer.
            option = (ready + work.seconds[number], not follows, -free[stream], stream)
            if best is None or option < best:
                best = option
        assert best is not None
        chosen[number], end[number] = best[3], best[0]
        free[best[3]], last[best[3]] = best[0], number
        order.append(number)
        for user in after[number]:
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(open_, key[user])
    return timed(work, renumbered(chosen, order), order, hop_seconds)


def renumbered(streams: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The same streams, numbered from 0 as they are first used."""
    names = {s: i for i, s in enumerate(dict.fromkeys(streams[n] for n in order))}
    return tuple(names[stream] for stream in streams)
