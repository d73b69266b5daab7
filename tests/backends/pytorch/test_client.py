"""The process that holds a step, as an object of this one: what it checks and lets go of."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save  # noqa: E402

from placewright.backends.pytorch import client as module  # noqa: E402
from placewright.backends.pytorch.client import Client, executed, outcome_of, prepare  # noqa: E402
from placewright.backends.pytorch.execution import Execution, Opened, Prepared  # noqa: E402
from placewright.backends.pytorch.lanes import OverLimitError  # noqa: E402
from placewright.backends.pytorch.steps import (  # noqa: E402
    Call,
    Ref,
    Source,
    Step,
    without_dropout,
)
from placewright.backends.timing import Timing  # noqa: E402
from tests.backends.pytorch.test_lanes import Immediate, places  # noqa: E402

STEP = Step(
    num_values=3,
    sources=(Source(value=0, kind="parameter", name="w", shape=(6,), dtype="float32", op=0),),
    calls=(
        Call(value=1, target="aten.mul.Tensor", args=(Ref(0), 2.0), kwargs={}, op=1),
        Call(value=2, target="aten.tanh.default", args=(Ref(1),), kwargs={}, op=2),
    ),
    results=(2,),
)
ALONE, SPREAD = [0, 0, 0], [0, 0, 1]


DROPPING = replace(
    STEP,
    num_values=5,
    calls=(
        *STEP.calls[:1],
        Call(
            value=3, target="aten.native_dropout.default", args=(Ref(1), 0.5, True), kwargs={}, op=1
        ),
        Call(value=4, target="getitem", args=(Ref(3), 0), kwargs={}, op=1),
        Call(value=2, target="aten.tanh.default", args=(Ref(4),), kwargs={}, op=2),
    ),
)
"""The same with dropout between."""


@pytest.fixture
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    step: Step = getattr(request, "param", STEP)
    for name in ("freeze", "disable"):  # for a process of its own
        monkeypatch.setattr(gc, name, lambda: None)
    with contextlib.ExitStack() as opened:

        def file(content: bytes) -> int:
            made = opened.enter_context(tempfile.TemporaryFile())
            made.write(content)
            made.flush()
            return made.fileno()

        monkeypatch.setattr(module, "read_all", lambda number: read(number))
        feeds = io.BytesIO()
        np.savez(feeds)
        made = Client(
            {
                "places": [asdict(place) for place in places("cc")],
                "direct": [[False] * 2] * 2,
                "ops": ["w", "mul", "tanh"],
                "resident_bytes": [24, 0, 0],
                "settings": {
                    "tf32": False, "cudnn_benchmark": False, "tolerance": 0.01, "seed": 0,
                    "capture": True,
                },
                "step": file(json.dumps(step.to_json()).encode()),
                "weights": file(save({"w": torch.linspace(-1, 1, 6)})),
                "feeds": file(feeds.getvalue()),
            }
        )  # fmt: skip
        yield made
        made._opened.close()


def read(number: int) -> bytes:
    with open(number, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def asked(client: Client, devices: list[int], **more: Any) -> dict[str, Any]:
    request = {
        "devices": devices, "timing": asdict(Timing(least=2, most=2)), "traces": 0,
        "train_steps": 0, "check": False, **more,
    }  # fmt: skip
    with torch.no_grad():
        return client.answer(request)


@pytest.mark.parametrize("client", [STEP, DROPPING], indirect=True, ids=["", "dropout"])
def test_what_goes_wrong_on_the_way_is_found_though_one_device_was_tried_first(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Execution._take_on_cpu
    monkeypatch.setattr(
        Execution, "_take_on_cpu", lambda self, value, number: 0 * take(self, value, number)
    )
    assert asked(client, ALONE)["outcome"] == "ok"
    wrong = asked(client, SPREAD)
    assert wrong["outcome"] == "failed"
    assert "returned something else than the step itself" in wrong["reason"]
    monkeypatch.undo()
    assert asked(client, SPREAD)["outcome"] == "ok"


def test_steps_that_draw_other_numbers_than_dropout_are_not_compared() -> None:
    assert without_dropout(STEP) is STEP
    dropping = without_dropout(DROPPING)
    assert dropping is not None
    assert [c.args for c in dropping.calls if "dropout" in c.target] == [(Ref(1), 0.0, True)]
    drawing = Call(value=3, target="aten.bernoulli.p", args=(Ref(1), 0.5), kwargs={}, op=1)
    assert without_dropout(replace(DROPPING, calls=(STEP.calls[0], drawing))) is None


def test_placements_are_compared_until_one_on_several_devices_was(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Execution] = []
    check = Client._check

    def counted(self: Client, made: Execution, of: Prepared) -> None:
        compared.append(made)
        check(self, made, of)

    monkeypatch.setattr(Client, "_check", counted)
    counts = []
    for devices in (ALONE, ALONE, SPREAD, SPREAD, ALONE):
        assert asked(client, devices)["outcome"] == "ok"
        counts.append(len(compared))
    assert counts == [1, 2, 3, 3, 3]
    asked(client, ALONE, check=True)
    assert len(compared) == 4


def test_no_placement_is_held_beside_the_next(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor beside its own trace: each may need nearly all memory there is."""
    alive = weakref.WeakSet[Execution]()
    beside = []

    class Seen(Execution):
        def __init__(self, *args: Any, **how: Any) -> None:
            beside.append(len(alive))
            alive.add(self)
            super().__init__(*args, **how)

    monkeypatch.setattr(module, "Execution", Seen)
    gc.collect()
    gc.set_threshold(0)
    try:
        for _ in range(2):
            assert asked(client, SPREAD, traces=1)["outcome"] == "ok"
    finally:
        gc.set_threshold(700, 10, 10)
    assert beside == [0] * 4


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (OverLimitError("gpu:0 has 1 MB"), "out of memory"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("CUDA error: out of memory"), "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), "out of memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "failed"),
        (ValueError("no such op"), "failed"),
    ],
)
def test_who_says_in_what_words_that_memory_is_short(fault: Exception, outcome: str) -> None:
    assert outcome_of(fault) == outcome


