from __future__ import annotations

import json
from pathlib import Path

import pytest

from placewright.errors import SearchError
from placewright.session.metrics import MetricsLog, read_metrics


def test_records_are_appended_once_and_survive_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append("ppo", 16, 0.5, {"update": 1, "entropy": 1.0, "step_seconds_mean": float("nan")})
    log.append("ppo", 32, 1.0, {"update": 2, "entropy": 0.9})
    log.close()
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    assert json.loads(first) == {
        "placer": "ppo", "trials": 16, "seconds": 0.5, "update": 1, "entropy": 1.0,
    }  # fmt: skip
    path.write_text(f"{first}\n{second[:20]}")
    assert [r["update"] for r in read_metrics(tmp_path)] == [1]

    # A resumed run repeats updates 1 and 2, of which the first is there.
    again = MetricsLog(tmp_path, keep={"ppo"})
    for update in (1, 2, 3):
        again.append("ppo", 16 * update, 2.0, {"update": update, "entropy": 0.5})
    again.append("reinforce", 16, 3.0, {"update": 1})
    again.close()
    assert [(r["placer"], r["update"]) for r in read_metrics(tmp_path)] == [
        ("ppo", 1), ("ppo", 2), ("ppo", 3), ("reinforce", 1),
    ]  # fmt: skip
    MetricsLog(tmp_path, keep={"reinforce"}).close()  # ppo begins anew
    assert [(r["placer"], r["update"]) for r in read_metrics(tmp_path)] == [("reinforce", 1)]
    for bad in (
        "no json", "[" * 100_000, "[]", '{"update": 1}', '{"placer": ["ppo"], "update": 1}',
        '{"placer": "ppo", "update": 1e999}', '{"placer": "ppo", "update": 1, "entropy": "high"}',
    ):  # fmt: skip
        path.write_text(f"{bad}\n{second}\n")
        with pytest.raises(SearchError, match="line 1"):
            MetricsLog(tmp_path, keep={"ppo"})


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    log = MetricsLog(tmp_path)
    log.append("ppo", 16, 0.5, {"update": 7, "entropy": 0.25})
    log.close()
    (path,) = (tmp_path / "tensorboard" / "ppo").iterdir()
    events = list(loader.LegacyEventFileLoader(str(path)).Load())
    values = {value.tag: value.simple_value for value in events[1].summary.value}
    assert events[0].file_version == "brain.Event:2"
    assert events[1].step == 7
    assert values == {"entropy": 0.25, "trials": 16.0}
