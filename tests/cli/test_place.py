from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import placewright
from placewright.learning.config import LearnerConfig
from placewright.testing import layered_graph

FILES = {
    "journal.jsonl", "placement.json", "problem.json.gz", "report.html", "run.json",
    "summary.json",
    "trace.json",
}  # fmt: skip


def test_the_main_job(run: Callable[..., Any], graph_file: Path) -> None:
    result = run("place", graph_file, "-c", "k80x2", "--trials", "3000", "-o", "out")
    assert result.code == 0
    # A learned method leaves its checkpoint and metrics there, too.
    assert {path.name for path in Path("out").iterdir()} >= FILES
    summary = json.loads(Path("out/summary.json").read_text())
    # The branches run side by side: half of six products, the join, little else.
    assert summary["step_seconds"] == pytest.approx(0.0311, rel=0.02)
    assert summary["speed_up_over_single"] == pytest.approx(1.96, rel=0.02)
    assert summary["lower_bound_seconds"] <= summary["step_seconds"]
    assert "times as fast as the best single device" in result.out
    assert "out/placement.json" in result.out
    placed = json.loads(Path("out/placement.json").read_text())["groups"]
    assert {placed["branch0/op1"], placed["branch1/op1"]} == {"gpu:0", "gpu:1"}
    again = run(
        "simulate", graph_file, "-c", "k80x2", "--placement", "out/placement.json", "--json"
    )
    assert again.json["step_seconds"] == summary["step_seconds"]


def test_one_device_is_said_plainly(run: Callable[..., Any]) -> None:
    ops = [
        {
            "name": f"op{i}",
            "type": "t",
            "seconds": {"gpu": 1e-3, "cpu": 1.0},
            "outputs": [{"bytes": 10_000_000}],
        }
        for i in range(4)
    ]
    edges = [{"from": f"op{i}", "to": f"op{i + 1}"} for i in range(3)]
    Path("chain.json").write_text(json.dumps({"ops": ops, "edges": edges}))
    result = run("place", "chain.json", "-c", "k80x2", "--trials", "500", "-o", "out")
    assert result.code == 0
    assert "one device is already best" in result.out


def test_the_same_seed_gives_the_same_result(run: Callable[..., Any]) -> None:
    graph_file = Path("layered.json")
    layered_graph(30, 5).save(graph_file)
    journals = []
    for name in ("a", "b"):
        run("place", graph_file, "-c", "k80x2", "--trials", "400", "-o", name, "--seed", "3")
        lines = Path(name, "journal.jsonl").read_text().splitlines()
        journals.append([json.loads(line) | {"at_seconds": 0, "sum": ""} for line in lines])
    assert len(journals[0]) == 400
    assert journals[0] == journals[1]


def test_resume_continues_the_journal(run: Callable[..., Any], graph_file: Path) -> None:
    arguments = ("place", graph_file, "-c", "k80x4", "-m", "random")
    run(*arguments, "--trials", "100", "-o", "out")
    first = Path("out/journal.jsonl").read_bytes()
    result = run(*arguments, "--trials", "250", "--resume", "out")
    assert result.code == 0
    second = Path("out/journal.jsonl").read_bytes()
    assert second.startswith(first)
    assert len(second.splitlines()) == 250


def test_a_directory_with_a_run_is_not_overwritten(
    run: Callable[..., Any], graph_file: Path
) -> None:
    run("place", graph_file, "-c", "k80x2", "-m", "single", "-o", "out")
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    result = run("place", graph_file, "-c", "k80x2", "-m", "single", "-o", "out")
    assert result.code == 2
    assert "already holds a run" in result.err
    other = run("place", graph_file, "-c", "k80x4", "-m", "single", "--resume", "out")
    assert other.code == 2
    assert json.loads(before["summary.json"])["problem"] in other.err
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before


def test_without_output_a_new_directory_each_time(
    run: Callable[..., Any], graph_file: Path
) -> None:
    for expected in ("placewright-graph-k80x2", "placewright-graph-k80x2-2"):
        run("place", graph_file, "-c", "k80x2", "-m", "single")
        assert Path(expected, "placement.json").is_file()


def test_pins_and_forbidden_devices(run: Callable[..., Any], graph_file: Path) -> None:
    run(
        "place", graph_file, "-c", "k80x2", "--trials", "800", "-o", "out",
        "--pin", "branch0/op1=cpu:0", "--forbid", "gpu:1", "--together", "op[02]",
    )  # fmt: skip
    placed = json.loads(Path("out/placement.json").read_text())["groups"]
    assert placed["branch0/op1"] == "cpu:0"
    assert "gpu:1" not in placed.values()
    assert "op[02]" in placed


