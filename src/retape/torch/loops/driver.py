"""The driver of a loop, which executes a schedule, and the loop's one autograd node.

In the forward every step is taped and its tape dropped (so the kernels are those of plain autograd, and every parameter is found),
except for the last tape, which waits for the backward pass. The schedules of `core` decide what is stored; continuing from files is
in `resume.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retape.core.actions import Backward, Forward, Free, Item, Load, Save
from retape.core.errors import InvalidInput, RegionError, StateChanged, UnsupportedTransform
from retape.core.schedules.online import forward_phase
from retape.torch.capture import ambient, rng
from retape.torch.capture.holders.tensor_attributes import without_new_hooks
from retape.torch.capture.mutation import versions_of
from retape.torch.compat import compiler_internals, internals
from retape.torch.loops.plan import StepAction, TapeSteps, reversal
from retape.torch.loops.side_state import NOTHING_SAVED, SideState
from retape.torch.loops.snapshots import LoopSnapshot, SnapshotLost, TierStore
from retape.torch.loops.state import State, checksum_of, unflatten
from retape.torch.loops.step import Body, Grads, LoopGradients, TapedSteps

if TYPE_CHECKING:
    from retape.torch.loops.captured_tensors import CapturedTensors
    from retape.torch.loops.resume import Resume

Actions = Callable[[], Iterator[StepAction]]


class Driver:
    """Carries out a schedule's actions over a loop's body."""

    def __init__(
        self,
        body: Body,
        captured: CapturedTensors,
        side_state: SideState,
        initial: State,
        *,
        generators: list[Any],
        store: TierStore,
        snapshots: int,
        block: int,
        resume: Resume | None = None,
    ) -> None:
        self.body = body
        self.captured = captured
        self.initial = initial
        self.steps = 0
        self.final = initial
        self._nothing = initial.emptied()
        self.store = store
        self.block = block
        self.snapshots = snapshots
        self.resume = resume
        self.ambient = ambient.capture()
        self.streams, self._start_tokens = rng.capture(generators)
        self._side_state = side_state
        self._tapes: dict[int, TapedSteps] = {}
        self._working = initial
        self._tape: TapedSteps | None = None
        self._rest: Actions = lambda: iter(())
        self._read: list[tuple[str, Tensor]] = []
        self._read_versions: list[Any] = []
        self._released = False

    # --- the first run -----------------------------------------------------------------------------------------

    def run_scheduled(self, steps: int, actions: Actions) -> None:
        """Run a schedule of known length up to the tape of its last steps."""
        self.steps = steps
        begin = self._begin()
        done = 0
        with ambient.RestoredAmbient(self.ambient, first_run=True):
            for action in actions() if not begin.ended else ():
                done += 1
                if begin.skips(self, action):
                    continue
                self.perform(action)
                if isinstance(action, TapeSteps) and action.stop == steps:
                    break
        if not begin.ended:
            self._rest = lambda: islice(actions(), done, None)
        self._finish_forward(from_files=begin.ended)

    def run_while(self, cond: Callable[[Any], Any], most: int | None) -> None:
        """Run while `cond` is true, at most `most` steps, by the online schedule, which keeps at most `snapshots` snapshots."""
        begin = self._begin()
        self.steps = begin.at
        asked: dict[int, bool] = {}

        def more() -> bool:
            if self.steps not in asked:
                asked.clear()
                asked[self.steps] = (most is None or self.steps < most) and self._ask(cond)
            return asked[self.steps]

        with ambient.RestoredAmbient(self.ambient, first_run=True):
            for action in forward_phase(self.snapshots) if not begin.ended else ():
                assert isinstance(action, Forward | Save | Free)
                if begin.skips(self, action):
                    continue
                if not more():  # before anything is stored or dropped for a step that will not come
                    break
                if not isinstance(action, Forward):
                    self.perform(action)
                elif not self._advance_while(more, action.stop):
                    break
        if not begin.ended:
            self._plan_reversal()
        self._finish_forward(from_files=begin.ended)

    def _ask(self, cond: Callable[[Any], Any]) -> bool:
        """Call `cond`; InvalidInput if it draws random numbers or changes its carry."""
        state, before = self._working, (self.streams, rng.peek(self.streams))
        with torch.no_grad():
            verdict = bool(cond(unflatten(state.leaves, state.spec)))
        if rng.moved(before):
            raise InvalidInput(
                f"{self.body.name}: cond draws random numbers, which a re-run of the steps would not draw. Draw them in the step, and "
                "put what follows from them into the carry."
            )
        if state.modified_leaf() is not None:
            raise InvalidInput(f"{self.body.name}: cond changed its carry in place. Let it only read the carry.")
        return verdict

    def _advance_while(self, more: Callable[[], bool], stop: int) -> bool:
        while self.steps < stop:
            if not more():
                return False
            self._tape = None  # the tape of the last step is kept; it is not the last if another follows
            self._tape = self._tape_steps(self.steps, self.steps + 1)
            self.steps += 1
        return True

    def _plan_reversal(self) -> None:
        """Plan the backward pass of a loop whose length is known only now."""
        taped, last = self._tape is not None, self.steps - 1
        if taped and last in self.store.steps():
            self.store.drop(last)
        end = last if taped else self.steps
        stored = [step for step in self.store.steps() if step < end]
        snapshots, block = self.snapshots, self.block  # not `self`: that would be a reference cycle

        def actions() -> Iterator[StepAction]:
            if taped:
                yield Backward(end)
            yield from reversal(stored, end, snapshots, block)

        self._rest = actions

    def _begin(self) -> _ResumePoint:
        """Return the point at which the first run begins: the start, or the last state in the journal."""
        if self.resume is None:
            return _ResumePoint({}, 0)
        found, reached, end = self.resume.restore()
        if end is not None:
            self.start_at(end)
            for step, snapshot in {0: self._first_snapshot(), **found}.items():
                self.store.put(step, snapshot, self.store.slowest)
            stored, snapshots, block = self.store.steps(), self.snapshots, self.block
            self._rest = lambda: reversal(stored, reached, snapshots, block)
        return _ResumePoint(found, max(found, default=0), ended=end is not None, steps=reached)

    def start_at(self, snapshot: LoopSnapshot) -> None:
        """Continue from a snapshot of a killed run."""
        self._working = snapshot.state
        self._side_state.overwrite(snapshot.side_state)
        rng.rewind((self.streams, snapshot.tokens))

    def _finish_forward(self, *, from_files: bool) -> None:
        self.final = self._working
        self.captured.finish()
        self._read = [*self._side_state.unchanged(), *[("its graph", tensor) for tensor in self.captured.tensors]]
        self._read_versions = versions_of([tensor for _, tensor in self._read])
        self.body.rerun = True
        if self._tape is not None and self._tape.start not in self.body.checksums:
            self.body.checksums[self._tape.start] = checksum_of(self._tape.carry_in)
        if self.resume is not None and not from_files:
            self.resume.ended(self.steps, self._snapshot())

    # --- the schedule's actions --------------------------------------------------------------------------------

    def perform(self, action: StepAction) -> None:
        """Carry out one action, except Backward."""
        if isinstance(action, Forward):
            self._advance(action.start, action.stop)
        elif isinstance(action, TapeSteps):
            self._tape = self._tape_steps(action.start, action.stop)
        elif isinstance(action, Save):
            self._save(action)
        elif isinstance(action, Load):
            self._load(action.step)
        elif isinstance(action, Free):
            self.store.drop(action.step, action.tier)
            if not self.body.rerun:
                self.body.checksums.pop(action.step, None)
                if self.resume is not None:
                    self.resume.freed(action.step)
        else:
            raise AssertionError(f"{action} is not an action that runs or stores steps")

    def _advance(self, start: int, stop: int) -> None:
        if self.body.rerun:
            self._working = self.body.advance(self._working, start, stop) if start < stop else self._working
            return
        for step in range(start, stop):
            self._tape_steps(step, step + 1)

    def _tape_steps(self, start: int, stop: int) -> TapedSteps:
        if self.body.rerun:
            tape, self._working = self.body.tape(self._working, start, stop)
            return tape
        since = internals.next_sequence_number()
        tape, self._working = self.body.tape(self._working, start, stop)
        self.captured.walk(tape, since)
        self._side_state.after_step()
        return tape

    def _save(self, action: Save) -> None:
        if action.item is Item.TAPE:
            assert self._tape is not None
            self._tapes[action.step], self._tape = self._tape, None
            return
        snapshot = self._snapshot()
        self.store.put(action.step, snapshot, action.tier)
        if not self.body.rerun:
            self.body.checksums[action.step] = checksum_of(self._working.leaves)
            if self.resume is not None:
                self.resume.saved(action.step, snapshot)

    def _snapshot(self) -> LoopSnapshot:
        return LoopSnapshot(self._working, rng.peek(self.streams), self._side_state.save())

    def _first_snapshot(self) -> LoopSnapshot:
        return LoopSnapshot(self.initial, self._start_tokens, NOTHING_SAVED)

    def _load(self, step: int) -> None:
        """Make the state before `step` the working one; if its snapshot is lost, recompute it from an earlier one."""
        start, snapshot = 0, self._first_snapshot()
        for known in (step, *[other for other in reversed(self.store.steps()) if other < step]):
            try:
                snapshot = self.store.get(known)
            except SnapshotLost:
                continue
            start = known
            break
        snapshot.state.check(self.body.name, start)
        self._working = snapshot.state
        self._side_state.restore(snapshot.side_state)
        rng.rewind((self.streams, snapshot.tokens))
        self._advance(start, step)

    # --- the backward pass -------------------------------------------------------------------------------------

    def backward(self, carry: Grads, ys: Grads, *, keep: bool) -> LoopGradients:
        """Return the gradients of the initial carry, of xs and of the captured tensors."""
        if self._released:
            raise RegionError(
                f"Trying to backward through {self.body.name} a second time: its snapshots were freed after the first. "
                "Specify retain_graph=True when calling .backward() the first time."
            )
        self._check_unchanged()
        self._released = not keep  # also if the pass fails
        kept = (self.store, dict(self._tapes), self._tape)
        if keep:
            self.store = self.store.fork()
        called_in, draws = ambient.capture(), (self.streams, self._start_tokens)
        try:
            with self._side_state.rerun(), ambient.RestoredAmbient(self.ambient, draws):
                found = _BackwardPass(self, carry, ys, called_in, keep=keep).run(self._rest)
        except BaseException:
            if not keep:
                self.store.close()  # no later pass can use it, and files must not wait for the garbage collector
            raise
        finally:
            if keep:
                self.store, self._tapes, self._tape = kept
        if not keep:
            self.release()
        return found

    def _check_unchanged(self) -> None:
        if self.body.xs.modified():
            raise StateChanged(
                f"{self.body.name}: a tensor of xs has been modified by an inplace operation after the loop, so that its gradients would "
                "be wrong. Change it after backward, or give the loop a copy (.clone())."
            )
        now = versions_of([tensor for _, tensor in self._read])
        for (place, tensor), before, after in zip(self._read, self._read_versions, now, strict=True):
            if before != after:
                raise StateChanged(
                    f"{self.body.name}: a tensor that the step reads ({place}, shape {tuple(tensor.shape)}) has been modified by an "
                    "inplace operation after the loop, so that its gradients would be wrong. "
                    "Change it after backward (optimizer.step() too)."
                )

    def take_tape(self, step: int) -> tuple[TapedSteps, bool]:
        """Return the tape of the steps from `step` on, and True if it had been stored. Drops the working state."""
        self._working = self._nothing
        if step in self._tapes:
            return self._tapes.pop(step), True
        assert self._tape is not None
        tape, self._tape = self._tape, None
        return tape, False

    def drop_results(self) -> None:
        """Drop the results: referencing them here would be a cycle through their own graph."""
        self._working = self.final = self._nothing
        self.body.ys = None

    def release(self) -> None:
        """Drop everything that a backward pass would start from."""
        self._released = True
        self.store.close()
        self._tapes.clear()
        self._tape = None
        self._working = self.final = self.initial = self._nothing
        if self.resume is not None:
            self.resume.finish()


class _ResumePoint:
    """Skips the actions of a schedule before the step that a killed run had reached."""

    def __init__(self, found: dict[int, LoopSnapshot], at: int, *, ended: bool = False, steps: int = 0) -> None:
        self._found = found
        self.ended = ended
        self.at = steps if ended else at
        self._skipping = at > 0

    def skips(self, driver: Driver, action: StepAction) -> bool:
        """True if an action was already performed; its snapshot is taken from the journal."""
        if not self._skipping:
            return False
        if isinstance(action, Save):
            if action.step == 0:
                driver.perform(action)
            elif action.step in self._found:
                driver.store.put(action.step, self._found[action.step], action.tier)
            if action.step == self.at:
                driver.start_at(self._found[self.at])
                self._skipping = False
        elif isinstance(action, Free) and action.step in driver.store.steps():
            driver.store.drop(action.step, action.tier)
        return True


class _BackwardPass:
    """One backward pass over a loop. `called_in`: what surrounds the caller of backward."""

    def __init__(self, driver: Driver, carry: Grads, ys: Grads, called_in: Any, *, keep: bool) -> None:
        self._driver = driver
        self._keep = keep
        self._called_in = called_in
        self._carry = carry
        self._ys = ys
        self._captured = driver.captured.tensors
        self._sums: Grads = [None] * len(self._captured)
        xs = driver.body.xs
        self._xs: Grads = [
            torch.zeros_like(leaf) if needed else None for leaf, needed in zip(xs.leaves, xs.needs_grad, strict=True)
        ]

    def run(self, actions: Actions) -> LoopGradients:
        resume = None if self._keep else self._driver.resume
        first = True
        for action in self._remaining(actions, resume):
            if not isinstance(action, Backward):
                self._driver.perform(action)
                continue
            tape, stored = self._driver.take_tape(action.step)
            self._reverse(tape, retain=self._keep and (first or stored))
            first = False
            if resume is not None:
                resume.reversed_to(LoopGradients(tape.start, self._carry, self._xs, self._sums))
        return LoopGradients(0, self._carry, self._xs, self._sums)

    def _remaining(self, actions: Actions, resume: Resume | None) -> Iterator[StepAction]:
        """Return the actions that are left after those of a killed pass."""
        driver = self._driver
        done = resume.progress(self._carry, self._ys, self._xs, self._captured) if resume is not None else None
        if done is None:
            return actions()
        self._carry, self._sums = done.carry, done.sums
        stored = [step for step in driver.store.steps() if step < done.end]
        return reversal(stored, done.end, driver.snapshots, driver.block)

    def _reverse(self, tape: TapedSteps, *, retain: bool) -> None:
        start, stop = tape.start, tape.start + len(tape.steps)
        driver = self._driver
        # Steps run in the forward's surroundings; their gradients are taken in the caller's, as in plain autograd.
        other = self._called_in != driver.ambient
        with ambient.RestoredAmbient(self._called_in) if other else torch.enable_grad():
            rows = range(start, stop) if any(grad is not None for grad in self._ys) else ()
            ys = [self._y_grads(step, passed_on=step == stop - 1 < driver.steps - 1) for step in rows]
            found = tape.reverse(
                self._carry,
                ys,
                seeds=self._seeds(start, len(tape.carry_in)),
                captured=self._captured,
                sums=self._sums,
                xs_wanted=driver.body.xs.any_needs_grad,
                retain=retain,
            )
        self._carry, self._sums = found.carry, found.sums
        for step, grads in enumerate(found.xs, start):
            for total, grad in zip(self._xs, grads, strict=True):
                if total is not None and grad is not None:
                    total[step].copy_(grad)

    def _y_grads(self, step: int, *, passed_on: bool) -> Grads:
        """Return the gradients of a step's ys; a y that is a leaf of the next carry was a seed of the step that follows."""
        alias = self._driver.body.alias_of(step) if passed_on else ()
        return [
            None if grad is None or (alias and alias[index] >= 0) else grad[step] for index, grad in enumerate(self._ys)
        ]

    def _seeds(self, start: int, count: int) -> Grads:
        """Return the gradients of ys of the step before that are leaves of this first carry."""
        seeds: Grads = [None] * count
        if start == 0 or not self._ys:
            return seeds
        for grad, leaf in zip(self._ys, self._driver.body.alias_of(start - 1), strict=True):
            if grad is not None and leaf >= 0:
                before = seeds[leaf]
                seeds[leaf] = grad[start - 1] if before is None else before + grad[start - 1]
        return seeds


