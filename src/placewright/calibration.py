"""Makes the simulator predict this machine: costs and links from measurements.

Three sources, in this order. Op times come from TensorFlow's own trace of whole steps, one for each
kind of device: ops timed alone are 20-40% too fast. Links are timed with chains of real tensors.
What is left (dispatching, packing and unpacking by the cores that compute, how much devices slow
each other down) is fitted to the step times of a few placements.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from placewright import cluster as cluster_format
from placewright.backends.config import RunConfig
from placewright.backends.tensorflow.runner import Run, TensorFlowRunner
from placewright.cluster import Cluster, Link
from placewright.costs import FORMAT, Costs, Source, estimate_costs
from placewright.errors import CostsError, WorkerError
from placewright.files import read_json, write_json
from placewright.graph import FloatArray, Graph, frozen
from placewright.placement import Placement
from placewright.placers.heft import heft
from placewright.problem import Problem
from placewright.simulator import Simulator

logger = logging.getLogger(__name__)

LINK_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Sizes of the tensors that links are timed with."""
_HOPS = 16
"""How often each of these goes over the link, there and back, in one step."""


class Pace(NamedTuple):
    """How fast a machine usually is, told by how long it takes for one placement."""

    devices: tuple[int, ...]
    """Of the groups."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was found out: a table of op times, and the cluster with its links as measured."""

    table: Costs
    cluster: Cluster
    pace: Pace | None = None
    """How fast the machine was, where that was measured just now."""
    fitted_to: tuple[Placement, ...] = ()
    """What it was fitted to, where that was measured just now."""

    def problem(self, problem: Problem) -> Problem:
        """The same problem under these costs."""
        return dataclasses.replace(
            problem,
            cluster=self.cluster,
            costs=estimate_costs(problem.graph, self.cluster, [self.table]),
        )

    def save(self, path: str | Path, graph: Graph) -> None:
        """A costs file that also holds the cluster."""
        known = self.table.source >= Source.GRAPH
        document = {
            "format": FORMAT,
            "graph": graph.fingerprint,
            "kinds": {
                kind: {
                    graph.op_names[op]: float(self.table.op_seconds[k, op])
                    for op in np.flatnonzero(known[k])
                }
                for k, kind in enumerate(self.table.kinds)
            },
            "cluster": cluster_format.to_document(self.cluster),
        }
        write_json(path, document, CostsError)

    @staticmethod
    def load(path: str | Path, problem: Problem) -> Calibration:
        """What `save` wrote, for a problem of that graph and cluster, and no other."""
        document = read_json(path, CostsError, what="costs")
        if not isinstance(document, dict) or "cluster" not in document:
            raise CostsError(f"{path}: no costs that a calibration wrote; move it away")
        if document.get("graph") != problem.graph.fingerprint:
            raise CostsError(f"{path}: costs of another graph; move it away")
        found = cluster_format.from_document(document["cluster"], where=str(path))
        own = problem.cluster
        if not _same_devices(found, own):
            raise CostsError(
                f"{path}: costs of cluster {found.name!r}, not of {own.name!r}; move it away"
            )
        return Calibration(
            table=Costs.from_json(document, problem.graph, where=str(path)),
            cluster=_with_own_limits(found, own),
        )


def calibrated_cluster(path: str | Path, cluster: Cluster) -> Cluster:
    """The cluster as a costs file found it: where it says nothing, or is of another, unchanged."""
    document = read_json(path, CostsError, what="costs")
    described = document.get("cluster") if isinstance(document, dict) else None
    if described is None:
        return cluster
    found = cluster_format.from_document(described, where=str(path))
    if _same_devices(found, cluster):
        return _with_own_limits(found, cluster)
    logger.warning(
        "%s: links were measured on cluster %r with %s; those of %r are taken as it describes them",
        path,
        found.name,
        ", ".join(found.device_names),
        cluster.name,
    )
    return cluster


def _same_devices(found: Cluster, cluster: Cluster) -> bool:
    return (found.name, found.device_names) == (cluster.name, cluster.device_names)


