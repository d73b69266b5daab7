"""Runs a step under a placement: on streams and parts of GPUs, and on cores of the CPU beside.

One thread issues all work of the GPUs, in the program's order, each call to the stream of its
place; where a tensor is needed elsewhere, the other stream waits for an event (`lanes`). Every
place on the CPU is a thread with cores of its own, which makes its calls in the same order. Tensors
travel

- between streams of one GPU: not at all, they share its memory;
- between GPUs or parts of one: as a copy, or through pinned memory of the host, out on one copy
  stream and in on another, as on machines whose GPUs cannot reach each other;
- from a GPU to the CPU: through pinned memory, behind which the stream writes the number of the
  step, for which the thread waits;
- from the CPU to a GPU: through pinned memory, behind which the thread posts a semaphore. One lane
  does nothing but wait for these, one after another in the program's order, as CUDA may run such
  waits one at a time: in any other order they could wait for each other for ever.

Nothing of this needs the issuing thread in mid-step. So the same work can be issued step by step,
or captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from placewright.backends.pytorch.hardware import CudaHardware, Semaphores
from placewright.backends.pytorch.lanes import (
    Lanes,
    Ledger,
    Mark,
    OverLimitError,
    sum_by_pool,
)
from placewright.backends.pytorch.places import Place, open_gpus
from placewright.backends.pytorch.routes import Key, find_routes
from placewright.backends.pytorch.steps import Step, Update
from placewright.backends.pytorch.values import Values
from placewright.backends.pytorch.workers import CpuWorker
from placewright.backends.pytorch.works import Learned, Work, make_call, store
from placewright.errors import PlacementError, PlacewrightError
from placewright.units import format_bytes

MAIN = 0
"""The lane that a step begins and ends on."""
HOST = 1
"""The lane that waits for the CPU."""
COMPUTE, ARRIVE, LEAVE = 0, 1, 2
"""The lanes of a place."""

_POLL_SECONDS = 20e-6


class StoppedError(PlacewrightError):
    """Another thread of the step has failed, and this one has nothing to wait for any more."""


class BrokenError(PlacewrightError):
    """This process can do nothing with its GPUs any more."""


class Moment(NamedTuple):
    """When something ran in a traced step, in seconds from its begin."""

    op: int
    """Of the graph; -1 for a transfer."""
    place: int
    begin: float
    end: float
    value: int = -1
    """What was transferred."""
    source: int = -1
    """Where from."""


class Opened:
    """The places of a cluster, ready to run: streams, threads. One step at a time."""

    def __init__(self, places: Sequence[Place], hardware: Any = None) -> None:
        self.places = tuple(places)
        self.gpus = [place for place in places if place.on_gpu]
        self._rank = {place.number: rank for rank, place in enumerate(self.gpus)}
        if self.gpus and hardware is None:
            self._keep = open_gpus(places)
            hardware = CudaHardware(places, self._keep)
        self.hardware = hardware
        self.workers = {
            place.number: CpuWorker(place.name, place.cores) for place in places if not place.on_gpu
        }

    def lane(self, place: int, what: int) -> int:
        return 2 + 3 * self._rank[place] + what

    def stream(self, place: int) -> torch.cuda.Stream:
        """The one that a place computes on."""
        stream: torch.cuda.Stream = self.hardware.streams[self.lane(place, COMPUTE)]
        return stream

    @property
    def num_lanes(self) -> int:
        return 2 + 3 * len(self.gpus)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What all placements of a step share."""

    step: Step
    works: tuple[Work, ...]
    learned: Learned
    values: Values
    resident_bytes: Sequence[int]
    """Of each op of the graph: parameters, and what the optimizer keeps for them."""


