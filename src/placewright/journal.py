"""The record of a search: one JSON line per trial, appended and never changed.

Each line ends with a checksum of the rest of it, so that a line of which a single byte was changed
is refused and not believed.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from placewright._version import VERSION
from placewright.errors import PlacementError, SearchError
from placewright.files import sync, sync_directory
from placewright.graph import IndexArray
from placewright.measurement import Measurement, Trial
from placewright.placement import Placement, digest
from placewright.problem import Problem

logger = logging.getLogger(__name__)

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

_SHORT = 4096
"""Placements of no more groups are written one character a group, longer ones in less."""

_MOST_CHANGED = 1 / 64
"""A long placement that differs from the last one written in full in no larger a share of its
groups is written as that and what differs."""

_SYNC_SECONDS = 2.0
"""How often what is appended is made to survive a power cut, at most: that takes milliseconds."""

_SUM = re.compile(rb', "sum": "([0-9a-f]{8})"\}')
_SUM_BYTES = 20
"""How a line ends. The sum is the CRC-32 of the record without it, as it was written."""

_MALFORMED = (PlacementError, KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What comes of records that are JSON, and not those of trials."""


class Journal:
    """Appends trials to a file. Opening it loads what is there already: `trials`, which stays as
    it was then.

    A kill at any byte loses at most the line being written: a torn last line is dropped on load,
    with a warning, and overwritten by the next one. A power cut loses at most what was appended in
    the `_SYNC_SECONDS` before the last line, and nothing of a journal that was closed.
    """

    def __init__(self, path: str | Path, problem: Problem) -> None:
        self.path = Path(path)
        self._problem = problem
        try:
            data = self.path.read_bytes() if self.path.is_file() else b""
            self._coder = _Coder(problem)
            self.trials, good = _parse(data, self._coder, self.path)
            if good < len(data):
                logger.warning("%s: dropped its last line, which is torn", path)
            # Opened for appending only now: a journal of another problem is left untouched.
            self._file = self.path.open("ab")
            if good < len(data):
                self._file.truncate(good)
            sync(self._file)
            sync_directory(self.path.parent)
        except OSError as fault:
            raise SearchError(f"{path}: cannot be opened: {fault.strerror}") from None
        self._synced = time.monotonic()

    def append(self, trials: Sequence[Trial]) -> None:
        records = [self._coder.to_json(trial) for trial in trials]
        lines = b"".join(_line(record) for record in records)
        try:
            self._file.write(lines)
            self._file.flush()
            if time.monotonic() - self._synced >= _SYNC_SECONDS:
                sync(self._file)
                self._synced = time.monotonic()
        except OSError as fault:
            raise SearchError(f"{self.path}: cannot be written: {fault.strerror}") from None

    def close(self) -> None:
        try:
            with self._file:
                self._file.flush()
                sync(self._file)
        except OSError as fault:  # what could not be flushed before cannot be now
            raise SearchError(f"{self.path}: cannot be written: {fault.strerror}") from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except SearchError:
            logger.debug("closing %s failed after another error", self.path)


def read_trials(path: str | Path, problem: Problem) -> list[Trial]:
    """The trials of a journal, without opening it for writing."""
    try:
        data = Path(path).read_bytes()
    except OSError as fault:
        raise SearchError(f"{path}: cannot be read: {fault.strerror}") from None
    trials, good = _parse(data, _Coder(problem), Path(path))
    if good < len(data):
        logger.warning("%s: left out its last line, which is torn", path)
    return trials


class Improvement(NamedTuple):
    """A trial that was better than all before it of the same placer."""

    number: int
    """Of the trial, counted over all placers from 1."""
    trial: Trial


@dataclass(frozen=True, kw_only=True)
class Progression:
    """How a search went, without the trials that led nowhere."""

    trials: int
    seconds: float
    """When the last trial ended."""
    improvements: Mapping[str, Sequence[Improvement]]
    """Of each placer, in the order they first appear; empty for one none of whose trials ran."""
    trials_of: Mapping[str, int]
    """How many trials each placer made."""
    failures: Mapping[str, Trial]
    """The first failure of each placer that had one."""


