"""Select: hold what is expensive, recompute the rest, op by op (Rule 6).

There are two forms. A planned select holds slots by number, without any mode in the first forward; its re-run follows a recipe that
answers ops from held slots and skips those that are not needed. A policy per op, through the `context_fn` of PyTorch's own selective
checkpoint, is followed by modes of our own in both runs. In both, a random op that is answered instead of run leaves its generator in
the state that the op had left.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from retape.core.errors import RecomputeMismatch, StateChanged
from retape.torch.capture.mutation import version_of
from retape.torch.capture.rng import GeneratorStream
from retape.torch.compat import internals
from retape.torch.engine.recipe_mode import BLANK, Recipe, Step
from retape.torch.engine.rerun import Contexts
from retape.torch.engine.trace import RegionTrace, TracedOp, is_view, written_by

# --- planned: a recipe ---------------------------------------------------------------------------------------------


def plan_recipe(trace: RegionTrace, held: frozenset[int]) -> Recipe | None:
    """Return which ops to run, answer and skip when the slots in `held` are held; None where nothing may be skipped.

    Walks backwards from the slots that must be refilled. An op whose results are all held is answered, if nothing writes to
    them later; an op whose results are not needed is skipped, if everything it makes was seen to be used.
    """
    if trace.opaque or not held or any(torch.Tag.dynamic_output_shape in op.op.tags for op in trace.ops):
        return None
    last_written = {storage: number for number, op in enumerate(trace.ops) for storage in op.writes}
    if any(last_written.get(s, -1) >= at for s, at in zip(trace.slots, trace.saved_at, strict=True)):
        return None  # `rrelu` fills its noise after autograd has saved it
    holder = {trace.slots[slot]: slot for slot in sorted(held, reverse=True) if slot < len(trace.slots)}
    rewritten = {storage for op in trace.ops for storage in op.writes}
    settled = holder.keys() & trace.settled()
    while True:
        answerable = (holder.keys() - rewritten) | settled
        steps = _steps(trace, held, answerable, settled)
        torn = _torn(trace, steps)
        if torn.isdisjoint(settled):
            break
        settled = settled - torn
    answers = tuple(
        tuple(holder[storage] if storage in answerable else BLANK for storage, *_ in op.results)
        if step in (Step.ANSWER, Step.BECOME)
        else ()
        for op, step in zip(trace.ops, steps, strict=True)
    )
    checked = _checked(trace, held, steps, answers)
    return Recipe(ops=trace.ops, steps=steps, slots=answers, saved=trace.slots, checked=checked)


def _checked(
    trace: RegionTrace, held: frozenset[int], steps: tuple[Step, ...], answers: tuple[tuple[int, ...], ...]
) -> frozenset[int]:
    """Return the held slots whose answers are read to refill the missing ones, or are themselves missing elsewhere."""
    missing = [slot for slot in range(len(trace.slots)) if slot not in held]
    stop = max((trace.saved_at[slot] for slot in missing), default=0)
    rows = list(zip(trace.ops, steps, answers, strict=True))[:stop]
    read = {trace.slots[slot] for slot in missing}.union(*(op.reads for op, step, _ in rows if step is Step.RUN))
    answered = [pair for op, _, slots in rows for pair in zip(op.results, slots, strict=False)]
    return frozenset(slot for result, slot in answered if slot != BLANK and result[0] in read)


def _torn(trace: RegionTrace, steps: tuple[Step, ...]) -> set[int]:
    """Return storages that cannot start with their final contents.

    A write that is run again needs the contents before it, and all the writes; and where the op that made the storage is not
    answered, skipped writes would leave it without them.
    """
    torn: set[int] = set()
    for op, step in zip(trace.ops, steps, strict=True):
        if step is Step.RUN:
            torn.update(op.writes)
        if step is not Step.BECOME:
            torn.update(op.makes)
    return torn


def _steps(trace: RegionTrace, held: frozenset[int], answerable: Set[int], settled: Set[int]) -> tuple[Step, ...]:
    """Return the treatment of each op, given the storages that can be answered from held slots."""
    empty = {storage for storage, size in enumerate(trace.storage_bytes) if not size}  # they have no values to read
    # An in-place view op increments the version of its tensor: an answer to it needs a version counter of its own.
    apart = settled | {storage for op in trace.ops if op.reshapes for storage in op.reads}
    needed = {storage for slot, storage in enumerate(trace.slots) if slot not in held} - settled
    used = {storage for op in trace.ops for storage in op.reads} | set(trace.slots) | trace.outputs | empty
    steps: list[Step] = []
    later_seeded = False
    for op in reversed(trace.ops):
        step = _step(op, needed, used, later_seeded, answerable)
        if (step is Step.ANSWER and not apart.isdisjoint(op.makes)) or (
            op.uninitialised and not settled.isdisjoint(op.makes)
        ):
            step = Step.BECOME
        # `empty_like` reads a shape, no values; a collective is answered with its held result.
        if step is Step.RUN and not op.is_view and not op.uninitialised and op.collective is None:
            needed.update(storage for storage in op.reads if storage not in settled)
            later_seeded = later_seeded or op.seeded
        steps.append(step)
    return tuple(reversed(steps))


def _step(op: TracedOp, needed: set[int], used: set[int], later_seeded: bool, answerable: Set[int]) -> Step:
    if op.is_view or op.uninitialised or not op.results:
        # A view costs nothing; an op that returns values to Python (`.item()`) must read true ones.
        if not op.results:
            needed.update(op.reads)
        return Step.RUN
    if op.collective is not None:
        return Step.RUN
    dangling = any(storage not in used for storage in op.makes)
    if dangling or (op.seeded and later_seeded):
        return Step.RUN
    if not op.can_be_answered:
        return Step.RUN
    one_each = len(op.makes) == len(op.results)
    held = op.makes and not op.writes and one_each and not answerable.isdisjoint(op.makes)
    if held and needed.intersection(op.makes) <= answerable:
        return Step.ANSWER
    if needed.intersection(op.makes) or needed.intersection(op.writes):
        return Step.RUN
    return Step.SKIP


# --- through PyTorch's context_fn: a policy per op --------------------------------------------------------------------


def select_contexts(contexts: Contexts) -> Contexts:
    """Return our own modes in place of PyTorch's selective ones; other contexts are returned unchanged."""
    first, again = contexts
    policy = internals.selective_policy(first)
    if policy is None or not internals.is_selective_replay(again):
        return contexts
    log = _PolicyLog(policy, internals.selective_mutation_allowed(again))
    return _Holding(log), _Answering(log)


