"""The streams of this machine's GPUs as lanes, and the semaphores for which they wait."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from placewright.backends.pytorch.places import OpenedGpus, Place


class CudaHardware:
    """`lanes.Hardware` on CUDA: the main lane, the one that waits for the host, then three for each
    place on a GPU."""

    def __init__(self, places: Sequence[Place], opened: OpenedGpus) -> None:
        gpus = [place for place in places if place.on_gpu]
        device = gpus[0].device
        self._devices = sorted({place.device for place in gpus})
        self.streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
        for place in gpus:
            of = opened.streams[place.number]
            self.streams += [of.compute, of.arrive, of.leave]
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._sem_wait = ctypes.cast(ctypes.CDLL(None).sem_wait, ctypes.c_void_p)

    def switch(self, lane: int) -> None:
        torch.cuda.set_stream(self.streams[lane])

    def synchronize(self) -> None:
        """Waits for all lanes, from the host. None of their GPUs need be the current one.

        The main lane is waited for asleep: it ends last, and a thread that looks again and again
        would hold up the cores beside it, which compute what is placed on the CPU.
        """
        last = torch.cuda.Event(blocking=True)
        last.record(self.streams[0])
        last.synchronize()
        for device in self._devices:
            torch.cuda.synchronize(device)

    def give_back(self) -> None:
        """Memory that was used and is not any more is there for others again."""
        self.synchronize()
        torch.cuda.empty_cache()

    def record(self, lane: int) -> Any:
        event = torch.cuda.Event()
        event.record(self.streams[lane])
        return event

    def wait(self, lane: int, event: Any) -> None:
        self.streams[lane].wait_event(event)

    def timing(self, lane: int) -> Any:
        """An event that tells when it happened, in a captured graph too."""
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(self.streams[lane])
        return event

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        # The C library's own function is what CUDA calls: no Python, and no lock of its.
        stream = ctypes.c_void_p(self.streams[lane].cuda_stream)
        code = self._driver.cuLaunchHostFunc(stream, self._sem_wait, ctypes.c_void_p(semaphore))
        if code:
            raise RuntimeError(f"CUDA does not take a wait for the host (error {code})")


class Semaphores:
    """Semaphores of the C library, by number."""

    _BYTES = 64
    """More than any system's semaphore has, and a cache line."""

    def __init__(self, count: int) -> None:
        self._memory = ctypes.create_string_buffer(self._BYTES * max(1, count))
        self._library = ctypes.CDLL(None)
        self.count = count
        for number in range(count):
            self._library.sem_init(ctypes.c_void_p(self.address(number)), 0, 0)

    def address(self, number: int) -> int:
        return ctypes.addressof(self._memory) + self._BYTES * number

    def post(self, number: int) -> None:
        self._library.sem_post(ctypes.c_void_p(self.address(number)))

    def post_all(self) -> None:
        """Nobody waits any longer, whatever becomes of the step."""
        for number in range(self.count):
            self.post(number)
