"""From TensorFlow's nodes to a `Graph`: sizes, costs, memory, co-location, kernels."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from placewright.backends.tensorflow._tf import (
    NodeDef,
    dtype_name,
    has_cpu_kernel,
    op_def,
    paused_collector,
    tf,
)
from placewright.backends.tensorflow.flops import flops
from placewright.backends.tensorflow.graphdef import (
    BACK_EDGES,
    MERGES,
    FlatGraph,
    Output,
    op_name,
    parse_input,
)
from placewright.backends.tensorflow.kernels import has_gpu_kernel
from placewright.backends.tensorflow.loops import (
    DATASET,
    counts_of,
    ends_of_loops,
    loop_stacks,
    loops_of,
)
from placewright.backends.tensorflow.work import moved_bytes, work_of
from placewright.errors import ModelError
from placewright.graph import DTYPE_BYTES, Edge, Graph, Op, Tensor

log = logging.getLogger(__name__)

VARIABLES = frozenset(["VarHandleOp", "VariableV2", "Variable"])
"""Ops that own a variable: its memory is theirs."""

_STRING_BYTES = 16
"""A guess: short strings are stored inside the string object."""

_ALIASES = frozenset(["Bitcast", "DebugGradientIdentity", "EnsureShape", "Enter", "Exit",
    "ExpandDims", "Identity", "LoopCond", "Merge", "NextIteration", "PreventGradient",
    "ReadVariableOp", "Reshape", "Snapshot", "Squeeze", "StopGradient", "Switch",
    "_SwitchN"])  # fmt: skip
"""Ops whose outputs are the memory of their first input. The value index of Merge is not."""

_HANDLE_PASSES = frozenset(["Enter", "Exit", "Identity", "Merge", "NextIteration", "RefEnter",
    "RefExit", "RefIdentity", "RefMerge", "RefNextIteration", "RefSwitch", "Switch"])  # fmt: skip
"""Ops behind which a variable is still the same variable."""

_VALUE_PASSES = _HANDLE_PASSES | {"ReadVariableOp", "Cast"}
"""Ops behind which a variable's value is still the same value."""

_APPLY = re.compile(r"^(Resource)?(Sparse)?Apply[A-Z]")
_WRITES = re.compile(r"^(Resource)?(Sparse)?(Apply|Assign|Scatter|StridedSliceAssign)")


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the model's author knows about its variables, by the name of the op that owns them."""

    parameters: frozenset[str] = frozenset()
    slots: frozenset[str] | None = None
    """The optimizer's state; None when it has to be found out from the graph."""
    results: Sequence[str] = field(default=())
    """Tensors that the step returns, such as the loss."""


class _Source(NamedTuple):
    """Where one input of a node comes from."""

    node: int
    output: int | None
    """None for a control edge."""


