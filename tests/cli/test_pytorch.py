"""The commands on PyTorch models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = """
import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(1024, 10)

    def forward(self, x, y, labels):
        scores = self.head(torch.cat([self.left(x), self.right(y)], 1))
        return nn.functional.cross_entropy(scores, labels)


def two():
    x = torch.zeros(256, 512)
    inputs = {"x": x, "y": x, "labels": torch.zeros(256, dtype=torch.long)}
    return Towers(), inputs, {"train": True, "optimizer": torch.optim.Adam}
"""


def test_every_command_takes_a_function(run: Callable[..., Any]) -> None:
    for needed in ("torch", "plotly"):
        pytest.importorskip(needed)
    Path("model.py").write_text(MODEL)
    facts = run("inspect", "model.py:two", "--json").json
    parameters = 2 * (512 * 512 + 512) + 1024 * 10 + 10
    assert facts["param_bytes"] == 4 * parameters
    assert facts["slot_bytes"] == 8 * parameters
    simulated = run("simulate", "model.py:two", "-c", "cpu2", "--device", "cpu:0", "--json").json
    searched = ("-m", "single,expert,heft", "--trials", "20", "-o", "found")
    found = run("place", "model.py:two", "-c", "cpu2", *searched, "--json").json
    assert found["methods"][0]["step_seconds"] == pytest.approx(simulated["step_seconds"])
    assert found["step_seconds"] < simulated["step_seconds"]
    assert run("report", "found").code == 0
    assert "left/0/weight" in run("explain", "found").out


def test_a_colon_in_an_error_is_no_emoji(run: Callable[..., Any]) -> None:
    assert "model.py:two:" in run("inspect", "model.py:two:").err


def test_a_name_that_two_frameworks_have(run: Callable[..., Any]) -> None:
    for needed in ("torch", "tensorflow"):
        pytest.importorskip(needed)
    small = ("rnnlm", "--scale", "small", "--json")
    usual, named, other = (
        run("inspect", *small, *of).json
        for of in ((), ("--backend", "tensorflow"), ("--backend", "pytorch"))
    )
    assert usual == named
    assert other["fingerprint"] != usual["fingerprint"]
    assert other["param_bytes"] == usual["param_bytes"]


def test_a_backend_that_is_not_there_or_means_nothing(
    run: Callable[..., Any], graph_file: Path
) -> None:
    assert "no backend 'jax'; there are" in run("inspect", "rnnlm", "--backend", "jax").err
    assert "backend means nothing" in run("inspect", graph_file, "--backend", "pytorch").err
