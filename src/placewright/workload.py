"""Several shapes of a model with one home for its weights.

A model that answers reads a prompt once and then makes hundreds of tokens: two graphs over the same
weights, which can be at home in one place only, while each graph may be computed elsewhere. What
counts is the weighted sum of their steps. All of it is one problem whose groups are the homes and
what computes in each graph, so that whatever proposes placements can propose these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from placewright.costs import Costs
from placewright.errors import PlacementError
from placewright.graph import BoolArray, Edge, Graph, IndexArray, Op, frozen
from placewright.grouping import Grouping
from placewright.homes import home_ops, owners
from placewright.placement import Placement
from placewright.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Part:
    """One shape: a problem with homes, and how often it is run."""

    name: str
    problem: Problem
    weight: float
    """How often its step is taken."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Problems over the same weights, on the same cluster."""

    parts: tuple[Part, ...]

    @staticmethod
    def of(parts: Mapping[str, tuple[Problem, float]]) -> Workload:
        """Name -> problem and how often it is run."""
        return Workload(
            parts=tuple(
                Part(name=name, problem=problem, weight=weight)
                for name, (problem, weight) in parts.items()
            )
        )

    def __post_init__(self) -> None:
        if not self.parts:
            raise PlacementError("a workload needs at least one part")
        first = self.parts[0]
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names) or not all(names) or any("/" in name for name in names):
            raise PlacementError(
                f"the parts of a workload need names of their own without slashes, not "
                f"{', '.join(map(repr, names))}"
            )
        for part in self.parts:
            if not (np.isfinite(part.weight) and part.weight > 0):
                raise PlacementError(
                    f"the weight of part {part.name!r} must be positive, not {part.weight}"
                )
            if part.problem.homes is None:
                raise PlacementError(
                    f"weights of part {part.name!r} have no homes of their own; see with_homes()"
                )
            if part.problem.cluster != first.problem.cluster:
                raise PlacementError(
                    f"part {part.name!r} is for another cluster than part {first.name!r}"
                )
            mine, theirs = _homes(part.problem), _homes(first.problem)
            if mine != theirs:
                differ = next(
                    name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)
                )
                raise PlacementError(
                    f"parts {first.name!r} and {part.name!r} have different weights or group them "
                    f"differently: {differ!r} is not the same in both"
                )

    @cached_property
    def problem(self) -> Problem:
        """All of it as one problem: the groups of homes, and of each part those that compute, whose
        names begin with the part's. Its costs are weighted, so that they add up; a step of it is
        what `WorkloadEvaluator` makes of the parts' steps."""
        return _merged(self)

    @cached_property
    def groups(self) -> Mapping[str, IndexArray]:
        """Part -> [G of the part] the group of the whole problem that each of its groups is."""
        number = {name: g for g, name in enumerate(self.problem.grouping.names)}
        shared = _homes(self.parts[0].problem)
        return {
            part.name: frozen(
                np.array(
                    [
                        number[name if name in shared else f"{part.name}/{name}"]
                        for name in part.problem.grouping.names
                    ],
                    dtype=np.int32,
                )
            )
            for part in self.parts
        }

    def divided(self, placement: Placement) -> Mapping[str, Placement]:
        """Part -> what a placement of the whole problem is for the part."""
        placement.check(self.problem)
        return {
            part.name: Placement.of(part.problem, placement.devices[self.groups[part.name]])
            for part in self.parts
        }

    def joined(self, placements: Mapping[str, Placement]) -> Placement:
        """The placement of the whole problem that is this for each part. Homes are as the first
        part has them; raises where another has one elsewhere."""
        devices = np.full(self.problem.num_groups, -1, dtype=np.int32)
        for part in self.parts:
            placement = placements[part.name]
            placement.check(part.problem)
            groups = self.groups[part.name]
            before = devices[groups]
            wrong = np.flatnonzero((before >= 0) & (before != placement.devices))
            if wrong.size:
                name = part.problem.grouping.names[wrong[0]]
                raise PlacementError(f"{name!r} is at home in two places, one of {part.name!r}")
            devices[groups] = placement.devices
        return Placement.of(self.problem, devices)


