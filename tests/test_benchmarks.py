from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulator import merge_csv


def test_each_case_is_written_when_it_is_done_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.csv"
    assert merge_csv(path, [{"model": "a", "x": "1"}, {"model": "a", "x": "2"}], "model")
    merge_csv(path, [{"model": "b", "x": "3"}], "model")
    # One that is run again replaces its own lines, all of them, and no others.
    rows = merge_csv(path, [{"model": "a", "x": "4"}], "model")
    assert rows == [{"model": "b", "x": "3"}, {"model": "a", "x": "4"}]
    assert path.read_text().split() == ["model,x", "b,3", "a,4"]
    assert [file.name for file in path.parent.iterdir()] == ["x.csv"]
    with pytest.raises(SystemExit, match="has other columns"):
        merge_csv(path, [{"model": "a", "y": "4"}], "model")
    assert path.read_text().split() == ["model,x", "b,3", "a,4"]
