"""Answers of Hugging Face's Transformers to what retape asks about a model library (`retape.torch.model_libraries`).

Classes are recognised by name, so that nothing is imported from transformers here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from retape.integrations.huggingface.fused_loss import can_fuse_loss, chunk_within, fuse_loss, is_fused, unfuse_loss
from retape.integrations.huggingface.kv_cache import CACHES, is_cache_class
from retape.torch.model_libraries import ModelLibrary, RegionArguments


class HuggingFace(ModelLibrary):
    """Layers, key-value caches and losses of Transformers' models."""

    def recomputable_layers(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if is_layer(module)]

    @contextmanager
    def with_every_layer(self, model: nn.Module) -> Iterator[None]:
        """Set the probabilities of LayerDrop to 0: fields of modules and of their configurations that end in `layerdrop`."""
        owners = {
            id(each): each
            for module in model.modules()
            for each in (module, vars(module).get("config"))
            if each is not None
        }
        found = [(each, name, value) for each in owners.values() for name, value in _layerdrops(each)]
        for owner, name, _ in found:
            setattr(owner, name, 0.0)
        try:
            yield
        finally:
            for owner, name, value in found:
                setattr(owner, name, value)

    def begin_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        CACHES.begin_forward(arguments, keywords)

    def region_arguments(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> RegionArguments:
        return CACHES.left_out(module, arguments, keywords)

    def is_filled_by_calls(self, kind: type) -> bool:
        return is_cache_class(kind)

    def can_fuse_loss(self, model: nn.Module) -> bool:
        return can_fuse_loss(model)

    def is_loss_fused(self, model: nn.Module) -> bool:
        return is_fused(model)

    def fuse_loss(self, model: nn.Module, *, room_bytes: int | None, compiled: bool) -> None:
        fuse_loss(model, chunk_bytes=chunk_within(room_bytes), compiled=compiled)

    def unfuse_loss(self, model: nn.Module) -> None:
        unfuse_loss(model)


def _layerdrops(owner: Any) -> list[tuple[str, float]]:
    fields = getattr(owner, "__dict__", {}).items()
    return [
        (name, value) for name, value in fields if name.endswith("layerdrop") and isinstance(value, float) and value
    ]


def is_layer(module: nn.Module) -> bool:
    """True if Transformers itself marks this module as a layer that may be recomputed."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


LIBRARY = HuggingFace()
