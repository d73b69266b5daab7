"""The calls of a step, ready to be made, and what one unplaced run tells of their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from placewright.backends.pytorch.gpu_ops import on_gpus
from placewright.backends.pytorch.steps import GETITEM, Call, Ref, Step, function_of, refs


@dataclass(frozen=True, kw_only=True)
class Work:
    """A call, ready to be made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[int, ...]
    """Distinct values that it takes."""
    makes: tuple[tuple[int | None, int], ...]
    """(place among what it returns, or None where that is the tensor; value)."""
    op: int
    """Number of its op in the graph."""


def works_of(step: Step) -> tuple[Work, ...]:
    """The calls of a step; taking a tensor out of several is a part of the call that makes them."""
    parts: dict[int, list[tuple[int | None, int]]] = {}
    for call in step.calls:
        if call.target == GETITEM:
            parts.setdefault(call.args[0].value, []).append((call.args[1], call.value))
    return tuple(
        _work(call, parts.get(call.value, [])) for call in step.calls if call.target != GETITEM
    )


def _work(call: Call, parts: Sequence[tuple[int | None, int]]) -> Work:
    return Work(
        function=function_of(call.target),
        args=call.args,
        kwargs=call.kwargs,
        reads=tuple(dict.fromkeys(refs((call.args, call.kwargs)))),
        makes=tuple(parts) or ((None, call.value),),
        op=call.op,
    )


def make_call(work: Work, env: Sequence[Any], device: torch.device) -> Any:
    """Calls, with the tensors in place of their numbers, and the device that it runs on in place of
    the one that it was traced on."""
    function = on_gpus(work.function) if device.type == "cuda" else work.function
    args = [
        env[a.value] if type(a) is Ref else _filled(a, env, device) if a.__class__ in _TREES else a
        for a in work.args
    ]
    if work.kwargs:
        return function(*args, **{k: _filled(v, env, device) for k, v in work.kwargs.items()})
    return function(*args)


def store(work: Work, made: Any, env: list[Any]) -> None:
    """Puts what a call returned where it belongs."""
    for position, value in work.makes:
        env[value] = made if position is None else made[position]


_TREES = (tuple, torch.device)


def _filled(argument: Any, env: Sequence[Any], device: torch.device) -> Any:
    if type(argument) is Ref:
        return env[argument.value]
    if isinstance(argument, tuple):
        return [_filled(a, env, device) for a in argument]
    if isinstance(argument, torch.device):
        return device
    return argument


# --- what one run tells --------------------------------------------------------------------------


class Form(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    root: int
    """The value whose memory it is: itself, unless it is a view."""
    bytes: int
    """Of that memory; 0 for a view."""

    @property
    def copied_bytes(self) -> int:
        """What a copy of it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Learned:
    """From one unplaced run. Which tensors are views is known only from a run: ops decide by the
    strides they meet."""

    forms: tuple[Form | None, ...]
    """Of each value; None for what is no tensor."""
    results: tuple[torch.Tensor, ...]
    """What the step returned, on the CPU."""


def learn(
    step: Step, works: Sequence[Work], sources: Mapping[int, torch.Tensor], device: torch.device
) -> Learned:
    """Runs the step with everything on one device. Tensors are freed after their last use."""
    env: list[Any] = [None] * step.num_values
    forms: list[Form | None] = [None] * step.num_values
    uses = [0] * step.num_values
    for work in works:
        for value in work.reads:
            uses[value] += 1
    for value in kept_values(step):
        uses[value] += 1
    owner: dict[int, int] = {}
    """Storage -> the value whose memory it is."""
    views: dict[int, int] = {}
    """Storage -> how many values look at it now."""

    def note(value: int) -> None:
        tensor = env[value]
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            root = owner.setdefault(storage._cdata, value)
            views[storage._cdata] = views.get(storage._cdata, 0) + 1
            size = storage.nbytes() if root == value else 0
            forms[value] = Form(
                tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, root, size
            )

    def drop(value: int) -> None:
        tensor, env[value] = env[value], None
        if isinstance(tensor, torch.Tensor):
            address = tensor.untyped_storage()._cdata
            views[address] -= 1
            if not views[address]:  # another storage may be given its address
                del views[address], owner[address]

    for source in step.sources:
        env[source.value] = sources[source.value]
        note(source.value)
    for work in works:
        store(work, make_call(work, env, device), env)
        for _, value in work.makes:
            note(value)
        for value in work.reads:
            uses[value] -= 1
            if not uses[value]:
                drop(value)
    results = tuple(env[value].detach().to("cpu", copy=True) for value in step.results)
    return Learned(forms=tuple(forms), results=results)


def kept_values(step: Step) -> tuple[int, ...]:
    """What is read when the calls are over."""
    return (
        *step.results,
        *(write.value for write in step.writes),
        *(update.gradient for update in step.updates),
        *(source.value for source in step.sources),
    )
