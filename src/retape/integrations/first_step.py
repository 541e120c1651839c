"""The hook that all trainers share: a fit inside their first training step, on the loss that they compute themselves.

A trainer's adapter calls `FittedSteps.loss` wherever the trainer computes the loss of a batch. The first call fits, and so does one
with another model, or before which weights were frozen or unfrozen. Other ones compare the batch with the fitted one, and give larger
batches a budget at run time. What belongs to one trainer (where its steps and loggers are) is in that trainer's module.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from retape.api import Fit, fit
from retape.core.errors import BatchTooLarge, BudgetTooSmall, InvalidInput
from retape.core.problem import EXACT, Budget, BudgetLike, OptionSet
from retape.integrations.trainer_state import (
    FittedModel,
    OwnCheckpointing,
    TensorSize,
    is_within,
    plain_state_restored,
    sizes_of,
)
from retape.torch.adaptive.manager import Adaptive
from retape.torch.adaptive.tuning import AdaptiveTuning
from retape.torch.measure.sandbox import InitialGradients, in_own_context, sandboxed
from retape.torch.measure.step_function import StepFunction
from retape.torch.planning.attach import unwrapped

ComputeLoss = Callable[[nn.Module, Any], Any]  # a trainer's own: returns the loss, or a tuple or dict that contains it
_LOG = logging.getLogger("retape")
_GIVEN_BY_TRAINERS = ("model", "batch", "budget", "step")
_ARGUMENTS_OF_FIT = tuple(name for name in inspect.signature(fit).parameters if name not in _GIVEN_BY_TRAINERS)


class Lengths(Enum):
    """Treatment of batches that are larger than the fitted one."""

    ADAPTIVE = "adaptive"  # the first batch is fitted, larger ones run under a budget at run time
    LONGEST = "longest"  # the longest batch of the data is fitted

    @classmethod
    def of(cls, value: Lengths | str) -> Lengths:
        try:
            return cls(value)
        except ValueError:
            raise InvalidInput(f"lengths={value!r} is neither 'adaptive' nor 'longest'.") from None


class FittedSteps:
    """Training steps inside a budget: the first is fitted, and larger ones get a budget at run time over the plan.

    `options` are those of `retape.fit`. `fitted` is the Fit, None before the first step; `live` the budget at run time, None before that;
    `is_live` says whether it runs the current step. It learns from steps of the fitted batch that are only measured.
    """

    def __init__(self, budget: BudgetLike, *, lengths: Lengths | str = Lengths.ADAPTIVE, **options: Any) -> None:
        if OptionSet.OPTIMIZER_IN_BACKWARD in OptionSet.of(options.get("options", EXACT)):
            raise InvalidInput(
                "OPTIMIZER_IN_BACKWARD is for a loop of your own: trainers clip, scale or accumulate gradients. Leave it out, or call "
                "retape.fit before such a loop."
            )
        unknown = [name for name in options if name not in _ARGUMENTS_OF_FIT]
        if unknown:
            raise InvalidInput(
                f"Unknown argument {unknown[0]!r}. Beside budget and lengths, give those of retape.fit: {', '.join(_ARGUMENTS_OF_FIT)}."
            )
        self._budget, self._options = Budget.of(budget), options
        self.lengths = Lengths.of(lengths)
        self.fitted: Fit | None = None
        self.live: Adaptive | None = None
        self._is_removed = False
        self._sizes: list[TensorSize] = []
        self._fitted_model: FittedModel | None = None
        self._other_reruns = 0  # of steps that measure for the budget at run time
        self.is_live = False
        self._taken_over: OwnCheckpointing | None = None

    def take_over(self, model: nn.Module) -> OwnCheckpointing:
        """Switch off the checkpointing that the model has of its own, until `remove`."""
        self._put_back()
        self._taken_over = OwnCheckpointing(unwrapped(model))
        return self._taken_over

    def loss(
        self, model: nn.Module, batch: Any, compute: ComputeLoss, *, optimizer: Any = None, keepers: Iterable[Any] = ()
    ) -> Any:
        """Return `compute(model, batch)`, inside the budget; the first time it is fitted.

        `keepers` are objects, such as the trainer, whose counters and metrics `compute` changes: the fit leaves them as they were.
        """
        self.prepare(model, batch, compute, optimizer=optimizer, keepers=keepers)
        return compute(model, batch)

    def prepare(
        self, model: nn.Module, batch: Any, compute: ComputeLoss, *, optimizer: Any = None, keepers: Iterable[Any] = ()
    ) -> None:
        """Do what `loss` does before it computes the loss: fit the first time, and choose the plan alone or the budget at run time."""
        if not torch.is_grad_enabled():
            return
        if self._is_removed:
            raise InvalidInput(
                "This budget was removed from the model, so nothing holds the step inside it. Make a new one for further training."
            )
        if self._fitted_model is not None and not self._fitted_model.is_still(unwrapped(model)):
            self._detach()
            self.fitted = self.live = self._fitted_model = None
        if self.fitted is None:
            self.fit(model, batch, compute, optimizer=optimizer, keepers=keepers)
        self._choose(batch)

    def fit(
        self, model: nn.Module, batch: Any, compute: ComputeLoss, *, optimizer: Any = None, keepers: Iterable[Any] = ()
    ) -> Fit:
        """Fit on a batch, and leave model, batch and keepers as they were."""
        self._other_reruns = 0
        options = {"optimizer": optimizer, **self._options}
        with plain_state_restored(keepers) as restore:

            def step(model: nn.Module, batch: Any) -> Tensor:
                restore()
                return loss_in(compute(model, batch))

            fitted = fit(model, batch, budget=self._budget, step=step, **options)
            if self.lengths is Lengths.ADAPTIVE and not fitted.record.devices:
                self._teach_live(fitted, model, batch, step, optimizer)
        self.fitted, self._sizes, self._fitted_model = fitted, sizes_of(batch), FittedModel(unwrapped(model))
        return fitted

    def _teach_live(self, fitted: Fit, model: nn.Module, batch: Any, step: StepFunction, optimizer: Any) -> None:
        """Let the budget at run time measure steps of the fitted size, apart from training: such a step is not held inside the budget.

        The last begins with gradients, as when they accumulate, if the fit has a plan for that: then backward needs the most.
        """
        later = fitted.record.accumulating
        last = InitialGradients.ZERO if later is None or later.fits else InitialGradients.NONE
        live = Adaptive(unwrapped(model), Budget.of(fitted.record.budget_bytes))
        try:
            with sandboxed(model, batch, step, optimizer, gradients=InitialGradients.NONE) as sandbox:

                def run_step() -> None:
                    loss = step(model, batch)
                    sandbox.add_leaves(loss)  # those of the step function too: their gradients are restored
                    loss.backward()

                for number in range(AdaptiveTuning().first_measured_steps):
                    sandbox.rewind(last if number else InitialGradients.NONE)
                    in_own_context(run_step)
                self._other_reruns = fitted.regions_run + live.stats().reruns
        except BaseException:
            live.remove()
            fitted.remove()
            raise
        live.remove()
        self.live = live

    def _choose(self, batch: Any) -> None:
        """Let the plan run batches that are not larger than the fitted one, and the budget at run time those that are."""
        assert self.fitted is not None
        wants_live = self.lengths is Lengths.ADAPTIVE and not is_within(sizes_of(batch), self._sizes)
        if not wants_live:
            self._stop_live()
        elif self.live is None:
            _log_devices(self.fitted)
        else:
            self.live.attach()
            self.is_live = True

    def _stop_live(self) -> None:
        if self.live is not None and self.is_live:
            self.live.remove()
        self.is_live = False

    def remove(self) -> None:
        """Restore the model as it was before the first step; `fitted` keeps its record."""
        self._is_removed = self.fitted is not None
        self._detach()
        self._put_back()

    def _detach(self) -> None:
        self._stop_live()
        if self.fitted is not None:
            self.fitted.remove()

    def _put_back(self) -> None:
        if self._taken_over is not None:
            self._taken_over.put_back()
            self._taken_over = None

    def metrics(self) -> dict[str, float]:
        """Return what a trainer's loggers show: budget and peak in bytes, slowdown, and regions that were run again or watched."""
        if self.fitted is None:
            return {}
        record, live = self.fitted.record, self.live
        reruns = self.fitted.regions_run + (live.stats().reruns if live is not None else 0)
        peaks = [
            record.measured.peak_bytes,
            *(live.stats().peak_bytes[-1:] if live is not None and self.is_live else ()),
        ]
        return {
            "retape/budget_bytes": float(record.budget_bytes),
            "retape/peak_bytes": float(max(peaks)),
            "retape/slowdown": self.fitted.promised.slowdown,
            "retape/reruns": float(reruns - self._other_reruns),
        }


def loss_in(result: Any) -> Tensor:
    """Return the loss in what a trainer's step returns: the tensor itself, "loss" of a dict, or the first of a tuple."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, (tuple, list)) and result:
        result = result[0]
    if isinstance(result, Tensor):
        return result
    raise InvalidInput(
        f"The trainer's step returned {type(result).__name__}, not a loss tensor, for the first batch, so there is nothing to fit. "
        "Return the loss, also for the first batch, and let the trainer call backward."
    )


@contextmanager
def budget_as_out_of_memory() -> Iterator[None]:
    """Raise a BudgetTooSmall again as an error that accelerate's search for a batch size recognises."""
    try:
        yield
    except BatchTooLarge:
        raise
    except BudgetTooSmall as error:
        raise BatchTooLarge(
            f"The budget is out of memory. {error}",
            budget_bytes=error.budget_bytes,
            floor_bytes=error.floor_bytes,
            binding=error.binding,
        ) from error


def _log_devices(fitted: Fit) -> None:
    _LOG.warning(
        "retape: %s is on several devices, where a budget at run time is not possible: a batch that is larger than the fitted one may pass "
        "the budget. Use lengths='longest'.",
        fitted.record.model,
    )
