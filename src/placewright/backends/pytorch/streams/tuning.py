"""Which kernel each group gets: all that there are are run on the real inputs, compared, timed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from placewright.backends.pytorch.exporting import first_line
from placewright.backends.pytorch.streams import kernels
from placewright.backends.pytorch.streams.device import Device
from placewright.backends.pytorch.streams.groups import Fusion, Group, Grouped
from placewright.backends.pytorch.streams.issue import Run, fresh
from placewright.backends.pytorch.streams.schedule import Work

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float64: 1e-9}
"""How far a kernel's result may be from that of torch's ops, as a share of its norm."""
_TF32_TOLERANCE = 5e-3
"""Of float32: products may be rounded to TF32."""
_WORTH = 0.98
"""Another kernel than torch's is taken where it takes at most this share of the time."""
_COMPILE_SECONDS = 3e-6
"""Inductor is asked for the end of a product only where so much may be gained."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A kernel for each group, and its time."""

    names: tuple[str, ...]
    runs: tuple[Run, ...]
    seconds: tuple[float, ...]
    demand: tuple[float, ...] = ()
    """For each group, the share of the chip that it takes."""

    def work(self, grouped: Grouped) -> Work:
        """What there is to schedule."""
        return Work(seconds=self.seconds, before=grouped.before, demand=self.demand)


def untuned(grouped: Grouped) -> Tuned:
    """Torch's own ops, in equal times: for what is not scheduled."""
    count = len(grouped.groups)
    return Tuned(
        names=(kernels.ATEN,) * count,
        runs=tuple(kernels.make(group, kernels.ATEN) for group in grouped.groups),
        seconds=(1e-6,) * count,
    )


@dataclass
class _Tried:
    names: list[str]
    runs: list[Run]
    seconds: list[float]
    demand: float | None = None
    """Of the best of them."""


