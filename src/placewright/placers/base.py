"""What every method of finding a placement is, learned or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from placewright.measurement import Measurement, Trial
from placewright.placement import Placement
from placewright.problem import Problem


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
    why_not: str = ""
    """Why it has nothing to propose, in one line, where that needs saying."""
    lower_bound_seconds: float = 0.0
    """What it has proved that no placement's step takes less than."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abstractmethod
    def ask(self, count: int) -> list[Placement]:
        """Up to `count` placements to try next; none when there is nothing left to propose."""

    @abstractmethod
    def tell(self, trials: Sequence[Trial]) -> None:
        """What came of placements of this problem: those asked for, or those of another placer
        (an earlier method, or the journal of a run that is resumed)."""

    def before(self, others: Sequence[Placer]) -> None:
        """Which placers come after it in the search that begins, should it want to work for one of
        them. It is told before anything is asked for."""
        return  # most work for themselves

    def favourites(self) -> list[Placement]:
        """What it holds for the best, the best first, where that need not be what was fastest when
        it was tried."""
        return []

    def continue_under(self, problem: Problem) -> bool:
        """Goes on with the same graph, grouping and devices under other costs, and says so; False
        where a placer made anew does as well, as it does for all that do not learn.

        What it was told so far is of the old costs, and so are the times it remembers: it must not
        trust them. What is known under the new ones is told next."""
        return False

    def take_metrics(self) -> list[dict[str, float]]:
        """What there is to watch since the last call: one record for each update of a method that
        learns, with the number of the update as `update`."""
        return []

    def checkpoint(self, folder: Path) -> bool:
        """Writes what `restore` needs into the run's directory, if this is a moment for it; says
        whether it did. Only methods whose state cannot be had from the journal need it."""
        return False

    def restore(self, folder: Path, told: Sequence[Trial]) -> bool:
        """Goes back to the last checkpoint, if there is one; `told` is all that the journal holds.
        What was proposed since is then proposed again, and the search answers from the journal."""
        return False


class Explorer(Placer):
    """A placer that has its placements tried itself, many at a time and in no fixed order."""

    finished: bool = False
    """Whether there is nothing left to propose."""

    def ask(self, count: int) -> list[Placement]:
        """None: there is nothing for others to try."""
        return []

    @abstractmethod
    def explore(self, most: float) -> list[tuple[Placement, Measurement]]:
        """Placements that were not tried before and what came of them, as soon as there are some;
        after a second at most, none. Of those that were not given back yet, no more than `most`
        are being tried."""

    @abstractmethod
    def close(self) -> None:
        """Gives up what is still being tried."""


class OneShot(Placer):
    """A method that computes placements without trying any: a plain function, adapted."""

    def __init__(
        self, name: str, problem: Problem, function: Callable[[Problem], Sequence[Placement]]
    ) -> None:
        super().__init__(problem)
        self.name = name
        self._function = function
        self._waiting: list[Placement] | None = None

    def ask(self, count: int) -> list[Placement]:
        if self._waiting is None:
            self._waiting = list(dict.fromkeys(self._function(self.problem)))
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        pass
