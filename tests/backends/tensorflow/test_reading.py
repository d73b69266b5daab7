"""TensorFlow models of every kind, small enough to know each number by hand."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from placewright.backends import load
from placewright.backends.tensorflow import _tf
from placewright.backends.tensorflow import reading as front_end
from placewright.backends.tensorflow._tf import tf
from placewright.backends.tensorflow.convert import _kernels
from placewright.backends.tensorflow.flops import flops
from placewright.errors import ModelError
from placewright.graph import Edge, Graph, Op

v1 = tf.compat.v1


def ops_of(graph: Graph) -> dict[str, Op]:
    return {op.name: op for op in graph.ops()}


def set_of(graph: Graph, name: str) -> int:
    """Number of an op's co-location set, -1 for none."""
    return int(graph.colocation[graph.op_index[name]])


def of_type(graph: Graph, type_: str) -> list[Op]:
    return [op for op in graph.ops() if op.type == type_]


def fails(call: Callable[[], object]) -> str:
    """The message of the ModelError that `call` raises."""
    with pytest.raises(ModelError) as error:
        call()
    said = str(error.value)
    assert "\n" not in said
    return said


def traced(**options: Any) -> Callable[[Any], Any]:
    """`tf.function` as a decorator that has a type."""
    return lambda function: tf.function(function, **options)


# --- a training graph of TensorFlow 1 ------------------------------------------------------------


