"""One or two runs as one HTML file that needs nothing else: data, style, script and Plotly."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from placewright._version import VERSION
from placewright.budget import Budget
from placewright.errors import MissingExtraError
from placewright.graph import IntArray
from placewright.report import analysis, words
from placewright.report.run import Run
from placewright.report.what_if import WhatIf, what_ifs
from placewright.simulator.timeline import Timeline
from placewright.units import format_bytes, format_seconds

TIMES = "\N{MULTIPLICATION SIGN}"


def make_page(
    runs: Sequence[Run],
    what_if_budget: Budget | None,
    observe: Callable[[str], None] = lambda doing: None,
) -> str:
    """The page. Without a budget for what-ifs that panel is left out."""
    _plotly()  # where it is missing that is said before the work begins
    title = " and ".join(f"{run.problem.graph.name} on {run.problem.cluster.name}" for run in runs)
    return fill(title, _document(runs, what_if_budget, observe))


def fill(title: str, document: Any) -> str:
    """The page that shows a document: what `page.js` reads."""
    # "</script>" in a name must not end the script, nor "<!--" start a comment.
    data = json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "__TITLE__": html.escape(f"{title} - Placewright"),
        "__STYLE__": _asset("page.css"),
        "__SCRIPT__": _asset("page.js"),
        "__PLOTLY__": _plotly(),
        "__DATA__": data,
    }
    page = _asset("page.html")
    # One after another and from the end, so that text which happens to look like a mark is safe.
    for mark, text in sorted(parts.items(), key=lambda item: -page.index(item[0])):
        before, after = page.split(mark, 1)
        page = before + text + after
    return page


def _asset(name: str) -> str:
    return resources.files("placewright.report").joinpath(name).read_text("utf-8")


@cache
def _plotly() -> str:
    """The library, packed: 2 MB instead of 5."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtraError("the report", "report") from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


def plotly_version() -> str:
    import plotly

    return str(plotly.__version__)


def _document(
    runs: Sequence[Run], what_if_budget: Budget | None, observe: Callable[[str], None]
) -> dict[str, Any]:
    graphs: dict[str, Any] = {}
    described = []
    for run in runs:
        observe(f"looking at {run.name}")
        key = f"{run.problem.graph.fingerprint} {run.problem.grouping.fingerprint}"
        graphs.setdefault(key, _ops(run))
        described.append(_run(run, key, what_if_budget, observe))
    return {
        "runs": described,
        "graphs": graphs,
        "compare": _comparison(runs[0], runs[1]) if len(runs) == 2 else None,
    }


def _run(
    run: Run, key: str, what_if_budget: Budget | None, observe: Callable[[str], None]
) -> dict[str, Any]:
    problem, summary, timeline = run.problem, run.summary, run.timeline
    imagined: list[WhatIf] = []
    if what_if_budget is not None and run.ok and run.best is not None:
        imagined = what_ifs(
            run.under,
            run.best.placement,
            what_if_budget,
            lambda change: observe(f"what if: {change}"),
        )
    single = next((m for m in summary["methods"] if m["method"] == "single"), None)
    step = run.best.measurement.mean_seconds if run.best is not None and run.ok else None
    expert = run.expert_timeline if run.ok else None
    return {
        "name": run.name,
        "model": problem.graph.name,
        "cluster": problem.cluster.name,
        "answer": words.answer(run),
        "basis": words.basis(run),
        "step": step,
        "measured": run.measured,
        "bound": summary["lower_bound_seconds"],
        "single": single["step_seconds"] if single else None,
        "tiles": _tiles(run),
        "devices": [
            {"name": d.name, "type": d.type, "memory": d.memory_bytes}
            for d in problem.cluster.devices
        ],
        "methods": [
            {
                "method": row["method"],
                "seconds": row["step_seconds"],
                "outcome": row["outcome"],
                "reason": row["reason"],
                "trials": row["trials"],
                "search": row["search_seconds"],
            }
            for row in summary["methods"]
        ],
        "trials": summary["trials"],
        "searchSeconds": run.progression.seconds if run.progression else 0.0,
        "progress": _progress(run),
        "overall": _overall(run),
        "metrics": _metrics(run),
        "graph": _graph(run, timeline, key) if timeline is not None else None,
        "gantt": _gantt(timeline) if timeline is not None else None,
        "memory": [
            {"seconds": [short(s) for s in seconds], "bytes": sizes}
            for seconds, sizes in analysis.memory_curves(timeline)
        ]
        if timeline is not None
        else None,
        "load": timeline.device_parts if timeline is not None else None,
        "expertLoad": expert.device_parts if expert is not None else None,
        "whatIfs": [
            {
                "change": imagine.change,
                "detail": imagine.detail,
                "same": imagine.same_seconds,
                "seconds": imagine.step_seconds,
                "bound": imagine.lower_bound_seconds,
            }
            for imagine in imagined
        ],
        "sections": [[title, list(lines)] for title, lines in words.explain(run)[1:]],
        "origin": _origin(run),
    }


