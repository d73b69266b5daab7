"""The search for one module and inputs of certain shapes, and what comes of it."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright.acceleration.config import (
    EAGER,
    ONE,
    PLAIN,
    PLAIN_STREAMS,
    STREAMS,
    AccelerateConfig,
)
from placewright.acceleration.trials import Option, improve, schedules, trial
from placewright.backends.pytorch.exporting import first_line
from placewright.backends.pytorch.lanes import OverLimitError
from placewright.backends.pytorch.outputs import opened
from placewright.backends.pytorch.streams import kernels
from placewright.backends.pytorch.streams import plan as plans
from placewright.backends.pytorch.streams.accelerated import Entry
from placewright.backends.pytorch.streams.built import Built, Lowered, build, lower
from placewright.backends.pytorch.streams.device import Device, Gpu, forget_memory
from placewright.backends.pytorch.streams.groups import Fusion
from placewright.backends.pytorch.streams.net import Net, UnsuitableError, trace
from placewright.backends.pytorch.streams.plan import StreamPlan
from placewright.backends.pytorch.streams.schedule import (
    Schedule,
    Work,
    one_stream,
    refined,
    timed,
)
from placewright.backends.pytorch.streams.timelines import Timelines
from placewright.backends.pytorch.streams.tuning import Tuned, Tuner, distance, tolerance, untuned
from placewright.errors import PlacementError

logger = logging.getLogger(__name__)

_GAIN = 0.01
"""A plan with more to it has to be faster by this share than a simpler one."""
_SEARCHED = 0.4
"""Share of the time that a method has for improving on list scheduling."""
_LEAST_ROUNDS = 3


@dataclass(kw_only=True)
class SearchTask:
    model: Callable[..., Any]
    device: Device
    config: AccelerateConfig
    candidates: dict[str, Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    traced: Net | None = None
    _exact: list[Any] | None = None
    compared: int | None = None
    """How many of the flat outputs the module gives, too; None for all."""
    tuner: Tuner = field(init=False)

    def __post_init__(self) -> None:
        until = 0.4 * self.config.seconds
        self.tuner = Tuner(device=self.device, stop=lambda: self.left() < until)

    def left(self) -> float:
        return self.config.seconds - (time.monotonic() - self.started)

    def run(self, known: Sequence[StreamPlan] = (), *, strict: bool = True) -> Entry:
        """Applies a plan that is known for these inputs, or searches. `strict`: one that does not
        fit is an error, and no reason to search."""
        forms = plans.forms_of(pytree.tree_leaves((self.args, self.kwargs)))
        # Several where arguments differ that are no tensors: then the groups tell.
        fitting = [plan for plan in known if plan.inputs == forms]
        for number, plan in enumerate(fitting, start=1):
            try:
                return self.apply(plan)
            except PlacementError:
                if strict and number == len(fitting):
                    raise
        return self.search()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Of what runs meanwhile nothing is left: random numbers go on as if it had not, and what
        is made can be written to by calls that are not in inference mode."""
        devices = [self.device.index] if isinstance(self.device, Gpu) else []
        if devices:
            forget_memory()  # while it captures, torch gives back nothing of what it keeps
        with torch.random.fork_rng(devices=devices), torch.inference_mode(False):
            yield

    # --- again ---

    def apply(self, plan: StreamPlan) -> Entry:
        """What a plan says, without a search."""
        with self._apart():
            try:
                return self._apply(plan)
            except (torch.cuda.OutOfMemoryError, OverLimitError) as fault:
                raise UnsuitableError(first_line(fault)) from None

    def _apply(self, plan: StreamPlan) -> Entry:
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
        runs = []
        for group, name in zip(lowered.grouped.groups, plan.kernels, strict=True):
            there = kernels.names_for(group, self.device.kind)
            if name not in there:
                raise PlacementError(
                    f"the plan has kernel {name!r} for {group.name}; there are {', '.join(there)}"
                )
            runs.append(kernels.make(group, name))
        before = lowered.grouped.before
        place = {number: i for i, number in enumerate(plan.order)}
        if any(place[b] > place[number] for number in place for b in before[number]):
            raise PlacementError("the plan issues a group before one that it waits for")
        work = Work(seconds=plan.group_seconds, before=before, demand=plan.group_demand)
        schedule = timed(work, plan.streams, plan.order)
        tuned = Tuned(names=plan.kernels, runs=tuple(runs), seconds=plan.group_seconds)
        option = Option(lowered=lowered, tuned=tuned, work=work, schedule=schedule)
        return self._entry(plan, option, self.build(option, schedule))

    # --- the first time ---

    def search(self) -> Entry:
        with self._apart():
            return self._search()

    def _search(self) -> Entry:
        options: list[Option] = []
        for fusion in self._fusions():
            try:
                option = self.option(fusion)
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
                self.notes.append(f"fusion {fusion}: {option.fault}")
        if not options:
            raise UnsuitableError(self.notes[0] if self.notes else "nothing could be captured")
        plain = self._plain(options)
        if plain is not None and self.config.fusion is not Fusion.NONE:
            self._list_plain(plain)
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

    def option(self, fusion: Fusion) -> Option:
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
        made_by_list = () if only_captured else schedules(work, self.config.streams)
        for number, schedule in enumerate(made_by_list):
            if number and self.left() < 0.3 * self.config.seconds:
                break  # the first is tried in any case: it takes a second, and gains most
            self._try(option, schedule, "list")
        if any(work.demand) and option.schedule.num_streams > 1 and self.left() > 5:
            made = refined(work, option.schedule, self.config.streams, self.config.seed)
            self._try(option, made, "simulated")
        return option

    def _plain(self, options: Sequence[Option]) -> Option | None:
        return next((o for o in options if o.lowered.fusion is Fusion.NONE), None)

    def _list_plain(self, option: Option) -> None:
        """The module's own ops on streams: fused ones are not faster where groups are joined that
        would have run side by side, and need not be where calls take longer than kernels do."""
        if not schedules(option.work, 2):  # a chain, whatever its ops take
            return
        grouped, given = option.lowered.grouped, option.lowered.given
        try:
            with self.device.settings():
                tuned = self.tuner.tune(grouped, given, Fusion.NONE, demand=False)
        except Exception as fault:  # of a library, or too little memory: there are other options
            self.notes.append(f"{PLAIN_STREAMS}: {first_line(fault)}")
            return
        option.tuned, option.work = tuned, tuned.work(grouped)
        option.schedule = one_stream(option.work)
        for number, schedule in enumerate(schedules(option.work, self.config.streams)):
            if number and self.left() < 0.2 * self.config.seconds:
                break
            self._try(option, schedule, "list")

    def _try(self, option: Option, schedule: Schedule, how: str) -> float:
        seconds = trial(option, self.device, schedule)
        option.trials += 1
        option.found[how] = min(seconds, option.found.get(how, math.inf))
        simpler = schedule.num_streams > option.schedule.num_streams
        if seconds < option.seconds * (1 - (_GAIN if simpler else 0.0)):
            option.schedule, option.seconds = schedule, seconds
        return seconds

    def build(self, option: Option, schedule: Schedule) -> Built:
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
                built = self.build(option, schedule)
            except Exception as fault:
                self.notes.append(f"{name}: {first_line(fault)}")
                return
            builts[name] = (option, built)
            calls[name] = lambda: built(leaves)

        many = best.schedule.num_streams > 1
        add(STREAMS if many else ONE, best, best.schedule)
        if many:
            add(ONE, best, one_stream(best.work))
        plain = self._plain(options)
        if plain is not None and plain is not best:
            add(PLAIN, plain, one_stream(plain.work))
            if plain.schedule.num_streams > 1:
                add(PLAIN_STREAMS, plain, plain.schedule)
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
            wanted = _flat(calls[EAGER]())[: self.compared]
            limit = tolerance(wanted) * _DEEPER
            for name, call in calls.items():
                try:
                    call()
                    error = distance(_flat(call())[: self.compared], wanted)
                except Exception as fault:
                    self.notes.append(f"{name}: {first_line(fault)}")
                    continue
                close = error <= limit or name == EAGER or self._is_random(wanted)
                if not close and not self._is_as_exact(call, wanted):
                    self.notes.append(f"{name}: is off by {error:.2g}; not used")
                    continue
                working[name] = call
            del wanted
            replays = list(working.values())
            once = sum(seconds for (seconds,) in self.device.times(replays, 1))
            # Where a call takes long, fewer are as sure, and the search has to end.
            most = int(self.left() / once) if once else self.config.rounds
            rounds = min(self.config.rounds, max(_LEAST_ROUNDS, most))
            found = self.device.times(replays, rounds)
        return {name: statistics.median(s) for name, s in zip(working, found, strict=True)}

    def _is_as_exact(self, call: Callable[[], Any], wanted: Sequence[Any]) -> bool:
        """Whether outputs are as near to those in float32 as the module's own: where a network
        makes much of roundings, two of them are far apart and both are right."""
        if self._exact is None:
            self._exact = _exact_outputs(self.model, self.args, self.kwargs)
        if not self._exact:
            return False
        mine = distance(_floats(_flat(call())), self._exact)
        return mine <= 1.5 * distance(_floats(wanted), self._exact) + tolerance(wanted)

    def _is_random(self, wanted: Sequence[Any]) -> bool:
        """Whether the module itself gives something else each time."""
        again = _flat(self.model(*self.args, **self.kwargs))[: self.compared]
        return not distance(again, wanted) <= tolerance(wanted) * _DEEPER

    def _plan(
        self,
        chosen: str,
        seconds: Mapping[str, float],
        option: Option | None,
        options: Sequence[Option],
    ) -> StreamPlan:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        plain = self._plain(options)
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
            group_demand=option.tuned.demand or (0.0,) * len(option.tuned.seconds),
            streams=schedule.streams,
            order=schedule.order,
            streams_seconds=_finite(
                option.one_stream_seconds if chosen in (ONE, PLAIN) else option.seconds
            ),
        )

    def _entry(self, plan: StreamPlan, option: Option, built: Built) -> Entry:
        device = self.device  # all that is kept of this task

        def timelines() -> Timelines:
            with device.settings():
                measured = device.trace(
                    option.lowered.grouped, option.tuned.runs, built.schedule, option.lowered.given
                )
            return Timelines.of(plan.groups, plan.kernels, built.schedule, measured)

        return Entry(plan=plan, built=built, timelines=timelines)


def _exact_outputs(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any]:
    """The flat outputs in float32, products not rounded to TF32; nothing where that fails."""
    if not isinstance(model, torch.nn.Module):
        return []
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        exact = copy.deepcopy(model).float()
        inputs = pytree.tree_map(_as_float, (args, dict(kwargs)))
        return _floats(_flat(exact(*inputs[0], **inputs[1])))
    except Exception as fault:  # too large for the memory, or bound to its type
        logger.debug("no outputs in float32: %s", first_line(fault))
        return []
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _as_float(value: Any) -> Any:
    real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if real else value


def _floats(values: Sequence[Any]) -> list[Any]:
    return [_as_float(value) for value in values]


_DEEPER = 5
"""Roundings of single kernels add up on the way through a module."""


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else seconds


def _flat(outputs: Any) -> list[Any]:
    leaves: list[Any] = pytree.tree_leaves(opened(outputs))
    return leaves


def _choose(seconds: Mapping[str, float]) -> str:
    """The fastest; a simpler one where it is as fast."""
    fastest = min(seconds, key=seconds.__getitem__)
    for name in (EAGER, PLAIN, ONE):
        if name in seconds and seconds[name] <= seconds[fastest] * (1 + _GAIN / 2):
            return name
    return fastest
