"""How often the loops of a flat graph run, and with them their ops.

A loop is a frame: values enter it by Enter and leave it by Exit, and NextIteration brings them back
to Merge. It goes on while what LoopCond reads is true. Where that compares a counter with a limit,
and both can be computed without running the model, the iterations are known.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from placewright.backends.tensorflow._tf import NodeDef, tf
from placewright.backends.tensorflow.graphdef import (
    BACK_EDGES,
    DATASET_LOOP,
    MERGES,
    FlatGraph,
    op_name,
    parse_input,
)
from placewright.errors import ModelError
from placewright.graph import Loop

log = logging.getLogger(__name__)

_ENTERS = frozenset(["Enter", "RefEnter"])
_EXITS = frozenset(["Exit", "RefExit"])
_PASSES = frozenset(["Identity", "Switch", "StopGradient", "Cast", "EnsureShape", "LoopCond",
    "RefIdentity", "RefSwitch", "Snapshot"])  # fmt: skip
"""Ops whose outputs have the value of their first input, as far as counting goes."""

_MOST_ELEMENTS = 1000
"""Constants larger than this are no limits of loops."""

DATASET = "dataset"
"""Source of the iterations of a loop over a dataset, one of which is a step: all of them would take
the same placement, and what devices send each other would have to be counted as often."""

Stack = tuple[str, ...]
"""The loops that a node is in, outermost first."""


def loops_of(flat: FlatGraph, stacks: Sequence[Stack], given: Mapping[str, int]) -> list[Loop]:
    """All loops of the graph, the outer ones before those inside them.

    `given` are iterations that the user knows: regular expression, found anywhere in a loop's name
    -> iterations; they go before what the graph says.
    """
    found = dict.fromkeys(stack[: i + 1] for stack in stacks for i in range(len(stack)))
    ordered = sorted(found, key=len)
    counter = _Counter(flat, stacks, _by_loop([stack[-1] for stack in ordered], given))
    loops = []
    for stack in ordered:
        iterations, source = counter.iterations(stack[-1])
        loops.append(Loop(stack[-1], iterations, source, stack[-2] if len(stack) > 1 else ""))
    _ask(loops, stacks)
    return loops


def counts_of(
    nodes: Sequence[NodeDef], stacks: Sequence[Stack], loops: Sequence[Loop]
) -> list[int]:
    """[N] how often each node runs in a step."""
    iterations = {
        loop.name: 1 if loop.source == DATASET else max(loop.iterations or 1, 1) for loop in loops
    }
    counts = []
    for node, stack in zip(nodes, stacks, strict=True):
        # A value enters and leaves once, however often the loop goes round.
        inside = stack[:-1] if node.op in _ENTERS or node.op in _EXITS else stack
        counts.append(math.prod(iterations[name] for name in inside))
    return counts


def ends_of_loops(nodes: Sequence[NodeDef], stacks: Sequence[Stack]) -> list[tuple[int, int]]:
    """Pairs of nodes: what ends an iteration, and what leaves the same loop, which waits for the
    last iteration. Without the edges that close loops nothing else says so."""
    ends: dict[Stack, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.op in BACK_EDGES and stacks[i]:
            ends.setdefault(stacks[i], []).append(i)
    return [
        (end, i)
        for i, node in enumerate(nodes)
        if node.op in _EXITS
        for end in ends.get(stacks[i], ())
    ]


def loop_stacks(
    flat: FlatGraph, sources: Sequence[Sequence[int]], order: Sequence[int]
) -> list[Stack]:
    """[N] the loops each node is in. A value is in a loop from its Enter to its Exit, both
    included."""
    nodes = flat.nodes
    stacks: list[Stack] = [()] * len(nodes)
    inside: list[Stack] = [()] * len(nodes)
    for i in order:
        node = nodes[i]
        frames = max((inside[source] for source in sources[i]), key=len, default=())
        if node.op in _ENTERS:
            frames = (*frames, node.attr["frame_name"].s.decode())
        stacks[i] = (*_dataset_loops(node.name, flat.dataset_loops), *frames)
        inside[i] = frames[:-1] if node.op in _EXITS else frames
    return stacks


def _dataset_loops(name: str, loops: Sequence[str]) -> Stack:
    """The loops over datasets that a node is in. They have no frames, but the names of their ops
    tell (with `Func/` in front for what inlining adds)."""
    own = name.removeprefix("Func/")
    inside = [loop for loop in loops if own.startswith(f"{loop}/{DATASET_LOOP}/")]
    return tuple(sorted(inside, key=len))


def _by_loop(names: Sequence[str], given: Mapping[str, int]) -> dict[str, int]:
    result: dict[str, int] = {}
    for pattern, iterations in given.items():
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
            raise ModelError(f"loops: {pattern!r} must be a whole number from 1, not {iterations}")
        try:
            matched = [name for name in names if re.search(pattern, name)]
        except re.error as error:
            raise ModelError(f"loops: {pattern!r} is no regular expression: {error}") from None
        if not matched:
            known = ", ".join(map(repr, names[:8])) or "none"
            raise ModelError(f"loops: {pattern!r} matches no loop; the loops are: {known}")
        result |= dict.fromkeys(matched, iterations)
    return result


def _ask(loops: Sequence[Loop], stacks: Sequence[Stack]) -> None:
    for loop in loops:
        if loop.source == DATASET:
            log.warning(
                "loop %r goes over a dataset%s: a step is one iteration of it; say loops={%r: N} "
                "to count N of them, all on one device",
                loop.name,
                "" if loop.iterations is None else f" of {loop.iterations} elements",
                loop.name,
            )
        elif loop.iterations is None:
            ops = sum(loop.name in stack for stack in stacks)
            log.warning(
                "it is not known how often loop %r (%d ops) runs, so that it counts as one "
                "iteration; say it with loops={%r: N}",
                loop.name,
                ops,
                loop.name,
            )


class _Known(NamedTuple):
    """A value that does not depend on what is fed or learned."""

    value: Any
    from_shape: bool
    """Whether it depends on the size of a tensor."""


class _Affine(NamedTuple):
    """A value that changes by the same amount with every iteration of a loop."""

    start: _Known
    step: float


class _Counter:
    """Finds out how often loops run. Whatever it does not understand is None."""

    def __init__(self, flat: FlatGraph, stacks: Sequence[Stack], given: Mapping[str, int]) -> None:
        self._nodes = {node.name: node for node in flat.nodes}
        self._outputs = flat.outputs
        self._frame = {
            node.name: stack[-1] if stack else ""
            for node, stack in zip(flat.nodes, stacks, strict=True)
        }
        self._conditions = {
            self._frame[node.name]: node for node in flat.nodes if node.op == "LoopCond"
        }
        self._found: dict[str, tuple[int | None, str]] = {
            name: (iterations, "user") for name, iterations in given.items()
        }
        for name in flat.dataset_loops:
            self._found.setdefault(name, (flat.dataset_sizes.get(name), DATASET))
        self._values: dict[str, _Known | None] = {}

    def iterations(self, loop: str) -> tuple[int | None, str]:
        """Of a loop, and how that is known."""
        if loop not in self._found:
            self._found[loop] = None, "unknown"  # while it is looked for: it may ask for itself
            condition = self._conditions.get(loop)
            known = None if condition is None else self._trips(condition.input[0])
            if known is not None:
                source = "shape" if known.from_shape else "constant"
                self._found[loop] = int(known.value), source
        return self._found[loop]

    def _trips(self, text: str) -> _Known | None:
        """Iterations until the condition is false; the least, where several must be true."""
        node = self._behind(text)
        if node is None:
            return None
        if node.op == "LogicalAnd":
            both = [self._trips(text) for text in _data(node)]
            known = [trips for trips in both if trips is not None]
            return min(known, key=lambda trips: float(trips.value), default=None)
        if node.op not in _COMPARISONS:
            return None
        left, right = _data(node)
        compare = _COMPARISONS[node.op]
        counter, limit = self._affine(left), self._value(right)
        if counter is None or limit is None:
            counter, limit = self._affine(right), self._value(left)
            compare = _MIRRORED[compare]
        if counter is None or limit is None or np.size(limit.value) != 1:
            return None
        trips = compare(float(limit.value) - float(counter.start.value), counter.step)
        if not (math.isfinite(trips) and trips >= 0):
            return None
        return _Known(int(trips), limit.from_shape or counter.start.from_shape)

    def _affine(self, text: str) -> _Affine | None:
        """The value as a counter of the innermost loop it is in."""
        node = self._behind(text)
        if node is None or node.op not in MERGES:
            return None
        parts = self._loop_variable(node)
        if parts is None:
            return None
        start = self._value(parts[0])
        changed = self._behind(parts[1])
        if start is None or changed is None or np.size(start.value) != 1:
            return None
        if changed.op not in ("Add", "AddV2", "Sub"):
            return None
        inputs = _data(changed)
        for own, other in (inputs, inputs[::-1]):
            by = self._value(other)
            if self._behind(own) is node and by is not None and np.size(by.value) == 1:
                if changed.op == "Sub" and own == inputs[1]:
                    return None  # x = 1 - x
                step = float(by.value) * (-1 if changed.op == "Sub" else 1)
                return _Affine(start, step)
        return None

    def _loop_variable(self, merge: NodeDef) -> tuple[str, str] | None:
        """Where its first value comes from, and the next ones."""
        inputs = _data(merge)
        back = [text for text in inputs if self._nodes[op_name(text)].op in BACK_EDGES]
        first = [text for text in inputs if text not in back]
        if len(back) != 1 or len(first) != 1:
            return None
        return first[0], self._nodes[op_name(back[0])].input[0]

    def _behind(self, text: str) -> NodeDef | None:
        """The node that makes a value, past all that only hands it on."""
        for _ in range(1000):
            node = self._nodes[op_name(text)]
            if node.op not in _PASSES or not _data(node):
                return node
            text = node.input[0]
        return None

    def _value(self, text: str) -> _Known | None:
        if text not in self._values:
            self._values[text] = None  # while it is computed: it may need itself
            self._values[text] = self._computed(text)
        return self._values[text]

    def _computed(self, text: str) -> _Known | None:
        name, output = parse_input(text)
        node, number = self._nodes[name], output or 0
        inputs = _data(node)
        if node.op == "Const":
            shape = self._outputs[name][0].shape
            if shape is None or math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:
                return None
            return _Known(tf.make_ndarray(node.attr["value"].tensor), False)
        if node.op in _PASSES or node.op in _ENTERS:
            return self._value(inputs[0]) if inputs else None
        if node.op in MERGES:
            return self._unchanged(node)
        if node.op in _EXITS:
            return self._last(node)
        if node.op in ("Shape", "ShapeN", "Size", "Rank") and number < len(inputs):
            return self._size(node.op, inputs[number])
        if node.op == "TensorListLength":
            return self._length(inputs[0])
        compute = _COMPUTE.get(node.op)
        values = [self._value(text) for text in inputs]
        if compute is None or any(value is None for value in values):
            return None
        known = [value for value in values if value is not None]
        try:
            result = compute(node, *(value.value for value in known))
        except (ValueError, IndexError, ZeroDivisionError, OverflowError, TypeError):
            return None
        return _Known(result, any(value.from_shape for value in known))

    def _unchanged(self, merge: NodeDef) -> _Known | None:
        """Of a loop's variable that no iteration changes."""
        parts = self._loop_variable(merge)
        if parts is None or self._behind(parts[1]) is not merge:
            return None
        return self._value(parts[0])

    def _last(self, exit_: NodeDef) -> _Known | None:
        """The value with which a counter leaves its loop."""
        counter = self._affine(exit_.input[0])
        if counter is None:
            return self._value(exit_.input[0])
        trips, source = self.iterations(self._frame[exit_.name])
        if trips is None:
            return None
        value = float(counter.start.value) + counter.step * trips
        return _Known(value, source == "shape" or counter.start.from_shape)

    def _size(self, op_type: str, text: str) -> _Known | None:
        name, output = parse_input(text)
        shape = self._outputs[name][output or 0].shape
        if shape is None or (op_type != "Rank" and None in shape):
            return None
        sizes = np.array(shape, dtype=np.int64)
        value = {"Size": sizes.prod(), "Rank": len(shape)}.get(op_type, sizes)
        return _Known(value, True)

    def _length(self, text: str) -> _Known | None:
        """Of a tensor list, from what made it."""
        maker = self._behind(text)
        if maker is None:
            return None
        if maker.op == "TensorListReserve":
            return self._value(maker.input[1])
        if maker.op == "TensorListFromTensor":
            stacked = self._size("Shape", maker.input[0])
            return None if stacked is None else _Known(stacked.value[0], True)
        return None


