"""HEFT and m-ETF that place every op for itself, in nearly linear time.

`heft` and `m_etf` decide for groups; here groups are as small as they can be (`Problem.refined`),
and there may be 200,000 of them. Two things are counted that matter more for ops than for groups:
a tensor goes to a device once, however many ops there use it, and, in every second plan, a link
carries one tensor at a time. Ops are scheduled in O(log N) each, and every plan can be stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray
from placewright.placement import Placement
from placewright.placers._schedule import (
    Room,
    Tasks,
    emptied,
    find_candidates,
    find_light_inputs,
    room_of,
    scheduling_order,
    settle_light,
    settle_lights,
    take_room,
    tasks_of,
)
from placewright.placers.heft import find_gap, free_time, insert
from placewright.placers.single_device import accelerators
from placewright.problem import Problem
from placewright.simulator.compiling import compiled, compiled_part
from placewright.stopping import Stopped, never, run_compiled

_LOOK = 256
"""After so many ops a plan looks whether it shall stop."""


def op_heft(problem: Problem, stop: Callable[[], bool] = never) -> list[Placement]:
    """HEFT op by op: without limits of memory and with them, links free and links busy."""
    refined = problem.refined
    tasks, wires = tasks_of(refined), _wires_of(refined)
    everywhere = np.arange(problem.num_devices, dtype=np.int32)
    order = scheduling_order(refined, tasks, everywhere)
    memory = room_of(refined, everywhere)
    endless = np.full(problem.num_devices, np.iinfo(np.int64).max // 2, dtype=np.int64)
    plans = []
    for capacity in (memory.capacity, endless):
        for busy in (True, False):
            room = emptied(memory, capacity)
            plans.append(_planned(refined, _by_rank, stop, tasks, wires, room, order, busy))
    return list(dict.fromkeys(plans))


def op_m_etf(problem: Problem, stop: Callable[[], bool] = never) -> list[Placement]:
    """m-ETF op by op: always the op that can start first, within the devices' memory."""
    refined = problem.refined
    devices = accelerators(refined)
    tasks, wires = tasks_of(refined), _wires_of(refined)
    order = scheduling_order(refined, tasks, devices)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    plans = []
    for busy in (True, False):
        room = room_of(refined, devices)
        plans.append(_planned(refined, _by_start, stop, tasks, wires, room, position, busy))
    return list(dict.fromkeys(plans))


def bytes_needed(problem: Problem) -> int:
    """Memory that either of them takes at most: tables by op and device."""
    graph = problem.graph
    by_device = 8 * (graph.num_tensors + graph.num_ops) + 8 * 4 * graph.num_ops
    return by_device * problem.num_devices + 600 * graph.num_ops + 100 * graph.num_edges


def _planned(
    problem: Problem,
    schedule: Callable[..., IndexArray],
    stop: Callable[[], bool],
    *arguments: object,
) -> Placement:
    devices = run_compiled(lambda flag: schedule(*arguments, flag), stop)
    if devices[0] < 0:
        raise Stopped
    return Placement.of(problem, devices)


class _Wires(NamedTuple):
    """What ops send to each other, over which channels; E edges, I items, D devices."""

    item: IndexArray
    """[E] what an edge carries, in the order of `Tasks.in_src`: a tensor, or behind all tensors an
    op's completion."""
    items: int
    gap: FloatArray
    """[D, D] the part of the latency during which a route's channels are occupied."""
    offsets: IndexArray
    """[D * D + 1] channels of each route."""
    channels: IndexArray
    num_channels: int


def _wires_of(problem: Problem) -> _Wires:
    graph, routes = problem.graph, problem.cluster.routes
    item = np.where(graph.edge_tensor >= 0, graph.edge_tensor, graph.num_tensors + graph.edge_src)
    return _Wires(
        item=item.astype(np.int32),
        items=graph.num_tensors + graph.num_ops,
        gap=np.array(routes.gap_seconds),
        offsets=np.array(routes.offsets),
        channels=np.array(routes.channels),
        num_channels=len(routes.channel_names),
    )


class _Plan(NamedTuple):
    """What is decided so far."""

    device: IndexArray
    """[G] of each group, -1 while it is open."""
    done: BoolArray
    """[N]"""
    finish: FloatArray
    """[N]"""
    there: FloatArray
    """[I, D] when an item is on a device; infinite where it is not sent to."""
    channel_free: FloatArray
    """[channels]"""


