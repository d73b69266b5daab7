"""Reading and writing files so that a fault costs nothing: atomic writes, one-line errors.

Files whose name ends in `.gz` are compressed. What is read may come from anybody: its size is
limited before and after decompression.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import itertools
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from placewright.errors import PlacewrightError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

MOST_BYTES = 1 << 30
"""Of a text file, decompressed: a graph of 200,000 ops has some 100 MB."""

MOST_VALUES = 20_000_000
"""In a JSON file, each of which takes some 40 to 200 bytes once it is read: a graph of 200,000 ops
has some 5 million. A compressed file of a megabyte could hold 300 million empty lists."""


def read_text(path: str | Path, error: type[PlacewrightError], *, what: str) -> str:
    """The text of a file, or `error` with one line that says why it cannot be read."""
    try:
        return read_bytes(path, error, what=what, most=MOST_BYTES).decode()
    except UnicodeDecodeError as fault:
        raise error(f"{path}: not a text file (byte {fault.start}); is it a {what}?") from None


def read_bytes(path: str | Path, error: type[PlacewrightError], *, what: str, most: int) -> bytes:
    """The bytes of a file of at most so many, decompressed, or `error`."""
    try:
        # One byte more than is allowed tells that there is more.
        with gzip.open(path, "rb") if _compressed(path) else Path(path).open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise error(f"{path}: holds more than {most >> 20:,} MiB, no {what} file does")
    except FileNotFoundError:
        raise error(f"{path}: no such {what} file") from None
    except IsADirectoryError:
        raise error(f"{path}: is a directory, expected a {what} file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as fault:
        raise error(f"{path}: damaged gzip file ({fault}); is it truncated?") from None
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None
    if not content.strip():
        raise error(f"{path}: the {what} file is empty")
    return content


def read_json(path: str | Path, error: type[PlacewrightError], *, what: str) -> Any:
    text = read_text(path, error, what=what)
    # What is in texts is counted, too: few have as many commas as that.
    values = sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise error(f"{path}: has over {MOST_VALUES:,} values, no {what} file does")
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
            file.flush()
            # Before the name is there: after a power cut a file must not be there and empty.
            os.fsync(file.fileno())
        # mkstemp makes private files; a result is meant to be read by others as usual.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
        sync_directory(target.parent)
    except OSError as fault:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise error(f"{path}: cannot be written: {fault.strerror}") from None


def sync_directory(folder: Path) -> None:
    """Makes sure that names in a directory survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        sync(handle)
    finally:
        os.close(handle)


def sync(file: IO[bytes] | int) -> None:
    """Makes sure that what was written to an open file survives a power cut."""
    try:
        os.fsync(file)
    except OSError as fault:
        # Devices, and directories of some network file systems, cannot do that and need not.
        if fault.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sha256_of(path: str | Path, error: type[PlacewrightError]) -> str:
    """The SHA-256 of a file's bytes, in hex as `sha256sum` prints it."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None


class DirectoryLock:
    """Held by one process for as long as it writes into a directory; its death releases it.

    The lock is on a file that is removed at the end; one that a killed process left is nobody's.
    """

    def __init__(self, folder: Path, error: type[PlacewrightError]) -> None:
        self._path = folder / LOCK_FILE
        while True:
            try:
                self._file = self._path.open("a")
            except OSError as fault:
                raise error(f"{folder}: is not writable: {fault.strerror}") from None
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise error(
                    f"{folder}: another run is writing there; wait for it, or choose another "
                    "directory"
                ) from None
            except OSError as fault:  # a file system that knows no locks
                logger.warning("%s: cannot be locked (%s): start one run at a time", folder, fault)
                return
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                    return
            self._file.close()  # of one that was released, and its file removed, just now

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()  # before others can have it
        self._file.close()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def write_json(path: str | Path, document: Any, error: type[PlacewrightError]) -> None:
    write_text(path, "".join([*_encoded(document), "\n"]), error)


_AT_ONCE = 1_000


def _encoded(value: Any) -> Iterator[str]:
    """What `json.dumps` makes of it, in pieces. One call for a large graph takes seconds, in which
    no other thread of Python runs, and so no handler of Ctrl-C."""
    if not _is_large(value) or (
        isinstance(value, dict) and not all(isinstance(key, str) for key in value)
    ):
        yield json.dumps(value, allow_nan=False)
        return
    before, after = "{}" if isinstance(value, dict) else "[]"
    entries = iter(value.items() if isinstance(value, dict) else value)
    while piece := list(itertools.islice(entries, _AT_ONCE)):
        items = [item for _, item in piece] if isinstance(value, dict) else piece
        if not any(_is_large(item) for item in items):
            whole = dict(piece) if isinstance(value, dict) else piece
            yield before + json.dumps(whole, allow_nan=False)[1:-1]
            before = ", "
            continue
        for entry, item in zip(piece, items, strict=True):
            yield f"{before}{json.dumps(entry[0])}: " if isinstance(value, dict) else before
            yield from _encoded(item)
            before = ", "
    yield after


def _is_large(value: Any) -> bool:
    """Whether it is long, or holds what is."""
    if not isinstance(value, list | tuple | dict):
        return False
    if len(value) > _AT_ONCE:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(isinstance(item, list | tuple | dict) and _is_large(item) for item in items)


def _compressed(path: str | Path) -> bool:
    return Path(path).suffix == ".gz"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
