from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from placewright.cluster import ISSUES, Cluster, Device, DeviceKind, Link
from placewright.costs import Costs, Source, estimate_costs
from placewright.errors import CostsError
from placewright.graph import Edge, Graph, Op, Tensor, Work
from tests.strategies import graphs

MB = 1_000_000

GPU = DeviceKind(
    name="g",
    type="gpu",
    peak_flops=1e12,
    memory_bandwidth=1e11,
    memory_bytes=10**9,
    dispatch_seconds=1e-6,
    launch_seconds=2e-6,
    efficiency={"conv": 0.5, "matmul": 0.25, "memory": 0.5, "tiny": 0.1},
)
CPU = DeviceKind(name="c", type="cpu", peak_flops=1e10, memory_bandwidth=1e10, memory_bytes=10**9)
CLUSTER = Cluster(
    name="two",
    devices=(
        Device(name="gpu:0", kind=GPU, memory_bytes=10**9),
        Device(name="cpu:0", kind=CPU, memory_bytes=10**9),
    ),
    links=(Link(name="l", latency_seconds=1e-5, bandwidth=1e9, pairs=(("gpu:0", "cpu:0"),)),),
)


def model() -> Graph:
    tensor = Tensor(MB)
    ops = [
        Op(name="handle", type="VarHandleOp", outputs=(Tensor(8),), param_bytes=MB),
        Op(name="read", type="ReadVariableOp", outputs=(tensor._replace(shares=("handle", 0)),)),
        Op(name="conv", type="Conv2D", outputs=(tensor,), flops=1e9),
        Op(name="product", type="MatMul", outputs=(tensor,), flops=1e9),
        Op(name="relu", type="Relu", outputs=(tensor,), flops=2.5e5),
        Op(name="small", type="Add", outputs=(Tensor(100),), flops=25.0, seconds={"gpu": 3e-6}),
        Op(name="update", type="ResourceApplyAdam", flops=1e6),
        Op(name="text", type="StringJoin", outputs=(Tensor(16),), kernels=("cpu",)),
    ]
    edges = [
        Edge("handle", "read"),
        Edge("read", "conv"),
        Edge("conv", "product"),
        Edge("product", "relu"),
        Edge("relu", "small"),
        Edge("handle", "update"),
        Edge("relu", "update"),
        Edge("small", "text"),
    ]
    return Graph.from_ops("m", ops, edges)


def test_the_roofline_by_hand() -> None:
    graph = model()
    costs = estimate_costs(graph, CLUSTER)
    seconds = dict(zip(graph.op_names, costs.op_seconds[0].tolist(), strict=True))
    assert seconds["handle"] == seconds["read"] == 0  # nothing to compute
    assert seconds["conv"] == pytest.approx(1e9 / (1e12 * 0.5))
    assert seconds["product"] == pytest.approx(1e9 / (1e12 * 0.25))
    assert seconds["relu"] == pytest.approx(2 * MB / (1e11 * 0.5))  # bytes, not FLOPs
    assert seconds["small"] == pytest.approx(3e-6)  # as the graph says it was measured
    # The gradient, and the variable read and written; the handle itself is eight bytes.
    assert seconds["update"] == pytest.approx((MB + 8 + 2 * MB) / (1e11 * 0.5))
    assert seconds["text"] == math.inf


def test_a_convolution_takes_a_start_of_its_own_however_small_it_is() -> None:
    graph = model()
    kind = dataclasses.replace(GPU, conv_start_seconds=2e-5)
    devices = (dataclasses.replace(CLUSTER.devices[0], kind=kind), CLUSTER.devices[1])
    slow = estimate_costs(graph, dataclasses.replace(CLUSTER, devices=devices)).op_seconds[0]
    fast = estimate_costs(graph, CLUSTER).op_seconds[0].copy()
    fast[graph.op_index["conv"]] += 2e-5
    assert slow == pytest.approx(fast)


def overhead(graph: Graph, **changes: object) -> dict[str, list[float]]:
    """Op -> seconds of issuing it on the GPU and on the CPU."""
    costs = estimate_costs(graph, dataclasses.replace(CLUSTER, **changes))  # type: ignore[arg-type]
    return dict(zip(graph.op_names, costs.overhead_seconds.T.tolist(), strict=True))


def test_overhead_by_who_issues() -> None:
    graph = model()
    by_device = overhead(graph)
    # An executor dispatches and launches; what starts no kernel holds up no GPU, but the executor
    # of a CPU spends the CPU's own time on it.
    assert by_device["conv"] == pytest.approx([3e-6, 1e-6])
    assert by_device["read"] == pytest.approx([0, 1e-6])
    assert by_device["small"] == pytest.approx([0, 1e-6])  # on the GPU it was measured as a whole
    assert by_device["text"] == pytest.approx([0, 1e-6])  # it has no kernel there
    by_host = overhead(graph, issue="host")
    assert by_host["conv"] == pytest.approx([3e-6, 1e-6])
    assert by_host["read"] == [0, 0]
    assert not any(any(pair) for pair in overhead(graph, issue="none").values())
    kind = dataclasses.replace(GPU, gap_seconds=5e-7)
    devices = (dataclasses.replace(CLUSTER.devices[0], kind=kind), CLUSTER.devices[1])
    for issue in ISSUES:  # a kernel takes that of the device whoever issues it
        cluster = dataclasses.replace(CLUSTER, issue=issue, devices=devices)
        gaps = dict(zip(graph.op_names, estimate_costs(graph, cluster).gap_seconds.T, strict=True))
        assert gaps["conv"].tolist() == [5e-7, 0]
        assert not gaps["read"].any()
        assert not gaps["small"][0]


