"""Settings of the learned methods: one dataclass, two presets.

`reinforce` is the method of Mirhoseini et al. (2017) as published; `ppo` is what we make of it. The
fields are also the command line: `placewright place ... --learner samples=32`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from placewright.errors import LearningError


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The shape of the network. Where the paper gives no number, that of its authors' later
    controller (Hierarchical Planner, 2018) is named."""

    hidden: int = 128
    """Units of the LSTMs. The later controller has 512, and so has `reinforce`; for `ppo` a quarter
    of it learns as well, several times faster on a CPU."""
    bidirectional: bool = True
    """Whether the encoder also reads backwards, each direction with half the units (as in the later
    controller)."""
    type_embedding: int = 32
    """Width of the embedding of op types."""
    attention: int = 16
    """Width of the additive attention. Its tanh over samples x groups x groups is most of the cost
    of an update on a CPU."""
    adjacency: Literal["list", "neighbours"] = "neighbours"
    """How a group's neighbours are seen. `list`: which groups feed it and which it feeds, a column
    for each group (the paper's), which ties the policy to graphs of one size. `neighbours`: the
    mean of the neighbours' own features, weighted by traffic, two rounds."""
    logarithms: bool = True
    """Type counts and output shapes as logarithms instead of plain numbers."""
    costs: bool = True
    """Whether work, memory, traffic and position of a group are seen."""
    aligned: bool = True
    """Whether the decoder's step for a group also gets the encoder's state of that group; in the
    paper only attention leads there."""
    running: bool = True
    """Whether the decoder sees what it did so far: each device's load and memory, and where the
    group's neighbours went."""
    device_features: bool = True
    """Whether a device's embedding is also made from what the device is (speed, memory, CPU or
    not), which lets a policy move to another cluster."""
    max_devices: int = 16
    """Rows of the table of device embeddings; more where the problem has more devices."""
    tanh_constant: float = 5.0
    """C of C * tanh(logits / T), which keeps the policy from being certain too soon (the later
    controller's)."""
    temperature: float = 5.0
    """T of the same. 5 leaves small logits as they are; the paper's preset has 1."""
    forget_bias: float = 1.0
    """Added to the LSTMs' forget gates at the start (the later controller's)."""

    def __post_init__(self) -> None:
        for name in ("hidden", "type_embedding", "attention", "max_devices"):
            if getattr(self, name) < 1:
                raise LearningError(f"policy: {name} must be at least 1, not {getattr(self, name)}")
        if self.bidirectional and self.hidden % 2:
            raise LearningError(
                f"policy: hidden must be even for a bidirectional encoder, not {self.hidden}"
            )
        if self.adjacency not in ("list", "neighbours"):
            raise LearningError(
                f"policy: adjacency is 'list' or 'neighbours', not {self.adjacency!r}"
            )
        for name in ("tanh_constant", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise LearningError(f"policy: {name} must be positive, not {getattr(self, name)}")
        if not math.isfinite(self.forget_bias):
            raise LearningError(f"policy: forget_bias must be a number, not {self.forget_bias}")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How a policy is trained. The defaults are `ppo`'s; `REINFORCE` below has the paper's."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The network. Its fields are set as `policy.hidden=256`."""
    samples: int | None = None
    """K: placements sampled for one update. In the paper one for each worker of a controller, 4 to
    8 for each of 20 controllers. None: 16, or 4 where polishing is done on estimates."""
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
    noise: float | None = None
    """Standard deviation of the logarithm of a measured time, where measuring the same placement
    again gives another. The times of placements that are nearly the same, or give the devices as
    much to do, then count together, for the reward as for what is imitated, and a failure is no
    worse than a bit slower than the slowest of its batch, as it may be the machine's. Polishing, if
    there is any, is done on these estimates. 0: every time is taken for what it is. None: what the
    evaluator says of itself."""
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
    warm_start: int | None = None
    """Gradient steps of imitation before the first sample, on the classical placements it is told
    of or computes itself; 0: from scratch. None: 60, or 0 for a policy that was trained already,
    which imitating others could only spoil."""
    polish: int | None = None
    """Placements tried by a local search around the elites after each update's samples; the policy
    then imitates what it found (expert iteration). 0: off. With `noise` that search is on
    estimates, and only what looks best to it is tried. None: as evaluator and budget make sensible,
    see `resolved`. A run that is resumed with another kind of budget needs to be told the number it
    began with."""

    remeasure: int | None = None
    """How many of the best placements known are tried once more after each update, where they are
    so close to each other that `noise` may decide which is the best: what was tried least first.
    None: 1 with `noise`, and 0 without."""

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
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LearningError(f"learner: {name} must be at least 1, not {value}")
        for name in (
            "failures_until", "entropy", "logit_noise", "logit_noise_updates", "elites",
            "imitation", "warm_start", "polish", "remeasure", "imitation_steps", "settled", "noise",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 0:
                raise LearningError(f"learner: {name} must not be negative, not {value}")
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


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(LearnerConfig):
    """One that leaves nothing open; `resolved` makes it."""

    samples: int
    noise: float
    warm_start: int
    polish: int
    remeasure: int


def resolved(
    config: LearnerConfig,
    *,
    cheap: bool = True,
    noise: float = 0.0,
    by_time: bool = False,
    trained: bool = False,
) -> ResolvedConfig:
    """The config with everything that it leaves open (None) decided.

    `cheap` and `noise` are what the evaluator says of itself, `by_time` is whether the budget is
    one of time alone, `trained` whether there is a policy to go on from.

    - `noise` is the evaluator's.
    - `warm_start` is 60; 0 for a trained policy, and where there are no elites to imitate.
    - `polish` is 240; 1,500 where time counts and not trials, as an update takes about as long as
      simulating so many placements of a model with a few thousand ops; 12 where times are noisy:
      what is found by estimates is as good as the estimates are, so few placements are tried until
      there are better ones; 0 where a trial takes seconds and its time is taken for exact.
    - `samples` is 16; 4 where polishing is done on estimates, for the same reason.
    - `remeasure` is 1 where times are noisy, and 0 elsewhere.
    """
    if config.noise is not None:
        noise = config.noise
    polish, warm_start, samples = config.polish, config.warm_start, config.samples
    if polish is None:
        if not config.elites:
            polish = 0
        elif noise:
            polish = 12
        elif cheap:
            polish = 1500 if by_time else 240
        else:
            polish = 0
    if warm_start is None:
        warm_start = 0 if trained or not config.elites else 60
    if samples is None:
        samples = 4 if noise and polish else 16
    remeasure = config.remeasure
    if remeasure is None:
        remeasure = 1 if noise and config.elites else 0
    values = {entry.name: getattr(config, entry.name) for entry in fields(LearnerConfig)}
    values |= {"noise": noise, "polish": polish, "warm_start": warm_start, "samples": samples}
    values["remeasure"] = remeasure
    return ResolvedConfig(**values)


_STEP_SECONDS_PER_GROUP = 2.7e-4
"""What a gradient step of a policy 128 wide takes for each group: its LSTMs read and place one
group after another."""

_STEP_SECONDS_PER_SCORE = 1.6e-9
"""What it takes for each number in the attention's scores: placements x groups x groups x width."""


def update_seconds(config: ResolvedConfig, groups: int, updates: int) -> float:
    """What the warm start and so many updates are taken to need, trials and polishing aside.

    The two constants fit what graphs of 24 to 400 groups took on one of two busy cores, within a
    tenth from 60 groups on. They are the same everywhere, however fast the machine is.
    """
    rows = config.samples + config.elites
    step = groups * _STEP_SECONDS_PER_GROUP
    step += rows * groups**2 * config.policy.attention * _STEP_SECONDS_PER_SCORE
    steps = config.epochs + (config.imitation_steps if config.polish else 0)
    return step * (config.warm_start + updates * steps)


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
    samples=16,
    learning_rate=5e-4,
    noise=0.0,
    normalise=False,
    epochs=1,
    clip=None,
    entropy=0.0,
    elites=0,
    imitation=0.0,
    warm_start=0,
    polish=0,
    remeasure=0,
    settled=0.0,
)

PRESETS = {"reinforce": REINFORCE, "ppo": PPO}


def configured(base: LearnerConfig, settings: Sequence[str]) -> LearnerConfig:
    """The config with `name=value` settings applied, as a command line gives them."""
    changes: dict[str, Any] = {}
    policy_changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise LearningError(f"setting {setting!r} is not of the form name=value")
        if name == "policy":
            raise LearningError(f"setting {setting!r}: set its fields, such as policy.hidden=256")
        of_policy = name.startswith("policy.")
        name = name.removeprefix("policy.")
        types = _types(PolicyConfig if of_policy else LearnerConfig)
        if name not in types:
            close = difflib.get_close_matches(name, types, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(types)}"
            raise LearningError(f"setting {setting!r}: unknown setting {name!r}; {hint}")
        (policy_changes if of_policy else changes)[name] = _value(types[name], text, setting)
    # All at once: some only make sense together.
    return replace(base, policy=replace(base.policy, **policy_changes), **changes)


def configured_presets(
    names: Sequence[str], settings: Sequence[str]
) -> dict[str, LearnerConfig] | None:
    """The presets of the learned methods among these with such settings; None without settings."""
    if not settings:
        return None
    return {name: configured(PRESETS[name], settings) for name in names if name in PRESETS}


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
        raise LearningError(f"setting {setting!r}: {text!r} is not of type {kind}") from None
    return text
