"""A module for certain inputs as a flat graph of ATen ops without side effects."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.exporting import first_line, quiet, storages
from placewright.backends.pytorch.outputs import OutputTree, opening

Node = torch.fx.Node
aten = torch.ops.aten


class UnsuitableError(Exception):
    """Why a module cannot be run as one captured graph, in one line."""


@dataclass(kw_only=True)
class Net:
    """A flat graph. Passes change it in place."""

    graph: torch.fx.Graph
    """Placeholders, calls of functions, and an output: a list of values, flat."""
    constants: dict[str, torch.Tensor]
    """Placeholder -> parameter, buffer or constant of the module."""
    leaves: tuple[str | None, ...]
    """For each leaf of the inputs, its placeholder; None where it is no tensor or is a constant."""
    tree: OutputTree
    """How the flat outputs are put together again."""
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    """Placeholder -> tensor of the module that changes between calls: a parameter that is
    trained."""

    def copy(self) -> Net:
        """Another graph over the same tensors, for passes to change."""
        graph = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        output = graph.graph_copy(self.graph, copies)
        graph.output(output)
        for node, other in copies.items():
            other.meta = dict(node.meta)
        named = {node.name: other.name for node, other in copies.items()}  # they may differ
        return Net(
            graph=graph,
            constants={named[name]: value for name, value in self.constants.items()},
            leaves=tuple(None if name is None else named[name] for name in self.leaves),
            tree=self.tree,
            held={named[name]: value for name, value in self.held.items()},
        )

    def results(self) -> list[Any]:
        """The flat outputs: nodes, and plain values."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def constant_nodes(self) -> set[Node]:
        """Nodes that only depend on constants, and so are computed once; marks them as such. Random
        ones are none."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            constant = node.op == "placeholder" and node.name in self.constants
            if node.op == "call_function":
                constant = not is_random(node) and all(n in found for n in node.all_input_nodes)
            node.meta["constant"] = constant
            if constant:
                found.add(node)
        return found

    def frozen(self) -> dict[str, Any]:
        """Values of the constants that are used where something is computed for each call."""
        constant = self.constant_nodes()
        wanted = {n for n in constant if any(user not in constant for user in n.users)}
        values: dict[Node, Any] = {}
        last = {n: user for user in self.graph.nodes if user in constant
                for n in user.all_input_nodes}  # fmt: skip
        gone: dict[Node, list[Node]] = {}
        for node, user in last.items():
            if node not in wanted:
                gone.setdefault(user, []).append(node)
        with torch.no_grad():
            for node in self.graph.nodes:
                if node not in constant:
                    continue
                if node.op == "placeholder":
                    values[node] = self.constants[node.name].detach()
                else:
                    args, kwargs = torch.fx.node.map_arg(
                        (node.args, node.kwargs), lambda n: values[n]
                    )
                    values[node] = node.target(*args, **kwargs)
                for old in gone.get(node, ()):
                    del values[old]
        return {node.name: values[node] for node in wanted}


def trace(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Net:
    """Traces a module's forward pass without gradients.

    Args:
        module: it is not changed, and the graph refers to its own parameters.
        args: what it is called with; only shapes, types and strides count.
        kwargs: likewise.
    """
    try:
        with torch.no_grad(), quiet(), opening(module):
            program = torch.export.export(module, tuple(args), dict(kwargs), strict=False)
            program = program.run_decompositions({})
    except Exception as fault:  # whatever torch raises for a module that it cannot trace
        raise UnsuitableError(f"it cannot be exported as one graph: {first_line(fault)}") from None
    _check_effects(program)
    graph = program.graph_module.graph
    constants: dict[str, torch.Tensor] = {}
    leaves: list[str | None] = []
    places = [node for node in graph.nodes if node.op == "placeholder"]
    for node, spec in zip(places, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            leaves.append(None if isinstance(spec.arg, ConstantArgument) else node.name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            held = program.state_dict.get(spec.target)
            constants[node.name] = program.constants[spec.target] if held is None else held
        else:
            raise UnsuitableError(f"it holds {spec.target}, which is no tensor")
    net = Net(
        graph=graph, constants=constants, leaves=tuple(leaves),
        tree=OutputTree(program.call_spec.out_spec),
    )  # fmt: skip
    _check_nodes(net)
    _check_numbers(net)
    return net


def _check_effects(program: torch.export.ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            raise UnsuitableError(f"it writes to its input {spec.target!r} in place")
        if spec.kind is OutputKind.BUFFER_MUTATION:
            raise UnsuitableError(
                f"it changes its buffer {spec.target!r} in each call (is it in training mode?)"
            )
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise UnsuitableError(f"it has an output of kind {spec.kind.name}")


def _check_nodes(net: Net) -> None:
    for node in list(net.graph.nodes):
        if node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UnsuitableError(f"it has control flow or a region of its own ({node.name})")
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        if any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool)
               for v in pytree.tree_leaves(value)):  # fmt: skip
            raise UnsuitableError(f"sizes depend on its data ({node.target})")
        if value is None:
            if node.target is not aten._assert_tensor_metadata.default:
                raise UnsuitableError(f"it has an op with an effect ({node.target})")
            net.graph.erase_node(node)
        elif node.target is aten.as_strided.default:
            raise UnsuitableError("it looks at memory by strides (as_strided)")
    devices = {v.device for n in net.graph.nodes for v in pytree.tree_leaves(n.meta.get("val"))
               if isinstance(v, torch.Tensor) and v.dim()}  # fmt: skip
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsuitableError(f"it is on several devices ({names})")


def _check_numbers(net: Net) -> None:
    """A number on the CPU among the inputs would stay in the captured graph as it was then."""
    values = [v for n in net.graph.nodes for v in pytree.tree_leaves(n.meta.get("val"))]
    if all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor)):
        return
    for node in net.graph.nodes:
        if node.op == "placeholder" and node.name in net.leaves:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                raise UnsuitableError(
                    f"its input {node.name!r} is on the CPU; move it to where the module is"
                )


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is aten.scaled_dot_product_attention.default:  # only where it drops something
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(given != 0)
    return True


def is_view(node: Node) -> bool:
    """Whether a node makes no tensor, but looks at its input's memory. With other strides than
    those it was traced with it may have to copy after all, which does no harm. What looks at a
    constant is a constant."""
    if node.op != "call_function" or node.meta.get("constant"):
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_view(node.args[0])
    inputs = node.all_input_nodes
    if len(inputs) != 1:
        return False
    own = set(storages(node.meta.get("val")))
    return bool(own) and own <= set(storages(inputs[0].meta.get("val")))
