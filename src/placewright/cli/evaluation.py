"""How `placewright place` tries placements: in the simulator, on real devices, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placewright.cli import common
from placewright.cluster import Cluster
from placewright.errors import ClusterError, SearchError

if TYPE_CHECKING:
    from placewright.api import Result
    from placewright.backends import Program, RunConfig, Runner
    from placewright.distributed.team import Team
    from placewright.problem import Problem
    from placewright.search import Budget

SIMULATE, MEASURE, BOTH = "simulate", "measure", "simulate+measure"

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

OpenServersOption = Annotated[
    bool,
    typer.Option(
        "--open-servers",
        help="For systems that allow no private network: let TensorFlow's servers listen on all "
        "interfaces, where whoever reaches them can read and write your files.",
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


def choose(
    wanted: str | None,
    model: str,
    cluster: Cluster,
    resume: str | None,
    budget: Budget,
    config: RunConfig,
) -> str:
    """What the user wants, or else what fits: real runs where there are devices to choose from.

    A run that is continued goes on as it began: its journal's times are of one kind.
    """
    from placewright.api import RUN_FILE, began_with
    from placewright.backends import why_not_run

    if wanted not in (None, SIMULATE, MEASURE, BOTH):
        raise common.UsageError(f"--evaluate {wanted}: expected {SIMULATE}, {MEASURE} or {BOTH}")
    if resume is not None:
        began = began_with(resume)
        if wanted is not None and began not in (None, wanted):
            raise SearchError(f"{resume}: began with {began}; it cannot go on with {wanted}")
        wanted = wanted or began
        if wanted is None:
            raise SearchError(f"{resume}: does not say how it began ({RUN_FILE}); give --evaluate")
    if wanted is None:
        if budget.seconds is None:  # trials alone are mostly meant for the simulator
            return SIMULATE
        here = cluster.num_devices > 1 and not why_not_run(model, cluster, config)
        return BOTH if here else SIMULATE
    if wanted != SIMULATE:
        require_here(model, cluster, config)
    return wanted


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


def affordable(how: str, problem: Problem, budget: Budget) -> str:
    """`how`, or `simulate` where nobody asked for real runs and they would take too long or too
    much memory."""
    from placewright.backends import RunConfig
    from placewright.evaluators.simulated import SimulatedEvaluator
    from placewright.placement import everything_on
    from placewright.refine import enough_for

    singles = [everything_on(problem, device) for device in range(problem.num_devices)]
    measurements = SimulatedEvaluator(problem).evaluate(singles)
    fastest = min(measurement.mean_seconds for measurement in measurements)
    largest = max(sum(measurement.peak_bytes) for measurement in measurements)
    memory = Cluster.load("local").devices[0].memory_bytes
    if not enough_for(budget, fastest, RunConfig.steps):
        reason = "the budget gives no time to measure ten placements of this model"
    # Every device keeps the variables of the placements before.
    elif problem.num_devices * largest > memory / 2:
        reason = "the model may not fit this machine's memory"
    else:
        return how
    common.errors.print(f"simulated only: {reason} (--evaluate {BOTH} measures anyway)")
    return SIMULATE


@contextmanager
def devices(
    how: str, program: Program | None, cluster: Cluster, config: RunConfig, feeds: str | None
) -> Iterator[Runner | None]:
    """The runner, where one is needed, started before the clock of the search is."""
    from placewright import backends
    from placewright.backends.feeds import load_feeds

    if how == SIMULATE or program is None:
        if feeds is not None and how == SIMULATE and program is None:
            raise common.UsageError("--feeds means nothing in the simulator")
        yield None
        return
    given = None if feeds is None else load_feeds(feeds)
    with backends.runner(program, cluster, config, feeds=given) as runner:
        with common.status("starting the devices' processes ..."):
            runner.start()
        yield runner


def run(
    how: str,
    problem: Problem,
    runner: Runner | None,
    methods: Sequence[str],
    budget: Budget,
    *,
    team: Team | None = None,
    **options: Any,
) -> Result:
    """The search, tried in this way. A `team` has devices of its own, if it needs any."""
    from placewright import api
    from placewright.evaluators.measured import MeasuredEvaluator
    from placewright.measuring import search_measured
    from placewright.refine import refine

    if runner is None:
        return api.run(problem, methods, budget, team=team, **options)
    if how == MEASURE:
        return search_measured(
            problem, MeasuredEvaluator(problem, runner), methods, budget, **options
        )
    return refine(problem, runner, methods, budget, **options)
