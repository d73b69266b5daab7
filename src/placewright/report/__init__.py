"""Shows a run to people: one self-contained HTML page, or an explanation in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from placewright.budget import Budget
from placewright.errors import ReportError
from placewright.files import write_text
from placewright.report.homes import explain_workload
from placewright.report.run import Run, read_run, read_runs
from placewright.report.sections import Section
from placewright.report.words import explain

__all__ = [
    "WHAT_IF_SECONDS",
    "WHAT_IF_TRIALS",
    "Run",
    "Section",
    "explain",
    "explain_workload",
    "read_run",
    "write_report",
]

WHAT_IF_SECONDS, WHAT_IF_TRIALS = 3.0, 4000
"""How long each what-if is searched at most."""


def write_report(
    directories: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    what_if: Budget | None = Budget(seconds=WHAT_IF_SECONDS, trials=WHAT_IF_TRIALS),  # noqa: B008
    observe: Callable[[str], None] = lambda doing: None,
) -> Path:
    """Writes the report of a run, or of two side by side, and gives the file's path.

    Args:
        directories: one or two directories that `place` left.
        output: the file; `report.html` in the (first) directory if not given.
        what_if: how long to search for each change of the machine; None leaves that panel out.
        observe: called with what is being done, for a progress display.
    """
    from placewright.report.page import make_page

    if isinstance(directories, str | Path):
        directories = [directories]
    chosen = [str(directory) for directory in directories]
    if not 1 <= len(chosen) <= 2:
        raise ReportError(f"a report shows one run or two side by side, not {len(chosen)}")
    path = Path(output) if output is not None else Path(chosen[0]) / "report.html"
    observe("reading the run")
    write_text(path, make_page(read_runs(chosen), what_if, observe), ReportError)
    return path
