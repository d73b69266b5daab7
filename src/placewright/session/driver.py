"""One driver for every search: references, calibration, search, rounds of measuring, a final."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from placewright import backends
from placewright import methods as registry
from placewright.backends.base import Array, LoadOptions, Program, RunConfig, Runner
from placewright.budget import Budget
from placewright.calibration import Calibration
from placewright.cluster import Cluster
from placewright.distributed.config import TeamConfig
from placewright.distributed.team import Team, assemble
from placewright.errors import SearchError, check_settings
from placewright.evaluators.base import Evaluator
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.journal import Journal
from placewright.placement import everything_on
from placewright.placers.base import Placer
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.session.config import BOTH, MEASURE, SIMULATE, How, Machine, SearchConfig
from placewright.session.directory import (
    JOURNAL_FILE,
    RUN_FILE,
    began_with,
    check_directory,
    open_journal,
    writing,
)
from placewright.session.metrics import MetricsLog
from placewright.session.real import RealRuns
from placewright.session.result import Result
from placewright.session.rounds import Rounds
from placewright.session.search import Progress, search
from placewright.session.simulated import SimulatedSearch
from placewright.simulator import lower_bounds
from placewright.stopping import Stopped, never

logger = logging.getLogger(__name__)

NOTHING_SEARCHED = (
    "nothing was searched: what the references took left no budget for it; the answer is the best "
    "of them"
)


class Session:
    """A search, from what was asked for to what was found. Nothing else drives one.

    Args:
        problem: what is placed, where, and what that costs as far as is known.
        config: what searches, how long, and how placements are tried.
        machine: what real runs are made with, where there are to be any.
        runner: the same, started already; it is left running.
        calibration: what is known of costs already; nothing is traced to find that out.
        team: how many processes to search with, on Ray; or what tries the placements in place of
            what the session would make, and is left as it is. None for this process.
        directory: where every trial is recorded. One that holds a run of this problem is continued.
        observe: called with the progress after every batch.
        stop: asked again and again; once it says so the search ends with what was found.
    """

    def __init__(
        self,
        problem: Problem,
        config: SearchConfig | None = None,
        *,
        machine: Machine | None = None,
        runner: Runner | None = None,
        calibration: Calibration | None = None,
        team: TeamConfig | Evaluator | None = None,
        directory: str | Path | None = None,
        observe: Callable[[Progress], None] = lambda progress: None,
        stop: Callable[[], bool] = never,
    ) -> None:
        self.problem = problem
        self.config = config or SearchConfig()
        self.machine = machine
        self.runner = runner
        self.calibration = calibration
        self.team = team if isinstance(team, TeamConfig) else None
        self.pool = None if isinstance(team, TeamConfig) else team
        self.directory = None if directory is None else Path(directory)
        self.observe = observe
        self.stop = stop
        self.evaluate = self._how()
        self._team: Team | None = None

    def status(self) -> Mapping[str, float]:
        """Numbers of the workers to watch while it runs; none without workers."""
        return {} if self._team is None else self._team.status()

    def run(self) -> Result:
        registry.check_seed(self.config.seed)
        if self.directory is not None:  # before anything is started
            check_directory(self.directory, self.problem)
        if self.evaluate != SIMULATE or self.team is not None:
            bounds = lower_bounds(self.problem)
            if bounds.forced_out_of_memory is not None:
                raise SearchError(bounds.forced_out_of_memory)
        with contextlib.ExitStack() as opened:
            if self.directory is not None:
                opened.enter_context(writing(self.directory))
            evaluator = self._evaluator(opened)
            if self.evaluate == SIMULATE:
                return self._simulated(evaluator)
            return self._measured(evaluator)

    def _journal(self) -> contextlib.AbstractContextManager[Journal | None]:
        return open_journal(self.directory, self.problem, self.evaluate)

    # --- how placements are tried ----------------------------------------------------------------

    def _how(self) -> How:
        """What is asked for, or how the run began that is continued, or else what fits: real runs
        where there is a machine and the time for them."""
        wanted = wanted_in(self.config, self.directory)
        # Workers make runners of their own.
        can_here = self.runner is not None and self.team is None
        can = self.machine is not None or can_here or self.pool is not None
        if wanted in (MEASURE, BOTH) and not can:
            raise SearchError(
                f"evaluate={wanted!r} needs a model that can be run, not only a graph"
            )
        if wanted is None:
            limits, team = self.config.limits, self.team is not None
            # Trials alone are mostly meant for the simulator, and so are workers.
            if not can or team or self.pool is not None or limits.seconds is None:
                return SIMULATE
            reason = self._why_not_measured() or unaffordable(self.problem, limits)
            if reason:
                logger.warning("simulated only: %s (evaluate=%r measures anyway)", reason, BOTH)
                return SIMULATE
            return BOTH
        if wanted == BOTH and self.team is not None and self.team.controllers:
            raise SearchError(
                f"controllers train on what their workers try; with evaluate={BOTH!r} there can be "
                "workers only"
            )
        return wanted

    def _why_not_measured(self) -> str:
        if self.machine is None:
            return ""
        program = self.machine.program
        return backends.get(program.backend).why_not_measured(program)

    def _evaluator(self, opened: contextlib.ExitStack) -> Evaluator:
        """What tries placements, started before the clock of the search is."""
        problem = self.problem
        if self.pool is not None:
            return self.pool
        if self.team is not None:
            make: Callable[[], Evaluator]
            if self.evaluate == SIMULATE:
                make = functools.partial(SimulatedEvaluator, problem, threads=1)
            else:
                assert self.machine is not None
                make = functools.partial(_measuring, problem, self.machine)
            self._team = opened.enter_context(  # workers have devices of their own
                assemble(problem, make, self.team, cheap=self.evaluate == SIMULATE)
            )
            return self._team.evaluator
        if self.evaluate == SIMULATE:
            return SimulatedEvaluator(problem)
        if self.runner is not None:
            return MeasuredEvaluator(problem, self.runner)
        assert self.machine is not None
        runner = opened.enter_context(_open(problem, self.machine))
        evaluator = MeasuredEvaluator(problem, runner)
        with contextlib.suppress(Stopped):  # then nothing is measured
            evaluator.patiently(runner.start, self.stop)
        return evaluator

    def _placers(
        self,
        evaluator: Evaluator,
        limits: Budget,
        *,
        problem: Problem | None = None,
        noise: float | None = None,
        previous: Mapping[str, Placer] | None = None,
    ) -> list[Placer]:
        """For the problem, or the same under other costs. `noise` is what is known of it, where
        that is more than the evaluator says; `previous` are the placers to go on from."""
        config = self.config
        chosen = config.chosen
        if self._team is not None or (self.directory and registry.has_learned(self.directory)):
            # What one process can compute in this time says nothing of many, nor of a run that
            # goes on.
            chosen = registry.Chosen(chosen.names)
        placers = registry.make(
            chosen, problem or self.problem, seed=config.seed, seconds=limits.seconds,
            trials=limits.trials, learners=config.learner, policy=config.policy,
            cheap=evaluator.cheap, noise=evaluator.noise if noise is None else noise,
            previous=previous, beside_runs=self.evaluate != SIMULATE,
        )  # fmt: skip
        return placers if self._team is None else self._team.distributed(placers)

    # --- the two kinds of search -----------------------------------------------------------------

    def _simulated(self, evaluator: Evaluator) -> Result:
        return SimulatedSearch(
            problem=self.problem,
            config=self.config,
            evaluator=evaluator,
            make_placers=functools.partial(self._placers, evaluator),
            alone=self._team is None and self.pool is None,
            exact=self.pool is None,
            directory=self.directory,
            observe=self.observe,
            stop=self.stop,
        ).run()

    def _measured(self, evaluator: Evaluator) -> Result:
        """Real runs, between the references and the final. The budget is for all of it."""
        with contextlib.ExitStack() as opened:
            real = RealRuns(
                self.problem, evaluator, self.config, observe=self.observe, stop=self.stop,
                journal=opened.enter_context(self._journal()),
            )  # fmt: skip
            real.find_references()
            rounds = None
            if self.evaluate == BOTH or self.config.first_seconds:
                metrics = None
                # Those of a search before the first real run are of other times.
                if self.directory is not None and self.evaluate == BOTH:
                    metrics = opened.enter_context(contextlib.closing(MetricsLog(self.directory)))
                rounds = Rounds(
                    real=real, config=self.config, directory=self.directory, metrics=metrics,
                    runner=evaluator.runner if isinstance(evaluator, MeasuredEvaluator) else None,
                    calibration=self.calibration,
                )  # fmt: skip
                rounds.prepare()
            real.measure(real.unmeasured_references())
            had_room = real.has_room_to_search
            if rounds is not None and self.evaluate == BOTH:
                rounds.run()
            else:
                real.repeat_references()
                self._search_real(real, rounds)
            real.final()
            if rounds is not None and real.finals.means:
                # Those are the times that count: what is drawn of the answer should agree with
                # them.
                rounds.correct()
            found = None if rounds is None else rounds.found()
            result = real.result(self.evaluate, found)
            if had_room or real.stop() or not real.only_references(self.config.chosen.names):
                return result
            return replace(result, remarks=(NOTHING_SEARCHED,))

    def _search_real(self, real: RealRuns, rounds: Rounds | None) -> None:
        problem, previous = self.problem, None
        if rounds is not None:
            problem, previous = self._searched_first(rounds)
        limits = real.before_the_final()
        if limits is None or real.stop():  # making the placers alone takes seconds
            return
        placers = self._placers(
            real.evaluator, limits, problem=problem, noise=real.noise, previous=previous
        )
        found = search(
            placers, real.evaluator, limits, journal=real, seed=real.seed, observe=self.observe,
            stop=real.stop, directory=self.directory,
        )  # fmt: skip
        real.credit(found)
        real.favourites = [p for placer in placers for p in placer.notes.favourites]

    def _searched_first(self, rounds: Rounds) -> tuple[Problem, Mapping[str, Placer] | None]:
        """The problem under calibrated costs, and the placers of a search in the simulator. A run
        that goes on has had that search where there is a checkpoint."""
        if self.directory is not None and registry.has_learned(self.directory):
            assert rounds.calibration is not None
            return rounds.calibration.problem(self.problem), None
        return rounds.first(self.config.first_seconds), rounds.placers


# --- what is asked for, before a model is read ---------------------------------------------------


def wanted_in(config: SearchConfig, directory: str | Path | None) -> How | None:
    """How placements are to be tried: as the config says, or as the run in the directory began; its
    journal's times are of one kind. None where neither says."""
    wanted = config.evaluate
    if directory is None or not any(
        (Path(directory) / name).is_file() for name in (RUN_FILE, JOURNAL_FILE)
    ):
        return wanted
    began = began_with(directory)
    if wanted is not None and began not in (None, wanted):
        raise SearchError(f"{directory}: began with {began}; it cannot go on with {wanted}")
    if wanted is None and began is None:
        raise SearchError(f"{directory}: does not say how it began ({RUN_FILE}); give evaluate")
    return wanted or began