def short(number: float) -> float:
    """Six digits are more than a chart can show, and half the size."""
    return float(f"{number:.6g}")


# --- the answer ----------------------------------------------------------------------------------


def _tiles(run: Run) -> list[dict[str, str]]:
    tiles = []
    summary = run.summary
    step = run.best.measurement.mean_seconds if run.best is not None and run.ok else None
    rows = {row["method"]: row for row in words.comparisons(run)}
    single = rows.pop("single", None)
    if step is not None and single is not None:
        if single["speed_up"]:
            tiles.append(
                tile(
                    f"{single['speed_up']:.2f}{TIMES}",
                    "over the best single device",
                    f"{words.single_device(run)}, {format_seconds(single['step_seconds'])}",
                )
            )
        else:
            tiles.append(tile("-", "single device", "none can run it"))
    if step is not None and rows.get("expert", {}).get("speed_up"):
        row = rows["expert"]
        note = format_seconds(row["step_seconds"])
        tiles.append(tile(f"{row['speed_up']:.2f}{TIMES}", "over the expert", note))
    others = [row for name, row in rows.items() if row["speed_up"] and name != "expert"]
    if step is not None and others:
        row = min(others, key=lambda row: row["step_seconds"])
        note = f"{row['method']}, {format_seconds(row['step_seconds'])}"
        tiles.append(tile(f"{row['speed_up']:.2f}{TIMES}", "over the best other baseline", note))
    bound = summary["lower_bound_seconds"]
    if step is not None and bound > 0:
        gap = 1 - bound / step if bound < step else 0.0
        by_groups = " of these groups" if summary.get("lower_bound_by") == "group" else ""
        note = f"lower bound {format_seconds(bound)}{by_groups}"
        value = "optimal" if gap < 1e-6 else f"≤ {gap:.1%}"
        tiles.append(tile(value, "left to gain", note))
    full = words.tightest(run)
    if full is not None:
        device, peak, limit = full
        name = run.problem.cluster.device_names[device]
        note = f"{name}: {format_bytes(peak)} of {format_bytes(limit)}"
        spare = 1 - peak / limit
        tiles.append(
            tile(f"{spare:.0%}", "memory to spare", note)
            if spare >= 0
            else tile(f"{-spare:.0%}", "memory too little", note)
        )
    note = f"in {summary['search_seconds']:.0f} s" if summary["search_seconds"] else ""
    tiles.append(tile(f"{summary['trials']:,}", "placements tried", note))
    return tiles


def tile(value: str, label: str, note: str) -> dict[str, str]:
    return {"value": value, "label": label, "note": note}


def _origin(run: Run) -> list[tuple[str, str]]:
    summary, problem = run.summary, run.problem
    entries = [
        ("command", summary.get("command") or "(from Python, or a run that did not end)"),
        ("placewright", summary.get("version") or VERSION),
        ("seed", str(summary.get("seed", ""))),
        ("problem", f"{problem.fingerprint}: {problem.graph.num_ops:,} ops in "
         f"{problem.num_groups:,} groups, {problem.num_devices} devices"),
        ("report", f"placewright {VERSION}, plotly {plotly_version()}"),
    ]  # fmt: skip
    if summary.get("interrupted"):
        entries.append(("note", "the run was stopped before its budget was used"))
    return entries


