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


def test_a_placement_is_not_put_into_a_module(run: Callable[..., Any]) -> None:
    Path("placement.json").write_text('{"format": "placewright-placement/1", "ops": {}}')
    refused = run("apply", "model.py:two", "placement.json", "-o", "placed")
    assert refused.code == 2
    assert "placewright.torch.place" in " ".join(refused.err.split())


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


TALL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Tall(nn.Sequential):
    _no_split_modules = ("Block",)


def filled():
    return Tall(*(Block() for _ in range(12)))


def build():
    with torch.device("meta"):
        return filled()


def called():
    return build(), {"one": (torch.zeros(1, 256), 8), "many": (torch.zeros(512, 256), 1)}
"""


def test_a_module_that_does_not_fit_is_planned(run: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    import placewright.torch as pt

    Path("tall.py").write_text(TALL)
    asked = ("place", "tall.py:called", "-c", "h200", "--memory", "cuda:0=140MB")
    found = run(*asked, "--workload", "function", "-o", "found")
    assert "travel" in found.out
    assert "computed on cpu" in found.out
    plan = pt.OffloadPlan.load("found/offload.json")
    assert plan.memory_bytes == 140_000_000
    assert plan.host_bytes
    assert [shape.name for shape in plan.shapes] == ["one", "many"]
    assert run(*asked, "--workload", "function", "--json", "-o", "again").json["units"]
    said = run("explain", "found", "--json").json
    assert list(said) == ["Where weights live", "What each call does", "Why"]
    assert "the floor is" in said["What each call does"][0]
    assert "link and cores work side by side" in said["Why"][0]
    assert run("report", "found").code == 0
    page = Path("found/report.html").read_text()
    assert page.count("<tr>") == 1 + sum(unit.size > 0 for unit in plan.units)
    assert 'class="host"' in page
    assert 'class="travels"' in page
    for options, message in (
        (("--what-if", "1s"), "--what-if: found holds a plan"),
        (("again",), "make a page of each"),
    ):
        refused = run("report", "found", *options)
        assert refused.code == 2
        assert message in " ".join(refused.err.split())
    assert run("report", "found", "--what-if", "0").code == 0
    refused = run(*asked, "--workload", "function", "--evaluate", "measure", "-o", "more")
    assert refused.code == 2
    assert "give --checkpoint" in " ".join(refused.err.split())
    for given in ((), ("--workload", "function")):
        refused = run(*asked, *given, "--checkpoint", "w.safetensors", "-o", "more")
        assert refused.code == 2
        assert "--evaluate measure" in " ".join(refused.err.split())


def test_a_plan_is_measured_with_weights_from_files(run: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    from safetensors.torch import save_file

    import placewright.torch as pt
    from placewright.backends.pytorch.sources import call_function

    Path("tall.py").write_text(TALL)
    model, _ = call_function("tall.py:filled")
    save_file(model.state_dict(), "w.safetensors")
    asked = ["place", "tall.py:called", "-c", "cpu2", "--memory", "cpu:1=8MB"]
    asked += ["--workload", "function", "--evaluate", "measure"]
    assert run(*asked, "--checkpoint", "w.safetensors", "-o", "found").code == 0
    plan = pt.OffloadPlan.load("found/offload.json")
    assert plan.source == "measured"
    assert plan.host_bytes
    refused = run(*asked, "--checkpoint", "none.safetensors", "-o", "more")
    assert refused.code == 2
    assert "none.safetensors: cannot be read" in " ".join(refused.err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workload", "prompt=8"), "needs --memory"),
        (("--memory", "cuda:0=1MB", "--workload", "function"), "would have to hold"),
        (("--memory", "cuda:0=1XB", "--workload", "function"), "give bytes or a text"),
        (("--memory", "cuda:0=1GB", "--workload", "tokens=8"), "'tokens=8' is neither"),
        (("--memory", "cuda:0=1GB", "--workload", "prompt=8", "-m", "heft"), "means nothing"),
        (("--memory", "cuda:0=1GB", "--workload", "prompt=8", "--batch", "2"), "means nothing"),
        (("--memory", "cuda:7=1GB", "--workload", "function"), "has no device"),
    ],
)
def test_what_cannot_be_planned_so_is_one_line(
    run: Callable[..., Any], options: tuple[str, ...], message: str
) -> None:
    pytest.importorskip("torch")
    Path("tall.py").write_text(TALL)
    found = run("place", "tall.py:called", "-c", "h200", *options)
    assert found.code == 2
    assert message in found.err
    assert len(found.err.splitlines()) == 1