def test_no_placement_fits_although_the_total_would(run: Callable[..., Any]) -> None:
    ops = [{"name": f"v{i}", "type": "Variable", "param_bytes": 7 * 10**9} for i in range(3)]
    Path("three.json").write_text(json.dumps({"ops": ops, "edges": []}))
    gpus = "devices: [{name: a, kind: tesla-k80}, {name: b, kind: tesla-k80}]\n"
    link = "links: [{name: l, latency: 1us, bandwidth: 1 GB/s, pairs: [[a, b]]}]"
    Path("two.yaml").write_text(gpus + link)
    result = run("place", "three.json", "-c", "two.yaml", "--trials", "200", "-o", "out")
    assert result.code in (1, 2)
    assert "Traceback" not in result.err
    if result.code == 1:
        assert "no placement found" in result.out
        assert json.loads(Path("out/summary.json").read_text())["step_seconds"] is None
        assert not Path("out/placement.json").exists()
    # The learned methods would propose the eight placements there are again and again, for long.
    quick = "single,random,expert,scotch,mincut,heft,m-topo,m-etf,m-sct,local-search,exact"
    compared = run(
        "compare", "three.json", "-c", "two.yaml", "--trials", "50", "--json", "--methods", quick
    )
    assert compared.code in (0, 2)


def test_exact_says_why_it_has_nothing(run: Callable[..., Any]) -> None:
    ops = [{"name": f"op{i}", "type": "t"} for i in range(400)]
    Path("large.json").write_text(json.dumps({"ops": ops, "edges": []}))
    result = run("place", "large.json", "-c", "k80x2", "-m", "exact", "-o", "out")
    assert result.code == 1
    assert "the graph has 400 ops" in result.out


def test_a_trial_budget_reaches_every_method(run: Callable[..., Any]) -> None:
    graph_file = Path("layered.json")
    layered_graph(30, 5).save(graph_file)
    result = run("place", graph_file, "-c", "k80x2", "--trials", "500", "-o", "out", "--json")
    trials = {row["method"]: row["trials"] for row in result.json["methods"]}
    assert trials["local-search"] > 100


def test_resuming_a_long_random_run_goes_on(run: Callable[..., Any], graph_file: Path) -> None:
    arguments = ("place", graph_file, "-c", "k80x4", "-m", "random")
    run(*arguments, "--trials", "7000", "-o", "out")
    run(*arguments, "--trials", "7500", "--resume", "out")
    assert len(Path("out/journal.jsonl").read_bytes().splitlines()) == 7500


def test_a_model_no_device_can_hold(run: Callable[..., Any]) -> None:
    op = {"name": "v", "type": "Variable", "param_bytes": 10**15}
    Path("huge.json").write_text(json.dumps({"ops": [op], "edges": []}))
    result = run("place", "huge.json", "-c", "k80x2", "-o", "out")
    assert result.code == 2
    assert "1 PB" in result.err
    assert "12 GB" in result.err or "152 GB" in result.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0s"], "a budget of 0 seconds leaves no time"),
        (["--trials", "0"], "a budget of 0 trials"),
        (["--budget", "soon"], "'soon' is not a time such as"),
        (["-m", "scoth"], "unknown method 'scoth'; did you mean scotch?"),
        (["-m", ""], "unknown method ''"),
        (["--resume", "nowhere"], "holds no run to continue"),
        (["--pin", "branch"], "expected REGEX=DEVICE"),
        (["--pin", "branch=gpu:9"], "has no device 'gpu:9'"),
        (["--pin", "zebra=gpu:0"], "contains 'zebra'"),
        (["-o", "graph.json"], "graph.json: not a directory"),
        (["-o", ""], "not a directory"),
        (["--seed", "-1"], "the seed must be from 0"),
        (["--group-by", "zebra=x"], "contains 'zebra'"),
        (["--costs", "none.json"], "no such costs file"),
        (["-c", "nope"], "unknown cluster 'nope'"),
    ],
)
def test_bad_input(
    run: Callable[..., Any], graph_file: Path, arguments: list[str], message: str
) -> None:
    result = run("place", graph_file, "-c", "k80x2", "--trials", "50", *arguments)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert message in result.err
    assert {path.name for path in Path().iterdir()} <= {"graph.json"}


