"""A plan: the device of everything in a module, to be applied to it now or later."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright.backends.pytorch import exporting
from placewright.backends.pytorch.exporting import Inputs, Task, first_line
from placewright.backends.pytorch.modules import Units, segments
from placewright.backends.pytorch.placed import PlacedModule, hook_modules, put_tensors
from placewright.errors import PlacementError
from placewright.files import read_json, write_json

FORMAT = "placewright-torch-plan/1"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where each op, tensor and module of one PyTorch module goes. Immutable; moves nothing."""

    model: str
    """Class of the module."""
    training: bool
    """Whether it was in training mode, which decides what its ops are."""
    inputs: Inputs
    """Examples of what it takes; shapes count, values do not."""
    devices: Mapping[str, str]
    """Device of the cluster -> what torch calls it."""
    device_of_node: Mapping[str, str]
    """Node of the exported graph -> device of the cluster. Empty where the module could not be
    exported and is placed module by module."""
    device_of_tensor: Mapping[str, str]
    """The same for parameters and buffers, by their names in the module."""
    units: Units
    device_of_unit: Mapping[str, tuple[str, ...]]
    """Unit -> the devices of its ops and tensors; more than one where it is split."""
    tied: Mapping[str, str] = field(default_factory=dict)

    def apply(self, model: torch.nn.Module, *, level: str | None = None) -> torch.nn.Module:
        """A module that runs as planned. The parameters of `model` move, as with `Module.to`, and
        are the new module's too, under the same names.

        Args:
            model: the module that was planned, or a fresh one of the same kind.
            level: `op` runs its graph op by op, for inputs of the planned shapes only; `module`
                runs the module's own code with transfers between units, which must not be split.
                By default `op` where there is a graph.
        """
        level = level or ("op" if self.device_of_node else "module")
        if level not in ("op", "module"):
            raise PlacementError(f"level is {level!r}; there are 'op' and 'module'")
        if type(model).__name__ != self.model:
            raise PlacementError(
                f"the plan is for a {self.model}, and this is a {type(model).__name__}"
            )
        lanes = [text for text in self.devices.values() if "/" in text]
        if lanes:
            raise PlacementError(
                f"the plan has {lanes[0]}, and a module runs on whole devices; "
                "placewright.torch.accelerate runs a module on the streams of one GPU, and parts "
                "of one are for measuring"
            )
        devices = {name: torch.device(text) for name, text in self.devices.items()}
        real = {name: _real(device) for name, device in devices.items()}
        if level == "module":
            units = self._whole_units("running module by module")
            put_tensors(model, self._tensors_by_unit(units), real)
            return hook_modules(model, units, real, self.units)
        if not self.device_of_node:
            raise PlacementError(
                f"{self.model} could not be exported, so it cannot run op by op; apply the plan "
                "with level='module'"
            )
        if model.training != self.training:
            mode = "train()" if self.training else "eval()"
            raise PlacementError(
                f"the plan is for {self.model} in {'training' if self.training else 'eval'} mode; "
                f"call its {mode} first"
            )
        put_tensors(model, self.device_of_tensor, real)
        try:
            exported = exporting.export(model, self.inputs, Task())
        except Exception as fault:
            raise PlacementError(
                f"{self.model} cannot be exported as it was when it was planned: "
                f"{first_line(fault)}"
            ) from None
        self._check_nodes(exported)
        return PlacedModule(
            model, exported, self.inputs, self.device_of_node, self.device_of_tensor, real
        )

    def _check_nodes(self, exported: exporting.Exported) -> None:
        calls = [n.name for n in exported.module.graph.nodes if n.op == "call_function"]
        strange = [name for name in calls if name not in self.device_of_node]
        # Ops that compute nothing, such as assertions, have no place of their own.
        if len(strange) > max(3, len(calls) // 5):
            raise PlacementError(
                f"the plan was made for another {self.model}: it knows no op {strange[0]!r} and "
                f"{len(strange) - 1} more; plan this one"
            )

    def _whole_units(self, what: str) -> dict[str, str]:
        """Unit -> its device; raises where a unit, or a set of units, has several."""
        result: dict[str, str] = {}
        for of in self.units.sets:
            members = [unit for unit in of if unit in self.units.holding]
            devices = dict.fromkeys(d for u in members for d in self.device_of_unit.get(u, ()))
            for unit in members:
                own = self.device_of_unit.get(unit, ())
                if len(own) > 1:
                    raise PlacementError(
                        f"{unit or self.model} is split over {', '.join(own)}, and {what} moves "
                        "whole modules; make the plan with level='module'"
                    )
            if len(devices) > 1:
                shown = ", ".join(members[:3]) + (", ..." if len(members) > 3 else "")
                raise PlacementError(
                    f"{shown} share a parameter or are combined right after they ran, and are on "
                    f"{', '.join(devices)}; for {what} make the plan with level='module'"
                )
            if devices:
                result.update(dict.fromkeys(members, next(iter(devices))))
        return result

    def _tensors_by_unit(self, units: Mapping[str, str]) -> dict[str, str]:
        from placewright.backends.pytorch.modules import unit_of

        result = {}
        for name, device in self.device_of_tensor.items():
            unit = unit_of(name, units)
            result[name] = device if unit is None else units[unit]
        return result

    def device_map(self) -> dict[str, str]:
        """What `accelerate.dispatch_model` and `from_pretrained(device_map=...)` take.

        Raises `PlacementError` with the reason where the plan splits what they keep whole.
        """
        units = self._whole_units("a device_map")
        names = set(units.values())
        if len(names) == 1:
            return {"": self.devices[names.pop()]}
        return {path: self.devices[device] for path, device in units.items()}

    def split_points(self) -> dict[str, Any]:
        """`split_spec` of `torch.distributed.pipelining.pipeline`: where each further stage begins.

        Raises `PlacementError` where the plan is no chain of stages, each on a device of its own.
        """
        from torch.distributed.pipelining import SplitPoint

        units = self._whole_units("a pipeline")
        runs = segments(self.units, units)
        seen: dict[str, str] = {}
        for path, device in runs:
            if device in seen:
                raise PlacementError(
                    f"{path} is on {device}, which also has the stage that begins with "
                    f"{seen[device] or self.model}; a pipeline goes through each device once"
                )
            seen[device] = path
        return {path: SplitPoint.BEGINNING for path, _ in runs[1:]}

    # --- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        write_json(path, self.to_json(), PlacementError)

    @staticmethod
    def load(path: str | Path) -> Plan:
        return Plan.from_json(read_json(path, PlacementError, what="plan"), where=str(path))

    def to_json(self) -> dict[str, Any]:
        leaves, spec = pytree.tree_flatten((tuple(self.inputs.args), dict(self.inputs.kwargs)))
        return {
            "format": FORMAT,
            "model": self.model,
            "training": self.training,
            "inputs": {
                "tree": _tree_to_json(spec),
                "leaves": [_leaf_to_json(leaf) for leaf in leaves],
            },
            "devices": dict(self.devices),
            "nodes": dict(self.device_of_node),
            "tensors": dict(self.device_of_tensor),
            "units": {
                "order": list(self.units.order),
                "sets": [list(of) for of in self.units.sets],
                "called": self.units.called,
                "holding": sorted(self.units.holding),
            },
            "unit_devices": {unit: list(of) for unit, of in self.device_of_unit.items()},
            "tied": dict(self.tied),
        }

    @staticmethod
    def from_json(document: object, *, where: str) -> Plan:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlacementError(f"{where}: not a plan for a PyTorch module ({FORMAT})")
        try:
            inputs = document["inputs"]
            spec = pytree.treespec_loads(json.dumps(_checked_tree(inputs["tree"])))
            leaves = [_leaf_from_json(leaf) for leaf in inputs["leaves"]]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            units = document["units"]
            return Plan(
                model=str(document["model"]),
                training=bool(document["training"]),
                inputs=Inputs(args, kwargs),
                devices=_texts(document["devices"]),
                device_of_node=_texts(document["nodes"]),
                device_of_tensor=_texts(document["tensors"]),
                units=Units(
                    order=tuple(units["order"]),
                    sets=tuple(tuple(of) for of in units["sets"]),
                    called=int(units["called"]),
                    holding=frozenset(units["holding"]),
                ),
                device_of_unit={u: tuple(of) for u, of in document["unit_devices"].items()},
                tied=_texts(document["tied"]),
            )
        except (
            KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError
        ) as fault:  # fmt: skip
            raise PlacementError(f"{where}: malformed plan: {first_line(fault)}") from None


_CONTAINERS = {
    "builtins.tuple": False,
    "builtins.list": False,
    "builtins.dict": True,
    "collections.OrderedDict": True,
}
"""What inputs in a file can be in, and whether it has keys."""

_MOST_LEVELS = 100


def _tree_to_json(spec: pytree.TreeSpec) -> Any:
    try:
        return _checked_tree(json.loads(pytree.treespec_dumps(spec)))
    except (TypeError, ValueError, NotImplementedError) as fault:
        raise PlacementError(f"a plan of these inputs cannot be written: {fault}") from None


def _checked_tree(document: Any) -> Any:
    """The same, or an error: for other kinds of containers PyTorch would import the modules that a
    file names."""
    version, tree = document
    if version != 1:
        raise ValueError(f"inputs of version {version!r}")
    _check_tree(tree, _MOST_LEVELS)
    return document


def _check_tree(node: Any, levels: int) -> None:
    kind, context, children = node["type"], node["context"], node["children_spec"]
    if not levels:
        raise ValueError("inputs are nested too deeply")
    if kind is None and context is None and not children:
        return
    if kind not in _CONTAINERS:
        raise ValueError(f"inputs in a {kind}; use tuples, lists and dicts")
    keys = json.loads(context)
    if not _CONTAINERS[kind]:
        fits = keys is None
    else:
        fits = isinstance(keys, list) and len(keys) == len(children)
        fits = fits and all(isinstance(key, str | int | float) for key in keys)
    if not fits:
        raise ValueError(f"inputs in a {kind} with {context}")
    for child in children:
        _check_tree(child, levels - 1)


def _texts(table: Any) -> dict[str, str]:
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in table.items()):
        raise TypeError("a table of devices has something else than names in it")
    return dict(table)


def _leaf_to_json(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise PlacementError(
        f"an example input is a {type(leaf).__name__}, which cannot be written to a file; pass "
        "tensors and plain values"
    )


def _leaf_from_json(leaf: Any) -> Any:
    if not isinstance(leaf, dict):
        return leaf
    dtype = getattr(torch, str(leaf["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {leaf['dtype']!r}")
    return torch.empty([int(size) for size in leaf["shape"]], dtype=dtype, device="meta")


def _real(device: torch.device) -> torch.device:
    """There is one CPU, however many of it a plan has."""
    return torch.device("cpu") if device.type == "cpu" else device


def example_inputs(inputs: Inputs) -> Inputs:
    """The shapes of example inputs, without their memory."""

    def shape_of(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else copy.copy(leaf)

    args, kwargs = pytree.tree_map(shape_of, (tuple(inputs.args), dict(inputs.kwargs)))
    return Inputs(args, kwargs)
