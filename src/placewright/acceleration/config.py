"""How the fastest way to run a module is searched for, and what the ways are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright import methods
from placewright.backends.pytorch.exporting import Inputs
from placewright.backends.pytorch.streams.device import Device, Gpu
from placewright.backends.pytorch.streams.groups import Fusion
from placewright.errors import SearchError, check_settings

EAGER, ONE, STREAMS = "eager", "one stream", "streams"
PLAIN = "one stream, plain"
"""The module as it is, captured: what streams and fused kernels are compared with."""
PLAIN_STREAMS = "streams, plain"
"""The module's own ops on streams, by list scheduling alone."""


@dataclass(frozen=True, kw_only=True)
class AccelerateConfig:
    """How the fastest way to run a module is searched for."""

    streams: int = 6
    """Streams at most."""
    seconds: float = 60.0
    """For the whole search; it ends early where nothing is to be gained. Compiling a region that
    was begun is not cut short."""
    method: str = "local-search"
    """What improves on list scheduling by real trials: names of methods, separated by commas, or
    `list` for nothing."""
    fusion: Fusion = Fusion.REGIONS
    """How much is fused at most. `none` keeps results bitwise those of the module."""
    seed: int = 0
    """Of the methods."""
    rounds: int = 30
    """Calls of each candidate in the final comparison, in turns."""
    copy_outputs: bool = True
    """Whether outputs are copies. Without, the next call overwrites them."""
    most_shapes: int = 8
    """Shapes of inputs that are captured; further ones run as the module itself."""
    memory_bytes: float = math.inf
    """For what is computed on the way, in one call: counted over all streams together. As none can
    have what another gave back, more than that may be taken from the GPU."""

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= 16:
            raise SearchError(f"streams must be from 1 to 16, not {self.streams}")
        if not self.seconds > 0:
            raise SearchError(f"seconds must be positive, not {self.seconds}")
        if self.rounds < 1 or self.most_shapes < 1:
            raise SearchError("rounds and most_shapes must be at least 1")
        if self.method != "list":
            methods.parse(self.method)
        if self.fusion not in set(Fusion):
            raise SearchError(f"fusion is {self.fusion!r}; there are {', '.join(Fusion)}")
        object.__setattr__(self, "fusion", Fusion(self.fusion))  # its text will do


def configured(
    function: Callable[..., Any],
    config: AccelerateConfig | None,
    settings: Mapping[str, Any],
    **fixed: Any,
) -> AccelerateConfig:
    """The config of a call of a function whose further keywords are fields of it, but for those
    that the function itself has fixed."""
    own = [entry.name for entry in fields(AccelerateConfig) if entry.name not in fixed]
    check_settings(function, settings, own)
    return replace(config or AccelerateConfig(), **settings, **fixed)


def name_of(device: Device) -> str:
    """For people."""
    return torch.cuda.get_device_name(device.index) if isinstance(device, Gpu) else device.kind


def device_of(model: torch.nn.Module, example: Inputs, config: AccelerateConfig) -> Device | None:
    leaves = [v for v in pytree.tree_leaves(tuple(example)) if torch.is_tensor(v)]
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    index = next((t.device.index for t in tensors if t.device.type == "cuda"), None)
    if index is None:
        return None
    return Gpu(index=index, limit_bytes=config.memory_bytes)
