"""What kinds of ops there are, for deciding which go into one kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright.backends.pytorch.streams.net import Node, aten, is_random

CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
"""Those whose arguments are input, weight, bias, stride, padding, dilation and groups."""

_STENCILS = (
    aten.max_pool2d.default, aten.avg_pool2d.default, aten.max_pool2d_with_indices.default,
    aten.max_pool1d.default, aten.avg_pool1d.default,
)  # fmt: skip

_REDUCTIONS = (
    aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, aten.amax.default,
    aten.layer_norm.default, aten.native_layer_norm.default, aten.native_group_norm.default,
    aten.group_norm.default, aten.softmax.int, aten._softmax.default, aten.log_softmax.int,
    aten.rms_norm.default, aten.adaptive_avg_pool2d.default, aten.var_mean.correction,
    aten.linalg_vector_norm.default,
)  # fmt: skip

_MOVES = (
    aten.cat.default, aten.stack.default, aten.constant_pad_nd.default, aten.pad.default,
    aten.embedding.default, aten._to_copy.default, aten.to.dtype, aten.clone.default,
    aten.contiguous.default, aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default,
    aten._native_batch_norm_legit_no_training.default, aten.reshape.default,
)  # fmt: skip


def is_fusible(node: Node) -> bool:
    """Whether Inductor makes a kernel of it in which others can take part."""
    if is_random(node):
        return False
    if is_depthwise(node) or node.target in (*_STENCILS, *_REDUCTIONS, *_MOVES):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_heavy(node: Node) -> bool:
    """Whether computing it twice costs more than reading it from memory."""
    return node.target in _REDUCTIONS or is_stencil(node)


def is_stencil(node: Node) -> bool:
    return node.target in _STENCILS or is_depthwise(node)


_MOST_PLACES = 49
"""Of a window that becomes sums of shifted inputs."""


def is_depthwise(node: Node) -> bool:
    """Whether it is a convolution of each channel by itself."""
    if node.target is not aten.conv2d.default or len(node.args) < 7:
        return False
    weight = value_of(node.args[1])
    if weight is None:
        return False
    each = node.args[6] == weight.shape[0] > 1 == weight.shape[1]
    return bool(each) and math.prod(weight.shape[2:]) <= _MOST_PLACES


def is_plain_sum(node: Node) -> bool:
    """Whether it adds two tensors of the same shape and type."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    a, b = (value_of(arg) for arg in node.args[:2])
    return a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype


def value_of(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def numbers_of(node: Node) -> int:
    values = pytree.tree_leaves(node.meta.get("val"))
    return max((v.numel() for v in values if isinstance(v, torch.Tensor)), default=0)
