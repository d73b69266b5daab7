"""The machine: devices, the links between them, and which transfers share a link.

A cluster comes from a YAML file, from a preset (`placewright/clusters/*.yaml`) or from looking at
this machine (`local`). The file format is described in docs/clusters.md.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from placewright import chips
from placewright.discovery import chosen_document, local_document
from placewright.errors import ClusterError, PlacewrightError
from placewright.files import read_text, write_text
from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray, frozen

logger = logging.getLogger(__name__)

FORMAT = "placewright-cluster/1"

OP_CLASSES = (
    "conv", "depthwise", "matmul", "memory", "gather", "update", "elementwise", "tiny",
)  # fmt: skip
"""Classes of op that reach a different share of a device's peak: kinds of work (`graph.Work`), ops
too small to fill the device, and `elementwise`: what those that are neither convolutions nor matrix
products compute."""

ISSUES = ("device", "host", "none")
"""Who issues work, see `Cluster.issue`."""

_ROUTING_BYTES = 1 << 20
"""Routes are chosen for a tensor of this size: large enough that bandwidth counts, small enough
that latency does too."""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """What all devices of one make have in common. Speeds are those of one slot."""

    name: str
    type: str
    """`cpu`, `gpu`, ...: what kernels are written for."""
    peak_flops: float
    """Floating-point operations per second of one slot, single precision."""
    memory_bandwidth: float
    """Bytes per second between one slot and the device's memory."""
    memory_bytes: int
    cache_bytes: int = 0
    """What one slot finds in a cache rather than in memory: an op that moves no more bytes moves
    them at `cache_bandwidth`."""
    cache_bandwidth: float = 0.0
    """Bytes per second; 0 for a kind whose cache nobody described."""
    slots: int = 1
    """How many ops run at a time: 1 for a GPU stream, more for a CPU's thread pools."""
    dispatch_seconds: float = 1e-6
    """What the framework spends on any op, even one that computes nothing."""
    launch_seconds: float = 0.0
    """What starting a kernel costs on top, for ops that compute."""
    gap_seconds: float = 0.0
    """What each kernel takes of the device besides its work, whoever issues it: starting up,
    running out, and what lies between two."""
    conv_start_seconds: float = 0.0
    """What a convolution takes besides, however small it is: a CPU's library looks up how to
    compute it, and puts images and filters into an order of its own."""
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """Share of the peak that each class of op reaches, see `share`."""
    sms: int = 0
    """Streaming multiprocessors of a GPU, or of one partition of it; 0 where nobody said."""
    chip_bandwidth: float = 0.0
    """Bytes per second of the memory of the whole chip, for a kind whose devices are parts of one
    and cannot draw all of it; 0 where that is `memory_bandwidth`."""
    pinned_bytes: int | None = None
    """How much of the memory can be pinned (page-locked), which weights have to be that travel from
    there; None for all of it."""

    def __post_init__(self) -> None:
        what = f"device kind {self.name!r}"
        for key in ("peak_flops", "memory_bandwidth"):
            _positive(getattr(self, key), f"{key} of {what}")
        for key in (
            "dispatch_seconds", "launch_seconds", "gap_seconds", "conv_start_seconds",
            "cache_bytes", "cache_bandwidth", "sms", "chip_bandwidth",
        ):  # fmt: skip
            _not_negative(getattr(self, key), f"{key} of {what}")
        if self.memory_bytes <= 0:
            raise ClusterError(f"memory of {what} must be positive, not {self.memory_bytes}")
        if self.pinned_bytes is not None and self.pinned_bytes < 0:
            raise ClusterError(
                f"pinned memory of {what} must not be negative, not {self.pinned_bytes}"
            )
        if self.slots < 1:
            raise ClusterError(f"slots of {what} must be at least 1, not {self.slots}")
        for name, share in self.efficiency.items():
            if name not in OP_CLASSES:
                raise ClusterError(
                    f"{what} has an efficiency for {name!r}; classes are {', '.join(OP_CLASSES)}"
                )
            if not 0 < share <= 1:
                raise ClusterError(f"{what}: efficiency {name} must be in (0, 1], not {share}")

    def share(self, op_class: str) -> float:
        """Of the peak, for a class of op: `depthwise`, `gather`, `update` and `elementwise` are as
        `memory` unless they have a share of their own, and what is not given at all reaches the
        peak."""
        own = ("depthwise", "gather", "update", "elementwise")
        if op_class in own and op_class not in self.efficiency:
            op_class = "memory"
        return self.efficiency.get(op_class, 1.0)


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    kind: DeviceKind
    memory_bytes: int
    pinned_bytes: int | None = None
    """As in the kind; None for what the kind says."""

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ClusterError(
                f"memory of device {self.name!r} must be positive, not {self.memory_bytes}"
            )
        if self.pinned_bytes is not None and self.pinned_bytes < 0:
            raise ClusterError(
                f"pinned memory of device {self.name!r} must not be negative, not "
                f"{self.pinned_bytes}"
            )

    @property
    def pinnable_bytes(self) -> int:
        """How much of the memory can be pinned."""
        own = self.kind.pinned_bytes if self.pinned_bytes is None else self.pinned_bytes
        return self.memory_bytes if own is None else min(own, self.memory_bytes)

    @property
    def type(self) -> str:
        return self.kind.type

    @property
    def chip(self) -> str:
        """The physical device: the same for all streams of a GPU, and for all its partitions."""
        return chips.parse(self.name).chip

    @property
    def sharing(self) -> str:
        """`stream` or `part` for a device that is one of several on its chip; otherwise nothing."""
        return chips.parse(self.name).sharing


