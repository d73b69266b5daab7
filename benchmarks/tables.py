"""Every table in the documentation that comes from a file of results, by name.

    python -m benchmarks.tables      # writes them all anew, where they stand

A table stands in a page between `<!-- table: NAME -->` and `<!-- end table -->`. A test fails where
one differs from what its file says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, marked, read_csv

ROOT = Path(__file__).parent.parent

_BLOCK = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end table -->", re.DOTALL)


class Source(NamedTuple):
    """Where a table comes from."""

    file: str
    """Under `benchmarks/results`."""
    make: Callable[[Sequence[Any]], str]
    figure: str = ""
    """A picture of the same, beside the file."""
    caption: str = ""


def source(name: str) -> Source:
    # The benchmarks are imported where they are needed: some need packages that are optional.
    part, _, rest = name.partition("-")
    if name.startswith("paper-gpu-"):
        return _paper_gpu(name.removeprefix("paper-gpu-"))
    if part == "paper":
        return _paper(rest)
    if part == "placers":
        from benchmarks import placers

        made = placers.short_table if rest == "short" else placers.model_table
        return Source("placers/placers.csv", made)
    if part == "learning":
        return _learning(rest)
    if part == "costs":
        from benchmarks import costs

        table = {"steps": costs.step_table, "types": costs.type_table}
        return Source(f"costs/{rest}.csv", table[rest])
    if part == "one_gpu":
        from benchmarks import one_gpu

        return Source("one_gpu/one_gpu.csv", one_gpu.summary)
    if name == "trial-cost":
        from benchmarks import trial_cost

        return Source("trial_cost/trial_cost.csv", trial_cost.table)
    if part == "large":
        from benchmarks import large

        return Source("large/large.csv", large.large_table)
    if part == "simulator":
        from benchmarks import simulator

        return Source("simulator/speed.csv", simulator.table)
    if part == "distributed":
        from benchmarks import distributed

        table = {"workers": distributed.workers_table, "controllers": distributed.controllers_table}
        return Source(f"distributed/{rest}.csv", table[rest])
    if part == "measured":
        from benchmarks import measured

        if rest == "overhead":
            return Source("measured/overhead.csv", measured.overhead_table)
        return Source("measured/measured.csv", measured.answers_table)
    if part == "fidelity":
        from benchmarks import fidelity, fidelity_gpu

        if rest == "gpu":
            return Source("fidelity_gpu/summary.csv", fidelity_gpu.table, "fidelity.svg", _SCATTER)
        return Source("fidelity/fidelity.csv", fidelity.table, "fidelity.svg", _SCATTER)
    if part == "claims":
        from benchmarks import claims

        return Source("claims/claims.csv", claims.claims_table)
    if part == "overhead":
        from benchmarks import overhead

        return Source("overhead/h200.csv", overhead.overhead_table)
    raise KeyError(name)


_SCATTER = "Predicted against measured step times"


def _learning(rest: str) -> Source:
    from benchmarks import learning

    if rest == "speed":
        return Source("learning/speed.csv", learning.speed_table)
    if rest == "noise":
        quiet = read_csv(RESULTS / "learning/quality.csv")
        return Source("learning/noise.csv", lambda rows: learning.noise_table(rows, quiet))
    if rest == "transfer":
        return Source("learning/transfer.csv", learning.transfer_table)
    kind, _, what = rest.partition("-")
    if what == "final":
        return Source(f"learning/{kind}.csv", learning.final_table)
    return Source(f"learning/{kind}.csv", lambda rows: learning.table(rows, f"best_at_{int(what)}"))


def _paper(rest: str) -> Source:
    from benchmarks import fidelity, measured, paper

    def explained(rows: Sequence[Any]) -> str:
        said = [measured.answers_table(rows), measured.same_answers(rows), measured.EXPLAINED]
        return "\n\n".join(text for text in said if text)

    def analysed(rows: Sequence[Any]) -> str:
        return f"{paper.analysis_table(rows)}\n\n{paper.analysis_text(rows)}"

    sources = {
        "simulated": Source("paper/simulated.csv", paper.simulated_table),
        "details": Source("paper/simulated.csv", paper.details_table),
        "agreement": Source("paper/simulated.csv", paper.agreement),
        "measured": Source("paper/measured.csv", explained),
        "fidelity": Source("paper/fidelity.csv", fidelity.table, "fidelity.svg", _SCATTER),
        "training": Source(
            "paper/training.csv", paper.training_table, "training.svg", "The loss over time"
        ),
        "analysis": Source("paper/analysis.csv", analysed),
        "cost": Source("paper/cost.csv", paper.cost_table, "cost.svg", "The search over time"),
        "scaling": Source("paper/scaling.csv", paper.scaling_table),
        "links": Source("paper/links.csv", paper.links_table),
        "runs": Source("paper/runs.csv", paper.runs_table),
    }
    return sources[rest]


def _paper_gpu(rest: str) -> Source:
    from benchmarks import gpu_tables as made

    sources = {
        "main": Source("paper_gpu/paper_gpu.csv", made.main_table),
        "short": Source("paper_gpu/paper_gpu.csv", made.short_table),
        "details": Source("paper_gpu/paper_gpu.csv", made.details_table),
        "rewards": Source(
            "paper_gpu/runs_of_searches.csv", made.rewards_table, "rewards.svg",
            "Measured step times over the real runs of each search",
        ),
        "analysis": Source("paper_gpu/analysis.csv", made.analysis_table),
        "training": Source(
            "paper_gpu/training.csv", made.training_table, "training.svg", "The loss over time"
        ),
        "where": Source("paper_gpu/where.csv", made.where_table),
    }  # fmt: skip
    return sources[rest]


def block(name: str, page: Path, results: Path = RESULTS) -> str:
    """The table of that name as it is to stand in a page, with its marks."""
    found = source(name)
    rows = read_csv(results / found.file)
    if not rows:
        return marked(name, f"*Not there yet: no `benchmarks/results/{found.file}` has been made.*")
    text = found.make(rows)
    figure = (results / found.file).parent / found.figure
    if found.figure and figure.exists():
        text += f"\n\n![{found.caption}]({Path(os.path.relpath(figure, page.parent)).as_posix()})"
    return marked(name, text)


def updated(page: Path, results: Path = RESULTS) -> str:
    """The page with all its tables as their files have them."""
    text = page.read_text(encoding="utf-8")
    return _BLOCK.sub(lambda found: block(found["name"], page, results), text)


def without_tables(text: str) -> str:
    """What is not made from files."""
    return _BLOCK.sub("", text)


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted(RESULTS.glob("*/README.md")),
    ]


def main() -> None:
    for page in pages():
        old, new = page.read_text(encoding="utf-8"), updated(page)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written anew")


if __name__ == "__main__":
    main()
