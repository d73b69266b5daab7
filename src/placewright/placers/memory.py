"""How much memory groups need, and moving groups away from devices that ran out of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from placewright.graph import FloatArray, Graph, IndexArray, IntArray
from placewright.measurement import Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.placers.group_graph import GroupGraph, group_graph
from placewright.problem import Problem

_MOMENTS = 16
"""How many moments of a step memory is estimated at, besides that of the peak."""


def group_bytes(problem: Problem) -> IntArray:
    """[G] the most memory each group needs on its device at any moment of the step.

    Groups need it at different moments, so the sum over a device's groups is on the safe side of
    what the device needs; `bytes_over_time` adds up.
    """
    return np.asarray(bytes_over_time(problem).max(axis=1), dtype=np.int64)


def bytes_over_time(problem: Problem) -> IntArray:
    """[G, T] memory each group needs at T moments of the step: variables and what is alive.

    When a tensor is alive is judged by a run on one device that takes ops as they become ready. It
    is counted for the group that uses it last: that is where it lies longest. A forward activation
    waits for the backward pass of its own group; the gradients of a variable, one per time step,
    wait on the variable's device until they are summed.
    """
    graph = problem.graph
    position = _running_order(graph)
    last = np.arange(graph.num_ops)[graph.tensor_producer]
    data = np.flatnonzero(graph.edge_tensor >= 0)
    # Ascending by the consumer's position, so that the last one is what stays.
    data = data[np.argsort(position[graph.edge_dst[data]], kind="stable")]
    last[graph.edge_tensor[data]] = graph.edge_dst[data]
    # The last use of a buffer is that of any tensor in it.
    shared = np.flatnonzero(graph.tensor_shares >= 0)
    shared = shared[np.argsort(position[last[shared]], kind="stable")]
    for tensor in shared.tolist():
        root = graph.tensor_shares[tensor]
        if position[last[tensor]] > position[last[root]]:
            last[root] = last[tensor]
    # A variable's own memory is counted as resident.
    owned = (graph.tensor_shares < 0) & (graph.resident_bytes[graph.tensor_producer] == 0)
    sizes = graph.tensor_bytes[owned]
    begin, end = position[graph.tensor_producer[owned]], position[last[owned]]
    holder = problem.grouping.group_of[last[owned]]

    alive = np.zeros(graph.num_ops + 1, dtype=np.int64)
    np.add.at(alive, begin, sizes)
    np.subtract.at(alive, end + 1, sizes)
    peak = int(np.cumsum(alive[:-1]).argmax())
    moments = [*((2 * np.arange(_MOMENTS) + 1) * graph.num_ops // (2 * _MOMENTS)), peak]
    result = np.repeat(problem.group_resident_bytes[:, None], len(moments), axis=1)
    for k, moment in enumerate(moments):
        there = (begin <= moment) & (moment <= end)
        np.add.at(result[:, k], holder[there], sizes[there])
    return result


def _running_order(graph: Graph) -> IntArray:
    """[N] when each op runs if one device takes them in the order in which they become ready."""
    missing = np.bincount(graph.edge_dst, minlength=graph.num_ops).tolist()
    consumers: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for src, dst in zip(graph.edge_src.tolist(), graph.edge_dst.tolist(), strict=True):
        consumers[src].append(dst)
    position = np.zeros(graph.num_ops, dtype=np.int64)
    ready = deque(op for op, count in enumerate(missing) if not count)
    turn = 0
    while ready:
        op = ready.popleft()
        position[op] = turn
        turn += 1
        for consumer in consumers[op]:
            missing[consumer] -= 1
            if not missing[consumer]:
                ready.append(consumer)
    return position


class Repairing(Placer):
    """Passes on what another placer proposes and repairs what runs out of memory.

    A repaired placement has moved groups from each device that overflowed to devices with room,
    those first that lose the least time per byte. It is proposed next, and repaired again if it
    still does not fit. Nothing is proposed twice.
    """

    def __init__(self, placer: Placer, rounds: int = 8) -> None:
        super().__init__(placer.problem)
        self.name = placer.name
        self.endless, self.share = placer.endless, placer.share
        self.notes = placer.notes
        self._placer = placer
        self._rounds = rounds
        """How often a proposal is repaired before giving it up."""
        self._round_of: dict[Placement, int] = {}
        """What was proposed, and after how many repairs."""
        self._repaired: deque[Placement] = deque()

    def ask(self, count: int) -> list[Placement]:
        placements: list[Placement] = []
        while self._repaired and len(placements) < count:
            placements.append(self._repaired.popleft())
        # A placer that draws at random repeats itself; one that only repeats itself has ended.
        for _ in range(100):
            if len(placements) == count:
                break
            proposed = self._placer.ask(count - len(placements))
            for placement in proposed:
                if placement not in self._round_of:
                    self._round_of[placement] = 0
                    placements.append(placement)
            if not proposed:
                break
        return placements

    def tell(self, trials: Sequence[Trial]) -> None:
        self._placer.tell(trials)
        for trial in trials:
            measurement = trial.measurement
            rounds = self._round_of.get(trial.placement, self._rounds)
            if (
                measurement.outcome is Outcome.OUT_OF_MEMORY
                and len(measurement.peak_bytes) == self.problem.num_devices
                and rounds < self._rounds
            ):
                peaks = np.array(measurement.peak_bytes, dtype=np.int64)
                repaired = repair(self.problem, trial.placement, peaks)
                if repaired not in self._round_of:
                    self._round_of[repaired] = rounds + 1
                    self._repaired.append(repaired)


def repair(problem: Problem, placement: Placement, peak_bytes: IntArray) -> Placement:
    """The placement with groups moved from devices whose peak exceeds their memory, as far as the
    others have room for them; the same placement where nothing can be moved."""
    memory = np.array([device.memory_bytes for device in problem.cluster.devices], dtype=np.int64)
    full = peak_bytes > memory
    room = np.where(full, -np.inf, memory - peak_bytes)
    needed = bytes_over_time(problem)
    transfers = group_graph(problem)
    devices = placement.devices.copy()
    for device in np.flatnonzero(full):
        # What counts is the moment at which this device needs the most. That it did need this much
        # tells by how much the estimate is off.
        on_device = needed[devices == device].sum(axis=0)
        moment = int(on_device.argmax())
        off_by = np.clip(peak_bytes[device] / max(int(on_device[moment]), 1), 0.25, 4.0)
        freed = needed[:, moment] * off_by
        taken = needed.max(axis=1) * off_by
        excess = 1.1 * (peak_bytes[device] - memory[device])
        while excess > 0:
            options = problem.allowed & (taken[:, None] <= room)
            options[(devices != device) | (freed <= 0)] = False
            if not options.any():
                break
            slowdown = _slowdown(problem, transfers, devices)
            price = np.where(options, slowdown / np.maximum(freed, 1.0)[:, None], np.inf)
            group, target = divmod(int(price.argmin()), problem.num_devices)
            devices[group] = target
            room[target] -= taken[group]
            excess -= freed[group]
    return Placement.of(problem, devices)


def _slowdown(problem: Problem, transfers: GroupGraph, devices: IndexArray) -> FloatArray:
    """[G, D] seconds that are lost if a group moves to a device: its own and its transfers'."""
    routes = problem.cluster.routes
    groups = np.arange(problem.num_groups)
    owner = np.repeat(groups, np.diff(transfers.offsets))
    other = devices[transfers.neighbour]
    seconds = problem.group_seconds.T.copy()
    for d in range(problem.num_devices):
        transfer = transfers.transfers * routes.latency_seconds[d, other]
        transfer += transfers.bytes * routes.seconds_per_byte[d, other]
        seconds[:, d] += np.bincount(owner, weights=transfer, minlength=problem.num_groups)
    return np.asarray(seconds - seconds[groups, devices][:, None])
