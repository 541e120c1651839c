"""A callback for Hugging Face's Trainer that fits the model on the first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from transformers import TrainerCallback

from retape.api import Fit, fit
from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike
from retape.integrations.huggingface.fused_loss import is_fused, unfuse_loss
from retape.torch.compat.ranks import is_distributed
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.attach import attach, detach, is_attached, replicated, take_off, unwrapped


class FitCallback(TrainerCallback):
    """Fits the model on the Trainer's first batch: `Trainer(..., callbacks=[FitCallback(budget="20GiB")])`.

    Takes the arguments of `retape.fit`. The fit runs inside the first training step, with the Trainer's own autocast and inputs.
    `fitted` is the Fit, None before the first step. It is removed when training ends or begins again.
    """

    # Models with a fit or waiting for one, and their callback.
    owners: ClassVar[WeakKeyDictionary[nn.Module, ref[FitCallback]]] = WeakKeyDictionary()

    def __init__(self, *, budget: BudgetLike, **options: Any) -> None:
        self._budget, self._options = budget, options
        self._optimizer: Any = None
        self._waiting: nn.Module | None = None
        self._managed: nn.Module | None = None
        self.fitted: Fit | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()  # no on_train_end came if an exception ended the last run
        self.fitted = None
        model = unwrapped(kwargs["model"])
        _leave_others(model)
        if is_distributed():
            raise InvalidInput(
                "FitCallback fits in one process. Under several, call retape.fit on the model before training."
            )
        if args.n_gpu > 1:
            raise replicated(type(model).__name__)
        LIBRARIES.check_model(model)
        optimizer = kwargs.get("optimizer")
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        attach(model, self._first_call)
        self._waiting = model
        self._managed, self.owners[model] = model, ref(self)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        """Restore the model as it was before training; `fitted` keeps its record."""
        if self._waiting is not None:
            detach(self._waiting)
            self._waiting = None
        if self.fitted is not None:
            self.fitted.remove()  # does nothing the second time, so a later fit stays
        if self._managed is not None:
            self.owners.pop(self._managed, None)
            self._managed = None

    def _first_call(
        self, model: nn.Module, plain_call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Fit on the arguments of the first training call, then make that call."""
        if not model.training:
            return plain_call(*arguments, **keywords)
        if arguments:
            raise InvalidInput("FitCallback needs the batch as keyword arguments, as the Trainer gives it.")
        detach(model)
        self._waiting = None
        options = {"optimizer": self._optimizer, "step": _loss_of_model, **self._options}
        self.fitted = fit(model, keywords, budget=self._budget, **options)
        if not is_attached(model) and not self.fitted.record.fused_loss:
            self.owners.pop(model, None)  # the plan keeps everything: nothing to remove later
        return model(**keywords)


def _leave_others(model: nn.Module) -> None:
    """Remove the fit of another callback whose run an exception ended."""
    owner = FitCallback.owners.pop(model, None)
    if owner is None:
        return
    other = owner()
    if other is not None:
        other._leave()
        return
    if is_attached(model):  # the callback was deleted, and its fit is still attached
        take_off(model, {"": model})
    if is_fused(model):
        unfuse_loss(model)


def _loss_of_model(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the loss as the Trainer reads it from a model's output; a model called without labels returns none."""
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise InvalidInput(
        f"The Trainer called {type(model).__name__} with {', '.join(batch)}, and it returned no loss: the Trainer computes it "
        "itself (label_smoothing_factor, compute_loss_func or a compute_loss of its own), where a callback does not see it. Call "
        "retape.fit before training, with step=lambda model, batch: trainer.compute_loss(model, dict(batch)), and leave FitCallback out."
    )
