"""The one command for a machine with a GPU, with parts that need none."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_checks, on_gpu
from benchmarks.common import MORE, read_csv
from benchmarks.on_gpu import PARTS, Part

CODE = {
    "done": "open(folder / 'x.csv', 'a').write('a\\n1\\n2\\n')",
    "broken": "raise SystemExit(7)",
    "more": f"""
path = folder / "calls.txt"
path.write_text((path.read_text() if path.exists() else "") + "x")
raise SystemExit(0 if len(path.read_text()) > 1 else {MORE})
""",
    "hangs": """
import signal, subprocess, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
(folder / "pid.txt").write_text(str(child.pid))
print("it hangs", flush=True)
time.sleep(60)
""",
}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(part: Part, folder: Path, seconds: float, cpu: bool) -> list[str]:
        first = f"import pathlib; folder = pathlib.Path({str(folder)!r})\n"
        return [sys.executable, "-c", first + CODE[part.name]]

    monkeypatch.setattr(Part, "command", command)
    monkeypatch.setattr(on_gpu, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(on_gpu, "LEAST_SECONDS", 0.5)


def outcomes(work: Path) -> list[tuple[str, str]]:
    return [(row["part"], row["outcome"]) for row in read_csv(work / on_gpu.RUNS)]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.usefixtures("fakes")
def test_whatever_breaks_the_others_run_and_what_is_left_goes_on(tmp_path: Path) -> None:
    work, ran = tmp_path / "work", []
    parts = [Part(name, (), 20.0) for name in ("broken", "more", "done")]
    on_gpu.run_parts(
        parts, work, 60.0, cpu=False, where="here", after=lambda part: ran.append(part.name)
    )
    assert outcomes(work) == [
        ("broken", "failed"), ("more", "time was up"), ("done", "finished"), ("more", "finished"),
    ]  # fmt: skip
    assert ran == ["broken", "more", "done", "more"]
    # What is done is not done again; what failed is tried once more.
    on_gpu.run_parts(parts, work, 60.0, cpu=False, where="here")
    assert outcomes(work)[4:] == [("broken", "failed")]
    said = on_gpu.table(parts, work, {"done": ["done/large.bin"]})
    assert "| broken | failed (exit 7) | 2 |" in said
    assert "| 2 | done/large.bin |" in said


@pytest.mark.usefixtures("fakes")
def test_what_is_over_its_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    on_gpu.run_part(Part("hangs", (), 2.0), tmp_path, 1.8, cpu=False, where="here")
    assert outcomes(tmp_path) == [("hangs", "time was up")]
    assert "it hangs" in (tmp_path / "hangs" / "log-1.txt").read_text()
    pid = int((tmp_path / "hangs" / "pid.txt").read_text())
    end = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("fakes")
def test_a_share_that_is_used_up_is_left_to_others(tmp_path: Path) -> None:
    parts = [Part("more", (), 0.0), Part("done", (), 20.0)]
    on_gpu.run_parts(parts, tmp_path, 20.0, cpu=False, where="here")
    # Until there is time that nobody else has a share in.
    assert [name for name, _ in outcomes(tmp_path)] == ["done", "more"]


def test_archives_are_small_and_give_back_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, output = tmp_path / "work", tmp_path / "out"
    search = work / "part" / "case" / "simulate+measure"
    search.mkdir(parents=True)
    (search / "journal.jsonl").write_text("{}\n" * 1000)
    (search / "checkpoint-ppo").write_bytes(b"policy")
    (search / "random.bin").write_bytes(os.urandom(30_000))
    (work / "part" / "x.csv").write_text("a\n1\n")
    monkeypatch.setattr(on_gpu, "LARGEST_BYTES", 20_000)
    left_out = on_gpu.pack(work / "part", output / "part.zip")
    assert left_out == ["part/case/simulate+measure/random.bin"]
    assert (output / "part.zip").stat().st_size <= 20_000
    assert not [path for path in output.iterdir() if path.is_dir()]
    again = tmp_path / "again"
    on_gpu.unpack(output, again)
    assert (again / "part/x.csv").read_text() == "a\n1\n"
    assert (again / "part/case/simulate+measure/checkpoint-ppo").read_bytes() == b"policy"
    # What is there stays, and a policy of a search that is over is not taken along.
    (again / "part/x.csv").write_text("a\n2\n")
    on_gpu.unpack(output, again)
    assert (again / "part/x.csv").read_text() == "a\n2\n"
    (search / "found.json").write_text("{}")
    on_gpu.pack(work / "part", output / "part.zip")
    with zipfile.ZipFile(output / "part.zip") as archive:
        assert "part/case/simulate+measure/checkpoint-ppo" not in archive.namelist()
        assert "part/case/simulate+measure/found.json" in archive.namelist()


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    for name in ("../x.csv", "/x.csv", "other/x.csv"):
        with zipfile.ZipFile(tmp_path / "part.zip", "w") as archive:
            archive.writestr(name, "x")
        with pytest.raises(SystemExit, match=r"is no file of part"):
            on_gpu.unpack(tmp_path, tmp_path / "work")


def test_tables_are_kept_and_journals_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "part"
    folder.mkdir(parents=True)
    for name in ("x.csv", "README.md", "log-1.txt", "cpu_only.json"):
        (folder / name).write_text("x")
    (folder / "large.csv").write_bytes(b"x" * (on_gpu.KEPT_BYTES + 1))
    kept = on_gpu.keep([Part("part", (), 1.0)], tmp_path / "work", tmp_path / "results")
    assert sorted(path.name for path in kept) == ["README.md", "x.csv"]
    assert (tmp_path / "results" / "part" / "x.csv").read_text() == "x"


def test_a_fresh_machine_goes_on_with_the_runs_that_are_kept(tmp_path: Path) -> None:
    part, work, results = Part("part", (), 1.0), tmp_path / "work", tmp_path / "results"
    raw = work / "part" / "raw"
    raw.mkdir(parents=True)
    (raw / "a.json.gz").write_bytes(b"runs")
    on_gpu.keep([part], work, results)
    on_gpu.go_on([part], tmp_path / "fresh", results)
    again = tmp_path / "fresh" / "part" / "raw" / "a.json.gz"
    assert again.read_bytes() == b"runs"
    again.write_bytes(b"more")
    on_gpu.go_on([part], tmp_path / "fresh", results)
    assert again.read_bytes() == b"more"


def test_every_part_knows_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is wrong with them would be found out on a machine that costs money."""
    import argparse
    import importlib

    class Parsed(Exception):
        """The arguments are right."""

    real = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, arguments: object = None) -> object:
        real(parser, arguments)  # type: ignore[call-overload]
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for part in PARTS:
        module = importlib.import_module(f"benchmarks.{part.name}")
        for cpu in (False, True):
            if cpu and part.on_cpu is None:
                continue
            command = part.command(tmp_path, 100.0, cpu)
            assert command[1:3] == ["-m", f"benchmarks.{part.name}"]
            monkeypatch.setattr(sys, "argv", command[2:])
            with pytest.raises(Parsed):
                module.main()
        if part.afterwards:
            monkeypatch.setattr(sys, "argv", ["x", "--output", str(tmp_path), *part.afterwards])
            with pytest.raises(Parsed):
                module.main()


