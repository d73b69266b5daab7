"""Where the weights live, in words: what stays, what travels, what the host computes, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from placewright.placement import Placement
from placewright.report.sections import Section
from placewright.session.workload import WorkloadResult
from placewright.simulator import Simulator, Timeline
from placewright.simulator.bounds import LowerBounds, lower_bounds
from placewright.stays import How, Stay, stays
from placewright.units import format_bytes, format_seconds

_NUMBER = re.compile(r"\d+(?=\D*$)")
_MOST_NAMES = 6
"""Families of units that are named; of more, how many others there are is said."""


def ranges(names: Sequence[str]) -> str:
    """`layers/0-17, 20; head`: names that differ in their last number are one."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        match = _NUMBER.search(name)
        family = name if match is None else f"{name[: match.start()]}*{name[match.end() :]}"
        numbers.setdefault(family, []).extend([] if match is None else [int(match[0])])
    shown = []
    for family, found in numbers.items():
        parts: list[list[int]] = []
        for number in sorted(set(found)):
            if parts and parts[-1][1] == number - 1:
                parts[-1][1] = number
            else:
                parts.append([number, number])
        texts = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
        if "," in texts and not family.endswith("*"):
            texts = f"{{{texts}}}"
        shown.append(family.replace("*", texts, 1) if texts else family)
    if len(shown) > _MOST_NAMES:
        shown[_MOST_NAMES - 1 :] = [f"{len(shown) - _MOST_NAMES + 1} others"]
    return "; ".join(shown)


def home_lines(timeline: Timeline) -> list[str]:
    """What happens to the weights in the step; nothing where they have no homes of their own."""
    problem = timeline.problem
    if problem.homes is None:
        return []
    every = stays(problem, timeline.placement)
    names = problem.cluster.device_names
    lines = []
    for how in How:
        found: dict[tuple[int, int], list[Stay]] = {}
        for stay in every:
            if stay.how is how:
                found.setdefault((stay.device, stay.home), []).append(stay)
        for (device, home), members in found.items():
            text = _of_kind(timeline, how, names[device], names[home], members)
            lines.append(text)
    return [*lines, *_because(timeline, every)]


def _of_kind(timeline: Timeline, how: How, device: str, home: str, members: Sequence[Stay]) -> str:
    problem = timeline.problem
    units = ranges([stay.unit for stay in members])
    size = format_bytes(sum(stay.bytes for stay in members))
    if how is How.RESIDENT:
        return f"In the memory of {device}, which computes with them: {units} ({size})."
    if how is How.HOST:
        groups = [stay.group for stay in members]
        seconds = float(problem.group_seconds[members[0].device, groups].sum())
        return (
            f"Computed by {device}, in whose memory the weights are: {units} ({size}, "
            f"{format_seconds(seconds)} of computing)."
        )
    sent, group_of = timeline.transfers, problem.grouping.group_of
    homes = np.array([h for stay in members for h in stay.homes])
    mine = (sent.visit >= 0) & np.isin(group_of[sent.producer], homes)
    mine &= (
        problem.cluster.pool_of_device[sent.target]
        == problem.cluster.pool_of_device[members[0].device]
    )
    seconds = float((sent.end[mine] - sent.start[mine]).sum())
    assert problem.homes is not None
    return (
        f"Travel from {home} to {device} in each step: {units} ("
        f"{format_bytes(int(sent.bytes[mine].sum()))}, {format_seconds(seconds)} of the link's "
        f"time; at most {format_bytes(problem.homes.window_bytes)} are on the way or in use)."
    )


def _because(timeline: Timeline, every: Sequence[Stay]) -> list[str]:
    """What the other ways would take."""
    problem, step = timeline.problem, timeline.step_seconds
    cluster = problem.cluster
    away = [stay for stay in every if stay.how is not How.RESIDENT]
    if not away:
        return ["All weights are where they are read: nothing travels."]
    lines = []
    accelerators = sorted({s.device for s in every if cluster.devices[s.device].type != "cpu"})
    total = sum(int(size) for size in problem.group_resident_bytes)
    if accelerators:
        room = sum(
            int(cluster.pool_bytes[d])
            for d in {int(cluster.pool_of_device[d]) for d in accelerators}
        )
        names = " and ".join(cluster.device_names[d] for d in accelerators)
        lines.append(
            f"Why not all on {names}: the weights take {format_bytes(total)}, there "
            f"{'is' if len(accelerators) == 1 else 'are'} {format_bytes(room)}."
        )
    others = _other_ways(timeline, away, accelerators)
    if others:
        text = "; ".join(f"{what} would take {format_seconds(seconds)}" for what, seconds in others)
        kinds = {stay.how for stay in away}
        both = " The link and the host work side by side." if len(kinds) == 2 else ""
        lines.append(f"Of what is not there, {text}; this takes {format_seconds(step)}.{both}")
    pinned = problem.pinned_bytes(timeline.placement.devices[np.newaxis])[0]
    for d in np.flatnonzero(pinned).tolist():
        lines.append(
            f"{cluster.device_names[d]} pins {format_bytes(int(pinned[d]))} for what travels, of "
            f"{format_bytes(cluster.devices[d].pinnable_bytes)} that it can."
        )
    bounds = lower_bounds(problem)
    if np.isfinite(bounds.stream_seconds) and bounds.stream_seconds > 0:
        lines.append(floor_line(bounds, step))
    return lines


def explain_workload(result: WorkloadResult) -> list[Section]:
    """What `place_workload` found: what each part takes, and what becomes of the weights in it."""
    total, floor = result.total_seconds, result.floor_seconds
    lines = [
        f"All parts together take {format_seconds(total)}; no placement can take less than "
        f"{format_seconds(floor)} ({floor / total if total else 1.0:.0%} of that).",
        *(
            f"{part.name}: {format_seconds(result.seconds[part.name])}, {part.weight:g} times."
            for part in result.workload.parts
        ),
    ]
    sections = [Section("The workload", tuple(lines))]
    for part in result.workload.parts:
        timeline = Simulator(part.problem, threads=1).timeline(result.placements[part.name])
        sections.append(Section(part.name, tuple(home_lines(timeline))))
    return sections


def floor_line(bounds: LowerBounds, step: float) -> str:
    """How near the step is to what the link, the devices and their memory allow."""
    floor = bounds.stream_seconds
    return (
        f"Every byte is in the memory of who computes with it, or travels: no step can take less "
        f"than {format_seconds(floor)} for that ({floor / step:.0%} of this one)."
    )


def _other_ways(
    timeline: Timeline, away: Sequence[Stay], accelerators: Sequence[int]
) -> list[tuple[str, float]]:
    """All that is not at home on an accelerator treated alike, and the step time of that."""
    problem = timeline.problem
    if not accelerators:
        return []
    main = max(accelerators, key=lambda d: int(np.count_nonzero(timeline.placement.devices == d)))
    ways = {}
    travel, compute = timeline.placement.devices.copy(), timeline.placement.devices.copy()
    for stay in away:
        if problem.cluster.devices[stay.device].type == "cpu":
            travel[stay.group] = main
        if problem.cluster.devices[stay.home].type == "cpu":
            compute[stay.group] = stay.home
    ways["all of it travelling"] = travel
    ways["all of it computed by the host"] = compute
    result = []
    simulator = Simulator(problem, threads=1)
    for what, devices in ways.items():
        if Placement.of(problem, devices) == timeline.placement:
            continue
        found = simulator.run(devices[np.newaxis])
        if found.failed_op[0] < 0:
            result.append((what, float(found.step_seconds[0])))
    return result
