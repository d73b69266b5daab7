"""Random graphs for property-based tests."""

from __future__ import annotations

from hypothesis import strategies as st

from placewright.graph import Edge, Graph, Op, Tensor

# Everything JSON and UTF-8 can carry, including spaces, quotes, markup and emoji.
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
sizes = st.integers(0, 1 << 40)
costs = st.floats(0, 1e15, allow_nan=False, allow_infinity=False)


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 25, colocation: bool = True) -> Graph:
    """Graphs of random ops, given in an order that is not topological."""
    op_names = draw(st.lists(names, min_size=1, max_size=max_ops, unique=True))
    types = draw(st.lists(names, min_size=1, max_size=4))
    labels = st.lists(st.sampled_from("abcde"), max_size=2).map(tuple)
    ops: list[Op] = []
    for i, name in enumerate(op_names):
        outputs = []
        for _ in range(draw(st.integers(0, 2))):
            shape = draw(st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple))
            shares = None
            if i and ops[-1].outputs and draw(st.integers(0, 4)) == 0:
                shares = (ops[-1].name, 0)
            outputs.append(Tensor(draw(sizes), shape, draw(st.sampled_from(["", "int8"])), shares))
        ops.append(
            Op(
                name=name,
                type=draw(st.sampled_from(types)),
                outputs=tuple(outputs),
                param_bytes=draw(st.sampled_from([0, 0, 12])),
                slot_bytes=draw(st.sampled_from([0, 0, 24])),
                flops=draw(st.none() | costs),
                seconds=draw(st.dictionaries(st.sampled_from(["gpu", "k\u00f6rner"]), costs)),
                colocate=draw(labels) if colocation and draw(st.booleans()) else (),
                gradient_of=draw(st.sampled_from(op_names)) if draw(st.booleans()) else None,
                kernels=draw(st.sampled_from([None, None, ("cpu",), ("gpu", "cpu")])),
            )
        )
    edges = []
    for i in range(1, len(ops)):
        for j in draw(st.lists(st.integers(0, i - 1), max_size=3)):
            outputs_of_j = len(ops[j].outputs)
            output = draw(st.integers(0, outputs_of_j - 1)) if outputs_of_j else None
            edges.append(Edge(ops[j].name, ops[i].name, draw(st.sampled_from([output, None]))))
        for tensor in ops[i].outputs:
            if tensor.shares is not None:  # what shares memory reads it
                edges.append(Edge(tensor.shares[0], ops[i].name, tensor.shares[1]))
    return Graph.from_ops("random", draw(st.permutations(ops)), draw(st.permutations(edges)))
