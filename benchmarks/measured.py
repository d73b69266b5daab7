"""Searching with real runs: simulate+measure against learning from measured rewards alone, and
against the classical methods measured; and what a real run costs beyond its steps.

    python -m benchmarks.measured                      # hours on an idle machine of 2 cores
    python -m benchmarks.measured --models rnnlm --runs 12 --learner-runs 20 --no-write

The answers of all are measured again in turns at the end, which is what the table shows. After
each model, writes its lines of `results/measured/measured.csv` and `overhead.csv` and a README.md
with the tables.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulator import cpu_name, merge_csv
from placewright import methods as registry
from placewright._version import VERSION
from placewright.calibration import varied_placements
from placewright.cluster import Cluster
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.finals import in_rounds
from placewright.frontends import load_program
from placewright.frontends.tensorflow.program import Program
from placewright.measuring import search_measured
from placewright.placement import Placement
from placewright.problem import Problem, make_problem
from placewright.refine import refine
from placewright.runners.tensorflow import TensorFlowRunner
from placewright.search import Budget

RESULTS = Path(__file__).parent / "results" / "measured"
CLASSICAL = ("single", "expert", "scotch", "mincut", "heft", "m-topo", "m-etf", "m-sct")


def main() -> None:
    options = _options()
    for model in options.models:
        program = load_program(model, scale="small")
        problem = make_problem(program.graph, Cluster.load(options.cluster))
        with TensorFlowRunner(program, problem.cluster) as runner:
            rows = [{"model": model, **row} for row in compare(problem, runner, options)]
            ours, naive = overhead(problem, runner, program)
        overheads = [{"model": model, "overhead_seconds": ours, "naive_seconds": naive}]
        print(answers_table(rows), overhead_table(overheads), sep="\n\n", flush=True)
        if not options.no_write:  # after each: the next takes hours
            write(rows, overheads)


def compare(
    problem: Problem, runner: TensorFlowRunner, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """What each way of searching found, measured side by side."""
    answers: dict[str, tuple[Placement, int]] = {}
    result = refine(problem, runner, registry.parse("auto"), Budget(trials=options.runs))
    answers["simulate+measure"] = (result.placement, result.trials)
    evaluator = MeasuredEvaluator(problem, runner)
    if options.learner_runs:
        budget = Budget(trials=options.learner_runs)
        learnt = search_measured(problem, evaluator, ["reinforce"], budget)
        answers["reinforce, measured"] = (learnt.placement, learnt.trials)
    for name in registry.installed(CLASSICAL)[0]:
        (placer,) = registry.make([name], problem)
        asked = placer.ask(problem.num_devices)
        tried = [(p, evaluator.evaluate([p])[0].mean_seconds) for p in asked]
        if tried and min(seconds for _, seconds in tried) < np.inf:
            answers[name] = (min(tried, key=lambda pair: pair[1])[0], len(tried))
    finals = in_rounds(
        [placement for placement, _ in answers.values()],
        lambda placement: evaluator.run(placement, compared=True).measurement,
        options.rounds,
    )
    ours = answers["simulate+measure"][0]
    rows = []
    for name, (placement, runs) in answers.items():
        if placement in finals.means and ours in finals.means:
            measurement = finals.measurement(placement)
            against = finals.compare(ours, placement, name)
            rows.append(
                {
                    "method": name,
                    "runs": runs,
                    "step_seconds": measurement.mean_seconds,
                    "half_width_seconds": measurement.half_width_seconds,
                    "times_ours": against.ratio,
                    "half_width_times_ours": against.half_width,
                }
            )
    return rows


def overhead(problem: Problem, runner: TensorFlowRunner, program: Program) -> tuple[float, float]:
    """Seconds of a run beyond its timed steps: ours, and of starting anew for each placement
    without starting the servers anew (a process that imports the graph, and a new session)."""
    placements = varied_placements(problem, 4, seed=7)
    devices = [p.devices[problem.grouping.group_of] for p in placements]

    def seconds(row: Any, anew: bool) -> float:
        if anew:
            runner.restart_client()
        began = time.monotonic()
        steps = runner.measure(row).measurement.step_seconds
        return time.monotonic() - began - sum(steps)

    runner.measure(devices[0])  # so that the processes run
    return (
        statistics.median(seconds(row, anew=False) for row in devices),
        statistics.median(seconds(row, anew=True) for row in devices),
    )


def answers_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| model | method | real runs | seconds per step | ± | times simulate+measure | ± |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['model']} | {row['method']} | {row['runs']} | {float(row['step_seconds']):.4f} "
        f"| {float(row['half_width_seconds']):.4f} | {float(row['times_ours']):.3f} "
        f"| {float(row['half_width_times_ours']):.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def overhead_table(overheads: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | overhead of a run, s | the naive way, s |", "|---|---:|---:|"]
    lines += [
        f"| {row['model']} | {float(row['overhead_seconds']):.2f} "
        f"| {float(row['naive_seconds']):.2f} |"
        for row in overheads
    ]
    return "\n".join(lines)


def write(rows: Sequence[dict[str, Any]], overheads: Sequence[dict[str, Any]]) -> None:
    rows = merge_csv(RESULTS / "measured.csv", rows, "model")
    overheads = merge_csv(RESULTS / "overhead.csv", overheads, "model")
    command = " ".join(["python -m benchmarks.measured", *sys.argv[1:]])
    (RESULTS / "README.md").write_text(
        f"""# Searching with real runs

{answers_table(rows)}

{overhead_table(overheads)}

Models at small scale on `cpu2`; all answers measured in turns after the searches. A time is the
mean of the rounds, ± half its 95% confidence interval over the rounds; the last columns are the
same of the ratio within each round. Made by
`{command}` with version {VERSION}, Python {platform.python_version()}, on {cpu_name()},
{os.cpu_count()} cores.
"""
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=["rnnlm", "nmt", "inception_v3"])
    parser.add_argument("--cluster", default="cpu2")
    parser.add_argument("--runs", type=int, default=60, help="of simulate+measure")
    parser.add_argument("--learner-runs", type=int, default=500, help="of reinforce; 0 for none")
    parser.add_argument("--rounds", type=int, default=6, help="of measuring the answers in turns")
    parser.add_argument("--no-write", action="store_true", help="only print")
    return parser.parse_args()


if __name__ == "__main__":
    main()
