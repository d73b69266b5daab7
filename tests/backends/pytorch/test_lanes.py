"""No lane may read memory that has been given out again: checked on what is issued, on no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placewright.backends.pytorch.client import prepare
from placewright.backends.pytorch.execution import Execution, Opened, Prepared
from placewright.backends.pytorch.hardware import CudaHardware
from placewright.backends.pytorch.lanes import Lanes, Ledger, OverLimitError
from placewright.backends.pytorch.places import OpenedGpus, Place, Streams
from placewright.backends.pytorch.steps import Call, Ref, Source, Step, Update, Write
from placewright.errors import PlacementError


@dataclass
class Log:
    """Hardware that is not there: it writes down what happens, and what must come before it."""

    counts: list[int]
    """Of each lane: what was really given to it so far, waits included."""
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(lane, the wait's place in it, lane it waits for, how much that one had been given)."""
    lane: int = 0

    def switch(self, lane: int) -> None:
        self.lane = lane

    def record(self, lane: int) -> Any:
        return lane, self.counts[lane]

    def wait(self, lane: int, event: Any) -> None:
        self.counts[lane] += 1
        self.waits.append((lane, self.counts[lane], *event))

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        pass

    def comes_after(self, lane: int, at: int, other: int, position: int) -> bool:
        """Whether work number `at` of a lane can only run when the other lane has come so far."""
        if lane == other:
            return at > position or at == position
        return any(
            waiting == lane
            and done <= at
            and (
                (source == other and reached >= position)
                or (source != lane and self.comes_after(source, reached, other, position))
            )
            for waiting, done, source, reached in self.waits
        )


class Counting(Lanes):
    """Lanes that are given something whenever they say so; there is nobody else who does."""

    def __init__(self, count: int, log: Log) -> None:
        super().__init__(count, log)
        self._log = log

    def work(self, lane: int) -> int:
        self._log.counts[lane] += 1
        return super().work(lane)


def test_a_wait_that_says_nothing_new_is_left_out() -> None:
    log = Log([0] * 3)
    lanes = Counting(3, log)
    lanes.work(0)
    mark = lanes.mark(0)
    lanes.wait(1, mark)
    lanes.wait(1, mark)
    lanes.work(1)
    lanes.wait(2, lanes.mark(1))
    lanes.wait(2, mark)  # it came after it through lane 1
    assert log.waits == [(1, 1, 0, 1), (2, 1, 1, 2)]


def test_a_tensor_is_kept_until_its_owner_has_waited_for_its_readers() -> None:
    lanes = Counting(2, Log([0] * 2))
    ledger = Ledger(lanes, {0: 100}, {0: "gpu:0"})
    lanes.work(0)
    ledger.hold(0, 80)
    lanes.wait(1, lanes.mark(0))
    at = lanes.work(1)
    ledger.release(0, object(), {0: 1, 1: at}, 0, 80)
    assert ledger.live[0] == 80
    lanes.wait(0, lanes.mark(1))
    ledger.settle(0)
    assert ledger.live[0] == 0
    assert ledger.peak[0] == 80


def test_where_memory_is_short_an_owner_waits_for_readers() -> None:
    log = Log([0] * 2)
    lanes = Counting(2, log)
    ledger = Ledger(lanes, {0: 100}, {0: "gpu:0"})
    ledger.hold(0, 80)
    ledger.release(0, object(), {1: lanes.work(1)}, 0, 80)
    ledger.hold(0, 60)
    assert log.waits == [(0, 1, 1, 1)]
    with pytest.raises(OverLimitError, match=r"gpu:0 has 100 B, and .* 110 B are needed"):
        ledger.hold(0, 50)


# --- whole steps ---------------------------------------------------------------------------------


@dataclass
class Immediate(Log):
    """Does everything at once, on the CPU, in the order in which it is issued."""

    def wait_for_host(self, lane: int, semaphore: int) -> None:
        ctypes.CDLL(None).sem_wait(ctypes.c_void_p(semaphore))

    def synchronize(self) -> None:
        pass

    def give_back(self) -> None:
        pass


def places(names: str) -> list[Place]:
    """`g` is a GPU or a part of one, `s` a stream of one that they share, `c` the CPU."""
    streams = [number for number, name in enumerate(names) if name == "s"]
    return [
        Place(
            number=number,
            name=f"{name}{number}",
            device="cpu" if name == "c" else "cpu:0",  # which is the CPU as well, for torch
            pool=streams[0] if name == "s" else number,
            memory_bytes=1 << 40,
        )
        for number, name in enumerate(names)
    ]


