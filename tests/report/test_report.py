from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placewright import (
    Cluster,
    Edge,
    Graph,
    Op,
    Placement,
    Problem,
    ProblemConfig,
    Tensor,
    make_problem,
    place,
)
from placewright.budget import Budget
from placewright.calibration import Calibration
from placewright.errors import ReportError, SearchError
from placewright.graph import frozen
from placewright.report import analysis, explain, read_run, write_report
from placewright.report.what_if import what_ifs
from placewright.report.words import answer, basis
from placewright.simulator import Simulator
from placewright.testing import layered_graph, random_problem, uniform_cluster
from tests.report.conftest import EVIL

SHORT = Budget(trials=50)


def embedded(path: Path) -> Any:
    """The data of a page, found as a browser finds it: up to the first </script>."""
    page = path.read_text()
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_the_page_stands_alone_and_its_data_is_whole(run_directory: Path, tmp_path: Path) -> None:
    path = write_report(run_directory, tmp_path / "r.html", what_if=SHORT)
    page = path.read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert EVIL not in page
    document = embedded(path)
    (graph,) = document["graphs"].values()
    assert any(EVIL in name for name in graph["names"])
    (run,) = document["runs"]
    assert run["step"] == pytest.approx(0.031, rel=0.05)
    assert [line["placer"] for line in run["progress"]][:2] == ["single", "expert"]
    assert run["metrics"][0]["update"] == list(range(1, 20))  # the torn line is left out
    assert len(run["whatIfs"]) == 4
    assert run["origin"][0][0] == "command"


def test_the_answer_is_one_sentence(run_directory: Path) -> None:
    text = answer(read_run(run_directory))
    assert text.count(". ") == 0
    for part in ("ms", "the best single device (gpu:0)", "expert", "left to gain", "to spare"):
        assert part in text


def test_explanation_names_devices_parallelism_and_transfers(run_directory: Path) -> None:
    sections = dict(explain(read_run(run_directory)))
    assert list(sections)[:6] == [
        "The answer",
        "Where the groups sit",
        "What the step is made of",
        "What runs at the same time",
        "What is sent",
        "What the step waits for",
    ]
    assert any(line.startswith("gpu:1:") for line in sections["Where the groups sit"])
    assert "2.0 of the" in sections["What runs at the same time"][0]
    assert "transfer" in sections["What is sent"][0]


@pytest.mark.filterwarnings("error")
def test_a_model_that_costs_nothing(tmp_path: Path) -> None:
    ops = [Op(name=name, type="NoOp", outputs=(Tensor(4),), seconds={"dev": 0.0}) for name in "abc"]
    graph = Graph.from_ops("free", ops, [Edge("a", "b"), Edge("a", "c")])
    posed = make_problem(graph, uniform_cluster(2))
    for name, methods in (("one", "single,expert,random"), ("other", "random")):
        place(posed, method=methods, trials=30, directory=tmp_path / name)
    for directories in (["one"], ["one", "other"]):
        write_report([str(tmp_path / d) for d in directories], tmp_path / "page.html")
    run = read_run(tmp_path / "one")
    assert run.ok
    assert run.summary["step_seconds"] == 0.0
    text = " ".join(line for section in explain(run) for line in section.lines)
    assert "0.0 devices compute at a time" in text or "expert's placement" in text
    different = [Placement.of(posed, [0, 0, 0]), Placement.of(posed, [0, 1, 1])]
    for placement in different:
        assert analysis.mean_computing(Simulator(posed).timeline(placement)) == 0.0


def test_explanation_of_what_does_not_fit(failed_run: Path) -> None:
    run = read_run(failed_run)
    assert not run.ok
    text = "\n".join(line for section in explain(run) for line in section.lines)
    assert "No placement of too large on k80x2 ran; 1 placement tried." in text
    assert "gpu:0 would need 18 GB of 12 GB: 18 GB of variables" in text
    data = embedded(write_report(failed_run, what_if=SHORT))["runs"][0]
    assert data["step"] is None
    assert data["whatIfs"] == []
    assert data["memory"]


