"""How well the calibrated simulator predicts real runs of PyTorch models on a GPU and its parts.

    python -m benchmarks.fidelity_gpu --seconds 300 --measure   # as far as time allows
    python -m benchmarks.fidelity_gpu --analyse                 # no GPU: fits, tables, plot
    python -m benchmarks.fidelity_gpu --machines cpu2 --models towers --tiny --placements 12

Machines: four streams of a GPU; four partitions of it that exchange tensors through the host, and
the CPU; the whole GPU and the CPU; two halves of the CPU, for trying it out. What is measured of a
model on a machine is kept in `raw/MODEL-MACHINE.json.gz` of the results: all that calibration asks
for (traces of single devices, links, what ops take side by side), placements that it is fitted to,
and others that it has not seen: random, contiguous, proposed by the classical methods, and the best
found in the simulator. Some of those run once more with so much memory that they are predicted to
fill it to 95%; then all are measured again in a second pass, as far as time allows. What is there
is not measured again, so a run that was cut short goes on, first with what was never measured, and
exits with 3 where its time ended before all was done. `--propose` makes the placements of what is
calibrated so far, on a machine that has Scotch and METIS. That needs no GPU, nor do fitting and
predicting, which come afterwards: `fidelity.csv` has a line for each placement, `summary.csv` one
for each model and machine, `README.md` the table.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import figures
from benchmarks.common import MORE, Row, cpu_name, made_by, write_csv
from benchmarks.common import RESULTS as ALL_RESULTS
from placewright import calibration, place
from placewright import methods as registry
from placewright.backends import Run, RunConfig, Runner
from placewright.backends.base import Trace
from placewright.calibration import LINK_BYTES, Calibration, Fidelity, varied_placements
from placewright.cluster import Cluster, chosen
from placewright.errors import CostsError, PlacewrightError
from placewright.files import read_json, write_json
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement, everything_on
from placewright.placers.heft import heft
from placewright.problem import Problem, make_problem
from placewright.simulator import Simulator

RESULTS = ALL_RESULTS / "fidelity_gpu"
MACHINES: dict[str, tuple[str, ...]] = {
    "streams4": ("cuda:0/stream:0-3", "issue=none"),
    "parts4": ("cuda:0/part:0-3", "cpu:0", "via-host", "sms=32", "issue=none"),
    "gpu+cpu": ("cuda:0", "cpu:0", "issue=none"),
    "cpu2": ("cpu:0", "cpu:1", "issue=none"),
}
ON_GPU = ("streams4", "parts4", "gpu+cpu")
MODELS = ("inception_v3", "rnnlm", "towers", "googlenet", "transformer", "nmt")
CLASSICAL = ("scotch", "mincut", "heft", "m-topo", "m-etf", "m-sct")
FIT = 16
"""Placements that each calibration is fitted to, besides single devices and what HEFT proposes."""
TRACED = 6
"""Of those that costs are fitted to: what ops take where other devices work beside."""
FILLED_RUNS = 6
"""Of a model on a machine, that run with little more memory than they are predicted to need."""
ERROR, SPEARMAN, KENDALL, PEAK, FILLED = 0.10, 0.9, 0.6, 0.05, 0.95
"""What is wanted: the error and the correlation of all placements, the agreement of pairs among the
fastest quarter, the error of the peak of memory, and how full a plan may fill it."""
CALIBRATION_SECONDS = 120.0
"""For all that costs are made from."""
ON_CPU = 0.05
"""Of the groups, that random placements put on the CPU beside a GPU, on average."""
LEAST_SECONDS = 30.0
"""Less time is not worth another start of processes."""
SLOWEST = 6.0
"""Placements that are predicted to take longer than the best single GPU by this factor are not
measured: on the CPU, one can take minutes."""


# --- what is measured ----------------------------------------------------------------------------


@dataclass
class Record:
    """All that was measured of a model on a machine."""

    facts: dict[str, Any]
    singles: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Number of a device -> a run with everything on it, with its trace."""
    links: dict[str, list[float]] | None = None
    demands: dict[int, dict[str, float]] | None = None
    calibration_seconds: float = 0.0
    """What the above took and the placements to fit to, without the start of the process."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Of placements: `kind`, whether it is to `fit`, `devices` of the ops that are placed together,
    `passes`: what came of each time that it was measured, and of some `filled`: what came of it
    where the devices had little more memory than is predicted to be needed."""

    def save(self, path: Path, problem: Problem) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = dict(vars(self))
        write_json(path, document, PlacewrightError)
        beside = _problem_path(path)
        if not beside.exists():
            problem.save(beside)

    @staticmethod
    def load(path: Path) -> tuple[Record, Problem]:
        document = read_json(path, PlacewrightError, what="record")
        assert isinstance(document, dict)
        record = Record(
            facts=document["facts"],
            singles={int(key): value for key, value in document["singles"].items()},
            links=document["links"],
            demands=None
            if document["demands"] is None
            else {int(key): value for key, value in document["demands"].items()},
            calibration_seconds=document["calibration_seconds"],
            runs=document["runs"],
        )
        return record, Problem.load(_problem_path(path))


