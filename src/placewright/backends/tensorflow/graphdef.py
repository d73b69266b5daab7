"""From any GraphDef to a flat one: checked, pruned to the step, sized, inlined, with shapes.

`flatten` is the whole way. What comes out has no function calls (but for those TensorFlow itself
cannot open) and every output's shape and dtype as far as TensorFlow can infer them.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from placewright.backends.tensorflow._tf import (
    GraphDef,
    NodeDef,
    dtype_name,
    import_graph_def,
    inline_functions,
    op_def,
    paused_collector,
    shorten,
    tf,
)
from placewright.errors import ModelError

log = logging.getLogger(__name__)

PartialShape = tuple[int | None, ...] | None
"""None for a dimension, or for all of them, that is not known."""


MERGES = frozenset(["Merge", "RefMerge"])
BACK_EDGES = frozenset(["NextIteration", "RefNextIteration"])
"""An edge from one of these to one of `MERGES` closes a loop."""


DATASET_LOOP = "dataset_loop"
"""The last part of the name of a call that stands for the body of a loop over a dataset."""


class Output(NamedTuple):
    """What is known of one output of a node."""

    shape: PartialShape
    dtype: str
    is_ref: bool = False
    """A reference to a variable (TensorFlow 1) rather than a value."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the user says about dimensions that the model leaves open."""

    batch: int | None = None
    """For the first dimension of every input."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """`x` -> its only open dimension; `x.1` -> its dimension number 1. Goes before `batch`."""

    def __post_init__(self) -> None:
        for what, size in [("batch", self.batch), *self.dims.items()]:
            if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
                raise ModelError(f"{what} must be a whole number, not {size!r}")
            if size is not None and not 1 <= size < 2**31:
                raise ModelError(f"{what} must be at least 1 and below 2**31, not {size}")


@dataclass(frozen=True, kw_only=True)
class FlatGraph:
    """The nodes of one step and their outputs."""

    nodes: Sequence[NodeDef]
    outputs: Mapping[str, Sequence[Output]]
    library: Any = None
    """Definitions of the functions that could not be opened."""
    dataset_sizes: Mapping[str, int] = field(default_factory=dict)
    """Name of a loop over a dataset -> its elements, where they are known."""
    dataset_loops: Sequence[str] = ()
    """Names of the loops over datasets whose bodies were opened in place: the nodes are those of
    one iteration, and nothing runs it again."""


@paused_collector()
def flatten(
    graph_def: GraphDef,
    *,
    fetches: Sequence[str] = (),
    sizes: Sizes | None = None,
    input_names: Mapping[str, str] | None = None,
    live: Any = None,
) -> FlatGraph:
    """The nodes that `fetches` need (all nodes without any), inlined, with shapes.

    Changes `graph_def`. `input_names` maps more names under which `sizes` may speak of an input to
    node names. `live` is the `tf.Graph` that `graph_def` was taken from, where there is one: it
    knows the shapes already.
    """
    dataset_sizes = {} if live is None else _dataset_sizes(live)
    if live is None:  # a live graph has passed these checks when it was built
        check(graph_def)
    names = [node.name for node in graph_def.node]
    has_calls = _has_calls(graph_def)
    # A name that the graph does not have may be one that inlining makes.
    early = not has_calls or all(op_name(fetch) in set(names) for fetch in fetches)
    if fetches and early:
        _keep(graph_def, ancestors(graph_def.node, resolve(fetches, names)))
    opened: dict[str, str] = {}
    if not has_calls:
        opened = open_dataset_loops(graph_def)
        has_calls = bool(opened)
    bound = bind(graph_def.node, sizes or Sizes(), input_names or {})
    if bound.scalars:
        log.warning("taken for scalars, as they have no shape: %s", ", ".join(bound.scalars))
    if has_calls:
        graph_def = inline(graph_def, resolve(fetches, names) if early else ())
        # Calls may have hidden loops over datasets, and these may have others in them.
        while more := open_dataset_loops(graph_def):
            opened |= more
            bind(graph_def.node, sizes or Sizes(), input_names or {})
            graph_def = inline(graph_def, resolve(fetches, names) if early else ())
        if fetches:
            names = [node.name for node in graph_def.node]
            _keep(graph_def, ancestors(graph_def.node, resolve(fetches, names)))
    nodes = tuple(graph_def.node)
    stated = None
    if not bound.changed and not has_calls:
        stated = declared_outputs(nodes) if live is None else _outputs_among(live, nodes)
    try:
        outputs = stated or infer_outputs(graph_def)
        return FlatGraph(
            nodes=nodes,
            outputs=outputs,
            library=graph_def.library,
            dataset_sizes={
                loop: dataset_sizes[source]
                for loop, source in opened.items()
                if source in dataset_sizes
            },
            dataset_loops=tuple(opened),
        )
    except ModelError as error:
        if not bound.scalars:
            raise
        name = bound.scalars[0]
        raise ModelError(
            f"input {name!r} has no shape and is no scalar; give all its dimensions with "
            f"--dim {name}.0=N --dim {name}.1=N ... ({error})"
        ) from error


# --- names and edges -----------------------------------------------------------------------------


def parse_input(text: str) -> tuple[str, int | None]:
    """`x` and `x:0` -> (x, 0), `^x` -> (x, None)."""
    if text.startswith("^"):
        return text[1:], None
    name, colon, number = text.rpartition(":")
    return (name, int(number)) if colon and number.isdecimal() else (text, 0)


def op_name(fetch: str) -> str:
    return parse_input(fetch)[0]


def resolve(fetches: Iterable[str], names: Sequence[str]) -> list[str]:
    """The op names of fetches; raises for one that the graph does not have."""
    known = set(names)
    result = []
    for fetch in fetches:
        name = op_name(fetch)
        if name not in known:
            close = difflib.get_close_matches(name, names, n=3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ModelError(f"there is no op {name!r} to fetch among {len(names)} ops{hint}")
        result.append(name)
    return result


def ancestors(nodes: Sequence[NodeDef], fetches: Iterable[str]) -> set[str]:
    """The names of the nodes that `fetches` need, themselves included."""
    inputs = {node.name: node.input for node in nodes}
    needed = set(fetches)
    stack = list(needed)
    while stack:
        for text in inputs[stack.pop()]:
            name = op_name(text)
            if name not in needed:
                needed.add(name)
                stack.append(name)
    return needed


def _keep(graph_def: GraphDef, names: set[str]) -> None:
    if len(names) < len(graph_def.node):
        kept = [node for node in graph_def.node if node.name in names]
        copy = tf.compat.v1.GraphDef()
        copy.node.extend(kept)
        graph_def.ClearField("node")
        graph_def.node.MergeFrom(copy.node)


# --- checks --------------------------------------------------------------------------------------


def check(graph_def: GraphDef) -> None:
    """Raises for what TensorFlow would refuse with a long story."""
    functions = {function.signature.name for function in graph_def.library.function}
    names: set[str] = set()
    for node in graph_def.node:
        if not node.name or not node.op:
            raise ModelError("a node has no name or no op type; is the file damaged?")
        if node.name in names:
            raise ModelError(f"two nodes are named {node.name!r}; was the file edited or merged?")
        names.add(node.name)
        _check_op_type(node, functions, "")
    for node in graph_def.node:
        for text in node.input:
            if op_name(text) not in names:
                raise ModelError(
                    f"node {node.name!r} reads {text!r}, which is not in the graph; was it cut out "
                    "of a larger one?"
                )
    for function in graph_def.library.function:
        for node in function.node_def:
            _check_op_type(node, functions, f" of function {function.signature.name!r}")
    _check_acyclic(graph_def.node)


def _check_acyclic(nodes: Sequence[NodeDef]) -> None:
    types = {node.name: node.op for node in nodes}
    producers = {
        node.name: [
            name
            for name in map(op_name, node.input)
            if not (node.op in MERGES and types[name] in BACK_EDGES)
        ]
        for node in nodes
    }
    consumers: dict[str, list[str]] = {name: [] for name in producers}
    for name, sources in producers.items():
        for producer in sources:
            consumers[producer].append(name)
    waiting = {name: len(sources) for name, sources in producers.items()}
    ready = [name for name, count in waiting.items() if not count]
    while ready:
        for name in consumers[ready.pop()]:
            waiting[name] -= 1
            if not waiting[name]:
                ready.append(name)
    stuck = {name for name, count in waiting.items() if count}
    if not stuck:
        return
    walk: dict[str, None] = {}  # back from producer to producer, until one comes again
    name = min(stuck)
    while name not in walk:
        walk[name] = None
        name = next(producer for producer in producers[name] if producer in stuck)
    cycle = [*[*walk][[*walk].index(name) :], name][::-1]
    shown = cycle if len(cycle) < 7 else [*cycle[:5], "...", cycle[-1]]
    raise ModelError(
        f"the graph has a cycle: {' -> '.join(shown)}; only the loops of tf.while_loop may have one"
    )


def _check_op_type(node: NodeDef, functions: set[str], where: str) -> None:
    if op_def(node.op) is None and node.op not in functions:
        raise ModelError(
            f"node {node.name!r}{where} has op type {node.op!r}, which TensorFlow {tf.__version__} "
            "does not know; is it a custom op whose library is not loaded (tf.load_op_library)?"
        )


# --- open dimensions -----------------------------------------------------------------------------


class Bound(NamedTuple):
    """What was done to the inputs of a graph."""

    changed: bool
    scalars: tuple[str, ...]
    """Inputs of unknown rank."""


def bind(nodes: Sequence[NodeDef], sizes: Sizes, input_names: Mapping[str, str]) -> Bound:
    """Writes the sizes of open dimensions into the inputs."""
    protos = {name: proto for node in nodes for name, proto in _input_shapes(node)}
    before = {name: _partial_shape(proto) for name, proto in protos.items()}
    after = bind_shapes(before, sizes, input_names)
    changed = [name for name in before if before[name] != after[name]]
    for name in changed:
        protos[name].CopyFrom(tf.TensorShape(after[name]).as_proto())
    scalars = [name for name in changed if before[name] is None and after[name] == ()]
    return Bound(bool(changed), tuple(scalars))


def _input_shapes(node: NodeDef) -> Iterable[tuple[str, Any]]:
    """(name, shape proto to write into) of what a node feeds in from outside."""
    if node.op in ("Placeholder", "PlaceholderWithDefault"):
        if "dtype" in node.attr and dtype_name(node.attr["dtype"].type) in ("resource", "variant"):
            return
        if "shape" not in node.attr:
            node.attr["shape"].shape.unknown_rank = True
        yield node.name, node.attr["shape"].shape
    elif node.op in ("IteratorGetNext", "IteratorGetNextSync") and "output_shapes" in node.attr:
        for number, shape in enumerate(node.attr["output_shapes"].list.shape):
            yield f"{node.name}:{number}", shape


def _partial_shape(proto: Any) -> PartialShape:
    if proto.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else int(dim.size) for dim in proto.dim)


def bind_shapes(
    shapes: Mapping[str, PartialShape], sizes: Sizes, other_names: Mapping[str, str]
) -> dict[str, PartialShape]:
    """Shapes of the inputs with their open dimensions filled in; raises when one is left open.

    An input of unknown rank is taken for a scalar unless its dimensions are given: mostly it is a
    learning rate or a keep probability whose shape nobody wrote down.
    """
    given: dict[str, dict[int, int]] = {}
    for key, size in sizes.dims.items():
        name, dim = _find_dim(key, shapes, other_names)
        given.setdefault(name, {})[dim] = size
    result = {
        name: _bind_shape(name, shape, given.get(name, {}), sizes.batch)
        for name, shape in shapes.items()
    }
    if sizes.batch is not None:
        _check_batch(sizes.batch, shapes, result)
    _check_bound(result, other_names)
    return result


def _find_dim(
    key: str, shapes: Mapping[str, PartialShape], other_names: Mapping[str, str]
) -> tuple[str, int]:
    name, dot, number = key.rpartition(".")
    if key in shapes or key in other_names:
        name = other_names.get(key, key)
        shape = shapes.get(name)
        open_dims = [] if shape is None else [i for i, size in enumerate(shape) if size is None]
        if len(open_dims) != 1:
            raise ModelError(
                f"input {key!r} is {_show(shape)} and has {len(open_dims)} open dimensions; say "
                f"which one is meant: {key}.0, {key}.1, ..."
            )
        return name, open_dims[0]
    name = other_names.get(name, name)
    if not dot or not number.isdecimal() or name not in shapes:
        known = ", ".join(f"{n!r} {_show(s)}" for n, s in list(shapes.items())[:8]) or "none"
        raise ModelError(f"there is no input {key!r} to size; the inputs are: {known}")
    return name, int(number)


def _bind_shape(
    name: str, shape: PartialShape, given: Mapping[int, int], batch: int | None
) -> PartialShape:
    if shape is None:
        shape = (None,) * (max(given, default=-1) + 1)
    bound = list(shape)
    for dim, size in given.items():
        if dim >= len(bound):
            raise ModelError(f"input {name!r} is {_show(shape)}; it has no dimension {dim}")
        if bound[dim] not in (None, size):
            raise ModelError(f"dimension {dim} of input {name!r} is {bound[dim]}, not {size}")
        bound[dim] = size
    if batch is not None and bound and bound[0] is None:
        bound[0] = batch
    return tuple(bound)


def _check_batch(
    batch: int, before: Mapping[str, PartialShape], after: Mapping[str, PartialShape]
) -> None:
    if any(shape and shape[0] == batch for shape in after.values()):
        return
    if any(shape and shape[0] is None for shape in before.values()):
        return  # every one was given a size of its own
    known = ", ".join(f"{n!r} {_show(s)}" for n, s in list(before.items())[:8]) or "none"
    raise ModelError(f"no input leaves its batch open, so it cannot be {batch}; inputs: {known}")


def _check_bound(shapes: Mapping[str, PartialShape], other_names: Mapping[str, str]) -> None:
    still_open = {name: shape for name, shape in shapes.items() if shape and None in shape}
    if not still_open:
        return
    shown_as = {node: key for key, node in other_names.items()}
    parts, options = [], []
    if any(shape[0] is None for shape in still_open.values()):
        options.append("--batch N")
    for name, shape in still_open.items():
        shown = shown_as.get(name, name)
        parts.append(f"{shown!r} {_show(shape)}")
        options += [f"--dim {shown}.{i}=N" for i, size in enumerate(shape) if i and size is None]
    what = "1 input has" if len(parts) == 1 else f"{len(parts)} inputs have"
    raise ModelError(f"{what} open dimensions: {', '.join(parts)}; size them with {_join(options)}")


def _join(options: Sequence[str]) -> str:
    return " ".join(options) if len(options) < 7 else " ".join([*options[:6], "..."])


def _show(shape: PartialShape) -> str:
    if shape is None:
        return "of unknown rank"
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


# --- functions -----------------------------------------------------------------------------------

_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While",
    "StatelessWhile", "Case", "StatelessCase"])  # fmt: skip


def _has_calls(graph_def: GraphDef) -> bool:
    functions = {function.signature.name for function in graph_def.library.function}
    return any(node.op in _CALLS or node.op in functions for node in graph_def.node)


def inline(graph_def: GraphDef, fetches: Sequence[str]) -> GraphDef:
    """The graph with calls opened; `fetches`, or else all nodes nobody reads, keep their names."""
    if not fetches:
        read = {op_name(text) for node in graph_def.node for text in node.input}
        fetches = [node.name for node in graph_def.node if node.name not in read]
    try:
        return inline_functions(graph_def, fetches)
    except (ValueError, tf.errors.OpError) as error:
        raise ModelError(f"its functions cannot be inlined: {shorten(error)}") from error


# --- loops over datasets -------------------------------------------------------------------------

_DATASET_PASSES = frozenset(["TakeWhileDataset", "PrefetchDataset", "OptionsDataset",
    "ModelDataset"])  # fmt: skip
"""Datasets with the elements of their first input, or with the first of them."""


def open_dataset_loops(graph_def: GraphDef) -> dict[str, str]:
    """Puts a call of the loop's body where a function goes over a dataset, and gives the names of
    these loops with the nodes that make their datasets.

    AutoGraph makes such a loop into a ScanDataset that is reduced. Both hide their bodies, which is
    where all the work is, from placement: the whole loop would be one op. What is put there is one
    iteration, whose elements come from outside.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    nodes = {node.name: node for node in graph_def.node}
    found = {
        node.name: op_name(node.input[0])
        for node in graph_def.node
        if node.op in ("ScanDataset", "ReduceDataset") and node.attr["f"].func.name in functions
    }
    if not any(node.op == "ReduceDataset" for node in graph_def.node) or not found:
        return {}
    made: dict[str, list[str]] = {}  # loop -> the elements it makes
    renamed: dict[str, str] = {}
    for name in sorted(found, key=lambda name: nodes[name].op, reverse=True):  # Scan goes first
        node = nodes[name]
        source = found[name]
        while nodes[source].op in _DATASET_PASSES and nodes[source].input:
            source = op_name(nodes[source].input[0])
        found[name] = source
        # The sum over what a ScanDataset makes is part of its loop.
        loop = f"{source}/{DATASET_LOOP}/{name}" if source in made else f"{name}/{DATASET_LOOP}"
        renamed[name] = loop
        made[name] = _call_body(graph_def, node, loop, functions, made.get(source))
    for node in graph_def.node:
        if node.op.endswith("Dataset") and node.name not in found:
            node.op, kept = "NoOp", [text for text in node.input if text.startswith("^")]
            node.attr.clear()
            del node.input[:]
            node.input.extend(kept)
        for position, text in enumerate(node.input):
            name, output = parse_input(text)
            if name in renamed:
                suffix = f":{output}" if output else ""
                node.input[position] = (
                    f"^{renamed[name]}" if output is None else (renamed[name] + suffix)
                )
    for name, call in renamed.items():  # a step may be run for the loop's effects, by name
        graph_def.node.add(name=name, op="NoOp", input=[f"^{call}"])
    return {name: source for name, source in found.items() if source not in found}


