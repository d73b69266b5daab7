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
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import MODELS, Row, made_by, markdown, marked, merge_csv
from benchmarks.common import RESULTS as ALL_RESULTS
from placewright import methods as registry
from placewright.api import Result
from placewright.backends import Program, load_program
from placewright.backends.tensorflow.runner import TensorFlowRunner
from placewright.calibration import varied_placements
from placewright.cluster import Cluster
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.finals import in_rounds
from placewright.journal import read_trials
from placewright.measuring import FinalConfig, search_measured
from placewright.placement import Placement
from placewright.problem import Problem, make_problem
from placewright.refine import RefineConfig, refine
from placewright.search import Budget

RESULTS = ALL_RESULTS / "measured"
CLASSICAL = ("single", "expert", "scotch", "mincut", "heft", "m-topo", "m-etf", "m-sct")


Answer = tuple[Placement, int, int]
"""The placement, how many real runs that took, and how many until one was about as good."""

EXPLAINED = """\
Models at small scale on `cpu2`; all answers measured in turns after the searches. A time is the
mean of the rounds, ± half its 95% confidence interval over the rounds; the last columns are the
same of the ratio within each round. The runs until within 2% are those of the search, in order, by
the times that it saw itself. The classical methods place under estimated costs, as for somebody who
has measured nothing."""


def main() -> None:
    options = _options()
    for model in options.models:
        program = load_program(model, scale="small")
        problem = make_problem(program.graph, Cluster.load(options.cluster))
        with TensorFlowRunner(program, problem.cluster) as runner:
            found = compare(
                problem,
                runner,
                Budget(trials=options.runs),
                Budget(trials=options.learner_runs) if options.learner_runs else None,
                options.rounds,
            )
            rows = [{"model": model, **row} for row in found]
            ours, naive = overhead(problem, runner, program)
        overheads = [{"model": model, "overhead_seconds": ours, "naive_seconds": naive}]
        print(answers_table(rows), overhead_table(overheads), sep="\n\n", flush=True)
        if not options.no_write:  # after each: the next takes hours
            write(rows, overheads)


