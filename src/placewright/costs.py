"""How long each op takes on each kind of device, and where that number came from."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from placewright import cluster as cluster_format
from placewright.cluster import Cluster, DeviceKind
from placewright.errors import CostsError
from placewright.files import read_json, write_json
from placewright.graph import FloatArray, Graph, Work, frozen

logger = logging.getLogger(__name__)

FORMAT = "placewright-costs/1"

MOST_SECONDS = 1e30
"""Of all ops and transfers together. Up to here sums and squares of times are finite; and no
machine was ever waited for that long."""


class Source(enum.IntEnum):
    """Where the seconds of one op on one kind of device came from."""

    NO_KERNEL = 0
    """The op cannot run there; its seconds are infinite."""
    ROOFLINE = 1
    """Estimated from FLOPs and bytes."""
    GRAPH = 2
    """Measured, as told by the graph file."""
    TABLE = 3
    """Measured, as told by a costs file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """Seconds of each of N ops on each of K kinds of device. Immutable."""

    kinds: tuple[str, ...]
    op_seconds: FloatArray
    """[K, N] of all runs of an op in a step; infinite where it has no kernel."""
    source: npt.NDArray[np.uint8]
    """[K, N] a `Source` for each number."""
    overhead_seconds: FloatArray = field(default_factory=lambda: frozen(np.zeros((0, 0))))
    """[K, N] what issuing each op takes on top, by whom the cluster says; all 0 unless given, as
    where `op_seconds` are measurements of the whole."""
    gap_seconds: FloatArray = field(default_factory=lambda: frozen(np.zeros((0, 0))))
    """[K, N] what the kernels of each op take of the device besides their work, whoever issues
    them; likewise."""
    demand: FloatArray = field(default_factory=lambda: frozen(np.zeros((0, 0))))
    """[K, N] what each op takes, while it runs alone, of what its device shares with others on the
    same chip, from 0 to 1. Ops that run at the same time and want more than 1 together slow each
    other down. All 0 unless given."""

    def __post_init__(self) -> None:
        if np.any(self.demand > 1):
            raise CostsError("no op can demand more than all of its chip")
        for name in ("overhead_seconds", "gap_seconds", "demand"):
            if not getattr(self, name).size:
                object.__setattr__(self, name, frozen(np.zeros(self.op_seconds.shape)))
            seconds = getattr(self, name)
            what = name.removesuffix("_seconds")
            if seconds.shape != self.op_seconds.shape:
                raise CostsError(
                    f"{what} of shape {seconds.shape} for costs of shape {self.op_seconds.shape}"
                )
            if not np.all((seconds >= 0) & np.isfinite(seconds)):
                raise CostsError(f"{what} must be finite and not negative")
        if self.op_seconds.shape != self.source.shape or len(self.kinds) != len(self.op_seconds):
            raise CostsError(
                f"costs of shape {self.op_seconds.shape} for {len(self.kinds)} device kinds"
            )
        missing = self.source == Source.NO_KERNEL
        with np.errstate(over="ignore"):
            total = self.op_seconds[~missing].sum() + self.overhead_seconds.sum()
            total += self.gap_seconds.sum()
        if total > MOST_SECONDS:
            raise CostsError(
                f"all ops together take {total:.3g} s; are their costs, or the speeds of the "
                "devices, in the right unit?"
            )
        if not np.array_equal(missing, np.isposinf(self.op_seconds)):
            raise CostsError("costs must be infinite exactly where an op has no kernel")
        if not np.all(self.op_seconds >= 0):  # NaN fails this too
            raise CostsError("costs must be numbers that are not negative")

    def counts(self) -> Mapping[str, Mapping[Source, int]]:
        """Device kind -> how many ops have a number from each source."""
        return {
            kind: {source: int(np.sum(row == source)) for source in Source}
            for kind, row in zip(self.kinds, self.source, strict=True)
        }

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256("\n".join(self.kinds).encode())
        digest.update(np.ascontiguousarray(self.op_seconds).tobytes())
        digest.update(np.ascontiguousarray(self.source).tobytes())
        for name in ("overhead_seconds", "gap_seconds", "demand"):
            if getattr(self, name).any():  # costs from before there was overhead keep theirs
                digest.update(name.encode() + np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Costs):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def save(self, path: str | Path, graph: Graph) -> None:
        """Writes every number with its source, by op name."""
        write_json(path, self.to_json(graph), CostsError)

    @staticmethod
    def load(path: str | Path, graph: Graph) -> Costs:
        """Exactly what `save` wrote for this graph."""
        document = read_json(path, CostsError, what="costs")
        return Costs.from_json(document, graph, where=str(path))

    def to_json(self, graph: Graph) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "graph": graph.fingerprint,
            "ops": list(graph.op_names),
            "kinds": {
                kind: {
                    "seconds": [None if s == np.inf else s for s in self.op_seconds[k].tolist()],
                    "source": [Source(s).name.lower() for s in self.source[k].tolist()],
                    **{
                        name: rows[k].tolist()
                        for name, rows in (
                            ("overhead", self.overhead_seconds),
                            ("gap", self.gap_seconds),
                            ("demand", self.demand),
                        )
                        if rows[k].any()
                    },
                }
                for k, kind in enumerate(self.kinds)
            },
        }

    @staticmethod
    def from_json(document: object, graph: Graph, *, where: str) -> Costs:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise CostsError(f"{where}: not a costs file ({FORMAT})")
        if "ops" not in document:
            return _measured_table(document, graph, where)
        if document["ops"] != list(graph.op_names):
            raise CostsError(
                f"{where}: made for another graph ({document.get('graph')}, this one is "
                f"{graph.fingerprint})"
            )
        try:
            kinds = document["kinds"]
            seconds = [
                [np.inf if s is None else float(s) for s in entry["seconds"]]
                for entry in kinds.values()
            ]
            sources = [
                [Source[name.upper()] for name in entry["source"]] for entry in kinds.values()
            ]
            overhead, gap, demand = (
                [entry.get(name, [0.0] * graph.num_ops) for entry in kinds.values()]
                for name in ("overhead", "gap", "demand")
            )
            costs = Costs(
                kinds=tuple(kinds),
                op_seconds=frozen(np.array(seconds, dtype=np.float64)),
                source=frozen(np.array(sources, dtype=np.uint8)),
                overhead_seconds=frozen(np.array(overhead, dtype=np.float64)),
                gap_seconds=frozen(np.array(gap, dtype=np.float64)),
                demand=frozen(np.array(demand, dtype=np.float64)),
            )
        except (
            KeyError, TypeError, ValueError, AttributeError, OverflowError, CostsError
        ) as fault:  # fmt: skip
            raise CostsError(f"{where}: malformed costs: {fault}") from None
        if costs.op_seconds.shape != (len(costs.kinds), graph.num_ops):
            raise CostsError(f"{where}: covers {costs.op_seconds.shape[-1]} ops, not all")
        return costs


