"""A step that TensorFlow can run: the flat graph, how its variables start, what has to be fed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placewright.backends.base import Input
from placewright.backends.tensorflow._tf import GraphDef, NodeDef, op_def, tf
from placewright.backends.tensorflow.convert import VARIABLES
from placewright.backends.tensorflow.graphdef import FlatGraph, op_name
from placewright.backends.tensorflow.reading import Step
from placewright.errors import ModelError
from placewright.graph import Graph


@dataclass(frozen=True, kw_only=True)
class TensorFlowProgram:
    """A `Graph` and what it takes to run it. The nodes have the names of the graph's ops."""

    graph: Graph
    graph_def: bytes
    """The step and the initialisers, serialised, without devices and co-location: the placement
    says where everything goes, and its grouping keeps together what must be. Random ops have a
    seed, so that variables begin with the same values in every run."""
    inputs: tuple[Input, ...]
    targets: tuple[str, ...]
    """Ops that a step runs."""
    results: tuple[str, ...]
    """Tensors that a step returns, such as the loss."""
    initializers: Mapping[str, str]
    """Op that owns a variable -> op that sets its first value."""
    backend: str = "tensorflow"


def make_program(step: Step) -> TensorFlowProgram:
    original = tf.compat.v1.GraphDef()
    original.CopyFrom(step.graph_def)  # flattening throws away the initialisers
    flat = step.flat()
    graph = step.convert(flat)
    program = tf.compat.v1.GraphDef()
    if flat.library is not None:
        program.library.CopyFrom(flat.library)
    if original.versions.producer:
        program.versions.CopyFrom(original.versions)
    else:
        program.versions.producer = tf.compat.v1.GRAPH_DEF_VERSION
    for node in flat.nodes:
        _add(program, node)
    _check_iterators(flat.nodes)
    initializers = _add_initializers(program, flat, original)
    read = {op_name(text) for node in flat.nodes for text in node.input}
    names = {node.name for node in flat.nodes}
    fetched = [op_name(fetch) for fetch in step.fetches]
    results = tuple(result for result in step.roles.results if op_name(result) in names)
    return TensorFlowProgram(
        graph=graph,
        graph_def=program.SerializeToString(),
        inputs=tuple(
            Input(node.name, output.dtype, tuple(size or 0 for size in output.shape or ()))
            for node in flat.nodes
            if node.op == "Placeholder"
            for output in flat.outputs[node.name]
        ),
        targets=tuple(fetched) or tuple(node.name for node in flat.nodes if node.name not in read),
        results=results,
        initializers=initializers,
    )


def _add(program: GraphDef, node: NodeDef) -> None:
    copy = program.node.add()
    copy.CopyFrom(node)
    copy.device = ""
    for attribute in ("_class", "_output_shapes"):
        copy.attr.pop(attribute, None)
    if copy.op == "VarHandleOp" and not copy.attr["shared_name"].s:
        # Without a name every session would have a variable of its own.
        copy.attr["shared_name"].s = copy.name.encode()
    if _has_no_seed(copy):
        # From the name: two ops must not draw the same numbers.
        copy.attr["seed"].i = 1
        copy.attr["seed2"].i = zlib.crc32(copy.name.encode())


def _has_no_seed(node: NodeDef) -> bool:
    """Whether it is a random op that draws other numbers in every run: both seeds are 0."""
    known = op_def(node.op)
    names = {attribute.name for attribute in known.attr} if known is not None else set()
    seeds = {"seed", "seed2"}
    return seeds <= names and not any(node.attr[name].i for name in seeds if name in node.attr)


def _check_iterators(nodes: Sequence[NodeDef]) -> None:
    for node in nodes:
        if node.op in ("Iterator", "IteratorV2"):
            raise ModelError(
                f"the step reads its input from the iterator {node.name!r}, which only the program "
                "that made it can start; export the model with placeholders instead"
            )


# --- variables -----------------------------------------------------------------------------------

_ASSIGNS = {"VarHandleOp": "AssignVariableOp", "VariableV2": "Assign", "Variable": "Assign"}

_NOT_A_START = frozenset(["Placeholder", "PlaceholderWithDefault", "RestoreV2", "Restore",
    "IteratorGetNext", "PartitionedCall", "StatefulPartitionedCall"])  # fmt: skip
"""What a first value must not depend on: inputs, and checkpoints that are not there."""


def _add_initializers(program: GraphDef, flat: FlatGraph, original: GraphDef) -> dict[str, str]:
    """Adds to the program what sets the first value of each variable; gives the ops that do.

    That is the model's own initialiser where the graph has one. A SavedModel or a traced function
    has none: its variables are filled with a small number, which takes a step as long.
    """
    nodes = {node.name: node for node in original.node}
    there = {node.name for node in flat.nodes}
    candidates: dict[str, list[str]] = {}
    for node in original.node:
        if node.op in ("AssignVariableOp", "Assign") and node.name not in there:
            candidates.setdefault(op_name(node.input[0]), []).append(node.name)
    result = {}
    for node in flat.nodes:
        if node.op not in VARIABLES:
            continue
        wanted = sorted(candidates.get(node.name, ()), key=lambda n: n != f"{node.name}/Assign")
        for candidate in wanted:
            needed = _first_value(candidate, node.name, nodes)
            if needed is not None:
                for name in needed:
                    if name not in there:
                        there.add(name)
                        _add(program, nodes[name])
                result[node.name] = candidate
                break
        else:
            result[node.name] = _fill(program, node)
    return result


def _first_value(assign: str, variable: str, nodes: Mapping[str, NodeDef]) -> list[str] | None:
    """The nodes that an initialiser needs; None when it is not one that can run by itself."""
    needed = {assign: None}
    stack = [assign]
    while stack:
        node = nodes[stack.pop()]
        other_variable = node.op in VARIABLES and node.name != variable
        if node.op in _NOT_A_START or other_variable or op_def(node.op) is None:
            return None
        for text in node.input:
            name = op_name(text)
            if name not in needed:
                needed[name] = None
                stack.append(name)
    return list(needed)


def _fill(program: GraphDef, variable: NodeDef) -> str:
    dtype = tf.dtypes.as_dtype(variable.attr["dtype"].type)
    shape = tf.TensorShape(variable.attr["shape"].shape)
    if not shape.is_fully_defined():
        raise ModelError(
            f"variable {variable.name!r} has the shape {shape}, so it cannot be given a first value"
        )
    prefix = f"{variable.name}/first_value"
    value = 0.01 if dtype.is_floating or dtype.is_complex else "" if dtype == tf.string else 0
    size = _constant(program, f"{prefix}/shape", shape.as_list(), tf.int32)
    scalar = _constant(program, f"{prefix}/scalar", value, dtype)
    fill = program.node.add(name=prefix, op="Fill", input=[size, scalar])
    fill.attr["T"].type = dtype.as_datatype_enum
    fill.attr["index_type"].type = tf.int32.as_datatype_enum
    assign = program.node.add(
        name=f"{prefix}/assign", op=_ASSIGNS[variable.op], input=[variable.name, prefix]
    )
    key = "dtype" if assign.op == "AssignVariableOp" else "T"
    assign.attr[key].type = dtype.as_datatype_enum
    return str(assign.name)


def _constant(program: GraphDef, name: str, value: Any, dtype: Any) -> str:
    node = program.node.add(name=name, op="Const")
    node.attr["dtype"].type = dtype.as_datatype_enum
    shape = [len(value)] if isinstance(value, list) else []
    node.attr["value"].tensor.CopyFrom(
        tf.make_tensor_proto(False if dtype == tf.bool else value, dtype, shape=shape)
    )
    return name
