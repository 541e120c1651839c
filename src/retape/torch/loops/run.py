"""The driver of a loop: runs its steps as a schedule asks, keeps snapshots, and carries gradients back.

One autograd node stands for the whole loop. In the forward every step is taped and its tape let go (so the kernels are those of plain
autograd, and every parameter is met), but for the last, which waits for the backward pass. What is stored is decided by the schedules
of `core`; how a run goes on from files is in `resume.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from retape.core.actions import Backward, Forward, Free, Item, Load, Save
from retape.core.errors import RegionError, StateChanged
from retape.core.schedules.online import forward_phase
from retape.torch.capture import ambient, rng
from retape.torch.capture.mutation import version_of
from retape.torch.compat import internals
from retape.torch.loops.body import Body
from retape.torch.loops.captured_tensors import Reached
from retape.torch.loops.disk import SnapshotLost
from retape.torch.loops.plan import StepAction, TapeSteps, reversal
from retape.torch.loops.resume import Progress, Resume
from retape.torch.loops.side_state import NOTHING_SAVED, Hidden
from retape.torch.loops.snapshots import Snapshot, Store
from retape.torch.loops.state import State, mark_of
from retape.torch.loops.tape import Grads, Tape

Actions = Callable[[], Iterator[StepAction]]


class Driver:
    """Carries out a schedule's actions over a loop's body."""

    def __init__(
        self,
        body: Body,
        reached: Reached,
        hidden: Hidden,
        initial: State,
        *,
        generators: list[Any],
        store: Store,
        snapshots: int,
        block: int,
        resume: Resume | None = None,
    ) -> None:
        self.body = body
        self.reached = reached
        self.hidden = hidden
        self.initial = initial
        self.steps = 0
        self.final = initial
        self.store = store
        self.block = block
        self.snapshots = snapshots
        self.ambient = self.called_in = ambient.capture()
        self.streams, self.start_tokens = rng.capture(generators)
        self._resume = resume
        self._tapes: dict[int, Tape] = {}
        self._working = initial
        self._at = 0
        self._tape: Tape | None = None
        self._rest: Actions = lambda: iter(())
        self._read: list[tuple[str, Tensor]] = []
        self._after: list[Any] = []
        self._released = False

    # --- the first run -----------------------------------------------------------------------------------------

    def run_known(self, steps: int, actions: Actions) -> None:
        """Run `steps` steps as the schedule begins: up to the tape of the last ones."""
        self.steps = steps
        begin = self._begin()
        done = 0
        with ambient.RestoredAmbient(self.ambient, first_run=True):
            for action in actions() if not begin.ended else ():
                done += 1
                if not begin.passed(self, action):
                    continue
                self._perform(action)
                if isinstance(action, TapeSteps) and action.stop == steps:
                    break
        if not begin.ended:
            self._rest = lambda: islice(actions(), done, None)
        self._settle(from_files=begin.ended)

    def run_unknown(self, goes_on: Callable[[State, int], bool]) -> None:
        """Run while `goes_on` says so, keeping at most so many snapshots on the way."""
        begin = self._begin()
        self.steps = begin.at
        asked: dict[int, bool] = {}

        def more() -> bool:
            if self.steps not in asked:
                asked.clear()
                asked[self.steps] = goes_on(self._working, self.steps)
            return asked[self.steps]

        with ambient.RestoredAmbient(self.ambient, first_run=True):
            for action in forward_phase(self.snapshots) if not begin.ended else ():
                assert isinstance(action, Forward | Save | Free)
                if not begin.passed(self, action):
                    continue
                if not more():  # before anything is stored or dropped for a step that will not come
                    break
                if not isinstance(action, Forward):
                    self._perform(action)
                elif not self._advance_while(more, action.stop):
                    break
        if not begin.ended:
            tape, last = self._tape, self.steps - 1
            if tape is not None and last in self.store.steps():
                self.store.drop(last)
            end = self.steps if tape is None else last
            stored = [step for step in self.store.steps() if step < end]
            taped, snapshots, block = tape is not None, self.snapshots, self.block
            self._rest = lambda: _from_last(taped, stored, end, snapshots, block)
        self._settle(from_files=begin.ended)

    def _advance_while(self, more: Callable[[], bool], stop: int) -> bool:
        while self.steps < stop:
            if not more():
                return False
            self._tape = None  # the last tape is kept, and until a step follows it may be the last
            self._tape = self._tape_steps(self.steps, self.steps + 1)
            self.steps += 1
        return True

    def _begin(self) -> _Begin:
        """Where the first run begins: with nothing, or where the journal says."""
        if self._resume is None:
            return _Begin({}, 0)
        found, reached, end = self._resume.restore()
        if end is not None:
            self.start_at(end)
            last_tier = self.store.tiers - 1
            for step, snapshot in {0: self._first(), **found}.items():
                self.store.put(step, snapshot, last_tier)
            stored, snapshots, block = self.store.steps(), self.snapshots, self.block
            self._rest = lambda: reversal(stored, reached, snapshots, block)
        return _Begin(found, max(found, default=0), ended=end is not None, steps=reached)

    def start_at(self, snapshot: Snapshot) -> None:
        """Make a snapshot of a killed run how things stand now."""
        self._working = snapshot.state
        self.hidden.overwrite(snapshot.hidden)
        self._seek(snapshot.tokens)

    def _settle(self, *, from_files: bool) -> None:
        self.final = self._working
        self.reached.settle()
        self._read = [*self.hidden.unchanged(), *[("its graph", tensor) for tensor in self.reached.tensors]]
        self._after = [version_of(tensor) for _, tensor in self._read]
        self.body.rerun = True
        if self._tape is not None and self._tape.start not in self.body.marks:
            self.body.marks[self._tape.start] = mark_of(self._tape.carry_in)
        if self._resume is not None and not from_files:
            self._resume.ended(self.steps, self._snapshot())

    # --- the schedule's actions --------------------------------------------------------------------------------

    def _perform(self, action: StepAction) -> None:
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
                self.body.marks.pop(action.step, None)
                if self._resume is not None:
                    self._resume.freed(action.step)
        else:
            raise AssertionError(f"no schedule of a loop asks for {action} here")

    def _advance(self, start: int, stop: int) -> None:
        if self.body.rerun:
            self._working = self.body.advance(self._working, start, stop) if start < stop else self._working
            return
        for step in range(start, stop):
            self._tape_steps(step, step + 1)

    def _tape_steps(self, start: int, stop: int) -> Tape:
        since = internals.next_sequence_number()
        tape, self._working = self.body.tape(self._working, start, stop)
        if not self.body.rerun:
            self.reached.walk(tape, since)
            self.hidden.after_step()
        return tape

    def _save(self, action: Save) -> None:
        if action.item is Item.TAPE:
            assert self._tape is not None
            self._tapes[action.step], self._tape = self._tape, None
            return
        snapshot = self._snapshot()
        self.store.put(action.step, snapshot, action.tier)
        if not self.body.rerun:
            self.body.marks[action.step] = mark_of(self._working.leaves)
            if self._resume is not None:
                self._resume.saved(action.step, snapshot)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._working, [stream.peek() for stream in self.streams], self.hidden.save())

    def _first(self) -> Snapshot:
        return Snapshot(self.initial, self.start_tokens, NOTHING_SAVED)

    def _load(self, step: int) -> None:
        """Make the state before `step` the working one; if its snapshot is lost, run to it from an earlier one."""
        start, snapshot = 0, self._first()
        for known in (step, *[other for other in reversed(self.store.steps()) if other < step]):
            try:
                snapshot = self.store.get(known)
            except SnapshotLost:
                continue
            start = known
            break
        snapshot.state.check(self.body.name, start)
        self._working = snapshot.state
        self.hidden.restore(snapshot.hidden)
        self._seek(snapshot.tokens)
        self._advance(start, step)

    def _seek(self, tokens: list[Any]) -> None:
        """Put the random streams where they stood; most steps draw from few of them, and looking is cheaper than setting."""
        for stream, token in zip(self.streams, tokens, strict=True):
            if stream.peek() != token:
                stream.seek(token)

    # --- the backward pass -------------------------------------------------------------------------------------

    def backward(self, carry: Grads, ys: Grads, *, keep: bool) -> tuple[Grads, Grads, Grads]:
        """The gradients of the initial carry, of xs and of the captured tensors."""
        if self._released:
            raise RegionError(
                f"Trying to backward through {self.body.name} a second time: its snapshots were freed after the first. "
                "Specify retain_graph=True when calling .backward() the first time."
            )
        self._check_unchanged()
        self._released = not keep  # also if it fails on the way
        kept = (self.store, dict(self._tapes), self._tape)
        if keep:
            self.store = self.store.fork()
        self.hidden.lend()
        self.called_in = ambient.capture()
        try:
            with ambient.RestoredAmbient(self.ambient, (self.streams, self.start_tokens)):
                found = _Reversal(self, carry, ys, keep=keep).run(self._rest)
        except BaseException:
            if not keep:
                self.store.close()  # no pass can start from it any more, and files must not wait for the garbage collector
            raise
        finally:
            self.hidden.give_back()
            if keep:
                self.store, self._tapes, self._tape = kept
        if not keep:
            self.release()
        return found

    def _check_unchanged(self) -> None:
        if self.body.xs.written_to():
            raise StateChanged(
                f"{self.body.name}: a tensor of xs has been modified by an inplace operation after the loop, so that its gradients would "
                "be wrong. Change it after backward, or give the loop a copy (.clone())."
            )
        for (place, tensor), then in zip(self._read, self._after, strict=True):
            if version_of(tensor) != then:
                raise StateChanged(
                    f"{self.body.name}: a tensor that the step reads ({place}, shape {tuple(tensor.shape)}) has been modified by an "
                    "inplace operation after the loop, so that its gradients would be wrong. "
                    "Change it after backward (optimizer.step() too)."
                )

    def take_tape(self, step: int) -> tuple[Tape, bool]:
        """The tape of the steps from `step` on, and whether it had been stored. The state after it is not needed any more."""
        self._working = State([], self.initial.spec, ())
        if step in self._tapes:
            return self._tapes.pop(step), True
        assert self._tape is not None
        tape, self._tape = self._tape, None
        return tape, False

    def perform(self, action: StepAction) -> None:
        self._perform(action)

    @property
    def resume(self) -> Resume | None:
        return self._resume

    def let_go_of_results(self) -> None:
        """The results are the caller's: holding them here would be a cycle through their own graph."""
        self._working = self.final = State([], self.initial.spec, ())
        self.body.let_go_of_results()

    def release(self) -> None:
        """Forget all that the backward pass would start from."""
        self._released = True
        self.store.close()
        self._tapes.clear()
        self._tape = None
        self._working = self.final = self.initial = State([], self.initial.spec, ())
        if self._resume is not None:
            self._resume.finish()


