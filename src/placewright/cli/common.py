"""What the commands share: options, loading, formatting, the terminal."""

from __future__ import annotations

import enum
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import markup
from rich.console import Console

from placewright.cluster import Cluster, preset_names
from placewright.costs import Costs
from placewright.errors import PlacewrightError
from placewright.graph import Graph, ScopeRule
from placewright.grouping import each_op, matching_groups
from placewright.problem import Constraints, Problem, make_problem

if TYPE_CHECKING:
    from placewright.backends import Program

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=200)  # a file or a pipe has no width of its own
errors = Console(stderr=True, highlight=False)


class Verbosity(enum.IntEnum):
    """How much is said on the way; results and errors are always printed."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


verbosity = Verbosity.NORMAL
"""Set by `main` from -q and -v, which every command takes."""


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is being done, and with -v prints it; gives a function to say more.

    Everything that may take longer than a second runs inside one.
    """
    started = time.monotonic()

    def log(text: str) -> None:
        if verbosity is Verbosity.VERBOSE:
            errors.print(f"[dim]{time.monotonic() - started:7.2f} s[/dim] {escaped(text)}")

    log(text)
    if verbosity is not Verbosity.NORMAL or not errors.is_terminal:
        yield log
        return
    with errors.status(escaped(text)) as display:
        yield lambda text: display.update(escaped(text))


def complete_models(incomplete: str) -> list[str]:
    """For the shell; it adds files by itself."""
    from placewright.backends import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_clusters(incomplete: str) -> list[str]:
    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_methods(incomplete: str) -> list[str]:
    """The last of a list separated by commas."""
    from placewright.methods import METHODS

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in ("auto", *METHODS) if name.startswith(last)]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A graph file (.json, .json.gz, .pb, .pbtxt, .meta), a SavedModel directory, or a "
        "benchmark model: rnnlm, nmt, inception_v3.",
        show_default=False,
        autocompletion=complete_models,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        metavar="CLUSTER",
        help="A cluster file (.yaml), a preset (k80x2, k80x4, a100x4, h100x8, cpu2) or 'local'.",
        autocompletion=complete_clusters,
    ),
]
ScaleOption = Annotated[
    str, typer.Option(help="Size of a benchmark model: 'paper', or 'small' for quick trials.")
]
BatchOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Batch size: binds the unknown first dimension of the inputs."),
]
DimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", metavar="INPUT=N", help="Binds an unknown dimension of an input; see the error."
    ),
]
SignatureOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which signature of a SavedModel to read.")
]
FetchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fetch",
        metavar="OP",
        help="Keep only what this op needs, such as the train op; repeatable.",
    ),
]
GroupByOption = Annotated[
    list[str] | None,
    typer.Option(
        "--group-by",
        metavar="REGEX=LABEL",
        help=r"Ops whose name contains REGEX form the group LABEL, which may use \1; repeatable.",
    ),
]
GroupsOption = Annotated[
    int | None,
    typer.Option("--groups", metavar="N", help="Merge down to at most about N groups."),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", metavar="REGEX=DEVICE", help="Groups with a matching op go there; repeatable."
    ),
]
ForbidOption = Annotated[
    list[str] | None,
    typer.Option("--forbid", metavar="DEVICE", help="Place nothing on this device; repeatable."),
]
TogetherOption = Annotated[
    list[str] | None,
    typer.Option(
        "--together", metavar="REGEX", help="Groups with a matching op become one; repeatable."
    ),
]
CostsOption = Annotated[
    list[str] | None,
    typer.Option("--costs", metavar="FILE", help="A costs file with measured times; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class UsageError(PlacewrightError):
    """An option whose text does not have the form it should have."""


def load_graph(
    model: str,
    scale: str,
    batch: int | None,
    dim: list[str] | None,
    signature: str | None,
    fetch: list[str] | None,
) -> Graph:
    from placewright.backends import load

    dims = _dims(dim)
    with status(f"reading {model} ..."):
        return load(
            model, scale=scale, batch=batch, dims=dims, signature=signature, fetches=fetch or ()
        )


def load_program(
    model: str,
    scale: str,
    batch: int | None,
    dim: list[str] | None,
    signature: str | None,
    fetch: list[str] | None,
) -> Program:
    """The model as something that can be run, not only placed."""
    from placewright import backends

    dims = _dims(dim)
    backend = backends.backend_of(model)
    if backend is not None:
        backend.check_installed()
    with status(f"reading {model} ..."):
        return backends.load_program(
            model, scale=scale, batch=batch, dims=dims, signature=signature, fetches=fetch or ()
        )


def _dims(dim: list[str] | None) -> dict[str, int]:
    dims = {}
    for text in dim or []:
        name, value = split(text, "--dim", "INPUT=N")
        if not re.fullmatch(r"[0-9]+", value) or int(value) < 1:
            raise UsageError(f"--dim {text}: {value!r} is not a positive whole number")
        dims[name] = int(value)
    return dims


def load_problem(
    graph: Graph,
    cluster: Cluster,
    *,
    group_by: list[str] | None = None,
    groups: int | None = None,
    pin: list[str] | None = None,
    forbid: list[str] | None = None,
    together: list[str] | None = None,
    costs: list[str] | None = None,
) -> Problem:
    if costs:
        from placewright.calibration import calibrated_cluster

        for path in costs:
            cluster = calibrated_cluster(path, cluster)
    with status("grouping its ops ..."):
        return make_problem(
            graph,
            cluster,
            scopes=scope_rules(group_by, graph),
            target_groups=groups,
            constraints=Constraints(
                pins=tuple(split(text, "--pin", "REGEX=DEVICE") for text in pin or []),
                forbidden_devices=tuple(forbid or ()),
                together=tuple(together or ()),
            ),
            tables=[Costs.load(path, graph) for path in costs or []],
        )


def scope_rules(group_by: list[str] | None, graph: Graph) -> tuple[ScopeRule, ...]:
    """The rules of --group-by; one that groups nothing is an error, most likely misspelt."""
    rules = _rules(group_by)
    for rule in rules:
        matching_groups(graph, each_op(graph), rule.pattern)
    return rules


def _rules(group_by: list[str] | None) -> tuple[ScopeRule, ...]:
    return tuple(ScopeRule(*split(text, "--group-by", "REGEX=LABEL")) for text in group_by or [])


def split(text: str, option: str, form: str) -> tuple[str, str]:
    # At the last '=', because a regular expression may hold one and a device or label does not.
    left, equals, right = text.rpartition("=")
    if not (equals and left and right):
        raise UsageError(f"{option} {text}: expected {form}")
    return left, right


def print_json(document: Any) -> None:
    """Machine-readable output: no colours, no wrapping."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def escaped(text: str) -> str:
    """Text of the user's for rich markup: neither markup nor terminal codes get through."""
    visible = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return markup.escape(visible)


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def format_count(count: float) -> str:
    for unit in ("", " k", " M", " G", " T"):
        if count < 1000:
            return f"{count:.3g}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.3g} P"


def format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us"
