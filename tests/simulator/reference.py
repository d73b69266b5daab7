"""The simulator once more, as plainly as possible: a heap of events, sets of holders, no tricks.

The engine must agree with it exactly, to the last bit of every time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from placewright.problem import Problem

OP_END, ARRIVAL, ISSUED = 0, 1, 2


@dataclass
class Outcome:
    step_seconds: float = 0.0
    peak_bytes: list[int] = field(default_factory=list)
    overflow_device: int = -1
    overflow_tensors: list[int] = field(default_factory=list)
    overflow_bytes: list[int] = field(default_factory=list)
    pinned_bytes: list[int] = field(default_factory=list)
    op_start: dict[int, float] = field(default_factory=dict)
    op_end: dict[int, float] = field(default_factory=dict)
    op_slot: dict[int, int] = field(default_factory=dict)
    issue_end: dict[int, float] = field(default_factory=dict)
    transfers: list[tuple[int, int, int, float, float, float, float]] = field(default_factory=list)
    """(tensor or -1, source device, target device, request, start, free, end), as requested."""


@dataclass
class Item:
    """A tensor with consumers, or (tensor -1) the completion of an op."""

    producer: int
    tensor: int
    bytes: int
    consumers: list[int]


@dataclass
class Visit:
    """A weight that comes to a device for these readers, all of them if they are there."""

    tensor: int
    owner: int
    bytes: int
    readers: list[int]


class Reference:
    def __init__(
        self, problem: Problem, devices: Sequence[int], priority: Sequence[int] | None = None
    ) -> None:
        graph, cluster = problem.graph, problem.cluster
        self.priority = priority if priority is not None else range(graph.num_ops)
        any_issuing = bool(problem.issue_seconds.any())
        self.host = any_issuing and problem.issue == "host"
        self.executors = any_issuing and problem.issue == "device"
        self.executor_free = [0.0] * cluster.num_devices
        self.issued = 0 if self.host else graph.num_ops
        """Ops with lower numbers are issued."""
        self.blocking = -1
        """The op that the host thread itself is computing."""
        self.problem = problem
        self.device = [int(devices[g]) for g in problem.grouping.group_of]
        self.items = _items(problem)
        self.inputs: list[list[Item]] = [[] for _ in range(graph.num_ops)]
        for items in self.items:
            for item in items:
                for consumer in item.consumers:
                    self.inputs[consumer].append(item)
        self.missing = [len(inputs) for inputs in self.inputs]
        self.follower: dict[int, int] = {}
        """Op -> the next one on its device, where devices keep to the program's order."""
        if cluster.in_order:
            self._keep_in_order()
        self.stored: dict[tuple[int, int, int], float] = {}
        """(op, tensor, memory) -> when a tensor that is relayed is there."""
        self.out = Outcome()

        self.servers: list[tuple[int, int]] = [
            (d, slot)
            for d, device in enumerate(cluster.devices)
            for slot in range(device.kind.slots)
        ]
        self.server_free = [0.0] * len(self.servers)
        self.server_queue: list[deque[int]] = [deque() for _ in self.servers]
        self.server_end = [0.0] * len(self.servers)
        """When the first in the queue ends."""
        self.late = [0.0] * len(self.servers)
        """By how much transfers have held up each server."""
        self.ends: dict[int, float] = {}
        """End of each op less what its server was late when it joined the queue."""
        self.channel_free = [0.0] * len(cluster.routes.channel_names)
        self.last_arrival = [0.0] * len(self.channel_free)
        self.packing = 0.0
        """Work of sending what the last op made."""
        self.events: list[tuple[float, int, int, int, object]] = []
        self.sequence = 0

        self.pool = [
            next(
                e
                for e, other in enumerate(cluster.devices)
                if e == d or (other.chip == device.chip and other.sharing == "stream")
            )
            for d, device in enumerate(cluster.devices)
        ]
        """The first device with the same memory."""
        self.holders: list[dict[int, list[object]]] = [{} for _ in cluster.devices]
        """Device -> buffer -> whoever holds it."""
        self.visits = _visits(problem)
        self.visit_of = {
            (visit.tensor, reader): number
            for number, visit in enumerate(self.visits)
            for reader in visit.readers
        }
        self.coming: list[list[int]] = [
            [v for v, visit in enumerate(self.visits) if self.remote_readers(visit, d)]
            for d in range(cluster.num_devices)
        ]
        """Device -> visits still to be sent there."""
        self.on_the_way = [-1] * cluster.num_devices
        self.window: list[dict[int, set[int]]] = [{} for _ in cluster.devices]
        """Device -> visit that is there or on the way -> readers that are not done."""

        self.used = [0] * cluster.num_devices
        for op, size in enumerate(graph.resident_bytes.tolist()):
            self.used[self.pool[self.device[op]]] += size
        self.out.peak_bytes = list(self.used)

        names = [device.chip for device in cluster.devices]
        self.chip: list[str | None] = [name if names.count(name) > 1 else None for name in names]
        """Of each device, where others are on it as well."""
        self.clock = dict.fromkeys(names, (0.0, 0.0, 1.0))
        """What the clock of each chip showed, when, and how much longer everything takes since."""
        self.stale: set[str] = set()
        """Chips on which ops have begun or ended."""
        self.due = [0.0] * len(self.servers)
        """When the first in the queue ends, by the clock of its chip."""

    def _keep_in_order(self) -> None:
        for number in range(self.problem.num_devices):
            mine = [
                op
                for op, device in enumerate(self.device)
                if device == number
                # What is there from the start waits for nobody.
                and (self.missing[op] or self.problem.busy_seconds[device, op] > 0)
            ]
            for op, following in itertools.pairwise(mine):
                self.follower[op] = following
            for op in mine[1:]:
                self.missing[op] += 1

    # --- weights that travel ---

    def remote_readers(self, visit: Visit, device: int) -> list[int]:
        """Those that have the memory of this device, where that is not the home."""
        if self.pool[self.device[visit.owner]] == device:
            return []
        return [op for op in visit.readers if self.pool[self.device[op]] == device]

    def travels(self, tensor: int, reader: int) -> bool:
        """Whether a weight has to come from elsewhere for this reader."""
        number = self.visit_of.get((tensor, reader), -1)
        if number < 0:
            return False
        return self.pool[self.device[self.visits[number].owner]] != self.pool[self.device[reader]]

    def send_next(self, device: int, now: float) -> None:
        if self.on_the_way[device] >= 0 or not self.coming[device]:
            return
        number = self.coming[device][0]
        visit = self.visits[number]
        held = [self.visits[other] for other in self.window[device]]
        assert self.problem.homes is not None
        fits = visit.bytes + sum(o.bytes for o in held) <= self.problem.homes.window_bytes
        if not fits and any(other.readers[0] != visit.readers[0] for other in held):
            return
        self.coming[device].pop(0)
        self.on_the_way[device] = number
        readers = self.remote_readers(visit, device)
        self.window[device][number] = set(readers)
        item = Item(visit.owner, visit.tensor, visit.bytes, readers)
        channel, arrival = self.over_the_link(item, device, now, kept=False)
        self.push(arrival, ARRIVAL, channel, (number, device))
        for reader in readers:
            self.hold(visit.tensor, device, ("used by", reader, visit.tensor), number)

    def arrive_home(self, number: int, device: int, now: float) -> list[int]:
        ready = []
        for reader in self.remote_readers(self.visits[number], device):
            self.missing[reader] -= 1
            if not self.missing[reader] and reader < self.issued:
                ready.append(reader)
        self.on_the_way[device] = -1
        self.send_next(device, now)
        return ready

    def let_go(self, op: int, now: float) -> None:
        device, room = self.pool[self.device[op]], False
        for number, readers in [*self.window[device].items()]:
            if op in readers:
                readers.remove(op)
                if not readers:
                    del self.window[device][number]
                    room = True
        if room:
            self.send_next(device, now)

    # --- memory ---

    def buffer(self, tensor: int) -> int:
        root = int(self.problem.graph.tensor_shares[tensor])
        return root if root >= 0 else tensor

    def size(self, buffer: int, device: int) -> int:
        graph = self.problem.graph
        if buffer >= graph.num_tensors:
            visit = self.visits[buffer - graph.num_tensors]
            return 0 if self.pool[self.device[visit.owner]] == device else visit.bytes
        producer = int(graph.tensor_producer[buffer])
        if self.pool[self.device[producer]] == device:
            return 0 if graph.resident_bytes[producer] > 0 else int(graph.tensor_bytes[buffer])
        return max(
            int(graph.tensor_bytes[t]) for t in range(graph.num_tensors) if self.buffer(t) == buffer
        )

    def hold(self, tensor: int, device: int, who: object, visit: int = -1) -> None:
        if tensor < 0 or self.problem.graph.tensor_bytes[tensor] == 0:
            return
        buffer = self.buffer(tensor) if visit < 0 else self.problem.graph.num_tensors + visit
        device = self.pool[device]
        if buffer not in self.holders[device]:
            self.holders[device][buffer] = []
            self.used[device] += self.size(buffer, device)
            self.out.peak_bytes[device] = max(self.out.peak_bytes[device], self.used[device])
        self.holders[device][buffer].append(who)

    def release(self, tensor: int, device: int, who: object, visit: int = -1) -> None:
        if tensor < 0 or self.problem.graph.tensor_bytes[tensor] == 0:
            return
        buffer = self.buffer(tensor) if visit < 0 else self.problem.graph.num_tensors + visit
        device = self.pool[device]
        self.holders[device][buffer].remove(who)
        if not self.holders[device][buffer]:
            del self.holders[device][buffer]
            self.used[device] -= self.size(buffer, device)

    def check_limits(self) -> None:
        if self.out.overflow_device >= 0:
            return
        for d, device in enumerate(self.problem.cluster.devices):
            shared = [
                other.memory_bytes
                for e, other in enumerate(self.problem.cluster.devices)
                if self.pool[e] == d
            ]
            if self.used[d] > min([device.memory_bytes, *shared]):
                sizes = [(-self.size(buffer, d), buffer) for buffer in self.holders[d]]
                largest = sorted(pair for pair in sizes if pair[0] < 0)[:3]
                count = self.problem.graph.num_tensors
                self.out.overflow_device = d
                self.out.overflow_tensors = [
                    buffer if buffer < count else self.visits[buffer - count].tensor
                    for _, buffer in largest
                ]
                self.out.overflow_bytes = [-size for size, _ in largest]
                return

    # --- events ---

    def push(self, time: float, kind: int, index: int, what: object) -> None:
        heapq.heappush(self.events, (time, kind, index, self.sequence, what))
        self.sequence += 1

    def outputs(self, op: int) -> range:
        offsets = self.problem.graph.output_offsets
        return range(int(offsets[op]), int(offsets[op + 1]))

    def begin(self, op: int) -> None:
        for tensor in self.outputs(op):
            self.hold(tensor, self.device[op], ("made by", op, tensor))

    def give(self, op: int, now: float) -> None:
        """Gives a ready op to a server."""
        device = self.device[op]
        candidates = [s for s, (d, _) in enumerate(self.servers) if d == device]
        server = min(candidates, key=lambda s: (self.server_free[s], s))
        chip = self.chip[device]
        start = max(now if chip is None else self.shown(chip, now), self.server_free[server])
        end = start + float(self.problem.busy_seconds[device, op])
        self.server_free[server] = end
        self.ends[op] = end - self.late[server]
        self.out.op_start[op] = start
        self.out.op_slot[op] = self.servers[server][1]
        self.server_queue[server].append(op)
        if len(self.server_queue[server]) == 1:
            if chip is None:
                self.server_end[server] = end
                self.push(end, OP_END, server, op)
            else:
                self.out.op_start[op] = now
                self.due[server] = end
                self.stale.add(chip)
            self.begin(op)

    def shown(self, chip: str, now: float) -> float:
        """What the clock of a chip shows."""
        clock, since, slow = self.clock[chip]
        return clock + (now - since) / slow

    def share(self, now: float) -> None:
        """Ops on one chip that want more than it has take longer, all by the same factor."""
        for chip in sorted(self.stale):
            busy = [
                s for s, (d, _) in enumerate(self.servers)
                if self.chip[d] == chip and self.server_queue[s]
            ]  # fmt: skip
            load = 0.0
            for s in busy:
                kind = self.problem.cluster.kind_of_device[self.servers[s][0]]
                load += float(self.problem.costs.demand[kind, self.server_queue[s][0]])
            clock = self.shown(chip, now)
            slow = max(1.0, load)
            self.clock[chip] = clock, now, slow
            for s in busy:
                self.server_end[s] = now + max(0.0, self.due[s] - clock) * slow
                # The events that are already there come too early or too late: they are ignored.
                self.push(self.server_end[s], OP_END, s, self.server_queue[s][0])
        self.stale = set()

    def issue(self, op: int, now: float) -> None:
        """Gives a ready op to whoever has to issue it, or to a server."""
        device = self.device[op]
        if not (self.executors and self.problem.issued_apart[device]):
            self.give(op, now)
            return
        start = max(now, self.executor_free[device])
        end = start + float(self.problem.issue_seconds[device, op])
        self.executor_free[device] = end
        self.push(end, ISSUED, device, op)

    def issue_next(self, now: float) -> None:
        """The host thread goes on to the next op."""
        if self.issued < len(self.device):
            seconds = self.problem.issue_seconds[self.device[self.issued], self.issued]
            self.push(now + float(seconds), ISSUED, 0, self.issued)

    def end_issue(self, op: int, now: float) -> list[int]:
        self.out.issue_end[op] = now
        device = self.device[op]
        if self.host:
            self.issued = op + 1
            if self.problem.cluster.devices[device].type == "cpu":
                self.blocking = op
            else:
                self.issue_next(now)
            return [] if self.missing[op] else [op]
        self.give(op, now)
        ready = []
        for item in self.items[op]:
            ready += self.deliver(item, device)
        return ready

    def hold_up(self, device: int, work: float) -> None:
        """Delays a device that is busy by the work of a transfer."""
        servers = [s for s, (d, _) in enumerate(self.servers) if d == device]
        if work == 0 or not all(self.server_queue[s] for s in servers):
            return
        server = min(servers, key=lambda s: (self.server_free[s], s))
        self.server_free[server] += work
        self.late[server] += work
        self.due[server] += work
        chip = self.chip[device]
        if chip is not None:
            self.stale.add(chip)
            return
        self.server_end[server] += work
        # The event that is already there comes too early and will be ignored.
        self.push(self.server_end[server], OP_END, server, self.server_queue[server][0])

    def work(self, item: Item, target: int) -> float:
        source, routes = self.device[item.producer], self.problem.cluster.routes
        return float(routes.overhead_seconds[source, target]) + item.bytes * float(
            routes.overhead_seconds_per_byte[source, target]
        )

    def send(self, item: Item, target: int, now: float) -> None:
        channel, arrival = self.over_the_link(item, target, now)
        self.push(arrival, ARRIVAL, channel, (item, target))
        self.hold(item.tensor, self.device[item.producer], ("sent to", target, item.tensor))

    def over_the_link(
        self, item: Item, target: int, now: float, kept: bool = True
    ) -> tuple[int, float]:
        """The channel that hands it over, and when it arrives; `kept` is what lies where a way that
        relays comes by, for others to take."""
        source = self.device[item.producer]
        routes, count = self.problem.cluster.routes, self.problem.num_devices
        first, end = routes.offsets[source * count + target : source * count + target + 2]
        channels = [int(c) for c in routes.channels[first:end]]
        if routes.relayed[source, target]:
            key = item.producer, item.tensor, int(routes.relay[source, target])
            known = kept and key in self.stored
            arrival = self.stored[key] if known else now
            start = now
            if not known or len(channels) > 1:
                start = max(arrival, self.channel_free[channels[1 if known else 0]])
            for hop, channel in zip(range(first, end), channels, strict=True):
                if hop == first and known:
                    continue
                moving = item.bytes * float(routes.hop_seconds_per_byte[hop])
                begin = max(arrival, self.channel_free[channel])
                self.channel_free[channel] = begin + float(routes.hop_gap_seconds[hop]) + moving
                arrival = begin + float(routes.hop_latency_seconds[hop]) + moving
                if hop == first and kept:
                    self.stored[key] = arrival
            last = channels[-1]
        else:
            start = max([now, *(self.channel_free[c] for c in channels)])
            moving = item.bytes * float(routes.seconds_per_byte[source, target])
            arrival = start + float(routes.latency_seconds[source, target]) + moving
            gap = float(routes.gap_seconds[source, target])
            for channel in channels:
                self.channel_free[channel] = start + gap + moving
            last = channels[0]
        # In the order it was given, on that channel.
        arrival = max(arrival, self.last_arrival[last])
        self.last_arrival[last] = arrival
        free = self.channel_free[last]
        self.out.transfers.append((item.tensor, source, target, now, start, free, arrival))
        return last, arrival

    def deliver(self, item: Item, device: int) -> list[int]:
        ready = []
        for consumer in item.consumers:
            if self.device[consumer] == device:
                self.missing[consumer] -= 1
                if not self.missing[consumer] and consumer < self.issued:
                    ready.append(consumer)
        return ready

    def end_op(self, server: int, op: int, now: float) -> list[int]:
        device = self.device[op]
        ready = []
        for item in self.items[op]:
            asked = set()
            for consumer in item.consumers:
                target = self.device[consumer]
                if self.travels(item.tensor, consumer):
                    continue
                visit = self.visit_of.get((item.tensor, consumer), -1)
                if visit >= 0 and target != device:  # who has the same memory has the weight
                    self.hold(item.tensor, target, ("used by", consumer, item.tensor), visit)
                    self.missing[consumer] -= 1
                    if not self.missing[consumer] and consumer < self.issued:
                        ready.append(consumer)
                    continue
                if target != device and target not in asked:
                    asked.add(target)
                    self.send(item, target, now)
                    self.packing += self.work(item, target)
                self.hold(item.tensor, target, ("used by", consumer, item.tensor), visit)
            if not (self.executors and self.problem.issued_apart[device]):
                ready += self.deliver(item, device)
        if op == self.blocking:
            self.blocking = -1
            self.issue_next(now)
        for tensor in self.outputs(op):
            self.release(tensor, device, ("made by", op, tensor))
        for item in self.inputs[op]:
            visit = self.visit_of.get((item.tensor, op), -1)
            self.release(item.tensor, device, ("used by", op, item.tensor), visit)
        queue = self.server_queue[server]
        assert queue.popleft() == op
        self.out.op_end[op] = now
        self.let_go(op, now)
        if queue:
            self.out.op_start[queue[0]] = now
            self.due[server] = self.ends[queue[0]] + self.late[server]
            if self.chip[device] is None:
                self.server_end[server] = self.due[server]
                self.push(self.server_end[server], OP_END, server, queue[0])
            self.begin(queue[0])
        chip = self.chip[device]
        if chip is not None:
            self.stale.add(chip)
        return ready

    def arrive(self, item: Item, target: int) -> list[int]:
        ready = self.deliver(item, target)
        self.hold_up(target, self.work(item, target))
        self.release(item.tensor, self.device[item.producer], ("sent to", target, item.tensor))
        return ready

    def run(self) -> Outcome:
        ready = [op for op, missing in enumerate(self.missing) if not missing]
        for device in range(self.problem.num_devices):
            self.send_next(device, 0.0)
        if self.host:
            ready = []
            self.issue_next(0.0)
        now, packer = 0.0, 0
        while True:
            ready = sorted(ready, key=lambda op: self.priority[op])
            for op in ready:
                if self.host:
                    self.give(op, now)
                else:
                    self.issue(op, now)
                follower = self.follower.get(op)
                if follower is not None:
                    self.missing[follower] -= 1
                    if not self.missing[follower] and follower < self.issued:
                        ready.append(follower)  # and comes up in this loop
            self.hold_up(packer, self.packing)
            self.packing = 0.0
            self.check_limits()
            self.share(now)
            ready = []
            if not self.events:
                break
            time, kind, index, _, what = heapq.heappop(self.events)
            if kind == OP_END:
                assert isinstance(what, int)
                if time != self.server_end[index] or [*self.server_queue[index]][:1] != [what]:
                    continue  # it was held up
                now, packer = time, self.device[what]
                ready = self.end_op(index, what, now)
            elif kind == ISSUED:
                assert isinstance(what, int)
                now = time
                ready = self.end_issue(what, now)
            else:
                assert isinstance(what, tuple)
                now = time
                thing, target = what
                is_item = isinstance(thing, Item)
                ready = (
                    self.arrive(thing, target) if is_item else self.arrive_home(thing, target, now)
                )
        assert len(self.out.op_end) == self.problem.graph.num_ops
        assert not any(self.holders)
        assert not any(self.coming)
        assert not any(self.window)
        self.limit_pinned()
        self.out.peak_bytes = [self.out.peak_bytes[pool] for pool in self.pool]
        self.out.step_seconds = now
        self.stretch()
        return self.out

    def limit_pinned(self) -> None:
        """Weights that travel from a host are pinned there before the step."""
        cluster, travel = self.problem.cluster, set()
        for visit in self.visits:
            home = self.device[visit.owner]
            pools = {self.pool[self.device[reader]] for reader in visit.readers}
            if pools != {self.pool[home]}:
                travel.add((visit.tensor, home, visit.bytes))
        for d, device in enumerate(cluster.devices):
            if device.type == "cpu":
                self.out.pinned_bytes.append(sum(size for _, home, size in travel if home == d))
            else:
                self.out.pinned_bytes.append(0)
        for d in reversed(range(cluster.num_devices)):
            if self.out.pinned_bytes[d] > cluster.devices[d].pinnable_bytes:
                self.out.overflow_device = d
                self.out.overflow_tensors = []
                self.out.overflow_bytes = []

    def stretch(self) -> None:
        """Contention: time passes more slowly the more devices are busy."""
        out = self.out
        share = self.problem.cluster.contention
        spans = [(start, out.op_end[op], self.device[op]) for op, start in out.op_start.items()]
        times = sorted({*out.op_start.values(), *out.op_end.values()})

        def stretched(time: float) -> float:
            shared = 0.0
            for begin, end in itertools.pairwise(times):
                busy = {device for start, stop, device in spans if start <= begin < stop}
                shared += max(0.0, min(time, end) - begin) * max(0, len(busy) - 1)
            return time + share * shared

        out.step_seconds = stretched(out.step_seconds)
        out.op_start = {op: stretched(time) for op, time in out.op_start.items()}
        out.op_end = {op: stretched(time) for op, time in out.op_end.items()}
        out.transfers = [
            (tensor, source, target, stretched(a), stretched(b), stretched(c), stretched(d))
            for tensor, source, target, a, b, c, d in out.transfers
        ]


