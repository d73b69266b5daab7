"""The learner: what a policy that learns proposes when, and what it remembers.

One update is: K samples of the policy are asked for; once all are answered, the policy is improved
(`policy_gradient.py`, the algorithm). Around that, each optional and in a file of its own:
imitation of the best placements known (`imitation.py`), a search around them (`polishing.py`),
estimates where times are noisy (`smoothing.py`), checkpoints. `config.py` says where each default
comes from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from placewright.learning import checkpoints
from placewright.learning.checkpoints import LearnerState
from placewright.learning.config import LearnerConfig, resolved
from placewright.learning.imagination import Imagination
from placewright.learning.imitation import Elite, Elites
from placewright.learning.policy import Policy
from placewright.learning.policy_gradient import Batch, PolicyGradient, Sampled
from placewright.learning.polishing import EstimatedPolishing, ExactPolishing, Polishing
from placewright.learning.smoothing import Smoother
from placewright.learning.updater import Updater, one_thread
from placewright.measurement import Measurement, Trial
from placewright.placement import Placement
from placewright.placers.base import Again, Placer
from placewright.placers.local_search import LocalSearch
from placewright.problem import Problem

_MOST_RUNS = 4
"""So often at most a placement is tried, where it is tried again: the error of the mean is halved
by then, and the final compares the best side by side."""

_MOST_RECENT = 2000
"""Proposals that are remembered to tell whether the policy still proposes new ones."""


class Learner(Placer):
    """A policy that learns from trials. Endless, but where there is nothing to choose."""

    endless = True

    def __init__(
        self,
        problem: Problem,
        config: LearnerConfig,
        *,
        name: str,
        seed: int = 0,
        policy: Policy | None = None,
        updater: Updater | None = None,
        teachers: Sequence[Placer] = (),
        polisher: LocalSearch | None = None,
        on_gpu: bool = True,
    ) -> None:
        """`policy` is a trained one to go on from. `updater` shares one policy with other learners.
        `teachers` are asked for placements to begin with, unless the search tells of some.
        `polisher` is the local search that it polishes with, if not one of its own. `on_gpu`: the
        policy computes on a GPU if there is one, which must not be where placements are
        measured."""
        super().__init__(problem)
        self.name = name
        self.config = config = resolved(config)
        self.seed = seed
        # Placing an unseen graph takes a trained policy one trial.
        self._greedy_due = updater is None and policy is not None
        if updater is None:
            updater = Updater.begin([problem], config, seed=seed, policy=policy, on_gpu=on_gpu)
        self.updater = updater
        self.policy = updater.policy
        random = torch.Generator().manual_seed(seed)
        self.algorithm = PolicyGradient(problem, config, updater, random)
        self._teachers = list(teachers) if config.warm_start else []
        self._warm = not config.warm_start
        self._smoother = Smoother(problem, config.noise) if config.noise else None
        self._elites = Elites(problem, config.elites, self._smoother)
        self._polishing: Polishing | None = None
        if config.polish and self._smoother is not None:
            imagination = Imagination(problem, self._smoother, seed)
            self._polishing = EstimatedPolishing(config.polish, imagination)
        elif config.polish:
            polisher = polisher or LocalSearch(problem, seed=seed)
            self._polishing = ExactPolishing(config.polish, polisher)
        self._asked_any = False
        self._novelty = 1.0
        self._recent: dict[int, None] = {}
        # Samples of the update that is due: which of them are still to be asked for, at which
        # places each placement stands, and what came of each.
        self._sampled: Sampled | None = None
        self._waiting: list[Placement] = []
        self._places: dict[Placement, list[int]] = {}
        self._answers: list[Measurement | None] = []
        # Other proposals that are not answered: the teachers', the best guess, polishing.
        self._others: set[Placement] = set()
        # What is to be tried again, and how often that was said of each: one that fails then has
        # no further time, and would be wanted for ever.
        self._again_asked: Counter[Placement] = Counter()
        self._again_open: set[Placement] = set()
        self._snapshot: LearnerState | None = None
        # The best placements under other costs, which are to be tried under these.
        self._again: list[Placement] = []

    def go_on_from(self, previous: Learner) -> None:
        """Takes over from the learner of the same placements under other costs, whose updater this
        one was given: what was learned of the graph holds under these as well, and times do not. So
        all schedules go on, the best placements are proposed again to learn their times, and the
        baseline starts from the first rewards."""
        assert self.updater is previous.updater
        best = previous._elites.best[: previous.config.elites]
        self._again = [Placement.of(self.problem, elite.placement.devices) for elite in best]
        self.algorithm.baseline = None
        self.algorithm.random, self.algorithm.updates = previous.algorithm.random, previous.updates
        self._warm = previous._warm
        self._greedy_due = self.updates > 0  # it is a trained policy by now

    @property
    def updates(self) -> int:
        """How many updates the policy has had from this learner."""
        return self.algorithm.updates

    # --- ask -------------------------------------------------------------------------------------

    def ask(self, count: int) -> list[Placement]:
        """Placements of one kind at a time: a trained policy's best guess, the teachers', the
        policy's samples, then polishing. None while all samples are asked for and some are not
        answered."""
        asked = self.opening(count)
        if asked or not self.problem.has_choice:
            return asked
        if self._sampled is None:
            may_polish = self._polishing is not None and not self._polishing.exhausted
            if self._novelty < self.config.settled and not may_polish:
                self.notes.why_not = "the policy proposes hardly anything new"
                return []
            self.warm_up()
            self._sample()
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        return asked

    def opening(self, count: int) -> list[Placement]:
        """Up to `count` placements that are no samples. Before the first sample that is the best
        guess and the teachers'; none when that is over."""
        if not self.problem.has_choice:
            return self._only_one()
        asked = self._ask_others(count)
        self._others.update(asked)
        return asked

    def _only_one(self) -> list[Placement]:
        """With one device for each group there is one placement, and nothing to learn."""
        if self._asked_any:
            return []
        self._asked_any = True
        self.notes.why_not = "every group has only one device it may go to"
        return [Placement.of(self.problem, self.problem.allowed.argmax(axis=1))]

    def _ask_others(self, count: int) -> list[Placement]:
        if self._greedy_due:
            self._greedy_due = False
            return [self.greedy()]
        if self._again:
            asked, self._again = self._again[:count], self._again[count:]
            return asked
        while self._teachers:
            asked = self._teachers[0].ask(count)
            if asked:
                return asked
            self._teachers.pop(0)
        if self._sampled is None and self._polishing is not None and self._polishing.due:
            return self._polishing.ask(count, self._elites.best)
        return []

    def _sample(self) -> None:
        self._sampled = self.algorithm.sample()
        self._waiting = list(self._sampled.placements)
        self._answers = [None] * len(self._waiting)
        self._places = {}
        new = 0
        for place, placement in enumerate(self._waiting):
            self._places.setdefault(placement, []).append(place)
            digest = placement.digest
            new += digest not in self._recent
            self._recent.pop(digest, None)
            self._recent[digest] = None
        while len(self._recent) > _MOST_RECENT:
            del self._recent[next(iter(self._recent))]
        self._novelty += 0.1 * (new / len(self._waiting) - self._novelty)

    def greedy(self) -> Placement:
        """The placement the policy holds for the best."""
        return self.algorithm.greedy()

    # --- tell ------------------------------------------------------------------------------------

    def tell(self, trials: Sequence[Trial]) -> None:
        """Answers may come in any order, and some at a time; an update needs those of all its
        samples."""
        others = False
        for trial in trials:
            place = self._places.get(trial.placement)
            if place:
                self._answers[place.pop(0)] = trial.measurement
            elif trial.placement in self._others:
                self._others.discard(trial.placement)
            elif trial.placement in self._again_open:
                self._again_open.discard(trial.placement)
            elif trial.placer == self.name and self._repeats:
                # Its own, from the journal of a run without a checkpoint: all of it will be
                # proposed again, and what came of it must not be known before.
                continue
            elif trial.placer != self.name:
                others = others or trial.measurement.ok
            self._keep(trial)
        if others:
            self._teachers = []  # somebody has done that work
        for teacher in self._teachers[:1]:
            teacher.tell(trials)
        if self._polishing is not None:
            self._polishing.tell(trials)
        self.notes.favourites = [elite.placement for elite in self._elites.smoothed()]
        if self._sampled is not None and all(answer is not None for answer in self._answers):
            self._update()

    def _update(self) -> None:
        """All K samples are answered: improve the policy."""
        batch = self.batch()
        self.algorithm.update(batch, self._elites.best)
        self._finish()

    def batch(self) -> Batch:
        """The samples and what came of them; moves the baseline."""
        assert self._sampled is not None
        if self._smoother is not None:
            # Also where no sample ran: what was polished since may have.
            self._elites.best = self._elites.smoothed()
        return self.algorithm.batch(self._sampled, self._measurements, self._smoother)

    @property
    def _measurements(self) -> list[Measurement]:
        return [answer for answer in self._answers if answer is not None]

    def _finish(self) -> None:
        """Ends an update: records what a watcher wants to see, and makes way for the next."""
        algorithm, measurements = self.algorithm, self._measurements
        times = [m.mean_seconds for m in measurements if m.ok]
        best = self._elites.best
        self.notes.metrics.append(
            {
                "update": self.updates,
                "reward_mean": float(np.mean([algorithm.reward(m) for m in measurements])),
                "step_seconds_mean": float(np.mean(times)) if times else math.nan,
                "step_seconds_best": best[0].seconds if best else math.nan,
                "entropy": algorithm.entropy,
                "gradient_norm": algorithm.norm,
                "skipped_steps": algorithm.skipped,
                "baseline": math.nan if algorithm.baseline is None else algorithm.baseline,
                "failure_share": 1 - len(times) / len(measurements),
            }
        )
        self._sampled = None
        self._doubt()
        if self._polishing is not None:
            self._polishing.renew(self.updates)
        self._snapshot = self.state()

    def _doubt(self) -> None:
        """Has those of the best tried again of which it is not sure that they are."""
        if self._smoother is None or not self.config.remeasure:
            return
        with one_thread():
            doubtful = self._smoother.doubtful(self.config.remeasure, _MOST_RUNS)
        wanted = [again for again in doubtful if self._again_asked[again.placement] < _MOST_RUNS]
        self._again_asked.update(again.placement for again in wanted)
        self._again_open = {again.placement for again in wanted}
        self.notes.again = wanted

    # --- imitation -------------------------------------------------------------------------------

    def _keep(self, trial: Trial) -> None:
        if self._polishing is not None:
            self._polishing.keep(trial)
        self._elites.keep(trial, by_time=not self.updates)

    def warm_up(self) -> None:
        """Imitates the best classical placements before the first sample."""
        if self._warm or not self._elites.best:
            return
        self._warm = True
        self.algorithm.imitate(self._elites.best, self.config.warm_start)

    # --- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self, folder: Path) -> bool:
        """Writes the state after the last update; what came since will be proposed again.

        The policy and its optimizer have not changed since, so that only the rest of the state is
        kept at every update."""
        if self._snapshot is None:
            return False
        self.write_checkpoint(folder, [self._snapshot])
        return True

    def write_checkpoint(self, folder: Path, states: Sequence[LearnerState]) -> None:
        """Writes the policy and its optimizer, and the learners that share them."""
        checkpoints.write(self._file(folder), self._origin, self.updater, states)

    def read_checkpoint(self, folder: Path) -> list[LearnerState]:
        """Takes over what the checkpoint holds, if there is one. The states are those of all
        learners that shared the policy; this one goes on from the first."""
        return checkpoints.read(self._file(folder), self._origin, self.updater, self.take_state)

    @property
    def _origin(self) -> checkpoints.Origin:
        return checkpoints.Origin(self.problem, self.config, self.seed)

    def _file(self, folder: Path) -> Path:
        return folder / f"checkpoint-{self.name}.safetensors"

    def state(self) -> LearnerState:
        """What is this learner's alone: all but the policy and its optimizer."""
        described = {
            "updates": self.updates,
            "baseline": self.algorithm.baseline,
            "novelty": self._novelty,
            "elites": [[e.seconds, e.placement.devices.tolist()] for e in self._elites.best],
            "again": [[a.known, a.placement.devices.tolist()] for a in self.notes.again],
        }
        recent = torch.tensor(list(self._recent), dtype=torch.int64)
        tensors = {"random": self.algorithm.random.get_state(), "recent": recent}
        if self._smoother is not None:
            tensors |= self._smoother.state()
        if self._polishing is not None:
            tensors |= self._polishing.state()
        return LearnerState(described, tensors)

    def take_state(self, state: LearnerState) -> None:
        described, tensors = state
        self.algorithm.random.set_state(tensors["random"])
        self._recent = dict.fromkeys(tensors["recent"].tolist())
        self.algorithm.updates = int(described["updates"])
        baseline = described["baseline"]
        self.algorithm.baseline = None if baseline is None else float(baseline)
        self._novelty = float(described["novelty"])
        self._elites.best = [
            Elite(float(seconds), Placement.of(self.problem, devices))
            for seconds, devices in described["elites"]
        ]
        self.notes.again = [
            Again(Placement.of(self.problem, devices), int(known))
            for known, devices in described.get("again", ())
        ]
        self._again_open = {again.placement for again in self.notes.again}
        if self._smoother is not None:
            self._smoother.take_state(tensors)
        if self._polishing is not None:
            self._polishing.take_state(tensors, self.updates)

    def restore(self, folder: Path, told: Sequence[Trial]) -> bool:
        states = self.read_checkpoint(folder)
        if not states:
            return False
        self._teachers, self._greedy_due, self._warm = [], False, True
        # The policy goes on from where it was, and proposes again what came after.
        if self._polishing is not None:
            self._polishing.resume(told)
        known = 0 if self._smoother is None else self._smoother.know_until(told)
        for trial in told[known:]:
            if trial.placer != self.name or not self._repeats:
                self._keep(trial)
        if self._smoother is not None:
            self._smoother.forget()
        self._snapshot = self.state()
        return True

    @property
    def _repeats(self) -> bool:
        """Whether all that a resumed run proposed since its checkpoint is proposed again."""
        return self._polishing is None or self._polishing.repeats
