"""`benchmarks.one_gpu`: its models, and what it says of its rows."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import one_gpu
from benchmarks.common import read_csv
from benchmarks.one_gpu_models import BRANCHING, MODELS, Example, NASNet, RandWire, trained
from placewright.backends.pytorch.streams.built import lower
from placewright.backends.pytorch.streams.groups import Fusion
from placewright.backends.pytorch.streams.net import trace
from placewright.backends.pytorch.streams.tuning import untuned


def row(model: str, column: str, ms: float | None) -> dict[str, str]:
    found = {"found_ms": {"one stream": 2.0, "list": 1.05, "local-search": 1.0}}
    return {"model": model, "batch": "1", "dtype": "fp16", "column": column,
            "ms": "" if ms is None else str(ms), "detail": json.dumps(found)}  # fmt: skip


def test_the_summary_compares_with_the_best_of_the_others() -> None:
    rows = [
        row("googlenet", "eager", 4.0), row("googlenet", "one stream", 1.0),
        row("googlenet", "freezing", 0.75), row("googlenet", "compile", 0.9),
        row("googlenet", "max-autotune", None), row("googlenet", "ours", 0.5),
        row("resnet50", "one stream", 0.8), row("resnet50", "ours", 0.8),
        row("squeezenet", "one stream", 0.8),
    ]  # fmt: skip
    said = one_gpu.summary(rows)
    assert "| googlenet | 1 | fp16 | 4.000 | 1.000 |  | 0.750 | 0.900 |" in said
    assert "| 2.00 | 1.50 | 1.50 |" in said
    assert "1 rows of branching models: geometric mean 2.00 over one stream" in said
    assert "geometric mean 1.50 over torch.compile" in said
    assert "resnet50 1 fp16, 1.000" in said
    assert "squeezenet" not in said
    assert "5.0% in the median of 2 rows" in said


def test_max_autotune_is_compared_with_what_was_measured_beside_it() -> None:
    rows = [
        row("googlenet", "freezing", 0.75), row("googlenet", "ours", 0.5),
        row("googlenet", "max-autotune", 0.9), row("googlenet", one_gpu.BESIDE, 1.0),
    ]  # fmt: skip
    assert "| 0.00 | 0.90 | 0.90 |" in one_gpu.summary(rows)
    assert "| 0.00 | 1.50 | 1.50 |" in one_gpu.summary(rows[:2])


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Conv2d(3, 4, k, padding=k // 2) for k in (1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.one(x).relu() + self.two(x).relu()
        return made


def test_a_worker_measures_all_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where times mean nothing; without Inductor, which takes long."""
    monkeypatch.setitem(MODELS, "tiny", Example(Tiny, lambda b: (torch.randn(b, 3, 8, 8),)))
    compiled = {"compile": {"backend": "eager"}, "max-autotune": {"backend": "eager"}}
    monkeypatch.setattr(one_gpu, "COMPILED", compiled)
    settings = one_gpu.Settings(
        ("compile", "ours"), 2, 6.0, "list", device="cpu", replays=60, fusion="folded"
    )
    worker, cell = one_gpu.Worker("tiny", settings), one_gpu.Cell(1, "tf32")
    rows: dict[str, Any] = {}
    measure = worker.measure

    def seen(cell: one_gpu.Cell) -> Any:
        made = measure(cell)
        rows.update({row["column"]: row for row in made})
        return made

    monkeypatch.setattr(worker, "measure", seen)
    worker.compile(cell, "compile", 60)
    columns = [row["column"] for row in worker.autotune(cell)]
    assert columns == ["max-autotune", one_gpu.BESIDE]
    assert set(rows) == {"eager", "one stream", "compile", "max-autotune", "list", "ours"}
    assert all(float(row["ms"]) > 0 and float(row["error"]) < 1e-5 for row in rows.values())
    said = json.loads(rows["ours"]["detail"])
    assert {"one stream", "eager", "compile", "max-autotune"} <= set(said["final_ms"])
    (row,) = worker.replays(cell)
    assert (row["replays"], row["different"]) == (60, 0)
    (row,) = worker.train(cell)
    assert "ms a call" in row["verdict"]
    assert torch.backends.cudnn.benchmark  # as long as the process is there


