"""How many floating-point operations a TensorFlow op takes, from its shapes.

TensorFlow has such a table too, but it covers a quarter of the ops of a training graph, only one
layout of images, and is wrong for transposed batches of matrices. Where it is right, the numbers
here are its numbers (the tests compare them). What this table counts:

| ops | floating-point operations |
|---|---|
| matrix products, Einsum | 2 x product of all dimensions that occur |
| convolutions and both their gradients | 2 x outputs of the forward op x weights that each reads |
| pooling and its gradients | size of the window for each output of the forward op |
| reductions, segment sums, scatters | 1 for each element that is reduced |
| batch norm, softmax, sigmoid, ... | `_PER_ELEMENT` for each element of the largest tensor |
| squared differences | 2 for each element of the output; 4 where one operand is repeated |
| optimizer updates (`*Apply*`) | 10 for each parameter; 2 for gradient descent |
| ops that only move data | 0 |
| everything else | 1 for each element of the outputs |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from placewright.backends.tensorflow._tf import NodeDef

Shape = tuple[int, ...]
_Rule = Callable[[NodeDef, Sequence[Shape], Sequence[Shape]], float]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall", "SymbolicGradient", "RemoteCall",
    "If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"])  # fmt: skip

_MOVES = _names("""
    Abort Assert Assign AssignVariableOp Batch BatchToSpace BatchToSpaceND Bitcast
    BroadcastGradientArgs BroadcastTo CheckNumerics Concat ConcatOffset ConcatV2
    ConjugateTranspose Const ControlTrigger Copy CopyHost DeepCopy DepthToSpace
    DestroyResourceOp DynamicPartition DynamicStitch Empty EmptyTensorList EnsureShape Enter
    Exit ExpandDims Fill Gather GatherNd GatherV2 HostConst Identity IdentityN ImmutableConst
    InvertPermutation IteratorGetNext LoopCond Merge MergeV2Checkpoints MirrorPad MirrorPadGrad
    NextIteration NoOp OneHot OnesLike Pack Pad PadV2 ParallelConcat ParallelDynamicStitch
    Placeholder PlaceholderWithDefault PreventGradient Print PrintV2 Rank ReadVariableOp
    RefEnter RefExit RefIdentity RefMerge RefNextIteration RefSelect RefSwitch Reshape
    ResourceGather ResourceGatherNd RestoreV2 Reverse ReverseSequence ReverseV2 SaveV2 ScatterNd
    Shape ShapeN Size Slice Snapshot SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV
    Squeeze StopGradient StridedSlice StridedSliceGrad Switch TemporaryVariable Tile Transpose
    Unpack UnravelIndex VarHandleOp VarIsInitializedOp Variable VariableShape VariableV2 Where
    ZerosLike _Arg _HostRecv _HostSend _Recv _Retval _Send
""")
_MOVES_BY_PREFIX = re.compile(
    r"^(TensorList|TensorArray|Stack|Iterator|Queue|Lookup|(Mutable)?HashTable|.*Dataset)"
)

_REDUCTIONS = _names("""
    All Any ArgMax ArgMin BiasAddGrad Bincount Cumprod Cumsum EuclideanNorm Max Mean Min Prod Sum
    TopK TopKV2 InTopK InTopKV2 SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum
    SparseSegmentMean SparseSegmentSum SparseSegmentSqrtN UnsortedSegmentMax UnsortedSegmentMin
    UnsortedSegmentProd UnsortedSegmentSum
