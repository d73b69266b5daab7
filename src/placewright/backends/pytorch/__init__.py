"""PyTorch: modules in as graphs, plans out as placed modules. Importing it imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewright.backends.base import Array, Backend, LoadOptions, Plan, RunConfig, is_path, refuse
from placewright.backends.here import why_not_here
from placewright.backends.pytorch import models
from placewright.cluster import Cluster, builtin_kinds
from placewright.errors import MissingExtraError, ModelError, PlacementError

if TYPE_CHECKING:
    from placewright.backends.base import Runner
    from placewright.backends.pytorch.program import TorchModel, TorchProgram

_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin")
_FUNCTION = re.compile(r"^(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*$")


@dataclass(frozen=True, kw_only=True)
class TorchRunConfig(RunConfig):
    """Settings of real runs of PyTorch models."""

    capture: bool | None = None
    """Capture the work of the GPUs as one CUDA graph, so that what Python takes to issue it is not
    timed; otherwise every step is issued op by op. By default as it is simulated: captured, unless
    the cluster says that the host issues (`issue: host`), or does not say who does."""
    tf32: bool = True
    """Let products of float32 matrices use tensor cores."""
    cudnn_benchmark: bool = False
    """Let cuDNN try its algorithms, on the whole GPU."""
    tolerance: float = 0.02
    """How far results may differ from those of the step without a placement, relative to the
    largest of them; the order of sums differs between devices."""


class PyTorchBackend(Backend):
    """Finds the right part of this package for whatever it is asked."""

    name = "pytorch"
    extra = "torch"
    sources = "FILE.py:FUNCTION or package.module:FUNCTION (PyTorch), .pt2 (torch.export)"
    models = models.NAMES
    run_config = TorchRunConfig

    def installed(self) -> bool:
        return importlib.util.find_spec("torch") is not None

    def accepts(self, source: object) -> bool:
        if not is_path(source):
            kinds = {f"{k.__module__}.{k.__qualname__}" for k in type(source).__mro__}
            ours = "placewright.backends.pytorch.program.TorchModel"
            return not kinds.isdisjoint((ours, "torch.nn.modules.module.Module"))
        text, path = str(source), Path(source)
        if path.is_file():
            return path.suffix == ".pt2" or path.suffix in _CHECKPOINTS
        return text in models.NAMES or (not path.exists() and bool(_FUNCTION.match(text)))

    def load(self, source: Any, options: LoadOptions) -> TorchProgram:
        self._check_torch("reading a PyTorch model")
        from placewright.backends.pytorch.program import read_program

        return read_program(_model(source, options))

    def runner(
        self,
        program: Any,
        cluster: Cluster,
        config: RunConfig | None = None,
        feeds: Mapping[str, Array] | None = None,
    ) -> Runner:
        self._check_torch("measuring on real devices")
        from placewright.backends.pytorch.runner import TorchRunner

        return TorchRunner(program, cluster, config, feeds=feeds)

    def why_not_measured(self, program: Any) -> str:
        return str(program.why_no_step)

    def why_not_here(self, cluster: Cluster, config: RunConfig | None = None) -> str:
        if all(device.type == "cpu" for device in cluster.devices):
            return why_not_here(cluster)
        if not self.installed():
            return "torch is not installed"
        import torch

        gpus = torch.cuda.device_count()
        for device in cluster.devices:
            kind, _, number = device.chip.partition(":")
            if kind not in ("cpu", "gpu"):
                return f"torch has no {device.name}"
            if kind == "gpu" and int(number or 0) >= gpus:
                return f"it has no {device.name}" + (
                    "" if gpus else " (torch finds no CUDA device)"
                )
        return _another_kind(cluster)

    def device_names(
        self, names: Sequence[str], given: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        return {name: (given or {}).get(name, torch_name(name)) for name in names}

    def apply(self, target: Any, plan: Plan) -> object:
        """Of a `TorchModel`: the module, placed."""
        self._check_torch("placing a PyTorch model")
        from placewright.backends.pytorch.program import TorchModel, read_program

        if not isinstance(target, TorchModel):
            raise PlacementError(
                "a module alone does not say what it is called with; use placewright.torch.plan, "
                "whose plans are applied with plan.apply(module)"
            )
        program = read_program(target)
        missing = [op for op in program.graph.op_names if op not in plan.device_of]
        if missing:
            raise PlacementError(
                f"the placement has no device for op {missing[0]!r} of {program.model}; was it "
                "made for another model?"
            )
        used = {plan.device_of[op] for op in program.graph.op_names}
        made = program.plan(plan.device_of, {name: name for name in sorted(used)})
        return made.apply(target.module)

    def _check_torch(self, feature: str) -> None:
        if not self.installed():
            raise MissingExtraError(feature, self.extra)


def _another_kind(cluster: Cluster) -> str:
    """Which GPU is known to be of another kind than the cluster says; a kind of the user's own may
    be what is here."""
    here = {device.name: device.kind.name for device in Cluster.load("local").devices}
    known = builtin_kinds()
    for device in cluster.devices:
        kind = re.sub(r"-\d+sm$", "", device.kind.name)  # a part of it
        if device.type == "gpu" and kind in known and here.get(device.chip, kind) != kind:
            return f"its {device.chip} is a {here[device.chip]}, not a {kind}"
    return ""


def torch_name(device: str) -> str:
    """`cuda:0` for `gpu:0`; the others are called the same."""
    return re.sub(r"^gpu(?=:|$)", "cuda", device)


def _model(source: Any, options: LoadOptions) -> TorchModel:
    from placewright.backends.pytorch import sources
    from placewright.backends.pytorch.program import TorchModel

    if isinstance(source, TorchModel):
        return source
    if not is_path(source):
        raise ModelError(
            f"a {type(source).__name__} does not say what it is called with; use "
            "placewright.torch.plan(module, inputs), or give FILE.py:FUNCTION"
        )
    text, path = str(source), Path(source)
    if text in models.NAMES and not path.exists():
        refuse("a benchmark model", signature=options.signature, dims=options.dims,
               fetches=options.fetches, loops=options.loops)  # fmt: skip
        return models.build(text, scale=options.scale, batch=options.batch)
    what = "a PyTorch model, whose example inputs say its sizes"
    refuse(what, batch=options.batch, dims=options.dims, signature=options.signature,
           fetches=options.fetches, loops=options.loops)  # fmt: skip
    if path.suffix == ".pt2":
        return sources.from_exported_program(path)
    if path.suffix in _CHECKPOINTS:
        sources.refuse_checkpoint(path)
    return sources.from_function(text)


BACKEND = PyTorchBackend()
