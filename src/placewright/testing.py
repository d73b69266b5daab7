"""For tests: graphs and problems of any size, tiny problems with known optima, and the contract
that every evaluator keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from placewright.cluster import Cluster, Device, DeviceKind, Link, builtin_kinds
from placewright.costs import estimate_costs
from placewright.errors import PlacementError
from placewright.evaluators.base import Evaluator
from placewright.graph import Edge, Graph, Op, Tensor
from placewright.grouping import each_op, group
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import Problem

# --- graphs and clusters -------------------------------------------------------------------------


def layered_graph(ops: int, width: int, seed: int = 0) -> Graph:
    """A random graph in layers of `width` ops, with the mixture real training graphs have.

    Ops take one to three inputs, four in five from the layer before and the rest from up to eight
    layers back. Some own a variable, pass on their input's memory, have a second output or wait
    for a control edge.
    """
    rng = np.random.default_rng(seed)
    records: list[Op] = []
    edges: list[Edge] = []
    sizes = np.exp(rng.uniform(np.log(1e3), np.log(4e6), size=(ops, 2))).astype(np.int64)
    flops = np.exp(rng.uniform(np.log(1e4), np.log(1e9), size=ops))
    kinds = rng.random((ops, 4))
    for i in range(ops):
        layer = i // width
        fan_in = int(rng.integers(1, 4)) if layer else 0
        inputs: list[tuple[int, int]] = []
        for _ in range(fan_in):
            back = 1 if rng.random() < 0.8 else int(rng.integers(1, 9))
            source = max(layer - back, 0) * width + int(rng.integers(width))
            inputs.append((source, int(rng.integers(len(records[source].outputs)))))
        outputs = [Tensor(int(sizes[i, 0]))]
        if inputs and kinds[i, 0] < 0.08:
            source, output = inputs[0]
            size = records[source].outputs[output].bytes
            outputs = [Tensor(size, shares=(f"op{source}", output))]
        if kinds[i, 1] < 0.08:
            outputs.append(Tensor(int(sizes[i, 1])))
        records.append(
            Op(
                name=f"op{i}",
                type="Op",
                outputs=tuple(outputs),
                flops=float(flops[i]),
                param_bytes=int(sizes[i, 1]) if kinds[i, 2] < 0.05 else 0,
            )
        )
        edges += [Edge(f"op{s}", f"op{i}", output) for s, output in inputs]
        if layer and kinds[i, 3] < 0.03:
            source = (layer - 1) * width + int(rng.integers(width))
            edges.append(Edge(f"op{source}", f"op{i}", None))
    return Graph.from_ops(f"layered-{ops}", records, edges)


def gpu_boards(gpus: int = 4) -> Cluster:
    """K80 GPUs in pairs on boards, each pair sharing one connection to the host."""
    kind = builtin_kinds()["tesla-k80"]
    names = [f"gpu:{i}" for i in range(gpus)]
    return Cluster(
        name=f"boards-{gpus}",
        devices=tuple(
            Device(name=name, kind=kind, memory_bytes=kind.memory_bytes) for name in names
        ),
        switches=("host",),
        links=tuple(
            Link(
                name=f"board{first // 2}",
                latency_seconds=20e-6,
                bandwidth=10e9,
                pairs=tuple((name, "host") for name in names[first : first + 2]),
            )
            for first in range(0, gpus, 2)
        ),
    )
