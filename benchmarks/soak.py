"""Searches whose processes are killed, stopped and run out of disk, at random, again and again.

    python -m benchmarks.soak --seconds 1800

In turns: a search in one process; one whose disk is full; one with workers, or with controllers, on
Ray; one of real runs of a small PyTorch module on two CPU devices. Each is broken some times, goes
on with `--resume`, and ends in the end. Then its journal is compared with what was on disk at each
break, and its simulated times with the simulator's. `make soak` calls this.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.common import made_by
from placewright.errors import PlacewrightError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.files import sha256_of
from placewright.journal import read_trials
from placewright.measurement import Trial
from placewright.problem import Problem
from placewright.testing import layered_graph

COMMAND = [sys.executable, "-m", "placewright", "place"]
MARK = "PLACEWRIGHT_SOAK"
"""Environment variable by which processes of a round are found that nobody has ended."""

WORST = ("lost", "duplicated", "wrong", "left behind", "stuck")
"""What is counted and must be 0."""

_END_SECONDS = 240.0
"""For a run to end that was told to, on a machine that is busy."""

_GONE_SECONDS = 60.0
"""For its processes to be gone after it."""

MODULE = """
import torch

def build():
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    return module, torch.randn(16, 64)
"""

RANDOM = ("-m", "single,random")
LOCAL = ("-m", "single,local-search")
LEARNED = (
    "-m", "ppo", "--learner", "polish=0", "--learner", "warm_start=0", "--learner", "samples=8",
    "--learner", "policy.hidden=16",
)  # fmt: skip


class Round:
    """One search, from its start to its end, whatever happens to it in between."""

    def __init__(self, folder: Path, rng: random.Random, counts: Counter[str]) -> None:
        self.folder = folder
        self.rng = rng
        self.counts = counts
        self.out = folder / "out"
        self.mark = f"{os.getpid()}-{rng.random()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.kept: list[bytes] = []
        """What the journal held, as far as lines were whole, at each break."""
        self.read = self.lines = 0
        """Bytes of the journal that were read, and the lines in them."""
        self.hits = 0
        """How often what measures was hit: so many trials may have failed of that."""

    # --- a run -----------------------------------------------------------------------------------

    def start(self, *arguments: str, limit: Callable[[], None] | None = None) -> None:
        begun = (self.out / "problem.json.gz").exists() or (self.out / "journal.jsonl").exists()
        where = ["--resume" if begun else "-o", str(self.out)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments, *where, "--no-report"], cwd=self.folder,
                env={**os.environ, MARK: self.mark}, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=limit,
            )  # fmt: skip

    def count(self) -> int:
        """Lines of the journal by now, of which only new ones are read."""
        with contextlib.suppress(OSError), (self.out / "journal.jsonl").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.read:  # a torn line was dropped
                self.read = self.lines = 0
            file.seek(self.read)
            new = file.read(size - self.read)
            self.read += len(new)
            self.lines += new.count(b"\n")
        return self.lines

    def wait_for(self, condition: Callable[[], object], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.05)
        return bool(condition())

    def run_on(self, lines: int, seconds: float) -> bool:
        """Until so many more are in the journal, or it has ended, or the time is over; whether it
        runs."""
        assert self.process is not None
        process, wanted = self.process, self.count() + lines
        self.wait_for(lambda: process.poll() is not None or self.count() >= wanted, seconds)
        return process.poll() is None

    def hit(self, pid: int, how: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)

    def end(self, how: signal.Signals | None = None) -> int:
        """Its exit code, once it and all its processes are gone."""
        assert self.process is not None
        started = descendants(self.process.pid)
        if how is not None:
            self.hit(self.process.pid, how)
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.counts["stuck"] += 1
            self.process.kill()
            code = self.process.wait()
        if not self.wait_for(lambda: not self.remaining(started), _GONE_SECONDS):
            left = self.remaining(started)
            self.counts["left behind"] += len(left)
            for pid in left:
                self.hit(pid, signal.SIGKILL)
        self.keep()
        return code

    def ended_by_itself(self) -> None:
        """Without Ray, say: then it says so, and its results are there."""
        code = self.end()
        self.counts["driver ended by itself"] += 1
        if code != 2 or not (self.out / "summary.json").is_file():
            self.counts["wrong"] += 1
            print(f"ended by itself with {code}: {self.last_words()}", flush=True)

    def remaining(self, started: Sequence[int]) -> list[int]:
        """Processes of it that run: those it had, and those that bear its mark."""
        alive = [pid for pid in started if Path(f"/proc/{pid}/exe").exists()]
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    alive.append(int(path.name))
        return sorted(set(alive))

    def finish(self, *arguments: str, more: int) -> None:
        """To its proper end, with some trials more than there are."""
        self.start(*arguments, "--trials", str(self.count() + more))
        code = self.end()
        if code != 0:
            self.counts["wrong"] += 1
            print(f"ended with {code}: {self.last_words()}", flush=True)

    def last_words(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    # --- what came of it -------------------------------------------------------------------------

    def keep(self) -> None:
        with contextlib.suppress(OSError):
            data = (self.out / "journal.jsonl").read_bytes()
            self.kept.append(data[: data.rfind(b"\n") + 1])

    def check(self, *, simulated: bool) -> None:
        """Counts what is not as it should be."""
        try:
            problem = Problem.load(self.out / "problem.json.gz")
            trials = read_trials(self.out / "journal.jsonl", problem)
        except PlacewrightError as fault:
            self.counts["wrong"] += 1
            print(f"unreadable: {fault}", flush=True)
            return
        final = (self.out / "journal.jsonl").read_bytes()
        for before in self.kept:
            if not final.startswith(before):
                there = set(final.splitlines())
                self.counts["lost"] += sum(line not in there for line in before.splitlines())
        self.counts["trials"] += len(trials)
        if simulated:
            placements = {trial.placement for trial in trials}
            self.counts["duplicated"] += len(trials) - len(placements)
            self.counts["wrong"] += wrong_times(problem, trials)
        else:
            # References and finals are measured again and again, on purpose, but recorded once.
            lines = final.splitlines()
            self.counts["duplicated"] += len(lines) - len(set(lines))
            failed = sum(not trial.measurement.ok for trial in trials)
            self.counts["failed as their process was hit"] += min(failed, self.hits)
            self.counts["wrong"] += max(0, failed - self.hits)
        self.counts["wrong"] += self.wrong_results(len(trials))

    def wrong_results(self, trials: int) -> int:
        summary = json.loads((self.out / "summary.json").read_text())
        wrong = int(summary["trials"] != trials) + int(summary["interrupted"])
        for name, digest in summary["files"].items():
            wrong += sha256_of(self.out / name, PlacewrightError) != digest
        wrong += any(path.name.startswith(".") for path in self.out.iterdir())
        return wrong


def wrong_times(problem: Problem, trials: Sequence[Trial]) -> int:
    """How many times are others than the simulator gives."""
    again = SimulatedEvaluator(problem, threads=1).evaluate([trial.placement for trial in trials])
    return sum(
        trial.measurement.outcome is not measurement.outcome
        or trial.measurement.step_seconds != measurement.step_seconds
        for trial, measurement in zip(trials, again, strict=True)
    )


def descendants(of: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(path.name)] = int(fields[1])
    found = []
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != of:
            ancestor = parents[ancestor]
        if ancestor == of and pid != of:
            found.append(pid)
    return found


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


# --- the kinds of rounds --------------------------------------------------------------------------

ENDS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def one_process(round_: Round) -> None:
    """Killed, interrupted, or stopped for a while and killed then."""
    rng = round_.rng
    layered_graph(rng.randint(20, 200), rng.randint(2, 12), rng.randrange(99)).save(
        round_.folder / "graph.json"
    )
    search = ("graph.json", "-c", "k80x4", *rng.choice((RANDOM, LOCAL)))
    for _ in range(rng.randint(2, 4)):
        round_.start(*search, "-b", "1h")
        if rng.random() < 0.3:  # while it starts, or writes what it begins with
            time.sleep(rng.uniform(0.2, 4.0))
        else:
            round_.run_on(rng.randint(1, 3000), 30.0)
        assert round_.process is not None
        if rng.random() < 0.3:
            round_.hit(round_.process.pid, signal.SIGSTOP)
            round_.counts["stopped"] += 1
            time.sleep(rng.uniform(0.5, 2.0))
            round_.hit(round_.process.pid, signal.SIGCONT)
        how = rng.choice(ENDS)
        round_.end(how)
        round_.counts[f"driver {how.name}"] += 1
    round_.finish(*search, more=50)
    round_.check(simulated=True)


def with_workers(round_: Round) -> None:
    """Workers, controllers, the parameter server, Ray's daemons and the driver are hit."""
    rng = round_.rng
    layered_graph(60, 6, rng.randrange(99)).save(round_.folder / "graph.json")
    learned = rng.random() < 0.5
    method = (*LEARNED, "--controllers", "2", "--workers", "1") if learned else RANDOM
    team = (*method, "--trial-timeout", "8s") if learned else (*RANDOM, "--workers", "2",
                                                               "--trial-timeout", "8s")  # fmt: skip
    search = ("graph.json", "-c", "k80x4")
    for _ in range(2):
        round_.start(*search, *team, "-b", "1h")
        running = round_.run_on(30, 90.0)
        for _ in range(rng.randint(2, 4)):
            if not running:
                break
            assert round_.process is not None
            people = [pid for pid in descendants(round_.process.pid) if "ray::" in title(pid)]
            daemons = [
                pid
                for pid in descendants(round_.process.pid)
                if any(f"/{name} " in title(pid) for name in ("raylet", "gcs_server"))
            ]
            victims = daemons if rng.random() < 0.15 else people
            if victims:
                victim = rng.choice(victims)
                who = title(victim).split(" ")[0].rpartition("/")[2].partition(".")[0]
                how = signal.SIGKILL
                if who == "ray::Worker" and rng.random() < 0.3:
                    how = signal.SIGSTOP
                round_.hit(victim, how)
                round_.counts[f"{who} {how.name}"] += 1
            running = round_.run_on(rng.randint(5, 60), 20.0)
        if not running:
            round_.ended_by_itself()
            continue
        how = rng.choice(ENDS)
        round_.end(how)
        round_.counts[f"driver {how.name}"] += 1
    round_.finish(*search, *(LEARNED if learned else RANDOM), more=20)
    round_.check(simulated=True)


