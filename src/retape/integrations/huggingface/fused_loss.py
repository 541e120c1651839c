"""Hugging Face causal language models: head and loss without whole logits, behind the model's own forward.

`fuse_loss(model)` puts hooks and a loss function on the model; where PEFT wraps it, the loss function is that of the model inside.
In training with labels, the head returns `LazyLogits` (`lazy_logits.py`); the loss function computes the loss from them in slices,
and the output's `.logits` is None. The rest of the model is unchanged. A head with hooks or a forward of its own computes whole logits.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import threading
from functools import cache
from typing import Any

from torch import Tensor, nn

from retape.core.errors import InvalidInput
from retape.core.fit_record import FitRecord
from retape.integrations.huggingface.lazy_logits import CHUNK_BYTES, COMPILED, TUNING, LazyLogits, changed_by, is_plain
from retape.torch.compat import compiler_internals, hook_internals
from retape.torch.planning.attach import original_class

_LOG = logging.getLogger("retape")


class _HeadCalls(threading.local):
    def __init__(self) -> None:
        # Heads whose next call returns lazy logits, by id, and the rows that the head was called with.
        self.heads: dict[int, Tensor | None] = {}


_CALLS = _HeadCalls()


def fuse_loss(model: nn.Module, *, chunk_bytes: int | None = None, compiled: bool = False) -> nn.Module:
    """Compute the training loss of a causal language model without whole logits, and return the model.

    The buffers of a chunk of logits take at most `chunk_bytes`. With `compiled`, the ops on a chunk are compiled on a GPU.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    head, owner = _head_of(model), _owner_of(model)
    found = None if owner is None else owner.loss_function
    is_causal = found is ForCausalLMLoss or found is fused_causal_loss
    if owner is None or not is_causal or not _calls_loss_function(type(owner)):
        raise InvalidInput(
            f"{type(model).__name__} has a loss function of its own; only the causal one can be fused with the head."
        )
    changed = changed_by(head, _before_head)
    if changed is not None:
        raise InvalidInput(
            f"The head of {type(model).__name__} has {changed}, which a loss in slices would leave out. Remove it, or do not fuse the loss."
        )
    _remove_settings(head)
    if chunk_bytes is not None:
        setattr(head, CHUNK_BYTES, chunk_bytes)
    if compiled:
        setattr(head, COMPILED, True)
    if found is not fused_causal_loss:
        owner.loss_function = fused_causal_loss  # type: ignore[assignment]
        # On the model that is called, which need not be the owner: PEFT calls `forward` of the model inside, which runs no hooks.
        model.register_forward_pre_hook(_before_model, with_kwargs=True)
        model.register_forward_hook(_after_model, with_kwargs=True, always_call=True)
        head.register_forward_pre_hook(_before_head)
        head.register_forward_hook(_after_head)
    return model


def can_fuse_loss(model: nn.Module) -> bool:
    """True if a model's forward calls Transformers' causal loss, with a plain linear head, not fused yet; log a head that does more."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "loss_function"):
        return False
    from transformers.loss.loss_utils import ForCausalLMLoss

    owner, head = _owner_of(model), model.get_output_embeddings()  # type: ignore[operator]
    if (
        owner is None
        or owner.loss_function is not ForCausalLMLoss
        or not _calls_loss_function(type(owner))
        or type(head) is not nn.Linear
    ):
        return False
    return is_plain(head, _before_head)


def _calls_loss_function(kind: type[nn.Module]) -> bool:
    """True if a forward of a class or of its bases uses `self.loss_function`; older models have the loss in their forward."""
    forwards = (inspect.unwrap(base.__dict__["forward"]) for base in kind.__mro__ if "forward" in base.__dict__)
    return any("loss_function" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


def is_fused(model: nn.Module) -> bool:
    """True if the loss of a model is fused with its head."""
    return getattr(model, "loss_function", None) is fused_causal_loss


def unfuse_loss(model: nn.Module) -> nn.Module:
    """Undo `fuse_loss`, and return the model."""
    for module in model.modules():
        _remove_settings(module)
        hook_internals.remove_forward_hooks(module, _HOOKS)
        if vars(module).get("_loss_function") is fused_causal_loss:
            _restore_loss(module)
    return model


def _restore_loss(owner: nn.Module) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    del owner._loss_function
    if owner.loss_function is not ForCausalLMLoss:  # the user had assigned it
        owner.loss_function = ForCausalLMLoss  # type: ignore[assignment]


def _owner_of(model: nn.Module) -> nn.Module | None:
    """Return the model whose forward computes the loss: this one, or the one inside a wrapper such as PEFT's."""
    if not hasattr(model, "loss_function"):
        return None
    return next((module for module in model.modules() if hasattr(type(module), "loss_function")), None)


