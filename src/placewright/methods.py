"""Every method of finding a placement, learned or not, by name. A new one is a file and a line
here."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from placewright.errors import LearningError, MissingExtraError, SearchError
from placewright.learning.config import (
    PRESETS,
    LearnerConfig,
    ResolvedConfig,
    resolved,
    update_seconds,
)
from placewright.placement import Placement
from placewright.placers.base import OneShot, Placer
from placewright.placers.exact import Exact, ExactConfig
from placewright.placers.expert import expert
from placewright.placers.heft import heft
from placewright.placers.local_search import MEASURED, LocalSearch
from placewright.placers.m_etf import m_etf
from placewright.placers.m_sct import m_sct
from placewright.placers.m_topo import m_topo
from placewright.placers.memory import Repairing
from placewright.placers.mincut import mincut
from placewright.placers.random_placement import RandomPlacement
from placewright.placers.scotch import scotch
from placewright.placers.single_device import single_device
from placewright.problem import Problem
from placewright.room import policy_bytes, why_no_room

logger = logging.getLogger(__name__)


Learners = LearnerConfig | Mapping[str, LearnerConfig] | None
"""How the learned methods learn: one config, or one by name, or as their presets have it."""


@dataclass(frozen=True)
class Method:
    """How to make a placer, and one line on what it does."""

    summary: str
    make: Callable[[Settings], Placer]
    needs: tuple[str, ...] = ()
    """The optional packages it cannot do without."""
    extra: str = "placers"
    """The extra that installs them."""

    @property
    def is_installed(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in self.needs)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a placer is made from."""

    name: str
    problem: Problem
    seed: int = 0
    seconds: float | None = None
    """How long the whole search may take; a method that cannot be stopped keeps to a part of it."""
    trials: int | None = None
    """How many placements the whole search may try; likewise."""
    learner: LearnerConfig | None = None
    """How it learns, where it does and somebody says so; otherwise as its preset has it."""
    cheap: bool = True
    """Whether trying a placement costs milliseconds: methods then try more and think less."""
    noise: float = 0.0
    """How much times of the same placement differ (`Evaluator.noise`)."""
    beside_runs: bool = False
    """Whether the search makes real runs on this machine: what computes keeps off the GPUs."""
    unasked: bool = False
    """Whether it is `auto` alone that brought this method, which may then leave its part of the
    time to others where that is too short for it."""
    policy: str | Path | None = None
    """File of a trained policy that the learned methods go on from."""
    previous: Placer | None = None
    """The placer of this name under other costs."""
    later: tuple[Placer, ...] = ()
    """The placers that come after this one in the search."""


def _one_shot(function: Callable[[Problem], Sequence[Placement]]) -> Callable[[Settings], Placer]:
    """Computed placements that run out of memory are repaired as far as possible."""
    return lambda settings: Repairing(OneShot(settings.name, settings.problem, function))


def _single(settings: Settings) -> Placer:
    # Not repaired: a single device that is repaired is none any more.
    return OneShot(settings.name, settings.problem, single_device)


