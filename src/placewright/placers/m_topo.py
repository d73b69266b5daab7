"""m-TOPO: fills one device after another in topological order, an equal share of memory each.

Jeon et al.: "Baechi: fast device placement of machine learning graphs", SoCC 2020.
"""

from __future__ import annotations

import numpy as np

from placewright.placement import Placement
from placewright.placers._schedule import find_candidates, room_of, take_room
from placewright.placers.single_device import accelerators
from placewright.problem import Problem


def m_topo(problem: Problem) -> list[Placement]:
    """Groups go in the order of their first ops; each accelerator takes the same share of memory.

    The share is the paper's: the mean per device plus the largest group, so that the last device
    is not left with too much. No device takes more than it has. A group that may not go to the
    device whose turn it is goes to the least filled one that has room.
    """
    turns = accelerators(problem)
    room = room_of(problem, turns)
    needed = room.most_needed
    share = needed.sum() // len(turns) + needed.max()
    devices = np.full(problem.num_groups, -1, dtype=np.int32)
    candidate = np.zeros(problem.num_devices, dtype=np.bool_)
    turn, filled = 0, 0
    for group in range(problem.num_groups):  # numbered by their first ops
        find_candidates(room, group, candidate)
        # On to the next device when this one has its share, or no room left.
        while (
            turn + 1 < len(turns)
            and problem.allowed[group, turns[turn]]
            and (filled + needed[group] > share or not candidate[turns[turn]])
        ):
            turn, filled = turn + 1, 0
        chosen = int(turns[turn])
        if candidate[chosen]:
            filled += needed[group]
        else:
            options = np.flatnonzero(candidate)
            chosen = int(options[np.argmin(room.most_used[options] / room.capacity[options])])
        devices[group] = chosen
        take_room(room, group, chosen)
    return [Placement.of(problem, devices)]
