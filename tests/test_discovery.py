from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from placewright.cluster import Cluster


class Nvml(types.ModuleType):
    """Answers as the driver of two GPUs does: one of an unknown kind (with the numbers of a real
    H200) and an A100."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = range(4)

    class NVMLError(Exception):
        pass

    def __init__(self, count: int, nvlink: bool = False) -> None:
        super().__init__("pynvml")
        self.count = count
        self.nvlink = nvlink
        self.shut_down = False
        self.names = ["NVIDIA H999", "NVIDIA A100-SXM4-40GB"]

    def nvmlInit(self) -> None:
        if not self.count:
            raise self.NVMLError("driver not loaded")

    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(total=[150754820096, 42505273344][handle])

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return [(9, 0), (8, 0)][handle]

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        return 16896

    def nvmlDeviceGetMaxClockInfo(self, handle: int, which: int) -> int:
        return 1980 if which == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        return 6016

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, what: int) -> int:
        if not self.nvlink:
            raise self.NVMLError("not supported")
        return self.NVML_P2P_STATUS_OK


def discover(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> Cluster:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return Cluster.load("local")


def test_gpus_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(2)
    cluster = discover(monkeypatch, nvml)
    assert cluster.device_names == ("cpu:0", "gpu:0", "gpu:1")
    unknown, known = cluster.devices[1:]
    assert unknown.kind.name == "nvidia-h999"
    assert unknown.kind.peak_flops == pytest.approx(66.9e12, rel=0.01)
    assert unknown.kind.sms == 132
    assert unknown.kind.memory_bandwidth == pytest.approx(4.8e12, rel=0.01)
    assert known.kind.name == "a100-40gb"  # built in: it knows the tensor cores
    assert known.memory_bytes == 42505273344
    assert cluster.routes.seconds_per_byte[1, 0] == pytest.approx(1 / 50.4e9, rel=0.01)
    assert cluster.routes.latency_seconds[1, 2] == pytest.approx(20e-6)  # through the host
    assert nvml.shut_down


def test_nvlink_joins_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = discover(monkeypatch, Nvml(2, nvlink=True))
    assert cluster.routes.latency_seconds[1, 2] == pytest.approx(5e-6)


def test_a_gpu_that_tells_nothing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = Nvml(1)

    def refuse(handle: int) -> int:
        raise nvml.NVMLError("not supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetNumGpuCores", refuse)
    assert discover(monkeypatch, nvml).device_names == ("cpu:0",)
    assert "GPU 0 is left out" in caplog.text


def test_no_driver_means_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert discover(monkeypatch, Nvml(0)).device_names == ("cpu:0",)