def test_ops_that_share_a_kernel_share_its_overhead(tmp_path: Path) -> None:
    ops = [Op(name=name, type="Relu", launches=share) for name, share in (("a", 0.25), ("b", 2.0))]
    ops = [dataclasses.replace(op, flops=1e9) for op in ops]
    graph = Graph.from_ops("fused", ops, [])
    assert overhead(graph) == {
        "a": pytest.approx([0.75e-6, 0.25e-6]),
        "b": pytest.approx([6e-6, 2e-6]),
    }
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == graph
    assert graph != Graph.from_ops("fused", [dataclasses.replace(o, launches=1.0) for o in ops], [])


def test_overhead_is_written_and_read(tmp_path: Path) -> None:
    costs = estimate_costs(model(), CLUSTER)
    assert costs.overhead_seconds.any()
    costs.save(tmp_path / "costs.json", model())
    assert Costs.load(tmp_path / "costs.json", model()) == costs
    with_gaps = dataclasses.replace(costs, gap_seconds=np.where(costs.source, 1e-6, 0.0))
    with_gaps.save(tmp_path / "gaps.json", model())
    assert Costs.load(tmp_path / "gaps.json", model()) == with_gaps != costs
    plain = dataclasses.replace(costs, overhead_seconds=np.zeros((0, 0)))
    assert not plain.overhead_seconds.any()
    assert plain != costs
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(CostsError, match="overhead must be finite and not negative"):
            dataclasses.replace(costs, overhead_seconds=np.full(costs.op_seconds.shape, bad))
    with pytest.raises(CostsError, match="overhead of shape"):
        dataclasses.replace(costs, overhead_seconds=np.ones((1, 1)))


def test_seconds_for_a_device_that_is_not_there_are_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ops = [Op(name="a", type="t", seconds={"tpu": 1.0, "gpu": 2.0})]
    estimate_costs(Graph.from_ops("x", ops, []), CLUSTER)
    assert "'x' has seconds for tpu, of which cluster 'two' has none; it has c, cpu, g, gpu" in (
        caplog.text
    )


def test_every_number_says_where_it_came_from() -> None:
    costs = estimate_costs(model(), CLUSTER)
    assert costs.counts() == {
        "g": {Source.NO_KERNEL: 1, Source.ROOFLINE: 6, Source.GRAPH: 1, Source.TABLE: 0},
        "c": {Source.NO_KERNEL: 0, Source.ROOFLINE: 8, Source.GRAPH: 0, Source.TABLE: 0},
    }


def test_tables_win_over_the_graph_and_only_measured_numbers_count() -> None:
    graph = model()
    base = estimate_costs(graph, CLUSTER)
    seconds, source = np.array(base.op_seconds), np.array(base.source)
    seconds[:] = np.where(source == Source.NO_KERNEL, np.inf, 7.0)
    source[0, graph.op_index["conv"]] = Source.TABLE
    source[0, graph.op_index["small"]] = Source.TABLE
    table = Costs(kinds=base.kinds, op_seconds=seconds, source=source)
    merged = estimate_costs(graph, CLUSTER, [table])
    assert merged.op_seconds[0, graph.op_index["conv"]] == 7.0
    assert merged.op_seconds[0, graph.op_index["small"]] == 7.0
    assert merged.op_seconds[0, graph.op_index["relu"]] == base.op_seconds[0, 4]
    assert merged.counts()["g"][Source.TABLE] == 2


def test_the_kind_goes_before_the_type() -> None:
    ops = [Op(name="a", type="t", seconds={"gpu": 1.0, "g": 2.0})]
    assert estimate_costs(Graph.from_ops("x", ops, []), CLUSTER).op_seconds[0].tolist() == [2.0]


@given(graphs())
def test_round_trip_is_exact(graph: Graph) -> None:
    costs = estimate_costs(graph, CLUSTER)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        costs.save(path, graph)
        assert Costs.load(path, graph) == costs


def test_costs_of_another_graph_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    estimate_costs(model(), CLUSTER).save(path, model())
    other = Graph.from_ops("o", [Op(name="a", type="t")], [])
    with pytest.raises(CostsError, match="made for another graph"):
        Costs.load(path, other)
    path.write_text(path.read_text().replace('"roofline"', '"guess"', 1))
    with pytest.raises(CostsError, match="malformed costs"):
        Costs.load(path, model())