def test_a_killed_run_is_reported_from_its_journal(run_directory: Path, tmp_path: Path) -> None:
    for name in ("problem.json.gz", "journal.jsonl"):
        (tmp_path / name).write_bytes((run_directory / name).read_bytes())
    with (tmp_path / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"placement": "01')  # what a kill leaves
    whole, killed = read_run(run_directory), read_run(tmp_path)
    assert killed.summary["step_seconds"] == whole.summary["step_seconds"]
    assert killed.summary["trials"] == whole.summary["trials"]
    # What heft proposed had been tried before, so no line is its own.
    methods = {row["method"] for row in killed.summary["methods"]}
    assert methods == {"single", "expert", "random", "local-search"}


def test_a_result_saved_without_a_journal(problem: Problem, tmp_path: Path) -> None:
    result = place(problem, method="heft")
    result.save(tmp_path / "out")
    run = read_run(tmp_path / "out")
    assert run.best is not None
    assert run.best.placement == result.placement
    assert run.expert is not None  # worked out, as nobody tried it
    data = embedded(write_report(tmp_path / "out", what_if=None))["runs"][0]
    assert data["expertLoad"]
    assert data["progress"] == []


def test_measured_times_have_no_bound(run_directory: Path, tmp_path: Path) -> None:
    for name in ("problem.json.gz", "journal.jsonl", "placement.json"):
        (tmp_path / name).write_bytes((run_directory / name).read_bytes())
    summary = json.loads((run_directory / "summary.json").read_text())
    measured = {
        "measured": True, "step_seconds": 0.05, "lower_bound_seconds": 0.0,
        "half_width_seconds": 0.002,
        "comparisons": [{"method": "expert", "ratio": 1.25, "half_width": 0.1}],
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps({**summary, **measured}))
    run = read_run(tmp_path)
    # As measured in turns.
    assert "1.25 times as fast as the expert's placement (± 0.10)" in answer(run)
    assert "takes 50.00 ms (measured, 95% within ± 2.00 ms)" in answer(run)
    assert run.best is not None
    assert run.best.measurement.mean_seconds == 0.05  # not the journal's
    assert "50.00 ms" in answer(run)
    assert "left to gain" not in answer(run)
    # Of several devices that are equal, the one that was in the final.
    (single,) = (row for row in run.summary["methods"] if row["method"] == "single")
    single["main_device"] = run.problem.cluster.device_names[2]
    assert "the best single device (gpu:1)" in answer(run)
    data = embedded(write_report(tmp_path, what_if=None))["runs"][0]
    assert data["measured"]
    assert all(tile["label"] != "left to gain" for tile in data["tiles"])


def _as_if_measured(run_directory: Path, folder: Path, *names: str) -> None:
    for name in ("problem.json.gz", "journal.jsonl", *names):
        (folder / name).write_bytes((run_directory / name).read_bytes())
    (folder / "run.json").write_text('{"evaluate": "simulate+measure"}')
    summary = json.loads((run_directory / "summary.json").read_text())
    measured = {"measured": True, "step_seconds": 0.05, "lower_bound_seconds": 0.0}
    (folder / "summary.json").write_text(json.dumps({**summary, **measured}))


def _calibration(problem: Problem) -> Calibration:
    """Ops take twice as long as was thought, and links are ten times as slow."""
    costs = dataclasses.replace(problem.costs, op_seconds=frozen(2 * problem.costs.op_seconds))
    links = tuple(
        dataclasses.replace(link, bandwidth=0.1 * link.bandwidth) for link in problem.cluster.links
    )
    return Calibration(table=costs, cluster=dataclasses.replace(problem.cluster, links=links))


def test_a_measured_run_is_drawn_under_the_costs_it_found(
    run_directory: Path, problem: Problem, tmp_path: Path
) -> None:
    _as_if_measured(run_directory, tmp_path, "placement.json")
    calibration = _calibration(problem)
    calibration.save(tmp_path / "costs.json", problem.graph)
    run = read_run(tmp_path)
    under = calibration.problem(problem)
    assert run.calibrated
    assert run.under == under
    assert run.problem == problem
    assert run.best is not None
    assert run.timeline is not None
    predicted = Simulator(under).run(run.best.placement.devices[np.newaxis]).step_seconds[0]
    assert run.timeline.step_seconds == pytest.approx(predicted)
    assert predicted > 0.06
    said = basis(run)
    assert "under costs calibrated to this machine by the run" in said
    assert f"they predict {1e3 * predicted:.2f} ms for this placement, measured 50.00 ms (+" in said
    assert explain(run)[0].lines == (answer(run), said)
    data = embedded(write_report(tmp_path, what_if=SHORT))["runs"][0]
    assert data["basis"] == said
    assert data["gantt"]["step"] == pytest.approx(predicted)
    assert data["whatIfs"][0]["same"] == pytest.approx(predicted)
    busy = Simulator(under).timeline(Placement.of(under, run.best.placement.devices)).busy_seconds
    assert sum(load[0] for load in data["load"]) == pytest.approx(
        sum(
            seconds / device.kind.slots
            for seconds, device in zip(busy, under.cluster.devices, strict=True)
        )
    )


def test_a_measured_run_without_a_calibration_says_so(run_directory: Path, tmp_path: Path) -> None:
    _as_if_measured(run_directory, tmp_path, "placement.json")
    run = read_run(tmp_path)
    assert not run.calibrated
    # The graph of this run brings times of its own.
    assert "under the costs the run was given, which it did not correct" in basis(run)
    estimated = make_problem(layered_graph(40, 4), Cluster.load("k80x2"), ProblemConfig(groups=6))
    result = dataclasses.replace(place(estimated, method="single"), evaluate="measure")
    result.save(tmp_path / "estimated")
    assert "estimated costs, which were not fitted" in basis(read_run(tmp_path / "estimated"))


def test_a_simulated_run_is_drawn_under_its_own_costs(
    run_directory: Path, problem: Problem, tmp_path: Path
) -> None:
    for name in ("problem.json.gz", "journal.jsonl", "summary.json", "placement.json"):
        (tmp_path / name).write_bytes((run_directory / name).read_bytes())
    _calibration(problem).save(tmp_path / "costs.json", problem.graph)  # somebody's
    run = read_run(tmp_path)
    assert not run.calibrated
    assert "All times are simulated, under costs that were given" in basis(run)


def test_a_killed_measured_run_has_no_bound_and_its_costs(
    run_directory: Path, problem: Problem, tmp_path: Path
) -> None:
    _as_if_measured(run_directory, tmp_path)
    (tmp_path / "summary.json").unlink()
    _calibration(problem).save(tmp_path / "costs.json", problem.graph)
    run = read_run(tmp_path)
    assert run.measured
    assert run.calibrated
    assert run.summary["lower_bound_seconds"] == 0.0


def test_directories_that_hold_no_run(
    run_directory: Path, problem: Problem, tmp_path: Path
) -> None:
    with pytest.raises(ReportError, match="no such directory"):
        read_run(tmp_path / "none")
    with pytest.raises(ReportError, match=r"holds no run \(problem.json.gz is missing\)"):
        read_run(tmp_path)
    content = (run_directory / "problem.json.gz").read_bytes()
    (tmp_path / "problem.json.gz").write_bytes(content)
    with pytest.raises(ReportError, match="neither a summary"):
        read_run(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ReportError, match="not a summary"):
        read_run(tmp_path)
    summary = json.loads((run_directory / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "space": "other"}))
    with pytest.raises(ReportError, match="two runs mixed"):
        read_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "journal.jsonl").write_text('{"placer": 3}\n{}\n')
    with pytest.raises(SearchError, match="line 1"):
        read_run(tmp_path)
    (tmp_path / "problem.json.gz").write_bytes(content[:-20])
    with pytest.raises(Exception, match="damaged gzip file"):
        read_run(tmp_path)
    with pytest.raises(ReportError, match="not 3"):
        write_report([run_directory] * 3)


