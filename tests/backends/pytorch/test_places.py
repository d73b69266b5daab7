"""What devices of a cluster are on this machine: GPUs of a kind, and parts of them, by a driver
that is not there."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import placewright.backends as backends  # noqa: E402
from placewright.backends.pytorch.places import open_gpus, places_of  # noqa: E402
from placewright.cluster import Cluster, chosen, from_document, to_document  # noqa: E402
from placewright.errors import WorkerError  # noqa: E402
from tests.test_discovery import Nvml  # noqa: E402


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one H200, as torch and the driver see it."""
    nvml = Nvml(1)
    nvml.names = ["NVIDIA H200"]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


class Driver(types.ModuleType):
    """Divides 132 multiprocessors into groups of 8, 16, 24 ..."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.contexts: list[Any] = []

    def cuDeviceGet(self, number: int) -> tuple[int, int]:
        return 0, number

    def cuDeviceGetDevResource(self, number: int, kind: str) -> tuple[int, Any]:
        return 0, _some(132)

    def cuDevSmResourceSplitByCount(
        self, count: int, whole: Any, flags: int, least: int
    ) -> tuple[int, list[Any], int, Any]:
        each = -(-least // 8) * 8
        found = min(count, whole.sm.smCount // each)
        return 0, [_some(each, number) for number in range(found)], found, _some(4)

    def cuDevResourceGenerateDesc(self, groups: list[Any], count: int) -> tuple[int, Any]:
        return 0, groups[0]

    def cuGreenCtxCreate(self, description: Any, number: int, flags: int) -> tuple[int, Any]:
        self.contexts.append(description)
        return 0, description

    def cuGreenCtxStreamCreate(self, context: Any, how: int, priority: int) -> tuple[int, int]:
        return 0, 100 * context.number


def _some(count: int, number: int = 0) -> Any:
    return SimpleNamespace(sm=SimpleNamespace(smCount=count), number=number)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made, bindings = Driver(), types.ModuleType("cuda.bindings")
    bindings.driver = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    return made


@pytest.mark.usefixtures("h200")
def test_each_part_has_multiprocessors_of_its_own(driver: Driver) -> None:
    cluster = chosen(["cuda:0/part:0-3", "cpu"], sms=32)
    opened = open_gpus(places_of(cluster))
    assert [streams.compute for streams in opened.streams.values()] == [0, 100, 200, 300]
    assert [context.sm.smCount for context in driver.contexts] == [32] * 4


@pytest.mark.usefixtures("h200", "driver")
@pytest.mark.parametrize(
    ("sms", "complaint"),
    [
        (12, "divided into parts of 16 multiprocessors and not of 12; say sms=16"),
        (33, "132 multiprocessors, which make 3 parts of 33 and not 4"),
    ],
)
def test_parts_that_the_hardware_does_not_make_are_refused(sms: int, complaint: str) -> None:
    cluster = chosen(["cuda:0/part:0-3"], sms=sms)
    with pytest.raises(WorkerError, match=complaint):
        open_gpus(places_of(cluster))


@pytest.mark.usefixtures("h200")
def test_parts_need_a_package_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(WorkerError, match="need the package cuda-bindings"):
        open_gpus(places_of(chosen(["cuda:0/part:0-3"])))


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("h200", ""),
        ("h200-streams4", ""),
        ("h200-parts4", ""),
        ("h200-parts4x8", ""),
        ("local", ""),
        ("k80x4", "its gpu:0 is a h200-141gb, not a tesla-k80"),
        ("a100x4", "its gpu:0 is a h200-141gb, not a a100-40gb"),
    ],
)
def test_a_gpu_of_another_kind_is_not_taken_for_what_the_cluster_says(
    preset: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert backends.get("pytorch").why_not_here(Cluster.load(preset)) == reason


@pytest.mark.usefixtures("h200")
def test_a_kind_of_ones_own_may_be_what_is_here() -> None:
    document = to_document(Cluster.load("local"))
    document["kinds"]["mine"] = {"type": "gpu", "peak_flops": 1e13, "memory_bandwidth": 1e12,
                                 "memory": 1e10}  # fmt: skip
    document["devices"][1]["kind"] = "mine"
    cluster = from_document(document, where="mine.yaml")
    assert cluster.devices[1].kind.name == "mine"
    assert backends.get("pytorch").why_not_here(cluster) == ""


@pytest.mark.usefixtures("h200")
def test_more_gpus_than_there_are() -> None:
    cluster = Cluster.load("a100x4")
    assert backends.get("pytorch").why_not_here(cluster) == "it has no gpu:1"