@paused_collector()
def convert(
    flat: FlatGraph,
    *,
    name: str,
    group_rules: Iterable[tuple[str, str]] = (),
    roles: Roles | None = None,
    loops: Mapping[str, int] | None = None,
) -> Graph:
    """The graph of these nodes. Each loop stays on one device.

    `loops` says how often those run of which the graph does not tell, see `loops_of`.
    """
    nodes = flat.nodes
    index = {node.name: i for i, node in enumerate(nodes)}
    outputs = [flat.outputs.get(node.name, ()) for node in nodes]
    sources = _sources(nodes, index, outputs)
    order = _topological_order(sources)

    stacks = loop_stacks(flat, [[source.node for source in of] for of in sources], order)
    found_loops = loops_of(flat, stacks, loops or {})
    counts = counts_of(nodes, stacks, found_loops)

    slots = _slots(nodes, sources, order, index, roles or Roles())
    # What iterations hand to each other is not sent: a loop stays together.
    steps = {loop.name for loop in found_loops if loop.source == DATASET}
    frames = [next((name for name in stack if name not in steps), "") for stack in stacks]
    labels = _labels(nodes, sources, outputs, frames)
    forward = _ForwardOps(nodes, index, sources)
    shapes = [tuple(_sized(output.shape) for output in of) for of in outputs]
    _warn_of_unknown_shapes(nodes, outputs)

    sizes = [
        [_tensor_bytes(node, output, shape) for output, shape in zip(of, sized, strict=True)]
        for node, of, sized in zip(nodes, outputs, shapes, strict=True)
    ]

    ops, edges = [], []
    for i, node in enumerate(nodes):
        data = [(source.node, source.output) for source in sources[i] if source.output is not None]
        variable_bytes = _variable_bytes(node) if node.op in VARIABLES else 0
        is_slot = i in slots
        read = [sizes[of][number] for of, number in data]
        read_shapes = [shapes[of][number] for of, number in data]
        ops.append(
            Op(
                name=node.name,
                type=node.op,
                outputs=_tensors(node, outputs[i], shapes[i], sizes[i], data, nodes, outputs),
                param_bytes=0 if is_slot else variable_bytes,
                slot_bytes=variable_bytes if is_slot else 0,
                flops=flops(node, read_shapes, shapes[i]),
                colocate=labels[i],
                gradient_of=forward.of(i),
                kernels=_kernels_of(node),
                work=work_of(node.op),
                moved_bytes=moved_bytes(node.op, read, sizes[i]),
                count=counts[i],
            )
        )
        edges += [Edge(nodes[s.node].name, node.name, s.output) for s in sources[i]]
    edges += [Edge(nodes[a].name, nodes[b].name, None) for a, b in ends_of_loops(nodes, stacks)]
    _warn_of_closed_functions(ops)
    return Graph.from_ops(name, ops, edges, group_rules, found_loops)


def _sources(
    nodes: Sequence[NodeDef], index: dict[str, int], outputs: Sequence[Sequence[Output]]
) -> list[list[_Source]]:
    """The inputs of each node, without the edges that close loops."""
    result = []
    for node in nodes:
        sources = []
        merges = node.op in MERGES
        for text in node.input:
            name, output = parse_input(text)
            source = index[name]
            if output is not None and output >= len(outputs[source]):
                raise ModelError(
                    f"node {node.name!r} reads {text!r}, but {name!r} has only "
                    f"{len(outputs[source])} outputs; was the file edited?"
                )
            if not (merges and nodes[source].op in BACK_EDGES):
                sources.append(_Source(source, output))
        result.append(sources)
    return result


def _topological_order(sources: Sequence[Sequence[_Source]]) -> list[int]:
    """Producers first. The nodes of a cycle are left out; `Graph` reports the cycle."""
    waiting = [len(inputs) for inputs in sources]
    if all(source.node < i for i, inputs in enumerate(sources) for source in inputs):
        return list(range(len(sources)))
    consumers: list[list[int]] = [[] for _ in sources]
    for i, inputs in enumerate(sources):
        for source in inputs:
            consumers[source.node].append(i)
    ready = deque(i for i, count in enumerate(waiting) if not count)
    order = []
    while ready:
        i = ready.popleft()
        order.append(i)
        for consumer in consumers[i]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                ready.append(consumer)
    return order


# --- tensors -------------------------------------------------------------------------------------


def _sized(shape: tuple[int | None, ...] | None) -> tuple[int, ...]:
    """Dimensions that are not known count as 1."""
    return tuple(1 if size is None else size for size in shape or ())


@functools.cache
def _element_bytes(dtype: str) -> int:
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    return _STRING_BYTES if dtype == "string" else int(tf.dtypes.as_dtype(dtype).size)


def _bytes(name: str, shape: Sequence[int], dtype: str) -> int:
    size = math.prod(shape) * _element_bytes(dtype)
    if size >= 2**62:
        raise ModelError(f"op {name!r} has a tensor of {size:.0e} bytes; are its sizes right?")
    return size


