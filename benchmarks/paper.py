"""The experiment of the paper (Mirhoseini et al., ICML 2017), end to end.

    python -m benchmarks.paper               # all of it, some 40 minutes on 2 idle cores
    python -m benchmarks.paper simulated     # or some of its parts, in this order
    python -m benchmarks.paper simulated --methods auto    # one column of the table anew

- `simulated`: the paper's table, in the simulator at the paper's sizes;
- `measured`: the same columns with real runs of small models on two CPU devices;
- `fidelity`: how well the calibrated simulator predicts real runs;
- `training`: a model trained under the placement found and under the expert's (needs `measured`);
- `analysis`: what each device does, ours against the expert's (needs `simulated`);
- `cost`: how long the search takes (needs `simulated`), and how that grows;
- `links`: what is best for RNNLM if transfers cost more;
- `report`: the page of the results and the tables in the documentation.

Each writes its files to `results/paper`, and in `runs.csv` what it ran on and how long.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import math
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fidelity as fidelity_benchmark
from benchmarks import figures, tables
from benchmarks import measured as measured_benchmark
from benchmarks.common import (
    CLUSTERS,
    MODELS,
    Point,
    Row,
    command,
    cpu_name,
    first_within,
    markdown,
    merge_csv,
    read_csv,
    run_search,
    side_by_side,
    work_shares,
    write_csv,
)
from benchmarks.common import RESULTS as ALL_RESULTS
from benchmarks.placers import found_row, seconds_text
from placewright import load, make_problem, methods
from placewright._version import VERSION
from placewright.backends import RunConfig, load_program
from placewright.backends.tensorflow.runner import TensorFlowRunner
from placewright.budget import Budget
from placewright.cluster import Cluster
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.learning.config import REINFORCE
from placewright.measurement import Outcome, Trial
from placewright.placement import Placement
from placewright.placers.single_device import single_device
from placewright.problem import Problem, ProblemConfig
from placewright.report.analysis import loads
from placewright.session.config import RoundsConfig
from placewright.simulator import Simulator, lower_bounds
from placewright.testing import gpu_boards, layered_graph

OUT_OF_MEMORY = Outcome.OUT_OF_MEMORY.value

COLUMNS = {
    "cpu only": "CPU only",
    "one gpu": "one GPU",
    "scotch": "Scotch",
    "mincut": "MinCut",
    "expert": "expert",
    "reinforce": "`reinforce`",
    "ppo": "`ppo`",
    "auto": "`auto`",
}
"""Method in the files -> heading. `reinforce` is the published method, the paper's last column."""

OTHERS = ("cpu only", "one gpu", "scotch", "mincut", "expert")
OURS = ("ppo", "auto")
LEARNERS = ("reinforce", "ppo")


def _paper(*seconds: float | str) -> dict[str, float | str]:
    return dict(zip((*OTHERS, "reinforce"), seconds, strict=True))


PAPER: Mapping[tuple[str, str], Mapping[str, float | str]] = {
    ("rnnlm", "k80x2"): _paper(6.89, 1.57, 13.43, 11.94, 3.81, 1.57),
    ("rnnlm", "k80x4"): _paper(6.89, 1.57, 11.52, 10.44, 4.46, 1.57),
    ("nmt", "k80x2"): _paper(10.72, OUT_OF_MEMORY, 14.19, 11.54, 4.99, 4.04),
    ("nmt", "k80x4"): _paper(10.72, OUT_OF_MEMORY, 11.23, 11.78, 4.73, 3.92),
    ("inception_v3", "k80x2"): _paper(26.21, 4.60, 25.24, 22.88, 11.22, 4.60),
    ("inception_v3", "k80x4"): _paper(26.21, 4.60, 23.41, 24.52, 10.65, 3.85),
}
"""Seconds per training step, measured with TensorFlow r0.12 on Tesla K80s."""

