"""The options of `placewright place` that make it a matter of many processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placewright.cli import common, evaluation
from placewright.machine import usable_cores

if TYPE_CHECKING:
    from placewright.backends import Program, RunConfig
    from placewright.cluster import Cluster
    from placewright.distributed.config import TeamConfig
    from placewright.distributed.team import Team
    from placewright.evaluators.base import Evaluator
    from placewright.problem import Problem
    from placewright.search import Budget

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
    from placewright.search import parse_duration

    if controllers is not None and controllers < 1:
        raise common.UsageError(f"--controllers {controllers}: at least one, or leave it out")
    if controllers is None and max_staleness is not None:
        raise common.UsageError("--max-staleness means nothing without --controllers")
    check_installed("--controllers" if controllers else "--workers")
    return TeamConfig(
        controllers=controllers or 0,
        workers=1 if workers is None else workers,
        address=address,
        resources=parse_resources(resources or ()),
        trial_seconds=parse_duration(trial_timeout),
        max_staleness=max_staleness,
    )


def choose(
    config: TeamConfig | None,
    wanted: str | None,
    model: str,
    cluster: Cluster,
    resume: str | None,
    budget: Budget,
    real: RunConfig,
) -> str:
    """How placements are tried. Workers do one or the other, and real runs only when told to."""
    if config is not None and resume is None:
        wanted = wanted or evaluation.SIMULATE
    how = evaluation.choose(wanted, model, cluster, resume, budget, real)
    if config is not None and how == evaluation.BOTH:
        raise common.UsageError(
            f"--workers goes with --evaluate {evaluation.SIMULATE} or {evaluation.MEASURE}, not "
            f"with {evaluation.BOTH}"
        )
    return how


@contextmanager
def team(
    config: TeamConfig | None,
    problem: Problem,
    program: Program | None,
    real: RunConfig,
    feeds: str | None,
) -> Iterator[Team | None]:
    """Whoever the options ask for, started before the clock of the search is."""
    if config is None:
        yield None
        return
    from placewright.backends.feeds import load_feeds
    from placewright.distributed.team import assemble
    from placewright.evaluators.simulated import SimulatedEvaluator

    make: Callable[[], Evaluator]
    if program is None:
        config = replace(config, resources=config.resources or {"CPU": 1.0})
        make = functools.partial(SimulatedEvaluator, problem, threads=1)
    else:
        given = None if feeds is None else load_feeds(feeds)
        make = functools.partial(_measuring, problem, program, real, given)
        if not config.resources:
            config = replace(config, resources=_devices(problem.cluster))
    with ExitStack() as stack:
        with common.status("starting Ray ..."):
            assembled = stack.enter_context(assemble(problem, make, config, cheap=program is None))
        yield assembled


def _devices(cluster: Cluster) -> dict[str, float]:
    """What a worker that measures keeps to itself: all GPUs, or the whole machine."""
    gpus = sum(device.type == "gpu" for device in cluster.devices)
    return {"GPU": float(gpus)} if gpus else {"CPU": float(usable_cores())}


def _measuring(problem: Problem, program: Program, real: RunConfig, feeds: Any) -> Evaluator:
    """In a worker's process: a runner that lives as long as the worker does."""
    from placewright import backends
    from placewright.evaluators.measured import MeasuredEvaluator

    runner = backends.runner(program, problem.cluster, real, feeds=feeds)
    runner.start()
    return MeasuredEvaluator(problem, runner)


def described(team: Team | None) -> str:
    """A line for the progress display."""
    if team is None:
        return ""
    status = team.status()
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
