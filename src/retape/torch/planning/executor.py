"""Runs an attached model as its assignment says: kept regions are simply called, the others run through the engine.

Other shapes than the profiled ones are allowed: slots are held by number, and the ops that a re-run may skip are determined again for
each new shape. A call that the assignment does not have (a module called more often than in the profile) is recomputed. A plan is for
the mode (training or evaluation) in which it was profiled; `depends_on_mode` finds modules that differ between the two.
"""

from __future__ import annotations

import inspect
import logging
import operator
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retape.core.assignment import Assignment, Choice
from retape.core.errors import InvalidInput, PlanMismatch
from retape.torch.capture.arguments import Signature, elements, shapes, signature, tensors_of
from retape.torch.compat import compiler_internals, hook_internals
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.context import THREAD, managed_elsewhere
from retape.torch.engine.host import offload
from retape.torch.engine.policy import HOLD, Check, Inputs, Policy, Proof, ProofState
from retape.torch.engine.select import plan_recipe
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.attach import has_gradients, original_class, region_name, set_weights_freed
from retape.torch.planning.region_variants import (
    VARIANTS,
    CannotCompile,
    VariantCache,
    call_part,
    is_variant,
    refuse_kept_graph,
)
from retape.torch.planning.tuning import TUNING, PlanningTuning

if TYPE_CHECKING:
    from retape.torch.engine.host.spill import SpillFolder
    from retape.torch.engine.recipe_mode import Recipe
    from retape.torch.engine.region import Region
    from retape.torch.engine.trace import RegionTrace

_LOG = logging.getLogger("retape")
_Key = tuple[
    int, tuple[int, ...], Signature
]  # kind or number of a region, its held and moved slots, its inputs and tiles


@dataclass(slots=True, kw_only=True)
class _Selection:
    """The recipe of one region for one signature, the state of its proof, and how often the region was traced for it."""

    recipe: Recipe | None
    proof: Proof
    traces: int = 0

    def is_final(self, most_traces: int) -> bool:
        """True if it is used without another trace: not rejected, or traced often enough."""
        return not self.proof.is_rejected or self.traces >= most_traces


