from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placewright import _version


def test_a_hand_written_graph(run: Callable[..., Any], graph_file: Path) -> None:
    facts = run("inspect", graph_file, "--json").json
    assert facts["ops"] == 8
    assert facts["edges"] == 8
    assert facts["groups"] == 8
    assert facts["flops"] == 0
    assert facts["param_bytes"] == 0
    assert facts["op_types"] == {"MatMul": 6, "Input": 1, "Add": 1}


def test_the_table_shows_names_as_they_are(run: Callable[..., Any], graph_file: Path) -> None:
    result = run("inspect", graph_file)
    assert result.code == 0
    assert "two branches" in result.out
    assert "join[red]" in result.out
    assert result.err == ""


def test_groups_can_be_chosen(run: Callable[..., Any], graph_file: Path) -> None:
    by_name = run("inspect", graph_file, "--group-by", r"(branch\d)/=\1", "--json").json
    assert by_name["groups"] == 4
    assert {"branch0", "branch1"} <= {entry["name"] for entry in by_name["largest_groups"]}
    assert run("inspect", graph_file, "--groups", "2", "--json").json["groups"] == 2


def test_the_graph_can_be_saved_and_read_again(
    run: Callable[..., Any], graph_file: Path, tmp_path: Path
) -> None:
    first = run("inspect", graph_file, "--save", "copy.json", "--json").json
    second = run("inspect", tmp_path / "copy.json", "--json").json
    assert first == second


def test_a_small_benchmark_model(run: Callable[..., Any]) -> None:
    pytest.importorskip("tensorflow")
    facts = run("inspect", "inception_v3", "--scale", "small", "--json").json
    assert facts["op_types"]["Conv2D"] == 96
    assert facts["groups"] == 73
    # Two slots of RMSProp for every parameter but the moving averages of batch norm.
    assert facts["param_bytes"] < facts["slot_bytes"] < 2 * facts["param_bytes"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such"),
        ("", "the graph file is empty"),
        ("{", "truncated JSON"),
        ('{"ops": [], "edges": []}', "the graph has no ops"),
        ('{"ops": [{"name": "a", "type": "t", "flops": NaN}]}', "must be finite"),
        ('{"ops": [{"name": "a\\u001b[31m", "type": "t"}] * 2}', "malformed JSON"),
    ],
)
def test_bad_files_get_one_line_and_exit_2(
    run: Callable[..., Any], tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "bad.json").write_text(content)
    result = run("inspect", "bad.json")
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("placewright: bad.json: ")
    assert message in result.err


def test_terminal_codes_in_names_do_not_reach_the_terminal(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    name = "a\u001b[31m\u0007\nb"
    (tmp_path / "odd.json").write_text(
        json.dumps({"ops": [{"name": name, "type": "t\u001b]0;x"}], "edges": []})
    )
    result = run("inspect", "odd.json")
    assert result.code == 0
    assert "\u001b" not in result.out
    assert r"a\x1b[31m\x07\nb" in result.out
    (tmp_path / "twice.json").write_text(
        json.dumps({"ops": [{"name": name, "type": "t"}] * 2, "edges": []})
    )
    result = run("inspect", "twice.json")
    assert result.code == 2
    assert "\u001b" not in result.err
    assert len(result.err.splitlines()) == 1


def test_debug_shows_the_traceback(run: Callable[..., Any]) -> None:
    result = run("inspect", "nothing.json", "--debug")
    assert result.code == 2
    assert "Traceback" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "Missing argument 'MODEL'"),
        (["inspect", "graph.json", "--colour"], "No such option"),
        (["inspekt"], "No such command 'inspekt'"),
        (["inspect", "graph.json", "--dim", "x"], "--dim x: expected INPUT=N"),
        (["inspect", "graph.json", "--dim", "x=0"], "'0' is not a positive whole number"),
        (["inspect", "graph.json", "--group-by", "x"], "expected REGEX=LABEL"),
        (["inspect", "graph.json", "--group-by", "(=x"], "is not a regular expression"),
        (["inspect", "graph.json", "--groups", "0"], "cannot make 0 groups"),
        (["inspect", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_usage_gets_one_line(
    run: Callable[..., Any], graph_file: Path, arguments: list[str], message: str
) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert message in result.err


def test_version_and_help(run: Callable[..., Any]) -> None:
    assert run("--version").out == f"placewright {_version.VERSION}\n"
    assert "inspect" in run("--help").out
    for command in ("inspect", "simulate", "place", "compare", "methods"):
        assert "Example: placewright" in run(command, "--help").out
