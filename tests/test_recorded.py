"""Every method proposes what the version before proposed, given the same seed and trials."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from placewright import methods, place
from placewright.learning.config import configured_presets
from placewright.problem import Problem

RECORDED = Path(__file__).parent / "recorded"


@cache
def recorded(model: str) -> tuple[Problem, dict[str, Any]]:
    journals = gzip.decompress((RECORDED / f"{model}.journals.json.gz").read_bytes())
    return Problem.load(RECORDED / f"{model}.problem.json.gz"), json.loads(journals)


def test_every_method_was_recorded() -> None:
    for model in ("rnnlm", "inception_v3"):
        assert set(recorded(model)[1]) == {"auto", *methods.METHODS}


@pytest.mark.parametrize("model", ["rnnlm", "inception_v3"])
@pytest.mark.parametrize("method", ["auto", *methods.METHODS])
def test_proposals_and_times_are_those_of_the_last_version(
    model: str, method: str, tmp_path: Path
) -> None:
    problem, journals = recorded(model)
    said = journals[method]
    learners = configured_presets(methods.parse(method).names, said["learner"])
    # That version placed groups alone.
    place(
        problem, method=method, trials=said["trials"], seed=said["seed"], learner=learners,
        directory=tmp_path, op_level=False,
    )  # fmt: skip
    found = []
    for line in (tmp_path / "journal.jsonl").read_text().splitlines():
        trial = json.loads(line)
        times = trial["measurement"].get("step_seconds", [None])
        found.append([trial["placer"], trial["placement"], times[0]])
    assert found == said["proposals"]
