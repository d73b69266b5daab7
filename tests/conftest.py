from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: more threads than one in each would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines that run the tests are shared: examples may take any time.
settings.register_profile(
    "placewright",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("placewright")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpus and (reason := _why_no_gpu()):
        for item in for_gpus:
            item.add_marker(pytest.mark.skip(reason=reason))
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: make test-slow"))


def _why_no_gpu() -> str:
    """Empty where PyTorch has a GPU."""
    try:
        import torch
    except ImportError:
        return "needs PyTorch"
    return "" if torch.cuda.is_available() else "needs a GPU that PyTorch can use"
