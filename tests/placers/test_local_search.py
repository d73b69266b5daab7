"""`local-search`: simulated annealing by ask and tell."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Edge, Op, Tensor, frozen
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers._moves import Moves
from placewright.placers.base import Placer
from placewright.placers.exact import count_placements, every_placement
from placewright.placers.local_search import LocalSearch, LocalSearchConfig
from placewright.placers.random_placement import RandomPlacement
from placewright.problem import Problem
from placewright.testing import (
    check_placer,
    gpu_boards,
    layered_graph,
    make_problem,
    random_problem,
    uniform_cluster,
)

Evaluate = Callable[[Sequence[Placement]], list[Measurement]]


def simulated(problem: Problem) -> Evaluate:
    return SimulatedEvaluator(problem, threads=1).evaluate


def run(placer: Placer, evaluate: Evaluate, trials: int, batch: int = 64) -> list[Trial]:
    """Up to so many trials; fewer when the placer ends."""
    done: list[Trial] = []
    while len(done) < trials and (asked := placer.ask(min(batch, trials - len(done)))):
        answers = told(asked, evaluate)
        placer.tell(answers)
        done += answers
    return done


def told(placements: Sequence[Placement], evaluate: Evaluate) -> list[Trial]:
    return [
        Trial(placement=placement, measurement=measurement, placer="test")
        for placement, measurement in zip(placements, evaluate(placements), strict=True)
    ]


def best_seconds(trials: Sequence[Trial]) -> float:
    return min((trial.measurement.mean_seconds for trial in trials), default=math.inf)


def layered_problem(ops: int, width: int, gpus: int = 4) -> Problem:
    graph = layered_graph(ops, width)
    return make_problem(list(graph.ops()), list(graph.edges()), gpu_boards(gpus))


def packing_problem() -> Problem:
    """Variables that fit three devices only when they are spread well."""
    sizes = [50, 45, 40, 40, 35, 30, 30, 25, 25, 20, 20, 15, 15, 10, 10, 10]
    ops = [
        Op(
            name=f"layer_{i}",
            type="Op",
            outputs=(Tensor(1),),
            seconds={"dev": 1.0},
            param_bytes=size,
        )
        for i, size in enumerate(sizes)
    ]
    edges = [(f"layer_{i}", f"layer_{i + 1}") for i in range(len(ops) - 1)]
    return make_problem(ops, edges, uniform_cluster(3, memory_bytes=150, bandwidth=10.0))


@pytest.mark.parametrize("seed", range(6))
def test_contract(seed: int) -> None:
    problem = random_problem(seed, tight_memory=seed > 2)
    check_placer(lambda p, s: LocalSearch(p, seed=s), problem, rounds=20, count=7)
    check_placer(lambda p, s: LocalSearch(p, seed=s), layered_problem(60, 6), rounds=3, count=64)


def test_goes_only_where_groups_are_allowed() -> None:
    problem = layered_problem(60, 6)
    rng = np.random.default_rng(0)
    forbidden = rng.random((problem.num_groups, problem.num_devices)) < 0.4
    forbidden[np.arange(problem.num_groups), rng.integers(4, size=problem.num_groups)] = False
    problem = Problem(
        graph=problem.graph,
        grouping=problem.grouping,
        cluster=problem.cluster,
        costs=problem.costs,
        forbidden=frozen(forbidden),
    )
    for trial in run(LocalSearch(problem), simulated(problem), 2000):
        assert problem.allowed[np.arange(problem.num_groups), trial.placement.devices].all()


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_optimum_of_a_small_problem(seed: int) -> None:
    problem = layered_problem(8, 2)  # 65,536 placements
    evaluate = simulated(problem)
    every = [Placement.of(problem, devices) for devices in every_placement(problem)]
    optimum = min(measurement.mean_seconds for measurement in evaluate(every))
    trials = run(LocalSearch(problem, seed=seed), evaluate, 2000)
    assert best_seconds(trials) == pytest.approx(optimum)


def test_the_same_seed_proposes_what_it_always_did() -> None:
    """Results in `benchmarks/results` are by seed and number of trials: who changes what is
    proposed has to make them anew. With answers that every processor computes alike."""
    problem = layered_problem(60, 6)
    weights = np.arange(problem.num_groups) % 7 + 1

    def evaluate(placements: Sequence[Placement]) -> list[Measurement]:
        measured = []
        for placement in placements:
            load = np.bincount(placement.devices, weights, minlength=4).astype(int)
            cut = int(np.count_nonzero(np.diff(placement.devices)))
            measured.append(
                Measurement(
                    outcome=Outcome.OUT_OF_MEMORY,
                    peak_bytes=(10**9, 2**40, 0, 0),
                    reason="too full",
                )
                if load[1] > 100
                else Measurement(outcome=Outcome.OK, step_seconds=(float(load.max() + cut),))
            )
        return measured

    config = LocalSearchConfig(cycle=100, season=400)
    trials = run(LocalSearch(problem, config, seed=5), evaluate, 3000)
    assert {trial.measurement.ok for trial in trials} == {True, False}
    proposed = hashlib.sha256(b"".join(trial.placement.devices.tobytes() for trial in trials))
    assert proposed.hexdigest()[:16] == "355870fdd989e240"


def test_beats_random_by_far() -> None:
    problem = layered_problem(200, 10)
    evaluate = simulated(problem)
    found = best_seconds(run(LocalSearch(problem), evaluate, 2000))
    drawn = best_seconds(run(RandomPlacement(problem), evaluate, 2000))
    assert found < 0.6 * drawn


def test_no_placement_is_proposed_twice() -> None:
    problem = layered_problem(30, 3)
    evaluate = simulated(problem)
    others = run(RandomPlacement(problem, seed=1), evaluate, 500)
    placer = LocalSearch(problem)
    placer.tell(others)
    trials = others + run(placer, evaluate, 5000)
    assert len({trial.placement for trial in trials}) == 5500


def test_asking_again_before_telling_gives_others() -> None:
    problem = layered_problem(30, 3)
    placer = LocalSearch(problem)
    asked = [placement for _ in range(10) for placement in placer.ask(30)]
    assert len(set(asked)) == 300
    placer.tell(told(asked, simulated(problem)))
    again = placer.ask(30)
    assert len(again) == 30
    assert not set(again) & set(asked)


def test_what_it_knows_already_changes_nothing() -> None:
    problem = layered_problem(60, 4)
    evaluate = simulated(problem)
    once, again = LocalSearch(problem), LocalSearch(problem)
    tried = run(once, evaluate, 400)
    assert run(again, evaluate, 400) == tried
    again.tell(tried[200:])
    assert run(again, evaluate, 400) == run(once, evaluate, 400)


def test_starts_from_the_best_it_was_told() -> None:
    problem = layered_problem(100, 5)
    evaluate = simulated(problem)
    earlier = run(LocalSearch(problem, seed=5), evaluate, 3000)
    placer = LocalSearch(problem, seed=6)
    placer.tell(earlier)
    # Already the first proposals are changes of good placements.
    first = best_seconds(told(placer.ask(64), evaluate))
    assert first < 1.05 * best_seconds(earlier)


def everywhere(problem: Problem, seed: int) -> Placement:
    rng = np.random.default_rng(seed)
    devices = rng.integers(problem.num_devices, size=problem.num_groups, dtype=np.int32)
    return Placement.of(problem, devices)


def changes(one: Placement, other: Placement) -> int:
    return int((one.devices != other.devices).sum())


@pytest.mark.parametrize(("season", "least", "most"), [(6000, 0.4, 0.6), (0, 0.0, 0.1)])
def test_half_of_its_proposals_have_nothing_to_do_with_what_it_was_told(
    season: int, least: float, most: float
) -> None:
    problem = layered_problem(100, 5)
    evaluate = simulated(problem)
    known = everywhere(problem, 0)
    placer = LocalSearch(problem, LocalSearchConfig(season=season))
    # So good that nothing leads away from it.
    best = Measurement(outcome=Outcome.OK, step_seconds=(1e-9,))
    placer.tell([Trial(placement=known, measurement=best, placer="test")])
    asked = [trial.placement for trial in run(placer, evaluate, 2000)]
    far = sum(changes(placement, known) > 60 for placement in asked)
    assert least <= far / len(asked) <= most


@pytest.mark.parametrize("seed", range(3))
def test_gets_out_of_where_it_was_told_to_start(seed: int) -> None:
    problem = layered_problem(100, 5)
    goal, trap = everywhere(problem, 1), everywhere(problem, 2)

    def evaluate(placements: Sequence[Placement]) -> list[Measurement]:
        """The closer to the goal the better, but the trap is better than all that is half way."""
        return [
            Measurement(
                outcome=Outcome.OK,
                step_seconds=(30.0 if changes(p, trap) < 25 else 1.0 + changes(p, goal),),
            )
            for p in placements
        ]

    placer = LocalSearch(problem, LocalSearchConfig(season=2000), seed=seed)
    placer.tell(told([trap], evaluate))
    assert best_seconds(run(placer, evaluate, 5000)) < 20.0


def test_room_is_made_for_what_does_not_fit() -> None:
    problem = layered_problem(30, 3)
    moves = Moves(problem, random.Random(0))
    now = np.array([1] * 10 + [2] * 20, dtype=np.int32)
    wanted = now.copy()
    wanted[10:13] = 1  # and there is no room for them on device 1
    drawn = [moves.draw(now, (wanted, [1]), now) for _ in range(500)]
    relieved = [changed for kind, changed in drawn if kind == "relieve" and changed is not None]
    assert relieved
    for changed in relieved:
        assert (changed[10:] == wanted[10:]).all()
        assert (changed[:10] != 1).any()


@pytest.mark.parametrize("seed", range(3))
def test_finds_placements_that_fit(seed: int) -> None:
    problem = packing_problem()
    trials = run(LocalSearch(problem, seed=seed), simulated(problem), 1500)
    assert trials[0].measurement.outcome is Outcome.OUT_OF_MEMORY
    assert math.isfinite(best_seconds(trials))


def test_finds_placements_that_fit_without_knowing_the_peaks() -> None:
    problem = packing_problem()
    evaluate = simulated(problem)

    def silent(placements: Sequence[Placement]) -> list[Measurement]:
        """As a real machine does that only says that memory ran out."""
        return [
            measurement
            if measurement.ok
            else Measurement(outcome=measurement.outcome, reason="out of memory")
            for measurement in evaluate(placements)
        ]

    assert math.isfinite(best_seconds(run(LocalSearch(problem), silent, 3000)))


def test_goes_on_when_everything_fails() -> None:
    problem = layered_problem(30, 3)

    def broken(placements: Sequence[Placement]) -> list[Measurement]:
        return [Measurement(outcome=Outcome.FAILED, reason="no luck") for _ in placements]

    assert len(run(LocalSearch(problem), broken, 1000)) == 1000


def test_failures_on_the_way_do_not_stop_it() -> None:
    problem = layered_problem(100, 5)
    evaluate = simulated(problem)

    def flaky(placements: Sequence[Placement]) -> list[Measurement]:
        return [
            measurement
            if number % 10
            else Measurement(outcome=Outcome.TIMED_OUT, reason="too slow")
            for number, measurement in enumerate(evaluate(placements))
        ]

    start = best_seconds(run(LocalSearch(problem), flaky, 64))
    assert best_seconds(run(LocalSearch(problem), flaky, 3000)) < 0.8 * start


def test_a_small_space_is_tried_out_and_then_it_ends() -> None:
    problem = layered_problem(6, 2)
    evaluate = simulated(problem)
    assert count_placements(problem) == 4096
    placer = LocalSearch(problem)
    others = run(RandomPlacement(problem), evaluate, 100)
    placer.tell(others)
    trials = run(placer, evaluate, 10_000)
    assert len(trials) == 4096 - len({trial.placement for trial in others})
    assert len({trial.placement for trial in trials + others}) == 4096
    assert placer.ask(64) == []


def test_what_is_left_of_a_small_space_counts_as_well() -> None:
    """Where every trial is faster than all before it, the last one is the best known."""
    problem = layered_problem(6, 2)
    seconds = itertools.count(10_000, -1)

    def faster_and_faster(placements: Sequence[Placement]) -> list[Measurement]:
        return [
            Measurement(outcome=Outcome.OK, step_seconds=(float(next(seconds)),))
            for _ in placements
        ]

    placer = LocalSearch(problem)
    trials = run(placer, faster_and_faster, 10_000)
    best = min(camp.elites[0].score.value for camp in placer._camps() if camp.elites)
    assert best == trials[-1].measurement.mean_seconds


def test_nothing_to_choose_nothing_to_propose() -> None:
    one_device = make_problem(
        [Op(name="a", type="Op", seconds={"dev": 1.0})], [], uniform_cluster(1)
    )
    assert LocalSearch(one_device).ask(10) == []
    ops = [Op(name=name, type="Op", seconds={"dev": 1.0}) for name in "ab"]
    problem = make_problem(ops, [Edge("a", "b", None)], uniform_cluster(2))
    pinned = Problem(
        graph=problem.graph,
        grouping=problem.grouping,
        cluster=problem.cluster,
        costs=problem.costs,
        forbidden=frozen(np.array([[True, False], [False, True]])),
    )
    assert LocalSearch(pinned).ask(10) == []


def test_a_step_that_takes_no_time_can_be_placed() -> None:
    ops = [Op(name=f"op{i}", type="Op", seconds={"dev": 0.0}) for i in range(20)]
    problem = make_problem(ops, [], uniform_cluster(2))
    assert len(run(LocalSearch(problem), simulated(problem), 500)) == 500


def test_forgets_when_there_is_too_much_to_remember() -> None:
    problem = layered_problem(30, 3)
    placer = LocalSearch(problem, LocalSearchConfig(memory=100))
    assert len(run(placer, simulated(problem), 1000)) == 1000


def test_seeds_differ() -> None:
    problem = layered_problem(60, 6)
    evaluate = simulated(problem)
    first, second = (run(LocalSearch(problem, seed=seed), evaluate, 300) for seed in (0, 1))
    assert {t.placement for t in first} != {t.placement for t in second}