# --- how the search went -------------------------------------------------------------------------


def _progress(run: Run) -> list[dict[str, Any]]:
    if run.progression is None:
        return []
    return [
        {
            "placer": placer,
            "points": [
                [step.number, short(step.trial.at_seconds), step.trial.measurement.mean_seconds]
                for step in steps
            ],
        }
        for placer, steps in run.progression.improvements.items()
        if steps
    ]


def _overall(run: Run) -> list[list[float]]:
    """Best so far of all placers together."""
    result: list[list[float]] = []
    for point in sorted(point for line in _progress(run) for point in line["points"]):
        if not result or point[2] < result[-1][2]:
            result.append(point)
    return result


def _metrics(run: Run) -> list[dict[str, Any]]:
    by_placer: dict[str, list[Any]] = defaultdict(list)
    for record in run.metrics:
        by_placer[str(record["placer"])].append(record)
    result = []
    for placer, records in by_placer.items():
        records = records[:: math.ceil(len(records) / 1000)]
        result.append(
            {
                "placer": placer,
                **{
                    # A mean over nothing is missing.
                    key: [short(r[key]) if key in r else None for r in records]
                    for key in ("update", "reward_mean", "entropy", "failure_share")
                },
            }
        )
    return result


# --- the placement -------------------------------------------------------------------------------


def _ops(run: Run) -> dict[str, Any]:
    graph = run.problem.graph
    types = sorted(set(graph.op_types))
    number = {name: i for i, name in enumerate(types)}
    return {
        "names": list(graph.op_names),
        "types": types,
        "type": [number[name] for name in graph.op_types],
        "group": run.problem.grouping.group_of.tolist(),
    }


def _graph(run: Run, timeline: Timeline, key: str) -> dict[str, Any]:
    problem = run.problem
    edges = analysis.traffic(problem)
    layer, height = analysis.layered(problem.num_groups, edges)
    devices = timeline.placement.devices
    took = timeline.op_end - timeline.op_start
    seconds = np.zeros(problem.num_groups)
    np.add.at(seconds, problem.grouping.group_of, took)
    lane, lanes = _lanes(layer, devices.tolist(), problem.cluster.device_names)
    return {
        "ops": key,
        "names": list(problem.grouping.names),
        "layer": layer.tolist(),
        "height": height.tolist(),
        "lane": lane,
        "lanes": lanes,
        "device": devices.tolist(),
        "seconds": [short(s) for s in seconds.tolist()],
        "counts": np.bincount(problem.grouping.group_of, minlength=problem.num_groups).tolist(),
        "resident": problem.group_resident_bytes.tolist(),
        "edges": _pairs(edges),
        "opSeconds": [float(f"{s:.3g}") for s in took.tolist()],
    }


def _pairs(edges: analysis.Traffic) -> list[list[int]]:
    """[a, b, bytes from a to b, bytes back, tensors]: gradients go back where values came from, and
    one line shows both."""
    both: dict[tuple[int, int], list[int]] = {}
    for a, b, size, tensors in zip(
        edges.source.tolist(),
        edges.target.tolist(),
        edges.bytes.tolist(),
        edges.tensors.tolist(),
        strict=True,
    ):
        entry = both.setdefault((min(a, b), max(a, b)), [0, 0, 0])
        entry[0 if a < b else 1] += size
        entry[2] += tensors
    return [[a, b, *entry] for (a, b), entry in both.items()]


