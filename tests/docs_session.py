"""Runs the code blocks of a page as one session; see `test_docs.py`, which starts this."""

from __future__ import annotations

import json
import linecache
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from placewright import cli


def run_python(code: str, where: str, names: dict[str, Any]) -> None:
    # TensorFlow reads the source of the functions it is given.
    linecache.cache[where] = (len(code), None, code.splitlines(keepends=True), where)
    exec(compile(code, where, "exec"), names)


def run_console(code: str, where: str, options: str) -> None:
    expected = re.search(r"^\[exit (\d+)\]$", code, re.MULTILINE)
    # A line that ends in a backslash goes on.
    lines = re.findall(r"^\$ (.*)$", code.replace("\\\n", " "), re.MULTILINE)
    if not lines:
        sys.exit(f"{where}: no command in it")
    for number, line in enumerate(lines, start=1):
        program, *arguments = shlex.split(line, comments=True)
        if program != "placewright":
            sys.exit(f"{where}: cannot run {program!r}")
        arguments += wanted(arguments, options)
        sys.argv = ["placewright", *arguments]
        try:
            cli.main(arguments)
        except SystemExit as ended:
            last = number == len(lines)
            code_wanted = int(expected[1]) if expected and last else 0
            if ended.code != code_wanted:
                sys.exit(f"{where}: placewright {shlex.join(arguments)}: exit {ended.code}")


def wanted(arguments: list[str], options: str) -> list[str]:
    """Those of the options (`--name value` or `--flag`) that the command has."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    command = commands.get(arguments[0]) if arguments else None
    known = {
        name for p in (command.params if command else ()) for name in (*p.opts, *p.secondary_opts)
    }
    found: list[str] = []
    for text in re.findall(r"--\S+(?: (?!--)\S+)*", options):
        if text.split()[0] in known:
            found += text.split()
    return found


def make_model() -> None:
    """`model.meta`, which stands for the reader's own model."""
    import tensorflow as tf

    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [64, 256], "x")
        for layer in range(4):
            with tf.compat.v1.variable_scope(f"layer_{layer}"):
                x = tf.nn.relu(tf.matmul(x, tf.compat.v1.get_variable("w", [256, 256])))
        loss = tf.reduce_mean(x, name="loss")
        train = tf.compat.v1.train.AdamOptimizer().minimize(loss, name="train")
        tf.compat.v1.add_to_collection("train_op", train)
        tf.compat.v1.train.export_meta_graph("model.meta")


def main() -> None:
    page = sys.argv[1]
    steps = json.load(sys.stdin)
    if any("model.meta" in step["code"] for step in steps) and not Path("model.meta").exists():
        make_model()
    names: dict[str, Any] = {"__name__": "__main__"}
    for step in steps:
        where = f"{page}, line {step['line']}"
        print(f"--- {where}", flush=True)
        if "file" in step:
            Path(step["file"]).write_text(step["code"], encoding="utf-8")
        elif step["language"] == "python":
            run_python(step["code"], where, names)
        else:
            run_console(step["code"], where, step.get("test with", ""))


if __name__ == "__main__":
    main()
