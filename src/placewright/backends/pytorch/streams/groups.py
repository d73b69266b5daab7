"""Which ops of a graph go together: a group is what one kernel does, or one compiled region.

Views belong to whoever looks through them, so that what goes from group to group is a tensor with
memory of its own. Groups are merged so that no group waits for another that waits for it.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placewright.backends.pytorch.streams.net import Net, Node, aten, is_random, is_view
from placewright.backends.pytorch.streams.ops import (
    CONVOLUTIONS,
    is_fusible,
    is_heavy,
    is_plain_sum,
    is_stencil,
    numbers_of,
)


class Fusion(enum.StrEnum):
    """How much is made of the ops before they are put on streams."""

    NONE = "none"
    """Every op as the module has it: results are bitwise those of the module."""
    FOLDED = "folded"
    """Batch norms folded; products with what is done to their result at once."""
    REGIONS = "regions"
    """That, and chains of other ops, which Inductor may compile to one kernel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Ops that are issued together on one stream."""

    name: str
    """Of its last op."""
    nodes: tuple[Node, ...]
    """In order, without views of what other groups made."""
    module: torch.fx.GraphModule
    """Computes `outputs` from `inputs`."""
    inputs: tuple[str, ...]
    """Values it reads: outputs of other groups, inputs of the module, constants."""
    outputs: tuple[str, ...]
    """Values it makes that others want."""

    @property
    def code(self) -> str:
        """The same for groups that do the same."""
        return str(self.module.code)

    def find(self, *targets: Any) -> list[Node]:
        """Its nodes of these targets, in its own graph."""
        return [n for n in self.module.graph.nodes if n.target in targets]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """A graph as groups, in an order in which they can run."""

    net: Net
    groups: tuple[Group, ...]
    before: tuple[tuple[int, ...], ...]
    """For each group, those it waits for: whose outputs it reads, or that draw random numbers
    before it."""
    finish: torch.fx.GraphModule
    """Makes the module's flat outputs of the values `kept`: views, no work."""
    kept: tuple[str, ...]
    """Values that `finish` takes: of groups, inputs and constants."""

    def users(self) -> list[list[int]]:
        """For each group, those that read its outputs."""
        after: list[list[int]] = [[] for _ in self.groups]
        for number, sources in enumerate(self.before):
            for source in sources:
                after[source].append(number)
        return after


def group(net: Net, fusion: Fusion) -> Grouped:
    """Puts the ops of a graph into groups."""
    return _Grouping(net, fusion).run()


class _Grouping:
    def __init__(self, net: Net, fusion: Fusion) -> None:
        self.net, self.fusion = net, fusion
        self.constant = net.constant_nodes()
        self.work = [
            n for n in net.graph.nodes
            if n.op == "call_function" and n not in self.constant and not is_view(n)
        ]  # fmt: skip
        # Picking one of several results belongs to the op that has them.
        self.home: dict[Node, Node] = {}
        for node in self.work:
            picks = node.target is operator.getitem
            self.home[node] = self.home[node.args[0]] if picks else node
        self.members: dict[Node, list[Node]] = {}
        for node in self.work:
            self.members.setdefault(self.home[node], []).append(node)
        self.group_of = dict(self.home)
        self.users: dict[Node, list[Node]] = {n: _through_views(n) for n in self.work}
        self.regions: set[Node] = set()
        self.heavy: set[Node] = set()

    def run(self) -> Grouped:
        if self.fusion is not Fusion.NONE:
            self._epilogues()
        if self.fusion is Fusion.REGIONS:
            self._regions()
        return self._grouped()

    # --- merging ---

    def _merge(self, kept: Node, gone: Node) -> None:
        for node in self.members.pop(gone):
            self.group_of[node] = kept
            self.members[kept].append(node)

    def _only_user(self, node: Node) -> Node | None:
        """The op that alone uses a node, and directly."""
        users = list(node.users)
        if len(users) != 1 or users[0] not in self.home:
            return None
        return users[0]

    def _epilogues(self) -> None:
        """Products with the addition and the ReLU after them, for which there are kernels."""
        for node in self.work:
            if node.target not in (*CONVOLUTIONS, aten.linear.default):
                continue
            after = self._only_user(node)
            added = None
            if after is not None and node.target in CONVOLUTIONS and is_plain_sum(after):
                added, after = after, self._only_user(after)
            if after is None or after.target not in (aten.relu.default, aten.gelu.default):
                continue
            if after.target is aten.gelu.default and node.target is not aten.linear.default:
                continue
            if self.group_of[after] is not after:
                continue
            if added is not None:
                if self.group_of[added] is not added:
                    continue
                self._merge(after, added)
            self._merge(after, node)

    def _regions(self) -> None:
        """Ops that Inductor makes kernels of, into the region of those that use them."""
        for node in reversed(self.work):
            if self.home[node] is not node or self.group_of[node] is not node:
                continue
            if len({m for m in self.members[node] if self.home[m] is not node}):
                continue
            if not is_fusible(node):
                continue
            users = {self.group_of[u] for m in self.members[node] for u in self.users[m]}
            users.discard(node)
            wanted = [u for u in users if self._fits(node, u, alone=len(users) == 1)]
            self.regions.add(node)
            if is_heavy(node):
                self.heavy.add(node)
            for user in wanted:
                if len(users) == 1 or not self._reaches(node, user):
                    if node in self.heavy:
                        self.heavy.add(user)
                    self._merge(user, node)
                    self.regions.discard(node)
                    break

    def _fits(self, node: Node, region: Node, *, alone: bool) -> bool:
        """Whether an op is better computed in the region of its user than before it."""
        if region not in self.regions or len(self.members[region]) >= _MOST_OPS:
            return False
        if is_heavy(node) and any(is_stencil(m) or m.target is aten.cat.default or is_heavy(m)
                                  for m in self.members[region]):  # fmt: skip
            return False  # it would be computed again and again, or not beside the others
        if node.target is aten.cat.default and any(is_stencil(m) for m in self.members[region]):
            return False
        # Others wait for the whole region then; worth it where a pass over memory is saved.
        return alone or (numbers_of(node) == numbers_of(region) and not is_heavy(node))

    def _reaches(self, node: Node, region: Node) -> bool:
        """Whether what uses a node leads to a region other than directly."""
        open_ = [self.group_of[u] for m in self.members[node] for u in self.users[m]]
        open_ = [g for g in open_ if g is not region and g is not node]
        seen = set(open_)
        while open_:
            for member in self.members[open_.pop()]:
                for user in self.users[member]:
                    other = self.group_of[user]
                    if other is region:
                        return True
                    if other not in seen:
                        seen.add(other)
                        open_.append(other)
        return False

    # --- groups ---

    def _grouped(self) -> Grouped:
        position = {n: i for i, n in enumerate(self.net.graph.nodes)}
        results = {n for n in self.net.results() if isinstance(n, Node)}
        kept = dict.fromkeys(root_of(n) for n in results)
        made: dict[Node, Group] = {}
        for head, members in self.members.items():
            members.sort(key=position.__getitem__)
            wanted = [
                m for m in members
                if m in kept or any(self.group_of[u] is not head for u in self.users[m])
            ]  # fmt: skip
            module, inputs = extract(members, wanted)
            made[head] = Group(
                name=head.name, nodes=tuple(members), module=module,
                inputs=tuple(n.name for n in inputs), outputs=tuple(n.name for n in wanted),
            )  # fmt: skip
        maker = {value: head for head, g in made.items() for value in g.outputs}
        before = {
            head: {maker[v] for v in g.inputs if v in maker} for head, g in made.items()
        }  # fmt: skip
        # Random numbers are drawn in the module's order, so that a seed means the same.
        draws = [h for h in made if any(is_random(n) for n in made[h].nodes)]
        for earlier, later in itertools.pairwise(sorted(draws, key=position.__getitem__)):
            before[later].add(earlier)
        order = _in_order(before, {h: position[g.nodes[0]] for h, g in made.items()})
        number = {head: i for i, head in enumerate(order)}
        finish, taken = extract(
            [n for n in self.net.graph.nodes if n in results and n not in kept],
            self.net.results(),
        )
        return Grouped(
            net=self.net,
            groups=tuple(made[head] for head in order),
            before=tuple(tuple(sorted(number[b] for b in before[head])) for head in order),
            finish=finish,
            kept=tuple(n.name for n in taken),
        )


