from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from placewright.problem import Problem

if TYPE_CHECKING:
    from tests.simulator.reference import Outcome


@pytest.fixture(scope="session")
def reference() -> Callable[[Problem, Sequence[int]], Outcome]:
    """The plain simulator in reference.py, loaded by path: the tests are no package."""
    spec = importlib.util.spec_from_file_location(
        "simulator_reference", Path(__file__).with_name("reference.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    simulate: Callable[[Problem, Sequence[int]], Outcome] = module.simulate
    return simulate
