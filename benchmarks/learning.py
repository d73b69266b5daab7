"""How good the learned placers are, and how fast.

    python -m benchmarks.learning quality     # the learners and local search, by trials
    python -m benchmarks.learning ablation    # what each ingredient of ppo is worth
    python -m benchmarks.learning noise       # with 10% noise on every step, and 5% failures
    python -m benchmarks.learning transfer --trials 1 100 500 2000
                                              # a policy that was trained on the other models
    python -m benchmarks.learning speed       # seconds of one update
    python -m benchmarks.learning report      # results/learning/README.md anew, from the files

Each adds its cases to `results/learning/NAME.csv`; cases that are in the file are not run again, so
a benchmark can be stopped and continued, or shared by machines. All of `quality` takes some four
hours of one core. Quality is by number of trials and so does not depend on the machine. `--models`
also takes graph files (`placewright inspect MODEL --save FILE`), for machines without TensorFlow.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    # One thread, as the cases that run side by side have. Before numba and torch are imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import argparse
import itertools
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    CLUSTERS,
    MODELS,
    add_csv,
    cpu_name,
    markdown,
    marked,
    read_csv,
    run_search,
    side_by_side,
    work_shares,
)
from benchmarks.common import RESULTS as ALL_RESULTS
from placewright import load, make_problem, methods
from placewright._version import VERSION
from placewright.cluster import Cluster
from placewright.evaluators.simulated import Noise, SimulatedEvaluator
from placewright.learning.config import configured_presets
from placewright.measurement import Measurement
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.budget import Budget

RESULTS = ALL_RESULTS / "learning"

Variants = dict[str, tuple[str, tuple[str, ...]]]
SCRATCH = ("warm_start=0", "polish=0")
QUALITY: Variants = {
    "ppo": ("ppo", ()),
    "local-search": ("local-search", ()),
    "ppo from scratch": ("ppo", SCRATCH),
    # As published it has no end: a policy that has collapsed proposes the same placements again and
    # again, which are no new trials, and 20,000 of these can take for ever. This one ends where
    # less than 1% of the proposals are new.
    "reinforce until it settles": ("reinforce", ("settled=0.01",)),
}
ABLATION: Variants = {
    "ppo": ("ppo", ()),
    "without polishing": ("ppo", ("polish=0",)),
    "without warm start": ("ppo", ("warm_start=0",)),
    "from scratch (without both)": ("ppo", SCRATCH),
    "from scratch, no imitation of the best": ("ppo", (*SCRATCH, "imitation=0")),
    "from scratch, one epoch and no clipping": ("ppo", (*SCRATCH, "epochs=1", "clip=none")),
    "from scratch, moving-average baseline": ("ppo", (*SCRATCH, "normalise=false")),
    "from scratch, no entropy bonus": ("ppo", (*SCRATCH, "entropy=0")),
    "from scratch, no running features": ("ppo", (*SCRATCH, "policy.running=false")),
    "from scratch, no costs seen": ("ppo", (*SCRATCH, "policy.costs=false")),
    "from scratch, the paper's adjacency list": ("ppo", (*SCRATCH, "policy.adjacency=list")),
}
NOISE: Variants = {"ppo": ("ppo", ()), "ppo from scratch": ("ppo", SCRATCH)}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One search; the best step time after each number of trials asked for."""
    problem = make_problem(load(case["model"]), Cluster.load(case["cluster"]))
    noise = Noise(steps=case["steps"], seed=case["seed"]) if "steps" in case else None
    evaluator = _Remembering(problem, noise=noise)
    searched = run_search(
        problem,
        [case["method"]],
        Budget(trials=case["most"]),
        seed=case["seed"],
        learners=configured_presets([case["method"]], case["settings"]),
        policy=case.get("policy"),
        evaluator=evaluator,
    )
    exact = SimulatedEvaluator(problem)
    best = searched.progress.best
    row: dict[str, Any] = {
        "model": problem.graph.name,
        "cluster": problem.cluster.name,
        "variant": case["variant"],
        "seed": case["seed"],
    }
    if noise is not None:
        row["steps"] = noise.steps
    for trials in case["trials"]:
        reached = [point.step_seconds for point in searched.curve if point.trials <= trials]
        enough = trials <= case["most"]
        row[f"best_at_{trials}"] = f"{min(reached):.6f}" if reached and enough else ""
    final = searched.policy_placement or (best.placement if best else None)
    row |= {"final_seconds": "", "final_devices": "", "final_largest_share": ""}
    if final is not None:
        (measurement,) = exact.evaluate([final])
        row["final_seconds"] = f"{measurement.mean_seconds:.6f}"
        row["final_devices"] = len(set(final.devices.tolist()))
        row["final_largest_share"] = f"{max(work_shares(problem, final)):.3f}"
    if noise is not None:
        # As after real runs: the luckiest of many is not the best, so the best play a final.
        finalists = [*evaluator.best(10), *searched.placers[-1].notes.favourites]
        finalists += [] if final is None else [final]
        times = [
            [m.mean_seconds for m in evaluator.evaluate([placement] * 20) if m.ok]
            for placement in finalists
        ]
        ran = [(statistics.fmean(t), p) for t, p in zip(times, finalists, strict=True) if t]
        answer = min(ran, key=lambda pair: pair[0])[1]
        row["answer_seconds"] = f"{exact.evaluate([answer])[0].mean_seconds:.6f}"
    row["trials"] = searched.progress.trials
    row["search_seconds"] = round(searched.seconds, 1)
    return row


