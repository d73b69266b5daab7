"""A PyTorch module and example inputs as one flat graph of ATen ops (`torch.export`).

Everything here runs on fake tensors: nothing is computed and nothing allocated, so that a model of
70 billion parameters on `meta` is read like any other. Fake tensors say they are on the CPU; on
`meta` itself autograd would leave out the backward pass.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.buffers import written_in_place
from placewright.backends.pytorch.outputs import opened
from placewright.errors import ModelError

MODEL = "_model"
"""Attribute of the wrapper that holds the user's module; its paths begin with it."""

Loss = Callable[..., torch.Tensor]


class Inputs(NamedTuple):
    """Example inputs: what the module's `forward` is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    @staticmethod
    def of(inputs: object) -> Inputs:
        """A mapping is keywords, a tuple or list positions, all else the only argument."""
        if isinstance(inputs, Inputs):
            return inputs
        if isinstance(inputs, Mapping):
            return Inputs((), dict(inputs))
        if isinstance(inputs, tuple | list):
            return Inputs(tuple(inputs), {})
        return Inputs((inputs,), {})


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is run: one forward pass, or a whole training step."""

    train: bool = False
    """Whether a step is forward, backward and the optimizer's update."""
    loss_fn: Loss | None = None
    """Makes the loss from the module's outputs (and `targets`); where it is not given, the loss is
    in the outputs: their `loss`, or the only number they are."""
    targets: Any = ()
    """Further arguments of `loss_fn`, as examples: a tuple of them, or the only one."""
    optimizer: Any = None
    """A `torch.optim` class, an instance, a function of parameters, or None for no update."""

    def __post_init__(self) -> None:
        if not isinstance(self.targets, tuple):
            object.__setattr__(self, "targets", (self.targets,))


def check_module(function: Callable[..., Any], model: object) -> None:
    """Raises where what a function of users was given first is no module."""
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"{function.__name__}() takes a torch.nn.Module, not a {type(model).__name__}"
        )


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The forward pass as a graph, on fake tensors."""

    module: torch.fx.GraphModule
    """Attributes and module paths begin with `MODEL`. Its outputs are the model's, or those and the
    loss where the task is to train."""
    leaves: tuple[Any, ...]
    """The flat inputs, fake: one for each placeholder."""
    task: Task
    model: torch.nn.Module
    """The user's module, of fake tensors."""
    tied: Mapping[str, str]
    """Further names of a parameter or buffer -> its first name."""


class _Step(torch.nn.Module):
    """Calls the model and, where there is one, the loss."""

    def __init__(self, model: torch.nn.Module, task: Task) -> None:
        super().__init__()
        self.train(model.training)
        setattr(self, MODEL, model)
        self._task = task

    def forward(self, args: Any, kwargs: Any, targets: Any) -> Any:
        model = getattr(self, MODEL)
        with written_in_place(model):
            outputs = model(*args, **kwargs)
        if not self._task.train:
            return opened(outputs)
        if self._task.loss_fn is not None:
            return opened(outputs), self._task.loss_fn(outputs, *targets)
        return opened(outputs), loss_of(outputs)


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss that a module returns: `outputs.loss`, `outputs["loss"]`, or a single number."""
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None:
        tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        loss = next((t for t in tensors if t.numel() == 1 and t.is_floating_point()), None)
    if loss is None:
        raise ModelError(
            "the module returns no loss; give labels among its inputs, or loss_fn=, which makes "
            "the loss from its outputs"
        )
    return loss


def export(model: torch.nn.Module, inputs: Inputs, task: Task) -> Exported:
    """Raises what torch raises; `capture` says what to make of it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model = fake_copy(model, mode)
    example = pytree.tree_map(lambda leaf: _fake(leaf, mode), (*inputs, task.targets))
    step = _Step(fake_model, task)
    with quiet():
        program = torch.export.export(step, example, strict=False)
        module = program.module(check_guards=False)
    return Exported(
        module=module,
        leaves=tuple(pytree.tree_leaves(example)),
        task=task,
        model=fake_model,
        tied=tied_names(model),
    )


def fake_copy(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """The module with fake tensors for its own; those that are tied stay tied."""
    tensors = [*model.parameters(), *model.buffers()]
    memo = {id(tensor): _fake(tensor, mode) for tensor in tensors}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, NotImplementedError) as fault:
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({first_line(fault)}); does it hold "
            "something besides tensors and plain data?"
        ) from None


def _fake(leaf: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=leaf.requires_grad)
    return made.requires_grad_(leaf.requires_grad)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    return tied


def training_graph(
    exported: Exported,
) -> tuple[torch.fx.GraphModule, Sequence[torch.Tensor]]:
    """The graph whose only output is the loss, and its flat inputs."""
    graph = copied_graph(exported)
    output = graph.output_node()
    flat = pytree.tree_leaves(output.args[0])
    output.args = ((flat[-1],),)
    return _flat_module(exported, graph)


def inference_graph(
    exported: Exported,
) -> tuple[torch.fx.GraphModule, Sequence[torch.Tensor]]:
    return _flat_module(exported, copied_graph(exported))


def copied_graph(exported: Exported) -> torch.fx.Graph:
    with quiet():  # copying the trees of inputs and outputs warns of torch's own plans
        return copy.deepcopy(exported.module.graph)


def _flat_module(
    exported: Exported, graph: torch.fx.Graph
) -> tuple[torch.fx.GraphModule, Sequence[torch.Tensor]]:
    """Takes and gives flat lists of tensors, which is what the tracer of gradients wants."""
    values = []
    places = [node for node in graph.nodes if node.op == "placeholder"]
    for node, value in zip(places, exported.leaves, strict=True):
        if isinstance(value, torch.Tensor):
            values.append(value)
        else:  # a number or None, which the export has taken as a constant
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    output = graph.output_node()
    output.args = (
        tuple(n for n in pytree.tree_leaves(output.args[0]) if isinstance(n, torch.fx.Node)),
    )
    graph.set_codegen(torch.fx.graph.CodeGen())
    return torch.fx.GraphModule(exported.module, graph), values


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch writes whole graphs to its log and to stderr when a model cannot be exported; a line is
    enough."""
    names = ("torch", "torch.export", "torch._dynamo", "torch._export", "torch.fx",
             "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")  # fmt: skip
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def storages(value: Any) -> list[int]:
    """Identities of the memory of all tensors in a value."""
    leaves = pytree.tree_leaves(value)
    return [v.untyped_storage()._cdata for v in leaves if isinstance(v, torch.Tensor)]


def first_line(fault: BaseException) -> str:
    """What an error of torch says, without the graph and the advice that follow."""
    lines = [line.strip() for line in str(fault).splitlines()]
    text = next((line for line in lines if line), "") or type(fault).__name__
    text = re.split(r"(?<=\w)\. | \(unhinted", text)[0].rstrip(" .")
    return text if len(text) <= 200 else text[:197] + "..."


def forward_signature(model: torch.nn.Module) -> str:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    return f"({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"
