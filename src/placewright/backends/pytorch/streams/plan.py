"""What was found for a module and inputs of certain shapes: it can be saved, and applied again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from placewright.backends.pytorch.streams.groups import Fusion
from placewright.backends.pytorch.streams.schedule import Schedule
from placewright.errors import PlacementError
from placewright.files import read_json, write_json
from placewright.schema import Maybe, Table, check, number, positive, text, whole

FORMAT = "placewright-streams/1"

Form = tuple[tuple[int, ...], str]
"""Shape and type of a tensor."""


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """How a module is run for inputs of certain shapes."""

    inputs: tuple[Form, ...]
    """Of the tensors among the flat inputs."""
    chosen: str
    """What was fastest: `streams`, `one stream`, these with `, plain` for the module's own ops,
    `eager`, or the name of another candidate."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of a call, of every candidate of the final comparison."""
    fusion: Fusion = Fusion.NONE
    fingerprint: str = ""
    """Of the groups; empty where the module runs without any."""
    groups: tuple[str, ...] = ()
    """Names of the groups, in order."""
    kernels: tuple[str, ...] = ()
    """For each group, what computes it."""
    group_seconds: tuple[float, ...] = ()
    """What each takes alone, measured."""
    group_demand: tuple[float, ...] = ()
    """For each group, the share of the chip that it takes, measured; 0 where it is not known."""
    streams: tuple[int, ...] = ()
    """For each group, its stream."""
    order: tuple[int, ...] = ()
    """In which groups are issued."""
    one_stream_seconds: float | None = None
    """Of the module as it is, captured on one stream: replays alone, without copies."""
    streams_seconds: float | None = None
    """Of this plan, likewise."""
    found: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a replay of the best that each way of searching has found."""
    trials: int = 0
    """Schedules that were captured and timed."""
    search_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """What did not work, and why."""

    @property
    def on_streams(self) -> bool:
        """Whether there is something to capture."""
        return bool(self.fingerprint)

    @property
    def schedule(self) -> Schedule:
        return Schedule(streams=self.streams, order=self.order)

    @property
    def verdict(self) -> str:
        """What was gained, in a sentence."""
        mine = self.seconds.get(self.chosen)
        if mine is None:
            return f"{self.chosen}; nothing was compared"
        others = {
            name: seconds / mine for name, seconds in self.seconds.items() if name != self.chosen
        }
        compared = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in others.items())
        count = len(set(self.streams))
        if count > 1:
            what = f"{count} {self.chosen}"
        elif self.chosen == "one stream":
            what = "one stream: nothing to gain from more"
        else:
            what = f"no streams: nothing to gain; {self.chosen}"
        return f"{what}, {mine * 1e3:.3f} ms a call" + (f" ({compared})" if compared else "")

    def to_json(self) -> dict[str, Any]:
        document = dataclasses.asdict(self)
        document["inputs"] = [[list(shape), dtype] for shape, dtype in self.inputs]
        return document

    @staticmethod
    def from_json(document: object, *, where: str) -> StreamPlan:
        check(document, _DOCUMENT, PlacementError, where=f"{where}: malformed plan of streams")
        assert isinstance(document, dict)
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in document.items()
        }
        strange = next((key for key in given if key not in _DOCUMENT), None)
        if strange is not None:
            raise PlacementError(f"{where}: malformed plan of streams: unknown key {strange!r}")
        given["inputs"] = tuple((tuple(shape), dtype) for shape, dtype in given["inputs"])
        given["fusion"] = Fusion(given["fusion"])
        plan = StreamPlan(**given)
        tables = (plan.kernels, plan.group_seconds, plan.group_demand, plan.streams)
        count = len(plan.groups)
        lengths = {count, *map(len, tables)}
        if len(lengths) > 1 or sorted(plan.order) != list(range(count)):
            raise PlacementError(f"{where}: malformed plan of streams: its tables do not match")
        times = (*plan.seconds.values(), *plan.group_seconds, *plan.group_demand)
        if not all(0 <= value < math.inf for value in times):
            raise PlacementError(f"{where}: malformed plan of streams: times and demands")
        if plan.streams and not 0 <= min(plan.streams) <= max(plan.streams) < _MOST_STREAMS:
            raise PlacementError(f"{where}: malformed plan of streams: numbers of streams")
        return plan


_MOST_STREAMS = 32


def _fusion(value: object) -> str:
    return "" if value in tuple(Fusion) else f"one of {', '.join(Fusion)}"


_DOCUMENT = {
    "inputs": [([whole], text)],
    "chosen": text,
    "seconds": Table(positive),
    "fusion": _fusion,
    "fingerprint": text,
    "groups": [text],
    "kernels": [text],
    "group_seconds": [number],
    "group_demand": [number],
    "streams": [whole],
    "order": [whole],
    "one_stream_seconds": Maybe(number),
    "streams_seconds": Maybe(number),
    "found": Table(number),
    "trials": whole,
    "search_seconds": number,
    "notes": [text],
}


def forms_of(leaves: Sequence[Any]) -> tuple[Form, ...]:
    """Shapes and types of the tensors among flat inputs."""
    return tuple(
        (tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )


def save(plans: Sequence[StreamPlan], path: str | Path, *, model: str, device: str) -> None:
    """Writes plans for one module."""
    document = {
        "format": FORMAT,
        "model": model,
        "device": device,
        "torch": torch.__version__,
        "plans": [plan.to_json() for plan in plans],
    }
    write_json(path, document, PlacementError)


def given(plan: str | Path | Sequence[StreamPlan] | None) -> tuple[StreamPlan, ...]:
    """Plans, or those of a file."""
    return load(plan) if isinstance(plan, str | Path) else tuple(plan or ())


def load(path: str | Path) -> tuple[StreamPlan, ...]:
    """Reads what `save` wrote."""
    document = read_json(path, PlacementError, what="a plan of streams")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlacementError(f"{path}: not a plan of streams ({FORMAT})")
    plans = document.get("plans")
    if not isinstance(plans, list):
        raise PlacementError(f"{path}: malformed plan of streams: it holds no plans")
    return tuple(StreamPlan.from_json(plan, where=str(path)) for plan in plans)
