"""What an optimizer keeps for each parameter, found out by a step on a parameter of six numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from placewright.errors import ModelError

_SHAPE = (2, 3)


def state_of(optimizer: Any, dtype: torch.dtype) -> Mapping[str, int]:
    """Name of each tensor of state as large as its parameter -> bytes of one element.

    `optimizer` is a class, an instance, or a function of parameters.
    """
    parameter = torch.nn.Parameter(torch.zeros(_SHAPE, dtype=dtype))
    made = _maker(optimizer)([parameter])
    parameter.grad = torch.ones(_SHAPE, dtype=dtype)
    try:
        made.step()
    except TypeError:  # LBFGS, which wants to compute the loss itself
        raise ModelError(
            f"{type(made).__name__} calls the loss several times in a step, which cannot be "
            "captured; leave optimizer out, and its state is not counted"
        ) from None
    return {
        name: value.element_size()
        for name, value in made.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }


def name_of(optimizer: Any) -> str:
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__
    return type(_maker(optimizer)([torch.nn.Parameter(torch.zeros(_SHAPE))])).__name__


def _maker(optimizer: Any) -> Callable[[Any], torch.optim.Optimizer]:
    if isinstance(optimizer, torch.optim.Optimizer):
        settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        known = optimizer.defaults
        return functools.partial(
            type(optimizer), **{k: v for k, v in settings.items() if k in known}
        )
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        if optimizer is torch.optim.SGD:
            return functools.partial(optimizer, lr=1e-3)
        return optimizer
    if callable(optimizer):
        made: Callable[[Any], torch.optim.Optimizer] = optimizer
        return made
    raise ModelError(
        f"optimizer is a {type(optimizer).__name__}; give a class of torch.optim, one of its "
        "instances, or a function of parameters"
    )


def class_and_settings(optimizer: Any) -> tuple[str, dict[str, Any]]:
    """The class of `torch.optim` and its keywords, from which another process can make it anew."""
    made = _maker(optimizer)([torch.nn.Parameter(torch.zeros(_SHAPE))])
    kind = type(made)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise ModelError(f"{kind.__name__} is not one of torch's own optimizers")
    known = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in made.defaults.items() if name in known}
    for name, value in settings.items():
        if isinstance(value, torch.Tensor):
            settings[name] = float(value)
    return kind.__name__, settings
