"""Child processes that never outlive their parent and whose last words are kept.

A child ends when its stdin ends, and the kernel kills it when its parent dies. Its log goes to a
file that has no name, so that nothing is left behind whatever happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from placewright.machine import usable_core_numbers

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

_MOST_ANSWER_BYTES = 1 << 30
"""Of one answer."""

_ENDING_SECONDS = 30.0
"""For what a process leaves behind to be cleared away."""

_PF_EXITING = 0x4
"""Among Linux's flags of a process: it is being taken down."""

_MOST_LOG_BYTES = 1 << 20
"""Of a log, read at a time."""


class Child:
    """A Python module run as a process, talking JSON lines: requests to its stdin, answers back."""

    def __init__(
        self,
        module: str,
        greeting: Mapping[str, Any],
        *,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Starts it. `greeting` is its first request, with each of `files` as the number of a
        descriptor to read from, under the file's key; it has `seconds` to take it. `prefix` is a
        command that becomes the one after it, such as `PrivateNetwork.prefix`."""
        self.name = module.rpartition(".")[2]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as we do
        self._log_read = 0
        self._pending = b""
        descriptors: dict[str, int] = {}
        opened: list[IO[bytes]] = []
        answers, child_answers = os.pipe()
        self._answers = answers
        try:
            for key, content in (files or {}).items():
                opened.append(tempfile.TemporaryFile())  # noqa: SIM115 closed below
                opened[-1].write(content)
                opened[-1].flush()
                descriptors[key] = opened[-1].fileno()
            self._process = subprocess.Popen(
                # -P: what lies in the directory we happen to be in is not to be imported.
                [*prefix, sys.executable, "-P", "-m", module, str(os.getpid()), str(child_answers)],
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
                pass_fds=(child_answers, *descriptors.values()),
                # Ctrl-C is for the parent to handle: it decides what becomes of its children.
                start_new_session=True,
            )
        except BaseException:
            os.close(answers)
            self._log.close()
            raise
        finally:
            os.close(child_answers)
            for file in opened:
                file.close()
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self.send({**greeting, **descriptors}, seconds)
        except BaseException:  # nobody has it yet who could end it
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: Mapping[str, Any], seconds: float) -> None:
        """A child that is gone does not read, nor does one that hangs, and a pipe is small: what
        is not taken within this time is dropped. Whoever waits for the answer will notice."""
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        deadline = time.monotonic() + seconds
        left = memoryview(json.dumps(request).encode() + b"\n")
        while left:
            try:
                left = left[os.write(pipe, left) :]
            except BlockingIOError:
                if not select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))[1]:
                    return
            except BrokenPipeError:
                return

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next answer, or None when there is none within this time."""
        while b"\n" not in self._pending:
            if not select.select([self._answers], [], [], max(0.0, seconds))[0]:
                return None
            part = os.read(self._answers, 1 << 20)
            if not part:
                return None
            self._pending += part
            if len(self._pending) > _MOST_ANSWER_BYTES:
                return self._no_answer(self._pending)
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return self._no_answer(line)
        return answer if isinstance(answer, dict) else self._no_answer(line)

    def _no_answer(self, line: bytes) -> dict[str, Any]:
        """In place of what a process should never write; it is of no use any more."""
        self._pending = b""
        shown = line[:60].decode(errors="replace")
        reason = f"process {self.name!r} gave an answer that is none: {shown!r}"
        return {"outcome": "failed", "reason": reason, "broken": True}

    def ended(self) -> str:
        """How it ended, or nothing while it runs. One that is about to is waited for: the driver
        of a GPU takes a while to take back what it had."""
        code = self._process.poll()
        if code is None and self._is_ending():
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_ENDING_SECONDS)
        if code is None:
            return ""
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"

    def _is_ending(self) -> bool:
        """Whether its first thread is gone, or gives back what all of them had."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        except OSError:  # not Linux, or it is gone
            return False
        fields = stat.rpartition(")")[2].split()
        return fields[0] == "Z" or bool(int(fields[6]) & _PF_EXITING)

    def last_words(self, lines: int = 3) -> str:
        """The end of its log, in one line."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - 8192)
        text = os.pread(self._log.fileno(), 8192, start).decode(errors="replace")
        kept = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(kept[-lines:])

    def fresh_lines(self) -> list[str]:
        """What it has written to its log since this was last asked, as far as lines are whole."""
        text = os.pread(self._log.fileno(), _MOST_LOG_BYTES, self._log_read)
        whole = text[: text.rfind(b"\n") + 1]
        # A line that is longer than what is read at a time is nobody's.
        self._log_read += len(whole) or (len(text) if len(text) == _MOST_LOG_BYTES else 0)
        return whole.decode(errors="replace").splitlines()

    def kill(self) -> None:
        """Ends it at once and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what could not be written cannot be flushed
            self._process.stdin.close()
        if not self._log.closed:
            os.close(self._answers)
            self._log.close()


def serve(handle: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """The child's side: answers requests until there are no more, then ends the process."""
    parent, answers = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    for line in sys.stdin.buffer:
        answer = handle(json.loads(line))
        if answer is not None:
            try:
                with os.fdopen(os.dup(answers), "wb") as pipe:
                    pipe.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
            except BrokenPipeError:
                break
    # Not sys.exit: TensorFlow would wait for its threads, some of which never end.
    os._exit(0)


