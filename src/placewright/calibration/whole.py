"""The whole of a calibration: ops and links are measured, the rest is fitted."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from placewright.backends import Runner
from placewright.calibration.accuracy import fidelity, why_distrusted
from placewright.calibration.costs_file import Calibration
from placewright.calibration.drift import in_turns
from placewright.calibration.fitting import corrected
from placewright.calibration.pieces import measure_links, op_table, with_demands
from placewright.errors import CostsError, WorkerError
from placewright.placement import Placement, everything_on
from placewright.problem import Problem
from placewright.simulator import Simulator

logger = logging.getLogger(__name__)


def calibrate(
    problem: Problem,
    runner: Runner,
    placements: Sequence[Placement],
    *,
    propose: Callable[[Problem], Sequence[Placement]] = lambda problem: (),
    traces: int = 5,
    forced: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Calibrates for a problem on the runner's devices; the rest is fitted to `placements`.

    The single-device placements are always among those, and what `propose` makes of the costs as
    they were measured: a scheduler, whose placements keep all devices busy. Raises `CostsError`
    for a calibration that cannot be trusted (see `why_distrusted`) unless `forced`.
    """
    say("timing ops")
    traced = {}
    for device in _told_apart(problem):
        single = everything_on(problem, device)
        run = runner.measure(single.devices[problem.grouping.group_of], traces=traces)
        if run.measurement.ok:
            traced[device] = run
        else:
            say(f"{problem.cluster.device_names[device]}: {run.measurement.reason}")
    if not traced:
        raise WorkerError("no device can run the model alone, so its ops cannot be timed")
    table = op_table(problem, traced)
    if problem.cluster.shared_chips:
        say("timing ops side by side")
        table = with_demands(problem, table, runner)
    cluster = problem.cluster
    if problem.num_devices > 1:
        say("timing links")
        cluster = measure_links(runner, cluster)
    found = Calibration(table=table, cluster=cluster)
    say("fitting")
    # Single devices once more: the machine may have been faster or slower when they were traced.
    singles = [everything_on(problem, device) for device in traced]
    overlapping = _overlapping(problem, found, propose)
    placements = list(dict.fromkeys([*singles, *placements, *overlapping]))
    timed, pace = in_turns(problem, runner, placements)
    if not timed:
        raise WorkerError("none of the placements ran, so there is nothing to fit the costs to")
    seconds = [times.seconds for times in timed.values()]
    fitted = corrected(problem, found, list(timed), seconds)
    _, fidelity_of_fit = fidelity(fitted.problem(problem), [timed])
    loads = [run.foreign_load for run in traced.values() if run.foreign_load is not None]
    reason = why_distrusted(fidelity_of_fit.predicted, seconds, max(loads, default=0.0))
    if reason and not forced:
        raise CostsError(f"this calibration is not to be trusted: {reason}; forced=True keeps it")
    if reason:
        logger.warning("this calibration is not to be trusted: %s", reason)
    return dataclasses.replace(fitted, pace=pace, fitted_to=tuple(timed))


def _told_apart(problem: Problem) -> list[int]:
    """Devices, of those that are parts of one chip and of one kind the first."""
    cluster = problem.cluster
    seen: dict[tuple[str, str], int] = {}
    for number, device in enumerate(cluster.devices):
        alone = cluster.chip_of_device[number] < 0
        seen.setdefault((device.name if alone else device.chip, device.kind.name), number)
    return list(seen.values())


def _overlapping(
    problem: Problem,
    calibration: Calibration,
    propose: Callable[[Problem], Sequence[Placement]],
) -> list[Placement]:
    """What a scheduler proposes, for the links there are and for some that take no time.

    These keep devices busy at the same time, which random placements hardly do, and only so it is
    seen how much they slow each other down.
    """
    under = calibration.problem(problem)
    links = tuple(
        dataclasses.replace(
            link, latency_seconds=0.0, gap_seconds=None, bandwidth=1e18, overhead_seconds=0.0,
            overhead_bandwidth=math.inf,
        )
        for link in under.cluster.links
    )  # fmt: skip
    free = dataclasses.replace(under, cluster=dataclasses.replace(under.cluster, links=links))
    placements = (*propose(under), *propose(free))
    if not placements:
        return []
    fits = Simulator(under).run(np.stack([placement.devices for placement in placements])).ok
    return [
        placement
        for placement, ok in zip(placements, fits, strict=True)
        if ok and len(np.unique(placement.devices)) > 1
    ]


def varied_placements(
    problem: Problem, count: int, seed: int = 0, *, without: Iterable[Placement] = ()
) -> list[Placement]:
    """Different kinds of placements, by turns: random with more groups on some devices than on
    others, cut once in graph order, cut several times, and cut with few or many groups moved: from
    hardly any transfers to nothing but. None of those in `without`."""
    known = set(without)
    rng = np.random.default_rng(seed)
    groups, devices = problem.num_groups, problem.num_devices
    first = np.full(groups, problem.graph.num_ops)
    np.minimum.at(first, problem.grouping.group_of, np.arange(problem.graph.num_ops))
    order = np.argsort(first, kind="stable")
    found: dict[Placement, None] = {}
    for number in range(20 * count):
        if len(found) == count:
            break
        cuts = (0, devices - 1, devices + int(rng.integers(1, 5)), devices - 1)[number % 4]
        chosen = rng.choice(devices, groups, p=rng.dirichlet(np.ones(devices)))
        if number % 4:
            part = np.searchsorted(
                np.sort(rng.integers(1, groups + 1, cuts)), np.arange(groups) + 1
            )
            chosen[order] = rng.permutation(devices)[part % devices]
        if number % 4 == 3:
            moved = rng.integers(0, groups, math.ceil(groups * 0.02 * 25 ** rng.random()))
            chosen[moved] = rng.integers(0, devices, len(moved))
        allowed = problem.allowed[np.arange(groups), chosen]
        chosen = np.where(allowed, chosen, problem.allowed.argmax(axis=1))
        placement = Placement.of(problem, chosen.astype(np.int32))
        if placement not in known:
            found[placement] = None
    return list(found)
