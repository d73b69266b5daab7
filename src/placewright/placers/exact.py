"""The best placement there is, with a proof, for problems small enough.

A space of a few thousand placements is tried out: each one is proposed, and once all were told the
best is optimal for the evaluator itself. Larger problems, up to a few hundred ops, are solved by
CP-SAT (OR-Tools), which chooses devices and also the order on every device and link.

An evaluator serves ops and transfers in the order in which they become ready. CP-SAT may choose any
order, so its optimum is a lower bound on what any placement takes: with the placement it proposes,
the truth lies between the two. So it is where the evaluator knows more than CP-SAT, which leaves
out contention, what devices of one chip share, and that ops must be issued.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from placewright.errors import MissingExtraError
from placewright.graph import Graph, IndexArray
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.problem import Problem

logger = logging.getLogger(__name__)

_MIN_TICKS = 10**6
"""Time is counted in whole ticks, a power of ten of seconds: at least this many to a step, so that
rounding does not show, ..."""
_MAX_TICKS = 10**11
"""... but no more than about this many to the longest schedule: CP-SAT sums in 64 bits."""

_MEMORY_UNIT = 1 << 10
"""Memory is counted in KiB: sums of bytes come too close to what CP-SAT's integers can hold."""


_GRACE_SECONDS = 60.0
"""What starting CP-SAT's process and building its model may take on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class ExactConfig:
    """Limits within which `exact` tries to be exact."""

    max_placements: int = 20_000
    """Spaces up to this size are tried out completely."""
    max_ops: int = 150
    """Graphs with more ops are not given to CP-SAT, which would hardly improve on where it starts
    from in a minute. With a few dozen ops it proves the optimum."""
    max_seconds: float = 60.0
    """Wall-clock that solving may take. A search it cuts short can end anywhere, so results are
    repeatable only where `max_work` or the proof comes first."""
    max_work: float = 60.0
    """Limit in CP-SAT's deterministic time, about a second a unit, but the same everywhere."""
    workers: int = 1
    """Threads of CP-SAT. Several find more in the same time, but not the same each time."""


