"""`benchmarks.one_gpu`: its models, and what it says of its rows."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import one_gpu
from benchmarks.one_gpu_models import BRANCHING, MODELS, NASNet, RandWire, trained
from placewright.backends.pytorch.streams.built import lower
from placewright.backends.pytorch.streams.groups import Fusion
from placewright.backends.pytorch.streams.net import trace
from placewright.backends.pytorch.streams.tuning import untuned


def row(model: str, column: str, ms: float | None) -> dict[str, str]:
    found = {"found_ms": {"one stream": 2.0, "list": 1.05, "local-search": 1.0}}
    return {"model": model, "batch": "1", "dtype": "fp16", "column": column,
            "ms": "" if ms is None else str(ms), "detail": json.dumps(found)}  # fmt: skip


def test_the_summary_compares_with_the_best_of_the_others() -> None:
    rows = [
        row("googlenet", "eager", 4.0), row("googlenet", "one stream", 1.0),
        row("googlenet", "freezing", 0.75), row("googlenet", "compile", 0.9),
        row("googlenet", "max-autotune", None), row("googlenet", "ours", 0.5),
        row("resnet50", "one stream", 0.8), row("resnet50", "ours", 0.8),
        row("squeezenet", "one stream", 0.8),
    ]  # fmt: skip
    said = one_gpu.summary(rows)
    assert "| googlenet | 1 | fp16 | 4.000 | 1.000 |  | 0.750 | 0.900 |" in said
    assert "| 2.00 | 1.50 | 1.50 |" in said
    assert "1 rows of branching models: geometric mean 2.00 over one stream" in said
    assert "geometric mean 1.50 over torch.compile" in said
    assert "resnet50 1 fp16, 1.000" in said
    assert "squeezenet" not in said
    assert "5.0% in the median of 2 rows" in said


def test_cells_are_a_batch_and_a_type() -> None:
    assert one_gpu.Cell.of("8:tf32") == (8, "tf32")
    for text in ("fp16", "x:fp16", "8:int8"):
        with pytest.raises(SystemExit):
            one_gpu.Cell.of(text)


def test_branching_models_are_some_of_the_models() -> None:
    assert set(BRANCHING) < set(MODELS)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (lambda: NASNet(8, 1), 64),
        (lambda: RandWire(8, 6), 64),
        (MODELS["recommender"].model, 0),
        (MODELS["detection_head"].model, 0),
    ],
    ids=["nasnet", "randwire", "recommender", "detection_head"],
)
def test_models_have_branches(model: object, size: int) -> None:
    torch.manual_seed(0)
    made = model().eval()  # type: ignore[operator]
    name = "recommender" if "Recommender" in type(made).__name__ else "detection_head"
    inputs = (torch.randn(1, 3, size, size),) if size else MODELS[name].inputs(1)
    low = lower(trace(made, inputs, {}), inputs, {}, Fusion.FOLDED)
    work = untuned(low.grouped).work(low.grouped)
    assert work.critical_seconds < 0.8 * work.total_seconds


@pytest.mark.parametrize("name", ["detection_head", "recommender"])
def test_outputs_depend_on_inputs(name: str) -> None:
    torch.manual_seed(0)
    model = trained(name)
    with torch.no_grad():
        a, b = (torch.utils._pytree.tree_leaves(model(*MODELS[name].inputs(2)))[-1]
                for _ in range(2))  # fmt: skip
    assert torch.isfinite(a).all()
    assert float((a - b).norm() / a.norm()) > 0.05
