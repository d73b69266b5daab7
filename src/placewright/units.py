"""Numbers with units, for people to read and as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from placewright.errors import SearchError


def format_seconds(seconds: float) -> str:
    """`1.171 s`, `628.45 ms`, `41.0 µs`."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} µs"


def format_bytes(size: float, digits: int = 3) -> str:
    """`13.2 GB`, `64 B`: with so many significant digits."""
    if size < 1000:
        return f"{size:.0f} B"
    return _scaled(size / 1000, ("kB", "MB", "GB", "TB", "PB"), digits)


def format_count(count: float) -> str:
    """`314`, `12.3 k`, `5.07 T`."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"), 3).strip()


def _scaled(value: float, units: Sequence[str], digits: int) -> str:
    *smaller, largest = units
    for unit in smaller:
        text = f"{value:.{digits}g}"
        if float(text) < 1000:
            return f"{text} {unit}"
        value /= 1000
    return f"{value:.{digits}g} {largest}"


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m` or `1h`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)(ms|s|m|h)?\s*", text)
    if not match:
        raise SearchError(f"{text!r} is not a time such as 90s, 5m or 1h")
    return float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}[match[2]]


def format_duration(seconds: float) -> str:
    """As `parse_duration` reads it: `90s`, `5m`, `1h`."""
    for size, unit in ((3600, "h"), (60, "m")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"
