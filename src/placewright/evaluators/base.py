"""What every evaluator is: placements in, measurements out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from placewright.backends.base import Run
from placewright.errors import PlacementError
from placewright.measurement import Measurement
from placewright.placement import Placement
from placewright.problem import Problem


class Request(NamedTuple):
    """A placement that is to be tried."""

    placement: Placement
    traces: int = 0
    """Traced steps to add, where there are real ones."""
    compared: bool = False
    """Whether it is compared with others side by side: it then has as many steps as they have,
    however slow it is and however much its times differ."""


class Evaluator(ABC):
    """Runs placements of one problem, or pretends to.

    A search hands in placements with `submit` and fetches with `collect` what came of them. One
    that answers at once only has to define `evaluate`; one that tries several at the same time
    defines the other three.

    A placement that runs out of memory or cannot run is a measurement like any other.
    `placewright.testing.check_evaluator` checks what is promised here.
    """

    cheap: bool = True
    """Whether evaluating a placement costs milliseconds rather than seconds."""

    parallel: int = 1
    """How many placements it tries at the same time where each takes long."""

    noise: float = 0.0
    """Standard deviation of the logarithm of a time over evaluations of the same placement; 0 where
    they are alike."""

    _requests: tuple[Request, ...] = ()

    @property
    @abstractmethod
    def problem(self) -> Problem:
        """The problem whose placements it takes."""

    @abstractmethod
    def evaluate(self, placements: Sequence[Placement]) -> list[Measurement]:
        """One measurement per placement, in order.

        Raises `PlacementError` for a placement of another space, and otherwise only when the
        measuring itself broke (`WorkerError`).
        """

    def run(self, requests: Sequence[Request]) -> list[Run]:
        """The same, with whatever else is known of each."""
        placements = [request.placement for request in requests]
        measurements = self.evaluate(placements)
        if len(measurements) != len(placements):
            raise PlacementError("the evaluator gave fewer measurements than placements")
        return [Run(measurement=measurement) for measurement in measurements]

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes what is to be tried; no placement twice before it was collected."""
        self._requests = (*self._requests, *requests)

    def collect(self, seconds: float) -> list[tuple[Placement, Run]]:
        """What came of placements that were submitted, as soon as there is something; nothing when
        nothing is being tried, or so many seconds have passed."""
        requests, self._requests = self._requests, ()
        runs = self.run(requests) if requests else []
        return [(request.placement, run) for request, run in zip(requests, runs, strict=True)]

    def drop(self) -> None:
        """Forgets what was submitted and not collected."""
        self._requests = ()
