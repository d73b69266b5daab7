"""What the one-shot placers promise, and that what ran out of memory is repaired."""

from __future__ import annotations

import builtins
import ctypes
import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from placewright.cluster import Cluster, Device, Link, builtin_kinds
from placewright.costs import estimate_costs
from placewright.errors import MissingExtraError
from placewright.graph import BoolArray, Edge, Graph, Op, Tensor, frozen
from placewright.grouping import by_colocation, by_scope, each_op, group
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import OneShot, Placer
from placewright.placers.expert import expert
from placewright.placers.group_graph import group_graph, scaled
from placewright.placers.heft import heft
from placewright.placers.m_etf import m_etf
from placewright.placers.m_sct import favourites, m_sct
from placewright.placers.m_topo import m_topo
from placewright.placers.memory import Repairing, bytes_over_time, group_bytes, repair
from placewright.placers.mincut import mincut
from placewright.placers.random_placement import RandomPlacement
from placewright.placers.scotch import scotch
from placewright.placers.single_device import accelerators, single_device
from placewright.problem import Problem

Function = Callable[[Problem], Sequence[Placement]]

ONE_SHOT: tuple[Function, ...] = (
    single_device, expert, scotch, mincut, heft, m_topo, m_etf, m_sct,
)  # fmt: skip
SCHEDULERS: tuple[Function, ...] = (heft, m_etf, m_sct)
MEMORY_BOUND: tuple[Function, ...] = (m_topo, m_etf, m_sct)

every_one_shot = pytest.mark.parametrize("function", ONE_SHOT, ids=lambda f: f.__name__)


# --- problems ------------------------------------------------------------------------------------


def problem_of(
    ops: Sequence[Op],
    edges: Sequence[tuple[str, str]],
    cluster: Cluster | str,
    *,
    rules: Sequence[tuple[str, str]] = (),
    forbidden: BoolArray | None = None,
) -> Problem:
    """Every op its own group unless `rules` name groups."""
    graph = Graph.from_ops("test", ops, [Edge(src, dst) for src, dst in edges], rules)
    if isinstance(cluster, str):
        cluster = Cluster.load(cluster)
    steps = (by_colocation, by_scope(graph.group_rules)) if rules else (by_colocation,)
    problem = Problem(
        graph=graph,
        grouping=group(graph, steps) if rules else each_op(graph),
        cluster=cluster,
        costs=estimate_costs(graph, cluster),
    )
    if forbidden is None:
        return problem
    return Problem(
        graph=graph,
        grouping=problem.grouping,
        cluster=cluster,
        costs=problem.costs,
        forbidden=frozen(forbidden),
    )


