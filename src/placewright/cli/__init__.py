"""The command `placewright`. One file per command; this one puts them together."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import typer
from rich.logging import RichHandler

from placewright._version import VERSION
from placewright.cli import (
    apply,
    calibrate,
    common,
    inspect,
    measure,
    place,
    report,
    simulate,
    train,
)
from placewright.cli.common import Verbosity, errors
from placewright.cli.options import in_options
from placewright.errors import PlacewrightError

app = typer.Typer(
    name="placewright",
    help="Finds which device each operation of a machine-learning graph should run on.",
    epilog="Every command takes -q (no progress, no warnings), -v (says what it is doing) and "
    "--debug (the whole traceback of an error). Example: placewright place nmt -c k80x4 -b 1m. "
    "Exit codes: 0 done, 1 no placement ran, 2 bad input or a model that cannot fit, "
    "130 stopped by Ctrl-C.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
inspect.add_to(app)
simulate.add_to(app)
place.add_to(app)
train.add_to(app)
report.add_to(app)
apply.add_to(app)
measure.add_to(app)
calibrate.add_to(app)


# Newer versions of typer carry a click of their own, older ones use the package; this is the class
# of a wrong command line in either.
_ClickException: type[Any] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"placewright {VERSION}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and ends the process with its exit code."""
    own_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    arguments = arguments or ["--help"]
    given, arguments = _split_off(arguments)
    debug = "--debug" in given
    common.verbosity = Verbosity.NORMAL
    if given & {"-v", "--verbose"}:
        common.verbosity = Verbosity.VERBOSE
    elif given & {"-q", "--quiet"}:
        common.verbosity = Verbosity.QUIET
    logger = logging.getLogger("placewright")  # ours; the libraries' are not for users
    logger.setLevel(_LEVELS[common.verbosity])
    if not logger.handlers:
        logger.addHandler(
            RichHandler(console=errors, show_time=False, show_path=False, markup=False)
        )
    try:
        code = app(arguments, standalone_mode=False)
    except PlacewrightError as error:
        code = _complain(in_options(str(error)), debug)
    except _ClickException as error:
        code = _complain(error.format_message(), debug)
    except (KeyboardInterrupt, typer.Abort):
        errors.print("stopped")
        code = 130
    except OSError as error:  # of our own output: a full disk behind a redirection
        code = _complain(f"cannot write the output: {error.strerror}", debug)
    code = code if isinstance(code, int) else 0
    if own_process:
        from placewright.stopping import leave

        leave(code)
    sys.exit(code)


_EVERYWHERE = {"--debug", "-q", "--quiet", "-v", "--verbose"}
"""Options that mean the same for every command and may stand anywhere."""

_LEVELS = {
    Verbosity.QUIET: logging.ERROR,
    Verbosity.NORMAL: logging.WARNING,
    Verbosity.VERBOSE: logging.DEBUG,
}


def _split_off(arguments: list[str]) -> tuple[set[str], list[str]]:
    """Those of `_EVERYWHERE` that are given, and the other arguments."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = _EVERYWHERE & set(arguments[:end])
    rest = [argument for argument in arguments[:end] if argument not in _EVERYWHERE]
    return given, rest + arguments[end:]


def _complain(message: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    # One line, whatever the libraries below put into their messages, and no terminal codes.
    line = " ".join(message.split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    errors.print(f"placewright: {line}", markup=False, soft_wrap=True)
    return 2
