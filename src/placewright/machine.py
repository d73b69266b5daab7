"""What of this machine the process may use, which containers make less than there is."""

from __future__ import annotations

import os
from pathlib import Path


def usable_core_numbers() -> list[int]:
    """The cores this process may use; empty where the system does not tell them apart."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return []


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(usable_core_numbers()) or os.cpu_count() or 1


def usable_memory_bytes() -> int:
    """The machine's memory, or the limit of the container this runs in."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such file, or "max"
        return memory
    return min(memory, limit)
