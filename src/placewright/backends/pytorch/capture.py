"""From a PyTorch module to a `Graph`: every op of a step with its sizes, costs and ties.

The forward pass is exported (`exporting`), then traced with its gradients. What runs later is the
exported graph, through autograd; so everything that becomes of one exported node, its gradient
included, has to be on one device, and that is what co-location says here. Beyond that these stay
together: views with the tensor they look at, ops in place with what they write to, elementwise ops
with the op whose only user they are (a compiler fuses them), a parameter with its user where it has
only one, and a parameter's update and optimizer state with the parameter.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.utils import _pytree as pytree

from placewright.backends.pytorch import optimizers
from placewright.backends.pytorch.exporting import (
    MODEL,
    Exported,
    inference_graph,
    quiet,
    storages,
    training_graph,
)
from placewright.backends.pytorch.flops import flops_of, op_name, work_of
from placewright.backends.pytorch.steps import Source, Step, is_foreign, make_step
from placewright.errors import ModelError
from placewright.graph import DTYPE_BYTES, DisjointSets, Edge, Graph, Op, Tensor, Work

log = logging.getLogger(__name__)

Node = torch.fx.Node


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A graph, and which of its ops stands for what is to be put on a device."""

    graph: Graph
    op_of_node: Mapping[str, str]
    """Node of the exported graph -> an op of the graph that is on the same device."""
    op_of_tensor: Mapping[str, str]
    """Parameter, buffer or constant, by the name that the module has for it -> its op."""
    step: Step | None
    """What runs; None where it cannot run in a process of its own."""
    why_no_step: str = ""


def capture(
    exported: Exported,
    name: str,
    group_rules: Sequence[tuple[str, str]] = (),
    unit_of: Callable[[str], str | None] = lambda path: None,
) -> Captured:
    """The graph of a step. `unit_of` says which module that is moved as a whole another one, by its
    path with dots, is in; ops of different ones are never tied for being elementwise."""
    task = exported.task
    flat, values = training_graph(exported) if task.train else inference_graph(exported)
    with contextlib.ExitStack() as stack, quiet():
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        if not task.train:
            stack.enter_context(torch.no_grad())
        joint = aot_export_joint_with_descriptors(stack, flat, tuple(values))
    if task.train:
        _check_gradients(joint.graph_module.graph, exported)
    unions = Unions(exported.module.graph, unit_of)
    return _Conversion(exported, joint.graph_module, unions).run(name, group_rules)


def _check_gradients(graph: torch.fx.Graph, exported: Exported) -> None:
    wanted = [n for n, p in exported.model.named_parameters() if p.requires_grad]
    if not wanted:
        raise ModelError("train=True, but no parameter requires a gradient; is the model frozen?")
    gradients = [d for d in _output_descriptions(graph) if hasattr(d, "grad_of")]
    if not gradients:
        raise ModelError(
            "train=True, but the loss depends on no parameter; was it computed under no_grad?"
        )


def _output_descriptions(graph: torch.fx.Graph) -> Sequence[Any]:
    described: Sequence[Any] = graph.output_node().meta.get("desc") or ()
    return described


@dataclass
class _Parts:
    """What a conversion fills."""

    ops: list[Op] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    source: dict[Node, tuple[str, int]] = field(default_factory=dict)
    """Node of the joint graph -> (op, output) that makes its value."""
    op_of_tensor: dict[str, str] = field(default_factory=dict)


