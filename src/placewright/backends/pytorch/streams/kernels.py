"""Which kernels there are for a group: what computes the same, to be tried and timed.

`aten` runs the ops one by one. The others take several ops at once, or another library:

- `cudnn`: convolution, bias, addition and ReLU by one kernel of cuDNN.
- `product`: a 1 x 1 convolution, or a linear layer with what follows it, as one matrix product.
- `region`: compiled by Inductor, through `torch.compile`; a convolution of each channel by itself
  becomes sums of shifted inputs, so that it fuses with its neighbours.
- `tail`: the convolution by itself, and what follows it compiled by Inductor.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from placewright.backends.pytorch.streams.groups import Group
from placewright.backends.pytorch.streams.net import Node, aten
from placewright.backends.pytorch.streams.ops import (
    CONVOLUTIONS,
    is_depthwise,
    is_fusible,
    is_heavy,
    value_of,
)

Run = Callable[..., Sequence[Any]]
"""Takes the inputs of a group, gives its outputs."""

ATEN = "aten"
COMPILED = ("region", "tail")
"""Those that Inductor makes, which takes about a second each."""


def names_for(group: Group, device: str) -> tuple[str, ...]:
    """The kernels that there are for a group on a kind of device, `aten` first."""
    names = [ATEN]
    conv = _only(group, *CONVOLUTIONS)
    if conv is not None and not is_depthwise(conv):
        relu = group.find(aten.relu.default)
        if (
            relu
            and device == "cuda"
            and _plain_padding(conv)
            and conv.target is not CONVOLUTIONS[0]
        ):
            names.append("cudnn")
        if _is_pointwise(conv):
            names.append("product")
        if relu:
            names.append("tail")
    elif _only(group, aten.linear.default) is not None:
        gelu = group.find(aten.gelu.default)
        tanh = not gelu or gelu[0].kwargs.get("approximate") == "tanh"
        activated = bool(gelu) or bool(group.find(aten.relu.default))
        if activated and tanh and len(group.find(aten.linear.default)[0].args) > 2:
            names.append("product")
        if gelu:
            names.append("tail")
    elif any(is_fusible(n) for n in group.nodes):
        fusible = [n for n in group.nodes if is_fusible(n)]
        if len(fusible) > 1 or is_heavy(fusible[0]) or fusible[0].target in _SLOW_ALONE:
            names.append("region")
    return tuple(names)


_SLOW_ALONE = (
    aten.cat.default, aten._native_batch_norm_legit_no_training.default, aten.gelu.default,
    aten.constant_pad_nd.default, aten.embedding.default,
)  # fmt: skip
"""Ops for which Inductor may have a better kernel even where nothing is fused with them."""

_WORK = (*CONVOLUTIONS, aten.linear.default)


def make(group: Group, name: str) -> Run:
    """The kernel of that name for a group."""
    return _MAKERS[name](group)


def _aten(group: Group) -> Run:
    return group.module


def _cudnn(group: Group) -> Run:
    graph = copy.deepcopy(group.module.graph)
    conv = next(n for n in graph.nodes if n.target in CONVOLUTIONS)
    relu = next(n for n in graph.nodes if n.target is aten.relu.default)
    source, weight, bias, *sizes = _conv_arguments(conv)
    sums = [n for n in graph.nodes if n.target is aten.add.Tensor]
    with graph.inserting_before(relu):
        if sums:
            other = next(a for a in sums[0].args[:2] if a is not conv)
            made = graph.call_function(
                aten.cudnn_convolution_add_relu.default,
                (source, weight, other, 1.0, bias, *sizes),
            )
        else:
            made = graph.call_function(
                aten.cudnn_convolution_relu.default, (source, weight, bias, *sizes)
            )
    return _replaced(graph, relu, made)


def _product(group: Group) -> Run:
    graph = copy.deepcopy(group.module.graph)
    linear = next((n for n in graph.nodes if n.target is aten.linear.default), None)
    if linear is not None:
        return _linear_product(graph, linear)
    conv = next(n for n in graph.nodes if n.target in CONVOLUTIONS)
    source, weight, bias, *_ = _conv_arguments(conv)
    after = next(iter(conv.users))
    relu = after.target is aten.relu.default and bias is not None
    with graph.inserting_before(conv):
        made = graph.call_function(pointwise_product, (source, weight, bias, relu))
    return _replaced(graph, after if relu else conv, made)


def _linear_product(graph: torch.fx.Graph, linear: Node) -> Run:
    after = next(n for n in graph.nodes if n.target in (aten.relu.default, aten.gelu.default))
    source, weight, bias = linear.args[:3]
    gelu = after.target is aten.gelu.default
    with graph.inserting_before(after):
        made = graph.call_function(activated_product, (source, weight, bias, gelu))
    return _replaced(graph, after, made)


def pointwise_product(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, relu: bool
) -> torch.Tensor:
    """A 1 x 1 convolution as a matrix product; a view of the input where channels are last."""
    batch, channels, *grid = source.shape
    order = (0, *range(2, source.dim()), 1)
    rows = source.permute(order).reshape(-1, channels)
    matrix = weight.reshape(weight.shape[0], channels).t()
    if bias is None:
        made = torch.mm(rows, matrix)
    elif relu:
        made = torch._addmm_activation(bias, rows, matrix)
    else:
        made = torch.addmm(bias, rows, matrix)
    made = made.view(batch, *grid, -1)
    return made.permute(0, made.dim() - 1, *range(1, made.dim() - 1))


def activated_product(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gelu: bool
) -> torch.Tensor:
    """A linear layer and its activation, a ReLU or the GELU by tanh, as one matrix product."""
    rows = source.reshape(-1, source.shape[-1])
    made = torch._addmm_activation(bias, rows, weight.t(), use_gelu=gelu)
    return made.view(*source.shape[:-1], -1)


def _region(group: Group) -> Run:
    graph = copy.deepcopy(group.module.graph)
    for node in list(graph.nodes):
        if is_depthwise(node):
            with graph.inserting_before(node):
                made = graph.call_function(shifted_sums, tuple(_conv_arguments(node)[:6]))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    return _compiled(torch.fx.GraphModule(torch.nn.Module(), graph))


def shifted_sums(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """A convolution of each channel by itself as a sum over the places of its window. Summed in
    float32, as the kernels of cuDNN do."""
    padded = torch.nn.functional.pad(source, (padding[1], padding[1], padding[0], padding[0]))
    windows = weight.shape[2:]
    grid = [
        (source.shape[2 + i] + 2 * padding[i] - dilation[i] * (windows[i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    ]
    total: Any = 0.0 if bias is None else bias.float().view(1, -1, 1, 1)
    for i, j in itertools.product(range(windows[0]), range(windows[1])):
        top, left = i * dilation[0], j * dilation[1]
        seen = padded[
            :, :, top : top + (grid[0] - 1) * stride[0] + 1 : stride[0],
            left : left + (grid[1] - 1) * stride[1] + 1 : stride[1],
        ]  # fmt: skip
        total = total + seen.float() * weight[:, 0, i, j].float().view(1, -1, 1, 1)
    made: torch.Tensor = total.to(source.dtype)
    return made


def head(group: Group) -> Run:
    """The convolution or product of a group by itself, without its bias."""
    return _head(group.module.graph)


def _head(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    product = next(n for n in graph.nodes if n.target in _WORK)
    made = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = made.placeholder(node.name)
        elif node is product:
            break
        elif node.op == "call_function":
            copies[node] = made.node_copy(node, copies.__getitem__)
    source, weight, *rest = product.args
    if rest:
        rest[0] = None
    made.output(made.call_function(product.target, (copies[source], copies[weight], *rest)))
    return torch.fx.GraphModule(torch.nn.Module(), made)


def _tail(group: Group) -> Run:
    """Two graphs: up to the convolution or product without its bias, and what is left."""
    graph = copy.deepcopy(group.module.graph)
    first = _head(graph)
    product = next(n for n in graph.nodes if n.target in _WORK)
    bias = product.args[2] if len(product.args) > 2 else None
    places = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_before(product):
        given = made = graph.placeholder("product")
        if bias is not None:
            column = bias
            if product.target in CONVOLUTIONS:
                shape = [-1, *[1] * (product.meta["val"].dim() - 2)]
                column = graph.call_function(aten.reshape.default, (bias, shape))
            made = graph.call_function(aten.add.Tensor, (given, column))
    product.replace_all_uses_with(made)
    _remove_unused(graph)
    used = [n for n in places if n.users]
    numbers = [places.index(n) for n in used]
    for node in places:
        if not node.users:
            graph.erase_node(node)
    rest = _compiled(torch.fx.GraphModule(torch.nn.Module(), _placeholders_first(graph)))

    def run(*inputs: torch.Tensor) -> Sequence[Any]:
        return rest(*[inputs[i] for i in numbers], first(*inputs))

    return run


def _remove_unused(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _placeholders_first(graph: torch.fx.Graph) -> torch.fx.Graph:
    made = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    nodes = list(graph.nodes)
    for node in [n for n in nodes if n.op == "placeholder"]:
        copies[node] = made.placeholder(node.name)
    for node in nodes:
        if node.op == "call_function":
            copies[node] = made.node_copy(node, copies.__getitem__)
        elif node.op == "output":
            made.output(torch.fx.node.map_arg(node.args[0], copies.__getitem__))
    return made


def _compiled(module: torch.fx.GraphModule) -> Run:
    # Each shape has a kernel of its own; the graph around it is captured by whoever calls it.
    made: Run = torch.compile(module, fullgraph=True, dynamic=False)
    return made


_MAKERS: dict[str, Callable[[Group], Run]] = {
    ATEN: _aten,
    "cudnn": _cudnn,
    "product": _product,
    "region": _region,
    "tail": _tail,
}


def _replaced(graph: torch.fx.Graph, node: Node, made: Node) -> torch.fx.GraphModule:
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    _remove_unused(graph)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _only(group: Group, *targets: Any) -> Node | None:
    found = group.find(*targets)
    return found[0] if len(found) == 1 else None


def _conv_arguments(conv: Node) -> list[Any]:
    """Input, weight, bias, stride, padding, dilation, groups; sizes for each dimension."""
    defaults: list[Any] = [None, 1, 0, 1, 1]
    given = [*conv.args, *defaults[len(conv.args) - 2 :]]
    source, weight, bias, *sizes, groups = given
    dims = conv.meta["val"].dim() - 2
    for i, size in enumerate(sizes):
        size = [size] if isinstance(size, int) else list(size)
        sizes[i] = size * dims if len(size) == 1 else size
    return [source, weight, bias, *sizes, groups]


def _plain_padding(conv: Node) -> bool:
    return len(conv.args) < 5 or not isinstance(conv.args[4], str)


def _is_pointwise(conv: Node) -> bool:
    """Whether it is a product of each place by itself."""
    if not _plain_padding(conv):
        return False
    weight = value_of(conv.args[1])
    _, _, _, stride, padding, _, groups = _conv_arguments(conv)
    return (
        weight is not None and set(weight.shape[2:]) == {1} and set(stride) == {1}
        and set(padding) == {0} and groups == 1
    )  # fmt: skip
