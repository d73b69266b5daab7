"""Which ops are placed together.

A graph has thousands of ops; a placer decides for groups. The rules of the paper (section 3.3) are
functions that merge groups and can be combined: `by_colocation` (rule 1), `by_sole_consumer`
(rule 2) and `by_scope` (rule 3). For graphs nobody wrote rules for, `by_coarsening` merges to a
target number of groups of balanced cost without making the group graph cyclic.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import regex

from placewright.errors import PlacementError
from placewright.files import read_json, write_json
from placewright.graph import (
    DisjointSets,
    FloatArray,
    Graph,
    IndexArray,
    IntArray,
    ScopeRule,
    frozen,
)
from placewright.patterns import Allowance, check_length, searcher

FORMAT = "placewright-grouping/1"


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouping:
    """A total partition of the ops into G groups that are placed together. Immutable."""

    group_of: IndexArray
    """[N] the group of each op; groups are numbered by their first op."""
    names: tuple[str, ...]
    """[G] unique names for people and files."""

    def __post_init__(self) -> None:
        used = np.unique(self.group_of)
        if not np.array_equal(used, np.arange(len(self.names))):
            raise PlacementError(
                f"a grouping of {len(self.names)} names whose ops use {len(used)} groups"
            )
        if len(set(self.names)) != len(self.names):
            raise PlacementError("two groups have the same name")

    @property
    def num_groups(self) -> int:
        return len(self.names)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self.names).encode())
        digest.update(np.ascontiguousarray(self.group_of).tobytes())
        return digest.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grouping):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def members(self, group: int) -> IndexArray:
        """The ops of a group, in topological order."""
        return np.flatnonzero(self.group_of == group).astype(np.int32)

    def check_colocation(self, graph: Graph) -> None:
        """Raises when ops that the framework keeps together are in different groups."""
        constrained = np.flatnonzero(graph.colocation >= 0)
        sets = graph.colocation[constrained]
        groups = self.group_of[constrained]
        first = np.full(int(sets.max(initial=-1)) + 1, -1, dtype=np.int64)
        # Written back to front, so that each set keeps its first op's group.
        first[sets[::-1]] = groups[::-1]
        wrong = np.flatnonzero(first[sets] != groups)
        if wrong.size:
            name = graph.op_names[constrained[wrong[0]]]
            raise PlacementError(
                f"op {name!r} is in group {self.names[groups[wrong[0]]]!r}, away from the ops it "
                "must be co-located with"
            )

    def save(self, path: str | Path, graph: Graph) -> None:
        write_json(path, self.to_json(graph), PlacementError)

    @staticmethod
    def load(path: str | Path, graph: Graph) -> Grouping:
        document = read_json(path, PlacementError, what="grouping")
        return Grouping.from_json(document, graph, where=str(path))

    def to_json(self, graph: Graph) -> dict[str, Any]:
        groups: dict[str, list[str]] = {name: [] for name in self.names}
        for op, group in zip(graph.op_names, self.group_of.tolist(), strict=True):
            groups[self.names[group]].append(op)
        return {"format": FORMAT, "groups": groups}

    @staticmethod
    def from_json(document: object, graph: Graph, *, where: str) -> Grouping:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlacementError(f"{where}: not a grouping file ({FORMAT})")
        groups = document.get("groups")
        if not isinstance(groups, dict):
            raise PlacementError(f"{where}: not a grouping file ({FORMAT})")
        label_of: dict[str, str] = {}
        for name, ops in groups.items():
            if not isinstance(ops, list) or not all(isinstance(op, str) for op in ops):
                raise PlacementError(f"{where}: group {name!r} must be a list of op names")
            for op in ops:
                if label_of.setdefault(op, name) != name:
                    raise PlacementError(
                        f"{where}: op {op!r} is in two groups, {label_of[op]!r} and {name!r}"
                    )
        for op in graph.op_names:
            if op not in label_of:
                raise PlacementError(f"{where}: op {op!r} is in no group")
        if len(label_of) > graph.num_ops:
            extra = next(op for op in label_of if op not in graph.op_index)
            raise PlacementError(f"{where}: op {extra!r} is not in the graph")
        return _grouping([label_of[op] for op in graph.op_names])


Rule = Callable[[Graph, Grouping], Grouping]
"""Merges groups; never splits one."""


def each_op(graph: Graph) -> Grouping:
    """The finest grouping: every op alone. Where the rules start from."""
    return Grouping(group_of=frozen(np.arange(graph.num_ops, dtype=np.int32)), names=graph.op_names)


def group(graph: Graph, rules: Iterable[Rule]) -> Grouping:
    """Applies rules one after another, starting from single ops."""
    grouping = each_op(graph)
    for rule in rules:
        grouping = rule(graph, grouping)
    grouping.check_colocation(graph)
    return grouping


def default_rules(
    scopes: Sequence[ScopeRule] = (), target_groups: int | None = None
) -> tuple[Rule, ...]:
    """What the command line does: the paper's rules with scopes, coarsening without.

    `target_groups` bounds the number of groups in either case; without scopes it follows from the
    graph when not given (`default_groups`).
    """
    if scopes:
        rules: tuple[Rule, ...] = (
            by_colocation,
            by_gradient,
            by_scope(scopes),
            by_sole_consumer(scopes),
        )
        return rules if target_groups is None else (*rules, by_coarsening(target_groups))
    return (by_colocation, by_gradient, by_coarsening(target_groups))


def default_groups(graph: Graph) -> int:
    """How many groups a graph is merged to that nobody wrote rules for.

    200, about what the paper's models have, for up to 10,000 ops; beyond that twice the square root
    of the ops, so that both the groups and what is in each grow with the graph. Searches by groups
    take longer with the square of their number, and large graphs are also placed op by op.
    """
    return max(200, round(2.0 * math.sqrt(graph.num_ops)))


# --- the rules of the paper ----------------------------------------------------------------------


def by_colocation(graph: Graph, grouping: Grouping) -> Grouping:
    """Rule 1, first half: what the framework keeps together is one group."""
    sets = DisjointSets(grouping.num_groups)
    holder: dict[int, int] = {}
    for label, of in zip(graph.colocation.tolist(), grouping.group_of.tolist(), strict=True):
        if label >= 0:
            sets.union(holder.setdefault(label, of), of)
    return _merged(grouping, sets)


def by_gradient(graph: Graph, grouping: Grouping) -> Grouping:
    """Rule 1, second half: a gradient op goes with the op it is the gradient of."""
    runs_on = _runs_on(graph, grouping)
    sets = DisjointSets(grouping.num_groups)
    of = grouping.group_of
    for op in np.flatnonzero(graph.gradient_of >= 0).tolist():
        gradient, forward = int(of[op]), int(of[graph.gradient_of[op]])
        if runs_on[gradient] == runs_on[forward]:
            sets.union(gradient, forward)
    return _merged(grouping, sets)


def _runs_on(graph: Graph, grouping: Grouping) -> list[int]:
    """[G] the device types that can run all ops of a group, as bits.

    No rule but the user's own merges groups that differ here: one op without a GPU kernel would
    tie everything merged with it to the CPU.
    """
    types = sorted(graph.kernels)
    # The bit above those of the named types stands for all types nobody named.
    masks = np.zeros(graph.num_ops, dtype=np.int64)
    for bit, type_ in enumerate(types):
        masks |= graph.runs_on(type_).astype(np.int64) << bit
    masks |= (~graph.restricted).astype(np.int64) << len(types)
    result = np.full(grouping.num_groups, -1, dtype=np.int64)
    np.bitwise_and.at(result, grouping.group_of, masks)
    return [int(mask) for mask in result]


def by_scope(rules: Sequence[ScopeRule]) -> Rule:
    """Rule 3: names decide. Groups with the same label become one."""

    def apply(graph: Graph, grouping: Grouping) -> Grouping:
        labels = _labels(graph, grouping, rules)
        sets = DisjointSets(grouping.num_groups)
        holder: dict[str, int] = {}
        for g, label in labels.items():
            sets.union(holder.setdefault(label, g), g)
        return _merged(grouping, sets, labels)

    return apply


def by_together(pattern: str) -> Rule:
    """The user's wish: every group with an op whose name contains `pattern` joins one group."""

    def apply(graph: Graph, grouping: Grouping) -> Grouping:
        matching = matching_groups(graph, grouping, pattern)
        sets = DisjointSets(grouping.num_groups)
        for g in matching:
            sets.union(matching[0], g)
        return _merged(grouping, sets, {matching[0]: pattern})

    return apply


