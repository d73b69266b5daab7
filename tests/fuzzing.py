"""Files that were changed in all ways: every loader reads them, or says in one line what is wrong.

`make fuzz` runs this for a minute (`SECONDS=` for longer), with other changes each time; the tests
run some that are always the same (`tests/test_fuzz.py`). What is changed, the corpus, is always the
same: the recorded runs, the presets, and what is made here from seeds that never change.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import logging
import math
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from placewright.backends.feeds import load_feeds
from placewright.calibration.costs_file import Calibration
from placewright.cluster import Cluster
from placewright.costs import Costs
from placewright.errors import PlacewrightError
from placewright.evaluators.simulated import SimulatedEvaluator
from placewright.graph import Edge, Graph, Op, Tensor
from placewright.grouping import Grouping
from placewright.journal import Journal, _line, read_progression, read_trials
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement, everything_on, read_groups, read_ops
from placewright.problem import Problem, make_problem, with_homes
from placewright.report.page import make_page
from placewright.report.run import read_run
from placewright.report.words import explain
from placewright.session.directory import check_directory
from placewright.session.driver import place
from placewright.testing import layered_graph, random_problem

_SEED = 11
"""Of a problem whose files have all that there is in such files."""

RECORDED = Path(__file__).parent / "recorded"

MOST_CHARACTERS = 500
MOST_SECONDS = 20
"""Of one file; honest ones of these sizes take hundredths of a second, also on a busy machine."""
MOST_BYTES = 3 << 30
"""Of memory that reading one file may take, on top of what is there."""

HOSTILE: Sequence[Any] = (
    None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e308,
    -1e308, math.inf, -math.inf, math.nan, "", "x", "0", "a\nb", "\0", "\ud800", "x" * 20_000, "*",
    "[", "\x1b[31m", "1e999 GB", "1 us", "-1", [], {}, [[]], [None], [0] * 1000, {"": None},
    {"a": {"a": []}}, [1e308] * 9,
)  # fmt: skip

PIECES = (
    "[]", "{}", "null", "-1", "1e999", "9" * 400, '"x"', "NaN", "true", "", ":", "[[", "\x00", "&a",
    "*a", "<<: ", "!!python/object:os.system", "\ufeff", "\n", "  ", "'", "-", "? ", "|", "}" * 50,
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One kind of file."""

    name: str
    whole: bytes
    """An honest one."""
    read: Callable[[bytes], object]
    parse: Callable[[bytes], Any] | None = None
    """Its document, to change what is in it; None where only bytes are changed."""
    write: Callable[[Any], bytes] = lambda document: json.dumps(document).encode()
    """The file of a document that was changed."""
    slow: bool = False
    """Takes a tenth of a second, so that fewer are tried."""

    def mutated(self, rng: random.Random) -> bytes:
        data = self.whole
        if self.parse is not None and rng.random() < 0.75:
            document = self.parse(data)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                document = changed(document, rng)
            with contextlib.suppress(UnicodeEncodeError):  # half of a character, where YAML cannot
                return self.write(document)
        return changed_bytes(data, rng)


def changed(document: Any, rng: random.Random) -> Any:
    """A copy of which one value, anywhere, is another, gone, twice there, or called otherwise."""
    document = json.loads(json.dumps(document))
    if not isinstance(document, dict | list) or not document:
        return rng.choice(HOSTILE)
    place = document
    while True:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            break
        place = inner
    how = rng.choice(("value", "like", "like", "gone", "twice", "called", "from elsewhere"))
    if how == "gone":
        del place[key]
    elif how == "twice" and isinstance(place, list):
        place.insert(key, inner)
    elif how == "called" and isinstance(place, dict):
        place[str(rng.choice(HOSTILE))[:50]] = place.pop(key)
    elif how == "from elsewhere":
        other = rng.choice(list(place.values())) if isinstance(place, dict) else rng.choice(place)
        place[key] = json.loads(json.dumps(other))
    elif how == "like":
        place[key] = alike(inner, rng)
    else:
        place[key] = rng.choice(HOSTILE)
    return document


