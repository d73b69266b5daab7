"""Weights from safetensors files straight to their homes, without a second copy in memory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from placewright.backends.pytorch.offload.runtime import Offloaded
from placewright.errors import ModelError
from placewright.files import read_json
from placewright.schema import Table, check, text, whole

_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100 * 2**20
_PART = 64 * 2**20
"""Bytes that are read at a time on their way to a device."""
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A tensor in a file."""

    path: Path
    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def load_checkpoint(placed: Any, path: str | Path) -> None:
    """Reads the weights of a placed module: a `.safetensors` file, the index of several, or a
    directory with either. Names and shapes must be those of its `state_dict`; weights of another
    floating type are converted.

    Buffers that are in no checkpoint (`persistent=False`) and were on `meta` are made by the
    module's own `_init_weights`, as transformers has it.
    """
    offloaded: Offloaded = placed.offload
    stored = _stored(Path(path))
    wanted = dict(placed.state_dict(keep_vars=True))
    names = {id(tensor): name for name, tensor in reversed(wanted.items())}
    first = {name: names[id(tensor)] for name, tensor in wanted.items()}
    known: dict[str, str] = {}
    for name, tied in first.items():
        if name in stored:
            known.setdefault(tied, name)
    missing = [name for name, tied in first.items() if tied not in known]
    if missing:
        raise ModelError(
            f"{path}: has no {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f", which the module has; it has {', '.join(list(stored)[:3])}, ..."
        )
    for name, in_file in known.items():
        tensor, found = wanted[name], stored[in_file]
        if found.shape != tuple(tensor.shape):
            raise ModelError(
                f"{found.path}: {in_file!r} has the shape {list(found.shape)}, and the module's is "
                f"{list(tensor.shape)}; is it the checkpoint of another model?"
            )
        if found.dtype != tensor.dtype and not (
            found.dtype.is_floating_point and tensor.dtype.is_floating_point
        ):
            raise ModelError(
                f"{found.path}: {in_file!r} has the type {found.dtype}, and the module's is "
                f"{tensor.dtype}"
            )
    by_file = sorted(known.items(), key=lambda pair: stored[pair[1]].offset)
    for file in sorted({stored[n].path for n in known.values()}):
        try:
            with file.open("rb") as handle:
                for name, in_file in by_file:
                    if stored[in_file].path == file:
                        _read(handle, stored[in_file], wanted[name].data)
        except OSError as fault:
            raise ModelError(f"{file}: cannot be read: {fault.strerror}") from None
    _make_other_buffers(placed, offloaded)
    offloaded.changed()


def _read(file: BufferedReader, stored: _Stored, target: torch.Tensor) -> None:
    file.seek(stored.offset)
    if target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous():
        _fill(file, target.view(-1).view(torch.uint8), stored)
        return
    flat = target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())
    count = max(1, _PART // stored.dtype.itemsize)
    part = torch.empty(min(count, max(1, flat.numel())), dtype=stored.dtype)
    for start in range(0, flat.numel(), count):
        piece = part[: min(count, flat.numel() - start)]
        _fill(file, piece.view(torch.uint8), stored)
        flat[start : start + count].copy_(piece)
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def _fill(file: BufferedReader, target: torch.Tensor, stored: _Stored) -> None:
    if target.numel():
        buffer: Any = target.numpy()
        read = file.readinto(buffer)
        if read != target.numel():
            raise ModelError(f"{stored.path}: ends before its tensors do; is it truncated?")


def _make_other_buffers(placed: Any, offloaded: Offloaded) -> None:
    strange = offloaded.empty_buffers
    for path, module in placed.named_modules():
        own = {f"{path}.{name}" if path else name for name in module._non_persistent_buffers_set}
        if not own & strange:
            continue
        initialise = getattr(placed, "_init_weights", None)
        before = {name: buffer._version for name, buffer in module.named_buffers(recurse=False)}
        if initialise is not None and not list(module.parameters(recurse=False)):
            with torch.no_grad():
                initialise(module)
        made = dict(module.named_buffers(recurse=False))
        for name in sorted(module._non_persistent_buffers_set):
            if name in made and made[name]._version == before[name]:
                raise ModelError(
                    f"the buffer {name!r} of {path} is in no checkpoint and was made on meta, so "
                    "that it has no values; make the module's buffers on the CPU"
                )
        strange -= own


# --- files ---------------------------------------------------------------------------------------


def _stored(path: Path) -> dict[str, _Stored]:
    """All tensors of a checkpoint."""
    if path.is_dir():
        index, files = path / _INDEX, sorted(path.glob("*.safetensors"))
        if index.is_file():
            return _stored(index)
        if not files:
            raise ModelError(f"{path}: holds no .safetensors file; pickled files are not read")
        return {name: found for file in files for name, found in _header(file).items()}
    if path.name.endswith(".json"):
        document = read_json(path, ModelError, what="index of a checkpoint")
        check(document, {"weight_map": Table(text)}, ModelError, where=f"{path}: no such index")
        of = document["weight_map"]
        strange = next((f for f in of.values() if Path(f).name != f), None)
        if strange is not None:
            raise ModelError(f"{path}: names the file {strange!r}, which is not beside it")
        headers = {file: _header(path.parent / file) for file in set(of.values())}
        missing = next((n for n, f in of.items() if n not in headers[f]), None)
        if missing is not None:
            raise ModelError(f"{path}: says that {of[missing]} has {missing!r}, which it has not")
        return {name: headers[file][name] for name, file in of.items()}
    return _header(path)


def _header(path: Path) -> dict[str, _Stored]:
    """What a safetensors file says it holds; checked against its size."""
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if total < 8 or not 2 <= size <= min(_MOST_HEADER_BYTES, total - 8):
                raise ModelError(f"{path}: not a safetensors file, or truncated")
            document = json.loads(file.read(size))
    except OSError as fault:
        raise ModelError(f"{path}: cannot be read: {fault.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: not a safetensors file (its header is no JSON)") from None
    where = f"{path}: malformed safetensors header"
    if not isinstance(document, dict):
        raise ModelError(f"{where}: it must be an object")
    document.pop("__metadata__", None)
    check(document, Table(_ENTRY), ModelError, where=where)
    found = {}
    for name, entry in document.items():
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise ModelError(f"{where}: {name!r} is of type {entry['dtype']!r}")
        if len(shape) > _MOST_DIMENSIONS:
            raise ModelError(f"{where}: {name!r} has {len(shape):,} dimensions")
        dtype = _DTYPES[entry["dtype"]]
        wide = math.prod(shape) * dtype.itemsize
        if end - begin != wide or 8 + size + end > total:
            raise ModelError(f"{where}: {name!r} lies outside the file")
        found[name] = _Stored(
            path=path, offset=8 + size + begin, size=wide, dtype=dtype, shape=shape
        )
    return found


_ENTRY = {"dtype": text, "shape": [whole], "data_offsets": (whole, whole)}
_MOST_DIMENSIONS = 64
