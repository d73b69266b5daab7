"""Ops that a graph traced on a CPU has and a GPU has not: what does the same there.

Attention has a kernel of its own on each kind of device. Its second output, which only its gradient
reads, means something else in each; both run on one device, so it never leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def on_gpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """What to call on a GPU instead, or the function itself."""
    return _ON_GPUS.get(function, function)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    made: tuple[Any, ...] = aten._scaled_dot_product_efficient_attention(
        query, key, value, _expanded(attn_mask, query, key), True, dropout_p, is_causal, scale=scale
    )
    return made[0], made[1]


def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    # Without dropout, which the CPU's kernel does not do, its random numbers are not read.
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    mask = _expanded(attn_mask, query, key)
    made: tuple[Any, ...] = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, mask, out, log_sum, seed, seed, dropout_p,
        (True, True, True, False), is_causal, scale=scale,
    )  # fmt: skip
    return made[:3]


def _expanded(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _batch_norm_backward(
    gradient: torch.Tensor,
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    *arguments: Any,
) -> tuple[Any, ...]:
    # Without a weight, CUDA's kernel asks it all the same what the gradient of the offset is to be.
    if weight is None:
        weight = torch.ones(tensor.shape[1], dtype=torch.float32, device=tensor.device)
    made: tuple[Any, ...] = aten.native_batch_norm_backward(gradient, tensor, weight, *arguments)
    return made


_ON_GPUS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
