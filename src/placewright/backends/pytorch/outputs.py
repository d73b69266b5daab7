"""Objects among a module's outputs that torch's trees do not know, such as the caches of keys and
values that language models return: taken apart into their tensors while a graph is exported, and
made anew from the graph's outputs in each call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.buffers import written_in_place

_MOST_LEVELS = 16
"""What lies deeper is not looked for."""


def opened(outputs: Any) -> Any:
    """`outputs` with every such object that holds tensors in a form that can be exported."""
    return pytree.tree_map(lambda leaf: _Opened(leaf) if _is_object(leaf) else leaf, outputs)


@contextlib.contextmanager
def opening(module: torch.nn.Module) -> Iterator[None]:
    """Meanwhile `module.forward` returns its outputs opened, and writes to buffers that it would
    assign; the names below the module stay what they are, as they would not in a module around
    it."""
    own = module.__dict__.get("forward")
    forward = module.forward

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with written_in_place(module):
            outputs = forward(*args, **kwargs)
        return opened(outputs)

    module.__dict__["forward"] = call
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


class OutputTree:
    """How what a graph of opened outputs gives becomes what the module returns."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self._spec = spec
        self._is_leaf = spec == pytree.tree_structure(0)
        self._has_objects = _has_objects(spec)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if self._is_leaf:
            return leaves[0]
        outputs = pytree.tree_unflatten(list(leaves), self._spec)
        if not self._has_objects:
            return outputs
        return pytree.tree_map(
            lambda leaf: leaf.value if isinstance(leaf, _Opened) else leaf,
            outputs,
            is_leaf=lambda node: isinstance(node, _Opened),
        )


def _has_objects(spec: pytree.TreeSpec) -> bool:
    below = (spec.child(number) for number in range(spec.num_children))
    return spec.type is _Opened or any(map(_has_objects, below))


class _Opened:
    """An object to be taken apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class _Tensor:
    number: int


@dataclass(frozen=True)
class _Device:
    """That of the object's first tensor: graphs are exported for another one than they run on."""


@dataclass(frozen=True)
class _Object:
    of: type[Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class _Items:
    """A dict, list or tuple: of the object's own, so a new one for each call."""

    of: type[Any]
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


def _flatten(opened: _Opened) -> tuple[list[torch.Tensor], Any]:
    tensors: list[torch.Tensor] = []
    return tensors, _description(opened.value, tensors)


def _unflatten(tensors: Any, description: Any) -> _Opened:
    return _Opened(_made(description, list(tensors)))


pytree.register_pytree_node(_Opened, _flatten, _unflatten)


def _description(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Tensor(len(tensors) - 1)
    if isinstance(value, torch.device):
        return _Device()
    parts = _parts(value)
    if parts is None:
        return value
    keys, values = parts
    described = tuple(_description(part, tensors) for part in values)
    return (_Items if type(value) in (dict, list, tuple) else _Object)(
        type(value), tuple(keys), described
    )


def _made(description: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(description, _Tensor):
        return tensors[description.number]
    if isinstance(description, _Device):
        return tensors[0].device
    if isinstance(description, _Items):
        values = [_made(value, tensors) for value in description.values]
        if description.of is dict:
            return dict(zip(description.keys, values, strict=True))
        return description.of(values)
    if isinstance(description, _Object):
        made: Any = object.__new__(description.of)
        made.__dict__.update(
            (name, _made(value, tensors))
            for name, value in zip(description.names, description.values, strict=True)
        )
        return made
    return description


def _parts(value: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """What a container of the object's own, or an object that holds tensors, is made of."""
    if type(value) is dict:
        return list(value), list(value.values())
    if type(value) in (list, tuple):
        return range(len(value)), value
    if _is_object(value):
        return list(vars(value)), list(vars(value).values())
    return None


def _is_object(value: Any) -> bool:
    """Whether it is an object of plain attributes, some of them with tensors below them."""
    return (
        "__new__" not in {name for of in type(value).__mro__[:-1] for name in vars(of)}
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.nn.Module)
        and _holds_tensors(value, _MOST_LEVELS, set())
    )


def _holds_tensors(value: Any, levels: int, seen: set[int]) -> bool:
    """`seen` are those that were looked into: objects may know each other."""
    if isinstance(value, torch.Tensor):
        return True
    if levels == 0 or id(value) in seen or isinstance(value, torch.nn.Module | type):
        return False
    seen.add(id(value))
    below = vars(value) if hasattr(value, "__dict__") else value
    if isinstance(below, Mapping):
        below = below.values()
    elif not isinstance(below, list | tuple):
        return False
    return any(_holds_tensors(part, levels - 1, seen) for part in below)
