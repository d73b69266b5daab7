from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from placewright.distributed.config import TeamConfig
from placewright.distributed.session import ray_session


@pytest.fixture(scope="package")
def ray() -> Iterator[None]:
    """One Ray for these tests, with room for a few workers."""
    with ray_session(TeamConfig(workers=8, resources={"CPU": 1.0})):
        yield


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """More placements than any test tries."""
    monkeypatch.chdir(tmp_path)
    ops = [{"name": f"op{i}", "type": f"t{i}", "seconds": {"gpu": 0.01}} for i in range(16)]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"ops": ops, "edges": []}))
    return path
