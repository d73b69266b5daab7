"""Polishing between two updates: the surroundings of the elites are searched, and the policy
imitates what is found (expert iteration)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from placewright.learning.imagination import Imagination
from placewright.learning.imitation import Elite
from placewright.learning.updater import one_thread
from placewright.measurement import Trial
from placewright.placement import Placement
from placewright.placers.local_search import LocalSearch


class ExactPolishing:
    """A local search on the times that placements take."""

    repeats = False
    """Whether a resumed run proposes again what it proposed since its checkpoint. A local search
    has no checkpoint; it starts anew, knowing all that was tried, and finds other ways."""

    def __init__(self, most: int, search: LocalSearch) -> None:
        """`most` placements are tried after each update."""
        self.search = search
        self._most = most
        self._left = 0
        self._begun = False
        self._unanswered: set[Placement] = set()
        self._resumed: Sequence[Trial] = ()
        self.exhausted = False
        """Whether there is nothing left to find."""

    @property
    def due(self) -> bool:
        return self._left > 0

    def renew(self, updates: int) -> None:
        """After so many updates: there may be polished again."""
        self._left = 0 if self.exhausted else self._most

    def resume(self, told: Sequence[Trial]) -> None:
        """What the journal holds, for when the search begins."""
        self._resumed = told

    def ask(self, count: int, elites: Sequence[Elite]) -> list[Placement]:
        """None when the search has come to its end."""
        if not self._begun:
            self._begun = True
            self.search.tell(self._resumed)
            self.search.tell([elite.trial for elite in elites])
            self._resumed = ()
        asked = self.search.ask(min(count, self._left))
        self._unanswered.update(asked)
        if not asked:
            self._left, self.exhausted = 0, True
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        """Of the samples as well: what the policy finds is worth a look around."""
        if not self._begun:
            return
        self.search.tell(trials)
        answered = {trial.placement for trial in trials} & self._unanswered
        self._left -= len(answered)
        self._unanswered -= answered

    def keep(self, trial: Trial) -> None:
        pass  # it is told

    def state(self) -> dict[str, Tensor]:
        return {}

    def take_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        self.renew(updates)


class EstimatedPolishing:
    """A local search on what placements are estimated to take, where times are noisy."""

    repeats = True

    def __init__(self, most: int, imagination: Imagination) -> None:
        """`most` placements are tried after each update."""
        self._most = most
        self._imagination = imagination
        self._updates: int | None = None
        self._left: list[Placement] = []
        self.exhausted = False

    @property
    def due(self) -> bool:
        return self._updates is not None or bool(self._left)

    def renew(self, updates: int) -> None:
        # Other estimates, other proposals.
        self._updates, self.exhausted = updates, False

    def resume(self, told: Sequence[Trial]) -> None:
        pass  # all it knows is in the checkpoint

    def ask(self, count: int, elites: Sequence[Elite]) -> list[Placement]:
        """All are found at once: what is found on estimates does not wait for answers."""
        if self._updates is not None:
            with one_thread():
                self._left = self._imagination.propose(self._most, self._updates)
            self._updates = None
        asked, self._left = self._left[:count], self._left[count:]
        self.exhausted = not asked
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        pass  # what counts is kept

    def keep(self, trial: Trial) -> None:
        self._imagination.tell(trial)

    def state(self) -> dict[str, Tensor]:
        return self._imagination.state()

    def take_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        self._imagination.take_state(tensors)
        self._left = []
        self.renew(updates)


Polishing = ExactPolishing | EstimatedPolishing
