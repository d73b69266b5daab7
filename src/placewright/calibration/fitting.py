"""Fits what cannot be measured piece by piece to the step times of whole placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from placewright.calibration.costs_file import Calibration
from placewright.cluster import Cluster, Link
from placewright.costs import Source
from placewright.graph import frozen
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator import Simulator


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
    demand: float = 1.0
    """On what ops take of a chip that they share with others."""
    cpu_ops: float = 1.0
    """On ops of processors beside accelerators, on top."""
    cpu_latency: float = 1.0
    """Of links that end at such a processor, on top."""
    cpu_bandwidth: float = 1.0
    """The same."""
    cpu_wait: float = 0.0
    """Seconds that each op of such a processor takes longer than in a step of its own."""

    def apply(self, problem: Problem) -> Problem:
        cluster = problem.cluster
        beside = _beside_accelerators(cluster)
        links = tuple(
            self._link(link, _packs(cluster, link), beside and _ends_on_cpu(cluster, link, any))
            for link in cluster.links
        )
        # On processors what is fitted is the whole of an op, issuing it included.
        whole = np.array([[kind.type == "cpu"] for kind in problem.cluster.kinds])
        overhead = np.where(whole, problem.costs.overhead_seconds, 0.0)
        seconds = (problem.costs.op_seconds + overhead) * self.ops
        if beside:
            longer = np.where(seconds > 0.0, seconds * self.cpu_ops + self.cpu_wait, seconds)
            seconds = np.where(whole, longer, seconds)
        costs = dataclasses.replace(
            problem.costs,
            op_seconds=frozen(seconds),
            overhead_seconds=frozen(problem.costs.overhead_seconds - overhead),
            demand=frozen(np.minimum(1.0, problem.costs.demand * self.demand)),
        )
        cluster = dataclasses.replace(cluster, links=links, contention=self.contention)
        return dataclasses.replace(problem, cluster=cluster, costs=costs)

    def _link(self, link: Link, packs: bool, beside: bool) -> Link:
        share = self.overhead_bytes if packs else 0.0
        latency = link.latency_seconds * self.latency * (self.cpu_latency if beside else 1.0)
        bandwidth = link.bandwidth * self.bandwidth * (self.cpu_bandwidth if beside else 1.0)
        # A link that is never occupied, such as an event that is waited for, stays so.
        gap = 0.0 if link.gap_seconds == 0.0 else latency * self.gap
        return dataclasses.replace(
            link,
            latency_seconds=latency,
            bandwidth=bandwidth,
            gap_seconds=gap,
            overhead_seconds=link.latency_seconds * self.overhead if packs else 0.0,
            overhead_bandwidth=link.bandwidth / share if share else math.inf,
        )


def _beside_accelerators(cluster: Cluster) -> bool:
    """Whether there are processors and others."""
    return len({device.type == "cpu" for device in cluster.devices}) > 1


def _ends_on_cpu(cluster: Cluster, link: Link, enough: Callable[[Iterable[bool]], bool]) -> bool:
    """Whether any or all ends of a link are processors."""
    on_cpu = {device.name for device in cluster.devices if device.type == "cpu"}
    return enough(end in on_cpu for pair in link.pairs for end in pair)


def _packs(cluster: Cluster, link: Link) -> bool:
    """Whether a device is busy with what it sends: where streams copy, none is, but from one CPU to
    another."""
    return not cluster.in_order or _ends_on_cpu(cluster, link, all)


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
    "demand": (0.2, 5.0),
    "cpu_ops": (0.2, 5.0),
    "cpu_latency": (0.05, 20.0),
    "cpu_bandwidth": (0.05, 20.0),
    "cpu_wait": (0.0, 1e-3),
}
_AS_MEASURED = ("latency", "bandwidth", "demand", "cpu_ops", "cpu_latency", "cpu_bandwidth")
"""Factors that are one unless the step times say otherwise."""
_BESIDE = ("cpu_ops", "cpu_latency", "cpu_bandwidth", "cpu_wait")
"""For processors beside accelerators."""
_FIRST = {"cpu_wait": (10e-6, 40e-6)}
"""What is tried where a setting is zero; 0.2 and 0.05 unless said here."""

_GAIN = 1e-4
"""Less is not worth a change, each of which begins another pass over all settings."""
_STEPS = (1.6, 1.25, 1.1, 1.04)
"""Factors by which each setting is tried to be changed, coarse to fine."""


def fit(
    problem: Problem,
    placements: Sequence[Placement],
    seconds: Sequence[float],
    *,
    most_tries: float = math.inf,
) -> tuple[Correction, float]:
    """The correction under which the simulator comes closest to these step times, and its mean
    error (as a share).

    Coordinate descent on the mean absolute logarithm, which an outlier moves little. Each try
    simulates all placements, which takes milliseconds. After `most_tries` it ends where it is: the
    last of a thousand hardly change anything.
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
        # What the measurements do not say stays as it is: the dozen and a half step times that
        # there mostly are would be explained as well by costs that are far from any device's.
        drift = sum(abs(math.log(getattr(correction, name))) for name in _AS_MEASURED)
        drift += abs(math.log(correction.ops / usual)) + correction.cpu_wait / 100e-6
        drift += abs(correction.contention - problem.cluster.contention)
        return float(np.mean(np.abs(np.log(predicted / truth)))) + 1e-2 * drift

    # From no overhead the way to the right one can lead over a hill, so there are several starts;
    # the first leaves links as they are.
    settings = _settings(problem)
    starts = [dataclasses.replace(_unchanged(problem.cluster), ops=usual)]
    starts += [
        Correction(
            ops=usual, gap=gap, overhead=overhead, overhead_bytes=share, contention=contention
        )
        for gap, overhead, share in _STARTS
        if "overhead" in settings or not overhead
        for contention in dict.fromkeys((problem.cluster.contention, 0.0))
    ]
    if "cpu_wait" in settings:
        starts += [dataclasses.replace(start, cpu_wait=_FIRST["cpu_wait"][1]) for start in starts]
    least, _, best = min((error(start), number, start) for number, start in enumerate(starts))
    tries = len(starts)
    for factor in _STEPS:
        improved = True
        while improved:
            improved = False
            for candidate in _neighbours(best, factor, settings):
                if tries >= most_tries:
                    return best, least
                tries += 1
                found = error(candidate)
                if found < least - _GAIN:
                    best, least, improved = candidate, found, True
    return best, least


