"""Reads TensorFlow models: graphs, functions, Keras models and the files they are saved in.

Each `from_*` function gives the `Graph` of one step. Op names are TensorFlow's own. Functions and
functional control flow are inlined (`graphdef.py`), so that the ops inside can be placed; the ops
are then sized and tied together (`convert.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from placewright.backends.tensorflow._tf import (
    DecodeError,
    GraphDef,
    SavedModel,
    dtype_name,
    resource_shape_and_type,
    shorten,
    text_format,
    tf,
    traces,
)
from placewright.backends.tensorflow.convert import Roles, convert
from placewright.backends.tensorflow.graphdef import (
    FlatGraph,
    PartialShape,
    Sizes,
    bind_shapes,
    flatten,
    op_name,
)
from placewright.backends.tensorflow.models import BenchmarkModel
from placewright.errors import ModelError
from placewright.files import read_bytes
from placewright.graph import Graph

__all__ = [
    "Step",
    "from_meta_graph",
    "step_of_benchmark",
    "step_of_file",
    "step_of_function",
    "step_of_graph",
    "step_of_keras",
    "step_of_object",
    "step_of_saved_model",
]

_MAX_PROTO_BYTES = 2**31 - 1
"""Protocol buffers cannot be larger."""

_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")
_TRAIN_OP = "train_op"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step as it was read, before anything is done to it: all that a `Graph` is made from."""

    name: str
    graph_def: GraphDef
    fetches: Sequence[str]
    """What the step is run for; empty for everything."""
    sizes: Sizes
    roles: Roles
    group_rules: Iterable[tuple[str, str]] = ()
    input_names: Mapping[str, str] = field(default_factory=dict)
    """Other names of the inputs, see `flatten`."""
    live: Any = None
    """The `tf.Graph` it came from, where there is one."""
    loops: Mapping[str, int] = field(default_factory=dict)
    """How often loops run, as the user says, see `loops.loops_of`."""
    where: str = ""
    """The file, for errors."""

    def flat(self) -> FlatGraph:
        """Changes `graph_def`."""
        with _blamed_on(self.where):
            return flatten(
                self.graph_def,
                fetches=self.fetches,
                sizes=self.sizes,
                input_names=self.input_names,
                live=self.live,
            )

    def convert(self, flat: FlatGraph) -> Graph:
        with _blamed_on(self.where):
            return convert(
                flat,
                name=self.name,
                group_rules=self.group_rules,
                roles=self.roles,
                loops=self.loops,
            )

    def graph(self) -> Graph:
        return self.convert(self.flat())


@contextlib.contextmanager
def _blamed_on(where: str) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        if not where:
            raise
        raise ModelError(f"{where}: {error}") from error


# --- live objects --------------------------------------------------------------------------------


def step_of_object(source: Any, **options: Any) -> Step:
    """The graph of whatever TensorFlow object `source` is."""
    if isinstance(source, tf.Graph):
        return step_of_graph(source, **options)
    if isinstance(
        source,
        tf.types.experimental.ConcreteFunction | tf.types.experimental.PolymorphicFunction,
    ):
        return step_of_function(source, **options)
    if isinstance(source, tf.keras.Model):
        return step_of_keras(source, **options)
    raise ModelError(
        f"cannot read a graph from a {type(source).__name__}; give a path, a tf.Graph, a "
        "tf.function, a ConcreteFunction or a compiled Keras model"
    )


def step_of_benchmark(model: BenchmarkModel, *, fetches: Sequence[str] = ()) -> Step:
    """The training step of a benchmark model."""
    return step_of_graph(
        model.graph,
        name=model.name,
        fetches=fetches or (model.train_op, model.loss),
        group_rules=model.group_rules,
    )


def step_of_graph(
    graph: Any,
    *,
    name: str = "graph",
    fetches: Sequence[str] = (),
    group_rules: Iterable[tuple[str, str]] = (),
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    roles: Roles | None = None,
) -> Step:
    """The ops of a `tf.Graph` that `fetches` need; all of them without fetches.

    Args:
        graph: the `tf.Graph`.
        name: what the result is called.
        fetches: op or tensor names.
        group_rules: (pattern, label) pairs, see `Graph.group_rules`.
        batch: the first dimension of inputs that leave it open.
        dims: other open dimensions, `{"x.1": 128}`, see `Sizes`.
        roles: what is known about the variables.
    """
    graph_def = _graph_def_of(graph)
    if not graph_def.node:
        raise ModelError(f"the graph {name!r} has no ops; was it built in another tf.Graph?")
    return Step(
        name=name,
        graph_def=graph_def,
        fetches=fetches,
        sizes=Sizes(batch=batch, dims=dims or {}),
        roles=roles or Roles(results=_tensors_among(fetches)),
        group_rules=group_rules,
        live=graph,
    )


