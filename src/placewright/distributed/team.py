"""All that a search with many processes needs, from the starting of Ray to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from placewright.distributed.config import TeamConfig
from placewright.distributed.session import ray_session
from placewright.errors import SearchError
from placewright.placers.base import Placer
from placewright.problem import Problem

if TYPE_CHECKING:
    from placewright.distributed.training import DistributedLearner
    from placewright.distributed.workers import MakeEvaluator, Workers


class Team:
    """Workers, which any method may use, and controllers for those that learn."""

    def __init__(self, config: TeamConfig, workers: Workers) -> None:
        self.config = config
        self.evaluator = workers
        self._learners: list[DistributedLearner] = []

    def distributed(self, placers: Sequence[Placer]) -> list[Placer]:
        """The same placers, but the learned ones trained by the controllers."""
        if not self.config.controllers:
            return list(placers)
        from placewright.distributed.training import DistributedLearner
        from placewright.learning.learner import Learner

        found: list[Placer] = []
        for placer in placers:
            if isinstance(placer, Learner):
                distributed = DistributedLearner(
                    placer, self.evaluator, controllers=self.config.controllers,
                    max_staleness=self.config.max_staleness,
                )  # fmt: skip
                self._learners.append(distributed)
                found.append(distributed)
            else:
                found.append(placer)
        if not self._learners:
            raise SearchError(
                "controllers are for methods that learn (ppo, reinforce), and none is among "
                f"{', '.join(placer.name for placer in placers)}"
            )
        return found

    def status(self) -> Mapping[str, float]:
        """Numbers to watch: of the training under way, or of the workers alone."""
        for learner in reversed(self._learners):
            status = learner.status()
            if status["trials_per_second"]:
                return status
        return self.evaluator.status()

    def close(self) -> None:
        for learner in self._learners:
            learner.close()
        self.evaluator.close()


@contextlib.contextmanager
def assemble(
    problem: Problem, make_evaluator: MakeEvaluator, config: TeamConfig, *, cheap: bool
) -> Iterator[Team]:
    """The team, for as long as it is needed. `make_evaluator` is called in each worker's process;
    `cheap` is what `Evaluator.cheap` says there."""
    config = replace(config, resources=config.resources_for(problem.cluster, measure=not cheap))
    with ray_session(config):
        from placewright.distributed.workers import Workers

        workers = Workers(problem, make_evaluator, config, cheap=cheap)
        team = Team(config, workers)
        try:
            workers.wait_until_ready()
            yield team
        finally:
            team.close()
