"""Asynchronous training on real runs: each worker has devices of its own.

Not in `tests/distributed`, whose tests share one Ray: a session starts its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

import torch

from placewright.backends import load_program
from placewright.backends.pytorch.program import TorchModel
from placewright.cluster import Cluster
from placewright.distributed.config import TeamConfig
from placewright.journal import read_trials
from placewright.learning.config import PPO, configured
from placewright.machine import usable_core_numbers
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.session.config import Machine, RoundsConfig, SearchConfig
from placewright.session.driver import Session

_TAKE = """
import sys
from pathlib import Path
from placewright.distributed.cores import take_cores
print(take_cores(1, Path(sys.argv[1])), flush=True)
sys.stdin.readline()
"""


def _taker(folder: Path) -> subprocess.Popen[str]:
    source = Path(__file__).parent.parent / "src"
    return subprocess.Popen(
        [sys.executable, "-c", _TAKE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": str(source)},
    )  # fmt: skip


@pytest.mark.skipif(len(usable_core_numbers()) < 2, reason="one core cannot be shared")
def test_no_two_workers_have_the_same_cores(tmp_path: Path) -> None:
    """And who dies leaves them to the next."""
    takers = [_taker(tmp_path) for _ in usable_core_numbers()]
    taken = [json.loads(taker.stdout.readline()) for taker in takers if taker.stdout]
    assert sorted(core for cores in taken for core in cores) == usable_core_numbers()
    late = _taker(tmp_path)
    assert late.stdout is not None
    assert json.loads(late.stdout.readline()) == []
    takers[0].kill()
    takers[0].communicate()
    again = _taker(tmp_path)
    assert again.stdout is not None
    assert json.loads(again.stdout.readline()) == taken[0]
    for process in (*takers[1:], late, again):
        process.communicate("\n", timeout=60)


def _model() -> TorchModel:
    from placewright.backends.pytorch.exporting import Inputs, Task

    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    x = torch.ones(16, 64)
    return TorchModel(torch.nn.Sequential(*layers), Inputs((x,)), Task())


def _problem() -> Problem:
    return make_problem(load_program(_model()).graph, Cluster.load("cpu2"), ProblemConfig(groups=8))


def search(directory: Path) -> None:
    program = load_program(_model())
    learner = configured(PPO, ["policy.hidden=8", "samples=4", "polish=0", "warm_start=1"])
    config = SearchConfig(
        method="ppo", trials=28, evaluate="measure", learner=learner,
        rounds=RoundsConfig(finalists=1, final_rounds=1),
    )  # fmt: skip
    team = TeamConfig(controllers=2, workers=1, resources={"CPU": 1.0})
    machine = Machine(program)
    result = Session(_problem(), config, machine=machine, team=team, directory=directory).run()
    assert result.measured
    assert result.best is not None
    assert not result.fault


def test_two_controllers_learn_from_real_runs(tmp_path: Path) -> None:
    # In a process of its own: here, other tests may have a Ray that they share.
    script = (
        "import sys, pathlib, tests.test_workers_measure as t; t.search(pathlib.Path(sys.argv[1]))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=root, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    trials = read_trials(tmp_path / "journal.jsonl", _problem())
    own = [trial for trial in trials if trial.placer == "ppo" and trial.measurement.ok]
    assert len(own) >= 8
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {record["controller"] for record in records} == {0, 1}
    assert all(record["workers"] == 2 for record in records)
