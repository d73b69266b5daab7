"""Step times that no placement can beat, and proofs that none fits into memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray
from placewright.problem import Problem
from placewright.simulator.compiling import compiled
from placewright.simulator.flow import Flow
from placewright.stays import unit_weights
from placewright.units import format_bytes

_ROUNDS, _ITERATIONS = 6, 60
_MOMENTS = 64
"""How many ops are tried as the moment at which most memory is needed."""
_ROUNDING = 1e-9
"""Sums of costs are rounded in another order than the simulator's; by less than this."""


@dataclass(frozen=True, kw_only=True)
class LowerBounds:
    """Bounds on what the simulator returns for any placement that fits into memory."""

    critical_path_seconds: float
    """The longest chain of ops, each on its fastest device, without transfers."""
    work_seconds: float
    """All work, spread over all devices as well as fractions of groups allow; or where that takes
    longer, issuing all ops."""
    memory_seconds: float
    """The same where no device may hold more than its memory at the moment that needs most;
    infinite where nothing fits."""
    forced_out_of_memory: str | None = None
    """Why no placement can fit, where that can be told."""
    stream_seconds: float = 0.0
    """Where weights have homes of their own: each of their bytes is in the memory of who computes
    with it, for which there is not room for all, or travels there in each step. 0 without homes."""

    @property
    def best(self) -> float:
        return max(
            self.critical_path_seconds, self.work_seconds, self.memory_seconds, self.stream_seconds
        )


def lower_bounds(problem: Problem) -> LowerBounds:
    flow = Flow.of(problem.graph, problem.visits)
    path_seconds, path = _critical_path(problem, flow)
    needs, moment = _most_memory(problem, flow, path)
    least = np.maximum(needs, _needs_alone(problem, flow))
    memory_bytes = problem.cluster.pool_bytes
    fits = problem.allowed & (least[:, np.newaxis] <= memory_bytes)
    reason = _why_nothing_fits(problem, needs, moment, least)
    busy = _group_sums(problem, problem.busy_seconds)
    work = _balanced(problem, busy, problem.allowed, None)
    memory = np.inf if reason else max(work, _balanced(problem, busy, fits, needs))
    if reason is None and memory > _longest_step(problem, flow):
        # The dual of a problem without solution grows without end.
        reason = "no split of the groups over the devices keeps all of them within their memory"
        memory = np.inf
    work = max(_contended(problem, work), _issuing(problem), _on_one_chip(problem))
    return LowerBounds(
        critical_path_seconds=path_seconds,
        work_seconds=work,
        memory_seconds=_contended(problem, memory),
        forced_out_of_memory=reason,
        stream_seconds=np.inf if reason else streaming_bound(problem, path),
    )


# --- time ----------------------------------------------------------------------------------------


def _critical_path(problem: Problem, flow: Flow) -> tuple[float, list[int]]:
    """Its length and its ops."""
    allowed = problem.allowed.T[:, problem.grouping.group_of]
    fastest = np.where(allowed, problem.busy_seconds, np.inf).min(axis=0)
    end, before = _longest_paths(flow.use_producer, flow.use_op, fastest)
    op = int(np.argmax(end))
    path = [op]
    while before[op] >= 0:
        op = int(before[op])
        path.append(op)
    return float(end.max()), path[::-1]


@compiled
def _longest_paths(
    producer: IndexArray, user: IndexArray, seconds: FloatArray
) -> tuple[FloatArray, IntArray]:
    """When each op can end at the earliest, and the op that it waits for last."""
    begin = np.zeros(seconds.size)
    before = np.full(seconds.size, -1)
    # Uses are sorted by producer, and producers come before those that wait for them.
    for i in range(producer.size):
        end = begin[producer[i]] + seconds[producer[i]]
        if before[user[i]] < 0 or end > begin[user[i]]:
            begin[user[i]] = end
            before[user[i]] = producer[i]
    return begin + seconds, before


