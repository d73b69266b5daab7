"""Models for `benchmarks.one_gpu`: networks with branches, and some without, with random weights.

Those of torchvision come from there, where it is installed; the others are written here, after the
structure of the networks that they are named for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Example(NamedTuple):
    """A model and the makers of its inputs."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    """By batch size; on the CPU, in float32 where they are no indices."""


def _vision(name: str, size: int, **settings: Any) -> Example:
    def make() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(weights=None, **settings)
        return model

    return Example(make, lambda batch: (torch.randn(batch, 3, size, size),))


# --- NASNet-A ------------------------------------------------------------------------------------


class _Separable(nn.Sequential):
    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        def half(a: int, b: int, stride: int) -> list[nn.Module]:
            return [
                nn.ReLU(),
                nn.Conv2d(a, a, kernel, stride, kernel // 2, groups=a, bias=False),
                nn.Conv2d(a, b, 1, bias=False),
                nn.BatchNorm2d(b),
            ]

        super().__init__(*half(channels, out, stride), *half(out, out, 1))


def _squeeze(channels: int, out: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
    )


class _NormalCell(nn.Module):
    def __init__(self, before: int, now: int, out: int, shrinks: bool) -> None:
        super().__init__()
        self.left, self.right = _squeeze(before, out, 2 if shrinks else 1), _squeeze(now, out)
        self.sep = nn.ModuleList(_Separable(out, out, k) for k in (3, 3, 5, 5, 3))

    def forward(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        p, h = self.left(before), self.right(now)
        mean_p = F.avg_pool2d(p, 3, 1, 1)
        made = [
            self.sep[0](h) + h,
            self.sep[1](p) + self.sep[2](h),
            F.avg_pool2d(h, 3, 1, 1) + p,
            mean_p + mean_p,
            self.sep[3](p) + self.sep[4](p),
        ]
        return torch.cat([p, *made], 1)


class _ReductionCell(nn.Module):
    def __init__(self, before: int, now: int, out: int, shrinks: bool) -> None:
        super().__init__()
        self.left, self.right = _squeeze(before, out, 2 if shrinks else 1), _squeeze(now, out)
        self.sep = nn.ModuleList(_Separable(out, out, k, 2) for k in (7, 5, 7, 5))
        self.last = _Separable(out, out, 3)

    def forward(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        p, h = self.left(before), self.right(now)
        y1 = self.sep[0](p) + self.sep[1](h)
        largest = F.max_pool2d(h, 3, 2, 1)
        y2 = largest + self.sep[2](p)
        y3 = F.avg_pool2d(h, 3, 2, 1) + self.sep[3](p)
        y4 = largest + self.last(y1)
        return torch.cat([y2, y3, y4, F.avg_pool2d(y1, 3, 1, 1) + y2], 1)


class NASNet(nn.Module):
    """Cells of NASNet-A (mobile): 12 normal ones in three parts."""

    def __init__(self, width: int = 44, repeats: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32))
        cells: list[nn.Module] = []
        before, now, shrinks = 32, 32, False
        for part, out in enumerate((width // 2, width, 2 * width, 4 * width)):
            if part != 1:
                cells.append(_ReductionCell(before, now, out, shrinks))
                before, now, shrinks = now, 4 * out, True
            for _ in range(repeats if part else 0):
                cells.append(_NormalCell(before, now, out, shrinks))
                before, now, shrinks = now, 6 * out, False
        self.cells = nn.ModuleList(cells)
        self.head = nn.Linear(now, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = now = self.stem(x)
        for cell in self.cells:
            before, now = now, cell(before, now)
        logits: torch.Tensor = self.head(F.relu(now).mean((2, 3)))
        return logits


# --- RandWire ------------------------------------------------------------------------------------


class _Wired(nn.Module):
    """A random graph (Watts-Strogatz) of separable convolutions."""

    def __init__(self, channels: int, out: int, nodes: int, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        edges = set()
        for i in range(nodes):
            for step in (1, 2):
                j = (i + step) % nodes
                while draw.random() < 0.75 or j == i:
                    j = draw.randrange(nodes)
                    if j != i:
                        break
                edges.add((min(i, j), max(i, j)))
        self.before = [[a for a, b in sorted(edges) if b == i] for i in range(nodes)]
        used = {a for a, _ in edges}
        self.ends = [i for i in range(nodes) if i not in used]
        self.weights = nn.ParameterList(torch.randn(max(1, len(b))) for b in self.before)
        self.nodes = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                nn.Conv2d(channels if not b else out, out, 3, 1 if b else 2, 1,
                          groups=channels if not b and channels == out else (out if b else 1),
                          bias=False),
                nn.Conv2d(out, out, 1, bias=False),
                nn.BatchNorm2d(out),
            )
            for b in self.before
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        for sources, weights, node in zip(self.before, self.weights, self.nodes, strict=True):
            total = x
            if sources:
                shares = torch.sigmoid(weights)
                total = made[sources[0]] * shares[0]
                for k, source in enumerate(sources[1:], 1):
                    total = total + made[source] * shares[k]
            made.append(node(total))
        total = made[self.ends[0]]
        for end in self.ends[1:]:
            total = total + made[end]
        return total / len(self.ends)


class RandWire(nn.Module):
    """Three random graphs of 20 nodes, as in RandWire-WS (small)."""

    def __init__(self, channels: int = 64, nodes: int = 20) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.parts = nn.Sequential(
            *(_Wired(channels << i, channels << (i + 1), nodes, i) for i in range(3))
        )
        self.head = nn.Linear(channels << 3, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(F.relu(self.parts(self.stem(x))).mean((2, 3)))
        return logits


# --- towers --------------------------------------------------------------------------------------


class Recommender(nn.Module):
    """Eight towers of embeddings and layers, then a product of all pairs and a last network."""

    def __init__(self, towers: int = 8, tables: int = 4, rows: int = 50_000) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 64) for _ in range(towers * tables))
        self.each = tables
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(64 * tables, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
                nn.Linear(512, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 128),
            )
            for _ in range(towers)
        )  # fmt: skip
        self.dense = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128)
        )
        count = towers + 1
        self.top = nn.Sequential(
            nn.Linear(128 + count * count, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
            nn.Linear(512, 1),
        )  # fmt: skip

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        made = [self.dense(dense)]
        for t, tower in enumerate(self.towers):
            numbers = range(t * self.each, (t + 1) * self.each)
            made.append(tower(torch.cat([self.tables[i](ids[:, i]) for i in numbers], 1)))
        every = torch.stack(made, 1)
        pairs = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        score: torch.Tensor = self.top(torch.cat([made[0], pairs], 1))
        return score


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.wide(self.second(x))
        made: torch.Tensor = x + self.narrow(y * torch.sigmoid(1.702 * y))
        return made


class TwoTowers(nn.Module):
    """CLIP's ViT-B/32 and its text transformer, side by side."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 32, 32, bias=False)
        self.mark = nn.Parameter(torch.randn(1, 1, 768) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 50, 768) * 0.02)
        self.before = nn.LayerNorm(768)
        self.image = nn.Sequential(*(_Block(768, 12, False) for _ in range(layers)))
        self.words = nn.Embedding(49_408, 512)
        self.order = nn.Parameter(torch.randn(1, 77, 512) * 0.02)
        self.text = nn.Sequential(*(_Block(512, 8, True) for _ in range(layers)))
        self.norms = nn.ModuleList([nn.LayerNorm(768), nn.LayerNorm(512)])
        self.heads = nn.ModuleList([nn.Linear(768, 512, False), nn.Linear(512, 512, False)])

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.mark.expand(x.shape[0], -1, -1), x], 1) + self.places
        x = self.heads[0](self.norms[0](self.image(self.before(x))[:, 0]))
        y = self.heads[1](self.norms[1](self.text(self.words(ids) + self.order)[:, -1]))
        x = x / x.norm(dim=-1, keepdim=True)
        y = y / y.norm(dim=-1, keepdim=True)
        near: torch.Tensor = x @ y.t()
        return near


