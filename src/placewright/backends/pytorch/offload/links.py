"""The way from the host's memory to a device: copies in order, beside what the device computes.

All that is particular to CUDA is in `CudaLink`. `SlowLink` is the same on the CPU alone: a second
memory, and copies that take as long as a link of some speed would. What decides *when* is copied is
written against `Link` and runs on either.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from placewright.backends.pytorch.offload.values import tensors_in
from placewright.backends.pytorch.streams.net import UnsuitableError
from placewright.backends.pytorch.streams.own import OwnStreams
from placewright.errors import PlacementError
from placewright.units import format_bytes

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda
"""Much of it has no types."""

Mark = Any
"""A point in the order of what a device was asked to do; it passes when all before it is done."""

_CHUNK = 64 * 2**20
"""Bytes of one copy command. A large copy of activations waits behind at most one of them on the
copy engine, some 1.2 ms at 55 GB/s; small ones do not use it."""


class Link(ABC):
    """Copies from the host to a device."""

    device: torch.device
    pinned = True
    """Whether all host memory that it gave is page-locked."""
    captures = False
    """Whether what it computes can be captured as graphs."""

    @abstractmethod
    def host_memory(self, size: int) -> torch.Tensor:
        """Bytes on the host, page-locked where the system allows."""

    @abstractmethod
    def device_memory(self, size: int) -> torch.Tensor:
        """Bytes on the device."""

    @abstractmethod
    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Mark]
    ) -> Mark:
        """Queues copies (target, source) behind those before them, which begin after some marks."""

    @abstractmethod
    def mark(self) -> Mark:
        """Passes when what the device was asked to compute until now is done."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """What the device is asked to compute from now on begins after the mark."""

    @abstractmethod
    def to_host(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Activations; returns when they are there."""

    @abstractmethod
    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        """An activation; returns at once."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until everything is done."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Runs, and keeps what was asked of the device, to be done again without asking: (replay,
        outputs). The outputs are the same tensors each time."""
        raise NotImplementedError

    @contextlib.contextmanager
    def timed(self, into: Callable[[float], None]) -> Iterator[None]:
        """Tells the seconds that the device computes on what is asked of it within, later."""
        begun = time.perf_counter()
        yield
        into(time.perf_counter() - begun)


# --- CUDA ----------------------------------------------------------------------------------------


