"""Schedules tried for real: list scheduling, then methods of the project on measured times."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from placewright import methods
from placewright.acceleration.config import AccelerateConfig
from placewright.backends.pytorch.exporting import first_line
from placewright.backends.pytorch.lanes import OverLimitError
from placewright.backends.pytorch.streams.built import Lowered
from placewright.backends.pytorch.streams.device import Device
from placewright.backends.pytorch.streams.schedule import (
    Schedule,
    Work,
    list_schedule,
    renumbered,
    timed,
)
from placewright.backends.pytorch.streams.tuning import Tuned
from placewright.budget import Budget
from placewright.cluster import Cluster, from_document
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

_CHAIN = 0.97
"""Where the longest way takes this share of all the work, streams cannot help."""
_TRIAL_ROUNDS = 12
_TRIAL_SECONDS = 0.5
"""Of replays, in a trial: a long one is repeated less often, three times at least."""
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
    fault: str = ""
    """Why the last trial that failed did."""
    found: dict[str, float] = field(default_factory=dict)
    """What each way of searching has found: seconds of its best."""


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
    known = option.seconds if math.isfinite(option.seconds) else option.work.total_seconds
    rounds = min(_TRIAL_ROUNDS, max(3, int(_TRIAL_SECONDS / known))) if known else _TRIAL_ROUNDS
    try:
        with device.settings():
            ready = device.ready(
                option.lowered.grouped, option.tuned.runs, schedule, option.lowered.given
            )
            return statistics.median(device.times([ready.replay], rounds)[0])
    except (RuntimeError, OverLimitError) as fault:  # memory, or what a library cannot capture
        option.fault = first_line(fault)
        logger.info("a trial did not run: %s", option.fault)
        return math.inf


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