PAPER_COST = "12 to 27 hours on 80 to 160 GPUs"
"""Of one search: 20 controllers with 4 to 8 workers each."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much of everything. The whole takes some 40 minutes on two cores, a third of that the
    searches of `reinforce`, whose network is large for a CPU."""

    models: tuple[str, ...] = MODELS
    clusters: tuple[str, ...] = CLUSTERS
    scale: str = "paper"
    """Of what is simulated. What is measured is small: a CPU core is no K80."""
    methods: tuple[str, ...] = (*LEARNERS, "auto")
    """The searches of `simulated`. What the files hold of those that are left out stays."""
    seeds: tuple[int, ...] = (0, 1)
    """Of what is random: two show how much that matters, more would take too long."""
    trials: int = 2000
    """Of the learners. What they find by then does not depend on the machine. Placements that come
    again do not count, so that a policy that has made up its mind would go on for long: one that
    proposes hardly anything new any more ends (`settled`), as `ppo` always does."""
    seconds: float = 20.0
    """Of `auto`, on one core; a last update of its learner may take it some seconds beyond."""
    jobs: int = 2
    """Searches at a time, one core each."""

    measured_models: tuple[str, ...] = MODELS
    runs: int = 24
    """Real runs of simulate+measure at most. The rounds of its final take a third of them."""
    learner_models: tuple[str, ...] = ("rnnlm",)
    """Models on which `reinforce` learns from real runs, a few updates: it needs thousands of runs,
    that is hours. `benchmarks.measured` gives it 500."""
    learner_runs: int = 40
    """Its real runs at most."""
    search_seconds: float = 50.0
    """Most time of simulate+measure on each model."""
    learner_seconds: float = 75.0
    """Of `reinforce`."""
    learner_samples: int = 4
    """Runs for each of its updates, as many as the paper's controllers had workers."""
    rounds: int = 3
    """Of measuring all answers in turns: the least that gives a confidence interval worth it."""

    fidelity_models: tuple[str, ...] = MODELS
    placements: int = 40
    """Predicted and measured, of each model."""
    fit: int = 24
    """Other placements, that each calibration is fitted to."""
    fidelity_often: tuple[str, ...] = ("inception_v3",)
    """Models whose placements are all measured three times: those of this one differ by so little
    that with one pass the rank correlation is mostly that of the noise."""
    fidelity_steps: int = 6
    """Of each run, up to ten where they differ: a few, as there are some eighty runs of each model.
    `benchmarks.fidelity` takes longer and measures everything four times."""

    train_steps: int = 30
    """In each of four runs: enough to see the loss fall and the times differ."""

    scaling_seconds: float = 2.0
    """Of each search whose growth with the size of the problem is looked at."""
    scaling_groups: tuple[int, ...] = (50, 100, 250, 500, 1000)
    """With the middle number of ops."""
    scaling_ops: tuple[int, ...] = (1000, 3000, 10_000, 30_000, 100_000)
    """With the middle number of groups."""

    link_factors: tuple[float, ...] = (1, 10, 30, 100)
    """How many times slower links are made, in bandwidth and latency."""
    link_seconds: float = 3.0
    """Of each search with such links."""

    results: Path = ALL_RESULTS
    """Where the folder `paper` is."""

    @property
    def folder(self) -> Path:
        return self.results / "paper"


# --- simulated -----------------------------------------------------------------------------------


def simulated(settings: Settings) -> None:
    rows: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for model in settings.models:
            graph = load(model, scale=settings.scale)
            path = Path(folder) / f"{model}.json"
            graph.save(path)  # the processes of the searches need no TensorFlow
            for cluster in settings.clusters:
                problem = make_problem(graph, Cluster.load(cluster))
                bound = lower_bounds(problem).best
                rows += fixed_rows(problem, bound)
                cases += [
                    {
                        "graph": str(path), "cluster": cluster, "method": method, "seed": seed,
                        "lower_bound": bound,
                        "trials": settings.trials if method in LEARNERS else None,
                        "seconds": None if method in LEARNERS else settings.seconds,
                    }
                    for method, seed in itertools.product(settings.methods, settings.seeds)
                ]  # fmt: skip
        for row, curve in side_by_side(search_case, cases, settings.jobs):
            print(*list(row.values())[:-1], flush=True)
            rows.append(row)
            curves += curve
    for name, found in (("simulated", rows), ("curves", curves)):
        path = settings.folder / f"{name}.csv"
        merged = merge_csv(path, found, "model", "cluster", "method")
        write_csv(path, sorted(merged, key=_order))


def _order(row: Row) -> tuple[int, ...]:
    return (
        MODELS.index(row["model"]),
        CLUSTERS.index(row["cluster"]),
        list(COLUMNS).index(row["method"]),
        int(row["seed"]),
        int(row["trials"]),
    )


def fixed_rows(problem: Problem, bound: float) -> list[dict[str, Any]]:
    """What needs no search."""
    rows = []
    evaluator = SimulatedEvaluator(problem)
    singles = list(zip(problem.cluster.devices, single_device(problem), strict=True))
    for kind, method in (("cpu", "cpu only"), ("gpu", "one gpu")):
        placement = next(p for device, p in singles if device.type == kind)
        (measurement,) = evaluator.evaluate([placement])
        trial = Trial(placement=placement, measurement=measurement, placer=method)
        rows.append(_row(problem, method, 0, trial, trials=1, seconds=0.0, lower_bound=bound))
    for method in ("scotch", "mincut", "expert"):
        searched = run_search(problem, [method], Budget(seconds=60.0))
        progress = searched.progress
        rows.append(
            _row(
                problem, method, 0, progress.best, trials=progress.trials,
                seconds=searched.seconds, lower_bound=bound,
            )
        )  # fmt: skip
    return rows


