"""NMT in PyTorch; `backends/models/nmt.py` says what it is."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import nn

from placewright.backends.models.nmt import Config
from placewright.backends.pytorch.exporting import Inputs, Task
from placewright.backends.pytorch.models._layers import (
    STEP_RULES,
    Lookup,
    Lstm,
    LstmState,
    Softmax,
    weight,
)
from placewright.backends.pytorch.program import TorchModel

GROUP_RULES: tuple[tuple[str, str], ...] = (
    (r"(source|target)_embedding/", r"\1_embedding/variables"),
    (r"(encoder|decoder)/(\d+)/step_(\d+)/", r"\1/layer_\2/step_\3"),
    (r"(encoder|decoder)/(\d+)/(kernel|bias)", r"\1/layer_\2/variables"),
    (r"attention/memory/(?!keys)", "attention/memory"),
    (r"attention_steps/(step_\d+)/", r"attention/\1"),
    (r"attention", "attention/variables"),
    (r"softmax/step_(\d+)/", r"softmax/step_\1"),
    (r"softmax/(kernel|bias)", "softmax/variables"),
    (r"^inputs/", "inputs"),
    *STEP_RULES,
)


class Memory(nn.Module):
    """What the decoder attends to: the encoder's outputs, and their keys."""

    def __init__(self, units: int, size: int) -> None:
        super().__init__()
        self.keys = weight(units, size)

    def forward(self, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        memory_bsu = torch.stack(outputs, 1)
        return memory_bsu, memory_bsu @ self.keys


class Attend(nn.Module):
    """Additive attention. Shapes: b batch, s source step, u units, a attention."""

    def __init__(self, units: int, size: int) -> None:
        super().__init__()
        self.query = weight(units, size)
        self.score = weight(size)
        self.output = weight(2 * units, size)

    def forward(
        self, memory_bsu: torch.Tensor, keys_bsa: torch.Tensor, state_bu: torch.Tensor
    ) -> torch.Tensor:
        """What the decoder's output says about the encoder's: [batch, attention]."""
        query_b1a = (state_bu @ self.query).unsqueeze(1)
        energy_bsa = torch.tanh(keys_bsa + query_b1a)
        score_bs = (energy_bsa * self.score).sum(2)
        weight_b1s = torch.softmax(score_bs, 1).unsqueeze(1)
        context_bu = torch.bmm(weight_b1s, memory_bsu).squeeze(1)
        return torch.tanh(torch.cat([context_bu, state_bu], 1) @ self.output)


class Nmt(nn.Module):
    """Gives the loss of `source`, int64 [source_steps, batch], and `target`, int64
    [target_steps + 1, batch], whose first row is the start symbol."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        units, size = config.units, config.attention
        self.source_embedding = Lookup(config.vocabulary, config.embedding)
        self.target_embedding = Lookup(config.vocabulary, config.embedding)
        first = [config.embedding, config.embedding + size]
        self.encoder, self.decoder = (
            nn.ModuleList([Lstm(units if i else inputs, units) for i in range(config.layers)])
            for inputs in first
        )
        self.attention = nn.ModuleDict({"memory": Memory(units, size)})
        self.attention_steps = Attend(units, size)
        self.softmax = Softmax(size, config.vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        states: list[LstmState | None] = [None] * self._config.layers
        outputs = []
        for words in source.unbind():
            output = self.source_embedding(words)
            for i, layer in enumerate(self.encoder):
                states[i] = state = layer([output], states[i])
                output = state.output
            outputs.append(output)
        memory, keys = self.attention["memory"](outputs)
        attended = output.new_zeros(self._config.batch, self._config.attention)
        losses = []
        words_of = target.unbind()
        for now, following in itertools.pairwise(words_of):
            inputs = [self.target_embedding(now), attended]
            for i, layer in enumerate(self.decoder):
                states[i] = state = layer(inputs, states[i])
                inputs = [state.output]
            attended = self.attention_steps(memory, keys, inputs[0])
            losses.append(self.softmax(attended, following))
        scale = 1.0 / (self._config.target_steps * self._config.batch)
        return torch.stack(losses).sum() * scale


def build(config: Config) -> TorchModel:
    """The training step."""
    source = torch.zeros(config.source_steps, config.batch, dtype=torch.int64)
    target = torch.zeros(config.target_steps + 1, config.batch, dtype=torch.int64)
    optimizer = functools.partial(torch.optim.Adam, lr=config.learning_rate)
    return TorchModel(
        Nmt(config),
        Inputs((source, target)),
        Task(train=True, optimizer=optimizer),
        "nmt",
        GROUP_RULES,
    )