def _problem_path(path: Path) -> Path:
    return path.with_name(path.name.replace(".json", ".problem.json"))


def measure(
    problem: Problem, runner: Runner, record: Record, *, count: int, until: float
) -> Iterator[None]:
    """Measures what is missing in the record, the most important first, until that time (of
    `time.monotonic`); yields after every run."""
    at = time.monotonic()
    for is_calibration in _measured(problem, runner, record, count, until):
        if is_calibration:
            record.calibration_seconds += time.monotonic() - at
        yield
        at = time.monotonic()


def _measured(
    problem: Problem, runner: Runner, record: Record, count: int, until: float
) -> Iterator[bool]:
    """Whether what was just measured is what costs are made from."""
    ops = problem.grouping.group_of
    for device in _first_of_each(problem):
        if device not in record.singles:
            traces = 1 if problem.cluster.devices[device].type == "cpu" else 3
            single = everything_on(problem, device).devices[ops]
            run = runner.measure(single, best_seconds=_best_single(record), traces=traces)
            record.singles[device] = _as_record(run)
            yield True
        if time.monotonic() > until:
            return
    if record.links is None and problem.num_devices > 1:
        times = runner.time_links(LINK_BYTES)
        record.links = {name: list(seconds) for name, seconds in times.items()}
        yield True
    if record.demands is None:
        record.demands = {
            device: dict(shares)
            for device, shares in (runner.demands() if problem.cluster.shared_chips else {}).items()
        }
        yield True
    if not record.runs:
        record.runs = _to_measure(problem, record, count)
        yield False
    fresh = [run for run in record.runs if not run["fit"]]
    first = [run for run in record.runs if run["fit"]] + fresh
    for number, runs in enumerate((first, fresh[::-1])):
        if number:
            yield from _filled(problem, runner, record, fresh, until)
        for entry in runs:
            if len(entry["passes"]) > number or _failed(entry):
                continue
            if time.monotonic() > until:
                return
            devices = np.array(entry["devices"], dtype=np.int32)
            run = runner.measure(
                devices[ops], best_seconds=_best_single(record), adaptive=False,
                traces=int(number == 0 and any(entry is traced for traced in record.runs[:TRACED])),
            )  # fmt: skip
            entry["passes"].append(_as_record(run))
            yield bool(entry["fit"])


def _filled(
    problem: Problem, runner: Any, record: Record, fresh: Sequence[dict[str, Any]], until: float
) -> Iterator[bool]:
    """Some of those that ran, where each device has so much memory that they are predicted to fill
    it to that share."""
    ran = [entry for entry in fresh if entry["passes"] and not _failed(entry)]
    spread = np.linspace(0, len(ran) - 1, min(FILLED_RUNS, len(ran)), dtype=int)
    chosen = [ran[n] for n in spread]
    left = [entry for entry in chosen if "filled" not in entry]
    if not left:
        return
    known = piecewise(problem, record).problem(problem)
    rows = np.array([entry["devices"] for entry in left], dtype=np.int32)
    peaks = Simulator(known).run(rows).peak_bytes
    full = np.array([device.memory_bytes for device in problem.cluster.devices])
    for entry, peak in zip(left, peaks, strict=True):
        if time.monotonic() > until:
            return
        # A device that nothing is on takes part in nothing.
        limits = np.where(peak > 0, np.minimum(peak / FILLED, full), full).astype(np.int64)
        devices = np.array(entry["devices"], dtype=np.int32)[problem.grouping.group_of]
        runner.memory_bytes = limits.tolist()
        try:
            run = runner.measure(devices, best_seconds=_best_single(record), adaptive=False)
        finally:
            runner.memory_bytes = None
        entry["filled"] = _as_record(run) | {"predicted_bytes": peak.tolist()}
        yield False


