"""`placewright apply`: a placement put into the model it was found for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from placewright.backends import Plan, backend_of, is_graph_file, model_names
from placewright.cli import common
from placewright.cli.options import add_command, split
from placewright.cli.outputs import check_output
from placewright.errors import ModelError
from placewright.placement import read_ops


def add_to(app: typer.Typer) -> None:
    add_command(app, apply)


def apply(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The TensorFlow model that was placed: .pb, .pbtxt, .meta or a SavedModel.",
        ),
    ],
    placement: Annotated[
        str, typer.Argument(metavar="PLACEMENT", help="The placement.json that 'place' left.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT", help="Where to write the placed model.")
    ],
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="NAME=DEVICE",
            help="What TensorFlow calls a device, /device:GPU:0 for gpu:0 if not said; repeatable.",
        ),
    ] = None,
    as_json: common.JsonOption = False,
) -> None:
    """Write the model with the device of every op set; all else stays as it is.

    Example: placewright apply model.meta result/placement.json -o placed.meta
    """
    given = dict(split(text, "--device", "NAME=DEVICE") for text in device or [])
    ops = read_ops(placement)
    path = Path(model)
    if not path.exists():
        hint = ""
        if model in model_names():
            hint = "; a benchmark model has no file to put it into"
        elif ":" in model:
            hint = "; a PyTorch module is placed in Python, with placewright.torch.place"
        raise ModelError(f"{model}: no such file or directory{hint}")
    if is_graph_file(path):
        raise ModelError(f"{model}: a graph file has no devices to set; give TensorFlow's model")
    if path.resolve() == Path(output).resolve():
        raise ModelError(f"{output}: is the model itself; choose another place for the placed one")
    if not Path(output).is_dir():  # a SavedModel may be written to one that is empty
        check_output(output)
    backend = backend_of(path)
    if backend is None:
        raise ModelError(f"{model}: not a kind of file that a placement can be put into")
    with common.status(f"placing {model} ..."):
        names = backend.device_names(sorted(set(ops.values())), given)
        plan = Plan(device_of={op: names[name] for op, name in ops.items()})
        count = backend.apply_to_file(path, plan, Path(output))
    if as_json:
        common.print_json({"output": output, "nodes": count, "devices": names})
    else:
        common.console.print(
            f"{count:,} nodes of {common.escaped(model)} have a device now: "
            f"{common.escaped(output)}"
        )
