"""Numbers behind the report and the explanation: loads, flows, layers, a timeline thin enough to
draw. Everything here is plain data that goes into the page as JSON."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from placewright.graph import FloatArray, IndexArray, IntArray
from placewright.grouping import edges_between
from placewright.problem import Problem
from placewright.simulator.timeline import Timeline, route_channels

MOST_BARS = 2500
"""Of a timeline; more would make a browser slow and be thinner than a pixel anyway."""
MOST_MEMORY_POINTS = 400
"""Of a device's memory curve."""


# --- loads ---------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What one device does in a step. Of a device with several slots, the mean of them."""

    compute_seconds: float
    copy_seconds: float
    """Transfers from and to it; they overlap with computing."""
    idle_seconds: float


def loads(timeline: Timeline) -> list[Load]:
    slots = [device.kind.slots for device in timeline.problem.cluster.devices]
    return [
        Load(float(busy) / count, float(copy), float(idle) / count)
        for busy, copy, idle, count in zip(
            timeline.busy_seconds,
            timeline.transfer_seconds,
            timeline.idle_seconds,
            slots,
            strict=True,
        )
    ]


class PathShare(NamedTuple):
    """Where the time of the critical path goes."""

    device_seconds: FloatArray
    """[D] spent on ops of each device."""
    transfer_seconds: float
    group_seconds: FloatArray
    """[G] spent on ops of each group."""
    issue_seconds: float
    """Spent on issuing ops, where somebody else than their device does that."""


def critical_path_shares(timeline: Timeline) -> PathShare:
    problem = timeline.problem
    devices = np.zeros(problem.num_devices)
    groups = np.zeros(problem.num_groups)
    moving = issuing = 0.0
    for entry in timeline.critical_path:
        seconds = entry.end - entry.start
        if entry.issues:
            issuing += seconds
        elif entry.transfer is None:
            devices[timeline.op_device[entry.op]] += seconds
            groups[problem.grouping.group_of[entry.op]] += seconds
        else:
            moving += seconds
    return PathShare(devices, moving, groups, issuing)


def mean_computing(timeline: Timeline) -> float:
    """How many devices compute at a time, on average over the step; 0 where that takes no time."""
    step = timeline.step_seconds
    counts = np.arange(timeline.problem.num_devices + 1)
    return float((busy_devices(timeline) * counts).sum()) / step if step else 0.0


def busy_devices(timeline: Timeline) -> FloatArray:
    """[D + 1] seconds of the step during which exactly so many devices compute."""
    changes: list[tuple[float, int]] = []
    for device in range(timeline.problem.num_devices):
        mine = (timeline.op_device == device) & (timeline.op_end > timeline.op_start)
        order = np.argsort(timeline.op_start[mine], kind="stable")
        until = -1.0
        starts, ends = timeline.op_start[mine][order], timeline.op_end[mine][order]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if start > until:
                if until >= 0:
                    changes.append((until, -1))
                changes.append((start, 1))
            until = max(until, end)
        if until >= 0:
            changes.append((until, -1))
    changes.sort()
    result = np.zeros(timeline.problem.num_devices + 1)
    now, running = 0.0, 0
    for moment, change in [*changes, (timeline.step_seconds, 0)]:
        result[running] += moment - now
        now, running = moment, running + change
    return result


class Flow(NamedTuple):
    """All that goes from one device to another in a step."""

    source: int
    target: int
    bytes: int
    transfers: int
    seconds: float


def flows(timeline: Timeline) -> list[Flow]:
    """Largest first."""
    sent = timeline.transfers
    count = timeline.problem.num_devices
    pair = sent.source.astype(np.int64) * count + sent.target
    result = []
    for key in np.unique(pair).tolist():
        mine = pair == key
        result.append(
            Flow(
                key // count,
                key % count,
                int(sent.bytes[mine].sum()),
                int(mine.sum()),
                float((sent.end[mine] - sent.start[mine]).sum()),
            )
        )
    return sorted(result, key=lambda flow: -flow.bytes)


def families(names: Sequence[str]) -> list[tuple[str, int]]:
    """Groups by what their names have in common, most frequent first.

    `encoder/l0/t17` and its like become `encoder/l0/t*`: in names, the last number counts steps or
    repetitions.
    """
    counts = Counter(re.sub(r"\d+(?=\D*$)", "*", name) for name in names)
    single = {re.sub(r"\d+(?=\D*$)", "*", name): name for name in names}
    return [(label if n > 1 else single[label], n) for label, n in counts.most_common()]


