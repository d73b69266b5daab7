"""The search that also places op by op, what every answer is compared with, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placewright.errors import SearchError
from placewright.journal import Journal, read_trials
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.report.run import read_run
from placewright.room import FREE_BYTES_VARIABLE
from placewright.session import op_stage
from placewright.session.config import SearchConfig
from placewright.session.driver import Session
from placewright.session.result import Result
from placewright.session.search import Progress
from placewright.testing import four_accelerators, gpu_boards, layered_graph, timed_layers

METHODS = ("single", "heft", "local-search")


def run(
    problem: Problem, methods: Sequence[str], *, directory: Path | None = None, **settings: Any
) -> Result:
    config = SearchConfig(method=",".join(methods), **settings)
    return Session(problem, config, directory=directory).run()


def layers(ops: int = 1000, groups: int = 30) -> Problem:
    return make_problem(timed_layers(ops, 20), four_accelerators(), ProblemConfig(groups=groups))


def test_the_answer_is_per_op_where_groups_limit_it(tmp_path: Path) -> None:
    problem = layers()
    result = run(problem, METHODS, trials=400, directory=tmp_path, op_level=True)
    result.save(tmp_path)
    assert result.placed is problem.refined
    assert result.trials <= 400
    assert {row["method"] for row in result.table} == {
        "op-heft", "op-m-etf", *METHODS, "op-search",
    }  # fmt: skip
    assert result.gain_over_groups is not None
    assert result.gain_over_groups > 1.2
    assert set(result.placement_by_op()) == set(problem.graph.op_names)
    shown = read_run(tmp_path)
    assert shown.best is not None
    assert shown.best.measurement.mean_seconds == result.step_seconds
    assert shown.timeline is not None
    assert shown.expert_timeline is not None
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["placed_by"] == "op"


def test_the_same_seed_gives_the_same_trials(tmp_path: Path) -> None:
    journals = []
    for name in ("a", "b"):
        run(layers(), METHODS, trials=300, directory=tmp_path / name, op_level=True)
        trials = read_trials(tmp_path / name / "journal.jsonl", layers())
        journals.append([(t.placement, t.measurement, t.placer) for t in trials])
    assert journals[0] == journals[1]


def test_a_run_goes_on_in_both_spaces(tmp_path: Path) -> None:
    problem = layers()
    run(problem, METHODS, trials=200, directory=tmp_path, op_level=True)
    first = (tmp_path / "journal.jsonl").read_bytes()
    best = run(problem, METHODS, trials=400, directory=tmp_path, op_level=True)
    second = (tmp_path / "journal.jsonl").read_bytes()
    assert second.startswith(first)
    problems = {json.loads(line)["space"] for line in second.splitlines()}
    assert problems == {problem.space.fingerprint, problem.refined.space.fingerprint}
    times = [json.loads(line)["at_seconds"] for line in second.splitlines()]
    assert times == sorted(times)
    assert best.trials == len(second.splitlines())


def test_groups_get_less_of_the_budget_the_more_they_cost() -> None:
    shares = [op_stage.share_for_groups(by_groups, 1.0) for by_groups in (0.5, 1.0, 2.0)]
    assert shares == sorted(shares, reverse=True)
    assert op_stage.share_for_groups(float("inf"), float("inf")) == shares[0]


def test_every_answer_has_its_references(tmp_path: Path) -> None:
    problem = make_problem(layered_graph(60, 6), gpu_boards(4), ProblemConfig(groups=20))
    result = run(problem, ["random"], trials=20, directory=tmp_path)
    assert [trial.placer for trial in result.references] == ["single", "heft"]
    assert result.best_single is not None
    assert result.speed_up is not None
    # They are nobody's trials: neither counted, nor recorded, nor told.
    assert result.trials == 20
    placers = {trial.placer for trial in read_trials(tmp_path / "journal.jsonl", problem)}
    assert placers == {"random"}
    own = run(problem, ["heft", "random"], trials=20)
    assert [trial.placer for trial in own.references] == ["single"]


def test_a_proven_optimum_ends_the_search() -> None:
    chain = make_problem(timed_layers(30, 1), four_accelerators(), ProblemConfig(groups=5))
    result = run(chain, ["single", "random", "local-search"], trials=1000)
    assert result.proven
    assert result.gap < 1e-6
    assert result.trials < 10
    reasons = {entry.method: entry.why_not for entry in result.methods}
    assert "proven to be optimal" in reasons["local-search"]


@pytest.mark.parametrize("trials", [1, 2, 5])
def test_a_budget_of_trials_is_for_all_parts(trials: int) -> None:
    assert run(layers(), METHODS, op_level=True, trials=trials).trials <= trials


def test_a_proof_by_groups_is_none_for_single_ops() -> None:
    """It ends the search by groups, and the search op by op may be stopped after that."""
    problem = make_problem(timed_layers(60, 6), four_accelerators(), ProblemConfig(groups=1))
    seen: list[int] = []

    def stop() -> bool:
        return len(seen) > 0

    def observe(progress: Progress) -> None:
        if progress.placer == "single":
            seen.append(progress.trials)

    config = SearchConfig(method="single", trials=50, op_level=True)
    result = Session(problem, config, observe=observe, stop=stop).run()
    assert seen
    assert not result.proven


def test_long_placements_are_short_lines(tmp_path: Path) -> None:
    """What differs from an earlier placement in a few ops takes a few bytes."""
    problem = layers(20_000)
    refined = problem.refined
    rng = np.random.default_rng(0)
    devices = rng.integers(4, size=refined.num_groups).astype(np.int32)
    ok = Measurement(outcome=Outcome.OK, step_seconds=(1.0,))
    placements = []
    for k in range(50):
        if k == 25:  # somewhere else altogether
            devices = rng.integers(4, size=refined.num_groups).astype(np.int32)
        devices = devices.copy()
        devices[rng.integers(refined.num_groups, size=5)] = rng.integers(4, size=5)
        placements.append(Placement.of(refined, devices))
    coarse = Placement.of(problem, np.zeros(problem.num_groups, dtype=np.int32))
    trials = [Trial(placement=p, measurement=ok, placer="p") for p in (*placements, coarse)]
    path = tmp_path / "journal.jsonl"
    with Journal(path, problem) as journal:
        journal.append(trials[:30])
    with Journal(path, problem) as journal:  # one that is continued refers to what is there
        assert len(journal.trials) == 30
        journal.append(trials[30:])
    assert [trial.placement for trial in read_trials(path, problem)] == [*placements, coarse]
    lines = path.read_bytes().splitlines()
    assert sum(map(len, lines)) < 51 * 20_000 / 15
    assert max(map(len, lines)) < 10_000
    # A line that was taken out is missed by those that refer to it.
    path.write_bytes(b"\n".join(lines[1:]) + b"\n")
    with pytest.raises(SearchError):
        read_trials(path, problem)


def test_methods_without_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layers()
    monkeypatch.setenv(FREE_BYTES_VARIABLE, "100000")
    result = run(problem, ["single", "heft"], trials=50, op_level=True)
    reasons = {entry.method: entry.why_not for entry in result.methods}
    assert "it would need some" in reasons["op-heft"]
    assert "of memory" in reasons["op-m-etf"]
    assert result.best is not None


def test_the_policy_is_left_out_where_its_attention_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    problem = layers(1000, groups=1000)
    # Were it not left out, it would take some 400 MB and a while; what counts as free is less.
    monkeypatch.setenv(FREE_BYTES_VARIABLE, "300000000")
    result = run(problem, ["single", "ppo"], trials=50)
    (ppo,) = [entry for entry in result.methods if entry.method == "ppo"]
    assert ppo.trials == 0
    assert ppo.why_not.startswith("left out: it would need some")
