"""Cleans up after a process that started Ray and was killed. Run as a script of its own.

Ray's daemons end with the process that started them, but its agents stay for another minute. This
script waits at the other end of a pipe; when that breaks, it ends all processes that were started
with the mark in their environment or write to Ray's folder, and removes that.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "PLACEWRIGHT_RAY"
"""Environment variable that all processes of one Ray inherit: its folder."""

DONE = "done"
"""What is written into the pipe when Ray was stopped in an orderly way."""


def processes_of(folder: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            # Whoever started Ray may be there still, and saves what it has.
            if int(path.name) not in (os.getpid(), os.getppid()) and _belongs(path, folder):
                found.append(int(path.name))
    return found


def _belongs(path: Path, folder: str) -> bool:
    if f"{MARK}={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
        return True
    # Those of Ray that change their title overwrite their environment with it; their logs are open.
    # Who only reads those is a user.
    for file in (path / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(file).startswith(f"{folder}/") and _writes(path, file.name):
                return True
    return False


def _writes(path: Path, number: str) -> bool:
    """Whether a process has opened this file to write."""
    for line in (path / "fdinfo" / number).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return int(value, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def main() -> None:
    folder = sys.argv[1]
    if sys.stdin.read() != DONE:
        while pids := processes_of(folder):  # again, for those that were just being started
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
