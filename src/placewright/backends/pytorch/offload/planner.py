"""Which weights stay, which travel, and what the host computes: the plan that takes least time.

Weights have one home for all calls of a workload; who computes is decided for each call. A plan is
judged by `timeline`; the search begins with plans by rule and improves the best of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from placewright.backends.pytorch.offload.plan import HOST, OffloadPlan, Shape, UnitPlan, runs
from placewright.backends.pytorch.offload.recording import Recorded, UnitWork
from placewright.backends.pytorch.offload.timeline import Copy, Costs, Step, UnitCost, pass_seconds
from placewright.backends.pytorch.offload.window import arrange
from placewright.errors import SearchError
from placewright.units import format_bytes, format_seconds

_Any = TypeVar("_Any")

_SLOTS = (1.0, 2.0, 3.0)
"""Sizes of the buffer that are tried, in units of the largest that travels."""
_MOVES = 400
"""That are tried with each of the best plans by rule."""
_MORE_MOVES = 3000
"""With the best that comes of that: a second or so for a model of 32 layers."""
_MARGIN = 1.15
"""Activations that are planned for, over those that were recorded: memory comes in blocks."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the memories may hold."""

    device: str
    device_bytes: int
    host_bytes: int
    reserved_bytes: int = 0
    """Of the device, for what libraries take."""
    keep: tuple[str, ...] = ()
    """Units whose weights stay on the device."""


@dataclass(frozen=True)
class Choice:
    """A plan while it is looked for."""

    at_home: frozenset[str]
    """Units whose weights live on the device."""
    by_host: Mapping[str, frozenset[str]]
    """Call -> the units that the host computes, of those that live there."""
    window_bytes: int


