"""All checks that need a GPU, in one go: `python -m benchmarks.gpu_checks`.

Runs the tests that are marked `gpu`, a process for each file and all at once (they check what is
right, not what is fast), and prints a short table. The files under `benchmarks/results/gpu_checks`
say when and where they last passed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import RESULTS, made_by, write_csv


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_checks")
    parser.add_argument("--seconds", type=float, default=300.0, help="most time for all of them")
    parser.add_argument("tests", nargs="*", default=["tests/gpu"])
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("gpu_checks: torch finds no GPU here", file=sys.stderr)
        return 2
    files = sorted(
        str(file)
        for test in arguments.tests
        for file in (Path(test).glob("test_*.py") if Path(test).is_dir() else [Path(test)])
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    logs = [arguments.output / f"{Path(file).stem}.log" for file in files]
    began = time.monotonic()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu",
             "--tb=short", "--durations=8", "--maxfail=4", "--show-capture=no", file],
            stdout=log.open("w", encoding="utf-8"),
            stderr=subprocess.STDOUT,
        )
        for file, log in zip(files, logs, strict=True)
    ]  # fmt: skip
    rows = []
    for file, log, process in zip(files, logs, running, strict=True):
        try:
            process.wait(max(1.0, arguments.seconds - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it says what it has found so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
            process.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        counts = {
            name: int(found[1]) if (found := re.search(rf"(\d+) {name}", text)) else 0
            for name in ("passed", "failed", "error", "skipped")
        }
        rows.append(
            {"checks": Path(file).stem, **counts, "exit": process.returncode,
             "date": datetime.date.today().isoformat()}
        )  # fmt: skip
        print(*rows[-1].values(), sep="\t", flush=True)
        for line in text.splitlines():
            if line.startswith(("FAILED", "ERROR")):
                print("   ", line[:300])
    write_csv(arguments.output / "checks.csv", rows)
    properties = torch.cuda.get_device_properties(0)
    (arguments.output / "README.md").write_text(
        f"{made_by()}\nGPU: {properties.name}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}.\n",
        encoding="utf-8",
    )
    return int(any(row["exit"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