def alike(value: Any, rng: random.Random) -> Any:
    """Another value of this kind, which may well be fine."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value, -value, 0, 2**40, 2**62))
    if isinstance(value, float):
        return rng.choice((2 * value, -value, 0.0, value * 1e9, value * 1e-12, 1e15))
    if isinstance(value, str):
        return rng.choice(
            (value + "x", value[1:], value.upper(), value.replace("0", "9"), value * 9)
        )
    if isinstance(value, list):
        return rng.sample(value, rng.randint(0, len(value))) if rng.random() < 0.5 else value * 2
    return {} if value else None


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(data) + 1), rng.choice((0, 1, 1, 2, 5, 20))
        how = rng.random()
        if how < 0.1:
            data = data[:at]
        elif how < 0.3:
            data = data[:at] + rng.randbytes(length) + data[at + length :]
        else:
            data = data[:at] + rng.choice(PIECES).encode() + data[at + length :]
    return data


# All that a graph file can have.
GRAPH = {
    "format": "placewright-graph/1",
    "name": "all",
    "ops": [
        {"name": "x", "type": "Placeholder", "outputs": [{"shape": [4, 8], "dtype": "float32"}]},
        {"name": "w", "type": "VariableV2", "param_bytes": 256, "slot_bytes": 256,
         "colocate": ["w"], "outputs": [{"bytes": 256, "shape": [8, 8], "dtype": "float32"}], 
         "gradient_of": "x"},
        {"name": "in/a", "type": "MatMul", "flops": 512.0, "kernels": ["cpu", "gpu"],
         "work": "matmul", "moved_bytes": 600, "count": 3, "launches": 2.0,
         "seconds": {"k80": 1e-4, "server-cpu-16": 1e-3},
         "outputs": [{"bytes": 128, "dtype": "float32"}, {"bytes": 4}], "colocate": ["w"]},
        {"name": "in/b", "type": "Reshape", "outputs": [{"bytes": 128, "shares": ["in/a", 0]}]},
    ],
    "edges": [
        {"from": "x", "to": "in/a"}, {"from": "w", "to": "in/a", "output": 0},
        {"from": "in/a", "to": "in/b", "output": 1}, {"from": "x", "to": "in/b", "control": True},
    ],
    "group_rules": [{"pattern": "in/(.)", "label": "\\1"}],
    "loops": [{"name": "in", "iterations": 3, "source": "constant"},
              {"name": "in/deep", "iterations": None, "source": "unknown", "within": "in"}],
}  # fmt: skip

PRESETS = ("k80x4", "cpu2", "h200-parts4")
"""Whose files have all that a cluster file can have."""

# --- what is read ---------------------------------------------------------------------------------


def targets(folder: Path) -> list[Target]:
    """Every kind of file, with what is read written into this folder."""
    problem = random_problem(_SEED)
    result = [*_inputs(folder, problem), *_journals(folder, problem), *_runs(folder)]
    with contextlib.suppress(ImportError):
        result += [*_policies(folder), *_plans(folder), *_weights(folder)]
    with contextlib.suppress(ImportError):
        result.append(_graph_def(folder))
    for target in result:
        target.read(target.whole)  # which also compiles what is compiled once
    return result


def _saved(folder: Path, name: str, save: Callable[[Path], object]) -> bytes:
    path = folder / f"whole-{name}"
    save(path)
    return path.read_bytes()


def _reading(folder: Path, name: str, load: Callable[[Path], object]) -> Callable[[bytes], object]:
    path = folder / name

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return load(path)

    return read


def _inputs(folder: Path, problem: Problem) -> Iterator[Target]:
    graph, cluster = problem.graph, problem.cluster
    placement = Placement.of(problem, problem.allowed.argmax(axis=1))

    def json_target(
        name: str, save: Callable[[Path], object], load: Callable[[Path], object]
    ) -> Target:
        whole = _saved(folder, name, save)
        return Target(name, whole, _reading(folder, name, load), json.loads)

    def used_graph(path: Path) -> None:
        posed = make_problem(Graph.load(path), cluster)
        SimulatedEvaluator(posed, threads=1).evaluate([everything_on(posed, 0)])

    plain = Graph.from_ops("plain", [Op(name=name, type="MatMul", flops=1e9) for name in "ab"], [])

    def used_cluster(path: Path) -> None:
        posed = make_problem(plain, Cluster.load(path))
        SimulatedEvaluator(posed, threads=1).evaluate([everything_on(posed, 0)])

    yield json_target("graph.json", graph.save, used_graph)
    whole = _saved(folder, "graph.json.gz", graph.save)
    yield Target(
        "graph.json.gz", whole, _reading(folder, "graph.json.gz", Graph.load),
        lambda data: json.loads(gzip.decompress(data)),
        lambda document: gzip.compress(json.dumps(document).encode(), 1),
    )  # fmt: skip
    k80x4 = Cluster.load("k80x4")

    def used_by_preset(path: Path) -> None:
        posed = make_problem(Graph.load(path), k80x4)
        SimulatedEvaluator(posed, threads=1).evaluate([everything_on(posed, 0)])

    whole = json.dumps(GRAPH).encode()
    yield Target("all.json", whole, _reading(folder, "all.json", used_by_preset), json.loads)
    shipped = resources.files("placewright") / "clusters"
    for name, whole in (
        ("own", _saved(folder, "cluster.yaml", cluster.save)),
        *((name, (shipped / f"{name}.yaml").read_bytes()) for name in PRESETS),
    ):
        yield Target(
            f"{name}.yaml", whole, _reading(folder, f"{name}.yaml", used_cluster), yaml.safe_load,
            lambda document: yaml.safe_dump(document).encode(),
        )  # fmt: skip
    yield json_target(
        "costs.json",
        lambda path: problem.costs.save(path, graph),
        lambda path: Costs.load(path, graph),
    )
    calibration = Calibration(table=problem.costs, cluster=cluster)
    yield json_target(
        "calibrated.json",
        lambda path: calibration.save(path, graph),
        lambda path: Calibration.load(path, problem).problem(problem),
    )
    yield json_target(
        "grouping.json",
        lambda path: problem.grouping.save(path, graph),
        lambda path: Grouping.load(path, graph),
    )

    def all_of_placement(path: Path) -> None:
        faults = []
        for read in (
            lambda: Placement.load(path, problem),
            lambda: read_groups(path),
            lambda: read_ops(path),
        ):
            try:
                read()
            except PlacewrightError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    yield json_target(
        "placement.json", lambda path: placement.save(path, problem), all_of_placement
    )
    yield json_target("problem.json", problem.save, Problem.load)

    def used_homes(path: Path) -> None:
        posed = Problem.load(path)
        SimulatedEvaluator(posed, threads=1).evaluate([everything_on(posed, 0)])

    weights = [Op(name=name, type="Weight", param_bytes=64, outputs=(Tensor(64),)) for name in "vw"]
    reads = [Op(name=f"in/{name}", type="MatMul", flops=1e9) for name in "vw"]
    edges = [Edge(name, f"in/{name}") for name in "vw"]
    homes = with_homes(make_problem(Graph.from_ops("homes", weights + reads, edges), cluster))
    yield json_target("homes.json", homes.save, used_homes)
    feeds = io.BytesIO()
    np.savez(feeds, x=np.zeros((2, 3), np.float32), y=np.arange(4))
    yield Target("feeds.npz", feeds.getvalue(), _reading(folder, "feeds.npz", load_feeds))


def _journals(folder: Path, problem: Problem) -> Iterator[Target]:
    place(problem, method="single,random", trials=12, directory=folder / "made")
    whole = (folder / "made" / "journal.jsonl").read_bytes()

    def parse(data: bytes) -> list[Any]:
        records = [json.loads(line) for line in data.splitlines()]
        return [{k: v for k, v in record.items() if k != "sum"} for record in records]

    def write(document: Any) -> bytes:
        # With the right sum, or nothing but that would ever be looked at.
        records = document if isinstance(document, list) else [document]
        with contextlib.suppress(ValueError):
            return b"".join(
                _line(record) if isinstance(record, dict) else b"1\n" for record in records
            )
        return b"".join(json.dumps(record).encode() + b"\n" for record in records)

    # Of so many groups that placements are written as what differs from the last.
    large = make_problem(layered_graph(4200, 7), Cluster.load("k80x2")).refined
    placements = [everything_on(large, 0), everything_on(large, 1)]
    placements.append(Placement.of(large, [1, 0, 1, *placements[1].devices[3:]]))
    measured = Measurement(outcome=Outcome.OK, step_seconds=(1.0,))
    with Journal(folder / "long", large) as journal:
        journal.append([Trial(placement=p, measurement=measured, placer="x") for p in placements])
    long = (folder / "long").read_bytes()
    for name, read in (("journal.jsonl", read_trials), ("progression.jsonl", read_progression)):
        for prefix, posed, lines in (("", problem, whole), ("long-", large, long)):

            def load(
                path: Path,
                read: Callable[[Path, Problem], object] = read,
                posed: Problem = posed,
            ) -> object:
                return read(path, posed)

            path = f"{prefix}{name}"
            yield Target(path, lines, _reading(folder, path, load), parse, write)


def _runs(folder: Path) -> Iterator[Target]:
    """A file of a run's directory, and the whole directory is read and put into words."""
    for run in ("run-simulated", "run-measured"):
        copy = folder / run
        shutil.copytree(RECORDED / run, copy)
        problem = Problem.load(copy / "problem.json.gz")
        for name in ("run.json", "summary.json", "metrics.jsonl"):
            path = copy / name
            if not path.is_file():
                continue
            whole = path.read_bytes()

            def read(
                data: bytes, path: Path = path, whole: bytes = whole, problem: Problem = problem
            ) -> None:
                path.write_bytes(data)
                try:
                    run = read_run(path.parent)
                    explain(run)
                    make_page([run], None)
                    check_directory(path.parent, problem)
                finally:
                    path.write_bytes(whole)

            if name.endswith("l"):
                yield Target(f"{run}/{name}", whole, read, _of_lines, _as_lines, slow=True)
            else:
                yield Target(f"{run}/{name}", whole, read, json.loads, slow=True)


