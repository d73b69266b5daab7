"""The learner: samples placements from the policy, and improves the policy by what came of them.

One update is: sample K placements (`ask`); turn their step times into advantages; follow the policy
gradient (`gradients`, `apply`: the two halves of `tell`). Around that, each of them optional:
imitation of the best placements known, a warm start from classical ones, and a local search around
the best (expert iteration). `config.py` says where each default comes from.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from placewright.errors import LearningError
from placewright.graph import IndexArray
from placewright.learning.config import LearnerConfig
from placewright.learning.features import features
from placewright.learning.policy import Policy
from placewright.learning.tensors import read_tensors, write_tensors
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.placers.local_search import LocalSearch
from placewright.problem import Problem

FORMAT = "placewright-checkpoint/1"

_SETTLED = 0.03
"""When less than this share of its samples is new (a moving average), the policy has settled."""

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
            mine = {
                key.rpartition("/")[2]: value.clone()
                for key, value in tensors.items()
                if key.rpartition("/")[0] == name
            }
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


@dataclass(frozen=True)
class _Elite:
    seconds: float
    placement: Placement


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
    ) -> None:
        """`policy` is a trained one to go on from. `updater` shares one policy with other learners.
        `teachers` are asked for placements to begin with, unless the search tells of some."""
        super().__init__(problem)
        self.name = name
        self.config = config
        self._seed = seed
        self._pretrained = policy is not None
        if updater is None:
            if policy is None:
                # Initial weights come from torch's global generator, which is left as it was.
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    policy = Policy.for_problem(config.policy, problem)
            if torch.cuda.is_available():
                policy = policy.cuda()
            updater = Updater(policy, config)
        self.updater = updater
        self.policy = updater.policy
        seen = features(problem, self.policy.types)
        self._x = self.policy.inputs(seen)
        self._order = torch.from_numpy(seen.order.astype(np.int64))
        self._random = torch.Generator().manual_seed(seed)
        self._teachers = list(teachers) if config.warm_start else []
        self._warm = not config.warm_start
        self._elites: list[_Elite] = []
        self._failing_reward = -math.sqrt(config.failing_seconds or _failing_seconds(problem))
        self._baseline = self._failing_reward
        self.updates = 0
        self._trials = 0
        self._proposed: set[int] = set()
        self._novelty = 1.0
        self._greedy_due = self._pretrained
        # What was sampled for the update that is due, in order, and what came of it so far.
        self._sampled: tuple[Tensor, Tensor] | None = None
        self._asked: deque[Placement] = deque()
        self._waiting: list[Placement] = []
        self._answers: list[Measurement] = []
        # Polishing: a local search of its own, and how many placements it may try until the next
        # update.
        self._polisher: LocalSearch | None = None
        self._polish_left = 0
        self._polish_asked: set[Placement] = set()
        # Trials of the journal, from the restoring of a checkpoint to the first polishing.
        self._resumed: Sequence[Trial] = ()
        self._metrics: list[dict[str, float]] = []

    # --- ask -------------------------------------------------------------------------------------

    def ask(self, count: int) -> list[Placement]:
        """Placements of one kind at a time: the teachers', the policy's samples, then polishing."""
        if not (self.problem.allowed.sum(axis=1) > 1).any():
            return self._only_one()
        if self._teachers:
            asked = self._ask_teachers(count)
            if asked:
                return asked
        if self._greedy_due:
            # A trained policy's best guess comes first: placing an unseen graph in one trial.
            self._greedy_due = False
            return [self.greedy()]
        if self._sampled is None and self._polish_left > 0:
            asked = self._ask_polisher(count)
            if asked:
                return asked
            self._polish_left = 0
        if self._sampled is None:
            if self._novelty < _SETTLED and not self._polish_asked:
                self.why_not = "the policy proposes hardly anything it has not proposed before"
                return []
            self._warm_up()
            self._sample()
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        return asked

    def _only_one(self) -> list[Placement]:
        """With one device for each group there is one placement, and nothing to learn."""
        if self._trials:
            return []
        self._trials += 1
        self.why_not = "every group has only one device it may go to"
        return [Placement.of(self.problem, self.problem.allowed.argmax(axis=1))]

    def _ask_teachers(self, count: int) -> list[Placement]:
        while self._teachers:
            asked = self._teachers[0].ask(count)
            if asked:
                return asked
            self._teachers.pop(0)
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
        self._asked = deque(self._waiting)
        before = len(self._proposed)
        self._proposed.update(hash(placement) for placement in self._waiting)
        new = (len(self._proposed) - before) / len(self._waiting)
        self._novelty += 0.1 * (new - self._novelty)

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
        if self._polisher is None:
            self._polisher = LocalSearch(self.problem, seed=self._seed)
            self._polisher.tell(self._resumed)
            self._polisher.tell([_trial(self.name, e.placement, e.seconds) for e in self._elites])
            self._resumed = ()
        asked = self._polisher.ask(min(count, self._polish_left))
        self._polish_asked.update(asked)
        return asked

    # --- tell ------------------------------------------------------------------------------------

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._keep(trial)
            if self._asked and trial.placement == self._asked[0]:
                self._asked.popleft()
                self._answers.append(trial.measurement)
            elif trial.placer != self.name and trial.measurement.ok:
                self._teachers = []  # others have done that work
        for teacher in self._teachers[:1]:
            teacher.tell(trials)
        self._trials += len(trials)
        if self._polisher is not None:
            # It is told of the samples as well: what the policy finds is worth a look around.
            self._polisher.tell(trials)
            self._polish_left -= len([t for t in trials if t.placement in self._polish_asked])
            self._polish_asked.difference_update(t.placement for t in trials)
        if self._sampled is not None and not self._asked:
            self._update()

    def _update(self) -> None:
        """All K samples are answered: improve the policy."""
        batch, measurements = self.batch(), self._answers
        norm = 0.0
        for _ in range(self.config.epochs):
            gradients = self.gradients(batch)
            norm = float(gradient_norm(gradients))
            self.apply(gradients)
        if self.config.polish:
            self._imitate(self.config.imitation_steps)
        self.finish(batch, measurements, norm)

    def batch(self) -> Batch:
        """What was sampled and what came of it, as the update sees it; moves the baseline."""
        assert self._sampled is not None
        actions, logp = self._sampled
        ran = np.array([m.ok for m in self._answers], dtype=np.bool_)
        rewards = np.array([self._reward(m) for m in self._answers])
        used = ran if self.updates >= self.config.failures_until else np.ones_like(ran)
        advantage = np.zeros(len(rewards))
        if used.any():
            if self.config.normalise:
                spread = rewards[used].std()
                advantage[used] = (rewards[used] - rewards[used].mean()) / max(spread, 1e-8)
            else:
                advantage[used] = rewards[used] - self._baseline
            decay = self.config.baseline_decay
            self._baseline = decay * self._baseline + (1 - decay) * float(rewards[used].mean())
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
            loss = self._policy_loss(batch, logp_KG[:samples])
            loss = loss - self._entropy_weight() * entropy_KG[:samples].mean()
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
        norm = gradient_norm(gradients)
        if not torch.isfinite(norm):
            return {}  # one bad batch must not destroy the policy
        scale = min(1.0, self.config.clip_norm / max(float(norm), 1e-12))
        return {name: value * scale for name, value in gradients.items()}

    def apply(self, gradients: Gradients) -> None:
        """One step of the optimizer. Second half of an update."""
        with _one_thread():
            self.updater.apply(gradients)

    def finish(self, batch: Batch, measurements: Sequence[Measurement], norm: float) -> None:
        """Ends an update: records what a watcher wants to see, and makes way for the next."""
        self.updates += 1
        times = [m.mean_seconds for m in measurements if m.ok]
        with _one_thread(), torch.no_grad():
            _, entropy_KG = self.policy.score(self._x, batch.actions_KG[:1])
        self._metrics.append(
            {
                "update": self.updates,
                "reward_mean": float(np.mean([self._reward(m) for m in measurements])),
                "step_seconds_mean": float(np.mean(times)) if times else math.nan,
                "step_seconds_best": self._elites[0].seconds if self._elites else math.nan,
                "entropy": float(entropy_KG.mean()),
                "gradient_norm": norm,
                "baseline": self._baseline,
                "failure_share": 1 - len(times) / len(measurements),
            }
        )
        self._sampled = None
        self._answers = []
        if self.config.polish and self._elites:
            self._polish_left = self.config.polish

    def take_metrics(self) -> list[dict[str, float]]:
        taken, self._metrics = self._metrics, []
        return taken

    # --- imitation -------------------------------------------------------------------------------

    def _keep(self, trial: Trial) -> None:
        """Keeps the best placements seen, whoever proposed them."""
        seconds = trial.measurement.mean_seconds
        most = max(self.config.elites, 1)
        if not trial.measurement.ok or (
            len(self._elites) >= most and seconds >= self._elites[-1].seconds
        ):
            return
        if any(elite.placement == trial.placement for elite in self._elites):
            return
        groups = np.arange(self.problem.num_groups)
        if not self.problem.allowed[groups, trial.placement.devices].all():
            return
        self._elites.append(_Elite(seconds, trial.placement))
        self._elites.sort(key=lambda elite: elite.seconds)
        del self._elites[most:]

    def _warm_up(self) -> None:
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

    @property
    def restorable(self) -> bool:
        """Whether this is a moment between updates, where a checkpoint holds all there is."""
        return self._sampled is None and not self._polish_asked and not self._teachers

    def checkpoint(self, folder: Path) -> bool:
        if not self.restorable or not self.updates:
            return False
        described = {
            "policy": self.policy.description(),
            "problem": self.problem.fingerprint,
            "seed": self._seed,
            "updates": self.updates,
            "steps": self.updater.steps,
            "baseline": self._baseline,
            "warm": self._warm,
            "polish_left": self._polish_left,
            "trials": self._trials,
            "elites": [[e.seconds, e.placement.devices.tolist()] for e in self._elites],
        }
        tensors = {f"policy/{name}": value for name, value in self.policy.state_dict().items()}
        tensors |= {f"adam/{name}": value for name, value in self.updater.state().items()}
        tensors["random"] = self._random.get_state()
        write_tensors(self._file(folder), FORMAT, described, tensors)
        return True

    def restore(self, folder: Path, told: Sequence[Trial]) -> bool:
        path = self._file(folder)
        if not path.exists():
            return False
        described, tensors = read_tensors(path, FORMAT)
        if described.get("problem") != self.problem.fingerprint:
            raise LearningError(
                f"{path}: checkpoint of problem {described.get('problem')}, this one is "
                f"{self.problem.fingerprint}"
            )
        mine = self.policy.description()
        theirs = described.get("policy")
        if _plain(theirs) != _plain(mine):
            raise LearningError(
                f"{path}: checkpoint of a policy of another architecture; resume with the settings "
                "the run began with"
            )
        try:
            self.policy.take(_part(tensors, "policy/"), path)
            self.updater.restore(_part(tensors, "adam/"), int(described["steps"]))
            self._random.set_state(tensors["random"])
            self.updates = int(described["updates"])
            self._baseline = float(described["baseline"])
            self._warm = bool(described["warm"])
            self._polish_left = int(described["polish_left"])
            self._trials = int(described["trials"])
            self._elites = [
                _Elite(float(seconds), Placement.of(self.problem, devices))
                for seconds, devices in described["elites"]
            ]
        except (KeyError, TypeError, ValueError, RuntimeError) as fault:
            raise LearningError(f"{path}: damaged checkpoint: {fault!r}") from None
        self._teachers = []
        self._greedy_due = False
        # The policy goes on from where the checkpoint was; only the local search, which has no
        # checkpoint, learns what was tried since.
        self._resumed = told
        return True

    def _file(self, folder: Path) -> Path:
        return folder / f"checkpoint-{self.name}.safetensors"


def gradient_norm(gradients: Gradients) -> Tensor:
    if not gradients:
        return torch.zeros(())
    squares = [(gradient * gradient).sum().cpu() for gradient in gradients.values()]
    return torch.stack(squares).sum().sqrt()


def _failing_seconds(problem: Problem) -> float:
    finite = np.where(np.isfinite(problem.group_seconds), problem.group_seconds, 0.0)
    return 2.0 * max(float(finite.max(axis=0).sum()), 1e-9)


def _trial(placer: str, placement: Placement, seconds: float) -> Trial:
    measurement = Measurement(outcome=Outcome.OK, step_seconds=(seconds,))
    return Trial(placement=placement, measurement=measurement, placer=placer)


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
