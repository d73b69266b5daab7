"""Placements put into TensorFlow's graphs, and TensorFlow running them as it was told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placewright.errors import ModelError, PlacementError

tf: Any = pytest.importorskip("tensorflow")

from placewright import Cluster, Placement, Problem, ProblemConfig, load, make_problem, place  # noqa: E402
from placewright.backends.tensorflow import wire  # noqa: E402
from placewright.backends.tensorflow.apply import (  # noqa: E402
    apply_to_file,
    apply_to_object,
    tensorflow_devices,
)
from placewright.cli import main  # noqa: E402
from placewright.placement import read_ops  # noqa: E402
from placewright.session.result import Result  # noqa: E402
from placewright.tensorflow import place_graph  # noqa: E402

DEVICES = 3

CLUSTER = """
name: three
devices:
  - {name: "cpu:0", kind: haswell-18}
  - {name: "cpu:1", kind: haswell-18}
  - {name: "cpu:2", kind: haswell-18}
links:
  - {name: bus, latency: 10us, bandwidth: 10 GB/s,
     pairs: [["cpu:0", "cpu:1"], ["cpu:0", "cpu:2"], ["cpu:1", "cpu:2"]]}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "three.yaml").write_text(CLUSTER)
    return Cluster.load(str(tmp_path / "three.yaml"))


def training_graph() -> tuple[Any, str]:
    """Two layers and Adam, TensorFlow 1 style."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [8, 4], "x")
        for i in (0, 1):
            with tf.compat.v1.variable_scope(f"layer{i}"):
                w = tf.compat.v1.get_variable("w", [4, 4], use_resource=True)
                x = tf.nn.relu(tf.matmul(x, w))
        loss = tf.reduce_mean(tf.square(x), name="loss")
        optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
        grads = optimizer.compute_gradients(loss, colocate_gradients_with_ops=True)
        train = optimizer.apply_gradients(grads, name="train")
        tf.compat.v1.global_variables_initializer()
        tf.compat.v1.add_to_collection("train_op", train)
    return graph, "train"


def scattered(problem: Problem, seed: int = 1) -> Result:
    """A result whose placement uses every device, so that nothing is right by accident."""
    drawn = np.random.default_rng(seed).integers(0, problem.num_devices, problem.num_groups)
    from placewright import Measurement, Outcome, Trial

    trial = Trial(
        placement=Placement.of(problem, drawn.tolist()),
        measurement=Measurement(outcome=Outcome.OK, step_seconds=(1.0,)),
        placer="scattered",
    )
    return Result(
        problem=problem, best=trial, methods=(), lower_bound_seconds=0.5, seconds=0.0, seed=0
    )


def run_traced(graph: Any, fetch: str, feeds: dict[str, Any], initializer: str | None) -> Any:
    """Runs a step and gives TensorFlow's own record of what ran where: op -> device."""
    config = tf.compat.v1.ConfigProto(device_count={"CPU": DEVICES}, allow_soft_placement=False)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    record = tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        if initializer is not None:
            session.run(initializer)
        session.run(fetch, feeds, options=options, run_metadata=record)
    return where_it_ran(record)


def where_it_ran(record: Any) -> dict[str, str]:
    """Op name -> `/device:CPU:1`."""
    result = {}
    for device in record.step_stats.dev_stats:
        name = device.device[device.device.index("/device:") :]
        for entry in device.node_stats:
            result[entry.node_name.split(":")[0]] = name
    return result


def test_round_trip_of_a_meta_graph_and_where_tensorflow_runs_it(
    tmp_path: Path, cluster: Cluster
) -> None:
    graph, train = training_graph()
    with graph.as_default():
        tf.compat.v1.train.export_meta_graph(str(tmp_path / "model.meta"))
    before = load(str(tmp_path / "model.meta"))
    result = scattered(make_problem(before, cluster, ProblemConfig(groups=12)))
    result.save(tmp_path / "out")
    placement = tmp_path / "out" / "placement.json"
    main_exit("apply", tmp_path / "model.meta", placement, "-o", tmp_path / "placed.meta")
    assert load(str(tmp_path / "placed.meta")).fingerprint == before.fingerprint

    placed = tf.Graph()
    with placed.as_default():
        tf.compat.v1.train.import_meta_graph(str(tmp_path / "placed.meta"))
    ran = run_traced(placed, train, {"x:0": np.ones([8, 4])}, "init")
    wanted = result.placement_by_op()
    assert len(set(wanted.values())) == DEVICES
    checked = {op: device for op, device in ran.items() if op in wanted}
    assert len(checked) > 20
    assert checked == {op: f"/device:CPU:{wanted[op][-1]}" for op in checked}


