"""Scotch: static mapping of the groups onto the machine, by the Scotch library itself.

Pellegrini, Roman: "Scotch: a software package for static mapping by dual recursive bipartitioning
of process and architecture graphs", HPCN 1996.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from placewright.errors import MissingExtraError
from placewright.graph import FloatArray, IndexArray, IntArray
from placewright.placement import Placement
from placewright.problem import Problem

_DETERMINISTIC = 0
"""Number of the option SCOTCH_OPTIONNUMDETERMINISTIC, which pyscotch does not name."""

_IMBALANCE = 0.05
"""How far the load of a device may be above its share; Scotch's programs use the same. The 1% of
its library leaves little choice where a few large groups make up most of the work."""


def scotch(problem: Problem) -> list[Placement]:
    """Maps the group graph onto all devices: load in proportion to speed, few bytes on slow links.

    A group that can only go to one device is fixed there before mapping. One that may go to some
    devices but was mapped to another is moved to its fastest allowed one afterwards, as Scotch has
    no way to say so.
    """
    if problem.num_devices == 1:
        return [Placement.of(problem, [0] * problem.num_groups)]
    graph = group_graph(problem)
    every = np.arange(problem.num_devices, dtype=np.int32)
    speeds = relative_speeds(problem, every)
    loads = group_loads(problem, every, speeds)
    fixed = np.where(problem.allowed.sum(axis=1) == 1, problem.allowed.argmax(axis=1), -1)
    devices = _map(
        graph,
        scaled(loads, total=1 << 30),
        scaled(graph.cost, total=1 << 40),
        scaled(speeds, total=1 << 20),
        _distances(problem, graph),
        fixed,
    )
    return [Placement.of(problem, to_allowed(problem, devices.astype(np.int32)))]


# --- what the partitioners work on (MinCut too) --------------------------------------------------


class GroupGraph(NamedTuple):
    """Which groups exchange tensors, in both directions together; G groups, E pairs, each twice."""

    offsets: IntArray
    """[G + 1] neighbours of group g: neighbour[offsets[g] : offsets[g + 1]]."""
    neighbour: IntArray
    """[E]"""
    transfers: IntArray
    """[E] how many transfers there are if the two groups are on different devices."""
    bytes: IntArray
    """[E] and how many bytes they move."""
    cost: FloatArray
    """[E] the bytes, with the latency of a transfer counted as the bytes that could be sent in it.

    Most tensors of a recurrent net are small: what they cost is latency, not bytes.
    """


def group_graph(problem: Problem) -> GroupGraph:
    """A tensor goes once to each group that uses it; an op's completion likewise."""
    graph, groups = problem.graph, problem.num_groups
    src = problem.grouping.group_of[graph.edge_src].astype(np.int64)
    dst = problem.grouping.group_of[graph.edge_dst].astype(np.int64)
    # Control edges carry the op's completion: one more thing an op hands out, of no bytes.
    item = np.where(
        graph.edge_tensor >= 0, graph.edge_tensor, graph.num_tensors + graph.edge_src
    ).astype(np.int64)
    outside = src != dst
    _, first = np.unique(item[outside] * groups + dst[outside], return_index=True)
    kept = np.flatnonzero(outside)[first]
    sizes = np.zeros(len(kept), dtype=np.int64)
    data = graph.edge_tensor[kept] >= 0
    sizes[data] = graph.tensor_bytes[graph.edge_tensor[kept[data]]]

    both = np.concatenate([src[kept] * groups + dst[kept], dst[kept] * groups + src[kept]])
    keys, inverse = np.unique(both, return_inverse=True)
    transfers = np.bincount(inverse, minlength=len(keys))
    totals = np.zeros(len(keys), dtype=np.int64)
    np.add.at(totals, inverse, np.concatenate([sizes, sizes]))

    different = ~np.eye(problem.num_devices, dtype=np.bool_)
    routes = problem.cluster.routes
    per_byte = routes.seconds_per_byte[different].sum()
    latency_bytes = routes.latency_seconds[different].sum() / per_byte if per_byte else 0.0
    return GroupGraph(
        offsets=np.searchsorted(keys // groups, np.arange(groups + 1)),
        neighbour=keys % groups,
        transfers=transfers,
        bytes=totals,
        cost=np.asarray(totals + transfers * latency_bytes, dtype=np.float64),
    )


def relative_speeds(problem: Problem, devices: IndexArray) -> FloatArray:
    """[len(devices)] how much of the model each would do in the same time, of 1 in all.

    Judged by the ops that all of them can run. Slots do not count: a device that runs several ops
    at a time is no faster when these wait for one another, as most of a model's ops do, and to give
    a CPU less makes for better placements.
    """
    seconds = problem.op_seconds[devices]
    totals = seconds[:, np.isfinite(seconds).all(axis=0)].sum(axis=1)
    speeds = 1.0 / totals if (totals > 0).all() else np.ones(len(devices))
    return np.asarray(speeds / speeds.sum(), dtype=np.float64)


def group_loads(problem: Problem, devices: IndexArray, speeds: FloatArray) -> FloatArray:
    """[G] work of each group: its seconds on a device times the speed, mean over the devices it may
    go to. The partitioners take work divided by speed for the time it takes."""
    allowed = problem.allowed[:, devices]
    work = np.where(allowed, problem.group_seconds[devices].T * speeds, 0.0)
    return np.asarray(work.sum(axis=1) / np.maximum(allowed.sum(axis=1), 1), dtype=np.float64)


def scaled(values: FloatArray, *, total: int) -> IntArray:
    """Whole numbers in proportion, at least 1 each, with about this sum: the partitioners calculate
    in integers and must not overflow."""
    sum_ = float(values.sum())
    shares = values / sum_ if sum_ > 0 else np.zeros(len(values))
    return np.maximum(np.rint(shares * total), 1).astype(np.int64)


def to_allowed(problem: Problem, devices: IndexArray) -> IndexArray:
    """[G] moves groups off devices they may not be on, to their fastest, of equals the idlest."""
    result = devices.copy()
    groups = np.arange(problem.num_groups)
    wrong = ~problem.allowed[groups, devices]
    load = np.zeros(problem.num_devices)
    np.add.at(load, devices[~wrong], problem.group_seconds[devices, groups][~wrong])
    for group in np.flatnonzero(wrong):
        options = np.flatnonzero(problem.allowed[group])
        seconds = problem.group_seconds[options, group]
        best = options[np.lexsort((load[options], seconds))[0]]
        result[group] = best
        load[best] += problem.group_seconds[best, group]
    return result


# --- Scotch --------------------------------------------------------------------------------------


def _distances(problem: Problem, graph: GroupGraph) -> IntArray:
    """[D, D] relative time of a typical transfer, as small whole numbers; Scotch multiplies the
    cost of an edge by the distance it is stretched over."""
    routes = problem.cluster.routes
    typical = graph.bytes.sum() / max(int(graph.transfers.sum()), 1)
    seconds = routes.latency_seconds + typical * routes.seconds_per_byte
    different = ~np.eye(problem.num_devices, dtype=np.bool_)
    nearest = seconds[different].min()
    if nearest <= 0:
        return different.astype(np.int64)
    steps = np.rint(10 * seconds / nearest).astype(np.int64)
    return np.where(different, np.clip(steps, 1, 10_000), 0)


def _architecture(speeds: IntArray, distances: IntArray) -> str:
    """The machine as a target file of Scotch's type `deco 0`: the devices with their speeds as
    leaves of a binary tree of domains, and the distances between them.

    Scotch splits groups and domains in step, so devices that are near each other have to be split
    last: the tree joins the nearest first, small clusters before large ones to keep it balanced.
    """

    def spread(a: list[int], b: list[int]) -> float:
        return float(distances[np.ix_(a, b)].mean()) * len(a + b)

    clusters: list[Any] = list(range(len(speeds)))  # a device, or a pair of clusters
    members = [[d] for d in clusters]
    while len(clusters) > 1:
        pairs = [(a, b) for b in range(len(clusters)) for a in range(b)]
        a, b = min(pairs, key=lambda pair: spread(members[pair[0]], members[pair[1]]))
        joined, ends = (clusters[a], clusters[b]), members[a] + members[b]
        clusters = [c for k, c in enumerate(clusters) if k not in (a, b)] + [joined]
        members = [m for k, m in enumerate(members) if k not in (a, b)] + [ends]

    # Domains are numbered as in a heap: the root is 1, the halves of domain i are 2i and 2i + 1.
    domain = {}
    stack = [(clusters[0], 1)]
    while stack:
        cluster, number = stack.pop()
        if isinstance(cluster, tuple):
            stack += [(cluster[0], 2 * number), (cluster[1], 2 * number + 1)]
        else:
            domain[cluster] = number
    lines = ["deco 0", f"{len(speeds)} {max(domain.values())}"]
    lines += [f"{d} {speed} {domain[d]}" for d, speed in enumerate(speeds)]
    lines += [" ".join(str(x) for x in distances[d, :d]) for d in range(1, len(speeds))]
    return "\n".join(lines) + "\n"


def _map(
    groups: GroupGraph,
    loads: IntArray,
    costs: IntArray,
    speeds: IntArray,
    distances: IntArray,
    fixed: IntArray,
) -> IntArray:
    """[G] device of each group."""
    try:
        # It announces itself on stderr; a library has nothing to say there.
        with contextlib.redirect_stderr(io.StringIO()):
            import pyscotch
            from pyscotch import libscotch
    except ImportError:
        raise MissingExtraError("the scotch placer", "placers") from None

    devices = np.array(fixed, dtype=libscotch.get_scotch_dtype())
    with (
        pyscotch.Context() as context,
        pyscotch.Graph() as graph,
        pyscotch.Architecture() as machine,
        tempfile.TemporaryDirectory() as folder,
    ):
        # Else the result depends on the timing of Scotch's threads and on what was mapped before.
        context.option_set(_DETERMINISTIC, 1)
        context.random_reset()
        graph.build(groups.offsets, groups.neighbour, loads, costs)
        file = Path(folder, "machine.tgt")
        file.write_text(_architecture(speeds, distances), "ascii")
        machine.load(file)
        # From here one level down: pyscotch wraps fixed vertices for equal devices only.
        strategy = libscotch.SCOTCH_Strat()
        libscotch.SCOTCH_stratInit(ctypes.byref(strategy))
        try:
            failed = libscotch.SCOTCH_stratGraphMapBuild(
                ctypes.byref(strategy),
                int(pyscotch.StrategyFlags.QUALITY),
                len(speeds),
                _IMBALANCE,
            )
            with context.bind_graph(graph) as bound:
                failed = failed or libscotch.SCOTCH_graphMapFixed(
                    ctypes.byref(bound._graph),
                    ctypes.byref(machine._arch),
                    ctypes.byref(strategy),
                    devices.ctypes.data_as(ctypes.POINTER(libscotch.SCOTCH_Num)),
                )
        finally:
            libscotch.SCOTCH_stratExit(ctypes.byref(strategy))
        if failed:
            raise libscotch.scotch_error("Scotch could not map the groups", failed)
    return devices.astype(np.int64)
