"""A framework that is registered from outside does all that TensorFlow does."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

import placewright
from placewright import backends
from placewright.backends import RunConfig
from placewright.cluster import Cluster
from placewright.errors import ModelError, PlacementError, SearchError
from placewright.problem import Problem, make_problem
from placewright.session.config import Machine, RoundsConfig, SearchConfig
from placewright.session.driver import Session
from placewright.testing import check_backend, check_runner
from tests.toy_backend import Toy, ToyBackend

CPU2 = Cluster.load("cpu2")
CONFIG = RunConfig(steps=3, max_steps=4)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyBackend:
    monkeypatch.setattr(backends, "_registered", {})
    backend = ToyBackend()
    backends.register(backend)
    return backend


@pytest.fixture
def model() -> Toy:
    """Two branches that can sleep side by side."""
    nap = functools.partial(time.sleep, 0.02)
    functions: dict[str, Callable[[], object]]
    functions = {"first": lambda: None, "left": nap, "right": nap, "last": lambda: None}
    return Toy(functions, {"left": ["first"], "right": ["first"], "last": ["left", "right"]})


@pytest.fixture
def problem(model: Toy) -> Problem:
    return make_problem(backends.load(model), CPU2)


def test_keeps_the_contract_of_backends(toy: ToyBackend, model: Toy) -> None:
    check_backend(toy, model, devices_in=lambda placed: placed.devices)


def test_keeps_the_contract_of_runners(model: Toy) -> None:
    def only_first() -> None:
        assert threading.current_thread().name.startswith("cpu:0"), "no kernel"

    model = Toy({**model.functions, "picky": only_first}, model.reads)
    program = backends.load_program(model)
    with backends.runner(program, CPU2, CONFIG) as runner:
        check_runner(runner, failing=[1] * program.graph.num_ops)


def test_is_placed_measured_and_applied(model: Toy) -> None:
    result = placewright.place(backends.load(model), "cpu2", method="single", trials=2)
    placed = result.apply(model)
    assert isinstance(placed, Toy)
    assert placed.devices == result.placement_by_op()
    with pytest.raises(PlacementError, match="cannot apply a placement to a int"):
        result.apply(3)
    # The settings of a model that is read are settings of the call; a graph is read already.
    assert placewright.place(model, "cpu2", method="single", trials=2, scale="small").best
    with pytest.raises(ModelError, match="batch means nothing for a graph"):
        placewright.place(backends.load(model), "cpu2", batch=3)
    with pytest.raises(SearchError, match="`feeds` mean nothing in the simulator"):
        placewright.place(model, "cpu2", trials=2, feeds={})


def test_is_searched_with_real_runs(model: Toy, problem: Problem) -> None:
    quick = RoundsConfig(simulate_seconds=0.5, candidates=2, finalists=2, final_rounds=1)
    found = placewright.place(
        model, CPU2, method="random", trials=14, evaluate="measure", rounds=quick, run=CONFIG
    )
    assert found.measured
    config = SearchConfig(
        method="local-search", trials=16, evaluate="simulate+measure", rounds=quick
    )
    machine = Machine(backends.load_program(model), CONFIG)
    session = Session(problem, config, machine=machine)
    session.run()
    refined = session.run()  # with a runner of its own
    assert refined.best is not None
    assert refined.calibration is not None
    # Side by side, which takes half the time.
    placed = refined.placement_by_op()
    assert placed["left"] != placed["right"]


def test_a_package_that_is_installed_brings_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def entry_points(group: str) -> list[EntryPoint]:
        modules = {"toy": "tests.toy_backend:BACKEND", "gone": "no.such.module:BACKEND"}
        return [EntryPoint(name, module, group) for name, module in modules.items()]

    monkeypatch.setattr(backends, "_registered", {})
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    monkeypatch.setattr(backends, "_found", backends._found.__wrapped__)
    assert isinstance(backends.get("toy"), ToyBackend)
    assert "backend gone cannot be loaded from no.such.module:BACKEND" in caplog.text


def test_is_found_by_its_name_and_by_what_it_reads(toy: ToyBackend, model: Toy) -> None:
    assert backends.get("toy") is toy
    assert backends.backend_of(model) is toy
    tensorflow = backends.backend_of("rnnlm")
    assert tensorflow is not None
    assert tensorflow.name == "tensorflow"
    assert "toy" in [backend.name for backend in backends.every()]
    with pytest.raises(
        ModelError, match="there is no backend 'none'; there are tensorflow, pytorch, toy"
    ):
        backends.load(model, backend="none")
