"""Settings of the learned methods: one dataclass, two presets.

`reinforce` is the method of Mirhoseini et al. (2017) as published; `ppo` is what we make of it. The
fields are also the command line: `placewright place ... --learner samples=32`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from placewright.errors import LearningError
from placewright.learning.policy import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How a policy is trained. The defaults are `ppo`'s; `REINFORCE` below has the paper's."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The network. Its fields are set as `policy.hidden=256`."""
    samples: int = 16
    """K: placements sampled for one update. In the paper one for each worker of a controller, 4 to
    8 for each of 20 controllers."""
    learning_rate: float = 2e-3
    """Of Adam, at the start."""
    learning_rate_decay: float = 0.5
    """What the learning rate is multiplied by every `learning_rate_halving` gradient steps,
    smoothly. The authors' later controller decays it too."""
    learning_rate_halving: int = 3000
    """See `learning_rate_decay`."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this length if it is longer (the later controller's)."""

    failing_seconds: float | None = None
    """What a placement that fails counts as: the 'failing signal', fixed and large. The paper gives
    no number. None: every op on its slowest device and every tensor sent to all the others, one
    after another, so that any placement that runs is better."""
    failures_until: int = 5000
    """After so many updates only placements that ran update the parameters and the baseline: late
    in training a failure is more likely the machine's than the placement's (paper, section 3.1)."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a measured time, where measuring the same placement
    again gives another. The times of placements that are nearly the same, or give the devices as
    much to do, then count together, for the reward as for what is imitated, and a failure is no
    worse than a bit slower than the slowest of its batch, as it may be the machine's. Polishing, if
    there is any, is done on these estimates, and methods then make `samples` 4 and `polish` 12
    unless told otherwise. 0: every time is taken for what it is. Where it is not given, methods
    take what the evaluator says of itself, but not for `reinforce`, nor where workers measure
    (`--workers`)."""
    normalise: bool = True
    """Advantages within a batch are brought to mean 0 and deviation 1; otherwise they are taken
    against the moving average (the paper's)."""
    baseline_decay: float = 0.9
    """Of the moving average of rewards; it starts at the failing signal (later controller: 0.9)."""

    epochs: int = 2
    """Gradient steps on each batch."""
    clip: float | None = 0.2
    """PPO: a choice's probability gains nothing from leaving 1 +- this times what it was when
    sampled (Schulman et al. 2017). None: the plain policy gradient."""
    entropy: float = 0.01
    """Weight of the entropy bonus at the start: keeps the policy trying things."""
    entropy_decay: float = 0.5
    """What the bonus is multiplied by every `entropy_halving` updates, smoothly."""
    entropy_halving: int = 200
    """See `entropy_decay`."""
    logit_noise: float = 0.0
    """Standard deviation of the noise on the logits while sampling (an option of the later
    controller)."""
    logit_noise_updates: int = 500
    """How many updates the noise lasts."""

    elites: int = 8
    """The best placements known, which the policy imitates (self-imitation, Oh et al. 2018); 0:
    none."""
    imitation: float = 1.0
    """Weight of imitating them in each update; 0: off."""
    warm_start: int = 60
    """Gradient steps of imitation before the first sample, on the classical placements it is told
    of or computes itself; 0: from scratch."""
    polish: int = 240
    """Placements tried by a local search around the elites after each update's samples; the policy
    then imitates what it found (expert iteration). 0: off. With `noise` that search is on
    estimates, and only what looks best to it is tried. Methods make it, unless told otherwise,
    1,500 where the budget is one of time alone, as an update takes as long as simulating so many;
    12 with `noise`; and 0 where a trial takes seconds and no noise is known of (`--workers`). A run
    that is resumed with another kind of budget needs to be told the number it began with."""

    imitation_steps: int = 6
    """Gradient steps of imitation alone after each update, where there is polishing: the local
    search finds better placements faster than the policy's own updates can follow."""
    settled: float = 0.03
    """The learner ends when less than this share of its samples is new (a moving average) and there
    is no local search to go on; 0: never."""

    def __post_init__(self) -> None:
        for name, kind in _types(type(self)).items():
            value = getattr(self, name)
            if kind.startswith("float") and value is not None and not math.isfinite(value):
                raise LearningError(f"learner: {name} must be a number, not {value}")
        for name in ("samples", "epochs", "learning_rate_halving", "entropy_halving"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise LearningError(f"learner: {name} must be at least 1, not {value}")
        for name in (
            "failures_until", "entropy", "logit_noise", "logit_noise_updates", "elites",
            "imitation", "warm_start", "polish", "imitation_steps", "settled", "noise",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise LearningError(
                    f"learner: {name} must not be negative, not {getattr(self, name)}"
                )
        for name in ("learning_rate", "clip_norm", "failing_seconds", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise LearningError(f"learner: {name} must be positive, not {value}")
        for name in ("learning_rate_decay", "entropy_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise LearningError(
                    f"learner: {name} must be above 0 and at most 1, not {getattr(self, name)}"
                )
        if not 0 <= self.baseline_decay < 1:
            raise LearningError(
                f"learner: baseline_decay must be from 0 to below 1, not {self.baseline_decay}"
            )
        if (self.warm_start or self.polish or self.imitation) and not self.elites:
            raise LearningError("learner: imitation, warm_start and polish need elites")


def _types(config: Any) -> dict[str, str]:
    return {entry.name: str(entry.type) for entry in fields(config)}


PPO = LearnerConfig()

# The paper gives neither the size of its network nor the learning rate. The size is the later
# controller's; with it, and this rate, five runs of five ended on one GPU as in the paper, on RNNLM
# as on Inception-V3 with two GPUs (`benchmarks/results/learning`). At twice the rate more runs end
# on the CPU; a network of 128 found better placements on the way and often ended on two GPUs.
REINFORCE = LearnerConfig(
    policy=PolicyConfig(
        hidden=512,
        adjacency="list",
        logarithms=False,
        costs=False,
        aligned=False,
        running=False,
        device_features=False,
        temperature=1.0,
    ),
    learning_rate=5e-4,
    normalise=False,
    epochs=1,
    clip=None,
    entropy=0.0,
    elites=0,
    imitation=0.0,
    warm_start=0,
    polish=0,
    settled=0.0,
)

PRESETS = {"reinforce": REINFORCE, "ppo": PPO}


def configured(base: LearnerConfig, settings: Sequence[str]) -> LearnerConfig:
    """The config with `name=value` settings applied, as the command line gives them."""
    changes, policy_changes = parsed(settings)
    # All at once: some only make sense together.
    return replace(base, policy=replace(base.policy, **policy_changes), **changes)


def parsed(settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by name, of the learner and of its policy."""
    changes: dict[str, Any] = {}
    policy_changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise LearningError(f"--learner {setting!r} is not of the form name=value")
        if name == "policy":
            raise LearningError(f"--learner {setting!r}: set its fields, such as policy.hidden=256")
        of_policy = name.startswith("policy.")
        name = name.removeprefix("policy.")
        types = _types(PolicyConfig if of_policy else LearnerConfig)
        if name not in types:
            close = difflib.get_close_matches(name, types, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(types)}"
            raise LearningError(f"--learner {setting!r}: unknown setting {name!r}; {hint}")
        (policy_changes if of_policy else changes)[name] = _value(types[name], text, setting)
    return changes, policy_changes


def _value(kind: str, text: str, setting: str) -> Any:
    if text.lower() == "none" and "None" in kind:
        return None
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except (ValueError, KeyError):
        raise LearningError(f"--learner {setting!r}: {text!r} is not of type {kind}") from None
    return text
