"""Simulated annealing with a few chains, from the best placements known.

Every chain holds one placement and proposes changes to it: one group to another device, a run of
consecutive time steps, a whole layer, two devices' contents exchanged, ... (`_Moves`). A change for
the better is taken; one for the worse is taken with a probability that falls with the chain's
temperature. Kinds of change that succeed are tried more often.

Proposals of one `ask` are made before any of its answers is known, so a chain that is asked for
several tries several changes of the same placement. Late in a search nine in ten are rejected, and
little is lost; changes that each help on their own are then tried together.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from placewright.graph import IndexArray
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.placers.exact import every_placement
from placewright.problem import Problem


@dataclass(frozen=True, kw_only=True)
class LocalSearchConfig:
    """How `local-search` searches. The defaults were tuned on the benchmark models."""

    chains: int = 4
    """Placements that are improved side by side. More find more different ones, later."""
    hot: float = 2e-3
    """Temperature at which a cycle begins, as a share of the step time: a change that makes the
    step longer by this share is taken with probability 1/e."""
    cold: float = 1e-5
    """Temperature at which a cycle ends."""
    cycle: int = 1000
    """Proposals of a chain from hot to cold, the first time."""
    growth: float = 1.5
    """How many times longer each further cycle is."""
    elites: int = 16
    """The best placements that are kept, to restart from and to cross with."""
    memory: int = 500_000
    """Placements whose results are remembered, so that none is proposed twice."""


class _Score(NamedTuple):
    """What a placement is worth; less is better. Any that runs is better than any that does not."""

    failure: int
    """0 ran, 1 out of memory, 2 failed otherwise."""
    value: float
    """Step seconds, or bytes over the devices' memory in sum."""


@dataclass
class _Chain:
    devices: IndexArray
    score: _Score
    peak_bytes: tuple[int, ...]
    steps: int = 0
    """Answers in this cycle."""
    length: int = 0
    """Answers this cycle will have."""
    gains: list[IndexArray] = field(default_factory=list)
    """Proposals that were better than the placement they were made from, since the last `ask`."""
    waiting: list[IndexArray] = field(default_factory=list)
    """Placements to propose before any drawn at random."""


