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
from placewright.errors import WorkerError

_NAME = re.compile(r"(?:gpu|cuda):(\d+)(?:/(stream|part):(\d+))?|cpu:(\d+)")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One device of a cluster, as torch sees it."""

    number: int
    """Of the device in its cluster."""
    name: str
    device: torch.device
    """Where its tensors are."""
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
        return self.device.type == "cuda"


def places_of(
    names: Sequence[str], memory_bytes: Sequence[int], multiprocessors: Sequence[int] = ()
) -> tuple[Place, ...]:
    """The devices of a cluster by their names. Touches no device.

    Raises `WorkerError` for a name that is none of this machine's kinds.
    """
    matches = [_NAME.fullmatch(name) for name in names]
    for name, match in zip(names, matches, strict=True):
        if match is None:
            raise WorkerError(
                f"device {name!r} cannot be measured on; torch runs on cpu:0, gpu:0, gpu:0/stream:0 "
                "and gpu:0/part:0"
            )
    gpus = any(match is not None and match[4] is None for match in matches)
    cpus = [number for number, match in enumerate(matches) if match is not None and match[4]]
    cores = dict(zip(cpus, _cores_of(len(cpus), gpus), strict=True))
    places: list[Place] = []
    for number, (name, match) in enumerate(zip(names, matches, strict=True)):
        assert match is not None
        gpu, kind, index, cpu = match.groups()
        stream_pool = next(
            (p.pool for p in places if kind == "stream" and _gpu_of_stream(p) == gpu), number
        )
        places.append(
            Place(
                number=number,
                name=name,
                device=torch.device("cpu") if cpu else torch.device("cuda", int(gpu)),
                pool=stream_pool,
                memory_bytes=memory_bytes[number],
                cores=tuple(cores.get(number, ())),
                part=int(index) if kind == "part" else None,
                multiprocessors=multiprocessors[number] if multiprocessors else 0,
            )
        )
    return tuple(places)


def _gpu_of_stream(place: Place) -> str:
    match = _NAME.fullmatch(place.name)
    return match[1] if match is not None and match[2] == "stream" else ""


def _cores_of(cpus: int, gpus: bool) -> list[list[int]]:
    """Equal shares; beside GPUs one core is left to the thread that issues their work."""
    if not cpus:
        return []
    shares = share_cores(cpus)
    if gpus and len(shares[-1]) > 2:
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
            with torch.cuda.device(place.device):
                opened.streams[place.number] = Streams(
                    compute=torch.cuda.Stream(place.device),
                    arrive=torch.cuda.Stream(place.device),
                    leave=torch.cuda.Stream(place.device),
                )
    for device in dict.fromkeys(p.device for p in places if p.part is not None):
        _open_parts([p for p in places if p.device == device and p.part is not None], opened)
    return opened


def _open_parts(places: Sequence[Place], opened: OpenedGpus) -> None:
    """Green contexts: each has some multiprocessors of the GPU, no two the same."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise WorkerError(
            "parts of a GPU need the package cuda-bindings (pip install 'placewright[nvidia]')"
        ) from None
    device = places[0].device
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
