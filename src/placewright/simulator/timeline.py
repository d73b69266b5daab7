"""What happens when in one simulated step: schedule, memory, critical path, Chrome trace."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from placewright.graph import FloatArray, IndexArray, IntArray, frozen
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator.engine import Recording
from placewright.simulator.flow import Flow


class Delay(enum.Enum):
    """Why an op or a transfer did not start earlier."""

    NOTHING = "nothing"
    """It started with the step."""
    INPUT = "input"
    """What it needs was not there before."""
    DEVICE = "device"
    """The device was busy with the op before."""
    CHANNEL = "channel"
    """A channel on its route was busy with another transfer."""
    ISSUE = "issue"
    """It had not been issued before."""
    TURN = "turn"
    """It is a weight, and one before it was still on its way, or the window had no room."""


class PathEntry(NamedTuple):
    """An op, the issuing of one, or a transfer on the critical path."""

    op: int
    """The op; for a transfer, the op whose result is sent."""
    transfer: int | None
    """Number of the transfer, None for an op."""
    start: float
    end: float
    delay: Delay
    """Why it did not start earlier: what it waited for is the entry before."""
    issues: bool = False
    """Whether this is the time of issuing the op, not of the op itself."""


class LiveTensor(NamedTuple):
    tensor: int
    """The tensor that owns the memory."""
    bytes: int


class MemoryCurve(NamedTuple):
    """Memory of one device over time: `bytes[i]` from `seconds[i]` until `seconds[i + 1]`.

    Several points can have the same time; what is freed and taken in one moment is told apart.
    """

    seconds: FloatArray
    bytes: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """M transfers, in the order they were asked for."""

    tensor: IndexArray
    """[M] what is sent, -1 for the mere completion of an op."""
    producer: IndexArray
    """[M] the op that made it."""
    source: IndexArray
    """[M] device"""
    target: IndexArray
    """[M] device"""
    bytes: IntArray
    request: FloatArray
    """[M] when the op had made it."""
    start: FloatArray
    """[M] when all channels were free."""
    free: FloatArray
    """[M] when they were free for the next, which can be before this one arrived; where links relay
    it, when the last was."""
    end: FloatArray
    """[M] when it arrived."""
    hop_start: FloatArray
    """[M, hops] when one that links relay began to occupy each of them; NaN where it did not, as
    for links before which it was there already."""
    hop_free: FloatArray
    """[M, hops] when that was free again."""
    visit: IndexArray
    """[M] of a weight that travels from its home, which of the problem's visits that is; -1 for all
    else."""

    def __len__(self) -> int:
        return len(self.tensor)


class Parts(NamedTuple):
    """What the step consists of for one device, in seconds that add up to the step time; or the
    mean over devices."""

    compute: float
    overhead: float
    """Issuing ops, while the device does so itself or has nothing else to do, and gaps between
    kernels."""
    waiting: float
    """For transfers to arrive, with nothing else to do."""
    idle: float
    """Without anything to do, as other devices have to come first or all is done."""

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """One step of one placement: N ops on D devices."""

    problem: Problem
    placement: Placement
    step_seconds: float
    peak_bytes: IntArray
    """[D]"""
    op_device: IndexArray
    """[N]"""
    op_slot: IndexArray
    """[N] which of the device's slots ran the op."""
    op_ready: FloatArray
    """[N] when all it waited for was there; before an executor, where it could be issued."""
    op_issued: FloatArray
    """[N] when it was issued; 0 where its device does that itself."""
    op_start: FloatArray
    """[N]"""
    op_end: FloatArray
    """[N]"""
    transfers: Transfers
    memory: tuple[MemoryCurve, ...]
    """[D]"""
    live_at_peak: tuple[tuple[LiveTensor, ...], ...]
    """[D] what was in memory when a device used most, besides variables; largest first."""
    critical_path: tuple[PathEntry, ...]
    """From the start of the step to its end without a gap, in order of time."""
    device_parts: tuple[Parts, ...]
    """[D] what the step is made of on each device; of several slots, the mean."""
    path_parts: Parts
    """What the step is made of along its critical path."""

    @cached_property
    def busy_seconds(self) -> FloatArray:
        """[D] seconds spent on ops, summed over the slots of a device."""
        totals = np.zeros(self.problem.num_devices)
        np.add.at(totals, self.op_device, self.op_end - self.op_start)
        return frozen(totals)

    @cached_property
    def idle_seconds(self) -> FloatArray:
        """[D] seconds without an op, summed over the slots of a device."""
        slots = np.array([device.kind.slots for device in self.problem.cluster.devices])
        return frozen(np.maximum(slots * self.step_seconds - self.busy_seconds, 0.0))

    @cached_property
    def transfer_seconds(self) -> FloatArray:
        """[D] seconds of all transfers from or to a device; they overlap with ops, and where a
        link has a gap shorter than its latency, with each other."""
        totals = np.zeros(self.problem.num_devices)
        duration = self.transfers.end - self.transfers.start
        np.add.at(totals, self.transfers.source, duration)
        np.add.at(totals, self.transfers.target, duration)
        return frozen(totals)

    def chrome_trace(self) -> dict[str, Any]:
        """The step in the Chrome trace format, for ui.perfetto.dev or chrome://tracing."""
        events = [*self._track_names(), *self._op_events(), *self._transfer_events()]
        for device, curve in enumerate(self.memory):
            for seconds, size in zip(curve.seconds.tolist(), curve.bytes.tolist(), strict=True):
                events.append(
                    {
                        "name": "memory",
                        "ph": "C",
                        "pid": device,
                        "ts": seconds * 1e6,
                        "args": {"bytes": size},
                    }
                )
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "model": self.problem.graph.name,
                "cluster": self.problem.cluster.name,
                "problem": self.problem.fingerprint,
                "step_seconds": self.step_seconds,
            },
        }

    def _track_names(self) -> list[dict[str, Any]]:
        cluster = self.problem.cluster
        tracks = [
            (device.name, [f"slot {slot}" for slot in range(device.kind.slots)])
            for device in cluster.devices
        ]
        tracks.append(("links", list(cluster.routes.channel_names)))
        events: list[dict[str, Any]] = []
        for process, (name, threads) in enumerate(tracks):
            events.append(_named("process_name", name, process, 0))
            events.append(
                {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0,
                 "args": {"sort_index": process}}
            )  # fmt: skip
            for thread, label in enumerate(threads):
                events.append(_named("thread_name", label, process, thread))
        return events

    def _op_events(self) -> list[dict[str, Any]]:
        graph, grouping = self.problem.graph, self.problem.grouping
        return [
            _slice(
                graph.op_names[op], process=device, thread=slot, start=start, end=end,
                args={"type": graph.op_types[op], "group": grouping.names[group]},
            )
            for op, (device, slot, start, end, group) in enumerate(
                zip(
                    self.op_device.tolist(),
                    self.op_slot.tolist(),
                    self.op_start.tolist(),
                    self.op_end.tolist(),
                    grouping.group_of.tolist(),
                    strict=True,
                )
            )
        ]  # fmt: skip

    def _transfer_events(self) -> list[dict[str, Any]]:
        graph, cluster = self.problem.graph, self.problem.cluster
        names, sent = cluster.device_names, self.transfers
        events = []
        for i in range(len(sent)):
            source, target = int(sent.source[i]), int(sent.target[i])
            args = {
                "from": names[source],
                "to": names[target],
                "bytes": int(sent.bytes[i]),
                "waited_us": float(sent.start[i] - sent.request[i]) * 1e6,
                "arrives_us": float(sent.end[i]) * 1e6,
            }
            for channel, start, end in self._occupied(i):
                events.append(
                    _slice(
                        graph.op_names[sent.producer[i]], process=len(names), thread=channel,
                        start=start, end=end, args=args,
                    )
                )  # fmt: skip
        return events

    def _occupied(self, i: int) -> list[tuple[int, float, float]]:
        """Channels that a transfer occupies, from when until when."""
        sent, routes = self.transfers, self.problem.cluster.routes
        source, target = int(sent.source[i]), int(sent.target[i])
        channels = route_channels(self.problem, source, target)
        if not routes.relayed[source, target]:
            return [(channel, float(sent.start[i]), float(sent.free[i])) for channel in channels]
        hops = zip(channels, sent.hop_start[i].tolist(), sent.hop_free[i].tolist(), strict=False)
        return [hop for hop in hops if not math.isnan(hop[1])]


