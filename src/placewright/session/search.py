"""The loop: ask a placer, have it tried, tell it what came of it, until the budget is used."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from placewright.budget import BATCH, Budget
from placewright.errors import WorkerError
from placewright.evaluators.base import Evaluator, Request
from placewright.measurement import Measurement, Trial, better
from placewright.placement import Placement
from placewright.placers.base import Again, Placer
from placewright.session.contenders import Contenders
from placewright.session.metrics import MetricsLog
from placewright.stopping import Stopped, Worker, never

_R = TypeVar("_R")

_EACH = 4
"""Placements asked for at a time for each that are tried at the same time, where each takes long:
who is quick need not wait for who is slow. Where only one is tried at a time it is recorded before
the next begins, so that nothing that was paid for is lost."""

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

ROUNDING = 1e-9
"""By what share a proven bound and a simulated step may differ and still be the same."""

_POLL_SECONDS = 0.02
"""How long to wait for answers before a placer that computes elsewhere is asked again."""


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
    contenders: Contenders = field(default_factory=Contenders)
    """Trials near the best, of which the answer is chosen where times are simulated."""

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

    def expect(self, name: str) -> None:
        """Makes room for a method that has no trials yet."""
        self.trials_of.setdefault(name, 0)
        self.seconds_of.setdefault(name, 0.0)

    def count(self, trial: Trial) -> None:
        self.expect(trial.placer)
        self.trials += 1
        self.trials_of[trial.placer] += 1
        self.best = better(self.best, trial)
        self.best_of[trial.placer] = better(self.best_of.get(trial.placer), trial)
        self.contenders.add(trial)


class Record(Protocol):
    """Where trials are written down: a `Journal`, or what keeps one."""

    @property
    def trials(self) -> Sequence[Trial]:
        """Those of before the search."""

    def append(self, trials: Sequence[Trial]) -> None: ...


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
    lower_bound_seconds: float | None = 0.0,
) -> Progress:
    """Runs the placers one after another, each until it has nothing left to propose.

    What earlier placers (or, on resuming, the journal) tried is told to the later ones, and a
    placement is never evaluated twice, unless times are noisy and its placer wants to know better
    (`Notes.again`). The trial budget counts the journal's trials, so that a resumed run ends where
    the whole run would have.

    When the measuring itself breaks (`WorkerError`), what was found so far is the result, and
    `Progress.fault` says why; without a single trial the error is raised.

    `directory` is where methods that learn keep checkpoints and metrics. One that is restored from
    its checkpoint repeats what it proposed since, and is answered from the journal.

    The search ends early where no placement can be better than the best: its step takes no longer
    than `lower_bound_seconds`, or than what a placer has proved, where times are exact. Not where
    that is None: for trials of the journal whose times are of another kind.

    A placer that computes when `stop()` becomes true has a few seconds to come to an end; after
    that it is abandoned, and the search ends with what it has.
    """
    folder = None if directory is None else Path(directory)
    loop = _Search(
        placers=placers, evaluator=evaluator, budget=budget, journal=journal, folder=folder,
        seed=seed, observe=observe, stop=stop, lower_bound_seconds=lower_bound_seconds,
    )  # fmt: skip
    try:
        return loop.run()
    finally:
        loop.worker.close()
        if loop.metrics is not None:
            loop.metrics.close()


@dataclass(kw_only=True)
class _Search:
    """What the turns of the placers have in common."""

    placers: Sequence[Placer]
    evaluator: Evaluator
    budget: Budget
    journal: Record | None
    folder: Path | None
    seed: int
    observe: Callable[[Progress], None]
    stop: Callable[[], bool]
    lower_bound_seconds: float | None

    def __post_init__(self) -> None:
        evaluator, journal, folder = self.evaluator, self.journal, self.folder
        self.worker = Worker()
        long = max(1, 4 * evaluator.problem.num_groups)
        self.most_remembered = max(100, min(_MOST_REMEMBERED, _MOST_REMEMBERED_BYTES // long))
        self.most_told = min(_MOST_TOLD, self.most_remembered)
        self.progress = progress = Progress(budget=self.budget, started=time.monotonic())
        for placer in self.placers:
            progress.expect(placer.name)
        self.known: dict[Placement, Measurement] = {}
        self.later: dict[Placement, list[Measurement]] = {}
        """Of placements that were tried more than once, all but the first."""
        self.exact = evaluator.cheap and not evaluator.noise
        """Whether another try of a placement gives the same time."""
        self.told: list[Trial] = []
        self.earlier_seconds = 0.0
        for trial in journal.trials if journal is not None else ():
            progress.count(trial)
            # The first one: that is what its placer was told at first.
            if trial.placement in self.known:
                self.later.setdefault(trial.placement, []).append(trial.measurement)
            else:
                self.known[trial.placement] = trial.measurement
            self.told.append(trial)
            took = max(0.0, trial.at_seconds - self.earlier_seconds)
            progress.seconds_of[trial.placer] += took
            self.earlier_seconds = max(self.earlier_seconds, trial.at_seconds)
        progress.resumed = len(self.told)
        self.prove()
        for name, count in progress.trials_of.items():
            if not count:
                progress.why_not_of[name] = "the search was over before its turn"
        # All of them before the first trial: a checkpoint that cannot be used costs no search.
        self.restored = {
            placer.name
            for placer in self.placers
            if self.told and folder is not None and placer.restore(folder, self.told)
        }
        self.metrics = None if folder is None else MetricsLog(folder, keep=self.restored)
        self.since: list[Trial] = []
        self.batch = BATCH
        if not evaluator.cheap:
            self.batch = _EACH * evaluator.parallel if evaluator.parallel > 1 else 1

    def run(self) -> Progress:
        for number, placer in enumerate(self.placers):
            if self.is_over(math.inf, math.inf):
                break
            last = number + 1 == len(self.placers)
            _Turn(self, placer, self._part(number, placer), last=last).run()
        progress = self.progress
        if progress.proven:
            for name, count in progress.trials_of.items():
                if not count and name not in progress.best_of:
                    why_not = "not needed: what others found is proven to be optimal"
                    progress.why_not_of[name] = why_not
        return progress

    def patiently(self, function: Callable[[], _R]) -> _R:
        """Calls what may take long; raises `Stopped` some seconds after a stop."""
        return function() if self.stop is never else self.worker.run(function, self.stop)

    def prove(self) -> None:
        """Notes whether the best is as fast as anything can be."""
        if self.lower_bound_seconds is None:
            return
        bounds = [placer.notes.lower_bound_seconds for placer in self.placers]
        bound = max([self.lower_bound_seconds, *bounds])
        best = self.progress.best
        self.progress.proven = (
            self.exact
            and bound > 0
            and best is not None
            and best.measurement.mean_seconds <= bound * (1.0 + ROUNDING)
        )

    def is_over(self, until_seconds: float, until_trials: float) -> bool:
        progress, budget = self.progress, self.budget
        if budget.seconds is not None:
            until_seconds = min(until_seconds, budget.seconds)
        if budget.trials is not None:
            until_trials = min(until_trials, budget.trials)
        return (
            bool(progress.fault)
            or progress.proven
            or self.worker.abandoned
            or self.stop()
            or progress.elapsed_seconds >= until_seconds
            or progress.trials >= until_trials
        )

    def _part(self, number: int, placer: Placer) -> tuple[float, float]:
        """Until when, and until how many trials in all, it is this placer's turn. Endless ones
        share what is left; the others end by themselves."""
        progress, budget = self.progress, self.budget
        part = 1.0
        if placer.endless:
            others = self.placers[number:]
            part = placer.share / sum(other.share for other in others if other.endless)
        until_seconds = until_trials = math.inf
        if budget.seconds is not None:
            elapsed = progress.elapsed_seconds
            until_seconds = elapsed + (budget.seconds - elapsed) * part
        if budget.trials is not None:
            until_trials = progress.trials + math.ceil((budget.trials - progress.trials) * part)
        return until_seconds, until_trials

    def keep(self, trials: Sequence[Trial], *, last: bool) -> None:
        """Records new trials, also for the placers that come after this one."""
        if self.journal is not None and trials:
            self.journal.append(trials)
        for trial in trials:
            self.progress.count(trial)
        if not last:
            self.since += trials
            if len(self.since) > 2 * self.most_told:
                self.since.sort(key=lambda trial: trial.measurement.mean_seconds)
                del self.since[self.most_told :]
        while len(self.known) > self.most_remembered:
            del self.known[next(iter(self.known))]


class _Turn:
    """One placer's part of a search.

    What a placer asks for is told together, in the order it asked, once all of it is tried: what it
    proposes then does not depend on who was quick. One that is `waiting` computes elsewhere; it is
    told as answers come and asked again meanwhile.
    """

    def __init__(
        self, every: _Search, placer: Placer, until: tuple[float, float], *, last: bool
    ) -> None:
        self.every = every
        self.placer = placer
        self.until = until
        """When its part ends, in seconds and in trials of the search."""
        self.last = last
        self.asked: list[Placement] = []
        """What it was not told of yet."""
        self.trying: dict[Placement, None] = {}
        """Those of them that nobody had tried before."""
        self.told_again: set[tuple[Placement, int]] = set()
        """What was told once more out of the record, and how many times were known then."""
        self.idle = 0
        self.checkpointed = time.monotonic()

    def run(self) -> None:
        every, placer = self.every, self.placer
        progress = every.progress
        progress.placer = placer.name
        told = [*(() if placer.name in every.restored else every.told), *every.since]
        if told:
            self._tell(told)
        most_idle = _MOST_IDLE + 2 * len(every.told)
        while not every.is_over(*self.until) and self.idle < most_idle:
            began = time.monotonic()
            going_on = self._step()
            progress.seconds_of[placer.name] += time.monotonic() - began
            if not going_on:
                break
            every.observe(progress)
        if self.trying:
            every.evaluator.drop()
        if every.folder is not None and not every.worker.abandoned:
            placer.checkpoint(every.folder)
        abandoned = _STOPPED if every.worker.abandoned else ""
        progress.why_not_of[placer.name] = abandoned or placer.notes.why_not

    def _tell(self, trials: Sequence[Trial]) -> None:
        with contextlib.suppress(Stopped):  # then the search is over
            self.every.patiently(functools.partial(self.placer.tell, trials))

    def _step(self) -> bool:
        """Asks and tells once; False when the placer is at its end."""
        every, placer = self.every, self.placer
        again, placer.notes.again = placer.notes.again, []
        try:
            if again and not every.exact and self._try_again(again):
                self._watch()
                return True
            if not self._ask():
                return False
            self._try()
        except Stopped:
            return False
        except WorkerError as fault:
            # Where nothing was ever tried, that is no result but an error.
            if not every.progress.trials and not any(p in every.known for p in self.trying):
                raise
            every.progress.fault = str(fault)
        answers, new = self._answers()
        every.keep(new, last=self.last)
        if answers:
            best_of = every.progress.best_of
            for answer in answers:
                best_of[placer.name] = better(best_of.get(placer.name), answer)
            self._tell(answers)
            every.prove()
        self._watch()
        return True

    def _ask(self) -> bool:
        """Hands in what the placer wants tried; False when it wants nothing any more."""
        every, placer = self.every, self.placer
        room = self.until[1] - every.progress.trials - len(self.trying)
        count = int(min(every.batch, room))
        asked = every.patiently(functools.partial(placer.ask, count)) if count > 0 else []
        if not asked:
            return bool(self.asked) or placer.waiting
        for placement in asked:
            placement.check(every.evaluator.problem)
        new = [p for p in dict.fromkeys(asked) if p not in every.known and p not in self.trying]
        self.idle = 0 if new else self.idle + len(asked)
        self.asked += asked
        self.trying.update(dict.fromkeys(new))
        every.evaluator.submit([Request(placement) for placement in new])
        return True

    def _try(self) -> None:
        every = self.every
        missing = sum(placement not in every.known for placement in self.trying)
        while missing:
            waiting = self.placer.waiting
            for placement, run in every.evaluator.collect(_POLL_SECONDS if waiting else 1.0):
                if placement in self.trying and placement not in every.known:
                    every.known[placement] = run.measurement
                    missing -= 1
            if waiting or every.stop():
                return

    def _try_again(self, again: Sequence[Again]) -> bool:
        """Whether there was room for any of these; what came of them is told."""
        every, placer = self.every, self.placer
        answers: list[Measurement] = []
        asked: list[Placement] = []
        new: dict[Placement, int] = {}
        room = self.until[1] - every.progress.trials - len(self.trying)
        for placement, known in dict.fromkeys(again):
            later = every.later.get(placement, ())
            if 0 < known <= len(later):  # the journal of a run that goes on has it
                # Once: a placer that passes over a time which equals one it knows asks on and on.
                if (placement, known) not in self.told_again:
                    self.told_again.add((placement, known))
                    asked.append(placement)
                    answers.append(later[known - 1])
            elif len(new) < room and placement not in self.trying and placement not in new:
                new[placement] = known
        if new:
            every.evaluator.submit([Request(placement) for placement in new])
        missing = set(new)
        fresh: list[Placement] = []
        while missing and not every.stop():
            for placement, run in every.evaluator.collect(1.0):
                if placement in missing:
                    missing.discard(placement)
                    fresh.append(placement)
                    every.later.setdefault(placement, []).append(run.measurement)
                    answers.append(run.measurement)
                elif placement in self.trying:
                    every.known.setdefault(placement, run.measurement)
        if missing:
            every.evaluator.drop()
        at_seconds = every.earlier_seconds + every.progress.elapsed_seconds
        trials = [
            Trial(
                placement=placement, measurement=measurement, placer=placer.name,
                seed=every.seed, at_seconds=at_seconds,
            )
            for placement, measurement in zip([*asked, *fresh], answers, strict=True)
        ]  # fmt: skip
        every.keep(trials[len(asked) :], last=self.last)
        if trials:
            self._tell(trials)
        return bool(trials)

    def _answers(self) -> tuple[list[Trial], list[Trial]]:
        """To what it asked for, as far as there are any, and those that are trials of its own. What
        others had tried is told as if it had been: that is what it proposed."""
        every = self.every
        at_seconds = every.earlier_seconds + every.progress.elapsed_seconds
        ready = [placement for placement in self.asked if placement in every.known]
        answers = [
            Trial(
                placement=placement, measurement=every.known[placement], placer=self.placer.name,
                seed=every.seed, at_seconds=at_seconds,
            )
            for placement in ready
        ]  # fmt: skip
        if len(ready) == len(self.asked) == len(self.trying):  # all of them new, and none twice
            self.asked, self.trying = [], {}
            return answers, answers
        self.asked = [placement for placement in self.asked if placement not in every.known]
        first = {answer.placement: answer for answer in reversed(answers)}
        own = [p for p in dict.fromkeys(ready) if p in self.trying]
        for placement in own:
            del self.trying[placement]
        return answers, [first[placement] for placement in own]

    def _watch(self) -> None:
        """Takes out what there is to see of learning, and gives occasion for a checkpoint."""
        every, placer = self.every, self.placer
        progress, metrics = every.progress, placer.notes.metrics
        seconds = every.earlier_seconds + progress.elapsed_seconds
        for record in metrics:
            progress.metrics_of[placer.name] = record
            if every.metrics is not None:
                every.metrics.append(placer.name, progress.trials, seconds, record)
        metrics.clear()
        due = time.monotonic() - self.checkpointed >= _CHECKPOINT_SECONDS
        if every.folder is not None and due and placer.checkpoint(every.folder):
            self.checkpointed = time.monotonic()
