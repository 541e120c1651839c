"""Calls of a model on a batch, and the loss of its output, for users who give no step of their own."""

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
            f"The batch does not match {type(model).__name__}.forward: {error}. A dict is passed as keyword arguments, a tuple as "
            "positional ones, a tensor as the one argument; for anything else give step=lambda model, batch: ..."
        ) from error
    except ValueError:  # a forward without a signature
        return


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
            f"The step returned {got}, not a scalar loss. Give step=lambda model, batch: ... that returns one number, "
            "or put labels into the batch."
        )
    if not loss.requires_grad:
        remedy = "Check requires_grad of the parameters."
        if not torch.is_grad_enabled():
            remedy = "Gradients are switched off here: call it outside torch.no_grad()."
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
