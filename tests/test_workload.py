"""A model that does not fit: what is kept on the GPU, what travels, what the host computes; for one
shape and for several."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from placewright.cluster import Cluster, from_document
from placewright.errors import PlacementError, SearchError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.evaluators.workload import WorkloadEvaluator
from placewright.graph import Edge, Graph, Op, Tensor, Work
from placewright.placement import Placement
from placewright.placers._moves import Moves
from placewright.placers.heft import heft
from placewright.placers.local_search import LocalSearch
from placewright.placers.offload import Offload
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.session.driver import place
from placewright.session.workload import candidates, place_workload
from placewright.simulator import lower_bounds
from placewright.stays import How, stays
from placewright.testing import check_evaluator, check_placer
from placewright.workload import Workload

LAYERS = 32
PARTS = {"q": 33.6, "k": 8.4, "v": 8.4, "o": 33.6, "gate": 117.4, "up": 117.4, "down": 117.2}
"""Millions of bytes of a layer's weights, 436 in all, as in a Llama of 8 billion parameters."""


def host_and_gpu(gpu_memory: int = 8 << 30) -> Cluster:
    """The machine of the measurements: a link of 55 GB/s from pinned memory, and a host that reads
    64 GB/s."""
    document = {
        "name": "host and GPU",
        "kinds": {
            "host": {
                "type": "cpu", "peak_flops": 1e12, "memory_bandwidth": 64e9, "memory": 1 << 37,
            },
            "card": {
                "type": "gpu", "peak_flops": 1e14, "memory_bandwidth": 4e12, "memory": gpu_memory,
            },
        },
        "devices": [{"name": "cpu:0", "kind": "host"}, {"name": "gpu:0", "kind": "card"}],
        "links": [
            {"name": "pcie", "latency": 1e-5, "bandwidth": 55e9, "pairs": [["cpu:0", "gpu:0"]]}
        ],
        "issue": "none",
    }  # fmt: skip
    return from_document(document, where="test")


def llama(name: str, gpu_ms: float, cpu_ms: float, layers: int = LAYERS) -> Graph:
    """Decoder layers whose times per layer were measured."""
    ops: list[Op] = [Op(name="tokens", type="input", outputs=(Tensor(8192),), work=Work.NONE)]
    edges = []
    before = "tokens"
    for i in range(layers):
        for part, size in PARTS.items():
            op, share = f"layers/{i}/{part}", size / sum(PARTS.values())
            weight = int(size * 1e6)
            ops += [
                Op(name=f"{op}/weight", type="parameter", outputs=(Tensor(weight),),
                   param_bytes=weight, colocate=(op,), work=Work.NONE),
                Op(name=op, type="mm", outputs=(Tensor(8192),), colocate=(op,),
                   seconds={"gpu": gpu_ms * share / 1e3, "cpu": cpu_ms * share / 1e3}),
            ]  # fmt: skip
            edges += [Edge(f"{op}/weight", op), Edge(before, op)]
            before = op
    rules = [(r"^layers/(\d+)/", r"layers/\1"), ("^tokens", "layers/0")]
    return Graph.from_ops(name, ops, edges, rules)


def posed(gpu_ms: float, cpu_ms: float, layers: int = LAYERS, memory: int = 8 << 30) -> Problem:
    graph = llama(f"{layers} layers, {cpu_ms} ms", gpu_ms, cpu_ms, layers)
    return make_problem(graph, host_and_gpu(memory), ProblemConfig(homes=True))


def seconds_of(problem: Problem, placements: list[Placement]) -> list[float]:
    measured = SimulatedEvaluator(problem).evaluate(placements)
    return [m.mean_seconds if m.ok else np.inf for m in measured]


def pure(problem: Problem, how: How) -> float:
    """The best that keeps what fits on the GPU, and treats all the rest alike."""
    rule = Offload.of(problem)
    assert rule is not None
    every = [
        Placement.of(problem, rule.devices(resident, ~resident & (how is How.HOST)))
        for resident in rule.resident()
    ]
    return min(seconds_of(problem, every))


