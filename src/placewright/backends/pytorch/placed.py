"""A module that runs where a plan says: op by op, or module by module.

Op by op, the exported graph is run with a copy of each tensor that another device needs; autograd
goes backwards over the same copies. Parameters and buffers are the user's own, under their own
names, so that checkpoints, optimizers and hooks on parameters go on working.

Two devices of a plan may be one device of the machine (`cpu:0` and `cpu:1` are both the CPU): then
tensors are copied all the same, so that what runs is what was planned.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.exporting import MODEL, Exported, Inputs, copied_graph
from placewright.backends.pytorch.modules import Units
from placewright.backends.pytorch.outputs import OutputTree
from placewright.errors import PlacementError

Node = torch.fx.Node


class Transfer(NamedTuple):
    """A tensor that is copied in each forward pass."""

    value: str
    """The node of the exported graph that makes it."""
    source: str
    target: str
    bytes: int


class _Copy(torch.autograd.Function):
    """A copy within one device, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clone()


def move(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on another device of the plan."""
    if value.device == device:
        copied: torch.Tensor = _Copy.apply(value)  # type: ignore[no-untyped-call]
        return copied
    return value.to(device, non_blocking=True)


def arrive(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An input where it is first needed; nothing to do where the user has put it there."""
    return value if value.device == device else value.to(device, non_blocking=True)


class PlacedModule(torch.nn.Module):
    """Takes and gives what the module does that it was made from, for inputs of the same shapes."""

    transfers: tuple[Transfer, ...]
    """What is copied from device to device in a forward pass."""
    _code: Any
    _constants: dict[str, torch.Tensor]

    def __init__(
        self,
        model: torch.nn.Module,
        exported: Exported,
        inputs: Inputs,
        device_of_node: Mapping[str, str],
        device_of_tensor: Mapping[str, str],
        devices: Mapping[str, torch.device],
    ) -> None:
        super().__init__()
        _share_tensors(model, self)
        self.training = model.training
        self._of = type(model).__name__
        graph = _Placing(exported, device_of_node, device_of_tensor, devices)
        self.transfers = tuple(graph.transfers)
        code = graph.module()
        self.__dict__["_code"] = code  # not a submodule: its parameters are this module's
        self.__dict__["_constants"] = {
            name: _constant(name, exported, model, devices[device])
            for name, device in graph.attributes.items()
            if not _is_registered(name, self)
        }
        self._attributes = tuple(name for name in graph.attributes)
        self._example = pytree.tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
        self._output_tree = OutputTree(_output_spec(exported))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._checked(args, kwargs)
        tensors = [
            self._constants[name] if name in self._constants else _attribute(self, name)
            for name in self._attributes
        ]
        return self._output_tree(self._code(*tensors, *leaves))

    def train(self, mode: bool = True) -> PlacedModule:
        if mode != self.training:
            wanted, made = ("train", "eval") if mode else ("eval", "train")
            raise PlacementError(
                f"this {self._of} was planned in {made} mode and runs ops of that mode only; plan "
                f"the module again after its {wanted}()"
            )
        return self

    def _checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat inputs; raises where the plan is for others."""
        examples, spec = self._example
        names = list(spec.child(1).context or ())
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
        leaves, given = pytree.tree_flatten((args, dict(kwargs)))
        if given != spec:
            raise PlacementError(
                f"this {self._of} was planned for {spec.child(0).num_children} positional "
                f"arguments and the keywords ({', '.join(names)}), and is called with {len(args)} "
                f"and ({', '.join(kwargs)}); call it as in the plan, or plan it again"
            )
        for number, (leaf, example) in enumerate(zip(leaves, examples, strict=True)):
            _check_leaf(leaf, example, number, self._of)
        return leaves


def _check_leaf(leaf: Any, example: Any, number: int, of: str) -> None:
    if isinstance(example, torch.Tensor):
        if not isinstance(leaf, torch.Tensor):
            raise PlacementError(
                f"input {number} of {of} is a {type(leaf).__name__}; the plan has a tensor of "
                f"shape {tuple(example.shape)} there"
            )
        if leaf.shape != example.shape or leaf.dtype != example.dtype:
            raise PlacementError(
                f"input {number} of {of} is {_said(leaf)}; the plan was made for {_said(example)}, "
                "and holds for that only: plan again, or apply it with level='module'"
            )
    elif isinstance(leaf, torch.Tensor) or leaf != example:
        raise PlacementError(
            f"input {number} of {of} was {example!r} when it was planned, which the graph has "
            "taken as a constant; plan again for another"
        )


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


# --- the graph with its transfers ----------------------------------------------------------------


class _Placing:
    """Writes an exported graph anew, with transfers. Attributes become its first inputs, so that
    the module's own tensors are used, whatever becomes of them: `load_state_dict`, a cast."""

    def __init__(
        self,
        exported: Exported,
        device_of_node: Mapping[str, str],
        device_of_tensor: Mapping[str, str],
        devices: Mapping[str, torch.device],
    ) -> None:
        self.transfers: list[Transfer] = []
        self.attributes: dict[str, str] = {}
        """Target of each attribute that is used -> its device in the plan."""
        self._exported = exported
        self._devices = devices
        self._holder = torch.nn.Module()
        self._graph = torch.fx.Graph()
        self._there: dict[tuple[Node, str], Node] = {}
        """Old node and device -> new node that has its value there."""
        old = self._old_graph()
        self._place = self._places(old, device_of_node, device_of_tensor)
        for kind in ("get_attr", "placeholder", "call_function"):
            for node in [n for n in old.nodes if n.op == kind]:
                self._add(node)
        leaves = pytree.tree_leaves(old.output_node().args[0])
        self._graph.output(
            tuple(self._there[n, self._place[n]] if isinstance(n, Node) else n for n in leaves)
        )
        self._graph.lint()

    def module(self) -> torch.fx.GraphModule:
        return torch.fx.GraphModule(self._holder, self._graph)

    def _old_graph(self) -> torch.fx.Graph:
        """Without assertions, and without the loss that the step added."""
        old = copied_graph(self._exported)
        output = old.output_node()
        leaves = pytree.tree_leaves(output.args[0])
        output.args = (tuple(leaves[:-1] if self._exported.task.train else leaves),)
        for node in list(old.nodes):
            if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
                old.erase_node(node)
        old.eliminate_dead_code()
        return old

    def _places(
        self,
        old: torch.fx.Graph,
        device_of_node: Mapping[str, str],
        device_of_tensor: Mapping[str, str],
    ) -> dict[Node, str]:
        """The device of each node; one that the plan does not know is where its inputs are."""
        places: dict[Node, str] = {}
        fallback = next(iter(self._devices))
        for node in old.nodes:
            default = next((places[n] for n in node.all_input_nodes if n in places), fallback)
            name = str(node.target).removeprefix(f"{MODEL}.")
            known = device_of_tensor if node.op == "get_attr" else {}
            places[node] = known.get(name, device_of_node.get(node.name, default))
        return places

    def _add(self, node: Node) -> None:
        here = self._place[node]
        if node.op == "get_attr":
            target = str(node.target)
            value = _attribute(self._exported.module, target)
            if isinstance(value, torch.nn.Module):  # the body of a region, such as no_grad's
                self._add_region(node, value)
                return
            if not node.users:
                return
            self.attributes[target] = here
        if node.op == "call_function":

            def here_or_where_it_is(source: Node) -> Node:
                return self._there[source, here if _is_tensor(source) else self._place[source]]

            new = self._graph.node_copy(node, here_or_where_it_is)
            _replace_devices(new, self._devices[here])
        else:
            new = self._graph.placeholder(node.name)
        new.meta = {}
        self._there[node, here] = new
        if node.op == "placeholder" and node.users and _is_tensor(node):
            new = self._graph.call_function(arrive, (new, self._devices[here]))
            self._there[node, here] = new
        self._send(node)

    def _send(self, node: Node) -> None:
        """One copy for each other device that uses the value, made as soon as it is there."""
        here = self._place[node]
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        users = {self._place[user] for user in node.users if user.op == "call_function"}
        for there in sorted(users - {here}):
            new = self._there[node, here]
            device = self._devices[there]
            self._there[node, there] = self._graph.call_function(move, (new, device))
            size = value.numel() * value.element_size()
            self.transfers.append(Transfer(node.name, here, there, size))

    def _add_region(self, node: Node, body: torch.nn.Module) -> None:
        region = copy.deepcopy(body)
        users = [self._place[user] for user in node.users]
        if isinstance(region, torch.fx.GraphModule) and users:
            for inner in region.graph.nodes:
                _replace_devices(inner, self._devices[users[0]])
            region.recompile()
        target = str(node.target)
        setattr(self._holder, target, region)
        self._there[node, self._place[node]] = self._graph.get_attr(target)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _replace_devices(node: Node, device: torch.device) -> None:
    def replaced(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    node.args = pytree.tree_map(replaced, node.args)
    node.kwargs = pytree.tree_map(replaced, node.kwargs)


# --- tensors -------------------------------------------------------------------------------------


def put_tensors(
    model: torch.nn.Module, device_of: Mapping[str, str], devices: Mapping[str, torch.device]
) -> None:
    """Moves parameters and buffers, as `Module.to` does: the parameters stay the same objects."""
    named = [*model.named_parameters(), *model.named_buffers()]
    missing = [name for name, _ in named if name not in device_of]
    strange = sorted(set(device_of) - {n for n, _ in _all_names(model)})
    if missing or strange:
        name, where = (missing[0], "the module") if missing else (strange[0], "the plan")
        raise PlacementError(
            f"the plan was made for another module: {name!r} is in {where} only; plan this one"
        )
    for name, tensor in named:
        if tensor.is_meta:
            raise PlacementError(
                f"{name!r} is on the meta device and has no values; load the weights, then apply "
                "the plan"
            )
        target = devices[device_of[name]]
        if tensor.device != target:
            tensor.data = tensor.data.to(target)


def _all_names(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _share_tensors(model: torch.nn.Module, target: torch.nn.Module) -> None:
    """Gives `target` the tree of the module, with its own tensors and without its code."""
    for name, parameter in model._parameters.items():
        target.register_parameter(name, parameter)
    for name, buffer in model._buffers.items():
        target.register_buffer(name, buffer, name not in model._non_persistent_buffers_set)
    for name, child in model._modules.items():
        if child is None:
            continue
        empty = torch.nn.Module()
        _share_tensors(child, empty)
        target.add_module(name, empty)


def _attribute(root: Any, path: str) -> Any:
    return operator.attrgetter(path.removeprefix(f"{MODEL}."))(
        getattr(root, MODEL) if path.startswith(f"{MODEL}.") and hasattr(root, MODEL) else root
    )


def _is_registered(target: str, root: torch.nn.Module) -> bool:
    if not target.startswith(f"{MODEL}."):
        return False
    *path, name = target.removeprefix(f"{MODEL}.").split(".")
    for part in path:
        if part not in root._modules:
            return False
        root = root._modules[part]  # type: ignore[assignment]
    return name in root._parameters or name in root._buffers


def _constant(
    target: str, exported: Exported, model: torch.nn.Module, device: torch.device
) -> torch.Tensor:
    """A tensor that is neither parameter nor buffer: an attribute of the module, or a literal."""
    try:
        value = operator.attrgetter(target.removeprefix(f"{MODEL}."))(model)
    except AttributeError:
        value = _attribute(exported.module, target)
    constant: torch.Tensor = value.to(device)
    return constant


def _output_spec(exported: Exported) -> pytree.TreeSpec:
    codegen: Any = exported.module.graph._codegen
    spec: pytree.TreeSpec = codegen.pytree_info.out_spec
    return spec.child(0) if exported.task.train else spec


# --- module by module ----------------------------------------------------------------------------


def hook_modules(
    model: torch.nn.Module,
    device_of_unit: Mapping[str, str],
    devices: Mapping[str, torch.device],
    units: Units,
) -> torch.nn.Module:
    """A copy of the module's code on the same parameters, with hooks that send what a unit takes to
    its device. It runs whatever the module does: other shapes, other branches, other modes."""
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    placed = copy.deepcopy(model, dict(shared))
    state = {"here": ""}
    modules = dict(placed.named_modules())
    for path in units.order:
        if path in modules and path in device_of_unit:
            hook = _hook(device_of_unit[path], devices, state)
            modules[path].register_forward_pre_hook(hook, with_kwargs=True)
    return placed


def _hook(name: str, devices: Mapping[str, torch.device], state: dict[str, str]) -> Any:
    device = devices[name]

    def send(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Two devices of a plan may be the same one here: then who ran last tells where values are.
        step = arrive if state["here"] in ("", name) else move
        state["here"] = name
        sent: tuple[Any, Any] = pytree.tree_map(
            lambda v: step(v, device) if isinstance(v, torch.Tensor) else v, (args, kwargs)
        )
        return sent

    return send