@dataclass(frozen=True, kw_only=True)
class Link:
    """A wire. One transfer at a time uses it (in each direction, when `duplex`)."""

    name: str
    latency_seconds: float
    bandwidth: float
    """Bytes per second."""
    pairs: tuple[tuple[str, str], ...]
    """The neighbours (devices or switches) it joins; transfers between any of them share it."""
    duplex: bool = True
    """Whether the two directions are separate, as on PCIe, or share the wire."""
    gap_seconds: float | None = None
    """The part of the latency during which nothing else can start on the link; all of it unless
    given. What remains passes on the way, side by side with other transfers."""
    overhead_seconds: float = 0.0
    """What a transfer takes of the processor at either end, where that is busy computing: gRPC
    packs and unpacks on the cores that compute."""
    overhead_bandwidth: float = math.inf
    """Bytes per second of that work, on top."""
    relays: bool = False
    """Whether all of a tensor has to arrive at the end of the link before it goes on over the next
    one, as where a copy to the host's memory and one from there follow each other. It is then sent
    to that end once, whoever needs it there or beyond. Otherwise a way over several links is one
    transfer for each target, which occupies all links at once."""

    def __post_init__(self) -> None:
        _not_negative(self.latency_seconds, f"latency of link {self.name!r}")
        if self.gap_seconds is not None and not 0 <= self.gap_seconds <= self.latency_seconds:
            raise ClusterError(
                f"gap of link {self.name!r} must be between 0 and its latency "
                f"({self.latency_seconds:g} s), not {self.gap_seconds:g}"
            )
        _positive(self.bandwidth, f"bandwidth of link {self.name!r}")
        _not_negative(self.overhead_seconds, f"overhead of link {self.name!r}")
        if not self.overhead_bandwidth > 0:
            raise ClusterError(f"overhead_bandwidth of link {self.name!r} must be positive")
        if not self.pairs:
            raise ClusterError(f"link {self.name!r} joins nothing; give it 'pairs'")


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """How a tensor gets from one of D devices to another, as arrays for the simulator.

    A transfer occupies all channels of its route at once, from its start for
    `gap + bytes * seconds_per_byte`, and arrives after `latency + bytes * seconds_per_byte`. A
    channel is one direction of a link.
    """

    latency_seconds: FloatArray
    """[D, D] summed over the route."""
    gap_seconds: FloatArray
    """[D, D] likewise; not more than the latency."""
    seconds_per_byte: FloatArray
    """[D, D] of the slowest link on the route."""
    overhead_seconds: FloatArray
    """[D, D] that either end is kept from computing, summed over the route."""
    overhead_seconds_per_byte: FloatArray
    """[D, D] likewise."""
    offsets: IndexArray
    """[D * D + 1] channels of the route from s to d: `channels[offsets[s*D+d] : ...]`."""
    channels: IndexArray
    channel_names: tuple[str, ...]
    relayed: BoolArray
    """[D, D] whether the links of the route carry a tensor one after another (`Link.relays`). The
    sums above are then those of a transfer that waits for nobody."""
    relay: IndexArray
    """[D, D] number of the memory at the end of the first link."""
    hop_latency_seconds: FloatArray
    """[channels] of the link that each entry of `channels` belongs to, for relayed routes."""
    hop_gap_seconds: FloatArray
    """[channels] likewise."""
    hop_seconds_per_byte: FloatArray
    """[channels] likewise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """Devices and links. Immutable."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    switches: tuple[str, ...] = ()
    """Names that links may join besides devices."""
    contention: float = 0.0
    """By what share everything takes longer for each further device that computes at the same time,
    as where devices share a core's units or a memory bus. A device's own slots do not count: what
    its ops take is as they run there side by side."""
    issue: str | None = None
    """Who issues the ops, which takes each kind's dispatch and launch seconds. `device`: an
    executor for each device, as in TensorFlow; it runs ahead of an accelerator, and shares the
    cores of a CPU with what it issues. `host`: one thread for all devices, in the order of the
    program, as in eager PyTorch. `none`: nobody, as in a captured graph; only the kinds' gaps lie
    between kernels. None: who does so in the model's framework (`Graph.issue`)."""
    in_order: bool = False
    """Whether each device starts its ops in the order of the program, as a stream or a thread does
    that is given its work in that order: one that waits for its inputs then holds up those behind
    it. Otherwise it takes the ops in the order in which they become ready, as TensorFlow does."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError(f"cluster {self.name!r} has no devices")
        _not_negative(self.contention, f"contention of cluster {self.name!r}")
        if self.issue is not None and self.issue not in ISSUES:
            raise ClusterError(
                f"cluster {self.name!r}: 'issue' is {self.issue!r}, can be {', '.join(ISSUES)}"
            )
        if self.in_order and self.issue not in ("host", "none"):
            raise ClusterError(
                f"cluster {self.name!r}: 'in_order' needs 'issue: host' or 'issue: none'; "
                "executors take ops as they become ready"
            )
        _unique([device.name for device in self.devices], "device", self.name)
        _unique([link.name for link in self.links], "link", self.name)
        kinds: dict[str, DeviceKind] = {}
        for device in self.devices:
            if kinds.setdefault(device.kind.name, device.kind) != device.kind:
                raise ClusterError(f"two different device kinds are named {device.kind.name!r}")
        known = {device.name for device in self.devices} | set(self.switches)
        for link in self.links:
            for pair in link.pairs:
                for end in pair:
                    if end not in known:
                        raise ClusterError(
                            f"link {link.name!r} leads to {end!r}, which is no device or switch "
                            f"of cluster {self.name!r}"
                        )
                if pair[0] == pair[1]:
                    raise ClusterError(f"link {link.name!r} joins {pair[0]!r} with itself")
        _check_chips(self)
        _ = self.routes  # finds devices that cannot reach each other

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @cached_property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The distinct kinds, in order of first appearance."""
        return tuple({device.kind.name: device.kind for device in self.devices}.values())

    @cached_property
    def kind_of_device(self) -> IndexArray:
        """[D] index into `kinds`."""
        names = [kind.name for kind in self.kinds]
        return frozen(
            np.array([names.index(device.kind.name) for device in self.devices], dtype=np.int32)
        )

    def issued_by(self, usual: str) -> str:
        """Who issues the ops of a model whose framework has `usual` for it (`Graph.issue`). CPU
        devices without an accelerator beside them are processes or threads of their own."""
        if self.issue is not None:
            return self.issue
        return usual if any(device.type != "cpu" for device in self.devices) else "device"

    def issued_apart(self, issue: str) -> BoolArray:
        """[D] whether ops are issued beside what the device computes, and not by the device itself
        in between. An executor that shares its device's cores, or several servers of one device,
        take the time of issuing an op as a part of the op."""
        if issue == "device":
            apart = [device.type != "cpu" and device.kind.slots == 1 for device in self.devices]
        else:
            apart = [issue == "host"] * self.num_devices
        return frozen(np.array(apart, dtype=np.bool_))

    @cached_property
    def shared_chips(self) -> tuple[str, ...]:
        """Chips that several devices are streams or partitions of."""
        names = [device.chip for device in self.devices]
        return tuple(name for name in dict.fromkeys(names) if names.count(name) > 1)

    @cached_property
    def chip_of_device(self) -> IndexArray:
        """[D] index into `shared_chips`, -1 for a device that shares its chip with none."""
        index = {name: number for number, name in enumerate(self.shared_chips)}
        return frozen(np.array([index.get(d.chip, -1) for d in self.devices], dtype=np.int32))

    @cached_property
    def pool_of_device(self) -> IndexArray:
        """[D] the first device with the same memory: streams of a GPU have one, whose limit is the
        least that any of them is given. Every other device has its own."""
        first: dict[str, int] = {}
        pools = [
            first.setdefault(device.chip, d) if device.sharing == chips.STREAM else d
            for d, device in enumerate(self.devices)
        ]
        return frozen(np.array(pools, dtype=np.int32))

    @cached_property
    def pool_bytes(self) -> IntArray:
        """[D] the limit of the memory that each device uses, alone or with others."""
        limits = np.array([device.memory_bytes for device in self.devices], dtype=np.int64)
        least = limits.copy()
        np.minimum.at(least, self.pool_of_device, limits)
        return frozen(least[self.pool_of_device])

    def direct(self, source: int, target: int) -> bool:
        """Whether a link joins the two devices, so that tensors need not go through the host."""
        ends = {self.device_names[source], self.device_names[target]}
        return any(ends == set(pair) for link in self.links for pair in link.pairs)

    @property
    def unshared_host(self) -> str:
        """Why no two transfers share anything though they should, or nothing: several devices are
        joined to one by a link for each of them, so that transfers to all of them run side by side
        at full speed."""
        if any(len(link.pairs) > 1 for link in self.links) or self.switches:
            return ""
        hosts = [device.name for device in self.devices if device.type == "cpu"]
        for host in hosts:
            links = [link for link in self.links if host in link.pairs[0]]
            if len(links) > 1:
                return (
                    f"cluster {self.name!r}: {len(links)} devices share the host {host!r}, but no "
                    "two transfers share a link; list the pairs that share a wire under one link"
                )
        return ""

    def device_number(self, name: str) -> int:
        """Of a device by its name; torch's names for GPUs will do."""
        names = self.device_names
        try:
            return names.index(name if name in names else chips.canonical(name))
        except ValueError:
            raise ClusterError(
                f"cluster {self.name!r} has no device {name!r}; "
                f"it has {', '.join(self.device_names)}"
            ) from None

    @cached_property
    def routes(self) -> Routes:
        return _find_routes(self)

    @cached_property
    def fingerprint(self) -> str:
        text = json.dumps(to_document(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cluster):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def save(self, path: str | Path) -> None:
        text = yaml.safe_dump(to_document(self), sort_keys=False, allow_unicode=True)
        write_text(path, text, ClusterError)

    @staticmethod
    def load(source: str | Path) -> Cluster:
        """A YAML file, the name of a preset, or `local` for this machine."""
        cluster = _load(source)
        if cluster.unshared_host and Path(source).suffix in (".yaml", ".yml"):
            logger.warning("%s", cluster.unshared_host)
        return cluster


def _load(source: str | Path) -> Cluster:
    name = str(source)
    if name == "local":
        return from_document(local_document(), where=name)
    if name.startswith(_CHOSEN):
        return chosen(name.removeprefix(_CHOSEN).split(","), where=name)
    preset = resources.files("placewright").joinpath("clusters").joinpath(f"{name}.yaml")
    if re.fullmatch(r"[a-z0-9-]+", name) and preset.is_file():
        return from_document(_parse_yaml(preset.read_text("utf-8"), name), where=name)
    path = Path(source)
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        raise ClusterError(
            f"unknown cluster {name!r}: no such file, and the presets are "
            f"{', '.join(preset_names())}"
        )
    text = read_text(path, ClusterError, what="cluster")
    return from_document(_parse_yaml(text, name), where=name)


_CHOSEN = "local:"
"""Before devices of this machine, as in `local:cuda:0/stream:0-3,cpu`."""


def chosen(
    devices: Sequence[str],
    *,
    through_host: bool = False,
    sms: int | None = None,
    issue: str | None = None,
    where: str = "devices",
) -> Cluster:
    """Some devices of this machine: GPUs, streams (`cuda:0/stream:0`) or partitions of them
    (`cuda:0/part:0`), and CPUs, which share the cores.

    Args:
        devices: their names; a range of numbers stands for as many (`cuda:0/part:0-3`). Besides
            these, as on a command line, `via-host`, `sms=N` and `issue=WHO`.
        through_host: partitions of a GPU exchange tensors through the host's memory, as separate
            GPUs would, and not within the GPU.
        sms: multiprocessors of each partition; equal shares unless given.
        issue: who issues the ops, see `Cluster.issue`; by default nobody where streams or
            partitions are among the devices, as they are run within a captured graph, and otherwise
            who does so in the model's framework. With `host` and `none` devices keep to the order
            of the program.
        where: what errors call the list.
    """
    names = []
    for entry in devices:
        key, _, value = entry.strip().partition("=")
        if key == "via-host":
            through_host = True
        elif key == "sms":
            if not value.isdecimal():
                raise ClusterError(f"{where}: sms={value} is no number of multiprocessors")
            sms = int(value)
        elif key == "issue":
            issue = value
        else:
            names.append(entry.strip())
    try:
        names = chips.expanded(names)
        if issue is None and any(chips.parse(name).sharing for name in names):
            issue = "none"
        builtin = {name: _kind_document(kind) for name, kind in builtin_kinds().items()}
        document = chosen_document(names, through_host, sms, builtin)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error
    if issue is not None:
        document |= {"issue": issue, "in_order": issue in ("host", "none")}
    return from_document(document, where=where)


_SIZES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
          "tib": 2**40, "b": 1, "": 1}  # fmt: skip


