"""Workers: processes that try placements, replaced when they die or hang."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from placewright.errors import WorkerError
from placewright.evaluators.base import Evaluator
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
"""How long a worker may take until it is ready, waiting for its resources included."""

_MOST_STARTS = 3
"""After so many attempts in a row to start a worker it is given up."""

MakeEvaluator = Callable[[], Evaluator]


class Worker:
    """Runs in a process of its own, where Ray finds the resources it needs."""

    def __init__(self, make_evaluator: MakeEvaluator) -> None:
        self._evaluator = make_evaluator()

    def ready(self) -> None:
        pass

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        return self._evaluator.evaluate(placements)


@dataclass(eq=False)
class _Slot:
    """The place of one worker, whoever fills it at the moment."""

    number: int
    group: int
    actor: Any = None
    ref: Any = None
    """What it was asked last: to be ready, or to evaluate."""
    since: float = 0.0
    task: list[Placement] = field(default_factory=list)
    retry: deque[Placement] = field(default_factory=deque)
    """What its predecessor left: tried once more, by the new one, one at a time."""
    retrying: bool = False
    starting: bool = True
    starts: int = 0


Results = list[tuple[Placement, Measurement]]


class Workers:
    """Workers in groups, and what they are to try.

    Each has one call at a time. What a worker had when it died or hung is given once more to the
    one that takes its place; a placement that breaks that one, too, has failed.
    """

    def __init__(
        self,
        make_evaluator: MakeEvaluator,
        *,
        per_group: int,
        groups: int = 1,
        resources: dict[str, float],
        trial_seconds: float,
        cheap: bool,
    ) -> None:
        self._make_evaluator = ray.put(make_evaluator)
        custom = {n: a for n, a in resources.items() if n not in ("CPU", "GPU")}
        self._actor = ray.remote(Worker).options(
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=resources.get("GPU", 0.0),
            resources=custom,
            max_restarts=0,
        )
        self._trial_seconds = trial_seconds
        self._cheap = cheap
        self._slots = [_Slot(n, n // per_group) for n in range(per_group * groups)]
        self._queues: dict[int | None, deque[Placement]] = {g: deque() for g in range(groups)}
        self._queues[None] = deque()
        self._group_of: dict[Placement, int] = {}
        self.replaced = 0
        for slot in self._slots:
            self._start(slot)

    # --- what others see -------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._slots)

    @property
    def busy(self) -> int:
        return sum(bool(slot.task) for slot in self._slots)

    def wait_until_ready(self) -> None:
        """Starting them is nobody's search time."""
        while any(slot.starting for slot in self._slots):
            self.wait(0.1)

    def assign(self, placement: Placement, group: int) -> None:
        """To be tried by this group's workers, when it is submitted."""
        self._group_of[placement] = group

    def submit(self, placements: Sequence[Placement]) -> None:
        """To be tried by the workers of the group they are assigned to, or by any."""
        there = {slot.group for slot in self._slots}  # a group's workers may all be given up
        for placement in placements:
            group = self._group_of.pop(placement, None)
            self._queues[group if group in there else None].append(placement)

    def wait(self, seconds: float, others: Sequence[Any] = ()) -> tuple[Results, list[Any]]:
        """What came of placements, and which of `others` (Ray's references) are ready: as soon as
        there is either, or nothing after so many seconds."""
        until = time.monotonic() + seconds
        results: Results = []
        ready: list[Any] = []
        while True:
            self._dispatch()
            of = {slot.ref: slot for slot in self._slots if slot.ref is not None}
            refs = [*of, *others]
            left = max(0.0, until - time.monotonic())
            if refs:
                done, _ = ray.wait(refs, timeout=min(left, 1.0))
                if done:  # and all that are by now
                    done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            else:
                done = []
                time.sleep(min(left, 0.05))
            for ref in done:
                if ref in of:
                    results += self._answered(of[ref])
                else:
                    ready.append(ref)
            results += self._overdue()
            if results or ready or time.monotonic() >= until:
                self._dispatch()
                return results, ready

    def close(self) -> None:
        for slot in self._slots:
            ray.kill(slot.actor)
        self._slots = []

    # --- one worker ------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        slot.starts += 1
        slot.starting, slot.task = True, []
        slot.actor = self._actor.remote(self._make_evaluator)
        slot.ref = slot.actor.ready.remote()
        slot.since = time.monotonic()

    def _dispatch(self) -> None:
        for slot in self._slots:
            if slot.ref is not None:
                continue
            task = self._next_for(slot)
            if task:
                slot.task = task
                slot.since = time.monotonic()
                slot.ref = slot.actor.evaluate.remote(task)

    def _next_for(self, slot: _Slot) -> list[Placement]:
        slot.retrying = bool(slot.retry)
        if slot.retry:
            return [slot.retry.popleft()]
        for queue, sharers in (
            (self._queues[slot.group], sum(s.group == slot.group for s in self._slots)),
            (self._queues[None], len(self._slots)),
        ):
            if queue:
                # A call costs a millisecond, as much as simulating dozens of placements.
                size = math.ceil(len(queue) / sharers) if self._cheap else 1
                return [queue.popleft() for _ in range(size)]
        return []

    def _answered(self, slot: _Slot) -> Results:
        try:
            answer = ray.get(slot.ref)
        except RayTaskError as fault:
            return self._replace(slot, f"worker failed: {fault.cause!r}", Outcome.FAILED)
        except RayError as fault:
            return self._replace(slot, f"worker died: {why(fault)}", Outcome.FAILED)
        slot.ref = None
        if slot.starting:
            slot.starting = False
            return []
        slot.starts = 0
        task, slot.task = slot.task, []
        if len(answer) != len(task):
            raise WorkerError("the evaluator gave fewer measurements than placements")
        return list(zip(task, answer, strict=True))

    def _overdue(self) -> Results:
        results: Results = []
        now = time.monotonic()
        for slot in list(self._slots):
            limit = _START_SECONDS if slot.starting else self._trial_seconds
            if slot.ref is not None and now - slot.since > limit:
                reason = f"worker hangs: no answer in {limit:g} s"
                results += self._replace(slot, reason, Outcome.TIMED_OUT)
        return results

    def _replace(self, slot: _Slot, reason: str, outcome: Outcome) -> Results:
        """Puts a new worker in a slot; gives back what failed for good."""
        logger.info("worker %d is replaced: %s", slot.number, reason)
        ray.kill(slot.actor)
        self.replaced += 1
        failed: list[Placement] = []
        if slot.retrying:
            failed = slot.task
        else:
            slot.retry.extendleft(reversed(slot.task))
        if slot.task:
            slot.starts = 0  # it had started well
        if slot.starts >= _MOST_STARTS:
            failed += self._give_up(slot, reason)
        else:
            self._start(slot)
        measurement = Measurement(outcome=outcome, reason=reason)
        return [(placement, measurement) for placement in failed]

    def _give_up(self, slot: _Slot, reason: str) -> list[Placement]:
        self._slots.remove(slot)
        logger.warning("worker %d could not be started: %s", slot.number, reason)
        if not self._slots:
            raise WorkerError(f"no worker can be started: {reason}")
        if not any(other.group == slot.group for other in self._slots):
            self._queues[None].extend(self._queues[slot.group])
            self._queues[slot.group].clear()
        return list(slot.retry)


class ParallelEvaluator(Evaluator):
    """Spreads placements over the workers."""

    def __init__(self, problem: Problem, workers: Workers, *, cheap: bool) -> None:
        self._problem = problem
        self._workers = workers
        self.cheap = cheap
        # Several for each: who is quick need not wait for who is slow.
        self.at_a_time = 4 * workers.count

    @property
    def problem(self) -> Problem:
        return self._problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        for placement in placements:
            placement.check(self._problem)
        missing = set(placements)
        self._workers.submit(list(dict.fromkeys(placements)))
        found: dict[Placement, Measurement] = {}
        while missing:
            results, _ = self._workers.wait(1.0)
            found.update(results)
            missing.difference_update(found)
        return [found[placement] for placement in placements]


def why(fault: BaseException) -> str:
    """The telling line of Ray's many."""
    text = str(fault)
    detail = re.search(r"Worker exit detail: (.*?\.)(\s|$)", text)
    if detail:
        return detail[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else repr(fault)