def training_graph(*, batch: int | None = 8, resource: bool = True, optimizer: Any = None) -> Any:
    """softmax(x w + b) for x [batch, 5], w [5, 3], with one step of Adam."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [batch, 5], name="x")
        y = v1.placeholder(tf.int32, [batch], name="y")
        w = v1.get_variable("w", [5, 3], use_resource=resource)
        b = v1.get_variable("b", [3], use_resource=resource)
        logits = tf.nn.bias_add(tf.matmul(x, w, name="product"), b, name="logits")
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits, name="each")
        loss = tf.reduce_sum(each, name="loss")
        with graph.name_scope("unused"):
            tf.exp(x)
        (optimizer or v1.train.AdamOptimizer(0.1)).minimize(loss, name="train")
        v1.global_variables_initializer()
    return graph


@pytest.fixture(scope="module")
def trained() -> Graph:
    return load(training_graph(), fetches=["train", "loss:0"])


def test_only_what_the_fetches_need_is_kept(trained: Graph) -> None:
    assert trained.name == "graph"
    assert "unused/Exp" not in trained.op_index
    assert "init" not in trained.op_index
    whole = load(training_graph())
    assert {"unused/Exp", "init", "train"} <= set(whole.op_names)


def test_matmul(trained: Graph) -> None:
    product = ops_of(trained)["product"]
    assert product.type == "MatMul"
    assert product.flops == 2 * 8 * 5 * 3
    (output,) = product.outputs
    assert (output.bytes, output.shape, output.dtype) == (8 * 3 * 4, (8, 3), "float32")
    assert output.shares is None
    assert product.kernels is None  # everywhere
    # dw = x^T [5, 8] * d [8, 3]
    assert ops_of(trained)["gradients/product_grad/MatMul_1"].flops == 2 * 5 * 8 * 3


def test_edges(trained: Graph) -> None:
    edges = set(trained.edges())
    assert Edge("x", "product", 0) in edges
    assert Edge("product/ReadVariableOp", "product", 0) in edges
    # The second output of the cross entropy is its gradient.
    assert Edge("each/each", "gradients/each/each_grad/mul", 1) in edges
    assert any(edge.dst == "train" and edge.output is None for edge in edges)


def test_parameters_and_slots_are_counted_once(trained: Graph) -> None:
    ops = ops_of(trained)
    assert {name: op.param_bytes for name, op in ops.items() if op.param_bytes} == {
        "w": 5 * 3 * 4,
        "b": 3 * 4,
    }
    assert {name: op.slot_bytes for name, op in ops.items() if op.slot_bytes} == {
        "w/Adam": 60,
        "w/Adam_1": 60,
        "b/Adam": 12,
        "b/Adam_1": 12,
        "beta1_power": 4,
        "beta2_power": 4,
    }
    # The handle itself is small, and reading a variable makes no copy.
    assert ops["w"].outputs[0].bytes == 8
    read = ops["product/ReadVariableOp"].outputs[0]
    assert (read.bytes, read.shares) == (60, ("w", 0))


def test_gradients_know_their_forward_op(trained: Graph) -> None:
    ops = ops_of(trained)
    assert ops["gradients/product_grad/MatMul_1"].gradient_of == "product"
    assert ops["gradients/logits_grad/BiasAddGrad"].gradient_of == "logits"
    assert ops["product"].gradient_of is None
    assert ops["train"].gradient_of is None


def test_variable_slots_and_update_stay_together() -> None:
    graph = load(training_graph(optimizer=v1.train.MomentumOptimizer(0.1, 0.9)), fetches=["train"])
    for variable, update in (
        ("w", "train/update_w/ResourceApplyMomentum"),
        ("b", "train/update_b/ResourceApplyMomentum"),
    ):
        together = {set_of(graph, name) for name in (variable, f"{variable}/Momentum", update)}
        assert together == {set_of(graph, variable)}
        assert set_of(graph, variable) >= 0
    assert set_of(graph, "w") != set_of(graph, "b")
    assert set_of(graph, "product/ReadVariableOp") == set_of(graph, "w")
    assert set_of(graph, "product") == -1
    assert graph.slot_bytes.sum() == graph.param_bytes.sum() == 72


def test_reference_variables() -> None:
    graph = load(training_graph(resource=False), fetches=["train"])
    ops = ops_of(graph)
    assert ops["w"].type == "VariableV2"
    assert (ops["w"].param_bytes, ops["w/Adam"].slot_bytes) == (60, 60)
    assert graph.slot_bytes.sum() == 2 * graph.param_bytes.sum() + 8
    # The reference is no second copy of the variable.
    assert ops["w"].outputs[0].bytes == 8
    read = ops["w/read"].outputs[0]
    assert (read.bytes, read.dtype, read.shares) == (60, "float32", ("w", 0))
    update = ops["train/update_w/ApplyAdam"]
    assert update.outputs[0].shares == ("w", 0)
    assert update.flops == 10 * 15
    assert {set_of(graph, name) for name in ("w/Adam", "w/read", update.name)} == {
        set_of(graph, "w")
    }


def test_colocation_by_class_with_an_op_that_was_pruned() -> None:
    with tf.Graph().as_default() as tf_graph:
        x = v1.placeholder(tf.float32, [2], name="x")
        away = tf.exp(x, name="away")
        with v1.colocate_with(away):
            a, b = tf.sin(x, name="a"), tf.cos(x, name="b")
        tf.add(a, b, name="sum")
    graph = load(tf_graph, fetches=["sum"])
    assert "away" not in graph.op_index
    assert set_of(graph, "a") == set_of(graph, "b") >= 0
    assert set_of(graph, "sum") == -1


def test_ops_that_pass_memory_on() -> None:
    with tf.Graph().as_default() as tf_graph:
        x = v1.placeholder(tf.float32, [2, 3], name="x")
        flat = tf.reshape(tf.identity(x, name="same"), [6], name="flat")
        tf.add(tf.expand_dims(flat, 0, name="row"), 1.0, name="new")
    ops = ops_of(load(tf_graph))
    assert {name: ops[name].outputs[0].shares for name in ("same", "flat", "row", "new")} == {
        "same": ("x", 0),
        "flat": ("x", 0),
        "row": ("x", 0),
        "new": None,
    }


def test_kernels() -> None:
    with tf.Graph().as_default() as tf_graph:
        x = v1.placeholder(tf.float32, [2], name="x")
        tf.add(x, x, name="everywhere")
        tf.strings.as_string(x, name="text")
        tf.unique(tf.cast(x, tf.int32), name="unique")
    ops = ops_of(load(tf_graph))
    assert ops["everywhere"].kernels is None
    assert ops["text"].kernels == ("cpu",)
    assert ops["text"].outputs[0].bytes == 2 * 16
    # Only a GPU has it.
    assert _kernels("CudnnRNN", ()) == ("gpu",)
    # In no table; what this TensorFlow has registered decides.
    assert _kernels("NoSuchOp", ()) is None


def test_fetch_that_is_not_there() -> None:
    said = fails(lambda: load(training_graph(), fetches=["prduct:0"]))
    assert "there is no op 'prduct' to fetch among" in said
    assert "did you mean 'product'" in said


def test_graph_without_ops() -> None:
    assert "has no ops" in fails(lambda: load(tf.Graph()))


# --- FLOPs ---------------------------------------------------------------------------------------


def test_flops_are_tensorflows_where_it_knows_them() -> None:
    from tensorflow.python.framework import ops as tf_ops
    from tensorflow.python.profiler.internal import flops_registry  # noqa: F401

    with tf.Graph().as_default() as tf_graph:
        image = v1.placeholder(tf.float32, [2, 8, 8, 3], name="image")
        kernel = v1.placeholder(tf.float32, [3, 3, 3, 4], name="kernel")
        conv = tf.nn.conv2d(image, kernel, strides=2, padding="SAME", name="conv")
        tf.nn.depthwise_conv2d(image, kernel, [1, 1, 1, 1], "SAME", name="depthwise")
        pool = tf.nn.max_pool2d(image, 2, 2, "SAME", name="pool")
        mean = tf.nn.avg_pool2d(image, 2, 2, "SAME", name="mean")
        matrices = v1.placeholder(tf.float32, [7, 2, 5], name="matrices")
        tf.matmul(matrices, matrices, transpose_b=True, name="batched")
        tf.matmul(matrices[0], matrices[1], transpose_a=True, name="transposed")
        tf.add_n([image, image, image], name="add_n")
        tf.nn.softmax(matrices, name="softmax")
        tf.gradients([conv, pool, mean], [image, kernel])
    records = ops_of(load(tf_graph))
    compared = set()
    for node in tf_graph.as_graph_def().node:
        if node.op in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "MaxPool", "MatMul",
                       "AvgPool", "MaxPoolGrad", "BatchMatMulV2", "AddN", "DepthwiseConv2dNative",
                       "Softmax"):  # fmt: skip
            expected = tf_ops.get_stats_for_node_def(tf_graph, node, "flops").value
            assert records[node.name].flops == expected, node.name
            compared.add(node.op)
    assert len(compared) == 11
    # [2, 4, 4, 4] outputs that each read 3 * 3 * 3 weights
    assert records["conv"].flops == 2 * (2 * 4 * 4 * 4) * (3 * 3 * 3)


def test_flops_of_a_transposed_batch_of_matrices() -> None:
    with tf.Graph().as_default() as tf_graph:
        matrices = v1.placeholder(tf.float32, [7, 2, 5], name="matrices")
        tf.matmul(matrices, matrices, transpose_a=True, name="batched")
        tf.einsum("bij,bkj->bik", matrices, matrices, name="einsum")
        tf.einsum("...ij,...kj->...ik", matrices, matrices, name="dots")
    types = {op.type: op for op in load(tf_graph).ops()}
    assert types["BatchMatMulV2"].flops == 2 * 7 * 5 * 2 * 5
    assert [op.flops for op in of_type(load(tf_graph), "Einsum")] == [2 * 7 * 2 * 5 * 2] * 2


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "expected"),
    [
        ("Relu", [(4, 5)], [(4, 5)], 20),
        ("Tanh", [(4, 5)], [(4, 5)], 80),
        ("Sum", [(4, 5), (1,)], [(4,)], 20),
        ("SquaredDifference", [(4, 5), (4, 5)], [(4, 5)], 40),
        ("SquaredDifference", [(4, 5), (5,)], [(4, 5)], 80),
        ("FusedBatchNormV3", [(2, 4, 4, 3), (3,)], [(2, 4, 4, 3), (3,)], 8 * 96),
        ("FusedBatchNormGradV3", [(2, 4, 4, 3), (3,)], [(2, 4, 4, 3), (3,)], 12 * 96),
        ("SparseSoftmaxCrossEntropyWithLogits", [(4, 5), (4,)], [(4,), (4, 5)], 2080),
        ("ResourceApplyAdam", [(), (), (), (), (), (), (4, 5)], [], 200),
        ("ResourceApplyGradientDescent", [(), (), (4, 5)], [], 40),
        ("AssignSubVariableOp", [(), (4, 5)], [], 20),
        ("ResourceScatterAdd", [(), (3,), (3, 5)], [], 15),
        ("ConcatV2", [(4, 5), (4, 5), ()], [(8, 5)], 0),
        ("TensorListPushBack", [(), (4, 5)], [()], 0),
        ("NoOp", [], [], 0),
        ("SomebodysOp", [(4, 5)], [(4, 5), (2,)], 22),
        ("PartitionedCall", [(4, 5)], [(4, 5)], None),
        # An unknown rank: what is known of the outputs is the best there is.
        ("MatMul", [(), ()], [(4, 5)], 20),
        ("Conv2D", [(), ()], [(2, 2, 2, 2)], 16),
    ],
)
def test_flops_table(
    op_type: str,
    inputs: list[tuple[int, ...]],
    outputs: list[tuple[int, ...]],
    expected: float | None,
) -> None:
    assert flops(v1.NodeDef(name="n", op=op_type), inputs, outputs) == expected


# --- open dimensions -----------------------------------------------------------------------------


def test_open_dimensions_are_named_with_the_options_that_size_them() -> None:
    with tf.Graph().as_default() as tf_graph:
        v1.placeholder(tf.float32, [None, None, 5], name="x")
        v1.placeholder(tf.float32, [None], name="scope/y")
        v1.placeholder(tf.float32, [4], name="z")
    assert fails(lambda: load(tf_graph)) == (
        "2 inputs have open dimensions: 'x' [?, ?, 5], 'scope/y' [?]; size them with batch=N and "
        "dims={'x.1': N}"
    )
    graph = load(tf_graph, batch=8, dims={"x.1": 3})
    assert graph.tensor_shapes == ((8, 3, 5), (8,), (4,))
    # What is said about one input goes before the batch.
    graph = load(tf_graph, batch=8, dims={"x.1": 3, "x.0": 2})
    assert graph.tensor_shapes == ((2, 3, 5), (8,), (4,))
    graph = load(tf_graph, dims={"x.1": 3, "x.0": 2, "scope/y": 6})
    assert graph.tensor_shapes == ((2, 3, 5), (6,), (4,))


def test_sizes_reach_every_op() -> None:
    sized = load(training_graph(batch=None), batch=8, fetches=["train", "loss:0"])
    fixed = load(training_graph(), fetches=["train", "loss:0"])
    assert ops_of(sized)["product"].outputs[0].shape == (8, 3)
    assert ops_of(sized)["product"].flops == ops_of(fixed)["product"].flops == 240
    assert sized.param_bytes.sum() == fixed.param_bytes.sum()


def test_inputs_that_are_not_needed_need_no_size() -> None:
    with tf.Graph().as_default() as tf_graph:
        tf.exp(v1.placeholder(tf.float32, [None], name="open"), name="away")
        tf.exp(v1.placeholder(tf.float32, [2], name="x"), name="wanted")
    assert load(tf_graph, fetches=["wanted"]).op_names == ("x", "wanted")


def test_input_of_unknown_rank(caplog: pytest.LogCaptureFixture) -> None:
    with tf.Graph().as_default() as tf_graph:
        x = v1.placeholder(tf.float32, [2, 3], name="x")
        tf.multiply(x, v1.placeholder(tf.float32, name="keep"), name="kept")
    graph = load(tf_graph)
    assert ops_of(graph)["kept"].outputs[0].shape == (2, 3)
    assert "taken for scalars, as they have no shape: keep" in caplog.text
    graph = load(tf_graph, dims={"keep.0": 4, "keep.1": 1, "keep.2": 1})
    assert ops_of(graph)["kept"].outputs[0].shape == (4, 2, 3)

    with tf.Graph().as_default() as tf_graph:
        x = v1.placeholder(tf.float32, name="x")
        tf.raw_ops.MatMul(a=x, b=tf.zeros([4, 2]), name="product")
    said = fails(lambda: load(tf_graph))
    assert (
        "input 'x' has no shape and is no scalar; give all its dimensions with dims={'x.0': N"
        in said
    )
    assert ops_of(load(tf_graph, dims={"x.0": 3, "x.1": 4}))["product"].flops == 2 * 3 * 4 * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"dims": {"z": 3}},
            "there is no input 'z' to size; the inputs are: 'x' [?, ?, 5], 'y' [4]",
        ),
        ({"dims": {"z.1": 3}}, "there is no input 'z.1' to size"),
        ({"dims": {"x.one": 3}}, "there is no input 'x.one' to size"),
        ({"dims": {"x": 3}}, "input 'x' is [?, ?, 5] and has 2 open dimensions; say which one"),
        ({"dims": {"y": 3}}, "input 'y' is [4] and has 0 open dimensions"),
        ({"dims": {"x.7": 3}}, "input 'x' is [?, ?, 5]; it has no dimension 7"),
        ({"dims": {"x.2": 3}}, "dimension 2 of input 'x' is 5, not 3"),
        ({"dims": {"x.1": 0}}, "x.1 must be at least 1 and below 2**31, not 0"),
        ({"dims": {"x.1": 2.5}}, "x.1 must be a whole number, not 2.5"),
        ({"batch": -1}, "batch must be at least 1 and below 2**31, not -1"),
        ({"batch": True}, "batch must be a whole number, not True"),
        (
            {"batch": 3},
            "1 input has open dimensions: 'x' [3, ?, 5]; size them with dims={'x.1': N}",
        ),
    ],
)
def test_sizes_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with tf.Graph().as_default() as tf_graph:
        v1.placeholder(tf.float32, [None, None, 5], name="x")
        v1.placeholder(tf.float32, [4], name="y")
    assert said in fails(lambda: load(tf_graph, **options))


def test_batch_of_a_model_that_has_one() -> None:
    assert (
        "no input leaves its batch open, so it cannot be 7; inputs: 'x' [8, 5], 'y' [8]"
        in fails(lambda: load(training_graph(), batch=7))
    )
    assert load(training_graph(), batch=8).num_ops > 0


def test_input_with_a_default_may_be_fed_another_size() -> None:
    with tf.Graph().as_default() as tf_graph:
        x = v1.placeholder_with_default(tf.zeros([1, 4]), [None, 4], name="x")
        tf.exp(x, name="exp")
    assert "'x' [?, 4]" in fails(lambda: load(tf_graph))
    assert ops_of(load(tf_graph, batch=9))["exp"].outputs[0].shape == (9, 4)


def test_input_pipeline_is_an_input() -> None:
    with tf.Graph().as_default() as tf_graph:
        data = tf.data.Dataset.from_tensor_slices(tf.zeros([100, 4])).batch(32)
        rows = v1.data.make_initializable_iterator(data).get_next()
        tf.exp(rows, name="exp")
    assert "'IteratorGetNext:0' [?, 4]; size them with batch=N" in fails(
        lambda: load(tf_graph, fetches=["exp"])
    )
    graph = load(tf_graph, batch=32, fetches=["exp"])
    assert ops_of(graph)["exp"].outputs[0].shape == (32, 4)


def test_shapes_that_depend_on_data_count_as_one(caplog: pytest.LogCaptureFixture) -> None:
    with tf.Graph().as_default() as tf_graph:
        x = v1.placeholder(tf.float32, [6, 5], name="x")
        rows = tf.where(x[:, 0] > 0, name="rows")
        tf.exp(tf.gather_nd(x, rows), name="exp")
    with caplog.at_level(logging.WARNING):
        ops = ops_of(load(tf_graph))
    assert ops["exp"].outputs[0] == (1 * 5 * 4, (1, 5), "float32", None)
    (record,) = caplog.records
    assert record.getMessage() == (
        "3 tensors have dimensions that are not known before the step runs and count as 1, such as "
        "rows:0 (Where)"
    )


def test_sizes_beyond_reason() -> None:
    with tf.Graph().as_default() as tf_graph:
        x = v1.placeholder(tf.float32, [None, None, None], name="x")
        tf.reshape(x, [-1], name="flat")
    huge = 2**31 - 1
    said = fails(lambda: load(tf_graph, dims={"x.0": huge, "x.1": huge, "x.2": 3}))
    assert "op 'x' has a tensor of 6e+19 bytes" in said or "does not accept" in said


# --- functions -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step() -> Any:
    """One step of gradient descent with momentum, written with plain ops."""
    w, m = tf.Variable(tf.zeros([5, 3]), name="w"), tf.Variable(tf.zeros([5, 3]), name="m")
    seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="seen")

    @traced(autograph=False)
    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)))
        m.assign(0.9 * m + tape.gradient(loss, w))
        w.assign_sub(0.1 * m)
        seen.assign_add(1)
        return loss

    return train


def test_concrete_function(step: Any) -> None:
    concrete = step.get_concrete_function(tf.TensorSpec([8, 5], name="x"))
    graph = load(concrete)
    ops = ops_of(graph)
    assert graph.name == "train"
    owners = {op.name: op for op in of_type(graph, "VarHandleOp")}
    assert sorted(op.param_bytes for op in owners.values()) == [8, 60, 60]
    assert ops["MatMul"].flops == 2 * 8 * 5 * 3
    assert ops["MatMul/ReadVariableOp"].outputs[0].shares == ("MatMul/ReadVariableOp/resource", 0)
    # Updates are kept though no output needs them, next to their variables.
    assert len(of_type(graph, "AssignSubVariableOp")) == 1
    update = of_type(graph, "AssignSubVariableOp")[0].name
    assert set_of(graph, update) == set_of(graph, "MatMul/ReadVariableOp/resource") >= 0
    assert ops["gradient_tape/MatMul/MatMul"].gradient_of == "MatMul"
    assert ops["gradient_tape/ReluGrad"].gradient_of == "Relu"


def test_function_is_sized_like_a_graph(step: Any) -> None:
    concrete = step.get_concrete_function(tf.TensorSpec([None, 5], name="x"))
    assert fails(lambda: load(concrete)) == (
        "1 input has open dimensions: 'x' [?, 5]; size them with batch=N"
    )
    assert ops_of(load(concrete, batch=4))["MatMul"].flops == 2 * 4 * 5 * 3


def test_polymorphic_function() -> None:
    @traced()
    def double(x: Any) -> Any:
        return x * 2.0

    assert "tf.function 'double' has not been traced; give it an input_signature" in fails(
        lambda: load(double)
    )
    double(tf.zeros([3]))
    assert of_type(load(double), "Mul")[0].outputs[0].shape == (3,)
    double(tf.zeros([4]))
    assert "has been traced with 2 signatures" in fails(lambda: load(double))

    @traced(input_signature=[tf.TensorSpec([None], name="x")])
    def triple(x: Any) -> Any:
        return x * 3.0

    assert of_type(load(triple, batch=7), "Mul")[0].outputs[0].shape == (7,)

    @traced(input_signature=[tf.TensorSpec([2])])
    def broken(x: Any) -> Any:
        raise ValueError("two\nlines")

    assert fails(lambda: load(broken)).startswith("tf.function 'broken' cannot be traced: ")


def test_function_that_makes_its_variable_when_first_called() -> None:
    made: list[Any] = []

    @traced()
    def product(x: Any) -> Any:
        if not made:
            made.append(tf.Variable(tf.zeros([3, 2])))
        return tf.matmul(x, made[0])

    product(tf.zeros([4, 3]))
    graph = load(product)
    assert graph.param_bytes.sum() == 3 * 2 * 4


def test_called_functions_are_inlined() -> None:
    @traced()
    def inner(x: Any) -> Any:
        return tf.exp(x)

    @traced(input_signature=[tf.TensorSpec([None, 2], name="x")])
    def outer(x: Any) -> Any:
        return inner(x) + inner(x)

    graph = load(outer, batch=3)
    assert not [type_ for type_ in graph.op_types if "Call" in type_]
    assert [op.outputs[0].shape for op in of_type(graph, "Exp")] == [(3, 2)] * 2


def test_large_inputs_are_not_allocated() -> None:
    @traced(input_signature=[tf.TensorSpec([None, 2**20], name="x")])
    def outer(x: Any) -> Any:
        return tf.cond(x[0, 0] > 0, lambda: x, lambda: -x)

    graph = load(outer, batch=2**20)
    assert graph.tensor_bytes.max() == 2**42


def test_function_that_cannot_be_inlined_stays_one_op(caplog: pytest.LogCaptureFixture) -> None:
    @traced(jit_compile=True)
    def compiled(x: Any) -> Any:
        return tf.exp(x)

    @traced(input_signature=[tf.TensorSpec([2], name="x")])
    def outer(x: Any) -> Any:
        return compiled(x) + 1.0

    (call,) = [op for op in load(outer).ops() if "Call" in op.type]
    assert call.flops is None
    assert "1 ops run functions that are compiled as a whole, such as" in caplog.text


def test_cond_is_lowered() -> None:
    @traced(input_signature=[tf.TensorSpec([3], name="x")])
    def choose(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.exp(x), lambda: tf.sin(x))

    graph = load(choose)
    assert {"Switch", "Merge", "Exp", "Sin"} <= set(graph.op_types)
    assert not {"If", "StatelessIf"} & set(graph.op_types)
    assert of_type(graph, "Merge")[0].outputs[0].shape == (3,)


@pytest.fixture(scope="module")
def looped() -> Any:
    @traced(input_signature=[tf.TensorSpec([4, 3], name="x")], autograph=False)
    def power(x: Any) -> Any:
        return tf.while_loop(
            lambda i, y: i < 5, lambda i, y: (i + 1, tf.tanh(tf.matmul(y, tf.ones([3, 3])))), (0, x)
        )[1]

    return power


def test_a_loop_stays_together(looped: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        graph = load(looped)
    assert not caplog.text  # shapes pass through the loop, and it is known how often it runs
    (product,) = of_type(graph, "MatMul")
    assert product.flops == 2 * 4 * 3 * 3
    together = [op.name for t in ("Enter", "Exit", "Switch", "Tanh") for op in of_type(graph, t)]
    assert {set_of(graph, name) for name in together} == {set_of(graph, product.name)}
    assert set_of(graph, product.name) >= 0
    assert set_of(graph, "x") == -1


def test_loop_in_a_file(looped: Any, tmp_path: Path) -> None:
    concrete = looped.get_concrete_function()
    functional = tf.io.write_graph(concrete.graph, str(tmp_path), "loop.pb", as_text=False)
    graph = load(functional)
    assert of_type(graph, "MatMul")[0].flops == 2 * 4 * 3 * 3
    # The same, lowered before it was saved: nothing to inline, but a cycle to break.
    lowered = _tf.inline_functions(concrete.graph.as_graph_def(), ["Identity"])
    (tmp_path / "lowered.pb").write_bytes(lowered.SerializeToString())
    again = load(tmp_path / "lowered.pb", fetches=["Identity"])
    assert of_type(again, "MatMul")[0].flops == 2 * 4 * 3 * 3
    assert {"Enter", "Merge", "NextIteration", "Exit"} <= set(again.op_types)


# --- Keras ---------------------------------------------------------------------------------------


def dense_model(**options: Any) -> Any:
    model = tf.keras.Sequential(
        [
            tf.keras.Input((5,), name="x"),
            tf.keras.layers.Dense(6, activation="relu"),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dense(3),
        ],
        name="dense_model",
    )
    model.compile(**{"optimizer": tf.keras.optimizers.Adam(), "loss": "mse", **options})
    return model


PARAMETERS = (5 * 6 + 6) + (6 * 3 + 3) + 2 * 6  # kernels, biases, scale and offset
AVERAGES = 2 * 6


def test_keras_training_step() -> None:
    model = dense_model()
    assert fails(lambda: load(model)) == (
        "1 input has open dimensions: 'x' [?, 5]; size them with batch=N"
    )
    graph = load(model, batch=8)
    assert graph.name == "dense_model"
    assert graph.param_bytes.sum() == 4 * (PARAMETERS + AVERAGES)
    # Two moments each, the learning rate (4 bytes) and the number of steps (8 bytes).
    assert graph.slot_bytes.sum() == 4 * 2 * PARAMETERS + 12
    products = sorted(op.flops or 0 for op in of_type(graph, "MatMul"))
    # Forward and for the weights in both layers, for the inputs in the second one only.
    assert products == sorted([2 * 8 * 5 * 6] * 2 + [2 * 8 * 6 * 3] * 3)
    labels = next(op for op in graph.ops() if op.name == "labels")
    assert (labels.type, labels.outputs[0].shape) == ("Placeholder", (8, 3))
    gradients = [op for op in graph.ops() if op.type == "MatMul" and op.gradient_of]
    assert len(gradients) == 3
    assert {ops_of(graph)[op.gradient_of or ""].type for op in gradients} == {"MatMul"}


def test_keras_step_written_by_the_user() -> None:
    model = dense_model()
    model.optimizer.build(model.trainable_variables)

    @traced(input_signature=[tf.TensorSpec([8, 5]), tf.TensorSpec([8, 3])], autograph=False)
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        model.optimizer.apply(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables
        )
        return loss

    graph = load(train)
    # The learning rate does not change, so that nothing shows that it is the optimizer's.
    assert graph.param_bytes.sum() == 4 * (PARAMETERS + AVERAGES) + 4
    assert graph.slot_bytes.sum() == 4 * 2 * PARAMETERS + 8


def test_keras_labels_of_a_sparse_loss() -> None:
    graph = load(dense_model(loss="sparse_categorical_crossentropy"), batch=8)
    assert ops_of(graph)["labels"].outputs[0][1:3] == ((8,), "int32")
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    graph = load(dense_model(loss=loss), batch=8)
    assert ops_of(graph)["labels"].outputs[0][1:3] == ((8,), "int32")


def test_keras_model_with_named_inputs_and_two_outputs() -> None:
    a, b = tf.keras.Input((None, 4), name="a"), tf.keras.Input((4,), name="b")
    total = tf.keras.layers.Add()([tf.keras.layers.GlobalAveragePooling1D()(a), b])
    outputs = [tf.keras.layers.Dense(2)(total), tf.keras.layers.Dense(3)(total)]
    model = tf.keras.Model({"b": b, "a": a}, outputs)
    model.compile("sgd", ["mse", "sparse_categorical_crossentropy"])
    assert "'a' [?, ?, 4]" in fails(lambda: load(model))
    graph = load(model, batch=8, dims={"a.1": 7})
    shapes = {op.name: op.outputs[0].shape for op in of_type(graph, "Placeholder")}
    assert shapes == {"a": (8, 7, 4), "b": (8, 4), "labels": (8, 2), "labels_1": (8,)}


def test_keras_model_with_a_training_step_of_its_own() -> None:
    class Doubled(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.exp(self(x, training=True) - y))
            self.optimizer.apply(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables
            )
            return {"loss": loss}

    x = tf.keras.Input((5,), name="x")
    model = Doubled(x, tf.keras.layers.Dense(3)(x))
    model.compile("sgd", "mse")
    graph = load(model, batch=2)
    assert len(of_type(graph, "Exp")) == 1
    assert len(of_type(graph, "MatMul")) == 2  # forward once, gradient of the weights


def test_keras_lstm(caplog: pytest.LogCaptureFixture) -> None:
    model = tf.keras.Sequential(
        [tf.keras.Input((7, 5), name="x"), tf.keras.layers.LSTM(6), tf.keras.layers.Dense(3)]
    )
    model.compile("adam", "mse")
    with caplog.at_level(logging.WARNING):
        graph = load(model, batch=4)
    assert not caplog.messages
    assert [(loop.iterations, loop.source) for loop in graph.loops] == [(7, "constant")] * 2
    assert graph.param_bytes.sum() == 4 * (4 * 6 * (5 + 6 + 1) + 3 * (6 + 1))
    assert not {"While", "StatelessWhile"} & set(graph.op_types)
    inside = [op for op in of_type(graph, "MatMul") if "/body/" in op.name]
    # x [4, 5] and h [4, 6] with their weights, and for each the gradients of both factors.
    assert sorted(op.flops or 0 for op in inside) == sorted(
        [2 * 4 * 5 * 24] * 2 + [2 * 4 * 6 * 24] * 3
    )
    # Everything in a loop is on one device, also the variables that it reads.
    forward = {set_of(graph, op.name) for op in inside if not op.gradient_of}
    assert len(forward) == 1
    assert -1 not in forward


def test_keras_models_without_a_training_step() -> None:
    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3)], name="bare")
    assert fails(lambda: load(model, batch=2)) == (
        "Keras model 'bare' is not compiled; call compile(optimizer=..., loss=...) first: the "
        "training step is what is placed"
    )

    class Subclassed(tf.keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    model = Subclassed(name="custom")
    model.compile("sgd", "mse")
    assert "Keras model 'custom' does not know its inputs" in fails(lambda: load(model, batch=2))

    class Broken(tf.keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                raise RuntimeError("not\ntoday")
            return x

    x = tf.keras.Input((5,))
    model = tf.keras.Model(x, Broken()(x), name="broken")
    model.compile("sgd", "mse")
    assert "the training step of Keras model 'broken' cannot be traced: " in fails(
        lambda: load(model, batch=2)
    )


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    graph = training_graph()
    with graph.as_default():
        v1.train.export_meta_graph(str(folder / "step.meta"))
        v1.train.export_meta_graph(str(folder / "step.meta.txt"), as_text=True)
    tf.io.write_graph(graph, str(folder), "step.pb", as_text=False)
    tf.io.write_graph(graph, str(folder), "step.pbtxt", as_text=True)
    (folder / "meta.pb").write_bytes((folder / "step.meta").read_bytes())
    (folder / "graph.meta").write_bytes((folder / "step.pb").read_bytes())
    return folder


@pytest.mark.parametrize("name", ["step.pb", "step.pbtxt", "graph.meta"])
def test_graph_def(files: Path, name: str) -> None:
    graph = load(files / name)
    live = load(training_graph())
    assert graph.name == name.split(".")[0]
    assert graph.fingerprint == live.fingerprint
    assert "init" in graph.op_index


@pytest.mark.parametrize("name", ["step.meta", "step.meta.txt", "meta.pb"])
def test_meta_graph_is_pruned_to_its_train_op(files: Path, name: str) -> None:
    graph = load(files / name)
    assert "init" not in graph.op_index
    assert graph.fingerprint == load(training_graph(), fetches=["train"]).fingerprint
    # Other fetches go before it.
    assert load(files / name, fetches=["product"]).op_names[-1] == "product"


def test_meta_graph_without_stated_shapes(files: Path, tmp_path: Path) -> None:
    meta_graph = v1.MetaGraphDef.FromString((files / "step.meta").read_bytes())
    for node in meta_graph.graph_def.node:
        node.attr.pop("_output_shapes", None)
    (tmp_path / "bare.meta").write_bytes(meta_graph.SerializeToString())
    assert load(tmp_path / "bare.meta").fingerprint == load(files / "step.meta").fingerprint


def test_meta_graph_with_reference_variables(tmp_path: Path) -> None:
    graph = training_graph(resource=False)
    with graph.as_default():
        v1.train.export_meta_graph(str(tmp_path / "old.meta"))
    loaded = load(tmp_path / "old.meta")
    assert loaded.fingerprint == load(graph, fetches="train").fingerprint
    assert loaded.slot_bytes.sum() == 2 * loaded.param_bytes.sum() + 8 == 2 * 72 + 8


def test_other_versions_of_tensorflow_take_the_public_way(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = load(files / "step.pb")

    def gone(graph_def: object) -> None:
        raise AttributeError

    monkeypatch.setattr(_tf, "_import_fast", gone)
    assert load(files / "step.pb") == fast


def test_frozen_graph_def(step: Any, tmp_path: Path) -> None:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    w = tf.Variable(tf.ones([5, 3]))
    model = tf.function(lambda x: tf.matmul(x, w))
    frozen = convert_variables_to_constants_v2(
        model.get_concrete_function(tf.TensorSpec([None, 5], name="x"))
    )
    tf.io.write_graph(frozen.graph, str(tmp_path), "frozen.pb", as_text=False)
    assert fails(lambda: load(tmp_path / "frozen.pb")).endswith(
        "frozen.pb: 1 input has open dimensions: 'x' [?, 5]; size them with batch=N"
    )
    graph = load(tmp_path / "frozen.pb", batch=2)
    assert of_type(graph, "MatMul")[0].flops == 2 * 2 * 5 * 3
    assert graph.param_bytes.sum() == 0


# --- SavedModels ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SavedModel with two signatures, `serving_default` and `train`."""
    model = dense_model()
    model.optimizer.build(model.trainable_variables)
    module = tf.Module()
    module.variables_to_save = [v.value for v in [*model.variables, *model.optimizer.variables]]

    @traced(input_signature=[tf.TensorSpec([None, 5], name="x")], autograph=False)
    def predict(x: Any) -> Any:
        return model(x)

    @traced(
        input_signature=[tf.TensorSpec([None, 5], name="x"), tf.TensorSpec([None, 3], name="y")],
        autograph=False,
    )
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        model.optimizer.apply(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables
        )
        return loss

    folder = tmp_path_factory.mktemp("saved") / "model"
    tf.saved_model.save(module, str(folder), {"serving_default": predict, "train": train})
    return folder


