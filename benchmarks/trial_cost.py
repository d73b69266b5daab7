"""What one real trial of a placement costs on a GPU: `python -m benchmarks.trial_cost`.

Steps of about 300, 2,500 and 10,000 ops (an LSTM language model, unrolled longer and longer), each
under random placements on four streams and on four parts of one GPU. A trial is what
`Runner.measure` takes: placing, capturing, a step to warm up and three that are timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, made_by, write_csv
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=RESULTS / "trial_cost")
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS)[:3])
    parser.add_argument("--ops", nargs="*", type=int, default=list(STEPS))
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so long")
    arguments = parser.parse_args()
    began = time.monotonic()
    rows: list[dict[str, object]] = []
    for ops in arguments.ops:
        config = Config(
            batch=32, steps=STEPS[ops], units=512, projection=256, vocabulary=4000, dropout=0.0
        )
        program = read_program(rnnlm.build(config))
        for name in arguments.clusters:
            if time.monotonic() - began > arguments.seconds:
                break
            rows.append(
                {
                    "ops": program.graph.num_ops,
                    "cluster": name,
                    **_row(program, name, arguments.trials),
                }
            )
            print(rows[-1], flush=True)
            write_csv(arguments.output / "trial_cost.csv", rows)
    print(made_by())


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


if __name__ == "__main__":
    main()
