"""HEFT: heterogeneous earliest finish time.

Topcuoglu, Hariri, Wu: "Performance-effective and low-complexity task scheduling for heterogeneous
computing", IEEE Transactions on Parallel and Distributed Systems, 2002.
"""

from __future__ import annotations

import numpy as np

from placewright.graph import FloatArray, IndexArray, IntArray
from placewright.placement import Placement
from placewright.placers._schedule import (
    Room,
    Tasks,
    emptied,
    find_arrivals,
    find_candidates,
    find_light_inputs,
    room_of,
    scheduling_order,
    settle_lights,
    take_room,
    tasks_of,
)
from placewright.placers.group_graph import GroupGraph, group_graph
from placewright.placers.offload import offload
from placewright.problem import Problem
from placewright.simulator.compiling import compiled, compiled_part

_TRANSFER_SHARE = 0.1
"""How much of a group's transfers counts in the second try. Most of their time is hidden behind
work; counting all of it would keep everything on one device."""


def heft(problem: Problem) -> list[Placement]:
    """HEFT over all devices, in up to four variants; equal ones are proposed once.

    HEFT sees one op at a time: the one that decides for its group, with its inputs. What the rest
    of the group will send, such as the gradients of a variable, is not seen; the second try counts
    a share of it. And HEFT knows no memory. The estimate of what groups need may be too high, so a
    placement that seems not to fit is proposed as well as one that does.
    """
    everywhere = np.arange(problem.num_devices, dtype=np.int32)
    endless = np.full(problem.num_devices, np.iinfo(np.int64).max // 2, dtype=np.int64)
    tasks = tasks_of(problem)
    groups = group_graph(problem)
    order = scheduling_order(problem, tasks, everywhere)
    memory = room_of(problem, everywhere)
    placements = []
    for share in (0.0, _TRANSFER_SHARE):
        for capacity in (endless, memory.capacity):
            room = emptied(memory, capacity)
            devices = _schedule(tasks, room, groups, order, share)
            placements.append(Placement.of(problem, devices))
    # It knows nothing of weights that travel either; where they may, a rule of their own does.
    return list(dict.fromkeys([*offload(problem), *placements]))


@compiled
def _schedule(
    t: Tasks, room: Room, groups: GroupGraph, order: IntArray, transfer_share: float
) -> IndexArray:
    """[G] device of each group."""
    n, devices = t.op_seconds.shape
    slots = len(t.slot_device)
    gap_start, gap_end, gaps, shortest = free_time(t)
    device = np.full(len(t.group_seconds), -1, np.int32)
    done = np.zeros(n, np.bool_)
    finish = np.zeros(n)
    arrival = np.zeros(devices)
    candidate = np.zeros(devices, np.bool_)
    pending = np.zeros(n + 1, np.int64)
    found_for = np.full(n, -1, np.int64)

    for turn in range(2 * n):
        op = order[turn % n]
        # Light sources that nothing asked for come last.
        if done[op] or (t.light[op] and turn < n):
            continue
        group = t.group_of[op]
        if device[group] < 0:
            find_arrivals(t, op, device, done, finish, arrival)
            find_candidates(room, group, candidate)
            # The rest of the group follows the op that decides, so its work counts too: else a
            # small first op takes a large group to a slow device.
            best, least = -1, np.inf
            for slot in range(slots):
                d = t.slot_device[slot]
                if candidate[d]:
                    at = find_gap(
                        gap_start[slot], gap_end[slot], gaps[slot], arrival[d], t.op_seconds[op, d]
                    )
                    end = max(gap_start[slot, at], arrival[d]) + t.group_seconds[group, d]
                    for e in range(groups.offsets[group], groups.offsets[group + 1]):
                        home = device[groups.neighbour[e]]
                        if home >= 0 and home != d:
                            transfer = groups.transfers[e] * t.latency[home, d]
                            transfer += groups.bytes[e] * t.per_byte[home, d]
                            end += transfer_share * transfer
                    if end < least:
                        best, least = d, end
            device[group] = best
            take_room(room, group, best)

        count = find_light_inputs(t, op, done, pending, found_for)
        settle_lights(t, room, pending, count, device, candidate)
        pending[count] = op
        for k in range(count + 1):
            current = pending[k]
            home = device[t.group_of[current]]
            find_arrivals(t, current, device, done, finish, arrival)
            finish[current] = insert(
                t.slot_device, home, arrival[home], t.op_seconds[current, home], shortest[home],
                gap_start, gap_end, gaps,
            )  # fmt: skip
            done[current] = True
    return device


@compiled_part
def free_time(t: Tasks) -> tuple[FloatArray, FloatArray, IntArray, FloatArray]:
    """The free time of each slot, as gaps in order, the last of which never ends: where they start
    and end, and how many; and how long the shortest op of each device takes."""
    n, devices = t.op_seconds.shape
    slots = len(t.slot_device)
    shortest = np.full(devices, np.inf)
    for op in range(n):
        for d in range(devices):
            shortest[d] = min(shortest[d], t.op_seconds[op, d])
    gap_end = np.full((slots, n + 1), np.inf)
    return np.zeros((slots, n + 1)), gap_end, np.ones(slots, np.int64), shortest


@compiled_part
def find_gap(start: FloatArray, end: FloatArray, count: int, ready: float, seconds: float) -> int:
    """The first gap of a slot in which an op that is ready then can run."""
    low, high = 0, count - 1
    while low < high:  # the first gap that ends after `ready`
        middle = (low + high) // 2
        if end[middle] > ready:
            high = middle
        else:
            low = middle + 1
    while max(start[low], ready) + seconds > end[low]:
        low += 1
    return low


@compiled_part
def insert(
    slot_device: IndexArray,
    device: int,
    ready: float,
    seconds: float,
    shortest: float,
    gap_start: FloatArray,
    gap_end: FloatArray,
    gaps: IntArray,
) -> float:
    """Runs an op in the earliest gap of a device; returns when it ends."""
    best, at, begin = -1, -1, np.inf
    for slot in range(len(slot_device)):
        if slot_device[slot] == device:
            gap = find_gap(gap_start[slot], gap_end[slot], gaps[slot], ready, seconds)
            start = max(gap_start[slot, gap], ready)
            if start < begin:
                best, at, begin = slot, gap, start
    end = begin + seconds
    start_of, end_of, count = gap_start[best], gap_end[best], gaps[best]
    # What is left before and after it is a gap again, if any op fits into it.
    before, after = begin - start_of[at], end_of[at] - end
    keep_before = before > 0.0 and before >= shortest
    keep_after = after > 0.0 and after >= shortest
    if keep_before and keep_after:
        for k in range(count, at, -1):
            start_of[k], end_of[k] = start_of[k - 1], end_of[k - 1]
        end_of[at] = begin
        start_of[at + 1] = end
        gaps[best] += 1
    elif keep_before:
        end_of[at] = begin
    elif keep_after:
        start_of[at] = end
    else:
        for k in range(at, count - 1):
            start_of[k], end_of[k] = start_of[k + 1], end_of[k + 1]
        gaps[best] -= 1
    return end
