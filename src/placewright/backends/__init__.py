"""The frameworks there are, by name, and by what they read.

A package that brings another one names an instance of its `Backend` under the entry-point group
`placewright.backends`; `register` does the same for this process only.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from placewright.backends.base import (
    Array,
    Backend,
    Input,
    LoadOptions,
    Plan,
    Program,
    Run,
    RunConfig,
    Runner,
    Trace,
    is_path,
    refuse,
)
from placewright.cluster import Cluster
from placewright.errors import ClusterError, ModelError, PlacementError
from placewright.graph import Graph

__all__ = [
    "Backend",
    "Input",
    "LoadOptions",
    "Plan",
    "Program",
    "Run",
    "RunConfig",
    "Runner",
    "Trace",
    "backend_of",
    "check_here",
    "every",
    "get",
    "is_graph_file",
    "load",
    "load_program",
    "measurable",
    "model_names",
    "register",
    "runner",
    "target_backend",
    "why_not_run",
]

logger = logging.getLogger(__name__)

ENTRY_POINTS = "placewright.backends"

_OURS = ("placewright.backends.tensorflow:BACKEND", "placewright.backends.pytorch:BACKEND")
"""Module and attribute of the backends that come with this package."""

_registered: dict[str, Backend] = {}


# --- which there are -----------------------------------------------------------------------------


def register(backend: Backend) -> None:
    """Adds a backend, or replaces the one of its name, in this process."""
    _registered[backend.name] = backend


@functools.cache
def _found() -> dict[str, Backend]:
    """Ours, then those of other packages."""
    backends: dict[str, Backend] = {}
    for text in _OURS:
        module, _, attribute = text.partition(":")
        backend: Backend = getattr(importlib.import_module(module), attribute)
        backends[backend.name] = backend
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        if entry.value not in _OURS:
            try:
                backend = entry.load()
            except Exception as error:  # somebody else's package, which may raise anything
                logger.warning(
                    "backend %s cannot be loaded from %s: %s", entry.name, entry.value, error
                )
                continue
            backends[backend.name] = backend
    return backends


def every() -> tuple[Backend, ...]:
    """All backends, whether their frameworks are installed or not."""
    return tuple({**_found(), **_registered}.values())


def get(name: str) -> Backend:
    backends = {backend.name: backend for backend in every()}
    if name not in backends:
        raise ModelError(f"there is no backend {name!r}; there are {', '.join(backends)}")
    return backends[name]


def backend_of(source: object, name: str | None = None) -> Backend | None:
    """The backend that reads a source, or the one of that name; None for a graph and its file,
    which belong to no framework, and for what no backend knows."""
    if name is not None:
        return get(name)
    if isinstance(source, Graph) or (is_path(source) and is_graph_file(source)):
        return None
    accepting = [backend for backend in every() if backend.accepts(source)]
    # Where several offer a benchmark model of that name, one that can build it.
    return min(accepting, key=lambda backend: not backend.installed(), default=None)


def model_names() -> tuple[str, ...]:
    """The benchmark models of all backends."""
    return tuple(dict.fromkeys(name for backend in every() for name in backend.models))


def is_graph_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file of that name is a graph in our own format, and no model of a framework."""
    return Path(path).name.endswith((".json", ".json.gz"))


# --- models --------------------------------------------------------------------------------------


def load(source: object, options: LoadOptions | None = None, **settings: Any) -> Graph:
    """A graph from a benchmark model's name, a file, a directory, or a live object.

    Args:
        source: name of a benchmark model; path of a graph file, GraphDef, MetaGraph or SavedModel;
            or a `tf.Graph`, ConcreteFunction, `tf.function` or compiled Keras model.
        options: how it is read.
        settings: single fields of `LoadOptions`, such as `batch=8`; they go before `options`.
    """
    options = _options(options, settings)
    if isinstance(source, Graph):
        refuse("a graph", **{**vars(options), "scale": None})
        return source
    if is_path(source) and is_graph_file(source) and Path(source).is_file():
        refuse("a graph file", **{**vars(options), "scale": None})
        return Graph.load(Path(source))
    return _reader_of(source, options.backend).load_graph(source, options)


