"""A placement problem: what to place, where, and what it costs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
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

    @property
    def num_groups(self) -> int:
        return self.grouping.num_groups

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @cached_property
    def fingerprint(self) -> str:
        parts = (self.graph, self.grouping, self.cluster, self.costs)
        text = " ".join(part.fingerprint for part in parts)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

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
        """[G, D] whether every op of the group has a kernel for the device."""
        return frozen(np.isfinite(self.group_seconds.T))

    @cached_property
    def group_resident_bytes(self) -> IntArray:
        """[G] memory of the variables and optimizer state of each group."""
        totals = np.zeros(self.num_groups, dtype=np.int64)
        np.add.at(totals, self.grouping.group_of, self.graph.resident_bytes)
        return frozen(totals)
