"""The tables of `benchmarks.paper_gpu`, made from its files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row, markdown, marked

COLUMNS = {
    "cpu only": "CPU only",
    "one gpu": "one GPU",
    "scotch": "Scotch",
    "mincut": "MinCut",
    "expert": "expert",
    "heft": "HEFT",
    "m-etf": "m-ETF",
    "reinforce": "`reinforce`",
    "ppo": "`ppo`",
    "local-search": "local search",
    "ppo warm": "`ppo`, simulated first",
    "simulate+measure": "simulate+measure",
    "auto": "`auto`",
}
"""Method in the files -> heading."""

OURS = ("ppo warm", "simulate+measure", "auto")
BY_HAND = ("scotch", "mincut", "expert")
"""What one would do without a search for step times."""
OTHERS = tuple(method for method in COLUMNS if method not in OURS)
LEARNERS = ("reinforce", "ppo", "local-search", "ppo warm", "simulate+measure", "auto")

MACHINES = {
    "paper": "8 SMs each, fp32",
    "modern": "32 SMs each, TF32",
    "cpu": "two sets of cores",
}

EXPLAINED = """\
Milliseconds per training step, measured: the mean of some rounds in which all answers run in
turns, ± half its 95% confidence interval over the rounds, where that is there; what takes more
than three times the best ran once. The gain is that of the best of the last three columns over
the best of the others. All searches had the same real time, in which they simulate and learn as
well. `reinforce`, `ppo` and local search learn from real runs alone, and the best that they
proposed themselves counts."""


def cases_of(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    """Model, machine and partitions -> method -> its row."""
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        key = (row["model"], row["machine"], str(row["partitions"]))
        cases.setdefault(key, {})[row["method"]] = row
    return cases


def title(key: tuple[str, str, str]) -> str:
    model, machine, partitions = key
    if machine == "cpu":
        return f"{model}, {MACHINES[machine]}"
    return f"{model}, {partitions} GPUs of {MACHINES[machine].replace(' each', '')}"


def seconds_of(row: Row | None) -> float:
    return float(row["step_seconds"]) if row and row["step_seconds"] != "" else math.inf


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["step_seconds"] == "":
        return str(row["outcome"])
    half = row["half_width_seconds"]
    sure = f" ± {1000 * float(half):.1f}" if half not in ("", None) else ""
    return f"{1000 * float(row['step_seconds']):.1f}{sure}"


def best_of(found: Mapping[str, Row], methods: Sequence[str]) -> str:
    return min(methods, key=lambda method: seconds_of(found.get(method)))


def main_table(rows: Sequence[Row]) -> str:
    lines = []
    for key, found in cases_of(rows).items():
        ours, other = best_of(found, OURS), best_of(found, OTHERS)
        gain = seconds_of(found.get(other)) / seconds_of(found.get(ours)) - 1
        said = f"{100 * gain:.0f}% over {COLUMNS[other]}" if math.isfinite(gain) else ""
        lines.append([title(key), *(_cell(found.get(method)) for method in COLUMNS), said])
    return "\n\n".join([
        markdown(["ms per step", *COLUMNS.values(), "gain"], lines), EXPLAINED, verdicts(rows)
    ])  # fmt: skip


def short_table(rows: Sequence[Row]) -> str:
    """What a reader wants to know first."""
    cases = {key: found for key, found in cases_of(rows).items() if key[1:] == ("paper", "4")}
    wanted = ("one gpu", "scotch", "mincut", "expert", "heft", "reinforce", *OURS)
    few = [method for method in wanted if any(method in found for found in cases.values())]
    lines = [
        [key[0], *(_cell(found.get(method)) for method in few)] for key, found in cases.items()
    ]
    return markdown(["ms per step", *(COLUMNS[method] for method in few)], lines)


def verdicts(rows: Sequence[Row]) -> str:
    """What was wanted, and whether it is so."""
    said = []
    for key, found in cases_of(rows).items():
        ours = best_of(found, OURS)
        mine = found.get(ours)
        if mine is None or not math.isfinite(seconds_of(mine)):
            continue
        slower = [
            COLUMNS[method]
            for method in OTHERS
            if seconds_of(found.get(method)) < seconds_of(mine) - _noise(mine, found.get(method))
        ]
        sure = " beyond the noise" if mine["half_width_seconds"] not in ("", None) else ""
        parts = [f"faster{sure}: {', '.join(slower)}" if slower else f"nothing is faster{sure}"]
        predicted = mine["predicted_seconds"]
        if predicted != "":
            off = float(predicted) / seconds_of(mine) - 1
            parts.append(f"the simulator predicts its time with an error of {off:+.0%}")
        known = [m for m in BY_HAND if math.isfinite(seconds_of(found.get(m)))]
        if known:
            other = min(seconds_of(found.get(method)) for method in known)
            names = ", ".join(COLUMNS[method] for method in known)
            parts.append(f"{other / seconds_of(mine) - 1:+.0%} over the best of {names}")
        scratch, published = (seconds_of(found.get(m)) for m in ("ppo", "reinforce"))
        if math.isfinite(scratch) and math.isfinite(published):
            parts.append(f"`ppo` over `reinforce`: {published / scratch - 1:+.0%}")
        best = f"the best of ours is {COLUMNS[ours]} ({1000 * seconds_of(mine):.1f} ms)"
        said.append(f"- {title(key)}: {'; '.join([best, *parts])}.")
    return "\n".join(said)


def _noise(*rows: Row | None) -> float:
    halves = [row["half_width_seconds"] for row in rows if row is not None]
    return math.hypot(*(float(half) for half in halves if half not in ("", None)))


def details_table(rows: Sequence[Row]) -> str:
    """What each answer needs, what it took to find it, and what was predicted."""
    lines = []
    for key, found in cases_of(rows).items():
        for method in COLUMNS:
            row = found.get(method)
            if row is None:
                continue
            predicted = row["predicted_seconds"]
            lines.append([
                title(key), COLUMNS[method], _cell(row),
                f"{1000 * float(predicted):.1f}" if predicted != "" else "",
                row["peak_gb"], row["trials"], row["search_seconds"], row["trials_to_2_percent"],
                row["costs"] or _short(row["reason"]),
            ])  # fmt: skip
    return markdown(
        ["case", "method", "ms per step", "predicted, ms", "peak GB per device (CPU first)",
         "real runs", "seconds", "runs until within 2%", "placed under, or why not"],
        lines, texts=2,
    )  # fmt: skip


def _short(text: str) -> str:
    return text if len(text) <= 70 else text[:67] + "..."


def rewards_table(rows: Sequence[Row]) -> str:
    """How many real runs each search needs: of `runs_of_searches.csv`."""
    cases: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for row in rows:
        key = (row["model"], row["machine"], str(row["partitions"]))
        cases.setdefault(key, {}).setdefault(row["method"], []).append(row)
    lines = []
    for key, found in cases.items():
        for method in LEARNERS:
            mine = found.get(method, [])
            ran = [row for row in mine if row["best_seconds"] != ""]
            if not ran:
                continue
            runs, end = int(mine[-1]["trial"]), float(ran[-1]["best_seconds"])
            first = next(row for row in ran if float(row["best_seconds"]) <= 1.02 * end)
            failed = int(mine[-1]["failed"]) / runs
            seconds = [float(row["seconds"]) for row in mine]
            lines.append([
                title(key), COLUMNS[method], runs,
                f"{runs / max(seconds):.1f}" if max(seconds) else "",
                f"{1000 * end:.1f}", first["trial"], f"{float(first['seconds']):.1f}",
                f"{failed:.0%}",
            ])  # fmt: skip
    return markdown(
        ["case", "search", "real runs", "runs a second", "its fastest run, ms",
         "runs until within 2% of it", "seconds until then", "of the runs failed"],
        lines, texts=2,
    )  # fmt: skip


def analysis_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        key = (row["model"], row["machine"], str(row["partitions"]))
        who = COLUMNS.get(row["placement"], row["placement"])
        lines.append([
            title(key), f"{who} ({1000 * float(row['step_seconds']):.1f} ms)", row["device"],
            *(f"{1000 * float(row[f'{what}_seconds'] or 0):.1f}"
              for what in ("compute", "copy", "idle")),
            row["peak_gb"], row["groups"], row["what"],
        ])  # fmt: skip
    return markdown(
        ["case", "placement", "device", "computes, ms", "copies, ms", "computes nothing, ms",
         "peak, GB", "groups", "most of them"],
        lines, texts=3,
    )  # fmt: skip


def as_runs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """As `benchmarks.paper` has training: the case in place of the model."""
    return [
        {
            **row,
            "model": title((row["model"], row["machine"], str(row["partitions"]))),
            "placement": str(COLUMNS.get(row["placement"], row["placement"])).strip("`"),
        }
        for row in rows
    ]


def training_table(rows: Sequence[Row]) -> str:
    lines: list[list[object]] = []
    remarks = []
    runs: dict[str, dict[tuple[str, int], list[Row]]] = {}
    for row in as_runs(rows):
        key = (row["placement"], int(row["run"]))
        runs.setdefault(row["model"], {}).setdefault(key, []).append(row)
    for model, found in runs.items():
        losses = {}
        for (who, number), mine in found.items():
            losses[who, number] = [float(row["loss"]) for row in mine]
            seconds = float(mine[-1]["seconds"])
            lines.append([
                model, f"{who}, again" if number else who, len(mine), f"{seconds:.2f}",
                f"{1000 * seconds / max(1, len(mine) - 1):.1f}",
                f"{losses[who, number][0]:.4f}", f"{losses[who, number][-1]:.4f}",
            ])  # fmt: skip
        said = []
        firsts = [values for (_, number), values in losses.items() if not number]
        if len(firsts) > 1:
            said.append(f"under both placements they are {_apart(firsts)}")
        for (who, number), values in losses.items():
            if number:
                said.append(f"of two runs of {who} they are {_apart([losses[who, 0], values])}")
        if said:
            remarks.append(f"{model}, losses: {'; '.join(said)}.")
    heading = ["case", "placement", "steps", "seconds", "ms a step", "first loss", "last loss"]
    return "\n\n".join([markdown(heading, lines, texts=2), *remarks])


def _apart(losses: Sequence[Sequence[float]]) -> str:
    apart = [
        (max(at) - min(at)) / max(abs(statistics.fmean(at)), 1e-12)
        for at in zip(*losses, strict=False)
    ]
    if not max(apart):
        return "equal at every step, to the last bit"
    return f"{apart[0]:.1g} of the loss apart at the first step and {max(apart):.1g} at most"


def where_table(rows: Sequence[Row]) -> str:
    return markdown(
        ["case", "on", "with", "seconds of each search", "seconds in all", "complete"],
        [
            [
                title((row["model"], row["machine"], str(row["partitions"]))),
                f"{row['gpu']}, {row['cores']} cores of {row['cpu']}",
                f"placewright {row['placewright']}, torch {row['torch']}, Python {row['python']}",
                row["search_seconds"],
                row["seconds"],
                row["complete"],
            ]
            for row in rows
        ],
        texts=3,
    )


def readme(page: Path) -> str:
    """The page of the results; the tables are filled in from the files."""
    names = ("main", "details", "rewards", "analysis", "training", "where")
    headings = (
        "The table", "What each answer needs", "How fast is it learned", "What the devices do",
        "Training", "What it ran on",
    )  # fmt: skip
    parts = ["# The paper's experiment, measured on partitions of one GPU",
             "Made by `python -m benchmarks.paper_gpu`; see docs/paper.md."]  # fmt: skip
    for name, heading in zip(names, headings, strict=True):
        parts += [f"## {heading}", marked(f"paper-gpu-{name}", "*Not there yet.*")]
    return "\n\n".join(parts) + "\n"
