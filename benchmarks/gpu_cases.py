"""The cases of `benchmarks.paper_gpu`: models on machines made of partitions of one GPU, what is
known of their costs, and what the classical methods propose for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from placewright import methods as registry
from placewright.backends.base import Run, Runner
from placewright.backends.pytorch import TorchRunConfig
from placewright.calibration import SPREAD, Calibration, corrected, measure_links, op_table
from placewright.cluster import Cluster
from placewright.costs import Costs, Source
from placewright.errors import PlacewrightError, WorkerError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Graph, frozen
from placewright.measurement import Trial, better
from placewright.placement import Placement, everything_on
from placewright.placers.expert import expert
from placewright.problem import Problem, make_problem
from placewright.session.real import RealRuns
from placewright.simulator import Simulator


class Machine(NamedTuple):
    """A machine that one GPU, or some cores, are made into."""

    preset: str
    tf32: bool
    said: str
    """In tables."""


MACHINES = {
    "paper": Machine("h200-parts4x8", False, "8 SMs each, fp32"),
    "modern": Machine("h200-parts4", True, "32 SMs each, TF32"),
    "cpu": Machine("cpu2", False, "two sets of cores"),
}

NMT_FITS = 0.75
"""Memory of a partition, as a share of what NMT's step needs on one device: in the paper it does
not fit either. More where the expert's placement needs more, which fits in the paper."""

METHODS = ("scotch", "mincut", "expert", "heft", "m-etf")
"""Classical methods; the first two need packages that a machine with a GPU may not have."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine."""

    model: str
    machine: str
    partitions: int
    """GPUs; 0 for CPU devices alone."""

    @property
    def name(self) -> str:
        return f"{self.model}-{self.machine}-{self.partitions}"

    @staticmethod
    def of(name: str) -> Case:
        model, machine, partitions = name.rsplit("-", 2)
        if machine not in MACHINES or not partitions.isdigit():
            raise SystemExit(f"case {name!r}: expected MODEL-MACHINE-PARTITIONS")
        return Case(model=model, machine=machine, partitions=int(partitions))

    @property
    def run_config(self) -> TorchRunConfig:
        # Captured steps differ by some tenths of a percent: one that is timed will do in a search.
        return TorchRunConfig(
            steps=2, max_steps=2 if self.partitions else 4, tf32=MACHINES[self.machine].tf32,
            time_limit_seconds=60.0,
        )  # fmt: skip


IN_ORDER = tuple(
    Case(model=model, machine=machine, partitions=partitions)
    for machine, partitions in (("paper", 4), ("paper", 2), ("modern", 4), ("modern", 2))
    for model in ("nmt", "inception_v3", "rnnlm")
)
"""The most important first."""


def problem_of(case: Case, graph: Graph) -> Problem:
    """NMT's partitions have less memory than its step needs; those of the others, as the preset."""
    cluster = _without(Cluster.load(MACHINES[case.machine].preset), case.partitions)
    problem = make_problem(graph, cluster)
    if case.model == "nmt" and case.partitions:
        most = max(device.memory_bytes for device in cluster.devices)
        free = make_problem(graph, _limited(cluster, max(most, 1 << 40)))
        needs = max(_peaks(free, _on_first_gpu(free)))
        by_hand = max(_peaks(free, placement)[1:] for placement in expert(free))
        limit = max(int(NMT_FITS * needs), int(1.03 * max(by_hand)))
        problem = make_problem(graph, _limited(cluster, min(most, limit, int(0.97 * needs))))
    return problem


def _without(cluster: Cluster, partitions: int) -> Cluster:
    """The CPU and the first GPUs."""
    gpus = [device for device in cluster.devices if device.type == "gpu"][:partitions]
    kept = tuple(d for d in cluster.devices if d.type != "gpu" or d in gpus)
    gone = {device.name for device in cluster.devices} - {device.name for device in kept}
    links = tuple(
        replace(link, pairs=tuple(pair for pair in link.pairs if not gone & set(pair)))
        for link in cluster.links
    )
    return replace(cluster, devices=kept, links=tuple(link for link in links if link.pairs))


def _limited(cluster: Cluster, memory_bytes: int) -> Cluster:
    devices = tuple(
        replace(d, memory_bytes=memory_bytes) if d.type == "gpu" else d for d in cluster.devices
    )
    return replace(cluster, devices=devices)


def _on_first_gpu(problem: Problem) -> Placement:
    first = next(n for n, d in enumerate(problem.cluster.devices) if d.type == "gpu")
    return everything_on(problem, first)


def _peaks(problem: Problem, placement: Placement) -> list[int]:
    """Of each device, the CPU first."""
    simulation = Simulator(problem).run(placement.devices[np.newaxis])
    peaks: list[int] = simulation.peak_bytes[0].tolist()
    return peaks


# --- costs ---------------------------------------------------------------------------------------


