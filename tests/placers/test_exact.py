"""`exact`: small problems, with a proof."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from placewright.errors import MissingExtraError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Edge, Op, Tensor, frozen
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.exact import (
    Exact,
    ExactConfig,
    count_placements,
    every_placement,
    quick_bound_seconds,
)
from placewright.problem import Problem
from placewright.testing import (
    TinyProblem,
    check_placer,
    layered_graph,
    make_problem,
    random_problem,
    tiny_problems,
    uniform_cluster,
)

CP_SAT = ExactConfig(max_placements=0, max_work=20.0)
"""Never enumerates."""


def op(name: str, seconds: float, size: int = 0, variable: int = 0) -> Op:
    return Op(
        name=name,
        type="Op",
        outputs=(Tensor(size),),
        seconds={"dev": seconds},
        param_bytes=variable,
    )


def evaluated(problem: Problem, placements: Sequence[Placement]) -> list[Trial]:
    measurements = SimulatedEvaluator(problem, threads=1).evaluate(placements)
    return [
        Trial(placement=placement, measurement=measurement, placer="test")
        for placement, measurement in zip(placements, measurements, strict=True)
    ]


def all_trials(problem: Problem) -> list[Trial]:
    return evaluated(
        problem, [Placement.of(problem, devices) for devices in every_placement(problem)]
    )


def best_seconds(trials: Sequence[Trial]) -> float:
    return min((trial.measurement.mean_seconds for trial in trials), default=math.inf)


def larger_problem(ops: int = 24) -> Problem:
    graph = layered_graph(ops, width=4)
    records = [op(o.name, 1.0, size=1) for o in graph.ops()]
    return make_problem(
        records, list(dict.fromkeys(Edge(e.src, e.dst) for e in graph.edges())), uniform_cluster(2)
    )


# --- enumeration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", tiny_problems(), ids=lambda tiny: tiny.name)
def test_tiny_spaces_are_tried_out(tiny: TinyProblem) -> None:
    placer = Exact(tiny.problem)
    trials: list[Trial] = []
    while asked := placer.ask(3):
        assert not placer.proven
        trials += evaluated(tiny.problem, asked)
        placer.tell(trials[-len(asked) :])
    assert len({trial.placement for trial in trials}) == count_placements(tiny.problem)
    assert best_seconds(trials) == tiny.best_seconds
    assert placer.proven
    assert placer.notes.lower_bound_seconds == tiny.best_seconds


def test_enumeration_keeps_to_what_is_allowed_and_untold() -> None:
    problem = tiny_problems()[0].problem
    forbidden = np.zeros((3, 2), dtype=np.bool_)
    forbidden[1, 0] = True
    problem = Problem(
        graph=problem.graph,
        grouping=problem.grouping,
        cluster=problem.cluster,
        costs=problem.costs,
        forbidden=frozen(forbidden),
    )
    placer = Exact(problem)
    placer.tell(evaluated(problem, [Placement.of(problem, [0, 1, 0])]))
    asked = [placement.devices.tolist() for placement in placer.ask(100)]
    assert asked == [[0, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert placer.ask(100) == []


def test_one_placement_is_still_proposed() -> None:
    problem = make_problem([op("a", 1.0)], [], uniform_cluster(1))
    placer = Exact(problem)
    placer.tell(evaluated(problem, placer.ask(9)))
    assert placer.proven
    assert placer.notes.lower_bound_seconds == 1.0


# --- CP-SAT --------------------------------------------------------------------------------------


def chains() -> Problem:
    """Two chains of 3 x 1 s that have nothing to do with each other."""
    names = ("a0", "a1", "a2", "b0", "b1", "b2")
    edges = [("a0", "a1"), ("a1", "a2"), ("b0", "b1"), ("b1", "b2")]
    return make_problem([op(name, 1.0, size=1) for name in names], edges, uniform_cluster(2))


def diamond(latency_seconds: float) -> Problem:
    """1 s, then 2 s and 2 s side by side, then 1 s."""
    ops = [op("top", 1.0), op("left", 2.0), op("right", 2.0), op("bottom", 1.0)]
    edges = [("top", "left"), ("top", "right"), ("left", "bottom"), ("right", "bottom")]
    return make_problem(ops, edges, uniform_cluster(2, latency_seconds=latency_seconds))


def variables() -> Problem:
    """A chain of 3 x 1 s; 5 s to leave the device, which its variables force it to."""
    ops = [op("a", 1.0, variable=60_000), op("b", 1.0), op("c", 1.0, variable=60_000)]
    cluster = uniform_cluster(2, memory_bytes=100_000, latency_seconds=5.0)
    return make_problem(ops, [("a", "b"), ("b", "c")], cluster)


def broadcast() -> Problem:
    """Four readers of 3 s; the tensor takes 1 s to the other device, and goes there once."""
    ops = [op("source", 1.0, size=1), *(op(f"reader{i}", 3.0) for i in range(4))]
    return make_problem(ops, [("source", f"reader{i}") for i in range(4)], uniform_cluster(2))


def control() -> Problem:
    """Two readers of 2 s that wait for an op without taking anything from it: latency 0.5 s."""
    ops = [op("source", 1.0, size=100), op("first", 2.0), op("second", 2.0)]
    edges = [Edge("source", "first", None), Edge("source", "second", None)]
    return make_problem(ops, edges, uniform_cluster(2, latency_seconds=0.5))


def shared_wire() -> Problem:
    """Three ops of 1 s, each with an output that takes 2 s to send and a reader of 10 s."""
    ops = [op(f"make{i}", 1.0, size=2) for i in range(3)]
    ops += [op(f"read{i}", 10.0) for i in range(3)]
    edges = [(f"make{i}", f"read{i}") for i in range(3)]
    return make_problem(ops, edges, uniform_cluster(3, shared=True))


@pytest.mark.parametrize(
    ("problem", "optimum"),
    [
        (chains(), 3.0),
        (diamond(0.25), 4.25),  # one branch away, and the end after the other
        (diamond(2.0), 6.0),  # all on one device
        (variables(), 8.0),
        (broadcast(), 8.0),  # 1 + 1 + 2 x 3 on the other device
        (control(), 3.5),
        (shared_wire(), 11.0),  # no sending: each pair on a device of its own
        (make_problem([op(str(i), 1.0) for i in range(4)], [], uniform_cluster(1, slots=2)), 2.0),
    ],
    ids=["chains", "cheap", "dear", "memory", "broadcast", "control", "wire", "slots"],
)
def test_cp_sat_finds_and_proves_the_optimum(problem: Problem, optimum: float) -> None:
    assert best_seconds(all_trials(problem)) == pytest.approx(optimum)
    placer = Exact(problem, CP_SAT)
    assert quick_bound_seconds(problem) <= optimum
    asked = placer.ask(100)
    assert placer.proven
    assert placer.notes.why_not == ""
    assert placer.notes.lower_bound_seconds == pytest.approx(optimum, rel=1e-5)
    assert placer.notes.lower_bound_seconds <= optimum
    assert best_seconds(evaluated(problem, asked)) == pytest.approx(optimum)
    assert placer.ask(100) == []


def test_under_contention_cp_sat_proves_a_bound_and_no_optimum() -> None:
    problem = chains()
    problem = replace(problem, cluster=replace(problem.cluster, contention=0.5))
    placer = Exact(problem, CP_SAT)
    asked = placer.ask(100)
    assert asked
    assert not placer.proven
    assert placer.notes.lower_bound_seconds < best_seconds(evaluated(problem, asked))


@pytest.mark.parametrize("seed", [0, 2, 3, 5, 7, 11, 12, 13])
def test_no_placement_is_under_the_bound(seed: int) -> None:
    problem = random_problem(
        seed, max_ops=10, max_groups=5, max_devices=3, tight_memory=seed > 6, gaps=seed % 2 > 0,
        contention=seed in (3, 12),
    )  # fmt: skip
    placer = Exact(problem, ExactConfig(max_placements=0, max_work=2.0))
    placer.ask(1)
    assert placer.notes.lower_bound_seconds <= best_seconds(all_trials(problem))


@pytest.mark.parametrize("seed", [1, 4])
def test_contract(seed: int) -> None:
    config = ExactConfig(max_placements=0, max_work=1.0)
    check_placer(lambda problem, s: Exact(problem, config, seed=s), random_problem(seed))


def test_the_same_work_gives_the_same_placements() -> None:
    problem = larger_problem()
    config = ExactConfig(max_work=0.5)
    first, second = (Exact(problem, config, seed=3).ask(100) for _ in range(2))
    assert first
    assert first == second


def test_begins_with_the_best_told() -> None:
    problem = larger_problem()
    config = ExactConfig(max_work=0.0)  # no time for anything but where to start
    (start,) = Exact(problem, config).ask(10)
    assert len(set(start.devices.tolist())) == 1
    told = Placement.of(problem, np.arange(problem.num_groups, dtype=np.int32) % 2)
    placer = Exact(problem, config)
    placer.tell(evaluated(problem, [told]))
    assert placer.ask(10) == []  # it starts from what was told, and does not propose it again


def test_equal_devices_are_used_in_order() -> None:
    for placement in Exact(chains(), CP_SAT).ask(100):
        assert placement.devices[0] == 0


def test_large_problems_are_left_alone() -> None:
    problem = larger_problem(40)
    placer = Exact(problem, ExactConfig(max_ops=39))
    assert placer.ask(10) == []
    assert placer.notes.why_not == (
        "the graph has 40 ops, exact takes up to 39, or problems with up to 20,000 placements "
        "within this budget"
    )
    assert not placer.proven
    # Ten layers of 1 s each, or 40 s of work on two devices.
    assert placer.notes.lower_bound_seconds == pytest.approx(20.0)


def test_a_problem_that_cannot_fit_is_recognised() -> None:
    ops = [op(name, 1.0, variable=60_000) for name in "abc"]
    problem = make_problem(ops, [("a", "b"), ("b", "c")], uniform_cluster(2, memory_bytes=100_000))
    placer = Exact(problem, CP_SAT)
    assert placer.ask(10) == []
    assert placer.notes.why_not == "no placement: the variables do not fit the devices' memory"
    assert placer.proven


def test_without_or_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"the exact placer needs .*placewright\[placers\]"):
        Exact(chains(), CP_SAT).ask(1)


def test_it_solves_beside_tensorflow() -> None:
    # In one process with TensorFlow loaded, OR-Tools' solver crashes.
    pytest.importorskip("tensorflow")
    script = (
        "import tensorflow; from placewright.testing import tiny_problems; "
        "from placewright.placers.exact import Exact, ExactConfig; "
        "exact = Exact(tiny_problems()[1].problem, ExactConfig(max_placements=0)); "
        "print(len(exact.ask(9)), exact.proven)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    count, proven = result.stdout.split()
    assert int(count) >= 1
    assert proven == "True"


def test_a_solver_that_dies_is_said_and_nothing_is_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    exact = Exact(tiny_problems()[1].problem, ExactConfig(max_placements=0))
    assert exact.ask(4) == []
    assert exact.notes.why_not.startswith("CP-SAT ended with code 1")
    assert not exact.proven
