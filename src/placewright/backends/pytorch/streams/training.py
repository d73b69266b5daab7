"""A training step without its update as a graph: the loss, all gradients, and what is written back.

The step is the one that placements are searched for (`steps`), on the device of the parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.exporting import Inputs, Task, first_line
from placewright.backends.pytorch.gpu_ops import on_gpus
from placewright.backends.pytorch.outputs import OutputTree
from placewright.backends.pytorch.program import TorchModel, TorchProgram, read_program
from placewright.backends.pytorch.steps import GETITEM, Ref, Step, function_of
from placewright.backends.pytorch.streams.net import Net, Node, UnsuitableError, aten
from placewright.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class TrainingNet:
    """The graph of a step, and what its outputs are for: the loss, gradients, then writes."""

    net: Net
    parameters: tuple[str, ...]
    """Those that the gradients are of."""
    written: tuple[str, ...]
    """Buffers that the last outputs are copied into."""


def trace_step(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], task: Task
) -> TrainingNet:
    """Traces a step; raises `UnsuitableError` where there is none to be captured."""
    # The optimizer only says that all gradients are wanted; its update is not part of the graph.
    wanted = Task(train=True, loss_fn=task.loss_fn, targets=task.targets, optimizer=torch.optim.SGD)
    try:
        with torch.enable_grad():
            program = read_program(TorchModel(module, Inputs(tuple(args), dict(kwargs)), wanted))
    except ModelError as fault:
        raise UnsuitableError(str(fault)) from None
    step = program.step
    if step is None:
        raise UnsuitableError(program.why_no_step)
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs), task.targets))
    devices = {t.device for t in [*module.parameters(), *leaves] if isinstance(t, torch.Tensor)}
    if len(devices) != 1:
        raise UnsuitableError(f"it is on several devices ({', '.join(map(str, devices))})")
    return _converted(step, program, leaves, devices.pop())


def _converted(
    step: Step, program: TorchProgram, leaves: Sequence[Any], device: torch.device
) -> TrainingNet:
    graph = torch.fx.Graph()
    nodes: dict[int, Node] = {}
    held: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    real: dict[Node, torch.Tensor] = {}
    tensors = iter([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    for source in sorted(step.sources, key=lambda s: s.value):
        node = nodes[source.value] = graph.placeholder(f"source_{source.value}")
        if source.kind == "input":
            real[node] = next(tensors)
            inputs.append(node.name)
            continue
        if source.kind == "constant" and source.name.startswith("tangents"):
            # The gradient of the loss by itself.
            ones = torch.ones(source.shape, dtype=getattr(torch, source.dtype), device=device)
            constants[node.name] = real[node] = ones
            continue
        if source.name not in program.tensors:
            raise UnsuitableError(f"it reads {source.name}, which is no tensor of its own")
        tensor = real[node] = program.tensors[source.name].to(device)
        (constants if source.kind == "constant" else held)[node.name] = tensor
    for call in step.calls:
        function: Any = operator.getitem if call.target == GETITEM else function_of(call.target)
        if function is aten.as_strided.default:
            raise UnsuitableError("it looks at memory by strides (as_strided)")
        if device.type == "cuda":
            function = on_gpus(function)
        args, kwargs = _filled((call.args, dict(call.kwargs)), nodes, device)
        nodes[call.value] = graph.call_function(function, tuple(args), kwargs)
    outputs = [
        *step.results,
        *(update.gradient for update in step.updates),
        *(write.value for write in step.writes),
    ]
    graph.output(tuple(nodes[value] for value in outputs))
    _find_forms(graph, real)
    name_of = {source.value: source.name for source in step.sources}
    named = iter(inputs)
    net = Net(
        graph=graph, constants=constants, held=held,
        leaves=tuple(next(named) if isinstance(v, torch.Tensor) else None for v in leaves),
        tree=OutputTree(pytree.tree_structure([0] * len(outputs))),
    )  # fmt: skip
    return TrainingNet(
        net=net,
        parameters=tuple(name_of[update.parameter] for update in step.updates),
        written=tuple(name_of[write.source] for write in step.writes),
    )


def _filled(argument: Any, nodes: Mapping[int, Node], device: torch.device) -> Any:
    if isinstance(argument, Ref):
        return nodes[argument.value]
    if isinstance(argument, tuple):
        return [_filled(a, nodes, device) for a in argument]
    if isinstance(argument, dict):
        return {key: _filled(a, nodes, device) for key, a in argument.items()}
    return device if isinstance(argument, torch.device) else argument


def _find_forms(graph: torch.fx.Graph, real: Mapping[Node, torch.Tensor]) -> None:
    """What each node gives, by running all of it without memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[Node, Any] = {}
    try:
        with torch.no_grad(), mode:
            for node in graph.nodes:
                if node.op == "placeholder":
                    values[node] = mode.from_tensor(real[node].detach())
                elif node.op == "call_function":
                    args, kwargs = torch.fx.node.map_arg(
                        (node.args, node.kwargs), values.__getitem__
                    )
                    values[node] = node.target(*args, **kwargs)
                node.meta["val"] = values.get(node)
    except Exception as fault:  # of torch, for an op that is traced on a CPU and not for a GPU
        raise UnsuitableError(f"its step cannot be traced: {first_line(fault)}") from None


def split_gradients(net: Net) -> int:
    """A convolution's gradients of its input and of its weight become two ops: the first is what
    the backward pass waits for, the other can run beside it. Says how many were split."""
    count = 0
    for node in list(net.graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        mask = list(node.args[-1])
        users = {user.args[1]: user for user in node.users}
        if not (mask[0] and (mask[1] or mask[2])) or 0 not in users or len(users) < 2:
            continue
        with net.graph.inserting_before(node):
            first = net.graph.call_function(node.target, (*node.args[:-1], [True, False, False]))
            rest = net.graph.call_function(node.target, (*node.args[:-1], [False, *mask[1:]]))
        first.meta["val"] = (node.meta["val"][0], None, None)
        rest.meta["val"] = (None, *node.meta["val"][1:])
        for number, user in users.items():
            user.args = (rest if number else first, number)
        net.graph.erase_node(node)
        count += 1
    return count
