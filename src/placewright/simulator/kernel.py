"""The event loop, compiled by numba, and the tables it works on.

It needs no priority queue: ops end on a server in the order they were given to it, transfers
arrive on a channel in the order they were asked for, and ops are issued in the order they were
given to an executor, so the next event is always the least of the queues' heads. Ties go to the
lower queue; servers come before channels, and those before executors.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray
from placewright.simulator.compiling import compiled, compiled_part

LARGEST = 3
"""How many of the largest live tensors are named when a device runs out of memory."""

# numba's arithmetic differs from NumPy's and from Python's, so the type checker would be wrong
# about the kernel; these say what the arrays are. Indices are unsigned because numba then leaves
# out the code for negative ones, which takes a fifth of the time.
Records: TypeAlias = Any
"""A structured array: what is used together lies in one cache line."""
Uints: TypeAlias = Any
Ints: TypeAlias = Any
Floats: TypeAlias = Any

UINT = np.uint32

OP = np.dtype([("uses", UINT), ("own", UINT), ("released", UINT)], align=True)
"""Where the op's part of `uses`, `own` and `released` begins and that of the op before ends."""
USE = np.dtype([("op", UINT), ("first", UINT), ("buffer", UINT), ("same_way", UINT)], align=True)
"""An op that waits, the first use of the thing it waits for, and where that lies. `same_way` is
working memory: the next use that the same transfer serves, E after the last."""
BUFFER = np.dtype([("home_bytes", np.int64), ("copy_bytes", np.int64), ("op", UINT)], align=True)
"""`op` decides where home is, and is N where both sizes are equal."""
STATE = np.dtype([("device", UINT), ("waits_for", UINT)], align=True)
ENTRY = np.dtype(
    [("end", np.float64), ("next", UINT), ("item", UINT), ("buffer", UINT), ("device", UINT)],
    align=True,
)
"""What stands in a queue: when it ends, the entry behind it, and the op, or for a transfer the
first use it serves, the buffer it moves and the device it comes from."""


class Tables(NamedTuple):
    """N ops, E uses, B buffers, D devices, S servers, Q queues: of servers, of channels, and of
    those who issue ops.

    Large graphs do not fit the processor's caches, so these are as small as they can be.
    """

    allowed: BoolArray
    """[G, D]"""
    group_of: Uints
    """[N]"""
    seconds: Floats
    """[N * kinds] of each op on each kind of device."""
    waits_for: Uints
    """[N] how many uses each op waits for."""
    kind_of: Uints
    """[D]"""
    ops: Records
    """[N + 1] of `OP`."""
    uses: Records
    """[E] of `USE`."""
    use_bytes: Floats
    """[E] what a transfer moves."""
    buffers: Records
    """[B + 1] of `BUFFER`; the last stands for what takes no memory, so that the kernel need not
    ask."""
    own: Uints
    """Buffers that ops hold from their start."""
    released: Uints
    """Buffers that ops let go of at their end, once per hold."""
    owners: Uints
    """Ops with memory that stays for the whole step."""
    resident_bytes: Ints
    """Of each of these."""
    sources: Uints
    """Ops that wait for nothing, by priority."""
    priority: Uints
    """[N] who goes first of ops that become ready at the same moment: who has the least."""
    first_server: Uints
    """[D + 1]"""
    server_device: Uints
    """[S]"""
    routes: Uints
    """[D * D * hops] queues of the channels from one device to another. Shorter routes repeat
    their first channel, which changes nothing and makes all equally long."""
    latency: Floats
    """[D * D] seconds"""
    gap: Floats
    """[D * D] seconds of the latency during which the channels are occupied."""
    per_byte: Floats
    """[D * D] seconds"""
    overhead: Floats
    """[D * D] seconds that a transfer takes of a busy processor at either end."""
    overhead_per_byte: Floats
    """[D * D] seconds"""
    memory: Ints
    """[D] bytes"""
    num_queues: int
    contention: float
    """By what share everything takes longer for each device that is busy besides the first."""


class Issuing(NamedTuple):
    """What is known of those who issue ops beside what the devices compute."""

    host: bool
    """Whether one thread issues all ops in the order of their numbers; otherwise each device has an
    executor, which issues what only waits for ops that are issued already."""
    seconds: Floats
    """[N * kinds] of each op on each kind of device."""
    apart: BoolArray
    """[D] whether ops of the device are issued beside what it computes. For `host`, whether the
    thread goes on while they run."""
    queue: Uints
    """[D] where ops of the device wait to be issued."""


class Chips(NamedTuple):
    """What devices share that are streams or partitions of one chip, the links that relay, and
    whether devices keep to the program's order. C chips that several devices are parts of.

    Time on a chip passes as its load allows: all ops that run there at a moment are slowed by the
    same factor. So each chip has a clock of its own, by which its ops take as long as they do
    alone, and in which they end in the order that they would end in anyway.
    """

    pool: Uints
    """[D] the device in whose name memory is counted: the first of those that share it."""
    chip: Uints
    """[S] of each server, C for those of devices that have a chip of their own."""
    first: Uints
    """[C + 1] where the chip's part of `servers` begins and that of the chip before ends."""
    servers: Uints
    demand: Floats
    """[N, kinds] what each op takes of its chip when it runs alone, as a share."""
    hop_count: Uints
    """[D * D] links of a route that relays, 0 for one that does not."""
    hop_latency: Floats
    """[D * D * hops] seconds"""
    hop_gap: Floats
    """[D * D * hops] seconds"""
    hop_per_byte: Floats
    """[D * D * hops] seconds"""
    relay: Uints
    """[D * D] number of the memory at the end of the route's first link."""
    in_order: bool
    """Whether each device starts its ops in the order of their numbers."""


