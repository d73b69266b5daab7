from __future__ import annotations

import json
from importlib import resources

import pytest

from placewright.backends.tensorflow.kernels import has_gpu_kernel


@pytest.mark.parametrize(
    ("op_type", "dtypes"),
    [
        ("MatMul", {"T": "float32"}),
        ("MatMul", {"T": "bfloat16"}),
        ("Conv2D", {"T": "float32"}),
        ("ResourceApplyAdam", {"T": "float32"}),
        ("VarHandleOp", {"dtype": "float32"}),
        ("Cast", {"SrcT": "float32", "DstT": "bfloat16"}),
        # Kernels for the DEFAULT device serve every device.
        ("NoOp", {}),
        ("_Arg", {"T": "float32"}),
        ("Placeholder", {"dtype": "string"}),
        ("PartitionedCall", {}),
        ("If", {"Tcond": "bool"}),
        ("While", {}),
        # Control flow of the older kind.
        ("Enter", {"T": "float32"}),
        ("Exit", {"T": "float32"}),
        ("Switch", {"T": "float32"}),
        ("Merge", {"T": "float32"}),
        # No CPU kernel at all.
        ("CudnnRNN", {"T": "float32"}),
    ],
)
def test_op_has_a_gpu_kernel(op_type: str, dtypes: dict[str, str]) -> None:
    assert has_gpu_kernel(op_type, dtypes) is True


@pytest.mark.parametrize(
    ("op_type", "dtypes"),
    [
        ("MatMul", {"T": "string"}),
        ("MatMul", {"T": "int32"}),
        ("StringJoin", {}),
        ("VarHandleOp", {"dtype": "string"}),
        # TensorFlow keeps int32 variables on the CPU.
        ("VarHandleOp", {"dtype": "int32"}),
    ],
)
def test_op_has_only_a_cpu_kernel(op_type: str, dtypes: dict[str, str]) -> None:
    assert has_gpu_kernel(op_type, dtypes) is False


def test_constraints_of_one_kernel_hold_together() -> None:
    assert has_gpu_kernel("Angle", {"T": "complex64", "Tout": "float32"}) is True
    assert has_gpu_kernel("Angle", {"T": "complex128", "Tout": "float64"}) is True
    assert has_gpu_kernel("Angle", {"T": "complex64", "Tout": "float64"}) is False


def test_missing_attribute_rules_no_kernel_out() -> None:
    assert has_gpu_kernel("MatMul", {}) is True
    assert has_gpu_kernel("Shape", {"T": "float32"}) is True


def test_attribute_that_is_not_constrained_is_ignored() -> None:
    assert has_gpu_kernel("NoOp", {"T": "string"}) is True


def test_reference_dtype_counts_as_its_plain_dtype() -> None:
    assert has_gpu_kernel("Assign", {"T": "float32_ref"}) is True
    assert has_gpu_kernel("Assign", {"T": "string_ref"}) is False


def test_unknown_op_is_none() -> None:
    assert has_gpu_kernel("MyCompanyFusedThing", {"T": "float32"}) is None


def test_table_is_consistent() -> None:
    path = resources.files("placewright.backends.tensorflow") / "gpu_kernels.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert not set(content["ops"]) & set(content["cpu_only"])
    for kernels in content["ops"].values():
        assert kernels
        assert all(names for kernel in kernels for names in kernel.values())