def _call_body(
    graph_def: GraphDef,
    node: NodeDef,
    name: str,
    functions: Mapping[str, Any],
    elements: list[str] | None,
) -> list[str]:
    """Makes the loop a call of its body with that name, for `elements` (new inputs where there are
    none); gives the elements it makes itself, where it is a ScanDataset."""
    body = functions[node.attr["f"].func.name]
    states, others = len(node.attr["Tstate"].list.type), len(node.attr["Targuments"].list.type)
    data = [text for text in node.input if not text.startswith("^")]
    control = [text for text in node.input if text.startswith("^")]
    arguments = body.signature.input_arg
    count = len(arguments) - states - others
    if elements is None or len(elements) != count:
        elements = []
        for number in range(states, states + count):
            element = graph_def.node.add(name=f"{node.name}/element_{number - states}")
            element.op = "Placeholder"
            element.attr["dtype"].type = arguments[number].type
            known = body.arg_attr[number].attr["_output_shapes"].list.shape
            if known:
                element.attr["shape"].shape.CopyFrom(known[0])
            elements.append(element.name)
    function = node.attr["f"].func.name
    node.name = name
    node.op = "StatefulPartitionedCall"
    del node.input[:]
    node.input.extend([*data[1 : 1 + states], *elements, *data[1 + states :], *control])
    node.attr.clear()
    node.attr["f"].func.name = function
    node.attr["Tin"].list.type.extend(argument.type for argument in arguments)
    results = body.signature.output_arg
    node.attr["Tout"].list.type.extend(result.type for result in results)
    return [f"{node.name}:{number}" for number in range(states, len(results))]


