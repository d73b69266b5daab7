"""The simulator: how long a placement's step takes and how much memory it needs.

Ops are given to the servers of their device in the order in which they become ready, and where
somebody has to issue them, as they are issued. What an op makes is sent once to every other device
that needs it, over channels that carry one transfer at a time. Memory is held from the start of the
op that makes it to the end of the last that uses it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numba
import numpy as np
import numpy.typing as npt

from placewright.costs import MOST_SECONDS
from placewright.errors import CostsError, PlacementError
from placewright.graph import BoolArray, FloatArray, Graph, IndexArray, IntArray
from placewright.homes import Visits
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator.flow import Flow
from placewright.simulator.kernel import (
    BUFFER,
    OP,
    UINT,
    USE,
    Chips,
    Issuing,
    Log,
    Results,
    Scratch,
    Streams,
    Tables,
    simulate,
)

if TYPE_CHECKING:
    from placewright.simulator.timeline import Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What came of B placements on D devices."""

    step_seconds: FloatArray
    """[B] time of the last event; infinite where the placement cannot run. A placement that does
    not fit into memory has the time it would take if it did."""
    peak_bytes: IntArray
    """[B, D] most memory in use on each device; 0 where the placement cannot run."""
    failed_op: IndexArray
    """[B] the first op that has no kernel on its device or may not be there, or -1."""
    overflow_device: IndexArray
    """[B] the device that first ran out of memory, or -1."""
    overflow_tensors: IndexArray
    """[B, 3] the largest tensors alive there at that moment, largest first, each by the tensor that
    owns the memory; -1 where there are fewer."""
    overflow_bytes: IntArray
    """[B, 3] the memory each of them takes there."""
    pinned_bytes: IntArray
    """[B, D] memory that is pinned for weights that travel from there. Where that is more than can
    be pinned, the device has run out of memory."""

    @property
    def ok(self) -> BoolArray:
        """[B] whether the placement runs and fits."""
        return (self.failed_op < 0) & (self.overflow_device < 0)


