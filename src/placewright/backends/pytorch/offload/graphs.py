"""Units whose work is captured once and asked for again in one go (CUDA graphs).

It pays where a unit is many small kernels: a decoder layer on one token is some 25 of them, which
take longer to ask for than to compute. A unit is captured once it has been called some times with
the same shapes; the memory of its inputs and outputs is the same each time then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from placewright.backends.pytorch.offload.links import Link
from placewright.backends.pytorch.offload.values import (
    map_tensors,
    opaque_in,
    tensors_in,
    version_of,
)

logger = logging.getLogger(__name__)

_CALLS_BEFORE = 2
"""Calls with the same shapes before a unit is captured: libraries set themselves up in the first,
and whoever calls only once has nothing from it."""
_MOST_BYTES = 4 * 2**20
"""Of a unit's inputs: with more, asking for kernels one by one takes less than what they do."""


class _Input:
    """Memory for an input; shared by all units that are called with tensors of that form at that
    place, so that what all layers of a model take is copied once."""

    def __init__(self, like: torch.Tensor) -> None:
        self.memory = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._source: torch.Tensor | None = None
        self._version: int | None = None

    def load(self, value: torch.Tensor) -> None:
        version = version_of(value)
        if value is self._source and version == self._version and version is not None:
            return
        self.memory.copy_(value)
        self._source, self._version = value, version

    def forget(self) -> None:
        self._source = None


@dataclass(eq=False)
class _Captured:
    replay: Callable[[], None]
    inputs: list[_Input | torch.Tensor]
    """A tensor is the output of a unit captured before, which is read where it is."""
    outputs: Any
    uses: list[int]
    """Of the memory of each output, while nobody else has it."""
    touched: bool = False
    """Whether it cannot be used again."""


@dataclass(eq=False)
class _Seen:
    caches: tuple[Any, ...]
    """Kept, because their memory is written to."""
    calls: int = 0
    captured: _Captured | None = None
    refused: bool = False


@dataclass(eq=False)
class Graphs:
    """The captured units of a placed module."""

    link: Link
    _seen: dict[str, dict[Hashable, _Seen]] = field(default_factory=dict)
    _inputs: dict[Hashable, _Input] = field(default_factory=dict)
    _outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Outputs of captured units by address."""
    count: int = 0
    """Units captured so far."""

    def run(
        self,
        unit: str,
        addresses: tuple[int, ...],
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls `forward`, which reads and writes weights and caches at some addresses."""
        caches = tuple(opaque_in((args, kwargs)))
        form = self._form(args, kwargs, caches)
        if form is None:
            return forward(*args, **kwargs)
        known = self._seen.setdefault(unit, {})
        key = (addresses, form)
        if key not in known:
            # Caches that are used no more should not be kept for what was captured with them.
            for other in [k for k, seen in known.items() if not _same(seen.caches, caches)]:
                del known[other]
        seen = known.setdefault(key, _Seen(caches))
        seen.calls += 1
        if seen.refused or seen.calls <= _CALLS_BEFORE:
            return forward(*args, **kwargs)
        if seen.captured is None:
            try:
                captured = self._capture(forward, args, kwargs)
            except RuntimeError as fault:
                # What it asks for cannot be captured: it waits for the device, for instance.
                logger.debug("%s is not captured: %s", unit, fault)
                seen.refused = True
                return forward(*args, **kwargs)
            if captured.touched:
                seen.refused = True
                return captured.outputs
            seen.captured = captured
            self.count += 1
            return _handed_out(captured)
        if not self._load(seen.captured, list(tensors_in((args, kwargs)))):
            return forward(*args, **kwargs)
        seen.captured.replay()
        return _handed_out(seen.captured)

    def forget(self) -> None:
        """Weights are elsewhere now."""
        self._seen.clear()
        self._inputs.clear()
        self._outputs.clear()

    def new_pass(self) -> None:
        """Lets go of the tensors that a pass was called with."""
        for place in self._inputs.values():
            place.forget()

    # --- one unit --------------------------------------------------------------------------------

    def _form(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], caches: tuple[Any, ...]
    ) -> Hashable | None:
        """What has to be the same for a captured unit to do; None for what is not captured."""
        if not self.link.captures or torch.is_grad_enabled():
            return None
        if not all(getattr(cache, "is_compileable", False) for cache in caches):
            return None
        leaves = list(tensors_in((args, kwargs)))
        if any(leaf.device != self.link.device for leaf in leaves):
            return None
        if sum(leaf.numel() * leaf.element_size() for leaf in leaves) > _MOST_BYTES:
            return None
        forms = tuple((leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves)
        return forms, tuple(map(id, caches)), repr(_plain((args, dict(kwargs))))

    def _capture(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Captured:
        inputs: list[_Input | torch.Tensor] = []
        memory: list[torch.Tensor] = []

        def fixed(value: torch.Tensor) -> torch.Tensor:
            made = self._outputs.get(value.data_ptr())
            if made is not None and made.shape == value.shape and made.dtype == value.dtype:
                inputs.append(made)
                memory.append(made)
                return made
            form = (len(inputs), value.shape, value.dtype, value.stride())
            place = self._inputs.get(form)
            if place is None:
                place = self._inputs[form] = _Input(value)
            place.load(value)
            inputs.append(place)
            memory.append(place.memory)
            return place.memory

        given, named = map_tensors((args, dict(kwargs)), fixed)
        before = [version_of(value) for value in memory]
        replay, outputs = self.link.capture(lambda: forward(*given, **named))
        changed = before != [version_of(value) for value in memory] or None in before
        taken = {value.untyped_storage().data_ptr() for value in memory}
        made = list(tensors_in(outputs))
        for theirs, own, version in zip(
            tensors_in((args, kwargs)), memory, before, strict=True
        ):  # what it wrote to them is for whoever called it
            if version is None or version_of(own) != version:
                theirs.copy_(own)
        if changed or any(output.untyped_storage().data_ptr() in taken for output in made):
            # It writes to its inputs, or hands them on: their memory is not its own.
            outputs = map_tensors(outputs, torch.clone)
            return _Captured(replay, inputs, outputs, [], touched=True)
        for output in made:
            self._outputs[output.data_ptr()] = output
        return _Captured(replay, inputs, outputs, [_uses(output) for output in made])

    def _load(self, captured: _Captured, leaves: list[torch.Tensor]) -> bool:
        """Whether what was captured can be done now; its inputs are where it reads them then."""
        outputs = tensors_in(captured.outputs)
        if any(_uses(o) > uses for o, uses in zip(outputs, captured.uses, strict=True)):
            return False  # somebody holds what they were the last time
        pairs = list(zip(captured.inputs, leaves, strict=True))
        if any(isinstance(p, torch.Tensor) and p.data_ptr() != v.data_ptr() for p, v in pairs):
            return False
        for place, value in pairs:
            if isinstance(place, _Input):
                place.load(value)
        return True


def _handed_out(captured: _Captured) -> Any:
    # A tensor of its own for each call: whether one is still held can be seen of its memory.
    return map_tensors(captured.outputs, lambda output: output.view_as(output))


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _plain(value: Any) -> Any:
    """Of arguments, what is neither tensors nor caches: it decides what is computed."""
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, bool | int | float | str | torch.dtype | type(None)):
        return value
    return type(value).__name__


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
