"""m-ETF: earliest task first, within the devices' memory.

Jeon et al.: "Baechi: fast device placement of machine learning graphs", SoCC 2020; after Hwang et
al.: "Scheduling precedence graphs in systems with interprocessor communication times", SIAM Journal
on Computing, 1989.
"""

from __future__ import annotations

import numpy as np

from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray
from placewright.placement import Placement
from placewright.placers._schedule import (
    Room,
    Tasks,
    choose_for_light,
    compiled,
    compiled_part,
    find_arrivals,
    find_candidates,
    find_light_inputs,
    room_of,
    scheduling_order,
    take_room,
    tasks_of,
)
from placewright.placers.single_device import accelerators
from placewright.problem import Problem


def m_etf(problem: Problem) -> list[Placement]:
    """Always schedules the op that can start first, where it can; the longer path breaks ties."""
    nobody = np.zeros(problem.graph.num_edges, dtype=np.bool_)
    return [schedule_earliest(problem, nobody)]


def schedule_earliest(problem: Problem, favourite: BoolArray) -> Placement:
    """ETF that keeps devices free for favourite children, as m-SCT does; ETF itself without any.

    `favourite` [E] marks the edges that lead to favourite children, sorted as `Tasks.out_dst`.

    Only accelerators are used as long as they have memory: ETF takes devices to be alike. It asks
    where an op starts and not when it ends, and would keep a slow CPU as busy as a GPU.
    """
    devices = accelerators(problem)
    tasks = tasks_of(problem)
    order = scheduling_order(problem, tasks, devices)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    room = room_of(problem, devices)
    return Placement.of(problem, _schedule(tasks, room, position, favourite))


@compiled
def _schedule(t: Tasks, room: Room, position: IntArray, favourite: BoolArray) -> IndexArray:
    """[G] device of each group. `position` [N] is the place of each op in the scheduling order."""
    n, devices = t.op_seconds.shape
    device = np.full(len(t.group_seconds), -1, np.int32)
    done = np.zeros(n, np.bool_)
    finish = np.zeros(n)
    slot_free = np.zeros(len(t.slot_device))
    free = np.zeros(devices)  # of the slot that is free first
    last = np.full(devices, -1, np.int64)
    candidate = np.zeros(devices, np.bool_)
    arrival = np.zeros(devices)
    pending = np.zeros(n, np.int64)
    found_for = np.full(n, -1, np.int64)

    # Ops that wait for no other op, but for light sources and for transfers.
    ready = np.zeros(n, np.int64)
    count = 0
    is_ready = np.zeros(n, np.bool_)
    arrivals = np.zeros((n, devices))
    anywhere_at = np.zeros(n)  # when the inputs of a ready op can be on any device
    missing = np.zeros(n, np.int64)
    for op in range(n):
        for e in range(t.in_offsets[op], t.in_offsets[op + 1]):
            missing[op] += not t.light[t.in_src[e]]
        if missing[op] == 0 and not t.light[op]:
            ready[count] = op
            is_ready[op] = True
            count += 1

    kept_for = np.full(devices, -1, np.int64)
    kept_until = np.zeros(devices)
    while count > 0:
        for d in range(devices):
            kept_for[d] = -1
            if last[d] >= 0:
                for e in range(t.out_offsets[last[d]], t.out_offsets[last[d] + 1]):
                    child = t.out_dst[e]
                    if favourite[e] and is_ready[child] and device[t.group_of[child]] < 0:
                        find_candidates(room, t.group_of[child], candidate)
                        if _starts_first(d, candidate, free, arrivals[child]):
                            kept_for[d] = child
                            kept_until[d] = max(free[d], arrivals[child, d])

        best, best_at, best_device, best_start, best_end = -1, -1, -1, np.inf, np.inf
        for k in range(count):
            op = ready[k]
            group = t.group_of[op]
            home = device[group]
            if home < 0:
                find_candidates(room, group, candidate)
            for d in range(devices):
                if d != home and (home >= 0 or not candidate[d]):
                    continue
                start = max(free[d], arrivals[op, d])
                if start > best_start:
                    continue
                # A device that is kept for a favourite child takes another op before it only when
                # that is urgent: its inputs could be anywhere by now, so waiting gains nothing.
                kept = kept_for[d] >= 0 and kept_for[d] != op
                if kept and (start >= kept_until[d] or anywhere_at[op] > start):
                    continue
                end = start + t.op_seconds[op, d]
                if start < best_start or (
                    end < best_end if op == best else position[op] < position[best]
                ):
                    best, best_at, best_device, best_start, best_end = op, k, d, start, end

        count -= 1
        ready[best_at] = ready[count]
        is_ready[best] = False
        if device[t.group_of[best]] < 0:
            device[t.group_of[best]] = best_device
            take_room(room, t.group_of[best], best_device)
        lights = find_light_inputs(t, best, done, pending, found_for)
        for k in range(lights - 1, -1, -1):
            group = t.group_of[pending[k]]
            if device[group] < 0:
                find_candidates(room, group, candidate)
                device[group] = choose_for_light(t, pending[k], device, candidate)
                take_room(room, group, device[group])
        for k in range(lights):
            # They ran when their device had nothing else to do; their time is lost to it.
            op = pending[k]
            home = device[t.group_of[op]]
            find_arrivals(t, op, device, done, finish, arrival)
            finish[op] = arrival[home] + t.op_seconds[op, home]
            _occupy(t.slot_device, home, 0.0, t.op_seconds[op, home], slot_free, free)
            done[op] = True
        find_arrivals(t, best, device, done, finish, arrival)
        finish[best] = _occupy(
            t.slot_device, best_device, arrival[best_device], t.op_seconds[best, best_device],
            slot_free, free,
        )  # fmt: skip
        done[best] = True
        last[best_device] = best
        for e in range(t.out_offsets[best], t.out_offsets[best + 1]):
            op = t.out_dst[e]
            missing[op] -= 1
            if missing[op] == 0:
                find_arrivals(t, op, device, done, finish, arrivals[op])
                for d in range(devices):
                    if room.preferred[d]:
                        anywhere_at[op] = max(anywhere_at[op], arrivals[op, d])
                ready[count] = op
                is_ready[op] = True
                count += 1

    for op in range(n):  # light sources that nothing asked for
        group = t.group_of[op]
        if device[group] < 0:
            find_candidates(room, group, candidate)
            device[group] = choose_for_light(t, op, device, candidate)
            take_room(room, group, device[group])
    return device


@compiled_part
def _starts_first(device: int, candidate: BoolArray, free: FloatArray, arrival: FloatArray) -> bool:
    """Whether an op can start here, and nowhere earlier."""
    start = max(free[device], arrival[device])
    for d in range(len(free)):
        if candidate[d] and max(free[d], arrival[d]) < start:
            return False
    return bool(candidate[device])


@compiled_part
def _occupy(
    slot_device: IndexArray,
    device: int,
    start: float,
    seconds: float,
    slot_free: FloatArray,
    free: FloatArray,
) -> float:
    """Gives an op to the slot of a device that is free first; returns when it ends."""
    best = -1
    for slot in range(len(slot_device)):
        if slot_device[slot] == device and (best < 0 or slot_free[slot] < slot_free[best]):
            best = slot
    end: float = max(slot_free[best], start) + seconds
    slot_free[best] = end
    free[device] = end
    for slot in range(len(slot_device)):
        if slot_device[slot] == device:
            free[device] = min(free[device], slot_free[slot])
    return end
