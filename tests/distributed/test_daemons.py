"""Ray's own processes end in mid-run: what was found is saved, and who is gone is said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import RayActorError

from placewright.distributed import watch as watching
from placewright.distributed.watch import Watch
from placewright.errors import WorkerError
from placewright.journal import read_trials
from placewright.problem import Problem
from tests.distributed.helpers import driver, gone, lines, processes, until

LISTENS = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print(flush=True)
while True:
    server.accept()
"""

WORKERS = ("-m", "single,random", "--workers", "2")
CONTROLLERS = (
    "-m", "ppo", "--controllers", "1", "--workers", "2", "--learner", "polish=0",
    "--learner", "warm_start=0", "--learner", "samples=8", "--learner", "policy.hidden=16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("victim", "arguments", "said"),
    [
        ("raylet", WORKERS, "(raylet) has ended"),
        pytest.param("gcs_server", WORKERS, "cannot be reached", marks=pytest.mark.slow),
        pytest.param("raylet", CONTROLLERS, "(raylet) has ended", marks=pytest.mark.slow),
        ("gcs_server", CONTROLLERS, "cannot be reached"),
    ],
    ids=["raylet-workers", "head-workers", "raylet-controllers", "head-controllers"],
)
def test_without_ray_the_answer_so_far_is_saved(
    graph: Path, victim: str, arguments: tuple[str, ...], said: str
) -> None:
    log = Path("log")
    with (
        log.open("wb") as file,
        driver(
            "place", graph, "-c", "k80x4", "-b", "1h", "-o", "out", "--no-report", *arguments,
            stderr=file,
        ) as process,
    ):  # fmt: skip
        until(lambda: len(lines("out/journal.jsonl")) >= 60)
        started = processes(process.pid)
        (pid,) = (pid for pid in started if name_of(pid) == victim)
        os.kill(pid, signal.SIGKILL)
        assert process.wait(timeout=300) == 2
        until(lambda: gone(started))
    error = log.read_text().splitlines()[-1]
    assert error.startswith("placewright: the search ended early: ")
    assert said in error
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["fault"]
    assert Path("out/placement.json").exists()
    problem = Problem.load("out/problem.json.gz")
    trials = read_trials("out/journal.jsonl", problem)
    assert len({trial.placement for trial in trials}) == len(trials) == summary["trials"] >= 60


def name_of(pid: int) -> str:
    """The file that it runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0].rpartition("/")[2]
    except OSError:
        return ""


def test_who_is_gone_is_known_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "raylet")
    command = [sys.executable, "-c", LISTENS, path]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as raylet,
        socket.create_server(("127.0.0.1", 0)) as head,
    ):
        assert raylet.stdout is not None
        raylet.stdout.readline()
        watch = Watch(path, f"127.0.0.1:{head.getsockname()[1]}")
        assert watch.lost() == ""
        raylet.kill()
        raylet.wait()
        assert "(raylet) has ended" in watch.lost()
        watch.close()
        assert "(raylet) has ended" in watch.lost()


NODE_DIED = "The actor died because its node has died. Node Id: 0100."
OWNER_DIED = """The actor died unexpectedly before finishing this task.
The actor is dead because its owner has died. Owner Id: 0100 Owner Ip address: 127.0.0.1 Owner \
worker exit type: SYSTEM_ERROR Worker exit detail: Owner's node has crashed."""
"""What Ray 2 says of every worker once its head takes the driver's machine for dead."""


def test_a_machine_that_is_taken_for_dead_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_END_SECONDS", 0.5)
    monkeypatch.setattr(watching, "_watches", [])
    path = str(tmp_path / "raylet")
    with (
        subprocess.Popen([sys.executable, "-c", LISTENS, path], stdout=subprocess.PIPE) as raylet,
        socket.create_server(("127.0.0.1", 0)) as head,
    ):
        assert raylet.stdout is not None
        raylet.stdout.readline()
        try:
            for gone, said in (
                (False, "takes this machine for dead"),
                (True, r"raylet\) has ended"),
            ):
                watching.begin(path, f"127.0.0.1:{head.getsockname()[1]}")
                assert not watching.machine_died(
                    RayActorError(error_msg="Worker exit detail: killed.")
                )
                assert watching.machine_died(RayActorError(error_msg=NODE_DIED))
                watching.check()
                if gone:
                    raylet.kill()  # its end may come a moment after its connections are closed
                with pytest.raises(WorkerError, match=said):
                    watching.machine_died(RayActorError(error_msg=OWNER_DIED))
                with pytest.raises(WorkerError, match=said):
                    watching.check()
                watching.end()
        finally:
            watching.end()
            raylet.kill()


def test_a_head_may_be_away_for_a_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("placewright.distributed.watch._HEAD_SECONDS", 1.0)
    head = socket.create_server(("127.0.0.1", 0))
    port = head.getsockname()[1]
    watch = Watch(str(tmp_path / "nowhere"), f"127.0.0.1:{port}")
    try:
        asked, _ = head.accept()
        asked.close()
        assert watch.lost() == ""
        head.close()
        until(watch.lost)
        assert f"127.0.0.1:{port}" in watch.lost()
    finally:
        watch.close()


def test_nothing_is_started_where_the_head_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray would wait for it for an hour, and not hear Ctrl-C."""
    monkeypatch.setattr(watching, "_HEAD_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        watch = Watch(str(tmp_path / "nowhere"), f"127.0.0.1:{port}")
        monkeypatch.setattr(watching, "_watches", [watch])
        watching.check_before_starting()
    try:
        with pytest.raises(WorkerError, match=f"127.0.0.1:{port}.* cannot be reached"):
            watching.check_before_starting()
    finally:
        watch.close()


LARGE = """
import os, signal, sys
import ray
from placewright.distributed import watch
from placewright.distributed.config import TeamConfig
from placewright.distributed.session import ray_session
from tests.distributed.helpers import processes
from tests.distributed.test_daemons import name_of

@ray.remote
def answer(given):
    return given + given

with ray_session(TeamConfig(workers=1)):
    ref = answer.remote(bytes(1_000_000))
    ray.wait([ref])
    (raylet,) = (pid for pid in processes(os.getpid()) if name_of(pid) == "raylet")
    os.kill(raylet, signal.SIGKILL)
    while not watch.lost():
        pass
    print(len(ray.get(ref)), flush=True)
"""


def test_large_answers_are_there_when_the_raylet_is_gone() -> None:
    """Ray would end whoever asks its store for them."""
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", LARGE], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout == "2000000\n", ended.stderr
