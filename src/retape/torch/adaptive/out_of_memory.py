"""Errors and warnings for when the allocator has nothing left.

A region's first run is undone (`Snapshot.undo_forward`), so that it can be run again; a re-run undoes itself. Elsewhere, in a backward
kernel or an optimizer, there is nothing to run again: the error says what to do.
"""

from __future__ import annotations

from retape.core.errors import BudgetTooSmall
from retape.core.units import format_bytes


def nothing_left(
    what: str,
    *,
    limit_bytes: int,
    now_bytes: int,
    need_bytes: int,
    base_bytes: int,
    collective_bytes: int = 0,
    error: BaseException | None = None,
) -> BudgetTooSmall:
    """Everything that can be dropped is dropped, and it is still too much."""
    why = f" The allocator said: {str(error).splitlines()[0]}" if error is not None else ""
    if collective_bytes:
        why += (
            f" Regions that run a collective hold {format_bytes(collective_bytes)} and are never dropped, because one rank alone cannot "
            "run them again; retape.fit plans for all ranks together."
        )
    floor = now_bytes + need_bytes
    return BudgetTooSmall(
        f"{what} needs {format_bytes(need_bytes)} beside {format_bytes(now_bytes)} that cannot be dropped "
        f"(weights, gradients and what else was there before: {format_bytes(base_bytes)}), which passes the budget of "
        f"{format_bytes(limit_bytes)}.{why} Raise the budget to at least {format_bytes(floor)}, use a smaller batch, or "
        "smaller regions.",
        budget_bytes=limit_bytes,
        floor_bytes=floor,
        binding=what,
    )


def took_more(what: str, *, peak_bytes: int, limit_bytes: int) -> str:
    """A warning where there was no way to know: what a region saves depends on the data, and no allocator refuses it."""
    return (
        f"{what} took more than any like it before, by what was measured about {format_bytes(peak_bytes)} in all, which passes the budget "
        f"of {format_bytes(limit_bytes)}. Bytes that depend on the data are known only once they are there; from now on there is room for "
        "as many. If the budget must never be passed, begin with the largest batch, or use a smaller budget."
    )


def after_collective(name: str, *, limit_bytes: int, now_bytes: int, error: BaseException) -> BudgetTooSmall:
    """Out of memory in a region that has started a collective: to start it again would pair with another one of the other ranks."""
    return BudgetTooSmall(
        f"Region {name} ran out of memory after it had started a collective, with {format_bytes(now_bytes)} counted of a budget of "
        f"{format_bytes(limit_bytes)}: {str(error).splitlines()[0]} The other ranks do not run it again, so it cannot be run again here. "
        "Lower the budget, so that more is dropped before it, use a smaller batch, or retape.fit, which plans for all ranks together.",
        budget_bytes=limit_bytes,
        floor_bytes=now_bytes,
        binding=name,
    )


def elsewhere(error: BaseException, *, limit_bytes: int, now_bytes: int) -> BudgetTooSmall:
    """Out of memory where no region runs: nothing can be run again, and gradients may hold a part of the step."""
    return BudgetTooSmall(
        f"Out of memory outside any region's forward or re-run (a backward kernel, the loss or the optimizer), with "
        f"{format_bytes(now_bytes)} counted of a budget of {format_bytes(limit_bytes)}: {str(error).splitlines()[0]} "
        "Some .grad may hold a part of this step: call zero_grad() and repeat every step that was accumulated since the last one. "
        "Lower the budget, so that more room is left beside the regions, or use a smaller batch.",
        budget_bytes=limit_bytes,
        floor_bytes=now_bytes,
        binding="outside regions",
    )
