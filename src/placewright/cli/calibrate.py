"""`placewright calibrate`: makes the simulator predict this machine, and says how well it does."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placewright.cli import common
from placewright.cli.evaluation import (
    AddressOption,
    FeedsOption,
    LimitMemoryOption,
    OpenServersOption,
    TimeLimitOption,
    require_here,
    run_config,
)
from placewright.cluster import Cluster
from placewright.errors import CostsError, MissingExtraError
from placewright.files import check_new, write_text

if TYPE_CHECKING:
    from placewright.calibration import Fidelity


def add_to(app: typer.Typer) -> None:
    app.command()(calibrate)


def calibrate(
    model: common.ModelArgument,
    cluster: common.ClusterOption = "local",
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write the costs."),
    ] = None,
    costs: common.CostsOption = None,
    placements: Annotated[
        int, typer.Option(metavar="N", help="Placements that the costs are fitted to.")
    ] = 12,
    check: Annotated[
        int,
        typer.Option(
            metavar="N", help="Measure N fresh placements and compare them with the prediction."
        ),
    ] = 0,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --check: a scatter plot as HTML.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For the placements that are measured.")] = 0,
    feeds: FeedsOption = None,
    time_limit: TimeLimitOption = 120.0,
    limit_memory: LimitMemoryOption = False,
    address: AddressOption = None,
    open_servers: OpenServersOption = False,
    group_by: common.GroupByOption = None,
    groups: common.GroupsOption = None,
    scale: common.ScaleOption = "paper",
    batch: common.BatchOption = None,
    dim: common.DimOption = None,
    signature: common.SignatureOption = None,
    fetch: common.FetchOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Measure the costs of a model's ops and of the links of this machine, for the simulator.

    With --costs instead of -o, an earlier calibration is only checked.

    Example: placewright calibrate rnnlm --scale small --cluster cpu2 -o costs.json --check 20
    """
    from placewright import backends, calibration
    from placewright.backends.feeds import load_feeds
    from placewright.placement import everything_on
    from placewright.placers.heft import heft

    if output is None and not (costs and check):
        raise common.UsageError("give -o FILE for the costs, or --costs FILE --check N")
    if plot is not None and not check:
        raise common.UsageError("--plot shows a check: give --check N")
    # What is measured for minutes must not be lost for want of a place to put it.
    for path in (output, plot):
        if path is not None:
            check_new(path, CostsError)
    if plot is not None and importlib.util.find_spec("plotly") is None:
        raise MissingExtraError("a plot as HTML", "report")
    config = run_config(model, address, time_limit, limit_memory, open_servers=open_servers)
    machine = Cluster.load(cluster)
    require_here(model, machine, config)
    inputs = None if feeds is None else load_feeds(feeds)
    program = common.load_program(model, scale, batch, dim, signature, fetch)
    problem = common.load_problem(
        program.graph, machine, group_by=group_by, groups=groups, costs=costs
    )
    facts: dict[str, Any] = {"model": program.graph.name, "cluster": machine.name}
    with (
        backends.runner(program, machine, config, feeds=inputs) as runner,
        common.status("calibrating ...") as say,
    ):
        fitted_to = calibration.varied_placements(problem, placements, seed)
        pace = None
        if output is not None:
            found = calibration.calibrate(
                problem, runner, fitted_to, propose=heft, say=lambda text: say(f"{text} ...")
            )
            found.save(output, program.graph)
            problem, pace = found.problem(problem), found.pace
            fitted_to = list(found.fitted_to)
        facts["links"] = [
            {
                "name": link.name,
                "latency_seconds": link.latency_seconds,
                "bandwidth": link.bandwidth,
                "gap_seconds": link.gap_seconds,
                "overhead_seconds": link.overhead_seconds,
                "overhead_bandwidth": link.overhead_bandwidth
                if link.overhead_bandwidth < math.inf
                else None,
            }
            for link in problem.cluster.links
        ]
        facts["contention"] = problem.cluster.contention
        if check:
            say("measuring fresh placements ...")
            # Other ones than those the costs were fitted to, single devices among them.
            singles = [everything_on(problem, d) for d in range(problem.num_devices)]
            fresh = calibration.varied_placements(
                problem, check, seed + 1_000_003, without=[*fitted_to, *singles]
            )
            ran, result = calibration.check(problem, runner, fresh, pace)
            facts["check"] = {
                "placements": len(ran),
                "mean_absolute_error": result.error,
                "rank_correlation": _or_none(result.spearman),
                "rank_correlation_of_fastest_half": _or_none(result.fastest_half.spearman),
                "rank_correlation_of_passes": _or_none(result.repeated),
                "predicted_seconds": list(result.predicted),
                "measured_seconds": list(result.measured),
                "raw_seconds": list(result.raw),
            }
    if as_json:
        common.print_json(facts)
    else:
        _print(facts, output, result if check else None)
    if plot is not None:
        _write_plot(plot, result, f"{program.graph.name} on {machine.name}")


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _print(facts: dict[str, Any], output: str | None, result: Fidelity | None) -> None:
    say = common.console.print
    for link in facts["links"]:
        overhead = common.format_seconds(link["overhead_seconds"])
        say(
            f"{common.escaped(link['name'])}: {common.format_seconds(link['latency_seconds'])} + "
            f"{common.format_bytes(link['bandwidth'])}/s, {overhead} of a busy core per transfer"
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
    lines.append(f" {common.format_seconds(low):<{width - 9}}{common.format_seconds(high):>9}")
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
