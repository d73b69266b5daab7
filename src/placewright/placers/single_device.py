"""Everything on one device, and the rule for what cannot run there."""

from __future__ import annotations

import numpy as np

from placewright.graph import IndexArray
from placewright.placement import Placement
from placewright.problem import Problem


def single_device(problem: Problem) -> list[Placement]:
    """One placement per device: all groups there, but for those that may not go there."""
    placements = []
    for device in range(problem.num_devices):
        wanted = np.full(problem.num_groups, device, dtype=np.int32)
        placements.append(Placement.of(problem, allowed_or_cpu(problem, wanted)))
    return placements


def allowed_or_cpu(problem: Problem, wanted: IndexArray) -> IndexArray:
    """[G] the wanted device of each group where it may go there, else its first CPU, else its first
    device: what frameworks do with an op that has no kernel ("soft placement")."""
    cpus = np.array([device.type == "cpu" for device in problem.cluster.devices])
    on_cpu = problem.allowed & cpus
    fallback = np.where(on_cpu.any(axis=1), on_cpu.argmax(axis=1), problem.allowed.argmax(axis=1))
    fits = problem.allowed[np.arange(problem.num_groups), wanted]
    return np.where(fits, wanted, fallback).astype(np.int32)


def accelerators(problem: Problem) -> IndexArray:
    """The devices that are not CPUs, or all where there are only CPUs."""
    devices = problem.cluster.devices
    numbers = [d for d, device in enumerate(devices) if device.type != "cpu"]
    return np.array(numbers or range(len(devices)), dtype=np.int32)
