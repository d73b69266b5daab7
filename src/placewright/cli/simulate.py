"""`placewright simulate`: what one placement would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from placewright.cli import common
from placewright.cluster import Cluster
from placewright.costs import Source
from placewright.errors import PlacementError
from placewright.files import write_json

if TYPE_CHECKING:
    from placewright.placement import Placement
    from placewright.problem import Problem

_SOURCES = {
    Source.NO_KERNEL: "no kernel",
    Source.ROOFLINE: "roofline estimate",
    Source.GRAPH: "measured (graph file)",
    Source.TABLE: "measured (costs file)",
}


def add_to(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    model: common.ModelArgument,
    cluster: common.ClusterOption = "local",
    placement: Annotated[
        str | None, typer.Option(metavar="FILE", help="A placement file to simulate.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Everything on this device instead.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a Chrome trace; open it in ui.perfetto.dev."),
    ] = None,
    group_by: common.GroupByOption = None,
    groups: common.GroupsOption = None,
    together: common.TogetherOption = None,
    costs: common.CostsOption = None,
    scale: common.ScaleOption = "paper",
    batch: common.BatchOption = None,
    dim: common.DimOption = None,
    signature: common.SignatureOption = None,
    fetch: common.FetchOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Simulate one step of a model under a placement: time, memory, what the devices do.

    Example: placewright simulate rnnlm --cluster k80x2 --device gpu:0 --trace trace.json
    """
    if (placement is None) == (device is None):
        raise common.UsageError("give either --placement FILE or --device NAME")
    machine = Cluster.load(cluster)
    graph = common.load_graph(model, scale, batch, dim, signature, fetch)
    problem = common.load_problem(
        graph, machine, group_by=group_by, groups=groups, together=together, costs=costs
    )
    problem, chosen = load_placement(problem, placement, device)
    with common.status("simulating ..."):
        facts = _facts(problem, chosen, trace)
    if as_json:
        common.print_json(facts)
    else:
        _print(problem, facts)
        if trace is not None and facts["outcome"] != "failed":
            common.console.print(f"trace written to {common.escaped(trace)}")
    if facts["step_seconds"] is None:
        raise typer.Exit(1)


def load_placement(
    problem: Problem, path: str | None, device: str | None
) -> tuple[Problem, Placement]:
    """A placement, and the problem it is of: the one given, or the same op by op."""
    from placewright.placement import Placement, read_groups

    if path is not None:
        groups = read_groups(path)
        by_op = groups != problem.num_groups and groups == problem.refined.num_groups
        problem = problem.refined if by_op else problem
        return problem, Placement.load(path, problem)
    assert device is not None
    number = problem.cluster.device_number(device)
    return problem, Placement.of(problem, np.full(problem.num_groups, number, dtype=np.int32))


def _facts(problem: Problem, placement: Placement, trace: str | None) -> dict[str, Any]:
    from placewright.evaluators.simulated import SimulatedEvaluator
    from placewright.measurement import Outcome
    from placewright.simulator import Simulator, lower_bounds

    (measurement,) = SimulatedEvaluator(problem).evaluate([placement])
    facts: dict[str, Any] = {
        "model": problem.graph.name,
        "cluster": problem.cluster.name,
        "outcome": measurement.outcome.value,
        "step_seconds": measurement.mean_seconds if measurement.ok else None,
        "reason": measurement.reason,
        "lower_bound_seconds": lower_bounds(problem).best,
        "costs": {
            kind: {_SOURCES[source]: count for source, count in counts.items() if count}
            for kind, counts in problem.costs.counts().items()
        },
    }
    if measurement.outcome is Outcome.FAILED:
        return facts
    timeline = Simulator(problem).timeline(placement)
    facts["devices"] = [
        {
            "name": device.name,
            "groups": int(np.sum(placement.devices == d)),
            "busy_seconds": float(timeline.busy_seconds[d]),
            "idle_seconds": float(timeline.idle_seconds[d]),
            "transfer_seconds": float(timeline.transfer_seconds[d]),
            "peak_bytes": int(timeline.peak_bytes[d]),
            "memory_bytes": device.memory_bytes,
        }
        for d, device in enumerate(problem.cluster.devices)
    ]
    facts["transfers"] = len(timeline.transfers)
    facts["transferred_bytes"] = int(timeline.transfers.bytes.sum())
    computing = [entry for entry in timeline.critical_path if entry.transfer is None]
    moving = [entry for entry in timeline.critical_path if entry.transfer is not None]
    facts["critical_path"] = {
        "ops": len(computing),
        "transfers": len(moving),
        "op_seconds": sum(entry.end - entry.start for entry in computing),
        "transfer_seconds": sum(entry.end - entry.start for entry in moving),
    }
    if trace is not None:
        write_json(trace, timeline.chrome_trace(), PlacementError)
    return facts


def _print(problem: Problem, facts: dict[str, Any]) -> None:
    say = common.console.print
    if facts["step_seconds"] is None:
        say(f"[red]{facts['outcome']}:[/red] {common.escaped(facts['reason'])}")
    else:
        bound = common.format_seconds(facts["lower_bound_seconds"])
        say(
            f"[bold]{common.format_seconds(facts['step_seconds'])}[/bold] a step (simulated); "
            f"no placement can be faster than {bound}"
        )
    if "devices" in facts:
        table = Table()
        table.add_column("device")
        # Of a device with several slots, the mean of them: busy and idle add up to the step.
        for heading in ("groups", "busy", "idle", "transfers", "peak memory", "memory"):
            table.add_column(heading, justify="right")
        for entry, device in zip(facts["devices"], problem.cluster.devices, strict=True):
            table.add_row(
                common.escaped(entry["name"]),
                str(entry["groups"]),
                common.format_seconds(entry["busy_seconds"] / device.kind.slots),
                common.format_seconds(entry["idle_seconds"] / device.kind.slots),
                common.format_seconds(entry["transfer_seconds"]),
                common.format_bytes(entry["peak_bytes"]),
                common.format_bytes(entry["memory_bytes"]),
            )
        say(table)
        say(
            f"{facts['transfers']:,} transfers of {common.format_bytes(facts['transferred_bytes'])}"
        )
        path = facts["critical_path"]
        say(
            f"critical path: {path['ops']:,} ops for {common.format_seconds(path['op_seconds'])}, "
            f"{path['transfers']:,} transfers for "
            f"{common.format_seconds(path['transfer_seconds'])}"
        )
    for kind, counts in facts["costs"].items():
        parts = ", ".join(f"{count:,} {source}" for source, count in counts.items())
        say(f"op costs on {common.escaped(kind)}: {parts}")
