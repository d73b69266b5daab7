"""How fast one GPU runs networks with branches: on streams, fused, captured, or otherwise.

    python -m benchmarks.one_gpu --seconds 360

Each model has a process of its own. First they compile all variants of `torch.compile` side by
side, for at most half of the time; then one after another measures, alone on the GPU: every column
in turns, medians of `--rounds` calls, each call with its inputs copied and its outputs read as the
column does it. Every row is written as it is measured, so that a run that is cut short leaves what
it has; rows that are there are not measured again. Columns:

- `eager`, `one stream` (the module as it is, captured as one CUDA graph);
- `compile`, `reduce-overhead`, `freezing` (with CUDA graphs), `max-autotune`: `torch.compile`;
- `list`: plain list scheduling of the module's own ops on streams, nothing fused;
- `ours`: what `placewright.torch.accelerate` chose; the compiled variants are its candidates.

`--replays` runs one accelerated model so often under memory pressure and compares every output.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, add_csv, read_csv

COMPILED: Mapping[str, Mapping[str, Any]] = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "freezing": {"mode": "reduce-overhead"},
    "compile": {},
    "max-autotune": {"mode": "max-autotune"},
}
"""Column -> what `torch.compile` is given; `freezing` is a setting of Inductor besides."""


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


# --- in the process of one model -----------------------------------------------------------------


class Worker:
    """One model: compiles when told to, measures when told to."""

    def __init__(self, name: str, settings: Settings) -> None:
        import torch

        from benchmarks.one_gpu_models import MODELS, trained

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
        """On the GPU, channels last."""
        torch = self.torch
        if cell not in self.ready:
            dtype = torch.float16 if cell.dtype == "fp16" else torch.float32
            model = copy.deepcopy(self.plain).to("cuda", dtype)
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            torch.manual_seed(1)
            inputs = []
            for value in self.example.inputs(cell.batch):
                value = value.to("cuda", dtype) if value.is_floating_point() else value.to("cuda")
                if value.dim() == 4:
                    value = value.to(memory_format=torch.channels_last)
                inputs.append(value)
            self.ready[cell] = (model, tuple(inputs))
        return self.ready[cell]

    def build(self, cell: Cell, until: float) -> None:
        """Compiles all variants, as long as there is time; then what our own search compiles."""
        torch = self.torch
        model, inputs = self.model_of(cell)
        made = self.compiled.setdefault(cell, {})
        with torch.no_grad():
            for column, how in COMPILED.items():
                if column not in self.settings.columns:
                    continue
                if time.time() > until:
                    self.faults[cell, column] = "no time was left to compile it"
                    continue
                try:
                    call = torch.compile(model, dynamic=False, **how)
                    with torch._inductor.config.patch(freezing=column == "freezing"):
                        for _ in range(3):
                            call(*inputs)
                    made[column] = call
                except Exception as fault:
                    self.faults[cell, column] = _line(fault)
            if time.time() < until and "ours" in self.settings.columns:
                try:  # compiles the regions; the times of this one do not count
                    self.accelerate(cell, "list", max(5.0, until - time.time()), {})
                except Exception as fault:
                    self.faults[cell, "ours, first"] = _line(fault)

    def accelerate(
        self, cell: Cell, method: str, seconds: float, candidates: Mapping[str, Any]
    ) -> Any:
        import placewright.torch

        model, inputs = self.model_of(cell)
        return placewright.torch.accelerate(
            model, inputs, method=method, seconds=seconds, candidates=dict(candidates)
        )

    def measure(self, cell: Cell) -> list[dict[str, Any]]:
        """All columns in turns."""
        torch = self.torch
        torch.cuda.empty_cache()
        model, inputs = self.model_of(cell)
        calls: dict[str, Callable[[], Any]] = {"eager": lambda: model(*inputs)}
        details: dict[str, dict[str, Any]] = {}
        faults = {column: text for (at, column), text in self.faults.items() if at == cell}
        with torch.no_grad():
            wanted = self.reference(cell)
            for column, call in self.compiled.get(cell, {}).items():
                calls[column] = lambda call=call: call(*inputs)  # type: ignore[misc]
            try:
                calls |= self.captured(cell, details)
            except Exception as fault:
                faults["one stream"] = _line(fault)
            try:
                calls |= self.ours(cell, details)
            except Exception as fault:
                faults["ours"] = _line(fault)
            times, errors = self.times(calls, wanted, faults)
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

    def captured(self, cell: Cell, details: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """One stream, and plain list scheduling: the module's own ops."""
        from placewright.acceleration import AccelerateConfig, plain_schedules

        model, inputs = self.model_of(cell)
        built, times = plain_schedules(model, inputs, AccelerateConfig())
        details["list"] = {"replay_ms": {k: round(v * 1e3, 4) for k, v in times.items()}}
        return {name: lambda b=b: b(inputs) for name, b in built.items()}

    def ours(self, cell: Cell, details: dict[str, dict[str, Any]]) -> dict[str, Any]:
        from placewright.acceleration import ONE, STREAMS

        _, inputs = self.model_of(cell)
        candidates = self.compiled.get(cell, {})
        fast = self.accelerate(cell, self.settings.method, self.settings.search_seconds, candidates)
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
        self, calls: dict[str, Callable[[], Any]], wanted: Any, faults: dict[str, str]
    ) -> tuple[dict[str, list[float]], dict[str, float | None]]:
        torch = self.torch
        from placewright.backends.pytorch.streams.device import Gpu
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
        found = Gpu(index=0).times(list(working.values()), self.settings.rounds)
        return dict(zip(working, found, strict=True)), errors

    def row(
        self,
        cell: Cell,
        column: str,
        seconds: Sequence[float],
        error: float | None,
        detail: Mapping[str, Any],
    ) -> dict[str, Any]:
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