# --- the autograd node of a loop -------------------------------------------------------------------------------------


class ReturnedTensors:
    """The tensors that a loop returns, while they pass through its autograd node."""

    def __init__(self, carry: list[Any], ys: list[Any], needs_grad: list[bool]) -> None:
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in (*carry, *ys)]
        self._carry_count = len(carry)
        self._leaves: list[Any] = [*carry, *ys]
        self.needs_grad = [n for n, tensor in zip(needs_grad, self._is_tensor, strict=True) if tensor]

    def take(self) -> list[Tensor]:
        """Return the tensors and drop them here."""
        tensors = [leaf for leaf, tensor in zip(self._leaves, self._is_tensor, strict=True) if tensor]
        self._leaves = [None if tensor else leaf for leaf, tensor in zip(self._leaves, self._is_tensor, strict=True)]
        return tensors

    def leaves_with(self, tensors: tuple[Tensor, ...]) -> tuple[list[Any], list[Any]]:
        """Return the leaves of the final carry and of the ys, with the tensors that the node returned."""
        rest = iter(tensors)
        leaves = [next(rest) if tensor else leaf for leaf, tensor in zip(self._leaves, self._is_tensor, strict=True)]
        return leaves[: self._carry_count], leaves[self._carry_count :]

    def split(self, grads: tuple[Tensor | None, ...]) -> tuple[Grads, Grads]:
        """Return the gradients of the final carry and of the ys, by leaf."""
        rest = iter(grads)
        every = [next(rest) if tensor else None for tensor in self._is_tensor]
        return every[: self._carry_count], every[self._carry_count :]


