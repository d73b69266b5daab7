"""What runners have in common that run placements in processes of their own: they start them, ask,
find out who died and why, and replace what broke."""

from __future__ import annotations

import atexit
import logging
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Self

from placewright.backends.base import Array, Program, Run, RunConfig, Span, Trace, Transfer
from placewright.backends.feeds import make_feeds
from placewright.backends.isolation import PrivateNetwork
from placewright.backends.processes import Child, Load, memory_kills
from placewright.backends.timing import Timing
from placewright.cluster import Cluster
from placewright.errors import PlacementError, WorkerError
from placewright.measurement import Measurement

logger = logging.getLogger(__name__)

_PING_SECONDS = 3.0
"""How long a device's process may take to answer before it is taken for hung."""

_ANSWER_SECONDS = 3.0
"""How long a run may take to end once a device is out of memory. Starting new processes takes
longer than that."""

_MOST_FOREIGN_LOAD = 0.1
"""More than this is worth a warning."""


class ProcessRunner(ABC):
    """A `Runner` with a client process, which times the steps, and where the framework needs them
    a process for each device.

    Nothing runs in the caller's process, and whatever breaks is replaced: `measure` gives an
    outcome, always. Use it from a thread that lives as long as it does: Linux ends the processes
    with the thread that started them. They would be taken for crashed and replaced.

    The client answers a request with JSON: `outcome`; `reason` for a failure; otherwise what `Run`
    holds. `broken` says that the processes are of no use any more. Requests have `devices`,
    `seconds`, `timing` (the fields of `Timing`), `traces`, `train_steps` and `check`.
    """

    program_type: ClassVar[type[Any]]
    """Of the programs that it runs."""
    run_config: ClassVar[type[RunConfig]]
    """Its settings; one with fewer is completed with what these have by default."""
    attempts: int = 1
    """Starts before giving up where a port is taken: one that was free can be so a moment later."""

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        config: RunConfig | None = None,
        *,
        feeds: Mapping[str, Array] | None = None,
    ) -> None:
        assert isinstance(program, self.program_type), f"a program of {program.backend}"
        config = config or self.run_config()
        if not isinstance(config, self.run_config):
            config = self.run_config(**vars(config))
        self.program: Any = program
        self.cluster = cluster
        self.config: Any = config
        self._begin()
        self.restarts = 0
        """How often the processes had to be replaced."""
        self._feeds = make_feeds(program.inputs, feeds, config.seed)
        self._workers: list[Child] = []
        self._client: Child | None = None
        self._network: PrivateNetwork | None = None
        self._warned = False
        self._closed = False
        # Also when the program ends without closing it.
        _open.add(self)

    # --- what a framework says ---

    def _begin(self) -> None:  # noqa: B027 some need nothing
        """Looks at program, cluster and config; raises for what cannot be run. Starts nothing."""

    def _make_network(self) -> PrivateNetwork | None:
        """What all processes live in, where they listen and nobody else is to reach them."""
        return None

    @abstractmethod
    def _start_client(self, deadline: float) -> Child:
        """The client process, just started, with `_prefix`."""

    def _start_workers(self, deadline: float) -> list[tuple[Child, str]]:
        """A process for each device, where that is how it is done, and what to call it. Each is
        started with `_prefix`, and appended to `_workers` as soon as it runs, so that it ends if a
        later one fails."""
        return []

    def _port_taken(self, words: str) -> bool:
        """Whether these last words say that a process did not get its port."""
        return False

    def _prepare(self) -> None:  # noqa: B027 most need nothing
        """Called before each run, when all processes are there."""

    def _out_of_memory(self) -> str:
        """Asked again and again during a run, and once after it: which device has run out of memory
        by now, where a framework takes long to say so, or does not say it."""
        return ""

    def _in_our_words(self, reason: str) -> str:
        """A reason with the cluster's names of devices in place of the framework's."""
        return reason

    # --- measuring ---

    def measure(
        self,
        devices: Sequence[int] | Any,
        *,
        best_seconds: float | None = None,
        traces: int = 0,
        adaptive: bool = True,
        train_steps: int = 0,
    ) -> Run:
        """Runs one placement, as `Runner.measure` says.

        With `train_steps` (at least 2) it trains for so many steps, all of them, from the first
        values of the variables; these are the same for every placement, and so is what is fed.

        Raises `WorkerError` when the processes cannot even be started.
        """
        numbers = [int(device) for device in devices]
        assert len(numbers) == self.program.graph.num_ops
        if any(child.ended() for child in self._children) or not self._reachable:
            # While nothing ran: no fault of the placement that comes next.
            self._replace()
        if self._client is None:
            self.start()
        timing = Timing.of(self.config, best_seconds, adaptive=adaptive, train_steps=train_steps)
        kills = memory_kills()
        load = Load(self.pids)
        limit = self.config.time_limit_seconds
        request = {
            "devices": numbers,
            "seconds": limit,
            "timing": asdict(timing),
            "traces": traces,
            "train_steps": train_steps,
            "check": self.config.check,
        }
        try:
            self._prepare()
            answer = self._answer(request, limit)
        except BaseException:  # Ctrl-C: what runs is not what was asked for any more
            self._stop()
            raise
        foreign_load = load.share()
        if (foreign_load or 0.0) > _MOST_FOREIGN_LOAD and not self._warned:
            self._warned = True
            logger.warning(
                "other processes took %.0f%% of the cores during a run: measure on an idle machine",
                100 * (foreign_load or 0.0),
            )
        if answer.get("outcome") == "lost":
            answer = self._why_lost(answer, kills)
        if answer.get("outcome") == "timed out" and not answer.get("broken"):
            # The framework stopped the step in time, which says nothing of a device that hangs.
            silent = self._silent()
            if silent:
                answer["broken"] = True
                answer["reason"] += f"; {silent} does not answer, the processes were replaced"
        if answer.get("broken"):
            self._replace()
        try:
            return self._run(answer, foreign_load)
        except (AttributeError, KeyError, TypeError, ValueError, PlacementError) as fault:
            # As what a process writes that runs somebody's code may be anything.
            self._replace()
            reason = f"the client process gave an answer that is no measurement: {fault!r:.200}"
            return self._run({"outcome": "failed", "reason": reason}, foreign_load)

    def _answer(self, request: Mapping[str, Any], limit: float) -> dict[str, Any]:
        assert self._client is not None
        # Frameworks stop a run that takes too long by themselves, mostly; this is for when they
        # hang.
        deadline = time.monotonic() + limit + min(5.0, 0.5 * limit)
        self._client.send(request, deadline - time.monotonic())
        full, since = "", math.inf
        while True:
            answer = self._client.receive(0.1)
            if not full and (full := self._out_of_memory()):
                since = time.monotonic()
            if answer is not None:
                if full and answer.get("outcome") != "out of memory":
                    broken = answer.get("outcome") == "lost"
                    answer = {"outcome": "out of memory", "reason": full, "broken": broken}
                return answer
            if time.monotonic() - since > _ANSWER_SECONDS:
                return {"outcome": "out of memory", "reason": full, "broken": True}
            if any(child.ended() for child in self._children):
                # It may have answered just before.
                return self._client.receive(0.0) or {"outcome": "lost"}
            if time.monotonic() > deadline:
                return {
                    "outcome": "timed out",
                    "reason": f"no answer within {limit:g} s; its processes were replaced",
                    "broken": True,
                }

    def _run(self, answer: Mapping[str, Any], foreign_load: float | None) -> Run:
        trace, misplaced = answer.get("trace"), answer.get("misplaced")
        returned = answer.get("returned")
        if trace is not None:
            trace = Trace(
                op_seconds=trace["op_seconds"],
                device_of=trace["device_of"],
                transfers=tuple(Transfer(*transfer) for transfer in trace["transfers"]),
                step_seconds=tuple(trace["step_seconds"]),
                spans=tuple(Span(*span) for span in trace.get("spans", ())),
            )
        if returned is not None:
            returned = {name: tuple(values) for name, values in returned.items()}
        return Run(
            measurement=Measurement.from_json(
                {**answer, "reason": self._in_our_words(answer.get("reason", ""))}
            ),
            misplaced=None if misplaced is None else tuple(misplaced),
            trace=trace,
            overhead_seconds=answer.get("overhead_seconds", 0.0),
            returned=returned,
            foreign_load=foreign_load,
            allocated_bytes=answer.get("allocated_bytes"),
        )

    def demands(self) -> Mapping[int, Mapping[str, float]]:
        return {}

    # --- who died ---

    def _named_children(self) -> list[tuple[str, Child]]:
        """The devices' processes, then the client."""
        names = [f"the process of device {name}" for name in self.cluster.device_names]
        client = [("the client process", self._client)] if self._client is not None else []
        return [*zip(names, self._workers, strict=False), *client]

    def _silent(self) -> str:
        """The first device whose process gives no sign of life."""
        for worker in self._workers:
            worker.send({"ping": True}, 0.0)
        deadline = time.monotonic() + _PING_SECONDS
        for name, worker in self._named_children()[: len(self._workers)]:
            if worker.receive(deadline - time.monotonic()) is None:
                return name
        return ""

    def _why_lost(self, answer: dict[str, Any], kills: int) -> dict[str, Any]:
        """Whoever ended, how, and its last words."""
        reason = answer.get("reason", "")
        # The error can be here before the exit status is.
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not any(child.ended() for child in self._children):
            time.sleep(0.02)
        outcome = "failed"
        for name, child in self._named_children():
            how = child.ended()
            if how:
                words = child.last_words()
                reason = f"{name} {how}"
                killed = "SIGKILL" in how and memory_kills() > kills
                if killed or "bad_alloc" in words:
                    outcome = "out of memory"
                    reason += ": the system ran out of memory"
                reason += f"; last lines of its log: {words}" if words else ""
                break
        else:
            reason = reason or "the connection to a device was lost"
        return {"outcome": outcome, "reason": reason, "broken": True}

    # --- processes ---

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that run now: the devices', then the client's."""
        return tuple(child.pid for child in self._children)

    @property
    def _children(self) -> list[Child]:
        return [child for _, child in self._named_children()]

    def start(self) -> None:
        """Starts the processes, if they do not run yet."""
        if self._closed:
            raise WorkerError("the runner is closed; make another one")
        if self._client is not None:
            return
        for attempt in range(self.attempts):
            try:
                self._start()
                return
            except _NotStarted as fault:
                self._stop()
                if attempt == self.attempts - 1 or not fault.port_taken:
                    raise WorkerError(str(fault)) from None
                logger.info("%s; trying other ports", fault)
            except BaseException:
                self._stop()
                raise

    @property
    def _prefix(self) -> list[str]:
        """What goes before the command of each process."""
        return [] if self._network is None else self._network.prefix

    @property
    def _reachable(self) -> bool:
        """Whether a new client would reach the devices' processes."""
        return self._network is None or self._network.alive

    def _start(self) -> None:
        deadline = time.monotonic() + self.config.start_seconds
        if self._network is None:
            self._network = self._make_network()
        if not self._workers:
            for worker, name in self._start_workers(deadline):
                self._wait(worker, deadline, name)
        self._client = self._start_client(deadline)
        self._wait(self._client, deadline, "the client process")

    def _wait(self, child: Child, deadline: float, what: str) -> None:
        while (answer := child.receive(0.1)) is None:
            how = child.ended()
            words = child.last_words()
            if how:
                taken = self._port_taken(words)
                because = "its port is already taken" if taken else words or "it left no log"
                raise _NotStarted(f"{what} did not start: {because}", taken)
            if time.monotonic() > deadline:
                raise _NotStarted(f"{what} did not start in time: {words}", False)
        if answer.get("broken"):
            raise _NotStarted(f"{what} did not start: {answer['reason']}", False)

    def restart_client(self) -> None:
        """Starts the client anew before the next run, the devices' processes go on."""
        if self._client is not None:
            self._client.kill()
            self._client = None

    def _replace(self) -> None:
        self.restarts += 1
        self._stop()

    def _stop(self) -> None:
        self.restart_client()  # first: it would wait for devices that are gone
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._network is not None:
            self._network.close()
            self._network = None

    def close(self) -> None:
        """Ends all processes, for good."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_open: weakref.WeakSet[ProcessRunner] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for runner in list(_open):
        runner.close()


class _NotStarted(Exception):
    def __init__(self, message: str, port_taken: bool) -> None:
        super().__init__(message)
        self.port_taken = port_taken
