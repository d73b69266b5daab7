"""The process that runs PyTorch dies, hangs, runs out of memory or writes nonsense."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from placewright.backends.pytorch import TorchRunConfig
from placewright.backends.pytorch.exporting import Inputs
from placewright.backends.pytorch.program import TorchModel, TorchProgram, read_program
from placewright.backends.pytorch.runner import TorchRunner
from placewright.cluster import Cluster
from placewright.errors import WorkerError
from placewright.journal import read_trials
from placewright.measurement import Outcome
from placewright.problem import make_problem
from placewright.session.config import RoundsConfig, SearchConfig
from placewright.session.driver import Session
from placewright.session.search import Progress
from tests.memory_groups import memory_group

CPU2 = Cluster.load("cpu2")
QUICK = TorchRunConfig(steps=3, max_steps=3, time_limit_seconds=60.0)
FOREVER = dataclasses.replace(QUICK, steps=10**6, max_steps=10**6, time_limit_seconds=600.0)


class Hungry(torch.nn.Module):
    """Asks for more memory than a process may have, where the words say so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.repeat(4000, 4000) + 1.0).sum()


def program_of(module: torch.nn.Module, x: torch.Tensor) -> TorchProgram:
    return read_program(TorchModel(module, Inputs((x,))))


@pytest.fixture(scope="module")
def program() -> TorchProgram:
    torch.manual_seed(0)
    return program_of(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))),
                      torch.ones(2, 8))  # fmt: skip


@pytest.fixture(scope="module")
def runner(program: TorchProgram) -> Iterator[TorchRunner]:
    with TorchRunner(program, CPU2, QUICK) as runner:
        yield runner


def alternating(program: TorchProgram) -> list[int]:
    return [number % 2 for number in range(program.graph.num_ops)]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def goes_on(runner: TorchRunner) -> None:
    """The next placement runs."""
    runner.config = QUICK
    assert runner.measure(alternating(runner.program)).measurement.ok


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_hit_in_the_midst_of_a_step(runner: TorchRunner, how: signal.Signals) -> None:
    goes_on(runner)
    before = runner.restarts
    limit = 4.0 if how is signal.SIGSTOP else 600.0
    runner.config = dataclasses.replace(FOREVER, time_limit_seconds=limit)
    (victim,) = runner.pids
    threading.Timer(1.0, os.kill, (victim, how)).start()
    hit = runner.measure(alternating(runner.program)).measurement
    if how is signal.SIGSTOP:
        assert hit.outcome is Outcome.TIMED_OUT
    else:
        assert hit.outcome is Outcome.FAILED
        assert f"was killed by signal {how.value} ({how.name})" in hit.reason
    assert runner.restarts == before + 1
    until(lambda: gone(victim))
    goes_on(runner)


def test_a_search_goes_on_when_its_process_hangs(program: TorchProgram, tmp_path: Path) -> None:
    problem = make_problem(program.graph, CPU2)
    stopped: list[int] = []
    # Of its own: the processes that a search starts end with the search.
    limited = dataclasses.replace(QUICK, time_limit_seconds=4.0)
    with TorchRunner(program, CPU2, limited) as runner:

        def watch(progress: Progress) -> None:
            if progress.trials == 5 and not stopped:
                stopped.append(runner.pids[0])
                os.kill(stopped[0], signal.SIGSTOP)

        config = SearchConfig(
            method="random", trials=14, evaluate="measure", rounds=RoundsConfig(final_rounds=1)
        )
        session = Session(problem, config, runner=runner, directory=tmp_path, observe=watch)
        result = session.run()
    assert not result.fault
    assert result.best is not None
    tried = read_trials(tmp_path / "journal.jsonl", problem)
    assert len(tried) > 8
    outcomes = [trial.measurement.outcome for trial in tried]
    assert outcomes[5] is Outcome.TIMED_OUT
    assert set(outcomes[:5] + outcomes[6:]) == {Outcome.OK}
    until(lambda: gone(stopped[0]))


