"""Who issues ops: schedules worked out by hand. An op takes 1 s to issue unless said otherwise."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placewright.graph import Graph, Op, Tensor, frozen
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator import (
    Simulator,
    Timeline,
    lower_bounds,
    makeup,
    over_orders,
    shortlisted,
)
from placewright.simulator.makeup import described, range_line
from placewright.simulator.timeline import Delay, Parts
from placewright.testing import make_problem, uniform_cluster

RECORDED = Path(__file__).parents[1] / "recorded"


def issued(
    seconds: Mapping[str, float],
    edges: Sequence[tuple[str, str]],
    issue: str,
    *,
    devices: int = 2,
    overhead: Mapping[str, float] | None = None,
    size: int = 1,
    cpu: bool = False,
) -> Problem:
    ops = [
        Op(name=name, type="Op", outputs=(Tensor(size),), seconds={"dev": time})
        for name, time in seconds.items()
    ]
    cluster = replace(uniform_cluster(devices), issue=issue)
    if cpu:
        kind = replace(cluster.devices[0].kind, type="cpu")
        cluster = replace(cluster, devices=tuple(replace(d, kind=kind) for d in cluster.devices))
    problem = make_problem(ops, edges, cluster)
    times = [(overhead or {}).get(name, 1.0) for name in problem.graph.op_names]
    costs = replace(problem.costs, overhead_seconds=frozen(np.array([times])))
    return replace(problem, costs=costs)


def simulated(problem: Problem, devices: Mapping[str, int] | int) -> Timeline:
    names = problem.graph.op_names
    row = [devices if isinstance(devices, int) else devices[name] for name in names]
    timeline = Simulator(problem).timeline(Placement.of(problem, row))
    assert Simulator(problem).run(np.array([row])).step_seconds[0] == timeline.step_seconds
    assert timeline.step_seconds >= lower_bounds(problem).best
    return timeline


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {
        name: (start, end)
        for name, start, end in zip(
            timeline.problem.graph.op_names,
            timeline.op_start.tolist(),
            timeline.op_end.tolist(),
            strict=True,
        )
    }


CHAIN = [("a", "b"), ("b", "c")]


def test_an_executor_runs_ahead_of_what_computes() -> None:
    slow = issued({"a": 3, "b": 3, "c": 3}, CHAIN, "device")
    # Issued at 1, 2 and 3; the first op starts at 1, and the others are there in time.
    timeline = simulated(slow, 0)
    assert spans(timeline) == {"a": (1, 4), "b": (4, 7), "c": (7, 10)}
    assert timeline.op_issued.tolist() == [1, 2, 3]
    assert timeline.device_parts[0] == Parts(compute=9, overhead=1, waiting=0, idle=0)
    assert timeline.device_parts[1] == Parts(0, 0, 0, 10)
    quick = issued({"a": 0.25, "b": 0.25, "c": 0.25}, CHAIN, "device")
    # Each op waits for its own issuing only, not for that of the one before and for that as well.
    timeline = simulated(quick, 0)
    assert spans(timeline) == {"a": (1, 1.25), "b": (2, 2.25), "c": (3, 3.25)}
    assert timeline.path_parts == Parts(0.25, 3, 0, 0)
    assert [(entry.issues, entry.delay) for entry in timeline.critical_path] == [
        (True, Delay.NOTHING), (True, Delay.INPUT), (True, Delay.INPUT), (False, Delay.ISSUE),
    ]  # fmt: skip


def test_an_executor_does_not_run_ahead_of_what_comes_from_elsewhere() -> None:
    problem = issued({"a": 1, "b": 1, "c": 1}, CHAIN, "device")
    timeline = simulated(problem, {"a": 0, "b": 1, "c": 1})
    # a is issued until 1 and runs 1-2, is sent 2-3; b is issued 3-4 and c 4-5.
    assert spans(timeline) == {"a": (1, 2), "b": (4, 5), "c": (5, 6)}
    assert timeline.device_parts[1] == Parts(compute=2, overhead=1, waiting=1, idle=2)
    assert timeline.path_parts == Parts(compute=2, overhead=3, waiting=1, idle=0)


def test_each_device_has_an_executor_of_its_own() -> None:
    names = [f"op{i}" for i in range(4)]
    problem = issued(dict.fromkeys(names, 0.0), [], "device")
    assert simulated(problem, 0).step_seconds == 4
    assert simulated(problem, dict(zip(names, [0, 1, 0, 1], strict=True))).step_seconds == 2


def test_a_cpu_issues_on_the_cores_it_computes_on() -> None:
    problem = issued({"a": 3, "b": 3}, [("a", "b")], "device", cpu=True)
    timeline = simulated(problem, 0)
    assert spans(timeline) == {"a": (0, 4), "b": (4, 8)}
    assert timeline.device_parts[0] == Parts(6, 2, 0, 0)


def test_one_host_thread_issues_everything_in_the_order_of_the_program() -> None:
    names = [f"op{i}" for i in range(4)]
    problem = issued(dict.fromkeys(names, 0.5), [], "host")
    for devices in ([0, 0, 0, 0], [0, 1, 0, 1]):
        timeline = simulated(problem, dict(zip(names, devices, strict=True)))
        # No matter where they run.
        assert spans(timeline) == {f"op{i}": (i + 1, i + 1.5) for i in range(4)}
        assert timeline.path_parts == Parts(0.5, 4, 0, 0)
    slow = issued(dict.fromkeys(names, 3.0), [], "host")
    assert simulated(slow, 0).step_seconds == 13  # it runs ahead as well
    assert simulated(slow, dict(zip(names, [0, 1, 0, 1], strict=True))).step_seconds == 8


def test_the_host_thread_computes_what_is_on_a_cpu_itself() -> None:
    problem = issued({"a": 3, "b": 1}, [], "host", cpu=True)
    # a is issued 0-1 and takes the thread until 4; b, elsewhere, is issued 4-5.
    timeline = simulated(problem, {"a": 0, "b": 1})
    assert spans(timeline) == {"a": (1, 4), "b": (5, 6)}
    assert timeline.path_parts == Parts(compute=4, overhead=2, waiting=0, idle=0)


def test_nobody_issues_a_captured_graph() -> None:
    problem = issued({"a": 3, "b": 3}, [("a", "b")], "none")
    # What remains is a gap before each kernel, and it belongs to the device.
    assert spans(simulated(problem, 0)) == {"a": (0, 4), "b": (4, 8)}
    both = simulated(problem, {"a": 0, "b": 1})
    assert spans(both) == {"a": (0, 4), "b": (5, 9)}
    assert both.device_parts[1] == Parts(3, 1, 1, 4)


@pytest.mark.parametrize("model", ["rnnlm", "inception_v3"])
def test_problems_from_before_there_was_overhead_take_as_long_as_then(model: str) -> None:
    problem = Problem.load(RECORDED / f"{model}.problem.json.gz")
    assert not problem.costs.overhead_seconds.any()
    journals = json.loads(gzip.decompress((RECORDED / f"{model}.journals.json.gz").read_bytes()))
    seconds = {
        placement: time for run in journals.values() for _, placement, time in run["proposals"]
    }
    known = {text: time for text, time in seconds.items() if time is not None}
    rows = [[int(digit, 36) for digit in text] for text in known]
    result = Simulator(problem).run(np.array(rows))
    assert result.step_seconds[result.ok].tolist() == [
        time for time, ok in zip(known.values(), result.ok, strict=True) if ok
    ]


# --- what an answer rests on ---------------------------------------------------------------------


def test_a_speed_up_that_rests_on_overhead_says_so() -> None:
    names = [f"op{i}" for i in range(8)]
    problem = issued(dict.fromkeys(names, 0.125), [], "device")
    single = Placement.of(problem, [0] * 8)
    split = Placement.of(problem, [0, 1] * 4)
    made = makeup(problem, split, single)
    assert made.speed_up == pytest.approx(8.125 / 4.125)
    assert made.speed_up_without_overhead == 2.0
    assert not made.rests_on_overhead  # computing is spread just as well
    chain = issued(dict.fromkeys(names, 0.0) | {"op0": 1.0}, [("op0", "op1")], "device", size=0)
    split = Placement.of(chain, [0, 0, 1, 1, 1, 1, 0, 0])
    made = makeup(chain, split, Placement.of(chain, [0] * 8))
    assert made.speed_up == 2.0
    assert made.speed_up_without_overhead == 1.0
    assert made.lines() == [
        "along the critical path of the step, 100% is overhead",
        "the speed-up comes from spreading overhead (issuing ops, gaps between kernels) over "
        "devices: without overhead, 1.00x is left",
    ]


def test_gaps_between_kernels_are_overhead_too() -> None:
    names = [f"op{i}" for i in range(4)]
    problem = issued(dict.fromkeys(names, 0.0), [], "device", overhead=dict.fromkeys(names, 0.0))
    costs = replace(problem.costs, gap_seconds=frozen(np.ones((1, 4))))
    problem = replace(problem, costs=costs)
    made = makeup(problem, Placement.of(problem, [0, 1, 0, 1]), Placement.of(problem, [0] * 4))
    assert made.speed_up == 2.0
    assert made.step == Parts(0, 2, 0, 0)
    assert made.rests_on_overhead


def test_without_a_reference_only_the_parts_are_told() -> None:
    problem = issued({"a": 3.0}, [], "none", overhead={"a": 1.0})
    made = makeup(problem, Placement.of(problem, [0]))
    assert made.lines() == ["along the critical path of the step, 75% is computing, 25% overhead"]
    assert described(Parts(0, 0, 0, 0)) == "nothing takes any time"


def ties() -> Problem:
    """Three ops are ready at once on a device; what comes after one of them is long."""
    ops = [
        Op(name=name, type="Op", outputs=(Tensor(0),), seconds={"dev": time})
        for name, time in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("after", 4.0))
    ]
    return make_problem(ops, [("a", "after")], uniform_cluster(2))


def test_the_order_of_ties_is_told_where_it_matters() -> None:
    problem = ties()
    moved = Placement.of(problem, [0, 0, 0, 1])
    alone = Placement.of(problem, [0, 0, 0, 0])
    first, second = over_orders(problem, [moved, alone], 16, seed=3)
    # a first: sent at once, 1 + 4 s; last: 3 + 4.
    assert (first.least_seconds, first.most_seconds) == (5, 7)
    assert 5 < first.mean_seconds < 7
    assert first.unsure
    assert range_line(first).startswith("the order of ops that are ready at the same moment moves")
    assert (second.least_seconds, second.most_seconds, second.mean_seconds) == (7, 7, 7)
    assert range_line(second) == ""
    assert over_orders(problem, [moved, alone], 16, seed=3) == [first, second]
    assert over_orders(problem, [moved], 1)[0].mean_seconds == 5  # the order of the graph
    assert over_orders(problem, []) == []


def test_finalists_are_ranked_by_their_mean() -> None:
    problem = ties()

    def trial(devices: list[int], seconds: float | None) -> Trial:
        measurement = Measurement(outcome=Outcome.FAILED, reason="it broke")
        if seconds is not None:
            measurement = Measurement(outcome=Outcome.OK, step_seconds=(seconds,))
        return Trial(
            placement=Placement.of(problem, devices), measurement=measurement, placer="test"
        )

    lucky, steady = trial([0, 0, 0, 1], 5.0), trial([0, 1, 1, 0], 5.0)
    failed, slow = trial([1, 1, 1, 1], None), trial([0, 0, 0, 0], 7.0)
    trials = [lucky, failed, slow, steady, lucky]
    assert shortlisted(problem, trials, most=2, seed=1) == [steady, lucky]
    assert shortlisted(problem, trials, most=1, seed=1) == [steady]
    assert shortlisted(problem, trials) == [lucky, steady, slow]  # all there are


def test_a_graph_that_costs_nothing() -> None:
    ops = [Op(name=name, type="Op", seconds={"dev": 0.0}) for name in "ab"]
    problem = make_problem(ops, [], uniform_cluster(2))
    made = makeup(problem, Placement.of(problem, [0, 1]), Placement.of(problem, [0, 0]))
    assert made.speed_up == 1.0
    assert not made.rests_on_overhead
    assert over_orders(problem, [Placement.of(problem, [0, 1])])[0].spread == 0


def test_a_cluster_that_does_not_say_leaves_it_to_the_models_framework(tmp_path: Path) -> None:
    seconds = {"a": 0.1, "b": 0.1}
    said = issued(seconds, [], "host")
    graph = replace(said.graph, issue="host")
    left = replace(said, graph=graph, cluster=replace(said.cluster, issue=None))
    apart = {"a": 0, "b": 1}
    assert spans(simulated(left, apart)) == spans(simulated(said, apart))
    executors = replace(left, graph=said.graph)
    assert spans(simulated(executors, apart)) != spans(simulated(said, apart))
    graph.save(tmp_path / "graph.json")
    again = Graph.load(tmp_path / "graph.json")
    assert again == graph != said.graph
    assert again.issue == "host"
