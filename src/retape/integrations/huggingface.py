"""Hugging Face models: retape's regions behind the switch that the models already have, and a callback that fits on the first batch."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from retape.core.errors import InvalidInput
from retape.torch.checkpoint import checkpoint


def enable(model: nn.Module, *, check: str = "metadata") -> nn.Module:
    """Run every checkpointable layer of a Hugging Face model as a region, also where the model was made before; returns the model.

    The models' own `gradient_checkpointing_enable()` takes PyTorch's function by name when transformers is imported, so
    assigning another one afterwards does not reach it; this does.
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
    return model


def disable(model: nn.Module) -> nn.Module:
    """Switch the regions off again."""
    switch: Any = getattr(model, "gradient_checkpointing_disable", None)
    if switch is None:
        raise InvalidInput(
            f"{type(model).__name__} has no gradient_checkpointing_disable(); this is for Hugging Face models."
        )
    switch()
    return model


def checkpointable_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that carry Hugging Face's switch."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def __getattr__(name: str) -> Any:
    """`FitCallback` derives from a class of transformers, so it is imported when it is asked for."""
    if name != "FitCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from retape.integrations.trainer import FitCallback
    except ImportError as error:
        raise InvalidInput(f"FitCallback needs transformers: pip install 'retape[huggingface]' ({error}).") from error
    return FitCallback