def _named(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, *, process: int, thread: int, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "pid": process, "tid": thread,
        "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args,
    }  # fmt: skip


def route_channels(problem: Problem, source: int, target: int) -> list[int]:
    """The channels a transfer occupies."""
    routes = problem.cluster.routes
    route = source * problem.num_devices + target
    return [int(c) for c in routes.channels[routes.offsets[route] : routes.offsets[route + 1]]]


# --- from what the kernel recorded ---------------------------------------------------------------


def build_timeline(
    problem: Problem, flow: Flow, placement: Placement, recording: Recording
) -> Timeline:
    op_device = placement.devices[problem.grouping.group_of]
    first_server = np.cumsum([0, *(device.kind.slots for device in problem.cluster.devices)])
    use = recording.transfer_use
    num_uses = len(flow.use_op)
    streamed = use > num_uses
    visit, to = np.divmod(np.where(streamed, use - num_uses - 1, 0), problem.num_devices)
    use = np.where(streamed, num_uses, use)
    tensor, producer = np.append(flow.use_tensor, -1)[use], np.append(flow.use_producer, 0)[use]
    target = op_device[np.append(flow.use_op, 0)[use]]
    if problem.visits is not None and streamed.any():
        tensor = np.where(streamed, problem.visits.tensor[visit], tensor)
        producer = np.where(streamed, problem.visits.owner[visit], producer)
        target = np.where(streamed, to, target)
    sizes = np.append(problem.graph.tensor_bytes, 0)  # the last, -1, is a completion
    transfers = Transfers(
        tensor=frozen(tensor.astype(np.int32)),
        producer=frozen(producer.astype(np.int32)),
        source=frozen(op_device[producer]),
        target=frozen(target.astype(np.int32)),
        bytes=frozen(sizes[tensor]),
        request=frozen(recording.transfer_request),
        start=frozen(recording.transfer_start),
        free=frozen(recording.transfer_free),
        end=frozen(recording.transfer_end),
        hop_start=frozen(recording.hop_start),
        hop_free=frozen(recording.hop_free),
        visit=frozen(np.where(streamed, visit, -1).astype(np.int32)),
    )
    curves, live = _memory(problem, flow, op_device, recording)
    path = _critical_path(problem, op_device, transfers, recording)
    return Timeline(
        problem=problem,
        placement=placement,
        step_seconds=recording.step_seconds,
        peak_bytes=frozen(recording.peak_bytes),
        op_device=frozen(op_device),
        op_slot=frozen((recording.op_server - first_server[op_device]).astype(np.int32)),
        op_ready=frozen(recording.op_ready),
        op_issued=frozen(recording.issue_end),
        op_start=frozen(recording.op_start),
        op_end=frozen(recording.op_end),
        transfers=transfers,
        memory=curves,
        live_at_peak=live,
        critical_path=path,
        device_parts=_device_parts(problem, op_device, transfers, recording),
        path_parts=_path_parts(problem, op_device, path),
    )


