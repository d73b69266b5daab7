"""What the devices of a cluster are on this machine: a GPU, a stream or a part of one, some cores.

| device | what it is |
|---|---|
| `cpu:0`, `cpu:1` | equal shares of the cores, each with a thread of its own |
| `gpu:0` | the GPU that torch calls `cuda:0` |
| `gpu:0/stream:1` | a stream of that GPU; its streams share its memory |
| `gpu:0/part:1` | some of its multiprocessors, which no other part has (a green context) |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from placewright.backends.processes import share_cores
from placewright.chips import PART, parse
from placewright.cluster import Cluster
from placewright.errors import WorkerError


@dataclass(frozen=True, kw_only=True)
class Place:
    """One device of a cluster, as torch sees it."""

    number: int
    """Of the device in its cluster."""
    name: str
    device: str
    """Where its tensors are: torch's name of it."""
    pool: int
    """Places with the same number share their memory: the streams of a GPU do."""
    memory_bytes: int
    cores: tuple[int, ...] = ()
    """Of a CPU; nothing where they are not told apart."""
    part: int | None = None
    """Which part of its GPU it is, where it is one."""
    multiprocessors: int = 0
    """Of a part."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


def places_of(cluster: Cluster) -> tuple[Place, ...]:
    """The devices of a cluster. Touches none of them.

    Raises `WorkerError` for what is not a CPU or an NVIDIA GPU.
    """
    cpus = [number for number, device in enumerate(cluster.devices) if device.type == "cpu"]
    cores = dict(zip(cpus, _shares_of_cores(len(cpus), cluster.num_devices), strict=True))
    places = []
    for number, device in enumerate(cluster.devices):
        match = re.fullmatch(r"(cpu|gpu):(\d+)", device.chip)
        if match is None or match[1] != device.type:
            raise WorkerError(
                f"device {device.name!r} cannot be measured on; torch runs on cpu:0, gpu:0, "
                "gpu:0/stream:0 and gpu:0/part:0"
            )
        places.append(
            Place(
                number=number,
                name=device.name,
                device=f"cuda:{match[2]}" if match[1] == "gpu" else "cpu",
                pool=int(cluster.pool_of_device[number]),
                memory_bytes=int(cluster.pool_bytes[number]),
                cores=tuple(cores.get(number, ())),
                part=parse(device.name).number if device.sharing == PART else None,
                multiprocessors=device.kind.sms if device.sharing == PART else 0,
            )
        )
    return tuple(places)


def _shares_of_cores(cpus: int, devices: int) -> list[list[int]]:
    """Equal shares; beside GPUs one core is left to the thread that issues their work."""
    if not cpus:
        return []
    shares = share_cores(cpus)
    if devices > cpus and len(shares[0]) > 2:
        shares[0] = shares[0][1:]
    return shares


# --- streams -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Streams:
    """What a place on a GPU issues to."""

    compute: torch.cuda.Stream
    arrive: torch.cuda.Stream
    """Copies that come in."""
    leave: torch.cuda.Stream
    """Copies that go out."""


@dataclass
class OpenedGpus:
    """The streams of all places on GPUs, and what keeps them alive."""

    streams: dict[int, Streams] = field(default_factory=dict)
    """Number of the place -> its streams."""
    contexts: list[Any] = field(default_factory=list)


def open_gpus(places: Sequence[Place]) -> OpenedGpus:
    """Makes the streams; parts of one GPU are made with one split, so that they are disjoint."""
    opened = OpenedGpus()
    for place in places:
        if place.on_gpu and place.part is None:
            with torch.cuda.device(place.torch_device):
                opened.streams[place.number] = Streams(
                    compute=torch.cuda.Stream(place.torch_device),
                    arrive=torch.cuda.Stream(place.torch_device),
                    leave=torch.cuda.Stream(place.torch_device),
                )
    parts = [place for place in places if place.part is not None]
    for device in dict.fromkeys(place.torch_device for place in parts):
        _open_parts(device, [p for p in parts if p.torch_device == device], opened)
    return opened


def _open_parts(device: torch.device, places: Sequence[Place], opened: OpenedGpus) -> None:
    """Green contexts: each has some multiprocessors of the GPU, no two the same."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise WorkerError(
            "parts of a GPU need the package cuda-bindings (pip install 'placewright[nvidia]')"
        ) from None
    torch.zeros(1, device=device)  # the GPU's own context
    number = _checked(driver.cuDeviceGet(device.index))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _checked(driver.cuDeviceGetDevResource(number, kind))
    count = max(p.part for p in places if p.part is not None) + 1
    each = places[0].multiprocessors or whole.sm.smCount // count // 8 * 8
    if any(p.multiprocessors not in (0, each) for p in places):
        raise WorkerError(f"the parts of {device} differ in size; give all the same")
    groups, found, _ = _checked(driver.cuDevSmResourceSplitByCount(count, whole, 0, each))
    if found < count:
        raise WorkerError(
            f"{device} has {whole.sm.smCount} multiprocessors, which make {found} parts of {each} "
            f"and not {count}"
        )
    size = min(group.sm.smCount for group in groups[:count])
    if size != each:  # what the hardware can be divided into
        raise WorkerError(
            f"{device} is divided into parts of {size} multiprocessors and not of {each}; say "
            f"sms={size}"
        )
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    for place in places:
        assert place.part is not None
        description = _checked(driver.cuDevResourceGenerateDesc([groups[place.part]], 1))
        context = _checked(driver.cuGreenCtxCreate(description, number, flags))
        opened.contexts.append(context)

        def stream(context: Any = context) -> torch.cuda.Stream:
            how = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            handle = _checked(driver.cuGreenCtxStreamCreate(context, how, 0))
            return torch.cuda.ExternalStream(int(handle), device=device)

        opened.streams[place.number] = Streams(compute=stream(), arrive=stream(), leave=stream())


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver gives, without its error code."""
    code, *values = answer
    if int(code) != 0:
        raise WorkerError(f"the CUDA driver refuses to divide the GPU: {code.name}")
    return values[0] if len(values) == 1 else tuple(values)