def main_exit(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert caught.value.code == code


@pytest.mark.parametrize("kind", ["GraphDef", "MetaGraphDef"])
def test_only_the_device_fields_differ(tmp_path: Path, cluster: Cluster, kind: str) -> None:
    graph, train = training_graph()
    with graph.as_default():
        meta = tf.compat.v1.train.export_meta_graph()
    message = meta if kind == "MetaGraphDef" else meta.graph_def
    # A field from the future, and a node that has a device already.
    meta.graph_def.node[3].device = "/device:CPU:7"
    content = message.SerializeToString() + b"\xfa\x3f\x03abc"
    path = tmp_path / ("m.meta" if kind == "MetaGraphDef" else "m.pb")
    path.write_bytes(content)
    result = scattered(
        make_problem(load(str(path), fetches=[train]), cluster, ProblemConfig(groups=9))
    )
    placed = {op: f"/device:CPU:{name[-1]}" for op, name in result.placement_by_op().items()}
    assert apply_to_file(path, placed, tmp_path / "out") >= len(placed)
    written = (tmp_path / "out").read_bytes()
    after = type(message)()
    after.ParseFromString(written)
    nodes = (after.graph_def if kind == "MetaGraphDef" else after).node
    assert {node.name: node.device for node in nodes if node.name in placed} == placed
    # Putting the old devices back gives the old bytes.
    old = {node.name: node.device for node in meta.graph_def.node if node.device}
    restore = {node.name: old.get(node.name) for node in nodes}
    back = remove_devices(written, kind, restore)
    assert back == content
    # Applying twice is applying once.
    apply_to_file(tmp_path / "out", placed, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == written


def remove_devices(data: bytes, kind: str, restore: dict[str, str | None]) -> bytes:
    """The bytes with each node's device as before, none where there was none."""

    def node(part: bytes) -> bytes:
        name = (wire._last(part, 1) or b"").decode()
        if restore[name] is not None:
            return wire._in_node(part, restore.get)
        return b"".join(part[start:end] for n, _, start, _, end in wire._fields(part) if n != 4)

    def in_graph(part: bytes) -> bytes:
        return wire._edited(part, {1: node})

    return wire._edited(data, {2: in_graph}) if kind == "MetaGraphDef" else in_graph(data)


def test_initialisers_and_savers_follow_their_variables(cluster: Cluster) -> None:
    graph, train = training_graph()
    result = scattered(
        make_problem(load(graph, fetches=[train]), cluster, ProblemConfig(groups=10))
    )
    assert result.apply(graph) is graph
    wanted = result.placement_by_op()
    assert "layer0/w/Assign" not in wanted  # no part of the step
    variable = f"/device:CPU:{wanted['layer0/w'][-1]}"
    assert graph.get_operation_by_name("layer0/w/Assign").device == variable
    run_traced(graph, train, {"x:0": np.ones([8, 4])}, "init")


def test_text_files_stay_text(tmp_path: Path, cluster: Cluster) -> None:
    graph, train = training_graph()
    tf.io.write_graph(graph, str(tmp_path), "m.pbtxt", as_text=True)
    path = tmp_path / "m.pbtxt"
    result = scattered(make_problem(load(str(path), fetches=[train]), cluster))
    placed = {op: f"/device:CPU:{name[-1]}" for op, name in result.placement_by_op().items()}
    apply_to_file(path, placed, tmp_path / "out.pbtxt")
    text = (tmp_path / "out.pbtxt").read_text()
    without = [line for line in text.splitlines() if not line.strip().startswith("device:")]
    assert without == path.read_text().splitlines()
    assert load(str(tmp_path / "out.pbtxt"), fetches=[train]) is not None


# --- SavedModels and functions -------------------------------------------------------------------


class Net(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first = tf.Variable(tf.ones([4, 4]), name="first")
        self.second = tf.Variable(tf.ones([4, 4]) * 0.5, name="second")

    @tf.function(input_signature=[tf.TensorSpec([2, 4], name="x")])  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        left = tf.nn.relu(tf.matmul(x, self.first, name="left"))
        right = tf.nn.relu(tf.matmul(x, self.second, name="right"))
        total = tf.add(left, right, name="total")
        total = tf.cond(tf.reduce_sum(total) > 0, lambda: total * 2.0, lambda: total - 1.0)
        _, total = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + 1.0), [0, total])
        return {"out": total}


def test_saved_model_in_saved_model_out(tmp_path: Path, cluster: Cluster) -> None:
    net = Net()
    tf.saved_model.save(net, str(tmp_path / "model"), signatures=net.__call__)
    before = load(str(tmp_path / "model"))
    result = scattered(make_problem(before, cluster, ProblemConfig(groups=10)), seed=2)
    result.save(tmp_path / "out")
    ops = read_ops(tmp_path / "out" / "placement.json")
    main_exit(
        "apply", tmp_path / "model", tmp_path / "out" / "placement.json", "-o", tmp_path / "placed"
    )
    assert load(str(tmp_path / "placed")).fingerprint == before.fingerprint
    files = [tmp_path / name / "saved_model.pb" for name in ("model", "placed")]
    assert files[0].read_bytes() != files[1].read_bytes()
    assert without_devices(files[0].read_bytes()) == without_devices(files[1].read_bytes())
    names = {path.name for path in (tmp_path / "placed").iterdir()}
    assert names == {"saved_model.pb", "variables", "assets"}

    graph = tf.Graph()
    config = tf.compat.v1.ConfigProto(device_count={"CPU": DEVICES}, allow_soft_placement=False)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    record = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "placed"))
        signature = meta.signature_def["serving_default"]
        out = session.run(
            signature.outputs["out"].name,
            {signature.inputs["x"].name: np.ones([2, 4], np.float32)},
            options=options,
            run_metadata=record,
        )
    np.testing.assert_allclose(out, net(tf.ones([2, 4]))["out"])
    ran = where_it_ran(record)
    checked = 0
    for name in ("left", "right", "total", "Relu", "Relu_1"):
        (op,) = [op for op in ops if op.endswith(f"StatefulPartitionedCall/{name}")]
        found = {device for ran_as, device in ran.items() if ran_as.split("/")[-1] == name}
        assert found == {f"/device:CPU:{ops[op][-1]}"}, name
        checked += 1
    assert checked == 5
    main_exit(
        "apply", tmp_path / "model", tmp_path / "out" / "placement.json", "-o", tmp_path / "placed",
        code=2,
    )  # fmt: skip


