"""Searching with many processes: trials per second with more workers, and how soon a placement of
a given quality is found with more controllers.

Every trial waits 200 ms, as for a remote machine, and is then simulated. `workers`: a random search
with 1 to 16 workers. `controllers`: ppo from scratch, 16 samples an update, with 8 workers shared
by 1, 2 or 4 controllers, until a placement within a quarter of the optimum is found.

    python -m benchmarks.distributed workers --csv benchmarks/results/distributed/workers.csv
    python -m benchmarks.distributed controllers --csv .../results/distributed/controllers.csv
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import Row, command, markdown, write_csv
from placewright.distributed.config import TeamConfig
from placewright.distributed.team import assemble
from placewright.evaluators.base import Evaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Edge, Op, Tensor
from placewright.learning.config import PPO
from placewright.learning.learner import Learner
from placewright.measurement import Measurement
from placewright.placement import Placement
from placewright.placers.random_placement import RandomPlacement
from placewright.problem import Problem
from placewright.budget import Budget
from placewright.session.search import Progress, search
from placewright.testing import make_problem, sample_placements, uniform_cluster

TRIAL_SECONDS = 0.2
CHAINS, LENGTH = 3, 6
SAMPLES = 16
ALL_WORKERS = 8


class Waiting(Evaluator):
    """The simulator, as slow as a remote machine."""

    cheap = False

    def __init__(self, problem: Problem) -> None:
        self._simulated = SimulatedEvaluator(problem, threads=1)

    @property
    def problem(self) -> Problem:
        return self._simulated.problem

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        time.sleep(TRIAL_SECONDS * len(placements))
        return self._simulated.evaluate(placements)


def chains() -> Problem:
    """Chains on as many devices, with slow links: the best is each chain on a device of its own."""
    ops = [
        Op(name=f"c{c}/op{i}", type="t", outputs=(Tensor(2),), seconds={"dev": 1.0})
        for c in range(CHAINS)
        for i in range(LENGTH)
    ]
    edges = [
        Edge(f"c{c}/op{i}", f"c{c}/op{i + 1}") for c in range(CHAINS) for i in range(LENGTH - 1)
    ]
    return make_problem(ops, edges, uniform_cluster(CHAINS, bandwidth=1.0))


def trials_per_second(
    controllers: int, workers: int, samples: int, trial_seconds: float, update_seconds: float
) -> float:
    """The sizing model of docs/distributed.md: `workers` are each controller's, who waits for the
    last of its samples and then makes an update while they are idle."""
    rounds = math.ceil(samples / workers)
    return controllers * samples / (rounds * trial_seconds + update_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("workers", "controllers"))
    parser.add_argument("--csv", type=Path, help="write the table here as well")
    parser.add_argument("--seeds", type=int, default=3, help="of controllers (default: 3)")
    arguments = parser.parse_args()
    rows = []
    made = workers_rows() if arguments.what == "workers" else controllers_rows(arguments.seeds)
    for row in made:
        print(row, flush=True)
        rows.append(
            row
            | {
                "cores": os.cpu_count(),
                "load": round(os.getloadavg()[0], 1),
                "python": platform.python_version(),
                "command": command(),
            }
        )
        if arguments.csv is not None:  # after every row: a long run may be cut short
            write_csv(arguments.csv, rows)


def workers_table(rows: Sequence[Row]) -> str:
    return markdown(
        ["workers", "trials/s", "of linear", "model"],
        [
            [
                row["workers"],
                f"{float(row['trials_per_second']):.1f}",
                f"{float(row['of_linear']):.2f}",
                f"{float(row['predicted_trials_per_second']):.0f}",
            ]
            for row in rows
        ],
    )


def controllers_table(rows: Sequence[Row]) -> str:
    """Mean over the seeds, and the range of the time."""
    cells = []
    for case in dict.fromkeys((row["controllers"], row["workers_each"]) for row in rows):
        mine = [row for row in rows if (row["controllers"], row["workers_each"]) == case]

        def mean(column: str, mine: Sequence[Row] = mine) -> float:
            return statistics.fmean(float(row[column]) for row in mine)

        times = [float(row["seconds_to_target"]) for row in mine if row["seconds_to_target"] != ""]
        reached = (
            "never"
            if not times
            else (f"{statistics.fmean(times):.1f} ({min(times):.1f}-{max(times):.1f})")
        )
        if 0 < len(times) < len(mine):
            reached += f", {len(mine) - len(times)} of {len(mine)} never"
        cells.append(
            [
                f"{case[0]} x {case[1]}",
                reached,
                f"{mean('trials_per_second'):.1f}",
                f"{mean('predicted_trials_per_second'):.1f}",
                f"{mean('idle_share'):.0%}",
                f"{mean('staleness_mean'):.1f}",
            ]
        )
    return markdown(
        ["controllers x workers", "seconds to target", "trials/s", "model", "idle", "staleness"],
        cells,
    )


def workers_rows() -> Iterator[dict[str, Any]]:
    problem = chains()
    alone = 0.0
    for count in (1, 2, 4, 8, 16):
        trials = 40 * count
        config = TeamConfig(workers=count)
        with assemble(problem, functools.partial(Waiting, problem), config, cheap=False) as team:
            # All are ready, and have compiled, before the clock starts.
            team.evaluator.evaluate(sample_placements(problem, 4 * count, seed=1))
            began = time.monotonic()
            search([RandomPlacement(problem)], team.evaluator, Budget(trials=trials))
            rate = trials / (time.monotonic() - began)
        alone = alone or rate
        yield {
            "workers": count,
            "trials": trials,
            "trials_per_second": round(rate, 2),
            "of_linear": round(rate / (count * alone), 3),
            "predicted_trials_per_second": round(
                trials_per_second(1, count, 4 * count, TRIAL_SECONDS, 0.0), 2
            ),
            "idle_share": round(1 - rate * TRIAL_SECONDS / count, 3),
        }


def controllers_rows(seeds: int) -> Iterator[dict[str, Any]]:
    problem = chains()
    settings = replace(PPO, samples=SAMPLES, polish=0, warm_start=0)
    update_seconds = 0.0
    for controllers in (1, 2, 4):
        workers = ALL_WORKERS // controllers
        for seed in range(seeds):
            learner = Learner(problem, settings, name="ppo", seed=seed)
            clock = _Clock()
            config = TeamConfig(controllers=controllers, workers=workers)
            make = functools.partial(Waiting, problem)
            with assemble(problem, make, config, cheap=False) as team:
                team.evaluator.evaluate(sample_placements(problem, 4 * ALL_WORKERS, seed=1))
                [placer] = team.distributed([learner])
                progress = search(
                    [placer], team.evaluator, Budget(trials=1200, seconds=300), seed=seed,
                    observe=clock.observe, stop=clock.has_reached,
                )  # fmt: skip
                rate = clock.rate(progress)
                replaced = int(team.status()["workers_replaced"])
            if controllers == 1 and seed == 0:
                # What is left of a round when its trials are taken off.
                update_seconds = max(
                    0.0, SAMPLES / rate - math.ceil(SAMPLES / workers) * TRIAL_SECONDS
                )
            assert progress.best is not None
            yield {
                "controllers": controllers,
                "workers_each": workers,
                "seed": seed,
                "seconds_to_target": round(clock.reached, 1) if clock.reached else "",
                "trials": progress.trials,
                "best_of_optimum": round(progress.best.measurement.mean_seconds / LENGTH, 3),
                "updates": clock.updates,
                "staleness_mean": round(statistics.fmean(clock.staleness or [0]), 2),
                "trials_per_second": round(rate, 2),
                "predicted_trials_per_second": round(
                    trials_per_second(controllers, workers, SAMPLES, TRIAL_SECONDS, update_seconds),
                    2,
                ),
                "idle_share": round(1 - rate * TRIAL_SECONDS / ALL_WORKERS, 3),
                "workers_replaced": replaced,
            }


class _Clock:
    """From the first trial on: starting controllers is not what is compared."""

    def __init__(self) -> None:
        self.began = 0.0
        self.before = 0
        self.reached = 0.0
        self.updates = 0
        self.staleness: list[float] = []

    def observe(self, progress: Progress) -> None:
        if not progress.trials:
            return
        if not self.began:
            self.began, self.before = time.monotonic() - TRIAL_SECONDS, progress.trials
        metrics = progress.metrics_of.get("ppo", {})
        if metrics.get("update", 0) > self.updates:
            self.updates = int(metrics["update"])
            self.staleness.append(metrics["staleness"])
        best = progress.best
        if best and best.measurement.mean_seconds <= 1.25 * LENGTH and not self.reached:
            self.reached = time.monotonic() - self.began

    def has_reached(self) -> bool:
        return self.reached > 0

    def rate(self, progress: Progress) -> float:
        return (progress.trials - self.before) / max(time.monotonic() - self.began, 1e-9)


if __name__ == "__main__":
    main()
