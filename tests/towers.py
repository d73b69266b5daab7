"""A model small enough to be run many times: two towers of matrix products, trained."""

from __future__ import annotations

from typing import Any

from placewright.backends import load_program
from placewright.backends.tensorflow._tf import tf
from placewright.backends.tensorflow.program import TensorFlowProgram


def towers_graph() -> Any:
    """The `tf.Graph`; run `train`, look at `loss:0`. Ops of a tower have its name in theirs."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [32, 128], name="x")
        outputs = []
        for tower in ("left", "right"):
            with tf.compat.v1.name_scope(tower):
                kernel = tf.compat.v1.get_variable(
                    f"{tower}/kernel",
                    [128, 128],
                    initializer=tf.compat.v1.glorot_uniform_initializer(seed=1),
                    use_resource=True,
                )
                y = x
                for _ in range(3):
                    y = tf.tanh(tf.matmul(y, kernel))
                outputs.append(tf.reduce_mean(y))
        loss = tf.add_n(outputs, name="loss")
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1e-3)
        gradients = optimizer.compute_gradients(loss, colocate_gradients_with_ops=True)
        optimizer.apply_gradients(gradients, name="train")
    return graph


def towers() -> TensorFlowProgram:
    return _program(towers_graph(), ["train", "loss:0"])


def small(build: Any, fetches: list[str]) -> TensorFlowProgram:
    """The program of a graph that `build` makes."""
    graph = tf.Graph()
    with graph.as_default():
        build()
    return _program(graph, fetches)


def _program(graph: Any, fetches: list[str]) -> TensorFlowProgram:
    program = load_program(graph, fetches=fetches)
    assert isinstance(program, TensorFlowProgram)
    return program