class Streams(NamedTuple):
    """How weights travel from their homes: V visits with R reads. For each device one weight at a
    time is on the way, in the order of visits, as long as the window has room."""

    window: int
    """Bytes that are on the way or there and still needed, on one device; or those of the weights
    that a single op reads first."""
    owner: Uints
    """[V] the op whose device is the home."""
    bytes: Ints
    """[V]"""
    first: Uints
    """[V] the first op that reads it, on whatever device."""
    offsets: Uints
    """[V + 1] readers of each visit."""
    reader: Uints
    """[R]"""
    read_offsets: Uints
    """[N + 1] visits that each op reads."""
    read_visit: Uints
    """[R]"""
    of_use: Uints
    """[E] the visit that serves a use, V for what is no weight."""
    first_buffer: int
    """The buffer of visit 0."""
    left: Ints
    """[V * D] working memory: reads to come of each visit on each device but the home. All 0 after
    a placement."""
    next: Ints
    """[D] working memory: the visit to come next, of those from here on."""
    on_the_way: BoolArray
    """[D] working memory: whether a weight is."""
    used: Ints
    """[D] working memory: bytes of the window."""
    used_by_same: Ints
    """[D] working memory: those of visits with the same first reader as the latest."""
    same: Ints
    """[D] working memory: that reader."""

    def sized(self, devices: int) -> Streams:
        """With working memory."""
        return self._replace(
            left=np.zeros(len(self.bytes) * devices, dtype=np.int64),
            next=np.zeros(devices, dtype=np.int64),
            on_the_way=np.zeros(devices, dtype=np.bool_),
            used=np.zeros(devices, dtype=np.int64),
            used_by_same=np.zeros(devices, dtype=np.int64),
            same=np.zeros(devices, dtype=np.int64),
        )

    def anew(self) -> Streams:
        """For another thread."""
        return self.sized(len(self.next))


class Scratch(NamedTuple):
    """Working memory for one placement at a time."""

    state: Records
    """[N + 1] of `STATE`."""
    uses: Records
    """[E] as in the tables."""
    holders: Ints
    """[(B + 1) * D] how many hold each buffer on each device; all 0 after a placement."""
    used: Ints
    """[D] bytes"""
    peak: Ints
    """[D] bytes"""
    limit: Ints
    """[D] bytes; without limit once a device has run out."""
    free_at: Floats
    """[Q] when the last in each queue ends. Here and below, one that stays empty makes Q even."""
    head_end: Floats
    """[Q] when the first in each queue ends; infinite for an empty queue."""
    late: Floats
    """[Q] seconds by which transfers have held up each queue. The end of an entry is less this as
    it was when the entry joined the queue, and plus this as it is when it becomes the first."""
    head: Uints
    """[Q] the first entry of each queue."""
    tail: Uints
    """[Q] the last."""
    entries: Records
    """[N + E + 1] of `ENTRY`. Those that are free form a stack, so that the few that a step needs
    at a time stay in the cache; the last is for writes that shall have no effect."""
    free: Uints
    """[1] the top of that stack."""
    latest_use: Uints
    """[D] the last use that made or joined a transfer to each device."""
    latest_first: Uints
    """[D] the first use of the thing that was last sent to each device."""
    ready: Uints
    """[N + 1] ops that the current event made ready."""
    due: Floats
    """[Q] when the first op in the queue of a server on a shared chip ends, by the chip's clock.
    So do `free_at` and `late` of these servers, and the entries in their queues."""
    clock: Floats
    """[D] what the clock of each chip showed when it was last set, of which there are at most as
    many as devices."""
    since: Floats
    """[D] when that was."""
    slow: Floats
    """[D] how much longer everything takes on the chip since then."""
    stale: BoolArray
    """[D] whether ops have begun or ended on the chip, so that its clock must be set anew."""
    follower: Uints
    """[N] the next op on the same device, N for the last; used where devices keep to an order."""
    stored_first: Uints
    """[memories] the first use of the thing last sent to each memory on a way that relays."""
    stored_at: Floats
    """[memories] when that is there."""

    @staticmethod
    def of(tables: Tables, memories: int, streams: Streams | None = None) -> Scratch:
        ops, uses, devices = len(tables.group_of), len(tables.uses), len(tables.memory)
        queues = tables.num_queues + tables.num_queues % 2
        on_the_way = 0 if streams is None else devices
        entries = np.zeros(ops + uses + on_the_way + 1, dtype=ENTRY)
        entries["next"] = np.arange(1, len(entries) + 1)
        return Scratch(
            state=np.zeros(ops + 1, dtype=STATE),
            uses=tables.uses.copy(),
            holders=np.zeros(len(tables.buffers) * devices, dtype=np.int32),
            used=np.zeros(devices, dtype=np.int64),
            peak=np.zeros(devices, dtype=np.int64),
            limit=np.zeros(devices, dtype=np.int64),
            free_at=np.zeros(queues),
            head_end=np.zeros(queues),
            late=np.zeros(queues),
            head=np.zeros(queues, dtype=UINT),
            tail=np.zeros(queues, dtype=UINT),
            entries=entries,
            free=np.zeros(1, dtype=UINT),
            latest_use=np.zeros(devices, dtype=UINT),
            latest_first=np.zeros(devices, dtype=UINT),
            ready=np.zeros(ops + 1, dtype=UINT),
            due=np.zeros(queues),
            clock=np.zeros(devices),
            since=np.zeros(devices),
            slow=np.ones(devices),
            stale=np.zeros(devices, dtype=np.bool_),
            follower=np.zeros(ops, dtype=UINT),
            stored_first=np.zeros(memories, dtype=UINT),
            stored_at=np.zeros(memories),
        )


class Results(NamedTuple):
    """As in `Simulation`, but with numbers of buffers."""

    step_seconds: FloatArray
    peak_bytes: IntArray
    overflow_device: IndexArray
    overflow_buffers: IndexArray
    overflow_bytes: IntArray

    @staticmethod
    def of(placements: int, devices: int) -> Results:
        return Results(
            step_seconds=np.full(placements, np.inf),
            peak_bytes=np.zeros((placements, devices), dtype=np.int64),
            overflow_device=np.full(placements, -1, dtype=np.int32),
            overflow_buffers=np.full((placements, LARGEST), -1, dtype=np.int32),
            overflow_bytes=np.zeros((placements, LARGEST), dtype=np.int64),
        )