def test_saved_model(saved: Path) -> None:
    graph = load(saved, batch=8)
    assert graph.name == "model"
    assert sorted(op.flops or 0 for op in of_type(graph, "MatMul")) == [
        2 * 8 * 6 * 3,
        2 * 8 * 5 * 6,
    ]
    assert graph.param_bytes.sum() == 4 * (PARAMETERS + AVERAGES)
    assert graph.slot_bytes.sum() == 0
    assert not [type_ for type_ in graph.op_types if "Call" in type_]
    assert load(saved / "saved_model.pb", batch=8) == graph


def test_saved_model_with_a_training_signature(saved: Path) -> None:
    graph = load(saved, batch=8, signature="train")
    assert len(of_type(graph, "MatMul")) == 5
    assert len(of_type(graph, "AssignSubVariableOp")) >= 6  # one for each parameter
    assert graph.slot_bytes.sum() == 4 * 2 * PARAMETERS + 8
    gradients = [op for op in of_type(graph, "MatMul") if op.gradient_of]
    assert len(gradients) == 3


def test_inputs_of_a_signature_are_called_as_in_the_signature(saved: Path) -> None:
    assert fails(lambda: load(saved)).endswith(
        "1 input has open dimensions: 'x' [?, 5]; size them with batch=N"
    )
    by_key, by_node = load(saved, dims={"x": 3}), load(saved, dims={"serving_default_x.0": 3})
    assert by_key == by_node
    assert of_type(by_key, "Placeholder")[0].outputs[0].shape == (3, 5)


