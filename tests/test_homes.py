"""Weights with homes of their own: what becomes of graph and groups, and who reads what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placewright.cluster import Cluster, from_document, to_document
from placewright.errors import ClusterError, PlacementError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Edge, Graph, Op, Tensor, Work
from placewright.homes import home_ops, untied
from placewright.measurement import Outcome
from placewright.placement import Placement
from placewright.problem import Problem, ProblemConfig, make_problem, with_homes
from placewright.simulator import Simulator
from placewright.stays import How, stays, unit_weights, visits_to
from placewright.testing import random_problem

MB = 10**6


def machine(
    gpu_memory: int = 200 * MB, bandwidth: float = 1e9, pinned: int | None = None
) -> Cluster:
    document = {
        "name": "host and one GPU",
        "kinds": {
            "host": {
                "type": "cpu", "peak_flops": 1e12, "memory_bandwidth": 1e11, "memory": 10**10,
                "dispatch": 0.0,
            },
            "card": {
                "type": "gpu", "peak_flops": 1e13, "memory_bandwidth": 1e12, "memory": gpu_memory,
                "dispatch": 0.0,
            },
        },
        "devices": [
            {"name": "cpu:0", "kind": "host", **({} if pinned is None else {"pinned": pinned})},
            {"name": "gpu:0", "kind": "card"},
        ],
        "links": [
            {"name": "pcie", "latency": 0.0, "bandwidth": bandwidth, "pairs": [["cpu:0", "gpu:0"]]}
        ],
        "issue": "none",
    }  # fmt: skip
    return from_document(document, where="machine")


def layers(
    count: int = 4, size: int = 100 * MB, gpu: float = 1.0, cpu: float = 8.0, train: bool = False
) -> Graph:
    """A chain of layers; each reads its weight through a view, as PyTorch's linear layers do."""
    ops = [Op(name="input", type="input", outputs=(Tensor(8),), work=Work.NONE)]
    edges = []
    for i in range(count):
        tie = (f"layer{i}",)
        ops += [
            Op(name=f"l{i}/w", type="parameter", outputs=(Tensor(size),), param_bytes=size,
               colocate=tie, work=Work.NONE),
            Op(name=f"l{i}/t", type="aten.t", outputs=(Tensor(size, shares=(f"l{i}/w", 0)),),
               colocate=tie, work=Work.NONE),
            Op(name=f"l{i}/mm", type="aten.mm", outputs=(Tensor(8),), colocate=tie, flops=1.0,
               seconds={"gpu": gpu, "cpu": cpu}),
        ]  # fmt: skip
        before = f"l{i - 1}/mm" if i else "input"
        edges += [Edge(f"l{i}/w", f"l{i}/t"), Edge(f"l{i}/t", f"l{i}/mm"), Edge(before, f"l{i}/mm")]
    after = f"l{count - 1}/mm"
    for i in reversed(range(count) if train else []):
        tie = (f"layer{i}",)
        ops += [
            Op(name=f"l{i}/grad/mm", type="aten.mm", outputs=(Tensor(8), Tensor(size)),
               colocate=tie, flops=1.0, seconds={"gpu": gpu, "cpu": cpu},
               gradient_of=f"l{i}/mm"),
            Op(name=f"l{i}/w/m", type="state", outputs=(Tensor(size),), slot_bytes=size,
               colocate=tie, work=Work.NONE),
            Op(name=f"l{i}/w/update", type="update", colocate=tie, work=Work.UPDATE,
               seconds={"gpu": 0.25, "cpu": 0.5}),
        ]  # fmt: skip
        edges += [
            Edge(after, f"l{i}/grad/mm"), Edge(f"l{i}/t", f"l{i}/grad/mm"),
            Edge(f"l{i}/grad/mm", f"l{i}/w/update", 1), Edge(f"l{i}/w", f"l{i}/w/update"),
            Edge(f"l{i}/w/m", f"l{i}/w/update"),
        ]  # fmt: skip
        after = f"l{i}/grad/mm"
    rules = [(r"^l(\d+)/", r"l\1"), ("^input", "l0")]
    return Graph.from_ops("layers", ops, edges, rules)


def posed(graph: Graph, cluster: Cluster | None = None, **config: object) -> Problem:
    made = ProblemConfig(homes=True, **config)  # type: ignore[arg-type]
    return make_problem(graph, cluster or machine(), made)


def placed(problem: Problem, **where: str) -> Placement:
    """`l0="gpu:0"` puts both there, `l0="gpu:0 cpu:0"` computes on the one with weights of the
    other."""
    numbers = {}
    for unit, text in where.items():
        device, _, home = text.partition(" ")
        numbers[unit] = problem.cluster.device_number(device)
        numbers[f"{unit}/weights"] = problem.cluster.device_number(home or device)
    return Placement.of(problem, [numbers[name] for name in problem.grouping.names])


def test_groups_are_split_and_ops_stay() -> None:
    graph = layers(2)
    problem = posed(graph)
    assert problem.graph.op_names == graph.op_names
    assert problem.grouping.names == ("l0", "l0/weights", "l1/weights", "l1")
    sizes = dict(zip(problem.grouping.names, problem.group_resident_bytes.tolist(), strict=True))
    assert sizes == {"l0": 0, "l0/weights": 100 * MB, "l1/weights": 100 * MB, "l1": 0}
    assert problem.space != make_problem(graph, machine()).space


