"""A placement problem: what to place, where, and what it costs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from placewright import cluster as cluster_format
from placewright import graph as graph_format
from placewright.cluster import Cluster
from placewright.costs import Costs, calibrated_cluster, estimate_costs
from placewright.errors import CostsError, PlacementError
from placewright.files import read_json, write_json
from placewright.graph import (
    BoolArray,
    FloatArray,
    Graph,
    IndexArray,
    IntArray,
    ScopeRule,
    frozen,
)
from placewright.grouping import (
    Grouping,
    by_colocation,
    by_together,
    default_rules,
    each_op,
    group,
    matching_groups,
)
from placewright.homes import (
    Homes,
    Visits,
    default_window,
    hands_out_weights,
    owners,
    split,
    untied,
)

FORMAT = "placewright-problem/1"


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """All placements there are: which groups, and where each may go. Immutable.

    It identifies placements and journals. What ops and links cost is no part of it, so that
    placements live on when costs are corrected. G groups, D devices.
    """

    graph: Graph
    grouping: Grouping
    device_names: tuple[str, ...]
    device_types: tuple[str, ...]
    """`cpu`, `gpu`, ... of each device: they decide which ops have a kernel there."""
    forbidden: BoolArray = field(default_factory=lambda: frozen(np.zeros((0, 0), dtype=np.bool_)))
    """[G, D] devices the user does not want a group on; empty for none."""

    @property
    def num_groups(self) -> int:
        return self.grouping.num_groups

    @property
    def num_devices(self) -> int:
        return len(self.device_names)

    @cached_property
    def allowed(self) -> BoolArray:
        """[G, D] where a group may go: its ops have kernels there and the user does not object."""
        allowed = np.ones((self.num_groups, self.num_devices), dtype=np.bool_)
        for device, type_ in enumerate(self.device_types):
            allowed[self.grouping.group_of[~self.graph.runs_on(type_)], device] = False
        return frozen(allowed & ~self.forbidden if self.forbidden.size else allowed)

    @cached_property
    def fingerprint(self) -> str:
        parts = (
            self.graph.fingerprint, self.grouping.fingerprint, self.device_names, self.device_types,
        )  # fmt: skip
        digest = hashlib.sha256(json.dumps(parts).encode())
        digest.update(np.ascontiguousarray(self.allowed).tobytes())
        return digest.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Space):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Binds a graph, its grouping, a cluster and costs: all that a placer sees. Immutable.

    G groups, D devices.
    """

    graph: Graph
    grouping: Grouping
    cluster: Cluster
    costs: Costs
    forbidden: BoolArray = field(default_factory=lambda: frozen(np.zeros((0, 0), dtype=np.bool_)))
    """[G, D] devices the user does not want a group on; empty for none."""
    units: Grouping | None = None
    """The smallest sets of ops that may be placed separately, where there is more to it than
    co-location: what the user wants together. Every group is made of whole units."""
    homes: Homes | None = None
    """That weights may be elsewhere than who reads them, and how they travel; None where a weight
    on another device is sent like any other tensor."""

    def __post_init__(self) -> None:
        if len(self.grouping.group_of) != self.graph.num_ops:
            raise PlacementError(
                f"grouping covers {len(self.grouping.group_of)} ops, the graph has "
                f"{self.graph.num_ops}; was it made for another graph?"
            )
        self.grouping.check_colocation(self.graph)
        expected = tuple(kind.name for kind in self.cluster.kinds)
        if self.costs.kinds != expected:
            raise CostsError(
                f"costs are for device kinds {', '.join(self.costs.kinds)}; cluster "
                f"{self.cluster.name!r} has {', '.join(expected)}"
            )
        if self.costs.op_seconds.shape[1] != self.graph.num_ops:
            raise CostsError(
                f"costs cover {self.costs.op_seconds.shape[1]} ops, the graph has "
                f"{self.graph.num_ops}"
            )
        kinds = [kind.type for kind in self.cluster.kinds]
        kernels = np.stack([self.graph.runs_on(type_) for type_ in kinds])
        wrong = np.argwhere(np.isfinite(self.costs.op_seconds) != kernels)
        if wrong.size:
            kind, op = wrong[0].tolist()
            raise CostsError(
                f"costs say that op {self.graph.op_names[op]!r} "
                f"{'has no' if kernels[kind, op] else 'has a'} {kinds[kind]} kernel, the graph "
                "says otherwise; were they made for another graph?"
            )
        if self.forbidden.size and self.forbidden.shape != (self.num_groups, self.num_devices):
            raise PlacementError(
                f"constraints of shape {self.forbidden.shape} for {self.num_groups} groups on "
                f"{self.num_devices} devices"
            )
        nowhere = np.flatnonzero(~self.allowed.any(axis=1))
        if nowhere.size:
            raise PlacementError(
                f"group {self.grouping.names[nowhere[0]]!r} can run on no device of cluster "
                f"{self.cluster.name!r}: {self._why_nowhere(int(nowhere[0]))}"
            )

    def _why_nowhere(self, group: int) -> str:
        reasons = []
        for d, device in enumerate(self.cluster.devices):
            ops = self.grouping.members(group)
            missing = ops[np.isinf(self.op_seconds[d, ops])]
            if missing.size:
                op = missing[0]
                reasons.append(
                    f"op {self.graph.op_names[op]!r} ({self.graph.op_types[op]}) has no "
                    f"{device.type} kernel"
                )
            else:
                reasons.append(f"{device.name} is ruled out by a constraint")
        return "; ".join(dict.fromkeys(reasons))

    @cached_property
    def refined(self) -> Problem:
        """The same problem with the finest groups there can be: ops that must be together. Itself
        where its groups are as fine already."""
        units = self.units or group(self.graph, (by_colocation,))
        if units.num_groups == self.num_groups:
            return self
        forbidden = self.forbidden
        if forbidden.size:
            forbidden = frozen(forbidden[self._group_of_unit(units)])
        return Problem(
            graph=self.graph,
            grouping=units,
            cluster=self.cluster,
            costs=self.costs,
            forbidden=forbidden,
            units=units,
            homes=self.homes,
        )

    def lifted(self, devices: IndexArray) -> IndexArray:
        """[units] devices of the refined problem that put every op where these [G] put it."""
        return np.asarray(devices[self._group_of_unit(self.refined.grouping)], dtype=np.int32)

    def _group_of_unit(self, units: Grouping) -> IndexArray:
        result = np.zeros(units.num_groups, dtype=np.int32)
        result[units.group_of] = self.grouping.group_of
        return result

    @property
    def num_groups(self) -> int:
        return self.grouping.num_groups

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @cached_property
    def space(self) -> Space:
        """What identifies its placements."""
        return Space(
            graph=self.graph,
            grouping=self.grouping,
            device_names=self.cluster.device_names,
            device_types=tuple(device.type for device in self.cluster.devices),
            forbidden=self.forbidden,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of all of it: simulated times are the same where this is."""
        parts = (self.graph, self.grouping, self.cluster, self.costs)
        digest = hashlib.sha256(" ".join(part.fingerprint for part in parts).encode())
        digest.update(np.ascontiguousarray(self.forbidden).tobytes())
        if self.homes is not None:
            digest.update(f"window {self.homes.window_bytes}".encode())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes all parts into one file, from which `load` makes the same problem."""
        document = {
            "format": FORMAT,
            "graph": graph_format.to_json(self.graph),
            "cluster": cluster_format.to_document(self.cluster),
            "grouping": self.grouping.to_json(self.graph),
            "costs": self.costs.to_json(self.graph),
            "forbidden": self.forbidden.tolist(),
        }
        if self.units is not None:
            document["units"] = self.units.to_json(self.graph)
        if self.homes is not None:
            document["homes"] = {"window_bytes": self.homes.window_bytes}
        write_json(path, document, PlacementError)

    @staticmethod
    def load(path: str | Path) -> Problem:
        document = read_json(path, PlacementError, what="problem")
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlacementError(f"{path}: not a problem file ({FORMAT})")
        where = str(path)
        graph = graph_format.from_json(document.get("graph"), where=where)
        forbidden = document.get("forbidden")
        try:
            mask = np.array(forbidden, dtype=np.bool_).reshape((len(forbidden or ()), -1))
        except (TypeError, ValueError):
            mask = np.zeros((1, 0), dtype=np.bool_)
        if mask.size == 0:
            if forbidden != []:
                raise PlacementError(f"{path}: 'forbidden' must be a list of rows, one a group")
            mask = np.zeros((0, 0), dtype=np.bool_)
        return Problem(
            graph=graph,
            grouping=Grouping.from_json(document.get("grouping"), graph, where=where),
            cluster=cluster_format.from_document(document.get("cluster"), where=where),
            costs=Costs.from_json(document.get("costs"), graph, where=where),
            forbidden=frozen(mask),
            units=Grouping.from_json(document["units"], graph, where=where)
            if "units" in document
            else None,
            homes=_homes_from_json(document.get("homes"), where),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Problem):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def issue(self) -> str:
        """Who issues the ops: who the cluster says, else who does so in the model's framework."""
        return self.cluster.issued_by(self.graph.issue)

    @cached_property
    def issued_apart(self) -> BoolArray:
        """[D] see `Cluster.issued_apart`."""
        return self.cluster.issued_apart(self.issue)

    @cached_property
    def busy_seconds(self) -> FloatArray:
        """[D, N] how long each op occupies a device, the device's own overhead included."""
        seconds = self.costs.op_seconds[self.cluster.kind_of_device]
        return frozen(seconds + self.device_overhead_seconds)

    @cached_property
    def device_overhead_seconds(self) -> FloatArray:
        """[D, N] the part of that which is not the op's own work: gaps between kernels, and issuing
        the op where the device does that itself."""
        kinds = self.cluster.kind_of_device
        issuing = np.where(
            self.issued_apart[:, np.newaxis], 0.0, self.costs.overhead_seconds[kinds]
        )
        return frozen(self.costs.gap_seconds[kinds] + issuing)

    @cached_property
    def issue_seconds(self) -> FloatArray:
        """[D, N] how long issuing each op takes whoever does so beside the device."""
        overhead = self.costs.overhead_seconds[self.cluster.kind_of_device]
        return frozen(np.where(self.issued_apart[:, np.newaxis], overhead, 0.0))

    @cached_property
    def op_seconds(self) -> FloatArray:
        """[D, N] what an op adds to a device's work: for methods that reckon with one number an op.

        A device and its executor work side by side, so the slower of them counts. What one thread
        issues for all devices does not depend on the placement and does not count.
        """
        if self.issue != "device" or not self.issue_seconds.any():
            return self.busy_seconds
        return frozen(np.maximum(self.busy_seconds, self.issue_seconds))

    @cached_property
    def group_seconds(self) -> FloatArray:
        """[D, G] summed seconds of each group's ops on each device; infinite without a kernel."""
        totals = np.zeros((self.num_devices, self.num_groups))
        for device in range(self.num_devices):
            np.add.at(totals[device], self.grouping.group_of, self.op_seconds[device])
        return frozen(totals)

    @property
    def allowed(self) -> BoolArray:
        """[G, D] where a group may go: its ops have kernels there and the user does not object."""
        return self.space.allowed

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one placement."""
        return bool((self.allowed.sum(axis=1) > 1).any())

    @cached_property
    def group_resident_bytes(self) -> IntArray:
        """[G] memory of the variables and optimizer state of each group."""
        totals = np.zeros(self.num_groups, dtype=np.int64)
        np.add.at(totals, self.grouping.group_of, self.graph.resident_bytes)
        return frozen(totals)

    @cached_property
    def visits(self) -> Visits | None:
        """What may have to travel from its home; None without homes."""
        return None if self.homes is None else Visits.of(self.graph, self.grouping, self.homes)

    def pinned_bytes(self, devices: IndexArray) -> IntArray:
        """[B, D] memory that a host has to pin: of the weights that are at home there, those read
        where there is another memory. `devices` is [B, G]."""
        result = np.zeros((len(devices), self.num_devices), dtype=np.int64)
        visits = self.visits
        if visits is None or not len(visits):
            return result
        hosts = np.array([device.type == "cpu" for device in self.cluster.devices])
        holder, sizes, reading, starts = self._weight_readers
        pools = self.cluster.pool_of_device[devices]
        home = pools[:, holder]
        weight = np.repeat(np.arange(len(holder)), np.diff(np.append(starts, len(reading))))
        away = np.logical_or.reduceat(pools[:, reading] != home[:, weight], starts, axis=1)
        for device in np.flatnonzero(hosts):
            here = devices[:, holder] == device
            result[:, device] = np.where(away & here, sizes, 0).sum(axis=1)
        return result

    @cached_property
    def _weight_readers(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Of W weights that other groups read, in P pairs with these: ([W] group of the weight, [W]
        bytes, [P] reading group, [W] where the pairs of each begin)."""
        visits, graph = self.visits, self.graph
        assert visits is not None
        group_of = self.grouping.group_of.astype(np.int64)
        of = np.repeat(visits.tensor, np.diff(visits.offsets)).astype(np.int64)
        pairs = np.unique(np.stack([of, group_of[visits.reader]]), axis=1)
        tensors, starts = np.unique(pairs[0], return_index=True)
        return (
            group_of[graph.tensor_producer[tensors]],
            graph.tensor_bytes[tensors],
            pairs[1],
            starts,
        )


@dataclass(frozen=True, kw_only=True)
class ProblemConfig:
    """How a graph on a cluster becomes a problem. Patterns are regular expressions searched for in
    the names of ops.

    A group is placed as a whole, so a pin of one of its ops pins the group.
    """

    pins: tuple[tuple[str, str], ...] = ()
    """Groups with a matching op go there. Pairs of a pattern and a device."""
    forbidden_devices: tuple[str, ...] = ()
    """Place nothing on this device."""
    together: tuple[str, ...] = ()
    """Groups with a matching op become one."""
    group_by: tuple[ScopeRule, ...] = ()
    """Ops whose name contains REGEX form the group LABEL, which may use \\1. Without any, the
    graph's own rules hold, or else groups are made automatically."""
    groups: int | None = None
    """Merge down to at most about so many groups."""
    costs: tuple[Costs | str | Path, ...] = ()
    """A costs file with measured times. In Python, also `Costs`. Of several, the last one that
    knows an op counts; the links are those of the last file that has any of this cluster."""
    homes: bool | None = None
    """Weights have a home of their own: they may be in the memory of another device than the one
    that computes with them, and travel in each step. By default where they do not fit into the
    accelerators."""
    window: int | str | None = None
    """How many bytes of weights may be on their way to a device, or there and still needed, at a
    time. A number, or a text such as `1GiB`. By default one and a half times what a typical group
    reads, but at most a quarter of an accelerator's memory."""


def make_problem(graph: Graph, cluster: Cluster, config: ProblemConfig | None = None) -> Problem:
    """Groups the graph, estimates its costs and applies the constraints, as the config says."""
    config = config or ProblemConfig()
    grouping = group_ops(graph, config)
    for given in config.costs:
        if not isinstance(given, Costs):
            cluster = calibrated_cluster(given, cluster)
    tables = [c if isinstance(c, Costs) else Costs.load(c, graph) for c in config.costs]
    problem = Problem(
        graph=graph,
        grouping=grouping,
        cluster=cluster,
        costs=estimate_costs(graph, cluster, tables),
        forbidden=_forbidden(graph, grouping, cluster, config),
        units=_units(graph, config),
    )
    wanted = needs_homes(graph, cluster) if config.homes is None else config.homes
    if config.window is not None and not wanted:
        raise PlacementError(
            "a `window` is for weights with homes of their own, which nobody asked for and which "
            f"{graph.name!r} does not need on {cluster.name!r}; give homes=True"
        )
    if not wanted:
        return problem
    window = config.window
    if isinstance(window, str):
        window = cluster_format.parse_bytes(window, "the window for weights", PlacementError)
    return with_homes(problem, window)


def needs_homes(graph: Graph, cluster: Cluster) -> bool:
    """Whether the weights do not fit into the accelerators that are there beside a host."""
    beside = [device.memory_bytes for device in cluster.devices if device.type != "cpu"]
    if not beside or len(beside) == cluster.num_devices or not hands_out_weights(graph):
        return False
    return int(graph.resident_bytes.sum()) > sum(beside)


def with_homes(problem: Problem, window_bytes: int | None = None) -> Problem:
    """The same problem where weights have homes of their own: its groups are each split in two, and
    its ops keep their names and numbers. One that has homes gets another window.

    `window_bytes` is how much of the weights may be on their way to a device, or there and still
    needed, at a time.
    """
    if problem.homes is not None:
        if window_bytes is None:
            window_bytes = _window(problem.graph, problem.grouping, problem.cluster)
        return replace(problem, homes=Homes(window_bytes=window_bytes))
    graph = untied(problem.graph)
    grouping, part_of = split(problem.graph, problem.grouping)
    units = problem.units
    # Nobody issues a weight.
    overhead = np.where(owners(graph), 0.0, problem.costs.overhead_seconds)
    return Problem(
        graph=graph,
        grouping=grouping,
        cluster=problem.cluster,
        costs=replace(problem.costs, overhead_seconds=frozen(overhead)),
        forbidden=frozen(problem.forbidden[part_of])
        if problem.forbidden.size
        else problem.forbidden,
        units=None if units is None else split(problem.graph, units)[0],
        homes=Homes(
            window_bytes=_window(graph, grouping, problem.cluster)
            if window_bytes is None
            else window_bytes
        ),
    )


def _window(graph: Graph, grouping: Grouping, cluster: Cluster) -> int:
    """One and a half times what a typical group reads, but at most a quarter of an accelerator's
    memory."""
    beside = [
        int(size)
        for device, size in zip(cluster.devices, cluster.pool_bytes, strict=True)
        if device.type != "cpu"
    ]
    most = min(beside) // 4 if beside else default_window(graph, grouping)
    return max(1, min(most, default_window(graph, grouping)))


def _homes_from_json(document: object, where: str) -> Homes | None:
    if document is None:
        return None
    window = document.get("window_bytes") if isinstance(document, dict) else None
    if isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 2**60:
        raise PlacementError(f"{where}: 'homes' must be {{'window_bytes': a positive number}}")
    return Homes(window_bytes=window)


def _units(graph: Graph, config: ProblemConfig) -> Grouping | None:
    """What has to stay together op by op, where the user wants more than co-location."""
    if not config.together:
        return None
    return group(graph, (by_colocation, *(by_together(pattern) for pattern in config.together)))


def group_ops(graph: Graph, config: ProblemConfig) -> Grouping:
    """The groups that a config makes of a graph."""
    for rule in config.group_by:
        matching_groups(graph, each_op(graph), rule.pattern)  # raises where nothing matches
    rules = default_rules(config.group_by or graph.group_rules, config.groups)
    return group(graph, (*rules, *(by_together(pattern) for pattern in config.together)))


def _forbidden(
    graph: Graph, grouping: Grouping, cluster: Cluster, config: ProblemConfig
) -> BoolArray:
    if not config.pins and not config.forbidden_devices:
        return frozen(np.zeros((0, 0), dtype=np.bool_))
    forbidden = np.zeros((grouping.num_groups, cluster.num_devices), dtype=np.bool_)
    for name in config.forbidden_devices:
        forbidden[:, cluster.device_number(name)] = True
    for pattern, name in config.pins:
        elsewhere = np.arange(cluster.num_devices) != cluster.device_number(name)
        for g in matching_groups(graph, grouping, pattern):
            forbidden[g] |= elsewhere
    return frozen(forbidden)
