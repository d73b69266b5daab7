"""Many PyTorch models through the whole way: captured, planned, applied, run, compared.

    python -m benchmarks.pytorch_zoo                # all; writes results/pytorch_zoo/zoo.csv
    python -m benchmarks.pytorch_zoo --only bert unet

Each model is planned on two CPU devices for a forward pass (in eval mode) and for a training step
(in training mode), and what comes out is compared with the model itself: outputs, gradients, keys
of the state. Two rows of placements each: the expert's, and one that is drawn at random, which cuts
everywhere. `--large` captures models at their full size on `meta`, each in a process of its own;
`--accelerate` has accelerate run the device map of a plan.
"""

from __future__ import annotations

import argparse
import copy
import csv
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import placewright.torch as pt
from benchmarks import pytorch_zoo_models as zoo
from placewright.backends.pytorch.exporting import Task
from placewright.backends.pytorch.plan import Plan
from placewright.backends.pytorch.program import TorchModel, read_program
from placewright.placers.expert import expert

RESULTS = Path(__file__).parent / "results" / "pytorch_zoo"
DEVICES = ("cpu:0", "cpu:1")
TOLERANCE = 1e-5

FIELDS = ("model", "step", "placement", "level", "ops", "groups", "capture_seconds", "cut_tensors",
          "largest_difference", "largest_gradient_difference", "same_keys", "outcome")  # fmt: skip


def check(name: str, example: zoo.Example, train: bool, placement: str) -> dict[str, Any]:
    """One row: a model placed, run and compared."""
    row: dict[str, Any] = {"model": name, "step": "train" if train else "forward",
                           "placement": placement}  # fmt: skip
    module = example.module.train(train)
    task = Task(train=train, loss_fn=example.loss if train else None,
                optimizer=torch.optim.Adam if train else None)  # fmt: skip
    started = time.monotonic()
    program = read_program(TorchModel(module, pt.Inputs.of(example.inputs), task, name))
    row["capture_seconds"] = f"{time.monotonic() - started:.2f}"
    row["ops"] = program.graph.num_ops
    problem = pt.problem_of(
        program, pt.cluster_of(DEVICES), "op" if program.op_of_node else "module"
    )
    row["groups"] = problem.num_groups
    row["level"] = "op" if program.op_of_node else "module"
    if placement == "expert":
        devices = expert(problem)[0].devices
    else:
        devices = np.random.default_rng(0).integers(0, 2, problem.num_groups).astype(np.int32)
    of_group = [problem.cluster.device_names[d] for d in devices]
    of_op = {
        op: of_group[g]
        for op, g in zip(problem.graph.op_names, problem.grouping.group_of.tolist(), strict=True)
    }
    plan = program.plan(of_op, {d: d for d in DEVICES})
    path = RESULTS.parent / f".{name}.json"
    plan.save(path)
    plan = Plan.load(path)
    path.unlink()
    original = copy.deepcopy(module)
    keys = list(original.state_dict())
    placed = plan.apply(module)
    row["cut_tensors"] = len(getattr(placed, "transfers", ()))
    row["same_keys"] = list(placed.state_dict()) == keys
    difference, gradients = compare(original, placed, example, train)
    row["largest_difference"] = f"{difference:.1e}"
    row["largest_gradient_difference"] = f"{gradients:.1e}" if train else ""
    fine = difference <= TOLERANCE and gradients <= TOLERANCE and row["same_keys"]
    row["outcome"] = "ok" if fine else "differs"
    return row


def compare(
    original: torch.nn.Module, placed: torch.nn.Module, example: zoo.Example, train: bool
) -> tuple[float, float]:
    """The largest difference of outputs, and of gradients."""
    results = []
    for module in (original, placed):
        torch.manual_seed(0)  # both draw the same dropout
        with torch.set_grad_enabled(train):
            outputs = module(**example.inputs)
        if train:
            loss = example.loss(outputs) if example.loss else pt_loss(outputs)
            loss.backward()
        results.append(outputs)
    difference = largest(*(leaves(outputs) for outputs in results))
    grads = [
        [p.grad for p in module.parameters() if p.grad is not None] for module in (original, placed)
    ]
    missing = len(grads[0]) != len(grads[1])
    return difference, float("inf") if missing else largest(*grads) if train else 0.0


def pt_loss(outputs: Any) -> torch.Tensor:
    from placewright.backends.pytorch.exporting import loss_of

    return loss_of(outputs)