def _with_own_limits(found: Cluster, cluster: Cluster) -> Cluster:
    """The user's own limits on memory stay."""
    devices = tuple(
        dataclasses.replace(device, memory_bytes=own.memory_bytes)
        for device, own in zip(found.devices, cluster.devices, strict=True)
    )
    return dataclasses.replace(found, devices=devices)


# --- ops -----------------------------------------------------------------------------------------


def op_table(problem: Problem, runs: Mapping[int, Run]) -> Costs:
    """Op times from traced runs: device number -> a run with everything (that can be) on it.

    The times are scaled, or given an equal share of what is missing for dispatching, so that those
    on that device add up to the step as it is without tracing. What several devices of a kind say
    is averaged.
    """
    graph, cluster = problem.graph, problem.cluster
    kinds = tuple(kind.name for kind in cluster.kinds)
    total = np.zeros((len(kinds), graph.num_ops))
    count = np.zeros(total.shape)
    for device, run in runs.items():
        assert run.trace is not None
        traced = np.array([run.trace["ops"].get(name, np.nan) for name in graph.op_names])
        ran_on = np.array([run.trace["devices"].get(name, -1) for name in graph.op_names])
        if cluster.devices[device].kind.slots == 1:
            own = ran_on == device
            traced[own] = _as_long_as(traced[own], run.measurement.mean_seconds)
        for other in range(cluster.num_devices):
            k, on = int(cluster.kind_of_device[other]), ran_on == other
            total[k, on] += traced[on]
            count[k, on] += 1
    return Costs(
        kinds=kinds,
        op_seconds=frozen(total / np.maximum(count, 1)),
        source=frozen(np.where(count > 0, Source.TABLE, Source.ROOFLINE).astype(np.uint8)),
    )


def _as_long_as(traced: FloatArray, step: float) -> FloatArray:
    total = float(traced.sum())
    if total <= 0:
        return traced
    if total > step:  # tracing itself takes time
        return traced * (step / total)
    return traced + (step - total) / len(traced)


# --- links ---------------------------------------------------------------------------------------


def measure_links(cluster: Cluster, config: RunConfig) -> Cluster:
    """The cluster with latency and bandwidth of its links as measured with real tensors.

    Links to switches are left as they are: only whole routes can be timed.
    """
    program = _chains()
    names = program.graph.op_names
    start = [0] * len(names)
    links = []
    quiet = dataclasses.replace(config, check=False, limit_memory=False)
    with TensorFlowRunner(program, cluster, quiet) as runner:
        base = _seconds(runner.measure(start))
        for link in cluster.links:
            ends = [
                cluster.device_names.index(e) for e in link.pairs[0] if e in cluster.device_names
            ]
            if len(ends) < 2:
                links.append(link)
                continue
            home = _seconds(runner.measure([ends[0]] * len(names))) if ends[0] else base
            hops = []
            for size in LINK_BYTES:
                devices = [
                    ends[_hop(name) % 2] if name.startswith(f"bytes_{size}/") else ends[0]
                    for name in names
                ]
                seconds = _seconds(runner.measure(devices))
                hops.append(max(1e-9, (seconds - home) / _HOPS))
            links.append(_fit_link(link, hops))
    return dataclasses.replace(cluster, links=tuple(links))


def _seconds(run: Run) -> float:
    if not run.measurement.ok:
        raise WorkerError(f"links could not be timed: {run.measurement.reason}")
    return float(np.median(run.measurement.step_seconds))


def _hop(name: str) -> int:
    last = name.rpartition("/hop_")[2]
    return int(last) if last.isdecimal() else 0


