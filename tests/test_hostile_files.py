"""Files from anybody: what is too large, too deep or too clever is one line, and at once."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placewright import files
from placewright.cluster import Cluster
from placewright.errors import PlacementError, PlacewrightError
from placewright.graph import Graph, Op, ScopeRule, from_json
from placewright.grouping import by_scope, each_op, matching_groups
from placewright.journal import read_trials
from placewright.patterns import Allowance, searcher
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.testing import random_problem

CLUSTER = """
name: two
kinds:
  chip: {type: gpu, peak_flops: 1 TFLOPS, memory_bandwidth: 100 GB/s, memory: 1 GB}
devices:
  - {name: "gpu:0", kind: chip}
  - {name: "gpu:1", kind: chip}
links:
  - {name: wire, latency: 5 us, bandwidth: 1 GB/s, pairs: [["gpu:0", "gpu:1"]]}
"""


def _refused(read: Callable[[], Any]) -> str:
    """The message: short, one line, within seconds that no honest file needs."""
    started = time.monotonic()
    with pytest.raises(PlacewrightError) as caught:
        read()
    # Far above what refusing takes and far below what believing the file would take.
    assert time.monotonic() - started < 60
    assert len(str(caught.value)) <= 500
    return str(caught.value)


def _named(names: list[str]) -> Graph:
    return Graph.from_ops("named", [Op(name=name, type="Op") for name in names], [])


def test_a_pattern_that_repeats_repetitions_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placewright.patterns._SECONDS", 0.5)
    graph = _named(["a" * 40 + f"!{i}" for i in range(50)])
    rule = ScopeRule(r"(a|aa)+$", "x")
    assert "takes too long" in _refused(lambda: by_scope([rule])(graph, each_op(graph)))
    assert "takes too long" in _refused(
        lambda: matching_groups(graph, each_op(graph), rule.pattern)
    )


def test_many_patterns_have_no_more_time_than_one() -> None:
    graph = _named(["a" * 40 + "!"])
    allowance = Allowance()
    searchers = [searcher(r"(a|aa)+$" + f"|{i}", allowance=allowance) for i in range(100)]
    allowance.left = 0.2
    for search in searchers:
        assert "takes too long" in _refused(functools.partial(search, graph.op_names[0]))
    assert allowance.left < 0


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a{1000000000}", "all counts multiplied"),
        ("(((a{100}){100}){100}){100}", "all counts multiplied"),
        ("a{" + "9" * 1900 + "}", "all counts multiplied"),
        ("(?R)", "no group of a pattern"),
        ("(a(?1)?)", "no group of a pattern"),
        ("(?P<x>a(?P>x)?)", "no group of a pattern"),
        ("(?b)(?:a{e<=99}){99}", "no group of a pattern"),
        ("(?:abc){e<=9}", "stands for a count"),
        ("(" * 900 + ")" * 900, "not a regular expression"),
    ],
)
def test_patterns_that_take_long_to_compile_are_refused(pattern: str, said: str) -> None:
    graph = _named(["a" * 60])
    assert said in _refused(lambda: matching_groups(graph, each_op(graph), pattern))


def test_many_or_long_rules_and_names_are_refused() -> None:
    op = {"name": "a", "type": "T"}
    rule = {"pattern": "a", "label": "b"}
    for document, said in (
        ({"ops": [op], "group_rules": [rule] * 1001}, "1,001 group rules"),
        ({"ops": [op], "group_rules": [rule | {"label": r"\g<0>" * 900}]}, "characters long"),
        ({"ops": [op | {"name": "a/" * 100_000}]}, "200,000 characters long"),
        ({"ops": [op | {"launches": 1e308}, op | {"name": "b", "launches": 1e999}]}, "launches"),
    ):
        assert said in _refused(functools.partial(from_json, document, where="g"))
    graph = _named(["a"])
    long = ScopeRule("a", r"\g<0>" * 900)
    assert "characters long" in _refused(lambda: by_scope([long])(graph, each_op(graph)))
    assert "launches" in _refused(
        lambda: Graph.from_ops("g", [Op(name="a", type="T", launches=-1.0)], [])
    )


def test_ordinary_patterns_give_what_re_gives() -> None:
    names = ["enc/layer_1/a", "enc/layer_1/b", "dec/layer_2/a", "a{2}", "aab12"]
    graph = _named(names)
    grouping = by_scope([ScopeRule(r"(\w+)/layer_(\d+)/", r"\1 \2")])(graph, each_op(graph))
    assert {"enc 1", "dec 2"} < set(grouping.names)
    for pattern in (
        r"a\{2\}", r"[a]{2}b\d{1,3}$", r"(?i)ENC|(?:dec)", r"(?<=layer_)1", r"(?P<x>a)(?P=x)",
        r"^(?!enc)", r"(?s:.)2", r"a{,2}b",
    ):  # fmt: skip
        search = searcher(pattern)
        assert [bool(search(name)) for name in names] == [
            bool(re.search(pattern, name)) for name in names
        ]


def test_a_pattern_of_a_megabyte_is_refused() -> None:
    graph = _named(["a"])
    with pytest.raises(PlacementError, match="characters long"):
        matching_groups(graph, each_op(graph), "a" * 1_000_000)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 26)))
    assert "holds more than" in _refused(lambda: Graph.load(path))


def test_a_file_of_empty_lists_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte, compressed, could stand for 20 GB of them."""
    monkeypatch.setattr(files, "MOST_VALUES", 10_000)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"ops": [' + b"[]," * 10_000 + b"[]]}"))
    assert "has over 10,000 values" in _refused(lambda: Graph.load(path))


@pytest.mark.parametrize(
    "text",
    [
        # Ten lines that stand for 10^9 values, as aliases and as merges.
        "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
        "a0: &a0 {x: 1, y: 2}\n"
        + "".join(
            f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}], k{i}: 1}}\n" for i in range(1, 9)
        ),
        "a: &a [*a, *a]\n",
    ],
    ids=["aliases", "merges", "itself"],
)
def test_alias_bombs_are_not_built(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    _refused(lambda: Cluster.load(path))


def test_an_anchor_in_a_cluster_file_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "anchors.yaml"
    text = CLUSTER.replace("kind: chip}", "kind: &k chip}", 1).replace("kind: chip}", "kind: *k}")
    path.write_text(text)
    assert Cluster.load(path).num_devices == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory: 1 GB}", "memory: 1 GB, slots: 1000000}"),
        ("memory: 1 GB}", f"memory: 1 GB, slots: {'9' * 400}}}"),
        # Python reads such numbers, and cannot write them into a message.
        ("memory: 1 GB}", f"memory: 1 GB, slots: 0x{'f' * 20_000}}}"),
        ("name: two", f"name: 0x{'f' * 20_000}"),
        ("memory: 1 GB}", f"memory: 1 GB, peak_flops: 1{':59' * 100_000}}}"),
        ("1 TFLOPS", f"1{':59' * 1_000}.5"),
        ("name: two", f"name: two\nmore: [{'[],' * 200_000}]"),
        ("kind: chip}", "kind: [chip]}"),
        ('name: "gpu:0"', "name: [1, 2]"),
        ("1 TFLOPS", "9" * 5000),
        ("5 us", "1e999 us"),
        ("name: two", f"name: {'x' * 10_000}\nfoo: 1"),
        ("devices:", "devices:\n" + '  - {name: "d", kind: chip}\n' * 2000),
        (
            "kinds:",
            "kinds:\n" + "".join(f"  k{i}: {{type: gpu}}\n" for i in range(30_000)),
        ),
    ],
)
def test_absurd_clusters_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    monkeypatch.setattr("placewright.cluster._MOST_VALUES", 20_000)
    path = tmp_path / "cluster.yaml"
    assert old in CLUSTER
    path.write_text(CLUSTER.replace(old, new, 1))
    _refused(lambda: Cluster.load(path))