_RUN_AGAIN = object()
_CONSUMED = object()


class _PolicyLog:
    """The policy's decision on each op, in order of its calls, and the results that are held."""

    __slots__ = ("entries", "mutation_allowed", "policy")

    def __init__(self, policy: internals.PolicyFunction, mutation_allowed: bool) -> None:
        self.policy = policy
        self.mutation_allowed = mutation_allowed
        self.entries: dict[Any, list[Any]] = {}


class _HeldResults:
    """Results of one call of an op, with their versions; for a random op, the state in which it left its generator."""

    __slots__ = ("draws", "out", "versions", "written")

    def __init__(self, out: Any, draws: tuple[Any, ...], writes: bool) -> None:
        if type(out) is Tensor:  # nearly always
            self.out: Any = internals.detach_below_autograd(out)
            self.versions: list[Any] = [version_of(self.out)]
        else:
            self.out = pytree.tree_map_only(Tensor, internals.detach_below_autograd, out)
            self.versions = [version_of(leaf) for leaf in pytree.tree_leaves(self.out) if isinstance(leaf, Tensor)]
        if writes:  # autograd increments the version once the op is done, which is after this
            self.versions = [version + 1 if isinstance(version, int) else version for version in self.versions]
        self.draws = draws
        self.written = False

    def check(self) -> None:
        if (
            self.written
            or [version_of(leaf) for leaf in pytree.tree_leaves(self.out) if isinstance(leaf, Tensor)] != self.versions
        ):
            raise StateChanged(
                "Tensor cached during selective activation checkpoint has been mutated: a result that the policy said to save was "
                "changed in place later. Save the op that changes it instead, or change a copy."
            )


