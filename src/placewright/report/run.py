"""A run as `place` left it in a directory, read back for people to look at."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from placewright import methods
from placewright.calibration import Calibration
from placewright.errors import ReportError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.files import read_json
from placewright.journal import Progression, read_progression
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.schema import Maybe, check, flag, number, text, whole
from placewright.session.directory import (
    COSTS_FILE,
    JOURNAL_FILE,
    PLACEMENT_FILE,
    PROBLEM_FILE,
    SUMMARY_FILE,
    began_with,
    not_as_named,
)
from placewright.session.metrics import read_metrics
from placewright.simulator import Simulator, Timeline, lower_bounds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One directory. What the run itself did not finish (it may have been killed) is made up for
    from the journal."""

    name: str
    """The directory's, to tell two runs apart."""
    problem: Problem
    """What the best placement is of: the problem that was searched by groups, or the same op by
    op."""
    searched: Problem
    """The problem that was searched by groups."""
    under: Problem
    """The same under the costs that are simulated with: those that real runs led to, if any."""
    summary: Mapping[str, Any]
    """As in `summary.json`."""
    progression: Progression | None
    """None for a result that was saved without its journal."""
    metrics: tuple[Mapping[str, Any], ...]
    """What a learned placer recorded at each update; empty for others."""
    best: Trial | None
    """The fastest placement; where none ran, one that failed for want of memory, if any."""

    @property
    def ok(self) -> bool:
        return self.best is not None and self.best.measurement.ok

    @property
    def measured(self) -> bool:
        """Whether the step times are of real runs; timelines are simulated all the same."""
        return bool(self.summary.get("measured", False))

    @property
    def calibrated(self) -> bool:
        """Whether timelines are simulated under costs fitted to real runs."""
        return self.under is not self.problem

    @cached_property
    def simulator(self) -> Simulator:
        return Simulator(self.under)

    @cached_property
    def timeline(self) -> Timeline | None:
        """The simulated step of the best placement."""
        return self._timeline(self.best)

    @cached_property
    def expert(self) -> Trial | None:
        """What a person would have done, whether or not the run tried it."""
        if self.progression is not None:
            found = self.progression.improvements.get("expert")
            if found:
                return found[-1].trial
        (placer,) = methods.make(["expert"], self.searched)
        evaluator = SimulatedEvaluator(self.searched)
        trials: list[Trial] = []
        # Repairs of a placement that does not fit are asked for one after another.
        while not any(trial.measurement.ok for trial in trials):
            asked = placer.ask(8)
            if not asked:
                break
            new = [
                Trial(placement=placement, measurement=measurement, placer="expert")
                for placement, measurement in zip(asked, evaluator.evaluate(asked), strict=True)
            ]
            placer.tell(new)
            trials += new
        return min(trials, key=lambda trial: trial.measurement.mean_seconds, default=None)

    @cached_property
    def expert_timeline(self) -> Timeline | None:
        return self._timeline(self.expert)

    def _timeline(self, trial: Trial | None) -> Timeline | None:
        if trial is None or trial.measurement.outcome is Outcome.FAILED:
            return None
        placement = trial.placement
        if placement.space != self.problem.space.fingerprint:
            if self.problem is self.searched:  # of the same op by op, which is not what is shown
                return None
            placement = Placement.of(self.problem, self.searched.lifted(placement.devices))
        return self.simulator.timeline(placement)


_METHOD = {
    "method": text,
    "step_seconds": Maybe(number),
    "outcome": text,
    "reason": text,
    "trials": whole,
    "search_seconds": Maybe(number),
    "peak_bytes?": Maybe([whole]),
    "main_device?": Maybe(text),
}
_RANGE = {
    "mean_seconds": number,
    "least_seconds": number,
    "most_seconds": number,
    "orders": whole,
    "overflows?": whole,
}
_SUMMARY = {
    "problem": text,
    "space?": text,
    "version?": text,
    "command?": text,
    "seed?": Maybe(whole),
    "interrupted?": flag,
    "measured?": flag,
    "method": Maybe(text),
    "step_seconds": Maybe(number),
    "step_range?": Maybe(_RANGE),
    "makeup?": Maybe({"rests_on_overhead?": flag, "speed_up_without_overhead?": Maybe(number)}),
    "half_width_seconds?": Maybe(number),
    "peak_bytes": Maybe([whole]),
    "lower_bound_seconds": number,
    "comparisons?": [{"method": text, "ratio": Maybe(number), "half_width": Maybe(number)}],
    "trials": whole,
    "search_seconds": Maybe(number),
    "methods": [_METHOD],
    "files?": {},
}
"""Of `summary.json`, what a report is made of."""


