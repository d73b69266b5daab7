"""What a framework has to offer: models in, placements out, real runs.

A backend lives in a package of its own and is registered by name (`placewright.backends`).
`placewright.testing.check_backend` and `check_runner` check what is promised here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeGuard

import numpy as np
import numpy.typing as npt

from placewright.backends.here import why_not_here
from placewright.cluster import Cluster
from placewright.errors import MissingExtraError, ModelError, PlacementError, WorkerError
from placewright.graph import Graph
from placewright.measurement import Measurement

Array = npt.NDArray[Any]


def is_path(source: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a source is a file, a directory or a benchmark model's name, not a live object."""
    return isinstance(source, str | os.PathLike)


# --- models --------------------------------------------------------------------------------------


class Input(NamedTuple):
    """What a step must be fed with."""

    name: str
    dtype: str
    """As numpy calls it, where numpy has it."""
    shape: tuple[int, ...]


class Program(Protocol):
    """A `Graph` and what it takes to run it. It can be sent to another process."""

    @property
    def graph(self) -> Graph:
        """What is placed; the program's ops have the names of the graph's."""

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What a step must be fed with."""

    @property
    def backend(self) -> str:
        """Name of the backend that runs it."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is read. An option that means nothing for a source is refused."""

    backend: str | None = None
    """Framework whose model it is, where several have a benchmark model of that name."""
    scale: str = "paper"
    """Size of a benchmark model: 'paper', or 'small' for quick trials."""
    batch: int | None = None
    """Batch size: binds the unknown first dimension of the inputs."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Binds an unknown dimension of an input; see the error. `{"x.1": 128}` is dimension 1 of input
    `x`; `{"x": 128}` will do where only one is open."""
    signature: str | None = None
    """Which signature of a SavedModel to read."""
    fetches: Sequence[str] = ()
    """Keep only what this op needs, such as the train op. By default the training step where one is
    known, otherwise everything."""
    loops: Mapping[str, int] = field(default_factory=dict)
    """How often loops run of which the model does not tell: `{"lstm.*": 50}` for all whose names
    contain a match of that regular expression. Goes before what the model says."""

    def __post_init__(self) -> None:
        if isinstance(self.fetches, str):  # one is as good as a list of one
            object.__setattr__(self, "fetches", (self.fetches,))


def refuse(what: str, **options: object) -> None:
    """Raises for an option that is given and has no effect: it would look as if it had one."""
    for name, value in options.items():
        if value or type(value) is int:  # a 0 is given too
            raise ModelError(f"{name} means nothing for {what}")


# --- real runs -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a real run. The protocol is the paper's: ten steps, the first one dropped."""

    steps: int = 10
    """Steps of each placement, the first of which warms up and is not counted."""
    max_steps: int = 40
    """Steps at most, where the times differ too much after `steps`."""
    precision: float = 0.05
    """Steps are added until the 95% confidence interval of the mean is within this share of it."""
    give_up_factor: float = 4.0
    """A placement whose first timed steps take this many times the best one's is cut short."""
    time_limit_seconds: float = 120.0
    """Most time for one real run. Then it is stopped and its outcome is 'timed out'."""
    start_seconds: float = 120.0
    """Most time for the processes to start."""
    limit_memory: bool = False
    """Hold CPU devices to the memory the cluster says. Running out of it then happens as it would
    on a device of that size."""
    check: bool = False
    """Check that every op ran where the placement puts it. Costs a fraction of a second."""
    seed: int = 0
    """For the inputs that are made up."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise WorkerError(
                f"steps must be at least 2, as the first is dropped, not {self.steps}"
            )
        if self.max_steps < self.steps:
            raise WorkerError(f"max_steps ({self.max_steps}) is less than steps ({self.steps})")
        for name in ("precision", "give_up_factor", "time_limit_seconds", "start_seconds"):
            if not getattr(self, name) > 0:
                raise WorkerError(f"{name} must be positive, not {getattr(self, name)}")


class Transfer(NamedTuple):
    """A tensor that went from one device to another in a traced step."""

    edge: str
    """What the framework calls it."""
    bytes: int
    seconds: float


class Span(NamedTuple):
    """When something ran in a traced step, in seconds from its begin."""

    name: str
    """Of the op; of the tensor's op, and from where to where it went, for a transfer."""
    device: int
    begin: float
    end: float
    source: int = -1
    """The device that a transfer came from; -1 for an op."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Medians over some traced steps."""

    op_seconds: Mapping[str, float]
    """Op name -> how long it took."""
    device_of: Mapping[str, int]
    """Op name -> number of the device that it ran on."""
    transfers: tuple[Transfer, ...] = ()
    step_seconds: tuple[float, ...] = ()
    """Of each traced step; tracing itself takes time."""
    spans: tuple[Span, ...] = ()
    """All of the last traced step, where the runner tells when things began."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measurement, and what the framework told on the way."""

    measurement: Measurement
    misplaced: tuple[str, ...] | None = None
    """Ops that did not run where they were put; None when that was not checked."""
    trace: Trace | None = None
    """Where traced steps were asked for and the placement ran."""
    overhead_seconds: float = 0.0
    """What the run took beyond its timed steps."""
    returned: Mapping[str, tuple[float, ...]] | None = None
    """What each step returned, the first one included, of the program's results that are one
    number, such as the loss; where training was asked for."""
    foreign_load: float | None = None
    """Share of the cores that other processes took meanwhile, where that can be known."""
    allocated_bytes: int | None = None
    """What the framework's own allocator gave out on all GPUs for the step, beside what was there
    before it, at most at a time; where it tells."""


