"""Step times that no placement can beat, and proofs that none fits into memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray
from placewright.problem import Problem
from placewright.simulator.flow import Flow
from placewright.simulator.kernel import compiled
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

    @property
    def best(self) -> float:
        return max(self.critical_path_seconds, self.work_seconds, self.memory_seconds)


def lower_bounds(problem: Problem) -> LowerBounds:
    flow = Flow.of(problem.graph)
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
    if problem.cluster.issue == "host":
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
    running = np.zeros(problem.graph.num_ops)
    np.add.at(running, ops, flow.home_bytes[buffers])
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