def needs_program(
    source: object,
    cluster: Cluster,
    config: SearchConfig,
    *,
    run: RunConfig | None = None,
    team: TeamConfig | None = None,
    directory: str | Path | None = None,
    backend: str | None = None,
) -> bool:
    """Whether a model has to be read so that it can be run, and not only placed. `backend` is as in
    `backends.load`.

    Raises where real runs are asked for on a cluster that is not at hand: reading takes a while.
    """
    wanted = wanted_in(config, directory)
    if wanted is not None:
        if wanted != SIMULATE:
            backends.check_here(source, cluster, run, backend)
        return wanted != SIMULATE
    if config.limits.seconds is None or team is not None or cluster.num_devices < 2:
        return False
    return not backends.why_not_run(source, cluster, run, backend)


def unaffordable(problem: Problem, budget: Budget) -> str:
    """Why real runs, which nobody asked for, would take too long or too much memory; empty when
    they would not."""
    singles = [everything_on(problem, device) for device in range(problem.num_devices)]
    measurements = SimulatedEvaluator(problem).evaluate(singles)
    fastest = min(measurement.mean_seconds for measurement in measurements)
    largest = max(sum(measurement.peak_bytes) for measurement in measurements)
    if not enough_for(budget, fastest, RunConfig.steps):
        return "the budget gives no time to measure ten placements of this model"
    # Every device keeps the variables of the placements before.
    if problem.num_devices * largest > Cluster.load("local").devices[0].memory_bytes / 2:
        return "the model may not fit this machine's memory"
    return ""


