"""Proof that a partial re-run reproduces the bits of the forward, for one region and one recipe.

A recipe skips ops, so it is trusted only after the first partial re-run of that very region has refilled every dropped slot with the
bits that its forward saved: digests are taken in that forward and compared. A recipe that fails is not used again for the region, and
one line in the log says so. What guards the re-runs after that is in `recipe_mode.py`: every op must come with the traced op's arguments.
"""

from __future__ import annotations

import logging
from enum import Enum
from functools import cache

_LOG = logging.getLogger("retape")
_MOST_TRIES = (
    16  # executions that take digests for a recipe: a forward alone, or a pass that needs no slot, proves nothing
)


class Standing(Enum):
    """How far a recipe is trusted for one region."""

    TRIAL = "trial"  # steps whose gradients are thrown away: used without a comparison
    PENDING = "pending"
    PROVEN = "proven"
    REJECTED = "rejected"


class Proof:
    """The standing of one recipe for one region."""

    __slots__ = ("standing", "tries")

    def __init__(self, standing: Standing = Standing.PENDING) -> None:
        self.standing = standing
        self.tries = 0  # executions that took digests for it

    @property
    def is_pending(self) -> bool:
        return self.standing is Standing.PENDING

    def takes_digests(self) -> bool:
        """True if an execution that begins now is to take digests; not so for ever, where no re-run ever compares them."""
        if not self.is_pending or self.tries >= _MOST_TRIES:
            return False
        self.tries += 1
        return True

    @property
    def is_rejected(self) -> bool:
        return self.standing is Standing.REJECTED

    def diverged(self) -> None:
        """The re-run came with other ops, tensors or arguments than the recipe was made for."""
        self.standing = Standing.REJECTED

    def judge(self, name: str, partial: set[int], whole: set[int], *, drifts: bool) -> None:
        """Accept or reject, given the slots in which the partial and then a whole re-run differed from the forward.

        `drifts`: the whole re-run differed in floating-point numbers.
        """
        if partial <= whole:
            self.standing = Standing.PROVEN
            if drifts:
                _say_unrepeatable(name)
            return
        self.standing = Standing.REJECTED
        _LOG.warning(
            "retape: region %s: a re-run of a part of its ops did not reproduce tensors %s of its forward. "
            "It is run again as a whole from now on.",
            name,
            sorted(partial - whole),
        )


@cache
def _say_unrepeatable(name: str) -> None:
    _LOG.warning(
        "retape: region %s does not reproduce its own bits: it runs nondeterministic ops, with or without recomputation. "
        "torch.use_deterministic_algorithms(True) makes it repeatable.",
        name,
    )
