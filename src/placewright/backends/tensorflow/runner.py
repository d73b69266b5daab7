"""Runs TensorFlow steps under placements: starts the processes, asks, restarts what broke."""

from __future__ import annotations

import atexit
import importlib.util
import io
import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from placewright.backends.config import RunConfig
from placewright.backends.feeds import Array, make_feeds
from placewright.backends.processes import Child, Load, free_ports
from placewright.cluster import Cluster
from placewright.errors import MissingExtraError, WorkerError
from placewright.measurement import Measurement, Outcome

if TYPE_CHECKING:
    from placewright.backends.tensorflow.program import Program

logger = logging.getLogger(__name__)

_PING_SECONDS = 3.0
"""How long a device's process may take to answer before it is taken for hung."""

_MOST_FOREIGN_LOAD = 0.1
"""More than this is worth a warning."""

_ATTEMPTS = 3
"""Starts before giving up: a port that was free can be taken a moment later."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measurement, and what TensorFlow told on the way."""

    measurement: Measurement
    misplaced: tuple[str, ...] | None = None
    """Ops that did not run where they were put; None when that was not checked."""
    trace: Mapping[str, Any] | None = None
    """Seconds of each op and transfer, where traces were asked for."""
    overhead_seconds: float = 0.0
    """What the run took beyond its timed steps."""
    returned: Mapping[str, tuple[float, ...]] | None = None
    """What each step returned, the first one included, of the program's results that are one
    number, such as the loss; where training was asked for."""
    foreign_load: float | None = None
    """Share of the cores that other processes took meanwhile, where that can be known."""


