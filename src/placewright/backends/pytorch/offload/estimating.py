"""What units take on a machine that is described but not at hand."""

from __future__ import annotations

from placewright.backends.pytorch.offload.recording import Recorded, UnitWork, Work
from placewright.backends.pytorch.offload.timeline import Costs, UnitCost
from placewright.cluster import Cluster, DeviceKind
from placewright.errors import ClusterError

_BESIDE = 1.3
"""How much longer copies of weights and the host's work take while both go on: they share the
memory of the host. An H200 beside 16 cores had 1.09 and 1.36 for the host, 1.32 and 1.45 for copies
(`benchmarks/results/offload`)."""
_NARROW = 2.0
"""Times the single-precision peak: matrix units on 16-bit numbers."""


def estimated_costs(
    recorded: Recorded, cluster: Cluster, device: str, *, itemsize: int = 2, captured: bool = False
) -> Costs:
    """By the speeds of a cluster: `device` (as clusters call it) beside the cluster's first CPU.

    `captured`: whether units on a GPU are captured as graphs, which saves asking for each kernel.
    """
    number, host = cluster.device_number(device), host_of(cluster, device)
    ours, host_kind = cluster.devices[number].kind, cluster.devices[host].kind
    latency = float(cluster.routes.latency_seconds[host, number])
    per_byte = float(cluster.routes.seconds_per_byte[host, number])
    launch = ours.gap_seconds if captured else ours.dispatch_seconds + ours.launch_seconds
    narrow = _NARROW if itemsize <= 2 else 1.0
    of: dict[str, dict[str, UnitCost]] = {}
    for unit in recorded.units:
        for call, work in unit.of.items():
            of.setdefault(call, {})[unit.path] = UnitCost(
                device_seconds=_seconds(work, ours, launch, narrow),
                host_seconds=_seconds(work, host_kind, host_kind.dispatch_seconds, narrow),
                input_bytes=work.input_bytes,
                output_bytes=work.output_bytes,
                device_update_seconds=_update_seconds(unit, ours),
                host_update_seconds=_update_seconds(unit, host_kind),
            )
    return Costs(
        of=of, link_bytes_per_second=1 / max(per_byte, 1e-15), copy_latency_seconds=latency,
        host_slowdown=_BESIDE, copy_slowdown=_BESIDE,
    )  # fmt: skip


def _seconds(work: Work, kind: DeviceKind, launch: float, narrow: float) -> float:
    """Products read their weights while they compute; what is between them reads and writes."""
    products = max(
        work.flops / (kind.peak_flops * kind.slots * narrow * kind.share("matmul")),
        work.read_bytes / (kind.memory_bandwidth * kind.slots),
    )
    between = work.moved_bytes / (kind.memory_bandwidth * kind.slots * kind.share("memory"))
    if kind.cache_bytes and work.peak_bytes < kind.cache_bytes * kind.slots:
        between = work.moved_bytes / (kind.cache_bandwidth * kind.slots)
    return max(products + between, launch * work.ops)


def _update_seconds(unit: UnitWork, kind: DeviceKind) -> float:
    """Gradients are read; weights and what the optimizer keeps are read and written."""
    moved = 3 * unit.gradient_bytes + 2 * unit.state_bytes
    return moved / (kind.memory_bandwidth * kind.slots * kind.share("memory"))


def host_of(cluster: Cluster, device: str) -> int:
    """The number of the CPU whose memory is the host's."""
    known = cluster.device_number(device)
    for number, other in enumerate(cluster.devices):
        if other.kind.type == "cpu" and number != known:
            return number
    raise ClusterError(
        f"cluster {cluster.name} has no CPU besides {device}, and weights that do not fit live in "
        "a CPU's memory"
    )
