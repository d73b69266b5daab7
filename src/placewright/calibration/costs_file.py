"""What a calibration found, and the costs file that it is kept in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placewright import cluster as cluster_format
from placewright.calibration.drift import Pace
from placewright.cluster import Cluster
from placewright.costs import (
    FORMAT,
    Costs,
    Source,
    estimate_costs,
    same_devices,
    with_own_limits,
)
from placewright.errors import CostsError
from placewright.files import read_json, write_json
from placewright.graph import BoolArray, Graph
from placewright.placement import Placement
from placewright.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was found out: a table of op times, and the cluster with its links as measured."""

    table: Costs
    cluster: Cluster
    pace: Pace | None = None
    """How fast the machine was, where that was measured just now."""
    fitted_to: tuple[Placement, ...] = ()
    """What it was fitted to, where that was measured just now."""

    def problem(self, problem: Problem) -> Problem:
        """The same problem under these costs."""
        return dataclasses.replace(
            problem,
            cluster=self.cluster,
            costs=estimate_costs(problem.graph, self.cluster, [self.table]),
        )

    def save(self, path: str | Path, graph: Graph) -> None:
        """A costs file that also holds the cluster."""
        known = self.table.source >= Source.GRAPH
        document = {
            "format": FORMAT,
            "graph": graph.fingerprint,
            "kinds": {
                kind: {
                    graph.op_names[op]: float(self.table.op_seconds[k, op])
                    for op in np.flatnonzero(known[k])
                }
                for k, kind in enumerate(self.table.kinds)
            },
            **self._demands(graph, known),
            "cluster": cluster_format.to_document(self.cluster),
        }
        write_json(path, document, CostsError)

    def _demands(self, graph: Graph, known: BoolArray) -> dict[str, Any]:
        if not self.table.demand.any():
            return {}
        return {
            "demands": {
                kind: {
                    graph.op_names[op]: float(self.table.demand[k, op])
                    for op in np.flatnonzero(known[k] & (self.table.demand[k] > 0))
                }
                for k, kind in enumerate(self.table.kinds)
            }
        }

    @staticmethod
    def load(path: str | Path, problem: Problem) -> Calibration:
        """What `save` wrote, for a problem of that graph and cluster, and no other."""
        document = read_json(path, CostsError, what="costs")
        if not isinstance(document, dict) or "cluster" not in document:
            raise CostsError(f"{path}: no costs that a calibration wrote; move it away")
        if document.get("graph") != problem.graph.fingerprint:
            raise CostsError(f"{path}: costs of another graph; move it away")
        found = cluster_format.from_document(document["cluster"], where=str(path))
        own = problem.cluster
        if not same_devices(found, own):
            raise CostsError(
                f"{path}: costs of cluster {found.name!r}, not of {own.name!r}; move it away"
            )
        return Calibration(
            table=Costs.from_json(document, problem.graph, where=str(path)),
            cluster=with_own_limits(found, own),
        )
