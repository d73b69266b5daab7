"""The options of `placewright place` that make it a matter of many processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from placewright.cli import common

if TYPE_CHECKING:
    from placewright.distributed.config import TeamConfig

ControllersOption = Annotated[
    int | None,
    typer.Option(
        metavar="C", help="Train learned methods with C controllers side by side, on Ray."
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        metavar="K", help="Try placements with K processes, on Ray; K for each controller."
    ),
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="A Ray cluster that runs already: HOST:PORT, or 'auto' for this machine's. Otherwise "
        "one is started here and stopped at the end.",
        show_default=False,
    ),
]
WorkerResourceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker-resource",
        metavar="NAME=AMOUNT",
        help="What each worker needs of the machine Ray puts it on, such as GPU=4; may be given "
        "several times. Default: one CPU to simulate, all devices of the cluster to measure.",
        show_default=False,
    ),
]
TrialTimeoutOption = Annotated[
    str, typer.Option(metavar="TIME", help="A worker that takes longer for a trial is replaced.")
]
MaxStalenessOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Leave out gradients more than N steps old; by default none is."
    ),
]


def configured(
    controllers: int | None,
    workers: int | None,
    address: str | None,
    resources: Sequence[str] | None,
    trial_timeout: str,
    max_staleness: int | None,
) -> TeamConfig | None:
    """The team that the options ask for; None for the one process that always is."""
    if controllers is None and workers is None:
        for name, value in {
            "--ray-address": address,
            "--worker-resource": resources,
            "--max-staleness": max_staleness,
        }.items():
            if value is not None:
                raise common.UsageError(f"{name} means nothing without --workers")
        return None
    from placewright.distributed.config import TeamConfig, check_installed, parse_resources
    from placewright.units import parse_duration

    if controllers is not None and controllers < 1:
        raise common.UsageError(f"--controllers {controllers}: at least one, or leave it out")
    if controllers is None and max_staleness is not None:
        raise common.UsageError("--max-staleness means nothing without --controllers")
    check_installed("--controllers" if controllers else "--workers")
    return TeamConfig(
        controllers=controllers or 0,
        workers=1 if workers is None else workers,
        address=address,
        resources=parse_resources(resources) if resources else None,
        trial_seconds=parse_duration(trial_timeout),
        max_staleness=max_staleness,
    )


def described(status: Mapping[str, float]) -> str:
    """A line for the progress display."""
    busy, count = int(status["workers_busy"]), int(status["workers"])
    line = f"{busy} of {count} workers busy, {count - busy} idle"
    if status["workers_replaced"]:
        line += f", {status['workers_replaced']:.0f} replaced"
    if "controllers" in status:
        line = (
            f"{status['controllers']:.0f} controllers, {line}, "
            f"{status['trials_per_second']:,.1f} trials/s, staleness {status['staleness']:.1f}"
        )
    return line
