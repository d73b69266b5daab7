"""Placewright finds the device placement that makes a machine-learning graph run fastest.

    import placewright

    graph = placewright.load("inception_v3")
    result = placewright.place(graph, "k80x4", budget=60)
    print(result.step_seconds, result.speed_up)
    result.save("result")

The public names are imported on first use, so that `import placewright` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from placewright._version import VERSION as __version__

if TYPE_CHECKING:
    from placewright.api import Result, place
    from placewright.backends import load
    from placewright.cluster import Cluster, Device, DeviceKind, Link
    from placewright.costs import Costs, estimate_costs
    from placewright.errors import PlacewrightError
    from placewright.evaluators.base import Evaluator
    from placewright.evaluators.simulated import SimulatedEvaluator
    from placewright.graph import Edge, Graph, Op, ScopeRule, Tensor
    from placewright.grouping import Grouping
    from placewright.measurement import Measurement, Outcome, Trial
    from placewright.placement import Placement
    from placewright.placers.base import Placer
    from placewright.problem import Problem, ProblemConfig, make_problem

_HOME = {
    "api": ("Result", "place"),
    "cluster": ("Cluster", "Device", "DeviceKind", "Link"),
    "costs": ("Costs", "estimate_costs"),
    "errors": ("PlacewrightError",),
    "evaluators.base": ("Evaluator",),
    "evaluators.simulated": ("SimulatedEvaluator",),
    "backends": ("load",),
    "graph": ("Edge", "Graph", "Op", "ScopeRule", "Tensor"),
    "grouping": ("Grouping",),
    "measurement": ("Measurement", "Outcome", "Trial"),
    "placement": ("Placement",),
    "placers.base": ("Placer",),
    "problem": ("ProblemConfig", "Problem", "make_problem"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Cluster", "Costs", "Device", "DeviceKind", "Edge", "Evaluator", "Graph",
    "Grouping", "Link", "Measurement", "Op", "Outcome", "Placement", "Placer", "PlacewrightError",
    "Problem", "ProblemConfig", "Result", "ScopeRule", "SimulatedEvaluator", "Tensor", "Trial",
    "__version__", "estimate_costs", "load", "make_problem", "place",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'placewright' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"placewright.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # found without this function next time
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
