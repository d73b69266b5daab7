"""The computation graph: operations in topological order, their tensors and edges.

A `Graph` holds arrays, not objects, so that graphs of 100,000 operations stay small and fast.
`Op`, `Tensor` and `Edge` are the records graphs are built from and written as.
The file format is described in docs/graph-format.md.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from placewright.errors import ModelError
from placewright.files import read_json, write_json

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

_A = TypeVar("_A", bound=npt.NDArray[Any])

FORMAT = "placewright-graph/1"

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
    "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16, "resource": 8, "variant": 8,
}  # fmt: skip
"""Bytes of one element. Handles (`resource`, `variant`) count as a pointer; other dtypes (strings)
have no fixed size and need explicit bytes."""


_MOST_BYTES = 2**60
"""A billion gigabytes: what all tensors and variables of a graph may have together."""


class Work(enum.IntEnum):
    """What kind of work an op does, which decides how near it comes to a device's peak."""

    NONE = 0
    """It only passes tensors on: constants, handles, reads of variables, reshapes, shapes."""
    MEMORY = 1
    """It reads and writes whole tensors: everything that is not one of the others."""
    CONV = 2
    MATMUL = 3
    GATHER = 4
    """It reads or writes rows picked from a table; the other rows are not touched."""
    UPDATE = 5
    """It changes all of a variable: reads and writes it, and reads and writes optimizer state."""
    DEPTHWISE = 6
    """A convolution of each channel by itself, which comes nowhere near the bandwidth that limits
    it."""


class Tensor(NamedTuple):
    """One output of an operation."""

    bytes: int
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    shares: tuple[str, int] | None = None
    """(op, output) whose memory this tensor shares instead of having its own, as Reshape's output
    shares its input's and a read of a variable shares the variable's."""


class Edge(NamedTuple):
    """`dst` needs output number `output` of `src`, or only its completion (control edge)."""

    src: str
    dst: str
    output: int | None = 0
    """Which output of `src` the edge carries; None for a control edge."""


class ScopeRule(NamedTuple):
    """Ops whose name contains `pattern` go to the group that `label` expands to."""

    pattern: str
    """Regular expression, searched for anywhere in the op's name."""
    label: str
    """Name of the group; may refer to the pattern's parts as `\\1`."""