def search_case(case: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One search: its line, and how it got there."""
    problem = make_problem(load(case["graph"]), Cluster.load(case["cluster"]))
    method, seed = case["method"], case["seed"]
    budget = Budget(trials=case["trials"], seconds=case["seconds"])
    learner = replace(REINFORCE, settled=0.03) if method == "reinforce" else None
    names = methods.parse(method).names
    searched = run_search(problem, names, budget, seed=seed, learners=learner)
    row = _row(
        problem, method, seed, searched.progress.best, trials=searched.progress.trials,
        seconds=searched.seconds, lower_bound=case["lower_bound"],
    )  # fmt: skip
    policy = searched.policy_placement if method in LEARNERS else None
    if policy is not None:
        (measurement,) = SimulatedEvaluator(problem).evaluate([policy])
        row["policy_outcome"] = measurement.outcome.value
        row["policy_seconds"] = measurement.mean_seconds if measurement.ok else ""
        row["policy_largest_share"] = f"{max(work_shares(problem, policy)):.3f}"
    about = {name: row[name] for name in ("model", "cluster", "method", "seed")}
    return row, [about | point._asdict() for point in _thinned(searched.curve)]


def _thinned(curve: Sequence[Point]) -> list[Point]:
    """Without improvements of less than a thousandth, but for the last."""
    kept: list[Point] = []
    for point in curve:
        if not kept or point is curve[-1] or point.step_seconds < 0.999 * kept[-1].step_seconds:
            kept.append(point)
    return kept


def _row(
    problem: Problem, method: str, seed: int, best: Trial | None, **more: Any
) -> dict[str, Any]:
    paper = PAPER.get((problem.graph.name, problem.cluster.name), {})
    return {
        **found_row(problem, method, seed, best, **more),
        "paper_seconds": paper.get(method, ""),
        "policy_outcome": "",
        "policy_seconds": "",
        "policy_largest_share": "",
        "placement": "".join(map(str, best.placement.devices.tolist())) if best else "",
    }


def placement_of(problem: Problem, row: Row) -> Placement:
    """As it stands in a file: the number of each group's device."""
    return Placement.of(problem, [int(digit) for digit in row["placement"]])


def _cases(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """Model and cluster -> method -> its rows, one for each seed."""
    cases: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        mine = cases.setdefault((row["model"], row["cluster"]), {})
        mine.setdefault(row["method"], []).append(row)
    return cases


def _mean(rows: Sequence[Row]) -> float:
    """Of the step times; infinite where one failed, or there is none."""
    if not rows or any(row["step_seconds"] == "" for row in rows):
        return math.inf
    return statistics.fmean(float(row["step_seconds"]) for row in rows)


def simulated_table(rows: Sequence[Row]) -> str:
    lines: list[list[str]] = []
    for (model, cluster), found in _cases(rows).items():
        here = [seconds_text(found.get(method, [])) for method in COLUMNS]
        bound = float(next(iter(found.values()))[0]["lower_bound_seconds"])
        best = min(_mean(found.get(method, [])) for method in OTHERS)
        auto = _mean(found.get("auto", []))
        lines.append([f"{model} {cluster}", "here", *here, f"{bound:.3f}", _gain(best, auto)])
        paper = PAPER[model, cluster]
        numbers = [paper.get(method, "") for method in COLUMNS]
        known = min(float(paper[name]) for name in OTHERS if paper[name] != OUT_OF_MEMORY)
        lines.append(
            [
                "",
                "paper",
                *(f"{n:.2f}" if isinstance(n, float) else n for n in numbers),
                "",
                _gain(known, float(paper["reinforce"])),
            ]
        )
    heading = ["seconds per step", "", *COLUMNS.values(), "lower bound", "gain"]
    return markdown(heading, lines, texts=2)


def details_table(rows: Sequence[Row]) -> str:
    """What each answer needs and what it took to find it."""
    return markdown(
        ["case", "method", "seed", "s per step", "peak GB per device (CPU first)", "trials",
         "seconds"],
        [
            [
                f"{row['model']} {row['cluster']}",
                COLUMNS[row["method"]],
                row["seed"],
                seconds_text([row]),
                row["peak_gb"],
                f"{int(row['trials']):,}",
                f"{float(row['search_seconds']):.1f}",
            ]
            for row in rows
        ],
        texts=2,
    )  # fmt: skip


def _gain(others: float, ours: float) -> str:
    return "" if math.isinf(others) or math.isinf(ours) else f"{100 * (others / ours - 1):.0f}%"


def agreement(rows: Sequence[Row]) -> str:
    """What of the paper's findings is found here as well, by the numbers, and why not."""
    cases = _cases(rows)
    points = [
        *_one_gpu_points(cases),
        *_memory_points(cases),
        *_spread_points(cases),
        *_more_gpus_points(cases),
        *_partitioner_points(cases),
        *_best_points(cases),
        *_scale_points(cases),
    ]
    lines = [f"- {'**Agrees.**' if ok else '**Differs.**'} {text}" for ok, text in points]
    return "\n".join([*lines, "", WHY])


Cases = Mapping[tuple[str, str], Mapping[str, Sequence[Row]]]
Points = list[tuple[bool, str]]


def _of(cases: Cases, model: str) -> dict[str, Mapping[str, Sequence[Row]]]:
    return {cluster: found for (name, cluster), found in cases.items() if name == model}


def _on_one_device(row: Row) -> bool:
    """Whether a learner's policy ended so."""
    return float(row["policy_largest_share"]) > 0.99


def _one_gpu_points(cases: Cases) -> Points:
    points: Points = []
    for cluster, found in _of(cases, "rnnlm").items():
        alone, auto = _mean(found["one gpu"]), _mean(found["auto"])
        points.append(
            (
                alone <= 1.01 * auto,
                f"RNNLM on {cluster}: in the paper one GPU is best. Here one GPU takes {alone:.3f} "
                f"s, the expert's split by layers {_mean(found['expert']):.3f} s, and `auto` finds "
                f"{auto:.3f} s.",
            )
        )
        policies = [row for row in found.get("reinforce", []) if row["policy_largest_share"]]
        if policies:
            single = sum(
                _on_one_device(row)
                and row["policy_seconds"] != ""
                and float(row["policy_seconds"]) <= 1.01 * alone
                for row in policies
            )
            points.append(
                (
                    single == len(policies),
                    f"RNNLM on {cluster}: the published method ends with everything on one GPU, "
                    f"as in the paper, in {single} of {len(policies)} runs (the placement that its "
                    "policy holds for the best at the end).",
                )
            )
    return points


def _memory_points(cases: Cases) -> Points:
    outcomes = {
        cluster: found["one gpu"][0]["outcome"] for cluster, found in _of(cases, "nmt").items()
    }
    if not outcomes:
        return []
    fails = all(outcome == OUT_OF_MEMORY for outcome in outcomes.values())
    here = ", ".join(f"{outcome} on {cluster}" for cluster, outcome in outcomes.items())
    return [(fails, f"NMT does not fit one GPU in the paper; here: {here}.")]


def _spread_points(cases: Cases) -> Points:
    points: Points = []
    for cluster, found in _of(cases, "nmt").items():
        best = min(found["auto"], key=lambda row: float(row["step_seconds"] or "inf"))
        groups: Counter[str] = Counter(best["placement"])
        gpus = [str(device) for device in range(1, len(str(best["peak_gb"]).split()))]
        # A group or two are no use of a GPU.
        used = sum(groups[device] >= 0.05 * sum(groups.values()) for device in gpus)
        each = ", ".join(str(groups[device]) for device in gpus)
        policies = [row for row in found.get("reinforce", []) if row["policy_largest_share"]]
        if policies:
            single = sum(map(_on_one_device, policies))
            points.append(
                (
                    not single,
                    f"NMT on {cluster}: the published method's policy, which spreads it over all "
                    f"GPUs in the paper, ends with everything on one device in {single} of "
                    f"{len(policies)} runs here.",
                )
            )
        points.append(
            (
                used == len(gpus) and groups["0"] > 0,
                f"NMT on {cluster}: in the paper it is spread over all GPUs, with cheap ops on the "
                f"CPU. Here the best of `auto` puts {each} groups on the GPUs and {groups['0']} on "
                "the CPU.",
            )
        )
    return points


def _more_gpus_points(cases: Cases) -> Points:
    found = _of(cases, "inception_v3")
    if not {"k80x2", "k80x4"} <= set(found):
        return []
    alone = _mean(found["k80x2"]["one gpu"])
    two, four = (_mean(found[cluster]["auto"]) for cluster in ("k80x2", "k80x4"))
    return [
        (
            four < 0.99 * two,
            f"Inception-V3 gains with four GPUs over two: {two:.3f} to {four:.3f} s here "
            f"({two / four - 1:.0%}), 4.60 to 3.85 s in the paper (19%).",
        ),
        (
            two >= 0.99 * alone,
            f"Inception-V3 gains nothing with two GPUs over one in the paper; here {alone:.3f} "
            f"against {two:.3f} s.",
        ),
    ]


def _partitioner_points(cases: Cases) -> Points:
    points: Points = []
    for name in ("scotch", "mincut"):
        worse = [
            case for case, found in cases.items() if _mean(found[name]) > _mean(found["expert"])
        ]
        better = [" ".join(case) for case in cases if case not in worse]
        text = f"{COLUMNS[name]} is worse than the expert in all cases of the paper, here in "
        text += f"{len(worse)} of {len(cases)}"
        points.append(
            (not better, f"{text} (not in {', '.join(better)})." if better else f"{text}.")
        )
    return points


def _best_points(cases: Cases) -> Points:
    beaten = []
    for case, found in cases.items():
        others = min(_mean(found.get(name, [])) for name in (*OTHERS, "reinforce"))
        beaten += [f"`{name}` in {' '.join(case)}" for name in OURS if _mean(found[name]) > others]
    learned = [
        " ".join(case)
        for case, found in cases.items()
        if "reinforce" in found
        and _mean(found["reinforce"]) > min(_mean(found[name]) for name in OTHERS)
    ]
    text = "The learned placement is at least as good as every other column everywhere in the paper"
    ours_text = f"not here: {', '.join(beaten)}"
    if not beaten:
        ours_text = "here `ppo` and `auto` are at least as good as all columns before them"
    points = [(not beaten, f"{text}; {ours_text}.")]
    if learned:
        points.append(
            (
                False,
                "The published method, with the trials it has here, is not: one of the first five "
                f"columns is better in {', '.join(learned)}.",
            )
        )
    return points


def _scale_points(cases: Cases) -> Points:
    ratios = [
        float(PAPER[case][name]) / _mean(found[name])
        for case, found in cases.items()
        for name in OTHERS
        if PAPER[case][name] != OUT_OF_MEMORY and _mean(found[name]) < math.inf
    ]
    if not ratios:
        return []
    text = f"The paper's times are {min(ratios):.1f} to {max(ratios):.1f} times those here."
    return [(min(ratios) > 0.5 and max(ratios) < 2, text)]


WHY = """\
Why it differs where it does: the times here are of a model of the machine, a K80 at its roofline
and PCIe at its bandwidth, while the paper's were measured with TensorFlow r0.12. There the expert's
split by layers was more than twice as slow as one GPU; presumably handing tensors to another device
cost far more than it does in this model, so that here splitting pays off sooner, partitioners are
punished less, and one device is best less often. Our graphs are not theirs either: they were built
anew from the paper's description, with fewer ops. The shape can be compared, not the seconds."""


# --- measured ------------------------------------------------------------------------------------


def measured(settings: Settings) -> None:
    for model in settings.measured_models:
        program = load_program(model, scale="small")
        problem = make_problem(program.graph, Cluster.load("cpu2"))
        with TensorFlowRunner(program, problem.cluster) as runner:
            found = measured_benchmark.compare(
                problem,
                runner,
                Budget(trials=settings.runs, seconds=settings.search_seconds),
                Budget(trials=settings.learner_runs, seconds=settings.learner_seconds)
                if model in settings.learner_models
                else None,
                settings.rounds,
                learner_config=replace(REINFORCE, samples=settings.learner_samples),
                classical=("single", "scotch", "mincut", "expert"),
                # A short final: all answers are measured in turns again afterwards.
                config=RoundsConfig(finalists=2, final_rounds=2, simulate_seconds=5.0),
            )
        rows = [{"model": model, **row} for row in found]
        print(measured_benchmark.answers_table(rows), flush=True)
        merge_csv(settings.folder / "measured.csv", rows, "model")


# --- fidelity ------------------------------------------------------------------------------------


def fidelity(settings: Settings) -> None:
    path = settings.folder / "fidelity.csv"
    for model in settings.fidelity_models:
        rows = fidelity_benchmark.check(
            model,
            "cpu2",
            settings.placements,
            fit=settings.fit,
            passes=3 if model in settings.fidelity_often else 1,
            config=RunConfig(steps=settings.fidelity_steps, max_steps=10),
        )
        print(fidelity_benchmark.table(rows), flush=True)
        figures.fidelity(merge_csv(path, rows, "model"), path.with_suffix(".svg"))


# --- training ------------------------------------------------------------------------------------


def training(settings: Settings) -> None:
    """Models that were measured, trained twice under each placement, in turns."""
    rows = []
    answers = {
        model: {
            row["method"]: row
            for row in _needed(settings, "measured")
            if row["model"] == model and row["method"] in ("simulate+measure", "expert")
        }
        for model in settings.measured_models
    }
    # Where the placement found is the expert's, there is nothing to compare.
    differ = [m for m in answers if len({row["placement"] for row in answers[m].values()}) > 1]
    for model in differ or settings.measured_models[:1]:
        rows += trained(model, answers[model], settings.train_steps)
        print(training_table(rows), flush=True)
    write_csv(settings.folder / "training.csv", rows)
    figures.training(rows, settings.folder / "training.svg")


def trained(model: str, answers: Mapping[str, Row], steps: int) -> list[dict[str, Any]]:
    program = load_program(model, scale="small")
    problem = make_problem(program.graph, Cluster.load("cpu2"))
    config = RunConfig(time_limit_seconds=600.0)
    # One batch over and over: that is enough to see the loss fall.
    feeds = text(program) if model == "rnnlm" else None
    rows = []
    runs: Counter[str] = Counter()
    with TensorFlowRunner(program, problem.cluster, config, feeds=feeds) as runner:
        names = list(answers)
        for name in (*names, *names[::-1]):
            devices = placement_of(problem, answers[name]).devices[problem.grouping.group_of]
            run = runner.measure(devices, train_steps=steps)
            if run.returned is None:
                raise SystemExit(f"training {model} with {name}: {run.measurement.reason}")
            (losses,) = run.returned.values()
            at = np.cumsum([0.0, *run.measurement.step_seconds])
            rows += [
                {
                    "model": model,
                    "placement": name,
                    "run": runs[name],
                    "step": step,
                    "loss": loss,
                    "seconds": second,
                }
                for step, (loss, second) in enumerate(zip(losses, at.tolist(), strict=True))
            ]
            runs[name] += 1
    return rows


def text(program: Any) -> dict[str, Any]:
    """Words as frequent as in a natural text, rare ones rarely: there is something to learn."""
    from placewright.backends.models.rnnlm import CONFIGS

    (tokens,) = program.inputs
    words = np.random.default_rng(0).zipf(1.3, tokens.shape)
    return {tokens.name: (words % CONFIGS["small"].vocabulary).astype(tokens.dtype)}


def training_table(rows: Sequence[Row]) -> str:
    lines: list[list[object]] = []
    remarks = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if row["model"] == model:
                runs.setdefault((row["placement"], str(row["run"])), []).append(row)
        losses = np.array([[float(row["loss"]) for row in run] for run in runs.values()])
        difference = losses.max(axis=0) - losses.min(axis=0)
        spread = float(np.max(difference / np.abs(losses.mean(axis=0))))
        for name in dict.fromkeys(name for name, _ in runs):
            mine = [run for (other, _), run in runs.items() if other == name]
            seconds = [float(run[-1]["seconds"]) for run in mine]
            lines.append(
                [
                    f"{model}, {name}",
                    len(mine[0]),
                    " and ".join(f"{total:.2f}" for total in seconds),
                    f"{1000 * statistics.fmean(seconds) / (len(mine[0]) - 1):.1f}",
                    f"{float(mine[0][0]['loss']):.4f}",
                    f"{float(mine[0][-1]['loss']):.4f}",
                ]
            )
        remarks.append(
            f"The losses of all runs of {model} are equal at every step, to the last bit."
            if spread == 0
            else f"The losses of two runs of {model} differ by {spread:.1g} of the loss at most."
        )
    heading = ["placement", "steps", "seconds of each run", "ms a step", "first loss", "last loss"]
    return "\n\n".join([markdown(heading, lines), " ".join(remarks)])


def _needed(settings: Settings, part: str) -> list[dict[str, str]]:
    rows = read_csv(settings.folder / f"{part}.csv")
    if not rows:
        raise SystemExit(f"{settings.folder}: no {part}.csv; run the parts before this one first")
    return rows


# --- analysis ------------------------------------------------------------------------------------


def analysis(settings: Settings) -> None:
    """As in the paper: the load of each device, for the models that gain by several."""
    cases = _cases(_needed(settings, "simulated"))
    cluster = settings.clusters[-1]
    rows: list[dict[str, Any]] = []
    for model in settings.models:
        if model == "rnnlm" or (model, cluster) not in cases:
            continue
        problem = make_problem(load(model, scale=settings.scale), Cluster.load(cluster))
        found = cases[model, cluster]
        ours = min(
            (row for name in OURS for row in found[name] if row["step_seconds"]),
            key=lambda row: float(row["step_seconds"]),
        )
        for who, row in ((ours["method"], ours), ("expert", found["expert"][0])):
            timeline = Simulator(problem).timeline(placement_of(problem, row))
            rows += [
                {
                    "model": model,
                    "cluster": cluster,
                    "placement": who,
                    "step_seconds": timeline.step_seconds,
                    "device": name,
                    "compute_seconds": load_.compute_seconds,
                    "copy_seconds": load_.copy_seconds,
                    "idle_seconds": load_.idle_seconds,
                    "peak_gb": f"{peak / 1e9:.2f}",
                }
                for name, load_, peak in zip(
                    problem.cluster.device_names,
                    loads(timeline),
                    timeline.peak_bytes.tolist(),
                    strict=True,
                )
            ]
    if rows:
        write_csv(settings.folder / "analysis.csv", rows)
        print(analysis_table(rows), flush=True)


def analysis_table(rows: Sequence[Row]) -> str:
    return markdown(
        ["model", "placement", "device", "computes, s", "copies, s", "is idle, s", "peak, GB"],
        [
            [
                f"{row['model']} {row['cluster']}",
                f"{row['placement']} ({float(row['step_seconds']):.3f} s)",
                row["device"],
                *(
                    f"{float(row[f'{what}_seconds']):.3f}"
                    for what in ("compute", "copy", "idle")
                ),
                row["peak_gb"],
            ]
            for row in rows
        ],
        texts=3,
    )  # fmt: skip


def analysis_text(rows: Sequence[Row]) -> str:
    """Who balances better, by the busiest device's part of all computing."""
    sentences = []
    for model in dict.fromkeys(row["model"] for row in rows):
        parts = []
        for who in dict.fromkeys(row["placement"] for row in rows if row["model"] == model):
            mine = [row for row in rows if row["model"] == model and row["placement"] == who]
            work = [float(row["compute_seconds"]) for row in mine]
            copies = sum(float(row["copy_seconds"]) for row in mine) / 2
            parts.append(
                f"under `{who}` the busiest device computes for {max(work):.3f} s of "
                f"{float(mine[0]['step_seconds']):.3f} s, and {copies:.3f} s of copies are made in "
                "all"
            )
        sentences.append(f"{model}: {'; '.join(parts)}.")
    return " ".join(sentences)


# --- cost ----------------------------------------------------------------------------------------


def cost(settings: Settings) -> None:
    longer = read_csv(settings.results / "placers" / "placers.csv")
    rows = cost_rows(_needed(settings, "simulated"), _needed(settings, "curves"), longer)
    write_csv(settings.folder / "cost.csv", rows)
    print(cost_table(rows), flush=True)
    best = {(row["model"], row["cluster"]): row["best_known_seconds"] for row in rows}
    curves = [row for row in _needed(settings, "curves") if row["method"] == "auto"]
    for row in curves:
        known = best[row["model"], row["cluster"]]
        row["above_best_known"] = str(float(row["step_seconds"]) / known - 1)
    figures.search_cost(curves, settings.folder / "cost.svg")
    middle = (len(settings.scaling_ops) // 2, len(settings.scaling_groups) // 2)
    ops, groups = settings.scaling_ops[middle[0]], settings.scaling_groups[middle[1]]
    sizes = [(ops, count) for count in settings.scaling_groups]
    sizes += [(count, groups) for count in settings.scaling_ops]
    scaling = []
    for size in dict.fromkeys(sizes):
        scaling.append(scaling_row(*size, settings.scaling_seconds))
        print(*scaling[-1].values(), flush=True)
    write_csv(settings.folder / "scaling.csv", scaling)


def cost_rows(
    rows: Sequence[Row], curves: Sequence[Row], longer: Sequence[Row] = ()
) -> list[dict[str, Any]]:
    """When each search was within 2% of the best of all of them, and of the longer ones of
    `benchmarks.placers`."""
    made = []
    for (model, cluster), found in _cases(rows).items():
        every = [row for mine in found.values() for row in mine if row["step_seconds"] != ""]
        every += [
            row
            for row in longer
            if (row["model"], row["cluster"]) == (model, cluster) and row["step_seconds"] != ""
        ]
        best = min(every, key=lambda row: float(row["step_seconds"]))
        known = float(best["step_seconds"])
        for method in (*LEARNERS, "auto"):
            for row in found.get(method, []):
                curve = [
                    Point(int(p["trials"]), float(p["seconds"]), float(p["step_seconds"]))
                    for p in curves
                    if all(p[n] == str(row[n]) for n in ("model", "cluster", "method", "seed"))
                ]
                reached = first_within(curve, known)
                made.append(
                    {
                        "model": model,
                        "cluster": cluster,
                        "method": method,
                        "seed": row["seed"],
                        "best_known_seconds": known,
                        "best_known_by": best["method"],
                        "answer_seconds": row["step_seconds"],
                        "search_seconds": row["search_seconds"],
                        "trials": row["trials"],
                        "seconds_to_2_percent": f"{reached.seconds:.2f}" if reached else "",
                        "trials_to_2_percent": reached.trials if reached else "",
                    }
                )
    return made


def cost_table(rows: Sequence[Row]) -> str:
    lines = []
    for model, cluster in dict.fromkeys((row["model"], row["cluster"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["cluster"]) == (model, cluster)]
        known = f"{float(mine[0]['best_known_seconds']):.3f} ({mine[0]['best_known_by']})"
        cells = []
        for method in ("auto", *LEARNERS[::-1]):
            runs = [row for row in mine if row["method"] == method]
            cells.append(", ".join(map(_reached, runs)))
        lines.append([f"{model} {cluster}", known, *cells])
    headings = [f"`{name}`" for name in ("auto", *LEARNERS[::-1])]
    table = markdown(["case", "best known, s per step", *headings], lines)
    return (
        f"{table}\n\nSeconds on one core (and trials) until within 2% of the best known, for each "
        f"seed: the best of these searches and of those of 60 s on two cores "
        f"(`benchmarks.placers`). The paper's searches took {PAPER_COST}; there every placement "
        "was run for real, here it is simulated."
    )


def _reached(row: Row) -> str:
    if row["seconds_to_2_percent"] == "":
        return f"not in {float(row['search_seconds']):.0f} s ({int(row['trials']):,})"
    return f"{float(row['seconds_to_2_percent']):.1f} ({int(row['trials_to_2_percent']):,})"


def scaling_row(ops: int, groups: int, seconds: float) -> dict[str, Any]:
    """Local search on a layered random graph with four GPUs."""
    graph = layered_graph(ops, math.isqrt(ops))
    began = time.monotonic()
    problem = make_problem(graph, gpu_boards(4), ProblemConfig(groups=groups))
    grouped = time.monotonic() - began
    searched = run_search(problem, ["local-search"], Budget(seconds=seconds))
    answer = searched.curve[-1]
    reached = first_within(searched.curve, answer.step_seconds)
    assert reached is not None
    return {
        "ops": ops,
        "groups": problem.num_groups,
        "grouping_seconds": round(grouped, 2),
        "trials": searched.progress.trials,
        "search_seconds": round(searched.seconds, 2),
        "seconds_per_1000_trials": round(1000 * searched.seconds / searched.progress.trials, 4),
        "first_step_seconds": searched.curve[0].step_seconds,
        "step_seconds": answer.step_seconds,
        "seconds_to_2_percent": round(reached.seconds, 2),
        "trials_to_2_percent": reached.trials,
    }


def scaling_table(rows: Sequence[Row]) -> str:
    return markdown(
        ["ops", "groups", "seconds to group", "trials", "seconds for 1,000 trials",
         "seconds until within 2% of its answer", "trials until then"],
        [
            [
                f"{int(row['ops']):,}",
                f"{int(row['groups']):,}",
                f"{float(row['grouping_seconds']):.2f}",
                f"{int(row['trials']):,}",
                f"{float(row['seconds_per_1000_trials']):.3f}",
                f"{float(row['seconds_to_2_percent']):.2f}",
                f"{int(row['trials_to_2_percent']):,}",
            ]
            for row in rows
        ],
        texts=0,
    )  # fmt: skip


# --- slower links --------------------------------------------------------------------------------


def links(settings: Settings) -> None:
    """Whether it is the cost of transfers that makes one GPU best for RNNLM in the paper."""
    rows = []
    graph = load("rnnlm", scale=settings.scale)
    for cluster, factor in itertools.product(settings.clusters, settings.link_factors):
        problem = make_problem(graph, slower(Cluster.load(cluster), factor))
        searched = run_search(
            problem, ["single", "expert", "local-search"], Budget(seconds=settings.link_seconds)
        )
        best, found = searched.progress.best, searched.progress.best_of
        assert best is not None
        rows.append(
            {
                "model": graph.name,
                "cluster": cluster,
                "links_slower": factor,
                "one_gpu_seconds": found["single"].measurement.mean_seconds,
                "expert_seconds": found["expert"].measurement.mean_seconds,
                "best_seconds": best.measurement.mean_seconds,
                "best_largest_share": f"{max(work_shares(problem, best.placement)):.3f}",
            }
        )
        print(*rows[-1].values(), flush=True)
    write_csv(settings.folder / "links.csv", rows)


def slower(cluster: Cluster, factor: float) -> Cluster:
    links = tuple(
        replace(
            link,
            latency_seconds=link.latency_seconds * factor,
            bandwidth=link.bandwidth / factor,
            gap_seconds=None if link.gap_seconds is None else link.gap_seconds * factor,
        )
        for link in cluster.links
    )
    return replace(cluster, links=links)


def links_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{row['model']} {row['cluster']}",
            f"{float(row['links_slower']):g}",
            *(f"{float(row[f'{what}_seconds']):.3f}" for what in ("one_gpu", "expert", "best")),
            f"{100 * float(row['best_largest_share']):.0f}%",
        ]
        for row in rows
    ]
    heading = [
        "",
        "links slower by",
        "one GPU",
        "expert",
        "best found",
        "of its work on one device",
    ]
    verdicts = []
    for model, cluster in dict.fromkeys((row["model"], row["cluster"]) for row in rows):
        alone = [
            row
            for row in rows
            if row["cluster"] == cluster
            and float(row["one_gpu_seconds"]) <= 1.01 * float(row["best_seconds"])
        ]
        if not alone:
            verdicts.append(
                f"On {cluster} one GPU is within 1% of the best found at none of these."
            )
            continue
        first = min(alone, key=lambda row: float(row["links_slower"]))
        ratio = float(first["expert_seconds"]) / float(first["one_gpu_seconds"])
        paper = PAPER[model, cluster]
        verdicts.append(
            f"On {cluster} one GPU is within 1% of the best found from links "
            f"{float(first['links_slower']):g} times as slow on; there the expert's split takes "
            f"{ratio:.1f} times as long as one GPU, in the paper "
            f"{float(paper['expert']) / float(paper['one gpu']):.1f} times."
        )
    return f"{markdown(heading, lines)}\n\n{' '.join(verdicts)}"


# --- report --------------------------------------------------------------------------------------


def runs_table(rows: Sequence[Row]) -> str:
    order = list(PARTS)
    # Of `simulated: auto`, `simulated` is the part.
    rows = sorted(rows, key=lambda row: order.index(row["part"].partition(":")[0]))
    table = markdown(
        ["part", "on", "with", "command", "seconds", "load before"],
        [
            [
                row["part"],
                f"{row['cores']} cores, {row['cpu']}",
                row["versions"],
                f"`{row['command']}`",
                f"{float(row['seconds']):.0f}",
                row["load"],
            ]
            for row in rows
        ],
        texts=4,
    )
    total = sum(float(row["seconds"]) for row in rows if row["part"] in order) / 60
    return f"{table}\n\n{total:.1f} minutes for all parts."


def report(settings: Settings) -> None:
    page = settings.folder / "README.md"

    def table(name: str) -> str:
        return tables.block(f"paper-{name}", page, settings.results)

    sections = [
        "# The paper's experiment",
        'The experiment of "Device Placement Optimization with Reinforcement Learning" (Mirhoseini '
        "et al., ICML 2017), made by `make paper`. The paper's numbers are given as we know them.",
        "## Simulated, at the paper's sizes",
        table("simulated"),
        table("details"),
        "## What agrees",
        table("agreement"),
        "## Measured on two CPU devices",
        table("measured"),
        "## Prediction against real runs",
        table("fidelity"),
        "## Training to the end",
        table("training"),
        "## What the devices do",
        table("analysis"),
        "## What the search costs",
        table("cost"),
        "## How that grows",
        table("scaling"),
        "## If transfers cost more",
        table("links"),
        "## What it ran on",
        table("runs"),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


PARTS: dict[str, Callable[[Settings], None]] = {
    "simulated": simulated,
    "measured": measured,
    "fidelity": fidelity,
    "training": training,
    "analysis": analysis,
    "cost": cost,
    "links": links,
}


def run_part(name: str, settings: Settings) -> None:
    """Runs it and notes down on what."""
    whole = name != "simulated" or set(settings.methods) == set(Settings.methods)
    part = name if whole else f"{name}: {', '.join(settings.methods)}"
    facts = {"part": part, "load": f"{os.getloadavg()[0]:.1f}"}
    began = time.monotonic()
    PARTS[name](settings)
    facts |= {
        "seconds": f"{time.monotonic() - began:.1f}",
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "versions": versions(),
        "command": command(),
    }
    merge_csv(settings.folder / "runs.csv", [facts], "part")


def versions() -> str:
    found = [f"placewright {VERSION}", f"Python {platform.python_version()}"]
    for package in ("tensorflow", "tensorflow-cpu", "torch", "numpy", "numba"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    parts, settings = options()
    for name in parts:
        if name in PARTS:
            print(f"== {name}", flush=True)
            run_part(name, settings)
    if "report" in parts:
        report(settings)
        tables.main()


def options(arguments: Sequence[str] | None = None) -> tuple[list[str], Settings]:
    """The parts that are to be run, in order, and how."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = [*PARTS, "report"]
    parser.add_argument("parts", nargs="*", default="all", choices=[*everything, "all"])
    for field in dataclasses.fields(Settings):
        default: Any = field.default
        several = isinstance(default, tuple)
        kind = type(default[0] if several else default)
        kind = Path if isinstance(default, Path) else kind
        shape: dict[str, Any] = {"nargs": "+"} if several else {}
        if field.name == "methods":
            shape["choices"] = default
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=default, **shape
        )
    given = vars(parser.parse_args(arguments))
    parts = given.pop("parts")
    wanted = everything if "all" in parts else [name for name in everything if name in parts]
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return wanted, Settings(**given)


if __name__ == "__main__":
    main()
