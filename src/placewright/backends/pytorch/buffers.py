"""Buffers that a module assigns anew in a call, as in `self.mean = 0.9 * self.mean + x.mean()`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from placewright.errors import ModelError


@contextlib.contextmanager
def written_in_place(module: torch.nn.Module) -> Iterator[None]:
    """For the forward pass of an export: what is assigned to a buffer within is written to the
    buffer at the end. torch leaves such an assignment to a module within another out of the graph
    without a word, and what runs would have the first value for ever."""
    before = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    yield
    assigned = []
    for owner, name, buffer in before:
        now = owner._buffers.get(name)
        if isinstance(now, torch.Tensor) and now is not buffer:
            if now.shape != buffer.shape or now.dtype != buffer.dtype:
                raise ModelError(f"a buffer, {name}, becomes a tensor of another shape or type")
            assigned.append((owner, name, buffer, now.detach()))
    if len(assigned) > 1:  # two may change places
        assigned = [(owner, name, buffer, now.clone()) for owner, name, buffer, now in assigned]
    for owner, name, buffer, now in assigned:
        owner._buffers[name] = buffer
        buffer.copy_(now)