class Simulator:
    """Simulates placements of one problem. May be shared by threads and sent to processes."""

    def __init__(self, problem: Problem, *, threads: int | None = None) -> None:
        self.problem = problem
        self.threads = threads or int(cast(Any, numba).config.NUMBA_NUM_THREADS)
        of_graph = _of_graph(problem)
        self.flow = of_graph.flow
        self._tables = _tables(problem, of_graph)
        self._issuing = _issuing(problem)
        self._chips = _chips(problem)
        self._streams = _streams(problem, self.flow)
        self._scratches: list[Scratch] = []
        self._stream_states: list[Streams] = []
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _simulator, (self.problem, self.threads)  # tables are quicker made than sent

    def run(self, devices: npt.ArrayLike, priority: IntArray | None = None) -> Simulation:
        """Simulates placements, given as rows of a [B, G] array.

        The threads share the rows; the result does not depend on how many there are. `priority` [N]
        says who goes first of ops that become ready at the same moment: who has the least, which
        must be different for all. By default that is the order of the graph, as it is in every
        figure that a placer is told.
        """
        tables = self._tables
        if priority is not None:
            if np.unique(priority).shape != (self.problem.graph.num_ops,):
                raise PlacementError("'priority' must be a different number for each op")
            # As ranks, which are small and of one type.
            order = np.argsort(np.argsort(priority)).astype(UINT)
            sources = tables.sources[np.argsort(order[tables.sources])]
            tables = tables._replace(sources=sources, priority=order)
        placements = self._checked(devices)
        results = Results.of(len(placements), self.problem.num_devices)
        next_row = np.zeros(1, dtype=np.int64)
        # numba's own parallel loops would do as well, but they abort the process when two threads
        # start one or when it was forked.
        helpers = [
            self._helpers().submit(self._simulate, tables, placements, next_row, results)
            for _ in range(min(self.threads, len(placements)) - 1)
        ]
        try:
            self._simulate(tables, placements, next_row, results)
        finally:
            # All rows are taken: one that was not begun, as others keep the threads busy, need not.
            begun = [helper for helper in helpers if not helper.cancel()]
        for helper in begun:
            helper.result()
        failed_op = np.full(len(placements), -1, dtype=np.int32)
        for row in np.flatnonzero(np.isinf(results.step_seconds)):
            failed_op[row] = self._first_failing_op(placements[row])
        tensor_of = np.append(self.flow.buffer_tensor, -1)
        pinned = self.problem.pinned_bytes(placements)
        self._limit_pinned(pinned, results)
        return Simulation(
            step_seconds=results.step_seconds,
            peak_bytes=results.peak_bytes,
            failed_op=failed_op,
            overflow_device=results.overflow_device,
            overflow_tensors=tensor_of[results.overflow_buffers].astype(np.int32),
            overflow_bytes=results.overflow_bytes,
            pinned_bytes=pinned,
        )

    def _limit_pinned(self, pinned: IntArray, results: Results) -> None:
        """Weights are pinned before the step, so that comes first."""
        if self._streams is None:
            return
        limits = [device.pinnable_bytes for device in self.problem.cluster.devices]
        over = (pinned > np.array(limits)) & np.isfinite(results.step_seconds)[:, np.newaxis]
        rows = np.flatnonzero(over.any(axis=1))
        results.overflow_device[rows] = over[rows].argmax(axis=1)
        results.overflow_buffers[rows] = -1
        results.overflow_bytes[rows] = 0

    def timeline(self, placement: Placement) -> Timeline:
        """Everything that happens in one step, also where memory does not suffice.

        Raises `PlacementError` for a placement that cannot run.
        """
        from placewright.simulator.timeline import build_timeline

        placement.check(self.problem)
        return build_timeline(self.problem, self.flow, placement, self.record(placement.devices))

    def record(self, devices: IndexArray) -> Recording:
        """Simulates one placement and keeps what the kernel knew on the way."""
        placements = self._checked(devices[np.newaxis])
        op = self._first_failing_op(placements[0])
        if op >= 0:
            device = int(placements[0, self.problem.grouping.group_of[op]])
            raise PlacementError(why_not(self.problem, op, device))
        results = Results.of(1, self.problem.num_devices)
        log = Log.of(self._tables, self._streams)
        scratch, streams = self._borrowed(), self._borrowed_streams()
        next_row = np.zeros(1, dtype=np.int64)
        simulate(
            self._tables, scratch, placements, next_row, results, log, self._working(),
            self._issuing, self._chips, streams,
        )  # fmt: skip
        sent, changes = log.counts
        hops = (len(log.use_end), len(self._tables.routes) // len(self._tables.latency))
        stretched = _stretching(log, self._tables)
        op_end = stretched(log.op_end)
        recording = Recording(
            step_seconds=float(op_end.max()),
            peak_bytes=results.peak_bytes[0],
            op_ready=stretched(log.op_ready),
            op_start=stretched(log.op_start),
            op_end=op_end,
            op_server=log.op_server,
            op_cause=log.op_cause,
            op_before=log.op_before,
            issue_start=stretched(log.issue_start),
            issue_end=stretched(log.issue_end),
            issue_before=log.issue_before,
            transfer_use=log.sent[:sent].astype(np.int64),
            transfer_request=stretched(log.use_request[log.sent[:sent]]),
            transfer_start=stretched(log.use_start[log.sent[:sent]]),
            transfer_free=stretched(log.use_free[log.sent[:sent]]),
            transfer_end=stretched(log.use_end[log.sent[:sent]]),
            transfer_cause=log.use_cause[log.sent[:sent]],
            hop_start=stretched(log.hop_start.reshape(hops)[log.sent[:sent]]),
            hop_free=stretched(log.hop_free.reshape(hops)[log.sent[:sent]]),
            change_seconds=stretched(log.change_seconds[:changes]),
            change_device=log.change_device[:changes],
            change_buffer=log.change_buffer[:changes],
            change_bytes=log.change_bytes[:changes],
        )
        self._give_back(scratch, streams)
        return recording

    def _helpers(self) -> ThreadPoolExecutor:
        """The threads besides the caller's. They wait for the next call: to start and end them
        takes as long as a few placements. A forked process has none of its parent's."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self.threads - 1)
        return self._pool[1]

    def _simulate(
        self, tables: Tables, placements: IndexArray, next_row: IntArray, results: Results
    ) -> None:
        scratch, streams = self._borrowed(), self._borrowed_streams()
        simulate(
            tables, scratch, placements, next_row, results, None, self._working(), self._issuing,
            self._chips, streams,
        )  # fmt: skip
        self._give_back(scratch, streams)

    def _working(self) -> IntArray | None:
        # With a contention of 0 it changes nothing. It is there all the same where ops are issued,
        # devices share a chip, or weights travel: so the kernel is compiled for that once, and not
        # twice.
        parts = (self._issuing, self._chips, self._streams)
        needed = self._tables.contention or any(part is not None for part in parts)
        return np.zeros(self.problem.num_devices, dtype=np.int64) if needed else None

    def _borrowed_streams(self) -> Streams | None:
        """The tables of what travels from its home, with working memory of its own."""
        if self._streams is None:
            return None
        try:
            return self._stream_states.pop()
        except IndexError:
            return self._streams.anew()

    def _give_back(self, scratch: Scratch, streams: Streams | None) -> None:
        """Kept for the next call: the system would have to clear fresh memory page by page, which
        takes up to a third of the time of a small batch."""
        self._scratches.append(scratch)
        if streams is not None:
            self._stream_states.append(streams)

    def _borrowed(self) -> Scratch:
        try:
            return self._scratches.pop()
        except IndexError:
            memories = int(self.problem.cluster.routes.relay.max()) + 1
            return Scratch.of(self._tables, memories, self._streams)

    def _checked(self, devices: npt.ArrayLike) -> IndexArray:
        array = np.asarray(devices)
        groups = self.problem.num_groups
        if array.ndim != 2 or array.shape[1] != groups or array.dtype.kind not in "iu":
            raise PlacementError(
                f"expected placements as whole numbers of shape [any, {groups} groups], "
                f"not {array.dtype} of shape {list(array.shape)}"
            )
        if array.size and not (array.min() >= 0 and array.max() < self.problem.num_devices):
            raise PlacementError(
                f"placements use device numbers {array.min()} to {array.max()}, cluster "
                f"{self.problem.cluster.name!r} has {self.problem.num_devices} devices"
            )
        return np.array(array, dtype=np.int32, order="C")

    def _first_failing_op(self, devices: IndexArray) -> int:
        group_of = self.problem.grouping.group_of
        seconds = self.problem.op_seconds[devices[group_of], np.arange(len(group_of))]
        failing = np.flatnonzero(np.isinf(seconds))
        if not failing.size:
            failing = np.flatnonzero(~self.problem.allowed[group_of, devices[group_of]])
        return int(failing[0]) if failing.size else -1


def _stretching(log: Log, tables: Tables) -> Callable[[FloatArray], FloatArray]:
    """Turns the kernel's times, which know no contention, into those of the step. The sums are in
    another order than the kernel's: they agree but for the last bits."""
    if not tables.contention:
        return lambda seconds: seconds
    times = np.unique(np.concatenate([log.op_start, log.op_end]))
    devices = tables.server_device[log.op_server]
    busy = np.zeros(len(times))
    for device in np.unique(devices):
        mine = devices == device
        begun = np.searchsorted(np.sort(log.op_start[mine]), times, side="right")
        ended = np.searchsorted(np.sort(log.op_end[mine]), times, side="right")
        busy += begun > ended
    shared = np.zeros(len(times))
    np.cumsum(np.diff(times) * np.maximum(busy[:-1] - 1, 0), out=shared[1:])
    return lambda seconds: seconds + tables.contention * np.interp(seconds, times, shared)


def _simulator(problem: Problem, threads: int) -> Simulator:
    return Simulator(problem, threads=threads)


def why_not(problem: Problem, op: int, device: int) -> str:
    """Why a placement that puts this op on this device does not run."""
    graph, grouping = problem.graph, problem.grouping
    name = problem.cluster.device_names[device]
    missing = np.isinf(problem.op_seconds[device, op])
    reason = f"has no kernel for {name}" if missing else f"is kept off {name} by a constraint"
    return (
        f"op {graph.op_names[op]!r} ({graph.op_types[op]}) of group "
        f"{grouping.names[grouping.group_of[op]]!r} {reason}"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """What happened in one step, as the kernel saw it. N ops, M transfers, L changes of memory."""

    step_seconds: float
    peak_bytes: IntArray
    """[D]"""
    op_ready: FloatArray
    """[N] when the last thing it waited for was there."""
    op_start: FloatArray
    op_end: FloatArray
    op_server: IndexArray
    """[N] server it ran on, counted over all devices."""
    op_cause: IntArray
    """[N] what made it ready: op i as i, the transfer for use u as N + u, nothing as -1."""
    op_before: IntArray
    """[N] the op before it on its server, N for the first."""
    issue_start: FloatArray
    """[N] when somebody began to issue it; 0, like the next, where its device does so itself."""
    issue_end: FloatArray
    issue_before: IntArray
    """[N] the op before it in the queue of its executor, N for the first, and where one thread
    issues all ops in their order."""
    transfer_use: IntArray
    """[M] the first use each transfer serves, in the order they were asked for. That of visit v to
    device d has the number E + 1 + v * D + d, where there are E uses."""
    transfer_request: FloatArray
    transfer_start: FloatArray
    transfer_free: FloatArray
    """[M] when the channels are free for the next."""
    transfer_end: FloatArray
    transfer_cause: IntArray
    """[M] what let the weight of a visit start: op i, whose end made room for it, as i; the
    transfer for use u before it as N + u; nothing, with the step, as -1. -1 for all that is no
    visit."""
    hop_start: FloatArray
    """[M, hops] of transfers that are relayed, when each begins to occupy each link of its way; NaN
    where it does not."""
    hop_free: FloatArray
    """[M, hops] when that is free again."""
    change_seconds: FloatArray
    """[L]"""
    change_device: IndexArray
    change_buffer: IndexArray
    change_bytes: IntArray
    """[L] negative where memory is freed."""


class _OfGraph(NamedTuple):
    """The tables that are the same whatever ops cost and wherever they run."""

    flow: Flow
    waits_for: IntArray
    ops: npt.NDArray[Any]
    uses: npt.NDArray[Any]
    use_bytes: FloatArray
    buffers: npt.NDArray[Any]
    own: npt.NDArray[Any]
    released: npt.NDArray[Any]


_known: weakref.WeakKeyDictionary[Graph, _OfGraph] = weakref.WeakKeyDictionary()


def _of_graph(problem: Problem) -> _OfGraph:
    """Made once for each graph without homes: fitting costs makes a thousand simulators of one."""
    if problem.visits is not None:
        return _make_of_graph(problem.graph, problem.visits)
    found = _known.get(problem.graph)
    if found is None:
        found = _known[problem.graph] = _make_of_graph(problem.graph, None)
    return found


def _make_of_graph(graph: Graph, visits: Visits | None) -> _OfGraph:
    flow = Flow.of(graph, visits)
    nothing = len(flow.buffer_tensor)
    use_buffer = np.where(flow.use_buffer < 0, nothing, flow.use_buffer).astype(np.int64)

    # Holds as numbers (op, buffer) that sort by op.
    scale = np.int64(nothing + 1)
    inputs = flow.use_op * scale + use_buffer
    inputs = inputs[use_buffer < nothing]
    sized = flow.tensor_buffer >= 0
    made = np.unique(graph.tensor_producer[sized] * scale + flow.tensor_buffer[sized])
    # An op that passes its input on holds it as an input until it ends; no need to do so twice.
    own = made[~np.isin(made, inputs)]
    released = np.sort(np.concatenate([inputs, own]))

    waits_for = np.bincount(flow.use_op, minlength=graph.num_ops)
    edges = np.arange(graph.num_ops + 1)
    ops = np.zeros(graph.num_ops + 1, dtype=OP)
    ops["uses"] = np.searchsorted(flow.use_producer, edges)
    ops["own"] = np.searchsorted(own // scale, edges)
    ops["released"] = np.searchsorted(released // scale, edges)

    uses = np.zeros(len(flow.use_op), dtype=USE)
    uses["op"] = flow.use_op
    uses["first"] = flow.use_first
    uses["buffer"] = use_buffer
    use_bytes = np.append(graph.tensor_bytes, 0)[flow.use_tensor].astype(np.float64)  # 0 for -1

    buffers = np.zeros(nothing + 1, dtype=BUFFER)
    buffers["home_bytes"][:-1] = flow.home_bytes
    buffers["copy_bytes"][:-1] = flow.copy_bytes
    buffers["op"] = graph.num_ops
    differs = np.flatnonzero(flow.home_bytes != flow.copy_bytes)
    buffers["op"][differs] = flow.buffer_op[differs]
    # No array is written to again: simulators of several threads share them.
    return _OfGraph(
        flow=flow,
        waits_for=waits_for,
        ops=ops,
        uses=uses,
        use_bytes=use_bytes,
        buffers=buffers,
        own=(own % scale).astype(UINT),
        released=(released % scale).astype(UINT),
    )


def _tables(problem: Problem, of_graph: _OfGraph) -> Tables:
    graph, cluster = problem.graph, problem.cluster
    waits_for = of_graph.waits_for
    slots = [device.kind.slots for device in cluster.devices]
    owners = np.flatnonzero(graph.resident_bytes)
    # All copies: numba would compile the kernel again for arrays that are read-only.
    tables = Tables(
        allowed=problem.allowed.copy(),
        group_of=problem.grouping.group_of.astype(UINT),
        seconds=_by_kind(problem, problem.busy_seconds),
        kind_of=cluster.kind_of_device.astype(UINT),
        waits_for=waits_for.astype(UINT),
        ops=of_graph.ops,
        uses=of_graph.uses,
        use_bytes=of_graph.use_bytes,
        buffers=of_graph.buffers,
        own=of_graph.own,
        released=of_graph.released,
        owners=owners.astype(UINT),
        resident_bytes=graph.resident_bytes[owners],
        sources=np.flatnonzero(waits_for == 0).astype(UINT),
        priority=np.arange(graph.num_ops).astype(UINT),
        first_server=np.cumsum([0, *slots]).astype(UINT),
        server_device=np.repeat(np.arange(len(slots)), slots).astype(UINT),
        routes=_padded_routes(problem, first_queue=sum(slots)),
        latency=cluster.routes.latency_seconds.flatten(),
        gap=cluster.routes.gap_seconds.flatten(),
        per_byte=cluster.routes.seconds_per_byte.flatten(),
        overhead=cluster.routes.overhead_seconds.flatten(),
        overhead_per_byte=cluster.routes.overhead_seconds_per_byte.flatten(),
        memory=cluster.pool_bytes.copy(),
        num_queues=sum(slots) + len(cluster.routes.channel_names) + _num_issuers(problem),
        contention=cluster.contention,
    )
    _check_seconds(tables, problem.issue_seconds.max(axis=0).sum(), bool(cluster.shared_chips))
    return tables


def _by_kind(problem: Problem, seconds: FloatArray) -> FloatArray:
    """[N * kinds] from [D, N], which is equal for all devices of a kind."""
    kind_of = problem.cluster.kind_of_device
    first = [int(np.flatnonzero(kind_of == k)[0]) for k in range(len(problem.cluster.kinds))]
    return np.asarray(seconds[first].T.flatten(), dtype=np.float64)


def _num_issuers(problem: Problem) -> int:
    if not problem.issue_seconds.any():
        return 0
    return 1 if problem.issue == "host" else int(problem.issued_apart.sum())


def _issuing(problem: Problem) -> Issuing | None:
    """None where nothing is issued apart, so that no time is lost on it."""
    if not _num_issuers(problem):
        return None
    cluster = problem.cluster
    first = sum(device.kind.slots for device in cluster.devices)
    first += len(cluster.routes.channel_names)
    host = problem.issue == "host"
    apart = problem.issued_apart.copy()
    if host:
        # What runs on the processors runs on the thread that issues it.
        apart = np.array([device.type != "cpu" for device in cluster.devices])
    queue = np.zeros(len(apart), dtype=np.int64) if host else np.cumsum(apart) - apart
    return Issuing(
        host=host,
        seconds=_by_kind(problem, problem.issue_seconds),
        apart=apart,
        queue=(first + np.where(apart, queue, 0)).astype(UINT),
    )


def _chips(problem: Problem) -> Chips | None:
    """None where no two devices share a chip, no link relays and no device keeps to the program's
    order, so that no time is lost on it. Where weights travel there is always one: the kernel is
    compiled for that once, and not twice."""
    cluster, routes = problem.cluster, problem.cluster.routes
    count = len(cluster.shared_chips)
    special = count or routes.relayed.any() or cluster.in_order
    if not special and not problem.visits:
        return None
    slots = [device.kind.slots for device in cluster.devices]
    chip_of_server = np.repeat(cluster.chip_of_device, slots)
    members = [np.flatnonzero(chip_of_server == chip) for chip in range(count)]
    offsets = routes.offsets
    hops = max(1, int(np.diff(offsets).max()))
    padded = np.zeros((3, len(offsets) - 1, hops))
    for route in np.flatnonzero(routes.relayed.ravel()):
        part = slice(offsets[route], offsets[route + 1])
        for row, values in zip(
            padded,
            (routes.hop_latency_seconds, routes.hop_gap_seconds, routes.hop_seconds_per_byte),
            strict=True,
        ):
            row[route, : offsets[route + 1] - offsets[route]] = values[part]
    return Chips(
        pool=cluster.pool_of_device.astype(UINT),
        chip=np.where(chip_of_server < 0, count, chip_of_server).astype(UINT),
        first=np.cumsum([0, *(len(servers) for servers in members)]).astype(UINT),
        servers=np.concatenate([*members, np.zeros(0, dtype=np.int64)]).astype(UINT),
        demand=np.array(problem.costs.demand.T, dtype=np.float64, order="C"),
        hop_count=np.where(routes.relayed.ravel(), np.diff(offsets), 0).astype(UINT),
        hop_latency=padded[0].ravel(),
        hop_gap=padded[1].ravel(),
        hop_per_byte=padded[2].ravel(),
        relay=routes.relay.astype(UINT).ravel(),
        in_order=cluster.in_order,
    )


def _streams(problem: Problem, flow: Flow) -> Streams | None:
    """None where no weight can be elsewhere than who reads it."""
    visits = problem.visits
    if visits is None or not len(visits):
        return None
    assert problem.homes is not None
    # Reads of each op, by visit.
    number = np.repeat(np.arange(len(visits)), np.diff(visits.offsets))
    by_op = np.argsort(visits.reader, kind="stable")
    edges = np.arange(problem.graph.num_ops + 1)
    return Streams(
        window=problem.homes.window_bytes,
        owner=visits.owner.astype(UINT),
        bytes=visits.bytes.copy(),
        first=visits.first.astype(UINT),
        offsets=visits.offsets.astype(UINT),
        reader=visits.reader.astype(UINT),
        read_offsets=np.searchsorted(visits.reader[by_op], edges).astype(UINT),
        read_visit=number[by_op].astype(UINT),
        of_use=np.where(flow.use_visit < 0, len(visits), flow.use_visit).astype(UINT),
        first_buffer=len(flow.buffer_tensor) - len(visits),
        left=np.zeros(0, dtype=np.int64),
        next=np.zeros(0, dtype=np.int64),
        on_the_way=np.zeros(0, dtype=np.bool_),
        used=np.zeros(0, dtype=np.int64),
        used_by_same=np.zeros(0, dtype=np.int64),
        same=np.zeros(0, dtype=np.int64),
    ).sized(problem.num_devices)


def _padded_routes(problem: Problem, first_queue: int) -> npt.NDArray[np.uint32]:
    offsets, channels = problem.cluster.routes.offsets, problem.cluster.routes.channels
    hops = max(1, int(np.diff(offsets).max()))
    routes = np.zeros((len(offsets) - 1, hops), dtype=UINT)
    for route in np.flatnonzero(np.diff(offsets)):
        part = channels[offsets[route] : offsets[route + 1]]
        routes[route] = part[0]
        routes[route, : len(part)] = part
    return (routes + first_queue).astype(UINT).ravel()


def _check_seconds(tables: Tables, issuing: float, shared: bool) -> None:
    """The kernel takes an infinite time for an empty queue, so no sum of times may come near."""
    devices = len(tables.memory)
    seconds = tables.seconds.reshape(len(tables.group_of), -1)
    with np.errstate(over="ignore", invalid="ignore"):  # what is infinite times nothing
        longest = np.where(np.isfinite(seconds), seconds, 0).max(axis=1).sum()
        longest += issuing
        transfers = devices * len(tables.uses)
        longest += transfers * (tables.latency.max() + 2 * tables.overhead.max())
        longest += (
            devices
            * tables.use_bytes.sum()
            * (tables.per_byte.max() + 2 * tables.overhead_per_byte.max())
        )
        longest *= (1 + tables.contention * devices) * (devices if shared else 1)
    if not longest <= MOST_SECONDS:
        raise CostsError(
            f"ops and transfers together take {longest:.3g} s; are the speeds of devices and links "
            "in the right unit?"
        )
