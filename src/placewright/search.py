"""The loop: ask a placer, evaluate, tell it what came of it, until the budget is used."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from placewright.errors import PlacementError, SearchError, WorkerError
from placewright.evaluators.base import Evaluator
from placewright.measurement import Measurement, Trial
from placewright.metrics import MetricsLog
from placewright.placement import Placement
from placewright.placers.base import Explorer, Placer
from placewright.stopping import Stopped, Worker, never

_R = TypeVar("_R")

BATCH = 64
"""Placements asked for at a time: enough to keep all cores busy, few enough to stop at once."""

_DEAR_BATCH = 1
"""The same where each takes seconds: every one is recorded before the next begins, so that nothing
that was paid for is lost, and the budget is looked at in between."""

_MOST_IDLE = 100 * BATCH
"""After so many proposals that were all tried before (and twice as many as the journal of a resumed
run can explain), a placer is done: on a small problem a random one would otherwise never use up a
budget of trials, nor would a learned one that always proposes the same."""

_MOST_TOLD = 20_000
"""Of the trials before it, a placer is told of the best so many at most, to bound the memory."""

_CHECKPOINT_SECONDS = 10.0
"""How often placers are given the occasion to write a checkpoint."""

_MOST_REMEMBERED = 100_000
"""Measurements kept so that nothing is evaluated twice; older ones are forgotten, to bound the
memory of a long search."""

_MOST_REMEMBERED_BYTES = 256_000_000
"""Likewise, of what their placements take: those of a graph placed op by op are long."""

_STOPPED = "stopped while it was computing"

_ROUNDING = 1e-9
"""By what share a proven bound and a simulated step may differ and still be the same."""


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m` or `1h`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)(ms|s|m|h)?\s*", text)
    if not match:
        raise SearchError(f"{text!r} is not a time such as 90s, 5m or 1h")
    return float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}[match[2]]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When to stop: after some time, after some trials, or whichever comes first."""

    seconds: float | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is None and self.trials is None:
            raise SearchError("a search needs a budget: seconds, trials or both")
        if self.seconds is not None and not self.seconds > 0:
            raise SearchError(f"a budget of {self.seconds:g} seconds leaves no time to search")
        if self.trials is not None and self.trials < 1:
            raise SearchError(f"a budget of {self.trials} trials leaves nothing to try")


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """What one method found."""

    method: str
    best: Trial | None
    """Its fastest trial, or a failed one when none ran; None when it proposed nothing."""
    trials: int
    why_not: str = ""
    """Why it proposed nothing, where it says so."""
    seconds: float
    """Time it took, finding and evaluating placements together."""


@dataclass(kw_only=True)
class Progress:
    """Where a search stands; given to the observer after every batch."""

    budget: Budget
    started: float
    trials: int = 0
    resumed: int = 0
    """How many of the trials came from the journal."""
    placer: str = ""
    best: Trial | None = None
    best_of: dict[str, Trial] = field(default_factory=dict)
    trials_of: dict[str, int] = field(default_factory=dict)
    seconds_of: dict[str, float] = field(default_factory=dict)
    why_not_of: dict[str, str] = field(default_factory=dict)
    metrics_of: dict[str, dict[str, float]] = field(default_factory=dict)
    """The last update of each method that learns."""
    fault: str = ""
    """What broke the measuring itself, where that ended the search."""
    proven: bool = False
    """Whether the best is proven to be optimal, which ended the search."""

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    def results(self) -> list[MethodResult]:
        return [
            MethodResult(
                method=name,
                best=self.best_of.get(name),
                trials=self.trials_of[name],
                why_not=self.why_not_of.get(name, ""),
                seconds=self.seconds_of[name],
            )
            for name in self.trials_of
        ]

    def count(self, trial: Trial) -> None:
        self.trials += 1
        self.trials_of[trial.placer] = self.trials_of.get(trial.placer, 0) + 1
        self.seconds_of.setdefault(trial.placer, 0.0)
        self.best = better(self.best, trial)
        self.best_of[trial.placer] = better(self.best_of.get(trial.placer), trial)


class Record(Protocol):
    """Where trials are written down: a `Journal`, or what keeps one."""

    @property
    def trials(self) -> Sequence[Trial]:
        """Those of before the search."""

    def append(self, trials: Sequence[Trial]) -> None: ...


