"""Every method in the registry keeps the promises of `Placer`."""

from __future__ import annotations

import pytest

from placewright import placers
from placewright.errors import SearchError
from placewright.placers.base import Placer
from placewright.problem import Problem
from placewright.testing import check_placer, random_problem


def make(name: str, problem: Problem, seed: int) -> Placer:
    return placers.make([name], problem, seed=seed, seconds=30.0)[0]


@pytest.mark.parametrize("name", placers.METHODS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_contract(name: str, seed: int) -> None:
    check_placer(lambda problem, s: make(name, problem, s), random_problem(seed), count=64)


def test_names_are_parsed() -> None:
    assert placers.parse("scotch, heft") == ("scotch", "heft")
    assert placers.parse("auto") == placers.AUTO
    assert placers.parse("random,auto") == ("random", *placers.AUTO)
    assert placers.parse("heft,heft") == ("heft",)
    with pytest.raises(
        SearchError, match="unknown method 'local-serch'; did you mean local-search"
    ):
        placers.parse("local-serch")


def test_auto_does_without_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names = placers.parse("auto")
    assert names == tuple(n for n in placers.AUTO if not placers.METHODS[n].needs)
    assert "auto leaves out scotch, mincut, m-sct, exact" in caplog.text
    assert "pip install 'placewright[placers]'" in caplog.text


def test_every_method_has_one_line() -> None:
    for name, method in placers.METHODS.items():
        assert method.summary, name
        assert "\n" not in method.summary