def real_runs(round_: Round) -> None:
    """The process that runs a PyTorch module is killed or stopped, and the driver, too."""
    rng = round_.rng
    (round_.folder / "model.py").write_text(MODULE)
    search = ("model.py:build", "-c", "cpu2", "--evaluate", "measure", *RANDOM,
              "--time-limit", "4")  # fmt: skip
    for _ in range(2):
        round_.start(*search, "-b", "1h")
        running = round_.run_on(3, 90.0)
        for _ in range(rng.randint(2, 4)):
            if not running:
                break
            assert round_.process is not None
            runners = [
                pid for pid in descendants(round_.process.pid) if "pytorch.client" in title(pid)
            ]
            if runners:
                how = rng.choice((signal.SIGKILL, signal.SIGSTOP))
                round_.hit(rng.choice(runners), how)
                round_.hits += 1
                round_.counts[f"runner {how.name}"] += 1
            running = round_.run_on(rng.randint(3, 12), 30.0)
        how = rng.choice(ENDS)
        round_.end(how)
        round_.counts[f"driver {how.name}"] += 1
    round_.finish(*search, more=12)
    round_.check(simulated=False)


def full_disk(round_: Round) -> None:
    """A disk that is full, at whatever is written then; later there is room."""
    rng = round_.rng
    layered_graph(40, 5, rng.randrange(99)).save(round_.folder / "graph.json")
    search = ("graph.json", "-c", "k80x4", *RANDOM)
    size = rng.randint(8, 400) << 10
    with small_disk(round_.out, size) as (grow, limit):
        for _ in range(rng.randint(1, 2)):
            round_.start(*search, "-b", "1h", limit=limit)
            if round_.run_on(10**9, 60.0):
                round_.counts["wrong"] += 1  # it must have noticed
                round_.end(signal.SIGKILL)
            elif round_.end() == 0:
                round_.counts["wrong"] += 1
            round_.counts["disk full"] += 1
        grow()
        round_.finish(*search, more=50)
        round_.check(simulated=True)