def better(a: Trial | None, b: Trial) -> Trial:
    """The faster trial; of equals, and of two that failed, the earlier one."""
    return b if a is None or b.measurement.mean_seconds < a.measurement.mean_seconds else a


def search(
    placers: Sequence[Placer],
    evaluator: Evaluator,
    budget: Budget,
    *,
    journal: Record | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
    observe: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = never,
    lower_bound_seconds: float = 0.0,
) -> Progress:
    """Runs the placers one after another, each until it has nothing left to propose.

    What earlier placers (or, on resuming, the journal) tried is told to the later ones, and a
    placement is never evaluated twice. The trial budget counts the journal's trials, so that a
    resumed run ends where the whole run would have.

    When the measuring itself breaks (`WorkerError`), what was found so far is the result, and
    `Progress.fault` says why; without a single trial the error is raised.

    `directory` is where methods that learn keep checkpoints and metrics. One that is restored from
    its checkpoint repeats what it proposed since, and is answered from the journal.

    The search ends early where no placement can be better than the best: its step takes no longer
    than `lower_bound_seconds`, or than what a placer has proved, where times are exact.

    A placer that computes when `stop()` becomes true has a few seconds to come to an end; after
    that it is abandoned, and the search ends with what it has.
    """
    worker = Worker()
    try:
        return _search(
            placers, evaluator, budget, journal, directory, seed, observe, stop,
            lower_bound_seconds, worker,
        )  # fmt: skip
    finally:
        worker.close()