def with_memory(
    cluster: Cluster, limits: Mapping[str, int | str], *, argument: str = "memory"
) -> Cluster:
    """The cluster with less, or more, memory on some devices. `argument` is what errors call the
    limits."""
    sizes = {
        chips.canonical(name): _memory_of(name, size, argument) for name, size in limits.items()
    }
    streamed = {d.chip for d in cluster.devices if d.sharing == chips.STREAM}
    for name in sizes:
        if name not in streamed:
            cluster.device_number(name)
    return replace(
        cluster,
        devices=tuple(
            replace(d, memory_bytes=sizes.get(d.name, sizes.get(d.chip, d.memory_bytes)))
            for d in cluster.devices
        ),
    )


def _memory_of(name: str, size: int | str, argument: str) -> int:
    text = str(size).strip().lower()
    number = text.rstrip("bikmgt ")
    unit = text[len(number) :].strip()
    try:
        return int(float(number) * _SIZES[unit])
    except (ValueError, KeyError, OverflowError):
        raise ClusterError(
            f"{argument}={{{name!r}: {size!r}}}: give bytes or a text such as '10GiB'"
        ) from None


def preset_names() -> tuple[str, ...]:
    """Names that `Cluster.load` takes besides files."""
    folder = resources.files("placewright").joinpath("clusters")
    names = sorted(Path(file.name).stem for file in folder.iterdir() if file.name != "kinds.yaml")
    return (*names, "local")


