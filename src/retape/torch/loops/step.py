"""Steps of a loop: calling them, checking them, collecting their ys, and the autograd graph of consecutive steps.

Every step runs with gradients enabled, also one that is recomputed only to reach a later state: without them kernels, and the
step's own code, may take another path, and comparing states would not show every difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from retape.core.errors import InvalidInput, RecomputeMismatch
from retape.torch.capture import ambient, rng
from retape.torch.capture.mutation import versions_of
from retape.torch.engine import context
from retape.torch.loops.plan import StepCost
from retape.torch.loops.state import (
    Spec,
    State,
    check_same_kind,
    checksum_of,
    first_places,
    flatten,
    storage_bytes,
    unflatten,
)

if TYPE_CHECKING:
    from retape.torch.loops.side_state import SideState

Step = Callable[[Any, Any], tuple[Any, Any]]
Grads = list[Tensor | None]


# --- the graph of consecutive steps ---------------------------------------------------------------------------------


class StepEnds(NamedTuple):
    """The leaves of one step's x and of its y, as parts of a graph."""

    xs: list[Any]
    ys: list[Any]


class StepGradients(NamedTuple):
    """Gradients of the first carry, of each step's x, and the sums so far for all captured tensors."""

    carry: Grads
    xs: list[Grads]
    sums: Grads


class LoopGradients(NamedTuple):
    """Gradients of the carry, of xs and of the captured tensors; in a partial pass, those of the steps from `end` on."""

    end: int
    carry: Grads
    xs: Grads
    sums: Grads


class TapedSteps(NamedTuple):
    """The autograd graph of consecutive steps from `start` on, given by its inputs and outputs.

    Gradients are summed in the order of plain autograd over the unrolled loop: gradients of later steps enter first, as the
    gradient of the leaf itself, and the contributions of these steps are added to them one by one.
    """

    start: int
    carry_in: list[Any]
    carry_out: list[Any]
    steps: list[StepEnds]

    def reverse(
        self,
        carry: Grads,
        ys: Sequence[Grads],
        *,
        seeds: Grads,
        captured: Sequence[Tensor],
        sums: Grads,
        xs_wanted: bool,
        retain: bool,
    ) -> StepGradients:
        """Backpropagate through these steps. `seeds` are gradients of the first carry that are added before all others.

        `ys` holds the gradients of each step's ys, or is empty. Gradients of xs are computed only if `xs_wanted`. The lists given
        are emptied, and without `retain` so is `carry_out`: the engine then frees gradients after use and adds to sums in place.
        """
        pairs = [(captured, sums), (self.carry_in, seeds), (self.carry_out, carry)]
        if ys:
            pairs += zip([step.ys for step in self.steps], ys, strict=True)
        ends: list[Tensor] = []
        grads: Grads = []
        for leaves, given in pairs:
            for index, (leaf, grad) in enumerate(zip(leaves, given, strict=True)):
                if grad is not None and isinstance(leaf, Tensor) and leaf.requires_grad:
                    ends.append(leaf)
                    grads.append(grad)
                    given[index] = None
        groups = [self.carry_in, *[step.xs for step in self.steps if xs_wanted], list(captured)]
        wanted = [[isinstance(leaf, Tensor) and leaf.requires_grad for leaf in group] for group in groups]
        same_as = first_places(self.carry_in)
        if same_as is not None:  # the gradient of a tensor that is there twice is given once
            wanted[0] = [
                needed and place == first for place, (needed, first) in enumerate(zip(wanted[0], same_as, strict=True))
            ]
        inputs = list(compress(chain.from_iterable(groups), chain.from_iterable(wanted)))
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if ends and inputs:
            root = _SeedGradients.apply(grads, *ends)
            ends.clear()
            if not retain:
                self.carry_out.clear()
            with _without_hooks(captured):
                found = torch.autograd.grad(root, inputs, retain_graph=retain, allow_unused=True)
        rest = iter(found)
        result: list[Grads] = [[next(rest) if n else None for n in needed] for needed in wanted]
        return StepGradients(result[0], result[1:-1], result[-1])