@pytest.fixture(autouse=True)
def _settings_as_before() -> Iterator[None]:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32
    yield
    cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = before


# --- stages --------------------------------------------------------------------------------------


class Pretend:
    """A worker that has nothing to measure."""

    done: list[tuple[str, str]] = []  # noqa: RUF012
    """What was asked of which model, by all of them."""
    given: list[tuple[str, float, str]] = []  # noqa: RUF012
    """With how many seconds to measure in, and why without what is compiled."""
    hangs = threading.Event()

    def __init__(self, name: str, settings: one_gpu.Settings) -> None:
        if name == "broken":
            raise RuntimeError("no such model")
        self.name = name

    def build(self, cell: one_gpu.Cell, until: float) -> list[Any]:
        assert until < time.time() + 1000
        self.done.append(("build", self.name))
        if self.name == "compiles" and not self.hangs.is_set():
            self.hangs.wait(20)
            raise RuntimeError("was ended")
        return []

    def measure(self, cell: one_gpu.Cell, seconds: float, missing: str) -> list[Any]:
        self.done.append(("measure", self.name))
        self.given.append((self.name, seconds, missing))
        if self.name.startswith("slow"):
            self.hangs.wait(20)
        return [self.row(cell, "eager", "2.0"), self.row(cell, "ours", "1.0")]

    def autotune(self, cell: one_gpu.Cell) -> list[Any]:
        self.done.append(("autotune", self.name))
        return [self.row(cell, "max-autotune", "0.9"), self.row(cell, one_gpu.BESIDE, "0.8")]

    def replays(self, cell: one_gpu.Cell) -> list[Any]:
        self.done.append(("replays", self.name))
        return [{"model": self.name, "different": 0}]

    def row(self, cell: one_gpu.Cell, column: str, ms: str) -> dict[str, Any]:
        return {"model": self.name, "batch": cell.batch, "dtype": cell.dtype, "column": column,
                "ms": ms, "p10_ms": "", "p90_ms": "", "error": "", "detail": "{}"}  # fmt: skip


class Threaded(threading.Thread):
    def kill(self) -> None:
        Pretend.hangs.set()


def start(name: str, settings: one_gpu.Settings) -> one_gpu.Process:
    ours, theirs = Pipe()
    thread = Threaded(
        target=one_gpu.serve, args=(Pretend, name, settings, theirs), daemon=True
    )  # fmt: skip
    thread.start()
    return one_gpu.Process(name, thread, ours)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    for name in ("_GRACE", "_COMPILING_GRACE"):
        monkeypatch.setattr(one_gpu, name, 0.3)
    for name in ("_LEAST", "_EACH"):
        monkeypatch.setattr(one_gpu, name, 0.0)
    monkeypatch.setattr(one_gpu, "_PART", 1e-3)
    Pretend.done.clear()
    Pretend.given.clear()
    Pretend.hangs.clear()
    yield Pretend.done
    Pretend.hangs.set()


def stages(folder: Path, seconds: float = 500.0, again: bool = False) -> one_gpu.Stages:
    settings = one_gpu.Settings(("ours",), 2, 1.0, "list")
    until = time.time() + seconds
    return one_gpu.Stages(settings, folder, until, again=again, start=start)


def test_what_is_there_is_not_measured_again(tmp_path: Path, asked: list[tuple[str, str]]) -> None:
    names = ("1:fp16", "8:tf32", "replays", "max-autotune")
    for stage in names:
        stages(tmp_path).run(stage, ["one", "two"])
    # No model measures while another compiles, and what is not compiled together is alone.
    assert sorted(asked[:2]) == [("build", "one"), ("build", "two")]
    assert sorted(asked[2:4]) == [("measure", "one"), ("measure", "two")]
    assert asked[8:] == [
        ("replays", "one"), ("replays", "two"), ("autotune", "one"), ("autotune", "two")
    ]  # fmt: skip
    before = len(asked)
    for stage in names:
        stages(tmp_path).run(stage, ["one", "two"])
    assert len(asked) == before
    rows = read_csv(tmp_path / "one_gpu.csv")
    assert len(rows) == 2 * (2 + 2 + 2)
    stages(tmp_path).run("1:fp16", ["one", "three"])
    assert asked[before:] == [("build", "three"), ("measure", "three")]
    assert read_csv(tmp_path / "one_gpu.csv")[: len(rows)] == rows


