"""What is the same in every framework of the benchmark models of the paper: their sizes."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from placewright.errors import ModelError

NAMES: tuple[str, ...] = ("rnnlm", "nmt", "inception_v3")
SCALES: tuple[str, ...] = ("paper", "small")
"""`paper` for the sizes of the paper, `small` for the same structure at a size whose training step
takes a fraction of a second on one CPU core."""


def sized(name: str, scale: str = "paper", batch: int | None = None) -> Any:
    """The `Config` of a benchmark model. `batch`: examples per training step; the scale's own when
    not given."""
    if name not in NAMES:
        raise ModelError(f"unknown model {name!r}; choose from {', '.join(NAMES)}")
    if scale not in SCALES:
        raise ModelError(f"unknown scale {scale!r}; choose from {', '.join(SCALES)}")
    if batch is not None and batch < 1:
        raise ModelError(f"batch must be at least 1, not {batch}")
    config = importlib.import_module(f"{__name__}.{name}").CONFIGS[scale]
    return config if batch is None else dataclasses.replace(config, batch=batch)
