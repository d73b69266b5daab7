from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import claims, costs, figures, measured, paper, placers, tables
from benchmarks.common import (
    Point,
    add_csv,
    first_within,
    markdown,
    merge_csv,
    read_csv,
    side_by_side,
)
from placewright.backends import RunConfig
from placewright.budget import Budget
from placewright.cluster import Cluster
from placewright.placement import Placement
from placewright.problem import make_problem
from placewright.session.config import RoundsConfig
from placewright.testing import tiny_problems

# --- what they have in common --------------------------------------------------------------------


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
    with pytest.raises(SystemExit, match="has other columns"):
        add_csv(path, {"model": "a", "y": "4"})
    assert path.read_text().split() == ["model,x", "b,3", "a,4"]
    merge_csv(path, [{"model": "a", "x": 4}, {"model": "a", "x": 5}], "model", "x")
    add_csv(path, {"model": "c", "x": 6})
    assert path.read_text().split() == ["model,x", "b,3", "a,4", "a,5", "c,6"]


def test_a_table_is_markdown() -> None:
    assert markdown(["a", "b"], [["x", 1]]) == "| a | b |\n|---|---:|\n| x | 1 |"


def test_a_claim_that_vanishes_without_overhead_is_listed_unless_its_answer_says_so() -> None:
    def row(speed_up: float, left: float, said: str = "") -> dict[str, Any]:
        numbers = {"speed_up": speed_up, "without_overhead": left}
        return {"model": "m", "cluster": "c", "said": said, **numbers}

    honest = [row(1.5, 1.4), row(1.5, 1.02, "yes"), row(1.05, 1.0), row(1.0, 1.0)]
    assert claims.unsaid(honest) == []
    silent = row(1.5, 1.02)
    assert claims.unsaid([*honest, silent]) == [silent]
    assert claims.verdict([*honest, silent]).endswith("no word of it: m on c.")


def test_cases_run_in_other_processes_with_one_thread() -> None:
    before = os.environ.get("NUMBA_NUM_THREADS")
    made = list(side_by_side(os.getenv, ["NUMBA_NUM_THREADS", "OMP_NUM_THREADS"], 1))
    assert made == ["1", "1"]
    processes = set(side_by_side(os.path.realpath, ["/proc/self"] * 2, 2))
    assert os.path.realpath("/proc/self") not in processes
    assert os.environ.get("NUMBA_NUM_THREADS") == before


def test_a_gain_says_how_much_hangs_on_the_seeds() -> None:
    assert placers.gain_text([1.1], [1.0]) == "+10.00%"
    assert placers.gain_text([1.0, 1.0], [1.0, 1.0]) == "+0.00% ± 0.00"
    # The first mean is off by about 0.7 / sqrt(2), the second by nothing.
    assert placers.gain_text([0.5, 1.5], [1.0, 1.0]) == "+0.00% ± 50.00"


def test_when_a_search_was_within_two_percent() -> None:
    curve = [Point(10, 1.0, 2.0), Point(20, 2.0, 1.02), Point(30, 3.0, 1.0)]
    assert first_within(curve, 1.0) == curve[1]
    assert first_within(curve, 0.9) is None


# --- real runs -----------------------------------------------------------------------------------


def test_how_many_runs_an_answer_needed() -> None:
    problem = tiny_problems()[0].problem
    groups = problem.num_groups
    a, b, c = (Placement.of(problem, [d] + [0] * (groups - 1)) for d in (0, 1, 0))
    assert a == c
    tried = [(b, 2.0), (a, 1.5), (b, 1.01), (a, 1.0), (a, 0.9)]
    assert measured.runs_needed(a, tried) == 3
    assert measured.runs_needed(b, tried) == 3
    assert measured.runs_needed(b, [(b, 2.0), (b, 2.5)]) == 1