@compiled_part
def _begun(t: Tasks, w: _Wires) -> _Plan:
    n, devices = t.op_seconds.shape
    return _Plan(
        np.full(len(t.group_seconds), -1, np.int32),
        np.zeros(n, np.bool_),
        np.zeros(n),
        np.full((w.items, devices), np.inf),
        np.zeros(w.num_channels),
    )


@compiled_part
def _sending(
    t: Tasks, w: _Wires, p: _Plan, edge: int, home: int, d: int, busy: bool
) -> tuple[float, float]:
    """When a transfer could begin and when it would be there, were it asked for now."""
    producer = t.in_src[edge]
    begin = p.finish[producer] if p.done[producer] else t.op_seconds[producer, home]
    if busy:
        route = home * len(t.latency) + d
        for k in range(w.offsets[route], w.offsets[route + 1]):
            begin = max(begin, p.channel_free[w.channels[k]])
    return begin, begin + t.latency[home, d] + t.in_bytes[edge] * t.per_byte[home, d]


@compiled_part
def _arrival(t: Tasks, w: _Wires, p: _Plan, op: int, d: int, busy: bool) -> float:
    """When the inputs of an op would all be on a device.

    Sources that are held back count as if they ran at the start of the step, on that very device as
    long as theirs is open.
    """
    arrival = 0.0
    for e in range(t.in_offsets[op], t.in_offsets[op + 1]):
        producer = t.in_src[e]
        home = p.device[t.group_of[producer]]
        if home < 0:
            continue
        if home == d:
            end = p.finish[producer] if p.done[producer] else t.op_seconds[producer, home]
        else:
            end = p.there[w.item[e], d]
            if end == np.inf:
                end = _sending(t, w, p, e, home, d, busy)[1]
        arrival = max(arrival, end)
    return arrival


@compiled_part
def _fetch(t: Tasks, w: _Wires, p: _Plan, op: int, d: int, busy: bool) -> float:
    """Sends what an op lacks on its device, and says when all of it is there."""
    arrival = 0.0
    for e in range(t.in_offsets[op], t.in_offsets[op + 1]):
        producer = t.in_src[e]
        home = p.device[t.group_of[producer]]
        if home == d:
            arrival = max(arrival, p.finish[producer])
            continue
        item = w.item[e]
        if p.there[item, d] == np.inf:
            begin, p.there[item, d] = _sending(t, w, p, e, home, d, busy)
            taken = begin + w.gap[home, d] + t.in_bytes[e] * t.per_byte[home, d]
            route = home * len(t.latency) + d
            for k in range(w.offsets[route], w.offsets[route + 1]):
                p.channel_free[w.channels[k]] = taken
        arrival = max(arrival, p.there[item, d])
    return arrival


@compiled
def _by_rank(
    t: Tasks, w: _Wires, room: Room, order: IntArray, busy: bool, stop: BoolArray
) -> IndexArray:
    """[G] device of each group, by HEFT; the first is -1 where it was stopped."""
    n, devices = t.op_seconds.shape
    slots = len(t.slot_device)
    p = _begun(t, w)
    gap_start, gap_end, gaps, shortest = free_time(t)
    candidate = np.zeros(devices, np.bool_)
    pending = np.zeros(n + 1, np.int64)
    found_for = np.full(n, -1, np.int64)

    for turn in range(2 * n):
        if turn % _LOOK == 0 and stop[0]:
            p.device[0] = -1
            return p.device
        op = order[turn % n]
        # Light sources that nothing asked for come last.
        if p.done[op] or (t.light[op] and turn < n):
            continue
        group = t.group_of[op]
        if p.device[group] < 0:
            find_candidates(room, group, candidate)
            best, least = -1, np.inf
            for slot in range(slots):
                d = t.slot_device[slot]
                if candidate[d]:
                    ready = _arrival(t, w, p, op, d, busy)
                    seconds = t.op_seconds[op, d]
                    at = find_gap(gap_start[slot], gap_end[slot], gaps[slot], ready, seconds)
                    # Ops that must stay with this one count too: else a small first op takes much
                    # work to a slow device.
                    end = max(gap_start[slot, at], ready) + t.group_seconds[group, d]
                    if end < least:
                        best, least = d, end
            p.device[group] = best
            take_room(room, group, best)
        count = find_light_inputs(t, op, p.done, pending, found_for)
        settle_lights(t, room, pending, count, p.device, candidate)
        pending[count] = op
        for k in range(count + 1):
            current = pending[k]
            home = p.device[t.group_of[current]]
            p.finish[current] = insert(
                t.slot_device, home, _fetch(t, w, p, current, home, busy),
                t.op_seconds[current, home], shortest[home], gap_start, gap_end, gaps,
            )  # fmt: skip
            p.done[current] = True
    return p.device


