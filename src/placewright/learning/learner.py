"""The learner: samples placements from the policy, and improves the policy by what came of them.

One update is: sample K placements (`ask`); turn their step times into advantages; follow the policy
gradient (`gradients`, `apply`: the two halves of `tell`). Around that, each of them optional:
imitation of the best placements known, a warm start from classical ones, and a local search around
the best (expert iteration). `config.py` says where each default comes from.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from placewright.errors import LearningError, PlacementError
from placewright.graph import IndexArray
from placewright.learning.config import LearnerConfig, resolved
from placewright.learning.features import features
from placewright.learning.imagination import Imagination
from placewright.learning.policy import Policy
from placewright.learning.smoothing import Smoother
from placewright.learning.tensors import read_tensors, write_tensors
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.placers.local_search import LocalSearch
from placewright.problem import Problem

FORMAT = "placewright-checkpoint/1"

_MOST_RECENT = 2000
"""Proposals that are remembered to tell whether the policy still proposes new ones."""

Gradients = dict[str, Tensor]
"""By name of the parameter."""


class Updater:
    """Adam on a policy's parameters, with clipping and a learning rate that falls.

    Learners of several problems may share one, and so train one policy.
    """

    def __init__(self, policy: Policy, config: LearnerConfig) -> None:
        self.policy = policy
        self.config = config
        self.steps = 0
        self._adam = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)

    def apply(self, gradients: Gradients) -> None:
        """One step. The gradients may come from elsewhere, and from older parameters."""
        for name, parameter in self.policy.named_parameters():
            parameter.grad = gradients[name].to(parameter.device) if name in gradients else None
        decay = self.config.learning_rate_decay ** (self.steps / self.config.learning_rate_halving)
        for group in self._adam.param_groups:
            group["lr"] = self.config.learning_rate * decay
        self._adam.step()
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in self.policy.named_parameters():
            for key, value in self._adam.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def restore(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        for name, parameter in self.policy.named_parameters():
            mine = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors.get(f"{name}/{key}")
                if value is None:
                    continue
                if key != "step":  # which Adam keeps on the CPU
                    if value.shape != parameter.shape:
                        raise ValueError(f"{name}/{key} has shape {tuple(value.shape)}")
                    value = value.to(parameter.device)
                mine[key] = value.clone()
            if mine:
                self._adam.state[parameter] = mine
        self.steps = steps


class Batch(NamedTuple):
    """Placements that were tried for one update."""

    actions_KG: Tensor
    """Devices, groups in the policy's order."""
    old_logp_KG: Tensor
    """Log-probability of each choice when it was sampled."""
    advantage_K: Tensor
    """How much better than expected; positive is better."""
    used_K: Tensor
    """Whether the sample may update anything."""


