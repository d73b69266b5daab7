"""Cores of a worker's own: workers on one machine that measure must not compute on the same."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

from placewright.machine import usable_core_numbers

logger = logging.getLogger(__name__)

_held: list[IO[str]] = []
"""Locks of this process; they end with it, however it ends."""


def take_cores(count: int, folder: Path | None = None) -> list[int]:
    """Pins this process, and those that it starts, to so many cores that no other process on this
    machine took by this; gives their numbers.

    None where it has no more than that anyway, or where all are taken: then it stays as it was.
    """
    cores = usable_core_numbers()
    if count < 1 or len(cores) <= count:
        return []
    folder = folder or Path(tempfile.gettempdir()) / f"placewright-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        logger.warning("%s is somebody else's: cores are not told apart", folder)
        return []
    for first in range(0, len(cores) - count + 1, count):
        mine = cores[first : first + count]
        locks: list[IO[str]] = []
        with contextlib.ExitStack() as opened:
            try:
                for core in mine:
                    file = opened.enter_context((folder / str(core)).open("a", encoding="utf-8"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locks.append(file)
            except OSError:
                continue  # another worker's
            opened.pop_all()
        _held.extend(locks)
        os.sched_setaffinity(0, mine)
        return mine
    logger.warning("all cores are taken by other workers: what is measured is slower than alone")
    return []
