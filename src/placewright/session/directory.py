"""A run's directory: how it began, its problem, and its journal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

from placewright._version import VERSION
from placewright.errors import SearchError
from placewright.files import read_json, write_json
from placewright.journal import Journal
from placewright.problem import Problem
from placewright.session.config import SIMULATE, How

RUN_FILE = "run.json"
"""Says how the run began, which a run that is continued has to know."""

PROBLEM_FILE = "problem.json.gz"
"""The whole problem: some 300 kB for 12,000 ops, a twentieth of the JSON in it."""

COSTS_FILE = "costs.json"
"""What a run with real devices found out about costs: a costs file with the cluster in it."""

JOURNAL_FILE = "journal.jsonl"


@contextlib.contextmanager
def open_journal(
    directory: str | Path | None, problem: Problem, how: How
) -> Iterator[Journal | None]:
    """The journal of a directory, which is made if need be; none without a directory.

    Raises for a run that began in another way, or whose simulated times are of other costs.
    """
    if directory is None:
        yield None
        return
    folder = Path(directory)
    check_directory(folder, problem)
    make_directory(folder)
    began = began_with(folder)
    if began not in (None, how):
        raise SearchError(f"{directory}: began with {began}; it cannot go on with {how}")
    described = {"evaluate": how, "version": VERSION, "space": problem.space.fingerprint}
    if (
        how == SIMULATE
    ):  # under other costs its times would be others; real times stay what they are
        described["problem"] = problem.fingerprint
        simulated = _described(folder).get("problem", problem.fingerprint)
        if simulated != problem.fingerprint:
            raise SearchError(
                f"{directory}: its step times were simulated under problem {simulated}, this is "
                f"{problem.fingerprint}: other costs, or a cluster of another speed or memory?"
            )
    # Opened first: where the journal is of something else, the directory stays as it is.
    with Journal(folder / JOURNAL_FILE, problem) as journal:
        # At the beginning, so that also a run that is killed can be looked at and continued.
        write_json(folder / RUN_FILE, described, SearchError)
        problem.save(folder / PROBLEM_FILE)
        yield journal


def began_with(directory: str | Path) -> How | None:
    """How the placements of the run in a directory are tried; None where there is none."""
    path = Path(directory) / RUN_FILE
    if not path.is_file():
        return None
    how = _described(Path(directory)).get("evaluate")
    if how not in get_args(How):
        raise SearchError(f"{path}: does not say how the run began; was the file edited?")
    return cast(How, how)


def _described(folder: Path) -> dict[str, Any]:
    path = folder / RUN_FILE
    document = read_json(path, SearchError, what="run") if path.is_file() else {}
    return document if isinstance(document, dict) else {}


def check_directory(folder: Path, problem: Problem) -> None:
    """Raises when the directory holds results of another problem, which would be overwritten."""
    summary = folder / "summary.json"
    if summary.is_file():
        document = read_json(summary, SearchError, what="summary")
        other = document if isinstance(document, dict) else {}
        # Version 0.1.0 knew nothing of spaces.
        own = problem.space.fingerprint if "space" in other else problem.fingerprint
        if other.get("space", other.get("problem")) != own:
            raise SearchError(
                f"{folder}: holds results for problem {other.get('problem')} "
                f"({other.get('model')} on {other.get('cluster')}), this one is "
                f"{problem.fingerprint} ({problem.graph.name} on {problem.cluster.name})"
            )
    elif (folder / "placement.json").exists():
        raise SearchError(f"{folder}: holds a placement.json of something else")


def make_directory(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise SearchError(f"{folder}: cannot be made a directory: {fault.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SearchError(f"{folder}: is not writable")
