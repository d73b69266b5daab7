"""Who can be reached during every kind of run: nobody from outside this machine, nor by its users,
where no password is asked for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed.helpers import driver, processes
from tests.sockets import LOOPBACK, interfaces, listening
from tests.test_hostile_files import CLUSTER

MODULE = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.ones(2, 8)
"""

GRAPH = {
    "ops": [{"name": name, "type": name, "seconds": {"chip": 1.0}} for name in "abcdef"],
    "edges": [],
}


class Seen(NamedTuple):
    """Where processes of a run took connections."""

    here: set[str]
    """In the network of this machine."""
    private: set[str]
    """In networks of their own."""
    ways_out: set[str]
    """The interfaces of those, but for loopback ones."""


def seen_during(*arguments: str) -> Seen:
    """Runs a command to its end and looks at its processes all the while."""
    seen = Seen(set(), set(), set())
    ours = os.readlink("/proc/self/ns/net")
    with Path("log").open("wb") as log, driver(*arguments, stderr=log) as process:
        while process.poll() is None:
            for pid in [process.pid, *processes(process.pid)]:
                found = set(listening(pid))
                try:
                    private = os.readlink(f"/proc/{pid}/ns/net") != ours
                    outwards = interfaces(pid) if private else set()
                except OSError:  # ended meanwhile
                    continue
                (seen.private if private else seen.here).update(found)
                seen.ways_out.update(outwards - {"lo"})
            time.sleep(0.2)  # they need the cores
    assert process.returncode == 0, Path("log").read_text()
    return seen


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("graph.json").write_text(json.dumps(GRAPH))
    Path("cluster.yaml").write_text(CLUSTER)
    Path("model.py").write_text(MODULE)


RUN = ("--no-report", "-o", "out")
SIMULATED = ("place", "graph.json", "-c", "cluster.yaml", *RUN)
MEASURED = ("-c", "cpu2", "--evaluate", "measure", "-m", "single", "--trials", "4", *RUN)


def test_a_simulated_search_takes_no_connections() -> None:
    assert seen_during(*SIMULATED, "-m", "random", "--trials", "60") == Seen(set(), set(), set())


def test_real_runs_of_pytorch_take_no_connections() -> None:
    pytest.importorskip("torch")
    assert seen_during("place", "model.py:build", *MEASURED) == Seen(set(), set(), set())


def test_real_runs_of_tensorflow_take_them_in_a_network_of_their_own(
    private_network: None,
) -> None:
    pytest.importorskip("tensorflow")
    seen = seen_during("place", "rnnlm", "--backend", "tensorflow", "--scale", "small", *MEASURED)
    assert seen.here == set()
    assert seen.private  # two servers, on all interfaces that there are
    assert seen.ways_out == set()


def test_controllers_and_workers_take_them_on_the_loopback_interface() -> None:
    pytest.importorskip("ray")
    learning = (
        "-m", "ppo", "--controllers", "1", "--workers", "1", "--trials", "30", "--learner",
        "polish=0", "--learner", "warm_start=0", "--learner", "policy.hidden=16",
    )  # fmt: skip
    seen = seen_during(*SIMULATED, *learning)
    assert seen.here
    assert seen.here <= LOOPBACK
    assert seen.private == set()


@pytest.fixture
def private_network() -> None:
    from placewright.backends.isolation import PrivateNetwork

    try:
        PrivateNetwork().close()
    except OSError as fault:
        pytest.skip(f"this system allows no private network: {fault}")