def matching_groups(graph: Graph, grouping: Grouping, pattern: str) -> list[int]:
    """The groups with at least one op whose name contains `pattern`; raises when there is none."""
    search = searcher(pattern)
    found = {
        g
        for name, g in zip(graph.op_names, grouping.group_of.tolist(), strict=True)
        if search(name)
    }
    if not found:
        raise PlacementError(f"no op of {graph.name!r} has a name that contains {pattern!r}")
    return sorted(found)


def _labels(graph: Graph, grouping: Grouping, rules: Sequence[ScopeRule]) -> dict[int, str]:
    """Group -> the label that the first matching rule gives its first op that has one.

    Co-location can tie ops of several scopes together (a variable and the layers that read it);
    such a group goes where it begins.
    """
    allowance = Allowance()
    searchers = []
    for rule in rules:
        check_length(rule.label, "a group label")
        what = f"group pattern {rule.pattern[:80]!r}"
        searchers.append((searcher(rule.pattern, what, allowance), rule.label))
    labels: dict[int, str] = {}
    for name, g in zip(graph.op_names, grouping.group_of.tolist(), strict=True):
        if g in labels:
            continue
        for search, template in searchers:
            match = search(name)
            if match:
                try:
                    labels[g] = match.expand(template)
                except (regex.error, IndexError) as error:
                    raise PlacementError(
                        f"group label {template!r} does not fit its pattern: {error}"
                    ) from None
                break
    return labels