""")

_PER_ELEMENT: Mapping[str, float] = {
    "Elu": 3, "EluGrad": 3, "Erf": 8, "Erfc": 8, "Exp": 8, "Gelu": 10, "L2Loss": 2, "Log": 8,
    "Log1p": 8, "LogSoftmax": 5, "Pow": 20, "Rsqrt": 2, "RsqrtGrad": 4, "Selu": 3, "SeluGrad": 3,
    "Sigmoid": 4, "SigmoidGrad": 3, "Softmax": 5, "Softplus": 16, "SoftplusGrad": 8,
    "Softsign": 3, "Tanh": 4, "TanhGrad": 3,
    # Ten rounds of multiplying make one number.
    "Multinomial": 40, "RandomStandardNormal": 60, "RandomUniform": 30,
    "StatelessRandomNormal": 60, "StatelessRandomNormalV2": 60, "StatelessRandomUniform": 30,
    "StatelessRandomUniformV2": 30, "StatelessTruncatedNormalV2": 80, "TruncatedNormal": 80,
    # Mean, variance, normalising and scaling; the gradient has to undo each of them.
    "FusedBatchNorm": 8, "FusedBatchNormV2": 8, "FusedBatchNormV3": 8,
    "FusedBatchNormGrad": 12, "FusedBatchNormGradV2": 12, "FusedBatchNormGradV3": 12,
}  # fmt: skip

_APPLY = re.compile(r"^(Resource)?(Sparse)?Apply")
_SCATTER = re.compile(r"^(Resource|Tensor)?Scatter")
_ASSIGN = re.compile(r"^Assign(Add|Sub)")


def flops(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float | None:
    """None for an op that runs a function which is not part of the graph."""
    op_type: str = node.op
    if op_type in _MOVES:
        return 0.0
    if op_type in _CALLS:
        return None
    rule = _RULES.get(op_type)
    if rule is not None:
        try:
            return float(rule(node, inputs, outputs))
        except (IndexError, ValueError):  # a rank that is not known, attributes left out
            return float(_total(outputs))
    if op_type in _REDUCTIONS:
        return float(math.prod(inputs[0])) if inputs else 0.0
    if op_type in _PER_ELEMENT:
        return _PER_ELEMENT[op_type] * _largest([*inputs, *outputs])
    if _APPLY.match(op_type):
        return (2.0 if "GradientDescent" in op_type else 10.0) * _largest(inputs)
    if _ASSIGN.match(op_type) or _SCATTER.match(op_type):
        return float(math.prod(inputs[-1])) if inputs else 0.0
    if _MOVES_BY_PREFIX.match(op_type):
        return 0.0
    return float(_total(outputs))


def _largest(shapes: Sequence[Shape]) -> float:
    return float(max((math.prod(shape) for shape in shapes), default=0))


def _total(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _flag(node: NodeDef, attribute: str) -> bool:
    # Asking a protobuf map for a missing key would add it.
    return attribute in node.attr and bool(node.attr[attribute].b)


def _matmul(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    transposed = _flag(node, "transpose_a") or _flag(node, "adj_x")
    summed = inputs[0][-2] if transposed else inputs[0][-1]
    return 2 * summed * math.prod(outputs[0])


def _einsum(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    equation = node.attr["equation"].s.decode().replace(" ", "").split("->")[0]
    sizes: dict[str, int] = {}
    for labels, shape in zip(equation.split(","), inputs, strict=True):
        before, dots, after = labels.partition("...")
        inner = len(shape) - len(after)
        named = [*zip(before, shape, strict=False), *zip(after, shape[inner:], strict=False)]
        if dots:
            named.append(("...", math.prod(shape[len(before) : inner])))
        for label, size in named:
            sizes[label] = max(size, sizes.get(label, 1))
    return 2 * math.prod(sizes.values())


def _convolution(results: tuple[str, int], weights: tuple[str, int], *, depthwise: bool) -> _Rule:
    """`results` and `weights` say which tensors hold the forward op's outputs and its filter."""

    def rule(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
        tensors = {"input": inputs, "output": outputs}
        forward = tensors[results[0]][results[1]]
        filter_ = tensors[weights[0]][weights[1]]
        # [height, width, input channels (of a group), output channels]; a depthwise filter sees one
        # input channel at a time. Its last dimension may not be there when the rank is unknown.
        if len(filter_) < 3:
            raise ValueError("the filter's shape is unknown")
        reads = math.prod(filter_[:-2] if depthwise else filter_[:-1])
        return 2 * math.prod(forward) * reads

    return rule


def _depthwise_filter_gradient(
    node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> float:
    """TensorFlow's kernel for CPUs makes a gradient for each image and adds them up, which where
    images are small takes far longer than the products."""
    products = _convolution(("input", 2), ("output", 0), depthwise=True)(node, inputs, outputs)
    if len(outputs[0]) != 4 or len(inputs[0]) != 4:
        return products
    window = outputs[0][0] * outputs[0][1]
    return max(products, 32.0 * window * inputs[0][0] * math.prod(outputs[0]))


def _pool(windows_of: tuple[str, int], each: float = 1, extra: float = 0) -> _Rule:
    def rule(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
        tensors = {"input": inputs, "output": outputs}
        window = math.prod(node.attr["ksize"].list.i) if "ksize" in node.attr else 1
        return (each * window + extra) * math.prod(tensors[windows_of[0]][windows_of[1]])

    return rule


def _add_n(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return (len(inputs) - 1) * math.prod(outputs[0])


def _softmax_loss(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    # Several reductions of each row; where there are few classes, starting them is most of it.
    return 24 * math.prod(inputs[0]) + 400 * math.prod(inputs[0][:-1])


def _squared_difference(node: NodeDef, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """A mean that is repeated for each row of a batch is looked up anew for every few elements,
    which takes as long as the rest."""
    return (2.0 if inputs[0] == inputs[1] else 4.0) * math.prod(outputs[0])


_RULES: dict[str, _Rule] = {
    "SquaredDifference": _squared_difference,
    "SoftmaxCrossEntropyWithLogits": _softmax_loss,
    "SparseSoftmaxCrossEntropyWithLogits": _softmax_loss,
    "AddN": _add_n,
    "AccumulateNV2": _add_n,
    "Einsum": _einsum,
    "AvgPool": _pool(("output", 0)),
    "MaxPool": _pool(("output", 0)),
    "MaxPoolWithArgmax": _pool(("output", 0)),
    "AvgPool3D": _pool(("output", 0)),
    "MaxPool3D": _pool(("output", 0)),
    "AvgPoolGrad": _pool(("input", 1), each=2),
    # Finds the maxima again before it hands the gradient to them.
    "MaxPoolGrad": _pool(("input", 1), extra=1),
    **dict.fromkeys(
        ["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "SparseMatMul", "_FusedMatMul"],
        _matmul,
    ),
}
for _name, _depthwise in (("Conv2D", False), ("DepthwiseConv2dNative", True), ("Conv3D", False)):
    _suffix = "V2" if _name == "Conv3D" else ""
    _RULES[_name] = _convolution(("output", 0), ("input", 1), depthwise=_depthwise)
    # Inputs: shape of the images, filter, gradient of the outputs.
    _RULES[f"{_name}BackpropInput{_suffix}"] = _convolution(
        ("input", 2), ("input", 1), depthwise=_depthwise
    )
    # Inputs: images, shape of the filter, gradient of the outputs.
    _RULES[f"{_name}BackpropFilter{_suffix}"] = _convolution(
        ("input", 2), ("output", 0), depthwise=_depthwise
    )
_RULES["DepthwiseConv2dNativeBackpropFilter"] = _depthwise_filter_gradient
