"""Your PyTorch module, placed.

    import placewright.torch

    plan = placewright.torch.plan(model, inputs, devices=["cuda:0", "cuda:1"])  # moves nothing
    placed = plan.apply(model)

`place` does both. The devices are this machine's, or those of a cluster file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

import placewright
from placewright import chips
from placewright.backends.pytorch import torch_name
from placewright.backends.pytorch.exporting import Inputs, Loss, Task
from placewright.backends.pytorch.plan import Plan
from placewright.backends.pytorch.program import TorchModel, TorchProgram, read_program
from placewright.cluster import Cluster, chosen
from placewright.costs import estimate_costs
from placewright.errors import ClusterError, PlacementError, SearchError
from placewright.measurement import Outcome, Trial
from placewright.problem import Problem, make_problem
from placewright.session.result import Result
from placewright.simulator import lower_bounds

__all__ = ["Inputs", "Plan", "Planned", "TorchModel", "load", "place", "plan"]

_WORTH = 1.02
"""Several devices that are not faster than one by this factor are not worth their transfers."""


class TaskSettings(TypedDict, total=False):
    """Fields of `Task`."""

    train: bool
    loss_fn: Loss | None
    targets: tuple[Any, ...]
    optimizer: Any


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, and the search that found it."""

    plan: Plan
    result: Result
    """Of the search."""
    step_seconds: float
    """Of the plan, simulated."""
    verdict: str
    """What was gained, in a sentence."""

    def apply(self, model: torch.nn.Module, *, level: str | None = None) -> torch.nn.Module:
        """See `Plan.apply`."""
        return self.plan.apply(model, level=level)

    def device_map(self) -> dict[str, str]:
        """See `Plan.device_map`."""
        return self.plan.device_map()

    def split_points(self) -> dict[str, Any]:
        """See `Plan.split_points`."""
        return self.plan.split_points()

    def save(self, path: str | Path) -> None:
        """See `Plan.save`."""
        self.plan.save(path)


def load(path: str | Path) -> Plan:
    """A plan that was saved."""
    return Plan.load(path)


def plan(
    model: torch.nn.Module | TorchModel,
    inputs: object = (),
    *,
    devices: Sequence[str] | Cluster | str = "local",
    max_memory: Mapping[str, int | str] | None = None,
    level: str = "op",
    budget: float | str | None = None,
    method: str = "auto",
    seed: int = 0,
    **task: Unpack[TaskSettings],
) -> Planned:
    """Searches for the fastest placement of a module; moves nothing.

    Args:
        model: the module; it may be on `meta`.
        inputs: what it is called with: a tensor, a tuple of arguments, a mapping of keywords, or
            `Inputs(args, kwargs)`. Only shapes count.
        devices: torch's names of devices of this machine (`["cuda:0", "cpu"]`; `cpu:0` and `cpu:1`
            share the CPU; `cuda:0/stream:0` and `cuda:0/part:0` are a stream and a partition of a
            GPU), or a `Cluster`, the name of a preset, or a cluster file.
        max_memory: bytes, or a text such as `10GiB`, that a device may give, by its name.
        level: `op` places op by op; `module` keeps whole what accelerate and pipelines keep whole.
        budget: seconds to search, or a text such as `5m`.
        method: as in `placewright.place`.
        seed: as in `placewright.place`.
        task: `train`, `loss_fn`, `targets` and `optimizer`, as in `Task`: a whole training step
            where `train` is true.
    """
    if level not in ("op", "module"):
        raise PlacementError(f"level is {level!r}; there are 'op' and 'module'")
    source = model
    if not isinstance(source, TorchModel):
        source = TorchModel(source, Inputs.of(inputs), Task(**task))
    cluster = with_memory(cluster_of(devices), max_memory or {})
    program = read_program(source)
    problem = problem_of(program, cluster, level)
    try:
        result = placewright.place(
            problem, method=method, budget=budget or 10.0, seed=seed,
            op_level=None if level == "op" else False,
        )  # fmt: skip
    except SearchError as error:
        if lower_bounds(problem).forced_out_of_memory is None:
            raise
        raise SearchError(explain_memory(problem)) from error
    if result.best is None and _ran_out_of_memory(result):
        raise SearchError(explain_memory(problem))
    device_of_op, step_seconds = result.placement_by_op(), result.step_seconds
    single = _enough(result)
    if single is not None:
        numbers = single.placement.devices[problem.grouping.group_of].tolist()
        on = [cluster.device_names[number] for number in numbers]
        device_of_op = dict(zip(program.graph.op_names, on, strict=True))
        step_seconds = result.seconds_of(single)
    names = {device: torch_name(device) for device in cluster.device_names}
    return Planned(
        plan=program.plan(device_of_op, names), result=result, step_seconds=step_seconds,
        verdict=_verdict(result),
    )  # fmt: skip