def load_program(source: object, options: LoadOptions | None = None, **settings: Any) -> Program:
    """The same graph together with what it takes to run it; takes what `load` takes.

    Raises `ModelError` for what can be placed but not run: a graph file.
    """
    if isinstance(source, Graph) or (is_path(source) and is_graph_file(source)):
        what = f"the graph {source.name!r}" if isinstance(source, Graph) else source
        raise ModelError(
            f"{what}: a graph file says what a model costs but not what it computes, so it cannot "
            "be run; give the model itself"
        )
    options = _options(options, settings)
    return _reader_of(source, options.backend).load(source, options)


def _options(options: LoadOptions | None, settings: Mapping[str, Any]) -> LoadOptions:
    names = [entry.name for entry in fields(LoadOptions)]
    for name in settings:
        if name not in names:
            raise TypeError(f"unknown setting {name!r}; there are {', '.join(names)}")
    given = {name: value for name, value in settings.items() if value is not None}
    return replace(options or LoadOptions(), **given)


def _reader_of(source: object, name: str | None) -> Backend:
    backend = backend_of(source, name)
    if backend is not None:
        return backend
    if not is_path(source):
        raise ModelError(f"cannot read a graph from a {type(source).__name__}")
    path = Path(source)
    if not path.exists():
        raise ModelError(_no_such(path))
    what = "there is no model in it" if path.is_dir() else "not a kind of file"
    raise ModelError(f"{path}: {what} that is known; known are {_kinds()}")


def _kinds() -> str:
    known = [backend.sources for backend in every() if backend.sources]
    return ", ".join([".json or .json.gz (graph file)", *known])


def _no_such(path: Path) -> str:
    if path.suffix or len(path.parts) > 1:
        return f"{path}: no such file or directory"
    names = model_names()
    close = difflib.get_close_matches(str(path), names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return (
        f"there is no benchmark model or file {str(path)!r}{hint}; benchmark models are "
        f"{', '.join(names)}; files are {_kinds()}"
    )


# --- real runs, and placements put into models ---------------------------------------------------


def runner(
    program: Program,
    cluster: Cluster,
    config: RunConfig | None = None,
    *,
    feeds: Mapping[str, Array] | None = None,
) -> Runner:
    """What measures placements of a program, whichever framework it is of."""
    return get(program.backend).runner(program, cluster, config, feeds)


def why_not_run(
    source: object, cluster: Cluster, config: RunConfig | None = None, backend: str | None = None
) -> str:
    """Why placements of this model on this cluster cannot be measured from here; empty when they
    can, as far as is known without loading it."""
    reader = backend_of(source, backend)
    if reader is None:
        return "it is no model of a framework"
    if not reader.installed():
        return f"{reader.name} is not installed"
    return reader.why_not_here(cluster, config)


def check_here(
    source: object,
    cluster: Cluster,
    config: RunConfig | None = None,
    name: str | None = None,
) -> None:
    """Raises for a model of a framework whose placements on this cluster cannot be measured from
    here: before it is read, which takes a while."""
    backend = backend_of(source, name)
    reason = "" if backend is None else backend.why_not_here(cluster, config)
    if reason:
        raise ClusterError(
            f"cluster {cluster.name!r} cannot be measured on this machine: {reason} "
            "('placewright devices' shows what can)"
        )


def measurable(clusters: Iterable[str]) -> list[str]:
    """The names of those presets that some backend can measure on this machine."""
    return [
        name
        for name in clusters
        if any(not backend.why_not_here(Cluster.load(name)) for backend in every())
    ]


def target_backend(target: Any) -> Backend:
    """The backend whose object this is, for `Backend.apply`."""
    for backend in every():
        if backend.accepts(target):
            return backend
    raise PlacementError(
        f"cannot apply a placement to a {type(target).__name__}; give a model of "
        f"{' or '.join(backend.name for backend in every())}"
    )
