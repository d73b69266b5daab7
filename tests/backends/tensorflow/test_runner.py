from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placewright.backends import Program, load, load_program
from placewright.backends import tensorflow as tensorflow_backend
from placewright.backends.feeds import load_feeds, make_feeds
from placewright.backends.processes import free_ports, share_cores
from placewright.backends.tensorflow import BACKEND
from placewright.backends.tensorflow import TensorFlowRunConfig as RunConfig
from placewright.backends.tensorflow import runner as runner_module
from placewright.backends.tensorflow._tf import tf
from placewright.backends.tensorflow.program import TensorFlowProgram
from placewright.backends.tensorflow.runner import TensorFlowRunner
from placewright.cluster import Cluster
from placewright.errors import MissingExtraError, ModelError, PlacementError, WorkerError
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.measurement import Outcome, half_width
from placewright.problem import ProblemConfig, make_problem
from placewright.testing import check_backend, check_evaluator, check_runner, sample_placements
from tests.memory_groups import memory_group
from tests.towers import small, towers, towers_graph

CPU2 = Cluster.load("cpu2")
FOREVER = 10**6


@pytest.fixture(scope="module")
def program() -> TensorFlowProgram:
    return towers()


@pytest.fixture(scope="module")
def runner(program: TensorFlowProgram) -> Iterator[TensorFlowRunner]:
    with TensorFlowRunner(program, CPU2, RunConfig(check=True, max_steps=10)) as runner:
        yield runner


@pytest.fixture(scope="module")
def servers(program: TensorFlowProgram) -> Iterator[Mapping[str, str]]:
    """Addresses of two devices that run already. A runner of those starts one process in place of
    three; of several, one after another."""
    ports = tuple(free_ports(2))
    # Open, so that runners and sessions of ours reach them.
    config = RunConfig(steps=3, max_steps=3, ports=ports, open_servers=True)
    with TensorFlowRunner(program, CPU2, config) as runner:
        runner.start()
        yield {f"cpu:{number}": f"127.0.0.1:{port}" for number, port in enumerate(ports)}
        assert runner.restarts == 0
        assert not any(gone(pid) for pid in runner.pids)


def by_tower(program: TensorFlowProgram) -> list[int]:
    problem = make_problem(program.graph, CPU2)
    right = ["right" in name for name in problem.grouping.names]
    return [int(right[group]) for group in problem.grouping.group_of]


def runs_on(program: Program, device: int = 0) -> list[int]:
    return [device] * program.graph.num_ops


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        # A killed process is a zombie before its other threads have ended; its parent is told of
        # its end only then.
        return state == "Z" and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


# --- what it measures ----------------------------------------------------------------------------