def _tensor_bytes(node: NodeDef, output: Output, shape: Sequence[int]) -> int:
    if node.op in VARIABLES:
        # The output stands for the variable, whose memory `param_bytes` counts.
        return DTYPE_BYTES["resource"]
    return _bytes(node.name, shape, output.dtype)


def _tensors(
    node: NodeDef,
    outputs: Sequence[Output],
    shapes: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    data: Sequence[tuple[int, int]],
    nodes: Sequence[NodeDef],
    all_outputs: Sequence[Sequence[Output]],
) -> tuple[Tensor, ...]:
    tensors = []
    for number, (output, shape, size) in enumerate(zip(outputs, shapes, sizes, strict=True)):
        source = _aliased(node, number, output, data, all_outputs)
        shares = None if source is None else (nodes[source[0]].name, source[1])
        tensors.append(Tensor(size, None if output.shape is None else shape, output.dtype, shares))
    return tuple(tensors)


def _aliased(
    node: NodeDef,
    number: int,
    output: Output,
    data: Sequence[tuple[int, int]],
    all_outputs: Sequence[Sequence[Output]],
) -> tuple[int, int] | None:
    """The input whose memory an output is, if it is one's."""
    if node.op in VARIABLES or not data:
        return None
    if output.is_ref:  # Assign, ApplyAdam and the like give back the variable that they changed
        return next(((of, k) for of, k in data if all_outputs[of][k].is_ref), None)
    if node.op == "IdentityN":
        return data[number] if number < len(data) else None
    if node.op == "Merge" and number == 1:
        return None
    if node.op in _ALIASES:
        return data[0]
    if node.op == "Cast" and node.attr["SrcT"].type == node.attr["DstT"].type:
        return data[0]
    return None


def _warn_of_unknown_shapes(nodes: Sequence[NodeDef], outputs: Sequence[Sequence[Output]]) -> None:
    unknown = [
        f"{node.name}:{number} ({node.op})"
        for node, of in zip(nodes, outputs, strict=True)
        for number, output in enumerate(of)
        if (output.shape is None or None in output.shape)
        and output.dtype not in ("resource", "variant")
        and node.op != "BroadcastGradientArgs"  # numbers of dimensions: a handful at most
    ]
    if unknown:
        log.warning(
            "%d tensors have dimensions that are not known before the step runs and count as 1, "
            "such as %s",
            len(unknown),
            unknown[0],
        )


def _warn_of_closed_functions(ops: Sequence[Op]) -> None:
    """XLA compiles some functions as a whole, Keras's grouped convolutions among them."""
    closed = [op.name for op in ops if op.flops is None]
    if closed:
        log.warning(
            "%d ops run functions that are compiled as a whole, such as %s: nobody knows what they "
            "compute, so they cost what moving their tensors does, unless measured times are given",
            len(closed),
            closed[0],
        )


# --- variables -----------------------------------------------------------------------------------


def _variable_bytes(node: NodeDef) -> int:
    if "shape" not in node.attr or "dtype" not in node.attr:
        return 0
    sizes = [max(int(dim.size), 1) for dim in node.attr["shape"].shape.dim]
    return _bytes(node.name, sizes, dtype_name(node.attr["dtype"].type))


def _slots(
    nodes: Sequence[NodeDef],
    sources: Sequence[Sequence[_Source]],
    order: Sequence[int],
    index: dict[str, int],
    roles: Roles,
) -> set[int]:
    """The owners of variables that are the optimizer's state."""
    if roles.slots is not None:
        return {index[name] for name in roles.slots if name in index}
    owners = _Owners(nodes, sources)
    targets, found = set(), set()
    for i, node in enumerate(nodes):
        if _APPLY.match(node.op):
            inputs = [owners.of_value(s.node) for s in sources[i] if s.output is not None]
            targets.update(inputs[:1])
            found.update(inputs[1:])
    slots = {owner for owner in found - targets if owner is not None}
    known = {index[name] for name in roles.parameters if name in index}
    return slots | (_slots_by_flow(nodes, sources, order, owners, index, roles, known) - known)


