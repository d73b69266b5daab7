"""Training one policy on several graphs and clusters, to start from on others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from placewright.budget import BATCH, Budget
from placewright.errors import LearningError
from placewright.evaluators.base import Evaluator
from placewright.learning.config import LearnerConfig
from placewright.learning.learner import Learner
from placewright.learning.policy import Policy
from placewright.learning.updater import Updater
from placewright.measurement import Trial, better
from placewright.placers.base import Placer


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One problem to learn from."""

    evaluator: Evaluator
    teachers: Sequence[Placer] = ()
    """Placers whose proposals are imitated first."""


@dataclass(kw_only=True)
class Training:
    """Where a training stands; given to the observer after every round."""

    updates: list[int]
    """Of each lesson."""
    trials: int = 0
    seconds: float = 0.0
    best: list[Trial | None]
    """Of each lesson."""
    metrics: list[dict[str, float]]
    """The last update of each lesson."""


def train(
    lessons: Sequence[Lesson],
    config: LearnerConfig,
    budget: Budget,
    *,
    seed: int = 0,
    policy: Policy | None = None,
    observe: Callable[[Training], None] = lambda training: None,
    stop: Callable[[], bool] = lambda: False,
) -> Policy:
    """One policy that has learned from all lessons, an update of each in turn.

    Advantages, elites and baselines are each lesson's own, so that a graph with long steps counts
    no more than one with short ones. `policy` is one to go on training.
    """
    problems = [lesson.evaluator.problem for lesson in lessons]
    updater = Updater.begin(problems, config, seed=seed, policy=policy)
    learners = [
        Learner(
            lesson.evaluator.problem, config, name=f"lesson {number}", seed=seed + number,
            updater=updater, teachers=lesson.teachers,
        )
        for number, lesson in enumerate(lessons)
    ]  # fmt: skip
    training = Training(
        best=[None] * len(lessons), metrics=[{} for _ in lessons], updates=[0] * len(lessons)
    )
    started = time.monotonic()

    def finished() -> bool:
        training.seconds = time.monotonic() - started
        out_of_time = budget.seconds is not None and training.seconds >= budget.seconds
        return stop() or out_of_time or trials_left() <= 0

    def trials_left() -> float:
        return math.inf if budget.trials is None else budget.trials - training.trials

    going = True
    while going and not finished():
        going = False
        for number, (lesson, learner) in enumerate(zip(lessons, learners, strict=True)):
            going |= _one_update(lesson, learner, number, training, finished, trials_left)
        training.updates = [learner.updates for learner in learners]
        observe(training)
    if not any(learner.updates for learner in learners):
        raise LearningError(
            f"no update in {training.trials} trials: the budget is too small, or there is nothing "
            "to choose"
        )
    return updater.policy


def _one_update(
    lesson: Lesson,
    learner: Learner,
    number: int,
    training: Training,
    finished: Callable[[], bool],
    trials_left: Callable[[], float],
) -> bool:
    """Whether there was anything left to try."""
    before = learner.updates
    while learner.updates == before and not finished():
        asked = learner.ask(int(min(BATCH, trials_left())))
        if not asked:
            return False
        measurements = lesson.evaluator.evaluate(asked)
        trials = [
            Trial(placement=placement, measurement=measurement, placer=learner.name)
            for placement, measurement in zip(asked, measurements, strict=True)
        ]
        learner.tell(trials)
        training.trials += len(trials)
        for trial in trials:
            training.best[number] = better(training.best[number], trial)
    if learner.notes.metrics:
        training.metrics[number] = learner.notes.metrics[-1]
        learner.notes.metrics.clear()
    return True
