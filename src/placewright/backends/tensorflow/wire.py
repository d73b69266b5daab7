"""Changes device fields in serialised graphs and leaves every other byte as it was.

Parsing a message and writing it again may order its maps differently and drops what this version of
TensorFlow does not know. Here only the fields on the way to a node's device are touched; the others
are copied. The encoding is protocol buffers' own: a field is a key (number and kind), then a
varint, 4 or 8 bytes, or a length and so many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from placewright.errors import ModelError

# Numbers of the fields on the way, from TensorFlow's .proto files.
_NODE_NAME, _NODE_DEVICE = 1, 4  # NodeDef
_FUNCTION_SIGNATURE, _FUNCTION_NODE, _SIGNATURE_NAME = 1, 3, 1  # FunctionDef, OpDef
_LIBRARY_FUNCTION = 1  # FunctionDefLibrary
_GRAPH_NODE, _GRAPH_LIBRARY = 1, 2  # GraphDef
_META_GRAPH_GRAPH = 2  # MetaGraphDef
_SAVED_META_GRAPHS = 2  # SavedModel


class Devices(NamedTuple):
    """Where nodes go; those that are not named stay as they are."""

    of_node: Mapping[str, str]
    of_body: Mapping[tuple[str, str], str]
    """(function, node in its body) -> device."""


def in_graph(data: bytes, devices: Devices) -> bytes:
    """A serialised GraphDef with devices set."""

    def library(data: bytes) -> bytes:
        return _edited(data, {_LIBRARY_FUNCTION: lambda part: _in_function(part, devices)})

    return _edited(
        data,
        {
            _GRAPH_NODE: lambda part: _in_node(part, devices.of_node.get),
            _GRAPH_LIBRARY: library,
        },
    )


def in_meta_graph(data: bytes, devices: Devices) -> bytes:
    return _edited(data, {_META_GRAPH_GRAPH: lambda part: in_graph(part, devices)})


def in_saved_model(data: bytes, devices: Mapping[int, Devices]) -> bytes:
    """`devices` are by the number of the MetaGraph."""
    numbers = iter(range(1 << 30))

    def meta_graph(part: bytes) -> bytes:
        number = next(numbers)
        return in_meta_graph(part, devices[number]) if number in devices else part

    return _edited(data, {_SAVED_META_GRAPHS: meta_graph})


def _in_function(data: bytes, devices: Devices) -> bytes:
    signature = _last(data, _FUNCTION_SIGNATURE) or b""
    function = (_last(signature, _SIGNATURE_NAME) or b"").decode()
    return _edited(
        data,
        {_FUNCTION_NODE: lambda p: _in_node(p, lambda n: devices.of_body.get((function, n)))},
    )


def _in_node(data: bytes, device_of: Callable[[str], str | None]) -> bytes:
    device = device_of((_last(data, _NODE_NAME) or b"").decode())
    if device is None:
        return data
    text = device.encode()
    field = _varint_bytes(_NODE_DEVICE << 3 | 2) + _varint_bytes(len(text)) + text
    parts, done = [], False
    for number, _, start, _, end in _fields(data):
        if number >= _NODE_DEVICE and not done:
            parts.append(field)  # where it was, or where a serialiser would put it
            done = True
        if number != _NODE_DEVICE:
            parts.append(data[start:end])
    return b"".join(parts if done else [*parts, field])


def _edited(data: bytes, edits: Mapping[int, Callable[[bytes], bytes]]) -> bytes:
    """The message with the contents of some of its fields replaced."""
    parts = []
    for number, kind, start, content, end in _fields(data):
        if number in edits and kind == 2:
            old = data[content:end]
            new = edits[number](old)
            if new != old:
                parts.append(_varint_bytes(number << 3 | 2) + _varint_bytes(len(new)) + new)
                continue
        parts.append(data[start:end])
    return b"".join(parts)


def _last(data: bytes, wanted: int) -> bytes | None:
    """The content of a field; as in protocol buffers, the last one counts."""
    result = None
    for number, kind, _, content, end in _fields(data):
        if number == wanted and kind == 2:
            result = data[content:end]
    return result


def _fields(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """(number, kind, start, start of the content, end) of each field."""
    position = 0
    while position < len(data):
        start = position
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        content = position
        if kind == 0:
            _, position = _varint(data, position)
        elif kind == 1:
            position += 8
        elif kind == 2:
            size, content = _varint(data, position)
            position = content + size
        elif kind == 5:
            position += 4
        else:
            raise ModelError(f"a graph with fields of kind {kind}; is the file damaged?")
        if position > len(data):
            raise ModelError("the graph ends in the middle of a field; is the file truncated?")
        yield number, kind, start, content, position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if position >= len(data):
            raise ModelError("the graph ends in the middle of a number; is the file truncated?")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7


def _varint_bytes(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
