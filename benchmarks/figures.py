"""Figures of the results, as SVG that is the same for the same numbers.

Needs matplotlib, which only developers have. Without it there are none, and a line says so: the
numbers are in the files.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row

COLOURS = ("#1f6fb2", "#d1651a", "#2c8a3e", "#7a4fa3", "#b03060", "#7d7a1c")
"""Told apart also by those who see few colours, in this order."""


_KINDS = {
    "groups": "random or contiguous groups",
    "co-location sets": "the same of co-location sets",
    "": "proposed by a method",
}
"""Of placements that were predicted and measured; all others are named by their method."""


def fidelity(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured seconds, a panel for each model."""
    for number, (model, axes, mine) in enumerate(_panels(rows, path, 3.4), start=1):
        most = 0.0
        for colour, (kind, label) in zip(COLOURS, _KINDS.items(), strict=False):
            chosen = [row for row in mine if (row["kind"] if row["kind"] in _KINDS else "") == kind]
            measured = [_measured(row) for row in chosen]
            predicted = [float(row["predicted_seconds"]) for row in chosen]
            axes.scatter(measured, predicted, s=14, color=colour, label=label)
            most = max([most, *measured, *predicted])
        axes.plot([0, 1.05 * most], [0, 1.05 * most], color="#888888", linewidth=0.8)
        axes.set(
            title=model,
            xlabel="measured, s per step",
            ylabel="predicted, s per step" if number == 1 else "",
            xlim=(0, 1.05 * most),
            ylim=(0, 1.05 * most),
        )
        if number == 1:
            axes.legend(fontsize=7, loc="lower right")