class _SeedGradients(torch.autograd.Function):
    """The root of a backward pass over several outputs; hands each its gradient.

    Gradients passed as grad_outputs would stay referenced by the caller, and the first addition to a sum would need a copy.
    """

    @staticmethod
    def forward(ctx: Any, grads: Grads, *ends: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.ones((), device=ends[0].device)  # so that backward runs on the stream of the steps

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        handed = (None, *ctx.grads)
        ctx.grads.clear()
        return handed


@contextmanager
def _without_hooks(captured: Sequence[Tensor]) -> Iterator[None]:
    """Disable tensor hooks and `retain_grad`: they run once, when the loop's node returns the whole gradient."""
    hooked = [(tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in captured if tensor._backward_hooks]
    retained = [(tensor, tensor.grad) for tensor in captured if tensor.retains_grad]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)
        for tensor, grad in retained:
            tensor.grad = grad


# --- inputs and outputs of steps ------------------------------------------------------------------------------------


class Xs:
    """Inputs of the steps: one slice of each tensor per step; every other leaf is passed to each step unchanged."""

    def __init__(self, tree: Any) -> None:
        self.leaves, self._spec = flatten(tree)
        self.needs_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self.leaves]
        self.any_needs_grad = any(self.needs_grad)
        self._held = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self._versions = versions_of(self._held)

    def length(self) -> int | None:
        """Return the number of slices, or None if no leaf is a tensor."""
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
        """Return the leaves for one step, as new autograd leaves where they need gradients."""
        if not self.any_needs_grad:
            return [leaf.select(0, step) if isinstance(leaf, Tensor) else leaf for leaf in self._held]
        made: list[Any] = []
        for leaf, needed in zip(self._held, self.needs_grad, strict=True):
            part = leaf.select(0, step) if isinstance(leaf, Tensor) else leaf
            made.append(part.detach().requires_grad_() if needed else part)
        return made

    def with_history(self, step: int) -> Any:
        """Return one step's x for the plain loop: slices that autograd follows back to xs."""
        return self.tree([leaf[step] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])

    def tree(self, leaves: list[Any]) -> Any:
        return leaves[0] if self._spec.tree is None else unflatten(leaves, self._spec)

    def modified(self) -> bool:
        """True if a tensor was modified in place since the loop began."""
        return versions_of(self._held) != self._versions