def _best_single(record: Record) -> float | None:
    """Of what takes far longer than the best single device, two steps will do."""
    means = [float(np.mean(run["seconds"])) for run in record.singles.values() if run["seconds"]]
    return min(means, default=None)


def _first_of_each(problem: Problem) -> list[int]:
    """Devices that are not alike: the first stream or partition of a GPU stands for all."""
    seen: dict[tuple[str, str], int] = {}
    for number, device in enumerate(problem.cluster.devices):
        seen.setdefault((device.chip, device.kind.name), number)
    return list(seen.values())


def _as_record(run: Run) -> dict[str, Any]:
    measurement = run.measurement
    result: dict[str, Any] = {
        "outcome": measurement.outcome.value,
        "reason": measurement.reason,
        "seconds": list(measurement.step_seconds),
        "peak_bytes": list(measurement.peak_bytes),
        "allocated_bytes": run.allocated_bytes,
        "overhead_seconds": run.overhead_seconds,
    }
    if run.trace is not None:
        result["trace"] = {
            "op_seconds": dict(run.trace.op_seconds), "device_of": dict(run.trace.device_of),
        }  # fmt: skip
    return result


def _failed(entry: Mapping[str, Any]) -> bool:
    return any(p["outcome"] != Outcome.OK.value for p in entry["passes"])


