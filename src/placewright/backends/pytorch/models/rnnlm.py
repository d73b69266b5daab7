"""RNNLM in PyTorch; `backends/models/rnnlm.py` says what it is."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import nn

from placewright.backends.models.rnnlm import Config
from placewright.backends.pytorch.exporting import Inputs, Task
from placewright.backends.pytorch.models._layers import STEP_RULES, Lookup, Lstm, LstmState, Softmax
from placewright.backends.pytorch.program import TorchModel

GROUP_RULES: tuple[tuple[str, str], ...] = (
    (r"embedding/step_(\d+)/", r"embedding/step_\1"),
    (r"embedding/table", "embedding/variables"),
    (r"lstm/(\d+)/step_(\d+)/", r"lstm/layer_\1/step_\2"),
    (r"lstm/(\d+)/(kernel|bias|projection)", r"lstm/layer_\1/variables"),
    (r"softmax/step_(\d+)/", r"softmax/step_\1"),
    (r"softmax/(kernel|bias)", "softmax/variables"),
    (r"^inputs/", "inputs"),
    *STEP_RULES,
)


class Rnnlm(nn.Module):
    """Gives the loss of `tokens`, int64 [steps + 1, batch]; time comes first, so that a step's
    words lie together in memory."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.projection
        self._scale = 1.0 / (config.steps * config.batch)
        self.embedding = Lookup(config.vocabulary, width, config.dropout)
        self.lstm = nn.ModuleList([Lstm(width, config.units, width) for _ in range(config.layers)])
        self.softmax = Softmax(width, config.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = tokens.unbind()
        states: list[LstmState | None] = [None] * len(self.lstm)
        losses = []
        for now, following in itertools.pairwise(words):
            output = self.embedding(now)
            for i, layer in enumerate(self.lstm):
                states[i] = state = layer([output], states[i])
                output = state.output
            losses.append(self.softmax(output, following))
        return torch.stack(losses).sum() * self._scale


def build(config: Config) -> TorchModel:
    """The training step."""
    tokens = torch.zeros(config.steps + 1, config.batch, dtype=torch.int64)
    optimizer = functools.partial(torch.optim.Adam, lr=config.learning_rate)
    return TorchModel(
        Rnnlm(config),
        Inputs((tokens,)),
        Task(train=True, optimizer=optimizer),
        "rnnlm",
        GROUP_RULES,
    )