def test_a_full_disk_is_one_line_and_keeps_what_was_tried(graph_file: Path, tmp_path: Path) -> None:
    # No file may grow beyond this: to the process it is a disk that is full.
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000,) * 2); "
        "from placewright.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", limited, "place", str(graph_file), "-c", "k80x4", "-m", "random",
         "--trials", "100000", "-o", "out"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "journal.jsonl: cannot be written: File too large" in result.stderr
    lines = (tmp_path / "out" / "journal.jsonl").read_bytes().splitlines()
    assert len(lines) > 1000
    for line in lines[:-1]:
        json.loads(line)


def test_a_read_only_directory(run: Callable[..., Any], graph_file: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    Path("out").mkdir(mode=0o555)
    result = run("place", graph_file, "-c", "k80x2", "-o", "out")
    assert result.code == 2
    assert "not writable" in result.err


def test_interrupt_keeps_the_best_so_far(graph_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from placewright.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "place", graph_file, "-c", "k80x4", "-m", "random", "-b", "9m", "-o", "out"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    journal = tmp_path / "out" / "journal.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    # A busy machine has no time to draw anything then.
    drawn = {"report.html", "trace.json"}
    assert {path.name for path in journal.parent.iterdir()} >= FILES - drawn
    assert json.loads((journal.parent / "summary.json").read_text())["interrupted"] is True


def test_interrupted_before_anything_was_tried(
    run: Callable[..., Any], graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def at_once() -> Iterator[list[int]]:
        yield [signal.SIGINT]

    with monkeypatch.context() as interrupted:
        interrupted.setattr("placewright.cli.place.stop_on_interrupt", at_once)
        result = run("place", graph_file, "-c", "k80x4", "-o", "out")
    assert result.code == 130
    said = " ".join(result.out.split())
    if not Path("out").exists():  # on a slow machine: there is nothing to go on from
        assert said == "stopped before anything was tried"
        return
    assert said == (
        "stopped before anything was tried; the same command with --resume out instead of -o "
        "goes on"
    )
    assert run("place", graph_file, "-c", "k80x4", "--resume", "out", "--trials", "20").code == 0


def test_compare_gives_one_row_a_method(run: Callable[..., Any], graph_file: Path) -> None:
    result = run(
        "compare", graph_file, "-c", "k80x2", "--methods", "single,expert,auto", "--trials", "300",
        "--json",
    )  # fmt: skip
    rows = {row["method"]: row for row in result.json["methods"]}
    assert list(rows) == ["single", "expert", "auto"]
    assert {"step_seconds", "outcome", "peak_bytes", "trials", "search_seconds"} <= set(
        rows["auto"]
    )
    assert rows["auto"]["step_seconds"] <= min(r["step_seconds"] for r in rows.values())
    assert result.json["lower_bound_seconds"] <= rows["auto"]["step_seconds"]
    table = run("compare", graph_file, "-c", "k80x2", "--methods", "single,m-etf")
    assert table.code == 0
    assert "m-etf" in table.out


def test_methods_are_listed(run: Callable[..., Any]) -> None:
    names = [entry["name"] for entry in run("methods", "--json").json]
    for name in ("auto", "single", "random", "expert", "scotch", "mincut", "heft", "m-topo",
                 "m-etf", "m-sct", "local-search", "exact"):  # fmt: skip
        assert name in names
    assert "scotch" in run("methods").out


@pytest.mark.parametrize("method", ["auto", "heft,local-search", "ppo"])
def test_python_writes_the_same_journal(
    run: Callable[..., Any], graph_file: Path, method: str
) -> None:
    """The command and `placewright.place` with equal settings are one and the same search."""
    # So many ops that `exact` leaves them alone: no optimum is proven, and none is sought for long.
    layered_graph(160, 8).save(graph_file)
    learner = {"ppo": LearnerConfig(samples=8)} if method == "ppo" else None
    options = ["--learner", "samples=8"] if learner else []
    result = run(
        "place", graph_file, "-c", "k80x2", "-m", method, "--trials", "80", "--seed", "5",
        *options, "-o", "out",
    )  # fmt: skip
    assert result.code == 0, result.err
    placewright.place(
        graph_file, "k80x2", method=method, trials=80, seed=5, learner=learner, directory="again"
    )
    journals = []
    for folder in ("out", "again"):
        lines = Path(folder, "journal.jsonl").read_text().splitlines()
        journals.append([json.loads(line) | {"at_seconds": 0, "sum": ""} for line in lines])
    assert journals[0] == journals[1]
    assert len(journals[0]) > 50
    assert json.loads(Path("out/run.json").read_text()) == json.loads(
        Path("again/run.json").read_text()
    )
