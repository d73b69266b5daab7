"""Streams of a GPU that nobody else has, with the memory that libraries keep for each stream.

cuBLAS has a workspace for each thread and stream, and a captured product goes on using the one that
it was captured with. Torch has them in a table of the process. Two things can go wrong there: a
stream that torch hands out may be that of somebody else too, as there are a few dozen of them and
they are handed out in turn; and whoever clears the table, as torch.compile does before it captures,
gives the memory to whoever asks for some next. So graphs are captured on streams that are not
torch's, and their workspaces come from memory that is only for these: cleared ones go back there.

The table itself is never cleared here: graphs that others have captured may depend on it. But newer
versions of torch clear a stream's part of it whenever a graph that was captured on it is gone, so
that workspaces have to be seen to before each capture, and none may go meanwhile.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn import functional as F

from placewright.backends.pytorch.exporting import first_line
from placewright.backends.pytorch.streams.net import UnsuitableError


class OwnStreams:
    """The streams, made when they are needed, and never unmade: another one with the same handle
    would be taken for them."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._streams: list[Any] = []
        self.streams(1)
        with torch.cuda.device(index):  # the memory is that of the current one
            try:
                self._memory = torch.cuda.MemPool()
            except RuntimeError as fault:  # not every allocator has some: cudaMallocAsync has none
                raise UnsuitableError(f"torch keeps no memory apart: {first_line(fault)}") from None
            self._matrix = torch.zeros(16, 16, device="cuda", dtype=torch.float16)

    def streams(self, count: int) -> list[Any]:
        """So many of them; the same ones each time."""
        while len(self._streams) < count:
            self._streams.append(new_stream(self.index))
        return self._streams[:count]

    def hold_workspaces(self) -> None:
        """Sees to it that this thread has a workspace for each stream, from their own memory: what
        is issued or captured next takes none from elsewhere."""
        torch.cuda.synchronize(self.index)  # graphs that are running have the same ones
        with torch.no_grad(), torch.cuda.use_mem_pool(self._memory, self.index):
            for stream in self._streams:
                with torch.cuda.stream(stream):
                    F.linear(self._matrix, self._matrix)
                    # With a bias it is done by cuBLASLt, which has a workspace of its own.
                    F.linear(self._matrix, self._matrix, self._matrix[0])
        torch.cuda.synchronize(self.index)


def new_stream(index: int) -> Any:
    """A stream that torch does not know of, and that does not wait for the default one."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UnsuitableError(
            "streams need the package cuda-bindings (pip install 'placewright[nvidia]')"
        ) from None
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # makes the GPU's context the one of this thread
        code, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    if int(code) != 0:
        raise UnsuitableError(f"the CUDA driver gives no stream: {code.name}")
    return torch.cuda.ExternalStream(int(handle), device=index)


_idle: dict[int, list[OwnStreams]] = {}
"""Those that are not used now, for each GPU. Not unmade either: tables of libraries know them."""


class Lease:
    """The use of such streams for as long as this is there, and so are the graphs that hold it."""

    def __init__(self, index: int) -> None:
        idle = _idle.setdefault(index, [])
        try:
            self.own = idle.pop()
        except IndexError:
            self.own = OwnStreams(index)
        weakref.finalize(self, idle.append, self.own).atexit = False