class Log(NamedTuple):
    """As in `Recording`, but transfers by use."""

    op_ready: FloatArray
    op_start: FloatArray
    op_end: FloatArray
    op_server: IndexArray
    op_cause: IntArray
    op_before: IntArray
    issue_start: FloatArray
    issue_end: FloatArray
    issue_before: IntArray
    sent: Uints
    use_request: FloatArray
    use_start: FloatArray
    use_free: FloatArray
    use_end: FloatArray
    use_cause: IntArray
    hop_start: FloatArray
    """[uses * hops] when a transfer that is relayed begins to occupy each link; NaN where it does
    not, as the tensor was there already."""
    hop_free: FloatArray
    """[uses * hops] when the link is free again."""
    change_seconds: FloatArray
    change_device: IndexArray
    change_buffer: IndexArray
    change_bytes: IntArray
    counts: IntArray
    """Transfers in `sent`, changes of memory."""
    latest_op: IntArray
    """[S] the last op given to each server, N for none."""
    latest_issue: IntArray
    """[D] the last op given to each executor, N for none."""

    @staticmethod
    def of(tables: Tables, streams: Streams | None = None) -> Log:
        ops, uses = len(tables.group_of), len(tables.uses)
        changes = 2 * (len(tables.own) + uses)  # whatever can allocate, and as many frees
        if streams is not None:
            uses += 1 + len(streams.left)
        hops = len(tables.routes) // len(tables.latency)
        return Log(
            op_ready=np.zeros(ops),
            op_start=np.zeros(ops),
            op_end=np.zeros(ops),
            op_server=np.zeros(ops, dtype=np.int32),
            op_cause=np.zeros(ops, dtype=np.int64),
            op_before=np.zeros(ops, dtype=np.int64),
            issue_start=np.zeros(ops),
            issue_end=np.zeros(ops),
            issue_before=np.full(ops, ops, dtype=np.int64),
            sent=np.zeros(uses, dtype=UINT),
            use_request=np.zeros(uses),
            use_start=np.zeros(uses),
            use_free=np.zeros(uses),
            use_end=np.zeros(uses),
            use_cause=np.full(uses, -1, dtype=np.int64),
            hop_start=np.full(uses * hops, np.nan),
            hop_free=np.full(uses * hops, np.nan),
            change_seconds=np.zeros(changes),
            change_device=np.zeros(changes, dtype=np.int32),
            change_buffer=np.zeros(changes, dtype=np.int32),
            change_bytes=np.zeros(changes, dtype=np.int64),
            counts=np.zeros(2, dtype=np.int64),
            latest_op=np.full(len(tables.server_device), ops, dtype=np.int64),
            latest_issue=np.full(len(tables.memory), ops, dtype=np.int64),
        )


# --- the kernel -----------------------------------------------------------------------------------


def _prefetching(context: Any, array: Any, index: Any) -> Any:
    """Asks for an item of an array to be brought into the cache; it need not exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args
        data = context.make_array(array_type)(context, builder, arguments[0]).data
        position = context.cast(builder, arguments[1], index_type, types.uint64)
        item = builder.gep(data, [position])
        byte = ir.IntType(8).as_pointer()
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # For reading, to be kept in all caches, data and not instructions.
        builder.call(function, [builder.bitcast(item, byte), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


def _taking(context: Any, counter: Any) -> Any:
    """Counts up, and gives the number as it was before; no two threads get the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate


_prefetch: Any = intrinsic(_prefetching)
_take: Any = intrinsic(_taking)

_NO_LIMIT = np.int64(2**63 - 1)
_AHEAD = UINT(1024)
"""How far ahead of an op that ends others are fetched, in ops: the best of 64 to 1,024 by trial."""
_INFINITY_BITS = np.array([np.inf]).view(np.int64)[0]


class _Memory(NamedTuple):
    """The arrays that memory is counted in."""

    buffers: Records
    state: Records
    holders: Ints
    used: Ints
    peak: Ints
    limit: Ints


