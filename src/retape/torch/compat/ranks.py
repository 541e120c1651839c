"""Agreement between processes that train one model: rank 0 decides, and the slowest or fullest rank counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from retape.core.errors import RetapeError

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
