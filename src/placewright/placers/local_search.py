"""Simulated annealing with a few chains, from the best placements known and from scratch.

Every chain holds one placement and proposes changes to it: one group to another device, a run of
time steps, a whole layer, two devices' contents exchanged, ... (`Moves`). A change for the better
is taken; one for the worse is taken with a probability that falls with the chain's temperature.
Kinds of change that succeed are tried more often, and so are the better chains. A change that does
not fit into a device's memory is tried again with other groups moved away from there.

The chains are in two camps that know nothing of each other. One starts from what the placer was
told; the other from points of its own, so that it does not end where other methods already were.
After a season the second joins the first with the best it has, and a new one starts from scratch.

Proposals of one `ask` are made before any of its answers is known, so a chain tries several changes
of the same placement at a time. As most changes are rejected, little is lost by that; those that
each help on their own are then tried together.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from placewright.graph import IndexArray, IntArray
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement, digest
from placewright.placers._moves import Moves
from placewright.placers.base import Again, Placer
from placewright.placers.exact import every_placement
from placewright.problem import Problem


@dataclass(frozen=True, kw_only=True)
class LocalSearchConfig:
    """How `local-search` searches. The defaults were chosen on the benchmark models."""

    chains: int = 8
    """Placements that a camp improves side by side. More of them find more, but later."""
    focus: float = 0.7
    """How often a chain is asked, as a share of how often the next better one is."""
    hot: float = 2e-3
    """Temperature at which a cycle begins, as a share of the step time: a change that makes the
    step longer by this share is taken with probability 1/e."""
    cold: float = 1e-5
    """Temperature at which a cycle ends."""
    cycle: int = 1000
    """Proposals of a chain from hot to cold, the first time."""
    growth: float = 1.5
    """How many times longer each further cycle is, and each further season."""
    elites: int = 16
    """The best placements that a camp keeps, to restart from and to cross with."""
    season: int = 6000
    """Answers that the camp from scratch gets before it joins the other, the first time. 0 for no
    such camp: only what was told is improved."""
    memory: int = 500_000
    """Placements that are remembered, so that none is proposed twice."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a time over trials of the same placement. A change for
    the better that may be no more than that is tried again before it is taken. 0: times are
    exact."""
    most_runs: int = 3
    """With noise: how often a placement is tried until its mean decides."""
    sure: float = 1.0
    """With noise: by how many standard deviations of their difference two means have to differ to
    be taken for different."""


MEASURED = LocalSearchConfig(chains=2, cycle=60, elites=8, season=0)
"""Where a trial takes a second and not a millisecond: a few hundred are too few for many chains,
and for starts from scratch."""


class _Score(NamedTuple):
    """What a placement is worth; less is better. Any that runs is better than any that fails."""

    failure: int
    """0 ran, 1 out of memory, 2 failed otherwise."""
    value: float
    """Step seconds, or bytes that are missing on all devices together."""


class _Known(NamedTuple):
    """A placement that was tried."""

    score: _Score
    devices: IndexArray
    peak_bytes: tuple[int, ...]
    times: tuple[float, ...] = ()
    """Of all its trials that ran; the score has their mean."""


@dataclass(eq=False)
class _Chain:
    now: _Known
    length: int
    """Answers from hot to cold."""
    steps: int = 0
    """Answers of this cycle so far."""
    gains: list[tuple[IndexArray, IndexArray]] = field(default_factory=list)
    """Groups and devices of changes that were for the better, since the last `tell`."""
    waiting: IndexArray | None = None
    """To be proposed before anything is drawn."""
    refused: tuple[IndexArray, IndexArray, list[int]] | None = None
    """Groups and devices of the latest change that did not fit, and where memory ran out."""


@dataclass(eq=False)
class _Camp:
    """Chains that learn from each other."""

    starts: deque[IndexArray]
    """To be tried before chains are started from the best."""
    elites: list[_Known] = field(default_factory=list)
    """The best first, no two of them nearly the same."""
    chains: list[_Chain] = field(default_factory=list)
    ranked: list[_Chain] = field(default_factory=list)
    """The chains, the best first; empty where that may have changed."""
    answers: int = 0


class _Change(NamedTuple):
    """What a chain proposed."""

    chain: _Chain
    parent: _Known
    move: str
    """Kind of change; empty for a combination of several."""


class _Doubt(NamedTuple):
    """A change that looks better, and is tried again."""

    known: _Known
    camp: _Camp
    change: _Change


class _Asked(NamedTuple):
    """Where a proposal came from."""

    camp: _Camp
    change: _Change | None
    """None for a start."""


class LocalSearch(Placer):
    """Parallel simulated annealing. Endless, but for spaces that it has tried out completely."""

    name = "local-search"
    endless = True

    def __init__(
        self, problem: Problem, config: LocalSearchConfig | None = None, *, seed: int = 0
    ) -> None:
        super().__init__(problem)
        self.config = config or LocalSearchConfig()
        self._random = random.Random(seed)
        self._moves = Moves(problem, self._random)
        # On small problems a few chains from a few starts leave more trials to each.
        free = len(self._moves.free)
        self._num_chains = min(self.config.chains, max(2, free // 4))
        self._num_elites = min(self.config.elites, max(4, free))
        shares = (self.config.focus**rank for rank in range(self._num_chains))
        self._focus = list(itertools.accumulate(shares))
        self._home = _Camp(deque())
        self._away: _Camp | None = None
        self._begun = False
        self._season = self.config.season
        self._turn = 0
        # By digest, what was tried, and where it came from as long as it is not answered.
        self._tried: dict[int, _Asked | None] = {}
        # By digest: what was tried again, or is to be, and the changes that wait for it.
        self._doubtful: dict[int, _Doubt] = {}
        self._rest = every_placement(problem)
        devices = problem.cluster.devices
        self._memory = np.array([d.memory_bytes for d in devices], dtype=np.int64)
        self._pinnable = np.array([d.pinnable_bytes for d in devices], dtype=np.int64)
        # Placements that differ in no more groups than this count as nearly the same.
        self._nearly = problem.num_groups // 30

    def ask(self, count: int) -> list[Placement]:
        # More proposals than groups would mostly be blind ones: wait for answers first.
        count = min(count, len(self._moves.free))
        asked: list[Placement] = []
        while len(asked) < count:
            devices = self._next()
            if devices is None:
                break
            asked.append(Placement.of(self.problem, devices))
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        """What it knows already is passed over: a learned method that polished with it told it most
        of what the search tells when its own turn comes."""
        news = False
        for trial in trials:
            devices, measurement = trial.placement.devices, trial.measurement
            name = trial.placement.digest
            asked = self._tried.get(name)
            if name in self._doubtful:
                news |= self._tried_again(trial)
                continue
            if asked is None and (name in self._tried or not self._moves.may_be(devices)):
                continue
            news = True
            self._remember(name, None)
            score = self._score(devices, measurement)
            times = (measurement.mean_seconds,) if measurement.ok else ()
            known = _Known(score, devices, measurement.peak_bytes, times)
            # What others found, or a camp that has joined since, is for the camp at home.
            camp = self._away if asked and asked.camp is self._away else self._home
            camp.answers += 1
            self._keep(camp, known)
            if asked and asked.change:
                if self._is_doubtful(asked.change, known):
                    self._doubtful[name] = _Doubt(known, camp, asked.change)
                else:
                    self._answer(asked.change, known)
        if self.config.noise:
            self._ask_again()
        for camp in self._camps() if news else ():
            camp.ranked = []
            for chain in camp.chains:
                _combine(chain)
                if chain.steps >= chain.length:
                    self._restart(camp, chain)
        if self._away is not None and self._away.answers >= self._season:
            self._join(self._away)

    # --- proposing -------------------------------------------------------------------------------

    def _next(self) -> IndexArray | None:
        """A placement that was not tried; None when all were."""
        if not self._begun:
            self._begin()
        camps = self._camps()
        self._turn += 1
        devices = self._next_of(camps[self._turn % len(camps)])
        return self._next_untried() if devices is None else devices

    def _camps(self) -> list[_Camp]:
        return [self._home] if self._away is None else [self._home, self._away]

    def _begin(self) -> None:
        """The plain starts are for the camp that has nothing else to start from."""
        self._begun = True
        starts = [*self._moves.plain_placements(), *self._mixed()]
        if not any(elite.score.failure == 0 for elite in self._home.elites):
            self._home.starts += starts
            starts = self._mixed()
        if self.config.season:
            self._away = _Camp(deque(starts))

    def _mixed(self) -> list[IndexArray]:
        return [self._moves.mixed_placement() for _ in range(self._num_elites)]

    def _next_of(self, camp: _Camp) -> IndexArray | None:
        while camp.starts:
            devices = camp.starts.popleft()
            if self._is_new(devices, _Asked(camp, None)):
                return devices
        if camp.elites:
            return self._next_of_chain(camp)
        # Asked for much before the first answer.
        for _ in range(50):
            devices = self._moves.mixed_placement()
            if self._is_new(devices, _Asked(camp, None)):
                return devices
        return None

    def _next_of_chain(self, camp: _Camp) -> IndexArray | None:
        while len(camp.chains) < self._num_chains:
            start = camp.elites[len(camp.chains) % len(camp.elites)]
            camp.chains.append(_Chain(start, self.config.cycle))
        camp.ranked = camp.ranked or sorted(camp.chains, key=lambda chain: chain.now.score)
        (chain,) = self._random.choices(camp.ranked, cum_weights=self._focus)
        if chain.waiting is not None:
            devices, chain.waiting = chain.waiting, None
            if self._is_new(devices, _Asked(camp, _Change(chain, chain.now, ""))):
                return devices
        devices = chain.now.devices
        too_full = self._too_full(chain)
        for attempt in range(50):
            move, changed = self._moves.draw(devices, too_full, self._someone_else(camp))
            if changed is None:
                continue
            if self._is_new(changed, _Asked(camp, _Change(chain, chain.now, move))):
                return changed
            if attempt >= 10:
                # Everything near by seems to be tried: walk away from there.
                devices = changed
        return None

    def _next_untried(self) -> IndexArray | None:
        for choice in self._rest:
            devices = np.array(choice, dtype=np.int32)
            if self._is_new(devices, _Asked(self._home, None)):
                return devices
        return None

    def _is_new(self, devices: IndexArray, asked: _Asked) -> bool:
        """Whether a placement was not tried; if so, it counts as tried from now on."""
        name = digest(devices)
        if name in self._tried:
            return False
        self._remember(name, asked)
        return True

    def _remember(self, name: int, asked: _Asked | None) -> None:
        self._tried[name] = asked
        if len(self._tried) > self.config.memory:
            del self._tried[next(iter(self._tried))]

    def _someone_else(self, camp: _Camp) -> IndexArray:
        """A placement to cross with."""
        if self._random.random() < 0.5:
            return self._random.choice(camp.elites).devices
        return self._random.choice(camp.chains).now.devices

    def _too_full(self, chain: _Chain) -> tuple[IndexArray, list[int]] | None:
        """A placement that does not fit, and the devices that run out of memory."""
        if chain.now.score.failure == 1:
            return chain.now.devices, self._overfull(chain.now)
        if chain.refused is None:
            return None
        groups, devices, overfull = chain.refused
        wanted = chain.now.devices.copy()
        wanted[groups] = devices
        return wanted, overfull

    def _overfull(self, known: _Known) -> list[int]:
        missing: list[int] = np.flatnonzero(
            self._missing_bytes(known.devices, known.peak_bytes)
        ).tolist()
        return missing

    # --- learning --------------------------------------------------------------------------------

    def _score(self, devices: IndexArray, measurement: Measurement) -> _Score:
        if measurement.ok:
            return _Score(0, measurement.mean_seconds)
        if measurement.outcome is Outcome.OUT_OF_MEMORY:
            missing = self._missing_bytes(devices, measurement.peak_bytes)
            return _Score(1, float(missing.sum()))
        return _Score(2, 0.0)

    def _missing_bytes(self, devices: IndexArray, peak_bytes: tuple[int, ...]) -> IntArray:
        """[D] by how much the peak is over the memory; where nobody knows it, by how much the
        variables and optimizer state are. And by how much more is to be pinned than can be."""
        if peak_bytes:
            peak = np.array(peak_bytes, dtype=np.int64)
        else:
            peak = np.zeros(self.problem.num_devices, dtype=np.int64)
            np.add.at(peak, devices, self.problem.group_resident_bytes)
        missing = np.maximum(peak - self._memory, 0)
        if self.problem.homes is not None:
            pinned = self.problem.pinned_bytes(devices[np.newaxis])[0]
            missing += np.maximum(pinned - self._pinnable, 0)
        return np.asarray(missing)

    def _keep(self, camp: _Camp, known: _Known) -> None:
        """Makes it an elite if it is good enough; of nearly the same, only the best is one."""
        elites = camp.elites
        if len(elites) >= self._num_elites and known.score >= elites[-1].score:
            return
        place = bisect.bisect_right(elites, known.score, key=lambda elite: elite.score)
        if any(self._nearly_same(elite, known) for elite in elites[:place]):
            return
        worse = [elite for elite in elites[place:] if not self._nearly_same(elite, known)]
        elites[place:] = [known, *worse]
        del elites[self._num_elites :]

    def _nearly_same(self, one: _Known, other: _Known) -> bool:
        return int(np.count_nonzero(one.devices != other.devices)) <= self._nearly

    def _answer(self, change: _Change, known: _Known) -> None:
        chain = change.chain
        chain.steps += 1
        gain = known.score < change.parent.score
        if change.move:
            self._moves.learn(change.move, gain)
        if gain:
            chain.gains.append(_difference(change.parent, known))
        if self._accepts(chain, known.score):
            chain.now = known
        elif known.score.failure == 1 and change.move != "relieve":
            chain.refused = (*_difference(change.parent, known), self._overfull(known))

    # --- noise -----------------------------------------------------------------------------------

    def _is_doubtful(self, change: _Change, known: _Known) -> bool:
        """Whether a change looks as if it were for the better, and may look so by luck alone."""
        return self._wins(change, known) and not self._is_settled(change, known)

    def _wins(self, change: _Change, known: _Known) -> bool:
        now = change.chain.now
        both_ran = now.score.failure == known.score.failure == 0
        return bool(self.config.noise) and both_ran and known.score <= now.score

    def _is_settled(self, change: _Change, known: _Known) -> bool:
        now = change.chain.now
        if len(known.times) >= self.config.most_runs or not min(known.times):
            return True
        gain = math.log(now.score.value / known.score.value)
        error = self.config.noise * math.sqrt(1 / len(known.times) + 1 / len(now.times or (0,)))
        return gain >= self.config.sure * error

    def _ask_again(self) -> None:
        """Of every doubt one trial more, which the search makes before anything new."""
        self.notes.again = [
            Again(Placement.of(self.problem, doubt.known.devices), len(doubt.known.times))
            for doubt in self._doubtful.values()
        ]

    def _tried_again(self, trial: Trial) -> bool:
        """Takes one more time of a placement, and decides if that is enough; whether it is news.
        One that ran and then fails is none to go on from."""
        name, measurement = trial.placement.digest, trial.measurement
        doubt = self._doubtful[name]
        known, change = doubt.known, doubt.change
        if measurement.ok and measurement.mean_seconds in known.times:
            return False  # it was told before
        elites = doubt.camp.elites
        elites[:] = [elite for elite in elites if elite is not known]
        if measurement.ok:
            times = (*known.times, measurement.mean_seconds)
            score = _Score(0, statistics.fmean(times))
            known = known._replace(score=score, times=times)
        else:
            known = known._replace(score=self._score(known.devices, measurement), times=())
        self._keep(doubt.camp, known)
        if known.times and self._is_doubtful(change, known):
            self._doubtful[name] = doubt._replace(known=known)
        else:
            del self._doubtful[name]
            self._answer(change, known)
        return True

    def _accepts(self, chain: _Chain, score: _Score) -> bool:
        now = chain.now.score
        if score <= now:
            return True
        if score.failure or now.failure:
            return False
        done = chain.steps / chain.length
        temperature = self.config.hot * (self.config.cold / self.config.hot) ** min(1.0, done)
        # Relative to the step time, but for steps that take none.
        loss = (score.value - now.value) / (now.value or 1.0)
        return self._random.random() < math.exp(-loss / temperature)

    def _restart(self, camp: _Camp, chain: _Chain) -> None:
        """Reheats a chain at the end of its cycle.

        The better half goes on from where it is. Of the others, every second one restarts from an
        elite and the rest from the best, so that they are not lost on what leads nowhere.
        """
        chain.steps = 0
        chain.length = math.ceil(chain.length * self.config.growth)
        better = sum(other.now.score < chain.now.score for other in camp.chains)
        if better >= len(camp.chains) / 2:
            from_best = self._random.random() < 0.5
            chain.now = camp.elites[0] if from_best else self._random.choice(camp.elites)

    def _join(self, away: _Camp) -> None:
        """The best chains of both camps go on as one; another camp starts from scratch."""
        home = self._home
        for elite in away.elites:
            self._keep(home, elite)
        picked: list[_Chain] = []
        doubles: list[_Chain] = []
        for chain in sorted(home.chains + away.chains, key=lambda chain: chain.now.score):
            double = any(self._nearly_same(chain.now, other.now) for other in picked)
            (doubles if double else picked).append(chain)
        home.chains = (picked + doubles)[: self._num_chains]
        home.ranked = []
        self._season = math.ceil(self._season * self.config.growth)
        self._away = _Camp(deque(self._mixed()))


def _difference(parent: _Known, known: _Known) -> tuple[IndexArray, IndexArray]:
    """The groups that are elsewhere than in the parent, and their devices."""
    groups = np.flatnonzero(parent.devices != known.devices).astype(np.int32)
    return groups, known.devices[groups]


def _combine(chain: _Chain) -> None:
    """Changes that were each for the better are tried together next."""
    chain.waiting = None
    if len(chain.gains) > 1:
        chain.waiting = chain.now.devices.copy()
        for groups, devices in chain.gains:
            chain.waiting[groups] = devices
    chain.gains.clear()
