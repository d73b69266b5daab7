"""TensorFlow: its models, its placements, its real runs. Imported only when one is used."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewright.backends.base import (
    Array,
    Backend,
    LoadOptions,
    Plan,
    RunConfig,
    is_path,
    refuse,
)
from placewright.backends.isolation import PrivateNetwork
from placewright.backends.tensorflow import models
from placewright.cluster import Cluster
from placewright.errors import WorkerError
from placewright.graph import Graph

if TYPE_CHECKING:
    from placewright.backends.tensorflow.program import TensorFlowProgram
    from placewright.backends.tensorflow.reading import Step
    from placewright.backends.tensorflow.runner import TensorFlowRunner

_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")


@dataclass(frozen=True, kw_only=True)
class TensorFlowRunConfig(RunConfig):
    """Settings of TensorFlow's own."""

    threads_between_ops: int = 4
    """Threads of a device that start ops (inter-op). With 1, sending waits behind computing."""
    optimize: bool = False
    """Let TensorFlow rewrite the graph first (Grappler). Faster steps, but it moves and merges ops,
    so that what runs is not quite the placement."""
    soft_placement: bool = False
    """Let TensorFlow put an op elsewhere where it has no kernel on its device."""
    ports: tuple[int, ...] = ()
    """Port of each device's process on this machine; free ones when not given."""
    open_servers: bool = False
    """Let the servers of several CPU devices listen on all interfaces, for systems that allow no
    private network. They ask for no password: whoever reaches this machine meanwhile, its other
    users included, can read and write files as you."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """A TensorFlow server already running; for each device. Job `worker`, tasks in the order of the
    cluster's devices; all devices or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads_between_ops < 1:
            raise WorkerError("threads_between_ops must be at least 1")


class TensorFlowBackend(Backend):
    """Finds the right part of this package for whatever it is asked."""

    name = "tensorflow"
    extra = "tensorflow"
    run_config = TensorFlowRunConfig
    sources = ".pb or .pbtxt (TensorFlow GraphDef), .meta (MetaGraph) or a SavedModel's directory"
    models = models.NAMES

    def installed(self) -> bool:
        return importlib.util.find_spec("tensorflow") is not None

    def accepts(self, source: object) -> bool:
        if not is_path(source):
            modules = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
            return not modules.isdisjoint(("tensorflow", "keras"))
        path = Path(source)
        if path.is_dir():
            return any((path / name).exists() for name in _SAVED_MODEL)
        if path.exists():
            return ".meta" in path.suffixes or path.suffix in (".pb", ".pbtxt")
        return str(source) in models.NAMES

    def load(self, source: Any, options: LoadOptions) -> TensorFlowProgram:
        step = _step(source, options)
        from placewright.backends.tensorflow.program import make_program

        return make_program(step)

    def load_graph(self, source: Any, options: LoadOptions) -> Graph:
        return _step(source, options).graph()

    def runner(
        self,
        program: TensorFlowProgram,
        cluster: Cluster,
        config: RunConfig | None = None,
        feeds: Mapping[str, Array] | None = None,
    ) -> TensorFlowRunner:
        from placewright.backends.tensorflow.runner import TensorFlowRunner

        return TensorFlowRunner(program, cluster, config, feeds=feeds)

    def why_not_here(self, cluster: Cluster, config: RunConfig | None = None) -> str:
        if isinstance(config, TensorFlowRunConfig) and config.addresses:
            return ""  # they are wherever their servers are
        reason = super().why_not_here(cluster, config)
        config = config if isinstance(config, TensorFlowRunConfig) else TensorFlowRunConfig()
        if not reason and starts_servers(cluster, config) and not config.open_servers:
            try:
                PrivateNetwork().close()
            except OSError as fault:
                return only_open(fault)
        return reason

    def device_names(
        self, names: Sequence[str], given: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        from placewright.backends.tensorflow.apply import tensorflow_devices

        return tensorflow_devices(names, given)

    def apply(self, target: Any, plan: Plan) -> object:
        from placewright.backends.tensorflow.apply import apply_to_object

        return apply_to_object(target, plan.device_of)

    def apply_to_file(self, path: Path, plan: Plan, output: Path) -> int:
        from placewright.backends.tensorflow.apply import apply_to_file

        return apply_to_file(path, plan.device_of, output)


def starts_servers(cluster: Cluster, config: TensorFlowRunConfig) -> bool:
    """Whether several CPUs are to be told apart: each is then a process with a server."""
    cpus = sum(device.type == "cpu" for device in cluster.devices)
    return cpus > 1 and not config.addresses


def only_open(fault: OSError) -> str:
    """Why servers are not started where they cannot be kept to themselves."""
    return (
        f"this system allows no private network ({fault}), so TensorFlow's servers would be open "
        "to whoever reaches this machine, without a password; open_servers accepts that"
    )


def _step(source: Any, options: LoadOptions) -> Step:
    return dataclasses.replace(_step_of(source, options), loops=options.loops)


def _step_of(source: Any, options: LoadOptions) -> Step:
    batch, dims, fetches = options.batch, options.dims, options.fetches
    if not is_path(source):
        refuse(f"a {type(source).__name__}", signature=options.signature)
        from placewright.backends.tensorflow import reading

        return reading.step_of_object(source, batch=batch, dims=dims, fetches=fetches)
    path = Path(source)
    if str(source) in models.NAMES and not path.exists():
        refuse("a benchmark model", signature=options.signature, dims=dims)
        from placewright.backends.tensorflow import reading  # first: it starts TensorFlow quietly

        model = models.build(str(source), scale=options.scale, batch=batch)
        return reading.step_of_benchmark(model, fetches=fetches)
    is_saved_model = path.is_dir() or path.name in _SAVED_MODEL
    if not is_saved_model:
        refuse("a GraphDef", signature=options.signature)
    from placewright.backends.tensorflow import reading

    if is_saved_model:
        return reading.step_of_saved_model(
            path if path.is_dir() else path.parent,
            signature=options.signature, fetches=fetches, batch=batch, dims=dims,
        )  # fmt: skip
    return reading.step_of_file(path, fetches=fetches, batch=batch, dims=dims)


BACKEND = TensorFlowBackend()
