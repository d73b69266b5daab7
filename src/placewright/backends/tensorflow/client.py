"""Holds the TensorFlow graph, puts its ops on devices and times steps, on request.

Run by `TensorFlowRunner` as `python -m placewright.backends.tensorflow.client`.
"""

from __future__ import annotations

import contextlib
import io
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from placewright.backends.processes import read_all, serve_begun
from placewright.backends.tensorflow import memory
from placewright.backends.tensorflow.lean import import_tensorflow
from placewright.backends.timing import Timing

_LOST = ("UnavailableError", "AbortedError", "CancelledError")
"""Errors that say that a device's process is gone, not that the placement is wrong."""

_CONTAINER = "placewright"
"""Resource container of the variables: servers that are not ours hold others, of other people."""

_HISTORY = re.compile(r"Graph execution error|Detected at node|Node: |From /job|\d+ root error|=+$")
"""Lines of TensorFlow's error messages that do not say what is wrong."""


class Client:
    """One graph on one set of devices; a new session for every placement."""

    def __init__(self, greeting: Mapping[str, Any]) -> None:
        self._tf = tf = import_tensorflow()
        self._v1 = tf.compat.v1
        self._target: str = greeting["target"]
        self._devices: list[str] = greeting["devices"]
        self._settings: dict[str, Any] = greeting["settings"]
        self._graph = tf.Graph()
        with np.load(io.BytesIO(read_all(greeting["feeds"])), allow_pickle=False) as file:
            feeds = {name: file[name] for name in file.files}
        graph_def = self._v1.GraphDef.FromString(read_all(greeting["graph_def"]))
        _fix_inputs(tf, graph_def, feeds)
        with self._graph.as_default(), self._graph.container(_CONTAINER):
            tf.graph_util.import_graph_def(graph_def, name="")
        by_name = {op.name: op for op in self._graph.get_operations()}
        self._ops = [by_name[name] for name in greeting["ops"]]
        self._number = {name: number for number, name in enumerate(greeting["ops"])}
        self._variable_bytes: dict[str, int] = greeting["variable_bytes"]
        self._initializers = {
            variable: by_name[name] for variable, name in greeting["initializers"].items()
        }
        # What only initialisers need goes with their variable.
        self._first_values = _needed_by(self._initializers, set(greeting["ops"]))
        self._fetches = [by_name[name] for name in greeting["targets"]]
        self._results: list[str] = greeting["results"]
        self._result_tensors = [self._graph.get_tensor_by_name(name) for name in self._results]
        self._placed: list[int] = []
        self._initialized: set[tuple[str, int]] = set()
        """(variable, device): servers keep variables when a session is closed."""
        self._resident: set[tuple[str, int]] = set()
        """Those that take memory there, also where what they hold is not to be relied on."""
        self._stepped = False
        """Whether steps have changed the variables since they were all new."""
        self._reset()  # what an earlier client left on the servers

    def config(self) -> Any:
        config = self._v1.ConfigProto(
            allow_soft_placement=self._settings["soft_placement"],
            inter_op_parallelism_threads=self._settings["threads_between_ops"],
        )
        if not self._settings["optimize"]:
            options = config.graph_options
            options.rewrite_options.disable_meta_optimizer = True
            options.optimizer_options.opt_level = self._v1.OptimizerOptions.L0
        return config

    def _reset(self) -> None:
        if self._target:
            self._v1.Session.reset(self._target, [_CONTAINER])
        # Without servers they end with their session.
        self._initialized.clear()
        self._resident.clear()
        self._stepped = False

    def place(self, devices: Sequence[int]) -> None:
        """Puts ops where they belong, those that are not there yet."""
        before = self._placed or [-1] * len(devices)
        for op, old, new in zip(self._ops, before, devices, strict=True):
            if old != new:
                op._set_device(self._devices[new])
        for variable, ops in self._first_values.items():
            new = devices[self._number[variable]]
            if not self._placed or self._placed[self._number[variable]] != new:
                for op in ops:
                    op._set_device(self._devices[new])
        self._placed = list(devices)

    def measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Times a placement; what goes wrong on the way is the answer."""
        deadline = time.monotonic() + request["seconds"]
        try:
            if not self._target or request["train_steps"]:
                self._reset()
            stepped = self._stepped
            answer = self._measure(request, deadline)
            if stepped and answer["outcome"] == "not a number":
                # Variables that were trained for many placements on random inputs may have run
                # away; that says nothing about this placement.
                self._reset()
                answer = self._measure(request, deadline)
            if answer["outcome"] == "not a number":
                answer["outcome"] = "failed"
            return answer
        except (self._tf.errors.OpError, ValueError, TypeError) as error:
            # Variables may be half initialised.
            self._initialized.clear()
            return _failure(error)
        finally:
            if self._settings["limit_memory"]:
                # Variables of this placement would count for the next. Where that fails, processes
                # are gone, which is noticed before it.
                with contextlib.suppress(self._tf.errors.OpError):
                    self._reset()

    def _measure(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        began = time.monotonic()
        self.place(request["devices"])
        limit = self._settings["memory_bytes"]
        if limit is not None and memory.forget() is None:
            return {"outcome": "failed", "reason": memory.NOT_COUNTED}
        with self._v1.Session(self._target, graph=self._graph, config=self.config()) as session:
            self._initialize(session, request["devices"], deadline)
            answer: dict[str, Any] = {"outcome": "ok"}
            metadata = self._v1.RunMetadata()
            self._stepped = True
            results = [self._run(session, deadline, metadata, partitions=request["check"])]
            if request["check"]:
                answer["misplaced"] = self._misplaced(metadata, request["devices"])
            answer["peak_bytes"] = self._peak_bytes(metadata, request["devices"])
            if limit is not None and (peak := memory.peak_bytes() or 0) > limit:
                reason = memory.too_much(self._devices[0], peak, limit)
                return {"outcome": "out of memory", "reason": reason}

            def step() -> None:
                if not request["train_steps"]:
                    results.clear()  # what is not a number stays so: the last step tells
                results.append(self._run(session, deadline))

            warm = time.monotonic()
            seconds = Timing(**request["timing"]).time(step)
            stepped = time.monotonic() - warm
            bad = next(filter(None, map(self._not_a_number, results)), "")
            if bad:
                return {"outcome": "not a number", "reason": f"the step returned {bad}"}
            answer["step_seconds"] = seconds
            if request["train_steps"]:
                answer["returned"] = self._scalars(results)
            if request["traces"]:
                answer["trace"] = self._trace(session, deadline, request["traces"])
        answer["overhead_seconds"] = time.monotonic() - began - stepped
        return answer

    def _initialize(self, session: Any, devices: Sequence[int], deadline: float) -> None:
        missing = [
            (variable, devices[self._number[variable]])
            for variable in self._initializers
            if (variable, devices[self._number[variable]]) not in self._initialized
        ]
        if missing:
            options = self._options(deadline)
            self._resident.update(missing)
            session.run([self._initializers[variable] for variable, _ in missing], options=options)
            self._initialized.update(missing)

    def _run(
        self, session: Any, deadline: float, metadata: Any = None, partitions: bool = False
    ) -> list[Any]:
        options = self._options(deadline)
        if metadata is not None:
            options.trace_level = self._v1.RunOptions.FULL_TRACE
            options.output_partition_graphs = partitions
        fetches = [self._result_tensors, self._fetches]
        results: list[Any] = session.run(fetches, options=options, run_metadata=metadata)[0]
        return results

    def _options(self, deadline: float) -> Any:
        left = max(1, int(1000 * (deadline - time.monotonic())))
        return self._v1.RunOptions(timeout_in_ms=left)

    def _scalars(self, results: Sequence[Sequence[Any]]) -> dict[str, list[float]]:
        """Of the results of each step, those that are one number."""
        return {
            name: [float(np.asarray(values[number]).item()) for values in results]
            for number, name in enumerate(self._results)
            if np.size(results[0][number]) == 1
        }

    def _not_a_number(self, results: Iterable[Any]) -> str:
        for name, value in zip(self._results, results, strict=True):
            array = np.asarray(value)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return f"{'NaN' if np.isnan(array).any() else 'infinity'} in {name!r}"
        return ""

    # --- what TensorFlow tells ---

    def _misplaced(self, metadata: Any, devices: Sequence[int]) -> list[str]:
        """Ops that TensorFlow ran elsewhere than it was told to, or not at all."""
        ran = {node.name: node.device for graph in metadata.partition_graphs for node in graph.node}
        # TensorFlow makes small constants anew on every device that reads them.
        copied = {name.rpartition("/replicate")[0] for name in ran if "/replicate" in name}
        wrong = []
        for name, device in zip(self._number, devices, strict=True):
            where = ran.get(name)
            if where is None:
                if name not in copied:
                    wrong.append(f"{name}: not run")
            elif where != self._devices[device]:
                wrong.append(f"{name}: on {where}, not {self._devices[device]}")
        return wrong

    def _peak_bytes(self, metadata: Any, devices: Sequence[int]) -> list[int]:
        """Most memory that the allocator of each device had in use, this placement's part of it."""
        peaks = [0] * len(self._devices)
        number = {name: d for d, name in enumerate(self._devices)}
        for stats in metadata.step_stats.dev_stats:
            d = number.get(stats.device)
            if d is not None:
                for node in stats.node_stats:
                    for used in node.memory:
                        peaks[d] = max(peaks[d], used.allocator_bytes_in_use)
        placed = [0] * len(self._devices)
        for variable, size in self._variable_bytes.items():
            device = devices[self._number[variable]]
            placed[device] += size
            for d in range(len(self._devices)):
                if d != device and (variable, d) in self._resident:
                    peaks[d] -= size
        return [max(peak, least) for peak, least in zip(peaks, placed, strict=True)]

    def _trace(self, session: Any, deadline: float, count: int) -> dict[str, Any]:
        """Medians over some traced steps: seconds of every op, and the transfers."""
        ops: dict[str, list[float]] = {}
        ran_on: dict[str, int] = {}
        number = {name: d for d, name in enumerate(self._devices)}
        transfers: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        steps = []
        for _ in range(count):
            metadata = self._v1.RunMetadata()
            started = time.monotonic()
            self._run(session, deadline, metadata)
            steps.append(time.monotonic() - started)
            in_step: dict[str, float] = {}
            for stats in metadata.step_stats.dev_stats:
                for node in stats.node_stats:
                    name = node.node_name
                    if name == "RecvTensor":
                        label = node.timeline_label
                        edge = re.sub(r"^(\[[^]]*\] )*", "", label)
                        transfers.setdefault(edge, []).append(node.all_end_rel_micros * 1e-6)
                        for output in node.output:
                            description = output.tensor_description.allocation_description
                            sizes[edge] = int(description.requested_bytes)
                    elif name in self._number and stats.device in number:
                        ran_on[name] = number[stats.device]
                        # From when the executor took it up to when its outputs were passed on.
                        nanos = node.all_end_rel_nanos or 1000 * node.all_end_rel_micros
                        in_step[name] = in_step.get(name, 0.0) + nanos * 1e-9
            # The ops of a loop run several times in a step; what counts is all of them together.
            for name, seconds in in_step.items():
                ops.setdefault(name, []).append(seconds)
        return {
            "op_seconds": {name: statistics.median(times) for name, times in ops.items()},
            "device_of": ran_on,
            "transfers": [
                (edge, sizes.get(edge, 0), statistics.median(seconds))
                for edge, seconds in transfers.items()
            ],
            "step_seconds": steps,
        }


