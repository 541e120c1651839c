"""Hugging Face models: regions behind the switch that they have, a Trainer callback, and the training loss in slices.

Start from `switch.enable` and `switch.disable`, `trainer.FitCallback`, `fused_loss.fuse_loss` and `library.HuggingFace`, which
answers the questions that `fit` and `adaptive` ask about a model. Also `kv_cache`: key-value caches inside regions; `lazy_logits`:
logits that are only described, for `fused_loss`. Not here: finding regions and planning (`retape.torch.planning`).

Users import the names of `__all__` from here. They are loaded on first use, because `FitCallback` needs transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

from retape.core.errors import InvalidInput

_DEFINED_IN = {
    "FitCallback": "trainer",
    "checkpointable_layers": "switch",
    "disable": "switch",
    "enable": "switch",
    "fuse_loss": "fused_loss",
    "unfuse_loss": "fused_loss",
}

__all__ = ["FitCallback", "checkpointable_layers", "disable", "enable", "fuse_loss", "unfuse_loss"]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
    except ImportError as error:
        raise InvalidInput(f"{name} needs transformers: pip install 'retape[huggingface]' ({error}).") from error