# --- earliest start first ------------------------------------------------------------------------


@compiled_part
def _push(
    keys: FloatArray, second: IntArray, ops: IntArray, size: int, key: float, tie: int, op: int
) -> None:
    """Into a binary heap of `size` entries, ordered by key, then by tie."""
    at = size
    while at > 0:
        up = (at - 1) // 2
        if keys[up] < key or (keys[up] == key and second[up] <= tie):
            break
        keys[at], second[at], ops[at] = keys[up], second[up], ops[up]
        at = up
    keys[at], second[at], ops[at] = key, tie, op


@compiled_part
def _pop(keys: FloatArray, second: IntArray, ops: IntArray, size: int) -> None:
    """Removes the first entry of a heap of `size` entries."""
    last = size - 1
    key, tie, op = keys[last], second[last], ops[last]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= last:
            break
        right = down + 1
        if right < last and (
            keys[right] < keys[down] or (keys[right] == keys[down] and second[right] < second[down])
        ):
            down = right
        if key < keys[down] or (key == keys[down] and tie <= second[down]):
            break
        keys[at], second[at], ops[at] = keys[down], second[down], ops[down]
        at = down
    keys[at], second[at], ops[at] = key, tie, op


class _Waiting(NamedTuple):
    """Ops that wait for no other op, for each device in two heaps: those whose inputs are there
    before the device is free, by rank, and the others by when their inputs are there."""

    keys: FloatArray
    """[2 * D, N]"""
    second: IntArray
    ops: IntArray
    sizes: IntArray
    """[2 * D]"""
    listed: BoolArray
    """[N, D] whether an op is in one of a device's heaps."""


@compiled_part
def _wait(q: _Waiting, d: int, free: float, ready: float, position: int, op: int) -> None:
    heap = 2 * d if ready <= free else 2 * d + 1
    key = float(position) if ready <= free else ready
    _push(q.keys[heap], q.second[heap], q.ops[heap], q.sizes[heap], key, position, op)
    q.sizes[heap] += 1


@compiled_part
def _drop_first(q: _Waiting, heap: int) -> None:
    _pop(q.keys[heap], q.second[heap], q.ops[heap], q.sizes[heap])
    q.sizes[heap] -= 1


@compiled_part
def _offer(
    t: Tasks, w: _Wires, room: Room, p: _Plan, q: _Waiting, free: FloatArray, position: IntArray,
    op: int, candidate: BoolArray, busy: bool,
) -> None:  # fmt: skip
    """Lists an op with the devices it may go to now, where it is not listed yet."""
    home = p.device[t.group_of[op]]
    if home < 0:
        find_candidates(room, t.group_of[op], candidate)
    for d in range(len(free)):
        if (d == home if home >= 0 else candidate[d]) and not q.listed[op, d]:
            q.listed[op, d] = True
            _wait(q, d, free[d], _arrival(t, w, p, op, d, busy), position[op], op)


@compiled_part
def _first(
    t: Tasks, w: _Wires, room: Room, p: _Plan, q: _Waiting, free: FloatArray, position: IntArray,
    d: int, candidate: BoolArray, busy: bool,
) -> tuple[int, float]:  # fmt: skip
    """The op that can start first on a device, and when; -1 for none.

    What is listed may be out of date: an op has been scheduled, its device is decided or full, or
    links have become busy. That is put right here, when it comes to the front.
    """
    ready_heap, late_heap = 2 * d, 2 * d + 1
    while True:
        while q.sizes[late_heap] and q.keys[late_heap, 0] <= free[d]:
            op = q.ops[late_heap, 0]
            _drop_first(q, late_heap)
            _push(
                q.keys[ready_heap], q.second[ready_heap], q.ops[ready_heap], q.sizes[ready_heap],
                float(position[op]), position[op], op,
            )  # fmt: skip
            q.sizes[ready_heap] += 1
        heap = ready_heap if q.sizes[ready_heap] else late_heap
        if not q.sizes[heap]:
            return -1, np.inf
        op = q.ops[heap, 0]
        if p.done[op]:
            _drop_first(q, heap)
            continue
        home = p.device[t.group_of[op]]
        allowed = home == d
        if home < 0:
            find_candidates(room, t.group_of[op], candidate)
            allowed = candidate[d]
        if not allowed:
            _drop_first(q, heap)
            q.listed[op, d] = False
            _offer(t, w, room, p, q, free, position, op, candidate, busy)
            continue
        ready = _arrival(t, w, p, op, d, busy)
        listed_for = free[d] if heap == ready_heap else q.keys[heap, 0]
        if ready > listed_for:
            _drop_first(q, heap)
            _wait(q, d, free[d], ready, position[op], op)
            continue
        return op, max(ready, free[d])