def random_step(rng: random.Random, calls: int) -> Step:
    """Sums, products, views and pieces of earlier values."""
    sources = tuple(
        Source(value=v, kind="input", name=str(v), shape=(4, 6), dtype="float32", op=v)
        for v in range(3)
    )
    made: list[Call] = []
    whole, fresh = [0, 1, 2], []
    for value in range(3, 3 + calls):
        kind = rng.choice(("add", "mul", "relu", "view", "split"))
        if value > calls:
            kind = "add"  # what is returned is no view of what changes
        if kind not in ("view", "split"):
            fresh.append(value)
        a, b = (Ref(rng.choice(whole)) for _ in range(2))
        how: dict[str, tuple[str, tuple[Any, ...]]] = {
            "add": ("aten.add.Tensor", (a, b)),
            "mul": ("aten.mul.Tensor", (a, b)),
            "relu": ("aten.tanh.default", (a,)),
            "view": ("aten.view.default", (a, (4, 6))),
            "split": ("aten.cat.default", ((a, b),)),
        }
        target, args = how[kind]
        made.append(Call(value=value, target=target, args=args, kwargs={}, op=value))
        if kind == "split":  # of a tensor with eight rows, the first four
            made[-1] = Call(
                value=value, target="aten.slice.Tensor", args=(a, 0, 0, 4), kwargs={}, op=value
            )
        whole.append(value)
    last = 3 + calls
    return Step(
        num_values=last,
        sources=sources,
        calls=tuple(made),
        results=(last - 1, last - 2),
        # What others read in the step is changed when it is over.
        writes=(Write(0, rng.choice(fresh)),),
        updates=tuple(Update(v, rng.choice(fresh), last + v - 1) for v in (1, 2)),
        optimizer="SGD",
        settings={"lr": 0.25, "foreach": False},
    )


