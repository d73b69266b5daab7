"""How many processes to search with, and what each worker needs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placewright.cluster import Cluster
from placewright.errors import MissingExtraError, SearchError
from placewright.machine import usable_cores


@dataclass(frozen=True, kw_only=True)
class TeamConfig:
    """Who works on a search, and where."""

    controllers: int = 0
    """Learners that train one policy together; 0: none, workers alone."""
    workers: int = 1
    """Processes that try placements: this many for each controller, or in all without any."""
    address: str | None = None
    """Of a Ray cluster that runs already, or `auto` for the one this machine belongs to; None:
    start one on this machine and stop it at the end."""
    resources: Mapping[str, float] | None = None
    """What Ray sets aside for each worker and gives to nobody else, by name, such as 4 of `GPU` or
    one of a resource of your own; None: one CPU to simulate, all devices of the cluster to
    measure."""
    trial_seconds: float = 300.0
    """A worker that takes longer for a placement hangs: it is replaced."""
    max_staleness: int | None = None
    """Gradients computed from a policy more than this many steps old are left out; None: none
    is."""

    def __post_init__(self) -> None:
        if self.controllers < 0 or self.workers < 1:
            raise SearchError(
                f"{self.controllers} controllers with {self.workers} workers each: at least one "
                "worker is needed"
            )
        if not self.trial_seconds > 0:
            raise SearchError(f"a trial cannot be given {self.trial_seconds:g} seconds")
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
        gpus = sum(device.type == "gpu" for device in cluster.devices)
        return {"GPU": float(gpus)} if gpus else {"CPU": float(usable_cores())}


def parse_resources(settings: Sequence[str]) -> dict[str, float]:
    """Amounts by name, of `NAME=AMOUNT` each."""
    resources = {}
    for setting in settings:
        name, _, amount = setting.partition("=")
        try:
            resources[name.strip()] = float(amount)
        except ValueError:
            raise SearchError(
                f"--worker-resource {setting!r} is not of the form NAME=AMOUNT, such as GPU=4"
            ) from None
    return resources


def check_installed(what: str) -> None:
    """Raises, with the install command, when Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(what, "ray")
