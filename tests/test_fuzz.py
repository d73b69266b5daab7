"""Some of what `make fuzz` does, always the same."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from placewright.errors import ModelError, ReportError
from placewright.schema import (
    Maybe,
    Table,
    check,
    flag,
    number,
    positive,
    signed,
    text,
    whole,
)
from tests import fuzzing
from tests.fuzzing import Target, fuzz, targets


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Target]:
    return targets(tmp_path_factory.mktemp("files"))


def test_changed_files_are_read_or_refused_in_one_line(every: Sequence[Target]) -> None:
    assert len(every) > 25
    for found in fuzz(every, seed=0, count=40):
        found.target.read(found.data)  # which shows how it fails
        raise AssertionError(f"{found.target.name}: {found.fault!r}") from found.fault


def test_what_it_looks_for_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a message of a page, one of two lines, a loop or memory without end."""
    monkeypatch.setattr(fuzzing, "MOST_SECONDS", 0.5)
    monkeypatch.setattr(fuzzing, "MOST_BYTES", 1 << 30)

    def long(data: bytes) -> None:
        error = ModelError("x")
        error.args = ("x" * 501,)
        raise error

    def two_lines(data: bytes) -> None:
        error = ModelError("x")
        error.args = ("one\ntwo",)
        raise error

    def endless(data: bytes) -> None:
        while True:
            pass

    readers = (lambda data: data[0].nothing, long, two_lines, endless, lambda data: bytes(2 << 30))
    bad = [Target(str(n), b"abc", read) for n, read in enumerate(readers)]
    assert [found.target for found in fuzz(bad, 0, 1)] == bad
    fine = Target("fine", b"abc", lambda data: None)
    assert list(fuzz([fine], 0, 10)) == []
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "it must be an object, not []"),
        ({}, "it has no 'rows'"),
        ({"rows": {}}, "'rows' must be a list, not {}"),
        ({"rows": [{"name": 1}]}, "'rows.0.name' must be a text, not 1"),
        ({"rows": [{"name": "a", "seconds": -1}]}, "'rows.0.seconds' must be a finite number"),
        ({"rows": [{"name": "a", "seconds": 10**400}]}, "more than sixty digits"),
        ({"rows": [{"name": "a", "seconds": float("nan")}]}, "not nan"),
        ({"rows": [{"name": "a", "seconds": True}]}, "not True"),
        ({"rows": [], "on": 1}, "'on' must be true or false, not 1"),
        ({"rows": [], "of": [None, 1, 2**63]}, "'of.2' must be a whole number"),
        ({"rows": [], "of": ["x" * 1000]}, f"not '{'x' * 39}..."),
        ({"rows": [], "pair": [1]}, "'pair' must have 2 values, not 1"),
        ({"rows": [], "pair": [1, -1]}, "'pair.1' must be a whole number"),
        ({"rows": [], "pair": {}}, "'pair' must be a list"),
        ({"rows": [], "by": {"a?": 1, "b": math.inf}}, "'by.b' must be a finite number, not inf"),
        ({"rows": [], "by": []}, "'by' must be an object"),
        ({"rows": [], "more": 0}, "'more' must be a positive finite number"),
    ],
)
def test_a_document_of_another_shape_is_refused(document: object, complaint: str) -> None:
    shape = {
        "rows": [{"name": text, "seconds": Maybe(number)}], "on?": flag, "of?": [Maybe(whole)],
        "pair?": (whole, whole), "by?": Table(signed), "more?": positive,
    }  # fmt: skip
    with pytest.raises(ReportError) as caught:
        check(document, shape, ReportError, where="file")
    assert str(caught.value).startswith("file: ")
    assert complaint in str(caught.value)
    fine = {"rows": [{"name": "a", "seconds": None}], "pair": [1, 2], "by": {"x": -1}, "other": 1}
    check(fine, shape, ReportError, where="file")