def calibrated(real: RealRuns, runner: Runner) -> Calibration:
    """Costs from few runs: what fits one GPU, or else the expert's placement, is traced; the CPU's
    estimates are scaled, as whole steps take long there. The rest is fitted to four step times."""
    problem = real.problem
    devices = problem.cluster.devices
    number_of = {everything_on(problem, n): n for n in reversed(range(len(devices)))}
    singles = real.references["single"]
    gpus = [p for p in singles if devices[number_of[p]].type == "gpu"]
    runs = _measured(real, gpus or singles, "single", 1)
    traced = {number_of[p]: run for p, run in runs.items() if run.trace is not None}
    for run in _measured(real, real.references["expert"], "expert", 0 if traced else 1).values():
        if run.trace is not None:
            traced[SPREAD] = run
    real.measure([(p, "single") for p in singles if p not in real.samples])
    if not traced:  # not even by hand: then what a scheduler makes of the estimates
        heft = proposed("heft", problem)
        for run in _measured(real, [heft] if heft else [], "heft", 1).values():
            if run.trace is not None:
                traced[SPREAD] = run
    table = op_table(problem, traced)
    cluster = problem.cluster
    try:
        cluster = measure_links(runner, cluster)
    except WorkerError as fault:
        print(f"links are taken to be as the cluster says: {fault}", flush=True)
    found = Calibration(table=_with_cpu(real, table), cluster=cluster)
    under = found.problem(problem)
    heft = proposed("heft", under)
    if heft is not None:
        real.measure([(heft, "heft")])
    on_cpu = [p for p in singles if gpus and p not in gpus]
    known = {
        p: real.pooled(p).mean_seconds
        for p in real.samples
        if real.pooled(p).ok and p not in on_cpu
    }
    if len(known) >= 2:
        found = corrected(problem, found, list(known), list(known.values()))
    return found


def _measured(
    real: RealRuns, placements: Sequence[Placement], placer: str, traces: int
) -> dict[Placement, Run]:
    runs = real.measure([(placement, placer) for placement in placements], traces=traces)
    return {p: run for p, run in runs.items() if run.measurement.ok}


def _with_cpu(real: RealRuns, table: Costs) -> Costs:
    """The estimates of CPUs that were not traced, scaled to what the whole step took."""
    problem = real.problem
    seconds, source = table.op_seconds.copy(), table.source.copy()
    for number, kind in enumerate(problem.cluster.kinds):
        mine = [n for n, d in enumerate(problem.cluster.devices) if d.kind == kind]
        single = everything_on(problem, mine[0])
        if (source[number] >= Source.TABLE).any() or single not in real.samples:
            continue
        measured = real.pooled(single).mean_seconds
        predicted = float(Simulator(problem).run(single.devices[np.newaxis]).step_seconds[0])
        if math.isfinite(measured) and predicted > 0:
            estimated = problem.costs.op_seconds[number]
            runs = np.isfinite(estimated)
            seconds[number, runs] = estimated[runs] * measured / predicted
            source[number, runs] = Source.TABLE
    return replace(table, op_seconds=frozen(seconds), source=frozen(source))


# --- what classical methods propose --------------------------------------------------------------


def proposed(method: str, problem: Problem) -> Placement | None:
    """The best of what a method proposes, by these costs; repaired where it does not fit."""
    (placer,) = registry.make([method], problem)
    evaluator = SimulatedEvaluator(problem)
    best: Trial | None = None
    for _ in range(20):
        asked = placer.ask(problem.num_devices)
        if not asked:
            break
        trials = [
            Trial(placement=placement, measurement=measurement, placer=method)
            for placement, measurement in zip(asked, evaluator.evaluate(asked), strict=True)
        ]
        placer.tell(trials)
        for trial in trials:
            best = better(best, trial)
    return None if best is None else best.placement


class Proposal(NamedTuple):
    """What a classical method proposes, and what it knew of costs."""

    placement: Placement
    costs: str


def classical(
    problem: Problem, under: Problem, ready: Mapping[str, Proposal]
) -> tuple[dict[str, Proposal], dict[str, str]]:
    """Of each method; and why there is none of the others. Those that are `ready` are taken where a
    method is not installed."""
    found: dict[str, Proposal] = {}
    missing: dict[str, str] = {}
    for method in METHODS:
        reason = "not installed on the machine, and nothing was prepared"
        if registry.METHODS[method].is_installed:
            reason = "proposes nothing"
            try:
                placement = proposed(method, under)
            except PlacewrightError as fault:
                placement, reason = None, str(fault)
            if placement is not None:
                found[method] = Proposal(placement, "calibrated")
                continue
        if method in ready:
            found[method] = ready[method]
        else:
            missing[method] = reason
    return found, missing


def prepare(path: Path, problem: Problem, costs: str) -> None:
    """Writes what the methods that need packages propose, by names, so that a graph that another
    version of torch captured a bit differently has them as well."""
    document: dict[str, Any] = {"costs": costs, "placements": {}}
    names, devices = problem.grouping.names, problem.cluster.device_names
    for method in registry.installed(("scotch", "mincut"))[0]:
        placement = proposed(method, problem)
        if placement is not None:
            where = [devices[number] for number in placement.devices]
            document["placements"][method] = dict(zip(names, where, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")


def prepared(path: Path, problem: Problem) -> dict[str, Proposal]:
    """What was written there; nothing where nothing was."""
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return {
        method: Proposal(_by_names(problem, where), f"{document['costs']}, prepared")
        for method, where in document["placements"].items()
    }


def _by_names(problem: Problem, where: Mapping[str, str]) -> Placement:
    """Groups that are not named go where the one before them went."""
    numbers = {name: number for number, name in enumerate(problem.cluster.device_names)}
    devices, last = [], 0
    for name in problem.grouping.names:
        last = numbers.get(where.get(name, ""), last)
        devices.append(last)
    return Placement.of(problem, devices)


def text_of(placement: Placement) -> str:
    """As it stands in a file: the number of each group's device."""
    return "".join(map(str, placement.devices.tolist()))


def placement_of(problem: Problem, text: str) -> Placement:
    return Placement.of(problem, [int(digit) for digit in text])


def cases_of(names: Iterable[str]) -> list[Case]:
    return [Case.of(name) for name in names]
