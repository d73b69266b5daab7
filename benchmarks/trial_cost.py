"""What one real trial of a placement costs on a GPU: `python -m benchmarks.trial_cost`.

Steps of about 300, 2,500 and 10,000 ops (an LSTM language model, unrolled longer and longer), each
under random placements on four streams and on four parts of one GPU. A trial is what
`Runner.measure` takes: placing, capturing, a step to warm up and three that are timed. Rows that
the file has are not made again; where the time ended before all are there, it exits with 3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import MORE, RESULTS, Row, add_csv, made_by, markdown, read_csv
from placewright.backends.models.rnnlm import Config
from placewright.backends.pytorch import TorchRunConfig
from placewright.backends.pytorch.models import rnnlm
from placewright.backends.pytorch.program import TorchProgram, read_program
from placewright.backends.pytorch.runner import TorchRunner
from placewright.cluster import chosen

STEPS = {300: 2, 2500: 20, 10_000: 80}
"""Ops wanted -> time steps that give about as many."""
CLUSTERS = {
    "4 streams": (["cuda:0/stream:0-3"], {}),
    "4 parts through the host": (["cuda:0/part:0-3"], {"through_host": True}),
    "one GPU": (["cuda:0"], {}),
    "two CPU sets": (["cpu:0", "cpu:1"], {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=RESULTS / "trial_cost")
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS)[:3], choices=list(CLUSTERS))
    parser.add_argument("--ops", nargs="*", type=int, default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so long")
    arguments = parser.parse_args()
    began = time.monotonic()
    path = arguments.output / "trial_cost.csv"
    done = {(row["wanted"], row["cluster"]) for row in read_csv(path)}
    for ops in arguments.ops:
        left = [name for name in arguments.clusters if (str(ops), name) not in done]
        program = None
        for name in left:
            if time.monotonic() - began > arguments.seconds:
                return MORE
            program = program or _program(ops)
            row = {"wanted": ops, "ops": program.graph.num_ops, "cluster": name}
            row |= _row(program, name, arguments.trials)
            print(row, flush=True)
            add_csv(path, row)
    print(made_by())
    return 0


def _program(ops: int) -> TorchProgram:
    config = Config(
        batch=32, steps=STEPS[ops], units=512, projection=256, vocabulary=4000, dropout=0.0
    )
    return read_program(rnnlm.build(config))


def _row(program: TorchProgram, name: str, trials: int) -> dict[str, object]:
    names, how = CLUSTERS[name]
    cluster = chosen(names, issue="none", **how)  # type: ignore[arg-type]
    run_config = TorchRunConfig(steps=4, max_steps=4)
    rng = np.random.default_rng(0)
    with TorchRunner(program, cluster, run_config) as runner:
        at = time.monotonic()
        runner.start()
        started = time.monotonic() - at
        blocks = np.zeros(program.graph.num_ops, dtype=int)
        runner.measure(blocks)
        seconds, steps, outcomes = [], [], []
        for _ in range(trials):
            # Runs of neighbours together, as searches try them, not each op by itself.
            cuts = np.sort(rng.integers(0, len(blocks), 40))
            part = rng.integers(0, cluster.num_devices, 41)
            devices = part[np.searchsorted(cuts, np.arange(len(blocks)), side="right")]
            at = time.monotonic()
            run = runner.measure(devices)
            seconds.append(time.monotonic() - at)
            outcomes.append(run.measurement.outcome.value)
            if run.measurement.ok:
                steps.append(run.measurement.mean_seconds)
    return {
        "start_seconds": round(started, 2),
        "trial_seconds": round(statistics.median(seconds), 4),
        "trial_seconds_max": round(max(seconds), 4),
        "step_seconds": round(statistics.median(steps), 6) if steps else "",
        "ran": f"{outcomes.count('ok')} of {trials}",
    }


def table(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{int(row['ops']):,}", row["cluster"], row["trial_seconds"], row["trial_seconds_max"],
            row["step_seconds"] and f"{1000 * float(row['step_seconds']):.2f}",
            row["start_seconds"], row["ran"],
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(
        ["ops", "devices", "seconds a trial", "the slowest", "ms a step",
         "seconds to start, once", "ran"],
        lines, texts=2,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
