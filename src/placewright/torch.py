"""Your PyTorch module, placed.

    import placewright.torch

    plan = placewright.torch.plan(model, inputs, devices=["cuda:0", "cuda:1"])  # moves nothing
    placed = plan.apply(model)

`place` does both. The devices are this machine's, or those of a cluster file.

    fast = placewright.torch.accelerate(model, inputs)  # one GPU: fused, on streams, captured

`torch.compile(model, backend="placewright")` does the same once this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch.utils import _pytree as pytree

from placewright import chips
from placewright.acceleration import (
    AccelerateConfig,
    accelerate,
    accelerate_step,
    compile_backend,
)
from placewright.backends import check_here
from placewright.backends.base import RunConfig
from placewright.backends.pytorch import torch_name
from placewright.backends.pytorch.exporting import Inputs, Loss, Task, check_module
from placewright.backends.pytorch.offload.checkpoint import load_checkpoint
from placewright.backends.pytorch.offload.plan import OffloadPlan
from placewright.backends.pytorch.offload.planned import PlannedOffload
from placewright.backends.pytorch.offload.planned import plan_offload as _plan_offload
from placewright.backends.pytorch.offload.shapes import Call, Workload, generation, training
from placewright.backends.pytorch.plan import Plan
from placewright.backends.pytorch.program import TorchModel, TorchProgram, read_program
from placewright.cluster import Cluster, chosen, with_memory
from placewright.costs import estimate_costs
from placewright.errors import PlacementError, SearchError, check_settings
from placewright.measurement import Outcome, Trial
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.session.config import SIMULATE, How, Machine, SearchConfig
from placewright.session.driver import Session
from placewright.session.result import Result
from placewright.session.search import Progress
from placewright.simulator import lower_bounds
from placewright.units import format_seconds, parse_duration

__all__ = [
    "AccelerateConfig", "Call", "Inputs", "OffloadPlan", "Plan", "Planned", "PlannedOffload",
    "TorchModel", "Workload", "accelerate", "accelerate_step", "generation", "load",
    "load_checkpoint", "offload", "place", "plan", "plan_offload", "training",
]  # fmt: skip

if "placewright" not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(compile_backend, name="placewright")

_WORTH = 1.02
"""Several devices that are not faster than one by this factor are not worth their transfers."""


class PlanSettings(TypedDict, total=False):
    """Fields of `SearchConfig`, then of `Task`."""

    method: str
    seed: int
    evaluate: How
    train: bool
    loss_fn: Loss | None
    targets: tuple[Any, ...]
    optimizer: Any


_OF_TASK = frozenset(entry.name for entry in fields(Task))
_OF_PLAN = _OF_TASK | {e.name for e in fields(SearchConfig)} - {"budget", "op_level"}
"""Further keywords of `plan`, which says two of the fields in its own way."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, and the search that found it."""

    plan: Plan
    result: Result
    """Of the search."""
    step_seconds: float
    """Of the plan: simulated, or measured where that was asked for."""
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
    run: RunConfig | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
    **settings: Unpack[PlanSettings],
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
        run: settings of real runs, such as `TorchRunConfig(capture=False)`.
        observe: called with the progress after every batch of trials.
        settings: `method` and `seed`, as in `placewright.place`; `evaluate`, which is `simulate`,
            or `measure` or `simulate+measure` to run placements on these devices and compare the
            best of them in turns; and `train`, `loss_fn`, `targets` and `optimizer`, as in `Task`:
            a whole training step where `train` is true.
    """
    if level not in ("op", "module"):
        raise PlacementError(f"level is {level!r}; there are 'op' and 'module'")
    check_settings(plan, settings, _OF_PLAN)
    of_task: dict[str, Any] = {n: value for n, value in settings.items() if n in _OF_TASK}
    of_search: dict[str, Any] = {n: value for n, value in settings.items() if n not in _OF_TASK}
    source = model
    if not isinstance(source, TorchModel):
        source = TorchModel(source, Inputs.of(inputs), Task(**of_task))
    cluster = with_memory(cluster_of(devices), max_memory or {}, argument="max_memory")
    program = read_program(source)
    problem = problem_of(program, cluster, level)
    config = SearchConfig(
        budget=budget or 10.0, op_level=None if level == "op" else False,
        **{"evaluate": SIMULATE, **of_search},
    )  # fmt: skip
    machine = None
    if config.evaluate != SIMULATE:
        check_here(source, cluster, run)
        machine = Machine(program, run, feeds_of(source, program))
    try:
        result = Session(problem, config, machine=machine, observe=observe).run()
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
    check_settings(place, settings, [*signature(plan).parameters, *_OF_PLAN])
    level = settings.get("level", "op")
    planned = plan(model, inputs, **settings)
    return planned.apply(model, level="module" if level == "module" else None)


def plan_offload(
    model: torch.nn.Module,
    workload: object,
    *,
    memory: Mapping[str, int | str],
    devices: Cluster | str = "local",
    keep: Sequence[str] = (),
    whole: Sequence[str] = (),
    budget: float | str = 10.0,
    seed: int = 0,
) -> PlannedOffload:
    """Searches for the fastest way to run a module that does not fit; moves nothing.

    Weights live on the device or in page-locked memory of the host. What lives on the host travels
    each time, ahead of use, or is computed with by the host's cores.

    Args:
        model: the module; it may be on `meta`.
        workload: what it is called with and how often: a `Workload`, such as
            `generation(prompt=512, new=256)` or `training(inputs, torch.optim.Adam)`; a mapping of
            names to `(inputs, weight)`; or the inputs of the only call.
        memory: bytes, or a text such as `8GiB`, that the device may give, by its name; and that the
            host may give, as `cpu`.
        devices: this machine, or a cluster (a file, a preset) that has the device.
        keep: units whose weights stay on the device, by their paths in the module.
        whole: names of classes whose modules are units, instead of those that the module says
            (`_no_split_modules`): with `("LlamaAttention", "LlamaMLP")` the attention of a layer,
            and its cache, can stay on the device while the host computes the rest.
        budget: seconds to search, or a text such as `30s`.
        seed: the same gives the same plan.
    """
    check_module(plan_offload, model)
    names = [chips.canonical(name) for name in memory]
    others = [n for n in names if n != "cpu:0"]
    if len(others) != 1:
        raise PlacementError(
            f"`memory` says what one device may give besides the host (`cpu`), not "
            f"{', '.join(memory) or 'nothing'}; weights in several GPUs are placed by "
            "placewright.torch.plan"
        )
    if devices == "local":
        cluster = cluster_of(["cpu:0", *others])
    else:
        cluster = devices if isinstance(devices, Cluster) else Cluster.load(devices)
    seconds = parse_duration(budget) if isinstance(budget, str) else float(budget)
    return _plan_offload(
        model, workload, with_memory(cluster, memory), others[0],
        keep=keep, whole=whole, seconds=seconds, seed=seed,
    )  # fmt: skip


def offload(
    model: torch.nn.Module,
    workload: object,
    *,
    memory: Mapping[str, int | str],
    evaluate: str = "simulate",
    checkpoint: str | Path | None = None,
    **settings: Any,
) -> Any:
    """`plan_offload`, and the module placed accordingly: its own code and parameters, so that
    `generate`, `state_dict` and optimizers work. `placed.restore()` ends it.

    Args:
        model: see `plan_offload`.
        workload: see `plan_offload`.
        memory: see `plan_offload`.
        evaluate: `measure` takes the times of units in some passes and plans again with them.
        checkpoint: safetensors files with the weights, for a module on `meta`; they are read
            straight to where they live.
        settings: what else `plan_offload` takes.
    """
    check_settings(offload, settings, signature(plan_offload).parameters)
    check_module(offload, model)
    planned = plan_offload(model, workload, memory=memory, **settings)
    return planned.apply(model, evaluate=evaluate, checkpoint=checkpoint)


def feeds_of(source: TorchModel, program: TorchProgram) -> dict[str, Any] | None:
    """The example inputs as what real runs are fed with; None where they have no values."""
    args, kwargs = source.inputs
    leaves = pytree.tree_leaves((list(args), list(kwargs.values()), list(source.task.targets)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_meta for tensor in tensors):
        return None
    return {
        entry.name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
        .detach()
        .cpu()
        .numpy()
        for entry, tensor in zip(program.inputs, tensors, strict=True)
    }


def problem_of(program: TorchProgram, cluster: Cluster, level: str = "op") -> Problem:
    """The placement problem of a captured module."""
    if level == "op":
        # Weights that travel are for `plan_offload`, whose modules send them ahead of time.
        return make_problem(program.graph, cluster, ProblemConfig(homes=False))
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
    issue: str | None = None,
) -> Cluster:
    """Torch's names of devices as a cluster, and those of streams and partitions of a GPU; the
    settings are those of `placewright.cluster.chosen`, for devices of this machine."""
    if isinstance(devices, Cluster):
        return devices
    if isinstance(devices, str):
        return Cluster.load(devices)
    return chosen(devices, through_host=through_host, sms=sms, issue=issue)


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
        return f"on {names}, {format_seconds(result.step_seconds)} a step{than}"
    times = f"{gain:.2f} times as fast as on one"
    instead = f", but {result.simple_answer}" if result.simple_answer else ""
    return f"on {names}, {format_seconds(result.step_seconds)} a step, {times}{instead}"
