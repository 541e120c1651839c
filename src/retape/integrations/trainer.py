"""Hugging Face's Trainer: a callback that fits the model on the first batch it trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from transformers import TrainerCallback

from retape.api import Fit, fit
from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike
from retape.torch.compat.ranks import is_distributed
from retape.torch.planning.attach import attach, detach, is_attached, replicated, take_off
from retape.torch.planning.discover import refuse_own_checkpointing
from retape.torch.planning.model_hash import unwrapped
from retape.torch.planning.variants.fused_loss import is_fused, unfuse_loss

_MANAGED: WeakKeyDictionary[nn.Module, ref[FitCallback]] = WeakKeyDictionary()  # models, and whose callback they have


class FitCallback(TrainerCallback):
    """`Trainer(..., callbacks=[FitCallback(budget="20GiB")])`: the first batch is profiled, and training goes on inside the budget.

    Takes what `retape.fit` takes. The fit happens inside the first training step, with the Trainer's own autocast and
    inputs; `fitted` is the Fit once it is there, and it is removed when training ends, or begins again.
    """

    def __init__(self, *, budget: BudgetLike, **options: Any) -> None:
        self._budget, self._options = budget, options
        self._optimizer: Any = None
        self._waiting: nn.Module | None = None
        self._managed: nn.Module | None = None
        self.fitted: Fit | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()  # a run that an exception ended, or that begins again with a smaller batch, was not told its end
        self.fitted = None
        model = unwrapped(kwargs["model"])
        _leave_others(model)
        if is_distributed():
            raise InvalidInput(
                "FitCallback fits in one process. Under several, call retape.fit on the model before training."
            )
        if args.n_gpu > 1:
            raise replicated(type(model).__name__)
        refuse_own_checkpointing(model)
        optimizer = kwargs.get("optimizer")
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        attach(model, self._first_call)
        self._waiting = model
        self._managed, _MANAGED[model] = model, ref(self)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        """The model as it was before training; the record stays."""
        if self._waiting is not None:
            detach(self._waiting)
            self._waiting = None
        if self.fitted is not None:
            self.fitted.remove()  # does nothing a second time, so nobody else's fit is taken off
        if self._managed is not None:
            _MANAGED.pop(self._managed, None)
            self._managed = None

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
        options = {"optimizer": self._optimizer, "step": _loss_of_model, **self._options}
        self.fitted = fit(model, keywords, budget=self._budget, **options)
        if not is_attached(model) and not self.fitted.record.fused_loss:
            _MANAGED.pop(model, None)  # nothing of ours is on it: whatever is later is not ours
        return model(**keywords)


def _leave_others(model: nn.Module) -> None:
    """A run with another callback that an exception ended has left the model to it: nobody else will ever take it off."""
    owner = _MANAGED.pop(model, None)
    if owner is None:
        return
    other = owner()
    if other is not None:
        other._leave()
        return
    if is_attached(model):  # the callback is gone, and what it did is not
        take_off(model, {"": model})
    if is_fused(model):
        unfuse_loss(model)


def _loss_of_model(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss as the Trainer takes it from a model; without labels among its arguments there is none."""
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise InvalidInput(
        f"The Trainer called {type(model).__name__} with {', '.join(batch)}, and it returned no loss: the Trainer computes it "
        "itself (label_smoothing_factor, compute_loss_func or a compute_loss of its own), where a callback does not see it. Call "
        "retape.fit before training, with step=lambda model, batch: trainer.compute_loss(model, dict(batch)), and leave FitCallback out."
    )
