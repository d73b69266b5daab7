"""What is done to a traced graph before its ops are grouped: the same results with fewer ops."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from placewright.backends.pytorch.streams.net import Net, Node, aten
from placewright.backends.pytorch.streams.ops import (
    CONVOLUTIONS,
    is_depthwise,
    is_fusible,
    is_plain_sum,
)

_SAME = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
"""Give what they are given."""
_LOOKS = (aten.alias.default, aten.detach.default)
"""Give the very tensor that they are given."""


def simplify(net: Net) -> None:
    """What keeps each result bitwise: copies that nobody sees go, and so does what is not used."""
    own = [_is_input(net, result, _LOOKS) for result in net.results()]
    for node in list(net.graph.nodes):
        if node.op != "call_function":
            continue
        copies = node.target is aten.clone.default and node.kwargs.get("memory_format") in (
            None, torch.preserve_format)  # fmt: skip
        if copies or node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            net.graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            # Kernels may leave other strides than those it was traced with.
            node.target = aten.reshape.default
    _copy_inputs(net, own)
    _remove_unused(net)


def _is_input(net: Net, value: Any, through: tuple[Any, ...]) -> bool:
    """Whether a result is an input itself, not a copy of it."""
    while isinstance(value, Node) and value.target in through:
        value = value.args[0]
    return isinstance(value, Node) and value.op == "placeholder" and value.name in net.leaves


def _copy_inputs(net: Net, own: Sequence[bool]) -> None:
    """A result that was a copy of an input is one again: whoever writes to it means the copy."""
    results = net.results()
    output = net.graph.output_node()
    for number, (result, was) in enumerate(zip(results, own, strict=True)):
        if not was and _is_input(net, result, ()):
            with net.graph.inserting_before(output):
                copied = net.graph.call_function(aten.clone.default, (result,))
            copied.meta["val"] = result.meta["val"]
            results[number] = copied
    output.args = (tuple(results),)


def fold(net: Net) -> int:
    """Batch norms go into the weights of the convolution or product before them; says how many.
    Weights of convolutions are stored with channels last, as tensor cores want them."""
    constant = net.constant_nodes()
    folded = 0
    for node in list(net.graph.nodes):
        if node.target is not aten._native_batch_norm_legit_no_training.default:
            continue
        source, used = node.args[0], list(node.users)
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in used):
            continue
        product = source.target in (*CONVOLUTIONS, aten.linear.default) and len(source.users) == 1
        if product and _all_constant((*source.args[1:3], *node.args[1:5]), constant):
            _fold_one(net, source, node, used)
            folded += 1
    constant = net.constant_nodes()
    for node in list(net.graph.nodes):
        if node.target is not aten.conv2d.default:
            continue
        weight = node.args[1]
        if _all_constant((weight,), constant):
            with net.graph.inserting_before(node):
                stored = net.graph.call_function(channels_last, (weight,))
            stored.meta["val"] = weight.meta["val"]
            node.args = (node.args[0], stored, *node.args[2:])
    _remove_unused(net)
    return folded


def split_biases(net: Net) -> None:
    """The bias of a convolution becomes an addition of its own where a region follows that can do
    it on the way; the convolution would have a kernel for it."""
    constant = net.constant_nodes()
    for node in list(net.graph.nodes):
        biased = node.target in CONVOLUTIONS and len(node.args) > 2 and node.args[2] is not None
        if not biased or node.args[2] not in constant or is_depthwise(node):
            continue
        users = list(node.users)
        if len(users) != 1 or not is_fusible(users[0]) or _has_relu(users[0]):
            continue
        bias = node.args[2]
        with net.graph.inserting_after(node):
            shape = [-1, *[1] * (node.meta["val"].dim() - 2)]
            sum_ = net.graph.call_function(aten.add.Tensor, (node, bias))
        with net.graph.inserting_before(sum_):
            column = net.graph.call_function(aten.reshape.default, (bias, shape))
            column.meta["val"] = bias.meta["val"].reshape(shape)
        sum_.meta["val"] = node.meta["val"]
        users[0].replace_input_with(node, sum_)
        sum_.args = (node, column)
        node.args = (*node.args[:2], None, *node.args[3:])


def _has_relu(node: Node) -> bool:
    """Whether it is a ReLU, or a sum that only goes into one: a kernel of cuDNN does these."""
    if is_plain_sum(node) and len(node.users) == 1:
        node = next(iter(node.users))
    return node.target is aten.relu.default


def _all_constant(arguments: tuple[Any, ...], constant: set[Node]) -> bool:
    return all(a is None or (isinstance(a, Node) and a in constant) for a in arguments)


def _fold_one(net: Net, product: Node, norm: Node, used: list[Node]) -> None:
    weight, bias = product.args[1], product.args[2] if len(product.args) > 2 else None
    gamma, beta, mean, variance, _, epsilon = norm.args[1:7]
    with net.graph.inserting_before(product):
        folded = net.graph.call_function(folded_weight, (weight, gamma, variance, epsilon))
        shift = net.graph.call_function(
            folded_bias, (weight, bias, gamma, beta, mean, variance, epsilon)
        )
    folded.meta["val"] = weight.meta.get("val")  # type: ignore[union-attr]
    shift.meta["val"] = mean.meta.get("val")  # type: ignore[union-attr]
    product.args = (product.args[0], folded, shift, *product.args[3:])
    for user in used:
        user.replace_all_uses_with(product)
        net.graph.erase_node(user)
    net.graph.erase_node(norm)


def _scale(gamma: torch.Tensor | None, variance: torch.Tensor, epsilon: float) -> torch.Tensor:
    scale = torch.rsqrt(variance.double() + epsilon)
    return scale if gamma is None else scale * gamma.double()


def folded_weight(
    weight: torch.Tensor, gamma: torch.Tensor | None, variance: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """The weight of a product that does a batch norm as well; rounded once."""
    scale = _scale(gamma, variance, epsilon).view(-1, *[1] * (weight.dim() - 1))
    return (weight.double() * scale).to(weight.dtype)


def folded_bias(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """The bias that belongs to `folded_weight`."""
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    shift = shift * _scale(gamma, variance, epsilon)
    return (shift if beta is None else shift + beta.double()).to(weight.dtype)


def channels_last(weight: torch.Tensor) -> torch.Tensor:
    """Itself where it is stored so already."""
    return weight.contiguous(memory_format=torch.channels_last)


def _remove_unused(net: Net) -> None:
    for node in reversed(list(net.graph.nodes)):
        if node.op == "call_function" and not node.users:
            net.graph.erase_node(node)