def _of_lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def _as_lines(document: Any) -> bytes:
    records = document if isinstance(document, list) else [document]
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _policies(folder: Path) -> Iterator[Target]:
    from dataclasses import replace

    from placewright.budget import Budget
    from placewright.learning.config import PPO
    from placewright.learning.learner import Learner
    from placewright.learning.policy import Policy
    from placewright.session.search import search

    problem = random_problem(_SEED)
    small = replace(PPO.policy, hidden=8)
    config = replace(PPO, policy=small, samples=4, polish=0, warm_start=0, epochs=1)
    learner = Learner(problem, config, name="ppo")
    search([learner], SimulatedEvaluator(problem), Budget(trials=12))
    learner.checkpoint(folder)
    path = folder / "checkpoint-ppo.safetensors"
    whole = path.read_bytes()

    def parse(data: bytes) -> Any:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        meta = header["__metadata__"]
        meta["description"] = json.loads(meta["description"])
        return header

    def writer(data: bytes) -> Callable[[Any], bytes]:
        rest = data[8 + int.from_bytes(data[:8], "little") :]

        def write(header: Any) -> bytes:
            meta = header.get("__metadata__") if isinstance(header, dict) else None
            if isinstance(meta, dict) and "description" in meta:
                meta["description"] = json.dumps(meta["description"])
            text = json.dumps(header).encode()
            return len(text).to_bytes(8, "little") + text + rest

        return write

    def read(path: Path) -> None:
        Learner(problem, config, name="ppo").read_checkpoint(path.parent)

    yield Target("checkpoint", whole, _reading(folder, path.name, read), parse, writer(whole))
    whole = _saved(folder, "policy.safetensors", learner.policy.save)
    yield Target(
        "policy", whole, _reading(folder, "policy.safetensors", Policy.load), parse, writer(whole)
    )


