"""Looks at this machine and describes it as a cluster document (see docs/clusters.md).

The speeds are what data sheets and the driver say, not measurements: the same machine gives the
same description every time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from placewright import chips
from placewright.errors import ClusterError
from placewright.machine import usable_cores, usable_memory_bytes

logger = logging.getLogger(__name__)

_PCIE_GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_PCIE_SHARE = 0.8
"""Of the nominal rate, what copies of pinned memory usually reach."""

_KNOWN_GPUS = (
    ("K80", "tesla-k80"), ("A100", "a100-40gb"), ("H100", "h100-80gb"), ("H200", "h200-141gb"),
)  # fmt: skip
"""Part of the driver's name for a GPU -> a built-in kind, which knows its tensor cores."""

_EVENT_SECONDS = 1.5e-6
"""What a stream waits for an event of another one, in a captured graph."""
_COPY_SECONDS = 10e-6
"""Latency of a copy between a GPU and pinned memory."""
_HOST = "host memory"
"""The switch where tensors lie in pinned memory, between a GPU and a CPU or another GPU."""
_NOTICED_SECONDS = 30e-6
"""Until a thread of the CPU goes on that waits for a tensor in pinned memory."""
_COPIED_BY_CPU = 20e9
"""Bytes per second that the CPU copies to pinned memory."""
_INSTANTLY = 1e18
"""Bytes per second of what is not moved at all."""
_COPIED_WITHIN = 0.4
"""Of a GPU's bandwidth, what a copy within its memory reaches: it reads and writes."""
_SATURATED_BY = 0.5
"""Share of a GPU's multiprocessors that draw all of its memory's bandwidth."""


def local_document(cores: int | None = None) -> dict[str, Any]:
    """The CPU, or `cores` of its cores, and the NVIDIA GPUs of this machine."""
    cores = cores or usable_cores()
    slots = min(cores, 4)
    kinds: dict[str, Any] = {
        "local-cpu": {
            "type": "cpu",
            "peak_flops": _core_flops() * cores / slots,
            # One channel of DDR4 to a core, at most six channels in all: the usual server.
            "memory_bandwidth": 15e9 * min(cores, 6) / slots,
            "memory": usable_memory_bytes(),
            "slots": slots,
            # These, and the shares, are what benchmarks/costs.py finds for TensorFlow's kernels.
            "dispatch": 0.5e-6,
            "launch": 0.7e-6,
            "conv_start": 20e-6,
            "efficiency": {
                "conv": 0.6,
                "matmul": 0.95,
                "memory": 0.8,
                "elementwise": 0.1,
                "tiny": 0.2,
            },
            **_cache(cores, slots),
        }
    }
    devices = [{"name": "cpu:0", "kind": "local-cpu"}]
    links: list[dict[str, Any]] = []
    with _nvml() as nvml:
        if nvml is not None:
            _add_gpus(nvml, kinds, devices, links)
    if len(devices) == 1:
        _add_probed_gpus(kinds, devices, links)
    return {"name": "local", "kinds": kinds, "devices": devices, "links": links}


# --- chosen devices ------------------------------------------------------------------------------