def _memory(
    problem: Problem, flow: Flow, op_device: IndexArray, recording: Recording
) -> tuple[tuple[MemoryCurve, ...], tuple[tuple[LiveTensor, ...], ...]]:
    pools = problem.cluster.pool_of_device
    resident = np.zeros(problem.num_devices, dtype=np.int64)
    np.add.at(resident, pools[op_device], problem.graph.resident_bytes)
    curves, live = [], []
    for device in pools.tolist():
        mine = recording.change_device == device
        seconds = np.concatenate([[0.0], recording.change_seconds[mine]])
        changes = np.concatenate([[resident[device]], recording.change_bytes[mine]])
        sizes = np.cumsum(changes)
        curves.append(MemoryCurve(frozen(seconds), frozen(sizes)))
        held: dict[int, int] = {}
        until = int(np.argmax(sizes))
        for buffer, change in zip(
            recording.change_buffer[mine][:until].tolist(), changes[1 : until + 1].tolist(),
            strict=True,
        ):  # fmt: skip
            if change > 0:
                held[buffer] = change
            else:
                del held[buffer]
        largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))
        live.append(tuple(LiveTensor(int(flow.buffer_tensor[b]), size) for b, size in largest))
    return tuple(curves), tuple(live)


class _Issue(enum.Enum):
    """Who issues an op."""

    DEVICE = 0
    """Its device does, as a part of the op."""
    EXECUTOR = 1
    HOST = 2