def compare(
    problem: Problem,
    runner: TensorFlowRunner,
    ours: Budget,
    learner: Budget | None,
    rounds: int,
    *,
    classical: Sequence[str] = CLASSICAL,
    config: RefineConfig | None = None,
    learner_settings: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """What each way of searching found, measured side by side.

    Args:
        problem: of the runner's program and cluster.
        runner: the real devices.
        ours: of simulate+measure.
        learner: of learning from measured rewards; None to leave that out.
        rounds: of measuring all answers in turns at the end.
        classical: methods whose proposals are measured.
        config: of the searches.
        learner_settings: of the learner, as `--learner` takes them.
    """
    config = config or RefineConfig()
    answers: dict[str, Answer] = {}
    searched = _searched(
        problem,
        lambda folder: refine(
            problem, runner, registry.parse("auto"), ours, directory=folder, config=config
        ),
    )
    if searched is None:
        raise SystemExit("no placement ran: see what `placewright measure` says of one")
    answers["simulate+measure"] = searched
    evaluator = MeasuredEvaluator(problem, runner)
    if learner is not None:
        final = FinalConfig(finalists=config.finalists, final_rounds=config.final_rounds)
        learned = _searched(
            problem,
            lambda folder: search_measured(
                problem,
                evaluator,
                ["reinforce"],
                learner,
                directory=folder,
                config=final,
                learner=learner_settings,
            ),
            "reinforce",
        )
        if learned is not None:
            answers["reinforce, measured"] = learned
    for name in registry.installed(classical)[0]:
        (placer,) = registry.make([name], problem)
        asked = placer.ask(problem.num_devices)
        tried = [(p, evaluator.evaluate([p])[0].mean_seconds) for p in asked]
        if tried and min(seconds for _, seconds in tried) < np.inf:
            best = min(tried, key=lambda pair: pair[1])[0]
            answers[name] = (best, len(tried), runs_needed(best, tried))
    finals = in_rounds(
        [placement for placement, _, _ in answers.values()],
        lambda placement: evaluator.run(placement, compared=True).measurement,
        rounds,
    )
    found = answers["simulate+measure"][0]
    rows = []
    for name, (placement, runs, needed) in answers.items():
        if placement in finals.means and found in finals.means:
            measurement = finals.measurement(placement)
            against = finals.compare(found, placement, name)
            rows.append(
                {
                    "method": name,
                    "runs": runs,
                    "runs_to_2_percent": needed,
                    "step_seconds": measurement.mean_seconds,
                    "half_width_seconds": measurement.half_width_seconds,
                    "times_ours": against.ratio,
                    "half_width_times_ours": against.half_width,
                    "placement": "".join(map(str, placement.devices.tolist())),
                }
            )
    return rows


def _searched(
    problem: Problem, find: Callable[[str], Result], method: str | None = None
) -> Answer | None:
    """What a search found; with `method`, the best that this one found, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        result = find(folder)
        trials = read_trials(Path(folder) / "journal.jsonl", problem)
    tried = [(trial.placement, trial.measurement.mean_seconds) for trial in trials]
    # The best of the references is not what a learner found.
    found = {entry.method: entry.best for entry in result.methods}
    best = result.best if method is None else found.get(method)
    if best is None or not best.measurement.ok:
        return None
    answer = best.placement
    return answer, result.trials, runs_needed(answer, tried)


def runs_needed(answer: Placement, tried: Sequence[tuple[Placement, float]]) -> int:
    """How many real runs it took until one was within 2% of the answer, in order: by the times of
    the search itself, of which the answer's is the median of its runs."""
    usual = statistics.median_low([seconds for placement, seconds in tried if placement == answer])
    return next(n for n, (_, seconds) in enumerate(tried, start=1) if seconds <= 1.02 * usual)


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


def answers_table(rows: Sequence[Row]) -> str:
    return markdown(
        ["model", "method", "real runs", "until within 2% of its answer", "seconds per step", "±",
         "times simulate+measure", "±"],
        [
            [
                row["model"],
                row["method"],
                row["runs"],
                row["runs_to_2_percent"],
                f"{float(row['step_seconds']):.4f}",
                _half_width(row["half_width_seconds"], 4),
                f"{float(row['times_ours']):.3f}",
                _half_width(row["half_width_times_ours"], 3),
            ]
            for row in rows
        ],
        texts=2,
    )  # fmt: skip


def same_answers(rows: Sequence[Row]) -> str:
    """Where simulate+measure found nothing but what a classical method proposes."""
    said = []
    for row in rows:
        if row["method"] == "simulate+measure":
            others = [
                other["method"]
                for other in rows
                if other is not row
                and (other["model"], other["placement"]) == (row["model"], row["placement"])
            ]
            if others:
                said.append(
                    f"The answer of simulate+measure for {row['model']} is the placement of "
                    f"`{others[0]}`: it found no faster one."
                )
    return " ".join(said)


def _half_width(value: Any, digits: int) -> str:
    return f"{float(value):.{digits}f}" if value not in ("", None) else ""


def overhead_table(overheads: Sequence[Row]) -> str:
    return markdown(
        ["model", "overhead of a run, s", "the naive way, s"],
        [
            [
                row["model"],
                f"{float(row['overhead_seconds']):.2f}",
                f"{float(row['naive_seconds']):.2f}",
            ]
            for row in overheads
        ],
    )


def write(rows: Sequence[Row], overheads: Sequence[Row]) -> None:
    rows = merge_csv(RESULTS / "measured.csv", rows, "model")
    overheads = merge_csv(RESULTS / "overhead.csv", overheads, "model")
    (RESULTS / "README.md").write_text(
        f"""# Searching with real runs

{marked("measured", answers_table(rows))}

{marked("measured-overhead", overhead_table(overheads))}

{EXPLAINED}

{made_by()}
""",
        encoding="utf-8",
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cluster", default="cpu2")
    parser.add_argument("--runs", type=int, default=60, help="of simulate+measure")
    parser.add_argument("--learner-runs", type=int, default=500, help="of reinforce; 0 for none")
    parser.add_argument("--rounds", type=int, default=6, help="of measuring the answers in turns")
    parser.add_argument("--no-write", action="store_true", help="only print")
    return parser.parse_args()


if __name__ == "__main__":
    main()
