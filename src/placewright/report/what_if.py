"""What would help next: the same model on machines that are better in one respect, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from placewright.budget import Budget
from placewright.cluster import Cluster, Device, Link
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import frozen
from placewright.measurement import Trial, better
from placewright.placement import Placement
from placewright.placers.local_search import LocalSearch, LocalSearchConfig
from placewright.problem import Problem
from placewright.session.search import search
from placewright.simulator import lower_bounds


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One change of the machine and what it would bring."""

    change: str
    detail: str
    same_seconds: float | None
    """The step time of the placement as it is; None when it does not run there."""
    step_seconds: float | None
    """After a short search from that placement."""
    lower_bound_seconds: float


def what_ifs(
    problem: Problem,
    placement: Placement,
    budget: Budget,
    observe: Callable[[str], None] = lambda change: None,
) -> list[WhatIf]:
    """Each change of the machine with a local search of its own, which starts from the placement.

    The first entry changes nothing: what it finds is due to searching longer, not to the machine,
    and the others are fairly compared with it.
    """
    result = []
    for change, detail, other in _changes(problem, placement):
        observe(change)
        start = Placement.of(other, placement.devices)
        evaluator = SimulatedEvaluator(other)
        (same,) = evaluator.evaluate([start])
        first = Trial(placement=start, measurement=same, placer="same")
        # Only what is told is improved: a search this short would get nowhere from scratch.
        placer = LocalSearch(other, LocalSearchConfig(season=0))
        placer.tell([first])
        best = better(first, search([placer], evaluator, budget).best or first)
        found = best.measurement
        result.append(
            WhatIf(
                change=change,
                detail=detail,
                same_seconds=same.mean_seconds if same.ok else None,
                step_seconds=found.mean_seconds if found.ok else None,
                lower_bound_seconds=lower_bounds(other).best,
            )
        )
    return result


def _changes(problem: Problem, placement: Placement) -> Iterator[tuple[str, str, Problem]]:
    cluster = problem.cluster
    yield "the same machine", "only as much more searching as the others got", problem
    if cluster.links:
        faster = tuple(
            replace(
                link,
                bandwidth=2 * link.bandwidth,
                latency_seconds=link.latency_seconds / 2,
                gap_seconds=None if link.gap_seconds is None else link.gap_seconds / 2,
            )
            for link in cluster.links
        )
        yield (
            "links twice as fast",
            "every link with twice the bandwidth and half the latency",
            replace(problem, cluster=replace(cluster, links=faster)),
        )
    roomier = tuple(
        replace(device, memory_bytes=2 * device.memory_bytes) for device in cluster.devices
    )
    yield (
        "twice the memory",
        "on every device",
        replace(problem, cluster=replace(cluster, devices=roomier)),
    )
    if cluster.links:  # of a machine with one device it is not known how another would be linked
        template = _busiest(problem, placement)
        device = cluster.devices[template]
        yield (
            f"one more {device.kind.name}",
            f"linked like {device.name}, by links of its own",
            _with_one_more(problem, template),
        )


def _busiest(problem: Problem, placement: Placement) -> int:
    """The device with the most work: another one like it would relieve it."""
    work = np.zeros(problem.num_devices)
    groups = np.arange(problem.num_groups)
    seconds = problem.group_seconds[placement.devices, groups]
    np.add.at(work, placement.devices, np.where(np.isfinite(seconds), seconds, 0.0))
    slots = np.array([device.kind.slots for device in problem.cluster.devices])
    return int((work / slots).argmax())


def _with_one_more(problem: Problem, template: int) -> Problem:
    cluster = problem.cluster
    old = cluster.devices[template]
    name = _unused(f"{old.name}-new", cluster.device_names)
    device = Device(name=name, kind=old.kind, memory_bytes=old.memory_bytes)
    taken = [link.name for link in cluster.links]
    links: list[Link] = []
    for link in cluster.links:
        ends = [b if a == old.name else a for a, b in link.pairs if old.name in (a, b)]
        if not ends:
            continue
        if any(end in cluster.device_names and _alike(cluster, end, old) for end in ends):
            ends.append(old.name)  # devices of this kind are joined directly
        pairs = tuple((name, end) for end in dict.fromkeys(ends))
        links.append(replace(link, name=_unused(f"{link.name}-new", taken), pairs=pairs))
    forbidden = problem.forbidden
    if forbidden.size:
        forbidden = np.concatenate([forbidden, forbidden[:, [template]]], axis=1)
    return replace(
        problem,
        cluster=replace(
            cluster, devices=(*cluster.devices, device), links=(*cluster.links, *links)
        ),
        forbidden=frozen(np.array(forbidden)),
    )


def _alike(cluster: Cluster, name: str, device: Device) -> bool:
    return cluster.devices[cluster.device_number(name)].kind == device.kind


def _unused(name: str, taken: tuple[str, ...] | list[str]) -> str:
    while name in taken:
        name += "'"
    return name
