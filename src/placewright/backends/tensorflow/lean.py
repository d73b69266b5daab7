"""TensorFlow for processes that only run graphs."""

from __future__ import annotations

import sys
from typing import Any, cast


def import_tensorflow() -> Any:
    """TensorFlow without Keras, which takes a quarter of the time of the import, and which nobody
    needs who only runs graphs."""
    # Importing a module that is None here fails as if it were not installed, and TensorFlow does
    # without it.
    cast(dict[str, Any], sys.modules).setdefault("keras", None)
    import tensorflow

    return tensorflow