def without_devices(saved_model: bytes) -> bytes:
    """The bytes of a SavedModel with the device fields of all nodes, also in functions, cut out."""

    def node(part: bytes) -> bytes:
        return b"".join(part[start:end] for n, _, start, _, end in wire._fields(part) if n != 4)

    def function(part: bytes) -> bytes:
        return wire._edited(part, {3: node})

    def graph(part: bytes) -> bytes:
        return wire._edited(part, {1: node, 2: lambda p: wire._edited(p, {1: function})})

    return wire._edited(saved_model, {2: lambda part: wire._edited(part, {2: graph})})


class Shared(tf.Module):  # type: ignore[misc]
    """Calls one function for two variables."""

    def __init__(self) -> None:
        super().__init__()
        self.first = tf.Variable(tf.ones([4, 4]), name="first")
        self.second = tf.Variable(tf.ones([4, 4]), name="second")

    @tf.function(input_signature=[tf.TensorSpec([2, 4], name="x")])  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        return {"out": _layer(_layer(x, self.first), self.second)}


@tf.function  # type: ignore[untyped-decorator]
def _layer(x: Any, weights: Any) -> Any:
    return tf.nn.relu(tf.matmul(x, weights))


def test_a_function_called_twice_has_one_device(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    net = Shared()
    tf.saved_model.save(net, str(tmp_path / "model"), signatures=net.__call__)
    placed = {
        op: "/device:CPU:2" if "second" in op or "Call_1/" in op else "/device:CPU:1"
        for op in load(str(tmp_path / "model")).op_names
    }
    apply_to_file(tmp_path / "model", placed, tmp_path / "placed")
    assert "functions that are called several times" in caplog.text
    config = tf.compat.v1.ConfigProto(device_count={"CPU": DEVICES}, allow_soft_placement=False)
    with tf.compat.v1.Session(graph=tf.Graph(), config=config) as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "placed"))
        signature = meta.signature_def["serving_default"]
        feeds = {signature.inputs["x"].name: np.ones([2, 4], np.float32)}
        out = session.run(signature.outputs["out"].name, feeds)
    np.testing.assert_allclose(out, net(tf.ones([2, 4]))["out"])


