"""Inception-V3 (Szegedy et al., 2016) in training mode, with the auxiliary classifier.

94 convolutions, plus 2 in the auxiliary head; each is followed by batch normalisation and ReLU.
Blocks are named by the grid they work on: 5 is 35 x 35, 6 is 17 x 17, 7 is 8 x 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the image classifier."""

    batch: int
    """Images per training step."""
    pixels: int
    """Height and width of an image; at least 107, or the auxiliary head has nothing left."""
    width: float = 1.0
    """Factor on the number of channels of each convolution."""
    classes: int = 1000
    """Number of labels."""
    auxiliary_weight: float = 0.4
    """Of the auxiliary head's loss."""
    dropout: float = 0.2
    """Fraction of the features that is dropped before the classifier."""
    decay: float = 0.9997
    """Of batch normalisation's moving averages."""
    learning_rate: float = 0.01
    """Of RMSProp."""


CONFIGS: Mapping[str, Config] = {
    "paper": Config(batch=32, pixels=299),
    "small": Config(batch=8, pixels=139, width=0.5, classes=100),
}


class Conv(NamedTuple):
    """A convolution with batch normalisation and ReLU."""

    channels: int
    height: int
    width: int
    stride: int = 1
    padded: bool = True
    """Whether the grid keeps its size (but for the stride)."""


class Pool(NamedTuple):
    """3 x 3 pooling."""

    kind: str
    """`max` or `avg`."""
    stride: int = 1
    padded: bool = True


class Fork(NamedTuple):
    """The end of a branch that splits in two; both results are outputs of the block."""

    first: Conv
    second: Conv


Branch = tuple[Conv | Pool | Fork, ...]
"""Layers one after another; only the last may be a fork."""

STEM: Mapping[str, Conv | Pool] = {
    "conv_1a": Conv(32, 3, 3, stride=2, padded=False),
    "conv_2a": Conv(32, 3, 3, padded=False),
    "conv_2b": Conv(64, 3, 3),
    "pool_3a": Pool("max", stride=2, padded=False),
    "conv_3b": Conv(80, 1, 1),
    "conv_4a": Conv(192, 3, 3, padded=False),
    "pool_5a": Pool("max", stride=2, padded=False),
}


def _block_35(pooled: int) -> tuple[Branch, ...]:
    return (
        (Conv(64, 1, 1),),
        (Conv(48, 1, 1), Conv(64, 5, 5)),
        (Conv(64, 1, 1), Conv(96, 3, 3), Conv(96, 3, 3)),
        (Pool("avg"), Conv(pooled, 1, 1)),
    )


def _block_17(inner: int) -> tuple[Branch, ...]:
    return (
        (Conv(192, 1, 1),),
        (Conv(inner, 1, 1), Conv(inner, 1, 7), Conv(192, 7, 1)),
        (
            Conv(inner, 1, 1),
            Conv(inner, 7, 1),
            Conv(inner, 1, 7),
            Conv(inner, 7, 1),
            Conv(192, 1, 7),
        ),
        (Pool("avg"), Conv(192, 1, 1)),
    )


def _block_8() -> tuple[Branch, ...]:
    fork = Fork(Conv(384, 1, 3), Conv(384, 3, 1))
    return (
        (Conv(320, 1, 1),),
        (Conv(384, 1, 1), fork),
        (Conv(448, 1, 1), Conv(384, 3, 3), fork),
        (Pool("avg"), Conv(192, 1, 1)),
    )


BLOCKS: Mapping[str, tuple[Branch, ...]] = {
    "mixed_5b": _block_35(32),
    "mixed_5c": _block_35(64),
    "mixed_5d": _block_35(64),
    "mixed_6a": (
        (Conv(384, 3, 3, stride=2, padded=False),),
        (Conv(64, 1, 1), Conv(96, 3, 3), Conv(96, 3, 3, stride=2, padded=False)),
        (Pool("max", stride=2, padded=False),),
    ),
    "mixed_6b": _block_17(128),
    "mixed_6c": _block_17(160),
    "mixed_6d": _block_17(160),
    "mixed_6e": _block_17(192),
    "mixed_7a": (
        (Conv(192, 1, 1), Conv(320, 3, 3, stride=2, padded=False)),
        (
            Conv(192, 1, 1),
            Conv(192, 1, 7),
            Conv(192, 7, 1),
            Conv(192, 3, 3, stride=2, padded=False),
        ),
        (Pool("max", stride=2, padded=False),),
    ),
    "mixed_7b": _block_8(),
    "mixed_7c": _block_8(),
}
AUXILIARY_AFTER = "mixed_6e"
