"""The errors a user can cause. Each message is one line: what, where, the likely cause."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

_MOST_CHARACTERS = 500
"""Of a message: what a file holds is quoted in many, and a file may hold a name of a megabyte."""


class PlacewrightError(Exception):
    """Root of all errors raised on purpose; the command line prints it as one line and exits 2."""

    def __init__(self, message: str) -> None:
        # Names in files may hold line breaks, of all kinds that there are.
        message = " ".join(message.splitlines())
        if len(message) > _MOST_CHARACTERS:
            # Both ends say most: where it is, and what is likely wrong with it.
            half = (_MOST_CHARACTERS - 5) // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)


class ModelError(PlacewrightError):
    """A model or graph that cannot be read, or that contradicts itself."""


class ClusterError(PlacewrightError):
    """A cluster description that cannot be read, or that describes an impossible machine."""


class CostsError(PlacewrightError):
    """Cost tables that are malformed or belong to another graph."""


class PlacementError(PlacewrightError):
    """A placement or grouping that does not fit its problem."""


class SearchError(PlacewrightError):
    """A search that cannot start: budget, method, output directory or constraints."""


class LearningError(PlacewrightError):
    """A policy, a checkpoint or settings of a learned method that cannot be used."""


class ReportError(PlacewrightError):
    """A directory that holds no run to report on, or a report that cannot be written."""


class WorkerError(PlacewrightError):
    """The measuring infrastructure itself broke (not the placement: that is an `Outcome`)."""


class MissingExtraError(PlacewrightError):
    """An optional dependency is needed and not installed; the message names the install command."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the optional dependency '{extra}', which is not installed; "
            f"run: pip install 'placewright[{extra}]'"
        )


def check_settings(
    what: str | Callable[..., Any],
    given: Iterable[str],
    known: Iterable[str],
    error: type[PlacewrightError] = SearchError,
) -> None:
    """Raises for the first keyword that is not known, with those that look like it. Where `what`
    is a function its own arguments are known as well."""
    if not isinstance(what, str):
        kept = [
            p.name for p in inspect.signature(what).parameters.values() if p.kind != p.VAR_KEYWORD
        ]
        what, known = f"{what.__name__}()", [*known, *kept]
    known = sorted(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known)}"
            raise error(f"{what} has no argument {name!r}; {hint}")
