"""The benchmark of the paper's experiment on a GPU, run on a simulated one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import gpu_cases, gpu_tables, paper_gpu
from benchmarks.common import MORE, read_csv, write_csv
from benchmarks.gpu_cases import IN_ORDER, Case, problem_of
from benchmarks.paper_gpu import Settings
from placewright.backends.base import Run, Trace, Transfer
from placewright.cluster import Cluster
from placewright.journal import read_trials
from placewright.measurement import Measurement, Outcome
from placewright.placement import everything_on
from placewright.problem import make_problem
from placewright.simulator import Simulator
from placewright.testing import layered_graph
from tests.simulated_machine import SimulatedProgram, SimulatedRunner, as_it_is

GRAPH = layered_graph(120, 6)
CASE = Case(model="nmt", machine="paper", partitions=2)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedRunner]:
    """What is started in place of a GPU."""
    started: list[SimulatedRunner] = []

    def runner(program: SimulatedProgram, cluster: Cluster, config: object) -> SimulatedRunner:
        truth = as_it_is(make_problem(program.graph, cluster), seed=2)
        started.append(SimulatedRunner(truth, noise=0.003, steps=1))
        return started[-1]

    @contextlib.contextmanager
    def programs(cases: Sequence[Case], scale: str) -> Iterator[Callable[[str], Any]]:
        yield lambda model: SimulatedProgram(GRAPH)

    monkeypatch.setattr(paper_gpu, "TorchRunner", runner)
    monkeypatch.setattr(paper_gpu, "_programs", programs)
    monkeypatch.setattr(paper_gpu, "_compile", lambda: None)
    return started


def test_a_case_is_searched_measured_and_explained(
    machine: list[SimulatedRunner], tmp_path: Path
) -> None:
    first = Settings(
        output=tmp_path / "out", prepared=tmp_path / "prepared", cases=(CASE,),
        search_seconds=2.0, methods=("local-search",),
    )  # fmt: skip
    paper_gpu.run_cases(first)
    rows = read_csv(tmp_path / "out" / "paper_gpu.csv")
    by_method = {row["method"]: row for row in rows}
    assert list(by_method) == [
        "cpu only", "one gpu", "scotch", "mincut", "expert", "heft", "m-etf", "local-search",
    ]  # fmt: skip
    assert by_method["one gpu"]["outcome"] == "out of memory"
    assert by_method["heft"]["costs"] == "calibrated"
    assert float(by_method["heft"]["half_width_seconds"]) < float(by_method["heft"]["step_seconds"])
    journal = tmp_path / "out" / CASE.name / "local-search" / "journal.jsonl"
    before = journal.read_bytes()

    # With more methods it goes on: what is searched already is not searched again.
    methods = ("ppo warm", "simulate+measure", "local-search")
    more = Settings(
        output=tmp_path / "out", prepared=tmp_path / "prepared", cases=(CASE,),
        search_seconds=2.0, methods=methods, train_steps=5,
    )  # fmt: skip
    paper_gpu.run_cases(more)
    assert journal.read_bytes() == before
    rows = read_csv(tmp_path / "out" / "paper_gpu.csv")
    by_method = {row["method"]: row for row in rows}
    assert len(rows) == len(by_method) == 10
    for method in methods:
        found = json.loads(
            (tmp_path / "out" / CASE.name / method.replace(" ", "-") / "found.json").read_text()
        )
        assert by_method[method]["placement"] == found["placement"]
        assert int(by_method[method]["trials"]) == found["trials"] >= 0
    problem = problem_of(CASE, GRAPH)
    trials = read_trials(tmp_path / "out" / CASE.name / "references.jsonl", problem)
    assert {trial.placer for trial in trials} == {"single", "expert", "heft"}
    assert int(by_method["local-search"]["trials"]) > 0
    found_seconds = min(float(by_method[method]["step_seconds"]) for method in methods)
    assert found_seconds <= float(by_method["expert"]["step_seconds"])

    # Another call has nothing to do.
    runs = len(machine)
    assert paper_gpu.run_cases(more) == 0
    assert len(machine) == runs
    assert not (tmp_path / "out" / "faults.csv").exists()

    analysis = read_csv(tmp_path / "out" / "analysis.csv")
    assert {row["device"] for row in analysis} == {"cpu:0", "gpu:0/part:0", "gpu:0/part:1"}
    assert sum(float(row["compute_seconds"]) for row in analysis) > 0
    assert any(float(row["copy_seconds"]) > 0 for row in analysis)
    training = read_csv(tmp_path / "out" / "training.csv")
    ways = {(row["placement"], row["run"]) for row in training}
    # The expert's twice: how far two runs of one placement are apart is what others are held to.
    assert {("expert", "0"), ("expert", "1")} < ways
    assert len(training) == 5 * len(ways)
    curves = read_csv(tmp_path / "out" / "runs_of_searches.csv")
    for method in methods:
        mine = [row for row in curves if row["method"] == method]
        assert len(mine) <= paper_gpu.CURVE_ROWS
        real_runs = int(by_method[method]["trials"])
        assert [int(row["trial"]) for row in mine[-1:]] == ([real_runs] if real_runs else [])
    for table, file in (
        (gpu_tables.main_table, "paper_gpu"), (gpu_tables.details_table, "paper_gpu"),
        (gpu_tables.rewards_table, "runs_of_searches"), (gpu_tables.analysis_table, "analysis"),
        (gpu_tables.training_table, "training"), (gpu_tables.where_table, "where"),
    ):  # fmt: skip
        text = table(read_csv(tmp_path / "out" / f"{file}.csv"))
        assert "nmt, 2 GPUs of 8 SMs, fp32" in text


def test_curves_are_thinned_to_what_says_most() -> None:
    rows = [{"trial": number} for number in range(1, 1001)]
    better = [number in (3, 400, 700) for number in range(1, 1001)]
    kept = [row["trial"] for row in paper_gpu.thinned(rows, better, 20)]
    assert kept == sorted(kept)
    assert {1, 3, 400, 700, 1000} <= set(kept)
    assert 15 <= len(kept) <= 20
    # Where there are more of these than may be kept, the last of them.
    kept = [row["trial"] for row in paper_gpu.thinned(rows, [True] * 1000, 4)]
    assert kept == [1, 998, 999, 1000]
    assert paper_gpu.thinned(rows[:4], better, 4) == rows[:4]


def test_small_sizes_are_told_apart() -> None:
    small, paper = Settings(scale="small"), Settings()
    assert paper_gpu.about(CASE, small)["model"] == "nmt small"
    assert paper_gpu.about(CASE, paper)["model"] == "nmt"
    assert paper_gpu.folder_of(CASE, small) != paper_gpu.folder_of(CASE, paper)
    # What Scotch makes of the paper's sizes is no answer of Scotch's for the small ones.
    assert paper_gpu.prepared_of(CASE, small) != paper_gpu.prepared_of(CASE, paper)


def test_what_was_found_in_a_short_time_is_measured_and_written(
    machine: list[SimulatedRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is up in the middle of the second search."""
    left = {"seconds": 100.0}
    monkeypatch.setattr(paper_gpu.Clock, "left", property(lambda clock: left["seconds"]))
    search = paper_gpu.Bench.search

    def searched(bench: paper_gpu.Bench, name: str, keep_seconds: float) -> paper_gpu.Found:
        if name == "reinforce":
            left["seconds"] = keep_seconds - 1e-6
        return search(bench, name, keep_seconds)

    monkeypatch.setattr(paper_gpu.Bench, "search", searched)
    settings = Settings(
        output=tmp_path / "out", tables=tmp_path / "tables", prepared=tmp_path / "prepared",
        cases=(CASE,), search_seconds=1.0, methods=("local-search", "reinforce", "ppo"),
    )  # fmt: skip
    assert paper_gpu.run_cases(settings) == MORE
    assert {path.suffix for path in (tmp_path / "tables").iterdir()} == {".csv"}
    by_method = {row["method"]: row for row in read_csv(tmp_path / "tables" / "paper_gpu.csv")}
    assert list(by_method)[-1] == "local-search"
    assert float(by_method["local-search"]["half_width_seconds"]) > 0
    assert read_csv(tmp_path / "tables" / "where.csv")[0]["complete"] == "False"
    assert read_csv(tmp_path / "tables" / "runs_of_searches.csv")
    assert not (tmp_path / "tables" / "faults.csv").exists()

    # With more time it goes on.
    left["seconds"] = 100.0
    monkeypatch.setattr(paper_gpu.Bench, "search", search)
    assert paper_gpu.run_cases(settings) == 0
    rows = read_csv(tmp_path / "tables" / "paper_gpu.csv")
    assert [row["method"] for row in rows][-3:] == ["local-search", "reinforce", "ppo"]


