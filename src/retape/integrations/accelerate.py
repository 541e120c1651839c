"""Training loops with Hugging Face's Accelerate: a loss function that fits the prepared model in its first call.

Nothing is imported from accelerate: what `Accelerator.prepare` returns is taken as it is, and the loop stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from retape.api import Fit
from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike
from retape.integrations.first_step import FittedSteps, Lengths, budget_as_out_of_memory
from retape.torch.adaptive.manager import Adaptive
from retape.torch.measure.step_function import StepFunction, default_step

__all__ = ["FittedLoss"]


class FittedLoss:
    """The loss of a batch, inside a budget: `loss = FittedLoss(model, optimizer, budget="20GiB")`, then `loss(batch)` in the loop.

    `model` and `optimizer` are those that `Accelerator.prepare` returned. `step(model, batch)` returns the loss; without it the
    output's `.loss` is taken. The other arguments are those of `retape.fit`. The first call in training fits; batches that are larger
    than the first run under a budget at run time. Used in a `with` statement, the model is at the end as it was; `remove()` does the same.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        budget: BudgetLike,
        step: StepFunction | None = None,
        lengths: Lengths | str = Lengths.ADAPTIVE,
        **options: Any,
    ) -> None:
        self._model, self._optimizer, self._step = model, optimizer, step or default_step
        self._steps = FittedSteps(budget, lengths=lengths, **options)
        if self._steps.lengths is Lengths.LONGEST:
            raise InvalidInput(
                "lengths='longest' needs the Hugging Face Trainer's data. Call fit(batch) with the longest one."
            )
        self._steps.take_over(model)

    @property
    def fitted(self) -> Fit | None:
        return self._steps.fitted

    @property
    def live(self) -> Adaptive | None:
        return self._steps.live

    def metrics(self) -> dict[str, float]:
        """Return budget, peak, slowdown and re-runs, for `accelerator.log`."""
        return self._steps.metrics()

    def fit(self, batch: Any) -> Fit:
        """Fit on a batch before the first call, such as the longest one."""
        with budget_as_out_of_memory():
            return self._steps.fit(self._model, batch, self._step, optimizer=self._optimizer)

    def __call__(self, batch: Any) -> Any:
        if not self._model.training:
            return self._step(self._model, batch)
        with budget_as_out_of_memory():
            return self._steps.loss(self._model, batch, self._step, optimizer=self._optimizer)

    def remove(self) -> None:
        """Restore the model as it was."""
        self._steps.remove()

    def __enter__(self) -> FittedLoss:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
