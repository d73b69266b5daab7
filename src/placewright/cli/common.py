"""What the commands share: arguments, loading, the terminal."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import markup
from rich.console import Console

from placewright.backends.base import LoadOptions
from placewright.cli.options import UsageError, complete_clusters
from placewright.cluster import Cluster
from placewright.graph import Graph
from placewright.problem import Problem, ProblemConfig, make_problem

if TYPE_CHECKING:
    from placewright.backends import Program
    from placewright.placement import Placement

# Without emoji, because `net.py:two:` is no code for one.
console = Console(highlight=False, emoji=False)
if not console.is_terminal:
    console = Console(
        highlight=False, emoji=False, width=200
    )  # a file or a pipe has no width of its own
errors = Console(stderr=True, highlight=False, emoji=False)


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


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A graph file (.json, .json.gz, .pb, .pbtxt, .meta), a SavedModel directory, "
        "FILE.py:FUNCTION or a .pt2 file (PyTorch), or a benchmark model: rnnlm, nmt, "
        "inception_v3.",
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
        help="A cluster file (.yaml), a preset (k80x2, k80x4, a100x4, h100x8, h200, cpu2) or "
        "'local'.",
        autocompletion=complete_clusters,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def load_graph(model: str, options: LoadOptions) -> Graph:
    from placewright import backends

    with status(f"reading {model} ..."):
        return backends.load(model, options)


def load_program(model: str, options: LoadOptions) -> Program:
    """The model as something that can be run, not only placed."""
    from placewright import backends

    backend = backends.backend_of(model, options.backend)
    if backend is not None:
        backend.check_installed()
    with status(f"reading {model} ..."):
        return backends.load_program(model, options)


def load_problem(graph: Graph, cluster: Cluster, config: ProblemConfig) -> Problem:
    with status("grouping its ops ..."):
        return make_problem(graph, cluster, config)


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Which placement is simulated or run."""

    placement: str | None = None
    """A placement file."""
    device: str | None = None
    """Everything on this device instead."""

    def __post_init__(self) -> None:
        if (self.placement is None) == (self.device is None):
            raise UsageError("give either --placement FILE or --device NAME")

    def load(self, problem: Problem) -> tuple[Problem, Placement]:
        """The placement, and the problem it is of: the one given, or the same op by op."""
        from placewright.placement import Placement, read_groups

        if self.placement is not None:
            groups = read_groups(self.placement)
            by_op = groups != problem.num_groups and groups == problem.refined.num_groups
            problem = problem.refined if by_op else problem
            return problem, Placement.load(self.placement, problem)
        number = problem.cluster.device_number(str(self.device))
        return problem, Placement.of(problem, [number] * problem.num_groups)


def print_json(document: Any) -> None:
    """Machine-readable output: no colours, no wrapping."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def escaped(text: str) -> str:
    """Text of the user's for rich markup: neither markup nor terminal codes get through."""
    visible = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return markup.escape(visible)
