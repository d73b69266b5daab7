from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placewright.cli import app


@pytest.fixture
def result(run: Callable[..., Any], graph_file: Path) -> Path:
    arguments = ("-c", "k80x2", "--trials", "100", "-o", "out", "--no-report")
    assert run("place", graph_file, *arguments).code == 0
    assert not Path("out/report.html").exists()
    return Path("out")


def test_report_and_explain(run: Callable[..., Any], result: Path) -> None:
    written = run("report", result, "--what-if", "0")
    assert written.code == 0
    assert written.out == "the report is in out/report.html\n"
    assert Path("out/report.html").stat().st_size < 6_000_000
    as_json = run("report", result, "-o", "r.html", "--what-if", "100ms", "--json").json
    assert as_json == {"report": "r.html", "bytes": Path("r.html").stat().st_size}
    words = run("explain", result)
    assert words.code == 0
    assert "Where the groups sit" in words.out
    assert run("explain", result, "--json").json["The answer"][0] in words.out


def test_place_says_where_the_report_is(run: Callable[..., Any], graph_file: Path) -> None:
    placed = run("place", graph_file, "-c", "k80x2", "-m", "single,expert", "-o", "out")
    assert placed.out.splitlines()[-1] == "the report is in out/report.html"
    assert "application/json" in Path("out/report.html").read_text()


def test_place_without_plotly_goes_without_a_report(
    run: Callable[..., Any], graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from placewright.report import page

    page._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    placed = run("place", graph_file, "-c", "k80x2", "-m", "single", "-o", "out")
    assert placed.code == 0
    assert "no report: the report needs the optional dependency 'report'" in placed.out


def test_bad_directories_get_one_line(run: Callable[..., Any], tmp_path: Path) -> None:
    for command in ("report", "explain"):
        wrong = run(command, "nowhere")
        assert wrong.code == 2
        assert wrong.err == "placewright: nowhere: no such directory\n"
    wrong = run("report", tmp_path, "--what-if", "soon")
    assert wrong.code == 2
    assert "'soon' is not a time" in wrong.err


# --- every command -------------------------------------------------------------------------------

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands
            if command.callback is not None]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_json(run: Callable[..., Any], command: str) -> None:
    text = run(command, "--help").out
    assert f"Example: placewright {command}" in text
    assert "--json" in text


def test_quiet_and_verbose(run: Callable[..., Any], result: Path) -> None:
    assert run("explain", result, "-q").err == ""
    assert run("explain", result).err == ""
    assert "reading the run" in run("-v", "explain", result).err
    assert "reading the run" in run("explain", "--verbose", result).err


def _on_a_terminal(arguments: list[str], **environment: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **environment}
    settings.pop("NO_COLOR", None) if "NO_COLOR" not in environment else None
    process = subprocess.Popen(
        [sys.executable, "-c", "from placewright.cli import main; main()", *arguments],
        stdout=theirs,
        stderr=theirs,
        env=settings,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    process.wait()
    os.close(ours)
    return written.decode()


def test_colours_are_for_terminals_that_want_them(run: Callable[..., Any], result: Path) -> None:
    assert "\x1b[1m" in _on_a_terminal(["explain", str(result)])
    assert "\x1b[31m" not in _on_a_terminal(["methods"], NO_COLOR="1")
    piped = run("explain", result)
    assert "\x1b" not in piped.out + piped.err


def _complete(line: str) -> set[str]:
    """What bash would offer at the end of a line."""
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'placewright';"
         "from placewright.cli import main; main()"],
        env={**os.environ, "_PLACEWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": line,
             "COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    return set(done.stdout.split())


def test_shell_completion() -> None:
    assert {"place", "report", "explain", "apply"} <= _complete("placewright ")
    assert _complete("placewright repo") == {"report"}
    assert "--what-if" in _complete("placewright report --w")
    assert {"k80x2", "k80x4"} <= _complete("placewright place nmt --cluster k80")
    assert "inception_v3" in _complete("placewright place incep")
    assert "local-search" in _complete("placewright place nmt --method local")


def test_json_of_a_failed_explanation(run: Callable[..., Any], result: Path) -> None:
    summary = json.loads((result / "summary.json").read_text())
    del summary["methods"]
    (result / "summary.json").write_text(json.dumps(summary))
    wrong = run("explain", result, "--json")
    assert (wrong.code, wrong.out) == (2, "")
