"""The page about a module on streams: from made-up timelines, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from placewright.errors import ReportError
from placewright.report.streams import write_streams_report
from tests.report.conftest import EVIL

torch = pytest.importorskip("torch")

from placewright.backends.pytorch.streams.groups import Fusion  # noqa: E402
from placewright.backends.pytorch.streams.plan import StreamPlan  # noqa: E402
from placewright.backends.pytorch.streams.timelines import Timelines  # noqa: E402


def made_up() -> tuple[StreamPlan, Timelines]:
    """Three groups on two streams, with names that would become part of the page."""
    plan = StreamPlan(
        inputs=(((1, 3), "float16"),), chosen="streams",
        seconds={"streams": 5e-4, "one stream": 6e-4, "eager": 7.5e-3, EVIL: 9e-4},
        fusion=Fusion.REGIONS, fingerprint="0123", groups=("conv", EVIL, "sum"),
        kernels=("cudnn", "region", "aten"), group_seconds=(2e-4, 2e-4, 1e-4),
        group_demand=(0.5, 0.5, 1.0), streams=(0, 2, 0), order=(0, 1, 2),
        found={"list": 4.6e-4, "local-search": 4.5e-4}, trials=78, search_seconds=17.0,
        notes=tuple(f"{EVIL}: does not work {i}" for i in range(25)),
    )  # fmt: skip
    lines = Timelines(
        names=plan.groups, kernels=plan.kernels, streams=plan.streams,
        measured=((0.0, 2e-4), (1e-5, 3e-4), (3e-4, 4.5e-4)),
        expected=((0.0, 2e-4), (0.0, 2e-4), (2e-4, 3e-4)),
    )  # fmt: skip
    return plan, lines


def write(path: Path, plan: StreamPlan, lines: Timelines | None) -> Path:
    return write_streams_report(path, plan, lines, model=EVIL, device="a GPU")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_shows_what_was_measured_beside_what_was_expected(tmp_path: Path) -> None:
    plan, lines = made_up()
    page = write(tmp_path / "out.html", plan, lines).read_text("utf-8")
    assert EVIL not in page
    document = data_of(page)
    measured, expected = document["runs"]
    assert measured["step"] == plan.seconds["streams"]
    assert expected["step"] == lines.expected_seconds
    assert [d["name"] for d in measured["devices"]] == ["stream 0", "stream 2"]
    assert [bar[:2] for bar in measured["gantt"]["ops"]] == [[0, 0.0], [0, 3e-4], [1, 1e-5]]
    assert [bar[2] for bar in expected["gantt"]["ops"]] == [2e-4, 1e-4, 2e-4]
    assert measured["gantt"]["names"][1] == f"{EVIL} (region)"
    assert measured["load"] == [[3.5e-4, 1e-4], [2.9e-4, 1.6e-4]]
    assert document["compare"]["rows"][0]["difference"] == "-33.3%"
    assert [m["method"] for m in measured["methods"]] == list(plan.seconds)
    assert "15.00" in measured["tiles"][0]["value"]
    words = dict(measured["sections"])
    assert words["Kernels"] == ["cudnn: 1 groups", "region: 1 groups", "aten: 1 groups"]
    assert words["What did not work"][-1] == "and 5 others"
    assert "290.0 us, expected  200.0" in words["Longest groups"][0]


def test_where_nothing_was_captured_there_is_no_timeline(tmp_path: Path) -> None:
    plan, _ = made_up()
    plan = dataclasses.replace(
        plan, chosen="eager", groups=(), kernels=(), streams=(), order=(), fingerprint=""
    )
    document = data_of(write(tmp_path / "out.html", plan, None).read_text("utf-8"))
    (run,) = document["runs"]
    assert run["gantt"] is None
    assert "no streams: nothing to gain" in run["answer"]


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="missing"):
        write(tmp_path / "missing" / "out.html", *made_up())
