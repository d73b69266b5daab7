"""A placement problem: what to place, where, and what it costs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from placewright.cluster import Cluster
from placewright.costs import Costs
from placewright.errors import CostsError, PlacementError
from placewright.graph import BoolArray, FloatArray, Graph, IntArray, frozen
from placewright.grouping import Grouping


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

    @property
    def num_groups(self) -> int:
        return self.grouping.num_groups

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @cached_property
    def fingerprint(self) -> str:
        parts = (self.graph, self.grouping, self.cluster, self.costs)
        digest = hashlib.sha256(" ".join(part.fingerprint for part in parts).encode())
        digest.update(np.ascontiguousarray(self.forbidden).tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def op_seconds(self) -> FloatArray:
        """[D, N] seconds of each op on each device."""
        return frozen(self.costs.op_seconds[self.cluster.kind_of_device])

    @cached_property
    def group_seconds(self) -> FloatArray:
        """[D, G] summed seconds of each group's ops on each device; infinite without a kernel."""
        totals = np.zeros((self.num_devices, self.num_groups))
        for device in range(self.num_devices):
            np.add.at(totals[device], self.grouping.group_of, self.op_seconds[device])
        return frozen(totals)

    @cached_property
    def allowed(self) -> BoolArray:
        """[G, D] where a group may go: its ops have kernels there and the user does not object."""
        runnable = np.isfinite(self.group_seconds.T)
        return frozen(runnable & ~self.forbidden if self.forbidden.size else runnable)

    @cached_property
    def group_resident_bytes(self) -> IntArray:
        """[G] memory of the variables and optimizer state of each group."""
        totals = np.zeros(self.num_groups, dtype=np.int64)
        np.add.at(totals, self.grouping.group_of, self.graph.resident_bytes)
        return frozen(totals)
