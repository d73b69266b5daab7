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
    from placewright.backends import load
    from placewright.backends.base import LoadOptions, RunConfig
    from placewright.cluster import Cluster, Device, DeviceKind, Link
    from placewright.costs import Costs, estimate_costs
    from placewright.distributed.config import TeamConfig
    from placewright.errors import PlacewrightError
    from placewright.evaluators.base import Evaluator
    from placewright.evaluators.simulated import SimulatedEvaluator
    from placewright.graph import Edge, Graph, Op, ScopeRule, Tensor
    from placewright.grouping import Grouping
    from placewright.learning.config import LearnerConfig
    from placewright.measurement import Measurement, Outcome, Trial
    from placewright.placement import Placement
    from placewright.placers.base import Placer
    from placewright.problem import Problem, ProblemConfig, Space, make_problem, with_homes
    from placewright.session.config import SearchConfig
    from placewright.session.driver import Session, place
    from placewright.session.result import Result
    from placewright.session.workload import WorkloadResult, place_workload
    from placewright.workload import Workload

_HOME = {
    "session.result": ("Result",),
    "session.driver": ("Session", "place"),
    "session.config": ("SearchConfig",),
    "distributed.config": ("TeamConfig",),
    "learning.config": ("LearnerConfig",),
    "backends.base": ("LoadOptions", "RunConfig"),
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
    "problem": ("Problem", "ProblemConfig", "Space", "make_problem", "with_homes"),
    "session.workload": ("WorkloadResult", "place_workload"),
    "workload": ("Workload",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Cluster", "Costs", "Device", "DeviceKind", "Edge", "Evaluator", "Graph",
    "Grouping", "LearnerConfig", "Link", "LoadOptions", "Measurement", "Op", "Outcome", "Placement",
    "Placer", "PlacewrightError", "Problem", "ProblemConfig", "Result", "RunConfig", "ScopeRule",
    "SearchConfig", "Session", "SimulatedEvaluator", "Space", "TeamConfig", "Tensor", "Trial",
    "Workload", "WorkloadResult", "__version__", "estimate_costs", "load", "make_problem", "place",
    "place_workload", "with_homes",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'placewright' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"placewright.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # found without this function next time
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