def test_absurd_graphs_are_one_line(tmp_path: Path) -> None:
    op: dict[str, Any] = {"name": "a", "type": "T"}
    path = tmp_path / "graph.json"
    for change in (
        {"outputs": [{"bytes": 1, "shape": [1] * 100_000}]},
        {"seconds": {f"kind{i}": 1.0 for i in range(30_000)}},
        {"kernels": [f"type{i}" for i in range(30_000)]},
        {"name": ["a"]},
        {"flops": 10**400},
        {"type": "T" * 100_000, "nonsense": 1},
    ):
        path.write_text(json.dumps({"ops": [op | change], "edges": []}))
        _refused(lambda: Graph.load(path))


def test_a_deep_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    _refused(lambda: Graph.load(path))
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 50_000)
    _refused(lambda: Cluster.load(path))


def test_mutated_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Never a traceback: every loader takes a mutated file or says in one line what is wrong."""
    problem = random_problem(3)
    rng = random.Random(0)
    placement = Placement.of(problem, problem.allowed.argmax(axis=1))
    problem.save(tmp_path / "problem.json")
    problem.graph.save(tmp_path / "graph.json")
    placement.save(tmp_path / "placement.json", problem)
    problem.cluster.save(tmp_path / "cluster.yaml")
    readers: dict[str, Callable[[Path], Any]] = {
        "problem.json": Problem.load,
        "graph.json": Graph.load,
        "placement.json": lambda path: Placement.load(path, problem),
        "cluster.yaml": Cluster.load,
        "journal.jsonl": lambda path: read_trials(path, problem),
    }
    (tmp_path / "journal.jsonl").write_text(
        json.dumps({
            "placement": [0] * problem.num_groups, "measurement": {"outcome": "ok",
            "step_seconds": [1.0]}, "placer": "x", "seed": 0, "at_seconds": 0.0,
            "problem": problem.fingerprint, "version": "0",
        }) + "\n"
    )  # fmt: skip
    for name, read in readers.items():
        whole = (tmp_path / name).read_text()
        target = tmp_path / f"mutated-{name}"
        for _ in range(150):
            target.write_text(_mutated(whole, rng))
            with contextlib.suppress(PlacewrightError):  # any other error fails this test
                read(target)


_PIECES = [
    "[]",
    "{}",
    "null",
    "-1",
    "1e999",
    "9" * 400,
    '"x"',
    "NaN",
    "true",
    "",
    ":",
    "[[",
    "\x00",
]


def _mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(text)), rng.choice((0, 1, 1, 2, 5, 20))
        text = text[:at] + rng.choice(_PIECES) + text[at + length :]
    return text