def read_run(directory: str | Path) -> Run:
    """The run in a directory; raises `ReportError` when there is none."""
    folder = Path(directory)
    if not folder.is_dir():
        raise ReportError(f"{directory}: no such directory")
    if not (folder / PROBLEM_FILE).is_file():
        raise ReportError(
            f"{directory}: holds no run ({PROBLEM_FILE} is missing); was it made by "
            "'placewright place'?"
        )
    problem = Problem.load(folder / PROBLEM_FILE)
    progression = None
    if (folder / JOURNAL_FILE).is_file():
        progression = read_progression(folder / JOURNAL_FILE, problem)
    summary = _written_summary(folder, problem, progression)
    # What the run itself took for best: of measured times it may have pooled several trials.
    best = None if summary is None else _written_best(folder, problem, summary)
    if summary is None:
        summary = _made_up_summary(folder, problem, progression)
    if best is None and progression is not None:
        best = _best(progression)
    by_op = best is not None and best.placement.space != problem.space.fingerprint
    shown = problem.refined if by_op else problem
    under = shown
    # A file of that name in a simulated run's directory is the user's, and its costs are in the
    # problem if they were given.
    if summary.get("measured") and (folder / COSTS_FILE).is_file():
        under = Calibration.load(folder / COSTS_FILE, problem).problem(shown)
    return Run(
        name=folder.resolve().name,
        problem=shown,
        searched=problem,
        under=under,
        summary=summary,
        progression=progression,
        metrics=tuple(read_metrics(folder)),
        best=best,
    )


def _written_best(folder: Path, problem: Problem, summary: Mapping[str, Any]) -> Trial | None:
    if summary["step_seconds"] is None or not (folder / PLACEMENT_FILE).is_file():
        return None
    return Trial(
        placement=Placement.load(
            folder / PLACEMENT_FILE,
            problem.refined if summary.get("placed_by") == "op" else problem,
        ),
        measurement=Measurement(
            outcome=Outcome.OK,
            step_seconds=(float(summary["step_seconds"]),),
            peak_bytes=tuple(summary["peak_bytes"] or ()),
        ),
        placer=str(summary["method"]),
    )


def _best(progression: Progression) -> Trial | None:
    found = [steps[-1].trial for steps in progression.improvements.values() if steps]
    found += [
        trial
        for trial in progression.failures.values()
        if trial.measurement.outcome is Outcome.OUT_OF_MEMORY
    ]
    return min(found, key=lambda trial: trial.measurement.mean_seconds, default=None)


def _written_summary(
    folder: Path, problem: Problem, progression: Progression | None
) -> Mapping[str, Any] | None:
    """What the run itself wrote; None where it was cut off before all of that was there."""
    path = folder / SUMMARY_FILE
    if not path.is_file():
        return None
    summary: dict[str, Any] = read_json(path, ReportError, what="summary")
    check(summary, _SUMMARY, ReportError, where=f"{path}: not a summary of a run")
    # Version 0.1.0 knew nothing of spaces.
    own = problem.space.fingerprint if "space" in summary else problem.fingerprint
    of = summary.get("space", summary["problem"])
    if of != own:
        raise ReportError(
            f"{path}: is of problem {of}, the directory's is {own}; were two runs mixed?"
        )
    other = not_as_named(folder, summary)
    if not other:
        return summary
    cut_off = (
        f"{folder}: the run was cut off before all its results were written ({other} is not the "
        f"one that {SUMMARY_FILE} names); --resume writes them anew"
    )
    if progression is None:
        raise ReportError(cut_off)
    logger.warning("%s; shown is what the journal says", cut_off)
    return None


def _made_up_summary(
    folder: Path, problem: Problem, progression: Progression | None
) -> dict[str, Any]:
    """For a run that was killed before it could write one."""
    began = began_with(folder)
    if progression is None or not progression.trials:
        if began is None and progression is None:
            raise ReportError(f"{folder}: holds neither a {SUMMARY_FILE} nor a {JOURNAL_FILE}")
        raise ReportError(
            f"{folder}: the run was cut off before it tried anything; --resume goes on with it"
        )
    measured = began not in (None, "simulate")
    rows, best = [], None
    for name, count in progression.trials_of.items():
        steps = progression.improvements.get(name, ())
        trial = steps[-1].trial if steps else progression.failures.get(name)
        if trial is None:
            continue
        measurement = trial.measurement
        if measurement.ok and (best is None or measurement.mean_seconds < best[1].mean_seconds):
            best = (name, measurement)
        rows.append(
            {
                "method": name,
                "step_seconds": measurement.mean_seconds if measurement.ok else None,
                "outcome": measurement.outcome.value,
                "peak_bytes": list(measurement.peak_bytes),
                "reason": measurement.reason,
                "trials": count,
                "search_seconds": None,
            }
        )
    return {
        "model": problem.graph.name,
        "cluster": problem.cluster.name,
        "space": problem.space.fingerprint,
        "problem": problem.fingerprint,
        "version": "",
        "command": "",
        "interrupted": True,
        "measured": measured,
        "method": best[0] if best else None,
        "step_seconds": best[1].mean_seconds if best else None,
        "peak_bytes": list(best[1].peak_bytes) if best else None,
        "lower_bound_seconds": 0.0 if measured else lower_bounds(problem).best,
        "trials": progression.trials,
        "search_seconds": progression.seconds,
        "methods": rows,
    }


def read_runs(directories: list[str]) -> list[Run]:
    """Several runs, with names that differ."""
    runs = [read_run(directory) for directory in directories]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        runs = [replace(run, name=d) for run, d in zip(runs, directories, strict=True)]
    return runs
