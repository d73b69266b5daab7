"""The options of real runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placewright.backends import LoadOptions, RunConfig, backend_of, every
from placewright.cli.options import Only, UsageError, option_names

if TYPE_CHECKING:
    from placewright.backends.base import Array

FeedsOption = Annotated[
    str | None,
    typer.Option(
        "--feeds", metavar="FILE", help="An .npz file with the inputs; made up when not given."
    ),
]
RunOptions: type[RunConfig] = make_dataclass(
    "RunOptions", [], bases=tuple({b.run_config: None for b in every()}), frozen=True, kw_only=True
)
"""All settings of real runs that some backend has."""

RealRuns = Annotated[
    RunConfig,
    Only("time_limit_seconds", "limit_memory", "addresses", "open_servers", config=RunOptions),
]


def run_config(model: str, load: LoadOptions, given: RunConfig, **more: Any) -> RunConfig:
    """What was given, as the settings of the backend that reads the model."""
    backend = backend_of(model, load.backend)
    if backend is None:
        return given
    blank, known = type(given)(), {field.name for field in fields(backend.run_config)}
    for field in fields(given):
        if field.name not in known and getattr(given, field.name) != getattr(blank, field.name):
            option = option_names(field.name)[0]
            raise UsageError(f"{option} means nothing for a model of {backend.name}")
    return backend.run_config(**{name: getattr(given, name) for name in known} | more)


def feeds_from(path: str | None) -> Mapping[str, Array] | None:
    from placewright.backends.feeds import load_feeds

    return None if path is None else load_feeds(path)
