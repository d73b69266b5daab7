"""Groups and the bytes between them: what several placers work on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from placewright.graph import FloatArray, IndexArray, IntArray
from placewright.grouping import edges_between
from placewright.problem import Problem


class GroupGraph(NamedTuple):
    """Which groups exchange tensors, in both directions together; G groups, E pairs, each twice."""

    offsets: IntArray
    """[G + 1] neighbours of group g: neighbour[offsets[g] : offsets[g + 1]]."""
    neighbour: IntArray
    """[E]"""
    edges: IntArray
    """[E] how many edges of the graph there are between the two."""
    transfers: IntArray
    """[E] how many transfers there are if the two groups are on different devices."""
    bytes: IntArray
    """[E] and how many bytes they move."""
    cost: FloatArray
    """[E] the bytes, with the latency of a transfer counted as the bytes that could be sent in it.

    Most tensors of a recurrent net are small: what they cost is latency, not bytes.
    """


def group_graph(problem: Problem) -> GroupGraph:
    """The edges between groups, added up."""
    groups = problem.num_groups
    edges = edges_between(problem.graph, problem.grouping)
    one_way, other_way = edges.src * groups + edges.dst, edges.dst * groups + edges.src
    keys, inverse = np.unique(np.concatenate([one_way, other_way]), return_inverse=True)
    once = inverse.reshape(2, -1)[:, edges.transfers]  # [2, T] both ways
    transfers = np.bincount(once.ravel(), minlength=len(keys))
    totals = np.zeros(len(keys), dtype=np.int64)
    np.add.at(totals, once.ravel(), np.tile(edges.bytes[edges.transfers], 2))

    different = ~np.eye(problem.num_devices, dtype=np.bool_)
    routes = problem.cluster.routes
    per_byte = routes.seconds_per_byte[different].sum()
    latency_bytes = routes.latency_seconds[different].sum() / per_byte if per_byte else 0.0
    return GroupGraph(
        offsets=np.searchsorted(keys // groups, np.arange(groups + 1)),
        neighbour=keys % groups,
        edges=np.bincount(inverse, minlength=len(keys)),
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