@dataclass(kw_only=True)
class Tuner:
    """Remembers what it has tried: groups that do the same are tried once."""

    device: Device
    stop: Callable[[], bool] = lambda: False
    """No further kernels are tried; the best so far, or torch's, is taken."""
    notes: list[str] = field(default_factory=list)
    """What did not work, in a line each."""
    _known: dict[str, _Tried] = field(default_factory=dict)

    def tune(
        self, grouped: Grouped, given: Mapping[str, Any], fusion: Fusion, *, demand: bool = True
    ) -> Tuned:
        """Runs through all groups once.

        Args:
            grouped: the groups.
            given: inputs and constants by name.
            fusion: what may be tried: torch's own ops, other libraries, or compiled kernels too.
            demand: whether to find out, too, what share of the chip each takes.
        """
        values = dict(given)
        left = {name: 0 for group in grouped.groups for name in group.outputs}
        for group in grouped.groups:
            for name in group.inputs:
                if name in left:
                    left[name] += 1
        names, runs, seconds, shares = [], [], [], []
        for group in grouped.groups:
            inputs = [values[name] for name in group.inputs]
            tried = self._try(group, inputs, fusion)
            best = _best(tried)
            names.append(tried.names[best])
            runs.append(tried.runs[best])
            seconds.append(tried.seconds[best])
            shares.append(self._demand(tried, best, inputs) if demand else 0.0)
            values.update(zip(group.outputs, fresh(tried.runs[best], inputs), strict=True))
            for name in {*group.inputs, *group.outputs}:
                if name in left:
                    left[name] -= group.inputs.count(name)
                    if not left[name] and name not in grouped.kept:
                        del values[name]
            del inputs
        return Tuned(
            names=tuple(names), runs=tuple(runs), seconds=tuple(seconds), demand=tuple(shares)
        )

    def _names(self, group: Group, fusion: Fusion) -> list[str]:
        if fusion is Fusion.NONE:
            return []
        names = kernels.names_for(group, self.device.kind)[1:]
        return [n for n in names if fusion is Fusion.REGIONS or n not in kernels.COMPILED]

    def _try(self, group: Group, inputs: Sequence[Any], fusion: Fusion) -> _Tried:
        names = self._names(group, fusion)
        key = f"{names}\n{group.code}\n{[_form(value) for value in inputs]}"
        if key in self._known:
            return self._known[key]
        tried = _Tried([], [], [])
        self._known[key] = tried
        self._add(tried, group, kernels.ATEN, inputs, None)
        if not tried.names:  # torch's own op fails: nothing can be done about it here
            kernels.make(group, kernels.ATEN)(*inputs)
            raise AssertionError(f"{group.name} could not be timed")
        wanted = tried.runs[0](*inputs)
        for name in names:
            if self.stop():
                break
            if name == "tail" and min(tried.seconds) < self._alone(group, inputs):
                continue
            self._add(tried, group, name, inputs, wanted)
        return tried

    def _add(
        self, tried: _Tried, group: Group, name: str, inputs: Sequence[Any], wanted: Any
    ) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Inductor, about torch's own modules
                run = kernels.make(group, name)
                run(*inputs)
            if wanted is not None:
                error = distance(run(*inputs), wanted)
                if not error <= tolerance(wanted):
                    self.notes.append(f"{group.name}: {name} is off by {error:.2g}; not used")
                    return
            seconds = self.device.seconds_of(run, inputs)
        except Exception as fault:  # whatever a library says that has no such kernel
            self.notes.append(f"{group.name}: {name} does not work here: {first_line(fault)}")
            return
        tried.names.append(name)
        tried.runs.append(run)
        tried.seconds.append(seconds)

    def _demand(self, tried: _Tried, best: int, inputs: Sequence[Any]) -> float:
        if tried.demand is None:
            try:
                run, seconds = tried.runs[best], tried.seconds[best]
                tried.demand = 0.0 if self.stop() else self.device.demand_of(run, inputs, seconds)
            except Exception as fault:  # no reason to do without the schedule
                self.notes.append(f"{tried.names[best]} beside itself: {first_line(fault)}")
                tried.demand = 0.0
        return tried.demand

    def _alone(self, group: Group, inputs: Sequence[Any]) -> float:
        """What the product alone takes, and what is sure to be needed beyond it."""
        try:
            return self.device.seconds_of(kernels.head(group), inputs) + _COMPILE_SECONDS
        except Exception as fault:
            self.notes.append(f"{group.name}: the product alone fails: {first_line(fault)}")
            return math.inf


def _best(tried: _Tried) -> int:
    first = tried.seconds[0]
    fastest = min(range(len(tried.seconds)), key=tried.seconds.__getitem__)
    return fastest if tried.seconds[fastest] <= first * _WORTH else 0


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), str(value.dtype))
    return repr(value)


def tolerance(values: Any) -> float:
    """Of the coarsest type among some tensors."""
    kinds = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    return max((_TOLERANCE.get(kind, _TF32_TOLERANCE) for kind in kinds), default=0.0)


def distance(made: Any, wanted: Any) -> float:
    """The largest difference of two lists of tensors, as a share of the norm; infinite where one
    has what the other has not."""
    worst = 0.0
    for a, b in zip(made, wanted, strict=True):
        if not isinstance(b, torch.Tensor):
            worst = max(worst, 0.0 if a == b else math.inf)
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        if not b.is_floating_point() or not b.numel():
            worst = max(worst, 0.0 if torch.equal(a, b) else math.inf)
            continue
        a, b = a.double(), b.double()
        # Not finite at the same places is the same; anywhere else it is not.
        bad = ~torch.isfinite(b)
        if not torch.equal(bad, ~torch.isfinite(a)):
            return math.inf
        a, b = a.masked_fill(bad, 0.0), b.masked_fill(bad, 0.0)
        norm = float(b.norm())
        error = float((a - b).norm())
        worst = max(worst, error / norm if norm else (0.0 if not error else math.inf))
    return worst
