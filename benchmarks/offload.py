"""Models that do not fit: what Placewright plans and runs, beside what others do.

    python -m benchmarks.offload                              # all; on a machine with an NVIDIA GPU
    python -m benchmarks.offload --models llama --shares 0.5 --shapes decode-1 --seconds 120
    python -m benchmarks.offload --small --output /tmp/x      # tiny models on two memories of a CPU

The GPU may give a share of the weights' bytes. Each row is one way of running one shape: seconds of
a call, the most memory of the GPU at once, how far the outputs are from those of the whole model on
the GPU and from those of the same weights in float32, and for plans what was predicted.

Every row is written when it is made, and rows that are in the file are not made again: so it can be
run in parts (`--seconds`), and what matters most comes first. When a cell has all its rows, the
plans that are close to each other are run some more, in turns, and their rows written anew.

| column | what it is |
|---|---|
| `all-on-gpu` | the whole model on the GPU, without a limit: what outputs are compared with |
| `accelerate` | `device_map="auto"`, which sends what has no room from pageable memory each time |
| `accelerate-pinned` | as much as fits, the rest from page-locked memory each time |
| `all-travel` | everything off the GPU travels from page-locked memory, ahead of use |
| `all-by-host` | everything off the GPU is computed by the host's cores |
| `group-offload` | diffusers' group offload with a stream, where diffusers is installed |
| `simulated` | Placewright's plan by the description of the machine |
| `measured` | Placewright's plan after measuring |
| `measured-parts` | the same with attention and the rest of each layer as units of their own |
| `floor` | what no plan can be faster than, by the measured costs |
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import placewright.torch as pt
from benchmarks.common import RESULTS, made_by, merge_csv, read_csv
from placewright.backends.pytorch.offload.estimating import estimated_costs
from placewright.backends.pytorch.offload.links import Link, SlowLink, open_link
from placewright.backends.pytorch.offload.measuring import refine
from placewright.backends.pytorch.offload.plan import HOST, OffloadPlan, Shape, UnitPlan
from placewright.backends.pytorch.offload.planner import Limits, Planner
from placewright.backends.pytorch.offload.products import product
from placewright.backends.pytorch.offload.recording import Recorded, record
from placewright.backends.pytorch.offload.runtime import offload
from placewright.backends.pytorch.offload.shapes import Workload, generation
from placewright.backends.pytorch.offload.timeline import Costs
from placewright.cluster import Cluster
from placewright.errors import SearchError

MODELS = ("llama", "mixtral", "dit")
SHARES = (0.5, 0.25, 0.75)
SHAPES = ("decode-1", "decode-8", "prefill-128", "prefill-512", "prefill-2048")
COLUMNS = ("simulated", "measured", "floor", "all-travel", "all-by-host", "accelerate",
           "accelerate-pinned", "measured-parts", "group-offload")  # fmt: skip
PARTS = {"llama": ("LlamaAttention", "LlamaMLP"),
         "mixtral": ("MixtralAttention", "MixtralSparseMoeBlock")}  # fmt: skip
FIRST_SHAPES = ("decode-1", "prefill-128", "step")
"""Of each model, before the others."""
FIRST_OF_ALL = ("decode-1", "step")
"""Of these, the ones that are run with other shares before there are other models."""
CACHED = 512
_RESERVED = 128 * 2**20
_REFINE_SECONDS = 45.0
_PLANS = ("simulated", "measured", "all-travel", "all-by-host")
"""Columns that are plans of Placewright, and are run in turns in the end."""
_TURNS = 2
_CLOSE = 1.3
"""Plans that took so many times as long as the best are not run once more."""


class Dit(nn.Module):
    """A diffusion transformer: blocks that are modulated by the time, on tokens of an image."""

    _no_split_modules = ("DitBlock",)

    def __init__(self, width: int, depth: int, heads: int, channels: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(depth))
        self.leave = nn.Linear(width, channels)

    def forward(self, hidden_states: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.enter(hidden_states)
        for block in self.blocks:
            x = block(x, time)
        made: torch.Tensor = self.leave(x)
        return made


class DitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.one = nn.LayerNorm(width, elementwise_affine=False)
        self.two = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(nn.functional.silu(time)).unsqueeze(1).chunk(6, dim=-1)
        y = self.one(x) * (1 + parts[0]) + parts[1]
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts[2] * self.out(y)
        y = self.two(x) * (1 + parts[3]) + parts[4]
        made: torch.Tensor = x + parts[5] * self.down(
            nn.functional.gelu(self.up(y), approximate="tanh")
        )
        return made


def build(name: str, small: bool) -> nn.Module:
    """On `meta`, but for buffers."""
    if name == "dit":
        width, depth, heads = (64, 4, 4) if small else (3072, 28, 24)
        with torch.device("meta"):
            return Dit(width, depth, heads).to(torch.bfloat16).eval()
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64 if small else 4096, "intermediate_size": 128 if small else 14336,
        "num_attention_heads": 4 if small else 32, "num_key_value_heads": 2 if small else 8,
        "vocab_size": 256 if small else 32000,
    }  # fmt: skip
    if name == "llama":
        config: Any = transformers.LlamaConfig(num_hidden_layers=8 if small else 32, **sizes)
        kind: Any = transformers.LlamaForCausalLM
    else:
        config = transformers.MixtralConfig(
            num_hidden_layers=4 if small else 8, num_local_experts=8, num_experts_per_tok=2, **sizes
        )
        kind = transformers.MixtralForCausalLM
    with torch.device("meta"):
        model: nn.Module = kind(config).to(torch.bfloat16).eval()
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    model.model.rotary_emb = type(rotary)(config)  # type: ignore[union-attr]
    return model


def workload_of(name: str, shape: str, small: bool) -> tuple[Workload, str]:
    """The calls of a shape, and the one that counts."""
    if name == "dit":
        width, tokens = (64, 64) if small else (3072, 4096)
        inputs = {
            "hidden_states": torch.zeros(1, tokens, 64, dtype=torch.bfloat16),
            "time": torch.zeros(1, width, dtype=torch.bfloat16),
        }
        return Workload(calls={"step": pt.Call(inputs=pt.Inputs((), inputs))}), "step"
    kind, _, number = shape.partition("-")
    if kind == "decode":
        # Of the small one, so many more tokens would take more memory than its weights.
        cached, new = (16, 8) if small else (CACHED, 256)
        made = generation(prompt=cached, new=new, batch=int(number), static_cache=True)
        return replace(made, calls={n: _last_only(c) for n, c in made.calls.items()}), "decode"
    ids = torch.zeros(1, int(number) // (16 if small else 1), dtype=torch.long)
    call = pt.Call(inputs=pt.Inputs((), {"input_ids": ids}))
    return Workload(calls={"prefill": _last_only(call)}), "prefill"


def _last_only(call: pt.Call) -> pt.Call:
    kwargs = {**call.inputs.kwargs, "logits_to_keep": 1}
    return replace(call, inputs=pt.Inputs((), kwargs))


# --- a model on the machine ----------------------------------------------------------------------


@dataclass
class Bench:
    """One model with its weights, placed by one plan after another."""

    name: str
    small: bool
    deadline: float
    """By `time.monotonic`: no row is begun after that."""
    model: nn.Module = field(init=False)
    placed: Any = field(init=False)
    link: Link = field(init=False)
    references: dict[str, torch.Tensor] = field(default_factory=dict)
    """Shape -> what the whole model on the GPU returns."""
    exact: dict[str, torch.Tensor] = field(default_factory=dict)
    """Shape -> what it returns in float32."""

    def __post_init__(self) -> None:
        self.device = "cpu:1" if self.small else "cuda:0"
        self.link = SlowLink(2e8) if self.small else open_link("cuda:0")
        self.cluster = pt.cluster_of(["cpu", "cpu:1"]) if self.small else Cluster.load("h200")
        begun = time.perf_counter()
        self.model = build(self.name, self.small)
        self.recorded = record(self.model, workload_of(self.name, "prefill-128", self.small)[0])
        self.size = sum(unit.own_size for unit in self.recorded.units)
        self.placed = offload(self.model, self._plan_with(self.recorded, "all", ()), self.link)
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in self.placed.parameters():
                if tensor.dim() > 1:
                    tensor.normal_(0, 0.02)
                else:
                    tensor.fill_(0.01 if self.name == "dit" else 1.0)
        self.link.finish()
        print(f"{self.name}: {self.size / 1e9:.2f} GB made in {time.perf_counter() - begun:.1f} s")

    def _plan_with(self, recorded: Recorded, call: str, away: Collection[str]) -> OffloadPlan:
        """Some weights on the host, which computes with them, and all others on the GPU."""
        units = []
        for unit in recorded.units:
            where = HOST if unit.path in away else self.device
            units.append(
                UnitPlan(path=unit.path, size=unit.size, home=where, computed_on={call: where})
            )
        return OffloadPlan(
            model=type(self.model).__name__, device=self.device, units=tuple(units),
            shapes=(Shape(name=call, rows=1),), window_bytes=0,
        )  # fmt: skip

    # --- one shape -------------------------------------------------------------------------------

    def prepare(self, shapes: list[str]) -> Iterator[dict[str, Any]]:
        """Outputs of the whole model on the GPU, and of the same in float32 where there is room."""
        new = [shape for shape in shapes if shape not in self.references]
        if not new:
            return
        self.placed.offload.use(self._plan_with(self.recorded, "all", ()))
        # The model, a copy of it, and that in float32.
        if self.small or torch.cuda.mem_get_info()[0] > 3.5 * self.size:
            whole = copy.deepcopy(self.model).float()
            for shape in new:
                step = _Step(self.name, shape, self.small, whole, self.link, torch.float32)
                self.exact[shape] = step.run().cpu()
                del step
            del whole
            if not self.small:
                torch.cuda.empty_cache()
        for shape in new:
            row = {"model": self.name, "share": 1.0, "shape": shape, "column": "all-on-gpu"}
            yield self._run(row, shape, self.placed, self._passes(0.1))

    def cell(self, share: float, shape: str, columns: list[str]) -> Iterator[dict[str, Any]]:
        """The rows of one shape with one limit."""
        workload, call = workload_of(self.name, shape, self.small)
        recorded = record(self.model, workload)
        begun = time.perf_counter()
        costs = self._estimated(recorded, workload)
        limits = Limits(
            device=self.device, device_bytes=int(share * self.size), host_bytes=10**12,
            reserved_bytes=0 if self.small else _RESERVED,
        )  # fmt: skip
        weights = {name: one.weight for name, one in workload.calls.items()}
        planner = Planner(recorded=recorded, weights=weights, limits=limits, costs=costs)
        plan = planner.search(20.0)
        took = time.perf_counter() - begun
        if took > 20:
            print(f"  planned in {took:.1f} s")
        if "floor" in columns and "measured" not in columns:
            columns = ["measured", *columns]
        ran: dict[str, tuple[OffloadPlan, dict[str, Any]]] = {}
        for column in columns:
            if column == "floor":
                continue  # comes with what was measured
            row: dict[str, Any] = {
                "model": self.name, "share": share, "shape": shape, "column": column,
            }  # fmt: skip
            if time.monotonic() > self.deadline:
                return
            try:
                row = self._column(row, workload, call, planner, plan, took)
                yield row
                if column in _PLANS:
                    ran[column] = self.placed.offload.plan, row
                if column == "measured":  # by what was measured
                    floor = planner.floor_seconds(call)
                    yield {
                        **{key: row[key] for key in (*KEYS, "limit_bytes")},
                        "column": "floor", "seconds": floor, "costs": planner.costs.source,
                    }  # fmt: skip
            except Exception as fault:
                traceback.print_exc()
                yield {
                    **row,
                    "fault": f"{type(fault).__name__}: {str(fault).splitlines()[0][:200]}",
                }

        yield from self._in_turns(shape, ran)

    def _in_turns(
        self, shape: str, ran: Mapping[str, tuple[OffloadPlan, dict[str, Any]]]
    ) -> Iterator[dict[str, Any]]:
        """The rows of plans that are close to each other with the median of some more runs, in
        turns: what slows the machine down for a while should do so to all of them."""
        best = min((row["seconds"] for _, row in ran.values()), default=0.0)
        close = {c: (p, row) for c, (p, row) in ran.items() if row["seconds"] <= _CLOSE * best}
        times = {column: [row["seconds"]] for column, (_, row) in close.items()}
        if len(close) < 2:
            return
        for _ in range(_TURNS):
            for column, (plan, row) in close.items():
                if time.monotonic() > self.deadline:
                    break
                self.placed.offload.use(plan)
                again = self._run(dict(row), shape, self.placed, row["calls"])
                times[column].append(again["seconds"])
        for column, (_, row) in close.items():
            number = len(times[column])
            if number > 1:
                calls = number * row["calls"]
                yield row | {"seconds": statistics.median(times[column]), "calls": calls}

    def _column(
        self, row: dict[str, Any], workload: Workload, call: str, planner: Planner,
        plan: OffloadPlan, plan_seconds: float,
    ) -> dict[str, Any]:  # fmt: skip
        column, shape = row["column"], row["shape"]
        row["limit_bytes"] = planner.limits.device_bytes
        if column == "simulated":
            self.placed.offload.use(plan)
            row |= {"predicted_seconds": plan.shape(call).seconds, "plan_seconds": plan_seconds,
                    "plan": _said(plan, call)}  # fmt: skip
            return self._run(row, shape, self.placed, self._passes(plan.shape(call).seconds))
        if column == "measured":
            begun = time.perf_counter()
            self.placed.offload.use(plan)
            plan = refine(self.placed, planner, workload, seconds=_REFINE_SECONDS)
            found = plan.shape(call)
            row |= {"predicted_seconds": found.seconds, "plan": _said(plan, call),
                    "plan_seconds": plan_seconds + time.perf_counter() - begun}  # fmt: skip
            row["costs"] = _costs_said(planner.costs, call)
            return self._run(row, shape, self.placed, self._passes(found.seconds))
        if column in ("all-travel", "all-by-host"):
            plan = _one_way(planner, column, call)
            self.placed.offload.use(plan)
            seconds = plan.shape(call).seconds
            row |= {"predicted_seconds": seconds, "plan": _said(plan, call),
                    "costs": planner.costs.source}  # fmt: skip
            return self._run(row, shape, self.placed, self._passes(seconds))
        if column == "measured-parts":
            return self._measured_parts(row, workload, call, planner)
        if column == "group-offload":
            return self._group_offload(row, shape)
        return self._accelerate(row, shape, call, planner)

    def _measured_parts(
        self, row: dict[str, Any], workload: Workload, call: str, other: Planner
    ) -> dict[str, Any]:
        if self.name not in PARTS:
            return row | {"fault": "its blocks have no such parts"}
        begun = time.perf_counter()
        recorded = record(self.model, workload, PARTS[self.name])
        costs = self._estimated(recorded, workload)
        planner = replace(other, recorded=recorded, costs=costs)
        plan = planner.search(20.0)
        whole = self._plan_with(self.recorded, "all", ())
        self.placed.restore(self.link.device)
        placed = offload(self.model, plan, self.link)
        try:
            plan = refine(placed, planner, workload, seconds=_REFINE_SECONDS)
            row |= {"predicted_seconds": plan.shape(call).seconds, "plan": _said(plan, call),
                    "plan_seconds": time.perf_counter() - begun,
                    "costs": _costs_said(planner.costs, call)}  # fmt: skip
            return self._run(row, row["shape"], placed, self._passes(plan.shape(call).seconds))
        finally:
            placed.restore(self.link.device)
            self.placed = offload(self.model, whole, self.link)

    def _estimated(self, recorded: Recorded, workload: Workload) -> Costs:
        return estimated_costs(
            recorded, self.cluster, self.device, itemsize=2,
            captured=workload.static_cache and not self.small,
        )  # fmt: skip

    def _passes(self, seconds: float | None) -> int:
        return max(1, min(8, int(1.5 / max(1e-3, seconds or 1.0))))

    def _run(self, row: dict[str, Any], shape: str, module: Any, passes: int) -> dict[str, Any]:
        """Warms up, takes the time of some calls, and compares what the first one returned."""
        if not self.small:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        step = _Step(self.name, shape, self.small, module, self.link, times=4 + passes)
        first = step.run().float().cpu()
        row["largest_difference"] = _difference(first, self.references.setdefault(shape, first))
        if shape in self.exact:
            row["from_float32"] = _difference(first, self.exact[shape])
        for _ in range(3 if passes > 1 else 1):
            step.run()
        times = []
        self.link.finish()
        for _ in range(passes):
            begun = time.perf_counter()
            step.run()
            times.append(time.perf_counter() - begun)
        row["seconds"] = statistics.median(times)
        row["calls"] = passes
        if not self.small:
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
        return row

    # --- others ----------------------------------------------------------------------------------

    def _accelerate(
        self, row: dict[str, Any], shape: str, call: str, planner: Planner
    ) -> dict[str, Any]:
        try:
            from accelerate import dispatch_model, infer_auto_device_map
        except ImportError:
            return row | {"fault": "accelerate is not installed"}
        offloaded, pinned = self.placed.offload, row["column"].endswith("pinned")
        places: dict[str, int | str]
        if pinned:
            plan = _one_way(planner, "all-travel", call, least=True)
            places = {u.path: "cpu" if u.home == HOST else 0 for u in plan.units if u.size}
        else:
            room = planner.limits.device_bytes - planner.working_bytes({})
            places = infer_auto_device_map(
                self.model, max_memory={0: room, "cpu": 10**12},
                no_split_module_classes=list(getattr(self.model, "_no_split_modules", ())),
            )  # fmt: skip
            plan = self._plan_with(planner.recorded, call, _away(places, planner.recorded))
        offloaded.use(plan)
        row["plan"] = f"{plan.resident_bytes / 1e6:.0f} MB on the GPU"
        offloaded.window = type(offloaded.window)(self.link, 0, {})  # its buffer is accelerate's
        away = [unit for unit in offloaded.units.values() if unit.plan.home == HOST]
        try:
            if not pinned:
                for unit in away:
                    for name, tensor in unit.home.tensors.items():
                        tensor.data = unit.home.value(name).clone()
            module = self._same_weights()
            if self.small:
                places = dict.fromkeys(places, "cpu")
            module = dispatch_model(
                module, device_map=places, main_device="cpu" if self.small else 0,
                skip_keys=getattr(module, "_skip_keys_device_placement", None), force_hooks=True,
            )  # fmt: skip
            return self._run(row, shape, module, 2)
        finally:
            for unit in away:
                unit.home.at_home()
            offloaded.use(plan)

    def _same_weights(self) -> Any:
        """Another module with the same parameters, for others to put their hooks on."""
        shared = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        return copy.deepcopy(self.model, dict(shared))

    def _group_offload(self, row: dict[str, Any], shape: str) -> dict[str, Any]:
        try:
            from diffusers.hooks import apply_group_offloading  # type: ignore[import-not-found]
        except ImportError:
            return row | {"fault": "diffusers is not installed"}
        offloaded = self.placed.offload
        # It keeps none of the blocks on the GPU, and page-locks copies of its own. It looks for
        # blocks among a module's own children: of a language model, those of its `model`.
        inside = "" if self.name == "dit" else "model."
        movable = {
            unit.path for unit in self.recorded.units
            if unit.can_move and unit.size and unit.path.startswith(inside)
        }  # fmt: skip
        plan = self._plan_with(self.recorded, "all", movable)
        offloaded.use(plan)
        module = self._same_weights()
        try:
            apply_group_offloading(
                module.model if inside else module,
                onload_device=torch.device("cpu" if self.small else "cuda:0"),
                offload_device=torch.device("cpu"), offload_type="block_level",
                num_blocks_per_group=1, use_stream=not self.small, record_stream=not self.small,
            )  # fmt: skip
            return self._run(row, shape, module, 2)
        finally:
            for unit in offloaded.units.values():
                unit.home.at_home()
            offloaded.use(plan)


def _away(places: Mapping[str, int | str], recorded: Recorded) -> set[str]:
    """Units that a device map has on the host."""

    def place(path: str) -> int | str:
        while path and path not in places:
            path = path.rpartition(".")[0]
        return places.get(path, 0)

    return {u.path for u in recorded.units if u.size and u.can_move and place(u.path) == "cpu"}


def _difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    """In parts of the largest."""
    return float((output - expected).abs().max() / expected.abs().max())


class _Step:
    """One call of a shape, again and again; a cache has as many tokens each time, but for those of
    the calls before."""

    def __init__(
        self, name: str, shape: str, small: bool, module: Any, link: Link,
        dtype: torch.dtype | None = None, *, times: int = 1,
    ) -> None:  # fmt: skip
        self._module, self._link = module, link
        workload, call = workload_of(name, shape, small)
        device = link.device
        generator = torch.Generator().manual_seed(1)

        def drawn(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            if tensor.is_floating_point():
                numbers = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                return numbers.to(dtype or tensor.dtype).to(device)
            return torch.randint(0, 200, tensor.shape, generator=generator).to(device)

        calls = {
            key: {n: drawn(v) for n, v in one.inputs.kwargs.items()}
            for key, one in workload.calls.items()
        }
        self._kwargs = calls[call]
        if workload.calls[call].continues is not None:
            from transformers import StaticCache

            before = calls[str(workload.calls[call].continues)]
            tokens = before["input_ids"].shape[1]
            cache = StaticCache(config=module.config, max_cache_len=tokens + times + 8)
            with torch.no_grad():
                module(**before, past_key_values=cache)
            self._kwargs["past_key_values"] = cache

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            result = self._module(**self._kwargs)
        output: torch.Tensor = getattr(result, "logits", result)
        self._link.finish()
        return output


def _one_way(planner: Planner, column: str, call: str, *, least: bool = False) -> OffloadPlan:
    """The best plan in which all that is large goes one way; `least`: with the smallest buffer."""
    choices = planner.one_way(by_host=column == "all-by-host")
    fitting = [choice for choice in choices if planner.fits(choice)]
    if not fitting:
        raise SearchError(f"no plan of {column} fits into {planner.limits.device_bytes:,} bytes")
    if least:
        smallest = min(choice.window_bytes for choice in fitting)
        fitting = [choice for choice in fitting if choice.window_bytes == smallest]
    return planner.plan(min(fitting, key=lambda choice: planner.seconds(choice, call)))


def _said(plan: OffloadPlan, call: str) -> str:
    return (
        f"{len(plan.travelling(call))} travel; {len(plan.on_host(call))} by host; "
        f"buffer {plan.window_bytes / 1e6:.0f} MB"
    )


def _costs_said(costs: Costs, call: str) -> str:
    units = sorted({(round(c.device_seconds * 1e3, 3), round(c.host_seconds * 1e3, 3))
                    for c in costs.of[call].values() if c.host_seconds > 1e-4})  # fmt: skip
    return (
        f"link {costs.link_bytes_per_second / 1e9:.1f} GB/s, hop {costs.hop_seconds * 1e6:.0f} us, "
        f"host x{costs.host_slowdown:.2f}, copy x{costs.copy_slowdown:.2f}, between "
        f"{costs.between_seconds.get(call, 0) * 1e3:.2f} ms, (device, host) ms {units[:6]}"
    )


# --- probes --------------------------------------------------------------------------------------


def probe() -> Iterator[dict[str, Any]]:
    """What the machine's memory and link can do, in GB/s: what everything else comes from."""
    n, k = 14336, 4096
    weights = [torch.empty(n, k, dtype=torch.bfloat16).normal_(0, 0.02) for _ in range(4)]
    size = sum(w.numel() * 2 for w in weights)

    def rate(run: Callable[[], Any], repeats: int = 5) -> float:
        run()
        best = float("inf")
        for _ in range(repeats):
            begun = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - begun)
        return size / best / 1e9

    with torch.no_grad():
        for rows in (1, 2, 4, 8, 16, 64):
            x = torch.randn(rows, k).to(torch.bfloat16)
            found = rate(lambda x=x: [nn.functional.linear(x, w) for w in weights])  # type: ignore[misc]
            yield {"what": f"host F.linear bf16, {rows} rows", "gigabytes_per_second": found}
        for rows in (1, 2, 4):
            x = torch.randn(rows, k).to(torch.bfloat16)
            found = rate(lambda x=x: [product(x, w, None) for w in weights])  # type: ignore[misc]
            yield {"what": f"host products of our own, {rows} rows", "gigabytes_per_second": found}
        yield {
            "what": "host reads (sum of int64)",
            "gigabytes_per_second": rate(lambda: [w.view(torch.int64).sum() for w in weights]),
        }
        if torch.cuda.is_available():
            link = open_link("cuda:0")
            target = link.device_memory(size)
            x = torch.randn(1, k).to(torch.bfloat16)
            begun = time.perf_counter()
            block = link.host_memory(size)
            took = time.perf_counter() - begun
            yield {"what": "host memory page-locked", "gigabytes_per_second": size / took / 1e9}

            def copy_in() -> None:
                link.copy([(target, block)], [])
                link.finish()

            yield {"what": "page-locked to GPU", "gigabytes_per_second": rate(copy_in)}
            # Where units find their weights: page-locked, and too many for the caches.
            locked = block.view(torch.bfloat16).view(len(weights), n, k)
            locked.copy_(torch.stack(weights))
            for what, compute in (
                ("F.linear", lambda w: nn.functional.linear(x, w)),
                ("products of our own", lambda w: product(x, w, None)),
            ):
                found = rate(lambda compute=compute: list(map(compute, locked)))  # type: ignore[misc]
                name = f"host {what} bf16, 1 rows, page-locked"
                yield {"what": name, "gigabytes_per_second": found}

            def both() -> None:
                mark = link.copy([(target, block)], [])
                for w in weights:
                    nn.functional.linear(x, w)
                mark.synchronize()

            yield {
                "what": "GPU copy and host F.linear at once, each",
                "gigabytes_per_second": rate(both),
            }
            # The host alone while copies go on all the time: what a unit takes beside them.
            mark = link.copy([(target, block)] * 100, [])
            found = rate(lambda: [product(x, w, None) for w in locked])
            over = mark.query()
            link.finish()
            yield {
                "what": "host products of our own beside copies"
                + (" (which ended before)" if over else ""),
                "gigabytes_per_second": found,
            }