# --- the checks ----------------------------------------------------------------------------------

LOG = """\
collecting ... collected 5 items

tests/gpu/test_x.py::test_a[one] PASSED                                 [ 20%]
tests/gpu/test_x.py::test_b FAILED                                      [ 40%]
tests/gpu/test_x.py::test_c SKIPPED (no)                                [ 60%]
tests/gpu/test_x.py::test_d PASSED                                      [ 80%]
tests/gpu/test_x.py::test_d ERROR                                       [ 80%]
[gw1] [ 90%] PASSED tests/gpu/test_x.py::test_f[two] 
tests/gpu/test_x.py::test_e Fatal Python error: Aborted
FAILED tests/gpu/test_x.py::test_b - assert False
"""


@pytest.mark.parametrize("ended", [True, False])
def test_what_pytest_says_of_each_test(ended: bool) -> None:
    found = gpu_checks.outcomes(LOG, ended=ended)
    short = {name.partition("::test_")[2]: outcome for name, outcome in found.items()}
    assert short == {
        "a[one]": "passed", "b": "failed", "c": "skipped", "d": "failed",
        "f[two]": "passed",
        # A test that takes the process with it has failed; one that was cut short was not run.
        **({"e": "failed"} if ended else {}),
    }  # fmt: skip


CHECKS = """
import pathlib, pytest
pytestmark = pytest.mark.gpu
HERE = pathlib.Path(__file__).parent

def test_passes():
    with (HERE / "runs.txt").open("a") as file:
        file.write("x")

def test_fails_at_first():
    again = (HERE / "again.txt").exists()
    (HERE / "again.txt").touch()
    assert again
"""


def test_checks_that_passed_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "test_x.py").write_text(CHECKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    monkeypatch.setattr(gpu_checks, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts in a tenth of the time

    def check() -> int:
        output = tmp_path / "out"
        return gpu_checks.check(["tests/gpu"], output, 60.0, "a GPU", time.monotonic())

    assert check() == 1
    assert "| `test_x` | 1 | 1 | 0 | 0 |" in capsys.readouterr().out
    assert check() == 0
    assert "| `test_x` | 2 | 0 | 0 | 0 |" in (tmp_path / "out" / "README.md").read_text()
    assert (folder / "runs.txt").read_text() == "x"
    # Other code has to show it anew.
    (folder / "test_x.py").write_text(CHECKS + "\n")
    assert check() == 0
    assert (folder / "runs.txt").read_text() == "xx"
    rows = read_csv(tmp_path / "out" / "checks.csv")
    assert {row["hardware"] for row in rows} == {"a GPU"}
