"""A placement: the device of every group."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placewright.errors import PlacementError
from placewright.files import read_json, write_json
from placewright.graph import IndexArray, frozen
from placewright.problem import Problem, Space

FORMAT = "placewright-placement/1"


def digest(devices: IndexArray) -> int:
    """A number that stands for a placement, the same in every process."""
    eight = hashlib.blake2b(devices.tobytes(), digest_size=8).digest()
    return int.from_bytes(eight, "little", signed=True)


@dataclass(frozen=True, eq=False)
class Placement:
    """Group -> device, valid in the space with this fingerprint, whatever ops and links cost.
    Immutable and hashable."""

    devices: IndexArray
    """[G] number of the device of each group."""
    space: str
    """Fingerprint of the `Space` it was made for."""

    @staticmethod
    def of(problem: Problem | Space, devices: Sequence[int] | IndexArray) -> Placement:
        """Checks that every group gets a device there is."""
        space = problem if isinstance(problem, Space) else problem.space
        array = np.array(devices, dtype=np.int32)
        groups = space.num_groups
        if array.shape != (groups,):
            raise PlacementError(
                f"placement covers {array.size} groups, the problem has {groups}; "
                "was it made for another grouping?"
            )
        count = space.num_devices
        # As unsigned numbers, negative ones are the largest.
        if array.size and not array.view(np.uint32).max() < count:
            raise PlacementError(
                f"placement uses device number {array.max() if array.min() >= 0 else array.min()}, "
                f"there are {count} devices ({', '.join(space.device_names)})"
            )
        return Placement(frozen(array), space.fingerprint)

    @property
    def main_device(self) -> int:
        """The device with most groups: of a placement on a single device, that one."""
        return int(np.bincount(self.devices).argmax())

    @functools.cached_property  # a search looks placements up again and again
    def digest(self) -> int:
        """The devices as one number, the same in every process."""
        return digest(self.devices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self is other or (
            self.space == other.space
            and self.digest == other.digest
            and np.array_equal(self.devices, other.devices)
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def save(self, path: str | Path, problem: Problem) -> None:
        """Writes group, op and device names, so that the file can be read, and applied to a model,
        without the problem."""
        self.check(problem)
        names = problem.cluster.device_names
        of_op = self.devices[problem.grouping.group_of].tolist()
        document = {
            "format": FORMAT,
            "space": self.space,
            "graph": problem.graph.name,
            "graph_fingerprint": problem.graph.fingerprint,
            "cluster": problem.cluster.name,
            "groups": {
                group: names[device]
                for group, device in zip(problem.grouping.names, self.devices.tolist(), strict=True)
            },
            "ops": {
                op: names[device] for op, device in zip(problem.graph.op_names, of_op, strict=True)
            },
        }
        write_json(path, document, PlacementError)

    @staticmethod
    def load(path: str | Path, problem: Problem) -> Placement:
        """Reads a placement for this problem.

        Groups and devices are matched by name, so a placement can be tried under other costs or on
        a cluster with other speeds; it must be for the same graph and cover exactly the problem's
        groups.
        """
        document = read_json(path, PlacementError, what="placement")
        groups = document.get("groups") if isinstance(document, dict) else None
        if not isinstance(groups, dict) or document.get("format") != FORMAT:
            raise PlacementError(f"{path}: not a placement file ({FORMAT})")
        made_for = document.get("graph_fingerprint", problem.graph.fingerprint)
        if made_for != problem.graph.fingerprint:
            raise PlacementError(
                f"{path}: placement of another graph ({document.get('graph')!r}, {made_for}), this "
                f"one is {problem.graph.name!r}, {problem.graph.fingerprint}; another batch?"
            )
        if len(groups) != problem.grouping.num_groups:
            raise PlacementError(
                f"{path}: placement covers {len(groups)} groups, the problem has "
                f"{problem.grouping.num_groups}; was it made for another grouping?"
            )
        devices = []
        numbers = {name: number for number, name in enumerate(problem.cluster.device_names)}
        for group in problem.grouping.names:
            if group not in groups:
                raise PlacementError(
                    f"{path}: no device for group {group!r}; the placement is for model "
                    f"{document.get('graph')!r}, this one is {problem.graph.name!r}"
                )
            if not isinstance(groups[group], str) or groups[group] not in numbers:
                raise PlacementError(
                    f"{path}: group {group!r} is on {groups[group]!r}, which cluster "
                    f"{problem.cluster.name!r} does not have ({', '.join(numbers)})"
                )
            devices.append(numbers[groups[group]])
        return Placement.of(problem, devices)

    def check(self, problem: Problem) -> None:
        """Raises when the placement was made for another graph, grouping, set of devices or
        constraints."""
        if self.space != problem.space.fingerprint:
            raise PlacementError(
                f"placement was made for space {self.space}, this is {problem.space.fingerprint}"
            )


def read_groups(path: str | Path) -> int:
    """How many groups a placement file is about; 0 for a file that is none."""
    document = read_json(path, PlacementError, what="placement")
    groups = document.get("groups") if isinstance(document, dict) else None
    return len(groups) if isinstance(groups, dict) else 0


def allowed_or_cpu(problem: Problem, wanted: IndexArray) -> IndexArray:
    """[G] the wanted device of each group where it may go there, else its first CPU, else its first
    device: what frameworks do with an op that has no kernel ("soft placement")."""
    cpus = np.array([device.type == "cpu" for device in problem.cluster.devices])
    on_cpu = problem.allowed & cpus
    fallback = np.where(on_cpu.any(axis=1), on_cpu.argmax(axis=1), problem.allowed.argmax(axis=1))
    fits = problem.allowed[np.arange(problem.num_groups), wanted]
    return np.where(fits, wanted, fallback).astype(np.int32)


def everything_on(problem: Problem, device: int) -> Placement:
    """All groups on one device, but for those that may not go there: they go to the CPU."""
    wanted = np.full(problem.num_groups, device, dtype=np.int32)
    return Placement.of(problem, allowed_or_cpu(problem, wanted))


def read_ops(path: str | Path) -> dict[str, str]:
    """Op name -> device name of a placement file, as it stands there."""
    document = read_json(path, PlacementError, what="placement")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlacementError(f"{path}: not a placement file ({FORMAT})")
    ops = document.get("ops")
    if not isinstance(ops, dict) or not all(isinstance(name, str) for name in ops.values()):
        raise PlacementError(f"{path}: does not say the device of every op ('ops'); is it edited?")
    return ops
