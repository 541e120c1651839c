"""The errors of a re-run that saved other tensors than the forward did.

They are also `torch.utils.checkpoint.CheckpointError`, and begin with its words, so that code written for PyTorch's own
checkpoint catches them.
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointError

from retape.core.errors import RecomputeMismatch

_REMEDY = (
    "The function does not do the same thing twice: look for randomness from another library, for Python state that it changes, "
    "for a branch that depends on values. retape.keep() records a decision, and check='values' finds the first tensor that differs.\n"
    "If the function is compiled and its shapes vary, the re-run may have used another compiled graph:\n"
    "  - Use torch._dynamo.mark_dynamic() to explicitly mark varying dimensions\n"
    "  - Call torch._C._dynamo.eval_frame._set_lru_cache(False) to disable LRU cache"
)


class RerunMismatch(RecomputeMismatch, CheckpointError):
    """A re-run saved other tensors than the forward did."""


def different_number(region: str, first: int, again: int, which: str) -> RerunMismatch:
    if which == "more":
        return RerunMismatch(
            "torch.utils.checkpoint: trying to save more tensors during recomputation than during the original forward pass. "
            f"Region {region} saved {first} tensors at first and at least {again} when it was run again. {_REMEDY}"
        )
    return RerunMismatch(
        "torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation. "
        f"Region {region} saved {first} tensors at first; when it was run again, number {again} was missing. {_REMEDY}"
    )


def different_metadata(region: str, index: int, first: tuple[Any, ...], again: tuple[Any, ...]) -> RerunMismatch:
    return RerunMismatch(
        "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.\n"
        f"Region {region}, tensor at position {index}:\n"
        f"saved metadata: {_text(first)}\nrecomputed metadata: {_text(again)}\n{_REMEDY}"
    )


def different_values(region: str, index: int) -> RerunMismatch:
    return RerunMismatch(
        f"Region {region} saved other values when it was run again: tensor {index} has the same shape but another checksum. {_REMEDY}"
    )


def _text(metadata: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("shape", "dtype", "device"), metadata, strict=True))
