"""m-ETF: earliest task first, within the devices' memory.

Jeon et al.: "Baechi: fast device placement of machine learning graphs", SoCC 2020; after Hwang et
al.: "Scheduling precedence graphs in systems with interprocessor communication times", SIAM Journal
on Computing, 1989.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray
from placewright.placement import Placement
from placewright.placers._schedule import (
    Room,
    Tasks,
    find_arrivals,
    find_candidates,
    find_light_inputs,
    room_of,
    scheduling_order,
    settle_light,
    settle_lights,
    take_room,
    tasks_of,
)
from placewright.placers.single_device import accelerators
from placewright.problem import Problem
from placewright.simulator.compiling import compiled, compiled_part


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


class _State(NamedTuple):
    """How far a schedule has come; N ops, D devices, S slots."""

    device: IndexArray
    """[groups] where each is; -1 as long as that is open."""
    done: BoolArray
    """[N]"""
    finish: FloatArray
    """[N] when each op that is done ended."""
    slot_free: FloatArray
    """[S] when each slot is free."""
    free: FloatArray
    """[D] when the slot is free that is free first."""
    last: IntArray
    """[D] the op scheduled last; -1 for none."""
    ready: IntArray
    """[N] ops that wait for no other op, but for light sources and for transfers; the first ones
    count."""
    is_ready: BoolArray
    """[N]"""
    arrivals: FloatArray
    """[N, D] when the inputs of a ready op are on each device."""
    anywhere_at: FloatArray
    """[N] when the inputs of a ready op can be on any device."""
    kept_for: IntArray
    """[D] the favourite child that a device is kept for; -1 for none."""
    kept_until: FloatArray
    """[D]"""
    candidate: BoolArray
    """[D] scratch: where a group may go."""


@compiled
def _schedule(t: Tasks, room: Room, position: IntArray, favourite: BoolArray) -> IndexArray:
    """[G] device of each group. `position` [N] is the place of each op in the scheduling order."""
    n, devices = t.op_seconds.shape
    s = _State(
        np.full(len(t.group_seconds), -1, np.int32), np.zeros(n, np.bool_), np.zeros(n),
        np.zeros(len(t.slot_device)), np.zeros(devices), np.full(devices, -1, np.int64),
        np.zeros(n, np.int64), np.zeros(n, np.bool_), np.zeros((n, devices)), np.zeros(n),
        np.full(devices, -1, np.int64), np.zeros(devices), np.zeros(devices, np.bool_),
    )  # fmt: skip
    pending = np.zeros(n, np.int64)
    found_for = np.full(n, -1, np.int64)
    missing = np.zeros(n, np.int64)
    count = 0
    for op in range(n):
        for e in range(t.in_offsets[op], t.in_offsets[op + 1]):
            missing[op] += not t.light[t.in_src[e]]
        if missing[op] == 0 and not t.light[op]:
            s.ready[count] = op
            s.is_ready[op] = True
            count += 1

    while count > 0:
        _keep_for_favourites(t, room, favourite, s)
        at, device = _find_earliest(t, room, position, count, s)
        op = s.ready[at]
        count -= 1
        s.ready[at] = s.ready[count]
        s.is_ready[op] = False
        if s.device[t.group_of[op]] < 0:
            s.device[t.group_of[op]] = device
            take_room(room, t.group_of[op], device)
        lights = find_light_inputs(t, op, s.done, pending, found_for)
        settle_lights(t, room, pending, lights, s.device, s.candidate)
        for k in range(lights):
            # They ran when their device had nothing else to do; their time is lost to it.
            _run(t, pending[k], True, s)
        _run(t, op, False, s)
        s.last[device] = op
        for e in range(t.out_offsets[op], t.out_offsets[op + 1]):
            child = t.out_dst[e]
            missing[child] -= 1
            if missing[child] == 0:
                find_arrivals(t, child, s.device, s.done, s.finish, s.arrivals[child])
                for d in range(devices):
                    if room.preferred[d]:
                        s.anywhere_at[child] = max(s.anywhere_at[child], s.arrivals[child, d])
                s.ready[count] = child
                s.is_ready[child] = True
                count += 1

    for op in range(n):  # light sources that nothing asked for
        settle_light(t, room, op, s.device, s.candidate)
    return s.device


@compiled_part
def _keep_for_favourites(t: Tasks, room: Room, favourite: BoolArray, s: _State) -> None:
    """Keeps each device for the favourite child of its last op, where that starts there first."""
    for d in range(len(s.free)):
        s.kept_for[d] = -1
        if s.last[d] < 0:
            continue
        for e in range(t.out_offsets[s.last[d]], t.out_offsets[s.last[d] + 1]):
            child = t.out_dst[e]
            if favourite[e] and s.is_ready[child] and s.device[t.group_of[child]] < 0:
                find_candidates(room, t.group_of[child], s.candidate)
                if _starts_first(d, s.candidate, s.free, s.arrivals[child]):
                    s.kept_for[d] = child
                    s.kept_until[d] = max(s.free[d], s.arrivals[child, d])


@compiled_part
def _find_earliest(
    t: Tasks, room: Room, position: IntArray, count: int, s: _State
) -> tuple[int, int]:
    """Which of the ready ops can start first, as its place among them, and the device."""
    best, best_at, best_device, best_start, best_end = -1, -1, -1, np.inf, np.inf
    for k in range(count):
        op = s.ready[k]
        home = s.device[t.group_of[op]]
        if home < 0:
            find_candidates(room, t.group_of[op], s.candidate)
        for d in range(len(s.free)):
            if d != home and (home >= 0 or not s.candidate[d]):
                continue
            start = max(s.free[d], s.arrivals[op, d])
            if start > best_start:
                continue
            # A device that is kept for a favourite child takes another op before it only when
            # that is urgent: its inputs could be anywhere by now, so waiting gains nothing.
            kept = s.kept_for[d] >= 0 and s.kept_for[d] != op
            if kept and (start >= s.kept_until[d] or s.anywhere_at[op] > start):
                continue
            end = start + t.op_seconds[op, d]
            if start < best_start or (
                end < best_end if op == best else position[op] < position[best]
            ):
                best, best_at, best_device, best_start, best_end = op, k, d, start, end
    return best_at, best_device


@compiled_part
def _run(t: Tasks, op: int, at_once: bool, s: _State) -> None:
    """Runs an op where its group is; `at_once`: when its inputs are there, busy or not."""
    home = s.device[t.group_of[op]]
    arrival = np.zeros(len(s.free))
    find_arrivals(t, op, s.device, s.done, s.finish, arrival)
    seconds = t.op_seconds[op, home]
    end = _occupy(
        t.slot_device, home, 0.0 if at_once else arrival[home], seconds, s.slot_free, s.free
    )
    s.finish[op] = arrival[home] + seconds if at_once else end
    s.done[op] = True


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