class _Begin:
    """Passes over what the schedule asks for before the step that a killed run had reached."""

    def __init__(self, found: dict[int, Snapshot], at: int, *, ended: bool = False, steps: int = 0) -> None:
        self._found = found
        self.ended = ended
        self.at = steps if ended else at
        self._waiting = at > 0

    def passed(self, driver: Driver, action: StepAction) -> bool:
        """Whether an action is still to be performed."""
        if not self._waiting:
            return True
        if isinstance(action, Save):
            if action.step == 0:
                driver.perform(action)
            elif action.step in self._found:
                driver.store.put(action.step, self._found[action.step], action.tier)
            if action.step == self.at:
                driver.start_at(self._found[self.at])
                self._waiting = False
        elif isinstance(action, Free) and action.step in driver.store.steps():
            driver.store.drop(action.step, action.tier)
        return False


def _from_last(taped: bool, stored: list[int], end: int, snapshots: int, block: int) -> Iterator[StepAction]:
    if taped:
        yield Backward(end)
    yield from reversal(stored, end, snapshots, block)


class _Reversal:
    """One backward pass over a loop."""

    def __init__(self, driver: Driver, carry: Grads, ys: Grads, *, keep: bool) -> None:
        self._driver = driver
        self._keep = keep
        self._carry = carry
        self._ys = ys
        self._captured = driver.reached.tensors
        self._sums: Grads = [None] * len(self._captured)
        xs = driver.body.xs
        self._xs: Grads = [
            torch.zeros_like(leaf) if needed else None for leaf, needed in zip(xs.leaves, xs.needs_grad, strict=True)
        ]

    def run(self, actions: Actions) -> tuple[Grads, Grads, Grads]:
        resume = None if self._keep else self._driver.resume
        first = True
        for action in self._rest_of(actions, resume):
            if not isinstance(action, Backward):
                self._driver.perform(action)
                continue
            tape, stored = self._driver.take_tape(action.step)
            self._reverse(tape, retain=self._keep and (first or stored))
            first = False
            if resume is not None:
                resume.reversed_to(Progress(tape.start, self._carry, self._sums, self._xs))
        return self._carry, self._xs, self._sums

    def _rest_of(self, actions: Actions, resume: Resume | None) -> Iterator[StepAction]:
        """The actions that are left, after what a killed pass had done already."""
        driver = self._driver
        done = resume.progress(self._carry, self._ys, self._xs, self._captured) if resume is not None else None
        if done is None:
            return actions()
        self._carry, self._sums = done.carry, done.sums
        stored = [step for step in driver.store.steps() if step < done.end]
        return reversal(stored, done.end, driver.snapshots, driver.block)

    def _reverse(self, tape: Tape, *, retain: bool) -> None:
        start, stop = tape.start, tape.start + len(tape.steps)
        driver = self._driver
        # Steps are run as they were; gradients of them are taken as plain autograd would, in whatever surrounds the backward pass.
        around = driver.called_in != driver.ambient
        with ambient.RestoredAmbient(driver.called_in) if around else torch.enable_grad():
            rows = range(start, stop) if any(grad is not None for grad in self._ys) else ()
            ys = [self._y_grads(step, handed_on=step == stop - 1 < driver.steps - 1) for step in rows]
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
            for place, grad in zip(self._xs, grads, strict=True):
                if place is not None and grad is not None:
                    place[step].copy_(grad)

    def _y_grads(self, step: int, *, handed_on: bool) -> Grads:
        """The gradients of the ys of a step; one that is a leaf of the next carry was handed to the step that follows."""
        alias = self._driver.body.alias_of(step) if handed_on else ()
        return [
            None if grad is None or (alias and alias[index] >= 0) else grad[step] for index, grad in enumerate(self._ys)
        ]

    def _seeds(self, start: int, count: int) -> Grads:
        seeds: Grads = [None] * count
        if start == 0 or not self._ys:
            return seeds
        for grad, leaf in zip(self._ys, self._driver.body.alias_of(start - 1), strict=True):
            if grad is not None and leaf >= 0:
                before = seeds[leaf]
                seeds[leaf] = grad[start - 1] if before is None else before + grad[start - 1]
        return seeds
