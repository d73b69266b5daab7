"""Reading and writing files so that a fault costs nothing: atomic writes, one-line errors.

Files whose name ends in `.gz` are compressed.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from placewright.errors import PlacewrightError


def read_text(path: str | Path, error: type[PlacewrightError], *, what: str) -> str:
    """The text of a file, or `error` with one line that says why it cannot be read."""
    try:
        content = Path(path).read_bytes()
        text = (gzip.decompress(content) if _compressed(path) else content).decode()
    except FileNotFoundError:
        raise error(f"{path}: no such {what} file") from None
    except IsADirectoryError:
        raise error(f"{path}: is a directory, expected a {what} file") from None
    except UnicodeDecodeError as fault:
        raise error(f"{path}: not a text file (byte {fault.start}); is it a {what}?") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as fault:
        raise error(f"{path}: damaged gzip file ({fault}); is it truncated?") from None
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None
    if not text.strip():
        raise error(f"{path}: the {what} file is empty")
    return text


def read_json(path: str | Path, error: type[PlacewrightError], *, what: str) -> Any:
    text = read_text(path, error, what=what)
    try:
        return json.loads(text)
    except json.JSONDecodeError as fault:
        # A fault at the very end means the file stops short; elsewhere it is malformed.
        cause = "truncated" if fault.pos >= len(text.rstrip()) - 1 else "malformed"
        raise error(
            f"{path}: {cause} JSON at line {fault.lineno}, column {fault.colno}: {fault.msg}"
        ) from None
    except (RecursionError, ValueError) as fault:  # nested too deeply; a number of 5,000 digits
        raise error(f"{path}: JSON that no {what} has: {fault}") from None


def check_new(path: str | Path, error: type[PlacewrightError]) -> None:
    """Raises when a file cannot be made there, or one is there already: for what takes long to
    make, before it is made."""
    target = Path(path)
    if target.exists():
        raise error(f"{path}: is there already; choose another name")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        what = "is not writable" if target.parent.is_dir() else "no such directory"
        raise error(f"{path}: cannot be written: {target.parent}: {what}")


def write_text(path: str | Path, text: str, error: type[PlacewrightError]) -> None:
    content = text.encode()
    if _compressed(path):
        content = gzip.compress(content, 6, mtime=0)  # without the time, equal text is equal bytes
    write_bytes(path, content, error)


def write_bytes(path: str | Path, data: bytes, error: type[PlacewrightError]) -> None:
    """Replaces the file in one step: readers see the old or the new content, never a part."""
    target = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes private files; a result is meant to be read by others as usual.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as fault:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise error(f"{path}: cannot be written: {fault.strerror}") from None


def write_json(path: str | Path, document: Any, error: type[PlacewrightError]) -> None:
    write_text(path, json.dumps(document, allow_nan=False) + "\n", error)


def _compressed(path: str | Path) -> bool:
    return Path(path).suffix == ".gz"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
