"""How fast one GPU runs networks with branches: on streams, fused, captured, or otherwise.

    python -m benchmarks.one_gpu --seconds 540

measures what is not there yet, the most telling first, and ends in time; called again it goes on.
Stages, in their order:

- `1:fp16`, `1:tf32`, `8:fp16`, .. : batch size and type. All models compile side by side, each in a
  process of its own, for less than half of the time that is left; then one after another measures,
  alone on the GPU, and searches for its part of what is left, `--search-seconds` at most: every
  column in turns, medians of `--rounds` calls (of fewer where a call takes long), each call with
  its inputs copied and its outputs read as the column does it. A model that is still compiling
  then is measured last, and without what it did not end to compile.
- `replays`: each accelerated model 10,000 times, while the rest of the memory is taken, filled with
  NaN and given back; every output is compared. Into `replays.csv`.
- `train`: forward and backward pass, as `accelerate_step` compares them. Into `training.csv`.
- `max-autotune`: that mode of `torch.compile` at 1:fp16, one model at a time, as it measures
  kernels while it compiles; for `--autotune-seconds` at most. `ours` is searched for and measured
  again beside it, as a column of its own.

Rows are written as soon as a model is measured. A model that is there at a stage is not measured
again, nor one that failed; `--again` tries these once more. Columns:

- `eager`, `one stream` (the module as it is, captured as one CUDA graph);
- `compile`, `reduce-overhead`, `freezing` (with CUDA graphs), `max-autotune`: `torch.compile`;
- `list`: plain list scheduling of the module's own ops on streams, nothing fused;
- `ours`: what `placewright.torch.accelerate` chose; the compiled variants are its candidates.

`--device cpu` does all of it on the CPU, where its times mean nothing: for finding faults before a
GPU is taken. Give `--output`, then.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, Row, merge_csv, read_csv

COMPILED: Mapping[str, Mapping[str, Any]] = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "freezing": {"mode": "reduce-overhead"},
    "compile": {},
    "max-autotune": {"mode": "max-autotune"},
}
"""Column -> what `torch.compile` is given; `freezing` is a setting of Inductor besides."""
AUTOTUNED, BESIDE = "max-autotune", "ours beside max-autotune"
STAGES = (
    "1:fp16", "1:tf32", "8:fp16", "8:tf32", "32:fp16", "32:tf32", "replays", "train", AUTOTUNED,
)  # fmt: skip


class Cell(NamedTuple):
    """One row of models is measured at a batch size and a type."""

    batch: int
    dtype: str
    """`fp16` or `tf32`."""

    @staticmethod
    def of(text: str) -> Cell:
        batch, _, dtype = text.partition(":")
        if not batch.isdigit() or dtype not in ("fp16", "tf32"):
            raise SystemExit(f"cell {text!r}: expected BATCH:fp16 or BATCH:tf32")
        return Cell(int(batch), dtype)


class Settings(NamedTuple):
    """For all processes."""

    columns: tuple[str, ...]
    rounds: int
    search_seconds: float
    method: str
    device: str = "cuda"
    autotune_seconds: float = 150.0
    replays: int = 10_000
    train_batch: int = 32
    fusion: str = "regions"


class TooLongError(BaseException):
    """What was begun takes longer than it may. No `Exception`: libraries take these for a kernel
    that does not work, and go on."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends what runs within when it takes longer."""
    if seconds == math.inf or threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can be interrupted
        return

    def stop(number: int, frame: Any) -> None:
        raise TooLongError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- in the process of one model -----------------------------------------------------------------