class Ys:
    """Outputs of the steps beside the carry, written into stacked tensors as they come."""

    def __init__(self, name: str, length: int) -> None:
        self._name = name
        self._length = length
        self._spec: Spec | None = None
        self._stacked: list[Any] = []
        self._count = 0
        self.needs_grad: list[bool] = []

    def allocate(self, leaves: list[Any], spec: Spec) -> None:
        """Allocate stacks for ys like these."""
        self._spec = spec
        self._stacked = [
            torch.empty((self._length, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
            if isinstance(leaf, Tensor)
            else []
            for leaf in leaves
        ]
        self.needs_grad = [False] * len(leaves)

    def put(self, leaves: list[Any], spec: Spec) -> None:
        """Append the y of the next step."""
        if self._spec is None:
            self.allocate(leaves, spec)
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
                f"not {tuple(stacked.shape[1:])} {stacked.dtype}. Return the same in every step, or give reduce=."
            )
        stacked[self._count].copy_(leaf.detach())
        self.needs_grad[index] = self.needs_grad[index] or leaf.requires_grad

    def rows(self, start: int, stop: int) -> tuple[list[Tensor | None], list[Any]]:
        """Return the ys of some steps: tensors, and the values of leaves that are not tensors."""
        tensors = [leaf[start:stop] if isinstance(leaf, Tensor) else None for leaf in self._stacked]
        return tensors, [None if isinstance(leaf, Tensor) else leaf[start:stop] for leaf in self._stacked]

    def put_rows(self, start: int, stop: int, tensors: list[Any], plain: list[Any], needs_grad: list[bool]) -> None:
        """Write back what `rows` returned."""
        for index, stacked in enumerate(self._stacked):
            if isinstance(stacked, Tensor):
                stacked[start:stop].copy_(tensors[index])
            else:
                stacked[start:] = plain[index]
        self.needs_grad, self._count = list(needs_grad), stop

    def result(self) -> tuple[list[Any], Spec]:
        """Return the stacked leaves; values that are not tensors as a list, or None if all are None."""
        assert self._spec is not None
        plain = [
            leaf if isinstance(leaf, Tensor) or any(item is not None for item in leaf) else None
            for leaf in self._stacked
        ]
        return plain, self._spec


# --- running steps --------------------------------------------------------------------------------------------------


class _KeptByStep:
    """The values that one step gave to `retape.keep`; the part of a region that a run of a step needs."""

    __slots__ = ("kept", "name")

    def __init__(self, name: str, kept: list[Any]) -> None:
        self.name = name
        self.kept = kept


class Body:
    """Runs steps. The first run records ys, aliases and kept values; a re-run changes nothing outside."""

    def __init__(self, name: str, step: Step, xs: Xs, ys: Ys | None, *, first_differs: bool = False) -> None:
        self.name = name
        self.xs = xs
        self.ys = ys
        self._step = step
        self._first_differs = first_differs  # a reduction has no total before the first step
        self._kept: dict[int, list[Any]] = {}
        # The leaf of the next carry that each y is, or -1: the usual answer, and the steps with another one.
        self._usual_alias: tuple[int, ...] | None = None
        self.alias: dict[int, tuple[int, ...]] = {}
        self.rerun = False
        self.checksums: dict[int, int | None] = {}  # of states that the first run reached, by step
        self._shared_run: context.RegionRun | None = None
        self.y_spec: Spec | None = None

    def tape(self, state: State, start: int, stop: int) -> tuple[TapedSteps, State]:
        """Run steps as one graph; return it and the state after them."""
        carry_in = carry = state.fresh()
        ends: list[StepEnds] = []
        running = context.THREAD.runs
        if self.rerun:
            spec = state.spec
            for step in range(start, stop):
                x_leaves = self.xs.at(step)
                tree, y = self._run(unflatten(carry, spec), x_leaves, step, running)
                carry, spec = flatten(tree)
                ends.append(StepEnds(x_leaves, flatten(y)[0]))
                if step + 1 in self.checksums:
                    self._check_checksum(step + 1, carry)
            self._check_kind(state, start, carry, spec)
            return TapedSteps(start, carry_in, carry, ends), State(carry, spec)
        for step in range(start, stop):
            carry, spec, end = self._first_call(state, carry, step, running)
            ends.append(end)
            state = State(carry, spec)
        return TapedSteps(start, carry_in, carry, ends), state

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps again and keep only the state after them."""
        carry, spec = state.fresh(), state.spec
        running = context.THREAD.runs
        for step in range(start, stop):
            out, spec = flatten(self._run(unflatten(carry, spec), self.xs.at(step), step, running)[0])
            carry = [
                leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
                for leaf in out
            ]
            same_as = first_places(out)
            carry = carry if same_as is None else [carry[place] for place in same_as]
            del out  # frees the graph of this step before the next one builds its own
        self._check_kind(state, start, carry, spec)
        return State(carry, spec)

    def _first_call(
        self, before: State, carry: list[Any], step: int, running: list[Any]
    ) -> tuple[list[Any], Spec, StepEnds]:
        x_leaves = self.xs.at(step)
        result = self._run(unflatten(carry, before.spec), x_leaves, step, running)
        if not isinstance(result, tuple) or len(result) != 2:
            given = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise InvalidInput(
                f"{self.name}: step {step} returned {given}; a step returns two: the next carry, and a y (None if there is none)."
            )
        tree, y = result
        out, spec = flatten(tree)
        self._check_kind(before, step, out, spec)
        self._check_inputs_unmodified(before, step)
        y_leaves, self.y_spec = flatten(y)
        if self.ys is not None:
            self.ys.put(y_leaves, self.y_spec)
            self._record_alias(step, out, y_leaves)
        return out, spec, StepEnds(x_leaves, y_leaves)

    def _run(self, carry: Any, x_leaves: list[Any], step: int, running: list[Any]) -> Any:
        rerun, run = self.rerun, self._shared_run
        if rerun and step in self._kept:
            run = self._new_run(self._kept[step])
        elif run is None or run.rerun is not rerun or run.region.kept:  # one without kept values serves all steps
            run = self._shared_run = self._new_run([])
        running.append(run)
        try:
            result = self._step(carry, self.xs.tree(x_leaves))
        finally:
            running.pop()
        if not rerun and run.region.kept:
            self._kept[step] = run.region.kept
        return result

    def _new_run(self, kept: list[Any]) -> context.RegionRun:
        return context.RegionRun(_KeptByStep(self.name, kept), rerun=self.rerun)  # type: ignore[arg-type]  # all that a run reads of a region

    def _check_kind(self, before: State, step: int, leaves: list[Any], spec: Spec) -> None:
        if not (self._first_differs and step == 0):
            check_same_kind(self.name, step, before, leaves, spec)

    def _check_inputs_unmodified(self, before: State, step: int) -> None:
        leaf = before.modified_leaf()
        if leaf is not None or self.xs.modified():
            what = "its x" if leaf is None else f"leaf {leaf} of its carry"
            raise InvalidInput(
                f"{self.name}: step {step} changed {what} in place. The inputs of a step must stay unchanged, because the step may run "
                "again: return a new tensor instead (x = x + 1, not x += 1)."
            )

    def _check_checksum(self, step: int, leaves: list[Any]) -> None:
        if self.checksums[step] not in (None, checksum_of(leaves)):
            raise RecomputeMismatch(
                f"{self.name}: running the steps before step {step} again gave another state than the first run, so that gradients "
                "would be wrong. The step reads something that changes from run to run and that cannot be restored (a file, a clock, an "
                "object that is not reachable from it). Put it into the carry or xs, or record it with retape.keep."
            )

    def _record_alias(self, step: int, out: list[Any], ys: list[Any]) -> None:
        alias: tuple[int, ...] = (-1,) * len(ys)
        if any(isinstance(leaf, Tensor) for leaf in ys):
            indices = {id(leaf): index for index, leaf in enumerate(out) if isinstance(leaf, Tensor)}
            alias = tuple([indices.get(id(leaf), -1) for leaf in ys])
        if self._usual_alias is None:
            self._usual_alias = alias
        elif alias != self._usual_alias:
            self.alias[step] = alias

    def alias_of(self, step: int) -> tuple[int, ...]:
        """Return for each y of a step the leaf of the next carry that it is, or -1."""
        return self.alias.get(step, self._usual_alias or ())

    def prepare_ys(self, tape: TapedSteps, spec: Spec) -> None:
        """Allocate ys and record aliases from a step that was only measured."""
        if self.ys is not None:
            self.ys.allocate(tape.steps[0].ys, spec)
            self._record_alias(0, tape.carry_out, tape.steps[0].ys)

    def refuse_kept(self) -> None:
        """Raise InvalidInput if a step called `retape.keep`: a journal cannot hold the values."""
        if self._kept:
            raise InvalidInput(
                f"{self.name}: a step calls retape.keep, whose values are not written to a journal. "
                "Leave resume= out, or carry the decision."
            )


# --- measuring one step ---------------------------------------------------------------------------------------------


class MeasuredStep(NamedTuple):
    """The cost and the results of one step that was run only to be measured."""

    cost: StepCost
    tape: TapedSteps
    after: State
    y_spec: Spec | None


def measure_step(
    body: Body,
    side_state: SideState,
    initial: State,
    generators: list[Any],
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredStep:
    """Run the first step once and undo it. `body` must not be the loop's own: it records the step."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with ambient.RestoredAmbient(ambient.capture(), rng.capture(generators)):
        start = clock()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            tape, after = body.tape(initial, 0, 1)
        seconds = clock() - start
    elsewhere = [value for _, value in side_state.unchanged()]
    elsewhere += [leaf for leaf in (*initial.leaves, *body.xs.leaves) if isinstance(leaf, Tensor)]
    known = {tensor.untyped_storage()._cdata for tensor in elsewhere if tensor.layout is torch.strided}
    outputs = [leaf for leaf in (*tape.carry_out, *tape.steps[0].ys) if isinstance(leaf, Tensor)]
    own = [t for t in (*saved, *outputs) if t.layout is not torch.strided or t.untyped_storage()._cdata not in known]
    side_state.after_step()
    side_state.rewind()
    cost = StepCost(max(initial.nbytes, after.nbytes), storage_bytes(own), seconds)
    return MeasuredStep(cost, tape, after, body.y_spec)
