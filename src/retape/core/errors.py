"""The tree of errors. Each carries its numbers as attributes and says what to do.

RetapeError
├── InvalidInput            an argument that cannot be meant (also a ValueError)
│   └── PlanFormatError     text that is not a plan, or is one of another version
├── PlanMismatch            a plan for another problem or model, or one that does not come to what it promises
├── BudgetTooSmall          no plan fits; carries the floor and what binds it
├── IllegalAction           a schedule broke the rules of the abstract machine
├── IntegrationFailed       an ODE solver could not go on; carries where, and what it had tried
└── RegionError             a region cannot give the gradient that plain autograd would
    ├── StateChanged        something a re-run must read has changed since the forward
    ├── RecomputeMismatch   a re-run saved other tensors than the forward did
    ├── UnsupportedTransform a region under a transform it cannot be right in
    └── OffloadError        a slot cannot be moved to the host, or back
"""

from __future__ import annotations


class RetapeError(Exception):
    """Base of every error that retape raises on purpose."""


class InvalidInput(RetapeError, ValueError):
    """An argument that cannot be meant; the message says which, its value, and what would do."""


class PlanFormatError(InvalidInput):
    """Text that is not a plan: malformed, truncated, or written by another version."""


class PlanMismatch(RetapeError):
    """A well-formed plan that belongs to another problem or model, or does not come to what it promises."""


class BudgetTooSmall(RetapeError):
    """No plan keeps the peak inside the budget."""

    # The numbers have defaults so that a raised error can be pickled across processes.
    def __init__(self, message: str, *, budget_bytes: int = 0, floor_bytes: int = 0, binding: str = "") -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.binding = binding


class IllegalAction(RetapeError):
    """A schedule asked the abstract machine for something that it cannot do."""

    def __init__(
        self, message: str, *, position: int = 0, action: object = None, reason: str = "", held: str = ""
    ) -> None:
        super().__init__(message)
        self.position = position
        self.action = action
        self.reason = reason
        self.held = held


class IntegrationFailed(RetapeError, RuntimeError):
    """An ODE solver could not go on."""

    def __init__(self, message: str, *, t: float = 0.0, size: float = 0.0, steps: int = 0) -> None:
        super().__init__(message)
        self.t = t
        self.size = size
        self.steps = steps


class RegionError(RetapeError, RuntimeError):
    """A region cannot give the gradient that plain autograd would."""


class StateChanged(RegionError):
    """Something that a re-run must read has changed since the forward."""


class RecomputeMismatch(RegionError):
    """A re-run saved other tensors than the forward did."""


class UnsupportedTransform(RegionError):
    """A region was called under a transform in which it cannot be right."""


class OffloadError(RegionError):
    """A slot cannot be moved to host memory, or back: a copy failed, or the host has no room for it."""

    def __init__(self, message: str, *, wanted_bytes: int = 0, limit_bytes: int = 0) -> None:
        super().__init__(message)
        self.wanted_bytes = wanted_bytes
        self.limit_bytes = limit_bytes