def leaves(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def largest(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> float:
    """Relative to the largest value of each tensor, where that is more than one."""
    result = 0.0
    for x, y in zip(a, b, strict=True):
        if x.numel():
            gap = (x.double() - y.double()).abs().nan_to_num(0.0).max().item()
            result = max(result, gap / max(1.0, x.double().abs().nan_to_num(0.0).max().item()))
    return result


def run_zoo(only: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name, make in {**zoo.TRANSFORMERS, **zoo.OURS}.items():
        if only and name not in only:
            continue
        for train in (False, True):
            for placement in ("expert", "random"):
                torch.manual_seed(0)
                try:
                    row = check(name, make(), train, placement)
                except Exception as fault:  # a row of the table, whatever it is
                    lines = str(fault).splitlines() or [type(fault).__name__]
                    row = {"model": name, "step": "train" if train else "forward",
                           "placement": placement,
                           "outcome": f"{type(fault).__name__}: {lines[0][:200]}"}  # fmt: skip
                print(*(f"{row.get(f, '')}" for f in FIELDS), sep="\t", flush=True)
                rows.append(row)
    return rows


# --- full size -----------------------------------------------------------------------------------

LARGE = ("gpt2", "gpt2-xl", "llama-7b", "llama-70b")
LARGE_FIELDS = ("model", "step", "parameters", "ops", "groups", "capture_seconds", "plan_seconds",
                "peak_memory_mb")  # fmt: skip


def capture_large(name: str, train: bool) -> dict[str, Any]:
    """One model at its full size on `meta`, planned on eight H100s by the expert."""
    import transformers

    with torch.device("meta"):
        if name.startswith("gpt2"):
            xl = {"n_embd": 1600, "n_layer": 48, "n_head": 25} if name == "gpt2-xl" else {}
            module = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **xl))
        else:
            sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                     "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
            config = transformers.LlamaConfig(use_cache=False, **(sizes if "70b" in name else {}))
            module = transformers.LlamaForCausalLM(config).bfloat16()
        ids = torch.zeros(1, 1024, dtype=torch.long)
    inputs = {"input_ids": ids, **({"labels": ids} if train else {})}
    task = Task(train=train, optimizer=torch.optim.AdamW if train else None)
    started = time.monotonic()
    program = read_program(TorchModel(module, pt.Inputs.of(inputs), task, name))
    captured = time.monotonic()
    problem = pt.problem_of(program, pt.cluster_of("h100x8"), "module")
    placement = expert(problem)[0]
    assert len(placement.devices) == problem.num_groups
    return {
        "model": name,
        "step": "train" if train else "forward",
        "parameters": sum(p.numel() for p in module.parameters()),
        "ops": problem.graph.num_ops,
        "groups": problem.num_groups,
        "capture_seconds": f"{captured - started:.1f}",
        "plan_seconds": f"{time.monotonic() - captured:.1f}",
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
    }


def run_large() -> None:
    with (RESULTS / "large.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, LARGE_FIELDS, lineterminator="\n")
        writer.writeheader()
        for name in LARGE:
            for step in ("forward", "train"):
                # A process of its own, so that the memory is that of this model only.
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.pytorch_zoo",
                           "--capture", name, step]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row = dict(zip(LARGE_FIELDS, done.stdout.strip().splitlines()[-1].split("\t"),
                               strict=True))  # fmt: skip
                print(row, flush=True)
                writer.writerow(row)


# --- accelerate ----------------------------------------------------------------------------------

ACCELERATE_FIELDS = ("model", "modules_by_device", "largest_difference", "outcome")


def run_accelerate() -> None:
    """Plans by module, dispatched by accelerate: the second device is its offload to disk."""
    import tempfile

    from accelerate import dispatch_model

    with (RESULTS / "accelerate.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ACCELERATE_FIELDS, lineterminator="\n")
        writer.writeheader()
        for name in ("gpt2", "llama", "bert", "t5", "opt", "vit", "mixtral", "whisper"):
            torch.manual_seed(0)
            example = zoo.TRANSFORMERS[name]()
            module = example.module.eval()
            planned = pt.plan(module, example.inputs, devices=DEVICES, level="module",
                              method="expert", budget=1)  # fmt: skip
            row = {"model": name}
            try:
                table = planned.device_map()
                with torch.no_grad():
                    wanted = leaves(module(**example.inputs))
                names = {"cpu:0": "cpu", "cpu:1": "disk"}
                with tempfile.TemporaryDirectory() as folder:
                    dispatched = dispatch_model(
                        module, {k: names[v] for k, v in table.items()},
                        main_device="cpu", offload_dir=folder,
                    )  # fmt: skip
                    with torch.no_grad():
                        gap = largest(wanted, leaves(dispatched(**example.inputs)))
                counts = {d: list(table.values()).count(d) for d in DEVICES}
                row |= {"modules_by_device": " ".join(f"{d}={n}" for d, n in counts.items()),
                        "largest_difference": f"{gap:.1e}",
                        "outcome": "ok" if gap <= TOLERANCE else "differs"}  # fmt: skip
            except Exception as fault:
                row["outcome"] = f"{type(fault).__name__}: {str(fault).splitlines()[0][:200]}"
            print(row, flush=True)
            writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--capture", nargs=2, metavar=("MODEL", "STEP"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    RESULTS.mkdir(parents=True, exist_ok=True)
    if options.capture:
        row = capture_large(options.capture[0], options.capture[1] == "train")
        print(*(row[field] for field in LARGE_FIELDS), sep="\t")
    elif options.large:
        run_large()
    elif options.accelerate:
        run_accelerate()
    else:
        rows = run_zoo(options.only)
        if not options.only:
            with (RESULTS / "zoo.csv").open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        print(f"{sum(row['outcome'] == 'ok' for row in rows)} of {len(rows)} ok")


if __name__ == "__main__":
    main()
