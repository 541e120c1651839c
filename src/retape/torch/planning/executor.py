"""Runs an attached model as an assignment says: kept regions are simply called, the others run through the engine.

Shapes other than the profiled ones stay right: slots are held by number, and which ops a re-run may skip is worked out again
for each new shape. What the assignment does not know (a module called more often than in the profile) is recomputed.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from retape.core.assignment import Assignment, Choice
from retape.core.problem import OptionKind
from retape.torch.capture.functions import CompiledCall
from retape.torch.capture.signature import Signature, elements, shapes, signature
from retape.torch.compat import compiler_internals
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.context import current_runner, managed_elsewhere
from retape.torch.engine.host import offload
from retape.torch.engine.policy import HOLD, Check, Inputs, Policy, Proof, ProofState
from retape.torch.engine.recipe_mode import Recipe
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe
from retape.torch.engine.slots import tensors_of
from retape.torch.engine.trace import RegionTrace
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.profile import Profile
from retape.torch.planning.train_mode import depends_on_mode, mode_name
from retape.torch.planning.variants.compiled import CannotCompile, in_form, refuse_kept_graph
from retape.torch.planning.variants.tiling import call_part

MOST_SHAPES = 512  # for which recipes are kept; the one not used for longest goes first
MOST_TRACES = (
    2  # of one region and shape: a recipe that does not hold is made anew once, from a trace of that very region
)
_LOG = logging.getLogger("retape")
_TOLD: set[str] = set()  # in this process
_Key = tuple[int, tuple[int, ...], Signature]  # the kind or the number of a region, its slots that answer, its inputs


@dataclass(slots=True, kw_only=True)
class _Selection:
    """The recipe of one region for one signature, its standing, and how often the region was traced for it."""

    recipe: Recipe | None
    proof: Proof
    traces: int = 0

    @property
    def is_settled(self) -> bool:
        """True if it is to be used as it is: not rejected, or traced often enough."""
        return not self.proof.is_rejected or self.traces >= MOST_TRACES


class Executor:
    """Answers the calls of the modules that a fit has attached.

    A recipe is shared by regions of one kind and proven for each of them (`proof.py`). With `trial` recipes are used unproven, for
    steps whose gradients are thrown away; `end_trial` ends that.
    """

    def __init__(self, assignment: Assignment, names: dict[int, str], *, check: Check, trial: bool = False) -> None:
        self._names = names
        self._check = check
        self._trial = trial
        self._choices = {(c.name, c.root_call, c.call): (number, c) for number, c in enumerate(assignment.choices)}
        self._recipes: OrderedDict[_Key, Recipe | None] = OrderedDict()  # by kind
        self._selections: OrderedDict[_Key, _Selection] = OrderedDict()  # by region
        self._root_call = -1
        self._counts: dict[str, int] = {}
        self._warned: set[str] = set()
        self._other_modes: set[str] = set()
        self._answers = {number: answers(choice) for number, choice in enumerate(assignment.choices)}
        self._moves = assignment.moves_something
        # A compiled form runs its parts in tiles itself.
        self._tiled = {c.name: c.tiled for c in assignment.choices if c.tiles > 1 and c.saved_share is None}
        self._is_compiled = assignment.is_compiled
        self.regions_run = 0

    def learn(self, kind: int, inputs: Signature, trace: RegionTrace | None, there: tuple[int, ...]) -> None:
        """What the profile has seen already need not be traced again; the slots `there` are held or moved."""
        if there and trace is not None and (kind, there, inputs) not in self._recipes:
            self._recipes[(kind, there, inputs)] = plan_recipe(trace, frozenset(there))

    call_part = staticmethod(call_part)

    def parts_of(self, name: str, module: nn.Module) -> list[nn.Module]:
        """The parts of a region that are called through `call_part`."""
        return [module.get_submodule(part) for part in self._tiled.get(name, ())]

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """The model itself is called; forwards before one backward are counted, so that each has choices of its own."""
        if torch.is_grad_enabled():  # an evaluation in between is no forward of the step
            self._root_call += 1
            self._counts.clear()
        LIBRARIES.begin_forward(args, keywords)
        outputs = plain_call(*args, **keywords)
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)
                break
        return outputs

    @compiler_internals.left_alone
    def _backward_begins(self, gradient: Any) -> None:
        self._root_call = -1
        if self._is_compiled:
            refuse_kept_graph()

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """A region is called."""
        if not torch.is_grad_enabled() or managed_elsewhere():
            return plain_call(*args, **keywords)
        args, keywords, note = LIBRARIES.region_arguments(module, args, keywords)
        if note is not None:
            self._tell_once(note)
        number, choice = self._choice(self._names[id(module)])
        if choice.training is not None and choice.training is not module.training:
            self._in_other_mode(module, choice)
        form = in_form(module, plain_call, choice.saved_share, choice.tiles, choice.tiled)
        try:
            outputs = self._ran(number, self._as_it_can_be(choice, form), form, args, keywords)
        except CannotCompile:
            outputs = self._ran(number, self._as_it_can_be(choice, plain_call), plain_call, args, keywords)
        if self._moves and not choice.moves:
            offload.after_unmoved(tensors_of(outputs))
        return outputs

    @staticmethod
    def _as_it_can_be(choice: Choice, call: Callable[..., Any]) -> Choice:
        """A choice that was made for a compiled form, of a block that does not compile here: what its eager tape weighs nobody knows."""
        if choice.saved_share is None or type(call) is CompiledCall:
            return choice
        return replace(choice, option=OptionKind.RECOMPUTE, held=(), moved=(), saved_share=None, tiles=1, tiled=())

    def _ran(self, number: int, choice: Choice, call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        if choice.option is not OptionKind.KEEP:
            return self._run(number, choice, call, args, keywords)
        if current_runner() is None:
            return call(*args, **keywords)
        return run_region(call, *args, keywords=keywords, policy=HOLD, check=self._check)

    def _choice(self, name: str) -> tuple[int, Choice]:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        root = max(self._root_call, 0)
        found = self._choices.get((name, root, count)) or self._choices.get((name, 0, count))
        return found or (-1, Choice(name=name, option=OptionKind.RECOMPUTE))

    def _run(self, number: int, choice: Choice, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        self.regions_run += 1
        inputs = signature(args, keywords)
        # Under a live budget larger batches are looked after.
        if choice.elements and current_runner() is None:
            self._warn_of_size(choice, inputs)
        held = self._answers.get(number, ()) if choice.held or choice.moved else ()
        if not held or type(plain_call) is CompiledCall:
            policy = policy_of(number, choice, None, None)
            return run_region(plain_call, *args, keywords=keywords, policy=policy, check=self._check)
        selection, done = self._selection(number, choice, (choice.kind, held, inputs))
        proof = None if selection.recipe is None and done is None else selection.proof
        policy = policy_of(number, choice, selection.recipe, proof)
        return run_region(plain_call, *args, keywords=keywords, policy=policy, check=self._check, done=done)

    def _warn_of_size(self, choice: Choice, inputs: Signature) -> None:
        """Warn once of inputs with more numbers, or a longer side, than those that were profiled: rows can cost their square."""
        if _sized(inputs) > choice.elements:
            what = f"{_sized(inputs)} numbers, and {choice.elements}"
        else:
            longer = _longer(shapes(inputs), choice.shapes)
            if longer is None:
                return
            what = f"a tensor of shape {longer[0]}, and one of shape {longer[1]}"
        self._warn_once(
            "size",
            f"Region {choice.name} was given {what} when it was profiled: the peak may pass the budget. "
            "Call retape.fit again with the larger batch.",
        )

    def _selection(self, number: int, choice: Choice, key: _Key) -> tuple[_Selection, Callable[[Region], None] | None]:
        """What a re-run of this region may skip, and what is to be done after its forward: a trace, where it is not known yet."""
        own: _Key = (number, *key[1:])
        found = self._selections.get(own)
        if found is not None and found.is_settled:
            self._selections.move_to_end(own)
            return found, None
        if found is None and key in self._recipes:
            self._recipes.move_to_end(key)
            return self._remember(own, _Selection(recipe=self._recipes[key], proof=self._new_proof())), None
        traces = 1 if found is None else found.traces + 1
        made = self._remember(own, _Selection(recipe=None, proof=self._new_proof(), traces=traces))
        return made, partial(self._work_out, made, choice, key)

    def _new_proof(self) -> Proof:
        return Proof(ProofState.TRIAL if self._trial else ProofState.PENDING)

    def _remember(self, own: _Key, selection: _Selection) -> _Selection:
        self._selections[own] = selection
        if len(self._selections) > MOST_SHAPES * max(1, len(self._choices)):
            self._selections.popitem(last=False)
        return selection

    def _work_out(self, selection: _Selection, choice: Choice, key: _Key, region: Region) -> None:
        """Trace the region to find out which ops a re-run may skip."""
        trace = region.trace()
        fits = len(trace.slots) == choice.slots
        selection.recipe = plan_recipe(trace, frozenset(key[1])) if fits else None
        if key not in self._recipes:
            self._recipes[key] = selection.recipe
            if len(self._recipes) > MOST_SHAPES:
                self._recipes.popitem(last=False)
        region.policy = policy_of(region.policy.stage, choice, selection.recipe, selection.proof)

    def end_trial(self) -> None:
        """Prove every recipe before it is used from now on."""
        self._trial = False
        for selection in self._selections.values():
            if selection.proof.state is ProofState.TRIAL:
                selection.proof.state = ProofState.PENDING

    @property
    def rejected(self) -> bool:
        """True if a recipe did not reproduce the bits of a forward."""
        return any(selection.proof.is_rejected for selection in self._selections.values())

    @staticmethod
    def _tell_once(what: str) -> None:
        if what not in _TOLD:
            _TOLD.add(what)
            _LOG.warning("retape: %s.", what)

    def _in_other_mode(self, module: nn.Module, choice: Choice) -> None:
        """Dropout and its like save other slots in training than in evaluation; a region that has none is the same in both."""
        if choice.name in self._other_modes or current_runner() is not None:
            return
        self._other_modes.add(choice.name)
        if depends_on_mode(module):
            self._warn_once(
                "mode",
                f"Region {choice.name} runs in {mode_name(module.training)} mode, and in {mode_name(not module.training)} mode when "
                "it was profiled: the peak may pass the budget. Call retape.fit in the mode that you train in.",
            )

    def _warn_once(self, about: str, what: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(what, stacklevel=4)


def executor_of(profile: Profile, assignment: Assignment, names: dict[int, str], *, check: Check) -> Executor:
    """An executor on trial that knows what a profile has seen of the regions."""
    executor = Executor(assignment, names, check=check, trial=True)
    for choice, call in zip(assignment.choices, profile.calls, strict=True):
        executor.learn(choice.kind, call.inputs, profile.traces[call.kind], answers(choice))
    return executor


def _sized(inputs: Signature) -> int:
    """How many numbers a call is given; one that comes along by itself (how many items a batch has) is no larger batch."""
    return elements(tuple(part for part in inputs if not (isinstance(part, tuple) and part[:1] == ((),))))


def _longer(
    given: tuple[tuple[int, ...], ...], profiled: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The first tensor that is longer along one side than the profiled one in its place, with that one's shape."""
    if len(given) != len(profiled):
        return None
    for now, then in zip(given, profiled, strict=True):
        if len(now) == len(then) and any(map(operator.gt, now, then)):
            return now, then
    return None


def answers(choice: Choice) -> tuple[int, ...]:
    """The slots that a re-run need not make: held, or moved and fetched for it."""
    return tuple(sorted({*choice.held, *choice.moved}))


def policy_of(number: int, choice: Choice, recipe: Recipe | None, proof: Proof | None) -> Policy:
    """What the engine is told of one call."""
    return Policy(
        held=frozenset(choice.held),
        moved=frozenset(choice.moved),
        moved_inputs=frozenset(choice.moved_inputs),
        inputs=Inputs.LINK if choice.drop_input else Inputs.HOLD,
        recipe=recipe,
        proof=proof,
        stage=number,
        tiles=choice.tiles,
        passing=choice.passing,
    )