def read_progression(path: str | Path, problem: Problem) -> Progression:
    """What a report needs of a journal: seconds for a hundred thousand trials, as only those that
    improved on the ones before are looked at closely. A torn last line is left out."""
    coder = _Coder(problem)
    best: dict[str, float] = {}
    found: dict[str, list[Improvement]] = {}
    counts: Counter[str] = Counter()
    failures: dict[str, Trial] = {}
    number, seconds = 0, 0.0
    try:
        data = Path(path).read_bytes()
    except OSError as fault:
        raise SearchError(f"{path}: cannot be read: {fault.strerror}") from None
    for number, record, _ in _records(data, Path(path)):
        try:
            placer = str(record["placer"])
            coder.look_at(record)
            times = record["measurement"].get("step_seconds", ())
            mean = statistics.fmean(times) if times else math.inf
            seconds = max(seconds, float(record["at_seconds"]))
            counts[placer] += 1
            improves = mean < best.get(placer, math.inf)
            if improves or (not times and placer not in failures):
                trial = coder.from_json(record)
                if improves:
                    best[placer] = mean
                    found.setdefault(placer, []).append(Improvement(number, trial))
                else:
                    failures[placer] = trial
                    found.setdefault(placer, [])
        except _MALFORMED as fault:
            raise SearchError(f"{path}: line {number}: {fault}") from None
    return Progression(
        trials=number,
        seconds=seconds,
        improvements=found,
        trials_of=dict(counts),
        failures=failures,
    )


def _parse(data: bytes, coder: _Coder, path: Path) -> tuple[list[Trial], int]:
    """The trials, and how many bytes of the file are whole lines."""
    trials = []
    good = 0
    for number, record, end in _records(data, path):
        try:
            coder.look_at(record)
            trials.append(coder.from_json(record))
        except _MALFORMED as fault:
            raise SearchError(f"{path}: line {number}: {fault}") from None
        good = end
    return trials, good


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, allow_nan=False).encode()
    return text[:-1] + b', "sum": "%08x"}\n' % zlib.crc32(text)


def _records(data: bytes, path: Path) -> Iterator[tuple[int, Any, int]]:
    """The number of each line, what it says, and where in the file it ends; a torn last line is
    left out.

    Raises for a line that is not as it was written.
    """
    end = 0
    # Not at other ends of lines: there are none in what is written.
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        end += len(line) + 1
        found = _SUM.fullmatch(line[-_SUM_BYTES:])
        if found and int(found[1], 16) != zlib.crc32(line[:-_SUM_BYTES] + b"}"):
            raise SearchError(f"{path}: line {number}: its checksum is not that of the rest of it")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise SearchError(f"{path}: line {number} is not JSON; was the file edited?") from None
        # Version 0.1.0 wrote no checksums, nor spaces.
        if not found and isinstance(record, dict) and ("sum" in record or "space" in record):
            raise SearchError(f"{path}: line {number}: has no checksum; was the file edited?")
        yield number, record, end
    torn = data[end:].decode(errors="replace")
    try:
        _, length = json.JSONDecoder().raw_decode(torn)
    except (ValueError, RecursionError):
        return  # as a kill leaves it: the beginning of a record
    if length < len(torn):
        raise SearchError(f"{path}: after its last line is something else; was the file edited?")