def test_fetch_inside_of_a_function(saved: Path) -> None:
    whole = load(saved, batch=8)
    inner = of_type(whole, "MatMul")[0].name
    part = load(saved, batch=8, fetches=[inner])
    assert len(of_type(part, "MatMul")) == 1
    assert part.num_ops < whole.num_ops


def test_signature_that_is_not_there(saved: Path, tmp_path: Path) -> None:
    assert fails(lambda: load(saved, batch=8, signature="serve")).endswith(
        "there is no signature 'serve'; there are serving_default, train"
    )
    tf.saved_model.save(tf.Module(), str(tmp_path / "none"))
    assert "has no signatures" in fails(lambda: load(tmp_path / "none"))


def test_saved_model_with_one_signature_needs_no_choice(tmp_path: Path) -> None:
    module = tf.Module()
    module.v = tf.Variable(tf.ones([2]))
    double = tf.function(lambda x: {"y": x * module.v}, [tf.TensorSpec([2], name="x")])
    tf.saved_model.save(module, str(tmp_path / "one"), {"only": double})
    assert of_type(load(tmp_path / "one"), "Mul")[0].outputs[0].shape == (2,)
    tf.saved_model.save(module, str(tmp_path / "two"), {"a": double, "b": double})
    assert fails(lambda: load(tmp_path / "two")).endswith("which signature? There are a, b")


