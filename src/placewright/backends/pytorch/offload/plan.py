"""A plan for a module that does not fit: where each weight lives, and who computes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewright.errors import PlacementError
from placewright.files import read_json, write_json
from placewright.schema import Maybe, Table, check, number, positive, text, whole
from placewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch

    from placewright.backends.pytorch.offload.links import Link

FORMAT = "placewright-torch-offload/1"
HOST = "cpu"
"""As a home: page-locked memory of the host. As what computes: the host's cores."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """A module that is moved whole."""

    path: str
    size: int
    """Bytes of its weights."""
    home: str
    """Where its weights live: the device, or `cpu`."""
    computed_on: Mapping[str, str]
    """Shape -> the device, or `cpu`. Where that is not its home, its weights travel each time."""

    def travels(self, shape: str) -> bool:
        return self.computed_on[shape] != self.home


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One kind of call in a workload."""

    name: str
    rows: int
    """Of the first input: tokens of a batch, say. Calls with other numbers of rows do as the shape
    does whose number is nearest."""
    weight: float = 1.0
    """How often it is called, in proportion."""
    seconds: float | None = None
    """Predicted, of a call."""
    floor_seconds: float | None = None
    """What no plan within these memories can be faster than."""


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """For one module and a workload. Immutable; moves nothing."""

    model: str
    """Class of the module."""
    device: str
    """What computes beside the host, as torch calls it. A device such as cpu:1 is a memory of its
    own that the same CPU computes with, to try things without a GPU."""
    units: tuple[UnitPlan, ...]
    """In the order in which they are called; others after them."""
    shapes: tuple[Shape, ...]
    window_bytes: int
    """Of the buffer on the device through which weights travel."""
    memory_bytes: int | None = None
    """What the device may give."""
    working_bytes: int = 0
    """Of that, for activations and caches."""
    source: str = "estimated"
    """Whether the times are `estimated` from a description of the machine or `measured` on it."""
    notes: tuple[str, ...] = field(default=())
    """What whoever reads the plan should know."""

    def __post_init__(self) -> None:
        names = [shape.name for shape in self.shapes]
        if not names or len(set(names)) < len(names):
            raise PlacementError(f"a plan needs shapes, with different names, not {names}")
        for unit in self.units:
            self._check(unit, names)

    def _check(self, unit: UnitPlan, shapes: Sequence[str]) -> None:
        missing = [name for name in shapes if name not in unit.computed_on]
        places = (self.device, HOST)
        strange = next((p for p in (unit.home, *unit.computed_on.values()) if p not in places), "")
        if missing or strange:
            what = f"no device for the shape {missing[0]!r}" if missing else f"a device {strange!r}"
            raise PlacementError(f"{unit.path} has {what}; there are {', '.join(places)}")
        if unit.home == self.device and HOST in unit.computed_on.values():
            raise PlacementError(
                f"{unit.path} lives on {self.device} and is computed on {HOST}; weights travel to "
                "the device only, so give it a home on the host"
            )
        travels = any(unit.travels(name) for name in shapes)
        if travels and unit.size > self.window_bytes:
            raise PlacementError(
                f"{unit.path} travels and has {format_bytes(unit.size)} of weights, and the buffer "
                f"for that is {format_bytes(self.window_bytes)}; make it larger, or compute "
                f"{unit.path} on {HOST}"
            )

    # --- questions -------------------------------------------------------------------------------

    def shape(self, name: str) -> Shape:
        return next(shape for shape in self.shapes if shape.name == name)

    @property
    def resident_bytes(self) -> int:
        """Of weights that live on the device."""
        return sum(unit.size for unit in self.units if unit.home == self.device)

    @property
    def host_bytes(self) -> int:
        return sum(unit.size for unit in self.units if unit.home == HOST)

    def travelling(self, shape: str) -> list[UnitPlan]:
        return [unit for unit in self.units if unit.travels(shape)]

    def on_host(self, shape: str) -> list[UnitPlan]:
        return [u for u in self.units if u.computed_on[shape] == HOST and u.size]

    def apply(
        self,
        model: torch.nn.Module,
        *,
        checkpoint: str | Path | None = None,
        link: Link | None = None,
    ) -> Any:
        """The module, placed: its parameters move to their homes, and it runs as planned.

        Args:
            model: the module that was planned, or another of its kind.
            checkpoint: safetensors files with its weights, for a module on `meta`.
            link: how weights travel, where that is not to be found by the device's name.
        """
        from placewright.backends.pytorch.offload.checkpoint import load_checkpoint
        from placewright.backends.pytorch.offload.runtime import offload

        empty = next((n for n, t in model.named_parameters() if t.is_meta), None)
        if empty is not None and checkpoint is None:
            raise PlacementError(
                f"{empty!r} is on the meta device and has no values; give checkpoint=, the "
                "safetensors files with the weights"
            )
        placed = offload(model, self, link)
        if checkpoint is not None:
            load_checkpoint(placed, checkpoint)
        return placed

    # --- words -----------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """A few lines on where everything is and what that takes."""
        limit = "" if self.memory_bytes is None else f" of {format_bytes(self.memory_bytes)}"
        lines = [
            f"{format_bytes(self.resident_bytes)} of weights live on {self.device}, "
            f"{format_bytes(self.host_bytes)} on the host; with {format_bytes(self.window_bytes)} "
            f"for weights that travel and {format_bytes(self.working_bytes)} for activations, "
            f"caches and what goes with training {self.device} gives "
            f"{format_bytes(self.resident_bytes + self.window_bytes + self.working_bytes)}{limit}"
        ]
        for shape in self.shapes:
            travelling, by_host = self.travelling(shape.name), self.on_host(shape.name)
            said = [
                f"{len(units)} units ({format_bytes(sum(u.size for u in units))}) {how}: "
                f"{runs([u.path for u in units])}"
                for units, how in ((travelling, "travel"), (by_host, f"computed on {HOST}"))
                if units
            ]
            took = ""
            if shape.seconds is not None:
                took = f" takes {format_seconds(shape.seconds)} ({self.source}"
                if shape.floor_seconds is not None:
                    took += f"; the floor is {format_seconds(shape.floor_seconds)}"
                took += ")"
            lines.append(f"{shape.name}{took}: {'; '.join(said) or 'all weights stay'}")
        return [*lines, *self.notes]

    # --- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        write_json(path, self.to_json(), PlacementError)

    @staticmethod
    def load(path: str | Path) -> OffloadPlan:
        return OffloadPlan.from_json(
            read_json(path, PlacementError, what="offload plan"),
            where=str(path),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "device": self.device,
            "units": [
                {"path": u.path, "bytes": u.size, "home": u.home,
                 "computed_on": dict(u.computed_on)}
                for u in self.units
            ],
            "shapes": [
                {"name": s.name, "rows": s.rows, "weight": s.weight, "seconds": s.seconds,
                 "floor_seconds": s.floor_seconds}
                for s in self.shapes
            ],
            "window_bytes": self.window_bytes,
            "memory_bytes": self.memory_bytes,
            "working_bytes": self.working_bytes,
            "source": self.source,
            "notes": list(self.notes),
        }  # fmt: skip

    @staticmethod
    def from_json(document: Any, *, where: str = "plan") -> OffloadPlan:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlacementError(f"{where}: not a plan for a module that does not fit ({FORMAT})")
        check(document, _DOCUMENT, PlacementError, where=f"{where}: malformed plan")
        memory = document["memory_bytes"]
        try:
            return OffloadPlan(
                model=document["model"],
                device=document["device"],
                units=tuple(
                    UnitPlan(
                        path=u["path"], size=u["bytes"], home=u["home"],
                        computed_on=dict(u["computed_on"]),
                    )
                    for u in document["units"]
                ),
                shapes=tuple(
                    Shape(
                        name=s["name"], rows=s["rows"], weight=float(s["weight"]),
                        seconds=_number(s["seconds"]), floor_seconds=_number(s["floor_seconds"]),
                    )
                    for s in document["shapes"]
                ),
                window_bytes=document["window_bytes"],
                memory_bytes=memory,
                working_bytes=document["working_bytes"],
                source=document["source"],
                notes=tuple(document["notes"]),
            )  # fmt: skip
        except PlacementError as fault:
            raise PlacementError(f"{where}: {fault}") from None


_DOCUMENT = {
    "model": text,
    "device": text,
    "units": [{"path": text, "bytes": whole, "home": text, "computed_on": Table(text)}],
    "shapes": [
        {"name": text, "rows": whole, "weight": positive, "seconds": Maybe(number),
         "floor_seconds": Maybe(number)}
    ],
    "window_bytes": whole,
    "memory_bytes": Maybe(whole),
    "working_bytes": whole,
    "source": text,
    "notes": [text],
}  # fmt: skip


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def runs(paths: Sequence[str]) -> str:
    """`model.layers.3-5, 8, lm_head`: those with the same stem by their numbers."""
    found: list[tuple[str, list[tuple[int, int]]]] = []
    for path in paths:
        stem, _, last = path.rpartition(".")
        if not last.isdecimal():
            found.append((path, []))
            continue
        if not found or not found[-1][1] or found[-1][0] != stem:
            found.append((stem, []))
        parts, number = found[-1][1], int(last)
        if parts and parts[-1][1] + 1 == number:
            parts[-1] = parts[-1][0], number
        else:
            parts.append((number, number))
    texts = []
    for stem, parts in found:
        numbers = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
        texts.append(f"{stem}.{numbers}" if stem and numbers else stem or numbers)
    return ", ".join(texts)
