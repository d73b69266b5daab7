"""`placewright calibrate`: makes the simulator predict this machine, and says how well it does."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placewright import backends
from placewright.backends.base import LoadOptions
from placewright.cli import common
from placewright.cli.options import Only, UsageError, add_command
from placewright.cli.outputs import check_output
from placewright.cli.real import FeedsOption, RealRuns, feeds_from, run_config
from placewright.cluster import Cluster
from placewright.errors import CostsError, MissingExtraError
from placewright.files import write_text
from placewright.placement import everything_on
from placewright.problem import Problem, ProblemConfig
from placewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from placewright.backends import Runner
    from placewright.calibration import Fidelity


def add_to(app: typer.Typer) -> None:
    add_command(app, calibrate)


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """What is measured, and where it goes."""

    output: str | None = None
    """Where to write the costs."""
    placements: int = 12
    """Placements that the costs are fitted to."""
    check: int = 0
    """Measure N fresh placements and compare them with the prediction."""
    plot: str | None = None
    """With --check: a scatter plot as HTML."""
    seed: int = 0
    """For the placements that are measured."""
    force: bool = False
    """Keep costs that cannot be trusted, as on a busy machine."""

    def __post_init__(self) -> None:
        if self.plot is not None and not self.check:
            raise UsageError("--plot shows a check: give --check N")
        # What is measured for minutes must not be lost for want of a place to put it.
        for path in (self.output, self.plot):
            if path is not None:
                check_output(path)
        written = [Path(path).resolve() for path in (self.output, self.plot) if path is not None]
        if len(set(written)) < len(written):
            raise UsageError(f"{self.plot}: the costs and the plot cannot both be written there")
        if self.plot is not None and importlib.util.find_spec("plotly") is None:
            raise MissingExtraError("a plot as HTML", "report")


def calibrate(
    model: common.ModelArgument,
    *,
    cluster: common.ClusterOption = "local",
    problem: Annotated[ProblemConfig, Only("costs", "group_by", "groups")],
    options: CalibrationOptions,
    feeds: FeedsOption = None,
    real: RealRuns,
    load: LoadOptions,
    as_json: common.JsonOption = False,
) -> None:
    """Measure the costs of a model's ops and of the links of this machine, for the simulator.

    With --costs instead of -o, an earlier calibration is only checked.

    Example: placewright calibrate rnnlm --scale small --cluster cpu2 -o costs.json --check 20
    """
    if options.output is None and not (problem.costs and options.check):
        raise UsageError("give -o FILE for the costs, or --costs FILE --check N")
    machine = Cluster.load(cluster)
    config = run_config(model, load, real)
    backends.check_here(model, machine, config, load.backend)
    inputs = feeds_from(feeds)
    program = common.load_program(model, load)
    made = common.load_problem(program.graph, machine, problem)
    with backends.runner(program, machine, config, feeds=inputs) as runner:
        facts, fidelity = _calibrated(made, runner, options)
    if as_json:
        common.print_json(facts)
    else:
        _print(facts, options.output, fidelity)
    if options.plot is not None and fidelity is not None:
        _write_plot(options.plot, fidelity, f"{program.graph.name} on {machine.name}")


def _calibrated(
    problem: Problem, runner: Runner, options: CalibrationOptions
) -> tuple[dict[str, Any], Fidelity | None]:
    """What was found out, and how well it predicts fresh placements where that was asked for."""
    from placewright import calibration
    from placewright.placers.heft import heft

    facts: dict[str, Any] = {"model": problem.graph.name, "cluster": problem.cluster.name}
    with common.status("calibrating ...") as say:
        fitted_to = calibration.varied_placements(problem, options.placements, options.seed)
        pace = None
        if options.output is not None:
            found = calibration.calibrate(
                problem,
                runner,
                fitted_to,
                propose=heft,
                forced=options.force,
                say=lambda text: say(f"{text} ..."),
            )
            found.save(options.output, problem.graph)
            problem, pace = found.problem(problem), found.pace
            fitted_to = list(found.fitted_to)
        facts["links"] = [
            {
                "name": link.name,
                "latency_seconds": link.latency_seconds,
                "bandwidth": link.bandwidth,
                "gap_seconds": link.gap_seconds,
                "overhead_seconds": link.overhead_seconds,
                "overhead_bandwidth": _or_none(link.overhead_bandwidth),
            }
            for link in problem.cluster.links
        ]
        facts["contention"] = problem.cluster.contention
        if not options.check:
            return facts, None
        say("measuring fresh placements ...")
        # Other ones than those the costs were fitted to, single devices among them.
        singles = [everything_on(problem, d) for d in range(problem.num_devices)]
        fresh = calibration.varied_placements(
            problem, options.check, options.seed + 1_000_003, without=[*fitted_to, *singles]
        )
        ran, fidelity = calibration.check(problem, runner, fresh, pace)
    facts["check"] = {
        "placements": len(ran),
        "mean_absolute_error": fidelity.error,
        "rank_correlation": _or_none(fidelity.spearman),
        "rank_correlation_of_fastest_half": _or_none(fidelity.fastest_half.spearman),
        "rank_correlation_of_passes": _or_none(fidelity.repeated),
        "predicted_seconds": list(fidelity.predicted),
        "measured_seconds": list(fidelity.measured),
        "raw_seconds": list(fidelity.raw),
    }
    return facts, fidelity


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print(facts: dict[str, Any], output: str | None, result: Fidelity | None) -> None:
    say = common.console.print
    for link in facts["links"]:
        overhead = format_seconds(link["overhead_seconds"])
        say(
            f"{common.escaped(link['name'])}: {format_seconds(link['latency_seconds'])} + "
            f"{format_bytes(link['bandwidth'])}/s, {overhead} of a busy core per transfer"
        )
    if facts["contention"]:
        say(f"each further device that computes slows all down by {facts['contention']:.0%}")
    if output is not None:
        say(f"costs written to {common.escaped(output)}; use them with --costs")
    if result is not None:
        say(scatter(result.measured, result.predicted), markup=False)
        say(
            f"{len(result.measured)} fresh placements: mean error [bold]{result.error:.1%}[/bold], "
            f"rank correlation [bold]{result.spearman:.3f}[/bold] (among the fastest half "
            f"{result.fastest_half.spearman:.3f}; of the measurement with itself "
            f"{result.repeated:.3f})"
        )


def scatter(
    measured: tuple[float, ...], predicted: tuple[float, ...], width: int = 60, height: int = 20
) -> str:
    """A plot in characters: measured to the right, predicted upwards, dots on the diagonal."""
    low = 0.95 * min(*measured, *predicted)
    high = 1.05 * max(*measured, *predicted)
    grid = [[" "] * width for _ in range(height)]

    def cell(x: float, y: float) -> tuple[int, int]:
        across = int((x - low) / (high - low) * (width - 1))
        up = int((y - low) / (high - low) * (height - 1))
        return height - 1 - up, across

    for step in range(width):
        value = low + (high - low) * step / (width - 1)
        row, column = cell(value, value)
        grid[row][column] = "."
    for x, y in zip(measured, predicted, strict=True):
        row, column = cell(x, y)
        grid[row][column] = "o" if grid[row][column] in " ." else "O"
    lines = ["predicted", *(f"|{''.join(row)}" for row in grid), f"+{'-' * width} measured"]
    lines.append(f" {format_seconds(low):<{width - 9}}{format_seconds(high):>9}")
    return "\n".join(lines)


def _write_plot(path: str, result: Fidelity, title: str) -> None:
    import plotly.graph_objects as go

    high = max(*result.measured, *result.predicted)
    figure = go.Figure(
        [
            go.Scatter(x=result.measured, y=result.predicted, mode="markers", name="placements"),
            go.Scatter(x=[0, high], y=[0, high], mode="lines", name="equal"),
        ]
    )
    figure.update_layout(
        title=title, xaxis_title="measured seconds", yaxis_title="predicted seconds"
    )
    write_text(path, figure.to_html(include_plotlyjs=True), CostsError)
