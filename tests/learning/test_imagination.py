from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from placewright.budget import Budget
from placewright.evaluators.simulated import Noise, SimulatedEvaluator
from placewright.graph import Op, Tensor
from placewright.learning.config import PPO, configured
from placewright.learning.imagination import Imagination
from placewright.learning.learner import Learner
from placewright.learning.smoothing import Smoother
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.random_placement import RandomPlacement
from placewright.problem import Problem, make_problem
from placewright.session.search import search
from placewright.testing import gpu_boards, layered_graph, sample_placements, uniform_cluster
from placewright.testing import make_problem as tiny_problem


def _problem() -> Problem:
    return make_problem(layered_graph(120, 6), gpu_boards(4), target_groups=30)


def _told(
    problem: Problem, placements: Sequence[Placement], measurements: Sequence[Measurement]
) -> tuple[Smoother, Imagination]:
    smoother = Smoother(problem, 0.1)
    imagination = Imagination(problem, smoother, seed=3)
    for placement, measurement in zip(placements, measurements, strict=True):
        if measurement.ok:
            smoother.add(placement, measurement.mean_seconds)
        imagination.tell(Trial(placement=placement, measurement=measurement, placer="test"))
    return smoother, imagination


def test_proposals_are_new_allowed_and_the_same_again() -> None:
    problem = _problem()
    placements = RandomPlacement(problem, seed=0).ask(100)
    measurements = SimulatedEvaluator(problem, Noise()).evaluate(placements)
    _, imagination = _told(problem, placements, measurements)
    proposed = imagination.propose(20, 1)
    assert len(set(proposed)) == 20
    assert not set(proposed) & set(placements)
    groups = np.arange(problem.num_groups)
    assert all(problem.allowed[groups, p.devices].all() for p in proposed)
    assert imagination.propose(20, 1) == proposed
    assert imagination.propose(20, 2) != proposed
    _, other = _told(problem, placements, measurements)
    assert other.propose(20, 1) == proposed


def test_proposals_are_better_than_what_was_tried() -> None:
    """From random trials with noise of 10%: by the true times, against the best of these."""
    problem = _problem()
    placements = RandomPlacement(problem, seed=0).ask(200)
    noisy = SimulatedEvaluator(problem, Noise(steps=1)).evaluate(placements)
    smoother, imagination = _told(problem, placements, noisy)
    exact = SimulatedEvaluator(problem)

    def mean(some: Sequence[Placement]) -> float:
        return float(np.mean([m.mean_seconds for m in exact.evaluate(some)]))

    assert mean(imagination.propose(16, 0)) < mean([p for _, p in smoother.best(16)])


def test_polishing_on_estimates_finds_better_than_the_policy_alone() -> None:
    problem = _problem()
    exact = SimulatedEvaluator(problem)
    config = configured(PPO, ["policy.hidden=16", "samples=8", "warm_start=0", "noise=0.1"])

    def found(polish: int) -> float:
        learner = Learner(problem, replace(config, polish=polish), name="ppo", seed=0)
        noisy = SimulatedEvaluator(problem, Noise(steps=1))
        search([learner], noisy, Budget(trials=96))
        return float(np.mean([m.mean_seconds for m in exact.evaluate(learner.notes.favourites)]))

    assert found(8) < found(0)


def test_what_failed_is_not_proposed_again() -> None:
    problem = _problem()
    placements = RandomPlacement(problem, seed=0).ask(50)
    evaluator = SimulatedEvaluator(problem)
    _, imagination = _told(problem, placements, evaluator.evaluate(placements))
    proposed = imagination.propose(10, 0)
    failure = Measurement(outcome=Outcome.FAILED, reason="test")
    for placement in proposed:
        imagination.tell(Trial(placement=placement, measurement=failure, placer="test"))
    assert not set(imagination.propose(10, 0)) & set(proposed)


def test_without_a_trial_that_ran_there_is_nothing_to_propose() -> None:
    problem = _problem()
    placements = RandomPlacement(problem, seed=0).ask(3)
    failure = Measurement(outcome=Outcome.FAILED, reason="test")
    assert _told(problem, placements, [failure] * 3)[1].propose(5, 0) == []


def _crowded() -> Problem:
    """Eight ops forward and eight back, each of which needs the output of its counterpart: quickest
    all on one device, where they do not fit. It is the outputs that need memory, not variables."""
    count = 8
    names = [*(f"forward{i}" for i in range(count)), *(f"back{i}" for i in reversed(range(count)))]
    ops = [Op(name=n, type="Op", outputs=(Tensor(10),), seconds={"dev": 1.0}) for n in names]
    edges = [*itertools.pairwise(names), *((f"forward{i}", f"back{i}") for i in range(count - 1))]
    return tiny_problem(ops, edges, uniform_cluster(2, memory_bytes=75, latency_seconds=1.0))


@pytest.mark.parametrize("failures_have_peaks", [True, False])
def test_proposals_fit_into_memory(failures_have_peaks: bool) -> None:
    """Of a real run that ran out of memory nobody knows how much it needed."""
    problem = _crowded()
    placements = sample_placements(problem, 60)
    exact = SimulatedEvaluator(problem)
    measurements = exact.evaluate(placements)
    assert any(m.outcome is Outcome.OUT_OF_MEMORY for m in measurements)
    if not failures_have_peaks:
        measurements = [m if m.ok else replace(m, peak_bytes=()) for m in measurements]
    _, imagination = _told(problem, placements, measurements)
    # The same without anything known of memory.
    blind = [replace(m, peak_bytes=()) for m in measurements if m.ok]
    ran = [p for p, m in zip(placements, measurements, strict=True) if m.ok]
    _, ignorant = _told(problem, ran, blind)

    def failing(proposed: Sequence[Placement]) -> int:
        return sum(not m.ok for m in exact.evaluate(proposed))

    proposed = [p for number in range(3) for p in imagination.propose(16, number)]
    assert len(proposed) == 48
    others = [p for number in range(3) for p in ignorant.propose(16, number)]
    assert failing(proposed) < 0.8 * failing(others)


def test_a_checkpoint_holds_all_it_knows() -> None:
    problem = _crowded()
    placements = sample_placements(problem, 60)
    smoother, imagination = _told(
        problem, placements, SimulatedEvaluator(problem).evaluate(placements)
    )
    # Peaks of another number of devices are not taken for true, those told twice are told once.
    for measurement in (
        Measurement(outcome=Outcome.OUT_OF_MEMORY, reason="test"),
        Measurement(outcome=Outcome.OK, step_seconds=(1.0,), peak_bytes=(1,)),
    ):
        for placement in (placements[0], *RandomPlacement(problem, seed=9).ask(1)):
            imagination.tell(Trial(placement=placement, measurement=measurement, placer="test"))
    assert len(imagination.state()["peaks"]) == 61
    again = Imagination(problem, smoother, seed=3)
    again.take_state(imagination.state())
    assert again.propose(10, 4) == imagination.propose(10, 4)
