"""The parts of the documentation that are made from the code, so that they cannot go stale.

Four directives: `commands` is every command with its options, `methods` every method with its
summary, `settings` the fields of a config dataclass with their docstrings, `results` the pages of
`benchmarks/results`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from placewright import cli, methods

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def commands() -> str:
    """Markdown on every command: what it does, its example, its options."""
    parts = []
    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        about, _, example = inspect.cleandoc(command.help).partition("Example: ")
        parameters = [p for p in command.params if "--help" not in p.opts]
        arguments = [p for p in parameters if p.param_type_name == "argument"]
        needed = [p for p in parameters if p.param_type_name == "option" and p.required]
        shown = [_argument(p) for p in arguments]
        shown += [f"{max(p.opts, key=len)} {p.metavar}" for p in needed]
        parts += [f"### `{' '.join(['placewright', name, *shown])}`", about.strip()]
        if example:
            parts.append("```text\n$ " + " ".join(example.split()) + "\n```")
        rows = [(f"`{_argument(p)}`", _sentence(p)) for p in arguments]
        rows += [(_option(p), _sentence(p)) for p in parameters if p not in arguments]
        parts.append(_table(("option", "meaning"), rows))
    return "\n\n".join(parts)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    text = ", ".join(f"`{name}`" for name in names)
    if parameter.is_flag:
        return text
    kind = parameter.metavar or ("N" if isinstance(parameter.default, int) else "TEXT")
    return f"{text} {kind}"


def _sentence(parameter: Any) -> str:
    text = parameter.help or ""
    if parameter.required and parameter.param_type_name == "option":
        return f"{text} Required."
    default = parameter.default
    # An option that is off, or not given, needs no mention.
    if parameter.param_type_name == "option" and not callable(default):
        if getattr(parameter, "is_flag", False):
            return f"{text} The default." if default else text
        if default is not None and default != "" and default != ():
            return f"{text} Default: `{default}`."
    return text


def all_methods() -> str:
    rows = [("`auto`", methods.AUTO_SUMMARY, "")]
    for name, method in methods.METHODS.items():
        rows.append((f"`{name}`", method.summary, f"`{method.extra}`" if method.needs else ""))
    return _table(("method", "what it does", "extra"), rows)


def settings(path: str) -> str:
    """The fields of a dataclass (`module:Class`), with defaults and docstrings.

    Where the module has presets of that class, their values are columns."""
    module_name, _, class_name = path.partition(":")
    module = importlib.import_module(module_name)
    config = getattr(module, class_name)
    explained = field_docs(config)
    columns = {"default": config()}
    config_module = importlib.import_module("placewright.learning.config")
    if config is config_module.LearnerConfig:
        columns = dict(config_module.PRESETS)
    elif config is config_module.PolicyConfig:
        columns = {name: preset.policy for name, preset in config_module.PRESETS.items()}
    rows = []
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(getattr(config(), field.name)):
            continue  # has a table of its own
        values = [f"`{getattr(preset, field.name)}`" for preset in columns.values()]
        rows.append((f"`{field.name}`", *values, explained[field.name]))
    return _table(("setting", *(f"`{c}`" for c in columns), "meaning"), rows)


def field_docs(config: type) -> dict[str, str]:
    """The string under each field of a class; Python itself forgets them."""
    inherited = [base for base in config.__bases__ if dataclasses.is_dataclass(base)]
    found = {name: text for base in inherited for name, text in field_docs(base).items()}
    (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(config))).body
    assert isinstance(tree, ast.ClassDef)
    for entry, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            found[entry.target.id] = text
    return found


def results() -> str:
    """The benchmarks' own pages, one after another, a level lower."""
    pages = []
    for path in sorted(RESULTS.glob("*/README.md")):
        text = re.sub(r"^#", "##", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        # What lies beside them (the CSV files, say) is not part of the site.
        pages.append(re.sub(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text))
    return "\n\n".join(pages)


def _table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    # Outside of `code`, Markdown would take stars, brackets and angles as its own.
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*_<>\[\]\\])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


class _Generated(SphinxDirective):
    def parse(self, text: str) -> list[nodes.Node]:
        found = nodes.Element()
        lines = StringList(text.splitlines(), self.get_source_info()[0])
        self.state.nested_parse(lines, self.content_offset, found, match_titles=True)
        return found.children


class Commands(_Generated):
    def run(self) -> list[nodes.Node]:
        return self.parse(commands())


class Methods(_Generated):
    def run(self) -> list[nodes.Node]:
        return self.parse(all_methods())


class Results(_Generated):
    def run(self) -> list[nodes.Node]:
        for path in RESULTS.glob("*/README.md"):
            self.env.note_dependency(str(path))
        return self.parse(results())


class Settings(_Generated):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse(settings(self.arguments[0]))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("commands", Commands)
    app.add_directive("methods", Methods)
    app.add_directive("results", Results)
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