# Layers on the GPU took 1.0 ms where issued one by one, 0.1 ms as a graph; on the host 6.8 to 10 ms
# for one token.
@pytest.mark.parametrize(("gpu_ms", "cpu_ms"), [(1.0, 6.8), (1.0, 8.0), (0.1, 8.0), (1.0, 10.0)])
def test_for_one_token_it_finds_the_mix(gpu_ms: float, cpu_ms: float) -> None:
    problem = posed(gpu_ms, cpu_ms)
    result = place(problem, method="heft,local-search", trials=2000, evaluate="simulate")
    step = result.step_seconds
    assert step is not None
    assert result.placement is not None
    counts = Counter(stay.how for stay in stays(problem, result.placement))
    assert counts[How.RESIDENT] in (17, 18)
    assert counts[How.STREAMED] in range(6, 11)
    assert counts[How.HOST] in range(4, 9)
    # At least 1.25 times as fast as either pure plan, and near what no plan can beat.
    assert pure(problem, How.STREAMED) > 1.25 * step
    assert pure(problem, How.HOST) > 1.25 * step
    floor = lower_bounds(problem).stream_seconds
    assert floor <= step < 1.25 * floor


def test_for_128_tokens_nearly_all_that_does_not_fit_travels() -> None:
    problem = posed(1.0, 22.5)
    result = place(problem, method="heft,local-search", trials=1500, evaluate="simulate")
    assert result.placement is not None
    assert result.step_seconds is not None
    counts = Counter(stay.how for stay in stays(problem, result.placement))
    assert counts[How.STREAMED] >= 12
    assert counts[How.HOST] <= 2
    assert result.step_seconds <= pure(problem, How.STREAMED)
    assert pure(problem, How.HOST) > 2.5 * result.step_seconds


def test_a_slow_host_computes_nothing() -> None:
    problem = posed(1.0, 68.0)
    best = min(heft(problem), key=lambda placement: seconds_of(problem, [placement])[0])
    counts = Counter(stay.how for stay in stays(problem, best))
    assert counts[How.HOST] == 0
    assert counts[How.STREAMED] >= 13


def test_the_rule_keeps_what_saves_the_most_per_byte() -> None:
    sizes = {"table": (100, 0.0), "big": (100, 5.0), "small": (10, 5.0), "rest": (100, 0.5)}
    ops, edges, before = [], [], ""
    for name, (size, more) in sizes.items():
        ops.append(Op(name=f"{name}/w", type="parameter", outputs=(Tensor(size * 10**6),),
                      param_bytes=size * 10**6, work=Work.NONE))  # fmt: skip
        ops.append(Op(name=name, type="mm", outputs=(Tensor(8),),
                      seconds={"gpu": 0.01, "cpu": 0.01 + more}))  # fmt: skip
        edges += [Edge(f"{name}/w", name), *([Edge(before, name)] if before else [])]
        before = name
    graph = Graph.from_ops("uneven", ops, edges, [(r"^(\w+)", r"\1")])
    cluster = host_and_gpu(120 * 10**6)
    problem = make_problem(graph, cluster, ProblemConfig(homes=True, window=100 * 10**6))
    rule = Offload.of(problem)
    assert rule is not None
    worth = dict(zip(rule.names, rule.worth.tolist(), strict=True))
    # A table of which the host reads a few rows as quickly is worth nothing on the GPU; of what is
    # left the link's time counts, per byte the same for all.
    assert worth["table/weights"] == 0.0
    assert worth["big/weights"] == pytest.approx(100e6 / 55e9)
    assert worth["small/weights"] == pytest.approx(10e6 / 55e9)
    (kept, *_) = rule.resident()
    assert [n for n, here in zip(rule.names, kept, strict=True) if here] == ["small/weights"]