def _chains() -> Any:
    """For every size a tensor that is handed on from op to op."""
    from placewright.backends import load_program
    from placewright.backends.tensorflow._tf import tf

    graph = tf.Graph()
    with graph.as_default():
        ends = []
        for size in LINK_BYTES:
            with tf.compat.v1.name_scope(f"bytes_{size}"):
                tensor = tf.fill([size // 4], 1.0, name="hop_0")
                for hop in range(1, _HOPS + 1):
                    tensor = tf.identity(tensor, name=f"hop_{hop}")
                ends.append(tensor.op.name)
    return load_program(graph, fetches=ends)


def _fit_link(link: Link, hops: Sequence[float]) -> Link:
    """Latency and bandwidth whose relative errors over all sizes are least."""
    sizes, seconds = np.array(LINK_BYTES, dtype=float), np.array(hops)
    weights = 1.0 / seconds
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, np.newaxis]
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)
    latency = float(max(latency, 1e-6))
    return dataclasses.replace(
        link,
        latency_seconds=latency,
        bandwidth=float(1.0 / max(per_byte, 1e-13)),
        gap_seconds=None if link.gap_seconds is None else min(link.gap_seconds, latency),
    )


# --- fitting -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factors on what was measured piece by piece, so that whole steps come out right."""

    ops: float = 1.0
    latency: float = 1.0
    bandwidth: float = 1.0
    gap: float = 1.0
    """The part of the latency during which the link is occupied."""
    overhead: float = 0.0
    """Seconds of a busy core per transfer, as a share of the link's latency as it was measured."""
    overhead_bytes: float = 0.0
    """The same per byte, as a share of the link's time per byte."""
    contention: float = 0.0
    """Of the cluster."""

    def apply(self, problem: Problem) -> Problem:
        links = tuple(self._link(link) for link in problem.cluster.links)
        # On processors what is fitted is the whole of an op, issuing it included.
        whole = np.array([[kind.type == "cpu"] for kind in problem.cluster.kinds])
        overhead = np.where(whole, problem.costs.overhead_seconds, 0.0)
        costs = dataclasses.replace(
            problem.costs,
            op_seconds=frozen((problem.costs.op_seconds + overhead) * self.ops),
            overhead_seconds=frozen(problem.costs.overhead_seconds - overhead),
        )
        cluster = dataclasses.replace(problem.cluster, links=links, contention=self.contention)
        return dataclasses.replace(problem, cluster=cluster, costs=costs)

    def _link(self, link: Link) -> Link:
        share = self.overhead_bytes
        latency = link.latency_seconds * self.latency
        return dataclasses.replace(
            link,
            latency_seconds=latency,
            bandwidth=link.bandwidth * self.bandwidth,
            gap_seconds=latency * self.gap,
            overhead_seconds=link.latency_seconds * self.overhead,
            overhead_bandwidth=link.bandwidth / share if share else math.inf,
        )


_STARTS = tuple(
    (gap, overhead, share)
    for gap in (0.1, 0.4, 1.0)
    for overhead, share in ((0.0, 0.0), (0.3, 0.3), (1.0, 0.3), (3.0, 0.3), (1.0, 1.0))
)
"""Gaps and shares of overhead that the fit begins with: the best of these."""

_RANGES = {
    "ops": (0.05, 20.0),
    "latency": (0.05, 20.0),
    "bandwidth": (0.05, 20.0),
    "gap": (0.01, 1.0),
    "overhead": (0.0, 40.0),
    "overhead_bytes": (0.0, 40.0),
    "contention": (0.0, 4.0),
}

_STEPS = (1.6, 1.25, 1.1, 1.04)
"""Factors by which each setting is tried to be changed, coarse to fine."""