@compiled_part
def _occupy(
    t: Tasks, d: int, start: float, seconds: float, slot_free: FloatArray, free: FloatArray
) -> float:
    """Runs an op on the slot of a device that is free first; returns when it ends."""
    slot = -1
    for s in range(len(slot_free)):
        if t.slot_device[s] == d and (slot < 0 or slot_free[s] < slot_free[slot]):
            slot = s
    end = max(start, slot_free[slot]) + seconds
    slot_free[slot] = end
    free[d] = np.inf
    for s in range(len(slot_free)):
        if t.slot_device[s] == d:
            free[d] = min(free[d], slot_free[s])
    return float(end)


@compiled
def _by_start(
    t: Tasks, w: _Wires, room: Room, position: IntArray, busy: bool, stop: BoolArray
) -> IndexArray:
    """[G] device of each group, by ETF; the first is -1 where it was stopped.

    `position` [N] is the place of each op in the scheduling order, which decides between ops that
    can start at the same time.
    """
    n, devices = t.op_seconds.shape
    p = _begun(t, w)
    slot_free = np.zeros(len(t.slot_device))
    free = np.zeros(devices)
    candidate = np.zeros(devices, np.bool_)
    pending = np.zeros(n + 1, np.int64)
    found_for = np.full(n, -1, np.int64)
    q = _Waiting(
        np.zeros((2 * devices, n)), np.zeros((2 * devices, n), np.int64),
        np.zeros((2 * devices, n), np.int64), np.zeros(2 * devices, np.int64),
        np.zeros((n, devices), np.bool_),
    )  # fmt: skip
    missing = np.zeros(n, np.int64)
    for op in range(n):
        for e in range(t.in_offsets[op], t.in_offsets[op + 1]):
            missing[op] += not t.light[t.in_src[e]]
        if missing[op] == 0 and not t.light[op]:
            _offer(t, w, room, p, q, free, position, op, candidate, busy)

    turn = 0
    while True:
        turn += 1
        if turn % _LOOK == 0 and stop[0]:
            p.device[0] = -1
            return p.device
        op, home, start = -1, -1, np.inf
        for d in range(devices):
            first, begin = _first(t, w, room, p, q, free, position, d, candidate, busy)
            if first >= 0 and (
                begin < start or (begin == start and position[first] < position[op])
            ):
                op, home, start = first, d, begin
        if op < 0:
            break
        if p.device[t.group_of[op]] < 0:
            p.device[t.group_of[op]] = home
            take_room(room, t.group_of[op], home)
        count = find_light_inputs(t, op, p.done, pending, found_for)
        settle_lights(t, room, pending, count, p.device, candidate)
        for k in range(count):
            # They ran when their device had nothing else to do; their time is lost to it.
            light = pending[k]
            d = p.device[t.group_of[light]]
            p.finish[light] = _fetch(t, w, p, light, d, busy) + t.op_seconds[light, d]
            _occupy(t, d, 0.0, t.op_seconds[light, d], slot_free, free)
            p.done[light] = True
        ready = _fetch(t, w, p, op, home, busy)
        p.finish[op] = _occupy(t, home, ready, t.op_seconds[op, home], slot_free, free)
        p.done[op] = True
        for e in range(t.out_offsets[op], t.out_offsets[op + 1]):
            consumer = t.out_dst[e]
            missing[consumer] -= 1
            if missing[consumer] == 0 and not t.light[consumer]:
                _offer(t, w, room, p, q, free, position, consumer, candidate, busy)

    for op in range(n):  # light sources that nothing asked for
        settle_light(t, room, op, p.device, candidate)
    return p.device
