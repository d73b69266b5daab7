"""Training steps: forward and backward pass as one captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from placewright.acceleration.config import AccelerateConfig, configured, device_of, name_of
from placewright.acceleration.task import SearchTask
from placewright.backends.pytorch.exporting import Inputs, Loss, Task, check_module, loss_of
from placewright.backends.pytorch.streams import plan as plans
from placewright.backends.pytorch.streams.accelerated import Accelerated, Entry
from placewright.backends.pytorch.streams.device import Device
from placewright.backends.pytorch.streams.net import UnsuitableError
from placewright.backends.pytorch.streams.plan import StreamPlan
from placewright.backends.pytorch.streams.training import trace_step
from placewright.errors import ClusterError
from placewright.report.streams import write_streams_report


class TrainStep:
    """Forward and backward pass as one captured graph: gives the loss, and leaves the gradients in
    `grad` of the parameters, where the optimizer finds them. Call it like the module, with
    `targets=` where the loss takes some. Gradients are not added to those of the call before."""

    def __init__(
        self, model: torch.nn.Module, task: Task, parts: _Parts, fast: Accelerated
    ) -> None:
        self.model = model
        self.fast = fast
        self._task, self._parts = task, parts

    @property
    def verdict(self) -> str:
        """What was gained, in a sentence."""
        return self.fast.verdict

    def save(self, path: str | Path) -> None:
        """Writes the plans, for `placewright.torch.accelerate_step(..., plan=path)`."""
        self.fast.save(path)

    def __call__(self, *args: Any, targets: Any = None, **kwargs: Any) -> torch.Tensor:
        given = self._task.targets if targets is None else targets
        given = given if isinstance(given, tuple) else (given,)
        with torch.no_grad():
            loss, *rest = self.fast(args, kwargs, given)
            count = len(self._parts.parameters)
            for parameter, gradient in zip(self._parts.parameters, rest[:count], strict=True):
                parameter.grad = gradient
            if len(rest) > count:  # the module as it is has written them itself
                torch._foreach_copy_(list(self._parts.written), rest[count:])
            made: torch.Tensor = loss.clone()
        return made


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Of a step."""

    parameters: tuple[torch.nn.Parameter, ...]
    written: tuple[torch.Tensor, ...]


class _EagerStep:
    """A step as autograd does it: the flat loss and gradients."""

    training = True

    def __init__(self, model: torch.nn.Module, task: Task, parts: _Parts) -> None:
        self.model, self.task, self.parts = model, task, parts

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
    ) -> list[torch.Tensor | None]:
        with torch.enable_grad():
            outputs = self.model(*args, **kwargs)
            if self.task.loss_fn is not None:
                loss = self.task.loss_fn(outputs, *targets)
            else:
                loss = loss_of(outputs)
            # A parameter that the loss does not depend on has none, as after `backward`.
            gradients = torch.autograd.grad(loss, self.parts.parameters, allow_unused=True)
        return [loss.detach(), *_own(gradients)]


def _own(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of which each can be written to, as after `backward`: autograd gives the same
    tensor for two parameters that are added up."""
    seen: set[int] = set()
    own: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            spread = any(
                s == 0 < n - 1 for n, s in zip(gradient.shape, gradient.stride(), strict=True)
            )
            if spread or gradient.data_ptr() in seen:
                gradient = gradient.clone()
            seen.add(gradient.data_ptr())
        own.append(gradient)
    return own


def accelerate_step(
    model: torch.nn.Module,
    inputs: object = (),
    *,
    loss_fn: Loss | None = None,
    targets: Any = (),
    config: AccelerateConfig | None = None,
    plan: str | Path | Sequence[StreamPlan] | None = None,
    **settings: Any,
) -> TrainStep:
    """Forward and backward pass on the streams of one GPU, captured: gradients of weights beside
    the backward chain. Where that gains nothing, the step runs as autograd does it.

    Args:
        model: a module whose parameters are on one GPU.
        inputs: what it is called with, as for `accelerate`.
        loss_fn: makes the loss from the outputs and the targets; without, the outputs have it.
        targets: further arguments of `loss_fn`, as examples: a tuple of them, or the only one.
        config: how to search; or give its fields as further keywords.
        plan: what `save` wrote, or plans: applied without a search.
    """
    check_module(accelerate_step, model)
    config = configured(accelerate_step, config, settings, copy_outputs=False)
    example = Inputs.of(inputs)
    device = device_of(model, example, config)
    if device is None:
        raise ClusterError(
            f"{type(model).__name__} is not on a CUDA device, and only there are streams; "
            "move it there"
        )
    task = Task(train=True, loss_fn=loss_fn, targets=targets)
    step = train_step(model, device, config, task, example, known=plans.given(plan))
    step.fast.prepare((example.args, dict(example.kwargs), step._task.targets), {})
    return step


def train_step(
    model: torch.nn.Module,
    device: Device,
    config: AccelerateConfig,
    task: Task,
    example: Inputs,
    *,
    known: Sequence[StreamPlan] = (),
) -> TrainStep:
    """The step, before it is searched for."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    try:
        with device.settings():
            traced = trace_step(model, example.args, example.kwargs, task)
        names, written = traced.parameters, traced.written
    except UnsuitableError:  # said when it is called
        names, written = tuple(n for n, p in parameters.items() if p.requires_grad), ()
    parts = _Parts(
        parameters=tuple(parameters[name] for name in names),
        written=tuple(buffers[name] for name in written),
    )
    eager = _EagerStep(model, task, parts)

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        now = replace(task, targets=args[2])
        net = trace_step(model, args[0], args[1], now).net
        search = SearchTask(
            model=eager, device=device, config=config, candidates={}, args=tuple(args), kwargs={},
            traced=net, compared=1 + len(parts.parameters),
        )  # fmt: skip
        saved = [buffer.clone() for buffer in buffers.values()]
        try:
            return search.run(known)
        finally:  # the trials were no steps
            for buffer, before in zip(buffers.values(), saved, strict=True):
                buffer.copy_(before)

    fast = Accelerated(
        eager, make, name=type(model).__name__, device=name_of(device),
        most_shapes=config.most_shapes, reporter=write_streams_report,
    )  # fmt: skip
    return TrainStep(model, task, parts, fast)
