"""Write the table of TensorFlow ops that have a GPU kernel.

A CPU build of TensorFlow registers no GPU kernels, so on such a machine the question "could this
op run on a GPU?" has no answer in the installed library. This script asks a CUDA build once and
keeps the answer in a file that ships with Placewright.

Usage, in an environment of its own (no GPU, driver or CUDA libraries are needed: the Linux x86-64
package on PyPI is a CUDA build, and kernels are registered when it is imported)::

    pip install tensorflow==2.21.0
    python tools/dump_tensorflow_kernels.py [--output FILE]

What it writes::

    {"tensorflow": "2.21.0",
     "ops": {op type: [kernel, ...]},
     "cpu_only": [op type, ...]}

- A kernel is ``{attribute: [dtype name, ...]}``: it serves a node each of whose listed dtype
  attributes has one of the listed dtypes. An attribute that is not listed may have any dtype, so
  ``{}`` is a kernel for every dtype. No list of dtypes is ever empty.
- ``ops`` holds the ops with a kernel for GPU or for DEFAULT. TensorFlow falls back to the DEFAULT
  kernel on any device that has none of its own, a GPU included.
- ``cpu_only`` holds the ops that have kernels, but none for GPU or DEFAULT.
- Ops with no kernel at all are in neither: test ops, TPU ops and ops that a graph pass rewrites.

Kernels are merged without changing what they accept, so their number is not TensorFlow's.

Left out on purpose:

- Labelled kernels. TensorFlow picks them only for nodes that ask for the label by name.
- Constraints on attributes that are not dtypes. Only GatherNd (``bad_indices_policy``) and
  ApproxTopK (``reduction_dimension``, ``is_max_k``) have them on GPU, for uncommon settings.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Kernel = dict[str, frozenset[str]]

GPU_DEVICES = ("GPU", "DEFAULT")
DEFAULT_OUTPUT = (
    Path(__file__).resolve().parent.parent
    / "src"
    / "placewright"
    / "backends"
    / "tensorflow"
    / "gpu_kernels.json"
)


def merge(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Fewer kernels that together accept exactly what the given ones accept."""
    merged = list(kernels)
    attributes = sorted({attribute for kernel in merged for attribute in kernel})
    before = -1
    while before != len(merged):
        before = len(merged)
        merged = _without_covered(merged)
        for attribute in attributes:
            merged = _union_over(merged, attribute)
    return sorted(merged, key=lambda kernel: json.dumps(_as_json(kernel)))


def _without_covered(kernels: list[Kernel]) -> list[Kernel]:
    kept: list[Kernel] = []
    for kernel in kernels:
        if any(_covers(other, kernel) for other in kept):
            continue
        kept = [other for other in kept if not _covers(kernel, other)]
        kept.append(kernel)
    return kept


def _covers(wide: Kernel, narrow: Kernel) -> bool:
    return all(attribute in narrow and narrow[attribute] <= wide[attribute] for attribute in wide)


def _union_over(kernels: list[Kernel], attribute: str) -> list[Kernel]:
    """Join the kernels that differ in this attribute alone, which is when a union is exact."""
    joined: dict[frozenset[tuple[str, frozenset[str]]], Kernel] = {}
    untouched: list[Kernel] = []
    for kernel in kernels:
        if attribute not in kernel:
            untouched.append(kernel)
            continue
        rest = frozenset((name, dtypes) for name, dtypes in kernel.items() if name != attribute)
        if rest in joined:
            union = joined[rest][attribute] | kernel[attribute]
            joined[rest] = {**joined[rest], attribute: union}
        else:
            joined[rest] = kernel
    return untouched + list(joined.values())


def _as_json(kernel: Kernel) -> dict[str, list[str]]:
    return {attribute: sorted(kernel[attribute]) for attribute in sorted(kernel)}


def _dtype_constraints(definition: Any, as_dtype: Any) -> Kernel:
    kernel: Kernel = {}
    for constraint in definition.constraint:
        enums = constraint.allowed_values.list.type
        if not enums:
            continue  # A constraint on a string, number or flag: see the docstring above.
        dtypes = frozenset(as_dtype(enum).name for enum in enums)
        # TensorFlow requires every constraint to hold, so a repeated attribute narrows.
        kernel[constraint.name] = kernel.get(constraint.name, dtypes) & dtypes
    return kernel


def table(tensorflow: Any, definitions: Iterable[Any]) -> dict[str, Any]:
    """The table for these kernel definitions (``KernelDef`` messages)."""
    seen: set[str] = set()
    gpu: dict[str, list[Kernel]] = {}
    for definition in definitions:
        seen.add(definition.op)
        if definition.device_type in GPU_DEVICES and not definition.label:
            kernel = _dtype_constraints(definition, tensorflow.as_dtype)
            if all(kernel.values()):
                gpu.setdefault(definition.op, []).append(kernel)
    return {
        "tensorflow": tensorflow.__version__,
        "ops": {op: [_as_json(kernel) for kernel in merge(gpu[op])] for op in sorted(gpu)},
        "cpu_only": sorted(seen - set(gpu)),
    }


def render(content: dict[str, Any]) -> str:
    """The table as JSON with one op on a line, so that a new TensorFlow gives a readable diff."""

    def compact(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    ops = ",\n".join(f"{compact(op)}:{compact(found)}" for op, found in content["ops"].items())
    cpu_only = ",\n".join(compact(op) for op in content["cpu_only"])
    version = compact(content["tensorflow"])
    return f'{{"tensorflow":{version},\n"ops":{{\n{ops}\n}},\n"cpu_only":[\n{cpu_only}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write the table of TensorFlow ops that have a GPU kernel."
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE")
    output: Path = parser.parse_args().output

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Imported by name, so that checking this file's types does not need TensorFlow.
    tensorflow: Any = importlib.import_module("tensorflow")
    if not tensorflow.test.is_built_with_cuda():
        print(
            f"TensorFlow {tensorflow.__version__} here is not a CUDA build and has no GPU kernels "
            "to list: install the package 'tensorflow' on Linux x86-64.",
            file=sys.stderr,
        )
        return 1
    kernels: Any = importlib.import_module("tensorflow.python.framework.kernels")
    content = table(tensorflow, kernels.get_all_registered_kernels().kernel)
    text = render(content)
    output.write_text(text, encoding="utf-8")
    print(
        f"{output}: {len(content['ops'])} ops with a GPU kernel, "
        f"{len(content['cpu_only'])} without, {len(text)} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
