"""From a module that does not fit and a workload to a plan, and to the module as planned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from placewright.backends.pytorch.offload.estimating import estimated_costs, host_of
from placewright.backends.pytorch.offload.links import Link
from placewright.backends.pytorch.offload.measuring import refine
from placewright.backends.pytorch.offload.plan import OffloadPlan
from placewright.backends.pytorch.offload.planner import Limits, Planner
from placewright.backends.pytorch.offload.recording import record
from placewright.backends.pytorch.offload.shapes import Workload
from placewright.cluster import Cluster
from placewright.errors import PlacementError

logger = logging.getLogger(__name__)

_RESERVED_BYTES = 128 * 2**20
"""Of a GPU's memory: what the libraries of matrix products take for each stream, and graphs."""


@dataclass(frozen=True, kw_only=True)
class PlannedOffload:
    """A plan for a module that does not fit, and what it was found with."""

    plan: OffloadPlan
    planner: Planner
    workload: Workload

    def apply(
        self,
        model: torch.nn.Module,
        *,
        evaluate: str = "simulate",
        checkpoint: str | Path | None = None,
        link: Link | None = None,
    ) -> Any:
        """See `OffloadPlan.apply`.

        Args:
            model: see there.
            evaluate: `measure` takes the times of units in some passes and plans again with them.
            checkpoint: see there.
            link: see there.
        """
        if evaluate not in ("simulate", "measure"):
            raise PlacementError(f"evaluate is {evaluate!r}; there are 'simulate' and 'measure'")
        placed = self.plan.apply(model, checkpoint=checkpoint, link=link)
        if evaluate == "measure":
            refine(placed, self.planner, self.workload)
        return placed

    def save(self, path: str | Path) -> None:
        """See `OffloadPlan.save`."""
        self.plan.save(path)


def plan_offload(
    model: torch.nn.Module,
    workload: object,
    cluster: Cluster,
    device: str,
    *,
    keep: Sequence[str] = (),
    whole: Sequence[str] = (),
    seconds: float = 10.0,
    seed: int = 0,
) -> PlannedOffload:
    """Plans by a description of the machine; moves and computes nothing.

    Args:
        model: it may be on `meta`.
        workload: see `Workload.of`.
        cluster: the machine, with the memory that may be used.
        device: its device that computes beside the host, as the cluster calls it.
        keep: units whose weights stay on the device.
        whole: classes of modules that are units, instead of those that the module says.
        seconds: to search.
        seed: of the search.
    """
    from placewright.backends.pytorch import torch_name

    work = Workload.of(workload)
    recorded = record(model, work, whole)
    is_gpu = cluster.devices[cluster.device_number(device)].type == "gpu"
    item = max((p.element_size() for p in model.parameters()), default=4)
    costs = estimated_costs(
        recorded, cluster, device, itemsize=item, captured=is_gpu and work.static_cache
    )
    limits = Limits(
        device=torch_name(device),
        device_bytes=cluster.devices[cluster.device_number(device)].memory_bytes,
        host_bytes=cluster.devices[host_of(cluster, device)].memory_bytes,
        reserved_bytes=_RESERVED_BYTES if is_gpu else 0,
        keep=tuple(keep),
    )
    weights = {name: call.weight for name, call in work.calls.items()}
    planner = Planner(recorded=recorded, weights=weights, limits=limits, costs=costs)
    plan = planner.search(seconds, seed)
    return PlannedOffload(plan=plan, planner=planner, workload=work)
