"""Puts a live budget between a model, its regions and their calls, and takes it away again, as often as it is asked to."""

from __future__ import annotations

import logging

import torch
from torch import nn

from retape.core.errors import InvalidInput
from retape.torch.measure.baseline_memory import device_of
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning import attach
from retape.torch.planning.discover import find_regions
from retape.torch.planning.variants.compiled import refuse_graph_replays

_LOG = logging.getLogger("retape")


class Attachment:
    """A model whose calls, and those of its regions, are answered by a live budget while it is put on.

    `under` answers for a plan that was there before.
    """

    def __init__(self, model: nn.Module, call_root: attach.Caller, call: attach.Caller, *, fuse: bool) -> None:
        self._model, self._call_root, self._call, self._fuse = model, call_root, call, fuse
        self._is_on = self._fused = False
        self._regions: tuple[nn.Module, ...] = ()
        self.under: attach.Caller | None = None

    def put_on(self) -> None:
        """Answer calls from now on; where it does already, nothing."""
        if self._is_on:
            return
        self.under = attach.caller_of(self._model)
        if self.under is None:
            self._put_on_regions()
        else:  # the plan of a fit is the base
            attach.put_over(self._model, self._call_root)
            self._leave_loss_to_plan()
        self._is_on = True

    def _put_on_regions(self) -> None:
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
        """A plan was made for the loss as it is: over one, options=ALL changes nothing, and that is said once."""
        if self._fuse and LIBRARIES.can_fuse_loss(self._model):
            self._fuse = False
            _LOG.warning(
                "retape: %s is fitted with its whole logits, and adaptive(options=ALL) leaves the plan as it is. For a loss in slices "
                "give options=ALL to retape.fit.",
                type(self._model).__name__,
            )

    def remove(self) -> None:
        """Leave the model as it was before."""
        if not self._is_on:
            return
        self._is_on = False
        if self.under is not None:
            attach.put_over(self._model, self.under)
            self.under = None
            return
        for module in (self._model, *self._regions):
            attach.detach(module)
        if self._fused:
            LIBRARIES.unfuse_loss(self._model)
            self._fused = False


def device_under(model: nn.Module | None) -> torch.device:
    """Where a live budget counts: the model's device; without one the GPU in use, if any is."""
    if model is not None:
        return device_of(model)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
