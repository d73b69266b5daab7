"""Inception-V3 in TensorFlow; `backends/models/inception_v3.py` says what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from placewright.backends.models.inception_v3 import (
    AUXILIARY_AFTER,
    BLOCKS,
    STEM,
    Branch,
    Config,
    Conv,
    Fork,
    Pool,
)
from placewright.backends.tensorflow.models import BenchmarkModel
from placewright.backends.tensorflow.models._layers import (
    Tensor,
    finish,
    scope,
    variable,
    weight,
    zeros,
)

GROUP_RULES: tuple[tuple[str, str], ...] = (
    (r"(stem/\w+)/", r"\1"),
    (r"(mixed_\w+/branch_\d+(?:/fork_\d+)?)/", r"\1"),
    (r"(mixed_\w+/concat)/", r"\1"),
    (r"(auxiliary|classifier)/", r"\1"),
    (r"^(images|labels)$", r"inputs"),
)


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
                    net, [3, 3], layer.kind.upper(), [layer.stride] * 2, padding=_padding(layer)
                )
        channels = max(1, round(layer.channels * self._config.width))
        size = [layer.height, layer.width, net.shape[3], channels]
        kernel = weight(f"{path}/kernel", size)
        with scope(path):
            net = tf.nn.conv2d(net, kernel, layer.stride, _padding(layer))
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
        net = self.layer("auxiliary/layer_1", net, Conv(768, height, width, padded=False))
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


def _padding(layer: Conv | Pool) -> str:
    return "SAME" if layer.padded else "VALID"