def test_what_fails_is_noted_and_tried_again_on_request(
    tmp_path: Path, asked: list[tuple[str, str]]
) -> None:
    stages(tmp_path).run("1:fp16", ["broken", "one"])
    first, *others = read_csv(tmp_path / "one_gpu.csv")
    assert first["column"] == "fault"
    assert "no such model" in first["detail"]
    assert [r["column"] for r in others] == ["eager", "ours"]
    assert stages(tmp_path).has("1:fp16", "broken")
    assert not stages(tmp_path, again=True).has("1:fp16", "broken")
    assert stages(tmp_path, again=True).has("1:fp16", "one")
    stages(tmp_path).run("max-autotune", ["broken"])
    assert stages(tmp_path).has("max-autotune", "broken")


def test_stages_end_in_time(
    tmp_path: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages(tmp_path, seconds=0.5).run("1:fp16", ["slow", "slower"])
    (said,) = read_csv(tmp_path / "one_gpu.csv")
    assert "did not end in its time" in said["detail"]
    # Whichever was ready first; there was no time left for the other.
    assert [what for what, _ in asked].count("measure") == 1
    monkeypatch.setattr(one_gpu, "_LEAST", 40.0)
    count = len(asked)
    stages(tmp_path, seconds=30.0).run("1:fp16", ["one"])
    assert len(asked) == count


def test_a_model_that_compiles_for_too_long_is_measured_last_without_it(
    tmp_path: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_gpu, "_COMPILING", 1e-3)
    stages(tmp_path, seconds=400.0).run("8:fp16", ["compiles", "one", "two"])
    assert sorted(what[0] for what in Pretend.given[:2]) == ["one", "two"]
    assert Pretend.given[2][0] == "compiles"
    assert [bool(missing) for _, _, missing in Pretend.given] == [False, False, True]
    # Each has its part of the time that is left.
    parts = [seconds for _, seconds, _ in Pretend.given]
    assert parts[0] < 134
    assert parts == sorted(parts)
    assert 250 < parts[2] < 400
    rows = read_csv(tmp_path / "one_gpu.csv")
    assert {(row["model"], row["column"]) for row in rows} == {
        (model, column) for model in ("one", "two", "compiles") for column in ("eager", "ours")
    }


def test_with_little_time_a_cell_begins_with_the_first_models(
    tmp_path: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_gpu, "_PART", 100.0)
    stages(tmp_path, seconds=250.0).run("8:fp16", ["one", "two", "three"])
    assert {name for _, name in asked} == {"one", "two"}
    stages(tmp_path, seconds=90.0).run("8:fp16", ["three"])
    stages(tmp_path, seconds=90.0).run("replays", ["three"])
    assert asked[4:] == [("replays", "three")]


def test_what_is_missed_most_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", Example(Tiny, lambda b: (torch.randn(b, 3, 8, 8),)))
    settings = one_gpu.Settings(
        ("compile", "freezing", "reduce-overhead", "ours"), 2, 6.0, "list", device="cpu"
    )
    worker = one_gpu.Worker("tiny", settings)
    tried: list[tuple[str, float]] = []
    monkeypatch.setattr(worker, "compile", lambda cell, what, s: tried.append((what, s)))
    monkeypatch.setattr(worker, "compile_ours", lambda cell, s: tried.append(("ours", s)))
    worker.build(one_gpu.Cell(1, "tf32"), time.time() + 100)
    assert [what for what, _ in tried] == ["reduce-overhead", "freezing", "ours", "compile"]
    shares = [seconds for _, seconds in tried]
    assert 35 < shares[0] <= 40
    assert 90 < shares[-1] <= 100


def test_a_model_is_measured_in_its_time_and_without_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODELS, "tiny", Example(Tiny, lambda b: (torch.randn(b, 3, 8, 8),)))
    settings = one_gpu.Settings(
        ("freezing", "ours"), 2, 20.0, "list", device="cpu", fusion="folded"
    )
    worker, cell = one_gpu.Worker("tiny", settings), one_gpu.Cell(1, "tf32")
    given: list[float] = []
    accelerate = worker.accelerate

    def seen(cell: one_gpu.Cell, method: str, seconds: float, candidates: Any) -> Any:
        given.append(seconds)
        return accelerate(cell, method, seconds, candidates)

    monkeypatch.setattr(worker, "accelerate", seen)
    rows = {row["column"]: row for row in worker.measure(cell, 12.0, "took too long")}
    assert given == [6.0]
    assert json.loads(rows.pop("freezing")["detail"]) == {"fault": "took too long"}
    assert set(rows) == {"eager", "one stream", "list", "ours"}
    assert all(float(row["ms"]) > 0 for row in rows.values())