def serve_begun(begin: Callable[[dict[str, Any]], Callable[[dict[str, Any]], Any]]) -> None:
    """The same, where the first request says what to begin with, which then answers the others."""
    begun: list[Callable[[dict[str, Any]], Any]] = []

    def handle(request: dict[str, Any]) -> Any:
        if not begun:
            begun.append(begin(request))
            return {"ready": True}
        return begun[0](request)

    serve(handle)


def die_with(parent: int) -> None:
    """Ends this process when the one that started it does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
    # Elsewhere than on Linux there is no such signal, and in the midst of a request nobody reads
    # stdin: a thread watches too.
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def read_all(descriptor: int) -> bytes:
    """The content of a file that was handed over by `Child`."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def busy_seconds(text: str, cores: Collection[int]) -> float:
    """How long these cores have computed for anybody, by the text of /proc/stat."""
    ticks = 0
    for line in text.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, *rest = (int(number) for number in numbers[:8])
            ticks += user + nice + system + sum(rest)
    return ticks / os.sysconf("SC_CLK_TCK")


class Load:
    """How much of the cores others take from now on: not these processes."""

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = pids
        self._cores = usable_core_numbers()
        self._started = time.monotonic()
        self._before = self._others()

    def _others(self) -> float:
        try:
            busy = busy_seconds(Path("/proc/stat").read_text(encoding="utf-8"), self._cores)
            for pid in self._pids:
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
                user, system = fields.split()[11:13]
                busy -= (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
            return busy
        except (OSError, ValueError):  # not Linux, or one of them is gone
            return math.nan

    def share(self) -> float | None:
        """0.5 when half of them; None where it cannot be known, or the time was too short for the
        ticks in which the system counts."""
        seconds = time.monotonic() - self._started
        taken = self._others() - self._before
        if seconds < 0.5 or math.isnan(taken):
            return None
        return max(0.0, taken / (seconds * len(self._cores)))


def free_ports(count: int) -> list[int]:
    """Ports on the loopback interface that nobody has at this moment."""
    sockets: Sequence[socket.socket] = []
    try:
        sockets = [socket.socket() for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def share_cores(devices: int) -> list[list[int]]:
    """The cores of each of several devices: equal parts, no core in two of them if possible."""
    cores = usable_core_numbers()
    if not cores:
        return [[] for _ in range(devices)]
    if len(cores) < devices:
        logger.warning(
            "%d devices share %d cores: what is measured here is not what separate cores would do",
            devices,
            len(cores),
        )
        return [[cores[number % len(cores)]] for number in range(devices)]
    each = len(cores) // devices
    return [cores[number * each : (number + 1) * each] for number in range(devices)]


def memory_kills() -> int:
    """How many processes the system has killed for want of memory, here or in this container."""
    total = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            for line in Path(path).read_text(encoding="utf-8").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    total += int(value)
        except (OSError, ValueError):
            continue
    return total
