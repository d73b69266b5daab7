"""`placewright place --workload`: a PyTorch module that does not fit, planned module by module."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewright.cli import common
from placewright.cli.options import UsageError, option_names
from placewright.cluster import Cluster, with_memory
from placewright.files import write_json, write_text
from placewright.units import format_bytes

if TYPE_CHECKING:
    from placewright.backends.pytorch.offload.plan import OffloadPlan, UnitPlan
    from placewright.backends.pytorch.offload.planned import PlannedOffload
    from placewright.session.config import SearchConfig

PLAN_FILE = "offload.json"
_FUNCTION = re.compile(r"^(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*$")
_GENERATION = ("prompt", "new", "batch")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The machine, and what is asked of it."""

    cluster: str = "local"
    """A cluster file (.yaml), a preset (k80x2, k80x4, a100x4, h100x8, h200, cpu2) or 'local'."""
    memory: Mapping[str, str] = field(default_factory=dict)
    """What a device may give instead of its memory, such as cuda:0=8GiB."""
    workload: str | None = None
    """Plan a PyTorch module that does not fit into one GPU, weights at home on the host included:
    'prompt=512,new=256,batch=1' for what generate of transformers calls (with ',static' for its
    static cache), or 'function' for what the function returns besides the module."""
    checkpoint: str | None = None
    """With --workload and --evaluate measure: the safetensors files of a module that the function
    returns without values (on meta)."""

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.workload is None:
            raise UsageError("--checkpoint goes with --workload and --evaluate measure")

    def described(self) -> Cluster:
        return with_memory(Cluster.load(self.cluster), self.memory)


def place_offloaded(
    model: str, setting: Setting, search: SearchConfig, output: Any, others: Mapping[str, Any]
) -> None:
    """Finds a plan, leaves it in a directory and says what it is. `others`: configs of options that
    mean nothing here, by the name of one of each."""
    _refuse(search, others)
    if not _FUNCTION.match(model):
        raise UsageError(
            f"--workload is for PyTorch modules (FILE.py:FUNCTION), not for {model}; for other "
            "models --memory alone will do"
        )
    if setting.checkpoint is not None and search.evaluate != "measure":
        raise UsageError("--checkpoint goes with --evaluate measure; otherwise nothing is run")
    if not setting.memory:
        raise UsageError("--workload needs --memory, such as --memory cuda:0=8GiB")
    import placewright.torch as pt
    from placewright.backends.pytorch.sources import call_function

    with output.opened(model, setting.cluster) as directory:
        with common.status(f"reading {model} ..."):
            module, given = call_function(model)
            workload = _workload(str(setting.workload), given)
        with common.status("planning ..."):
            planned = pt.plan_offload(
                module, workload, memory=setting.memory, devices=setting.cluster,
                budget=search.budget or 10.0, seed=search.seed,
            )  # fmt: skip
        plan = planned.plan
        if search.evaluate == "measure":
            with common.status("measuring ..."):
                plan = _measured(planned, module, setting.checkpoint)
        command = shlex.join(["placewright", *sys.argv[1:]])
        write_json(Path(directory) / PLAN_FILE, {**plan.to_json(), "command": command}, UsageError)
    if output.json:
        common.print_json(plan.to_json())
        return
    for line in plan.describe():
        common.console.print(common.escaped(line), soft_wrap=True)
    path = common.escaped(str(Path(directory) / PLAN_FILE))
    common.console.print(f"the plan is in {path}; placewright.torch.OffloadPlan.load reads it")


def _measured(planned: PlannedOffload, module: Any, checkpoint: str | None) -> OffloadPlan:
    if checkpoint is None and any(tensor.is_meta for tensor in module.parameters()):
        raise UsageError(
            "the module has no values (it is on meta), and --evaluate measure runs it; give "
            "--checkpoint, its safetensors files"
        )
    plan: OffloadPlan = planned.apply(
        module, evaluate="measure", checkpoint=checkpoint
    ).offload.plan
    return plan


def holds_plan(directory: str) -> bool:
    """Whether what was left in a directory is a plan for a module that does not fit."""
    return (Path(directory) / PLAN_FILE).is_file()