class Accesses(TorchDispatchMode):
    """Who touches which memory, seen from below: every op that torch runs, on the lane of the
    moment. An event is after those that ran before it was recorded, whatever the clocks say."""

    changed = 0
    """Times that something was changed which another lane had touched."""

    def __init__(self, log: Log, lasting: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.lasting = lasting
        """Addresses of parameters and the like: of nothing else one may say who touched it before,
        as what goes through the host shares slabs of pinned memory."""
        self.made: dict[int, tuple[int, int]] = {}
        """Address -> who made what lies there."""
        self.of: dict[int, list[tuple[int, int]]] = {}
        """Address -> (lane, position) of each op that read or wrote there."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        lane = self.log.lane
        if lane < 0:
            return result
        self.log.counts[lane] += 1
        now = self.log.counts[lane]
        taken = {address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = {address(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)} - taken
        for memory in taken & self.made.keys():
            assert self.log.comes_after(lane, now, *self.made[memory])
        for memory in changed_by(function, args) & self.lasting:
            for other, position in self.of.get(memory, ()):
                assert self.log.comes_after(lane, now, other, position)
                Accesses.changed += other != lane
        for memory in made:
            self.made[memory] = (lane, now)
            self.of[memory] = []  # what lay at this address before was let go of
        for memory in taken | made:
            self.of.setdefault(memory, []).append((lane, now))
        return result


def changed_by(function: Any, args: Any) -> set[int]:
    """The memories that a call writes to which were there before."""
    written = [
        given
        for said, given in zip(function._schema.arguments, args, strict=False)
        if said.alias_info is not None and said.alias_info.is_write
    ]
    return {address(t) for t in tree_leaves(written) if isinstance(t, torch.Tensor)}


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Checked(Ledger):
    """Checks each memory that is given back against everybody who has touched it."""

    accesses: Accesses
    freed = 0

    def _check(self, owner: int, tensors: list[Any]) -> None:
        log = self.accesses.log
        for tensor in tensors:
            for lane, position in (
                self.accesses.of.pop(address(tensor), ()) if tensor is not None else ()
            ):
                Checked.freed += 1
                assert log.comes_after(owner, log.counts[owner] + 1, lane, position)

    def release(self, owner: int, tensor: Any, uses: Any, pool: int, size: int) -> None:
        before = len(self._waiting.get(owner, ()))
        super().release(owner, tensor, uses, pool, size)
        if len(self._waiting.get(owner, ())) == before:
            self._check(owner, tensor)

    def settle(self, owner: int) -> None:
        before = list(self._waiting.get(owner, ()))
        super().settle(owner)
        kept = {id(held) for held in self._waiting.get(owner, ())}
        for held in before:
            if id(held) not in kept:
                self._check(owner, held.tensor)


def ran_right(
    prepared: Prepared,
    opened: Opened,
    op_places: list[int],
    direct: bool,
    memory_bytes: list[int] | None = None,
) -> Execution:
    """Two steps, of which every access is checked, and what they return."""
    at, log = opened.places, opened.hardware
    execution = Execution(
        prepared, opened, op_places, direct=[[direct] * len(at)] * len(at),
        memory_bytes=memory_bytes,
    )  # fmt: skip
    for _ in range(2):
        log.counts[:], log.lane = [0] * opened.num_lanes, -1
        log.waits.clear()
        prepared.values.reset()
        there = [prepared.values.all_on(place.torch_device) for place in at]
        lasting = {address(tensor) for values in there for tensor in values.values()}
        Checked.accesses = Accesses(log, lasting)
        try:
            with Checked.accesses:
                execution.run()
        finally:
            log.lane = -1
        for got, wanted in zip(execution.results(), prepared.learned.results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    return execution


def random_placement(rng: random.Random, step: Step, count: int) -> list[int]:
    found = [rng.randrange(count) for _ in range(step.num_values + len(step.updates))]
    for update in step.updates:  # where the parameter is
        found[update.op] = found[update.parameter]
    return found


@pytest.mark.parametrize("names", ["gg", "ss", "gc", "ssc", "ggcc", "ggggc", "cc"])
@pytest.mark.parametrize("direct", [False, True])
def test_any_placement_gives_the_same_and_reads_nothing_that_was_overwritten(
    names: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(names)
    monkeypatch.setattr("placewright.backends.pytorch.execution.Ledger", Checked)
    Checked.freed = Accesses.changed = 0
    for _ in range(12):
        step = random_step(rng, 14)
        opened = Opened(places(names), Immediate([0] * 2))
        try:
            op_places = random_placement(rng, step, len(names))
            prepared = prepare(step, {}, [0] * len(op_places), opened)
            ran_right(prepared, opened, op_places, direct)
        finally:
            opened.close()
    assert Checked.freed > 20 or names == "cc"
    assert Accesses.changed > 5 or names == "cc"


def test_an_update_is_where_its_parameter_is() -> None:
    """Elsewhere it would change another tensor, and nobody would notice but by the losses."""
    rng = random.Random(0)
    step = random_step(rng, 14)
    while not step.updates:
        step = random_step(rng, 14)
    opened = Opened(places("gc"), Immediate([0] * 2))
    try:
        op_places = [0] * (step.num_values + len(step.updates))
        prepared = prepare(step, {}, [0] * len(op_places), opened)
        op_places[step.updates[0].op] = 1
        with pytest.raises(PlacementError, match="a parameter is on g0 and its update on c1"):
            Execution(prepared, opened, op_places, direct=[[False] * 2] * 2)
    finally:
        opened.close()


@pytest.mark.parametrize("names", ["gg", "ss", "sss", "ssc"])
def test_where_memory_is_short_nothing_is_read_that_is_not_there_yet(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes wait for each other then in the midst of issuing a call."""
    rng = random.Random(names)
    reclaimed: list[int] = []
    reclaim = Ledger._reclaim

    def counted(self: Ledger, pool: int) -> None:
        before = self.live[pool]
        reclaim(self, pool)
        reclaimed.append(before - self.live[pool])

    monkeypatch.setattr(Ledger, "_reclaim", counted)
    monkeypatch.setattr("placewright.backends.pytorch.execution.Ledger", Checked)
    fitted = 0
    for _ in range(12):
        step = random_step(rng, 24)
        opened = Opened(places(names), Immediate([0] * 2))
        try:
            op_places = random_placement(rng, step, len(names))
            prepared = prepare(step, {}, [0] * len(op_places), opened)
            peaks = ran_right(prepared, opened, op_places, True).peak_bytes
            for less in (0.85, 0.7):
                limits = [
                    int(less * peak) if place.on_gpu else place.memory_bytes
                    for peak, place in zip(peaks, opened.places, strict=True)
                ]
                with contextlib.suppress(OverLimitError):
                    found = ran_right(prepared, opened, op_places, True, limits).peak_bytes
                    assert all(np.array(found) <= limits)
                    fitted += 1
        finally:
            opened.close()
    assert fitted > 3
    assert sum(reclaimed) > 0


def test_a_view_of_what_the_step_changes_is_what_it_was_for_who_takes_it_late() -> None:
    """The second place reads a view of a source when the first has written to that already."""
    ended = threading.Event()

    class Late(Execution):
        def _end_on_cpu(self, number: int) -> None:
            super()._end_on_cpu(number)
            if number == 0:
                ended.set()

        def _take_on_cpu(self, value: int, number: int) -> torch.Tensor:
            assert ended.wait(60)
            return super()._take_on_cpu(value, number)

    source = Source(value=0, kind="input", name="0", shape=(4, 6), dtype="float32", op=0)
    view = Call(value=1, target="aten.view.default", args=(Ref(0), (6, 4)), kwargs={}, op=1)
    fresh = Call(value=2, target="aten.tanh.default", args=(Ref(0),), kwargs={}, op=2)
    late = Call(value=3, target="aten.tanh.default", args=(Ref(1),), kwargs={}, op=3)
    step = Step(
        num_values=4, sources=(source,), calls=(view, fresh, late), results=(3,),
        writes=(Write(0, 2),), updates=(), optimizer="", settings={},
    )  # fmt: skip
    opened = Opened(places("cc"), Immediate([0] * 2))
    try:
        prepared = prepare(step, {}, [0] * 4, opened)
        execution = Late(prepared, opened, [0, 0, 0, 1], direct=[[False] * 2] * 2)
        execution.run()
        torch.testing.assert_close(
            execution.results(), list(prepared.learned.results), rtol=0, atol=0
        )
    finally:
        opened.close()


def test_what_stays_under_a_view_is_taken_anew_in_each_step() -> None:
    """A gradient that looks at a tensor from another place."""
    source = Source(value=0, kind="parameter", name="0", shape=(6,), dtype="float32", op=0)
    twice = Call(value=1, target="aten.mul.Tensor", args=(Ref(0), 2.0), kwargs={}, op=1)
    view = Call(value=2, target="aten.view.default", args=(Ref(1), (6,)), kwargs={}, op=2)
    step = Step(
        num_values=3, sources=(source,), calls=(twice, view), results=(2,),
        updates=(Update(0, 2, 3),), optimizer="SGD", settings={"lr": 1.0},
    )  # fmt: skip
    opened = Opened(places("cc"), Immediate([0] * 2))
    try:
        prepared = prepare(step, {"0": torch.ones(6)}, [0] * 4, opened)
        execution = Execution(prepared, opened, [0, 1, 0, 0], direct=[[False] * 2] * 2)
        seen = []
        with torch.no_grad():
            for _ in range(4):
                execution.run()
                seen.append(float(execution.results()[0][0]))
        assert seen == [2, -2, 2, -2]  # w becomes w - 2 w
    finally:
        opened.close()


def test_results_stay_what_they_are() -> None:
    """Also where they are views of what the next step writes to."""
    source = Source(value=0, kind="input", name="0", shape=(4, 6), dtype="float32", op=0)
    view = Call(value=1, target="aten.view.default", args=(Ref(0), (6, 4)), kwargs={}, op=1)
    more = Call(value=2, target="aten.add.Tensor", args=(Ref(0), 1.0), kwargs={}, op=2)
    step = Step(
        num_values=3, sources=(source,), calls=(view, more), results=(1,), writes=(Write(0, 2),)
    )  # fmt: skip
    opened = Opened(places("c"), Immediate([0] * 2))
    try:
        prepared = prepare(step, {"0": torch.zeros(4, 6)}, [0] * 3, opened)
        execution = Execution(prepared, opened, [0] * 3, direct=[[False]])
        execution.run()
        first = execution.results()
        execution.run()
        assert not bool(torch.equal(*first, *execution.results()))
        assert bool((prepared.learned.results[0] == 0).all())
    finally:
        opened.close()


def test_all_gpus_of_a_step_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is replayed with the GPU that the thread had before as the current one."""
    waited: list[object] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking  # asleep: the cores are for what is placed on the CPU

        def record(self, stream: object) -> None:
            waited.append(f"main lane on {stream}")

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    libc = ctypes.CDLL(None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    gpus = [
        Place(number=n, name=f"gpu:{n}", device=f"cuda:{n}", pool=n, memory_bytes=1)
        for n in (2, 1)
    ]  # fmt: skip
    stream: Any = None
    streams = {n: Streams(compute=stream, arrive=stream, leave=stream) for n in (1, 2)}
    CudaHardware(gpus, OpenedGpus(streams=streams)).synchronize()
    assert waited == ["main lane on cuda:2", "cuda:1", "cuda:2"]