class _Open(NamedTuple):
    """A proposal that is not answered yet."""

    chain: int
    move: str
    parent: IndexArray
    parent_score: _Score


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
        self._moves = _Moves(problem, self._random, self._someone_else)
        self._chains: list[_Chain] = []
        self._turn = 0
        # Digest -> score; None for what is asked for but not answered.
        self._known: dict[bytes, _Score | None] = {}
        self._open: dict[bytes, _Open] = {}
        self._elites: list[tuple[_Score, bytes, IndexArray, tuple[int, ...]]] = []
        self._starts: list[IndexArray] | None = None
        self._rest: Iterator[tuple[int, ...]] = every_placement(problem)
        self._memory = np.array([d.memory_bytes for d in problem.cluster.devices], dtype=np.int64)

    # --- ask -------------------------------------------------------------------------------------

    def ask(self, count: int) -> list[Placement]:
        if not self._moves.free:
            return []
        if self._starts is None:
            wanted = self.config.elites - len(self._elites)
            self._starts = self._moves.starting_points(max(0, wanted))
        asked: list[IndexArray] = []
        while self._starts and len(asked) < count:
            devices = self._starts.pop(0)
            key = _digest(devices)
            if key not in self._known:
                self._remember(key, None)
                asked.append(devices)
        if len(asked) < count and self._elites:
            self._begin()
            while len(asked) < count:
                devices_ = self._propose()
                if devices_ is None:
                    break
                asked.append(devices_)
        while len(asked) < count:
            left = self._next_untried()
            if left is None:
                break
            asked.append(left)
        return [Placement.of(self.problem, devices) for devices in asked]

    def _begin(self) -> None:
        """Starts chains from the best known placements, unless they run already."""
        while len(self._chains) < self.config.chains:
            score, _, devices, peak = self._elites[len(self._chains) % len(self._elites)]
            self._chains.append(_Chain(devices, score, peak, length=self.config.cycle))

    def _propose(self) -> IndexArray | None:
        """A new placement, from the chain whose turn it is."""
        number = self._turn % len(self._chains)
        self._turn += 1
        chain = self._chains[number]
        for _ in range(100):
            if chain.waiting:
                move, devices = "", chain.waiting.pop()
            else:
                move, proposal = self._moves.draw(chain.devices, self._overfull(chain))
                if proposal is None:
                    continue
                devices = proposal
            key = _digest(devices)
            if key in self._known:
                continue
            self._remember(key, None)
            self._open[key] = _Open(number, move, chain.devices, chain.score)
            return devices
        return None

    def _next_untried(self) -> IndexArray | None:
        for devices in self._rest:
            array = np.array(devices, dtype=np.int32)
            key = _digest(array)
            if key not in self._known:
                self._remember(key, None)
                return array
        return None

    def _overfull(self, chain: _Chain) -> list[int]:
        """The devices that ran out of memory, where that is known."""
        if chain.score.failure != 1 or not chain.peak_bytes:
            return []
        return np.flatnonzero(np.array(chain.peak_bytes) > self._memory).tolist()

    def _someone_else(self) -> IndexArray:
        """A placement to cross with."""
        if self._random.random() < 0.5:
            return self._random.choice(self._elites)[2]
        return self._random.choice(self._chains).devices

    # --- tell ------------------------------------------------------------------------------------

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            devices = trial.placement.devices
            if not self._moves.is_allowed(devices):
                continue
            key = _digest(devices)
            score = self._score(devices, trial.measurement)
            self._remember(key, score)
            self._keep(score, key, devices, trial.measurement.peak_bytes)
            answered = self._open.pop(key, None)
            if answered is not None:
                self._answer(answered, devices, score, trial.measurement.peak_bytes)
        for chain in self._chains:
            self._combine(chain)
            if chain.steps >= chain.length:
                self._restart(chain)

    def _score(self, devices: IndexArray, measurement: Measurement) -> _Score:
        if measurement.ok:
            return _Score(0, measurement.mean_seconds)
        if measurement.outcome is Outcome.OUT_OF_MEMORY:
            peak = np.array(measurement.peak_bytes or self._moves.resident_bytes(devices))
            return _Score(1, float(np.maximum(peak - self._memory, 0).sum()))
        return _Score(2, 0.0)

    def _answer(
        self, answered: _Open, devices: IndexArray, score: _Score, peak_bytes: tuple[int, ...]
    ) -> None:
        chain = self._chains[answered.chain]
        chain.steps += 1
        better = score < answered.parent_score
        if answered.move:
            self._moves.learn(answered.move, better)
        if better:
            chain.gains.append(_change(answered.parent, devices))
        if self._accepts(chain, score):
            chain.devices, chain.score, chain.peak_bytes = devices, score, peak_bytes

    def _accepts(self, chain: _Chain, score: _Score) -> bool:
        if score <= chain.score:
            return True
        if score.failure or chain.score.failure:
            return False
        loss = (score.value - chain.score.value) / (chain.score.value or 1.0)
        return self._random.random() < math.exp(-loss / self._temperature(chain))

    def _temperature(self, chain: _Chain) -> float:
        done = min(1.0, chain.steps / chain.length)
        return self.config.hot * math.pow(self.config.cold / self.config.hot, done)

    def _combine(self, chain: _Chain) -> None:
        """Changes that were each for the better are tried together next."""
        chain.waiting.clear()
        if len(chain.gains) > 1:
            combined = chain.devices.copy()
            for change in chain.gains:
                changed = change >= 0
                combined[changed] = change[changed]
            chain.waiting.append(combined)
        chain.gains.clear()

    def _restart(self, chain: _Chain) -> None:
        score, _, devices, peak = self._elites[0]
        chain.steps = 0
        chain.length = math.ceil(chain.length * self.config.growth)
        if self._random.random() < 0.5:
            chain.devices, chain.score, chain.peak_bytes = devices, score, peak

    def _keep(
        self, score: _Score, key: bytes, devices: IndexArray, peak_bytes: tuple[int, ...]
    ) -> None:
        elites = self._elites
        if len(elites) >= self.config.elites and (score, key) >= elites[-1][:2]:
            return
        if any(other == key for _, other, _, _ in elites):
            return
        elites.append((score, key, devices, peak_bytes))
        elites.sort(key=lambda elite: elite[:2])
        del elites[self.config.elites :]

    def _remember(self, key: bytes, score: _Score | None) -> None:
        self._known[key] = score
        if len(self._known) > self.config.memory:
            self._known.pop(next(iter(self._known)))


