"""What numba compiles, once for each machine: the simulator's kernel, and schedulers.

numba's cache notices a change in the function's own file only. After a change to a part that is
called from another file, that file's cache (__pycache__/*.nb?) has to be deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compiles on the first call and keeps the result on disk."""
    return _compile(function)


def compiled_part(function: _F) -> _F:
    """The same for a function that only compiled ones call; much quicker to compile."""
    return _compile(function, no_cpython_wrapper=True)


def _compile(function: _F, **options: bool) -> _F:
    njit: Any = numba.njit  # its types, where it has any, do not know all options
    options = {"nogil": True, "no_cfunc_wrapper": True, **options}
    try:
        return cast(_F, njit(cache=True, **options)(function))
    except RuntimeError:  # nowhere to write the cache: compile anew in every process
        return cast(_F, njit(**options)(function))
