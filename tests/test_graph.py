from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from placewright.cluster import Cluster
from placewright.errors import ModelError
from placewright.graph import Edge, Graph, Loop, Op, Tensor, Work, from_json, to_json
from placewright.problem import make_problem
from tests.strategies import graphs


def chain() -> Graph:
    """a -> b -> c, with a control edge a -> c."""
    ops = [
        Op(name="c", type="Sum", flops=3.0, kernels=("cpu",)),
        Op(name="a", type="Var", outputs=(Tensor(8, (2,), "float32"),), param_bytes=40),
        Op(
            name="b",
            type="Read",
            outputs=(Tensor(8, (2,), "float32", ("a", 0)), Tensor(4)),
            colocate=("a", "x"),
            seconds={"gpu": 0.5},
        ),
    ]
    return Graph.from_ops("chain", ops, [Edge("b", "c", 1), Edge("a", "b"), Edge("a", "c", None)])


def test_ops_are_sorted_and_arrays_follow() -> None:
    graph = chain()
    assert graph.op_names == ("a", "b", "c")
    assert graph.output_offsets.tolist() == [0, 1, 3, 3]
    assert list(zip(graph.edge_src, graph.edge_dst, graph.edge_tensor, strict=True)) == [
        (0, 1, 0),
        (1, 2, 2),
        (0, 2, -1),
    ]
    assert graph.output_bytes.tolist() == [8, 12, 0]
    assert graph.owned_bytes.tolist() == [8, 4, 0]
    assert graph.input_bytes.tolist() == [0, 8, 4]
    assert graph.tensor_shares.tolist() == [-1, 0, -1]
    assert graph.runs_on("cpu").tolist() == [True, True, True]
    assert graph.runs_on("gpu").tolist() == [True, True, False]
    assert np.isnan(graph.measured_seconds["gpu"][[0, 2]]).all()


def test_colocation_labels_are_transitive() -> None:
    ops = [
        Op(name="a", type="t", colocate=("x",)),
        Op(name="b", type="t", colocate=("x", "y")),
        Op(name="c", type="t", colocate=("y",)),
        Op(name="d", type="t", colocate=("z",)),
        Op(name="e", type="t"),
    ]
    assert Graph.from_ops("g", ops, []).colocation.tolist() == [0, 0, 0, 1, -1]


def test_sharing_is_followed_to_the_owner() -> None:
    tensor = Tensor(4)
    ops = [
        Op(name="a", type="t", outputs=(tensor,)),
        Op(name="b", type="t", outputs=(tensor._replace(shares=("a", 0)),)),
        Op(name="c", type="t", outputs=(tensor._replace(shares=("b", 0)),)),
    ]
    graph = Graph.from_ops("g", ops, [Edge("a", "b"), Edge("b", "c")])
    assert graph.tensor_shares.tolist() == [-1, 0, 0]


def test_graphs_cannot_be_changed() -> None:
    graph = chain()
    with pytest.raises(ValueError, match="read-only"):
        graph.flops[0] = 1.0
    with pytest.raises(AttributeError):
        graph.name = "other"  # type: ignore[misc]


@given(graphs())
def test_round_trip_is_exact(graph: Graph) -> None:
    document = json.loads(json.dumps(to_json(graph), allow_nan=False))
    again = from_json(document, where="memory")
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert list(again.ops()) == list(graph.ops())
    assert list(again.edges()) == list(graph.edges())


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    graph = Graph.from_ops("g", chain().ops(), chain().edges(), [(r"l(\d)", r"layer \1")])
    graph.save(path)
    assert Graph.load(path) == graph
    assert Graph.load(path).group_rules == graph.group_rules


def test_a_change_changes_the_fingerprint() -> None:
    ops = list(chain().ops())
    seen = {chain().fingerprint}
    for change in ({"flops": 4.0}, {"type": "Mean"}, {"slot_bytes": 1}, {"kernels": ("gpu",)}):
        fields = {key: getattr(ops[2], key) for key in Op.__dataclass_fields__} | change
        seen.add(Graph.from_ops("chain", [*ops[:2], Op(**fields)], chain().edges()).fingerprint)
    assert len(seen) == 5


def test_what_ops_were_measured_to_take_is_not_what_graph_it_is() -> None:
    ops = list(chain().ops())
    fields = {key: getattr(ops[2], key) for key in Op.__dataclass_fields__}
    timed = [
        Graph.from_ops(
            "chain", [*ops[:2], Op(**fields | {"seconds": {"cpu": seconds}})], chain().edges()
        )
        for seconds in (0.1, 0.2)
    ]
    assert timed[0].fingerprint == timed[1].fingerprint == chain().fingerprint
    problems = [make_problem(graph, Cluster.load("cpu2")) for graph in timed]
    assert problems[0].space == problems[1].space
    assert problems[0] != problems[1]  # simulated times are others


