"""Simulated annealing with a few chains, from the best placements known and from scratch.

Every chain holds one placement and proposes changes to it: one group to another device, a run of
time steps, a whole layer, two devices' contents exchanged, ... (`_Moves`). A change for the better
is taken; one for the worse is taken with a probability that falls with the chain's temperature.
Kinds of change that succeed are tried more often, and so are the better chains.

The chains are in two camps that know nothing of each other. One starts from what the placer was
told; the other from points of its own, so that it does not end where other methods already were.
After a season the second joins the first with the best it has, and a new one starts from scratch.

Proposals of one `ask` are made before any of its answers is known, so a chain tries several changes
of the same placement at a time. As most changes are rejected, little is lost by that; those that
each help on their own are then tried together.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from placewright.graph import FloatArray, IndexArray, IntArray
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
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
    """Answers that the camp from scratch gets before it joins the other, the first time."""
    memory: int = 500_000
    """Placements that are remembered, so that none is proposed twice."""


class _Score(NamedTuple):
    """What a placement is worth; less is better. Any that runs is better than any that fails."""

    failure: int
    """0 ran, 1 out of memory, 2 failed otherwise."""
    value: float
    """Step seconds, or bytes that are missing on all devices together."""


class _Known(NamedTuple):
    """A placement that was tried."""

    score: _Score
    digest: bytes
    devices: IndexArray
    peak_bytes: tuple[int, ...]


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
    refused: _Known | None = None
    """The latest change of a placement that runs to one that does not fit."""


@dataclass(eq=False)
class _Camp:
    """Chains that learn from each other."""

    starts: deque[IndexArray]
    """To be tried before chains are started from the best."""
    elites: list[_Known] = field(default_factory=list)
    """The best first, no two of them nearly the same."""
    chains: list[_Chain] = field(default_factory=list)
    answers: int = 0


class _Change(NamedTuple):
    """What a chain proposed."""

    chain: _Chain
    parent: _Known
    move: str
    """Kind of change; empty for a combination of several."""


class _Asked(NamedTuple):
    """Where a proposal came from."""

    camp: _Camp
    change: _Change | None
    """None for a start."""


class LocalSearch(Placer):
    """Parallel simulated annealing. Endless, but for spaces that it has tried out completely."""

    name = "local-search"
    endless = True
    share = 2.0

    def __init__(
        self, problem: Problem, config: LocalSearchConfig | None = None, *, seed: int = 0
    ) -> None:
        super().__init__(problem)
        self.config = config or LocalSearchConfig()
        self._random = random.Random(seed)
        self._moves = _Moves(problem, self._random)
        self._home = _Camp(deque())
        self._away: _Camp | None = None
        self._season = self.config.season
        self._turn = 0
        # By digest, what was tried, and where it came from as long as it is not answered.
        self._tried: dict[bytes, _Asked | None] = {}
        self._rest = every_placement(problem)
        self._memory = np.array([d.memory_bytes for d in problem.cluster.devices], dtype=np.int64)
        # Placements that differ in no more groups than this count as nearly the same.
        self._nearly = problem.num_groups // 30

    def ask(self, count: int) -> list[Placement]:
        asked: list[Placement] = []
        while len(asked) < count and self._moves.free:
            devices = self._next()
            if devices is None:
                break
            asked.append(Placement.of(self.problem, devices))
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            devices, measurement = trial.placement.devices, trial.measurement
            digest = _digest(devices)
            asked = self._tried.get(digest)
            if asked is None and not self._moves.may_be(devices):
                continue
            self._remember(digest, None)
            score = self._score(devices, measurement)
            known = _Known(score, digest, devices, measurement.peak_bytes)
            # What others found, or a camp that has joined since, is for the camp at home.
            camp = self._away if asked and asked.camp is self._away else self._home
            camp.answers += 1
            self._keep(camp, known)
            if asked and asked.change:
                self._answer(asked.change, known)
        for camp in self._camps():
            for chain in camp.chains:
                _combine(chain)
                if chain.steps >= chain.length:
                    self._restart(camp, chain)
        if self._away is not None and self._away.answers >= self._season:
            self._join(self._away)

    # --- proposing -------------------------------------------------------------------------------

    def _next(self) -> IndexArray | None:
        """A placement that was not tried; None when all were."""
        if self._away is None:
            self._begin()
        camps = self._camps()
        self._turn += 1
        devices = self._next_of(camps[self._turn % len(camps)])
        return self._next_untried() if devices is None else devices

    def _camps(self) -> list[_Camp]:
        return [self._home] if self._away is None else [self._home, self._away]

    def _begin(self) -> None:
        """The plain starts are for the camp that has nothing else to start from."""
        plain = self._moves.plain_placements()
        self._away = _Camp(deque(self._mixed()))
        if any(elite.score.failure == 0 for elite in self._home.elites):
            self._away.starts.extendleft(plain)
        else:
            self._home.starts += [*plain, *self._mixed()]

    def _mixed(self) -> list[IndexArray]:
        return [self._moves.mixed_placement() for _ in range(self.config.elites)]

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
        while len(camp.chains) < self.config.chains:
            start = camp.elites[len(camp.chains) % len(camp.elites)]
            camp.chains.append(_Chain(start, self.config.cycle))
        ranked = sorted(camp.chains, key=lambda chain: chain.now.score)
        weights = [self.config.focus**rank for rank in range(len(ranked))]
        (chain,) = self._random.choices(ranked, weights)
        if chain.waiting is not None:
            devices, chain.waiting = chain.waiting, None
            if self._is_new(devices, _Asked(camp, _Change(chain, chain.now, ""))):
                return devices
        devices = chain.now.devices
        for attempt in range(50):
            other = self._someone_else(camp)
            move, changed = self._moves.draw(devices, self._too_full(chain), other)
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
            if self._is_new(devices, None):
                return devices
        return None

    def _is_new(self, devices: IndexArray, asked: _Asked | None) -> bool:
        """Whether a placement was not tried; if so, it counts as tried from now on."""
        digest = _digest(devices)
        if digest in self._tried:
            return False
        self._remember(digest, asked)
        return True

    def _remember(self, digest: bytes, asked: _Asked | None) -> None:
        self._tried[digest] = asked
        if len(self._tried) > self.config.memory:
            del self._tried[next(iter(self._tried))]

    def _someone_else(self, camp: _Camp) -> IndexArray:
        """A placement to cross with."""
        if self._random.random() < 0.5:
            return self._random.choice(camp.elites).devices
        return self._random.choice(camp.chains).now.devices

    def _too_full(self, chain: _Chain) -> tuple[IndexArray, list[int]] | None:
        """A placement that does not fit, and the devices that ran out of memory."""
        known = chain.now if chain.now.score.failure == 1 else chain.refused
        if known is None:
            return None
        missing = self._missing_bytes(known.devices, known.peak_bytes)
        overfull: list[int] = np.flatnonzero(missing).tolist()
        return (known.devices, overfull) if overfull else None

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
        variables and optimizer state are."""
        if peak_bytes:
            peak = np.array(peak_bytes, dtype=np.int64)
        else:
            peak = np.zeros(self.problem.num_devices, dtype=np.int64)
            np.add.at(peak, devices, self.problem.group_resident_bytes)
        return np.asarray(np.maximum(peak - self._memory, 0))

    def _keep(self, camp: _Camp, known: _Known) -> None:
        """Makes it an elite if it is good enough; of nearly the same, only the best is one."""
        elites = camp.elites
        if len(elites) >= self.config.elites and known.score >= elites[-1].score:
            return
        near = [elite for elite in elites if self._nearly_same(elite, known)]
        if any(elite.score <= known.score for elite in near):
            return
        elites[:] = [elite for elite in elites if all(elite is not other for other in near)]
        elites.append(known)
        elites.sort(key=lambda elite: elite.score)
        del elites[self.config.elites :]

    def _nearly_same(self, one: _Known, other: _Known) -> bool:
        return int(np.count_nonzero(one.devices != other.devices)) <= self._nearly

    def _answer(self, change: _Change, known: _Known) -> None:
        chain = change.chain
        chain.steps += 1
        gain = known.score < change.parent.score
        if change.move:
            self._moves.learn(change.move, gain)
        if gain:
            groups = np.flatnonzero(change.parent.devices != known.devices).astype(np.int32)
            chain.gains.append((groups, known.devices[groups]))
        if self._accepts(chain, known.score):
            chain.now = known
        elif known.score.failure == 1 and change.move != "relieve":
            chain.refused = known

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
        home.chains = (picked + doubles)[: self.config.chains]
        self._season = math.ceil(self._season * self.config.growth)
        self._away = _Camp(deque(self._mixed()))


