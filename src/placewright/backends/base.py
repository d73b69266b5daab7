"""What every backend speaks: how a model is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is read where it leaves something open."""

    scale: str = "paper"
    """Size of a benchmark model: 'paper', or 'small' for quick trials."""
    batch: int | None = None
    """Batch size: binds the unknown first dimension of the inputs."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Binds an unknown dimension of an input; see the error. `{"x.1": 128}` is dimension 1 of input
    `x`; `{"x": 128}` will do where only one is open."""
    signature: str | None = None
    """Which signature of a SavedModel to read."""
    fetches: tuple[str, ...] = ()
    """Keep only what this op needs, such as the train op. By default the training step where one is
    known, otherwise everything."""