def by_sole_consumer(keep: Sequence[ScopeRule] = ()) -> Rule:
    """Rule 2: a group whose outputs go to one other group only joins it; recursively.

    Groups with an op that a rule in `keep` matches are not absorbed: otherwise each layer would
    swallow the one before it, and what the user named would not be what is placed.
    """

    def apply(graph: Graph, grouping: Grouping) -> Grouping:
        return _absorb(graph, grouping, kept=set(_labels(graph, grouping, keep)))

    return apply


def _absorb(graph: Graph, grouping: Grouping, kept: set[int]) -> Grouping:
    consumers: list[set[int]] = [set() for _ in range(grouping.num_groups)]
    producers: list[set[int]] = [set() for _ in range(grouping.num_groups)]
    of = grouping.group_of
    pairs = np.unique(np.stack([of[graph.edge_src], of[graph.edge_dst]], axis=1), axis=0)
    for src, dst in pairs.tolist():
        if src != dst:
            consumers[src].add(dst)
            producers[dst].add(src)
    runs_on = _runs_on(graph, grouping)
    sets = DisjointSets(grouping.num_groups)
    stack = list(range(grouping.num_groups))
    alive = [True] * grouping.num_groups
    while stack:
        g = stack.pop()
        if not alive[g] or g in kept or len(consumers[g]) != 1:
            continue
        (target,) = consumers[g]
        if runs_on[g] != runs_on[target]:
            continue
        alive[g] = False
        sets.union(g, target)
        producers[target].discard(g)
        for producer in producers[g]:
            consumers[producer].discard(g)
            if producer != target:
                consumers[producer].add(target)
                producers[target].add(producer)
            if len(consumers[producer]) == 1:
                stack.append(producer)
        producers[g] = set()
    # `sets` names the smallest member; the absorbing group's name is what people should read.
    keep = {sets.find(g): grouping.names[g] for g in range(grouping.num_groups) if alive[g]}
    return _merged(grouping, sets, keep)


# --- coarsening ----------------------------------------------------------------------------------