def _issuers(problem: Problem, op_device: IndexArray) -> list[_Issue]:
    """[N]"""
    if not problem.issue_seconds.any():
        return [_Issue.DEVICE] * len(op_device)
    who = _Issue.HOST if problem.issue == "host" else _Issue.EXECUTOR
    apart = problem.issued_apart[op_device].tolist()
    return [who if beside else _Issue.DEVICE for beside in apart]


def _critical_path(
    problem: Problem, op_device: IndexArray, transfers: Transfers, recording: Recording
) -> tuple[PathEntry, ...]:
    """Walks back from the end of the step to whatever let each op or transfer start."""
    num_ops = problem.graph.num_ops
    transfer_of_use = {use: i for i, use in enumerate(recording.transfer_use.tolist())}
    blocker = _blocking_transfers(problem, transfers)
    issuer = _issuers(problem, op_device)
    path: list[PathEntry] = []
    node = int(np.flatnonzero(recording.op_end == recording.step_seconds)[-1])
    transfer: int | None = None
    issues = False
    until = 0.0
    while True:
        if transfer is not None:
            start, end = float(transfers.start[transfer]), until
            waited = start > transfers.request[transfer]
            cause = int(recording.transfer_cause[transfer])
            first = transfers.visit[transfer] >= 0 and cause < 0
            delay = Delay.TURN if cause >= 0 else Delay.NOTHING if first else Delay.INPUT
            delay = Delay.CHANNEL if waited else delay
            path.append(PathEntry(node, transfer, start, end, delay))
            if delay is Delay.NOTHING:
                return tuple(reversed(path))
            if waited:
                transfer = blocker[transfer]
            elif cause >= num_ops:  # the weight before it had to arrive first
                transfer = transfer_of_use[cause - num_ops]
            else:
                node = node if cause < 0 else cause  # the op that made room for it
                transfer = None
            if transfer is not None:
                node = int(transfers.producer[transfer])
                until = start  # of a transfer in the way only the time that it was in the way
            continue
        ready, issued = float(recording.op_ready[node]), float(recording.issue_end[node])
        cause = int(recording.op_cause[node])
        who = issuer[node]
        start, end = float(recording.op_start[node]), float(recording.op_end[node])
        if issues:
            start, end = float(recording.issue_start[node]), issued
        before, next_issues = cause, False
        if issues and who is _Issue.HOST:
            delay, before = Delay.ISSUE, node - 1
            # An op that the thread computed itself comes before, otherwise the issuing of one.
            next_issues = before >= 0 and recording.issue_end[before] == start
            if before < 0:
                delay = Delay.NOTHING
        elif issues and start > ready:
            delay, before, next_issues = Delay.ISSUE, int(recording.issue_before[node]), True
        elif issues:
            delay = Delay.NOTHING if cause < 0 else Delay.INPUT
            next_issues = True  # what it waits for on its own device is issued, not done
        elif start > max(ready, issued):
            delay, before = Delay.DEVICE, int(recording.op_before[node])
        elif who is _Issue.EXECUTOR or (who is _Issue.HOST and issued >= ready):
            delay, before, next_issues = Delay.ISSUE, node, True
        else:
            delay = Delay.NOTHING if cause < 0 else Delay.INPUT
        path.append(PathEntry(node, None, start, end, delay, issues))
        if delay is Delay.NOTHING:
            return tuple(reversed(path))
        issues = next_issues and before < num_ops
        if before < num_ops:
            node = before
        else:
            transfer = transfer_of_use[before - num_ops]
            node = int(transfers.producer[transfer])
            until = float(transfers.end[transfer])


