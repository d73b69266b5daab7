"""The benchmark models of the paper in PyTorch, as training steps; the sizes are TensorFlow's.

Importing this package does not import torch; building a model does.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from placewright.errors import ModelError

if TYPE_CHECKING:
    from placewright.backends.pytorch.program import TorchModel

NAMES: tuple[str, ...] = ("rnnlm", "nmt", "inception_v3")
SCALES: tuple[str, ...] = ("paper", "small")


def build(name: str, *, scale: str = "paper", batch: int | None = None) -> TorchModel:
    """Builds a benchmark model, with example inputs, its loss and its optimizer. Its parameters are
    on `meta`: nothing is allocated.

    Args:
        name: one of `NAMES`.
        scale: `paper` for the sizes of the paper, `small` for the same structure at a size whose
            training step takes a fraction of a second on one CPU core.
        batch: examples per training step; the scale's own when not given.
    """
    if name not in NAMES:
        raise ModelError(f"unknown model {name!r}; choose from {', '.join(NAMES)}")
    if scale not in SCALES:
        raise ModelError(f"unknown scale {scale!r}; choose from {', '.join(SCALES)}")
    if batch is not None and batch < 1:
        raise ModelError(f"batch must be at least 1, not {batch}")
    import torch

    module = importlib.import_module(f"{__name__}.{name}")
    config = module.CONFIGS[scale]
    if batch is not None:
        config = dataclasses.replace(config, batch=batch)
    with torch.device("meta"):
        model: TorchModel = module.build(config)
    return model
