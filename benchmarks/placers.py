"""What each method finds on the benchmark models, and how far from optimal on small problems.

    python -m benchmarks.placers                       # the table, about 50 minutes on 2 cores
    python -m benchmarks.placers --methods auto        # only some of its lines anew
    python -m benchmarks.placers --models rnnlm --seconds 20 --no-write

After each model and cluster, writes `results/placers/placers.csv` (a line for each model, cluster,
method and seed); at the end `exact.csv` (small problems, `auto` against the optimum) and a
README.md with the tables and what made them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.common import (
    CLUSTERS,
    MODELS,
    Row,
    made_by,
    markdown,
    marked,
    merge_csv,
    read_csv,
    write_csv,
)
from benchmarks.common import RESULTS as ALL_RESULTS
from placewright import load, make_problem, place
from placewright import methods as registry
from placewright.cluster import Cluster
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.exact import count_placements, every_placement
from placewright.problem import Problem
from placewright.testing import random_problem

RESULTS = ALL_RESULTS / "placers"
CLASSICAL = ("expert", "scotch", "mincut", "heft", "m-topo", "m-etf", "m-sct")
BASELINES = ("expert", "scotch", "mincut")
SEARCHES = ("local-search", "ppo", "auto")
METHODS = tuple(name for name in registry.METHODS if name != "reinforce")
"""What is compared by time. The published learner needs many times these budgets; it is compared by
trials, in `benchmarks.learning`."""


def main() -> None:
    options = _options()
    rows: list[Row] = []
    for model in options.models:
        graph = load(model)
        for cluster in options.clusters:
            problem = make_problem(graph, Cluster.load(cluster))
            found = measure(problem, options.seconds, options.seeds, options.methods)
            if options.no_write:
                rows += found
            else:
                path = RESULTS / "placers.csv"
                rows = merge_csv(path, found, "model", "cluster", "method", "seed")
                rows.sort(key=_order)
                write_csv(path, rows)
    print(model_table(rows))
    optima: Sequence[Row] = read_csv(RESULTS / "exact.csv")
    if not options.no_exact:
        optima = against_the_optimum()
        print(optimum_text(optima))
        if not options.no_write:
            write_csv(RESULTS / "exact.csv", optima)
    if not options.no_write:
        write(rows, optima, options.seconds)


def _order(row: Row) -> tuple[int, int, int, int]:
    return (
        MODELS.index(row["model"]),
        CLUSTERS.index(row["cluster"]),
        (*METHODS, "auto").index(row["method"]),
        int(row["seed"]),
    )


def measure(
    problem: Problem, seconds: float, seeds: Sequence[int], methods: Sequence[str]
) -> list[Row]:
    """Every method on its own, those that search with the same time as `auto`.

    Those that search run once per seed, the others once: they are deterministic, or far behind.
    """
    rows: list[Row] = []
    # Seed by seed: should the machine become slower meanwhile, it does so for all methods alike.
    for seed, name in itertools.product(seeds, methods):
        if name not in SEARCHES and seed != seeds[0]:
            continue
        result = place(problem, method=name, budget=seconds, seed=seed)
        failed = next((m.best for m in result.methods if m.best is not None), None)
        row = found_row(
            problem,
            name,
            seed,
            result.best or failed,
            trials=result.trials,
            seconds=result.seconds,
            lower_bound=result.lower_bound_seconds,
        )
        if row["step_seconds"] != "":
            # What is reported: a search fits its answer to the one order of ties that it tries.
            row["step_seconds"] = result.step_seconds
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


def found_row(
    problem: Problem,
    method: str,
    seed: int,
    best: Trial | None,
    *,
    trials: int,
    seconds: float,
    lower_bound: float,
) -> dict[str, Any]:
    """What a method found, for a file."""
    ok = best is not None and best.measurement.ok
    return {
        "model": problem.graph.name,
        "cluster": problem.cluster.name,
        "groups": problem.num_groups,
        "method": method,
        "seed": seed,
        "step_seconds": best.measurement.mean_seconds if best is not None and ok else "",
        "outcome": best.measurement.outcome.value if best is not None else "nothing proposed",
        "peak_gb": " ".join(f"{b / 1e9:.2f}" for b in best.measurement.peak_bytes) if best else "",
        "trials": trials,
        "search_seconds": round(seconds, 2),
        "lower_bound_seconds": lower_bound,
    }


def against_the_optimum() -> list[dict[str, Any]]:
    """`auto` on problems small enough to try every placement. The optimum is the simulator's own.

    `auto` runs without `exact`, which would try every placement too.
    """
    methods = [name for name in registry.AUTO if name != "exact"]
    rows: list[dict[str, Any]] = []
    for seed in itertools.count():
        if len(rows) == 20:
            break
        problem = random_problem(seed, max_ops=24, max_groups=8)
        if not 500 <= count_placements(problem) <= 70_000:
            continue
        every = [Placement.of(problem, devices) for devices in every_placement(problem)]
        best = min(m.mean_seconds for m in SimulatedEvaluator(problem).evaluate(every))
        result = place(problem, method=",".join(methods), trials=len(every) // 10, seed=seed)
        rows.append(
            {
                "seed": seed,
                "ops": problem.graph.num_ops,
                "groups": problem.num_groups,
                "devices": problem.num_devices,
                "placements": len(every),
                "trials": result.trials,
                "optimum_seconds": best,
                "auto_seconds": result.step_seconds,
                "excess_percent": round(100 * (result.step_seconds / best - 1), 3),
            }
        )
    return rows


def seconds_text(rows: Sequence[Row]) -> str:
    """The step time of rows that differ by their seed: mean and range, or how they failed."""
    times = [float(row["step_seconds"]) for row in rows if row["step_seconds"] != ""]
    if not times:
        return str(rows[0]["outcome"]) if rows else ""
    text = f"{times[0]:.3f}"
    if len(times) > 1:
        text = f"{statistics.fmean(times):.3f} ({min(times):.3f}-{max(times):.3f})"
    if len(times) < len(rows):
        text += f", {len(rows) - len(times)} of {len(rows)} seeds failed"
    return text


def short_table(rows: Sequence[Row], cluster: str = "k80x4") -> str:
    """What a reader wants to know first: people's ways, ours, and what nobody can beat."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if (row["model"], row["cluster"]) == (model, cluster)]
        if not mine:
            continue
        means = {
            method: statistics.fmean(times)
            for method in dict.fromkeys(row["method"] for row in mine)
            if (times := _times(row for row in mine if row["method"] == method))
        }
        best = min(seconds for method, seconds in means.items() if method in CLASSICAL)
        numbers = [means["single"], means["expert"], best, means["auto"], _bound(mine)]
        lines.append([model, *(f"{number:.3f}" for number in numbers)])
    return markdown(
        ["", "best single device", "expert's split", "best classical method", "`auto`",
         "lower bound"],
        lines,
    )  # fmt: skip


