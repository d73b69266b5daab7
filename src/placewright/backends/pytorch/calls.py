"""What a module does that cannot be exported: which units it calls, how long and with what.

The module runs for real, with hooks around its units. What goes on between units is not seen: each
unit waits for the one before it, and takes what it is called with.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from placewright.backends.pytorch import optimizers
from placewright.backends.pytorch.exporting import Inputs, Task, loss_of, quiet
from placewright.backends.pytorch.modules import Units, unit_of, units_of
from placewright.backends.pytorch.outputs import opened
from placewright.graph import Edge, Graph, Op, Tensor, Work

_BACKWARD = 2.0
"""How much longer the gradients of a unit take than the unit: two products for each."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The graph of a module's units."""

    graph: Graph
    units: Units
    op_of_tensor: Mapping[str, str]
    ops_of_unit: Mapping[str, tuple[str, ...]]


@dataclass
class _Call:
    unit: str
    input_bytes: int
    flops_before: float
    started: float
    seconds: float = 0.0
    flops: float = 0.0
    output_bytes: int = 0


@dataclass
class _Recorder:
    counter: FlopCounterMode
    calls: list[_Call] = field(default_factory=list)
    open: list[_Call] = field(default_factory=list)

    def before(self, path: str, args: Any, kwargs: Any) -> None:
        before = float(self.counter.get_total_flops())
        self.open.append(_Call(path, _sizes((args, kwargs)), before, time.perf_counter()))

    def after(self, outputs: Any) -> None:
        call = self.open.pop()
        call.seconds = time.perf_counter() - call.started
        call.flops = self.counter.get_total_flops() - call.flops_before
        call.output_bytes = _sizes(outputs)
        self.calls.append(call)


def record_calls(module: torch.nn.Module, inputs: Inputs, task: Task, name: str) -> Calls:
    """Runs the module three times: to warm up, to count, and to take the time."""
    units = units_of(module, None)
    recorder = _Recorder(FlopCounterMode(display=False))
    modules = dict(module.named_modules())
    with torch.no_grad(), torch.random.fork_rng(devices=[]), quiet():
        args, kwargs = inputs
        saved = {k: v.clone() for k, v in module.named_buffers()}
        outputs = module(*args, **kwargs)
        if task.train and task.loss_fn is None:
            loss_of(outputs)
        handles = []
        for path in units.order:
            if path in modules:
                handles.append(
                    modules[path].register_forward_pre_hook(
                        lambda m, a, k, path=path: recorder.before(path, a, k), with_kwargs=True
                    )
                )
                handles.append(modules[path].register_forward_hook(
                    lambda m, a, out: recorder.after(out)))  # fmt: skip
        try:
            with recorder.counter:
                module(*args, **kwargs)
            counted, recorder.calls = recorder.calls, []
            module(*args, **kwargs)  # counting takes time, so that this run is the one that counts
            for call, other in zip(recorder.calls, counted, strict=False):
                call.flops = other.flops
        finally:
            for handle in handles:
                handle.remove()
        for key, value in module.named_buffers():
            value.copy_(saved[key])
    return _graph(module, units, recorder.calls, task, name)


def _graph(
    module: torch.nn.Module, units: Units, calls: list[_Call], task: Task, name: str
) -> Calls:
    ops: list[Op] = []
    edges: list[Edge] = []
    known = dict.fromkeys(units.order)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    first_op: dict[str, str] = {}
    counts: dict[str, int] = {}
    previous = ""
    order = []
    for call in calls:
        step = counts[call.unit] = counts.get(call.unit, -1) + 1
        path = call.unit.replace(".", "/") or "model"
        op = f"{path}/call" if not step else f"{path}/step_{step}/call"
        first_op.setdefault(call.unit, op)
        ops.append(
            Op(name=op, type="module", outputs=(Tensor(call.output_bytes),),
               seconds={"cpu": call.seconds}, flops=call.flops, colocate=(call.unit,),
               work=Work.MATMUL)
        )  # fmt: skip
        if previous:
            edges.append(Edge(previous, op))
        previous = op
        order.append((call, op))
    if task.train:
        for call, op in reversed(order):
            gradient = f"{op}/grad"
            ops.append(
                Op(name=gradient, type="module_grad", outputs=(Tensor(call.input_bytes),),
                   seconds={"cpu": _BACKWARD * call.seconds}, flops=_BACKWARD * call.flops,
                   colocate=(call.unit,), gradient_of=op, work=Work.MATMUL)
            )  # fmt: skip
            edges += [Edge(previous, gradient), Edge(op, gradient)]
            previous = gradient
    op_of_tensor = {}
    found: dict[str, list[str]] = {unit: [op] for unit, op in first_op.items()}
    for key, tensor in named.items():
        unit = unit_of(key, known)
        op = key.replace(".", "/")
        size = tensor.numel() * tensor.element_size()
        state = 0
        if task.train and task.optimizer is not None and tensor.requires_grad:
            each = optimizers.state_of(task.optimizer, tensor.dtype)
            state = sum(each.values()) * tensor.numel()
        ops.append(
            Op(name=op, type="parameter", outputs=(Tensor(size),), param_bytes=size,
               slot_bytes=state, flops=0.0, colocate=(unit or op,), work=Work.NONE)
        )  # fmt: skip
        op_of_tensor[key] = op
        if unit in first_op:
            edges.append(Edge(op, first_op[unit]))
        if unit is not None:
            found.setdefault(unit, []).append(op)
    graph = Graph.from_ops(name, ops, edges, issue="host")
    called = tuple(dict.fromkeys(call.unit for call in calls))
    ordered = Units(
        order=(*called, *(u for u in units.order if u not in first_op)),
        sets=units.sets,
        called=len(called),
        holding=units.holding,
    )
    return Calls(
        graph=graph,
        units=ordered,
        op_of_tensor=op_of_tensor,
        ops_of_unit={unit: tuple(of) for unit, of in found.items()},
    )


def _sizes(values: Any) -> int:
    leaves = pytree.tree_leaves(opened(values))
    return sum(v.numel() * v.element_size() for v in leaves if isinstance(v, torch.Tensor))
