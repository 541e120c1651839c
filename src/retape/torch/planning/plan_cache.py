"""Plans on disk, so that the second start of the same training costs a checking step instead of a search.

A plan is found again by a key of everything that it depends on: the structure of the model, the shapes of the batch, the step function,
devices, versions, budget and options. It is used only if a real step of it stays inside the budget (`confirmed`). Off unless a folder
is given, as `fit(cache=...)` or in the environment variable RETAPE_CACHE.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from retape.core.errors import InvalidInput, RetapeError
from retape.core.fit_record import FitRecord
from retape.core.problem import BudgetKind
from retape.torch.capture.arguments import signature
from retape.torch.measure.budgets import resolved
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.instruments import OutOfMemory

if TYPE_CHECKING:
    from torch import nn

    from retape.core.problem import Budget
    from retape.core.record import Record
    from retape.torch.planning.executor import Executor
    from retape.torch.planning.step_trials import StepTrials

VARIABLE = "RETAPE_CACHE"
_LOG = logging.getLogger("retape")


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
        """Write a fit, at once as a whole: another process may read it meanwhile. Log a warning if that fails."""
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_text(record.to_json() + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            _LOG.warning("retape: the plan is not kept in %s: %s.", self._folder, error.strerror or error)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


# --- keys -------------------------------------------------------------------------------------------------------------


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the key of a fit from everything that its plan depends on."""
    text = json.dumps({name: repr(value) for name, value in facts.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def facts_of_step(trials: StepTrials, batch: Any, step: Any, optimizer: Any) -> dict[str, Any]:
    """Return the facts of a step: shapes, modes, the step function, the optimizer's settings, and the devices."""
    modules = list(trials.root.modules())
    return {
        "batch": signature((batch,), {}),
        "modes": hashlib.sha256(bytes(module.training for module in modules)).hexdigest(),
        "step": _function_facts(step),
        "optimizer": None if optimizer is None else (type(optimizer).__qualname__, _group_facts(optimizer)),
        "compiled": trials.compiled,
        "gradients": trials.gradients,
        "devices": [_device_facts(device) for device in trials.devices],
    }


def _function_facts(function: Any) -> Any:
    """Return code, constants, defaults and plain values of a closure."""
    if isinstance(function, partial):
        return (_function_facts(function.func), _plain(function.args), _plain(function.keywords))
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__qualname__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return (code.co_code, _plain(code.co_consts), code.co_names, _plain([function.__defaults__, cells]))


def _group_facts(optimizer: Any) -> list[Any]:
    """Return the size and the settings of each group; the learning rate changes in training and needs no bytes."""
    groups = [({**group, "lr": None, "params": None}, len(group["params"])) for group in optimizer.param_groups]
    return [(count, _plain(settings)) for settings, count in groups]


def _plain(value: Any) -> Any:
    """Return plain values as they are, and other objects by their class."""
    if isinstance(value, dict):
        return [(str(key), _plain(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    return type(value).__qualname__


def _device_facts(device: torch.device) -> tuple[Any, ...]:
    if device.type != "cuda":
        return (str(device), torch.get_num_threads())
    about = torch.cuda.get_device_properties(device)
    return (str(device), about.name, about.total_memory)


# --- a step before a plan is used -------------------------------------------------------------------------------------


def confirmed(
    trials: StepTrials,
    record: FitRecord,
    regions: Mapping[str, nn.Module],
    executors: tuple[Executor, Executor | None],
    budget: Budget,
) -> FitRecord | None:
    """Return a fit with the measurement of a step now; None if a step is not inside the budget, or a re-run not exact.

    One step of each kind is run: those that begin without gradients, and those that accumulate, with an executor of their own if
    there is one. Both prove their partial re-runs. A fused loss stays fused if the fit is returned.
    """
    check = _Check(trials, record, regions, budget)
    with trials.sandboxed():
        if record.fused_loss and not _is_fused_again(trials, record):
            return None
        found = check.inside(executors[0])
        if found is not None and trials.has_two_kinds and (record.accumulating is None or record.accumulating.fits):
            with trials.accumulating():
                found = found if check.inside(executors[1] or executors[0]) is not None else None
        if found is not None:
            trials.prove_updates(regions, executors[0])
            return replace(record, measured=replace(found, seconds=found.seconds or record.measured.seconds))
        if record.fused_loss:
            with trials.sandbox.kept_changes():
                LIBRARIES.unfuse_loss(trials.root)
    return None


def _is_fused_again(trials: StepTrials, record: FitRecord) -> bool:
    """Fuse the loss as the plan had it; return whether that is possible: the head may have hooks by now."""
    room_bytes = record.budget_bytes - record.measured.base_bytes
    try:
        with trials.sandbox.kept_changes():
            LIBRARIES.fuse_loss(trials.root, room_bytes=room_bytes, compiled=record.assignment.is_compiled)
    except InvalidInput:
        return False
    return True


class _Check:
    """Runs steps of a saved plan and compares their peaks with its budget and with the present one."""

    def __init__(self, trials: StepTrials, record: FitRecord, regions: Mapping[str, nn.Module], budget: Budget) -> None:
        self._trials, self._regions = trials, regions
        now = [resolved(budget, device) for device in trials.devices]
        limits = [each.limit_bytes if each.kind is BudgetKind.TOTAL else None for each in now]
        pairs = zip(record.views, limits, strict=True)
        self._limits = [min(view.budget_bytes, limit or view.budget_bytes) for view, limit in pairs]

    def inside(self, executor: Executor) -> Record | None:
        """Return the record of a step on the first device; None if it exceeds a limit, also without the temporaries of proofs."""
        for _ in range(2):
            found = self._trials.attempted(partial(self._trials.measured, self._regions, executor))
            if isinstance(found, OutOfMemory) or executor.rejected:
                return None
            if all(each.peak_bytes <= limit for each, limit in zip(found, self._limits, strict=True)):
                return found[0]
        return None
