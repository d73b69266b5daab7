"""Models that do not fit: what Placewright plans and runs, beside what others do.

    python -m benchmarks.offload                              # all; on a machine with an NVIDIA GPU
    python -m benchmarks.offload --models llama --shares 0.5 --shapes decode-1 --seconds 120
    python -m benchmarks.offload --small --output /tmp/x      # tiny models on two memories of a CPU

The GPU may give a share of the weights' bytes. Each row is one way of running one shape: seconds of
a call, the most memory of the GPU at once, how far the outputs are from those of the whole model on
the GPU, and for plans what was predicted. Rows that are in the file are not made again.

| column | what it is |
|---|---|
| `all-on-gpu` | the whole model on the GPU, without a limit: what outputs are compared with |
| `accelerate` | `dispatch_model`: as much as fits, the rest from pageable memory each time |
| `accelerate-pinned` | the same, with the rest in page-locked memory |
| `all-travel` | everything off the GPU travels from page-locked memory, ahead of use |
| `all-by-host` | everything off the GPU is computed by the host's cores |
| `group-offload` | diffusers' group offload with a stream, where diffusers is installed |
| `simulated` | Placewright's plan by the description of the machine |
| `measured` | Placewright's plan after measuring |
| `floor` | what no plan can be faster than, by the measured costs |
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import placewright.torch as pt
from benchmarks.common import RESULTS, add_csv, made_by, read_csv
from placewright.backends.pytorch.offload.estimating import estimated_costs
from placewright.backends.pytorch.offload.links import Link, SlowLink, open_link
from placewright.backends.pytorch.offload.measuring import refine
from placewright.backends.pytorch.offload.plan import OffloadPlan, Shape, UnitPlan
from placewright.backends.pytorch.offload.planner import Limits, Planner
from placewright.backends.pytorch.offload.products import product
from placewright.backends.pytorch.offload.recording import Recorded, record
from placewright.backends.pytorch.offload.runtime import offload
from placewright.backends.pytorch.offload.shapes import Workload, generation
from placewright.backends.pytorch.offload.timeline import Costs
from placewright.cluster import Cluster

MODELS = ("llama", "mixtral", "dit")
SHARES = (0.5, 0.25, 0.75)
SHAPES = ("decode-1", "decode-8", "prefill-128", "prefill-512", "prefill-2048")
COLUMNS = ("simulated", "measured", "floor", "all-travel", "all-by-host", "accelerate",
           "accelerate-pinned", "group-offload")  # fmt: skip
CACHED = 512
_RESERVED = 128 * 2**20


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
        cached = 16 if small else CACHED
        made = generation(prompt=cached, new=256, batch=int(number), static_cache=True)
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

    def __post_init__(self) -> None:
        self.device = "cpu:1" if self.small else "cuda:0"
        self.link = SlowLink(2e8) if self.small else open_link("cuda:0")
        self.cluster = pt.cluster_of(["cpu", "cpu:1"]) if self.small else Cluster.load("h200")
        begun = time.perf_counter()
        self.model = build(self.name, self.small)
        self.recorded = record(self.model, workload_of(self.name, "prefill-128", self.small)[0])
        self.size = sum(unit.own_size for unit in self.recorded.units)
        self.placed = offload(self.model, self._all_on_gpu(self.recorded, "all", 1), self.link)
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in self.placed.parameters():
                if tensor.dim() > 1:
                    tensor.normal_(0, 0.02)
                else:
                    tensor.fill_(0.01 if self.name == "dit" else 1.0)
        self.link.finish()
        print(f"{self.name}: {self.size / 1e9:.2f} GB made in {time.perf_counter() - begun:.1f} s")

    def _all_on_gpu(self, recorded: Recorded, call: str, rows: int) -> OffloadPlan:
        units = tuple(
            UnitPlan(path=u.path, size=u.size, home=self.device, computed_on={call: self.device})
            for u in recorded.units
        )
        return OffloadPlan(
            model=type(self.model).__name__, device=self.device, units=units,
            shapes=(Shape(name=call, rows=rows),), window_bytes=0,
        )  # fmt: skip

    # --- one shape -------------------------------------------------------------------------------

    def prepare(self, shapes: list[str]) -> Iterator[dict[str, Any]]:
        """Outputs of the whole model on the GPU."""
        for shape in shapes:
            row = {"model": self.name, "share": 1.0, "shape": shape, "column": "all-on-gpu"}
            call = workload_of(self.name, shape, self.small)[1]
            yield self._run(row, shape, call, self.placed, self._passes(0.1))

    def cell(self, share: float, shape: str, columns: list[str]) -> Iterator[dict[str, Any]]:
        """The rows of one shape with one limit."""
        workload, call = workload_of(self.name, shape, self.small)
        recorded = record(self.model, workload)
        begun = time.perf_counter()
        item = 2
        costs = estimated_costs(
            recorded, self.cluster, self.device, itemsize=item,
            captured=workload.static_cache and not self.small,
        )  # fmt: skip
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
        for column in columns:
            row: dict[str, Any] = {
                "model": self.name, "share": share, "shape": shape, "column": column,
            }  # fmt: skip
            if time.monotonic() > self.deadline:
                return
            try:
                yield self._column(row, workload, call, planner, plan, took)
            except Exception as fault:
                traceback.print_exc()
                yield {
                    **row,
                    "fault": f"{type(fault).__name__}: {str(fault).splitlines()[0][:200]}",
                }

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
            return self._run(row, shape, call, self.placed, self._passes(plan.shape(call).seconds))
        if column == "measured":
            begun = time.perf_counter()
            self.placed.offload.use(plan)
            plan = refine(self.placed, planner, workload, seconds=20.0)
            found = plan.shape(call)
            row |= {"predicted_seconds": found.seconds, "plan": _said(plan, call),
                    "plan_seconds": plan_seconds + time.perf_counter() - begun}  # fmt: skip
            self.floor = found.floor_seconds
            row["costs"] = _costs_said(planner.costs, call)
            return self._run(row, shape, call, self.placed, self._passes(found.seconds))
        if column == "floor":
            return row | {"seconds": planner.floor_seconds(call)}
        if column in ("all-travel", "all-by-host"):
            plan = _one_way(planner, column, call)
            self.placed.offload.use(plan)
            seconds = plan.shape(call).seconds
            row |= {"predicted_seconds": seconds, "plan": _said(plan, call)}
            return self._run(row, shape, call, self.placed, self._passes(seconds))
        if column == "group-offload":
            return self._group_offload(row, shape, call)
        self.placed.offload.use(_one_way(planner, "all-travel", call, least=True))
        return self._accelerate(row, shape, call, pinned=column.endswith("pinned"))

    def _passes(self, seconds: float | None) -> int:
        return max(1, min(8, int(1.5 / max(1e-3, seconds or 1.0))))

    def _run(
        self, row: dict[str, Any], shape: str, call: str, module: Any, passes: int
    ) -> dict[str, Any]:
        """Warms up, takes the time of some calls, and compares what the first one returned."""
        if not self.small:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        step = _Step(self.name, shape, self.small, module, self.link, warm=4 + passes)
        first = step.run()
        row["largest_difference"] = self._difference(shape, first)
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

    def _difference(self, shape: str, output: torch.Tensor) -> float:
        """Of the outputs, in parts of the largest."""
        output = output.float().cpu()
        if shape not in self.references:
            self.references[shape] = output
        expected = self.references[shape]
        return float((output - expected).abs().max() / expected.abs().max())

    # --- others ----------------------------------------------------------------------------------

    def _accelerate(
        self, row: dict[str, Any], shape: str, call: str, *, pinned: bool
    ) -> dict[str, Any]:
        try:
            from accelerate import dispatch_model
        except ImportError:
            return row | {"fault": "accelerate is not installed"}
        offloaded = self.placed.offload
        plan = offloaded.plan
        offloaded.window = type(offloaded.window)(self.link, 0, {})  # its buffer is accelerate's
        away = [unit for unit in offloaded.units.values() if unit.plan.home != self.device]
        try:
            if not pinned:
                for unit in away:
                    for name, tensor in unit.home.tensors.items():
                        tensor.data = unit.home.value(name).clone()
            shared = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
            module = copy.deepcopy(self.model, dict(shared))
            places = {u.path: 0 if u.home == self.device else "cpu" for u in plan.units if u.size}
            module = dispatch_model(
                module, device_map=places, main_device=0,
                skip_keys=getattr(module, "_skip_keys_device_placement", None), force_hooks=True,
            )  # fmt: skip
            return self._run(row, shape, call, module, 2)
        finally:
            for unit in away:
                unit.home.at_home()
            offloaded.use(plan)

    def _group_offload(self, row: dict[str, Any], shape: str, call: str) -> dict[str, Any]:
        try:
            from diffusers.hooks import apply_group_offloading  # type: ignore[import-not-found]
        except ImportError:
            return row | {"fault": "diffusers is not installed"}
        offloaded = self.placed.offload
        plan = offloaded.plan
        shared = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        module = copy.deepcopy(self.model, dict(shared))
        apply_group_offloading(
            module, onload_device=torch.device("cuda:0"), offload_device=torch.device("cpu"),
            offload_type="block_level", num_blocks_per_group=1, use_stream=True,
        )  # fmt: skip
        try:
            return self._run(row, shape, call, module, 2)
        finally:
            for unit in offloaded.units.values():
                unit.home.at_home()
            offloaded.use(plan)


class _Step:
    """One call of a shape, again and again; a cache has as many tokens each time, but for those of
    the calls before."""

    def __init__(
        self, name: str, shape: str, small: bool, module: Any, link: Link, warm: int
    ) -> None:
        self._module, self._link = module, link
        workload, call = workload_of(name, shape, small)
        device = link.device
        generator = torch.Generator().manual_seed(1)

        def drawn(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            if tensor.is_floating_point():
                return torch.randn(tensor.shape, generator=generator).to(tensor.dtype).to(device)
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
            cache = StaticCache(config=module.config, max_cache_len=tokens + warm + 8)
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
            begun = time.perf_counter()
            block = link.host_memory(size)
            took = time.perf_counter() - begun
            yield {"what": "host memory page-locked", "gigabytes_per_second": size / took / 1e9}

            def copy_in() -> None:
                link.copy([(target, block)], [])
                link.finish()

            yield {"what": "page-locked to GPU", "gigabytes_per_second": rate(copy_in)}
            x = torch.randn(1, k).to(torch.bfloat16)

            def both() -> None:
                mark = link.copy([(target, block)], [])
                for w in weights:
                    nn.functional.linear(x, w)
                mark.synchronize()

            yield {
                "what": "GPU copy and host F.linear at once, each",
                "gigabytes_per_second": rate(both),
            }


_PAGE = """# Models that do not fit

