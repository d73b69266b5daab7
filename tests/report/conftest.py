from __future__ import annotations

import json
from pathlib import Path

import pytest

from placewright import (
    Cluster,
    Edge,
    Graph,
    Op,
    Outcome,
    Placement,
    Problem,
    ProblemConfig,
    SimulatedEvaluator,
    Tensor,
    Trial,
    make_problem,
    place,
)  # fmt: skip
from placewright.journal import Journal

EVIL = '</script><script>document.title="stolen"</script><img src=x onerror=alert(1)>'
"""A name that becomes part of a page if it is not escaped."""


def branches(name: str = "two branches", evil: bool = True) -> Graph:
    """Two chains side by side between a source and a join."""
    ops = [Op(name="in", type="Input", outputs=(Tensor(1000),))]
    edges = []
    for b in (0, 1):
        before = "in"
        for i in range(3):
            op = f"branch{b}/{EVIL}{i}" if evil and b and i else f"branch{b}/op{i}"
            ops.append(
                Op(
                    name=op,
                    type="MatMul",
                    outputs=(Tensor(2_000_000),),
                    param_bytes=500_000_000,
                    seconds={"gpu": 0.01, "cpu": 0.1},
                )
            )
            edges.append(Edge(before, op))
            before = op
        edges.append(Edge(before, "join"))
    ops.append(Op(name="join", type="Add", seconds={"gpu": 0.001, "cpu": 0.001}))
    return Graph.from_ops(name, ops, edges)


@pytest.fixture(scope="session")
def problem() -> Problem:
    return make_problem(branches(), Cluster.load("k80x2"))


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory, problem: Problem) -> Path:
    """A run of several methods, with what a learned placer would record."""
    folder = tmp_path_factory.mktemp("report") / "result"
    place(problem, method="single,expert,heft,random,local-search", trials=300, directory=folder)
    lines = [
        {
            "update": update, "trials": 10 * update, "seconds": 0.1 * update, "placer": "ppo",
            "reward_mean": 1 / update, "step_seconds_mean": 0.1, "step_seconds_best": 0.1,
            "entropy": 2 / update, "gradient_norm": 1.0, "baseline": 1.0, "failure_share": 0.1,
        }
        for update in range(1, 20)
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"update": 20, "torn')
    return folder


@pytest.fixture(scope="session")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed after it had tried one placement: two variables, each as large as a device can
    hold, on one device."""
    ops = [
        Op(name=f"weights{i}", type="Var", param_bytes=9 * 10**9, outputs=(Tensor(10),))
        for i in (0, 1)
    ]
    ops.append(Op(name="sum", type="Add", outputs=(Tensor(8),)))
    graph = Graph.from_ops("too large", ops, [Edge("weights0", "sum"), Edge("weights1", "sum")])
    problem = make_problem(graph, Cluster.load("k80x2"), ProblemConfig(groups=3))
    placement = Placement.of(problem, [1] * problem.num_groups)
    (measurement,) = SimulatedEvaluator(problem).evaluate([placement])
    assert measurement.outcome is Outcome.OUT_OF_MEMORY
    folder = tmp_path_factory.mktemp("report") / "failed"
    folder.mkdir()
    problem.save(folder / "problem.json.gz")
    with Journal(folder / "journal.jsonl", problem) as journal:
        journal.append([Trial(placement=placement, measurement=measurement, placer="mine")])
    return folder