# --- captures, on a GPU that is not there --------------------------------------------------------


class Noting(Immediate):
    """Writes down what is asked of it as a whole."""

    def __init__(self) -> None:
        super().__init__([0] * 16)
        self.asked: list[str] = []

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def give_back(self) -> None:
        self.asked.append("give back")


@pytest.fixture
def opened() -> Iterator[Opened]:
    made = Opened(places("gc"), Noting())
    yield made
    made.close()


@pytest.fixture
def prepared(opened: Opened) -> Prepared:
    found = prepare(STEP, {"w": torch.linspace(-1, 1, 6)}, [0] * 3, opened)
    opened.hardware.asked.clear()
    return found


DIRECT = [[False] * 2] * 2


@pytest.mark.parametrize("short", [1, 2])
def test_where_memory_is_short_what_nobody_uses_is_given_back_once(
    opened: Opened, prepared: Prepared, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[weakref.ref[Execution]] = []

    def capture(self: Execution) -> None:
        assert all(earlier() is None for earlier in tried)  # its memory is to be had again
        tried.append(weakref.ref(self))
        if len(tried) <= short:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Execution, "capture", capture)
    if short == 1:
        executed(prepared, opened, ALONE, DIRECT, True)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            executed(prepared, opened, ALONE, DIRECT, True)
    assert len(tried) == 2
    assert opened.hardware.asked == ["give back"]


def test_a_limit_of_ours_is_no_reason_to_try_again(
    opened: Opened, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(self: Execution) -> None:
        raise OverLimitError("g0 has 1 MB")

    monkeypatch.setattr(Execution, "capture", capture)
    with pytest.raises(OverLimitError):
        executed(prepared, opened, ALONE, DIRECT, True)
    assert opened.hardware.asked == []


def test_steps_that_are_issued_begin_when_their_values_are_there(
    opened: Opened, prepared: Prepared
) -> None:
    executed(prepared, opened, ALONE, DIRECT, False)
    assert opened.hardware.asked == ["synchronize"]


@pytest.mark.parametrize("devices", [[0, 0, 1], [1, 1, 0]])
def test_a_step_that_fails_is_waited_for(
    opened: Opened, prepared: Prepared, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the GPU was given already must not run on when its memory is gone."""
    execution = executed(prepared, opened, devices, DIRECT, False)
    with torch.no_grad():
        execution.run()
        opened.hardware.asked.clear()
        failing = "placewright.backends.pytorch.execution.make_call"

        def fails(*_: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(failing, fails)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            execution.run()
    assert opened.hardware.asked[-1] == "synchronize"
