"""Host memory of one fit: its limit, optimizer states, the rest for slots and inputs, and a disk.

The pool of host memory and the copies are in `engine/host`; what a plan moves is decided in `planning`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.problem import Budget, BudgetKind, Tier
from retape.core.units import format_bytes
from retape.torch.engine.host.copy_streams import STREAMS, TUNING, HostPool
from retape.torch.engine.host.optimizer_states import HostStates, refuse_moving
from retape.torch.engine.host.spill import SpillFolder, spill_at

DiskRequest = tuple["str | Path | None", "str | int | None"]  # a folder, and its budget


class HostRoom:
    """The host memory that one fit may use. With `moves_states`, the states of its optimizer are there from now on."""

    def __init__(
        self,
        device: torch.device,
        *,
        host_budget: str | int | None = None,
        disk: DiskRequest = (None, None),
        disk_tier: Callable[[SpillFolder], Tier] = SpillFolder.tier,
        optimizer: Any = None,
        moves_states: bool = False,
        pending_bytes: Callable[..., int] = lambda optimizer, device: 0,
        gradient_bytes: int = 0,
    ) -> None:
        """`pending_bytes` returns the bytes of states that the first step will make. `disk` is a folder, and its budget.

        `gradient_bytes` are those of the gradients that there are: a fit has copies of them on the host while it runs.
        """
        self._device, self._optimizer, self._gradient_bytes = device, optimizer, gradient_bytes
        pool = STREAMS.of(device).pool
        self.limit_bytes = None if host_budget is None else _limited(pool, host_budget, gradient_bytes)
        self.states: HostStates | None = None
        self.states_bytes = 0
        self.folder = folder = spill_folder(device, disk)
        self._staging_bytes = 0 if folder is None else folder.staging_bytes
        try:
            self.disk = None if folder is None else _for_regions(disk_tier(folder), folder)
            if moves_states:
                self._move_states(pending_bytes)
        except BaseException:
            self.remove()
            raise

    def _move_states(self, pending_bytes: Callable[..., int]) -> None:
        if self._optimizer is None:
            raise InvalidInput("options=OPTIMIZER_ON_HOST needs the optimizer: give fit(..., optimizer=...).")
        refuse_moving(self._optimizer)
        needed = _present_bytes(self._optimizer) + pending_bytes(self._optimizer, self._device)
        pool = STREAMS.of(self._device).pool
        limit = pool.limit_bytes if self.limit_bytes is None else self.limit_bytes
        if needed > limit:
            raise InvalidInput(
                f"The states of {type(self._optimizer).__name__} take {format_bytes(needed)}, and the host may hold {format_bytes(limit)}. "
                "Raise host_budget if the machine has more, or leave OPTIMIZER_ON_HOST out."
            )
        self.states, self.states_bytes = HostStates(self._optimizer), needed

    def remove(self) -> None:
        """Bring the optimizer's states back to the device, and close the folder on the disk."""
        if self.folder is not None:
            self.folder.close()
        if self.states is not None:
            self.states.remove()

    @property
    def counted_optimizer(self) -> Any:
        """The optimizer if its states are on the device between steps; None if they are not."""
        return None if self.states is not None else self._optimizer

    def left_of(self, tier: Tier | None) -> Tier | None:
        """Return the host as a tier that has room for slots and inputs beside the states; None if there is no host."""
        if tier is None:
            return None
        limits = [each for each in (tier.capacity_bytes, self.limit_bytes) if each is not None]
        if not limits:
            return tier
        # A budget of the user's own was checked to leave room for the copies of gradients.
        copies = self._gradient_bytes if self.limit_bytes is None else 0
        return replace(tier, capacity_bytes=max(0, min(limits) - copies - self.states_bytes - self._staging_bytes))

    @property
    def disk_part_bytes(self) -> int:
        """The most bytes of one region that may go to a disk: they and those of the region before it are in host memory at once."""
        return self._staging_bytes // 2

    def step_buckets(self) -> tuple[float, int]:
        """Return the share of the states that a step updates at once, and the bytes of states that it has on the device for that."""
        return (1.0, 0) if self.states is None else self.states.largest_bucket()


def spill_folder(device: torch.device, disk: DiskRequest) -> SpillFolder | None:
    """Return a new folder on a disk, with its limits; None if no disk is asked for."""
    root, disk_budget = disk
    if root is None:
        if disk_budget is not None:
            raise InvalidInput("disk_budget needs a folder: give `disk` too, or leave it out.")
        return None
    limit = None if disk_budget is None else _bytes_of("disk_budget", disk_budget)
    return spill_at(root, limit, int(TUNING.staging_share * STREAMS.of(device).pool.limit_bytes))


def _for_regions(tier: Tier, folder: SpillFolder) -> Tier:
    """Return the disk as a tier; its figures must be those of the budget that was given."""
    return replace(tier, capacity_bytes=min(folder.limit_bytes, tier.capacity_bytes or folder.limit_bytes))


def _bytes_of(name: str, value: str | int) -> int:
    """Return a budget in bytes; raise InvalidInput for anything else."""
    asked = Budget.of(value)
    if asked.kind is not BudgetKind.TOTAL or asked.limit_bytes is None:
        raise InvalidInput(f"{name}={value!r} is not a number of bytes; give one such as '64GiB'.")
    return asked.limit_bytes


def _limited(pool: HostPool, host_budget: str | int, gradient_bytes: int) -> int:
    """Limit the pool to a budget; raise InvalidInput if the machine does not have it."""
    limit, most = _bytes_of("host_budget", host_budget), pool.possible_bytes - gradient_bytes
    if limit > most:
        copies = f", beside copies of gradients ({format_bytes(gradient_bytes)}) during a fit" if gradient_bytes else ""
        raise InvalidInput(
            f"host_budget is {format_bytes(limit)}, and this process can have {format_bytes(most)} of host memory, "
            f"limits of its control groups counted{copies}. Give at most that, and leave some for the rest of the process."
        )
    pool.limit_bytes = limit
    return limit


def _present_bytes(optimizer: Any) -> int:
    """Return the bytes of the states that there are."""
    leaves = [value for state in optimizer.state.values() for value in state.values()]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
