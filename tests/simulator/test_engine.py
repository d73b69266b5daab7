"""The engine against the plain reference, and what must hold of any simulation."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placewright.cluster import Cluster, Link
from placewright.costs import estimate_costs
from placewright.errors import CostsError, PlacementError
from placewright.graph import Edge, Graph, IndexArray, Op, Tensor, frozen
from placewright.grouping import each_op
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator import Simulation, Simulator, lower_bounds
from placewright.simulator.compiling import compiled
from placewright.simulator.kernel import simulate
from placewright.testing import (
    gpu_boards,
    layered_graph,
    make_problem,
    random_problem,
    uniform_cluster,
)

if TYPE_CHECKING:
    from tests.simulator.reference import Outcome

Reference = Callable[..., "Outcome"]

seeds = st.integers(0, 2**32 - 1)


def placements(problem: Problem, seed: int, count: int) -> IndexArray:
    rng = np.random.default_rng(seed)
    return rng.integers(problem.num_devices, size=(count, problem.num_groups), dtype=np.int32)


def random_case(seed: int) -> Problem:
    return random_problem(
        seed, max_ops=20, max_groups=20, tight_memory=True,
        overhead=seed % 2 == 1, gaps=seed % 3 > 0, contention=seed % 5 > 2,
        issue=(None, None, "device", "host", "none")[seed // 30 % 5],
        chips=seed // 150 % 3 == 1,
    )  # fmt: skip


def case_with_homes(seed: int) -> Problem:
    return random_problem(
        seed, max_ops=20, max_groups=20, tight_memory=seed % 2 == 1, homes=True,
        overhead=seed % 4 == 1, gaps=seed % 3 > 0, contention=seed % 5 > 3,
        issue=(None, None, "device", "host", "none")[seed // 60 % 5], chips=seed % 7 > 4,
    )  # fmt: skip


def layered_problem(ops: int, width: int, cluster: Cluster | None = None) -> Problem:
    graph = layered_graph(ops, width)
    cluster = cluster or gpu_boards()
    return Problem(
        graph=graph, grouping=each_op(graph), cluster=cluster, costs=estimate_costs(graph, cluster)
    )


def same(one: Simulation, other: Simulation) -> bool:
    fields = [field.name for field in dataclasses.fields(Simulation)]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in fields)


# --- against the reference -----------------------------------------------------------------------


def check_against(reference: Reference, problem: Problem, rows: IndexArray) -> None:
    result = Simulator(problem).run(rows)
    for i, row in enumerate(rows):
        expected = reference(problem, row.tolist())
        assert result.step_seconds[i] == expected.step_seconds
        assert result.peak_bytes[i].tolist() == expected.peak_bytes
        assert result.pinned_bytes[i].tolist() == expected.pinned_bytes
        assert result.overflow_device[i] == expected.overflow_device
        count = len(expected.overflow_tensors)
        assert result.overflow_tensors[i, :count].tolist() == expected.overflow_tensors
        assert result.overflow_bytes[i, :count].tolist() == expected.overflow_bytes
        assert np.all(result.overflow_tensors[i, count:] == -1)


@given(seeds)
def test_equals_the_reference(reference: Reference, seed: int) -> None:
    problem = random_case(seed)
    check_against(reference, problem, placements(problem, seed, 4))


@given(seeds)
def test_equals_the_reference_with_weights_that_travel(reference: Reference, seed: int) -> None:
    problem = case_with_homes(seed)
    check_against(reference, problem, placements(problem, seed, 6))


@pytest.mark.parametrize("cluster", ["k80x4", "h100x8", "cpu2"])
def test_equals_the_reference_on_larger_graphs(reference: Reference, cluster: str) -> None:
    # Costs from FLOPs and bytes, so that sums are rounded as in earnest.
    problem = layered_problem(200, 10, Cluster.load(cluster))
    check_against(reference, problem, placements(problem, 0, 3))


@given(seeds)
def test_equals_the_reference_in_any_order_of_ties(reference: Reference, seed: int) -> None:
    problem = random_case(seed)
    priority = np.random.default_rng(seed).permutation(problem.graph.num_ops)
    rows = placements(problem, seed, 3)
    result = Simulator(problem).run(rows, priority)
    for row, seconds in zip(rows, result.step_seconds, strict=True):
        assert reference(problem, row.tolist(), priority.tolist()).step_seconds == seconds


@given(seeds)
def test_timeline_equals_the_reference(reference: Reference, seed: int) -> None:
    check_timeline(reference, random_case(seed), seed)


@given(seeds)
def test_timeline_equals_the_reference_with_weights_that_travel(
    reference: Reference, seed: int
) -> None:
    check_timeline(reference, case_with_homes(seed), seed)


def check_timeline(reference: Reference, problem: Problem, seed: int) -> None:
    row = placements(problem, seed, 1)[0]
    expected = reference(problem, row.tolist())
    timeline = Simulator(problem).timeline(Placement.of(problem, row))
    ops = range(problem.graph.num_ops)
    assert timeline.op_start.tolist() == [expected.op_start[op] for op in ops]
    assert timeline.op_end.tolist() == [expected.op_end[op] for op in ops]
    assert timeline.op_slot.tolist() == [expected.op_slot[op] for op in ops]
    sent = timeline.transfers
    columns = (
        sent.tensor, sent.source, sent.target, sent.request, sent.start, sent.free, sent.end,
    )  # fmt: skip
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected.transfers


# --- what holds of any simulation ----------------------------------------------------------------


@given(seeds)
def test_never_below_the_lower_bounds(seed: int) -> None:
    problem = random_case(seed)
    bounds = lower_bounds(problem)
    result = Simulator(problem).run(placements(problem, seed, 10))
    assert np.all(result.step_seconds[result.ok] >= bounds.best)
    if bounds.forced_out_of_memory:
        assert not result.ok.any()


@given(seeds)
def test_never_below_the_lower_bounds_with_weights_that_travel(seed: int) -> None:
    problem = case_with_homes(seed)
    bounds = lower_bounds(problem)
    result = Simulator(problem).run(placements(problem, seed, 20))
    assert np.all(result.step_seconds[result.ok] >= bounds.best)
    if bounds.forced_out_of_memory:
        assert not result.ok.any()


@given(seeds)
def test_one_slot_takes_the_sum_of_all_costs(seed: int) -> None:
    problem = random_problem(seed)
    cluster = uniform_cluster(1)
    graph = dataclasses.replace(
        problem.graph, measured_seconds={"dev": problem.graph.measured_seconds["kind0"]}
    )
    alone = Problem(
        graph=graph, grouping=each_op(graph), cluster=cluster, costs=estimate_costs(graph, cluster)
    )
    result = Simulator(alone).run(np.zeros((1, graph.num_ops), dtype=np.int32))
    assert result.step_seconds[0] == alone.op_seconds[0].sum()  # exact: multiples of 1/1024


@given(seeds)
def test_one_device_sends_nothing_and_does_not_care_for_bandwidth(seed: int) -> None:
    problem = random_problem(seed)
    links = tuple(
        dataclasses.replace(link, bandwidth=link.bandwidth * 16) for link in problem.cluster.links
    )
    faster = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, links=links))
    for device in range(problem.num_devices):
        row = np.full((1, problem.num_groups), device, dtype=np.int32)
        timeline = Simulator(problem).timeline(Placement.of(problem, row[0]))
        assert len(timeline.transfers) == 0
        seconds = Simulator(faster).run(row).step_seconds[0]
        assert seconds == timeline.step_seconds


@given(seeds)
def test_peak_is_at_least_what_is_resident(seed: int) -> None:
    problem = random_case(seed)
    rows = placements(problem, seed, 3)
    result = Simulator(problem).run(rows)
    for row, peak in zip(rows, result.peak_bytes, strict=True):
        resident = np.zeros(problem.num_devices, dtype=np.int64)
        np.add.at(resident, row, problem.group_resident_bytes)
        assert np.all(peak >= resident)


@given(seeds)
def test_out_of_memory_is_a_peak_above_the_memory(seed: int) -> None:
    problem = random_case(seed)
    memory = [device.memory_bytes for device in problem.cluster.devices]
    result = Simulator(problem).run(placements(problem, seed, 5))
    assert np.array_equal((result.peak_bytes > memory).any(axis=1), result.overflow_device >= 0)


# --- batches and threads -------------------------------------------------------------------------


def test_a_batch_is_what_its_rows_are_one_by_one() -> None:
    problem = layered_problem(300, 12)
    rows = placements(problem, 1, 12)
    simulator = Simulator(problem)
    batch = simulator.run(rows)
    for i, row in enumerate(rows):
        single = simulator.run(row[np.newaxis])
        assert single.step_seconds[0] == batch.step_seconds[i]
        assert np.array_equal(single.peak_bytes[0], batch.peak_bytes[i])


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    problem = layered_problem(300, 12)
    rows = placements(problem, 2, 13)
    expected = Simulator(problem, threads=1).run(rows)
    assert same(Simulator(problem, threads=threads).run(rows), expected)


def test_a_forked_process_has_threads_of_its_own() -> None:
    """In a process of its own: forking one with threads is a warning in newer Pythons."""
    script = """