class _Coder:
    """Writes and reads the lines of one journal, whose trials may be of a problem or of the same
    placed op by op (`Problem.refined`).

    A short placement is text, one character a group: 100,000 trials of 300 groups take 40 MB. A
    long one is `{"zlib": ...}`, its devices as bytes, compressed; or, near such a one,
    `{"from": digest, "changed": [groups, devices]}`. The digest is that of the last line of its
    problem that has all devices.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._whole: dict[str, tuple[int, IndexArray]] = {}
        """Of each space, by fingerprint, the last long placement written in full."""

    def to_json(self, trial: Trial) -> dict[str, Any]:
        return {
            "placement": self._encoded(trial.placement),
            "measurement": trial.measurement.to_json(),
            "placer": trial.placer,
            "seed": trial.seed,
            "at_seconds": trial.at_seconds,
            "space": trial.placement.space,
            "version": VERSION,
        }

    def from_json(self, record: Any) -> Trial:
        problem = self._problem_of(record)
        return Trial(
            placement=Placement.of(problem, self._decoded(record)),
            measurement=Measurement.from_json(record["measurement"]),
            placer=str(record["placer"]),
            seed=int(record["seed"]),
            at_seconds=float(record["at_seconds"]),
        )

    def look_at(self, record: Any) -> None:
        """Remembers what lines to come may refer to; each line has to be looked at, in order."""
        devices = record["placement"]
        if isinstance(devices, dict) and "zlib" in devices:
            problem = self._problem_of(record)
            whole = _unpacked(devices["zlib"], problem.num_groups)
            self._whole[problem.space.fingerprint] = digest(whole), whole

    def _problem_of(self, record: Any) -> Problem:
        # Version 0.1.0 wrote the fingerprint of the whole problem instead, its costs included.
        if "space" in record:
            made_for, ours = record["space"], self._problem.space.fingerprint
        else:
            made_for, ours = record["problem"], self._problem.fingerprint
        if made_for == ours:
            return self._problem
        # Made only where it is needed: it takes a while for a large graph.
        if "space" in record and made_for == self._problem.refined.space.fingerprint:
            return self._problem.refined
        raise PlacementError(
            f"a trial of {'space' if 'space' in record else 'problem'} {made_for}, this one is "
            f"{ours}; another model, cluster, grouping or constraint?"
        )

    def _encoded(self, placement: Placement) -> str | list[int] | dict[str, Any]:
        devices = placement.devices
        if len(devices) <= _SHORT:
            values: list[int] = devices.tolist()
            short = max(values, default=0) < len(_DIGITS)
            return "".join(_DIGITS[d] for d in values) if short else values
        if placement.space in self._whole:
            name, whole = self._whole[placement.space]
            changed = np.flatnonzero(devices != whole)
            if len(changed) <= _MOST_CHANGED * len(devices):
                return {"from": name, "changed": [changed.tolist(), devices[changed].tolist()]}
        self._whole[placement.space] = placement.digest, devices
        return {"zlib": base64.b64encode(zlib.compress(devices.astype("<u2").tobytes())).decode()}

    def _decoded(self, record: Any) -> Sequence[int] | IndexArray:
        devices = record["placement"]
        if isinstance(devices, str):
            return [_DIGITS.index(digit) for digit in devices]
        if not isinstance(devices, dict):
            return _whole_numbers(devices)
        name, whole = self._whole[self._problem_of(record).space.fingerprint]
        if "zlib" in devices:
            return whole
        if name != devices["from"]:
            raise PlacementError("refers to a placement that no line before it has")
        groups, values = map(_whole_numbers, devices["changed"])
        if groups.shape != values.shape or not np.all((groups >= 0) & (groups < len(whole))):
            raise PlacementError("changes groups that there are not")
        result = whole.copy()
        result[groups] = values
        return result


def _whole_numbers(values: object) -> IndexArray:
    array = np.array(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise PlacementError("has something else than whole numbers in a placement")
    return array.astype(np.int32)


def _unpacked(text: str, groups: int) -> IndexArray:
    packed = zlib.decompressobj()
    try:
        # One byte more than there can be tells that there is more: a line can stand for gigabytes.
        data = packed.decompress(base64.b64decode(text, validate=True), 2 * groups + 1)
    except zlib.error as fault:
        raise PlacementError(f"a placement cannot be decompressed: {fault}") from None
    if len(data) != 2 * groups or not packed.eof:
        raise PlacementError(f"a compressed placement is not one of {groups:,} groups")
    return np.frombuffer(data, dtype="<u2").astype(np.int32)
