"""Places on the CPU: a thread with cores of its own for each."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence

import torch


class CpuWorker:
    """A thread that does what it is given, on its cores. The threads that torch's kernels start for
    it inherit them."""

    def __init__(self, name: str, cores: Sequence[int]) -> None:
        self._cores = cores
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def join(self) -> BaseException | None:
        """Waits for the job; gives what went wrong in it."""
        self._done.acquire()
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self._cores:
            with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
                os.sched_setaffinity(0, self._cores)
            torch.set_num_threads(len(self._cores))
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException as fault:
                    self._fault = fault
                del job  # it holds the placement, and all that was computed for it
                self._done.release()
