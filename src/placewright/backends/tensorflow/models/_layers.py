"""What the benchmark models have in common: variables, LSTM cells and the training step.

Every function that adds ops takes the full path of its name scope, because group rules go by names:
they must not depend on the scopes a caller has open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from placewright.backends.tensorflow.models import BenchmarkModel

Tensor = Any
"""TensorFlow is untyped; these aliases say what is meant."""
Variable = Any

LOSS_RULE = (r"^(gradients/)?(total_)?loss(/|_grad/|$)", "losses")
"""The sum over steps or heads."""
TRAIN_RULE = (r"^train(_step|/(learning_rate|decay|momentum|beta1|beta2|epsilon))?$", "optimizer")
"""The optimizer's settings, which every update reads, and the op that waits for all updates."""


def scope(path: str) -> Any:
    """A name scope that is `path` itself, whatever is open around it and however often entered."""
    return tf.compat.v1.name_scope(f"{path}/")


def variable(
    path: str, shape: Sequence[int], initializer: Any = None, *, trainable: bool = True
) -> Variable:
    """A float32 resource variable, Glorot-uniform unless told otherwise."""
    return tf.compat.v1.get_variable(
        path,
        shape,
        tf.float32,
        initializer or tf.compat.v1.glorot_uniform_initializer(),
        trainable=trainable,
        use_resource=True,
    )


def weight(path: str, shape: Sequence[int], initializer: Any = None) -> Tensor:
    """The value of a new variable, read once per training step.

    A read per use would be a tensor of its own per use, and would be sent to another device again
    for every time step; one read is sent to each device at most once.
    """
    created = variable(path, shape, initializer)
    with scope(path):
        return created.value()


def zeros(path: str, shape: Sequence[int]) -> Tensor:
    """A variable that starts at zero, such as a bias; read once."""
    return weight(path, shape, tf.compat.v1.zeros_initializer())


class LstmState(NamedTuple):
    """What an LSTM hands to its next step, and its output upwards."""

    cell: Tensor
    """[batch, units]"""
    output: Tensor
    """[batch, outputs]; outputs = units where there is no projection."""


class Lstm:
    """One LSTM layer; its cell is added to the graph once per time step.

    With `projection`, the output is a linear map of the cell's to fewer units (Sak et al., 2014).
    """

    def __init__(self, path: str, inputs: int, units: int, projection: int | None = None) -> None:
        self._path = path
        self._units = units
        self._outputs = projection or units
        self._kernel = weight(f"{path}/kernel", [inputs + self._outputs, 4 * units])
        self._bias = zeros(f"{path}/bias", [4 * units])
        self._projection = weight(f"{path}/projection", [units, projection]) if projection else None

    def step(self, t: int, inputs: Sequence[Tensor], state: LstmState | None) -> LstmState:
        """The cell at time `t`; inputs are concatenated; no state means that it starts at zero."""
        with scope(f"{self._path}/step_{t}"):
            if state is None:
                batch = inputs[0].shape[0]
                state = LstmState(tf.zeros([batch, self._units]), tf.zeros([batch, self._outputs]))
            gates = tf.matmul(tf.concat([*inputs, state.output], axis=1), self._kernel)
            gates = tf.nn.bias_add(gates, self._bias)
            new, keep, candidate, out = tf.split(gates, 4, axis=1)
            # +1: a cell remembers by default, without which long sequences hardly train.
            kept = tf.sigmoid(keep + 1.0) * state.cell
            cell = kept + tf.sigmoid(new) * tf.tanh(candidate)
            output = tf.sigmoid(out) * tf.tanh(cell)
            if self._projection is not None:
                output = tf.matmul(output, self._projection)
            return LstmState(cell, output)


def lookup(path: str, table: Variable, ids: Tensor) -> Tensor:
    """Rows of an embedding table. TensorFlow keeps the lookup on the device of its table."""
    with scope(path):
        return tf.gather(table, ids)


def finish(
    name: str,
    losses: Sequence[Tensor],
    loss_scale: float,
    optimizer: Any,
    group_rules: Sequence[tuple[str, str]],
    updates: Sequence[Any] = (),
) -> BenchmarkModel:
    """Adds loss, gradients and update to the current graph; the loss is `loss_scale` x sum."""
    total = tf.add_n(losses, name="total_loss")
    loss = tf.multiply(total, loss_scale, name="loss")
    gradients = optimizer.compute_gradients(
        loss,
        # Gates would make the gradient that the layer below waits for wait for the kernel's, and
        # would tie the ops of neighbouring time steps to one device.
        gate_gradients=tf.compat.v1.train.Optimizer.GATE_NONE,
        # Without this, TensorFlow places all gradients on one device.
        colocate_gradients_with_ops=True,
    )
    train_op = optimizer.apply_gradients(
        [(_summed(gradient, var), var) for gradient, var in gradients], name="train"
    )
    if updates:
        train_op = tf.group(train_op, *updates, name="train_step")
        # The optimizer put its own part there; a MetaGraph of the model should name the whole step.
        tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)[:] = [train_op]
    init_op = tf.compat.v1.global_variables_initializer()
    return BenchmarkModel(
        name=name,
        graph=tf.compat.v1.get_default_graph(),
        loss=loss.name,
        train_op=train_op.name,
        init_op=init_op.name,
        group_rules=(*group_rules, LOSS_RULE, TRAIN_RULE),
    )


def _summed(gradient: Any, var: Variable) -> Tensor:
    """The gradient of a variable as one tensor, summed on the variable's device."""
    if isinstance(gradient, tf.IndexedSlices):
        # The rows of an embedding table that were looked up. The optimizers would merge repeated
        # rows with `Unique`, whose output has no static shape, and then touch every row anyway:
        # Adam's moments decay everywhere.
        graph = tf.compat.v1.get_default_graph()
        with graph.colocate_with(var.op), scope(f"{var.op.name}/gradient"):
            return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, var.shape[0])
    if gradient.op.type == "AddN":
        # TensorFlow ties the sum over all time steps to the cell of one of them; this unties it.
        place = tf.compat.v1.AttrValue.ListValue(s=[b"loc:@" + var.op.name.encode()])
        gradient.op._set_attr("_class", tf.compat.v1.AttrValue(list=place))
    return gradient
