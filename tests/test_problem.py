from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placewright.cluster import Cluster
from placewright.errors import ClusterError, CostsError, PlacementError, PlacewrightError
from placewright.graph import Edge, Graph, Op, Tensor, frozen
from placewright.grouping import each_op
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Constraints, Problem, make_problem
from tests.strategies import graphs


def model(n: int = 4, cpu_only: str = "") -> Graph:
    ops = [
        Op(
            name=f"op{i}",
            type="t",
            outputs=(Tensor(8),),
            flops=1e9,
            kernels=("cpu",) if f"op{i}" == cpu_only else None,
        )
        for i in range(n)
    ]
    return Graph.from_ops("m", ops, [Edge(f"op{i}", f"op{i + 1}") for i in range(n - 1)])


def problem(**options: object) -> Problem:
    graph = model()
    made = make_problem(graph, Cluster.load("k80x2"), **options)  # type: ignore[arg-type]
    return Problem(
        graph=graph,
        grouping=each_op(graph),
        cluster=made.cluster,
        costs=made.costs,
    )


def test_the_fingerprint_covers_all_parts() -> None:
    graph = model()
    cluster = Cluster.load("k80x2")
    seen = {
        make_problem(graph, cluster).fingerprint,
        make_problem(model(5), cluster).fingerprint,
        make_problem(graph, Cluster.load("k80x4")).fingerprint,
        make_problem(graph, cluster, target_groups=1).fingerprint,
        make_problem(
            graph, cluster, constraints=Constraints(forbidden_devices=("gpu:1",))
        ).fingerprint,
    }
    assert len(seen) == 5
    assert make_problem(model(), Cluster.load("k80x2")).fingerprint in seen


def test_a_space_is_all_but_the_costs() -> None:
    made = problem()
    dearer = replace(made.costs, op_seconds=frozen(2 * made.costs.op_seconds))
    faster = replace(
        made.cluster, links=tuple(replace(link, bandwidth=1e12) for link in made.cluster.links)
    )
    other = replace(made, costs=dearer, cluster=faster)
    assert other.fingerprint != made.fingerprint
    assert other.space == made.space
    placement = Placement.of(made, [0, 1, 2, 1])
    assert placement == Placement.of(other, [0, 1, 2, 1]) == Placement.of(made.space, [0, 1, 2, 1])
    placement.check(other)
    graph = model()
    constraints = Constraints(forbidden_devices=("gpu:1",))
    different = [
        made,
        make_problem(model(5), made.cluster),
        make_problem(model(cpu_only="op2"), made.cluster),
        make_problem(graph, Cluster.load("k80x4")),
        make_problem(graph, made.cluster, target_groups=1),
        make_problem(graph, made.cluster, constraints=constraints),
    ]
    assert len({other.space.fingerprint for other in different}) == len(different)


def test_costs_of_other_kernels_are_refused() -> None:
    made = problem()
    with pytest.raises(CostsError, match="op 'op2' has a gpu kernel, the graph says otherwise"):
        replace(made, graph=model(cpu_only="op2"))


def test_parts_of_different_problems_are_refused() -> None:
    made = make_problem(model(), Cluster.load("k80x2"))
    with pytest.raises(PlacementError, match="grouping covers 4 ops, the graph has 5"):
        Problem(graph=model(5), grouping=made.grouping, cluster=made.cluster, costs=made.costs)
    with pytest.raises(CostsError, match=r"costs are for .*haswell.*cluster 'cpu2' has cpu-core"):
        Problem(
            graph=model(),
            grouping=made.grouping,
            cluster=Cluster.load("cpu2"),
            costs=made.costs,
        )


def test_constraints_become_what_is_allowed() -> None:
    constraints = Constraints(pins=(("op0", "cpu:0"),), forbidden_devices=("gpu:1",))
    made = make_problem(model(), Cluster.load("k80x2"), constraints=constraints)
    assert made.grouping.names == ("op0", "op1", "op2", "op3")
    assert made.allowed.tolist() == [[True, False, False]] + [[True, True, False]] * 3


def test_together_makes_one_group() -> None:
    constraints = Constraints(together=("op[03]",))
    made = make_problem(model(), Cluster.load("k80x2"), constraints=constraints)
    assert made.grouping.group_of.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (Constraints(pins=(("zz", "cpu:0"),)), "no op of 'm' has a name that contains 'zz'"),
        (Constraints(pins=(("(", "cpu:0"),)), "'(' is not a regular expression"),
        (Constraints(pins=(("op", "gpu:7"),)), "has no device 'gpu:7'"),
        (Constraints(forbidden_devices=("tpu",)), "has no device 'tpu'"),
        (
            Constraints(pins=(("op2", "gpu:0"),)),
            "group 'op2' can run on no device of cluster 'k80x2': cpu:0 is ruled out by a "
            "constraint; op 'op2' (t) has no gpu kernel",
        ),
    ],
)
def test_impossible_constraints(constraints: Constraints, message: str) -> None:
    with pytest.raises((PlacementError, ClusterError), match=re.escape(message)):
        make_problem(model(cpu_only="op2"), Cluster.load("k80x2"), constraints=constraints)