@dataclass
class Planner:
    """One module, one workload, one machine."""

    recorded: Recorded
    weights: Mapping[str, float]
    """Of the calls."""
    limits: Limits
    costs: Costs
    tried: int = 0
    _units: dict[str, UnitWork] = field(init=False)
    _seen: dict[object, float] = field(init=False, default_factory=dict)
    _seen_with: Costs | None = field(init=False, default=None)
    """The costs that what was seen holds for."""

    def __post_init__(self) -> None:
        self._units = {unit.path: unit for unit in self.recorded.units}
        strange = [path for path in self.limits.keep if path not in self._units]
        if strange:
            raise SearchError(
                f"keep={strange[0]!r} is no unit of {self.recorded.model}; there are "
                f"{runs(list(self._units))}"
            )
        self._check_floor()

    # --- memory ----------------------------------------------------------------------------------

    @cached_property
    def _movable(self) -> list[UnitWork]:
        kept = set(self.limits.keep)
        kept |= {tied for path in kept for tied in self._units[path].tied_to}
        fixed = {u.path for u in self.recorded.units if not u.can_move or not u.size} | kept
        return [
            u for u in self.recorded.units
            if u.path not in fixed and not fixed.intersection(u.tied_to)
        ]  # fmt: skip

    @property
    def _fixed_bytes(self) -> int:
        movable = {unit.path for unit in self._movable}
        return sum(self._held(u) for u in self.recorded.units if u.path not in movable)

    @staticmethod
    def _held(unit: UnitWork) -> int:
        """What the device has to hold for a unit whose weights live there."""
        return unit.home_bytes + int(_MARGIN * unit.kept_bytes)

    def working_bytes(self, by_host: Mapping[str, frozenset[str]]) -> int:
        """Activations, and the caches of units that the device computes in some call."""
        activations = max(self.recorded.between_bytes.values(), default=0)
        caches = sum(
            unit.cache_bytes
            for unit in self.recorded.units
            if not all(unit.path in by_host.get(call, ()) for call in unit.of)
        )
        return (
            int(_MARGIN * max(0, activations + self._backward_bytes())) + caches
            + self.limits.reserved_bytes
        )  # fmt: skip

    def _backward_bytes(self) -> int:
        """What training needs beyond activations at the end of a call, when the backward pass is at
        a unit whose weights have travelled: its call is made again, and gradients of its weights
        are there until they are sent home. What units keep that stay counts with them."""
        if not self.recorded.train:
            return 0
        units = self.recorded.units
        outputs = max((w.output_bytes for u in units for w in u.of.values()), default=0)
        most = max(
            (u.gradient_bytes + u.kept_bytes + max(w.peak_bytes for w in u.of.values())
             for u in self._movable),
            default=0,
        )  # fmt: skip
        return most + outputs - sum(unit.kept_bytes for unit in units)

    def _least_bytes(self) -> int:
        """On the device, with everything that can be computed by the host."""
        everything = frozenset(unit.path for unit in self._movable)
        return self._fixed_bytes + self.working_bytes(dict.fromkeys(self.weights, everything))

    def _check_floor(self) -> None:
        limits = self.limits
        least = self._least_bytes()
        if least > limits.device_bytes:
            raise SearchError(
                f"{self.recorded.model} does not fit however it is placed: {limits.device} would "
                f"have to hold {format_bytes(least)} ({format_bytes(self._fixed_bytes)} of weights "
                f"that cannot live elsewhere, the rest activations, caches and what libraries "
                f"take), and may give {format_bytes(limits.device_bytes)}"
            )
        movable = sum(unit.home_bytes for unit in self._movable)
        off = movable - (limits.device_bytes - least)
        if off > limits.host_bytes:
            raise SearchError(
                f"{self.recorded.model} does not fit: of {format_bytes(movable)} of weights "
                f"{format_bytes(off)} or more would have to live on the host, which may give "
                f"{format_bytes(limits.host_bytes)}; {limits.device} may give "
                f"{format_bytes(limits.device_bytes)}"
            )

    def fits(self, choice: Choice) -> bool:
        resident = sum(
            self._held(u) for u in self._movable if u.path in choice.at_home
        )  # fmt: skip
        host = sum(u.home_bytes for u in self._movable if u.path not in choice.at_home)
        used = self._fixed_bytes + resident + choice.window_bytes
        return (
            used + self.working_bytes(choice.by_host) <= self.limits.device_bytes
            and host <= self.limits.host_bytes
        )

    def away(self, choice: Choice) -> list[str]:
        """Units whose weights live on the host, in order of calls."""
        return [u.path for u in self._movable if u.path not in choice.at_home]

    # --- time ------------------------------------------------------------------------------------

    def seconds(self, choice: Choice, call: str) -> float:
        """Of a call, by a plan."""
        costs, by_host = self.costs, choice.by_host[call]
        movable = {unit.path for unit in self._movable}
        sizes = {
            path: self._units[path].size
            for path in costs.of[call]
            if path in movable and path not in choice.at_home and path not in by_host
        }
        starts = arrange(sizes, choice.window_bytes)
        speed = costs.link_bytes_per_second
        copies = [
            Copy(seconds=costs.copy_latency_seconds + size / speed, start=starts[path],
                 stop=starts[path] + size)
            for path, size in sizes.items()
        ]  # fmt: skip
        number = {path: n for n, path in enumerate(sizes)}
        steps, before = [], False
        for path, cost in costs.of[call].items():
            on_host = path in by_host
            took = cost.host_seconds if on_host else cost.device_seconds
            if on_host and not before:
                took += costs.hop_seconds + cost.input_bytes / speed
            if on_host:
                took += costs.hop_seconds / 2 + cost.output_bytes / speed
            steps.append(Step(seconds=took, on_host=on_host, copy=number.get(path, -1)))
            before = on_host
        after = costs.between_seconds.get(call, 0.0)
        if self.recorded.train:
            for step, path in reversed(list(zip(steps, costs.of[call], strict=True))):
                if self._units[path].of[call].passes > 1:
                    back = self._way_back(call, path, step)
                    if step.copy >= 0:
                        back = replace(back, copy=len(copies))
                        copies.append(copies[step.copy])
                    steps.append(back)
            after += sum(
                cost.host_update_seconds
                if path in movable and path not in choice.at_home
                else cost.device_update_seconds
                for path, cost in costs.of[call].items()
            )
        self.tried += 1
        return after + pass_seconds(
            steps, copies, host_slowdown=costs.host_slowdown, copy_slowdown=costs.copy_slowdown
        )

    def _way_back(self, call: str, path: str, step: Step) -> Step:
        """The backward pass of a unit. Where its weights have travelled, they do once more, its
        call is made again, and gradients of its weights go home."""
        unit, cost, costs = self._units[path], self.costs.of[call][path], self.costs
        more, speed = unit.of[call].passes - 1, costs.link_bytes_per_second
        if step.on_host:
            changes_sides = (cost.input_bytes + cost.output_bytes) / speed
            return Step(seconds=more * cost.host_seconds + changes_sides, on_host=True)
        took = more * cost.device_seconds
        if step.copy >= 0:
            took += cost.device_seconds + costs.hop_seconds + unit.gradient_bytes / speed
        return Step(seconds=took, on_host=False)

    def _device_seconds(self, call: str, path: str) -> float:
        """Of all that a unit computes, at least."""
        cost = self.costs.of[call][path]
        return self._units[path].of[call].passes * cost.device_seconds + self._least_update(cost)

    def _host_seconds(self, call: str, path: str) -> float:
        cost = self.costs.of[call][path]
        return self._units[path].of[call].passes * cost.host_seconds + self._least_update(cost)

    @staticmethod
    def _least_update(cost: UnitCost) -> float:
        return min(cost.device_update_seconds, cost.host_update_seconds)

    def total(self, choice: Choice) -> float:
        """The weighted sum over calls."""
        if self._seen_with is not self.costs:
            self._seen_with = self.costs
            self._seen.clear()
        key = choice.at_home, tuple(choice.by_host.items()), choice.window_bytes
        known = self._seen.get(key)
        if known is None:
            known = sum(w * self.seconds(choice, call) for call, w in self.weights.items())
            self._seen[key] = known
        return known

    def _rank(self, choice: Choice) -> tuple[float, int]:
        # A buffer that is large enough for all that travels is no better than a home.
        return float(f"{self.total(choice):.6g}"), choice.window_bytes

    def floor_seconds(self, call: str) -> float:
        """No plan within the limits is faster: the link brings what it can while units compute,
        what it brings and what lives there the device computes, and the host the rest; parts of
        units count."""
        costs = self.costs.of[call]
        movable = {u.path: u for u in self._movable if u.path in costs}
        room = self.limits.device_bytes - self._least_bytes()
        device = {path: self._device_seconds(call, path) for path in costs}
        host = {path: self._host_seconds(call, path) for path in costs}
        base = sum(device[path] for path in costs if path not in movable)
        gains = sorted(
            ((max(0.0, host[p] - device[p]), u.size) for p, u in movable.items()),
            key=lambda pair: -pair[0] / max(1, pair[1]),
        )  # fmt: skip
        slowest = base + sum(max(host[p], device[p]) for p in movable)

        def chain(seconds: float) -> float:
            left = room + seconds * self.costs.link_bytes_per_second
            took = slowest
            for gain, size in gains:
                took -= gain * min(1.0, left / max(1, size))
                left -= size
                if left <= 0:
                    break
            # Where the host is the faster one, nothing need be on the device.
            return took - sum(max(0.0, device[p] - host[p]) for p in movable)

        low, high = 0.0, slowest
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if chain(middle) <= middle else (middle, high)
        return high

    # --- search ----------------------------------------------------------------------------------

    def search(self, seconds: float = 10.0, seed: int = 0) -> OffloadPlan:
        """The best plan that was found."""
        return self.plan(self.best(seconds, seed))

    def best(self, seconds: float, seed: int) -> Choice:
        stop = time.monotonic() + seconds
        found = sorted((c for c in self.by_rule() if self.fits(c)), key=self._rank)
        if not found:
            raise SearchError(
                f"no plan for {self.recorded.model} fits into "
                f"{format_bytes(self.limits.device_bytes)} of {self.limits.device} and "
                f"{format_bytes(self.limits.host_bytes)} of the host"
            )
        draw = random.Random(seed)
        results = [self._improved(start, draw, stop, _MOVES) for start in found[:3]]
        best = min(results, key=self._rank)
        return min(best, self._improved(best, draw, stop, _MORE_MOVES), key=self._rank)

    def by_rule(self) -> Iterator[Choice]:
        """Plans to begin with: for several sizes of the buffer, as much at home as fits, what
        gains most for its bytes first; of the rest some travel, evenly spread."""
        movable = self._movable
        for largest in sorted({unit.size for unit in movable}):
            for slots in (0.0, *_SLOTS):
                window = int(slots * largest)
                can_travel = {u.path for u in movable if u.size <= window}
                if slots and not can_travel:
                    continue
                yield from self._with_window(window, can_travel)
                if not slots:
                    yield from self._with_window(window, can_travel, tight=True)
            # A buffer for units that hardly matter is for nothing.
        if not movable:
            nobody = dict.fromkeys(self.weights, frozenset[str]())
            yield Choice(frozenset(), nobody, 0)

    def one_way(self, *, by_host: bool) -> Iterator[Choice]:
        """Plans in which all that has no room on the device is computed by the host, or else all of
        it travels, but for what hardly matters: an embedding of which a few rows are read."""
        if by_host:
            for choice in self.by_rule():
                if not choice.window_bytes:
                    away = frozenset(self.away(choice))
                    yield replace(choice, by_host=dict.fromkeys(self.weights, away))
            return
        # What is at home is chosen as for a host that takes for ever.
        slow = {
            call: {path: replace(c, host_seconds=1e4 * c.host_seconds) for path, c in costs.items()}
            for call, costs in self.costs.of.items()
        }
        light = {call: self._light(call) for call in self.weights}
        for choice in replace(self, costs=replace(self.costs, of=slow)).by_rule():
            away = frozenset(self.away(choice))
            ways = {call: away & paths for call, paths in light.items()}
            moved = replace(choice, by_host=ways)
            if self._may_travel(moved):
                yield moved

    def _light(self, call: str) -> frozenset[str]:
        """Units that a call does not use, or that the host computes in next to no time."""
        costs = self.costs.of[call]
        little = max((cost.host_seconds for cost in costs.values()), default=0.0) / 50
        return frozenset(
            u.path for u in self._movable
            if u.path not in costs or costs[u.path].host_seconds < little
        )  # fmt: skip

    def _with_window(
        self, window: int, can_travel: set[str], *, tight: bool = False
    ) -> Iterator[Choice]:
        off = self._off(window, can_travel, tight)
        if off is None:
            return
        at_home = frozenset(u.path for u in self._movable if u.path not in off)
        options: dict[str, list[frozenset[str]]] = {}
        for call in self.weights:
            costs = self.costs.of[call]
            called = [path for path in off if path in costs]
            must = [path for path in called if path not in can_travel]
            may = [path for path in called if path in can_travel]
            rest = [path for path in off if path not in costs]
            options[call] = [
                frozenset([*must, *rest, *(p for p in may if p not in travelling)])
                for travelling in self._spreads(call, may)
            ]
        # Calls share the homes and the buffer only, so that each has its own best.
        chosen = {}
        for call, ways in options.items():
            tried = (Choice(at_home, {call: way}, window) for way in ways)
            trials = [(self.seconds(choice, call), choice.by_host[call]) for choice in tried]
            chosen[call] = min(trials, key=lambda trial: trial[0])[1]
        if window and all(chosen[call].issuperset(off) for call in chosen):
            return  # nothing travels, so that the buffer is for nothing
        yield Choice(at_home, chosen, window)
        everything = frozenset(off)
        if not window:
            yield Choice(at_home, dict.fromkeys(self.weights, everything), 0)

    def _spreads(self, call: str, may: Sequence[str]) -> Iterator[frozenset[str]]:
        """Sets of units that travel, of each number: those first that gain most by it."""
        speed = self.costs.link_bytes_per_second

        def worth(path: str) -> float:
            # What the host would take for the time that the link takes.
            return self._host_seconds(call, path) * speed / max(1, self._units[path].size)

        groups: dict[float, list[str]] = {}
        for path in may:
            groups.setdefault(round(worth(path), 9), []).append(path)
        ordered = sorted(groups.items(), reverse=True)
        taken: list[str] = []
        yield frozenset()
        for _, members in ordered:
            for count in range(1, len(members) + 1):
                yield frozenset([*taken, *_evenly(members, count)])
            taken += members

    def _off(self, window: int, can_travel: set[str], tight: bool) -> list[str] | None:
        """The units whose weights live on the host, in order of calls; None where it cannot be.
        `tight`: only caches of units that stay are on the device."""
        movable = self._movable
        everything = frozenset(u.path for u in movable)
        by_host = dict.fromkeys(self.weights, everything) if tight else {}
        room = self.limits.device_bytes - self._fixed_bytes - window - self.working_bytes(by_host)
        gain = {u.path: self._gain_of_staying(u, u.path in can_travel) for u in movable}
        sets = _tied_sets(movable)

        def taken(unit: UnitWork) -> int:
            return self._held(unit) + (unit.cache_bytes if tight else 0)

        by_density: dict[float, list[tuple[UnitWork, ...]]] = {}
        for members in sets:
            size = sum(map(taken, members))
            density = sum(gain[u.path] for u in members) / max(1, size)
            by_density.setdefault(float(f"{density:.6g}"), []).append(members)
        stay: set[str] = set()
        for _, alike in sorted(by_density.items(), reverse=True):
            size = max(sum(map(taken, members)) for members in alike)
            count = len(alike) if not size else min(len(alike), max(0, room) // size)
            for members in _evenly(alike, count):
                stay.update(u.path for u in members)
                room -= sum(map(taken, members))
        for _, alike in sorted(by_density.items(), reverse=True):
            for members in alike:  # what is left may be enough for smaller ones
                size = sum(map(taken, members))
                if members[0].path not in stay and size <= room:
                    stay.update(u.path for u in members)
                    room -= size
        return None if room < 0 else [u.path for u in movable if u.path not in stay]

    def _gain_of_staying(self, unit: UnitWork, may_travel: bool) -> float:
        total = 0.0
        for call, weight in self.weights.items():
            cost = self.costs.of[call].get(unit.path)
            if cost is None:
                continue
            away = self._host_seconds(call, unit.path)
            if may_travel:
                travel = unit.size / self.costs.link_bytes_per_second
                travel *= 2 if unit.of[call].passes > 1 else 1
                # Both go on at once: together they take less than either.
                away = min(away, travel, away * travel / max(1e-12, away + travel))
            total += weight * max(0.0, away)
        return total

    def _improved(self, choice: Choice, draw: random.Random, stop: float, moves: int) -> Choice:
        best, seconds = choice, self.total(choice)
        for _ in range(moves):
            if time.monotonic() > stop:
                break
            other = self._moved(best, draw)
            if other is None or not self.fits(other):
                continue
            found = self.total(other)
            if found < seconds - 1e-12:
                best, seconds = other, found
        return best

    def _moved(self, choice: Choice, draw: random.Random) -> Choice | None:
        movable = {u.path: u for u in self._movable}
        off = [path for path in movable if path not in choice.at_home]
        call = draw.choice(list(self.weights))
        ways = dict(choice.by_host)
        kind = draw.random()
        if not off:
            return None
        path = draw.choice(off)
        if kind < 0.4:  # travels instead of being computed by the host, or the other way round
            ways[call] = ways[call] ^ {path}
        elif kind < 0.7:  # two change their parts in one call
            other = draw.choice(off)
            if (path in ways[call]) == (other in ways[call]):
                return None
            ways[call] = ways[call] ^ {path, other}
        else:  # one comes home for another
            home = [p for p in choice.at_home if p in movable and not movable[p].tied_to]
            if not home or movable[path].tied_to:
                return None
            other = draw.choice(home)
            ways = {
                name: (way - {path}) | ({other} if path in way else set())
                for name, way in ways.items()
            }
            choice = replace(choice, at_home=(choice.at_home - {other}) | {path})
        moved = replace(choice, by_host={name: frozenset(way) for name, way in ways.items()})
        return moved if self._may_travel(moved) else None

    def _may_travel(self, choice: Choice) -> bool:
        return all(
            u.size <= choice.window_bytes or u.path in choice.at_home
            or all(u.path in choice.by_host[call] for call in self.weights)
            for u in self._movable
        )  # fmt: skip

    # --- what comes of it ------------------------------------------------------------------------

    def plan(self, choice: Choice) -> OffloadPlan:
        """A choice as a plan."""
        device, limits = self.limits.device, self.limits
        movable = {u.path for u in self._movable}
        units = []
        for unit in self.recorded.units:
            away = unit.path in movable and unit.path not in choice.at_home
            units.append(
                UnitPlan(
                    path=unit.path, size=unit.size, home=HOST if away else device,
                    computed_on={
                        call: HOST if away and unit.path in way else device
                        for call, way in choice.by_host.items()
                    },
                )
            )  # fmt: skip
        shapes = [
            Shape(
                name=call, rows=self.recorded.rows[call], weight=weight,
                seconds=self.seconds(choice, call), floor_seconds=self.floor_seconds(call),
            )
            for call, weight in self.weights.items()
        ]  # fmt: skip
        return OffloadPlan(
            model=self.recorded.model, device=device, units=tuple(units), shapes=tuple(shapes),
            window_bytes=choice.window_bytes, memory_bytes=limits.device_bytes,
            working_bytes=self.working_bytes(choice.by_host) + self._beside_bytes(choice),
            source=self.costs.source,
            notes=tuple(self._reasons(choice)),
        )  # fmt: skip

    def _beside_bytes(self, choice: Choice) -> int:
        """What training takes of the device beside the weights that live there."""
        movable = {u.path for u in self._movable}
        return sum(
            self._held(u) - u.own_size for u in self.recorded.units
            if u.path not in movable or u.path in choice.at_home
        )  # fmt: skip

    def choice_of(self, plan: OffloadPlan) -> Choice:
        """A plan as a choice."""
        movable = {u.path for u in self._movable}
        return Choice(
            frozenset(
                u.path for u in plan.units if u.home == plan.device and u.path in movable
            ),
            {
                shape.name: frozenset(
                    u.path for u in plan.units if u.computed_on[shape.name] == HOST
                )
                for shape in plan.shapes
            },
            plan.window_bytes,
        )  # fmt: skip

    def _reasons(self, choice: Choice) -> Iterator[str]:
        movable = [u for u in self._movable if u.path not in choice.at_home]
        if self.recorded.train:
            host = sum(u.home_bytes - u.own_size for u in movable)
            every = sum(u.home_bytes - u.own_size for u in self.recorded.units)
            yield (
                f"of gradients and what the optimizer keeps, {format_bytes(every - host)} are on "
                f"{self.limits.device} and {format_bytes(host)} on the host, which makes the "
                "updates there"
            )
        if not movable:
            return
        smallest = min(u.size for u in movable)
        if not choice.window_bytes and self._least_bytes() + smallest > self.limits.device_bytes:
            yield (
                f"nothing travels: beside what has to be on {self.limits.device} "
                f"({format_bytes(self._least_bytes())}) there is no room for a buffer as large as "
                f"a unit ({format_bytes(smallest)})"
            )
        kinds: dict[str, list[UnitWork]] = {}
        for unit in movable:
            kinds.setdefault(unit.kind, []).append(unit)
        alike = max(kinds.values(), key=lambda units: sum(u.size for u in units))
        for call in self.weights:
            if alike[0].path in self.costs.of[call]:
                yield self._reason(choice, call, alike)

    def _reason(self, choice: Choice, call: str, alike: Sequence[UnitWork]) -> str:
        """Why a call does with some units what it does."""
        unit, cost = alike[0], self.costs.of[call][alike[0].path]
        travel = format_seconds(unit.size / self.costs.link_bytes_per_second)
        by_host, by_device = map(format_seconds, (cost.host_seconds, cost.device_seconds))
        paths = frozenset(u.path for u in alike)
        others = []
        for what, way in (
            ("travelling", choice.by_host[call] - paths),
            ("computed by the host", choice.by_host[call] | paths),
        ):
            other = replace(choice, by_host={**choice.by_host, call: way})
            if way != choice.by_host[call] and self._may_travel(other):
                others.append(f"all {what} {format_seconds(self.seconds(other, call))}")
        one_of = f", one of {len(alike)} alike" if len(alike) > 1 else ""
        return (
            f"{call}: for {unit.path} ({format_bytes(unit.size)}{one_of}) the link takes {travel}, "
            f"the host's cores {by_host} and {self.limits.device} {by_device}; link and cores work "
            f"side by side{'; with ' if others else ''}{', with '.join(others)}"
        )


def _evenly(values: Sequence[_Any], count: int) -> list[_Any]:
    """So many of some values, spread over them."""
    number = len(values)
    return [values[((2 * i + 1) * number) // (2 * count)] for i in range(count)] if count else []


def _tied_sets(units: Sequence[UnitWork]) -> list[tuple[UnitWork, ...]]:
    known = {unit.path: unit for unit in units}
    sets: list[tuple[UnitWork, ...]] = []
    seen: set[str] = set()
    for unit in units:
        if unit.path in seen:
            continue
        members = (unit, *(known[p] for p in unit.tied_to if p in known))
        seen.update(u.path for u in members)
        sets.append(members)
    return sets
