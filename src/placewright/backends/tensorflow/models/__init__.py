"""The benchmark models of the paper, as TensorFlow training graphs.

`build("nmt")` gives the graph of one training step: forward pass, gradients and the optimizer's
update, with static shapes and a fixed batch. Importing this package does not import TensorFlow;
building a model does.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from dataclasses import dataclass
from typing import Any

from placewright.backends.base import check_benchmark_model
from placewright.errors import MissingExtraError

NAMES: tuple[str, ...] = ("rnnlm", "nmt", "inception_v3")


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
    """Builds a benchmark model in a graph of its own.

    Args:
        name: one of `NAMES`.
        scale: `paper` for the sizes of the paper, `small` for the same structure at a size whose
            training step takes a fraction of a second on one CPU core.
        batch: examples per training step; the scale's own when not given.
    """
    check_benchmark_model(name, scale, batch, NAMES)
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise MissingExtraError("building a benchmark model", "tensorflow") from None
    config = module.CONFIGS[scale]
    if batch is not None:
        config = dataclasses.replace(config, batch=batch)
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
