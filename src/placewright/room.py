"""How much memory there is for a method to work in, and whether it is enough."""

from __future__ import annotations

import os
from pathlib import Path

from placewright.units import format_bytes

FREE_BYTES_VARIABLE = "PLACEWRIGHT_FREE_BYTES"
"""Environment variable that says how many bytes may be used, whatever is free."""

_SHARE = 0.7
"""How much of what is free one method may count on: its estimate is rough, and it is not alone."""


def free_bytes() -> int:
    """Memory this process can still get: what the machine has free, or what its container's limit
    leaves, whichever is less. A system that does not say has as much as anybody wants."""
    said = os.environ.get(FREE_BYTES_VARIABLE, "")
    if said.isdigit():
        return int(said)
    return min(_free_of_machine(), _free_of_container())


def why_no_room(needed_bytes: int) -> str:
    """Why a method that needs this much is left out, in one line; empty where it has room."""
    room = int(_SHARE * free_bytes())
    if needed_bytes <= room:
        return ""
    return (
        f"left out: it would need some {format_bytes(needed_bytes)} of memory here, and may count "
        f"on {format_bytes(room)}"
    )


def policy_bytes(*, groups: int, samples: int, hidden: int) -> int:
    """What a learned method's update holds at its largest, by its attention above all: scores,
    weights and their gradients for each sample and pair of groups, float32; besides those the
    features of pairs of groups and the states of the two LSTMs."""
    pairs = groups * groups
    return 4 * (5 * samples * pairs + 12 * pairs + 24 * samples * groups * hidden)


def _free_of_machine() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63 - 1


def _free_of_container() -> int:
    """Of control groups of both versions; the files are absent outside of containers."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, now = _lines(limit), _lines(used)
        if most and now and most[0].isdigit() and now[0].isdigit():
            return max(0, int(most[0]) - int(now[0]))
    return 2**63 - 1


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").splitlines()
    except OSError:
        return []