def _to_measure(problem: Problem, record: Record, count: int) -> list[dict[str, Any]]:
    """Placements of what must be together, by turns of the model's groups and of the smallest
    there are: some to fit to, and `count` others."""
    known = piecewise(problem, record).problem(problem)
    coarse = make_problem(problem.graph, problem.cluster)
    lifted = replace(known, grouping=coarse.grouping, forbidden=coarse.forbidden)
    ops_first = np.unique(problem.grouping.group_of, return_index=True)[1]
    limit = SLOWEST * (_best_single(record) or math.inf)
    seen: set[bytes] = set()
    found: list[dict[str, Any]] = []

    def add(kind: str, fit: bool, of_ops: Any) -> bool:
        devices = np.asarray(of_ops, dtype=np.int32)[ops_first]
        simulated = Simulator(known).run(devices[np.newaxis])
        if devices.tobytes() in seen or not simulated.ok[0] or simulated.step_seconds[0] > limit:
            return False
        seen.add(devices.tobytes())
        found.append({"kind": kind, "fit": fit, "devices": devices.tolist(), "passes": []})
        return True

    for device in _first_of_each(problem):
        add("single", True, np.full(problem.graph.num_ops, device))
    for placement in heft(known):
        add("heft", True, placement.devices[problem.grouping.group_of])
    for of in (lifted, known):
        for placement in _varied(of, FIT, seed=1)[: FIT // 2]:
            add("varied", True, placement.devices[of.grouping.group_of])
    before = len(found)
    for name in registry.installed(CLASSICAL)[0]:
        (placer,) = registry.make([name], lifted)
        for placement in placer.ask(problem.num_devices):
            add(name, False, placement.devices[lifted.grouping.group_of])
    best = place(lifted, method="local-search", trials=1500, op_level=False)
    if best.placement is not None:
        add("best", False, best.placement.devices[lifted.grouping.group_of])
    for of, kind in ((lifted, "groups"), (known, "sets")):
        for placement in _varied(of, 2 * count, seed=2):
            wanted = count if kind == "sets" else (count + len(found) - before) // 2
            if len(found) - before < wanted:
                add(kind, False, placement.devices[of.grouping.group_of])
    return found


def _varied(problem: Problem, count: int, seed: int) -> list[Placement]:
    """As `varied_placements`; beside GPUs, the CPU has few of the groups."""
    cluster = problem.cluster
    gpus = [n for n, device in enumerate(cluster.devices) if device.type != "cpu"]
    cpus = [n for n in range(cluster.num_devices) if n not in gpus]
    placements = varied_placements(problem, count, seed)
    if not gpus or not cpus:
        return placements
    rng = np.random.default_rng(seed)
    result = []
    for placement in placements:
        devices = placement.devices.copy()
        on_cpu = np.isin(devices, cpus)
        kept = rng.random(len(devices)) < 2 * ON_CPU * rng.random()
        devices = np.where(on_cpu, rng.choice(gpus), devices)
        devices = np.where(kept, rng.choice(cpus, len(devices)), devices)
        allowed = problem.allowed[np.arange(len(devices)), devices]
        devices = np.where(allowed, devices, placement.devices)
        result.append(Placement.of(problem, devices.astype(np.int32)))
    return list(dict.fromkeys(result))


# --- what comes of it ----------------------------------------------------------------------------


class Recorded(ExitStack):
    """A runner that only knows what was measured before; for `calibration.calibrate`."""

    def __init__(self, problem: Problem, record: Record) -> None:
        super().__init__()
        self.program: Any = None
        self.cluster = problem.cluster
        self.config = RunConfig()
        self._record = record
        ops = problem.grouping.group_of
        self._runs: dict[bytes, Mapping[str, Any]] = {}
        for device, run in record.singles.items():
            single = everything_on(problem, device)
            self._runs[single.devices[ops].astype(np.int32).tobytes()] = run
        for entry in record.runs:
            key = np.array(entry["devices"], dtype=np.int32)[ops].tobytes()
            if entry["passes"] and key not in self._runs:
                self._runs[key] = entry["passes"][0]

    def start(self) -> None:
        pass

    def measure(
        self,
        devices: Any,
        *,
        best_seconds: float | None = None,
        traces: int = 0,
        adaptive: bool = True,
    ) -> Run:
        run = self._runs.get(np.asarray(devices, dtype=np.int32).tobytes())
        if run is None:
            return Run(measurement=Measurement(outcome=Outcome.FAILED, reason="not measured"))
        trace = run.get("trace")
        return Run(
            measurement=Measurement(
                outcome=Outcome(run["outcome"]), reason=run["reason"],
                step_seconds=tuple(run["seconds"]), peak_bytes=tuple(run["peak_bytes"]),
            ),
            trace=Trace(op_seconds=trace["op_seconds"], device_of=trace["device_of"])
            if trace and traces
            else None,
        )  # fmt: skip

    def seconds_for_links(self, sizes: int) -> float:
        return 0.0

    def time_links(self, sizes: Sequence[int]) -> Mapping[str, Sequence[float]]:
        return self._record.links or {}

    def demands(self) -> Mapping[int, Mapping[str, float]]:
        return self._record.demands or {}


def piecewise(problem: Problem, record: Record) -> Calibration:
    """What is known before any placement is measured."""
    runner: Runner = Recorded(problem, record)
    ops = problem.grouping.group_of
    traced = {
        device: runner.measure(everything_on(problem, device).devices[ops], traces=1)
        for device, run in record.singles.items()
        if run["outcome"] == Outcome.OK.value
    }
    if not traced:
        reasons = "; ".join(run["reason"] for run in record.singles.values())
        raise CostsError(f"no device runs {problem.graph.name} alone: {reasons}")
    table = calibration.op_table(problem, traced)
    table = calibration.with_demands(problem, table, runner)
    return Calibration(table=table, cluster=calibration.measure_links(runner, problem.cluster))


def calibrated(problem: Problem, record: Record) -> Calibration:
    """As `placewright calibrate` does it, from what was recorded."""
    fit = [
        Placement.of(problem, np.array(run["devices"], dtype=np.int32))
        for run in record.runs
        if run["fit"] and run["passes"]
    ]
    runner: Runner = Recorded(problem, record)
    return calibration.calibrate(problem, runner, fit, traces=3, forced=True)


def predicted(problem: Problem, record: Record, found: Calibration) -> list[dict[str, Any]]:
    """A line for each placement that was not fitted to and ran."""
    under = found.problem(problem)
    runs = [run for run in record.runs if not run["fit"] and run["passes"] and not _failed(run)]
    if not runs:
        return []
    rows = np.array([run["devices"] for run in runs], dtype=np.int32)
    simulated = Simulator(under).run(rows)
    resident = problem.group_resident_bytes
    pools = problem.cluster.pool_of_device
    on_gpu = np.array([device.type == "gpu" for device in problem.cluster.devices])
    result = []
    for number, run in enumerate(runs):
        halves = _halves(run)
        peaks = run["passes"][0]["peak_bytes"]
        said = simulated.peak_bytes[number].tolist()
        fixed = np.zeros(problem.num_devices)
        np.add.at(fixed, pools[rows[number]], resident)
        allocated = run["passes"][0].get("allocated_bytes")
        on_gpus = max((s for s, gpu in zip(said, on_gpu, strict=True) if gpu), default=0)
        if allocated is not None:  # it tells partitions of a GPU not apart
            one_memory = len(set(pools[on_gpu].tolist())) == 1
            allocated = int(allocated + fixed[on_gpu].sum()) if one_memory else None
        filled = run.get("filled")
        result.append(
            {
                **record.facts,
                "calibration_seconds": round(record.calibration_seconds, 1),
                "kind": run["kind"],
                "predicted_seconds": float(simulated.step_seconds[number]),
                "first_seconds": halves[0],
                "second_seconds": halves[1],
                "passes": len(run["passes"]),
                "predicted_peak_bytes": max(said),
                "measured_peak_bytes": max(peaks),
                "allocated_peak_bytes": "" if allocated is None else allocated,
                "predicted_gpu_peak_bytes": on_gpus,
                # What came of it where it was predicted to fill the memory to that share.
                "filled": filled["outcome"] if filled else "",
                "filled_seconds": _usual(filled["seconds"]) if filled and filled["seconds"] else "",
                "filled_predicted_bytes": max(filled["predicted_bytes"]) if filled else "",
                "filled_peak_bytes": max(filled["peak_bytes"], default="") if filled else "",
            }
        )
    return result


def _halves(run: Mapping[str, Any]) -> tuple[float, float]:
    """Two times for one placement: of both passes or, with one, of every second step."""
    passes = [p["seconds"] for p in run["passes"]]
    first, second = passes[:2] if len(passes) > 1 else (passes[0][::2], passes[0][1::2])
    return _usual(first), _usual(second or first)


def _usual(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.25))


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each model and machine."""
    result = []
    for model, machine in dict.fromkeys((row["model"], row["machine"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["machine"]) == (model, machine)]
        found = fidelity_of(mine)
        quarter = found.fastest_quarter
        peaks = [
            abs(float(r["predicted_peak_bytes"]) / float(r["measured_peak_bytes"]) - 1)
            for r in mine
            if float(r["measured_peak_bytes"])
        ]
        real = [
            float(r["predicted_gpu_peak_bytes"]) / float(r["allocated_peak_bytes"]) - 1
            for r in mine
            if r["allocated_peak_bytes"] not in ("", None)
        ]
        result.append(
            {
                "model": model,
                "machine": machine,
                "placements": len(mine),
                "twice": sum(int(row["passes"]) > 1 for row in mine),
                "error": found.error,
                "error_of_repeating": float(
                    np.mean(np.abs(np.subtract(found.first, found.second)) / found.measured)
                ),
                "spearman": found.spearman,
                "spearman_repeated": found.repeated,
                "kendall_quarter": quarter.kendall,
                "kendall_quarter_repeated": quarter.kendall_repeated,
                "best_over_predicted": _best_over_predicted(mine),
                "peak_error": float(np.mean(peaks)) if peaks else math.nan,
                "allocated_error": float(np.mean(np.abs(real))) if real else math.nan,
                "filled": sum(row["filled"] != "" for row in mine),
                "filled_ran": sum(row["filled"] == Outcome.OK.value for row in mine),
                "filled_peak_error": _filled_error(mine),
                "calibration_seconds": float(mine[0]["calibration_seconds"]),
            }
        )
    return result


def _filled_error(rows: Sequence[Row]) -> float:
    errors = [
        abs(float(row["filled_predicted_bytes"]) / float(row["filled_peak_bytes"]) - 1)
        for row in rows
        if row["filled"] == Outcome.OK.value and float(row["filled_peak_bytes"] or 0)
    ]
    return float(np.mean(errors)) if errors else math.nan


def fidelity_of(rows: Sequence[Row]) -> Fidelity:
    first = tuple(float(row["first_seconds"]) for row in rows)
    second = tuple(float(row["second_seconds"]) for row in rows)
    return Fidelity(
        predicted=tuple(float(row["predicted_seconds"]) for row in rows),
        first=first,
        second=second,
        raw=tuple((a + b) / 2 for a, b in zip(first, second, strict=True)),
    )


def _best_over_predicted(rows: Sequence[Row]) -> float:
    ratios = [
        float(row["first_seconds"]) / float(row["predicted_seconds"])
        for row in rows
        if row["kind"] == "best"
    ]
    return ratios[0] if ratios else math.nan


def table(lines: Sequence[Row]) -> str:
    """For the README and the documentation."""
    text = [
        "| model | machine | placements | error | of repeating | Spearman | with itself | "
        "Kendall, fastest quarter | with itself | best: measured / predicted | peak memory | "
        "of the allocator | with little memory | of those ran | calibrated in |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        cells = [
            line["model"], line["machine"], str(line["placements"]), _percent(line["error"]),
            _percent(line["error_of_repeating"]), _number(line["spearman"]),
            _number(line["spearman_repeated"]), _number(line["kendall_quarter"]),
            _number(line["kendall_quarter_repeated"]), _number(line["best_over_predicted"]),
            _percent(line["peak_error"]), _percent(line["allocated_error"]),
            _percent(line["filled_peak_error"]), f"{line['filled_ran']} of {line['filled']}",
            f"{float(line['calibration_seconds']):.0f} s",
        ]  # fmt: skip
        text.append(f"| {' | '.join(cells)} |")
    reached = {
        f"an error of at most {ERROR:.0%}": [float(x["error"]) <= ERROR for x in lines],
        f"a Spearman correlation of {SPEARMAN}": [float(x["spearman"]) >= SPEARMAN for x in lines],
        f"a Kendall tau of {KENDALL} among the fastest quarter": [
            float(x["kendall_quarter"]) >= KENDALL for x in lines
        ],
        f"a peak of memory within {PEAK:.0%}": [float(x["peak_error"]) <= PEAK for x in lines],
        f"within {PEAK:.0%} with little memory": [
            float(x["filled_peak_error"]) <= PEAK
            for x in lines
            if not math.isnan(float(x["filled_peak_error"]))
        ],
        f"within {PEAK:.0%} of what the allocator gave out": [
            float(x["allocated_error"]) <= PEAK
            for x in lines
            if not math.isnan(float(x["allocated_error"]))
        ],
        f"costs in {CALIBRATION_SECONDS:g} s": [
            float(x["calibration_seconds"]) <= CALIBRATION_SECONDS for x in lines
        ],
    }
    said = "; ".join(f"{what}: {sum(ok)} of {len(ok)}" for what, ok in reached.items() if ok)
    return "\n".join([*text, "", f"Wanted of every line, and reached: {said}."])


def _percent(value: Any) -> str:
    return "" if math.isnan(float(value)) else f"{float(value):.1%}"


def _number(value: Any) -> str:
    return "" if math.isnan(float(value)) else f"{float(value):.3f}"


def analyse(folder: Path) -> list[dict[str, Any]]:
    """Fits and predicts all that was measured; writes tables, plot and README."""
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "raw").glob("*.json.gz")):
        if ".problem." in path.name:
            continue
        record, problem = Record.load(path)
        try:
            found = calibrated(problem, record)
        except PlacewrightError as fault:
            print(f"{path.name}: {fault}", flush=True)
            continue
        rows += predicted(problem, record, found)
    if not rows:
        print(f"nothing in {folder / 'raw'} can be compared yet")
        return []
    lines = summary(rows)
    write_csv(folder / "fidelity.csv", rows)
    write_csv(folder / "summary.csv", lines)
    figures.fidelity_of_machines(rows, folder / "fidelity.svg")
    hardware = ", ".join(dict.fromkeys(str(row["hardware"]) for row in rows))
    (folder / "README.md").write_text(
        f"""# Predicted and measured steps of PyTorch models on a GPU and its parts

