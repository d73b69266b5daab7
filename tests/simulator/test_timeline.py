from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placewright.errors import PlacementError
from placewright.graph import Op, Tensor
from placewright.placement import Placement
from placewright.simulator import Simulator, Timeline
from placewright.simulator.timeline import Delay
from placewright.testing import make_problem, random_problem, uniform_cluster

seeds = st.integers(0, 2**32 - 1)


def random_timeline(seed: int) -> Timeline:
    problem = random_problem(
        seed, max_ops=20, max_groups=20, tight_memory=True, gaps=seed % 2 > 0,
        contention=seed % 3 > 1, issue=(None, "device", "host", "none")[seed % 4],
        chips=seed // 12 % 3 > 1,
    )  # fmt: skip
    row = np.random.default_rng(seed).integers(problem.num_devices, size=problem.num_groups)
    return Simulator(problem).timeline(Placement.of(problem, row.astype(np.int32)))


def shared_wire() -> Timeline:
    """a and b both send to the third device over one wire: b's transfer waits for a's."""
    sizes = {"a": 4, "b": 3}
    ops = [
        Op(name=name, type="Make", outputs=(Tensor(size),), seconds={"dev": 1.0})
        for name, size in sizes.items()
    ]
    ops += [Op(name=name, type="Use", seconds={"dev": 2.0}) for name in "cd"]
    cluster = uniform_cluster(3, shared=True)
    problem = make_problem(ops, [("a", "c"), ("b", "d")], cluster)
    return Simulator(problem).timeline(Placement.of(problem, [0, 1, 2, 2]))


@given(seeds)
def test_agrees_with_run(seed: int) -> None:
    timeline = random_timeline(seed)
    devices = timeline.placement.devices[np.newaxis]
    result = Simulator(timeline.problem).run(devices)
    assert timeline.step_seconds == result.step_seconds[0]
    assert np.array_equal(timeline.peak_bytes, result.peak_bytes[0])


@given(seeds)
def test_slots_and_channels_do_one_thing_at_a_time(seed: int) -> None:
    timeline = random_timeline(seed)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in timeline.chrome_trace()["traceEvents"]:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in tracks.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 1e-6


@given(seeds)
def test_memory_curves_end_at_what_is_resident_and_reach_the_peak(seed: int) -> None:
    timeline = random_timeline(seed)
    pools = timeline.problem.cluster.pool_of_device
    resident = np.zeros(timeline.problem.num_devices, dtype=np.int64)
    np.add.at(resident, pools[timeline.op_device], timeline.problem.graph.resident_bytes)
    resident = resident[pools]
    for device, curve in enumerate(timeline.memory):
        assert curve.seconds[0] == 0
        assert np.all(np.diff(curve.seconds) >= 0)
        assert curve.bytes[0] == curve.bytes[-1] == resident[device]
        assert curve.bytes.max() == timeline.peak_bytes[device]
        live = sum(tensor.bytes for tensor in timeline.live_at_peak[device])
        assert live + resident[device] == timeline.peak_bytes[device]


@given(seeds)
def test_critical_path_covers_the_step_without_a_gap(seed: int) -> None:
    timeline = random_timeline(seed)
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[0].delay is Delay.NOTHING
    assert path[-1].end == timeline.step_seconds
    for before, after in pairwise(path):
        assert before.end == after.start


@given(seeds)
def test_parts_add_up_to_the_step(seed: int) -> None:
    timeline = random_timeline(seed)
    for parts in (*timeline.device_parts, timeline.path_parts):
        assert parts.total == pytest.approx(timeline.step_seconds)
        assert min(parts) >= 0
    costs = timeline.problem.costs
    if not costs.overhead_seconds.any() and not costs.gap_seconds.any():
        assert all(parts.overhead == 0 for parts in timeline.device_parts)


@given(seeds)
def test_seconds_add_up(seed: int) -> None:
    timeline = random_timeline(seed)
    slots = np.array([device.kind.slots for device in timeline.problem.cluster.devices])
    assert np.allclose(timeline.busy_seconds + timeline.idle_seconds, slots * timeline.step_seconds)
    assert np.all(timeline.idle_seconds >= 0)
    duration = (timeline.transfers.end - timeline.transfers.start).sum()
    assert np.isclose(timeline.transfer_seconds.sum(), 2 * duration)


def test_critical_path_says_what_was_waited_for() -> None:
    timeline = shared_wire()
    # a 0-1, sent 1-5, b's transfer waits and goes 5-8; c runs 5-7, d 8-10.
    path = timeline.critical_path
    names = timeline.problem.graph.op_names
    steps = [(names[e.op], e.transfer is not None, e.start, e.end, e.delay) for e in path]
    assert steps == [
        ("a", False, 0, 1, Delay.NOTHING),
        ("a", True, 1, 5, Delay.INPUT),
        ("b", True, 5, 8, Delay.CHANNEL),
        ("d", False, 8, 10, Delay.INPUT),
    ]


def test_critical_path_through_a_busy_device() -> None:
    ops = [Op(name=name, type="Op", seconds={"dev": 1.0}) for name in "ab"]
    problem = make_problem(ops, [], uniform_cluster(1))
    path = Simulator(problem).timeline(Placement.of(problem, [0, 0])).critical_path
    assert [(entry.op, entry.delay) for entry in path] == [(0, Delay.NOTHING), (1, Delay.DEVICE)]


def test_seconds_per_device() -> None:
    timeline = shared_wire()
    assert timeline.busy_seconds.tolist() == [1, 1, 4]
    assert timeline.idle_seconds.tolist() == [9, 9, 6]
    assert timeline.transfer_seconds.tolist() == [4, 3, 7]


def test_chrome_trace_is_well_formed() -> None:
    timeline = shared_wire()
    trace = json.loads(json.dumps(timeline.chrome_trace()))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "dev:0", 1: "dev:1", 2: "dev:2", 3: "links"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 3]
    assert threads == ["wire >", "wire <"]
    ops = [e for e in events if e["ph"] == "X" and e["pid"] < 3]
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in ops] == [
        ("a", 0, 0, 1e6),
        ("b", 1, 0, 1e6),
        ("c", 2, 5e6, 2e6),
        ("d", 2, 8e6, 2e6),
    ]
    moves = [e for e in events if e["ph"] == "X" and e["pid"] == 3]
    assert [(e["name"], e["ts"], e["dur"]) for e in moves] == [("a", 1e6, 4e6), ("b", 5e6, 3e6)]
    assert moves[1]["args"] == {
        "from": "dev:1", "to": "dev:2", "bytes": 3, "waited_us": 4e6, "arrives_us": 8e6,
    }  # fmt: skip
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert max(e["args"]["bytes"] for e in counters) == timeline.peak_bytes[2]
    assert trace["otherData"]["step_seconds"] == 10


def test_placement_of_another_problem() -> None:
    problem, other = random_problem(1), random_problem(2)
    with pytest.raises(PlacementError, match="was made for space"):
        Simulator(problem).timeline(Placement.of(other, [0] * other.num_groups))
