"""Products of few rows with 16-bit weights on the host, at the speed of its memory.

A layer that computes one token reads all of its weights once, so that the memory decides how long
it takes. torch's product (oneDNN) does not reach the memory's speed where there are few rows; the
kernel here reads several rows of the weights side by side. Whichever is quicker is used, as found
by trying.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_numba: Any = numba
"""Not all of it has types."""

_MOST_ROWS = 8
"""With more, the arithmetic takes longer than reading."""
_LEAST_WEIGHTS = 2**20
"""Of a product; smaller ones lie in a cache."""
_MOST_CACHED_BYTES = 16 * 2**20
"""Of keys and values that a unit attends to, which is torch's work."""
_SERVED = 0.9
"""Of the weights of a unit."""
_TRIES = 5
_REST_SECONDS = 0.05
"""After which threads that have nothing to do no longer spin."""


def _widen(context: Any, bits: Any) -> Any:
    """The single-precision number of which a bfloat16 is the upper half."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(types.uint16), generate


_widened: Any = intrinsic(_widen)


def _compiled(function: Any) -> Any:
    njit: Any = numba.njit  # its types, where it has any, do not know all options
    settings = {"parallel": True, "fastmath": True, "nogil": True}
    try:
        return njit(cache=True, **settings)(function)
    except RuntimeError:  # there is no folder to cache in
        return njit(**settings)(function)


@_compiled
def _product(weights: Any, inputs: Any, outputs: Any) -> None:
    """outputs[r, i] = sum over j of weights[i, j] * inputs[r, j], with weights as bits."""
    number, width = weights.shape
    for block in numba.prange((number + 3) // 4):
        i = 4 * block
        if i + 4 <= number:
            for r in range(inputs.shape[0]):
                a = b = c = d = np.float32(0)
                for j in range(width):
                    x = inputs[r, j]
                    a += _widened(weights[i, j]) * x
                    b += _widened(weights[i + 1, j]) * x
                    c += _widened(weights[i + 2, j]) * x
                    d += _widened(weights[i + 3, j]) * x
                outputs[r, i] = a
                outputs[r, i + 1] = b
                outputs[r, i + 2] = c
                outputs[r, i + 3] = d
        else:
            for k in range(i, number):
                for r in range(inputs.shape[0]):
                    a = np.float32(0)
                    for j in range(width):
                        a += _widened(weights[k, j]) * inputs[r, j]
                    outputs[r, k] = a


def product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `torch.nn.functional.linear`, for bfloat16 on the CPU and without gradients."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    made = np.empty((rows.shape[0], weight.shape[0]), np.float32)
    bits = weight.detach().view(torch.uint16).numpy()
    _product(bits, rows.float().contiguous().numpy(), made)
    result = torch.from_numpy(made)
    if bias is not None:
        result += bias
    return result.to(inputs.dtype).view(*inputs.shape[:-1], weight.shape[0])


class HostProducts:
    """Which products of the host's units are done here, and which by torch."""

    def __init__(self, *, tries: bool = True) -> None:
        self.quicker: dict[int, bool] = {}
        """Rows -> whether the kernel here is quicker than torch's."""
        self._tries = tries
        self._active = False
        self._threads = torch.get_num_threads()

    def serve(self, module: torch.nn.Module) -> bool:
        """The linear layers of a unit ask here first; whether that is nearly all of its work. Where
        it is not, as in a layer of experts, all is left to torch, which needs its threads."""
        linear = [part for part in module.modules() if type(part) is torch.nn.Linear]
        served = sum(part.weight.numel() for part in linear)
        if served < _SERVED * sum(p.numel() for p in module.parameters()):
            return False
        for part in linear:
            forward = functools.partial(self._forward, part, linear)
            part.__dict__.setdefault("forward", forward)
        return bool(linear)

    @contextmanager
    def active(self, rows: int, cached_bytes: int = 0) -> Iterator[None]:
        """The host computes a unit within, on so many rows and with so much in its cache.

        torch's own threads rest meanwhile, where products are done here: those of both would wait
        for their turn on the cores, as each spins for a while when it has nothing to do. What torch
        does then takes one core, so that it must not be much.
        """
        if (
            rows > _MOST_ROWS or cached_bytes > _MOST_CACHED_BYTES
            or self.quicker.get(rows) is False or torch.is_grad_enabled()
        ):  # fmt: skip
            yield
            return
        self._threads, self._active = torch.get_num_threads(), True
        if rows in self.quicker:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            self._active = False
            torch.set_num_threads(self._threads)

    def _forward(
        self, module: torch.nn.Linear, unit: Sequence[torch.nn.Linear], inputs: torch.Tensor
    ) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        if not self._active or not _applies(inputs, weight):
            return torch.nn.functional.linear(inputs, weight, bias)
        rows = inputs.numel() // inputs.shape[-1]
        if rows not in self.quicker:
            weights = [part.weight for part in unit]
            self.quicker[rows] = self._is_quicker(rows, [w for w in weights if _suits(w)])
        if self.quicker[rows]:
            return product(inputs, weight, bias)
        return torch.nn.functional.linear(inputs, weight, bias)

    def _is_quicker(self, rows: int, weights: Sequence[torch.Tensor]) -> bool:
        """For all products of a unit, one after another: the same one again and again would find
        its weights in a cache, and which kernel reads memory faster would not be seen."""
        if not self._tries:
            return True
        pairs = [(w.new_ones(rows, w.shape[1]), w.detach()) for w in weights]
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        theirs = _median_seconds(torch.nn.functional.linear, pairs)
        torch.set_num_threads(before)
        most = min(self._threads, int(_numba.config.NUMBA_NUM_THREADS))
        ours: dict[int, float] = {}
        # A core that is taken for a moment by somebody else holds up all: one or two may be free.
        for threads in sorted({most, max(1, most - 1), max(1, most - 2)}, reverse=True):
            numba.set_num_threads(threads)
            ours[threads] = _median_seconds(product, pairs)
        best = min(ours, key=lambda threads: ours[threads])
        numba.set_num_threads(best)
        layer = "none" if math.isinf(ours[best]) else _numba.threading_layer()
        logger.info(
            "%d products of %d rows: torch %.6f s, here by threads %s (of %s)",
            len(pairs), rows, theirs, ours, layer,
        )  # fmt: skip
        return ours[best] < 0.95 * theirs


def _median_seconds(run: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    time.sleep(_REST_SECONDS)
    times = []
    try:
        for _ in range(1 + _TRIES):  # the first compiles, and wakes the threads up
            begun = time.perf_counter()
            for inputs, weight in pairs:
                run(inputs, weight, None)
            times.append(time.perf_counter() - begun)
    except Exception as fault:  # whatever compilers and their threads raise
        logger.warning("products are left to torch: %s", fault)
        return math.inf
    return statistics.median(times[1:])


def _applies(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        _suits(weight)
        and inputs.dtype == torch.bfloat16
        and inputs.device.type == "cpu"
        and 0 < inputs.numel() <= _MOST_ROWS * inputs.shape[-1]
    )


def _suits(weight: torch.Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.numel() >= _LEAST_WEIGHTS
        and weight.is_contiguous()
    )
