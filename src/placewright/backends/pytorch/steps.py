"""What runs of a captured module: a flat list of ATen calls, as plain data.

`capture` makes a `Step` of the very graph whose ops are placed; the process that measures reads it
from JSON and looks the calls up among torch's ops. No code travels, and nothing is pickled.

Values (the tensors of a step) are numbers. Sources are values that are there before the step:
parameters, buffers, constants and inputs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.exporting import MODEL
from placewright.errors import ModelError

Node = torch.fx.Node
FORMAT = "placewright-torch-step/1"
GETITEM = "getitem"


class Ref(NamedTuple):
    """A value among the arguments of a call."""

    value: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """A value that is there before the step."""

    value: int
    kind: str
    """`parameter`, `buffer`, `constant` or `input`."""
    name: str
    """As the module calls it; for an input, as `Program.inputs` does."""
    shape: tuple[int, ...]
    dtype: str
    op: int
    """Number of its op in the graph."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an op."""

    value: int
    """What it makes; a tuple where the op gives several tensors, of which `getitem` takes one."""
    target: str
    """`aten.mm.default`, or `getitem`."""
    args: tuple[Any, ...]
    """Plain values, with a `Ref` for each tensor."""
    kwargs: Mapping[str, Any]
    op: int
    """Number of its op in the graph."""


class Update(NamedTuple):
    """The optimizer's change of one parameter."""

    parameter: int
    gradient: int
    op: int


class Write(NamedTuple):
    """A value that is copied over a source when the step is over, such as a running mean."""

    source: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """All that happens in one step, in the program's order."""

    num_values: int
    sources: tuple[Source, ...]
    calls: tuple[Call, ...]
    results: tuple[int, ...]
    """Values that the step returns: the outputs, or the loss alone."""
    updates: tuple[Update, ...] = ()
    writes: tuple[Write, ...] = ()
    optimizer: str = ""
    """Class of `torch.optim`; empty where nothing is updated."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the optimizer."""

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "num_values": self.num_values,
            "sources": [[s.value, s.kind, s.name, list(s.shape), s.dtype, s.op]
                        for s in self.sources],
            "calls": [[c.value, c.target, _to_json(c.args), _to_json(dict(c.kwargs)), c.op]
                      for c in self.calls],
            "results": list(self.results),
            "updates": [list(u) for u in self.updates],
            "writes": [list(w) for w in self.writes],
            "optimizer": self.optimizer,
            "settings": _to_json(dict(self.settings)),
        }  # fmt: skip

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Step:
        assert document["format"] == FORMAT, "a step is read by the version that wrote it"
        return Step(
            num_values=document["num_values"],
            sources=tuple(
                Source(value=v, kind=k, name=n, shape=tuple(s), dtype=d, op=o)
                for v, k, n, s, d, o in document["sources"]
            ),
            calls=tuple(
                Call(value=v, target=t, args=_from_json(a), kwargs=_from_json(k), op=o)
                for v, t, a, k, o in document["calls"]
            ),
            results=tuple(document["results"]),
            updates=tuple(Update(*u) for u in document["updates"]),
            writes=tuple(Write(*w) for w in document["writes"]),
            optimizer=document["optimizer"],
            settings=_from_json(document["settings"]),
        )


def refs(arguments: Any) -> Iterator[int]:
    """The values in the arguments of a call, each as often as it is there."""
    if isinstance(arguments, Ref):
        yield arguments.value
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from refs(argument)
    elif isinstance(arguments, Mapping):
        for argument in arguments.values():
            yield from refs(argument)


def function_of(target: str) -> Callable[..., Any]:
    """What a call calls: one of torch's ops by its full name, and nothing else."""
    if target == GETITEM:
        return operator.getitem
    namespace, name, overload = target.split(".")
    function: Any = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if not isinstance(function, torch._ops.OpOverload):
        raise ModelError(f"{target} is no op of torch")
    return function


