"""The options of real runs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placewright.cli import common
from placewright.cluster import Cluster
from placewright.errors import ClusterError

if TYPE_CHECKING:
    from placewright.backends import RunConfig

FeedsOption = Annotated[
    str | None,
    typer.Option(
        "--feeds", metavar="FILE", help="An .npz file with the inputs; made up when not given."
    ),
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", metavar="SECONDS", help="Most time for one real run.")
]
LimitMemoryOption = Annotated[
    bool,
    typer.Option("--limit-memory", help="Hold CPU devices to the memory the cluster says."),
]
AddressOption = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        metavar="DEVICE=HOST:PORT",
        help="A TensorFlow server already running; for each device.",
    ),
]


def run_config(
    model: str, address: list[str] | None, time_limit: float, limit_memory: bool, **more: Any
) -> RunConfig:
    """The settings of real runs as the options say, for the backend that reads the model."""
    from placewright.backends import RunConfig, backend_of

    addresses = dict(common.split(text, "--address", "DEVICE=HOST:PORT") for text in address or [])
    backend = backend_of(model)
    kind = RunConfig if backend is None else backend.run_config
    settings = {
        "time_limit_seconds": time_limit,
        "limit_memory": limit_memory,
        "addresses": addresses,
        **more,
    }
    known = {field.name for field in fields(kind)}
    for name, value in settings.items():
        if value and name not in known and backend is not None:
            raise common.UsageError(f"{name} means nothing for a model of {backend.name}")
    return kind(**{name: value for name, value in settings.items() if name in known})


def require_here(model: str, cluster: Cluster, config: RunConfig) -> None:
    """Raises when the cluster's devices are neither those of this machine nor have addresses."""
    from placewright.backends import backend_of

    backend = backend_of(model)
    reason = "" if backend is None else backend.why_not_here(cluster, config)
    if reason:
        raise ClusterError(
            f"cluster {cluster.name!r} cannot be measured on this machine: {reason} "
            "('placewright devices' shows what can)"
        )