class LearnerState(NamedTuple):
    """What a checkpoint holds of one learner, apart from the policy."""

    described: dict[str, Any]
    """As JSON can have it."""
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class _Elite:
    seconds: float
    placement: Placement

    @property
    def trial(self) -> Trial:
        measurement = Measurement(outcome=Outcome.OK, step_seconds=(self.seconds,))
        return Trial(placement=self.placement, measurement=measurement, placer="elite")


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
        previous: Learner | None = None,
    ) -> None:
        """`policy` is a trained one to go on from. `updater` shares one policy with other learners.
        `teachers` are asked for placements to begin with, unless the search tells of some.
        `polisher` is the local search that it polishes with, if not one of its own. `previous` is
        the learner of the same placements under other costs, to go on with: what was learned of the
        graph holds under these as well, and times do not."""
        super().__init__(problem)
        self.name = name
        self.config = config = resolved(config)
        self.seed = seed
        if previous is not None:
            updater = previous.updater
        if updater is None:
            self._greedy_due = policy is not None
            if policy is None:
                # Initial weights come from torch's global generator, which is left as it was.
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    policy = Policy.for_problems(config.policy, [problem])
            if torch.cuda.is_available():
                policy = policy.cuda()
            updater = Updater(policy, config)
        else:
            self._greedy_due = False
        self.updater: Updater = updater
        self.policy = updater.policy
        self._random = torch.Generator().manual_seed(seed)
        self._teachers = list(teachers) if config.warm_start else []
        self._warm = not config.warm_start
        self.updates = 0
        self._norm = 0.0
        self._entropy = math.nan
        self._skipped = 0
        seen = features(problem, self.policy.types)
        self._x = self.policy.inputs(seen)
        self._order = torch.from_numpy(seen.order.astype(np.int64))
        self._failing_reward = -math.sqrt(self.config.failing_seconds or _failing_seconds(problem))
        self._elites: list[_Elite] = []
        self._baseline: float | None = self._failing_reward
        self._smoother: Smoother | None = None
        self._imagination: Imagination | None = None
        if self.config.noise:
            self._smoother = Smoother(problem, self.config.noise)
            if self.config.polish:
                self._imagination = Imagination(problem, self._smoother, self.seed)
        self._asked_any = False
        self._novelty = 1.0
        self._recent: dict[int, None] = {}
        # Samples of the update that is due: which of them are still to be asked for, at which
        # places each placement stands, and what came of each.
        self._sampled: tuple[Tensor, Tensor] | None = None
        self._waiting: list[Placement] = []
        self._places: dict[Placement, list[int]] = {}
        self._answers: list[Measurement | None] = []
        # Other proposals that are not answered: the teachers', the best guess, polishing.
        self._others: set[Placement] = set()
        # Polishing: a local search, or what it came to on estimates where times are noisy, and how
        # many placements may be tried until the next update.
        self._polisher = polisher
        self._polishing = False
        self._imagined: list[Placement] = []
        self._polish_left = 0
        self._polish_asked: set[Placement] = set()
        self._polished_all = False
        # Trials of the journal, from the restoring of a checkpoint to the first polishing of exact
        # times.
        self._resumed: Sequence[Trial] = ()
        self._snapshot: LearnerState | None = None
        # The best placements under other costs, which are to be tried under these.
        self._again: list[Placement] = []
        if previous is not None:
            self._go_on_from(previous)

    def _go_on_from(self, previous: Learner) -> None:
        """The policy and its optimizer go on, and so do all schedules. The best placements are
        proposed again to learn their times; the baseline starts from the first rewards."""
        best = previous._elites[: previous.config.elites]
        self._again = [Placement.of(self.problem, elite.placement.devices) for elite in best]
        self._baseline = None
        self._random, self.updates = previous._random, previous.updates
        self._warm, self._norm = previous._warm, previous._norm
        self._greedy_due = self.updates > 0  # it is a trained policy by now

    # --- ask -------------------------------------------------------------------------------------

    def ask(self, count: int) -> list[Placement]:
        """Placements of one kind at a time: a trained policy's best guess, the teachers', the
        policy's samples, then polishing. None while all samples are asked for and some are not
        answered."""
        asked = self.opening(count)
        if asked or not self.problem.has_choice:
            return asked
        if self._sampled is None:
            may_polish = self.config.polish and not self._polished_all
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
            # Placing an unseen graph in one trial.
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
        if self._sampled is None and (self._polish_left > 0 or self._imagined):
            ask = self._ask_polisher if self._imagination is None else self._ask_imagination
            asked = ask(count)
            if asked:
                return asked
            self._polish_left = 0
            self._polished_all = True
        return []

    def _sample(self) -> None:
        noisy = self.updates < self.config.logit_noise_updates
        with _one_thread():
            actions, logp = self.policy.sample(
                self._x,
                self.config.samples,
                self._random,
                noise=self.config.logit_noise if noisy else 0.0,
            )
        self._sampled = actions.clone(), logp.clone()
        self._waiting = [self._placement(row) for row in actions.cpu()]
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
        """The placement the policy holds for the best: the likeliest device at every step."""
        with _one_thread():
            actions, _ = self.policy.sample(self._x, 1, self._random, greedy=True)
        return self._placement(actions[0].cpu())

    def _placement(self, actions_G: Tensor) -> Placement:
        devices = np.empty(self.problem.num_groups, dtype=np.int32)
        devices[self._order.numpy()] = actions_G.numpy()
        return Placement.of(self.problem, devices)

    def _actions(self, devices: IndexArray) -> Tensor:
        return torch.from_numpy(devices.astype(np.int64))[self._order]

    def _ask_polisher(self, count: int) -> list[Placement]:
        if not self._polishing:
            self._polishing = True
            self._polisher = self._polisher or LocalSearch(self.problem, seed=self.seed)
            self._polisher.tell(self._resumed)
            self._polisher.tell([e.trial for e in self._elites])
            self._resumed = ()
        assert self._polisher is not None
        asked = self._polisher.ask(min(count, self._polish_left))
        self._polish_asked.update(asked)
        return asked

    def _ask_imagination(self, count: int) -> list[Placement]:
        """All at once: what is found on estimates does not wait for answers."""
        assert self._imagination is not None
        if self._polish_left:
            with _one_thread():
                self._imagined = self._imagination.propose(self._polish_left, self.updates)
            self._polish_left = 0
        asked, self._imagined = self._imagined[:count], self._imagined[count:]
        return asked

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
        if self._polisher is not None and self._polishing:
            # It is told of the samples as well: what the policy finds is worth a look around.
            self._polisher.tell(trials)
            answered = {t.placement for t in trials} & self._polish_asked
            self._polish_left -= len(answered)
            self._polish_asked -= answered
        if self._smoother is not None:
            self.notes.favourites = [elite.placement for elite in self._smoothed(self._smoother)]
        if self._sampled is not None and all(answer is not None for answer in self._answers):
            self._update()

    def _update(self) -> None:
        """All K samples are answered: improve the policy."""
        batch = self.batch()
        measurements = [answer for answer in self._answers if answer is not None]
        norm, self._skipped, self._entropy = 0.0, 0, math.nan
        if bool(batch.used_K.any()):
            for _ in range(self.config.epochs):
                gradients = self.gradients(batch)
                norm = self._norm
                self.apply(gradients)
            if self.config.polish and self.config.imitation:
                self._imitate(self.config.imitation_steps)
        self.finish(measurements, norm)

    def batch(self) -> Batch:
        """What was sampled and what came of it, as the update sees it; moves the baseline."""
        assert self._sampled is not None
        actions, logp = self._sampled
        answers = [answer for answer in self._answers if answer is not None]
        ran = np.array([answer.ok for answer in answers], dtype=np.bool_)
        rewards = np.array([self._reward(answer) for answer in answers])
        if self._smoother is not None:
            # Also where no sample ran: what was polished since may have.
            self._elites = self._smoothed(self._smoother)
            if ran.any():
                tried = [self._placement(row) for row in actions[torch.from_numpy(ran)].cpu()]
                rewards[ran] = -np.sqrt(self._smoother.estimate(tried))
                # Worse than the slowest by the noise at least, should they all be the same.
                rewards[~ran] = (1 + self.config.noise) * rewards[ran].min() - rewards[ran].std()
        used = ran if self.updates >= self.config.failures_until else np.ones_like(ran)
        advantage = np.zeros(len(rewards))
        if used.any():
            mean = float(rewards[used].mean())
            if self._baseline is None:
                self._baseline = mean
            if self.config.normalise:
                spread = rewards[used].std()
                advantage[used] = (rewards[used] - rewards[used].mean()) / max(spread, 1e-8)
            else:
                advantage[used] = rewards[used] - self._baseline
            decay = self.config.baseline_decay
            self._baseline = decay * self._baseline + (1 - decay) * mean
        where = actions.device
        return Batch(
            actions,
            logp,
            torch.from_numpy(advantage.astype(np.float32)).to(where),
            torch.from_numpy(used).to(where),
        )

    def _reward(self, measurement: Measurement) -> float:
        """Minus the square root of the step time: bad early placements take very long."""
        return -math.sqrt(measurement.mean_seconds) if measurement.ok else self._failing_reward

    def gradients(self, batch: Batch) -> Gradients:
        """The gradient of the loss on a batch, clipped. First half of an update."""
        with _one_thread():
            actions = batch.actions_KG
            samples = actions.shape[0]
            elites = [e.placement.devices for e in self._elites] if self.config.imitation else []
            if elites:
                best = torch.stack([self._actions(devices) for devices in elites])
                actions = torch.cat([actions, best.to(actions.device)])
            logp_KG, entropy_KG = self.policy.score(self._x, actions)
            self._entropy = float(entropy_KG[:samples].detach().mean())
            loss = self._policy_loss(batch, logp_KG[:samples])
            loss = loss - self._entropy_weight() * entropy_KG[:samples][batch.used_K].mean()
            if elites:
                loss = loss + self.config.imitation * self._distance(logp_KG[samples:])
            return self._differentiate(loss)

    def _policy_loss(self, batch: Batch, logp_KG: Tensor) -> Tensor:
        advantage_K1 = batch.advantage_K[:, None]
        if self.config.clip is None:
            # 1/K sum of (R - B) grad log p(P), log p(P) being the sum over the groups.
            return -(advantage_K1 * logp_KG).sum() / len(logp_KG)
        ratio = torch.exp(logp_KG - batch.old_logp_KG)
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        gain = torch.minimum(ratio * advantage_K1, clipped * advantage_K1)
        return -gain.mean(dim=1)[batch.used_K].sum() / max(int(batch.used_K.sum()), 1)

    def _entropy_weight(self) -> float:
        halvings = self.updates / self.config.entropy_halving
        return self.config.entropy * math.pow(self.config.entropy_decay, halvings)

    def _differentiate(self, loss: Tensor) -> Gradients:
        parameters = dict(self.policy.named_parameters())
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients = {
            name: value for name, value in zip(parameters, found, strict=True) if value is not None
        }
        norm = self._norm = gradient_norm(gradients)
        if not math.isfinite(norm):
            self._skipped += 1
            return {}  # one bad batch must not destroy the policy
        scale = min(1.0, self.config.clip_norm / max(norm, 1e-12))
        return {name: value * scale for name, value in gradients.items()}

    def apply(self, gradients: Gradients) -> None:
        """One step of the optimizer. Second half of an update."""
        with _one_thread():
            self.updater.apply(gradients)

    def finish(self, measurements: Sequence[Measurement], norm: float) -> None:
        """Ends an update: records what a watcher wants to see, and makes way for the next."""
        self.updates += 1
        times = [m.mean_seconds for m in measurements if m.ok]
        self.notes.metrics.append(
            {
                "update": self.updates,
                "reward_mean": float(np.mean([self._reward(m) for m in measurements])),
                "step_seconds_mean": float(np.mean(times)) if times else math.nan,
                "step_seconds_best": self._elites[0].seconds if self._elites else math.nan,
                "entropy": self._entropy,
                "gradient_norm": norm,
                "skipped_steps": self._skipped,
                "baseline": math.nan if self._baseline is None else self._baseline,
                "failure_share": 1 - len(times) / len(measurements),
            }
        )
        self._sampled = None
        if self._imagination is not None:
            self._polished_all = False  # other estimates, other proposals
        self._polish_left = 0 if self._polished_all else self.config.polish
        self._snapshot = self.state()

    # --- imitation -------------------------------------------------------------------------------

    @property
    def _most_elites(self) -> int:
        """One at least, to say what the best is."""
        return max(self.config.elites, 1)

    def _keep(self, trial: Trial) -> None:
        """Keeps the best placements seen, whoever proposed them."""
        if self._imagination is not None:
            self._imagination.tell(trial)
        seconds = trial.measurement.mean_seconds
        good = len(self._elites) < self._most_elites or seconds < self._elites[-1].seconds
        if not trial.measurement.ok or not (good or self._smoother is not None):
            return
        groups = np.arange(self.problem.num_groups)
        if not self.problem.allowed[groups, trial.placement.devices].all():
            return
        if self._smoother is not None:
            self._smoother.add(trial.placement, seconds)
            if self.updates:  # from then on it says which are the best
                return
        if not good or any(elite.placement == trial.placement for elite in self._elites):
            return
        self._elites.append(_Elite(seconds, trial.placement))
        self._elites.sort(key=lambda elite: elite.seconds)
        del self._elites[self._most_elites :]

    def _smoothed(self, smoother: Smoother) -> list[_Elite]:
        with _one_thread():
            return [_Elite(*found) for found in smoother.best(self._most_elites)]

    def warm_up(self) -> None:
        """Imitates the best classical placements before the first sample."""
        if self._warm or not self._elites:
            return
        self._warm = True
        self._imitate(self.config.warm_start)

    def _imitate(self, steps: int) -> None:
        """Gradient steps on the likelihood of the elites alone."""
        if not self._elites or not steps:
            return
        best = torch.stack([self._actions(e.placement.devices) for e in self._elites])
        best = best.to(self._x.work_GD.device)
        with _one_thread():
            for _ in range(steps):
                logp_KG, _ = self.policy.score(self._x, best)
                self.apply(self._differentiate(self._distance(logp_KG)))

    def _distance(self, logp_KG: Tensor) -> Tensor:
        """How far the policy is from the elites, best first: each counts half of the one before.

        Good placements may differ in no more than which of two equal devices is which; their mean
        would be no good placement at all."""
        weights_K = 0.5 ** torch.arange(len(logp_KG), device=logp_KG.device)
        return -(weights_K * logp_KG.mean(dim=1)).sum() / weights_K.sum()

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
        write_tensors(self._file(folder), FORMAT, *self._whole(states))

    def state(self) -> LearnerState:
        """What is this learner's alone: all but the policy and its optimizer."""
        described = {
            "updates": self.updates,
            "baseline": self._baseline,
            "novelty": self._novelty,
            "elites": [[e.seconds, e.placement.devices.tolist()] for e in self._elites],
        }
        recent = torch.tensor(list(self._recent), dtype=torch.int64)
        tensors = {"random": self._random.get_state(), "recent": recent}
        if self._smoother is not None:
            tensors |= self._smoother.state()
        if self._imagination is not None:
            tensors |= self._imagination.state()
        return LearnerState(described, tensors)

    def take_state(self, state: LearnerState) -> None:
        described, tensors = state
        self._random.set_state(tensors["random"])
        self._recent = dict.fromkeys(tensors["recent"].tolist())
        self.updates = int(described["updates"])
        baseline = described["baseline"]
        self._baseline = None if baseline is None else float(baseline)
        self._novelty = float(described["novelty"])
        self._elites = [
            _Elite(float(seconds), Placement.of(self.problem, devices))
            for seconds, devices in described["elites"]
        ]
        if self._smoother is not None:
            self._smoother.take_state(tensors)
        if self._imagination is not None:
            self._imagination.take_state(tensors)
        self._polish_left, self._imagined, self._polished_all = self.config.polish, [], False

    def _whole(self, states: Sequence[LearnerState]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        described = states[0].described | {
            "policy": self.policy.description(),
            "config": asdict(self.config),
            "space": self.problem.space.fingerprint,
            "seed": self.seed,
            "steps": self.updater.steps,
            "others": [state.described for state in states[1:]],
        }
        tensors = {f"policy/{name}": value for name, value in self.policy.state_dict().items()}
        tensors |= {f"adam/{name}": value for name, value in self.updater.state().items()}
        tensors = {name: value.detach().clone() for name, value in tensors.items()}
        tensors |= states[0].tensors
        for number, state in enumerate(states[1:]):
            tensors |= {f"others/{number}/{name}": value for name, value in state.tensors.items()}
        return described, tensors

    def restore(self, folder: Path, told: Sequence[Trial]) -> bool:
        states = self.read_checkpoint(folder)
        if not states:
            return False
        self._teachers, self._greedy_due, self._warm = [], False, True
        # The policy goes on from where it was, and proposes again what came after. The local search
        # on exact times has no checkpoint: it starts anew, and knows all that was tried.
        self._resumed = () if self._repeats else told
        for trial in told[self._known_to_smoother(told) :]:
            if trial.placer != self.name or not self._repeats:
                self._keep(trial)
        if self._smoother is not None:
            self._smoother.forget()
        self._snapshot = self.state()
        return True

    @property
    def _polishes_exactly(self) -> bool:
        """Whether it polishes by trying, and not on estimates."""
        return bool(self.config.polish) and self._imagination is None

    @property
    def _repeats(self) -> bool:
        """Whether all that a resumed run proposed since its checkpoint is proposed again. A local
        search on exact times has no checkpoint, and finds other ways."""
        return not self._polishes_exactly

    def _known_to_smoother(self, told: Sequence[Trial]) -> int:
        """How many of the journal's trials came before the checkpoint. What a smoother made of
        them came with it, and what it has forgotten must not count as new."""
        if self._smoother is None:
            return 0
        # The first of each: the final of real runs measures the best again.
        number_of: dict[Placement, int] = {}
        for number, trial in enumerate(told, 1):
            number_of.setdefault(trial.placement, number)
        return max((n for p, n in number_of.items() if p in self._smoother), default=0)

    def read_checkpoint(self, folder: Path) -> list[LearnerState]:
        """Takes over what the checkpoint holds, if there is one. The states are those of all
        learners that shared the policy; this one goes on from the first."""
        path = self._file(folder)
        if not path.exists():
            return []
        described, tensors = read_tensors(path, FORMAT)
        # Version 0.1.0 knew nothing of spaces.
        own = self.problem.space.fingerprint if "space" in described else self.problem.fingerprint
        made_for = described.get("space", described.get("problem"))
        if made_for != own:
            raise LearningError(f"{path}: checkpoint of problem {made_for}, this one is {own}")
        if described.get("policy") != _plain(self.policy.description()):
            raise LearningError(
                f"{path}: checkpoint of a policy of another architecture; resume with the settings "
                "the run began with"
            )
        now = _plain(asdict(self.config)) | {"seed": self.seed}
        # What an older version did not know was as the default is.
        then = _plain(asdict(resolved(LearnerConfig()))) | dict(described.get("config") or {})
        then["seed"] = described.get("seed")
        for name, value in now.items():
            if name != "policy" and then.get(name) != value:
                raise LearningError(
                    f"{path}: the run began with {name} {then.get(name)}, not {value}; resume with "
                    "the settings it began with"
                )
        try:
            self.policy.take(_part(tensors, "policy/"), path)
            self.updater.restore(_part(tensors, "adam/"), int(described["steps"]))
            states = [LearnerState(described, {n: t for n, t in tensors.items() if "/" not in n})]
            for number, other in enumerate(described.get("others", ())):
                states.append(LearnerState(other, _part(tensors, f"others/{number}/")))
            self.take_state(states[0])
        except (KeyError, TypeError, ValueError, RuntimeError, PlacementError) as fault:
            raise LearningError(f"{path}: damaged checkpoint: {fault!r}") from None
        return states

    def _file(self, folder: Path) -> Path:
        return folder / f"checkpoint-{self.name}.safetensors"


def gradient_norm(gradients: Gradients) -> float:
    squares = sum(float((gradient * gradient).sum()) for gradient in gradients.values())
    return math.sqrt(squares)


def _failing_seconds(problem: Problem) -> float:
    """Every op on its slowest device, every tensor and completion to all other devices over the
    slowest way, one after another: no placement that runs takes longer."""
    finite = np.where(np.isfinite(problem.group_seconds), problem.group_seconds, 0.0)
    graph, routes = problem.graph, problem.cluster.routes
    sendings = (graph.num_tensors + graph.num_ops) * float(routes.latency_seconds.max())
    sendings += float(graph.tensor_bytes.sum()) * float(routes.seconds_per_byte.max())
    longest = float(finite.max(axis=0).sum()) + (problem.num_devices - 1) * sendings
    return max(longest * (1 + problem.cluster.contention), 1e-9)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _plain(description: Any) -> Any:
    """As JSON would have it: tuples are lists."""
    if isinstance(description, dict):
        return {key: _plain(value) for key, value in description.items()}
    if isinstance(description, list | tuple):
        return [_plain(value) for value in description]
    return description


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The policy's matrices are small: a second thread gains nothing on an idle machine and, with
    the cores taken by measurements, costs a multiple."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
