"""Which files the commands may write: nothing that cannot be made again is replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from placewright import graph
from placewright.cli.offload import PLAN_FILE
from placewright.cli.options import UsageError
from placewright.files import MOST_BYTES, check_new, read_bytes
from placewright.session.directory import BEGUN, RUN_FILES


class Kind(NamedTuple):
    """What a command writes, and how what it wrote before is told from files of others."""

    name: str
    matches: Callable[[bytes], bool]
    """Of the content of a file."""


_ENDS = 4096
"""What says of which kind a file is stands within so many bytes of its beginning or its end."""

PAGE = Kind(
    "a page that Placewright wrote",
    lambda content: (
        content.startswith(b"<!doctype html>") and b" - Placewright</title>" in content[:_ENDS]
    ),
)
TRACE = Kind(
    "a trace that Placewright wrote",
    lambda content: (
        content.startswith(b'{"traceEvents": [')
        and b'"displayTimeUnit": "ms", "otherData": {"model": ' in content[-_ENDS:]
    ),
)
GRAPH = Kind(
    "a graph that Placewright wrote",
    lambda content: content.startswith(b'{"format": "%s"' % graph.FORMAT.encode()),
)


def check_output(
    path: str | Path,
    kind: Kind | None = None,
    *,
    reads: Iterable[object] = (),
    own: Path | None = None,
) -> None:
    """Raises where a file must not be written, before anything is done: one that is there is
    replaced only by another of its kind, and never where it is a run's or one of those that the
    command reads. Without a kind it is never replaced. `own` is the file of a run that the command
    is there to write; what it reads may also be other things than files.
    """
    target = Path(path)
    begun = any((target.parent / name).is_file() for name in (*BEGUN, PLAN_FILE))
    is_own = own is not None and target.resolve() == own.resolve()
    if target.name in RUN_FILES and begun and not is_own:
        raise UsageError(
            f"{path}: is the name of a file of the run in {target.parent}; choose another name"
        )
    if kind is None:
        check_new(target, UsageError)
    if not os.path.lexists(target):
        return
    if any(isinstance(s, str | Path) and _same(target, s) for s in reads):
        raise UsageError(f"{path}: is what the command reads; choose another name")
    if kind is not None and not (target.is_file() and kind.matches(_content(target))):
        raise UsageError(f"{path}: is there already and is not {kind.name}; choose another name")


def _same(path: Path, source: str | Path) -> bool:
    return os.path.exists(source) and path.exists() and path.samefile(source)


def _content(path: Path) -> bytes:
    """What is in a file; nothing where it cannot be read, as then it is of no kind."""
    try:
        return read_bytes(path, UsageError, what="earlier", most=MOST_BYTES)
    except UsageError:
        return b""
