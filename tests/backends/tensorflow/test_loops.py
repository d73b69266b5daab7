"""How often loops run: from constants, from shapes, from the user, or asked for."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from placewright.backends import load, load_program
from placewright.cluster import Cluster
from placewright.costs import estimate_costs
from placewright.errors import ModelError
from placewright.graph import Graph, Loop

tf = pytest.importorskip("tensorflow")


def graph_of(function: Any, *specs: Any, **options: Any) -> Graph:
    traced = tf.function(function).get_concrete_function(*specs)
    return load(traced, **options)


def found(graph: Graph) -> dict[str, tuple[int | None, str]]:
    return {loop.name: (loop.iterations, loop.source) for loop in graph.loops}


def counts(graph: Graph, op_type: str) -> list[int]:
    chosen = np.array([type_ == op_type for type_ in graph.op_types])
    return [int(count) for count in graph.run_count[chosen]]


VECTOR = tf.TensorSpec((4,))


@pytest.mark.parametrize(
    ("start", "limit", "step", "iterations"),
    [(0, 10, 1, 10), (0, 10, 3, 4), (2, 10, 4, 2), (0, 0, 1, 0), (10, 0, -5, 2)],
)
def test_a_range_of_constants(start: int, limit: int, step: int, iterations: int) -> None:
    def function(x: Any) -> Any:
        for _ in tf.range(start, limit, step):
            x = tf.tanh(x)
        return x

    graph = graph_of(function, VECTOR)
    assert [loop.iterations for loop in graph.loops] == [iterations]
    # An op that never runs is costed like one that runs once.
    assert counts(graph, "Tanh") == [max(iterations, 1)]


def test_a_while_loop_with_a_counter() -> None:
    def function(x: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return i - 2, tf.tanh(x)

        return tf.while_loop(lambda i, x: i >= 0, body, (9, x))

    graph = graph_of(function, VECTOR)
    assert [loop[1:3] for loop in graph.loops] == [(5, "constant")]  # 9, 7, 5, 3, 1
    assert counts(graph, "Tanh") == [5]
    # Values enter and leave once.
    assert set(counts(graph, "Enter") + counts(graph, "Exit")) == {1}


def test_nested_loops_multiply() -> None:
    def function(x: Any) -> Any:
        for _ in tf.range(3):
            for _ in tf.range(5):
                x = tf.tanh(x)
            x = tf.sin(x)
        return x

    graph = graph_of(function, VECTOR)
    outer, inner = graph.loops
    assert (outer.iterations, inner.iterations) == (3, 5)
    assert outer.within == ""
    assert inner.within == outer.name
    assert counts(graph, "Tanh") == [15]
    assert counts(graph, "Sin") == [3]


def test_gradients_of_a_loop_run_as_often_as_the_loop() -> None:
    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(7):
                y = tf.tanh(y)
        return tape.gradient(y, x)

    graph = graph_of(function, VECTOR)
    assert sorted(loop.iterations or 0 for loop in graph.loops) == [7, 7]
    assert counts(graph, "TanhGrad") == [7]


def test_a_loop_over_the_rows_of_an_input_of_open_size() -> None:
    graph = graph_of(lambda x: tf.map_fn(tf.tanh, x), tf.TensorSpec((None, 4), name="x"), batch=6)
    assert [loop[1:3] for loop in graph.loops] == [(6, "shape")]


def test_an_unknown_loop_is_asked_for_by_name(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Any) -> Any:
        while tf.reduce_sum(x) < 10.0:
            x = tf.tanh(x)
        return x

    with caplog.at_level(logging.WARNING):
        graph = graph_of(function, VECTOR)
    assert graph.loops == (Loop("while", None, "unknown"),)
    assert counts(graph, "Tanh") == [1]
    assert "it is not known how often loop 'while'" in caplog.text
    assert "loops={'while': N}" in caplog.text
    caplog.clear()
    graph = graph_of(function, VECTOR, loops={"whil.": 12})
    assert found(graph) == {"while": (12, "user")}
    assert counts(graph, "Tanh") == [12]
    assert not caplog.text
    with pytest.raises(ModelError, match=r"'lstm' matches no loop; the loops are: 'while'"):
        graph_of(function, VECTOR, loops={"lstm": 12})
    with pytest.raises(ModelError, match="must be a whole number from 1, not 0"):
        graph_of(function, VECTOR, loops={"while": 0})
    with pytest.raises(ModelError, match="is no regular expression"):
        graph_of(function, VECTOR, loops={"while(": 2})


def test_a_keras_lstm_costs_as_much_as_its_steps() -> None:
    def step_seconds(length: int) -> float:
        series = tf.keras.Input((length, 16))
        model = tf.keras.Model(series, tf.keras.layers.LSTM(32)(series))
        model.compile("sgd", "mse")
        graph = load(model, batch=8)
        assert [loop.iterations for loop in graph.loops] == [length, length]
        costs = estimate_costs(graph, Cluster.load("cpu2"))
        return float((costs.op_seconds + costs.overhead_seconds)[0].sum())

    assert step_seconds(50) == pytest.approx(5 * step_seconds(10), rel=0.15)


def over_a_dataset(dataset: Any) -> Any:
    weights = tf.Variable(tf.ones((8, 8)))

    @tf.function  # type: ignore[untyped-decorator]
    def train() -> Any:
        total = 0.0
        for x in dataset:
            total += tf.reduce_sum(tf.matmul(x, weights))
            weights.assign_sub(0.1 * tf.ones((8, 8)))
        return total

    return train.get_concrete_function(), weights


def test_a_loop_over_a_dataset_is_its_body(caplog: pytest.LogCaptureFixture) -> None:
    function, weights = over_a_dataset(tf.data.Dataset.from_tensor_slices(tf.ones((20, 4, 8))))
    with caplog.at_level(logging.WARNING):
        graph = load(function)
    assert found(graph) == {"ScanDataset": (20, "dataset")}
    assert "goes over a dataset of 20 elements: a step is one iteration of it" in caplog.text
    assert counts(graph, "MatMul") == [1]
    assert counts(graph, "AssignSubVariableOp") == [1]
    assert graph.param_bytes.sum() == 8 * 8 * 4
    # It may be placed op by op.
    assert graph.colocation[graph.op_types.index("MatMul")] == -1
    with pytest.raises(ModelError, match=r"goes over a dataset \('ScanDataset'\)"):
        load_program(function)
    # Counted as a whole it is a loop like others: on one device, as nothing is sent repeatedly.
    graph = load(function, loops={"Scan": 9})
    assert found(graph) == {"ScanDataset": (9, "user")}
    assert counts(graph, "MatMul") == [9]
    assert graph.colocation[graph.op_types.index("MatMul")] >= 0
    del weights


def test_a_dataset_of_unknown_size(caplog: pytest.LogCaptureFixture) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(tf.ones((20, 4, 8))).filter(lambda x: True)
    function, weights = over_a_dataset(dataset)
    with caplog.at_level(logging.WARNING):
        graph = load(function)
    assert found(graph) == {"ScanDataset": (None, "dataset")}
    assert counts(graph, "MatMul") == [1]
    assert "loops={'ScanDataset': N}" in caplog.text
    del weights


def test_what_leaves_a_loop_waits_for_its_last_iteration() -> None:
    """Otherwise the gradient's loop would run beside the loop that it is the gradient of."""

    def function(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(20):
                y = tf.tanh(y)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    graph = graph_of(function, VECTOR)
    assert len(graph.loops) == 2
    before: dict[int, set[int]] = {op: set() for op in range(graph.num_ops)}
    for src, dst in zip(graph.edge_src.tolist(), graph.edge_dst.tolist(), strict=True):
        before[dst] |= {src} | before[src]  # ops are in topological order, edges by consumer
    forward = [op for op, type_ in enumerate(graph.op_types) if type_ == "Tanh"]
    backward = [op for op, type_ in enumerate(graph.op_types) if type_ == "TanhGrad"]
    assert forward
    assert backward
    assert set(forward) <= before[backward[-1]]
