"""`placewright place` with workers and controllers: bad input, Ctrl-C, a driver that is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placewright.cli import main
from placewright.distributed import guard, session
from tests.distributed.helpers import driver, gone, lines, processes, until
from tests.sockets import LOOPBACK, listening


def test_a_killed_driver_leaves_nothing_and_is_resumed(graph: Path) -> None:
    arguments = (
        "place", graph, "-c", "k80x4", "-m", "ppo", "--workers", "2",
        "--learner", "polish=0", "--learner", "warm_start=0", "--learner", "samples=8",
        "--learner", "policy.hidden=16", "--trials", "500", "--no-report",
    )  # fmt: skip
    with driver(*arguments, "--controllers", "2", "-o", "out") as process:
        until(lambda: Path("out/checkpoint-ppo.safetensors").exists())
        until(lambda: len(lines("out/journal.jsonl")) >= 60)
        started = processes(process.pid)
        assert len(started) >= 7  # two controllers, four workers, a parameter server; Ray itself
        process.kill()
        process.wait()
        until(lambda: gone(started))
    before = lines("out/journal.jsonl")
    assert 60 <= len(before) < 500
    # Fewer controllers will do.
    with driver(*arguments, "--controllers", "1", "--resume", "out") as process:
        assert process.wait() == 0
    after = lines("out/journal.jsonl")
    # A line that was being written when it was killed is dropped.
    assert after[: len(before) - 1] == before[:-1]
    assert len(after) == 500
    assert len({json.loads(line)["placement"] for line in after}) == 500
    updates = [json.loads(line)["update"] for line in lines("out/metrics.jsonl")]
    assert updates == sorted(set(updates))


def test_the_guard_ends_who_belongs_to_ray_and_nobody_else(tmp_path: Path) -> None:
    """Who was started with the mark, or writes to the folder, and not who only reads there."""
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / "log").write_text("said")
    code = "import sys, time; file = open(sys.argv[1], sys.argv[2]); print(); time.sleep(600)"
    held: list[subprocess.Popen[bytes]] = []
    for mode, mark in (("r", "other"), ("a", "other"), ("r", str(folder))):
        command = [sys.executable, "-u", "-c", code, str(folder / "log"), mode]
        environment = {**os.environ, guard.MARK: mark}
        held.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    try:
        for process in held:
            assert process.stdout is not None
            process.stdout.readline()  # it has the file open
        watch = [sys.executable, "-I", guard.__file__, str(folder)]
        subprocess.run(watch, stdin=subprocess.DEVNULL, check=True)
        assert [process.poll() for process in held] == [None, -9, -9]
        assert not folder.exists()
    finally:
        for process in held:
            process.kill()
            process.communicate()


def test_nobody_gets_into_ray_and_ctrl_c_leaves_nothing_but_the_best(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tempfile.mkdtemp(prefix="pw", dir="/tmp")  # short: names of sockets are limited
    monkeypatch.setenv("TMPDIR", temporary)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    arguments = (
        "place", graph, "-c", "k80x4", "-m", "single,random", "--workers", "2", "-b", "1h",
        "-o", "out",
    )  # fmt: skip
    try:
        with driver(*arguments) as process:
            until(lambda: len(lines("out/journal.jsonl")) >= 100)
            (folder,) = Path(temporary).glob("placewright-ray-*")
            assert folder.stat().st_mode & 0o077 == 0
            started = [process.pid, *processes(process.pid)]
            found = {address for pid in started for address in listening(pid)}
            assert found
            assert found <= LOOPBACK
            (head,) = {
                argument.partition("=")[2]
                for pid in started
                for argument in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if argument.startswith("--gcs-address=")
            }
            # Who has the token is answered, who has another or none is not.
            command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address"]
            for token, welcome in (("1" * 64, True), ("0" * 64, False), (None, False)):
                mode = "disabled" if token is None else "token"
                keys = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token or ""}
                keys["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray asks another address
                asked = subprocess.run(
                    [*command, head], env={**os.environ, **keys}, capture_output=True
                )
                assert (asked.returncode == 0) == welcome, (token, asked.stderr)
            started = processes(process.pid)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait() == 130
            until(lambda: gone(started))
            until(lambda: not folder.exists())
    finally:
        until(lambda: not os.listdir(temporary))
        os.rmdir(temporary)
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["interrupted"]
    assert Path("out/placement.json").exists()
    assert len(lines("out/journal.jsonl")) == summary["trials"]


@pytest.fixture
def complaint(graph: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command that must fail says, in one line."""

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["place", str(graph), "-c", "k80x2", "--trials", "10", "-o", "out", *arguments])
        out, err = capfd.readouterr()
        assert caught.value.code == 2
        assert out == ""
        assert len(err.splitlines()) == 1
        assert not Path("out").exists()
        return err

    return call


def test_ray_missing(complaint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def hide(name: str, *rest: Any) -> Any:
        return None if name == "ray" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    assert "pip install 'placewright[ray]'" in complaint("--workers", "2")


def test_an_address_nobody_answers_at(complaint: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said = complaint("--workers", "2", "--ray-address", f"127.0.0.1:{port}")
    assert f"nobody answers at --ray-address 127.0.0.1:{port}" in said


def test_an_address_of_something_else(
    complaint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        said = complaint("--workers", "2", "--ray-address", address)
        assert f"what answers at --ray-address {address} is not Ray" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "0"), "at least one worker"),
        (("--ray-address", "auto"), "means nothing without --workers"),
        (("--workers", "1", "--max-staleness", "3"), "means nothing without --controllers"),
        (("--controllers", "1", "--max-staleness", "-1"), "at least 0"),
        (("--workers", "1", "--ray-address", "ray://host"), "HOST:PORT"),
        (("--workers", "1", "--worker-resource", "GPU"), "NAME=AMOUNT"),
        (("--workers", "1", "--worker-resource", "GPU=1.5"), "whole ones"),
        (("--workers", "1", "--worker-resource", "GPU=nan"), "no amount"),
        (("--workers", "1", "--trial-timeout", "soon"), "not a time"),
        (("--workers", "1", "--trial-timeout", "0s"), "cannot be given 0 seconds"),
    ],
)
def test_options_that_make_no_sense(
    arguments: tuple[str, ...], said: str, complaint: Callable[..., str]
) -> None:
    assert said in complaint(*arguments)