def by_coarsening(target_groups: int | None = None, imbalance: float = 1.5) -> Rule:
    """Merges until `target_groups` are left, keeping the group graph acyclic and costs balanced;
    `default_groups` when not given.

    Rounds of matching as in multilevel acyclic partitioning (Herrmann et al., SIAM J. Sci. Comput.
    2019): in each round groups at longest-path levels 2i and 2i + 1 may merge, along an edge or as
    siblings, in such a way that no two merged pairs of the same levels are joined by an edge. Then
    level // 2 never decreases along an edge, and no cycle can close. `imbalance` is how many times
    the mean cost a group may reach; it is relaxed only when nothing else can be merged. Groups that
    run on different types of device are not merged, so more groups than asked for may be left.

    Where the groups it starts from form a cycle (a variable is read early and updated late, a
    gradient is with its forward op), the edges that go backwards between the groups of such a cycle
    are ignored: acyclic means acyclic but for them.
    """
    if target_groups is not None and target_groups < 1:
        raise PlacementError(f"cannot make {target_groups} groups; at least 1 is needed")

    def apply(graph: Graph, grouping: Grouping) -> Grouping:
        cost = np.zeros(grouping.num_groups)
        np.add.at(cost, grouping.group_of, _op_weights(graph))
        edges = _group_edges(graph, grouping)
        edges = _without_back_edges(edges, grouping.num_groups)
        assignment = _coarsen(
            edges,
            cost.tolist(),
            _runs_on(graph, grouping),
            default_groups(graph) if target_groups is None else target_groups,
            imbalance,
        )
        sets = DisjointSets(grouping.num_groups)
        first: dict[int, int] = {}
        for g, cluster in enumerate(assignment):
            sets.union(first.setdefault(cluster, g), g)
        return _merged(grouping, sets, _scope_names(graph, grouping, sets))

    return apply


def _op_weights(graph: Graph) -> FloatArray:
    """[N] relative cost of each op on a typical accelerator: overhead, compute, bytes.

    Grouping comes before costs are known for any device, so this uses round numbers: 10 us to
    launch, 10 TFLOPS, 500 GB/s. Only the ratios matter.
    """
    flops = np.nan_to_num(graph.flops) / 1e13
    moved = (graph.input_bytes + graph.owned_bytes) / 5e11
    return np.asarray(1e-5 + np.maximum(flops, moved), dtype=np.float64)


class GroupEdges(NamedTuple):
    """The E edges of a graph that lead from one group to another."""

    src: IntArray
    """[E] the group an edge comes from."""
    dst: IntArray
    """[E] the group it leads to."""
    tensor: IndexArray
    """[E] what it carries, -1 for a control edge."""
    bytes: IntArray
    """[E] of the tensor it carries, 0 for a control edge."""
    transfers: IntArray
    """[T] those of them that count if all groups are on different devices: a tensor goes once to
    each group that uses it, an op's completion likewise. In the order of what they carry."""


def edges_between(graph: Graph, grouping: Grouping) -> GroupEdges:
    """Which groups exchange tensors."""
    src = grouping.group_of[graph.edge_src].astype(np.int64)
    dst = grouping.group_of[graph.edge_dst].astype(np.int64)
    outside = np.flatnonzero(src != dst)
    # Control edges carry the op's completion: one more thing an op hands out, of no bytes.
    item = np.where(
        graph.edge_tensor >= 0, graph.edge_tensor, graph.num_tensors + graph.edge_src
    ).astype(np.int64)
    src, dst, item = src[outside], dst[outside], item[outside]
    _, first = np.unique(item * grouping.num_groups + dst, return_index=True)
    return GroupEdges(src, dst, graph.edge_tensor[outside], graph.edge_bytes[outside], first)


def _group_edges(graph: Graph, grouping: Grouping) -> dict[tuple[int, int], float]:
    """(src, dst) -> bytes of all edges from one group to another."""
    edges = edges_between(graph, grouping)
    pairs = edges.src * grouping.num_groups + edges.dst
    keys, inverse = np.unique(pairs, return_inverse=True)
    totals = np.zeros(len(keys))
    np.add.at(totals, inverse, edges.bytes)
    return {
        divmod(k, grouping.num_groups): total
        for k, total in zip(keys.tolist(), totals.tolist(), strict=True)
    }


