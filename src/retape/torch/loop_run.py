"""The driver of a loop: runs its steps as a schedule asks, keeps snapshots, and carries gradients back.

One autograd node stands for the whole loop. In the forward every step is taped and its tape let go (so the kernels are those of plain
autograd, and every parameter is met), but for the last, which waits for the backward pass. What is stored is decided by the schedules
of `core`; a unit of a schedule is a block of one or more consecutive steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save
from retape.core.actions import Tape as TapeAction
from retape.core.errors import RegionError, StateChanged, UnsupportedTransform
from retape.core.schedules.online import forward_phase, reverse_phase
from retape.torch import _compat, state
from retape.torch.loop_body import Body
from retape.torch.loop_hidden import Hidden, Saved
from retape.torch.loop_reach import Reached
from retape.torch.loop_state import State
from retape.torch.loop_tape import Grads, Tape
from retape.torch.watch import version_of

Actions = Callable[[], Iterator[Action]]


class Snapshot(NamedTuple):
    """Everything that a run needs to start at a step: the carry, the random streams, the state that steps hide."""

    state: State
    tokens: list[Any]
    hidden: Saved


class Driver:
    """Carries out a schedule's actions over a loop's body."""

    def __init__(
        self, body: Body, generators: list[Any], reached: Reached, hidden: Hidden, initial: State, *, block: int = 1
    ) -> None:
        self.body = body
        self._hidden = hidden
        self.reached = reached
        self.initial = initial
        self.steps = 0
        self.final = initial
        self._block = block
        self._ambient = state.capture()
        self._streams, self._tokens = state.streams(generators)
        self._stored: dict[int, Snapshot] = {}
        self._tapes: dict[int, Tape] = {}
        self._working = initial
        self._tape: Tape | None = None
        self._rest: Actions = lambda: iter(())
        self._read: list[tuple[str, Tensor]] = []
        self._after: list[Any] = []
        self._released = False

    # --- the first run -----------------------------------------------------------------------------------------

    def run_known(self, steps: int, actions: Actions) -> None:
        """Run `steps` steps as the schedule begins: up to the tape of the last unit."""
        self.steps = steps
        last = -(-steps // self._block) - 1
        done = 0
        with state.Replay(self._ambient, state.NONE_DRAWN):
            for action in actions():
                self._perform(action)
                done += 1
                if isinstance(action, TapeAction) and action.step == last:
                    break
        self._rest = lambda: islice(actions(), done, None)
        self._settle()

    def run_unknown(self, goes_on: Callable[[State, int], bool], snapshots: int) -> None:
        """Run while `goes_on` says so, keeping at most `snapshots` states on the way."""
        with state.Replay(self._ambient, state.NONE_DRAWN):
            for action in forward_phase(snapshots):
                if not isinstance(action, Forward):
                    self._perform(action)
                elif not self._advance_while(goes_on, action.stop):
                    break
        last = self.steps - 1
        if last < 0:
            self._stored.clear()
        elif last in self._stored:
            del self._stored[last]
        stored = sorted(self._stored)
        self._rest = lambda: _reversal(stored, last, snapshots)
        self._settle()

    def _advance_while(self, goes_on: Callable[[State, int], bool], stop: int) -> bool:
        while self.steps < stop:
            if not goes_on(self._working, self.steps):
                return False
            self._tape = None  # the last tape is kept, and until a step follows it may be the last
            self._tape = self._tape_steps(self.steps, self.steps + 1)
            self.steps += 1
        return True

    def _settle(self) -> None:
        self.final = self._working
        self._read = [*self._hidden.unchanged(), *[("its graph", tensor) for tensor in self.reached.tensors]]
        self._after = [version_of(tensor) for _, tensor in self._read]
        self.body.rerun = True

    # --- the schedule's actions --------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        if isinstance(action, Forward):
            start, stop = self._first_step(action.start), self._first_step(action.stop)
            for step in range(start, stop):
                self._tape_steps(step, step + 1)
        elif isinstance(action, TapeAction):
            self._tape = self._tape_steps(self._first_step(action.step), self._first_step(action.step + 1))
        elif isinstance(action, Save):
            self._save(action)
        elif isinstance(action, Load):
            self._load(action.step)
        elif isinstance(action, Free):
            del self._stored[action.step]
        else:
            raise AssertionError(f"no schedule of a loop asks for {action}")

    def _first_step(self, unit: int) -> int:
        return min(unit * self._block, self.steps)

    def _tape_steps(self, start: int, stop: int) -> Tape:
        since = _compat.next_sequence_number()
        tape, self._working = self.body.tape(self._working, start, stop)
        if not self.body.rerun:
            self.reached.walk(tape.roots(), tape.own_leaves(), since)
            self._hidden.after_step()
        return tape

    def _save(self, action: Save) -> None:
        if action.item is Item.TAPE:
            assert self._tape is not None
            self._tapes[action.step], self._tape = self._tape, None
        else:
            self._stored[action.step] = Snapshot(
                self._working, [stream.peek() for stream in self._streams], self._hidden.save()
            )

    def _load(self, unit: int) -> None:
        snapshot = self._stored[unit]
        snapshot.state.check(self.body.name, self._first_step(unit))
        self._working = snapshot.state
        self._hidden.restore(snapshot.hidden)
        state.seek((self._streams, snapshot.tokens))

    # --- the backward pass -------------------------------------------------------------------------------------

    def backward(self, carry: Grads, ys: Grads, *, keep: bool) -> tuple[Grads, Grads, Grads]:
        """The gradients of the initial carry, of xs and of the captured tensors."""
        if self._released:
            raise RegionError(
                f"Trying to backward through {self.body.name} a second time: its snapshots were freed after the first. "
                "Specify retain_graph=True when calling .backward() the first time."
            )
        self._check_unchanged()
        stored, tapes, last = dict(self._stored), dict(self._tapes), self._tape
        self._hidden.lend()
        try:
            with state.Replay(self._ambient, (self._streams, self._tokens)):
                return _Reversal(self, carry, ys, keep=keep).run(self._rest())
        finally:
            self._hidden.give_back()
            if keep:
                self._stored, self._tapes, self._tape = stored, tapes, last
            else:
                self.release()

    def _check_unchanged(self) -> None:
        if self.body.xs.written_to():
            raise StateChanged(
                f"{self.body.name}: a tensor of xs has been modified by an inplace operation after the loop, so that its gradients would be "
                "wrong. Change it after backward, or give the loop a copy (.clone())."
            )
        for (place, tensor), then in zip(self._read, self._after, strict=True):
            if version_of(tensor) != then:
                raise StateChanged(
                    f"{self.body.name}: a tensor that the step reads ({place}, shape {tuple(tensor.shape)}) has been modified by an "
                    "inplace operation after the loop, so that its gradients would be wrong. Change it after backward (optimizer.step() too)."
                )

    def take_tape(self, unit: int) -> tuple[Tape, bool]:
        """The tape of a unit, and whether it was made by the first run."""
        if unit in self._tapes:
            return self._tapes.pop(unit), True
        assert self._tape is not None
        tape, self._tape = self._tape, None
        return tape, False

    def perform(self, action: Action) -> None:
        self._perform(action)

    def release(self) -> None:
        """Forget all that the backward pass would start from."""
        self._released = True
        self._stored.clear()
        self._tapes.clear()
        self._tape = None
        self._working = self.final = self.initial = State([], self.initial.spec, ())


def _reversal(stored: list[int], last: int, snapshots: int) -> Iterator[Action]:
    if last >= 0:
        yield Backward(last)
        yield from reverse_phase(stored, last, snapshots)


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

    def run(self, actions: Iterator[Action]) -> tuple[Grads, Grads, Grads]:
        first = True
        for action in actions:
            if isinstance(action, Backward):
                tape, stored = self._driver.take_tape(action.step)
                self._reverse(tape, retain=self._keep and (first or stored))
                first = False
            else:
                self._driver.perform(action)
        return self._carry, self._xs, self._sums

    def _reverse(self, tape: Tape, *, retain: bool) -> None:
        start, stop = tape.start, tape.start + len(tape.steps)
        with torch.enable_grad():
            ys = [self._y_grads(step, handed_on=step == stop - 1 < self._driver.steps - 1) for step in range(start, stop)]
            found = tape.reverse(
                self._carry,
                ys,
                seeds=self._seeds(start, len(tape.carry_in)),
                captured=self._captured,
                sums=self._sums,
                retain=retain,
            )
        self._carry, self._sums = found.carry, found.sums
        for step, grads in enumerate(found.xs, start):
            for place, grad in zip(self._xs, grads, strict=True):
                if place is not None and grad is not None:
                    place[step].copy_(grad)

    def _y_grads(self, step: int, *, handed_on: bool) -> Grads:
        """The gradients of the ys of a step; one that is a leaf of the next carry was handed to the step that follows."""
        if not self._ys:
            return self._driver.body.no_y_grads()
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


class LoopNode(torch.autograd.Function):
    """The one autograd node of a loop. Its inputs: the driver, then leaves of the carry, of xs, and captured tensors."""

    @staticmethod
    def forward(ctx: Any, driver: Driver, outputs: Outputs, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.driver, ctx.outputs = driver, outputs
        ctx.set_materialize_grads(False)
        tensors = outputs.take()
        ctx.mark_non_differentiable(*[t for t, needed in zip(tensors, outputs.needs_grad, strict=True) if not needed])
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        driver, outputs = ctx.driver, ctx.outputs
        if torch.is_grad_enabled():
            raise UnsupportedTransform(
                f"{driver.body.name} was differentiated with create_graph=True; its backward pass has no graph of its own. "
                "Call backward without create_graph, or run the loop plainly where second derivatives are needed."
            )
        carry, ys = outputs.sorted(grads)
        found_carry, found_xs, sums = driver.backward(carry, ys, keep=_compat.keeps_graph())
        wanted = [grad for grad, needed in zip(found_carry, outputs.carry_inputs, strict=True) if needed]
        xs = [grad for grad, needed in zip(found_xs, driver.body.xs.needs_grad, strict=True) if needed]
        return (None, None, *wanted, *xs, *sums)


class Outputs:
    """The tensors that a loop returns, on their way through its autograd node."""

    def __init__(self, carry_inputs: tuple[bool, ...], carry: list[Any], ys: list[Any], needs_grad: list[bool]) -> None:
        self.carry_inputs = carry_inputs
        self._places = [isinstance(leaf, Tensor) for leaf in (*carry, *ys)]
        self._carry_count = len(carry)
        self._leaves: list[Any] = [*carry, *ys]
        self.needs_grad = [n for n, place in zip(needs_grad, self._places, strict=True) if place]

    def take(self) -> list[Tensor]:
        tensors = [leaf for leaf, place in zip(self._leaves, self._places, strict=True) if place]
        self._leaves = [None if place else leaf for leaf, place in zip(self._leaves, self._places, strict=True)]
        return tensors

    def filled(self, tensors: tuple[Tensor, ...]) -> tuple[list[Any], list[Any]]:
        """The leaves of the final carry and of the ys, with what the node returned."""
        rest = iter(tensors)
        leaves = [next(rest) if place else leaf for leaf, place in zip(self._leaves, self._places, strict=True)]
        return leaves[: self._carry_count], leaves[self._carry_count :]

    def sorted(self, grads: tuple[Tensor | None, ...]) -> tuple[Grads, Grads]:
        rest = iter(grads)
        every = [next(rest) if place else None for place in self._places]
        return every[: self._carry_count], every[self._carry_count :]
