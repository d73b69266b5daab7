"""Who takes connections, and where."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def listening(pid: int) -> list[str]:
    """The addresses at which a process takes connections, as the kernel writes them."""
    sockets = set()
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                sockets.add(os.readlink(file))
        found = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.append(fields[1].rpartition(":")[0])
        return found
    except OSError:  # ended meanwhile
        return []


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def interfaces(pid: int) -> set[str]:
    """The network interfaces that a process has."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    return {line.partition(":")[0].strip() for line in lines}