def fit(
    problem: Problem, placements: Sequence[Placement], seconds: Sequence[float]
) -> tuple[Correction, float]:
    """The correction under which the simulator comes closest to these step times, and its mean
    error (as a share).

    Coordinate descent on the mean absolute logarithm, which an outlier moves little. Each try
    simulates all placements, which takes milliseconds.
    """
    rows = np.stack([placement.devices for placement in placements])
    truth = np.asarray(seconds)
    # A machine that was slower when ops were traced has made them all too long. Single devices, to
    # which links are nothing, say by how much. From elsewhere the descent would have to change ops
    # and overheads at the same time, and ends half-way: what computes is then predicted too slow,
    # and what sends too fast.
    usual = 1.0
    single = (rows == rows[:, :1]).all(axis=1)
    if single.any():
        predicted = Simulator(problem).run(rows[single]).step_seconds
        usual = math.exp(float(np.mean(np.log(truth[single] / predicted))))
        usual = min(max(usual, _RANGES["ops"][0]), _RANGES["ops"][1])

    def error(correction: Correction) -> float:
        predicted = Simulator(correction.apply(problem)).run(rows).step_seconds
        # A whisper of regularisation: what the measurements do not say stays as it is.
        drift = sum(abs(math.log(getattr(correction, name))) for name in ("latency", "bandwidth"))
        drift += abs(math.log(correction.ops / usual))
        drift += abs(correction.contention - problem.cluster.contention)
        return float(np.mean(np.abs(np.log(predicted / truth)))) + 1e-3 * drift

    # From no overhead the way to the right one can lead over a hill, so there are several starts;
    # the first leaves links as they are.
    starts = [dataclasses.replace(_unchanged(problem.cluster), ops=usual)]
    starts += [
        Correction(
            ops=usual, gap=gap, overhead=overhead, overhead_bytes=share, contention=contention
        )
        for gap, overhead, share in _STARTS
        for contention in dict.fromkeys((problem.cluster.contention, 0.0))
    ]
    least, _, best = min((error(start), number, start) for number, start in enumerate(starts))
    for factor in _STEPS:
        improved = True
        while improved:
            improved = False
            for candidate in _neighbours(best, factor):
                found = error(candidate)
                if found < least - 1e-6:
                    best, least, improved = candidate, found, True
    return best, least


def _unchanged(cluster: Cluster) -> Correction:
    """The correction under which links are what they are, as far as the first one tells."""
    if not cluster.links:
        return Correction(contention=cluster.contention)
    link = cluster.links[0]
    latency = max(link.latency_seconds, 1e-9)
    gap = latency if link.gap_seconds is None else link.gap_seconds
    return Correction(
        gap=min(max(gap / latency, _RANGES["gap"][0]), 1.0),
        overhead=link.overhead_seconds / latency,
        overhead_bytes=link.bandwidth / link.overhead_bandwidth,
        contention=cluster.contention,
    )


def _neighbours(correction: Correction, factor: float) -> Iterator[Correction]:
    for name, (low, high) in _RANGES.items():
        value = getattr(correction, name)
        begin = (0.2, 0.05) if value == 0.0 else ()
        for changed in (value * factor, value / factor, *begin):
            clipped = min(max(changed, low), high)
            if clipped != value:
                yield dataclasses.replace(correction, **{name: clipped})


# --- the whole -----------------------------------------------------------------------------------


