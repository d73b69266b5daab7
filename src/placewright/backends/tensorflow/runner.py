"""Runs TensorFlow steps under placements: which processes there are, and what they are told."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Mapping, Sequence

import numpy as np

from placewright.backends.isolation import PrivateNetwork
from placewright.backends.process_runner import ProcessRunner
from placewright.backends.processes import Child, free_ports, share_cores
from placewright.backends.tensorflow import (
    BACKEND,
    TensorFlowRunConfig,
    memory,
    only_open,
    starts_servers,
)
from placewright.backends.tensorflow.program import TensorFlowProgram
from placewright.cluster import Cluster
from placewright.errors import WorkerError

_EXHAUSTED = re.compile(r"ran out of memory trying to allocate [\w.]*")
_NO_FAILURE = "not a failure"
"""What TensorFlow's allocators write into the log when they have waited for memory in vain; and of
attempts that may fail."""

_MEMORY_SECONDS = 2.0
"""How long a device's process may take to say how much memory it holds."""


class TensorFlowRunner(ProcessRunner):
    """Measures placements of one program on one cluster.

    A cluster with several CPU devices becomes as many processes with cores of their own, which
    exchange tensors over gRPC, in a network that nobody else reaches; one with a single CPU and
    GPUs is one process.
    """

    program_type = TensorFlowProgram
    run_config = TensorFlowRunConfig
    program: TensorFlowProgram
    config: TensorFlowRunConfig

    def _begin(self) -> None:
        cluster, config = self.cluster, self.config
        self.attempts = 1 if config.ports else 3  # what the user chose is not free the next time
        self._target = ""
        self._addresses = _addresses(cluster, config)
        self._starts_servers = starts_servers(cluster, config)
        self.in_one_process = not self._starts_servers and not self._addresses
        if self._starts_servers:
            others = [device.name for device in cluster.devices if device.type != "cpu"]
            if others:
                raise WorkerError(
                    f"cluster {cluster.name!r} has several CPUs and {others[0]}: that needs a "
                    "TensorFlow server for each device; start them and give their addresses"
                )
            if config.ports and len(config.ports) != cluster.num_devices:
                raise WorkerError(f"{len(config.ports)} ports for {cluster.num_devices} devices")

    def start(self) -> None:
        """Starts the processes, if they do not run yet."""
        BACKEND.check_installed()
        super().start()

    def time_links(self, sizes: Sequence[int]) -> Mapping[str, Sequence[float]]:
        """With chains of real tensors, in processes of their own."""
        from placewright.backends.tensorflow.links import time_links

        self._stop()  # two sets of processes would share the cores
        return time_links(self.cluster, self.config, sizes)

    def _make_network(self) -> PrivateNetwork | None:
        # Servers of others are out of reach from within one.
        if not self._starts_servers or self.config.open_servers:
            return None
        try:
            return PrivateNetwork()
        except OSError as fault:
            raise WorkerError(only_open(fault)) from None

    def _start_workers(self, deadline: float) -> list[tuple[Child, str]]:
        self._target = ""
        if self._addresses:
            self._target = f"grpc://{self._addresses[0]}"
        if not self._starts_servers:
            return []
        ports = self.config.ports or free_ports(self.cluster.num_devices)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self._target = f"grpc://{addresses[0]}"
        for number, cores in enumerate(share_cores(self.cluster.num_devices)):
            greeting = {
                "cores": cores,
                "threads_between_ops": self.config.threads_between_ops,
                "addresses": addresses,
                "task": number,
            }
            self._workers.append(
                Child(
                    "placewright.backends.tensorflow.worker",
                    greeting,
                    seconds=deadline - time.monotonic(),
                    environment=self._environment(number),
                    prefix=self._prefix,
                )
            )
        return [
            (worker, f"the process of device {name} (port {port})")
            for worker, name, port in zip(
                self._workers, self.cluster.device_names, ports, strict=True
            )
        ]

    def _start_client(self, deadline: float) -> Child:
        graph = self.program.graph
        sizes = graph.resident_bytes
        arrays = io.BytesIO()
        np.savez(arrays, **self._feeds)  # type: ignore[arg-type]
        return Child(
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
                    "threads_between_ops": self.config.threads_between_ops,
                    "limit_memory": self.config.limit_memory,
                    "memory_bytes": self._limit(0) if self.in_one_process else None,
                    "optimize": self.config.optimize,
                    "soft_placement": self.config.soft_placement,
                },
            },
            seconds=deadline - time.monotonic(),
            environment=self._environment(0 if self.in_one_process else None),
            files={"graph_def": self.program.graph_def, "feeds": arrays.getvalue()},
            prefix=self._prefix,
        )

    def _environment(self, device: int | None) -> dict[str, str]:
        environment = {"TF_CPP_MIN_LOG_LEVEL": "1"}
        if device is None:
            environment["CUDA_VISIBLE_DEVICES"] = "-1"  # it only talks to the devices
        return environment

    def _limit(self, device: int) -> int | None:
        """The bytes that it may hold, where that is ours to count."""
        described = self.cluster.devices[device]
        counted = self.config.limit_memory and described.type == "cpu"
        return described.memory_bytes if counted else None

    def _prepare(self) -> None:
        for child in self._children:
            child.fresh_lines()
        for number, worker in enumerate(self._workers):
            if self._limit(number) is not None:
                worker.send({"memory": "forget"}, 0.0)
                # A process that does not answer is noticed during the run.
                answer = worker.receive(_MEMORY_SECONDS)
                if answer is not None and answer.get("peak_bytes", 0) is None:
                    raise WorkerError(memory.NOT_COUNTED)

    def _out_of_memory(self) -> str:
        for name, child in self._named_children():
            for line in child.fresh_lines():
                said = _EXHAUSTED.search(line)
                if said and _NO_FAILURE not in line:
                    return f"{name} {said[0]}"
        for number, worker in enumerate(self._workers):
            limit = self._limit(number)
            if limit is not None:
                worker.send({"memory": "peak"}, 0.0)
                answer = worker.receive(_MEMORY_SECONDS)
                peak = (answer or {}).get("peak_bytes") or 0
                if peak > limit:
                    return memory.too_much(self.cluster.device_names[number], peak, limit)
        return ""

    def _port_taken(self, words: str) -> bool:
        # gRPC's words, and TensorFlow's around them.
        signs = ("Address already in use", "Could not start gRPC server", "WSA Error")
        return any(sign in words for sign in signs)

    def _in_our_words(self, reason: str) -> str:
        for ours, theirs in zip(self.cluster.device_names, self._device_names, strict=True):
            reason = reason.replace(theirs, ours)
        return reason

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


def _addresses(cluster: Cluster, config: TensorFlowRunConfig) -> list[str]:
    if not config.addresses:
        return []
    for name in config.addresses:
        cluster.device_number(name)
    missing = [name for name in cluster.device_names if name not in config.addresses]
    if missing:
        raise WorkerError(f"no address for device {missing[0]}; give all devices one or none")
    return [config.addresses[name] for name in cluster.device_names]