def _lanes(
    layer: IntArray, devices: Sequence[int], names: Sequence[str]
) -> tuple[list[float], list[tuple[str, float]]]:
    """Heights that put each device's groups into a band of its own; (name, height) of the bands."""
    stacks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for group, (column, device) in enumerate(zip(layer.tolist(), devices, strict=True)):
        stacks[device, column].append(group)
    heights = [0.0] * len(devices)
    bands = []
    top = 0.0
    for device, name in enumerate(names):
        tallest = max((len(s) for (d, _), s in stacks.items() if d == device), default=1)
        middle = top - (tallest - 1) / 2
        bands.append((name, middle))
        for (d, _), stack in stacks.items():
            if d == device:
                for i, group in enumerate(stack):
                    heights[group] = middle + (len(stack) - 1) / 2 - i
        # Bands of one row each need room for lines between them.
        top -= tallest + max(1.0, 0.25 * tallest)
    return heights, bands


def _gantt(timeline: Timeline) -> dict[str, Any]:
    drawn = analysis.gantt(timeline)
    return {
        "step": timeline.step_seconds,
        "rows": drawn.rows,
        "ops": [bar(one)[:5] for one in drawn.ops],
        "transfers": [bar(one) for one in drawn.transfers],
        "path": [[row, short(start), short(end)] for row, start, end in drawn.path],
    }


def bar(one: analysis.Bar) -> list[float]:
    return [
        one.row, short(one.start), short(one.end - one.start), one.what, one.things, one.bytes,
    ]  # fmt: skip


# --- two runs ------------------------------------------------------------------------------------


def _comparison(a: Run, b: Run) -> dict[str, Any]:
    rows = []
    comparable = a.problem.graph.fingerprint == b.problem.graph.fingerprint

    def add(
        label: str, values: Sequence[float | None], show: Callable[[float], str], less: int
    ) -> None:
        """`less` is 1 where less is better, -1 where more is, 0 where neither."""
        first, second = values
        difference, better = "", 0
        if comparable and first and second is not None and first != second:
            change = second / first - 1
            difference = f"{change:+.1%}" if abs(change) < 10 else f"{second / first:.0f}{TIMES}"
            better = -less if change > 0 else less
        texts = ["-" if value is None else show(value) for value in values]
        rows.append({"label": label, "values": texts, "difference": difference, "better": better})

    both = (a, b)
    steps = [r.best.measurement.mean_seconds if r.ok and r.best else None for r in both]
    add("step time", steps, format_seconds, 1)
    add(
        "lower bound",
        [r.summary["lower_bound_seconds"] or None for r in both],
        format_seconds,
        0,
    )
    times = [r.timeline for r in both]
    add(
        "devices that compute",
        [float((t.busy_seconds > 0).sum()) if t else None for t in times],
        lambda x: f"{x:.0f}",
        0,
    )
    add(
        "computing at a time, mean",
        [analysis.mean_computing(t) if t and t.step_seconds else None for t in times],
        lambda x: f"{x:.2f} devices",
        -1,
    )
    add(
        "sent between devices",
        [float(t.transfers.bytes.sum()) if t else None for t in times],
        format_bytes,
        1,
    )
    add(
        "transfers the step waits for",
        [analysis.critical_path_shares(t).transfer_seconds if t else None for t in times],
        format_seconds,
        1,
    )
    add(
        "fullest memory",
        [full[1] / full[2] if (full := words.tightest(r)) else None for r in both],
        lambda x: f"{x:.0%}",
        1,
    )
    add("placements tried", [float(r.summary["trials"]) for r in both], lambda x: f"{x:,.0f}", 0)
    return {"rows": rows, "note": _how_different(a, b)}


def _how_different(a: Run, b: Run) -> str:
    if a.problem.graph.fingerprint != b.problem.graph.fingerprint:
        return "Two different models."
    if a.problem.cluster.fingerprint != b.problem.cluster.fingerprint:
        return "The same model on two different machines."
    if a.best is None or b.best is None:
        return "The same model and machine."
    names = a.problem.cluster.device_names
    ops = [r.best.placement.devices[r.problem.grouping.group_of] for r in (a, b) if r.best]
    moved = int((ops[0] != ops[1]).sum())
    if not moved:
        return "The same model, machine and placement."
    return (
        f"The same model and machine; {moved:,} of {a.problem.graph.num_ops:,} ops sit on another "
        f"of the {len(names)} devices."
    )
