"""What units really take: a few passes of the placed module, and the plan that is best by them.

Units are timed where they run, within whole passes. Of units of one kind one time is taken, the
median: they do the same.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from placewright.backends.pytorch.offload.activations import move_caches
from placewright.backends.pytorch.offload.plan import HOST, OffloadPlan
from placewright.backends.pytorch.offload.planner import Choice, Planner
from placewright.backends.pytorch.offload.runtime import Offloaded
from placewright.backends.pytorch.offload.shapes import Workload, real_inputs
from placewright.backends.pytorch.offload.timeline import Costs, UnitCost
from placewright.errors import PlacementError
from placewright.units import format_bytes

logger = logging.getLogger(__name__)

_WARM_UP = 3
"""Passes before one counts: units are captured in the third."""
_PASSES = 3
_MOST_PASSES = 8
_ENOUGH_SECONDS = 0.4
"""That are computed in one turn of a plan, where that is not too many passes."""
_TURNS = 3
"""Of all plans that may be the best."""
_CLOSE = (1.5, 1.15)
"""A plan that took longer than the best by this factor is not run again: after one turn, in which
it may have been unlucky, and after more."""
_HOPELESS = 3.0
"""A plan that is predicted to take so many times as long as the best, by measured costs, is not run
at all."""
_LONG_SECONDS = 1.0
"""A pass that the host computes alone is not run for its own sake where it takes longer."""
_MOST_SLOWDOWN = 2.5
_SHARE = 0.02
"""Of the time of a workload: a call that takes less of it is not measured."""
_SPARE_TOKENS = 128
_PROBE_BYTES = 16 * 2**20
"""That are copied to take the speed of the link where there is no buffer."""


class Caller:
    """Calls a placed module with the examples of its workload."""

    def __init__(self, placed: Any, workload: Workload) -> None:
        self._placed = placed
        self._workload = workload
        self._inputs: dict[str, Any] = {}
        self._caches: dict[str, Any] = {}
        self._left: dict[str, int] = {}
        """Calls that a cache still has room for."""

    def __call__(self, name: str, passes: int = 1) -> float:
        """Seconds of each of some calls in a row."""
        offloaded: Offloaded = self._placed.offload
        args, kwargs = self._of(name, passes)
        offloaded.link.finish()
        begun = time.perf_counter()
        with torch.no_grad():
            for _ in range(passes):
                self._placed(*args, **kwargs)
        offloaded.link.finish()
        return (time.perf_counter() - begun) / passes

    def _of(self, name: str, passes: int) -> tuple[Any, Any]:
        call = self._workload.calls[name]
        if name not in self._inputs:
            self._inputs[name] = real_inputs(call, self._placed.offload.link.device)
        args, kwargs = self._inputs[name]
        if call.continues is not None:
            self._left[name] = self._left.get(name, 0) - passes
            if name not in self._caches or self._left[name] < 0:
                self._caches[name] = self._filled(call.continues, passes)
                self._left[name] = _SPARE_TOKENS
            kwargs = {**kwargs, "past_key_values": self._caches[name]}
        return args, kwargs

    def another_plan(self) -> None:
        """Caches of a fixed size go on with the next plan, and wait on the host until it is there,
        so that they take nothing of the memory that it needs. Others have grown: they are made
        anew, as long as they were for the plan before."""
        if not self._workload.static_cache:
            self._caches.clear()
        units = self._placed.offload.units.values()
        layers = tuple({number for unit in units for number in unit.layers})
        move_caches(tuple(self._caches.values()), layers, torch.device("cpu"))

    def _filled(self, before: str, passes: int) -> Any:
        args, kwargs = self._of(before, 1)
        if self._workload.static_cache:
            from transformers import StaticCache

            tokens = next(v.shape[1] for v in (*args, *kwargs.values()) if torch.is_tensor(v))
            kwargs["past_key_values"] = StaticCache(
                config=self._placed.config, max_cache_len=tokens + passes + _SPARE_TOKENS
            )
        with torch.no_grad():
            result = self._placed(*args, **kwargs)
        kwargs.pop("past_key_values", None)
        return result.past_key_values


@dataclass
class Refinement:
    """A plan's costs, measured, and the best plan by them."""

    placed: Any
    planner: Planner
    workload: Workload
    deadline: float = float("inf")
    """By `time.monotonic`: no further plan is tried after that."""
    _calls: list[str] = field(default_factory=list)
    """Those that matter; the others keep their estimated costs."""
    _caller: Caller = field(init=False)

    def __post_init__(self) -> None:
        self._caller = Caller(self.placed, self.workload)

    def run(self) -> OffloadPlan:
        """The placed module goes on with what was best."""
        planner = self.planner
        first = planner.choice_of(self._offloaded.plan)
        self._calls = self._that_matter([first])
        planner.costs = self._costs(first)
        by_parts = planner.best(5.0, seed=0)
        planner.costs = self._fitted(by_parts)
        found = planner.best(5.0, seed=1)
        candidates = self.candidates(found, first, by_parts)
        self._calls = self._that_matter(candidates)
        contest = Contest(planner.weights, planner.fits, self._measure)
        best, took = contest.run(
            candidates, _TURNS, lambda: time.monotonic() < self.deadline
        )  # fmt: skip
        plan = planner.plan(best)
        shapes = tuple(replace(s, seconds=took[s.name]) for s in plan.shapes)
        plan = replace(plan, shapes=shapes)
        self._go_on(plan)
        return plan

    def _that_matter(self, choices: Sequence[Choice]) -> list[str]:
        """Calls that are more than a small part of a workload by any of some plans."""
        planner = self.planner
        return [
            call for call, weight in planner.weights.items()
            if any(weight * planner.seconds(choice, call) > _SHARE * planner.total(choice)
                   for choice in choices)
        ]  # fmt: skip

    @property
    def _offloaded(self) -> Offloaded:
        offloaded: Offloaded = self.placed.offload
        return offloaded

    def _go_on(self, plan: OffloadPlan) -> Caller:
        if plan != self._offloaded.plan:
            self._caller.another_plan()
            self._offloaded.use(plan)
        return self._caller

    # --- costs -----------------------------------------------------------------------------------

    def _costs(self, choice: Choice) -> Costs:
        planner = self.planner
        mixed = self._with(choice, self._one_of_each_kind(choice))
        self._go_on(planner.plan(mixed))
        speed = self._link_speed()
        hop = self._hop()
        seen: dict[str, dict[str, dict[str, list[float]]]] = {}
        for call in self._calls:
            seen[call] = self._timed(call)
        costs = replace(
            planner.costs, link_bytes_per_second=speed or planner.costs.link_bytes_per_second,
            hop_seconds=hop, source="measured",
        )  # fmt: skip
        costs = self._filled_in(costs, seen)
        slower: list[float] = []
        everything = self._with(choice, self._all_off(choice))
        short = [c for c in self._calls if self._host_seconds(costs, c) < _LONG_SECONDS]
        if short:
            self._go_on(planner.plan(everything))
            alone = {call: self._timed(call) for call in short}
            travels = bool(planner.plan(mixed).travelling(short[0]))
            for call in short:
                for kind, times in alone[call]["host"].items():
                    beside = seen[call]["host"].get(kind)
                    if beside and travels and statistics.median(times) > 1e-3:
                        slower.append(statistics.median(beside) / statistics.median(times))
                    seen[call]["host"][kind] = times
            costs = self._filled_in(costs, seen)
        slowdown = min(_MOST_SLOWDOWN, max(1.0, statistics.median(slower) if slower else 1.0))
        return replace(costs, host_slowdown=slowdown, copy_slowdown=1.0)

    def _fitted(self, choice: Choice) -> Costs:
        """What a whole pass takes beyond its parts: copies beside the host's work, and the code
        between units."""
        planner, costs = self.planner, self.planner.costs
        took = self._measure(choice, self._calls)
        between = {}
        main = max(self._calls, key=lambda c: planner.weights[c] * took[c])
        for call in self._calls:
            plan = planner.plan(choice)
            both = plan.on_host(call) and plan.travelling(call)
            if both and took[call] > planner.seconds(choice, call):
                low, high = costs.copy_slowdown, _MOST_SLOWDOWN
                for _ in range(12):
                    middle = (low + high) / 2
                    planner.costs = replace(costs, copy_slowdown=middle)
                    low, high = (
                        (middle, high) if planner.seconds(choice, call) < took[call]
                        else (low, middle)
                    )  # fmt: skip
                if call == main:
                    costs = replace(costs, copy_slowdown=low)
        planner.costs = costs
        for call in self._calls:
            between[call] = max(0.0, took[call] - planner.seconds(choice, call))
        return replace(costs, between_seconds=between)

    def _timed(self, call: str) -> dict[str, dict[str, list[float]]]:
        """`device` or `host` -> kind of unit -> seconds of each in one call."""
        self._caller(call, _WARM_UP)
        offloaded = self._offloaded
        with offloaded.timing() as timings:
            self._caller(call, 1)
        found: dict[str, dict[str, list[float]]] = {"device": {}, "host": {}}
        kinds = {unit.path: unit.kind for unit in self.planner.recorded.units}
        for path, times in timings.unit_seconds.items():
            where = offloaded.units[path].plan.computed_on[call]
            side = found["host" if where == HOST else "device"]
            side.setdefault(kinds[path], []).append(sum(times))
        return found

    def _filled_in(
        self, costs: Costs, seen: Mapping[str, Mapping[str, Mapping[str, list[float]]]]
    ) -> Costs:
        kinds = {unit.path: unit.kind for unit in self.planner.recorded.units}
        of: dict[str, dict[str, UnitCost]] = {}
        for call, units in costs.of.items():
            of[call] = {}
            for path, cost in units.items():
                times = seen.get(call, {"device": {}, "host": {}})
                device = times["device"].get(kinds[path])
                host = times["host"].get(kinds[path])
                of[call][path] = replace(
                    cost,
                    device_seconds=statistics.median(device) if device else cost.device_seconds,
                    host_seconds=statistics.median(host) if host else cost.host_seconds,
                )
        return replace(costs, of=of)

    def _host_seconds(self, costs: Costs, call: str) -> float:
        return sum(cost.host_seconds for cost in costs.of[call].values())

    def _link_speed(self) -> float | None:
        """Bytes per second of a copy of weights, or None where nothing travels."""
        offloaded = self._offloaded
        blocks = [
            unit.home.block for unit in offloaded.units.values()
            if unit.home.block is not None and unit.home.block.numel()
        ]  # fmt: skip
        block = max(blocks, key=lambda b: b.numel(), default=None)
        if block is None:
            return None
        room = offloaded.window.memory
        if not room.numel():
            room = offloaded.link.device_memory(min(block.numel(), _PROBE_BYTES))
        size = min(block.numel(), room.numel())
        pairs = [(room[:size], block[:size])]
        offloaded.window.forget()
        offloaded.link.copy(pairs, [])
        offloaded.link.finish()
        begun = time.perf_counter()
        for _ in range(_PASSES):
            offloaded.link.copy(pairs, [])
        offloaded.link.finish()
        offloaded.window.forget()
        return _PASSES * size / max(1e-9, time.perf_counter() - begun)

    def _hop(self) -> float:
        link = self._offloaded.link
        value = torch.zeros(4096, dtype=torch.bfloat16)
        for warm in (True, False):
            begun = time.perf_counter()
            for _ in range(4 if warm else 32):
                value = link.to_host([link.to_device(value)])[0]
        return (time.perf_counter() - begun) / 64

    # --- plans -----------------------------------------------------------------------------------

    def _with(self, choice: Choice, by_host: Mapping[str, frozenset[str]]) -> Choice:
        """As asked, but that who is too large for the buffer is computed by the host."""
        planner = self.planner
        must = frozenset(
            u.path for u in planner.recorded.units
            if u.path in planner.away(choice) and u.size > choice.window_bytes
        )  # fmt: skip
        return replace(choice, by_host={call: way | must for call, way in by_host.items()})

    def _all_off(self, choice: Choice) -> dict[str, frozenset[str]]:
        return dict.fromkeys(self.planner.weights, frozenset(self.planner.away(choice)))

    def _nobody(self, choice: Choice) -> dict[str, frozenset[str]]:
        return dict.fromkeys(self.planner.weights, frozenset())

    def _one_of_each_kind(self, choice: Choice) -> dict[str, frozenset[str]]:
        kinds: dict[str, list[str]] = {}
        for unit in self.planner.recorded.units:
            if unit.path in self.planner.away(choice):
                kinds.setdefault(unit.kind, []).append(unit.path)
        some = frozenset(
            path for paths in kinds.values() for path in paths[len(paths) // 2 :: 8][:3]
        )
        return dict.fromkeys(self.planner.weights, some)

    def candidates(self, found: Choice, *others: Choice) -> list[Choice]:
        """What is run before one is chosen, that which has to be among them first: the plan by
        measured costs; `others`, as the one without; all that has no room travelling or computed by
        the host, each with as much on the device as there is room for then; and the first with one
        more and one less that travels, all that, and nothing. Those that are slower beyond doubt
        are left out."""
        planner = self.planner
        pure = [
            min(ways, key=planner.total)
            for by_host in (False, True)
            if (ways := [c for c in planner.one_way(by_host=by_host) if planner.fits(c)])
        ]
        variants = [
            self._with(found, way) for way in (*self._neighbours(found), self._nobody(found))
        ]
        hopeful = [self._without_hopeless(choice, found) for choice in variants]
        every = (found, *others, *pure, *hopeful)
        choices = [choice for choice in every if planner.fits(choice)]
        most = _HOPELESS * min(map(planner.total, choices))
        return [choice for choice in choices if planner.total(choice) <= most]

    def _without_hopeless(self, choice: Choice, found: Choice) -> Choice:
        """Calls have their way of `found` where that of a plan with the same homes is too slow."""
        seconds = self.planner.seconds
        ways = {
            call: way
            if seconds(choice, call) <= _HOPELESS * seconds(found, call)
            else found.by_host[call]
            for call, way in choice.by_host.items()
        }
        return replace(choice, by_host=ways)

    def _neighbours(self, found: Choice) -> list[dict[str, frozenset[str]]]:
        planner = self.planner
        away = planner.away(found)
        ways: list[dict[str, frozenset[str]]] = []
        for change in (1, -1):
            way = {}
            for call, by_host in found.by_host.items():
                big = max((planner.costs.of[call][p].host_seconds for p in by_host), default=0.0)
                # Those that matter: an embedding is no unit to move about.
                hosts = [p for p in away if p in by_host
                         and planner.costs.of[call][p].host_seconds > big / 4]  # fmt: skip
                travel = [p for p in away if p not in by_host and p in planner.costs.of[call]]
                pick = hosts if change > 0 else travel
                way[call] = by_host ^ ({pick[len(pick) // 2]} if pick else set())
            ways.append({call: frozenset(paths) for call, paths in way.items()})
        return [*ways, self._all_off(found)]

    def _measure(self, choice: Choice, calls: Sequence[str]) -> dict[str, float]:
        """Seconds of a pass of some calls; of those that matter to no plan, as predicted."""
        took = {call: self.planner.seconds(choice, call) for call in calls}
        real = [call for call in calls if call in self._calls]
        if real:
            plan = self.planner.plan(choice)
            caller = self._go_on(plan)
            took |= {call: self._passes(caller, call) for call in real}
            logger.info("%s: %s", in_words(plan, real), took)
        return took

    def _passes(self, caller: Caller, call: str) -> float:
        once = caller(call, 1)
        if once > _LONG_SECONDS:
            return once  # what comes on top in a first pass is little beside that
        once = caller(call, _WARM_UP - 1)
        return caller(call, max(_PASSES, min(_MOST_PASSES, int(_ENOUGH_SECONDS / once))))


def in_words(plan: OffloadPlan, calls: Sequence[str]) -> str:
    """What becomes of the weights in some calls."""
    said = (
        f"{call}: {len(plan.travelling(call))} travel, {len(plan.on_host(call))} by host"
        for call in calls
    )
    return f"{'; '.join(said)}; buffer {format_bytes(plan.window_bytes)}"


@dataclass
class Contest:
    """Plans that are run in turns, and which of them took least: what slows the machine down for a
    while does so to all of them.

    Calls share homes and the buffer only. So of the plans that have these in common, each call has
    the way that is best for it, if all of them together have room.
    """

    weights: Mapping[str, float]
    """Of the calls."""
    fits: Callable[[Choice], bool]
    measure: Callable[[Choice, Sequence[str]], Mapping[str, float]]
    """Seconds of some calls by a plan."""
    times: dict[tuple[Hashable, str, frozenset[str]], list[float]] = field(default_factory=dict)
    """(Homes and buffer, call, who is computed by the host) -> as measured."""

    def run(
        self, choices: Sequence[Choice], turns: int, goes_on: Callable[[], bool]
    ) -> tuple[Choice, Mapping[str, float]]:
        """The best, and what its calls took. From the second turn on only plans are run that may
        still be it. The first plan is always run."""
        for turn in range(turns):
            for choice in choices:
                if self.times and not goes_on():
                    break
                calls = self._open(choice, turn)
                if calls:
                    for call, seconds in self.measure(choice, calls).items():
                        self.times.setdefault(_key(choice, call), []).append(seconds)
        tried = [c for c in choices if all(_key(c, call) in self.times for call in self.weights)]
        combined = {_place(c): self._combined(c, tried) for c in tried}
        best = min([*tried, *filter(self.fits, combined.values())], key=self._total)
        return best, {call: self._seconds(best, call) for call in self.weights}

    def _open(self, choice: Choice, turn: int) -> list[str]:
        """The calls that are worth another run by a plan."""
        calls = [c for c in self.weights if len(self.times.get(_key(choice, c), ())) <= turn]
        if not turn:
            return calls
        places: dict[Hashable, dict[str, float]] = {}
        for (place, call, _), times in self.times.items():
            least = places.setdefault(place, {})
            least[call] = min(least.get(call, float("inf")), statistics.median(times))
        totals = {
            place: sum(w * least.get(call, float("inf")) for call, w in self.weights.items())
            for place, least in places.items()
        }
        here, close = _place(choice), _CLOSE[min(turn, len(_CLOSE)) - 1]
        if totals.get(here, 0.0) > close * min(totals.values()):
            return []
        return [
            c for c in calls
            if _key(choice, c) not in self.times
            or self._seconds(choice, c) <= close * places[here][c]
        ]  # fmt: skip

    def _combined(self, like: Choice, tried: Sequence[Choice]) -> Choice:
        alike = [choice for choice in tried if _place(choice) == _place(like)]
        ways = {}
        for call in self.weights:
            times = [self._seconds(choice, call) for choice in alike]
            ways[call] = alike[times.index(min(times))].by_host[call]
        return replace(like, by_host=ways)

    def _seconds(self, choice: Choice, call: str) -> float:
        return statistics.median(self.times[_key(choice, call)])

    def _total(self, choice: Choice) -> float:
        return sum(weight * self._seconds(choice, call) for call, weight in self.weights.items())


def _place(choice: Choice) -> Hashable:
    return choice.at_home, choice.window_bytes


def _key(choice: Choice, call: str) -> tuple[Hashable, str, frozenset[str]]:
    return _place(choice), call, choice.by_host[call]


def refine(
    placed: Any, planner: Planner, workload: Workload, *, seconds: float = 60.0
) -> OffloadPlan:
    """Measures, plans again and goes on with the best; the module stays placed."""
    if not hasattr(placed, "offload"):
        raise PlacementError("only a placed module can be measured; apply its plan first")
    if workload.train:
        raise PlacementError(
            "plans for training steps are made by the description of the machine alone; "
            "use evaluate='simulate'"
        )
    return Refinement(placed, planner, workload, time.monotonic() + seconds).run()