def place(model: torch.nn.Module, inputs: object = (), **settings: Any) -> torch.nn.Module:
    """`plan`, and the module placed accordingly; takes what `plan` takes."""
    level = settings.get("level", "op")
    planned = plan(model, inputs, **settings)
    return planned.apply(model, level="module" if level == "module" else None)


def problem_of(program: TorchProgram, cluster: Cluster, level: str = "op") -> Problem:
    """The placement problem of a captured module."""
    if level == "op":
        return make_problem(program.graph, cluster)
    return Problem(
        graph=program.graph,
        grouping=program.units.group(program.graph, program.ops_of_unit),
        cluster=cluster,
        costs=estimate_costs(program.graph, cluster),
    )


# --- devices -------------------------------------------------------------------------------------


def cluster_of(
    devices: Sequence[str] | Cluster | str,
    *,
    through_host: bool = False,
    sms: int | None = None,
    issue: str = "device",
) -> Cluster:
    """Torch's names of devices as a cluster, and those of streams and partitions of a GPU; the
    settings are those of `placewright.cluster.chosen`, for devices of this machine."""
    if isinstance(devices, Cluster):
        return devices
    if isinstance(devices, str):
        return Cluster.load(devices)
    return chosen(devices, through_host=through_host, sms=sms, issue=issue)


_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
          "tib": 2**40, "b": 1, "": 1}  # fmt: skip


def with_memory(cluster: Cluster, limits: Mapping[str, int | str]) -> Cluster:
    """The cluster with less, or more, memory on some devices."""
    sizes = {chips.canonical(name): _size(name, size) for name, size in limits.items()}
    streamed = {d.chip for d in cluster.devices if d.sharing == chips.STREAM}
    for name in sizes:
        if name not in streamed:
            cluster.device_number(name)
    return replace(
        cluster,
        devices=tuple(
            replace(d, memory_bytes=sizes.get(d.name, sizes.get(d.chip, d.memory_bytes)))
            for d in cluster.devices
        ),
    )


def _size(name: str, size: int | str) -> int:
    text = str(size).strip().lower()
    number = text.rstrip("bikmgt ")
    unit = text[len(number) :].strip()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise ClusterError(
            f"max_memory of {name} is {size!r}; give bytes or a text such as '10GiB'"
        ) from None


# --- what came of it -----------------------------------------------------------------------------


def _ran_out_of_memory(result: Result) -> bool:
    """Whether memory is why none of the placements that were tried ran."""
    outcomes = {m.best.measurement.outcome for m in result.methods if m.best is not None}
    return outcomes == {Outcome.OUT_OF_MEMORY}


def explain_memory(problem: Problem) -> str:
    """Which parameters and activations are too large together."""
    from placewright.units import format_bytes

    graph = problem.graph
    resident = graph.resident_bytes
    memory = sum(device.memory_bytes for device in problem.cluster.devices)
    largest = sorted(range(graph.num_ops), key=lambda i: -int(resident[i]))[:3]
    activations = sorted(
        range(graph.num_ops), key=lambda i: -int(graph.owned_bytes[i] if not resident[i] else 0)
    )[:3]

    def said(ops: Sequence[int], sizes: Any) -> str:
        return ", ".join(f"{graph.op_names[i]} ({format_bytes(int(sizes[i]))})" for i in ops)

    return (
        f"{graph.name} does not fit: {format_bytes(int(resident.sum()))} of parameters and state, "
        f"the largest {said(largest, resident)}, and activations, the largest "
        f"{said(activations, graph.owned_bytes)}, on devices with {format_bytes(memory)} together"
    )


def _enough(result: Result) -> Trial | None:
    """Everything on one device, where that was to be tried and nothing found is worth more."""
    asked = any(method.method == "single" for method in result.methods)
    if not asked or result.speed_up is None or result.speed_up >= _WORTH:
        return None
    return result.best_single


def _verdict(result: Result) -> str:
    used = sorted(set(result.placement_by_op().values()))
    gain, single = result.speed_up, _enough(result)
    if single is not None:
        used = [result.problem.cluster.device_names[single.placement.main_device]]
    if len(used) == 1:
        return f"one device is best ({torch_name(used[0])}); there is nothing to gain from more"
    names = ", ".join(map(torch_name, used))
    if gain is None:
        tried = any(method.method == "single" for method in result.methods)
        than = "; no single device can hold it" if tried else ""
        return f"on {names}, {result.step_seconds:.3g} s a step{than}"
    times = f"{gain:.2f} times as fast as on one"
    instead = f", but {result.simple_answer}" if result.simple_answer else ""
    return f"on {names}, {result.step_seconds:.3g} s a step, {times}{instead}"