def _graph_def_of(graph: Any) -> GraphDef:
    """The nodes of a live graph, with variables in place of handles given from outside."""
    try:
        graph_def = graph.as_graph_def()
    except (ValueError, tf.errors.OpError, DecodeError) as error:
        raise ModelError(
            f"the graph cannot be exported: {shorten(error)}; does it hold large constants?"
        ) from error
    for node in graph_def.node:
        if node.op != "Placeholder" or dtype_name(node.attr["dtype"].type) != "resource":
            continue
        variable = resource_shape_and_type(graph.get_tensor_by_name(f"{node.name}:0"))
        if variable is not None:
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = variable.dtype
            node.attr["shape"].shape.CopyFrom(variable.shape)
    return graph_def


def _tensors_among(fetches: Iterable[str]) -> tuple[str, ...]:
    return tuple(fetch for fetch in fetches if ":" in fetch)


def step_of_function(
    function: Any,
    *,
    name: str | None = None,
    fetches: Sequence[str] = (),
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    slots: Iterable[Any] | None = None,
) -> Step:
    """The graph of a ConcreteFunction, or of a `tf.function` that has one signature.

    `slots` are the variables that are the optimizer's state, where the caller knows them. Without
    fetches the function's outputs and everything that it does besides is kept.
    """
    concrete = _concrete(function)
    graph = concrete.graph
    results = [tensor.name for tensor in graph.outputs]
    everything = [*results, *(op.name for op in graph.control_outputs)]
    roles = Roles(
        parameters=_owners_in(graph, graph.trainable_variables),
        slots=None if slots is None else _owners_in(graph, slots),
        results=tuple(results),
    )
    return step_of_graph(
        graph,
        name=name or graph.name or "function",
        fetches=fetches or everything,
        batch=batch,
        dims=dims,
        roles=roles,
    )


def _owners_in(graph: Any, variables: Iterable[Any]) -> frozenset[str]:
    """The names of the nodes by which a function knows these variables."""
    handles = {id(variable.handle) for variable in variables if hasattr(variable, "handle")}
    return frozenset(
        op_name(inside.name) for outside, inside in graph.captures if id(outside) in handles
    )


def _concrete(function: Any) -> Any:
    if isinstance(function, tf.types.experimental.ConcreteFunction):
        return function
    name = getattr(function, "__name__", "function")
    if function.input_signature is not None:
        try:
            return function.get_concrete_function()
        except Exception as error:  # tracing runs the user's code, which may raise anything
            raise ModelError(f"tf.function {name!r} cannot be traced: {shorten(error)}") from error
    found = traces(function)
    if len(found) != 1:
        often = (
            "has not been traced" if not found else f"has been traced with {len(found)} signatures"
        )
        raise ModelError(
            f"tf.function {name!r} {often}; give it an input_signature, or pass "
            "get_concrete_function(...)"
        )
    return found[0]


# --- Keras ---------------------------------------------------------------------------------------