def answers_of(pid: int) -> Path:
    """The end of the pipe into which a process writes its answers."""
    number = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2].decode()
    return Path(f"/proc/{pid}/fd/{number}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"Traceback, or what a library prints\n", "an answer that is none: 'Traceback"),
        (b"[" * 5000 + b"\n", "an answer that is none"),
        (b"{}\n", "an answer that is no measurement"),
        (b'{"outcome": "ok", "step_seconds": [NaN]}\n', "an answer that is no measurement"),
        (b'{"outcome": "ok", "step_seconds": [1], "trace": 5}\n', "is no measurement"),
    ],
)
def test_nonsense_in_place_of_an_answer(runner: TorchRunner, line: bytes, said: str) -> None:
    goes_on(runner)
    before = runner.restarts
    (victim,) = runner.pids
    with answers_of(victim).open("wb") as pipe:
        pipe.write(line)
    hit = runner.measure(alternating(runner.program)).measurement
    assert hit.outcome is Outcome.FAILED
    assert said in hit.reason
    assert len(hit.reason) < 500
    assert runner.restarts == before + 1
    until(lambda: gone(victim))


def test_nonsense_in_place_of_a_request(runner: TorchRunner) -> None:
    goes_on(runner)
    assert runner._client is not None
    pipe = runner._client._process.stdin
    assert pipe is not None
    os.write(pipe.fileno(), b"nonsense\n")
    # What it makes of that is taken for the answer to what is asked next.
    assert runner.measure(alternating(runner.program)).measurement.outcome is Outcome.FAILED
    runner.restart_client()
    goes_on(runner)


def test_nonsense_in_place_of_a_sign_that_it_has_started(
    program: TorchProgram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when a module that is imported on the way writes to whatever is open."""
    code = (
        "import contextlib, os\n"
        "for n in range(3, 30):\n"
        "    with contextlib.suppress(OSError):\n"
        "        os.write(n, b'hello\\n')\n"
    )
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with (
        TorchRunner(program, CPU2, QUICK) as runner,
        pytest.raises(WorkerError, match=r"did not start: .*an answer that is none: 'hello'"),
    ):
        runner.measure(alternating(program))
    assert runner.pids == ()


def test_a_process_that_the_system_kills_for_memory() -> None:
    program = program_of(Hungry(), torch.ones(4, 4))
    roomy = dataclasses.replace(
        CPU2, devices=tuple(dataclasses.replace(d, memory_bytes=1 << 40) for d in CPU2.devices)
    )
    with memory_group(1 << 29) as members, TorchRunner(program, roomy, QUICK) as runner:
        runner.start()
        members.write_text(str(runner.pids[0]))
        full = runner.measure(alternating(program)).measurement
        assert full.outcome is Outcome.OUT_OF_MEMORY, full
        assert "(SIGKILL): the system ran out of memory" in full.reason
        assert runner.restarts == 1


OWNER = """
import sys, torch
from placewright.backends.pytorch import TorchRunConfig
from placewright.backends.pytorch.exporting import Inputs
from placewright.backends.pytorch.program import TorchModel, read_program
from placewright.backends.pytorch.runner import TorchRunner
from placewright.cluster import Cluster

module = torch.nn.Linear(1000, 1000)
program = read_program(TorchModel(module, Inputs((torch.ones(2, 1000),))))
config = TorchRunConfig(steps=10**6, max_steps=10**6, time_limit_seconds=600.0)
runner = TorchRunner(program, Cluster.load("cpu2"), config)
runner.start()
print(*runner.pids, flush=True)
runner.measure([0] * program.graph.num_ops)
"""


def test_nothing_outlives_the_parent() -> None:
    """Neither a process nor a file, and no file has a name while it runs."""
    temporary = tempfile.mkdtemp()
    before = set(os.listdir("/dev/shm"))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": temporary}, text=True, start_new_session=True,
    )  # fmt: skip
    with owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        try:
            assert len(pids) == 1
            assert not any(gone(pid) for pid in pids)
            assert os.listdir(temporary) == []
            owner.kill()
            owner.wait(60)
            until(lambda: all(gone(pid) for pid in pids))
        finally:
            owner.kill()
    assert os.listdir(temporary) == []
    assert set(os.listdir("/dev/shm")) <= before
    os.rmdir(temporary)


def test_weights_are_handed_over_without_a_name_and_without_pickle(
    program: TorchProgram, runner: TorchRunner
) -> None:
    goes_on(runner)
    (pid,) = runner.pids
    held = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    # A file in the folder of temporary ones that no name leads to, and whose content is read.
    unnamed = [name for name in held if name.endswith("(deleted)")]
    named = [
        name for name in held if name.startswith(tempfile.gettempdir()) and name not in unnamed
    ]
    assert unnamed
    assert named == []
    for name in ("pickle.", "torch.load", "torch.save"):
        for module in ("client", "runner"):
            source = Path(sys.modules["placewright.backends.pytorch.runner"].__file__ or "")
            assert name not in source.with_name(f"{module}.py").read_text()
