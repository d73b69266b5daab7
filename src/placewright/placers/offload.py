"""What to keep on an accelerator that has no room for all weights, and what to do with the rest.

The weights that save the most time per byte are kept there. Of the others, some travel in each step
while the host computes what is done with the rest: the link and the host work side by side, so
neither alone is best. How many of each follows from their speeds; mixes around that are proposed,
with the two kinds spread evenly, so that a weight can travel while the host computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from placewright.graph import BoolArray, FloatArray, IndexArray, IntArray
from placewright.placement import Placement, allowed_or_cpu
from placewright.placers.memory import bytes_over_time
from placewright.problem import Problem
from placewright.stays import unit_weights

_AROUND = 3
"""Mixes with so many units more and less on the host than reckoned are proposed as well."""
_ALIKE = 1e-6
"""Weights whose worth differs by a smaller share are taken for equal, and spread evenly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Offload:
    """A problem with homes as this rule sees it: H homes that others read, in the order of use, on
    an accelerator and a host."""

    problem: Problem
    homes: IndexArray
    """[H] groups of weights."""
    accelerator: IndexArray
    """[G] the accelerator for each group: of several, they have consecutive parts."""
    host: int

    @staticmethod
    def of(problem: Problem) -> Offload | None:
        """None where there is nothing to choose: without homes, accelerators or a host."""
        devices = problem.cluster.devices
        hosts = [d for d, device in enumerate(devices) if device.type == "cpu"]
        pools = dict.fromkeys(
            int(problem.cluster.pool_of_device[d])
            for d, device in enumerate(devices)
            if device.type != "cpu"
        )
        weights = unit_weights(problem)
        if not hosts or not pools or not weights:
            return None
        host = max(hosts, key=lambda d: (devices[d].memory_bytes, -d))
        first = np.full(problem.num_groups, problem.graph.num_ops)
        np.minimum.at(first, problem.grouping.group_of, np.arange(problem.graph.num_ops))
        order = sorted(weights, key=lambda unit: int(first[unit]))
        homes = list(dict.fromkeys(home for unit in order for home in weights[unit]))
        # Consecutive parts of the units, by the memory of each accelerator.
        room = np.cumsum([problem.cluster.pool_bytes[d] for d in pools]).astype(np.float64)
        sizes = {unit: sum(weights[unit].values()) for unit in order}
        total, before = float(sum(sizes.values())), 0.0
        where = {}
        for unit in order:
            share = (before + sizes[unit] / 2) / total * room[-1]
            where[unit] = list(pools)[int(np.searchsorted(room, share))]
            before += sizes[unit]
        # What reads no weights is with the unit before it.
        accelerator = np.full(problem.num_groups, next(iter(pools)), dtype=np.int32)
        latest = next(iter(pools))
        for group in np.argsort(first, kind="stable").tolist():
            latest = where.get(group, latest)
            accelerator[group] = latest
        for unit in order:
            for home in weights[unit]:
                accelerator[home] = where[unit]
        return Offload(
            problem=problem,
            homes=np.array(homes, dtype=np.int32),
            accelerator=accelerator,
            host=host,
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """[H]"""
        return tuple(self.problem.grouping.names[home] for home in self.homes.tolist())

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """[H] the groups that read each home's weights most: each group counts for one home."""
        weights = unit_weights(self.problem)
        number = {home: h for h, home in enumerate(self.homes.tolist())}
        readers: list[list[int]] = [[] for _ in self.homes]
        for unit, held in weights.items():
            home = max(held, key=lambda home: (held[home], -home))
            readers[number[home]].append(unit)
        return tuple(tuple(units) for units in readers)

    @cached_property
    def bytes(self) -> IntArray:
        """[H] that a home takes of its device."""
        return np.asarray(self.problem.group_resident_bytes[self.homes])

    @cached_property
    def seconds(self) -> FloatArray:
        """[2, H] that the readers of a home take on the accelerator, and on the host; infinite
        where they may not be there."""
        groups = np.arange(self.problem.num_groups)
        rows = []
        for devices in (self.accelerator, np.full(len(groups), self.host)):
            allowed = self.problem.allowed[groups, devices]
            seconds = np.where(allowed, self.problem.group_seconds[devices, groups], np.inf)
            rows.append([float(seconds[list(units)].sum()) for units in self.readers])
        return np.array(rows)

    @cached_property
    def travel_seconds(self) -> FloatArray:
        """[H] that the weights of a home take on the link to the accelerator in each step; infinite
        where they may not be at home on the host."""
        visits = self.problem.visits
        assert visits is not None
        group_of = self.problem.grouping.group_of
        read = np.zeros(self.problem.num_groups)
        np.add.at(read, group_of[visits.owner], visits.bytes)
        per_byte = self.problem.cluster.routes.seconds_per_byte[
            self.host, self.accelerator[self.homes]
        ]
        may = self.problem.allowed[self.homes, self.host]
        return np.asarray(np.where(may, read[self.homes] * per_byte, np.inf))

    @cached_property
    def worth(self) -> FloatArray:
        """[H] seconds that a home on the accelerator saves against the better of the other two."""
        here, there = self.seconds
        with np.errstate(invalid="ignore"):
            computed = np.where(np.isinf(there), np.inf, there - np.where(np.isinf(here), 0, here))
        best = np.minimum(np.maximum(computed, 0.0), self.travel_seconds)
        # Where the accelerator cannot compute, a home there is worth nothing.
        return np.asarray(np.where(np.isinf(here), 0.0, best))

    def room(self) -> Mapping[int, float]:
        """Accelerator -> bytes for homes: what is left beside the window and what is computed."""
        problem = self.problem
        assert problem.homes is not None
        needed = bytes_over_time(problem)
        homes = np.isin(np.arange(problem.num_groups), self.homes)
        room = {}
        for device in np.unique(self.accelerator).tolist():
            mine = ~homes & (self.accelerator == device)
            computing = int(needed[mine].sum(axis=0).max(initial=0))
            limit = int(problem.cluster.pool_bytes[device])
            room[device] = float(limit - computing - problem.homes.window_bytes)
        return room

    def resident(self, worth: FloatArray | None = None) -> list[BoolArray]:
        """[H] homes on the accelerator, in several ways: with as many as there is room for, and
        with a few less or more; of equal ones the first, or evenly spread."""
        worth = self.worth if worth is None else worth
        rate = worth / np.maximum(self.bytes, 1)
        room = self.room()
        result: dict[bytes, BoolArray] = {}
        for share in (1.0, 0.95, 0.9, 1.05):
            for spread in (True, False):
                order = _best_first(rate, spread=spread)
                chosen = np.zeros(len(self.homes), dtype=np.bool_)
                left = {device: share * size for device, size in room.items()}
                for h in order.tolist():
                    device = int(self.accelerator[self.homes[h]])
                    if rate[h] > 0 and self.bytes[h] <= left[device]:
                        left[device] -= float(self.bytes[h])
                        chosen[h] = True
                result.setdefault(chosen.tobytes(), chosen)
        return list(result.values())

    def mixes(self, resident: BoolArray) -> list[BoolArray]:
        """[H] what of the rest the host computes, in several ways around the number that is
        reckoned to be best; and all of it, and none."""
        here, there = self.seconds
        away = np.flatnonzero(~resident)
        # What only one of the two can do is not chosen.
        with np.errstate(invalid="ignore"):
            extra = np.maximum(np.where(np.isinf(there), np.inf, there - here), 0.0)
        extra = np.where(np.isinf(here), 0.0, extra)
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(np.isinf(extra), np.inf, extra / self.travel_seconds)
        price = np.nan_to_num(price, nan=0.0, posinf=1e30)
        order = away[_best_first(-price[away], spread=True)]
        chain = float(np.where(np.isinf(here), 0.0, here).sum())
        travel = np.where(np.isinf(self.travel_seconds), 0.0, self.travel_seconds)
        travelling = float(travel[away].sum())
        reckoned = [max(chain, travelling)]
        for h in order.tolist():
            chain += float(extra[h])
            travelling -= float(travel[h])
            reckoned.append(max(chain, travelling))
        best = int(np.argmin(reckoned))
        counts = {0, len(order), *range(best - _AROUND, best + _AROUND + 1)}
        result: dict[bytes, BoolArray] = {}
        for count in sorted(c for c in counts if 0 <= c <= len(order)):
            for chosen in _ways(order, price, away, count):
                on_host = np.zeros(len(self.homes), dtype=np.bool_)
                on_host[chosen] = True
                result.setdefault(on_host.tobytes(), on_host)
        return list(result.values())

    def devices(self, resident: BoolArray, on_host: BoolArray) -> IndexArray:
        """[G] the placement with these homes on the accelerator, and these computed by the host."""
        devices = self.accelerator.copy()
        devices[self.homes[~resident]] = self.host
        for h in np.flatnonzero(on_host).tolist():
            devices[list(self.readers[h])] = self.host
        return allowed_or_cpu(self.problem, devices)


def _best_first(worth: FloatArray, *, spread: bool) -> IntArray:
    """Those of the highest worth first; of equal ones the first, or each next one as far from the
    others as can be."""
    levels = np.zeros(len(worth), dtype=np.int64)
    order = np.argsort(-worth, kind="stable")
    for before, after in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        alike = abs(worth[before] - worth[after]) <= _ALIKE * max(abs(worth[before]), 1e-30)
        levels[after] = levels[before] + (not alike)
    if not spread:
        return np.argsort(levels, kind="stable")
    result: list[int] = []
    for level in range(int(levels.max(initial=0)) + 1):
        members = np.flatnonzero(levels == level)
        # By the golden section: however many of them are taken, they lie evenly.
        turn = np.argsort(np.modf((np.arange(len(members)) + 1) * 0.6180339887498949)[0])
        result += members[turn].tolist()
    return np.array(result, dtype=np.int64)


def _ways(
    order: IntArray, price: FloatArray, away: IntArray, count: int
) -> Iterator[Sequence[int]]:
    """Which `count` of the homes that are away the host computes: the cheapest; of equal ones
    evenly spread, from the first or to the last, or the last."""
    yield order[:count].tolist()
    if not count or count == len(order):
        return
    level = price[order[count - 1]]
    cheaper = [h for h in order.tolist() if price[h] < level * (1 - _ALIKE)]
    equal = [h for h in away.tolist() if h not in cheaper and price[h] <= level * (1 + _ALIKE)]
    wanted = count - len(cheaper)
    for shift in (0.0, 0.5, 0.999):
        picked = [equal[int((i + shift) * len(equal) / wanted)] for i in range(wanted)]
        yield [*cheaper, *picked]
    yield [*cheaper, *equal[len(equal) - wanted :]]


def offload(problem: Problem) -> list[Placement]:
    """Placements with homes on accelerators as far as there is room; none where the problem has no
    homes."""
    rule = Offload.of(problem)
    if rule is None:
        return []
    return [
        Placement.of(problem, rule.devices(resident, on_host))
        for resident in rule.resident()
        for on_host in rule.mixes(resident)
    ]
