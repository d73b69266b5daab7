"""RNNLM: a two-layer LSTM language model, unrolled, with a softmax at every time step.

The layers have the form of Jozefowicz et al. (2016), "Exploring the limits of language modeling":
many cells, projected to fewer outputs; dropout on the word vectors as in Zaremba et al. (2014).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the language model."""

    batch: int
    """Sequences per training step."""
    steps: int
    """Time steps that the network is unrolled for."""
    units: int
    """Cells of each LSTM layer."""
    projection: int
    """Outputs of each LSTM layer; also the size of a word vector.

    The gradients of all time steps are summed at the end, so each step's gradient of a kernel is in
    memory until then. Without projection that alone would be 10.7 GB at paper scale.
    """
    vocabulary: int
    """Number of words."""
    layers: int = 2
    """LSTM layers."""
    dropout: float = 0.1
    """Fraction of a word vector that is dropped."""
    learning_rate: float = 1e-3
    """Of Adam."""


CONFIGS: Mapping[str, Config] = {
    "paper": Config(batch=64, steps=40, units=2048, projection=1024, vocabulary=10_000),
    "small": Config(batch=32, steps=20, units=512, projection=256, vocabulary=4_000),
}
