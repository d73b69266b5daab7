from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from placewright.backends.processes import Child, Load, busy_seconds

BIG = {"big": "x" * (1 << 20)}
"""Far more than a pipe holds."""


@pytest.fixture
def deaf(tmp_path: Path) -> dict[str, str]:
    """The environment in which the module `deaf` never reads what it is sent."""
    (tmp_path / "deaf.py").write_text(
        "import os, sys, time\n"
        "open(os.environ['PID_FILE'], 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "PID_FILE": str(tmp_path / "pid")}


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ctrl-C in two seconds."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def test_a_child_that_does_not_read_holds_nobody_up(deaf: dict[str, str]) -> None:
    child = Child("deaf", BIG, seconds=0.5, environment=deaf)  # would block for ever
    try:
        child.send(BIG, 0.1)
        assert child.receive(0.0) is None
        assert child.ended() == ""
    finally:
        child.kill()


def test_a_child_whose_start_is_interrupted_is_not_left_behind(
    deaf: dict[str, str], alarm: None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Child("deaf", BIG, seconds=60.0, environment=deaf)
    pid_file = Path(deaf["PID_FILE"])
    until = time.monotonic() + 10.0
    while not pid_file.exists() and time.monotonic() < until:
        time.sleep(0.05)
    if pid_file.exists():  # it may have been ended before it began
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


def test_nothing_is_imported_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "polite.py").write_text(
        "from placewright.backends.processes import serve\nserve(lambda request: request)\n"
    )
    (tmp_path / "json.py").write_text("raise SystemExit('not the json you are looking for')\n")
    monkeypatch.chdir(tmp_path)
    # Without an empty part, which would stand for the current directory.
    path = os.pathsep.join(filter(None, (str(tmp_path / "modules"), os.environ.get("PYTHONPATH"))))
    child = Child("polite", {"hello": 1}, seconds=10.0, environment={"PYTHONPATH": path})
    try:
        assert child.receive(30.0) == {"hello": 1}, child.last_words()
    finally:
        child.kill()


def test_load_of_others_is_told_from_our_own() -> None:
    stat = "cpu  9 9 9 9\ncpu0 100 20 30 999 999 1 2 3 7 7\ncpu1 400 0 0 9 9 0 0 0 0 0\nintr 5\n"
    tick = os.sysconf("SC_CLK_TCK")
    assert busy_seconds(stat, {0}) == pytest.approx(156 / tick)
    assert busy_seconds(stat, {0, 1}) == pytest.approx(556 / tick)
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        theirs, ours = Load([]), Load([burner.pid])
        time.sleep(2.0)
        with_it, without = theirs.share(), ours.share()
    finally:
        burner.kill()
        burner.wait()
    assert with_it is not None
    assert without is not None
    assert with_it > without + 0.1  # whatever else runs here is in both
    assert Load([burner.pid]).share() is None  # it is gone


def child_of(folder: Path, code: str) -> Child:
    """A process that runs this, and reads nothing."""
    (folder / "of_a_test.py").write_text(code)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return Child("of_a_test", {}, seconds=5.0, environment={"PYTHONPATH": path})


@pytest.mark.skipif(sys.platform != "linux", reason="threads end by themselves there alone")
def test_a_child_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    child = child_of(
        tmp_path,
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(1.0), os._exit(7))).start()\n"
        "print('going', flush=True)\n"
        "ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)\n",
    )
    try:
        state, until = "", time.monotonic() + 20.0
        while state != "Z" and time.monotonic() < until:
            stat = Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8")
            state = stat.rpartition(")")[2].split()[0]
        assert state == "Z", "its first thread should have gone"
        assert child.ended() == "ended with exit code 7"
    finally:
        child.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="flags of processes are told there alone")
def test_a_child_that_still_gives_its_memory_back_is_waited_for(tmp_path: Path) -> None:
    child = child_of(
        tmp_path,
        "import mmap, time\n"
        "memory = mmap.mmap(-1, 256 << 20)\n"
        "for place in range(0, len(memory), mmap.PAGESIZE):\n"
        "    memory[place] = 1\n"
        "print('there', flush=True)\n"
        "time.sleep(60)\n",
    )
    try:
        until = time.monotonic() + 20.0
        while "there" not in child.last_words() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        flags = 0
        while not flags & 4 and time.monotonic() < until:
            stat = Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8")
            flags = int(stat.rpartition(")")[2].split()[6])
        assert flags & 4, "it should be on its way"
        assert child.ended() == "was killed by signal 9 (SIGKILL)"
    finally:
        child.kill()
