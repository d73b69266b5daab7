"""RNNLM in TensorFlow; `backends/models/rnnlm.py` says what it is."""

from __future__ import annotations

import tensorflow as tf

from placewright.backends.models.rnnlm import Config
from placewright.backends.tensorflow.models import BenchmarkModel
from placewright.backends.tensorflow.models._layers import (
    Lstm,
    LstmState,
    finish,
    lookup,
    scope,
    variable,
    weight,
    zeros,
)

GROUP_RULES: tuple[tuple[str, str], ...] = (
    (r"embedding/step_(\d+)/", r"embedding/step_\1"),
    (r"embedding/(table|lookup_\d+)(/|_grad/|$)", r"embedding/variables"),
    (r"lstm/layer_(\d+)/step_(\d+)/", r"lstm/layer_\1/step_\2"),
    (r"lstm/layer_(\d+)/(kernel|bias|projection)(/|$)", r"lstm/layer_\1/variables"),
    (r"softmax/step_(\d+)/", r"softmax/step_\1"),
    (r"softmax/(kernel|bias)(/|$)", r"softmax/variables"),
    (r"^tokens(/|$)", "inputs"),
)


def build(config: Config) -> BenchmarkModel:
    """Builds the training step; feed `tokens`, int32 [steps + 1, batch]."""
    with tf.Graph().as_default():
        tokens = tf.compat.v1.placeholder(tf.int32, [config.steps + 1, config.batch], name="tokens")
        # Time comes first, so that a step's words lie together in memory.
        words = tf.unstack(tokens, name="tokens/unstack")

        width = config.projection
        table = variable("embedding/table", [config.vocabulary, width])
        layers = [Lstm(f"lstm/layer_{i}", width, config.units, width) for i in range(config.layers)]
        softmax_kernel = weight("softmax/kernel", [width, config.vocabulary])
        softmax_bias = zeros("softmax/bias", [config.vocabulary])

        states: list[LstmState | None] = [None] * config.layers
        losses = []
        for t in range(config.steps):
            output = lookup(f"embedding/lookup_{t}", table, words[t])
            with scope(f"embedding/step_{t}"):
                output = tf.nn.dropout(output, config.dropout, seed=t)
            for i, layer in enumerate(layers):
                states[i] = state = layer.step(t, [output], states[i])
                output = state.output
            with scope(f"softmax/step_{t}"):
                logits = tf.nn.bias_add(tf.matmul(output, softmax_kernel), softmax_bias)
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(words[t + 1], logits)
                losses.append(tf.reduce_sum(loss))

        return finish(
            "rnnlm",
            losses,
            1.0 / (config.steps * config.batch),
            tf.compat.v1.train.AdamOptimizer(config.learning_rate),
            GROUP_RULES,
        )
