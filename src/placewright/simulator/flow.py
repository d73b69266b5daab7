"""What ops hand to each other and the memory it lies in, whatever the placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from placewright.graph import Graph, IndexArray, IntArray, frozen
from placewright.homes import Visits


@dataclass(frozen=True, kw_only=True, eq=False)
class Flow:
    """What ops wait for and which memory that lies in, whatever the placement. Immutable.

    A *use* is one op waiting for one thing that another hands out: a tensor, or its completion. An
    op hands out its tensors in their order, then its completion, to those that wait for no tensor
    of it. Uses are sorted by producer, thing and waiting op, each once.

    A *buffer* is the memory of a tensor and of all that share it. Tensors of 0 bytes have none.
    Each visit of a weight has one too, behind all others, for the weight's readers: it takes memory
    where the weight is not at home.
    """

    use_tensor: IndexArray
    """[E] the tensor waited for, -1 for a completion."""
    use_producer: IndexArray
    """[E] the op that makes it."""
    use_op: IndexArray
    """[E] the op that waits."""
    use_first: IndexArray
    """[E] the first use of the same thing."""
    use_buffer: IndexArray
    """[E] the buffer of what is waited for, -1 for none."""
    tensor_buffer: IndexArray
    """[T] the buffer each tensor lies in, -1 for none."""
    buffer_tensor: IndexArray
    """[B] the tensor that owns the memory."""
    buffer_op: IndexArray
    """[B] the op that makes that tensor."""
    home_bytes: IntArray
    """[B] its size on the device of that op. 0 for a variable, which is counted there for the
    whole step."""
    copy_bytes: IntArray
    """[B] its size on any other device: the largest tensor in it, as a variable's handle is small
    and what is sent is its value."""
    use_visit: IndexArray
    """[E] the visit in which a weight comes to who waits for it, -1 for all that is no weight."""

    @staticmethod
    def of(graph: Graph, visits: Visits | None = None) -> Flow:
        src, dst = graph.edge_src.astype(np.int64), graph.edge_dst.astype(np.int64)
        carries = graph.edge_tensor >= 0
        pair = src * graph.num_ops + dst
        kept = carries | ~np.isin(pair, pair[carries])
        completion = graph.num_tensors  # sorts behind all tensors
        thing = np.where(carries, graph.edge_tensor, completion)
        src, thing, dst = np.unique(np.stack([src, thing, dst])[:, kept], axis=1)
        starts = np.ones(len(src), dtype=np.bool_)
        starts[1:] = (src[1:] != src[:-1]) | (thing[1:] != thing[:-1])
        first = np.flatnonzero(starts)[np.cumsum(starts) - 1]

        own = np.arange(graph.num_tensors)
        root = np.where(graph.tensor_shares < 0, own, graph.tensor_shares)
        sized = graph.tensor_bytes > 0
        buffer_tensor, buffer = np.unique(root[sized], return_inverse=True)
        tensor_buffer = np.full(graph.num_tensors, -1)
        tensor_buffer[sized] = buffer
        buffer_op = graph.tensor_producer[buffer_tensor]
        variable = graph.resident_bytes[buffer_op] > 0
        copy_bytes = np.zeros(len(buffer_tensor), dtype=np.int64)
        np.maximum.at(copy_bytes, buffer, graph.tensor_bytes[sized])
        use_tensor = np.where(thing == completion, -1, thing)
        home_bytes = np.where(variable, 0, graph.tensor_bytes[buffer_tensor])
        use_buffer = np.append(tensor_buffer, -1)[use_tensor]
        use_visit = np.full(len(use_tensor), -1)
        if visits is not None and len(visits):
            use_visit = _visits_of(use_tensor, dst, visits)
            use_buffer = np.where(use_visit < 0, use_buffer, len(buffer_tensor) + use_visit)
            buffer_tensor = np.append(buffer_tensor, visits.tensor)
            buffer_op = np.append(buffer_op, visits.owner)
            home_bytes = np.append(home_bytes, np.zeros(len(visits), dtype=np.int64))
            copy_bytes = np.append(copy_bytes, visits.bytes)
        return Flow(
            use_tensor=_indices(use_tensor),
            use_producer=_indices(src),
            use_op=_indices(dst),
            use_first=_indices(first),
            use_buffer=_indices(use_buffer),
            tensor_buffer=_indices(tensor_buffer),
            buffer_tensor=_indices(buffer_tensor),
            buffer_op=_indices(buffer_op),
            home_bytes=frozen(home_bytes),
            copy_bytes=frozen(copy_bytes),
            use_visit=_indices(use_visit),
        )


def _visits_of(
    use_tensor: npt.NDArray[Any], use_op: npt.NDArray[Any], visits: Visits
) -> npt.NDArray[Any]:
    """[E] the visit that serves each use, -1 for none."""
    number = np.repeat(np.arange(len(visits)), np.diff(visits.offsets))
    reads = {
        (tensor, op): visit
        for tensor, op, visit in zip(
            visits.tensor[number].tolist(), visits.reader.tolist(), number.tolist(), strict=True
        )
    }
    pairs = zip(use_tensor.tolist(), use_op.tolist(), strict=True)
    return np.array([reads.get(pair, -1) for pair in pairs])


def _indices(array: npt.NDArray[Any]) -> IndexArray:
    return frozen(array.astype(np.int32))
