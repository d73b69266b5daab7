"""The paper's experiment with measured rewards: partitions of one GPU are the machine's GPUs.

    python -m benchmarks.paper_gpu --prepare              # here: what needs Scotch and METIS
    python -m benchmarks.paper_gpu --seconds 540 --search-seconds 20     # on the machine with a GPU
    python -m benchmarks.paper_gpu --cases nmt-paper-4 inception_v3-paper-4 --train-steps 200
    python -m benchmarks.paper_gpu --devices cpu --scale small --output build/paper_gpu
    python -m benchmarks.paper_gpu --scale small --seconds 180 --search-seconds 8 --tables out
    python -m benchmarks.paper_gpu --take out             # tables of another run among these
    python -m benchmarks.paper_gpu --report               # figures and tables anew, from the files

Case by case, the most important first: calibrates for the model, gives each search the same real
time, measures all answers in turns, then looks at what the devices do and trains. All that is
measured is in journals under the output, and lines of CSV are added as they are made, so that the
same command goes on where it was stopped, by its time box or otherwise; where its time ended before
all was done, it exits with 3. A search that was stopped gets the rest of its time; what was found
until then is measured in turns all the same, and no case is begun that its time is too short for.
The tables stay small however many runs there are: of each search at most CURVE_ROWS are listed,
with the number of all in them. With `--tables` they are all that is in that folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import figures, gpu_tables, tables
from benchmarks.common import (
    MORE,
    RESULTS,
    Point,
    command,
    cpu_name,
    first_within,
    merge_csv,
    read_csv,
    write_csv,
)
from benchmarks.gpu_cases import (
    IN_ORDER,
    METHODS,
    Case,
    calibrated,
    classical,
    placement_of,
    prepare,
    prepared,
    problem_of,
    text_of,
)
from placewright._version import VERSION
from placewright.backends import load_program
from placewright.backends.base import Run
from placewright.backends.pytorch.runner import TorchRunner
from placewright.calibration import Calibration
from placewright.errors import PlacewrightError
from placewright.evaluators.base import Request
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.journal import Journal, read_trials
from placewright.learning.config import PPO, REINFORCE
from placewright.measurement import Measurement, Trial
from placewright.placement import Placement, everything_on
from placewright.problem import Problem, make_problem
from placewright.session.config import BOTH, MEASURE, RoundsConfig, SearchConfig
from placewright.session.directory import JOURNAL_FILE, open_journal
from placewright.session.driver import Session
from placewright.session.finals import Finals, in_rounds
from placewright.session.metrics import read_metrics
from placewright.session.real import RealRuns
from placewright.simulator import Simulator
from placewright.testing import gpu_boards, layered_graph

FOLDER = RESULTS / "paper_gpu"
PREPARED = FOLDER / "prepared"

SEARCHES = ("ppo warm", "simulate+measure", "auto", "local-search", "ppo", "reinforce")
"""The most important first."""

OWN = ("local-search", "ppo", "reinforce")
"""Of these the best that they proposed themselves counts; of the others the command's answer, which
may be a reference."""

REFERENCES = ("cpu only", "one gpu")

COMPARED = (*gpu_tables.OURS, "expert")
"""The best of ours is looked at beside the expert's placement."""

CASE_KEYS = ("model", "machine", "partitions")

CURVE_ROWS = 100
"""Of the runs of one search, and of the updates of one policy, that are listed at most."""

TABLES = ("paper_gpu", "runs_of_searches", "updates", "analysis", "training", "where", "faults")
"""Files of lines, each of a case."""

LEAST_ROUNDS = 2
"""Of measuring the answers in turns, for which time is kept: there is no interval of one."""

LAST_SECONDS = 2.0
"""Kept for what is written at the end."""

LEAST_TRAINING = 20
"""Fewer steps say nothing."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much of everything."""

    output: Path = FOLDER
    """Where the files are, and a folder for each case."""
    tables: Path | None = None
    """Where the tables are, if not there."""
    prepared: Path = PREPARED
    """What `--prepare` wrote."""
    seconds: float = 540.0
    """For all of it; what is left then is for the next call."""
    search_seconds: float = 20.0
    """Real time of each search, what it simulates included."""
    cases: tuple[Case, ...] = IN_ORDER
    methods: tuple[str, ...] = SEARCHES
    scale: str = "paper"
    rounds: int = 4
    """Of measuring the answers in turns."""
    train_steps: int = 0
    """Of training under ours and the expert's placement; 0 for none."""
    seed: int = 0


