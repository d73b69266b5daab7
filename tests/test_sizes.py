"""Functions stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_LINES = 100
MOST_PARAMETERS = 10
KERNEL = {"src/placewright/simulator/kernel.py": "simulate"}
"""numba compiles it as one loop: what is called apart costs a tenth of its speed."""

FILES = [
    path.relative_to(ROOT)
    for folder in ("src", "tests", "benchmarks", "tools", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def too_large(text: str) -> Iterator[tuple[str, str]]:
    """(function, what is wrong with it)."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        parameters = len((*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        if lines > MOST_LINES:
            yield node.name, f"{lines} lines"
        if parameters > MOST_PARAMETERS:
            yield node.name, f"{parameters} parameters"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_function_is_too_large(path: Path) -> None:
    found = dict(too_large((ROOT / path).read_text("utf-8")))
    found.pop(KERNEL.get(path.as_posix(), ""), None)
    assert found == {}


def test_a_large_function_is_found() -> None:
    lines = "\n".join("    x = 1" for _ in range(MOST_LINES))
    names = ", ".join(f"a{i}" for i in range(MOST_PARAMETERS + 1))
    text = f"def long():\n{lines}\ndef wide({names}): ...\ndef fine(self, a0): ...\n"
    assert dict(too_large(text)) == {"long": "101 lines", "wide": "11 parameters"}
