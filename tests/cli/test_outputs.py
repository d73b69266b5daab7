"""What commands may write over: nothing that they did not write themselves."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCE = "print('mine')\n"
SIMULATE = ("-c", "k80x2", "--device", "gpu:0")


@pytest.fixture
def result(run: Callable[..., Any], graph_file: Path) -> Path:
    arguments = ("-c", "k80x2", "--trials", "50", "-o", "out", "--no-report")
    assert run("place", graph_file, *arguments).code == 0
    return Path("out")


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def refused(run: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """Runs a command that must say one line and change no file."""

    def call(*arguments: str | Path) -> str:
        before = contents(tmp_path)
        done = run(*arguments)
        assert done.code == 2
        assert done.out == ""
        assert len(done.err.splitlines()) == 1
        assert contents(tmp_path) == before
        return str(done.err)

    return call


def commands(graph: Path) -> dict[str, tuple[str | Path, ...]]:
    """What writes a file, up to its name."""
    return {
        "report": ("report", "out", "--what-if", "0", "-o"),
        "simulate": ("simulate", graph, *SIMULATE, "--trace"),
        "inspect": ("inspect", graph, "--save"),
        "calibrate": ("calibrate", graph, "-c", "cpu2", "-o"),
        "train": ("train", "--models", str(graph), "--clusters", "k80x2", "--trials", "10", "-o"),
    }


NAMES = ["report", "simulate", "inspect", "calibrate", "train"]


@pytest.mark.parametrize("command", NAMES)
def test_what_is_not_of_the_kind_stays(
    refused: Callable[..., str], result: Path, graph_file: Path, command: str
) -> None:
    write = commands(graph_file)[command]
    Path("mine.py").write_text(SOURCE)
    Path("empty").touch()
    Path("broken.gz").write_bytes(b"no gzip")
    Path("page.html").write_text("<!doctype html>\n<html><body>mine</body></html>")
    Path("other.json").write_text('{"traceEvents": []}')
    Path("folder").mkdir()
    for name in ("mine.py", "empty", "broken.gz", "page.html", "other.json", "folder"):
        assert f"{name}: is there already" in refused(*write, name)


@pytest.mark.parametrize("command", NAMES)
def test_the_files_of_a_run_stay(
    refused: Callable[..., str], result: Path, graph_file: Path, command: str
) -> None:
    write = commands(graph_file)[command]
    own = ["placement.json", "summary.json", "trace.json", "problem.json.gz", "journal.jsonl"]
    # Also a name that the run has not used yet.
    for name in (*own, "costs.json"):
        assert "is the name of a file of the run in out" in refused(*write, result / name)


@pytest.mark.parametrize("command", ["report", "simulate"])
def test_a_device_is_no_file(
    refused: Callable[..., str], result: Path, graph_file: Path, command: str
) -> None:
    os.mkfifo("pipe")
    assert "pipe: is there already" in refused(*commands(graph_file)[command], "pipe")
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(
    ("command", "name"),
    [("report", "r.html"), ("simulate", "t.json"), ("simulate", "t.json.gz"),
     ("inspect", "g.json"), ("inspect", "g.json.gz")],
)  # fmt: skip
def test_the_same_is_written_again(
    run: Callable[..., Any], result: Path, graph_file: Path, command: str, name: str
) -> None:
    write = commands(graph_file)[command]
    assert run(*write, name).code == 0
    first = Path(name).stat().st_ino
    assert run(*write, name).code == 0
    assert Path(name).stat().st_ino != first
    if name.endswith(".gz"):
        assert gzip.decompress(Path(name).read_bytes()).startswith(b"{")


def test_kinds_are_not_mixed(
    run: Callable[..., Any], refused: Callable[..., str], result: Path, graph_file: Path
) -> None:
    writing = commands(graph_file)
    for command in ("report", "simulate", "inspect"):
        assert run(*writing[command], f"{command}.out").code == 0
    for command in ("report", "simulate", "inspect"):
        for other in {"report", "simulate", "inspect"} - {command}:
            assert "is there already" in refused(*writing[command], f"{other}.out")


def test_the_page_of_a_run_is_written_by_its_report_alone(
    run: Callable[..., Any], refused: Callable[..., str], result: Path, graph_file: Path
) -> None:
    assert run("report", "out", "--what-if", "0").code == 0
    assert run("report", "out", "--what-if", "0").code == 0
    assert (
        run("report", "out", "--what-if", "0", "-o", Path("out").resolve() / "report.html").code
        == 0
    )
    other = ("-c", "k80x2", "-m", "single", "-o", "two")
    assert run("place", graph_file, *other).code == 0
    assert "of the run in two" in refused("report", "out", "-o", "two/report.html")
    Path("out/report.html").write_text("mine")
    assert "is not a page" in refused("report", "out")


def test_inputs_stay(
    run: Callable[..., Any], refused: Callable[..., str], graph_file: Path
) -> None:
    assert run("inspect", graph_file, "--save", "g.json").code == 0
    assert "is what the command reads" in refused("inspect", "g.json", "--save", "g.json")
    Path("link.json").symlink_to("g.json")
    assert "is what the command reads" in refused("inspect", "link.json", "--save", "g.json")
    assert "is what the command reads" in refused(
        "simulate", "g.json", *SIMULATE, "--trace", "g.json"
    )


def test_costs_and_their_plot_are_two_files(refused: Callable[..., str], graph_file: Path) -> None:
    both = ("-o", "x.html", "--check", "2", "--plot", "./x.html")
    assert "cannot both be written" in refused("calibrate", graph_file, "-c", "cpu2", *both)


def test_a_placed_model_is_a_new_file(refused: Callable[..., str], result: Path) -> None:
    Path("m.pb").write_bytes(b"a model")
    Path("mine.py").write_text(SOURCE)
    placement = result / "placement.json"
    assert "is the name of a file of the run" in refused(
        "apply", "m.pb", placement, "-o", placement
    )
    copied = Path("p.json")
    copied.write_bytes(placement.read_bytes())
    for name in (copied, "mine.py"):
        assert "is there already" in refused("apply", "m.pb", copied, "-o", name)


def test_memory_is_told_as_the_option(refused: Callable[..., str], graph_file: Path) -> None:
    err = refused("place", graph_file, "-c", "k80x2", "--memory", "gpu:0=1Gx")
    assert "--memory gpu:0=1Gx: give bytes" in err
    assert "--memory gpu:0=1e999" in refused(
        "place", graph_file, "-c", "k80x2", "--memory", "gpu:0=1e999"
    )
