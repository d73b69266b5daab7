"""Predicted training steps on one H200 beside measured ones, eager and captured in a CUDA graph.

The measured steps are PyTorch's (TF32, Adam). The graphs are those of the same models in Keras,
with what PyTorch does in one kernel made one op: batch and layer normalization, activations, a step
of a recurrent layer, the optimizer for a group of tensors.

    python -m benchmarks.overhead --csv benchmarks/results/overhead/h200.csv
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Row, made_by, markdown, marked, write_csv
from placewright.backends import load
from placewright.cluster import Cluster
from placewright.costs import estimate_costs
from placewright.graph import Graph, Work, frozen
from placewright.placement import Placement
from placewright.problem import ProblemConfig, make_problem
from placewright.simulator import Simulator, Timeline

BATCH = 32
TENSORS_A_KERNEL = 36
"""Of a fused optimizer, as many as fit the arguments of a kernel."""

# What PyTorch's steps have and the graphs do not tell; fitted to the measured steps.
OPS_EACH = 1.7
"""Ops that the host thread issues eagerly for an op of the graph: modules, autograd's own nodes,
gradients that are added up."""
OPS_A_VARIABLE = 4.2
"""The same for each variable: its gradient is kept and set to zero, the optimizer makes lists of
tensors and goes through these in 12 passes."""
KERNEL_A_TIME_STEP = 0.4
"""A step of a recurrent layer against a kernel like the others, forward or back."""


class Step(NamedTuple):
    """A training step, and its milliseconds on one H200 as measured."""

    model: str
    eager: float
    captured: float


FITTED = """\
This describes the nine steps and tests nothing: the shares of the preset `h200` were fitted to the
captured ones, the numbers of what PyTorch issues to the eager ones. No model was held out."""

MEASURED = (
    Step("ResNet50", 20.0, 17.1),
    Step("MobileNetV3Small", 21.7, 5.3),
    Step("EfficientNetB0", 25.8, 17.6),
    Step("DenseNet121", 41.0, 26.0),
    Step("InceptionV3", 38.3, 31.7),
    Step("transformer", 10.1, 6.7),
    Step("bert", 31.1, 25.2),
    Step("lstm_gru", 2.7, 0.51),
    Step("dlrm", 5.1, 2.3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="write the table here as well")
    parser.add_argument("--graphs", type=Path, help="keep the graphs here, and take them from here")
    args = parser.parse_args()
    rows: list[Row] = []
    for step in MEASURED:
        graph = graph_of(step.model, args.graphs)
        for mode, measured in (("eager", step.eager), ("captured", step.captured)):
            timeline = predicted(graph, mode)
            seconds = timeline.step_seconds
            parts = timeline.path_parts
            factor = max(1e3 * seconds / measured, measured / (1e3 * seconds))
            rows.append(
                {
                    "model": step.model,
                    "mode": mode,
                    "measured_ms": measured,
                    "predicted_ms": round(1e3 * seconds, 3),
                    "factor": round(factor, 2),
                    "overhead_share": round(parts.overhead / parts.total, 3),
                }
            )
            print(*rows[-1].values(), flush=True)
    print()
    print(overhead_table(rows))
    worst = max(rows, key=lambda row: float(row["factor"]))
    print(f"\nworst: {worst['model']}, {worst['mode']}, by {worst['factor']}")
    if args.csv is not None:
        write_csv(args.csv, rows)
        page = args.csv.with_name("README.md")
        text = f"# Steps of one H200\n\n{__doc__}\n{FITTED}\n\n{made_by()}"
        page.write_text(f"{text}\n\n{marked('overhead', overhead_table(rows))}\n", "utf-8")


def overhead_table(rows: Sequence[Row]) -> str:
    heading = ["model", "mode", "measured ms", "predicted ms", "factor", "overhead"]
    lines = [
        [
            *(row[key] for key in ("model", "mode", "measured_ms")),
            f"{float(row['predicted_ms']):.3g}",
            row["factor"],
            f"{float(row['overhead_share']):.0%}",
        ]
        for row in rows
    ]
    return markdown(heading, lines, texts=2)


def predicted(graph: Graph, mode: str) -> Timeline:
    """All on the GPU."""
    cluster = dataclasses.replace(
        Cluster.load("h200"), issue={"eager": "host", "captured": "none"}[mode]
    )
    graph, seconds = as_in_pytorch(graph, cluster, fused=mode == "captured")
    costs = estimate_costs(graph, cluster)
    own = np.where(np.isnan(seconds), costs.op_seconds, seconds)
    # The host has more to do than to start kernels, which alone take gaps of the device.
    kernels, _ = as_in_pytorch(graph, cluster, fused=mode == "captured", host=False)
    gaps = estimate_costs(kernels, cluster).gap_seconds
    costs = dataclasses.replace(costs, op_seconds=frozen(own), gap_seconds=gaps)
    problem = make_problem(graph, cluster, ProblemConfig(groups=1))
    problem = dataclasses.replace(problem, costs=costs)
    gpu = cluster.device_number("gpu:0")
    return Simulator(problem).timeline(Placement.of(problem, [gpu] * problem.num_groups))


def as_in_pytorch(
    graph: Graph, cluster: Cluster, *, fused: bool, host: bool = True
) -> tuple[Graph, Any]:
    """The graph with its ops' shares of PyTorch's kernels, or of what the host issues, and their
    seconds where they are not those of the op by itself, [kinds, N]."""
    works = graph.work != Work.NONE
    launches = works.astype(np.float64)
    launches[graph.owned_bytes <= 64] = 0.0  # numbers that the host reckons with
    seconds = np.full((len(cluster.kinds), graph.num_ops), math.nan)
    bandwidth = np.array([[k.memory_bandwidth * k.share("update")] for k in cluster.kinds])

    # The optimizer: in one kernel it reads a parameter, its gradient and two moments and writes
    # three of these; in 12 passes it reads and writes 21 tensors of that size.
    adam = _named(graph, r"(^|/)adam(_\d+)?/") & works
    recurrent = _named(graph, r"(^|/)(lstm|gru)(_\d+)?(_1)?/") & works & ~adam
    variables = int((graph.param_bytes > 0).sum())
    passes, tensors = (1, 7) if fused else (12, 21)
    kernels = float(passes * math.ceil(variables / TENSORS_A_KERNEL))
    if host and not fused:
        launches *= OPS_EACH
        kernels = OPS_A_VARIABLE * variables
    bytes_moved = tensors * int(graph.param_bytes.sum())
    _share(launches, seconds, adam, kernels, bytes_moved / bandwidth)

    # A recurrent layer: a part of a kernel for each time step, forward and back, in each of two.
    if recurrent.any():
        recurrent |= works & np.array([type_ == "AddN" for type_ in graph.op_types])
        steps = 2 * 2 * 50 * (OPS_EACH if host and not fused else 1.0)
        _share(launches, seconds, recurrent, KERNEL_A_TIME_STEP * steps,
               np.zeros((len(cluster.kinds), 1)))  # fmt: skip
    anywhere = frozen(np.zeros(graph.num_ops, dtype=np.bool_))
    return dataclasses.replace(graph, launches=frozen(launches), restricted=anywhere), seconds


def _share(launches: Any, seconds: Any, members: Any, kernels: float, total: Any) -> None:
    """So many kernels, and as much time, shared by all of these ops alike."""
    launches[members] = kernels / members.sum()
    seconds[:, members] = total / members.sum()


def _named(graph: Graph, pattern: str) -> Any:
    return np.array([bool(re.search(pattern, name)) for name in graph.op_names])


# --- the models ----------------------------------------------------------------------------------


def graph_of(model: str, folder: Path | None) -> Graph:
    path = folder / f"{model}.json.gz" if folder else None
    if path is not None and path.exists():
        return Graph.load(path)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    graph = load(_training(model), batch=BATCH)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        graph.save(path)
    return graph


def _training(name: str) -> Any:
    import keras

    _one_kernel_each()
    keras.utils.set_random_seed(0)
    build: dict[str, Callable[[], Any]] = {
        "transformer": lambda: encoder(6, 512, 8, 128, 32_000),
        "bert": lambda: encoder(12, 768, 12, 128, 30_522),
        "lstm_gru": _recurrent,
        "dlrm": _recommender,
    }
    side = 299 if name == "InceptionV3" else 224
    model = (
        build[name]()
        if name in build
        else getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3))
    )
    loss = "mse" if name in ("dlrm", "lstm_gru") else keras.losses.SparseCategoricalCrossentropy(
        from_logits=name in build
    )  # fmt: skip
    model.compile(optimizer="adam", loss=loss, jit_compile=False)
    return model


def _one_kernel_each() -> None:
    """Replaces what Keras makes of many ops by an op of the same shape and traffic that is one."""
    import keras
    import tensorflow as tf
    from keras import layers
    from keras.src.applications import mobilenet_v3
    from keras.src.backend.tensorflow import nn

    def batch_norm(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        like = self.moving_mean
        gamma = self.gamma if self.scale else tf.ones_like(like)
        beta = self.beta if self.center else tf.zeros_like(like)
        normed, _, _ = tf.compat.v1.nn.fused_batch_norm(inputs, gamma, beta, is_training=True)
        return normed

    def layer_norm(self: Any, inputs: Any) -> Any:
        rows, width = BATCH * inputs.shape[1], inputs.shape[2]
        flat = tf.reshape(inputs, (1, rows, width, 1))
        normed, _, _ = tf.compat.v1.nn.fused_batch_norm(
            flat, tf.ones(rows), tf.zeros(rows), data_format="NCHW", is_training=True
        )
        return tf.reshape(normed, (-1, inputs.shape[1], width))

    layers.BatchNormalization.call = batch_norm
    layers.LayerNormalization.call = layer_norm
    nn.silu = nn.gelu = nn.hard_silu = lambda x, *more, **named: tf.nn.elu(x)
    mobilenet_v3.hard_swish = lambda x: layers.Activation("elu")(x)
    mobilenet_v3.hard_sigmoid = lambda x: layers.Activation("sigmoid")(x)
    init = layers.Conv2D.__init__
    if init.__defaults__ is None or not getattr(layers.Conv2D, "without_bias", False):
        # Where normalization follows, which subtracts the mean, PyTorch's models have no bias.
        def without_bias(self: Any, *args: Any, use_bias: bool = False, **named: Any) -> None:
            init(self, *args, use_bias=use_bias, **named)

        layers.Conv2D.__init__ = without_bias
        layers.Conv2D.without_bias = True
    assert keras.backend.backend() == "tensorflow"


def encoder(depth: int, width: int, heads: int, length: int, words: int) -> Any:
    import keras
    from keras import layers, ops

    ids = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(ids)
    for _ in range(depth):
        q, k, v = (
            ops.transpose(
                layers.Reshape((length, heads, width // heads))(layers.Dense(width)(x)),
                (0, 2, 1, 3),
            )
            for _ in range(3)
        )
        weights = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))))
        y = ops.transpose(ops.matmul(weights, v), (0, 2, 1, 3))
        y = layers.Dense(width)(layers.Reshape((length, width))(y))
        x = layers.LayerNormalization()(x + y)
        y = layers.Dense(width)(layers.Dense(4 * width, activation="elu")(x))
        x = layers.LayerNormalization()(x + y)
    return keras.Model(ids, layers.Dense(words)(x))


def _recurrent() -> Any:
    import keras
    from keras import layers

    x = keras.Input((50, 64))
    y = layers.LSTM(128, return_sequences=True, unroll=True)(x)
    return keras.Model(x, layers.Dense(10)(layers.GRU(128, unroll=True)(y)))


def _recommender() -> Any:
    import keras
    from keras import layers, ops

    dense, ids = keras.Input((13,)), keras.Input((26,), dtype="int32")
    bottom = dense
    for width in (512, 256, 64):
        bottom = layers.Dense(width, activation="relu")(bottom)
    rows = [layers.Embedding(100_000, 64)(ids[:, i]) for i in range(26)]
    stacked = ops.stack([bottom, *rows], axis=1)
    pairs = ops.matmul(stacked, ops.transpose(stacked, (0, 2, 1)))
    top = layers.Concatenate()([bottom, layers.Flatten()(pairs)])
    for width in (512, 256):
        top = layers.Dense(width, activation="relu")(top)
    return keras.Model([dense, ids], layers.Dense(1)(top))


if __name__ == "__main__":
    main()
