"""Which modules are moved as a whole: what `device_map`, pipelines and plans by module work with.

A *unit* is a module that stays in one piece: one that says so (`_no_split_modules` of
transformers), or one without children. Containers and other modules are taken apart. Where code
between units works on the results of two of them (`x + y`), these must be on one device, and so
must units that share a tied parameter: they form one set.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from placewright.backends.pytorch.capture import module_path
from placewright.backends.pytorch.exporting import MODEL, Exported, tied_names
from placewright.graph import DisjointSets, Graph, frozen
from placewright.grouping import Grouping, by_colocation, group


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a module."""

    order: tuple[str, ...]
    """Paths such as `transformer.h.0`, in the order in which they are called; then tensors that
    belong to no unit, and modules that are not called."""
    sets: tuple[tuple[str, ...], ...]
    """Units that must be on one device, in that order."""
    called: int
    """How many of `order` are called."""
    holding: frozenset[str]
    """Units with parameters or buffers. The others run wherever their inputs are."""

    def holder_of(self, path: str) -> str | None:
        """The unit that a module is in, where that has tensors."""
        unit = unit_of(path, dict.fromkeys(self.order))
        return unit if unit in self.holding else None

    def group(self, graph: Graph, ops_of_unit: Mapping[str, Sequence[str]]) -> Grouping:
        """One group for each set. What is in none, such as the code between units, is with what it
        takes its inputs from, or else with who takes its outputs."""
        tied = group(graph, (by_colocation,))
        of = tied.group_of.tolist()
        sets = DisjointSets(tied.num_groups)
        name_of: dict[int, str] = {}
        """Group -> what it is called, for the groups of units."""
        for members in self.sets:
            holding = [unit for unit in members if unit in self.holding]
            ops = [op for unit in holding for op in ops_of_unit.get(unit, ())]
            for op in ops:
                sets.union(of[graph.op_index[ops[0]]], of[graph.op_index[op]])
                name_of[of[graph.op_index[op]]] = holding[0].replace(".", "/") or "model"
        root_of = {sets.find(g): g for g in name_of}
        label_of = {g: root for g in range(tied.num_groups) if (root := sets.find(g)) in root_of}
        edges = list(zip(graph.edge_src.tolist(), graph.edge_dst.tolist(), strict=True))
        for source, target in edges:
            if of[source] in label_of:
                label_of.setdefault(of[target], label_of[of[source]])
        for source, target in reversed(edges):
            if of[target] in label_of:
                label_of.setdefault(of[source], label_of[of[target]])
        numbers: dict[str, int] = {}
        group_of = []
        for g in of:
            name = name_of[root_of[label_of[g]]] if g in label_of else tied.names[g]
            group_of.append(numbers.setdefault(name, len(numbers)))
        return Grouping(group_of=frozen(np.array(group_of, dtype=np.int32)), names=tuple(numbers))


def units_of(
    model: torch.nn.Module, exported: Exported | None, whole: Collection[str] = ()
) -> Units:
    """`exported` shows the order of calls and what goes on between units; without it, units are in
    the order in which the module holds them. `whole`: classes that stay whole, instead of those
    that say so."""
    paths = list(_walk(model, "", frozenset(whole) or _whole_classes(model)))
    known = {path: number for number, path in enumerate(paths)}
    sets = DisjointSets(len(paths))
    order: dict[str, None] = {}
    if exported is not None:
        _join_by_code(exported, known, sets, order)
    called = len(order)
    for other, first in tied_names(model).items():
        a, b = unit_of(other, known), unit_of(first, known)
        if a is not None and b is not None:
            sets.union(known[a], known[b])
    order.update(dict.fromkeys(paths))
    members: dict[int, list[str]] = {}
    for path in order:
        members.setdefault(sets.find(known[path]), []).append(path)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return Units(
        order=tuple(order),
        sets=tuple(tuple(of) for of in members.values()),
        called=called,
        holding=frozenset(unit for name, _ in named if (unit := unit_of(name, known)) is not None),
    )


def unit_of(path: str, units: Mapping[str, object]) -> str | None:
    """The unit that a module or tensor is in."""
    while path not in units:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def _whole_classes(model: torch.nn.Module) -> frozenset[str]:
    names: set[str] = set()
    for module in model.modules():
        said = getattr(module, "_no_split_modules", None)
        names |= {said} if isinstance(said, str) else set(said or ())
    return frozenset(names)


def _walk(module: torch.nn.Module, path: str, whole: frozenset[str]) -> Iterator[str]:
    children = list(module.named_children())
    if type(module).__name__ in whole or not children:
        yield path
        return
    prefix = f"{path}." if path else ""
    own = [*module._parameters.items(), *module._buffers.items()]
    yield from (prefix + name for name, tensor in own if tensor is not None)
    for name, child in children:
        yield from _walk(child, prefix + name, whole)


def _join_by_code(
    exported: Exported, known: Mapping[str, int], sets: DisjointSets, order: dict[str, None]
) -> None:
    graph = exported.module.graph
    sources: dict[torch.fx.Node, set[str]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            name = str(node.target).removeprefix(f"{MODEL}.")
            name = exported.tied.get(name, name)
            # A tensor in a unit is no result of it; one of its own is a unit.
            sources[node] = {name} if name in known else set()
            continue
        if node.op != "call_function":
            continue
        unit = unit_of(dotted_path(node), known)
        if unit is not None and dotted_path(node):
            order.setdefault(unit)
            sources[node] = {unit}
            # A unit's own tensors may be kept by its parent.
            continue
        found: set[str] = set()
        for source in node.all_input_nodes:
            found |= sources.get(source, set())
        if node.target is not operator.getitem and found:
            first, *others = sorted(found, key=lambda path: known[path])
            for other in others:
                sets.union(known[first], known[other])
            found = {first}
        sources[node] = found


def dotted_path(node: torch.fx.Node) -> str:
    """The module that a node was made in, `transformer.h.0`; empty for the root."""
    return module_path(node).replace("/", ".")


def segments(units: Units, device_of: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """(first unit, device) of each run of units in the order of calls that share a device."""
    result: list[tuple[str, str]] = []
    for path in units.order[: units.called]:
        device = device_of.get(path)
        if device is not None and (not result or result[-1][1] != device):
            result.append((path, device))
    return result