def step_of_keras(
    model: Any,
    *,
    name: str | None = None,
    fetches: Sequence[str] = (),
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Step:
    """The training step of a compiled Keras model: forward, loss, backward, update.

    Labels are inputs too: of the shape of the output, or without its last dimension for losses
    called sparse.
    """
    name = name or str(model.name)
    if getattr(model, "optimizer", None) is None or getattr(model, "loss", None) is None:
        raise ModelError(
            f"Keras model {name!r} is not compiled; call compile(optimizer=..., loss=...) first: "
            "the training step is what is placed"
        )
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ModelError(
            f"Keras model {name!r} does not know its inputs; build it from keras.Input, or pass a "
            "tf.function of its training step"
        )
    shapes: dict[str, PartialShape] = {tensor.name: tuple(tensor.shape) for tensor in inputs}
    bound = bind_shapes(shapes, Sizes(batch=batch, dims=dims or {}), {})
    specs = [tf.TensorSpec(bound[t.name], t.dtype, name=t.name) for t in inputs]
    try:
        model.optimizer.build(model.trainable_variables)
        step = tf.function(_training_step(model), autograph=False)
        concrete = step.get_concrete_function(*specs)
    except Exception as error:  # tracing runs the user's layers, which may raise anything
        raise ModelError(
            f"the training step of Keras model {name!r} cannot be traced: {shorten(error)}"
        ) from error
    slots = [variable.value for variable in model.optimizer.variables]
    return step_of_function(concrete, name=name, fetches=fetches, slots=slots)


def _training_step(model: Any) -> Any:
    def step(*flat_inputs: Any) -> Any:
        # Functional models keep how their inputs are nested; the others have one or a list.
        nested = getattr(model, "_inputs_struct", model.inputs if len(flat_inputs) > 1 else None)
        inputs = tf.keras.tree.pack_sequence_as(nested, flat_inputs)
        if type(model).train_step is not tf.keras.Model.train_step:
            # The model has a step of its own. This forward pass is only for the labels' shapes: as
            # nothing needs it, it will be pruned.
            return model.train_step((inputs, _labels(model, model(inputs, training=False))))
        with tf.GradientTape() as tape:
            predictions = model(inputs, training=True)
            labels = _labels(model, predictions)
            loss = model.compute_loss(inputs, labels, predictions, None)
            scaled = model.optimizer.scale_loss(loss)  # the loss itself unless precision is mixed
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(scaled, variables), variables)
        return loss

    return step


def _labels(model: Any, predictions: Any) -> Any:
    """Placeholders for what the predictions are compared with."""
    outputs = tf.nest.flatten(predictions)
    losses = tf.nest.flatten(model.loss)
    if isinstance(model.loss, Mapping):
        keys = sorted(predictions) if isinstance(predictions, Mapping) else model.output_names
        losses = [model.loss.get(key) for key in keys]
    if len(losses) != len(outputs):
        losses = losses[:1] * len(outputs)
    labels = []
    for output, loss in zip(outputs, losses, strict=True):
        called = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        sparse = "sparse" in called.lower()
        dtype, shape = (tf.int32, output.shape[:-1]) if sparse else (output.dtype, output.shape)
        labels.append(tf.compat.v1.placeholder(dtype, shape, name="labels"))
    return tf.nest.pack_sequence_as(predictions, labels)


# --- files ---------------------------------------------------------------------------------------