def _homes(problem: Problem) -> Mapping[str, tuple[tuple[str, int], ...]]:
    """Group that only holds weights, or updates them -> names and bytes of those."""
    group_of, graph = problem.grouping.group_of, problem.graph
    computing = set(group_of[~home_ops(graph)].tolist())
    result: dict[str, list[tuple[str, int]]] = {}
    for op in np.flatnonzero(owners(graph)).tolist():
        group = int(group_of[op])
        if group not in computing:
            entry = (graph.op_names[op], int(graph.resident_bytes[op]))
            result.setdefault(problem.grouping.names[group], []).append(entry)
    return {name: tuple(sorted(ops)) for name, ops in result.items()}


def _merged(workload: Workload) -> Problem:
    parts = workload.parts
    shared = _homes(parts[0].problem)
    ops: list[Op] = []
    edges: list[Edge] = []
    label_of: dict[str, str] = {}
    """Op -> group."""
    origin: dict[str, tuple[int, int]] = {}
    """Op -> part and number in it."""
    for p, part in enumerate(parts):
        graph, grouping = part.problem.graph, part.problem.grouping
        owned = owners(graph)
        called: list[str] = []
        for i, op in enumerate(graph.ops()):
            group = grouping.names[grouping.group_of[i]]
            common = group in shared
            name = op.name if common and owned[i] else f"{part.name}/{op.name}"
            called.append(name)
            if name in label_of:
                continue
            label_of[name] = group if common else f"{part.name}/{group}"
            origin[name] = (p, i)
            # Groups say what is together; outputs that share memory do so by their new names.
            outputs = tuple(
                t if t.shares is None else t._replace(shares=(called[graph.op_index[t.shares[0]]],
                                                             t.shares[1]))
                for t in op.outputs
            )  # fmt: skip
            ops.append(replace(op, name=name, outputs=outputs, colocate=(), gradient_of=None))
        edges += [
            Edge(called[graph.op_index[src]], called[graph.op_index[dst]], output)
            for src, dst, output in graph.edges()
        ]
    name = " + ".join(part.problem.graph.name for part in parts)
    graph = Graph.from_ops(name, ops, edges, issue=parts[0].problem.graph.issue)
    numbers: dict[str, int] = {}
    group_of = [numbers.setdefault(label_of[name], len(numbers)) for name in graph.op_names]
    grouping = Grouping(group_of=frozen(np.array(group_of, dtype=np.int32)), names=tuple(numbers))
    return Problem(
        graph=graph,
        grouping=grouping,
        cluster=parts[0].problem.cluster,
        costs=_costs(workload, [origin[name] for name in graph.op_names]),
        forbidden=_forbidden(workload, grouping, shared),
        homes=parts[0].problem.homes,
    )


def _costs(workload: Workload, origin: list[tuple[int, int]]) -> Costs:
    part = np.array([p for p, _ in origin])
    op = np.array([i for _, i in origin])
    names = ("op_seconds", "overhead_seconds", "gap_seconds", "demand")
    first = workload.parts[0].problem.costs
    joined = {name: np.zeros((len(first.kinds), len(origin))) for name in names}
    source = np.zeros((len(first.kinds), len(origin)), dtype=first.source.dtype)
    for p, entry in enumerate(workload.parts):
        mine = part == p
        costs = entry.problem.costs
        for name in names:
            times = 1.0 if name == "demand" else entry.weight
            joined[name][:, mine] = times * getattr(costs, name)[:, op[mine]]
        source[:, mine] = costs.source[:, op[mine]]
    return replace(
        first,
        source=frozen(source),
        op_seconds=frozen(joined["op_seconds"]),
        overhead_seconds=frozen(joined["overhead_seconds"]),
        gap_seconds=frozen(joined["gap_seconds"]),
        demand=frozen(joined["demand"]),
    )


def _forbidden(workload: Workload, grouping: Grouping, shared: Mapping[str, object]) -> BoolArray:
    """What any part forbids."""
    devices = workload.parts[0].problem.num_devices
    forbidden = np.zeros((grouping.num_groups, devices), dtype=np.bool_)
    number = {name: g for g, name in enumerate(grouping.names)}
    for part in workload.parts:
        if not part.problem.forbidden.size:
            continue
        for name, row in zip(part.problem.grouping.names, part.problem.forbidden, strict=True):
            forbidden[number[name if name in shared else f"{part.name}/{name}"]] |= row
    return frozen(forbidden if forbidden.any() else np.zeros((0, 0), dtype=np.bool_))
