from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import numpy as np
import pytest

from placewright import methods
from placewright.budget import Budget
from placewright.errors import LearningError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.learning.config import PPO, REINFORCE, configured
from placewright.learning.learner import Learner
from placewright.learning.policy import Policy
from placewright.learning.train import Lesson, Training, train
from placewright.placers.random_placement import RandomPlacement
from placewright.problem import Problem, make_problem
from placewright.testing import gpu_boards, layered_graph

SMALL = configured(PPO, ["policy.hidden=32", "samples=16", "polish=0", "warm_start=0"])


def _problem(seed: int, gpus: int = 2) -> Problem:
    return make_problem(layered_graph(120, 6, seed), gpu_boards(gpus), target_groups=20)


def test_a_trained_policy_places_an_unseen_graph_better_than_chance(tmp_path: Path) -> None:
    seen: list[Training] = []
    lessons = [
        Lesson(evaluator=SimulatedEvaluator(problem), teachers=methods.teachers(problem))
        for problem in (_problem(0), _problem(1), _problem(2, gpus=4))
    ]
    policy = train(lessons, SMALL, Budget(trials=6000), observe=seen.append)
    assert seen[-1].trials == 6000
    assert all(trial is not None and trial.measurement.ok for trial in seen[-1].best)
    policy.save(tmp_path / "policy.st")

    unseen = _problem(9)
    evaluator = SimulatedEvaluator(unseen)
    learner = Learner(unseen, SMALL, name="ppo", policy=Policy.load(tmp_path / "policy.st"))
    (guess,) = evaluator.evaluate(learner.ask(1))
    random = evaluator.evaluate(RandomPlacement(unseen, seed=0).ask(100))
    assert guess.mean_seconds < statistics.fmean(m.mean_seconds for m in random)


def test_the_papers_adjacency_cannot_be_shared_by_graphs() -> None:
    graphs = layered_graph(120, 6), layered_graph(90, 6)
    lessons = [
        Lesson(evaluator=SimulatedEvaluator(make_problem(g, gpu_boards(2), target_groups=n)))
        for g, n in zip(graphs, (20, 15), strict=True)
    ]
    with pytest.raises(LearningError, match="adjacency=neighbours"):
        train(lessons, REINFORCE, Budget(trials=10))


def test_training_ends_when_there_is_nothing_to_choose() -> None:
    problem = _problem(0)
    forbidden = np.zeros((problem.num_groups, problem.num_devices), dtype=np.bool_)
    forbidden[:, 1:] = True
    pinned = dataclasses.replace(problem, forbidden=forbidden)
    with pytest.raises(LearningError, match="nothing to choose"):
        train([Lesson(evaluator=SimulatedEvaluator(pinned))], SMALL, Budget(trials=50))