def _combine(chain: _Chain) -> None:
    """Changes that were each for the better are tried together next."""
    chain.waiting = None
    if len(chain.gains) > 1:
        chain.waiting = chain.now.devices.copy()
        for groups, devices in chain.gains:
            chain.waiting[groups] = devices
    chain.gains.clear()


def _digest(devices: IndexArray) -> bytes:
    """Eight bytes that stand for a placement, the same in every process."""
    return hashlib.blake2b(devices.tobytes(), digest_size=8).digest()


# --- moves ---------------------------------------------------------------------------------------


class _Moves:
    """Draws placements, and changes of a placement; learns which kinds of change succeed."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self.problem = problem
        self._random = rng
        self._choices: list[list[int]] = [np.flatnonzero(row).tolist() for row in problem.allowed]
        self.free = [group for group, devices in enumerate(self._choices) if len(devices) > 1]
        """Groups that have a choice."""
        self._groups = np.arange(problem.num_groups)
        self._bytes = _bytes_between(problem)
        self._neighbours: list[list[int]] = [np.flatnonzero(row).tolist() for row in self._bytes]
        self._cumulated: list[list[float]] = [
            np.cumsum(row[near]).tolist()
            for row, near in zip(self._bytes, self._neighbours, strict=True)
        ]
        self._sequences = _sequences(problem.grouping.names)
        self._sequences_of: list[list[list[int]]] = [[] for _ in range(problem.num_groups)]
        for sequence in self._sequences:
            for group in sequence:
                self._sequences_of[group].append(sequence)
        self._kinds: dict[str, Callable[[IndexArray, int], IndexArray | None]] = {
            "single": self._single,
            "follow": self._follow,
            "attract": self._attract,
            "run": self._run,
            "stripe": self._stripe,
            "scope": self._scope,
            "shift": self._shift,
            "ball": self._ball,
            "swap": self._swap,
            "exchange": self._exchange,
        }
        # Share of the last few hundred draws that were for the better; all begin as promising.
        self._success = dict.fromkeys([*self._kinds, "cross", "relieve"], 0.2)

    def draw(
        self,
        devices: IndexArray,
        too_full: tuple[IndexArray, Sequence[int]] | None,
        other: IndexArray,
    ) -> tuple[str, IndexArray | None]:
        """A kind of change, and the changed placement; None where that changes nothing.

        `overfull` are the devices that ran out of memory, `other` is a placement to learn from.
        """
        kinds = [kind for kind in self._success if kind != "relieve" or too_full]
        # The floor keeps kinds alive whose time may come later.
        weights = [self._success[kind] + 0.02 for kind in kinds]
        (kind,) = self._random.choices(kinds, weights)
        group = self._random.choice(self.free)
        if kind == "cross":
            changed = self._cross(devices, group, other)
        elif kind == "relieve" and too_full:
            changed = self._relieve(devices, *too_full)
        else:
            changed = self._kinds[kind](devices, group)
        if changed is None or np.array_equal(changed, devices):
            return kind, None
        return kind, changed

    def learn(self, kind: str, gain: bool) -> None:
        self._success[kind] += 0.005 * (gain - self._success[kind])

    def may_be(self, devices: IndexArray) -> bool:
        """Whether every group is where it is allowed."""
        return bool(self.problem.allowed[self._groups, devices].all())

    # Where to begin.

    def plain_placements(self) -> list[IndexArray]:
        """All on the best device; then contiguous parts of equal work on the best 2, 3, ..."""
        problem = self.problem
        fastest = self._fastest()
        work = np.cumsum(problem.group_seconds[fastest, self._groups])
        share = work / work[-1] if work[-1] > 0 else (self._groups + 1) / problem.num_groups
        order = np.array(self._best_devices(), dtype=np.int32)
        return [
            self._legal(order[np.minimum((share * parts).astype(np.int64), parts - 1)])
            for parts in range(1, problem.num_devices + 1)
        ]

    def mixed_placement(self) -> IndexArray:
        """One device, but for parts of some scopes that are on others."""
        devices = np.full(
            self.problem.num_groups, self._random.choice(self._best_devices()), dtype=np.int32
        )
        for _ in range(self._random.randrange(1, 8)):
            sequence = self._random.choice(self._sequences)
            part = self._window(sequence, self._random.choice(sequence))
            devices[part] = self._random.randrange(self.problem.num_devices)
        return self._legal(devices)

    def _best_devices(self) -> list[int]:
        """Those that run the most groups, of equals the fastest, first."""
        allowed = self.problem.allowed
        seconds = np.where(allowed.T, self.problem.group_seconds, 0.0).sum(axis=1)
        covered = allowed.sum(axis=0)
        return sorted(range(len(covered)), key=lambda d: (-covered[d], seconds[d], d))

    def _fastest(self) -> IndexArray:
        seconds = np.where(self.problem.allowed, self.problem.group_seconds.T, np.inf)
        return np.asarray(seconds.argmin(axis=1), dtype=np.int32)

    def _legal(self, wanted: IndexArray) -> IndexArray:
        fits = self.problem.allowed[self._groups, wanted]
        return np.where(fits, wanted, self._fastest()).astype(np.int32)

    # Kinds of change. Each begins with a group drawn at random.

    def _single(self, devices: IndexArray, group: int) -> IndexArray | None:
        """The group to any other device."""
        return self._put(devices, [group], self._other_device(devices, group))

    def _follow(self, devices: IndexArray, group: int) -> IndexArray | None:
        """The group to the device of one it exchanges tensors with."""
        return self._put(devices, [group], self._neighbour_device(devices, group))

    def _attract(self, devices: IndexArray, group: int) -> IndexArray | None:
        """The group to the device it exchanges the most bytes with."""
        near = self._neighbours[group]
        pull = np.bincount(
            devices[near], self._bytes[group, near], minlength=self.problem.num_devices
        )
        return self._put(
            devices, [group], int(np.where(self.problem.allowed[group], pull, -1.0).argmax())
        )

    def _run(self, devices: IndexArray, group: int) -> IndexArray | None:
        """Consecutive groups of a scope, or of the whole graph, to one device."""
        part = self._window(self._sequence(group), group)
        return self._put(devices, part, self._target(devices, group))

    def _stripe(self, devices: IndexArray, group: int) -> IndexArray | None:
        """The same, but every second, third or fourth: time steps taken in turns."""
        part = self._window(self._sequence(group), group)
        part = part[:: self._random.randrange(2, 5)]
        return self._put(devices, part, self._target(devices, group))

    def _scope(self, devices: IndexArray, group: int) -> IndexArray | None:
        """All groups of a scope to one device."""
        return self._put(devices, self._sequence(group), self._target(devices, group))

    def _shift(self, devices: IndexArray, group: int) -> IndexArray | None:
        """Where the device changes along a scope, or along the whole graph, it does so earlier or
        later."""
        sequence = self._sequence(group)
        if self._random.random() < 0.5:
            sequence = sequence[::-1]
        start = sequence.index(group)
        here = devices[sequence[start:]] == devices[group]
        stay = int(here.argmin()) if not here.all() else 0
        if not stay:
            return None
        size = 1 + int(self._random.expovariate(0.4))
        end = start + stay
        part = sequence[max(start, end - size) : end]
        return self._put(devices, part, int(devices[sequence[end]]))

    def _ball(self, devices: IndexArray, group: int) -> IndexArray | None:
        """The group, and some it exchanges tensors with on its device, to another."""
        near = [other for other in self._neighbours[group] if devices[other] == devices[group]]
        self._random.shuffle(near)
        size = 1 + int(self._random.expovariate(0.3))
        return self._put(devices, [group, *near[:size]], self._target(devices, group))

    def _swap(self, devices: IndexArray, group: int) -> IndexArray | None:
        """Two groups change places."""
        other = self._random.choice(self.free)
        changed = devices.copy()
        changed[group], changed[other] = devices[other], devices[group]
        return changed if self.may_be(changed) else None

    def _exchange(self, devices: IndexArray, group: int) -> IndexArray | None:
        """What two devices hold of a scope, or of the whole graph, changes places."""
        sequence = self._sequence(group)
        part = np.array(self._window(sequence, group) if self._random.random() < 0.5 else sequence)
        first, second = int(devices[group]), self._other_device(devices, group)
        changed = devices.copy()
        for old, new in ((first, second), (second, first)):
            changed[part[(devices[part] == old) & self.problem.allowed[part, new]]] = new
        return changed

    def _cross(self, devices: IndexArray, group: int, other: IndexArray) -> IndexArray | None:
        """Consecutive groups as in another placement."""
        part = self._window(self._sequence(group), group)
        changed = devices.copy()
        changed[part] = self._aligned(other, devices)[part]
        return changed if self.may_be(changed) else None

    def _aligned(self, other: IndexArray, devices: IndexArray) -> IndexArray:
        """The other placement with devices of a kind renamed so that it resembles this one.

        Two placements may be the same but for which GPU is called the first.
        """
        count = self.problem.num_devices
        kinds = self.problem.cluster.kind_of_device
        same = np.bincount(devices * count + other, minlength=count * count)
        image = [-1] * count
        for pair in np.argsort(-same, kind="stable").tolist():
            mine, theirs = divmod(pair, count)
            if kinds[mine] == kinds[theirs] and image[theirs] < 0 and mine not in image:
                image[theirs] = mine
        return np.array(image, dtype=np.int32)[other]

    def _relieve(
        self, devices: IndexArray, wanted: IndexArray, overfull: Sequence[int]
    ) -> IndexArray | None:
        """The placement that was wanted, with some groups away from a device that ran out of
        memory: none of those that were to go there."""
        device = self._random.choice(overfull)
        movable = (wanted == device) & ((devices == device) | (devices == wanted).all())
        here = [group for group in self.free if movable[group]]
        if not here:
            return None
        group = self._random.choice(here)
        part = self._window(self._sequence(group), group)
        return self._put(
            wanted,
            [group, *(other for other in part if movable[other])],
            self._other_device(wanted, group),
        )

    # What they are made of.

    def _put(
        self, devices: IndexArray, groups: Sequence[int], device: int | None
    ) -> IndexArray | None:
        """Groups to a device, but for those that may not go there."""
        if device is None:
            return None
        changed = devices.copy()
        here = np.array(groups)
        changed[here[self.problem.allowed[here, device]]] = device
        return changed

    def _sequence(self, group: int) -> list[int]:
        return self._random.choice(self._sequences_of[group])

    def _window(self, sequence: list[int], group: int) -> list[int]:
        """Consecutive members of a sequence, `group` among them; short parts more often."""
        mean = 1 + 0.15 * len(sequence)
        size = min(len(sequence), 2 + int(self._random.expovariate(1 / mean)))
        first = sequence.index(group) - self._random.randrange(size)
        first = max(0, min(first, len(sequence) - size))
        return sequence[first : first + size]

    def _target(self, devices: IndexArray, group: int) -> int:
        if self._random.random() < 0.5:
            device = self._neighbour_device(devices, group)
            if device is not None:
                return device
        return self._other_device(devices, group)

    def _other_device(self, devices: IndexArray, group: int) -> int:
        return self._random.choice([d for d in self._choices[group] if d != devices[group]])

    def _neighbour_device(self, devices: IndexArray, group: int) -> int | None:
        """The device of a group near by that is elsewhere; the likelier the more bytes go there."""
        near = self._neighbours[group]
        for _ in range(4 if near else 0):
            (other,) = self._random.choices(near, cum_weights=self._cumulated[group])
            device = int(devices[other])
            if device != devices[group] and self.problem.allowed[group, device]:
                return device
        return None


def _bytes_between(problem: Problem) -> FloatArray:
    """[G, G] bytes that groups exchange, either way; a transfer's latency counts as bytes too."""
    graph, of = problem.graph, problem.grouping.group_of
    src, dst = of[graph.edge_src], of[graph.edge_dst]
    # A tensor is sent once however many ops of a group read it; a control edge, once per producer.
    thing = np.where(graph.edge_tensor >= 0, graph.edge_tensor, graph.num_tensors + graph.edge_src)
    once = np.unique(np.stack([src, dst, thing])[:, src != dst], axis=1)
    sizes = np.concatenate([graph.tensor_bytes, np.zeros(graph.num_ops, dtype=np.int64)])
    routes = problem.cluster.routes
    per_byte = float(routes.seconds_per_byte.sum())
    latency_bytes = float(routes.latency_seconds.sum()) / per_byte if per_byte > 0 else 0.0
    totals = np.zeros((problem.num_groups, problem.num_groups))
    np.add.at(totals, (once[0], once[1]), sizes[once[2]] + latency_bytes + 1.0)
    return np.asarray(totals + totals.T, dtype=np.float64)


def _sequences(names: Sequence[str]) -> list[list[int]]:
    """Groups that belong together, in topological order: all, and those whose names say so.

    Names say so when they agree up to a slash (`encoder/layer_0/`) or but for one number
    (`encoder/layer_*/step_3`, `encoder/layer_0/step_*`).
    """
    members: dict[str, list[int]] = {"": list(range(len(names)))}
    for group, name in enumerate(names):
        for slash in re.finditer("/", name):
            members.setdefault(name[: slash.end()], []).append(group)
        for number in re.finditer(r"\d+", name):
            pattern = f"{name[: number.start()]}*{name[number.end() :]}"
            members.setdefault(pattern, []).append(group)
    distinct = dict.fromkeys(tuple(groups) for groups in members.values())
    return [list(groups) for groups in distinct if len(groups) > 1 or len(names) == 1]
