"""What a search found: to look at, to save, and to put into the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewright._version import VERSION
from placewright.backends import Plan, target_backend
from placewright.errors import SearchError
from placewright.files import write_json
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.problem import Problem
from placewright.session.config import SIMULATE, How
from placewright.session.directory import (
    COSTS_FILE,
    PLACEMENT_FILE,
    PROBLEM_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
    check_directory,
    digests,
    writing,
)
from placewright.session.finals import Comparison
from placewright.session.search import MethodResult
from placewright.simulator import Makeup, Parts, Simulator, StepRange
from placewright.simulator.makeup import range_line
from placewright.stopping import Stopped, never, patiently
from placewright.units import format_seconds

if TYPE_CHECKING:
    from placewright.calibration import Calibration

_GRACE_SECONDS = 0.5
"""How long whoever stops while a trace is drawn waits for it."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search found, and how it compares."""

    problem: Problem
    best: Trial | None
    """The fastest placement that ran; None when none did."""
    methods: tuple[MethodResult, ...]
    """In the order they ran."""
    lower_bound_seconds: float
    """No placement can be faster than this."""
    seconds: float
    """How long the search took."""
    seed: int
    evaluate: How = SIMULATE
    """How placements were tried."""
    interrupted: bool = False
    fault: str = ""
    """What broke the measuring itself, where that ended the search before its budget did."""
    calibration: Calibration | None = None
    """What was found out about the costs on the way, where that was."""
    comparisons: tuple[Comparison, ...] = ()
    """The answer against the best single device and the expert's placement, measured in turns."""
    ranges: Mapping[Placement, StepRange] = field(default_factory=dict)
    """Step times over several orders of ties of the answer, of each method's best, and of the
    references. Empty where times are of real runs, and where a stop left no time for it."""
    parts: Mapping[Placement, Parts] = field(default_factory=dict)
    """What the devices that are used do in the steps of the same, the mean of them; empty where
    times are of real runs, and for large graphs."""
    makeup: Makeup | None = None
    """What the answer's step is made of; None where the times are of real runs, and for a
    large graph whose search was stopped."""
    references: tuple[Trial, ...] = ()
    """What `single` and `heft` find, where no method of the search is called so: simulated besides,
    to compare the answer with."""
    proven: bool = False
    """Whether the search ended because the best is proven to be optimal."""
    bound_by_groups: bool = False
    """Whether the lower bound holds for these groups only: other groupings are other placements."""
    remarks: tuple[str, ...] = ()
    """What else has to be known of how it was found."""

    @property
    def placed(self) -> Problem:
        """The problem that the best placement is of: the one that was searched by groups, or the
        same op by op."""
        if self.best is None or self.best.placement.space == self.problem.space.fingerprint:
            return self.problem
        return self.problem.refined

    @property
    def gain_over_groups(self) -> float | None:
        """How many times as fast the answer is as the best that was found by groups; None where it
        is by groups itself, or none of those ran."""
        if self.best is None or self.placed is self.problem:
            return None
        found = [m.best for m in self.methods if m.best is not None and m.best.measurement.ok]
        found += [trial for trial in self.references if trial.measurement.ok]
        by_groups = [
            self.seconds_of(trial)
            for trial in found
            if trial.placement.space == self.problem.space.fingerprint
        ]
        return min(by_groups) / self.step_seconds if by_groups and self.step_seconds else None

    @property
    def measured(self) -> bool:
        """Whether the times are of real runs. What is proven in the simulator does not hold for
        those, so that the lower bound is 0."""
        return self.evaluate != SIMULATE

    @property
    def step_range(self) -> StepRange | None:
        """Of the answer, over several orders of ties."""
        return None if self.best is None else self.ranges.get(self.best.placement)

    @property
    def step_orders(self) -> int | None:
        """Of how many orders of ties step times are the means; None where they are of real runs."""
        if self.measured:
            return None
        return 1 if self.step_range is None else self.step_range.orders

    def seconds_of(self, trial: Trial) -> float:
        """The step time of a method's best or a reference, as all figures here have it: the mean
        over several orders of ties where it is simulated."""
        found = self.ranges.get(trial.placement)
        return trial.measurement.mean_seconds if found is None else found.mean_seconds

    @property
    def placement(self) -> Placement:
        if self.best is None:
            raise SearchError(self.why_none())
        return self.best.placement

    @property
    def step_seconds(self) -> float:
        if self.best is None:
            raise SearchError(self.why_none())
        return self.seconds_of(self.best)

    @property
    def trials(self) -> int:
        return sum(result.trials for result in self.methods)

    @property
    def best_single(self) -> Trial | None:
        """The fastest placement with everything on one device, where that was tried and ran."""
        found = [result.best for result in self.methods if result.method == "single"]
        found += [trial for trial in self.references if trial.placer == "single"]
        return next((trial for trial in found if trial is not None and trial.measurement.ok), None)

    @property
    def speed_up(self) -> float | None:
        """Over the best single device."""
        single = self.best_single
        if single is None or not self.best or not self.step_seconds:
            return None
        return self.seconds_of(single) / self.step_seconds

    @property
    def gap(self) -> float:
        """By what share the answer could still be improved at most: 0.2 for 20%."""
        if self.best is None:
            raise SearchError(self.why_none())
        seconds = self.step_seconds
        return max(0.0, 1.0 - self.lower_bound_seconds / seconds) if seconds else 0.0

    def notes(self) -> list[str]:
        """What has to be known beside the step time: how it was found, what the step is made of,
        and how sure the figure is."""
        lines = [*self.remarks, *(self.makeup.lines() if self.makeup else [])]
        unsure = range_line(self.step_range) if self.step_range else ""
        return [*lines, unsure] if unsure else lines

    @property
    def simple_answer(self) -> str:
        """What does as well as the answer whose speed-up is only overhead that several devices
        share: one device and less overhead. Empty for any other."""
        makeup = self.makeup
        if makeup is None or makeup.simple is None or not makeup.is_only_overhead:
            return ""
        device = self.problem.cluster.device_names[makeup.simple.main_device]
        seconds = format_seconds(makeup.simple_seconds or 0.0)
        return (
            f"everything on {device} ({seconds}) with less overhead, by a captured graph or a "
            "larger batch, does as well"
        )

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row for each method, as in `summary.json` and `placewright compare --json`."""
        return [
            self.row(result) | {"main_device": self._main_device(result)} for result in self.methods
        ]

    def row(self, result: MethodResult) -> dict[str, Any]:
        """What a method found. Its time is the mean over several orders of ties, as that of the
        answer."""
        best = result.best
        measurement = best.measurement if best else None
        parts = self.parts.get(best.placement) if best else None
        return {
            "method": result.method,
            "step_seconds": self.seconds_of(best) if best and best.measurement.ok else None,
            "outcome": measurement.outcome.value if measurement else "nothing proposed",
            "peak_bytes": list(measurement.peak_bytes) if measurement else None,
            "parts": parts._asdict() if parts else None,
            "reason": measurement.reason if measurement else result.why_not,
            "trials": result.trials,
            "search_seconds": result.seconds,
        }

    def _main_device(self, result: MethodResult) -> str | None:
        if result.best is None:
            return None
        return self.problem.cluster.device_names[result.best.placement.main_device]

    def __repr__(self) -> str:
        step = f"{self.step_seconds:.6g} s" if self.best else "nothing ran"
        where = f"{self.problem.graph.name} on {self.problem.cluster.name}"
        return f"<Result: {where}, {step}, {self.trials} trials>"

    def why_none(self) -> str:
        reasons = [f"{m.method}: {m.why_not}" for m in self.methods if m.why_not]
        failed = next((m.best for m in self.methods if m.best is not None), None)
        if failed is not None:
            reasons.insert(0, f"for example {failed.measurement.reason}")
        return f"none of the {self.trials} placements tried ran; {'; '.join(reasons)}"

    def placement_by_op(self) -> dict[str, str]:
        """Op name -> device name of the best placement."""
        names = self.problem.cluster.device_names
        devices = self.placement.devices[self.placed.grouping.group_of].tolist()
        return {
            op: names[device]
            for op, device in zip(self.problem.graph.op_names, devices, strict=True)
        }

    def apply(self, target: Any, devices: Mapping[str, str] | None = None) -> Any:
        """Puts the best placement into a model that the problem was made from.

        Args:
            target: of TensorFlow, a `tf.Graph`, which is changed; a GraphDef or MetaGraphDef, of
                which a copy is returned; or a `tf.function` or ConcreteFunction, for which a new
                ConcreteFunction is returned that works on the same variables.
            devices: the framework's names of the cluster's devices, where they are not
                `/device:GPU:0` for `gpu:0` and the like.
        """
        backend = target_backend(target)
        placed = self.placement_by_op()
        used = set(placed.values())
        # A table of the whole cluster is welcome, whatever of it the placement uses.
        spare = set(self.problem.cluster.device_names) - used
        given = {name: text for name, text in (devices or {}).items() if name not in spare}
        names = backend.device_names(sorted(used), given)
        plan = Plan(device_of={op: names[device] for op, device in placed.items()})
        return backend.apply(target, plan)

    def summary(self, command: str = "") -> dict[str, Any]:
        best = self.best.measurement if self.best else None
        return {
            "model": self.problem.graph.name,
            "cluster": self.problem.cluster.name,
            "devices": list(self.problem.cluster.device_names),
            "memory_bytes": [d.memory_bytes for d in self.problem.cluster.devices],
            "space": self.problem.space.fingerprint,
            "problem": self.problem.fingerprint,
            "version": VERSION,
            "command": command,
            "seed": self.seed,
            "interrupted": self.interrupted,
            "fault": self.fault,
            "evaluate": self.evaluate,
            "measured": self.measured,
            "outcome": best.outcome.value if best else "no placement ran",
            "method": self.best.placer if self.best else None,
            "step_seconds": self.step_seconds if best else None,
            "step_orders": self.step_orders,
            "step_range": asdict(self.step_range) if self.step_range else None,
            "makeup": self.makeup.to_json() if self.makeup else None,
            "half_width_seconds": best.half_width_seconds if best else None,
            "peak_bytes": list(best.peak_bytes) if best else None,
            "lower_bound_seconds": self.lower_bound_seconds,
            "lower_bound_by": "group" if self.bound_by_groups else "op",
            "remarks": list(self.remarks),
            "simple_answer": self.simple_answer,
            "speed_up_over_single": self.speed_up,
            "placed_by": "op" if self.placed is not self.problem else "group",
            "gain_over_groups": self.gain_over_groups,
            "proven": self.proven,
            "references": [
                {
                    "method": trial.placer,
                    "step_seconds": self.seconds_of(trial) if trial.measurement.ok else None,
                    "outcome": trial.measurement.outcome.value,
                }
                for trial in self.references
            ],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "trials": self.trials,
            "search_seconds": self.seconds,
            "methods": self.table,
        }

    def save(
        self,
        directory: str | Path,
        command: str = "",
        *,
        trace: bool = True,
        stop: Callable[[], bool] = never,
    ) -> bool:
        """Writes `placement.json`, `trace.json` (if wanted) and `problem.json.gz`, from which
        reports are made (the journal is there already when the search was given the directory),
        `costs.json` where costs were measured, under which the trace is drawn, and last
        `summary.json`, which says what the others are (`files`): until it is there, they are of a
        run that was cut off.

        A trace takes seconds to draw for a large graph, and is given up soon after `stop()`.
        Whether there is one is returned.
        """
        folder = Path(directory)
        drawn = None
        check_directory(folder, self.problem)
        with writing(folder):
            if not (folder / PROBLEM_FILE).exists():
                self.problem.save(folder / PROBLEM_FILE)
            if self.best is not None:
                self.best.placement.save(folder / PLACEMENT_FILE, self.placed)
                if self.calibration is not None:
                    self.calibration.save(folder / COSTS_FILE, self.problem.graph)
            if self.best is not None and trace:
                with contextlib.suppress(Stopped):
                    drawn = patiently(self._trace, stop, _GRACE_SECONDS)
            if drawn is not None:
                write_json(folder / TRACE_FILE, drawn, SearchError)
            else:  # one of before would be of another placement
                (folder / TRACE_FILE).unlink(missing_ok=True)
            found = digests(folder)
            if self.calibration is None:
                found.pop(COSTS_FILE, None)  # somebody's
            summary = self.summary(command) | {"files": found}
            write_json(folder / SUMMARY_FILE, summary, SearchError)
        return drawn is not None

    def _trace(self) -> dict[str, Any]:
        assert self.best is not None
        under = self.placed
        if self.calibration is not None:
            under = self.calibration.problem(under)
        return Simulator(under).timeline(self.best.placement).chrome_trace()
