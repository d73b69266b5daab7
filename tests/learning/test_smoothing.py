from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from placewright.evaluators.simulated import Noise, SimulatedEvaluator
from placewright.graph import Edge, Op, Tensor
from placewright.learning import smoothing
from placewright.learning.smoothing import Smoother
from placewright.placement import Placement
from placewright.placers.random_placement import RandomPlacement
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.testing import gpu_boards, layered_graph, uniform_cluster
from placewright.testing import make_problem as tiny_problem


def _problem() -> Problem:
    return make_problem(layered_graph(120, 6), gpu_boards(4), ProblemConfig(groups=30))


def _neighbours(problem: Problem, count: int) -> list[Placement]:
    """What a policy that has narrowed down its choice proposes."""
    rng = np.random.default_rng(0)
    (base,) = RandomPlacement(problem, seed=5).ask(1)
    found = []
    for _ in range(count):
        devices = base.devices.copy()
        groups = rng.integers(problem.num_groups, size=6)
        devices[groups] = rng.integers(problem.num_devices, size=6)
        allowed = problem.allowed[np.arange(problem.num_groups), devices]
        found.append(Placement.of(problem, np.where(allowed, devices, base.devices)))
    return list(dict.fromkeys(found))


def test_estimates_are_nearer_to_the_truth_than_measurements_and_choose_better() -> None:
    problem = _problem()
    placements = _neighbours(problem, 300)
    truth = [m.mean_seconds for m in SimulatedEvaluator(problem).evaluate(placements)]
    noisy = SimulatedEvaluator(problem, Noise(spread=0.1, steps=1, failure_rate=0.0)).evaluate(
        placements
    )
    smoother = Smoother(problem, 0.1)
    for placement, measurement in zip(placements, noisy, strict=True):
        smoother.add(placement, measurement.mean_seconds)

    def error(times: np.ndarray) -> float:
        return float(np.sqrt(np.mean((np.log(times) - np.log(truth)) ** 2)))

    measured = np.array([m.mean_seconds for m in noisy])
    assert error(smoother.estimate(placements)) < 0.7 * error(measured)
    true_seconds = dict(zip(placements, truth, strict=True))
    chosen = [true_seconds[placement] for _, placement in smoother.best(8)]
    lucky = np.argsort(measured)[:8]
    assert np.mean(chosen) < np.mean(np.array(truth)[lucky])
    # What it says of the chosen is no longer too good to be true, as the lucky times are.
    said = [seconds for seconds, _ in smoother.best(8)]
    assert abs(math.log(np.mean(said) / np.mean(chosen))) < 0.5 * abs(
        math.log(measured[lucky].mean() / np.array(truth)[lucky].mean())
    )


def test_without_neighbours_a_time_counts_by_how_much_times_differ() -> None:
    """Far apart, and differing by far more than the noise: every time is nearly what was said."""
    problem = _problem()
    placements = RandomPlacement(problem, seed=1).ask(4)
    smoother = Smoother(problem, 0.01)
    for number, placement in enumerate(placements):
        smoother.add(placement, 2.0**number)
    assert smoother.estimate(placements) == pytest.approx([1.0, 2.0, 4.0, 8.0], rel=0.01)


def test_what_was_never_tried_is_known_by_what_its_devices_have_to_do() -> None:
    """Here what was tried, but every group on another GPU."""
    problem = _problem()
    tried = RandomPlacement(problem, seed=3).ask(300)
    smoother = Smoother(problem, 0.05)
    noisy = SimulatedEvaluator(problem, Noise(spread=0.05, steps=1, failure_rate=0.0)).evaluate(
        tried
    )
    for placement, measurement in zip(tried, noisy, strict=True):
        smoother.add(placement, measurement.mean_seconds)
    kinds = np.asarray(problem.cluster.kind_of_device)
    names = np.arange(problem.num_devices, dtype=np.int32)
    gpus = np.flatnonzero(kinds == kinds[-1])
    assert len(gpus) == 4
    names[gpus] = np.roll(gpus, 1)
    turned = [Placement.of(problem, names[placement.devices]) for placement in tried]
    truth = np.log([m.mean_seconds for m in SimulatedEvaluator(problem).evaluate(turned)])
    error = np.log(smoother.estimate(turned)) - truth
    assert np.sqrt(np.mean(error**2)) < 0.8 * truth.std()