class DetectionHead(nn.Module):
    """RetinaNet's head: classes and boxes of five levels of a pyramid."""

    def __init__(self, channels: int = 256, anchors: int = 9, classes: int = 91) -> None:
        super().__init__()

        def tower(out: int) -> nn.Module:
            layers: list[nn.Module] = []
            for _ in range(4):
                layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv2d(channels, out, 3, padding=1))

        self.classes, self.boxes = tower(anchors * classes), tower(anchors * 4)
        self.sizes = (classes, 4)

    def forward(self, *levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made: list[list[torch.Tensor]] = [[], []]
        for level in levels:
            for number, tower in enumerate((self.classes, self.boxes)):
                y = tower(level).permute(0, 2, 3, 1)
                made[number].append(y.reshape(y.shape[0], -1, self.sizes[number]))
        return torch.cat(made[0], 1).sigmoid(), torch.cat(made[1], 1)


MODELS: dict[str, Example] = {
    "inception_v3": _vision("inception_v3", 299, aux_logits=True, init_weights=False),
    "googlenet": _vision("googlenet", 224, aux_logits=False, init_weights=False),
    "squeezenet": _vision("squeezenet1_1", 224),
    "nasnet": Example(NASNet, lambda batch: (torch.randn(batch, 3, 224, 224),)),
    "randwire": Example(RandWire, lambda batch: (torch.randn(batch, 3, 224, 224),)),
    "recommender": Example(
        Recommender,
        lambda batch: (torch.randn(batch, 13), torch.randint(0, 50_000, (batch, 32))),
    ),
    "two_towers": Example(
        TwoTowers,
        lambda batch: (torch.randn(batch, 3, 224, 224), torch.randint(0, 49_408, (batch, 77))),
    ),
    "detection_head": Example(
        DetectionHead,
        lambda batch: tuple(torch.randn(batch, 256, s, s) for s in (64, 32, 16, 8, 4)),
    ),
    "densenet121": _vision("densenet121", 224),
    "resnet50": _vision("resnet50", 224),
}

BRANCHING = (
    "inception_v3", "googlenet", "squeezenet", "nasnet", "randwire", "recommender", "two_towers",
    "detection_head",
)  # fmt: skip
"""Those with work that can run side by side."""


def trained(name: str) -> nn.Module:
    """A model whose outputs depend on its inputs as those of a trained one do: weights that keep
    the size of activations, and batch norms that have seen some."""
    example = MODELS[name]
    model = example.model()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    if norms:
        for norm in norms:
            norm.momentum = None  # the mean over what they see
        with torch.no_grad():
            model.train()(*example.inputs(4))
        for norm in norms:
            norm.momentum = 0.1
    return model.eval()