def _search(
    placers: Sequence[Placer],
    evaluator: Evaluator,
    budget: Budget,
    journal: Record | None,
    directory: str | Path | None,
    seed: int,
    observe: Callable[[Progress], None],
    stop: Callable[[], bool],
    lower_bound_seconds: float,
    worker: Worker,
) -> Progress:
    exact = evaluator.cheap and not evaluator.noise

    def patiently(function: Callable[[], _R]) -> _R:
        return function() if stop is never else worker.run(function, stop)

    def is_proven() -> bool:
        bounds = [lower_bound_seconds, *(placer.lower_bound_seconds for placer in placers)]
        best = math.inf if progress.best is None else progress.best.measurement.mean_seconds
        return exact and max(bounds) > 0 and best <= max(bounds) * (1.0 + _ROUNDING)

    directory = None if directory is None else Path(directory)
    long = max(1, 4 * evaluator.problem.num_groups)
    most_remembered = max(100, min(_MOST_REMEMBERED, _MOST_REMEMBERED_BYTES // long))
    most_told = min(_MOST_TOLD, most_remembered)
    known: dict[Placement, Measurement] = {}
    told: list[Trial] = []
    progress = Progress(budget=budget, started=time.monotonic())
    for placer in placers:
        progress.trials_of[placer.name] = 0
        progress.seconds_of[placer.name] = 0.0
    earlier_seconds = 0.0
    for trial in journal.trials if journal is not None else ():
        progress.count(trial)
        # The first one: that is what its placer was told.
        known.setdefault(trial.placement, trial.measurement)
        told.append(trial)
        progress.seconds_of[trial.placer] += max(0.0, trial.at_seconds - earlier_seconds)
        earlier_seconds = max(earlier_seconds, trial.at_seconds)
    progress.resumed = len(told)
    progress.proven = is_proven()
    for name, count in progress.trials_of.items():
        if not count:
            progress.why_not_of[name] = "the search was over before its turn"
    # All of them before the first trial: a checkpoint that cannot be used must not cost a search.
    restored = {
        placer.name
        for placer in placers
        if told and directory is not None and placer.restore(directory, told)
    }
    metrics = None if directory is None else MetricsLog(directory, keep=restored)
    for number, placer in enumerate(placers):
        placer.before(placers[number + 1 :])
    since: list[Trial] = []
    most_idle = _MOST_IDLE + 2 * len(told)
    batch = BATCH if evaluator.cheap else _DEAR_BATCH * evaluator.at_a_time

    def out_of_budget() -> bool:
        spent = budget.seconds is not None and progress.elapsed_seconds >= budget.seconds
        used = budget.trials is not None and progress.trials >= budget.trials
        return spent or used or bool(progress.fault) or stop() or progress.proven

    for number, placer in enumerate(placers):
        if out_of_budget():
            break
        # Endless placers share what is left; the others end by themselves.
        part = 1.0
        if placer.endless:
            part = placer.share / sum(other.share for other in placers[number:] if other.endless)
        until_seconds = until_trials = math.inf
        if budget.seconds is not None:
            elapsed = progress.elapsed_seconds
            until_seconds = elapsed + (budget.seconds - elapsed) * part
        if budget.trials is not None:
            until_trials = progress.trials + math.ceil((budget.trials - progress.trials) * part)
        idle = 0
        progress.placer = placer.name
        earlier = [*(told if placer.name not in restored else ()), *since]
        if earlier:
            try:
                patiently(functools.partial(placer.tell, earlier))
            except Stopped:
                progress.why_not_of[placer.name] = _STOPPED
                break
        checkpointed = time.monotonic()
        while not (
            stop()
            or progress.proven
            or progress.elapsed_seconds >= until_seconds
            or progress.trials >= until_trials
            or idle >= most_idle
        ):
            batch_started = time.monotonic()
            explored = []
            try:
                if isinstance(placer, Explorer):
                    most = until_trials - progress.trials
                    explored = patiently(functools.partial(placer.explore, most))
                    asked = [placement for placement, _ in explored]
                else:
                    count = int(min(batch, until_trials - progress.trials))
                    asked = patiently(functools.partial(placer.ask, count))
                if not asked:
                    progress.seconds_of[placer.name] += time.monotonic() - batch_started
                    if isinstance(placer, Explorer) and not placer.finished:
                        observe(progress)
                        continue
                    break
                for placement in asked:
                    placement.check(evaluator.problem)
                new = [p for p in dict.fromkeys(asked) if p not in known]
                idle = 0 if new else idle + len(asked)
                known.update(explored)
                measurements = [known[p] for p in new] if explored else evaluator.evaluate(new)
            except Stopped:
                break
            except WorkerError as fault:
                if not progress.trials:
                    raise
                progress.fault = str(fault)
                break
            if len(measurements) != len(new):
                raise PlacementError("the evaluator gave fewer measurements than placements")
            as_trial = functools.partial(
                Trial,
                placer=placer.name,
                seed=seed,
                at_seconds=earlier_seconds + progress.elapsed_seconds,
            )
            # What it asked for but others had tried is told as its own: that is what it proposed.
            known.update(zip(new, measurements, strict=True))
            answers = [
                as_trial(placement=placement, measurement=known[placement]) for placement in asked
            ]
            trials = answers
            if len(new) < len(asked):
                trial_of = {answer.placement: answer for answer in reversed(answers)}
                trials = [trial_of[placement] for placement in new]
            while len(known) > most_remembered:
                del known[next(iter(known))]
            if journal is not None and trials:
                journal.append(trials)
            for trial in trials:
                progress.count(trial)
            if number + 1 < len(placers):  # for those that come after
                since += trials
                if len(since) > 2 * most_told:
                    since.sort(key=lambda trial: trial.measurement.mean_seconds)
                    del since[most_told:]
            for answer in answers:
                progress.best_of[placer.name] = better(progress.best_of.get(placer.name), answer)
            try:
                patiently(functools.partial(placer.tell, answers))
            except Stopped:
                break
            progress.proven = is_proven()
            for record in placer.take_metrics():
                progress.metrics_of[placer.name] = record
                if metrics is not None:
                    metrics.append(placer.name, progress.trials, answers[-1].at_seconds, record)
            due = time.monotonic() - checkpointed >= _CHECKPOINT_SECONDS
            if directory is not None and due and placer.checkpoint(directory):
                checkpointed = time.monotonic()
            progress.seconds_of[placer.name] += time.monotonic() - batch_started
            observe(progress)
        if directory is not None and not worker.abandoned:
            placer.checkpoint(directory)
        if isinstance(placer, Explorer):
            placer.close()
        progress.why_not_of[placer.name] = placer.why_not
        if worker.abandoned:
            progress.why_not_of[placer.name] = _STOPPED
            break
    if progress.proven:
        for name, count in progress.trials_of.items():
            if not count and name not in progress.best_of:
                progress.why_not_of[name] = "not needed: what others found is proven to be optimal"
    if metrics is not None:
        metrics.close()
    return progress
