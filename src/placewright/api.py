"""The main job as two calls: `place` searches and gives a `Result`, which can be saved."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from placewright import methods as registry
from placewright import op_stage
from placewright._version import VERSION
from placewright.backends import Plan, load, target_backend
from placewright.cluster import Cluster
from placewright.errors import SearchError
from placewright.evaluators.base import Evaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.files import read_json, write_json
from placewright.finals import Comparison
from placewright.graph import Graph
from placewright.journal import Journal
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.placers.heft import heft
from placewright.placers.single_device import single_device
from placewright.problem import Constraints, Problem, make_problem
from placewright.search import (
    Budget,
    MethodResult,
    Progress,
    Record,
    better,
    parse_duration,
    search,
)
from placewright.simulator import Simulator, lower_bounds
from placewright.stopping import Stopped, Worker, never

if TYPE_CHECKING:
    from placewright.calibration import Calibration
    from placewright.distributed.team import Team

_R = TypeVar("_R")

How = Literal["simulate", "measure", "simulate+measure"]
"""How the placements of a run are tried; the times in its journal are of one kind."""

RUN_FILE = "run.json"
"""Says how the run began, which a run that is continued has to know."""

PROBLEM_FILE = "problem.json.gz"
"""The whole problem: some 300 kB for 12,000 ops, a twentieth of the JSON in it."""

COSTS_FILE = "costs.json"
"""What a run with real devices found out about costs: a costs file with the cluster in it."""


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
    interrupted: bool = False
    fault: str = ""
    """What broke the measuring itself, where that ended the search before its budget did."""
    measured: bool = False
    """Whether the times are of real runs. What is proven in the simulator does not hold for those,
    so that the lower bound is 0."""
    calibration: Calibration | None = None
    """What was found out about the costs on the way, where that was."""
    comparisons: tuple[Comparison, ...] = ()
    """The answer against the best single device and the expert's placement, measured in turns."""
    references: tuple[Trial, ...] = ()
    """What `single` and `heft` find, where no method of the search is called so: simulated besides,
    to compare the answer with."""
    proven: bool = False
    """Whether the search ended because the best is proven to be optimal."""

    @property
    def placed(self) -> Problem:
        """The problem that the best placement is of: the one that was searched by groups, or the
        same op by op."""
        if self.best is None or self.best.placement.problem == self.problem.fingerprint:
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
            trial.measurement.mean_seconds
            for trial in found
            if trial.placement.problem == self.problem.fingerprint
        ]
        return min(by_groups) / self.step_seconds if by_groups and self.step_seconds else None

    @property
    def placement(self) -> Placement:
        if self.best is None:
            raise SearchError(self.why_none())
        return self.best.placement

    @property
    def step_seconds(self) -> float:
        if self.best is None:
            raise SearchError(self.why_none())
        return self.best.measurement.mean_seconds

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
        return single.measurement.mean_seconds / self.step_seconds if single and self.best else None

    @property
    def gap(self) -> float:
        """By what share the answer could still be improved at most: 0.2 for 20%."""
        return 1.0 - self.lower_bound_seconds / self.step_seconds

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row for each method, as in `summary.json` and `placewright compare --json`."""
        return [row(result) | {"main_device": self._main_device(result)} for result in self.methods]

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
            "problem": self.problem.fingerprint,
            "version": VERSION,
            "command": command,
            "seed": self.seed,
            "interrupted": self.interrupted,
            "fault": self.fault,
            "measured": self.measured,
            "outcome": best.outcome.value if best else "no placement ran",
            "method": self.best.placer if self.best else None,
            "step_seconds": best.mean_seconds if best else None,
            "half_width_seconds": best.half_width_seconds if best else None,
            "peak_bytes": list(best.peak_bytes) if best else None,
            "lower_bound_seconds": self.lower_bound_seconds,
            "speed_up_over_single": self.speed_up,
            "placed_by": "op" if self.placed is not self.problem else "group",
            "gain_over_groups": self.gain_over_groups,
            "proven": self.proven,
            "references": [
                {
                    "method": trial.placer,
                    "step_seconds": trial.measurement.mean_seconds
                    if trial.measurement.ok
                    else None,
                    "outcome": trial.measurement.outcome.value,
                }
                for trial in self.references
            ],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "trials": self.trials,
            "search_seconds": self.seconds,
            "methods": self.table,
        }

    def save(self, directory: str | Path, command: str = "", *, trace: bool = True) -> None:
        """Writes `placement.json`, `summary.json`, `trace.json` (if wanted) and `problem.json.gz`,
        from which reports are made (the journal is there already when the search was given the
        directory), and `costs.json` where costs were measured, under which the trace is drawn."""
        folder = Path(directory)
        check_directory(folder, self.problem)
        _make_directory(folder)
        if not (folder / PROBLEM_FILE).exists():
            self.problem.save(folder / PROBLEM_FILE)
        if self.best is not None:
            self.best.placement.save(folder / "placement.json", self.placed)
            if self.calibration is not None:
                self.calibration.save(folder / COSTS_FILE, self.problem.graph)
        write_json(folder / "summary.json", self.summary(command), SearchError)
        if self.best is not None and trace:
            under = self.placed
            if self.calibration is not None:
                under = self.calibration.problem(under)
            placement = Placement.of(under, self.best.placement.devices)
            timeline = Simulator(under).timeline(placement)
            write_json(folder / "trace.json", timeline.chrome_trace(), SearchError)


def row(result: MethodResult) -> dict[str, Any]:
    measurement = result.best.measurement if result.best else None
    ok = measurement is not None and measurement.ok
    return {
        "method": result.method,
        "step_seconds": measurement.mean_seconds if measurement and ok else None,
        "outcome": measurement.outcome.value if measurement else "nothing proposed",
        "peak_bytes": list(measurement.peak_bytes) if measurement else None,
        "reason": measurement.reason if measurement else result.why_not,
        "trials": result.trials,
        "search_seconds": result.seconds,
    }


def place(
    graph: Graph | Problem | str | Path,
    cluster: Cluster | str = "local",
    *,
    method: str = "auto",
    budget: float | str | None = None,
    trials: int | None = None,
    seed: int = 0,
    constraints: Constraints | None = None,
    directory: str | Path | None = None,
    learner: Sequence[str] = (),
    policy: str | Path | None = None,
) -> Result:
    """Searches for a fast placement of a graph on a cluster.

    Args:
        graph: what to place, or what `load` takes; or a whole `Problem` (`make_problem` makes one
            with a grouping and costs of your own), which brings its cluster and constraints.
        cluster: a `Cluster`, the name of a preset, or a file.
        method: `auto`, or names of methods separated by commas.
        budget: seconds, or a text such as `5m`; 60 s when neither this nor `trials` is given.
        trials: how many placements to try at most.
        seed: the same seed and number of trials give the same result.
        constraints: what to pin, forbid or keep together.
        directory: where to record every trial and save the result. A directory that holds a run of
            the same problem is continued; one of another problem is refused.
        learner: settings of the learned methods, such as `samples=32`.
        policy: file of a trained policy (`placewright train`) that they go on from.
    """
    chosen = registry.parse(method)
    registry.check_learner(chosen, learner, policy)
    if isinstance(graph, Problem):
        problem = graph
    else:
        cluster = Cluster.load(cluster) if isinstance(cluster, str) else cluster
        problem = make_problem(load(graph), cluster, constraints=constraints)
    if budget is None and trials is None:
        budget = 60.0
    seconds = parse_duration(budget) if isinstance(budget, str) else budget
    result = run(
        problem,
        chosen,
        Budget(seconds=seconds, trials=trials),
        seed=seed,
        directory=directory,
        learner=learner,
        policy=policy,
        op_level="auto" in method.split(","),
    )
    if directory is not None:
        result.save(directory)
    return result


def run(
    problem: Problem,
    methods: Sequence[str],
    budget: Budget,
    *,
    seed: int = 0,
    directory: str | Path | None = None,
    learner: Sequence[str] = (),
    policy: str | Path | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = never,
    evaluator: Evaluator | None = None,
    team: Team | None = None,
    op_level: bool = False,
) -> Result:
    """Runs the methods one after another and gathers what they found.

    `evaluator` is what the placements are tried on: the simulator unless another one is given, or
    a `team`, which also trains the learned methods where one process is not enough. With `op_level`
    a simulated search also places every op for itself (`op_stage`).
    """
    registry.check_seed(seed)
    started = time.monotonic()
    try:
        bounds = _patiently(functools.partial(lower_bounds, problem), stop)
    except Stopped:
        return _nothing(problem, seed, time.monotonic() - started)
    simulated = evaluator is None and team is None
    by_ops = simulated and op_level and op_stage.is_worthwhile(problem)
    if bounds.forced_out_of_memory is not None:
        raise SearchError(bounds.forced_out_of_memory)
    measured = evaluator is not None
    if team is not None:
        evaluator, measured = team.evaluator, not team.evaluator.cheap
    evaluator = evaluator or SimulatedEvaluator(problem)
    if team is not None or (directory is not None and registry.has_learned(directory)):
        # What one process can compute in this time says nothing of many, nor of a run that goes on.
        methods = [str(name) for name in methods]

    def made(limits: Budget) -> list[Placer]:
        return registry.make(
            methods, problem, seed=seed, seconds=limits.seconds, trials=limits.trials,
            learner=learner, policy=policy, cheap=evaluator.cheap, noise=evaluator.noise,
        )  # fmt: skip

    # The first evaluation compiles the simulator, which is nobody's search time.
    references: tuple[Trial, ...] = ()
    bound = 0.0 if measured else bounds.best
    stage: op_stage.OpStage | None = None
    parts: list[Progress] = []
    chosen: list[Placer] = []
    try:
        if evaluator.cheap:
            first = Placement.of(problem, problem.allowed.argmax(axis=1))
            _patiently(functools.partial(evaluator.evaluate, [first]), stop)
        if simulated:
            references = _patiently(functools.partial(_references, problem, evaluator), stop)
            if by_ops and problem.refined is not problem:
                op_bounds = _patiently(functools.partial(lower_bounds, problem.refined), stop)
        with open_journal(directory, problem, "measure" if measured else "simulate") as journal:
            started = time.monotonic()
            limits: Budget | None = budget
            record: Record | None = journal
            if by_ops:
                if problem.refined is not problem:
                    bound = op_bounds.best
                stage = op_stage.OpStage(
                    problem=problem, budget=budget, seed=seed, journal=journal, observe=observe,
                    stop=stop, lower_bound_seconds=bound,
                )  # fmt: skip
                parts.append(stage.open())
                known = [r.measurement.mean_seconds for r in references]
                limits = stage.budget_for_groups(min(known, default=math.inf))
                record = stage.record(stage.is_by_groups)
            if limits is not None and not (by_ops and stop()):
                chosen = _patiently(functools.partial(made, limits), stop)
                if team is not None:
                    chosen = team.distributed(chosen)
                before = tuple(parts)
                parts.append(
                    search(
                        chosen, evaluator, limits, journal=record, seed=seed, stop=stop,
                        directory=directory,
                        observe=lambda now: observe(op_stage.merged([*before, now], budget)),
                        lower_bound_seconds=0.0 if measured else bounds.best,
                    )
                )  # fmt: skip
            if stage is not None:
                parts += filter(None, [stage.close(parts[1] if len(parts) > 1 else None)])
    except Stopped:
        if not parts:
            return _nothing(problem, seed, time.monotonic() - started)
    progress = op_stage.merged(parts, budget)
    best = None
    for result in progress.results():
        if result.best is not None and result.best.measurement.ok:
            best = better(best, result.best)
    # What is proved of groups does not hold for single ops.
    proved = [p.lower_bound_seconds for p in chosen] if stage is None or _alike(problem) else []
    return Result(
        problem=problem,
        best=best,
        methods=tuple(progress.results()),
        lower_bound_seconds=0.0 if measured else _best_bound([bound, *proved], best),
        seconds=time.monotonic() - started,
        seed=seed,
        interrupted=stop(),
        fault=progress.fault,
        measured=measured,
        references=tuple(r for r in references if r.placer not in progress.trials_of),
        proven=progress.proven,
    )


def _alike(problem: Problem) -> bool:
    return problem.refined is problem


def _patiently(function: Callable[[], _R], stop: Callable[[], bool]) -> _R:
    """Calls it so that it can be abandoned when `stop()` becomes true; raises `Stopped` then."""
    if stop is never:
        return function()
    worker = Worker()
    try:
        return worker.run(function, stop)
    finally:
        worker.close()


def _nothing(problem: Problem, seed: int, seconds: float) -> Result:
    """Of a search that was stopped before it tried anything."""
    return Result(
        problem=problem, best=None, methods=(), lower_bound_seconds=0.0, seconds=seconds, seed=seed,
        interrupted=True,
    )  # fmt: skip


def _references(problem: Problem, evaluator: Evaluator) -> tuple[Trial, ...]:
    """The best of `single` and of `heft`. They take no time, and no answer means much without."""
    found = []
    for name, function in (("single", single_device), ("heft", heft)):
        placements = function(problem)
        best = None
        for placement, measurement in zip(placements, evaluator.evaluate(placements), strict=True):
            best = better(best, Trial(placement=placement, measurement=measurement, placer=name))
        if best is not None:
            found.append(best)
    return tuple(found)


@contextlib.contextmanager
def open_journal(
    directory: str | Path | None, problem: Problem, how: How
) -> Iterator[Journal | None]:
    """The journal of a directory, which is made if need be; none without a directory.

    Raises for a run that began in another way.
    """
    if directory is None:
        yield None
        return
    check_directory(Path(directory), problem)
    _make_directory(Path(directory))
    began = began_with(directory)
    if began not in (None, how):
        raise SearchError(f"{directory}: began with {began}; it cannot go on with {how}")
    # At the beginning, so that also a run that is killed can be looked at and continued.
    write_json(Path(directory) / RUN_FILE, {"evaluate": how, "version": VERSION}, SearchError)
    problem.save(Path(directory) / PROBLEM_FILE)
    with Journal(Path(directory) / "journal.jsonl", problem) as journal:
        yield journal


def began_with(directory: str | Path) -> How | None:
    """How the placements of the run in a directory are tried; None where there is none."""
    path = Path(directory) / RUN_FILE
    if not path.is_file():
        return None
    document = read_json(path, SearchError, what="run")
    how = document.get("evaluate") if isinstance(document, dict) else None
    if how not in get_args(How):
        raise SearchError(f"{path}: does not say how the run began; was the file edited?")
    return cast(How, how)


def _best_bound(bounds: Sequence[float], best: Trial | None) -> float:
    """What a placer proved may be better than the general bounds."""
    bound = max(bounds)
    # Proofs and simulation round differently in the last digits.
    return bound if best is None else min(bound, best.measurement.mean_seconds)


def check_directory(folder: Path, problem: Problem) -> None:
    """Raises when the directory holds results of another problem, which would be overwritten."""
    summary = folder / "summary.json"
    if summary.is_file():
        document = read_json(summary, SearchError, what="summary")
        other = document if isinstance(document, dict) else {}
        if other.get("problem") != problem.fingerprint:
            raise SearchError(
                f"{folder}: holds results for problem {other.get('problem')} "
                f"({other.get('model')} on {other.get('cluster')}), this one is "
                f"{problem.fingerprint} ({problem.graph.name} on {problem.cluster.name})"
            )
    elif (folder / "placement.json").exists():
        raise SearchError(f"{folder}: holds a placement.json of something else")


def _make_directory(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise SearchError(f"{folder}: cannot be made a directory: {fault.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SearchError(f"{folder}: is not writable")
