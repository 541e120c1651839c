"""Hugging Face models: retape's regions behind the switch that the models already have, and a callback that fits on the first batch."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from retape.core.errors import InvalidInput
from retape.torch.capture.kv_caches import refuse_cache
from retape.torch.engine.checkpoint import checkpoint
from retape.torch.planning.variants.fused_loss import remove_hooks


def enable(model: nn.Module, *, check: str = "metadata") -> nn.Module:
    """Run every checkpointable layer of a Hugging Face model as a region, also where the model was made before; returns the model.

    The models' own `gradient_checkpointing_enable()` takes PyTorch's function by name when transformers is imported, so
    assigning another one afterwards does not reach it; this does. That switch leaves key-value caches out: one that holds
    something (a trained prefix) is refused; `retape.fit` and `retape.adaptive` keep it.
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
    """Switch the regions off again."""
    switch: Any = getattr(model, "gradient_checkpointing_disable", None)
    if switch is None:
        raise InvalidInput(
            f"{type(model).__name__} has no gradient_checkpointing_disable(); this is for Hugging Face models."
        )
    switch()
    _unhook(model)
    return model


def checkpointable_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that carry Hugging Face's switch."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def _models(checkpointable: list[nn.Module]) -> list[nn.Module]:
    """Those that run layers: Transformers drops the cache of a layer before the layer's hooks are called."""
    return [m for m in checkpointable if all(c.__name__ != "GradientCheckpointingLayer" for c in type(m).__mro__)]


def _unhook(model: nn.Module) -> None:
    for module in checkpointable_layers(model):
        remove_hooks(module, (refuse_cache,))


def __getattr__(name: str) -> Any:
    """`FitCallback` derives from a class of transformers, so it is imported when it is asked for."""
    if name != "FitCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from retape.integrations.trainer import FitCallback
    except ImportError as error:
        raise InvalidInput(f"FitCallback needs transformers: pip install 'retape[huggingface]' ({error}).") from error
    return FitCallback