def test_no_rule_where_there_is_nothing_to_choose() -> None:
    tied = make_problem(llama("tied", 1.0, 8.0, 2), host_and_gpu(), ProblemConfig(homes=False))
    assert Offload.of(tied) is None
    alone = make_problem(
        llama("alone", 1.0, 8.0, 2), Cluster.load("cpu2"), ProblemConfig(homes=True)
    )
    assert Offload.of(alone) is None


def test_local_search_keeps_its_contract() -> None:
    check_placer(lambda problem, seed: LocalSearch(problem, seed=seed), posed(1.0, 8.0, 4, 1 << 30))


def test_moves_keep_weights_and_their_readers_together() -> None:
    problem = posed(1.0, 8.0, 6, 1 << 30)
    moves = Moves(problem, random.Random(0))
    devices = np.array([0, 1] * 6, dtype=np.int32)
    seen = Counter[str]()
    for _ in range(3000):
        kind, changed = moves.draw(devices, None, devices)
        if changed is None:
            continue
        assert moves.may_be(changed)
        seen[kind] += 1
        if kind == "trade":
            differ = {problem.grouping.names[g] for g in np.flatnonzero(changed != devices)}
            layers = {name.removesuffix("/weights") for name in differ}
            assert len(layers) == 2
            assert np.bincount(changed).tolist() == np.bincount(devices).tolist()
            devices = changed
        if kind == "settle":
            devices = changed
    assert min(seen["trade"], seen["settle"]) > 50
    tied = make_problem(llama("tied", 1.0, 8.0, 2), host_and_gpu(), ProblemConfig(homes=False))
    kinds = {Moves(tied, random.Random(0)).draw(np.zeros(tied.num_groups, dtype=np.int32), None,
                                                np.zeros(tied.num_groups, dtype=np.int32))[0]
             for _ in range(200)}  # fmt: skip
    assert not kinds & {"trade", "settle"}


# --- several shapes ------------------------------------------------------------------------------


def generating(
    layers: int = LAYERS, memory: int = 8 << 30, weights: Mapping[str, float] | None = None
) -> Workload:
    weights = weights or {"decode": 256.0, "prefill": 1.0}
    times = {"decode": (0.1, 8.0), "prefill": (1.0, 22.5), "long": (1.0, 68.0)}
    return Workload.of(
        {name: (posed(*times[name], layers, memory), weight) for name, weight in weights.items()}
    )


def test_the_whole_has_one_home_and_a_device_for_each_shape() -> None:
    work = generating(2)
    names = work.problem.grouping.names
    assert set(names) == {
        "layers/0/weights", "layers/1/weights", "decode/layers/0", "decode/layers/1",
        "prefill/layers/0", "prefill/layers/1",
    }  # fmt: skip
    assert int(work.problem.graph.param_bytes.sum()) == 2 * 436 * 10**6
    rng = np.random.default_rng(0)
    for _ in range(20):
        whole = Placement.of(work.problem, rng.integers(2, size=6, dtype=np.int32))
        parts = work.divided(whole)
        assert work.joined(parts) == whole
        evaluator = WorkloadEvaluator(work)
        (measured,) = evaluator.evaluate([whole])
        seconds = {
            part.name: seconds_of(part.problem, [parts[part.name]])[0] for part in work.parts
        }
        total = 256.0 * seconds["decode"] + seconds["prefill"]
        assert measured.mean_seconds == total
        assert {n: m.mean_seconds for n, m in evaluator.parts(whole).items()} == seconds


def test_the_evaluator_keeps_its_contract() -> None:
    work = generating(3, 1 << 30)
    check_evaluator(WorkloadEvaluator(work))


