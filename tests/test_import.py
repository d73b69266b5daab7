from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import placewright


def modules_after(statement: str) -> set[str]:
    script = f"{statement}; import sys; print(*sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_import_is_light() -> None:
    loaded = modules_after("import placewright")
    heavy = {"tensorflow", "torch", "ray", "numba", "keras", "ortools", "typer", "yaml", "numpy"}
    assert not heavy & loaded


def test_the_command_line_starts_without_frameworks() -> None:
    loaded = modules_after("import placewright.cli")
    assert not {"tensorflow", "torch", "ray", "numba", "keras", "ortools"} & loaded


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "placewright", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"placewright {placewright.__version__}\n"


@pytest.mark.parametrize("name", placewright.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(placewright, name) is not None


def test_public_names_are_those_of_the_stubs() -> None:
    names = {name for names in placewright._HOME.values() for name in names}
    assert names | {"__version__"} == set(placewright.__all__)
    for module in placewright._HOME:
        importlib.import_module(f"placewright.{module}")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'plaec'"):
        _ = placewright.plaec
