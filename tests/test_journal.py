from __future__ import annotations

import base64
import json
import logging
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from placewright.cluster import Cluster
from placewright.errors import SearchError
from placewright.graph import Graph, Op
from placewright.journal import Journal, _line, read_trials
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem, make_problem


def problem(n: int = 3) -> Problem:
    ops = [Op(name=f"op{i}", type="t") for i in range(n)]
    return make_problem(Graph.from_ops("m", ops, []), Cluster.load("k80x2"))


def trials(made: Problem, count: int) -> list[Trial]:
    return [
        Trial(
            placement=Placement.of(made, [i % 3, 1, 2]),
            measurement=Measurement(outcome=Outcome.OK, step_seconds=(0.1 + i / 3,))
            if i % 4
            else Measurement(outcome=Outcome.FAILED, reason="no kernel, \u201cquoted\u201d\n"),
            placer="random",
            seed=7,
            at_seconds=i / 7,
        )
        for i in range(count)
    ]


def test_round_trip_is_exact(tmp_path: Path) -> None:
    made = problem()
    path = tmp_path / "journal.jsonl"
    with Journal(path, made) as journal:
        journal.append(trials(made, 3))
        journal.append(trials(made, 2))
    assert read_trials(path, made) == trials(made, 3) + trials(made, 2)
    record = json.loads(path.read_text().splitlines()[0])
    assert record["space"] == made.space.fingerprint
    assert record["version"]


def test_any_prefix_of_a_journal_can_be_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = problem()
    whole = tmp_path / "whole.jsonl"
    with Journal(whole, made) as journal:
        journal.append(trials(made, 3))
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(data[:cut])
        caplog.clear()
        kept = sum(end <= cut for end in ends)
        with caplog.at_level(logging.WARNING), Journal(path, made) as journal:
            assert journal.trials == trials(made, 3)[:kept]
            journal.append(trials(made, 1))
        assert ("torn" in caplog.text) == (cut not in (0, *ends))
        assert read_trials(path, made) == trials(made, 3)[:kept] + trials(made, 1)


def test_a_killed_process_loses_nothing_it_appended(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent.parent)]!r}
from tests.test_journal import problem, trials
from placewright.journal import Journal
made = problem()
journal = Journal({str(tmp_path / "j.jsonl")!r}, made)
while True:
    journal.append(trials(made, 5))
    print(5, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(40)]
        os.kill(process.pid, signal.SIGKILL)
    assert len(read_trials(tmp_path / "j.jsonl", problem())) >= sum(said)


def test_a_journal_of_another_problem_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, problem()) as journal:
        journal.append(trials(problem(), 1))
    before = path.read_bytes()
    with pytest.raises(
        SearchError, match=f"line 1: a trial of space {problem().space.fingerprint}"
    ):
        Journal(path, problem(4))
    assert path.read_bytes() == before


def test_a_damaged_middle_is_an_error(tmp_path: Path) -> None:
    made = problem()
    path = tmp_path / "j.jsonl"
    with Journal(path, made) as journal:
        journal.append(trials(made, 3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(SearchError, match="line 2 is not JSON"):
        read_trials(path, made)
    path.write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(SearchError, match="line 2: "):
        read_trials(path, made)


def test_forged_placements_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines whose checksum is right: all that is checked beyond it."""
    monkeypatch.setattr("placewright.journal._SHORT", 100)
    made = problem(1000).refined
    path = tmp_path / "j.jsonl"
    rows = [[0] * 1000, [1, *[0] * 999], [0, 1, *[0] * 998]]
    told = [
        Trial(
            placement=Placement.of(made, row),
            measurement=Measurement(outcome=Outcome.OK, step_seconds=(1.0,)),
            placer="x",
        )
        for row in rows
    ]
    with Journal(path, made) as journal:
        journal.append(told)
    assert read_trials(path, made) == told
    whole, changed = (json.loads(line) for line in path.read_bytes().splitlines()[:2])
    digest = changed["placement"]["from"]

    def packed(data: bytes) -> dict[str, str]:
        return {"zlib": base64.b64encode(zlib.compress(data)).decode()}

    def told_of(groups: Any, devices: Any) -> list[dict[str, Any]]:
        return [whole["placement"], {"from": digest, "changed": [groups, devices]}]

    for placements, said in (
        ([packed(bytes(1 << 26))], "not one of 1,000 groups"),
        ([packed(bytes(1998))], "not one of 1,000 groups"),
        ([{"zlib": whole["placement"]["zlib"][:-8]}], "not one of 1,000 groups"),
        ([{"zlib": "?"}], "line 1: "),
        (told_of([1000], [0]), "changes groups that there are not"),
        (told_of([-1], [0]), "changes groups that there are not"),
        (told_of([0, 1], [0]), "changes groups that there are not"),
        (told_of([0.5], [0]), "something else than whole numbers"),
        (told_of([10**30], [0]), "something else than whole numbers"),
        (told_of([[1]], [[0]]), "something else than whole numbers"),
        (told_of("a", [0]), "something else than whole numbers"),
        (told_of(None, None), "something else than whole numbers"),
        (told_of([0], [77]), "device number 77"),
        ([[0.5] * 1000], "something else than whole numbers"),
    ):
        records = [
            {key: value for key, value in whole.items() if key != "sum"} | {"placement": placement}
            for placement in placements
        ]
        path.write_bytes(b"".join(map(_line, records)))
        with pytest.raises(SearchError, match=f"line {len(placements)}: ") as caught:
            read_trials(path, made)
        assert said in str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    made = problem()
    path = tmp_path / "j.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(SearchError, match="cannot be written: No space left"):  # noqa: SIM117
        with Journal(path, made) as journal:
            journal.append(trials(made, 1))