def _contended(problem: Problem, seconds: float) -> float:
    """The bound where devices slow each other down, from what it is where they do not.

    A step that takes T without contention takes longer by a share of the time that devices are busy
    beside others. That is at least the time they are busy, were all work done where it takes least,
    less T.
    """
    if np.isinf(seconds):
        return seconds
    share = min(1.0, problem.cluster.contention)
    slots = np.array([device.kind.slots for device in problem.cluster.devices])
    busy = _group_sums(problem, problem.busy_seconds) / slots[:, np.newaxis]
    least = np.where(problem.allowed.T, busy, np.inf).min(axis=0).sum()
    return max(seconds, (1 - share) * seconds + share * float(least) * (1.0 - _ROUNDING))


def _on_one_chip(problem: Problem) -> float:
    """Where all devices are parts of one chip: how long it takes to give all ops what they demand
    of it, however they are placed."""
    if (problem.cluster.chip_of_device != 0).any():
        return 0.0
    demand = problem.costs.demand[problem.cluster.kind_of_device]
    busy = np.where(demand > 0, problem.busy_seconds, 0.0)  # an op without a kernel has no demand
    taken = _group_sums(problem, demand * np.where(np.isfinite(busy), busy, 0.0))
    least = np.where(problem.allowed.T, taken, np.inf).min(axis=0).sum()
    return float(least) * (1.0 - _ROUNDING)


def _group_sums(problem: Problem, op_seconds: FloatArray) -> FloatArray:
    """[D, G] from [D, N]."""
    if op_seconds is problem.op_seconds:
        return problem.group_seconds
    totals = np.zeros((problem.num_devices, problem.num_groups))
    for device in range(problem.num_devices):
        np.add.at(totals[device], problem.grouping.group_of, op_seconds[device])
    return totals


def _issuing(problem: Problem) -> float:
    """How long issuing all ops takes at least: each on its own device's executor, where each has
    one, or one after another."""
    if not problem.issue_seconds.any():
        return 0.0
    seconds = _group_sums(problem, problem.issue_seconds)
    if problem.issue == "host":
        total = np.where(problem.allowed.T, seconds, np.inf).min(axis=0).sum()
        return float(total) * (1.0 - _ROUNDING)
    return _balanced(problem, seconds, problem.allowed, None)


def _balanced(
    problem: Problem, group_seconds: FloatArray, allowed: BoolArray, needs: FloatArray | None
) -> float:
    """Least time in which fractions of the groups can be worked off, `needs` fitting into memory.

    By linear programming duality: for any prices w of a second on each device that add up to 1, and
    any prices m of a byte,

        sum over groups of min over devices (w * seconds / slots + m * bytes) - sum of m * memory

    is a lower bound. Subgradient steps look for good prices. Devices of equal kind and memory have
    equal prices.
    """
    if not allowed.any(axis=1).all():
        return np.inf
    devices = problem.cluster.devices
    sets: dict[tuple[str, int, bytes], list[int]] = {}
    for d, device in enumerate(devices):
        key = (device.kind.name, device.memory_bytes, allowed[:, d].tobytes())
        sets.setdefault(key, []).append(d)
    one_of = [members[0] for members in sets.values()]
    count = np.array([len(members) for members in sets.values()])
    slots = np.array([devices[d].kind.slots for d in one_of])
    memory = np.array([devices[d].memory_bytes for d in one_of], dtype=np.float64)

    # [G, sets] what a group takes of a set's time and of one device's memory. Time is priced for
    # the whole set.
    usable = allowed[:, one_of]
    seconds = np.where(usable, group_seconds.T[:, one_of], 0.0) / (slots * count)
    shares = np.zeros_like(seconds) if needs is None else needs[:, np.newaxis] / memory
    forbidden = np.where(usable, 0.0, np.inf)

    best = 0.0
    best_time, best_memory = np.full(len(one_of), 1.0 / len(one_of)), np.zeros(len(one_of))
    groups = np.arange(len(seconds))
    for _ in range(_ROUNDS):
        # Memory is priced in units of the bound so far, so that both kinds of price are near 1.
        unit = best if needs is not None else 0.0
        time_price, memory_price = best_time, best_memory
        for iteration in range(_ITERATIONS):
            cost = time_price * seconds + memory_price * shares + forbidden
            choice = np.argmin(cost, axis=1)
            value = float(cost[groups, choice].sum() - (memory_price * count).sum())
            if value > best:
                best, best_time, best_memory = value, time_price, memory_price
            load = np.bincount(choice, weights=seconds[groups, choice], minlength=len(one_of))
            full = np.bincount(choice, weights=shares[groups, choice], minlength=len(one_of))
            up_time, up_memory = load - load.mean(), unit * (full - count)
            length = float(np.sqrt((up_time**2).sum() + (up_memory**2).sum()))
            if length == 0:
                break
            step = 0.5 / (length * np.sqrt(iteration + 1.0))
            time_price = _on_simplex(time_price + step * up_time)
            memory_price = np.maximum(memory_price + step * unit * up_memory, 0.0)
    return best * (1.0 - _ROUNDING)


