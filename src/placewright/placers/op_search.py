"""Local search over single ops, for graphs of up to some hundred thousand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placewright.graph import FloatArray, IndexArray, IntArray
from placewright.measurement import Outcome, Trial
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.problem import Problem
from placewright.simulator import Simulator
from placewright.simulator.compiling import compiled

_BATCH = 32
"""Proposals at a time: each starts from the same placement, so that more would soon be out of date,
and fewer would simulate that placement's path too often."""

_MEAN_MOVES = 2.0
"""Of a proposal, besides the first. More of them rarely gain together: good ones are combined once
they are known to be good."""

_REACH = 40
"""How near the moves of one proposal are to the first, in topological order: those far apart have
nothing to do with each other, those next to each other make one change."""


class OpSearch(Placer):
    """Moves ops that hold up the step, several proposals from the best placement at a time.

    A simulation tells what the last op waited for, what that waited for, and so on to the start of
    the step: only moves of what is on that path make the step shorter. An op that waited for a
    transfer goes to where that came from, or its producer to where it went; one that waited for its
    device goes to another, or the one before it does. Proposals that gained are combined in the
    next batch. A placement that is worse by less than a mean op takes may become the next to start
    from, as in threshold accepting.
    """

    name = "op-search"
    endless = True

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        super().__init__(problem)
        self._rng = np.random.default_rng(seed)
        self._simulator = Simulator(problem, threads=1)
        seconds = np.where(problem.allowed.T, problem.group_seconds, np.inf).min(axis=0)
        self._tolerance = float(seconds.mean())
        self._now: _Known | None = None
        self._moves = np.zeros((0, 2), dtype=np.int64)
        """[M, 2] group and device: what may be done about the path of `_now`, in topological
        order; computed when it is asked for."""
        self._combined: IndexArray | None = None

    def ask(self, count: int) -> list[Placement]:
        if self._now is None:
            return []
        base = self._now.devices
        if not len(self._moves):
            self._moves = self._find_moves(base)
        proposals = [] if self._combined is None else [self._combined]
        self._combined = None
        while len(proposals) < min(count, _BATCH):
            changed = base.copy()
            moves = self._drawn()
            changed[moves[:, 0]] = moves[:, 1]
            proposals.append(changed)
        return [Placement.of(self.problem, devices) for devices in proposals]

    def tell(self, trials: Sequence[Trial]) -> None:
        known = [_Known(_score(trial), trial.placement.devices) for trial in trials]
        known = [one for one in known if one.score[0] < 2]
        if not known:
            return
        best = min(known, key=lambda one: one.score)
        now = self._now
        if now is None:
            self._start_from(best)
            return
        gains = [one for one in known if one.score < now.score]
        # A start that others found is in another place altogether: nothing to combine with.
        gains = [one for one in gains if self._is_near(one)]
        if len(gains) > 1:
            combined = now.devices.copy()
            for one in sorted(gains, key=lambda one: one.score, reverse=True):
                different = np.flatnonzero(one.devices != now.devices)
                combined[different] = one.devices[different]
            self._combined = combined
        loss = self._tolerance * self._rng.random()
        if best.score < (now.score[0], now.score[1] + loss):
            self._start_from(best)

    def _start_from(self, known: _Known) -> None:
        self._now = known
        self._moves = self._moves[:0]

    def _is_near(self, known: _Known) -> bool:
        assert self._now is not None
        return int(np.count_nonzero(known.devices != self._now.devices)) <= _BATCH * _REACH

    def _drawn(self) -> IntArray:
        """[m, 2] moves that are near each other."""
        if not len(self._moves):
            # Nothing holds up anything, or nothing may move: any group, anywhere.
            group = int(self._rng.integers(self.problem.num_groups))
            choice = np.flatnonzero(self.problem.allowed[group])
            return np.array([[group, self._rng.choice(choice)]])
        first = int(self._rng.integers(len(self._moves)))
        count = int(self._rng.exponential(_MEAN_MOVES))
        low, high = max(0, first - _REACH), min(len(self._moves), first + _REACH)
        others = self._rng.integers(low, high, size=count)
        drawn: IntArray = self._moves[np.append(others, first)]
        return drawn

    def _find_moves(self, devices: IndexArray) -> IntArray:
        step = self._simulator.record(devices)
        group_of = self.problem.grouping.group_of
        waiting, awaited, kind = _path(
            step.op_start, step.op_end, step.op_ready, step.op_cause,
            step.op_before.astype(np.int64), np.array(self._simulator.flow.use_producer),
        )  # fmt: skip
        later, earlier = group_of[waiting], group_of[awaited]
        sent, queued = kind == _TRANSFER, kind == _DEVICE
        parts = [
            np.stack([later[sent], devices[earlier[sent]]], axis=1),
            np.stack([earlier[sent], devices[later[sent]]], axis=1),
        ]
        for device in range(self.problem.num_devices):
            for groups in (later[queued], earlier[queued]):
                parts.append(np.stack([groups, np.full(len(groups), device)], axis=1))
        moves = np.concatenate(parts).astype(np.int64)
        changes = devices[moves[:, 0]] != moves[:, 1]
        moves = moves[changes & self.problem.allowed[moves[:, 0], moves[:, 1]]]
        result: IntArray = moves[np.argsort(moves[:, 0], kind="stable")]
        return result


class _Known:
    """A placement that was tried. Less is better of its score: first whether it fits, then how long
    its step takes or how many bytes are missing."""

    def __init__(self, score: tuple[int, float], devices: IndexArray) -> None:
        self.score, self.devices = score, devices


def _score(trial: Trial) -> tuple[int, float]:
    measurement = trial.measurement
    if measurement.ok:
        return 0, measurement.mean_seconds
    if measurement.outcome is Outcome.OUT_OF_MEMORY and measurement.peak_bytes:
        return 1, float(max(measurement.peak_bytes))
    return 2, 0.0


_OP, _DEVICE, _TRANSFER = 0, 1, 2
"""What an op waits for last: another op on its device, the device itself, or a transfer."""


@compiled
def _path(
    start: FloatArray,
    end: FloatArray,
    ready: FloatArray,
    cause: IntArray,
    before: IntArray,
    use_producer: IndexArray,
) -> tuple[IntArray, IntArray, IntArray]:
    """From the op that ends last to the start of the step: each op, the one it waited for, and how.

    `cause` and `before` are as in `Recording`.
    """
    n = len(start)
    waiting, awaited = np.zeros(n, np.int64), np.zeros(n, np.int64)
    kind = np.zeros(n, np.int64)
    op, count = int(np.argmax(end)), 0
    while count < n:
        if before[op] < n and ready[op] < start[op]:
            other, how = int(before[op]), 1
        elif cause[op] >= n:
            other, how = int(use_producer[cause[op] - n]), 2
        elif cause[op] >= 0:
            other, how = int(cause[op]), 0
        else:
            break
        waiting[count], awaited[count], kind[count] = op, other, how
        count += 1
        op = other
    return waiting[:count], awaited[:count], kind[:count]
