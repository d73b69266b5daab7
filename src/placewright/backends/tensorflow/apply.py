"""Puts a placement into TensorFlow's own graphs: files, live graphs and functions."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from placewright.backends.tensorflow import wire
from placewright.backends.tensorflow._tf import GraphDef, NodeDef, SavedModel, text_format, tf
from placewright.backends.tensorflow.convert import VARIABLES
from placewright.backends.tensorflow.graphdef import _keep, parse_input
from placewright.backends.tensorflow.reading import (
    _SAVED_MODEL,
    _concrete,
    _is_text,
    _parse,
    _read,
    _why_not,
)
from placewright.backends.tensorflow.wire import Devices
from placewright.errors import ModelError, PlacementError
from placewright.files import write_bytes
from placewright.graph import DisjointSets

log = logging.getLogger(__name__)

Placed = Mapping[str, str]
"""Op name -> TensorFlow's name of its device."""


# --- names of devices ----------------------------------------------------------------------------


def tensorflow_devices(
    names: Iterable[str], given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """TensorFlow's names of a cluster's devices: `/device:GPU:0` for `gpu:0`.

    A name that begins with a slash is TensorFlow's own; others must be `given`.
    """
    given = dict(given or {})
    result = {}
    for name in names:
        match = re.fullmatch(r"(cpu|gpu|tpu|xpu):(\d+)", name, re.IGNORECASE)
        if name in given:
            result[name] = given.pop(name)
        elif name.startswith("/"):
            result[name] = name
        elif match:
            result[name] = f"/device:{match[1].upper()}:{match[2]}"
        else:
            raise PlacementError(
                f"what does TensorFlow call device {name!r}? Say so: "
                f"devices={{{name!r}: '/job:worker/task:0/device:GPU:0'}}"
            )
    for name, text in result.items():
        try:
            tf.DeviceSpec.from_string(text)
        except ValueError:
            raise PlacementError(f"{text!r} ({name}) is not a device of TensorFlow's") from None
    if given:
        raise PlacementError(
            f"the placement uses no device {next(iter(given))!r}; it uses {', '.join(result)}"
        )
    return result


# --- which node goes where -----------------------------------------------------------------------


def _devices(graph_def: GraphDef, placed: Placed) -> Devices:
    """Where every node goes that is placed, or that must be where a placed one is."""
    nodes = {node.name: node for node in graph_def.node}
    of_node = {name: placed[name] for name in nodes if name in placed}
    of_body = _bodies(graph_def, placed)
    missing = [
        name
        for name in placed
        if name not in nodes and name not in of_body.found and not _made_by_inlining(name)
    ]
    if missing:
        raise PlacementError(
            f"the placement is for another model: {len(missing):,} of its {len(placed):,} ops are "
            f"not in this one, such as {missing[0]!r}"
        )
    of_node.update(_tied(nodes, of_node))
    return Devices(of_node, of_body.devices)


def _made_by_inlining(name: str) -> bool:
    """Whether a name is one that opening a function makes, not one that the model has."""
    return name.startswith("Func/") or re.search(r"/_\d+$", name) is not None


def _tied(nodes: Mapping[str, NodeDef], of_node: Mapping[str, str]) -> dict[str, str]:
    """Nodes that are not placed, as the step does not need them (initialisers, savers), but that
    TensorFlow keeps where placed ones are: co-located, or working on the same variable."""
    numbers = {name: i for i, name in enumerate(nodes)}
    sets = DisjointSets(len(nodes))
    for name, node in nodes.items():
        for other in _companions(node, nodes):
            sets.union(numbers[name], numbers[other])
    device_of_set = {sets.find(numbers[name]): device for name, device in of_node.items()}
    return {
        name: device_of_set[root]
        for name, i in numbers.items()
        if name not in of_node and (root := sets.find(i)) in device_of_set
    }


def _companions(node: NodeDef, nodes: Mapping[str, NodeDef]) -> Iterator[str]:
    """The nodes that this one must be with."""
    for text in node.attr["_class"].list.s if "_class" in node.attr else ():
        name = text[5:].decode(errors="replace")
        if text.startswith(b"loc:@") and name in nodes:
            yield name
    for text in node.input:
        name, output = parse_input(text)
        if output is not None and name in nodes and nodes[name].op in VARIABLES:
            yield name


# --- functions -----------------------------------------------------------------------------------


class _Bodies:
    def __init__(self) -> None:
        self.votes: dict[tuple[str, str], Counter[str]] = {}
        self.found: set[str] = set()

    @property
    def devices(self) -> dict[tuple[str, str], str]:
        return {key: votes.most_common(1)[0][0] for key, votes in self.votes.items()}


def _bodies(graph_def: GraphDef, placed: Placed) -> _Bodies:
    """Devices of the nodes inside functions.

    A node of a body is placed under the names of all calls that lead to it, joined by slashes; the
    bodies of conditions and loops have a number in between, which is left out here.
    """
    result = _Bodies()
    functions = {f.signature.name: f for f in graph_def.library.function}
    if not functions:
        return result
    plain: dict[str, list[str]] = {}
    for name in placed:
        plain.setdefault(re.sub(r"/_\d+(?=/)", "", name), []).append(name)

    def visit(nodes: Iterable[NodeDef], prefix: str, function: str, depth: int) -> None:
        for node in nodes:
            if function:
                for name in plain.get(prefix + node.name, ()):
                    result.found.add(name)
                    votes = result.votes.setdefault((function, node.name), Counter())
                    votes[placed[name]] += 1
            if depth < 100:  # recursion is not inlined, so it leads nowhere
                for part, called in _calls(node, functions):
                    inside = f"{prefix}{node.name}/{part}"
                    visit(functions[called].node_def, inside, called, depth + 1)

    visit(graph_def.node, "", "", 0)
    split = {key: votes for key, votes in result.votes.items() if len(votes) > 1}
    for function, name in list(split):
        if _takes_handles(functions[function], name):
            # It has to be where the variable is, another one in each call; without a device
            # TensorFlow sees to that.
            del result.votes[function, name]
            del split[function, name]
    if split:
        (function, node), votes = next(iter(split.items()))
        log.warning(
            "%d ops are in functions that are called several times and would be on several "
            "devices, such as %s in %s (%s): a function has one; most of its calls decide",
            len(split), node, function, ", ".join(sorted(votes)),
        )  # fmt: skip
    return result


def _takes_handles(function: Any, name: str) -> bool:
    """Whether a node of a function works on a variable that is handed to it."""
    resource = tf.resource.as_datatype_enum
    handles = {arg.name for arg in function.signature.input_arg if arg.type == resource}
    node = next(node for node in function.node_def if node.name == name)
    return any(parse_input(text)[0] in handles for text in node.input)


_BRANCHES = {"then_branch": "then/", "else_branch": "else/", "cond": "cond/", "body": "body/"}


def _calls(node: NodeDef, functions: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what its inlined ops have in their names, function) of each function a node calls."""
    if node.op in functions:
        yield "", node.op
    for key, value in node.attr.items():
        if value.func.name in functions and (key == "f" or key in _BRANCHES):
            yield _BRANCHES.get(key, ""), value.func.name
        for i, function in enumerate(value.list.func):
            if key == "branches" and function.name in functions:
                yield f"branch{i}/", function.name


# --- files ---------------------------------------------------------------------------------------


def apply_to_file(model: str | Path, placed: Placed, output: str | Path) -> int:
    """Writes the model with devices set, in the form it has: GraphDef or MetaGraphDef, binary or
    text, or a SavedModel's directory. Gives the number of nodes that have a device now.

    Binary files are the same byte for byte but for the device fields; text files are parsed and
    written again.
    """
    source, target = Path(model), Path(output)
    if source.is_dir() or source.name in _SAVED_MODEL:
        return _apply_to_saved_model(source if source.is_dir() else source.parent, placed, target)
    content = _read(source)
    kinds = [tf.compat.v1.GraphDef, tf.compat.v1.MetaGraphDef]
    if ".meta" in source.suffixes:
        kinds.reverse()
    for kind in kinds:
        message = _parse(content, kind)
        is_meta = kind is tf.compat.v1.MetaGraphDef
        if isinstance(message, str):
            continue
        graph_def = message.graph_def if is_meta else message
        if not graph_def.node or not all(node.name and node.op for node in graph_def.node):
            continue
        devices = _devices(graph_def, placed)
        if _is_text(content):
            _set(graph_def, devices)
            result = text_format.MessageToString(message).encode()
        elif is_meta:
            result = wire.in_meta_graph(content, devices)
        else:
            result = wire.in_graph(content, devices)
        write_bytes(target, result, ModelError)
        return len(devices.of_node) + len(devices.of_body)
    raise ModelError(f"{source}: {_why_not(content, kinds)}")


def _apply_to_saved_model(source: Path, placed: Placed, target: Path) -> int:
    file = next((source / name for name in _SAVED_MODEL if (source / name).exists()), None)
    if file is None:
        raise ModelError(f"{source}: there is no {_SAVED_MODEL[0]} in it; is it a SavedModel?")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target}: is there already; a SavedModel is written to a new directory")
    content = _read(file)
    saved = _parse(content, SavedModel)
    if isinstance(saved, str):
        raise ModelError(f"{file}: not a SavedModel ({saved}); is it truncated?")
    # The placement is of a signature of one of its MetaGraphs: the one that has all the ops.
    found: dict[int, Devices] = {}
    reason = PlacementError(f"{file}: the SavedModel has no graph")
    for number, meta_graph in enumerate(saved.meta_graphs):
        try:
            found[number] = _devices(meta_graph.graph_def, placed)
        except PlacementError as error:
            reason = error
    if not found:
        raise reason
    if _is_text(content):
        for number, devices in found.items():
            _set(saved.meta_graphs[number].graph_def, devices)
        result = text_format.MessageToString(saved).encode()
    else:
        result = wire.in_saved_model(content, found)
    try:
        # Not its fingerprint, which is of the graph without devices.
        ignored = shutil.ignore_patterns("fingerprint.pb", file.name)
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    except (OSError, shutil.Error) as fault:
        raise ModelError(f"{target}: the model cannot be copied there: {fault}") from None
    write_bytes(target / file.name, result, ModelError)
    return sum(len(devices.of_node) + len(devices.of_body) for devices in found.values())


def _set(graph_def: GraphDef, devices: Devices) -> None:
    for node in graph_def.node:
        if node.name in devices.of_node:
            node.device = devices.of_node[node.name]
    for function in graph_def.library.function:
        for node in function.node_def:
            device = devices.of_body.get((function.signature.name, node.name))
            if device is not None:
                node.device = device


# --- live objects --------------------------------------------------------------------------------


def apply_to_object(target: Any, placed: Placed) -> Any:
    """The target with devices set: a `tf.Graph` itself, in place; a copy of a GraphDef or
    MetaGraphDef; a new ConcreteFunction for a function."""
    if isinstance(target, tf.compat.v1.GraphDef):
        graph_def = tf.compat.v1.GraphDef()
        graph_def.CopyFrom(target)
        _set(graph_def, _devices(graph_def, placed))
        return graph_def
    if isinstance(target, tf.compat.v1.MetaGraphDef):
        meta_graph = tf.compat.v1.MetaGraphDef()
        meta_graph.CopyFrom(target)
        _set(meta_graph.graph_def, _devices(meta_graph.graph_def, placed))
        return meta_graph
    function_kinds = (
        tf.types.experimental.ConcreteFunction,
        tf.types.experimental.PolymorphicFunction,
    )
    if isinstance(target, function_kinds):
        return _placed_function(_concrete(target), placed)
    if isinstance(target, tf.Graph):
        if hasattr(target, "captures"):
            raise PlacementError(
                "the graph of a function cannot be changed once it is made; apply the placement to "
                "the function itself, which gives a new one"
            )
        devices = _devices(target.as_graph_def(), placed)
        if devices.of_body:
            raise PlacementError(
                "the graph calls functions, whose ops cannot be changed in place; apply the "
                "placement to its GraphDef (graph.as_graph_def()) and import that"
            )
        for name, device in devices.of_node.items():
            target.get_operation_by_name(name)._set_device(device)
        return target
    raise PlacementError(
        f"cannot apply a placement to a {type(target).__name__}; give a tf.Graph, a GraphDef, a "
        "MetaGraphDef, a tf.function or a ConcreteFunction"
    )


def _placed_function(concrete: Any, placed: Placed) -> Any:
    """A function that computes the same with its ops where the placement says, on the same
    variables."""
    graph = concrete.graph
    graph_def = graph.as_graph_def()
    devices = _devices(graph_def, placed)
    # Variables are where they were made, and what works on them has to be there too: TensorFlow
    # puts it there when it has no device.
    given = {tensor.op.name for tensor in graph.inputs}
    resources = {t.op.name for t in graph.inputs if t.dtype in (tf.resource, tf.variant)}
    free = given | {
        node.name
        for node in graph_def.node
        if any(parse_input(text)[0] in resources for text in node.input)
    }
    kept = {name: device for name, device in devices.of_node.items() if name not in free}
    _set(graph_def, Devices(kept, devices.of_body))
    _keep(graph_def, {node.name for node in graph_def.node} - given)
    outside = {inside.name: captured for captured, inside in graph.captures}
    arguments = [tensor for tensor in graph.inputs if tensor.name not in outside]
    # An input that is returned as it came has no node left to ask for.
    computed = [tensor.name for tensor in graph.outputs if tensor.op.name not in given]
    read = {parse_input(text)[0] for node in graph_def.node for text in node.input}

    def step(*values: Any) -> Any:
        made = tf.compat.v1.get_default_graph()
        fed = {name: made.capture(captured) for name, captured in outside.items()}
        fed.update((tensor.name, value) for tensor, value in zip(arguments, values, strict=True))
        used = {name: value for name, value in fed.items() if name.partition(":")[0] in read}
        results = tf.graph_util.import_graph_def(
            graph_def, input_map=used, return_elements=computed, name=""
        )
        every = {**fed, **dict(zip(computed, results, strict=True))}
        # What is None in the result has no tensor in the graph.
        left = iter([every[tensor.name] for tensor in graph.outputs])
        structure = concrete.structured_outputs
        flat = tf.nest.flatten(structure, expand_composites=True)
        values_out = [None if leaf is None else next(left) for leaf in flat]
        return tf.nest.pack_sequence_as(structure, values_out, expand_composites=True)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments]
    return tf.function(step, autograph=False).get_concrete_function(*specs)
