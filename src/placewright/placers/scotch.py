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
from typing import Any

import numpy as np

from placewright.errors import MissingExtraError
from placewright.graph import IntArray
from placewright.placement import Placement
from placewright.placers.group_graph import (
    GroupGraph,
    group_graph,
    group_loads,
    relative_speeds,
    scaled,
    to_allowed,
)
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