def _settings(problem: Problem) -> tuple[str, ...]:
    """Those that change anything: where nobody packs, nothing of that is tried."""
    cluster = problem.cluster
    nothing = set() if problem.costs.demand.any() else {"demand"}
    if not _beside_accelerators(cluster):
        nothing |= set(_BESIDE)
    if not any(_packs(cluster, link) for link in cluster.links):
        nothing |= {"overhead", "overhead_bytes"}
    return tuple(name for name in _RANGES if name not in nothing)


def _unchanged(cluster: Cluster) -> Correction:
    """The correction under which links are what they are, as far as the first one tells."""
    if not cluster.links:
        return Correction(contention=cluster.contention)
    link = next((link for link in cluster.links if link.gap_seconds != 0.0), cluster.links[0])
    latency = max(link.latency_seconds, 1e-9)
    gap = latency if link.gap_seconds is None else link.gap_seconds
    return Correction(
        gap=min(max(gap / latency, _RANGES["gap"][0]), 1.0),
        overhead=link.overhead_seconds / latency,
        overhead_bytes=link.bandwidth / link.overhead_bandwidth,
        contention=cluster.contention,
    )


def _neighbours(
    correction: Correction, factor: float, settings: Sequence[str]
) -> Iterator[Correction]:
    for name in settings:
        low, high = _RANGES[name]
        value = getattr(correction, name)
        begin = _FIRST.get(name, (0.2, 0.05)) if value == 0.0 else ()
        for changed in (value * factor, value / factor, *begin):
            clipped = min(max(changed, low), high)
            if clipped != value:
                yield dataclasses.replace(correction, **{name: clipped})


def corrected(
    problem: Problem,
    calibration: Calibration,
    placements: Sequence[Placement],
    seconds: Sequence[float],
    *,
    most_tries: float = math.inf,
) -> Calibration:
    """The calibration, corrected by the step times of these placements."""
    under = calibration.problem(problem)
    correction, _ = fit(under, placements, seconds, most_tries=most_tries)
    fitted = correction.apply(under)
    # All of them: the factor was fitted to steps that are made of estimated ops as well.
    source = np.where(np.isinf(fitted.costs.op_seconds), Source.NO_KERNEL, Source.TABLE)
    table = dataclasses.replace(fitted.costs, source=frozen(source.astype(np.uint8)))
    return Calibration(table=table, cluster=fitted.cluster)