FUNCTION = """
import numpy as np, tensorflow as tf, sys
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # as it is
import keras, placewright
from placewright import Cluster, ProblemConfig, load, make_problem

cluster = Cluster.load(sys.argv[1])
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"),
                          keras.layers.Dense(2)])
optimizer = keras.optimizers.SGD(0.1)
optimizer.build(model.trainable_variables)

@tf.function(autograph=False)
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss, "nothing": None, "input": x}

x, y = tf.ones([16, 4]), tf.ones([16, 2])
concrete = step.get_concrete_function(x, y)
result = placewright.place(make_problem(load(concrete), cluster, ProblemConfig(groups=8)),
                           method="random", trials=20)
placed = result.apply(concrete)

start = [v.numpy() for v in model.trainable_variables]
expected = float(concrete(x, y)["loss"])
after = [v.numpy() for v in model.trainable_variables]
for v, value in zip(model.trainable_variables, start):
    v.assign(value)
from tensorflow.python.eager import context
context.enable_run_metadata()
got = placed(x, y)
record = context.export_run_metadata()
assert got["nothing"] is None and got["input"].shape == x.shape
assert float(got["loss"]) == expected, (float(got["loss"]), expected)
for v, value in zip(model.trainable_variables, after):
    np.testing.assert_array_equal(v.numpy(), value)  # the same variables, updated the same way
wanted = result.placement_by_op()
seen = {}
for graph in record.function_graphs:  # what each device was given to run
    for part in graph.partition_graphs:
        for node in part.node:
            # Variables stay where they were made, and what works on them with them.
            if node.name in wanted and "Variable" not in node.op and node.op != "_Arg":
                assert node.device.endswith(wanted[node.name].upper()), (node, wanted[node.name])
                seen[node.name] = node.device
assert len(seen) > 20 and len(set(seen.values())) > 1, seen
print(len(seen), "ops where they were put")
"""