import os, signal
import numpy as np
from placewright.simulator import Simulator
from placewright.testing import random_problem
problem = random_problem(0)
simulator = Simulator(problem, threads=3)
rows = np.tile(problem.allowed.argmax(axis=1), (50, 1))
expected = simulator.run(rows).step_seconds
child = os.fork()
if not child:
    signal.alarm(60)  # ends it should it wait for a thread that is not there
    os._exit(0 if (simulator.run(rows).step_seconds == expected).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_threads_may_share_a_simulator() -> None:
    problem = layered_problem(300, 12)
    rows = placements(problem, 3, 8)
    simulator = Simulator(problem, threads=2)
    expected = simulator.run(rows)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: simulator.run(rows), range(12)):
            assert same(result, expected)


def test_runs_out_of_memory_leave_no_trace_in_the_next() -> None:
    problem = random_problem(7, max_groups=14, tight_memory=True)
    rows = placements(problem, 4, 20)
    simulator = Simulator(problem, threads=1)
    first = simulator.run(rows)
    assert (first.overflow_device >= 0).any()
    assert same(simulator.run(rows), first)
    (scratch,) = simulator._scratches
    assert not scratch.holders[: -problem.num_devices].any()
    free = [int(scratch.free[0])]
    while free[-1] < len(scratch.entries) - 1:
        free.append(int(scratch.entries["next"][free[-1]]))
    assert sorted(free) == list(range(len(scratch.entries)))  # each queue gave back all it took


