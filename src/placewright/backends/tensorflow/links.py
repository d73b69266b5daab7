"""Times links with real tensors: chains of ops that hand one on, from device to device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from placewright.backends import load_program
from placewright.backends.base import Run
from placewright.backends.tensorflow import TensorFlowRunConfig
from placewright.backends.tensorflow._tf import tf
from placewright.backends.tensorflow.program import TensorFlowProgram
from placewright.backends.tensorflow.runner import TensorFlowRunner
from placewright.cluster import Cluster
from placewright.errors import WorkerError

_HOPS = 16
"""How often a tensor of each size goes over the link, there and back, in one step."""


def time_links(
    cluster: Cluster, config: TensorFlowRunConfig, sizes: Sequence[int]
) -> dict[str, list[float]]:
    """As `Runner.time_links` says."""
    program = _chains(sizes)
    names = program.graph.op_names
    found = {}
    quiet = dataclasses.replace(config, check=False, limit_memory=False)
    with TensorFlowRunner(program, cluster, quiet) as runner:
        base = _seconds(runner.measure([0] * len(names)))
        for link in cluster.links:
            ends = [
                cluster.device_names.index(e) for e in link.pairs[0] if e in cluster.device_names
            ]
            if len(ends) < 2:
                continue
            home = _seconds(runner.measure([ends[0]] * len(names))) if ends[0] else base
            hops = []
            for size in sizes:
                devices = [
                    ends[_hop(name) % 2] if name.startswith(f"bytes_{size}/") else ends[0]
                    for name in names
                ]
                seconds = _seconds(runner.measure(devices))
                hops.append(max(1e-9, (seconds - home) / _HOPS))
            found[link.name] = hops
    return found


def _seconds(run: Run) -> float:
    if not run.measurement.ok:
        raise WorkerError(f"links could not be timed: {run.measurement.reason}")
    return float(np.median(run.measurement.step_seconds))


def _hop(name: str) -> int:
    last = name.rpartition("/hop_")[2]
    return int(last) if last.isdecimal() else 0


def _chains(sizes: Sequence[int]) -> TensorFlowProgram:
    """For every size a tensor that is handed on from op to op."""
    graph = tf.Graph()
    with graph.as_default():
        ends = []
        for size in sizes:
            with tf.compat.v1.name_scope(f"bytes_{size}"):
                tensor = tf.fill([size // 4], 1.0, name="hop_0")
                for hop in range(1, _HOPS + 1):
                    tensor = tf.identity(tensor, name=f"hop_{hop}")
                ends.append(tensor.op.name)
    program = load_program(graph, fetches=ends)
    assert isinstance(program, TensorFlowProgram)
    return program
