"""What units really take: a few passes of the placed module, and the plan that is best by them.

Units are timed where they run, within whole passes. Of units of one kind one time is taken, the
median: they do the same.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from placewright.backends.pytorch.offload.plan import HOST, OffloadPlan
from placewright.backends.pytorch.offload.planner import Choice, Planner
from placewright.backends.pytorch.offload.runtime import Offloaded
from placewright.backends.pytorch.offload.shapes import Workload, real_inputs
from placewright.backends.pytorch.offload.timeline import Costs, UnitCost
from placewright.errors import PlacementError

logger = logging.getLogger(__name__)

_WARM_UP = 3
"""Passes before one counts: units are captured in the third."""
_PASSES = 3
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
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    """Plan in words -> call -> seconds of a pass, as run."""
    _calls: list[str] = field(default_factory=list)
    """Those that matter; the others keep their estimated costs."""

    def run(self) -> OffloadPlan:
        """The placed module goes on with what was best."""
        first = self.planner.choice_of(self._offloaded.plan)
        shares = {c: w * self.planner.seconds(first, c) for c, w in self.planner.weights.items()}
        self._calls = [c for c, share in shares.items() if share > _SHARE * sum(shares.values())]
        self.planner.costs = self._costs(first)
        found = self.planner.best(5.0, seed=0)
        self.planner.costs = self._fitted(found)
        found = self.planner.best(5.0, seed=1)
        best = self._best_of(found)
        plan = self.planner.plan(best)
        took = self.measured["chosen"]
        shapes = tuple(replace(s, seconds=took.get(s.name, s.seconds)) for s in plan.shapes)
        plan = replace(plan, shapes=shapes)
        self._go_on(plan)
        return plan

    @property
    def _offloaded(self) -> Offloaded:
        offloaded: Offloaded = self.placed.offload
        return offloaded

    def _go_on(self, plan: OffloadPlan) -> Caller:
        if plan != self._offloaded.plan:
            self._offloaded.use(plan)
        return Caller(self.placed, self.workload)

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
        took = self._measure(choice)
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
        caller = Caller(self.placed, self.workload)
        caller(call, _WARM_UP)
        offloaded = self._offloaded
        with offloaded.timing() as timings:
            caller(call, 1)
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

    def _best_of(self, found: Choice) -> Choice:
        """What is really best of the plan, the same with one more or one less that travels, and the
        pure plans, for each call by itself: calls share only homes and the buffer."""
        planner = self.planner
        best: dict[str, tuple[float, frozenset[str]]] = {}
        tried: set[tuple[str, frozenset[str]]] = set()
        for way in (found.by_host, *self._neighbours(found), self._nobody(found)):
            choice = self._with(found, way)
            calls = [c for c in self._calls if (c, choice.by_host[c]) not in tried]
            if not calls or not planner.fits(choice) or time.monotonic() > self.deadline:
                continue
            for call, seconds in self._measure(choice, calls).items():
                tried.add((call, choice.by_host[call]))
                if call not in best or seconds < best[call][0]:
                    best[call] = seconds, choice.by_host[call]
        self.measured["chosen"] = {call: seconds for call, (seconds, _) in best.items()}
        ways = {call: best[call][1] if call in best else found.by_host[call] for call in best}
        return replace(found, by_host={**found.by_host, **ways})

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
        all_off = self._all_off(found)
        short = {
            call: paths
            if self._host_seconds(planner.costs, call) < _LONG_SECONDS
            else found.by_host[call]
            for call, paths in all_off.items()
        }
        return [*ways, short]

    def _measure(self, choice: Choice, calls: list[str] | None = None) -> dict[str, float]:
        plan = self.planner.plan(choice)
        caller = self._go_on(plan)
        took = {}
        for call in calls or self._calls:
            once = caller(call, _WARM_UP)
            took[call] = once if once > _LONG_SECONDS else caller(call, _PASSES)
        words = "; ".join(
            f"{call}: {len(plan.travelling(call))} travel, {len(plan.on_host(call))} by host"
            for call in took
        )
        self.measured[words] = took
        logger.info("%s: %s", words, took)
        return took


def refine(
    placed: Any, planner: Planner, workload: Workload, *, seconds: float = 60.0
) -> OffloadPlan:
    """Measures, plans again and goes on with the best; the module stays placed."""
    if not hasattr(placed, "offload"):
        raise PlacementError("only a placed module can be measured; apply its plan first")
    return Refinement(placed, planner, workload, time.monotonic() + seconds).run()
