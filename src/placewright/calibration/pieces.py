"""What is measured piece by piece: ops in traces of whole steps, and links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from placewright.backends import Run, Runner
from placewright.cluster import Cluster, Link
from placewright.costs import Costs, Source, estimate_costs
from placewright.graph import FloatArray, frozen
from placewright.problem import Problem

LINK_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Sizes of the tensors that links are timed with."""


SPREAD = -1
"""In place of a device's number: a run that uses several, as no single one has the memory."""


def op_table(problem: Problem, runs: Mapping[int, Run]) -> Costs:
    """Op times from traced runs: device number -> a run with everything (that can be) on it, or
    `SPREAD` -> a run on several, whose times are taken as they are.

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
        traced = np.array([run.trace.op_seconds.get(name, np.nan) for name in graph.op_names])
        ran_on = np.array([run.trace.device_of.get(name, -1) for name in graph.op_names])
        if device != SPREAD and cluster.devices[device].kind.slots == 1:
            own = ran_on == device
            on_gpu = cluster.devices[device].type == "gpu" and cluster.in_order
            adjusted = _without_events if on_gpu else _as_long_as
            traced[own] = adjusted(traced[own], run.measurement.mean_seconds)
        for other in range(cluster.num_devices):
            k, on = int(cluster.kind_of_device[other]), ran_on == other
            total[k, on] += traced[on]
            count[k, on] += 1
    return Costs(
        kinds=kinds,
        op_seconds=frozen(total / np.maximum(count, 1)),
        source=frozen(np.where(count > 0, Source.TABLE, Source.ROOFLINE).astype(np.uint8)),
    )


_HARDLY_SLOWER = 1.05
"""How much longer ops take side by side that do not hold each other up."""


def with_demands(problem: Problem, table: Costs, runner: Runner) -> Costs:
    """The table with what ops demand of the chips that devices share, as far as the runner can
    tell; the rest is estimated. So is what is too little to be told: ops that run as fast on all
    devices at once as alone may want any part of the chip up to an equal one."""
    estimated = estimate_costs(problem.graph, problem.cluster).demand
    if not estimated.any():
        return table
    demand = estimated.copy()
    kinds = problem.cluster.kind_of_device
    for device, shares in runner.demands().items():
        chips = problem.cluster.chip_of_device
        equal = 1.0 / int((chips == chips[device]).sum())
        for name, share in shares.items():
            k, op = kinds[device], problem.graph.op_index[name]
            too_little = share <= _HARDLY_SLOWER * equal
            demand[k, op] = min(estimated[k, op], equal) if too_little else min(1.0, share)
    return dataclasses.replace(table, demand=frozen(demand))


def _as_long_as(traced: FloatArray, step: float) -> FloatArray:
    total = float(traced.sum())
    if total <= 0:
        return traced
    if total > step:  # tracing itself takes time
        return traced * (step / total)
    return traced + (step - total) / len(traced)


def _without_events(traced: FloatArray, step: float) -> FloatArray:
    """The times between two events each, of which the events took an equal part of each."""
    if traced.sum() <= step:
        return _as_long_as(traced, step)
    low, high = 0.0, float(traced.max())
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(traced - middle, 0).sum() > step else (low, middle)
    return np.maximum(traced - high, 0.0)


def measure_links(runner: Runner, cluster: Cluster) -> Cluster:
    """The runner's cluster, or another description of it, with latency and bandwidth of its links
    as measured with real tensors.

    Links that the runner cannot time are left as they are.
    """
    hops = runner.time_links(LINK_BYTES)
    links = tuple(
        _fit_link(link, hops[link.name]) if link.name in hops else link for link in cluster.links
    )
    return dataclasses.replace(cluster, links=links)


_INSTANTLY = 1e16
"""Bytes per second that no wire has: of a link that is an event between streams."""


def _fit_link(link: Link, hops: Sequence[float]) -> Link:
    """Latency and bandwidth whose relative errors over all sizes are least."""
    sizes, seconds = np.array(LINK_BYTES, dtype=float), np.array(hops)
    weights = 1.0 / seconds
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, np.newaxis]
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)
    latency = float(max(latency, 1e-6))
    bandwidth = float(1.0 / max(per_byte, 1e-13))
    return dataclasses.replace(
        link,
        latency_seconds=latency,
        # Where nothing is moved, what seems to depend on the size is noise.
        bandwidth=link.bandwidth if link.bandwidth >= _INSTANTLY else bandwidth,
        gap_seconds=None if link.gap_seconds is None else min(link.gap_seconds, latency),
    )