def _without_back_edges(
    edges: Mapping[tuple[int, int], float], n: int
) -> dict[tuple[int, int], float]:
    """Drops edges that go backwards inside a cycle; nothing where there is no cycle.

    Groups are numbered by their first op, so inside a strongly connected component the direction
    of a cycle is judged by where its groups begin.
    """
    component = _strong_components(edges, n)
    return {
        (s, d): weight for (s, d), weight in edges.items() if component[s] != component[d] or s < d
    }


def _strong_components(edges: Iterable[tuple[int, int]], n: int) -> list[int]:
    """Tarjan's algorithm without recursion: [n] number of each node's component."""
    successors: list[list[int]] = [[] for _ in range(n)]
    for s, d in edges:
        successors[s].append(d)
    number = [-1] * n
    low = [0] * n
    component = [-1] * n
    stack: list[int] = []
    counter = components = 0
    for start in range(n):
        if number[start] >= 0:
            continue
        work = [(start, iter(successors[start]))]
        number[start] = low[start] = counter
        counter += 1
        stack.append(start)
        while work:
            node, rest = work[-1]
            for child in rest:
                if number[child] < 0:
                    number[child] = low[child] = counter
                    counter += 1
                    stack.append(child)
                    work.append((child, iter(successors[child])))
                    break
                if component[child] < 0:
                    low[node] = min(low[node], number[child])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == number[node]:
                    while True:
                        member = stack.pop()
                        component[member] = components
                        if member == node:
                            break
                    components += 1
    return component


def _coarsen(
    edges: Mapping[tuple[int, int], float],
    cost: list[float],
    runs_on: list[int],
    target: int,
    imbalance: float,
) -> list[int]:
    """[n] number of the cluster each node ends in."""
    n = len(cost)
    assignment = list(range(n))
    total = sum(cost)
    limit = imbalance * total / target
    parity = 0
    idle_rounds = 0
    while len(cost) > target:
        before = len(cost)
        mapping = _matching_round(edges, cost, runs_on, limit, parity, before - target)
        count = max(mapping) + 1
        assignment = [mapping[a] for a in assignment]
        new_cost = [0.0] * count
        for node, to in enumerate(mapping):
            new_cost[to] += cost[node]
        cost = new_cost
        runs_on = [mask for _, mask in sorted(dict(zip(mapping, runs_on, strict=True)).items())]
        merged: dict[tuple[int, int], float] = {}
        for (s, d), weight in edges.items():
            key = (mapping[s], mapping[d])
            if key[0] != key[1]:
                merged[key] = merged.get(key, 0.0) + weight
        edges = merged
        parity ^= 1
        # A round may be idle for one parity only; after both, or when rounds hardly merge
        # anything any more, the balance has to give.
        idle_rounds = idle_rounds + 1 if count > 0.97 * before else 0
        if idle_rounds >= 2:
            if limit > total:
                break
            limit *= 1.3
            idle_rounds = 0
    return assignment


