"""How many processes to search with, and what each worker needs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass

from placewright.cluster import Cluster
from placewright.errors import MissingExtraError, SearchError
from placewright.machine import usable_cores


@dataclass(frozen=True, kw_only=True)
class TeamConfig:
    """Who works on a search, and where."""

    controllers: int = 0
    """Train learned methods with C controllers side by side, on Ray. They train one policy
    together; 0: none, workers alone."""
    workers: int = 1
    """Try placements with K processes, on Ray; K for each controller."""
    address: str | None = None
    """A Ray cluster that runs already: HOST:PORT, or 'auto' for this machine's; otherwise one is
    started here and stopped at the end."""
    resources: Mapping[str, float] | None = None
    """What each worker needs of the machine Ray puts it on, such as GPU=4; by default one CPU to
    simulate, all devices of the cluster to measure. No two workers get the same; CPU=2 gives
    each that measures two cores of its own."""
    trial_seconds: float = 300.0
    """A worker that takes longer for a trial is replaced."""
    max_staleness: int | None = None
    """Leave out gradients more than N steps old; by default none is."""

    def __post_init__(self) -> None:
        if self.controllers < 0 or self.workers < 1:
            raise SearchError(
                f"{self.controllers} controllers with {self.workers} workers each: at least one "
                "worker is needed"
            )
        if not self.trial_seconds > 0:
            raise SearchError(f"a trial cannot be given {self.trial_seconds:g} seconds")
        if self.max_staleness is not None and not self.controllers:
            raise SearchError("`max_staleness` means nothing without `controllers`")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise SearchError(f"staleness is at least 0, not {self.max_staleness}")
        for name, amount in (self.resources or {}).items():
            if not (name and math.isfinite(amount) and amount >= 0):
                raise SearchError(f"worker resource {name}={amount:g} is no amount")
            if amount > 1 and amount != int(amount):
                raise SearchError(
                    f"worker resource {name}={amount:g}: Ray shares one of a kind, but gives whole "
                    "ones above that"
                )

    @property
    def all_workers(self) -> int:
        return self.workers * max(self.controllers, 1)

    def resources_for(self, cluster: Cluster, *, measure: bool) -> dict[str, float]:
        """What each worker keeps to itself; to measure that is all GPUs, or the whole machine."""
        if self.resources is not None:
            return dict(self.resources)
        if not measure:
            return {"CPU": 1.0}
        # Streams and partitions of one GPU are one that Ray knows of.
        gpus = len({device.chip for device in cluster.devices if device.type == "gpu"})
        return {"GPU": float(gpus)} if gpus else {"CPU": float(usable_cores())}


def check_installed(what: str) -> None:
    """Raises, with the install command, when Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(what, "ray")