class Loop(NamedTuple):
    """A loop of the model: its ops run several times in a step."""

    name: str
    iterations: int | None
    """Each time the loop is entered; None where that is not known. Then its ops count as run
    once."""
    source: str
    """How the iterations became known: `constant`, `shape`, `user`, or `unknown`. Where it is
    `dataset`, a step is one iteration, and the ops run once."""
    within: str = ""
    """The loop that this one is inside of; whose iterations multiply with its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation, as front ends and graph files give it."""

    name: str
    type: str
    outputs: tuple[Tensor, ...] = ()
    param_bytes: int = 0
    """Memory of the variable this op owns, resident for the whole step."""
    slot_bytes: int = 0
    """The same for a variable that is optimizer state (momentum, Adam's moments)."""
    flops: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Measured time by device kind (`tesla-k80`) or, failing that, device type (`gpu`)."""
    colocate: tuple[str, ...] = ()
    """Labels; ops that share one must be placed on the same device."""
    gradient_of: str | None = None
    """The forward op whose gradient this op helps to compute: a wish to be near, not a must."""
    kernels: tuple[str, ...] | None = None
    """Device types that can run it; None for all."""
    launches: float = 1.0
    """How many kernels it starts: less than one for an op whose kernel does the work of several
    (a fused optimizer's, a compiled cluster's), more for one that is made of several."""
    work: Work | None = None
    """What kind of work it does; None to have it guessed from its type."""
    moved_bytes: int | None = None
    """Bytes it reads and writes each time it runs; None where that is all its inputs and outputs
    (and for `UPDATE` the variables behind its handles)."""
    count: int = 1
    """How often it runs in a step: the iterations of the loops it is in, multiplied. `flops`,
    `moved_bytes` and the sizes of tensors are of one run, `seconds` of all of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """Operations in topological order with their tensors, edges and constraints. Immutable.

    N operations, T tensors, E edges. Tensors are numbered by producer, so operation `i` makes
    tensors `output_offsets[i]` up to `output_offsets[i + 1]`.
    """

    name: str
    op_names: tuple[str, ...]
    op_types: tuple[str, ...]
    flops: FloatArray
    """[N] floating-point operations, NaN where unknown."""
    param_bytes: IntArray
    """[N] memory of the variable an op owns."""
    slot_bytes: IntArray
    """[N] memory of the optimizer state an op owns."""
    colocation: IndexArray
    """[N] number of the op's co-location set, -1 for an op that is free."""
    gradient_of: IndexArray
    """[N] the forward op this op is a gradient of, or -1."""
    measured_seconds: Mapping[str, FloatArray]
    """Device kind or type -> [N] seconds, NaN where not measured."""
    kernels: Mapping[str, BoolArray]
    """Device type -> [N] whether the op lists that type. Only meaningful where `restricted`."""
    restricted: BoolArray
    """[N] whether the op names the device types that can run it; the others run anywhere."""
    output_offsets: IntArray
    """[N + 1]"""
    tensor_bytes: IntArray
    """[T] bytes of each tensor: what a transfer of it moves."""
    tensor_shapes: tuple[tuple[int, ...] | None, ...]
    tensor_dtypes: tuple[str, ...]
    tensor_shares: IndexArray
    """[T] the tensor whose memory this one shares, or -1 when it has its own."""
    edge_src: IndexArray
    """[E] producing op; always smaller than the consumer."""
    edge_dst: IndexArray
    """[E] consuming op."""
    edge_tensor: IndexArray
    """[E] tensor carried, -1 for a control edge."""
    launches: FloatArray
    """[N] how many kernels each op starts."""
    stated_work: npt.NDArray[np.int8]
    """[N] the `Work` of each op, -1 where it was not said; see `work`."""
    stated_bytes: IntArray
    """[N] bytes each op reads and writes in one run, -1 where not said; see `moved_bytes`."""
    run_count: IntArray
    """[N] how often each op runs in a step."""
    group_rules: tuple[ScopeRule, ...] = ()
    """How the model's author would group its ops (rule 3 of the paper); a hint, may be empty."""
    loops: tuple[Loop, ...] = ()
    """The loops that `run_count` counts, and those whose iterations are not known."""
    issue: str = "device"
    """Who issues the ops in the model's framework: an executor for each `device`, or one thread of
    the `host` for all. Clusters may say otherwise (`Cluster.issue`)."""

    @staticmethod
    def from_ops(
        name: str,
        ops: Iterable[Op],
        edges: Iterable[Edge],
        group_rules: Iterable[tuple[str, str]] = (),
        loops: Iterable[Loop] = (),
        issue: str = "device",
    ) -> Graph:
        """Builds and checks a graph from records in any order."""
        if issue not in _ISSUES:
            raise ModelError(f"'issue' is {issue!r}, can be {' or '.join(_ISSUES)}")
        rules = tuple(ScopeRule(*rule) for rule in group_rules)
        graph = _build(name, list(ops), list(edges), rules, tuple(loops))
        return graph if issue == graph.issue else replace(graph, issue=issue)

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}: {self.num_ops} ops, {self.num_edges} edges>"

    @property
    def num_ops(self) -> int:
        return len(self.op_names)

    @property
    def num_edges(self) -> int:
        return len(self.edge_src)

    @property
    def num_tensors(self) -> int:
        return len(self.tensor_bytes)

    @cached_property
    def op_index(self) -> Mapping[str, int]:
        return {name: index for index, name in enumerate(self.op_names)}

    @cached_property
    def tensor_producer(self) -> IndexArray:
        """[T] the op that makes each tensor."""
        counts = np.diff(self.output_offsets)
        return frozen(np.repeat(np.arange(self.num_ops, dtype=np.int32), counts))

    @cached_property
    def output_bytes(self) -> IntArray:
        """[N] bytes of all outputs of an op, whether or not they share memory."""
        totals = np.concatenate([[0], np.cumsum(self.tensor_bytes)])
        return frozen(totals[self.output_offsets[1:]] - totals[self.output_offsets[:-1]])

    @cached_property
    def owned_bytes(self) -> IntArray:
        """[N] bytes of the outputs that have memory of their own."""
        own = np.where(self.tensor_shares < 0, self.tensor_bytes, 0)
        totals = np.concatenate([[0], np.cumsum(own)])
        return frozen(totals[self.output_offsets[1:]] - totals[self.output_offsets[:-1]])

    @cached_property
    def edge_bytes(self) -> IntArray:
        """[E] bytes of the tensor an edge carries, 0 for a control edge."""
        sizes = np.append(self.tensor_bytes, 0)  # -1, of a control edge, picks the 0
        return frozen(sizes[self.edge_tensor])

    @cached_property
    def input_bytes(self) -> IntArray:
        """[N] bytes of all tensors an op reads."""
        totals = np.zeros(self.num_ops, dtype=np.int64)
        np.add.at(totals, self.edge_dst, self.edge_bytes)
        return frozen(totals)

    @property
    def resident_bytes(self) -> IntArray:
        """[N] memory held for the whole step: the variable and the optimizer state."""
        return self.param_bytes + self.slot_bytes

    @cached_property
    def work(self) -> npt.NDArray[np.int8]:
        """[N] the `Work` of each op: as stated, otherwise guessed from its type and tensors."""
        return frozen(np.where(self.stated_work >= 0, self.stated_work, _guess_work(self)))

    @cached_property
    def moved_bytes(self) -> IntArray:
        """[N] bytes each op reads and writes in one run: as stated, otherwise its inputs, the
        outputs that have memory of their own, and what its kind of work says about tables and
        variables."""
        moved = self.input_bytes + self.owned_bytes
        data = self.edge_tensor >= 0
        # The handles of an update are eight bytes each; it reads and writes what is behind them.
        behind = data & (self.work[self.edge_dst] == Work.UPDATE)
        written = 2 * self.resident_bytes[self.edge_src[behind]]
        np.add.at(moved, self.edge_dst[behind], written)
        # A gather reads as many bytes of its table, the largest input, as it writes.
        gathers = np.flatnonzero(self.work == Work.GATHER)
        largest = np.zeros(self.num_ops, dtype=np.int64)
        np.maximum.at(largest, self.edge_dst, self.edge_bytes)
        moved[gathers] -= np.maximum(largest - self.owned_bytes, 0)[gathers]
        return frozen(np.where(self.stated_bytes >= 0, self.stated_bytes, moved))

    def runs_on(self, device_type: str) -> BoolArray:
        """[N] whether each op has a kernel for this type of device."""
        listed = self.kernels.get(device_type, np.zeros(self.num_ops, dtype=np.bool_))
        return ~self.restricted | listed

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal graphs, on every machine and in every version that keeps the format. What
        ops were measured to take is no part of it: a cost, which differs from time to time."""
        digest = hashlib.sha256(FORMAT.encode())
        for text in (self.op_names, self.op_types, self.tensor_dtypes):
            digest.update(json.dumps(text).encode())
        digest.update(json.dumps([self.tensor_shapes, self.group_rules]).encode())
        for array in self._arrays():
            digest.update(str(array.dtype).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        for key in sorted(self.kernels):
            digest.update(key.encode())
            digest.update(np.ascontiguousarray(self.kernels[key]).tobytes())
        if (self.launches != 1.0).any():  # graphs from before this existed keep their fingerprints
            digest.update(b"launches" + self.launches.tobytes())
        # Graphs from before these existed keep their fingerprints.
        if (self.stated_work >= 0).any():
            digest.update(b"work" + self.stated_work.tobytes())
        if (self.stated_bytes >= 0).any():
            digest.update(b"moved" + self.stated_bytes.tobytes())
        if (self.run_count != 1).any() or self.loops:
            digest.update(b"count" + self.run_count.tobytes())
            digest.update(json.dumps(self.loops).encode())
        if self.issue != "device":
            digest.update(b"issue" + self.issue.encode())
        return digest.hexdigest()[:16]

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return (
            self.flops, self.param_bytes, self.slot_bytes, self.colocation, self.gradient_of,
            self.restricted, self.output_offsets, self.tensor_bytes, self.tensor_shares,
            self.edge_src, self.edge_dst, self.edge_tensor,
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self.name == other.name and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def ops(self) -> Iterator[Op]:
        """The records this graph could be built from again."""
        kinds = {kind: seconds.tolist() for kind, seconds in self.measured_seconds.items()}
        types = {type_: listed.tolist() for type_, listed in self.kernels.items()}
        flops = self.flops.tolist()
        offsets = self.output_offsets.tolist()
        launches = self.launches.tolist()
        work, moved = self.stated_work.tolist(), self.stated_bytes.tolist()
        counts = self.run_count.tolist()
        tensors = [self._tensor(t) for t in range(self.num_tensors)]
        for i, name in enumerate(self.op_names):
            colocation = int(self.colocation[i])
            forward = int(self.gradient_of[i])
            yield Op(
                name=name,
                type=self.op_types[i],
                outputs=tuple(tensors[offsets[i] : offsets[i + 1]]),
                param_bytes=int(self.param_bytes[i]),
                slot_bytes=int(self.slot_bytes[i]),
                flops=None if math.isnan(flops[i]) else flops[i],
                seconds={k: s[i] for k, s in kinds.items() if not math.isnan(s[i])},
                colocate=() if colocation < 0 else (str(colocation),),
                gradient_of=None if forward < 0 else self.op_names[forward],
                kernels=tuple(t for t, has in types.items() if has[i])
                if self.restricted[i]
                else None,
                launches=launches[i],
                work=None if work[i] < 0 else Work(work[i]),
                moved_bytes=None if moved[i] < 0 else moved[i],
                count=counts[i],
            )

    def edges(self) -> Iterator[Edge]:
        first = self.output_offsets[self.edge_src]
        for src, dst, tensor, base in zip(
            self.edge_src.tolist(),
            self.edge_dst.tolist(),
            self.edge_tensor.tolist(),
            first.tolist(),
            strict=True,
        ):
            output = None if tensor < 0 else tensor - base
            yield Edge(self.op_names[src], self.op_names[dst], output)

    def _tensor(self, t: int) -> Tensor:
        root = int(self.tensor_shares[t])
        shares = None
        if root >= 0:
            producer = int(self.tensor_producer[root])
            shares = (self.op_names[producer], root - int(self.output_offsets[producer]))
        return Tensor(
            int(self.tensor_bytes[t]), self.tensor_shapes[t], self.tensor_dtypes[t], shares
        )

    def save(self, path: str | Path) -> None:
        """Writes the graph in the documented JSON format."""
        write_json(path, to_json(self), ModelError)

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Reads a graph written by `save` or by another tool."""
        return from_json(read_json(path, ModelError, what="graph"), where=str(path))


