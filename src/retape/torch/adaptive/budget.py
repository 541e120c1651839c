"""What a user asks for: `adaptive` checks its arguments and makes a live budget. How that works is in `manager.py`."""

from __future__ import annotations

from torch import nn

from retape.core.errors import InvalidInput
from retape.core.problem import EXACT, Budget, BudgetKind, BudgetLike, OptionSet
from retape.torch.adaptive.manager import Adaptive


def adaptive(
    model: nn.Module | None = None,
    *,
    budget: BudgetLike,
    options: OptionSet | str = EXACT,
    progress: bool = False,
    host: bool | None = None,
) -> Adaptive:
    """A live budget: regions start held, and are dropped and run again only as far as the bytes demand.

    Without a model, enter it around each step: every `retape.checkpoint` inside is under the budget. With a model, its
    regions are found as `retape.fit` finds them and it stays attached until `.remove()`, or the end of a `with` block;
    entered again, it is attached again. With options=ALL the loss of a Hugging Face causal language model is computed in
    slices, without whole logits. With `progress` a line on the terminal follows the steps. With `host` what is dear to make
    again is copied to the host while the lane is free; None means where the device has a memory of its own.
    """
    fuse = OptionSet.of(options) is OptionSet.ALL
    if model is not None and not isinstance(model, nn.Module):
        raise InvalidInput(
            f"adaptive() got a {type(model).__name__} as its model; give a torch.nn.Module, or leave it out."
        )
    asked = Budget.of(budget)
    if asked.kind is BudgetKind.FRACTION:
        raise InvalidInput(
            f"budget={asked.share} is a fraction of what a step takes that stores everything, and adaptive measures no such step. "
            "Give bytes ('20GiB'), Budget.activations or 'auto'."
        )
    return Adaptive(model, asked, progress=progress, host=host, fuse=fuse)
