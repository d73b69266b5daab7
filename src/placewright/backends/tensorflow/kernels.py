"""Which TensorFlow ops can run on a GPU, from a table taken from a CUDA build.

A CPU build of TensorFlow does not register GPU kernels, so the library at hand cannot be asked.
The table is written by ``tools/dump_tensorflow_kernels.py``, whose docstring defines its format.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple


class _Table(NamedTuple):
    # Per op type its kernels, and per kernel the dtypes that each constrained attribute may have.
    gpu: dict[str, list[dict[str, frozenset[str]]]]
    cpu_only: frozenset[str]


@functools.cache
def _table() -> _Table:
    path = resources.files("placewright.backends.tensorflow") / "gpu_kernels.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    gpu = {
        op_type: [
            {attribute: frozenset(names) for attribute, names in kernel.items()}
            for kernel in kernels
        ]
        for op_type, kernels in content["ops"].items()
    }
    return _Table(gpu, frozenset(content["cpu_only"]))


def has_gpu_kernel(op_type: str, dtypes: Mapping[str, str]) -> bool | None:
    """Whether TensorFlow's CUDA build has a GPU kernel for this op with these dtype attributes.

    ``dtypes`` maps attribute names to dtype names, as in ``{"T": "float32"}``. An attribute that
    is missing from it rules no kernel out: graphs are often saved without the attributes that
    have their default value.

    None when the table does not know the op type at all (a custom op, or one of TensorFlow's that
    has no kernel on any device): the caller decides.
    """
    table = _table()
    kernels = table.gpu.get(op_type)
    if kernels is None:
        return False if op_type in table.cpu_only else None
    return any(_accepts(kernel, dtypes) for kernel in kernels)


def _accepts(kernel: Mapping[str, frozenset[str]], dtypes: Mapping[str, str]) -> bool:
    # Kernels are registered for plain dtypes; a reference variable's dtype differs in name only.
    return all(
        attribute not in dtypes or dtypes[attribute].removesuffix("_ref") in allowed
        for attribute, allowed in kernel.items()
    )
