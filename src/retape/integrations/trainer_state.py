"""State that a fit inside a trainer leaves as it was: the trainer's counters and metrics, and the model's own checkpointing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from retape.torch.measure.sandbox import SavedContainer, save_container

_SWITCH = "gradient_checkpointing"  # a field of the modules that recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTuning:
    """Thresholds of the hook that trainers share."""

    # Containers with more parts are data, not counters or metrics: they are neither copied nor restored.
    most_parts: int = 10_000


TUNING = TrainerTuning()


class OwnCheckpointing:
    """A model's own switches for gradient checkpointing, as Transformers and Diffusers have them: off until `put_back`."""

    def __init__(self, model: nn.Module) -> None:
        self._switched_on = [module for module in model.modules() if vars(module).get(_SWITCH)]
        for module in self._switched_on:
            setattr(module, _SWITCH, False)

    @property
    def was_on(self) -> bool:
        return bool(self._switched_on)

    def put_back(self) -> None:
        """Switch on again what was on."""
        for module in self._switched_on:
            setattr(module, _SWITCH, True)
        self._switched_on = []


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
