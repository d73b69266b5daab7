"""Holds a PyTorch step, runs it under placements and times it, on request.

Run by `TorchRunner` as `python -m placewright.backends.pytorch.client`.
"""

from __future__ import annotations

import gc
import io
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from placewright.backends.processes import read_all, serve_begun
from placewright.backends.pytorch.demands import GraphTimer, find_demands
from placewright.backends.pytorch.execution import (
    BrokenError,
    Execution,
    Moment,
    Opened,
    Prepared,
)
from placewright.backends.pytorch.exporting import first_line
from placewright.backends.pytorch.lanes import OverLimitError
from placewright.backends.pytorch.places import Place
from placewright.backends.pytorch.steps import Call, Ref, Source, Step, without_dropout
from placewright.backends.pytorch.values import Values
from placewright.backends.pytorch.works import Learned, learn, works_of
from placewright.backends.timing import Timing

_MOST_KEPT_BYTES = 2 << 30
"""On GPUs, of what is not in use."""
_HOPS = 16
"""From device to device and back, for one time of a link."""


class Client:
    """One step on the devices of one cluster; a new `Execution` for every placement."""

    def __init__(self, greeting: Mapping[str, Any]) -> None:
        self._settings: Mapping[str, Any] = greeting["settings"]
        torch.backends.cuda.matmul.allow_tf32 = self._settings["tf32"]
        torch.backends.cudnn.allow_tf32 = self._settings["tf32"]
        torch.backends.cudnn.benchmark = self._settings["cudnn_benchmark"]
        self._opened = Opened([Place(**place) for place in greeting["places"]])
        self._direct: Sequence[Sequence[bool]] = greeting["direct"]
        self._on_gpu = bool(self._opened.gpus)
        step = Step.from_json(json.loads(read_all(greeting["step"])))
        given = _tensors(step, read_all(greeting["weights"]), read_all(greeting["feeds"]))
        self._prepared = prepare(
            step, given, greeting["resident_bytes"], self._opened, self._settings["seed"]
        )
        self._names: list[str] = greeting["ops"]
        self._checked = False
        """Whether a placement on several devices returned what the step itself does."""
        self._runs = 0
        gc.collect()
        gc.freeze()
        gc.disable()  # it would stop a timed step

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What goes wrong on the way is the answer."""
        self._runs += 1
        if self._runs % 20 == 0:
            gc.collect()
        try:
            answer = self._answered(request)
            self._give_back()
            return answer
        except BrokenError as fault:
            return {"outcome": outcome_of(fault), "reason": first_line(fault), "broken": True}
        except Exception as fault:  # an op that refuses its device, CUDA itself, ...
            return self._after({"outcome": outcome_of(fault), "reason": first_line(fault)}, fault)

    def _answered(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "sizes" in request:
            return {"links": self._time_links(request["pairs"], request["sizes"])}
        if "chips" in request:
            return self._all_demands(request["chips"])
        return self._measure(request)

    def _give_back(self) -> None:
        """What torch keeps of earlier placements' memory, where it is much: every captured step
        takes memory of its own, and others may share the GPU."""
        unused = sum(
            torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
            for gpu in {place.device for place in self._opened.gpus}
        )
        if unused > _MOST_KEPT_BYTES:
            self._opened.hardware.give_back()

    def _after(self, answer: dict[str, Any], fault: BaseException) -> dict[str, Any]:
        """Whether the GPUs still work: after an illegal access nothing does."""
        fault.__traceback__ = None  # it holds the tensors of the step
        gc.collect()
        if self._on_gpu:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                (torch.zeros(8, device=self._opened.gpus[0].device) + 1).cpu()
            except RuntimeError as error:
                answer["broken"] = True
                answer["reason"] += f"; the GPU does not answer any more ({first_line(error)})"
        return answer

    # --- a placement -----------------------------------------------------------------------------

    def _measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        checks = request["check"] or not self._checked
        if request["train_steps"] or checks:
            self._reset()
        if checks and self._steady is not None and self._steady is not self._prepared:
            execution = self._execution(request["devices"], of=self._steady)
            execution.step()
            self._check(execution, self._steady)
            del execution
            self._reset()
        # The execution, and its memory, are gone when it is traced.
        answer, timed = self._timed(
            self._execution(request["devices"], memory_bytes=request.get("memory_bytes")),
            request, checks,
        )  # fmt: skip
        if answer["outcome"] == "ok" and request["traces"]:
            answer["trace"] = self._trace(request["devices"], request["traces"])
        answer["overhead_seconds"] = max(0.0, time.monotonic() - began - timed)
        return answer

    def _timed(
        self, execution: Execution, request: Mapping[str, Any], checks: bool
    ) -> tuple[dict[str, Any], float]:
        """The answer, and the seconds of all its steps."""
        train = request["train_steps"]
        answer: dict[str, Any] = {"outcome": "ok"}
        with _seeded():
            execution.step()
        if checks:
            if self._steady is self._prepared:
                self._check(execution, self._prepared)
            # With everything on one device nothing travels, and little can go wrong.
            self._checked = len(set(request["devices"])) > 1 or len(self._opened.places) == 1
        if request["check"]:
            answer["misplaced"] = []  # every call is made where it is put, or fails
        returned = [execution.results()] if train else []
        timed = [0.0]

        def step() -> float:
            seconds = execution.step()
            timed[0] += seconds
            if train:
                returned.append(execution.results())
            return seconds

        answer["step_seconds"] = Timing(**request["timing"]).time(step)
        bad = _not_a_number(execution.results())
        if bad and not train:
            # Parameters that were trained for many placements on inputs that are made up may have
            # run away; that says nothing about this placement.
            self._reset()
            execution.step()
            bad = _not_a_number(execution.results())
        if bad:
            return {"outcome": "failed", "reason": f"the step returned {bad}"}, timed[0]
        answer["peak_bytes"] = list(execution.peak_bytes)
        answer["allocated_bytes"] = execution.allocated_bytes
        if train:
            answer["returned"] = _scalars(returned)
        return answer, timed[0]

    def _reset(self) -> None:
        """All values as before the first step, on whatever stream the next one begins."""
        self._prepared.values.reset()
        if self._on_gpu:
            self._opened.hardware.synchronize()

    def _all_demands(self, chips: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Of the places of each chip: op -> what it takes of the chip."""
        found, broken = [], False
        for numbers in chips:
            of, place = self._prepared, self._opened.places[numbers[0]]
            timer = GraphTimer([self._opened.stream(number) for number in numbers])
            shares = find_demands(
                of.works, of.step.num_values, of.values.all_on(place.torch_device),
                place.torch_device, timer, len(numbers),
            )  # fmt: skip
            found.append({self._names[op]: share for op, share in shares.items()})
            broken |= timer.broken
        return {"demands": found, "broken": broken}

    def _execution(
        self,
        devices: Sequence[int],
        traced: bool = False,
        memory_bytes: Sequence[int] | None = None,
        of: Prepared | None = None,
    ) -> Execution:
        return executed(
            of or self._prepared, self._opened, devices, self._direct, self._settings["capture"],
            traced, memory_bytes,
        )  # fmt: skip

    @cached_property
    def _steady(self) -> Prepared | None:
        """The step as it is compared: without its dropout. None where it draws random numbers of
        other kinds, whose order differs from device to device."""
        made = self._prepared
        step = without_dropout(made.step)
        if step is None:
            return None
        if step is made.step:
            return made
        device = torch.device(self._opened.gpus[0].device if self._opened.gpus else "cpu")
        works = works_of(step)
        learned = learn(step, works, made.values.all_on(device), device)
        if self._opened.gpus:
            self._opened.hardware.give_back()
        return replace(made, step=step, works=works, learned=learned)

    def _check(self, execution: Execution, of: Prepared) -> None:
        """The results are those of the step without a placement, within rounding."""
        for got, wanted in zip(execution.results(), of.learned.results, strict=True):
            error = _relative_error(got, wanted)
            if not error <= self._settings["tolerance"]:
                raise ArithmeticError(
                    f"the placed step returned something else than the step itself (relative "
                    f"error {error:.2g})"
                )

    def _trace(self, devices: Sequence[int], count: int) -> dict[str, Any]:
        """Medians over some traced steps."""
        execution = self._execution(devices, traced=True)
        execution.step()
        steps, all_moments = [], []
        for _ in range(count):
            steps.append(execution.step())
            all_moments.append(execution.moments())
        seconds: dict[str, list[float]] = {}
        device_of: dict[str, int] = {}
        transfers: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        for moments in all_moments:
            in_step: dict[str, float] = {}
            for moment in moments:
                name = self._label(moment)
                if moment.op >= 0:
                    in_step[name] = in_step.get(name, 0.0) + moment.end - moment.begin
                    device_of[name] = moment.place
                else:
                    transfers.setdefault(name, []).append(moment.end - moment.begin)
                    form = self._prepared.learned.forms[moment.value]
                    sizes[name] = form.copied_bytes if form is not None else 0
            for name, taken in in_step.items():
                seconds.setdefault(name, []).append(taken)
        return {
            "op_seconds": {name: statistics.median(times) for name, times in seconds.items()},
            "device_of": device_of,
            "transfers": [
                (name, sizes[name], statistics.median(times)) for name, times in transfers.items()
            ],
            "step_seconds": steps,
            "spans": [(self._label(m), m.place, m.begin, m.end, m.source) for m in all_moments[-1]],
        }

    def _label(self, moment: Moment) -> str:
        if moment.op >= 0:
            return self._names[moment.op]
        names = [place.name for place in self._opened.places]
        maker = self._maker.get(moment.value, "")
        side = f"{names[moment.source]} -> {names[moment.place]}"
        return f"{maker} ({side})"

    @cached_property
    def _maker(self) -> dict[int, str]:
        """Value -> the op that makes it."""
        step = self._prepared.step
        made = {value: work.op for work in self._prepared.works for _, value in work.makes}
        made.update({source.value: source.op for source in step.sources})
        return {value: self._names[op] for value, op in made.items()}

    # --- links -----------------------------------------------------------------------------------

    def _time_links(
        self, pairs: Sequence[Sequence[int]], sizes: Sequence[int]
    ) -> list[list[float]]:
        """Seconds of a tensor of each size between each two devices, by a chain that goes to and
        fro, beside one that stays."""
        found = []
        for a, b in pairs:
            times = []
            for size in sizes:
                prepared = prepare(_chain(max(1, size // 4)), {}, [0] * (_HOPS + 2), self._opened)
                there = self._chain_seconds(prepared, [a if i % 2 else b for i in range(_HOPS + 2)])
                here = self._chain_seconds(prepared, [a] * (_HOPS + 2))
                times.append(max(1e-9, (there - here) / _HOPS))
            found.append(times)
        return found

    def _chain_seconds(self, prepared: Prepared, places: Sequence[int]) -> float:
        execution = executed(
            prepared, self._opened, places, self._direct, self._settings["capture"]
        )
        for _ in range(2):
            execution.step()
        return statistics.median(execution.step() for _ in range(7))


def prepare(
    step: Step,
    given: Mapping[str, torch.Tensor],
    resident_bytes: Sequence[int],
    opened: Opened,
    seed: int = 0,
) -> Prepared:
    """Puts the sources where all runs on the first GPU, or on the CPU, and runs it once there."""
    device = torch.device(opened.gpus[0].device if opened.gpus else "cpu")
    works = works_of(step)
    values = Values(step, given, seed)
    with torch.no_grad(), _seeded():
        learned: Learned = learn(step, works, values.all_on(device), device)
    if opened.gpus:
        opened.hardware.give_back()
    return Prepared(
        step=step, works=works, learned=learned, values=values, resident_bytes=resident_bytes
    )


def executed(
    prepared: Prepared,
    opened: Opened,
    devices: Sequence[int],
    direct: Sequence[Sequence[bool]],
    capture: bool,
    traced: bool = False,
    memory_bytes: Sequence[int] | None = None,
) -> Execution:
    """A placement, captured where that is wanted and there is something to capture.

    While it captures torch gives no memory back to the driver, also none that nobody uses any more,
    such as that of the graphs of earlier placements. So where there is not enough, that is given
    back and it captures once more.
    """

    def made() -> Execution:
        execution = Execution(
            prepared, opened, devices, direct=direct, traced=traced, memory_bytes=memory_bytes
        )
        if capture and execution.on_gpu:
            execution.capture()
        elif execution.on_gpu:  # what it begins with was put there on another stream
            opened.hardware.synchronize()
        return execution

    try:
        return made()
    except torch.OutOfMemoryError as fault:
        fault.__traceback__ = None  # it holds what there was room for
    gc.collect()
    opened.hardware.give_back()
    return made()


_NO_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Words of torch on a CPU, of CUDA, and of its libraries, whose errors are of no kind of their
own."""


def outcome_of(fault: BaseException) -> str:
    """Whether what went wrong is that there was not enough memory."""
    known = isinstance(fault, OverLimitError | MemoryError | torch.OutOfMemoryError)
    return "out of memory" if known or any(w in str(fault) for w in _NO_MEMORY) else "failed"


def _chain(elements: int) -> Step:
    """One tensor, handed on from op to op."""
    source = Source(value=0, kind="input", name="0", shape=(elements,), dtype="float32", op=0)
    calls = tuple(
        Call(value=i + 1, target="aten.alias.default", args=(Ref(i),), kwargs={}, op=i + 1)
        for i in range(_HOPS + 1)
    )
    return Step(num_values=_HOPS + 2, sources=(source,), calls=calls, results=())


@contextmanager
def _seeded() -> Iterator[None]:
    """Random ops draw the same numbers in every first step."""
    torch.manual_seed(0)
    yield


def _tensors(step: Step, weights: bytes, feeds: bytes) -> dict[str, torch.Tensor]:
    """By the names of the step's sources: weights, and what is fed by its number."""
    from safetensors.torch import load

    given: dict[str, torch.Tensor] = dict(load(weights)) if weights else {}
    with np.load(io.BytesIO(feeds), allow_pickle=False) as file:
        inputs = {s.name: s for s in step.sources if s.kind == "input"}
        for name in file.files:
            if name in inputs:
                given[name] = torch.from_numpy(file[name])
    return given


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if not got.is_floating_point() or not got.numel():
        return 0.0 if torch.equal(got, wanted) else float("inf")
    a, b = got.double(), wanted.double()
    scale = max(float(b.abs().max()), 1e-6)
    return float((a - b).abs().max()) / scale


def _not_a_number(results: Sequence[torch.Tensor]) -> str:
    for tensor in results:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
    return ""


def _scalars(results: Sequence[Sequence[torch.Tensor]]) -> dict[str, list[float]]:
    """Of the results of each step, those that are one number."""
    return {
        f"result {number}" if number else "loss": [float(step[number]) for step in results]
        for number, tensor in enumerate(results[0])
        if tensor.numel() == 1
    }


def main() -> None:
    serve_begun(lambda request: torch.no_grad()(Client(request).answer))


if __name__ == "__main__":
    main()