def test_answers_are_measured_side_by_side() -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("torch")
    from placewright.backends.tensorflow.runner import TensorFlowRunner
    from tests.towers import towers

    program = towers()
    problem = make_problem(program.graph, Cluster.load("cpu2"))
    with TensorFlowRunner(program, problem.cluster, RunConfig(steps=3, max_steps=3)) as runner:
        found = measured.compare(
            problem,
            runner,
            Budget(trials=9),
            Budget(trials=9),
            2,
            classical=("single", "expert"),
            config=RoundsConfig(finalists=1, final_rounds=1, simulate_seconds=0.5),
        )
    rows = [{"model": "towers", **row} for row in found]
    methods = [row["method"] for row in rows]
    assert methods == ["simulate+measure", "reinforce, measured", "single", "expert"]
    for row in rows:
        assert 1 <= row["runs_to_2_percent"] <= row["runs"] <= 9
        assert row["half_width_seconds"] > 0
        assert len(row["placement"]) == problem.num_groups
    assert rows[0]["times_ours"] == 1.0
    assert measured.answers_table(rows).count("\n") == 5


# --- the paper -----------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> paper.Settings:
    """Everything as small as it can be."""
    return paper.Settings(
        models=("inception_v3",),
        clusters=("k80x4",),
        scale="small",
        seeds=(0,),
        trials=40,
        seconds=8.0,
        scaling_seconds=0.3,
        scaling_ops=(60,),
        scaling_groups=(6, 12),
        link_factors=(1, 1000),
        link_seconds=2.0,
        results=tmp_path,
    )


