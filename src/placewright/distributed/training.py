"""Asynchronous training: one parameter server, and controllers that learn side by side.

A controller is a `Learner` whose updater lives elsewhere: it computes gradients from its copy of
the policy, sends them to the parameter server, and gets the parameters as they are by then. It
waits for its own workers and for nobody else.

The search's own process is the hub between controllers and workers. To the search it is a placer
like any other, whose proposals come when a controller has some. The search alone knows the budget
and what was tried before, so that no placement is tried twice, none too many, and all trials reach
one journal.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError

from placewright.budget import BATCH
from placewright.distributed import watch
from placewright.distributed.workers import Workers, why
from placewright.errors import WorkerError
from placewright.learning.checkpoints import LearnerState
from placewright.learning.config import LearnerConfig
from placewright.learning.learner import Learner
from placewright.learning.policy import Policy
from placewright.learning.updater import Gradients, Updater
from placewright.measurement import Measurement, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.problem import Problem

logger = logging.getLogger(__name__)

_STEP_SECONDS = 600.0
"""A controller that takes longer for an update hangs."""

_ANSWER_SECONDS = 60.0
"""The same of the parameter server, which has little to do."""

_MOST_STARTS = 3
"""A controller that fails so often in a row, without an update in between, is our fault."""

_MOST_IDLE = 100 * BATCH
"""After so many proposals that were all tried before, a controller is done."""

_MOST_KNOWN = 100_000
"""Measurements kept so that nothing is tried twice."""

_LISTEN_SECONDS = 0.5
"""How long to wait for a controller at a time, where there is nothing else to wait for."""

_RATE_TRIALS = 200
"""How many of the last trials the rate that is shown is of."""

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


class Parameters(NamedTuple):
    """The policy at one moment."""

    arrays: Arrays
    steps: int
    """How many gradients made it."""


class Pushed(NamedTuple):
    """What came of a gradient."""

    parameters: Parameters
    staleness: int
    """How many gradients of others were applied since the parameters it was computed from."""
    accepted: bool


class ParameterServer:
    """Holds the one policy and its optimizer. Gradients are applied as they come."""

    def __init__(
        self,
        policy: Policy,
        config: LearnerConfig,
        adam: Mapping[str, torch.Tensor],
        steps: int,
        max_staleness: int | None,
    ) -> None:
        self._updater = Updater(policy, config)
        self._updater.restore(adam, steps)
        self._max_staleness = max_staleness

    def pull(self) -> Parameters:
        return Parameters(_arrays(self._updater.policy.state_dict()), self._updater.steps)

    def push(self, gradients: Arrays, steps: int) -> Pushed:
        """`steps` is what `pull` said of the parameters that the gradients were computed from."""
        staleness = self._updater.steps - steps
        accepted = self._max_staleness is None or staleness <= self._max_staleness
        if accepted:
            self._updater.apply(_tensors(gradients))
        return Pushed(self.pull(), staleness, accepted)

    def snapshot(self) -> tuple[Parameters, Arrays]:
        """All that a checkpoint needs: the parameters and the optimizer's state."""
        return self.pull(), _arrays(self._updater.state())


