"""What the step of an answer is made of, and what its speed-up rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from placewright.graph import frozen
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.simulator.engine import Simulator
from placewright.simulator.orders import StepRange, over_orders
from placewright.simulator.timeline import Parts, Timeline

_GAINED, _LEFT = 0.02, 0.75
"""A speed-up by more than the first share rests on spreading overhead where less than the second
share of it is left without overhead."""


@dataclass(frozen=True, kw_only=True)
class Makeup:
    """What a step is made of, beside that of a reference such as the best single device."""

    step: Parts
    """Along the critical path, so that nothing is idle."""
    devices: tuple[Parts, ...]
    """[D] on each device."""
    reference: Parts | None = None
    """As `step`, of the reference's step; None, like the next two, without one."""
    speed_up: float | None = None
    """Over the reference."""
    speed_up_without_overhead: float | None = None
    """What it would be if issuing ops took no time, nor was any lost between kernels: over what is
    fastest then of the reference and its alternatives, such as the other single devices."""
    simple: Placement | None = None
    """Which of these that is."""
    simple_seconds: float | None = None
    """What its step takes, with overhead."""

    @property
    def rests_on_overhead(self) -> bool:
        """Whether the speed-up comes to a good part from spreading overhead over devices."""
        if self.speed_up is None or self.speed_up_without_overhead is None:
            return False
        gained, left = self.speed_up - 1.0, self.speed_up_without_overhead - 1.0
        return gained > _GAINED and left < _LEFT * gained

    @property
    def is_only_overhead(self) -> bool:
        """Whether hardly anything is left of the speed-up without overhead."""
        return self.rests_on_overhead and (self.speed_up_without_overhead or 0.0) < 1.0 + _GAINED

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step._asdict(),
            "devices": [parts._asdict() for parts in self.devices],
            "reference": self.reference._asdict() if self.reference else None,
            "speed_up": self.speed_up,
            "speed_up_without_overhead": self.speed_up_without_overhead,
            "rests_on_overhead": self.rests_on_overhead,
        }

    def lines(self) -> list[str]:
        """For the user: what the step is made of, and what the speed-up rests on where it must be
        said."""
        lines = [f"along the critical path of the step, {described(self.step)}"]
        if self.rests_on_overhead:
            lines.append(
                "the speed-up comes from spreading overhead (issuing ops, gaps between kernels) "
                f"over devices: without overhead, {self.speed_up_without_overhead:.2f}x is left"
            )
        return lines


def described(parts: Parts) -> str:
    """`61% is computing, 30% overhead, 9% waiting for transfers`."""
    named = [
        (parts.compute, "computing"),
        (parts.overhead, "overhead"),
        (parts.waiting, "waiting for transfers"),
        (parts.idle, "idle"),
    ]
    total = parts.total
    if not total:
        return "nothing takes any time"
    shown = [f"{seconds / total:.0%} {name}" for seconds, name in named if seconds >= 0.005 * total]
    return ", ".join([shown[0].replace(" ", " is ", 1), *shown[1:]])


def range_line(of: StepRange) -> str:
    """What the user has to know of a figure that moves with the order of ties; mostly nothing."""
    if of.overflows:
        return (
            f"in {of.overflows} of {of.orders} orders of ops that are ready at the same moment, "
            "a device runs out of memory"
        )
    if not of.unsure:
        return ""
    return (
        f"the order of ops that are ready at the same moment moves the figure by {of.spread:.0%}: "
        f"{1e3 * of.least_seconds:.4g} to {1e3 * of.most_seconds:.4g} ms in {of.orders} orders"
    )


def without_overhead(problem: Problem) -> Problem:
    """The same problem where issuing ops takes no time, nor is any lost between kernels."""
    nothing = frozen(np.zeros(problem.costs.overhead_seconds.shape))
    costs = dataclasses.replace(problem.costs, overhead_seconds=nothing, gap_seconds=nothing)
    return dataclasses.replace(problem, costs=costs)


def makeup(
    problem: Problem,
    answer: Placement,
    reference: Placement | None = None,
    alternatives: Sequence[Placement] = (),
    *,
    seed: int = 0,
) -> Makeup:
    """What the answer's step is made of; with a reference, also what the speed-up rests on.

    An alternative that is slower than the reference may be faster without overhead: then nothing is
    gained by the answer over that. One that runs out of memory is none.

    Speed-ups are of means over several orders of ties, which the seed chooses; what a step is made
    of is of the order of the graph.
    """
    simulator = Simulator(problem)
    timeline = simulator.timeline(answer)
    if reference is None:
        return Makeup(step=timeline.path_parts, devices=timeline.device_parts)
    other = simulator.timeline(reference)
    compared = [answer, reference, *alternatives]
    ranges = over_orders(problem, compared, seed=seed, simulator=simulator)
    number, speed_up = 1, _times(ranges[1], ranges[0])
    left = speed_up
    if problem.costs.overhead_seconds.any() or problem.costs.gap_seconds.any():
        bare = over_orders(without_overhead(problem), compared, seed=seed)
        run = [n for n in range(1, len(compared)) if n == 1 or not ranges[n].overflows]
        number = min(run, key=lambda n: bare[n].mean_seconds)
        left = _times(bare[number], bare[0])
    return Makeup(
        step=timeline.path_parts,
        devices=timeline.device_parts,
        reference=other.path_parts,
        speed_up=speed_up,
        speed_up_without_overhead=left,
        simple=compared[number],
        simple_seconds=ranges[number].mean_seconds,
    )


def _times(before: StepRange, after: StepRange) -> float:
    return before.mean_seconds / after.mean_seconds if after.mean_seconds > 0 else 1.0


def parts_of_used(timeline: Timeline) -> Parts:
    """What the devices that have anything to do in a step do, the mean of them."""
    used = [parts for parts in timeline.device_parts if parts.compute or parts.overhead]
    return Parts(*np.mean(used, axis=0).tolist()) if used else Parts(0.0, 0.0, 0.0, 0.0)
