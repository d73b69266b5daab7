"""For tests: graphs and problems of any size, tiny problems with known optima, and the contracts
that every backend, runner, evaluator and placer keeps."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placewright.backends import Backend, LoadOptions, Plan, Run, RunConfig, Runner
from placewright.cluster import Cluster, Device, DeviceKind, Link, builtin_kinds
from placewright.costs import estimate_costs
from placewright.errors import PlacementError, WorkerError
from placewright.evaluators.base import Evaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Edge, Graph, Op, Tensor, Work, frozen
from placewright.grouping import Grouping, each_op
from placewright.homes import Homes
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.problem import Problem

# --- graphs and clusters -------------------------------------------------------------------------


def layered_graph(ops: int, width: int, seed: int = 0) -> Graph:
    """A random graph in layers of `width` ops, with the mixture real training graphs have.

    Ops take one to three inputs, four in five from the layer before and the rest from up to eight
    layers back. Some own a variable, pass on their input's memory, have a second output or wait
    for a control edge.
    """
    rng = np.random.default_rng(seed)
    records: list[Op] = []
    edges: list[Edge] = []
    sizes = np.exp(rng.uniform(np.log(1e3), np.log(4e6), size=(ops, 2))).astype(np.int64)
    flops = np.exp(rng.uniform(np.log(1e4), np.log(1e9), size=ops))
    kinds = rng.random((ops, 4))
    for i in range(ops):
        layer = i // width
        fan_in = int(rng.integers(1, 4)) if layer else 0
        inputs: list[tuple[int, int]] = []
        for _ in range(fan_in):
            back = 1 if rng.random() < 0.8 else int(rng.integers(1, 9))
            source = max(layer - back, 0) * width + int(rng.integers(width))
            inputs.append((source, int(rng.integers(len(records[source].outputs)))))
        outputs = [Tensor(int(sizes[i, 0]))]
        if inputs and kinds[i, 0] < 0.08:
            source, output = inputs[0]
            size = records[source].outputs[output].bytes
            outputs = [Tensor(size, shares=(f"op{source}", output))]
        if kinds[i, 1] < 0.08:
            outputs.append(Tensor(int(sizes[i, 1])))
        records.append(
            Op(
                name=f"op{i}",
                type="Op",
                outputs=tuple(outputs),
                flops=float(flops[i]),
                param_bytes=int(sizes[i, 1]) if kinds[i, 2] < 0.05 else 0,
            )
        )
        edges += [Edge(f"op{s}", f"op{i}", output) for s, output in inputs]
        if layer and kinds[i, 3] < 0.03:
            source = (layer - 1) * width + int(rng.integers(width))
            edges.append(Edge(f"op{source}", f"op{i}", None))
    return Graph.from_ops(f"layered-{ops}", records, edges)


def timed_layers(ops: int, width: int, seed: int = 0) -> Graph:
    """Layers of `width` ops whose times are given, so that no cost model is between the graph and
    the result: every op takes one to three inputs from the layer before, runs for 5 us to 0.5 ms
    and makes a tensor of 1 kB to 2 MB, both log-uniform."""
    rng = np.random.default_rng(seed)
    seconds = np.exp(rng.uniform(np.log(5e-6), np.log(5e-4), size=ops)).tolist()
    sizes = np.exp(rng.uniform(np.log(1e3), np.log(2e6), size=ops)).astype(np.int64).tolist()
    fan_in = rng.integers(1, 4, size=ops).tolist()
    picked = rng.integers(width, size=(ops, 3)).tolist()
    records = [
        Op(name=f"op{i}", type="Op", outputs=(Tensor(sizes[i]),), seconds={"dev": seconds[i]})
        for i in range(ops)
    ]
    edges = [
        Edge(f"op{(i // width - 1) * width + source}", f"op{i}")
        for i in range(width, ops)
        for source in dict.fromkeys(picked[i][: fan_in[i]])
    ]
    return Graph.from_ops(f"layers-{ops}", records, edges)


def four_accelerators() -> Cluster:
    """What `timed_layers` are placed on in the benchmark of large graphs."""
    return replace(
        uniform_cluster(4, latency_seconds=25e-6, bandwidth=7.6e9), name="four-accelerators"
    )


def gpu_boards(gpus: int = 4) -> Cluster:
    """K80 GPUs in pairs on boards, each pair sharing one connection to the host."""
    kind = builtin_kinds()["tesla-k80"]
    names = [f"gpu:{i}" for i in range(gpus)]
    return Cluster(
        name=f"boards-{gpus}",
        devices=tuple(
            Device(name=name, kind=kind, memory_bytes=kind.memory_bytes) for name in names
        ),
        switches=("host",),
        links=tuple(
            Link(
                name=f"board{first // 2}",
                latency_seconds=20e-6,
                bandwidth=10e9,
                pairs=tuple((name, "host") for name in names[first : first + 2]),
            )
            for first in range(0, gpus, 2)
        ),
    )


def uniform_cluster(
    devices: int = 2,
    *,
    slots: int = 1,
    memory_bytes: int = 10**12,
    latency_seconds: float = 0.0,
    bandwidth: float = 1.0,
    shared: bool = False,
) -> Cluster:
    """Equal devices `dev:0`, `dev:1`, ... of type `dev`, each pair joined by a link of its own, or
    all by one that is shared."""
    kind = DeviceKind(
        name="dev",
        type="dev",
        peak_flops=1.0,
        memory_bandwidth=1.0,
        memory_bytes=memory_bytes,
        slots=slots,
    )
    names = [f"dev:{i}" for i in range(devices)]
    pairs = tuple(itertools.combinations(names, 2))
    bundles = [("wire", pairs)] if shared else [(f"{a}-{b}", ((a, b),)) for a, b in pairs]
    return Cluster(
        name=f"uniform-{devices}",
        devices=tuple(Device(name=name, kind=kind, memory_bytes=memory_bytes) for name in names),
        links=tuple(
            Link(name=name, latency_seconds=latency_seconds, bandwidth=bandwidth, pairs=joined)
            for name, joined in bundles
            if joined
        ),
    )


def make_problem(
    ops: Sequence[Op], edges: Sequence[Edge | tuple[str, str]], cluster: Cluster
) -> Problem:
    """Every op its own group; times as the ops give them."""
    graph = Graph.from_ops("tiny", ops, [Edge(*edge) for edge in edges])
    return Problem(
        graph=graph,
        grouping=each_op(graph),
        cluster=cluster,
        costs=estimate_costs(graph, cluster),
    )


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a random problem has besides ops on devices."""

    tight_memory: bool = False
    """Otherwise all groups fit together on the first device."""
    overhead: bool = False
    """Transfers take time of processors."""
    gaps: bool = False
    """Links are free again before what they carried has arrived."""
    contention: bool = False
    """Devices slow each other down."""
    issue: str | None = None
    """Ops have to be issued, by whom it says (`Cluster.issue`)."""
    chips: bool = False
    """Devices are streams or partitions of the same chip, links relay, and where the host or nobody
    issues, devices may keep to the program's order."""
    homes: bool = False
    """There are weights that may be elsewhere than their readers, and hosts that can pin little."""