def about(case: Case, settings: Settings) -> dict[str, Any]:
    """What each line of a file begins with."""
    model = case.model if settings.scale == "paper" else f"{case.model} {settings.scale}"
    return dict(zip(CASE_KEYS, (model, case.machine, case.partitions), strict=True))


def name_of(case: Case, settings: Settings) -> str:
    """Of the case's files, which are of one size of the model."""
    suffix = "" if settings.scale == "paper" else f"-{settings.scale}"
    return f"{case.name}{suffix}"


def folder_of(case: Case, settings: Settings) -> Path:
    return settings.output / name_of(case, settings)


def prepared_of(case: Case, settings: Settings) -> Path:
    return settings.prepared / f"{name_of(case, settings)}.json"


def table_of(what: str, settings: Settings) -> Path:
    return (settings.tables or settings.output) / f"{what}.csv"


def add_rows(what: str, rows: Sequence[dict[str, Any]], settings: Settings) -> None:
    """In place of those of the same case."""
    if rows:
        merge_csv(table_of(what, settings), rows, *CASE_KEYS)


class Clock:
    """What is left of the time box."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self.besides = 0.0
        """What the last case took besides its searches; the next is taken to take as long."""

    @property
    def left(self) -> float:
        return self._until - time.monotonic()


class OutOfTime(Exception):
    """The rest is for the next call."""


# --- searches ------------------------------------------------------------------------------------


def search_config(name: str, seconds: float, seed: int) -> SearchConfig:
    """What is searched with. A quarter to a third of the time of what simulates
    first goes there."""
    # The answers of all are measured side by side afterwards, so that none needs its own final.
    rounds = RoundsConfig(
        finalists=1, final_rounds=0, candidates=3, traces=1, simulate_share=0.2,
        simulate_seconds=max(2.0, seconds / 6),
    )  # fmt: skip
    first = max(1.0, seconds / 4)
    common: dict[str, Any] = {"budget": seconds, "seed": seed, "rounds": rounds}
    if name == "reinforce":
        return SearchConfig(method=name, learner=REINFORCE, evaluate=MEASURE, **common)
    if name == "ppo":
        learner = replace(PPO, warm_start=0)
        return SearchConfig(method=name, learner=learner, evaluate=MEASURE, **common)
    if name == "ppo warm":
        # A gradient step takes some 0.1 s for 280 groups; imitating goes on with every update.
        learner = replace(PPO, warm_start=10)
        return SearchConfig(
            method="ppo", learner=learner, evaluate=MEASURE, simulate_first=1.4 * first, **common
        )
    if name == "local-search":
        return SearchConfig(method=name, evaluate=MEASURE, **common)
    if name == "simulate+measure":
        methods = "single,expert,heft,m-etf,local-search"
        return SearchConfig(method=methods, evaluate=BOTH, **common)
    assert name == "auto", name
    return SearchConfig(method=name, evaluate=MEASURE, simulate_first=first, **common)


class Found(NamedTuple):
    """What a search came to."""

    placement: Placement | None
    trials: int
    """Real runs of its own."""
    seconds: float
    reason: str = ""


@dataclass(kw_only=True)
class Bench:
    """A case under way."""

    case: Case
    problem: Problem
    runner: TorchRunner
    folder: Path
    settings: Settings
    clock: Clock
    references: list[Trial] = field(default_factory=list)
    """What all searches are told."""
    calibration: Calibration | None = None
    run_seconds: float = 0.0
    """What a run of a fast placement takes, with all that belongs to it."""

    @property
    def about(self) -> dict[str, Any]:
        return about(self.case, self.settings)

    @property
    def under(self) -> Problem:
        """The problem under calibrated costs."""
        assert self.calibration is not None
        return self.calibration.problem(self.problem)

    def learn_costs(self) -> None:
        """The references are measured, and the costs found out, once for all searches."""
        problem = self.problem
        config = SearchConfig(method="single", trials=10_000, evaluate=MEASURE)
        costs = self.folder / "costs.json"
        with Journal(self.folder / "references.jsonl", problem) as journal:
            evaluator = MeasuredEvaluator(problem, self.runner)
            real = RealRuns(problem, evaluator, config, journal=journal)
            real.find_references()
            self._reuse_cpu(real)
            if costs.is_file():
                self.calibration = Calibration.load(costs, problem)
            else:
                self.calibration = calibrated(real, self.runner)
                self.calibration.save(costs, problem.graph)
            real.repeat_references()
            self.references = [
                replace(trial, at_seconds=0.0) for trial in real.trials if trial.placer != "heft"
            ]
        self.under.save(self.folder / "problem.json.gz")
        ran = [trial for trial in self.references if trial.measurement.ok]
        if ran:
            fastest = min(ran, key=lambda trial: trial.measurement.mean_seconds).placement
            began = time.monotonic()
            self.runner.measure(fastest.devices[self.problem.grouping.group_of])
            self.run_seconds = time.monotonic() - began

    def seconds_to_end(self, answers: int) -> float:
        """Kept to measure so many answers once and then in turns, and for the last lines."""
        return LAST_SECONDS + (1 + LEAST_ROUNDS) * answers * self.run_seconds

    def _reuse_cpu(self, real: RealRuns) -> None:
        """The model on the CPU alone takes minutes in all, and is the same whatever is beside it:
        it is run for the first case only."""
        path = self.folder.parent / "cpu_only.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        singles = [p for p in real.references["single"] if self._is_cpu(p)]
        for placement in singles if self.case.partitions else ():
            if placement in real.samples:
                continue
            model = self.about["model"]
            if model not in known:
                real.measure([(placement, "single")])
                known[model] = real.samples[placement][0].to_json()
                path.write_text(json.dumps(known), encoding="utf-8")
                continue
            measurement = Measurement.from_json(known[model])
            # As many devices as this case has.
            peaks = measurement.peak_bytes[: self.problem.num_devices]
            peaks += (0,) * (self.problem.num_devices - len(peaks))
            measurement = replace(measurement, peak_bytes=peaks if measurement.peak_bytes else ())
            real.append([Trial(placement=placement, measurement=measurement, placer="single")])

    def _is_cpu(self, placement: Placement) -> bool:
        return self.problem.cluster.devices[placement.main_device].type == "cpu"

    def search(self, name: str, keep_seconds: float) -> Found:
        """One search, or what it found in an earlier call; it is stopped when no more than so much
        time is left."""
        folder = self.folder / name.replace(" ", "-")
        done = folder / "found.json"
        if done.is_file():
            known = json.loads(done.read_text(encoding="utf-8"))
            answer = known["placement"]
            placement = None if answer is None else placement_of(self.problem, answer)
            return Found(placement, known["trials"], known["seconds"], known["reason"])
        journal, spent = folder / JOURNAL_FILE, 0.0
        if journal.is_file():
            spent = max((t.at_seconds for t in read_trials(journal, self.problem)), default=0.0)
        seconds = max(2.0, self.settings.search_seconds - spent)
        config = search_config(name, seconds, self.settings.seed)
        assert config.evaluate is not None
        with open_journal(folder, self.problem, config.evaluate) as opened:
            if opened is not None and not opened.trials:
                opened.append(self.references)
        began = time.monotonic()
        result = Session(
            self.problem, config, runner=self.runner, calibration=self.calibration,
            directory=folder, stop=lambda: self.clock.left < keep_seconds,
        ).run()  # fmt: skip
        if result.interrupted:
            raise OutOfTime
        best = result.best
        if name in OWN:
            best = next(entry.best for entry in result.methods if entry.method == config.method)
        ok = best is not None and best.measurement.ok
        reason = result.fault or ("" if ok else "nothing that it proposed ran")
        found = Found(
            best.placement if best is not None and ok else None,
            result.trials - len(self.references),
            round(spent + time.monotonic() - began, 1),
            reason,
        )
        answer = None if found.placement is None else text_of(found.placement)
        done.write_text(json.dumps(found._asdict() | {"placement": answer}), encoding="utf-8")
        print(f"  {name}: {found.trials} real runs in {found.seconds} s {reason}", flush=True)
        return found

    def trials_of(self, name: str) -> list[Trial]:
        """The real runs of a search, without the references."""
        journal = self.folder / name.replace(" ", "-") / JOURNAL_FILE
        if not journal.is_file():
            return []
        return read_trials(journal, self.problem)[len(self.references) :]


# --- answers -------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A column of the table."""

    method: str
    placement: Placement | None
    found: Found | None = None
    costs: str = ""
    reason: str = ""


