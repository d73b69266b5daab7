from __future__ import annotations

import graphlib
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placewright.errors import PlacementError
from placewright.graph import Edge, Graph, Op, ScopeRule, Tensor
from placewright.grouping import (
    Grouping,
    by_coarsening,
    by_colocation,
    by_gradient,
    by_scope,
    by_sole_consumer,
    by_together,
    default_rules,
    each_op,
    group,
)
from tests.strategies import graphs


def graph_of(edges: str, **fields: dict[str, object]) -> Graph:
    """`graph_of("a>b b>c", b={"colocate": ("x",)})`"""
    pairs = [edge.split(">") for edge in edges.split()]
    names = dict.fromkeys(name for pair in pairs for name in pair)
    ops = [
        Op(name=name, type="t", outputs=(Tensor(4),), **fields.get(name, {}))  # type: ignore[arg-type]
        for name in names
    ]
    return Graph.from_ops("g", ops, [Edge(pair[0], pair[1]) for pair in pairs if len(pair) == 2])


def as_sets(graph: Graph, grouping: Grouping) -> set[str]:
    """The groups as words: {"ab", "c"}."""
    return {
        "".join(graph.op_names[op] for op in grouping.members(g))
        for g in range(grouping.num_groups)
    }


def is_acyclic(edges: set[tuple[int, int]]) -> bool:
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    for src, dst in edges:
        if src != dst:
            sorter.add(dst, src)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return False
    return True


def group_edges(graph: Graph, grouping: Grouping) -> set[tuple[int, int]]:
    of = grouping.group_of
    return {
        (int(of[src]), int(of[dst]))
        for src, dst in zip(graph.edge_src, graph.edge_dst, strict=True)
    }


def test_rule_1_colocation() -> None:
    graph = graph_of("a>b b>c", a={"colocate": ("x",)}, c={"colocate": ("x",)})
    assert as_sets(graph, by_colocation(graph, each_op(graph))) == {"ac", "b"}


def test_rule_1_gradients_go_with_their_forward_op() -> None:
    graph = graph_of("a>b b>c c>d", c={"gradient_of": "b"}, d={"gradient_of": "a"})
    assert as_sets(graph, by_gradient(graph, each_op(graph))) == {"ad", "bc"}


def test_rule_2_is_recursive() -> None:
    # a and b end in c only; c ends in d and e, which keeps it apart from both.
    graph = graph_of("a>b b>c c>d c>e e>f")
    grouping = by_sole_consumer()(graph, each_op(graph))
    assert as_sets(graph, grouping) == {"abc", "d", "ef"}
    # d and e meet again in f, so everything ends in one place.
    graph = graph_of("a>b a>c b>d c>d")
    assert as_sets(graph, by_sole_consumer()(graph, each_op(graph))) == {"abcd"}


def test_rule_2_leaves_named_groups_alone() -> None:
    graph = graph_of("a>b b>c c>d")
    rules = [ScopeRule("^[b]$", "B")]
    grouping = group(graph, (by_scope(rules), by_sole_consumer(rules)))
    assert as_sets(graph, grouping) == {"ab", "cd"}
    assert grouping.names == ("B", "d")


def test_rule_3_first_matching_rule_labels() -> None:
    graph = Graph.from_ops(
        "g",
        [Op(name=f"layer{i}/{kind}", type="t") for i in (0, 1) for kind in ("w", "mul", "b")],
        [],
    )
    rules = [ScopeRule("/w$", "weights"), ScopeRule(r"layer(\d)", r"layer \1")]
    grouping = group(graph, (by_scope(rules),))
    assert grouping.names == ("weights", "layer 0", "layer 1")
    assert grouping.group_of.tolist() == [0, 1, 1, 0, 2, 2]


def test_a_set_with_two_labels_goes_where_it_begins() -> None:
    together: dict[str, object] = {"colocate": ("v",)}
    graph = graph_of("a1>b2 b2>c2", a1=together, b2=together)
    grouping = group(graph, (by_colocation, by_scope([ScopeRule(r"(\d)", r"l\1")])))
    assert grouping.names == ("l1", "l2")
    assert grouping.group_of.tolist() == [0, 0, 1]


def test_together_joins_what_matches() -> None:
    graph = graph_of("a1>b b>a2")
    assert as_sets(graph, by_together("a.")(graph, each_op(graph))) == {"a1a2", "b"}
    with pytest.raises(PlacementError, match="no op of 'g' has a name that contains 'zz'"):
        by_together("zz")(graph, each_op(graph))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ScopeRule("(", "x"), "group pattern '(' is not a regular expression"),
        (ScopeRule("a", r"\3"), r"group label '\\3' does not fit its pattern"),
    ],
)
def test_bad_rules(rule: ScopeRule, message: str) -> None:
    graph = graph_of("a>b")
    with pytest.raises(PlacementError, match=re.escape(message)):
        group(graph, (by_scope([rule]),))