@contextlib.contextmanager
def small_disk(
    folder: Path, size: int
) -> Iterator[tuple[Callable[[], None], Callable[[], None] | None]]:
    """A disk of so many bytes there, and what makes it larger: a file system in memory, or, where
    none may be mounted, a limit of the size of files."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    mounted = shutil.which("mount") and not subprocess.run(mount, capture_output=True).returncode
    if not mounted:

        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        yield (lambda: None), limit
        return

    def grow() -> None:
        subprocess.run(["mount", "-o", "remount,size=256m", str(folder)], check=True)

    try:
        yield grow, None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


KINDS: dict[str, Callable[[Round], None]] = {
    "one process": one_process,
    "full disk": full_disk,
    "workers": with_workers,
    "real runs": real_runs,
}


def soak(seconds: float, seed: int, kinds: Sequence[str], keep: Path) -> Counter[str]:
    counts: Counter[str] = Counter(dict.fromkeys(WORST, 0))
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        kind = kinds[number % len(kinds)]
        folder = Path(tempfile.mkdtemp(prefix="placewright-soak-"))
        before = sum(counts[what] for what in WORST)
        round_ = Round(folder, random.Random(f"{seed} {number}"), counts)
        try:
            KINDS[kind](round_)
        except Exception:
            counts["wrong"] += 1
            traceback.print_exc()
        finally:
            for pid in round_.remaining([]):
                round_.hit(pid, signal.SIGKILL)
        counts[f"rounds: {kind}"] += 1
        bad = sum(counts[what] for what in WORST) - before
        if bad:
            kept = keep / f"round-{number}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            print(f"round {number} ({kind}): {bad} not as it should be; kept in {kept}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        number += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/soak"))
    parser.add_argument("--keep", type=Path, default=Path("build/soak"))
    options = parser.parse_args()
    # What is started in the background ignores Ctrl-C, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    counts = soak(options.seconds, options.seed, options.kinds, options.keep)
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "soak.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "count"])
        order = sorted(counts, key=lambda what: (what not in WORST, what))
        for what in order:
            writer.writerow([what, counts[what]])
            print(f"{counts[what]:>9,}  {what}")
    (options.output / "README.md").write_text(f"# Soak\n\n{made_by()}\n")
    sys.exit(1 if any(counts[what] for what in WORST) else 0)


if __name__ == "__main__":
    main()
