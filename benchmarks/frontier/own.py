"""retape's rows: a fit at the peak of every peer, and at shares of the activations down to the floor.

Every fit is a call of `retape.fit`; its plan is then put on and taken off like any peer, so that all of them can take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.frontier.models import Case
from benchmarks.frontier.picture import Family
from benchmarks.frontier.ways import Skipped, Way, plain_way

import retape
from retape.core.units import format_bytes
from retape.errors import BudgetTooSmall, RetapeError
from retape.integrations.huggingface.fused_loss import fuse_loss_as, unfuse_loss
from retape.torch.planning.attach import put_on, take_off

FLOOR_MARGIN = 1.002  # factor on a measured floor: it varies by this much


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A fit to make: the name of its row, its options, and its bytes above weights and gradients."""

    name: str
    family: Family
    activation_bytes: int
    peer: str = ""

    @property
    def options(self) -> str:
        return "exact" if self.family is Family.RETAPE_EXACT else "all"

    @property
    def compiled(self) -> bool:
        return self.family is Family.RETAPE_COMPILED


@dataclass(frozen=True, slots=True, kw_only=True)
class BelowFloor(Skipped):
    """A budget below the floor, with the floor, both above weights and gradients."""

    floor_bytes: int


def fitted(case: Case, wish: Wish, fixed_bytes: int, fit: Callable[..., retape.Fit] = retape.fit) -> Way | Skipped:
    """Return one row; a budget below the floor, or a refusal of retape, is a skipped one."""
    try:
        found = fit(
            case.model,
            case.batch,
            step=case.step,
            budget=retape.Budget.activations(wish.activation_bytes),
            options=wish.options,
            compile=wish.compiled,
            progress=False,
        )
    except BudgetTooSmall as error:
        why = f"below the floor, which is {format_bytes(error.floor_bytes)} with everything counted"
        return BelowFloor(name=wish.name, why=why, floor_bytes=int((error.floor_bytes - fixed_bytes) * FLOOR_MARGIN))
    except RetapeError as error:
        return Skipped(name=wish.name, why=f"refused: {error}")
    return as_way(case, wish, found)


def as_way(case: Case, wish: Wish, found: retape.Fit) -> Way:
    """A fit that can be put on and taken off again and again."""
    executor, regions, fused = found._caller, found._regions, found.record.fused_loss
    found.remove()

    @contextmanager
    def on() -> Iterator[None]:
        if fused:
            fuse_loss_as(case.model, found.record)
        if executor is not None:
            put_on(case.model, regions, executor)
        try:
            yield
        finally:
            if executor is not None:
                take_off(case.model, regions)
            if fused:
                unfuse_loss(case.model)

    return Way(
        name=wish.name,
        family=wish.family,
        forward=plain_way(case).forward,
        on=on,
        same_kernels=not fused and not wish.compiled,
        about=_about(wish, found),
    )


def _about(wish: Wish, found: retape.Fit) -> dict[str, Any]:
    record = found.record
    kinds: dict[str, int] = {}
    for choice in record.assignment.choices:
        kind = (
            choice.option.value + (", input dropped" if choice.drop_input else "") + (", moved" if choice.moved else "")
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return {
        "at_the_peak_of": wish.peer,
        "budget_bytes": record.budget_bytes,
        "budget_activation_bytes": wish.activation_bytes,
        "promised_peak_bytes": record.plan.promised_peak_bytes,
        "promised_slowdown": record.promised_slowdown,
        "plan": record.plan.quality,
        "regions": kinds,
        "fused_loss": record.fused_loss,
        "fit_seconds": record.profile_seconds,
    }
