"""Gradients on their way into a policy's parameters."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from placewright.learning.config import LearnerConfig
from placewright.learning.policy import Policy
from placewright.problem import Problem

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

    @staticmethod
    def begin(
        problems: Sequence[Problem],
        config: LearnerConfig,
        *,
        seed: int,
        policy: Policy | None = None,
        on_gpu: bool = True,
    ) -> Updater:
        """Of a policy to go on from, or of a new one for these problems; on a GPU, if there is one
        and it may be used."""
        if policy is None:
            # Initial weights come from torch's global generator, which is left as it was.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                policy = Policy.for_problems(config.policy, problems)
        if on_gpu and torch.cuda.is_available():
            policy = policy.cuda()
        return Updater(policy, config)

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


def gradient_norm(gradients: Gradients) -> float:
    squares = sum(float((gradient * gradient).sum()) for gradient in gradients.values())
    return math.sqrt(squares)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The policy's matrices are small: a second thread gains nothing on an idle machine and, with
    the cores taken by measurements, costs a multiple."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