class RemoteUpdater(Updater):
    """An updater whose gradients are applied by the parameter server."""

    def __init__(self, policy: Policy, config: LearnerConfig, server: Any) -> None:
        super().__init__(policy, config)
        self._server = server
        self._staleness: list[int] = []
        self._refused = 0
        self._take(ray.get(server.pull.remote()))

    def apply(self, gradients: Gradients) -> None:
        pushed: Pushed = ray.get(self._server.push.remote(_arrays(gradients), self.steps))
        self._staleness.append(pushed.staleness)
        self._refused += not pushed.accepted
        self._take(pushed.parameters)

    def _take(self, parameters: Parameters) -> None:
        self.policy.load_state_dict(_tensors(parameters.arrays))
        self.steps = parameters.steps

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: the greatest staleness, and how many gradients were too old."""
        staleness, refused = max(self._staleness, default=0), self._refused
        self._staleness, self._refused = [], 0
        return {"staleness": staleness, "refused": refused}


class Turn(NamedTuple):
    """What a controller has to say: what it wants tried, and how its last update went."""

    asked: list[Placement]
    why_not: str
    metrics: list[dict[str, float]]
    state: LearnerState | None
    """After an update, otherwise None."""


class Controller:
    """One learner, in a process of its own."""

    def __init__(
        self,
        problem: Problem,
        config: LearnerConfig,
        name: str,
        seed: int,
        policy: Policy,
        server: Any,
        state: LearnerState | None,
    ) -> None:
        self._updater = RemoteUpdater(policy, config, server)
        self._learner = Learner(problem, config, name=name, seed=seed, updater=self._updater)
        if state is not None:
            self._learner.take_state(state)

    def turn(self, answers: Sequence[Trial], others: Sequence[Trial]) -> Turn:
        """Tells of what it asked for, then of the best that others found, and asks again."""
        learner = self._learner
        learner.tell(answers)
        metrics = [record | self._updater.take_metrics() for record in learner.notes.metrics]
        learner.notes.metrics.clear()
        learner.tell(others)
        state = learner.state() if metrics else None
        return Turn(learner.ask(BATCH), learner.notes.why_not, metrics, state)


@dataclass(eq=False)
class _Seat:
    """The place of one controller, whoever fills it at the moment."""

    number: int
    state: LearnerState | None
    actor: Any = None
    ref: Any = None
    """The turn that is under way."""
    since: float = 0.0
    asked: list[Placement] = field(default_factory=list)
    answers: dict[Placement, Measurement] = field(default_factory=dict)
    """To what it asked for, as far as there are any."""
    waiting: deque[Placement] = field(default_factory=deque)
    """What was not given to workers yet."""
    told: set[Placement] = field(default_factory=set)
    """Which of the best placements it knows."""
    idle: int = 0
    starts: int = 0
    done: bool = False


class DistributedLearner(Placer):
    """A learned method, trained by several controllers.

    The learner it is made from asks its teachers and warms up, as always; its policy is then what
    the controllers begin with.
    """

    endless = True

    def __init__(
        self, learner: Learner, workers: Workers, *, controllers: int, max_staleness: int | None
    ) -> None:
        super().__init__(learner.problem)
        self.name = learner.name
        self._learner = learner
        self._workers = workers
        self._max_staleness = max_staleness
        self._seats = [_Seat(number, None) for number in range(controllers)]
        self._server: Any = None
        self._policy: Any = None
        """What controllers begin with."""
        self._known: dict[Placement, Measurement] = {}
        self._trying: set[Placement] = set()
        self._best: list[Trial] = []
        self._updates = 0
        self._begun = False
        """Whether the controllers have taken over from the teachers."""
        self._ended: deque[float] = deque(maxlen=_RATE_TRIALS)
        self._staleness = 0.0
        self.restarts = 0

    # --- what the search asks for ----------------------------------------------------------------

    @property
    def waiting(self) -> bool:  # type: ignore[override]
        """Whether there may be something to propose once a controller has answered."""
        return self._begun and not all(seat.done for seat in self._seats)

    def ask(self, count: int) -> list[Placement]:
        """What the teachers, or since then the controllers, want tried by now."""
        if not self._begun:
            asked = self._learner.opening(count)
            if asked:
                return asked
            self._begin()
        self._listen()
        return self._next(count)

    def tell(self, trials: Sequence[Trial]) -> None:
        if not self._begun:
            self._learner.tell(trials)
        for trial in trials:
            placement = trial.placement
            if placement not in self._known:
                self._know(trial)
            if placement in self._trying:
                self._trying.discard(placement)
                self._ended.append(time.monotonic())
            for seat in self._seats:
                seat.answers[placement] = trial.measurement

    def close(self) -> None:
        actors = [seat.actor for seat in self._seats] + [self._server]
        for actor in actors if not watch.lost() else ():
            if actor is not None:
                ray.kill(actor)
        for seat in self._seats:
            seat.actor = seat.ref = None
        self._server = None

    def status(self) -> dict[str, float]:
        """What there is to watch besides learning."""
        since = time.monotonic() - self._ended[0] if self._ended else 0.0
        return {
            "controllers": sum(not seat.done for seat in self._seats),
            **self._workers.status(),
            "controllers_restarted": self.restarts,
            "trials_per_second": len(self._ended) / since if since else 0.0,
            "staleness": self._staleness,
        }

    # --- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self, folder: Path) -> bool:
        states = [seat.state for seat in self._seats if seat.state is not None]
        if self._server is None or not states or watch.lost():
            return False
        try:
            self._mirror()
        except WorkerError:  # Ray is gone: whoever asks for trials is told
            return False
        self._learner.write_checkpoint(folder, states)
        return True

    def _mirror(self) -> None:
        """Copies the parameter server into this process, from where it can be made again."""
        try:
            parameters, adam = ray.get(self._server.snapshot.remote(), timeout=_ANSWER_SECONDS)
        except RayError as fault:
            watch.machine_died(fault)  # which raises where it is ours: nothing can be started then
            logger.warning("the parameter server is restarted: %s", why(fault))
            self._start_server()
            return
        self._learner.policy.load_state_dict(_tensors(parameters.arrays))
        self._learner.updater.restore(_tensors(adam), parameters.steps)

    def restore(self, folder: Path, told: Sequence[Trial]) -> bool:
        states = self._learner.read_checkpoint(folder)
        if not states:
            return False
        for seat, state in zip(self._seats, states, strict=False):
            seat.state = state
        self._updates = sum(int(state.described["updates"]) for state in states)
        self._begun = True
        for trial in told:
            self._know(trial)
        return True

    # --- before the controllers ------------------------------------------------------------------

    def _begin(self) -> None:
        """The controllers take over from the teachers."""
        self._begun = True
        if self.problem.has_choice:
            self._learner.warm_up()
        else:
            self.notes.why_not = self._learner.notes.why_not
            for seat in self._seats:
                seat.done = True

    # --- controllers -----------------------------------------------------------------------------

    def _listen(self) -> None:
        """Takes what controllers have to say, and begins their next turns."""
        watch.check()
        if self._server is None and not all(seat.done for seat in self._seats):
            self._start_server()
        for seat in self._seats:
            if not seat.done and seat.actor is None:
                self._start(seat)
            answered = all(placement in seat.answers for placement in seat.asked)
            if not seat.done and seat.ref is None and answered:
                self._begin_turn(seat)
        turns = {seat.ref: seat for seat in self._seats if seat.ref is not None}
        if turns:
            ready, _ = ray.wait(list(turns), timeout=0 if self._trying else _LISTEN_SECONDS)
            watch.check()
            if ready:
                ready, _ = ray.wait(list(turns), num_returns=len(turns), timeout=0)
            for ref in ready:
                self._take_turn(turns[ref])
        for seat in turns.values():
            if seat.ref is not None and time.monotonic() - seat.since > _STEP_SECONDS:
                self._restart(seat, f"no answer in {_STEP_SECONDS:g} s")

    def _next(self, count: int) -> list[Placement]:
        """What the controllers want tried, each by its own workers."""
        found: list[Placement] = []
        for seat in self._seats:
            own: list[Placement] = []
            while seat.waiting and len(found) + len(own) < count:
                placement = seat.waiting.popleft()
                # Another controller may have asked for it in the meantime.
                if placement not in self._known and placement not in self._trying:
                    own.append(placement)
            self._workers.assign(own, seat.number)
            self._trying.update(own)
            found += own
        return found

    def _begin_turn(self, seat: _Seat) -> None:
        answers = [self._trial(placement, seat.answers[placement]) for placement in seat.asked]
        # Under another name: what a learner hears of its own proposals, it must have asked for.
        others = [
            replace(trial, placer="others")
            # Where times are noisy, the fastest are the luckiest: better none than these alone.
            for trial in (() if self._learner.config.noise else self._best)
            if trial.placement not in seat.told
        ]
        seat.told.update(trial.placement for trial in others)
        seat.asked = []
        seat.ref = seat.actor.turn.remote(answers, others)
        seat.since = time.monotonic()

    def _take_turn(self, seat: _Seat) -> None:
        try:
            turn: Turn = ray.get(seat.ref)
        except RayTaskError as fault:
            self._restart(seat, repr(fault.cause))
            return
        except RayError as fault:
            watch.machine_died(fault)
            self._restart(seat, why(fault))
            return
        seat.ref = None
        seat.starts = 0
        seat.state = turn.state or seat.state
        for record in turn.metrics:
            self._updates += 1
            self._staleness += 0.1 * (record["staleness"] - self._staleness)
            of_all = self.status() | {"staleness": record["staleness"]}
            self.notes.metrics.append(
                record | of_all | {"update": self._updates, "controller": seat.number}
            )
        new = [p for p in dict.fromkeys(turn.asked) if p not in self._known]
        seat.idle = 0 if new else seat.idle + len(turn.asked)
        if not turn.asked or seat.idle >= _MOST_IDLE:
            seat.done = True
            self.notes.why_not = turn.why_not
            return
        seat.asked = turn.asked
        seat.answers = {p: self._known[p] for p in turn.asked if p in self._known}
        seat.waiting.extend(new)

    def _start_server(self) -> None:
        watch.check_before_starting()
        policy = copy.deepcopy(self._learner.policy).cpu()
        self._server = (
            ray.remote(ParameterServer)
            .options(num_cpus=0)
            .remote(
                policy, self._learner.config, self._learner.updater.state(),
                self._learner.updater.steps, self._max_staleness,
            )
        )  # fmt: skip
        self._policy = policy

    def _start(self, seat: _Seat) -> None:
        watch.check_before_starting()
        # Teachers and warm start were before; the rest of the settings are everybody's.
        config = replace(self._learner.config, warm_start=0)
        seat.starts += 1
        seat.actor = (
            ray.remote(Controller)
            .options(num_cpus=0, max_restarts=0)
            .remote(
                self.problem, config, self.name, self._learner.seed + seat.number, self._policy,
                self._server, seat.state,
            )
        )  # fmt: skip

    def _restart(self, seat: _Seat, reason: str) -> None:
        """What it had asked for was tried and recorded; its update alone is lost."""
        if seat.starts >= _MOST_STARTS:
            raise WorkerError(f"controller {seat.number} cannot go on: {reason}")
        logger.info("controller %d is restarted: %s", seat.number, reason)
        seat.told.clear()
        self.restarts += 1
        ray.kill(seat.actor)
        seat.ref = None
        self._mirror()  # which sees to it that there is a parameter server
        self._start(seat)

    def _trial(self, placement: Placement, measurement: Measurement) -> Trial:
        return Trial(placement=placement, measurement=measurement, placer=self.name)

    def _know(self, trial: Trial) -> None:
        self._known[trial.placement] = trial.measurement
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        if trial.measurement.ok:
            self._best.append(trial)
            self._best.sort(key=lambda trial: trial.measurement.mean_seconds)
            del self._best[max(self._learner.config.elites, 1) :]


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Ray moves numpy's arrays between processes without copying them more than once."""
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