def to_json(graph: Graph) -> dict[str, Any]:
    ops = []
    for op in graph.ops():
        record: dict[str, Any] = {"name": op.name, "type": op.type}
        if op.outputs:
            record["outputs"] = [_tensor_to_json(tensor) for tensor in op.outputs]
        if op.param_bytes:
            record["param_bytes"] = op.param_bytes
        if op.slot_bytes:
            record["slot_bytes"] = op.slot_bytes
        if op.flops is not None:
            record["flops"] = op.flops
        if op.seconds:
            record["seconds"] = dict(op.seconds)
        if op.colocate:
            record["colocate"] = list(op.colocate)
        if op.gradient_of is not None:
            record["gradient_of"] = op.gradient_of
        if op.kernels is not None:
            record["kernels"] = list(op.kernels)
        if op.launches != 1.0:
            record["launches"] = op.launches
        if op.work is not None:
            record["work"] = op.work.name.lower()
        if op.moved_bytes is not None:
            record["moved_bytes"] = op.moved_bytes
        if op.count != 1:
            record["count"] = op.count
        ops.append(record)
    edges = []
    for edge in graph.edges():
        line: dict[str, Any] = {"from": edge.src, "to": edge.dst}
        if edge.output is None:
            line["control"] = True
        elif edge.output:
            line["output"] = edge.output
        edges.append(line)
    document = {"format": FORMAT, "name": graph.name, "ops": ops, "edges": edges}
    if graph.group_rules:
        document["group_rules"] = [rule._asdict() for rule in graph.group_rules]
    if graph.loops:
        document["loops"] = [loop._asdict() for loop in graph.loops]
    if graph.issue != "device":
        document["issue"] = graph.issue
    return document


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    record: dict[str, Any] = {"bytes": tensor.bytes}
    if tensor.shape is not None:
        record["shape"] = list(tensor.shape)
    if tensor.dtype:
        record["dtype"] = tensor.dtype
    if tensor.shares is not None:
        record["shares"] = list(tensor.shares)
    return record


