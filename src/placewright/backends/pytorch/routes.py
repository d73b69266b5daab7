"""What a placement makes of a step: which values go where, and after which call each is let go of.

Memory is told by roots: the value whose storage others look at. A value that is copied to another
place has memory of its own there. Streams of one GPU share a pool of memory, so there roots are of
the pool, not of the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placewright.backends.pytorch.places import Place
from placewright.backends.pytorch.steps import Step
from placewright.backends.pytorch.works import Learned, Work, kept_values

Key = tuple[int, int]
"""(pool, root)"""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Of one placement."""

    home: tuple[int, ...]
    """Value -> the place that makes it, or has it from the start; -1 for what is not there."""
    targets: dict[int, tuple[int, ...]]
    """Value -> the other places that read it, in the order in which they do."""
    first_use: dict[int, int]
    """Source that goes elsewhere -> the first call that reads it there."""
    root: dict[Key, int]
    """(pool, value) -> the value whose memory it is there."""
    owned_bytes: dict[Key, int]
    """(pool, root) -> bytes of it."""
    dropped: tuple[tuple[Key, ...], ...]
    """After each call: what nobody needs any more."""
    members: dict[Key, tuple[int, ...]]
    """(pool, root) -> the values that look at it there."""


def find_routes(
    step: Step,
    works: Sequence[Work],
    learned: Learned,
    places: Sequence[Place],
    place_of_op: Sequence[int],
) -> Routes:
    """Follows the step once."""
    home = [-1] * step.num_values
    for source in step.sources:
        home[source.value] = place_of_op[source.op]
    for work in works:
        for _, value in work.makes:
            home[value] = place_of_op[work.op]
    readers: dict[int, dict[int, int]] = {}
    """Value -> place -> the first call that reads it there."""
    last: dict[Key, int] = {}
    root: dict[Key, int] = {}
    owned: dict[Key, int] = {}
    forms = learned.forms
    end = len(works)

    def pool(place: int) -> int:
        return places[place].pool

    def use(place: int, value: int, at: int) -> None:
        key = (pool(place), root.setdefault((pool(place), value), value))
        last[key] = max(last.get(key, at), at)

    def arrives(value: int, place: int, at: int) -> None:
        """A value is read at a place: where it has other memory, it was copied there."""
        if place != home[value] and place not in readers.setdefault(value, {}):
            readers[value][place] = at
            form = forms[value]
            if pool(place) != pool(home[value]) and form is not None:
                root[pool(place), value] = value
                owned[pool(place), value] = form.copied_bytes
            # It was sent when it was made, or for what was there already, now.
            use(home[value], value, at if made_at[value] < 0 else made_at[value])
        use(place, value, at)

    made_at = [-1] * step.num_values
    sources = {source.value for source in step.sources}
    for number, work in enumerate(works):
        place = place_of_op[work.op]
        for value in work.reads:
            arrives(value, place, number)
        for _, value in work.makes:
            made_at[value] = number
            form = forms[value]
            base = None
            if form is not None and form.root != value:
                base = next((r for r in work.reads if _same_memory(forms, r, form.root)), None)
            key = (pool(place), value)
            root[key] = value if base is None else root[pool(place), base]
            if base is None and form is not None:
                owned[key] = form.bytes or form.copied_bytes
            use(place, value, number)
    for value, place in _read_at_the_end(step, home, place_of_op):
        arrives(value, place, end)
    kept = {(pool(home[v]), root.get((pool(home[v]), v), v)) for v in kept_values(step)}
    dropped: list[list[Key]] = [[] for _ in range(end + 1)]
    for key, at in last.items():
        if key not in kept:
            dropped[at].append(key)
    members: dict[Key, list[int]] = {}
    for (of, value), base_value in root.items():
        members.setdefault((of, base_value), []).append(value)
    return Routes(
        home=tuple(home),
        targets={value: tuple(to) for value, to in readers.items()},
        first_use={v: min(to.values()) for v, to in readers.items() if v in sources},
        root=root,
        owned_bytes=owned,
        dropped=tuple(tuple(keys) for keys in dropped),
        members={key: tuple(values) for key, values in members.items()},
    )


def _same_memory(forms: Sequence[object], value: int, root: int) -> bool:
    form = forms[value]
    return form is not None and getattr(form, "root", -1) == root


def _read_at_the_end(
    step: Step, home: Sequence[int], place_of_op: Sequence[int]
) -> list[tuple[int, int]]:
    """(value, place): gradients where the update is, written values where what they replace is."""
    return [
        *((update.gradient, place_of_op[update.op]) for update in step.updates),
        *((write.value, home[write.source]) for write in step.writes),
    ]
