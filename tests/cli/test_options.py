"""Options that are made from config dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from placewright.cli.options import Only, add_command, in_options


@dataclass(frozen=True, kw_only=True)
class Config:
    groups: int | None = None
    """So many groups. This is for readers of the code."""
    pins: tuple[tuple[str, str], ...] = ()
    """Goes there."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Sizes."""
    limit_memory: bool = False
    """Hold to `limits`."""
    trial_seconds: float = 300.0
    """Longest."""


@dataclass(frozen=True, kw_only=True)
class Team:
    workers: int = 1
    """How many."""
    address: str | None = None
    """Where."""


seen: list[Any] = []


def command(*, config: Config, team: Annotated[Team | None, Only(needs=("workers",))]) -> None:
    """Does something."""
    seen[:] = [config, team]


@pytest.fixture
def call() -> Callable[..., Any]:
    app = typer.Typer()
    add_command(app, command)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_what_is_not_given_has_the_default_of_the_config(call: Callable[..., Any]) -> None:
    assert call().exit_code == 0
    assert seen == [Config(), None]


def test_options_become_fields(call: Callable[..., Any]) -> None:
    call("--groups", "3", "--pin", "a=b=cpu:0", "--pin", "c=gpu:0", "--dim", "x.1=8",
         "--limit-memory", "--trial-timeout", "2m", "--workers", "2")  # fmt: skip
    pins = (("a=b", "cpu:0"), ("c", "gpu:0"))
    config = Config(groups=3, pins=pins, dims={"x.1": 8}, limit_memory=True, trial_seconds=120.0)
    assert seen == [config, Team(workers=2)]


def test_what_needs_another_option_says_so(call: Callable[..., Any]) -> None:
    assert "--ray-address means nothing without --workers" in str(
        call("--ray-address", "auto").exception
    )


def test_help_is_the_first_sentence_of_the_docstring(call: Callable[..., Any]) -> None:
    text = " ".join(call("--help").output.split())
    assert "So many groups." in text
    assert "readers of the code" not in text
    assert "Goes there; repeatable." in text


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("size them with batch=N and dims={'x.1': N, 'y.0': N}",
         "size them with --batch N and --dim x.1=N --dim y.0=N"),
        ("`max_staleness` means nothing without `controllers`",
         "--max-staleness means nothing without --controllers"),
        ("evaluate='x': expected simulate", "--evaluate x: expected simulate"),
        ("limit_memory=True helps", "--limit-memory helps"),
        ("forced=True keeps it", "--force keeps it"),
        ("op 'batch=3' is the user's", "op 'batch=3' is the user's"),
    ],
)  # fmt: skip
def test_errors_name_options(message: str, said: str) -> None:
    assert in_options(message) == said
