"""How fast the simulator is: placements per second on one core and on all, and time to compile.

Layered random graphs with one group per op on four GPUs that share links; with `--models` also the
benchmark models as they are grouped for a search, on k80x4. Placements are random, or contiguous:
the ops in order, cut into as many parts as there are devices. The rate per CPU second leaves out
the time in which other programs had the core; the caches they share with it still tell.

    python -m benchmarks.simulator --models --csv benchmarks/results/simulator/speed.csv
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np

from benchmarks.common import MODELS, Row, command, cpu_name, markdown, write_csv
from placewright.cluster import Cluster
from placewright.costs import estimate_costs
from placewright.graph import IndexArray
from placewright.grouping import each_op
from placewright.problem import Problem, make_problem
from placewright.simulator import Simulator
from placewright.testing import gpu_boards, layered_graph, tiny_problems

SIZES = (2_000, 30_000, 100_000)

_FIRST_RUN = """
import time
import numpy as np
from placewright.placement import Placement
from placewright.simulator import Simulator
from placewright.testing import tiny_problems
tiny = tiny_problems()[0]
simulator = Simulator(tiny.problem, threads=1)
begin = time.perf_counter()
simulator.run(np.array([tiny.best_devices]))
middle = time.perf_counter()
simulator.timeline(Placement.of(tiny.problem, tiny.best_devices))
print(middle - begin, time.perf_counter() - middle)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="write the table here as well")
    parser.add_argument("--models", action="store_true", help="time the benchmark models too")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="ops of random graphs")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="least duration of a repeat")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    facts = {
        "command": command(),
        "cpu": cpu_name(),
        "cores": Simulator(tiny_problems()[0].problem).threads,
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "seed": options.seed,
    }
    for name, value in facts.items():
        print(f"{name:8} {value}")
    _print_compile_times()
    rows = []
    for name, problem in _cases(options.sizes, options.models, options.seed):
        for kind in ("random", "contiguous"):
            for threads in dict.fromkeys((1, int(facts["cores"]))):
                row = _measure(name, problem, kind, threads, options)
                rows.append(row)
                print(
                    f"{name:15} {row['ops']:7,} ops {row['groups']:7,} groups  {kind:10} "
                    f"{threads} threads: {row['per_second_median']:9,.0f} placements/s "
                    f"({row['per_second_min']:,.0f} to {row['per_second_max']:,.0f}), "
                    f"{row['per_cpu_second_median']:,.0f} per CPU second"
                )
    print(f"load     {os.getloadavg()[0]:.1f} at the end")
    if options.csv:
        write_csv(options.csv, [{**row, **facts} for row in rows])


def table(rows: Sequence[Row]) -> str:
    """Markdown: placements per second on one core."""
    rates = {
        (row["case"], row["placements"]): float(row["per_second_median"])
        for row in rows
        if int(row["threads"]) == 1
    }
    ops = {row["case"]: int(row["ops"]) for row in rows}
    kinds = list(dict.fromkeys(row["placements"] for row in rows))
    return markdown(
        ["placements per second", "ops", *kinds],
        [
            [case, f"{count:,}", *(f"{rates[case, kind]:,.0f}" for kind in kinds)]
            for case, count in ops.items()
        ],
    )


def _cases(sizes: list[int], models: bool, seed: int) -> Iterator[tuple[str, Problem]]:
    for ops in sizes:
        graph = layered_graph(ops, math.isqrt(ops), seed)
        cluster = gpu_boards(4)
        costs = estimate_costs(graph, cluster)
        grouping = each_op(graph)
        yield (
            f"layered-{ops}",
            Problem(graph=graph, grouping=grouping, cluster=cluster, costs=costs),
        )
    if models:
        from placewright.backends import load

        for name in MODELS:
            yield name, make_problem(load(name), Cluster.load("k80x4"))


def _measure(
    name: str, problem: Problem, kind: str, threads: int, options: argparse.Namespace
) -> dict[str, Any]:
    simulator = Simulator(problem, threads=threads)
    few = _placements(problem, kind, 8 * threads, options.seed)
    simulator.run(few)  # compiles
    begin = time.perf_counter()
    simulator.run(few)
    once = (time.perf_counter() - begin) / len(few)
    count = max(8 * threads, math.ceil(options.seconds / once))
    placements = _placements(problem, kind, count, options.seed)
    rates, cpu_rates = [], []
    for _ in range(options.repeats):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        simulator.run(placements)
        rates.append(count / (time.perf_counter() - begin))
        cpu_rates.append(count / (time.process_time() - cpu_begin))
    return {
        "case": name,
        "ops": problem.graph.num_ops,
        "uses": len(simulator.flow.use_op),
        "groups": problem.num_groups,
        "devices": problem.num_devices,
        "placements": kind,
        "threads": threads,
        "per_second_median": round(statistics.median(rates), 1),
        "per_second_min": round(min(rates), 1),
        "per_second_max": round(max(rates), 1),
        "per_cpu_second_median": round(statistics.median(cpu_rates), 1),
        "repeats": options.repeats,
    }


def _placements(problem: Problem, kind: str, count: int, seed: int) -> IndexArray:
    rng = np.random.default_rng(seed)
    devices, groups = problem.num_devices, problem.num_groups
    if kind == "random":
        rows = rng.integers(devices, size=(count, groups))
    else:
        cuts = np.sort(rng.integers(groups, size=(count, devices - 1)), axis=1)
        rows = np.stack([np.searchsorted(cut, np.arange(groups), side="right") for cut in cuts])
    # Where a group may not go, the first device that takes it.
    fallback = np.argmax(problem.allowed, axis=1)
    allowed = problem.allowed[np.arange(groups), rows]
    return np.where(allowed, rows, fallback).astype(np.int32)


def _print_compile_times() -> None:
    with tempfile.TemporaryDirectory() as cache:
        for label in ("cold", "warm"):
            output = subprocess.run(
                [sys.executable, "-c", _FIRST_RUN],
                env={**os.environ, "NUMBA_CACHE_DIR": cache},
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            run, timeline = (float(seconds) for seconds in output)
            print(f"first    {label}: run {run:.1f} s, timeline {timeline:.1f} s")


if __name__ == "__main__":
    main()
