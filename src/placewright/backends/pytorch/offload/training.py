"""Training steps of a module that does not fit.

Parameters that travel keep their gradients at home, and so an optimizer keeps its state there and
updates there: on the host for what lives on the host. Backwards, the weights of a unit travel once
more and its forward pass is done again, so that nothing of it is kept on the device meanwhile.

Not supported, and said so where it happens: caches that hold something, buffers that a unit whose
weights travel writes to, gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from placewright.backends.pytorch.offload.activations import cache_layers
from placewright.backends.pytorch.offload.values import map_tensors, tensors_in
from placewright.errors import PlacementError

if TYPE_CHECKING:
    from placewright.backends.pytorch.offload.runtime import Offloaded, _Unit

_CPU = torch.device("cpu")


def call(
    runtime: Offloaded,
    unit: _Unit,
    by_host: bool,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """A unit is called, and gradients will be wanted."""
    device = runtime.link.device
    if by_host:
        args, kwargs = map_tensors((args, dict(kwargs)), lambda t: t.to(_CPU))
        return map_tensors(forward(*args, **kwargs), lambda t: t.to(device))
    args, kwargs = map_tensors((args, dict(kwargs)), lambda t: t.to(device))
    if runtime.device_holds(unit):
        return forward(*args, **kwargs)
    _refuse_caches(unit, (args, kwargs))
    kwargs = {key: None if hasattr(v, "layers") else v for key, v in kwargs.items()}
    parameters = {
        name: tensor
        for name, tensor in unit.home.tensors.items()
        if isinstance(tensor, torch.nn.Parameter)
    }
    runtime.will_come_back(unit)
    job = _Job(runtime, unit, forward, args, kwargs, tuple(parameters))
    made: Any = _Travelling.apply(  # type: ignore[no-untyped-call]
        job, *job.inputs, *parameters.values()
    )
    leaves = iter(made)
    return map_tensors(job.outputs, lambda _: next(leaves))


class _Job:
    """One call of a unit: what it was called with, and the random numbers it began with."""

    def __init__(
        self,
        runtime: Offloaded,
        unit: _Unit,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        names: tuple[str, ...],
    ) -> None:
        self.runtime, self.unit, self.forward = runtime, unit, forward
        self.inputs = list(tensors_in((args, kwargs)))
        self.names = names
        self.outputs: Any = None
        device = runtime.link.device
        self._structure = map_tensors((args, kwargs), lambda t: t.new_empty(0).detach())
        self._devices = [device] if device.type == "cuda" else []
        self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self._devices]
        kinds = dict.fromkeys(("cpu", device.type))
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        }

    def run(self, inputs: list[torch.Tensor]) -> Any:
        leaves = iter(inputs)
        args, kwargs = map_tensors(self._structure, lambda _: next(leaves))
        return self.forward(*args, **kwargs)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """The same random numbers and the same automatic casts as in the forward pass."""
        numbers = [device.index for device in self._devices]
        with torch.random.fork_rng(devices=numbers):
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            contexts: list[Any] = [
                torch.autocast(kind, dtype=dtype, enabled=on)
                for kind, (on, dtype) in self._autocast.items()
            ]
            for context in contexts:
                context.__enter__()
            try:
                yield
            finally:
                for context in reversed(contexts):
                    context.__exit__(None, None, None)


class _Travelling(torch.autograd.Function):
    """A unit whose weights are on the device only while it runs, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = list(tensors[: len(job.inputs)])
        ctx.job = job
        ctx.save_for_backward(*inputs)
        with job.runtime.on_device(job.unit):
            job.outputs = job.run(inputs)
        known = {id(value) for value in inputs}
        leaves = [t.view_as(t) if id(t) in known else t for t in tensors_in(job.outputs)]
        ctx.mark_non_differentiable(*(t for t in leaves if not t.is_floating_point()))
        job.inputs = []  # kept by autograd, which frees them when it can
        return tuple(leaves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        job: _Job = ctx.job
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        inputs = [
            t.detach().requires_grad_(wanted)
            for t, wanted in zip(saved, needed[: len(saved)], strict=True)
        ]
        home = job.unit.home
        with job.runtime.on_device(job.unit) as _:
            leaves = {
                name: torch.nn.Parameter(home.tensors[name].data, requires_grad=wanted)
                for name, wanted in zip(job.names, needed[len(saved) :], strict=True)
            }
            with _in_place_of(job.unit, leaves), torch.enable_grad(), job.as_before():
                outputs = list(tensors_in(job.run(inputs)))
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            of = [t for t in (*inputs, *leaves.values()) if t.requires_grad]
            found = (
                torch.autograd.grad(
                    [o for o, _ in pairs], of, [g for _, g in pairs], allow_unused=True
                )
                if pairs and of
                else [None] * len(of)
            )
            by_tensor = {id(t): gradient for t, gradient in zip(of, found, strict=True)}
            # To their homes, where they are added to what is there and the update will be.
            going = {
                id(t): gradient
                for t in leaves.values()
                if (gradient := by_tensor.get(id(t))) is not None
            }
            arrived = job.runtime.link.to_host(list(going.values()))
            by_tensor.update(zip(going, arrived, strict=True))
        return None, *(by_tensor.get(id(t)) for t in (*inputs, *leaves.values()))


@contextmanager
def _in_place_of(unit: _Unit, leaves: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
    """The modules of a unit have other parameters within, whose gradients are their own."""
    assert unit.module is not None, unit.path
    instead = {id(unit.home.tensors[name]): leaf for name, leaf in leaves.items()}
    changed: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    for module in unit.module.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in instead:
                changed.append((module, key, parameter))
    try:
        for module, key, parameter in changed:
            # Recurrent modules keep a list of their parameters, which only this renews.
            setattr(module, key, instead[id(parameter)])
        yield
    finally:
        for module, key, parameter in changed:
            setattr(module, key, parameter)


def _refuse_caches(unit: _Unit, given: Any) -> None:
    for layer in cache_layers(given, unit.layers):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, torch.Tensor) and keys.numel():
            raise PlacementError(
                f"{unit.path} is trained with a cache that holds something, which cannot be done "
                "again backwards; call the module with use_cache=False"
            )