def _plans(folder: Path) -> Iterator[Target]:
    import torch

    from placewright.backends.pytorch.exporting import Inputs
    from placewright.backends.pytorch.modules import Units
    from placewright.backends.pytorch.offload.plan import OffloadPlan, Shape, UnitPlan
    from placewright.backends.pytorch.plan import Plan
    from placewright.backends.pytorch.streams.groups import Fusion
    from placewright.backends.pytorch.streams.plan import StreamPlan, load, save

    plan = Plan(
        model="Net", training=False,
        inputs=Inputs((torch.zeros(2, 3), [1, None]), {"ids": torch.zeros(4, dtype=torch.int64)}),
        devices={"cpu:0": "cpu", "gpu:0": "cuda:0"},
        device_of_node={"mm": "cpu:0", "add": "gpu:0"},
        device_of_tensor={"weight": "cpu:0"},
        units=Units(order=("0", "1"), sets=(("0", "1"),), called=2, holding=frozenset({"0"})),
        device_of_unit={"0": ("cpu:0",), "1": ("cpu:0", "gpu:0")},
        tied={"head.weight": "weight"},
    )  # fmt: skip
    whole = _saved(folder, "plan.json", plan.save)
    yield Target("plan.json", whole, _reading(folder, "plan.json", Plan.load), json.loads)

    shapes = (Shape(name="prompt", rows=512, seconds=0.1), Shape(name="token", rows=1, weight=9.0))
    units = [
        UnitPlan(path=f"blocks.{n}", size=64, home=home,
                 computed_on={"prompt": "cuda:0", "token": token})
        for n, (home, token) in enumerate((("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cpu", "cpu")))
    ]  # fmt: skip
    offloading = OffloadPlan(
        model="Net", device="cuda:0", units=tuple(units), shapes=shapes, window_bytes=128,
        memory_bytes=4096, notes=("as measured",),
    )  # fmt: skip
    whole = _saved(folder, "offload.json", offloading.save)
    read = _reading(folder, "offload.json", lambda path: OffloadPlan.load(path).describe())
    yield Target("offload.json", whole, read, json.loads)

    streaming = StreamPlan(
        inputs=(((2, 3), "float32"),), chosen="streams", seconds={"streams": 1e-3, "eager": 2e-3},
        fusion=Fusion.FOLDED, fingerprint="ab", groups=("a", "b"), kernels=("torch", "own"),
        group_seconds=(1e-4, 2e-4), group_demand=(0.5, 0.0), streams=(0, 1), order=(1, 0),
        one_stream_seconds=2e-3, found={"heft": 1e-3}, trials=7, notes=("none",),
    )  # fmt: skip
    whole = _saved(
        folder, "streams.json", lambda path: save([streaming], path, model="Net", device="H200")
    )
    read = _reading(folder, "streams.json", lambda path: [plan.verdict for plan in load(path)])
    yield Target("streams.json", whole, read, json.loads)