def _fix_inputs(tf: Any, graph_def: Any, feeds: Mapping[str, Any]) -> None:
    """Makes constants of the inputs: they lie on their device as if a pipeline had put them there,
    and the client's own copying is not timed."""
    for node in graph_def.node:
        if node.name in feeds and node.op == "Placeholder":
            dtype = node.attr["dtype"].type
            node.op = "Const"
            node.attr.clear()
            node.attr["dtype"].type = dtype
            node.attr["value"].tensor.CopyFrom(
                tf.make_tensor_proto(feeds[node.name], tf.dtypes.as_dtype(dtype))
            )


def _needed_by(initializers: Mapping[str, Any], placed: set[str]) -> dict[str, list[Any]]:
    """Variable -> the ops that only its initialiser needs."""
    seen: set[str] = set(placed)
    result = {}
    for variable, initializer in initializers.items():
        ops, stack = [], [initializer]
        while stack:
            op = stack.pop()
            if op.name not in seen:
                seen.add(op.name)
                ops.append(op)
                stack += [tensor.op for tensor in op.inputs]
                stack += op.control_inputs
        result[variable] = ops
    return result


def _failure(error: Exception) -> dict[str, Any]:
    kind = type(error).__name__
    text = str(getattr(error, "message", None) or error)
    # Around the line that says it are the graph's history and the log.
    lines = [line.strip() for line in text.splitlines() if line.strip() and line == line.lstrip()]
    reason = next((line for line in lines if not _HISTORY.match(line)), kind)
    node = re.search(r"\{\{node ([^}]+)\}\}", text)
    if node and node[1] not in reason:
        reason += f" (op {node[1]!r})"
    if kind == "ResourceExhaustedError":
        outcome = "out of memory"
    elif kind == "DeadlineExceededError":
        outcome = "timed out"
    elif kind in _LOST:
        outcome = "lost"
    else:
        outcome = "failed"
    return {"outcome": outcome, "reason": reason[:400]}


def main() -> None:
    serve_begun(lambda request: Client(request).measure)


if __name__ == "__main__":
    main()
