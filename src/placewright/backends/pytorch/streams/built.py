"""A module for inputs of certain shapes, ready to be called: traced, grouped, on streams."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    @property
    def fingerprint(self) -> str:
        """Of what the groups do, in their order."""
        text = "\n".join(f"{g.name}{g.inputs}{g.outputs}{g.code}" for g in self.grouped.groups)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def refresh(self) -> None:
        """Takes over the parameters as they are now, where they were folded into something."""
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
    given.update({name: value.detach() for name, value in net.held.items()})
    statics: list[torch.Tensor | None] = []
    for leaf, name in zip(leaves, net.leaves, strict=True):
        statics.append(None if name is None else leaf.detach().clone())
        if name is not None:
            given[name] = statics[-1]
    return Lowered(
        fusion=fusion, grouped=grouped, statics=tuple(statics), given=given, folded=folded
    )


@dataclass(kw_only=True)
class Built:
    """Something to call with the flat inputs."""

    lowered: Lowered
    ready: Ready
    schedule: Schedule
    copies: bool = True
    """Whether outputs are copies; otherwise the next call overwrites them."""
    _outputs: Sequence[Any] | None = None
    """The flat outputs, where they are in the same memory after each call."""
    _makers: list[Any] = field(default_factory=list)
    _inputs: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Number of a leaf of the inputs, and the tensor that it is copied to."""

    def __post_init__(self) -> None:
        statics = enumerate(self.lowered.statics)
        self._inputs = [(number, static) for number, static in statics if static is not None]
        results = self.lowered.grouped.net.results()
        net = self.lowered.grouped.net
        self._makers = [
            _Copy.like(node, net, shared)
            for node, shared in zip(results, _shared(results), strict=True)
        ]
        if self.ready.stays:
            made = self._finish()
            kept = {s for name in self.lowered.grouped.kept for s in storages(self._value(name))}
            if all(kept.issuperset(storages(value)) for value in made):
                self._outputs = made

    def _value(self, name: str) -> Any:
        return self.ready.values[name] if name in self.ready.values else self.lowered.given[name]

    def _finish(self) -> Sequence[Any]:
        grouped = self.lowered.grouped
        with torch.no_grad():
            made: Sequence[Any] = grouped.finish(*[self._value(name) for name in grouped.kept])
        return made

    @property
    def on_gpu(self) -> bool:
        return self.ready.stays

    @property
    def place(self) -> torch.device | None:
        """Of the inputs, where there are any: a GPU that need not be the current one."""
        return self._inputs[0][1].device if self._inputs else None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        # The GPU waits for what is before the replay; what is after it has the replay's time.
        if len(self._inputs) == 1:
            ((number, static),) = self._inputs
            static.copy_(leaves[number], non_blocking=True)
        elif self._inputs:
            torch._foreach_copy_(
                [static for _, static in self._inputs],
                [leaves[number] for number, _ in self._inputs],
                non_blocking=True,
            )
        self.ready.replay()
        made = self._outputs if self._outputs is not None else self._finish()
        flat = [
            maker(value, leaves, self.copies)
            for maker, value in zip(self._makers, made, strict=True)
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
            return torch.empty_strided(
                value.shape, self.stride, dtype=value.dtype, device=value.device
            ).copy_(value)
        return value.clone() if copies or self.shared else value


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
