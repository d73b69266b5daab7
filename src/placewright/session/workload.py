"""The search for one home of the weights that several shapes of a model share, and for the devices
that compute each shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from placewright.budget import Budget
from placewright.errors import SearchError
from placewright.evaluators.workload import WorkloadEvaluator
from placewright.graph import BoolArray
from placewright.measurement import Measurement
from placewright.placement import Placement
from placewright.placers.base import OneShot
from placewright.placers.local_search import LocalSearch
from placewright.placers.memory import Repairing
from placewright.placers.offload import Offload
from placewright.problem import Problem, with_homes
from placewright.session.search import Progress, search
from placewright.simulator import Simulator, lower_bounds
from placewright.stopping import never
from placewright.workload import Workload

_WINDOWS = (1.0, 0.5, 2.0)
"""Windows that are tried, as multiples of the one the workload has, where nobody asked for one."""


@dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """What was found for a workload."""

    workload: Workload
    """As it was searched, with the window that was best."""
    placement: Placement
    """Of `workload.problem`."""
    measurements: Mapping[str, Measurement]
    """Part -> its step by itself."""
    floor_seconds: float
    """The weighted sum of what no placement of each part can beat."""
    trials: int

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Part -> its placement. Homes are the same in all."""
        return self.workload.divided(self.placement)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Part -> seconds of a step."""
        return {name: found.mean_seconds for name, found in self.measurements.items()}

    @property
    def total_seconds(self) -> float:
        """The weighted sum."""
        return sum(part.weight * self.seconds[part.name] for part in self.workload.parts)

    @property
    def window_bytes(self) -> int:
        homes = self.workload.parts[0].problem.homes
        assert homes is not None
        return homes.window_bytes


def place_workload(
    workload: Workload,
    *,
    seconds: float | None = 30.0,
    trials: int | None = None,
    seed: int = 0,
    tune_window: bool = False,
    observe: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = never,
) -> WorkloadResult:
    """Searches for homes and devices with the least weighted sum of step times, in the simulator.

    Args:
        workload: problems over the same weights.
        seconds: how long to search; None for no limit, where there are `trials`.
        trials: how many placements to try.
        seed: of the search.
        tune_window: whether half and twice the window are tried as well.
        observe: called with the progress after every batch.
        stop: asked now and then whether to come to an end.
    """
    floors = [(part, bounds) for part in workload.parts for bounds in [lower_bounds(part.problem)]]
    for part, bounds in floors:
        if bounds.forced_out_of_memory is not None:
            raise SearchError(f"part {part.name!r}: {bounds.forced_out_of_memory}")
    floor = sum(part.weight * bounds.best for part, bounds in floors)
    workload = _best_window(workload) if tune_window else workload
    problem = workload.problem
    evaluator = WorkloadEvaluator(workload)
    found = search(
        [
            Repairing(OneShot("offload", problem, lambda _: candidates(workload))),
            LocalSearch(problem, seed=seed),
        ],
        evaluator, Budget(seconds=seconds, trials=trials), seed=seed, observe=observe, stop=stop,
        lower_bound_seconds=floor,
    )  # fmt: skip
    best = found.best
    if best is None or not best.measurement.ok:
        why = best.measurement.reason if best is not None else "nothing was tried"
        raise SearchError(f"no placement of the workload fits: {why}")
    return WorkloadResult(
        workload=workload,
        placement=best.placement,
        measurements=evaluator.parts(best.placement),
        floor_seconds=floor,
        trials=found.trials,
    )


def candidates(workload: Workload) -> list[Placement]:
    """By rule: for each set of homes on the accelerators, the best mix of each part."""
    rules = {part.name: Offload.of(part.problem) for part in workload.parts}
    some = [rule for rule in rules.values() if rule is not None]
    if len(some) < len(rules):
        return []
    worth: dict[str, float] = {}
    for part, rule in zip(workload.parts, some, strict=True):
        for name, value in zip(rule.names, rule.worth.tolist(), strict=True):
            worth[name] = worth.get(name, 0.0) + part.weight * value
    # The part whose computing leaves the least room decides how many fit.
    leader = min(some, key=lambda rule: min(rule.room().values()))
    sets = leader.resident(np.array([worth[name] for name in leader.names]))
    simulators = [Simulator(part.problem) for part in workload.parts]
    result = []
    for chosen in sets:
        kept = {name for name, here in zip(leader.names, chosen.tolist(), strict=True) if here}
        placements: dict[str, Placement] = {}
        for part, rule, simulator in zip(workload.parts, some, simulators, strict=True):
            resident = np.array([name in kept for name in rule.names])
            placements[part.name] = _best_mix(part.problem, rule, simulator, resident)
        result.append(workload.joined(_same_homes(workload, placements)))
    return result


def _best_mix(
    problem: Problem, rule: Offload, simulator: Simulator, resident: BoolArray
) -> Placement:
    rows = np.stack([rule.devices(resident, mix) for mix in rule.mixes(resident)])
    found = simulator.run(rows)
    order = np.lexsort((found.step_seconds, ~found.ok))
    return Placement.of(problem, rows[order[0]])


def _same_homes(workload: Workload, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """All homes as the first part has them, which also says it for what only others read."""
    devices = np.full(workload.problem.num_groups, -1, dtype=np.int32)
    result = {}
    for part in workload.parts:
        groups = workload.groups[part.name]
        own = np.where(devices[groups] >= 0, devices[groups], placements[part.name].devices)
        devices[groups] = own
        result[part.name] = Placement.of(part.problem, own.astype(np.int32))
    return result


def _best_window(workload: Workload) -> Workload:
    """The workload with the window with which the rule does best."""
    best: tuple[float, Workload] | None = None
    for share in _WINDOWS:
        parts = tuple(
            replace(part, problem=with_homes(part.problem, _window(part.problem, share)))
            for part in workload.parts
        )
        tried = Workload(parts=parts)
        measured = WorkloadEvaluator(tried).evaluate(candidates(tried))
        times = [m.mean_seconds for m in measured if m.ok]
        if times and (best is None or min(times) < best[0]):
            best = min(times), tried
    return workload if best is None else best[1]


def _window(problem: Problem, share: float) -> int:
    assert problem.homes is not None
    return max(1, int(share * problem.homes.window_bytes))
