"""What a module is called with, and how often: the workload that a plan is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.exporting import Inputs
from placewright.errors import PlacementError


@dataclass(frozen=True, kw_only=True)
class Call:
    """One kind of call of a module."""

    inputs: Inputs
    """Examples; only their shapes count, unless times are measured."""
    weight: float = 1.0
    """How often it is called, in proportion."""
    continues: str | None = None
    """Another call, whose cache (`past_key_values` of what it returns) this one goes on with."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A weighted list of calls; weights have one home for all of them."""

    calls: Mapping[str, Call]
    static_cache: bool = False
    """Whether caches have their full size from the start, so that units that use them can be
    captured as graphs: `cache_implementation="static"` of transformers."""
    train: bool = False
    """Whether each call is followed by a backward pass and an update."""
    optimizer: Any = None
    """What makes the update: a `torch.optim` class, an instance, a function of parameters; or None
    where it keeps nothing."""

    def __post_init__(self) -> None:
        if not self.calls:
            raise PlacementError("a workload needs at least one call")
        for name, call in self.calls.items():
            if not call.weight > 0:
                raise PlacementError(f"the weight of {name!r} must be positive, not {call.weight}")
            if call.continues is not None and self.train:
                raise PlacementError(f"{name!r} continues a cache, which training steps cannot")
            if call.continues is not None and call.continues not in self.calls:
                raise PlacementError(
                    f"{name!r} continues {call.continues!r}, and the workload has "
                    f"{', '.join(self.calls)}"
                )

    @staticmethod
    def of(value: object) -> Workload:
        """A workload; or a mapping of names to inputs, or to (inputs, weight); or inputs of one
        call."""
        if isinstance(value, Workload):
            return value
        if isinstance(value, Mapping) and value and all(_is_call(v) for v in value.values()):
            return Workload(calls={str(name): _call(part) for name, part in value.items()})
        return Workload(calls={"call": Call(inputs=Inputs.of(value))})


def _is_call(value: object) -> bool:
    if isinstance(value, Call):
        return True
    return isinstance(value, tuple) and len(value) == 2 and _is_number(value[1])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _call(value: Any) -> Call:
    if isinstance(value, Call):
        return value
    inputs, weight = value
    return Call(inputs=Inputs.of(inputs), weight=float(weight))


def generation(
    *, prompt: int = 512, new: int = 256, batch: int = 1, static_cache: bool = False
) -> Workload:
    """What `generate` of transformers calls: `prefill` once with the prompt, then `decode` with one
    token for each that is new.

    Args:
        prompt: tokens of each prompt.
        new: tokens to generate.
        batch: prompts at a time.
        static_cache: whether `cache_implementation="static"` will be given to `generate`, which is
            faster wherever units on the GPU are bound by asking for their kernels.
    """
    for name, value in (("prompt", prompt), ("new", new), ("batch", batch)):
        if value < 1:
            raise PlacementError(f"`{name}` must be at least 1, not {value}")

    def ids(tokens: int) -> Inputs:
        return Inputs((), {"input_ids": torch.zeros(batch, tokens, dtype=torch.long)})

    prefill = Call(inputs=ids(prompt))
    decode = Call(inputs=ids(1), weight=float(new), continues="prefill")
    return Workload(calls={"prefill": prefill, "decode": decode}, static_cache=static_cache)


def training(inputs: object, optimizer: Any = None) -> Workload:
    """Training steps: a call, its backward pass and the update. Gradients and what the optimizer
    keeps are planned for where their weights live.

    Args:
        inputs: what the module is called with: a tensor, a tuple, a mapping, or `Inputs`.
        optimizer: a `torch.optim` class, an instance, or a function of parameters.
    """
    call = Call(inputs=Inputs.of(inputs))
    return Workload(calls={"step": call}, train=True, optimizer=optimizer)


def real_inputs(call: Call, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The examples with values: those that are on `meta` get zeros."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_meta:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        return leaf.to(device)

    args, kwargs = call.inputs
    return (
        tuple(pytree.tree_map(real, arg) for arg in args),
        {key: pytree.tree_map(real, value) for key, value in kwargs.items()},
    )
