"""A callback for Hugging Face's Trainer, and trainers built on it such as TRL's, that keeps training inside a budget.

The callback finds its trainer when training begins, and puts functions of its own over the trainer's `compute_loss`, `training_step`,
`_run_epoch` and `log` until training ends or fails. What happens in the first step is in `retape.integrations.first_step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from retape.api import Fit
from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike
from retape.integrations.first_step import FittedSteps, Lengths, budget_as_out_of_memory
from retape.integrations.huggingface.fused_loss import is_fused, unfuse_loss
from retape.integrations.trainer_state import masks_nothing
from retape.torch.adaptive.manager import Adaptive
from retape.torch.capture import rng
from retape.torch.planning.attach import is_attached, replicated, take_off, unwrapped

_OVERLAID = (
    "compute_loss",
    "training_step",
    "_run_epoch",
    "log",
)  # functions of the trainer; an older one may lack `_run_epoch`


class FitCallback(TrainerCallback):
    """Keeps training inside a budget: `Trainer(..., callbacks=[FitCallback(budget="20GiB")])`.

    Takes the arguments of `retape.fit`. The fit runs inside the first training step, on the loss that the trainer computes. With
    lengths="adaptive" batches that are larger than the first run under a budget at run time; with "longest" the longest rows of the
    training data are fitted instead. `fitted` is the Fit, None before the first step; `live` the budget at run time, if one was needed.
    The model and the trainer are as they were when training has ended or failed.
    """

    # Models of runs that have not ended, and their callback.
    owners: ClassVar[WeakKeyDictionary[nn.Module, ref[FitCallback]]] = WeakKeyDictionary()

    def __init__(self, budget: BudgetLike, *, lengths: Lengths | str = Lengths.ADAPTIVE, **options: Any) -> None:
        self._arguments = {"budget": budget, "lengths": lengths, **options}
        self._steps = FittedSteps(**self._arguments)
        self._trainer: Trainer | None = None
        self._model: nn.Module | None = None
        self._found: dict[str, Any] = {}  # of `_OVERLAID`, those that the trainer had as fields of its own
        self._optimizer: Any = None
        self._without_cache = False

    @property
    def fitted(self) -> Fit | None:
        return self._steps.fitted

    @property
    def live(self) -> Adaptive | None:
        return self._steps.live

    def metrics(self) -> dict[str, float]:
        """Return what is logged: budget and peak in bytes, slowdown and re-runs; nothing before the first step."""
        return self._steps.metrics()

    # --- where training begins and ends ---------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()  # an exception that ended the last run may have come from outside the steps
        self._steps = FittedSteps(**self._arguments)
        model = unwrapped(kwargs["model"])
        _leave_others(model)
        if args.n_gpu > 1:
            raise replicated(type(model).__name__)
        trainer = _trainer_of(self)
        _refuse_engines(trainer)
        if is_attached(model):
            raise InvalidInput(
                f"{type(model).__name__} is managed by a fit already, or by retape.adaptive. Call remove() on what that returned first."
            )
        self._without_cache = self._steps.take_over(model).was_on and _takes_use_cache(model)
        self._optimizer = kwargs.get("optimizer")
        self._overlay(trainer)
        self._model, self.owners[model] = model, ref(self)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        """Restore the trainer and its model as they were before training; `fitted` keeps its record."""
        self._steps.remove()
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        for name in _OVERLAID:
            vars(trainer).pop(name, None)
        vars(trainer).update(self._found)
        if self._model is not None:
            self.owners.pop(self._model, None)

    # --- functions over the trainer's -------------------------------------------------------------------------------------

    def _overlay(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._found = {name: vars(trainer)[name] for name in _OVERLAID if name in vars(trainer)}
        compute, log = trainer.compute_loss, trainer.log

        def compute_loss(model: nn.Module, inputs: Any, *more: Any, **keywords: Any) -> Any:
            if not (torch.is_grad_enabled() and model.training):
                return compute(model, inputs, *more, **keywords)

            def own_loss(model: nn.Module, batch: Any) -> Any:
                if self._without_cache and "use_cache" not in batch:
                    batch = {**batch, "use_cache": False}  # as under the checkpointing that was taken over
                return compute(model, batch, *more, **keywords)

            return self._loss(trainer, model, inputs, own_loss)

        def log_with_metrics(logs: dict[str, float], *more: Any, **keywords: Any) -> None:
            log({**logs, **self._steps.metrics()} if "loss" in logs else logs, *more, **keywords)

        overlaid: dict[str, Any] = {"compute_loss": compute_loss, "log": log_with_metrics}
        for name in ("training_step", "_run_epoch"):
            if hasattr(trainer, name):
                overlaid[name] = self._left_on_error(getattr(trainer, name))
        vars(trainer).update(overlaid)

    def _loss(self, trainer: Trainer, model: nn.Module, inputs: Any, compute: Callable[[nn.Module, Any], Any]) -> Any:
        keepers = (trainer, trainer.state, trainer.control)
        if self.fitted is None and self._steps.lengths is Lengths.LONGEST:
            batch = _longest_batch(trainer)
            self._steps.fit(model, batch, compute, optimizer=self._optimizer, keepers=keepers)
        return self._steps.loss(model, inputs, compute, optimizer=self._optimizer, keepers=keepers)

    def _left_on_error(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that restores everything if `run` fails: the Trainer calls no `on_train_end` then."""

        def running(*arguments: Any, **keywords: Any) -> Any:
            try:
                with budget_as_out_of_memory():
                    return run(*arguments, **keywords)
            except BaseException:
                self._leave()
                raise

        return running


