"""Inception-V3 (Szegedy et al., 2016) in training mode, with the auxiliary classifier.

94 convolutions, plus 2 in the auxiliary head; each is followed by batch normalisation and ReLU.
Blocks are named by the grid they work on: 5 is 35 x 35, 6 is 17 x 17, 7 is 8 x 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from placewright.backends.tensorflow.models import BenchmarkModel
from placewright.backends.tensorflow.models._layers import (
    Tensor,
    finish,
    scope,
    variable,
    weight,
    zeros,
)


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

GROUP_RULES: tuple[tuple[str, str], ...] = (
    (r"(stem/\w+)/", r"\1"),
    (r"(mixed_\w+/branch_\d+(?:/fork_\d+)?)/", r"\1"),
    (r"(mixed_\w+/concat)/", r"\1"),
    (r"(auxiliary|classifier)/", r"\1"),
    (r"^(images|labels)$", r"inputs"),
)


class Conv(NamedTuple):
    """A convolution with batch normalisation and ReLU."""

    channels: int
    height: int
    width: int
    stride: int = 1
    padding: str = "SAME"


class Pool(NamedTuple):
    """3 x 3 pooling."""

    kind: str
    """`MAX` or `AVG`."""
    stride: int = 1
    padding: str = "SAME"


class Fork(NamedTuple):
    """The end of a branch that splits in two; both results are outputs of the block."""

    first: Conv
    second: Conv


Branch = tuple[Conv | Pool | Fork, ...]
"""Layers one after another; only the last may be a fork."""

STEM: Mapping[str, Conv | Pool] = {
    "conv_1a": Conv(32, 3, 3, stride=2, padding="VALID"),
    "conv_2a": Conv(32, 3, 3, padding="VALID"),
    "conv_2b": Conv(64, 3, 3),
    "pool_3a": Pool("MAX", stride=2, padding="VALID"),
    "conv_3b": Conv(80, 1, 1),
    "conv_4a": Conv(192, 3, 3, padding="VALID"),
    "pool_5a": Pool("MAX", stride=2, padding="VALID"),
}


def _block_35(pooled: int) -> tuple[Branch, ...]:
    return (
        (Conv(64, 1, 1),),
        (Conv(48, 1, 1), Conv(64, 5, 5)),
        (Conv(64, 1, 1), Conv(96, 3, 3), Conv(96, 3, 3)),
        (Pool("AVG"), Conv(pooled, 1, 1)),
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
        (Pool("AVG"), Conv(192, 1, 1)),
    )


def _block_8() -> tuple[Branch, ...]:
    fork = Fork(Conv(384, 1, 3), Conv(384, 3, 1))
    return (
        (Conv(320, 1, 1),),
        (Conv(384, 1, 1), fork),
        (Conv(448, 1, 1), Conv(384, 3, 3), fork),
        (Pool("AVG"), Conv(192, 1, 1)),
    )


BLOCKS: Mapping[str, tuple[Branch, ...]] = {
    "mixed_5b": _block_35(32),
    "mixed_5c": _block_35(64),
    "mixed_5d": _block_35(64),
    "mixed_6a": (
        (Conv(384, 3, 3, stride=2, padding="VALID"),),
        (Conv(64, 1, 1), Conv(96, 3, 3), Conv(96, 3, 3, stride=2, padding="VALID")),
        (Pool("MAX", stride=2, padding="VALID"),),
    ),
    "mixed_6b": _block_17(128),
    "mixed_6c": _block_17(160),
    "mixed_6d": _block_17(160),
    "mixed_6e": _block_17(192),
    "mixed_7a": (
        (Conv(192, 1, 1), Conv(320, 3, 3, stride=2, padding="VALID")),
        (
            Conv(192, 1, 1),
            Conv(192, 1, 7),
            Conv(192, 7, 1),
            Conv(192, 3, 3, stride=2, padding="VALID"),
        ),
        (Pool("MAX", stride=2, padding="VALID"),),
    ),
    "mixed_7b": _block_8(),
    "mixed_7c": _block_8(),
}
AUXILIARY_AFTER = "mixed_6e"


def build(config: Config) -> BenchmarkModel:
    """Builds the training step.

    Feed `images`, float32 [batch, pixels, pixels, 3], and `labels`, int32 [batch].
    """
    with tf.Graph().as_default():
        shape = [config.batch, config.pixels, config.pixels, 3]
        net = tf.compat.v1.placeholder(tf.float32, shape, name="images")
        labels = tf.compat.v1.placeholder(tf.int32, [config.batch], name="labels")
        network = _Network(config)
        for name, layer in STEM.items():
            net = network.layer(f"stem/{name}", net, layer)
        losses = []
        for name, branches in BLOCKS.items():
            net = network.block(name, net, branches)
            if name == AUXILIARY_AFTER:
                losses.append(network.auxiliary(net, labels))
        losses.append(network.classifier(net, labels))
        return finish(
            "inception_v3",
            losses,
            1.0 / config.batch,
            # What the network was published with. It keeps two slots per variable, as Adam does.
            tf.compat.v1.train.RMSPropOptimizer(
                config.learning_rate, decay=0.9, momentum=0.9, epsilon=1.0
            ),
            GROUP_RULES,
            network.updates,
        )


class _Network:
    """Adds layers to the graph and collects the updates of the moving averages."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.updates: list[Any] = []

    def block(self, name: str, net: Tensor, branches: Sequence[Branch]) -> Tensor:
        outputs = []
        for i, branch in enumerate(branches):
            outputs += self._branch(f"{name}/branch_{i}", net, branch)
        with scope(f"{name}/concat"):
            return tf.concat(outputs, axis=3)

    def _branch(self, path: str, net: Tensor, branch: Branch) -> list[Tensor]:
        for i, layer in enumerate(branch):
            if isinstance(layer, Fork):
                return [
                    self.layer(f"{path}/fork_{k}/layer_{i}", net, end)
                    for k, end in enumerate(layer)
                ]
            net = self.layer(f"{path}/layer_{i}", net, layer)
        return [net]

    def layer(self, path: str, net: Tensor, layer: Conv | Pool) -> Tensor:
        if isinstance(layer, Pool):
            with scope(path):
                return tf.nn.pool(
                    net, [3, 3], layer.kind, [layer.stride] * 2, padding=layer.padding
                )
        channels = max(1, round(layer.channels * self._config.width))
        size = [layer.height, layer.width, net.shape[3], channels]
        kernel = weight(f"{path}/kernel", size)
        with scope(path):
            net = tf.nn.conv2d(net, kernel, layer.stride, layer.padding)
        return self._normalise(path, net)

    def _normalise(self, path: str, net: Tensor) -> Tensor:
        """Batch normalisation with the batch's own moments, and ReLU.

        As published, there is an offset to learn but no scale: the next layer's kernel has one.
        """
        channels = net.shape[3]
        offset = zeros(f"{path}/offset", [channels])
        averages = (
            variable(f"{path}/mean", [channels], tf.compat.v1.zeros_initializer(), trainable=False),
            variable(
                f"{path}/variance", [channels], tf.compat.v1.ones_initializer(), trainable=False
            ),
        )
        with scope(path):
            # Version 2, because version 3 has one more output, a GPU's scratch space, whose shape
            # is not static. Mean and variance are inputs outside training only.
            normed = tf.raw_ops.FusedBatchNormV2(
                x=net, scale=tf.ones([channels]), offset=offset, mean=[], variance=[], epsilon=1e-3
            )
            moments = (normed.batch_mean, normed.batch_variance)
            for average, moment in zip(averages, moments, strict=True):
                change = (average.value() - moment) * (1.0 - self._config.decay)
                self.updates.append(average.assign_sub(change, read_value=False))
            return tf.nn.relu(normed.y)

    def auxiliary(self, net: Tensor, labels: Tensor) -> Tensor:
        """The loss of a small classifier in the middle, which helps the lower layers to train."""
        with scope("auxiliary"):
            net = tf.nn.avg_pool2d(net, 5, 3, "VALID")
        net = self.layer("auxiliary/layer_0", net, Conv(128, 1, 1))
        # A kernel as large as what is left of the grid, 5 x 5 at the published size.
        _, height, width, _ = net.shape
        net = self.layer("auxiliary/layer_1", net, Conv(768, height, width, padding="VALID"))
        with scope("auxiliary"):
            net = tf.squeeze(net, [1, 2])
        return self._loss("auxiliary", net, labels, self._config.auxiliary_weight)

    def classifier(self, net: Tensor, labels: Tensor) -> Tensor:
        with scope("classifier"):
            net = tf.reduce_mean(net, axis=[1, 2])
            net = tf.nn.dropout(net, self._config.dropout, seed=0)
        return self._loss("classifier", net, labels, 1.0)

    def _loss(self, path: str, net: Tensor, labels: Tensor, factor: float) -> Tensor:
        """`factor` x the cross-entropy of a linear classifier, summed over the batch."""
        kernel = weight(f"{path}/kernel", [net.shape[1], self._config.classes])
        bias = zeros(f"{path}/bias", [self._config.classes])
        with scope(path):
            logits = tf.nn.bias_add(tf.matmul(net, kernel), bias)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            return tf.reduce_sum(loss) * factor
