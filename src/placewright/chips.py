"""Names of devices that are parts of one chip: `gpu:0/stream:1` and `gpu:0/part:3`.

Streams of a GPU run kernels side by side on all of it and have one memory. Partitions have
multiprocessors of their own (green contexts) and a share of the memory; its bandwidth they share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from placewright.errors import ClusterError

STREAM, PART = "stream", "part"

_LANE = re.compile(r"(.+)/(stream|part):(\d+)")
_RANGE = re.compile(r"(.+:)(\d+)-(\d+)")
_MOST_IN_RANGE = 1024


class DeviceName(NamedTuple):
    """What a device's name says of it."""

    chip: str
    """The physical device, such as `gpu:0`: the whole name where it is not a part of one."""
    sharing: str
    """`stream`, `part`, or nothing for a device that is a chip of its own."""
    number: int
    """Which stream or partition."""


def parse(name: str) -> DeviceName:
    match = _LANE.fullmatch(name)
    return DeviceName(match[1], match[2], int(match[3])) if match else DeviceName(name, "", 0)


def canonical(name: str) -> str:
    """As clusters call a device: torch's `cuda:0` is `gpu:0`, and `cuda` and `cpu` are number 0."""
    chip, slash, lane = name.partition("/")
    kind, _, number = chip.partition(":")
    kind = "gpu" if kind == "cuda" else kind
    if kind in ("gpu", "cpu"):
        chip = f"{kind}:{number or 0}"
    return f"{chip}{slash}{lane}"


def expanded(names: Sequence[str]) -> list[str]:
    """Ranges written out, in the names of clusters: `cuda:0/part:0-3` is four partitions."""
    result = []
    for name in names:
        match = _RANGE.fullmatch(name)
        if match is None:
            result.append(canonical(name))
            continue
        first, last = int(match[2]), int(match[3])
        if not first <= last < first + _MOST_IN_RANGE:
            raise ClusterError(f"{name!r}: a range of devices counts up, as in 0-3")
        result += [canonical(f"{match[1]}{number}") for number in range(first, last + 1)]
    return result
