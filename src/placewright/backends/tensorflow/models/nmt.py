"""NMT in TensorFlow; `backends/models/nmt.py` says what it is."""

from __future__ import annotations

import tensorflow as tf

from placewright.backends.models.nmt import Config
from placewright.backends.tensorflow.models import BenchmarkModel
from placewright.backends.tensorflow.models._layers import (
    Lstm,
    LstmState,
    Tensor,
    finish,
    lookup,
    scope,
    variable,
    weight,
    zeros,
)

GROUP_RULES: tuple[tuple[str, str], ...] = (
    (r"(source|target)_embedding/", r"\1_embedding/variables"),
    (r"(encoder|decoder)/layer_(\d+)/step_(\d+)/", r"\1/layer_\2/step_\3"),
    (r"(encoder|decoder)/layer_(\d+)/(kernel|bias)(/|$)", r"\1/layer_\2/variables"),
    (r"attention/(memory|step_\d+)/", r"attention/\1"),
    (r"attention/(keys|query|score|output)(/|$)", r"attention/variables"),
    (r"softmax/step_(\d+)/", r"softmax/step_\1"),
    (r"softmax/(kernel|bias)(/|$)", r"softmax/variables"),
    (r"^(source|target)_tokens(/|$)", "inputs"),
)


def build(config: Config) -> BenchmarkModel:
    """Builds the training step.

    Feed `source_tokens`, int32 [source_steps, batch], and `target_tokens`,
    int32 [target_steps + 1, batch], whose first row is the start symbol.
    """
    with tf.Graph().as_default():
        source = _words("source_tokens", config.source_steps, config.batch)
        target = _words("target_tokens", config.target_steps + 1, config.batch)
        states, outputs = _encode(config, source)
        losses = _decode(config, target, states, outputs)
        return finish(
            "nmt",
            losses,
            1.0 / (config.target_steps * config.batch),
            tf.compat.v1.train.AdamOptimizer(config.learning_rate),
            GROUP_RULES,
        )


def _words(name: str, steps: int, batch: int) -> list[Tensor]:
    """The words of each time step, [batch]. Time comes first, so that they lie together."""
    tokens = tf.compat.v1.placeholder(tf.int32, [steps, batch], name=name)
    words: list[Tensor] = tf.unstack(tokens, name=f"{name}/unstack")
    return words


def _encode(config: Config, source: list[Tensor]) -> tuple[list[LstmState | None], list[Tensor]]:
    """Final state of each layer, and the top layer's output at each step."""
    table = variable("source_embedding/table", [config.vocabulary, config.embedding])
    layers = [
        Lstm(f"encoder/layer_{i}", config.units if i else config.embedding, config.units)
        for i in range(config.layers)
    ]
    states: list[LstmState | None] = [None] * config.layers
    outputs = []
    for t, words in enumerate(source):
        output = lookup(f"source_embedding/step_{t}", table, words)
        for i, layer in enumerate(layers):
            states[i] = state = layer.step(t, [output], states[i])
            output = state.output
        outputs.append(output)
    return states, outputs


def _decode(
    config: Config, target: list[Tensor], states: list[LstmState | None], memory: list[Tensor]
) -> list[Tensor]:
    """The summed loss of each step. `states` start the decoder; `memory` is what it attends to."""
    table = variable("target_embedding/table", [config.vocabulary, config.embedding])
    layers = [
        Lstm(
            f"decoder/layer_{i}",
            config.units if i else config.embedding + config.attention,
            config.units,
        )
        for i in range(config.layers)
    ]
    attention = _Attention(config, memory)
    softmax_kernel = weight("softmax/kernel", [config.attention, config.vocabulary])
    softmax_bias = zeros("softmax/bias", [config.vocabulary])

    losses = []
    with scope("attention/start"):
        attended = tf.zeros([config.batch, config.attention])
    for t in range(config.target_steps):
        inputs = [lookup(f"target_embedding/step_{t}", table, target[t]), attended]
        for i, layer in enumerate(layers):
            states[i] = state = layer.step(t, inputs, states[i])
            inputs = [state.output]
        attended = attention.step(t, *inputs)
        with scope(f"softmax/step_{t}"):
            logits = tf.nn.bias_add(tf.matmul(attended, softmax_kernel), softmax_bias)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(target[t + 1], logits)
            losses.append(tf.reduce_sum(loss))
    return losses


class _Attention:
    """Additive attention over the encoder's outputs.

    Shapes: b batch, s source step, u units, a attention.
    """

    def __init__(self, config: Config, memory: list[Tensor]) -> None:
        keys_kernel = weight("attention/keys", [config.units, config.attention])
        self._query_kernel = weight("attention/query", [config.units, config.attention])
        self._score_kernel = weight("attention/score", [config.attention])
        self._output_kernel = weight("attention/output", [2 * config.units, config.attention])
        with scope("attention/memory"):
            self._memory_bsu = tf.stack(memory, axis=1)
            flat = tf.reshape(self._memory_bsu, [-1, config.units])
            keys = tf.matmul(flat, keys_kernel)
            self._keys_bsa = tf.reshape(keys, [config.batch, len(memory), config.attention])

    def step(self, t: int, state_bu: Tensor) -> Tensor:
        """What the decoder's output says about the encoder's: [batch, attention]."""
        with scope(f"attention/step_{t}"):
            query_b1a = tf.expand_dims(tf.matmul(state_bu, self._query_kernel), 1)
            energy_bsa = tf.tanh(self._keys_bsa + query_b1a)
            score_bs = tf.reduce_sum(energy_bsa * self._score_kernel, axis=2)
            weight_b1s = tf.expand_dims(tf.nn.softmax(score_bs), 1)
            context_bu = tf.squeeze(tf.matmul(weight_b1s, self._memory_bsu), axis=1)
            both = tf.concat([context_bu, state_bu], axis=1)
            return tf.tanh(tf.matmul(both, self._output_kernel))
