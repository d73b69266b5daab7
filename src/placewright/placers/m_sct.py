"""m-SCT: small communication times, within the devices' memory.

Jeon et al.: "Baechi: fast device placement of machine learning graphs", SoCC 2020; after Hanen and
Munier: "An approximation algorithm for scheduling dependent tasks on m processors with small
communication delays", 1995.

A linear program for unlimited devices finds each op's *favourite child*, the consumer that should
run right after it on the same device. ETF follows, and keeps a device free for the favourite child
of the op it ran last.
"""

from __future__ import annotations

import numpy as np

from placewright.errors import MissingExtraError
from placewright.graph import BoolArray, FloatArray, IntArray
from placewright.placement import Placement
from placewright.placers._schedule import mean_link, producer_order
from placewright.placers.group_graph import group_graph
from placewright.placers.m_etf import schedule_earliest
from placewright.placers.single_device import accelerators
from placewright.problem import Problem

_LARGEST_PROGRAM = 20_000
"""Variables (tasks and edges) that a linear program may have; this takes a second or two."""

_SAVING = 1e-3
"""Weight of the transfers that favourites save against the length of the step. The length alone
leaves open who is favourite off the critical path."""


def m_sct(problem: Problem) -> list[Placement]:
    """ETF with favourite children.

    The linear program is Baechi's where the graph is small enough. In a larger one it is about
    groups instead of ops: every op prefers its consumers in the favourite child of its group. There
    edges back to a group that began earlier (as gradients go) would close cycles; they only add to
    the bytes between the two groups.
    """
    graph = problem.graph
    of = problem.grouping.group_of
    by_producer = producer_order(problem)
    src, dst = graph.edge_src[by_producer], graph.edge_dst[by_producer]
    latency, per_byte = mean_link(problem, accelerators(problem))
    if graph.num_ops + graph.num_edges <= _LARGEST_PROGRAM:
        tensor = graph.edge_tensor[by_producer]
        sizes = np.where(tensor >= 0, np.append(graph.tensor_bytes, 0)[tensor], 0)
        # Parallel edges are one: all that an op hands to another.
        keys, pair = np.unique(src.astype(np.int64) * graph.num_ops + dst, return_inverse=True)
        parent, child = keys // graph.num_ops, keys % graph.num_ops
        transfer = np.asarray(latency + np.bincount(pair, weights=sizes) * per_byte, np.float64)
        transfer[of[parent] == of[child]] = 0.0  # stays on its device
        chosen = favourites(_mean_seconds(problem.op_seconds), parent, child, transfer)
        favourite = chosen[pair]
    else:
        groups = group_graph(problem)
        owner = np.repeat(np.arange(problem.num_groups), np.diff(groups.offsets))
        forward = owner < groups.neighbour  # groups are numbered by where they begin
        parent, child = owner[forward], groups.neighbour[forward]
        transfer = np.asarray(
            groups.transfers[forward] * latency + groups.bytes[forward] * per_byte, np.float64
        )
        chosen = favourites(_mean_seconds(problem.group_seconds), parent, child, transfer)
        favourite_of = np.full(problem.num_groups, -1, dtype=np.int64)
        favourite_of[parent[chosen]] = child[chosen]
        favourite = favourite_of[of[src]] == of[dst]
    return [schedule_earliest(problem, favourite)]


def _mean_seconds(seconds: FloatArray) -> FloatArray:
    """[N] mean over the devices that have a kernel, of [D, N]."""
    finite = np.isfinite(seconds)
    return np.asarray(
        np.where(finite, seconds, 0.0).sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
    )


def favourites(
    seconds: FloatArray, parent: IntArray, child: IntArray, transfer: FloatArray
) -> BoolArray:
    """[E] whether the child of an edge is the favourite of its parent.

    Minimises the length of the step, w. Task i starts at s_i; x_ij is 0 where j is the favourite
    child of i and 1 elsewhere, relaxed to the numbers in between:

        s_i + seconds_i + transfer_ij * x_ij <= s_j,    s_i + seconds_i <= w,
        sum over children j of x_ij >= children - 1,    and the same over parents.

    If two edges of a task were both below 1/2, a sum would be violated; so rounding leaves each
    with at most one favourite child, and as the favourite of at most one parent.

    Of a program that is too large, the edges with the longest transfers are taken instead.
    """
    tasks, edges = len(seconds), len(parent)
    if edges == 0 or tasks + edges > _LARGEST_PROGRAM:
        return _heaviest(tasks, parent, child, transfer)
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError:
        raise MissingExtraError("the m-sct placer", "placers") from None

    # To a solver with absolute tolerances seconds are tiny numbers; here the mean task takes 1.
    unit = float(seconds.mean()) or 1.0
    seconds, transfer = seconds / unit, transfer / unit
    # Columns: x of each edge, s of each task, w.
    x, s, w = np.arange(edges), edges + np.arange(tasks), edges + tasks
    by_parent, by_child = np.argsort(parent, kind="stable"), np.argsort(child, kind="stable")
    children = np.unique(parent, return_counts=True)[1]
    parents = np.unique(child, return_counts=True)[1]
    one = np.ones(edges)
    # Rows, all of the form "columns x values >= bound": [..., columns], values, sizes, bounds.
    rows = [
        (np.stack([s[child], s[parent], x], axis=1), np.stack([one, -one, -transfer], axis=1),
         np.full(edges, 3), seconds[parent]),
        (np.stack([np.full(tasks, w), s], axis=1), np.tile([1.0, -1.0], (tasks, 1)),
         np.full(tasks, 2), seconds),
        (x[by_parent], one, children, children - 1.0),
        (x[by_child], one, parents, parents - 1.0),
    ]  # fmt: skip

    values = np.concatenate([values.reshape(-1) for _, values, _, _ in rows])
    columns = np.concatenate([columns.reshape(-1) for columns, _, _, _ in rows])
    starts = np.concatenate([[0], *(sizes for _, _, sizes, _ in rows)]).cumsum()
    saving = _SAVING * transfer * (seconds.sum() / max(transfer.sum(), 1e-12))
    # HiGHS by way of SciPy, whose rows are of the form "at most".
    solution = linprog(
        np.concatenate([saving, np.zeros(tasks), [1.0]]),
        A_ub=csr_array((-values, columns, starts), shape=(len(starts) - 1, w + 1)),
        b_ub=-np.concatenate([bounds for _, _, _, bounds in rows]),
        bounds=np.stack(
            [np.zeros(w + 1), np.concatenate([one, np.full(tasks + 1, np.inf)])], axis=1
        ),
        method="highs",
    )
    if not solution.success:
        return _heaviest(tasks, parent, child, transfer)
    # A little less than 1/2, since the solver keeps to the sums only up to its tolerance.
    return np.asarray(solution.x[:edges] < 0.499)


def _heaviest(tasks: int, parent: IntArray, child: IntArray, transfer: FloatArray) -> BoolArray:
    """[E] edges from the longest transfer down, as long as neither end has a favourite yet."""
    has_child = [False] * tasks
    has_parent = [False] * tasks
    chosen = np.zeros(len(parent), dtype=np.bool_)
    for e in np.argsort(-transfer, kind="stable").tolist():
        if not has_child[parent[e]] and not has_parent[child[e]]:
            has_child[parent[e]] = has_parent[child[e]] = chosen[e] = True
    return chosen
