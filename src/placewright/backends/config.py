"""How placements are run and timed: every setting there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from placewright.errors import WorkerError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a real run. The protocol is the paper's: ten steps, the first one dropped."""

    steps: int = 10
    """Steps of each placement, the first of which warms up and is not counted."""
    max_steps: int = 40
    """Steps at most, where the times differ too much after `steps`."""
    precision: float = 0.05
    """Steps are added until the 95% confidence interval of the mean is within this share of it."""
    give_up_factor: float = 4.0
    """A placement whose first timed steps take this many times the best one's is cut short."""
    time_limit_seconds: float = 120.0
    """Most time for one placement; then it is stopped and its outcome is 'timed out'."""
    start_seconds: float = 120.0
    """Most time for the processes to start."""
    threads_between_ops: int = 4
    """Threads of a device that start ops (inter-op). With 1, sending waits behind computing."""
    limit_memory: bool = False
    """Hold CPU devices to the memory that the cluster gives them, so that running out of it happens
    as it would on a device of that size."""
    optimize: bool = False
    """Let TensorFlow rewrite the graph first (Grappler). Faster steps, but it moves and merges ops,
    so that what runs is not quite the placement."""
    soft_placement: bool = False
    """Let TensorFlow put an op elsewhere where it has no kernel on its device."""
    check: bool = False
    """Compare where TensorFlow put every op with the placement; it costs a fraction of a second."""
    seed: int = 0
    """For the inputs that are made up."""
    ports: tuple[int, ...] = ()
    """Port of each device's process on this machine; free ones when not given."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Device -> host:port of a TensorFlow server that is running there already (job `worker`, tasks
    in the order of the cluster's devices). All devices or none."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise WorkerError(
                f"steps must be at least 2, as the first is dropped, not {self.steps}"
            )
        if self.max_steps < self.steps:
            raise WorkerError(f"max_steps ({self.max_steps}) is less than steps ({self.steps})")
        for name in ("precision", "give_up_factor", "time_limit_seconds", "start_seconds"):
            if not getattr(self, name) > 0:
                raise WorkerError(f"{name} must be positive, not {getattr(self, name)}")
        if self.threads_between_ops < 1:
            raise WorkerError("threads_between_ops must be at least 1")
