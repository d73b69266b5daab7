"""The algorithm: sample placements, turn their step times into advantages, follow the gradient.

REINFORCE as published (Mirhoseini et al. 2017), or PPO (Schulman et al. 2017): `LearnerConfig` says
which of the two. What is proposed when, and what is remembered, is the learner's business.

Letters in names: K samples, G groups in the policy's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from placewright.learning.config import ResolvedConfig
from placewright.learning.features import features
from placewright.learning.imitation import Elite, distance
from placewright.learning.smoothing import Smoother
from placewright.learning.updater import Gradients, Updater, gradient_norm, one_thread
from placewright.measurement import Measurement
from placewright.placement import Placement
from placewright.problem import Problem


class Sampled(NamedTuple):
    """Placements that were sampled for one update."""

    actions_KG: Tensor
    """Devices, groups in the policy's order."""
    logp_KG: Tensor
    """Log-probability of each choice."""
    placements: list[Placement]
    """[K] the same, groups in the problem's order."""


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


class PolicyGradient:
    """Improves a policy by what came of its samples."""

    def __init__(
        self, problem: Problem, config: ResolvedConfig, updater: Updater, random: torch.Generator
    ) -> None:
        self.problem = problem
        self.config = config
        self.updater = updater
        self.policy = updater.policy
        self.random = random
        seen = features(problem, self.policy.types)
        self.x = self.policy.inputs(seen)
        self._order = torch.from_numpy(seen.order.astype(np.int64))
        self.failing_reward = -math.sqrt(config.failing_seconds or _failing_seconds(problem))
        self.baseline: float | None = self.failing_reward
        """Moving average of rewards; None: to begin with the first ones."""
        self.updates = 0
        # Of the update under way, for those who watch.
        self.entropy = math.nan
        self.norm = 0.0
        self.skipped = 0

    # --- sample ----------------------------------------------------------------------------------

    def sample(self) -> Sampled:
        """K placements."""
        noisy = self.updates < self.config.logit_noise_updates
        with one_thread():
            actions, logp = self.policy.sample(
                self.x,
                self.config.samples,
                self.random,
                noise=self.config.logit_noise if noisy else 0.0,
            )
        placements = [self._placement(row) for row in actions.cpu()]
        return Sampled(actions.clone(), logp.clone(), placements)

    def greedy(self) -> Placement:
        """The placement the policy holds for the best: the likeliest device at every step."""
        with one_thread():
            actions, _ = self.policy.sample(self.x, 1, self.random, greedy=True)
        return self._placement(actions[0].cpu())

    def _placement(self, actions_G: Tensor) -> Placement:
        devices = np.empty(self.problem.num_groups, dtype=np.int32)
        devices[self._order.numpy()] = actions_G.numpy()
        return Placement.of(self.problem, devices)

    def actions(self, placements: Sequence[Placement]) -> Tensor:
        """[K, G] their devices, groups in the policy's order."""
        rows = np.stack([placement.devices for placement in placements]).astype(np.int64)
        return torch.from_numpy(rows)[:, self._order].to(self.x.work_GD.device)

    # --- advantage -------------------------------------------------------------------------------

    def batch(
        self, sampled: Sampled, answers: Sequence[Measurement], smoother: Smoother | None = None
    ) -> Batch:
        """What was sampled and what came of it, as the update sees it; moves the baseline."""
        ran_K = np.array([answer.ok for answer in answers], dtype=np.bool_)
        rewards_K = np.array([self.reward(answer) for answer in answers])
        if smoother is not None and ran_K.any():
            tried = [p for p, ok in zip(sampled.placements, ran_K, strict=True) if ok]
            rewards_K[ran_K] = -np.sqrt(smoother.estimate(tried))
            # Worse than the slowest by the noise at least, should they all be the same.
            slowest, spread = rewards_K[ran_K].min(), rewards_K[ran_K].std()
            rewards_K[~ran_K] = (1 + self.config.noise) * slowest - spread
        used_K = ran_K if self.updates >= self.config.failures_until else np.ones_like(ran_K)
        advantage_K = np.zeros(len(rewards_K))
        if used_K.any():
            used = rewards_K[used_K]
            mean = float(used.mean())
            if self.baseline is None:
                self.baseline = mean
            if self.config.normalise:
                advantage_K[used_K] = (used - used.mean()) / max(used.std(), 1e-8)
            else:
                advantage_K[used_K] = used - self.baseline
            decay = self.config.baseline_decay
            self.baseline = decay * self.baseline + (1 - decay) * mean
        where = sampled.actions_KG.device
        return Batch(
            sampled.actions_KG,
            sampled.logp_KG,
            torch.from_numpy(advantage_K.astype(np.float32)).to(where),
            torch.from_numpy(used_K).to(where),
        )

    def reward(self, measurement: Measurement) -> float:
        """Minus the square root of the step time: bad early placements take very long."""
        return -math.sqrt(measurement.mean_seconds) if measurement.ok else self.failing_reward

    # --- gradient and update ---------------------------------------------------------------------

    def update(self, batch: Batch, elites: Sequence[Elite]) -> None:
        """Gradient steps on a batch, then of imitation alone where polishing finds better
        placements faster than they can follow."""
        self.skipped, self.entropy = 0, math.nan
        norm = 0.0
        if bool(batch.used_K.any()):
            imitated = elites if self.config.imitation else ()
            for _ in range(self.config.epochs):
                gradients = self.gradients(batch, imitated)
                norm = self.norm
                self.apply(gradients)
            if self.config.polish and self.config.imitation:
                self.imitate(elites, self.config.imitation_steps)
        self.norm = norm
        self.updates += 1

    def imitate(self, elites: Sequence[Elite], steps: int) -> None:
        """Gradient steps on the likelihood of the elites alone."""
        if not elites or not steps:
            return
        best = self.actions([elite.placement for elite in elites])
        with one_thread():
            for _ in range(steps):
                logp_KG, _ = self.policy.score(self.x, best)
                self.apply(self._differentiate(distance(logp_KG)))

    def gradients(self, batch: Batch, elites: Sequence[Elite]) -> Gradients:
        """The gradient of the loss on a batch, clipped; the elites are imitated along with it."""
        with one_thread():
            actions = batch.actions_KG
            samples = actions.shape[0]
            if elites:
                actions = torch.cat([actions, self.actions([elite.placement for elite in elites])])
            logp_KG, entropy_KG = self.policy.score(self.x, actions)
            self.entropy = float(entropy_KG[:samples].detach().mean())
            loss = self._policy_loss(batch, logp_KG[:samples])
            loss = loss - self._entropy_weight() * entropy_KG[:samples][batch.used_K].mean()
            if elites:
                loss = loss + self.config.imitation * distance(logp_KG[samples:])
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
        norm = self.norm = gradient_norm(gradients)
        if not math.isfinite(norm):
            self.skipped += 1
            return {}  # one bad batch must not destroy the policy
        scale = min(1.0, self.config.clip_norm / max(norm, 1e-12))
        return {name: value * scale for name, value in gradients.items()}

    def apply(self, gradients: Gradients) -> None:
        """One step of the optimizer."""
        with one_thread():
            self.updater.apply(gradients)


def _failing_seconds(problem: Problem) -> float:
    """Every op on its slowest device, every tensor and completion to all other devices over the
    slowest way, one after another: no placement that runs takes longer."""
    finite = np.where(np.isfinite(problem.group_seconds), problem.group_seconds, 0.0)
    graph, routes = problem.graph, problem.cluster.routes
    sendings = (graph.num_tensors + graph.num_ops) * float(routes.latency_seconds.max())
    sendings += float(graph.tensor_bytes.sum()) * float(routes.seconds_per_byte.max())
    longest = float(finite.max(axis=0).sum()) + (problem.num_devices - 1) * sendings
    return max(longest * (1 + problem.cluster.contention), 1e-9)
