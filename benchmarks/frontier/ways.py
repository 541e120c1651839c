"""One way to run a step: how it is put on a model, how its forward runs, and which kernels it uses. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from benchmarks.frontier.models import Case
from benchmarks.frontier.picture import Family
from torch import Tensor

Forward = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`on()` puts it on the model and takes it off again; `forward()` gives the loss. `about` goes into the record.

    A way that is `same_kernels` must give the gradients of plain autograd bit for bit; of the others a tolerance is asked.
    """

    name: str
    family: Family
    forward: Forward
    on: Callable[[], AbstractContextManager[Any]] = nullcontext
    same_kernels: bool = True
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A way that is not there on this machine or for this model, and why."""

    name: str
    why: str


def plain_way(case: Case) -> Way:
    """PyTorch as it is: everything that autograd saves is kept."""
    return Way(name="plain", family=Family.PLAIN, forward=lambda: case.step(case.model, case.batch))