def _digest(devices: IndexArray) -> bytes:
    """Eight bytes that stand for a placement, the same in every process."""
    return hashlib.blake2b(devices.tobytes(), digest_size=8).digest()


def _change(before: IndexArray, after: IndexArray) -> IndexArray:
    """[G] the new device of each group that has one, -1 for the others."""
    return np.where(before != after, after, -1).astype(np.int32)


# --- moves ---------------------------------------------------------------------------------------


class _Moves:
    """Draws changes of a placement; learns which kinds succeed."""

    def __init__(
        self, problem: Problem, rng: random.Random, someone_else: Callable[[], IndexArray]
    ) -> None:
        self.problem = problem
        self._random = rng
        self._someone_else = someone_else
        self._choices: list[list[int]] = [np.flatnonzero(row).tolist() for row in problem.allowed]
        self.free = [g for g, devices in enumerate(self._choices) if len(devices) > 1]
        self._groups = np.arange(problem.num_groups)
        self._weights = _communication(problem)
        self._neighbours = [np.flatnonzero(row).tolist() for row in self._weights]
        self._cumulated = [
            np.cumsum(row[near]).tolist()
            for row, near in zip(self._weights, self._neighbours, strict=True)
        ]
        self._sequences = _sequences(problem.grouping.names)
        self._sequences_of: list[list[list[int]]] = [[] for _ in range(problem.num_groups)]
        for sequence in self._sequences:
            for group in sequence:
                self._sequences_of[group].append(sequence)
        self._kinds: dict[str, Callable[[IndexArray], IndexArray | None]] = {
            "single": self._single,
            "follow": self._follow,
            "attract": self._attract,
            "run": self._run,
            "scope": self._scope,
            "ball": self._ball,
            "swap": self._swap,
            "exchange": self._exchange,
            "cross": self._cross,
        }
        self._success = dict.fromkeys(self._kinds, 0.2)

    def draw(self, devices: IndexArray, overfull: Sequence[int]) -> tuple[str, IndexArray | None]:
        """A kind of move and a changed placement; None where the kind has nothing to change."""
        if overfull and self._random.random() < 0.5:
            return "", self._relieve(devices, overfull)
        kinds = list(self._kinds)
        # The floor keeps kinds alive that may succeed later.
        weights = [self._success[kind] + 0.02 for kind in kinds]
        (kind,) = self._random.choices(kinds, weights)
        return kind, self._kinds[kind](devices)

    def learn(self, kind: str, better: bool) -> None:
        self._success[kind] += 0.005 * (better - self._success[kind])

    def is_allowed(self, devices: IndexArray) -> bool:
        return bool(self.problem.allowed[self._groups, devices].all())

    def resident_bytes(self, devices: IndexArray) -> list[int]:
        """[D] memory of variables and optimizer state: what is known to be needed at least."""
        used = np.zeros(self.problem.num_devices, dtype=np.int64)
        np.add.at(used, devices, self.problem.group_resident_bytes)
        return [int(b) for b in used]

    def starting_points(self, count: int) -> list[IndexArray]:
        """One device as far as possible, contiguous parts, then scopes at random."""
        problem = self.problem
        fastest = np.where(problem.allowed, problem.group_seconds.T, np.inf).argmin(axis=1)
        speed = np.where(problem.allowed.T, problem.group_seconds, 0).sum(axis=1)
        covered = problem.allowed.sum(axis=0)
        # The devices that run most groups, the fastest first.
        order = sorted(range(problem.num_devices), key=lambda d: (-covered[d], speed[d], d))

        def legal(wanted: IndexArray) -> IndexArray:
            fits = problem.allowed[self._groups, wanted]
            return np.where(fits, wanted, fastest).astype(np.int32)

        points = [legal(np.full(problem.num_groups, d, dtype=np.int32)) for d in order[:1]]
        work = np.cumsum(problem.group_seconds[fastest, self._groups])
        share = work / work[-1] if work[-1] > 0 else self._groups / problem.num_groups
        for parts in range(2, problem.num_devices + 1):
            part = np.minimum((share * parts).astype(np.int64), parts - 1)
            points.append(legal(np.array(order, dtype=np.int32)[part]))
        while len(points) < count:
            devices = legal(np.full(problem.num_groups, self._random.choice(order), dtype=np.int32))
            for _ in range(self._random.randrange(1, 8)):
                sequence = self._random.choice(self._sequences)
                devices[self._window(sequence, self._random.choice(sequence))] = (
                    self._random.choice(order)
                )
            points.append(legal(devices))
        return points[:count]

    def _single(self, devices: IndexArray) -> IndexArray | None:
        group = self._random.choice(self.free)
        return self._put(devices, [group], self._other_device(devices, group))

    def _follow(self, devices: IndexArray) -> IndexArray | None:
        """A group to the device of one it exchanges tensors with."""
        group = self._random.choice(self.free)
        return self._put(devices, [group], self._neighbour_device(devices, group))

    def _attract(self, devices: IndexArray) -> IndexArray | None:
        """A group to the device it exchanges the most bytes with."""
        group = self._random.choice(self.free)
        near = self._neighbours[group]
        pull = np.bincount(
            devices[near], self._weights[group, near], minlength=self.problem.num_devices
        )
        pull[~self.problem.allowed[group]] = -1.0
        return self._put(devices, [group], int(pull.argmax()))

    def _run(self, devices: IndexArray) -> IndexArray | None:
        """Consecutive groups of a scope, or of the whole graph, to one device."""
        group = self._random.choice(self.free)
        sequence = self._random.choice(self._sequences_of[group])
        return self._put(devices, self._window(sequence, group), self._target(devices, group))

    def _scope(self, devices: IndexArray) -> IndexArray | None:
        """All groups of a scope to one device."""
        group = self._random.choice(self.free)
        sequence = self._random.choice(self._sequences_of[group])
        return self._put(devices, sequence, self._target(devices, group))

    def _ball(self, devices: IndexArray) -> IndexArray | None:
        """A group, and some that it exchanges tensors with on the same device, to another."""
        group = self._random.choice(self.free)
        near = [g for g in self._neighbours[group] if devices[g] == devices[group]]
        self._random.shuffle(near)
        size = 1 + int(self._random.expovariate(0.3))
        return self._put(devices, [group, *near[:size]], self._target(devices, group))

    def _swap(self, devices: IndexArray) -> IndexArray | None:
        """Two groups change places."""
        a, b = self._random.choice(self.free), self._random.choice(self.free)
        allowed = self.problem.allowed
        if devices[a] == devices[b] or not (allowed[a, devices[b]] and allowed[b, devices[a]]):
            return None
        changed = devices.copy()
        changed[a], changed[b] = devices[b], devices[a]
        return changed

    def _exchange(self, devices: IndexArray) -> IndexArray | None:
        """What two devices hold of a scope, or of the whole graph, changes places."""
        group = self._random.choice(self.free)
        a, b = int(devices[group]), self._other_device(devices, group)
        sequence = self._random.choice(self._sequences_of[group])
        part = self._window(sequence, group) if self._random.random() < 0.5 else sequence
        here = np.array(part)
        changed = devices.copy()
        for old, new in ((a, b), (b, a)):
            moving = here[(devices[here] == old) & self.problem.allowed[here, new]]
            changed[moving] = new
        return changed

    def _cross(self, devices: IndexArray) -> IndexArray | None:
        """Consecutive groups go where another placement has them."""
        group = self._random.choice(self.free)
        sequence = self._random.choice(self._sequences_of[group])
        part = self._window(sequence, group)
        changed = devices.copy()
        changed[part] = self._someone_else()[part]
        return None if np.array_equal(changed, devices) else changed

    def _relieve(self, devices: IndexArray, overfull: Sequence[int]) -> IndexArray | None:
        """Some groups away from a device that ran out of memory."""
        device = self._random.choice(overfull)
        here = [g for g in self.free if devices[g] == device]
        if not here:
            return None
        group = self._random.choice(here)
        sequence = self._random.choice(self._sequences_of[group])
        part = [g for g in self._window(sequence, group) if devices[g] == device]
        return self._put(devices, part, self._other_device(devices, group))

    def _put(
        self, devices: IndexArray, groups: Sequence[int], device: int | None
    ) -> IndexArray | None:
        """Groups to a device, but for those that may not go there; None if nothing changes."""
        if device is None:
            return None
        changed = devices.copy()
        here = np.array(groups)
        changed[here[self.problem.allowed[here, device]]] = device
        return None if np.array_equal(changed, devices) else changed

    def _window(self, sequence: list[int], group: int) -> list[int]:
        """Consecutive members of a sequence, `group` among them; short ones more often."""
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
        """The device of a group near by that is elsewhere, more likely where more bytes go."""
        near = self._neighbours[group]
        for _ in range(4 if near else 0):
            (other,) = self._random.choices(near, cum_weights=self._cumulated[group])
            device = int(devices[other])
            if device != devices[group] and self.problem.allowed[group, device]:
                return device
        return None


