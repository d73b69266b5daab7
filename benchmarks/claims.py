"""What is claimed for seven Keras models on machines with modern GPUs, and what it rests on.

    python -m benchmarks.claims                          # some ten minutes on 2 cores
    python -m benchmarks.claims --models LSTM --no-write

A training step of each (Adam, 32 examples) is placed on one device and by `auto`, both simulated.
A speed-up that comes from spreading the issuing of ops over devices must be called so by the answer
itself. After each, writes its line of `results/claims/` and a README.md with the table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import cost_models, overhead
from benchmarks.common import RESULTS as ALL_RESULTS
from benchmarks.common import Row, made_by, markdown, marked, merge_csv, write_csv
from placewright import load, make_problem, place
from placewright.cluster import Cluster
from placewright.problem import Problem
from placewright.session.result import Result

RESULTS = ALL_RESULTS / "claims"
CLUSTERS = ("a100x4", "h100x8")
BATCH = 32
CLAIM = 1.1
"""A speed-up over this is a claim."""
KEPT = 0.5
"""A claim of whose gain less than this share is left without overhead vanishes without it."""


def _application(name: str) -> Callable[[Any], Any]:
    # Of some applications the size is open where none is given.
    shape = (224, 224, 3)
    return lambda keras: getattr(keras.applications, name)(weights=None, input_shape=shape)


MODELS: dict[str, Callable[[Any], Any]] = {
    "ResNet50": _application("ResNet50"),
    "MobileNetV3Small": _application("MobileNetV3Small"),
    "EfficientNetB0": _application("EfficientNetB0"),
    "DenseNet121": _application("DenseNet121"),
    "transformer": lambda keras: overhead.encoder(6, 512, 8, 128, 32_000),
    "LSTM": cost_models.MODELS["lstm"][0],
    "towers": cost_models.MODELS["towers"][0],
}
"""The images have 224 x 224 pixels, the transformer 6 layers of width 512 and 128 tokens, the LSTM
128 units and 50 steps; the two towers, as of DLRM, read 26 tables."""


def main() -> None:
    options = _options()
    rows: list[Row] = []
    for model in options.models:
        graph = load(_compiled(model), batch=BATCH)
        for cluster in options.clusters:
            problem = make_problem(graph, Cluster.load(cluster))
            result = place(problem, budget=options.seconds, seed=options.seed)
            rows.append(claim_row(model, problem, result))
            print(*rows[-1].values(), flush=True)
            if not options.no_write:
                _write(rows[-1], options.seconds)
    print(claims_table(rows))


def _compiled(name: str) -> Any:
    import keras

    model = MODELS[name](keras)
    loss = {"transformer": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile("adam", loss.get(name, "mse" if name == "towers" else "categorical_crossentropy"))
    return model


def claim_row(model: str, problem: Problem, result: Result) -> dict[str, Any]:
    single, makeup = result.best_single, result.makeup
    if single is None or makeup is None or makeup.reference is None or result.best is None:
        raise SystemExit(f"{model}: does not fit a device; there is no speed-up to look at")
    assert result.speed_up is not None
    assert makeup.speed_up_without_overhead is not None
    step, alone = makeup.step, makeup.reference
    idle = [
        parts.idle / parts.total
        for parts, device in zip(makeup.devices, problem.cluster.devices, strict=True)
        if device.type == "gpu"
    ]
    return {
        "model": model,
        "cluster": problem.cluster.name,
        "ops": problem.graph.num_ops,
        "single_seconds": result.seconds_of(single),
        "single_overhead": round(alone.overhead / alone.total, 3),
        "answer_seconds": result.step_seconds,
        "found_by": result.best.placer,
        "speed_up": round(result.speed_up, 3),
        "without_overhead": round(makeup.speed_up_without_overhead, 3),
        "compute": round(step.compute / step.total, 3),
        "overhead": round(step.overhead / step.total, 3),
        "waiting": round(step.waiting / step.total, 3),
        "gpus_idle": round(statistics.fmean(idle), 3),
        "said": "yes" if any("without overhead" in line for line in result.notes()) else "",
        "lower_bound_seconds": result.lower_bound_seconds,
        "search_seconds": round(result.seconds, 1),
    }


def claims_table(rows: Sequence[Row]) -> str:
    heading = [
        "model", "cluster", "found by", "one device, ms", "of that, overhead", "answer, ms",
        "speed-up", "without overhead", "computing", "overhead", "waiting", "GPUs idle",
        "the answer says so",
    ]  # fmt: skip
    shares = ("compute", "overhead", "waiting", "gpus_idle")
    lines = [
        [
            row["model"],
            row["cluster"],
            row["found_by"],
            f"{1e3 * float(row['single_seconds']):.2f}",
            f"{float(row['single_overhead']):.0%}",
            f"{1e3 * float(row['answer_seconds']):.2f}",
            f"{float(row['speed_up']):.2f}x",
            f"{float(row['without_overhead']):.2f}x",
            *(f"{float(row[share]):.0%}" for share in shares),
            row["said"],
        ]
        for row in rows
    ]
    return f"{markdown(heading, lines, texts=3)}\n\n{verdict(rows)}"


def unsaid(rows: Sequence[Row]) -> list[Row]:
    """Claims that vanish without overhead, of which the answer does not say so."""
    found = []
    for row in rows:
        gained, left = float(row["speed_up"]) - 1, float(row["without_overhead"]) - 1
        if gained > CLAIM - 1 and left < KEPT * gained and not row["said"]:
            found.append(row)
    return found


def verdict(rows: Sequence[Row]) -> str:
    claims = [row for row in rows if float(row["speed_up"]) > CLAIM]
    silent = ", ".join(f"{row['model']} on {row['cluster']}" for row in unsaid(rows))
    return (
        f"Of {len(rows)} answers {len(claims)} claim more than {CLAIM}x; of these the answer says "
        f"for {sum(bool(row['said']) for row in claims)} that it comes from spreading overhead. "
        f"Claims of which less than {KEPT:.0%} is left without overhead, and no word of it: "
        f"{silent or 'none'}."
    )


def _write(row: Row, seconds: float) -> None:
    path = RESULTS / "claims.csv"
    order = list(MODELS)
    rows = merge_csv(path, [row], "model", "cluster")
    rows.sort(key=lambda row: (order.index(row["model"]), CLUSTERS.index(row["cluster"])))
    write_csv(path, rows)
    page = [
        "# What is claimed for modern GPUs",
        f"""\
Training steps of Keras models (Adam, batch 32), simulated under estimated costs: nothing of this
ran on a GPU. `auto` had {seconds:g} s for each. Computing, overhead and waiting are shares of the
critical path of the answer; how idle the GPUs are is a mean over all of the cluster.""",
        marked("claims", claims_table(rows)),
        made_by(),
    ]
    RESULTS.joinpath("README.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS, choices=CLUSTERS)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="only print")
    return parser.parse_args()


if __name__ == "__main__":
    main()