def _slots_by_flow(
    nodes: Sequence[NodeDef],
    sources: Sequence[Sequence[_Source]],
    order: Sequence[int],
    owners: _Owners,
    index: dict[str, int],
    roles: Roles,
    known: set[int],
) -> set[int]:
    """Optimizer state by what it does, for optimizers made of single ops (Keras 3).

    A step changes it and uses it to change another variable, but what the step returns (the loss)
    does not depend on it. Moving averages of batch norm change themselves only; parameters make the
    loss.
    """
    results = [index[op_name(result)] for result in roles.results if op_name(result) in index]
    if not results and not known:
        return set()
    numbers = {i: 1 << k for k, i in enumerate(i for i, n in enumerate(nodes) if n.op in VARIABLES)}
    reads = [0] * len(nodes)  # as bits: which variables a node's value depends on
    written, used = 0, 0
    for i in order:
        node = nodes[i]
        data = [s.node for s in sources[i] if s.output is not None]
        if i in numbers:
            reads[i] = numbers[i]
        elif _WRITES.match(node.op) and data and (owner := owners.of_handle(data[0])) is not None:
            reads[i] = target = numbers[owner]
            written |= target
            for source in data[1:]:
                used |= reads[source] & ~target
                if (other := owners.of_handle(source)) is not None:
                    written |= numbers[other]
        else:
            for source in data:
                reads[i] |= reads[source]
    for result in results:
        used &= ~reads[result]
    return {i for i, number in numbers.items() if number & written & used}


class _Owners:
    """Which op owns the variable that a node's output is a handle or the value of."""

    def __init__(self, nodes: Sequence[NodeDef], sources: Sequence[Sequence[_Source]]) -> None:
        self._nodes = nodes
        self._sources = sources

    def of_handle(self, node: int) -> int | None:
        return self._follow(node, _HANDLE_PASSES)

    def of_value(self, node: int) -> int | None:
        return self._follow(node, _VALUE_PASSES)

    def _follow(self, node: int, passes: frozenset[str]) -> int | None:
        for _ in range(1000):  # a chain that long is a cycle
            if self._nodes[node].op in VARIABLES:
                return node
            inputs = [s.node for s in self._sources[node] if s.output is not None]
            if self._nodes[node].op not in passes or not inputs:
                return None
            node = inputs[0]
        return None


# --- co-location ---------------------------------------------------------------------------------


def _labels(
    nodes: Sequence[NodeDef],
    sources: Sequence[Sequence[_Source]],
    outputs: Sequence[Sequence[Output]],
    frames: Sequence[str],
) -> list[tuple[str, ...]]:
    """[N] co-location labels: names of ops to be with, and the outermost loops."""
    labels: list[set[str]] = [set() for _ in nodes]
    wanted: set[str] = set()
    for i, node in enumerate(nodes):
        if "_class" in node.attr:
            labels[i] |= {
                text[5:].decode(errors="replace")
                for text in node.attr["_class"].list.s
                if text.startswith(b"loc:@")
            }
        for of, number in sources[i]:
            if number is not None and _ties(nodes[of], outputs[of][number], node):
                labels[i].add(nodes[of].name)
        wanted |= labels[i]
        if frames[i]:
            labels[i].add(f"loop:{frames[i]}")  # no op name has a colon
    for i, node in enumerate(nodes):
        if node.name in wanted:
            labels[i].add(node.name)
    uses = Counter(label for of in labels for label in of)
    return [tuple(sorted(label for label in of if uses[label] > 1)) for of in labels]


def _ties(producer: NodeDef, output: Output, consumer: NodeDef) -> bool:
    """Whether TensorFlow keeps the ends of an edge on one device: handles and references do not
    travel."""
    if output.dtype == "resource":
        return True
    return output.is_ref and (producer.op in VARIABLES or _takes_refs(consumer.op))