def calibrate(
    problem: Problem,
    runner: TensorFlowRunner,
    placements: Sequence[Placement],
    *,
    traces: int = 5,
    forced: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Calibrates for a problem on the runner's devices; the rest is fitted to `placements`.

    The single-device placements are always among those, and some that keep all devices busy. Raises
    `CostsError` for a calibration that cannot be trusted (see `why_distrusted`) unless `forced`.
    """
    say("timing ops")
    traced = {}
    for device in range(problem.num_devices):
        single = everything_on(problem, device)
        run = runner.measure(single.devices[problem.grouping.group_of], traces=traces)
        if run.measurement.ok:
            traced[device] = run
        else:
            say(f"{problem.cluster.device_names[device]}: {run.measurement.reason}")
    if not traced:
        raise WorkerError("no device can run the model alone, so its ops cannot be timed")
    table = op_table(problem, traced)
    cluster = problem.cluster
    if problem.num_devices > 1:
        say("timing links")
        runner.close()  # two sets of processes would share the cores
        cluster = measure_links(cluster, runner.config)
    found = Calibration(table=table, cluster=cluster)
    say("fitting")
    # Single devices once more: the machine may have been faster or slower when they were traced.
    singles = [everything_on(problem, device) for device in traced]
    placements = list(dict.fromkeys([*singles, *placements, *_overlapping(problem, found)]))
    timed, pace = in_turns(problem, runner, placements)
    if not timed:
        raise WorkerError("none of the placements ran, so there is nothing to fit the costs to")
    seconds = [times.seconds for times in timed.values()]
    fitted = corrected(problem, found, list(timed), seconds)
    predicted = Simulator(fitted.problem(problem)).run(
        np.stack([placement.devices for placement in timed])
    )
    loads = [run.foreign_load for run in traced.values() if run.foreign_load is not None]
    reason = why_distrusted(predicted.step_seconds.tolist(), seconds, max(loads, default=0.0))
    if reason and not forced:
        raise CostsError(f"this calibration is not to be trusted: {reason}; forced=True keeps it")
    if reason:
        logger.warning("this calibration is not to be trusted: %s", reason)
    return dataclasses.replace(fitted, pace=pace, fitted_to=tuple(timed))


MOST_FOREIGN_LOAD = 0.25
"""Share of the cores that others may take while ops are timed."""
LEAST_RANK_CORRELATION = 0.5
"""Of prediction and measurement, among the faster half of what was measured: below it, a search
under these costs would choose among the best as if by lot."""
_LEAST_TO_RANK = 6
"""Placements of which a rank correlation says anything."""
_LEAST_SPREAD = 0.1
"""Where the slowest of them takes only so much longer than the fastest, ranks are noise."""


def why_distrusted(
    predicted: Sequence[float], measured: Sequence[float], foreign_load: float
) -> str:
    """Why costs that predict these step times should not be used; empty where nothing speaks
    against it."""
    if foreign_load > MOST_FOREIGN_LOAD:
        return f"other processes took {foreign_load:.0%} of the cores while ops were timed"
    fastest = np.argsort(measured, kind="stable")[: (len(measured) + 1) // 2]
    best = [measured[number] for number in fastest]
    if len(best) < _LEAST_TO_RANK or max(best) < (1 + _LEAST_SPREAD) * min(best):
        return ""
    agreement = rank_correlation([predicted[number] for number in fastest], best)
    if agreement < LEAST_RANK_CORRELATION:
        return (
            f"among the faster half of {len(measured)} placements, prediction and measurement "
            f"agree with a rank correlation of only {agreement:.2f}"
        )
    return ""


def _overlapping(problem: Problem, calibration: Calibration) -> list[Placement]:
    """What a scheduler proposes, for the links there are and for some that take no time.

    These keep devices busy at the same time, which random placements hardly do, and only so it is
    seen how much they slow each other down.
    """
    under = calibration.problem(problem)
    links = tuple(
        dataclasses.replace(
            link, latency_seconds=0.0, gap_seconds=None, bandwidth=1e18, overhead_seconds=0.0,
            overhead_bandwidth=math.inf,
        )
        for link in under.cluster.links
    )  # fmt: skip
    free = dataclasses.replace(under, cluster=dataclasses.replace(under.cluster, links=links))
    proposed = np.stack([placement.devices for placement in (*heft(under), *heft(free))])
    fits = Simulator(under).run(proposed).ok
    return [
        Placement.of(problem, devices) for devices in proposed[fits] if len(np.unique(devices)) > 1
    ]


_TURN = 3
"""Placements between two runs of the reference."""
_AROUND = 3
"""Runs of the reference before a turn, and after it, that say how fast the machine was then. One
alone varies by some percent even on a machine that is as fast as ever."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The steps of a placement."""

    steps: Sequence[float]
    factor: float
    """How fast the machine usually was, against just then."""

    @property
    def raw_seconds(self) -> float:
        """The lower quartile: whatever else a machine does makes steps slower, never faster, so
        that it differs less from run to run than the median."""
        return float(np.quantile(self.steps, 0.25))

    @property
    def seconds(self) -> float:
        """As if the machine had been as fast as usual."""
        return self.factor * self.raw_seconds


def in_turns(
    problem: Problem,
    runner: TensorFlowRunner,
    placements: Sequence[Placement],
    pace: Pace | None = None,
) -> tuple[dict[Placement, Timed], Pace | None]:
    """Times the placements, those that run; says also how fast the machine was.

    A machine drifts by 20% and more, by its temperature and by what else it does. So a reference is
    run in between, and the times are scaled by how fast that was just then: against how fast it was
    most of the time, or, with `pace`, at another time. It uses all devices: those that use one
    notice less.
    """
    if not placements:
        return {}, pace
    group_of = problem.grouping.group_of
    if pace is not None:
        reference = np.array(pace.devices, dtype=np.int32)
    else:
        reference = max(placements, key=lambda p: len(np.unique(p.devices))).devices

    def speed() -> float:
        measurement = runner.measure(reference[group_of]).measurement
        if not measurement.ok:
            return math.nan
        return Timed(steps=measurement.step_seconds, factor=1.0).raw_seconds

    speeds = [speed()]
    turns: list[dict[Placement, list[float]]] = []
    for first in range(0, len(placements), _TURN):
        turn = {}
        for placement in placements[first : first + _TURN]:
            measurement = runner.measure(placement.devices[group_of]).measurement
            if measurement.ok:
                turn[placement] = list(measurement.step_seconds)
        turns.append(turn)
        speeds.append(speed())
    usual = float(np.nanmedian(speeds)) if not np.isnan(speeds).all() else math.nan
    if pace is None and not math.isnan(usual):
        pace = Pace(tuple(reference.tolist()), usual)
    result: dict[Placement, Timed] = {}
    for number, turn in enumerate(turns):
        near = speeds[max(0, number + 1 - _AROUND) : number + 1 + _AROUND]
        around = [s for s in near if not math.isnan(s)]
        factor = pace.seconds / float(np.median(around)) if around and pace else 1.0
        for placement, steps in turn.items():
            result[placement] = Timed(steps=steps, factor=factor)
    return result, pace


def corrected(
    problem: Problem,
    calibration: Calibration,
    placements: Sequence[Placement],
    seconds: Sequence[float],
) -> Calibration:
    """The calibration, corrected by the step times of these placements."""
    under = calibration.problem(problem)
    correction, _ = fit(under, placements, seconds)
    fitted = correction.apply(under)
    # All of them: the factor was fitted to steps that are made of estimated ops as well.
    source = np.where(np.isinf(fitted.costs.op_seconds), Source.NO_KERNEL, Source.TABLE)
    table = dataclasses.replace(fitted.costs, source=frozen(source.astype(np.uint8)))
    return Calibration(table=table, cluster=fitted.cluster)


def varied_placements(
    problem: Problem, count: int, seed: int = 0, *, without: Iterable[Placement] = ()
) -> list[Placement]:
    """Different kinds of placements, by turns: random with more groups on some devices than on
    others, cut once in graph order, cut several times, and cut with few or many groups moved: from
    hardly any transfers to nothing but. None of those in `without`, under whatever costs these
    are."""
    known = {placement.devices.tobytes() for placement in without}
    rng = np.random.default_rng(seed)
    groups, devices = problem.num_groups, problem.num_devices
    first = np.full(groups, problem.graph.num_ops)
    np.minimum.at(first, problem.grouping.group_of, np.arange(problem.graph.num_ops))
    order = np.argsort(first, kind="stable")
    found: dict[Placement, None] = {}
    for number in range(20 * count):
        if len(found) == count:
            break
        cuts = (0, devices - 1, devices + int(rng.integers(1, 5)), devices - 1)[number % 4]
        chosen = rng.choice(devices, groups, p=rng.dirichlet(np.ones(devices)))
        if number % 4:
            part = np.searchsorted(
                np.sort(rng.integers(1, groups + 1, cuts)), np.arange(groups) + 1
            )
            chosen[order] = rng.permutation(devices)[part % devices]
        if number % 4 == 3:
            moved = rng.integers(0, groups, math.ceil(groups * 0.02 * 25 ** rng.random()))
            chosen[moved] = rng.integers(0, devices, len(moved))
        allowed = problem.allowed[np.arange(groups), chosen]
        chosen = np.where(allowed, chosen, problem.allowed.argmax(axis=1))
        placement = Placement.of(problem, chosen.astype(np.int32))
        if placement.devices.tobytes() not in known:
            found[placement] = None
    return list(found)


def everything_on(problem: Problem, device: int) -> Placement:
    """All groups that may be there; the others where they may be."""
    allowed = problem.allowed
    devices = np.where(allowed[:, device], device, allowed.argmax(axis=1))
    return Placement.of(problem, devices.astype(np.int32))


# --- how good it is ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Prediction against reality."""

    predicted: tuple[float, ...]
    first: tuple[float, ...]
    """As measured in a first pass over all placements; the mean of every second one, if there were
    several."""
    second: tuple[float, ...]
    """And in another one after it, or the mean of the others."""
    raw: tuple[float, ...]
    """The mean of all as they were, not scaled by how fast the machine was just then."""

    @property
    def measured(self) -> tuple[float, ...]:
        return tuple((a + b) / 2 for a, b in zip(self.first, self.second, strict=True))

    def of(self, numbers: Sequence[int]) -> Fidelity:
        """Of some of the placements."""
        return Fidelity(
            predicted=tuple(self.predicted[n] for n in numbers),
            first=tuple(self.first[n] for n in numbers),
            second=tuple(self.second[n] for n in numbers),
            raw=tuple(self.raw[n] for n in numbers),
        )

    @property
    def fastest_half(self) -> Fidelity:
        """Among those a search has to choose, where ranks are harder to get right."""
        order = np.argsort(self.measured, kind="stable").tolist()
        return self.of(order[: (len(order) + 1) // 2])

    @property
    def error(self) -> float:
        """Mean absolute error as a share of the measured time."""
        truth = np.array(self.measured)
        return float(np.mean(np.abs(np.array(self.predicted) - truth) / truth))

    @property
    def repeated(self) -> float:
        """Rank correlation of the passes: about as well as a prediction could do."""
        return rank_correlation(self.first, self.second)

    @property
    def spearman(self) -> float:
        return rank_correlation(self.predicted, self.measured)


def fidelity(
    problem: Problem, passes: Sequence[Mapping[Placement, Timed]]
) -> tuple[list[Placement], Fidelity]:
    """How the problem's costs predict several passes over the same placements; of those that ran in
    all. A single pass counts as both halves."""
    placements = [p for p in passes[0] if all(p in times for times in passes)]
    if not placements:
        raise CostsError("none of the placements ran, so there is nothing to compare")
    rows = np.stack([placement.devices for placement in placements])
    predicted = Simulator(problem).run(rows).step_seconds
    return placements, Fidelity(
        predicted=tuple(predicted.tolist()),
        first=tuple(fmean(t[p].seconds for t in passes[::2]) for p in placements),
        second=tuple(fmean(t[p].seconds for t in passes[1::2] or passes) for p in placements),
        raw=tuple(fmean(t[p].raw_seconds for t in passes) for p in placements),
    )


def check(
    problem: Problem,
    runner: TensorFlowRunner,
    placements: Sequence[Placement],
    pace: Pace | None = None,
    *,
    passes: int = 2,
) -> tuple[list[Placement], Fidelity]:
    """Measures the placements, all of them twice or more often, every second time backwards: what
    is close together in one pass has little in common with it in the other. With the `pace` of a
    calibration, times are as if the machine were as fast as it was then."""
    made: list[Mapping[Placement, Timed]] = []
    for _ in range(passes):
        times, pace = in_turns(problem, runner, placements, pace)
        placements = list(times)[::-1]
        made.append(times)
        if not times:
            break
    return fidelity(problem, made)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; ties share their mean rank. NaN for fewer than two, or all equal."""
    if len(a) < 2:
        return math.nan
    x, y = _ranks(np.asarray(a)), _ranks(np.asarray(b))
    if x.std() == 0 or y.std() == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2.0)[inverse], dtype=np.float64)
