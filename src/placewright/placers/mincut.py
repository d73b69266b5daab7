"""MinCut: the group graph cut into one part per accelerator, with the fewest bytes between parts.

By METIS: Karypis, Kumar: "A fast and high quality multilevel scheme for partitioning irregular
graphs", SIAM Journal on Scientific Computing, 1998.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import numpy as np

from placewright.errors import MissingExtraError
from placewright.graph import FloatArray, IndexArray
from placewright.placement import Placement
from placewright.placers.group_graph import (
    GroupGraph,
    group_graph,
    group_loads,
    relative_speeds,
    scaled,
    to_allowed,
)
from placewright.placers.single_device import accelerators
from placewright.problem import Problem

_IMBALANCE = 0.1
"""How far the load of a device may be above its share. METIS's own 0.1% is for meshes; groups are
few and uneven, and with some freedom it cuts through far fewer bytes."""

_CUTS = 100
"""How many partitions METIS computes to keep the best; graphs of groups are small."""


def mincut(problem: Problem) -> list[Placement]:
    """Parts in proportion to speed. CPUs get only the groups that cannot go to an accelerator.

    A group that may not go to the accelerator of its part moves to its fastest allowed device.
    """
    parts = accelerators(problem)
    devices = problem.allowed.argmax(axis=1).astype(np.int32)
    inside = np.flatnonzero(problem.allowed[:, parts].any(axis=1)).astype(np.int32)
    speeds = relative_speeds(problem, parts)
    loads = group_loads(problem, parts, speeds)
    if len(parts) > 1 and len(inside) > 0:
        part = _partition(_subgraph(group_graph(problem), inside), loads[inside], speeds)
        devices[inside] = parts[part]
    else:
        devices[inside] = parts[0]
    return [Placement.of(problem, to_allowed(problem, devices))]


def _subgraph(graph: GroupGraph, kept: IndexArray) -> GroupGraph:
    """The graph between these groups only, renumbered."""
    groups = len(graph.offsets) - 1
    number = np.full(groups, -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    owner = np.repeat(np.arange(groups), np.diff(graph.offsets))
    edges = (number[owner] >= 0) & (number[graph.neighbour] >= 0)
    return GroupGraph(
        offsets=np.searchsorted(number[owner[edges]], np.arange(len(kept) + 1)),
        neighbour=number[graph.neighbour[edges]],
        edges=graph.edges[edges],
        transfers=graph.transfers[edges],
        bytes=graph.bytes[edges],
        cost=graph.cost[edges],
    )


def _partition(graph: GroupGraph, loads: FloatArray, speeds: FloatArray) -> IndexArray:
    """[G] part of each group."""
    try:
        import pymetis
    except ImportError:
        raise MissingExtraError("the mincut placer", "placers") from None

    dtype = pymetis.zero_copy_dtype()  # 32 bits in most builds: sums have to stay below 2^31
    with _silent_stdout():
        _, part = pymetis.part_graph(
            len(speeds),
            pymetis.CSRAdjacency(graph.offsets.astype(dtype), graph.neighbour.astype(dtype)),
            vweights=scaled(loads, total=1 << 24).astype(dtype),
            eweights=scaled(graph.cost, total=1 << 29).astype(dtype),
            tpwgts=(speeds / speeds.sum()).tolist(),
            # Does better than the k-way method for as few parts as there are devices.
            recursive=True,
            options=pymetis.Options(seed=0, ncuts=_CUTS, ufactor=int(1000 * _IMBALANCE)),
        )
    return np.asarray(part, dtype=np.int32)


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """Keeps off the terminal what METIS prints when it leaves a part empty, which is no fault: a
    group may be so large that it has a device, or several devices' share, to itself."""
    try:
        c_library = ctypes.CDLL(None)
        sys.stdout.flush()
        c_library.fflush(None)
        saved = os.dup(1)
    except (OSError, TypeError, ValueError, AttributeError):  # no such library, or no stdout
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        c_library.fflush(None)  # what it printed is still in its buffer
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
