"""The tree of errors under its public name; it is defined and drawn in `retape.core.errors`."""

from retape.core.errors import (
    BatchTooLarge,
    BudgetTooSmall,
    IllegalAction,
    IntegrationFailed,
    InvalidInput,
    OffloadError,
    PlanFormatError,
    PlanMismatch,
    RankFailed,
    RecomputeMismatch,
    RegionError,
    RetapeError,
    StateChanged,
    UnsupportedTransform,
)

__all__ = [
    "BatchTooLarge",
    "BudgetTooSmall",
    "IllegalAction",
    "IntegrationFailed",
    "InvalidInput",
    "OffloadError",
    "PlanFormatError",
    "PlanMismatch",
    "RankFailed",
    "RecomputeMismatch",
    "RegionError",
    "RetapeError",
    "StateChanged",
    "UnsupportedTransform",
]