def test_no_case_is_begun_that_there_is_no_time_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: list[SimulatedRunner]
) -> None:
    begun = []

    def run(case: Case, program: object, settings: Settings, clock: paper_gpu.Clock) -> None:
        begun.append(case)
        clock.besides = 90.0

    monkeypatch.setattr(paper_gpu, "run_case", run)
    cases = (CASE, Case(model="rnnlm", machine="paper", partitions=2))
    settings = Settings(output=tmp_path, cases=cases, seconds=95.0, search_seconds=10.0)
    assert paper_gpu.run_cases(settings) == MORE
    assert begun == [CASE]


def test_tables_of_another_run_take_the_place_of_the_same_cases(tmp_path: Path) -> None:
    def row(model: str, **more: object) -> dict[str, object]:
        return {"model": model, "machine": "paper", "partitions": 4, **more}

    here, there = tmp_path / "here", tmp_path / "there"
    write_csv(here / "paper_gpu.csv", [row("nmt", method="heft"), row("rnnlm", method="heft")])
    write_csv(here / "analysis.csv", [row("nmt", device="cpu:0")])
    write_csv(there / "paper_gpu.csv", [row("nmt", method="ppo")])
    write_csv(there / "where.csv", [row("nmt", gpu="one")])
    settings = Settings(output=here)
    paper_gpu.take(settings, there)
    rows = read_csv(here / "paper_gpu.csv")
    assert [(r["model"], r["method"]) for r in rows] == [("rnnlm", "heft"), ("nmt", "ppo")]
    assert [r["gpu"] for r in read_csv(here / "where.csv")] == ["one"]
    # What was looked at before was on another machine.
    assert not (here / "analysis.csv").exists()


