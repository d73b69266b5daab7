"""What an explanation is made of."""

from __future__ import annotations

from typing import NamedTuple


class Section(NamedTuple):
    """A part of an explanation."""

    title: str
    lines: tuple[str, ...]