def test_a_table_of_measured_times_may_be_partial(tmp_path: Path) -> None:
    graph = model()
    path = tmp_path / "measured.json"

    def load(kinds: object) -> Costs:
        path.write_text(json.dumps({"format": "placewright-costs/1", "kinds": kinds}))
        return Costs.load(path, graph)

    merged = estimate_costs(graph, CLUSTER, [load({"g": {"conv": 0.5}})])
    assert merged.op_seconds[0, graph.op_index["conv"]] == 0.5
    assert merged.counts()["g"][Source.TABLE] == 1
    for bad, message in [
        ({"g": {"nothing": 1.0}}, "'m' has no op 'nothing'"),
        ({"g": {"conv": -1.0}}, "cannot take -1.0 seconds"),
        ({"g": {"conv": "long"}}, "cannot take 'long' seconds"),
        ({"g": 3}, "must map op names to seconds"),
        (3, "'kinds' must map device kinds"),
    ]:
        with pytest.raises(CostsError, match=re.escape(message)):
            load(bad)


def test_nan_and_negative_costs_are_refused() -> None:
    for value in (math.nan, -1.0):
        with pytest.raises(CostsError, match="not negative"):
            Costs(
                kinds=("g",),
                op_seconds=np.array([[value]]),
                source=np.array([[Source.TABLE]], dtype=np.uint8),
            )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (Op(name="a", type="MatMul", flops=1e9), {"peak_flops": 1e-300}),
        (Op(name="a", type="MatMul", flops=1e9), {"efficiency": {"matmul": 1e-320}}),
        (Op(name="a", type="MatMul", work=Work.MATMUL, launches=1e300), {}),
        (Op(name="a", type="MatMul", work=Work.MATMUL, launches=1e308), {"gap_seconds": 1e300}),
        (Op(name="a", type="MatMul", seconds={"gpu": 1e200}), {}),
    ],
)
def test_times_that_no_number_can_hold_are_not_taken_for_ops_without_a_kernel(
    op: Op, kind: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {
        "name": "g", "type": "gpu", "peak_flops": 1e12, "memory_bandwidth": 1e11,
        "memory_bytes": 1 << 30,
    }  # fmt: skip
    described = DeviceKind(**fields | kind)
    device = Device(name="gpu:0", kind=described, memory_bytes=1 << 30)
    graph = Graph.from_ops("g", [op], [])
    with pytest.raises(
        CostsError, match=r"take .* s; are their costs, or the speeds|must be finite"
    ):
        estimate_costs(graph, Cluster(name="c", devices=(device,), links=()))


def test_bytes_of_many_runs_do_not_overflow() -> None:
    """2^53 bytes in each of 2^13 runs are more than 64 bits hold."""
    op = Op(
        name="a", type="MatMul", work=Work.MATMUL, moved_bytes=2**53, count=2**13
    )  # fmt: skip
    kind = DeviceKind(
        name="g", type="gpu", peak_flops=1e12, memory_bandwidth=2.0**40, memory_bytes=1 << 30,
        chip_bandwidth=2.0**42,
    )  # fmt: skip
    names = ("gpu:0/part:0", "gpu:0/part:1")
    cluster = Cluster(
        name="c",
        devices=tuple(Device(name=name, kind=kind, memory_bytes=1 << 30) for name in names),
        links=(Link(name="l", latency_seconds=0.0, bandwidth=1e9, pairs=(names,)),),
    )
    costs = estimate_costs(Graph.from_ops("g", [op], []), cluster)
    assert costs.demand[0, 0] == pytest.approx(0.25, rel=0.5)


def test_small_working_sets_come_from_the_cache() -> None:
    kind = DeviceKind(
        name="k", type="cpu", peak_flops=1e12, memory_bandwidth=1e10, memory_bytes=10**9,
        cache_bytes=3 * MB, cache_bandwidth=1e11, dispatch_seconds=0.0,
        efficiency={"memory": 0.5, "elementwise": 1e-3},
    )  # fmt: skip
    cluster = Cluster(name="c", devices=(Device(name="d", kind=kind, memory_bytes=10**9),))
    ops = [
        Op(name="x", type="Input", outputs=(Tensor(MB),)),
        Op(name="small", type="Add", outputs=(Tensor(MB),)),
        Op(name="large", type="Tile", outputs=(Tensor(9 * MB),)),
        Op(name="exp", type="Exp", outputs=(Tensor(MB),), flops=1e6),
        Op(name="looped", type="Add", outputs=(Tensor(MB),), count=50),
    ]
    graph = Graph.from_ops("g", ops, [Edge("x", op.name) for op in ops[1:]])
    seconds = dict(zip(graph.op_names, estimate_costs(graph, cluster).op_seconds[0], strict=True))
    assert seconds["small"] == pytest.approx(2 * MB / 1e11)
    assert seconds["large"] == pytest.approx(10 * MB / 5e9)
    assert seconds["exp"] == pytest.approx(1e6 / 1e9)  # computing takes longer than its bytes
    assert seconds["looped"] == pytest.approx(50 * 2 * MB / 1e11)
