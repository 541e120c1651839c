"""Attachment of `adaptive` to a model or its plan, and the watch over the steps of its ranks.

Steps and regions are run in `manager.py`.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch
from torch import nn

from retape.core.errors import InvalidInput
from retape.torch.distributed.members import Group, members_of
from retape.torch.distributed.steps import StepWatch, watch_steps
from retape.torch.measure.baseline_memory import device_of
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning import attach
from retape.torch.planning.discover import find_regions, refuse_graph_replays

_LOG = logging.getLogger("retape")


class ModelAttachment:
    """A model, its regions, and the functions that answer their calls while it is attached.

    `plan` answers for a plan that was attached before, or is None. What a `manager` has attached is refused.
    """

    def __init__(
        self, model: nn.Module, call_root: attach.Caller, call: attach.Caller, *, manager: type, fuse: bool
    ) -> None:
        self._model, self._call_root, self._call, self._fuse = attach.unwrapped(model), call_root, call, fuse
        self._manager = manager
        self._is_attached = self._fused = False
        self._regions: dict[str, nn.Module] = {}
        self.plan: attach.Caller | None = None

    @property
    def region_names(self) -> tuple[str, ...]:
        return tuple(self._regions)

    def attach(self) -> None:
        """Answer calls from now on; do nothing if it is attached."""
        if self._is_attached:
            return
        self.plan = attach.caller_of(self._model)
        if isinstance(getattr(self.plan, "__self__", None), self._manager):
            raise InvalidInput(
                f"{type(self._model).__name__} is managed by retape.adaptive already. Call remove() on what that returned first, or "
                "keep using it."
            )
        if self.plan is None:
            self._attach_regions()
        else:
            attach.put_over(self._model, self._call_root)
            self._leave_loss_to_plan()
        self._is_attached = True

    def _attach_regions(self) -> None:
        attach.refuse_replicas(self._model)
        regions = find_regions(self._model)
        refuse_graph_replays({"the model itself": self._model, **regions})
        self._regions = regions
        done: list[nn.Module] = []
        try:
            attach.attach(self._model, self._call_root, outside_hooks=True, in_compiled=True)
            done.append(self._model)
            compiled = attach.has_compiled_parts(self._model, regions)
            for module in regions.values():
                attach.attach(module, self._call, in_compiled=compiled)
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
        for module in (self._model, *self._regions.values()):
            attach.detach(module)
        if self._fused:
            LIBRARIES.unfuse_loss(self._model)
            self._fused = False


def budget_device(model: nn.Module | None) -> torch.device:
    """The device on which a budget at run time counts: the model's; without a model the GPU in use, if any is."""
    if model is not None:
        return device_of(model)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


class WatchedSteps:
    """The watch over the steps of the ranks that share a model, or of the world; `watch` is None while it is closed, or for one process.

    With it an error of one rank ends all of them with the same error. Groups that are none of the model's are refused.
    """

    def __init__(self, model: nn.Module | None, group: Group) -> None:
        self._model, self._group = model, group
        self.watch: StepWatch | None = None
        self._closing = ExitStack()
        if model is not None:
            members_of(model, group)

    def open(self, owner: object) -> None:
        """Watch from now on, for as long as `owner` lives; a watch whose process group has ended is replaced."""
        if self.watch is not None and not self.watch.is_over():
            return
        self._closing.close()
        self.watch = watch_steps(members_of(self._model, self._group))
        if self.watch is None:
            return
        self._closing.callback(self.watch.open_for(owner))
        if self._model is not None and attach.unwrapped(self._model) is not self._model:
            # A wrapper has collectives of its own.
            self._closing.callback(attach.watch_calls(self._model, self.watch.run))

    def close(self) -> None:
        """Watch no longer."""
        self._closing.close()
        self.watch = None