def test_losses_are_held_to_two_runs_of_one_placement() -> None:
    rows = [
        {"model": "nmt", "machine": "paper", "partitions": "2", "placement": who, "run": run,
         "step": str(step), "seconds": str(0.5 * step), "loss": str(loss)}
        for who, run, losses in (
            ("auto", "0", (2.0, 1.0)), ("expert", "0", (2.0, 1.1)), ("expert", "1", (2.0, 1.0)),
        )
        for step, loss in enumerate(losses)
    ]  # fmt: skip
    text = gpu_tables.training_table(rows)
    assert "| auto | 2 | 0.50 | 500.0 | 2.0000 | 1.0000 |" in text
    assert "| expert, again | 2 |" in text
    assert "under both placements they are 0 of the loss apart at the first step and 0.1 at" in text
    assert "of two runs of expert they are 0 of the loss apart at the first step and 0.1 at" in text


def test_a_fault_is_written_down_and_the_next_case_is_run(
    machine: list[SimulatedRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def broken(case: Case, *more: object) -> None:
        tried.append(case)
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(paper_gpu, "run_case", broken)
    cases = (CASE, Case(model="rnnlm", machine="paper", partitions=2))
    assert paper_gpu.run_cases(Settings(output=tmp_path, cases=cases, search_seconds=1.0)) == 1
    assert tried == list(cases)
    assert len(read_csv(tmp_path / "faults.csv")) == 2


def test_cases_begin_with_the_most_important() -> None:
    assert [case.name for case in IN_ORDER[:3]] == [
        "nmt-paper-4", "inception_v3-paper-4", "rnnlm-paper-4",
    ]  # fmt: skip
    assert len(IN_ORDER) == 12
    assert Case.of("inception_v3-modern-2") == Case(
        model="inception_v3", machine="modern", partitions=2
    )
    with pytest.raises(SystemExit, match="expected MODEL-MACHINE-PARTITIONS"):
        Case.of("nmt-k80-2")


def test_nmt_needs_more_memory_than_a_partition_has() -> None:
    problem = problem_of(CASE, GRAPH)
    assert problem.cluster.device_names == ("cpu:0", "gpu:0/part:0", "gpu:0/part:1")
    single = everything_on(problem, 1)
    assert not Simulator(problem).run(single.devices[None]).ok[0]
    other = problem_of(Case(model="rnnlm", machine="modern", partitions=4), GRAPH)
    assert len(other.cluster.devices) == 5
    single = everything_on(other, 1)
    assert Simulator(other).run(single.devices[None]).ok[0]


def test_what_was_prepared_is_found_by_names(tmp_path: Path) -> None:
    problem = problem_of(CASE, GRAPH)
    names, devices = problem.grouping.names, problem.cluster.device_names
    where = {name: devices[1 + number % 2] for number, name in enumerate(names)}
    del where[names[5]]  # another version of torch calls it otherwise
    document = {"costs": "estimated", "placements": {"scotch": where}}
    path = tmp_path / "case.json"
    path.write_text(json.dumps(document))
    found = gpu_cases.prepared(path, problem)
    expected = [1 + number % 2 for number in range(len(names))]
    expected[5] = expected[4]
    assert found["scotch"].placement.devices.tolist() == expected
    assert found["scotch"].costs == "estimated, prepared"
    assert gpu_cases.prepared(tmp_path / "none.json", problem) == {}


def test_copies_count_for_both_devices() -> None:
    trace = Trace(
        op_seconds={"a": 0.5, "b (odd)": 0.25},
        device_of={"a": 1, "b (odd)": 2},
        transfers=(Transfer("a (gpu:0/part:0 -> gpu:0/part:1)", 4, 0.125),),
        step_seconds=(1.0,),
    )
    run = Run(measurement=Measurement(outcome=Outcome.OK, step_seconds=(1.0,)), trace=trace)
    names = ("cpu:0", "gpu:0/part:0", "gpu:0/part:1")
    assert paper_gpu.busy_seconds(run, names) == ([0.0, 0.5, 0.25], [0.0, 0.125, 0.125])
