"""The tensors that are there before a step, on each device that any placement wants them on.

A tensor lies once on each device of the machine, and stays there: trying another placement moves no
weights. Which of two parts of one GPU it counts for is accounting.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from placewright.backends.pytorch.steps import Source, Step, Update
from placewright.backends.pytorch.works import Form

_SLAB_BYTES = 128 << 20
_BEGINS_AT: Mapping[tuple[str, str], float | str] = {
    ("Adagrad", "sum"): "initial_accumulator_value",
    ("ASGD", "eta"): "lr",
    ("ASGD", "mu"): 1.0,
    ("NAdam", "mu_product"): 1.0,
    ("Rprop", "step_size"): "lr",
}
"""(optimizer, name of its state) -> what that begins at, or the setting that says so; others at
zero."""


class Values:
    """Sources, the optimizer's state, and pinned memory for what goes through the host."""

    def __init__(self, step: Step, given: Mapping[str, torch.Tensor], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._step = step
        self._first = {s.value: _first_value(s, given, generator) for s in step.sources}
        self._there: dict[torch.device, dict[int, torch.Tensor]] = {}
        self._state: dict[torch.device, dict[int, dict[str, Any]]] = {}
        self._pinned: dict[int, torch.Tensor] = {}
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def on(self, device: torch.device, value: int) -> torch.Tensor:
        """A source, put there if it is not there yet."""
        there = self._there.setdefault(device, {})
        if value not in there:
            # A copy on the CPU too: updates must not change the first values.
            there[value] = self._first[value].to(device, copy=True)
        return there[value]

    def all_on(self, device: torch.device) -> dict[int, torch.Tensor]:
        return {value: self.on(device, value) for value in self._first}

    def reset(self) -> None:
        """All as before the first step."""
        for there in self._there.values():
            for value, tensor in there.items():
                tensor.copy_(self._first[value])
        for states in self._state.values():
            for state in states.values():
                self._begin(state)

    # --- what goes through the host --------------------------------------------------------------

    def pinned(self, value: int, form: Form) -> torch.Tensor:
        """Memory of the host for a value, of the same strides where these leave no holes. One place
        each for good: pinning memory takes longer than copying it."""
        if value not in self._pinned:
            size = form.copied_bytes
            begin = -(-self._used // 512) * 512
            if begin + size > self._slab.numel():
                self._slab = torch.empty(
                    max(size, _SLAB_BYTES), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
                )
                begin = 0
            self._used = begin + size
            flat = self._slab[begin : begin + size].view(form.dtype)
            stride = form.stride if _is_dense(form) else None
            self._pinned[value] = (
                flat.view(form.shape) if stride is None else flat.as_strided(form.shape, stride)
            )
        return self._pinned[value]

    # --- updates ---------------------------------------------------------------------------------

    def updater(
        self, device: torch.device, updates: Iterable[Update]
    ) -> Callable[[Mapping[int, torch.Tensor]], None]:
        """What updates these parameters on a device, given their gradients by value. The state is
        there before the first call, as a captured graph must not make it anew each time."""
        updates = list(updates)
        parameters = [self.on(device, update.parameter) for update in updates]
        optimizer = self._optimizer(device, parameters)
        states = self._state.setdefault(device, {})
        fresh = [u for u in updates if u.parameter not in states]
        if fresh:
            self._make_state(device, fresh)
        for update, parameter in zip(updates, parameters, strict=True):
            optimizer.state[parameter] = states[update.parameter]

        def step(gradients: Mapping[int, torch.Tensor]) -> None:
            for update, parameter in zip(updates, parameters, strict=True):
                parameter.grad = gradients[update.gradient]
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None

        return step

    def _optimizer(self, device: torch.device, parameters: list[torch.Tensor]) -> Any:
        kind = getattr(torch.optim, self._step.optimizer)
        settings = dict(self._step.settings)
        known = inspect.signature(kind.__init__).parameters
        if device.type == "cuda" and "capturable" in known:
            settings["capturable"] = True
        if "fused" in known and device.type == "cuda":
            settings["fused"] = True
            settings["foreach"] = None
        return kind(parameters, **settings)

    def _make_state(self, device: torch.device, updates: list[Update]) -> None:
        """By a step without gradients, after which the parameters are what they were."""
        parameters = [self.on(device, update.parameter) for update in updates]
        optimizer = self._optimizer(device, parameters)
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for update, parameter, value in zip(updates, parameters, before, strict=True):
            parameter.grad = None
            parameter.copy_(value)
            state = optimizer.state[parameter]
            self._begin(state)
            self._state[device][update.parameter] = state

    def _begin(self, state: Mapping[str, Any]) -> None:
        """Puts what an optimizer keeps for a parameter back to what it is before its first step."""
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                first = _BEGINS_AT.get((self._step.optimizer, name), 0.0)
                if isinstance(first, str):
                    kind = getattr(torch.optim, self._step.optimizer)
                    default = inspect.signature(kind.__init__).parameters[first].default
                    first = float(self._step.settings.get(first, default))
                tensor.fill_(first)


def _is_dense(form: Form) -> bool:
    """Whether the strides are a permutation without holes or overlaps."""
    expected = 1
    for stride, size in sorted((t, n) for t, n in zip(form.stride, form.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _first_value(
    source: Source, given: Mapping[str, torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    """What the user's module has; made up where it is on `meta`, with the spread of a fresh layer,
    so that nothing overflows."""
    dtype = getattr(torch, source.dtype)
    if source.name in given:
        return given[source.name].detach().to("cpu", dtype).reshape(source.shape)
    if source.name.startswith("tangents"):  # the gradient of the loss by itself
        return torch.ones(source.shape, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.zeros(source.shape, dtype=dtype)
    if len(source.shape) >= 2:
        spread = 1.0 / math.sqrt(max(1, math.prod(source.shape[1:])))
        made = torch.randn(source.shape, generator=generator, dtype=torch.float32)
        return (made * spread).to(dtype)
    last = source.name.rpartition(".")[2]
    ones = any(word in last for word in ("weight", "scale", "gamma", "var"))
    return torch.full(source.shape, 1.0 if ones else 0.0, dtype=dtype)
