"""Inception-V3 in PyTorch; `backends/models/inception_v3.py` says what it is."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from placewright.backends.models.inception_v3 import (
    AUXILIARY_AFTER,
    BLOCKS,
    STEM,
    Branch,
    Config,
    Conv,
    Fork,
    Pool,
)
from placewright.backends.pytorch.exporting import Inputs, Task
from placewright.backends.pytorch.models._layers import STEP_RULES, weight
from placewright.backends.pytorch.program import TorchModel

GROUP_RULES: tuple[tuple[str, str], ...] = (
    (r"(stem/\w+)/", r"\1"),
    (r"(mixed_\w+/branch_\d+(?:/fork_\d+)?)/", r"\1"),
    (r"(mixed_\w+)/", r"\1/concat"),
    (r"(auxiliary|classifier)/", r"\1"),
    (r"^inputs/", "inputs"),
    *STEP_RULES,
)


class _Shape(NamedTuple):
    """What a layer makes: so many channels on a square grid of so many points."""

    channels: int
    grid: int


class _Layer(nn.Module):
    """A convolution or a pooling."""

    def __init__(self, layer: Conv | Pool, inputs: _Shape, config: Config) -> None:
        super().__init__()
        self._layer = layer
        self._momentum = 1.0 - config.decay
        height, width = (3, 3) if isinstance(layer, Pool) else (layer.height, layer.width)
        channels = inputs.channels
        self._padding = (height // 2, width // 2) if layer.padded else (0, 0)
        if isinstance(layer, Conv):
            channels = max(1, round(layer.channels * config.width))
            self.kernel = weight(channels, inputs.channels, height, width)
            # As published, there is an offset to learn but no scale: the next layer's kernel has
            # one.
            self.offset = nn.Parameter(torch.zeros(channels))
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("variance", torch.ones(channels))
        grid = inputs.grid if layer.padded else (inputs.grid - height) // layer.stride + 1
        self.shape = _Shape(channels, grid)

    def forward(self, net: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        if isinstance(layer, Pool):
            if layer.kind == "max":
                return F.max_pool2d(net, 3, layer.stride, self._padding)
            # Points outside the grid do not count, as in TensorFlow.
            return F.avg_pool2d(net, 3, layer.stride, self._padding, count_include_pad=False)
        net = F.conv2d(net, self.kernel, None, layer.stride, self._padding)
        net = F.batch_norm(
            net, self.mean, self.variance, None, self.offset,  # type: ignore[arg-type]
            training=self.training, momentum=self._momentum, eps=1e-3,
        )  # fmt: skip
        return F.relu(net)


class _Block(nn.Module):
    """Branches side by side; their results are concatenated."""

    def __init__(self, branches: tuple[Branch, ...], inputs: _Shape, config: Config) -> None:
        super().__init__()
        channels = 0
        self._ends: list[list[str]] = []
        for number, branch in enumerate(branches):
            module = nn.Module()
            self.add_module(f"branch_{number}", module)
            shape = inputs
            ends = []
            for i, layer in enumerate(branch):
                if isinstance(layer, Fork):
                    for k, end in enumerate(layer):
                        fork = nn.Module()
                        made = _Layer(end, shape, config)
                        fork.add_module(f"layer_{i}", made)
                        module.add_module(f"fork_{k}", fork)
                        ends.append(f"fork_{k}.layer_{i}")
                        channels += made.shape.channels
                    continue
                made = _Layer(layer, shape, config)
                module.add_module(f"layer_{i}", made)
                shape = made.shape
            if not ends:
                channels += shape.channels
            self._ends.append(ends)
            grid = shape.grid
        self.shape = _Shape(channels, grid)

    def forward(self, net: torch.Tensor) -> torch.Tensor:
        outputs = []
        for number, ends in enumerate(self._ends):
            branch = self.get_submodule(f"branch_{number}")
            out = net
            for name, layer in branch.named_children():
                if name.startswith("layer_"):
                    out = layer(out)
            outputs += [branch.get_submodule(end)(out) for end in ends] or [out]
        return torch.cat(outputs, 1)


class _Classifier(nn.Module):
    """The loss of a linear classifier, summed over the batch."""

    def __init__(self, features: int, config: Config, factor: float, dropout: float) -> None:
        super().__init__()
        self._factor, self._dropout = factor, dropout
        self.kernel = weight(features, config.classes)
        self.bias = nn.Parameter(torch.zeros(config.classes))

    def forward(self, net: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        net = F.dropout(net.mean((2, 3)), self._dropout, self.training)
        logits = torch.addmm(self.bias, net, self.kernel)
        return F.cross_entropy(logits, labels, reduction="sum") * self._factor


class _Auxiliary(nn.Module):
    """The loss of a small classifier in the middle, which helps the lower layers to train."""

    def __init__(self, inputs: _Shape, config: Config) -> None:
        super().__init__()
        grid = (inputs.grid - 5) // 3 + 1
        self.layer_0 = _Layer(Conv(128, 1, 1), _Shape(inputs.channels, grid), config)
        # A kernel as large as what is left of the grid, 5 x 5 at the published size.
        whole = Conv(768, grid, grid, padded=False)
        self.layer_1 = _Layer(whole, self.layer_0.shape, config)
        channels = self.layer_1.shape.channels
        self.head = _Classifier(channels, config, config.auxiliary_weight, 0.0)

    def forward(self, net: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        net = F.avg_pool2d(net, 5, 3)
        loss: torch.Tensor = self.head(self.layer_1(self.layer_0(net)), labels)
        return loss


class InceptionV3(nn.Module):
    """Gives the loss of `images`, float32 [batch, 3, pixels, pixels], and `labels`, int64
    [batch]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._scale = 1.0 / config.batch
        shape = _Shape(3, config.pixels)
        self.stem = nn.Module()
        for name, layer in STEM.items():
            made = _Layer(layer, shape, config)
            self.stem.add_module(name, made)
            shape = made.shape
        for name, branches in BLOCKS.items():
            block = _Block(branches, shape, config)
            self.add_module(name, block)
            shape = block.shape
            if name == AUXILIARY_AFTER:
                self.auxiliary = _Auxiliary(shape, config)
        self.classifier = _Classifier(shape.channels, config, 1.0, config.dropout)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        net = images
        for layer in self.stem.children():
            net = layer(net)
        losses = []
        for name in BLOCKS:
            net = self.get_submodule(name)(net)
            if name == AUXILIARY_AFTER:
                losses.append(self.auxiliary(net, labels))
        losses.append(self.classifier(net, labels))
        return torch.stack(losses).sum() * self._scale


def build(config: Config) -> TorchModel:
    """The training step."""
    images = torch.zeros(config.batch, 3, config.pixels, config.pixels)
    labels = torch.zeros(config.batch, dtype=torch.int64)
    # What the network was published with. It keeps two slots per variable, as Adam does.
    optimizer = functools.partial(
        torch.optim.RMSprop, lr=config.learning_rate, alpha=0.9, momentum=0.9, eps=1.0
    )
    return TorchModel(
        InceptionV3(config),
        Inputs((images, labels)),
        Task(train=True, optimizer=optimizer),
        "inception_v3",
        GROUP_RULES,
    )