def sections(directory: str) -> list[tuple[str, tuple[str, ...]]]:
    """What `explain` says of the plan in a directory."""
    from placewright.backends.pytorch.offload.plan import OffloadPlan

    return explained(OffloadPlan.load(Path(directory) / PLAN_FILE))


def explained(plan: OffloadPlan) -> list[tuple[str, tuple[str, ...]]]:
    first, *shapes = plan.describe()
    number = len(plan.shapes)
    why = tuple(plan.notes)
    found = [("Where weights live", (first,)), ("What each call does", tuple(shapes[:number]))]
    return [*found, ("Why", why)] if why else found


def write_page(directory: str, output: str | None) -> Path:
    """The plan in a directory as a page: where each unit's weights live, and what each call does
    with them."""
    from placewright.backends.pytorch.offload.plan import OffloadPlan

    page = Path(output) if output else Path(directory) / "report.html"
    write_text(page, _page(OffloadPlan.load(Path(directory) / PLAN_FILE)), UsageError)
    return page


def _page(plan: OffloadPlan) -> str:
    """HTML without scripts: what is asked of it is a table."""
    said = "".join(
        f"<h2>{escape(title)}</h2>{''.join(f'<p>{escape(line)}</p>' for line in lines)}"
        for title, lines in explained(plan)
    )
    names = [shape.name for shape in plan.shapes]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("unit", "weights", "home", *names))
    rows = []
    for unit in plan.units:
        if not unit.size:
            continue
        cells = [escape(unit.path), format_bytes(unit.size), escape(unit.home)]
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        for name in names:
            how = _how(plan, unit, name)
            row += f'<td class="{how}">{_HOW[how]}</td>'
        rows.append(f"<tr>{row}</tr>")
    title = escape(f"{plan.model}: what stays, what travels, what the host computes")
    return _PAGE.format(title=title, said=said, head=head, rows="\n".join(rows))


def _how(plan: OffloadPlan, unit: UnitPlan, shape: str) -> str:
    if unit.travels(shape):
        return "travels"
    return "stays" if unit.home == plan.device else "host"


_HOW = {"stays": "stays", "travels": "travels", "host": "computed by the host"}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title} - Placewright</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: .15rem .8rem .15rem 0 }}
td + td + td + td {{ padding-left: .5rem; color: #111 }}
.stays {{ background: #9ecae1 }} .travels {{ background: #fdae6b }} .host {{ background: #a1d99b }}
</style></head><body><h1>{title}</h1>
{said}
<h2>Units, in the order of calls</h2>
<table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table></body></html>
"""


def _workload(text: str, given: Any) -> Any:
    """The workload that a text stands for."""
    import placewright.torch as pt

    if text == "function":
        if given is None:
            raise UsageError(
                "--workload function: the function returns a module alone; let it return (module, "
                "workload), or give --workload prompt=512,new=256"
            )
        return given
    numbers: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if part.strip() == "static":
            numbers["static_cache"] = True
        elif name in _GENERATION and re.fullmatch(r"0*[1-9][0-9]*", value):
            numbers[name] = int(value)
        else:
            raise UsageError(
                f"--workload {text}: {part.strip()!r} is neither prompt, new nor batch with a "
                "number, such as prompt=512, nor 'static'; or give --workload function"
            )
    return pt.generation(**numbers)


def _refuse(search: SearchConfig, others: Mapping[str, Any]) -> None:
    blank = type(search)()
    known = ("budget", "seed", "evaluate")
    given = [
        f.name for f in fields(search)
        if f.name not in known and f.init and getattr(search, f.name) != getattr(blank, f.name)
    ]  # fmt: skip
    for config in others.values():
        if config is not None and not isinstance(config, str | list | tuple):
            given += [
                f.name for f in fields(config)
                if getattr(config, f.name) != getattr(type(config)(), f.name)
            ]  # fmt: skip
    given += [name for name, value in others.items() if isinstance(value, str | list) and value]
    if given:
        raise UsageError(f"{option_names(given[0])[0]} means nothing with --workload")
    if search.evaluate not in (None, "simulate", "measure"):
        raise UsageError("--workload goes with --evaluate simulate or measure")
