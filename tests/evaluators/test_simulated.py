from __future__ import annotations

import math

import numpy as np
import pytest

from placewright.errors import PlacementError
from placewright.evaluators.base import Evaluator
from placewright.evaluators.simulated import Noise, SimulatedEvaluator
from placewright.graph import Op, Tensor
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.testing import (
    check_evaluator,
    make_problem,
    random_problem,
    sample_placements,
    tiny_problems,
    uniform_cluster,
)


@pytest.mark.parametrize("seed", range(6))
def test_contract(seed: int) -> None:
    problem = random_problem(seed, tight_memory=True)
    check_evaluator(SimulatedEvaluator(problem))


def test_contract_with_noise() -> None:
    problem = random_problem(1)
    evaluator = SimulatedEvaluator(problem, Noise(failure_rate=0.3, seed=5))
    check_evaluator(evaluator, deterministic=False)


def test_measures_what_is_simulated() -> None:
    for tiny in tiny_problems():
        evaluator = SimulatedEvaluator(tiny.problem)
        (measurement,) = evaluator.evaluate([Placement.of(tiny.problem, tiny.best_devices)])
        assert measurement.outcome is Outcome.OK
        assert measurement.step_seconds == (tiny.best_seconds,)
        assert len(measurement.peak_bytes) == tiny.problem.num_devices


# --- failures ------------------------------------------------------------------------------------


def overfull(param_bytes: int = 0) -> Measurement:
    ops = [
        Op(name=name, type="Op", outputs=(Tensor(size),), seconds={"dev": 1.0})
        for name, size in (("embedding", 10**9), ("softmax/logits", 3 * 10**9), ("loss", 8))
    ]
    ops.append(Op(name="end", type="Op", seconds={"dev": 1.0}, param_bytes=param_bytes))
    edges = [(op.name, "end") for op in ops[:-1]]
    problem = make_problem(ops, edges, uniform_cluster(1, memory_bytes=35 * 10**8))
    (measurement,) = SimulatedEvaluator(problem).evaluate([Placement.of(problem, [0, 0, 0, 0])])
    return measurement


def test_out_of_memory() -> None:
    measurement = overfull()
    assert measurement.outcome is Outcome.OUT_OF_MEMORY
    assert measurement.step_seconds == ()
    assert measurement.peak_bytes == (4 * 10**9 + 8,)
    assert measurement.reason == (
        "dev:0 needs 4.0 GB, has 3.5 GB; largest live tensors: softmax/logits 3.0 GB, "
        "embedding 1.0 GB"
    )


def test_out_of_memory_counts_variables() -> None:
    measurement = overfull(param_bytes=36 * 10**8)
    assert measurement.reason == (
        "dev:0 needs 7.6 GB, has 3.5 GB; largest live tensors: embedding 1.0 GB; variables: 3.6 GB"
    )


def test_out_of_memory_by_little_shows_the_difference() -> None:
    op = Op(name="a", type="Op", outputs=(Tensor(0), Tensor(12_000_400_000)), seconds={"dev": 1.0})
    problem = make_problem([op], [], uniform_cluster(1, memory_bytes=12_000_000_000))
    (measurement,) = SimulatedEvaluator(problem).evaluate([Placement.of(problem, [0])])
    assert measurement.reason == (
        "dev:0 needs 12.0004 GB, has 12.0000 GB; largest live tensors: a:1 12.0 GB"
    )


def test_missing_kernel() -> None:
    ops = [Op(name="a", type="Lookup", kernels=("cpu",), seconds={"cpu": 1.0})]
    cluster = uniform_cluster(1)
    with pytest.raises(PlacementError, match="can run on no device"):
        make_problem(ops, [], cluster)


def test_placement_of_another_problem() -> None:
    problem, other = random_problem(1), random_problem(2)
    with pytest.raises(PlacementError, match=f"this is {problem.space.fingerprint}"):
        SimulatedEvaluator(problem).evaluate(sample_placements(other, 1))


# --- noise ---------------------------------------------------------------------------------------


def noisy(problem: Problem, noise: Noise, calls: int = 1) -> list[Measurement]:
    evaluator = SimulatedEvaluator(problem, noise)
    placement = Placement.of(problem, [0] * problem.num_groups)
    return [m for _ in range(calls) for m in evaluator.evaluate([placement] * (600 // calls))]


def test_noise_spreads_times_and_fails_some() -> None:
    tiny = tiny_problems()[0]
    measurements = noisy(tiny.problem, Noise(spread=0.2, failure_rate=0.1, seed=3))
    times = np.array([m.step_seconds for m in measurements if m.ok])
    assert np.std(np.log(times / tiny.best_seconds)) == pytest.approx(0.2, rel=0.1)
    assert np.mean(np.log(times / tiny.best_seconds)) == pytest.approx(0, abs=0.03)
    failed = [m for m in measurements if not m.ok]
    assert 30 <= len(failed) <= 90
    assert {m.reason for m in failed} == {"simulated failure of the machine"}


def test_noise_of_the_steps_of_a_trial_averages_out() -> None:
    problem = tiny_problems()[0].problem
    trials = {}
    for steps in (1, 16):
        noise = Noise(spread=0.2, steps=steps, failure_rate=0, seed=3)
        measurements = noisy(problem, noise)
        assert {len(m.step_seconds) for m in measurements} == {steps}
        trials[steps] = np.std([math.log(m.mean_seconds) for m in measurements])
        # What the evaluator says of itself is how far off a trial is, not a step.
        said = SimulatedEvaluator(problem, noise).noise
        assert trials[steps] == pytest.approx(said, rel=0.15)
    assert trials[1] / trials[16] == pytest.approx(4, rel=0.15)


def test_noise_is_repeatable() -> None:
    problem = tiny_problems()[0].problem
    assert noisy(problem, Noise(seed=1)) == noisy(problem, Noise(seed=1))
    assert noisy(problem, Noise(seed=1), calls=6) == noisy(problem, Noise(seed=1))
    assert noisy(problem, Noise(seed=1)) != noisy(problem, Noise(seed=2))


def test_no_noise_at_all() -> None:
    tiny = tiny_problems()[0]
    measurements = noisy(tiny.problem, Noise(spread=0, failure_rate=0))
    assert {m.step_seconds for m in measurements} == {(tiny.best_seconds,) * 4}


def test_impossible_noise() -> None:
    with pytest.raises(PlacementError, match="must not be negative, not -1"):
        Noise(spread=-1)
    with pytest.raises(PlacementError, match="at least one step, not 0"):
        Noise(steps=0)
    with pytest.raises(PlacementError, match="between 0 and 1, not 2"):
        Noise(failure_rate=2)


# --- the contract catches those that break it ----------------------------------------------------


class Broken(SimulatedEvaluator):
    """Answers in the wrong order."""

    def evaluate(self, placements: list[Placement]) -> list[Measurement]:  # type: ignore[override]
        return super().evaluate(placements)[::-1]


class Careless(Evaluator):
    """Takes placements of any problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @property
    def problem(self) -> Problem:
        return self._problem

    def evaluate(self, placements: object) -> list[Measurement]:
        assert isinstance(placements, list)
        return [Measurement(outcome=Outcome.OK, step_seconds=(1.0,)) for _ in placements]


def test_contract_finds_the_wrong_order() -> None:
    with pytest.raises(AssertionError, match="depend on"):
        check_evaluator(Broken(tiny_problems()[1].problem))


def test_contract_finds_strangers_accepted() -> None:
    with pytest.raises(AssertionError, match="must raise PlacementError"):
        check_evaluator(Careless(tiny_problems()[1].problem))
