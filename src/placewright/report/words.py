"""A run in words: the answer in one sentence, and why it is so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from placewright.costs import Source
from placewright.graph import Loop
from placewright.measurement import Outcome
from placewright.report import analysis
from placewright.report.homes import home_lines
from placewright.report.run import Run
from placewright.report.sections import Section
from placewright.simulator import StepRange, Timeline
from placewright.simulator.makeup import described, range_line
from placewright.units import format_bytes, format_seconds


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def loop_lines(loops: Sequence[Loop]) -> list[str]:
    """A line for each loop: how often it runs, and how that is known."""
    lines = []
    for loop in loops:
        if loop.source == "dataset":
            many = "" if loop.iterations is None else f" of {loop.iterations:,} elements"
            often = f"goes over a dataset{many}; a step is one iteration"
        elif loop.iterations is None:
            often = "runs nobody knows how often and counts as one iteration"
        else:
            known = "you said so" if loop.source == "user" else f"known from a {loop.source}"
            often = f"runs {plural(loop.iterations, 'iteration')} ({known})"
        within = f" inside {loop.within!r}" if loop.within else ""
        lines.append(f"Loop {loop.name!r}{within} {often}.")
    return lines


# --- the answer ----------------------------------------------------------------------------------


def comparisons(run: Run) -> list[dict[str, Any]]:
    """The methods that only compute, and how many times as fast as each the answer is: where they
    were measured in turns, by these."""
    step = run.summary["step_seconds"]
    in_turns = {other["method"]: other for other in run.summary.get("comparisons", ())}
    return [
        {
            "method": row["method"],
            "step_seconds": row["step_seconds"],
            "speed_up": in_turns.get(row["method"], {}).get("ratio", row["step_seconds"] / step)
            if row["step_seconds"] and step
            else None,
            "half_width": in_turns.get(row["method"], {}).get("half_width"),
            "outcome": row["outcome"],
        }
        for row in run.summary["methods"]
        if row["method"] in _BASELINES and row["outcome"] != "nothing proposed"
    ]


_BASELINES = ("single", "expert", "scotch", "mincut", "heft", "m-topo", "m-etf", "m-sct", "random")
"""What a result is compared with: methods that people would use instead."""


def single_device(run: Run) -> str:
    """The device that does best alone (with what it cannot run on another)."""
    names = run.problem.cluster.device_names
    row = next((row for row in run.summary["methods"] if row["method"] == "single"), None)
    if row is not None and row.get("main_device"):
        # Of a measured run the one of the final: the fastest of the journal may have been lucky.
        return str(row["main_device"])
    found = run.progression.improvements.get("single") if run.progression is not None else None
    if not found:
        return "alone"
    return names[found[-1].trial.placement.main_device]


def tightest(run: Run) -> tuple[int, int, int] | None:
    """(device, peak bytes, limit) of the device whose memory is fullest."""
    peaks = run.best.measurement.peak_bytes if run.best is not None else ()
    if not peaks and run.timeline is not None:
        peaks = tuple(run.timeline.peak_bytes.tolist())
    limits = [device.memory_bytes for device in run.problem.cluster.devices]
    if len(peaks) != len(limits):  # nothing known, or the record is of another machine
        return None
    device = max(range(len(peaks)), key=lambda d: peaks[d] / limits[d])
    return device, peaks[device], limits[device]


def answer(run: Run) -> str:
    """One sentence."""
    names = run.problem.cluster.device_names
    where = f"{run.problem.graph.name} on {run.problem.cluster.name}"
    if not run.ok or run.best is None:
        return f"No placement of {where} ran; {plural(run.summary['trials'], 'placement')} tried."
    step = run.best.measurement.mean_seconds
    text = f"One step of {where} takes {format_seconds(step)}"
    if run.measured:
        half_width = run.summary.get("half_width_seconds")
        within = f", 95% within ± {format_seconds(half_width)}" if half_width else ""
        text += f" (measured{within})"
    by_method = {row["method"]: row for row in comparisons(run)}
    parts = []
    alone = f"the best single device ({single_device(run)})"
    for method, phrase in (("single", alone), ("expert", "the expert's placement")):
        row = by_method.get(method)
        if row is not None and row["speed_up"]:
            spread = row["half_width"]
            sure = f" (± {spread:.2f})" if spread is not None else ""
            parts.append(_times(row["speed_up"], phrase) + sure)
        elif row is not None and method == "single":
            parts.append("no single device can run it")
    if parts:
        text += f": {listed(parts)}"
    if run.summary.get("simple_answer"):
        text += f"; but {run.summary['simple_answer']}"
    bound = run.summary["lower_bound_seconds"]
    if bound <= 0:
        pass  # nothing is proven of times that were measured
    elif bound >= step * (1 - 1e-6):
        text += "; that is proven to be optimal in the simulator"
    else:
        by_groups = run.summary.get("lower_bound_by") == "group"
        which = f" by these {plural(run.searched.num_groups, 'group')}" if by_groups else ""
        text += (
            f"; no placement{which} can take less than {format_seconds(bound)}, so at most "
            f"{1 - bound / step:.1%} is left to gain"
        )
    full = tightest(run)
    if full is not None:
        device, peak, limit = full
        text += f"; the fullest memory, {names[device]}'s, has {1 - peak / limit:.0%} to spare"
    return text + "."


def _times(speed_up: float, phrase: str) -> str:
    if abs(speed_up - 1) < 5e-4:
        return f"as fast as {phrase}"
    return f"{speed_up:.2f} times as fast as {phrase}"


def basis(run: Run) -> str:
    """What is simulated, under which costs, and, where the step times were measured, how far off
    that is."""
    if run.best is None or run.timeline is None:
        return ""
    if not run.measured:
        known = bool((run.problem.costs.source >= Source.GRAPH).any())
        costs = "costs that were given with the model" if known else "estimated costs"
        return f"All times are simulated, under {costs}{_orders(run)}."
    if run.calibrated:
        costs = "costs calibrated to this machine by the run"
    elif (run.problem.costs.source >= Source.GRAPH).any():
        costs = "the costs the run was given, which it did not correct"
    else:
        costs = "estimated costs, which were not fitted to this machine"
    text = f"Timelines, loads and what-ifs are simulated under {costs}"
    if run.ok:
        predicted, measured = run.timeline.step_seconds, run.best.measurement.mean_seconds
        off = f" ({predicted / measured - 1:+.0%})" if measured else ""
        text += (
            f": they predict {format_seconds(predicted)} for this placement, measured "
            f"{format_seconds(measured)}{off}"
        )
        if run.calibrated:
            text += ", which is among the runs they were fitted to"
    return text + "."


def _orders(run: Run) -> str:
    """Which times are of one order of ties, and which of several."""
    orders = run.summary.get("step_orders", 1)
    if run.timeline is None or not orders or orders == 1:
        return ", in one order of ops that are ready at the same moment"
    return (
        f": step times are means over {orders} orders of ops that are ready at the same moment; "
        f"timelines and what is said of them are of one, that of the graph "
        f"({format_seconds(run.timeline.step_seconds)})"
    )


# --- why -----------------------------------------------------------------------------------------


def explain(run: Run) -> list[Section]:
    """The whole run in words."""
    lines = (answer(run), basis(run))
    sections = [Section("The answer", tuple(line for line in lines if line))]
    if run.problem.graph.loops:
        sections.append(Section("Loops", tuple(loop_lines(run.problem.graph.loops))))
    if run.timeline is not None and run.best is not None:
        title = "Where the groups sit" if run.ok else "A placement that does not fit"
        sections.append(Section(title, tuple(_where(run.timeline))))
        if run.timeline.problem.homes is not None:
            sections.append(Section("Where the weights live", tuple(home_lines(run.timeline))))
    if run.timeline is not None and run.ok:
        sections += [
            Section("What the step is made of", tuple(_made_of(run))),
            Section("What runs at the same time", tuple(_parallel(run.timeline))),
            Section("What is sent", tuple(_sent(run.timeline))),
            Section("What the step waits for", tuple(_critical(run.timeline))),
        ]
        versus = _versus_expert(run)
        if versus:
            sections.append(Section("Against the expert's placement", tuple(versus)))
    failures = _failures(run)
    if failures:
        sections.append(Section("What did not run, and why", tuple(failures)))
    return sections


def _where(timeline: Timeline) -> list[str]:
    problem = timeline.problem
    work = analysis.loads(timeline)
    total = sum(
        load.compute_seconds * device.kind.slots
        for load, device in zip(work, problem.cluster.devices, strict=True)
    )
    lines = []
    for d, device in enumerate(problem.cluster.devices):
        groups = np.flatnonzero(timeline.placement.devices == d)
        if not groups.size:
            lines.append(f"{device.name}: nothing.")
            continue
        # By cost, so that what matters is named first.
        order = groups[np.argsort(-problem.group_seconds[d, groups], kind="stable")]
        kinds = analysis.families([problem.grouping.names[g] for g in order.tolist()])
        shown = [f"{name} ({count})" if count > 1 else name for name, count in kinds[:4]]
        if len(kinds) > 4:
            shown.append("others")
        share = work[d].compute_seconds * device.kind.slots / total if total else 0.0
        peak = int(timeline.peak_bytes[d])
        lines.append(
            f"{device.name}: {plural(len(groups), 'group')}, {share:.0%} of the computing, "
            f"{format_bytes(peak)} of {format_bytes(device.memory_bytes)} memory: {listed(shown)}."
        )
    return lines


def _made_of(run: Run) -> list[str]:
    """By device and along the chain of things that wait for each other."""
    assert run.timeline is not None
    timeline = run.timeline
    lines = [
        f"{device.name}: of its time, {described(parts)}."
        for device, parts in zip(
            timeline.problem.cluster.devices, timeline.device_parts, strict=True
        )
        if parts.compute or parts.overhead
    ]
    lines.append(f"Along the critical path of the step, {described(timeline.path_parts)}.")
    lines += [f"{remark[0].upper()}{remark[1:]}." for remark in run.summary.get("remarks", ())]
    made = run.summary.get("makeup") or {}
    if made.get("rests_on_overhead"):
        lines.append(
            "The speed-up comes from spreading overhead (issuing ops, gaps between kernels) over "
            f"devices: without overhead, {made['speed_up_without_overhead']:.2f}x is left."
        )
    of = run.summary.get("step_range") or {}
    known = {key: of[key] for key in StepRange.__dataclass_fields__ if key in of}
    if known and (line := range_line(StepRange(**known))):
        lines.append(f"{line[0].upper()}{line[1:]}.")
    return lines


def _parallel(timeline: Timeline) -> list[str]:
    names = timeline.problem.cluster.device_names
    step = timeline.step_seconds or 1.0  # of a model that costs nothing
    shares = analysis.busy_devices(timeline) / step
    mean = analysis.mean_computing(timeline)
    used = int((timeline.busy_seconds > 0).sum())
    if used == 1:
        return [f"Only {names[int(timeline.busy_seconds.argmax())]} computes: nothing is split."]
    lines = [f"On average {mean:.1f} of the {used} devices in use compute at a time."]
    several = float(shares[2:].sum())
    issued = any(parts.overhead for parts in timeline.device_parts)
    waiting = "all wait for transfers" + (" or for ops to be issued" if issued else "")
    lines.append(
        f"Two or more compute during {several:.0%} of the step, one alone during "
        f"{float(shares[1]):.0%}, none ({waiting}) during {float(shares[0]):.0%}."
    )
    load = analysis.loads(timeline)
    busiest = max(range(len(load)), key=lambda d: load[d].compute_seconds)
    lines.append(
        f"The busiest, {names[busiest]}, computes {load[busiest].compute_seconds / step:.0%} of "
        "the time."
    )
    return lines


def _sent(timeline: Timeline) -> list[str]:
    problem = timeline.problem
    sent = timeline.transfers
    if not len(sent):
        return ["Nothing: no tensor leaves its device."]
    names = problem.cluster.device_names
    on_path = analysis.critical_path_shares(timeline).transfer_seconds
    total = float((sent.end - sent.start).sum())
    lines = [
        f"{plural(len(sent), 'transfer')} of {format_bytes(int(sent.bytes.sum()))} take "
        f"{format_seconds(total)} in sum; the step waits for {format_seconds(on_path)} of that, "
        "the rest passes side by side with computing or with each other."
    ]
    top = analysis.flows(timeline)[:3]
    parts = [
        f"{names[flow.source]} to {names[flow.target]} {format_bytes(flow.bytes)} in "
        f"{plural(flow.transfers, 'transfer')}"
        for flow in top
    ]
    lines.append(f"Most goes from {'; '.join(parts)}.")
    largest = int(sent.bytes.argmax())
    if sent.bytes[largest]:
        lines.append(
            f"The largest tensor is that of {problem.graph.op_names[sent.producer[largest]]}, "
            f"{format_bytes(int(sent.bytes[largest]))} from {names[sent.source[largest]]} to "
            f"{names[sent.target[largest]]}."
        )
    return lines


def _critical(timeline: Timeline) -> list[str]:
    problem = timeline.problem
    names = problem.cluster.device_names
    step = timeline.step_seconds or 1.0  # of a model that costs nothing
    share = analysis.critical_path_shares(timeline)
    order = np.argsort(-share.device_seconds, kind="stable").tolist()
    parts = [
        f"{share.device_seconds[d] / step:.0%} ops on {names[d]}"
        for d in order
        if share.device_seconds[d] >= 0.005 * step
    ]
    if share.issue_seconds >= 0.005 * step:
        parts.append(f"{share.issue_seconds / step:.0%} issuing ops")
    parts.append(f"{share.transfer_seconds / step:.0%} transfers")
    lines = [f"Of the longest chain of things that wait for each other: {listed(parts)}."]
    groups = np.argsort(-share.group_seconds, kind="stable")[:3].tolist()
    named = [
        f"{problem.grouping.names[g]} ({share.group_seconds[g] / step:.0%})"
        for g in groups
        if share.group_seconds[g] >= 0.005 * step
    ]
    if named:
        lines.append(f"The groups that hold it up most: {listed(named)}.")
    return lines


def _versus_expert(run: Run) -> list[str]:
    best, expert = run.timeline, run.expert_timeline
    if best is None or expert is None or run.expert is None or not run.expert.measurement.ok:
        return []
    if expert.placement == best.placement:
        return ["It is the expert's placement."]
    names = run.problem.cluster.device_names
    rows = {} if run.measured else {row["method"]: row for row in run.summary["methods"]}
    its, ours = rows.get("expert", {}).get("step_seconds"), run.summary["step_seconds"]
    if not its or not ours:  # of real runs, or it was not tried: one order of ties, both
        its, ours = expert.step_seconds, best.step_seconds
    lines = [
        f"Its step takes {format_seconds(its)} against {format_seconds(ours)} in the simulator."
    ]
    here, there = analysis.loads(best), analysis.loads(expert)
    worst_here = max(range(len(here)), key=lambda d: here[d].compute_seconds)
    worst_there = max(range(len(there)), key=lambda d: there[d].compute_seconds)
    lines.append(
        f"Its busiest device computes {format_seconds(there[worst_there].compute_seconds)} "
        f"({names[worst_there]}), ours {format_seconds(here[worst_here].compute_seconds)} "
        f"({names[worst_here]})."
    )
    lines.append(
        f"It sends {format_bytes(int(expert.transfers.bytes.sum()))}, ours "
        f"{format_bytes(int(best.transfers.bytes.sum()))}; its chain waits "
        f"{format_seconds(analysis.critical_path_shares(expert).transfer_seconds)} for transfers, "
        f"ours {format_seconds(analysis.critical_path_shares(best).transfer_seconds)}."
    )
    lines.append(
        f"On average {analysis.mean_computing(expert):.1f} devices compute at a time in its "
        f"step, {analysis.mean_computing(best):.1f} in ours."
    )
    return lines


def _failures(run: Run) -> list[str]:
    lines = []
    for row in run.summary["methods"]:
        if row["step_seconds"] is None and row["outcome"] != "nothing proposed":
            lines.append(f"{row['method']}: {row['outcome']}: {row['reason']}.")
    if run.progression is not None:
        for placer, trial in run.progression.failures.items():
            if any(line.startswith(f"{placer}:") for line in lines):
                continue
            measurement = trial.measurement
            if measurement.reason and placer in _BASELINES:
                lines.append(
                    f"{placer}, one of its placements: {measurement.outcome.value}: "
                    f"{measurement.reason}."
                )
    if not run.ok and run.timeline is not None and run.best is not None:
        lines += _too_much(run, run.timeline)
    return lines


def _too_much(run: Run, timeline: Timeline) -> list[str]:
    """What fills the devices that overflow."""
    assert run.best is not None
    if run.best.measurement.outcome is not Outcome.OUT_OF_MEMORY:
        return []
    problem = run.problem
    lines = []
    for d, device in enumerate(problem.cluster.devices):
        peak = int(timeline.peak_bytes[d])
        if peak <= device.memory_bytes:
            continue
        variables = int(problem.group_resident_bytes[timeline.placement.devices == d].sum())
        tensors = [
            f"{problem.graph.op_names[problem.graph.tensor_producer[live.tensor]]} "
            f"{format_bytes(live.bytes)}"
            for live in timeline.live_at_peak[d][:5]
        ]
        lines.append(
            f"{device.name} would need {format_bytes(peak)} of "
            f"{format_bytes(device.memory_bytes)}: {format_bytes(variables)} of variables, "
            f"and the tensors {listed(tensors) or 'of nothing else'}."
        )
    return lines
