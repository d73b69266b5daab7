"""Calibration where devices share a chip: what ops demand of it is asked for, kept and fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from placewright import calibration
from placewright.calibration import Calibration
from placewright.cluster import Cluster
from placewright.costs import Costs, estimate_costs
from placewright.errors import CostsError
from placewright.graph import frozen
from placewright.grouping import each_op
from placewright.placers.heft import heft
from placewright.problem import Problem
from placewright.simulator import Simulator
from placewright.testing import layered_graph
from tests.simulated_machine import SimulatedRunner, as_it_is


def problem_on(cluster: str, ops: int = 60) -> Problem:
    graph = layered_graph(ops, 6)
    machine = Cluster.load(cluster)
    return Problem(
        graph=graph, grouping=each_op(graph), cluster=machine, costs=estimate_costs(graph, machine)
    )


def truth_of(problem: Problem, demand: float) -> Problem:
    """A machine on which every op demands the same."""
    true = as_it_is(problem)
    shared = np.array([[kind.type == "gpu"] for kind in problem.cluster.kinds])
    costs = dataclasses.replace(
        true.costs, demand=frozen(np.where(shared, demand, np.zeros(true.costs.demand.shape)))
    )
    return dataclasses.replace(true, costs=costs)


class Misled(SimulatedRunner):
    """Says half of what ops demand."""

    def demands(self) -> Mapping[int, Mapping[str, float]]:
        return {
            device: {name: share / 2 for name, share in shares.items()}
            for device, shares in super().demands().items()
        }


def error(found: Calibration, problem: Problem, truth: Problem) -> float:
    fresh = calibration.varied_placements(problem, 12, seed=5, without=found.fitted_to)
    rows = np.stack([placement.devices for placement in fresh])
    predicted = Simulator(found.problem(problem)).run(rows).step_seconds
    return float(np.mean(np.abs(predicted / Simulator(truth).run(rows).step_seconds - 1)))


def test_demands_are_asked_for() -> None:
    problem = problem_on("h200-streams4")
    truth = truth_of(problem, 0.6)
    runner = SimulatedRunner(truth, noise=0.002)
    found = calibration.calibrate(
        problem, runner, calibration.varied_placements(problem, 6), propose=heft
    )
    assert error(found, problem, truth) < 0.03
    assert found.table.demand == pytest.approx(0.6, rel=0.15)
    # Streams of one GPU are alike: one stands for all where single devices are timed.
    assert sum(len(set(run)) == 1 for run in runner.runs[:2]) == 1


def test_what_is_wrong_with_demands_is_fitted() -> None:
    problem = problem_on("h200-streams4")
    truth = truth_of(problem, 0.8)
    runner = Misled(truth, noise=0.002)
    told = calibration.with_demands(problem, problem.costs, runner)
    assert told.demand == pytest.approx(0.4)
    found = calibration.calibrate(
        problem, runner, calibration.varied_placements(problem, 8), propose=heft
    )
    assert error(found, problem, truth) < 0.06
    assert found.table.demand.mean() > 0.6


def test_a_costs_file_keeps_demands(tmp_path: Path) -> None:
    problem = problem_on("h200-parts4")
    table = dataclasses.replace(
        truth_of(problem, 0.3).costs, source=frozen(np.full_like(problem.costs.source, 3))
    )
    path = tmp_path / "costs.json"
    kept = Calibration(table=table, cluster=problem.cluster)
    kept.save(path, problem.graph)
    assert np.array_equal(Calibration.load(path, problem).table.demand, table.demand)
    assert np.array_equal(kept.problem(problem).costs.demand, table.demand)


@pytest.mark.parametrize(
    ("demands", "complaint"),
    [
        ({"k": {"op0": 1.5}}, "cannot demand 1.5"),
        ({"k": {"nobody": 0.5}}, "has no op 'nobody'"),
        ({"k": 7}, "must map op names to shares"),
        ([], "must map device kinds"),
    ],
)
def test_demands_of_a_file_are_checked(demands: object, complaint: str) -> None:
    graph = layered_graph(3, 3)
    document = {"format": "placewright-costs/1", "kinds": {"k": {"op0": 1.0}}, "demands": demands}
    with pytest.raises(CostsError, match=complaint):
        Costs.from_json(document, graph, where="costs.json")


def test_demands_are_estimated_where_devices_share_a_chip() -> None:
    whole, streams, parts = (
        problem_on(name).costs.demand for name in ("h200", "h200-streams4", "h200-parts4")
    )
    assert not whole.any()
    assert streams.any()
    assert np.all((streams >= 0) & (streams <= 1))
    kinds = problem_on("h200-parts4").cluster.kinds
    assert not parts[[kind.type == "cpu" for kind in kinds]].any()
    assert parts[[kind.type == "gpu" for kind in kinds]].any()