def step_of_file(
    path: str | Path,
    *,
    name: str | None = None,
    fetches: Sequence[str] = (),
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Step:
    """The graph in a GraphDef or MetaGraphDef file, text or binary.

    Without fetches: the `train_op` of a MetaGraph that has one, otherwise every op.
    """
    path = Path(path)
    if path.name in _SAVED_MODEL:
        return step_of_saved_model(path.parent, name=name, fetches=fetches, batch=batch, dims=dims)
    content = _read(path)
    # A GraphDef's bytes may happen to be a MetaGraphDef too and the other way round; the likelier
    # one is tried first, and one without nodes does not count.
    kinds = [tf.compat.v1.GraphDef, tf.compat.v1.MetaGraphDef]
    if ".meta" in path.suffixes:
        kinds.reverse()
    graph_def, default_fetches = None, []
    for kind in kinds:
        parsed = _parse(content, kind)
        if isinstance(parsed, str):
            continue
        candidate = parsed if kind is tf.compat.v1.GraphDef else parsed.graph_def
        if candidate.node and all(node.name and node.op for node in candidate.node):
            graph_def = candidate
            if kind is tf.compat.v1.MetaGraphDef:
                default_fetches = _train_ops(parsed)
            break
    if graph_def is None:
        raise ModelError(f"{path}: {_why_not(content, kinds)}")
    with _blamed_on(str(path)):
        return Step(
            name=name or path.name.split(".")[0],
            graph_def=graph_def,
            fetches=fetches or default_fetches,
            sizes=Sizes(batch=batch, dims=dims or {}),
            roles=Roles(results=_tensors_among(fetches)),
            where=str(path),
        )


def from_meta_graph(
    meta_graph: Any,
    *,
    name: str = "graph",
    fetches: Sequence[str] = (),
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Graph:
    """The graph of a MetaGraphDef in memory; as `step_of_file` reads one."""
    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(meta_graph.graph_def)  # flatten changes it
    flat = flatten(
        graph_def,
        fetches=fetches or _train_ops(meta_graph),
        sizes=Sizes(batch=batch, dims=dims or {}),
    )
    return convert(flat, name=name, roles=Roles(results=_tensors_among(fetches)))


def _read(path: Path) -> bytes:
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    if size > _MAX_PROTO_BYTES:
        raise ModelError(
            f"{path}: is {size / 2**30:.1f} GiB, a GraphDef has at most 2; are the weights "
            "stored as constants?"
        )
    return read_bytes(path, ModelError, what="graph", most=_MAX_PROTO_BYTES)


def _is_text(content: bytes) -> bool:
    # Serialised messages have bytes below 32 as tags and lengths from the start.
    return all(byte >= 32 or byte in b"\t\n\r" for byte in content[:4096])


def _parse(content: bytes, kind: Any) -> Any:
    """A message of this kind, or the reason why the content is none."""
    message = kind()
    try:
        if _is_text(content):
            text_format.Parse(content.decode(), message)
        else:
            message.ParseFromString(content)
    except (text_format.ParseError, UnicodeDecodeError, DecodeError, RecursionError) as error:
        return shorten(error)
    return message


def _why_not(content: bytes, kinds: Sequence[Any]) -> str:
    reasons = [_parse(content, kind) for kind in kinds]
    reason = next((reason for reason in reasons if isinstance(reason, str)), "")
    kind = "text" if _is_text(content) else "binary"
    if not reason:
        return f"no graph in this {kind} file: it has no nodes; is it a GraphDef or MetaGraphDef?"
    return (
        f"not a GraphDef or MetaGraphDef in {kind} form ({reason}); is it truncated, or a file of "
        "another kind?"
    )


def _train_ops(meta_graph: Any) -> list[str]:
    for key in (_TRAIN_OP, f"saved_model_{_TRAIN_OP}"):
        if key in meta_graph.collection_def:
            return list(meta_graph.collection_def[key].node_list.value)
    return []


# --- SavedModels ---------------------------------------------------------------------------------


def step_of_saved_model(
    path: str | Path,
    *,
    name: str | None = None,
    signature: str | None = None,
    fetches: Sequence[str] = (),
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Step:
    """The graph of one signature of a SavedModel. Its weights are not read.

    The signature is `serving_default`, or the only one there is, unless another one is named.
    """
    path = Path(path)
    file = next((path / file for file in _SAVED_MODEL if (path / file).exists()), None)
    if file is None:
        raise ModelError(f"{path}: there is no {_SAVED_MODEL[0]} in it; is it a SavedModel?")
    saved = _parse(_read(file), SavedModel)
    if isinstance(saved, str):
        raise ModelError(f"{file}: not a SavedModel ({saved}); is it truncated?")
    with _blamed_on(str(path)):
        meta_graph, chosen = _choose_signature(saved, signature)
        outputs = [info.name for info in chosen.outputs.values() if info.name]
        step = list(outputs)
        if chosen.method_name == "tensorflow/supervised/training":
            step += _train_ops(meta_graph)
        if not (fetches or step):
            raise ModelError("the signature has no outputs, so it is not known what to run")
        return Step(
            name=name or path.resolve().name,
            graph_def=meta_graph.graph_def,
            fetches=fetches or step,
            sizes=Sizes(batch=batch, dims=dims or {}),
            input_names={key: op_name(info.name) for key, info in chosen.inputs.items()},
            roles=Roles(results=_tensors_among(fetches) or tuple(outputs)),
            where=str(path),
        )


def _choose_signature(saved: Any, wanted: str | None) -> tuple[Any, Any]:
    """The MetaGraph that has the signature, and the signature."""
    found = {
        key: (meta_graph, signature)
        for meta_graph in reversed(saved.meta_graphs)  # the first one goes before others
        for key, signature in meta_graph.signature_def.items()
        if not key.startswith("__")  # TensorFlow's own, to initialise
    }
    names = ", ".join(sorted(found))
    if not found:
        raise ModelError(
            "the SavedModel has no signatures; save it with signatures=..., or pass the loaded "
            "function"
        )
    if wanted is None:
        wanted = next(iter(found)) if len(found) == 1 else "serving_default"
        if wanted not in found:
            raise ModelError(f"which signature? There are {names}")
    if wanted not in found:
        raise ModelError(f"there is no signature {wanted!r}; there are {names}")
    return found[wanted]
