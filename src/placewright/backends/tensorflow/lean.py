"""TensorFlow for processes that only run graphs."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast


def import_tensorflow() -> Any:
    """TensorFlow without Keras, which takes a quarter of the time of the import, and which nobody
    needs who only runs graphs."""
    # Importing a module that is None here fails as if it were not installed, and TensorFlow does
    # without it.
    cast(dict[str, Any], sys.modules).setdefault("keras", None)
    import tensorflow

    return tensorflow


_OF_SERVERS = ("python/tf2.py", "python/training/server_lib.py", "python/eager/context.py")


def import_for_server() -> None:
    """What it takes to serve a device to others: every kernel, and little of the Python around
    them, which takes most of the time of the import. All of TensorFlow where this version has its
    files elsewhere, or where it may have kernels from plug-ins, which the rest of it loads."""
    found = importlib.util.find_spec("tensorflow")
    folder = Path(found.submodule_search_locations[0]) if found else Path()  # type: ignore[index]
    extended = "TF_PLUGGABLE_DEVICE_LIBRARY_PATH" in os.environ or any(
        (Path(place) / "tensorflow-plugins").exists() for place in sys.path
    )
    if (
        extended
        or (folder / "core/kernels").exists()
        or not all((folder / name).is_file() for name in _OF_SERVERS)
    ):
        import_tensorflow()
        return
    # A package of that name with nothing in it: its modules are found, and only those are read that
    # are asked for.
    bare = ModuleType("tensorflow")
    bare.__path__ = [str(folder)]
    sys.modules["tensorflow"] = bare
    os.environ["TF2_BEHAVIOR"] = "1"  # as all of TensorFlow says
    from tensorflow.python import tf2

    tf2.enable()