def test_the_parts_that_are_simulated(
    settings: paper.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for needed in ("tensorflow", "torch", "pyscotch", "pymetis", "scipy", "ortools"):
        pytest.importorskip(needed)
    monkeypatch.setattr(paper, "side_by_side", lambda function, cases, jobs: map(function, cases))
    for part in ("analysis", "cost"):
        with pytest.raises(SystemExit, match=r"no simulated\.csv"):
            paper.run_part(part, settings)
    for part in ("simulated", "analysis", "cost", "links"):
        paper.run_part(part, settings)
    rows = read_csv(settings.folder / "simulated.csv")
    assert [row["method"] for row in rows] == list(paper.COLUMNS)
    by_method = {row["method"]: row for row in rows}
    assert by_method["reinforce"]["trials"] == by_method["ppo"]["trials"] == "40"
    assert by_method["reinforce"]["paper_seconds"] == "3.85"
    assert 0 < float(by_method["reinforce"]["policy_largest_share"]) <= 1
    best = min(float(row["step_seconds"]) for row in rows)
    assert float(by_method["auto"]["step_seconds"]) <= 1.02 * best
    assert set(by_method["cpu only"]["placement"]) == {"0"}
    loads = read_csv(settings.folder / "analysis.csv")
    assert [row["device"] for row in loads[:5]] == ["cpu:0", "gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert {row["placement"] for row in loads} >= {"expert"}
    for row in loads:
        busy = float(row["compute_seconds"]) + float(row["idle_seconds"])
        assert busy == pytest.approx(float(row["step_seconds"]))
    costs = read_csv(settings.folder / "cost.csv")
    assert [row["method"] for row in costs] == ["reinforce", "ppo", "auto"]
    assert {float(row["best_known_seconds"]) for row in costs} == {best}
    assert float(costs[-1]["seconds_to_2_percent"]) <= float(costs[-1]["search_seconds"])
    sizes = read_csv(settings.folder / "scaling.csv")
    assert len(sizes) == 2
    assert {row["ops"] for row in sizes} == {"60"}
    ran = read_csv(settings.folder / "runs.csv")
    assert [row["part"] for row in ran] == ["simulated", "analysis", "cost", "links"]
    # With links slow enough nothing is better than to send nothing.
    links = read_csv(settings.folder / "links.csv")
    alone, best = (float(links[-1][f"{name}_seconds"]) for name in ("one_gpu", "best"))
    assert alone == best < float(links[-1]["expert_seconds"])
    assert "from links 1000 times as slow on" in paper.links_table(links)
    # One column anew: the others stay, and how long the whole took is still known.
    paper.run_part("simulated", replace(settings, methods=("auto",), seconds=1.0))
    again = {row["method"]: row for row in read_csv(settings.folder / "simulated.csv")}
    assert list(again) == list(paper.COLUMNS)
    assert float(again["auto"]["search_seconds"]) < float(by_method["auto"]["search_seconds"])
    assert [again[name] for name in paper.LEARNERS] == [by_method[n] for n in paper.LEARNERS]
    noted = read_csv(settings.folder / "runs.csv")
    assert noted[:-1] == ran
    assert noted[-1]["part"] == "simulated: auto"
    whole = sum(float(row["seconds"]) for row in ran) / 60
    assert f"{whole:.1f} minutes for all parts" in paper.runs_table(noted)
    paper.report(settings)
    path = settings.folder / "README.md"
    page = path.read_text(encoding="utf-8")
    assert page == tables.updated(path, settings.results)
    assert "| inception_v3 k80x4 | here |" in page
    assert "no `benchmarks/results/paper/training.csv`" in page


def row_of(case: tuple[str, str], method: str, seconds: float | str) -> dict[str, Any]:
    ok = isinstance(seconds, float)
    gpus = int(case[1][-1])
    return {
        "model": case[0],
        "cluster": case[1],
        "method": method,
        "seed": "0",
        "step_seconds": str(seconds) if ok else "",
        "outcome": "ok" if ok else seconds,
        "peak_gb": " ".join(["1.0"] * (gpus + 1)),
        "trials": "10",
        "search_seconds": "1.0",
        "lower_bound_seconds": "0.5",
        "policy_largest_share": ("0.300" if case[0] == "nmt" else "1.000")
        if method == "reinforce"
        else "",
        "policy_seconds": str(seconds) if ok and method == "reinforce" else "",
        "placement": "".join(str(device) for device in range(gpus + 1)),
    }


def rows_of(numbers: Mapping[tuple[str, str], Mapping[str, float | str]]) -> list[dict[str, Any]]:
    return [
        row_of(case, method, found.get(method, found["reinforce"]))
        for case, found in numbers.items()
        for method in paper.COLUMNS
    ]


def test_the_paper_agrees_with_itself() -> None:
    text = paper.agreement(rows_of(paper.PAPER))
    assert "**Differs.**" not in text
    assert text.count("**Agrees.**") == 15
    assert "NMT does not fit one GPU in the paper; here: out of memory on k80x2, " in text
    table = paper.simulated_table(rows_of(paper.PAPER))
    here = [line for line in table.splitlines() if "| here |" in line]
    assert [line.split("|")[-2].strip() for line in here] == ["0%", "0%", "24%", "21%", "0%", "19%"]


def test_what_differs_is_said() -> None:
    numbers: dict[tuple[str, str], dict[str, float | str]] = {
        case: dict(found) for case, found in paper.PAPER.items()
    }
    numbers["rnnlm", "k80x2"] |= {"auto": 1.0, "ppo": 1.1}  # splitting pays
    numbers["nmt", "k80x4"] |= {"one gpu": 2.0, "scotch": 4.0}  # it fits, and beats all
    differs = [
        line for line in paper.agreement(rows_of(numbers)).splitlines() if "**Differs.**" in line
    ]
    assert len(differs) == 6
    assert "RNNLM on k80x2: in the paper one GPU is best. Here one GPU takes 1.570 s" in differs[0]
    assert "here: out of memory on k80x2, ok on k80x4" in differs[1]
    assert "here in 5 of 6 (not in nmt k80x4)" in differs[2]
    assert "not here: `ppo` in nmt k80x4, `auto` in nmt k80x4" in differs[3]
    assert "one of the first five columns is better in nmt k80x4" in differs[4]


def test_a_search_that_is_not_near_the_best_says_so() -> None:
    case = ("rnnlm", "k80x2")
    rows = [row for row in rows_of(paper.PAPER) if (row["model"], row["cluster"]) == case]
    curves = [
        {"model": "rnnlm", "cluster": "k80x2", "method": method, "seed": "0", "trials": "7",
         "seconds": "0.5", "step_seconds": seconds}
        for method, seconds in (("auto", "1.57"), ("reinforce", "1.9"))
    ]  # fmt: skip
    table = paper.cost_table(paper.cost_rows(rows, curves))
    assert "| 0.5 (7) | not in 1 s (10) | not in 1 s (10) |" in table
    assert paper.PAPER_COST in table


@pytest.mark.parametrize(
    ("other", "words"), [(2.0, "to the last bit"), (2.002, "by 0.001 of the loss at most")]
)
def test_how_equal_losses_are_is_said(other: float, words: str) -> None:
    rows = [
        {"model": "a", "placement": name, "run": run, "step": step, "loss": loss,
         "seconds": step * each}
        for name, each, losses in (("ours", 0.1, (4.0, 2.0)), ("expert", 0.2, (4.0, other)))
        for run in (0, 1)
        for step, loss in enumerate(losses)
    ]  # fmt: skip
    table = paper.training_table(rows)
    assert words in table
    assert "| a, ours | 2 | 0.10 and 0.10 | 100.0 | 4.0000 | 2.0000 |" in table


def test_parts_are_run_in_their_order() -> None:
    assert paper.options([])[0] == [*paper.PARTS, "report"]
    parts, settings = paper.options(
        ["cost", "simulated", "--seeds", "3", "4", "--seconds", "1.5", "--results", "x"]
    )
    assert parts == ["simulated", "cost"]
    assert settings == paper.Settings(seeds=(3, 4), seconds=1.5, results=Path("x"))
    with pytest.raises(SystemExit):
        paper.options(["simulatd"])


# --- figures -------------------------------------------------------------------------------------


def test_figures_are_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seconds = {"predicted_seconds": "1.0", "first_seconds": "1.1", "second_seconds": ""}
    predictions = [{"model": "a", "kind": kind, **seconds} for kind in ("groups", "heft")]
    losses = [
        {"model": "a", "placement": name, "run": 0, "step": step, "loss": 1.0 / (1 + step),
         "seconds": step}
        for name in ("ours", "expert")
        for step in range(3)
    ]  # fmt: skip
    curves = [
        {"model": "a", "cluster": "c", "seed": "0", "seconds": s, "above_best_known": 1 / (1 + s)}
        for s in range(3)
    ]
    for name in ("first", "second"):
        figures.fidelity(predictions, tmp_path / name / "fidelity.svg")
        figures.training(losses, tmp_path / name / "training.svg")
        figures.search_cost(curves, tmp_path / name / "cost.svg")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
        assert b"<svg" in path.read_bytes()


def test_without_matplotlib_there_are_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    figures.training([], tmp_path / "training.svg")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# --- the cost model ------------------------------------------------------------------------------


def test_the_cost_model_against_a_real_step(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("tensorflow")
    monkeypatch.setattr(costs, "RESULTS", tmp_path)
    step, types = costs.audit("autoencoder", config=RunConfig(steps=3, max_steps=3))
    assert step["runs"] == step["ops"] > 300
    assert step["measured_seconds"] > 0
    assert sum(row["share"] for row in types) == pytest.approx(1, abs=0.01)
    products = next(row for row in types if row["type"] == "MatMul")
    assert products["work"] == "matmul"
    assert products["traced_seconds"] > 0
    costs.write([step], types)
    page = (tmp_path / "README.md").read_text()
    assert "| autoencoder | MatMul | matmul |" in page
    assert "Wanted: every step within a factor of 2" in page


def test_a_type_of_op_is_wrong_where_it_is_far_off_and_counts() -> None:
    def row(predicted: float, share: float) -> dict[str, Any]:
        return {"predicted_seconds": predicted, "traced_seconds": 1.0, "share": share}

    rows = [row(3.5, 0.1), row(2.5, 0.1), row(0.3, 0.1), row(0.1, 0.01)]
    assert costs.wrong_types(rows) == [rows[0], rows[2]]
