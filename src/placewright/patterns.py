"""Regular expressions that a user or a file brings: compiled and searched within a time limit.

Python's own engine can take longer than the universe lasts for a pattern of ten characters
(`(a+)+$`). The engine used here stops when told to, but only while it searches: what takes long or
much memory to compile, and what of its own extensions has no such limit (patterns within
themselves, approximate matches), is refused before it sees it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import regex

from placewright.errors import PlacementError

_MOST_CHARACTERS = 2_000
"""Of a pattern; longer ones are made by a program, which can make several."""

_SECONDS = 20.0
"""For all patterns of one allowance over all names of a graph. An ordinary pattern needs a tenth of
a second for 100,000 names."""

_MOST_REPEATS = 10_000
"""That all counted repeats of a pattern may come to, one within the other: each is compiled."""

_TOKEN = re.compile(
    r"""
    \\.                                           # an escaped character
    | \{ (?P<least>\d*) (?:,(?P<most>\d*))? \}     # a counted repeat
    | (?P<brace> \{ )
    | \( \? (?: [:=!>] | <[=!] | P[<=] | -?[aimsux] ) # groups that Python's engine has, too
    | (?P<group> \( \? .{0,8} )
    | .
    """,
    re.VERBOSE | re.DOTALL,
)


class Allowance:
    """The time that several patterns may take together."""

    def __init__(self) -> None:
        self.left = _SECONDS


def searcher(
    pattern: str, what: str = "", allowance: Allowance | None = None
) -> Callable[[str], Any]:
    """A function that searches names for the pattern and gives a match or None.

    Args:
        pattern: as Python's `re` takes it.
        what: how errors call it; the pattern itself if not given.
        allowance: shared with other patterns; its own if not given.
    """
    name = what or repr(pattern[:80])
    check_length(pattern, name)
    _check(pattern, name)
    try:
        compiled = regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise PlacementError(f"{name} is not a regular expression: {error}") from None
    clock = allowance or Allowance()

    def search(text: str) -> Any:
        started = time.monotonic()
        try:
            if clock.left <= 0:
                raise TimeoutError
            return compiled.search(text, timeout=clock.left)
        except (TimeoutError, MemoryError):
            raise PlacementError(
                f"{name} takes too long, or too much memory, on the names of this graph; "
                "does it repeat what repeats already, as in '(a+)+'?"
            ) from None
        finally:
            clock.left -= time.monotonic() - started

    return search


def check_length(pattern: str, name: str) -> None:
    """Raises for a pattern, or a label that is made of one, that nobody writes."""
    if len(pattern) > _MOST_CHARACTERS:
        raise PlacementError(
            f"{name} is {len(pattern):,} characters long, at most {_MOST_CHARACTERS:,} are taken"
        )


def _check(pattern: str, name: str) -> None:
    repeats = 1
    for token in _TOKEN.finditer(pattern):
        if token["group"]:
            raise PlacementError(f"{name}: {token['group']!r} is no group of a pattern here")
        if token["brace"]:
            raise PlacementError(
                f"{name}: a brace stands for a count, as in 'a{{2,3}}'; write '\\{{' for the "
                "character"
            )
        # Of numbers of hundreds of digits, which Python does not convert, the length says enough.
        counts = [text[:20] for text in (token["least"], token["most"]) if text]
        repeats *= max(1, *map(int, counts)) if counts else 1
        if repeats > _MOST_REPEATS:
            raise PlacementError(
                f"{name} repeats something over {_MOST_REPEATS:,} times, all counts multiplied"
            )