def test_pickles() -> None:
    problem = random_problem(0)
    rows = placements(problem, 0, 3)
    simulator = Simulator(problem, threads=1)
    copy = pickle.loads(pickle.dumps(simulator))
    assert copy.threads == 1
    assert same(copy.run(rows), simulator.run(rows))


def test_no_placements() -> None:
    problem = random_problem(0)
    result = Simulator(problem).run(np.zeros((0, problem.num_groups), dtype=np.int32))
    assert result.step_seconds.shape == (0,)
    assert result.ok.shape == (0,)


# --- what the user can get wrong -----------------------------------------------------------------


def kernels_problem() -> Problem:
    ops = [
        Op(name="a", type="MatMul", outputs=(Tensor(1),), seconds={"dev": 1.0}),
        Op(name="b", type="Lookup", kernels=("cpu",), seconds={"core": 1.0}),
    ]
    cluster = uniform_cluster(1)
    core = dataclasses.replace(cluster.devices[0].kind, name="core", type="cpu")
    cpu = dataclasses.replace(cluster.devices[0], name="cpu:0", kind=core)
    joined = uniform_cluster(2)
    links = tuple(dataclasses.replace(link, pairs=(("dev:0", "cpu:0"),)) for link in joined.links)
    return make_problem(
        ops,
        [("a", "b")],
        dataclasses.replace(cluster, devices=(*cluster.devices, cpu), links=links),
    )


def test_a_missing_kernel_fails_without_simulation() -> None:
    problem = kernels_problem()
    result = Simulator(problem).run(np.array([[0, 0], [0, 1]]))
    assert result.failed_op.tolist() == [1, -1]
    assert result.ok.tolist() == [False, True]
    assert np.isinf(result.step_seconds[0])
    assert result.peak_bytes[0].tolist() == [0, 0]
    with pytest.raises(PlacementError, match=r"op 'b' \(Lookup\) of group 'b' has no kernel for"):
        Simulator(problem).timeline(Placement.of(problem, [0, 0]))


