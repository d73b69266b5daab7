"""`placewright inspect`: what there is to place."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from placewright.backends.base import LoadOptions
from placewright.cli import common
from placewright.cli.options import Only, add_command
from placewright.cli.outputs import GRAPH, check_output
from placewright.graph import Graph, Loop
from placewright.grouping import Grouping
from placewright.problem import ProblemConfig, group_ops
from placewright.units import format_bytes, format_count

_MOST_ROWS = 12


def add_to(app: typer.Typer) -> None:
    add_command(app, inspect)


def inspect(
    model: common.ModelArgument,
    *,
    load: LoadOptions,
    problem: Annotated[ProblemConfig, Only("group_by", "groups")],
    save: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write the graph in Placewright's JSON format."),
    ] = None,
    as_json: common.JsonOption = False,
) -> None:
    """Show what there is to place in a model: ops, groups, FLOPs, memory.

    Example: placewright inspect inception_v3 --scale small
    """
    if save is not None:
        check_output(save, GRAPH, reads=[model])
    graph = common.load_graph(model, load)
    grouping = group_ops(graph, problem)
    if save is not None:
        graph.save(save)
    facts = describe(graph, grouping)
    if as_json:
        common.print_json(facts)
    else:
        _print(facts)


def describe(graph: Graph, grouping: Grouping) -> dict[str, Any]:
    """The facts that `inspect` shows."""
    flops = np.nan_to_num(graph.flops)
    sets = graph.colocation[graph.colocation >= 0]
    group_flops = np.zeros(grouping.num_groups)
    np.add.at(group_flops, grouping.group_of, flops)
    resident = np.zeros(grouping.num_groups, dtype=np.int64)
    np.add.at(resident, grouping.group_of, graph.resident_bytes)
    activations = np.zeros(grouping.num_groups, dtype=np.int64)
    np.add.at(activations, grouping.group_of, graph.owned_bytes)
    members = np.bincount(grouping.group_of, minlength=grouping.num_groups)
    # By compute, then by memory: graphs of other tools may know no FLOPs.
    order = np.lexsort((-activations, -resident, -group_flops))
    return {
        "name": graph.name,
        "ops": graph.num_ops,
        "edges": graph.num_edges,
        "control_edges": int(np.sum(graph.edge_tensor < 0)),
        "groups": grouping.num_groups,
        "flops": float(flops.sum()),
        "ops_without_flops": int(np.isnan(graph.flops).sum()),
        "param_bytes": int(graph.param_bytes.sum()),
        "slot_bytes": int(graph.slot_bytes.sum()),
        "activation_bytes": int(graph.owned_bytes.sum()),
        "colocation_sets": len(np.unique(sets)),
        "colocated_ops": len(sets),
        "ops_without_kernel": {
            type_: int(np.sum(~graph.runs_on(type_))) for type_ in sorted(graph.kernels)
        },
        "op_types": dict(Counter(graph.op_types).most_common()),
        "largest_groups": [
            {
                "name": grouping.names[g],
                "ops": int(members[g]),
                "flops": float(group_flops[g]),
                "resident_bytes": int(resident[g]),
                "activation_bytes": int(activations[g]),
            }
            for g in order[:_MOST_ROWS].tolist()
        ],
        "loops": [loop._asdict() for loop in graph.loops],
        "fingerprint": graph.fingerprint,
    }


def _print(facts: dict[str, Any]) -> None:
    table = Table(title=common.escaped(facts["name"]), show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    number = "{:,}".format
    table.add_row("operations", number(facts["ops"]))
    table.add_row(
        "edges", f"{number(facts['edges'])} ({number(facts['control_edges'])} of them control)"
    )
    table.add_row("groups to place", number(facts["groups"]))
    table.add_row(
        "co-location",
        f"{number(facts['colocated_ops'])} ops in {number(facts['colocation_sets'])} sets",
    )
    flops = format_count(facts["flops"]) + "FLOP"
    if facts["ops_without_flops"]:
        flops += f" ({number(facts['ops_without_flops'])} ops unknown)"
    table.add_row("compute of one step", flops)
    table.add_row("parameters", format_bytes(facts["param_bytes"]))
    table.add_row("optimizer state", format_bytes(facts["slot_bytes"]))
    table.add_row("all tensors made in a step", format_bytes(facts["activation_bytes"]))
    for type_, count in facts["ops_without_kernel"].items():
        if count:
            table.add_row(f"ops that cannot run on a {common.escaped(type_)}", number(count))
    common.console.print(table)
    from placewright.report.words import loop_lines

    for line in loop_lines([Loop(**loop) for loop in facts["loops"]]):
        common.console.print(common.escaped(line))

    types = Table(title="most frequent op types", title_justify="left")
    types.add_column("type")
    types.add_column("ops", justify="right")
    for name, count in list(facts["op_types"].items())[:_MOST_ROWS]:
        types.add_row(common.escaped(name), number(count))
    rest = len(facts["op_types"]) - _MOST_ROWS
    if rest > 0:
        types.add_row(f"... and {rest} more types", "")
    common.console.print(types)

    largest = Table(title="largest groups", title_justify="left")
    largest.add_column("group")
    for heading in ("ops", "FLOP", "parameters + state", "tensors made"):
        largest.add_column(heading, justify="right")
    for entry in facts["largest_groups"]:
        largest.add_row(
            common.escaped(entry["name"]),
            number(entry["ops"]),
            format_count(entry["flops"]),
            format_bytes(entry["resident_bytes"]),
            format_bytes(entry["activation_bytes"]),
        )
    common.console.print(largest)
