"""What users call: a module, accelerated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from placewright.acceleration.config import ONE, AccelerateConfig, configured, device_of, name_of
from placewright.acceleration.task import SearchTask
from placewright.backends.pytorch.exporting import Inputs, check_module
from placewright.backends.pytorch.streams import plan as plans
from placewright.backends.pytorch.streams.accelerated import Accelerated, Entry
from placewright.backends.pytorch.streams.device import Device, Turns
from placewright.backends.pytorch.streams.groups import Fusion
from placewright.backends.pytorch.streams.plan import StreamPlan
from placewright.backends.pytorch.streams.schedule import one_stream
from placewright.errors import ClusterError, SearchError
from placewright.report.streams import write_streams_report


def accelerate(
    model: torch.nn.Module,
    inputs: object = (),
    *,
    config: AccelerateConfig | None = None,
    candidates: Mapping[str, Callable[..., Any]] | None = None,
    plan: str | Path | Sequence[StreamPlan] | None = None,
    without_cuda: str = "error",
    **settings: Any,
) -> Any:
    """A callable with the same outputs as the module, as fast as one GPU runs it.

    Args:
        model: a module whose parameters are on one GPU. It is not changed.
        inputs: what it is called with, as for `placewright.torch.plan`; other shapes are searched
            for when they first occur.
        config: how to search; or give its fields as further keywords.
        candidates: other callables with the same outputs, such as `torch.compile(model)`, by name;
            the fastest of all is taken.
        plan: what `save` wrote, or plans: applied without a search.
        without_cuda: `error`, or `model` to get the module back where it is not on a GPU.
    """
    check_module(accelerate, model)
    config = configured(accelerate, config, settings)
    if without_cuda not in ("error", "model"):
        raise SearchError(f"without_cuda is {without_cuda!r}; there are 'error' and 'model'")
    example = Inputs.of(inputs)
    device = device_of(model, example, config)
    if device is None:
        if without_cuda == "model":
            return model
        raise ClusterError(
            f"{type(model).__name__} is not on a CUDA device, and only there are streams; move it "
            "there, or pass without_cuda='model' to run it as it is"
        )
    fast = accelerated(
        model, device, config, candidates=dict(candidates or {}), known=plans.given(plan)
    )
    fast.prepare(example.args, example.kwargs)
    return fast


def accelerated(
    model: Callable[..., Any],
    device: Device,
    config: AccelerateConfig,
    *,
    candidates: Mapping[str, Callable[..., Any]] | None = None,
    known: Sequence[StreamPlan] = (),
    strict: bool = True,
    turns: Turns | None = None,
    name: str = "",
) -> Accelerated:
    """The callable, before it has seen inputs. `strict`: a known plan for these inputs that does
    not fit is an error, and no reason to search. `turns` are those of others on this device.
    `name` is what it is called where the name of its class says nothing."""

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        task = SearchTask(
            model=model, device=device, config=config, candidates=dict(candidates or {}),
            args=tuple(args), kwargs=dict(kwargs),
        )  # fmt: skip
        return task.run(known, strict=strict)

    return Accelerated(
        model, make, name=name, device=name_of(device), most_shapes=config.most_shapes,
        turns=turns, reporter=write_streams_report,
    )  # fmt: skip


def plain_schedules(
    model: torch.nn.Module,
    inputs: object,
    config: AccelerateConfig,
    device: Device | None = None,
) -> tuple[dict[str, Callable[[Sequence[Any]], Any]], dict[str, float]]:
    """The module's own ops, nothing fused: captured on one stream, and on several by list
    scheduling. What takes the flat inputs, and the seconds of a replay of each."""
    example = Inputs.of(inputs)
    device = device or device_of(model, example, config)
    if device is None:
        raise ClusterError(f"{type(model).__name__} is not on a CUDA device")
    task = SearchTask(
        model=model, device=device, config=replace(config, fusion=Fusion.NONE), candidates={},
        args=tuple(example.args), kwargs=dict(example.kwargs),
    )  # fmt: skip
    option = task.option(Fusion.NONE)
    built: dict[str, Callable[[Sequence[Any]], Any]] = {
        ONE: task.build(option, one_stream(option.work)),
        "list": task.build(option, option.schedule),
    }
    return built, dict(option.found)
