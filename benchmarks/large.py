"""Large layered graphs: what placing op by op gains over groups, in how much time and memory.

`timed_layers` of 10,000, 30,000 and 100,000 ops on four equal accelerators, 7.6 GB/s and 25 us
between any two. Every method runs in a process of its own, whose peak of memory is what it took.

    python -m benchmarks.large --csv benchmarks/results/large/large.csv
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Row, made_by, markdown, marked, merge_csv, read_csv
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.placers.heft import heft
from placewright.placers.op_level import op_heft, op_m_etf
from placewright.placers.single_device import single_device
from placewright.problem import Problem, make_problem
from placewright.session.driver import place
from placewright.simulator import lower_bounds
from placewright.testing import four_accelerators, timed_layers

WIDTHS = {10_000: 20, 30_000: 30, 100_000: 50}
"""Ops of a graph, and of each of its layers."""

COMPUTED = {"single": single_device, "heft": heft, "op-heft": op_heft, "op-m-etf": op_m_etf}
METHODS = (*COMPUTED, "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="write the table here as well")
    parser.add_argument("--sizes", type=int, nargs="*", default=[*WIDTHS], choices=[*WIDTHS])
    parser.add_argument("--methods", nargs="*", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[Row] = []
    for size in options.sizes:
        for method in options.methods:
            # A fresh process, whose peak is that of the method alone.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measured, (size, method, options.seconds, options.seed))
            rows.append(row)
            print(row, flush=True)
            if options.csv:
                merge_csv(options.csv, [row], "ops", "method")
    kept: list[Row] = [*read_csv(options.csv)] if options.csv else rows
    table = marked("large", large_table(kept))
    print(table)
    if options.csv:
        page = options.csv.with_name("README.md")
        page.write_text(f"# Large graphs\n\n{__doc__}\n{made_by()}\n\n{table}\n", "utf-8")


def measured(size: int, method: str, seconds: float, seed: int) -> Row:
    """One line of the table. `seconds` of computed methods are those of a second call, as the first
    compiles."""
    begun = time.monotonic()
    problem = make_problem(timed_layers(size, WIDTHS[size], seed), four_accelerators())
    made_seconds = time.monotonic() - begun
    bound = lower_bounds(problem.refined).best
    by = ""
    if method == "auto":
        result = place(problem, method="auto", budget=seconds, seed=seed)
        took, step = result.seconds, result.step_seconds
        by = result.best.placer if result.best is not None else ""
    else:
        took, step = _computed(problem, method)
    return {
        "ops": size,
        "method": method,
        "step_seconds": f"{step:.4f}",
        "over_bound": f"{step / bound:.3f}",
        "found_by": by,
        "seconds": f"{took:.2f}",
        "problem_seconds": f"{made_seconds:.2f}",
        "peak_gigabytes": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f}",
        "bound_seconds": f"{bound:.4f}",
    }


def _computed(problem: Problem, method: str) -> tuple[float, float]:
    compute = COMPUTED[method]
    compute(problem)
    begun = time.monotonic()
    placements = compute(problem)
    took = time.monotonic() - begun
    of = problem.refined if method.startswith("op-") else problem
    trials = SimulatedEvaluator(of).evaluate(placements)
    return took, min(trial.mean_seconds for trial in trials)


def large_table(rows: Sequence[Row]) -> str:
    heading = ("ops", "method", "step s", "over bound", "found by", "seconds", "peak GB")
    keys = ("method", "step_seconds", "over_bound", "found_by", "seconds", "peak_gigabytes")
    order = {name: number for number, name in enumerate(METHODS)}
    ordered = sorted(rows, key=lambda row: (int(row["ops"]), order[row["method"]]))
    return markdown(
        heading, [[f"{int(row['ops']):,}", *(row[key] for key in keys)] for row in ordered], texts=2
    )


if __name__ == "__main__":
    main()
