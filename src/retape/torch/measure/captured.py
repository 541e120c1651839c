"""State behind a step that is in no field of the model: what hooks, closures, globals, classes and defaults hold.

A step is captured as a region would capture a call of it (`capture`), once, and is put back as after a re-run. Of objects that have a
hook, and of what the step function refers to, only what their code names is followed: they may be trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from retape.torch.capture.call import capture_call
from retape.torch.compat import hook_internals


class CapturedState:
    """Everything that a step reaches through functions, classes and fields, restored by `leave` to how it was noted."""

    def __init__(
        self, modules: Iterable[nn.Module], tensors: Iterable[Tensor], step: Callable[..., Any] | None
    ) -> None:
        modules = list(modules)
        root = _Root([module for module in modules if not hook_internals.keeps_its_own_books(module)])
        for hook in _hooks_of(modules, tensors):
            root.register_forward_hook(hook)
        if step is not None:
            root.register_forward_hook(step)
        self._call = capture_call(root.forward, (), {})
        self.enter()

    @property
    def generators(self) -> list[Any]:
        """The random number generators that were met."""
        return list(self._call.generators)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that were met, those of the modules among them."""
        return [*self._call.extras, *self._call.state]

    def enter(self) -> None:
        """Note how everything is, which is as when this was made."""
        for holder in self._call.holders:
            holder.enter()

    def leave(self) -> None:
        """Put everything back to how it was noted."""
        for holder in reversed(self._call.holders):
            holder.leave()


class _Root(nn.Module):
    """A module over those of a model, to capture them, and the functions that are registered as its hooks, as one call."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self) -> None:
        """Do nothing: it is captured, and not called."""


def _hooks_of(modules: list[nn.Module], tensors: Iterable[Tensor]) -> Iterator[Callable[..., Any]]:
    """Yield the hooks that a region does not look at: those of tensors, of backward and of wrappers."""
    for module in modules:
        yield from hook_internals.backward_hooks(module)
        if hook_internals.keeps_its_own_books(module):
            yield from hook_internals.forward_hooks(module)
    for tensor in tensors:
        yield from hook_internals.hooks_of_tensor(tensor)
