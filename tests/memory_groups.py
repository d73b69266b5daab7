"""Groups of processes that the system gives so much memory and no more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_group(size: int) -> Iterator[Path]:
    """The file into which processes are put by their numbers; skips where there are no groups."""
    group = Path("/sys/fs/cgroup/memory") / f"placewright-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size))
    except OSError as fault:
        pytest.skip(f"this system allows no memory group: {fault}")
    try:
        yield group / "cgroup.procs"
    finally:
        until = time.monotonic() + 30.0
        while (group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.05)
        group.rmdir()