def test_times_steps_and_drops_the_first(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    run = runner.measure(runs_on(program))
    assert run.measurement.outcome is Outcome.OK, run.measurement.reason
    assert len(run.measurement.step_seconds) == 9


def test_training_begins_anew_and_goes_the_same_way_wherever_ops_are(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    losses = []
    for devices in (runs_on(program), by_tower(program), runs_on(program)):
        run = runner.measure(devices, train_steps=12)
        assert run.measurement.ok, run.measurement.reason
        assert len(run.measurement.step_seconds) == 11
        assert run.returned is not None
        losses.append(run.returned["loss:0"])
    assert len(losses[0]) == 12
    assert len(set(losses[0])) == 12  # it learns
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == losses[0]
    assert runner.measure(runs_on(program)).returned is None


def test_random_ops_draw_the_same_numbers_in_every_run() -> None:
    def build() -> None:
        value = tf.compat.v1.random_uniform([], name="value")
        kernel = tf.compat.v1.get_variable(
            "kernel", [], initializer=tf.compat.v1.random_normal_initializer(), use_resource=True
        )
        tf.add(value, kernel, name="sum")

    returned = []
    for _ in range(2):
        program = small(build, ["sum:0"])
        with TensorFlowRunner(program, Cluster.load("local")) as runner:
            returned.append(runner.measure(runs_on(program), train_steps=3).returned)
    assert returned[0] is not None
    assert len(set(returned[0]["sum:0"])) == 3
    assert returned[1] == returned[0]


def test_every_op_runs_where_it_is_put(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    for devices in (runs_on(program, 1), by_tower(program), runs_on(program, 0)):
        run = runner.measure(devices)
        assert run.measurement.ok, run.measurement.reason
        assert run.misplaced == ()


def test_the_check_finds_an_op_that_ran_elsewhere(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    # TensorFlow reads a variable where it is, whatever it is told.
    types = program.graph.op_types
    devices = [int(type_ == "ReadVariableOp") for type_ in types]
    run = runner.measure(devices)
    assert run.misplaced is not None
    assert len(run.misplaced) >= 2
    assert "not /job:worker/replica:0/task:1" in run.misplaced[0]


def test_peak_memory_is_of_the_devices_used(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    left, right = runner.measure(runs_on(program, 1)).measurement.peak_bytes
    assert left == 0
    assert right >= 2 * 128 * 128 * 4


def test_a_trace_has_the_ops_and_what_was_sent(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    trace = runner.measure(by_tower(program), traces=2).trace
    assert trace is not None
    known = set(trace.op_seconds)
    products = [
        name
        for name, type_ in zip(program.graph.op_names, program.graph.op_types, strict=True)
        if type_ == "MatMul"
    ]
    assert set(products) <= known
    assert all(trace.op_seconds[name] > 0 for name in products)
    assert {name: trace.device_of[name] for name in products} == {
        name: device
        for name, device in zip(program.graph.op_names, by_tower(program), strict=True)
        if name in products
    }
    # The inputs lie on one device and both towers read them.
    assert max(transfer.bytes for transfer in trace.transfers) == 32 * 128 * 4


def test_hopeless_placements_are_cut_short(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    run = runner.measure(by_tower(program), best_seconds=1e-9)
    assert run.measurement.ok
    assert len(run.measurement.step_seconds) == 2


def test_keeps_the_contract_of_evaluators(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    problem = make_problem(program.graph, CPU2)
    evaluator = MeasuredEvaluator(problem, runner)
    check_evaluator(evaluator, placements=sample_placements(problem, 3), deterministic=False)


def test_constraints_hold_for_measurements_too(
    runner: TensorFlowRunner, program: TensorFlowProgram
) -> None:
    constraints = ProblemConfig(pins=(("left", "cpu:0"),))
    problem = make_problem(program.graph, CPU2, constraints)
    everything_right = sample_placements(make_problem(program.graph, CPU2), 1)[0]
    wrong = dataclasses.replace(
        everything_right,
        devices=np.ones(problem.num_groups, dtype=np.int32),
        space=problem.space.fingerprint,
    )
    (measurement,) = MeasuredEvaluator(problem, runner).evaluate([wrong])
    assert measurement.outcome is Outcome.FAILED
    assert "kept off cpu:1 by a constraint" in measurement.reason


def test_keeps_the_contract_of_runners(
    program: TensorFlowProgram, servers: Mapping[str, str]
) -> None:
    config = RunConfig(steps=4, max_steps=5, time_limit_seconds=30.0, addresses=servers)
    with TensorFlowRunner(program, CPU2, config) as runner:

        def kill() -> None:
            client = runner.pids[-1]
            os.kill(client, signal.SIGKILL)
            wait_for(lambda: gone(client))

        check_runner(runner, kill=kill)


def test_keeps_the_contract_of_backends() -> None:
    def devices_in(graph: Any) -> dict[str, str]:
        return {op.name: op.device for op in graph.get_operations()}

    check_backend(BACKEND, towers_graph(), devices_in=devices_in)


def test_asking_what_it_accepts_imports_no_framework() -> None:
    code = (
        "import sys; from placewright.backends import backend_of; "
        "print(*(backend_of(s) is not None for s in ('rnnlm', 'x.pb', 3)), "
        "'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "False", "False"], done.stderr


def test_an_evaluator_of_another_graph_is_refused(runner: TensorFlowRunner) -> None:
    other = small(lambda: tf.add(1.0, 2.0, name="sum"), ["sum:0"])
    with pytest.raises(PlacementError, match="another batch or scale"):
        MeasuredEvaluator(make_problem(other.graph, CPU2), runner)


def test_adds_steps_while_they_differ(program: TensorFlowProgram) -> None:
    config = RunConfig(steps=3, max_steps=7, precision=1e-12)
    with TensorFlowRunner(program, Cluster.load("local"), config) as runner:
        assert runner.in_one_process
        run = runner.measure(runs_on(program))
        # Side by side with others it has as many as they have.
        compared = runner.measure(runs_on(program), adaptive=False)
    assert len(run.measurement.step_seconds) == 6
    assert len(compared.measurement.step_seconds) == 2


def test_half_width_is_students() -> None:
    assert half_width([1.0]) == np.inf
    assert half_width([1.0, 3.0]) == pytest.approx(12.7, rel=0.01)
    seconds = np.random.default_rng(0).normal(1.0, 0.1, 100).tolist()
    assert half_width(seconds) == pytest.approx(1.984 * np.std(seconds, ddof=1) / 10, rel=0.01)


def test_runs_a_traced_function_and_its_variables() -> None:
    weights = tf.Variable(tf.ones([8, 8]), name="weights")
    count = tf.Variable(0, name="count", dtype=tf.int64)

    def step(x: Any) -> Any:
        count.assign_add(1)
        weights.assign_sub(0.01 * tf.ones([8, 8]))
        return tf.reduce_sum(tf.matmul(x, weights))

    signature = [tf.TensorSpec([4, 8], tf.float32, name="x")]
    program = load_program(tf.function(step, input_signature=signature))
    with TensorFlowRunner(program, Cluster.load("local"), RunConfig(steps=3)) as runner:
        run = runner.measure(runs_on(program))
    assert run.measurement.ok, run.measurement.reason


def test_cores_are_shared_out() -> None:
    parts = share_cores(2)
    assert len(parts) == 2
    if len(os.sched_getaffinity(0)) >= 2:
        assert not set(parts[0]) & set(parts[1])


# --- programs and feeds --------------------------------------------------------------------------


def test_a_program_has_the_ops_of_the_graph(program: TensorFlowProgram) -> None:
    assert program.graph == load(towers_graph(), fetches=["train", "loss:0"])
    assert program.results == ("loss:0",)
    assert set(program.initializers) == {"left/kernel", "right/kernel"}


def test_a_graph_file_cannot_be_run(tmp_path: Path, program: TensorFlowProgram) -> None:
    program.graph.save(tmp_path / "towers.json")
    with pytest.raises(ModelError, match="cannot be run; give the model itself"):
        load_program(tmp_path / "towers.json")


def test_an_input_that_cannot_be_made_up(program: TensorFlowProgram) -> None:
    def build() -> None:
        text = tf.compat.v1.placeholder(tf.string, [3], name="text")
        tf.strings.length(text, name="length")

    with pytest.raises(ModelError, match=r"input 'text' \(string\) must be fed"):
        TensorFlowRunner(small(build, ["length:0"]), CPU2)


def test_an_iterator_cannot_be_run() -> None:
    def build() -> None:
        data = tf.compat.v1.data.Dataset.range(3)
        tf.identity(tf.compat.v1.data.make_initializable_iterator(data).get_next(), name="next")

    with pytest.raises(ModelError, match="export the model with placeholders"):
        small(build, ["next:0"])


def test_feeds(tmp_path: Path, program: TensorFlowProgram) -> None:
    made = make_feeds(program.inputs, seed=3)
    assert made["x"].shape == (32, 128)
    assert np.array_equal(made["x"], make_feeds(program.inputs, seed=3)["x"])
    given = np.full((32, 128), 2.0)
    assert np.array_equal(make_feeds(program.inputs, {"x": given})["x"], given)
    np.savez(tmp_path / "feeds.npz", x=given)
    assert np.array_equal(load_feeds(tmp_path / "feeds.npz")["x"], given)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"y": np.zeros(3)}, "there is no input 'y' to feed; inputs are x"),
        ({"x": np.zeros(3)}, r"input 'x' is \[32, 128\], what is fed is \[3\]"),
        ({"x": np.zeros((32, 128), complex)}, "input 'x' is float32, what is fed is complex128"),
    ],
)
def test_wrong_feeds(program: TensorFlowProgram, feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_feeds(program.inputs, feeds)


def test_feeds_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", x=np.array([object()], dtype=object), allow_pickle=True)
    with pytest.raises(ModelError, match=r"not an \.npz file of numbers"):
        load_feeds(tmp_path / "evil.npz")
    (tmp_path / "text.npz").write_text("x = 1")
    with pytest.raises(ModelError, match=r"not an \.npz file of numbers"):
        load_feeds(tmp_path / "text.npz")
    with pytest.raises(ModelError, match="no such file of inputs"):
        load_feeds(tmp_path / "none.npz")


# --- faults --------------------------------------------------------------------------------------


def test_tensorflow_is_not_installed(
    program: TensorFlowProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = TensorFlowRunner(program, CPU2)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'placewright\[tensorflow\]'"):
        runner.measure(runs_on(program))


def test_no_kernel_and_not_a_number_are_outcomes() -> None:
    def build() -> None:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.math.log(-1.0 - x * x, name="bad")
        # Only GPUs have it.
        tf.raw_ops.NcclAllReduce(
            input=x, reduction="sum", num_devices=1, shared_name="", name="nccl"
        )

    graph = tf.Graph()
    with graph.as_default():
        build()
    config = RunConfig(steps=3, max_steps=3)
    local = Cluster.load("local")
    with TensorFlowRunner(load_program(graph, fetches=["bad:0"]), local, config) as runner:
        run = runner.measure(runs_on(runner.program))
        assert run.measurement.outcome is Outcome.FAILED
        assert run.measurement.reason == "the step returned NaN in 'bad:0'"
        assert runner.restarts == 0
    with TensorFlowRunner(load_program(graph, fetches=["nccl:0"]), local, config) as runner:
        run = runner.measure(runs_on(runner.program))
    assert run.measurement.outcome is Outcome.FAILED
    assert "nccl" in run.measurement.reason
    assert "\n" not in run.measurement.reason


def test_variables_that_run_away_over_many_placements_begin_anew(
    servers: Mapping[str, str],
) -> None:
    def build() -> None:
        x = tf.compat.v1.placeholder(tf.float32, [4], name="x")
        growing = tf.compat.v1.get_variable(
            "growing", [1000], initializer=tf.compat.v1.ones_initializer(), use_resource=True
        )
        # Ten times as large after every step: infinite after four placements, but not after one.
        step = growing.assign(growing * 10.0)
        with tf.control_dependencies([step]):
            tf.add(tf.reduce_sum(growing.read_value()), 0.0 * tf.reduce_sum(x), name="total")
        wild = growing.read_value() * 1e38
        tf.add(tf.reduce_sum(wild * 1e38), 0.0 * tf.reduce_sum(x), name="always")

    config = RunConfig(steps=10, max_steps=10)
    on_both = dataclasses.replace(config, addresses=servers)
    with TensorFlowRunner(small(build, ["total:0"]), CPU2, on_both) as runner:
        for number in range(12):
            # The same again and again, and both devices by turns.
            devices = runs_on(runner.program, 0 if number < 6 else number % 2)
            measurement = runner.measure(devices).measurement
            assert measurement.ok, (number, measurement.reason)
            unused = measurement.peak_bytes[1 - devices[0]]
            assert unused == 0  # though the other device keeps its copy
        assert runner.restarts == 0
    # One that does so with new variables too has failed.
    with TensorFlowRunner(small(build, ["always:0"]), Cluster.load("local"), config) as runner:
        for _ in range(2):
            measurement = runner.measure(runs_on(runner.program)).measurement
            assert measurement.outcome is Outcome.FAILED
            assert "infinity in 'always:0'" in measurement.reason


def test_what_failed_runs_left_behind_is_not_counted(servers: Mapping[str, str]) -> None:
    def build() -> None:
        x = tf.compat.v1.placeholder(tf.float32, [1000], name="x")
        big = tf.compat.v1.get_variable("big", [1000, 1000], use_resource=True)
        count = tf.compat.v1.get_variable(
            "count", [], initializer=tf.compat.v1.zeros_initializer(), use_resource=True
        )
        # The fifth step on a device fails.
        more = count.assign_add(1.0)
        fifth = tf.raw_ops.Assert(condition=tf.not_equal(more, 5.0), data=[more])
        with tf.control_dependencies([fifth]):
            tf.reduce_sum(tf.linalg.matvec(big, x), name="sum")
        tf.multiply(x, 2.0, name="other")

    config = RunConfig(steps=3, max_steps=3, addresses=servers)
    with TensorFlowRunner(small(build, ["sum:0", "other:0"]), CPU2, config) as runner:
        mostly_left = [int(name == "other") for name in runner.program.graph.op_names]
        assert runner.measure(mostly_left).measurement.peak_bytes[1] < 1e6
        assert runner.measure(runs_on(runner.program, 1)).measurement.ok
        assert runner.measure(runs_on(runner.program, 1)).measurement.outcome is Outcome.FAILED
        again = runner.measure(mostly_left).measurement
        assert again.ok
        assert runner.restarts == 0
        assert again.peak_bytes[1] < 1e6  # the copy of 4 MB is of the placements before


def several_at_once() -> TensorFlowProgram:
    """Tensors of which some have room, and then keep TensorFlow's threads from freeing it."""

    def build() -> None:
        variable = tf.compat.v1.get_variable("v", [1000, 1000], use_resource=True)
        sums = [tf.reduce_sum(tf.random.normal([2000, 1000])) for _ in range(4)]
        tf.add_n([*sums, tf.reduce_sum(variable.read_value())], name="total")

    return small(build, ["total:0"])


# TensorFlow itself waits ten seconds for each of what has no room: this is less.
AT_ONCE = RunConfig(limit_memory=True, steps=3, max_steps=3, time_limit_seconds=8.0)


def test_more_than_a_devices_memory() -> None:
    sizes = (16 << 20, 256 << 20)
    devices = tuple(
        dataclasses.replace(device, memory_bytes=size)
        for device, size in zip(CPU2.devices, sizes, strict=True)
    )
    cluster = dataclasses.replace(CPU2, devices=devices)
    with TensorFlowRunner(several_at_once(), cluster, AT_ONCE) as runner:
        for _ in range(2):
            full = runner.measure(runs_on(runner.program)).measurement
            assert full.outcome is Outcome.OUT_OF_MEMORY
            assert re.match(r"cpu:0 held [\d.]+ MB at once and has 16.8 MB$", full.reason)
            # What was there does not count for the next.
            roomy = runner.measure(runs_on(runner.program, 1)).measurement
            assert roomy.ok, roomy
        assert runner.restarts == 0  # TensorFlow survives it


def test_more_memory_than_a_run_that_does_not_end_may_hold() -> None:
    """It is not let go on until its time is over."""
    devices = tuple(dataclasses.replace(d, memory_bytes=16 << 20) for d in CPU2.devices)
    cluster = dataclasses.replace(CPU2, devices=devices)
    endless = dataclasses.replace(
        AT_ONCE, steps=FOREVER, max_steps=FOREVER, time_limit_seconds=600.0
    )
    with TensorFlowRunner(several_at_once(), cluster, endless) as runner:
        full = runner.measure(runs_on(runner.program, 1)).measurement
        assert full.outcome is Outcome.OUT_OF_MEMORY
        assert full.reason.startswith("cpu:1 held")
        assert runner.restarts == 1


def test_memory_that_tensorflow_waits_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: its allocator has an end, and ops wait there one after another."""
    monkeypatch.setenv("TF_MKL_ALLOC_MAX_BYTES", str(16 << 20))
    config = RunConfig(steps=3, max_steps=3)
    with TensorFlowRunner(several_at_once(), CPU2, config) as runner:
        full = runner.measure(runs_on(runner.program)).measurement
        assert full.outcome is Outcome.OUT_OF_MEMORY, full
        assert "device cpu:0 ran out of memory trying to allocate 7.63MiB" in full.reason


def test_without_its_counting_allocator_memory_cannot_be_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    with TensorFlowRunner(towers(), CPU2, AT_ONCE) as runner:
        with pytest.raises(WorkerError, match="TF_ENABLE_ONEDNN_OPTS"):
            runner.measure(runs_on(runner.program))
        assert runner.pids == ()


def test_a_device_that_the_system_kills_for_memory() -> None:
    def build() -> None:
        tf.reduce_sum(tf.random.normal([200_000, 1000]), name="sum")

    with (
        memory_group(1 << 29) as members,
        TensorFlowRunner(small(build, ["sum:0"]), CPU2, RunConfig(steps=3)) as runner,
    ):
        runner.start()
        members.write_text(str(runner.pids[1]))
        full = runner.measure(runs_on(runner.program, 1)).measurement
        assert full.outcome is Outcome.OUT_OF_MEMORY, full
        assert "device cpu:1 was killed by signal 9 (SIGKILL): the system ran out" in full.reason
        assert runner.restarts == 1


def test_what_dies_hangs_or_takes_too_long_is_replaced(program: TensorFlowProgram) -> None:
    config = RunConfig(steps=FOREVER, max_steps=FOREVER, time_limit_seconds=4.0)
    quick = dataclasses.replace(config, steps=3, max_steps=3, time_limit_seconds=60.0)
    with TensorFlowRunner(program, CPU2, config) as runner:
        runner.start()

        # Too slow: TensorFlow itself stops the step, and all goes on.
        slow = runner.measure(by_tower(program)).measurement
        assert slow.outcome is Outcome.TIMED_OUT
        assert runner.restarts == 0

        # Killed in the midst of a step.
        victim = runner.pids[1]
        threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
        killed = runner.measure(by_tower(program)).measurement
        assert killed.outcome is Outcome.FAILED
        assert killed.reason.startswith(
            "the process of device cpu:1 was killed by signal 9 (SIGKILL)"
        )
        assert runner.restarts == 1
        assert wait_for(lambda: gone(victim))

        # One that neither answers nor dies: the master, another device, one that the placement does
        # not use (so that TensorFlow does not notice), the client. After each the next runs.
        for number, used in ((0, True), (1, True), (1, False), (2, True)):
            restarts = runner.restarts
            runner.config = quick
            assert runner.measure(by_tower(program)).measurement.ok
            assert runner.restarts == restarts
            runner.config = config
            pids = runner.pids
            threading.Timer(1.0, os.kill, (pids[number], signal.SIGSTOP)).start()
            hung = runner.measure(by_tower(program) if used else runs_on(program)).measurement
            assert hung.outcome is Outcome.TIMED_OUT, number
            assert runner.restarts == restarts + 1
            assert all(wait_for(lambda pid=pid: gone(pid)) for pid in pids)  # type: ignore[misc]

        # One that died while nothing ran is no fault of the placement that comes next.
        runner.config = quick
        assert runner.measure(by_tower(program)).measurement.ok
        os.kill(runner.pids[1], signal.SIGKILL)
        assert wait_for(lambda: gone(runner.pids[1]))
        assert runner.measure(by_tower(program)).measurement.ok
        assert runner.restarts == 6

        # Signs of life, and none.
        assert runner._silent() == ""
        assert runner._silent() == ""  # not taken for an answer that came late
        os.kill(runner.pids[1], signal.SIGSTOP)
        assert runner._silent() == "the process of device cpu:1"
        last = runner.pids
    assert all(wait_for(lambda pid=pid: gone(pid)) for pid in last)  # type: ignore[misc]


def test_servers_are_in_a_private_network(program: TensorFlowProgram) -> None:
    ours = os.readlink("/proc/self/ns/net")
    with TensorFlowRunner(program, CPU2, RunConfig(steps=3, max_steps=3)) as runner:
        assert runner.measure(by_tower(program)).measurement.ok
        assert runner._network is not None
        holder = runner._network._holder.pid
        (theirs,) = {os.readlink(f"/proc/{pid}/ns/net") for pid in runner.pids}
        assert theirs != ours
        # Without its holder no new client would get in: all are replaced.
        os.kill(holder, signal.SIGKILL)
        assert wait_for(lambda: gone(holder))
        runner.restart_client()
        assert runner.measure(by_tower(program)).measurement.ok
        assert runner.restarts == 1
        holder = runner._network._holder.pid
    assert wait_for(lambda: gone(holder))
    one_process = TensorFlowRunner(program, Cluster.load("local"), RunConfig(steps=3))
    assert one_process._make_network() is None  # no servers, nobody to keep out


def test_without_a_private_network_servers_are_opened_only_when_told_to(
    program: TensorFlowProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError("unshare: Operation not permitted")

    monkeypatch.setattr(runner_module, "PrivateNetwork", refuse)
    monkeypatch.setattr(tensorflow_backend, "PrivateNetwork", refuse)
    runner = TensorFlowRunner(program, CPU2)
    with pytest.raises(WorkerError, match=r"not permitted.*without a password; open_servers"):
        runner.start()
    assert runner.pids == ()
    assert "open_servers" in BACKEND.why_not_here(CPU2)
    opened = RunConfig(steps=3, max_steps=3, open_servers=True)
    assert BACKEND.why_not_here(CPU2, opened) == ""
    assert TensorFlowRunner(program, CPU2, opened)._make_network() is None


def test_a_port_that_is_taken(program: TensorFlowProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (other,) = free_ports(1)
        # One that the user chose is an error,
        config = RunConfig(ports=(port, other), steps=3, max_steps=3, open_servers=True)
        chosen = TensorFlowRunner(program, CPU2, config)
        message = rf"device cpu:0 \(port {port}\) did not start: its port is already taken"
        with pytest.raises(WorkerError, match=message):
            chosen.measure(runs_on(program))
        assert chosen.pids == ()
        # and one of ours is replaced.
        free = free_ports(2)
        draws = iter([[port, other], free])
        monkeypatch.setattr(runner_module, "free_ports", lambda count: next(draws))
        config = RunConfig(steps=3, max_steps=3, open_servers=True)
        with TensorFlowRunner(program, CPU2, config) as ours:
            assert ours.measure(runs_on(program)).measurement.ok
            assert ours._target == f"grpc://127.0.0.1:{free[0]}"


def test_what_others_keep_on_their_servers_stays(
    program: TensorFlowProgram, servers: Mapping[str, str]
) -> None:
    graph = tf.Graph()
    with graph.as_default():
        # Of the same name as one of the program's.
        mine = tf.compat.v1.get_variable("left/kernel", [], use_resource=True)
        put, got = mine.assign(7.0).op, mine.read_value()
    target = f"grpc://{servers['cpu:0']}"
    with tf.compat.v1.Session(target, graph=graph) as session:
        session.run(put)
    # Servers that run already are used as they are: all that is started is a client.
    config = RunConfig(steps=3, max_steps=3, check=True, addresses=servers)
    with TensorFlowRunner(program, CPU2, config) as guest:
        run = guest.measure(by_tower(program))
        assert run.measurement.ok
        assert run.misplaced == ()
        assert len(guest.pids) == 1
        guest.restart_client()  # which clears what the one before left
        assert guest.measure(runs_on(program)).measurement.ok
    with tf.compat.v1.Session(target, graph=graph) as session:
        assert session.run(got) == 7.0


@pytest.mark.parametrize(
    ("number", "cluster", "children"), [(signal.SIGKILL, "cpu2", 3), (signal.SIGINT, "local", 1)]
)
def test_nothing_outlives_the_parent(
    number: signal.Signals, cluster: str, children: int, tmp_path: Path
) -> None:
    script = textwrap.dedent(
        """
        import signal
        import sys
        from placewright.cluster import Cluster
        from placewright.backends.tensorflow import TensorFlowRunConfig as RunConfig
        from placewright.backends.tensorflow.runner import TensorFlowRunner
        from tests.towers import towers

        # A shell that starts the tests in the background has it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        program = towers()
        config = RunConfig(steps=10**6, max_steps=10**6, time_limit_seconds=600)
        runner = TensorFlowRunner(program, Cluster.load(sys.argv[1]), config)
        runner.start()
        print(*runner.pids, flush=True)
        runner.measure([0] * program.graph.num_ops)
        """
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = f"{root}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, cluster],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=root,
    )
    assert parent.stdout is not None
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == children
        time.sleep(1.0)  # until it measures
        assert not any(gone(pid) for pid in pids)
        parent.send_signal(number)
        parent.wait(timeout=60)
        assert wait_for(lambda: all(gone(pid) for pid in pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert list(tmp_path.iterdir()) == []  # no file either


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 1}, "steps must be at least 2"),
        ({"steps": 10, "max_steps": 5}, "max_steps"),
        ({"time_limit_seconds": 0.0}, "time_limit_seconds must be positive"),
        ({"threads_between_ops": 0}, "threads_between_ops"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        RunConfig(**settings)


def test_addresses_are_for_all_devices_or_none(program: TensorFlowProgram) -> None:
    with pytest.raises(WorkerError, match="no address for device cpu:1"):
        TensorFlowRunner(program, CPU2, RunConfig(addresses={"cpu:0": "localhost:1"}))


@pytest.mark.slow
def test_hundreds_of_placements_do_not_grow(program: TensorFlowProgram) -> None:
    rng = np.random.default_rng(0)
    problem = make_problem(program.graph, CPU2)

    def resident(pids: tuple[int, ...]) -> list[int]:
        return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]

    with TensorFlowRunner(program, CPU2, RunConfig(steps=3, max_steps=3)) as runner:
        sizes = []
        for number in range(400):
            devices = rng.integers(0, 2, problem.num_groups)[problem.grouping.group_of]
            assert runner.measure(devices).measurement.ok
            if number in (199, 399):
                sizes.append(resident(runner.pids))
    for before, after in zip(*sizes, strict=True):
        assert after < 1.1 * before
