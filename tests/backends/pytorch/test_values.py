"""What an optimizer keeps: as it is before a first step, and so again after a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from placewright.backends.pytorch.optimizers import class_and_settings
from placewright.backends.pytorch.steps import Source, Step, Update
from placewright.backends.pytorch.values import Values

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Any] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1.0),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nadam": torch.optim.NAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def source(value: int, kind: str, name: str) -> Source:
    return Source(value=value, kind=kind, name=name, shape=(3, 2), dtype="float32", op=value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_optimizer_after_each_reset(name: str) -> None:
    kind, settings = class_and_settings(OPTIMIZERS[name])
    step = Step(
        num_values=2, sources=(source(0, "parameter", "w"), source(1, "input", "0")), calls=(),
        results=(), updates=(Update(parameter=0, gradient=1, op=2),), optimizer=kind,
        settings=settings,
    )  # fmt: skip
    torch.manual_seed(0)
    weight = torch.randn(3, 2)
    gradients = [torch.randn(3, 2) for _ in range(4)]
    parameter = nn.Parameter(weight.clone())
    optimizer = OPTIMIZERS[name]([parameter])
    wanted = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        wanted.append(parameter.detach().clone())
    values = Values(step, {"w": weight})
    with torch.no_grad():
        update = values.updater(CPU, step.updates)
        for _ in range(2):
            for gradient, after in zip(gradients, wanted, strict=True):
                update({1: gradient})
                torch.testing.assert_close(values.on(CPU, 0), after)
            values.reset()
