"""Attaches a live budget to a model: its calls and those of its regions are answered by the budget, until it is removed.

Over the plan of a fit the plan's regions are kept, and only the call of the model itself is answered first by the budget.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from retape.core.errors import InvalidInput
from retape.torch.measure.baseline_memory import device_of
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning import attach
from retape.torch.planning.attach import unwrapped
from retape.torch.planning.discover import find_regions, refuse_graph_replays

_LOG = logging.getLogger("retape")


class ModelAttachment:
    """A model, its regions, and the functions that answer their calls while it is attached.

    `plan` answers for a plan that was attached before, or is None.
    """

    def __init__(self, model: nn.Module, call_root: attach.Caller, call: attach.Caller, *, fuse: bool) -> None:
        self._model, self._call_root, self._call, self._fuse = unwrapped(model), call_root, call, fuse
        self._is_attached = self._fused = False
        self._regions: tuple[nn.Module, ...] = ()
        self.plan: attach.Caller | None = None

    def attach(self) -> None:
        """Answer calls from now on; do nothing if it is attached."""
        if self._is_attached:
            return
        self.plan = attach.caller_of(self._model)
        if self.plan is None:
            self._attach_regions()
        else:
            attach.put_over(self._model, self._call_root)
            self._leave_loss_to_plan()
        self._is_attached = True

    def _attach_regions(self) -> None:
        regions = find_regions(self._model)
        refuse_graph_replays({"the model itself": self._model, **regions})
        self._regions = tuple(regions.values())
        done: list[nn.Module] = []
        try:
            for module in (self._model, *self._regions):
                attach.attach(module, self._call_root if module is self._model else self._call)
                done.append(module)
        except InvalidInput:
            for module in done:
                attach.detach(module)
            raise
        if self._fuse and LIBRARIES.can_fuse_loss(self._model):
            LIBRARIES.fuse_loss(self._model, room_bytes=None, compiled=False)
            self._fused = True

    def _leave_loss_to_plan(self) -> None:
        """Warn once that options=ALL changes nothing over a plan, which was made for the loss as it is."""
        if self._fuse and LIBRARIES.can_fuse_loss(self._model):
            self._fuse = False
            _LOG.warning(
                "retape: %s is fitted with its whole logits, and adaptive(options=ALL) leaves the plan as it is. For a loss in slices "
                "give options=ALL to retape.fit.",
                type(self._model).__name__,
            )

    def remove(self) -> None:
        """Leave the model as it was before."""
        if not self._is_attached:
            return
        self._is_attached = False
        if self.plan is not None:
            attach.put_over(self._model, self.plan)
            self.plan = None
            return
        for module in (self._model, *self._regions):
            attach.detach(module)
        if self._fused:
            LIBRARIES.unfuse_loss(self._model)
            self._fused = False


def budget_device(model: nn.Module | None) -> torch.device:
    """The device on which a live budget counts: the model's; without a model the GPU in use, if any is."""
    if model is not None:
        return device_of(model)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
