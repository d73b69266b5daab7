"""The benchmark models of the paper in PyTorch, as training steps; the sizes are TensorFlow's.

Importing this package does not import torch; building a model does.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from placewright.backends.base import check_benchmark_model

if TYPE_CHECKING:
    from placewright.backends.pytorch.program import TorchModel

NAMES: tuple[str, ...] = ("rnnlm", "nmt", "inception_v3")


def build(name: str, *, scale: str = "paper", batch: int | None = None) -> TorchModel:
    """Builds a benchmark model, with example inputs, its loss and its optimizer. Its parameters are
    on `meta`: nothing is allocated.

    Args:
        name: one of `NAMES`.
        scale: `paper` for the sizes of the paper, `small` for the same structure at a size whose
            training step takes a fraction of a second on one CPU core.
        batch: examples per training step; the scale's own when not given.
    """
    check_benchmark_model(name, scale, batch, NAMES)
    import torch

    module = importlib.import_module(f"{__name__}.{name}")
    config = module.CONFIGS[scale]
    if batch is not None:
        config = dataclasses.replace(config, batch=batch)
    with torch.device("meta"):
        model: TorchModel = module.build(config)
    return model
