"""Everything on one device."""

from __future__ import annotations

import numpy as np

from placewright.graph import IndexArray
from placewright.placement import Placement, everything_on
from placewright.problem import Problem


def single_device(problem: Problem) -> list[Placement]:
    """One placement per device: all groups there, but for those that may not go there."""
    return [everything_on(problem, device) for device in range(problem.num_devices)]


def accelerators(problem: Problem) -> IndexArray:
    """The devices that are not CPUs, or all where there are only CPUs."""
    devices = problem.cluster.devices
    numbers = [d for d, device in enumerate(devices) if device.type != "cpu"]
    return np.array(numbers or range(len(devices)), dtype=np.int32)
