"""Whether the devices of a cluster are those of this machine."""

from __future__ import annotations

from placewright.cluster import Cluster
from placewright.machine import usable_cores


def why_not_here(cluster: Cluster) -> str:
    """Why placements on this cluster cannot be measured on this machine; empty when they can.

    CPU devices stand for cores: as many as there are devices are enough. GPUs must be there, and
    of the same kind.
    """
    cpus = [device for device in cluster.devices if device.type == "cpu"]
    others = [device for device in cluster.devices if device.type != "cpu"]
    if others:
        local = {device.name: device.kind.name for device in Cluster.load("local").devices}
        for device in others:
            if device.name not in local:
                return f"it has no {device.name}"
            if local[device.name] != device.kind.name:
                return f"its {device.name} is a {local[device.name]}, not a {device.kind.name}"
        if len(cpus) > 1:
            return "several CPU devices beside GPUs need servers of their own (--address)"
    elif len(cpus) > usable_cores():
        return f"{len(cpus)} CPU devices need as many cores, it has {usable_cores()}"
    return ""
