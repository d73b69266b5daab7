"""NMT: an LSTM encoder and decoder with attention, unrolled, with a softmax at every time step.

The attention is additive (Bahdanau et al., 2015) and fed back as by Luong et al. (2015): the top
layer's output attends to the encoder's outputs, what comes of it goes to the softmax and into the
bottom layer's next step. So the decoder itself is one long chain; encoder layers, softmax steps and
gradients of kernels are what can run beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the translation model."""

    batch: int
    """Sentence pairs per training step."""
    source_steps: int
    """Time steps of the encoder."""
    target_steps: int
    """Time steps of the decoder."""
    units: int
    """Cells, and outputs, of each LSTM layer."""
    embedding: int
    """Size of a word vector."""
    attention: int
    """Size of an attention step's output, and of the space in which states are compared."""
    vocabulary: int
    """Number of words of either language."""
    layers: int = 2
    """LSTM layers of the encoder, and of the decoder."""
    learning_rate: float = 1e-3
    """Of Adam."""


CONFIGS: Mapping[str, Config] = {
    # A training step does not fit one 12 GB GPU, as in the paper. What decides is the gradients of
    # the decoder's kernels: 234 MB per time step, all in memory until they are summed.
    "paper": Config(
        batch=64,
        source_steps=45,
        target_steps=45,
        units=2048,
        embedding=512,
        attention=512,
        vocabulary=32_000,
    ),
    "small": Config(
        batch=32,
        source_steps=12,
        target_steps=12,
        units=384,
        embedding=128,
        attention=128,
        vocabulary=4_000,
    ),
}