class Executor:
    """Answers the calls of the modules that a fit has attached.

    A recipe is shared by regions of one kind and proven for each of them (`engine/policy.py`). With `trial` recipes are used unproven, for
    steps whose gradients are thrown away; `end_trial` ends that. `replicas` is the process group whose ranks hold parts of inputs,
    and `disk` the folder for what goes to a disk.
    """

    def __init__(
        self,
        assignment: Assignment,
        names: dict[int, str],
        *,
        check: Check,
        trial: bool = False,
        replicas: Any = None,
        disk: SpillFolder | None = None,
        variants: VariantCache = VARIANTS,
        tuning: PlanningTuning = TUNING,
    ) -> None:
        if replicas is None and any(choice.sharded_inputs for choice in assignment.choices):
            raise PlanMismatch(
                "The plan holds a part of each input on the ranks of a tensor-parallel group, and the weights of this model are sharded "
                "over no such group, or over several. Parallelize it as when it was fitted, or call retape.fit again."
            )
        if disk is None and any(choice.on_disk for choice in assignment.choices):
            raise InvalidInput(
                "This plan moves slots to a disk: give apply() a folder as `disk`, or fit again without one."
            )
        self.assignment = assignment
        self._variants, self._tuning = variants, tuning
        self._names, self._replicas, self._disk = names, replicas, disk
        self._check = check
        self._trial = trial
        self._choices = {(c.name, c.root_call, c.call): (number, c) for number, c in enumerate(assignment.choices)}
        self._recipes: OrderedDict[_Key, Recipe | None] = OrderedDict()  # by kind
        self._selections: OrderedDict[_Key, _Selection] = OrderedDict()  # by region
        self._traces: OrderedDict[tuple[Any, Any], RegionTrace] = (
            OrderedDict()
        )  # by kind, of shapes that the profile does not have
        self._has_modules = not all(choice.is_checkpoint_call for choice in assignment.choices)
        self._root_call = -1
        self._counts: dict[str, int] = {}
        self._warned: set[str] = set()
        self._other_modes: set[str] = set()
        self._answers = {number: slots_there(choice) for number, choice in enumerate(assignment.choices)}
        self._moves = assignment.moves_something
        # A compiled variant runs its parts in tiles itself.
        self._tiled = {c.name: c.tiled for c in assignment.choices if c.tiles > 1 and c.saved_share is None}
        self._is_compiled = assignment.is_compiled
        self.regions_run = self._region_calls = 0

    def learn(self, choice: Choice, inputs: Signature, trace: RegionTrace | None) -> None:
        """Take the recipe for the slots that a choice holds and moves from a trace of the profile: the region is not traced again."""
        there = slots_there(choice)
        key = (choice.kind, there, (*inputs, choice.tiles, choice.tiled))
        if there and trace is not None and key not in self._recipes:
            self._recipes[key] = plan_recipe(trace, frozenset(there))

    call_part = staticmethod(call_part)

    @property
    def begins_step(self) -> bool:
        """True if the model has not been called since the last backward."""
        return self._root_call < 0

    def parts_of(self, name: str, module: nn.Module) -> list[nn.Module]:
        """Return the parts of a region that are called through `call_part`."""
        return [module.get_submodule(part) for part in self._tiled.get(name, ())]

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of the model; forwards before one backward are counted, so that each has choices of its own."""
        if torch.is_grad_enabled():  # an evaluation between them is no forward of the step
            self._root_call += 1
            self._counts.clear()
        LIBRARIES.begin_forward(args, keywords)
        calls_before = self._region_calls
        outputs = plain_call(*args, **keywords)
        unused = self._has_modules and self._region_calls == calls_before
        if unused and torch.is_grad_enabled() and not managed_elsewhere():
            self._warn_once(
                "unused",
                f"A forward of {original_class(type(module)).__name__} called no region of its plan, as when a part of it is compiled or "
                "replaced after the fit: the peak may pass the budget. Call retape.fit on the model as it is trained.",
            )
        self._watch_backward(outputs)
        return outputs

    def _watch_backward(self, outputs: Any) -> None:
        """Learn of the backward, whichever of the outputs it starts from."""
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                hook_internals.on_gradient(tensor, self._backward_begins)

    @compiler_internals.left_alone
    def _backward_begins(self, gradient: Any) -> None:
        self._root_call = -1
        self._counts.clear()
        if self._is_compiled:
            refuse_kept_graph()

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of a region."""
        if module.training and getattr(module, "gradient_checkpointing", False):
            _log_once(_switched_on(module))
        if not torch.is_grad_enabled() or managed_elsewhere():
            set_weights_freed(module, None)  # without a backward they would stay gathered
            return plain_call(*args, **keywords)
        args, keywords, note = LIBRARIES.region_arguments(module, args, keywords)
        if note is not None:
            _log_once(note)
        number, choice = self._choice(region_name(self._names, module))
        set_weights_freed(module, not choice.keep_gathered)
        if choice.training is not None and choice.training is not module.training:
            self._in_other_mode(module, choice)
        if choice.saved_share is None:
            outputs = self._ran(number, choice, plain_call, args, keywords)
        else:
            outputs = self._ran_variant(number, choice, module, plain_call, args, keywords)
        if self._moves and not choice.moves:
            offload.after_unmoved(tensors_of(outputs))
        if self._root_call < 0:  # called outside the model's own call: its backward ends a step too
            self._watch_backward(outputs)
        return outputs

    def _ran_variant(  # noqa: PLR0917 - one user
        self, number: int, choice: Choice, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any
    ) -> Any:
        """Run a compiled variant; recompute the eager block if it does not compile here, because its tape was not measured."""
        eager = choice.recomputed_eagerly()
        kind = original_class(type(module))
        call = self._variants.call_of(
            kind, module, plain_call, choice.saved_share, tiles=choice.tiles, parts=choice.tiled
        )
        try:
            return self._ran(number, choice if is_variant(call) else eager, call, args, keywords)
        except CannotCompile:
            return self._ran(number, eager, plain_call, args, keywords)

    def _ran(self, number: int, choice: Choice, call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        if not choice.is_kept:
            return self._run(number, choice, call, args, keywords)
        if THREAD.runner is None:
            return call(*args, **keywords)
        return run_region(call, *args, keywords=keywords, policy=HOLD, check=self._check)

    def _choice(self, name: str) -> tuple[int, Choice]:
        self._region_calls += 1
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        root = max(self._root_call, 0)
        found = self._choices.get((name, root, count)) or self._choices.get((name, 0, count))
        return found or (-1, Choice(name=name).recomputed_eagerly())

    def _run(self, number: int, choice: Choice, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        self.regions_run += 1
        inputs = signature(args, keywords)
        # Under a budget at run time (`adaptive`) a larger batch needs no warning.
        if choice.elements and THREAD.runner is None:
            self._warn_of_size(choice, inputs)
        held = self._answers.get(number, ()) if choice.held or choice.moved else ()
        if not held or is_variant(plain_call):
            policy = self._policy(number, choice, None, None)
            return run_region(plain_call, *args, keywords=keywords, policy=policy, check=self._check)
        selection, done = self._selection(number, choice, (choice.kind, held, (*inputs, choice.tiles, choice.tiled)))
        proof = None if selection.recipe is None and done is None else selection.proof
        policy = self._policy(number, choice, selection.recipe, proof)
        return run_region(plain_call, *args, keywords=keywords, policy=policy, check=self._check, done=done)

    def _warn_of_size(self, choice: Choice, inputs: Signature) -> None:
        """Warn once of inputs with more elements, or a longer side, than the profiled ones: memory can grow with its square."""
        given = shapes(inputs)
        if given == choice.shapes:
            return
        if _sized(inputs) > choice.elements:
            what = f"{_sized(inputs)} numbers, and {choice.elements}"
        else:
            longer = _longer(given, choice.shapes)
            if longer is None:
                return
            what = f"a tensor of shape {longer[0]}, and one of shape {longer[1]}"
        self._warn_once(
            "size",
            f"Region {choice.name} was given {what} when it was profiled: the peak may pass the budget. "
            "Call retape.fit again with the larger batch.",
        )

    def _selection(self, number: int, choice: Choice, key: _Key) -> tuple[_Selection, Callable[[Region], None] | None]:
        """Return the ops that a re-run of this region may skip; if unknown, also what traces the region after its forward."""
        own: _Key = (number, *key[1:])
        found = self._selections.get(own)
        if found is not None and found.is_final(self._tuning.most_region_traces):
            self._selections.move_to_end(own)
            return found, None
        if found is None and key not in self._recipes and (key[0], key[2]) in self._traces:
            self._add_recipe(choice, key, self._traces[key[0], key[2]])
        if found is None and key in self._recipes:
            self._recipes.move_to_end(key)
            return self._remember(own, _Selection(recipe=self._recipes[key], proof=self._new_proof())), None
        if (
            choice.hold_collectives or choice.sharded_inputs
        ):  # a trace runs to the end, and may start collectives that no other rank does
            return self._remember(own, _Selection(recipe=None, proof=self._new_proof())), None
        traces = 1 if found is None else found.traces + 1
        made = self._remember(own, _Selection(recipe=None, proof=self._new_proof(), traces=traces))
        return made, partial(self._trace_recipe, made, choice, key)

    def _new_proof(self) -> Proof:
        return Proof(ProofState.TRIAL if self._trial else ProofState.PENDING)

    def _remember(self, own: _Key, selection: _Selection) -> _Selection:
        self._selections[own] = selection
        if len(self._selections) > self._tuning.most_shapes * max(1, len(self._choices)):
            self._selections.popitem(last=False)
        return selection

    def _trace_recipe(self, selection: _Selection, choice: Choice, key: _Key, region: Region) -> None:
        """Trace the region to find the ops that a re-run may skip; regions of its kind that hold other slots need no trace."""
        trace = region.trace()
        selection.recipe = self._recipe(choice, key, trace)
        if key not in self._recipes:
            self._add_recipe(choice, key, trace)
            self._traces[key[0], key[2]] = trace
            if len(self._traces) > self._tuning.most_shapes:
                self._traces.popitem(last=False)
        region.policy = self._policy(region.policy.stage, choice, selection.recipe, selection.proof)

    def _policy(self, number: int, choice: Choice, recipe: Recipe | None, proof: Proof | None) -> Policy:
        policy = policy_of(number, choice, recipe, proof, self._disk if choice.on_disk else None)
        if not choice.sharded_inputs or THREAD.runner is not None:  # under a budget at run time each rank decides alone
            return policy
        return replace(policy, sharded_inputs=frozenset(choice.sharded_inputs), replicas=self._replicas)

    def _add_recipe(self, choice: Choice, key: _Key, trace: RegionTrace) -> None:
        self._recipes[key] = self._recipe(choice, key, trace)
        if len(self._recipes) > self._tuning.most_shapes:
            self._recipes.popitem(last=False)

    @staticmethod
    def _recipe(choice: Choice, key: _Key, trace: RegionTrace) -> Recipe | None:
        return plan_recipe(trace, frozenset(key[1])) if len(trace.slots) == choice.slots else None

    def end_trial(self) -> None:
        """Prove every recipe before it is used from now on."""
        self._trial = False
        self._counts.clear()
        for selection in self._selections.values():
            if selection.proof.state is ProofState.TRIAL:
                selection.proof.state = ProofState.PENDING

    @property
    def rejected(self) -> bool:
        """True if a recipe did not reproduce the bits of a forward."""
        return any(selection.proof.is_rejected for selection in self._selections.values())

    def _in_other_mode(self, module: nn.Module, choice: Choice) -> None:
        """Warn once if a region runs in another mode than it was profiled in and saves other slots there (dropout)."""
        if choice.name in self._other_modes or THREAD.runner is not None:
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


class GradientSwitch:
    """Lets one executor run the steps that begin without gradients, and another those that accumulate.

    Each forward of the model decides. `too_small` is logged once if a step accumulates and no plan for that fits.
    """

    def __init__(
        self, fresh: Executor, accumulating: Executor, root: nn.Module, *, too_small: str | None = None
    ) -> None:
        # Not the present parameters: loading weights may replace them.
        self._fresh, self._accumulating, self._root = fresh, accumulating, weakref.ref(root)
        self._running, self._too_small = fresh, too_small

    call_part = staticmethod(call_part)

    @property
    def regions_run(self) -> int:
        return self._fresh.regions_run + self._accumulating.regions_run

    def parts_of(self, name: str, module: nn.Module) -> list[nn.Module]:
        """Return the parts of a region that are called through `call_part`."""
        parts = [*self._fresh.parts_of(name, module), *self._accumulating.parts_of(name, module)]
        return list(dict.fromkeys(parts))

    def call_root(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of the model."""
        self._choose()
        return self._running.call_root(module, plain_call, args, keywords)

    def call(self, module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Answer the call of a region; one outside the model's own call is a step of its own."""
        if self._running.begins_step:
            self._choose()
        return self._running.call(module, plain_call, args, keywords)

    def _choose(self) -> None:
        root = self._root()
        if root is None or not torch.is_grad_enabled() or managed_elsewhere():
            return
        accumulates = has_gradients(root)
        self._running = self._accumulating if accumulates else self._fresh
        if accumulates and self._too_small is not None:
            _log_once(self._too_small)


def _switched_on(module: nn.Module) -> str:
    return (
        f"{original_class(type(module)).__name__} recomputes everything by itself: gradient_checkpointing was turned on after the fit, as "
        "trainers do when training begins, and the plan has no effect. Turn it off, or fit inside the trainer with FitCallback"
    )


@cache
def _log_once(note: str) -> None:
    """Log a note the first time it comes up in this process."""
    _LOG.warning("retape: %s.", note)


def _sized(inputs: Signature) -> int:
    """Return the number of elements that a call is given; scalars (the number of items in a batch) do not count."""
    return elements(tuple(part for part in inputs if not (isinstance(part, tuple) and part[:1] == ((),))))


def _longer(
    given: tuple[tuple[int, ...], ...], profiled: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the first shape that is longer along one side than the profiled shape in its place, and that shape."""
    if len(given) != len(profiled):
        return None
    for now, then in zip(given, profiled, strict=True):
        if len(now) == len(then) and any(map(operator.gt, now, then)):
            return now, then
    return None


def slots_there(choice: Choice) -> tuple[int, ...]:
    """Return the slots that a re-run need not make: held, or moved and fetched for it."""
    return tuple(sorted({*choice.held, *choice.moved}))


def policy_of(
    number: int, choice: Choice, recipe: Recipe | None, proof: Proof | None, disk: SpillFolder | None
) -> Policy:
    """Return the engine's policy for one call."""
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
        hold_collectives=choice.hold_collectives,
        disk=disk,
    )


# --- training and evaluation mode ---------------------------------------------------------------------------------------

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPPING = (nn.MultiheadAttention, nn.RNNBase)  # by a function, with a probability of their own
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def mode_name(training: bool) -> str:
    return "training" if training else "evaluation"


def depends_on_mode(module: nn.Module) -> bool:
    """True if a part of a module does something else in training than in evaluation.

    Known are PyTorch's own modules, and code that reads `self.training`; functions outside the module are not read.
    """
    return any(map(_part_depends, module.modules()))


def _part_depends(part: nn.Module) -> bool:
    if isinstance(part, _DROPOUTS):
        return part.p > 0
    if isinstance(part, _DROPPING):
        return float(part.dropout) > 0
    if isinstance(part, (*_BATCH_NORMS, *_INSTANCE_NORMS)):
        return part.track_running_stats
    if isinstance(part, nn.RReLU):
        return True
    return _reads_training(type(part))


def _reads_training(kind: type[nn.Module]) -> bool:
    """True if the forward of a class that is not PyTorch's own reads `training`; wrapped functions are unwrapped."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    code = getattr(inspect.unwrap(vars(owner)["forward"]), "__code__", None)
    return code is not None and "training" in code.co_names and not owner.__module__.startswith("torch.")


def warn_of_evaluation(model: nn.Module) -> None:
    """Log a warning if a model is about to be planned in evaluation mode and differs in training."""
    if model.training or not (_is_pretrained(model) or depends_on_mode(model)):
        return
    _LOG.warning(
        "retape: %s is in evaluation mode (from_pretrained returns it so), and the plan is for that: in training, dropout saves more. "
        "Call model.train() before retape.fit.",
        type(model).__name__,
    )


def _is_pretrained(model: nn.Module) -> bool:
    """True for Hugging Face's models, which read `training` in functions that they look up by name."""
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)
