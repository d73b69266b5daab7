"""Front ends read models of machine-learning frameworks into a `Graph`."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from placewright.backends.tensorflow import models
from placewright.errors import ModelError
from placewright.graph import Graph

if TYPE_CHECKING:
    from placewright.backends.tensorflow.program import Program
    from placewright.backends.tensorflow.reading import Step

KINDS = (
    ".json or .json.gz (graph file), .pb or .pbtxt (TensorFlow GraphDef), .meta (MetaGraph) or a "
    "SavedModel's directory"
)


def load(
    source: object,
    *,
    scale: str = "paper",
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    signature: str | None = None,
    fetches: Sequence[str] = (),
    loops: Mapping[str, int] | None = None,
) -> Graph:
    """A graph from a benchmark model's name, a file, a directory, or a live TensorFlow object.

    Args:
        source: name of a benchmark model; path of a graph file, GraphDef, MetaGraph or SavedModel;
            or a `tf.Graph`, ConcreteFunction, `tf.function` or compiled Keras model.
        scale: size of a benchmark model; means nothing for others.
        batch: batch of a benchmark model; for others, the first dimension of every input that
            leaves it open.
        dims: sizes of other open dimensions: `{"x.1": 128}` for dimension 1 of input `x`, or
            `{"x": 128}` where it has only one that is open.
        signature: which signature of a SavedModel.
        fetches: names of the ops or tensors that a step is run for; only what they need is kept.
            By default the training step where one is known, otherwise everything.
        loops: how often loops run of which the model does not tell: `{"lstm.*": 50}` for all whose
            names contain a match of that regular expression. Goes before what the model says.
    """
    if isinstance(source, Graph):
        return source
    if _is_path(source) and is_graph_file(source) and Path(source).is_file():
        _refuse(
            "a graph file", signature=signature, dims=dims, fetches=fetches, batch=batch,
            loops=loops,
        )  # fmt: skip
        return Graph.load(Path(source))
    step = _step(source, scale, batch, dims, signature, fetches)
    return dataclasses.replace(step, loops=loops or {}).graph()


def load_program(
    source: object,
    *,
    scale: str = "paper",
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    signature: str | None = None,
    fetches: Sequence[str] = (),
    loops: Mapping[str, int] | None = None,
) -> Program:
    """The same graph together with what TensorFlow needs to run it; takes what `load` takes.

    Raises `ModelError` for what can be placed but not run: a graph file.
    """
    if isinstance(source, Graph) or (_is_path(source) and is_graph_file(source)):
        what = f"the graph {source.name!r}" if isinstance(source, Graph) else source
        raise ModelError(
            f"{what}: a graph file says what a model costs but not what it computes, so it cannot "
            "be run; give the TensorFlow model itself"
        )
    step = _step(source, scale, batch, dims, signature, fetches)
    from placewright.backends.tensorflow.program import make_program

    return make_program(dataclasses.replace(step, loops=loops or {}))


def is_graph_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file of that name is a graph in our own format, and no model of a framework."""
    return Path(path).name.endswith((".json", ".json.gz"))


def _is_path(source: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(source, str | os.PathLike)


def _step(
    source: object,
    scale: str,
    batch: int | None,
    dims: Mapping[str, int] | None,
    signature: str | None,
    fetches: Sequence[str],
) -> Step:
    dims = dims or {}
    fetches = (fetches,) if isinstance(fetches, str) else fetches
    if _is_path(source):
        path = Path(source)
        if str(source) in models.NAMES and not path.exists():
            _refuse("a benchmark model", signature=signature, dims=dims)
            from placewright.backends.tensorflow import (
                reading as tensorflow,  # first: it starts TensorFlow quietly
            )

            model = models.build(str(source), scale=scale, batch=batch)
            return tensorflow.step_of_benchmark(model, fetches=fetches)
        return _step_of_path(path, batch, dims, signature, fetches)
    _refuse(f"a {type(source).__name__}", signature=signature)
    if "tensorflow" not in sys.modules:
        raise ModelError(f"cannot read a graph from a {type(source).__name__}")
    from placewright.backends.tensorflow import reading as tensorflow

    return tensorflow.step_of_object(source, batch=batch, dims=dims, fetches=fetches)


def _step_of_path(
    path: Path,
    batch: int | None,
    dims: Mapping[str, int],
    signature: str | None,
    fetches: Sequence[str],
) -> Step:
    if path.is_dir() or path.name in ("saved_model.pb", "saved_model.pbtxt"):
        directory = path if path.is_dir() else path.parent
        from placewright.backends.tensorflow import reading as tensorflow

        return tensorflow.step_of_saved_model(
            directory, signature=signature, fetches=fetches, batch=batch, dims=dims
        )
    if not path.exists():
        raise ModelError(_no_such(path))
    if path.suffix in (".pb", ".pbtxt", ".meta") or ".meta" in path.suffixes:
        _refuse("a GraphDef", signature=signature)
        from placewright.backends.tensorflow import reading as tensorflow

        return tensorflow.step_of_file(path, fetches=fetches, batch=batch, dims=dims)
    raise ModelError(f"{path}: not a kind of file that is known; known are {KINDS}")


def _no_such(path: Path) -> str:
    if path.suffix or len(path.parts) > 1:
        return f"{path}: no such file or directory"
    close = difflib.get_close_matches(str(path), models.NAMES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return (
        f"there is no benchmark model or file {str(path)!r}{hint}; benchmark models are "
        f"{', '.join(models.NAMES)}; files are {KINDS}"
    )


def _refuse(what: str, **options: object) -> None:
    # An option that has no effect would look as if it had one.
    for name, value in options.items():
        if value:
            raise ModelError(f"{name} means nothing for {what}")
