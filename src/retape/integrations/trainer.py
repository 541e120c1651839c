"""Hugging Face's Trainer: a callback that fits the model on the first batch it trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from retape.api import Fit, fit
from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike
from retape.torch.attach import attach, detach
from retape.torch.discover import refuse_own_checkpointing
from retape.torch.fingerprint import unwrapped
from retape.torch.ranks import is_distributed


class FitCallback(TrainerCallback):
    """`Trainer(..., callbacks=[FitCallback(budget="20GiB")])`: the first batch is profiled, and training goes on inside the budget.

    Takes what `retape.fit` takes. The fit happens inside the first training step, with the Trainer's own autocast and
    inputs; `fitted` is the Fit once it is there, and it is removed when training ends.
    """

    def __init__(self, *, budget: BudgetLike, **options: Any) -> None:
        self._budget, self._options = budget, options
        self._optimizer: Any = None
        self._waiting: nn.Module | None = None
        self.fitted: Fit | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if is_distributed():
            raise InvalidInput(
                "FitCallback fits in one process. Under several, call retape.fit on the model before training."
            )
        model = unwrapped(kwargs["model"])
        refuse_own_checkpointing(model)
        optimizer = kwargs.get("optimizer")
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self._waiting = model
        attach(model, self._first_call)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._waiting is not None:
            detach(self._waiting)
            self._waiting = None
        if self.fitted is not None:
            self.fitted.remove()

    def _first_call(
        self, model: nn.Module, plain_call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Fit on what the model is about to be called with, then call it."""
        if not model.training:
            return plain_call(*arguments, **keywords)
        if arguments:
            raise InvalidInput("FitCallback needs the batch as keyword arguments, as the Trainer gives it.")
        detach(model)
        self._waiting = None
        options = {"optimizer": self._optimizer, **self._options}
        self.fitted = fit(model, keywords, budget=self._budget, **options)
        return model(**keywords)
