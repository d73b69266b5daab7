"""Runs that version 0.1.0 wrote still open, are reported on, and go on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from placewright import Problem, place
from placewright.errors import SearchError
from placewright.graph import frozen
from placewright.journal import read_trials
from placewright.report import explain, write_report
from placewright.report.run import read_run

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED / "run-simulated", tmp_path / "run-simulated"))


@pytest.mark.parametrize(("name", "trials"), [("run-simulated", 120), ("run-measured", 45)])
def test_old_runs_are_reported(name: str, trials: int, tmp_path: Path) -> None:
    folder = shutil.copytree(RECORDED / name, tmp_path / name)
    run = read_run(folder)
    assert run.ok
    assert run.measured == (name == "run-measured")
    assert run.calibrated == run.measured
    assert run.progression is not None
    assert run.progression.trials == trials
    assert run.timeline is not None
    assert all(lines for _, lines in explain(run))
    write_report([folder], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_an_old_run_goes_on(simulated: Path) -> None:
    problem = Problem.load(simulated / "problem.json.gz")
    before = (simulated / "journal.jsonl").read_bytes()
    old = json.loads((simulated / "summary.json").read_text())
    result = place(
        problem, method="single,expert,local-search", trials=150, seed=3, directory=simulated
    )
    assert result.trials == 150
    # That version's figure is of one order of ties.
    found = [entry.best for entry in result.methods if entry.best is not None]
    assert min(trial.measurement.mean_seconds for trial in found) <= old["step_seconds"]
    after = (simulated / "journal.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(read_trials(simulated / "journal.jsonl", problem)) == 150
    assert read_run(simulated).ok


@pytest.mark.parametrize("begun_anew", [False, True])
def test_simulated_times_are_of_one_kind(simulated: Path, tmp_path: Path, begun_anew: bool) -> None:
    problem = Problem.load(simulated / "problem.json.gz")
    folder = simulated
    if begun_anew:
        folder = tmp_path / "new"
        place(problem, method="single", trials=5, directory=folder)
    costs = replace(problem.costs, op_seconds=frozen(2 * problem.costs.op_seconds))
    dearer = replace(problem, costs=costs)
    assert dearer.space == problem.space
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SearchError, match=dearer.fingerprint) as caught:
        place(dearer, method="single", trials=200, directory=folder)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
