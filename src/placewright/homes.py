"""Weights with a home of their own, apart from the device that computes with them.

Otherwise a variable is where its readers are. With homes it may be elsewhere: in the memory of the
host, while an accelerator computes. Its bytes then travel in each step, ahead of time and in the
order of use, and as much of them as a window holds is on the way or there at a time.

Home is where a variable, its optimizer state and the ops that update it are. So a placement says
both: one group holds the weights, another computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from placewright.errors import PlacementError
from placewright.graph import BoolArray, Graph, IndexArray, IntArray, Work, frozen
from placewright.grouping import Grouping

HOME = "weights"
"""A group's weights are the group of its name, a slash and this."""

_KEPT_TYPES = frozenset({"buffer"})
"""Variables that stay with their readers: these write them, as into a cache of keys and values."""

_TYPICAL_UNITS = 1.5
"""How many units' weights the window holds by default: so the next one can come while a unit whose
weights are at home is computed."""


@dataclass(frozen=True, kw_only=True)
class Homes:
    """That weights have homes of their own, and how they travel from there."""

    window_bytes: int
    """How much of them may be on the way to a device, or there and still needed, at a time; or the
    weights of a single op where these are more."""

    def __post_init__(self) -> None:
        if self.window_bytes < 1:
            raise PlacementError(
                f"the window for weights on their way must be at least 1 byte, not "
                f"{self.window_bytes}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Visits:
    """What may have to travel, whatever the placement. Immutable.

    A visit is one coming of a weight to a device that is not its home, for readers that follow each
    other: between two of them no more is read than the window holds, so it is kept in between. The
    forward and the backward pass of a large model are two visits. V visits, by their first reader,
    with R reads.
    """

    tensor: IndexArray
    """[V] the weight."""
    owner: IndexArray
    """[V] the op that owns it, which is where its home is."""
    bytes: IntArray
    """[V]"""
    first: IndexArray
    """[V] the first of all readers in the order of the graph; this is the order of visits."""
    offsets: IntArray
    """[V + 1] readers of visit v: `reader[offsets[v] : offsets[v + 1]]`."""
    reader: IndexArray
    """[R] ops, ascending for each visit."""

    def __len__(self) -> int:
        return len(self.tensor)

    @staticmethod
    def of(graph: Graph, grouping: Grouping, homes: Homes) -> Visits:
        """Reads by ops that are in the group of the weight's owner never travel."""
        group_of = grouping.group_of
        reads = (
            owners(graph)[graph.edge_src]
            & (graph.edge_bytes > 0)
            & (group_of[graph.edge_src] != group_of[graph.edge_dst])
        )
        pairs = np.unique(np.stack([graph.edge_dst[reads], graph.edge_tensor[reads]]), axis=1)
        ops, tensors = pairs.astype(np.int64)
        visit = _split(graph, ops, tensors, homes.window_bytes)
        # A visit is numbered by its first read for now, and reads are in the order of their ops.
        firsts = np.flatnonzero(visit == np.arange(len(visit)))
        number = np.zeros(len(visit), dtype=np.int64)
        number[firsts] = np.arange(len(firsts))
        order = np.argsort(number[visit], kind="stable")
        counts = np.bincount(number[visit], minlength=len(firsts))
        tensor = tensors[firsts]
        return Visits(
            tensor=_indices(tensor),
            owner=_indices(graph.tensor_producer[tensor]),
            bytes=frozen(graph.tensor_bytes[tensor].copy()),
            first=_indices(ops[firsts]),
            offsets=frozen(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)),
            reader=_indices(ops[order]),
        )


def _split(graph: Graph, ops: IntArray, tensors: IntArray, window_bytes: int) -> IntArray:
    """[R] the first read of the visit that each read belongs to; reads are in the order of ops."""
    sizes = graph.tensor_bytes[tensors].tolist()
    names = tensors.tolist()
    at = ops.tolist()
    visit = np.arange(len(ops))
    last: dict[int, int] = {}
    begins = np.searchsorted(ops, ops, side="left").tolist()
    ends = np.searchsorted(ops, ops, side="right").tolist()
    for read, name in enumerate(names):
        before = last.get(name)
        last[name] = read
        if before is None:
            continue
        total = 0
        seen: set[int] = set()
        # All that is read from the one op to the other, these included.
        for between in range(begins[before], ends[read]):
            if names[between] not in seen:
                seen.add(names[between])
                total += sizes[between]
                if total > window_bytes:
                    break
        if total <= window_bytes or at[before] == at[read]:
            visit[read] = visit[before]
    return visit


def owners(graph: Graph) -> BoolArray:
    """[N] ops that own a variable or optimizer state and wait for nothing."""
    fed = np.zeros(graph.num_ops, dtype=np.bool_)
    fed[graph.edge_dst] = True
    return frozen((graph.resident_bytes > 0) & ~fed)


def home_ops(graph: Graph) -> BoolArray:
    """[N] ops that belong to a home: owners of weights and of their state, what updates these, and
    what is tied to them and computes nothing."""
    kept = np.array([type_ in _KEPT_TYPES for type_ in graph.op_types], dtype=np.bool_)
    home = owners(graph) & ~kept
    updates = np.zeros(graph.num_ops, dtype=np.bool_)
    updates[graph.edge_dst[home[graph.edge_src]]] = True
    updates &= graph.work == Work.UPDATE
    home = home | updates
    # A variable's handle and the reads of it, which are tied to it and to nothing else.
    tied = graph.colocation >= 0
    sets = int(graph.colocation.max(initial=-1)) + 2  # the last is for who is tied to nobody
    held, computes = np.zeros(sets, dtype=np.bool_), np.zeros(sets, dtype=np.bool_)
    held[graph.colocation[tied & home]] = True
    computes[graph.colocation[tied & ~home & ((graph.work != Work.NONE) | kept)]] = True
    whole = held & ~computes
    return frozen(home | (tied & whole[graph.colocation]))