`offload.csv`: seconds of a call (median), with what a plan predicted, the most memory of the GPU at
once and its limit, and the largest difference of outputs from the whole model's on the GPU, as a
share of the largest output. `probe.csv`: what memory and link reach. `benchmarks/offload.py` says
what the columns are.
"""

# --- all -----------------------------------------------------------------------------------------

FIELDS = (
    "model", "share", "shape", "column", "seconds", "calls", "predicted_seconds", "plan_seconds",
    "peak_bytes", "limit_bytes", "largest_difference", "plan", "costs", "fault",
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
    deadline = time.monotonic() + arguments.seconds
    path = arguments.output / "offload.csv"
    done = {tuple(row[key] for key in KEYS) for row in read_csv(path) if not row["fault"]}

    def write(row: dict[str, Any]) -> None:
        line = {name: _text(row.get(name, "")) for name in FIELDS}
        add_csv(path, line)
        print("  " + ", ".join(f"{k} {v}" for k, v in line.items() if v), flush=True)

    if arguments.probe:
        for row in probe():
            add_csv(arguments.output / "probe.csv", {k: _text(v) for k, v in row.items()})
            print(row, flush=True)
    for name in arguments.models:
        shapes = ["step"] if name == "dit" else arguments.shapes
        wanted = {
            (share, shape): [
                column for column in arguments.columns
                if tuple(map(_text, (name, share, shape, column))) not in done
            ]
            for share in arguments.shares
            for shape in shapes
        }  # fmt: skip
        wanted = {cell: columns for cell, columns in wanted.items() if columns}
        if not wanted or time.monotonic() > deadline:
            continue
        try:
            bench = Bench(name, arguments.small, deadline)
            for row in bench.prepare(list(dict.fromkeys(shape for _, shape in wanted))):
                if tuple(_text(row[key]) for key in KEYS) not in done:
                    write(row)
            for (share, shape), columns in wanted.items():
                for row in bench.cell(share, shape, columns):
                    write(row)
        except Exception:
            traceback.print_exc()
        bench = None  # type: ignore[assignment]
        if not arguments.small:
            torch.cuda.empty_cache()
    (arguments.output / "README.md").write_text(f"{_PAGE}\n{made_by()}\n", encoding="utf-8")
    return 0


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
