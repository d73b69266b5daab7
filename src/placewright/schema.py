"""What a document from a file must look like before it is used.

A shape is a type of value below; a list of one shape, for lists of such values; a tuple of several,
for lists of just so many; a `Table` of one, for objects with any keys; or a mapping from keys to
shapes, for objects that have at least these. A key that ends in `?` may be missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from placewright.errors import PlacewrightError

_MOST_WHOLE = 2**63 - 1
_SHOWN = 40


class Maybe:
    """A value of this shape, or null."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


class Table:
    """An object whose keys are names that are not known before, all with values of this shape."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


def text(value: object) -> str:
    return "" if isinstance(value, str) else "a text"


def flag(value: object) -> str:
    return "" if isinstance(value, bool) else "true or false"


def whole(value: object) -> str:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_WHOLE
    return "" if fits else "a whole number that is not negative"


def number(value: object) -> str:
    """Finite, and not negative."""
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    with_limit = fits and 0 <= float_of(value) < math.inf
    return "" if with_limit else "a finite number that is not negative"


def signed(value: object) -> str:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if fits and math.isfinite(float_of(value)) else "a finite number"


def positive(value: object) -> str:
    return "" if not number(value) and float_of(value) > 0 else "a positive finite number"


def float_of(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def check(document: object, shape: Any, error: type[PlacewrightError], *, where: str) -> None:
    """Raises `error`, with the place and what belongs there, for a document of another shape."""
    complaint = _complaint(document, shape, "")
    if complaint:
        raise error(f"{where}: {complaint}")


def _complaint(value: object, shape: Any, name: str) -> str:
    if isinstance(shape, Maybe):
        return "" if value is None else _complaint(value, shape.shape, name)
    what = f"{name[1:]!r}" if name else "it"
    if isinstance(shape, Mapping | Table):
        if not isinstance(value, dict):
            return f"{what} must be an object, not {_shown(value)}"
        if isinstance(shape, Table):
            return _first((f"{name}.{key}", one, shape.shape) for key, one in value.items())
        for key, inner in shape.items():
            plain = key.removesuffix("?")
            if plain in value:
                complaint = _complaint(value[plain], inner, f"{name}.{plain}")
                if complaint:
                    return complaint
            elif key == plain:
                return f"{what} has no {plain!r}"
        return ""
    if isinstance(shape, list | tuple):
        if not isinstance(value, list):
            return f"{what} must be a list, not {_shown(value)}"
        if isinstance(shape, tuple) and len(value) != len(shape):
            return f"{what} must have {len(shape)} values, not {len(value)}"
        shapes = shape if isinstance(shape, tuple) else itertools.repeat(shape[0])
        pairs = zip(value, shapes, strict=False)
        return _first((f"{name}.{n}", one, of) for n, (one, of) in enumerate(pairs))
    kind: Callable[[object], str] = shape
    wanted = kind(value)
    return f"{what} must be {wanted}, not {_shown(value)}" if wanted else ""


def _first(parts: Iterable[tuple[str, object, Any]]) -> str:
    """The first complaint about a name, its value and the shape of that; empty if there is none."""
    return next(filter(None, (_complaint(value, shape, name) for name, value, shape in parts)), "")


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than sixty digits"
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