def test_views_neither_take_memory_nor_send_anything() -> None:
    problem = posed(layers(1))
    graph = problem.graph
    view = graph.op_index["l0/t"]
    assert view not in graph.edge_dst.tolist()
    assert view not in graph.edge_src.tolist()
    weights = unit_weights(problem)
    names = problem.grouping.names
    assert {names[u]: {names[h]: b for h, b in of.items()} for u, of in weights.items()} == {
        "l0": {"l0/weights": 100 * MB}
    }
    # What ops cost has not changed by that.
    assert np.array_equal(graph.moved_bytes, layers(1).moved_bytes)
    assert np.array_equal(graph.work, layers(1).work)


def test_a_view_that_waits_for_something_else_still_does() -> None:
    ops = [
        Op(name="begin", type="t", flops=1.0),
        Op(name="w", type="parameter", outputs=(Tensor(8),), param_bytes=8, work=Work.NONE),
        Op(name="v", type="v", outputs=(Tensor(8, shares=("w", 0)),), work=Work.NONE),
        Op(name="vv", type="v", outputs=(Tensor(8, shares=("w", 0)),), work=Work.NONE),
        Op(name="use", type="mm", flops=1.0),
    ]
    edges = [Edge("begin", "v", None), Edge("w", "v"), Edge("v", "vv"), Edge("vv", "use")]
    graph = untied(Graph.from_ops("g", ops, edges))
    assert set(graph.edges()) == {
        Edge("begin", "v", None), Edge("v", "vv"), Edge("vv", "use"), Edge("w", "use"),
    }  # fmt: skip
    assert graph.tensor_bytes[graph.output_offsets[graph.op_index["vv"]]] == 0


def test_buffers_stay_with_their_readers() -> None:
    ops = [
        Op(name="cache", type="buffer", outputs=(Tensor(8),), param_bytes=8, colocate=("a",)),
        Op(name="use", type="mm", flops=1.0, colocate=("a",)),
    ]
    graph = Graph.from_ops("g", ops, [Edge("cache", "use")])
    assert not home_ops(graph).any()
    assert posed(graph).num_groups == 1


def test_homes_come_by_themselves_only_where_weights_do_not_fit() -> None:
    graph = layers(4)
    assert make_problem(graph, machine(gpu_memory=500 * MB)).homes is None
    assert make_problem(graph, machine(gpu_memory=399 * MB)).homes is not None
    assert make_problem(graph, machine(399 * MB), ProblemConfig(homes=False)).homes is None
    assert make_problem(graph, Cluster.load("cpu2")).homes is None  # there is no accelerator
    with pytest.raises(PlacementError, match="`window` is for weights with homes"):
        make_problem(graph, machine(500 * MB), ProblemConfig(window=5))
    with pytest.raises(PlacementError, match="at least 1 byte"):
        posed(graph, window=0)
    with pytest.raises(PlacementError, match="window for weights must be a number with a unit"):
        posed(graph, window="a lot")
    homes = posed(graph, window="2MiB").homes
    assert homes is not None
    assert homes.window_bytes == 2 << 20


def test_a_problem_with_homes_is_read_as_it_was_written(tmp_path: Path) -> None:
    problem = posed(layers(3), machine(pinned=7 * MB), window=123)
    problem.save(tmp_path / "problem.json")
    again = Problem.load(tmp_path / "problem.json")
    assert again == problem
    assert again.homes == problem.homes
    assert again.cluster.devices[0].pinnable_bytes == 7 * MB
    assert again.space == problem.space
    wider = with_homes(problem, 1000)
    assert wider.fingerprint != problem.fingerprint
    assert wider.space == problem.space


def test_constraints_hold_for_both_parts() -> None:
    problem = posed(layers(2), pins=(("l0/mm", "cpu:0"),))
    allowed = dict(zip(problem.grouping.names, problem.allowed.tolist(), strict=True))
    assert allowed["l0"] == allowed["l0/weights"] == [True, False]
    assert allowed["l1"] == [True, True]


def test_pinned_memory_in_a_cluster_file() -> None:
    cluster = machine(pinned=5)
    assert from_document(to_document(cluster), where="again") == cluster
    assert cluster.devices[0].pinnable_bytes == 5
    assert machine().devices[0].pinnable_bytes == 10**10
    with pytest.raises(ClusterError, match="pinned memory of device 'cpu:0' must not be negative"):
        machine(pinned=-1)


# --- in the simulator ----------------------------------------------------------------------------


def run(problem: Problem, placement: Placement) -> float:
    (seconds,) = Simulator(problem).run(placement.devices[np.newaxis]).step_seconds.tolist()
    return float(seconds)