# --- the trainer and its model ------------------------------------------------------------------------------------------------


def _trainer_of(callback: FitCallback) -> Trainer:
    """Return the trainer that calls this callback: Transformers does not pass it, so it is looked for among the callers."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    raise InvalidInput(
        "FitCallback was not called by a Trainer. Give it to one: Trainer(..., callbacks=[FitCallback(...)])."
    )


def _refuse_engines(trainer: Trainer) -> None:
    """Raise InvalidInput where another engine runs the model, or shards it in a way that regions do not support."""
    kind = str(trainer.accelerator.distributed_type.value)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    first_fsdp = plugin is not None and getattr(plugin, "fsdp_version", 1) == 1
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or (kind == "FSDP" and first_fsdp):
        raise InvalidInput(
            f"FitCallback does not work with {kind}{' version 1' if kind == 'FSDP' else ''}, which runs forward and backward itself. "
            "Use DistributedDataParallel (torchrun), or FSDP with fsdp_config={'version': 2}."
        )


def _takes_use_cache(model: nn.Module) -> bool:
    """True if the model, or the one inside PEFT's, has a parameter `use_cache`."""
    base: Any = getattr(model, "get_base_model", lambda: model)
    inner = base()
    return "use_cache" in inspect.signature(inner.forward).parameters


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


# --- the longest batch, for a plan that holds for every batch ----------------------------------------------------------


def _longest_batch(trainer: Trainer) -> Any:
    """Collate the longest rows of the training data into one batch, prepared as the Trainer prepares its inputs.

    Every row is read once. Rows are as long as their longest part, then as the sum of their parts.
    """
    data = trainer.train_dataset
    if not (isinstance(data, Sized) and hasattr(data, "__getitem__")):
        raise InvalidInput(
            "lengths='longest' reads every row, and the training data has no length. Use lengths='adaptive'."
        )
    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
        raise InvalidInput(
            f"lengths='longest' reads the training data, and {type(trainer).__name__} makes its batches from something else (it has "
            "its own _prepare_inputs). Use lengths='adaptive'."
        )
    draws = rng.capture(())
    rows = trainer._train_batch_size
    by_size = sorted(range(len(data)), key=lambda number: _size_of(data[number]))

    def collated(numbers: list[int]) -> Any:
        return trainer._prepare_inputs(_collator(trainer)([data[number] for number in numbers]))

    batch = collated(by_size[-rows:])
    if masks_nothing(batch):  # with a short row among them nothing gets shorter, and the model makes a mask
        batch = collated([by_size[0], *by_size[-rows:][1:]])
    rng.seek(draws)  # of a collator that masks at random
    return batch


def _collator(trainer: Trainer) -> Any:
    """Return the collator of the training batches, which may remove columns that the model does not take."""
    loader = trainer.callback_handler.train_dataloader
    return getattr(loader, "collate_fn", None) or trainer.data_collator


def _size_of(row: Any) -> tuple[int, int]:
    parts = row.values() if isinstance(row, Mapping) else row
    sizes = [part.numel() if isinstance(part, Tensor) else len(part) for part in parts if _has_size(part)]
    return max(sizes, default=0), sum(sizes)


def _has_size(part: Any) -> bool:
    return isinstance(part, Tensor) or (isinstance(part, Sized) and not isinstance(part, (str, bytes)))
