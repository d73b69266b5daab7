"""The record of a search: one JSON line per trial, appended and never changed."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from placewright._version import VERSION
from placewright.errors import PlacementError, SearchError
from placewright.measurement import Measurement, Trial
from placewright.placement import Placement
from placewright.problem import Problem

logger = logging.getLogger(__name__)

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Journal:
    """Appends trials to a file. Opening it loads what is there already: `trials`, which stays as
    it was then.

    A kill at any byte loses at most the line being written: a torn last line is dropped on load,
    with a warning, and overwritten by the next one.
    """

    def __init__(self, path: str | Path, problem: Problem) -> None:
        self.path = Path(path)
        self._problem = problem
        try:
            data = self.path.read_bytes() if self.path.is_file() else b""
            self.trials, good = _parse(data, problem, self.path)
            # Opened for appending only now: a journal of another problem is left untouched.
            self._file = self.path.open("ab")
            if good < len(data):
                self._file.truncate(good)
        except OSError as fault:
            raise SearchError(f"{path}: cannot be opened: {fault.strerror}") from None

    def append(self, trials: Sequence[Trial]) -> None:
        lines = "".join(json.dumps(_to_json(trial), allow_nan=False) + "\n" for trial in trials)
        try:
            self._file.write(lines.encode())
            self._file.flush()
        except OSError as fault:
            raise SearchError(f"{self.path}: cannot be written: {fault.strerror}") from None

    def close(self) -> None:
        try:
            self._file.close()
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
    return _parse(data, problem, Path(path))[0]


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
    best: dict[str, float] = {}
    found: dict[str, list[Improvement]] = {}
    counts: Counter[str] = Counter()
    failures: dict[str, Trial] = {}
    number, seconds = 0, 0.0
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as fault:
        raise SearchError(f"{path}: cannot be read: {fault.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            placer = str(record["placer"])
            times = record["measurement"].get("step_seconds", ())
            mean = statistics.fmean(times) if times else math.inf
            seconds = max(seconds, float(record["at_seconds"]))
            counts[placer] += 1
            improves = mean < best.get(placer, math.inf)
            if improves or (not times and placer not in failures):
                trial = _from_json(record, problem)
                if improves:
                    best[placer] = mean
                    found.setdefault(placer, []).append(Improvement(number, trial))
                else:
                    failures[placer] = trial
                    found.setdefault(placer, [])
        except (PlacementError, KeyError, TypeError, ValueError, AttributeError) as fault:
            if number == len(lines) and not line.endswith(b"\n"):
                number -= 1
                break
            raise SearchError(f"{path}: line {number}: {fault}") from None
    return Progression(
        trials=number,
        seconds=seconds,
        improvements=found,
        trials_of=dict(counts),
        failures=failures,
    )


def _parse(data: bytes, problem: Problem, path: Path) -> tuple[list[Trial], int]:
    """The trials, and how many bytes of the file are whole lines."""
    trials = []
    good = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        whole = line.endswith(b"\n")
        try:
            record = json.loads(line) if whole else None
        except ValueError:
            record = None
        if record is None:
            if number == len(lines):
                logger.warning("%s: dropped its last line, which is torn", path)
                break
            raise SearchError(f"{path}: line {number} is not JSON; was the file edited?")
        try:
            trials.append(_from_json(record, problem))
        except (PlacementError, KeyError, TypeError, ValueError, OverflowError) as fault:
            raise SearchError(f"{path}: line {number}: {fault}") from None
        good += len(line)
    return trials, good


def _to_json(trial: Trial) -> dict[str, Any]:
    devices = trial.placement.devices.tolist()
    # One character a group keeps 100,000 trials of 300 groups at 40 MB.
    short = max(devices, default=0) < len(_DIGITS)
    return {
        "placement": "".join(_DIGITS[d] for d in devices) if short else devices,
        "measurement": trial.measurement.to_json(),
        "placer": trial.placer,
        "seed": trial.seed,
        "at_seconds": trial.at_seconds,
        "space": trial.placement.space,
        "version": VERSION,
    }


def _from_json(record: Any, problem: Problem) -> Trial:
    # Version 0.1.0 wrote the fingerprint of the whole problem instead, its costs included.
    if "space" in record:
        made_for, ours = record["space"], problem.space.fingerprint
    else:
        made_for, ours = record["problem"], problem.fingerprint
    if made_for != ours:
        raise PlacementError(
            f"a trial of {'space' if 'space' in record else 'problem'} {made_for}, this one is "
            f"{ours}; another model, cluster, grouping or constraint?"
        )
    devices = record["placement"]
    if isinstance(devices, str):
        devices = [_DIGITS.index(digit) for digit in devices]
    return Trial(
        placement=Placement.of(problem, devices),
        measurement=Measurement.from_json(record["measurement"]),
        placer=str(record["placer"]),
        seed=int(record["seed"]),
        at_seconds=float(record["at_seconds"]),
    )
