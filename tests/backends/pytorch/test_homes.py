"""Homes of the weights of captured modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from placewright.backends.pytorch.exporting import Inputs, Task
from placewright.backends.pytorch.program import TorchModel, read_program
from placewright.cluster import Cluster, from_document
from placewright.graph import Graph
from placewright.placement import Placement
from placewright.problem import Problem, ProblemConfig, make_problem, with_homes
from placewright.simulator import Simulator
from placewright.stays import How, stays, unit_weights, visits_to
from placewright.torch import problem_of

DIM, LAYERS = 32, 3


class Block(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)
        self.register_buffer("scale", torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * self.scale + self.down(nn.functional.gelu(self.up(x)))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def machine(memory: int = 10**9) -> Cluster:
    document = {
        "name": "host and GPU",
        "devices": [
            {"name": "cpu:0", "kind": "server-cpu-16"},
            {"name": "gpu:0", "kind": "a100-40gb", "memory": memory},
        ],
        "links": [
            {"name": "pcie", "latency": "5us", "bandwidth": "50 GB/s",
             "pairs": [["cpu:0", "gpu:0"]]}
        ],
        "issue": "none",
    }  # fmt: skip
    return from_document(document, where="test")


def captured(train: bool) -> tuple[Problem, Graph]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters()) if train else None
    source = TorchModel(
        model, Inputs.of(torch.zeros(2, DIM)), Task(train=train, optimizer=optimizer)
    )
    program = read_program(source)
    return problem_of(program, machine(), "module"), program.graph


def on_the_host(problem: Problem) -> Placement:
    """All weights are at home on the host, and the GPU computes."""
    homes = {home for held in unit_weights(problem).values() for home in held}
    return Placement.of(problem, [int(g not in homes) for g in range(problem.num_groups)])


@pytest.mark.parametrize("train", [False, True])
def test_every_parameter_travels_once_for_each_pass(train: bool) -> None:
    tied, graph = captured(train)
    weights = {name for name, type_ in zip(graph.op_names, graph.op_types, strict=True)
               if type_ == "parameter"}  # fmt: skip
    assert len(weights) == 2 * LAYERS
    one = 4 * 4 * DIM * DIM
    problem = with_homes(tied, window_bytes=one)
    placement = on_the_host(problem)
    assert {stay.how for stay in stays(problem, placement)} == {How.STREAMED}
    (coming,) = visits_to(problem, placement).values()
    names = [problem.graph.op_names[visit.op] for visit in coming]
    forward = [f"layers/{i}/{part}/weight" for i in range(LAYERS) for part in ("up", "down")]
    assert names[: len(forward)] == forward
    # The input needs no gradient, so the first weight is not read again; what is between the last
    # read of the forward pass and the first of the backward pass fits.
    again = list(reversed(forward[1:])) if train else []
    assert set(names[len(forward) :]) <= set(again)
    assert len(names) >= len(forward) + len(again) - 1
    # Buffers stay with who reads them.
    buffers = [name for name, type_ in zip(graph.op_names, graph.op_types, strict=True)
               if type_ == "buffer"]  # fmt: skip
    devices = placement.devices[problem.grouping.group_of]
    assert {int(devices[problem.graph.op_index[name]]) for name in buffers} == {1}


def test_gradients_go_to_where_the_state_is() -> None:
    tied, graph = captured(train=True)
    problem = with_homes(tied)
    placement = on_the_host(problem)
    devices = placement.devices[problem.grouping.group_of]
    of_type = {
        kind: {int(devices[i]) for i, type_ in enumerate(graph.op_types) if type_.startswith(kind)}
        for kind in ("parameter", "state", "update")
    }
    assert of_type["parameter"] == of_type["state"] == of_type["update"] == {0}
    timeline = Simulator(problem).timeline(placement)
    down = timeline.transfers.target == 0
    sizes = timeline.transfers.bytes[down]
    assert np.count_nonzero(sizes == 16 * DIM * DIM) == 2 * LAYERS
    # With Adam's two moments and the weights, three times as much is at home there.
    resident = int(problem.group_resident_bytes[placement.devices == 0].sum())
    assert resident >= 3 * 2 * LAYERS * 16 * DIM * DIM


def test_what_does_not_fit_has_homes_by_itself() -> None:
    _, graph = captured(train=False)
    weights = 2 * LAYERS * 16 * DIM * DIM
    assert make_problem(graph, machine(10 * weights)).homes is None
    assert make_problem(graph, machine(weights // 2)).homes is not None
    assert make_problem(graph, machine(weights // 2), ProblemConfig(homes=False)).homes is None
