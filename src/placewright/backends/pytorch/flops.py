"""What an ATen op costs: the kind of work it is and its floating-point operations, from shapes.

torch's own flop counter knows matrix products, convolutions and attention. What it does not know is
counted here as in `backends/tensorflow/flops.py`, so that both front ends give the same model the
same numbers:

| ops | floating-point operations |
|---|---|
| what torch counts | its number |
| attention and recurrent layers that are one op on a CPU | 2 x products of their dimensions |
| pooling and its gradient | size of the window for each output of the forward op |
| reductions, scatters | 1 for each element that is reduced |
| norms, softmax, sigmoid, ... | `_PER_ELEMENT` for each element of the largest tensor |
| ops that only move data | 0 |
| everything else | 1 for each element of the outputs |
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from placewright.backends.pytorch.steps import is_foreign
from placewright.graph import Work


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVES = _names("""
    _assert_async _assert_scalar _assert_tensor_metadata
    _reshape_copy _to_copy alias alias_copy arange as_strided as_strided_scatter bernoulli cat
    clone constant_pad_nd contiguous copy detach diagonal_scatter embedding
    embedding_dense_backward empty empty_like empty_strided expand eye fill flip full full_like
    gather index index_put index_select lift_fresh lift_fresh_copy linspace masked_fill
    masked_scatter new_empty new_empty_strided new_full new_ones new_zeros ones ones_like
    pixel_shuffle pixel_unshuffle rand rand_like randint randn randn_like randperm
    reflection_pad1d reflection_pad2d repeat replication_pad2d roll scalar_tensor select_backward
    select_scatter slice_backward slice_scatter split_with_sizes_copy stack tril triu unfold_copy
    where zeros zeros_like
""")

_GATHERS = _names("""
    embedding embedding_dense_backward embedding_bag _embedding_bag _embedding_bag_backward
    gather index index_add index_put index_select scatter scatter_add
    _embedding_bag_dense_backward
""")

_REDUCTIONS = _names("""
    all amax amin any argmax argmin cumprod cumsum histc linalg_vector_norm logsumexp max mean min
    nansum norm nll_loss2d_forward nll_loss_forward prod scatter_add scatter_reduce sort std sum
    topk var var_mean index_add _embedding_bag
""")

_PER_ELEMENT = {
    "elu": 3, "elu_backward": 3, "erf": 8, "gelu": 10, "gelu_backward": 14, "hardswish": 3,
    "_log_softmax": 5, "_log_softmax_backward_data": 5, "mish": 8, "rsqrt": 2, "sigmoid": 4,
    "sigmoid_backward": 3, "silu": 5, "silu_backward": 8, "_softmax": 5, "_safe_softmax": 5,
    "_softmax_backward_data": 4, "softplus": 4, "softplus_backward": 4, "tanh": 4,
    "tanh_backward": 3,
    # Mean, variance, normalising and scaling; the gradient has to undo each of them.
    "_fused_rms_norm": 5, "_fused_rms_norm_backward": 10, "_native_batch_norm_legit": 8,
    "_native_batch_norm_legit_functional": 8, "_native_batch_norm_legit_no_training": 8,
    "native_batch_norm": 8, "native_batch_norm_backward": 12, "native_group_norm": 8,
    "native_group_norm_backward": 12, "native_layer_norm": 8, "native_layer_norm_backward": 12,
}  # fmt: skip

_POOL = re.compile(r"^(max|avg)_pool[123]d(_with_indices)?(_backward)?$")
_ADAPTIVE = re.compile(r"adaptive_(avg|max)_pool[123]d(_backward)?$")
_CONV = re.compile(r"conv")
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")
"""Products of experts: torch's, and what transformers does where that has no kernel."""
_MATMUL = re.compile(
    r"^(mm|bmm|addmm|baddbmm|_grouped_mm|grouped_mm_fallback|.*scaled_dot_product.*|mkldnn_rnn_layer(_backward)?"
    r"|linear|matmul|_scaled_mm|addmv|mv|dot|.*flex_attention.*)$"
)


def op_name(target: Any) -> str:
    """`addmm` of `aten.addmm.default`."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return str(getattr(target, "__name__", target))


def work_of(target: Any, view: bool) -> Work:
    name = op_name(target)
    if view:
        return Work.NONE
    if _MATMUL.match(name):
        return Work.MATMUL
    if _CONV.search(name):
        return Work.CONV
    if name in _GATHERS:
        return Work.GATHER
    return Work.MEMORY


def flops_of(node: torch.fx.Node) -> float | None:
    """Of a node whose arguments are nodes with fake tensors; None where nobody knows."""
    name = op_name(node.target)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    value = node.meta.get("val")
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=value))
    inputs = _shapes((args, kwargs))
    outputs = _shapes(value)
    if name in _GROUPED:
        return 2.0 * math.prod(outputs[0]) * inputs[0][-1]
    if is_foreign(node.target):
        return None
    if name in _MOVES:
        return 0.0
    if "scaled_dot_product" in name:
        return _attention(name, inputs)
    if name.startswith("mkldnn_rnn_layer"):
        return _recurrent(name, inputs)
    if name in _REDUCTIONS:
        return float(math.prod(inputs[0])) if inputs else 0.0
    if name in _PER_ELEMENT:
        return float(_PER_ELEMENT[name] * _largest([*inputs, *outputs]))
    if _POOL.match(name):
        return _pool(name, args, inputs, outputs)
    if _ADAPTIVE.search(name):
        return float(_largest([*inputs, *outputs]))
    return float(sum(math.prod(shape) for shape in outputs))


def _shapes(values: Any) -> list[tuple[int, ...]]:
    leaves = pytree.tree_leaves(values)
    return [tuple(map(int, v.shape)) for v in leaves if isinstance(v, torch.Tensor)]


def _largest(shapes: Sequence[tuple[int, ...]]) -> int:
    return max((math.prod(shape) for shape in shapes), default=0)


def _attention(name: str, inputs: Sequence[tuple[int, ...]]) -> float:
    if "backward" in name:
        return float(sdpa_backward_flop_count(*inputs[:4]))
    return float(sdpa_flop_count(*inputs[:3]))


def _recurrent(name: str, inputs: Sequence[tuple[int, ...]]) -> float:
    """One layer of an LSTM or GRU: input, kernel of the input, kernel of the state."""
    steps_and_batch = math.prod(inputs[0][:-1])
    forward = 2.0 * steps_and_batch * (math.prod(inputs[1]) + math.prod(inputs[2]))
    return 2 * forward if "backward" in name else forward


def _pool(
    name: str,
    args: Sequence[Any],
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
) -> float:
    backward = name.endswith("_backward")
    kernel = args[2] if backward else args[1]
    window = math.prod(kernel) if isinstance(kernel, list | tuple) else kernel**2
    # The gradient's first input is the gradient of the forward op's outputs.
    count = math.prod(inputs[0] if backward else outputs[0])
    return float(count * window * (2 if backward else 1))
