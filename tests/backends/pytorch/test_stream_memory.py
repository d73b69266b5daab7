"""The memory of captured graphs, simulated: whatever the order in which streams get on, nobody
reads what has been overwritten. Memory is given out as torch's allocator does it in a capture."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.backends.pytorch.lanes import Lanes, Mark, OverLimitError
from placewright.backends.pytorch.streams.groups import Grouped
from placewright.backends.pytorch.streams.issue import Run, issue
from placewright.backends.pytorch.streams.schedule import Schedule, Work
from tests.backends.pytorch.test_streams import diamonds, works


@dataclass
class Step:
    """A group as it was captured: which memory it reads and writes from its start to its end."""

    number: int
    reads: list[tuple[int, str]]
    """Address, and whose value has to be there all the time."""
    writes: list[tuple[int, str]]


@dataclass
class Wait:
    lane: int
    position: int
    """The lane has to be so far."""


@dataclass
class Captured:
    """`lanes.Hardware` that notes what each lane is given, and gives out memory for it."""

    lanes: dict[int, list[Step | Wait]] = field(default_factory=dict)
    free: dict[int, list[int]] = field(default_factory=dict)
    """Lane -> addresses that it may have again: memory belongs to the stream that it was taken on,
    and is given out in the order of that stream's work."""
    addresses: dict[str, int] = field(default_factory=dict)
    count: int = 0
    current: int = 0

    def lane(self, number: int) -> list[Step | Wait]:
        return self.lanes.setdefault(number, [])

    def switch(self, lane: int) -> None:
        self.current = lane

    def record(self, lane: int) -> Wait:
        return Wait(lane, len(self.lane(lane)))

    def wait(self, lane: int, event: Any) -> None:
        self.lane(lane).append(event)

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        raise AssertionError

    def take(self) -> int:
        free = self.free.setdefault(self.current, [])
        if free:
            return free.pop()
        self.count += 1
        return self.count

    def give(self, lane: int, address: int) -> None:
        self.free.setdefault(lane, []).append(address)

    def run(self, grouped: Grouped, number: int, inner: Run) -> Run:
        """A group that leaves a note of what it touches; with scratch memory, as libraries take."""
        group = grouped.groups[number]

        def call(*inputs: Any) -> list[Any]:
            lane = self.current
            made = [value.clone() for value in inner(*inputs)]
            writes = []
            for name, value in zip(group.outputs, made, strict=True):
                self.addresses[name] = self.take()
                writes.append((self.addresses[name], name))
                weakref.finalize(value, self.give, lane, self.addresses[name])
            scratch = self.take()
            writes.append((scratch, f"scratch of {number}"))
            self.give(lane, scratch)
            reads = [(self.addresses[n], n) for n in group.inputs if n in self.addresses]
            self.lane(lane).append(Step(number, reads, writes))
            return made

        return call


def replay(captured: Captured, kept: Sequence[str], pick: Callable[[list[int]], int]) -> list[str]:
    """Runs what was captured, where `pick` says which of the lanes that can go on does. Gives what
    went wrong: a group whose inputs were not there from its start to its end."""
    lanes, memory = captured.lanes, dict[int, str]()
    done = dict.fromkeys(lanes, 0)
    begun: dict[int, Step] = {}
    wrong: list[str] = []

    def check(step: Step) -> None:
        for address, name in step.reads:
            if memory.get(address) != name:
                wrong.append(f"group {step.number} reads {memory.get(address)}, not {name}")

    while True:
        ready = []
        for lane, points in lanes.items():
            if done[lane] == len(points):
                continue
            point = points[done[lane]]
            if isinstance(point, Step) or done[point.lane] >= point.position:
                ready.append(lane)
        if not ready:
            break
        lane = pick(ready)
        point = lanes[lane][done[lane]]
        if isinstance(point, Step) and lane not in begun:
            check(point)
            for address, _ in point.writes:
                memory[address] = f"half of what group {point.number} makes"
            begun[lane] = point
            continue
        if isinstance(point, Step):
            check(point)
            memory.update(point.writes)
            del begun[lane]
        done[lane] += 1
    stuck = [lane for lane, points in lanes.items() if done[lane] < len(points)]
    wrong += [f"lane {lane} waits for ever" for lane in stuck]
    check(Step(-1, [(captured.addresses[n], n) for n in kept if n in captured.addresses], []))
    return wrong


def what_goes_wrong(work: Work, seed: int) -> list[str]:
    """Captures a graph with random streams, order and limit of memory, and replays it in many
    orders."""
    draw = random.Random(seed)
    grouped = diamonds(work.before)
    count = len(grouped.groups)
    streams = tuple(draw.randrange(4) for _ in range(count))
    plan = Schedule(streams=streams, order=_some_order(grouped, draw))
    size = torch.arange(3.0).nbytes
    limit = draw.choice((float("inf"), size * draw.randint(2, count + 1)))
    captured = Captured()
    runs = [captured.run(grouped, i, g.module) for i, g in enumerate(grouped.groups)]
    try:
        issued = issue(
            grouped, runs, plan, {"x": torch.arange(3.0)}, captured, limit_bytes=limit
        )  # fmt: skip
    except OverLimitError:
        return []  # which is an answer, too
    assert issued.peak_bytes <= limit
    order = list(range(4))
    wrong = []
    for turn in range(8):
        draw.shuffle(order)
        pick = draw.choice if turn % 2 else lambda ready: min(ready, key=order.index)
        wrong += replay(captured, grouped.kept, pick)
    return wrong


def _some_order(grouped: Grouped, draw: random.Random) -> tuple[int, ...]:
    """Any order in which each group comes after those that it waits for."""
    left, order = set(range(len(grouped.groups))), list[int]()
    while left:
        ready = sorted(n for n in left if left.isdisjoint(grouped.before[n]))
        order.append(draw.choice(ready))
        left.remove(order[-1])
    return tuple(order)


@settings(max_examples=30)
@given(works(), st.integers(0, 10**6))
def test_nobody_reads_what_was_overwritten(work: Work, seed: int) -> None:
    assert what_goes_wrong(work, seed) == []


def _frees_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lanes, "has_passed", lambda *_: True)


def _believes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that waits for a moment of another takes it to have come as far as that one is now."""

    def wait(self: Lanes, lane: int, mark: Mark) -> None:
        clock = self._clocks[lane]
        if mark.lane == lane or clock[mark.lane] >= mark.position:
            return
        self._hardware.wait(lane, mark.event)
        self._clocks[lane] = list(map(max, clock, self._clocks[mark.lane]))

    monkeypatch.setattr(Lanes, "wait", wait)


@pytest.mark.parametrize("fault", [_frees_at_once, _believes_too_much])
def test_the_simulation_finds_faults(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    draw = random.Random(0)
    for seed in range(200):
        before = tuple(
            tuple(sorted(draw.sample(range(i), min(i, draw.randint(0, 3))))) for i in range(20)
        )
        if what_goes_wrong(Work(seconds=(1e-6,) * 20, before=before), seed):
            return
    pytest.fail("nothing was found")