class CudaLink(Link):
    """A CUDA device, a stream for copies, and page-locked memory."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        with _cuda.device(self.device):
            self._copies = _cuda.Stream(self.device)
        self._mailbox = _Mailbox(self.device)
        self._pool: Any = None
        self._timers: list[tuple[Any, Any, Callable[[float], None]]] = []

    def host_memory(self, size: int) -> torch.Tensor:
        flat, error = _locked_memory(size)
        if error:
            self.pinned = False
            logger.warning(
                "the system refused to page-lock %s of memory (%s); weights there travel from "
                "pageable memory, several times slower and without anything beside them. Is there "
                "a limit on locked memory (ulimit -l), or of a container?",
                format_bytes(size), error,
            )  # fmt: skip
        return flat

    def device_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Mark]
    ) -> Mark:
        stream = self._copies
        with _cuda.stream(stream):
            for mark in after:
                stream.wait_event(mark)
            for target, source in pairs:
                for start in range(0, target.numel(), _CHUNK):
                    part = slice(start, start + _CHUNK)
                    target[part].copy_(source[part], non_blocking=True)
            done = _cuda.Event()
            done.record(stream)
        return done

    def mark(self) -> Mark:
        event = _cuda.Event()
        event.record(_cuda.current_stream(self.device))
        return event

    def wait(self, mark: Mark) -> None:
        _cuda.current_stream(self.device).wait_event(mark)

    def to_host(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(values) > _Mailbox.SLOTS:  # the mailbox holds no more before it is read
            first, rest = values[: _Mailbox.SLOTS], values[_Mailbox.SLOTS :]
            return [*self.to_host(first), *self.to_host(rest)]
        sent = [self._mailbox.send(value) for value in values]
        # A mark of its own: to wait for the whole device would be to wait for weights, too.
        event = _cuda.Event()
        event.record(_cuda.current_stream(self.device))
        event.synchronize()
        # The mailbox is used again; what was read from it is not its own copy yet.
        return [self._mailbox.read(place) for place in sent]

    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        return self._mailbox.post(value)

    def finish(self) -> None:
        _cuda.synchronize(self.device)
        for begun, ended, into in self._timers:
            into(begun.elapsed_time(ended) / 1e3)
        self._timers.clear()

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        # Graphs of units run one after another on one stream, so that they can share their
        # temporary memory; `_cuda.graph` would also collect garbage for each of them.
        graph = _cuda.CUDAGraph()
        if self._pool is None:
            self._pool = _cuda.graph_pool_handle()
        own = _own_streams(self.device)
        if own is not None:
            own.hold_workspaces()
        (stream,) = own.streams(1) if own is not None else [_stream(self.device)]
        _cuda.synchronize(self.device)
        with _cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
        _cuda.current_stream(self.device).wait_stream(stream)
        graph.replay()
        return graph.replay, outputs

    @contextlib.contextmanager
    def timed(self, into: Callable[[float], None]) -> Iterator[None]:
        begun, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(_cuda.current_stream(self.device))
        yield
        ended.record(_cuda.current_stream(self.device))
        self._timers.append((begun, ended, into))


@functools.cache
def _own_streams(device: torch.device) -> OwnStreams | None:
    """The same for all captures, as libraries take memory for each stream that they work on: memory
    that is theirs, also when one of several graphs goes."""
    try:
        return OwnStreams(_cuda.current_device() if device.index is None else device.index)
    except UnsuitableError as fault:
        logger.info("captured units share workspaces with what else runs: %s", fault)
        return None


@functools.cache
def _stream(device: torch.device) -> Any:
    return _cuda.Stream(device)


class _Pages(mmap.mmap):
    """Memory that a tensor can be made of; it is unlocked before it goes."""

    locked_at = 0

    def __del__(self) -> None:
        if self.locked_at:
            with contextlib.suppress(Exception):  # the driver may be gone before, at exit
                _cuda.cudart().cudaHostUnregister(self.locked_at)


def _locked_memory(size: int) -> tuple[torch.Tensor, str]:
    """Bytes that are page-locked, and what the system said where they are not."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8), ""
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages, where the system has them, are fewer to lock, and fewer to look up when the CPU
    # computes with them.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # Writing to each page makes it exist; all cores do so at once, which the driver would not.
    flat = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    try:
        code = int(_cuda.cudart().cudaHostRegister(flat.data_ptr(), size, 0))
    except RuntimeError as fault:
        return flat, str(fault).splitlines()[0]
    if code:
        # CUDA tells of the error once more, to whoever asks next; that should not be a kernel.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
        return flat, f"CUDA error {code}"
    pages.locked_at = flat.data_ptr()
    return flat, ""