def random_problem(
    seed: int, *, max_ops: int = 14, max_groups: int = 6, max_devices: int = 4, **features: Any
) -> Problem:
    """A small problem with what the simulator knows (`features` are fields of `Features`), and with
    many things at the same time.

    Times are multiples of 1/1024 s and bandwidths powers of two, so that sums are exact and ties
    are real: whoever breaks a tie in another order gets another schedule.
    """
    has = Features(**features)
    rng = np.random.default_rng(seed)
    more = np.random.default_rng([seed, 1])  # so that the rest is the same with and without
    kinds = [
        DeviceKind(
            name=f"kind{k}",
            type=f"type{k}",
            peak_flops=1.0,
            memory_bandwidth=1.0,
            memory_bytes=1,
            slots=int(rng.integers(1, 4)),
        )
        for k in range(int(rng.integers(1, 3)))
    ]
    if has.issue is not None:
        kinds[0] = replace(kinds[0], type=str(more.choice(["cpu", "type0"])))
        kinds = [replace(kind, slots=min(kind.slots, int(more.integers(1, 4)))) for kind in kinds]
    graph = _random_graph(rng, kinds, int(rng.integers(1, max_ops + 1)))
    if has.homes:
        kinds[0] = replace(kinds[0], type="cpu")
        graph = _with_weights(more, graph)
    total = int(graph.resident_bytes.sum() + graph.tensor_bytes.sum())
    count = int(rng.integers(1, max_devices + 1))
    memory_bytes = rng.integers(total // 6 + 1, total + 2, size=count)
    if not has.tight_memory:
        memory_bytes[0] = total + 1
    cluster = _with_links(rng, _random_cluster(rng, kinds, memory_bytes.tolist()), has)
    numbers: dict[int, int] = {}
    labels = rng.integers(int(rng.integers(1, max_groups + 1)), size=graph.num_ops)
    group_of = [numbers.setdefault(label, len(numbers)) for label in labels.tolist()]
    grouping = Grouping(
        group_of=frozen(np.array(group_of, dtype=np.int32)),
        names=tuple(f"group{g}" for g in range(len(numbers))),
    )
    costs = estimate_costs(graph, cluster)
    if has.chips:
        cluster = _on_chips(more, cluster)
        costs = estimate_costs(graph, cluster)
        demand = more.integers(0, 9, size=costs.op_seconds.shape) / 8
        costs = replace(costs, demand=frozen(demand))
    if has.issue is not None:
        in_order = has.chips and has.issue != "device" and bool(more.random() < 0.5)
        cluster = replace(cluster, issue=has.issue, in_order=in_order)
        overhead_seconds = more.integers(0, 6, size=costs.op_seconds.shape) / 1024
        gap_seconds = more.integers(0, 3, size=costs.op_seconds.shape) / 1024
        costs = replace(
            costs, overhead_seconds=frozen(overhead_seconds), gap_seconds=frozen(gap_seconds)
        )
    if not has.homes:
        return Problem(graph=graph, grouping=grouping, cluster=cluster, costs=costs)
    devices = tuple(
        replace(device, pinned_bytes=int(more.integers(0, 2 * int(graph.param_bytes.sum()) + 1)))
        for device in cluster.devices
    )
    return Problem(
        graph=graph, grouping=grouping, cluster=replace(cluster, devices=devices), costs=costs,
        homes=Homes(window_bytes=int(more.integers(1, int(graph.param_bytes.sum()) + 2))),
    )  # fmt: skip


def _with_links(rng: np.random.Generator, cluster: Cluster, has: Features) -> Cluster:
    """The cluster with what links may cost besides, and with contention."""
    links = cluster.links
    if has.overhead:
        links = tuple(
            replace(
                link,
                overhead_seconds=int(rng.integers(0, 3)) / 1024,
                overhead_bandwidth=float(2 ** rng.integers(11, 16)),
            )
            for link in links
        )
    if has.gaps:
        links = tuple(
            replace(
                link, gap_seconds=int(rng.integers(0, int(1024 * link.latency_seconds) + 1)) / 1024
            )
            for link in links
        )
    cluster = replace(cluster, links=links)
    if has.contention:
        cluster = replace(cluster, contention=int(rng.integers(1, 9)) / 8)
    return cluster


def _with_weights(rng: np.random.Generator, graph: Graph) -> Graph:
    """The graph with a few weights, each read by some of its ops; now and then it takes a moment
    until one is there."""
    ops, edges = [*graph.ops()], [*graph.edges()]
    weights: list[Op] = []
    for i in range(int(rng.integers(1, 7))):
        size = int(rng.integers(1, 9)) * 256
        seconds = int(rng.integers(1, 9)) / 1024 if rng.random() < 0.2 else 0.0
        weights.append(
            Op(
                name=f"weight{i}", type="parameter", outputs=(Tensor(size),), param_bytes=size,
                seconds=dict.fromkeys(graph.measured_seconds, seconds), work=Work.NONE,
            )
        )  # fmt: skip
        readers = rng.choice(len(ops), size=min(len(ops), int(rng.integers(1, 6))), replace=False)
        edges += [Edge(f"weight{i}", ops[reader].name) for reader in readers.tolist()]
    return Graph.from_ops("random", [*weights, *ops], edges)


def _random_graph(rng: np.random.Generator, kinds: Sequence[DeviceKind], count: int) -> Graph:
    ops: list[Op] = []
    edges: list[Edge] = []
    for i in range(count):
        inputs = [
            (source, int(rng.integers(len(ops[source].outputs))))
            for source in rng.integers(i, size=int(rng.integers(0, 4))).tolist()
            if ops[source].outputs
        ] if i else []  # fmt: skip
        outputs = []
        for _ in range(int(rng.integers(0, 3))):
            size = int(rng.integers(0, 5)) * 8
            shares = None
            if inputs and rng.random() < 0.3:
                source, output = inputs[int(rng.integers(len(inputs)))]
                shares = (f"op{source}", output)
            elif i and rng.random() < 0.05:  # memory of an op it need not even wait for
                source = int(rng.integers(i))
                if ops[source].outputs:
                    shares = (f"op{source}", 0)
            outputs.append(Tensor(size, shares=shares))
        ops.append(
            Op(
                name=f"op{i}",
                type="Op",
                outputs=tuple(outputs),
                param_bytes=int(rng.integers(1, 60)) if rng.random() < 0.2 else 0,
                seconds={kind.name: int(rng.integers(0, 6)) / 1024 for kind in kinds},
            )
        )
        edges += [Edge(f"op{source}", f"op{i}", output) for source, output in inputs]
        if i and rng.random() < 0.3:
            edges.append(Edge(f"op{int(rng.integers(i))}", f"op{i}", None))
    return Graph.from_ops("random", ops, edges)


def _random_cluster(
    rng: np.random.Generator, kinds: Sequence[DeviceKind], memory_bytes: Sequence[int]
) -> Cluster:
    devices = [
        Device(name=f"d{d}", kind=kinds[int(rng.integers(len(kinds)))], memory_bytes=size)
        for d, size in enumerate(memory_bytes)
    ]
    names = [device.name for device in devices]
    pairs = [(name, "switch") for name in names]
    # A tree around a switch reaches everyone; a few shortcuts make routes of one hop.
    pairs += [pair for pair in itertools.combinations(names, 2) if rng.random() < 0.4]
    wires: dict[int, list[tuple[str, str]]] = {}
    for pair in pairs:
        wires.setdefault(int(rng.integers(len(pairs))), []).append(pair)
    return Cluster(
        name="random",
        devices=tuple(devices),
        switches=("switch",),
        links=tuple(
            Link(
                name=f"wire{wire}",
                latency_seconds=int(rng.integers(0, 3)) / 1024,
                bandwidth=float(2 ** rng.integers(11, 16)),
                pairs=tuple(joined),
                duplex=bool(rng.random() < 0.5),
            )
            for wire, joined in wires.items()
        ),
    )


def _on_chips(rng: np.random.Generator, cluster: Cluster) -> Cluster:
    """The same devices as parts of chips: streams, where they are of one kind, or partitions."""
    names: dict[str, str] = {}
    ways: dict[str, str] = {}
    chips = [f"chip{c}" for c in rng.integers(2, size=cluster.num_devices).tolist()]
    for device, chip in zip(cluster.devices, chips, strict=True):
        kinds = {d.kind.name for d, c in zip(cluster.devices, chips, strict=True) if c == chip}
        way = ways.setdefault(chip, "stream" if len(kinds) == 1 and rng.random() < 0.7 else "part")
        names[device.name] = f"{chip}/{way}:{len(names)}"
    return replace(
        cluster,
        devices=tuple(replace(device, name=names[device.name]) for device in cluster.devices),
        links=tuple(
            replace(
                link,
                pairs=tuple((names.get(a, a), names.get(b, b)) for a, b in link.pairs),
                relays=bool(rng.random() < 0.5),
            )
            for link in cluster.links
        ),
    )


# --- tiny problems with known optima -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TinyProblem:
    """A problem small enough to see the best placement with the naked eye."""

    name: str
    problem: Problem
    best_seconds: float
    """No placement that fits takes less."""
    best_devices: tuple[int, ...]
    """A placement that takes this long."""


def tiny_problems() -> tuple[TinyProblem, ...]:
    return (_chain(), _branches(), _unequal_devices(), _too_large_for_one())


def _chain() -> TinyProblem:
    """Three ops of 1 s in a row: nothing can run side by side, so leaving the device only costs."""
    ops = [Op(name=name, type="Op", outputs=(Tensor(1),), seconds={"dev": 1.0}) for name in "abc"]
    problem = make_problem(ops, [("a", "b"), ("b", "c")], uniform_cluster(2, latency_seconds=0.5))
    return TinyProblem(name="chain", problem=problem, best_seconds=3.0, best_devices=(0, 0, 0))


def _branches() -> TinyProblem:
    """A fork into two branches of 4 s and a join, 10 s on one device.

    fork 0-1; left stays and runs 1-5; right is elsewhere, gets its input 1-2 and runs 2-6, while
    left's result comes there 5-6; join follows there 6-7.
    """
    seconds = {"fork": 1.0, "left": 4.0, "right": 4.0, "join": 1.0}
    ops = [
        Op(name=name, type="Op", outputs=(Tensor(1),), seconds={"dev": cost})
        for name, cost in seconds.items()
    ]
    edges = [("fork", "left"), ("fork", "right"), ("left", "join"), ("right", "join")]
    problem = make_problem(ops, edges, uniform_cluster(2))
    return TinyProblem(
        name="branches", problem=problem, best_seconds=7.0, best_devices=(0, 0, 1, 1)
    )


def _unequal_devices() -> TinyProblem:
    """Two ops in a row, each 1 s on one device and 9 s on the other, and 2 s to send: 1 + 2 + 1."""
    kinds = [
        DeviceKind(name=name, type=name, peak_flops=1.0, memory_bandwidth=1.0, memory_bytes=100)
        for name in ("left", "right")
    ]
    cluster = Cluster(
        name="unequal",
        devices=tuple(Device(name=kind.name, kind=kind, memory_bytes=100) for kind in kinds),
        links=(Link(name="wire", latency_seconds=2.0, bandwidth=1e9, pairs=(("left", "right"),)),),
    )
    ops = [
        Op(name="a", type="Op", outputs=(Tensor(0),), seconds={"left": 1.0, "right": 9.0}),
        Op(name="b", type="Op", seconds={"left": 9.0, "right": 1.0}),
    ]
    problem = make_problem(ops, [("a", "b")], cluster)
    return TinyProblem(name="unequal", problem=problem, best_seconds=4.0, best_devices=(0, 1))


def _too_large_for_one() -> TinyProblem:
    """A chain as above whose two variables need a device each: 3 s and one transfer of 5 s."""
    ops = [
        Op(name="a", type="Op", outputs=(Tensor(1),), seconds={"dev": 1.0}, param_bytes=60),
        Op(name="b", type="Op", outputs=(Tensor(1),), seconds={"dev": 1.0}),
        Op(name="c", type="Op", seconds={"dev": 1.0}, param_bytes=60),
    ]
    cluster = uniform_cluster(2, memory_bytes=100, latency_seconds=4.0)
    problem = make_problem(ops, [("a", "b"), ("b", "c")], cluster)
    return TinyProblem(name="memory", problem=problem, best_seconds=8.0, best_devices=(0, 0, 1))


# --- contracts -----------------------------------------------------------------------------------


def sample_placements(problem: Problem, count: int, seed: int = 0) -> list[Placement]:
    """Everything on each device in turn, then random placements."""
    rng = np.random.default_rng(seed)
    groups, devices = problem.num_groups, problem.num_devices
    rows = [np.full(groups, device) for device in range(min(devices, count))]
    rows += [rng.integers(devices, size=groups) for _ in range(count - len(rows))]
    return [Placement.of(problem, row.astype(np.int32)) for row in rows]


def check_evaluator(
    evaluator: Evaluator,
    *,
    placements: Sequence[Placement] | None = None,
    deterministic: bool = True,
) -> None:
    """Checks what every evaluator promises; raises AssertionError with what it found.

    Evaluates each placement several times. `deterministic` says that the same placement always
    gives the same measurement, as in the simulator without noise.
    """
    problem = evaluator.problem
    given = list(placements) if placements is not None else sample_placements(problem, 8)
    assert given, "the contract needs at least one placement to try"

    assert evaluator.evaluate([]) == [], "no placements must give no measurements"
    measurements = evaluator.evaluate(given)
    assert isinstance(measurements, list), f"evaluate returned {type(measurements).__name__}"
    assert len(measurements) == len(given), (
        f"{len(given)} placements gave {len(measurements)} measurements"
    )
    for measurement in measurements:
        _check_measurement(measurement, problem.num_devices)
    assert evaluator.problem is problem, "an evaluator stays with its problem"

    if deterministic:
        again = evaluator.evaluate(given)
        assert again == measurements, "the same placements gave other measurements"
        backwards = evaluator.evaluate(given[::-1])
        assert backwards == measurements[::-1], "measurements depend on the order of placements"
        singly = [evaluator.evaluate([placement])[0] for placement in given]
        assert singly == measurements, "measurements depend on what is evaluated together"

    stranger = Placement(given[0].devices, space="of another problem")
    try:
        evaluator.evaluate([given[0], stranger])
    except PlacementError:
        pass
    else:
        raise AssertionError("a placement of another problem must raise PlacementError")


def _check_measurement(measurement: Measurement, devices: int) -> None:
    assert isinstance(measurement, Measurement), f"not a measurement: {measurement!r}"
    if measurement.outcome is Outcome.OK:
        assert measurement.step_seconds, f"a success without a time: {measurement}"
    else:
        assert not measurement.step_seconds, f"a failure with a time: {measurement}"
        assert measurement.reason, f"a failure without a reason: {measurement}"
    assert len(measurement.peak_bytes) in (0, devices), (
        f"peaks of {len(measurement.peak_bytes)} devices, there are {devices}"
    )
    assert all(size >= 0 for size in measurement.peak_bytes), f"negative memory: {measurement}"


def check_backend(
    backend: Backend,
    source: object,
    options: LoadOptions | None = None,
    *,
    devices: Sequence[str] = ("cpu:0", "cpu:1"),
    devices_in: Callable[[Any], Mapping[str, str]],
) -> None:
    """Checks what every backend promises; raises AssertionError with what it found.

    `source` is a live model that `load` takes and `apply` puts a placement into; `devices_in` says
    the device of each op of what `apply` gave, as the framework calls it.
    """
    options = options or LoadOptions()
    assert backend.name, "a backend without a name"
    assert issubclass(backend.run_config, RunConfig), "settings of real runs that are no RunConfig"
    before = set(sys.modules)
    assert backend.accepts(source), f"it does not accept {source!r}"
    assert not backend.accepts(object()), "it accepts anything"
    assert not backend.accepts("no/such/model"), "it accepts a file that is not there"
    new = set(sys.modules) - before
    assert not new, f"asking what it accepts imported {', '.join(sorted(new))}"

    program = backend.load(source, options)
    assert isinstance(program.graph, Graph), f"the graph is a {type(program.graph).__name__}"
    assert program.backend == backend.name, f"the program says it is of {program.backend!r}"
    names = [entry.name for entry in program.inputs]
    assert len(set(names)) == len(names), f"inputs share a name: {names}"
    assert backend.load(source, options).graph == program.graph, "loaded again it is another graph"
    assert backend.load_graph(source, options) == program.graph, "alone it is another graph"

    theirs = backend.device_names(devices)
    assert list(theirs) == list(devices), f"devices {devices} have the names {theirs}"
    ops = program.graph.op_names
    plan = Plan(device_of={op: theirs[devices[i % len(devices)]] for i, op in enumerate(ops)})
    found = devices_in(backend.apply(source, plan))
    wrong = [op for op, device in plan.device_of.items() if found.get(op) != device]
    assert not wrong, f"{wrong[0]!r} is on {found.get(wrong[0])}, not {plan.device_of[wrong[0]]}"


def check_runner(
    runner: Runner,
    *,
    failing: Sequence[int] | None = None,
    kill: Callable[[], None] | None = None,
) -> None:
    """Checks what every runner promises, and closes it; raises AssertionError with what it found.

    Everything on the first device must be able to run. `failing` is a placement of the ops that
    cannot; `kill` makes what runs a placement die, where the runner has processes of its own, and
    waits for its end.
    """
    good = [0] * runner.program.graph.num_ops
    least, most = runner.config.steps - 1, runner.config.max_steps - 1

    def check_good(**how: Any) -> Run:
        run = runner.measure(good, **how)
        _check_run(run, runner)
        assert run.measurement.ok, f"the good placement did not run: {run.measurement.reason}"
        return run

    runner.start()
    runner.start()  # it runs already
    assert least <= len(check_good().measurement.step_seconds) <= most, "other steps than asked for"
    assert len(check_good(adaptive=False).measurement.step_seconds) == least, (
        "more steps than asked"
    )
    cut = len(check_good(best_seconds=1e-12).measurement.step_seconds)
    assert cut == min(2, least), f"a hopeless placement was timed for {cut} steps"
    trace = check_good(traces=1).trace
    assert trace is not None, "no trace where one was asked for"
    names, numbers = set(runner.program.graph.op_names), range(runner.cluster.num_devices)
    assert trace.op_seconds, "a trace without ops"
    assert set(trace.device_of.values()) <= set(numbers), "a trace with devices that are not there"
    assert set(trace.op_seconds) <= names, "a trace with ops that are not the graph's"
    if failing is not None:
        run = runner.measure(failing)
        _check_run(run, runner)
        assert not run.measurement.ok, "the placement that cannot run has run"
        check_good()
    if kill is not None:
        kill()
        check_good()  # what is dead before a run is replaced
        timer = threading.Timer(0.05, kill)
        timer.start()
        _check_run(runner.measure(good), runner)  # whatever came of it
        timer.join()
        check_good()
    _check_links(runner)
    check_good()  # timing links left it as it was
    runner.close()
    runner.close()
    try:
        runner.measure(good)
    except WorkerError:
        pass
    else:
        raise AssertionError("a runner that is closed must raise WorkerError")


def _check_run(run: Run, runner: Runner) -> None:
    devices = runner.cluster.num_devices
    _check_measurement(run.measurement, devices)
    assert run.overhead_seconds >= 0.0, f"negative overhead: {run}"
    assert run.misplaced is None or runner.config.check, "it checked what it was not asked to"


def _check_links(runner: Runner) -> None:
    sizes = (1 << 12, 1 << 20)
    devices = set(runner.cluster.device_names)
    direct = {link.name for link in runner.cluster.links if set(link.pairs[0]) <= devices}
    found = runner.time_links(sizes)
    known = {link.name for link in runner.cluster.links}
    assert direct <= set(found) <= known, f"times of {sorted(found)}, there are {sorted(known)}"
    takes = runner.seconds_for_links(len(sizes))
    assert (takes > 0) == bool(found), f"{takes} s for {len(found)} links"
    for name, seconds in found.items():
        assert len(seconds) == len(sizes), f"{len(sizes)} sizes gave {len(seconds)} times"
        assert all(each > 0 for each in seconds), f"a transfer over {name} that takes no time"


def check_placer(
    make: Callable[[Problem, int], Placer], problem: Problem, *, rounds: int = 5, count: int = 4
) -> None:
    """Checks what every placer promises; raises AssertionError with what it found.

    `make` makes a placer for a problem from a seed. The problem is simulated.
    """
    evaluator = SimulatedEvaluator(problem)
    placer, twin = make(problem, 0), make(problem, 0)
    assert placer.name, "a placer without a name"
    assert placer.problem is problem, "a placer stays with its problem"
    assert placer.share > 0, "an endless placer without a share would never be asked"
    seen: list[Trial] = []
    finished = False
    for _ in range(rounds if placer.endless else 1000):
        asked = placer.ask(count)
        _check_proposals(asked, problem, count)
        assert twin.ask(count) == asked, "the same seed and answers led to other proposals"
        if not asked:
            finished = True
            break
        trials = [
            Trial(placement=placement, measurement=measurement, placer=placer.name)
            for placement, measurement in zip(asked, evaluator.evaluate(asked), strict=True)
        ]
        placer.tell(trials)
        twin.tell(trials)
        seen += trials
    assert placer.endless or finished, "neither endless nor ever finished"
    if finished:
        assert placer.ask(count) == [], "it goes on after having nothing left to propose"

    # Told of what another has tried, as in a search that is resumed.
    late = make(problem, 1)
    late.tell([])
    late.tell(seen)
    _check_proposals(late.ask(1), problem, 1)


def _check_proposals(asked: list[Placement], problem: Problem, count: int) -> None:
    assert isinstance(asked, list), f"ask returned {type(asked).__name__}"
    assert len(asked) <= count, f"asked for {count} placements, got {len(asked)}"
    groups = np.arange(problem.num_groups)
    for placement in asked:
        placement.check(problem)
        assert problem.allowed[groups, placement.devices].all(), (
            f"a group where it may not go: {placement.devices.tolist()}"
        )