def chosen_document(
    names: Sequence[str],
    through_host: bool,
    sms: int | None,
    builtin: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Some devices of this machine, streams and partitions of its GPUs among them.

    Each CPU has an equal part of the cores, and runs an op at a time on all of them. All transfers
    of a GPU share its port to the host, in whose pinned memory they lie on the way. Its streams
    wait for events and move nothing; its partitions copy within its memory or, with
    `through_host`, through that of the host. `builtin` describes the kinds that need no
    description.
    """
    if not names or len(set(names)) < len(names):
        raise ClusterError(f"devices must be different, at least one, not {list(names)}")
    document = local_document()
    known = {entry["name"]: entry for entry in document["devices"]}
    for name in names:
        if chips.parse(name).chip not in known and not name.startswith("cpu:"):
            raise ClusterError(
                f"this machine has no {name}; it has {', '.join(known)}. To plan for another "
                "machine, give a cluster file or a preset such as 'a100x4'"
            )
    cpus = [name for name in names if name.startswith("cpu:")]
    cores = usable_cores()
    for name in cpus:
        number = name.removeprefix("cpu:")
        if not number.isdecimal() or int(number) >= cores:
            last = f"to cpu:{cores - 1}" if cores > 1 else "alone"
            raise ClusterError(
                f"this machine has no {name}: CPU devices are equal shares of its {cores} usable "
                f"cores, cpu:0 {last}"
            )
    host = document["kinds"]["local-cpu"]
    host["memory"] //= max(1, len(cpus))
    for key in ("peak_flops", "memory_bandwidth"):
        host[key] *= host["slots"] / max(1, len(cpus))
    for key in {"cache", "cache_bandwidth"} & set(host):
        host[key] = type(host[key])(host[key] * host["slots"] / max(1, len(cpus)))
    host["slots"] = 1
    divided: dict[str, list[str]] = {}
    for name in names:
        if chips.parse(name).sharing:
            divided.setdefault(chips.parse(name).chip, []).append(name)
    devices = {name: {"name": name, "kind": "local-cpu"} for name in cpus}
    for name in names:
        if name in cpus:
            continue
        way = chips.parse(name)
        entry = {**known[way.chip], "name": name}
        if way.sharing == chips.PART:
            whole = document["kinds"].get(entry["kind"]) or builtin[entry["kind"]]
            kind, own = _partition_kind(entry, whole, len(divided[way.chip]), sms)
            document["kinds"][kind] = own
            entry = {**entry, "kind": kind, "memory": own["memory"]}
        devices[name] = entry
    document["devices"] = [devices[name] for name in names]
    document["links"] = _chosen_links(document, names, cpus, divided, through_host)
    document["switches"] = [_HOST] if len(cpus) < len(names) else []
    document["name"] = " ".join(names)
    return document


def _partition_kind(
    gpu: dict[str, Any], whole: dict[str, Any], parts: int, sms: int | None
) -> tuple[str, dict[str, Any]]:
    """Name and description of one of so many partitions of a GPU."""
    total = int(whole.get("sms", 0))
    if not total:
        raise ClusterError(
            f"{gpu['name']}: nobody said how many multiprocessors a {gpu['kind']} has, so it "
            "cannot be divided"
        )
    count = sms or total // parts // SM_STEP * SM_STEP
    if not 0 < count * parts <= total:
        raise ClusterError(
            f"{gpu['name']}: {parts} partitions of {max(count, SM_STEP)} multiprocessors are more "
            f"than the {total} of a {gpu['kind']}"
        )
    share, bandwidth = count / total, whole["memory_bandwidth"]
    return f"{gpu['kind']}-{count}sm", {
        **whole,
        "peak_flops": whole["peak_flops"] * share,
        "memory_bandwidth": bandwidth * min(1.0, share / _SATURATED_BY),
        "memory": int(gpu["memory"]) // parts,
        "sms": count,
        "chip_bandwidth": bandwidth,
    }


SM_STEP = 8
"""Multiprocessors of a partition are a multiple of this on GPUs since Hopper, and so good on
others."""


def _chosen_links(
    document: dict[str, Any],
    names: Sequence[str],
    cpus: Sequence[str],
    divided: dict[str, list[str]],
    through_host: bool,
) -> list[dict[str, Any]]:
    links = []
    of_chip: dict[str, list[str]] = {}
    for name in names:
        if name not in cpus:
            of_chip.setdefault(chips.parse(name).chip, []).append(name)
    for link in document["links"]:
        (a, b), *_ = link["pairs"]
        ends = [of_chip.get(end, [] if end != "cpu:0" else [_HOST]) for end in (a, b)]
        if "cpu:0" in (a, b):
            link = {**link, "relays": True}
        if all(ends):
            links.append({**link, "pairs": [list(pair) for pair in itertools.product(*ends)]})
    bandwidth = {entry["name"]: entry for entry in document["devices"]}
    for chip, mine in divided.items():
        pairs = [list(pair) for pair in itertools.combinations(mine, 2)]
        if not pairs or (through_host and chips.parse(mine[0]).sharing == chips.PART):
            continue
        if chips.parse(mine[0]).sharing == chips.STREAM:
            links.append(
                {"name": f"{chip} events", "latency": _EVENT_SECONDS, "gap": 0.0,
                 "bandwidth": _INSTANTLY, "pairs": pairs}
            )  # fmt: skip
        else:
            kind = document["kinds"][bandwidth[mine[0]]["kind"]]
            links.append(
                {"name": f"{chip} memory", "latency": _EVENT_SECONDS, "gap": 0.0,
                 "bandwidth": _COPIED_WITHIN * kind["chip_bandwidth"], "pairs": pairs}
            )  # fmt: skip
    if cpus and of_chip:
        links.append(
            {"name": "host", "latency": _NOTICED_SECONDS, "gap": 0.0,
             "bandwidth": _COPIED_BY_CPU, "pairs": [[_HOST, cpu] for cpu in cpus]}
        )  # fmt: skip
    if len(cpus) > 1:
        pairs = [list(pair) for pair in itertools.combinations(cpus, 2)]
        links.append({"name": "memory", "latency": 10e-6, "bandwidth": 5e9, "pairs": pairs})
    return links


# --- CPU -----------------------------------------------------------------------------------------


def _cache(cores: int, slots: int) -> dict[str, float]:
    """The largest cache, in equal parts for the cores that share it; 24 bytes a cycle come
    from there."""
    largest = 0.0
    for level in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            size = (level / "size").read_text(encoding="utf-8").strip()
            shared = _count((level / "shared_cpu_list").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if size.endswith("K") and size[:-1].isdecimal():
            largest = max(largest, 1024.0 * int(size[:-1]) / max(1, shared))
    if not largest:
        return {}
    # Not more than a core can fill: a virtual machine may show the whole socket's cache as its own.
    per_slot = cores / slots
    return {"cache": int(min(largest, 32e6) * per_slot), "cache_bandwidth": 60e9 * per_slot}


def _count(cpus: str) -> int:
    """Of a list such as `0-3,8`."""
    ranges = [part.partition("-") for part in cpus.strip().split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def _core_flops() -> float:
    """Single-precision peak of one core at 2.5 GHz, by its widest vector unit."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        flags = ""
    if "avx512f" in flags:
        return 2.5e9 * 64
    if "avx2" in flags:
        return 2.5e9 * 32
    return 2.5e9 * 8


# --- GPUs ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVIDIA's management library, or None without its Python binding, driver or GPUs."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _add_gpus(
    nvml: Any, kinds: dict[str, Any], devices: list[dict[str, Any]], links: list[dict[str, Any]]
) -> None:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    found = []
    for i, handle in enumerate(handles):
        try:
            name = nvml.nvmlDeviceGetName(handle)
            kind = _known_kind(name)
            if kind is None:
                kind = _slug(name)
                kinds[kind] = _gpu_kind(nvml, handle)
            memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
            bandwidth = _pcie_bytes_per_second(nvml, handle)
        except nvml.NVMLError as error:  # virtual GPUs and parts of one tell less
            logger.warning("GPU %d is left out: its driver does not say what it is (%s)", i, error)
            continue
        found.append(i)
        devices.append({"name": f"gpu:{i}", "kind": kind, "memory": memory})
        links.append(
            {
                "name": f"pcie{i}",
                "latency": _COPY_SECONDS,
                "bandwidth": bandwidth,
                "pairs": [[f"gpu:{i}", "cpu:0"]],
            }
        )
    for i in found:
        for j in found:
            if i < j and _has_nvlink(nvml, handles[i], handles[j]):
                links.append(
                    {
                        "name": f"nvlink{i}-{j}",
                        "latency": 5e-6,
                        "bandwidth": 80e9,
                        "pairs": [[f"gpu:{i}", f"gpu:{j}"]],
                    }
                )


