"""A callback for Lightning's Trainer that keeps training inside a budget.

It puts a function of its own over the module's `training_step` until training ends or fails. What happens in the first step is in
`retape.integrations.first_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from retape.api import Fit
from retape.core.errors import InvalidInput
from retape.core.problem import BudgetLike
from retape.integrations.first_step import FittedSteps, Lengths, budget_as_out_of_memory
from retape.torch.adaptive.manager import Adaptive

__all__ = ["FitCallback"]

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers.logger import DummyLogger
except ImportError as error:
    raise InvalidInput(f"FitCallback needs Lightning: pip install 'retape[lightning]' ({error}).") from error


class FitCallback(Callback):
    """Keeps training inside a budget: `Trainer(callbacks=[FitCallback(budget="20GiB")])`.

    Takes the arguments of `retape.fit`. The fit runs inside the first `training_step`, with the trainer's precision and optimizer.
    `lengths` may be "adaptive": batches larger than the first run under a budget at run time. `fitted` is the Fit, None before the first
    step; `live` the budget at run time, if one was needed. The module is as it was when training has ended or failed.
    """

    def __init__(self, budget: BudgetLike, *, lengths: Lengths | str = Lengths.ADAPTIVE, **options: Any) -> None:
        self._arguments = {"budget": budget, "lengths": lengths, **options}
        self._steps = FittedSteps(**self._arguments)
        if self._steps.lengths is Lengths.LONGEST:
            raise InvalidInput("lengths='longest' needs the Hugging Face Trainer's data. Use lengths='adaptive'.")
        self._module: Any = None
        self._found: Any = None  # the module's field `training_step`, if it had one

    @property
    def fitted(self) -> Fit | None:
        return self._steps.fitted

    @property
    def live(self) -> Adaptive | None:
        return self._steps.live

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._leave()
        _refuse(trainer, pl_module)
        model = _trained_in(pl_module)
        compiled = getattr(pl_module, "_compiler_ctx", None)  # of torch.compile(module), which Lightning takes apart
        own_step = pl_module.training_step if compiled is None else compiled["original_training_step"]
        self._steps = FittedSteps(**self._arguments | ({} if compiled is None else {"compile": True}))
        self._steps.take_over(model)
        self._module, self._found = pl_module, vars(pl_module).get("training_step")

        def training_step(*arguments: Any, **keywords: Any) -> Any:
            batch, *more = arguments or (keywords.pop("batch"),)

            def compute(model: nn.Module, batch: Any) -> Any:
                return own_step(batch, *more, **keywords)

            with budget_as_out_of_memory(), _silent(trainer, pl_module, self.fitted is None):
                self._steps.prepare(model, batch, compute, optimizer=trainer.optimizers[0])
            return own_step(batch, *more, **keywords)

        pl_module.training_step = training_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        pl_module.log_dict(self._steps.metrics())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        """Restore the module as it was before training; `fitted` keeps its record."""
        self._steps.remove()
        module, self._module = self._module, None
        if module is None:
            return
        vars(module).pop("training_step", None)
        if self._found is not None:
            module.training_step = self._found


def _refuse(trainer: Any, module: Any) -> None:
    if not module.automatic_optimization:
        raise InvalidInput(
            f"{type(module).__name__} calls backward itself (automatic_optimization = False), where a callback does not see its steps. "
            "Call retape.fit in configure_model or before training, with step=."
        )
    strategy = type(trainer.strategy).__name__
    if strategy in ("DeepSpeedStrategy", "FSDPStrategy"):
        raise InvalidInput(
            f"FitCallback does not work with {strategy}. Use strategy='ddp', or ModelParallelStrategy (FSDP2)."
        )


def _trained_in(module: nn.Module) -> nn.Module:
    """Return the model inside a LightningModule: the one child that has all parameters, else the module itself."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    own = any(True for _ in module.parameters(recurse=False))
    return children[0] if len(children) == 1 and not own else module


@contextmanager
def _silent(trainer: Any, module: Any, is_silent: bool) -> Iterator[None]:
    """Let steps that are only measured log nothing."""
    if not is_silent:
        yield
        return
    loggers, log = trainer.loggers, vars(module).get("log")
    trainer.loggers = [DummyLogger() for _ in loggers]
    module.log = lambda *arguments, **keywords: None
    try:
        yield
    finally:
        trainer.loggers = loggers
        vars(module).pop("log")
        if log is not None:
            module.log = log
