"""Agreement between processes that train one model: rank 0 decides, and the slowest or fullest rank counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from retape.core.errors import InvalidInput, RetapeError

Value = TypeVar("Value")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def decided_by_first(make: Callable[[], Value]) -> Value:
    """Return rank 0's result on every rank; an error of rank 0 is raised on all of them."""
    if not is_distributed():
        return make()
    box: list[Value | _Failed | None] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box = [make()]
        except Exception as error:
            failure = error
            box = [_Failed(error if isinstance(error, RetapeError) else RetapeError(f"On rank 0: {error!r}"))]
    dist.broadcast_object_list(box, src=0)
    answer = box[0]
    if isinstance(answer, _Failed):
        raise failure or answer.error
    return answer  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Failed:
    error: RetapeError


def largest(value: int) -> int:
    """Return the largest of all ranks' values."""
    return max(of_all_ranks(value))


def of_all_ranks(value: Value) -> list[Value]:
    """Return the values of all ranks, in the order of the ranks."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def any_rank(value: bool) -> bool:
    """True if the value is true on any rank."""
    return largest(int(value)) > 0


def refuse_differing_ranks(names: Sequence[str], what: str) -> None:
    """Raise InvalidInput on every rank if the ranks have other regions, or call them in another order.

    One plan is made for all ranks: measured on each of them, decided by rank 0. Ranks that do not run the same steps would wait for
    each other's answers to different questions.
    """
    every = of_all_ranks(tuple(names))
    other = next((rank for rank, theirs in enumerate(every) if theirs != every[0]), None)
    if other is None:
        return
    raise InvalidInput(
        f"fit() plans once for all ranks, and they {what} different regions: rank 0 {_listed(every[0])}, rank {other} "
        f"{_listed(every[other])}. Fit each of these models in a process without a process group, save the "
        "fit, and apply() it on its rank; or wrap its blocks in retape.checkpoint."
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} ({shown})" if names else "none"