def test_a_keras_step_runs_where_it_is_put(tmp_path: Path, cluster: Cluster) -> None:
    """In a process of its own: TensorFlow's devices are fixed when it starts."""
    done = subprocess.run(
        [sys.executable, "-c", FUNCTION, str(tmp_path / "three.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ops where they were put" in done.stdout


# --- as TensorFlow's graph_placer was called -----------------------------------------------------


def test_place_graph(cluster: Cluster) -> None:
    graph, _ = training_graph()
    with graph.as_default():
        meta = tf.compat.v1.train.export_meta_graph()
    placed = place_graph(meta, cluster, allotted_time=0.5, method="single,local-search")
    assert not any(node.device for node in meta.graph_def.node)  # a copy is placed
    devices = {node.name: node.device for node in placed.graph_def.node}
    assert devices["layer0/MatMul"].startswith("/device:CPU:")
    cleared = type(meta)()
    cleared.CopyFrom(placed)
    for node in cleared.graph_def.node:
        node.device = ""
    assert cleared == meta
    with pytest.raises(ModelError, match="expected a MetaGraphDef, not a int"):
        place_graph(3)


# --- faults --------------------------------------------------------------------------------------


def test_device_names() -> None:
    assert tensorflow_devices(["cpu:0", "gpu:12", "/job:w/task:1/device:GPU:0"]) == {
        "cpu:0": "/device:CPU:0",
        "gpu:12": "/device:GPU:12",
        "/job:w/task:1/device:GPU:0": "/job:w/task:1/device:GPU:0",
    }
    given = {"left": "/job:a/device:CPU:0"}
    assert tensorflow_devices(["left"], given) == given
    with pytest.raises(PlacementError, match="what does TensorFlow call device 'left'"):
        tensorflow_devices(["left"])
    with pytest.raises(PlacementError, match="not a device of TensorFlow's"):
        tensorflow_devices(["left"], {"left": "/job:a/nonsense"})
    with pytest.raises(PlacementError, match="uses no device 'right'"):
        tensorflow_devices(["cpu:0"], {"right": "/device:CPU:1"})


def test_devices_that_the_placement_does_not_use_may_be_named() -> None:
    graph = tf.Graph()
    with graph.as_default():
        a = tf.compat.v1.placeholder(tf.float32, [8, 8], "a")
        tf.matmul(a, a, name="b")
    result = place(load(graph), "cpu2", method="single", trials=2)
    names = {"cpu:0": "/device:CPU:3", "cpu:1": "/device:CPU:3"}
    result.apply(graph, devices=names)
    assert graph.get_operation_by_name("b").device == "/device:CPU:3"
    with pytest.raises(PlacementError, match="uses no device 'gpu:7'"):
        result.apply(graph, devices=names | {"gpu:7": "/device:GPU:7"})


def test_faults_are_told(
    tmp_path: Path, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    graph, train = training_graph()
    tf.io.write_graph(graph, str(tmp_path), "m.pb", as_text=False)
    result = scattered(make_problem(load(str(tmp_path / "m.pb"), fetches=[train]), cluster))
    result.save(tmp_path / "out")
    placement = tmp_path / "out" / "placement.json"
    other = tf.Graph()
    with other.as_default():
        tf.constant(1.0, name="only")
    tf.io.write_graph(other, str(tmp_path), "other.pb", as_text=False)
    (tmp_path / "torn.pb").write_bytes((tmp_path / "m.pb").read_bytes()[:-9])
    (tmp_path / "edited.json").write_text('{"format": "placewright-placement/1", "groups": {}}')
    (tmp_path / "g.json").write_text("{}")
    cases = [
        ("other.pb", placement, "o.pb", "the placement is for another model"),
        ("torn.pb", placement, "o.pb", "is it truncated"),
        ("none.pb", placement, "o.pb", "no such file"),
        ("m.pb", tmp_path / "edited.json", "o.pb", "does not say the device of every op"),
        ("m.pb", placement, "m.pb", "is the model itself"),
        ("g.json", placement, "o.pb", "a graph file has no devices"),
        ("m.pb", placement, "no/such/o.pb", "cannot be written"),
    ]
    for model, file, output, message in cases:
        main_exit("apply", tmp_path / model, file, "-o", tmp_path / output, code=2)
        err = capfd.readouterr().err
        assert message in err, err
        assert not (tmp_path / "o.pb").exists()
    with pytest.raises(PlacementError, match="cannot apply a placement to a int"):
        result.apply(3)
    net = Net()
    concrete = net.__call__.get_concrete_function()
    with pytest.raises(PlacementError, match="apply the placement to the function itself"):
        result.apply(concrete.graph)
    with pytest.raises(PlacementError, match="another model"):
        apply_to_object(concrete, {"nowhere": "/device:CPU:0"})


def test_wire_faults() -> None:
    nothing = wire.Devices({}, {})
    for data, message in ((b"\x0a\x05ab", "middle of a field"), (b"\x80", "middle of a number"),
                          (b"\x0b", "kind 3")):  # fmt: skip
        with pytest.raises(ModelError, match=message):
            wire.in_graph(data, nothing)
