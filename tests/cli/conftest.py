from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from placewright.cli import main


class Run(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Run]:
    """Runs the command in a directory of its own and gives exit code, output and complaints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: str | Path) -> Run:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return Run(caught.value.code, out, err)

    return call


GRAPH: dict[str, Any] = {
    "name": "two branches",
    "ops": [
        {"name": "in", "type": "Input", "outputs": [{"bytes": 1000}]},
        *(
            {
                "name": f"branch{b}/op{i}",
                "type": "MatMul",
                "outputs": [{"bytes": 1000}],
                "seconds": {"gpu": 0.01, "cpu": 0.1},
            }
            for b in (0, 1)
            for i in range(3)
        ),
        {"name": "join[red]", "type": "Add", "seconds": {"gpu": 0.001, "cpu": 0.001}},
    ],
    "edges": [
        edge
        for b in (0, 1)
        for edge in (
            {"from": "in", "to": f"branch{b}/op0"},
            {"from": f"branch{b}/op0", "to": f"branch{b}/op1"},
            {"from": f"branch{b}/op1", "to": f"branch{b}/op2"},
            {"from": f"branch{b}/op2", "to": "join[red]"},
        )
    ],
}


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH))
    return path