# --- what the step is made of --------------------------------------------------------------------


def _overhead_share(problem: Problem, op_device: IndexArray) -> FloatArray:
    """[N] the part of each op's time on its device that is not its work."""
    ops = np.arange(len(op_device))
    overhead = problem.device_overhead_seconds[op_device, ops]
    busy = problem.busy_seconds[op_device, ops]
    return np.divide(overhead, busy, out=np.zeros(len(ops)), where=busy > 0)


def _device_parts(
    problem: Problem, op_device: IndexArray, transfers: Transfers, recording: Recording
) -> tuple[Parts, ...]:
    """Each time without an op is explained by what the next op on that server waited for last."""
    num_ops = problem.graph.num_ops
    length = recording.op_end - recording.op_start
    overhead = length * _overhead_share(problem, op_device)
    # [N] the time without an op before each one: it begins where the op before it ends.
    before = np.append(recording.op_end, 0.0)[recording.op_before]
    start, ready = recording.op_start, recording.op_ready
    request = ready.copy()
    by_transfer = recording.op_cause >= num_ops
    sent_at = np.zeros(int(recording.transfer_use.max(initial=-1)) + 1)
    sent_at[recording.transfer_use] = recording.transfer_request
    request[by_transfer] = sent_at[recording.op_cause[by_transfer] - num_ops]
    issuing = np.maximum(start - np.maximum(ready, before), 0.0)
    waiting = np.maximum(np.minimum(ready, start) - np.maximum(request, before), 0.0)
    waiting = np.where(by_transfer, waiting, 0.0)
    parts = []
    for number, device in enumerate(problem.cluster.devices):
        mine, slots = op_device == number, device.kind.slots
        compute, issued, waited = (
            float(part[mine].sum()) / slots
            for part in (length - overhead, overhead + issuing, waiting)
        )
        idle = max(recording.step_seconds - compute - issued - waited, 0.0)
        parts.append(Parts(compute, issued, waited, idle))
    return tuple(parts)


def _path_parts(problem: Problem, op_device: IndexArray, path: tuple[PathEntry, ...]) -> Parts:
    share = _overhead_share(problem, op_device)
    compute = overhead = waiting = 0.0
    for entry in path:
        seconds = entry.end - entry.start
        if entry.transfer is not None:
            waiting += seconds
        elif entry.issues:
            overhead += seconds
        else:
            overhead += seconds * float(share[entry.op])
            compute += seconds * (1.0 - float(share[entry.op]))
    return Parts(compute, overhead, waiting, 0.0)


def _blocking_transfers(problem: Problem, transfers: Transfers) -> list[int]:
    """[M] the transfer that each one waited for, -1 where the way was free."""
    last: dict[int, int] = {}
    result = []
    for i, (source, target) in enumerate(
        zip(transfers.source.tolist(), transfers.target.tolist(), strict=True)
    ):
        channels = route_channels(problem, source, target)
        before = [last[channel] for channel in channels if channel in last]
        result.append(max(before, key=lambda j: float(transfers.free[j]), default=-1))
        last.update(dict.fromkeys(channels, i))
    return result
