"""State of a trainer for a fit: its model, what a fit must restore, and the sizes of batches.

It leaves the trainer's counters and metrics as they were, and the model's own checkpointing.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.torch.compat import fsdp_internals
from retape.torch.compat.hook_internals import activation_wrappers, call_wrapped
from retape.torch.measure.sandbox import SavedContainer, save_container

_LOG = logging.getLogger("retape")
_SWITCH = "gradient_checkpointing"  # a field of the modules that recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTuning:
    """Thresholds of the hook that trainers share."""

    # Containers with more parts are data, not counters or metrics: they are neither copied nor restored.
    most_parts: int = 10_000


TUNING = TrainerTuning()


class OwnCheckpointing:
    """A model's own activation checkpointing: off until `put_back`.

    It is a switch of the modules that recompute, as in Transformers and Diffusers, or PyTorch's `checkpoint_wrapper` and
    `offload_wrapper` around layers, which Accelerate adds where an FSDP configuration asks for `activation_checkpointing`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._switched_on = [module for module in model.modules() if vars(module).get(_SWITCH)]
        for module in self._switched_on:
            setattr(module, _SWITCH, False)
        self._undo = [call_wrapped(wrapper) for wrapper in activation_wrappers(model)]

    @property
    def was_on(self) -> bool:
        return bool(self._switched_on or self._undo)

    def put_back(self) -> None:
        """Switch on again what was on."""
        for module in self._switched_on:
            setattr(module, _SWITCH, True)
        for undo in self._undo:
            undo()
        self._switched_on, self._undo = [], []


@contextmanager
def plain_state_restored(objects: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Yield a function that resets fields and containers of objects to how they are now; it is called at the end, too."""
    saved: list[SavedContainer] = []
    known: set[int] = set()
    waiting: list[Any] = [vars(each) for each in objects]
    while waiting:
        container = waiting.pop()
        if id(container) in known:
            continue
        known.add(id(container))
        saved.append(save_container(type(container).__name__, container))
        parts = container.values() if isinstance(container, dict) else container
        found = [part for part in parts if isinstance(part, (dict, list, set, deque))]
        waiting += [part for part in found if len(part) <= TUNING.most_parts]

    def restore() -> None:
        for container in saved:
            container.restore()

    try:
        yield restore
    finally:
        restore()


class FittedModel:
    """The model that was fitted, which it does not keep alive, and which of its weights were trained then."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._name, self._trained = weakref.ref(model), type(model).__name__, _trained_of(model)
        self._waits = False  # for gradients to be reduced

    def is_still(self, model: nn.Module) -> bool:
        """True if the fit is of what is trained now; say what has changed if it is not."""
        name = type(model).__name__
        if self._model() is not model:
            _LOG.warning(
                "retape: %s is another model than the %s that was fitted: it is fitted instead. Models that take turns need a budget "
                "each, or they are fitted in each turn.",
                name,
                self._name,
            )
            return False
        if _trained_of(model) == self._trained:
            return True
        if not fsdp_internals.has_unsharded_gradients(model):
            _LOG.warning("retape: weights of %s were frozen or unfrozen: it is fitted again.", name)
            return False
        if not self._waits:  # steps that are only measured would reduce the gradients of the micro-steps before
            self._waits = True
            _LOG.warning(
                "retape: weights of %s were frozen or unfrozen between two micro-steps: it is fitted again when their gradients are "
                "reduced. Until then the budget may be passed.",
                name,
            )
        return True


def _trained_of(model: nn.Module) -> tuple[bool, ...]:
    return tuple([parameter.requires_grad for parameter in model.parameters()])


# --- sizes of batches, to tell whether one may take more memory than the batch that was fitted --------------------------------


@dataclass(frozen=True, slots=True)
class TensorSize:
    """The shape of a tensor in a batch, and whether it is a mask with nothing masked: models then make no mask of their own."""

    shape: tuple[int, ...]
    masks_nothing: bool = False

    def is_within(self, other: TensorSize) -> bool:
        """True if this tensor asks for no more memory than the other."""
        if len(self.shape) != len(other.shape) or (other.masks_nothing and not self.masks_nothing):
            return False
        return all(map(operator.le, self.shape, other.shape))


def sizes_of(batch: Any) -> list[TensorSize]:
    """Return the sizes of the tensors in a batch, in order."""
    if isinstance(batch, Mapping):
        named = [(str(name), leaf) for name, value in batch.items() for leaf in pytree.tree_leaves(value)]
    else:
        named = [("", leaf) for leaf in pytree.tree_leaves(batch)]
    tensors = [(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]
    return [TensorSize(_sides_of(leaf), "mask" in name and bool(leaf.all())) for name, leaf in tensors]


def _sides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; of a nested one, whose rows differ, the number of its elements."""
    return (int(tensor.numel()),) if tensor.is_nested else tuple(tensor.shape)


def masks_nothing(batch: Any) -> bool:
    """True if a batch has a mask in which nothing is masked."""
    return any(size.masks_nothing for size in sizes_of(batch))


def is_within(sizes: list[TensorSize], fitted: list[TensorSize]) -> bool:
    """True if no tensor of a batch asks for more memory than the one in its place in the fitted batch."""
    return len(sizes) == len(fitted) and all(map(TensorSize.is_within, sizes, fitted))
