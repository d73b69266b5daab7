"""What a step is fed with: given by the user, or made up from the inputs' types and shapes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from placewright.backends.base import Array, Input
from placewright.errors import ModelError

_NOT_IN_NUMPY = {"bfloat16": "float32"}
"""Dtypes of frameworks, which convert what they are fed on arrival."""

_MOST_BYTES = 16 << 30
"""Of what is fed, decompressed."""


def load_feeds(path: str | Path) -> dict[str, Array]:
    """The arrays of an .npz file, by the names of the inputs. Nothing in it is executed."""
    try:
        # Opened here, as numpy leaves a file open that is none of its own.
        with Path(path).open("rb") as raw:
            if zipfile.is_zipfile(raw):
                size = sum(entry.file_size for entry in zipfile.ZipFile(raw).infolist())
                if size > _MOST_BYTES:
                    raise ModelError(f"{path}: holds {size:,} bytes, more than {_MOST_BYTES:,}")
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                if not hasattr(file, "files"):
                    raise ModelError(f"{path}: one array, expected an .npz file of several by name")
                return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file of inputs") from None
    except ModelError:
        raise
    # Of what is wrong with a zip file, its compression or the header of an array each part has
    # errors of its own.
    except (Exception, MemoryError) as fault:
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise ModelError(f"{path}: not an .npz file of numbers: {reason}") from None


def make_feeds(
    inputs: Sequence[Input], given: Mapping[str, Array] | None = None, seed: int = 0
) -> dict[str, Array]:
    """An array for every input; the same seed gives the same ones."""
    given = given or {}
    known = {entry.name for entry in inputs}
    for name in given:
        if name not in known:
            raise ModelError(
                f"there is no input {name!r} to feed; inputs are "
                f"{', '.join(sorted(known)) or 'none'}"
            )
    rng = np.random.default_rng(seed)
    return {
        entry.name: _checked(entry, given[entry.name])
        if entry.name in given
        else _made_up(entry, rng)
        for entry in inputs
    }


def _checked(entry: Input, array: Array) -> Array:
    if array.shape != entry.shape:
        raise ModelError(
            f"input {entry.name!r} is {list(entry.shape)}, what is fed is {list(array.shape)}"
        )
    dtype = np.dtype(_numpy_dtype(entry))
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ModelError(f"input {entry.name!r} is {entry.dtype}, what is fed is {array.dtype}")
    return array.astype(dtype)


def _made_up(entry: Input, rng: np.random.Generator) -> Array:
    dtype = np.dtype(_numpy_dtype(entry))
    if dtype.kind in "iu":
        # Word numbers, labels, lengths: only the smallest are sure to be within every range.
        return rng.integers(0, 2, entry.shape).astype(dtype)
    if dtype.kind == "b":
        return np.ones(entry.shape, dtype)
    return rng.standard_normal(entry.shape).astype(dtype)


def _numpy_dtype(entry: Input) -> str:
    name = _NOT_IN_NUMPY.get(entry.dtype, entry.dtype)
    try:
        if np.dtype(name).kind in "biufc":
            return name
    except TypeError:
        pass
    raise ModelError(
        f"input {entry.name!r} ({entry.dtype}) must be fed, and a {entry.dtype} cannot be made up; "
        "export the model with numbers as inputs"
    )
