"""A PyTorch module as something that can be placed: its graph, and the way back to the module."""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from placewright.backends.base import Input
from placewright.backends.pytorch import exporting
from placewright.backends.pytorch.calls import record_calls
from placewright.backends.pytorch.capture import capture, only_looks
from placewright.backends.pytorch.exporting import Exported, Inputs, Task, first_line
from placewright.backends.pytorch.modules import Units, dotted_path, unit_of, units_of
from placewright.backends.pytorch.plan import Plan, example_inputs
from placewright.backends.pytorch.steps import Step
from placewright.errors import ModelError, PlacewrightError
from placewright.graph import Graph

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchModel:
    """A module with example inputs and what is to be done with it: what can be read as a graph."""

    module: torch.nn.Module
    inputs: Inputs
    task: Task = field(default_factory=Task)
    name: str = ""
    """What tables and reports call it; its class when empty."""
    group_rules: tuple[tuple[str, str], ...] = ()
    """How its author would group its ops by their names: (regular expression, label)."""


@dataclass(frozen=True, kw_only=True)
class TorchProgram:
    """What was captured of a module."""

    graph: Graph
    inputs: tuple[Input, ...]
    units: Units
    op_of_node: Mapping[str, str]
    """Node of the exported graph -> an op on the same device; empty where it is placed module by
    module."""
    op_of_tensor: Mapping[str, str]
    """Parameter or buffer -> its op."""
    ops_of_unit: Mapping[str, tuple[str, ...]]
    """Unit -> ops that stand for what is in it."""
    model: str
    training: bool
    example: Inputs
    step: Step | None = None
    """What runs; None where it cannot be run in a process of its own."""
    why_no_step: str = ""
    """Where there is none."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    """The module's own parameters, buffers and constants."""
    backend: str = "pytorch"

    def weights(self) -> dict[str, torch.Tensor]:
        """By name; without those on `meta`, which have no values."""
        return {
            name: tensor.detach() for name, tensor in self.tensors.items() if not tensor.is_meta
        }

    def plan(self, device_of_op: Mapping[str, str], devices: Mapping[str, str]) -> Plan:
        """A placement of the graph as a plan for the module.

        Args:
            device_of_op: op -> device of the cluster.
            devices: device of the cluster -> what torch calls it.
        """
        of_tensor = {name: device_of_op[op] for name, op in self.op_of_tensor.items()}
        return Plan(
            model=self.model,
            training=self.training,
            inputs=self.example,
            devices=dict(devices),
            device_of_node={node: device_of_op[op] for node, op in self.op_of_node.items()},
            device_of_tensor=of_tensor,
            units=self.units,
            device_of_unit={
                unit: tuple(dict.fromkeys(device_of_op[op] for op in ops))
                for unit, ops in self.ops_of_unit.items()
            },
        )


def read_program(source: TorchModel) -> TorchProgram:
    """Captures a module: op by op, or module by module where it cannot be exported."""
    module, task = source.module, source.task
    name = source.name or type(module).__name__
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"the model is a {name}, expected a torch.nn.Module")
    try:
        exported = exporting.export(module, source.inputs, task)
        units = units_of(exported.model, exported)
        captured = capture(exported, name, source.group_rules, units.holder_of)
    except PlacewrightError:
        raise
    except Exception as fault:  # whatever torch raises for a module that it cannot trace
        return _by_modules(source, name, fault)
    tensors = _registered(exported.model)
    op_of_tensor = {n: op for n, op in captured.op_of_tensor.items() if n in tensors}
    return TorchProgram(
        graph=captured.graph,
        inputs=_inputs(source),
        units=units,
        op_of_node=captured.op_of_node,
        op_of_tensor=op_of_tensor,
        ops_of_unit=_ops_of_units(exported, units, captured.op_of_node, op_of_tensor),
        model=type(module).__name__,
        training=module.training,
        example=example_inputs(source.inputs),
        step=captured.step,
        why_no_step=captured.why_no_step,
        tensors=_tensors_of(module, exported, captured.step),
    )


def _tensors_of(
    module: torch.nn.Module, exported: Exported, step: Step | None
) -> dict[str, torch.Tensor]:
    """What the step reads of the module, by the names of its sources."""
    named: dict[str, torch.Tensor] = {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
    }
    found = {}
    for source in step.sources if step is not None else ():
        if source.kind == "input":
            continue
        tensor = named.get(source.name)
        if tensor is None:
            try:
                tensor = operator.attrgetter(source.name)(exported.module)
            except AttributeError:
                continue
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
            found[source.name] = tensor
    return found


def _by_modules(source: TorchModel, name: str, fault: Exception) -> TorchProgram:
    module = source.module
    kind = type(module).__name__
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        raise ModelError(
            f"{kind} does not run with these example inputs on meta: {first_line(fault)}; it "
            f"takes {exporting.forward_signature(module)}"
        ) from None
    try:
        calls = record_calls(module, source.inputs, source.task, name)
    except PlacewrightError:
        raise
    except Exception as error:
        raise ModelError(
            f"{kind} does not run with these example inputs: {first_line(error)}; it takes "
            f"{exporting.forward_signature(module)}"
        ) from None
    logger.warning(
        "%s cannot be exported as one graph (%s); it is placed module by module",
        kind,
        first_line(fault),
    )
    return TorchProgram(
        graph=calls.graph,
        inputs=_inputs(source),
        units=calls.units,
        op_of_node={},
        op_of_tensor=calls.op_of_tensor,
        ops_of_unit=calls.ops_of_unit,
        model=kind,
        training=module.training,
        example=example_inputs(source.inputs),
        why_no_step=f"it cannot be exported as one graph: {first_line(fault)}",
    )


def _registered(model: torch.nn.Module) -> set[str]:
    return {
        *(name for name, _ in model.named_parameters(remove_duplicate=False)),
        *(name for name, _ in model.named_buffers(remove_duplicate=False)),
    }


def _inputs(source: TorchModel) -> tuple[Input, ...]:
    """In the order in which the step numbers them."""
    args, kwargs = source.inputs
    groups = [
        *((str(i), value) for i, value in enumerate(args)),
        *kwargs.items(),
        *((f"target{i or ''}", value) for i, value in enumerate(source.task.targets)),
    ]
    return tuple(
        Input(
            f"{name}{pytree.keystr(path)}",
            str(leaf.dtype).removeprefix("torch."),
            tuple(leaf.shape),
        )
        for name, value in groups
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, torch.Tensor)
    )


def _ops_of_units(
    exported: Exported,
    units: Units,
    op_of_node: Mapping[str, str],
    op_of_tensor: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    known = dict.fromkeys(units.order)
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for node in exported.module.graph.nodes:
        if node.op == "call_function" and node.name in op_of_node:
            path = dotted_path(node)
            unit = unit_of(path, known) if path else None
            # Looking at a tensor is no work, and is done where the tensor is.
            if unit is not None and not only_looks(node):
                found[unit][op_of_node[node.name]] = None
    for name, op in op_of_tensor.items():
        unit = unit_of(exported.tied.get(name, name), known)
        if unit is not None:
            found[unit][op] = None
    return {unit: tuple(ops) for unit, ops in found.items()}
