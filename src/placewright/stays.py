"""Where a placement has weights at home and where it reads them: what has to travel, in which
order, and what that is called."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from placewright.placement import Placement
from placewright.problem import Problem


class How(enum.Enum):
    """How a unit comes by its weights."""

    RESIDENT = "resident"
    """They are in the memory of the accelerator that computes with them."""
    STREAMED = "streamed"
    """They travel to it in each step."""
    HOST = "host"
    """They are in the memory of the host, which computes with them itself."""


class Stay(NamedTuple):
    """A group that computes with weights, and where these are."""

    group: int
    unit: str
    """Name of the group."""
    homes: tuple[int, ...]
    """The groups that its weights are in; mostly one."""
    device: int
    """That computes."""
    home: int
    """Device where most bytes of its weights are."""
    bytes: int
    """Of all weights that it reads."""
    streamed_bytes: int
    """Of those that are not at home in the memory of its device."""
    how: How


class Visit(NamedTuple):
    """One coming of a weight to a device that is not its home."""

    op: int
    """The op that owns the weight."""
    bytes: int
    source: int
    """Its home."""
    readers: tuple[int, ...]
    """Ops on the device that read it before it is let go of, in their order."""


def unit_weights(problem: Problem) -> Mapping[int, Mapping[int, int]]:
    """Group that computes -> group that holds weights -> bytes of these that it reads, in the order
    of groups. Empty without homes."""
    visits = problem.visits
    result: dict[int, dict[int, int]] = {}
    if visits is None or not len(visits):
        return result
    group_of = problem.grouping.group_of.astype(np.int64)
    tensor = np.repeat(visits.tensor, np.diff(visits.offsets)).astype(np.int64)
    pairs = np.unique(np.stack([group_of[visits.reader], tensor]), axis=1)
    holders = group_of[problem.graph.tensor_producer[pairs[1]]]
    sizes = problem.graph.tensor_bytes[pairs[1]]
    for unit, holder, size in zip(pairs[0].tolist(), holders.tolist(), sizes.tolist(), strict=True):
        held = result.setdefault(unit, {})
        held[holder] = held.get(holder, 0) + size
    return result


def stays(problem: Problem, placement: Placement) -> tuple[Stay, ...]:
    """How each group that computes with weights comes by them, in the order in which the groups
    begin to read."""
    placement.check(problem)
    devices = placement.devices.tolist()
    hosts = [device.type == "cpu" for device in problem.cluster.devices]
    pool = problem.cluster.pool_of_device.tolist()
    result = []
    weights = unit_weights(problem)
    for unit in _by_first_read(problem, weights):
        held = weights[unit]
        device = devices[unit]
        at: dict[int, int] = {}
        for holder, size in held.items():
            at[devices[holder]] = at.get(devices[holder], 0) + size
        streamed = sum(size for where, size in at.items() if pool[where] != pool[device])
        how = How.STREAMED if streamed else How.HOST if hosts[device] else How.RESIDENT
        home = max(at, key=lambda where: (at[where], -where))
        result.append(
            Stay(
                group=unit,
                unit=problem.grouping.names[unit],
                homes=tuple(held),
                device=device,
                home=home,
                bytes=sum(held.values()),
                streamed_bytes=streamed,
                how=how,
            )
        )
    return tuple(result)


def _by_first_read(problem: Problem, weights: Mapping[int, object]) -> list[int]:
    visits = problem.visits
    assert visits is not None or not weights
    if visits is None:
        return []
    first = np.full(problem.num_groups, problem.graph.num_ops)
    np.minimum.at(first, problem.grouping.group_of[visits.reader], visits.reader)
    return sorted(weights, key=lambda unit: int(first[unit]))


def visits_to(problem: Problem, placement: Placement) -> Mapping[int, tuple[Visit, ...]]:
    """Device -> what travels to it from elsewhere in a step, in the order in which it comes. Where
    devices have one memory (streams of a GPU), that is the first of them."""
    placement.check(problem)
    visits = problem.visits
    result: dict[int, list[Visit]] = {}
    if visits is None:
        return {}
    device_of = placement.devices[problem.grouping.group_of]
    pools = problem.cluster.pool_of_device
    for v in range(len(visits)):
        home = int(device_of[visits.owner[v]])
        readers = visits.reader[visits.offsets[v] : visits.offsets[v + 1]]
        where = pools[device_of[readers]]
        for device in np.unique(where[where != pools[home]]).tolist():
            result.setdefault(device, []).append(
                Visit(
                    op=int(visits.owner[v]),
                    bytes=int(visits.bytes[v]),
                    source=home,
                    readers=tuple(readers[where == device].tolist()),
                )
            )
    return {device: tuple(coming) for device, coming in sorted(result.items())}