def reference_answers(bench: Bench) -> list[Answer]:
    problem = bench.problem
    answers = []
    for kind, method in (("cpu", "cpu only"), ("gpu", "one gpu")):
        numbers = [n for n, d in enumerate(problem.cluster.devices) if d.type == kind]
        if numbers:
            answers.append(Answer(method, everything_on(problem, numbers[0])))
    return answers


def finals(bench: Bench, answers: Sequence[Answer]) -> tuple[Finals, dict[Placement, Measurement]]:
    """All answers in turns, for as many rounds as there is time for; those that take more than
    three times the best once only, which says enough."""
    evaluator = MeasuredEvaluator(bench.problem, bench.runner)

    def measure(placement: Placement) -> Measurement:
        return evaluator.run([Request(placement, compared=True)])[0].measurement

    def in_time(placement: Placement) -> Measurement | None:
        return measure(placement) if bench.clock.left > LAST_SECONDS else None

    known = {trial.placement: trial.measurement for trial in bench.references}
    for answer in answers:
        if answer.found is not None:
            known |= {t.placement: t.measurement for t in bench.trials_of(answer.method)}
    once = {
        placement: known.get(placement) or measure(placement)
        for placement in dict.fromkeys(a.placement for a in answers if a.placement is not None)
    }
    best = min((m.mean_seconds for m in once.values()), default=math.inf)
    near = [p for p, m in once.items() if m.ok and m.mean_seconds <= 3 * best]
    return in_rounds(near, in_time, bench.settings.rounds, seed=bench.settings.seed), once


