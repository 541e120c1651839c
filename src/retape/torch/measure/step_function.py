"""The call of a model on a batch and the loss of its output; checks of the arguments of `fit` and `verify`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.core.errors import InvalidInput
from retape.torch.capture.mutation import inner_tensors
from retape.torch.compat import internals

StepFunction = Callable[[nn.Module, Any], Tensor]


def default_step(model: nn.Module, batch: Any) -> Tensor:
    """Call the model (a dict is keyword arguments, a tuple positional ones) and return the loss of its output."""
    arguments, keywords = call_of(batch)
    output = model(*arguments, **keywords)
    loss = getattr(output, "loss", None)
    result: Tensor = output if loss is None else loss
    return result


def call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a model is called on a batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def refuse_other_arguments(model: nn.Module, batch: Any) -> None:
    """Raise InvalidInput if the model's forward does not take the batch's arguments."""
    arguments, keywords = call_of(batch)
    try:
        inspect.signature(model.forward).bind(*arguments, **keywords)
    except TypeError as error:
        raise InvalidInput(
            f"The batch does not match {type(model).__name__}.forward: {error}. A dict is passed as keyword arguments, a tuple or "
            "list as positional ones, a tensor as the one argument; for anything else give step=lambda model, batch: ..."
        ) from error
    except ValueError:  # a forward without a signature
        return


def check_training(model: object, step: object, optimizer: object) -> None:
    """Raise InvalidInput unless `fit` can train with these: a module, a function or None, an optimizer of the module or None."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"fit() got a {type(model).__name__} as its model; give a torch.nn.Module.")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise InvalidInput(f"fit() got a {type(optimizer).__name__} as its optimizer; give one torch.optim.Optimizer.")
    refuse_step(step, "fit")
    _refuse_other_weights(model, optimizer)


def refuse_step(step: object, caller: str) -> None:
    """Raise InvalidInput for a step that is neither None nor a function of model and batch."""
    if step is not None and not callable(step):
        raise InvalidInput(
            f"{caller}() got {type(step).__name__} {step!r:.60} as its step; give a function of model and batch that returns the loss."
        )
    if type(step).__module__ == nn.MSELoss.__module__:
        raise InvalidInput(
            f"{caller}() got the loss {type(step).__name__} as its step. A step calls the model too: "
            "step=lambda model, batch: loss(model(batch[0]), batch[1])."
        )


def _refuse_other_weights(model: nn.Module, optimizer: Any) -> None:
    """Raise InvalidInput if none of an optimizer's parameters is in the model: it was made for another one."""
    given = {id(weight) for group in getattr(optimizer, "param_groups", ()) for weight in group["params"]}
    if given and given.isdisjoint(id(weight) for weight in model.parameters()):
        raise InvalidInput(
            f"None of the {len(given)} parameters of the {type(optimizer).__name__} belongs to the {type(model).__name__}. Make the "
            "optimizer from the parameters of the model that is fitted."
        )


def refuse_lazy(model: nn.Module) -> None:
    """Raise InvalidInput if modules get their shapes in their first call, which cannot be undone."""
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise InvalidInput(
            f"{type(model).__name__} has lazy modules that have no shape yet. Call it once on a batch before fitting."
        )


def scalar_loss(step: StepFunction, model: nn.Module, batch: Any) -> Tensor:
    """Run a step and return its loss. Raise InvalidInput unless backward can start from it: one number with a graph."""
    loss = step(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InvalidInput(
            f"The step returned {got}, not a scalar loss. Give step=lambda model, batch: ... that returns one number and does not call "
            "backward, or put labels into the batch."
        )
    if not loss.requires_grad:
        remedy = "Check requires_grad of the parameters."
        if not torch.is_grad_enabled():
            remedy = "Gradients are switched off here: call it outside torch.no_grad() and torch.inference_mode()."
        raise InvalidInput(f"The loss does not depend on anything that requires gradients. {remedy}")
    return loss


def refuse_fake_tensors(model: nn.Module, batch: Any) -> None:
    """Raise InvalidInput if the model or the batch has tensors without values: their steps allocate and compute nothing."""
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [("the batch", leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    for name, tensor in named:
        if any(internals.is_fake(part) for part in (tensor, *inner_tensors(tensor))):
            raise InvalidInput(
                f"{name} is a fake or meta tensor, which has no values, so there is no memory or time to measure. Give fit() a model and a "
                "batch with values; retape.forecast predicts a step without them."
            )


def length_of(batch: Any) -> int:
    """The second dimension of the first tensor in a batch that has one; 0 if none has. That of a nested tensor is no number."""
    leaves = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_nested)
    return next((leaf.shape[1] for leaf in leaves if leaf.dim() > 1), 0)


def rows_of(batch: Any) -> int:
    """The first dimension of the first tensor in a batch that has one; 0 if none has."""
    sizes = (leaf.size(0) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next(sizes, 0)
