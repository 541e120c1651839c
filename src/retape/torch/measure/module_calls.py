"""Saved bytes of each call of a module or of `retape.checkpoint`, and regions chosen by them.

The forward runs under hooks that note what autograd saves and keep nothing, so it needs less memory than a step. From the notes the
peak of a step follows for any choice of modules as regions: storages that are held until backward, and the tape of the region whose
backward runs. A child of `nn.Sequential` and those after it that work in place are one region (`sequential_slices.py`). Regions by
structure alone, without a run, are found in `planning/discover.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from retape.core.assignment import checkpoint_name
from retape.torch.capture.arguments import tensors_of
from retape.torch.compat.compiler_internals import is_compiled, left_alone, replays_cuda_graphs, uncompiled
from retape.torch.engine.context import RegionRequest, running_regions
from retape.torch.engine.policy import DROP_IN
from retape.torch.measure.memory_meter import storages_of
from retape.torch.measure.sequential_slices import region_named, runs_in_order, slice_name, slices_of

Storage = int  # a storage of the forward, by number


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: storages of its inputs and outputs, and in order what it saved and which calls it made.

    It may also represent calls of neighbours in a container, or for a call of `retape.checkpoint`, which is always a region.
    """

    name: str
    inputs: frozenset[Storage] = frozenset()
    outputs: frozenset[Storage] = frozenset()
    events: list[Storage | ModuleCall] = field(default_factory=list)
    is_slice: bool = False
    is_checkpoint: bool = False

    @property
    def is_divisible(self) -> bool:
        """True if calls in it can be regions instead; a layer is not taken from those after it that work in place."""
        if self.is_checkpoint:
            return False
        if self.is_slice:
            return any(call.is_divisible for call in self.events if isinstance(call, ModuleCall))
        return any(inner.events for inner in self.calls())

    def saved(self) -> Iterator[Storage]:
        """Yield the storages that were saved in it, at any depth."""
        for event in self.events:
            if isinstance(event, ModuleCall):
                yield from event.saved()
            else:
                yield event

    def calls(self) -> Iterator[ModuleCall]:
        """Yield the calls in it, at any depth."""
        for event in self.events:
            if isinstance(event, ModuleCall):
                yield event
                yield from event.calls()


@dataclass(frozen=True, slots=True)
class CallTree:
    """The calls of a forward below `root`, which represents the step, and the bytes of each storage."""

    root: ModuleCall
    sizes: list[int]


# --- one forward ------------------------------------------------------------------------------------------------------


class BackwardInside(Exception):
    """Code in the forward takes gradients, and needs what autograd saved."""


def recorded_calls(model: nn.Module, batch: Any, forward: Callable[[], object]) -> CallTree:
    """Run a forward and return its calls; what it saves is kept only if it takes gradients itself."""
    recorder = _Recorder(model, batch)
    try:
        with recorder.recording(keep=False):
            forward()
    except BackwardInside:
        recorder = _Recorder(model, batch)
        with recorder.recording(keep=True):
            forward()
    _join_slices(model, recorder.root)
    return CallTree(recorder.root, recorder.sizes)


def _join_slices(model: nn.Module, root: ModuleCall) -> None:
    """Put calls of neighbours that are one slice of their container into one call."""
    names = {id(module): name for name, module in _called_modules(model)}
    slices: dict[str, list[tuple[str, list[str]]]] = {}
    for name, module in (("", model), *_called_modules(model)):
        if runs_in_order(module):
            children = [names.get(id(child), "") for child in module]  # type: ignore[attr-defined]  # nn.Sequential
            found = slices_of(module)  # type: ignore[arg-type]  # as above
            slices[name] = [(slice_name(name, start, stop), children[start:stop]) for start, stop in found]
    for call in (root, *root.calls()):
        call.events = list(_joined(call.events, slices.get(call.name, [])))


