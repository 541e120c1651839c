"""Fits in tests: a quiet `fit`, the tightest budget that is feasible, training for a few steps, and what a fit has run."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import retape
from retape.errors import BudgetTooSmall
from support.comparing import parameter_gradients, plainly, seed

fit = partial(retape.fit, progress=False)


def tightest(model: nn.Module, batch: Any, budget: Any, **options: Any) -> retape.Fit:
    """A fit to the budget, or to the floor if the budget is below it."""
    try:
        return fit(model, batch, budget=budget, **options)
    except BudgetTooSmall as error:
        return fit(model, batch, budget=error.floor_bytes, **options)


def regions_run(fitted: retape.Fit) -> int:
    """Number of regions that the fit has run so far."""
    return fitted.regions_run


def model_of(fitted: retape.Fit) -> nn.Module:
    """The model that a fit manages; of a fit that was loaded, the model that came with it."""
    return fitted._model


def trained(
    model: nn.Module, batch: Any, step: Callable[..., Tensor] = plainly, *, steps: int = 3, clip: bool = False
) -> dict[str, Any]:
    """Losses, weights, gradients and random streams after a few steps of AdamW from a seed."""
    seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(model, batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.detach().clone())
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": parameter_gradients(model),
        "streams": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()],
    }
