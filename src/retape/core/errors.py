"""The tree of errors. Each has its numbers as attributes and says what to do.

RetapeError
├── InvalidInput            an invalid argument (also a ValueError)
│   └── PlanFormatError     text that is not a plan, or one of another version
├── PlanMismatch            a plan for another problem or model, or one whose promise does not hold
├── BudgetTooSmall          no plan fits; has the floor and what determines it
│   └── BatchTooLarge       the same inside a trainer, which may try a smaller batch (also a RuntimeError)
├── RankFailed              one of several processes failed, was killed, or does something else; has its rank and the phase
├── IllegalAction           a schedule broke the rules of the abstract machine
├── IntegrationFailed       an ODE solver cannot continue; has the time, step size and number of steps
└── RegionError             a region cannot give the gradient that plain autograd would
    ├── StateChanged        state that a re-run reads has changed since the forward
    ├── RecomputeMismatch   a re-run saved other tensors than the forward did
    ├── UnsupportedTransform a region under a transform that it does not support
    └── OffloadError        a slot cannot be moved to the host, or back
"""

from __future__ import annotations


class RetapeError(Exception):
    """Base of every error that retape raises on purpose."""


class InvalidInput(RetapeError, ValueError):
    """Invalid argument; the message names it, its value and what to give."""


class PlanFormatError(InvalidInput):
    """Text that is not a plan: malformed, truncated, or written by another version."""


class PlanMismatch(RetapeError):
    """A well-formed plan that belongs to another problem or model, or whose promise does not hold."""


class BudgetTooSmall(RetapeError):
    """No plan keeps the peak inside the budget."""

    # The numbers have defaults so that a raised error can be pickled across processes.
    def __init__(self, message: str, *, budget_bytes: int = 0, floor_bytes: int = 0, binding: str = "") -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.binding = binding


class BatchTooLarge(BudgetTooSmall, RuntimeError):
    """No plan for a trainer's batch fits. The message contains " out of memory.", by which trainers recognise such errors."""


class RankFailed(RetapeError, RuntimeError):
    """One of several processes that work together failed or was killed; every one of them raises this."""

    def __init__(self, message: str, *, rank: int = 0, phase: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase


class IllegalAction(RetapeError):
    """A schedule contains an action that the abstract machine does not allow."""

    def __init__(
        self, message: str, *, position: int = 0, action: object = None, reason: str = "", held: str = ""
    ) -> None:
        super().__init__(message)
        self.position = position
        self.action = action
        self.reason = reason
        self.held = held


class IntegrationFailed(RetapeError, RuntimeError):
    """An ODE solver cannot continue."""

    def __init__(self, message: str, *, t: float = 0.0, size: float = 0.0, steps: int = 0) -> None:
        super().__init__(message)
        self.t = t
        self.size = size
        self.steps = steps


class RegionError(RetapeError, RuntimeError):
    """A region cannot give the gradient that plain autograd would."""


class StateChanged(RegionError):
    """State that a re-run reads has changed since the forward."""


class RecomputeMismatch(RegionError):
    """A re-run saved other tensors than the forward did."""


class UnsupportedTransform(RegionError):
    """A region was called under a transform that it does not support."""


class OffloadError(RegionError):
    """A slot cannot be copied to the host or a disk, or back."""

    def __init__(self, message: str, *, wanted_bytes: int = 0, limit_bytes: int = 0) -> None:
        super().__init__(message)
        self.wanted_bytes = wanted_bytes
        self.limit_bytes = limit_bytes