def builtin_kinds() -> dict[str, DeviceKind]:
    """Device kinds that cluster files may name without describing them."""
    kinds = resources.files("placewright").joinpath("clusters").joinpath("kinds.yaml")
    return _kinds(_parse_yaml(kinds.read_text("utf-8"), "kinds.yaml"))


# --- reading and writing -------------------------------------------------------------------------


def to_document(cluster: Cluster) -> dict[str, Any]:
    """The cluster as plain data, with every kind spelt out, so that it stands on its own."""
    return {
        "format": FORMAT,
        "name": cluster.name,
        "kinds": {kind.name: _kind_document(kind) for kind in cluster.kinds},
        "devices": [
            {
                "name": device.name,
                "kind": device.kind.name,
                "memory": device.memory_bytes,
                **({} if device.pinned_bytes is None else {"pinned": device.pinned_bytes}),
            }
            for device in cluster.devices
        ],
        "switches": list(cluster.switches),
        "links": [
            {
                "name": link.name,
                "latency": link.latency_seconds,
                "bandwidth": link.bandwidth,
                "pairs": [list(pair) for pair in link.pairs],
                "duplex": link.duplex,
                **_optional_document(link),
            }
            for link in cluster.links
        ],
        **({"contention": cluster.contention} if cluster.contention else {}),
        **({"issue": cluster.issue} if cluster.issue is not None else {}),
        **({"in_order": True} if cluster.in_order else {}),
    }


