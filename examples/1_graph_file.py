"""Place a graph from a file: made by hand here, by any tool in real life.

    python examples/1_graph_file.py

Two branches of eight convolutions, on the machine of the paper with two GPUs.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import placewright
from placewright import Edge, Graph, Op, Tensor

features = Tensor(4 * 64 * 56 * 56 * 64)
ops = [Op(name="input", type="Placeholder", outputs=(Tensor(4 * 64 * 224 * 224 * 3),))]
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

with TemporaryDirectory() as folder:
    path = Path(folder) / "two_branches.json"
    Graph.from_ops("two branches", ops, edges).save(path)
    result = placewright.place(path, "k80x2", trials=1000)

for row in result.table:
    seconds = row["step_seconds"]
    print(f"{row['method']:14}", f"{seconds:.4f} s" if seconds else "-")
print(f"best: {result.step_seconds:.4f} s, {result.speed_up:.2f} times the best single device")
print(f"no placement can be faster than {result.lower_bound_seconds:.4f} s")
for op, device in result.placement_by_op().items():
    print(f"  {op} -> {device}")
