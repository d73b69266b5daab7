"""Options made from the fields of config dataclasses, so that each is written once.

A parameter of a command whose type is a config dataclass becomes an option for each field, with the
first sentence of the field's docstring as its help; the command is called with the config.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from placewright.errors import PlacewrightError
from placewright.units import format_duration, parse_duration


class UsageError(PlacewrightError):
    """An option whose text does not have the form it should have."""


class Shown(NamedTuple):
    """How a field looks on the command line, where that does not follow from its name and type."""

    form: str = ""
    """What stands for the value in the help. A `TIME` is written `90s` or `5m`; what has an `=` is
    split at the last one."""
    names: tuple[str, ...] = ()
    complete: Callable[[str], list[str]] | None = None
    """For the shell."""


def complete_backends(incomplete: str) -> list[str]:
    from placewright.backends import every

    return [backend.name for backend in every() if backend.name.startswith(incomplete)]


def complete_methods(incomplete: str) -> list[str]:
    """The last of a list separated by commas."""
    from placewright.methods import METHODS

    before, _, last = incomplete.rpartition(",")
    before += "," if before else ""
    return [before + name for name in ("auto", *METHODS) if name.startswith(last)]


def complete_clusters(incomplete: str) -> list[str]:
    from placewright.cluster import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


OPTIONS: dict[str, Shown] = {
    "backend": Shown("NAME", (), complete_backends),
    "batch": Shown("N"),
    "dims": Shown("INPUT=N", ("--dim",)),
    "signature": Shown("NAME"),
    "fetches": Shown("OP", ("--fetch",)),
    "pins": Shown("REGEX=DEVICE", ("--pin",)),
    "forbidden_devices": Shown("DEVICE", ("--forbid",)),
    "together": Shown("REGEX"),
    "group_by": Shown("REGEX=LABEL"),
    "groups": Shown("N"),
    "costs": Shown("FILE"),
    "cluster": Shown("CLUSTER", ("--cluster", "-c"), complete_clusters),
    "memory": Shown("DEVICE=SIZE"),
    "workload": Shown("WHAT"),
    "homes": Shown(names=("--homes/--no-homes",)),
    "window": Shown("BYTES"),
    "time_limit_seconds": Shown("SECONDS", ("--time-limit",)),
    "addresses": Shown("DEVICE=HOST:PORT", ("--address",)),
    "loops": Shown("REGEX=N", ("--loop",)),
    "placement": Shown("FILE"),
    "device": Shown("NAME"),
    "output": Shown("FILE", ("--output", "-o")),
    "placements": Shown("N"),
    "check": Shown("N"),
    "plot": Shown("FILE"),
    "devices": Shown("NAME=DEVICE", ("--device",)),
    "method": Shown("NAME[,NAME...]", ("--method", "-m"), complete_methods),
    "budget": Shown("TIME", ("--budget", "-b")),
    "trials": Shown("N"),
    "evaluate": Shown("HOW"),
    "policy": Shown("FILE"),
    "simulate_first": Shown("TIME"),
    "learner": Shown("NAME=VALUE"),
    "controllers": Shown("C"),
    "workers": Shown("K"),
    "address": Shown("ADDRESS", ("--ray-address",)),
    "resources": Shown("NAME=AMOUNT", ("--worker-resource",)),
    "trial_seconds": Shown("TIME", ("--trial-timeout",)),
    "max_staleness": Shown("N"),
    "directory": Shown("DIR", ("--output", "-o")),
    "resume": Shown("DIR"),
    "report": Shown(names=("--report/--no-report",)),
    "forced": Shown(names=("--force",)),
}
"""By the name of the field, or of the argument of a function that an error may be about."""


class Only:
    """`Annotated[Config, Only("a", b="Help of b")]`: a command that has some of the fields."""

    def __init__(
        self, *fields: str, config: type | None = None, needs: Sequence[str] = (), **helps: str
    ) -> None:
        """`config` is a class to take them from, where that is not the parameter's own. Where
        nothing that the others need is given, the config is None and they mean nothing."""
        self.fields = (*fields, *helps)
        self.config = config
        self.needs = needs
        self.helps = helps


_ALL = Only()


def add_command(app: typer.Typer, function: Callable[..., None]) -> None:
    """Makes a command of a function; its docstring is the help, other parameters are typer's."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    configs: dict[str, tuple[type, Only, dict[str, Callable[[Any], Any]]]] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind, *notes = (
            getattr(hints[parameter.name], "__metadata__", ()) and get_args(hints[parameter.name])
        ) or (hints[parameter.name],)
        kind = _without_none(kind)
        if not dataclasses.is_dataclass(kind):
            parameter = parameter.replace(annotation=hints[parameter.name])
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        only = next((note for note in notes if isinstance(note, Only)), _ALL)
        kind = only.config or kind
        readers = {}
        for name in only.fields or [f.name for f in dataclasses.fields(kind)]:
            made, readers[name] = _option(kind, name, only)
            parameters.append(made)
        configs[parameter.name] = kind, only, readers

    def run(**given: Any) -> None:
        for parameter, (config, only, readers) in configs.items():
            values = {name: given.pop(name) for name in readers}
            # What was not given has the config's own default.
            values = {n: readers[n](v) for n, v in values.items() if v is not None and v != []}
            if not only.needs or any(name in values for name in only.needs):
                given[parameter] = config(**values)
            elif not values:
                given[parameter] = None
            else:
                extra, needed = option_names(next(iter(values)))[0], option_names(only.needs[0])[0]
                raise UsageError(f"{extra} means nothing without {needed}")
        function(**given)

    run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, __name__
    run.__annotations__ = {}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command()(run)


