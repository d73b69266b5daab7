"""Searching with real runs, and the commands around it, on two towers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placewright.backends import RunConfig, load
from placewright.backends.tensorflow.program import TensorFlowProgram
from placewright.backends.tensorflow.runner import TensorFlowRunner
from placewright.cluster import Cluster
from placewright.costs import Costs
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.measuring import FinalConfig, search_measured
from placewright.placement import Placement
from placewright.problem import Problem, make_problem
from placewright.refine import RefineConfig, Remembering, enough_for, refine
from placewright.search import Budget
from placewright.simulator import Simulator
from tests.cli.conftest import Run
from tests.cli.conftest import run as run  # the fixture of the command line
from tests.towers import towers, towers_graph

CPU2 = Cluster.load("cpu2")


@pytest.fixture(scope="module")
def program() -> TensorFlowProgram:
    return towers()


@pytest.fixture(scope="module")
def problem(program: TensorFlowProgram) -> Problem:
    return make_problem(program.graph, CPU2)


@pytest.fixture(scope="module")
def runner(program: TensorFlowProgram) -> Iterator[TensorFlowRunner]:
    with TensorFlowRunner(program, CPU2, RunConfig(steps=4, max_steps=4)) as runner:
        yield runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "towers.pb"
    path.write_bytes(towers_graph().as_graph_def().SerializeToString())
    return path


FETCH = ("--fetch", "train", "--fetch", "loss:0")


def test_any_placer_can_be_measured(problem: Problem, runner: TensorFlowRunner) -> None:
    evaluator = MeasuredEvaluator(problem, runner)
    result = search_measured(
        problem, evaluator, ["random"], Budget(trials=30), config=FinalConfig(final_rounds=2)
    )
    assert {entry.method for entry in result.methods} == {"single", "expert", "random"}
    assert 20 < result.trials <= 30
    assert result.measured
    assert result.lower_bound_seconds == 0.0
    assert result.best is not None
    assert len(result.best.measurement.step_seconds) >= 2
    assert result.summary()["half_width_seconds"] > 0


def test_simulate_and_measure(problem: Problem, runner: TensorFlowRunner, tmp_path: Path) -> None:
    config = RefineConfig(simulate_seconds=1.0, candidates=2, finalists=2, final_rounds=2)
    budget = Budget(trials=24)
    result = refine(
        problem, runner, ["expert", "local-search"], budget, directory=tmp_path, config=config
    )
    assert result.measured
    assert 10 <= result.trials <= 24
    methods = {entry.method for entry in result.methods}
    assert {"single", "expert"} <= methods
    assert result.best is not None
    # The mean of each round of the final.
    assert len(result.best.measurement.step_seconds) == 2
    assert {other.method for other in result.comparisons} | {result.best.placer} >= {"single"}
    assert result.best_single is not None
    assert result.step_seconds <= result.best_single.measurement.mean_seconds
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(lines) == result.trials
    # What was found out about costs is kept, and the timeline is drawn under it.
    result.save(tmp_path)
    assert result.calibration is not None
    costs = Costs.load(tmp_path / "costs.json", problem.graph)
    assert np.array_equal(costs.op_seconds, result.calibration.table.op_seconds)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    under = result.calibration.problem(problem)
    simulated = Simulator(under).run(result.placement.devices[np.newaxis]).step_seconds[0]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * simulated, rel=1e-3)
    assert len({json.loads(line)["placement"] for line in lines}) >= 4
    # Its budget is used up, so going on adds nothing and forgets nothing.
    again = refine(
        problem, runner, ["expert"], Budget(trials=result.trials), directory=tmp_path,
        config=config,
    )  # fmt: skip
    assert again.trials == result.trials
    assert again.best is not None


def test_what_was_measured_counts_in_the_simulator(problem: Problem) -> None:
    placement = Placement.of(problem, np.zeros(problem.num_groups, dtype=np.int32))
    simulated = Remembering(problem, {}).evaluate([placement])[0]
    known = {placement: type(simulated)(outcome=simulated.outcome, step_seconds=(1.0, 3.0))}
    evaluator = Remembering(problem, known)
    assert evaluator.evaluate([placement])[0].mean_seconds == 2.0
    assert evaluator.best == {placement: 2.0}


def test_a_budget_that_is_worth_it() -> None:
    assert not enough_for(Budget(trials=5), 1e-3, 10)
    assert enough_for(Budget(seconds=60), 0.3, 10)
    assert not enough_for(Budget(seconds=60), 3.0, 10)


def test_measure_command(run: Callable[..., Run], model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "feeds.npz", x=np.ones((32, 128), dtype=np.float32))
    result = run(
        "measure", model, *FETCH, "-c", "cpu2", "--device", "cpu:1", "--check", "--json",
        "--feeds", tmp_path / "feeds.npz",
    )  # fmt: skip
    assert result.code == 0, result.err
    facts = result.json
    assert facts["outcome"] == "ok"
    assert facts["misplaced"] == []
    assert facts["step_seconds"] == pytest.approx(sum(facts["steps"]) / len(facts["steps"]))
    assert facts["devices"][1]["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("measure", "towers.json", "-c", "cpu2", "--device", "cpu:0"), "cannot be run"),
        (("measure", "towers.pb", "-c", "k80x2", "--device", "cpu:0"), "it has no gpu:"),
        (("measure", "towers.pb", "-c", "cpu2"), "give either --placement FILE or --device NAME"),
        (
            ("measure", "towers.pb", "-c", "cpu2", "--device", "cpu:0", "--feeds", "none.npz"),
            "none.npz: no such file of inputs",
        ),
        (
            ("measure", "towers.pb", "-c", "cpu2", "--device", "cpu:0", "--steps", "1"),
            "steps must be at least 2",
        ),
        (("calibrate", "towers.pb", "-c", "cpu2"), "give -o FILE for the costs"),
        (("calibrate", "towers.pb", "-c", "cpu2", "-o", "no/costs.json"), "no: no such directory"),
        (("calibrate", "towers.pb", "-c", "cpu2", "-o", "towers.json"), "is there already"),
        (
            (
                "calibrate",
                "towers.pb",
                "-c",
                "cpu2",
                "-o",
                "costs.json",
                "--check",
                "4",
                "--plot",
                "towers.json",
            ),
            "is there already",
        ),
        (("place", "towers.pb", "-c", "cpu2", "--evaluate", "dream"), "expected simulate, measure"),
        (("place", "towers.pb", "-c", "k80x2", "--evaluate", "measure"), "cannot be measured"),
        (
            ("place", "towers.pb", "-c", "cpu2", "--evaluate", "measure", "--time-limit", "0"),
            "time_limit_seconds must be positive",
        ),
        (
            ("calibrate", "towers.pb", "-c", "cpu2", "-o", "c.json", "--address", "cpu:0=a:1"),
            "no address for device cpu:1",
        ),
        (
            ("place", "towers.pb", "-c", "cpu2", "--evaluate", "measure", "--address", "cpu:0=a:1"),
            "no address for device cpu:1",
        ),
    ],
)
def test_bad_requests_get_one_line(
    run: Callable[..., Run],
    arguments: tuple[str, ...],
    message: str,
    model: Path,
    program: TensorFlowProgram,
    tmp_path: Path,
) -> None:
    program.graph.save(tmp_path / "towers.json")
    (tmp_path / "towers.pb").write_bytes(model.read_bytes())
    result = run(*arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_measuring_without_tensorflow(
    run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    result = run("measure", model, "-c", "cpu2", "--device", "cpu:0")
    assert result.code == 2
    assert "pip install 'placewright[tensorflow]'" in result.err
    facts = run("devices", "--json").json
    assert facts["tensorflow"] is False


def test_a_plot_without_plotly_is_refused_before_measuring(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run(
        "calibrate", model, *FETCH, "-c", "cpu2", "-o", "costs.json", "--check", "4", "--plot",
        "plot.html",
    )  # fmt: skip
    assert result.code == 2
    assert "pip install 'placewright[report]'" in result.err
    assert not Path("costs.json").exists()


def test_devices_command(run: Callable[..., Run]) -> None:
    facts = run("devices", "--json").json
    assert facts["devices"][0]["name"] == "cpu:0"
    assert "local" in facts["measurable"]
    assert ("cpu2" in facts["measurable"]) == (facts["cores"] >= 2)
    assert "k80x4" not in facts["measurable"]
    assert "clusters that can be measured here" in run("devices").out


def test_place_command_measures_by_default(
    run: Callable[..., Run],
    model: Path,
) -> None:
    result = run(
        "place", model, *FETCH, "-c", "cpu2", "--budget", "60s", "-m", "expert", "-o", "out"
    )
    assert result.code == 0, result.err
    assert "measured, 95% within" in result.out
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["measured"] is True
    refused = run("place", model, *FETCH, "-c", "cpu2", "--resume", "out", "--evaluate", "simulate")
    assert refused.code == 2
    assert "began with simulate+measure; it cannot go on with simulate" in refused.err


def test_calibrate_command(run: Callable[..., Run], model: Path) -> None:
    result = run(
        "calibrate", model, *FETCH, "-c", "cpu2", "-o", "costs.json", "--placements", "4",
        "--check", "4", "--plot", "plot.html", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    facts = result.json
    (link,) = facts["links"]
    assert 1e-6 <= link["latency_seconds"] < 0.1
    assert facts["check"]["placements"] == 4
    assert math.isfinite(facts["check"]["mean_absolute_error"])
    assert "plotly" in Path("plot.html").read_text()
    # The simulator takes it.
    simulated = run(
        "simulate", model, *FETCH, "-c", "cpu2", "--device", "cpu:0", "--costs", "costs.json",
        "--json",
    )  # fmt: skip
    counts: dict[str, Any] = simulated.json["costs"]["cpu-core"]
    ops = load(model, fetches=["train", "loss:0"]).num_ops
    assert counts == {"measured (costs file)": ops}
