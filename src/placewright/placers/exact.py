"""The best placement there is, with a proof, for problems small enough.

A space of a few thousand placements is tried out: each one is proposed, and once all were told the
best is optimal for the evaluator itself. Larger problems, up to a few hundred ops, are solved by
CP-SAT (OR-Tools), which chooses devices and also the order on every device and link.

An evaluator serves ops and transfers in the order in which they become ready. CP-SAT may choose any
order, so its optimum is a lower bound on what any placement takes: with the placement it proposes,
the truth lies between the two.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from placewright.errors import MissingExtraError
from placewright.graph import Graph, IndexArray
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.problem import Problem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_log = logging.getLogger(__name__)

_TICKS = 10**6
"""Time is counted in whole ticks, a power of ten of seconds, at least this many to a step."""

_MEMORY_UNIT = 1 << 10
"""Memory is counted in KiB: sums of bytes come too close to what CP-SAT's integers can hold."""


@dataclass(frozen=True, kw_only=True)
class ExactConfig:
    """Limits within which `exact` tries to be exact."""

    max_placements: int = 20_000
    """Spaces up to this size are tried out completely."""
    max_ops: int = 300
    """Graphs with more ops are not given to CP-SAT: the model would not be solved in time."""
    max_seconds: float = 60.0
    """Wall-clock that solving may take. A search it cuts short can end anywhere, so results are
    repeatable only where `max_work` or the proof comes first."""
    max_work: float = 60.0
    """Limit in CP-SAT's deterministic time, about a second a unit, but the same everywhere."""
    workers: int = 1
    """Threads of CP-SAT. They don't change what is found, only how soon."""


