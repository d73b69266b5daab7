"""The fastest way to run a module on one GPU: groups of its ops on streams, found by real trials.

`placewright.torch.accelerate` is what users call. Here is the search: kernels are timed one by one,
list scheduling puts groups on streams, methods of the project improve on that by measured times,
and what comes out is compared with the module itself and with whatever else there is, in turns.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright import methods
from placewright.backends.pytorch.exporting import Inputs, first_line
from placewright.backends.pytorch.lanes import OverLimitError
from placewright.backends.pytorch.streams import kernels
from placewright.backends.pytorch.streams import plan as plans
from placewright.backends.pytorch.streams.accelerated import Accelerated, Entry
from placewright.backends.pytorch.streams.built import Built, Lowered, build, lower
from placewright.backends.pytorch.streams.device import Device, Gpu, forget_memory
from placewright.backends.pytorch.streams.groups import Fusion
from placewright.backends.pytorch.streams.net import Net, UnsuitableError, trace
from placewright.backends.pytorch.streams.plan import StreamPlan
from placewright.backends.pytorch.streams.schedule import (
    Schedule,
    Work,
    list_schedule,
    one_stream,
    renumbered,
    timed,
)
from placewright.backends.pytorch.streams.timelines import Timelines
from placewright.backends.pytorch.streams.tuning import Tuned, Tuner, distance, tolerance, untuned
from placewright.budget import Budget
from placewright.cluster import Cluster, from_document
from placewright.errors import ClusterError, PlacementError, SearchError
from placewright.evaluators.base import Evaluator
from placewright.graph import Edge, Graph, Op, Tensor
from placewright.grouping import each_op
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.placers.local_search import LocalSearch, LocalSearchConfig
from placewright.problem import Problem, make_problem
from placewright.session.search import search

logger = logging.getLogger(__name__)

EAGER, ONE, STREAMS = "eager", "one stream", "streams"
PLAIN = "one stream, plain"
"""The module as it is, captured: what streams and fused kernels are compared with."""


@dataclass(frozen=True, kw_only=True)
class AccelerateConfig:
    """How the fastest way to run a module is searched for."""

    streams: int = 6
    """Streams at most."""
    seconds: float = 60.0
    """For the whole search; it ends early where nothing is to be gained. Compiling a region that
    was begun is not cut short."""
    method: str = "local-search"
    """What improves on list scheduling by real trials: names of methods, separated by commas, or
    `list` for nothing."""
    fusion: Fusion = Fusion.REGIONS
    """How much is fused at most. `none` keeps results bitwise those of the module."""
    seed: int = 0
    """Of the methods."""
    rounds: int = 30
    """Calls of each candidate in the final comparison, in turns."""
    copy_outputs: bool = True
    """Whether outputs are copies. Without, the next call overwrites them."""
    most_shapes: int = 8
    """Shapes of inputs that are captured; further ones run as the module itself."""
    memory_bytes: float = math.inf
    """For what is computed on the way, in one call."""

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= 16:
            raise SearchError(f"streams must be from 1 to 16, not {self.streams}")
        if not self.seconds > 0:
            raise SearchError(f"seconds must be positive, not {self.seconds}")
        if self.rounds < 1 or self.most_shapes < 1:
            raise SearchError("rounds and most_shapes must be at least 1")
        if self.method != "list":
            methods.parse(self.method)
        if self.fusion not in set(Fusion):
            raise SearchError(f"fusion is {self.fusion!r}; there are {', '.join(Fusion)}")
        object.__setattr__(self, "fusion", Fusion(self.fusion))  # its text will do


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
    config = replace(config or AccelerateConfig(), **settings)
    if without_cuda not in ("error", "model"):
        raise SearchError(f"without_cuda is {without_cuda!r}; there are 'error' and 'model'")
    example = Inputs.of(inputs)
    device = _device_of(model, example, config)
    if device is None:
        if without_cuda == "model":
            return model
        raise ClusterError(
            f"{type(model).__name__} is not on a CUDA device, and only there are streams; move it "
            "there, or pass without_cuda='model' to run it as it is"
        )
    known = plans.load(plan) if isinstance(plan, str | Path) else tuple(plan or ())
    fast = accelerated(model, device, config, candidates=dict(candidates or {}), known=known)
    fast.prepare(example.args, example.kwargs)
    return fast


def accelerated(
    model: Callable[..., Any],
    device: Device,
    config: AccelerateConfig,
    *,
    candidates: Mapping[str, Callable[..., Any]] | None = None,
    known: Sequence[StreamPlan] = (),
) -> Accelerated:
    """The callable, before it has seen inputs."""

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        fitting = next((p for p in known if p.inputs == plans.forms_of(leaves)), None)
        task = _Task(
            model=model, device=device, config=config, candidates=dict(candidates or {}),
            args=tuple(args), kwargs=dict(kwargs),
        )  # fmt: skip
        if fitting is not None:
            return task.apply(fitting)
        return task.search()

    name = torch.cuda.get_device_name(device.index) if isinstance(device, Gpu) else device.kind
    return Accelerated(model, make, device=name, most_shapes=config.most_shapes)


def _device_of(model: torch.nn.Module, example: Inputs, config: AccelerateConfig) -> Device | None:
    leaves = [v for v in pytree.tree_leaves(tuple(example)) if torch.is_tensor(v)]
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    index = next((t.device.index for t in tensors if t.device.type == "cuda"), None)
    if index is None:
        return None
    return Gpu(index=index, limit_bytes=config.memory_bytes)


# --- the search for one shape --------------------------------------------------------------------

_CHAIN = 0.97
"""Where the longest way takes this share of all the work, streams cannot help."""
_TRIAL_ROUNDS = 12
_GAIN = 0.01
"""A plan with more to it has to be faster by this share than a simpler one."""
_SEARCHED = 0.4
"""Share of the time that a method has for improving on list scheduling."""
_PATIENCE = 150
"""Trials without a gain after which a method is stopped."""


@dataclass(kw_only=True)
class Option:
    """A module at one level of fusion, and the best schedule for it so far."""

    lowered: Lowered
    tuned: Tuned
    work: Work
    schedule: Schedule
    seconds: float = math.inf
    """Of replays alone, measured."""
    one_stream_seconds: float = math.inf
    trials: int = 0
    found: dict[str, float] = field(default_factory=dict)
    """What each way of searching has found: seconds of its best."""


@dataclass(kw_only=True)
class _Task:
    model: Callable[..., Any]
    device: Device
    config: AccelerateConfig
    candidates: dict[str, Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    traced: Net | None = None
    tuner: Tuner = field(init=False)

    def __post_init__(self) -> None:
        until = 0.4 * self.config.seconds
        self.tuner = Tuner(device=self.device, stop=lambda: self.left() < until)

    def left(self) -> float:
        return self.config.seconds - (time.monotonic() - self.started)

    # --- again ---

    def apply(self, plan: StreamPlan) -> Entry:
        """What a plan says, without a search."""
        if not plan.on_streams:
            if plan.chosen not in (EAGER, *self.candidates):
                raise PlacementError(
                    f"the plan runs the module as {plan.chosen!r}; give that in candidates"
                )
            return Entry(plan=plan, call=self.candidates.get(plan.chosen, self.model))
        lowered = self._lower(plan.fusion)
        if lowered.fingerprint != plan.fingerprint:
            raise PlacementError(
                f"the plan was made for other groups ({plan.fingerprint}, here "
                f"{lowered.fingerprint}); was it another model, or another version of torch?"
            )
        runs = [
            kernels.make(group, name)
            for group, name in zip(lowered.grouped.groups, plan.kernels, strict=True)
        ]
        work = Work(seconds=plan.group_seconds, before=lowered.grouped.before)
        schedule = timed(work, plan.streams, plan.order)
        tuned = Tuned(names=plan.kernels, runs=tuple(runs), seconds=plan.group_seconds)
        option = Option(lowered=lowered, tuned=tuned, work=work, schedule=schedule)
        return self._entry(plan, option, self._build(option, schedule))

    # --- the first time ---

    def search(self) -> Entry:
        options: list[Option] = []
        for fusion in self._fusions():
            try:
                option = self._option(fusion)
            except UnsuitableError:
                raise
            except Exception as fault:  # of a library: what it cannot do the next level may
                logger.debug("fusion %s", fusion, exc_info=True)
                self.notes.append(f"fusion {fusion}: {first_line(fault)}")
                forget_memory()
                continue
            if math.isfinite(option.seconds):
                options.append(option)
            else:
                self.notes.append(f"fusion {fusion}: does not fit into the memory")
        if not options:
            raise UnsuitableError(self.notes[0] if self.notes else "nothing could be captured")
        best = min(options, key=lambda option: option.seconds)
        if best.schedule.num_streams > 1 and self.config.method != "list" and self.left() > 5:
            improve(best, self.device, self.config, min(self.left() * _SEARCHED, self.left() - 3))
        return self._final(options, best)

    def _fusions(self) -> list[Fusion]:
        order = list(Fusion)
        return order[: order.index(self.config.fusion) + 1]

    def _lower(self, fusion: Fusion) -> Lowered:
        with self.device.settings():
            if self.traced is None:
                assert isinstance(self.model, torch.nn.Module)
                self.traced = trace(self.model, self.args, self.kwargs)
            return lower(self.traced, self.args, self.kwargs, fusion)

    def _option(self, fusion: Fusion) -> Option:
        lowered = self._lower(fusion)
        only_captured = fusion is Fusion.NONE is not self.config.fusion
        with self.device.settings():
            tuned = (
                untuned(lowered.grouped)
                if only_captured
                else self.tuner.tune(lowered.grouped, lowered.given, fusion)
            )
        work = tuned.work(lowered.grouped)
        option = Option(lowered=lowered, tuned=tuned, work=work, schedule=one_stream(work))
        option.one_stream_seconds = self._try(option, option.schedule, "one stream")
        for schedule in () if only_captured else schedules(work, self.config.streams):
            if self.left() < 0.3 * self.config.seconds:
                break
            self._try(option, schedule, "list")
        return option

    def _try(self, option: Option, schedule: Schedule, how: str) -> float:
        seconds = trial(option, self.device, schedule)
        option.trials += 1
        option.found[how] = min(seconds, option.found.get(how, math.inf))
        simpler = schedule.num_streams > option.schedule.num_streams
        if seconds < option.seconds * (1 - (_GAIN if simpler else 0.0)):
            option.schedule, option.seconds = schedule, seconds
        return seconds

    def _build(self, option: Option, schedule: Schedule) -> Built:
        return build(
            option.lowered, self.device, option.tuned.runs, schedule,
            copies=self.config.copy_outputs,
        )  # fmt: skip

    def _final(self, options: Sequence[Option], best: Option) -> Entry:
        """What is fastest as it is called, inputs and outputs copied, in turns."""
        calls: dict[str, Callable[[], Any]] = {}
        builts: dict[str, tuple[Option, Built]] = {}
        leaves = pytree.tree_leaves((self.args, self.kwargs))

        def add(name: str, option: Option, schedule: Schedule) -> None:
            try:
                built = self._build(option, schedule)
            except Exception as fault:
                self.notes.append(f"{name}: {first_line(fault)}")
                return
            builts[name] = (option, built)
            calls[name] = lambda: built(leaves)

        many = best.schedule.num_streams > 1
        add(STREAMS if many else ONE, best, best.schedule)
        if many:
            add(ONE, best, one_stream(best.work))
        plain = next((o for o in options if o.lowered.fusion is Fusion.NONE), None)
        if plain is not None and plain is not best:
            add(PLAIN, plain, one_stream(plain.work))
        calls[EAGER] = lambda: self.model(*self.args, **self.kwargs)
        for name, call in self.candidates.items():
            calls[name] = lambda call=call: call(*self.args, **self.kwargs)  # type: ignore[misc]
        seconds = self._compare(calls)
        chosen = _choose(seconds)
        option, built = builts.get(chosen, (best, None))
        plan = self._plan(chosen, seconds, option if built is not None else None, options)
        if built is None:
            return Entry(plan=plan, call=self.candidates.get(chosen, self.model))
        builts.clear()
        calls.clear()
        forget_memory()
        return self._entry(plan, option, built)

    def _compare(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        wanted = None
        with torch.no_grad():
            working: dict[str, Callable[[], Any]] = {}
            wanted = _flat(calls[EAGER]())
            limit = tolerance(wanted) * _DEEPER
            for name, call in calls.items():
                try:
                    call()
                    error = distance(_flat(call()), wanted)
                except Exception as fault:
                    self.notes.append(f"{name}: {first_line(fault)}")
                    continue
                if name != EAGER and not error <= limit and not self._is_random(wanted):
                    self.notes.append(f"{name}: is off by {error:.2g}; not used")
                    continue
                working[name] = call
            del wanted
            found = self.device.times(list(working.values()), self.config.rounds)
        return {name: statistics.median(s) for name, s in zip(working, found, strict=True)}

    def _is_random(self, wanted: Sequence[Any]) -> bool:
        """Whether the module itself gives something else each time."""
        again = _flat(self.model(*self.args, **self.kwargs))
        return not distance(again, wanted) <= tolerance(wanted) * _DEEPER

    def _plan(
        self,
        chosen: str,
        seconds: Mapping[str, float],
        option: Option | None,
        options: Sequence[Option],
    ) -> StreamPlan:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        plain = next((o for o in options if o.lowered.fusion is Fusion.NONE), None)
        plan = StreamPlan(
            inputs=plans.forms_of(leaves), chosen=chosen, seconds=dict(seconds),
            notes=tuple(dict.fromkeys((*self.notes, *self.tuner.notes))),
            one_stream_seconds=_finite(plain.one_stream_seconds if plain is not None else None),
        )  # fmt: skip
        best = min(options, key=lambda option: option.seconds)
        plan = replace(
            plan,
            found={how: s for how, s in best.found.items() if math.isfinite(s)},
            trials=sum(option.trials for option in options),
            search_seconds=time.monotonic() - self.started,
        )
        if option is None:
            return plan
        schedule = one_stream(option.work) if chosen in (ONE, PLAIN) else option.schedule
        return replace(
            plan,
            fusion=option.lowered.fusion,
            fingerprint=option.lowered.fingerprint,
            groups=tuple(g.name for g in option.lowered.grouped.groups),
            kernels=option.tuned.names,
            group_seconds=option.tuned.seconds,
            streams=schedule.streams,
            order=schedule.order,
            streams_seconds=_finite(
                option.one_stream_seconds if chosen in (ONE, PLAIN) else option.seconds
            ),
        )

    def _entry(self, plan: StreamPlan, option: Option, built: Built) -> Entry:
        def timelines() -> Timelines:
            with self.device.settings():
                measured = self.device.trace(
                    option.lowered.grouped, option.tuned.runs, built.schedule, option.lowered.given
                )
            return Timelines.of(plan.groups, plan.kernels, built.schedule, measured)

        return Entry(plan=plan, built=built, timelines=timelines)


_DEEPER = 5
"""Roundings of single kernels add up on the way through a module."""


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else seconds


def _flat(outputs: Any) -> list[Any]:
    leaves: list[Any] = pytree.tree_leaves(outputs)
    return leaves


def _choose(seconds: Mapping[str, float]) -> str:
    """The fastest; a simpler one where it is as fast."""
    fastest = min(seconds, key=seconds.__getitem__)
    for name in (EAGER, PLAIN, ONE):
        if name in seconds and seconds[name] <= seconds[fastest] * (1 + _GAIN / 2):
            return name
    return fastest


def schedules(work: Work, streams: int) -> list[Schedule]:
    """What list scheduling says for several numbers of streams, each only once."""
    if work.critical_seconds >= _CHAIN * work.total_seconds:
        return []
    found: dict[tuple[int, ...], Schedule] = {}
    for count in range(2, streams + 1):
        for by_rank in (True, False):
            made = list_schedule(work, count, by_rank=by_rank)
            if made.num_streams > 1:
                found.setdefault((*made.streams, *made.order), made)
    return sorted(found.values(), key=lambda schedule: schedule.seconds)


def trial(option: Option, device: Device, schedule: Schedule) -> float:
    """Median seconds of a replay; infinite where it cannot be captured."""
    try:
        with device.settings():
            ready = device.ready(
                option.lowered.grouped, option.tuned.runs, schedule, option.lowered.given
            )
            return statistics.median(device.times([ready.replay], _TRIAL_ROUNDS)[0])
    except (torch.cuda.OutOfMemoryError, OverLimitError) as fault:
        logger.info("a trial did not run: %s", first_line(fault))
        return math.inf


# --- methods of the project on real trials -------------------------------------------------------


def streams_problem(option: Option, streams: int) -> Problem:
    """Groups as ops, streams as devices: what the methods of the project place."""
    groups = option.lowered.grouped.groups
    ops, edges = [], []
    for number, group in enumerate(groups):
        ops.append(
            Op(name=group.name, type=option.tuned.names[number], outputs=(Tensor(1),),
               seconds={"gpu": option.tuned.seconds[number]})
        )  # fmt: skip
        edges += [Edge(groups[s].name, group.name) for s in option.lowered.grouped.before[number]]
    graph = Graph.from_ops("groups", ops, edges)
    problem = make_problem(graph, streams_cluster(streams))
    return replace(problem, grouping=each_op(graph))


def streams_cluster(streams: int) -> Cluster:
    """Streams of a GPU: what one makes another has as soon as it has waited for an event."""
    names = [f"gpu:0/stream:{number}" for number in range(streams)]
    pairs = [[a, b] for i, a in enumerate(names) for b in names[i + 1 :]]
    document: dict[str, Any] = {
        "format": "placewright-cluster/1",
        "name": f"{streams} streams",
        "issue": "none",
        "devices": [{"name": name, "kind": "h200-141gb"} for name in names],
        "links": [
            {"name": "events", "latency": "1.5us", "gap": "0s", "bandwidth": "1e18 B/s",
             "pairs": pairs}
        ] if pairs else [],
    }  # fmt: skip
    return from_document(document, where="streams")


class StreamsEvaluator(Evaluator):
    """Captures and replays each placement of groups on streams."""

    cheap = False
    noise = 0.004

    def __init__(self, option: Option, device: Device, problem: Problem) -> None:
        self._option, self._device, self._problem = option, device, problem
        ranks = option.work.ranks()
        self._order = sorted(range(len(ranks)), key=lambda i: (-ranks[i], i))
        self.best: tuple[float, Schedule] = (option.seconds, option.schedule)
        self.trials = 0
        self.last_gain = 0
        self.by_op = {name: i for i, name in enumerate(problem.graph.op_names)}

    @property
    def problem(self) -> Problem:
        return self._problem

    def schedule(self, placement: Placement) -> Schedule:
        """Groups on these streams, those with the longest way to the end first."""
        groups = self._option.lowered.grouped.groups
        devices = placement.devices[self._problem.grouping.group_of].tolist()
        streams = [devices[self.by_op[group.name]] for group in groups]
        return timed(self._option.work, renumbered(streams, self._order), self._order)

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        found = []
        for placement in placements:
            schedule = self.schedule(placement)
            seconds = trial(self._option, self._device, schedule)
            self.trials += 1
            if seconds < self.best[0] * 0.998:
                seconds = max(seconds, trial(self._option, self._device, schedule))
            if seconds < self.best[0] * 0.998:
                self.best, self.last_gain = (seconds, schedule), self.trials
            if math.isfinite(seconds):
                found.append(Measurement(outcome=Outcome.OK, step_seconds=(seconds,)))
            else:
                found.append(Measurement(outcome=Outcome.OUT_OF_MEMORY, reason="did not fit"))
        return found

    def is_idle(self) -> bool:
        return self.trials - self.last_gain > _PATIENCE


def improve(option: Option, device: Device, config: AccelerateConfig, seconds: float) -> None:
    """Lets the methods of the project improve on the best schedule, by measured times."""
    names = methods.parse(config.method).names
    for name in names:
        # One after another from the same start, so that it can be said what each adds.
        problem = streams_problem(option, max(config.streams, option.schedule.num_streams))
        evaluator = StreamsEvaluator(option, device, problem)
        number = {group.name: i for i, group in enumerate(option.lowered.grouped.groups)}
        start = Placement.of(
            problem,
            [option.schedule.streams[number[name]] for name in problem.graph.op_names],
        )
        each = seconds / len(names)
        placer = _placer(name, problem, config.seed, each, evaluator.noise)
        placer.tell([
            Trial(placement=start, placer="list", at_seconds=0.0, measurement=Measurement(
                outcome=Outcome.OK, step_seconds=(option.seconds,)))
        ])  # fmt: skip
        search([placer], evaluator, Budget(seconds=each), seed=config.seed, stop=evaluator.is_idle)
        option.trials += evaluator.trials
        option.found[name] = evaluator.best[0]
        if evaluator.best[0] < option.seconds:
            option.seconds, option.schedule = evaluator.best


_FEW_TRIALS = LocalSearchConfig(chains=2, cycle=150, season=0)
"""A trial takes some 50 ms: there are hundreds, all spent near the best schedule."""


def _placer(name: str, problem: Problem, seed: int, seconds: float, noise: float) -> Placer:
    if name == "local-search":
        return LocalSearch(problem, _FEW_TRIALS, seed=seed)
    (placer,) = methods.make(
        [name], problem, seed=seed, seconds=seconds, cheap=False, noise=noise
    )  # fmt: skip
    return placer


# --- torch.compile -------------------------------------------------------------------------------


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

    def call(*args: Any) -> Any:
        if not made:
            closed = _Closed(graph, args)
            made.append((closed, accelerated(closed, device, config)))
        closed, fast = made[0]
        return fast(*[args[number] for number in closed.free])

    return call


# --- for comparison ------------------------------------------------------------------------------


def plain_schedules(
    model: torch.nn.Module, inputs: object, config: AccelerateConfig
) -> tuple[dict[str, Callable[[Sequence[Any]], Any]], dict[str, float]]:
    """The module's own ops, nothing fused: captured on one stream, and on several by list
    scheduling. What takes the flat inputs, and the seconds of a replay of each."""
    example = Inputs.of(inputs)
    device = _device_of(model, example, config)
    if device is None:
        raise ClusterError(f"{type(model).__name__} is not on a CUDA device")
    task = _Task(
        model=model, device=device, config=replace(config, fusion=Fusion.NONE), candidates={},
        args=tuple(example.args), kwargs=dict(example.kwargs),
    )  # fmt: skip
    option = task._option(Fusion.NONE)
    built: dict[str, Callable[[Sequence[Any]], Any]] = {
        ONE: task._build(option, one_stream(option.work)),
        "list": task._build(option, option.schedule),
    }
    return built, dict(option.found)