def _kind_document(kind: DeviceKind) -> dict[str, Any]:
    return {
        "type": kind.type,
        "peak_flops": kind.peak_flops,
        "memory_bandwidth": kind.memory_bandwidth,
        "memory": kind.memory_bytes,
        "slots": kind.slots,
        "dispatch": kind.dispatch_seconds,
        "launch": kind.launch_seconds,
        **({"gap": kind.gap_seconds} if kind.gap_seconds else {}),
        **({"conv_start": kind.conv_start_seconds} if kind.conv_start_seconds else {}),
        "efficiency": dict(kind.efficiency),
        **(
            {"cache": kind.cache_bytes, "cache_bandwidth": kind.cache_bandwidth}
            if kind.cache_bandwidth
            else {}
        ),
        **({"sms": kind.sms} if kind.sms else {}),
        **({"chip_bandwidth": kind.chip_bandwidth} if kind.chip_bandwidth else {}),
        **({} if kind.pinned_bytes is None else {"pinned": kind.pinned_bytes}),
    }


def _optional_document(link: Link) -> dict[str, float | bool]:
    document: dict[str, float | bool] = {}
    if link.gap_seconds is not None:
        document["gap"] = link.gap_seconds
    if link.overhead_seconds:
        document["overhead"] = link.overhead_seconds
    if link.overhead_bandwidth < math.inf:
        document["overhead_bandwidth"] = link.overhead_bandwidth
    if link.relays:
        document["relays"] = True
    return document


def from_document(document: object, *, where: str) -> Cluster:
    """The cluster a parsed YAML document describes; `where` names it in errors."""
    try:
        return _cluster(document, where)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


