"""List scheduling of ops onto devices: what HEFT, m-ETF and m-SCT have in common.

The schedulers plan a step op by op for a simple machine: an op runs on one slot of its device, a
tensor takes latency + bytes x seconds per byte between two devices, and transfers do not disturb
each other. All that is kept of a plan is the device of each group; when an op really starts is up
to the framework.

All ops of a group share a device, so the first op of a group to be scheduled decides for the rest,
as in Baechi. Read literally, that makes constants and variables decide: they wait for nothing and
are scheduled first, when no device has any work yet. So these *light sources* are held back and
scheduled right before the first op that needs them; see `_light_sources`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from placewright.graph import BoolArray, FloatArray, Graph, IndexArray, IntArray
from placewright.placers.memory import bytes_over_time
from placewright.problem import Problem
from placewright.simulator.compiling import compiled, compiled_part

_A = TypeVar("_A", bound=npt.NDArray[Any])


def _plain(array: _A) -> _A:
    """A copy that is writable and in C order. For numba any other array is of another type, and
    everything would be compiled once more for it."""
    return cast(_A, np.array(array, order="C"))


# --- memory --------------------------------------------------------------------------------------


class Room(NamedTuple):
    """Memory of D devices and what G groups need of it, at T moments of the step."""

    allowed: BoolArray
    """[G, D]"""
    preferred: BoolArray
    """[D] devices to use as long as they have room; the others are for what fits nowhere else."""
    needed: IntArray
    """[G, T] estimate of what a group needs."""
    most_needed: IntArray
    """[G] at any moment."""
    variables: IntArray
    """[G] the part of it that is no estimate."""
    capacity: IntArray
    """[D]"""
    used: IntArray
    """[D, T] taken by groups so far."""
    most_used: IntArray
    """[D] at any moment."""
    variables_used: IntArray
    """[D]"""


def room_of(problem: Problem, preferred: IndexArray) -> Room:
    """All of the devices' memory, still free."""
    devices = problem.cluster.devices
    needed = bytes_over_time(problem)
    return Room(
        allowed=_plain(problem.allowed),
        preferred=np.isin(np.arange(len(devices)), preferred),
        needed=_plain(needed),
        most_needed=needed.max(axis=1),
        variables=_plain(problem.group_resident_bytes),
        capacity=np.array([device.memory_bytes for device in devices], dtype=np.int64),
        used=np.zeros((len(devices), needed.shape[1]), dtype=np.int64),
        most_used=np.zeros(len(devices), dtype=np.int64),
        variables_used=np.zeros(len(devices), dtype=np.int64),
    )


def emptied(room: Room, capacity: IntArray) -> Room:
    """The same room with nothing in it, and perhaps of another size."""
    return room._replace(
        capacity=capacity,
        used=np.zeros_like(room.used),
        most_used=np.zeros_like(room.most_used),
        variables_used=np.zeros_like(room.variables_used),
    )


@compiled
def find_candidates(room: Room, group: int, candidate: BoolArray) -> None:
    """Marks the devices a group can go to now.

    Preferred devices with room; or any with room; or any with room for the variables, as the
    estimate of the rest may be too high; or the one with the most room left.
    """
    devices = len(room.capacity)
    for tier in range(3):
        found = False
        for d in range(devices):
            candidate[d] = room.allowed[group, d] and (room.preferred[d] or tier > 0)
            if tier == 2:
                needed = room.variables_used[d] + room.variables[group]
                candidate[d] = candidate[d] and needed <= room.capacity[d]
            elif candidate[d] and room.most_used[d] + room.most_needed[group] > room.capacity[d]:
                # Too much if both need the most at the same moment; do they?
                for k in range(room.needed.shape[1]):
                    if room.used[d, k] + room.needed[group, k] > room.capacity[d]:
                        candidate[d] = False
            found = found or candidate[d]
        if found:
            return
    best = -1
    for d in range(devices):
        left = room.capacity[d] - room.most_used[d]
        if room.allowed[group, d] and (
            best < 0 or left > room.capacity[best] - room.most_used[best]
        ):
            best = d
    candidate[best] = True


@compiled
def take_room(room: Room, group: int, device: int) -> None:
    for k in range(room.needed.shape[1]):
        room.used[device, k] += room.needed[group, k]
        room.most_used[device] = max(room.most_used[device], room.used[device, k])
    room.variables_used[device] += room.variables[group]


# --- ops and edges -------------------------------------------------------------------------------