@functools.cache
def _probed() -> tuple[dict[str, Any], ...]:
    """What CUDA's driver says of each GPU, asked in another process: a process that has asked it
    cannot be forked any more."""
    script = Path(__file__).with_name("_probe.py")
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=60,
            check=True,
        )  # fmt: skip
        return tuple(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as fault:
        logger.warning("the driver of the GPUs cannot be asked what there is: %s", fault)
        return ()


def _add_probed_gpus(
    kinds: dict[str, Any], devices: list[dict[str, Any]], links: list[dict[str, Any]]
) -> None:
    """Without NVIDIA's management library: the driver knows the GPUs, but not their links."""
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        return
    for number, gpu in enumerate(_probed()):
        kind = _known_kind(gpu["name"])
        if kind is None:
            kind = _slug(gpu["name"])
            kinds[kind] = {
                "type": "gpu",
                "peak_flops": 2.0 * 128 * gpu["sms"] * gpu["clock_hz"],
                "memory_bandwidth": 2.0 * gpu["memory_hz"] * gpu["bus_bits"] / 8,
                "memory": gpu["memory"],
                "sms": gpu["sms"],
                **_USUAL,
            }
        devices.append({"name": f"gpu:{number}", "kind": kind, "memory": gpu["memory"]})
        generation = {7: 3, 8: 4}.get(gpu["capability"], 5)
        links.append(
            {
                "name": f"pcie{number}",
                "latency": _COPY_SECONDS,
                "bandwidth": 1e9 * _PCIE_GB_PER_LANE[generation] * 16 * _PCIE_SHARE,
                "pairs": [[f"gpu:{number}", "cpu:0"]],
            }
        )


def _known_kind(name: str) -> str | None:
    return next((kind for part, kind in _KNOWN_GPUS if part in name), None)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


_USUAL = {
    "dispatch": 3e-6,
    "launch": 4e-6,
    "efficiency": {"conv": 0.5, "matmul": 0.7, "memory": 0.75, "tiny": 0.05},
}
"""What frameworks need and reach on a GPU that is not built in."""


def _gpu_kind(nvml: Any, handle: Any) -> dict[str, Any]:
    """What the driver tells of a GPU that is not built in; two FLOPs per core and cycle."""
    cores = nvml.nvmlDeviceGetNumGpuCores(handle)
    clock_hz = 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    memory_hz = 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
    bus_bytes = nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
    return {
        "type": "gpu",
        "peak_flops": 2.0 * cores * clock_hz,
        "memory_bandwidth": 2.0 * memory_hz * bus_bytes,
        "memory": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        **_multiprocessors(nvml, handle, cores),
        **_USUAL,
    }


def _multiprocessors(nvml: Any, handle: Any, cores: int) -> dict[str, int]:
    """By how many cores a multiprocessor of its generation has."""
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except (AttributeError, nvml.NVMLError):
        return {}
    return {"sms": cores // (64 if (major, minor) in ((7, 0), (7, 2), (7, 5), (8, 0)) else 128)}


def _pcie_bytes_per_second(nvml: Any, handle: Any) -> float:
    generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    lanes = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    newest = max(_PCIE_GB_PER_LANE)
    return float(1e9 * _PCIE_GB_PER_LANE[min(generation, newest)] * lanes * _PCIE_SHARE)


def _has_nvlink(nvml: Any, a: Any, b: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)
