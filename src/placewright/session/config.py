"""The settings of a search, and what real runs are made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from placewright.backends.base import Array, Program, RunConfig
from placewright.budget import Budget
from placewright.errors import SearchError
from placewright.learning.config import LearnerConfig
from placewright.units import parse_duration

if TYPE_CHECKING:
    from placewright.methods import Chosen

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
    """Placements measured between two searches. Where real runs are short, up to four times as
    many: as run in the time that was simulated."""
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
    """'auto' (baselines, then improve on the best) or names from 'placewright methods'. Several are
    separated by commas."""
    budget: float | str | None = None
    """How long to search: 90s, 5m, 1h. Seconds, or such a text; a minute when neither this nor
    `trials` is given."""
    trials: int | None = None
    """How many placements to try. At most, where there is a `budget` as well."""
    seed: int = 0
    """The same seed gives the same simulated result. With the same number of trials, that is."""
    evaluate: How | None = None
    """'simulate', 'measure' (every trial is a real run) or 'simulate+measure' (search in the
    simulator, run the best); the latter where the cluster is this machine. None: as the run in the
    directory began; otherwise the last where the time is worth it, and the first elsewhere."""
    learner: LearnerConfig | Mapping[str, LearnerConfig] | None = None
    """How the learned method learns, such as `LearnerConfig(samples=32)`; one for each, by name,
    where there are several."""
    simulate_first: float | str | None = None
    """With evaluate='measure': how long to search in the simulator first, calibrated by runs of
    single devices. Learned methods go on from there with real runs, and the best of what was found
    is measured first. Part of the budget: 20s, 1m."""
    policy: str | Path | None = None
    """A trained policy that the learned methods go on from. The file that `placewright train`
    left."""
    op_level: bool | None = None
    """Also place every op for itself, in the simulator. By default `auto` does, and named methods
    keep to their groups."""
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    """How a search with real runs spends its budget."""

    def __post_init__(self) -> None:
        if self.evaluate is not None and self.evaluate not in get_args(How):
            raise SearchError(
                f"evaluate={self.evaluate!r}: expected {SIMULATE}, {MEASURE} or {BOTH}"
            )
        if self.simulate_first is not None and self.evaluate != MEASURE:
            raise SearchError(f"`simulate_first` is for evaluate={MEASURE!r}")
        if self.simulate_first is not None and not self.first_seconds > 0:
            raise SearchError(f"simulate_first={self.simulate_first!r} leaves no time to simulate")
        from placewright import methods as registry  # with every placer; settings alone are light

        registry.check_learner(self.chosen.names, self.learner, self.policy)
        _ = self.limits  # raises where it leaves nothing to do

    @cached_property  # it warns of methods that are not installed, once
    def chosen(self) -> Chosen:
        """The methods, in order."""
        from placewright.methods import parse

        return parse(self.method)

    @property
    def places_ops(self) -> bool:
        """Whether ops are placed one by one as well, where that is anything else."""
        if self.op_level is not None:
            return self.op_level
        return "auto" in (name.strip() for name in self.method.split(","))

    @property
    def first_seconds(self) -> float:
        """Of the search in the simulator before the first real run; 0 for none."""
        first = self.simulate_first
        return parse_duration(first) if isinstance(first, str) else float(first or 0.0)

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