def _cluster(document: object, where: str) -> Cluster:
    known = {
        "format", "name", "kinds", "devices", "switches", "links", "contention", "issue",
        "in_order",
    }  # fmt: skip
    fields = _fields(document, "the cluster", known)
    if fields.get("format", FORMAT) != FORMAT:
        raise ClusterError(f"format is {fields['format']!r}, this version reads {FORMAT!r}")
    kinds = builtin_kinds()
    kinds.update(_kinds(fields.get("kinds") or {}))
    devices = []
    _not_more(len(_list(fields.get("devices"), "'devices'")), _MOST_DEVICES, "devices")
    for entry in fields["devices"]:
        data = _fields(entry, "a device", {"name", "kind", "memory", "pinned"})
        name = _node(data.get("name"), "the name of a device")
        kind_name = _string(data.get("kind"), f"'kind' of device {name!r}")
        if kind_name not in kinds:
            raise ClusterError(
                f"device {name!r} is of kind {kind_name!r}, which is not described; "
                f"built in are {', '.join(builtin_kinds())}"
            )
        kind = kinds[kind_name]
        memory = data.get("memory", kind.memory_bytes)
        devices.append(
            Device(
                name=name,
                kind=kind,
                memory_bytes=_bytes(memory, f"memory of {name!r}"),
                pinned_bytes=_optional_bytes(data.get("pinned"), f"pinned memory of {name!r}"),
            )
        )
    links = []
    for entry in _list(fields.get("links", []), "'links'"):
        known = {
            "name", "latency", "bandwidth", "pairs", "duplex", "gap", "overhead",
            "overhead_bandwidth", "relays",
        }  # fmt: skip
        data = _fields(entry, "a link", known)
        name = _string(data.get("name"), "the name of a link")
        pairs = []
        for pair in _list(data.get("pairs"), f"'pairs' of link {name!r}"):
            ends = [_node(end, f"an end of link {name!r}") for end in _list(pair, "a pair")]
            if len(ends) != 2:
                raise ClusterError(f"link {name!r}: a pair has two ends, not {len(ends)}")
            pairs.append((ends[0], ends[1]))
        links.append(
            Link(
                name=name,
                latency_seconds=_quantity(data.get("latency"), _SECONDS, f"latency of {name!r}"),
                bandwidth=_quantity(data.get("bandwidth"), _RATES, f"bandwidth of {name!r}"),
                pairs=tuple(pairs),
                duplex=_flag(data, "duplex", f"link {name!r}", True),
                relays=_flag(data, "relays", f"link {name!r}"),
                gap_seconds=(
                    _quantity(data["gap"], _SECONDS, f"gap of {name!r}") if "gap" in data else None
                ),
                overhead_seconds=_quantity(
                    data.get("overhead", 0.0), _SECONDS, f"overhead of {name!r}"
                ),
                overhead_bandwidth=_quantity(
                    data.get("overhead_bandwidth", math.inf),
                    _RATES,
                    f"overhead_bandwidth of {name!r}",
                ),
            )
        )
    _not_more(sum(len(link.pairs) for link in links), _MOST_PAIRS, "pairs of devices on links")
    switches = [_node(item, "a switch") for item in _list(fields.get("switches", []), "'switches'")]
    name = _string(fields.get("name", Path(where).stem), "the cluster's name")
    return Cluster(
        name=name,
        devices=tuple(devices),
        links=tuple(links),
        switches=tuple(switches),
        contention=_quantity(fields.get("contention", 0.0), {}, "contention"),
        issue=_string(fields["issue"], "'issue' of the cluster") if "issue" in fields else None,
        in_order=_flag(fields, "in_order", "the cluster"),
    )


def _kinds(document: object) -> dict[str, DeviceKind]:
    if not isinstance(document, dict):
        raise ClusterError("'kinds' must map names to descriptions")
    _not_more(len(document), _MOST_KINDS, "device kinds")
    result = {}
    for name, entry in document.items():
        what = f"device kind {name!r}"
        allowed = {
            "type", "peak_flops", "memory_bandwidth", "memory", "slots", "dispatch", "launch",
            "gap", "conv_start", "efficiency", "cache", "cache_bandwidth", "sms", "chip_bandwidth",
            "pinned",
        }  # fmt: skip
        data = _fields(entry, what, allowed)
        efficiency = data.get("efficiency", {})
        if not isinstance(efficiency, dict):
            raise ClusterError(f"'efficiency' of {what} must map op classes to shares")
        sms = data.get("sms", 0)
        if isinstance(sms, bool) or not isinstance(sms, int) or not 0 <= sms <= _MOST_SMS:
            raise ClusterError(
                f"'sms' of {what} must be a whole number up to {_MOST_SMS}, not {sms!r:.40}"
            )
        slots = data.get("slots", 1)
        if isinstance(slots, bool) or not isinstance(slots, int) or slots > _MOST_SLOTS:
            raise ClusterError(
                f"'slots' of {what} must be a whole number up to {_MOST_SLOTS}, not {slots!r:.40}"
            )
        result[str(name)] = DeviceKind(
            name=_string(name, "the name of a device kind"),
            type=_string(data.get("type"), f"'type' of {what}"),
            peak_flops=_quantity(data.get("peak_flops"), _FLOPS, f"peak_flops of {what}"),
            memory_bandwidth=_quantity(
                data.get("memory_bandwidth"), _RATES, f"memory_bandwidth of {what}"
            ),
            memory_bytes=_bytes(data.get("memory"), f"memory of {what}"),
            cache_bytes=_bytes(data.get("cache", 0), f"cache of {what}"),
            cache_bandwidth=_quantity(
                data.get("cache_bandwidth", 0.0), _RATES, f"cache_bandwidth of {what}"
            ),
            slots=slots,
            dispatch_seconds=_quantity(data.get("dispatch", 1e-6), _SECONDS, f"dispatch of {what}"),
            launch_seconds=_quantity(data.get("launch", 0.0), _SECONDS, f"launch of {what}"),
            gap_seconds=_quantity(data.get("gap", 0.0), _SECONDS, f"gap of {what}"),
            conv_start_seconds=_quantity(
                data.get("conv_start", 0.0), _SECONDS, f"conv_start of {what}"
            ),
            efficiency={
                str(key): _quantity(value, {}, f"efficiency {key} of {what}")
                for key, value in efficiency.items()
            },
            sms=sms,
            chip_bandwidth=_quantity(
                data.get("chip_bandwidth", 0.0), _RATES, f"chip_bandwidth of {what}"
            ),
            pinned_bytes=_optional_bytes(data.get("pinned"), f"pinned memory of {what}"),
        )
    return result