def streaming_bound(problem: Problem, path: list[int]) -> float:
    """Least time in which fractions of the groups can be worked off where weights may travel.

    As `_balanced`, with more that no step can be shorter than: the work of each device, the ops on
    a path, which come one after the other wherever they are, and for each memory the time that the
    weights take to get there which are not at home in it. For any prices of these that add up to
    1, and any prices of a byte of memory, the sum over groups of what each pays at least, less the
    price of all memory, is a bound. What several groups read counts for each with its share.
    """
    if problem.homes is None:
        return 0.0
    costs = _StreamCosts.of(problem, path)
    devices = problem.num_devices
    prices = np.full(2 * devices + 1, 1.0 / (2 * devices + 1))
    # Each memory has one window and one price: that of the first device that uses it.
    pools = problem.cluster.pool_of_device
    first = pools == np.arange(devices)
    prices[devices : 2 * devices][~first] = 0.0
    prices /= prices.sum()
    memory = np.zeros(devices)
    best = 0.0
    kept = (prices, memory)
    for _ in range(_ROUNDS):
        prices, memory = kept
        unit = best
        for iteration in range(4 * _ITERATIONS):
            value, up, full = costs.dual(prices, memory)
            if value > best:
                best, kept = value, (prices, memory)
            step_up = up - up.mean()
            length = float(np.sqrt((step_up**2).sum() + ((unit * full) ** 2).sum()))
            if length == 0:
                break
            step = 0.5 / (length * np.sqrt(iteration + 1.0))
            prices = _on_simplex(prices + step * step_up)
            memory = np.maximum(memory + step * unit * unit * full, 0.0)
    return best * (1.0 - _ROUNDING)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StreamCosts:
    """G groups on D devices, in P pairs with the homes of weights that they read."""

    seconds: FloatArray
    """[G, D] of a device's time, as a share of all its slots; infinite where it may not be."""
    path: FloatArray
    """[G, D] seconds of its ops on the path."""
    unit: IndexArray
    """[P]"""
    share: FloatArray
    """[P, D] of each memory that the home takes, this group's part of it; infinite where the home
    may not be there."""
    travel: FloatArray
    """[P, D] seconds until the weights are there, likewise."""
    pools: IndexArray
    """[D]"""

    @staticmethod
    def of(problem: Problem, path: list[int]) -> _StreamCosts:
        cluster, group_of = problem.cluster, problem.grouping.group_of
        slots = np.array([device.kind.slots for device in cluster.devices])
        allowed = problem.allowed
        seconds = _group_sums(problem, problem.busy_seconds).T / slots
        on_path = np.zeros(seconds.shape)
        busy = np.where(np.isfinite(problem.busy_seconds), problem.busy_seconds, 0.0)
        np.add.at(on_path, group_of[path], busy[:, path].T)
        weights = unit_weights(problem)
        pairs = [(unit, home, size) for unit, of in weights.items() for home, size in of.items()]
        units, homes, sizes = (
            np.array([pair[i] for pair in pairs], dtype=np.int64) for i in range(3)
        )
        readers = np.bincount(homes, minlength=problem.num_groups)[homes]
        per_byte = np.where(
            np.eye(problem.num_devices, dtype=np.bool_), np.inf, cluster.routes.seconds_per_byte
        ).min(axis=0)
        per_byte = np.where(np.isfinite(per_byte), per_byte, 0.0)
        resident = problem.group_resident_bytes[homes] / readers
        share = resident[:, np.newaxis] / cluster.pool_bytes
        return _StreamCosts(
            seconds=np.where(allowed, seconds, np.inf),
            path=on_path,
            unit=units.astype(np.int32),
            share=np.where(allowed[homes], share, np.inf),
            travel=(sizes / readers)[:, np.newaxis] * per_byte,
            pools=cluster.pool_of_device,
        )

    def dual(self, prices: FloatArray, memory: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """The bound at these prices, and how much each of what they are for is used: the times, and
        what of each memory beyond all of it."""
        groups, devices = self.seconds.shape
        time, link, path = prices[:devices], prices[devices:-1], prices[-1]
        with np.errstate(invalid="ignore"):
            stays = np.where(np.isinf(self.share), np.inf, memory[self.pools] * self.share)
        travels = link[self.pools] * self.travel
        cost = np.where(np.isinf(self.seconds), np.inf, 0.0)
        cost += time * np.where(np.isinf(self.seconds), 0.0, self.seconds) + path * self.path
        np.add.at(cost, self.unit, np.minimum(stays, travels))
        choice = np.argmin(cost, axis=1)
        every = np.arange(groups)
        first = self.pools == np.arange(devices)
        value = float(cost[every, choice].sum() - memory[first].sum())
        used = np.zeros(2 * devices + 1)
        np.add.at(used, choice, self.seconds[every, choice])
        used[-1] = self.path[every, choice].sum()
        full = np.where(first, -1.0, 0.0)
        if len(self.unit):
            where = choice[self.unit]
            pairs = np.arange(len(where))
            at_home = stays[pairs, where] <= travels[pairs, where]
            pool = self.pools[where]
            np.add.at(full, pool[at_home], self.share[pairs, where][at_home])
            np.add.at(used, devices + pool[~at_home], self.travel[pairs, where][~at_home])
        return value, used, full


def _on_simplex(values: FloatArray) -> FloatArray:
    """The nearest point whose parts are not negative and add up to 1."""
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - 1.0) / np.arange(1, len(values) + 1)
    shift = excess[np.flatnonzero(ordered > excess)[-1]]
    return np.asarray(np.maximum(values - shift, 0.0), dtype=np.float64)