def is_foreign(target: Any) -> bool:
    """Whether an op is not torch's own: another library has registered it in this process, and what
    it does is not known."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _OWN


_OWN = ("aten", "prims")


_DROPOUT = "aten.native_dropout.default"


def without_dropout(step: Step) -> Step | None:
    """The step with dropout that drops nothing, so that what it returns depends on no random
    numbers: these differ from device to device. None where it draws others."""
    calls = []
    for call in step.calls:
        if call.target == _DROPOUT:
            call = dataclasses.replace(call, args=(call.args[0], 0.0, *call.args[2:]))
        elif _is_random(call.target):
            return None
        calls.append(call)
    return step if tuple(calls) == step.calls else dataclasses.replace(step, calls=tuple(calls))


def _is_random(target: str) -> bool:
    # Attention that drops something is not one op where it is captured.
    tags = getattr(function_of(target), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and "attention" not in target


# --- arguments as JSON ---------------------------------------------------------------------------


def _to_json(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"value": value.value}
    if isinstance(value, tuple | list):
        return [_to_json(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: _to_json(v) for k, v in value.items()}}
    for kind, cls in _NAMED.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ModelError(f"an op takes a {type(value).__name__}, which cannot be sent to a process")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(v) for v in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "value":
        return Ref(content)
    if kind == "dict":
        return {k: _from_json(v) for k, v in content.items()}
    if kind == "device":
        return torch.device(content)
    named = getattr(torch, content)
    assert isinstance(named, _NAMED[kind]), f"{content} is no {kind}"
    return named


_NAMED: Mapping[str, type] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}

# --- from the traced graph -----------------------------------------------------------------------


def make_step(
    graph: torch.fx.Graph,
    op_of_node: Mapping[Node, int],
    source_of: Mapping[Node, Source],
    update_of: Mapping[str, tuple[Node, int]],
    optimizer: tuple[str, Mapping[str, Any]] | None,
) -> Step:
    """A traced graph as a step.

    Args:
        graph: from `aot_export_joint_with_descriptors`.
        op_of_node: node -> number of its op in the graph that is placed.
        source_of: placeholder or attribute -> what it stands for, whose value is numbered here.
        update_of: parameter -> the node of its gradient, and the number of its update's op.
        optimizer: its class and settings, where there is one.
    """
    number: dict[Node, int] = {}
    count = 0
    sources, calls = [], []
    alive = _alive(graph)
    for node in graph.nodes:
        if node in source_of:
            sources.append(dataclasses.replace(source_of[node], value=count))
        elif node.op == "call_function" and node in alive and node in op_of_node:
            if is_foreign(node.target):
                name = node.target._schema.name
                raise ModelError(
                    f"it calls {name}, which is no op of torch itself, and which the process that "
                    "measures does not know"
                )
            if node.target is torch.ops.aten.detach.default:  # the same tensor: no call at all
                number[node] = number[node.all_input_nodes[0]]
                continue
            calls.append(_call(node, count, number, op_of_node[node]))
        else:
            continue
        number[node] = count
        count += 1
    of_parameter = {source.name: source.value for source in sources if source.kind == "parameter"}
    results, writes = _outputs(graph, number, {s.name: s.value for s in sources})
    return Step(
        num_values=count,
        sources=tuple(sources),
        calls=tuple(calls),
        results=tuple(results),
        updates=tuple(
            Update(of_parameter[name], number[gradient], op)
            for name, (gradient, op) in update_of.items()
        ),
        writes=tuple(writes),
        optimizer=optimizer[0] if optimizer is not None else "",
        settings=optimizer[1] if optimizer is not None else {},
    )


def _alive(graph: torch.fx.Graph) -> set[Node]:
    """The nodes that an output needs, and those that write."""
    alive: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in alive or _writes(node):
            alive.add(node)
            alive.update(node.all_input_nodes)
    return alive


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _call(node: Node, value: int, number: Mapping[Node, int], op: int) -> Call:
    def plain(argument: Any) -> Any:
        if isinstance(argument, Node):
            if argument not in number:
                raise ModelError(f"op {node.name} takes {argument.name}, which is no tensor")
            return Ref(number[argument])
        if isinstance(argument, list | tuple):
            return tuple(plain(a) for a in argument)
        if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise ModelError(f"op {node.name} takes a size that depends on the data")
        return argument

    target = GETITEM if node.target is operator.getitem else _name_of(node)
    return Call(
        value=value,
        target=target,
        args=plain(node.args),
        kwargs={key: plain(argument) for key, argument in node.kwargs.items()},
        op=op,
    )


def _name_of(node: Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise ModelError(f"op {node.name} is {node.target}, which is no plain op of torch")
    return str(node.target)


def _outputs(
    graph: torch.fx.Graph, number: Mapping[Node, int], sources: Mapping[str, int]
) -> tuple[list[int], list[Write]]:
    """What the step returns, and what it writes back."""
    output = graph.output_node()
    values = pytree.tree_leaves(output.args[0])
    described: Sequence[Any] = output.meta.get("desc") or ()
    results, writes = [], []
    for value, description in zip(values, described, strict=False):
        if not isinstance(value, Node) or value not in number:
            continue
        changed = getattr(description, "mutated_input", None)
        if changed is not None:
            name = str(getattr(changed, "target", "")).removeprefix(f"{MODEL}.")
            if name not in sources:
                raise ModelError("the step writes to one of its inputs")
            writes.append(Write(sources[name], number[value]))
        elif not hasattr(description, "grad_of"):
            results.append(number[value])
    return results, writes