def serve(name: str, settings: Settings, pipe: Connection) -> None:
    """A process: does what it is told until the pipe is closed."""
    try:
        worker = Worker(name, settings)
        while True:
            what, cell, until = pipe.recv()
            if what == "build":
                worker.build(cell, until)
                pipe.send(("built", cell, []))
            else:
                pipe.send(("rows", cell, worker.measure(cell)))
    except EOFError:
        return
    except Exception as fault:
        pipe.send(("fault", None, [_line(fault)]))


# --- the processes -------------------------------------------------------------------------------


class Process(NamedTuple):
    model: str
    process: Any
    pipe: Connection


def start(models: Sequence[str], settings: Settings) -> list[Process]:
    context = multiprocessing.get_context("spawn")
    made = []
    for name in models:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(name, settings, theirs), daemon=False)
        process.start()
        theirs.close()
        made.append(Process(name, process, ours))
    return made


def stop(one: Process) -> None:
    one.pipe.close()
    one.process.join(5)
    if one.process.is_alive():
        one.process.kill()
        one.process.join()


def run_cell(
    cell: Cell, models: Sequence[str], settings: Settings, path: Path, until: float
) -> None:
    """Compiles for all models at once, then measures one after another."""
    now = time.time()
    compile_until = now + (until - now) * _COMPILING
    running = start(models, settings)
    for one in running:
        one.pipe.send(("build", cell, compile_until))
    print(f"{cell}: {len(running)} models compile until +{compile_until - now:.0f} s", flush=True)
    built = _wait(running, compile_until + _GRACE)
    for one in running:
        if one not in built:
            print(f"{one.model}: still compiles after its time; stopped", flush=True)
            _note(path, cell, one.model, "did not end compiling in its time")
            one.process.kill()
    print(f"{cell}: {len(built)} models compiled after {time.time() - now:.0f} s", flush=True)
    for one in (o for o in running if o in built):
        if time.time() > until - _LEAST:
            print(f"{one.model}: no time left", flush=True)
        else:
            one.pipe.send(("measure", cell, until))
            if one.pipe.poll(max(_LEAST, until - time.time())):
                _receive(one, path, cell)
            else:
                one.process.kill()
                _note(path, cell, one.model, "did not end measuring in its time")
    for one in running:
        stop(one)


_COMPILING = 0.45
"""Share of the time in which variants are compiled."""
_GRACE = 25.0
"""Seconds for what was begun to come to an end."""
_LEAST = 12.0
"""Seconds without which no model is begun."""


def _wait(running: Sequence[Process], until: float) -> list[Process]:
    waiting, built = list(running), []
    while waiting and (left := until - time.time()) > 0:
        for pipe in wait([one.pipe for one in waiting], left):
            one = next(o for o in waiting if o.pipe is pipe)
            waiting.remove(one)
            try:
                what, _, said = one.pipe.recv()
            except (EOFError, OSError):
                what, said = "fault", ["its process ended"]
            if what == "built":
                built.append(one)
            else:
                print(f"{one.model}: {said}", flush=True)
    return [one for one in running if one in built]


def _receive(one: Process, path: Path, cell: Cell) -> None:
    try:
        what, _, rows = one.pipe.recv()
    except (EOFError, OSError):
        what, rows = "fault", ["its process ended"]
    if what != "rows":
        _note(path, cell, one.model, str(rows[0]))
        return
    for row in rows:
        add_csv(path, row)
        what = f"{row['model']:16s} {row['batch']:3d} {row['dtype']} {row['column']:16s}"
        print(f"{what} {row['ms']:>9s} ms  error {row['error']}  {row['detail'][:600]}", flush=True)