def test_a_forbidden_device_fails_too() -> None:
    problem = make_problem(
        [Op(name="a", type="Op"), Op(name="b", type="Op")], [], uniform_cluster(2)
    )
    forbidden = np.array([[False, False], [True, False]])
    problem = dataclasses.replace(problem, forbidden=forbidden)
    result = Simulator(problem).run(np.array([[0, 0], [0, 1]]))
    assert result.failed_op.tolist() == [1, -1]
    with pytest.raises(PlacementError, match="'b' is kept off dev:0 by a constraint"):
        Simulator(problem).timeline(Placement.of(problem, [0, 0]))


def test_bad_placements() -> None:
    problem = random_problem(3)
    simulator = Simulator(problem)
    with pytest.raises(PlacementError, match=rf"\[any, {problem.num_groups} groups\], not int"):
        simulator.run(np.zeros(problem.num_groups, dtype=np.int32))
    with pytest.raises(PlacementError, match="not float64 of shape"):
        simulator.run(np.zeros((1, problem.num_groups)))
    with pytest.raises(PlacementError, match="device numbers -1 to -1"):
        simulator.run(np.full((1, problem.num_groups), -1))
    with pytest.raises(PlacementError, match=f"has {problem.num_devices} devices"):
        simulator.run(np.full((1, problem.num_groups), problem.num_devices))


def test_times_that_add_up_to_infinity() -> None:
    ops = [
        Op(name="a", type="Op", outputs=(Tensor(2**50),), seconds={"dev": 1.0}),
        Op(name="b", type="Op", seconds={"dev": 1.0}),
    ]
    with pytest.raises(CostsError, match="in the right unit"):
        Simulator(make_problem(ops, [("a", "b")], uniform_cluster(2, bandwidth=1e-300)))


# --- size ----------------------------------------------------------------------------------------