def test_exported_keras_model(tmp_path: Path) -> None:
    dense_model().export(str(tmp_path / "keras"), verbose=False)
    graph = load(tmp_path / "keras", batch=8)
    assert graph.param_bytes.sum() == 4 * (PARAMETERS + AVERAGES)
    assert len(of_type(graph, "MatMul")) == 2


# --- what is broken ------------------------------------------------------------------------------


def node(name: str, op: str, *inputs: str, **attributes: Any) -> Any:
    result = v1.NodeDef(name=name, op=op, input=inputs)
    for key, value in attributes.items():
        result.attr[key].type = value.as_datatype_enum
    return result


def graph_file(path: Path, *nodes: Any) -> Path:
    path.write_bytes(v1.GraphDef(node=nodes).SerializeToString())
    return path


def source(name: str) -> Any:
    result = node(name, "Placeholder", dtype=tf.float32)
    result.attr["shape"].shape.dim.add(size=2)
    return result


@pytest.mark.parametrize("name", ["bad.pb", "bad.pbtxt", "bad.meta"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the graph file is empty"),
        (b" \n\n", "the graph file is empty"),
        (b"This is no graph.", "not a GraphDef or MetaGraphDef in text form (1:1 : "),
        (b"versions { producer: 5 }", "no graph in this text file: it has no nodes"),
        (bytes([255, 254, 3, 0]) * 50, "not a GraphDef or MetaGraphDef in binary form ("),
        (b"\x22\x02\x08\x05", "no graph in this binary file: it has no nodes"),
        (b'node { name: "a" op: "NoOp', "is it truncated, or a file of another kind?"),
        (b'node { name: "\xff"', "is it truncated, or a file of another kind?"),
    ],
)
def test_file_that_is_no_graph(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = fails(lambda: load(path))
    assert error.startswith(f"{path}: ")
    assert said in error or (said.startswith("no graph") and "not a GraphDef" in error)


@pytest.mark.parametrize("name", ["step.pb", "step.pbtxt", "step.meta", "step.meta.txt"])
def test_truncated_files(files: Path, tmp_path: Path, name: str) -> None:
    content = (files / name).read_bytes()
    path = tmp_path / name
    for part in (0.05, 0.4, 0.9):
        path.write_bytes(content[: int(len(content) * part) - 1])
        # Binary files cut between two nodes are whole in form; then an input is missing.
        assert fails(lambda: load(path)).startswith(f"{path}: ")


def test_garbage_is_never_a_graph(tmp_path: Path) -> None:
    chance = random.Random(0)
    path = tmp_path / "noise.pb"
    for length in [1, 2, 3, 5, 8, 13, 100, 1000] * 20:
        path.write_bytes(chance.randbytes(length))
        fails(lambda: load(path))


def test_damaged_graphs_give_errors_and_nothing_else(files: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    content = bytearray((files / "step.pb").read_bytes())
    path = tmp_path / "damaged.pb"
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(content)
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            load(path)
            outcomes.add("read")
        except ModelError as error:
            outcomes.add("refused" if "\n" not in str(error) else "told at length")
    assert outcomes == {"read", "refused"}


def test_file_over_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "huge.pb"
    with path.open("wb") as file:
        file.truncate(2**31 + 10)  # sparse: takes no space
    assert fails(lambda: load(path)) == (
        f"{path}: is 2.0 GiB, a GraphDef has at most 2; are the weights stored as constants?"
    )


def test_folder_that_is_no_saved_model(tmp_path: Path) -> None:
    assert fails(lambda: load(tmp_path)) == (
        f"{tmp_path}: there is no model in it that is known; known are .json or .json.gz (graph "
        "file), .pb or .pbtxt (TensorFlow GraphDef), .meta (MetaGraph) or a SavedModel's "
        "directory, FILE.py:FUNCTION or package.module:FUNCTION (PyTorch), .pt2 (torch.export)"
    )
    (tmp_path / "saved_model.pb").write_bytes(b"\xff\xff\xff")
    assert "not a SavedModel" in fails(lambda: load(tmp_path))
    (tmp_path / "saved_model.pb").write_bytes(b"")
    assert "is empty" in fails(lambda: load(tmp_path))
    assert "is a directory" in fails(lambda: front_end.step_of_file(tmp_path))
    assert "no such graph file" in fails(lambda: front_end.step_of_file(tmp_path / "gone.pb"))


def test_duplicate_names(tmp_path: Path) -> None:
    path = graph_file(tmp_path / "twice.pb", source("a"), source("a"))
    assert fails(lambda: load(path)) == (
        f"{path}: two nodes are named 'a'; was the file edited or merged?"
    )


def test_dangling_input(tmp_path: Path) -> None:
    path = graph_file(tmp_path / "cut.pb", node("b", "Identity", "a:0", T=tf.float32))
    assert fails(lambda: load(path)) == (
        f"{path}: node 'b' reads 'a:0', which is not in the graph; was it cut out of a larger one?"
    )
    path = graph_file(tmp_path / "cut.pb", source("a"), node("b", "Identity", "a:3", T=tf.float32))
    assert "TensorFlow does not accept the graph: " in fails(lambda: load(path))


def test_output_that_is_not_there(files: Path, tmp_path: Path) -> None:
    meta_graph = v1.MetaGraphDef.FromString((files / "step.meta").read_bytes())
    product = next(node for node in meta_graph.graph_def.node if node.name == "product")
    product.input[0] = "x:7"
    path = tmp_path / "edited.meta"
    path.write_bytes(meta_graph.SerializeToString())
    assert fails(lambda: load(path)) == (
        f"{path}: node 'product' reads 'x:7', but 'x' has only 1 outputs; was the file edited?"
    )


def test_cycle(tmp_path: Path) -> None:
    path = graph_file(
        tmp_path / "cycle.pb",
        node("a", "Identity", "b", T=tf.float32),
        node("b", "Identity", "a", T=tf.float32),
    )
    assert fails(lambda: load(path)) == (
        f"{path}: the graph has a cycle: a -> b -> a; only the loops of tf.while_loop may have one"
    )


def test_wrong_dtype(tmp_path: Path) -> None:
    path = graph_file(tmp_path / "typed.pb", source("a"), node("b", "Identity", "a", T=tf.int32))
    said = fails(lambda: load(path))
    assert "TensorFlow does not accept the graph: " in said
    assert "'b'" in said or "node b" in said


def test_custom_op_that_is_not_loaded(tmp_path: Path) -> None:
    path = graph_file(tmp_path / "custom.pb", source("a"), node("b", "FancyOp", "a"))
    assert fails(lambda: load(path)) == (
        f"{path}: node 'b' has op type 'FancyOp', which TensorFlow {tf.__version__} does not know; "
        "is it a custom op whose library is not loaded (tf.load_op_library)?"
    )
    call = node("c", "PartitionedCall")
    call.attr["f"].func.name = "body"
    graph_def = v1.GraphDef(node=[call])
    function = graph_def.library.function.add()
    function.signature.name = "body"
    function.node_def.append(node("inner", "FancyOp"))
    path.write_bytes(graph_def.SerializeToString())
    assert "node 'inner' of function 'body' has op type 'FancyOp'" in fails(lambda: load(path))


def test_call_of_a_function_that_is_missing(tmp_path: Path) -> None:
    call = node("c", "PartitionedCall")
    call.attr["f"].func.name = "nowhere"
    path = graph_file(tmp_path / "call.pb", call)
    fails(lambda: load(path))


def test_object_of_tensorflow_that_is_no_model() -> None:
    assert fails(lambda: load(tf.constant(1))).startswith("cannot read a graph from a EagerTensor")
