"""The body of a loop: how one step is called, what is checked around it, and where its results go.

Every step runs with gradients on, one that is run again only to reach a later state, too: without them kernels, and what a step does
itself, may differ, and no comparison of states would show all of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import InvalidInput, RecomputeMismatch
from retape.torch.capture.mutation import versions_of
from retape.torch.engine import runs
from retape.torch.loops.state import Spec, State, check_same, flatten, mark_of, unflatten
from retape.torch.loops.tape import StepEnds, Tape

Step = Callable[[Any, Any], tuple[Any, Any]]


class Xs:
    """What the steps are given: slices of tensors with a leading dimension; what is no tensor is given to every step as it is."""

    def __init__(self, tree: Any) -> None:
        self.leaves, self._spec = flatten(tree)
        self.needs_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self.leaves]
        self.any_needs_grad = any(self.needs_grad)
        self._held = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self._versions = versions_of(self._held)

    def length(self) -> int | None:
        """The steps that the tensors have slices for; None if there is no tensor."""
        sizes = set()
        for index, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.dim() == 0:
                raise InvalidInput(
                    f"Leaf {index} of xs is a tensor without dimensions, which has no slice for each step. "
                    "Give it a leading dimension of the number of steps, or let the step read it from its closure."
                )
            sizes.add(leaf.shape[0])
        if len(sizes) > 1:
            raise InvalidInput(
                f"The tensors of xs have different leading dimensions, {sorted(sizes)}: each must have one slice for each step."
            )
        return sizes.pop() if sizes else None

    def at(self, step: int) -> list[Any]:
        """The leaves for one step, fit to be the inputs of a graph of their own."""
        if not self.any_needs_grad:
            return [leaf.select(0, step) if isinstance(leaf, Tensor) else leaf for leaf in self._held]
        made: list[Any] = []
        for leaf, needed in zip(self._held, self.needs_grad, strict=True):
            part = leaf.select(0, step) if isinstance(leaf, Tensor) else leaf
            made.append(part.detach().requires_grad_() if needed else part)
        return made

    def plain(self, step: int) -> Any:
        """What one step is given in the plain loop: slices with their history."""
        return self.tree([leaf[step] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])

    def tree(self, leaves: list[Any]) -> Any:
        return unflatten(leaves, self._spec)

    def written_to(self) -> bool:
        return versions_of(self._held) != self._versions


class Ys:
    """What the steps gave beside their carry, stacked as they come."""

    def __init__(self, name: str, length: int) -> None:
        self._name = name
        self._length = length
        self._spec: Spec | None = None
        self._stacked: list[Any] = []
        self._count = 0
        self.needs_grad: list[bool] = []

    def put(self, leaves: list[Any], spec: Spec) -> None:
        if self._spec is None:
            self.learn(leaves, spec)
        elif spec != self._spec:
            raise InvalidInput(
                f"{self._name}: step {self._count} returned a y of another structure than the steps before. "
                "Return the same containers in every step."
            )
        for index, leaf in enumerate(leaves):
            self._put(index, leaf)
        self._count += 1

    def _put(self, index: int, leaf: Any) -> None:
        stacked = self._stacked[index]
        if not isinstance(stacked, Tensor):
            if isinstance(leaf, Tensor):
                raise InvalidInput(
                    f"{self._name}: step {self._count} returned a tensor for leaf {index} of its y, which was none before. "
                    "Return the same kinds in every step."
                )
            stacked.append(leaf)
            return
        if not isinstance(leaf, Tensor) or (leaf.shape, leaf.dtype) != (stacked.shape[1:], stacked.dtype):
            raise InvalidInput(
                f"{self._name}: leaf {index} of the y of step {self._count} cannot be stacked on those before: its shape or dtype is "
                f"another than {tuple(stacked.shape[1:])} {stacked.dtype}. Return the same in every step, or give reduce=."
            )
        stacked[self._count].copy_(leaf.detach())
        self.needs_grad[index] = self.needs_grad[index] or leaf.requires_grad

    def rows(self, start: int, stop: int) -> tuple[list[Tensor | None], list[Any]]:
        """The ys of some steps: tensors, and the values of leaves that are none."""
        tensors = [leaf[start:stop] if isinstance(leaf, Tensor) else None for leaf in self._stacked]
        return tensors, [None if isinstance(leaf, Tensor) else leaf[start:stop] for leaf in self._stacked]

    def put_rows(self, start: int, stop: int, tensors: list[Any], plain: list[Any], needs_grad: list[bool]) -> None:
        """Put back what `rows` gave."""
        for index, stacked in enumerate(self._stacked):
            if isinstance(stacked, Tensor):
                stacked[start:stop].copy_(tensors[index])
            else:
                stacked[start:] = plain[index]
        self.needs_grad, self._count = list(needs_grad), stop

    def learn(self, leaves: list[Any], spec: Spec) -> None:
        """Make room for ys like these, before any is put."""
        self._spec = spec
        self._stacked = [_place_for(leaf, self._length) for leaf in leaves]
        self.needs_grad = [False] * len(leaves)

    def result(self) -> tuple[list[Any], Spec]:
        """The stacked leaves; values that are no tensors as a list, or None if all are None."""
        assert self._spec is not None
        plain = [
            leaf if isinstance(leaf, Tensor) or any(item is not None for item in leaf) else None
            for leaf in self._stacked
        ]
        return plain, self._spec


def _place_for(leaf: Any, length: int) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty((length, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
    return []


class _Kept:
    """What `retape.keep` was given in one step."""

    __slots__ = ("kept", "name")

    def __init__(self, name: str, kept: list[Any]) -> None:
        self.name = name
        self.kept = kept


class Body:
    """Runs steps. In the first run their results are recorded; in a re-run nothing outside hears of them."""

    def __init__(self, name: str, step: Step, xs: Xs, ys: Ys | None, *, first_differs: bool = False) -> None:
        self.name = name
        self.xs = xs
        self._step = step
        self._ys = ys
        self._first_differs = first_differs  # a reduction has nothing to start from before the first step
        self._kept: dict[int, list[Any]] = {}
        self.alias: dict[int, tuple[int, ...]] = {}
        self._usual_alias: tuple[int, ...] | None = None
        self.rerun = False
        self.marks: dict[int, int | None] = {}  # checksums of states that the first run came to, by step
        self._usual_run: runs.Run | None = None
        self.y_spec: Spec | None = None

    def tape(self, state: State, start: int, stop: int) -> tuple[Tape, State]:
        """Run steps as one graph; returns it and the state after them."""
        if self.rerun:
            return self._tape_again(state, start, stop)
        carry_in = carry = state.fresh()
        before = state
        ends = []
        for step in range(start, stop):
            out, spec, end = self._call(before, carry, step)
            ends.append(end)
            before = State(out, spec)
            carry = out
        return Tape(start, carry_in, carry, ends), before

    def _tape_again(self, state: State, start: int, stop: int) -> tuple[Tape, State]:
        """The same in a re-run: what the first run has checked is not looked at twice."""
        carry_in = carry = state.fresh()
        spec = state.spec
        ends = []
        for step in range(start, stop):
            x_leaves = self.xs.at(step)
            tree, y = self._run(unflatten(carry, spec), x_leaves, step)
            carry, spec = flatten(tree)
            ends.append(StepEnds(x_leaves, flatten(y)[0]))
            if step + 1 in self.marks:
                self._check_mark(step + 1, carry)
        self._check_kind(state, start, carry, spec)
        return Tape(start, carry_in, carry, ends), State(carry, spec)

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps again, keeping nothing but the state after them."""
        carry, spec = state.fresh(), state.spec
        for step in range(start, stop):
            out, spec = flatten(self._run(unflatten(carry, spec), self.xs.at(step), step)[0])
            carry = [
                leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
                for leaf in out
            ]
            del out  # with the tape of this step, before the next one makes its own
        self._check_kind(state, start, carry, spec)
        return State(carry, spec)

    def _check_kind(self, before: State, step: int, leaves: list[Any], spec: Spec) -> None:
        if not (self._first_differs and step == 0):
            check_same(self.name, step, before, leaves, spec)

    def _check_mark(self, step: int, leaves: list[Any]) -> None:
        if self.marks[step] not in (None, mark_of(leaves)):
            raise RecomputeMismatch(
                f"{self.name}: running the steps before step {step} again came to another state than the first run, so that gradients "
                "would be wrong. The step reads something that changes from run to run and that cannot be put back (a file, a clock, an "
                "object that it cannot be seen to reach). Put it into the carry or xs, or record it with retape.keep."
            )

    def _run(self, carry: Any, x_leaves: list[Any], step: int) -> Any:
        rerun, run = self.rerun, self._usual_run
        if rerun and step in self._kept:
            run = self._new_run(self._kept[step])
        elif run is None or run.rerun is not rerun or run.region.kept:  # an empty one will do for all steps
            run = self._usual_run = self._new_run([])
        running = runs.current_runs()
        running.append(run)
        try:
            result = self._step(carry, self.xs.tree(x_leaves))
        finally:
            running.pop()
        if not rerun and run.region.kept:
            self._kept[step] = run.region.kept
        return result

    def _new_run(self, kept: list[Any]) -> runs.Run:
        return runs.Run(_Kept(self.name, kept), rerun=self.rerun)  # type: ignore[arg-type]  # all that a run asks of a region

    def _call(self, before: State, carry: list[Any], step: int) -> tuple[list[Any], Spec, StepEnds]:
        x_leaves = self.xs.at(step)
        result = self._run(unflatten(carry, before.spec), x_leaves, step)
        tree, y = result if type(result) is tuple and len(result) == 2 else self._two(result, step)
        out, spec = flatten(tree)
        self._check_kind(before, step, out, spec)
        self._check_writes(before, step)
        y_leaves, y_spec = flatten(y)
        self.y_spec = y_spec
        if self._ys is not None:
            self._ys.put(y_leaves, y_spec)
            self._note_alias(step, out, y_leaves)
        return out, spec, StepEnds(x_leaves, y_leaves)

    def _two(self, result: Any, step: int) -> tuple[Any, Any]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidInput(
                f"{self.name}: step {step} returned {type(result).__name__ if not isinstance(result, tuple) else f'{len(result)} values'}; "
                "a step returns two: the next carry, and a y (None if there is none)."
            )
        return result[0], result[1]

    def _check_writes(self, before: State, step: int) -> None:
        leaf = before.written_to()
        if leaf is not None or self.xs.written_to():
            what = "its x" if leaf is None else f"leaf {leaf} of its carry"
            raise InvalidInput(
                f"{self.name}: step {step} changed {what} in place. What a step is given must stay as it is, for the step may run again: "
                "return a new tensor instead (x = x + 1, not x += 1)."
            )

    def _note_alias(self, step: int, out: list[Any], ys: list[Any]) -> None:
        """Which leaf of the next carry each y is, if it is one; most steps are alike, and only others are remembered."""
        alias: tuple[int, ...] = (-1,) * len(ys)
        if any(isinstance(leaf, Tensor) for leaf in ys):
            places = {id(leaf): index for index, leaf in enumerate(out) if isinstance(leaf, Tensor)}
            alias = tuple([places.get(id(leaf), -1) for leaf in ys])
        if self._usual_alias is None:
            self._usual_alias = alias
        elif alias != self._usual_alias:
            self.alias[step] = alias

    @property
    def stacks(self) -> bool:
        """Whether ys are collected, which go with the steps that gave them."""
        return self._ys is not None

    @property
    def ys_need_grad(self) -> list[bool]:
        return list(self._ys.needs_grad) if self._ys is not None else []

    def rows(self, start: int, stop: int) -> tuple[list[Tensor | None], list[Any]]:
        return self._ys.rows(start, stop) if self._ys is not None else ([], [])

    def put_rows(self, start: int, stop: int, tensors: list[Any], plain: list[Any], needs_grad: list[bool]) -> None:
        if self._ys is not None:
            self._ys.put_rows(start, stop, tensors, plain, needs_grad)

    def learn(self, tape: Tape, spec: Spec) -> None:
        """What a step was seen to give in a run that does not count: the kinds of its ys, and which of them are leaves of its carry."""
        if self._ys is not None:
            self._ys.learn(tape.steps[0].ys, spec)
            self._note_alias(0, tape.carry_out, tape.steps[0].ys)

    def let_go_of_results(self) -> None:
        self._ys = None

    def refuse_kept(self) -> None:
        if self._kept:
            raise InvalidInput(
                f"{self.name}: a step calls retape.keep, whose values are not written to a journal. "
                "Leave resume= out, or carry the decision."
            )

    def alias_of(self, step: int) -> tuple[int, ...]:
        return self.alias.get(step, self._usual_alias or ())
