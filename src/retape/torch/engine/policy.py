"""Treatment of a region's slots and inputs: frozen values that hash, compare and print; and the proof of a recipe."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from retape.core.errors import InvalidInput

if TYPE_CHECKING:
    from retape.core.assignment import Passing
    from retape.torch.engine.host.spill import SpillFolder
    from retape.torch.engine.recipe_mode import Recipe

_LOG = logging.getLogger("retape")


class Check(Enum):
    """Extent to which a re-run is compared with the first run."""

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
    """Treatment of inputs that another region made: held, or dropped and refilled by running that region again.

    `LINK` runs the maker to its output alone. `SEGMENT` refills the maker's own slots in the same run, for a segment of several
    regions, whose backward passes follow each other.
    """

    HOLD = "hold"
    LINK = "link"
    SEGMENT = "segment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Treatment of a region's slots and inputs.

    Slots: `hold_all`, or those with the numbers `held`, are held; those with the numbers `moved` go to the host, and return when
    backward is `ahead` regions away; the others are dropped. With `reuse_inputs` a slot that is an input of the region, held anyway,
    is never refilled by a re-run. The drop-in leaves it off, because PyTorch's checkpoint runs its function again even then, and code
    may count on that.

    Inputs: `inputs` says whether those that another region made are dropped; only outputs of a `linkable` region can be. `stage` is
    the region's number in a plan, and `passing` the treatment of the regions, by their numbers, that are run again to make this one's
    dropped input; without it `inputs` decides. Held inputs with the numbers `moved_inputs` among the call's tensors go to the host,
    with a `disk` on to files there; of those with the numbers `sharded_inputs` each rank of the process group `replicas`, on which they
    are equal, holds a part.

    Re-runs: a `recipe` says which ops a re-run need not run; `proof` is whether that has been shown to give the same bits for this
    region, and without one each execution proves it for itself. Parts that treat rows independently are run in `tiles` slices. The
    results of the first `hold_collectives` collectives are held, and a re-run does not start those.
    """

    hold_all: bool = False
    held: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    ahead: int = 1
    reuse_inputs: bool = True
    inputs: Inputs = Inputs.HOLD
    moved_inputs: frozenset[int] = frozenset()
    disk: SpillFolder | None = None
    linkable: bool = True
    stage: int = -1
    passing: tuple[Passing, ...] = ()
    recipe: Recipe | None = None
    proof: Proof | None = field(default=None, compare=False)
    tiles: int = 1
    hold_collectives: int = 0
    sharded_inputs: frozenset[int] = frozenset()
    replicas: Any = field(default=None, compare=False)

    @property
    def moves(self) -> bool:
        return bool(self.moved or self.moved_inputs)


DROP = Policy()
DROP_IN = Policy(reuse_inputs=False, linkable=False)
HOLD = Policy(hold_all=True)


# --- proof that a recipe reproduces the forward's bits --------------------------------------------------------------


class ProofState(Enum):
    """Trust in a recipe for one region."""

    TRIAL = "trial"  # steps whose gradients are thrown away: used without a comparison
    PENDING = "pending"
    PROVEN = "proven"
    REJECTED = "rejected"


class Proof:
    """Evidence that one recipe reproduces the bits of one region's forward.

    A recipe skips ops, so it is trusted only after the first partial re-run of that very region has refilled every dropped slot with
    the bits that its forward saved: digests are taken in that forward and compared. A recipe that fails is not used again for the
    region, and one line in the log says so. Later re-runs are guarded by `recipe_mode.py`: every op must come with the traced op's
    arguments.
    """

    __slots__ = ("state", "tries")

    def __init__(self, state: ProofState = ProofState.PENDING) -> None:
        self.state = state
        self.tries = 0  # executions that took digests for it

    @property
    def is_pending(self) -> bool:
        return self.state is ProofState.PENDING

    @property
    def is_rejected(self) -> bool:
        return self.state is ProofState.REJECTED

    def reject(self) -> None:
        """Stop using the recipe: the re-run came with other ops, tensors or arguments than it was made for."""
        self.state = ProofState.REJECTED

    def accept(self) -> None:
        """Use the recipe from now on without a comparison."""
        self.state = ProofState.PROVEN

    def judge(self, name: str, partial: set[int], whole: set[int], *, drifts: bool) -> None:
        """Accept or reject, given the slots in which the partial and then a whole re-run differed from the forward.

        `drifts`: the whole re-run differed in floating-point numbers.
        """
        if partial <= whole:
            self.accept()
            if drifts:
                _warn_unrepeatable(name)
            return
        self.reject()
        _LOG.warning(
            "retape: region %s: a re-run of a part of its ops did not reproduce tensors %s of its forward. "
            "It is run again as a whole from now on.",
            name,
            sorted(partial - whole),
        )


@cache
def _warn_unrepeatable(name: str) -> None:
    _LOG.warning(
        "retape: region %s does not reproduce its own bits: it runs nondeterministic ops, with or without recomputation. "
        "torch.use_deterministic_algorithms(True) makes it repeatable.",
        name,
    )
