"""A module on the streams of one GPU as an HTML page: what ran when, beside what was expected."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewright._version import VERSION
from placewright.errors import ReportError
from placewright.files import write_text
from placewright.report.analysis import MOST_BARS, Bar, merged
from placewright.report.page import TIMES, bar, fill, plotly_version, short, tile
from placewright.units import format_seconds

if TYPE_CHECKING:  # both import torch, which pages do not need
    from placewright.backends.pytorch.streams.plan import StreamPlan
    from placewright.backends.pytorch.streams.timelines import Timelines

_MOST_NOTES = 20
_LONGEST = 8

_WORDS = {
    "kind": "streams of one GPU",
    "per": " per call",
    "methodsTitle": "Every way to run it",
    "methodsNote": "Medians of calls in turns, inputs and outputs copied as each way does it. The "
    "fastest is what runs.",
    "methodsUnit": "call",
    "timelineTitle": "One call, moment by moment",
    "timelineNote": "What ran on which stream: above as measured in the captured graph, below as "
    "it was expected from what each group takes alone and demands of the chip. Events around a "
    "group take a microsecond or two themselves. Drag to zoom in, double-click to zoom out.",
    "loadTitle": "Load of the streams",
    "loadNote": "What each stream does in a call.",
    "loads": ["computing", "idle"],
    "whyTitle": "What was found",
    "whyNote": "By the search, and by the timeline where there is one.",
    "things": "kernel group",
}
"""What the page says where a report of placements says something else."""


def write_streams_report(
    path: str | Path, plan: StreamPlan, timelines: Timelines | None, *, model: str, device: str
) -> Path:
    """Writes the page of a plan, with its timelines where something was captured."""
    page = make_streams_page(plan, timelines, model=model, device=device)
    write_text(path, page, ReportError)
    return Path(path)


def make_streams_page(
    plan: StreamPlan, timelines: Timelines | None, *, model: str, device: str
) -> str:
    """The page as text."""
    mine = plan.seconds.get(plan.chosen)
    run = _run(model, device) | {
        "name": "measured",
        "step": mine,
        "measured": True,
        "answer": plan.verdict,
        "tiles": _tiles(plan),
        "single": plan.seconds.get("eager"),
        "methods": [
            {"method": name, "seconds": seconds, "outcome": "", "reason": "", "trials": 0,
             "search": None}
            for name, seconds in plan.seconds.items()
        ],
        "sections": _sections(plan, timelines),
        "origin": [
            ("placewright", VERSION),
            ("plan", f"{plan.chosen}, {len(plan.groups)} groups, {plan.fingerprint or 'none'}"),
            ("report", f"plotly {plotly_version()}"),
        ],
    }  # fmt: skip
    runs = [run]
    compare = None
    if timelines is not None:
        expected = _run(model, device) | {
            "name": "expected",
            "step": timelines.expected_seconds,
            "answer": "What the groups take alone on these streams, slowed down where they demand "
            "more than the chip together; without copies of inputs and outputs.",
        }
        runs.append(expected)
        for one, times in ((run, timelines.measured), (expected, timelines.expected)):
            one |= _drawn(timelines, times)
        compare = {"rows": _rows(timelines), "note": "Of the groups alone, from the first to the "
                   "last."}  # fmt: skip
    return fill(
        f"{model} on {device}", {"runs": runs, "graphs": {}, "compare": compare, "words": _WORDS}
    )


def _run(model: str, device: str) -> dict[str, Any]:
    """What every run on a page has; most of it is nothing here."""
    return {
        "model": model, "cluster": device, "answer": "", "basis": "", "step": None,
        "measured": False, "bound": 0.0, "single": None, "tiles": [], "devices": [],
        "methods": [], "trials": 0, "searchSeconds": 0.0, "progress": [], "overall": [],
        "metrics": [], "graph": None, "gantt": None, "memory": None, "load": None,
        "expertLoad": None, "whatIfs": [], "sections": [], "origin": [],
    }  # fmt: skip


def _tiles(plan: StreamPlan) -> list[dict[str, str]]:
    mine = plan.seconds.get(plan.chosen)
    tiles = []
    for name in ("eager", "one stream, plain"):
        seconds = plan.seconds.get(name)
        if mine and seconds is not None and name != plan.chosen:
            what = "the module as it is" if name == "eager" else "its ops on one stream"
            tiles.append(tile(f"{seconds / mine:.2f}{TIMES}", f"over {what}",
                              format_seconds(seconds)))  # fmt: skip
    if plan.groups:
        fewest = f"{len(plan.groups):,} groups, fusion {plan.fusion}"
        tiles.append(tile(str(len(set(plan.streams))), "streams", fewest))
    if plan.trials:
        tiles.append(tile(f"{plan.trials:,}", "schedules tried", f"in {plan.search_seconds:.1f} s"))
    return tiles


def _drawn(timelines: Timelines, times: tuple[tuple[float, float], ...]) -> dict[str, Any]:
    streams = sorted(set(timelines.streams))
    row = {stream: number for number, stream in enumerate(streams)}
    whole = max((end for _, end in times), default=0.0)
    bars = [
        Bar(row[stream], start, end, number, 1)
        for number, (stream, (start, end)) in enumerate(zip(timelines.streams, times, strict=True))
    ]
    busy = [sum(b.end - b.start for b in bars if b.row == number) for number in row.values()]
    return {
        "devices": [{"name": f"stream {s}", "type": "gpu", "memory": 0} for s in streams],
        "gantt": {
            "step": whole,
            "rows": [{"label": f"stream {s}", "device": row[s]} for s in streams],
            "ops": [bar(b)[:5] for b in merged(sorted(bars), MOST_BARS, whole)],
            "transfers": [],
            "path": [],
            "names": [
                f"{name} ({kernel})"
                for name, kernel in zip(timelines.names, timelines.kernels, strict=True)
            ],
        },
        "load": [[short(seconds), short(max(0.0, whole - seconds))] for seconds in busy],
    }


def _rows(timelines: Timelines) -> list[dict[str, Any]]:
    found = [("all groups", timelines.measured_seconds, timelines.expected_seconds)]
    expected = timelines.busy_seconds(timelines.expected)
    for stream, seconds in timelines.busy_seconds().items():
        found.append((f"stream {stream}, computing", seconds, expected[stream]))
    return [
        {"label": label, "values": [format_seconds(measured), format_seconds(thought)],
         "difference": f"{thought / measured - 1:+.1%}" if measured else "", "better": 0}
        for label, measured, thought in found
    ]  # fmt: skip


def _sections(plan: StreamPlan, timelines: Timelines | None) -> list[list[Any]]:
    sections: list[list[Any]] = [["The choice", [plan.verdict]]]
    if plan.found:
        lines = [f"{how}: {format_seconds(s)} a replay" for how, s in plan.found.items()]
        sections.append(["The best of each way of searching", lines])
    if plan.kernels:
        counts = Counter(plan.kernels).most_common()
        sections.append(["Kernels", [f"{kernel}: {count} groups" for kernel, count in counts]])
    if timelines is not None:
        sections.append(["Longest groups", timelines.longest(_LONGEST)])
    if plan.notes:
        left = len(plan.notes) - _MOST_NOTES
        more = [f"and {left} others"] if left > 0 else []
        sections.append(["What did not work", [*plan.notes[:_MOST_NOTES], *more]])
    return sections