def fidelity_of_machines(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured milliseconds, a panel for each machine and a colour for each
    model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    panels = [{**row, "of": row["model"], "model": row["machine"]} for row in rows]
    for number, (machine, axes, mine) in enumerate(_panels(panels, path, 3.8), start=1):
        times: list[float] = []
        for place, model in enumerate(models):
            chosen = [row for row in mine if row["of"] == model]
            measured = [1e3 * _measured(row) for row in chosen]
            predicted = [1e3 * float(row["predicted_seconds"]) for row in chosen]
            axes.scatter(measured, predicted, s=9, color=COLOURS[place % len(COLOURS)], label=model)
            times += [*measured, *predicted]
        ends = [0.9 * min(times), 1.1 * max(times)]
        axes.plot(ends, ends, color="#888888", linewidth=0.8)
        axes.set(
            title=machine,
            xlabel="measured, ms per step",
            ylabel="predicted, ms per step" if number == 1 else "",
            xlim=ends,
            ylim=ends,
            xscale="log",
            yscale="log",
        )
        if number == 1:
            axes.legend(fontsize=7, loc="upper left")


def _measured(row: Row) -> float:
    passes = [float(row[name]) for name in ("first_seconds", "second_seconds") if row[name] != ""]
    return sum(passes) / len(passes)


def training(rows: Sequence[Row], path: Path) -> None:
    """The loss against time: a line for each placement, of its first run."""
    for model, axes, mine in _panels(rows, path, 4.2):
        names = dict.fromkeys(row["placement"] for row in rows)
        for colour, name in zip(COLOURS, names, strict=False):
            first = [row for row in mine if row["placement"] == name and int(row["run"]) == 0]
            axes.plot(
                [float(row["seconds"]) for row in first],
                [float(row["loss"]) for row in first],
                color=colour,
                label=name,
            )
        axes.set(title=model, xlabel="seconds of training, without the first step", ylabel="loss")
        axes.legend()


_SEARCHES = {
    "reinforce": ("#888888", "reinforce"),
    "ppo": ("#2c8a3e", "ppo"),
    "local-search": ("#7a4fa3", "local search"),
    "ppo warm": ("#1f6fb2", "ppo, simulated first"),
    "simulate+measure": ("#d1651a", "simulate+measure"),
    "auto": ("#111111", "auto"),
}
"""Colour and label of each search with real runs."""


def rewards(runs: Sequence[Row], updates: Sequence[Row], path: Path) -> None:
    """Learning on real rewards, a column for each case: the best run so far over runs and over
    seconds, each policy's mean, its entropy and the share of its samples that failed."""
    if not runs:
        return
    cases = list(dict.fromkeys((r["model"], r["machine"], r["partitions"]) for r in runs))
    figure = _figure(3.6 * len(cases), 10.0)
    if figure is None:
        return
    axes = figure.subplots(4, len(cases), squeeze=False)
    for column, case in enumerate(cases):
        by_run, by_second, entropy, failures = axes[:, column]
        for method, (colour, label) in _SEARCHES.items():
            mine = [r for r in _of_case(runs, case, method) if r["best_seconds"] != ""]
            best = [1000 * float(r["best_seconds"]) for r in mine]
            for panel, what in ((by_run, "trial"), (by_second, "seconds")):
                times = [float(r[what]) for r in mine]
                panel.step(times, best, where="post", color=colour, label=label)
            learned = _of_case(updates, case, method)
            at = [float(r["trials"]) for r in learned if r["step_seconds_mean"] != ""]
            means = [1000 * float(r["step_seconds_mean"]) for r in learned
                     if r["step_seconds_mean"] != ""]  # fmt: skip
            by_run.plot(at, means, color=colour, linewidth=0.8, linestyle=":")
            for panel, what in ((entropy, "entropy"), (failures, "failure_share")):
                known = [r for r in learned if r[what] != ""]
                panel.plot(
                    [float(r["trials"]) for r in known],
                    [float(r[what]) for r in known],
                    color=colour, label=label,
                )  # fmt: skip
        model, machine, partitions = case
        name = f"{model}, {partitions} GPUs ({machine})" if int(partitions) else model
        by_run.set(title=name, xlabel="real runs (dotted: mean of a policy's samples)",
                   yscale="log")  # fmt: skip
        by_second.set(xlabel="seconds of search", yscale="log")
        entropy.set(xlabel="real runs", ylim=(0, None))
        failures.set(xlabel="real runs", ylim=(-0.02, 1.02))
        if not column:
            by_run.legend(fontsize=7)
            for panel, text in zip(
                axes[:, 0],
                ("best so far, ms per step", "best so far, ms per step",
                 "entropy of a choice, nats", "share of samples that failed"),
                strict=True,
            ):  # fmt: skip
                panel.set_ylabel(text)
    _save(figure, path)


def _of_case(rows: Sequence[Row], case: tuple[Any, ...], method: str) -> list[Row]:
    keys = ("model", "machine", "partitions")
    return [r for r in rows if tuple(r[k] for k in keys) == case and r["method"] == method]


def _panels(
    rows: Sequence[Row], path: Path, width: float
) -> Iterator[tuple[str, Any, Sequence[Row]]]:
    """A panel for each model, with its rows, to be drawn in; saved when all are."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = _figure(width * len(models), 3.6)
    if figure is None:
        return
    for number, model in enumerate(models, start=1):
        axes = figure.add_subplot(1, len(models), number)
        yield model, axes, [row for row in rows if row["model"] == model]
    _save(figure, path)


def search_cost(rows: Sequence[Row], path: Path) -> None:
    """How the best placement of each search with `auto` got better over time, as a share of the
    best that is known."""
    figure = _figure(6.0, 3.6)
    if figure is None:
        return
    axes = figure.add_subplot()
    cases = dict.fromkeys((row["model"], row["cluster"]) for row in rows)
    models = list(dict.fromkeys(model for model, _ in cases))
    clusters = list(dict.fromkeys(cluster for _, cluster in cases))
    for model, cluster in cases:
        mine = [row for row in rows if (row["model"], row["cluster"]) == (model, cluster)]
        first = min(mine, key=lambda row: int(row["seed"]))["seed"]
        curve = [row for row in mine if row["seed"] == first]
        axes.step(
            [max(float(row["seconds"]), 0.01) for row in curve],
            [float(row["above_best_known"]) for row in curve],
            where="post",
            color=COLOURS[models.index(model) % len(COLOURS)],
            linestyle=("-", "--", ":")[clusters.index(cluster) % 3],
            label=f"{model} {cluster}",
        )
    axes.axhline(0.02, color="#888888", linewidth=0.8)
    axes.set(xlabel="seconds of search on one core", ylabel="above the best known", xscale="log")
    axes.set_yscale("symlog", linthresh=0.02)  # down to nothing, which a logarithm does not reach
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(fontsize=7)
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    """None where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figures: matplotlib is not installed (pip install '.[dev]')", flush=True)
        return None
    # Ids are random otherwise, and text becomes outlines.
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.rcParams.update({"svg.hashsalt": "placewright", "svg.fonttype": "none"})
    made: Any = importlib.import_module("matplotlib.figure")
    return made.Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
