"""`placewright simulate`: what one placement would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from placewright.backends.base import LoadOptions
from placewright.cli import common
from placewright.cli.common import PlacementOptions
from placewright.cli.options import Only, add_command
from placewright.cli.outputs import TRACE, check_output
from placewright.cluster import Cluster
from placewright.costs import Source
from placewright.errors import PlacementError
from placewright.files import write_json
from placewright.problem import Problem, ProblemConfig
from placewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from placewright.placement import Placement

_SOURCES = {
    Source.NO_KERNEL: "no kernel",
    Source.ROOFLINE: "roofline estimate",
    Source.GRAPH: "measured (graph file)",
    Source.TABLE: "measured (costs file)",
}


def add_to(app: typer.Typer) -> None:
    add_command(app, simulate)


def simulate(
    model: common.ModelArgument,
    *,
    cluster: common.ClusterOption = "local",
    choice: PlacementOptions,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a Chrome trace; open it in ui.perfetto.dev."),
    ] = None,
    problem: Annotated[ProblemConfig, Only("group_by", "groups", "together", "costs")],
    load: LoadOptions,
    as_json: common.JsonOption = False,
) -> None:
    """Simulate one step of a model under a placement: time, memory, what the devices do.

    Example: placewright simulate rnnlm --cluster k80x2 --device gpu:0 --trace trace.json
    """
    if trace is not None:
        check_output(trace, TRACE, reads=[model, cluster, choice.placement, *problem.costs])
    machine = Cluster.load(cluster)
    made = common.load_problem(common.load_graph(model, load), machine, problem)
    made, placement = choice.load(made)
    with common.status("simulating ..."):
        facts = _facts(made, placement, trace)
    if as_json:
        common.print_json(facts)
    else:
        _print(made, facts)
        if trace is not None and facts["outcome"] != "failed":
            common.console.print(f"trace written to {common.escaped(trace)}")
    if facts["step_seconds"] is None:
        raise typer.Exit(1)


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
        "lower_bound_by": "op" if problem.refined is problem else "group",
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
            "parts": timeline.device_parts[d]._asdict(),
            "idle_seconds": float(timeline.idle_seconds[d]),
            "transfer_seconds": float(timeline.transfer_seconds[d]),
            "peak_bytes": int(timeline.peak_bytes[d]),
            "memory_bytes": device.memory_bytes,
        }
        for d, device in enumerate(problem.cluster.devices)
    ]
    facts["transfers"] = len(timeline.transfers)
    facts["transferred_bytes"] = int(timeline.transfers.bytes.sum())
    facts["parts"] = timeline.path_parts._asdict()
    computing = [
        entry for entry in timeline.critical_path if entry.transfer is None and not entry.issues
    ]
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
    from placewright.simulator import Parts
    from placewright.simulator.makeup import described

    say = common.console.print
    if facts["step_seconds"] is None:
        say(f"[red]{facts['outcome']}:[/red] {common.escaped(facts['reason'])}")
    else:
        bound = format_seconds(facts["lower_bound_seconds"])
        by_groups = facts["lower_bound_by"] == "group"
        which = f" by these {problem.num_groups:,} groups" if by_groups else ""
        say(
            f"[bold]{format_seconds(facts['step_seconds'])}[/bold] a step (simulated, in the order "
            f"of the graph where ops tie); no placement{which} can be faster than {bound}"
        )
    if "devices" in facts:
        table = Table(title="what each device does in a step", title_justify="left")
        table.add_column("device")
        # Of a device with several slots, the mean of them: these add up to the step.
        for heading in ("groups", "computes", "overhead", "waits", "idle", "peak memory", "memory"):
            table.add_column(heading, justify="right")
        for entry in facts["devices"]:
            table.add_row(
                common.escaped(entry["name"]),
                str(entry["groups"]),
                *(format_seconds(seconds) for seconds in entry["parts"].values()),
                format_bytes(entry["peak_bytes"]),
                format_bytes(entry["memory_bytes"]),
            )
        say(table)
        say(f"{facts['transfers']:,} transfers of {format_bytes(facts['transferred_bytes'])}")
        path = facts["critical_path"]
        say(
            f"along the critical path, {described(Parts(**facts['parts']))}: "
            f"{path['ops']:,} ops for {format_seconds(path['op_seconds'])}, "
            f"{path['transfers']:,} transfers for "
            f"{format_seconds(path['transfer_seconds'])}"
        )
    for kind, counts in facts["costs"].items():
        parts = ", ".join(f"{count:,} {source}" for source, count in counts.items())
        say(f"op costs on {common.escaped(kind)}: {parts}")