_MOST_OPS = 5_000_000
_MOST_DIMENSIONS = 64
_MOST_KINDS = 64
"""Kinds of device that a graph file has seconds for: each takes memory for every op."""
_MOST_RULES = 1_000
_MOST_CHARACTERS = 4_000
"""Of a name, a pattern and the like."""

_ISSUES = ("device", "host")
_GRAPH_KEYS = {"format", "name", "ops", "edges", "group_rules", "loops", "issue"}
_OP_KEYS = {
    "name", "type", "outputs", "param_bytes", "slot_bytes", "flops", "seconds", "colocate",
    "gradient_of", "kernels", "work", "moved_bytes", "count", "launches",
}  # fmt: skip
_TENSOR_KEYS = {"bytes", "shape", "dtype", "shares"}
_EDGE_KEYS = {"from", "to", "output", "control"}


def from_json(document: object, *, where: str) -> Graph:
    """The graph a parsed JSON document describes; `where` names it in errors."""
    if not isinstance(document, dict):
        raise ModelError(f"{where}: expected a JSON object with 'ops' and 'edges'")
    if document.get("format", FORMAT) != FORMAT:
        raise ModelError(
            f"{where}: format is {document['format']!r}, this version reads {FORMAT!r}"
        )
    ops, edges = document.get("ops"), document.get("edges", [])
    if not isinstance(ops, list) or not isinstance(edges, list):
        raise ModelError(f"{where}: 'ops' and 'edges' must be lists; is this a graph file?")
    for what, count in (("ops", len(ops)), ("edges", len(edges))):
        if count > _MOST_OPS:
            raise ModelError(f"{where}: {count:,} {what}; a graph has at most {_MOST_OPS:,}")
    _no_unknown_keys(document, _GRAPH_KEYS, where)
    name = document.get("name", Path(where).stem)
    try:
        return Graph.from_ops(
            _text(name, "graph name"),
            [_op_from_json(record, index) for index, record in enumerate(ops)],
            [_edge_from_json(record, index) for index, record in enumerate(edges)],
            _rules_from_json(document.get("group_rules", [])),
            _loops_from_json(document.get("loops", [])),
            _text(document.get("issue", "device"), "'issue'"),
        )
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error


