"""The usual region, noted in short: a module by itself that holds nothing but parameters, called with plain tensors that need gradients.

Nearly every region is like this. What its call reads is known from the module's layout, and that it changes nothing from the
calls before; so a few lists say all that a `Call` and a `Watch` would. Those are made of them where something turns out to be
unusual after all (a parameter was written to or frozen since, the call writes to its input, somebody asks), as if they had
been there from the start. What a region does, and why, is in `region.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from operator import attrgetter
from types import MethodType
from typing import Any

from torch import Tensor

from retape.torch.capture import ambient as state
from retape.torch.capture.call import Call, twins_of, usual_call, whose_call
from retape.torch.capture.module_tree import Tree
from retape.torch.capture.module_tree_cache import read_simple_tree
from retape.torch.capture.mutation import Watch, drop_hooks, is_known_to_change_nothing, recalled
from retape.torch.compat import internals
from retape.torch.engine import links
from retape.torch.engine.policy import DROP_IN, Check, Inputs, Policy
from retape.torch.engine.region import Region, unpack
from retape.torch.engine.runs import THREAD, Stop
from retape.torch.engine.slots import Filler, Slot, as_it_is
from retape.torch.engine.transforms import raise_explained

# Asked for with every region: a name of the module's is the cheapest to find.
_new = object.__new__
_version, _needs_grad = attrgetter("_version"), attrgetter("requires_grad")
_backward_hooks = attrgetter("_backward_hooks")
_push_hooks, _pop_hooks, _top_hooks = internals.push_hooks, internals.pop_hooks, internals.top_hooks
_count_dispatch_modes = internals.count_dispatch_modes
_capture, _streams, _drawn, _Ambience = state.capture, state.streams, state.drawn, state.Replay
_HeldHere, _HOLD, _OFF = links.HeldHere, Inputs.HOLD, Check.OFF
_FSDP_STATE, _IMPORTED = internals.FSDP_STATE, sys.modules
_TENSOR = frozenset({Tensor})
_NONE: set[int] = set()  # never changed, only replaced


class UsualRegion(Region):
    """A region whose call and watch are made only where somebody asks for them."""

    _contexts = None
    _is_watched = False
    _twins: Sequence[tuple[int, int]] = ()
    _function: Callable[..., Any]
    _tree: Tree  # what the module held
    _state: list[Tensor]  # its parameters
    _before: list[int]  # the versions of the arguments and the parameters
    _inputs: links.HeldHere
    _needed: list[bool]  # which parameters needed gradients

    # What is found here, and not in the instance, is made when it is asked for. (A `__getattr__` would slow every other field down.)
    @cached_property
    def _call(self) -> Call:  # type: ignore[override]
        call = usual_call(self._function, self._tree, [])
        call.twins = tuple(self._twins)
        return call

    @cached_property
    def _watch(self) -> Watch:  # type: ignore[override]
        self._is_watched = True
        return recalled(self._call, self._before, self._needed, over=not self._running)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        running = THREAD.runs
        _push_hooks(self._pack, unpack)  # first: they may be forbidden
        running.append(self)
        try:
            outputs = function(*arguments)
        except RuntimeError as error:
            raise_explained(self.name, error)
        finally:
            _pop_hooks()
            running.pop()
        self._draws = _drawn(self._draws)
        if self._is_watched or list(map(_version, [*arguments, *self._state])) != self._before:
            with internals.unobserved():
                self._watch.settle(list(arguments), self)
        self._running = False
        if self.policy.linkable:
            links.register_outputs(self, outputs)
        return outputs

    def _rerun(self, targets: dict[int, Slot], early_stop: bool, made: links.Made | None = None) -> Any:
        held = self._inputs.held
        if self._running or list(map(_version, held + self._state)) != self._before:
            return super()._rerun(targets, early_stop, made)
        return self._attempt(Filler(self, targets, early_stop), held, None)

    def _replayed(self, filler: Filler, held: list[Tensor], mode: AbstractContextManager[Any] | None) -> Any:
        parameters, tree = self._state, self._tree
        if (
            mode is not None
            or self._backward_inside
            or list(map(_needs_grad, parameters)) != self._needed
            or any(map(_backward_hooks, parameters))
        ):
            return super()._replayed(filler, held, mode)
        around = _Ambience(self._ambient, self._draws)
        try:
            tree.enter()
            _push_hooks(filler.pack, as_it_is)
            try:
                return self._function(*self._arguments_again(held))
            except Stop as stop:
                if stop.filler is not filler:
                    raise
                return None
            finally:
                _pop_hooks()
                if any(map(_backward_hooks, parameters)):
                    drop_hooks(parameters, [0] * len(parameters))
        finally:
            tree.leave()
            around.leave()

    def _arguments_again(self, held: list[Tensor]) -> list[Tensor]:
        arguments = []
        for tensor in held:
            leaf = tensor.detach()
            leaf.requires_grad = True
            arguments.append(leaf)
        for place, first in self._twins:
            arguments[place] = arguments[first]
        return arguments


def usual_region(
    function: Callable[..., Any], arguments: tuple[Any, ...], policy: Policy, check: Check, early_stop: bool
) -> UsualRegion | None:
    """A region for a call without keywords, if it is a usual one and nothing unusual is around it."""
    if not arguments or not _TENSOR.issuperset(map(type, arguments)) or not all(map(_needs_grad, arguments)):
        return None
    if policy is not DROP_IN and (policy.inputs is not _HOLD or policy.recipe is not None or policy.moves):
        return None
    tree = read_simple_tree(whose_call(function) if type(function) is MethodType else function)
    if tree is None or _count_dispatch_modes() or _top_hooks(True) is not None:
        return None
    if _FSDP_STATE in _IMPORTED and internals.fsdp_in_use():
        return None
    if not is_known_to_change_nothing(tree, len(arguments)):
        return None
    region = _new(UsualRegion)
    region._state = parameters = tree.state
    try:
        region._before = list(map(_version, [*arguments, *parameters]))
    except RuntimeError:  # an inference tensor has no version
        return None
    region._needed = needed = list(map(_needs_grad, parameters))
    region._own_ids = set(map(id, parameters)) if False in needed else _NONE
    region._function, region._tree = function, tree
    region.policy, region.early_stop = policy, early_stop
    region.check, region._compares = check, check is not _OFF
    region._slots = []
    region._arguments = tuple(map(id, arguments))
    region._ambient = _capture()
    region._draws = _streams(())
    region._inputs = inputs = _new(_HeldHere)
    inputs.held = [tensor if tensor.grad_fn is None else tensor.detach() for tensor in arguments]
    if len(arguments) > 1:
        region._twins = twins_of(arguments)
    return region
