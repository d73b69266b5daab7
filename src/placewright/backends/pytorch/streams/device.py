"""What groups run on: the streams of one GPU, captured; and the CPU, for what needs no GPU.

Only this module and `own` call torch.cuda.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from placewright.backends.pytorch.streams.groups import Grouped
from placewright.backends.pytorch.streams.issue import Around, Issued, Run, fresh, issue
from placewright.backends.pytorch.streams.own import Lease
from placewright.backends.pytorch.streams.schedule import Schedule


class Ready(Protocol):
    """Groups on streams that can be run again and again."""

    @property
    def values(self) -> Mapping[str, Any]:
        """What the last run left."""

    @property
    def place(self) -> torch.device | None:
        """The GPU where that is, in the same memory each time; None for what is run anew."""

    def replay(self) -> None:
        """Runs all groups once; what follows on the current stream comes after them."""


class Device(Protocol):
    """Something with streams."""

    kind: str
    """`cuda` or `cpu`."""

    def settings(self) -> contextlib.AbstractContextManager[None]:
        """What holds while kernels are chosen and captured."""

    def seconds_of(self, run: Run, inputs: Sequence[Any]) -> float:
        """How long one group takes alone, once captured."""

    def demand_of(self, run: Run, inputs: Sequence[Any], seconds: float) -> float:
        """The share of the chip that one group takes, which alone takes so long; 0 where groups do
        not run side by side."""

    def ready(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> Ready:
        """Captures all groups."""

    def times(self, replays: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
        """Seconds of each of several things to run, in turns, so many times."""

    def trace(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> list[tuple[float, float]]:
        """Start and end of each group in seconds, median of some runs."""


_REPEATS = 10
"""Runs of a group in one capture, so that what it takes to start a capture does not count."""
_BESIDE = 4
"""Streams on which a group runs beside itself, to see what share of the chip it takes."""
_UNSLOWED = 1.15
_SMALL = 0.1
_TRACE_PARTS = 16
"""Captures that a trace is put together from."""
_TRACED = 5
"""Replays that a trace is the median of."""


@dataclass(kw_only=True)
class Gpu:
    """The streams of one NVIDIA GPU."""

    index: int
    limit_bytes: float = math.inf
    """Of memory for what groups make, in one run."""
    kind: str = "cuda"
    _lease: Lease | None = None
    """Of streams that nobody else has; the first is what captures."""
    _pool: Any = None
    _keeper: Any = None

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            with torch.cuda.device(self.index), torch.no_grad():
                self.lease()
                yield
        finally:
            torch.backends.cudnn.benchmark = before

    def lease(self) -> Lease:
        if self._lease is None:
            self._lease = Lease(self.index)
        return self._lease

    def streams(self, schedule: Schedule) -> list[Any]:
        return self.lease().own.streams(max(schedule.streams, default=0) + 1)

    def capture(self, body: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph, and what the body left."""
        if self._keeper is None:
            # The first graph keeps the memory that all captures share: one replay at a time. Where
            # it could not be captured, torch does not take its handle again.
            self._pool = torch.cuda.graph_pool_handle()
            self._keeper = self._capture(
                lambda: torch.zeros(1, device=torch.device("cuda", self.index))
            )
        return self._capture(body)

    def _capture(self, body: Callable[[], Any]) -> tuple[Any, Any]:
        """As `torch.cuda.graph`, which gives back all cached memory each time."""
        graph, own = torch.cuda.CUDAGraph(), self.lease().own
        (first,) = own.streams(1)
        with _nothing_collected():
            own.hold_workspaces()
            with torch.cuda.stream(first):
                # Other threads of the user's may use CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    made = body()
                finally:
                    torch.cuda.set_stream(first)
                    graph.capture_end()
        return graph, made

    def seconds_of(self, run: Run, inputs: Sequence[Any]) -> float:
        self._warm(lambda: fresh(run, inputs), 2)

        def body() -> None:
            for _ in range(_REPEATS):
                fresh(run, inputs)

        graph, _ = self.capture(body)
        seconds = statistics.median(self.times([graph.replay], 5)[0])
        graph.reset()
        return seconds / _REPEATS

    def demand_of(self, run: Run, inputs: Sequence[Any], seconds: float) -> float:
        lanes = self.lease().own.streams(_BESIDE)

        def body() -> None:
            for lane in lanes[1:]:
                lane.wait_stream(lanes[0])
            try:
                for lane in lanes:
                    with torch.cuda.stream(lane):
                        for _ in range(_REPEATS):
                            fresh(run, inputs)
            finally:
                for lane in lanes[1:]:
                    lanes[0].wait_stream(lane)

        self._warm(body, 1)
        graph, _ = self.capture(body)
        together = statistics.median(self.times([graph.replay], 3)[0]) / _REPEATS
        graph.reset()
        slowed = together / seconds if seconds else 1.0
        # What slows nothing down when there are so many of it takes less than its part.
        share = slowed / _BESIDE if slowed > _UNSLOWED else _SMALL
        return min(1.0, share)

    def _warm(self, body: Callable[[], Any], count: int) -> None:
        own = self.lease().own
        with _nothing_collected():
            own.hold_workspaces()
            with torch.cuda.stream(own.streams(1)[0]):
                for _ in range(count):
                    body()
        torch.cuda.synchronize()

    def ready(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> CapturedRun:
        self.streams(schedule)  # before the workspaces of all of them are seen to
        # Once outside of the capture: libraries set up, for each stream, what cannot be captured.
        self._warm(lambda: self._issue(grouped, runs, schedule, given), 1)
        graph, issued = self.capture(lambda: self._issue(grouped, runs, schedule, given))
        place = torch.device("cuda", self.index)
        return CapturedRun(graph=graph, issued=issued, place=place, lease=self.lease())

    def _issue(
        self,
        grouped: Grouped,
        runs: Sequence[Run],
        schedule: Schedule,
        given: Mapping[str, Any],
        around: Around | None = None,
    ) -> Issued:
        return issue(
            grouped, runs, schedule, given, _Streams(self.streams(schedule)),
            limit_bytes=self.limit_bytes, around=around,
        )  # fmt: skip

    def times(self, replays: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in replays]
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self.index):
            for replay in replays:
                replay()
            torch.cuda.synchronize()
            for _ in range(rounds):
                for replay, seconds in zip(replays, found, strict=True):
                    start.record()
                    replay()
                    end.record()
                    end.synchronize()
                    seconds.append(start.elapsed_time(end) / 1e3)
        return found

    def trace(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> list[tuple[float, float]]:
        # An event takes a microsecond or two, as a small group does: few of them at a time.
        parts = min(_TRACE_PARTS, len(grouped.groups))
        found: list[tuple[float, float]] = [(0.0, 0.0)] * len(grouped.groups)
        for part in range(parts):
            found[part::parts] = self._trace_some(
                grouped, runs, schedule, given, range(part, len(found), parts)
            )
        return found

    def _trace_some(
        self,
        grouped: Grouped,
        runs: Sequence[Run],
        schedule: Schedule,
        given: Mapping[str, Any],
        numbers: Sequence[int],
    ) -> list[tuple[float, float]]:
        def event() -> Any:
            return torch.cuda.Event(enable_timing=True, external=True)

        zero = event()
        events = {number: (event(), event()) for number in numbers}

        def around(number: int, call: Callable[[], Any]) -> Any:
            if number not in events:
                return call()
            events[number][0].record()
            made = call()
            events[number][1].record()
            return made

        def body() -> Any:
            zero.record()
            return self._issue(grouped, runs, schedule, given, around)

        self.streams(schedule)
        graph, _ = self.capture(body)
        found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
        for turn in range(_TRACED + 1):
            graph.replay()
            torch.cuda.synchronize()
            for number, (first, last) in events.items() if turn else ():
                times = (zero.elapsed_time(first) / 1e3, zero.elapsed_time(last) / 1e3)
                found[number].append(times)
        graph.reset()
        return [
            (statistics.median(t[0] for t in times), statistics.median(t[1] for t in times))
            for times in found.values()
        ]


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """What the garbage collector finds may call into CUDA what a capture does not allow. And with a
    graph torch lets go of the workspaces of its stream: what runs there next would get others, from
    memory that is everybody's."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Streams:
    """`lanes.Hardware`: streams of one GPU."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self.streams = streams

    def switch(self, lane: int) -> None:
        torch.cuda.set_stream(self.streams[lane])

    def record(self, lane: int) -> Any:
        event = torch.cuda.Event()
        event.record(self.streams[lane])
        return event

    def wait(self, lane: int, event: Any) -> None:
        self.streams[lane].wait_event(event)

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        raise AssertionError("nothing of a captured module is on the host")


@dataclass(kw_only=True)
class CapturedRun:
    """One CUDA graph."""

    graph: Any
    issued: Issued
    place: torch.device | None
    lease: Lease
    """Nobody else has the streams, and so the workspaces, as long as this graph is there."""

    @property
    def values(self) -> Mapping[str, Any]:
        return self.issued.values

    def replay(self) -> None:
        self.graph.replay()


@dataclass(kw_only=True)
class Cpu:
    """One after another on the CPU: what schedules mean can be tried without a GPU."""

    kind: str = "cpu"

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def seconds_of(self, run: Run, inputs: Sequence[Any]) -> float:
        run(*inputs)
        return min(self.times([lambda: run(*inputs)], 3)[0])

    def demand_of(self, run: Run, inputs: Sequence[Any], seconds: float) -> float:
        return 0.0

    def ready(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> _CpuRun:
        return _CpuRun(grouped=grouped, runs=runs, schedule=schedule, given=given)

    def times(self, replays: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in replays]
        for _ in range(rounds):
            for replay, seconds in zip(replays, found, strict=True):
                started = time.perf_counter()
                replay()
                seconds.append(time.perf_counter() - started)
        return found

    def trace(
        self, grouped: Grouped, runs: Sequence[Run], schedule: Schedule, given: Mapping[str, Any]
    ) -> list[tuple[float, float]]:
        started = time.perf_counter()
        times = [(0.0, 0.0)] * len(grouped.groups)

        def around(number: int, call: Callable[[], Any]) -> Any:
            first = time.perf_counter() - started
            made = call()
            times[number] = (first, time.perf_counter() - started)
            return made

        issue(grouped, runs, schedule, given, OneAfterAnother(), around=around)
        return times


class OneAfterAnother:
    """`lanes.Hardware` on which everything is done when it is issued."""

    def switch(self, lane: int) -> None:
        pass

    def record(self, lane: int) -> Any:
        return None

    def wait(self, lane: int, event: Any) -> None:
        pass

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        pass


@dataclass(kw_only=True)
class _CpuRun:
    grouped: Grouped
    runs: Sequence[Run]
    schedule: Schedule
    given: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    place: torch.device | None = None

    def replay(self) -> None:
        with torch.no_grad():
            issued = issue(self.grouped, self.runs, self.schedule, self.given, OneAfterAnother())
        self.values = issued.values


class Turns:
    """Who uses memory that several graphs share: one after another, from whatever thread or stream
    they are called."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._stream: Any = None
        """Where the last turn was."""
        self._handle = -1
        """Of that stream."""

    def take(self, place: torch.device | None) -> None:
        """What follows on the current stream comes after the last turn. Hold the lock."""
        if place is None:
            return
        # The handle alone takes a tenth of the time, and it is nearly always the same.
        handle = torch._C._cuda_getCurrentRawStream(place.index)
        if handle != self._handle:
            stream = torch.cuda.current_stream(place)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._handle = stream, handle


def forget_memory() -> None:
    """Gives back what captures that are gone held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
