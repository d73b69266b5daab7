"""What a learner writes down so that a run can be resumed: policy, optimizer and its own state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from placewright.errors import LearningError, PlacementError
from placewright.learning.config import LearnerConfig, resolved
from placewright.learning.tensors import read_tensors, write_tensors
from placewright.learning.updater import Updater
from placewright.problem import Problem

FORMAT = "placewright-checkpoint/1"


class LearnerState(NamedTuple):
    """What a checkpoint holds of one learner, apart from the policy."""

    described: dict[str, Any]
    """As JSON can have it."""
    tensors: dict[str, Tensor]


class Origin(NamedTuple):
    """What a run must have begun with for its checkpoint to be of use."""

    problem: Problem
    config: LearnerConfig
    seed: int


def write(path: Path, origin: Origin, updater: Updater, states: Sequence[LearnerState]) -> None:
    """Writes the policy and its optimizer, and the learners that share them."""
    described = states[0].described | {
        "policy": updater.policy.description(),
        "config": asdict(origin.config),
        "space": origin.problem.space.fingerprint,
        "seed": origin.seed,
        "steps": updater.steps,
        "others": [state.described for state in states[1:]],
    }
    tensors = {f"policy/{name}": value for name, value in updater.policy.state_dict().items()}
    tensors |= {f"adam/{name}": value for name, value in updater.state().items()}
    tensors = {name: value.detach().clone() for name, value in tensors.items()}
    tensors |= states[0].tensors
    for number, state in enumerate(states[1:]):
        tensors |= {f"others/{number}/{name}": value for name, value in state.tensors.items()}
    write_tensors(path, FORMAT, described, tensors)


def read(
    path: Path, origin: Origin, updater: Updater, take: Callable[[LearnerState], None]
) -> list[LearnerState]:
    """Puts the policy and its optimizer back, and gives the first learner's state to `take`.

    The states are those of all learners that shared the policy; none where there is no checkpoint.
    """
    if not path.exists():
        return []
    described, tensors = read_tensors(path, FORMAT)
    _check(path, described, origin, updater)
    try:
        updater.policy.take(_part(tensors, "policy/"), path)
        updater.restore(_part(tensors, "adam/"), int(described["steps"]))
        states = [LearnerState(described, {n: t for n, t in tensors.items() if "/" not in n})]
        for number, other in enumerate(described.get("others", ())):
            states.append(LearnerState(other, _part(tensors, f"others/{number}/")))
        take(states[0])
    except (KeyError, TypeError, ValueError, RuntimeError, PlacementError) as fault:
        raise LearningError(f"{path}: damaged checkpoint: {fault!r}") from None
    return states


def _check(path: Path, described: Mapping[str, Any], origin: Origin, updater: Updater) -> None:
    """Raises for a checkpoint of a run that began with something else."""
    # Version 0.1.0 knew nothing of spaces.
    problem = origin.problem
    own = problem.space.fingerprint if "space" in described else problem.fingerprint
    made_for = described.get("space", described.get("problem"))
    if made_for != own:
        raise LearningError(f"{path}: checkpoint of problem {made_for}, this one is {own}")
    if described.get("policy") != _plain(updater.policy.description()):
        raise LearningError(
            f"{path}: checkpoint of a policy of another architecture; resume with the settings "
            "the run began with"
        )
    now = _plain(asdict(origin.config)) | {"seed": origin.seed}
    # What an older version did not know was as the default is.
    then = _plain(asdict(resolved(LearnerConfig()))) | dict(described.get("config") or {})
    then["seed"] = described.get("seed")
    for name, value in now.items():
        if name != "policy" and then.get(name) != value:
            raise LearningError(
                f"{path}: the run began with {name} {then.get(name)}, not {value}; resume with "
                "the settings it began with"
            )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _plain(description: Any) -> Any:
    """As JSON would have it: tuples are lists."""
    if isinstance(description, dict):
        return {key: _plain(value) for key, value in description.items()}
    if isinstance(description, list | tuple):
        return [_plain(value) for value in description]
    return description