def _option(config: type, name: str, only: Only) -> tuple[inspect.Parameter, Callable[[Any], Any]]:
    """The option for a field, and what makes the field's value of the option's."""
    shown = OPTIONS.setdefault(name, Shown())
    field = next(f for f in dataclasses.fields(config) if f.name == name)
    about = only.helps.get(name) or _first_sentence(field_docs(config)[name])
    default: Any = field.default
    read: Callable[[Any], Any] = _as_it_is
    kind = _without_none(_hints(config)[name])
    if get_origin(kind) in (tuple, Sequence, Mapping):
        about = f"{about.rstrip('.')}; repeatable."
        default, read = None, functools.partial(_read_all, shown, name, kind)
        kind = list[str]
    elif kind not in (bool, int, float):
        kind = str
    elif shown.form == "TIME":
        default, kind, read = format_duration(default), str, parse_duration
    declared = typer.Option(
        None if only.needs else default,
        *option_names(name),
        help=about,
        metavar=None if kind is bool else shown.form or None,
        autocompletion=shown.complete,
        # Where nothing else is given it is no default, but it is one where something is.
        show_default=default if only.needs and kind is str and default is not None else True,
    )
    optional = kind if default is not None and not only.needs else kind | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=optional
    ), read


def _without_none(kind: Any) -> Any:
    if not isinstance(kind, types.UnionType):
        return kind
    parts = [part for part in get_args(kind) if part is not types.NoneType]
    return parts[0] if len(parts) == 1 else tuple(parts)


def option_names(field: str) -> tuple[str, ...]:
    return OPTIONS[field].names or ("--" + field.replace("_", "-"),)


def _as_it_is(value: Any) -> Any:
    return value


def _read_all(shown: Shown, name: str, kind: Any, texts: list[str]) -> Any:
    """A mapping or a tuple, of an option that is given several times."""
    (option, *_), inner = option_names(name), get_args(kind)
    if get_origin(kind) is not Mapping:
        of = get_origin(inner[0]) or inner[0]
        if "=" not in shown.form:
            return tuple(texts)
        pairs = [split(text, option, shown.form) for text in texts]
        return tuple(pairs if of is tuple else (of(*pair) for pair in pairs))
    return {
        key: _number(inner[1], value, f"{option} {text}") if inner[1] is not str else value
        for text in texts
        for key, value in [split(text, option, shown.form)]
    }


def _number(kind: type, text: str, where: str) -> Any:
    """A size is an int, an amount a float."""
    if kind is int and not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise UsageError(f"{where}: {text!r} is not a positive whole number")
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{where}: {text!r} is not a number") from None


def split(text: str, option: str, form: str) -> tuple[str, str]:
    # At the last '=', because a regular expression may hold one and a device or label does not.
    left, equals, right = text.rpartition("=")
    if not (equals and left and right):
        raise UsageError(f"{option} {text}: expected {form}")
    return left, right


# --- what the dataclasses say --------------------------------------------------------------------


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """The string under each field of a class and of those it inherits; Python forgets them."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        module = sys.modules[base.__module__]
        for field, text in _docs_in(module).get(base.__name__, {}).items():
            found[field] = text or found.get(field, "")
    return found


@functools.cache
def _docs_in(module: types.ModuleType) -> dict[str, dict[str, str]]:
    """By class and field."""
    classes: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for entry, after in zip(node.body, [*node.body[1:], node], strict=True):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                text = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    text = " ".join(str(after.value.value).split())
                classes.setdefault(node.name, {})[entry.target.id] = text
    return classes


@functools.cache
def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", text)[0].replace("`", "")


# --- errors --------------------------------------------------------------------------------------

_VALUE = r"\{[^{}]*\}|\([^()]*\)|'[^']*'|[\w./:-]*\w"


def in_options(message: str) -> str:
    """An error of the library, which names arguments (`dims={'x.1': 8}`), with the options that
    they are on the command line (`--dim x.1=8`); and a name alone in backquotes likewise."""
    names = "|".join(map(re.escape, OPTIONS))
    message = re.sub(rf"`({names})`", lambda found: option_names(found[1])[0], message)
    return re.sub(rf"(?<![\w.'\"-])({names})=({_VALUE})", _as_option, message)


def _as_option(found: re.Match[str]) -> str:
    option, value = option_names(found[1])[0], found[2]
    if value == "True":
        return option
    parts = [part for part in value.strip("{}()").split(", ") if part]
    if value.startswith("{"):
        parts = ["=".join(part.split(": ", 1)) for part in parts]
    texts = (part if part == "..." else f"{option} {part}" for part in parts)
    return " ".join(texts).replace("'", "")