def _joined(events: list[Storage | ModuleCall], slices: list[tuple[str, list[str]]]) -> Iterator[Storage | ModuleCall]:
    """Yield the events of a container, with the calls of each slice as one; slices are in the order of their calls."""
    waiting, number = list(slices), 0
    while number < len(events):
        name, children = waiting[0] if waiting else ("", [])
        calls = [event for event in events[number : number + len(children)] if isinstance(event, ModuleCall)]
        if children and [call.name for call in calls] == children:
            waiting.pop(0)
            yield ModuleCall(name, calls[0].inputs, calls[-1].outputs, list(calls), is_slice=True)
            number += len(children)
        else:
            yield events[number]
            number += 1


class _Recorder:
    """Records the calls of a model's modules and what autograd saves in each."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.root = ModuleCall("")
        self.sizes: list[int] = []
        self._model = model
        self._running = [self.root]
        self._checkpoints = count()
        self._numbers: dict[int, tuple[StorageWeakRef, Storage]] = {}
        self._weights = self._numbers_of([*model.parameters(), *model.buffers()], size=0)
        self._numbers_of(tensors_of(batch), size=0)  # there before and after a step

    def _number(self, storage: Any, size: int | None) -> Storage:
        known = self._numbers.get(storage._cdata)
        if known is None or known[0].expired():
            known = self._numbers[storage._cdata] = (StorageWeakRef(storage), len(self.sizes))
            self.sizes.append(storage.nbytes() if size is None else size)
        return known[1]

    def _numbers_of(self, tensors: list[Tensor], size: int | None = None) -> frozenset[Storage]:
        return frozenset(self._number(storage, size) for storage in storages_of(tensors))

    @contextmanager
    def recording(self, *, keep: bool) -> Iterator[None]:
        """Record until the end; without `keep` nothing that autograd saves is kept."""
        with ExitStack() as stack:
            for name, module in _called_modules(self._model):
                begin = module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
                stack.callback(begin.remove)
                stack.callback(module.register_forward_hook(self._end, always_call=True).remove)
            stack.enter_context(saved_tensors_hooks(partial(self._save, keep), _kept))
            stack.enter_context(running_regions(self))
            yield

    def run(self, request: RegionRequest) -> Any:
        """Record a call of `retape.checkpoint`, which a plan may keep: what its function saves is noted."""
        if request.policy is not DROP_IN:
            return NotImplemented
        name = checkpoint_name(str(next(self._checkpoints)))  # one name for each call: they are not divided together
        inputs = self._numbers_of(tensors_of((request.arguments, request.keywords)))
        noted = ModuleCall(name, inputs, is_checkpoint=True)
        self._running[-1].events.append(noted)
        self._running.append(noted)
        outputs = request.function(*request.arguments, **request.keywords)
        self._running.pop().outputs = self._numbers_of(tensors_of(outputs))
        return outputs

    @uncompiled
    def _begin(self, name: str, module: nn.Module, args: Any, keywords: Any) -> None:
        call = ModuleCall(name, self._numbers_of(tensors_of((args, keywords))))
        self._running[-1].events.append(call)
        self._running.append(call)

    @uncompiled
    def _end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._running.pop().outputs = self._numbers_of(tensors_of(outputs))

    @left_alone
    def _save(self, keep: bool, tensor: Tensor) -> Tensor | None:
        self._running[-1].events += self._numbers_of([tensor]) - self._weights
        return tensor.detach() if keep else None


def _kept(saved: Tensor | None) -> Tensor:
    if saved is None:
        raise BackwardInside
    return saved


def _called_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model whose calls Python sees, which excludes those inside a compiled or scripted one."""
    seen: set[nn.Module] = {model}
    waiting = [("", model)]
    while waiting:
        above, module = waiting.pop()
        for own, part in module.named_children():
            if part in seen or isinstance(part, torch.jit.ScriptModule) or replays_cuda_graphs(part):
                continue
            seen.add(part)
            name = f"{above}.{own}" if above else own
            yield name, part
            if not is_compiled(part):
                waiting.append((name, part))