def test_group_costs_are_sums() -> None:
    made = problem()
    assert made.group_seconds.shape == (3, 4)
    np.testing.assert_allclose(made.group_seconds, made.op_seconds)
    assert make_problem(model(), made.cluster, target_groups=1).group_seconds[
        1
    ].tolist() == pytest.approx([made.op_seconds[1].sum()])


@given(graphs(), st.booleans())
def test_problems_round_trip(graph: Graph, constrained: bool) -> None:
    constraints = Constraints(forbidden_devices=("gpu:1",) if constrained else ())
    made = make_problem(graph, Cluster.load("k80x2"), target_groups=4, constraints=constraints)
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "problem.json")
        again = Problem.load(Path(folder) / "problem.json")
    assert again == made
    assert again.fingerprint == made.fingerprint
    assert again.allowed.tolist() == made.allowed.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a problem file"),
        ({"grouping": None}, "not a grouping file"),
        ({"costs": 3}, "not a costs file"),
        ({"forbidden": 7}, "'forbidden' must be a list"),
        ({"cluster": {"devices": []}}, "has no devices"),
        ({"graph": {"ops": []}}, "the graph has no ops"),
    ],
)
def test_bad_problem_files(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    problem().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlacewrightError, match=re.escape(message)):
        Problem.load(path)


def test_placements_round_trip(tmp_path: Path) -> None:
    made = problem()
    placement = Placement.of(made, [0, 1, 2, 1])
    placement.save(tmp_path / "p.json", made)
    assert Placement.load(tmp_path / "p.json", made) == placement
    assert hash(Placement.of(made, np.array([0, 1, 2, 1]))) == hash(placement)


def test_placements_for_another_problem_are_refused(tmp_path: Path) -> None:
    made = problem()
    path = tmp_path / "p.json"
    Placement.of(made, [0, 2, 2, 0]).save(path, made)
    with pytest.raises(PlacementError, match="covers 4 groups, the problem has 1; was it made"):
        Placement.load(path, make_problem(model(), made.cluster, target_groups=1))
    with pytest.raises(PlacementError, match=r"on 'gpu:1', which cluster 'local' does not have"):
        Placement.load(path, make_problem(model(), Cluster.load("local")))
    with pytest.raises(PlacementError, match="covers 2 groups, the problem has 4"):
        Placement.of(made, [0, 1])
    with pytest.raises(PlacementError, match="uses device number 3, there are 3 devices"):
        Placement.of(made, [0, 1, 2, 3])
    with pytest.raises(PlacementError, match="was made for space"):
        Placement.of(made, [0] * 4).check(make_problem(model(), Cluster.load("k80x4")))
    other = model(5)
    with pytest.raises(PlacementError, match="placement of another graph"):
        Placement.load(path, make_problem(other, made.cluster))
    path.write_text('{"format": "placewright-placement/1", "groups": {"a": ["x"]}}')
    with pytest.raises(PlacementError, match="covers 1 groups"):
        Placement.load(path, made)
    path.write_text("{}")
    with pytest.raises(PlacementError, match="not a placement file"):
        Placement.load(path, made)


def test_failures_carry_no_time() -> None:
    with pytest.raises(PlacementError, match="exactly those that ran have times"):
        Measurement(outcome=Outcome.FAILED, step_seconds=(1.0,))
    with pytest.raises(PlacementError, match="exactly those that ran have times"):
        Measurement(outcome=Outcome.OK)
    with pytest.raises(PlacementError, match="cannot take nan seconds"):
        Measurement(outcome=Outcome.OK, step_seconds=(float("nan"),))


def test_measurements_round_trip() -> None:
    for measurement in (
        Measurement(outcome=Outcome.OK, step_seconds=(0.1, 0.3), peak_bytes=(1, 2)),
        Measurement(outcome=Outcome.OUT_OF_MEMORY, peak_bytes=(9,), reason="gpu:0 is full"),
    ):
        assert Measurement.from_json(measurement.to_json()) == measurement
    assert Measurement(outcome=Outcome.OK, step_seconds=(0.1, 0.3)).mean_seconds == 0.2