def _times(rows: Iterable[Row]) -> list[float]:
    return [float(row["step_seconds"]) for row in rows if row["step_seconds"] != ""]


def _bound(rows: Iterable[Row]) -> float:
    """Of all answers: op by op less can be proven than by groups."""
    return min(float(row["lower_bound_seconds"]) for row in rows)


def model_table(rows: Sequence[Row]) -> str:
    """A Markdown table: methods down, models and clusters across, mean over seeds."""
    cases = list(dict.fromkeys((r["model"], r["cluster"]) for r in rows))
    methods = [*dict.fromkeys(r["method"] for r in rows if r["method"] != "auto"), "auto"]
    lines = [
        "| method | " + " | ".join(f"{model} {cluster}" for model, cluster in cases) + " |",
        "|---|" + "---:|" * len(cases),
    ]
    for method in methods:
        cells = []
        for case in cases:
            mine = [r for r in rows if (r["model"], r["cluster"]) == case and r["method"] == method]
            cells.append(seconds_text(mine))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    bounds = [_bound(r for r in rows if (r["model"], r["cluster"]) == case) for case in cases]
    lines.append("| lower bound | " + " | ".join(f"{bound:.3f}" for bound in bounds) + " |")
    over_baselines, over_all = [], []
    for case in cases:
        times: dict[str, list[float]] = {}
        for row in rows:
            if (row["model"], row["cluster"]) == case and row["step_seconds"] != "":
                times.setdefault(row["method"], []).append(float(row["step_seconds"]))
        auto = times.pop("auto", [math.nan])
        baselines = [time for name in BASELINES for time in times.get(name, [])]
        gain = min(baselines, default=math.nan) / statistics.fmean(auto) - 1
        over_baselines.append(f"{100 * gain:.0f}%" if baselines else "")
        over_all.append(gain_text(min(times.values(), key=statistics.fmean), auto) if times else "")
    name = "gain over the best of expert, scotch, mincut"
    lines.append(f"| {name} | " + " | ".join(over_baselines) + " |")
    name = "gain over the best of all (± standard error)"
    lines.append(f"| {name} | " + " | ".join(over_all) + " |")
    return "\n".join(lines)


def gain_text(others: Sequence[float], ours: Sequence[float]) -> str:
    """How much faster ours are in the mean, and by how much another choice of seeds may change
    that, where there were several."""
    ratio = statistics.fmean(others) / statistics.fmean(ours)
    text = f"{100 * (ratio - 1):+.2f}%"
    if min(len(others), len(ours)) > 1:
        errors = [
            statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)
            for times in (others, ours)
        ]
        text += f" ± {100 * ratio * math.hypot(*errors):.2f}"
    return text


def optimum_text(optima: Sequence[Row]) -> str:
    excesses = [float(row["excess_percent"]) for row in optima]
    worst, exact = max(excesses), excesses.count(0.0)
    return (
        f"On {len(optima)} random problems small enough to try every placement, `auto` (without "
        f"`exact`, trying a tenth of them) found the optimum in {exact}; the worst was "
        f"{worst:.2f}% above."
    )


def write(rows: Sequence[Row], optima: Sequence[Row], seconds: float) -> None:
    text = [
        "# Placers on the benchmark models",
        "",
        "Simulated seconds per training step (roofline costs), as reported: the mean over several "
        "orders of ops that are ready at the same moment. Over seeds: the mean, with the range.",
        f"Each method ran on its own; those that search, and `auto` as a whole, had {seconds:g} s.",
        "",
        marked("placers", model_table(rows)),
        "",
        *([optimum_text(optima), ""] if optima else []),
        made_by(),
    ]
    (RESULTS / "README.md").write_text("\n".join(text) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--methods", nargs="+", default=[*METHODS, "auto"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--no-exact", action="store_true")
    parser.add_argument("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
