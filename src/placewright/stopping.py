"""Ending long work at once: compiled code that looks at a flag, and work that can be abandoned.

Python runs signal handlers in the main thread, between two of its own instructions. A call that
stays in compiled code for a minute would keep Ctrl-C waiting as long. So such calls run in another
thread, while the main thread waits in small steps and looks whether it shall stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from placewright.graph import BoolArray

GRACE_SECONDS = 1.0
"""How long work may go on after the stop before it is abandoned; Ctrl-C ends in 5 s."""

_POLL_SECONDS = 0.05

_R = TypeVar("_R")

_abandoned: list[threading.Thread] = []
"""Those whose call was given up."""


class Stopped(Exception):
    """Work was given up because a stop was asked for. Searches end with what they have."""


def never() -> bool:
    return False


def run_compiled(function: Callable[[BoolArray], _R], stop: Callable[[], bool]) -> _R:
    """Runs compiled code that is given a flag, [1], and ends soon after that is set."""
    flag = np.zeros(1, dtype=np.bool_)
    if stop is never:
        return function(flag)
    worker = Worker()
    try:
        return worker.run(lambda: function(flag), stop, on_stop=lambda: flag.fill(True))
    finally:
        worker.close()


def patiently(
    function: Callable[[], _R], stop: Callable[[], bool], grace_seconds: float = GRACE_SECONDS
) -> _R:
    """Calls it so that it can be abandoned some seconds after a stop; raises `Stopped` then."""
    if stop is never:
        return function()
    worker = Worker(grace_seconds)
    try:
        return worker.run(function, stop)
    finally:
        worker.close()


class Worker:
    """A thread that calls are made in, one after another, so that the caller need not wait for one
    that takes too long after a stop.

    What is abandoned goes on in its thread, as nothing can end it, and its result is lost; the
    thread does not keep the process from ending (see `leave`).
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        self.grace_seconds = grace_seconds
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.abandoned = False
        """Whether a call was given up; the worker takes no more then."""

    def run(
        self,
        function: Callable[[], _R],
        stop: Callable[[], bool],
        on_stop: Callable[[], object] = never,
    ) -> _R:
        """Calls the function in the thread; raises what it raises, and `Stopped` when it is still
        at it some seconds after `stop()`, which `on_stop` lets it know. Whatever else ends the
        waiting, such as a second Ctrl-C, abandons the call too."""
        if self.abandoned:
            raise Stopped
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._calls,), daemon=True)
            self._thread.start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((function, answer))
        try:
            value, error = self._wait(answer, stop, on_stop)
        except BaseException:
            self.abandoned = True
            _abandoned.append(self._thread)
            raise
        if error is not None:
            raise error
        result: _R = value
        return result

    def _wait(
        self,
        answer: queue.SimpleQueue[Any],
        stop: Callable[[], bool],
        on_stop: Callable[[], object],
    ) -> tuple[Any, BaseException | None]:
        until: float | None = None
        while True:
            try:
                return answer.get(timeout=_POLL_SECONDS)  # type: ignore[no-any-return]
            except queue.Empty:
                if until is None and stop():
                    on_stop()
                    until = time.monotonic() + self.grace_seconds
                elif until is not None and time.monotonic() >= until:
                    raise Stopped from None

    def close(self) -> None:
        """Ends the thread, and waits for that; an abandoned one ends after what it is doing.

        The thread may be the last that holds what it was called with, such as a policy of many
        tensors. To free those takes a while and goes through C++, where the end of the process
        must not find it (see `leave`).
        """
        self._calls.put(None)
        if self._thread is not None and not self.abandoned:
            self._thread.join()


def leave(code: int) -> NoReturn:
    """Ends this process, also where abandoned work goes on in compiled code: Python would take its
    thread away as soon as it comes back, which C++ answers by aborting."""
    if any(thread.is_alive() for thread in _abandoned):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _work(
    calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None],
) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        try:
            answer.put((function(), None))
        except BaseException as error:  # the caller's, whatever it is
            answer.put((None, error))