def _dataset_sizes(graph: Any) -> dict[str, int]:
    """Name of the node that stands for a dataset from outside -> how many elements it has."""
    sizes = {}
    for outside, inside in getattr(graph, "captures", ()):
        if outside.dtype != tf.variant or not hasattr(outside, "numpy"):
            continue
        try:
            size = int(tf.raw_ops.DatasetCardinality(input_dataset=outside))
        except (ValueError, TypeError, tf.errors.OpError):  # a variant that is no dataset
            continue
        if size > 0:  # not one without end or of unknown length
            sizes[op_name(inside.name)] = size
    return sizes


# --- shapes --------------------------------------------------------------------------------------


def read_outputs(operations: Iterable[Any]) -> dict[str, tuple[Output, ...]]:
    """What TensorFlow knows of the outputs of live operations."""
    result = {}
    for op in operations:
        outputs = []
        for tensor in op.outputs:
            shape = tensor.shape
            known = None if shape.rank is None else tuple(shape.as_list())
            dtype = tensor.dtype
            outputs.append(Output(known, dtype.base_dtype.name, dtype._is_ref_dtype))
        result[op.name] = tuple(outputs)
    return result


def _outputs_among(graph: Any, nodes: Sequence[NodeDef]) -> dict[str, tuple[Output, ...]]:
    wanted = {node.name for node in nodes}
    return read_outputs(op for op in graph.get_operations() if op.name in wanted)


