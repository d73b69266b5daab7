"""Memory peaks worked out by hand. A byte takes a second to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from placewright.graph import Edge, Op, Tensor
from placewright.placement import Placement
from placewright.simulator import Simulator, Timeline
from placewright.testing import make_problem, uniform_cluster

ROOMY = uniform_cluster(2)


def op(name: str, seconds: float, *outputs: Tensor, param_bytes: int = 0) -> Op:
    return Op(
        name=name, type="Op", outputs=outputs, seconds={"dev": seconds}, param_bytes=param_bytes
    )


def timeline(
    ops: Sequence[Op], edges: Sequence[Edge | tuple[str, str]], devices: Mapping[str, int]
) -> Timeline:
    problem = make_problem(ops, edges, ROOMY)
    row = [devices[name] for name in problem.graph.op_names]
    return Simulator(problem).timeline(Placement.of(problem, row))


def at(result: Timeline, device: int, seconds: float) -> int:
    """Memory in use just after a moment."""
    curve = result.memory[device]
    return int(curve.bytes[np.searchsorted(curve.seconds, seconds, side="right") - 1])


def test_chain() -> None:
    ops = [op("a", 1, Tensor(5)), op("b", 1, Tensor(7)), op("c", 1, Tensor(2))]
    result = timeline(ops, [("a", "b"), ("b", "c")], dict.fromkeys("abc", 0))
    # a: 5. b: 5 + 7. c: 7 + 2; nobody takes c's 2 bytes, they go when it ends.
    assert [at(result, 0, t) for t in (0, 1, 2, 3)] == [5, 12, 9, 0]
    assert result.peak_bytes.tolist() == [12, 0]


def test_outputs_are_allocated_when_an_op_starts_not_when_it_is_ready() -> None:
    ops = [op("a", 2, Tensor(5)), op("b", 2, Tensor(7))]
    result = timeline(ops, [], dict.fromkeys("ab", 0))
    # Both are ready at 0, b waits for a. a's output has no user and goes at 2.
    assert [at(result, 0, t) for t in (0, 1, 2, 4)] == [5, 5, 7, 0]
    assert result.peak_bytes.tolist() == [7, 0]


def test_copy_on_another_device() -> None:
    ops = [op("a", 1, Tensor(3)), op("b", 1), op("c", 2)]
    result = timeline(ops, [("a", "b"), ("a", "c")], {"a": 0, "b": 1, "c": 1})
    # Sent 1-4: the copy is allocated at 1; the original goes when it has arrived. b 4-5, c 5-7.
    assert [at(result, 0, t) for t in (0, 1, 3, 4)] == [3, 3, 3, 0]
    assert [at(result, 1, t) for t in (0, 1, 4, 5, 6, 7)] == [0, 3, 3, 3, 3, 0]


def test_original_stays_for_its_own_users() -> None:
    ops = [op("a", 1, Tensor(3)), op("b", 1), op("c", 9)]
    result = timeline(ops, [("a", "b"), ("a", "c")], {"a": 0, "b": 1, "c": 0})
    assert [at(result, 0, t) for t in (4, 9, 10)] == [3, 3, 0]


def test_alias_keeps_the_memory_it_shares() -> None:
    view = Tensor(8, shares=("a", 0))
    ops = [op("a", 1, Tensor(8)), op("view", 1, view), op("b", 1), op("c", 1)]
    edges = [("a", "view"), ("a", "b"), ("view", "c")]
    result = timeline(ops, edges, dict.fromkeys(["a", "view", "b", "c"], 0))
    # 8 bytes from the start of a to the end of c, never 16.
    assert [at(result, 0, t) for t in (0, 1, 2, 3, 4)] == [8, 8, 8, 8, 0]
    assert result.peak_bytes.tolist() == [8, 0]


def test_alias_and_original_are_one_copy_on_another_device() -> None:
    view = Tensor(4, shares=("a", 0))
    ops = [op("a", 1, Tensor(4)), op("view", 1, view), op("b", 1), op("c", 1)]
    edges = [("a", "view"), ("a", "b"), ("view", "c")]
    result = timeline(ops, edges, {"a": 0, "view": 0, "b": 1, "c": 1})
    # Both are sent, a's 1-5 and view's 5-9, into one buffer there: b 5-6, c 9-10.
    assert len(result.transfers) == 2
    assert [at(result, 1, t) for t in (1, 5, 8, 9, 10)] == [4, 4, 4, 4, 0]
    assert result.peak_bytes.tolist() == [4, 4]


def test_alias_made_elsewhere_and_sent_back_home() -> None:
    view = Tensor(2, shares=("a", 0))
    ops = [op("a", 1, Tensor(2)), op("view", 1, view), op("b", 1)]
    result = timeline(ops, [("a", "view"), ("view", "b")], {"a": 0, "view": 1, "b": 0})
    # a sent 1-3 and gone from device 0; view 3-4; sent back 4-6, allocated again; b 6-7.
    assert [at(result, 0, t) for t in (1, 3, 4, 6, 7)] == [2, 0, 2, 2, 0]
    assert [at(result, 1, t) for t in (1, 3, 4, 6)] == [2, 2, 2, 0]


def test_variable_is_read_for_nothing_at_home_and_copied_elsewhere() -> None:
    ops = [
        op("variable", 1, Tensor(1), param_bytes=10),  # the handle
        op("read", 1, Tensor(10, shares=("variable", 0))),
        op("near", 1),
        op("far", 1),
    ]
    edges = [("variable", "read"), ("read", "near"), ("read", "far")]
    result = timeline(ops, edges, {"variable": 0, "read": 0, "near": 0, "far": 1})
    # At home only the 10 resident bytes; far away the 10 bytes of the value, 2-13.
    assert result.peak_bytes.tolist() == [10, 10]
    assert [at(result, 0, t) for t in (0, 5, 13)] == [10, 10, 10]
    assert [at(result, 1, t) for t in (1, 2, 12, 13)] == [0, 10, 10, 0]


def test_variable_read_on_another_device_than_it_lies_on() -> None:
    ops = [
        op("variable", 1, Tensor(1), param_bytes=10),
        op("read", 1, Tensor(10, shares=("variable", 0))),
        op("use", 1),
    ]
    edges = [("variable", "read"), ("read", "use")]
    result = timeline(ops, edges, {"variable": 0, "read": 1, "use": 1})
    # The handle is 1 byte to send (1-2), but what it stands for takes 10 bytes over there.
    assert result.transfers.bytes.tolist() == [1]
    assert result.peak_bytes.tolist() == [10, 10]


def test_tensors_without_bytes_hold_nothing() -> None:
    ops = [op("a", 1, Tensor(0)), op("b", 1, Tensor(0, shares=("a", 0))), op("c", 1)]
    result = timeline(ops, [("a", "b"), ("b", "c")], {"a": 0, "b": 1, "c": 0})
    assert result.peak_bytes.tolist() == [0, 0]


def test_resident_memory_counts_from_the_start_to_the_end() -> None:
    ops = [op("a", 1, param_bytes=6), op("b", 1, param_bytes=3), op("c", 1, param_bytes=1)]
    result = timeline(ops, [], {"a": 0, "b": 1, "c": 0})
    assert result.peak_bytes.tolist() == [7, 3]


def test_overflow_names_the_largest_tensors() -> None:
    sizes = {"a": 30, "b": 10, "c": 20, "d": 40, "e": 25}
    ops = [op(name, 1, Tensor(size)) for name, size in sizes.items()]
    ops.append(op("join", 1))
    edges = [(name, "join") for name in sizes]
    problem = make_problem(ops, edges, uniform_cluster(1, memory_bytes=90))
    result = Simulator(problem).run(np.zeros((1, 6), dtype=np.int32))
    # 30, 40, 60, then d's 40 make 100: too much. e comes on top: the peak is 125.
    assert result.overflow_device.tolist() == [0]
    assert result.peak_bytes.tolist() == [[125]]
    assert result.overflow_tensors.tolist() == [[3, 0, 2]]
    assert result.overflow_bytes.tolist() == [[40, 30, 20]]
    assert result.step_seconds.tolist() == [6]
    assert not result.ok[0]


def test_a_peak_of_exactly_the_memory_fits() -> None:
    problem = make_problem([op("a", 1, Tensor(9))], [], uniform_cluster(1, memory_bytes=9))
    result = Simulator(problem).run(np.zeros((1, 1), dtype=np.int32))
    assert result.ok[0]
    assert result.overflow_tensors.tolist() == [[-1, -1, -1]]


def test_live_tensors_at_the_peak() -> None:
    ops = [op("a", 1, Tensor(5)), op("b", 1, Tensor(7)), op("c", 1, Tensor(2))]
    result = timeline(ops, [("a", "b"), ("b", "c")], dict.fromkeys("abc", 0))
    assert [(live.tensor, live.bytes) for live in result.live_at_peak[0]] == [(1, 7), (0, 5)]
    assert result.live_at_peak[1] == ()