class _Conversion:
    """One joint graph to one `Graph`."""

    def __init__(self, exported: Exported, joint: torch.fx.GraphModule, unions: Unions) -> None:
        self._exported = exported
        self._joint = joint
        self._nodes = list(joint.graph.nodes)
        self._parts = _Parts()
        self._unions = unions
        self._repeated = {
            module_path(node) for node in self._unions.nodes.values() if _ORDINAL.search(_key(node))
        }
        numbers = _by_number(self._nodes, self._unions.nodes)
        sums = _sums_of_gradients(self._nodes, numbers)
        self._sum_for = {
            node: name
            for name, gradient in self._parameter_gradients().items()
            for node in _summed_into(gradient, sums)
        }
        self._origin = _origins(self._nodes, self._unions.nodes, numbers, sums, self._sum_for)
        self._first: dict[str, str] = {}
        """Exported node -> the first op that became of it."""
        self._names: set[str] = set()
        self._updates: dict[str, tuple[Node, str]] = {}
        """Parameter -> the node of its gradient, and the op of its update."""

    def run(self, name: str, group_rules: Sequence[tuple[str, str]]) -> Captured:
        self._add_attributes()
        for node in self._nodes:
            if node.op == "placeholder":
                self._add_placeholder(node)
            elif node.op == "get_attr":
                value = node.meta.get("val")
                if value is None:
                    value = getattr(self._joint, str(node.target), None)
                self._add_source(node, self._unique(f"constants/{node.name}"), "constant", value)
            elif node.op == "call_function":
                self._add_call(node)
        self._add_updates()
        parts = self._parts
        graph = Graph.from_ops(name, parts.ops, parts.edges, group_rules, issue="host")
        step, why = None, ""
        try:
            step = self._step(graph)
        except ModelError as fault:
            why = str(fault)
        return Captured(
            graph=graph,
            op_of_node=self._op_of_node(),
            op_of_tensor=dict(parts.op_of_tensor),
            step=step,
            why_no_step=why,
        )

    def _step(self, graph: Graph) -> Step:
        numbers = {n: graph.op_index[op] for n, (op, _) in self._parts.source.items()}
        optimizer = self._exported.task.optimizer if self._updates else None
        return make_step(
            self._joint.graph,
            numbers,
            {node: self._source(node, op) for node, op in numbers.items() if _is_source(node)},
            {name: (node, graph.op_index[op]) for name, (node, op) in self._updates.items()},
            None if optimizer is None else optimizers.class_and_settings(optimizer),
        )

    def _source(self, node: Node, op: int) -> Source:
        description = node.meta.get("desc")
        value = node.meta.get("val")
        target, index = getattr(description, "target", None), getattr(description, "idx", None)
        if target is not None:
            name = str(target).removeprefix(f"{MODEL}.")
            model = self._exported.model
            kind = "constant"
            if name in dict(model.named_parameters(remove_duplicate=False)):
                kind = "parameter"
            elif name in dict(model.named_buffers(remove_duplicate=False)):
                kind = "buffer"
        elif index is not None:
            kind, name = "input", str(index)
        else:
            kind, name = "constant", node.name
        if value is None:
            value = getattr(self._joint, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"{node.name} is no tensor")
        return Source(
            value=-1,
            kind=kind,
            name=self._exported.tied.get(name, name),
            shape=tuple(int(size) for size in value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            op=op,
        )

    # --- what is there before the step -----------------------------------------------------------

    def _add_attributes(self) -> None:
        """Parameters and buffers. Those that nothing uses have their memory too."""
        model = self._exported.model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        users = self._unions.users_of_attributes(self._exported.tied)
        for name, tensor in named.items():
            op = self._unique(name.replace(".", "/"))
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            self._parts.op_of_tensor[name] = op
            roots = users.get(name, set())
            label = self._unions.label(next(iter(roots))) if len(roots) == 1 else f"tensor {name}"
            self._parts.ops.append(
                Op(
                    name=op,
                    type=kind,
                    outputs=(tensor_of(tensor),),
                    param_bytes=_bytes(tensor),
                    flops=0.0,
                    colocate=(label,),
                    work=Work.NONE,
                )
            )
        for other, first in self._exported.tied.items():
            self._parts.op_of_tensor[other] = self._parts.op_of_tensor[first]

    def _add_placeholder(self, node: Node) -> None:
        description = node.meta.get("desc")
        target = getattr(description, "target", None)
        if target is not None:
            name = str(target).removeprefix(f"{MODEL}.")
            if name in self._parts.op_of_tensor:
                self._parts.source[node] = (self._parts.op_of_tensor[name], 0)
                return
            # A tensor that is no parameter or buffer, but an attribute or a constant.
            op = self._unique(f"constants/{name.replace('.', '/')}")
            self._parts.op_of_tensor[name] = op
            self._add_source(node, op, "constant", node.meta.get("val"))
            return
        index = getattr(description, "idx", None)
        if index is None:  # the gradient of the loss by itself: a one
            self._add_source(node, self._unique("loss/one"), "one", node.meta.get("val"))
            return
        exported = self._unions.inputs[index]
        label = self._unions.label_of_sole_user(exported)
        op = self._unique(f"inputs/{_input_name(exported.name)}")
        self._first[exported.name] = op
        self._add_source(node, op, "input", node.meta.get("val"), (label,) if label else ())

    def _add_source(
        self, node: Node, op: str, kind: str, value: Any, colocate: tuple[str, ...] = ()
    ) -> None:
        outputs = (tensor_of(value),) if isinstance(value, torch.Tensor) else ()
        self._parts.ops.append(
            Op(name=op, type=kind, outputs=outputs, flops=0.0, colocate=colocate, work=Work.NONE)
        )
        self._parts.source[node] = (op, 0)

    # --- ops -------------------------------------------------------------------------------------

    def _add_call(self, node: Node) -> None:
        source = self._parts.source
        if node.target is operator.getitem:
            producer = node.args[0]
            if producer in source:
                source[node] = (source[producer][0], int(node.args[1]))  # type: ignore[arg-type,index]
            return
        value = node.meta.get("val")
        outputs = list(value) if isinstance(value, tuple | list) else [value]
        if not any(isinstance(v, torch.Tensor) for v in outputs):  # an assertion
            return
        inputs = list(dict.fromkeys(n for n in node.all_input_nodes if n in source))
        owners = {_storage(n.meta.get("val")): n for n in inputs if _storage(n.meta.get("val"))}
        shares = [owners.get(_storage(v)) for v in outputs]
        view = all(owner is not None or v is None for owner, v in zip(shares, outputs, strict=True))
        backward = node.meta.get("partitioner_tag") == "is_backward"
        origin = self._origin.get(node)
        parameter = self._sum_for.get(node)
        if parameter is None:
            name = self._unique(self._path(node, origin, backward))
        else:  # named after it, as its update is: so it is grouped with it
            name = self._unique(f"{parameter.replace('.', '/')}/grad/{node.name}")
        forward = self._first.get(origin) if origin and backward else None
        if origin and origin not in self._first:
            self._first[origin] = name
        work = work_of(node.target, view)
        self._parts.ops.append(
            Op(
                name=name,
                type=op_name(node.target),
                outputs=tuple(
                    tensor_of(v, source[owner] if owner is not None else None)
                    for v, owner in zip(outputs, shares, strict=True)
                ),
                flops=0.0 if view else flops_of(node),
                colocate=(self._unions.label(origin),) if origin else (),
                gradient_of=forward,
                kernels=kernels_of(node.target),
                work=work,
            )
        )
        source[node] = (name, 0)
        self._parts.edges += [Edge(source[n][0], name, source[n][1]) for n in inputs]

    def _path(self, node: Node, origin: str | None, backward: bool) -> str:
        exported = self._unions.nodes.get(origin or "")
        path = "" if exported is None else module_path(exported, self._repeated)
        return "/".join(part for part in (path, "grad" if backward else "", node.name) if part)

    def _unique(self, name: str) -> str:
        wanted, number = name, 1
        while name in self._names:
            name = f"{wanted}_{number}"
            number += 1
        self._names.add(name)
        return name

    # --- the optimizer ---------------------------------------------------------------------------

    def _add_updates(self) -> None:
        """The update of every parameter, after the last gradient, as `optimizer.step()` has it."""
        optimizer = self._exported.task.optimizer
        if not self._exported.task.train or optimizer is None:
            return
        parameters = dict(self._exported.model.named_parameters())
        gradients = self._gradients()
        begin = "optimizer/begin"
        parts = self._parts
        parts.ops.append(Op(name=begin, type="begin", flops=0.0, work=Work.NONE))
        kind = f"update_{optimizers.name_of(optimizer)}"
        states: dict[torch.dtype, Mapping[str, int]] = {}
        label_of = {op.name: op.colocate for op in parts.ops}
        for name, node in gradients.items():
            gradient = parts.source[node]
            tensor = parameters[name]
            if tensor.dtype not in states:
                states[tensor.dtype] = optimizers.state_of(optimizer, tensor.dtype)
            owner = parts.op_of_tensor[name]
            colocate = label_of[owner]
            update = self._unique(f"{owner}/update")
            self._updates[name] = (node, update)
            slots = []
            for state, element_bytes in states[tensor.dtype].items():
                slot = self._unique(f"{owner}/{state}")
                size = element_bytes * tensor.numel()
                slots.append(slot)
                parts.ops.append(
                    Op(name=slot, type="state", outputs=(Tensor(size, tuple(tensor.shape)),),
                       slot_bytes=size, flops=0.0, colocate=colocate, work=Work.NONE)
                )  # fmt: skip
            per_element = 10.0 if slots else 2.0
            parts.ops.append(
                Op(name=update, type=kind, flops=per_element * tensor.numel(), colocate=colocate,
                   work=Work.UPDATE, moved_bytes=_update_bytes(tensor, states[tensor.dtype]))
            )  # fmt: skip
            parts.edges += [Edge(gradient[0], begin, None), Edge(begin, update, None)]
            parts.edges += [Edge(gradient[0], update, gradient[1])]
            parts.edges += [Edge(of, update, 0) for of in (owner, *slots)]

    def _gradients(self) -> dict[str, Node]:
        """Parameter -> the node of its gradient, of those that are computed."""
        found = self._parameter_gradients()
        return {name: node for name, node in found.items() if node in self._parts.source}

    def _parameter_gradients(self) -> dict[str, Node]:
        graph = self._joint.graph
        values = pytree.tree_leaves(graph.output_node().args[0])
        result = {}
        for value, described in zip(values, _output_descriptions(graph), strict=False):
            target = getattr(getattr(described, "grad_of", None), "target", None)
            if target is None or not isinstance(value, Node):
                continue
            name = str(target).removeprefix(f"{MODEL}.")
            result[self._exported.tied.get(name, name)] = value
        return result

    def _op_of_node(self) -> dict[str, str]:
        """A node that left no op of its own is where the nodes it is tied to are, or its inputs."""
        result: dict[str, str] = {}
        by_label: dict[str, str] = {}
        for node, op in self._first.items():
            by_label.setdefault(self._unions.label(node), op)
        for node in self._exported.module.graph.nodes:
            if node.op == "get_attr":
                name = str(node.target).removeprefix(f"{MODEL}.")
                if name in self._parts.op_of_tensor:
                    result[node.name] = self._parts.op_of_tensor[name]
            elif node.op == "placeholder":
                if node.name in self._first:
                    result[node.name] = self._first[node.name]
            elif node.op == "call_function":
                found = by_label.get(self._unions.label(node.name))
                if found is None:
                    found = next(
                        (result[n.name] for n in node.all_input_nodes if n.name in result), None
                    )
                if found is not None:
                    result[node.name] = found
        return result


def _is_source(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _update_bytes(tensor: torch.Tensor, state: Mapping[str, int]) -> int:
    """Reads the gradient, reads and writes the parameter and its state."""
    return 3 * _bytes(tensor) + 2 * sum(state.values()) * tensor.numel()


def _input_name(name: str) -> str:
    return re.sub(r"^(args|kwargs|targets)_", "", name)


# --- which exported nodes stay together ----------------------------------------------------------


class Unions:
    """Sets of nodes of an exported graph that are always on one device."""

    def __init__(
        self, graph: torch.fx.Graph, unit_of: Callable[[str], str | None] = lambda path: None
    ) -> None:
        self.nodes: dict[str, Node] = {node.name: node for node in graph.nodes}
        self.inputs = [
            node
            for node in graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        ]
        """In the order in which a step takes them."""
        self._number = {name: number for number, name in enumerate(self.nodes)}
        self._by_number = list(self.nodes)
        self._sets = DisjointSets(len(self.nodes))
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self._unit: dict[int, str | None] = {}
        """Number of a set -> the unit that its ops are in."""
        for node in calls:
            path = module_path(node).replace("/", ".")
            unit = unit_of(path) if path and not only_looks(node) else None
            self._unit[self._number[node.name]] = unit
        for node in calls:
            self._join_view(node)
        self._join_writers(calls)
        for node in calls:
            self._join_elementwise(node)

    def label(self, node: str) -> str:
        return f"node {self._by_number[self._sets.find(self._number[node])]}"

    def label_of_sole_user(self, node: Node) -> str | None:
        labels = {self.label(user.name) for user in node.users if user.op == "call_function"}
        return labels.pop() if len(labels) == 1 else None

    def users_of_attributes(self, tied: Mapping[str, str]) -> dict[str, set[str]]:
        """Parameter or buffer -> a node of each set that uses it."""
        users: dict[str, dict[str, str]] = defaultdict(dict)
        for node in self.nodes.values():
            if node.op == "get_attr":
                name = str(node.target).removeprefix(f"{MODEL}.")
                for user in node.users:
                    if user.op == "call_function":
                        users[tied.get(name, name)][self.label(user.name)] = user.name
        return {name: set(of.values()) for name, of in users.items()}

    def _union(self, a: Node, b: Node) -> None:
        unit = self._unit_of(a) or self._unit_of(b)
        self._sets.union(self._number[a.name], self._number[b.name])
        self._unit[self._sets.find(self._number[a.name])] = unit

    def _unit_of(self, node: Node) -> str | None:
        return self._unit.get(self._sets.find(self._number[node.name]))

    def _join_view(self, node: Node) -> None:
        """To the op whose tensor it looks at; a view of a parameter goes with who uses it."""
        if node.target is operator.getitem:
            self._union(node, node.args[0])  # type: ignore[arg-type]
            return
        own = set(storages(node.meta.get("val")))
        for source in node.all_input_nodes:
            if own & set(storages(source.meta.get("val"))):
                if source.op == "call_function":
                    self._union(node, source)
                elif node.users:
                    users = [user for user in node.users if user.op == "call_function"]
                    if len(users) == 1:
                        self._union(node, users[0])

    def _join_writers(self, calls: Sequence[Node]) -> None:
        """All that touch a tensor which some op writes to in place: copies would miss the write."""
        written: set[int] = set()
        for node in calls:
            for argument in _written_arguments(node):
                written |= set(storages(argument.meta.get("val")))
        holder: dict[int, Node] = {}
        for node in calls:
            touched = set(storages(node.meta.get("val")))
            for source in node.all_input_nodes:
                touched |= set(storages(source.meta.get("val")))
            for storage in touched & written:
                self._union(holder.setdefault(storage, node), node)

    def _join_elementwise(self, node: Node) -> None:
        """To the largest of its inputs that nothing else uses."""
        if not _is_elementwise(node):
            return
        candidates = [
            source
            for source in node.all_input_nodes
            if source.op == "call_function"
            and len(source.users) == 1
            and len({self._unit_of(source), self._unit_of(node)} - {None}) < 2
        ]
        if candidates:
            self._union(node, max(candidates, key=lambda n: _total_bytes(n.meta.get("val"))))


def _written_arguments(node: Node) -> Iterable[Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        # Batch norm says that it does not write, and updates its averages in training.
        if op_name(node.target) == "batch_norm" and len(node.args) > 5 and node.args[5]:
            return [a for a in node.args[3:5] if isinstance(a, Node)]
        return []
    result = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.kwargs.get(argument.name)
            if position < len(node.args):
                value = node.args[position]
            result += [n for n in pytree.tree_leaves(value) if isinstance(n, Node)]
    return result


def _is_elementwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or op_name(target) in ("dropout", "native_dropout")


def _by_number(nodes: Sequence[Node], exported: Mapping[str, Node]) -> dict[int, str]:
    """Autograd numbers its functions, and gives a gradient the number of its forward op: number ->
    the exported node. The first forward node that has a number is the one that made the
    function."""
    by_number: dict[int, str] = {}
    for node in nodes:
        number, origin = node.meta.get("seq_nr"), _forward_origin(node, exported)
        if origin is not None and number is not None:
            by_number.setdefault(number, origin)
    return by_number


def _forward_origin(node: Node, exported: Mapping[str, Node]) -> str | None:
    """The exported node that a forward node was; forward nodes say so themselves."""
    trail = node.meta.get("from_node")
    if node.op == "call_function" and trail and trail[-1].name in exported:
        return str(trail[-1].name)
    return None


def _origins(
    nodes: Sequence[Node],
    exported: Mapping[str, Node],
    by_number: Mapping[int, str],
    sums: Container[Node],
    of_parameters: Container[Node],
) -> dict[Node, str]:
    """Node of the joint graph -> the exported node that it, or what it is the gradient of, was.

    `of_parameters` have none: sums that become the gradient of a parameter belong to that.
    """
    origins = {
        node: origin for node in nodes if (origin := _forward_origin(node, exported)) is not None
    }
    waiting = [
        node
        for node in nodes
        if node.op == "call_function" and node not in origins and node not in of_parameters
    ]
    for node in reversed(waiting):
        found = by_number.get(node.meta.get("seq_nr", -1))
        # A sum of gradients has no forward op, and the number of an unrelated one: it is with who
        # takes it.
        if found is None or node in sums:
            found = next((origins[user] for user in node.users if user in origins), None)
        if found is not None:
            origins[node] = found
    for node in waiting:
        if node not in origins:
            found = next((origins[n] for n in node.all_input_nodes if n in origins), None)
            if found is not None:
                origins[node] = found
    return origins


def _sums_of_gradients(nodes: Sequence[Node], by_number: Mapping[int, str]) -> set[Node]:
    """The additions that autograd makes where a tensor was used several times, one after another
    for each further use. An addition in the gradient of one op has a summand of that op."""
    sums: set[Node] = set()
    for node in nodes:
        if node.target is not torch.ops.aten.add.Tensor or not _is_backward(node):
            continue
        origin = by_number.get(node.meta.get("seq_nr", -1))
        if all(
            _is_backward(n) and (n in sums or by_number.get(n.meta.get("seq_nr", -1)) != origin)
            for n in node.all_input_nodes
        ):
            sums.add(node)
    return sums


def _is_backward(node: Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def _summed_into(gradient: Node, sums: Container[Node]) -> list[Node]:
    """The sums that a gradient is the last of; none where it is none."""
    found: dict[Node, None] = {}
    waiting = [gradient]
    while waiting:
        node = waiting.pop()
        if node in sums and node not in found:
            found[node] = None
            waiting += node.all_input_nodes
    return list(found)


_ORDINAL = re.compile(r"@(\d+)")


def module_path(node: Node, repeated: Container[str] = ()) -> str:
    """`transformer/h/0/attn`; calls of a module that is called several times are steps of it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = _ORDINAL.sub("", path).removeprefix(MODEL).removeprefix(".").replace(".", "/")
    call = _ORDINAL.search(_key(node))
    return f"{path}/step_{call[1] if call else 0}" if path in repeated else path


def _key(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return str(list(stack)[-1]) if stack else ""


# --- tensors and kernels -------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()


def tensor_of(value: Any, shares: tuple[str, int] | None = None) -> Tensor:
    """An output that is not there, as a gradient that nobody wants, keeps its number."""
    if not isinstance(value, torch.Tensor):
        return Tensor(_total_bytes(value))
    dtype = str(value.dtype).removeprefix("torch.")
    return Tensor(
        _bytes(value),
        tuple(int(size) for size in value.shape),
        dtype if dtype in DTYPE_BYTES else "",
        shares,
    )


def _storage(value: Any) -> int | None:
    return next(iter(storages(value)), None) if isinstance(value, torch.Tensor) else None


def only_looks(node: Node) -> bool:
    """Whether it makes no tensor: its result is the memory of one of its inputs, or nothing, as
    that of an assertion."""
    own = set(storages(node.meta.get("val")))
    looked_at = {s for n in node.all_input_nodes for s in storages(n.meta.get("val"))}
    return not own or not own.isdisjoint(looked_at)


def _total_bytes(value: Any) -> int:
    return sum(_bytes(v) for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor))


_KEYS = {"cpu": "CPU", "gpu": "CUDA"}
_ANYWHERE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd",
             "CompositeExplicitAutogradNonFunctional")  # fmt: skip


def kernels_of(target: Any) -> tuple[str, ...] | None:
    """The device types that run an op somebody registered; torch's own ops run on all.

    Whether torch's own have a CUDA kernel cannot be asked of a build for the CPU, and the few that
    have none are those that replace another on the CPU only.
    """
    if not is_foreign(target):
        return None
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = target._schema.name  # with the namespace
    overload = target._schema.overload_name
    name = f"{name}.{overload}" if overload else name
    if any(has(name, key) for key in _ANYWHERE):
        return None
    return tuple(kind for kind, key in _KEYS.items() if has(name, key))