def test_an_op_without_gpu_kernel_does_not_tie_others_to_the_cpu() -> None:
    cpu_only: dict[str, object] = {"kernels": ("cpu",)}
    graph = graph_of("a>b b>c", b=cpu_only | {"gradient_of": "c"})
    for rules in [(by_gradient,), (by_sole_consumer(),), (by_coarsening(1),)]:
        assert "b" in as_sets(graph, group(graph, rules))


@given(graphs(), st.integers(1, 12))
def test_default_rules_are_total_and_keep_colocation(graph: Graph, target: int) -> None:
    for scopes in ((), (ScopeRule("[a-m]", "low"), ScopeRule("([0-9])", r"digit \1"))):
        grouping = group(graph, default_rules(scopes, target))
        assert grouping.group_of.shape == (graph.num_ops,)
        grouping.check_colocation(graph)  # raises when it is not kept
        for label in range(int(graph.colocation.max()) + 1):
            assert len(set(grouping.group_of[graph.colocation == label].tolist())) == 1


@given(graphs(colocation=False), st.integers(1, 8))
def test_coarsening_keeps_the_group_graph_acyclic(graph: Graph, target: int) -> None:
    grouping = group(graph, (by_coarsening(target),))
    assert is_acyclic(group_edges(graph, grouping))
    kinds = {tuple(op.kernels or ("any",)) for op in graph.ops()}
    assert grouping.num_groups <= max(target, 1) or len(kinds) > 1


@given(graphs(), st.integers(1, 8))
def test_coarsening_adds_no_cycle_to_those_of_colocation(graph: Graph, target: int) -> None:
    sets = group(graph, (by_colocation,))
    if is_acyclic(group_edges(graph, sets)):
        grouping = group(graph, (by_colocation, by_coarsening(target)))
        assert is_acyclic(group_edges(graph, grouping))


def test_coarsening_reaches_its_target_with_balanced_groups() -> None:
    rng = np.random.default_rng(0)
    ops = [
        Op(name=f"op{i}", type="t", outputs=(Tensor(4),), flops=float(rng.uniform(1e9, 2e9)))
        for i in range(2000)
    ]
    edges = [
        Edge(f"op{int(j)}", f"op{i}")
        for i in range(1, 2000)
        for j in {max(0, i - 1 - int(d)) for d in rng.exponential(40, 2)}
    ]
    graph = Graph.from_ops("g", ops, edges)
    grouping = group(graph, (by_coarsening(100),))
    assert grouping.num_groups == 100
    cost = np.bincount(grouping.group_of, weights=graph.flops)
    assert cost.max() < 2.5 * cost.mean()
    assert is_acyclic(group_edges(graph, grouping))


def test_a_training_graph_keeps_variables_with_their_updates() -> None:
    # Two layers: each variable is read early and updated late, so the sets form a cycle.
    variable: dict[str, dict[str, object]] = {
        f"{part}{i}": {"colocate": (f"v{i}",)} for i in (1, 2) for part in ("v", "update")
    }
    graph = graph_of("v1>f1 v2>f2 f1>f2 f2>b2 b2>update2 b2>b1 b1>update1", **variable)
    grouping = group(graph, (by_colocation, by_coarsening(2)))
    assert grouping.num_groups == 2
    grouping.check_colocation(graph)


@given(graphs())
def test_round_trip_is_exact(graph: Graph) -> None:
    grouping = group(graph, default_rules(target_groups=5))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grouping.json"
        grouping.save(path, graph)
        assert Grouping.load(path, graph) == grouping


def test_loading_for_another_graph_says_so(tmp_path: Path) -> None:
    path = tmp_path / "grouping.json"
    graph = graph_of("a>b")
    each_op(graph).save(path, graph)
    with pytest.raises(PlacementError, match="op 'c' is in no group"):
        Grouping.load(path, graph_of("a>b b>c"))
    with pytest.raises(PlacementError, match="op 'b' is not in the graph"):
        Grouping.load(path, graph_of("a"))


def test_a_grouping_that_breaks_colocation_is_refused() -> None:
    together: dict[str, object] = {"colocate": ("x",)}
    graph = graph_of("a>b", a=together, b=together)
    with pytest.raises(PlacementError, match="op 'b' is in group 'b', away from the ops it must"):
        each_op(graph).check_colocation(graph)


def test_zero_groups_are_refused() -> None:
    with pytest.raises(PlacementError, match="cannot make 0 groups"):
        by_coarsening(0)
