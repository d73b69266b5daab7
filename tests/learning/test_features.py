from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from placewright.cluster import Cluster
from placewright.graph import Edge, Graph, Op, Tensor
from placewright.learning.features import TYPE_BUCKETS, features, vocabulary
from placewright.problem import ProblemConfig, make_problem
from placewright.testing import random_problem


def _graph() -> Graph:
    ops = [
        Op(name="a", type="MatMul", outputs=(Tensor(4096, shape=(32, 32)),), flops=1e9),
        Op(name="b", type="Relu", outputs=(Tensor(2048, shape=(16, 32)),), flops=1e6),
        Op(name="c", type="MatMul", outputs=(Tensor(8, shape=(2,)),), flops=1e9),
    ]
    return Graph.from_ops("three", ops, [Edge("a", "b"), Edge("a", "c"), Edge("b", "c")])


def test_types_shapes_and_edges_are_those_of_the_graph() -> None:
    problem = make_problem(_graph(), Cluster.load("k80x2"), ProblemConfig(groups=3))
    assert problem.num_groups == 3
    seen = features(problem, ["MatMul", "Relu"])
    assert seen.order.tolist() == [0, 1, 2]
    np.testing.assert_allclose(seen.types_GV[:, :2], [[0.1, 0], [0, 0.1], [0.1, 0]])
    np.testing.assert_allclose(seen.log_types_GV[:, :2], [[1, 0], [0, 1], [1, 0]])
    assert seen.shapes_GS[0, :3].tolist() == pytest.approx([0.032, 0.032, 0])
    assert seen.log_shapes_GS[0, 0] == pytest.approx(np.log2(33) / 10)
    assert seen.feeds_GG.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    # a sends twice as much to b as nothing; each row of shares is 1 or 0.
    np.testing.assert_allclose(seen.sends_GG.sum(axis=1), [1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(seen.receives_GG.sum(axis=1), [0, 1, 1], rtol=1e-6)
    assert seen.traffic_GG[1, 0] > seen.traffic_GG[1, 2]  # 4 KB against 2 KB


def test_unknown_types_share_buckets_by_hash_and_nothing_is_lost() -> None:
    problem = make_problem(_graph(), Cluster.load("k80x2"), ProblemConfig(groups=3))
    unknown = features(problem, ["Conv2D"])
    assert unknown.types_GV.shape == (3, 1 + TYPE_BUCKETS)
    np.testing.assert_allclose(unknown.types_GV.sum(axis=1), 0.1)
    assert unknown.types_GV[:, 0].tolist() == [0, 0, 0]
    # The same type lands in the same place, whatever the graph.
    assert (unknown.types_GV[0] == unknown.types_GV[2]).all()
    assert (unknown.types_GV[0] != unknown.types_GV[1]).any()


@pytest.mark.parametrize("seed", range(3))
def test_weights_stand_before_who_reads_them(seed: int) -> None:
    problem = random_problem(seed, homes=True)
    seen = features(problem, vocabulary([problem]))
    for field in dataclasses.fields(seen):
        assert np.isfinite(getattr(seen, field.name)).all(), field.name
    graph = Graph.from_ops(
        "two",
        [
            Op(name="w0", type="parameter", outputs=(Tensor(10**9),), param_bytes=10**9),
            Op(name="w1", type="parameter", outputs=(Tensor(10**9),), param_bytes=10**9),
            Op(name="m0", type="mm", outputs=(Tensor(8),), flops=1e9),
            Op(name="m1", type="mm", outputs=(Tensor(8),), flops=1e9),
        ],
        [Edge("w0", "m0"), Edge("w1", "m1"), Edge("m0", "m1")],
        [(r"(\d)$", r"unit\1")],
    )
    posed = make_problem(graph, Cluster.load("k80x2"), ProblemConfig(homes=True))
    names = [posed.grouping.names[g] for g in features(posed, ["mm"]).order.tolist()]
    assert names == ["unit0/weights", "unit0", "unit1/weights", "unit1"]


@pytest.mark.parametrize("seed", range(5))
def test_all_numbers_are_finite_and_groups_are_in_topological_order(seed: int) -> None:
    problem = random_problem(seed)
    seen = features(problem, vocabulary([problem]))
    for field in dataclasses.fields(seen):
        assert np.isfinite(getattr(seen, field.name)).all(), field.name
    first = [problem.grouping.members(int(g)).min() for g in seen.order]
    assert first == sorted(first)
    assert (seen.allowed_GD == problem.allowed[seen.order]).all()
