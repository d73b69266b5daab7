"""The benchmark models of the paper in PyTorch, as training steps.

Importing this package does not import torch; building a model does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from placewright.backends.models import NAMES, sized

if TYPE_CHECKING:
    from placewright.backends.pytorch.program import TorchModel

__all__ = ["NAMES", "build"]


def build(name: str, *, scale: str = "paper", batch: int | None = None) -> TorchModel:
    """Builds a benchmark model, with example inputs, its loss and its optimizer. Its parameters are
    on `meta`: nothing is allocated. Takes what `sized` takes."""
    config = sized(name, scale, batch)
    import torch

    with torch.device("meta"):
        model: TorchModel = importlib.import_module(f"{__name__}.{name}").build(config)
    return model
