"""Every method in the registry keeps the promises of `Placer`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from placewright import methods
from placewright.cluster import Cluster
from placewright.errors import SearchError
from placewright.graph import Edge, Graph, Op, Tensor
from placewright.placers.base import Placer
from placewright.problem import Constraints, Problem, make_problem
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
        constraints=Constraints(pins=(("op3$", "gpu:1"),), forbidden_devices=("gpu:2",)),
    )
    check_placer(lambda p, s: make(name, p, s), problem, count=16)


def test_names_are_parsed() -> None:
    assert methods.parse("scotch, heft") == ("scotch", "heft")
    assert methods.parse("auto") == methods.AUTO
    assert methods.parse("random,auto") == ("random", *methods.AUTO)
    assert methods.parse("heft,heft") == ("heft",)
    with pytest.raises(
        SearchError, match="unknown method 'local-serch'; did you mean local-search"
    ):
        methods.parse("local-serch")


def test_auto_does_without_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names = methods.parse("auto")
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
    alone = ["elites=0", "imitation=0"]
    methods.check_learner(["ppo"], [*alone, "warm_start=0"], None)
    methods.check_learner(["ppo"], [*alone, "polish=0"], "policy.st")


def made_by_auto(seconds: float | None, *more: str, **settings: Any) -> Placer:
    """The `ppo` of `auto` on a graph whose updates take some time."""
    problem = make_problem(layered_graph(60, 6), gpu_boards(4))
    names = methods.parse(",".join(["auto", *more]))
    return methods.make(names, problem, seconds=seconds, **settings)[names.index("ppo")]


def test_auto_does_without_learning_where_there_is_no_time_for_it() -> None:
    ppo = made_by_auto(0.1, "random")
    assert ppo.ask(10) == []
    assert re.fullmatch(
        r"30 updates of its policy take some \d+ s here, which is too long for its part of 0.1 s; "
        r"auto has it from some \d+ s on",
        ppo.why_not,
    )
    assert not ppo.endless  # what would have been its part is for the others


@pytest.mark.parametrize(
    "settings",
    [
        {"seconds": 1e5},
        {"seconds": None, "trials": 100},
        {"seconds": 0.1, "trials": 100},
        {"seconds": 0.1, "learner": ["samples=4"]},
        {"seconds": 0.1, "cheap": False},
        {"seconds": 0.1, "noise": 0.1},
        {"seconds": 0.1, "rounds": True},
    ],
)
def test_otherwise_auto_learns(settings: Any) -> None:
    assert made_by_auto(**settings).endless


def test_a_learner_that_is_asked_for_by_name_takes_part() -> None:
    (ppo, _) = methods.make(["ppo", "local-search"], random_problem(0), seconds=0.1)
    assert ppo.endless


LEARNING_ALONE = ("elites", "imitation", "warm_start", "polish")


@pytest.mark.parametrize(
    ("settings", "samples", "polish"),
    [
        ({}, 16, 240),
        ({"cheap": False}, 16, 0),
        ({"noise": 0.1}, 4, 12),
        ({"noise": 0.1, "cheap": False}, 4, 12),
        ({"noise": 0.1, "learner": ["polish=100", "samples=7"]}, 7, 100),
        ({"learner": ["noise=0.1"]}, 4, 12),
        ({"noise": 0.1, "learner": [f"{n}=0" for n in LEARNING_ALONE]}, 16, 0),
        ({"noise": 0.1, "learner": [f"{n}=0" for n in LEARNING_ALONE[:-1]], "cheap": False}, 16, 0),
    ],
)
def test_how_much_is_polished_where_times_are_noisy(
    settings: Any, samples: int, polish: int
) -> None:
    from placewright.learning.learner import Learner

    (learner,) = methods.make(["ppo"], random_problem(0), trials=100, **settings)
    assert isinstance(learner, Learner)
    assert (learner.config.samples, learner.config.polish) == (samples, polish)
