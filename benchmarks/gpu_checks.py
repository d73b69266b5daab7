"""All checks that need a GPU, in one go: `python -m benchmarks.gpu_checks`.

Runs the tests that are marked `gpu`, a process for each file and all at once (they check what is
right, not what is fast) but for those that compare times or take all memory of the GPU, which come
last and one at a time, and prints a short table. `checks.csv` has a line for each test: what came
of it, when, on what, and of which code (a digest of the package and the tests). A test that passed
with this very code is not run again, so that the same command goes on where its time ended; then it
exits with 3. `benchmarks/results/gpu_checks` says when and where they last passed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks.common import MORE, RESULTS, Row, made_by, markdown, read_csv, write_csv

ROOT = Path(__file__).parent.parent
PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
_RESULT = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: |$)")
_OF_WORKER = re.compile(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (\S+::.+?) *$")
"""The same, of a test that ran beside others."""
_BEGUN = re.compile(r"^\S+\.py::\S+")
ALONE = ("test_times", "test_faults")
"""Files that compare times, or take all memory of the GPU."""
_BESIDE = 4
"""Tests of one file at a time."""
_OUTCOMES = {"PASSED": PASSED, "XPASS": PASSED, "SKIPPED": SKIPPED, "XFAIL": SKIPPED}
"""As pytest says it; anything else has failed."""


def digest() -> str:
    """Of all code that the checks are of."""
    found = hashlib.sha256()
    for folder in (ROOT / "src" / "placewright", ROOT / "tests" / "gpu"):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def outcomes(log: str, *, ended: bool) -> dict[str, str]:
    """Test -> what came of it, of what pytest printed so far. One that passes and then fails while
    it is taken down has failed, and so has one in which pytest `ended` by itself."""
    found: dict[str, str] = {}
    finished = set()
    for line in log.splitlines():
        line = _OF_WORKER.sub(r"\2 \1", line)
        begun, match = _BEGUN.match(line), _RESULT.match(line)
        if match is None and begun is not None and ended:
            found.setdefault(begun[0], FAILED)
        if match is not None:
            outcome = _OUTCOMES.get(match[2], FAILED)
            again = match[1] in finished
            found[match[1]] = FAILED if again and FAILED in (outcome, found[match[1]]) else outcome
            finished.add(match[1])
    return found


def collected(files: Sequence[str]) -> list[str]:
    """All tests of the files."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *_PLAIN, *files]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [line.strip() for line in said.splitlines() if "::" in line]


_PLAIN = ("-p", "no:cacheprovider", "-p", "no:benchmark", "--color=no")


def run(
    files: Mapping[str, Sequence[str]], output: Path, seconds: float
) -> dict[str, dict[str, str]]:
    """File -> test -> what came of it, of these tests of each file."""
    began = time.monotonic()
    logs = {file: output / f"{Path(file).stem}.log" for file in files}
    with contextlib.ExitStack() as opened:
        running = _started(
            files, {f: opened.enter_context(log.open("wb")) for f, log in logs.items()}
        )
    stopped = set()
    for file, process in running.items():
        try:
            process.wait(max(1.0, seconds - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            stopped.add(file)
            process.send_signal(signal.SIGINT)  # it says what it has found so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
            process.wait()
    return {
        file: outcomes(log.read_text(encoding="utf-8", errors="replace"), ended=file not in stopped)
        for file, log in logs.items()
    }


def _started(
    files: Mapping[str, Sequence[str]], logs: Mapping[str, IO[bytes]]
) -> dict[str, subprocess.Popen[bytes]]:
    # Tests of one file run beside each other where that is installed: each starts processes and
    # compiles, which takes long and keeps the GPU idle.
    beside = (
        ["-p", "xdist", "-n", str(_BESIDE)] if importlib.util.find_spec("xdist") is not None else []
    )
    return {
        file: subprocess.Popen(
            [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *_PLAIN, "--tb=short",
             "--durations=8", "--show-capture=no", *([] if _is_alone(file) else beside), *tests],
            cwd=ROOT, stdout=logs[file], stderr=subprocess.STDOUT,
        )
        for file, tests in files.items()
    }  # fmt: skip


def _is_alone(file: str) -> bool:
    return Path(file).stem in ALONE


def table(rows: Iterable[Row]) -> str:
    """How many tests of each file came to what, and when the last of them ran."""
    of: dict[str, list[Row]] = {}
    for row in rows:
        of.setdefault(Path(str(row["test"]).partition("::")[0]).stem, []).append(row)
    lines = []
    for name, mine in of.items():
        counts = [sum(row["outcome"] == kind for row in mine) for kind in _KINDS]
        failed = [str(row["test"]).rpartition("::")[2] for row in mine if row["outcome"] == FAILED]
        last = max((str(row["date"]) for row in mine), default="")
        lines.append([f"`{name}`", *counts, last, ", ".join(f"`{test}`" for test in failed)])
    return markdown(["file", *_KINDS, "last", "which failed"], lines)


_KINDS = (PASSED, FAILED, SKIPPED, NOT_RUN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_checks")
    parser.add_argument("--seconds", type=float, default=300.0, help="most time for all of them")
    parser.add_argument("tests", nargs="*", default=["tests/gpu"])
    arguments = parser.parse_args()
    began = time.monotonic()
    import torch

    if not torch.cuda.is_available():
        print("gpu_checks: torch finds no GPU here", file=sys.stderr)
        return 2
    hardware = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return check(arguments.tests, arguments.output, arguments.seconds, hardware, began)


def check(tests: Sequence[str], output: Path, seconds: float, hardware: str, began: float) -> int:
    files = sorted(
        str(file.relative_to(ROOT) if file.is_absolute() else file)
        for test in tests
        for file in ((ROOT / test).glob("test_*.py") if (ROOT / test).is_dir() else [Path(test)])
    )
    output.mkdir(parents=True, exist_ok=True)
    code, date = digest(), datetime.date.today().isoformat()
    rows = {row["test"]: row for row in read_csv(output / "checks.csv") if row["code"] == code}
    fresh = {"outcome": NOT_RUN, "date": "", "hardware": "", "code": code}
    wanted = collected(files)
    rows |= {test: rows.get(test) or {"test": test, **fresh} for test in wanted}
    waiting: dict[str, list[str]] = {}
    for test in wanted:
        if rows[test]["outcome"] != PASSED:
            waiting.setdefault(test.partition("::")[0], []).append(test)
    alone = [{file: waiting.pop(file)} for file in list(waiting) if _is_alone(file)]
    for files_at_once in (waiting, *alone):
        found = run(files_at_once, output, seconds - (time.monotonic() - began))
        for test, outcome in (pair for of in found.values() for pair in of.items()):
            rows[test] = {
                "test": test, "outcome": outcome, "date": date, "hardware": hardware, "code": code,
            }  # fmt: skip
    if not rows:
        print(f"gpu_checks: no tests in {', '.join(tests)}", file=sys.stderr)
        return 2
    write_csv(output / "checks.csv", list(rows.values()))
    said = table(rows.values())
    where = ", ".join(dict.fromkeys(row["hardware"] for row in rows.values() if row["hardware"]))
    (output / "README.md").write_text(
        f"# Checks on a real GPU\n\n{said}\n\nOn {where or 'nothing yet'}. {made_by()}\n",
        encoding="utf-8",
    )
    print(said, flush=True)
    came = {rows[test]["outcome"] for test in wanted}
    return MORE if NOT_RUN in came else 1 if FAILED in came else 0


if __name__ == "__main__":
    sys.exit(main())
