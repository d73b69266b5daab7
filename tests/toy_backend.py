"""A framework of its own: functions that sleep, run by a thread for each device."""

from __future__ import annotations

import contextlib
import functools
import timeit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from placewright.backends.base import Backend, Input, LoadOptions, Plan, Run, RunConfig, Trace
from placewright.backends.timing import Timing
from placewright.cluster import Cluster
from placewright.errors import WorkerError
from placewright.graph import Edge, Graph, Op, Tensor
from placewright.measurement import Measurement, Outcome


class Toy(NamedTuple):
    """Functions by name, and the names of those that each waits for."""

    functions: Mapping[str, Callable[[], object]]
    reads: Mapping[str, Sequence[str]]
    devices: Any = None


class ToyProgram(NamedTuple):
    model: Toy
    graph: Graph
    inputs: tuple[Input, ...] = ()
    backend: str = "toy"


class ToyRunner(contextlib.ExitStack):
    def __init__(self, program: ToyProgram, cluster: Cluster, config: RunConfig) -> None:
        super().__init__()
        self.program, self.cluster, self.config = program, cluster, config
        self._threads = [self.enter_context(ThreadPoolExecutor(1, n)) for n in cluster.device_names]
        self.callback(self._threads.clear)

    def start(self) -> None:
        if not self._threads:
            raise WorkerError("the runner is closed")

    def measure(self, devices: Any, *, best_seconds: float | None = None, traces: int = 0,
                adaptive: bool = True) -> Run:  # fmt: skip
        self.start()
        timing = Timing.of(self.config, best_seconds, adaptive=adaptive)
        where = dict(zip(self.program.graph.op_names, map(int, devices), strict=True))
        op_seconds: dict[str, float] = {}
        try:
            self._step(devices, op_seconds)
            seconds = timing.time(functools.partial(self._step, devices, {}))
        except Exception as error:
            return Run(measurement=Measurement(outcome=Outcome.FAILED, reason=repr(error)))
        trace = Trace(op_seconds=op_seconds, device_of=where) if traces else None
        measurement = Measurement(outcome=Outcome.OK, step_seconds=tuple(seconds))
        return Run(measurement=measurement, trace=trace)

    def _step(self, devices: Any, op_seconds: dict[str, float]) -> None:
        done: dict[str, Any] = {}

        def work(name: str) -> float:
            for other in self.program.model.reads.get(name, ()):
                done[other].result()
            return timeit.timeit(self.program.model.functions[name], number=1)

        for name, device in zip(self.program.graph.op_names, devices, strict=True):
            done[name] = self._threads[int(device)].submit(work, name)
        op_seconds.update((name, future.result()) for name, future in done.items())

    def demands(self) -> Mapping[int, Mapping[str, float]]:
        return {}

    def time_links(self, sizes: Sequence[int]) -> Mapping[str, Sequence[float]]:
        return {link.name: [1e-6 + size / 1e9 for size in sizes] for link in self.cluster.links}


class ToyBackend(Backend):
    name, extra = "toy", ""

    def accepts(self, source: object) -> bool:
        return isinstance(source, Toy)

    def load(self, source: Toy, options: LoadOptions) -> ToyProgram:
        ops = [Op(name=name, type="Sleep", outputs=(Tensor(4),)) for name in source.functions]
        edges = [Edge(other, name) for name, others in source.reads.items() for other in others]
        return ToyProgram(source, Graph.from_ops("toy", ops, edges))

    def runner(self, program: ToyProgram, cluster: Cluster, config: RunConfig | None = None,
               feeds: object = None) -> ToyRunner:  # fmt: skip
        return ToyRunner(program, cluster, config or RunConfig())

    def apply(self, target: Toy, plan: Plan) -> Toy:
        return target._replace(devices=plan.device_of)


BACKEND = ToyBackend()
