"""Plans on disk, so that the second start of the same training costs a checking step instead of a search.

A plan is found again by a key of everything that it depends on: the structure of the model, the shapes of the batch, the step function,
devices, versions, budget and options. It is used only if a real step of it stays inside the budget (`confirmed`). Off unless a folder
is given, as `fit(cache=...)` or in the environment variable RETAPE_CACHE.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from retape.core.errors import RetapeError
from retape.core.fit_record import FitRecord
from retape.core.problem import BudgetKind
from retape.torch.capture.signature import signature
from retape.torch.measure.budgets import resolved
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.step_trials import OutOfMemory

if TYPE_CHECKING:
    from torch import nn

    from retape.core.problem import Budget
    from retape.torch.planning.executor import Executor
    from retape.torch.planning.step_trials import StepTrials

VARIABLE = "RETAPE_CACHE"


class PlanCache:
    """A folder of saved fits, one file per key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def at(cls, folder: str | Path | None) -> PlanCache | None:
        """Return the cache in a folder, or in that of RETAPE_CACHE; None if neither is given."""
        named = folder if folder is not None else os.environ.get(VARIABLE)
        return cls(Path(named).expanduser()) if named else None

    def load(self, key: str) -> FitRecord | None:
        """Return the fit of a key; None if there is none, or if it cannot be read."""
        try:
            return FitRecord.load(self._path(key))
        except RetapeError:
            return None

    def store(self, key: str, record: FitRecord) -> None:
        """Write a fit, at once as a whole: another process may read it meanwhile."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(record.to_json() + "\n", encoding="utf-8")
        part.replace(path)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the key of a fit from everything that its plan depends on."""
    text = json.dumps({name: repr(value) for name, value in facts.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def facts_of_step(trials: StepTrials, batch: Any, step: Any) -> dict[str, Any]:
    """Return the facts of a step: shapes, modes, the step function, and the devices."""
    modules = list(trials.root.modules())
    code = getattr(step, "__code__", None)
    return {
        "batch": signature((batch,), {}),
        "modes": hashlib.sha256(bytes(module.training for module in modules)).hexdigest(),
        "step": None
        if step is None
        else (getattr(step, "__qualname__", type(step).__qualname__), code and code.co_code),
        "gradients": trials.gradients,
        "devices": [_device_facts(device) for device in trials.devices],
    }


def _device_facts(device: torch.device) -> tuple[Any, ...]:
    if device.type != "cuda":
        return (str(device), torch.get_num_threads())
    about = torch.cuda.get_device_properties(device)
    return (str(device), about.name, about.total_memory)


def confirmed(
    trials: StepTrials, record: FitRecord, regions: Mapping[str, nn.Module], executor: Executor | None, budget: Budget
) -> FitRecord | None:
    """Return a fit with the measurement of a step now; None if that is not inside the budget, or a partial re-run is not exact.

    A fused loss stays fused if the fit is returned.
    """
    limits = [resolved(budget, device) for device in trials.devices]
    most = [each.limit_bytes if each.kind is BudgetKind.TOTAL else None for each in limits]
    with trials.sandboxed():
        if record.fused_loss:
            room_bytes = record.budget_bytes - record.measured.base_bytes
            with trials.sandbox.kept_changes():
                LIBRARIES.fuse_loss(trials.root, room_bytes=room_bytes, compiled=record.assignment.is_compiled)
        found = trials.attempted(partial(trials.measured, regions, executor))
        inside = not isinstance(found, OutOfMemory) and all(
            each.peak_bytes <= (view.budget_bytes if limit is None else min(limit, view.budget_bytes))
            for each, view, limit in zip(found, record.views, most, strict=True)
        )
        if inside and (executor is None or trials.is_exact(regions, executor)):
            assert not isinstance(found, OutOfMemory)
            return replace(record, measured=replace(found[0], seconds=found[0].seconds or record.measured.seconds))
        if record.fused_loss:
            with trials.sandbox.kept_changes():
                LIBRARIES.unfuse_loss(trials.root)
    return None
