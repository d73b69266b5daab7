"""What TensorFlow's allocator holds for the CPU device of this process.

TensorFlow can be told to hold no more than so much, and then every op for which there is no room
waits ten seconds for others to free some before it fails, several of them one after another. So
limits are not given to TensorFlow: what it holds is counted, and compared with them from outside.
"""

from __future__ import annotations

import time
from typing import Any

from placewright.units import format_bytes

_DEVICE = "CPU:0"
_SETTLE_SECONDS = 1.0
"""What sessions leave is freed a moment after they are closed."""

NOT_COUNTED = (
    "limit_memory needs the allocator that TensorFlow uses with oneDNN; is TF_ENABLE_ONEDNN_OPTS=0 "
    "set?"
)


def peak_bytes() -> int | None:
    """The most it has held since `forget`; None where TensorFlow does not count."""
    found = _info()
    return None if found is None else found["peak"]


def too_much(device: str, peak: int, limit: int) -> str:
    return f"{device} held {format_bytes(peak)} at once and has {format_bytes(limit)}"


def forget() -> int | None:
    """Counts anew, once what was there before is gone."""
    until = time.monotonic() + _SETTLE_SECONDS
    while (found := _info()) and found["current"] and time.monotonic() < until:
        time.sleep(0.01)
    if found is None:
        return None
    _context().reset_memory_stats(_DEVICE)
    return peak_bytes()


def _info() -> dict[str, int] | None:
    try:
        found: dict[str, int] = _context().get_memory_info(_DEVICE)
        return found
    except ValueError:  # without oneDNN's allocator
        return None


def _context() -> Any:
    """What `tf.config.experimental` asks, which a device's process does not have."""
    from tensorflow.python.eager import context

    return context.context()
