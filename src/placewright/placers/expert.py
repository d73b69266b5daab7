"""What a person does by hand: one LSTM layer per device, or contiguous parts."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from placewright.graph import IndexArray
from placewright.placement import Placement, allowed_or_cpu
from placewright.placers.group_graph import group_graph, group_loads, relative_speeds
from placewright.placers.single_device import accelerators
from placewright.problem import Problem

_LAYER = re.compile(r"layer[_ ]?(\d+)(?=/|$)")
"""A layer of a recurrent net; what stands before it in the group's name is the stack (encoder)."""
_STEP = re.compile(r"(^|/)step[_ ]?\d+")


def expert(problem: Problem) -> list[Placement]:
    """The expert's placement of the paper (section 4.1) on the accelerators.

    A net is recurrent when groups are named after a layer and a time step, as in
    `encoder/layer_0/step_12`; the parts of one are recognised by their groups' names.
    """
    devices = accelerators(problem)
    layers = _layers(problem.grouping.names)
    if layers:
        wanted = _one_layer_per_device(problem, layers, devices)
    elif problem.graph.group_rules:
        # Groups are numbered by their first ops, which is the order of the layers. Where the author
        # of the model says what a group is, parts have equally many of them, as in the paper.
        order = np.arange(problem.num_groups)
        wanted = devices[order * len(devices) // problem.num_groups]
    else:
        wanted = _parts_of_equal_work(problem, devices)
    return [Placement.of(problem, allowed_or_cpu(problem, wanted))]


def _parts_of_equal_work(problem: Problem, devices: IndexArray) -> IndexArray:
    """[G] Contiguous parts with as much work as their devices are fast: groups that nobody chose
    are of very different sizes."""
    speeds = relative_speeds(problem, devices)
    work = group_loads(problem, devices, speeds)
    if not work.any():
        work = np.ones(problem.num_groups)
    middle = (np.cumsum(work) - work / 2) / work.sum()
    parts = np.searchsorted(np.cumsum(speeds)[:-1], middle, side="right")
    return np.asarray(devices[parts], dtype=np.int32)


def _layers(names: tuple[str, ...]) -> dict[int, tuple[str, int]]:
    """Group -> (stack, layer), for groups of a layer; empty where the net is not recurrent."""
    layers = {}
    for group, name in enumerate(names):
        match = _LAYER.search(name)
        if match:
            layers[group] = (name[: match.start()], int(match[1]))
    recurrent = any(_STEP.search(names[group]) for group in layers)
    return layers if recurrent else {}


def _one_layer_per_device(
    problem: Problem, layers: Mapping[int, tuple[str, int]], devices: IndexArray
) -> IndexArray:
    """[G] The layers of all stacks, encoder before decoder, take the devices in turn.

    So four layers (two of an encoder, two of a decoder) on four devices have one each, and on two
    devices layer i of either stack is on device i. An embedding goes with the first layer of the
    stack that uses it most; attention and softmax go with the last layer. All else (variables that
    are groups of their own, inputs, the loss) goes where most of its edges lead.
    """
    # Groups are numbered by their first ops, so the stacks come in the order in which they run.
    stacks = list(dict.fromkeys(stack for stack, _ in layers.values()))
    turn = sorted(set(layers.values()), key=lambda layer: (stacks.index(layer[0]), layer[1]))
    device_of = {layer: int(devices[k % len(devices)]) for k, layer in enumerate(turn)}
    bottoms = {stack: min(layer for layer in turn if layer[0] == stack) for stack in stacks}

    graph = group_graph(problem)
    parts = [slice(*graph.offsets[group : group + 2]) for group in range(problem.num_groups)]
    # [G] other group and number of edges between the two.
    edges = [
        list(zip(graph.neighbour[part].tolist(), graph.edges[part].tolist(), strict=True))
        for part in parts
    ]
    wanted = np.full(problem.num_groups, -1, dtype=np.int32)
    for group, name in enumerate(problem.grouping.names):
        if group in layers:
            wanted[group] = device_of[layers[group]]
        elif re.search("attention|softmax", name):
            wanted[group] = device_of[turn[-1]]
        elif "embedding" in name:
            users = dict.fromkeys(stacks, 0)
            for other, count in edges[group]:
                if other in layers:
                    users[layers[other][0]] += count
            stack = max(stacks, key=lambda stack: users[stack])  # the first of equals
            wanted[group] = device_of[bottoms[stack]]

    # Nearest first: a group may have edges only to others that are still open.
    while (wanted < 0).any():
        votes = np.zeros((problem.num_groups, problem.num_devices), dtype=np.int64)
        for group in np.flatnonzero(wanted < 0).tolist():
            for other, count in edges[group]:
                if wanted[other] >= 0:
                    votes[group, wanted[other]] += count
        decided = (wanted < 0) & votes.any(axis=1)
        if not decided.any():
            wanted[wanted < 0] = device_of[turn[0]]
        wanted[decided] = votes[decided].argmax(axis=1)
    return wanted