def test_many_ops() -> None:
    # Past 46,341 ops a product of two indices no longer fits 32 bits.
    n = 60_000
    ops = [Op(name=str(i), type="Op", outputs=(Tensor(1),), seconds={"dev": 1.0}) for i in range(n)]
    graph = Graph.from_ops("chain", ops, [Edge(str(i), str(i + 1)) for i in range(n - 1)])
    cluster = uniform_cluster(2)
    problem = Problem(
        graph=graph, grouping=each_op(graph), cluster=cluster, costs=estimate_costs(graph, cluster)
    )
    rows = np.zeros((2, n), dtype=np.int32)
    rows[1, n // 2 :] = 1
    result = Simulator(problem).run(rows)
    assert result.step_seconds.tolist() == [n, n + 1]
    assert result.peak_bytes.tolist() == [[2, 0], [2, 2]]


# --- chips, relays and order ---------------------------------------------------------------------


def streams(count: int = 2, *, in_order: bool = False) -> Cluster:
    plain = uniform_cluster(count)
    names = {d.name: f"gpu:0/stream:{n}" for n, d in enumerate(plain.devices)}
    return dataclasses.replace(
        plain,
        issue="none",
        in_order=in_order,
        devices=tuple(dataclasses.replace(d, name=names[d.name]) for d in plain.devices),
        links=tuple(
            dataclasses.replace(
                link, bandwidth=1e18, pairs=tuple((names[a], names[b]) for a, b in link.pairs)
            )
            for link in plain.links
        ),
    )


def with_demand(problem: Problem, demand: list[float]) -> Problem:
    costs = dataclasses.replace(problem.costs, demand=frozen(np.array([demand])))
    return dataclasses.replace(problem, costs=costs)


def test_ops_that_want_more_than_the_chip_has_slow_each_other_down() -> None:
    ops = [Op(name=n, type="Op", seconds={"dev": s}) for n, s in (("a", 4.0), ("b", 2.0))]
    problem = with_demand(make_problem(ops, [], streams()), [1.0, 0.5])
    timeline = Simulator(problem).timeline(Placement.of(problem, [0, 1]))
    # Both at 2/3 of their speed until b ends after 3; a, which has done 2 of 4 by then, goes on.
    assert timeline.op_end.tolist() == pytest.approx([5.0, 3.0])
    assert Simulator(problem).run([[0, 0]]).step_seconds[0] == 6.0
    alone = with_demand(problem, [0.5, 0.5])
    assert Simulator(alone).run([[0, 1]]).step_seconds[0] == 4.0


def test_a_tensor_on_two_streams_is_there_once() -> None:
    ops = [
        Op(name="a", type="Op", outputs=(Tensor(100),), seconds={"dev": 1.0}),
        Op(name="b", type="Op", outputs=(Tensor(7),), seconds={"dev": 1.0}),
        Op(name="c", type="Op", seconds={"dev": 1.0}, param_bytes=20),
    ]
    problem = make_problem(ops, [("a", "b")], streams())
    assert Simulator(problem).run([[0, 1, 1]]).peak_bytes.tolist() == [[127, 127]]
    assert Simulator(problem).run([[0, 0, 0]]).peak_bytes.tolist() == [[127, 127]]
    tight = dataclasses.replace(
        problem.cluster,
        devices=tuple(dataclasses.replace(d, memory_bytes=126) for d in problem.cluster.devices),
    )
    full = Simulator(dataclasses.replace(problem, cluster=tight)).run([[0, 1, 1]])
    assert not full.ok[0]
    assert full.overflow_device[0] == 0


def test_what_is_relayed_goes_to_the_host_once_and_then_on() -> None:
    plain = uniform_cluster(4, latency_seconds=1.0)
    link = Link(
        name="port", latency_seconds=1.0, bandwidth=1.0, relays=True,
        pairs=(("dev:0", "dev:3"), ("dev:1", "dev:3"), ("dev:2", "dev:3")),
    )  # fmt: skip
    cluster = dataclasses.replace(plain, links=(link,))
    ops = [Op(name="a", type="Op", outputs=(Tensor(4),), seconds={"dev": 1.0})]
    ops += [Op(name=n, type="Op", seconds={"dev": 1.0}) for n in "bcd"]
    problem = make_problem(ops, [("a", n) for n in "bcd"], cluster)
    timeline = Simulator(problem).timeline(Placement.of(problem, [0, 1, 2, 3]))
    # There at 6 on the host, from which the copies to the others follow each other.
    assert timeline.transfers.end.tolist() == [11.0, 16.0, 6.0]
    assert timeline.op_start[1:].tolist() == [11.0, 16.0, 6.0]


def test_devices_may_keep_to_the_order_of_the_program() -> None:
    ops = [Op(name=n, type="Op", seconds={"dev": s}) for n, s in zip("abc", (3.0, 1.0, 2.0),
           strict=True)]  # fmt: skip
    edges = [Edge("a", "b", None)]
    freely = make_problem(ops, edges, streams())
    in_order = make_problem(ops, edges, streams(in_order=True))
    # c need not wait for anything, but comes behind b, which waits for a.
    assert Simulator(freely).run([[0, 1, 1]]).step_seconds[0] == 4.0
    timeline = Simulator(in_order).timeline(Placement.of(in_order, [0, 1, 1]))
    assert timeline.op_start.tolist() == [0.0, 3.0, 4.0]
    assert timeline.step_seconds == 6.0


def test_what_is_there_from_the_start_is_in_no_order() -> None:
    ops = [
        Op(name="slow", type="Op", seconds={"dev": 3.0}),
        Op(name="waits", type="Op", seconds={"dev": 1.0}),
        Op(name="parameter", type="Op", outputs=(Tensor(1),), seconds={"dev": 0.0}),
        Op(name="reader", type="Op", seconds={"dev": 1.0}),
    ]
    edges = [Edge("slow", "waits", None), Edge("parameter", "reader")]
    problem = make_problem(ops, edges, streams(3, in_order=True))
    timeline = Simulator(problem).timeline(Placement.of(problem, [0, 1, 1, 2]))
    assert timeline.op_start.tolist() == pytest.approx([0.0, 3.0, 0.0, 0.0])


# --- compilation ---------------------------------------------------------------------------------


def test_compiles_once_for_all_problems() -> None:
    for seed in range(24):
        made = random_problem(
            seed, contention=seed % 2 > 0, issue=(None, "device", "host")[seed % 3],
            chips=seed // 6 % 2 > 0, homes=seed >= 12,
        )  # fmt: skip
        problem = pickle.loads(pickle.dumps(made))
        simulator = Simulator(problem)
        placement = Placement.of(problem, [0] * problem.num_groups)
        simulator.run(placement.devices[np.newaxis])
        simulator.timeline(placement)
    kernel: Any = simulate
    # With a log and without: with contention, without, and where ops are issued; where devices
    # share a chip, with and without issuing; and the same where weights travel.
    assert len(kernel.signatures) == 14


def test_without_a_place_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    njit: Any = numba.njit

    def refusing(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", refusing)

    @compiled
    def double(x: int) -> int:
        return 2 * x

    assert double(21) == 42
