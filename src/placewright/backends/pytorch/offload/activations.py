"""Activations and caches on the side that computes.

Code between units runs on the device. A unit that the host computes takes copies of what it is
called with and gives copies back; it finds on the host what came from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from placewright.backends.pytorch.offload.links import Link
from placewright.backends.pytorch.offload.values import (
    map_tensors,
    opaque_in,
    tensors_in,
    version_of,
)

_CPU = torch.device("cpu")


class Exchange:
    """Copies of activations on the other side, each made once."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._twins: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        """By the identity of a tensor on the device: its copy on the host, as of a version."""

    def to_host(self, value: Any) -> Any:
        """What the host computes with, when it is there."""
        wanted = {id(t): t for t in tensors_in(value) if self._is_away(t)}
        found = {key: twin for key, t in wanted.items() if (twin := self._twin(t)) is not None}
        missing = [t for key, t in wanted.items() if key not in found]
        # Ordinary tensors in inference mode, too: what is written to others cannot be seen.
        with torch.inference_mode(False), torch.no_grad():
            copies = self._link.to_host(missing)
        for tensor, copied in zip(missing, copies, strict=True):
            found[id(tensor)] = copied
            self._remember(tensor, copied)
        return map_tensors(value, lambda t: found.get(id(t), t))

    def to_device(self, value: Any) -> Any:
        """What the host has computed. The host goes on without waiting for the copy."""

        def sent(tensor: torch.Tensor) -> torch.Tensor:
            made = self._link.to_device(tensor)
            self._remember(made, tensor)
            return made

        return map_tensors(value, sent)

    def arrive(self, value: Any) -> Any:
        """What the device computes with: inputs may have been left on the host."""
        device = self._link.device
        if device.type == "cpu":
            return value
        return map_tensors(
            value, lambda t: t if t.device == device else t.to(device, non_blocking=True)
        )

    def _is_away(self, tensor: torch.Tensor) -> bool:
        return tensor.device != _CPU or self._link.device == _CPU

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        known = self._twins.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != version_of(tensor):
            return None
        return known[2]

    def _remember(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        version = version_of(tensor)
        if version is None:
            return
        key, twins = id(tensor), self._twins

        def gone(reference: weakref.ref[torch.Tensor]) -> None:
            if twins.get(key, (None,))[0] is reference:
                del twins[key]

        twins[key] = (weakref.ref(tensor, gone), version, twin)


def cache_layers(value: Any, numbers: tuple[int, ...]) -> Iterator[Any]:
    """The layers of caches, as transformers has them, among what a module is called with."""
    for cache in opaque_in(value):
        parts = [getattr(cache, n, None) for n in ("self_attention_cache", "cross_attention_cache")]
        for part in (cache, *parts):
            layers = getattr(part, "layers", None)
            if isinstance(layers, list):
                yield from (layers[n] for n in numbers if n < len(layers))


def move_caches(value: Any, numbers: tuple[int, ...], device: torch.device) -> None:
    """Puts what attention layers have cached on the side that computes with it. They create it
    there; it moves where another shape of the workload is computed on the other side."""
    for layer in cache_layers(value, numbers):
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, torch.Tensor) or keys.device == device:
            continue
        for name, tensor in list(vars(layer).items()):
            if isinstance(tensor, torch.Tensor) and tensor.device != device:
                setattr(layer, name, tensor.to(device))
        if hasattr(layer, "device"):
            layer.device = device


def cache_addresses(value: Any, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Where the tensors of cached layers are."""
    return tuple(
        tensor.data_ptr()
        for layer in cache_layers(value, numbers)
        for tensor in vars(layer).values()
        if isinstance(tensor, torch.Tensor)
    )


def cached_bytes(cache: Any) -> dict[int, int]:
    """Bytes of each layer of a cache."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        return {}
    return {
        number: sum(
            tensor.numel() * tensor.element_size()
            for tensor in vars(layer).values()
            if isinstance(tensor, torch.Tensor)
        )
        for number, layer in enumerate(layers)
    }


def layer_numbers(module: torch.nn.Module) -> tuple[int, ...]:
    """Which layers of a cache a unit works with."""
    found = [getattr(part, "layer_idx", None) for part in module.modules()]
    return tuple(dict.fromkeys(n for n in found if isinstance(n, int)))
