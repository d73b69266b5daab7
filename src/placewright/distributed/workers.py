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

from placewright.backends.base import Run
from placewright.distributed import watch
from placewright.distributed.config import TeamConfig
from placewright.distributed.cores import take_cores
from placewright.distributed.session import machines_for
from placewright.errors import WorkerError
from placewright.evaluators.base import Evaluator, Request
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
"""How long a worker may take until it is ready, waiting for its resources included."""

_MOST_STARTS = 3
"""After so many attempts in a row to start a worker it is given up."""

_MOST_MACHINES = 3
"""A placement that so many machines went down with is not tried on another one: it may be why."""

MakeEvaluator = Callable[[], Evaluator]


class Worker:
    """Runs in a process of its own, where Ray finds the resources it needs."""

    def __init__(self, make_evaluator: MakeEvaluator, cores: int = 0) -> None:
        """`cores`: how many it is to have for itself; 0 for those that all have."""
        take_cores(cores)
        self._evaluator = make_evaluator()

    def ready(self) -> None:
        pass

    def run(self, requests: Sequence[Request]) -> list[Run]:
        return self._evaluator.run(requests)


@dataclass(eq=False)
class _Slot:
    """The place of one worker, whoever fills it at the moment."""

    number: int
    group: int
    actor: Any = None
    ref: Any = None
    """What it was asked last: to be ready, or to evaluate."""
    since: float = 0.0
    task: list[Request] = field(default_factory=list)
    retrying: bool = False
    """Whether its task is what another has left."""
    starting: bool = True
    starts: int = 0


Results = list[tuple[Placement, Run]]


