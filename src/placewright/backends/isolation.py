"""A network of its own for processes that must listen: loopback only, and nobody else's.

TensorFlow's servers listen on all interfaces and ask for no password; whoever reaches one can read
and write files as the user who runs it. On Linux any user may make a network namespace (inside a
user namespace, which root does without) that holds nothing but a loopback device. Processes in it
reach each other, and nobody outside reaches them, not even other users of this machine.

This file is also run as a script, with nothing imported but Python's own library: as the holder
that makes the namespace and keeps it alive, and before each process that is to live in it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_READY = b"ready"
_START_SECONDS = 10.0


class PrivateNetwork:
    """The namespace, for as long as it is not closed."""

    def __init__(self) -> None:
        """Raises `OSError` where the system does not allow it."""
        if sys.platform != "linux":
            raise OSError("network namespaces are a thing of Linux")
        self._holder = subprocess.Popen(
            [sys.executable, "-I", __file__, "hold", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        ready, _, _ = select.select([self._holder.stdout], [], [], _START_SECONDS)
        answer = os.read(self._holder.stdout.fileno(), 200) if ready else b"no answer"
        if answer != _READY:
            self.close()
            raise OSError(answer.decode(errors="replace") or "the system does not say why")

    @property
    def prefix(self) -> list[str]:
        """What to put before a command so that it runs inside. The command keeps its process."""
        return [sys.executable, "-I", __file__, "enter", str(self._holder.pid)]

    @property
    def alive(self) -> bool:
        """Whether more processes can enter it; the system may have killed the holder."""
        return self._holder.poll() is None

    def close(self) -> None:
        """Lets no more processes in. The network ends with the last that is there."""
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            assert pipe is not None
            pipe.close()


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _hold(parent: int) -> None:
    """Makes the namespaces, and waits for the end of the process that wants them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        return
    uid, gid = os.getuid(), os.getgid()
    try:
        # Root may do it as it is, and would lose its rights to files of others in a user namespace.
        if libc.unshare(_CLONE_NEWNET) != 0:
            _checked(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET), "unshare")
            # The same user inside as outside, so that files belong to whom they should.
            for name, text in (
                ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"),
            ):  # fmt: skip
                with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                    file.write(text)
        with socket.socket() as device:
            request = struct.pack("16sh", b"lo", 0).ljust(40, b"\0")
            flags = struct.unpack_from("h", fcntl.ioctl(device, _SIOCGIFFLAGS, request), 16)[0]
            request = struct.pack("16sh", b"lo", flags | _IFF_UP).ljust(40, b"\0")
            fcntl.ioctl(device, _SIOCSIFFLAGS, request)
    except OSError as fault:
        os.write(1, str(fault).encode()[:200])
        return
    os.write(1, _READY)
    sys.stdin.buffer.read()


def _enter(holder: int, command: list[str]) -> None:
    """Becomes the command, inside the namespaces of the holder."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Both are opened first: inside the user namespace, the holder's files may be out of reach.
    # One's own cannot be entered again.
    handles = [
        (os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY), kind)
        for name, kind in (("user", _CLONE_NEWUSER), ("net", _CLONE_NEWNET))
        if os.readlink(f"/proc/{holder}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
    ]
    for handle, kind in handles:
        _checked(libc.setns(handle, kind), "setns")
        os.close(handle)
    os.execv(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        _hold(int(sys.argv[2]))
    else:
        _enter(int(sys.argv[2]), sys.argv[3:])