def declared_outputs(nodes: Sequence[NodeDef]) -> dict[str, tuple[Output, ...]] | None:
    """The outputs as the file itself states them, which MetaGraphs do; None if a shape is open."""
    result = {}
    for node in nodes:
        definition = op_def(node.op)
        if definition is None or ("_output_shapes" not in node.attr and definition.output_arg):
            return None
        dtypes = _output_dtypes(node, definition)
        shapes = (
            [_partial_shape(p) for p in node.attr["_output_shapes"].list.shape] if dtypes else []
        )
        if dtypes is None or len(shapes) != len(dtypes):
            return None
        if any(shape is None or None in shape for shape in shapes):
            return None
        result[node.name] = tuple(
            Output(shape, dtype, is_ref)
            for shape, (dtype, is_ref) in zip(shapes, dtypes, strict=True)
        )
    return result


def _output_dtypes(node: NodeDef, definition: Any) -> list[tuple[str, bool]] | None:
    """(dtype, is_ref) of each output; None when the attributes do not say."""
    defaults = {attr.name: attr.default_value for attr in definition.attr}

    def value(name: str) -> Any:
        # Graphs are often saved without the attributes that have their default value.
        return node.attr[name] if name in node.attr else defaults.get(name)

    result: list[tuple[str, bool]] = []
    for arg in definition.output_arg:
        if arg.type_list_attr:
            types = list(value(arg.type_list_attr).list.type)
        else:
            number = value(arg.number_attr).i if arg.number_attr else 1
            types = [arg.type or value(arg.type_attr).type] * number
        if 0 in types:
            return None
        result += [(dtype_name(enum), arg.is_ref) for enum in types]
    return result


