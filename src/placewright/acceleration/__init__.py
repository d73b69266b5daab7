"""The fastest way to run a module on one GPU: groups of its ops on streams, found by real trials.

`placewright.torch.accelerate` is what users call. Here is the search: kernels are timed one by one,
list scheduling puts groups on streams, methods of the project improve on that by measured times,
and what comes out is compared with the module itself and with whatever else there is, in turns.
"""

from __future__ import annotations

from placewright.acceleration.compiling import compile_backend, on_first_call
from placewright.acceleration.config import (
    EAGER,
    ONE,
    PLAIN,
    PLAIN_STREAMS,
    STREAMS,
    AccelerateConfig,
)
from placewright.acceleration.modules import accelerate, accelerated, plain_schedules
from placewright.acceleration.training import TrainStep, accelerate_step, train_step
from placewright.acceleration.trials import schedules

__all__ = [
    "EAGER", "ONE", "PLAIN", "PLAIN_STREAMS", "STREAMS", "AccelerateConfig", "TrainStep",
    "accelerate", "accelerate_step", "accelerated", "compile_backend", "on_first_call",
    "plain_schedules", "schedules", "train_step",
]  # fmt: skip
