"""What calls take of a GPU that several devices share: timed alone, and as many at once as there
are devices on it.

A call that fills the GPU takes as long on four streams as four times on one; one that leaves most
of it free takes hardly longer than alone. What it takes of the GPU is the time of all at once,
divided by their number and the time alone.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from placewright.backends.pytorch.works import Work, make_call, store

_REPEATS = 16
"""Calls in a row on each stream, where they take less than the next."""
_LONG_SECONDS = 100e-6
_REPLAYS = 3


class Timer(Protocol):
    """Times calls."""

    def seconds(self, call: Callable[[], Any], streams: int) -> float | None:
        """Of one call on each of so many streams at once; None where it cannot be told."""


def find_demands(
    works: Sequence[Work],
    num_values: int,
    sources: Mapping[int, torch.Tensor],
    device: torch.device,
    timer: Timer,
    streams: int,
    *,
    limit_seconds: float = 6.0,
) -> dict[int, float]:
    """Op -> what it takes of the chip, from 0 to 1, of those that could be timed within the limit.
    Calls of the same function on tensors of the same shapes are timed once."""
    env: list[Any] = [None] * num_values
    last: dict[int, int] = {}
    for number, work in enumerate(works):
        last.update(dict.fromkeys(work.reads, number))
    for value, tensor in sources.items():
        env[value] = tensor
    known: dict[str, tuple[float, float] | None] = {}
    alone: dict[int, float] = {}
    taken: dict[int, float] = {}
    until = time.monotonic() + limit_seconds
    for number, work in enumerate(works):
        key = _signature(work, env)
        if key not in known and time.monotonic() < until:
            known[key] = _timed(partial(make_call, work, env, device), timer, streams)
        timed = known.get(key)
        if timed is not None:
            one, share = timed
            alone[work.op] = alone.get(work.op, 0.0) + one
            taken[work.op] = taken.get(work.op, 0.0) + one * share
        store(work, make_call(work, env, device), env)
        for value in (*work.reads, *(value for _, value in work.makes)):
            if last.get(value, number) <= number and value not in sources:
                env[value] = None
    return {op: taken[op] / seconds if seconds else 0.0 for op, seconds in alone.items()}


def _timed(call: Callable[[], Any], timer: Timer, streams: int) -> tuple[float, float] | None:
    """Seconds alone, and the share of the chip."""
    one = timer.seconds(call, 1)
    many = timer.seconds(call, streams) if one is not None else None
    if one is None or many is None:
        return None
    if one <= 0:  # it starts no kernel
        return 0.0, 0.0
    return one, min(1.0, max(1.0 / streams, many / (streams * one)))


def _signature(work: Work, env: Sequence[Any]) -> str:
    """Calls of one signature take the same time."""
    forms = [
        (tuple(t.shape), tuple(t.stride()), str(t.dtype)) if isinstance(t, torch.Tensor) else t
        for t in (env[value] for value in work.reads)
    ]
    order = {value: place for place, value in enumerate(work.reads)}
    return repr((str(work.function), _shown(work.args, order),
                 _shown(tuple(sorted(work.kwargs.items())), order), forms))  # fmt: skip


def _shown(argument: Any, order: Mapping[int, int]) -> Any:
    value = getattr(argument, "value", None)
    if isinstance(value, int):
        return f"input {order.get(value)}"
    if isinstance(argument, tuple):
        return tuple(_shown(a, order) for a in argument)
    return argument


class GraphTimer:
    """Times calls in captured graphs, on the streams of some devices of one GPU."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._main = torch.cuda.Stream(streams[0].device)
        self._nothing: dict[int, float] = {}
        self.broken = False
        """Whether a call could not be captured, after which torch captures nothing any more."""

    def seconds(self, call: Callable[[], Any], streams: int) -> float | None:
        if self.broken:
            return None
        if streams not in self._nothing:
            cell = torch.zeros(1, device=self._main.device)
            torch.cuda.synchronize()
            self._nothing[streams] = self._graph_seconds(lambda: cell + 1, streams, 1)
        try:
            once = self._graph_seconds(call, streams, 1) - self._nothing[streams]
            if once > _LONG_SECONDS:
                return once
            total = self._graph_seconds(call, streams, _REPEATS)
        except (RuntimeError, torch.OutOfMemoryError):  # what waits for the host, for example
            self.broken = True
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
            return None
        return max(0.0, total - self._nothing[streams]) / _REPEATS

    def _graph_seconds(self, call: Callable[[], Any], streams: int, repeats: int) -> float:
        main, graph = self._main, torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(main):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                begin = torch.cuda.Event()
                begin.record(main)
                for stream in self._streams[:streams]:
                    stream.wait_event(begin)
                    with torch.cuda.stream(stream):
                        for _ in range(repeats):
                            call()
                    end = torch.cuda.Event()
                    end.record(stream)
                    main.wait_event(end)
            finally:
                graph.capture_end()
            graph.replay()
            times = []
            for _ in range(_REPLAYS):
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record(main)
                graph.replay()
                last.record(main)
                last.synchronize()
                times.append(1e-3 * first.elapsed_time(last))
        return float(statistics.median(times))