def infer_outputs(graph_def: GraphDef) -> dict[str, tuple[Output, ...]]:
    """The outputs of all nodes, as TensorFlow's shape functions infer them."""
    unrolled = _without_back_edges(graph_def)
    outputs = _import(unrolled)
    # What is pushed onto a list (TensorFlow keeps there what the backward loop needs) has a shape
    # that the list does not: lists of a loop's values are made before the loop, without knowing it.
    for _ in range(3):
        if not _size_lists(unrolled, outputs):
            break
        try:
            outputs = _import(unrolled)
        except ModelError:  # lists of tensors that differ
            break
    return outputs


def _import(graph_def: GraphDef) -> dict[str, tuple[Output, ...]]:
    try:
        return read_outputs(import_graph_def(graph_def))
    except (ValueError, tf.errors.OpError) as error:
        raise ModelError(f"TensorFlow does not accept the graph: {shorten(error)}") from error


def _without_back_edges(graph_def: GraphDef) -> GraphDef:
    """A copy for shape inference: loops run once, so that shapes flow through them.

    TensorFlow's Enter says nothing about the shape of what it passes on, since a later iteration
    might bring another one; here each input of a loop keeps its shape.
    """
    copy = tf.compat.v1.GraphDef()
    copy.CopyFrom(graph_def)
    types = {node.name: node.op for node in copy.node}
    loops = set()
    for node in copy.node:
        # What is co-located with a node that was pruned away cannot be imported.
        node.attr.pop("_class", None)
        if node.op == "PlaceholderWithDefault":
            # What is fed may have another shape than the default.
            node.op = "Placeholder"
            del node.input[:]
        elif node.op in MERGES:
            forward = [text for text in node.input if types[op_name(text)] not in BACK_EDGES]
            if len(forward) == len(node.input):
                continue
            loops.add(node.name)
            del node.input[:]
            node.input.extend(forward)
            _make_identity(node)
        elif node.op in ("Enter", "RefEnter", "Exit", "RefExit"):
            _make_identity(node)
    if loops:
        _replace_merge_indices(copy, loops)
    return copy