# --- the graph of groups -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """What groups send each other: E pairs of groups that differ."""

    source: IntArray
    target: IntArray
    bytes: IntArray
    """[E] each tensor counted once, however many ops of the group read it."""
    tensors: IntArray
    """[E] how many; 0 for mere control edges."""


def traffic(problem: Problem) -> Traffic:
    edges, count = edges_between(problem.graph, problem.grouping), problem.num_groups
    pairs, of = np.unique(edges.src * count + edges.dst, return_inverse=True)
    once = edges.transfers[edges.tensor[edges.transfers] >= 0]
    sizes = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(sizes, of[once], edges.bytes[once])
    return Traffic(
        source=pairs // max(count, 1),
        target=pairs % max(count, 1),
        bytes=sizes,
        tensors=np.bincount(of[once], minlength=len(pairs)),
    )


def layered(num_groups: int, edges: Traffic) -> tuple[IntArray, FloatArray]:
    """([G] layer, [G] height) of the groups, drawn left to right.

    Groups are numbered by their first op, so an edge to a higher number goes forward; the others
    bring gradients back and do not count. A layer is ordered by where its neighbours are (the
    barycentre heuristic of Sugiyama), which keeps lines from crossing.
    """
    ahead: dict[int, list[int]] = defaultdict(list)
    behind: dict[int, list[int]] = defaultdict(list)
    for a, b in zip(edges.source.tolist(), edges.target.tolist(), strict=True):
        if a < b:
            ahead[a].append(b)
            behind[b].append(a)
    layer = np.zeros(num_groups, dtype=np.int64)
    for group in range(num_groups):
        layer[group] = max((layer[before] + 1 for before in behind[group]), default=0)
    for group in range(num_groups - 1, -1, -1):
        # Constants and inputs belong beside what reads them, not all into the first layer.
        if not behind[group] and ahead[group]:
            layer[group] = min(layer[after] for after in ahead[group]) - 1
    layer -= layer.min(initial=0)
    rows: list[list[int]] = [[] for _ in range(int(layer.max(initial=0)) + 1)]
    for group in range(num_groups):
        rows[layer[group]].append(group)
    height = np.zeros(num_groups)

    def spread(row: Sequence[int], wish: Mapping[int, float]) -> None:
        """As near to where they wish to be as their order and a distance of 1 allow."""
        low = -np.inf
        for group in row:
            height[group] = low = max(wish[group], low + 1)
        shift = float(np.mean([wish[group] - height[group] for group in row]))
        for group in row:
            height[group] += shift

    for row in rows:
        spread(row, {group: position - (len(row) - 1) / 2 for position, group in enumerate(row)})
    for sweep in range(12):
        neighbours, order = (behind, rows) if sweep % 2 == 0 else (ahead, rows[::-1])
        for row in order:
            wish = {
                g: float(np.mean([height[n] for n in neighbours[g]]))
                if neighbours[g]
                else height[g]
                for g in row
            }
            row.sort(key=lambda g: (wish[g], g))
            spread(row, wish)
    return layer, height


# --- the timeline --------------------------------------------------------------------------------


class Bar(NamedTuple):
    """Something that occupies a row of the timeline, or several in a row drawn as one."""

    row: int
    start: float
    end: float
    what: int
    """The group, or the pair of devices; -1 for several."""
    things: int
    """How many ops or transfers."""
    bytes: int = 0


def merged(bars: Sequence[Bar], most: int, step_seconds: float) -> list[Bar]:
    """At most about `most` bars: neighbours of one group become one; if that is not enough, so do
    those too short to be seen. `bars` are sorted by row, then by start."""
    gap = step_seconds / 20_000
    bars = _merge(bars, gap, mixed=False)
    while len(bars) > most and gap < step_seconds:
        gap *= 2
        bars = _merge(bars, gap, mixed=True)
    return list(bars)


def _merge(bars: Sequence[Bar], gap: float, *, mixed: bool) -> list[Bar]:
    result: list[Bar] = []
    for bar in bars:
        last = result[-1] if result else None
        if last is not None and last.row == bar.row and bar.start - last.end <= gap:
            same = last.what == bar.what
            if same or (mixed and max(last.end - last.start, bar.end - bar.start) <= 4 * gap):
                result[-1] = Bar(
                    bar.row,
                    last.start,
                    max(last.end, bar.end),
                    bar.what if same else -1,
                    last.things + bar.things,
                    last.bytes + bar.bytes,
                )
                continue
        result.append(bar)
    return result


