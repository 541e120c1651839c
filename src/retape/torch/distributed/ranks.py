"""Ranks: the processes that work on one model together, as the object that a fit is handed; here for this process alone.

Whoever asks a question that all ranks must answer alike asks a `Ranks`, so that no module looks for process groups by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from retape.core.errors import InvalidInput

OTHER_MODELS = "Fit each of these models on its own, as the stages of a pipeline: group=False; or wrap its blocks in retape.checkpoint."
Value = TypeVar("Value")
Result = TypeVar("Result")


class Ranks(ABC):
    """Processes that run the same steps of one model, and decide alike.

    `members` are their ranks in the world, `number` the place of this one among them, `phase` what they are doing, for messages.
    """

    members: tuple[int, ...] = (0,)
    number = 0
    phase = "starting"

    @abstractmethod
    def agreed(self, value: Value, decide: Callable[[list[Value]], Result]) -> Result:
        """Return what `decide` makes of the values of all ranks, in their order, on the first of them.

        A RetapeError that it raises is raised on every rank.
        """

    @abstractmethod
    def attempt(self, run: Callable[[], Result]) -> Result:
        """Run something that contains collectives; if one rank runs out of memory, raise OutOfMemoryError on all of them.

        Exceptions of the same type on every rank are raised as they are. Any other ends the work of all ranks.
        """

    @property
    def is_alone(self) -> bool:
        return len(self.members) == 1

    def telling(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that tells what is done, and names the phase so."""

        def told(what: str) -> None:
            self.phase = what
            tell(what)

        return told

    def decided_by_first(self, make: Callable[[], Result]) -> Result:
        """Return the result of the first rank on every rank."""
        return self.agreed(None, lambda _: make())

    def of_all(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order."""
        return self.agreed(value, list)

    def largest(self, value: int) -> int:
        return self.agreed(value, max)

    def any(self, value: bool) -> bool:
        return self.agreed(value, any)

    def require_equal(self, what: str, value: Hashable, remedy: str) -> None:
        """Raise InvalidInput on every rank if the ranks have different values."""
        refuse_different(self.members, f"The ranks work on one plan, and they {what}", self.of_all(value), remedy)


def refuse_different(members: Sequence[int], what: str, values: Sequence[Hashable], remedy: str) -> None:
    """Raise InvalidInput if the values of the ranks differ; it names the first rank that has another one."""
    other = next((place for place, theirs in enumerate(values) if theirs != values[0]), None)
    if other is not None:
        raise InvalidInput(
            f"{what}: rank {members[0]} {_shown(values[0])}, rank {members[other]} {_shown(values[other])}. {remedy}"
        )


def _shown(value: object) -> str:
    if not isinstance(value, tuple):
        return repr(value)
    shown = ", ".join(map(str, value[:3])) + (", ..." if len(value) > 3 else "")
    return f"{len(value)} ({shown})" if value else "none"


class AloneRanks(Ranks):
    """Ranks of which there is only this process: every answer is its own."""

    def agreed(self, value: Value, decide: Callable[[list[Value]], Result]) -> Result:
        return decide([value])

    def attempt(self, run: Callable[[], Result]) -> Result:
        return run()


ALONE = AloneRanks()
