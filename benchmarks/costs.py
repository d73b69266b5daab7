"""What the cost model predicts for models that nobody here wrote, against real steps on one core.

    python -m benchmarks.costs                           # some 15 minutes on 2 idle cores
    python -m benchmarks.costs --models lstm towers --no-write

Each model (`benchmarks/cost_models.py`) is run and traced on the first of two single-core devices
(processes of their own, speeds as `placewright` finds them on this machine): seconds of a step, and
of all ops of each type. Against these stand the estimates without calibration. With
`--calibrate N` it is then calibrated, and N fresh placements are predicted and measured. After each
model, writes its lines of `results/costs/` and a README.md with the tables.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import cost_models
from benchmarks.common import RESULTS as ALL_RESULTS
from benchmarks.common import Row, made_by, markdown, marked, merge_csv
from placewright import calibration
from placewright.backends import RunConfig, load_program
from placewright.backends import runner as runner_of
from placewright.calibration import Fidelity, varied_placements
from placewright.cluster import Cluster, from_document, to_document
from placewright.costs import estimate_costs
from placewright.discovery import local_document
from placewright.graph import Graph, Work
from placewright.placers.heft import heft
from placewright.problem import make_problem
from placewright.simulator import Simulator

RESULTS = ALL_RESULTS / "costs"
MODELS = (*cost_models.MODELS, "gan", *cost_models.HELD_OUT)
MOST_FACTOR, LEAST_SHARE = 3.0, 0.02
"""A type of op that is off by more, and takes more than this share of a step, is wrong."""
STEP_FACTOR = 2.0
"""So is a step that is off by more."""
FIT = 10
"""Placements that a calibration is fitted to."""


def main() -> None:
    options = _options()
    for model in options.models:
        steps, types = audit(model, calibrate=options.calibrate)
        print(step_table([steps]), type_table(types), sep="\n\n", flush=True)
        if not options.no_write:
            write([steps], types)


def single_cores() -> Cluster:
    """Two devices of one core of this machine, linked as those of `cpu2`."""
    document = to_document(Cluster.load("cpu2"))
    kind = dict(local_document(cores=1)["kinds"]["local-cpu"])
    document["kinds"] = {"core": kind}
    for device in document["devices"]:
        device["kind"], device["memory"] = "core", kind["memory"] // 2
    return from_document({**document, "name": "cores"}, where="cores")


def audit(
    model: str, *, calibrate: int = 0, config: RunConfig | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A row about the step, and one for each type of op."""
    kept: Any = None
    if model == "gan":
        kept = cost_models.gan_step()
        program = load_program(kept[0])
    else:
        source, batch = cost_models.keras_model(model)
        program = load_program(source, batch=batch)
    del kept  # a traced function does not keep its variables
    graph, cluster = program.graph, single_cores()
    problem = make_problem(graph, cluster)
    alone = np.zeros((1, problem.num_groups), dtype=np.int32)
    predicted = float(Simulator(problem).run(alone).step_seconds[0])
    costs = estimate_costs(graph, cluster)
    seconds = costs.op_seconds[0] + costs.overhead_seconds[0]
    with runner_of(program, cluster, config or RunConfig(steps=20, max_steps=40)) as runner:
        run = runner.measure([0] * graph.num_ops, traces=5)
        if not run.measurement.ok or run.trace is None:
            raise SystemExit(f"{model}: {run.measurement.reason}")
        steps = np.array(run.measurement.step_seconds)
        row: dict[str, Any] = {
            "model": model,
            "held_out": "yes" if model in cost_models.HELD_OUT else "",
            "ops": graph.num_ops,
            "runs": int(graph.run_count.sum()),
            "predicted_seconds": predicted,
            # Whatever else the machine does makes steps slower, never faster.
            "measured_seconds": float(np.quantile(steps, 0.25)),
            "median_seconds": float(np.median(steps)),
            "foreign_load": "" if run.foreign_load is None else round(run.foreign_load, 2),
            "calibrated_error": "",
            "spearman": "",
            "repeated": "",
        }
        if calibrate:
            varied = varied_placements(problem, FIT)
            found = calibration.calibrate(problem, runner, varied, propose=heft, forced=True)
            fresh = varied_placements(problem, calibrate, seed=1_000_003, without=found.fitted_to)
            _, result = calibration.check(found.problem(problem), runner, fresh, found.pace)
            row |= _fidelity(result)
    traced = np.array([run.trace.op_seconds.get(name, 0.0) for name in graph.op_names])
    return row, _by_type(model, graph, seconds, traced)


def _fidelity(result: Fidelity) -> dict[str, float]:
    return {
        "calibrated_error": round(result.error, 4),
        "spearman": round(result.spearman, 3),
        "repeated": round(result.repeated, 3),
    }