{table(lines)}

Measured on {hardware}. {len(rows)} placements of {len(lines)} pairs of model and machine, each
calibrated on {FIT} varied placements, single devices and what HEFT proposes, and checked on others:
random, contiguous, proposed by the classical methods, and the best found in the simulator. Those
that were predicted to take over {SLOWEST:g} times as long as the best single device were not run.
`streams4`: four streams of the GPU. `parts4`: four partitions of 32 multiprocessors that exchange
tensors through pinned memory of the host, and its CPU. `gpu+cpu`: the whole GPU and the CPU. All
GPU work of a step is one captured CUDA graph. Of each run the lower quartile of the steps counts;
"of repeating" and "with itself" compare two passes or, where there was time for one only, every
second step with the others. "Peak memory" is the runner's own account of each device, "of the
allocator" what torch's allocator gave out (where the GPU is one memory): with memory to spare, a
tensor that another stream reads is kept until its own stream has waited for that one anyhow, which
the prediction leaves out. "With little memory" is the error of the runner's account where each
device has 1/{FILLED} of what it is predicted to need, "of those ran" how many of such runs came to
their end.
"Calibrated in": measuring all that costs are made from, without starting the process.

What was fitted and predicted comes from these measurements, and needs no GPU. {made_by()}

![Predicted and measured](fidelity.svg)
""",
        encoding="utf-8",
    )
    print(table(lines), flush=True)
    return lines


# --- the command ---------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    if options.propose:
        propose(options)
        return 0
    done = options.analyse or _measure_all(options)
    if not options.measure:
        analyse(options.output)
    return 0 if done else MORE


def _measure_all(options: argparse.Namespace) -> bool:
    """In waves: the processes of some pairs start side by side, then each has the machine. Says
    whether all is measured."""
    end = time.monotonic() + options.seconds
    programs: dict[str, Future[Any]] = {}
    # The first models and machines are the most important: by turns, so that neither is left out.
    pairs = [(model, machine) for model in options.models for machine in options.machines]
    pairs.sort(key=lambda p: options.models.index(p[0]) + options.machines.index(p[1]))
    everything = pairs
    passes = {pair: _passes(_path(options, *pair)) for pair in pairs}
    pairs = sorted((pair for pair in pairs if passes[pair] < 2), key=passes.__getitem__)
    first = True
    reading = [model for model in options.models if model in {model for model, _ in pairs}]
    pool = ProcessPoolExecutor(
        max(1, min(len(reading), os.cpu_count() or 1)), multiprocessing.get_context("spawn")
    )
    programs = {model: pool.submit(_program, model, options.tiny) for model in reading}
    pool.shutdown(wait=False)
    while pairs and (first or time.monotonic() + LEAST_SECONDS < end):
        first = False
        wave, pairs = pairs[: options.wave], pairs[options.wave :]
        # Processes end with the thread that started them.
        with ThreadPoolExecutor(options.wave) as threads, ExitStack() as runners:
            started = []
            for model, machine in wave:
                try:
                    prepared = _prepared(programs[model].result(), model, machine, options)
                except Exception as fault:  # the others are measured all the same
                    _say_fault(model, machine, fault)
                    continue
                runners.enter_context(prepared.runner)
                started.append((prepared, threads.submit(prepared.runner.start)))
            for prepared, _ in started:
                if not prepared.record.runs:
                    _warm_up(prepared.problem)
            for _, future in started:
                wait([future])
            for number, (prepared, future) in enumerate(started):
                share = (end - time.monotonic()) / max(1, len(started) - number)
                try:
                    future.result()
                    prepared.measure(min(options.each, share), options.placements)
                except Exception as fault:
                    _say_fault(*prepared.pair, fault)
                prepared.runner.close()  # the GPU's memory is for the others
    print(f"{max(0.0, end - time.monotonic()):.0f} s left", flush=True)
    return all(_passes(_path(options, *pair)) > 1 for pair in everything)


def propose(options: argparse.Namespace) -> None:
    """Placements for what is calibrated and has none."""
    for model in options.models:
        for machine in options.machines:
            path = _path(options, model, machine)
            record, problem = Record.load(path) if path.exists() else (Record({}), None)
            if problem is None or record.demands is None or record.runs:
                continue
            record.runs = _to_measure(problem, record, options.placements)
            record.save(path, problem)
            print(f"{model} on {machine}: {len(record.runs)} placements", flush=True)


def _path(options: argparse.Namespace, model: str, machine: str) -> Path:
    path: Path = options.output / "raw" / f"{model}-{machine.replace('+', '-')}.json.gz"
    return path


def _passes(path: Path) -> int:
    """How often all placements were measured that are not fitted to; two times are all."""
    if not path.exists():
        return 0
    record, _ = Record.load(path)
    fresh = [run for run in record.runs if not run["fit"]]
    return min((2 if _failed(run) else len(run["passes"]) for run in fresh), default=0)


def _warm_up(problem: Problem) -> None:
    """Compiles what placements are made and simulated with, while processes start: on a fresh
    machine that takes half a minute, in which a GPU would wait."""
    Simulator(problem).run(np.zeros((1, problem.num_groups), dtype=np.int32))
    heft(problem)
    for name in registry.installed(CLASSICAL)[0]:
        (placer,) = registry.make([name], problem)
        placer.ask(1)
    place(problem, method="local-search", trials=8, op_level=False)


def _say_fault(model: str, machine: str, fault: Exception) -> None:
    print(f"{model} on {machine}: {type(fault).__name__}: {fault}", flush=True)


@dataclass
class Prepared:
    """A model on a machine, about to be measured."""

    pair: tuple[str, str]
    path: Path
    record: Record
    problem: Problem
    runner: Any

    def measure(self, seconds: float, count: int) -> None:
        began = saved = time.monotonic()
        try:
            for _ in measure(
                self.problem, self.runner, self.record, count=count, until=began + seconds
            ):
                if time.monotonic() > saved + 3.0:
                    self.record.save(self.path, self.problem)
                    saved = time.monotonic()
        finally:
            self.record.save(self.path, self.problem)
        runs = sum(len(run["passes"]) for run in self.record.runs)
        took = time.monotonic() - began
        print(f"{self.pair[0]} on {self.pair[1]}: {runs} runs so far, {took:.0f} s", flush=True)


def _program(model: str, tiny: bool) -> Any:
    """In a process of its own, as reading a model keeps one core busy."""
    from benchmarks.fidelity_gpu_models import program

    return program(model, tiny=tiny)


def _prepared(program: Any, model: str, machine: str, options: argparse.Namespace) -> Prepared:
    from placewright.backends.pytorch import TorchRunConfig
    from placewright.backends.pytorch.runner import TorchRunner

    path = _path(options, model, machine)
    if path.exists():
        record, problem = Record.load(path)
    else:
        cluster = replace(chosen(list(MACHINES[machine])), name=machine)
        record = Record({"model": model, "machine": machine, "hardware": _hardware(cluster)})
        problem = make_problem(program.graph, cluster).refined
    config = TorchRunConfig(
        steps=options.steps, max_steps=options.steps, time_limit_seconds=30.0, start_seconds=180.0
    )
    runner = TorchRunner(program, problem.cluster, config)
    return Prepared((model, machine), path, record, problem, runner)


def _hardware(cluster: Cluster) -> str:
    import torch

    if torch.cuda.is_available() and any(device.type == "gpu" for device in cluster.devices):
        gpu = f"one {torch.cuda.get_device_name(0)} beside "
    else:
        gpu = ""
    return f"{gpu}{os.cpu_count()} cores of {cpu_name()}, torch {torch.__version__}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=ON_GPU)
    parser.add_argument("--placements", type=int, default=60, help="that are not fitted to")
    parser.add_argument("--steps", type=int, default=8, help="of each run; the first is dropped")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all measuring")
    parser.add_argument(
        "--each", type=float, default=25.0, help="for a model on a machine, at most"
    )
    parser.add_argument("--wave", type=int, default=9, help="pairs whose processes start at once")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU runs quickly")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--analyse", action="store_true", help="measure nothing")
    only.add_argument("--propose", action="store_true", help="placements to measure, no more")
    only.add_argument("--measure", action="store_true", help="analyse nothing yet")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
