"""`placewright report` and `explain`: what a run found, to look at and to read."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding

from placewright.cli import common
from placewright.cli.options import UsageError, add_command
from placewright.cli.outputs import PAGE, check_output
from placewright.units import parse_duration

if TYPE_CHECKING:
    from placewright.budget import Budget
    from placewright.session.result import Result

DirectoryArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A directory that 'placewright place' left.")
]


def add_to(app: typer.Typer) -> None:
    add_command(app, report)
    add_command(app, explain)


def report(
    directory: DirectoryArgument,
    other: Annotated[
        str | None,
        typer.Argument(metavar="[DIR2]", help="Another one, to compare side by side."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The page; DIR/report.html if not given.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long to search for each what-if, up to 3s if not given; 0 for none of them.",
        ),
    ] = None,
    as_json: common.JsonOption = False,
) -> None:
    """Write a run, or two side by side, as one HTML page that works offline.

    Example: placewright report result --open
    """
    from placewright.cli.offload import holds_plan, write_page
    from placewright.report import write_report

    directories = [directory] if other is None else [directory, other]
    budget = _what_if_budget(what_if)
    default = Path(directory) / "report.html"
    check_output(output or default, PAGE, own=default)
    if plan := next(filter(holds_plan, directories), None):
        if other is not None:
            raise UsageError(
                f"{plan}: holds a plan for a module that does not fit, and only runs of placing "
                "operations are compared side by side; make a page of each"
            )
        if what_if is not None and budget is not None:
            raise UsageError(
                f"--what-if: {plan} holds a plan for a module that does not fit, and has none; "
                "plan for other machines with place --memory and --cluster"
            )
        path = write_page(plan, output)
    else:
        with common.status("reading the run ...") as say:
            path = write_report(
                directories,
                output,
                what_if=budget,
                observe=lambda doing: say(f"{doing} ..."),
            )
    if as_json:
        common.print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        common.console.print(f"the report is in {common.escaped(str(path))}")
    if show and not webbrowser.open(path.resolve().as_uri()):
        common.errors.print("no browser could be started; open the file in one")


def _what_if_budget(text: str | None) -> Budget | None:
    from placewright.budget import Budget
    from placewright.report import WHAT_IF_SECONDS, WHAT_IF_TRIALS

    if text is None:
        return Budget(seconds=WHAT_IF_SECONDS, trials=WHAT_IF_TRIALS)
    seconds = parse_duration(text)
    return Budget(seconds=seconds) if seconds else None


def explain(directory: DirectoryArgument, as_json: common.JsonOption = False) -> None:
    """Say in words what a run found: what sits where, why it is fast, and why others failed.

    Example: placewright explain result
    """
    from placewright.cli.offload import holds_plan
    from placewright.cli.offload import sections as of_offloaded
    from placewright.report import explain as explained
    from placewright.report import read_run

    if holds_plan(directory):
        _print_sections(of_offloaded(directory), as_json)
        return
    with common.status("reading the run ..."):
        run = read_run(directory)
        sections = explained(run)
    _print_sections(sections, as_json)
    if not run.ok and not as_json:
        raise typer.Exit(1)


def _print_sections(sections: Sequence[tuple[str, Sequence[str]]], as_json: bool) -> None:
    if as_json:
        common.print_json({title: list(lines) for title, lines in sections})
        return
    for title, lines in sections:
        common.console.print(f"[bold]{common.escaped(title)}[/bold]")
        for line in lines:
            text = common.escaped(line)
            if common.console.is_terminal:
                common.console.print(Padding(text, (0, 0, 0, 2)))
            else:  # other programs get lines that are whole
                common.console.print(f"  {text}", soft_wrap=True)


def write_beside(directory: str, result: Result) -> str:
    """Writes the report of a run that has just ended; says where it is, or why there is none.

    Its what-ifs together take a tenth of the time of the search, so that a short search stays
    short; there are none after Ctrl-C.
    """
    from placewright.budget import Budget
    from placewright.errors import MissingExtraError
    from placewright.report import WHAT_IF_SECONDS, WHAT_IF_TRIALS, write_report

    budget = Budget(
        seconds=max(0.1, min(WHAT_IF_SECONDS, result.seconds / 40)),
        trials=max(1, min(WHAT_IF_TRIALS, result.trials)),
    )
    try:
        with common.status("writing the report ...") as say:
            path = write_report(
                directory,
                what_if=None if result.interrupted else budget,
                observe=lambda doing: say(f"report: {doing} ..."),
            )
    except MissingExtraError as error:
        return f"[dim]no report: {common.escaped(str(error))}[/dim]"
    return f"the report is in {common.escaped(str(path))}"
