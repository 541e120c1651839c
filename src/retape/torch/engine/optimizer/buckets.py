"""One step of an optimizer for some of its parameters, by the optimizer's own code.

The step runs with the parameter groups narrowed to those parameters. An optimizer that updates each parameter from its own gradient and
state alone then has the bits of one step over all of them; others are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from retape.core.errors import InvalidInput
from retape.torch.compat import hook_internals

# Their step updates each parameter from its own gradient and state alone, whichever others are in the group.
_KNOWN = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_DECLARED = "updates_each_parameter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are updated together, for each parameter group, and their bytes, of states or of gradients."""

    groups: tuple[tuple[Tensor, ...], ...]
    nbytes: int

    @classmethod
    def of(cls, optimizer: Optimizer, parameters: Collection[Tensor], nbytes: int) -> Bucket:
        """Return these parameters as a bucket of an optimizer."""
        wanted = set(map(id, parameters))
        groups = [tuple(p for p in group["params"] if id(p) in wanted) for group in optimizer.param_groups]
        return cls(groups=tuple(groups), nbytes=nbytes)

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.groups for parameter in group]


class BucketStep:
    """The step of an optimizer's class, for one bucket at a time; `flag` is the option of `fit` that asked for it."""

    def __init__(self, optimizer: Optimizer, flag: str) -> None:
        self._optimizer, self._flag = optimizer, flag
        self._own_step: Callable[..., Any] = hook_internals.own_step(optimizer)

    def __call__(self, bucket: Bucket) -> None:
        with self._narrowed(bucket):
            self._own_step(self._optimizer)

    @contextmanager
    def _narrowed(self, bucket: Bucket) -> Iterator[None]:
        """Let the parameter groups have the parameters of a bucket only; raise if the step changes anything else of them."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        settings = [plain_settings(group) for group in groups]
        try:
            for group, parameters in zip(groups, bucket.groups, strict=True):
                group["params"] = list(parameters)
            yield
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        if settings != [plain_settings(group) for group in groups]:
            raise InvalidInput(
                f"{type(self._optimizer).__name__}.step() changes its parameter groups, so that it cannot run in buckets. "
                f"Leave {self._flag} out."
            )


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain settings of a parameter group."""
    return {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}


def refuse_unknown(optimizer: Optimizer, what: str, flag: str) -> None:
    """Raise InvalidInput for an optimizer whose step may not be divided by parameters; `what` cannot be done then."""
    kinds = tuple(getattr(torch.optim, name) for name in _KNOWN)
    kind = type(optimizer)
    if not isinstance(optimizer, kinds) or not (_has_step_of(kind, kinds) or getattr(kind, _DECLARED, False)):
        raise InvalidInput(
            f"{what}: the step of {kind.__name__} is not known to update each parameter by itself. "
            f"Known are {', '.join(_KNOWN)} of torch.optim. A subclass with a step of its own that does so says it with the class "
            f"attribute {_DECLARED} = True. Leave {flag} out."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise InvalidInput(f"{what}: the optimizer has differentiable=True. Leave that or {flag} out.")
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        raise InvalidInput(f"{what}: the optimizer has sharded parameters (DTensor). Leave {flag} out.")
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise InvalidInput(
            f"{what}: the optimizer has parameters on {', '.join(devices)}, and only one device is supported. "
            f"Make one optimizer for each device, and leave {flag} out."
        )


def _has_step_of(kind: Any, known: Sequence[Any]) -> bool:
    """True if a class takes its step, and what makes its states, from a class of torch.optim."""
    # PyTorch wraps `step` anew in each class.
    steps, starts = {inspect.unwrap(each.step) for each in known}, {each._init_group for each in known}
    return inspect.unwrap(kind.step) in steps and kind._init_group in starts
