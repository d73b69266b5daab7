"""Every method of finding a placement, learned or not, by name. A new one is a file and a line
here."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from placewright.errors import LearningError, MissingExtraError, SearchError
from placewright.placement import Placement
from placewright.placers.base import OneShot, Placer
from placewright.placers.exact import Exact, ExactConfig
from placewright.placers.expert import expert
from placewright.placers.heft import heft
from placewright.placers.local_search import LocalSearch
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
    seed: int
    seconds: float | None
    """How long the whole search may take; a method that cannot be stopped keeps to a part of it."""
    trials: int | None
    """How many placements the whole search may try; likewise."""
    learner: tuple[str, ...] = ()
    """Settings of the learned methods, `name=value` each (`learning.config.LearnerConfig`)."""
    cheap: bool = True
    """Whether trying a placement costs milliseconds: methods then try more and think less."""
    noise: float = 0.0
    """How much times of the same placement differ (`Evaluator.noise`)."""
    unasked: bool = False
    """Whether it is `auto` alone that brought this method (`ByAuto`)."""
    policy: str | Path | None = None
    """File of a trained policy that the learned methods go on from."""


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
    seconds = 60.0 if settings.seconds is None else settings.seconds / 3
    config = ExactConfig(max_placements=most, max_seconds=seconds)
    return Repairing(Exact(settings.problem, config, seed=settings.seed))


LEARNING = ("torch", "safetensors")
"""What the learned methods need."""

TEACHERS = ("single", "expert", "scotch", "mincut", "heft", "m-topo", "m-etf")
"""Whose placements a learned method imitates first where no other method ran before it. Those that
take seconds are not among them."""


POLISH_BY_TIME = 1500
"""What `polish` is where time counts and not trials: an update takes about as long as it takes to
simulate so many placements of a model with a few thousand ops."""


NOISY_SAMPLES, NOISY_POLISH = 4, 12
"""What `samples` and `polish` are where times are noisy. What is found by estimates is as good as
the estimates are, so few placements are tried until there are better ones."""


LEAST_UPDATES = 30
"""How many updates a policy must be able to compute in its part of the time to take part in `auto`.
Where it takes longer, a local search makes more of that time; chosen with `benchmarks.placers`."""


class ByAuto(str):
    """A method's name that `auto` stands for: nobody asked for this very method, so that it may
    leave its part of the time to others where that is too short for it. `str` of it is as if
    somebody had asked."""


def _learned(settings: Settings) -> Placer:
    check_learning(f"method {settings.name!r}")
    # Only here: importing torch takes seconds, and no other method needs it.
    from placewright.learning.config import PRESETS, configured, parsed
    from placewright.learning.learner import Learner
    from placewright.learning.policy import Policy

    preset = PRESETS[settings.name]
    if settings.noise and preset.elites:  # not the published method, which takes times as they are
        preset = replace(preset, noise=settings.noise)
    said, _ = parsed(settings.learner)
    if all(said.get(name, getattr(preset, name)) for name in ("noise", "polish", "elites")):
        preset = replace(preset, samples=NOISY_SAMPLES, polish=NOISY_POLISH)
    elif not settings.cheap:
        preset = replace(preset, polish=0)
    elif preset.polish and settings.trials is None:
        preset = replace(preset, polish=POLISH_BY_TIME)
    if settings.policy is not None:
        # It was trained already; its best guess comes first, and imitating others could only spoil
        # it. Who wants that can say so.
        preset = replace(preset, warm_start=0)
        if any(setting.strip().startswith("policy.") for setting in settings.learner):
            raise LearningError("--learner policy.* describes a new policy; --policy brings one")
    config = configured(preset, settings.learner)
    reason = why_no_room(
        policy_bytes(
            groups=settings.problem.num_groups,
            samples=config.samples,
            hidden=config.policy.hidden,
        )
    )
    if reason:
        return _declined(settings, reason)
    learner = Learner(
        settings.problem,
        config,
        name=settings.name,
        seed=settings.seed,
        policy=None if settings.policy is None else Policy.load(settings.policy),
        teachers=teachers(settings.problem, seed=settings.seed),
    )
    # Trials that take seconds or are noisy are too few for a local search to make more of the time.
    by_time = settings.cheap and not settings.noise and settings.trials is None
    # Whoever says how to learn wants that.
    unasked = settings.unasked and not settings.learner and not settings.policy
    if by_time and unasked and settings.seconds is not None and learner.has_choice:
        needs = learner.seconds_for(LEAST_UPDATES)
        part = settings.seconds * learner.part_beside_local_search
        if part < needs:
            budget = math.ceil(needs / learner.part_beside_local_search)
            return _declined(
                settings,
                f"left out: {LEAST_UPDATES} updates of its policy alone need some {needs:.2g} s "
                f"here, its part would be {part:.2g} s; auto has it from some {budget} s on",
            )
    return learner


def _declined(settings: Settings, reason: str) -> Placer:
    """A method that says why it proposes nothing."""
    declined = OneShot(settings.name, settings.problem, lambda problem: ())
    declined.why_not = reason
    return declined


def has_learned(directory: str | Path) -> bool:
    """Whether a learned method has left a checkpoint there."""
    return any(Path(directory).glob("checkpoint-*"))


def check_learner(names: Sequence[str], learner: Sequence[str], policy: str | Path | None) -> None:
    """Raises for what is said of learned methods where none of these is one, and for settings that
    do not exist: before a model is read, which takes a while."""
    if not learner and policy is None:
        return
    given = "--learner" if learner else "--policy"
    check_learning(given)  # without its packages `auto` has left out those it would be for
    learned = [name for name, method in METHODS.items() if method.make is _learned]
    if not any(name in learned for name in names):
        raise SearchError(f"{given} is for {' and '.join(learned)}, and not for {', '.join(names)}")
    from placewright.learning.config import parsed

    parsed(learner)


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
        "by hand: a recurrent layer per device, otherwise contiguous parts of equal size",
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
        lambda settings: LocalSearch(settings.problem, seed=settings.seed),
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


def parse(text: str) -> tuple[str, ...]:
    """The methods that `auto` or a list of names separated by commas stands for. Those that are
    there because of `auto` alone are `ByAuto`."""
    names: list[str] = []
    for name in text.split(","):
        name = name.strip()
        if name == "auto":
            found, missing = installed(AUTO)
            names += map(ByAuto, found)
            if missing:
                extras = sorted({METHODS[name].extra for name in missing})
                logger.warning(
                    "auto leaves out %s: run pip install 'placewright[%s]'",
                    ", ".join(missing),
                    ",".join(extras),
                )
        elif name in METHODS:
            names.append(name)
        else:
            known = ("auto", *METHODS)
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise SearchError(f"unknown method {name!r}; {hint}")
    # `auto,scotch` names scotch twice; once is enough, and asked for it is.
    asked = {name: name for name in names if not isinstance(name, ByAuto)}
    return tuple(asked.get(name, name) for name in dict.fromkeys(names))


def installed(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those whose optional package is there, and the others."""
    there = {name: METHODS[name].is_installed for name in names}
    return [n for n in names if there[n]], [n for n in names if not there[n]]


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:  # what all the libraries take
        raise SearchError(f"the seed must be from 0 to {2**31 - 1}, not {seed}")


def make(
    names: Sequence[str],
    problem: Problem,
    *,
    seed: int = 0,
    seconds: float | None = None,
    trials: int | None = None,
    learner: Sequence[str] = (),
    policy: str | Path | None = None,
    cheap: bool = True,
    noise: float = 0.0,
) -> list[Placer]:
    """The placers of these names, in order."""
    check_seed(seed)
    settings = Settings(
        name="", problem=problem, seed=seed, seconds=seconds, trials=trials,
        learner=tuple(learner), policy=policy, cheap=cheap, noise=noise,
    )  # fmt: skip
    return [
        METHODS[name].make(replace(settings, name=str(name), unasked=isinstance(name, ByAuto)))
        for name in names
    ]
