"""How good the learned placers are, and how fast.

    python -m benchmarks.learning quality     # the learners against local search, by trials; hours on 2 cores
    python -m benchmarks.learning ablation    # what each ingredient of ppo is worth
    python -m benchmarks.learning noise       # with 10% noise and 5% failures
    python -m benchmarks.learning transfer    # a policy trained on other models
    python -m benchmarks.learning speed       # seconds of one update

Each writes `results/learning/NAME.csv`, and `results/learning/README.md` is made anew from all of
them. Quality is by number of trials, which does not depend on the machine: `--jobs 16` on a machine
with more cores gives the same numbers sooner. `--models` also takes graph files (`placewright
inspect MODEL --save FILE`), for machines without TensorFlow.
"""

from __future__ import annotations

import os

# One thread each: the cases run side by side. Before numba and torch are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import argparse
import csv
import itertools
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulator import cpu_name
from placewright import load, make_problem, methods
from placewright._version import VERSION
from placewright.cluster import Cluster
from placewright.evaluators.simulated import Noise, SimulatedEvaluator
from placewright.problem import Problem
from placewright.search import Budget, Progress, search

RESULTS = Path(__file__).parent / "results" / "learning"
SCRATCH = ("warm_start=0", "polish=0")

QUALITY: dict[str, tuple[str, tuple[str, ...]]] = {
    "reinforce": ("reinforce", ()),
    "ppo from scratch": ("ppo", SCRATCH),
    "ppo": ("ppo", ()),
    "local-search": ("local-search", ()),
}
ABLATION: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("ppo", ()),
    "no polishing": ("ppo", ("polish=0",)),
    "no warm start": ("ppo", ("warm_start=0",)),
    "from scratch (neither)": ("ppo", SCRATCH),
    "from scratch, no imitation": ("ppo", (*SCRATCH, "imitation=0")),
    "from scratch, one epoch, no clipping": ("ppo", (*SCRATCH, "epochs=1", "clip=none")),
    "from scratch, no normalisation": ("ppo", (*SCRATCH, "normalise=false")),
    "from scratch, no entropy bonus": ("ppo", (*SCRATCH, "entropy=0")),
    "from scratch, no running features": ("ppo", (*SCRATCH, "policy.running=false")),
    "from scratch, no costs seen": ("ppo", (*SCRATCH, "policy.costs=false")),
    "from scratch, adjacency list": ("ppo", (*SCRATCH, "policy.adjacency=list")),
    "reinforce": ("reinforce", ()),
}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One search; the best step time after each number of trials asked for."""
    problem = make_problem(load(case["model"]), Cluster.load(case["cluster"]))
    noise = Noise(seed=case["seed"]) if case.get("noise") else None
    exact = SimulatedEvaluator(problem)
    exact.evaluate([_any(problem)])  # compiles
    (placer,) = methods.make(
        [case["method"]], problem, seed=case["seed"], learner=case["settings"],
        policy=case.get("policy"),
    )  # fmt: skip
    curve: list[tuple[int, float]] = []

    def observe(progress: Progress) -> None:
        best = progress.best
        if best is not None and (not curve or best.measurement.mean_seconds < curve[-1][1]):
            curve.append((progress.trials, best.measurement.mean_seconds))

    started = time.monotonic()
    progress = search(
        [placer],
        SimulatedEvaluator(problem, noise=noise),
        Budget(trials=max(case["trials"])),
        seed=case["seed"],
        observe=observe,
    )
    row: dict[str, Any] = {
        "model": problem.graph.name,
        "cluster": problem.cluster.name,
        "variant": case["variant"],
        "seed": case["seed"],
    }
    for trials in case["trials"]:
        reached = [seconds for at, seconds in curve if at <= trials]
        row[f"best_at_{trials}"] = round(min(reached), 6) if reached else ""
    greedy = getattr(placer, "greedy", None)
    final = greedy() if greedy else (progress.best.placement if progress.best else None)
    measured = exact.evaluate([final])[0] if final is not None else None
    row["final_policy_seconds"] = round(measured.mean_seconds, 6) if measured else ""
    row["devices_of_final"] = len(set(final.devices.tolist())) if final is not None else ""
    for goal in case.get("goals", ()):
        row[f"trials_to_{goal:g}"] = next((at for at, s in curve if s <= goal), "")
    row["search_seconds"] = round(time.monotonic() - started, 1)
    return row


def _any(problem: Problem) -> Any:
    from placewright.placement import Placement

    return Placement.of(problem, problem.allowed.argmax(axis=1))


def run_all(cases: Sequence[dict[str, Any]], jobs: int) -> list[dict[str, Any]]:
    """The cases in their order, `jobs` at a time, each in a process of its own."""
    rows = []
    # Long ones first, so that the last to finish is a short one.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for row in pool.imap(run_case, cases, chunksize=1):
            print(*row.values(), flush=True)
            rows.append(row)
    return rows


def compare(
    variants: dict[str, tuple[str, tuple[str, ...]]], options: argparse.Namespace, **more: Any
) -> list[dict[str, Any]]:
    cases = [
        {
            "model": model, "cluster": cluster, "variant": variant, "method": method,
            "settings": settings, "seed": seed, "trials": options.trials, **more,
        }
        for model, cluster, (variant, (method, settings)), seed in itertools.product(
            options.models, options.clusters, variants.items(), range(options.seeds)
        )
        if options.variants is None or variant in options.variants
    ]  # fmt: skip
    return run_all(cases, options.jobs)


def table(rows: Iterable[dict[str, Any]], column: str) -> str:
    """Markdown: variants down, cases across; mean (best-worst) over seeds."""
    rows = list(rows)
    cases = list(dict.fromkeys((r["model"], r["cluster"]) for r in rows))
    lines = [
        "| | " + " | ".join(f"{model} {cluster}" for model, cluster in cases) + " |",
        "|---|" + "---:|" * len(cases),
    ]
    for variant in dict.fromkeys(r["variant"] for r in rows):
        cells = []
        for case in cases:
            mine = [
                r[column]
                for r in rows
                if (r["model"], r["cluster"]) == case and r["variant"] == variant
            ]
            times = [float(t) for t in mine if t not in ("", "inf")]
            text = ""
            if times:
                text = f"{statistics.fmean(times):.3f} ({min(times):.3f}-{max(times):.3f})"
            if len(times) < len(mine):
                text += f" {len(mine) - len(times)} of {len(mine)} never ran"
            cells.append(text.strip())
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = _options()
    if options.what == "quality":
        rows = compare(QUALITY, options)
    elif options.what == "ablation":
        rows = compare(ABLATION, options)
    print(table(rows, f"best_at_{max(options.trials)}"))
    if options.csv:
        write_csv(Path(options.csv), rows)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(k for row in rows for k in row)))
        writer.writeheader()
        writer.writerows(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["quality", "ablation", "noise", "transfer", "speed"])
    parser.add_argument("--models", nargs="+", default=["rnnlm", "nmt", "inception_v3"])
    parser.add_argument("--clusters", nargs="+", default=["k80x2", "k80x4"])
    parser.add_argument("--trials", nargs="+", type=int, default=[2000, 20000])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--csv")
    return parser.parse_args()


if __name__ == "__main__":
    main()