class _Mailbox:
    """Activations between host and device.

    Small ones are read and written in place by kernels, through page-locked memory that the device
    sees: a copy engine that is busy with weights would make them wait.
    """

    SLOTS = 64
    _BYTES = 256 * 2**10

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        self._host: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        """The same memory, as the device sees it."""
        self._read: list[Any] = [None] * self.SLOTS
        with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError):
            self._open()

    def _open(self) -> None:
        host = torch.zeros(self.SLOTS * self._BYTES, dtype=torch.uint8).pin_memory()
        seen = torch.as_tensor(_Seen(host), device=self._device).view(torch.int32)
        host.view(torch.int32)[:256] = torch.arange(256, dtype=torch.int32)
        back = torch.add(seen[:256], 0)
        torch.add(back, 1, out=seen[256:512])
        _cuda.synchronize(self._device)
        works = seen.data_ptr() == host.data_ptr() and bool(
            (host.view(torch.int32)[256:512] == torch.arange(1, 257)).all()
        )
        if works:
            self._host, self._seen = host, seen

    def _slot(self, value: torch.Tensor) -> int | None:
        size = value.numel() * value.element_size()
        if self._host is None or not 0 < size <= self._BYTES or size % 4:
            return None
        slot = self._next
        self._next = (slot + 1) % self.SLOTS
        if self._read[slot] is not None:
            self._read[slot].synchronize()
            self._read[slot] = None
        return slot

    def _of(self, memory: torch.Tensor, slot: int, size: int) -> torch.Tensor:
        start = slot * self._BYTES // memory.element_size()
        return memory[start : start + size // memory.element_size()]

    def send(self, value: torch.Tensor) -> Any:
        value = value.detach()
        slot = self._slot(value)
        if slot is None or self._host is None or self._seen is None:
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            return host.copy_(value, non_blocking=True)
        value = value.contiguous()
        if value.storage_offset() * value.element_size() % 4:
            value = value.clone()
        words = value.view(-1).view(torch.uint8).view(torch.int32)
        torch.add(words, 0, out=self._of(self._seen, slot, words.numel() * 4))
        found = self._of(self._host, slot, words.numel() * 4)
        return found.view(value.dtype).view(value.shape), None

    def read(self, sent: Any) -> torch.Tensor:
        found: torch.Tensor = sent[0].clone() if isinstance(sent, tuple) else sent
        return found

    def post(self, value: torch.Tensor) -> torch.Tensor:
        value = value.detach().contiguous()
        slot = self._slot(value)
        if slot is None or self._host is None or self._seen is None:
            pinned = value if value.is_pinned() else _pinned_copy(value)
            return pinned.to(self._device, non_blocking=True)
        size = value.numel() * value.element_size()
        self._of(self._host, slot, size).copy_(value.view(-1).view(torch.uint8))
        words = torch.add(self._of(self._seen, slot, size), 0)
        self._read[slot] = _cuda.Event()
        self._read[slot].record(_cuda.current_stream(self._device))
        return words.view(torch.uint8).view(value.dtype).view(value.shape)


def _pinned_copy(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)


class _Seen:
    """Page-locked memory, shown to torch as memory of the device."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel(),), "typestr": "|u1", "data": (host.data_ptr(), False),
            "version": 2, "strides": None,
        }  # fmt: skip


# --- a link of some speed, on the CPU ------------------------------------------------------------


class SlowLink(Link):
    """Two memories on the CPU, and a link between them: copies are made by a thread, in order, and
    take as long as they would at `bytes_per_second`. What is computed is done at once."""

    captures = True

    def __init__(self, bytes_per_second: float = 1e9, *, pins: bool = True) -> None:
        self.device = torch.device("cpu")
        self.pinned = pins
        self._bytes_per_second = bytes_per_second
        self.copied: list[int] = []
        """Bytes of each copy that was made."""
        self.live_bytes = 0
        self.peak_bytes = 0
        """Of the device's memory that was given out at once."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        worker = threading.Thread(target=_work, args=(self._jobs,), daemon=True)
        worker.start()
        weakref.finalize(self, _stop, worker, self._jobs)

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def device_memory(self, size: int) -> torch.Tensor:
        # Whoever computes with bytes that no copy has brought gets numbers that are none.
        memory = torch.full((size,), 255, dtype=torch.uint8)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(memory.untyped_storage(), self._freed, size)
        return memory

    def _freed(self, size: int) -> None:
        self.live_bytes -= size

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Mark]
    ) -> Mark:
        done = threading.Event()

        def job() -> None:
            for mark in after:
                mark.wait()
            size = sum(target.numel() for target, _ in pairs)
            for target, _ in pairs:
                target.fill_(255)
            time.sleep(size / self._bytes_per_second)
            for target, source in pairs:
                target.copy_(source)
            self.copied.append(size)
            done.set()

        self._jobs.put(job)
        return done

    def mark(self) -> Mark:
        passed = threading.Event()
        passed.set()
        return passed

    def wait(self, mark: Mark) -> None:
        mark.wait()

    def to_host(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [value.detach().clone() for value in values]

    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone()

    def finish(self) -> None:
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        outputs = run()

        def replay() -> None:
            for target, source in zip(tensors_in(outputs), tensors_in(run()), strict=True):
                target.copy_(source)

        return replay, outputs


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _stop(worker: threading.Thread, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    jobs.put(None)
    # At exit, a thread that is still within torch would take the process down with it.
    if worker is not threading.current_thread():
        worker.join()


def open_link(name: str) -> Link:
    """The link to a device of this machine."""
    device = torch.device(name)
    if device.type == "cpu":
        return SlowLink(float("inf"))
    if device.type != "cuda":
        raise PlacementError(f"weights travel to CUDA devices, not to {name}")
    if not _cuda.is_available() or (device.index or 0) >= _cuda.device_count():
        raise PlacementError(
            f"this machine has no {name}; torch {torch.__version__} sees "
            f"{_cuda.device_count()} CUDA devices"
        )
    return CudaLink(device)
