"""Puts a live budget between a model, its regions and their calls, and takes it away again."""

from __future__ import annotations

from torch import nn

from retape.core.errors import InvalidInput
from retape.torch import attach
from retape.torch.discover import find_regions
from retape.torch.fused_loss import can_fuse_loss, fuse_loss, unfuse_loss


class Attachment:
    """A model whose calls, and those of its regions, are answered by a live budget. `under` answers for a plan that was there before."""

    def __init__(self, model: nn.Module, call_root: attach.Caller, call: attach.Caller, *, fuse: bool) -> None:
        self._model = model
        self._fused = False
        self._regions: tuple[nn.Module, ...] = ()
        self.under = attach.caller_of(model)
        if self.under is not None:  # the plan of a fit is the base
            attach.put_over(model, call_root)
            return
        self._regions = tuple(find_regions(model).values())
        done: list[nn.Module] = []
        try:
            for module, caller in ((model, call_root), *((region, call) for region in self._regions)):
                attach.attach(module, caller)
                done.append(module)
        except InvalidInput:
            for module in done:
                attach.detach(module)
            raise
        if fuse and can_fuse_loss(model):
            fuse_loss(model)
            self._fused = True

    def remove(self) -> None:
        """Leave the model as it was before."""
        if self.under is not None:
            attach.put_over(self._model, self.under)
            return
        for module in (self._model, *self._regions):
            attach.detach(module)
        if self._fused:
            unfuse_loss(self._model)