def test_what_does_not_go_together_is_refused() -> None:
    one, other = posed(1.0, 8.0, 2), posed(1.0, 8.0, 3)
    with pytest.raises(PlacementError, match="'layers/2/weights' is not the same in both"):
        Workload.of({"a": (one, 1.0), "b": (other, 1.0)})
    with pytest.raises(PlacementError, match="another cluster"):
        Workload.of({"a": (one, 1.0), "b": (posed(1.0, 8.0, 2, 1 << 30), 1.0)})
    with pytest.raises(PlacementError, match="weight of part 'a' must be positive"):
        Workload.of({"a": (one, 0.0)})
    with pytest.raises(PlacementError, match="at least one part"):
        Workload.of({})
    with pytest.raises(PlacementError, match="without slashes"):
        Workload.of({"a/b": (one, 1.0)})
    tied = make_problem(llama("tied", 1.0, 8.0, 2), host_and_gpu(), ProblemConfig(homes=False))
    with pytest.raises(PlacementError, match="no homes"):
        Workload.of({"a": (tied, 1.0)})
    work = Workload.of({"a": (one, 1.0), "b": (posed(1.0, 9.0, 2), 1.0)})
    here, there = (
        Placement.of(part.problem, [d] * 4) for part, d in zip(work.parts, (0, 1), strict=True)
    )
    with pytest.raises(PlacementError, match="at home in two places"):
        work.joined({"a": here, "b": there})


def test_nothing_fits() -> None:
    parts = {name: posed(1.0, 8.0, 4, 300 * 10**6) for name in "ab"}
    small = {
        name: make_problem(
            llama("m", 1.0, 8.0, 400), host_and_gpu(300 * 10**6), ProblemConfig(homes=True)
        )
        for name in parts
    }
    with pytest.raises(SearchError, match="part 'a': the model needs at least 174 GB"):
        place_workload(Workload.of({name: (p, 1.0) for name, p in small.items()}), trials=10)


def test_homes_are_chosen_for_what_is_run_most() -> None:
    work = generating(weights={"decode": 256.0, "prefill": 1.0, "long": 1.0})
    result = place_workload(work, seconds=None, trials=3000)
    counts = {
        name: Counter(stay.how for stay in stays(part.problem, result.placements[name]))
        for part in result.workload.parts
        for name in [part.name]
    }
    # One home for all, but only the single tokens are worth computing on the host.
    assert len({counts[name][How.RESIDENT] for name in counts}) == 1
    assert counts["decode"][How.HOST] >= 4
    assert counts["decode"][How.STREAMED] >= 5
    assert counts["long"][How.HOST] == 0
    assert counts["prefill"][How.HOST] <= 2
    assert result.floor_seconds <= result.total_seconds < 1.3 * result.floor_seconds
    assert result.total_seconds == pytest.approx(
        256 * result.seconds["decode"] + result.seconds["prefill"] + result.seconds["long"]
    )
    # As good for each as a plan for it alone could be by the rule.
    for part in work.parts:
        alone = min(seconds_of(part.problem, heft(part.problem)))
        assert result.seconds[part.name] < 1.1 * alone


def test_the_window_may_be_tuned() -> None:
    work = generating(8, 2 << 30)
    result = place_workload(work, seconds=None, trials=300, tune_window=True)
    plain = place_workload(work, seconds=None, trials=300)
    assert result.window_bytes in [int(f * plain.window_bytes) for f in (0.5, 1.0, 2.0)]
    best = min(m.mean_seconds for m in WorkloadEvaluator(work).evaluate(candidates(work)) if m.ok)
    assert plain.total_seconds <= best


def test_no_placement_beats_the_floor() -> None:
    rng = np.random.default_rng(1)
    for memory in (1 << 30, 2 << 30):
        problem = posed(1.0, 8.0, 6, memory)
        floor = lower_bounds(problem).stream_seconds
        rows = [rng.integers(2, size=problem.num_groups, dtype=np.int32) for _ in range(300)]
        placements = [*heft(problem), *(Placement.of(problem, row) for row in rows)]
        assert min(seconds_of(problem, placements)) >= floor > 0
