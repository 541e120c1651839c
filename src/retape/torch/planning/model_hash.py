"""The structure of a model as a short text: names, classes, shapes and dtypes; no values."""

from __future__ import annotations

import hashlib

from torch import nn

from retape.torch.planning.attach import original_class, replicated


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside a wrapper that only spreads it over processes or devices."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers):
        model = model.module
    return model


def refuse_replicas(model: nn.Module) -> None:
    """InvalidInput where a wrapper copies the model to several devices for each step."""
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise replicated(type(unwrapped(model)).__name__)


def fingerprint(model: nn.Module) -> str:
    """Equal for models of the same structure, on every machine."""
    model = unwrapped(model)
    lines = [f"{name} {original_class(type(module)).__qualname__}" for name, module in model.named_modules()]
    lines += [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    lines += [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