class Tasks(NamedTuple):
    """A problem as the schedulers see it: N ops, E edges, G groups, D devices, S slots."""

    group_of: IndexArray
    op_seconds: FloatArray
    """[N, D], infinite where the op cannot run."""
    group_seconds: FloatArray
    """[G, D]"""
    in_offsets: IntArray
    """[N + 1] edges into op i: in_src and in_bytes from in_offsets[i] up to in_offsets[i + 1]."""
    in_src: IndexArray
    in_bytes: FloatArray
    out_offsets: IntArray
    """[N + 1] the same for the edges out of an op."""
    out_dst: IndexArray
    out_bytes: FloatArray
    light: BoolArray
    """[N] ops that are held back until another needs them."""
    latency: FloatArray
    """[D, D]"""
    per_byte: FloatArray
    """[D, D]"""
    slot_device: IndexArray
    """[S]"""


def tasks_of(problem: Problem) -> Tasks:
    graph = problem.graph
    ops = np.arange(graph.num_ops + 1)
    data = graph.edge_tensor >= 0
    edge_bytes = np.zeros(graph.num_edges)
    edge_bytes[data] = graph.tensor_bytes[graph.edge_tensor[data]]
    by_producer = producer_order(problem)
    in_offsets = np.searchsorted(graph.edge_dst, ops)
    op_seconds = _plain(problem.op_seconds.T)
    slots = [device.kind.slots for device in problem.cluster.devices]
    return Tasks(
        group_of=_plain(problem.grouping.group_of),
        op_seconds=op_seconds,
        group_seconds=_plain(problem.group_seconds.T),
        in_offsets=in_offsets,
        in_src=_plain(graph.edge_src),
        in_bytes=edge_bytes,
        out_offsets=np.searchsorted(graph.edge_src[by_producer], ops),
        out_dst=graph.edge_dst[by_producer],
        out_bytes=edge_bytes[by_producer],
        light=_light_sources(graph, op_seconds, in_offsets),
        latency=_plain(problem.cluster.routes.latency_seconds),
        per_byte=_plain(problem.cluster.routes.seconds_per_byte),
        slot_device=np.repeat(np.arange(problem.num_devices), slots).astype(np.int32),
    )


def producer_order(problem: Problem) -> IntArray:
    """[E] the graph's edges in the order of `Tasks.out_dst`."""
    return np.argsort(problem.graph.edge_src, kind="stable")


def _light_sources(graph: Graph, op_seconds: FloatArray, in_offsets: IntArray) -> BoolArray:
    """[N] ops that do next to nothing and depend on nothing else: constants, variables, reads.

    They take no input or pass theirs on as it is, have no FLOPs, and take less than half as long as
    a mean op: a source whose measured time is long is work like any other.
    """
    least = op_seconds.min(axis=1)
    source = np.diff(in_offsets) == 0
    passes_on = (graph.output_bytes > 0) & (graph.owned_bytes == 0)
    idle = (np.nan_to_num(graph.flops) == 0) & (least < 0.5 * least.mean())
    return _without_other_inputs((source | passes_on) & idle, in_offsets, graph.edge_src)


@compiled
def _without_other_inputs(
    members: BoolArray, in_offsets: IntArray, in_src: IndexArray
) -> BoolArray:
    """[N] those of the members all of whose inputs come from such members too."""
    result = members.copy()
    for op in range(len(members)):
        for e in range(in_offsets[op], in_offsets[op + 1]):
            result[op] = result[op] and result[in_src[e]]
    return result


def scheduling_order(problem: Problem, tasks: Tasks, devices: IndexArray) -> IntArray:
    """[N] ops from the highest upward rank to the lowest; a producer always before its consumers.

    Ranks never grow along an edge. Where they are equal (ops that cost nothing) the topological
    order decides.
    """
    return np.argsort(-upward_ranks(problem, tasks, devices), kind="stable")


def upward_ranks(problem: Problem, tasks: Tasks, devices: IndexArray) -> FloatArray:
    """[N] length of the longest path from each op to the end of the step (HEFT, equation 5).

    Costs are means over those of the devices that the op may run on, and over pairs of different
    devices for transfers. Inside a group nothing is ever transferred.
    """
    usable = problem.allowed & np.isin(np.arange(problem.num_devices), devices)
    usable = np.where(usable.any(axis=1, keepdims=True), usable, problem.allowed)
    where = usable[problem.grouping.group_of]
    seconds = np.where(where, tasks.op_seconds, 0.0).sum(axis=1) / where.sum(axis=1)
    latency, per_byte = mean_link(problem, devices)
    return _upward_ranks(
        seconds, tasks.out_offsets, tasks.out_dst, tasks.out_bytes, tasks.group_of, latency,
        per_byte,
    )  # fmt: skip