# --- regions by bytes -------------------------------------------------------------------------------------------------


def regions_by_bytes(
    model: nn.Module, tree: CallTree, *, region_bytes: int, tolerance: float, divided: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Return the regions whose predicted floor is lowest, by name, up to a share `tolerance` of it; none is inside another.

    For a limit the regions are the largest modules whose backward stays inside it: a bisection over the limit, in which modules
    that do not fit are divided into the modules that they call. `region_bytes` count for each region beside its inputs. Those
    named in `divided` are divided in any case: a measurement has shown that they need more than they save.
    """
    low, high = 0, 3 * sum(tree.sizes) + region_bytes * sum(1 for _ in tree.root.calls())
    best = _regions_within(tree, high, region_bytes, divided) or ()
    while high - low > max(1, tolerance * high):
        limit = (low + high) // 2
        found = _regions_within(tree, limit, region_bytes, divided)
        if found is None:
            low = limit
        else:
            best, high = found, limit
    by_code = {call.name for call in tree.root.calls() if call.is_checkpoint}
    return {name: region_named(model, name) for name in best if name not in by_code}


def _regions_within(tree: CallTree, limit: int, region_bytes: int, always: Collection[str]) -> tuple[str, ...] | None:
    """Return the largest modules as regions whose predicted peak is inside the limit; None if there are none."""
    divisible = {call.name for call in tree.root.calls() if call.is_divisible}
    divided = divisible.intersection(always)
    while True:
        step = _PredictedStep(tree, divided, region_bytes)
        too_large = {name for name, peak in step.peaks.items() if peak > limit}
        more = step.nested | (too_large & divisible)
        if not more:
            return None if too_large or step.held_bytes > limit else tuple(step.peaks)
        divided |= more


class _PredictedStep:
    """A step with the outermost modules that are not `divided` as regions: the bytes held at its end, and each region's peak.

    A region's input is not held if the region right before it made it and nothing was saved between: it can be recomputed.
    """

    def __init__(self, tree: CallTree, divided: set[str], region_bytes: int) -> None:
        self.held_bytes = 0
        self.peaks: dict[str, int] = {}
        self._inside: set[str] = set()
        self._sizes, self._divided, self._region_bytes = tree.sizes, divided, region_bytes
        self._held: set[Storage] = set()
        self._made: set[Storage] = set()  # by regions
        self._made_last: frozenset[Storage] = frozenset()
        self._follow(tree.root)

    @property
    def nested(self) -> set[str]:
        """Regions that are also called inside another one."""
        return self._inside & self.peaks.keys()

    def _follow(self, call: ModuleCall) -> None:
        for event in call.events:
            if not isinstance(event, ModuleCall):
                self._hold((event,))
                self._made_last = self._made_last if self._sizes[event] == 0 else frozenset()
            elif event.name in self._divided:
                self._follow(event)
            else:
                self._run(event)

    def _hold(self, storages: Iterable[Storage]) -> None:
        new = set(storages) - self._held
        self._held |= new
        self.held_bytes += sum(self._sizes[storage] for storage in new)

    def _run(self, call: ModuleCall) -> None:
        saved = set(call.saved())
        if not saved or sum(self._sizes[storage] for storage in saved | call.outputs) <= self._region_bytes:
            self._hold(saved)
            return
        made = call.inputs & self._made
        self._hold(call.inputs - self._made_last if made <= self._made_last else call.inputs)
        self.held_bytes += self._region_bytes
        tape = [self._sizes[storage] for storage in (saved | call.inputs) - self._held]
        # The largest once more, for its gradient.
        peak = self.held_bytes + sum(tape) + max(tape, default=0)
        self.peaks[call.name] = max(peak, self.peaks.get(call.name, 0))
        self._inside.update(inner.name for inner in call.calls())
        self._made_last = call.outputs
        self._made |= call.outputs