def _data(node: NodeDef) -> list[str]:
    return [text for text in node.input if not text.startswith("^")]


def _below(distance: float, step: float) -> float:
    return max(0.0, math.ceil(distance / step)) if step > 0 else math.inf


def _up_to(distance: float, step: float) -> float:
    return max(0.0, math.floor(distance / step) + 1) if step > 0 else math.inf


def _above(distance: float, step: float) -> float:
    return _below(-distance, -step)


def _down_to(distance: float, step: float) -> float:
    return _up_to(-distance, -step)


def _until(distance: float, step: float) -> float:
    return distance / step if step and distance % step == 0 else math.inf


_COMPARISONS: Mapping[str, Callable[[float, float], float]] = {
    "Less": _below, "LessEqual": _up_to, "Greater": _above, "GreaterEqual": _down_to,
    "NotEqual": _until,
}  # fmt: skip
"""Iterations of a counter that has this distance to its limit, by steps of that size."""

_MIRRORED: Mapping[Callable[[float, float], float], Callable[[float, float], float]] = {
    _below: _above, _above: _below, _up_to: _down_to, _down_to: _up_to, _until: _until,
}  # fmt: skip


def _strided_slice(node: NodeDef, value: Any, begin: Any, end: Any, strides: Any) -> Any:
    if len(np.atleast_1d(begin)) != 1 or any(
        node.attr[name].i for name in ("ellipsis_mask", "new_axis_mask") if name in node.attr
    ):
        raise ValueError("more than a vector's part")
    first = int(np.ravel(begin)[0])
    if node.attr["shrink_axis_mask"].i & 1:
        return np.asarray(value)[first]
    last = None if node.attr["end_mask"].i & 1 else int(np.ravel(end)[0])
    start = None if node.attr["begin_mask"].i & 1 else first
    return np.asarray(value)[start : last : int(np.ravel(strides)[0])]


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, value, axes: function(value, axis=tuple(np.ravel(axes).astype(int)))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, *values: function(*values)