def test_a_column_that_takes_too_long_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", Example(Tiny, lambda b: (torch.randn(b, 3, 8, 8),)))
    settings = one_gpu.Settings(("ours",), 1000, 20.0, "list", device="cpu", fusion="none")
    worker, cell = one_gpu.Worker("tiny", settings), one_gpu.Cell(1, "tf32")
    monkeypatch.setattr(worker, "ours", lambda *given: time.sleep(60))
    rounds: list[int] = []
    times = worker.device.times

    def slow(replays: Sequence[Any], count: int) -> list[list[float]]:
        rounds.append(count)
        return [[0.02] * count for _ in times(replays, 1)]

    model, inputs = worker.model_of(cell)
    monkeypatch.setattr(worker, "captured", lambda *given: {"list": lambda: model(*inputs)})
    monkeypatch.setattr(worker.device, "times", slow)
    rows = {row["column"]: row for row in worker.measure(cell, 1.0)}
    assert "TooLongError" in rows.pop("ours")["detail"]
    assert {column: row["ms"] for column, row in rows.items()} == dict.fromkeys(
        ("eager", "list"), "20.0000"
    )
    assert rounds == [1, 7]  # in the 0.3 s that there are for it


def test_what_takes_too_long_is_ended() -> None:
    until = time.monotonic() + 20

    def tries_one_kernel_after_another() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(one_gpu.TooLongError), one_gpu.limited(0.05):
        tries_one_kernel_after_another()
    assert time.monotonic() < until
    with one_gpu.limited(5):
        pass


def test_cells_are_a_batch_and_a_type() -> None:
    assert one_gpu.Cell.of("8:tf32") == (8, "tf32")
    for text in ("fp16", "x:fp16", "8:int8"):
        with pytest.raises(SystemExit):
            one_gpu.Cell.of(text)


def test_branching_models_are_some_of_the_models() -> None:
    assert set(BRANCHING) < set(MODELS)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (lambda: NASNet(8, 1), 64),
        (lambda: RandWire(8, 6), 64),
        (MODELS["recommender"].model, 0),
        (MODELS["detection_head"].model, 0),
    ],
    ids=["nasnet", "randwire", "recommender", "detection_head"],
)
def test_models_have_branches(model: object, size: int) -> None:
    torch.manual_seed(0)
    made = model().eval()  # type: ignore[operator]
    name = "recommender" if "Recommender" in type(made).__name__ else "detection_head"
    inputs = (torch.randn(1, 3, size, size),) if size else MODELS[name].inputs(1)
    low = lower(trace(made, inputs, {}), inputs, {}, Fusion.FOLDED)
    work = untuned(low.grouped).work(low.grouped)
    assert work.critical_seconds < 0.8 * work.total_seconds


def small(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A corner of what is a picture: there is nothing that needs all of it."""
    return [value[..., :16, :16] if value.dim() == 4 else value for value in inputs]


@pytest.mark.parametrize("name", ["detection_head", "recommender"])
def test_outputs_depend_on_inputs(name: str) -> None:
    torch.manual_seed(0)
    model = trained(name)
    with torch.no_grad():
        a, b = (torch.utils._pytree.tree_leaves(model(*small(MODELS[name].inputs(2))))[-1]
                for _ in range(2))  # fmt: skip
    assert torch.isfinite(a).all()
    assert float((a - b).norm() / a.norm()) > 0.05
