from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_one_device(run: Callable[..., Any], graph_file: Path) -> None:
    facts = run("simulate", graph_file, "-c", "k80x2", "--device", "gpu:0", "--json").json
    # Six products of 10 ms and the join of 1 ms; the input starts no kernel and costs nothing.
    assert facts["step_seconds"] == pytest.approx(0.061)
    assert facts["transfers"] == 0
    assert facts["devices"][1]["busy_seconds"] == pytest.approx(0.061)
    assert facts["costs"]["tesla-k80"] == {"roofline estimate": 1, "measured (graph file)": 7}
    assert facts["lower_bound_seconds"] <= facts["step_seconds"]


def test_a_placement_file_and_its_trace(run: Callable[..., Any], graph_file: Path) -> None:
    names = [f"branch{b}/op{i}" for b in (0, 1) for i in range(3)]
    groups = {name: f"gpu:{name[6]}" for name in names} | {"in": "gpu:0", "join[red]": "gpu:0"}
    document = {"format": "placewright-placement/1", "groups": groups}
    Path("p.json").write_text(json.dumps(document))
    result = run(
        "simulate", graph_file, "-c", "k80x2", "--placement", "p.json", "--trace", "t.json"
    )
    assert result.code == 0
    assert "31." in result.out  # two transfers of 40 us beside 31 ms of computing
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert any("branch1/op2" in str(event.get("name")) for event in events)


def test_out_of_memory_names_device_and_tensors(run: Callable[..., Any]) -> None:
    graph = {
        "ops": [
            {"name": "big", "type": "Fill", "outputs": [{"bytes": 20_000_000_000}]},
            {"name": "end", "type": "Sum"},
        ],
        "edges": [{"from": "big", "to": "end"}],
    }
    Path("big.json").write_text(json.dumps(graph))
    result = run("simulate", "big.json", "-c", "k80x2", "--device", "gpu:0")
    assert result.code == 1
    assert "out of memory" in result.out
    for part in ("gpu:0", "20", "12", "big"):
        assert part in result.out


def test_an_op_without_kernel_fails(run: Callable[..., Any]) -> None:
    graph = {"ops": [{"name": "text", "type": "StringJoin", "kernels": ["cpu"]}], "edges": []}
    Path("text.json").write_text(json.dumps(graph))
    result = run("simulate", "text.json", "-c", "k80x2", "--device", "gpu:0")
    assert result.code == 1
    assert "failed" in result.out
    assert "text" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --placement FILE or --device NAME"),
        (["--device", "gpu:7"], "has no device 'gpu:7'"),
        (["--device", "gpu:0", "-c", "k81"], "unknown cluster 'k81'"),
        (["--placement", "none.json"], "no such placement file"),
        (["--device", "gpu:0", "--trace", "no/such/folder.json"], "cannot be written"),
        (["--device", "gpu:0", "--costs", "none.json"], "no such costs file"),
    ],
)
def test_bad_input(
    run: Callable[..., Any], graph_file: Path, arguments: list[str], message: str
) -> None:
    result = run("simulate", graph_file, "-c", "k80x2", *arguments)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert message in result.err


def test_a_placement_of_another_model(run: Callable[..., Any], graph_file: Path) -> None:
    Path("p.json").write_text(
        json.dumps({"format": "placewright-placement/1", "groups": {"a": "gpu:0"}})
    )
    result = run("simulate", graph_file, "-c", "k80x2", "--placement", "p.json")
    assert result.code == 2
    assert "placement covers 1 groups, the problem has 8" in result.err