class Runner(Protocol):
    """Measures placements of one program on one cluster. One run at a time.

    Whatever goes wrong with a placement is its outcome; `WorkerError` says that nothing can be
    measured at all. What breaks is replaced by the next run.
    """

    @property
    def program(self) -> Program: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def config(self) -> RunConfig: ...

    def start(self) -> None:
        """Starts what runs placements, if it does not run yet, so that no run is blamed for the
        time it takes."""

    def close(self) -> None:
        """Ends all that was started, for good. A second time does nothing."""

    def measure(
        self,
        devices: Sequence[int] | npt.NDArray[np.integer],
        *,
        best_seconds: float | None = None,
        traces: int = 0,
        adaptive: bool = True,
    ) -> Run:
        """Runs one placement.

        Args:
            devices: the number of the device of each op of the program's graph.
            best_seconds: the best step time so far; a placement that is hopeless against it is not
                run to the end.
            traces: how many traced steps to add.
            adaptive: whether steps are added while their times differ too much; without, every
                placement has the same number.
        """

    def time_links(self, sizes: Sequence[int]) -> Mapping[str, Sequence[float]]:
        """Name of each link between two devices -> seconds that a tensor of each of these sizes in
        bytes takes over it. Links to switches may be there too, as far as whole routes tell."""

    def seconds_for_links(self, sizes: int) -> float:
        """About how long `time_links` takes with so many sizes, and with what it takes until the
        next run can begin; 0 where it times nothing."""

    def demands(self) -> Mapping[int, Mapping[str, float]]:
        """Number of a device that shares its chip with others of its kind -> op name -> what the op
        takes of what they share while it runs alone, from 0 to 1. The first device of each chip
        stands for all. Empty where that cannot be found out."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None: ...


# --- the framework -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is put into a user's model."""

    device_of: Mapping[str, str]
    """Op name -> its device, as the framework calls it (see `Backend.device_names`)."""


class Backend(Protocol):
    """One framework. What has a body here is for backends to inherit that have nothing to add.

    Making one and asking it what it accepts imports no framework.
    """

    name: str
    """As in `placewright.backends.get`, and in `Program.backend`."""
    extra: str
    """The optional dependency that installs the framework; empty when there is nothing to
    install."""
    run_config: type[RunConfig] = RunConfig
    """Its settings of real runs."""
    sources: str = ""
    """The files it reads, for errors: `.onnx (ONNX)`."""
    models: tuple[str, ...] = ()
    """Names of the benchmark models that it builds."""

    def installed(self) -> bool:
        """Whether the framework is here, found out without importing it."""
        return True

    def check_installed(self, feature: str = "measuring on real devices") -> None:
        if not self.installed():
            raise MissingExtraError(feature, self.extra)

    def accepts(self, source: object) -> bool:
        """Whether a path, or a live object, is this framework's. It may still fail to load."""

    def load(self, source: Any, options: LoadOptions) -> Program:
        """The model as something that can be run."""

    def load_graph(self, source: Any, options: LoadOptions) -> Graph:
        """The model as something that can be placed, which is less: it may be unable to run."""
        return self.load(source, options).graph

    def runner(
        self,
        program: Any,
        cluster: Cluster,
        config: RunConfig | None = None,
        feeds: Mapping[str, Array] | None = None,
    ) -> Runner:
        """What measures placements of a program of this backend."""

    def why_not_here(self, cluster: Cluster, config: RunConfig | None = None) -> str:
        """Why placements on this cluster cannot be measured from here; empty when they can."""
        return why_not_here(cluster)

    def why_not_measured(self, program: Program) -> str:
        """Why this program cannot be measured anywhere; empty when it can."""
        return ""

    def device_names(
        self, names: Sequence[str], given: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Device of a cluster -> what the framework calls it, or what is `given` for it."""
        return {name: (given or {}).get(name, name) for name in names}

    def apply(self, target: Any, plan: Plan) -> object:
        """The user's model, placed; a copy where it cannot be changed."""

    def apply_to_file(self, path: Path, plan: Plan, output: Path) -> int:
        """Writes a model's file anew with the plan in it. Gives the number of ops that have a
        device now."""
        raise PlacementError(f"{path}: {self.name} has no files that a placement can be put into")