def _items(problem: Problem) -> list[list[Item]]:
    graph = problem.graph
    consumers: dict[tuple[int, int], set[int]] = {}
    edges = list(
        zip(
            graph.edge_src.tolist(),
            graph.edge_dst.tolist(),
            graph.edge_tensor.tolist(),
            strict=True,
        )
    )
    fed = {(src, dst) for src, dst, tensor in edges if tensor >= 0}
    for src, dst, tensor in edges:
        if tensor >= 0 or (src, dst) not in fed:
            consumers.setdefault((src, tensor), set()).add(dst)
    items: list[list[Item]] = [[] for _ in range(graph.num_ops)]
    for src, tensor in sorted(consumers, key=lambda key: (key[0], key[1] < 0, key[1])):
        size = int(graph.tensor_bytes[tensor]) if tensor >= 0 else 0
        items[src].append(Item(src, tensor, size, sorted(consumers[src, tensor])))
    return items


def _visits(problem: Problem) -> list[Visit]:
    if problem.homes is None:
        return []
    graph, group_of = problem.graph, problem.grouping.group_of
    fed = set(graph.edge_dst.tolist())
    reads: dict[int, set[int]] = {}
    for src, dst, tensor in zip(
        graph.edge_src.tolist(), graph.edge_dst.tolist(), graph.edge_tensor.tolist(), strict=True
    ):
        owns = graph.resident_bytes[src] > 0 and src not in fed
        if owns and tensor >= 0 and graph.tensor_bytes[tensor] and group_of[src] != group_of[dst]:
            reads.setdefault(tensor, set()).add(dst)
    visits = []
    for tensor, readers in reads.items():
        size, owner = int(graph.tensor_bytes[tensor]), int(graph.tensor_producer[tensor])
        ordered = sorted(readers)
        runs = [[ordered[0]]]
        for before, reader in itertools.pairwise(ordered):
            between = [
                int(graph.tensor_bytes[other])
                for other, ops in reads.items()
                if any(before <= op <= reader for op in ops)
            ]
            if sum(between) <= problem.homes.window_bytes:
                runs[-1].append(reader)
            else:
                runs.append([reader])
        visits += [Visit(tensor, owner, size, run) for run in runs]
    return sorted(visits, key=lambda visit: (visit.readers[0], visit.tensor))


def simulate(
    problem: Problem, devices: Sequence[int], priority: Sequence[int] | None = None
) -> Outcome:
    return Reference(problem, devices, priority).run()
