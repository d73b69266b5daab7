"""`placewright measure` and `placewright devices`: what this machine really does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from placewright import backends
from placewright.backends.base import LoadOptions, RunConfig
from placewright.chips import PART, STREAM
from placewright.cli import common
from placewright.cli.common import PlacementOptions
from placewright.cli.options import Only, add_command
from placewright.cli.real import FeedsOption, RunOptions, feeds_from, run_config
from placewright.cluster import Cluster, Device, preset_names
from placewright.discovery import SM_STEP
from placewright.problem import ProblemConfig
from placewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from placewright.backends import Run


def add_to(app: typer.Typer) -> None:
    add_command(app, measure)
    add_command(app, devices)


def measure(
    model: common.ModelArgument,
    *,
    cluster: common.ClusterOption = "local",
    choice: PlacementOptions,
    feeds: FeedsOption = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Steps to run; the first warms up and is not counted.")
    ] = 10,
    real: Annotated[
        RunConfig,
        Only(
            "time_limit_seconds",
            "limit_memory",
            "optimize",
            "check",
            "addresses",
            "open_servers",
            config=RunOptions,
        ),
    ],
    problem: Annotated[ProblemConfig, Only("group_by", "groups", "together")],
    load: LoadOptions,
    as_json: common.JsonOption = False,
) -> None:
    """Run a model under a placement on the devices of this machine, and time its steps.

    Example: placewright measure rnnlm --scale small --cluster cpu2 --device cpu:0
    """
    config = run_config(model, load, real, steps=steps, max_steps=max(steps, real.max_steps))
    machine = Cluster.load(cluster)
    backends.check_here(model, machine, config, load.backend)
    inputs = feeds_from(feeds)
    program = common.load_program(model, load)
    made = common.load_problem(program.graph, machine, problem)
    made, placement = choice.load(made)
    with (
        backends.runner(program, machine, config, feeds=inputs) as runner,
        common.status("running ..."),
    ):
        run = runner.measure(placement.devices[made.grouping.group_of])
    facts = _facts(program.graph.name, machine, run)
    if as_json:
        common.print_json(facts)
    else:
        _print(machine, facts)
    if facts["step_seconds"] is None:
        raise typer.Exit(1)


def _facts(model: str, cluster: Cluster, run: Run) -> dict[str, Any]:
    measurement = run.measurement
    return {
        "model": model,
        "cluster": cluster.name,
        "outcome": measurement.outcome.value,
        "reason": measurement.reason,
        "step_seconds": measurement.mean_seconds if measurement.ok else None,
        "half_width_seconds": measurement.half_width_seconds,
        "steps": list(measurement.step_seconds),
        "overhead_seconds": run.overhead_seconds,
        "foreign_load": run.foreign_load,
        "devices": [
            {"name": name, "peak_bytes": peak}
            for name, peak in zip(cluster.device_names, measurement.peak_bytes, strict=False)
        ],
        "misplaced": None if run.misplaced is None else list(run.misplaced),
    }


def _print(cluster: Cluster, facts: dict[str, Any]) -> None:
    say = common.console.print
    if facts["step_seconds"] is None:
        say(f"[red]{facts['outcome']}:[/red] {common.escaped(facts['reason'])}")
    else:
        step = format_seconds(facts["step_seconds"])
        spread = format_seconds(facts["half_width_seconds"])
        count = len(facts["steps"])
        say(f"[bold]{step}[/bold] a step (measured: mean of {count}, 95% within ± {spread})")
        deviation = float(np.std(facts["steps"]))
        fastest, slowest = min(facts["steps"]), max(facts["steps"])
        say(
            f"standard deviation {format_seconds(deviation)}, from "
            f"{format_seconds(fastest)} to {format_seconds(slowest)}"
        )
    for entry in facts["devices"]:
        peak = format_bytes(entry["peak_bytes"])
        say(f"{common.escaped(entry['name'])}: at most {peak} in use")
    if facts["misplaced"] is not None:
        wrong = facts["misplaced"]
        say("every op ran where it was put" if not wrong else f"[red]{len(wrong)} ops did not:[/]")
        for line in wrong[:10]:
            say(f"  {common.escaped(line)}")


def _parts(device: Device) -> dict[str, Any]:
    """What a GPU can be shared by, or divided into."""
    if device.type != "gpu":
        return {"sms": 0, "parts": {}, "most_partitions": 0}
    most = device.kind.sms // SM_STEP
    names = {STREAM: f"{device.name}/{STREAM}:K", PART: f"{device.name}/{PART}:K"}
    if not most:
        del names[PART]
    return {"sms": device.kind.sms, "parts": names, "most_partitions": most}


def _parts_line(entry: dict[str, Any]) -> str:
    line = f"{entry['parts'][STREAM]} is a stream of {entry['name']}"
    if PART in entry["parts"]:
        line += (
            f", {entry['parts'][PART]} one of up to {entry['most_partitions']} partitions of its "
            f"{entry['sms']} multiprocessors"
        )
    return line


def devices(as_json: common.JsonOption = False) -> None:
    """Show the devices of this machine, and the clusters that can be measured on it.

    Example: placewright devices
    """
    from placewright.machine import usable_cores

    local = Cluster.load("local")
    facts: dict[str, Any] = {
        "cores": usable_cores(),
        **{backend.name: backend.installed() for backend in backends.every()},
        "devices": [
            {
                "name": d.name,
                "kind": d.kind.name,
                "type": d.type,
                "memory_bytes": d.memory_bytes,
                **_parts(d),
            }
            for d in local.devices
        ],
        "measurable": backends.measurable(preset_names()),
    }
    if as_json:
        common.print_json(facts)
        return
    table = Table.grid(padding=(0, 2))
    for entry in facts["devices"]:
        memory = format_bytes(entry["memory_bytes"])
        table.add_row(*(common.escaped(text) for text in (entry["name"], entry["kind"], memory)))
    common.console.print(table)
    for entry in facts["devices"]:
        if entry["parts"]:
            common.console.print(common.escaped(_parts_line(entry)))
    cores = "1 core" if facts["cores"] == 1 else f"{facts['cores']} cores"
    common.console.print(f"{cores} for this process")
    for backend in backends.every():
        if not facts[backend.name]:
            install = rf"pip install 'placewright\[{backend.extra}]'"
            common.console.print(
                f"{backend.name} is not installed: run {install} to measure its models"
            )
    can = ", ".join(facts["measurable"])
    common.console.print(f"clusters that can be measured here: {can or 'none'}")
