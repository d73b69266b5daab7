"""Looks at this machine and describes it as a cluster document (see docs/clusters.md).

The speeds are what data sheets and the driver say, not measurements: the same machine gives the
same description every time.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from placewright.machine import usable_cores, usable_memory_bytes

logger = logging.getLogger(__name__)

_PCIE_GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_PCIE_SHARE = 0.8
"""Of the nominal rate, what copies of pinned memory usually reach."""

_KNOWN_GPUS = (("K80", "tesla-k80"), ("A100", "a100-40gb"), ("H100", "h100-80gb"))
"""Part of the driver's name for a GPU -> a built-in kind, which knows its tensor cores."""


def local_document() -> dict[str, Any]:
    """The CPU and the NVIDIA GPUs of this machine."""
    cores = usable_cores()
    slots = min(cores, 4)
    kinds: dict[str, Any] = {
        "local-cpu": {
            "type": "cpu",
            "peak_flops": _core_flops() * cores / slots,
            # One channel of DDR4 to a core, at most six channels in all: the usual server.
            "memory_bandwidth": 15e9 * min(cores, 6) / slots,
            "memory": usable_memory_bytes(),
            "slots": slots,
            "dispatch": 2e-6,
            "launch": 1e-6,
            "efficiency": {"conv": 0.5, "matmul": 0.7, "memory": 0.5, "tiny": 0.2},
        }
    }
    devices = [{"name": "cpu:0", "kind": "local-cpu"}]
    links: list[dict[str, Any]] = []
    with _nvml() as nvml:
        if nvml is not None:
            _add_gpus(nvml, kinds, devices, links)
    return {"name": "local", "kinds": kinds, "devices": devices, "links": links}


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
            kind = next((kind for part, kind in _KNOWN_GPUS if part in name), None)
            if kind is None:
                kind = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
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
                "latency": 10e-6,
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
        "dispatch": 3e-6,
        "launch": 4e-6,
        "efficiency": {"conv": 0.5, "matmul": 0.7, "memory": 0.75, "tiny": 0.05},
    }


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
