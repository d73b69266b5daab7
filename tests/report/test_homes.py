"""What explain says of weights that have homes of their own."""

from __future__ import annotations

from pathlib import Path

from placewright import (
    Cluster,
    Edge,
    Graph,
    Op,
    Placement,
    Tensor,
    Workload,
    make_problem,
    place,
    place_workload,
)  # fmt: skip
from placewright.cluster import from_document
from placewright.problem import Problem, ProblemConfig
from placewright.report import explain, explain_workload, read_run, write_report
from placewright.report.homes import home_lines, ranges
from placewright.simulator import Simulator

MB = 10**6


def cluster(memory: int = 600 * MB) -> Cluster:
    document = {
        "name": "small",
        "devices": [
            {"name": "cpu:0", "kind": "server-cpu-16", "memory": "64 GB", "pinned": "1 GB"},
            {"name": "gpu:0", "kind": "a100-40gb", "memory": memory},
        ],
        "links": [
            {"name": "pcie", "latency": 0.0, "bandwidth": "50 GB/s", "pairs": [["cpu:0", "gpu:0"]]}
        ],
        "issue": "none",
    }
    return from_document(document, where="test")


def posed() -> Problem:
    ops, edges = [], []
    for i in range(8):
        ops.append(Op(name=f"layers/{i}/weight", type="parameter", outputs=(Tensor(100 * MB),),
                      param_bytes=100 * MB))  # fmt: skip
        ops.append(Op(name=f"layers/{i}/mm", type="mm", outputs=(Tensor(8192),),
                      seconds={"gpu": 0.0002, "cpu": 0.002}))  # fmt: skip
        edges.append(Edge(f"layers/{i}/weight", f"layers/{i}/mm"))
        if i:
            edges.append(Edge(f"layers/{i - 1}/mm", f"layers/{i}/mm"))
    graph = Graph.from_ops("eight layers", ops, edges, [(r"layers/(\d+)", r"layers/\1")])
    return make_problem(graph, cluster())


def lines_of(how: str) -> list[str]:
    """`rrss..`: of each layer, whether it is resident, streamed, or computed by the host."""
    problem = posed()
    numbers = {name: g for g, name in enumerate(problem.grouping.names)}
    devices = [0] * problem.num_groups
    for i, letter in enumerate(how):
        devices[numbers[f"layers/{i}"]] = int(letter != "h")
        devices[numbers[f"layers/{i}/weights"]] = int(letter == "r")
    return home_lines(Simulator(problem).timeline(Placement.of(problem, devices)))


def test_ranges_of_names() -> None:
    assert ranges(["l/0", "l/1", "l/2", "head"]) == "l/0-2; head"
    assert ranges(["l/7/mlp", "l/3/mlp", "l/4/mlp"]) == "l/{3-4, 7}/mlp"
    assert ranges([f"{c}" for c in "abcdefgh"]) == "a; b; c; d; e; 3 others"


def test_a_mix_says_what_goes_where_and_why() -> None:
    lines = lines_of("rrrrshsh")
    assert lines[0] == ("In the memory of gpu:0, which computes with them: layers/0-3 (400 MB).")
    assert lines[1].startswith(
        "Travel from cpu:0 to gpu:0 in each step: layers/4, 6 (200 MB, 4.00 ms"
    )
    assert lines[1].endswith("at most 150 MB are on the way or in use).")
    assert lines[2] == (
        "Computed by cpu:0, in whose memory the weights are: layers/5, 7 (200 MB, 4.00 ms of "
        "computing)."
    )
    assert lines[3] == "Why not all on gpu:0: the weights take 800 MB, there is 600 MB."
    assert "all of it travelling would take" in lines[4]
    assert "all of it computed by the host would take 8.80 ms" in lines[4]
    assert lines[4].endswith("The link and the host work side by side.")
    assert lines[5] == "cpu:0 pins 200 MB for what travels, of 1 GB that it can."
    assert lines[6].startswith("Every byte is in the memory of who computes with it, or travels: ")


def test_pure_plans_do_not_speak_of_a_mix() -> None:
    assert "side by side" not in " ".join(lines_of("rrrrssss"))
    assert not [line for line in lines_of("rrrrhhhh") if line.startswith("Travel")]
    assert lines_of("rrrrrrrr")[-1] == "All weights are where they are read: nothing travels."


def test_a_workload_in_words() -> None:
    work = Workload.of({"decode": (posed(), 10.0), "prompt": (posed(), 1.0)})
    result = place_workload(work, seconds=None, trials=100)
    first, *parts = explain_workload(result)
    assert first.lines[0].startswith("All parts together take ")
    assert first.lines[1].endswith("ms, 10 times.")
    assert [section.title for section in parts] == ["decode", "prompt"]
    assert all("gpu:0" in section.lines[0] for section in parts)


def test_a_run_is_explained_and_reported(tmp_path: Path) -> None:
    problem = posed()
    place(problem, method="heft,local-search", trials=300, directory=tmp_path / "run")
    run = read_run(tmp_path / "run")
    (section,) = [s for s in explain(run) if s.title == "Where the weights live"]
    assert any(line.startswith("Travel from cpu:0") for line in section.lines)
    write_report([str(tmp_path / "run")], tmp_path / "page.html")
    assert "Where the weights live" in (tmp_path / "page.html").read_text("utf-8")
    tied = make_problem(problem.graph, cluster(10**9), ProblemConfig(homes=False))
    place(tied, method="single", trials=5, directory=tmp_path / "tied")
    assert "Where the weights live" not in [s.title for s in explain(read_run(tmp_path / "tied"))]
