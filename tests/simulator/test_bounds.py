from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placewright.cluster import Cluster
from placewright.graph import Op, Tensor, frozen
from placewright.placement import Placement
from placewright.simulator import Simulator, lower_bounds
from placewright.testing import (
    TinyProblem,
    make_problem,
    random_problem,
    tiny_problems,
    uniform_cluster,
)


def op(name: str, seconds: float, size: int = 0, param_bytes: int = 0) -> Op:
    return Op(
        name=name,
        type="Op",
        outputs=(Tensor(size),),
        seconds={"dev": seconds},
        param_bytes=param_bytes,
    )


def on_streams(cluster: Cluster) -> Cluster:
    """The same devices as streams of one chip."""
    names = {d.name: f"gpu:0/stream:{n}" for n, d in enumerate(cluster.devices)}
    return dataclasses.replace(
        cluster,
        devices=tuple(dataclasses.replace(d, name=names[d.name]) for d in cluster.devices),
        links=tuple(
            dataclasses.replace(link, pairs=tuple((names[a], names[b]) for a, b in link.pairs))
            for link in cluster.links
        ),
    )


def best_of_all(problem_seed: int) -> tuple[float, float]:
    """The best step time of all placements that fit, and the lower bound."""
    problem = random_problem(
        problem_seed, max_ops=10, max_groups=4, max_devices=3, tight_memory=True,
        contention=problem_seed % 2 > 0,
        issue=(None, "device", "host", "none")[problem_seed // 2 % 4],
        chips=problem_seed // 8 % 2 > 0,
    )  # fmt: skip
    choices = itertools.product(range(problem.num_devices), repeat=problem.num_groups)
    result = Simulator(problem).run(np.array(list(choices)))
    fitting = result.step_seconds[result.ok]
    return float(fitting.min(initial=np.inf)), lower_bounds(problem).best


@given(st.integers(0, 2**32 - 1))
def test_no_placement_is_better(seed: int) -> None:
    best, bound = best_of_all(seed)
    assert best >= bound


def test_what_ops_demand_of_one_chip() -> None:
    streams = on_streams(uniform_cluster(2))
    made = make_problem([op(name, 3) for name in "abcd"], [], streams)
    costs = dataclasses.replace(made.costs, demand=frozen(np.full((1, 4), 0.75)))
    problem = dataclasses.replace(made, costs=costs)
    bound = lower_bounds(problem)
    assert bound.work_seconds == pytest.approx(0.75 * 12)  # two at a time would be done in 6
    best = Simulator(problem).run([[0, 0, 1, 1]]).step_seconds[0]
    assert best == pytest.approx(9)


def test_streams_have_no_more_memory_than_their_chip() -> None:
    streams = on_streams(uniform_cluster(2, memory_bytes=100))
    ops = [op("a", 1, param_bytes=60), op("b", 1, param_bytes=60)]
    reason = lower_bounds(make_problem(ops, [], streams)).forced_out_of_memory
    assert reason is not None
    assert "the devices have 100 B together" in reason


def test_critical_path() -> None:
    ops = [op("a", 1), op("b", 2), op("c", 4), op("d", 8)]
    problem = make_problem(ops, [("a", "b"), ("b", "d"), ("a", "c")], uniform_cluster(3))
    assert lower_bounds(problem).critical_path_seconds == 11  # a, b, d


def test_work_of_devices_that_slow_each_other_down() -> None:
    cluster = dataclasses.replace(uniform_cluster(2), contention=0.5)
    problem = make_problem([op(name, 3) for name in "abcd"], [], cluster)
    # 6 s on each device at the same time, all of it 1.5 times as long: not just a bound.
    assert lower_bounds(problem).work_seconds == pytest.approx(9)
    assert Simulator(problem).run([[0, 0, 1, 1]]).step_seconds == pytest.approx(9)
    # So much that one at a time is better.
    cluster = dataclasses.replace(cluster, contention=3.0)
    problem = dataclasses.replace(problem, cluster=cluster)
    assert lower_bounds(problem).work_seconds == pytest.approx(12)


def test_work_is_spread_over_equal_devices() -> None:
    problem = make_problem([op(name, 3) for name in "abcd"], [], uniform_cluster(3, slots=2))
    bounds = lower_bounds(problem)
    assert bounds.work_seconds == pytest.approx(4 * 3 / (3 * 2))
    assert bounds.memory_seconds == bounds.work_seconds
    assert bounds.best == bounds.critical_path_seconds == 3


def test_work_is_spread_over_unequal_devices() -> None:
    # The first takes 1 s per op, the second 3 s: of 8 ops 6 on the first, 2 on the second.
    cluster = uniform_cluster(2)
    slow = dataclasses.replace(cluster.devices[1].kind, name="slow")
    devices = (cluster.devices[0], dataclasses.replace(cluster.devices[1], kind=slow))
    ops = [Op(name=str(i), type="Op", seconds={"dev": 1.0, "slow": 3.0}) for i in range(8)]
    problem = make_problem(ops, [], dataclasses.replace(cluster, devices=devices))
    assert lower_bounds(problem).work_seconds == pytest.approx(6, rel=0.02)


def test_memory_forces_work_to_the_slow_device() -> None:
    # As above, but the fast device has room for the variables of 2 of the 8 ops only: 6 ops of 3 s
    # stay for the slow one.
    cluster = uniform_cluster(2)
    slow = dataclasses.replace(cluster.devices[1].kind, name="slow")
    devices = (
        dataclasses.replace(cluster.devices[0], memory_bytes=20),
        dataclasses.replace(cluster.devices[1], kind=slow),
    )
    ops = [
        Op(name=str(i), type="Op", seconds={"dev": 1.0, "slow": 3.0}, param_bytes=10)
        for i in range(8)
    ]
    problem = make_problem(ops, [], dataclasses.replace(cluster, devices=devices))
    bounds = lower_bounds(problem)
    assert bounds.memory_seconds == pytest.approx(18, rel=0.02)
    assert bounds.best == bounds.memory_seconds
    assert bounds.forced_out_of_memory is None


def test_variables_that_fit_nowhere() -> None:
    ops = [op(name, 1, param_bytes=6 * 10**8) for name in "abcde"]
    problem = make_problem(ops, [], uniform_cluster(2, memory_bytes=10**9))
    bounds = lower_bounds(problem)
    assert bounds.forced_out_of_memory is not None
    assert (
        "needs at least 3 GB (3 GB of variables and 0 B of tensors" in bounds.forced_out_of_memory
    )
    assert "the devices have 2 GB together" in bounds.forced_out_of_memory
    assert bounds.best == np.inf


def test_tensors_alive_at_one_moment_count() -> None:
    # a0 .. a4 wait for the join while b runs: 5 GB of 4.
    ops = [op(f"a{i}", 1, size=10**9) for i in range(5)]
    ops += [op("b", 1), op("join", 1)]
    edges = [(f"a{i}", name) for i in range(5) for name in ("b", "join")] + [("b", "join")]
    problem = make_problem(ops, edges, uniform_cluster(2, memory_bytes=2 * 10**9))
    reason = lower_bounds(problem).forced_out_of_memory
    assert reason is not None
    assert "5 GB of tensors alive while 'b' runs" in reason


def test_a_group_too_large_for_any_device() -> None:
    problem = make_problem(
        [op("a", 1, param_bytes=3 * 10**9), op("b", 1)],
        [],
        uniform_cluster(4, memory_bytes=2 * 10**9),
    )
    reason = lower_bounds(problem).forced_out_of_memory
    assert reason == ("group 'a' alone needs 3 GB, the largest device it can run on has 2 GB")


def test_no_split_fits() -> None:
    # Two ops must go to the small device, which has room for one; the large one would hold both.
    cluster = uniform_cluster(2, memory_bytes=10**9)
    small = dataclasses.replace(cluster.devices[0].kind, name="small", type="small")
    devices = (dataclasses.replace(cluster.devices[0], kind=small), cluster.devices[1])
    ops = [
        Op(name=name, type="Op", seconds={"small": 1.0}, kernels=("small",), param_bytes=7 * 10**8)
        for name in "ab"
    ]
    problem = make_problem(ops, [], dataclasses.replace(cluster, devices=devices))
    assert lower_bounds(problem).forced_out_of_memory == (
        "no split of the groups over the devices keeps all of them within their memory"
    )


@pytest.mark.parametrize("tiny", tiny_problems(), ids=lambda tiny: tiny.name)
def test_tiny_problems(tiny: TinyProblem) -> None:
    problem = tiny.problem
    choices = itertools.product(range(problem.num_devices), repeat=problem.num_groups)
    result = Simulator(problem).run(np.array(list(choices)))
    assert result.step_seconds[result.ok].min() == tiny.best_seconds
    claimed = Simulator(problem).timeline(Placement.of(problem, tiny.best_devices))
    assert claimed.step_seconds == tiny.best_seconds
    assert lower_bounds(problem).best <= tiny.best_seconds