class TensorFlowRunner:
    """Measures placements of one program on one cluster.

    A cluster with several CPU devices becomes as many processes with cores of their own, which
    exchange tensors over gRPC; one with a single CPU and GPUs is one process. Nothing runs in the
    caller's process, and whatever breaks is replaced: `measure` gives an outcome, always.

    Use it from a thread that lives as long as it does: Linux ends the processes with the thread
    that started them. They would be taken for crashed and replaced.
    """

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        config: RunConfig | None = None,
        *,
        feeds: Mapping[str, Array] | None = None,
    ) -> None:
        self.program = program
        self.cluster = cluster
        self.config = config or RunConfig()
        self._feeds = make_feeds(program.inputs, feeds, self.config.seed)
        self._workers: list[Child] = []
        self._client: Child | None = None
        self._target = ""
        self._warned = False
        self.restarts = 0
        """How often the processes had to be replaced."""
        self._addresses_of_others = _addresses(cluster, self.config)
        # One process unless there are several CPUs (or servers elsewhere) to be told apart.
        cpus = sum(device.type == "cpu" for device in cluster.devices)
        self.in_one_process = cpus <= 1 and not self._addresses_of_others
        if not self.in_one_process and not self._addresses_of_others:
            others = [device.name for device in cluster.devices if device.type != "cpu"]
            if others:
                raise WorkerError(
                    f"cluster {cluster.name!r} has several CPUs and {others[0]}: that needs a "
                    "TensorFlow server for each device; start them and give their addresses"
                )
            if self.config.ports and len(self.config.ports) != cpus:
                raise WorkerError(f"{len(self.config.ports)} ports for {cpus} devices")
        # Also when the program ends without closing it.
        _open.add(self)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that run now: the devices', then the client's."""
        return tuple(child.pid for child in self._children)

    @property
    def _children(self) -> list[Child]:
        return [*self._workers, *([self._client] if self._client else [])]

    def __enter__(self) -> TensorFlowRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes."""
        if self._client is not None:
            self._client.kill()  # first: it would wait for devices that are gone
            self._client = None
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def measure(
        self,
        devices: Sequence[int] | Any,
        *,
        best_seconds: float | None = None,
        traces: int = 0,
        adaptive: bool = True,
        train_steps: int = 0,
    ) -> Run:
        """Runs one placement.

        Args:
            devices: the number of the device of each op of the program's graph.
            best_seconds: the best step time so far; a placement that is hopeless against it is not
                run to the end.
            traces: how many traced steps to add.
            adaptive: whether steps are added while their times differ too much; without, every
                placement has the same number.
            train_steps: train for so many steps (at least 2), all of them, from the first values of
                the variables; these are the same for every placement, and so is what is fed.

        Raises `WorkerError` when the processes cannot even be started.
        """
        numbers = [int(device) for device in devices]
        assert len(numbers) == self.program.graph.num_ops
        if any(child.ended() for child in self._children):
            # While nothing ran: no fault of the placement that comes next.
            self._replace()
        if self._client is None:
            self.start()
        assert self._client is not None
        kills = _memory_kills()
        load = Load(self.pids)
        assert train_steps == 0 or train_steps >= 2, "the first step is not timed"
        limit = self.config.time_limit_seconds
        request = {
            "devices": numbers,
            "seconds": limit,
            "give_up_seconds": 1e18
            if best_seconds is None
            else best_seconds * self.config.give_up_factor,
            "traces": traces,
            "adaptive": adaptive,
            "train_steps": train_steps,
            "check": self.config.check,
        }
        try:
            answer = self._answer(request, limit)
        except BaseException:  # Ctrl-C: what runs is not what was asked for any more
            self.close()
            raise
        foreign_load = load.share()
        if (foreign_load or 0.0) > _MOST_FOREIGN_LOAD and not self._warned:
            self._warned = True
            logger.warning(
                "other processes took %.0f%% of the cores during a run: measure on an idle machine",
                100 * (foreign_load or 0.0),
            )
        if answer["outcome"] == "lost":
            answer = self._why_lost(answer, kills)
        if answer["outcome"] == "timed out" and not answer.get("broken"):
            # TensorFlow stopped the step in time, which says nothing of a device that hangs.
            silent = self._silent()
            if silent:
                answer["broken"] = True
                answer["reason"] += f"; {silent} does not answer, the processes were replaced"
        if answer.get("broken"):
            self._replace()
        outcome = Outcome(answer["outcome"])
        measurement = Measurement(
            outcome=outcome,
            step_seconds=tuple(answer.get("step_seconds", ())),
            peak_bytes=tuple(answer.get("peak_bytes", ())),
            reason=self._in_our_words(answer.get("reason", "")),
        )
        misplaced = answer.get("misplaced")
        returned = answer.get("returned")
        return Run(
            measurement=measurement,
            misplaced=None if misplaced is None else tuple(misplaced),
            trace=answer.get("trace"),
            overhead_seconds=answer.get("overhead_seconds", 0.0),
            returned=None
            if returned is None
            else {name: tuple(values) for name, values in returned.items()},
            foreign_load=foreign_load,
        )

    def _replace(self) -> None:
        self.restarts += 1
        self.close()

    def _silent(self) -> str:
        """The first device whose process gives no sign of life."""
        for worker in self._workers:
            worker.send({"ping": True}, 0.0)
        deadline = time.monotonic() + _PING_SECONDS
        for name, worker in zip(self.cluster.device_names, self._workers, strict=False):
            if worker.receive(deadline - time.monotonic()) is None:
                return f"the process of device {name}"
        return ""

    def _answer(self, request: Mapping[str, Any], limit: float) -> dict[str, Any]:
        assert self._client is not None
        # TensorFlow stops a run that takes too long by itself, mostly; this is for when it hangs.
        deadline = time.monotonic() + limit + min(5.0, 0.5 * limit)
        self._client.send(request, deadline - time.monotonic())
        while True:
            answer = self._client.receive(0.1)
            if answer is not None:
                return answer
            if any(child.ended() for child in (self._client, *self._workers)):
                # It may have answered just before.
                return self._client.receive(0.0) or {"outcome": "lost"}
            if time.monotonic() > deadline:
                return {
                    "outcome": "timed out",
                    "reason": f"no answer within {limit:g} s; its processes were replaced",
                    "broken": True,
                }

    def _why_lost(self, answer: dict[str, Any], kills: int) -> dict[str, Any]:
        """Whoever ended, how, and its last words."""
        reason = answer.get("reason", "")
        names = [f"the process of device {name}" for name in self.cluster.device_names]
        children = [*zip(names, self._workers, strict=False), ("the client process", self._client)]
        # The error can be here before the exit status is.
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not any(c and c.ended() for _, c in children):
            time.sleep(0.02)
        outcome = "failed"
        for name, child in children:
            how = child.ended() if child is not None else ""
            if how:
                words = child.last_words() if child is not None else ""
                reason = f"{name} {how}"
                if _memory_kills() > kills or "bad_alloc" in words:
                    outcome = "out of memory"
                    reason += ": the system ran out of memory"
                reason += f"; last lines of its log: {words}" if words else ""
                break
        else:
            reason = reason or "the connection to a device was lost"
        return {"outcome": outcome, "reason": reason, "broken": True}

    def _in_our_words(self, reason: str) -> str:
        for ours, theirs in zip(self.cluster.device_names, self._device_names, strict=True):
            reason = reason.replace(theirs, ours)
        return reason

    # --- processes ---

    @property
    def _device_names(self) -> list[str]:
        """TensorFlow's names of the devices."""
        if not self.in_one_process:
            return [
                f"/job:worker/replica:0/task:{number}/device:{device.type.upper()}:0"
                for number, device in enumerate(self.cluster.devices)
            ]
        counts: dict[str, int] = {}
        names = []
        for device in self.cluster.devices:
            kind = device.type.upper()
            names.append(f"/job:localhost/replica:0/task:0/device:{kind}:{counts.get(kind, 0)}")
            counts[kind] = counts.get(kind, 0) + 1
        return names

    def start(self) -> None:
        """Starts the processes, if they do not run yet."""
        if self._client is not None:
            return
        check_tensorflow()
        for attempt in range(_ATTEMPTS):
            try:
                self._start()
                return
            except _NotStarted as fault:
                self.close()
                # A port that the user chose is not going to be free the next time.
                if attempt == _ATTEMPTS - 1 or not fault.port_taken or self.config.ports:
                    raise WorkerError(str(fault)) from None
                logger.info("%s; trying other ports", fault)
            except BaseException:
                self.close()
                raise

    def restart_client(self) -> None:
        """Starts the client anew before the next run, the devices' processes go on."""
        if self._client is not None:
            self._client.kill()
            self._client = None

    def _start(self) -> None:
        deadline = time.monotonic() + self.config.start_seconds
        if self._workers:
            self._start_client(deadline)
            return
        self._target = ""
        if self._addresses_of_others:
            self._target = f"grpc://{self._addresses_of_others[0]}"
        elif not self.in_one_process:
            ports = self.config.ports or free_ports(self.cluster.num_devices)
            addresses = [f"127.0.0.1:{port}" for port in ports]
            self._target = f"grpc://{addresses[0]}"
            for number, cores in enumerate(share_cores(self.cluster.num_devices)):
                self._workers.append(
                    Child(
                        "placewright.backends.tensorflow.worker",
                        {
                            "cores": cores,
                            "threads_between_ops": self.config.threads_between_ops,
                            "addresses": addresses,
                            "task": number,
                        },
                        seconds=deadline - time.monotonic(),
                        environment=self._environment(number),
                    )
                )
            for number, worker in enumerate(self._workers):
                what = f"the process of device {self.cluster.device_names[number]}"
                _wait(worker, deadline, f"{what} (port {ports[number]})")
        self._start_client(deadline)

    def _start_client(self, deadline: float) -> None:
        graph = self.program.graph
        sizes = graph.resident_bytes
        arrays = io.BytesIO()
        np.savez(arrays, **self._feeds)  # type: ignore[arg-type]
        self._client = Child(
            "placewright.backends.tensorflow.client",
            {
                "target": self._target,
                "devices": self._device_names,
                "ops": list(graph.op_names),
                "targets": list(self.program.targets),
                "results": list(self.program.results),
                "initializers": dict(self.program.initializers),
                "variable_bytes": {
                    name: int(sizes[graph.op_index[name]]) for name in self.program.initializers
                },
                "settings": {
                    "steps": self.config.steps,
                    "max_steps": self.config.max_steps,
                    "precision": self.config.precision,
                    "threads_between_ops": self.config.threads_between_ops,
                    "limit_memory": self.config.limit_memory,
                    "optimize": self.config.optimize,
                    "soft_placement": self.config.soft_placement,
                },
            },
            seconds=deadline - time.monotonic(),
            environment=self._environment(0 if self.in_one_process else None),
            files={"graph_def": self.program.graph_def, "feeds": arrays.getvalue()},
        )
        _wait(self._client, deadline, "the client process")

    def _environment(self, device: int | None) -> dict[str, str]:
        environment = {"TF_CPP_MIN_LOG_LEVEL": "1"}
        if device is None:
            environment["CUDA_VISIBLE_DEVICES"] = "-1"  # it only talks to the devices
        elif self.config.limit_memory and self.cluster.devices[device].type == "cpu":
            limit = self.cluster.devices[device].memory_bytes
            environment["TF_MKL_ALLOC_MAX_BYTES"] = str(limit)
        return environment