class Exact(Placer):
    """Tries out tiny spaces; gives small problems to CP-SAT; leaves large ones alone."""

    name = "exact"

    def __init__(
        self, problem: Problem, config: ExactConfig | None = None, *, seed: int = 0
    ) -> None:
        super().__init__(problem)
        self.config = config or ExactConfig()
        self.seed = seed
        self.why_not = ""
        """Why there is nothing to propose, in one line; empty when there is."""
        self.proven = False
        """Whether the search is complete: nothing is faster than `lower_bound_seconds`, and (for
        CP-SAT: with its own order of ops) a proposed placement reaches it."""
        self.lower_bound_seconds = quick_bound_seconds(problem)
        """No placement's step takes less."""
        self._told: set[bytes] = set()
        self._best: Trial | None = None
        self._count = count_placements(problem)
        self._rest: Iterator[Placement] | None = None
        if self._count <= self.config.max_placements:
            self._rest = (Placement.of(problem, devices) for devices in every_placement(problem))
        elif problem.graph.num_ops > self.config.max_ops:
            self.why_not = (
                f"the graph has {problem.graph.num_ops} ops, exact takes up to "
                f"{self.config.max_ops}, or up to {self.config.max_placements:,} placements"
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
            self.lower_bound_seconds = self._best.measurement.mean_seconds

    def _solve(self) -> list[Placement]:
        """Placements CP-SAT found, the best first."""
        deadline = time.monotonic() + self.config.max_seconds
        machine = _Machine(self.problem)
        start = self._starting_point(machine)
        model = _Model(machine, start)
        found = model.solve(self.config, self.seed, deadline)
        if found.infeasible:
            self.why_not = "no placement: the variables do not fit the devices' memory"
            self.proven = True
            self.lower_bound_seconds = math.inf
            return []
        # A millionth of a tick for each rounding; see `_Machine.ticks`.
        bound = found.bound * machine.tick_seconds * (1 - 1e-9)
        self.lower_bound_seconds = max(self.lower_bound_seconds, bound)
        self.proven = found.optimal
        if not found.placements:
            self.why_not = f"CP-SAT found no placement in {self.config.max_seconds:g} s"
        _log.info(
            "exact: %d placements, bound %.6g s%s",
            len(found.placements),
            self.lower_bound_seconds,
            ", proven" if self.proven else "",
        )
        return [Placement.of(self.problem, devices) for devices in found.placements]

    def _starting_point(self, machine: _Machine) -> list[int] | None:
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
    fastest = np.where(usable, problem.op_seconds, np.inf).min(axis=0)
    end = fastest.copy()
    # Edges are sorted by consumer and ops topologically, so a producer's end is final when read.
    seconds = fastest.tolist()
    ends = end.tolist()
    for src, dst in zip(graph.edge_src.tolist(), graph.edge_dst.tolist(), strict=True):
        ends[dst] = max(ends[dst], ends[src] + seconds[dst])
    slots = sum(device.kind.slots for device in problem.cluster.devices)
    # Sums in another order than the evaluator's may differ in the last digits.
    return max(max(ends), math.fsum(seconds) / slots) * (1 - 1e-9)


# --- the machine in whole numbers ----------------------------------------------------------------


class _Item(NamedTuple):
    """Something that is sent: a tensor, or the news that an op has ended (control edge)."""

    producer: int
    bytes: int
    consumers: tuple[int, ...]
    """Ops of other groups than the producer's."""


class _Schedule(NamedTuple):
    end: int
    op_start: list[int]
    item_start: dict[tuple[int, int], int]
    """(item, destination device) -> start of the transfer."""


class _Machine:
    """The problem in ticks, as the evaluators see it.

    Each device runs as many ops at a time as it has slots. A tensor is sent once to each other
    device that needs it, however many ops read it there, after its producer ended; that occupies
    all channels of the route. A control edge sends nothing but costs the latency.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cluster = problem.cluster
        self.devices = range(problem.num_devices)
        self.group_of: list[int] = problem.grouping.group_of.tolist()
        self.choices = [np.flatnonzero(row).tolist() for row in problem.allowed]
        self.slots = [device.kind.slots for device in cluster.devices]
        self.items = _items(problem.graph, problem.grouping.group_of)
        self.tick_seconds = _tick_seconds(problem, self.items)
        # [D][N]; where an op cannot run its time is not used.
        finite = np.where(np.isfinite(problem.op_seconds), problem.op_seconds, 0.0)
        self.op_ticks = [[self.ticks(s) for s in row] for row in finite.tolist()]
        routes = cluster.routes
        self.latency = routes.latency_seconds.tolist()
        self.per_byte = routes.seconds_per_byte.tolist()
        self.channels = [
            [
                routes.channels[routes.offsets[i] : routes.offsets[i + 1]].tolist()
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

    def ticks(self, seconds: float) -> int:
        """Rounded down: with all durations rounded down, every schedule of the true machine, pulled
        to the left, is one of this machine, so a bound for this one holds for the true one.

        A hundred-millionth of a tick is forgiven, so that 3 ms is 3,000 us and not 2,999.
        """
        return math.floor(seconds / self.tick_seconds + 1e-8)

    def transfer_ticks(self, item: int, src: int, dst: int) -> int:
        return self.ticks(
            self.latency[src][dst] + self.items[item].bytes * self.per_byte[src][dst]
        )

    def fits(self, devices: Sequence[int]) -> bool:
        """Whether variables and optimizer state fit."""
        used = [0] * len(self.devices)
        for group, device in enumerate(devices):
            used[device] += self.resident[group]
        return all(u <= m for u, m in zip(used, self.memory, strict=True))

    def schedule(self, devices: Sequence[int]) -> _Schedule:
        """A schedule of a placement: ops in topological order, each as early as it can start."""
        slot_free = [[0] * slots for slots in self.slots]
        channel_free = [0] * len(self.problem.cluster.routes.channel_names)
        op_start: list[int] = []
        op_end: list[int] = []
        item_start: dict[tuple[int, int], int] = {}
        arrival: dict[tuple[int, int], int] = {}
        before = _predecessors(self.problem.graph)
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
                        channel_free[c] = arrival[i, d]
                ready = max(ready, arrival[i, d])
            slot = slot_free[d].index(min(slot_free[d]))
            op_start.append(max(ready, slot_free[d][slot]))
            op_end.append(op_start[op] + self.op_ticks[d][op])
            slot_free[d][slot] = op_end[op]
        return _Schedule(max(op_end), op_start, item_start)

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
                if (self.latency[s][d], self.per_byte[s][d], len(self.channels[s][d])) != (
                    self.latency[s2][d2],
                    self.per_byte[s2][d2],
                    len(self.channels[s2][d2]),
                ):
                    return False
                for c, c2 in zip(self.channels[s][d], self.channels[s2][d2], strict=True):
                    if image.setdefault(c, c2) != c2:
                        return False
        return len(set(image.values())) == len(image)


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


def _predecessors(graph: Graph) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for src, dst in zip(graph.edge_src.tolist(), graph.edge_dst.tolist(), strict=True):
        before[dst].append(src)
    return before


def _tick_seconds(problem: Problem, items: Sequence[_Item]) -> float:
    """The largest power of ten of seconds that is fine enough for the shortest step there can be"""
    seconds = quick_bound_seconds(problem)
    if seconds <= 0:
        # Only transfers take time, or nothing does.
        routes = problem.cluster.routes
        size = max((item.bytes for item in items), default=0)
        seconds = float(np.max(routes.latency_seconds + size * routes.seconds_per_byte)) or 1.0
    return float(10.0 ** math.floor(math.log10(seconds / _TICKS)))


# --- CP-SAT --------------------------------------------------------------------------------------


class _Found(NamedTuple):
    placements: list[list[int]]
    """The best first."""
    bound: float
    """In ticks."""
    optimal: bool
    infeasible: bool


class _Model:
    """Devices, starts of ops and starts of transfers as variables of one CP-SAT model."""

    def __init__(self, machine: _Machine, start: list[int] | None) -> None:
        try:
            from ortools.sat.python import cp_model
        except ModuleNotFoundError:
            raise MissingExtraError("the exact placer", "placers") from None
        self._api = cp_model
        self._machine = machine
        self._model = cp_model.CpModel()
        self._classes = machine.interchangeable()
        self._start = start
        if start is not None:
            start = _relabelled(start, self._classes)
            schedule = machine.schedule(start)
            self._horizon = schedule.end
        else:
            self._horizon = self._one_after_another()
        # On each (group, device): whether the group is there.
        self._on: dict[tuple[int, int], cp_model.IntVar] = {}
        self._op_start: list[cp_model.IntVar] = []
        self._op_end: list[Any] = []
        self._item_start: dict[tuple[int, int], cp_model.IntVar] = {}
        self._device_use: list[list[cp_model.IntervalVar]] = [[] for _ in machine.devices]
        self._channel_use: dict[int, list[tuple[cp_model.IntervalVar, Any]]] = {}
        self._makespan = self._model.new_int_var(0, self._horizon, "makespan")
        self._place()
        self._run_ops()
        self._send_items()
        self._share_resources()
        self._break_symmetry()
        self._model.minimize(self._makespan)
        if start is not None:
            self._hint(start, schedule)

    def _one_after_another(self) -> int:
        """An upper bound on some schedule of any placement: nothing ever runs side by side."""
        machine = self._machine
        ops = sum(
            max(machine.op_ticks[d][op] for d in machine.choices[group])
            for op, group in enumerate(machine.group_of)
        )
        items = sum(
            max(machine.transfer_ticks(i, s, d) for s in machine.devices if s != d)
            for i in range(len(machine.items))
            for d in machine.devices
            if len(machine.devices) > 1
        )
        return ops + items

    def _place(self) -> None:
        machine, model = self._machine, self._model
        for group, devices in enumerate(machine.choices):
            for d in devices:
                self._on[group, d] = model.new_bool_var(f"g{group}@{d}")
            model.add_exactly_one(self._on[group, d] for d in devices)
        for d in machine.devices:
            here = [(g, on) for (g, device), on in self._on.items() if device == d]
            if sum(machine.resident[g] for g, _ in here) > machine.memory[d]:
                model.add(sum(machine.resident[g] * on for g, on in here) <= machine.memory[d])

    def _run_ops(self) -> None:
        machine, model = self._machine, self._model
        earliest, latest = self._windows()
        for op, group in enumerate(machine.group_of):
            start = model.new_int_var(earliest[op], max(earliest[op], latest[op]), f"op{op}")
            length = sum(
                machine.op_ticks[d][op] * self._on[group, d] for d in machine.choices[group]
            )
            self._op_start.append(start)
            self._op_end.append(start + length)
            for d in machine.choices[group]:
                interval = model.new_optional_fixed_size_interval_var(
                    start, machine.op_ticks[d][op], self._on[group, d], f"op{op}@{d}"
                )
                self._device_use[d].append(interval)
        has_consumer = set()
        for op, sources in enumerate(_predecessors(machine.problem.graph)):
            for src in dict.fromkeys(sources):
                has_consumer.add(src)
                model.add(self._op_start[op] >= self._op_end[src])
        for op, end in enumerate(self._op_end):
            if op not in has_consumer:
                model.add(self._makespan >= end)

    def _windows(self) -> tuple[list[int], list[int]]:
        """Earliest and latest start of each op that the longest paths leave."""
        machine = self._machine
        before = _predecessors(machine.problem.graph)
        shortest = [
            min(machine.op_ticks[d][op] for d in machine.choices[group])
            for op, group in enumerate(machine.group_of)
        ]
        earliest = [0] * len(before)
        latest = [self._horizon - ticks for ticks in shortest]
        for op, sources in enumerate(before):
            earliest[op] = max((earliest[s] + shortest[s] for s in sources), default=0)
        for op in range(len(before) - 1, -1, -1):
            for src in before[op]:
                latest[src] = min(latest[src], latest[op] - shortest[src])
        return earliest, latest

    def _send_items(self) -> None:
        machine, model = self._machine, self._model
        for i, item in enumerate(machine.items):
            home = machine.group_of[item.producer]
            readers: dict[int, list[int]] = {}
            for op in item.consumers:
                readers.setdefault(machine.group_of[op], []).append(op)
            for d in machine.devices:
                groups = [g for g in readers if (g, d) in self._on]
                sources = [s for s in machine.choices[home] if s != d]
                if not groups or not sources:
                    continue
                start = model.new_int_var(0, self._horizon, f"item{i}>{d}")
                self._item_start[i, d] = start
                model.add(start >= self._op_end[item.producer])
                here = [self._on[g, d] for g in groups]
                sent = [self._send(i, s, d, here) for s in sources]
                arrival = start + sum(ticks * self._on[home, s] for s, ticks in zip(sources, sent, strict=True))
                away = [self._on[home, d].negated()] if (home, d) in self._on else []
                for g in groups:
                    for op in readers[g]:
                        model.add(self._op_start[op] >= arrival).only_enforce_if(
                            [self._on[g, d], *away]
                        )

    def _send(self, i: int, s: int, d: int, readers: list[Any]) -> int:
        """The transfer of item `i` from `s` to `d`; it takes place when somebody is there to read.

        Nothing forbids it where nobody reads: that never helps, so the optimum is the same.
        """
        machine, model = self._machine, self._model
        ticks = machine.transfer_ticks(i, s, d)
        if not ticks or not machine.channels[s][d]:
            return ticks
        source = self._on[machine.group_of[machine.items[i].producer], s]
        sent = model.new_bool_var(f"item{i}:{s}>{d}")
        model.add_implication(sent, source)
        for on in readers:
            model.add_bool_or([source.negated(), on.negated(), sent])
        interval = model.new_optional_fixed_size_interval_var(
            self._item_start[i, d], ticks, sent, f"item{i}:{s}>{d}"
        )
        for c in machine.channels[s][d]:
            self._channel_use.setdefault(c, []).append((interval, ticks * sent))
        return ticks

    def _share_resources(self) -> None:
        machine, model = self._machine, self._model
        for d in machine.devices:
            uses = self._device_use[d]
            if machine.slots[d] == 1:
                model.add_no_overlap(uses)
            else:
                model.add_cumulative(uses, [1] * len(uses), machine.slots[d])
            # Implied, but the linear relaxation does not see it: the work has to fit.
            work = sum(
                machine.op_ticks[d][op] * self._on[group, d]
                for op, group in enumerate(machine.group_of)
                if (group, d) in self._on
            )
            model.add(machine.slots[d] * self._makespan >= work)
        for transfers in self._channel_use.values():
            model.add_no_overlap([interval for interval, _ in transfers])
            model.add(self._makespan >= sum(ticks for _, ticks in transfers))

    def _break_symmetry(self) -> None:
        """Of interchangeable devices, the second is used only by groups after one on the first."""
        model = self._model
        for members in self._classes:
            for first, second in itertools.pairwise(members):
                used: Any = 0
                for group in range(len(self._machine.choices)):
                    if (group, second) not in self._on:
                        continue
                    model.add(self._on[group, second] <= used)
                    now = model.new_bool_var(f"used{first}<={group}")
                    model.add(now <= used + self._on[group, first])
                    used = now

    def _hint(self, devices: Sequence[int], schedule: _Schedule) -> None:
        for (group, d), on in self._on.items():
            self._model.add_hint(on, devices[group] == d)
        for variable, ticks in zip(self._op_start, schedule.op_start, strict=True):
            self._model.add_hint(variable, ticks)
        for key, ticks in schedule.item_start.items():
            self._model.add_hint(self._item_start[key], ticks)
        self._model.add_hint(self._makespan, schedule.end)

    def solve(self, config: ExactConfig, seed: int, deadline: float) -> _Found:
        solver = self._api.CpSolver()
        solver.parameters.num_workers = config.workers
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = config.max_work
        # Model building counts too; a solver with no time at all would not even answer.
        solver.parameters.max_time_in_seconds = max(0.01, deadline - time.monotonic())
        pool: list[list[int]] = []
        callback = _collector(self._api, self._on, pool)
        status = solver.solve(self._model, callback)
        api = self._api
        return _Found(
            # Later ones are better; the same devices may come again with a better order.
            placements=[list(p) for p in dict.fromkeys(tuple(p) for p in reversed(pool))],
            bound=solver.best_objective_bound if status != api.INFEASIBLE else math.inf,
            optimal=status == api.OPTIMAL,
            infeasible=status == api.INFEASIBLE,
        )


def _collector(api: Any, on: dict[tuple[int, int], Any], pool: list[list[int]]) -> Any:
    class Collector(api.CpSolverSolutionCallback):  # type: ignore[misc]
        """Keeps the devices of every solution on the way to the best."""

        def on_solution_callback(self) -> None:
            devices = {g: d for (g, d), literal in on.items() if self.boolean_value(literal)}
            pool.append([devices[g] for g in sorted(devices)])

    return Collector()


def _relabelled(devices: Sequence[int], classes: Sequence[Sequence[int]]) -> list[int]:
    """An equivalent placement that uses interchangeable devices in order of their first group."""
    image: dict[int, int] = {}
    for members in classes:
        used = [d for d in dict.fromkeys(devices) if d in members]
        image.update(zip(used, members, strict=False))
    return [image.get(d, d) for d in devices]