def _matching_round(
    edges: Mapping[tuple[int, int], float],
    cost: Sequence[float],
    runs_on: Sequence[int],
    limit: float,
    parity: int,
    most: int,
) -> list[int]:
    """[n] new number of each node after merging at most `most` pairs."""
    n = len(cost)
    successors: list[list[int]] = [[] for _ in range(n)]
    predecessors: list[list[int]] = [[] for _ in range(n)]
    for s, d in edges:
        successors[s].append(d)
        predecessors[d].append(s)
    level = _levels(successors, predecessors)
    band = [(value + parity) // 2 for value in level]

    partner = [-1] * n
    blocked = [False] * n
    merged = 0

    def match(a: int, b: int) -> None:
        nonlocal merged
        partner[a], partner[b] = b, a
        merged += 1

    # Heavy edges first: a transfer inside a group costs nothing. Ties by number, to be repeatable.
    candidates = sorted(
        (-weight, s, d)
        for (s, d), weight in edges.items()
        if band[s] == band[d] and runs_on[s] == runs_on[d]
    )
    for _, s, d in candidates:
        if merged >= most:
            break
        if partner[s] >= 0 or partner[d] >= 0 or blocked[d] or cost[s] + cost[d] > limit:
            continue
        rivals = [other for other in successors[s] if other != d and band[other] == band[s]]
        if any(partner[other] >= 0 for other in rivals):
            continue
        match(s, d)
        for other in rivals:
            blocked[other] = True

    # Siblings: nodes of one level with a neighbour in common, then any of one level. Inside their
    # band they have only outgoing edges or only incoming ones, so no cycle passes through them.
    for key_of in (
        lambda v: (max(predecessors[v], default=-1), max(successors[v], default=-1)),
        lambda v: (max(predecessors[v], default=-1),),
        lambda v: (),
    ):
        waiting: dict[tuple[int, ...], int] = {}
        for v in range(n):
            if merged >= most:
                break
            if partner[v] >= 0:
                continue
            key = (level[v], runs_on[v], *key_of(v))
            other = waiting.get(key, -1)
            if other >= 0 and cost[other] + cost[v] <= limit:
                match(other, v)
                del waiting[key]
            elif other < 0 or cost[v] < cost[other]:
                waiting[key] = v

    mapping = [-1] * n
    count = 0
    for v in range(n):
        if mapping[v] < 0:
            mapping[v] = count
            if partner[v] >= 0:
                mapping[partner[v]] = count
            count += 1
    return mapping


def _levels(
    successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]
) -> list[int]:
    """[n] length of the longest path that ends in each node."""
    waiting = [len(p) for p in predecessors]
    level = [0] * len(waiting)
    ready = [v for v, count in enumerate(waiting) if not count]
    while ready:
        v = ready.pop()
        for d in successors[v]:
            level[d] = max(level[d], level[v] + 1)
            waiting[d] -= 1
            if not waiting[d]:
                ready.append(d)
    return level


# --- shared --------------------------------------------------------------------------------------


def _merged(
    grouping: Grouping, sets: DisjointSets, labels: Mapping[int, str] | None = None
) -> Grouping:
    """The grouping after a rule's merges. A merged group is named by `labels` of any member, or by
    the name of its first."""
    name_of: dict[int, str] = {}
    for g, label in (labels or {}).items():
        name_of.setdefault(sets.find(g), label)
    roots = [sets.find(g) for g in range(grouping.num_groups)]
    names = [name_of.get(root, grouping.names[root]) for root in range(grouping.num_groups)]
    of = grouping.group_of.tolist()
    numbers: dict[int, int] = {}
    group_of = [numbers.setdefault(roots[g], len(numbers)) for g in of]
    return Grouping(
        group_of=frozen(np.array(group_of, dtype=np.int32)),
        names=_made_unique([names[root] for root in numbers]),
    )


def _grouping(labels: Sequence[str]) -> Grouping:
    numbers: dict[str, int] = {}
    group_of = [numbers.setdefault(label, len(numbers)) for label in labels]
    return Grouping(group_of=frozen(np.array(group_of, dtype=np.int32)), names=tuple(numbers))


def _made_unique(names: Sequence[str]) -> tuple[str, ...]:
    taken: set[str] = set(names)
    seen: set[str] = set()
    result = []
    for name in names:
        unique, k = name, 1
        while unique in seen or (unique != name and unique in taken):
            k += 1
            unique = f"{name}#{k}"
        seen.add(unique)
        result.append(unique)
    return tuple(result)


def _scope_names(graph: Graph, grouping: Grouping, sets: DisjointSets) -> dict[int, str]:
    """Names merged groups by the scope their ops have in common, or by their first op."""
    ops: dict[int, list[str]] = {}
    parts: dict[int, set[int]] = {}
    for name, g in zip(graph.op_names, grouping.group_of.tolist(), strict=True):
        root = sets.find(g)
        ops.setdefault(root, []).append(name)
        parts.setdefault(root, set()).add(g)
    return {
        root: _common_scope(min(names), max(names)) or names[0]
        for root, names in ops.items()
        if len(parts[root]) > 1
    }


def _common_scope(a: str, b: str) -> str:
    scope = []
    for part_a, part_b in zip(a.split("/")[:-1], b.split("/")[:-1], strict=False):
        if part_a != part_b:
            break
        scope.append(part_a)
    return "/".join(scope)
