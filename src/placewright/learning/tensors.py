"""Tensors in files: safetensors with a JSON header, written in one step, never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from placewright.errors import LearningError
from placewright.files import write_bytes


def write_tensors(
    path: str | Path, kind: str, description: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    header = {"format": kind, "description": json.dumps(description, allow_nan=False)}
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes(path, save(plain, header), LearningError)


def read_tensors(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The description and the tensors of a file of this kind, or one line on what is wrong."""
    if not Path(path).is_file():
        raise LearningError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != kind:
                raise LearningError(f"{path}: is {header.get('format', 'no')!r}, expected {kind!r}")
            description = json.loads(header["description"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as fault:
        raise LearningError(f"{path}: not a {kind} file, or a damaged one: {fault}") from None
    if not isinstance(description, dict):
        raise LearningError(f"{path}: malformed header")
    return description, tensors