class _Holding(TorchDispatchMode):
    """The mode of the first run: asks the policy after each op, and holds the results that it wants saved."""

    def __init__(self, log: _PolicyLog) -> None:
        super().__init__()
        self._log = log
        self._on: dict[int, list[_HeldResults]] = {}  # what is held, by storage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _note(self, entry: _HeldResults) -> None:
        for leaf in [entry.out] if isinstance(entry.out, Tensor) else pytree.tree_leaves(entry.out):
            if isinstance(leaf, Tensor):
                self._on.setdefault(leaf.untyped_storage()._cdata, []).append(entry)

    def _mark_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Mark held results that an op writes to: below autograd a factory's result has a version counter of its own."""
        for target in pytree.tree_leaves(written_by(func, args, kwargs)):
            for entry in self._on.get(target.untyped_storage()._cdata, ()) if isinstance(target, Tensor) else ():
                entry.written = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if func in internals.IGNORED_OPS:
            return out
        kwargs = kwargs or {}
        if self._on and func._schema.is_mutable:
            self._mark_written(func, args, kwargs)
        held = internals.policy_saves(self._log.policy, func, args, kwargs, out) or func is _ITEM
        if held and is_view(func):
            held = False  # running it again costs nothing, and its base may be written to later
        key = func if func is not internals.COMPILED_CODE else internals.selective_key(func, args)
        entry: Any = _RUN_AGAIN
        if held:
            entry = _HeldResults(out, _streams_after(func, out, kwargs), func._schema.is_mutable)
            self._note(entry)
        calls = self._log.entries.get(key)
        if calls is None:
            self._log.entries[key] = [entry]
        else:
            calls.append(entry)
        return out


class _Answering(TorchDispatchMode):
    """The mode of the re-run: answers ops from held results, and runs the rest."""

    is_selective = True

    def __init__(self, log: _PolicyLog) -> None:
        super().__init__()
        self._log = log
        self._calls: dict[Any, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in internals.IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        key = func if func is not internals.COMPILED_CODE else internals.selective_key(func, args)
        index = self._calls.get(key, 0)
        self._calls[key] = index + 1
        entries = self._log.entries.get(key)
        if entries is None or index >= len(entries):
            raise _unknown_op(func, None if entries is None else index)
        entry = entries[index]
        if entry is _RUN_AGAIN:
            return func(*args, **(kwargs or {}))
        if entry is _CONSUMED:
            raise RecomputeMismatch(
                "Trying to backward an extra time. You are only allowed to backward once on any region computed under selective "
                "activation checkpoint: what it held is given back to autograd. Use a region without context_fn to backward twice."
            )
        entries[index] = _CONSUMED
        return self._answer(func, args, kwargs or {}, entry)

    def _answer(self, func: Any, args: Any, kwargs: Any, entry: _HeldResults) -> Any:
        if not self._log.mutation_allowed:
            entry.check()
        for stream, token in entry.draws:
            stream.seek(token)
        written = written_by(func, args, kwargs) if func._schema.is_mutable else []
        if not written:
            return entry.out
        outputs = [entry.out] if isinstance(entry.out, Tensor) else list(entry.out)
        if len(written) != len(outputs):
            return entry.out
        copied = [target.copy_(value) for target, value in zip(written, outputs, strict=True)]
        return copied[0] if isinstance(entry.out, Tensor) else type(entry.out)(copied)


_ITEM = torch.ops.aten._local_scalar_dense.default


def _unknown_op(func: Any, index: int | None) -> RecomputeMismatch:
    which = f"{func}" if index is None else f"{func} invocation index {index}"
    return RecomputeMismatch(
        f"{which} encountered during backward but not found in storage: the region runs other ops in its re-run than in its forward. "
        "Make it do the same twice; retape.keep() records a decision."
    )


def _streams_after(func: Any, out: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the state in which a random op has left its generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return ()
    generator = kwargs.get("generator")
    if generator is None:
        device = next(
            (leaf.device for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)), torch.device("cpu")
        )
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    stream = GeneratorStream(generator)
    return ((stream, stream.peek()),)