def _measured_table(document: Mapping[str, Any], graph: Graph, where: str) -> Costs:
    """Times that another tool measured: by device kind, by op name, as many as it has."""
    kinds = document.get("kinds")
    if not isinstance(kinds, dict):
        raise CostsError(f"{where}: 'kinds' must map device kinds to {{op name: seconds}}")
    demands = document.get("demands", {})
    if not isinstance(demands, dict):
        raise CostsError(f"{where}: 'demands' must map device kinds to {{op name: share}}")
    seconds = np.zeros((len(kinds), graph.num_ops))
    demand = np.zeros(seconds.shape)
    source = np.full(seconds.shape, Source.ROOFLINE, dtype=np.uint8)
    for k, (kind, times) in enumerate(kinds.items()):
        if not isinstance(times, dict):
            raise CostsError(f"{where}: times of kind {kind!r} must map op names to seconds")
        for name, value in times.items():
            if name not in graph.op_index:
                raise CostsError(f"{where}: {graph.name!r} has no op {name!r}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise CostsError(f"{where}: op {name!r} on {kind!r} cannot take {value!r} seconds")
            seconds[k, graph.op_index[name]] = min(value, sys.float_info.max)
            source[k, graph.op_index[name]] = Source.TABLE
        shares = demands.get(kind, {})
        if not isinstance(shares, dict):
            raise CostsError(f"{where}: demands of kind {kind!r} must map op names to shares")
        for name, value in shares.items():
            if name not in graph.op_index:
                raise CostsError(f"{where}: {graph.name!r} has no op {name!r}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise CostsError(f"{where}: op {name!r} on {kind!r} cannot demand {value!r}")
            demand[k, graph.op_index[name]] = value
    return Costs(
        kinds=tuple(kinds), op_seconds=frozen(seconds), source=frozen(source), demand=frozen(demand)
    )


def estimate_costs(graph: Graph, cluster: Cluster, tables: Sequence[Costs] = ()) -> Costs:
    """Costs for every kind of device in the cluster, from the best source there is for each.

    Measured numbers in `tables` (later ones win) go before those in the graph, and both before the
    roofline estimate.
    """
    names = {name for kind in cluster.kinds for name in (kind.type, kind.name)}
    unused = sorted(set(graph.measured_seconds) - names)
    if unused:
        logger.warning(
            "graph %r has seconds for %s, of which cluster %r has none; it has %s",
            graph.name, ", ".join(unused), cluster.name, ", ".join(sorted(names)),
        )  # fmt: skip
    seconds = np.empty((len(cluster.kinds), graph.num_ops))
    overhead, gap, demand = (np.zeros(seconds.shape) for _ in range(3))
    shared = {
        device.kind.name
        for device, chip in zip(cluster.devices, cluster.chip_of_device, strict=True)
        if chip >= 0
    }
    source = np.full(seconds.shape, Source.ROOFLINE, dtype=np.uint8)
    for k, kind in enumerate(cluster.kinds):
        # What is infinite, or infinite times nothing, is refused as a whole below.
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            seconds[k] = _roofline(kind, graph) * graph.run_count
            overhead[k] = _overhead(kind, cluster.issued_by(graph.issue), graph)
            gap[k] = kind.gap_seconds * _launches(graph)
            if kind.name in shared:
                demand[k] = _demand(kind, graph, seconds[k], gap[k])
        # The kind's own numbers are laid over those of its type.
        for key in (kind.type, kind.name):
            if key in graph.measured_seconds:
                measured = graph.measured_seconds[key]
                told = ~np.isnan(measured)
                seconds[k, told] = measured[told]
                source[k, told] = Source.GRAPH
        for table in tables:
            if kind.name in table.kinds:
                row = table.kinds.index(kind.name)
                told = table.source[row] >= Source.GRAPH
                seconds[k, told] = table.op_seconds[row, told]
                source[k, told] = Source.TABLE
                if kind.name in shared and table.demand[row].any():
                    demand[k, told] = table.demand[row, told]
        missing = ~graph.runs_on(kind.type)
        # What was measured is the whole of the op.
        estimated = (source[k] == Source.ROOFLINE) & ~missing
        overhead[k, ~estimated] = gap[k, ~estimated] = 0.0
        seconds[k, missing] = np.inf
        demand[k, missing] = 0.0
        source[k, missing] = Source.NO_KERNEL
    return Costs(
        kinds=tuple(kind.name for kind in cluster.kinds),
        op_seconds=frozen(seconds),
        source=frozen(source),
        overhead_seconds=frozen(overhead),
        gap_seconds=frozen(gap),
        demand=frozen(demand),
    )


# --- overhead ------------------------------------------------------------------------------------


def _overhead(kind: DeviceKind, issue: str, graph: Graph) -> FloatArray:
    """[N] seconds that issuing each op takes, in all its runs.

    An op that does no work on the device starts no kernel: it costs what the host spends on it,
    which holds up nobody unless the host's cores are the device.
    """
    if issue == "none":
        return np.zeros(graph.num_ops)
    seconds = (kind.dispatch_seconds + kind.launch_seconds) * _launches(graph)
    if issue == "device" and kind.type == "cpu":
        works = graph.work != Work.NONE
        seconds[~works] = kind.dispatch_seconds * graph.run_count[~works]
    return seconds


def _launches(graph: Graph) -> FloatArray:
    """[N] kernels that each op starts in a step."""
    launches = np.where(graph.work != Work.NONE, graph.launches, 0.0) * graph.run_count
    return np.asarray(launches, dtype=np.float64)


# --- roofline ------------------------------------------------------------------------------------

_TINY = "tiny"
_TINY_FLOPS = 1e6
_TINY_BYTES = 64 * 1024


def _roofline(kind: DeviceKind, graph: Graph) -> FloatArray:
    """[N] seconds of one run: the slower of computing and moving bytes."""
    flops, moved, work = np.nan_to_num(graph.flops), graph.moved_bytes, graph.work
    tiny = (flops < _TINY_FLOPS) & (moved < _TINY_BYTES)
    seconds = np.zeros(graph.num_ops)
    cached = (moved <= kind.cache_bytes) if kind.cache_bandwidth else np.zeros_like(tiny)
    for members, name in [
        (tiny & (work != Work.NONE), _TINY),
        *((~tiny & (work == w), w.name.lower()) for w in Work if w != Work.NONE),
    ]:
        product = name in ("conv", "depthwise", "matmul")
        peak = "conv" if name == "depthwise" else name
        compute_share = kind.share(peak if product or name == _TINY else "elementwise")
        # The bytes of a matrix product or a convolution move like those of any other op.
        memory_share = kind.share("memory" if name in ("conv", "matmul") else name)
        compute = flops[members] / (kind.peak_flops * compute_share)
        bandwidth = np.where(
            cached[members], kind.cache_bandwidth, kind.memory_bandwidth * memory_share
        )
        seconds[members] = np.maximum(compute, moved[members] / bandwidth)
    seconds[work == Work.CONV] += kind.conv_start_seconds
    return seconds


# --- demand --------------------------------------------------------------------------------------

_THREADS = 2048
"""That one multiprocessor of a GPU has room for."""
_ELEMENTS = {Work.MATMUL: 8, Work.CONV: 8}
"""Of the result, for each of the threads whose room a kernel takes; one for all other ops."""
_BETWEEN = 0.4
"""What an op takes of a whole chip while it only starts or runs out. This and the number before are
fitted: forward passes of Inception-V3 on four streams of an H200 gain 1.69, 1.35 and 1.16 times
with a batch of 1, 8 and 32, and are simulated to gain 1.73, 1.47 and 1.13 times."""


def _demand(kind: DeviceKind, graph: Graph, seconds: FloatArray, gap: FloatArray) -> FloatArray:
    """[N] what each op takes of what its chip's devices share: of a whole chip the multiprocessors
    that its threads fill, or the memory's bandwidth, whichever is more; of a partition, whose
    multiprocessors are its own, the bandwidth of the chip."""
    whole = kind.chip_bandwidth or kind.memory_bandwidth
    moved = graph.moved_bytes * graph.run_count.astype(np.float64)
    drawn = np.nan_to_num(moved / seconds) / whole
    working = np.nan_to_num(seconds / (seconds + gap))
    between = 0.0
    if not kind.chip_bandwidth and kind.sms:
        made = np.zeros(graph.num_ops)
        np.add.at(made, graph.tensor_producer, graph.tensor_bytes / 4.0)
        each = np.ones(graph.num_ops)
        for work, elements in _ELEMENTS.items():
            each[graph.work == work] = elements
        drawn = np.maximum(drawn, made / each / (_THREADS * kind.sms))
        between = _BETWEEN
    demand = drawn * working + between * (1.0 - working) * (gap > 0)
    return np.asarray(np.clip(demand, 0.0, 1.0), dtype=np.float64)


def calibrated_cluster(path: str | Path, cluster: Cluster) -> Cluster:
    """The cluster as a costs file found it: where it says nothing, or is of another, unchanged."""
    document = read_json(path, CostsError, what="costs")
    described = document.get("cluster") if isinstance(document, dict) else None
    if described is None:
        return cluster
    found = cluster_format.from_document(described, where=str(path))
    if same_devices(found, cluster):
        return with_own_limits(found, cluster)
    logger.warning(
        "%s: links were measured on cluster %r with %s; those of %r are taken as it describes them",
        path,
        found.name,
        ", ".join(found.device_names),
        cluster.name,
    )
    return cluster


def same_devices(found: Cluster, cluster: Cluster) -> bool:
    """Whether links measured on one are links of the other."""
    return (found.name, found.device_names) == (cluster.name, cluster.device_names)


def with_own_limits(found: Cluster, cluster: Cluster) -> Cluster:
    """The user's own limits on memory stay."""
    devices = tuple(
        dataclasses.replace(device, memory_bytes=own.memory_bytes, pinned_bytes=own.pinned_bytes)
        for device, own in zip(found.devices, cluster.devices, strict=True)
    )
    return dataclasses.replace(found, devices=devices)
