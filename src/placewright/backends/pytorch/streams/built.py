"""A module for inputs of certain shapes, ready to be called: traced, grouped, on streams."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.exporting import storages
from placewright.backends.pytorch.streams import passes
from placewright.backends.pytorch.streams.device import Device, Ready
from placewright.backends.pytorch.streams.groups import Fusion, Grouped, group
from placewright.backends.pytorch.streams.issue import Run
from placewright.backends.pytorch.streams.net import Net, Node, is_view
from placewright.backends.pytorch.streams.schedule import Schedule
from placewright.backends.pytorch.streams.training import split_gradients

_version = attrgetter("_version")
"""Counts how often a tensor was written to."""


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A module's graph as groups, with tensors for its constants and its inputs."""

    fusion: Fusion
    grouped: Grouped
    statics: tuple[torch.Tensor | None, ...]
    """For each leaf of the inputs, the tensor that each call copies it to."""
    given: Mapping[str, Any]
    """Inputs and constants by name."""
    folded: int
    """Batch norms that went into the product before them."""
    sources: tuple[torch.Tensor, ...]
    """Tensors of the module that constants were computed from, once: others are read each time."""
    versions: list[int]
    """Of the sources, when that was."""

    @property
    def fingerprint(self) -> str:
        """Of what the groups do, in their order."""
        text = "\n".join(f"{g.name}{g.inputs}{g.outputs}{g.code}" for g in self.grouped.groups)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_current(self) -> bool:
        """Whether nothing was written to the sources since; but for what is written to `data`."""
        return not self.sources or list(map(_version, self.sources)) == self.versions

    def refresh(self) -> None:
        """Takes over the parameters as they are now, where they were folded into something."""
        self.versions[:] = map(_version, self.sources)
        for name, value in self.grouped.net.frozen().items():
            if isinstance(value, torch.Tensor) and not _same_memory(value, self.given[name]):
                self.given[name].copy_(value)


def lower(traced: Net, args: Sequence[Any], kwargs: Mapping[str, Any], fusion: Fusion) -> Lowered:
    """Fuses and groups what was traced with these arguments, which is not changed."""
    net = traced.copy()
    passes.simplify(net)
    folded = 0
    if fusion is not Fusion.NONE:
        folded = passes.fold(net)
        split_gradients(net)
    if fusion is Fusion.REGIONS:
        passes.split_biases(net)
    grouped = group(net, fusion)
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    given: dict[str, Any] = net.frozen()
    sources = _sources(net, given)
    versions = list(map(_version, sources))
    given.update({name: value.detach() for name, value in net.held.items()})
    statics: list[torch.Tensor | None] = []
    for leaf, name in zip(leaves, net.leaves, strict=True):
        statics.append(None if name is None else leaf.detach().clone())
        if name is not None:
            given[name] = statics[-1]
    return Lowered(
        fusion=fusion, grouped=grouped, statics=tuple(statics), given=given, folded=folded,
        sources=sources, versions=versions,
    )  # fmt: skip