def _weights(folder: Path) -> Iterator[Target]:
    """What a placed module's weights are read from."""
    import torch
    from safetensors.torch import save_file

    from placewright.backends.pytorch.offload.checkpoint import _stored

    saved = folder / "weights"
    saved.mkdir()
    save_file({"w": torch.zeros(2, 3), "b": torch.zeros(3)}, saved / "a.safetensors")
    whole = (saved / "a.safetensors").read_bytes()

    def parse(data: bytes) -> Any:
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])

    def write(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + bytes(36)

    yield Target(
        "weights.safetensors", whole, _reading(folder, "weights.safetensors", _stored), parse, write
    )
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys("wb", "a.safetensors")})
    yield Target("index.json", index.encode(), _reading(saved, "index.json", _stored), json.loads)


def _graph_def(folder: Path) -> Target:
    from placewright.backends import load
    from tests.towers import towers_graph

    whole = towers_graph().as_graph_def().SerializeToString()
    return Target("graph.pb", whole, _reading(folder, "graph.pb", lambda path: load(str(path))))


# --- limits ---------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Nothing catches it on the way."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Time and memory for one file."""

    def stop(number: int, frame: object) -> None:
        raise TooLong(f"takes over {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def try_one(target: Target, data: bytes) -> bool:
    """Whether it was read; raises where it was neither read nor refused in one short line."""
    with limits(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            target.read(data)
            return True
        except PlacewrightError as fault:
            message = str(fault)
    assert message
    assert len(message) <= MOST_CHARACTERS, message
    assert len(message.splitlines()) == 1, message
    return False


class Found(NamedTuple):
    """A file that a loader could not cope with."""

    target: Target
    seed: int
    number: int
    data: bytes
    fault: BaseException


def fuzz(every: Sequence[Target], seed: int, count: int) -> Iterator[Found]:
    """Tries so many changes of each kind of file, and a tenth of slow ones."""
    for target in every:
        for number in range(max(1, count // 10) if target.slow else count):
            data = target.mutated(random.Random(f"{target.name} {seed} {number}"))
            try:
                try_one(target, data)
            except (Exception, TooLong) as fault:
                yield Found(target, seed, number, data, fault)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="begin with this one, to repeat a run")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="for what was found")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what is left out of a damaged file is no news here
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    tried = found = 0
    with tempfile.TemporaryDirectory() as folder:
        every = targets(Path(folder))
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            for target, _, number, data, fault in fuzz(every, seed, 10):
                found += 1
                options.keep.mkdir(parents=True, exist_ok=True)
                path = options.keep / f"{target.name.replace('/', '-')}-{seed}-{number}"
                path.write_bytes(data)
                print(f"{target.name}: seed {seed}, change {number}, kept as {path}")
                traceback.print_exception(fault)
            tried += sum(1 if target.slow else 10 for target in every)
            seed += 1
    print(f"{tried:,} files of {len(every)} kinds, {found} that a loader did not cope with")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