def test_equal_problems_are_equal_files(problem: Problem, tmp_path: Path) -> None:
    problem.save(tmp_path / "a.json.gz")
    problem.save(tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert Problem.load(tmp_path / "a.json.gz") == problem


# --- what-ifs ------------------------------------------------------------------------------------


def test_what_ifs_are_simulated(problem: Problem) -> None:
    """Six equal ops in two chains of 10 ms ops; everything on one GPU to begin with."""
    placement = Placement.of(problem, np.full(problem.num_groups, 1))
    same, links, memory, more = what_ifs(problem, placement, Budget(trials=300))
    assert same.change == "the same machine"
    assert same.same_seconds == pytest.approx(0.061, rel=0.01)
    assert same.step_seconds == pytest.approx(0.031, rel=0.03)
    assert memory.step_seconds == pytest.approx(same.step_seconds, rel=1e-9)
    assert links.same_seconds == pytest.approx(0.061, rel=0.01)  # nothing is sent on one device
    assert links.step_seconds is not None
    assert links.step_seconds < (same.step_seconds or 0)
    assert more.change == "one more tesla-k80"
    assert more.step_seconds is not None


def test_one_more_device_relieves_one_that_is_full() -> None:
    ops = [Op(name=f"op{i}", type="t", seconds={"gpu": 1.0, "cpu": 9.0}) for i in range(3)]
    problem = make_problem(Graph.from_ops("three", ops, []), Cluster.load("k80x2"))
    placement = Placement.of(problem, [1, 2, 1])
    *_, more = what_ifs(problem, placement, Budget(trials=200))
    assert more.same_seconds == pytest.approx(2.0, rel=1e-3)
    assert more.step_seconds == pytest.approx(1.0, rel=1e-3)


# --- numbers behind the charts -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_charts_say_what_the_timeline_says(seed: int) -> None:
    problem = random_problem(seed)
    placement = Placement.of(problem, problem.allowed.argmax(axis=1))
    timeline = Simulator(problem).timeline(placement)
    drawn = analysis.gantt(timeline)
    assert sum(bar.things for bar in drawn.ops) == problem.graph.num_ops
    assert max(bar.end for bar in drawn.ops) <= timeline.step_seconds
    assert drawn.path[-1][2] == pytest.approx(timeline.step_seconds)
    shares = analysis.critical_path_shares(timeline)
    total = shares.device_seconds.sum() + shares.transfer_seconds
    assert total == pytest.approx(timeline.step_seconds)
    busy = analysis.busy_devices(timeline)
    assert busy.sum() == pytest.approx(timeline.step_seconds)
    for device, (_, sizes) in enumerate(analysis.memory_curves(timeline)):
        assert max(sizes) == timeline.peak_bytes[device]
    moved = sum(flow.bytes for flow in analysis.flows(timeline))
    assert moved == timeline.transfers.bytes.sum()
    for load in analysis.loads(timeline):
        assert load.compute_seconds + load.idle_seconds == pytest.approx(timeline.step_seconds)


def test_bars_merge_until_they_are_few() -> None:
    bars = [analysis.Bar(row, i, i + 0.9, i % 7, 1) for row in (0, 1) for i in range(5000)]
    few = analysis.merged(bars, 100, 5000.0)
    assert len(few) <= 100
    assert sum(bar.things for bar in few) == 10_000
    assert {bar.row for bar in few} == {0, 1}
    same = [analysis.Bar(0, i, i + 1, 3, 1) for i in range(50)]
    assert analysis.merged(same, 100, 50.0) == [analysis.Bar(0, 0, 50, 3, 50)]


def test_memory_is_thinned_without_losing_the_peak() -> None:
    problem = make_problem(layered_graph(4000, 20), Cluster.load("k80x2"), ProblemConfig(groups=40))
    placement = Placement.of(problem, [i % 2 + 1 for i in range(40)])
    timeline = Simulator(problem).timeline(placement)
    for device, (seconds, sizes) in enumerate(analysis.memory_curves(timeline)):
        assert len(seconds) == len(sizes) <= 2 * analysis.MOST_MEMORY_POINTS
        assert max(sizes) == timeline.peak_bytes[device]


def test_layers_go_forward_and_do_not_overlap() -> None:
    problem = make_problem(layered_graph(2000, 10), Cluster.load("k80x2"), ProblemConfig(groups=60))
    edges = analysis.traffic(problem)
    layer, height = analysis.layered(problem.num_groups, edges)
    for a, b in zip(edges.source.tolist(), edges.target.tolist(), strict=True):
        assert a > b or layer[a] < layer[b]
    for column in np.unique(layer):
        heights = np.sort(height[layer == column])
        assert np.all(np.diff(heights) > 0.99)


def test_edges_count_a_tensor_once() -> None:
    ops = [
        Op(name="a", type="t", outputs=(Tensor(100), Tensor(7))),
        Op(name="b/1", type="t"),
        Op(name="b/2", type="t"),
    ]
    edges = [Edge("a", "b/1"), Edge("a", "b/2"), Edge("a", "b/2", 1), Edge("a", "b/1", None)]
    graph = Graph.from_ops("g", ops, edges, [("^b/", "b"), ("^a", "a")])
    problem = make_problem(graph, Cluster.load("k80x2"))
    assert problem.grouping.names == ("a", "b")
    found = analysis.traffic(problem)
    assert (found.bytes.tolist(), found.tensors.tolist()) == ([107], [2])


def test_names_of_steps_are_gathered() -> None:
    names = ["lstm_0/step_1", "lstm_0/step_2", "lstm_1/step_1", "softmax"]
    assert analysis.families(names) == [
        ("lstm_0/step_*", 2),
        ("lstm_1/step_1", 1),
        ("softmax", 1),
    ]


def test_without_plotly_the_error_says_what_to_install(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    from placewright.errors import MissingExtraError
    from placewright.report import page

    page._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"placewright\[report\]"):
        write_report(run_directory, tmp_path / "r.html", what_if=None)
