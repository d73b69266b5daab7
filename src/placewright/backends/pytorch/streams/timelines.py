"""When each group ran on its stream: as measured, and as it was expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placewright.backends.pytorch.streams.schedule import Schedule
from placewright.errors import PlacementError
from placewright.files import write_json


@dataclass(frozen=True, kw_only=True)
class Timelines:
    """Of one call, from its begin on."""

    names: tuple[str, ...]
    """Of the groups."""
    kernels: tuple[str, ...]
    """What computed each."""
    streams: tuple[int, ...]
    """Where each ran."""
    measured: tuple[tuple[float, float], ...]
    """Start and end of each in seconds. Events around a group take time themselves: a microsecond
    or two."""
    expected: tuple[tuple[float, float], ...]
    """Likewise, from the times that groups take alone."""

    @staticmethod
    def of(
        names: Sequence[str],
        kernels: Sequence[str],
        schedule: Schedule,
        measured: Sequence[tuple[float, float]],
    ) -> Timelines:
        return Timelines(
            names=tuple(names), kernels=tuple(kernels), streams=schedule.streams,
            measured=tuple(measured),
            expected=tuple(zip(schedule.start_seconds, schedule.end_seconds, strict=True)),
        )  # fmt: skip

    @property
    def measured_seconds(self) -> float:
        return max((end for _, end in self.measured), default=0.0)

    @property
    def expected_seconds(self) -> float:
        return max((end for _, end in self.expected), default=0.0)

    def busy_seconds(self, times: Sequence[tuple[float, float]] = ()) -> dict[int, float]:
        """Of each stream, as measured, or from these times of the groups."""
        busy = dict.fromkeys(sorted(set(self.streams)), 0.0)
        for stream, (start, end) in zip(self.streams, times or self.measured, strict=True):
            busy[stream] += end - start
        return busy

    def chrome_trace(self) -> dict[str, Any]:
        """Both in the Chrome trace format, for ui.perfetto.dev: measured above, expected below."""
        events: list[dict[str, Any]] = []
        for process, (what, times) in enumerate(
            (("measured", self.measured), ("expected", self.expected))
        ):
            events.append(_named("process_name", what, process, 0))
            for stream in sorted(set(self.streams)):
                events.append(_named("thread_name", f"stream {stream}", process, stream))
            for name, kernel, stream, (start, end) in zip(
                self.names, self.kernels, self.streams, times, strict=True
            ):
                events.append(
                    {"name": name, "ph": "X", "pid": process, "tid": stream, "ts": start * 1e6,
                     "dur": (end - start) * 1e6, "args": {"kernel": kernel}}
                )  # fmt: skip
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "measured_seconds": self.measured_seconds,
                "expected_seconds": self.expected_seconds,
            },
        }

    def save(self, path: str | Path) -> None:
        """Writes the Chrome trace."""
        write_json(path, self.chrome_trace(), PlacementError)

    def table(self, most: int = 12) -> str:
        """The streams, and the groups that took longest, in lines of text."""
        lines = [
            f"measured {self.measured_seconds * 1e3:.3f} ms, "
            f"expected {self.expected_seconds * 1e3:.3f} ms",
        ]
        for stream, seconds in self.busy_seconds().items():
            count = self.streams.count(stream)
            share = seconds / self.measured_seconds if self.measured_seconds else 0.0
            lines.append(
                f"stream {stream}: {count} groups, busy {seconds * 1e3:.3f} ms ({share:.0%})"
            )
        return "\n".join([*lines, *self.longest(most)])

    def longest(self, most: int) -> list[str]:
        """The groups that took longest, in a line each."""
        lines = []
        longest = sorted(
            range(len(self.names)), key=lambda i: self.measured[i][0] - self.measured[i][1]
        )
        for i in longest[:most]:
            took = self.measured[i][1] - self.measured[i][0]
            thought = self.expected[i][1] - self.expected[i][0]
            lines.append(
                f"{took * 1e6:7.1f} us, expected {thought * 1e6:6.1f}: {self.names[i]} "
                f"({self.kernels[i]}, stream {self.streams[i]})"
            )
        return lines


def _named(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
