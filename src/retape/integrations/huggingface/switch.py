"""Regions behind the switch that Hugging Face models already have: `gradient_checkpointing_enable()`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from retape.core.errors import InvalidInput
from retape.integrations.huggingface.kv_cache import refuse_cache
from retape.integrations.huggingface.library import is_layer
from retape.torch.compat import hook_internals
from retape.torch.engine.checkpoint import checkpoint


def enable(model: nn.Module, *, check: str = "metadata") -> nn.Module:
    """Run every checkpointable layer of a Hugging Face model as a region, and return the model.

    Transformers binds PyTorch's checkpoint function when it is imported, so replacing that function later has no effect on its
    models; this does. The switch leaves key-value caches out: one with contents (a trained prefix) is refused; `retape.fit` and
    `retape.adaptive` keep it.
    """
    switch = getattr(model, "gradient_checkpointing_enable", None)
    if switch is None:
        raise InvalidInput(
            f"{type(model).__name__} has no gradient_checkpointing_enable(); this is for Hugging Face models. "
            "Call retape.checkpoint around the layers of other models."
        )
    switch(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = checkpointable_layers(model)
    if not layers:
        raise InvalidInput(f"{type(model).__name__} has no layer that can be checkpointed.")
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, check=check)  # type: ignore[assignment]
    _unhook(model)
    for module in _models(layers):
        module.register_forward_pre_hook(refuse_cache, with_kwargs=True)
    return model


def disable(model: nn.Module) -> nn.Module:
    """Undo `enable`, and return the model."""
    switch: Any = getattr(model, "gradient_checkpointing_disable", None)
    if switch is None:
        raise InvalidInput(
            f"{type(model).__name__} has no gradient_checkpointing_disable(); this is for Hugging Face models."
        )
    switch()
    _unhook(model)
    return model


def checkpointable_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that carry Hugging Face's switch."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def _models(checkpointable: list[nn.Module]) -> list[nn.Module]:
    """Return those that run layers: Transformers drops the cache of a layer before the layer's hooks are called."""
    return [module for module in checkpointable if not is_layer(module)]


def _unhook(model: nn.Module) -> None:
    for module in checkpointable_layers(model):
        hook_internals.remove_forward_hooks(module, (refuse_cache,))