def _remove_settings(head: nn.Module) -> None:
    for name in (CHUNK_BYTES, COMPILED):
        vars(head).pop(name, None)


def fuse_loss_as(model: nn.Module, record: FitRecord) -> None:
    """Fuse the loss as a fit did: the size of a chunk follows from the budget."""
    chunk_bytes = chunk_within(record.budget_bytes - record.measured.base_bytes)
    fuse_loss(model, chunk_bytes=chunk_bytes, compiled=record.assignment.is_compiled)


def chunk_within(room_bytes: int | None) -> int | None:
    """Return the most bytes of a chunk if activations may take `room_bytes`; None if that is not known."""
    return None if room_bytes is None else max(1, room_bytes // TUNING.chunks_in_room)


def _head_of(model: nn.Module) -> nn.Linear:
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if original_class(type(head)) is not nn.Linear:
        raise InvalidInput(
            f"{type(model).__name__} has no plain linear head (found {type(head).__name__}); this is for Hugging Face's causal language "
            "models. Call retape.linear_cross_entropy in models of your own."
        )
    assert isinstance(head, nn.Linear)
    return head


def fused_causal_loss(logits: Any, labels: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return Transformers' `ForCausalLMLoss`, computed in slices if the logits are lazy."""
    if isinstance(logits, LazyLogits):
        return _loss_of(logits, labels, *args, **kwargs)
    from transformers.loss.loss_utils import ForCausalLMLoss

    found: Tensor = ForCausalLMLoss(logits, labels, vocab_size, *args, **kwargs)
    return found


def _loss_of(
    logits: LazyLogits,
    labels: Any,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Any = None,
    **kwargs: Any,
) -> Tensor:
    total = logits.loss(
        (labels if shift_labels is None else shift_labels).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        shift=shift_labels is None,
    )
    total = total.float()  # as Transformers does, for float64 too
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total if num_items_in_batch is None else total / num_items_in_batch


# --- hooks: functions of the module, so that a model with them can be copied and pickled ----------------------------


def _before_model(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    head = _head_of(model)
    _CALLS.heads.pop(id(head), None)
    if model.training and kwargs.get("labels") is not None:
        log_fused_once()
        _CALLS.heads[id(head)] = None


@compiler_internals.uncompiled
def _before_head(head: nn.Linear, args: tuple[Any, ...]) -> Any:
    if id(head) not in _CALLS.heads:
        return None
    if not is_plain(head, _before_head):  # since the loss was fused
        del _CALLS.heads[id(head)]
        return None
    _CALLS.heads[id(head)] = args[0]
    return (args[0][:0],)  # no rows: the head's own forward costs nothing


def _after_head(head: Any, args: Any, output: Any) -> Any:
    rows = _CALLS.heads.pop(id(head), None)
    return None if rows is None else LazyLogits(rows, head)


def _after_model(model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    _CALLS.heads.pop(id(_head_of(model)), None)
    if isinstance(output, tuple):
        return tuple(None if isinstance(value, LazyLogits) else value for value in output)
    if not isinstance(getattr(output, "logits", None), LazyLogits):
        return None
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return type(output)(**{**fields, "logits": None})


_HOOKS = (_before_model, _before_head, _after_head, _after_model)


@cache
def log_fused_once() -> None:
    """Log that outputs have no logits, once per process."""
    _LOG.warning("The loss is fused with the head: in training, with labels, the model's output has no .logits (None).")