_open: weakref.WeakSet[TensorFlowRunner] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for runner in list(_open):
        runner.close()


class _NotStarted(Exception):
    def __init__(self, message: str, port_taken: bool) -> None:
        super().__init__(message)
        self.port_taken = port_taken


def _wait(child: Child, deadline: float, what: str) -> None:
    while True:
        if child.receive(0.1) is not None:
            return
        how = child.ended()
        words = child.last_words()
        if how:
            # gRPC's words, and TensorFlow's around them.
            taken = any(
                sign in words
                for sign in ("Address already in use", "Could not start gRPC server", "WSA Error")
            )
            because = "its port is already taken" if taken else words or "it left no log"
            raise _NotStarted(f"{what} did not start: {because}", taken)
        if time.monotonic() > deadline:
            raise _NotStarted(f"{what} did not start in time: {words}", False)


def has_tensorflow() -> bool:
    """Whether it is installed, found out without importing it."""
    return importlib.util.find_spec("tensorflow") is not None


def check_tensorflow() -> None:
    if not has_tensorflow():
        raise MissingExtraError("measuring on real devices", "tensorflow")


def share_cores(devices: int) -> list[list[int]]:
    """The cores of each of several devices: equal parts, no core in two of them if possible."""
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(devices)]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < devices:
        logger.warning(
            "%d devices share %d cores: what is measured here is not what separate cores would do",
            devices,
            len(cores),
        )
        return [[cores[number % len(cores)]] for number in range(devices)]
    each = len(cores) // devices
    return [cores[number * each : (number + 1) * each] for number in range(devices)]


def _addresses(cluster: Cluster, config: RunConfig) -> list[str]:
    if not config.addresses:
        return []
    for name in config.addresses:
        cluster.device_number(name)
    missing = [name for name in cluster.device_names if name not in config.addresses]
    if missing:
        raise WorkerError(f"no address for device {missing[0]}; give all devices one or none")
    return [config.addresses[name] for name in cluster.device_names]


def _memory_kills() -> int:
    """How many processes the system has killed for want of memory, here or in this container."""
    total = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            for line in Path(path).read_text(encoding="utf-8").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    total += int(value)
        except (OSError, ValueError):
            continue
    return total