def document(**changes: Any) -> dict[str, Any]:
    return {"ops": [{"name": "a", "type": "t", "outputs": [{"bytes": 1}]}], "edges": []} | changes


def op(**fields: Any) -> dict[str, Any]:
    return document(ops=[{"name": "a", "type": "t"} | fields])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "expected a JSON object"),
        ({"ops": {}}, "'ops' and 'edges' must be lists"),
        (document(format="other/9"), "format is 'other/9', this version reads"),
        (document(ops=[]), "the graph has no ops"),
        (document(opps=[]), "unknown key 'opps'"),
        (document(ops=[{"type": "t"}]), "'name' of op number 0 must be a non-empty string"),
        (op(name="\ud800"), "is not valid Unicode"),
        (op(type=""), "'type' of op 'a' must be a non-empty string"),
        (op(flop=1), "op 'a': unknown key 'flop'"),
        (op(flops=float("nan")), "'flops' of op 'a' must be finite and not negative, not nan"),
        (op(flops=-1), "'flops' of op 'a' must be finite and not negative, not -1"),
        (op(flops="many"), "'flops' of op 'a' must be a number, not 'many'"),
        (op(seconds={"gpu": -0.1}), "seconds of op 'a' on gpu must be finite and not negative"),
        (op(flops=10**400), "'flops' of op 'a' must be finite"),
        (op(param_bytes=2**61), "must be a whole number that is not negative (nor absurd)"),
        (
            document(ops=[{"name": n, "type": "t", "param_bytes": 2**59} for n in "abc"]),
            "is the unit of bytes right?",
        ),
        (
            document(ops=[{"name": n, "type": "t", "flops": 1e308} for n in "ab"]),
            "add up to infinity",
        ),
        (op(param_bytes=-5), "'param_bytes' of op 'a' must be a whole number"),
        (op(param_bytes=1.5), "'param_bytes' of op 'a' must be a whole number"),
        (op(outputs=[{"shape": [2]}]), "needs 'bytes', or a 'shape' and a 'dtype'"),
        (op(outputs=[{"shape": [-1], "dtype": "int8"}]), "a dimension of op 'a' must be a whole"),
        (op(gradient_of="z"), "is the gradient of 'z', which does not exist"),
        (op(outputs=[{"bytes": 1, "shares": ["z", 0]}]), "shares memory with 'z':0"),
        (document(ops=document()["ops"] * 2), "two ops are named 'a'"),
        (document(edges=[{"from": "a", "to": "z"}]), "is dangling: there is no op 'z'"),
        (document(edges=[{"from": "a", "to": "a"}]), "a cycle of 1 ops: a -> a"),
        (document(edges=[{"from": "a", "to": "a", "output": 3}]), "'a' has 1 outputs"),
        (document(edges=[7]), "edge number 0 is not a JSON object"),
        (document(group_rules=[{"pattern": "x"}]), "'label' of a group rule"),
    ],
)  # fmt: skip
def test_bad_documents_say_what_and_where(bad: Any, message: str) -> None:
    with pytest.raises(ModelError, match="^file.json: .*" + re.escape(message)) as caught:
        from_json(bad, where="file.json")
    assert "\n" not in str(caught.value)