_MOST_CHARACTERS = 1_000_000
"""Of a cluster file: 1,000 devices and their links have a tenth of that."""
_MOST_VALUES = 100_000
"""In a cluster file, those behind aliases counted each time."""
_MOST_DIGITS = 400
"""Of a number in a cluster file; Python writes out no whole number of more than 4,300."""
_MOST_DEVICES = 1024
_MOST_KINDS = 256
_MOST_PAIRS = 1_000_000
_MOST_SLOTS = 1024
_MOST_SMS = 100_000


def _parse_yaml(text: str, where: str) -> object:
    if len(text) > _MOST_CHARACTERS:
        raise ClusterError(
            f"{where}: {len(text):,} characters, a cluster file has at most {_MOST_CHARACTERS:,}"
        )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        # Before anything is made of it: ten lines of aliases can stand for billions of values.
        if _size(node, {}) > _MOST_VALUES:
            raise ClusterError(f"{where}: its aliases stand for over {_MOST_VALUES:,} values")
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError) as fault:
        reason = " ".join(str(fault).split())
        raise ClusterError(f"{where}: not valid YAML: {reason}") from None


class _Loader(yaml.SafeLoader):
    """Stops at what no cluster file has, while it reads it: a value takes some 50 µs and 1 kB."""

    _values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise ValueError(f"over {_MOST_VALUES:,} values")
        node = super().compose_node(parent, index)
        number = isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS
        if node is not None and number and len(node.value) > _MOST_DIGITS:
            raise ValueError(f"a number of {len(node.value):,} characters")
        return node


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for; one that contains itself is counted as endless."""
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1  # what it is while we are inside
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]


def _not_more(count: int, most: int, what: str) -> None:
    if count > most:
        raise ClusterError(f"{count:,} {what}; a cluster has at most {most:,}")


def _fields(value: object, what: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterError(f"{what} must be a mapping with {', '.join(sorted(known))}")
    for key in value:
        if key not in known:
            raise ClusterError(f"{what}: unknown key {key!r}; known are {', '.join(sorted(known))}")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ClusterError(f"{what} must be a list, not {value!r}")
    return value


def _string(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ClusterError(f"{what} must be a non-empty string, not {value!r}")
    return value


def _flag(fields: Mapping[str, Any], key: str, what: str, default: bool = False) -> bool:
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise ClusterError(f"{what}: {key!r} must be true or false")
    return value


def _node(value: object, what: str) -> str:
    """A device or a switch; torch's names for GPUs are taken, too."""
    name = _string(value, what)
    return chips.canonical(name) if re.match(r"cuda(?=[:/]|$)", name) else name


