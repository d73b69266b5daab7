"""Where the weights of a unit live: one block of the host's memory, or tensors on the device.

On the host all tensors of a unit are views of one page-locked block, in the order in which the unit
names them, so that one copy brings them to the device, and the CPU computes with them in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from placewright.backends.pytorch.offload.links import Link
from placewright.backends.pytorch.offload.window import Source, aligned


@dataclass(frozen=True)
class Piece:
    """A tensor within a block."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, block: torch.Tensor) -> torch.Tensor:
        part = block[self.start : self.start + self.size]
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype, device=block.device)
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """The tensors of a unit within one block."""

    pieces: Mapping[str, Piece]
    size: int

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> Layout:
        pieces, at = {}, 0
        for name, tensor in tensors.items():
            pieces[name] = Piece(at, tensor.dtype, tuple(tensor.shape))
            at += aligned(pieces[name].size)
        return Layout(pieces, at)


class Blocks:
    """Memory of the host, page-locked where the system allows. What is given back is kept for who
    asks next: locking takes longer than copying."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._spare: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        spare = self._spare.get(size)
        return spare.pop() if spare else self._link.host_memory(size)

    def give_back(self, block: torch.Tensor) -> None:
        self._spare.setdefault(block.numel(), []).append(block)


class Home(Source):
    """The tensors that a unit computes with, each of them once, and where they live."""

    def __init__(
        self, unit: str, tensors: Mapping[str, torch.Tensor], borrowed: Mapping[str, Home]
    ) -> None:
        """`borrowed`: tensors that live in another unit's home, because they are tied to its."""
        self.unit = unit
        self.tensors = dict(tensors)
        self.layout = Layout.of(tensors)
        self.block: torch.Tensor | None = None
        """On the host; None where the tensors are on the device."""
        self.values: dict[str, torch.Tensor] = {}
        """What `data` of each tensor is while nobody has it elsewhere."""
        self._borrowed = dict(borrowed)
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        """By the address of a region."""

    @property
    def owned(self) -> list[str]:
        return [name for name in self.tensors if name not in self._borrowed]

    def to_host(self, blocks: Blocks) -> None:
        """Moves what it owns into a block; the memory that it was in is free then."""
        if self.block is None:
            own = {name: self.tensors[name] for name in self.owned}
            layout = Layout.of(own)
            self.block = blocks.take(layout.size)
            for name, piece in layout.pieces.items():
                self._put(name, piece.view(self.block))

    def to_device(self, device: torch.device, blocks: Blocks) -> None:
        for name in self.owned:
            old = self.tensors[name].data
            if self.block is not None or old.device != device:
                self._put(name, torch.empty_like(old, device=device))
        if self.block is not None:
            blocks.give_back(self.block)
        self.block = None
        self.values = {name: self.tensors[name].data for name in self.owned}

    def _put(self, name: str, place: torch.Tensor) -> None:
        """Of a tensor without values, there is then a place for them."""
        tensor = self.tensors[name]
        if not tensor.is_meta:
            place.copy_(tensor.data)
        self.values[name] = place
        _set_data(tensor, place)

    # --- while the unit computes somewhere else --------------------------------------------------

    def size(self) -> int:
        return self.layout.size

    def version(self) -> int:
        return sum(tensor._version for tensor in self.tensors.values())

    def pairs(self, region: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        if not self._borrowed and self.block is not None:
            return [(region[: self.block.numel()], self.block)]
        return [
            (region[p.start : p.start + p.size], _bytes(self.value(name)))
            for name, p in self.layout.pieces.items()
            if p.size
        ]

    def value(self, name: str) -> torch.Tensor:
        owner = self._borrowed.get(name)
        return self.values[name] if owner is None else owner.value_of(self.tensors[name])

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        name = next(n for n, own in self.tensors.items() if own is tensor)
        return self.value(name)

    def views(self, region: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors within a region of the device's buffer."""
        found = self._views.get(region.data_ptr())
        if found is None:
            found = {name: piece.view(region) for name, piece in self.layout.pieces.items()}
            self._views[region.data_ptr()] = found
        return found

    def forget_views(self) -> None:
        """The buffer is another one; what is kept of the old one would keep its memory."""
        self._views.clear()

    def lend(self, views: Mapping[str, torch.Tensor]) -> None:
        """The tensors have their values there, until they are `at_home` again."""
        for name, view in views.items():
            self.tensors[name].data = view

    def at_home(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.data = self.value(name)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(-1).view(torch.uint8)


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.is_meta:
        # torch gives no values to a tensor on `meta`; it becomes another one in place.
        grad = tensor.requires_grad
        made = torch.nn.Parameter(value, grad) if isinstance(tensor, torch.nn.Parameter) else value
        torch.utils.swap_tensors(tensor, made)
        return
    tensor.data = value