def test_a_cycle_is_shown() -> None:
    ops = [Op(name=name, type="t") for name in "abcd"]
    edges = [Edge("a", "b", None), Edge("b", "c", None), Edge("c", "b", None), Edge("c", "d", None)]
    with pytest.raises(ModelError, match=r"a cycle of 2 ops: (b -> c -> b|c -> b -> c);"):
        Graph.from_ops("g", ops, edges)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such graph file"),
        (b"", "the graph file is empty"),
        (b'{"ops": [', "truncated JSON at line 1"),
        (b'{"ops": ]}', "malformed JSON at line 1, column 9"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"[" * 100_000, "JSON that no graph has"),
        (b'{"ops": ' + b"9" * 5000 + b"}", "JSON that no graph has"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "graph.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        Graph.load(path)
    assert "\n" not in str(caught.value)


def test_a_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "graph.json"
    with pytest.raises(ModelError, match="cannot be written"):
        chain().save(path)
    path.parent.mkdir()
    chain().save(path)
    before = path.read_bytes()
    assert list(path.parent.iterdir()) == [path]
    path.unlink()
    path.mkdir()  # a directory cannot be replaced by a file
    with pytest.raises(ModelError, match="cannot be written"):
        chain().save(path)
    assert list(path.parent.iterdir()) == [path]
    assert before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_graph_of_100_000_ops_stays_small(tmp_path: Path) -> None:
    n = 100_000
    tensor = Tensor(64, (4, 4), "float32")
    ops = [Op(name=f"scope/op{i}", type="T", outputs=(tensor,)) for i in range(n)]
    edges = [Edge(f"scope/op{i}", f"scope/op{i + step}") for i in range(n - 2) for step in (1, 2)]
    path = tmp_path / "big.json"
    Graph.from_ops("big", ops, edges).save(path)
    # In a process of its own, and by the kernel's count for that program alone: `getrusage` also
    # knows the memory of the process that started it.
    script = (
        "import re, sys; from placewright.graph import Graph; "
        "print(Graph.load(sys.argv[1]).num_ops, "
        "re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    loaded, peak_kilobytes = map(int, result.stdout.split())
    assert loaded == n
    assert peak_kilobytes < 1_000_000


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    text = '{"format": "placewright-graph/1", "name": "g", "edges": [], "ops": [%s]}'
    op = '{"name": "a", "type": "t", "param_bytes": 4096.0, "outputs": [{"bytes": %s}]}'
    path.write_text(text % (op % "1e6"))
    graph = Graph.load(path)
    assert graph.tensor_bytes.tolist() == [1_000_000]
    assert graph.param_bytes.tolist() == [4096]
    path.write_text(text % (op % "1.5"))
    with pytest.raises(ModelError, match="must be a whole number"):
        Graph.load(path)


def test_sums_over_inputs_stay_within_64_bits() -> None:
    ops = [Op(name="big", type="t", outputs=(Tensor(2**50),))]
    ops += [Op(name=f"r{i}", type="t") for i in range(1025)]
    with pytest.raises(ModelError, match="counting each tensor as often as it is read"):
        Graph.from_ops("g", ops, [Edge("big", f"r{i}") for i in range(1025)])
    Graph.from_ops("g", ops, [Edge("big", f"r{i}") for i in range(1024)])


def test_work_is_guessed_from_the_type_where_nobody_said_it() -> None:
    tensor = Tensor(4000)
    ops = [
        Op(name="table", type="Variable", outputs=(Tensor(10**6),), param_bytes=10**6),
        Op(name="rows", type="aten.embedding", outputs=(tensor,)),
        Op(name="product", type="aten.mm", outputs=(tensor,)),
        Op(name="conv", type="Conv2D", outputs=(tensor,)),
        Op(name="said", type="Conv2D", outputs=(tensor,), work=Work.MEMORY, moved_bytes=7),
        Op(name="view", type="view", outputs=(tensor._replace(shares=("said", 0)),)),
        Op(name="apply", type="ApplyAdam"),
    ]
    chain = [Edge(a.name, b.name) for a, b in itertools.pairwise(ops)]
    graph = Graph.from_ops("g", ops, [*chain, Edge("table", "apply")])
    found = {name: Work(kind).name for name, kind in zip(graph.op_names, graph.work, strict=True)}
    assert found == {
        "table": "NONE", "rows": "GATHER", "product": "MATMUL", "conv": "CONV", "said": "MEMORY",
        "view": "NONE", "apply": "UPDATE",
    }  # fmt: skip
    moved = dict(zip(graph.op_names, graph.moved_bytes.tolist(), strict=True))
    assert moved["rows"] == 8000  # as many bytes of the table as it makes
    assert moved["said"] == 7
    assert moved["apply"] == 4000 + 3 * 10**6  # the gradient, and the variable read and written
    again = from_json(to_json(graph), where="g.json")
    assert again == graph
    assert again.stated_work.tolist() == graph.stated_work.tolist()


def test_loops_are_kept_in_files_and_stay_together() -> None:
    ops = [Op(name=name, type="t", outputs=(Tensor(8),)) for name in "ab"]
    ops += [Op(name=name, type="t", outputs=(Tensor(8),), count=50) for name in "cd"]
    edges = [Edge("a", "b"), Edge("b", "c"), Edge("c", "d")]
    loops = [Loop("loop", 50, "user"), Loop("other", None, "unknown", "loop")]
    graph = Graph.from_ops("g", ops, edges, loops=loops)
    assert graph.run_count.tolist() == [1, 1, 50, 50]
    assert graph.colocation.tolist() == [-1, -1, 0, 0]  # else every iteration would send something
    again = from_json(json.loads(json.dumps(to_json(graph))), where="g.json")
    assert again == graph
    assert again.loops == tuple(loops)
    once = Graph.from_ops("g", [dataclasses.replace(op, count=1) for op in ops], edges)
    assert once.fingerprint != graph.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"work": "dance"}, "'work' of op 'a' must be one of none, memory, conv"),
        ({"count": 0}, "op 'a' runs 0 times in a step"),
        ({"moved_bytes": -1}, "'moved_bytes' of op 'a' must be a whole number"),
    ],
)
def test_bad_costs_of_an_op(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        from_json({"ops": [{"name": "a", "type": "t", **change}]}, where="g.json")