class Execution:
    """A step under one placement. `run` issues one, or `capture` once and then `replay`."""

    def __init__(
        self,
        prepared: Prepared,
        opened: Opened,
        place_of_op: Sequence[int],
        *,
        direct: Sequence[Sequence[bool]],
        traced: bool = False,
        memory_bytes: Sequence[int] | None = None,
    ) -> None:
        """Raises `OverLimitError` where the weights alone are too large for a place.

        `direct` says for each two places whether GPUs there copy to each other, and not through the
        host; `memory_bytes` how much each place has, where that is not what it was opened with.
        """
        self._of = prepared
        self._opened = opened
        self._places = opened.places
        if memory_bytes is not None:
            self._places = tuple(
                replace(place, memory_bytes=int(size))
                for place, size in zip(opened.places, memory_bytes, strict=True)
            )
        self._place_of_op = place_of_op
        self._direct = direct
        self._traced = traced
        self.routes = find_routes(
            prepared.step, prepared.works, prepared.learned, opened.places, place_of_op
        )
        self._env: list[list[Any]] = [[None] * prepared.step.num_values for _ in opened.places]
        self._graph: Any = None
        self.allocated_bytes: int | None = None
        """What torch's allocator gave out on the GPUs for a captured step, at most at a time."""
        self._stop = threading.Event()
        self._began = 0.0
        self._cpu_moments: list[Moment] = []
        self._gpu_moments: list[tuple[int, int, Any, Any, int, int]] = []
        self._gpu_updates: list[tuple[list[Update], int, Any, Any]] = []
        self._base = self._resident()
        self.peak_bytes = tuple(self._base.get(place.pool, 0) for place in opened.places)
        self._changed = {
            *(update.parameter for update in prepared.step.updates),
            *(write.source for write in prepared.step.writes),
        }
        self._busy_places = {place_of_op[work.op] for work in prepared.works}
        self._busy_places |= {number for number in self.routes.home if number >= 0}
        self._busy_workers = {
            number: worker
            for number, worker in opened.workers.items()
            if number in self._busy_places
        }
        self._put_sources()
        self._make_channels()
        self._updates = self._updates_by_place()

    # --- what is made once -----------------------------------------------------------------------

    def _resident(self) -> dict[int, int]:
        sizes = [0] * len(self._places)
        for op, size in enumerate(self._of.resident_bytes):
            sizes[self._place_of_op[op]] += int(size)
        totals = sum_by_pool([place.pool for place in self._places], sizes)
        for place in self._places:
            if totals[place.pool] > place.memory_bytes:
                raise OverLimitError(
                    f"{place.name} has {format_bytes(place.memory_bytes)}, and the weights there "
                    f"take {format_bytes(totals[place.pool])}"
                )
        return totals

    def _put_sources(self) -> None:
        for source in self._of.step.sources:
            home = self.routes.home[source.value]
            self._env[home][source.value] = self._of.values.on(
                self._places[home].torch_device, source.value
            )

    def _make_channels(self) -> None:
        """What a value goes through from place to place."""
        self._pinned: dict[int, torch.Tensor] = {}
        self._semaphore: dict[int, int] = {}
        """Value from the CPU -> what is posted when it is in pinned memory."""
        self._flag: dict[int, int] = {}
        """Value from a GPU -> what is written when it is in pinned memory."""
        self._handed: dict[tuple[int, int], threading.Semaphore] = {}
        """(value, place on the CPU) of one from another place on the CPU."""
        self._mail: dict[tuple[int, int], torch.Tensor] = {}
        self._arriving: dict[int, list[int]] = {}
        """Place -> the values that come to it from elsewhere in each step."""
        for value, targets in self.routes.targets.items():
            source = self._places[self.routes.home[value]]
            others = [self._places[t] for t in targets if self._places[t].pool != source.pool]
            for place in others:
                self._arriving.setdefault(place.number, []).append(value)
            to_gpu = any(place.on_gpu for place in others)
            to_cpu = any(not place.on_gpu for place in others)
            if source.on_gpu and any(self._through_host(source, place) for place in others):
                self._pin(value)
                if to_cpu:
                    self._flag[value] = len(self._flag)
            if not source.on_gpu and to_gpu:
                self._pin(value)
                if value in self.routes.first_use and value not in self._changed:
                    self._pinned[value].copy_(self._env[source.number][value])
                else:
                    self._semaphore[value] = len(self._semaphore)
            if not source.on_gpu:
                for place in others:
                    if not place.on_gpu:
                        self._handed[value, place.number] = threading.Semaphore(0)
        self._semaphores = Semaphores(len(self._semaphore))
        self._steps = 0
        if self._flag:
            self._flags = torch.zeros(
                len(self._flag), dtype=torch.int64, pin_memory=torch.cuda.is_available()
            )
            self._seen = self._flags.numpy()
            senders = {self.routes.home[value] for value in self._flag}
            self._ticks = {
                number: torch.zeros(1, dtype=torch.int64, device=self._places[number].device)
                for number in senders
            }
        else:
            self._ticks = {}

    def _through_host(self, source: Place, target: Place) -> bool:
        return not (source.on_gpu and target.on_gpu and self._direct[source.number][target.number])

    def _pin(self, value: int) -> None:
        form = self._of.learned.forms[value]
        assert form is not None, "only tensors travel"
        self._pinned[value] = self._of.values.pinned(value, form)

    def _updates_by_place(self) -> dict[int, tuple[list[Update], Callable[..., None]]]:
        by_place: dict[int, list[Update]] = {}
        for update in self._of.step.updates:
            number, home = self._place_of_op[update.op], self.routes.home[update.parameter]
            if self._places[number].torch_device != self._places[home].torch_device:
                # Groups keep them together; apart, another tensor than the parameter would change.
                raise PlacementError(
                    f"a parameter is on {self._places[home].name} and its update on "
                    f"{self._places[number].name}; they have to be together"
                )
            by_place.setdefault(number, []).append(update)
        return {
            number: (updates, self._of.values.updater(self._places[number].torch_device, updates))
            for number, updates in by_place.items()
        }

    # --- a step ----------------------------------------------------------------------------------

    def run(self) -> None:
        """One step, issued call by call."""
        self._step(self._issue)

    def capture(self) -> None:
        """Records the work of the GPUs, of which nothing is done yet."""
        graph = torch.cuda.CUDAGraph()
        main = self._opened.hardware.streams[MAIN]
        self._opened.hardware.synchronize()
        gpus = sorted({place.device for place in self._opened.gpus})
        before = sum(torch.cuda.memory_allocated(gpu) for gpu in gpus)
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        with torch.cuda.stream(main):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._issue()
            except Exception as fault:
                torch.cuda.set_stream(main)
                try:
                    graph.capture_end()
                except RuntimeError as worse:
                    raise BrokenError(f"{fault}; the capture could not be ended") from worse
                raise
            torch.cuda.set_stream(main)
            graph.capture_end()
        self.allocated_bytes = sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) - before
        self._graph = graph

    def replay(self) -> None:
        """One step, from the captured work."""
        main = self._opened.hardware.streams[MAIN]

        def launch() -> None:
            with torch.cuda.stream(main):
                self._graph.replay()

        self._step(launch)

    def step(self) -> float:
        """A step, and the seconds it took: by the GPU's own clock where that has all the work,
        otherwise by ours, from when it is begun until everything is done."""
        if self._graph is None or self._busy_workers:
            began = time.perf_counter()
            (self.run if self._graph is None else self.replay)()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        main = self._opened.hardware.streams[MAIN]
        begin.record(main)
        self.replay()
        end.record(main)
        end.synchronize()
        return float(1e-3 * begin.elapsed_time(end))

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU has work in the step."""
        return any(self._places[number].on_gpu for number in self._busy_places)

    def results(self) -> list[torch.Tensor]:
        """What the last step returned."""
        home = self.routes.home
        tensors = (self._env[home[value]][value] for value in self._of.step.results)
        # Copies on the CPU, too: the next step writes to weights, and to what comes from GPUs.
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def _step(self, start_gpus: Callable[[], None]) -> None:
        self._steps += 1
        self._stop.clear()
        self._cpu_moments.clear()
        self._began = time.perf_counter()
        workers = self._busy_workers
        for number, worker in workers.items():
            worker.start(lambda number=number: self._on_cpu(number))  # type: ignore[misc]
        fault: BaseException | None = None
        try:
            if self.on_gpu:
                start_gpus()
                self._opened.hardware.synchronize()
        except BaseException as caught:
            fault = caught
            self._stop.set()
        for worker in workers.values():
            other = worker.join()
            if other is not None and (fault is None or isinstance(fault, StoppedError)):
                fault = other
        if fault is not None:
            if self.on_gpu:
                # What was issued must not run on when the memory of the step is gone. It waits for
                # nobody: the workers have posted all that they had to, or all at once.
                with contextlib.suppress(RuntimeError):
                    self._opened.hardware.synchronize()
            raise fault

    # --- on the CPU ------------------------------------------------------------------------------

    def _on_cpu(self, number: int) -> None:
        """All that one thread does in a step."""
        try:
            self._calls_on_cpu(number)
        except BaseException:
            self._stop.set()
            self._semaphores.post_all()
            raise

    def _calls_on_cpu(self, number: int) -> None:
        env, routes, place = self._env[number], self.routes, self._places[number]
        live = peak = self._base.get(place.pool, 0)
        # Some are there still, where a gradient or a result is a view of them.
        for value in self._arriving.get(number, ()):
            env[value] = None
        for source in self._of.step.sources:
            if routes.home[source.value] == number:
                self._send_from_cpu(source.value, number)
        for index, work in enumerate(self._of.works):
            if self._place_of_op[work.op] == number:
                for value in work.reads:
                    if env[value] is None:
                        env[value] = self._take_on_cpu(value, number)
                        live += routes.owned_bytes.get((place.pool, value), 0)
                began = time.perf_counter()
                made = make_call(work, env, place.torch_device)
                store(work, made, env)
                del made
                if self._traced:
                    self._note(work.op, number, began)
                for _, value in work.makes:
                    live += routes.owned_bytes.get((place.pool, value), 0)
                    self._send_from_cpu(value, number)
                peak = max(peak, live)
                if live > place.memory_bytes:
                    raise OverLimitError(
                        f"{place.name} has {format_bytes(place.memory_bytes)}, and at this moment "
                        f"of the step {format_bytes(live)} are needed there"
                    )
            for key in routes.dropped[index]:
                if key[0] == place.pool:
                    live -= routes.owned_bytes.get(key, 0)
                    for value in routes.members[key]:
                        env[value] = None
        self._end_on_cpu(number)
        peaks = list(self.peak_bytes)
        peaks[number] = max(peaks[number], peak)
        self.peak_bytes = tuple(peaks)

    def _end_on_cpu(self, number: int) -> None:
        env = self._env[number]

        def there(value: int) -> torch.Tensor:
            if env[value] is None:
                env[value] = self._take_on_cpu(value, number)
            tensor: torch.Tensor = env[value]
            return tensor

        if number in self._updates:
            updates, update = self._updates[number]
            began = time.perf_counter()
            update({u.gradient: there(u.gradient) for u in updates})
            if self._traced:
                self._note_updates(updates, number, began, time.perf_counter())
        for write in self._of.step.writes:
            if self.routes.home[write.source] == number:
                env[write.source].copy_(there(write.value))
        self._forget(number, self.routes.dropped[-1])

    def _send_from_cpu(self, value: int, number: int) -> None:
        tensor = self._env[number][value]
        if value in self._semaphore:
            self._pinned[value].copy_(tensor)
            self._semaphores.post(self._semaphore[value])
        for target in self.routes.targets.get(value, ()):
            handed = self._handed.get((value, target))
            if handed is not None:
                # Who takes it may do so when the step has changed what it is, or is a view of.
                root = self.routes.root.get((self._places[number].pool, value), value)
                self._mail[value, target] = tensor.clone() if root in self._changed else tensor
                handed.release()

    def _take_on_cpu(self, value: int, number: int) -> torch.Tensor:
        """A tensor from elsewhere, when it is there."""
        began = time.perf_counter()
        handed = self._handed.get((value, number))
        if handed is not None:
            while not handed.acquire(timeout=0.2):
                self._raise_if_stopped()
            began = time.perf_counter()
            taken = self._mail.pop((value, number)).clone()
        else:
            flag = self._flag[value]
            while self._seen[flag] != self._steps:
                self._raise_if_stopped()
                time.sleep(_POLL_SECONDS)
            taken = self._pinned[value]
        if self._traced:
            self._cpu_moments.append(
                Moment(-1, number, began - self._began, time.perf_counter() - self._began,
                       value, self.routes.home[value])
            )  # fmt: skip
        return taken

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError("another device of the step has failed")

    def _note(self, op: int, number: int, began: float) -> None:
        end = time.perf_counter() - self._began
        self._cpu_moments.append(Moment(op, number, began - self._began, end))

    def _note_updates(
        self, updates: Sequence[Update], number: int, began: float, ended: float
    ) -> None:
        """One call updates them all: each has a part of its time, by its size."""
        self._cpu_moments += self._shares(updates, number, began - self._began, ended - self._began)

    def _shares(
        self, updates: Sequence[Update], number: int, began: float, ended: float
    ) -> list[Moment]:
        forms = self._of.learned.forms
        sizes = [f.copied_bytes if (f := forms[u.parameter]) is not None else 0 for u in updates]
        total, moments, at = max(1, sum(sizes)), [], began
        for update, size in zip(updates, sizes, strict=True):
            end = at + (ended - began) * size / total
            moments.append(Moment(update.op, number, at, end))
            at = end
        return moments

    def _forget(self, number: int, keys: Sequence[Key]) -> None:
        for key in keys:
            if key[0] == self._places[number].pool:
                for value in self.routes.members[key]:
                    self._env[number][value] = None

    # --- on the GPUs -----------------------------------------------------------------------------

    def _issue(self) -> None:
        """Gives all of a step to the lanes."""
        issue = _Issue(self)
        try:
            issue.run()
        except BaseException:
            issue.join()  # what is being captured can only end with all lanes together
            raise

    def moments(self) -> list[Moment]:
        """When everything ran in the last step, where it was traced."""
        first: Any = self._gpu_moments[0][2] if self._gpu_moments else None
        timed = [
            Moment(op, place, 1e-3 * first.elapsed_time(a), 1e-3 * first.elapsed_time(b), value, of)
            for op, place, a, b, value, of in self._gpu_moments[1:]
        ]
        for updates, number, a, b in self._gpu_updates:
            begin, end = 1e-3 * first.elapsed_time(a), 1e-3 * first.elapsed_time(b)
            timed += self._shares(updates, number, begin, end)
        return timed + self._cpu_moments


class _Issue:
    """One pass over the program that gives the work of the GPUs to their lanes."""

    def __init__(self, execution: Execution) -> None:
        self._x = execution
        self._opened = execution._opened
        self._places = execution._places
        self._routes = execution.routes
        self._env = execution._env
        self._forms = execution._of.learned.forms
        self._pool_is_gpu = {p.pool for p in self._places if p.on_gpu}
        self.lanes = Lanes(self._opened.num_lanes, self._opened.hardware)
        base = execution._base
        pools = {place.pool: place for place in self._places if place.on_gpu}
        self.ledger = Ledger(
            self.lanes,
            {pool: place.memory_bytes for pool, place in pools.items()},
            {pool: place.name for pool, place in pools.items()},
            live=dict(base),
            peak=dict(base),
        )
        self._uses: dict[Key, dict[int, int]] = {}
        """What looks at a memory -> the last position on each lane that reads it."""
        self._owner: dict[Key, int] = {}
        """The lane that the memory was taken on."""
        self._there: dict[tuple[int, int], Mark] = {}
        """(place, value) -> since when it is there, where another lane has put it there."""
        self._on_host: dict[int, Mark] = {}
        """Value in pinned memory -> since when."""

    def run(self) -> None:
        x, lanes = self._x, self.lanes
        lanes.work(MAIN)
        self._start = lanes.mark(MAIN)
        for lane in range(1, self._opened.num_lanes):
            lanes.wait(lane, self._start)
        self._begin_trace()
        for number, tick in x._ticks.items():
            lanes.work(self._opened.lane(number, LEAVE))
            tick.add_(1)
        sent_at: dict[int, list[int]] = {}
        for value, at in x.routes.first_use.items():
            sent_at.setdefault(at, []).append(value)
        for index, work in enumerate(x._of.works):
            for value in sent_at.get(index, ()):
                self._send(value)
            number = x._place_of_op[work.op]
            if self._places[number].on_gpu:
                self._call(work, number)
            for _, value in work.makes:
                if value in self._routes.targets:
                    self._send(value)
            for key in self._routes.dropped[index]:
                if key[0] in self._pool_is_gpu:
                    self._drop(key)
        for value in sent_at.get(len(x._of.works), ()):
            self._send(value)
        self._end()
        peaks = [
            self.ledger.peak.get(place.pool, 0) if place.on_gpu else x.peak_bytes[place.number]
            for place in self._places
        ]
        x.peak_bytes = tuple(peaks)

    def _call(self, work: Work, number: int) -> None:
        place, env = self._places[number], self._env[number]
        lane = self._opened.lane(number, COMPUTE)
        for value in work.reads:
            there = self._there.get((number, value))
            if there is not None:
                self._wait(lane, there)
        # First: where memory is short lanes wait for each other, for what they were given so far.
        for _, value in work.makes:
            size = self._routes.owned_bytes.get((place.pool, value), 0)
            if size:
                self.ledger.hold(place.pool, size)
                self._owner[place.pool, value] = lane
        position = self.lanes.work(lane)
        for value in work.reads:
            self._used(place.pool, value, lane, position)
        began = self._time(lane)
        made = make_call(work, env, place.torch_device)
        store(work, made, env)
        if began is not None:
            self._x._gpu_moments.append((work.op, number, began, self._time(lane), -1, -1))

    def _used(self, pool: int, value: int, lane: int, position: int) -> None:
        key = (pool, self._routes.root.get((pool, value), value))
        self._uses.setdefault(key, {})[lane] = position

    def _wait(self, lane: int, mark: Mark) -> None:
        self.lanes.wait(lane, mark)
        self.ledger.settle(lane)

    # --- transfers ---

    def _send(self, value: int) -> None:
        """A value that is there now goes to all places that will need it; once to each memory."""
        home = self._places[self._routes.home[value]]
        targets = [self._places[target] for target in self._routes.targets[value]]
        others = [place for place in targets if place.pool != home.pool]
        arrived = {home.pool: home.number} if home.on_gpu else {}
        if home.on_gpu and others and value in self._x._pinned:
            self._leave(value, home)
        elif not home.on_gpu and value in self._x._semaphore:
            self.lanes.wait_for_host(HOST, self._x._semaphores.address(self._x._semaphore[value]))
            self._on_host[value] = self.lanes.mark(HOST)
        for place in targets:
            if not place.on_gpu:
                continue
            if place.pool not in arrived:
                self._arrive(value, home, place)
                arrived[place.pool] = place.number
                continue
            first = arrived[place.pool]
            self._env[place.number][value] = self._env[first][value]
            there = self._there.get((first, value))
            self._there[place.number, value] = there or self._made(value, home)

    def _made(self, value: int, home: Place) -> Mark:
        """Since when a value is at home: what its place has been given up to now."""
        if value in self._routes.first_use:  # a source: it was there before the step
            return self._start
        return self.lanes.mark(self._opened.lane(home.number, COMPUTE))

    def _leave(self, value: int, home: Place) -> None:
        lane = self._opened.lane(home.number, LEAVE)
        self._wait(lane, self._made(value, home))
        self._used(home.pool, value, lane, self.lanes.work(lane))
        began = self._time(lane)
        self._x._pinned[value].copy_(self._env[home.number][value], non_blocking=True)
        if began is not None:
            moment = (-1, home.number, began, self._time(lane), value, home.number)
            self._x._gpu_moments.append(moment)
        flag = self._x._flag.get(value)
        if flag is not None:
            self._x._flags[flag : flag + 1].copy_(self._x._ticks[home.number], non_blocking=True)
        self._on_host[value] = self.lanes.mark(lane)

    def _arrive(self, value: int, home: Place, place: Place) -> None:
        lane = self._opened.lane(place.number, ARRIVE)
        form = self._forms[value]
        assert form is not None, "only tensors travel"
        pinned, since = None, None
        if self._x._through_host(home, place):
            pinned, since = self._x._pinned[value], self._on_host.get(value)
        else:
            since = self._made(value, home)
        if since is not None:
            self._wait(lane, since)
        key = (place.pool, value)
        self.ledger.hold(place.pool, form.copied_bytes)
        self._owner[key] = lane
        position = self.lanes.work(lane)
        self._used(place.pool, value, lane, position)
        source = self._env[home.number][value] if pinned is None else pinned
        began = self._time(lane)
        tensor = torch.empty_like(source, device=place.device)
        tensor.copy_(source, non_blocking=True)
        if began is not None:
            moment = (-1, place.number, began, self._time(lane), value, home.number)
            self._x._gpu_moments.append(moment)
        if pinned is None:
            self._used(home.pool, value, lane, position)
        self._env[place.number][value] = tensor
        self._there[place.number, value] = self.lanes.mark(lane)

    def _drop(self, key: Key) -> None:
        """Lets go of a memory that nothing in the program needs any more."""
        pool = key[0]
        tensors = []
        for place in self._places:
            if place.pool == pool:
                for value in self._routes.members[key]:
                    tensors.append(self._env[place.number][value])
                    self._env[place.number][value] = None
        size = self._routes.owned_bytes.get(key, 0)
        if key in self._owner:
            self.ledger.release(self._owner[key], tensors, self._uses.get(key, {}), pool, size)

    # --- the end ---

    def _end(self) -> None:
        """The updates: each place's when all have read what they change, and the rest of the step
        goes on elsewhere."""
        x, lanes = self._x, self.lanes
        on_gpu = {n for n in x._updates if self._places[n].on_gpu}
        writes = [
            write
            for write in x._of.step.writes
            if self._places[self._routes.home[write.source]].on_gpu
        ]
        changes = [
            (number, update.parameter, update.gradient)
            for number in sorted(on_gpu)
            for update in x._updates[number][0]
        ] + [(self._routes.home[write.source], write.source, write.value) for write in writes]
        for number, changed, given in changes:
            self._wait_to_change(number, changed, given)
        for number in sorted(on_gpu):
            updates, update = x._updates[number]
            lane = self._opened.lane(number, COMPUTE)
            position = lanes.work(lane)
            for u in updates:
                self._used(self._places[number].pool, u.gradient, lane, position)
            began = self._time(lane)
            update({u.gradient: self._env[number][u.gradient] for u in updates})
            if began is not None:
                x._gpu_updates.append((updates, number, began, self._time(lane)))
        for write in writes:
            number = self._routes.home[write.source]
            lane = self._opened.lane(number, COMPUTE)
            self._used(self._places[number].pool, write.value, lane, lanes.work(lane))
            self._env[number][write.source].copy_(self._env[number][write.value])
        for key in self._routes.dropped[-1]:
            if key[0] in self._pool_is_gpu:
                self._drop(key)
        self.join()

    def _wait_to_change(self, number: int, changed: int, given: int) -> None:
        """The place's lane waits for all that have read a value, and for what it becomes."""
        pool, lane = self._places[number].pool, self._opened.lane(number, COMPUTE)
        there = self._there.get((number, given))
        if there is not None:
            self._wait(lane, there)
        for value in (changed, given):
            key = (pool, self._routes.root.get((pool, value), value))
            for other in self._uses.get(key, {}):
                self._wait(lane, self.lanes.mark(other))

    def join(self) -> None:
        """The main lane waits for all others."""
        for lane in range(1, self._opened.num_lanes):
            self.lanes.wait(MAIN, self.lanes.mark(lane))
        self.lanes.work(MAIN)

    # --- tracing ---

    def _begin_trace(self) -> None:
        self._x._gpu_moments = []
        self._x._gpu_updates = []
        if self._x._traced:
            first = self._opened.hardware.timing(MAIN)
            self._x._gpu_moments.append((-1, -1, first, first, -1, -1))

    def _time(self, lane: int) -> Any:
        return self._opened.hardware.timing(lane) if self._x._traced else None