def _make_identity(node: NodeDef) -> None:
    node.op = "RefIdentity" if node.op.startswith("Ref") else "Identity"
    for name in ("N", "frame_name", "is_constant", "parallel_iterations"):
        node.attr.pop(name, None)


def _replace_merge_indices(graph_def: GraphDef, merges: set[str]) -> None:
    """Merge has a second output, which of its inputs came; Identity has not."""
    made = set()
    for node in list(graph_def.node):
        for position, text in enumerate(node.input):
            name, output = parse_input(text)
            if output != 1 or name not in merges:
                continue
            if name not in made:
                made.add(name)
                index = graph_def.node.add(name=f"{name}/value_index", op="Const")
                index.attr["dtype"].type = tf.int32.as_datatype_enum
                index.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
            node.input[position] = f"{name}/value_index"


_PASS_LISTS = frozenset(["Identity", "Switch", "NextIteration", "TensorListPushBack",
    "TensorListSetItem", "TensorListPopBack"])  # fmt: skip

_LIST_MAKERS = {"EmptyTensorList": 0, "TensorListReserve": 0, "TensorListFromTensor": 1}
"""Ops that make a tensor list -> which of their inputs is the shape of its elements."""


def _size_lists(graph_def: GraphDef, outputs: Mapping[str, Sequence[Output]]) -> bool:
    """Tells the makers of tensor lists the shape of what is put into them; False if none is new."""
    nodes = {node.name: node for node in graph_def.node}
    shapes: dict[str, set[PartialShape]] = {}
    for node in graph_def.node:
        if node.op == "TensorListFromTensor":
            stacked = _shape_of(node.input[0], outputs)
            shapes.setdefault(node.name, set()).add(stacked[1:] if stacked else None)
        elif node.op in ("TensorListPushBack", "TensorListSetItem"):
            element = _shape_of(node.input[1 if node.op == "TensorListPushBack" else 2], outputs)
            maker = node
            while maker.op in _PASS_LISTS:
                maker = nodes[op_name(maker.input[0])]
            if maker.op in _LIST_MAKERS:
                shapes.setdefault(maker.name, set()).add(element)
    changed = False
    for maker_name, found in shapes.items():
        maker = nodes[maker_name]
        constant = f"{maker_name}/inferred_element_shape"
        shape = found.pop()
        if found or constant in nodes or shape is None or None in shape:
            continue
        enum = maker.attr["shape_type"].type
        value = graph_def.node.add(name=constant, op="Const")
        value.attr["dtype"].type = enum
        value.attr["value"].tensor.CopyFrom(
            tf.make_tensor_proto(list(shape), tf.dtypes.as_dtype(enum), shape=[len(shape)])
        )
        maker.input[_LIST_MAKERS[maker.op]] = constant
        changed = True
    return changed


def _shape_of(text: str, outputs: Mapping[str, Sequence[Output]]) -> PartialShape:
    name, output = parse_input(text)
    return outputs[name][output or 0].shape
