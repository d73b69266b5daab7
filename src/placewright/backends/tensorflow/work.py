"""What kind of work a TensorFlow op does, and the bytes it reads and writes where these are not all
its inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from placewright.graph import Work


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NONE = _names("""
    Abort Assert Bitcast BroadcastArgs BroadcastGradientArgs CheckNumerics ConcatOffset Const
    ControlTrigger DebugGradientIdentity DestroyResourceOp EmptyTensorList EnsureShape Enter Exit
    ExpandDims HostConst Identity IdentityN ImmutableConst LoopCond Merge MutexV2 NextIteration NoOp
    Placeholder PlaceholderWithDefault PreventGradient Print PrintV2 Rank ReadVariableOp RefEnter
    RefExit RefIdentity RefMerge RefNextIteration RefSwitch Reshape Shape ShapeN Size Snapshot
    Squeeze StopGradient Switch TensorListElementShape TensorListGetItem TensorListLength
    TensorListPopBack TensorListPushBack TensorListReserve TensorListSetItem VarHandleOp
    VarIsInitializedOp Variable VariableShape VariableV2 _Arg _HostRecv _HostSend _Recv _Retval
    _Send _SwitchN
""")
"""These hand on tensors without copying them, or look only at shapes."""

_MATMUL = _names("""
    BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul SparseMatMul SparseTensorDenseMatMul
    XlaEinsum _FusedMatMul
""")

_CONV = re.compile(r"^_?(Fused)?Conv[23]d", re.IGNORECASE)

_GATHERS = _names("Gather GatherV2 GatherNd ResourceGather ResourceGatherNd")
"""Read the rows that they return."""

_SCATTERS = re.compile(r"^Resource(ScatterNd|Scatter)[A-Z]|^Scatter(Nd)?(Add|Sub|Update|Mul|Div)$")
"""Change rows of a variable: their inputs are the variable, which rows, and what goes there."""

_SPARSE_APPLY = re.compile(r"^(Resource)?SparseApply")
"""The same for the rows of a variable and of its optimizer state."""

_UPDATE = re.compile(r"^(Resource)?Apply[A-Z]|^Assign")

_FILLS = _names("Fill OnesLike ZerosLike Range LinSpace OneHot")
"""Write their outputs and read nothing of that size, whatever their inputs are."""

_SLICES = _names("Slice StridedSlice TensorListStack TensorListConcatV2")
"""Read what they write, and nothing else of their input."""


def work_of(op_type: str) -> Work:
    if op_type in _NONE:
        return Work.NONE
    if op_type in _MATMUL:
        return Work.MATMUL
    if op_type.startswith("DepthwiseConv"):
        return Work.DEPTHWISE
    if _CONV.match(op_type):
        return Work.CONV
    if op_type in _GATHERS or _SCATTERS.match(op_type) or _SPARSE_APPLY.match(op_type):
        return Work.GATHER
    if _UPDATE.match(op_type):
        return Work.UPDATE
    return Work.MEMORY


def moved_bytes(
    op_type: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> int | None:
    """Bytes an op reads and writes, from those of its inputs and outputs; None for all of them."""
    made = sum(outputs)
    if op_type in _FILLS:
        return made
    if op_type in _SLICES:
        return 2 * made
    if op_type in _GATHERS:
        return 2 * made + sum(inputs[1:])
    if _SCATTERS.match(op_type):
        return sum(inputs[1:]) + 2 * sum(inputs[2:])  # the rows are read, changed and written
    if _SPARSE_APPLY.match(op_type):
        # The gradient is the largest of the inputs that are not handles; as many bytes of the
        # variable and of each slot are read and written.
        handles = sum(size == _HANDLE_BYTES for size in inputs)
        return (1 + 2 * handles) * max(inputs, default=0)
    if op_type == "TensorListFromTensor":
        return 2 * sum(inputs)
    if op_type == "StridedSliceGrad":
        return 4 * (made + sum(inputs))  # zeros first, then element by element
    return None


_HANDLE_BYTES = 8