def _op_from_json(record: object, index: int) -> Op:
    if not isinstance(record, dict):
        raise ModelError(f"op number {index} is not a JSON object")
    name = _text(record.get("name"), f"'name' of op number {index}")
    what = f"op {name!r}"
    _no_unknown_keys(record, _OP_KEYS, what)
    outputs = record.get("outputs", [])
    if not isinstance(outputs, list):
        raise ModelError(f"{what}: 'outputs' must be a list")
    seconds = record.get("seconds", {})
    if not isinstance(seconds, dict):
        raise ModelError(f"{what}: 'seconds' must map device kinds to numbers")
    kernels = record.get("kernels")
    forward = record.get("gradient_of")
    flops = record.get("flops")
    work = record.get("work")
    moved = record.get("moved_bytes")
    return Op(
        name=name,
        type=_text(record.get("type"), f"'type' of {what}"),
        outputs=tuple(_tensor_from_json(output, what) for output in outputs),
        param_bytes=_whole(record.get("param_bytes", 0), f"'param_bytes' of {what}"),
        slot_bytes=_whole(record.get("slot_bytes", 0), f"'slot_bytes' of {what}"),
        flops=None if flops is None else _number(flops, f"'flops' of {what}"),
        seconds={
            _text(kind, f"a device kind of {what}"): _number(value, f"seconds of {what} on {kind}")
            for kind, value in seconds.items()
        },
        colocate=_texts(record.get("colocate", []), f"'colocate' of {what}"),
        gradient_of=None if forward is None else _text(forward, f"'gradient_of' of {what}"),
        kernels=None if kernels is None else _texts(kernels, f"'kernels' of {what}"),
        launches=_number(record.get("launches", 1.0), f"'launches' of {what}"),
        work=None if work is None else _work_from_json(work, what),
        moved_bytes=None if moved is None else _whole(moved, f"'moved_bytes' of {what}"),
        count=_whole(record.get("count", 1), f"'count' of {what}"),
    )


def _work_from_json(value: object, what: str) -> Work:
    kinds = {kind.name.lower(): kind for kind in Work}
    if not isinstance(value, str) or value not in kinds:
        raise ModelError(f"'work' of {what} must be one of {', '.join(kinds)}, not {value!r:.40}")
    return kinds[value]


def _tensor_from_json(record: object, what: str) -> Tensor:
    if not isinstance(record, dict):
        raise ModelError(f"{what}: an output is not a JSON object")
    _no_unknown_keys(record, _TENSOR_KEYS, f"an output of {what}")
    shape = record.get("shape")
    if shape is not None:
        if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
            raise ModelError(
                f"{what}: the shape of an output must be a list of at most {_MOST_DIMENSIONS} "
                "whole numbers"
            )
        shape = tuple(_whole(dim, f"a dimension of {what}") for dim in shape)
    dtype = record.get("dtype", "")
    if dtype != "":
        dtype = _text(dtype, f"a dtype of {what}")
    size = record.get("bytes")
    if size is None:
        if shape is None or dtype not in DTYPE_BYTES:
            raise ModelError(
                f"{what}: an output needs 'bytes', or a 'shape' and a 'dtype' of fixed size"
            )
        size = math.prod(shape) * DTYPE_BYTES[dtype]
    shares = record.get("shares")
    if shares is not None:
        if not isinstance(shares, list) or len(shares) != 2:
            raise ModelError(f"{what}: 'shares' must be [op name, output number]")
        shares = (_text(shares[0], f"'shares' of {what}"), _whole(shares[1], f"'shares' of {what}"))
    return Tensor(_whole(size, f"'bytes' of an output of {what}"), shape, dtype, shares)


def _edge_from_json(record: object, index: int) -> Edge:
    if not isinstance(record, dict):
        raise ModelError(f"edge number {index} is not a JSON object")
    what = f"edge number {index}"
    _no_unknown_keys(record, _EDGE_KEYS, what)
    src = _text(record.get("from"), f"'from' of {what}")
    dst = _text(record.get("to"), f"'to' of {what}")
    control = record.get("control", False)
    if not isinstance(control, bool):
        raise ModelError(f"{what}: 'control' must be true or false")
    if control:
        if "output" in record:
            raise ModelError(f"{what}: a control edge carries no 'output'")
        return Edge(src, dst, None)
    return Edge(src, dst, _whole(record.get("output", 0), f"'output' of {what}"))


def _rules_from_json(records: object) -> list[ScopeRule]:
    if not isinstance(records, list):
        raise ModelError("'group_rules' must be a list of {'pattern': ..., 'label': ...}")
    if len(records) > _MOST_RULES:
        raise ModelError(f"{len(records):,} group rules; a graph has at most {_MOST_RULES:,}")
    rules = []
    for record in records:
        if not isinstance(record, dict):
            raise ModelError("a group rule is not a JSON object")
        _no_unknown_keys(record, {"pattern", "label"}, "a group rule")
        pattern = _text(record.get("pattern"), "'pattern' of a group rule")
        rules.append(ScopeRule(pattern, _text(record.get("label"), "'label' of a group rule")))
    return rules


def _loops_from_json(records: object) -> list[Loop]:
    if not isinstance(records, list):
        raise ModelError(
            "'loops' must be a list of {'name': ..., 'iterations': ..., 'source': ...}"
        )
    loops = []
    for record in records:
        if not isinstance(record, dict):
            raise ModelError("a loop is not a JSON object")
        _no_unknown_keys(record, set(Loop._fields), "a loop")
        name = _text(record.get("name"), "'name' of a loop")
        iterations, within = record.get("iterations"), record.get("within", "")
        loops.append(
            Loop(
                name,
                iterations and _whole(iterations, f"'iterations' of loop {name!r}"),
                _text(record.get("source", "unknown"), f"'source' of loop {name!r}"),
                within and _text(within, f"'within' of loop {name!r}"),
            )
        )
    return loops