def _longest_step(problem: Problem, flow: Flow) -> float:
    """More than any placement can take: nothing at the same time as anything else."""
    seconds = problem.busy_seconds
    work = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=0).sum()
    work += problem.issue_seconds.max(axis=0).sum()
    routes = problem.cluster.routes
    sizes = np.append(problem.graph.tensor_bytes, 0)[flow.use_tensor].astype(np.float64)
    latency = len(sizes) * routes.latency_seconds.max()
    return float(work + latency + sizes.sum() * routes.seconds_per_byte.max())


# --- memory --------------------------------------------------------------------------------------


def _most_memory(problem: Problem, flow: Flow, path: list[int]) -> tuple[FloatArray, int]:
    """[G] bytes that each group's device must hold for it at one moment, and the op then running.

    Any moment gives a valid bound; the ops of the critical path are tried, because most ops come
    either before or after them.
    """
    best = (-1.0, np.zeros(problem.num_groups), path[0])
    for i in np.unique(np.linspace(0, len(path) - 1, _MOMENTS).astype(int)):
        needs = _needs_while(problem, flow, path[i])
        if needs.sum() > best[0]:
            best = (float(needs.sum()), needs, path[i])
    return best[1], best[2]


def _needs_while(problem: Problem, flow: Flow, op: int) -> FloatArray:
    """[G] bytes each group's device must hold for it while `op` runs.

    That is its variables, and what an op before `op` has made for one of the group behind it. The
    memory is at least what it is on the device where it is made. A buffer that several groups wait
    for is counted for one, since they may share a device.
    """
    needs = problem.group_resident_bytes.astype(np.float64)
    earlier, later = _reach(flow.use_producer, flow.use_op, problem.graph.num_ops, op)
    use_buffer = flow.use_buffer
    across = (use_buffer >= 0) & earlier[flow.use_producer] & later[flow.use_op]
    buffers, where = np.unique(use_buffer[across], return_index=True)
    users = flow.use_op[across][where]
    made = np.setdiff1d(np.flatnonzero(flow.buffer_op == op), buffers)
    np.add.at(needs, problem.grouping.group_of[users], flow.home_bytes[buffers])
    needs[problem.grouping.group_of[op]] += flow.home_bytes[made].sum()
    return needs