class _Remembering(SimulatedEvaluator):
    """Knows the best it has seen."""

    def __init__(self, problem: Problem, *, noise: Noise | None) -> None:
        super().__init__(problem, noise=noise)
        self._seen: dict[Placement, float] = {}

    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        measurements = super().evaluate(placements)
        for placement, measurement in zip(placements, measurements, strict=True):
            if measurement.ok:
                self._seen.setdefault(placement, measurement.mean_seconds)
        if len(self._seen) > 1000:
            self._seen = {p: self._seen[p] for p in self.best(100)}
        return measurements

    def best(self, count: int) -> list[Placement]:
        return sorted(self._seen, key=self._seen.__getitem__)[:count]


def to_run(cases: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The cases that are not in the file yet."""

    def key(entry: dict[str, Any]) -> tuple[str, ...]:
        model = Path(str(entry["model"])).name.partition(".")[0]
        steps = str(entry.get("steps", ""))
        return model, str(entry["cluster"]), entry["variant"], str(entry["seed"]), steps

    done = {key(row) for row in read_csv(path)}
    return [case for case in cases if key(case) not in done]


def run_all(cases: Sequence[dict[str, Any]], path: Path, jobs: int) -> None:
    """Runs what is not in the file yet, each case in a process of its own, and adds it."""
    for row in side_by_side(run_case, to_run(cases, path), jobs):
        print(*row.values(), flush=True)
        add_csv(path, row)


def cases_of(variants: Variants, options: argparse.Namespace, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "model": model, "cluster": cluster, "variant": variant, "method": method,
            "settings": settings, "seed": seed, "trials": options.trials,
            "most": options.most or max(options.trials), **more,
        }
        for seed, model, cluster, (variant, (method, settings)) in itertools.product(
            options.seeds, options.models, options.clusters, variants.items()
        )
        if not options.variants or variant in options.variants
    ]  # fmt: skip


def noise(options: argparse.Namespace) -> None:
    """The same learners with the troubles of real measurement; those without are in `quality`."""
    cases = [case for steps in options.steps for case in cases_of(NOISE, options, steps=steps)]
    run_all(cases, RESULTS / "noise.csv", options.jobs)


def transfer(options: argparse.Namespace) -> None:
    """Each model in turn is held out: a policy trained on the others starts on it."""
    from placewright.learning.config import PPO
    from placewright.learning.train import Lesson, train

    file = RESULTS / "transfer.csv"
    for held_out, seed in itertools.product(options.models, options.seeds):
        variants: Variants = {"from scratch": ("ppo", SCRATCH), "pretrained": ("ppo", SCRATCH)}
        cases = [
            case
            for case in to_run(cases_of(variants, options), file)
            if case["model"] == held_out and case["seed"] == seed
        ]
        if not cases:
            continue
        lessons = []
        for model, cluster in itertools.product(options.models, options.clusters):
            if model != held_out:
                problem = make_problem(load(model), Cluster.load(cluster))
                lessons.append(
                    Lesson(
                        evaluator=SimulatedEvaluator(problem), teachers=methods.teachers(problem)
                    )
                )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "policy.st"
            started = time.monotonic()
            policy = train(lessons, PPO, Budget(trials=options.train_trials), seed=seed)
            policy.cpu().save(path)
            print(f"trained without {held_out}: {time.monotonic() - started:.0f} s", flush=True)
            for case in cases:
                if case["variant"] == "pretrained":
                    case["policy"] = str(path)
            run_all(cases, file, options.jobs)


def speed() -> None:
    """One update of the size the method's authors had: sample, score, backward, step."""
    import torch

    from placewright.learning.config import PRESETS, configured
    from placewright.learning.learner import Learner
    from placewright.measurement import Trial
    from placewright.testing import layered_graph

    problem = make_problem(layered_graph(5600, 20), Cluster.load("k80x4"), target_groups=280)
    evaluator = SimulatedEvaluator(problem)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rows = [row for row in read_csv(RESULTS / "speed.csv") if row["device"] != device]
    # As the presets are, with all their gradient steps, but for the size of the network and one
    # polished placement instead of 240: simulating is not what is timed.
    for preset, hidden in itertools.product(("reinforce", "ppo"), (128, 256)):
        settings = [f"policy.hidden={hidden}", "samples=16", "warm_start=0"]
        if preset == "ppo":
            settings.append("polish=1")
        config = configured(PRESETS[preset], settings)
        learner = Learner(problem, config, name=preset)
        seconds: list[float] = []
        while len(seconds) < 12:
            spent = 0.0
            before = learner.updates
            while learner.updates == before:
                started = time.perf_counter()
                asked = learner.ask(64)
                spent += time.perf_counter() - started
                measured = evaluator.evaluate(asked)
                started = time.perf_counter()
                learner.tell(
                    [
                        Trial(placement=placement, measurement=measurement, placer=preset)
                        for placement, measurement in zip(asked, measured, strict=True)
                    ]
                )
                spent += time.perf_counter() - started
            seconds.append(spent)
        row = {
            "preset": preset, "groups": problem.num_groups, "devices": problem.num_devices,
            "hidden": hidden, "samples": 16,
            "gradient_steps": config.epochs + bool(config.polish) * config.imitation_steps,
            "device": device,
            "update_seconds_median": f"{statistics.median(seconds[2:]):.3f}",
            "best": f"{min(seconds[2:]):.3f}", "worst": f"{max(seconds[2:]):.3f}",
        }  # fmt: skip
        print(*row.values(), flush=True)
        rows.append({name: str(value) for name, value in row.items()})
    (RESULTS / "speed.csv").unlink(missing_ok=True)
    for line in rows:
        add_csv(RESULTS / "speed.csv", line)


# --- files and tables ----------------------------------------------------------------------------


def table(rows: Iterable[dict[str, str]], column: str) -> str:
    """Markdown: variants down, cases across; mean (best-worst) over seeds. Cells of more or fewer
    seeds than most say so."""
    ran: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row[column]:  # run that far
            ran.setdefault((row["variant"], row["model"], row["cluster"]), []).append(row[column])
    (usual, _), *_ = Counter(len(times) for times in ran.values()).most_common()
    cases = sorted({(model, cluster) for _, model, cluster in ran})
    lines = [
        "| | " + " | ".join(f"{model} {cluster}" for model, cluster in cases) + " |",
        "|---|" + "---:|" * len(cases),
    ]
    # Lines of a file are in the order in which the cases ended.
    known = [*reversed(QUALITY), *ABLATION]
    there = dict.fromkeys(variant for variant, _, _ in ran)
    for variant in sorted(there, key=lambda name: known.index(name) if name in known else 0):
        cells = []
        for case in cases:
            mine = ran.get((variant, *case), [])
            times = [float(t) for t in mine if t != "inf"]
            text = ""
            if times:
                text = f"{statistics.fmean(times):.3f} ({min(times):.3f}-{max(times):.3f})"
            if times and len(mine) != usual:
                text += f", {len(mine)} seeds"
            if len(times) < len(mine):
                text += f" {len(mine) - len(times)} of {len(mine)} did not fit"
            cells.append(text.strip())
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def noise_table(noisy: Sequence[dict[str, str]], quiet: Sequence[dict[str, str]]) -> str:
    """The true time of what the noisy runs answered (the best of a final of 20 runs each, beyond
    the trials, among the ten fastest, those the learner holds for the best, and the policy's
    likeliest), against the best of the same runs without noise, of the seeds that have both."""
    lines = [
        "| | case | steps timed | trials | seeds | without noise | with | excess | worst seed |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in noisy:
        variant = row["variant"]
        trials = max(
            int(c.removeprefix("best_at_")) for c in row if c.startswith("best_at_") and row[c]
        )
        for other in quiet:
            same = all(row[k] == other[k] for k in ("model", "cluster", "seed"))
            if same and other["variant"] == variant and other.get(f"best_at_{trials}"):
                case = f"{row['model']} {row['cluster']}"
                key = (variant, case, row["steps"], f"{trials:,}")
                pair = float(other[f"best_at_{trials}"]), float(row["answer_seconds"])
                groups.setdefault(key, []).append(pair)
    for (variant, case, steps, trials_text), pairs in sorted(groups.items()):
        excess = [b / a - 1 for a, b in pairs]
        lines.append(
            f"| {variant} | {case} | {steps} | {trials_text} | {len(pairs)} "
            f"| {statistics.fmean(a for a, _ in pairs):.3f} "
            f"| {statistics.fmean(b for _, b in pairs):.3f} "
            f"| {statistics.fmean(excess):+.1%} | {max(excess):+.1%} |"
        )
    return "\n".join(lines)


def transfer_table(rows: Sequence[dict[str, str]]) -> str:
    """Case by case, the best after so many trials: a policy trained on the other models (its first
    trial is its best guess) and one from scratch; means over the seeds."""
    columns = [column for column in rows[0] if column.startswith("best_at_")]
    heads = ["case", "seeds"]
    for column in columns:
        trials = int(column.removeprefix("best_at_"))
        heads += ["best guess"] if trials == 1 else [f"{trials:,}, trained", f"{trials:,}, scratch"]
    lines = []
    for case in sorted({(row["model"], row["cluster"]) for row in rows}):
        mine = [row for row in rows if (row["model"], row["cluster"]) == case]
        seeds = Counter(row["seed"] for row in mine)
        mine = [row for row in mine if seeds[row["seed"]] == 2]  # both of a pair
        cells = [" ".join(case), str(len(mine) // 2)]
        for column, variant in itertools.product(columns, ("pretrained", "from scratch")):
            if column == "best_at_1" and variant == "from scratch":
                continue
            times = [row[column] for row in mine if row["variant"] == variant]
            ran = [float(time) for time in times if time]
            cell = f"{statistics.fmean(ran):.3f}" if ran else ""
            if len(ran) < len(times) and column == "best_at_1":
                cell += f" {len(times) - len(ran)} of {len(times)} did not fit"
            cells.append(cell.strip())
        lines.append(cells)
    return markdown(heads, lines)


def final_table(rows: Sequence[dict[str, str]]) -> str:
    """What policies hold for the best at the end of the longest runs."""
    longest = [column for column in rows[0] if column.startswith("best_at_")][-1]
    of_policies = [row for row in rows if row["variant"] != "local-search" and row[longest]]
    return table(of_policies, "final_seconds")


def speed_table(rows: Sequence[dict[str, str]]) -> str:
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def report() -> None:
    """The README of the results, from what the files hold."""
    parts = [
        "# The learned placers",
        "",
        "Simulated seconds per training step (roofline costs): mean over seeds, with the best and "
        "the worst. Made by `python -m benchmarks.learning`, whose text says what each table is; "
        f"written with placewright {VERSION}, Python {platform.python_version()}, "
        f"on {os.cpu_count()} cores, {cpu_name()}. Cases were shared by this machine and one with "
        "an NVIDIA H200, where 15 policies were trained side by side: the same seed gives other "
        "random numbers there, and `search_seconds` in the files are of either. A cell of more or "
        "fewer seeds than most of its table says how many.",
    ]
    titles = {
        "quality": "Quality at equal numbers of trials",
        "ablation": "What each ingredient is worth",
        "noise": "10% noise on every step, 5% of the placements fail for no reason",
        "transfer": "A policy trained on the other models",
    }
    for name, title in titles.items():
        rows = read_csv(RESULTS / f"{name}.csv")
        if not rows:
            continue
        seeds = sorted({int(r["seed"]) for r in rows})
        parts += ["", f"## {title}", "", f"Seeds {', '.join(map(str, seeds))}."]
        if name == "noise":
            made = noise_table(rows, read_csv(RESULTS / "quality.csv"))
            parts += ["", marked("learning-noise", made)]
            continue
        if name == "transfer":
            parts += ["", marked("learning-transfer", transfer_table(rows))]
            continue
        for column in [c for c in rows[0] if c.startswith("best_at_")]:
            if any(r[column] for r in rows):
                trials = int(column.removeprefix("best_at_"))
                made = marked(f"learning-{name}-{trials}", table(rows, column))
                parts += ["", f"Best after {trials:,} trials:", "", made]
        if name == "quality":
            parts += [
                "",
                "What the policy itself holds for the best at the end (its likeliest placement) of "
                "runs that were given all trials. Those of `ppo from scratch` ended earlier, when "
                "the policy proposed hardly anything new (`trials` in the file):",
                "",
                marked(f"learning-{name}-final", final_table(rows)),
            ]
    rows = read_csv(RESULTS / "speed.csv")
    if rows:
        parts += ["", "## Seconds of one update", "", marked("learning-speed", speed_table(rows))]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "README.md").write_text("\n".join(parts) + "\n")


def main() -> None:
    options = _options()
    if options.what == "quality":
        run_all(cases_of(QUALITY, options), RESULTS / "quality.csv", options.jobs)
    elif options.what == "ablation":
        run_all(cases_of(ABLATION, options), RESULTS / "ablation.csv", options.jobs)
    elif options.what == "noise":
        noise(options)
    elif options.what == "transfer":
        transfer(options)
    elif options.what == "speed":
        speed()
    report()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "what", choices=["quality", "ablation", "noise", "transfer", "speed", "report"]
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--trials", nargs="+", type=int, default=[2000, 20000])
    parser.add_argument("--most", type=int, help="Trials of each run; default: all that count.")
    parser.add_argument("--train-trials", type=int, default=20000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--steps", nargs="+", type=int, default=[4, 1], help="That a noisy trial times."
    )
    parser.add_argument("--variants", nargs="+", help="Only these.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    main()
