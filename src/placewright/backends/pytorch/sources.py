"""Where modules come from on the command line: `path/to/file.py:function`,
`package.module:function` and `.pt2` files of `torch.export.save`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from placewright.backends.pytorch.exporting import Inputs, Task, first_line, quiet
from placewright.backends.pytorch.program import TorchModel
from placewright.errors import ModelError, check_settings

FUNCTION = re.compile(r"^(?P<where>.+):(?P<name>[A-Za-z_]\w*)$")
"""A function in a file or in an importable module."""

_RETURNS = (
    "it returns (module, inputs), or (module, inputs, settings) with the keywords of "
    "placewright.torch.plan: train, loss_fn, targets, optimizer"
)


def from_function(text: str) -> TorchModel:
    """Calls the function. It is the user's own code, which runs as it would in Python."""
    match = FUNCTION.match(text)
    assert match is not None, text
    module = _import(match["where"])
    function = getattr(module, match["name"], None)
    if not callable(function):
        names = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        raise ModelError(
            f"{match['where']}: has no function {match['name']!r}; it has {', '.join(names)}"
        )
    return as_model(_call(function, text), text)


def call_function(text: str) -> tuple[torch.nn.Module, Any]:
    """The module that a function returns, and what it returns besides, if anything."""
    match = FUNCTION.match(text)
    assert match is not None, text
    function = getattr(_import(match["where"]), match["name"], None)
    if not callable(function):
        raise ModelError(f"{match['where']}: has no function {match['name']!r}")
    value = _call(function, text)
    module, *others = value if isinstance(value, tuple) else (value,)
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{text}: returns a {type(module).__name__}, no module")
    return module, others[0] if others else None


def _import(where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where)
        if not path.is_file():
            raise ModelError(f"{where}: no such file")
        name = f"placewright_model_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, where
        assert spec.loader is not None, where
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and the like look their module up
        sys.path.insert(0, str(path.parent.resolve()))  # its neighbours, as when it is run
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        return module
    except ModelError:
        raise
    except Exception as fault:
        raise ModelError(
            f"{where}: cannot be imported: {type(fault).__name__}: {first_line(fault)}"
        ) from None


def _call(function: Callable[[], Any], text: str) -> Any:
    try:
        return function()
    except Exception as fault:
        raise ModelError(f"{text}: raises {type(fault).__name__}: {first_line(fault)}") from None


def as_model(value: Any, text: str) -> TorchModel:
    """What a function returned as a model."""
    if isinstance(value, TorchModel):
        return value
    if not (isinstance(value, tuple) and len(value) in (2, 3)):
        raise ModelError(f"{text}: returns a {type(value).__name__}; {_RETURNS}")
    module, inputs, *rest = value
    settings = rest[0] if rest else {}
    if not isinstance(module, torch.nn.Module) or not isinstance(settings, Mapping):
        raise ModelError(f"{text}: returns something else than a module first; {_RETURNS}")
    name = text.rpartition(":")[2]
    check_settings(f"{text}: its step", settings, (f.name for f in fields(Task)), ModelError)
    return TorchModel(module, Inputs.of(inputs), Task(**settings), name)


def from_exported_program(path: Path) -> TorchModel:
    """A `.pt2` file: the forward pass as it was exported, with the inputs it was exported with."""
    try:
        with quiet():
            program = torch.export.load(path)
    except Exception as fault:
        raise ModelError(
            f"{path}: cannot be read as a .pt2 file ({first_line(fault)}); was it written by "
            "torch.export.save of another version?"
        ) from None
    if program.example_inputs is None:
        raise ModelError(f"{path}: has no example inputs, from which the shapes of tensors follow")
    args, kwargs = program.example_inputs
    with quiet():
        module = program.module(check_guards=False)
    return TorchModel(module, Inputs(tuple(args), dict(kwargs)), Task(), path.stem)


def refuse_checkpoint(path: Path) -> None:
    """A pickled file may hold code and holds no graph; it is not even opened."""
    raise ModelError(
        f"{path}: a pickled checkpoint holds weights, not what is computed, and may run code when "
        "it is opened; give FILE.py:FUNCTION that makes the module, or a .pt2 of torch.export.save"
    )
