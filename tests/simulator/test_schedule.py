"""Schedules worked out by hand. Bandwidth is 1 byte per second unless said otherwise, so a tensor
of 3 bytes takes 3 s to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from placewright.cluster import Cluster, Device, DeviceKind, Link
from placewright.graph import Edge, Op, Tensor
from placewright.placement import Placement
from placewright.simulator import Simulator, Timeline
from placewright.testing import make_problem, uniform_cluster


def op(name: str, seconds: float, *sizes: int) -> Op:
    """An op with outputs of these sizes."""
    return Op(
        name=name,
        type="Op",
        outputs=tuple(Tensor(size) for size in sizes),
        seconds={"dev": seconds},
    )


def timeline(
    ops: Sequence[Op],
    edges: Sequence[Edge | tuple[str, str]],
    cluster: Cluster,
    devices: Mapping[str, int],
) -> Timeline:
    problem = make_problem(ops, edges, cluster)
    row = [devices[name] for name in problem.graph.op_names]
    return Simulator(problem).timeline(Placement.of(problem, row))


def spans(result: Timeline) -> dict[str, tuple[float, float]]:
    names = result.problem.graph.op_names
    return {
        name: (float(start), float(end))
        for name, start, end in zip(names, result.op_start, result.op_end, strict=True)
    }


def sent(result: Timeline) -> list[tuple[int, int, float, float]]:
    """(source, target, start, end) of every transfer."""
    moves = result.transfers
    return [
        (int(source), int(target), float(start), float(end))
        for source, target, start, end in zip(
            moves.source, moves.target, moves.start, moves.end, strict=True
        )
    ]


def test_chain_on_one_device() -> None:
    ops = [op("a", 1, 5), op("b", 2, 5), op("c", 3)]
    result = timeline(ops, [("a", "b"), ("b", "c")], uniform_cluster(2), {"a": 0, "b": 0, "c": 0})
    # One after the other, nothing sent: 1 + 2 + 3.
    assert spans(result) == {"a": (0, 1), "b": (1, 3), "c": (3, 6)}
    assert sent(result) == []
    assert result.step_seconds == 6


def test_chain_over_two_devices() -> None:
    ops = [op("a", 1, 5), op("b", 2, 4), op("c", 3)]
    cluster = uniform_cluster(2, latency_seconds=0.5)
    result = timeline(ops, [("a", "b"), ("b", "c")], cluster, {"a": 0, "b": 1, "c": 0})
    # a 0-1, sent 1-6.5 (0.5 + 5 bytes), b 6.5-8.5, sent back 8.5-13 (0.5 + 4 bytes), c 13-16.
    assert spans(result) == {"a": (0, 1), "b": (6.5, 8.5), "c": (13, 16)}
    assert sent(result) == [(0, 1, 1, 6.5), (1, 0, 8.5, 13)]
    assert result.step_seconds == 16


def test_transfers_hold_up_devices_that_are_busy() -> None:
    ops = [op("a", 1, 2), op("left", 3, 1), op("last", 1), op("first", 4), op("right", 1)]
    edges = [("a", "left"), ("a", "right"), ("left", "last")]
    devices = {"a": 0, "left": 0, "last": 0, "first": 1, "right": 1}
    cluster = uniform_cluster(2)
    wire = replace(cluster.links[0], overhead_seconds=0.25, overhead_bandwidth=4.0)
    cluster = replace(cluster, links=(wire,))
    result = timeline(ops, edges, cluster, devices)
    # a 0-1, sent 1-3. The sender packs for 0.25 + 2/4 s while it computes left, 1-4.75, and last
    # follows; the receiver unpacks as long in the midst of first, 0-4.75, and right follows.
    assert sent(result) == [(0, 1, 1, 3)]
    assert spans(result) == {
        "a": (0, 1), "left": (1, 4.75), "last": (4.75, 5.75), "first": (0, 4.75),
        "right": (4.75, 5.75),
    }  # fmt: skip
    # Devices that wait have the time: it is within the transfer's own.
    alone = timeline([op("a", 1, 2), op("b", 1)], [("a", "b")], cluster, {"a": 0, "b": 1})
    assert spans(alone) == {"a": (0, 1), "b": (3, 4)}


def test_latency_passes_side_by_side_where_the_gap_is_shorter() -> None:
    ops = [op("a", 1, 2), op("b", 0, 2), op("c", 1), op("d", 1)]
    edges = [("a", "c"), ("a", "b"), ("b", "d")]
    devices = {"a": 0, "b": 0, "c": 1, "d": 1}
    cluster = uniform_cluster(2, latency_seconds=4.0)
    # Both are asked for at 1. With the link occupied for all its latency: 1-7, then 7-13.
    whole = timeline(ops, edges, cluster, devices)
    assert sent(whole) == [(0, 1, 1, 7), (0, 1, 7, 13)]
    wire = replace(cluster.links[0], gap_seconds=0.5)
    result = timeline(ops, edges, replace(cluster, links=(wire,)), devices)
    # The second starts after the gap and two bytes, at 3.5, while the first is on its way until 7.
    assert sent(result) == [(0, 1, 1, 7), (0, 1, 3.5, 9.5)]
    assert result.transfers.free.tolist() == [3.5, 6]
    assert spans(result)["c"] == (7, 8)
    assert spans(result)["d"] == (9.5, 10.5)
    # On the way to d stands the first transfer, for as long as it was in the way.
    path = [(entry.transfer, entry.start, entry.end) for entry in result.critical_path]
    assert path == [(None, 0, 1), (0, 1, 3.5), (1, 3.5, 9.5), (None, 9.5, 10.5)]


def test_devices_that_compute_at_the_same_time_slow_each_other_down() -> None:
    ops = [op("a", 1, 2), op("left", 6), op("right", 3, 1), op("last", 1)]
    edges = [("a", "left"), ("a", "right"), ("right", "last")]
    devices = {"a": 0, "left": 0, "right": 1, "last": 1}
    cluster = replace(uniform_cluster(2), contention=0.5)
    result = timeline(ops, edges, cluster, devices)
    # a 0-1, sent 1-3. Without contention left 1-7 and, beside it, right 3-6 and last 6-7. These 4 s
    # of both take 6.
    assert sent(result) == [(0, 1, 1, 3)]
    assert spans(result) == {"a": (0, 1), "left": (1, 9), "right": (3, 7.5), "last": (7.5, 9)}
    assert result.step_seconds == 9
    row = np.array([result.placement.devices])
    assert Simulator(result.problem).run(row).step_seconds.tolist() == [9]
    assert result.critical_path[-1].end == 9
    # A third device that is idle changes nothing; one that computes slows down the others as much.
    three = replace(uniform_cluster(3), contention=0.5)
    assert timeline(ops, edges, three, devices).step_seconds == 9
    more = [*ops, op("third", 100)]
    spread = timeline(more, edges, three, {**devices, "third": 2})
    # One busy device more: 3 s of two (a, and left while a's result is sent), 4 s of three.
    assert spans(spread)["last"][1] == 3 * 1.5 + 4 * 2
    # One at a time, there is nobody to be slowed down by; nor by the device's own slots.
    alone = dict.fromkeys(devices, 0)
    assert timeline(ops, edges, cluster, alone).step_seconds == 11
    slots = replace(uniform_cluster(2, slots=2), contention=0.5)
    assert timeline(ops, edges, slots, alone).step_seconds == 7


def test_diamond_on_two_devices() -> None:
    ops = [op("a", 1, 2), op("left", 3, 1), op("right", 3, 1), op("join", 1)]
    edges = [("a", "left"), ("a", "right"), ("left", "join"), ("right", "join")]
    devices = {"a": 0, "left": 0, "right": 1, "join": 0}
    result = timeline(ops, edges, uniform_cluster(2), devices)
    # a 0-1; left 1-4 beside the transfer 1-3 and right 3-6; sent back 6-7; join 7-8.
    assert spans(result) == {"a": (0, 1), "left": (1, 4), "right": (3, 6), "join": (7, 8)}
    assert sent(result) == [(0, 1, 1, 3), (1, 0, 6, 7)]


def test_two_branches_run_side_by_side() -> None:
    ops = [op("a1", 2, 1), op("a2", 2), op("b1", 3, 1), op("b2", 1)]
    edges = [("a1", "a2"), ("b1", "b2")]
    result = timeline(ops, edges, uniform_cluster(2), {"a1": 0, "a2": 0, "b1": 1, "b2": 1})
    assert spans(result) == {"a1": (0, 2), "a2": (2, 4), "b1": (0, 3), "b2": (3, 4)}
    assert result.step_seconds == 4


def test_ops_run_in_the_order_in_which_they_become_ready() -> None:
    ops = [op("slow", 5, 1), op("quick", 2, 1), op("after_slow", 1), op("after_quick", 4)]
    edges = [("slow", "after_slow"), ("quick", "after_quick")]
    devices = {"slow": 0, "quick": 1, "after_slow": 2, "after_quick": 2}
    result = timeline(ops, edges, uniform_cluster(3), devices)
    # after_quick is there at 3 and runs 3-7; after_slow is there at 6 and waits, though it comes
    # first in the graph.
    assert spans(result)["after_quick"] == (3, 7)
    assert spans(result)["after_slow"] == (7, 8)


def test_a_shared_wire_carries_one_transfer_at_a_time() -> None:
    ops = [op("a", 1, 4), op("b", 2, 3), op("c", 1), op("d", 1)]
    edges = [("a", "c"), ("b", "d")]
    devices = {"a": 0, "b": 1, "c": 2, "d": 2}
    own = timeline(ops, edges, uniform_cluster(3), devices)
    shared = timeline(ops, edges, uniform_cluster(3, shared=True), devices)
    # Own wires: a's 1-5, b's 2-5. One wire: b's waits for a's and takes 5-8.
    assert sent(own) == [(0, 2, 1, 5), (1, 2, 2, 5)]
    assert sent(shared) == [(0, 2, 1, 5), (1, 2, 5, 8)]
    assert own.step_seconds == 7  # c 5-6, d 6-7
    assert shared.step_seconds == 9  # d 8-9


def test_a_transfer_holds_every_channel_of_its_route() -> None:
    # x and y hang on the switch by wires of their own, z by a third.
    kind = DeviceKind(name="dev", type="dev", peak_flops=1, memory_bandwidth=1, memory_bytes=100)
    cluster = Cluster(
        name="star",
        devices=tuple(Device(name=name, kind=kind, memory_bytes=100) for name in "xyz"),
        switches=("hub",),
        links=tuple(
            Link(name=name, latency_seconds=0.5, bandwidth=speed, pairs=((name, "hub"),))
            for name, speed in (("x", 1.0), ("y", 2.0), ("z", 2.0))
        ),
    )
    ops = [op("a", 1, 4), op("b", 2, 2), op("c", 1), op("d", 1)]
    result = timeline(ops, [("a", "c"), ("b", "d")], cluster, {"a": 0, "b": 1, "c": 2, "d": 2})
    # a: two latencies and 4 bytes at the slower wire's 1 byte/s, 1-6. b could leave y at 2, but z
    # is taken until 6; then 1 + 2 bytes at 2 bytes/s, 6-8.
    assert sent(result) == [(0, 2, 1, 6), (1, 2, 6, 8)]


@pytest.mark.parametrize("duplex", [True, False])
def test_the_two_directions_of_a_wire(duplex: bool) -> None:
    kind = DeviceKind(name="dev", type="dev", peak_flops=1, memory_bandwidth=1, memory_bytes=100)
    cluster = Cluster(
        name="pair",
        devices=tuple(Device(name=name, kind=kind, memory_bytes=100) for name in "xy"),
        links=(Link(name="w", latency_seconds=0, bandwidth=1, pairs=(("x", "y"),), duplex=duplex),),
    )
    ops = [op("a", 1, 3), op("b", 1, 3), op("c", 1), op("d", 1)]
    devices = {"a": 0, "b": 1, "c": 1, "d": 0}
    result = timeline(ops, [("a", "c"), ("b", "d")], cluster, devices)
    assert sent(result) == [(0, 1, 1, 4), (1, 0, 1, 4) if duplex else (1, 0, 4, 7)]


def test_a_tensor_goes_to_a_device_once() -> None:
    ops = [op("a", 1, 2), op("b", 1), op("c", 1), op("d", 1), op("e", 1)]
    edges = [("a", name) for name in "bcde"]
    result = timeline(ops, edges, uniform_cluster(2), {"a": 0, "b": 1, "c": 1, "d": 1, "e": 0})
    # One transfer 1-3 serves b, c and d, in that order; e stays and runs at once.
    assert sent(result) == [(0, 1, 1, 3)]
    assert spans(result) == {"a": (0, 1), "b": (3, 4), "c": (4, 5), "d": (5, 6), "e": (1, 2)}


def test_each_output_is_sent_by_itself() -> None:
    ops = [op("a", 1, 2, 3), op("b", 1), op("c", 1)]
    edges = [Edge("a", "b", 1), Edge("a", "c", 0)]
    result = timeline(ops, edges, uniform_cluster(2), {"a": 0, "b": 1, "c": 1})
    # In the order of outputs: output 0 (2 bytes) 1-3 for c, output 1 (3 bytes) 3-6 for b.
    assert sent(result) == [(0, 1, 1, 3), (0, 1, 3, 6)]
    assert spans(result)["c"] == (3, 4)
    assert spans(result)["b"] == (6, 7)


def test_targets_are_served_in_the_order_of_their_first_consumer() -> None:
    ops = [op("a", 1, 2), op("b", 1), op("c", 1), op("d", 1)]
    edges = [("a", name) for name in "bcd"]
    cluster = uniform_cluster(3, shared=True)
    result = timeline(ops, edges, cluster, {"a": 0, "b": 2, "c": 1, "d": 2})
    assert [move[1] for move in sent(result)] == [2, 1]


def test_control_edges_pay_the_latency() -> None:
    ops = [op("a", 1, 9), op("b", 1), op("c", 1)]
    edges = [Edge("a", "b", None), Edge("a", "c", None)]
    cluster = uniform_cluster(2, latency_seconds=0.5)
    result = timeline(ops, edges, cluster, {"a": 0, "b": 1, "c": 0})
    # Nobody needs the 9 bytes.
    assert sent(result) == [(0, 1, 1, 1.5)]
    assert spans(result)["b"] == (1.5, 2.5)
    assert spans(result)["c"] == (1, 2)


def test_a_control_edge_beside_a_tensor_is_not_sent() -> None:
    ops = [op("a", 1, 2), op("b", 1)]
    edges = [Edge("a", "b"), Edge("a", "b"), Edge("a", "b", None)]
    result = timeline(ops, edges, uniform_cluster(2), {"a": 0, "b": 1})
    assert sent(result) == [(0, 1, 1, 3)]
    assert result.transfers.bytes.tolist() == [2]


def test_two_slots_run_two_ops_at_a_time() -> None:
    ops = [op("a", 3), op("b", 1), op("c", 1), op("d", 2)]
    result = timeline(ops, [], uniform_cluster(1, slots=2), dict.fromkeys("abcd", 0))
    # a and b start; the second slot is free at 1 for c and at 2 for d.
    assert spans(result) == {"a": (0, 3), "b": (0, 1), "c": (1, 2), "d": (2, 4)}
    assert result.op_slot.tolist() == [0, 1, 1, 1]


def test_the_lower_slot_goes_first_when_both_are_free_since_the_same_time() -> None:
    ops = [op("a", 1), op("b", 1), op("c", 1)]
    result = timeline(ops, [], uniform_cluster(1, slots=2), dict.fromkeys("abc", 0))
    assert result.op_slot.tolist() == [0, 1, 0]


def test_ends_of_ops_come_before_arrivals() -> None:
    # At 3 s x ends on device 1 and makes y ready; at 3 s a's tensor arrives there for b.
    ops = [op("a", 1, 2), op("x", 3, 1), op("b", 1), op("y", 1)]
    edges = [("a", "b"), ("x", "y")]
    result = timeline(ops, edges, uniform_cluster(2), {"a": 0, "x": 1, "b": 1, "y": 1})
    assert spans(result)["y"] == (3, 4)
    assert spans(result)["b"] == (4, 5)


def test_ops_made_ready_together_go_in_the_order_of_the_graph() -> None:
    # a hands out output 0 (for c) before output 1 (for b), but b comes first in the graph.
    ops = [op("a", 1, 1, 1), op("b", 1), op("c", 1)]
    edges = [Edge("a", "b", 1), Edge("a", "c", 0)]
    result = timeline(ops, edges, uniform_cluster(1), {"a": 0, "b": 0, "c": 0})
    assert spans(result)["b"] == (1, 2)
    assert spans(result)["c"] == (2, 3)


def test_ops_that_take_no_time() -> None:
    ops = [op("a", 0, 1), op("b", 0, 1), op("c", 0)]
    result = timeline(ops, [("a", "b"), ("b", "c")], uniform_cluster(1), dict.fromkeys("abc", 0))
    assert result.step_seconds == 0
    assert np.array_equal(result.op_end, [0, 0, 0])