def _sources(net: Net, values: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Tensors of the module behind some values of constants, but for those that look at them."""
    found: dict[str, torch.Tensor] = {}
    for node in net.constant_nodes():
        if node.name not in values:
            continue
        own = set(storages(values[node.name]))
        seen, open_ = {node}, [node]
        while open_:
            one = open_.pop()
            if one.op == "placeholder" and own.isdisjoint(storages(net.constants[one.name])):
                found[one.name] = net.constants[one.name]
            before = [source for source in one.all_input_nodes if source not in seen]
            seen.update(before)
            open_.extend(before)
    # Those that were made in inference mode do not say when they change.
    return tuple(tensor for tensor in found.values() if not tensor.is_inference())


@dataclass(kw_only=True)
class Built:
    """Something to call with the flat inputs."""

    lowered: Lowered
    ready: Ready
    schedule: Schedule
    copies: bool = True
    """Whether outputs are copies; otherwise the next call overwrites them."""
    _makers: list[_Copy] = field(default_factory=list)
    _fixed: _Fixed | None = None
    """How outputs are handed out, where they are in the same memory after each call."""
    _inputs: list[tuple[list[int], list[torch.Tensor]]] = field(default_factory=list)
    """Numbers of leaves of the inputs, and the tensors that they are copied to; of a type each."""

    def __post_init__(self) -> None:
        grouped = self.lowered.grouped
        read = {name for one in grouped.groups for name in one.inputs} | set(grouped.kept)
        together: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
        for number, static in enumerate(self.lowered.statics):
            if static is not None and grouped.net.leaves[number] in read:
                numbers, statics = together.setdefault(static.dtype, ([], []))
                numbers.append(number)
                statics.append(static)
        self._inputs = list(together.values())
        results = grouped.net.results()
        self._makers = [
            _Copy.like(node, grouped.net, shared)
            for node, shared in zip(results, _shared(results), strict=True)
        ]
        if self.ready.place is not None:
            made = self._finish()
            kept = {s for name in grouped.kept for s in storages(self._value(name))}
            if all(kept.issuperset(storages(value)) for value in made):
                self._fixed = _Fixed(self._makers, made, self.copies)

    def _value(self, name: str) -> Any:
        return self.ready.values[name] if name in self.ready.values else self.lowered.given[name]

    def _finish(self) -> Sequence[Any]:
        grouped = self.lowered.grouped
        with torch.no_grad():
            made: Sequence[Any] = grouped.finish(*[self._value(name) for name in grouped.kept])
        return made

    def __call__(self, leaves: Sequence[Any]) -> Any:
        # The GPU waits for what is before the replay; what is after it has the replay's time.
        for numbers, statics in self._inputs:
            if len(numbers) == 1:
                statics[0].copy_(leaves[numbers[0]], non_blocking=True)
            else:  # by one kernel
                torch._foreach_copy_(statics, [leaves[n] for n in numbers], non_blocking=True)
        self.ready.replay()
        if not self.lowered.is_current():
            self.lowered.refresh()
            self.ready.replay()
        if self._fixed is not None:
            flat = self._fixed(leaves)
        else:
            flat = [
                maker(value, leaves, self.copies)
                for maker, value in zip(self._makers, self._finish(), strict=True)
            ]
        return self.lowered.grouped.net.tree(flat)


@dataclass(frozen=True)
class _Copy:
    """How one output is handed out."""

    leaf: int | None = None
    """It is this input itself."""
    stride: tuple[int, ...] | None = None
    """Strides it has to have; None where those of the kernels will do."""
    tensor: bool = True
    shared: bool = False
    """Its memory is also that of something else, so that it is a copy in any case."""

    @staticmethod
    def like(result: Any, net: Net, shared: bool) -> _Copy:
        if not isinstance(result, Node):
            return _Copy(tensor=False)
        if result.op == "placeholder" and result.name in net.leaves:
            return _Copy(leaf=net.leaves.index(result.name))
        value = result.meta["val"]
        dense = torch.empty_like(value, device="meta").stride() == value.stride()
        return _Copy(stride=tuple(value.stride()) if dense else None, shared=shared or not dense)

    def __call__(self, value: Any, leaves: Sequence[Any], copies: bool) -> Any:
        if not self.tensor:
            return value
        if self.leaf is not None:
            return leaves[self.leaf]
        if self.stride is not None and value.stride() != self.stride:
            return self.empty(value).copy_(value)
        return value.clone() if copies or self.shared else value

    def is_one(self, value: Any, copies: bool) -> bool:
        """Whether it is handed out as a copy."""
        if not self.tensor or self.leaf is not None:
            return False
        return copies or self.shared or (self.stride is not None and value.stride() != self.stride)

    def empty(self, value: torch.Tensor) -> torch.Tensor:
        """For a copy of the strides that it has to have."""
        assert self.stride is not None
        return torch.empty_strided(value.shape, self.stride, dtype=value.dtype, device=value.device)


_MANY = 4
"""Copies that are made by one kernel: for fewer the kernels are launched as quickly as that one."""


class _Fixed:
    """Outputs that are in the same memory after each call: how to hand them out is found once."""

    def __init__(self, makers: Sequence[_Copy], made: Sequence[Any], copies: bool) -> None:
        self._as_they_are = list(made)
        self._inputs = [(n, maker.leaf) for n, maker in enumerate(makers) if maker.leaf is not None]
        self._alone: list[tuple[int, Callable[[], Any]]] = []
        self._together: list[tuple[list[int], list[_Copy], list[torch.Tensor]]] = []
        of_type: dict[Any, list[int]] = {}
        for number, (maker, value) in enumerate(zip(makers, made, strict=True)):
            if maker.is_one(value, copies):
                # What has gaps cannot be copied with others.
                kind = value.dtype if maker.stride is not None else number
                of_type.setdefault(kind, []).append(number)
        for numbers in of_type.values():
            if len(numbers) < _MANY:
                self._alone += [(n, partial(makers[n], made[n], (), True)) for n in numbers]
            else:
                values = [made[n] for n in numbers]
                self._together.append((numbers, [makers[n] for n in numbers], values))

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        flat = self._as_they_are.copy()
        for number, leaf in self._inputs:
            flat[number] = leaves[leaf]
        for number, copy in self._alone:
            flat[number] = copy()
        for numbers, makers, values in self._together:
            copies = [maker.empty(value) for maker, value in zip(makers, values, strict=True)]
            torch._foreach_copy_(copies, values)
            for number, made in zip(numbers, copies, strict=True):
                flat[number] = made
        return flat


def _shared(results: Sequence[Any]) -> list[bool]:
    """Which of the flat outputs look at an input, at a constant, or at what one before them looks
    at: who writes to it, as to a gradient, would change that as well."""
    seen: set[Node] = set()
    found = []
    for result in results:
        base = result
        while isinstance(base, Node) and is_view(base):
            base = base.all_input_nodes[0]
        if not isinstance(base, Node):
            found.append(False)
            continue
        held = base.op == "placeholder" or bool(base.meta.get("constant"))
        found.append(held or base in seen)
        seen.add(base)
    return found


def build(
    lowered: Lowered,
    device: Device,
    runs: Sequence[Run],
    schedule: Schedule,
    *,
    copies: bool = True,
) -> Built:
    """Captures a schedule."""
    with device.settings():
        ready = device.ready(lowered.grouped, runs, schedule, lowered.given)
        return Built(lowered=lowered, ready=ready, schedule=schedule, copies=copies)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.untyped_storage().nbytes() > 0