class Exact(Placer):
    """Tries out tiny spaces; gives small problems to CP-SAT; leaves large ones alone."""

    name = "exact"

    def __init__(
        self, problem: Problem, config: ExactConfig | None = None, *, seed: int = 0
    ) -> None:
        super().__init__(problem)
        self.config = config or ExactConfig()
        self.seed = seed
        self.proven = False
        """Whether the search is complete: nothing is faster than the noted bound, and (for
        CP-SAT: with its own order of ops) a proposed placement reaches it."""
        self.notes.lower_bound_seconds = quick_bound_seconds(problem)
        self._told: set[bytes] = set()
        self._best: Trial | None = None
        self._count = count_placements(problem)
        self._rest: Iterator[Placement] | None = None
        if self._count <= self.config.max_placements:
            self._rest = (Placement.of(problem, devices) for devices in every_placement(problem))
        elif problem.graph.num_ops > self.config.max_ops:
            self.notes.why_not = (
                f"the graph has {problem.graph.num_ops} ops, exact takes up to "
                f"{self.config.max_ops}, or problems with up to {self.config.max_placements:,} "
                "placements within this budget"
            )
            self._rest = iter(())

    def ask(self, count: int) -> list[Placement]:
        if self._rest is None:
            self._rest = iter(self._solve())
        new = (p for p in self._rest if p.devices.tobytes() not in self._told)
        return list(itertools.islice(new, count))

    def tell(self, trials: Sequence[Trial]) -> None:
        groups = np.arange(self.problem.num_groups)
        for trial in trials:
            devices = trial.placement.devices
            if not self.problem.allowed[groups, devices].all():
                continue
            self._told.add(devices.tobytes())
            if self._best is None or (
                trial.measurement.mean_seconds < self._best.measurement.mean_seconds
            ):
                self._best = trial
        if len(self._told) == self._count and self._best is not None:
            self.proven = True
            if self._best.measurement.ok:
                self.notes.lower_bound_seconds = self._best.measurement.mean_seconds
            else:
                self.notes.why_not = f"none of all {self._count} placements runs"

    def _solve(self) -> list[Placement]:
        """Placements CP-SAT found, the best first."""
        deadline = time.monotonic() + self.config.max_seconds
        machine = Machine(self.problem)
        start = self._starting_point(machine)
        found = self._solve_apart(start, deadline)
        if found is None:
            return []
        if found.infeasible:
            self.notes.why_not = "no placement: the variables do not fit the devices' memory"
            self.proven = True
            return []
        # A little less, for the small change that `Machine.ticks` does not count.
        bound = found.bound * machine.tick_seconds * (1 - 1e-9)
        self.notes.lower_bound_seconds = max(self.notes.lower_bound_seconds, bound)
        # CP-SAT knows nothing of contention, nor of what devices of one chip share, so what is
        # optimal for it is then a bound, no more. It does not wait for ops to be issued either.
        cluster = self.problem.cluster
        self.proven = found.optimal and not (
            cluster.contention
            or cluster.shared_chips
            or cluster.routes.relayed.any()
            or cluster.in_order
            or self.problem.issue_seconds.any()
        )
        placements = found.placements or ([start] if start is not None else [])
        if not placements:
            self.notes.why_not = f"CP-SAT found no placement in {self.config.max_seconds:g} s"
        logger.info(
            "exact: %d placements, bound %.6g s%s",
            len(placements),
            self.notes.lower_bound_seconds,
            ", proven" if self.proven else "",
        )
        return [Placement.of(self.problem, devices) for devices in placements]

    def _solve_apart(self, start: list[int] | None, deadline: float) -> Found | None:
        """Runs CP-SAT in a process of its own; None when that fails, with `why_not` set.

        OR-Tools and TensorFlow each bring their own copies of the same C++ libraries, and solving
        in a process that has TensorFlow loaded crashes it.
        """
        if importlib.util.find_spec("ortools") is None:
            raise MissingExtraError("the exact placer", "placers")
        with tempfile.TemporaryDirectory(prefix="placewright-") as folder:
            self.problem.save(Path(folder) / "problem.json")
            request: dict[str, Any] = {
                "parent": os.getpid(),
                "start": start,
                "seconds": max(0.01, deadline - time.monotonic()),
                "work": self.config.max_work,
                "workers": self.config.workers,
                "seed": self.seed,
            }
            try:
                result = subprocess.run(
                    # -P: a file of the user's in this directory must not stand in for a library.
                    [sys.executable, "-P", "-m", "placewright.placers.cp_sat",
                     f"{folder}/problem.json"],
                    input=json.dumps(request),
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=request["seconds"] + _GRACE_SECONDS,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                self.notes.why_not = "CP-SAT did not keep to its time"
        if not self.notes.why_not and result.returncode != 0:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            self.notes.why_not = f"CP-SAT ended with code {result.returncode}: {last}"
        if self.notes.why_not:
            logger.warning("exact: %s", self.notes.why_not)
            return None
        answer = json.loads(result.stdout)
        bound = math.inf if answer["bound"] is None else answer["bound"]
        return Found(answer["placements"], bound, answer["optimal"], answer["infeasible"])

    def _starting_point(self, machine: Machine) -> list[int] | None:
        """The best placement told, or the best of those that keep to one device where they can."""
        problem = self.problem
        if self._best is not None and self._best.measurement.ok:
            told = self._best.placement.devices.tolist()
            if machine.fits(told):
                return list(told)
        fastest = np.where(problem.allowed, problem.group_seconds.T, np.inf).argmin(axis=1)
        candidates = [fastest.tolist()] + [
            np.where(problem.allowed[:, d], d, fastest).tolist() for d in range(problem.num_devices)
        ]
        fitting = [devices for devices in candidates if machine.fits(devices)]
        return min(fitting, key=lambda devices: machine.schedule(devices).end, default=None)


def count_placements(problem: Problem) -> int:
    """Number of placements that are allowed."""
    return math.prod(problem.allowed.sum(axis=1).tolist())


def every_placement(problem: Problem) -> Iterator[tuple[int, ...]]:
    """The devices of each allowed placement, in lexicographic order."""
    return itertools.product(*(np.flatnonzero(row).tolist() for row in problem.allowed))


def quick_bound_seconds(problem: Problem) -> float:
    """A lower bound on the step time that takes no search.

    The longest path with every op on its fastest device and transfers free; or, when larger, all
    the work spread evenly over all slots.
    """
    graph = problem.graph
    usable = problem.allowed.T[:, problem.grouping.group_of]
    fastest = np.where(usable, problem.busy_seconds, np.inf).min(axis=0)
    seconds: list[float] = fastest.tolist()
    ends = list(seconds)
    # Edges are sorted by consumer and ops topologically, so a producer's end is final when read.
    for src, dst in zip(graph.edge_src.tolist(), graph.edge_dst.tolist(), strict=True):
        ends[dst] = max(ends[dst], ends[src] + seconds[dst])
    slots = sum(device.kind.slots for device in problem.cluster.devices)
    # Sums in another order than the evaluator's may differ in the last digits.
    return max(max(ends), math.fsum(seconds) / slots) * (1 - 1e-9)


# --- the machine in whole numbers ----------------------------------------------------------------


class Found(NamedTuple):
    """What CP-SAT answers."""

    placements: list[list[int]]
    """The best first."""
    bound: float
    """In ticks; infinite when there is no placement at all."""
    optimal: bool
    infeasible: bool


class _Item(NamedTuple):
    """Something that is sent: a tensor, or the news that an op has ended (control edge)."""

    producer: int
    bytes: int
    consumers: tuple[int, ...]
    """Ops of other groups than the producer's."""


class Schedule(NamedTuple):
    end: int
    op_start: list[int]
    item_start: dict[tuple[int, int], int]
    """(item, destination device) -> start of the transfer."""


class Machine:
    """The problem in ticks, as the evaluators see it.

    Each device runs as many ops at a time as it has slots. A tensor is sent once to each other
    device that needs it, however many ops read it there, after its producer ended; that occupies
    all channels of the route for the gap and its bytes. A control edge sends nothing but costs the
    latency.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cluster = problem.cluster
        self.devices = range(problem.num_devices)
        self.group_of: list[int] = problem.grouping.group_of.tolist()
        self.choices = [np.flatnonzero(row).tolist() for row in problem.allowed]
        self.slots = [device.kind.slots for device in cluster.devices]
        self.items = _items(problem.graph, problem.grouping.group_of)
        routes = cluster.routes
        self.latency = routes.latency_seconds.tolist()
        self.gap = routes.gap_seconds.tolist()
        self.per_byte = routes.seconds_per_byte.tolist()
        # Nothing ever side by side: some schedule of any placement is at least as short.
        self.serial_seconds = self._serial_seconds()
        tick = max(quick_bound_seconds(problem) / _MIN_TICKS, self.serial_seconds / _MAX_TICKS)
        self.tick_seconds = 10.0 ** math.floor(math.log10(tick)) if tick > 0 else 1.0
        # [D][N]; where an op cannot run its time is not used.
        finite = np.where(np.isfinite(problem.busy_seconds), problem.busy_seconds, 0.0)
        self.op_ticks = [[self.ticks(s) for s in row] for row in finite.tolist()]
        self.channels = [
            [
                routes.channels[routes.offsets[i] : routes.offsets[i + 1]].tolist()
                if not routes.relayed.flat[i]
                else []  # one after another: to leave them out keeps the bound a bound
                for i in range(s * len(self.devices), (s + 1) * len(self.devices))
            ]
            for s in self.devices
        ]
        self.inputs: list[list[int]] = [[] for _ in range(problem.graph.num_ops)]
        for i, item in enumerate(self.items):
            for op in item.consumers:
                self.inputs[op].append(i)
        # Rounded so that what fits in bytes also fits in KiB.
        self.resident = [b // _MEMORY_UNIT for b in problem.group_resident_bytes.tolist()]
        self.memory = [-(-device.memory_bytes // _MEMORY_UNIT) for device in cluster.devices]

    def _serial_seconds(self) -> float:
        usable = self.problem.allowed.T[:, self.problem.grouping.group_of]
        ops = np.where(usable, self.problem.busy_seconds, 0.0).max(axis=0).sum()
        routes = self.problem.cluster.routes
        to_all = (len(self.devices) - 1) * sum(
            routes.latency_seconds.max() + item.bytes * routes.seconds_per_byte.max()
            for item in self.items
        )
        return float(ops + to_all)

    def ticks(self, seconds: float) -> int:
        """Rounded down: with all durations rounded down, every schedule of the true machine, pulled
        to the left, is one of this machine, so a bound for this one holds for the true one.

        A hundred-millionth of a tick is forgiven, so that 3 ms is 3,000 us and not 2,999.
        """
        return math.floor(seconds / self.tick_seconds + 1e-8)

    def transfer_ticks(self, item: int, src: int, dst: int) -> int:
        return self.ticks(self.latency[src][dst] + self.items[item].bytes * self.per_byte[src][dst])

    def occupied_ticks(self, item: int, src: int, dst: int) -> int:
        """How long the channels are kept from the next transfer."""
        return self.ticks(self.gap[src][dst] + self.items[item].bytes * self.per_byte[src][dst])

    def fits(self, devices: Sequence[int]) -> bool:
        """Whether variables and optimizer state fit."""
        used = [0] * len(self.devices)
        for group, device in enumerate(devices):
            used[device] += self.resident[group]
        return all(u <= m for u, m in zip(used, self.memory, strict=True))

    def schedule(self, devices: Sequence[int]) -> Schedule:
        """A schedule of a placement: ops in topological order, each as early as it can start."""
        slot_free = [[0] * slots for slots in self.slots]
        channel_free = [0] * len(self.problem.cluster.routes.channel_names)
        op_start: list[int] = []
        op_end: list[int] = []
        item_start: dict[tuple[int, int], int] = {}
        arrival: dict[tuple[int, int], int] = {}
        before = predecessors(self.problem.graph)
        for op, group in enumerate(self.group_of):
            d = devices[group]
            ready = max((op_end[src] for src in before[op]), default=0)
            for i in self.inputs[op]:
                src = devices[self.group_of[self.items[i].producer]]
                if src == d:
                    continue
                if (i, d) not in arrival:
                    route = self.channels[src][d]
                    start = max(
                        op_end[self.items[i].producer], *(channel_free[c] for c in route), 0
                    )
                    arrival[i, d] = start + self.transfer_ticks(i, src, d)
                    item_start[i, d] = start
                    for c in route:
                        channel_free[c] = start + self.occupied_ticks(i, src, d)
                ready = max(ready, arrival[i, d])
            slot = slot_free[d].index(min(slot_free[d]))
            op_start.append(max(ready, slot_free[d][slot]))
            op_end.append(op_start[op] + self.op_ticks[d][op])
            slot_free[d][slot] = op_end[op]
        return Schedule(max(op_end), op_start, item_start)

    def interchangeable(self) -> list[list[int]]:
        """Sets of devices any two of which can change places without anything else changing."""
        sets: list[list[int]] = []
        for device in self.devices:
            for members in sets:
                if all(self._can_swap(device, member) for member in members):
                    members.append(device)
                    break
            else:
                sets.append([device])
        return [members for members in sets if len(members) > 1]

    def _can_swap(self, a: int, b: int) -> bool:
        cluster = self.problem.cluster
        first, second = cluster.devices[a], cluster.devices[b]
        if (first.kind, first.memory_bytes) != (second.kind, second.memory_bytes):
            return False
        if not np.array_equal(self.problem.allowed[:, a], self.problem.allowed[:, b]):
            return False
        swapped = [b if d == a else a if d == b else d for d in self.devices]
        # Channels must change places along with the devices, and do so one to one.
        image: dict[int, int] = {}
        for s in self.devices:
            for d in self.devices:
                s2, d2 = swapped[s], swapped[d]
                if self._route(s, d) != self._route(s2, d2):
                    return False
                for c, c2 in zip(self.channels[s][d], self.channels[s2][d2], strict=True):
                    if image.setdefault(c, c2) != c2:
                        return False
        return len(set(image.values())) == len(image)

    def _route(self, s: int, d: int) -> tuple[float, float, float, int]:
        return (
            self.latency[s][d], self.gap[s][d], self.per_byte[s][d], len(self.channels[s][d]),
        )  # fmt: skip


def _items(graph: Graph, group_of: IndexArray) -> list[_Item]:
    """What may have to be sent, ordered by producer."""
    consumers: dict[tuple[int, int], list[int]] = {}
    edges = list(
        zip(
            graph.edge_src.tolist(), graph.edge_dst.tolist(), graph.edge_tensor.tolist(),
            strict=True,
        )
    )  # fmt: skip
    carried = {(src, dst) for src, dst, tensor in edges if tensor >= 0}
    of = group_of.tolist()
    for src, dst, tensor in edges:
        # Who gets a tensor of an op knows that it has ended.
        told_anyway = tensor < 0 and (src, dst) in carried
        if of[src] != of[dst] and not told_anyway:
            consumers.setdefault((src, tensor), []).append(dst)
    return [
        _Item(src, int(graph.tensor_bytes[tensor]) if tensor >= 0 else 0, tuple(dict.fromkeys(ops)))
        for (src, tensor), ops in sorted(consumers.items())
    ]


def predecessors(graph: Graph) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for src, dst in zip(graph.edge_src.tolist(), graph.edge_dst.tolist(), strict=True):
        before[dst].append(src)
    return before