_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": scale for prefix, scale in {**_DECIMAL, **_BINARY}.items()}
_RATES = {f"{unit}/s": scale for unit, scale in _BYTES.items()}
_FLOPS = {f"{prefix}FLOPS": scale for prefix, scale in _DECIMAL.items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _quantity(value: object, units: Mapping[str, float], what: str) -> float:
    """A plain number in base units, or text such as `12 GB` or `15us`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            return math.inf
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*", value)
        if match and (match[2] in units or not match[2]):
            try:
                return float(match[1]) * units.get(match[2], 1.0)
            except ValueError:
                pass
    example = f"a unit of {', '.join(units)}" if units else "no unit"
    raise ClusterError(f"{what} must be a number with {example}; not {value!r}")


def _bytes(value: object, what: str) -> int:
    size = _quantity(value, _BYTES, what)
    if not abs(size) < 2**60:
        raise ClusterError(f"{what} must be a size that a machine can have, not {value!r:.40}")
    return int(size)


def parse_bytes(value: object, what: str, error: type[PlacewrightError] = ClusterError) -> int:
    """A number of bytes, or a text such as `8GiB`; `what` names it in errors."""
    try:
        return _bytes(value, what)
    except ClusterError as fault:
        raise error(str(fault)) from None


def _optional_bytes(value: object, what: str) -> int | None:
    return None if value is None else _bytes(value, what)


def _positive(value: float, what: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(f"{what} must be positive, not {value:g}")


def _not_negative(value: float, what: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ClusterError(f"{what} must not be negative, not {value:g}")


def _check_chips(cluster: Cluster) -> None:
    """A chip is one device, or several streams, or several partitions."""
    for chip in cluster.shared_chips:
        mine = [device for device in cluster.devices if device.chip == chip]
        ways = {device.sharing for device in mine}
        if len(ways) > 1:
            raise ClusterError(
                f"cluster {cluster.name!r}: {chip} is there as {mine[0].name!r} and as "
                f"{next(d.name for d in mine if d.sharing != mine[0].sharing)!r}; a device is "
                "whole, or shared by streams, or divided into partitions"
            )
        if ways == {chips.STREAM} and len({device.kind.name for device in mine}) > 1:
            raise ClusterError(f"cluster {cluster.name!r}: streams of {chip} are of several kinds")


def _unique(names: Sequence[str], what: str, cluster: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ClusterError(f"cluster {cluster!r} has two {what}s named {name!r}")
        seen.add(name)


# --- routes --------------------------------------------------------------------------------------


def _find_routes(cluster: Cluster) -> Routes:
    """The quickest way for a tensor of 1 MiB between every two devices (Dijkstra)."""
    channel_names: list[str] = []
    # node -> [(neighbour, link, channel)]
    neighbours: dict[str, list[tuple[str, Link, int]]] = {}
    for link in cluster.links:
        forward = len(channel_names)
        backward = forward + (1 if link.duplex else 0)
        channel_names += [f"{link.name} >", f"{link.name} <"] if link.duplex else [link.name]
        for a, b in link.pairs:
            neighbours.setdefault(a, []).append((b, link, forward))
            neighbours.setdefault(b, []).append((a, link, backward))

    n = cluster.num_devices
    latency = np.zeros((n, n))
    gap = np.zeros((n, n))
    per_byte = np.zeros((n, n))
    overhead = np.zeros((n, n))
    overhead_per_byte = np.zeros((n, n))
    relayed = np.zeros((n, n), dtype=np.bool_)
    relay = np.zeros((n, n), dtype=np.int32)
    memories = _memories(cluster)
    offsets = [0]
    channels: list[int] = []
    hops: list[tuple[float, float, float]] = []
    for s, source in enumerate(cluster.device_names):
        ways = _quickest_ways(source, neighbours)
        for d, target in enumerate(cluster.device_names):
            if s != d:
                if target not in ways:
                    raise ClusterError(
                        f"cluster {cluster.name!r}: no link leads from {source!r} to {target!r}"
                    )
                nodes, way = [hop[2] for hop in ways[target]], [hop[:2] for hop in ways[target]]
                relayed[s, d] = any(link.relays for link, _ in way)
                relay[s, d] = memories[nodes[0]]
                slowest = sum if relayed[s, d] else max
                latency[s, d] = sum(link.latency_seconds for link, _ in way)
                gap[s, d] = sum(_gap(link) for link, _ in way)
                per_byte[s, d] = slowest(1.0 / link.bandwidth for link, _ in way)
                overhead[s, d] = sum(link.overhead_seconds for link, _ in way)
                overhead_per_byte[s, d] = sum(1.0 / link.overhead_bandwidth for link, _ in way)
                # A shared wire that is not duplex can come twice (up to the host, down again).
                used = way if relayed[s, d] else list({c: (k, c) for k, c in way}.values())
                channels += [channel for _, channel in used]
                hops += [(k.latency_seconds, _gap(k), 1.0 / k.bandwidth) for k, _ in used]
            offsets.append(len(channels))
    return Routes(
        latency_seconds=frozen(latency),
        gap_seconds=frozen(gap),
        seconds_per_byte=frozen(per_byte),
        overhead_seconds=frozen(overhead),
        overhead_seconds_per_byte=frozen(overhead_per_byte),
        offsets=frozen(np.array(offsets, dtype=np.int32)),
        channels=frozen(np.array(channels, dtype=np.int32)),
        channel_names=tuple(channel_names),
        relayed=frozen(relayed),
        relay=frozen(relay),
        hop_latency_seconds=frozen(np.array([hop[0] for hop in hops])),
        hop_gap_seconds=frozen(np.array([hop[1] for hop in hops])),
        hop_seconds_per_byte=frozen(np.array([hop[2] for hop in hops])),
    )


def _memories(cluster: Cluster) -> dict[str, int]:
    """Number of the memory of each device and switch; streams of a GPU have the same."""
    numbers: dict[str, int] = {}
    for device, pool in zip(cluster.devices, cluster.pool_of_device.tolist(), strict=True):
        numbers[device.name] = pool
    for switch in cluster.switches:
        numbers.setdefault(switch, cluster.num_devices + len(numbers))
    return numbers


def _gap(link: Link) -> float:
    return link.latency_seconds if link.gap_seconds is None else link.gap_seconds


def _quickest_ways(
    source: str, neighbours: Mapping[str, list[tuple[str, Link, int]]]
) -> dict[str, list[tuple[Link, int, str]]]:
    """Node -> the links on the way there, each with its channel and the node at its end."""
    ways: dict[str, list[tuple[Link, int, str]]] = {}
    # The counter keeps equal routes in the order the links were given in.
    queue: list[tuple[float, int, str, list[tuple[Link, int, str]]]] = [(0.0, 0, source, [])]
    counter = 1
    while queue:
        seconds, _, node, way = heapq.heappop(queue)
        if node in ways:
            continue
        ways[node] = way
        for neighbour, link, channel in neighbours.get(node, []):
            if neighbour not in ways:
                cost = link.latency_seconds + _ROUTING_BYTES / link.bandwidth
                further = [*way, (link, channel, neighbour)]
                heapq.heappush(queue, (seconds + cost, counter, neighbour, further))
                counter += 1
    return ways
