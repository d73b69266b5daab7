"""Runs the code blocks of pages; see `test_docs.py`, which starts this in a process of its own.

Reads `[{"page": ..., "steps": [...]}, ...]` and writes `{page: what went wrong}`, empty where all
is well. Each page has a directory and names of its own; they share a process, because importing
TensorFlow and torch takes longer than most pages.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import re
import shlex
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from placewright import backends, cli, methods
from placewright.backends.base import LoadOptions
from placewright.backends.tensorflow.models import NAMES
from placewright.graph import Graph


def run_python(code: str, where: str, names: dict[str, Any]) -> None:
    # TensorFlow reads the source of the functions it is given.
    linecache.cache[where] = (len(code), None, code.splitlines(keepends=True), where)
    exec(compile(code, where, "exec"), names)


def run_console(code: str, where: str, options: str) -> None:
    expected = re.search(r"^\[exit (\d+)\]$", code, re.MULTILINE)
    # A line that ends in a backslash goes on.
    lines = re.findall(r"^\$ (.*)$", code.replace("\\\n", " "), re.MULTILINE)
    assert lines, f"{where}: no command in it"
    for number, line in enumerate(lines, start=1):
        program, *arguments = shlex.split(line, comments=True)
        assert program == "placewright", f"{where}: cannot run {program!r}"
        arguments += wanted(arguments, options)
        sys.argv = ["placewright", *arguments]
        started = time.monotonic()
        ended: object = None
        try:
            cli.main(arguments)
        except SystemExit as end:
            ended = end.code
        print(f"{time.monotonic() - started:.1f} s: {shlex.join(sys.argv)}", file=sys.stderr)
        due = int(expected[1]) if expected and number == len(lines) else 0
        assert ended == due, f"{where}: {shlex.join(sys.argv)}: exit {ended} instead of {due}"


def wanted(arguments: list[str], options: str) -> list[str]:
    """Those of the options (`--name value` or `--flag`) that the command has."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    known = {
        name
        for parameter in commands[arguments[0]].params
        for name in (*parameter.opts, *parameter.secondary_opts)
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


def run_page(page: str, steps: list[dict[str, Any]]) -> None:
    if any("model.meta" in step["code"] for step in steps):
        make_model()
    names: dict[str, Any] = {"__name__": "__main__"}
    for step in steps:
        where = f"{page}, line {step['line']}"
        if "file" in step:
            Path(step["file"]).write_text(step["code"], encoding="utf-8")
        elif step["language"] == "python":
            run_python(step["code"], where, names)
        else:
            run_console(step["code"], where, step.get("test with", ""))


def keep_benchmark_models() -> None:
    """Building one takes seconds, and most pages use the same; graphs never change."""
    load = backends.load
    kept = functools.cache(load)

    def load_once(source: object, options: LoadOptions | None = None, **settings: Any) -> Graph:
        wanted = replace(options or LoadOptions(), **settings)
        if source in NAMES and wanted == LoadOptions(scale=wanted.scale):
            return kept(source, scale=wanted.scale)
        return load(source, wanted)

    backends.load = load_once


def main() -> None:
    keep_benchmark_models()
    top = Path.cwd()
    faults = {}
    registered = dict(methods.METHODS)
    for session in json.load(sys.stdin):
        page = session["page"]
        folder = top / re.sub(r"\W", "-", page)
        folder.mkdir()
        os.chdir(folder)
        faults[page] = ""
        started = time.monotonic()
        try:
            run_page(page, session["steps"])
        except Exception:
            faults[page] = traceback.format_exc()
        print(f"{page}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        # A page on methods of one's own may add some.
        methods.METHODS.clear()
        methods.METHODS.update(registered)
    (top / "faults.json").write_text(json.dumps(faults), encoding="utf-8")


if __name__ == "__main__":
    main()
