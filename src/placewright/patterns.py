"""Regular expressions that a user or a file brings: compiled and searched within a time limit.

Python's own engine can take longer than the universe lasts for a pattern of ten characters
(`(a+)+$`). The engine used here stops when told to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import regex

from placewright.errors import PlacementError

_MOST_CHARACTERS = 2_000
"""Of a pattern; longer ones are made by a program, which can make several."""

_SECONDS = 10.0
"""For one pattern over all names of a graph. An ordinary one needs a tenth of a second for
100,000 names."""


def searcher(pattern: str, what: str = "") -> Callable[[str], Any]:
    """A function that searches names for the pattern and gives a match or None.

    Args:
        pattern: as Python's `re` takes it.
        what: how errors call it; the pattern itself if not given.
    """
    name = what or repr(pattern[:80])
    if len(pattern) > _MOST_CHARACTERS:
        raise PlacementError(
            f"{name} is {len(pattern):,} characters long, a pattern has at most "
            f"{_MOST_CHARACTERS:,}"
        )
    try:
        compiled = regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise PlacementError(f"{name} is not a regular expression: {error}") from None
    left = _SECONDS

    def search(text: str) -> Any:
        nonlocal left
        started = time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            return compiled.search(text, timeout=left)
        except TimeoutError:
            raise PlacementError(
                f"{name} takes over {_SECONDS:.0f} s on the names of this graph; "
                "does it repeat what repeats already, as in '(a+)+'?"
            ) from None
        finally:
            left -= time.monotonic() - started

    return search