@compiled
def simulate(
    tables: Tables,
    scratch: Scratch,
    placements: IndexArray,
    next_row: Ints,
    results: Results,
    log: Log | None,
    working: Ints | None,
    issuing: Issuing | None,
    chips: Chips | None,
    streams: Streams | None,
) -> None:
    """Simulates rows of `placements` and fills in the same rows of `results`, until `next_row`, a
    single number that several threads may share, is beyond the last.

    `working` has room for how many servers of each device are busy, all 0; None where there is no
    contention. numba compiles this anew for what is None: without a log, and with one for
    timelines; without contention, where counting would take a twentieth of the time, and with it;
    without `issuing`, where nothing is issued apart from computing; without `chips`, where no two
    devices share one, no link relays and no device keeps to the program's order; without `streams`,
    where no weight has a home of its own.
    """
    allowed = tables.allowed
    ops, uses, use_bytes = tables.ops, scratch.uses, tables.use_bytes
    seconds, kind_of, group_of = tables.seconds, tables.kind_of, tables.group_of
    own, released, sources = tables.own, tables.released, tables.sources
    priority = tables.priority
    first_server, server_device = tables.first_server, tables.server_device
    routes, latency, per_byte = tables.routes, tables.latency, tables.per_byte
    gap = tables.gap
    state, holders, limit = scratch.state, scratch.holders, scratch.limit
    overhead, overhead_per_byte = tables.overhead, tables.overhead_per_byte
    free_at, head_end, head, tail = scratch.free_at, scratch.head_end, scratch.head, scratch.tail
    late = scratch.late
    entries, ready = scratch.entries, scratch.ready
    latest_use, latest_first = scratch.latest_use, scratch.latest_first
    peak_bytes, peak = results.peak_bytes, scratch.peak
    overflow_buffers, overflow_bytes = results.overflow_buffers, results.overflow_bytes
    buffers = tables.buffers
    memory = _Memory(buffers, state, holders, scratch.used, peak, limit)
    # Times are never negative, so they compare like their bits, and integers compare faster.
    head_bits = head_end.view(np.int64)

    num_ops = UINT(group_of.size)
    num_uses = UINT(uses.size)
    num_devices = UINT(limit.size)
    num_servers = UINT(server_device.size)
    num_queues = UINT(head_end.size)
    num_kinds = UINT(seconds.size // group_of.size)
    hops = UINT(routes.size // latency.size)
    no_entry = UINT(entries.size - 1)
    free = scratch.free[0]
    contention = tables.contention
    due, clock, since, slow = scratch.due, scratch.clock, scratch.since, scratch.slow
    stale, follower = scratch.stale, scratch.follower
    stored_first, stored_at = scratch.stored_first, scratch.stored_at
    # Only ops below this are issued; where no thread issues them in order, that is all.
    next_issue: Any = num_ops
    dispatched: Any = num_ops
    blocking: Any = num_ops

    while True:
        row = _take(next_row)
        if row >= placements.shape[0]:
            break
        runs = True
        for group in range(allowed.shape[0]):
            runs &= allowed[group, UINT(placements[row, group])]
        if not runs:
            continue
        for op in range(num_ops):
            state[op].device = placements[row, group_of[op]]
            state[op].waits_for = tables.waits_for[op]
        overflow = _reset_memory(tables, memory, chips)
        if streams is not None:
            _reset_streams(streams, state, num_devices, chips)
        # Loops and not slices here and below: slices would double the time to compile.
        for i in range(num_devices):
            latest_first[i] = num_uses
        for i in range(num_queues):
            free_at[i] = 0.0
            head_end[i] = np.inf
            late[i] = 0.0
        if chips is not None:
            for i in range(num_devices):
                clock[i] = 0.0
                since[i] = 0.0
                slow[i] = 1.0
                stale[i] = False
            for i in range(stored_first.size):
                stored_first[i] = num_uses
            if chips.in_order:
                _put_in_order(tables, state, follower, latest_use)
        now = 0.0
        dispatched = num_ops
        # All that happens while several devices are busy takes longer by the same share, so what
        # comes after what does not depend on it: it is enough to sum up these times.
        busy = 0
        shared = 0.0
        packing = 0.0
        packer = UINT(0)
        cause = np.int64(-1)
        if streams is not None:
            # A weight is at home from the start.
            for i in range(num_devices):
                more, free = _send_next(
                    streams, UINT(i), tables, scratch, memory, now, cause, free, log, chips
                )
                overflow |= more
        num_ready = UINT(sources.size)
        for i in range(num_ready):
            ready[i] = sources[i]
        if chips is not None:
            num_ready = UINT(0)
            for i in range(sources.size):
                ready[num_ready] = sources[i]
                num_ready = UINT(num_ready + (state[sources[i]].waits_for == 0))
        if issuing is not None and issuing.host:
            num_ready = UINT(0)
            next_issue = UINT(0)
            head_end[issuing.queue[0]] = issuing.seconds[kind_of[state[0].device]]

        while True:
            # Each ready op goes to the server of its device that is free first.
            given = UINT(0)
            while given < num_ready:
                op = ready[given]
                given = UINT(given + 1)
                device = state[op].device
                if (
                    issuing is not None
                    and not issuing.host
                    and issuing.apart[device]
                    and op != dispatched
                ):
                    # To the device's executor first, behind what that has to issue already.
                    executor = issuing.queue[device]
                    start = max(now, free_at[executor])
                    end = start + issuing.seconds[op * num_kinds + kind_of[device]]
                    free_at[executor] = end
                    if log is not None:
                        log.op_ready[op] = now
                        log.op_cause[op] = cause
                        log.issue_start[op] = start
                        log.issue_end[op] = end
                        log.issue_before[op] = log.latest_issue[device]
                        log.latest_issue[device] = op
                    entry = free
                    free = entries[entry].next
                    entries[entry].end = end
                    entries[entry].item = op
                    idle = head_end[executor] == np.inf
                    entries[no_entry if idle else tail[executor]].next = entry
                    tail[executor] = entry
                    if idle:
                        head[executor] = entry
                        head_end[executor] = end
                    continue
                server = first_server[device]
                for other in range(server + 1, first_server[device + 1]):
                    if free_at[other] < free_at[server]:
                        server = UINT(other)
                begin = now
                if chips is not None and chips.chip[server] < chips.first.size - 1:
                    begin = _by_clock(chips.chip[server], now, clock, since, slow)
                start = max(begin, free_at[server])
                end = start + seconds[op * num_kinds + kind_of[device]]
                if log is not None:
                    if issuing is None or (not issuing.host and not issuing.apart[device]):
                        log.op_ready[op] = now
                        log.op_cause[op] = cause
                    log.op_start[op] = start
                    log.op_end[op] = end
                    log.op_server[op] = server
                    log.op_before[op] = log.latest_op[server]
                    log.latest_op[server] = op
                free_at[server] = end
                entry = free
                free = entries[entry].next
                entries[entry].end = end - late[server]
                entries[entry].item = op
                idle = head_end[server] == np.inf
                entries[no_entry if idle else tail[server]].next = entry
                tail[server] = entry
                if idle:
                    if working is not None:
                        working[device] += 1
                        busy += working[device] == 1
                    head[server] = entry
                    head_end[server] = end
                    if chips is not None and chips.chip[server] < chips.first.size - 1:
                        due[server] = end
                        stale[chips.chip[server]] = True
                        if log is not None:
                            log.op_start[op] = now
                    for j in range(ops[op].own, ops[op + 1].own):
                        overflow |= _hold(memory, own[j], device, num_devices, now, log, chips)
                if chips is not None and chips.in_order and follower[op] < num_ops:
                    user = follower[op]
                    waits_for = state[user].waits_for - 1
                    state[user].waits_for = waits_for
                    if waits_for == 0 and user < next_issue:
                        ready[num_ready] = user
                        num_ready = UINT(num_ready + 1)
                        if log is not None and issuing is not None and issuing.host:
                            log.op_ready[user] = now
                            log.op_cause[user] = cause
                # For when it ends.
                _prefetch(uses, ops[op].uses)
                _prefetch(use_bytes, ops[op].uses)
                _prefetch(released, ops[op].released)

            # Ops that the event made ready compete with the sending of what it made.
            if packing > 0.0:
                _hold_up(packer, packing, first_server, free_at, head_end, late, chips, due, stale)
                packing = 0.0

            # All that an event frees on a device is freed before it allocates anything there, so
            # looking after the event misses nothing.
            if overflow:
                device = _over_limit(memory)
                results.overflow_device[row] = device
                _find_largest(memory, device, overflow_buffers[row], overflow_bytes[row], chips)
                for i in range(num_devices):
                    limit[i] = _NO_LIMIT
                overflow = False

            if chips is not None:
                for chip in range(chips.first.size - 1):
                    if stale[chip]:
                        stale[chip] = False
                        clock[chip] = _by_clock(chip, now, clock, since, slow)
                        since[chip] = now
                        slow[chip] = _shared(
                            chip, now, clock[chip], chips, due, head, head_end, entries, state,
                            kind_of,
                        )  # fmt: skip

            # In pairs, as the processor can compare those side by side.
            queue = UINT(0)
            least = _INFINITY_BITS
            for i in range(0, num_queues, 2):
                less = head_bits[i + 1] < head_bits[i]
                bits = head_bits[i + 1] if less else head_bits[i]
                earlier = UINT(i + 1) if less else UINT(i)
                less = bits < least
                least = bits if less else least
                queue = earlier if less else queue
            if least == _INFINITY_BITS:
                break
            before_it = now
            now = head_end[queue]
            if working is not None:
                shared += (now - before_it) * max(busy - 1, 0)
            num_ready = UINT(0)
            if issuing is not None and issuing.host and queue == issuing.queue[0]:
                # The thread has issued an op, and goes on to the next.
                op = next_issue
                next_issue = UINT(op + 1)
                if log is not None:
                    log.issue_end[op] = now
                if state[op].waits_for == 0:
                    ready[0] = op
                    num_ready = UINT(1)
                    if log is not None and tables.waits_for[op] == 0:
                        log.op_cause[op] = -1
                head_end[queue] = np.inf
                if not issuing.apart[state[op].device]:
                    blocking = op
                elif next_issue < num_ops:
                    step = issuing.seconds[
                        next_issue * num_kinds + kind_of[state[next_issue].device]
                    ]
                    head_end[queue] = now + step
                    if log is not None:
                        log.issue_start[next_issue] = now
                continue
            entry = head[queue]
            item = entries[entry].item
            following = entries[entry].next
            last = entry == tail[queue]
            head[queue] = following
            head_end[queue] = np.inf if last else entries[following].end + late[queue]
            if chips is not None and queue < num_servers:
                chip = chips.chip[queue]
                if chip < chips.first.size - 1:
                    due[queue] = head_end[queue]
                    stale[chip] = True

            dispatched = num_ops
            if issuing is not None and not issuing.host and queue >= issuing.queue[0]:
                # An op is issued: its device can have it, and so can the executor what waits only
                # for ops that come before on the same device.
                op = item
                entries[entry].next = free
                free = entry
                device = state[op].device
                dispatched = op
                cause = np.int64(op)
                ready[0] = op
                num_ready = UINT(1)
                for use in range(ops[op].uses, ops[op + 1].uses):
                    user = uses[use].op
                    if state[user].device == device:
                        waits_for = state[user].waits_for - 1
                        state[user].waits_for = waits_for
                        ready[num_ready] = user
                        num_ready = UINT(num_ready + (waits_for == 0))
                for i in range(2, num_ready):
                    op = ready[i]
                    j = i
                    while j > 1 and priority[ready[j - 1]] > priority[op]:
                        ready[j] = ready[j - 1]
                        j -= 1
                    ready[j] = op
            elif queue < num_servers:  # an op ends
                op = item
                if log is not None:
                    # Known only now, where transfers have held it up.
                    log.op_end[op] = now
                    if not last:
                        log.op_start[entries[following].item] = now
                entries[entry].next = free
                free = entry
                device = server_device[queue]
                if issuing is not None and op == blocking:
                    blocking = num_ops
                    if next_issue < num_ops:
                        step = issuing.seconds[
                            next_issue * num_kinds + kind_of[state[next_issue].device]
                        ]
                        head_end[issuing.queue[0]] = now + step
                        if log is not None:
                            log.issue_start[next_issue] = now
                if working is not None:
                    working[device] -= last
                    busy -= last and working[device] == 0
                # Ops come up in about the order of their numbers, but not near enough for the
                # processor to see it. Waiting for memory took a quarter of the time of large
                # graphs. An op's state is needed first, by those whose outputs it takes.
                _prefetch(state, op + 4 * _AHEAD)
                _prefetch(ops, op + 2 * _AHEAD)
                _prefetch(seconds, (op + 2 * _AHEAD) * num_kinds)
                # Buffers are numbered by who makes them, so that `own` mostly counts up.
                near = ops[min(op + _AHEAD, num_ops)].own
                _prefetch(own, near)
                _prefetch(buffers, near)
                _prefetch(holders, near * num_devices)
                cause = np.int64(op)
                for use in range(ops[op].uses, ops[op + 1].uses):
                    user = uses[use].op
                    first = uses[use].first
                    buffer = uses[use].buffer
                    target = state[user].device
                    here = target == device
                    if streams is not None and not here:
                        # A weight is there for all that have its memory, and comes to others when
                        # it is its turn.
                        weight = streams.of_use[use] < streams.bytes.size
                        here = weight and _pool(chips, target) == _pool(chips, device)
                        if weight and not here:
                            continue
                    if here:
                        holders[buffer * num_devices + _pool(chips, device)] += 1
                        ahead = issuing is not None and not issuing.host and target == device
                        if issuing is not None and ahead and issuing.apart[device]:
                            continue  # it could be issued as soon as this op was
                        waits_for = state[user].waits_for - 1
                        state[user].waits_for = waits_for
                        ready[num_ready] = user
                        if issuing is None:
                            num_ready = UINT(num_ready + (waits_for == 0))
                        else:
                            num_ready = UINT(num_ready + (waits_for == 0 and user < next_issue))
                            if log is not None and issuing.host and waits_for == 0:
                                log.op_ready[user] = now
                                log.op_cause[user] = cause
                        continue
                    uses[use].same_way = num_uses
                    before = latest_use[target]
                    latest_use[target] = use
                    if latest_first[target] == first:  # it is already on its way there
                        uses[before].same_way = use
                        holders[buffer * num_devices + _pool(chips, target)] += 1
                        continue
                    latest_first[target] = first
                    route = device * num_devices + target
                    start = now
                    channel = routes[route * hops]
                    if chips is not None and chips.hop_count[route] > 0:
                        # One copy after another, the first of them once for all who are beyond;
                        # it arrives in the order of the last.
                        memory_there = chips.relay[route]
                        known = stored_first[memory_there] == first
                        end = stored_at[memory_there] if known else now
                        if not known or chips.hop_count[route] > 1:
                            start = max(end, free_at[routes[route * hops + UINT(known)]])
                        for j in range(UINT(known), chips.hop_count[route]):
                            hop = route * hops + UINT(j)
                            channel = routes[hop]
                            moving = use_bytes[use] * chips.hop_per_byte[hop]
                            begin = max(end, free_at[channel])
                            free_at[channel] = begin + chips.hop_gap[hop] + moving
                            end = begin + chips.hop_latency[hop] + moving
                            if log is not None:
                                log.hop_start[use * hops + j] = begin
                                log.hop_free[use * hops + j] = free_at[channel]
                            if j == 0:
                                stored_first[memory_there] = first
                                stored_at[memory_there] = end
                        freed = free_at[channel]
                    else:
                        for j in range(hops):
                            start = max(start, free_at[routes[route * hops + j]])
                        moving = use_bytes[use] * per_byte[route]
                        end = start + latency[route] + moving
                        freed = start + gap[route] + moving
                        for j in range(hops):
                            free_at[routes[route * hops + j]] = freed
                    packer = device
                    packing += overhead[route] + use_bytes[use] * overhead_per_byte[route]
                    idle = head_end[channel] == np.inf
                    # A channel hands over what it carries in the order it was given, whatever
                    # the latency of the rest of the way.
                    if not idle:
                        end = max(end, entries[tail[channel]].end)
                    if log is not None:
                        log.sent[log.counts[0]] = use
                        log.counts[0] += 1
                        log.use_request[use] = now
                        log.use_start[use] = start
                        log.use_free[use] = freed
                        log.use_end[use] = end
                    entry = free
                    free = entries[entry].next
                    entries[entry].end = end
                    entries[entry].item = use
                    entries[entry].buffer = buffer
                    entries[entry].device = device
                    entries[no_entry if idle else tail[channel]].next = entry
                    tail[channel] = entry
                    head[channel] = entry if idle else head[channel]
                    head_end[channel] = min(end, head_end[channel])
                    holders[buffer * num_devices + _pool(chips, device)] += 1  # until it arrives
                    overflow |= _hold(memory, buffer, target, num_devices, now, log, chips)
                for j in range(ops[op].released, ops[op + 1].released):
                    _release(memory, released[j], device, num_devices, now, log, chips)
                if streams is not None and _let_go(streams, op, device, state, num_devices, chips):
                    more, free = _send_next(
                        streams, UINT(_pool(chips, device)), tables, scratch, memory, now, cause,
                        free, log, chips,
                    )  # fmt: skip
                    overflow |= more
                if not last:
                    op = entries[following].item
                    for j in range(ops[op].own, ops[op + 1].own):
                        overflow |= _hold(memory, own[j], device, num_devices, now, log, chips)
                for i in range(1, num_ready):  # by insertion: there is mostly one, or none
                    op = ready[i]
                    j = i
                    while j > 0 and priority[ready[j - 1]] > priority[op]:
                        ready[j] = ready[j - 1]
                        j -= 1
                    ready[j] = op
            else:  # a transfer arrives
                cause = np.int64(num_ops) + item
                buffer, device = entries[entry].buffer, entries[entry].device
                entries[entry].next = free
                free = entry
                if streams is not None and item > num_uses:
                    # A weight that has come from its home.
                    visit = UINT((item - num_uses - UINT(1)) // num_devices)
                    target = UINT((item - num_uses - UINT(1)) % num_devices)
                    for i in range(streams.offsets[visit], streams.offsets[visit + UINT(1)]):
                        user = streams.reader[i]
                        if _pool(chips, state[user].device) == target:
                            waits_for = state[user].waits_for - 1
                            state[user].waits_for = waits_for
                            ready[num_ready] = user
                            if issuing is None:
                                num_ready = UINT(num_ready + (waits_for == 0))
                            else:
                                num_ready = UINT(num_ready + (waits_for == 0 and user < next_issue))
                                if log is not None and issuing.host and waits_for == 0:
                                    log.op_ready[user] = now
                                    log.op_cause[user] = cause
                    streams.on_the_way[target] = False
                    more, free = _send_next(
                        streams, target, tables, scratch, memory, now, cause, free, log, chips
                    )
                    overflow |= more
                    served = num_uses
                else:
                    served = item
                while served != num_uses:
                    user = uses[served].op
                    waits_for = state[user].waits_for - 1
                    state[user].waits_for = waits_for
                    ready[num_ready] = user
                    if issuing is None:
                        num_ready = UINT(num_ready + (waits_for == 0))
                    else:
                        num_ready = UINT(num_ready + (waits_for == 0 and user < next_issue))
                        if log is not None and issuing.host and waits_for == 0:
                            log.op_ready[user] = now
                            log.op_cause[user] = cause
                    target = state[user].device
                    served = uses[served].same_way
                for i in range(1, num_ready):
                    op = ready[i]
                    j = i
                    while j > 0 and priority[ready[j - 1]] > priority[op]:
                        ready[j] = ready[j - 1]
                        j -= 1
                    ready[j] = op
                if streams is not None and item > num_uses:
                    continue
                route = device * num_devices + target
                work = overhead[route] + use_bytes[item] * overhead_per_byte[route]
                if work > 0.0:
                    _hold_up(target, work, first_server, free_at, head_end, late, chips, due, stale)
                _release(memory, buffer, device, num_devices, now, log, chips)

        results.step_seconds[row] = now
        if working is not None:
            results.step_seconds[row] += contention * shared
        for i in range(num_devices):
            peak_bytes[row, i] = peak[_pool(chips, i)]
    scratch.free[0] = free


@compiled_part
def _put_in_order(tables: Tables, state: Any, follower: Any, latest: Any) -> None:
    """Lets each op wait for the one before it on its device to be given to it. What is there from
    the start, such as a parameter, waits for nobody."""
    num_ops, num_devices = UINT(tables.group_of.size), latest.size
    num_kinds = UINT(tables.seconds.size // tables.group_of.size)
    for device in range(num_devices):
        latest[device] = num_ops
    for op in range(num_ops):
        device = state[op].device
        follower[op] = num_ops
        if tables.waits_for[op] == 0 and (
            tables.seconds[op * num_kinds + tables.kind_of[device]] == 0.0
        ):
            continue
        before = latest[device]
        if before < num_ops:
            follower[before] = op
            state[op].waits_for += 1
        latest[device] = op


@compiled_part
def _pool(chips: Chips | None, device: Any) -> Any:
    """The device in whose name a device's memory is counted."""
    if chips is None:
        return device
    return chips.pool[device]


@compiled_part
def _by_clock(chip: Any, now: float, clock: Any, since: Any, slow: Any) -> Any:
    """What the clock of a chip shows."""
    return clock[chip] + (now - since[chip]) / slow[chip]


@compiled_part
def _shared(
    chip: Any, now: float, clock: float, chips: Chips, due: Any, head: Any, head_end: Any,
    entries: Any, state: Any, kind_of: Any,
) -> float:  # fmt: skip
    """How much longer ops on a chip take while those run that are the first of their servers now,
    which all together may want more than the chip has; sets when they end."""
    load = 0.0
    for i in range(chips.first[chip], chips.first[chip + 1]):
        server = chips.servers[i]
        if head_end[server] != np.inf:
            op = entries[head[server]].item
            load += chips.demand[op, kind_of[state[op].device]]
    slow = max(1.0, load)
    for i in range(chips.first[chip], chips.first[chip + 1]):
        server = chips.servers[i]
        if head_end[server] != np.inf:
            head_end[server] = now + max(0.0, due[server] - clock) * slow
    return slow


@compiled_part
def _reset_streams(streams: Streams, state: Records, num_devices: Any, chips: Chips | None) -> None:
    """Counts what has to travel, and forgets the placement before."""
    for visit in range(streams.bytes.size):
        home = _pool(chips, state[streams.owner[visit]].device)
        for i in range(streams.offsets[visit], streams.offsets[visit + 1]):
            device = _pool(chips, state[streams.reader[i]].device)
            if device != home:
                streams.left[visit * num_devices + device] += 1
    for device in range(num_devices):
        streams.next[device] = 0
        streams.on_the_way[device] = False
        streams.used[device] = 0
        streams.used_by_same[device] = 0
        streams.same[device] = -1


@compiled_part
def _let_go(
    streams: Streams, op: Any, user: Any, state: Records, num_devices: Any, chips: Chips | None
) -> bool:
    """Counts an op's reads as done; says whether that made room in the window."""
    device = _pool(chips, user)
    room = False
    for i in range(streams.read_offsets[op], streams.read_offsets[op + UINT(1)]):
        visit = streams.read_visit[i]
        if _pool(chips, state[streams.owner[visit]].device) == device:
            continue
        left = streams.left[visit * num_devices + device] - 1
        streams.left[visit * num_devices + device] = left
        if left == 0:
            room = True
            streams.used[device] -= streams.bytes[visit]
            if streams.same[device] == streams.first[visit]:
                streams.used_by_same[device] -= streams.bytes[visit]
    return room


@compiled_part
def _send_next(
    streams: Streams,
    target: Any,
    tables: Tables,
    scratch: Scratch,
    memory: _Memory,
    now: float,
    cause: Any,
    free: Any,
    log: Any,
    chips: Chips | None,
) -> Any:
    """Sends the next weight that is needed in the memory of a device, if it may; says whether that
    is too much, and which entry is free now. Devices with one memory have one window: that of the
    first of them."""
    if streams.on_the_way[target]:
        return False, free
    num_devices = UINT(memory.used.size)
    visits = streams.bytes.size
    visit = streams.next[target]
    while visit < visits and streams.left[visit * num_devices + target] == 0:
        visit += 1
    streams.next[target] = visit
    if visit == visits:
        return False, free
    size = streams.bytes[visit]
    same = np.int64(streams.first[visit])
    used_by_same = streams.used_by_same[target] if streams.same[target] == same else 0
    if streams.used[target] + size > streams.window and streams.used[target] > used_by_same:
        return False, free
    streams.next[target] = visit + 1
    streams.on_the_way[target] = True
    streams.same[target] = same
    streams.used_by_same[target] = used_by_same + size
    streams.used[target] += size

    entries, free_at, head_end = scratch.entries, scratch.free_at, scratch.head_end
    hops = UINT(tables.routes.size // tables.latency.size)
    item = UINT(tables.uses.size + 1 + visit * num_devices + target)
    home = UINT(memory.state[streams.owner[visit]].device)
    route = home * num_devices + UINT(target)
    start, channel = now, tables.routes[route * hops]
    if chips is not None and chips.hop_count[route] > 0:
        start = max(now, free_at[channel])
        end = now
        for j in range(chips.hop_count[route]):
            hop = route * hops + UINT(j)
            channel = tables.routes[hop]
            moving = size * chips.hop_per_byte[hop]
            begin = max(end, free_at[channel])
            free_at[channel] = begin + chips.hop_gap[hop] + moving
            end = begin + chips.hop_latency[hop] + moving
            if log is not None:
                log.hop_start[item * hops + UINT(j)] = begin
                log.hop_free[item * hops + UINT(j)] = free_at[channel]
        freed = free_at[channel]
    else:
        for j in range(hops):
            start = max(start, free_at[tables.routes[route * hops + j]])
        moving = size * tables.per_byte[route]
        end = start + tables.latency[route] + moving
        freed = start + tables.gap[route] + moving
        for j in range(hops):
            free_at[tables.routes[route * hops + j]] = freed
    idle = head_end[channel] == np.inf
    if not idle:
        end = max(end, entries[scratch.tail[channel]].end)
    if log is not None:
        log.sent[log.counts[0]] = item
        log.counts[0] += 1
        log.use_request[item] = now
        log.use_start[item] = start
        log.use_free[item] = freed
        log.use_end[item] = end
        log.use_cause[item] = cause
    entry = free
    entries[entry].end = end
    entries[entry].item = item
    entries[entry].device = home
    following = entries[entry].next
    entries[UINT(entries.size - 1) if idle else scratch.tail[channel]].next = entry
    scratch.tail[channel] = entry
    if idle:
        scratch.head[channel] = entry
    head_end[channel] = min(end, head_end[channel])
    buffer = streams.first_buffer + visit
    overflow = _hold(memory, buffer, target, num_devices, now, log, chips)
    memory.holders[buffer * num_devices + target] += streams.left[visit * num_devices + target] - 1
    return overflow, following


@compiled_part
def _hold_up(
    device: Any, work: float, first_server: Any, free_at: Any, head_end: Any, late: Any,
    chips: Chips | None, due: Any, stale: Any,
) -> None:  # fmt: skip
    """Delays what runs on a device by the work of a transfer; a device that has a server to spare
    does it there, within the transfer's own time."""
    server = first_server[device]
    for other in range(first_server[device], first_server[device + 1]):
        if head_end[other] == np.inf:
            return
        if free_at[other] < free_at[server]:
            server = UINT(other)
    head_end[server] += work
    free_at[server] += work
    late[server] += work
    if chips is not None and chips.chip[server] < chips.first.size - 1:
        due[server] += work
        stale[chips.chip[server]] = True


@compiled_part
def _reset_memory(tables: Tables, memory: _Memory, chips: Chips | None) -> bool:
    """Leaves only what stays for the whole step; says whether that is too much somewhere."""
    nothing = (memory.buffers.size - 1) * memory.used.size
    for place in range(memory.used.size):
        memory.used[place] = 0
        memory.limit[place] = tables.memory[place]
        memory.holders[nothing + place] = 0
    for i in range(tables.owners.size):
        device = _pool(chips, memory.state[tables.owners[i]].device)
        memory.used[device] += tables.resident_bytes[i]
    for place in range(memory.used.size):
        memory.peak[place] = memory.used[place]
    return _over_limit(memory) >= 0


@compiled_part
def _hold(
    memory: _Memory, buffer: Any, user: Any, num_devices: Any, now: float, log: Any, chips: Any
) -> bool:
    """Adds a holder, and allocates for the first; says whether that is too much."""
    device = _pool(chips, user)
    buffers, state, holders = memory.buffers, memory.state, memory.holders
    used, peak = memory.used, memory.peak
    before = holders[buffer * num_devices + device]
    holders[buffer * num_devices + device] = before + 1
    # Written so that there is nothing to branch on: the processor would often guess wrong.
    home, copy = buffers[buffer].home_bytes, buffers[buffer].copy_bytes
    size = home if _pool(chips, state[buffers[buffer].op].device) == device else copy
    size = size if before == 0 else 0
    total = used[device] + size
    used[device] = total
    peak[device] = max(peak[device], total)
    if log is not None:
        _log_change(log, now, device, buffer, size)
    return total > memory.limit[device]  # type: ignore[no-any-return]


@compiled_part
def _release(
    memory: _Memory, buffer: Any, user: Any, num_devices: Any, now: float, log: Any, chips: Any
) -> None:
    """Removes a holder, and frees after the last."""
    device = _pool(chips, user)
    buffers, state, holders, used = memory.buffers, memory.state, memory.holders, memory.used
    left = holders[buffer * num_devices + device] - 1
    holders[buffer * num_devices + device] = left
    home, copy = buffers[buffer].home_bytes, buffers[buffer].copy_bytes
    size = home if _pool(chips, state[buffers[buffer].op].device) == device else copy
    size = size if left == 0 else 0
    used[device] -= size
    if log is not None:
        _log_change(log, now, device, buffer, -size)


@compiled_part
def _log_change(log: Log, now: float, device: Any, buffer: Any, change: Any) -> None:
    if change != 0:
        i = log.counts[1]
        log.counts[1] = i + 1
        log.change_seconds[i] = now
        log.change_device[i] = device
        log.change_buffer[i] = buffer
        log.change_bytes[i] = change


@compiled_part
def _over_limit(memory: _Memory) -> int:
    """The first device that uses too much, or -1."""
    for device in range(memory.used.size):
        if memory.used[device] > memory.limit[device]:
            return device
    return -1


@compiled_part
def _find_largest(
    memory: _Memory, device: int, largest: Ints, sizes: Ints, chips: Chips | None
) -> None:
    """Fills in the largest live buffers on a device; the lower number goes first among equals."""
    buffers, state = memory.buffers, memory.state
    num_devices = memory.used.size
    for buffer in range(buffers.size - 1):
        if memory.holders[buffer * num_devices + device] == 0:
            continue
        home, copy = buffers[buffer].home_bytes, buffers[buffer].copy_bytes
        size = home if _pool(chips, state[buffers[buffer].op].device) == device else copy
        place = LARGEST
        while place > 0 and size > sizes[place - 1]:
            place -= 1
        for i in range(LARGEST - 1, place, -1):
            largest[i] = largest[i - 1]
            sizes[i] = sizes[i - 1]
        if place < LARGEST:
            largest[place] = buffer
            sizes[place] = size
