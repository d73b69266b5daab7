"""What there is to watch while a method learns: one record per update, for people and TensorBoard.

`metrics.jsonl` in the run's directory has a line for each update; where tensorboard is installed,
the same numbers go to an event file in `tensorboard/<method>`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TextIO

from placewright.errors import SearchError
from placewright.files import write_text
from placewright.schema import check, number, signed, text

FILE = "metrics.jsonl"

_RECORD = {
    "placer": text, "update": number, "reward_mean?": signed, "entropy?": signed,
    "failure_share?": signed,
}  # fmt: skip
"""What is read of a record; there may be more."""


class MetricsLog:
    """Appends records to a run's directory. Those of updates that are there already are skipped:
    a run that is resumed repeats the updates since its last checkpoint."""

    def __init__(self, folder: Path, *, keep: Collection[str] = ()) -> None:
        """`keep` are the methods that go on where they were; records of others, which begin anew,
        are dropped."""
        self._folder = folder
        self._last: dict[str, int] = {}
        path = folder / FILE
        if path.exists():
            records = [record for record in read_metrics(folder) if record["placer"] in keep]
            for record in records:
                placer = str(record["placer"])
                self._last[placer] = max(self._last.get(placer, 0), int(record["update"]))
            # Also without a torn last line, which the next record would be glued to.
            write_text(path, "".join(json.dumps(r) + "\n" for r in records), SearchError)
        self._file: TextIO | None = None  # opened for the first record: most runs have none
        self._events: dict[str, _EventFile] = {}

    def append(
        self, placer: str, trials: int, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        update = int(metrics["update"])
        if update <= self._last.get(placer, 0):
            return
        self._last[placer] = update
        # JSON has no NaN: a mean over nothing is left out.
        numbers = {name: value for name, value in metrics.items() if math.isfinite(value)}
        record = {"placer": placer, "trials": trials, "seconds": round(seconds, 3)} | numbers
        try:
            if self._file is None:
                self._file = (self._folder / FILE).open("a", encoding="utf-8")
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            if importlib.util.find_spec("tensorboard") is not None:
                if placer not in self._events:
                    self._events[placer] = _EventFile(self._folder / "tensorboard" / placer)
                self._events[placer].append(update, {"trials": trials} | numbers)
        except OSError as fault:
            raise SearchError(
                f"{self._folder / FILE}: cannot be written: {fault.strerror}"
            ) from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        for events in self._events.values():
            events.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's directory; a torn last line is left out."""
    path = folder / FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as fault:
        raise SearchError(f"{path}: cannot be read: {fault}") from None
    records = []
    for at, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if at < len(lines):
                raise SearchError(f"{path}: line {at} is no record of metrics") from None
            continue
        check(record, _RECORD, SearchError, where=f"{path}: line {at}")
        records.append(record | {"update": int(record["update"])})
    return records


class _EventFile:
    """TensorBoard's file format, through its own protocol buffers and record writer.

    Not through its summary writer, which imports TensorFlow wherever that is installed.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # The name TensorBoard looks for; a resumed run adds a second file beside the first.
        self._writer = RecordWriter(
            (folder / f"events.out.tfevents.{time.time_ns()}.placewright").open("wb")
        )
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def append(self, step: int, values: Mapping[str, float]) -> None:
        entries = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if name != "update"
        ]
        self._write(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=entries))
        )

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