_COMPUTE: Mapping[str, Callable[..., Any]] = {
    "Add": _plain(np.add), "AddV2": _plain(np.add), "Sub": _plain(np.subtract),
    "Mul": _plain(np.multiply), "FloorDiv": _plain(np.floor_divide), "Neg": _plain(np.negative),
    "FloorMod": _plain(np.mod), "Maximum": _plain(np.maximum), "Minimum": _plain(np.minimum),
    "RealDiv": _plain(np.divide), "Ceil": _plain(np.ceil), "Floor": _plain(np.floor),
    "Max": _reduced(np.max), "Min": _reduced(np.min), "Prod": _reduced(np.prod),
    "Sum": _reduced(np.sum), "Range": _plain(np.arange), "StridedSlice": _strided_slice,
    "Pack": lambda node, *values: np.stack(values),
    "ConcatV2": lambda node, *values: np.concatenate(values[:-1], axis=int(values[-1])),
    "GatherV2": lambda node, value, which, axis: np.take(value, which, axis=int(axis)),
    "ExpandDims": lambda node, value, axis: np.expand_dims(value, int(axis)),
    "Squeeze": lambda node, value: np.squeeze(value),
    "Reshape": lambda node, value, shape: np.reshape(value, shape),
}  # fmt: skip
"""What is computed of known values, in NumPy."""