_MOST_OPS = 40
"""Ops of a region: beyond that a kernel runs out of registers, and compiling takes long."""


def root_of(node: Node) -> Node:
    """What a view looks at."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _through_views(node: Node) -> list[Node]:
    """The ops that use a node, directly or through views."""
    found: list[Node] = []
    for user in node.users:
        if user.op == "call_function":
            found.extend(_through_views(user) if is_view(user) else [user])
    return found


def extract(
    members: Sequence[Node], wanted: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Node]]:
    """A module of some nodes, with the views they look through, that gives what is wanted; and the
    nodes that it takes. Names in it say what is done and not where, so that the same is the same.
    """
    needed: set[Node] = set(members)
    open_ = [*members, *(w for w in wanted if isinstance(w, Node))]
    needed.update(n for n in open_ if is_view(n))
    seen = set(open_)
    while open_:
        node = open_.pop()
        for source in node.all_input_nodes if node in needed else ():
            if source not in seen:
                seen.add(source)
                open_.append(source)
                if is_view(source):
                    needed.add(source)
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    order = [n for n in _graph_of(members, wanted) if n in needed]
    taken = list(dict.fromkeys(
        source for n in order for source in n.all_input_nodes if source not in needed
    ))  # fmt: skip
    taken += [w for w in dict.fromkeys(wanted) if isinstance(w, Node) and w not in needed
              and w not in taken]  # fmt: skip
    for number, source in enumerate(taken):
        copies[source] = graph.placeholder(f"in{number}")
        copies[source].meta = dict(source.meta)
    for node in order:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        assert callable(node.target), node
        copies[node] = graph.call_function(node.target, args, kwargs)
        copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[w] if isinstance(w, Node) else w for w in wanted))
    return torch.fx.GraphModule(torch.nn.Module(), graph), taken


def _graph_of(members: Sequence[Node], wanted: Sequence[Any]) -> Iterable[Node]:
    node = next((n for n in (*members, *wanted) if isinstance(n, Node)), None)
    return () if node is None else node.graph.nodes


def _in_order(before: Mapping[Node, set[Node]], position: Mapping[Node, int]) -> list[Node]:
    """Topological, and otherwise as in the module."""
    waits = {head: len(sources) for head, sources in before.items()}
    after: dict[Node, list[Node]] = {head: [] for head in before}
    for head, sources in before.items():
        for source in sources:
            after[source].append(head)
    ready = [(position[h], i, h) for i, h in enumerate(before) if not waits[h]]
    heapq.heapify(ready)
    tie = {h: i for i, h in enumerate(before)}
    order = []
    while ready:
        _, _, head = heapq.heappop(ready)
        order.append(head)
        for user in after[head]:
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, (position[user], tie[user], user))
    if len(order) < len(before):
        raise AssertionError("groups wait for each other")
    return order
