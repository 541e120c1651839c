"""Budgets in bytes of one device: "auto" and one per device; suggestions for a budget that is too small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from retape.core.assignment import OUTSIDE_REGIONS
from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.problem import Budget, BudgetKind, OptionSet
from retape.core.units import format_bytes
from retape.torch.compat.host_memory import available_host_bytes
from retape.torch.measure.tuning import TUNING

_ROOT = Path("/")


def budgets_of(budget: Budget, devices: Sequence[torch.device]) -> dict[torch.device, Budget]:
    """Return the budget of each device; a fraction or "auto" holds for each of them."""
    if len(devices) > 1 and budget.kind in (BudgetKind.TOTAL, BudgetKind.ACTIVATIONS):
        names = ", ".join(str(device) for device in devices)
        example = ", ".join(f"{str(device)!r}: '8GiB'" for device in devices)
        raise InvalidInput(
            f"The model trains on several devices ({names}), and the budget is one number of bytes. Give each its own: "
            f"budget={{{example}}}."
        )
    return {device: resolved(budget, device) for device in devices}


def resolved(budget: Budget, device: torch.device, *, available: Callable[[torch.device], int] | None = None) -> Budget:
    """Return a budget in bytes or a fraction for this device; "auto" asks `available`, by default `available_bytes`."""
    if budget.kind is BudgetKind.PER_DEVICE:
        return resolved(_share_of(budget, device), device, available=available)
    if budget.kind is BudgetKind.AUTO:
        limit = (available or available_bytes)(device)
        return Budget(kind=BudgetKind.TOTAL, limit_bytes=limit, in_flight=budget.in_flight)
    return budget


def _share_of(budget: Budget, device: torch.device) -> Budget:
    """Return this device's part of a budget per device."""
    parts = {device_named(name): part for name, part in budget.devices}
    for name in (device, torch.device(device.type)):
        if name in parts:
            return replace(parts[name], in_flight=budget.in_flight)
    raise InvalidInput(
        f"The model trains on {device}, and the budget names {', '.join(name for name, _ in budget.devices)} only. "
        f"Give it bytes for {str(device)!r}."
    )


def device_named(name: str) -> torch.device:
    """The device that a budget names."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(
            f"The budget names {name!r}, which is not a device. Give names such as 'cpu' or 'cuda:0'."
        ) from error


def available_bytes(device: torch.device, *, root: Path = _ROOT, cuda: Any = None) -> int:
    """Bytes that this process could allocate on the device, its own reserved ones included, less a margin.

    `root` is the folder that has the host's `proc` and `sys`.
    """
    if device.type == "cuda":
        allocator = cuda or torch.cuda
        free, total = allocator.mem_get_info(device)
        whole = int(free) + int(allocator.memory_reserved(device))
    else:
        whole = total = _host_bytes(root)
    margin = max(int(TUNING.margin_share * total), min(TUNING.least_margin_bytes, whole // 4))
    return max(1, whole - margin)


def _host_bytes(root: Path) -> int:
    """Return the available memory of the host, within the limits of the process's control groups."""
    found = available_host_bytes(root)
    if found is None:
        raise InvalidInput(
            "This machine does not report how much memory is free. Give a budget in bytes instead of 'auto'."
        )
    return found


def refuse_optimizer_step(budget: Budget, device: torch.device, fixed_bytes: int, temporary_bytes: int) -> None:
    """Raise BudgetTooSmall if the temporary tensors of an optimizer's step exceed a budget that counts everything."""
    least = fixed_bytes + temporary_bytes
    if budget.kind is not BudgetKind.TOTAL or budget.limit_bytes is None or least <= budget.limit_bytes:
        return
    if not temporary_bytes:
        return  # weights, gradients and states alone do not fit: the search says so, with the floor
    raise BudgetTooSmall(
        f"optimizer.step() needs {format_bytes(temporary_bytes)} for temporary tensors beside {format_bytes(fixed_bytes)} of weights, "
        f"gradients and states on {device}: {format_bytes(least)}, and the budget is {format_bytes(budget.limit_bytes)}. Make the "
        "optimizer with fused=True, which needs none, or with foreach=False.",
        budget_bytes=budget.limit_bytes,
        floor_bytes=least,
        binding="optimizer.step()",
    )


def add_suggestions(error: BudgetTooSmall, budget: Budget, options: OptionSet, *, can_fuse: bool) -> BudgetTooSmall:
    """Return the error with a suggestion: what else would lower the floor, or what was probably meant."""
    few = budget.limit_bytes
    if few is not None and few < TUNING.implausible_budget_bytes:
        more = f"{few} is a number of bytes; a share of the activations is a float, such as 0.5 or 1.0."
    elif error.binding.startswith(OUTSIDE_REGIONS):
        more = (
            "No plan drops those tensors. Give the code that makes them to retape.checkpoint, whose calls are regions, or put it into "
            "a module."
        )
    elif options.slices:
        return error
    else:
        fused = "computes the loss in slices, without whole logits, and " if can_fuse else ""
        more = (
            f"options=retape.ALL {fused}may run parts of a region in tiles; its gradients are summed in another order."
        )
    return BudgetTooSmall(
        f"{error} {more}",
        budget_bytes=error.budget_bytes,
        floor_bytes=error.floor_bytes,
        binding=error.binding,
    )