def random_case(seed: int, cluster: str) -> Problem:
    """A random graph with sources, variables, ops without some kernels, and forbidden devices."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 60))
    types = sorted({device.type for device in Cluster.load(cluster).devices})
    ops, edges = [], []
    for i in range(count):
        inputs = rng.permutation(i)[: rng.integers(0, 4)].tolist()
        kernels = None if rng.random() < 0.8 else (str(rng.choice(types)),)
        ops.append(
            Op(
                name=f"part_{i % 9}/op{i}",
                type="Op",
                outputs=(Tensor(int(10 ** rng.uniform(2, 8))),),
                flops=float(10 ** rng.uniform(4, 10)) if rng.random() < 0.8 else None,
                param_bytes=int(10 ** rng.uniform(3, 7)) if rng.random() < 0.2 else 0,
                kernels=kernels,
            )
        )
        edges += [(ops[k].name, ops[i].name) for k in inputs]
        if inputs and rng.random() < 0.1:
            edges.append(edges[-1])
    # Groups of a few ops that run on the same types of device.
    rules = [(f"op({k})$", f"group_{k // 3}") for k in range(count) if ops[k].kernels is None]
    free = problem_of(ops, edges, cluster, rules=rules[: count // 2])
    forbidden = rng.random(free.allowed.shape) < 0.15
    forbidden[~(free.allowed & ~forbidden).any(axis=1)] = False
    return problem_of(ops, edges, cluster, rules=rules[: count // 2], forbidden=forbidden)


def on_boards(gpus: int, memory: int | None = None, bandwidth: float = 10e9) -> Cluster:
    """A CPU and GPUs of the same kind, each with a link of its own to the CPU."""
    kinds = builtin_kinds()
    gpu, cpu = kinds["tesla-k80"], kinds["haswell-18"]
    names = [f"gpu:{i}" for i in range(gpus)]
    return Cluster(
        name="boards",
        devices=(
            Device(name="cpu:0", kind=cpu, memory_bytes=cpu.memory_bytes),
            *(
                Device(name=name, kind=gpu, memory_bytes=memory or gpu.memory_bytes)
                for name in names
            ),
        ),
        links=tuple(
            Link(name=name, latency_seconds=20e-6, bandwidth=bandwidth, pairs=((name, "cpu:0"),))
            for name in names
        ),
    )


def compute(name: str, *, flops: float = 1e10, out: int = 1000, **more: Any) -> Op:
    return Op(name=name, type="MatMul", outputs=(Tensor(out),), flops=flops, **more)


def branches(count: int, length: int, cluster: Cluster | str) -> Problem:
    """Chains of heavy ops side by side."""
    chains = [[f"branch_{b}/op{i}" for i in range(length)] for b in range(count)]
    ops = [compute(name) for chain in chains for name in chain]
    return problem_of(ops, [edge for chain in chains for edge in pairwise(chain)], cluster)


CASES = [(seed, cluster) for seed in range(6) for cluster in ("k80x4", "k80x2", "cpu2")]


# --- what all of them promise --------------------------------------------------------------------


@every_one_shot
@pytest.mark.parametrize(("seed", "cluster"), CASES)
def test_placements_are_allowed_and_repeatable(function: Function, seed: int, cluster: str) -> None:
    problem = random_case(seed, cluster)
    placements = function(problem)
    assert placements
    for placement in placements:
        placement.check(problem)
        assert problem.allowed[np.arange(problem.num_groups), placement.devices].all()
    assert list(function(problem)) == list(placements)


@every_one_shot
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_groups_than_devices(function: Function, count: int) -> None:
    problem = problem_of([compute(f"op{i}") for i in range(count)], [], "k80x4")
    assert all(len(placement.devices) == count for placement in function(problem))


@every_one_shot
def test_one_device_is_enough(function: Function) -> None:
    cluster = Cluster.load("k80x2")
    alone = Cluster(name="alone", devices=cluster.devices[1:2])
    problem = problem_of([compute("a"), compute("b")], [("a", "b")], alone)
    assert [placement.devices.tolist() for placement in function(problem)] == [[0, 0]]


@every_one_shot
def test_ops_that_cost_nothing(function: Function) -> None:
    ops = [Op(name=f"op{i}", type="NoOp", seconds={"gpu": 0.0, "cpu": 0.0}) for i in range(4)]
    graph = Graph.from_ops("idle", ops, [Edge("op0", "op3", None)])
    cluster = Cluster.load("k80x2")
    problem = Problem(
        graph=graph,
        grouping=each_op(graph),
        cluster=cluster,
        costs=estimate_costs(graph, cluster),
    )
    assert function(problem)


# --- one by one ----------------------------------------------------------------------------------


def test_single_device_leaves_to_the_cpu_what_a_device_cannot_run() -> None:
    ops = [compute("a"), compute("b", kernels=("cpu",)), compute("c", kernels=("gpu",))]
    problem = problem_of(ops, [], "k80x2")
    placed = [placement.devices.tolist() for placement in single_device(problem)]
    # c has no CPU kernel: alone on the CPU is not possible, the first GPU takes it.
    assert placed == [[0, 0, 1], [1, 0, 1], [2, 0, 2]]


def test_accelerators_are_all_devices_where_there_are_only_cpus() -> None:
    assert accelerators(problem_of([compute("a")], [], "k80x2")).tolist() == [1, 2]
    assert accelerators(problem_of([compute("a")], [], "cpu2")).tolist() == [0, 1]


def test_random_is_uniform_over_allowed_devices_and_seeded() -> None:
    problem = random_case(3, "k80x4")
    placer = RandomPlacement(problem, seed=7)
    drawn = np.stack([placement.devices for placement in placer.ask(2000)])
    for g in range(problem.num_groups):
        counts = np.bincount(drawn[:, g], minlength=problem.num_devices)
        assert (counts[~problem.allowed[g]] == 0).all()
        expected = 2000 / problem.allowed[g].sum()
        assert (np.abs(counts[problem.allowed[g]] - expected) < 6 * np.sqrt(expected)).all()
    again = RandomPlacement(problem, seed=7)
    first = [*again.ask(3), *again.ask(2)]
    assert first == RandomPlacement(problem, seed=7).ask(5)
    assert first != RandomPlacement(problem, seed=8).ask(5)


@pytest.mark.parametrize("function", SCHEDULERS, ids=lambda f: f.__name__)
def test_a_chain_stays_on_one_fast_device_when_transfers_are_dear(function: Function) -> None:
    names = [f"op{i}" for i in range(20)]
    ops = [compute(name, out=100_000_000) for name in names]
    problem = problem_of(ops, list(pairwise(names)), "k80x4")
    for placement in function(problem):
        assert len(set(placement.devices.tolist())) == 1
        assert placement.devices[0] in accelerators(problem)


@pytest.mark.parametrize("function", [heft, m_etf, m_sct, scotch, mincut], ids=lambda f: f.__name__)
def test_two_heavy_branches_use_two_gpus(function: Function) -> None:
    problem = branches(2, 8, on_boards(2))
    (placement,) = function(problem)
    # Scotch uses the CPU too, for a little.
    work = np.bincount(placement.devices, weights=problem.group_seconds[1], minlength=3)
    assert work[1] == pytest.approx(work[2], rel=0.3)
    assert work[0] < 0.2 * work[1]
    for b in range(2):
        chain = placement.devices[8 * b : 8 * b + 8]
        assert len(set(chain[chain != 0].tolist())) == 1


@pytest.mark.parametrize("function", SCHEDULERS, ids=lambda f: f.__name__)
def test_constants_do_not_decide_for_their_group(function: Function) -> None:
    # Each group begins with a constant, which is ready at once and quickest to run on the CPU.
    ops, edges = [], []
    for b in range(2):
        ops.append(Op(name=f"group_{b}/const", type="Const", outputs=(Tensor(4),)))
        ops += [compute(f"group_{b}/op{i}") for i in range(4)]
        chain = [f"group_{b}/const", *(f"group_{b}/op{i}" for i in range(4))]
        edges += list(pairwise(chain))
    problem = problem_of(ops, edges, on_boards(2), rules=[(r"(group_\d)/", r"\1")])
    for placement in function(problem):
        assert sorted(placement.devices.tolist()) == [1, 2]


def test_heft_prefers_the_faster_device_even_if_it_is_busy() -> None:
    # Two ops of 3.7 ms on the GPU take 30 ms on the CPU: both wait for the GPU.
    problem = problem_of([compute("a", flops=1e10), compute("b", flops=1e10)], [], on_boards(1))
    (placement,) = heft(problem)
    assert placement.devices.tolist() == [1, 1]


def test_heft_uses_gaps() -> None:
    # The GPU that is to run `join` has nothing to do until `a` has come from the CPU. `small`, of a
    # lower rank, fits in; on the other GPU it would end no sooner.
    ops = [
        compute("a", kernels=("cpu",)),
        compute("join", kernels=("gpu",)),
        compute("small", flops=1e9, kernels=("gpu",)),
    ]
    (placement,) = heft(problem_of(ops, [("a", "join")], on_boards(2)))
    assert placement.devices.tolist() == [0, 1, 1]


def test_favourites_are_one_to_one_and_on_the_critical_path() -> None:
    # 0 -> 1 -> 2 is long; 3 hangs off 0, and 4 off 2 by the heavier of two edges.
    seconds = np.array([5.0, 5.0, 5.0, 1.0, 1.0, 1.0])
    parent = np.array([0, 1, 0, 2, 2])
    child = np.array([1, 2, 3, 4, 5])
    transfer = np.array([3.0, 3.0, 3.0, 2.0, 1.0])
    assert favourites(seconds, parent, child, transfer).tolist() == [True, True, False, True, False]


def test_a_large_program_takes_the_heaviest_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("placewright.placers.m_sct")
    monkeypatch.setattr(module, "_LARGEST_PROGRAM", 0)
    parent, child = np.array([0, 0, 1]), np.array([1, 2, 2])
    chosen = favourites(np.ones(3), parent, child, np.array([1.0, 3.0, 2.0]))
    assert chosen.tolist() == [False, True, False]
    problem = branches(3, 5, on_boards(2))
    assert problem.allowed[np.arange(problem.num_groups), m_sct(problem)[0].devices].all()


# --- partitioners --------------------------------------------------------------------------------


def test_group_graph_counts_a_tensor_once_per_group() -> None:
    ops = [compute("x/a", out=100), *(compute(f"y/b{i}", out=7) for i in range(3))]
    edges = [("x/a", f"y/b{i}") for i in range(3)]
    problem = problem_of(ops, edges, "k80x2", rules=[(r"(x|y)/", r"\1")])
    graph = group_graph(problem)
    assert graph.offsets.tolist() == [0, 1, 2]
    assert graph.neighbour.tolist() == [1, 0]
    assert graph.bytes.tolist() == [100, 100]
    assert graph.transfers.tolist() == [1, 1]


def test_scaled_keeps_proportions_and_stays_positive() -> None:
    assert scaled(np.array([1.0, 3.0, 0.0]), total=400).tolist() == [100, 300, 1]
    assert scaled(np.zeros(2), total=100).tolist() == [1, 1]
    assert scaled(np.full(1000, 1e300), total=1 << 24).sum() < 1 << 25


@pytest.mark.parametrize("function", [scotch, mincut], ids=lambda f: f.__name__)
def test_partitioners_balance_and_cut_little(function: Function) -> None:
    problem = branches(8, 10, on_boards(4))
    (placement,) = function(problem)
    work = np.bincount(placement.devices, weights=problem.group_seconds[1])
    assert work[1:].max() < 1.3 * work[1:].mean()
    src, dst = problem.graph.edge_src, problem.graph.edge_dst
    cut = int((placement.devices[src] != placement.devices[dst]).sum())
    assert cut <= 8


def test_mincut_leaves_the_cpu_out() -> None:
    problem = branches(4, 5, "k80x4")
    assert (mincut(problem)[0].devices > 0).all()


@pytest.mark.parametrize(
    ("function", "library", "name"),
    [(scotch, "pyscotch", "scotch"), (mincut, "pymetis", "mincut"), (m_sct, "scipy", "m-sct")],
)
def test_missing_libraries_are_named(
    function: Function, library: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_import = builtins.__import__

    def fake(module: str, *args: Any, **options: Any) -> Any:
        if module.split(".")[0] == library:
            raise ImportError(module)
        return really_import(module, *args, **options)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(MissingExtraError, match=rf"the {name} placer .*placewright\[placers\]"):
        function(branches(2, 2, "k80x2"))


@pytest.mark.parametrize("function", [scotch, mincut], ids=lambda f: f.__name__)
def test_the_libraries_say_nothing(function: Function, capfd: pytest.CaptureFixture[str]) -> None:
    # METIS has something to say about parts that stay empty.
    function(branches(1, 2, "k80x4"))
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")
    print("and what others say is still heard")
    assert capfd.readouterr().out


# --- expert --------------------------------------------------------------------------------------


def recurrent(stacks: Sequence[str], layers: int, steps: int, cluster: str) -> Problem:
    """An unrolled net with the groups that the benchmark models have."""
    ops = [compute("inputs/tokens")]
    edges: list[tuple[str, str]] = []
    for stack in stacks:
        sides = {"encoder/": "source_embedding", "decoder/": "target_embedding"}
        embedding = sides.get(stack, "embedding")
        ops.append(compute(f"{embedding}/variables/table", param_bytes=1000))
        ops += [compute(f"{stack}layer_{i}/variables/kernel") for i in range(layers)]
        for t in range(steps):
            below = f"{embedding}/step_{t}/lookup"
            ops.append(compute(below))
            edges += [("inputs/tokens", below), (f"{embedding}/variables/table", below)]
            for i in range(layers):
                cell = f"{stack}layer_{i}/step_{t}/cell"
                ops.append(compute(cell))
                edges += [(below, cell), (f"{stack}layer_{i}/variables/kernel", cell)]
                if t:
                    edges.append((f"{stack}layer_{i}/step_{t - 1}/cell", cell))
                below = cell
            if stack == stacks[-1]:
                ops += [compute(f"attention/step_{t}/x"), compute(f"softmax/step_{t}/y")]
                edges += [(below, f"attention/step_{t}/x")]
                edges += [(f"attention/step_{t}/x", f"softmax/step_{t}/y")]
                edges += [(f"softmax/step_{t}/y", "loss/sum"), ("variables/bias", f"{below}")]
    ops += [compute("loss/sum"), compute("variables/bias")]
    return problem_of(ops, edges, cluster, rules=[(r"^(.*)/\w+$", r"\1")])


def placed_by_name(problem: Problem, placement: Placement) -> dict[str, int]:
    return dict(zip(problem.grouping.names, placement.devices.tolist(), strict=True))


@pytest.mark.parametrize("stack", ["", "lstm/"])
def test_expert_puts_one_layer_on_each_gpu(stack: str) -> None:
    problem = recurrent([stack], layers=2, steps=3, cluster="k80x4")
    (placement,) = expert(problem)
    where = placed_by_name(problem, placement)
    for t in range(3):
        assert where[f"{stack}layer_0/step_{t}"] == where[f"embedding/step_{t}"] == 1
        assert where[f"{stack}layer_1/step_{t}"] == where[f"softmax/step_{t}"] == 2
        assert where[f"attention/step_{t}"] == 2
    assert where[f"{stack}layer_1/variables"] == where["loss"] == where["variables"] == 2
    assert where["inputs"] == where["embedding/variables"] == 1


@pytest.mark.parametrize(
    ("cluster", "expected"), [("k80x4", [1, 2, 3, 4]), ("k80x2", [1, 2, 1, 2])]
)
def test_expert_spreads_encoder_and_decoder(cluster: str, expected: list[int]) -> None:
    problem = recurrent(["encoder/", "decoder/"], layers=2, steps=4, cluster=cluster)
    (placement,) = expert(problem)
    where = placed_by_name(problem, placement)
    cells = ["encoder/layer_0", "encoder/layer_1", "decoder/layer_0", "decoder/layer_1"]
    assert [where[f"{cell}/step_2"] for cell in cells] == expected
    assert [where[f"{cell}/variables"] for cell in cells] == expected
    assert where["attention/step_1"] == where["softmax/step_1"] == expected[3]


def test_expert_puts_each_embedding_with_the_layer_that_reads_it() -> None:
    names = ["source_embedding", "target_embedding"]
    ops = [compute(f"{name}/variables/table") for name in names]
    edges = []
    for name, stack in zip(names, ["encoder", "decoder"], strict=True):
        for t in range(2):
            ops.append(compute(f"{stack}/layer_0/step_{t}/cell"))
            edges.append((f"{name}/variables/table", f"{stack}/layer_0/step_{t}/cell"))
    edges.append(("encoder/layer_0/step_1/cell", "decoder/layer_0/step_0/cell"))
    problem = problem_of(ops, edges, "k80x4", rules=[(r"^(.*)/\w+$", r"\1")])
    where = placed_by_name(problem, expert(problem)[0])
    assert where["source_embedding/variables"] == where["encoder/layer_0/step_0"] == 1
    assert where["target_embedding/variables"] == where["decoder/layer_0/step_0"] == 2


def test_expert_cuts_other_nets_into_equal_contiguous_parts() -> None:
    names = [f"mixed_{i}/branch_{i % 3}/layer_1" for i in range(10)]
    problem = problem_of(
        [compute(name) for name in names], list(pairwise(names)), "k80x4", rules=[("(.*)", r"\1")]
    )
    assert expert(problem)[0].devices.tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 4, 4]


def test_expert_gives_devices_equal_work_where_nobody_said_what_groups_are() -> None:
    names = [f"block_{i}" for i in range(6)]
    ops = [compute(name, flops=5e10 if name == "block_0" else 1e10) for name in names]
    problem = problem_of(ops, list(pairwise(names)), "k80x2")
    assert expert(problem)[0].devices.tolist() == [1, 2, 2, 2, 2, 2]


# --- memory --------------------------------------------------------------------------------------


def large_model(cluster: Cluster) -> Problem:
    """A chain of layers whose variables fit no single GPU of 1 GB."""
    names = [f"layer{i}" for i in range(12)]
    ops = [compute(name, out=1_000_000, param_bytes=150_000_000) for name in names]
    return problem_of(ops, list(pairwise(names)), cluster)


@pytest.mark.parametrize("function", MEMORY_BOUND, ids=lambda f: f.__name__)
def test_variables_never_exceed_the_memory(function: Function) -> None:
    problem = large_model(on_boards(2, memory=1_000_000_000))
    (placement,) = function(problem)
    used = np.bincount(placement.devices, weights=problem.group_resident_bytes, minlength=3)
    assert (used[1:] <= 1_000_000_000).all()
    assert (placement.devices > 0).all()  # 1.8 GB of 2 GB: the CPU is not needed


@pytest.mark.parametrize("function", MEMORY_BOUND, ids=lambda f: f.__name__)
def test_what_fits_no_accelerator_goes_to_the_cpu(function: Function) -> None:
    problem = large_model(on_boards(1, memory=1_000_000_000))
    (placement,) = function(problem)
    used = np.bincount(placement.devices, weights=problem.group_resident_bytes, minlength=2)
    assert used[1] <= 1_000_000_000
    assert used[1] >= 800_000_000


@pytest.mark.parametrize("function", [*MEMORY_BOUND, heft], ids=lambda f: f.__name__)
def test_what_fits_nowhere_is_placed_all_the_same(function: Function) -> None:
    ops = [compute(f"op{i}", param_bytes=10**9, kernels=("gpu",)) for i in range(6)]
    problem = problem_of(ops, [], on_boards(2, memory=10**9))
    for placement in function(problem):
        assert (placement.devices > 0).all()
    assert set(function(problem)[-1].devices.tolist()) == {1, 2}


def test_heft_proposes_a_placement_that_fits_too() -> None:
    problem = large_model(on_boards(2, memory=1_000_000_000))
    fast, fitting = heft(problem)
    assert len(set(fast.devices.tolist())) == 1
    assert set(fitting.devices.tolist()) == {1, 2}


def test_m_topo_fills_devices_in_order() -> None:
    problem = large_model(on_boards(3))
    devices = m_topo(problem)[0].devices
    assert (np.diff(devices) >= 0).all()
    assert set(devices.tolist()) == {1, 2, 3}


def test_activations_count_for_the_group_that_uses_them_last() -> None:
    # a1 -> b1 -> b2 -> a2, where a2 also reads a1's large output: the backward pass of group a.
    ops = [
        compute("a/1", out=1000),
        compute("b/1", out=10, param_bytes=5, slot_bytes=2),
        compute("b/2", out=10),
        compute("a/2", out=1),
    ]
    edges = [("a/1", "b/1"), ("b/1", "b/2"), ("b/2", "a/2"), ("a/1", "a/2")]
    problem = problem_of(ops, edges, "k80x2", rules=[(r"^(a|b)/", r"\1")])
    assert problem.grouping.names == ("a", "b")
    # b/1 owns a variable, and its output is the variable's memory.
    assert group_bytes(problem).tolist() == [1000 + 10 + 1, 5 + 2]
    assert bytes_over_time(problem).sum(axis=0).max() == 1000 + 10 + 1 + 5 + 2


def test_shared_memory_is_counted_once() -> None:
    ops = [
        compute("a", out=1000),
        Op(name="view", type="Reshape", outputs=(Tensor(1000, shares=("a", 0)),)),
        compute("late", out=1),
    ]
    problem = problem_of(ops, [("a", "view"), ("view", "late")], "k80x2")
    assert bytes_over_time(problem).sum(axis=0).max() == 1001
    assert group_bytes(problem).tolist() == [0, 0, 1001]


# --- repairing -----------------------------------------------------------------------------------


class Recorder(Placer):
    """Proposes given placements and keeps what it is told."""

    name = "recorder"

    def __init__(self, problem: Problem, placements: Sequence[Placement]) -> None:
        super().__init__(problem)
        self.told: list[Trial] = []
        self._waiting = list(placements)

    def ask(self, count: int) -> list[Placement]:
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        self.told += trials


def measure(problem: Problem, placement: Placement, factor: float = 1.0) -> Measurement:
    """Memory is the variables, times `factor`; a step takes a second."""
    used = np.bincount(
        placement.devices, weights=problem.group_resident_bytes, minlength=problem.num_devices
    )
    peaks = tuple(int(factor * b) for b in used)
    devices = problem.cluster.devices
    if any(peak > device.memory_bytes for peak, device in zip(peaks, devices, strict=True)):
        return Measurement(outcome=Outcome.OUT_OF_MEMORY, peak_bytes=peaks)
    return Measurement(outcome=Outcome.OK, step_seconds=(1.0,), peak_bytes=peaks)


def run(placer: Placer, factor: float = 1.0, batch: int = 1) -> list[Trial]:
    """Asks and tells until the placer has nothing more to propose."""
    trials: list[Trial] = []
    while placements := placer.ask(batch):
        new = [
            Trial(
                placement=placement,
                measurement=measure(placer.problem, placement, factor),
                placer=placer.name,
            )
            for placement in placements
        ]
        placer.tell(new)
        trials += new
        assert len(trials) < 100
    return trials


def crowded(problem: Problem) -> Placement:
    return Placement.of(problem, [1] * problem.num_groups)


def test_repairing_moves_groups_until_it_fits() -> None:
    problem = large_model(on_boards(2, memory=1_000_000_000))
    inner = Recorder(problem, [crowded(problem)])
    placer = Repairing(inner)
    trials = run(placer)
    assert placer.name == "recorder"
    assert trials[0].placement == crowded(problem)
    assert trials[-1].measurement.ok
    assert len(trials) == 2
    assert inner.told == trials
    # The other GPU is as fast, the CPU is not; and what moves is one piece of the chain.
    devices = trials[-1].placement.devices
    assert set(devices.tolist()) == {1, 2}
    assert np.count_nonzero(np.diff(devices)) <= 2


def test_repairing_goes_on_when_the_estimate_was_too_low() -> None:
    problem = large_model(on_boards(3, memory=1_000_000_000))
    trials = run(Repairing(Recorder(problem, [crowded(problem)])), factor=1.4)
    assert trials[-1].measurement.ok
    assert len({trial.placement for trial in trials}) == len(trials)


def test_repairing_respects_constraints() -> None:
    cluster = on_boards(2, memory=1_000_000_000)
    free = large_model(cluster)
    forbidden = np.zeros(free.allowed.shape, dtype=np.bool_)
    forbidden[::2, 2] = True  # every other group not on the second GPU
    forbidden[:, 0] = True
    problem = Problem(
        graph=free.graph,
        grouping=free.grouping,
        cluster=cluster,
        costs=free.costs,
        forbidden=frozen(forbidden),
    )
    trials = run(Repairing(Recorder(problem, [crowded(problem)])))
    assert trials[-1].measurement.ok
    for trial in trials:
        assert problem.allowed[np.arange(problem.num_groups), trial.placement.devices].all()


def test_repairing_stops_when_nothing_can_move() -> None:
    ops = [compute(f"op{i}", param_bytes=10**9, kernels=("gpu",)) for i in range(4)]
    problem = problem_of(ops, [], on_boards(1, memory=10**9))
    trials = run(Repairing(Recorder(problem, [crowded(problem)])))
    assert len(trials) == 1


def test_repairing_gives_up_after_some_rounds() -> None:
    # Whatever moves, the first GPU stays too full.
    problem = large_model(on_boards(2, memory=1_000_000_000))
    placer = Repairing(Recorder(problem, [crowded(problem)]), rounds=2)
    asked = []
    while placements := placer.ask(1):
        asked += placements
        failed = Measurement(
            outcome=Outcome.OUT_OF_MEMORY, peak_bytes=(0, 1_100_000_000, 100_000_000)
        )
        placer.tell([Trial(placement=placements[0], measurement=failed, placer="x")])
    assert len(asked) == len(set(asked)) == 3


def test_repairing_leaves_other_failures_and_other_placers_alone() -> None:
    problem = large_model(on_boards(2, memory=1_000_000_000))
    placer = Repairing(Recorder(problem, [crowded(problem)]))
    foreign = Placement.of(problem, [2] * problem.num_groups)
    placer.tell([Trial(placement=foreign, measurement=measure(problem, foreign), placer="other")])
    (asked,) = placer.ask(5)
    assert asked == crowded(problem)
    failed = Measurement(outcome=Outcome.FAILED, reason="crashed")
    placer.tell([Trial(placement=asked, measurement=failed, placer="recorder")])
    assert placer.ask(5) == []


def test_repairing_proposes_nothing_twice() -> None:
    problem = problem_of([compute("a"), compute("b")], [("a", "b")], "cpu2")
    once = crowded(problem)
    assert Repairing(Recorder(problem, [once, once, once])).ask(5) == [once]
    # Four placements there are, and a random placer proposes them over and over.
    assert len(Repairing(RandomPlacement(problem)).ask(10)) == 4


def test_repair_without_an_overflow_changes_nothing() -> None:
    problem = large_model(on_boards(2))
    peaks = np.zeros(3, dtype=np.int64)
    assert repair(problem, crowded(problem), peaks) == crowded(problem)


def test_one_shot_methods_can_be_repaired() -> None:
    problem = large_model(on_boards(2, memory=1_000_000_000))
    for function in ONE_SHOT:
        trials = run(Repairing(OneShot("method", problem, function)), batch=4)
        assert any(trial.measurement.ok for trial in trials)
