"""A process that dies anywhere leaves a directory that is continued, and no two write into one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from placewright import Problem, place
from placewright.cli.place import Output
from placewright.errors import PlacewrightError, ReportError, SearchError
from placewright.files import sha256_of
from placewright.journal import Journal, read_progression, read_trials
from placewright.report.run import read_run
from placewright.session.directory import is_begun, new_directory, writing
from placewright.testing import layered_graph, random_problem

METHODS = "single,random"
TRIALS = 12


def posed() -> Problem:
    return random_problem(5)


def search(folder: Path, trials: int = TRIALS, **settings: Any) -> Any:
    return place(posed(), method=METHODS, trials=trials, directory=folder, **settings)


# --- kills ---------------------------------------------------------------------------------------


class Dying:
    """Ends the process, as SIGKILL does, at its call number `last` of what changes files."""

    def __init__(self, last: int) -> None:
        self.left = last

    def count(self) -> bool:
        self.left -= 1
        return self.left < 0

    def at(self, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.count():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    def opening(self, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            file = function(*arguments, **named)
            return DyingFile(file, self) if file.writable() else file

        return call


class DyingFile:
    """A file of which a write may be cut short by the end of the process."""

    def __init__(self, file: Any, dying: Dying) -> None:
        self._file, self._dying = file, dying

    def write(self, data: Any) -> Any:
        if self._dying.count():
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> DyingFile:
        return self

    def __exit__(self, *fault: object) -> None:
        self._file.close()


def dies_at(number: int, folder: Path, trials: int) -> bool:
    """Whether a search in a process of its own, which is killed at that change of a file, was."""
    child = os.fork()
    if child == 0:
        try:
            dying = Dying(number)
            for name in ("replace", "fsync", "unlink"):
                setattr(os, name, dying.at(getattr(os, name)))
            os.fdopen = dying.opening(os.fdopen)
            Path.open = dying.opening(Path.open)  # type: ignore[method-assign]
            search(folder, trials)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def whole_lines(folder: Path) -> bytes:
    path = folder / "journal.jsonl"
    data = path.read_bytes() if path.is_file() else b""
    return data[: data.rfind(b"\n") + 1]


def check_goes_on(folder: Path) -> None:
    before = whole_lines(folder)
    if is_begun(folder):
        Output(resume=str(folder))
        with pytest.raises(SearchError, match="--resume"):
            Output(directory=str(folder))
    else:
        Output(directory=str(folder))
    result = search(folder)
    assert result.trials == TRIALS
    after = (folder / "journal.jsonl").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == TRIALS
    assert len({trial.placement for trial in read_trials(folder / "journal.jsonl", posed())}) == (
        TRIALS
    )
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    run = read_run(folder)
    assert not run.summary["interrupted"]
    assert run.summary["trials"] == TRIALS
    for name, digest in run.summary["files"].items():
        assert sha256_of(folder / name, SearchError) == digest


@pytest.mark.parametrize("resumed", [False, True])
def test_killed_at_every_change_of_a_file_a_run_goes_on(tmp_path: Path, resumed: bool) -> None:
    search(tmp_path / "compiles")
    for number in range(200):
        folder = tmp_path / str(number)
        if resumed:
            search(folder, TRIALS // 2)
        folder.mkdir(exist_ok=True)
        before = whole_lines(folder)
        killed = dies_at(number, folder, TRIALS)
        assert whole_lines(folder).startswith(before)
        check_goes_on(folder)
        if not killed:
            break
    assert not killed
    assert number > 15


def test_results_that_were_cut_off_are_not_shown_as_results(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search(tmp_path)
    placement = json.loads((tmp_path / "placement.json").read_text())
    (tmp_path / "placement.json").write_text(json.dumps(placement | {"cluster": "of later"}))
    run = read_run(tmp_path)
    assert run.ok
    assert run.summary["interrupted"]
    assert "cut off" in caplog.text
    assert "--resume" in caplog.text
    (tmp_path / "journal.jsonl").rename(tmp_path / "away")
    with pytest.raises(ReportError, match=r"cut off.*placement.json is not the one"):
        read_run(tmp_path)
    (tmp_path / "away").rename(tmp_path / "journal.jsonl")
    check_goes_on(tmp_path)


# --- two at once ---------------------------------------------------------------------------------

COMMAND = [sys.executable, "-c", "from placewright.cli import main; main()"]


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "place", "graph.json", "-c", "k80x2", "-m", "random", "--no-report", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    said = [process.communicate(timeout=300) for process in processes]
    return [(p.returncode, err) for p, (_, err) in zip(processes, said, strict=True)]


def test_several_starts_without_a_name_get_one_each(tmp_path: Path) -> None:
    layered_graph(30, 5).save(tmp_path / "graph.json")
    found = ends([started(tmp_path, "--trials", "20") for _ in range(3)])
    assert [code for code, _ in found] == [0, 0, 0], found
    assert len(list(tmp_path.glob("placewright-graph-k80x2*/summary.json"))) == 3


def test_of_two_that_resume_one_wins_and_a_death_releases_the_lock(tmp_path: Path) -> None:
    layered_graph(30, 5).save(tmp_path / "graph.json")
    journal = tmp_path / "out" / "journal.jsonl"
    with started(tmp_path, "-b", "9m", "-o", "out") as first:
        try:
            while first.poll() is None and not (journal.is_file() and journal.stat().st_size):
                time.sleep(0.05)
            ((code, said),) = ends([started(tmp_path, "--trials", "99", "--resume", "out")])
        finally:
            first.kill()
    assert code == 2
    assert "out: another run is writing there" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out" / "summary.json").exists()
    count = whole_lines(tmp_path / "out").count(b"\n")
    ((code, said),) = ends([started(tmp_path, "--trials", str(count + 9), "--resume", "out")])
    assert code == 0, said


def test_python_waits_for_nobody_either(tmp_path: Path) -> None:
    with writing(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                search(tmp_path)
            except SearchError as error:
                os._exit(7 if "another run is writing there" in str(error) else 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WEXITSTATUS(status) == 7
        search(tmp_path)  # its own lock does not keep it out
    search(tmp_path)


def test_a_directory_in_which_nothing_was_begun_goes_away(tmp_path: Path) -> None:
    name = new_directory(str(tmp_path / "run"))
    with pytest.raises(ZeroDivisionError), writing(name, made=True):
        raise ZeroDivisionError
    assert not Path(name).exists()
    (tmp_path / "mine").mkdir()
    with writing(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir()


# --- bytes that change ---------------------------------------------------------------------------


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    problem = posed()
    search(tmp_path)
    path = tmp_path / "journal.jsonl"
    trials = read_trials(path, problem)
    data = path.read_bytes()
    rng = random.Random(0)
    places = [*range(len(data) - 40, len(data)), *(rng.randrange(len(data)) for _ in range(1960))]
    for position in places:
        byte = rng.choice([b for b in range(256) if b != data[position]])
        path.write_bytes(data[:position] + bytes([byte]) + data[position + 1 :])
        for read in (read_trials, read_progression):
            with pytest.raises(SearchError, match="line"):
                read(path, problem)
    path.write_bytes(data)
    assert read_trials(path, problem) == trials


def test_a_line_without_a_checksum_is_refused(tmp_path: Path) -> None:
    search(tmp_path)
    path = tmp_path / "journal.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[3])
    record.pop("sum")
    lines[3] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SearchError, match="line 4: has no checksum"):
        read_trials(path, posed())


def test_simulated_times_are_simulated_again_before_they_are_believed(tmp_path: Path) -> None:
    problem = posed()
    search(tmp_path)
    path = tmp_path / "journal.jsonl"
    trials = read_trials(path, problem)
    path.unlink()
    fastest = min(range(TRIALS), key=lambda n: trials[n].measurement.mean_seconds)
    half = trials[fastest].measurement.mean_seconds / 2
    measurement = type(trials[0].measurement)(
        outcome=trials[fastest].measurement.outcome, step_seconds=(half,)
    )
    trials[fastest] = type(trials[0])(
        placement=trials[fastest].placement, measurement=measurement, placer="random"
    )
    with Journal(path, problem) as journal:
        journal.append(trials)
    with pytest.raises(PlacewrightError, match=rf"line {fastest + 1} says .* the simulator says"):
        search(tmp_path, TRIALS + 5)