@functools.cache
def _takes_refs(op_type: str) -> bool:
    definition = op_def(op_type)
    return definition is not None and any(arg.is_ref for arg in definition.input_arg)


# --- gradients -----------------------------------------------------------------------------------

_GRADIENT_SCOPE = re.compile(r"(?:^|(?<=/))(gradients(?:_\d+)?|gradient_tape)/")
_INLINED = re.compile(r".*/_\d+/")


class _ForwardOps:
    """Which op a gradient op belongs to, by TensorFlow's way of naming gradients."""

    def __init__(
        self,
        nodes: Sequence[NodeDef],
        index: dict[str, int],
        sources: Sequence[Sequence[_Source]],
    ) -> None:
        self._nodes = nodes
        self._index = index
        self._sources = sources
        # The body of a loop gets the loop's name in front; gradients know it without.
        self._inlined: dict[str, str] = {}
        for name in index:
            prefix = _INLINED.match(name)
            if prefix and not _GRADIENT_SCOPE.search(name):
                self._inlined[name[prefix.end() :]] = name

    def of(self, i: int) -> str | None:
        name = self._nodes[i].name
        # The innermost scope says most: gradients of gradients and of loops have several.
        for scope in reversed(list(_GRADIENT_SCOPE.finditer(name))):
            prefix, rest = name[: scope.start()], name[scope.end() :]
            if scope[1] == "gradient_tape":
                found = self._of_tape(i, prefix, rest)
            else:
                found = self._of_gradients(prefix, rest)
            if found is not None and found != name:
                return found
        return None

    def _of_gradients(self, prefix: str, rest: str) -> str | None:
        """`gradients/<forward op>_grad/...`."""
        end = rest.rfind("_grad/")
        while end >= 0:
            found = self._find(prefix, rest[:end])
            if found is not None:
                return found
            end = rest.rfind("_grad/", 0, end)
        return None

    def _of_tape(self, i: int, prefix: str, rest: str) -> str | None:
        """`gradient_tape/<scope of the forward op>/...`; the op often has its scope's name."""
        scope = rest.rpartition("/")[0]
        part = scope
        while part:
            found = self._find(prefix, part)
            if found is not None:
                return found
            part = part.rpartition("/")[0]
        # Otherwise it is one in that scope; gradients read what they are the gradient of.
        op_type = self._nodes[i].op
        for source in self._sources[i]:
            forward = self._nodes[source.node]
            if source.output is None or forward.op == "Const":
                continue
            in_scope = scope and forward.name.startswith(f"{prefix}{scope}/")
            if in_scope or op_type == f"{forward.op}Grad":
                return str(forward.name)
        return None

    def _find(self, prefix: str, name: str) -> str | None:
        if prefix + name in self._index:
            return prefix + name
        return name if name in self._index else self._inlined.get(name)


# --- kernels -------------------------------------------------------------------------------------


def _kernels_of(node: NodeDef) -> tuple[str, ...] | None:
    attributes = node.attr
    return _kernels(
        node.op,
        tuple((n, attributes[n].type) for n in _dtype_attributes(node.op) if n in attributes),
    )


@functools.cache
def _dtype_attributes(op_type: str) -> tuple[str, ...]:
    definition = op_def(op_type)
    if definition is None:
        return ()
    return tuple(attribute.name for attribute in definition.attr if attribute.type == "type")


@functools.cache
def _kernels(op_type: str, dtypes: tuple[tuple[str, int], ...]) -> tuple[str, ...] | None:
    on_gpu = has_gpu_kernel(op_type, {name: dtype_name(enum) for name, enum in dtypes})
    on_cpu = has_cpu_kernel(op_type)
    if on_gpu is None:
        # A custom op: what is registered here is all there is to know. An op without any kernel is
        # replaced before it runs (_Retval), wherever it is.
        return ("cpu",) if on_cpu else None
    if on_gpu:
        return None if on_cpu else ("gpu",)
    return ("cpu",)
