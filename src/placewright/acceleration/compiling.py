"""What `torch.compile(model, backend="placewright")` calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from placewright.acceleration.config import AccelerateConfig
from placewright.acceleration.modules import accelerated
from placewright.backends.pytorch.streams.accelerated import Accelerated
from placewright.backends.pytorch.streams.device import Device, Gpu, Turns
from placewright.errors import check_settings

logger = logging.getLogger(__name__)


class _Closed(torch.nn.Module):
    """A graph that takes its parameters as arguments, with the parameters put in."""

    def __init__(self, graph: torch.fx.GraphModule, args: Sequence[Any]) -> None:
        super().__init__()
        self._graph = graph
        self._count = len(args)
        self._fixed: dict[int, str] = {}
        for number, arg in enumerate(args):
            if not _is_fixed(arg):
                continue
            name = self._fixed[number] = f"fixed_{number}"
            if isinstance(arg, torch.nn.Parameter):
                self.register_parameter(name, arg)
            else:
                self.register_buffer(name, arg)
        self.free = tuple(n for n in range(self._count) if n not in self._fixed)

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the parameters among some arguments are those that were put in."""
        return all(getattr(self, name) is args[number] for number, name in self._fixed.items())

    def forward(self, *free: Any) -> Any:
        args: list[Any] = [None] * self._count
        for number, name in self._fixed.items():
            args[number] = getattr(self, name)
        for number, arg in zip(self.free, free, strict=True):
            args[number] = arg
        return self._graph(*args)


def _is_fixed(arg: Any) -> bool:
    """Whether it is the same tensor in each call: torch.compile marks what a module holds."""
    marked = getattr(arg, "_dynamo_static_input_type", None) is not None
    return isinstance(arg, torch.nn.Parameter) or (isinstance(arg, torch.Tensor) and marked)


def compile_backend(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Callable[..., Any]:
    """What `torch.compile(model, backend="placewright")` calls. Settings are the fields of
    `AccelerateConfig`, given as `options`."""
    settings = dict(settings.pop("options", None) or {}) | settings
    settings.pop("mode", None)
    check_settings(
        "backend placewright", settings, [entry.name for entry in fields(AccelerateConfig)]
    )
    config = AccelerateConfig(**settings)
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    reason = ""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        reason = "gradients are wanted; call it under torch.no_grad()"
    elif not any(t.device.type == "cuda" for t in tensors):
        reason = "it is not on a CUDA device"
    if reason:
        logger.warning("backend placewright leaves the module as it is: %s", reason)
        return graph.forward
    index = next(t.device.index for t in tensors if t.device.type == "cuda")
    return on_first_call(graph, Gpu(index=index, limit_bytes=config.memory_bytes), config)


def on_first_call(
    graph: torch.fx.GraphModule, device: Device, config: AccelerateConfig
) -> Callable[..., Any]:
    """Searches when the graph is first called: only then are there real tensors, and no tracing
    that would take the search for part of the model."""
    made: list[tuple[_Closed, Accelerated]] = []
    turns = Turns()

    def find(args: Sequence[Any]) -> tuple[_Closed, Accelerated] | None:
        found = next((one for one in made if one[0].holds(args)), None)
        if found is not None or len(made) >= config.most_shapes:
            return found
        # torch.compile calls one graph for all modules of the same code, with the parameters of
        # each: what was found for the first is applied to the others.
        known = made[0][1].plans if made else ()
        closed = _Closed(graph, args)
        fast = accelerated(
            closed, device, config, known=known, strict=False, turns=turns,
            name="a graph of torch.compile",
        )  # fmt: skip
        made.append((closed, fast))
        return made[-1]

    def call(*args: Any) -> Any:
        with turns.lock:
            found = find(args)
        if found is None:
            return graph(*args)
        closed, fast = found
        return fast(*[args[number] for number in closed.free])

    return call