def _communication(problem: Problem) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[G, G] bytes that groups exchange, either way; a transfer's latency counts as bytes too."""
    graph, of = problem.graph, problem.grouping.group_of
    src, dst = of[graph.edge_src], of[graph.edge_dst]
    # A tensor is sent once however many ops of a group read it. Control edges count by producer.
    item = np.where(graph.edge_tensor >= 0, graph.edge_tensor, graph.num_tensors + graph.edge_src)
    once = np.unique(np.stack([src, dst, item])[:, src != dst], axis=1)
    sizes = np.concatenate([graph.tensor_bytes, np.zeros(graph.num_ops, dtype=np.int64)])
    routes = problem.cluster.routes
    total = routes.seconds_per_byte.sum()
    latency_bytes = float(routes.latency_seconds.sum() / total) if total > 0 else 0.0
    weights = np.zeros((problem.num_groups, problem.num_groups))
    np.add.at(weights, (once[0], once[1]), sizes[once[2]] + latency_bytes + 1.0)
    return np.asarray(weights + weights.T)


def _sequences(names: Sequence[str]) -> list[list[int]]:
    """Groups that belong together, in topological order: all, and those whose names say so.

    Names agree up to a slash (`encoder/layer_0/`) or but for one number (`encoder/layer_*/step_3`,
    `encoder/layer_0/step_*`).
    """
    members: dict[str, list[int]] = {"": list(range(len(names)))}
    for group, name in enumerate(names):
        for slash in re.finditer("/", name):
            members.setdefault(name[: slash.end()], []).append(group)
        for number in re.finditer(r"\d+", name):
            pattern = f"{name[: number.start()]}*{name[number.end() :]}"
            members.setdefault(pattern, []).append(group)
    distinct = dict.fromkeys(tuple(groups) for groups in members.values() if len(groups) > 1)
    return [list(groups) for groups in distinct] or [[*range(len(names))]]