def hands_out_weights(graph: Graph) -> bool:
    """Whether the graph's variables are ops whose results are the weights themselves, and not
    handles that others read them through: only such have a home on request of nobody."""
    owns = graph.param_bytes > 0
    return bool(owns.any()) and bool((graph.output_bytes[owns] >= graph.param_bytes[owns]).all())


def untied(graph: Graph) -> Graph:
    """The same ops where weights are not tied to who reads them.

    Who reads a weight through a view of it reads the weight itself: a view is made where the weight
    arrives, and takes neither time nor memory. What ops cost stays as it was.
    """
    home = home_ops(graph)
    owned = owners(graph) & home
    root = np.where(graph.tensor_shares < 0, np.arange(graph.num_tensors), graph.tensor_shares)
    of_weight = owned[graph.tensor_producer[root]] & (graph.tensor_bytes > 0)
    views = _views(graph, of_weight) & ~owned

    sizes = graph.tensor_bytes.copy()
    np.maximum.at(sizes, root[of_weight], graph.tensor_bytes[of_weight])
    of_view = of_weight & views[graph.tensor_producer]
    sizes[of_view] = 0
    shares = np.where(of_view, -1, graph.tensor_shares)

    src, dst, tensor = graph.edge_src.copy(), graph.edge_dst, graph.edge_tensor.copy()
    carries = np.append(of_weight, False)[tensor]
    waits = np.zeros(graph.num_ops, dtype=np.bool_)  # views that wait for more than the weight
    waits[dst[~carries]] = True
    chained = np.flatnonzero(carries & views[src] & views[dst])
    for a, b in zip(src[chained].tolist(), dst[chained].tolist(), strict=True):
        waits[b] |= waits[a]
    through = carries & views[src] & ~views[dst]
    kept = (carries & views[src]) & waits[src]
    extra = np.stack([src[kept], dst[kept], tensor[kept]])
    tensor[through] = root[tensor[through]]
    src[through] = graph.tensor_producer[tensor[through]]
    stay = ~(carries & views[dst])
    edges = np.concatenate([np.stack([src[stay], dst[stay], tensor[stay]]), extra], axis=1)
    edges = np.unique(edges, axis=1)
    edges = edges[:, np.argsort(edges[1], kind="stable")]
    return replace(
        graph,
        colocation=frozen(_colocation(graph, home)),
        tensor_bytes=frozen(sizes),
        tensor_shares=frozen(shares.astype(np.int32)),
        edge_src=_indices(edges[0]),
        edge_dst=_indices(edges[1]),
        edge_tensor=_indices(edges[2]),
        stated_work=frozen(graph.work.copy()),
        stated_bytes=frozen(graph.moved_bytes.copy()),
    )


def _views(graph: Graph, of_weight: BoolArray) -> BoolArray:
    """[N] ops that only pass on weights."""
    others = np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(others, graph.tensor_producer[~of_weight & (graph.tensor_bytes > 0)], 1)
    makes = np.zeros(graph.num_ops, dtype=np.bool_)
    makes[graph.tensor_producer[of_weight]] = True
    return np.asarray(makes & (others == 0) & (graph.work == Work.NONE))


def _colocation(graph: Graph, home: BoolArray) -> IndexArray:
    """[N] co-location with each set in two: what is at home, and the rest."""
    numbers: dict[tuple[int, bool], int] = {}
    result = np.full(graph.num_ops, -1, dtype=np.int32)
    for op, (label, at_home) in enumerate(
        zip(graph.colocation.tolist(), home.tolist(), strict=True)
    ):
        if label >= 0:
            result[op] = numbers.setdefault((label, at_home), len(numbers))
    return result


def split(graph: Graph, grouping: Grouping) -> tuple[Grouping, IndexArray]:
    """The grouping with each group in two: the weights it holds, and what computes; and for each of
    the groups that this makes, which one it was a part of."""
    home = home_ops(graph)
    numbers: dict[tuple[int, bool], int] = {}
    keys = list(zip(grouping.group_of.tolist(), home.tolist(), strict=True))
    group_of = [numbers.setdefault(key, len(numbers)) for key in keys]
    names: list[str] = []
    taken = set(grouping.names)
    for g, at_home in numbers:
        name = grouping.names[g]
        if at_home and (g, False) in numbers:
            name = f"{name}/{HOME}"
            while name in taken:
                name += "'"
        taken.add(name)
        names.append(name)
    made = Grouping(group_of=_indices(np.array(group_of)), names=tuple(names))
    return made, _indices(np.array([g for g, _ in numbers]))


def default_window(graph: Graph, grouping: Grouping) -> int:
    """One and a half times what a typical unit reads: the one that the median byte of all weights
    is for."""
    owned = owners(graph)
    reads = owned[graph.edge_src] & (graph.edge_bytes > 0)
    reads &= grouping.group_of[graph.edge_src] != grouping.group_of[graph.edge_dst]
    pairs = np.stack([grouping.group_of[graph.edge_dst[reads]], graph.edge_tensor[reads]])
    readers, tensors = np.unique(pairs, axis=1)
    totals = np.zeros(grouping.num_groups, dtype=np.int64)
    np.add.at(totals, readers, graph.tensor_bytes[tensors])
    totals = np.sort(totals[totals > 0])
    if not totals.size:
        return 1
    middle = int(np.searchsorted(np.cumsum(totals), totals.sum() / 2))
    return max(1, int(_TYPICAL_UNITS * int(totals[middle])))


def _indices(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> IndexArray:
    return frozen(np.asarray(array).astype(np.int32))
