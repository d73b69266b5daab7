from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUICK = ("--learner", "policy.hidden=16", "--learner", "samples=8")


def test_place_with_a_learned_method_then_go_on(run: Callable[..., Any], graph_file: Path) -> None:
    common = ("place", graph_file, "-c", "k80x2", "-m", "ppo", *QUICK, "--learner", "polish=8")
    result = run(*common, "--trials", "60", "-o", "out")
    assert result.code == 0
    assert "found by ppo" in result.out
    checkpoint = Path("out/checkpoint-ppo.safetensors")
    assert checkpoint.is_file()
    records = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [record["update"] for record in records] == list(range(1, len(records) + 1))
    assert {"entropy", "gradient_norm", "baseline", "failure_share"} <= set(records[0])
    assert list(Path("out/tensorboard/ppo").iterdir())

    before = Path("out/journal.jsonl").read_text()
    result = run(*common, "--trials", "90", "--resume", "out")
    assert result.code == 0
    after = Path("out/journal.jsonl").read_text()
    assert after.startswith(before)
    placements = [json.loads(line)["placement"] for line in after.splitlines()]
    assert len(placements) == len(set(placements)) == 90

    # A checkpoint that was damaged, and settings that belong to another policy.
    for damage, arguments, words in (
        (b"damaged", (), "not a placewright-checkpoint/1 file"),
        (None, ("--learner", "policy.hidden=32"), "another architecture"),
    ):
        whole = checkpoint.read_bytes()
        if damage is not None:
            checkpoint.write_bytes(damage)
        files = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
        result = run(*common, *arguments, "--trials", "120", "--resume", "out")
        assert result.code == 2
        assert words in result.err
        assert len(result.err.strip().splitlines()) == 1
        assert {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()} == files
        checkpoint.write_bytes(whole)


def test_train_then_place_with_the_policy(run: Callable[..., Any], graph_file: Path) -> None:
    result = run(
        "train", "--models", graph_file, "--clusters", "k80x2,k80x4", "--trials", "200",
        *QUICK, "-o", "policy.st",
    )  # fmt: skip
    assert result.code == 0
    assert "trained on 2 problems" in result.out
    result = run(
        "place", graph_file, "-c", "k80x4", "-m", "ppo", "--policy", "policy.st",
        "--trials", "1", "-o", "out", "--json",
    )  # fmt: skip
    assert result.code == 0
    assert result.json["trials"] == 1  # the policy's best guess, and nothing else
    again = run("train", "--models", graph_file, "--clusters", "k80x2", "-o", "policy.st")
    assert again.code == 2
    assert "is there already" in again.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--learner", "samples=0"), "samples must be at least 1, not 0"),
        (("--learner", "sample=3"), "did you mean samples?"),
        (("--policy", "nothing.st"), "nothing.st: no such file"),
        (("--policy", "x.st", "--learner", "policy.hidden=8"), "describes a new policy"),
        (("--policy", "broken.st"), "broken.st: not a placewright-policy/1 file"),
        (("-m", "reinforce", "--policy", "list.st"), "made for 3 groups"),
        (("-m", "heft", "--learner", "samples=3"), "for reinforce and ppo, and not for heft"),
        (("-m", "single,heft", "--policy", "x.st"), "policy is for reinforce and ppo, and not"),
    ],
)
def test_bad_input_is_one_line(
    run: Callable[..., Any], graph_file: Path, arguments: tuple[str, ...], words: str
) -> None:
    from placewright.learning.config import REINFORCE
    from placewright.learning.policy import Policy

    Path("broken.st").write_bytes(b"no tensors here")
    Policy(REINFORCE.policy, ["MatMul"], 3).save("list.st")
    result = run("place", graph_file, "-c", "k80x2", "-m", "ppo", *arguments, "-o", "out")
    assert result.code == 2
    assert words in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not Path("out").exists()


def test_one_device_is_answered_at_once(run: Callable[..., Any], graph_file: Path) -> None:
    result = run(
        "place", graph_file, "-c", "k80x2", "--forbid", "gpu:0", "--forbid", "gpu:1",
        "-m", "ppo", "--trials", "1000000", "-o", "out", "--json",
    )  # fmt: skip
    assert result.code == 0
    assert result.json["trials"] == 1


def test_torch_that_is_not_installed_is_named_with_its_install_command(
    run: Callable[..., Any], graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torch" else found(name)
    )
    for command in (
        ("place", graph_file, "-c", "k80x2", "-m", "ppo"),
        ("train", "--models", graph_file, "--clusters", "k80x2", "-o", "policy.st"),
    ):
        result = run(*command)
        assert result.code == 2
        assert "pip install 'placewright[learning]'" in result.err


def test_settings_are_checked_before_the_model_is_read(run: Callable[..., Any]) -> None:
    for command in ("place", "compare"):
        result = run(command, "no-such-model", "-c", "k80x2", "--learner", "sample=3")
        assert result.code == 2
        assert "did you mean samples?" in result.err
