"""Prints what CUDA says of the GPUs of this machine, as JSON. Run as a script, by itself."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

_ATTRIBUTES = {
    "clock_hz": (13, 1000), "sms": (16, 1), "memory_hz": (36, 1000), "bus_bits": (37, 1),
    "capability": (75, 1),
}  # fmt: skip
"""CUdevice_attribute, and what its unit is in ours."""


def gpus() -> list[dict[str, Any]]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found: list[dict[str, Any]] = []
    for number in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        memory, value = ctypes.c_size_t(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), number)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        facts: dict[str, Any] = {"name": name.value.decode(), "memory": memory.value}
        for key, (attribute, unit) in _ATTRIBUTES.items():
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            facts[key] = unit * value.value
        found.append(facts)
    return found


if __name__ == "__main__":
    json.dump(gpus(), sys.stdout)