def _by_type(
    model: str, graph: Graph, predicted: np.ndarray[Any, Any], traced: np.ndarray[Any, Any]
) -> list[dict[str, Any]]:
    """A row for each type of op. TensorFlow may run two ops as one (a convolution and what adds its
    bias), under the name of the second: then that time is of the first's type, too."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    fused = _fused(graph, traced)
    for op in range(graph.num_ops):
        row = rows[graph.op_types[fused.get(op, op)]]
        row[0] += float(graph.run_count[op])
        row[1] += float(predicted[op])
        row[2] += float(traced[op])
    total = float(traced.sum())
    work = dict(zip(graph.op_types, graph.work.tolist(), strict=True))
    return [
        {
            "model": model,
            "type": type_,
            "work": Work(work[type_]).name.lower(),
            "runs": int(runs),
            "predicted_seconds": float(f"{guess:.3g}"),
            "traced_seconds": float(f"{truth:.3g}"),
            "share": round(truth / total, 4),
        }
        for type_, (runs, guess, truth) in sorted(rows.items(), key=lambda item: -item[1][2])
    ]


def _fused(graph: Graph, traced: np.ndarray[Any, Any]) -> dict[int, int]:
    """Op -> the op without a time of its own that it was run together with."""
    found: dict[int, int] = {}
    products = (Work.CONV, Work.MATMUL)
    for src, dst in zip(graph.edge_src.tolist(), graph.edge_dst.tolist(), strict=True):
        if traced[src] == 0 and traced[dst] > 0 and graph.work[src] in products:
            found.setdefault(dst, src)
    return found


def factor(row: Row) -> float:
    """Predicted over measured."""
    truth = row["traced_seconds"] if "traced_seconds" in row else row["measured_seconds"]
    return float(row["predicted_seconds"]) / max(float(truth), 1e-9)


def wrong_types(rows: Sequence[Row]) -> list[Row]:
    return [
        row
        for row in rows
        if float(row["share"]) > LEAST_SHARE and not 1 / MOST_FACTOR <= factor(row) <= MOST_FACTOR
    ]


def step_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["model"],
            row["held_out"],
            row["ops"],
            row["runs"],
            f"{1e3 * float(row['predicted_seconds']):.1f}",
            f"{1e3 * float(row['measured_seconds']):.1f}",
            f"{factor(row):.2f}",
            _percent(row["calibrated_error"]),
            row["spearman"],
            row["repeated"],
            _percent(row["foreign_load"]),
        ]
        for row in rows
    ]
    heading = [
        "model", "held out", "ops", "runs of ops", "predicted ms", "measured ms", "ratio",
        "error, calibrated", "Spearman", "of the measurement with itself", "foreign load",
    ]  # fmt: skip
    return markdown(heading, lines, texts=2)


def _percent(value: Any) -> str:
    return "" if value in ("", None) else f"{float(value):.0%}"


def type_table(rows: Sequence[Row]) -> str:
    """Those that take more than `LEAST_SHARE` of a step."""
    lines = [
        [
            row["model"],
            row["type"],
            row["work"],
            row["runs"],
            f"{1e3 * float(row['predicted_seconds']):.2f}",
            f"{1e3 * float(row['traced_seconds']):.2f}",
            f"{factor(row):.2f}",
            f"{float(row['share']):.0%}",
        ]
        for row in rows
        if float(row["share"]) > LEAST_SHARE
    ]
    heading = ["model", "type of op", "work", "runs", "predicted ms", "traced ms", "ratio", "share"]
    return markdown(heading, lines, texts=3)


def verdict(steps: Sequence[Row], types: Sequence[Row]) -> str:
    far = [
        f"{row['model']} ({factor(row):.2f})"
        for row in steps
        if not 1 / STEP_FACTOR <= factor(row) <= STEP_FACTOR
    ]
    wrong = [f"{row['type']} of {row['model']} ({factor(row):.2f})" for row in wrong_types(types)]
    held_out = [factor(row) for row in steps if row["held_out"]]
    of_those = ""
    if held_out:
        furthest = max(max(ratio, 1 / ratio) for ratio in held_out)
        of_those = f"The {len(held_out)} held out are off by a factor of {furthest:.2f} at most. "
    return (
        f"Wanted: every step within a factor of {STEP_FACTOR:g}; off are: "
        f"{', '.join(far) or 'none'}. {of_those}Every type of op that takes more than "
        f"{LEAST_SHARE:.0%} of a step within a factor of {MOST_FACTOR:g}; off are: "
        f"{', '.join(wrong) or 'none'}."
    )


def write(steps: Sequence[Row], types: Sequence[Row]) -> None:
    steps = merge_csv(RESULTS / "steps.csv", steps, "model")
    types = merge_csv(RESULTS / "types.csv", types, "model")
    RESULTS.joinpath("README.md").write_text(
        f"""# The cost model against real steps

{marked("costs-steps", step_table(steps))}

{verdict(steps, types)}

The shares of the peak that a CPU core reaches in each class of ops were fitted to these very
models, but for those held out. So the others describe what the cost model can express, and those
held out how wrong it is for a model that it has not seen. What XLA compiles as a whole
(`PartitionedCall`) is not in the model at all: it costs what moving its tensors does.

Training steps of Keras models (`benchmarks/cost_models.py`) on one core, predicted without any
calibration from what `placewright` finds out about this machine by looking. Measured is the lower
quartile of at least 19 steps; foreign load is the share of all cores that other processes took
meanwhile. {made_by()}

## By type of op

Traced once more with the times of every op, medians of five steps; those that take more than
{LEAST_SHARE:.0%} of a step.

{marked("costs-types", type_table(types))}
""",
        encoding="utf-8",
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--calibrate", type=int, default=0, metavar="N")
    parser.add_argument("--no-write", action="store_true", help="only print")
    return parser.parse_args()


if __name__ == "__main__":
    main()