def enough_for(budget: Budget, step_seconds: float, steps: int) -> bool:
    """Whether a budget is worth measuring with: time for ten placements, at the simulated speed.

    A budget of trials alone says nothing about time: thousands of them take seconds in the
    simulator and hours on real devices.
    """
    if budget.seconds is None:
        return False
    return 10 * (1.0 + steps * step_seconds) <= budget.seconds


def _open(problem: Problem, machine: Machine) -> Runner:
    return backends.runner(machine.program, problem.cluster, machine.config, feeds=machine.feeds)


def _measuring(problem: Problem, machine: Machine) -> Evaluator:
    """In a worker's process: a runner that lives as long as the worker does."""
    runner = _open(problem, machine)
    runner.start()
    return MeasuredEvaluator(problem, runner)


# --- the call ------------------------------------------------------------------------------------

_OF_SEARCH = frozenset(entry.name for entry in fields(SearchConfig))
_OF_PROBLEM = frozenset(entry.name for entry in fields(ProblemConfig))
_OF_TEAM = frozenset(entry.name for entry in fields(TeamConfig))
_OF_MODEL = frozenset(entry.name for entry in fields(LoadOptions))


def place(
    model: object,
    cluster: Cluster | str = "local",
    config: SearchConfig | None = None,
    *,
    problem: ProblemConfig | None = None,
    directory: str | Path | None = None,
    run: RunConfig | None = None,
    feeds: Mapping[str, Array] | None = None,
    team: TeamConfig | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
    **settings: Any,
) -> Result:
    """Searches for a fast placement of a model on a cluster.

        place("inception_v3", "k80x4", budget="5m")
        place(model, "local", evaluate="simulate+measure", budget=600, workers=2)

    Args:
        model: what to place, or what `load` takes; or a whole `Problem` (`make_problem` makes one
            with a grouping and costs of your own), which brings its cluster and constraints.
        cluster: a `Cluster`, the name of a preset, or a file.
        config: what searches, how long, and how placements are tried.
        problem: how groups are made, what is pinned or forbidden, measured costs.
        directory: where to record every trial and save the result. A directory that holds a run of
            the same problem is continued; one of another problem is refused.
        run: settings of real runs.
        feeds: inputs of real runs by name; made up when not given.
        team: how many processes to search with, on Ray; by default this one alone.
        observe: called with the progress after every batch.
        settings: fields of `SearchConfig` (`method`, `budget`, `trials`, `seed`, `evaluate`,
            `learner`, `policy`, ...), `ProblemConfig` (`pins`, `groups`, `costs`, ...) or
            `TeamConfig` (`workers`, `controllers`, ...), which go before those in `config`,
            `problem` and `team`; or of `LoadOptions` (`scale`, `batch`, `dims`, ...).
    """
    known = _OF_SEARCH | _OF_PROBLEM | _OF_TEAM | _OF_MODEL
    check_settings(place, settings, known)
    of_search = {name: value for name, value in settings.items() if name in _OF_SEARCH}
    of_team = {name: value for name, value in settings.items() if name in _OF_TEAM}
    config = replace(config or SearchConfig(), **of_search)
    of_problem = {name: value for name, value in settings.items() if name in _OF_PROBLEM}
    of_model = {name: value for name, value in settings.items() if name in _OF_MODEL}
    if of_team:
        team = replace(team or TeamConfig(), **of_team)
    machine = None
    if isinstance(model, Problem):
        if problem is not None or of_problem or of_model:
            raise SearchError("a whole Problem has its groups and constraints already")
        posed = model
    else:
        cluster = Cluster.load(cluster) if isinstance(cluster, str) else cluster
        program: Program | None = None
        if needs_program(model, cluster, config, run=run, team=team, directory=directory):
            program = backends.load_program(model, **of_model)
            machine = Machine(program, run, feeds)
        graph = backends.load(model, **of_model) if program is None else program.graph
        problem = replace(problem or ProblemConfig(), **of_problem)
        posed = make_problem(graph, cluster, problem)
    if feeds is not None and machine is None:
        raise SearchError("`feeds` mean nothing in the simulator")
    session = Session(
        posed, config, machine=machine, team=team, directory=directory, observe=observe
    )
    if directory is None:
        return session.run()
    with writing(directory):  # until all is written
        result = session.run()
        result.save(directory)
    return result
