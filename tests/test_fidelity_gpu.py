"""The benchmark of predictions on GPUs: what it keeps, that it goes on, and what it makes of it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fidelity_gpu
from benchmarks.common import read_csv
from placewright import calibration
from placewright.calibration import Fidelity
from placewright.cluster import Cluster
from placewright.costs import estimate_costs
from placewright.grouping import each_op
from placewright.problem import Problem
from placewright.testing import layered_graph
from tests.simulated_machine import SimulatedRunner, as_it_is


def a_problem(cluster: str) -> Problem:
    graph, machine = layered_graph(80, 8), Cluster.load(cluster)
    return Problem(
        graph=graph, grouping=each_op(graph), cluster=machine, costs=estimate_costs(graph, machine)
    )


def measured(problem: Problem, runner: SimulatedRunner, runs: int = 10**6) -> fidelity_gpu.Record:
    record = fidelity_gpu.Record({"model": "layers", "machine": "m", "hardware": "none"})
    until = time.monotonic() + 600
    for number, _ in enumerate(
        fidelity_gpu.measure(problem, runner, record, count=16, until=until), start=1
    ):
        if number >= runs:
            break
    return record


@pytest.mark.parametrize("cluster", ["h200-streams4", "h200-parts4"])
def test_from_runs_to_tables(cluster: str, tmp_path: Path) -> None:
    problem = a_problem(cluster)
    record = measured(problem, SimulatedRunner(as_it_is(problem), noise=0.003))
    record.save(tmp_path / "raw" / "layers-m.json.gz", problem)
    (line,) = fidelity_gpu.analyse(tmp_path)
    assert line["placements"] == line["twice"] == 16
    assert line["error"] < 0.05
    assert line["spearman"] > 0.9
    assert line["peak_error"] == 0.0
    assert line["filled_ran"] == line["filled"] == fidelity_gpu.FILLED_RUNS
    rows = read_csv(tmp_path / "fidelity.csv")
    assert {"groups", "sets", "best"} <= {row["kind"] for row in rows}
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| layers | m | 16 |" in page
    # What the costs were fitted to is not what they are checked on.
    fitted = {tuple(run["devices"]) for run in record.runs if run["fit"]}
    assert fitted.isdisjoint(tuple(run["devices"]) for run in record.runs if not run["fit"])


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    problem = a_problem("h200-streams4")
    truth = as_it_is(problem)
    path = tmp_path / "raw" / "layers-m.json.gz"
    record = measured(problem, SimulatedRunner(truth), runs=20)
    record.save(path, problem)
    again, loaded = fidelity_gpu.Record.load(path)
    assert loaded == problem
    assert again == record
    runner = SimulatedRunner(truth)
    until = time.monotonic() + 600
    for _ in fidelity_gpu.measure(loaded, runner, again, count=16, until=until):
        pass
    done = [len(run["passes"]) for run in record.runs]
    filled = sum("filled" in run for run in again.runs)
    assert filled == fidelity_gpu.FILLED_RUNS
    assert len(runner.runs) == sum(len(run["passes"]) for run in again.runs) - sum(done) + filled
    assert all(len(run["passes"]) == 2 for run in again.runs if not run["fit"])


def test_no_time_left() -> None:
    problem = a_problem("h200-streams4")
    record = fidelity_gpu.Record({})
    runner = SimulatedRunner(as_it_is(problem))
    list(fidelity_gpu.measure(problem, runner, record, count=4, until=time.monotonic() - 1))
    assert len(runner.runs) <= 1


def test_placements_beside_a_gpu_are_mostly_on_it() -> None:
    problem = a_problem("h200-parts4")
    cpu = problem.cluster.device_names.index("cpu:0")
    shares = [
        float(np.mean(placement.devices == cpu))
        for placement in fidelity_gpu._varied(problem, 40, seed=0)
    ]
    assert 0 < np.mean(shares) < 0.15


def test_agreement_of_pairs() -> None:
    assert calibration.pair_agreement([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert calibration.pair_agreement([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert calibration.pair_agreement([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert np.isnan(calibration.pair_agreement([1, 1], [1, 2]))
    found = Fidelity(
        predicted=(1.0, 2.0, 4.0, 3.0, 9.0, 9.0, 9.0, 9.0),
        first=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        second=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        raw=(0.0,) * 8,
    )
    assert found.fastest_quarter.predicted == (1.0, 2.0)
    assert found.fastest_quarter.kendall == pytest.approx(1.0)
    assert found.kendall_repeated == pytest.approx(1.0)
