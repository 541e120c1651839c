"""Questions that retape asks about the classes of a model library, such as Hugging Face Transformers.

Nothing here knows a library. An integration registers the module that defines its `ModelLibrary`; that module is imported once
the user has imported the library itself. Imports no PyTorch, so that `import retape` stays without it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from retape.core.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn


class RegionArguments(NamedTuple):
    """Arguments that a region is run with, and a note for the log where they differ from those given."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    note: str | None = None


class ModelLibrary:
    """Answers for the classes of one library. Every default says that there is nothing special about them."""

    def check_model(self, model: nn.Module) -> None:
        """Raise `InvalidInput` if a plan cannot control what this model recomputes."""

    def recomputable_layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that the library itself marks as layers that may be recomputed."""
        return []

    def with_every_layer(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a training step skips no layer at random, so that a profile sees all of them."""
        return nullcontext()

    def begin_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Take note of what a model is called with, before any of its regions is."""

    def region_arguments(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> RegionArguments:
        """Return the arguments to run a region with: without an empty container that a re-run would fill twice."""
        return RegionArguments(arguments, keywords)

    def is_filled_by_calls(self, kind: type) -> bool:
        """True if each call of a layer adds to an object of this class, such as a key-value cache."""
        return False

    def can_fuse_loss(self, model: nn.Module) -> bool:
        """True if `fuse_loss` supports this model and its loss is not fused yet."""
        return False

    def is_loss_fused(self, model: nn.Module) -> bool:
        """True if this model computes its training loss in slices."""
        return False

    def fuse_loss(self, model: nn.Module, *, room_bytes: int | None, compiled: bool) -> None:
        """Make the model compute its training loss in slices, within a part of `room_bytes` of activations."""
        raise InvalidInput(f"The loss of {type(model).__name__} cannot be computed in slices.")

    def unfuse_loss(self, model: nn.Module) -> None:
        """Undo `fuse_loss`; nothing happens if the loss is not fused."""


class ModelLibraries(ModelLibrary):
    """All registered libraries that this process has imported, asked as one."""

    def __init__(self) -> None:
        self._registered: dict[str, str] = {}
        self._active: tuple[ModelLibrary, ...] = ()

    def register(self, library: str, module: str) -> None:
        """Import `module` and use its `LIBRARY` once the package `library` has been imported."""
        self._registered[library] = module

    def _imported(self) -> tuple[ModelLibrary, ...]:
        # `keys().isdisjoint(sys.modules)` would visit every module of the process, 100 us for each region.
        if any(map(sys.modules.__contains__, self._registered)):
            self._load()
        return self._active

    def _load(self) -> None:
        for library, module in tuple(self._registered.items()):
            if library in sys.modules:
                found = importlib.import_module(module).LIBRARY
                if found not in self._active:  # another thread may have added it
                    self._active += (found,)
                self._registered.pop(library, None)

    def check_model(self, model: nn.Module) -> None:
        # Transformers, Diffusers and models written after them have this attribute: no library need be imported for it.
        if getattr(model, "is_gradient_checkpointing", False):
            raise InvalidInput(
                f"{type(model).__name__} recomputes every layer by itself (gradient_checkpointing): that leaves the fit no choice. "
                "Call model.gradient_checkpointing_disable(), or take gradient_checkpointing=True out of TrainingArguments."
            )
        for library in self._imported():
            library.check_model(model)

    def recomputable_layers(self, model: nn.Module) -> list[nn.Module]:
        return [layer for library in self._imported() for layer in library.recomputable_layers(model)]

    @contextmanager
    def with_every_layer(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for library in self._imported():
                stack.enter_context(library.with_every_layer(model))
            yield

    def begin_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for library in self._imported():
            library.begin_forward(arguments, keywords)

    def region_arguments(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> RegionArguments:
        found = RegionArguments(arguments, keywords)
        for library in self._imported():
            given = library.region_arguments(module, found.positional, found.keywords)
            found = RegionArguments(given.positional, given.keywords, given.note or found.note)
        return found

    def is_filled_by_calls(self, kind: type) -> bool:
        return any(library.is_filled_by_calls(kind) for library in self._imported())

    def can_fuse_loss(self, model: nn.Module) -> bool:
        return any(library.can_fuse_loss(model) for library in self._imported())

    def is_loss_fused(self, model: nn.Module) -> bool:
        return any(library.is_loss_fused(model) for library in self._imported())

    def fuse_loss(self, model: nn.Module, *, room_bytes: int | None, compiled: bool) -> None:
        for library in self._imported():
            if library.can_fuse_loss(model) or library.is_loss_fused(model):
                library.fuse_loss(model, room_bytes=room_bytes, compiled=compiled)
                return
        super().fuse_loss(model, room_bytes=room_bytes, compiled=compiled)

    def unfuse_loss(self, model: nn.Module) -> None:
        for library in self._imported():
            library.unfuse_loss(model)


LIBRARIES = ModelLibraries()
