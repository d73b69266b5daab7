"""Whether the daemons of Ray that this process depends on are there.

Ray ends the process that uses it, without a word, when that asks for large objects after its raylet
is gone, and a minute after it lost the cluster's head (GCS). So both are watched, and whoever is
about to ask Ray for something asks here first: what was found until then can still be saved.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time

from placewright.errors import WorkerError

_HEAD_SECONDS = 5.0
"""A head that cannot be reached for so long is gone. One that stores what it knows can be restarted
in less."""

_ASK_SECONDS = 0.5

_END_SECONDS = 2.0
"""Between the moment when others notice that a process is gone, as its connections are closed, and
its end: more than a busy machine needs."""

_OWNER_DIED, _MACHINE_DIED = "its owner has died", "its node has died"
"""What Ray's head says of processes that it takes for dead because this one, or their machine,
is."""


class Watch:
    """Watches one raylet, on this machine, and one head, anywhere, until it is closed."""

    def __init__(self, raylet_socket: str, head: str) -> None:
        self._head = head
        self._raylet = _listener(raylet_socket)
        self._lost = ""
        self._closed = threading.Event()
        threading.Thread(target=self._ask_head, name="ray-watch", daemon=True).start()

    def lost(self) -> str:
        """Who is gone, or nothing."""
        self._look(0.0)
        return self._lost

    def taken_for_dead(self) -> None:
        """To be told when Ray says that this process, or its machine, is."""
        self._look(_END_SECONDS)
        if not self._lost:
            self._lost = "the head of the Ray cluster takes this machine for dead"

    def _look(self, seconds: float) -> None:
        if not self._lost and self._raylet is not None and _ended(self._raylet, seconds):
            self._lost = "Ray's process on this machine (raylet) has ended"

    def close(self) -> None:
        self._closed.set()
        if self._raylet is not None:
            os.close(self._raylet)
            self._raylet = None

    def wait_for_head(self) -> None:
        """Until it answers, or is known to be gone."""
        while not (self.lost() or self._closed.is_set() or self._head_answers()):
            time.sleep(0.1)

    def _head_answers(self) -> bool:
        host, _, port = self._head.rpartition(":")
        with contextlib.suppress(OSError):
            address = host.strip("[]"), int(port)
            socket.create_connection(address, timeout=_HEAD_SECONDS).close()
            return True
        return False

    def _ask_head(self) -> None:
        answered = time.monotonic()
        while not self._closed.wait(_ASK_SECONDS):
            if self._head_answers():
                answered = time.monotonic()
            silent = time.monotonic() - answered
            if silent > _HEAD_SECONDS and not self._lost:
                self._lost = (
                    f"the head of the Ray cluster (gcs_server at {self._head}) cannot be reached "
                    f"for {silent:.0f} s; has it ended?"
                )


_watches: list[Watch] = []
"""The present one, if any; a process has one Ray at a time."""


def begin(raylet_socket: str, head: str) -> None:
    _watches[:] = [Watch(raylet_socket, head)]


def end() -> None:
    """What is lost is still told."""
    for watch in _watches:
        watch.close()


def lost() -> str:
    """Who of the present Ray is gone, or nothing."""
    return _watches[0].lost() if _watches else ""


def check() -> None:
    """Raises where Ray cannot be asked any more."""
    if lost():
        raise WorkerError(lost())


def check_before_starting() -> None:
    """`check`, for who is about to start a process: for that Ray asks the head, and waits for its
    answer however long."""
    for watch in _watches:
        watch.wait_for_head()
    check()


def machine_died(fault: BaseException) -> bool:
    """Whether a process of Ray ended only because its machine is gone, which is not the fault of
    what it did. Raises where that machine is this one."""
    said = str(fault)
    if _OWNER_DIED in said:
        for watch in _watches:
            watch.taken_for_dead()
        check()
    return _OWNER_DIED in said or _MACHINE_DIED in said


def _listener(path: str) -> int | None:
    """A handle of the process that listens at a Unix socket; None where the system has none."""
    with contextlib.suppress(OSError, AttributeError), socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_HEAD_SECONDS)
        asking.connect(path)
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack(
            "3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return os.pidfd_open(pid)
    return None


def _ended(process: int, seconds: float) -> bool:
    asked = select.poll()
    asked.register(process, select.POLLIN)
    return bool(asked.poll(1000 * seconds))
