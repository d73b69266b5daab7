"""A module that runs as a captured graph: what users call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.streams import plan as plans
from placewright.backends.pytorch.streams.built import Built
from placewright.backends.pytorch.streams.device import Turns
from placewright.backends.pytorch.streams.net import UnsuitableError
from placewright.backends.pytorch.streams.plan import StreamPlan
from placewright.backends.pytorch.streams.timelines import Timelines

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is called for inputs of certain shapes."""

    plan: StreamPlan | None = None
    """None where nothing could be captured."""
    built: Built | None = None
    """The captured graph; None where something else was faster, or nothing could be captured."""
    call: Callable[..., Any] | None = None
    """What is called instead, with the inputs as they are."""
    why_not: str = ""
    """Why nothing was captured."""
    timelines: Callable[[], Timelines] | None = None
    """Takes the times of each group, as they are and as they were expected."""


@dataclass(frozen=True)
class _Last:
    """The last call."""

    key: Any
    entry: Entry


Maker = Callable[[Sequence[Any], Mapping[str, Any]], Entry]
"""Searches for what is fastest for such arguments."""


class Reporter(Protocol):
    """Writes a page about a plan and its timelines."""

    def __call__(
        self, path: str | Path, plan: StreamPlan, timelines: Timelines | None, *, model: str,
        device: str,
    ) -> Path: ...  # fmt: skip


class Accelerated:
    """A module as one captured graph for each shape of its inputs. Call it like the module.

    Outputs are copies, without gradients; inputs are copied before each call. Parameters are those
    of the module, and followed where they are written to; after writing to their `data` call
    `refresh`, as some are folded into others. What cannot be captured runs as the module itself,
    and a line in the log says why.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        maker: Maker,
        *,
        name: str = "",
        device: str = "",
        most_shapes: int = 8,
        turns: Turns | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self._module = module
        self._maker = maker
        self._name = name or type(module).__name__
        self._device = device
        self._reporter = reporter
        self._most_shapes = most_shapes
        self._entries: dict[Any, Entry] = {}
        self._turns = turns or Turns()
        """Shared with others where the graphs of all of them share memory."""
        self._last: _Last | None = None

    @property
    def module(self) -> Callable[..., Any]:
        """The module as it was given."""
        return self._module

    @property
    def entries(self) -> tuple[Entry, ...]:
        """One for each shape of the inputs so far."""
        return tuple(self._entries.values())

    @property
    def plans(self) -> tuple[StreamPlan, ...]:
        """What was found, for each shape of the inputs so far."""
        return tuple(entry.plan for entry in self.entries if entry.plan is not None)

    @property
    def verdict(self) -> str:
        """What was gained, a sentence for each shape of the inputs."""
        return "; ".join(
            entry.plan.verdict if entry.plan is not None else f"as it is: {entry.why_not}"
            for entry in self.entries
        )

    def save(self, path: str | Path) -> None:
        """Writes the plans, for `placewright.torch.accelerate(..., plan=path)`."""
        plans.save(self.plans, path, model=self._name, device=self._device)

    def timelines(self, number: int = 0) -> Timelines:
        """When each group ran on its stream, measured and expected; of the shape of that number."""
        make = self.entries[number].timelines
        if make is None:
            raise ValueError("nothing is captured for these inputs, so there is no timeline")
        with self._turns.lock:
            return make()

    def report(self, path: str | Path, number: int = 0) -> Path:
        """Writes an HTML page: what ran when on which stream, measured and expected, and what else
        was tried; of the shape of that number. Needs the extra `report`."""
        entry = self.entries[number]
        if entry.plan is None:
            raise ValueError(f"nothing was found for these inputs to report: {entry.why_not}")
        assert self._reporter is not None
        lines = None if entry.timelines is None else self.timelines(number)
        return self._reporter(path, entry.plan, lines, model=self._name, device=self._device)

    def refresh(self) -> None:
        """Takes over the module's parameters as they are now."""
        with self._turns.lock:
            for entry in self.entries:
                if entry.built is not None:
                    self._turns.take(entry.built.ready.place)
                    entry.built.lowered.refresh()

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        """Searches for what is fastest for such inputs, unless that was done before."""
        leaves, spec = flat(tuple(args), dict(kwargs))
        return self._entry(self._key(leaves, spec), args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flat(args, kwargs)
        last = self._last
        if last is None or not self._is_like(last, leaves, spec):
            key = self._key(leaves, spec)
            entry = self._entry(key, args, kwargs)
        else:
            entry = last.entry
        if entry.built is None:
            call = self._module if entry.call is None else entry.call
            return call(*args, **kwargs)
        if torch.is_grad_enabled() and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        ):
            self._say_once("an input requires a gradient, which captured calls do not give")
            return self._module(*args, **kwargs)
        return self._run(entry.built, leaves)

    def _is_like(self, last: _Last, leaves: Sequence[Any], spec: Any) -> bool:
        """Whether a call is like the last one, as most are; without making a key of it."""
        known, forms, cast, training = last.key
        if spec != known or training != getattr(self._module, "training", False):
            return False
        if torch.is_autocast_enabled("cuda") != (cast is not None):
            return False
        if cast is not None and torch.get_autocast_dtype("cuda") != cast:
            return False
        for leaf, form in zip(leaves, forms, strict=True):
            if isinstance(leaf, torch.Tensor):
                if leaf.shape != form[0] or leaf.dtype != form[1] or leaf.device != form[2]:
                    return False
            elif type(leaf) is not form[0] or leaf != form[1]:
                return False
        return True

    def _run(self, built: Built, leaves: Sequence[Any]) -> Any:
        with self._turns.lock:
            self._turns.take(built.ready.place)
            return built(leaves)

    def _key(self, leaves: Sequence[Any], spec: Any) -> Any:
        forms: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                forms.append((leaf.shape, leaf.dtype, leaf.device))
            else:
                forms.append((type(leaf), leaf))
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return spec, tuple(forms), cast, getattr(self._module, "training", False)

    def _entry(self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        with self._turns.lock:
            try:
                if key in self._entries:
                    self._last = _Last(key=key, entry=self._entries[key])
                    return self._last.entry
            except TypeError:  # an input that cannot be compared
                self._say_once("an input is neither a tensor nor a plain value")
                return Entry(why_not="inputs of another kind")
            if len(self._entries) >= self._most_shapes:
                self._say_once(f"inputs have more than {self._most_shapes} shapes")
                return Entry(why_not="more shapes than most_shapes")
            try:
                entry = self._maker(args, kwargs)
            except UnsuitableError as reason:
                logger.warning("%s runs as it is: %s", self._name, reason)
                entry = Entry(why_not=str(reason))
            self._entries[key] = entry
            self._last = _Last(key=key, entry=entry)
            return entry

    def _say_once(self, text: str) -> None:
        said = self.__dict__.setdefault("_said", set())
        if text not in said:
            said.add(text)
            logger.warning("%s runs as it is: %s", self._name, text)


def flat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """The leaves of some arguments, and something that tells arguments of other kinds apart."""
    if not kwargs and all(type(arg) is torch.Tensor for arg in args):
        return args, len(args)  # the usual case, where every microsecond counts
    return pytree.tree_flatten((args, kwargs))