@dataclass(frozen=True, kw_only=True)
class Gantt:
    """A timeline thin enough to draw."""

    rows: list[dict[str, Any]]
    """`{"label", "device"}` of each row; `device` is -1 for a link."""
    ops: list[Bar]
    transfers: list[Bar]
    """Their `what` is source * D + target."""
    path: list[tuple[int, float, float]]
    """(row, start, end) along the critical path."""


def gantt(timeline: Timeline) -> Gantt:
    problem = timeline.problem
    cluster = problem.cluster
    rows: list[dict[str, Any]] = []
    row_of_slot: dict[tuple[int, int], int] = {}
    for d, device in enumerate(cluster.devices):
        used = np.unique(timeline.op_slot[timeline.op_device == d]).tolist()
        for slot in used or [0]:
            row_of_slot[d, slot] = len(rows)
            label = device.name if len(used) < 2 else f"{device.name} · {slot + 1}"
            rows.append({"label": label, "device": d})
    sent = timeline.transfers
    channels = {
        (s, t): route_channels(problem, s, t)
        for s, t in {*zip(sent.source.tolist(), sent.target.tolist(), strict=True)}
    }
    row_of_channel: dict[int, int] = {}
    for channel in sorted({c for used in channels.values() for c in used}):
        row_of_channel[channel] = len(rows)
        name = cluster.routes.channel_names[channel]
        rows.append({"label": re.sub(r" ([<>])$", _arrow, name), "device": -1})

    ops = [
        Bar(row_of_slot[device, slot], start, end, group, 1)
        for device, slot, start, end, group in zip(
            timeline.op_device.tolist(),
            timeline.op_slot.tolist(),
            timeline.op_start.tolist(),
            timeline.op_end.tolist(),
            problem.grouping.group_of.tolist(),
            strict=True,
        )
    ]
    moves = [
        Bar(row_of_channel[channel], start, end, s * problem.num_devices + t, 1, size)
        for s, t, start, end, size in zip(
            sent.source.tolist(),
            sent.target.tolist(),
            sent.start.tolist(),
            sent.free.tolist(),
            sent.bytes.tolist(),
            strict=True,
        )
        for channel in channels[s, t]
    ]
    path: list[tuple[int, float, float]] = []
    for entry in timeline.critical_path:
        if entry.transfer is None:
            op = entry.op
            row = row_of_slot[int(timeline.op_device[op]), int(timeline.op_slot[op])]
        else:
            i = entry.transfer
            row = row_of_channel[channels[int(sent.source[i]), int(sent.target[i])][0]]
        if path and path[-1][0] == row:
            path[-1] = (row, path[-1][1], entry.end)
        else:
            path.append((row, entry.start, entry.end))
    return Gantt(
        rows=rows,
        ops=merged(sorted(ops), MOST_BARS, timeline.step_seconds),
        transfers=merged(sorted(moves), MOST_BARS, timeline.step_seconds),
        path=path,
    )


def _arrow(match: re.Match[str]) -> str:
    return " →" if match[1] == ">" else " ←"


def memory_curves(timeline: Timeline) -> list[tuple[list[float], list[int]]]:
    """(seconds, bytes) of each device, thinned out so that every peak is still there."""
    result = []
    for curve in timeline.memory:
        keep = _thinned(curve.seconds, curve.bytes, timeline.step_seconds)
        seconds = [*curve.seconds[keep].tolist(), timeline.step_seconds]
        result.append((seconds, [*curve.bytes[keep].tolist(), int(curve.bytes[-1])]))
    return result


def _thinned(seconds: FloatArray, sizes: IntArray, step_seconds: float) -> IndexArray:
    """Of each short stretch of time, the points where most and least memory is in use."""
    points = np.arange(len(seconds), dtype=np.int32)
    if len(points) <= MOST_MEMORY_POINTS:
        return points
    share = seconds / step_seconds if step_seconds else np.zeros(len(seconds))
    stretch = np.minimum(share, 1.0) * (MOST_MEMORY_POINTS / 2)
    kept: set[int] = {0, len(points) - 1}
    bounds = np.flatnonzero(np.diff(stretch.astype(np.int64))) + 1
    for part in np.split(points, bounds):
        kept |= {int(part[sizes[part].argmax()]), int(part[sizes[part].argmin()])}
    return np.array(sorted(kept), dtype=np.int32)
