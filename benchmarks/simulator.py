"""How fast the simulator is: placements per second on one core and on all, and time to compile.

Layered random graphs with one group per op on four GPUs that share links; with `--models` also the
benchmark models as they are grouped for a search, on k80x4. Placements are random, or contiguous:
the ops in order, cut into as many parts as there are devices. The rate per CPU second leaves out
the time in which other programs had the core; the caches they share with it still tell.

    python -m benchmarks.simulator --models --csv benchmarks/results/simulator/speed.csv
"""

from __future__ import annotations

import argparse
import csv
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

from placewright.cluster import Cluster
from placewright.costs import estimate_costs
from placewright.graph import IndexArray
from placewright.grouping import each_op
from placewright.problem import Problem, make_problem
from placewright.simulator import Simulator
from placewright.testing import gpu_boards, layered_graph, tiny_problems

SIZES = (2_000, 30_000, 100_000)
MODELS = ("rnnlm", "nmt", "inception_v3")

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
        "command": " ".join(["python -m benchmarks.simulator", *sys.argv[1:]]),
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
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[*rows[0], *facts])
            writer.writeheader()
            writer.writerows({**row, **facts} for row in rows)


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
        from placewright.frontends import load

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


def merge_csv(path: Path, rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Writes the rows into the file, instead of those there that have one of their keys, and gives
    all that it holds then. So that every case is written when it is done, and the others stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = list(csv.DictReader(file))
    if kept and list(kept[0]) != list(rows[0]):
        raise SystemExit(f"{path}: has other columns; was it made by another version?")
    done = {row[key] for row in rows}
    merged = [*(row for row in kept if row[key] not in done), *rows]
    temporary = path.with_suffix(".new")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(merged)
    temporary.replace(path)
    return merged


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