def _note(path: Path, cell: Cell, model: str, text: str) -> None:
    add_csv(path, {
        "model": model, "batch": cell.batch, "dtype": cell.dtype, "column": "fault", "ms": "",
        "p10_ms": "", "p90_ms": "", "error": "", "detail": json.dumps({"fault": text}),
    })  # fmt: skip


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
        compiled = [of[c] for c in COMPILED if c in of]
        other = min(v for c, v in of.items() if c != "ours")
        ratios = [of.get("one stream", 0.0) / of["ours"], min(compiled, default=0.0) / of["ours"],
                  other / of["ours"]]  # fmt: skip
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


def replay(name: str, replays: int, output: Path) -> None:
    """One accelerated model again and again, while memory is taken, filled and given back."""
    import torch

    worker = Worker(name, Settings(("ours",), 10, 20.0, "list"))
    cell = Cell(1, "fp16")
    fast = worker.accelerate(cell, "list", 40.0, {})
    _, inputs = worker.model_of(cell)
    wanted = torch.utils._pytree.tree_leaves(fast(*inputs))[0].clone()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    differences = torch.zeros((), device="cuda", dtype=torch.int64)
    free, _ = torch.cuda.mem_get_info()
    taken: list[Any] = []
    started = time.time()
    for number in range(replays):
        if number % 50 == 0:
            taken = [torch.full((int(free * share / 8),), float("nan"), device="cuda")
                     for share in (0.2, 0.3, 0.1)]  # fmt: skip
        elif number % 50 == 25:
            taken.clear()
        made = torch.utils._pytree.tree_leaves(fast(*inputs))[0]
        differences += (made != wanted).any()
    torch.cuda.synchronize()
    took = time.time() - started
    taken.clear()
    del made
    torch.cuda.empty_cache()
    row = {
        "model": name, "chosen": fast.plans[0].chosen, "replays": replays,
        "different": int(differences), "reserved_before": before,
        "reserved_after": torch.cuda.memory_reserved(), "seconds": f"{took:.1f}",
    }  # fmt: skip
    add_csv(output / "replays.csv", row)
    print(row, flush=True)


def train(name: str, batch: int, seconds: float, output: Path) -> None:
    """Forward and backward pass of one model, TF32, as `accelerate_step` compares it."""
    import torch

    import placewright.torch

    worker = Worker(name, Settings((), 10, seconds, "list"))
    cell = Cell(batch, "tf32")
    model, inputs = worker.model_of(cell)

    def loss(outputs: Any) -> Any:
        flat = torch.utils._pytree.tree_leaves(outputs)
        return sum(value.square().mean() for value in flat)

    step = placewright.torch.accelerate_step(
        model.train(), inputs, loss_fn=loss, seconds=seconds, method="list", rounds=15
    )
    times = {k: f"{v * 1e3:.4f}" for p in step.fast.plans for k, v in p.seconds.items()}
    row = {"model": name, "batch": batch, "verdict": step.verdict, "ms": json.dumps(times)}
    add_csv(output / "training.csv", row)
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="", help="separated by commas; all when not given")
    parser.add_argument("--cells", default="1:fp16", help="BATCH:TYPE, separated by commas")
    parser.add_argument(
        "--columns", default="reduce-overhead,freezing,compile,ours", help="beyond the others"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--search-seconds", type=float, default=20.0)
    parser.add_argument("--method", default="local-search")
    parser.add_argument("--seconds", type=float, default=360.0, help="for everything")
    parser.add_argument("--replays", type=int, default=0, help="of --models, and nothing else")
    parser.add_argument("--train", type=int, default=0, help="batch of training steps of --models")
    parser.add_argument("--summary", action="store_true", help="of what is there")
    parser.add_argument("--output", type=Path, default=RESULTS / "one_gpu")
    given = parser.parse_args()
    path = given.output / "one_gpu.csv"
    if given.summary:
        print(summary(read_csv(path)))
        return
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU that PyTorch can use")
    until = time.time() + given.seconds
    # Shared by all processes, and of this run alone: what is compiled is compiled by it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="one_gpu_"))
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    from benchmarks.one_gpu_models import MODELS

    models = given.models.split(",") if given.models else list(MODELS)
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise SystemExit(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    if given.replays or given.train:
        for name in models:
            if given.replays:
                replay(name, given.replays, given.output)
            else:
                train(name, given.train, given.search_seconds, given.output)
        return
    each = max(2, (os.cpu_count() or 2) // len(models))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(each))
    settings = Settings(
        tuple(given.columns.split(",")), given.rounds, given.search_seconds, given.method
    )
    cells = [Cell.of(text) for text in given.cells.split(",")]
    for number, cell in enumerate(cells):
        done = {(row["model"], row["batch"], row["dtype"]) for row in read_csv(path)
                if row["column"] == "ours" and row["ms"]}  # fmt: skip
        left = [m for m in models if (m, str(cell.batch), cell.dtype) not in done]
        share = time.time() + (until - time.time()) / (len(cells) - number)
        if left and share - time.time() > _LEAST:
            run_cell(cell, left, settings, path, share)
    print(summary(read_csv(path)))


if __name__ == "__main__":
    main()
