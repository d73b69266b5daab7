"""What the policy sees of a problem: one row of numbers for each group, one for each device.

Groups are in topological order (by their first op; weights with homes of their own by their first
reader), which is the order the policy reads and places them in; `order` leads back to the problem's
own numbers. Everything is relative to the problem (its total work, its devices' memory), so that
numbers of one graph mean the same on another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray
from placewright.grouping import edges_between
from placewright.placers.memory import group_bytes
from placewright.problem import Problem

SHAPES = 4
"""Output shapes of a group that are listed: those of its largest tensors."""
DIMS = 4
"""Dimensions of each shape that are listed; the missing ones are 0."""
TYPE_BUCKETS = 64
"""Places for op types that are not in the vocabulary, shared by hash."""
EXTRAS = 6
"""Columns of `Features.extras_GX`."""
DEVICE_COLUMNS = 5
"""Columns of `Features.devices_DF`."""

Array32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """G groups in topological order, D devices, V op types and buckets."""

    order: IndexArray
    """[G] the problem's number of the group at each position."""
    types_GV: Array32
    """How many ops of each type, in tens."""
    log_types_GV: Array32
    """The same as logarithms of 1 + count, scaled to length 1."""
    shapes_GS: Array32
    """Sizes of the dimensions of the largest outputs, in thousands."""
    log_shapes_GS: Array32
    """The same as logarithms: a batch of 64 and a vocabulary of 40,000 on one scale."""
    feeds_GG: Array32
    """[g, h] whether h feeds g."""
    sends_GG: Array32
    """[g, h] what share of the traffic out of g goes to h; rows sum to 1, or 0 without traffic."""
    receives_GG: Array32
    """[g, h] what share of the traffic into g comes from h; likewise."""
    traffic_GG: Array32
    """[g, h] what share of all traffic of g, in both directions, is with h; likewise."""
    extras_GX: Array32
    """Work, memory, traffic and position; see `_extras`."""
    devices_DF: Array32
    """What each device is; see `_devices`."""
    work_GD: Array32
    """Seconds of a group on a device as a share of a device's fair share of all work. Where the
    group cannot run: as on its slowest device."""
    slower_GD: Array32
    """Logarithm of how many times longer a group takes on a device than on its best."""
    memory_GD: Array32
    """Memory of a group as a share of what the device has."""
    allowed_GD: BoolArray


def vocabulary(problems: Sequence[Problem]) -> tuple[str, ...]:
    """The op types of these problems' graphs, in alphabetical order."""
    return tuple(sorted({kind for problem in problems for kind in problem.graph.op_types}))


def features(problem: Problem, types: Sequence[str]) -> Features:
    """The features of a problem for a policy whose vocabulary is `types`."""
    groups = problem.num_groups
    order = np.argsort(_turns(problem), kind="stable").astype(np.int32)
    position = np.empty(groups, dtype=np.int64)
    position[order] = np.arange(groups)

    counts = _types(problem, position, types)
    log_counts = np.log1p(counts)
    length = np.linalg.norm(log_counts, axis=1, keepdims=True)
    traffic = _traffic(problem, position)
    shapes = _shapes(problem, position)
    seconds = problem.group_seconds.T[order]  # [G, D]
    finite = np.isfinite(seconds)
    seconds = np.where(finite, seconds, np.where(finite, seconds, 0).max(axis=1, keepdims=True))
    fastest = seconds.min(axis=1, keepdims=True)
    fair_share = max(float(fastest.sum()) / problem.num_devices, 1e-12)
    memory = group_bytes(problem)[order].astype(np.float64)
    capacity = np.array([device.memory_bytes for device in problem.cluster.devices], np.float64)
    return Features(
        order=order,
        types_GV=(counts / 10).astype(np.float32),
        log_types_GV=(log_counts / np.maximum(length, 1e-12)).astype(np.float32),
        shapes_GS=(shapes / 1000).astype(np.float32),
        log_shapes_GS=(np.log2(1 + shapes) / 10).astype(np.float32),
        feeds_GG=(traffic.T > 0).astype(np.float32),
        sends_GG=_shares(traffic),
        receives_GG=_shares(traffic.T),
        traffic_GG=_shares(traffic + traffic.T),
        extras_GX=_extras(problem, fastest[:, 0], memory, capacity, traffic),
        devices_DF=_devices(problem, seconds, capacity),
        work_GD=(seconds / fair_share).astype(np.float32),
        slower_GD=np.log(np.maximum(seconds, 1e-12) / np.maximum(fastest, 1e-12)).astype(
            np.float32
        ),
        memory_GD=(memory[:, None] / capacity[None, :]).astype(np.float32),
        allowed_GD=problem.allowed[order],
    )


