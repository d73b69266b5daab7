"""What modules are called with and return: tensors in tuples, lists and mappings.

`torch.utils._pytree` is not used here: it would take caches apart that a library has registered,
and put new ones in their place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """In the order in which `map_tensors` meets them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with other tensors. What is neither tuple, list nor dictionary is left as
    it is: a cache is passed on, not copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(part, change) for part in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if type(value) is dict:
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, dict):  # the named outputs of transformers and diffusers
        changed = copy.copy(value)
        for key, part in value.items():
            changed[key] = map_tensors(part, change)
        return changed
    return value


def opaque_in(value: Any) -> Iterator[Any]:
    """What is neither tensor nor plain data: caches, for instance."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from opaque_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from opaque_in(part)
    elif not isinstance(value, torch.Tensor | bool | int | float | str | torch.dtype | type(None)):
        yield value


def version_of(tensor: torch.Tensor) -> int | None:
    """Changes when the tensor is written to; None where torch does not count that."""
    return None if tensor.is_inference() else tensor._version
