"""The benchmark models of the paper, as TensorFlow training graphs.

`build("nmt")` gives the graph of one training step: forward pass, gradients and the optimizer's
update, with static shapes and a fixed batch. Importing this package does not import TensorFlow;
building a model does.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

from placewright.backends.models import NAMES, sized
from placewright.errors import MissingExtraError

__all__ = ["NAMES", "BenchmarkModel", "build"]


@dataclass(frozen=True, kw_only=True)
class BenchmarkModel:
    """A training step, and how its ops are grouped."""

    name: str
    """One of `NAMES`."""
    graph: Any
    """The `tf.Graph`."""
    loss: str
    """Name of the loss tensor, such as `loss:0`."""
    train_op: str
    """Name of the op that runs one training step."""
    init_op: str
    """Name of the op that initialises all variables; not part of the training step."""
    group_rules: tuple[tuple[str, str], ...]
    """(regular expression searched for in an op's name, label of its group); the first match wins.

    A gradient or optimizer op has the name of its forward op or variable inside its own, so the
    same rules hold for the whole training step.
    """


def build(name: str, *, scale: str = "paper", batch: int | None = None) -> BenchmarkModel:
    """Builds a benchmark model in a graph of its own. Takes what `sized` takes."""
    config = sized(name, scale, batch)
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise MissingExtraError("building a benchmark model", "tensorflow") from None
    # Its optimizers call each other in ways that TensorFlow itself warns of.
    log = logging.getLogger("tensorflow")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        model = module.build(config)
    finally:
        log.setLevel(level)
    assert isinstance(model, BenchmarkModel)
    return model
