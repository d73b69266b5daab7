"""Ray on several hosts: network namespaces with a bridge between them, each with a Ray node.

Needs the right to make namespaces (root) and `ip` of iproute2; skipped, with the reason, elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from placewright.journal import read_trials
from placewright.problem import Problem
from tests.distributed.helpers import driver, gone, lines, processes, until
from tests.distributed.test_daemons import name_of

pytestmark = pytest.mark.slow

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
HEAD_PORT = 6379


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """A bridge, and hosts that hang on it. Each has a folder of its own in place of `folder`, and
    memory that is shared among its own processes only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holders: dict[str, subprocess.Popen[str]] = {}
        self.name = f"pw{os.getpid() % 100_000}"
        self.hosts: dict[str, int] = {}
        ip("link", "add", self.name, "type", "bridge")
        ip("link", "set", self.name, "up")

    def add(self, host: str) -> str:
        """The host's address."""
        number = len(self.hosts) + 1
        self.hosts[host] = number
        space, wire = f"{self.name}{host}", f"{self.name}w{number}"
        ip("netns", "add", space)
        ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", wire, "master", self.name, "up")
        address = f"10.97.33.{number}"
        for change in (
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", space, *change)
        own = f"mount -t tmpfs none {self.folder} && mount -t tmpfs none /dev/shm && echo ready"
        holder = subprocess.Popen(
            ["ip", "netns", "exec", space, "sh", "-c", f"{own} && exec sleep infinity"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert holder.stdout is not None
        self.holders[host] = holder
        assert holder.stdout.readline() == "ready\n"
        return address

    def inside(self, host: str) -> list[str]:
        """What to put before a command so that it runs there."""
        enter = ["nsenter", "-t", str(self.holders[host].pid), "-m", "-n"]
        # A directory that was entered outside would be one of another file system.
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]

    def pids(self, host: str) -> list[int]:
        asked = ["ip", "netns", "pids", f"{self.name}{host}"]
        answer = subprocess.run(asked, capture_output=True, text=True).stdout
        return [int(pid) for pid in answer.split()]

    def vanish(self, host: str) -> None:
        """Without a last word: first the wire is cut, then the host is switched off."""
        ip("link", "del", f"{self.name}w{self.hosts[host]}")
        while pids := self.pids(host):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.holders[host].poll()
            time.sleep(0.1)

    def close(self) -> None:
        for host, number in self.hosts.items():
            with suppress(subprocess.CalledProcessError):
                self.vanish(host)
            with suppress(subprocess.CalledProcessError):
                ip("link", "del", f"{self.name}w{number}")
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", f"{self.name}{host}")
            if host in self.holders:
                self.holders[host].kill()
                self.holders[host].communicate()
        ip("link", "del", self.name)


class Cluster:
    """A Ray cluster on such a network: the first host is its head."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.head = ""

    def start(self, host: str, resources: dict[str, float]) -> None:
        address = self.network.add(host)
        joins = ["--address", self.head] if self.head else ["--head", "--port", str(HEAD_PORT)]
        self.head = self.head or f"{address}:{HEAD_PORT}"
        where = ["--node-ip-address", address]
        if "--head" in joins:
            where += ["--temp-dir", str(self.network.folder), "--include-dashboard", "false"]
        command = [
            *self.network.inside(host), *RAY, "start", *joins, *where,
            "--num-cpus", "2", "--object-store-memory", str(100 << 20),
            "--resources", json.dumps(resources), "--disable-usage-stats",
        ]  # fmt: skip
        started = subprocess.run(command, capture_output=True, text=True)
        assert started.returncode == 0, started.stdout + started.stderr


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` of iproute2")
    # Short: the names of Ray's sockets are limited.
    folder = Path(tempfile.mkdtemp(prefix="pw", dir="/tmp"))
    try:
        try:
            network = Network(folder)
        except subprocess.CalledProcessError as fault:
            pytest.skip(f"this system allows no network of its own: {fault.stderr.strip()}")
        try:
            try:
                network.add("try")
            except (subprocess.CalledProcessError, AssertionError) as fault:
                pytest.skip(f"this system allows no hosts of its own: {fault}")
            yield network
        finally:
            network.close()
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def cluster(network: Network, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    return Cluster(network)


def run_of(graph: Path, cluster: Cluster, *arguments: str) -> list[str]:
    return [
        "place", str(graph), "-c", "k80x4", "-o", "out", "--no-report",
        "--ray-address", cluster.head, "--worker-resource", "box=1", *arguments,
    ]  # fmt: skip


LEARNING = (
    "-m", "ppo", "--learner", "polish=0", "--learner", "warm_start=0", "--learner", "samples=8",
    "--learner", "policy.hidden=16",
)  # fmt: skip


def workers_on(network: Network, host: str) -> list[int]:
    return [pid for pid in network.pids(host) if name_of(pid).startswith("ray::Worker")]


def check_journal(trials: int | None = None) -> int:
    """Every trial once."""
    found = read_trials("out/journal.jsonl", Problem.load("out/problem.json.gz"))
    assert len({trial.placement for trial in found}) == len(found)
    assert all(trial.measurement.ok for trial in found)
    assert trials is None or len(found) == trials
    return len(found)


def test_training_on_two_hosts(graph: Path, cluster: Cluster, network: Network) -> None:
    cluster.start("a", {"box": 1})
    cluster.start("b", {"box": 1})
    arguments = run_of(
        graph, cluster, *LEARNING, "--controllers", "2", "--workers", "1", "--trials", "300"
    )
    with (
        Path("log").open("wb") as log,
        driver(*arguments, prefix=network.inside("a"), stderr=log) as process,
    ):
        # A box each: one worker of each controller on either host.
        until(lambda: workers_on(network, "a") and workers_on(network, "b"), 240)
        assert process.wait(timeout=600) == 0, Path("log").read_text()
        until(lambda: not workers_on(network, "b"))
    check_journal(300)
    updates = Counter(json.loads(line)["controller"] for line in lines("out/metrics.jsonl"))
    assert set(updates) == {0, 1}
    assert network.pids("b")  # the cluster was running, and is


def test_a_host_vanishes_and_another_joins(graph: Path, cluster: Cluster, network: Network) -> None:
    cluster.start("a", {"box": 1})
    cluster.start("b", {"box": 1})
    arguments = run_of(graph, cluster, "-m", "random", "--workers", "2", "-b", "1h")

    def count() -> int:
        return len(lines("out/journal.jsonl"))

    with (
        Path("log").open("wb") as log,
        driver(*arguments, prefix=network.inside("a"), stderr=log) as process,
    ):
        until(lambda: workers_on(network, "a") and workers_on(network, "b") and count() > 100, 240)
        network.vanish("b")
        # Ray takes its time to notice; then the worker that is left goes on alone.
        before = count()
        until(lambda: count() > before + 1000, 240)
        cluster.start("c", {"box": 1})
        until(lambda: workers_on(network, "c"), 300)
        before = count()
        until(lambda: count() > before + 1000, 120)
        started = processes(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 130
        until(lambda: gone(started))
    assert check_journal() == json.loads(Path("out/summary.json").read_text())["trials"]


def test_the_host_of_the_head_vanishes(graph: Path, cluster: Cluster, network: Network) -> None:
    cluster.start("a", {"desk": 1})
    cluster.start("b", {"box": 2})
    arguments = run_of(graph, cluster, "-m", "random", "--workers", "2", "-b", "1h")
    with (
        Path("log").open("wb") as log,
        driver(*arguments, prefix=network.inside("b"), stderr=log) as process,
    ):
        until(lambda: len(lines("out/journal.jsonl")) > 100, 240)
        network.vanish("a")
        assert process.wait(timeout=300) == 2
    assert "cannot be reached" in Path("log").read_text().splitlines()[-1]
    assert check_journal() == json.loads(Path("out/summary.json").read_text())["trials"]
