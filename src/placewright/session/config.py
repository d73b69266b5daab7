"""The settings of a search, and what real runs are made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from placewright import methods as registry
from placewright.backends.base import Array, Program, RunConfig
from placewright.budget import Budget
from placewright.errors import SearchError
from placewright.units import parse_duration

How = Literal["simulate", "measure", "simulate+measure"]
"""How the placements of a run are tried; the times in its journal are of one kind."""

SIMULATE: How = "simulate"
MEASURE: How = "measure"
BOTH: How = "simulate+measure"

DEFAULT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """How the budget of a search with real runs is spent."""

    finalists: int = 3
    """The best placements, which are measured again at the end, with the references in between."""
    final_rounds: int = 4
    """How often; what is left to chance is judged by how much the rounds differ."""
    simulate_share: float = 0.25
    """Of the time, for one search in the simulator between real runs."""
    simulate_seconds: float = 15.0
    """Most time for one search in the simulator."""
    candidates: int = 4
    """Placements measured between two searches."""
    distance: float = 0.02
    """Share of the groups by which candidates of one round differ at least; otherwise they would
    all be variations of one."""
    traces: int = 3
    """Traced steps for the costs of ops."""
    links_share: float = 0.1
    """Links are timed where that takes no more than this share of the time left. The fit of step
    times corrects links as well, all by the same factor; a search that is short does better to
    measure a few candidates more."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What searches, how long, and how placements are tried."""

    method: str = "auto"
    """`auto` (baselines, then improve on the best), or names of methods separated by commas."""
    budget: float | str | None = None
    """How long to search: seconds, or a text such as `90s`, `5m` or `1h`; a minute when neither
    this nor `trials` is given."""
    trials: int | None = None
    """How many placements to try at most."""
    seed: int = 0
    """The same seed and number of trials give the same simulated result."""
    evaluate: How | None = None
    """`simulate`, `measure` (every trial is a real run) or `simulate+measure` (search in the
    simulator, run the best). None: as the run in the directory began; otherwise the last where the
    cluster is this machine and the time is worth it, and the first elsewhere."""
    learner: registry.Learners = None
    """How the learned method learns, such as `LearnerConfig(samples=32)`; one for each, by name,
    where there are several."""
    policy: str | Path | None = None
    """File of a trained policy (`placewright train`) that the learned methods go on from."""
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    """How a search with real runs spends its budget."""

    def __post_init__(self) -> None:
        if self.evaluate is not None and self.evaluate not in get_args(How):
            raise SearchError(
                f"evaluate={self.evaluate!r}: expected {SIMULATE}, {MEASURE} or {BOTH}"
            )
        registry.check_learner(self.chosen.names, self.learner, self.policy)
        _ = self.limits  # raises where it leaves nothing to do

    @cached_property  # it warns of methods that are not installed, once
    def chosen(self) -> registry.Chosen:
        """The methods, in order."""
        return registry.parse(self.method)

    @cached_property
    def limits(self) -> Budget:
        budget = self.budget
        if budget is None and self.trials is None:
            budget = DEFAULT_SECONDS
        seconds = parse_duration(budget) if isinstance(budget, str) else budget
        return Budget(seconds=seconds, trials=self.trials)


class Machine(NamedTuple):
    """What real runs are made with: a program, and how it is run. Runners, here or in workers, are
    made from it."""

    program: Program
    config: RunConfig | None = None
    """None: as its backend has it."""
    feeds: Mapping[str, Array] | None = None
    """The inputs by name; made up where not given."""
