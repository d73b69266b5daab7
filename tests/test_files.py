"""Files are written whole, and as `json` itself would write them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from placewright.errors import SearchError
from placewright.files import write_json
from placewright.session.driver import place
from placewright.stopping import never
from placewright.testing import layered_graph, uniform_cluster

MANY = list(range(2_500))


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"a": [], "b": {}, "c": None},
        MANY,
        [MANY, {"deep": [MANY, 1.5, "ü"]}, ()],
        {"first": 1, **{f"op {n}": [n, "gpu:0"] for n in MANY}},
        {"large": {str(n): MANY if n == 1_700 else n for n in MANY}},
        {"not text": dict.fromkeys(range(2), MANY)},
    ],
)
def test_a_document_in_pieces_is_the_same_text(document: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "document.json", document, SearchError)
    assert (tmp_path / "document.json").read_text() == json.dumps(document) + "\n"


def test_what_is_no_number_is_refused_in_a_long_list_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "document.json", [MANY, [*MANY, float("nan")]], SearchError)


def test_a_result_is_saved_without_a_trace_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = place(layered_graph(20, 4), uniform_cluster(2, bandwidth=1e9), method="single")
    monkeypatch.setattr(type(result), "_trace", lambda self: time.sleep(3))
    assert not result.save(tmp_path / "stopped", stop=lambda: True)
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == [
        "placement.json", "problem.json.gz", "summary.json",
    ]  # fmt: skip
    monkeypatch.undo()
    assert result.save(tmp_path / "whole", stop=never)
    assert (tmp_path / "whole" / "trace.json").is_file()