def _turns(problem: Problem) -> IntArray:
    """[G] by which groups are ordered: their first op; for weights that may be elsewhere, right
    before the first op that reads them, as the two decisions hang together."""
    graph, group_of = problem.graph, problem.grouping.group_of
    first = np.full(problem.num_groups, 2 * graph.num_ops)
    np.minimum.at(first, group_of, 2 * np.arange(graph.num_ops) + 1)
    visits = problem.visits
    if visits is not None and len(visits):
        homes = np.unique(group_of[visits.owner])
        read = np.full(problem.num_groups, 2 * graph.num_ops)
        np.minimum.at(read, group_of[visits.owner], 2 * visits.first.astype(np.int64))
        first[homes] = read[homes]
    return first


def _types(problem: Problem, position: npt.NDArray[np.int64], types: Sequence[str]) -> FloatArray:
    """[G, V] number of ops of each type."""
    column = {kind: number for number, kind in enumerate(types)}
    for kind in set(problem.graph.op_types) - set(types):
        digest = hashlib.blake2b(kind.encode(), digest_size=8).digest()
        column[kind] = len(types) + int.from_bytes(digest, "little") % TYPE_BUCKETS
    counts = np.zeros((problem.num_groups, len(types) + TYPE_BUCKETS))
    rows = position[problem.grouping.group_of]
    columns = np.array([column[kind] for kind in problem.graph.op_types], dtype=np.int64)
    np.add.at(counts, (rows, columns), 1.0)
    return counts


def _shapes(problem: Problem, position: npt.NDArray[np.int64]) -> FloatArray:
    """[G, SHAPES * DIMS] dimensions of each group's largest outputs, largest first."""
    graph = problem.graph
    table = np.zeros((problem.num_groups, SHAPES, DIMS))
    listed: list[set[tuple[int, ...]]] = [set() for _ in range(problem.num_groups)]
    group = position[problem.grouping.group_of[graph.tensor_producer]]
    for tensor in np.argsort(-graph.tensor_bytes, kind="stable").tolist():
        shape, row = graph.tensor_shapes[tensor], int(group[tensor])
        # A group has hundreds of tensors of the same shape; it is listed once.
        if not shape or len(listed[row]) == SHAPES or shape in listed[row]:
            continue
        last = shape[-DIMS:]
        table[row, len(listed[row]), : len(last)] = last
        listed[row].add(shape)
    return table.reshape(problem.num_groups, -1)


def _traffic(problem: Problem, position: npt.NDArray[np.int64]) -> FloatArray:
    """[g, h] seconds to send what g sends to h over a typical route: latency counts as well."""
    edges = edges_between(problem.graph, problem.grouping)
    once = edges.transfers
    routes, different = problem.cluster.routes, ~np.eye(problem.num_devices, dtype=np.bool_)
    latency = routes.latency_seconds[different].mean() if different.any() else 0.0
    per_byte = routes.seconds_per_byte[different].mean() if different.any() else 0.0
    traffic = np.zeros((problem.num_groups, problem.num_groups))
    # Free transfers still are edges: never quite 0.
    seconds = latency + edges.bytes[once] * per_byte + 1e-12
    np.add.at(traffic, (position[edges.src[once]], position[edges.dst[once]]), seconds)
    return traffic


def _shares(traffic: FloatArray) -> Array32:
    total = traffic.sum(axis=1, keepdims=True)
    shares = np.divide(traffic, total, out=np.zeros_like(traffic), where=total > 0)
    return np.asarray(shares, dtype=np.float32)


def _extras(
    problem: Problem,
    fastest: FloatArray,
    memory: FloatArray,
    capacity: FloatArray,
    traffic: FloatArray,
) -> Array32:
    """[G, EXTRAS] share of the work, of a device's memory, traffic in and out against the work,
    position, number of neighbours."""
    groups, total = len(fastest), max(float(fastest.sum()), 1e-12)
    columns = [
        np.sqrt(fastest / total * groups),
        memory / capacity.max(),
        np.log1p(traffic.sum(axis=0) / total * groups),
        np.log1p(traffic.sum(axis=1) / total * groups),
        np.arange(groups) / max(groups - 1, 1),
        np.log1p(((traffic + traffic.T) > 0).sum(axis=1)) / 5,
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def _devices(problem: Problem, seconds: FloatArray, capacity: FloatArray) -> Array32:
    """[D, DEVICE_COLUMNS] speed and memory against the best device's, whether it is a CPU, mean
    transfer time to the others against the work, number of devices."""
    cluster = problem.cluster
    count = cluster.num_devices
    total = seconds.sum(axis=0)
    others = max(count - 1, 1)
    transfer = (cluster.routes.latency_seconds + 1e6 * cluster.routes.seconds_per_byte).sum(axis=1)
    columns = [
        np.log(np.maximum(total, 1e-12) / max(total.min(), 1e-12)),
        capacity / capacity.max(),
        np.array([float(device.type == "cpu") for device in cluster.devices]),
        np.log1p(transfer / others / max(total.min(), 1e-12) * len(seconds)),
        np.full(count, 1 / count),
    ]
    return np.stack(columns, axis=1).astype(np.float32)