class Worker:
    """One model: compiles when told to, measures when told to."""

    def __init__(self, name: str, settings: Settings) -> None:
        import torch

        from benchmarks.one_gpu_models import MODELS, trained
        from placewright.backends.pytorch.streams.device import Cpu, Gpu

        self.device = Gpu(index=0) if settings.device == "cuda" else Cpu()
        self.torch, self.name, self.settings = torch, name, settings
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(0)
        self.example = MODELS[name]
        self.plain = trained(name)
        self.compiled: dict[Cell, dict[str, Callable[..., Any]]] = {}
        self.faults: dict[tuple[Cell, str], str] = {}
        self.ready: dict[Cell, tuple[Any, tuple[Any, ...]]] = {}

    def model_of(self, cell: Cell) -> tuple[Any, tuple[Any, ...]]:
        """Where it is measured, channels last."""
        torch = self.torch
        if cell not in self.ready:
            dtype = torch.float16 if cell.dtype == "fp16" else torch.float32
            at = self.settings.device
            model = copy.deepcopy(self.plain).to(at, dtype)
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            torch.manual_seed(1)
            inputs = []
            for value in self.example.inputs(cell.batch):
                value = value.to(at, dtype) if value.is_floating_point() else value.to(at)
                if value.dim() == 4:
                    value = value.to(memory_format=torch.channels_last)
                inputs.append(value)
            self.ready[cell] = (model, tuple(inputs))
        return self.ready[cell]

    def build(self, cell: Cell, until: float) -> list[Row]:
        """Compiles what is compared, as long as there is time: what is missed most first."""
        columns = [column for column in _BUILT if column in self.settings.columns]
        for number, column in enumerate(columns):
            # At most twice its share, so that one that does not end leaves time for the others.
            left = until - time.time()
            seconds = min(left, 2 * left / (len(columns) - number + 1))
            if column == "ours":
                self.compile_ours(cell, seconds)
            else:
                self.compile(cell, column, seconds)
        return []

    def compile_ours(self, cell: Cell, seconds: float) -> None:
        """The regions that our own search compiles; the times of this one do not count."""
        if seconds < 5:
            return
        try:
            with limited(seconds):
                self.accelerate(cell, "list", seconds, {})
        except (Exception, TooLongError) as fault:
            self.faults[cell, "ours, first"] = _line(fault)

    def compile(self, cell: Cell, column: str, seconds: float) -> None:
        """One variant, unless that takes longer."""
        torch = self.torch
        model, inputs = self.model_of(cell)
        if seconds < 1:
            self.faults[cell, column] = "no time was left to compile it"
            return
        try:
            call = torch.compile(model, dynamic=False, **COMPILED[column])
            frozen = torch._inductor.config.patch(freezing=column == "freezing")
            with limited(seconds), torch.no_grad(), frozen:
                for _ in range(3):
                    call(*inputs)
            self.compiled.setdefault(cell, {})[column] = call
        except (Exception, TooLongError) as fault:
            self.faults[cell, column] = _line(fault)

    def accelerate(
        self, cell: Cell, method: str, seconds: float, candidates: Mapping[str, Any]
    ) -> Any:
        from placewright.acceleration import AccelerateConfig, accelerated
        from placewright.backends.pytorch.streams.groups import Fusion

        model, inputs = self.model_of(cell)
        fusion = Fusion(self.settings.fusion)
        config = AccelerateConfig(method=method, seconds=seconds, fusion=fusion)
        fast = accelerated(model, self.device, config, candidates=candidates)
        with self.torch.no_grad():
            fast.prepare(inputs, {})
        return fast

    def measure(self, cell: Cell, seconds: float = math.inf, missing: str = "") -> list[Row]:
        """All columns in turns, in about so many seconds; `missing` is why nothing is compiled."""
        from placewright.backends.pytorch.streams.device import forget_memory

        torch = self.torch
        forget_memory()
        model, inputs = self.model_of(cell)
        calls: dict[str, Callable[[], Any]] = {"eager": lambda: model(*inputs)}
        details: dict[str, dict[str, Any]] = {}
        faults = {column: text for (at, column), text in self.faults.items() if at == cell}
        if missing:
            faults |= {c: missing for c in _BUILT if c in COMPILED and c in self.settings.columns}
        search = min(self.settings.search_seconds, max(_LEAST_SEARCH, _SEARCHED * seconds))
        with torch.no_grad():
            wanted = self.reference(cell)
            for column, call in self.compiled.get(cell, {}).items():
                calls[column] = lambda call=call: call(*inputs)  # type: ignore[misc]
            # More than it should take; but one model shall not take the time of all others.
            try:
                with limited(seconds):
                    calls |= self.captured(cell, details, search)
            except (Exception, TooLongError) as fault:
                faults["one stream"] = _line(fault)
            try:
                with limited(2 * seconds):
                    calls |= self.ours(cell, details, search)
            except (Exception, TooLongError) as fault:
                faults["ours"] = _line(fault)
            times, errors = self.times(calls, wanted, faults, _TIMED * seconds)
        rows = [
            self.row(cell, column, times[column], errors[column], details.get(column, {}))
            for column in times
        ]
        rows += [
            self.row(cell, column, [], None, {"fault": text}) for column, text in faults.items()
        ]
        self.ready.pop(cell, None)
        self.compiled.pop(cell, None)
        return rows

    def reference(self, cell: Cell) -> Any:
        """The outputs in float32, products not rounded to TF32."""
        torch = self.torch
        model, inputs = self.model_of(cell)
        exact = copy.deepcopy(model).float()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        try:
            return exact(*[v.float() if v.is_floating_point() else v for v in inputs])
        finally:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def captured(
        self, cell: Cell, details: dict[str, dict[str, Any]], seconds: float
    ) -> dict[str, Any]:
        """One stream, and plain list scheduling: the module's own ops."""
        from placewright.acceleration import AccelerateConfig, plain_schedules

        model, inputs = self.model_of(cell)
        config = AccelerateConfig(seconds=seconds)
        built, times = plain_schedules(model, inputs, config, self.device)
        details["list"] = {"replay_ms": {k: round(v * 1e3, 4) for k, v in times.items()}}
        return {name: lambda b=b: b(inputs) for name, b in built.items()}

    def ours(
        self, cell: Cell, details: dict[str, dict[str, Any]], seconds: float
    ) -> dict[str, Any]:
        from placewright.acceleration import ONE, STREAMS

        if "ours" not in self.settings.columns:
            return {}
        _, inputs = self.model_of(cell)
        candidates = self.compiled.get(cell, {})
        fast = self.accelerate(cell, self.settings.method, seconds, candidates)
        made: dict[str, Any] = {"ours": lambda: fast(*inputs)}
        if not fast.plans:
            details["ours"] = {"verdict": fast.verdict}
            return made
        plan = fast.plans[0]
        kernels: dict[str, int] = {}
        for kernel in plan.kernels:
            kernels[kernel] = kernels.get(kernel, 0) + 1
        details["ours"] = {
            "chosen": plan.chosen, "fusion": plan.fusion, "streams": len(set(plan.streams)),
            "groups": len(plan.groups), "kernels": kernels, "trials": plan.trials,
            "search_seconds": round(plan.search_seconds, 1),
            "found_ms": {k: round(v * 1e3, 4) for k, v in plan.found.items()},
            "final_ms": {k: round(v * 1e3, 4) for k, v in plan.seconds.items()},
            "notes": list(plan.notes[:6]),
        }  # fmt: skip
        if plan.chosen in (ONE, STREAMS):
            lines = fast.timelines()
            details["ours"]["expected_ms"] = round(lines.expected_seconds * 1e3, 4)
            details["ours"]["traced_ms"] = round(lines.measured_seconds * 1e3, 4)
        return made

    def times(
        self,
        calls: dict[str, Callable[[], Any]],
        wanted: Any,
        faults: dict[str, str],
        seconds: float,
    ) -> tuple[dict[str, list[float]], dict[str, float | None]]:
        torch = self.torch
        from placewright.backends.pytorch.streams.tuning import distance

        working: dict[str, Callable[[], Any]] = {}
        errors: dict[str, float | None] = {}
        flat = torch.utils._pytree.tree_leaves
        for column, call in calls.items():
            try:
                for _ in range(3):
                    made = call()
                errors[column] = distance([v.float() for v in flat(made)], flat(wanted))
                working[column] = call
            except Exception as fault:
                faults[column] = _line(fault)
        rounds, replays = self.settings.rounds, list(working.values())
        once = sum(took for (took,) in self.device.times(replays, 1))
        if rounds * once > seconds:
            rounds = min(rounds, max(_LEAST_ROUNDS, int(seconds / once)))
        found = self.device.times(replays, rounds)
        return dict(zip(working, found, strict=True)), errors

    def autotune(self, cell: Cell) -> list[Row]:
        """That mode of `torch.compile`, and our own search with it as a candidate, in turns."""
        self.compile(cell, AUTOTUNED, self.settings.autotune_seconds)
        if AUTOTUNED not in self.compiled.get(cell, {}):
            return [self.row(cell, AUTOTUNED, [], None, {"fault": self.faults[cell, AUTOTUNED]})]
        named = {row["column"]: row for row in self.measure(cell)}
        beside = {**named.get("ours", named[AUTOTUNED]), "column": BESIDE}
        return [named[AUTOTUNED], *([beside] if "ours" in named else [])]

    def replays(self, cell: Cell) -> list[Row]:
        """Again and again, while memory is taken, filled and given back; every output compared."""
        torch, count = self.torch, self.settings.replays
        fast = self.accelerate(cell, "list", self.settings.search_seconds, {})
        _, inputs = self.model_of(cell)
        flat = torch.utils._pytree.tree_leaves
        other = tuple(v * 0.5 if v.is_floating_point() else v.flip(-1) for v in inputs)
        on_gpu = self.settings.device == "cuda"
        with torch.no_grad():
            turns = [(given, [v.clone() for v in flat(fast(*given))]) for given in (inputs, other)]
            before = torch.cuda.memory_reserved() if on_gpu else 0
            differences = torch.zeros((), device=self.settings.device, dtype=torch.int64)
            taken: list[Any] = []
            started = time.time()
            for number in range(count):
                if number % _KEPT == 0:
                    taken.clear()
                    taken += self.take_memory(number)
                given, wanted = turns[number % 2]
                for made, right in zip(flat(fast(*given)), wanted, strict=True):
                    differences += (made != right).any()
            different = int(differences)
            took = time.time() - started
            taken.clear()
            del made
            if on_gpu:
                torch.cuda.empty_cache()
        return [{
            "model": self.name, "chosen": fast.plans[0].chosen if fast.plans else "",
            "replays": count, "different": different, "reserved_before": before,
            "reserved_after": torch.cuda.memory_reserved() if on_gpu else 0,
            "seconds": f"{took:.1f}",
        }]  # fmt: skip

    def take_memory(self, number: int) -> list[Any]:
        """Nearly all that is left, filled with NaN, in pieces that differ from time to time."""
        torch = self.torch
        if self.settings.device != "cuda":
            return [torch.full((1000 + number,), float("nan"))]
        # What was given back last time may hold memory in pieces that do not fit now.
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] - _LEFT_BYTES
        small = [torch.full((1 << (number // _KEPT + i) % 20,), float("nan"), device="cuda")
                 for i in range(64)]  # fmt: skip
        shares = (0.5, 0.25, 0.125, 0.0625)
        return small + [
            torch.full((max(1, int(free * share / 4)),), float("nan"), device="cuda")
            for share in (shares if number // _KEPT % 2 else shares[::-1])
        ]

    def train(self, cell: Cell) -> list[Row]:
        """Forward and backward pass, as `accelerate_step` compares them."""
        from placewright.acceleration import AccelerateConfig, train_step
        from placewright.backends.pytorch.exporting import Inputs, Task
        from placewright.backends.pytorch.streams.groups import Fusion

        torch = self.torch
        model, inputs = self.model_of(cell)

        def loss(outputs: Any) -> Any:
            flat = torch.utils._pytree.tree_leaves(outputs)
            return sum(value.square().mean() for value in flat)

        config = AccelerateConfig(
            seconds=self.settings.search_seconds,
            method="list",
            rounds=15,
            copy_outputs=False,
            fusion=Fusion(self.settings.fusion),
        )
        task = Task(train=True, loss_fn=loss)
        step = train_step(model.train(), self.device, config, task, Inputs(tuple(inputs)))
        step(*inputs)
        times = {k: f"{v * 1e3:.4f}" for p in step.fast.plans for k, v in p.seconds.items()}
        return [{"model": self.name, "batch": cell.batch, "verdict": step.verdict,
                 "ms": json.dumps(times)}]  # fmt: skip

    def row(
        self,
        cell: Cell,
        column: str,
        seconds: Sequence[float],
        error: float | None,
        detail: Mapping[str, Any],
    ) -> Row:
        spread = statistics.quantiles(seconds, n=10) if len(seconds) > 1 else []
        return {
            "model": self.name, "batch": cell.batch, "dtype": cell.dtype, "column": column,
            "ms": f"{statistics.median(seconds) * 1e3:.4f}" if seconds else "",
            "p10_ms": f"{spread[0] * 1e3:.4f}" if spread else "",
            "p90_ms": f"{spread[-1] * 1e3:.4f}" if spread else "",
            "error": "" if error is None else f"{error:.3g}",
            "detail": json.dumps(detail),
        }  # fmt: skip


def _line(fault: BaseException) -> str:
    traceback.print_exc()
    text = " ".join(str(fault).split()) or type(fault).__name__
    return f"{type(fault).__name__}: {text[:300]}"


_BUILT = ("reduce-overhead", "freezing", "ours", "compile")
"""In which order variants are compiled; `ours` are the regions of our own search."""
_SEARCHED = 0.5
"""Share of the time of a model in which it is searched for; the rest compares."""
_LEAST_SEARCH = 4.0
_TIMED = 0.3
"""Share of its time in which its columns are timed, with fewer rounds where calls take long."""
_LEAST_ROUNDS = 5
_KEPT = 50
"""Replays for which memory is taken before it is given back."""
_LEFT_BYTES = 4 << 30
"""Of the GPU's memory that is never taken."""


def serve(make: Callable[[str, Settings], Any], name: str, settings: Settings, pipe: Any) -> None:
    """A process: does what it is told until the pipe is closed."""
    try:
        worker = make(name, settings)
        while True:
            what, *args = pipe.recv()
            pipe.send(("rows", getattr(worker, what)(*args)))
    except EOFError:
        return
    except Exception as fault:
        with contextlib.suppress(OSError):  # nobody waits for it any more
            pipe.send(("fault", _line(fault)))


# --- the processes -------------------------------------------------------------------------------


class Process(NamedTuple):
    model: str
    process: Any
    pipe: Connection


def start(model: str, settings: Settings) -> Process:
    """A process of its own for a model."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(Worker, model, settings, theirs))
    process.start()
    theirs.close()
    return Process(model, process, ours)


def tell(one: Process, *what: Any) -> None:
    with contextlib.suppress(OSError):  # it has ended: what it said last is still there
        one.pipe.send(what)


def stop(one: Process) -> None:
    one.pipe.close()
    one.process.join(5)
    if one.process.is_alive():
        one.process.kill()
        one.process.join()


class Stages:
    """What is measured, into which files, until when."""

    def __init__(
        self, settings: Settings, output: Path, until: float, *, again: bool = False,
        start: Callable[[str, Settings], Process] = start,
    ) -> None:  # fmt: skip
        self.settings, self.output, self.until = settings, output, until
        self.again, self.start = again, start

    @property
    def path(self) -> Path:
        return self.output / "one_gpu.csv"

    def left(self) -> float:
        return self.until - time.time()

    def run(self, stage: str, models: Sequence[str]) -> None:
        """One stage, of the models that it lacks."""
        models = [model for model in models if not self.has(stage, model)]
        if stage not in (
            "replays",
            "train",
            AUTOTUNED,
        ):  # there each is done before the next begins
            models = models[: max(0, int((self.left() - _LEAST) / _PART))]
        if not models or self.left() < _LEAST:
            return
        print(f"{stage}: {len(models)} models", flush=True)
        if stage == AUTOTUNED:
            self.each("autotune", Cell(1, "fp16"), models, self.path, "column")
        elif stage == "replays":
            self.each("replays", Cell(1, "fp16"), models, self.output / "replays.csv")
        elif stage == "train":
            cell = Cell(self.settings.train_batch, "tf32")
            self.each("train", cell, models, self.output / "training.csv")
        else:
            self.cell(Cell.of(stage), models)

    def has(self, stage: str, model: str) -> bool:
        """Whether the model was measured at this stage, or failed and shall not be tried again."""
        if stage in ("replays", "train"):
            name = "replays.csv" if stage == "replays" else "training.csv"
            return any(row["model"] == model for row in read_csv(self.output / name))
        at = Cell(1, "fp16") if stage == AUTOTUNED else Cell.of(stage)
        rows = [row for row in read_csv(self.path)
                if (row["model"], row["batch"], row["dtype"]) == (model, str(at.batch), at.dtype)
                and (row["column"] in (AUTOTUNED, BESIDE)) == (stage == AUTOTUNED)]  # fmt: skip
        wanted = AUTOTUNED if stage == AUTOTUNED else "ours"
        done = any(row["column"] == wanted and row["ms"] for row in rows)
        return done or bool(rows and not self.again)

    def cell(self, cell: Cell, models: Sequence[str]) -> None:
        """All models compile at once; then they measure one after another."""
        began = time.time()
        until = began + self.left() * _COMPILING
        running = [self.start(model, self.settings) for model in models]
        for one in running:
            tell(one, "build", cell, until)
        built, late = self.wait(running, until + _COMPILING_GRACE, cell)
        print(f"{cell}: {len(built)} compiled after {time.time() - began:.0f} s", flush=True)
        for number, one in enumerate([*built, *late]):
            if self.left() < _EACH:
                print(f"{one.model}: no time left", flush=True)
                continue
            if number >= len(built):  # its process was ended
                one = self.start(one.model, self.settings)
                running.append(one)
            # What one does not need the others have.
            seconds = self.left() / (len(built) + len(late) - number)
            tell(one, "measure", cell, seconds, _LATE if number >= len(built) else "")
            self.receive(one, min(self.left(), 3 * seconds) + _GRACE, cell, self.path)
        for one in running:
            one.pipe.close()
        for one in running:
            stop(one)

    def each(self, what: str, cell: Cell, models: Sequence[str], path: Path, *key: str) -> None:
        """One model after another, each alone on the GPU."""
        for model in models:
            if self.left() < _LEAST:
                return
            most = self.left()
            if what == "autotune":
                most = min(most, self.settings.autotune_seconds + 4 * self.settings.search_seconds)
            one = self.start(model, self.settings)
            tell(one, what, cell)
            self.receive(one, most + _GRACE, cell, path, *key)
            stop(one)

    def wait(
        self, running: Sequence[Process], until: float, cell: Cell
    ) -> tuple[list[Process], list[Process]]:
        """Those that are ready to measure, the quickest first; and the others, which are ended."""
        waiting, built = list(running), []
        while waiting and (left := until - time.time()) > 0:
            for pipe in wait([one.pipe for one in waiting], left):
                one = next(o for o in waiting if o.pipe is pipe)
                waiting.remove(one)
                if self.receive(one, 1.0, cell, self.path):
                    built.append(one)
        for one in waiting:
            self.note(self.path, cell, one.model, _LATE)
            one.process.kill()
        return built, waiting

    def receive(self, one: Process, seconds: float, cell: Cell, path: Path, *key: str) -> bool:
        """Writes what a process says; whether it is there for more."""
        column = AUTOTUNED if key else "fault"
        if not one.pipe.poll(seconds):
            self.note(path, cell, one.model, "did not end in its time", column)
            one.process.kill()
            return False
        try:
            what, said = one.pipe.recv()
        except (EOFError, OSError):
            what, said = "fault", "its process ended"
        if what == "fault":
            self.note(path, cell, one.model, said, column)
            return False
        if said:
            # All of a model at once: a run that is cut short leaves no half of it.
            keys = ("model", "batch", "dtype") if path == self.path else ("model",)
            merge_csv(path, said, *keys, *key)
        for row in said:
            print("  ".join(f"{value}"[:600] for value in row.values()), flush=True)
        return True

    def note(self, path: Path, cell: Cell, model: str, text: str, column: str = "fault") -> None:
        print(f"{model}: {text}", flush=True)
        if path == self.path:  # the other files are tried again
            row = {
                "model": model, "batch": str(cell.batch), "dtype": cell.dtype, "column": column,
                "ms": "", "p10_ms": "", "p90_ms": "", "error": "",
                "detail": json.dumps({"fault": text}),
            }  # fmt: skip
            merge_csv(path, [row], "model", "batch", "dtype", "column")


_COMPILING = 0.42
"""Share of the time that is left in which variants are compiled."""
_COMPILING_GRACE = 8.0
"""Seconds for what is compiled then to be given up; the models that are ready wait meanwhile."""
_LATE = "did not end compiling in its time"
_GRACE = 25.0
"""Seconds for what was begun to come to an end."""
_LEAST = 40.0
"""Seconds without which no stage is begun."""
_PART = 20.0
"""Seconds that a model of a cell needs besides: with less time for all, the first ones are run."""
_EACH = 8.0
"""Seconds without which no model is measured."""


# --- what came of it -----------------------------------------------------------------------------


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of medians in ms, and the geometric means that are promised."""
    columns = ["eager", "one stream", *COMPILED, "list", "ours"]
    cells: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if row["ms"]:
            key = (row["model"], row["batch"], row["dtype"])
            cells.setdefault(key, {})[row["column"]] = float(row["ms"])
    lines = ["| model | batch | type | " + " | ".join(columns) + " | over one stream | over best "
             "torch.compile | over best other |",
             "|---|---|---|" + "---:|" * (len(columns) + 3)]  # fmt: skip
    gains: dict[str, list[float]] = {"one stream": [], "torch.compile": []}
    worst = ("", 9.0)
    from benchmarks.one_gpu_models import BRANCHING

    for key, of in cells.items():
        if "ours" not in of:
            continue
        # Each against what was measured in turns with it.
        ours = {AUTOTUNED: of.get(BESIDE, of["ours"])}
        over = {c: v / ours.get(c, of["ours"]) for c, v in of.items() if c not in ("ours", BESIDE)}
        compiled = [over[c] for c in COMPILED if c in over]
        ratios = [over.get("one stream", 0.0), min(compiled, default=0.0), min(over.values())]
        texts = [f"{of[c]:.3f}" if c in of else "" for c in columns]
        lines.append("| " + " | ".join([*key, *texts, *(f"{r:.2f}" for r in ratios)]) + " |")
        if key[0] in BRANCHING and key[1] == "1":
            gains["one stream"] += [ratios[0]] if ratios[0] else []
            gains["torch.compile"] += [ratios[1]] if ratios[1] else []
        if ratios[2] < worst[1]:
            worst = (" ".join(key), ratios[2])
    for name, ratios in gains.items():
        if ratios:
            lines.append(
                f"\nBatch 1, {len(ratios)} rows of branching models: geometric mean "
                f"{statistics.geometric_mean(ratios):.2f} over {name}."
            )
    if worst[0]:
        lines.append(f"\nThe worst against the best other column: {worst[0]}, {worst[1]:.3f}.")
    lines += _searched(rows)
    return "\n".join(lines)


def _searched(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """What methods on real trials have added to list scheduling."""
    gains: dict[str, list[float]] = {}
    for row in rows:
        if row["column"] == "ours" and row["ms"]:
            found = json.loads(row["detail"]).get("found_ms", {})
            for method in found.keys() - {"one stream", "list"}:
                gains.setdefault(method, []).append(found["list"] / found[method] - 1)
    return [
        f"\nWhat `{method}` on real trials adds to list scheduling, of replays alone: "
        f"{statistics.median(of):.1%} in the median of {len(of)} rows, {max(of):.1%} at most."
        for method, of in sorted(gains.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="", help="separated by commas; all when not given")
    parser.add_argument("--stages", default=",".join(STAGES), help="separated by commas")
    parser.add_argument(
        "--columns", default="reduce-overhead,freezing,compile,ours", help="beyond the others"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--search-seconds", type=float, default=20.0)
    parser.add_argument("--method", default="local-search")
    parser.add_argument("--fusion", default="regions", help="at most")
    parser.add_argument("--seconds", type=float, default=540.0, help="for this run of the program")
    parser.add_argument("--autotune-seconds", type=float, default=150.0, help="for each model")
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--train-batch", type=int, default=32)
    parser.add_argument("--again", action="store_true", help="what failed, too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--summary", action="store_true", help="of what is there")
    parser.add_argument("--output", type=Path, default=RESULTS / "one_gpu")
    given = parser.parse_args()
    if given.summary:
        print(summary(read_csv(given.output / "one_gpu.csv")))
        return
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needs a GPU that PyTorch can use, or --device cpu for a rehearsal")
    if given.device == "cpu" and given.output == RESULTS / "one_gpu":
        raise SystemExit("--device cpu measures nothing to keep: give another --output")
    until = time.time() + given.seconds
    # Shared by all processes. Without a folder that stays each run compiles anew.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="one_gpu_"))
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    from benchmarks.one_gpu_models import BRANCHING, MODELS

    models = given.models.split(",") if given.models else sorted(MODELS, key=_not_in(BRANCHING))
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise SystemExit(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    stages = given.stages.split(",")
    for stage in stages:
        if stage not in ("replays", "train", AUTOTUNED):
            Cell.of(stage)
    # More than there are cores: most are done long before the largest model.
    each = max(2, min(8, 4 * (os.cpu_count() or 2) // len(models)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(each))
    settings = Settings(
        tuple(given.columns.split(",")), given.rounds, given.search_seconds, given.method,
        given.device, given.autotune_seconds, given.replays, given.train_batch, given.fusion,
    )  # fmt: skip
    run = Stages(settings, given.output, until, again=given.again)
    for stage in stages:
        run.run(stage, models)
    print(summary(read_csv(run.path)))


def _not_in(names: Sequence[str]) -> Callable[[str], bool]:
    """Sorts these to the front."""
    return lambda name: name not in names


if __name__ == "__main__":
    main()