def rows_of(bench: Bench, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The lines of the table."""
    found, once = finals(bench, answers)
    costs = bench.folder / "simulate+measure" / "costs.json"
    under = bench.under
    if costs.is_file():
        under = Calibration.load(costs, bench.problem).problem(bench.problem)
    rows = []
    for answer in answers:
        placement = answer.placement
        measurement, rounds = None, 0
        if placement is not None:
            measurement = once[placement]
            if placement in found.means or placement in found.failed:
                measurement = found.measurement(placement)
                rounds = len(measurement.step_seconds)
        rows.append(_row(bench, answer, measurement, rounds, under))
    return rows


def _row(
    bench: Bench, answer: Answer, measurement: Measurement | None, rounds: int, under: Problem
) -> dict[str, Any]:
    case, placement = bench.case, answer.placement
    ran = measurement is not None and measurement.ok
    row: dict[str, Any] = {
        **bench.about, "method": answer.method,
        "outcome": measurement.outcome.value if measurement else "nothing proposed",
        "step_seconds": "", "half_width_seconds": "", "rounds": rounds, "predicted_seconds": "",
        "peak_gb": "", "trials": "", "search_seconds": "", "trials_to_2_percent": "",
        "seconds_to_2_percent": "", "costs": answer.costs, "reason": answer.reason,
        "memory_gb": round(max(d.memory_bytes for d in bench.problem.cluster.devices
                               if d.type == "gpu" or not case.partitions) / 1e9, 2),
        "placement": "" if placement is None else text_of(placement),
    }  # fmt: skip
    if measurement is not None and not ran:
        row["reason"] = measurement.reason[:200]
    if measurement is not None and measurement.peak_bytes:
        row["peak_gb"] = " ".join(f"{size / 1e9:.2f}" for size in measurement.peak_bytes)
    if placement is not None:
        simulated = Simulator(under).run(placement.devices[np.newaxis])
        if simulated.ok[0]:
            row["predicted_seconds"] = float(simulated.step_seconds[0])
    if measurement is not None and ran:
        row["step_seconds"] = measurement.mean_seconds
        row["half_width_seconds"] = measurement.half_width_seconds or ""
    if answer.found is not None:
        row |= {"trials": answer.found.trials, "search_seconds": answer.found.seconds}
        curve = curve_of(bench.trials_of(answer.method))
        usual = _usual(bench.trials_of(answer.method), placement)
        reached = first_within(curve, usual) if usual else None
        if reached is not None:
            row["trials_to_2_percent"] = reached.trials
            row["seconds_to_2_percent"] = round(reached.seconds, 2)
    return row


def _usual(trials: Sequence[Trial], placement: Placement | None) -> float | None:
    """What the search itself saw its answer take."""
    times = [t.measurement.mean_seconds for t in trials if t.placement == placement]
    return statistics.median_low(times) if times else None


def curve_of(trials: Sequence[Trial]) -> list[Point]:
    """Each time a search had found something better."""
    curve: list[Point] = []
    for number, trial in enumerate(trials, start=1):
        seconds = trial.measurement.mean_seconds
        if trial.measurement.ok and (not curve or seconds < curve[-1].step_seconds):
            curve.append(Point(number, trial.at_seconds, seconds))
    return curve


# --- what is looked at besides -------------------------------------------------------------------


def learning_rows(bench: Bench) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The real runs of the searches, and the updates of those that learn: of many, those that say
    most (`thinned`)."""
    runs, updates = [], []
    for name in bench.settings.methods:
        mine: list[dict[str, Any]] = []
        best, failed = math.inf, 0
        for number, trial in enumerate(bench.trials_of(name), start=1):
            seconds = trial.measurement.mean_seconds
            best, failed = min(best, seconds), failed + (not trial.measurement.ok)
            mine.append({
                **bench.about, "method": name, "trial": number,
                "seconds": round(trial.at_seconds, 3), "step_seconds": _number(seconds),
                "best_seconds": _number(best), "failed": failed, "placer": trial.placer,
            })  # fmt: skip
        better = [row["step_seconds"] != "" and row["step_seconds"] == row["best_seconds"]
                  for row in mine]  # fmt: skip
        runs += thinned(mine, better)
        learned: list[dict[str, Any]] = []
        for record in read_metrics(bench.folder / name.replace(" ", "-")):
            learned.append({
                **bench.about, "method": name,
                **{what: record[what] for what in ("placer", "update", "trials", "seconds")},
                "entropy": _number(record.get("entropy", math.nan)),
                "failure_share": record.get("failure_share", ""),
                "step_seconds_mean": _number(record.get("step_seconds_mean", math.nan)),
                "step_seconds_best": _number(record.get("step_seconds_best", math.nan)),
            })  # fmt: skip
        updates += thinned(learned, [False] * len(learned))
    return runs, updates


def thinned(
    rows: Sequence[dict[str, Any]], wanted: Sequence[bool], most: int = CURVE_ROWS
) -> list[dict[str, Any]]:
    """At most so many of the rows, in order: the first and the last, then the wanted, the latest
    before the earlier, and of the others some at equal distances."""
    if len(rows) <= most:
        return list(rows)
    last = len(rows) - 1
    kept = {0, last}
    kept.update([n for n in range(1, last) if wanted[n]][::-1][: most - 2])
    # Neighbours of equal distances may be kept already; then there are some fewer.
    kept.update(round(n) for n in np.linspace(0, last, max(0, most - len(kept))))
    return [rows[number] for number in sorted(kept)]


def _number(value: float) -> Any:
    return float(f"{value:.6g}") if math.isfinite(value) else ""


def compared(bench: Bench, rows: Sequence[Mapping[str, Any]]) -> dict[str, Placement]:
    """Our best and the expert's."""
    ours = [
        row for row in rows if row["method"] in gpu_tables.OURS and row["step_seconds"] not in ("",)
    ]
    chosen: dict[str, Placement] = {}
    if ours:
        best = min(ours, key=lambda row: float(row["step_seconds"]))
        chosen[str(best["method"])] = placement_of(bench.problem, str(best["placement"]))
    for row in rows:
        if row["method"] == "expert" and row["step_seconds"] != "":
            chosen["expert"] = placement_of(bench.problem, str(row["placement"]))
    return chosen


def analysis_rows(bench: Bench, chosen: Mapping[str, Placement]) -> list[dict[str, Any]]:
    """What each device does in a traced step."""
    rows = []
    problem = bench.problem
    names = problem.cluster.device_names
    for who, placement in chosen.items():
        run = bench.runner.measure(placement.devices[problem.grouping.group_of], traces=2)
        if run.trace is None:
            continue
        computes, copies = busy_seconds(run, names)
        step = statistics.median(run.trace.step_seconds)
        untraced = run.measurement.mean_seconds
        for number, name in enumerate(names):
            here = placement.devices == number
            rows.append({
                **bench.about, "placement": who, "device": name,
                "step_seconds": _number(untraced), "traced_step_seconds": _number(step),
                "compute_seconds": _number(computes[number]),
                "copy_seconds": _number(copies[number]),
                "idle_seconds": _number(max(0.0, step - computes[number])),
                "peak_gb": _peak(run, number), "groups": int(here.sum()),
                "what": what_is_there(problem, np.flatnonzero(here).tolist()),
            })  # fmt: skip
    return rows


def _peak(run: Run, number: int) -> Any:
    peaks = run.measurement.peak_bytes
    return round(peaks[number] / 1e9, 3) if len(peaks) > number else ""


def busy_seconds(run: Run, names: Sequence[str]) -> tuple[list[float], list[float]]:
    """How long each device computes and copies in a traced step; copies between two count for
    both."""
    assert run.trace is not None
    computes, copies = [0.0] * len(names), [0.0] * len(names)
    for op, seconds in run.trace.op_seconds.items():
        computes[run.trace.device_of[op]] += seconds
    for transfer in run.trace.transfers:
        for number, name in enumerate(names):
            # An edge is called `op (from -> to)`.
            ends = transfer.edge.rpartition("(")[2].rstrip(")").split(" -> ")
            if name in ends:
                copies[number] += transfer.seconds
    return computes, copies


def what_is_there(problem: Problem, groups: Sequence[int]) -> str:
    """The parts of the model with most groups on a device: `decoder/layer_1 40/45`."""
    part = [name.rpartition("/")[0] or name for name in problem.grouping.names]
    whole: dict[str, int] = {}
    for name in part:
        whole[name] = whole.get(name, 0) + 1
    here: dict[str, int] = {}
    for group in groups:
        here[part[group]] = here.get(part[group], 0) + 1
    most = sorted(here, key=lambda name: -here[name])[:6]
    return ", ".join(f"{name} {here[name]}/{whole[name]}" for name in most)


def training_rows(
    bench: Bench, chosen: Mapping[str, Placement], step_seconds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Trains from the same first values under each placement, and under the last, which is the
    expert's, once more: sums on a GPU are in no fixed order, and what that does to the loss is
    the measure for how equal two placements are. All train for the same steps, as many as there is
    time for."""
    runs = [(who, 0) for who in chosen] + [(who, 1) for who in list(chosen)[-1:]]
    each = sum(step_seconds[who] for who, _ in runs)
    # Every step's loss is fetched, and the first step is a capture.
    steps = int(min(bench.settings.train_steps, 0.7 * bench.clock.left / each))
    if steps < min(LEAST_TRAINING, bench.settings.train_steps):
        return []
    rows, config = [], bench.runner.config
    for who, number in runs:
        devices = chosen[who].devices[bench.problem.grouping.group_of]
        limit = config.time_limit_seconds + 3.0 * steps * step_seconds[who]
        bench.runner.config = replace(config, time_limit_seconds=limit)
        run = bench.runner.measure(devices, train_steps=steps)
        bench.runner.config = config
        if not run.measurement.ok:
            raise PlacewrightError(f"training under {who}: {run.measurement.reason}")
        losses = (run.returned or {}).get("loss", ())
        seconds = np.concatenate([[0.0], np.cumsum(run.measurement.step_seconds)])
        for step, (loss, at) in enumerate(zip(losses, seconds, strict=False)):
            rows.append({
                **bench.about, "placement": who, "run": number, "step": step,
                "seconds": round(float(at), 5), "loss": loss,
            })  # fmt: skip
    return rows


# --- a case --------------------------------------------------------------------------------------


def run_case(case: Case, program: Any, settings: Settings, clock: Clock) -> None:
    problem = problem_of(case, program.graph)
    folder = folder_of(case, settings)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with TorchRunner(program, problem.cluster, case.run_config) as runner:
        runner.start()
        bench = Bench(
            case=case, problem=problem, runner=runner, folder=folder, settings=settings, clock=clock
        )
        bench.learn_costs()
        print(f"  {problem.graph.num_ops} ops, {problem.num_groups} groups; costs after "
              f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
        ready = prepared(prepared_of(case, settings), problem)
        proposals, missing = classical(problem, bench.under, ready)
        answers = reference_answers(bench)
        for method in METHODS:
            proposal = proposals.get(method)
            if proposal is None:
                answers.append(Answer(method, None, reason=missing.get(method, "")))
            else:
                answers.append(Answer(method, proposal.placement, costs=proposal.costs))
        searching = time.monotonic()
        found, complete = _searches(bench, len(answers))
        searched = time.monotonic() - searching
        rows = rows_of(bench, [*answers, *found])
        _keep(settings, bench, rows)
        _note(settings, case, began, complete)
        clock.besides = time.monotonic() - began - searched
        chosen = compared(bench, rows)
        extra: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "analysis": lambda: analysis_rows(bench, chosen)
        }
        if settings.train_steps:
            took = {row["method"]: row["step_seconds"] for row in rows if row["step_seconds"] != ""}
            extra["training"] = lambda: training_rows(bench, chosen, took)
        for what, make in extra.items():
            made = make() if clock.left > 5.0 else []
            add_rows(what, made, settings)
    if not complete or not is_complete(settings, case):
        raise OutOfTime


def _searches(bench: Bench, others: int) -> tuple[list[Answer], bool]:
    """What each search found, and whether there was time for all. What each learned is written down
    when it has ended; `others` are the answers that are to be measured as well."""
    answers: list[Answer] = []
    settings, clock = bench.settings, bench.clock
    for name in settings.methods:
        keep_seconds = bench.seconds_to_end(others + len(answers) + 1)
        is_done = (bench.folder / name.replace(" ", "-") / "found.json").is_file()
        if not is_done and clock.left < settings.search_seconds + keep_seconds:
            return answers, False
        try:
            found = bench.search(name, keep_seconds)
        except OutOfTime:
            return answers, False
        answers.append(Answer(name, found.placement, found, reason=found.reason))
        if not is_done:
            _keep_learning(bench)
    return answers, True


def _keep_learning(bench: Bench) -> None:
    for what, found in zip(("runs_of_searches", "updates"), learning_rows(bench), strict=True):
        add_rows(what, found, bench.settings)


def _keep(settings: Settings, bench: Bench, rows: Sequence[dict[str, Any]]) -> None:
    add_rows("paper_gpu", rows, settings)
    for row in rows:
        text = f"{row['step_seconds']:.4f} s" if row["step_seconds"] != "" else row["outcome"]
        print(f"  {row['method']}: {text}", flush=True)
    _keep_learning(bench)


def _note(settings: Settings, case: Case, began: float, complete: bool) -> None:
    """What it ran on."""
    import torch

    gpu = torch.cuda.is_available()
    row = {
        **about(case, settings), "seconds": round(time.monotonic() - began, 1),
        "complete": complete, "search_seconds": settings.search_seconds, "scale": settings.scale,
        "gpu": torch.cuda.get_device_name(0) if gpu else "none",
        "cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), "placewright": VERSION, "command": command(),
    }  # fmt: skip
    add_rows("where", [row], settings)


# --- all cases -----------------------------------------------------------------------------------


def _loaded(model: str, scale: str) -> Any:
    return load_program(model, backend="pytorch", scale=scale)


def _compile() -> None:
    """Compiles the simulator while the first model is read."""
    with contextlib.suppress(PlacewrightError):
        problem = make_problem(layered_graph(60, 5), gpu_boards(2))
        placement = Placement.of(problem, problem.allowed.argmax(axis=1))
        SimulatedEvaluator(problem).evaluate([placement])


@contextlib.contextmanager
def _programs(cases: Sequence[Case], scale: str) -> Iterator[Callable[[str], Any]]:
    """The models, read in a process beside, one after another in the order of the cases."""
    models = list(dict.fromkeys(case.model for case in cases))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        futures = {model: pool.submit(_loaded, model, scale) for model in models}
        yield lambda model: futures[model].result()
        for future in futures.values():
            future.cancel()


def run_cases(settings: Settings) -> int:
    """0, or MORE where the time ended before all was done; 1 where a case broke."""
    result, clock = 0, Clock(settings.seconds)
    with _programs(settings.cases, settings.scale) as program:
        _compile()
        for case in settings.cases:
            if is_complete(settings, case):
                print(f"== {case.name}: done before", flush=True)
                continue
            if clock.left < settings.search_seconds + max(settings.search_seconds, clock.besides):
                return result or MORE
            print(f"== {case.name}, {clock.left:.0f} s left", flush=True)
            try:
                run_case(case, program(case.model), settings, clock)
            except OutOfTime:
                result = result or MORE
            except Exception as fault:
                traceback.print_exc()
                row = about(case, settings) | {"fault": repr(fault)[:300]}
                add_rows("faults", [row], settings)
                result = 1
    return result


def is_complete(settings: Settings, case: Case) -> bool:
    """Whether all methods have an answer and what they do was looked at. There is nothing to look
    at where no placement ran."""
    keys = {key: str(value) for key, value in about(case, settings).items()}

    def rows_in(name: str) -> list[dict[str, str]]:
        rows = read_csv(table_of(name, settings))
        return [row for row in rows if all(row[key] == value for key, value in keys.items())]

    mine = rows_in("paper_gpu")
    if not mine or not set(settings.methods) <= {row["method"] for row in mine}:
        return False
    if not any(row["step_seconds"] for row in mine if row["method"] in COMPARED):
        return True
    wanted = ["analysis", *(["training"] if settings.train_steps else [])]
    return all(rows_in(name) for name in wanted)


def prepare_all(settings: Settings) -> None:
    """Under the costs of an earlier run of the case where there is one, otherwise as estimated."""
    for case in settings.cases:
        known = folder_of(case, settings) / "problem.json.gz"
        if known.is_file():
            problem, costs = Problem.load(known), "calibrated"
        else:
            problem = problem_of(case, _loaded(case.model, settings.scale).graph)
            costs = "estimated"
        path = prepared_of(case, settings)
        prepare(path, problem, costs)
        print(path, costs, flush=True)


def take(settings: Settings, folder: Path) -> None:
    """The tables of another run, in place of what there is of the same cases. Of a case that is
    taken nothing of before stays, as it was another machine's."""
    taken = {name: read_csv(folder / f"{name}.csv") for name in TABLES}
    cases = {tuple(row[key] for key in CASE_KEYS) for row in taken["paper_gpu"]}
    for name, rows in taken.items():
        path = table_of(name, settings)
        kept = read_csv(path)
        others = [r for r in kept if tuple(r[key] for key in CASE_KEYS) not in cases]
        new = [r for r in rows if tuple(r[key] for key in CASE_KEYS) in cases]
        if others or new:
            write_csv(path, [*others, *new])
        else:
            path.unlink(missing_ok=True)


def report(settings: Settings) -> None:
    """Figures, and the tables where they stand."""
    figures.rewards(
        read_csv(table_of("runs_of_searches", settings)),
        read_csv(table_of("updates", settings)),
        table_of("rewards", settings).with_suffix(".svg"),
    )
    training = read_csv(table_of("training", settings))
    if training:
        path = table_of("training", settings).with_suffix(".svg")
        figures.training(gpu_tables.as_runs(training), path)
    if settings.output == FOLDER:
        (FOLDER / "README.md").write_text(gpu_tables.readme(FOLDER / "README.md"), encoding="utf-8")
        tables.main()


def main() -> int:
    options, settings = _options()
    result = 0
    if options.prepare:
        prepare_all(settings)
    elif options.take is not None:
        take(settings, options.take)
    elif not options.report:
        result = run_cases(settings)
    if options.report or not (options.prepare or options.no_report):
        report(settings)
    return result


def _options(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--tables", type=Path, help="a folder for the tables, if not the output")
    parser.add_argument("--take", type=Path, help="a folder of tables to be added to the output's")
    parser.add_argument("--prepared", type=Path, default=PREPARED)
    parser.add_argument("--seconds", type=float, default=Settings.seconds)
    parser.add_argument("--search-seconds", type=float, default=Settings.search_seconds)
    parser.add_argument("--cases", nargs="+", help="such as nmt-paper-4, in this order")
    parser.add_argument("--methods", nargs="+", default=SEARCHES, choices=SEARCHES)
    parser.add_argument("--scale", default="paper", choices=["paper", "small"])
    parser.add_argument("--devices", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--no-report", action="store_true")
    options = parser.parse_args(arguments)
    cases = IN_ORDER
    if options.devices == "cpu":
        cases = tuple(Case(model=m, machine="cpu", partitions=0)
                      for m in ("nmt", "inception_v3", "rnnlm"))  # fmt: skip
    if options.cases:
        cases = tuple(Case.of(name) for name in options.cases)
    return options, Settings(
        output=options.output, tables=options.tables, prepared=options.prepared,
        seconds=options.seconds,
        search_seconds=options.search_seconds, cases=cases, methods=tuple(options.methods),
        scale=options.scale, rounds=options.rounds, train_steps=options.train_steps,
        seed=options.seed,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