def _exact(settings: Settings) -> Placer:
    # In a search of several methods it must leave some of the budget to the others. A thousand
    # placements of a problem small enough to try them all take well under a second.
    most = ExactConfig.max_placements
    if settings.seconds is not None:
        most = min(most, int(1000 * settings.seconds))
    if settings.trials is not None:
        most = min(most, settings.trials // 2)
    # With trials alone its own measure of work is the limit, the same on a busy machine; the
    # clock is only for when that fails.
    seconds = 600.0 if settings.seconds is None else settings.seconds / 3
    config = ExactConfig(max_placements=most, max_seconds=seconds)
    return Repairing(Exact(settings.problem, config, seed=settings.seed))


def _local_search(settings: Settings) -> Placer:
    config = None if settings.cheap else replace(MEASURED, noise=settings.noise)
    return LocalSearch(settings.problem, config, seed=settings.seed)


LEARNING = ("torch", "safetensors")
"""What the learned methods need."""

TEACHERS = ("single", "expert", "scotch", "mincut", "heft", "m-topo", "m-etf")
"""Whose placements a learned method imitates first where no other method ran before it. Those that
take seconds are not among them."""


LEAST_UPDATES = 30
"""How many updates a policy must be able to compute in its part of the time to take part in `auto`.
Where it takes longer, a local search makes more of that time; chosen with `benchmarks.placers`."""

LEAST_REAL_UPDATES = 5
"""The same with real runs, of which there are few."""

_SHARE_BESIDE_LOCAL_SEARCH = 0.5
"""Of the budget, for a learner that polishes with the local search after it, which has 1; chosen
with `benchmarks.placers`."""


def _learned(settings: Settings) -> Placer:
    check_learning(f"method {settings.name!r}")
    # Only here: importing torch takes seconds, and no other method needs it.
    from placewright.learning.learner import Learner
    from placewright.learning.policy import Policy

    preset = PRESETS[settings.name]
    asked = settings.learner or preset
    if settings.policy is not None and asked.policy != preset.policy:
        raise LearningError(
            "learner.policy describes a new policy, but policy brings a trained one"
        )
    config = resolved(
        asked,
        cheap=settings.cheap,
        noise=settings.noise,
        by_time=settings.trials is None,
        trained=settings.policy is not None,
    )
    # With exact times it polishes with the local search that comes after it, which then goes on
    # where this one ended. Two that know nothing of each other would both begin at the beginning.
    polisher = None
    if config.polish and not config.noise:
        polisher = next((p for p in settings.later if isinstance(p, LocalSearch)), None)
    why_not = why_no_room(
        policy_bytes(
            groups=settings.problem.num_groups,
            samples=config.samples,
            hidden=config.policy.hidden,
        )
    ) or _why_too_short(settings, config)
    if why_not:
        declined = OneShot(settings.name, settings.problem, lambda problem: ())
        declined.notes.why_not = why_not
        return declined
    previous = settings.previous
    space = settings.problem.space.fingerprint
    if not isinstance(previous, Learner) or previous.problem.space.fingerprint != space:
        previous = None
    learner = Learner(
        settings.problem,
        config,
        name=settings.name,
        seed=previous.seed if previous else settings.seed,
        policy=None if settings.policy is None or previous else Policy.load(settings.policy),
        teachers=() if previous else teachers(settings.problem, seed=settings.seed),
        updater=previous.updater if previous else None,
        polisher=polisher,
        on_gpu=not settings.beside_runs,
    )
    if previous is not None:
        learner.go_on_from(previous)
    if polisher is not None:
        learner.share = _SHARE_BESIDE_LOCAL_SEARCH
    return learner


def _why_too_short(settings: Settings, config: ResolvedConfig) -> str:
    """Why a learner that nobody asked for by name has too little time to learn; empty if not so.

    Only the problem's size and the budget count, so that the same command does the same everywhere.
    """
    # Trials that are noisy are too few for a local search to make more of the time, and whoever
    # says how to learn wants that. With real runs a few updates are worth it.
    by_time = settings.trials is None and (not settings.cheap or not settings.noise)
    updates = LEAST_UPDATES if settings.cheap else LEAST_REAL_UPDATES
    told_how = settings.learner is not None or settings.policy is not None
    if not settings.unasked or told_how or not by_time or settings.seconds is None:
        return ""
    if not settings.problem.has_choice:
        return ""
    part_of_budget = _SHARE_BESIDE_LOCAL_SEARCH / (_SHARE_BESIDE_LOCAL_SEARCH + LocalSearch.share)
    part = settings.seconds * part_of_budget
    needs = update_seconds(config, settings.problem.num_groups, updates)
    if part >= needs:
        return ""
    return (
        f"left out: {updates} updates of a policy for {settings.problem.num_groups} groups "
        f"are taken to need {needs:.2g} s, its part would be {part:.2g} s; auto has it from "
        f"{math.ceil(needs / part_of_budget)} s on"
    )


def has_learned(directory: str | Path) -> bool:
    """Whether a learned method has left a checkpoint there."""
    return any(Path(directory).glob("checkpoint-*"))


def check_learner(names: Sequence[str], learners: Learners, policy: str | Path | None) -> None:
    """Raises for what is said of learned methods where none of these is one: before a model is
    read, which takes a while."""
    if learners is None and policy is None:
        return
    given = "policy" if learners is None else "learner"
    check_learning(given)  # without its packages `auto` has left out those it would be for
    if not any(name in PRESETS for name in names):
        raise SearchError(f"{given} is for {' and '.join(PRESETS)}, and not for {', '.join(names)}")
    if isinstance(learners, LearnerConfig) and all(name in names for name in PRESETS):
        raise SearchError(
            f"one learner config for {' and '.join(PRESETS)}; give one for each, by name"
        )


def check_learning(what: str) -> None:
    """Raises, with the install command, when the packages of the learned methods are missing."""
    if any(importlib.util.find_spec(name) is None for name in LEARNING):
        raise MissingExtraError(what, "learning")


def teachers(problem: Problem, *, seed: int = 0) -> list[Placer]:
    """Placers whose placements are worth imitating."""
    return make(installed(TEACHERS)[0], problem, seed=seed)


METHODS: dict[str, Method] = {
    "single": Method(
        "everything on one device, each in turn; what cannot run there goes to the CPU",
        _single,
    ),
    "expert": Method(
        "by hand: a recurrent layer per device, otherwise contiguous parts",
        _one_shot(expert),
    ),
    "scotch": Method(
        "Scotch's static mapping: op costs, tensor sizes, device and link capacities",
        _one_shot(scotch),
        needs=("pyscotch",),
    ),
    "mincut": Method(
        "METIS: fewest bytes between balanced parts, CPU left out",
        _one_shot(mincut),
        needs=("pymetis",),
    ),
    "heft": Method("heterogeneous earliest finish time (Topcuoglu 2002)", _one_shot(heft)),
    "m-topo": Method("fills devices in topological order up to equal memory", _one_shot(m_topo)),
    "m-etf": Method("memory-constrained earliest task first (Baechi)", _one_shot(m_etf)),
    "m-sct": Method(
        "memory-constrained small communication times (Baechi), its linear program by HiGHS",
        _one_shot(m_sct),
        needs=("scipy",),
    ),
    "random": Method(
        "uniformly random, until the budget is used",
        lambda settings: RandomPlacement(settings.problem, seed=settings.seed),
    ),
    "exact": Method(
        "enumeration or CP-SAT with a proven bound; small problems only",
        _exact,
        needs=("ortools",),
    ),
    "local-search": Method(
        "simulated annealing from the best found so far and from scratch, until the budget is used",
        _local_search,
    ),
    "reinforce": Method(
        "the paper's: sequence-to-sequence policy, REINFORCE (Mirhoseini 2017)",
        _learned,
        needs=LEARNING,
        extra="learning",
    ),
    "ppo": Method(
        "the same idea with PPO, imitation of the best, and local search around it",
        _learned,
        needs=LEARNING,
        extra="learning",
    ),
}

AUTO = (
    "single", "expert", "scotch", "mincut", "heft", "m-topo", "m-etf", "m-sct", "exact",
    "ppo", "local-search",
)  # fmt: skip
AUTO_SUMMARY = (
    "every method but random and reinforce, each told what the ones before it found; ppo where "
    "there is time to learn"
)


@dataclass(frozen=True)
class Chosen:
    """The methods of a search, in order."""

    names: tuple[str, ...]
    unasked: frozenset[str] = frozenset()
    """Those that are there because of `auto` alone."""


def parse(text: str) -> Chosen:
    """The methods that `auto` or a list of names separated by commas stands for."""
    names: list[str] = []
    asked: set[str] = set()
    for name in text.split(","):
        name = name.strip()
        if name == "auto":
            found, missing = installed(AUTO)
            names += found
            if missing:
                extras = sorted({METHODS[name].extra for name in missing})
                logger.warning(
                    "auto leaves out %s: run pip install 'placewright[%s]'",
                    ", ".join(missing),
                    ",".join(extras),
                )
        elif name in METHODS:
            names.append(name)
            asked.add(name)
        else:
            known = ("auto", *METHODS)
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise SearchError(f"unknown method {name!r}; {hint}")
    # `auto,scotch` names scotch twice; once is enough, and asked for it is.
    return Chosen(tuple(dict.fromkeys(names)), frozenset(names) - asked)


def installed(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those whose optional package is there, and the others."""
    there = {name: METHODS[name].is_installed for name in names}
    return [n for n in names if there[n]], [n for n in names if not there[n]]


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:  # what all the libraries take
        raise SearchError(f"the seed must be from 0 to {2**31 - 1}, not {seed}")


def make(
    methods: Chosen | Sequence[str],
    problem: Problem,
    *,
    learners: Learners = None,
    previous: Mapping[str, Placer] | None = None,
    **others: Any,
) -> list[Placer]:
    """The placers of these methods, in order; those that are only named are all asked for.

    `learners` says how the learned methods learn: one config for the learned method among them, or
    one by name. Where costs were corrected,
    `previous` are the placers under the old ones: a policy goes on with what it has learned, as
    long as graph, grouping and devices are the same; everything else is made anew. `others` are
    fields of `Settings`, the same for all: `seed`, `seconds`, `trials`, `policy`, `cheap`, ...
    """
    settings = Settings(name="", problem=problem, **others)
    check_seed(settings.seed)
    chosen = methods if isinstance(methods, Chosen) else Chosen(tuple(methods))
    placers: tuple[Placer, ...] = ()
    # From the last to the first, as a learner polishes with a local search that comes after it.
    for name in reversed(chosen.names):
        made = METHODS[name].make(
            replace(
                settings,
                name=name,
                learner=learners.get(name) if isinstance(learners, Mapping) else learners,
                unasked=name in chosen.unasked,
                previous=(previous or {}).get(name),
                later=placers,
            )
        )
        placers = (made, *placers)
    return list(placers)
