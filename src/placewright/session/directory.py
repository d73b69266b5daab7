"""A run's directory: how it began, its problem, its journal, and what it found.

Files are written in this order, each in one step or line by line, so that a process that dies
anywhere leaves what can be continued: the problem, `run.json`, the journal; at the end the
placement, costs and trace, and last `summary.json`, which names the digests of those three.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from placewright._version import VERSION
from placewright.errors import SearchError
from placewright.files import DirectoryLock, read_json, sha256_of, sync_directory, write_json
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
PLACEMENT_FILE = "placement.json"
TRACE_FILE = "trace.json"

SUMMARY_FILE = "summary.json"
"""The result. It is written last: what is there without it, or is not what it names, is of a run
that was cut off."""

BEGUN = (RUN_FILE, JOURNAL_FILE, PROBLEM_FILE)
"""A directory with any of these can be continued."""

RUN_FILES = (
    *BEGUN, COSTS_FILE, PLACEMENT_FILE, TRACE_FILE, SUMMARY_FILE, "metrics.jsonl", "report.html",
    "offload.json",
)  # fmt: skip

_LEFTOVER = re.compile(rf"\.({'|'.join(map(re.escape, RUN_FILES))}|checkpoint-.*)\.[a-z0-9_]{{8}}")
"""What a process that was killed while it wrote one of the files leaves (`files.write_bytes`)."""

_held: dict[Path, tuple[int, int]] = {}
"""Process and thread of each directory that is held."""


@contextlib.contextmanager
def writing(directory: str | Path, *, made: bool = False) -> Iterator[None]:
    """Makes a directory if need be and holds it, so that no other process, nor another thread,
    writes there; raises where one does. Who holds it already may enter again.

    A directory that was made for this (here, or with `made` before) is removed where nothing was
    written.
    """
    folder = Path(directory)
    made = make_directory(folder) or made
    key, own = folder.resolve(), (os.getpid(), threading.get_ident())
    if _held.get(key) == own:
        yield
        return
    try:
        with DirectoryLock(folder, SearchError):
            _held[key] = own
            try:
                for path in folder.iterdir():
                    if _LEFTOVER.fullmatch(path.name):
                        path.unlink(missing_ok=True)
                yield
            finally:
                del _held[key]
    finally:
        if made:
            with contextlib.suppress(OSError):  # not empty, which is what it was made for
                folder.rmdir()


def new_directory(base: str) -> str:
    """Makes a directory of this name, or with the first number after it that nobody has; of several
    processes that ask at once each gets its own."""
    number = 1
    while True:
        name = base if number == 1 else f"{base}-{number}"
        try:
            Path(name).mkdir()
        except FileExistsError:
            number += 1
        except OSError as fault:
            raise SearchError(f"{name}: cannot be made a directory: {fault.strerror}") from None
        else:
            return name


def is_begun(directory: str | Path) -> bool:
    """Whether there is a run to continue, however early it was cut off."""
    return any((Path(directory) / name).is_file() for name in BEGUN)


def digests(folder: Path) -> dict[str, str]:
    """Of the files that a summary names, those that are there."""
    names = (PLACEMENT_FILE, COSTS_FILE, TRACE_FILE)
    return {n: sha256_of(folder / n, SearchError) for n in names if (folder / n).is_file()}


def not_as_named(folder: Path, summary: Mapping[str, Any]) -> str:
    """The first file that is another than the summary names, as the run was cut off after writing
    it; empty where there is none. Those that somebody removed are nobody's results."""
    named = summary.get("files")
    if not isinstance(named, dict):  # version 0.1.0 named none
        return ""
    found = digests(folder)
    return next((name for name in named if found.get(name, named[name]) != named[name]), "")


@contextlib.contextmanager
def open_journal(
    directory: str | Path | None,
    problem: Problem,
    how: How,
    patiently: Callable[[Callable[[], None]], None] = lambda function: function(),
) -> Iterator[Journal | None]:
    """The journal of a directory, which is made if need be; none without a directory.

    `patiently` calls what may take seconds, such as writing a large problem.

    Raises for a run that began in another way, or whose simulated times are of other costs.
    """
    if directory is None:
        yield None
        return
    folder = Path(directory)
    check_directory(folder, problem)
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
    with contextlib.ExitStack() as opened:
        opened.enter_context(writing(folder))
        journal = None
        if (folder / JOURNAL_FILE).exists():
            # Opened first: where it is of something else, the directory stays as it is.
            journal = opened.enter_context(Journal(folder / JOURNAL_FILE, problem))
        # At the beginning, so that also a run that is killed can be looked at and continued.
        patiently(functools.partial(problem.save, folder / PROBLEM_FILE))
        write_json(folder / RUN_FILE, described, SearchError)
        yield journal or opened.enter_context(Journal(folder / JOURNAL_FILE, problem))


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
    """Raises when the directory holds a run of another problem, or what no run of ours wrote."""
    run = _described(folder)
    summary = folder / SUMMARY_FILE
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
    elif run:
        if run.get("space", problem.space.fingerprint) != problem.space.fingerprint:
            raise SearchError(
                f"{folder}: holds a run of space {run['space']}, this one is "
                f"{problem.space.fingerprint}; another model, cluster, grouping or constraint?"
            )
    elif (folder / PROBLEM_FILE).is_file():  # cut off at its very beginning
        began = Problem.load(folder / PROBLEM_FILE).space.fingerprint
        if began != problem.space.fingerprint:
            raise SearchError(
                f"{folder}: holds a problem of space {began}, this one is "
                f"{problem.space.fingerprint}"
            )
    elif (folder / PLACEMENT_FILE).exists():
        raise SearchError(f"{folder}: holds a {PLACEMENT_FILE} of something else")


def make_directory(folder: Path) -> bool:
    """Whether it was not there before; raises where it cannot be written to."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if made:
            sync_directory(folder.parent)
    except OSError as fault:
        raise SearchError(f"{folder}: cannot be made a directory: {fault.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SearchError(f"{folder}: is not writable")
    return made
