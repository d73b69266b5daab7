"""For users of TensorFlow's former `tensorflow.python.grappler.graph_placer`: the same shape.

from placewright.tensorflow import place_graph

placed = place_graph(metagraph, cluster="k80x4", allotted_time=600)
"""

from __future__ import annotations

from typing import Any

from placewright.cluster import Cluster
from placewright.errors import ModelError
from placewright.problem import Constraints
from placewright.session.driver import place

__all__ = ["place_graph"]


def place_graph(
    metagraph: Any,
    cluster: Cluster | str | None = None,
    allotted_time: float = 3600,
    *,
    batch: int | None = None,
    method: str = "auto",
    seed: int = 0,
    constraints: Constraints | None = None,
) -> Any:
    """A copy of a MetaGraphDef with the device of every op of its step set.

    Args:
        metagraph: a `MetaGraphDef`; what its collection `train_op` needs is placed, everything if
            it has none.
        cluster: a `Cluster`, the name of a preset, or a file; this machine if not given.
        allotted_time: seconds to search.
        batch: the first dimension of inputs that leave it open.
        method: as in `placewright.place`.
        seed: as in `placewright.place`.
        constraints: as in `placewright.place`.
    """
    from placewright.backends.tensorflow.reading import from_meta_graph

    if not hasattr(metagraph, "graph_def"):
        raise ModelError(f"expected a MetaGraphDef, not a {type(metagraph).__name__}")
    result = place(
        from_meta_graph(metagraph, batch=batch),
        cluster if cluster is not None else "local",
        method=method,
        budget=float(allotted_time),
        seed=seed,
        constraints=constraints,
    )
    return result.apply(metagraph)
