"""Changes of a placement that `local-search` tries, and where it begins."""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Sequence

import numpy as np

from placewright.graph import IndexArray
from placewright.placers.group_graph import group_graph
from placewright.problem import Problem
from placewright.stays import unit_weights


class Moves:
    """Draws placements, and changes of a placement; learns which kinds of change succeed."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self.problem = problem
        self._random = rng
        self._choices: list[list[int]] = [np.flatnonzero(row).tolist() for row in problem.allowed]
        self.free = [group for group, devices in enumerate(self._choices) if len(devices) > 1]
        """Groups that have a choice."""
        self._groups = np.arange(problem.num_groups)
        self._device_kinds: list[int] = problem.cluster.kind_of_device.tolist()
        graph = group_graph(problem)
        self._near = np.split(graph.neighbour, graph.offsets[1:-1])
        self._neighbours: list[list[int]] = [part.tolist() for part in self._near]
        # Even what costs nothing to send counts a little.
        self._bytes = np.split(graph.cost + 1.0, graph.offsets[1:-1])
        self._cumulated: list[list[float]] = [np.cumsum(part).tolist() for part in self._bytes]
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
        self._homes = _homes(problem)
        """Of each group of weights that may be elsewhere: it, and who reads it."""
        if self._homes:
            self._kinds |= {"settle": self._settle, "trade": self._trade}
        # Share of the last few hundred draws that were for the better; all begin as promising.
        self._names = [*self._kinds, "cross", "relieve"]
        self._success = dict.fromkeys(self._names, 0.2)
        # How likely each is drawn, cumulated; empty where that has changed.
        self._weights: list[float] = []

    def draw(
        self,
        devices: IndexArray,
        too_full: tuple[IndexArray, Sequence[int]] | None,
        other: IndexArray,
    ) -> tuple[str, IndexArray | None]:
        """A kind of change, and the changed placement; None where that changes nothing.

        `too_full` is a placement that did not fit and the devices that ran out of memory, `other`
        one to learn from.
        """
        if not self._weights:
            # The floor keeps kinds alive whose time may come later.
            shares = (share + 0.02 for share in self._success.values())
            self._weights = list(itertools.accumulate(shares))
        # The last one is for where memory ran out.
        count = len(self._names) if too_full and too_full[1] else len(self._names) - 1
        drawn = self._random.random() * self._weights[count - 1]
        kind = self._names[bisect.bisect(self._weights, drawn, 0, count - 1)]
        group = self._random.choice(self.free)
        if kind == "cross":
            changed = self._cross(devices, group, other)
        elif kind == "relieve" and too_full:
            changed = self._relieve(devices, *too_full)
        else:
            changed = self._kinds[kind](devices, group)
        if changed is None or changed.tobytes() == devices.tobytes():
            return kind, None
        return kind, changed

    def learn(self, kind: str, gain: bool) -> None:
        self._success[kind] += 0.005 * (gain - self._success[kind])
        self._weights = []

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
        near = self._near[group]
        pull = np.bincount(devices[near], self._bytes[group], minlength=self.problem.num_devices)
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
        kinds = self._device_kinds
        same = np.bincount(devices * count + other, minlength=count * count)
        image = [-1] * count
        left = count
        for pair in np.argsort(-same, kind="stable").tolist():
            mine, theirs = divmod(pair, count)
            if kinds[mine] == kinds[theirs] and image[theirs] < 0 and mine not in image:
                image[theirs] = mine
                left -= 1
                if not left:
                    break
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

    def _settle(self, devices: IndexArray, group: int) -> IndexArray | None:
        """Consecutive weights to a home, and their readers to a device: one or the other, or
        both."""
        size = 1 + int(self._random.expovariate(0.7))
        first = self._random.randrange(len(self._homes))
        step = self._random.choice((1, 1, 2))
        home, device = (self._random.randrange(self.problem.num_devices) for _ in range(2))
        what = self._random.randrange(3)
        groups: list[int] = []
        targets: list[int] = []
        for weights, readers in self._homes[first : first + step * size : step]:
            if what != 1:
                groups.append(weights)
                targets.append(home)
            if what != 0:
                chosen = readers
                if len(readers) > 1 and self._random.random() < 0.5:
                    chosen = [readers[device % len(readers)]]
                groups += chosen
                targets += [device if what == 1 else home] * len(chosen)
        changed = devices.copy()
        here, to = np.array(groups), np.array(targets)
        may = self.problem.allowed[here, to]
        changed[here[may]] = to[may]
        return changed

    def _trade(self, devices: IndexArray, group: int) -> IndexArray | None:
        """Two groups of weights change places, and so do their readers."""
        if len(self._homes) < 2:
            return None
        one, other = self._random.sample(self._homes, 2)
        changed = devices.copy()
        pairs = [(one[0], other[0]), *zip(one[1], other[1], strict=False)]
        for a, b in pairs:
            changed[a], changed[b] = devices[b], devices[a]
        return changed if self.may_be(changed) else None

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


def _homes(problem: Problem) -> list[tuple[int, list[int]]]:
    """Groups of weights with the groups that read them, in the order in which they are read."""
    readers: dict[int, list[int]] = {}
    for unit, held in unit_weights(problem).items():
        for home in held:
            readers.setdefault(home, []).append(unit)
    return sorted(readers.items(), key=lambda entry: entry[1][0])


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