@compiled
def _upward_ranks(
    seconds: FloatArray,
    out_offsets: IntArray,
    out_dst: IndexArray,
    out_bytes: FloatArray,
    group_of: IndexArray,
    latency: float,
    per_byte: float,
) -> FloatArray:
    rank = np.zeros(len(seconds))
    for op in range(len(seconds) - 1, -1, -1):
        longest = 0.0
        for e in range(out_offsets[op], out_offsets[op + 1]):
            path = rank[out_dst[e]]
            if group_of[out_dst[e]] != group_of[op]:
                path += latency + out_bytes[e] * per_byte
            longest = max(longest, path)
        rank[op] = seconds[op] + longest
    return rank


def mean_link(problem: Problem, devices: IndexArray) -> tuple[float, float]:
    """Mean latency and seconds per byte between two different ones of these devices."""
    if len(devices) < 2:
        return 0.0, 0.0
    pairs = ~np.eye(len(devices), dtype=np.bool_)
    routes = problem.cluster.routes
    latency = routes.latency_seconds[np.ix_(devices, devices)][pairs]
    per_byte = routes.seconds_per_byte[np.ix_(devices, devices)][pairs]
    return float(latency.mean()), float(per_byte.mean())


# --- parts of the compiled schedulers ------------------------------------------------------------


@compiled_part
def find_arrivals(
    t: Tasks, op: int, device: IndexArray, done: BoolArray, finish: FloatArray, arrival: FloatArray
) -> None:
    """Sets when the inputs of an op are there, on each device.

    Light sources that are held back count as if they ran at the start of the step; where the device
    of their group is still open, it is taken to be the one in question.
    """
    arrival[:] = 0.0
    for e in range(t.in_offsets[op], t.in_offsets[op + 1]):
        producer = t.in_src[e]
        home = device[t.group_of[producer]]
        if home < 0:
            continue
        end = finish[producer] if done[producer] else t.op_seconds[producer, home]
        for d in range(len(arrival)):
            there = end
            if d != home:
                there += t.latency[home, d] + t.in_bytes[e] * t.per_byte[home, d]
            arrival[d] = max(arrival[d], there)


@compiled_part
def find_light_inputs(
    t: Tasks, op: int, done: BoolArray, found: IntArray, found_for: IntArray
) -> int:
    """Collects the light sources an op waits for that have not run, in topological order.

    `found_for` [N] remembers which op each was last found for; it starts as all -1.
    """
    count, at, current = 0, 0, op
    while True:
        for e in range(t.in_offsets[current], t.in_offsets[current + 1]):
            producer = t.in_src[e]
            if not done[producer] and found_for[producer] != op:
                found_for[producer] = op
                found[count] = producer
                count += 1
        if at == count:
            break
        current = found[at]
        at += 1
    for k in range(1, count):  # they are few; np.sort would take longer to compile than this to run
        value, j = found[k], k
        while j > 0 and found[j - 1] > value:
            found[j] = found[j - 1]
            j -= 1
        found[j] = value
    return count


@compiled_part
def choose_for_light(t: Tasks, op: int, device: IndexArray, candidate: BoolArray) -> int:
    """The device for the group of a light source that is needed now: near those that need it,
    unless its group has work that another device does so much faster."""
    best, least = -1, np.inf
    for d in range(len(candidate)):
        if not candidate[d]:
            continue
        transfer = 0.0
        for e in range(t.out_offsets[op], t.out_offsets[op + 1]):
            home = device[t.group_of[t.out_dst[e]]]
            if home >= 0 and home != d:
                seconds = t.latency[d, home] + t.out_bytes[e] * t.per_byte[d, home]
                transfer = max(transfer, seconds)
        total = transfer + t.group_seconds[t.group_of[op], d]
        if total < least:
            best, least = d, total
    return best


@compiled_part
def settle_light(t: Tasks, room: Room, op: int, device: IndexArray, candidate: BoolArray) -> None:
    """Gives the group of a light source a device, if it has none."""
    group = t.group_of[op]
    if device[group] < 0:
        find_candidates(room, group, candidate)
        device[group] = choose_for_light(t, op, device, candidate)
        take_room(room, group, device[group])


@compiled_part
def settle_lights(
    t: Tasks, room: Room, pending: IntArray, count: int, device: IndexArray, candidate: BoolArray
) -> None:
    """The same for all that an op waits for, those nearest to it first."""
    for k in range(count - 1, -1, -1):
        settle_light(t, room, pending[k], device, candidate)
