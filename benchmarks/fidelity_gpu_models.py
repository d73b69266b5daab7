"""The models of `benchmarks.fidelity_gpu`: the paper's three, and three written here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from placewright.backends.pytorch import models
from placewright.backends.pytorch.exporting import Inputs, Task
from placewright.backends.pytorch.program import TorchModel, TorchProgram, read_program


class Case(NamedTuple):
    """A model by its name."""

    what: str
    """For tables: what a step is."""
    make: Callable[[bool], TorchModel]
    """Whether it is to be tiny, for tests on a CPU -> the model."""


class _Block(nn.Module):
    """GoogLeNet's: four branches side by side."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = _conv(inputs, 2 * width, 1)
        self.three = nn.Sequential(_conv(inputs, 2 * width, 1), _conv(2 * width, 4 * width, 3))
        self.five = nn.Sequential(_conv(inputs, width // 2, 1), _conv(width // 2, width, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class GoogLeNet(nn.Module):
    """Nine blocks in three sizes."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 2 * width, 7, 2), nn.MaxPool2d(3, 2, 1)]
        channels = 2 * width
        for size in range(3):
            for _ in range(blocks):
                layers.append(_Block(channels, width * (1 + size)))
                channels = 8 * width * (1 + size)
            layers.append(nn.MaxPool2d(3, 2, 1) if size < 2 else nn.AdaptiveAvgPool2d(1))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(x).flatten(1))
        return logits


class Layer(nn.Module):
    """Of a transformer, with the products of each head by themselves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.before(x)
        q, k, v = (
            part(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.transpose(2, 3) / (width / self.heads) ** 0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        grown: torch.Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return grown


class Transformer(nn.Module):
    """A language model."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(Layer(width, 8) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(ids)))
        return logits.flatten(0, 1)


class Towers(nn.Module):
    """A recommender: a tower for each field, and the products of what they make. The words of a
    field are looked up and averaged by two ops: what one op that does both (`EmbeddingBag`) keeps
    for its gradient differs in shape from device to device."""

    def __init__(self, towers: int, words: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(words, width) for _ in range(towers)])
        self.towers = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU()
                )
                for _ in range(towers)
            ]
        )
        self.head = nn.Sequential(nn.Linear(towers * towers, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = [
            tower(table(ids[:, number]).mean(1))
            for number, (table, tower) in enumerate(zip(self.tables, self.towers, strict=True))
        ]
        together = torch.stack(made, 1)
        scores: torch.Tensor = self.head((together @ together.transpose(1, 2)).flatten(1))
        return scores.squeeze(1)


def _training(module: nn.Module, inputs: Any, loss: Any, targets: Any, name: str) -> TorchModel:
    task = Task(train=True, loss_fn=loss, targets=(targets,), optimizer=torch.optim.Adam)
    return TorchModel(module, Inputs((inputs,), {}), task, name)


def _googlenet(tiny: bool) -> TorchModel:
    batch, pixels = (2, 32) if tiny else (8, 160)
    module = GoogLeNet(8, 1) if tiny else GoogLeNet(32, 3)
    return _training(
        module, torch.randn(batch, 3, pixels, pixels), functional.cross_entropy,
        torch.zeros(batch, dtype=torch.long), "googlenet",
    )  # fmt: skip


def _transformer(tiny: bool) -> TorchModel:
    batch, length = (2, 16) if tiny else (16, 128)
    module = Transformer(100, 64, 2) if tiny else Transformer(8000, 512, 4)
    return _training(
        module, torch.zeros(batch, length, dtype=torch.long), functional.cross_entropy,
        torch.zeros(batch * length, dtype=torch.long), "transformer",
    )  # fmt: skip


def _towers(tiny: bool) -> TorchModel:
    batch, count, words, width = (16, 4, 100, 64) if tiny else (512, 12, 20_000, 256)
    return _training(
        Towers(count, words, width), torch.zeros(batch, count, 4, dtype=torch.long),
        functional.binary_cross_entropy_with_logits, torch.zeros(batch), "towers",
    )  # fmt: skip


def _papers(name: str) -> Callable[[bool], TorchModel]:
    def make(tiny: bool) -> TorchModel:
        return models.build(name, scale="small", batch=2 if tiny else None)

    return make


CASES = {
    "inception_v3": Case("training, batch 8, 139 x 139, half as wide", _papers("inception_v3")),
    "rnnlm": Case("training, batch 32, 20 steps", _papers("rnnlm")),
    "towers": Case("training, 12 towers, batch 512", _towers),
    "googlenet": Case("training, batch 8, 160 x 160", _googlenet),
    "transformer": Case("training, 4 layers of 512, 16 x 128 tokens", _transformer),
    "nmt": Case("training, batch 32, 12 + 12 steps", _papers("nmt")),
}
"""Most important first."""


def program(name: str, *, tiny: bool = False) -> TorchProgram:
    return read_program(CASES[name].make(tiny))