class Workers(Evaluator):
    """Workers, and what they are to try; in groups, one for each controller.

    Each has one call at a time. What a worker had when it died or hung is given once more to
    whoever is free first, one at a time; a placement that breaks that one, too, has failed. Workers
    that are gone with their machine do not count, unless that happens with one placement again and
    again.
    """

    def __init__(
        self, problem: Problem, make_evaluator: MakeEvaluator, config: TeamConfig, *, cheap: bool
    ) -> None:
        self._problem = problem
        self.cheap = cheap
        self.parallel = config.all_workers
        self._make_evaluator = make_evaluator
        resources = config.resources_for(problem.cluster, measure=not cheap)
        custom = {n: a for n, a in resources.items() if n not in ("CPU", "GPU")}
        self._actor = ray.remote(Worker).options(
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=resources.get("GPU", 0.0),
            resources=custom,
            max_restarts=0,
        )
        self._cores = 0 if cheap else int(resources.get("CPU", 0.0))
        self._trial_seconds = config.trial_seconds
        self._slots = [_Slot(n, n // config.workers) for n in range(config.all_workers)]
        groups = range(max(config.controllers, 1))
        self._queues: dict[int | None, deque[Request]] = {group: deque() for group in groups}
        self._queues[None] = deque()
        self._retries: deque[Request] = deque()
        self._machines_lost: dict[Placement, int] = {}
        self._resources = resources
        self._waiting = False
        """Whether it was said that there are too few machines at the moment."""
        self._group_of: dict[Placement, int] = {}
        self._dropped: set[_Slot] = set()
        self.replaced = 0
        for slot in self._slots:
            self._start(slot)

    # --- what others see -------------------------------------------------------------------------

    @property
    def problem(self) -> Problem:
        return self._problem

    def status(self) -> dict[str, float]:
        """What there is to watch."""
        return {
            "workers": len(self._slots),
            "workers_busy": sum(bool(slot.task) for slot in self._slots),
            "workers_replaced": self.replaced,
        }

    def wait_until_ready(self) -> None:
        """Starting them is nobody's search time."""
        while any(slot.starting for slot in self._slots):
            self._answers(0.1)

    def assign(self, placements: Sequence[Placement], group: int) -> None:
        """Has these tried by this group's workers, once they are submitted, and not by any."""
        if any(slot.group == group for slot in self._slots):  # not all of them were given up
            self._group_of.update(dict.fromkeys(placements, group))

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        for placement in placements:
            placement.check(self._problem)
        missing = set(placements)
        self.submit([Request(placement) for placement in dict.fromkeys(placements)])
        found: dict[Placement, Measurement] = {}
        while missing:
            found.update((placement, run.measurement) for placement, run in self.collect(1.0))
            missing.difference_update(found)
        return [found[placement] for placement in placements]

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._queues[self._group_of.pop(request.placement, None)].append(request)
        watch.check()
        self._dispatch()

    def collect(self, seconds: float) -> Results:
        until = time.monotonic() + seconds
        while True:
            results = self._answers(min(until - time.monotonic(), 1.0))
            if results or time.monotonic() >= until or not self._is_busy:
                return results

    @property
    def _is_busy(self) -> bool:
        waiting = self._retries or any(self._queues.values())
        return bool(waiting) or any(slot.task for slot in self._slots)

    def _answers(self, seconds: float) -> Results:
        """What came in by now, or within so many seconds."""
        watch.check()
        self._dispatch()
        of = {slot.ref: slot for slot in self._slots if slot.ref is not None}
        results: Results = []
        if of:
            done, _ = ray.wait(list(of), timeout=max(0.0, seconds))
            watch.check()  # who died with it is nobody's fault
            if done:  # and all that are by now
                done, _ = ray.wait(list(of), num_returns=len(of), timeout=0)
            for ref in done:
                results += self._answered(of[ref])
        results += self._overdue()
        self._dispatch()
        return results

    def drop(self) -> None:
        """Forgets what is waiting or being tried; workers that are busy finish for nobody."""
        self._group_of.clear()
        for queue in self._queues.values():
            queue.clear()
        self._retries.clear()
        for slot in self._slots:
            if slot.task:
                self._dropped.add(slot)

    def close(self) -> None:
        for slot in self._slots if not watch.lost() else ():
            ray.kill(slot.actor)
        self._slots = []

    # --- one worker ------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        watch.check_before_starting()
        slot.starts += 1
        slot.starting, slot.task = True, []
        slot.actor = self._actor.remote(self._make_evaluator, self._cores)
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
                slot.ref = slot.actor.run.remote(task)

    def _next_for(self, slot: _Slot) -> list[Request]:
        slot.retrying = bool(self._retries)
        if self._retries:
            return [self._retries.popleft()]
        for queue, sharers in (
            (self._queues[slot.group], sum(s.group == slot.group for s in self._slots)),
            (self._queues[None], len(self._slots)),
        ):
            if queue:
                # A call costs a millisecond, as much as simulating dozens of placements.
                size = math.ceil(len(queue) / sharers) if self.cheap else 1
                return [queue.popleft() for _ in range(size)]
        return []

    def _answered(self, slot: _Slot) -> Results:
        try:
            answer = ray.get(slot.ref)
        except RayTaskError as fault:
            return self._replace(slot, f"worker failed: {fault.cause!r}", Outcome.FAILED)
        except RayError as fault:
            if watch.machine_died(fault):
                # What it had is given to another, whoever had it before.
                slot.retrying = self._too_many_machines(slot.task)
            return self._replace(slot, f"worker died: {why(fault)}", Outcome.FAILED)
        slot.ref = None
        if slot.starting:
            slot.starting = False
            return []
        slot.starts = 0
        task, slot.task = slot.task, []
        if slot in self._dropped:
            self._dropped.discard(slot)
            return []
        return [(request.placement, run) for request, run in zip(task, answer, strict=True)]

    def _too_many_machines(self, task: Sequence[Request]) -> bool:
        """Whether the placement that a machine went down with has had its last one."""
        lost = self._machines_lost
        for request in task:
            lost[request.placement] = lost.get(request.placement, 0) + 1
        # One of several may have had nothing to do with it, and is tried by itself next.
        return len(task) == 1 and lost[task[0].placement] >= _MOST_MACHINES

    def _overdue(self) -> Results:
        results: Results = []
        now = time.monotonic()
        for slot in list(self._slots):
            limit = _START_SECONDS if slot.starting else self._trial_seconds
            if slot.ref is not None and now - slot.since > limit:
                if slot.starting and self._waits_for_a_machine():
                    slot.since = now
                    continue
                reason = f"worker hangs: no answer in {limit:g} s"
                results += self._replace(slot, reason, Outcome.TIMED_OUT)
        return results

    def _waits_for_a_machine(self) -> bool:
        """Whether the cluster has too few machines for all workers by now. One that joins, or comes
        back, gets those that have none; until then the others do their work."""
        if machines_for(self._resources, len(self._slots)) >= len(self._slots):
            self._waiting = False
            return False
        if all(slot.starting for slot in self._slots):
            raise WorkerError(
                f"no machine of the Ray cluster has had room for a worker in {_START_SECONDS:g} s"
            )
        if not self._waiting:
            self._waiting = True
            logger.warning("some workers wait for a machine to join the cluster")
        return True

    def _replace(self, slot: _Slot, reason: str, outcome: Outcome) -> Results:
        """Puts a new worker in a slot; gives back what failed for good."""
        logger.info("worker %d is replaced: %s", slot.number, reason)
        ray.kill(slot.actor)
        self.replaced += 1
        failed: list[Request] = []
        if slot in self._dropped:
            self._dropped.discard(slot)
        elif slot.retrying:
            failed = slot.task
        else:
            self._retries.extendleft(reversed(slot.task))
        if slot.task:
            slot.starts = 0  # it had started well
        if slot.starts >= _MOST_STARTS:
            self._give_up(slot, reason)
        else:
            self._start(slot)
        run = Run(measurement=Measurement(outcome=outcome, reason=reason))
        return [(request.placement, run) for request in failed]

    def _give_up(self, slot: _Slot, reason: str) -> None:
        self._slots.remove(slot)
        logger.warning("worker %d could not be started: %s", slot.number, reason)
        if not self._slots:
            raise WorkerError(f"no worker can be started: {reason}")
        if not any(other.group == slot.group for other in self._slots):
            self._queues[None].extend(self._queues[slot.group])
            self._queues[slot.group].clear()


def why(fault: BaseException) -> str:
    """The telling line of Ray's many."""
    text = str(fault)
    detail = re.search(r"Worker exit detail: (.*?\.)(\s|$)", text)
    if detail:
        return detail[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else repr(fault)
