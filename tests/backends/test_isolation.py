from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from placewright.backends import isolation
from placewright.backends.isolation import PrivateNetwork

_PR_CAPBSET_DROP, _CAP_SYS_ADMIN, _CAP_DAC_OVERRIDE = 24, 21, 1

SERVER = """
import socket
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        server.accept()[0].sendall(b"hello")
"""

CLIENT = """
import socket, sys
print(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10).recv(5).decode())
"""

OWNER = """
import signal, subprocess, sys
from placewright.backends.isolation import PrivateNetwork
network = PrivateNetwork()
inside = subprocess.Popen([*network.prefix, sys.executable, "-c", sys.argv[1]])
print(network._holder.pid, inside.pid, flush=True)
signal.pause()
"""

WITHOUT_RIGHTS = """
import os, subprocess, sys
from placewright.backends.isolation import PrivateNetwork
network = PrivateNetwork()
code = (
    "import os, sys; print(os.readlink('/proc/self/ns/net'), os.readlink('/proc/self/ns/user')); "
    "print(os.getuid(), open(sys.argv[1]).read())"
)
subprocess.run([*network.prefix, sys.executable, "-c", code, sys.argv[1]], check=True)
network.close()
"""


@pytest.fixture
def network() -> Iterator[PrivateNetwork]:
    with contextlib.closing(private_network()) as network:
        yield network


def private_network() -> PrivateNetwork:
    try:
        return PrivateNetwork()
    except OSError as fault:
        pytest.skip(f"this system allows no private network: {fault}")


def serve(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server that listens on all interfaces it finds, and its port."""
    server = subprocess.Popen(
        [*command, sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_inside_all_reach_each_other_and_nobody_outside_does(network: PrivateNetwork) -> None:
    server, port = serve(network.prefix)
    with server:
        try:
            asked = subprocess.run(
                [*network.prefix, sys.executable, "-c", CLIENT, port],
                capture_output=True, text=True,
            )  # fmt: skip
            assert asked.stdout == "hello\n", asked.stderr
            addresses = {"127.0.0.1", "::1", *socket.gethostbyname_ex(socket.gethostname())[2]}
            for address in addresses:
                with pytest.raises(OSError, match=r"refused|timed out|assign"):
                    socket.create_connection((address, int(port)), timeout=2)
            # Another private network is another one.
            with contextlib.closing(PrivateNetwork()) as other:
                asked = subprocess.run(
                    [*other.prefix, sys.executable, "-c", CLIENT, port],
                    capture_output=True, text=True,
                )  # fmt: skip
            assert "ConnectionRefusedError" in asked.stderr
        finally:
            server.kill()


def test_inside_nobody_outside_is_reached(network: PrivateNetwork) -> None:
    server, port = serve([])
    with server:
        try:
            with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as connection:
                assert connection.recv(5) == b"hello"
            asked = subprocess.run(
                [*network.prefix, sys.executable, "-c", CLIENT, port],
                capture_output=True, text=True,
            )  # fmt: skip
            assert "ConnectionRefusedError" in asked.stderr
        finally:
            server.kill()


def test_it_ends_with_whoever_made_it() -> None:
    private_network().close()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, "import time; time.sleep(600)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    with owner:
        holder, inside = map(int, owner.stdout.readline().split())
        try:
            assert not gone(holder)
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            until = time.monotonic() + 30.0
            while not gone(holder) and time.monotonic() < until:
                time.sleep(0.02)
            assert gone(holder)
        finally:
            os.kill(inside, signal.SIGKILL)


def test_closed_or_dead_it_says_so(network: PrivateNetwork) -> None:
    assert network.alive
    os.kill(network._holder.pid, signal.SIGKILL)
    until = time.monotonic() + 30.0
    while network.alive and time.monotonic() < until:
        time.sleep(0.02)
    assert not network.alive


@pytest.mark.skipif(os.getuid() != 0, reason="only root has a right to give up")
def test_nobody_needs_to_be_root(tmp_path: Path) -> None:
    """As root but without its rights, as most users are: there is a user namespace, too."""
    private_network().close()
    (tmp_path / "mine").write_text("mine")
    libc = ctypes.CDLL(None)

    def give_up() -> None:
        for right in (_CAP_SYS_ADMIN, _CAP_DAC_OVERRIDE):
            libc.prctl(_PR_CAPBSET_DROP, right, 0, 0, 0)

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, str(tmp_path / "mine")],
        capture_output=True, text=True, preexec_fn=give_up,
    )  # fmt: skip
    if "OSError" in done.stderr:
        pytest.skip(f"not without root's rights: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    namespaces, rest = done.stdout.splitlines()
    outside = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user")]
    assert not set(namespaces.split()) & set(outside)
    assert rest == "0 mine"


def test_elsewhere_than_on_linux_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="a thing of Linux"):
        PrivateNetwork()


def test_the_systems_refusal_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "refusing.py"
    refusing.write_text("import os\nos.write(1, b'[Errno 1] unshare: Operation not permitted')\n")
    monkeypatch.setattr(isolation, "__file__", str(refusing))
    with pytest.raises(OSError, match="unshare: Operation not permitted"):
        PrivateNetwork()
