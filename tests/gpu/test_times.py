"""What takes how long on a real GPU that nobody else uses meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from placewright.backends.pytorch.demands import GraphTimer
from placewright.backends.pytorch.execution import Opened
from placewright.backends.pytorch.places import places_of
from placewright.backends.pytorch.streams.device import Gpu
from placewright.cluster import chosen

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def timer() -> GraphTimer:
    return GraphTimer([torch.cuda.Stream() for _ in range(4)])


@pytest.mark.parametrize(
    ("make", "least", "most"),
    [
        # Products that fill the GPU take as long side by side as one after another.
        (lambda: torch.randn(4096, 4096, device="cuda"), 0.8, 1.2),
        # A few hundred numbers leave nearly all of it free.
        (lambda: torch.randn(16, 16, device="cuda"), 0.2, 0.6),
    ],
)
def test_four_streams_at_once(
    timer: GraphTimer, make: Callable[[], Any], least: float, most: float
) -> None:
    tensor = make()
    tensor @ tensor  # cuBLAS cannot be set up while something is captured
    one = timer.seconds(lambda: tensor @ tensor, 1)
    four = timer.seconds(lambda: tensor @ tensor, 4)
    assert one is not None
    assert four is not None
    assert least < four / (4 * one) < most


def test_parts_are_disjoint_and_equal() -> None:
    """Four products at once take hardly longer on four parts than one on one."""
    cluster = chosen(["cuda:0/part:0-3"], issue="none", sms=32)
    opened = Opened(places_of(cluster))
    x = torch.randn(2048, 2048, device="cuda")
    streams = [opened.hardware.streams[opened.lane(p, 0)] for p in range(4)]

    def seconds(used: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for stream in streams[:used]:
            with torch.cuda.stream(stream):
                for _ in range(20):
                    x @ x
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(4)
    one, four = min(seconds(1) for _ in range(5)), min(seconds(4) for _ in range(5))
    # On one set of multiprocessors, four would take four times as long.
    assert four < 2.5 * one


def test_what_fills_the_gpu_demands_all_of_it() -> None:
    gpu = Gpu(index=0)
    large, small = (torch.randn(n, n, device="cuda") for n in (4096, 16))
    with gpu.settings():
        found = []
        for x in (large, small):
            run = torch.fx.symbolic_trace(_Twice())
            found.append(gpu.demand_of(run, [x], gpu.seconds_of(run, [x])))
    assert found[0] > 0.7
    assert found[1] < 0.5


class _Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ x,)
