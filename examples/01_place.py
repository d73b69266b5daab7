"""From a graph to a placement, in Python.

    python examples/01_place.py

A hand-made graph with two branches is placed on the paper's machine with two GPUs. For a TensorFlow
model, pass its file, its directory or the live object to `placewright.load` instead.
"""

from __future__ import annotations

import placewright
from placewright import Edge, Graph, Op, Tensor


def two_branches() -> Graph:
    image = Tensor(4 * 64 * 224 * 224 * 3)
    features = Tensor(4 * 64 * 56 * 56 * 64)
    ops = [Op(name="input", type="Placeholder", outputs=(image,))]
    edges = []
    for branch in ("left", "right"):
        before = "input"
        for layer in range(8):
            name = f"{branch}/conv_{layer}"
            ops.append(Op(name=name, type="Conv2D", outputs=(features,), flops=3e10))
            edges.append(Edge(before, name))
            before = name
        edges.append(Edge(before, "join"))
    ops.append(Op(name="join", type="Add", outputs=(features,), flops=1e7))
    return Graph.from_ops("two branches", ops, edges)


def main() -> None:
    result = placewright.place(two_branches(), "k80x2", trials=2000)
    for row in result.table:
        seconds = row["step_seconds"]
        print(f"{row['method']:14} {seconds:.4f} s" if seconds else f"{row['method']:14} -")
    print(f"best: {result.step_seconds:.4f} s, {result.speed_up:.2f} times the best single device")
    print(f"no placement can be faster than {result.lower_bound_seconds:.4f} s")
    for op, device in result.placement_by_op().items():
        print(f"  {op} -> {device}")


if __name__ == "__main__":
    main()
