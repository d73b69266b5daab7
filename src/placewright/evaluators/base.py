"""What every evaluator is: placements in, measurements out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from placewright.measurement import Measurement
from placewright.placement import Placement
from placewright.problem import Problem


class Evaluator(ABC):
    """Runs placements of one problem, or pretends to.

    A placement that runs out of memory or cannot run is a measurement like any other.
    `placewright.testing.check_evaluator` checks what is promised here.
    """

    cheap: bool = True
    """Whether evaluating a placement costs milliseconds rather than seconds."""

    at_a_time: int = 1
    """How many placements to ask it for at a time where each takes long."""

    noise: float = 0.0
    """Standard deviation of the logarithm of a time over evaluations of the same placement; 0 where
    they are alike."""

    @property
    @abstractmethod
    def problem(self) -> Problem:
        """The problem whose placements it takes."""

    @abstractmethod
    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        """One measurement per placement, in order.

        Raises `PlacementError` for a placement of another problem, and otherwise only when the
        measuring itself broke (`WorkerError`).
        """
