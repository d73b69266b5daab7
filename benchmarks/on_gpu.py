"""Everything that needs a GPU, by one command that is called until nothing is left:

    python -m benchmarks.on_gpu --seconds 560 --output out
    python -m benchmarks.on_gpu --seconds 560 --output out2 --resume out      # on a fresh machine
    python -m benchmarks.on_gpu --list                                        # what it would run
    python -m benchmarks.on_gpu --resume out2 --keep         # anywhere: into benchmarks/results
    python -m benchmarks.paper_gpu --report                  # then: pages and tables of the results
    python -m benchmarks.on_gpu --seconds 300 --output out --cpu              # tries it without one

The parts are the benchmarks of PARTS, the most important first, each with a share of the time. Each
is a process with a time box, so that whatever breaks, the others run. Results grow in a folder of
their own (`--work`), where the next call goes on; so it does with the runs that are among the kept
results. The output is flat and small: an archive for each
part, of at most LARGEST_BYTES, written whenever the part has run, and a list of the calls. What
does not fit is left out, the largest files first, and named in the table at the end. What the
measurements say is found out by `--keep`, which needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from benchmarks.common import MORE, RESULTS, Row, cpu_name, markdown, merge_csv, read_csv

WORK = Path("build", "on_gpu")
LARGEST_BYTES = 7_000_000
"""Of an archive: all of them together stay under 64 MB."""
KEPT_BYTES = 400_000
"""Larger files, and journals, are not kept with the results."""
KEPT = (".csv", ".md", ".svg")
RAW = "raw"
"""A folder of runs that a benchmark can go on with, which is kept whole."""
LEAST_SECONDS = 20.0
"""Less time is not worth a start."""
GRACE_SECONDS = 8.0
"""For a part that is over its time to write down what it has, before it is ended."""
FINISHED, LEFT, FAILED = "finished", "time was up", "failed"


class Part(NamedTuple):
    """A benchmark, called for some of the time."""

    name: str
    """Of its folder of results."""
    arguments: tuple[str, ...]
    """Of `python -m benchmarks.NAME`, besides `--output` and `--seconds`."""
    seconds: float
    """Its share, over all calls; more where the others have had theirs."""
    on_cpu: tuple[str, ...] | None = None
    """Arguments with which it runs without a GPU, in little time; None where it cannot."""
    afterwards: tuple[str, ...] = ()
    """Arguments with which it makes its tables and figures of what was measured."""

    def command(self, folder: Path, seconds: float, cpu: bool) -> list[str]:
        arguments = self.on_cpu if cpu else self.arguments
        assert arguments is not None
        return [sys.executable, "-m", f"benchmarks.{self.name}", "--output", str(folder),
                "--seconds", f"{seconds:.0f}", *arguments]  # fmt: skip


PARTS = (
    Part("gpu_checks", (), 240.0),
    Part("trial_cost", ("--trials", "4"), 200.0,
         ("--trials", "1", "--ops", "300", "--clusters", "two CPU sets")),
    Part("fidelity_gpu", ("--measure",), 500.0,
         ("--machines", "cpu2", "--models", "towers", "--tiny", "--placements", "8", "--measure"),
         ("--analyse",)),
    Part("paper_gpu", ("--search-seconds", "20", "--train-steps", "100", "--no-report"), 1500.0,
         ("--devices", "cpu", "--scale", "small", "--cases", "rnnlm-cpu-0", "--methods",
          "local-search", "--search-seconds", "4", "--train-steps", "4", "--no-report"),
         ("--report",)),
    Part("one_gpu", (), 300.0),
    Part("offload", ("--probe",), 400.0, ("--small", "--models", "llama", "--shares", "0.5",
                                          "--shapes", "decode-1")),
)  # fmt: skip
"""The most important first."""

RUNS = "on_gpu.csv"
"""Of the work: a line for each call of a part."""


# --- running -------------------------------------------------------------------------------------


def run_parts(
    parts: Sequence[Part],
    work: Path,
    seconds: float,
    *,
    cpu: bool,
    where: str,
    after: Callable[[Part], None] = lambda part: None,
) -> None:
    """Each part with what is left of its share; then those that are not done with what is left.
    `after` is called whenever one has run."""
    end = time.monotonic() + seconds
    for shared in (True, False):
        for part in parts:
            calls = calls_of(work, part)
            if calls and calls[-1]["outcome"] == FINISHED:
                continue
            if not shared and calls and calls[-1]["outcome"] == FAILED:
                continue
            left = end - time.monotonic()
            if shared:
                left = min(left, part.seconds - sum(float(call["seconds"]) for call in calls))
            if left >= LEAST_SECONDS:
                run_part(part, work, left, cpu=cpu, where=where)
                after(part)


def calls_of(work: Path, part: Part) -> list[dict[str, str]]:
    return [row for row in read_csv(work / RUNS) if row["part"] == part.name]


def run_part(part: Part, work: Path, seconds: float, *, cpu: bool, where: str) -> None:
    """One call, in a process that ends when its time does. What it prints is in its folder."""
    folder = work / part.name
    folder.mkdir(parents=True, exist_ok=True)
    number = len(calls_of(work, part)) + 1
    command = part.command(folder, max(1.0, seconds - 2 * GRACE_SECONDS), cpu)
    print(f"== {' '.join(command[1:])}", flush=True)
    began = time.monotonic()
    log = folder / f"log-{number}.txt"
    with log.open("wb") as file:
        code = boxed(command, seconds - GRACE_SECONDS, file)
    took = time.monotonic() - began
    outcome = {0: FINISHED, MORE: LEFT, None: LEFT}.get(code, FAILED)
    last = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    print("\n".join(last[-12:]), flush=True)
    row = {
        "part": part.name, "call": number, "date": datetime.date.today().isoformat(),
        "seconds": round(took, 1), "outcome": outcome,
        "exit": "ended for its time" if code is None else code, "where": where,
        "command": " ".join(["python", *command[1:]]),
    }  # fmt: skip
    merge_csv(work / RUNS, [row], "part", "call")


def boxed(command: Sequence[str], seconds: float, output: Any) -> int | None:
    """The exit code, or None where it had to be ended: first as by Ctrl-C, then with all that it
    started."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env=environment, process_group=0,  # of the same session: whatever ends that ends it too
    )  # fmt: skip
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it left running, itself as well
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def hardware() -> str:
    """What the driver says, as this process is not to take memory of a GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        gpus = "; ".join(f"{line.replace(', ', ' (driver ')})" for line in done.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        gpus = "no GPU"
    return f"{gpus}; {os.cpu_count()} cores, {cpu_name()}"


# --- what comes back -----------------------------------------------------------------------------


def pack(folder: Path, archive: Path) -> list[str]:
    """An archive of a part's folder, the smallest files first; gives what does not fit. Policies of
    searches that have ended are of no use any more."""
    files = sorted(
        (path.stat().st_size, path.relative_to(folder.parent).as_posix())
        for path in folder.rglob("*")
        if path.is_file() and not _is_over(path)
    )
    left_out, total = [], 0
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        for size, name in files:
            content = (folder.parent / name).read_bytes() if size < 20 * LARGEST_BYTES else b""
            packed = len(zlib.compress(content)) + 2 * len(name) + 200  # what names it, twice
            if size != len(content) or total + packed > LARGEST_BYTES:
                left_out.append(name)
                continue
            made.writestr(name, content)
            total += packed
    return left_out


def _is_over(path: Path) -> bool:
    return path.name.startswith("checkpoint-") and (path.parent / "found.json").is_file()


def unpack(folder: Path, work: Path) -> None:
    """Archives of an earlier call; files that are there stay."""
    for path in sorted(folder.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = PurePosixPath(entry.filename)
                if name.is_absolute() or ".." in name.parts or name.parts[0] != path.stem:
                    raise SystemExit(f"{path}: {entry.filename!r} is no file of {path.stem}")
                if not (work / name).exists():
                    archive.extract(entry, work)
    runs = folder / RUNS
    if runs.is_file() and not (work / RUNS).exists():
        work.mkdir(parents=True, exist_ok=True)
        (work / RUNS).write_bytes(runs.read_bytes())


def go_on(parts: Iterable[Part], work: Path, results: Path) -> None:
    """What is kept of runs, not only of what they say, is not measured again."""
    for part in parts:
        kept, raw = results / part.name / RAW, work / part.name / RAW
        if kept.is_dir() and not raw.exists():
            shutil.copytree(kept, raw)


def keep(parts: Iterable[Part], work: Path, results: Path) -> list[Path]:
    """Tables, pages and figures of what was measured, among the results of the benchmarks."""
    kept = []
    for name, afterwards in ((part.name, part.afterwards) for part in parts):
        if afterwards and (work / name).is_dir():
            command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(work / name)]
            subprocess.run([*command, *afterwards], check=True)
        found = [path for path in (work / name).glob("*") if path.suffix in KEPT]
        for path in sorted([*found, *(work / name / RAW).glob("*")]):
            if path.stat().st_size <= KEPT_BYTES:
                target = results / name / path.relative_to(work / name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
                kept.append(target)
    return kept


def table(parts: Sequence[Part], work: Path, left_out: Mapping[str, Sequence[str]]) -> str:
    lines: list[list[object]] = []
    for part in parts:
        calls: list[Row] = list(calls_of(work, part))
        said = str(calls[-1]["outcome"]) if calls else "not begun"
        if calls and said == FAILED:
            said += f" (exit {calls[-1]['exit']})"
        rows = sum(len(read_csv(path)) for path in (work / part.name).glob("*.csv"))
        lines.append([
            part.name, said, len(calls), f"{sum(float(call['seconds']) for call in calls):.0f}",
            f"{part.seconds:.0f}", rows, ", ".join(left_out.get(part.name, ())),
        ])  # fmt: skip
    heading = ["part", "is", "calls", "seconds", "of", "rows", "did not fit the archive"]
    return markdown(heading, lines, texts=2)


# --- the command ---------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--seconds", type=float, default=560.0, help="for this call")
    parser.add_argument("--output", type=Path, help="for archives and the table")
    parser.add_argument("--work", type=Path, default=WORK, help="where results grow")
    parser.add_argument("--resume", type=Path, help="the output of an earlier call")
    parser.add_argument("--parts", nargs="+", choices=names, help="only these, in this order")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--keep", action="store_true", help="tables go to benchmarks/results")
    parser.add_argument("--cpu", action="store_true", help="try what can be tried without a GPU")
    options = parser.parse_args()
    chosen = options.parts or names
    parts = [part for name in chosen for part in PARTS if part.name == name]
    if options.cpu:
        parts = [part for part in parts if part.on_cpu is not None]
    if options.resume is not None:
        unpack(options.resume, options.work)
    if options.list:
        for part in parts:
            folder = options.work / part.name
            print(*part.command(folder, part.seconds, options.cpu)[1:])
    elif options.keep:
        print(*keep(parts, options.work, RESULTS), sep="\n")
    elif options.output is None:
        parser.error("--output: give a folder")
    else:
        where, left_out = hardware(), {}

        def bring_back(part: Part) -> None:
            folder, output = options.work / part.name, options.output
            left_out[part.name] = pack(folder, output / f"{part.name}.zip")
            (output / RUNS).write_bytes((options.work / RUNS).read_bytes())

        go_on(parts, options.work, RESULTS)
        for part in parts:  # of earlier calls
            if (options.work / part.name).is_dir():
                bring_back(part)
        run_parts(
            parts, options.work, options.seconds, cpu=options.cpu, where=where, after=bring_back
        )
        print(f"{table(parts, options.work, left_out)}\n\nOn {where}.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