_PAGE = """# Models that do not fit

`offload.csv`: seconds of a call (median), with what a plan predicted, the most memory of the GPU at
once and its limit, and the largest difference of outputs from the whole model's on the GPU
(`largest_difference`) and from those of the same weights in float32 (`from_float32`; that of
`all-on-gpu` is what bfloat16 makes), as shares of the largest output. `probe.csv`: what memory and
link reach. `benchmarks/offload.py` says what the columns are.
"""

# --- all -----------------------------------------------------------------------------------------

FIELDS = (
    "model", "share", "shape", "column", "seconds", "calls", "predicted_seconds", "plan_seconds",
    "peak_bytes", "limit_bytes", "largest_difference", "from_float32", "plan", "costs", "fault",
)  # fmt: skip
KEYS = ("model", "share", "shape", "column")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=RESULTS / "offload")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--seconds", type=float, default=480.0, help="no row is begun after that")
    parser.add_argument("--small", action="store_true", help="tiny models, on the CPU alone")
    parser.add_argument("--probe", action="store_true", help="also take the speeds of memory")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        print("offload: torch finds no GPU here; --small tries it on the CPU", file=sys.stderr)
        return 2
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # What measuring tries and what that takes, and which kernel the host's products are given to.
    logging.basicConfig(format="    %(message)s", stream=sys.stdout)
    logging.getLogger("placewright").setLevel(logging.INFO)
    deadline = time.monotonic() + arguments.seconds
    path = arguments.output / "offload.csv"
    done = {tuple(row[key] for key in KEYS) for row in read_csv(path) if not row["fault"]}

    begun = time.monotonic()

    def write(row: dict[str, Any]) -> None:
        line = {name: _text(row.get(name, "")) for name in FIELDS}
        merge_csv(path, [line], *KEYS)
        said = ", ".join(f"{k} {v}" for k, v in line.items() if v)
        print(f"  after {time.monotonic() - begun:.0f} s: {said}", flush=True)

    if arguments.probe:
        for row in probe():
            line = {k: _text(v) for k, v in row.items()}
            merge_csv(arguments.output / "probe.csv", [line], "what")
            print(row, flush=True)
    bench: Bench | None = None
    for name, cells in in_order(arguments.models, arguments.shares, arguments.shapes):
        wanted = {
            (share, shape): [
                column for column in arguments.columns
                if tuple(map(_text, (name, share, shape, column))) not in done
            ]
            for share, shape in cells
        }  # fmt: skip
        wanted = {cell: columns for cell, columns in wanted.items() if columns}
        if not wanted or time.monotonic() > deadline:
            continue
        try:
            if bench is None or bench.name != name:
                bench = None  # its memory is for the next one
                if not arguments.small:
                    torch.cuda.empty_cache()
                bench = Bench(name, arguments.small, deadline)
            for row in bench.prepare(list(dict.fromkeys(shape for _, shape in wanted))):
                if tuple(_text(row[key]) for key in KEYS) not in done:
                    write(row)
            for (share, shape), columns in wanted.items():
                for row in bench.cell(share, shape, columns):
                    write(row)
        except Exception:
            traceback.print_exc()
            bench = None
    page = arguments.output / "README.md"
    before = page.read_text(encoding="utf-8") if page.is_file() else _PAGE
    page.write_text(f"{before.rstrip()}\n\n{made_by()}\n", encoding="utf-8")
    return 0


def in_order(
    models: list[str], shares: list[float], shapes: list[str]
) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    """Models with (share, shape) of their cells, what matters most first: of each model the main
    shapes with the first share and one of them with the others, then its other shapes with the
    first share, then the rest."""

    def turn(cell: tuple[float, str]) -> int:
        share, shape = cell
        if shape in FIRST_OF_ALL or (share == shares[0] and shape in FIRST_SHAPES):
            return 0
        return 1 if share == shares[0] else 2

    for part in range(3):
        for name in models:
            own = ["step"] if name == "dit" else shapes
            cells = [(share, shape) for share in shares for shape in own]
            if found := [cell for cell in cells if turn(cell) == part]:
                yield name, found


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