class LoopNode(torch.autograd.Function):
    """The one autograd node of a loop. Inputs: the driver, then leaves of the carry, of xs, and captured tensors."""

    @staticmethod
    def forward(ctx: Any, driver: Driver, returned: ReturnedTensors, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.driver, ctx.returned, ctx.carry_needs_grad = driver, returned, driver.initial.needs_grad
        ctx.set_materialize_grads(False)
        tensors = returned.take()
        ctx.mark_non_differentiable(*[t for t, needed in zip(tensors, returned.needs_grad, strict=True) if not needed])
        return tuple(tensors)

    @staticmethod
    @compiler_internals.left_alone
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        driver = ctx.driver
        if torch.is_grad_enabled():
            raise UnsupportedTransform(
                f"{driver.body.name} was differentiated with create_graph=True; its backward pass has no graph of its own. "
                "Call backward without create_graph, or run the loop plainly where second derivatives are needed."
            )
        carry, ys = ctx.returned.split(grads)
        with without_new_hooks(driver.captured.tensors):
            found = driver.backward(carry, ys, keep=internals.graph_is_kept())
        wanted = [grad for grad, needed in zip(found.carry, ctx.carry_needs_grad, strict=True) if needed]
        xs = [grad for grad, needed in zip(found.xs, driver.body.xs.needs_grad, strict=True) if needed]
        return (None, None, *wanted, *xs, *found.sums)
