"""What a region does with its slots and inputs: frozen values that hash, compare and print."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from retape.core.errors import InvalidInput

if TYPE_CHECKING:
    from retape.torch.engine.proof import Proof
    from retape.torch.engine.select import Recipe


class Check(Enum):
    """How far a re-run is compared with the first run."""

    OFF = "off"
    METADATA = "metadata"
    VALUES = "values"

    @classmethod
    def of(cls, value: Check | str) -> Check:
        try:
            return cls(value)
        except ValueError:
            raise InvalidInput(f"check={value!r} is not known; give 'off', 'metadata' or 'values'.") from None


class Inputs(Enum):
    """What becomes of a region's inputs that another region made: held, or dropped and refilled by running that one again.

    `LINK` runs the maker to its output alone; `SEGMENT` refills the maker's own slots in the same run, which is what a
    segment of several regions wants: its regions are reversed one right after the other.
    """

    HOLD = "hold"
    LINK = "link"
    SEGMENT = "segment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What becomes of one region that is run again on the way to another's input.

    `fill_all` refills its slots, `fill` those with these numbers; with `hold_input` its own input is held from now on, so
    that it can be run again without those before it.
    """

    stage: int
    fill_all: bool = False
    fill: frozenset[int] = field(default_factory=frozenset)
    hold_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which slots to hold (`hold_all`, or those whose number is in `held`), which to move to the host (`moved`, back when backward
    is `ahead` regions away), and what to do with the inputs.

    With `reuse_inputs` a slot that is an input of the region, held anyway, is never refilled by a re-run. The drop-in
    leaves it off, because PyTorch's checkpoint runs its function again even then, and code may count on that.
    A `recipe` says which ops a re-run need not run, given what is held; `proof` is its standing for this region, and without one each
    execution proves it for itself. Only the outputs of a `linkable` region can be dropped
    by the one that takes them. `stage` is the region's number in a plan, and `way` says what becomes of the regions, by
    their numbers, that are run again to make this one's dropped input; without it `inputs` decides. Of the inputs that are
    held, those with the numbers `moved_inputs` among the call's tensors go to the host until then. Parts of the region that
    treat rows independently are run in so many `tiles` (`tiling.py`).
    """

    hold_all: bool = False
    held: frozenset[int] = field(default_factory=frozenset)
    inputs: Inputs = Inputs.HOLD
    reuse_inputs: bool = True
    recipe: Recipe | None = None
    proof: Proof | None = field(default=None, compare=False)
    linkable: bool = True
    stage: int = -1
    way: tuple[Way, ...] = ()
    moved: frozenset[int] = field(default_factory=frozenset)
    moved_inputs: frozenset[int] = field(default_factory=frozenset)
    ahead: int = 1
    tiles: int = 1

    @property
    def moves(self) -> bool:
        return bool(self.moved or self.moved_inputs)

    def holds(self, index: int) -> bool:
        return self.hold_all or index in self.held


DROP = Policy()
DROP_IN = Policy(reuse_inputs=False, linkable=False)
HOLD = Policy(hold_all=True)
