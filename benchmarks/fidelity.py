"""How well the calibrated simulator predicts real runs on two CPU devices.

    python -m benchmarks.fidelity                      # about an hour on an idle machine of 2 cores
    python -m benchmarks.fidelity --models rnnlm --placements 12 --no-write

Each model is calibrated (`placewright calibrate`), then fresh placements are measured: random ones,
contiguous ones, what the classical methods propose, and the best found in the simulator. Half of
the random and contiguous ones place the model's groups, as a search does; the others every
co-location set by itself, which makes more transfers and step times that differ more. After each
model, writes its lines of `results/fidelity/fidelity.csv` (one for each placement) and a README.md
with the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import figures, tables
from benchmarks.common import MODELS, Row, made_by, merge_csv
from benchmarks.common import RESULTS as ALL_RESULTS
from placewright import calibration
from placewright import methods as registry
from placewright.api import run
from placewright.backends import RunConfig, load_program
from placewright.backends.tensorflow.runner import TensorFlowRunner
from placewright.calibration import Fidelity, varied_placements
from placewright.cluster import Cluster
from placewright.grouping import by_colocation, by_gradient, group
from placewright.placement import Placement, everything_on
from placewright.placers.heft import heft
from placewright.problem import Problem, make_problem
from placewright.search import Budget

GROUPS, SETS = "groups", "co-location sets"
"""Kinds of random and contiguous placements: of what."""
RESULTS = ALL_RESULTS / "fidelity"
CLASSICAL = ("single", "expert", "scotch", "mincut", "heft", "m-topo", "m-etf", "m-sct")
CORRELATION, ERROR = 0.9, 0.15
"""What is wanted."""
FIT = 24
"""Placements that each calibration is fitted to, half of groups and half of co-location sets."""


def main() -> None:
    options = _options()
    load_before = os.getloadavg()[0]
    for model in options.models:
        rows = check(model, options.cluster, options.placements, passes=options.passes)
        print(table(rows), flush=True)
        if not options.no_write:
            write(rows, load_before)


def check(
    model: str,
    cluster: str,
    count: int,
    *,
    fit: int = FIT,
    passes: int = 2,
    config: RunConfig | None = None,
) -> list[dict[str, Any]]:
    """Calibrates on `fit` placements, then measures fresh ones, in several passes or (in less time,
    but without knowing how well measurements agree with themselves) one."""
    program = load_program(model, scale="small")
    problem = make_problem(program.graph, Cluster.load(cluster))
    # Groups are made of co-location sets, so that every placement of groups is one of these, too.
    sets = dataclasses.replace(problem, grouping=group(program.graph, (by_colocation, by_gradient)))
    with TensorFlowRunner(program, problem.cluster, config) as runner:
        varied = [
            *(of_sets(p, problem, sets) for p in varied_placements(problem, fit // 2)),
            *varied_placements(sets, fit - fit // 2),
        ]
        found = calibration.calibrate(sets, runner, varied, propose=heft)
        problem, sets = found.problem(problem), found.problem(sets)
        singles = [everything_on(sets, device) for device in range(sets.num_devices)]
        kinds = fresh(problem, sets, count, [*found.fitted_to, *singles])
        assert len(kinds) >= count, f"{len(kinds)} placements, not {count}"
        # Mixed, so that the machine's moods do not hit one kind alone.
        mixed = list(kinds)
        np.random.default_rng(0).shuffle(mixed)
        ran, result = calibration.check(sets, runner, mixed, found.pace, passes=passes)
    return [
        {
            "model": model,
            "kind": kinds[placement],
            "predicted_seconds": predicted,
            "first_seconds": first,
            "second_seconds": second if passes > 1 else "",
            "raw_seconds": raw,
        }
        for placement, predicted, first, second, raw in zip(
            ran, result.predicted, result.first, result.second, result.raw, strict=True
        )
    ]


def fresh(
    problem: Problem, sets: Problem, count: int, seen: Sequence[Placement]
) -> dict[Placement, str]:
    """Placements of all kinds, as those of co-location sets, none of which the calibration has
    seen."""
    known = {placement.devices.tobytes() for placement in seen}
    found: dict[Placement, str] = {}
    for name in registry.installed(CLASSICAL)[0]:
        (placer,) = registry.make([name], problem)
        for placement in placer.ask(problem.num_devices):
            found.setdefault(of_sets(placement, problem, sets), name)
    best = run(problem, ["local-search"], Budget(seconds=5.0))
    found.setdefault(of_sets(best.placement, problem, sets), "best")
    found = {p: kind for p, kind in found.items() if p.devices.tobytes() not in known}
    missing = max(0, count - len(found))
    groups = varied_placements(problem, 2 * missing, seed=1_000_003)
    others = [of_sets(placement, problem, sets) for placement in groups]
    others = [p for p in others if p.devices.tobytes() not in known and p not in found]
    found |= dict.fromkeys(others[: missing // 2], GROUPS)
    more = varied_placements(sets, count - len(found), seed=1_000_003, without=[*seen, *found])
    return found | dict.fromkeys(more, SETS)


def of_sets(placement: Placement, problem: Problem, sets: Problem) -> Placement:
    """The same placement, said of co-location sets."""
    first = np.unique(sets.grouping.group_of, return_index=True)[1]
    return Placement.of(sets, placement.devices[problem.grouping.group_of[first]])


def of_rows(rows: Sequence[Row]) -> Fidelity:
    """Of one model. A second pass that there was not is taken as a copy of the first."""
    return Fidelity(
        predicted=tuple(float(row["predicted_seconds"]) for row in rows),
        first=tuple(float(row["first_seconds"]) for row in rows),
        second=tuple(float(row["second_seconds"] or row["first_seconds"]) for row in rows),
        raw=tuple(float(row["raw_seconds"]) for row in rows),
    )


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | kind | placements | mean absolute error | not scaled | Spearman | "
        "of the fastest half | of the measurement with itself |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        result = of_rows(mine)
        twice = all(row["second_seconds"] != "" for row in mine)
        kinds = {"all": list(range(len(mine)))}
        for kind in (GROUPS, SETS):
            kinds[kind] = [n for n, row in enumerate(mine) if row["kind"] == kind]
        kinds["proposed by a method"] = [
            n for n, row in enumerate(mine) if row["kind"] not in (GROUPS, SETS)
        ]
        for name, numbers in kinds.items():
            part = result.of(numbers)
            if numbers:
                raw = dataclasses.replace(part, first=part.raw, second=part.raw)
                lines.append(
                    f"| {model} | {name} | {len(numbers)} | {part.error:.1%} | {raw.error:.1%} "
                    f"| {part.spearman:.3f} | {part.fastest_half.spearman:.3f} "
                    f"| {f'{part.repeated:.3f}' if twice else ''} |"
                )
    return "\n".join([*lines, "", verdict(rows)])


def verdict(rows: Sequence[Row]) -> str:
    """Which models reach what we want of all placements together."""
    said = []
    for model in dict.fromkeys(row["model"] for row in rows):
        result = of_rows([row for row in rows if row["model"] == model])
        missed = []
        if result.spearman < CORRELATION:
            missed.append(f"correlation {result.spearman:.2f}")
        if result.error > ERROR:
            missed.append(f"error {result.error:.0%}")
        said.append(f"{model}: {'missed (' + ', '.join(missed) + ')' if missed else 'reached'}")
    best = [
        f"{float(row['first_seconds']) / float(row['predicted_seconds']) - 1:+.0%} ({row['model']})"
        for row in rows
        if row["kind"] == "best"
    ]
    if best:
        said[-1] += ". Measured against predicted, the best found in the simulator: " + ", ".join(
            best
        )
    return (
        f"Wanted of all placements of a model: a rank correlation of {CORRELATION} and an error of "
        f"at most {ERROR:.0%}. {'; '.join(said)}."
    )


def write(rows: Sequence[Row], load: float) -> None:
    rows = merge_csv(RESULTS / "fidelity.csv", rows, "model")
    figures.fidelity(rows, RESULTS / "fidelity.svg")
    page = RESULTS / "README.md"
    page.write_text(
        f"""# Prediction against real runs

{tables.block("fidelity", page)}

Models at small scale on `cpu2` (two single-core processes, gRPC on loopback), each calibrated on
{FIT} placements, single devices and what HEFT proposes, and checked on others. Times are scaled by
how fast a reference was just then, against when the model was calibrated, but for the column that
says so. The last column compares the passes of measuring, half with half. Of each run the lower
quartile of the steps counts. {made_by()}
Other load at the start: {load:.1f}.
""",
        encoding="utf-8",
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cluster", default="cpu2")
    parser.add_argument("--placements", type=int, default=44)
    parser.add_argument(
        "--passes", type=int, choices=range(1, 11), default=4, help="of measuring them"
    )
    parser.add_argument("--no-write", action="store_true", help="only print")
    return parser.parse_args()


if __name__ == "__main__":
    main()
