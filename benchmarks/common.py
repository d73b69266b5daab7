"""What the benchmarks have in common: files of results, tables in pages, searches and their curves.

A table in a page stands between `<!-- table: NAME -->` and `<!-- end table -->`;
`benchmarks.tables` knows how each is made from its file.
"""

from __future__ import annotations

import contextlib
import csv
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from placewright import methods
from placewright._version import VERSION
from placewright.budget import Budget
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.placement import Placement
from placewright.placers.base import Placer
from placewright.problem import Problem
from placewright.session.search import Progress, search

RESULTS = Path(__file__).parent / "results"
MODELS = ("rnnlm", "nmt", "inception_v3")
CLUSTERS = ("k80x2", "k80x4")
MORE = 3
"""Exit code of a benchmark whose time ended before it was done: called again, it goes on."""

Row = Mapping[str, Any]
"""Of a table: as it was made, or as read from a file, where all values are text."""

Case = TypeVar("Case")
Made = TypeVar("Made")


# --- files ---------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """The whole file at once, so that one that is cut short leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        # As other text files have it: git then shows the lines that changed, and no others.
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def add_csv(path: Path, row: Row) -> None:
    """Adds a line at the end."""
    rows = read_csv(path)
    _check_columns(path, rows, row)
    write_csv(path, [*rows, row])


def merge_csv(path: Path, rows: Sequence[Row], *keys: str) -> list[Row]:
    """Writes the rows into the file, instead of those there that have the same keys as one of them,
    and gives all that it holds then. So that every case is written when it is done, and the others
    stay."""
    if not rows:
        raise SystemExit(f"{path}: nothing to write, as nothing ran")
    kept = read_csv(path)
    _check_columns(path, kept, rows[0])
    done = {tuple(str(row[key]) for key in keys) for row in rows}
    others = [row for row in kept if tuple(row[key] for key in keys) not in done]
    merged: list[Row] = [*others, *rows]
    write_csv(path, merged)
    return merged


def _check_columns(path: Path, rows: Sequence[Row], row: Row) -> None:
    if rows and list(rows[0]) != list(row):
        raise SystemExit(
            f"{path}: has other columns ({', '.join(rows[0])}), of another version? "
            "Move it away first"
        )


# --- pages ---------------------------------------------------------------------------------------


def marked(name: str, table: str) -> str:
    """A table as it stands in a page, so that `benchmarks.tables` finds it again."""
    return f"<!-- table: {name} -->\n\n{table}\n\n<!-- end table -->"


def markdown(heading: Sequence[str], rows: Sequence[Sequence[object]], *, texts: int = 1) -> str:
    """A table whose first columns are text and the others numbers."""
    lines = [
        "| " + " | ".join(heading) + " |",
        "|" + "---|" * texts + "---:|" * (len(heading) - texts),
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def command() -> str:
    """How the program was called."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name}" if spec else "python " + Path(sys.argv[0]).name
    return " ".join([program, *sys.argv[1:]])


def made_by() -> str:
    """A sentence for the page of the results."""
    return (
        f"Made by `{command()}` with placewright {VERSION}, Python {platform.python_version()}, "
        f"on {os.cpu_count()} cores, {cpu_name()}."
    )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


# --- searches ------------------------------------------------------------------------------------


class Point(NamedTuple):
    """When a search had found something better."""

    trials: int
    seconds: float
    step_seconds: float


def first_within(curve: Sequence[Point], step_seconds: float, share: float = 0.02) -> Point | None:
    """The first point at most this share above a time."""
    return next((p for p in curve if p.step_seconds <= step_seconds * (1 + share)), None)


@dataclass(kw_only=True)
class Searched:
    """A search that is over, and how it went."""

    problem: Problem
    placers: Sequence[Placer]
    progress: Progress
    seconds: float
    curve: list[Point] = field(default_factory=list)

    @property
    def policy_placement(self) -> Placement | None:
        """What a policy holds for the best at the end; nothing where none was learned."""
        greedy = getattr(self.placers[-1], "greedy", None)
        return greedy() if greedy else None


def run_search(
    problem: Problem,
    names: Sequence[str],
    budget: Budget,
    *,
    seed: int = 0,
    learners: methods.Learners = None,
    policy: str | None = None,
    evaluator: SimulatedEvaluator | None = None,
) -> Searched:
    """Searches in the simulator."""
    evaluator = evaluator or SimulatedEvaluator(problem)
    # Compiles, which is nobody's search time; in another one, as noise is drawn in turn.
    SimulatedEvaluator(problem).evaluate([Placement.of(problem, problem.allowed.argmax(axis=1))])
    placers = methods.make(
        names, problem, seed=seed, seconds=budget.seconds, trials=budget.trials, learners=learners,
        policy=policy, noise=evaluator.noise,
    )  # fmt: skip
    curve: list[Point] = []

    def observe(progress: Progress) -> None:
        best = progress.best
        if best is not None and best.measurement.ok:
            step_seconds = best.measurement.mean_seconds
            if not curve or step_seconds < curve[-1].step_seconds:
                curve.append(Point(progress.trials, progress.elapsed_seconds, step_seconds))

    started = time.monotonic()
    progress = search(placers, evaluator, budget, seed=seed, observe=observe)
    return Searched(
        problem=problem,
        placers=placers,
        progress=progress,
        seconds=time.monotonic() - started,
        curve=curve,
    )


def work_shares(problem: Problem, placement: Placement) -> list[float]:
    """The part of all computing that each device does. Placements hardly ever leave a device quite
    empty; what counts is where the work is."""
    work = problem.group_seconds[placement.devices, range(problem.num_groups)]
    each = [float(work[placement.devices == d].sum()) for d in range(problem.num_devices)]
    return [seconds / sum(each) for seconds in each]


_THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def side_by_side(
    function: Callable[[Case], Made], cases: Sequence[Case], jobs: int
) -> Iterator[Made]:
    """The function of each case, in `jobs` processes with one thread each, in the order in which
    they end."""
    with _one_thread(), multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(function, cases, chunksize=1)
