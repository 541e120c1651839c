"""retape: train models that do not fit, inside a budget in bytes, with the same gradients bit for bit."""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

from retape import errors as errors
from retape import integrations as _integrations  # noqa: F401 - registers the libraries that it knows; imports none
from retape.core.errors import RetapeError
from retape.core.plan import Plan
from retape.core.problem import Budget
from retape.core.solve import solve

if TYPE_CHECKING:
    from retape.api import Fit as Fit
    from retape.api import apply as apply
    from retape.api import fit as fit
    from retape.forecast.forecasting import forecast as forecast
    from retape.torch.adaptive.manager import adaptive as adaptive
    from retape.torch.engine.checkpoint import checkpoint as checkpoint
    from retape.torch.engine.checkpoint import checkpoint_sequential as checkpoint_sequential
    from retape.torch.engine.context import keep as keep
    from retape.torch.engine.context import recomputing as recomputing
    from retape.torch.loops.scan import scan as scan
    from retape.torch.loops.scan import while_loop as while_loop
    from retape.torch.measure.memory_meter import measure as measure
    from retape.torch.measure.verify import verify as verify
    from retape.torch.ode.odeint import odeint as odeint
    from retape.torch.slicing.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from retape.torch.slicing.tile import tile as tile

# Names that need PyTorch are imported on first use: the planner and its command start without it.
_LAZY = {
    "Fit": "retape.api",
    "adaptive": "retape.torch.adaptive.manager",
    "apply": "retape.api",
    "fit": "retape.api",
    "forecast": "retape.forecast",
    "measure": "retape.torch.measure.memory_meter",
    "checkpoint": "retape.torch.engine.checkpoint",
    "checkpoint_sequential": "retape.torch.engine.checkpoint",
    "keep": "retape.torch.engine.context",
    "linear_cross_entropy": "retape.torch.slicing.linear_cross_entropy",
    "recomputing": "retape.torch.engine.context",
    "tile": "retape.torch.slicing.tile",
    "odeint": "retape.torch.ode.odeint",
    "scan": "retape.torch.loops.scan",
    "verify": "retape.torch.measure.verify",
    "while_loop": "retape.torch.loops.scan",
}

__all__ = [
    "Budget",
    "Fit",
    "Plan",
    "RetapeError",
    "adaptive",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "errors",
    "fit",
    "forecast",
    "keep",
    "linear_cross_entropy",
    "measure",
    "odeint",
    "recomputing",
    "scan",
    "solve",
    "tile",
    "verify",
    "while_loop",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Values for fit(options=...), not public names of their own.
    if name in ("EXACT", "ALL", "OPTIMIZER_ON_HOST", "OPTIMIZER_IN_BACKWARD"):
        return getattr(importlib.import_module("retape.core.problem"), name)
    if name not in _LAZY:
        raise AttributeError(f"module 'retape' has no attribute {name!r}")
    drawn = random.getstate()  # imports may draw random numbers; the first use of a name must not
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    random.setstate(drawn)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
