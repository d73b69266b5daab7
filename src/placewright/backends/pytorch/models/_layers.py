"""What the benchmark models have in common: an LSTM layer, and the softmax of a time step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

STEP_RULES: tuple[tuple[str, str], ...] = (
    (r"^optimizer/", "optimizer"),
    (r"^(grad/)?[^/]+$|^loss/", "losses"),
)
"""What is at the root: the sum over steps, and the start of the update."""


def weight(*shape: int) -> nn.Parameter:
    """Glorot-uniform, as the TensorFlow models begin."""
    tensor = torch.empty(shape)
    if len(shape) > 1:
        nn.init.xavier_uniform_(tensor)
    else:
        nn.init.uniform_(tensor, -0.1, 0.1)
    return nn.Parameter(tensor)


class LstmState(NamedTuple):
    """What an LSTM hands to its next step, and its output upwards."""

    cell: torch.Tensor
    """[batch, units]"""
    output: torch.Tensor
    """[batch, outputs]; outputs = units where there is no projection."""


class Lstm(nn.Module):
    """One LSTM layer; each call is a time step.

    With `projection`, the output is a linear map of the cell's to fewer units (Sak et al., 2014).
    """

    def __init__(self, inputs: int, units: int, projection: int | None = None) -> None:
        super().__init__()
        self._units = units
        self._outputs = projection or units
        self.kernel = weight(inputs + self._outputs, 4 * units)
        self.bias = nn.Parameter(torch.zeros(4 * units))
        self.projection = weight(units, projection) if projection else None

    def forward(self, inputs: Sequence[torch.Tensor], state: LstmState | None) -> LstmState:
        """Inputs are concatenated; no state means that it starts at zero."""
        if state is None:
            first = inputs[0]
            shape = first.shape[0]
            state = LstmState(
                first.new_zeros(shape, self._units), first.new_zeros(shape, self._outputs)
            )
        gates = torch.addmm(self.bias, torch.cat([*inputs, state.output], 1), self.kernel)
        new, keep, candidate, out = gates.chunk(4, 1)
        # +1: a cell remembers by default, without which long sequences hardly train.
        kept = torch.sigmoid(keep + 1.0) * state.cell
        cell = kept + torch.sigmoid(new) * torch.tanh(candidate)
        output = torch.sigmoid(out) * torch.tanh(cell)
        if self.projection is not None:
            output = output @ self.projection
        return LstmState(cell, output)


class Lookup(nn.Module):
    """Rows of an embedding table, with dropout."""

    def __init__(self, words: int, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = weight(words, size)
        self._dropout = dropout

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors = F.embedding(ids, self.table)
        return F.dropout(vectors, self._dropout, self.training) if self._dropout else vectors


class Softmax(nn.Module):
    """The summed loss of a time step."""

    def __init__(self, inputs: int, words: int) -> None:
        super().__init__()
        self.kernel = weight(inputs, words)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = torch.addmm(self.bias, output, self.kernel)
        return F.cross_entropy(logits, labels, reduction="sum")