def _no_unknown_keys(record: Mapping[str, object], known: set[str], what: str) -> None:
    # A misspelt optional key would silently be a default; better to say so.
    for key in record:
        if key not in known:
            raise ModelError(f"{what}: unknown key {key!r}; known are {', '.join(sorted(known))}")


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ModelError(f"{what} must be a non-empty string, not {value!r}")
    _check_text(value, what)
    return value


def _check_text(text: str, what: str) -> None:
    if len(text) > _MOST_CHARACTERS:  # a name is a path, of which all beginnings are looked at
        raise ModelError(
            f"{what} is {len(text):,} characters long, at most {_MOST_CHARACTERS:,} are taken"
        )
    # JSON can spell half a surrogate pair ("\\ud800"), which no file or terminal can take.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ModelError(f"{what} is not valid Unicode: {text!a}") from None


def _texts(value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ModelError(f"{what} must be a list of strings")
    return tuple(_text(item, what) for item in value)


def _whole(value: object, what: str) -> int:
    # JSON knows one kind of number: a tool that writes 4096.0 means 4096.
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 0 <= value <= _MOST_BYTES:  # type: ignore[operator]
        raise ModelError(
            f"{what} must be a whole number that is not negative (nor absurd), not {value!r:.40}"
        )
    return int(value)  # type: ignore[call-overload, no-any-return]


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{what} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:  # JSON's whole numbers can have hundreds of digits
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise ModelError(f"{what} must be finite and not negative, not {value!r:.40}")
    return number


_GUESSES = (
    (Work.DEPTHWISE, re.compile(r"depthwise", re.IGNORECASE)),
    (Work.CONV, re.compile(r"conv", re.IGNORECASE)),
    (
        Work.MATMUL,
        re.compile(r"matmul|einsum|(^|[._])(addmm|mm|bmm|linear|baddbmm)\b", re.IGNORECASE),
    ),
    (Work.GATHER, re.compile(r"gather|scatter|embedding|sparse.*apply", re.IGNORECASE)),
    (Work.UPDATE, re.compile(r"^(Resource)?.*(Apply|Assign)")),
)
"""The kind of work an op type's name stands for, where nobody said; the first that matches."""


def _guess_work(graph: Graph) -> npt.NDArray[np.int8]:
    """[N] the `Work` of ops of which only type, FLOPs and tensors are known."""
    by_type = {
        type_: next((work for work, names in _GUESSES if names.search(type_)), Work.MEMORY)
        for type_ in set(graph.op_types)
    }
    work = np.array([by_type[type_] for type_ in graph.op_types], dtype=np.int8)
    # Without inputs there is nothing to compute from; and what shares all its outputs with others
    # hands them on.
    has_input = np.zeros(graph.num_ops, dtype=np.bool_)
    has_input[graph.edge_dst[graph.edge_tensor >= 0]] = True
    outputs = np.diff(graph.output_offsets)
    passes_on = (outputs > 0) & (graph.owned_bytes == 0) & (graph.output_bytes > 0)
    computes = (np.nan_to_num(graph.flops) > 0) | (has_input & ~passes_on)
    work[~computes] = Work.NONE
    return work


def _build(
    name: str,
    ops: list[Op],
    edges: list[Edge],
    group_rules: tuple[ScopeRule, ...],
    loops: tuple[Loop, ...],
) -> Graph:
    if not ops:
        raise ModelError("the graph has no ops; is it the right file, or was everything pruned?")
    index: dict[str, int] = {}
    for i, op in enumerate(ops):
        _check_op(op)
        if index.setdefault(op.name, i) != i:
            raise ModelError(f"two ops are named {op.name!r}; op names must be unique")
    _check_totals(ops)
    for edge in edges:
        _check_edge(edge, ops, index)
    _check_read_bytes(ops, edges, index)

    order = _topological_order(
        ops,
        [index[edge.src] for edge in edges],
        [index[edge.dst] for edge in edges],
    )
    ops = [ops[i] for i in order]
    index = {op.name: i for i, op in enumerate(ops)}

    counts = np.array([len(op.outputs) for op in ops], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    tensors = [tensor for op in ops for tensor in op.outputs]
    restricted = np.array([op.kernels is not None for op in ops], dtype=np.bool_)
    types = sorted({type_ for op in ops for type_ in op.kernels or ()})
    kinds = sorted({kind for op in ops for kind in op.seconds})
    if max(len(types), len(kinds)) > _MOST_KINDS:
        raise ModelError(
            f"kernels for {len(types):,} types and seconds on {len(kinds):,} kinds of device; a "
            f"graph has at most {_MOST_KINDS} of each"
        )

    edge_src = np.array([index[edge.src] for edge in edges], dtype=np.int32)
    edge_dst = np.array([index[edge.dst] for edge in edges], dtype=np.int32)
    edge_tensor = np.array(
        [-1 if edge.output is None else offsets[index[edge.src]] + edge.output for edge in edges],
        dtype=np.int32,
    )
    # Sorted by consumer, so that the inputs of an op stand together; stable, so that the order
    # of one op's inputs is kept.
    by_consumer = np.argsort(edge_dst, kind="stable")

    shared: dict[str, str] = {}  # interned: 100,000 ops have a few dozen types between them
    return Graph(
        name=name,
        op_names=tuple(op.name for op in ops),
        op_types=tuple(shared.setdefault(op.type, op.type) for op in ops),
        flops=frozen(
            np.array([math.nan if op.flops is None else op.flops for op in ops], dtype=np.float64)
        ),
        param_bytes=frozen(np.array([op.param_bytes for op in ops], dtype=np.int64)),
        slot_bytes=frozen(np.array([op.slot_bytes for op in ops], dtype=np.int64)),
        colocation=frozen(_colocation_sets(ops, edge_src, edge_dst)),
        gradient_of=frozen(_forward_ops(ops, index)),
        measured_seconds={
            kind: frozen(np.array([op.seconds.get(kind, math.nan) for op in ops], dtype=np.float64))
            for kind in kinds
        },
        kernels={
            type_: frozen(np.array([type_ in (op.kernels or ()) for op in ops], dtype=np.bool_))
            for type_ in types
        },
        restricted=frozen(restricted),
        output_offsets=frozen(offsets),
        tensor_bytes=frozen(np.array([tensor.bytes for tensor in tensors], dtype=np.int64)),
        tensor_shapes=tuple(tensor.shape for tensor in tensors),
        tensor_dtypes=tuple(shared.setdefault(t.dtype, t.dtype) for t in tensors),
        tensor_shares=frozen(_shared_roots(ops, index, offsets)),
        edge_src=frozen(edge_src[by_consumer]),
        edge_dst=frozen(edge_dst[by_consumer]),
        edge_tensor=frozen(edge_tensor[by_consumer]),
        launches=frozen(np.array([op.launches for op in ops], dtype=np.float64)),
        stated_work=frozen(
            np.array([-1 if op.work is None else op.work for op in ops], dtype=np.int8)
        ),
        stated_bytes=frozen(
            np.array([-1 if op.moved_bytes is None else op.moved_bytes for op in ops], np.int64)
        ),
        run_count=frozen(np.array([op.count for op in ops], dtype=np.int64)),
        group_rules=group_rules,
        loops=loops,
    )


def _check_op(op: Op) -> None:
    for text in (op.name, op.type):
        if not text:
            raise ModelError("an op has an empty name or type")
        _check_text(text, "the name or type of an op")
    if isinstance(op.kernels, str) or isinstance(op.colocate, str):
        raise ModelError(f"kernels and colocate of op {op.name!r} are tuples of strings, not one")
    for size in (op.param_bytes, op.slot_bytes, *(tensor.bytes for tensor in op.outputs)):
        if size < 0:
            raise ModelError(f"op {op.name!r} has a negative number of bytes ({size})")
    if op.moved_bytes is not None and op.moved_bytes < 0:
        raise ModelError(f"op {op.name!r} moves a negative number of bytes ({op.moved_bytes})")
    if op.count < 1:
        raise ModelError(f"op {op.name!r} runs {op.count} times in a step; leave it out instead")
    costs = [("flops", op.flops), ("launches", op.launches)]
    costs += [(f"seconds on {k}", s) for k, s in op.seconds.items()]
    for label, value in costs:
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ModelError(
                f"{label} of op {op.name!r} must be finite and not negative, not {value}"
            )


def _check_read_bytes(ops: Sequence[Op], edges: Sequence[Edge], index: Mapping[str, int]) -> None:
    """Sums over inputs count a tensor as often as it is read, and an update's also the variable and
    its state, read and written. They must stay within 64 bits."""
    total = 0
    for edge in edges:
        op = ops[index[edge.src]]
        if edge.output is not None:
            total += op.outputs[edge.output].bytes + 2 * (op.param_bytes + op.slot_bytes)
    if total > _MOST_BYTES:
        raise ModelError(
            f"all ops together read {total:.3g} bytes, counting each tensor as often as it is "
            "read; is the unit of bytes right?"
        )


def _check_totals(ops: Sequence[Op]) -> None:
    # Sums are made in 64 bits and in floating point; beyond this they would silently be wrong.
    total = sum(op.param_bytes + op.slot_bytes + sum(t.bytes for t in op.outputs) for op in ops)
    if total > _MOST_BYTES:
        raise ModelError(f"the ops have {total:.3g} bytes in all; is the unit of bytes right?")
    moved = sum((op.moved_bytes or 0) * op.count for op in ops)
    if moved > 1000 * _MOST_BYTES:
        raise ModelError(f"the ops move {moved:.3g} bytes in a step; is the unit of bytes right?")
    flops = sum((op.flops or 0.0) * op.count for op in ops)
    seconds = sum(value for op in ops for value in op.seconds.values())
    if not (math.isfinite(flops) and math.isfinite(seconds)):
        raise ModelError("the FLOPs or seconds of all ops add up to infinity")


def _check_edge(edge: Edge, ops: Sequence[Op], index: Mapping[str, int]) -> None:
    for end in (edge.src, edge.dst):
        if end not in index:
            raise ModelError(
                f"edge {edge.src!r} -> {edge.dst!r} is dangling: there is no op {end!r}"
            )
    outputs = len(ops[index[edge.src]].outputs)
    if edge.output is not None and not 0 <= edge.output < outputs:
        raise ModelError(
            f"edge {edge.src!r} -> {edge.dst!r} carries output {edge.output}, "
            f"but {edge.src!r} has {outputs} outputs"
        )


def _topological_order(ops: Sequence[Op], src: list[int], dst: list[int]) -> list[int]:
    """Kahn's algorithm, keeping the given order wherever the edges allow."""
    n = len(ops)
    if all(s < d for s, d in zip(src, dst, strict=True)):
        return list(range(n))
    waiting = [0] * n
    consumers: list[list[int]] = [[] for _ in range(n)]
    for s, d in zip(src, dst, strict=True):
        waiting[d] += 1
        consumers[s].append(d)
    ready = [i for i in range(n) if not waiting[i]]
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for d in consumers[i]:
            waiting[d] -= 1
            if not waiting[d]:
                heapq.heappush(ready, d)
    if len(order) < n:
        cycle = _find_cycle(waiting, src, dst)
        shown = [ops[i].name for i in cycle[:5]]
        dots = " -> ..." if len(cycle) > 5 else ""
        raise ModelError(
            f"the graph has a cycle of {len(cycle)} ops: {' -> '.join(shown)}{dots} -> {shown[0]}; "
            "loops must be unrolled or lowered to one op"
        )
    return order


def _find_cycle(waiting: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> list[int]:
    """Walks producers among the ops that never became ready until one repeats."""
    producer = {d: s for s, d in zip(src, dst, strict=True) if waiting[s] and waiting[d]}
    seen: dict[int, int] = {}
    node = next(iter(producer))
    while node not in seen:
        seen[node] = len(seen)
        node = producer[node]
    walk = list(seen)[seen[node] :]
    return walk[::-1]


def _colocation_sets(ops: Sequence[Op], edge_src: IndexArray, edge_dst: IndexArray) -> IndexArray:
    """Ops that share a label, directly or through others, get the same number; and so do ops that
    run several times and hand tensors to each other, as these would have to be sent as often."""
    sets = DisjointSets(len(ops))
    looped = np.array([op.count > 1 for op in ops], dtype=np.bool_)
    within = looped[edge_src] & looped[edge_dst]
    for src, dst in zip(edge_src[within].tolist(), edge_dst[within].tolist(), strict=True):
        sets.union(src, dst)
    holder: dict[str, int] = {}
    for i, op in enumerate(ops):
        for label in op.colocate:
            sets.union(holder.setdefault(label, i), i)
    joined = np.zeros(len(ops), dtype=np.bool_)
    joined[edge_src[within]] = joined[edge_dst[within]] = True
    numbers: dict[int, int] = {}
    result = np.full(len(ops), -1, dtype=np.int32)
    for i, op in enumerate(ops):
        if op.colocate or joined[i]:
            result[i] = numbers.setdefault(sets.find(i), len(numbers))
    return result


def _forward_ops(ops: Sequence[Op], index: Mapping[str, int]) -> IndexArray:
    result = np.full(len(ops), -1, dtype=np.int32)
    for i, op in enumerate(ops):
        if op.gradient_of is not None:
            if op.gradient_of not in index:
                raise ModelError(
                    f"op {op.name!r} is the gradient of {op.gradient_of!r}, which does not exist"
                )
            result[i] = index[op.gradient_of]
    return result


def _shared_roots(ops: Sequence[Op], index: Mapping[str, int], offsets: IntArray) -> IndexArray:
    """Follows chains of sharing to the tensor that owns the memory."""
    roots = np.full(int(offsets[-1]), -1, dtype=np.int32)
    for i, op in enumerate(ops):
        for k, tensor in enumerate(op.outputs):
            if tensor.shares is None:
                continue
            owner, output = tensor.shares
            j = index.get(owner)
            if j is None or not 0 <= output < len(ops[j].outputs):
                raise ModelError(
                    f"op {op.name!r} shares memory with {owner!r}:{output}, which does not exist"
                )
            if j >= i:
                raise ModelError(f"op {op.name!r} shares memory with {owner!r}, which runs later")
            root = int(offsets[j]) + output
            roots[int(offsets[i]) + k] = roots[root] if roots[root] >= 0 else root
    return roots


class DisjointSets:
    """Union-find over 0..n-1; the smallest member represents its set."""

    def __init__(self, n: int) -> None:
        self._parent = list(range(n))

    def find(self, i: int) -> int:
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def union(self, i: int, j: int) -> None:
        i, j = self.find(i), self.find(j)
        if i != j:
            self._parent[max(i, j)] = min(i, j)


def frozen(array: _A) -> _A:
    """Marks an array read-only: a frozen dataclass does not protect what its arrays hold."""
    array.flags.writeable = False
    return array
