"""What every method of finding a placement is, learned or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.problem import Problem


class Again(NamedTuple):
    """A placement that is to be tried once more, as one time of it says too little."""

    placement: Placement
    known: int
    """How many times of it the placer knows. A run that goes on has more of them in its journal,
    which are told first."""


@dataclass(kw_only=True)
class Notes:
    """What a placer has to say besides its proposals; the search reads it after every `tell`."""

    why_not: str = ""
    """Why it has nothing to propose, in one line, where that needs saying."""
    lower_bound_seconds: float = 0.0
    """What it has proved that no placement's step takes less than."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """What there is to watch: one record for each update of a method that learns, with the number
    of the update as `update`. The search takes them out."""
    favourites: list[Placement] = field(default_factory=list)
    """What it holds for the best, the best first, where that need not be what was fastest when it
    was tried."""
    again: list[Again] = field(default_factory=list)
    """What it wants tried once more before it is asked again. The search takes these out and tells
    what came of each; where times are exact they would say nothing new, and none are tried."""


class Placer(ABC):
    """Proposes placements and learns from what came of them.

    A placer does not know whether a trial was simulated or measured, nor how many ran at a time.
    The same seed and the same answers lead to the same proposals.
    """

    name: str
    """The method's name in tables, journals and on the command line."""
    endless: bool = False
    """Whether it goes on proposing until stopped, and so needs a share of the budget."""
    share: float = 1.0
    """How large a share, relative to those of the other endless placers. Above 0."""
    waiting: bool = False
    """Whether it computes elsewhere, so that `ask` has nothing now and may have something soon."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.notes = Notes()

    @abstractmethod
    def ask(self, count: int) -> list[Placement]:
        """Up to `count` placements to try next. None means: not before what it asked for is
        answered; with nothing unanswered, and unless it is `waiting`, it is at its end."""

    @abstractmethod
    def tell(self, trials: Sequence[Trial]) -> None:
        """What came of placements of this problem: those asked for, or those of another placer
        (an earlier method, or the journal of a run that is resumed)."""

    def checkpoint(self, folder: Path) -> bool:
        """Writes what `restore` needs into the run's directory, if this is a moment for it; says
        whether it did. Only methods whose state cannot be had from the journal need it."""
        return False

    def restore(self, folder: Path, told: Sequence[Trial]) -> bool:
        """Goes back to the last checkpoint, if there is one; `told` is all that the journal holds.
        What was proposed since is then proposed again, and the search answers from the journal."""
        return False


class OneShot(Placer):
    """A method that computes placements without trying any: a plain function, adapted."""

    def __init__(
        self, name: str, problem: Problem, function: Callable[[Problem], Sequence[Placement]]
    ) -> None:
        super().__init__(problem)
        self.name = name
        self._function = function
        self._left: list[Placement] | None = None

    def ask(self, count: int) -> list[Placement]:
        if self._left is None:
            self._left = list(dict.fromkeys(self._function(self.problem)))
        asked, self._left = self._left[:count], self._left[count:]
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        pass
