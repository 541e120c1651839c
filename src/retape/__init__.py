"""retape: train models that do not fit, inside a budget in bytes, with the same gradients bit for bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retape import errors as errors
from retape.core.errors import RetapeError
from retape.core.plan import Plan
from retape.core.problem import Budget
from retape.core.solve import solve

if TYPE_CHECKING:
    from retape.torch.checkpoint import checkpoint as checkpoint
    from retape.torch.checkpoint import checkpoint_sequential as checkpoint_sequential
    from retape.torch.loop import scan as scan
    from retape.torch.loop import while_loop as while_loop
    from retape.torch.ode import odeint as odeint
    from retape.torch.region import keep as keep
    from retape.torch.region import recomputing as recomputing
    from retape.torch.verify import verify as verify

# Names that need PyTorch are imported when they are first used: the planner and its command start without it.
_LAZY = {
    "checkpoint": "retape.torch.checkpoint",
    "checkpoint_sequential": "retape.torch.checkpoint",
    "keep": "retape.torch.region",
    "odeint": "retape.torch.ode",
    "recomputing": "retape.torch.region",
    "scan": "retape.torch.loop",
    "verify": "retape.torch.verify",
    "while_loop": "retape.torch.loop",
}

__all__ = [
    "Budget",
    "Plan",
    "RetapeError",
    "checkpoint",
    "checkpoint_sequential",
    "errors",
    "keep",
    "odeint",
    "recomputing",
    "scan",
    "solve",
    "verify",
    "while_loop",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'retape' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
