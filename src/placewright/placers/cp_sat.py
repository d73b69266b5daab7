"""The CP-SAT model behind `exact`, run as a program of its own.

    python -m placewright.placers.cp_sat problem.json < request > answer

It runs in its own process because OR-Tools cannot solve in one that has TensorFlow loaded.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from ortools.sat.python import cp_model

from placewright.backends.processes import die_with
from placewright.placers.exact import Found, Machine, Schedule, predecessors
from placewright.problem import Problem


def main() -> None:
    started = time.monotonic()
    request = json.load(sys.stdin)
    die_with(request["parent"])
    model = _Model(Machine(Problem.load(sys.argv[1])), request["start"])
    # Model building counts too; a solver with no time at all would not even answer.
    found = model.solve(
        seconds=max(0.01, request["seconds"] - (time.monotonic() - started)),
        work=request["work"],
        workers=request["workers"],
        seed=request["seed"],
    )
    bound = found.bound if math.isfinite(found.bound) else None
    json.dump(found._asdict() | {"bound": bound}, sys.stdout)


class _Model:
    """Devices, starts of ops and starts of transfers as variables of one CP-SAT model."""

    def __init__(self, machine: Machine, start: list[int] | None) -> None:
        self._machine = machine
        self._model = cp_model.CpModel()
        self._classes = machine.interchangeable()
        if start is not None:
            start = _relabelled(start, self._classes)
            schedule = machine.schedule(start)
            self._horizon = schedule.end
        else:
            self._horizon = machine.ticks(machine.serial_seconds) + 1
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
        for op, sources in enumerate(predecessors(machine.problem.graph)):
            for src in dict.fromkeys(sources):
                has_consumer.add(src)
                model.add(self._op_start[op] >= self._op_end[src])
        for op, end in enumerate(self._op_end):
            if op not in has_consumer:
                model.add(self._makespan >= end)

    def _windows(self) -> tuple[list[int], list[int]]:
        """Earliest and latest start of each op that the longest paths leave."""
        machine = self._machine
        before = predecessors(machine.problem.graph)
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
                arrival = start + sum(
                    ticks * self._on[home, s] for s, ticks in zip(sources, sent, strict=True)
                )
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
        occupied = machine.occupied_ticks(i, s, d)
        interval = model.new_optional_fixed_size_interval_var(
            self._item_start[i, d], occupied, sent, f"item{i}:{s}>{d}"
        )
        for c in machine.channels[s][d]:
            self._channel_use.setdefault(c, []).append((interval, occupied * sent))
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

    def _hint(self, devices: Sequence[int], schedule: Schedule) -> None:
        for (group, d), on in self._on.items():
            self._model.add_hint(on, devices[group] == d)
        for variable, ticks in zip(self._op_start, schedule.op_start, strict=True):
            self._model.add_hint(variable, ticks)
        for key, ticks in schedule.item_start.items():
            self._model.add_hint(self._item_start[key], ticks)
        self._model.add_hint(self._makespan, schedule.end)

    def solve(self, *, seconds: float, work: float, workers: int, seed: int) -> Found:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = work
        solver.parameters.max_time_in_seconds = seconds
        pool: list[list[int]] = []
        status = solver.solve(self._model, _Collector(self._on, pool))
        return Found(
            # Later ones are better; the same devices may come again with a better order.
            placements=[list(p) for p in dict.fromkeys(tuple(p) for p in reversed(pool))],
            bound=solver.best_objective_bound if status != cp_model.INFEASIBLE else math.inf,
            optimal=status == cp_model.OPTIMAL,
            infeasible=status == cp_model.INFEASIBLE,
        )


class _Collector(cp_model.CpSolverSolutionCallback):
    """Keeps the devices of every solution on the way to the best."""

    def __init__(self, on: dict[tuple[int, int], Any], pool: list[list[int]]) -> None:
        super().__init__()
        self._on = on
        self._pool = pool

    def on_solution_callback(self) -> None:
        devices = {g: d for (g, d), literal in self._on.items() if self.boolean_value(literal)}
        self._pool.append([devices[g] for g in sorted(devices)])


def _relabelled(devices: Sequence[int], classes: Sequence[Sequence[int]]) -> list[int]:
    """An equivalent placement that uses interchangeable devices in order of their first group."""
    image: dict[int, int] = {}
    for members in classes:
        used = [d for d in dict.fromkeys(devices) if d in members]
        image.update(zip(used, members, strict=False))
    return [image.get(d, d) for d in devices]


if __name__ == "__main__":
    main()