def test_weights_come_ahead_of_time() -> None:
    # 100 MB take 0.1 s on the link, a layer 1 s on the GPU: only the first is waited for.
    problem = posed(layers(3), window=200 * MB)
    placement = placed(problem, l0="gpu:0 cpu:0", l1="gpu:0 cpu:0", l2="gpu:0 cpu:0")
    timeline = Simulator(problem).timeline(placement)
    # The third finds no room before the first is let go of, at 1.1 s.
    assert np.allclose(timeline.transfers.start, [0, 0.1, 1.1])
    assert timeline.step_seconds == pytest.approx(3.1)
    assert timeline.peak_bytes.tolist()[1] in range(200 * MB, 200 * MB + 100)
    narrow = posed(layers(3), window=100 * MB)
    again = placed(narrow, l0="gpu:0 cpu:0", l1="gpu:0 cpu:0", l2="gpu:0 cpu:0")
    assert run(narrow, again) == pytest.approx(3.3)
    # A window smaller than any weight lets one in at a time all the same.
    tiny = with_homes(narrow, 1)
    assert run(tiny, Placement.of(tiny, again.devices)) == pytest.approx(3.3)


def test_what_is_computed_where_it_is_at_home_travels_nowhere() -> None:
    problem = posed(layers(2))
    placement = placed(problem, l0="gpu:0", l1="cpu:0")
    timeline = Simulator(problem).timeline(placement)
    assert [int(b) for b in timeline.transfers.bytes] == [8]
    assert timeline.step_seconds == pytest.approx(9.0, abs=1e-6)
    assert visits_to(problem, placement) == {}
    assert [(s.unit, s.how) for s in stays(problem, placement)] == [
        ("l0", How.RESIDENT), ("l1", How.HOST),
    ]  # fmt: skip


def test_forward_and_backward_are_two_visits() -> None:
    problem = posed(layers(3, train=True), window=150 * MB)
    placement = placed(problem, l0="gpu:0 cpu:0", l1="gpu:0 cpu:0", l2="gpu:0")
    names = problem.graph.op_names
    (coming,) = visits_to(problem, placement).values()
    assert [(names[v.op], [names[r] for r in v.readers]) for v in coming] == [
        ("l0/w", ["l0/mm"]),
        ("l1/w", ["l1/mm"]),
        ("l1/w", ["l1/grad/mm"]),
        ("l0/w", ["l0/grad/mm"]),
    ]
    timeline = Simulator(problem).timeline(placement)
    # The gradients of both go to where the weights are, and are applied there.
    updates = [problem.graph.op_index[f"l{i}/w/update"] for i in range(3)]
    assert timeline.op_device[updates].tolist() == [0, 0, 1]
    sent = timeline.transfers
    down = [
        (names[op], int(size))
        for op, size, to in zip(sent.producer, sent.bytes, sent.target, strict=True)
        if to == 0
    ]
    assert down == [("l1/grad/mm", 100 * MB), ("l0/grad/mm", 100 * MB)]
    # With room for all of them they stay from the forward to the backward pass.
    wide = with_homes(problem, 300 * MB)
    (coming,) = visits_to(wide, Placement.of(wide, placement.devices)).values()
    assert [names[v.op] for v in coming] == ["l0/w", "l1/w"]


def test_weights_that_travel_are_pinned() -> None:
    problem = posed(layers(3), machine(pinned=150 * MB), window=200 * MB)
    streams_one = placed(problem, l0="gpu:0 cpu:0", l1="cpu:0", l2="cpu:0")
    streams_two = placed(problem, l0="gpu:0 cpu:0", l1="gpu:0 cpu:0", l2="cpu:0")
    result = Simulator(problem).run(np.stack([streams_one.devices, streams_two.devices]))
    assert result.pinned_bytes.tolist() == [[100 * MB, 0], [200 * MB, 0]]
    assert result.overflow_device.tolist() == [-1, 0]
    _, measurement = SimulatedEvaluator(problem).evaluate([streams_one, streams_two])
    assert measurement.outcome is Outcome.OUT_OF_MEMORY
    assert measurement.reason == (
        "cpu:0 would have to pin 200 MB of weights that travel from there, can pin 150 MB"
    )


@given(st.integers(0, 2**32 - 1))
def test_every_read_from_elsewhere_is_in_one_visit(seed: int) -> None:
    problem = random_problem(seed, homes=True)
    rng = np.random.default_rng(seed)
    row = rng.integers(problem.num_devices, size=problem.num_groups, dtype=np.int32)
    placement = Placement.of(problem, row)
    device_of = row[problem.grouping.group_of]
    coming = visits_to(problem, placement)
    reads = [
        (visit.op, reader) for visits in coming.values() for visit in visits
        for reader in visit.readers
    ]  # fmt: skip
    assert len(set(reads)) == len(reads)
    assert all(device_of[op] != device_of[reader] for op, reader in reads)
    assert problem.pinned_bytes(row[np.newaxis]).sum() <= problem.graph.param_bytes.sum()


def test_units_of_the_user_are_split_too() -> None:
    problem = posed(layers(4), together=("l[12]/",))
    assert problem.units is not None
    refined = problem.refined
    assert refined.homes == problem.homes
    assert "l[12]//weights" in refined.grouping.names
    # The input, and two groups for each of l0, l1 with l2, and l3.
    assert refined.num_groups == 7