@compiled
def _reach(
    producer: IndexArray, user: IndexArray, num_ops: int, op: int
) -> tuple[BoolArray, BoolArray]:
    """Which ops end before `op` starts, whatever the placement, and which end with it or later."""
    earlier = np.zeros(num_ops, np.bool_)
    later = np.zeros(num_ops, np.bool_)
    earlier[op] = later[op] = True
    for i in range(producer.size):
        later[user[i]] |= later[producer[i]]
    for i in range(producer.size - 1, -1, -1):
        earlier[producer[i]] |= earlier[user[i]]
    earlier[op] = False
    return earlier, later


def _needs_alone(problem: Problem, flow: Flow) -> FloatArray:
    """[G] bytes a device must have for the group's variables and the largest of its ops."""
    use_buffer = flow.use_buffer
    held = use_buffer >= 0
    reads = np.stack([flow.use_op[held], use_buffer[held]])
    makes = np.stack([flow.buffer_op, np.arange(len(flow.buffer_op))])
    ops, buffers = np.unique(np.concatenate([reads, makes], axis=1), axis=1)
    # Weights that are elsewhere have to come, and those that do not are at home there.
    sizes = flow.home_bytes
    if problem.visits is not None:
        weights = np.arange(len(sizes)) >= len(sizes) - len(problem.visits)
        sizes = np.where(weights, flow.copy_bytes, sizes)
    running = np.zeros(problem.graph.num_ops)
    reading = problem.grouping.group_of[ops] != problem.grouping.group_of[flow.buffer_op[buffers]]
    np.add.at(running, ops, np.where(reading, sizes[buffers], flow.home_bytes[buffers]))
    largest = np.zeros(problem.num_groups)
    np.maximum.at(largest, problem.grouping.group_of, running)
    return problem.group_resident_bytes + largest


def _why_nothing_fits(
    problem: Problem, needs: FloatArray, moment: int, least: FloatArray
) -> str | None:
    memory = problem.cluster.pool_bytes.astype(np.float64)
    together = memory[np.unique(problem.cluster.pool_of_device)].sum()
    total, resident = needs.sum(), problem.group_resident_bytes.sum()
    if total > together:
        return (
            f"the model needs at least {format_bytes(total)} ({format_bytes(resident)} of "
            f"variables and {format_bytes(total - resident)} of tensors alive while "
            f"{problem.graph.op_names[moment]!r} runs), the devices have "
            f"{format_bytes(together)} together"
        )
    room = np.where(problem.allowed, memory, 0.0).max(axis=1)
    too_large = np.flatnonzero((least > room) & problem.allowed.any(axis=1))
    if too_large.size:
        group = int(too_large[np.argmax(least[too_large])])
        return (
            f"group {problem.grouping.names[group]!r} alone needs {format_bytes(least[group])}, "
            f"the largest device it can run on has {format_bytes(room[group])}"
        )
    return None
