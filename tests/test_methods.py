"""Every method in the registry keeps the promises of `Placer`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placewright import methods, place
from placewright.budget import Budget
from placewright.cluster import Cluster
from placewright.errors import SearchError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Edge, Graph, Op, Tensor
from placewright.learning.config import LearnerConfig
from placewright.placers.base import Placer
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.session import driver
from placewright.session.directory import open_journal
from placewright.session.search import search
from placewright.testing import check_placer, gpu_boards, layered_graph, random_problem


def make(name: str, problem: Problem, seed: int) -> Placer:
    return methods.make([name], problem, seed=seed, seconds=30.0)[0]


@pytest.mark.parametrize("name", methods.METHODS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_contract(name: str, seed: int) -> None:
    check_placer(lambda problem, s: make(name, problem, s), random_problem(seed), count=64)


@pytest.mark.parametrize("name", methods.METHODS)
def test_contract_with_kernels_and_constraints(name: str) -> None:
    ops = [
        Op(
            name=f"layer{i // 4}/op{i}",
            type="MatMul",
            outputs=(Tensor(1_000_000),),
            flops=1e9,
            kernels=("cpu",) if i % 5 == 0 else None,
        )
        for i in range(16)
    ]
    edges = [Edge(f"layer{i // 4}/op{i}", f"layer{j // 4}/op{j}")
             for i in range(16) for j in (i + 1, i + 3) if j < 16]  # fmt: skip
    problem = make_problem(
        Graph.from_ops("restricted", ops, edges),
        Cluster.load("k80x4"),
        ProblemConfig(pins=(("op3$", "gpu:1"),), forbidden_devices=("gpu:2",)),
    )
    check_placer(lambda p, s: make(name, p, s), problem, count=16)


def test_names_are_parsed() -> None:
    assert methods.parse("scotch, heft").names == ("scotch", "heft")
    assert methods.parse("auto") == methods.Chosen(methods.AUTO, frozenset(methods.AUTO))
    assert methods.parse("random,auto").names == ("random", *methods.AUTO)
    assert methods.parse("heft,heft").names == ("heft",)
    with pytest.raises(
        SearchError, match="unknown method 'local-serch'; did you mean local-search"
    ):
        methods.parse("local-serch")


def test_auto_does_without_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names = methods.parse("auto").names
    assert names == tuple(n for n in methods.AUTO if not methods.METHODS[n].needs)
    assert "auto leaves out scotch, mincut, m-sct, exact" in caplog.text
    assert "pip install 'placewright[learning,placers]'" in caplog.text


def test_every_method_has_one_line() -> None:
    for name, method in methods.METHODS.items():
        assert method.summary, name
        assert "\n" not in method.summary


def test_settings_that_fit_only_what_is_chosen_with_them_are_let_through() -> None:
    """Real runs are only polished where there are elites, and a trained policy has no warm start:
    neither has to be switched off."""
    alone = LearnerConfig(elites=0, imitation=0.0)
    methods.check_learner(["ppo"], replace(alone, warm_start=0), None)
    methods.check_learner(["ppo"], replace(alone, polish=0), "policy.st")


def learner_of(text: str, seconds: float | None, name: str = "ppo", **settings: Any) -> Placer:
    """That of these methods, on a graph whose updates take some time."""
    problem = make_problem(layered_graph(24, 4), gpu_boards(4))
    chosen = methods.parse(text)
    placers = methods.make(chosen, problem, seconds=seconds, **settings)
    return placers[chosen.names.index(name)]


def test_auto_does_without_learning_where_there_is_no_time_for_it() -> None:
    ppo = learner_of("auto,random", 0.1)
    assert ppo.ask(10) == []
    said = re.fullmatch(
        r"left out: 30 updates of a policy for 24 groups are taken to need (\S+) s, its part would "
        r"be 0.033 s; auto has it from (\d+) s on",
        ppo.notes.why_not,
    )
    assert said
    assert 0.033 < float(said[1]) < float(said[2])
    assert learner_of("auto,random", float(said[2])).endless
    assert not ppo.endless  # what would have been its part is for the others


@pytest.mark.parametrize(
    "settings",
    [
        {"seconds": 1e5},
        {"seconds": None, "trials": 100},
        {"seconds": 0.1, "trials": 100},
        {"seconds": 0.1, "learners": LearnerConfig(samples=4)},
        {"seconds": 30.0, "cheap": False},
        {"seconds": 0.1, "trials": 100, "cheap": False},
        {"seconds": 0.1, "noise": 0.1},
    ],
)
def test_otherwise_auto_learns(settings: Any) -> None:
    assert learner_of("auto", **settings).endless


def test_learners_that_are_asked_for_by_name_take_part() -> None:
    assert learner_of("ppo,local-search", 0.1).endless
    assert learner_of("auto,ppo", 0.1).endless
    assert learner_of("ppo,auto", 0.1).endless
    assert learner_of("auto,reinforce", 0.1, "reinforce").endless


def test_a_run_that_has_learned_goes_on_learning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = make_problem(layered_graph(12, 3), gpu_boards(2))
    placers = methods.make(["ppo", "local-search"], problem, seconds=0.5)
    with open_journal(tmp_path, problem, "simulate") as journal:
        search(
            placers, SimulatedEvaluator(problem), Budget(trials=150), journal=journal,
            directory=tmp_path,
        )  # fmt: skip
    before = (tmp_path / "metrics.jsonl").read_text()
    assert before
    monkeypatch.setattr(methods, "LEAST_UPDATES", 10**9)
    monkeypatch.setattr(methods, "AUTO", ("ppo", "local-search"))
    goes_on = place(problem, budget=0.5, directory=tmp_path).methods[0]
    assert (goes_on.method, goes_on.why_not) == ("ppo", "")
    assert (tmp_path / "metrics.jsonl").read_text().startswith(before.splitlines()[0])
    # A fresh run of the same time does not begin to.
    fresh = place(problem, budget=0.5, directory=tmp_path / "new").methods[0]
    assert (fresh.method, fresh.trials) == ("ppo", 0)
    assert fresh.why_not.startswith("left out")


def test_what_one_process_can_compute_is_no_matter_to_many(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(layered_graph(12, 3), gpu_boards(2))
    monkeypatch.setattr(methods, "LEAST_UPDATES", 10**9)

    monkeypatch.setattr(methods, "AUTO", ("ppo", "local-search"))

    class Team:
        """As Ray's is, as far as a session knows it."""

        evaluator = SimulatedEvaluator(problem)

        def distributed(self, placers: list[Placer]) -> list[Placer]:
            assert [placer.endless for placer in placers] == [True, True]
            return placers

        def status(self) -> dict[str, float]:
            return {"workers": 1.0}

    @contextmanager
    def assembled(*_: object, **__: object) -> Iterator[Team]:
        yield Team()

    monkeypatch.setattr(driver, "assemble", assembled)
    place(problem, budget=0.1, workers=1)


LEARNING_ALONE = LearnerConfig(elites=0, imitation=0.0)


@pytest.mark.parametrize(
    ("settings", "samples", "polish"),
    [
        ({}, 16, 240),
        ({"cheap": False}, 16, 0),
        ({"noise": 0.1}, 4, 12),
        ({"noise": 0.1, "cheap": False}, 4, 12),
        ({"noise": 0.1, "learners": LearnerConfig(polish=100, samples=7)}, 7, 100),
        ({"learners": LearnerConfig(noise=0.1)}, 4, 12),
        ({"noise": 0.1, "learners": LEARNING_ALONE}, 16, 0),
        ({"noise": 0.1, "learners": LEARNING_ALONE, "cheap": False}, 16, 0),
    ],
)
def test_how_much_is_polished_where_times_are_noisy(
    settings: Any, samples: int, polish: int
) -> None:
    from placewright.learning.learner import Learner

    (learner,) = methods.make(["ppo"], random_problem(0), trials=100, **settings)
    assert isinstance(learner, Learner)
    assert (learner.config.samples, learner.config.polish) == (samples, polish)