def test_what_devices_have_to_do() -> None:
    """Six ops in a chain, each of a second; to send one's output takes a second as well."""
    ops = [
        Op(name=f"op{i}", type="t", outputs=(Tensor(4),), seconds={"dev": 1.0}) for i in range(6)
    ]
    edges = [Edge(f"op{i}", f"op{i + 1}") for i in range(5)]
    problem = tiny_problem(ops, edges, uniform_cluster(3, bandwidth=4.0))
    placements = [
        Placement.of(problem, devices)
        for devices in (
            [0, 0, 0, 1, 1, 2],
            [2, 2, 2, 0, 0, 1],
            [0, 0, 1, 1, 2, 2],
            [1, 1, 0, 0, 2, 2],
        )
    ]
    loads = smoothing._Loads(problem).of(placements)
    # Computing: each, the most, all; sending and receiving likewise; the most of both together.
    assert loads[0] == pytest.approx([3, 2, 1, 3, 6, 2, 1, 1, 2, 4, 4])
    assert loads[1] == pytest.approx(loads[0])
    # Devices that compute equally long send differently: which is which still makes no difference.
    assert loads[2] == pytest.approx([2, 2, 2, 2, 6, 2, 1, 1, 2, 4, 4])
    assert loads[3] == pytest.approx(loads[2])


def test_what_is_told_twice_counts_once() -> None:
    problem = _problem()
    once, twice = Smoother(problem, 0.1), Smoother(problem, 0.1)
    placements = _neighbours(problem, 20)
    for number, placement in enumerate(placements):
        once.add(placement, 1.0 + number % 5)
        for _ in range(3):
            twice.add(placement, 1.0 + number % 5)
    assert once.best(5) == twice.best(5)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> tuple[Smoother, list[Placement]]:
    """One that remembers little, and more placements than that."""
    monkeypatch.setattr(smoothing, "_MOST", 50)
    monkeypatch.setattr(smoothing, "_FASTEST", 5)
    monkeypatch.setattr(smoothing, "_FIRST", 4)
    problem = _problem()
    return Smoother(problem, 0.01), RandomPlacement(problem, seed=2).ask(200)


def test_old_trials_are_forgotten_but_for_the_best_and_the_first(
    forgetful: tuple[Smoother, list[Placement]],
) -> None:
    smoother, placements = forgetful
    for number, placement in enumerate(placements):
        smoother.add(placement, 1.0 if number == 13 else 10.0)
        if number % 20 == 19:
            best = smoother.best(1)
            assert best[0][1] == placements[13]
    state = smoother.state()
    assert len(state["smoothed_logs"]) <= 60
    kept = state["smoothed_devices"].tolist()
    assert kept[:4] == [placement.devices.tolist() for placement in placements[:4]]
    assert placements[20].devices.tolist() not in kept


def test_of_many_that_are_told_at_once_the_fast_ones_are_known(
    forgetful: tuple[Smoother, list[Placement]],
) -> None:
    smoother, placements = forgetful
    for number, placement in enumerate(placements):
        smoother.add(placement, 1.0 + abs(number - 20))
    found = {placement for _, placement in smoother.best(3)}
    assert found == {placements[19], placements[20], placements[21]}


@pytest.mark.parametrize("noise", [1e-9, 0.1, 10.0])
def test_any_noise_and_any_time_can_be_estimated(noise: float) -> None:
    problem = _problem()
    smoother = Smoother(problem, noise)
    placements = _neighbours(problem, 30)
    for placement in placements:
        smoother.add(placement, 0.0)  # a graph that costs nothing
    assert np.isfinite(smoother.estimate(placements)).all()
    smoother.add(RandomPlacement(problem, seed=8).ask(1)[0], 1.0)
    assert np.isfinite(smoother.estimate(placements)).all()


def test_its_state_goes_on_where_it_was() -> None:
    problem = _problem()
    placements = _neighbours(problem, 40)
    smoother, restored = Smoother(problem, 0.1), Smoother(problem, 0.1)
    assert restored.best(3) == []
    restored.take_state(smoother.state())  # of none
    for number, placement in enumerate(placements):
        smoother.add(placement, 1.0 + number % 7)
    smoother.best(3)
    restored.take_state({name: torch.clone(t) for name, t in smoother.state().items()})
    assert restored.best(5) == smoother.best(5)
