"""Updates of weights inside the backward pass: each as soon as its gradient is complete, which is freed then.

`CompleteGradients` finds out when: PyTorch has accumulated the gradient, and no region is left that may still read the weight in a
re-run. Until then, and at the latest until `optimizer.step()`, the gradient stays. A node outside regions that reads a weight after its
update fails by PyTorch's own check of versions, which fused kernels do not increment and this module does;
`measure/updates_in_backward.py` finds such models before training.

`StepInBackward` runs the optimizer's own step for them, in buckets, so the bits are those of one step over all of them. In place of a
gradient that was used a weight has a `ConsumedGradient`, which has no memory and raises when it is read: a loop that clips, scales or
accumulates gradients gets an error instead of another training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from retape.core.errors import InvalidInput
from retape.torch.compat import compiler_internals, hook_internals
from retape.torch.engine.context import PROCESS
from retape.torch.engine.optimizer.buckets import Bucket, BucketStep, refuse_unknown

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from retape.torch.engine.host.optimizer_states import Flight, HostStates
    from retape.torch.engine.region import Region

_FLAG = "OPTIMIZER_IN_BACKWARD"


def refuse_in_backward(optimizer: Optimizer) -> None:
    """Raise InvalidInput for an optimizer whose step may not be divided by parameters."""
    refuse_unknown(optimizer, f"{type(optimizer).__name__} cannot update weights in backward", _FLAG)


# --- when a gradient may be used --------------------------------------------------------------------------------------


class CompleteGradients:
    """Passes on parameters in buckets, once their gradients are complete and no live region reads them.

    A bucket has weights of at least `bucket_bytes` together; `take_rest` returns those that were not passed on.
    """

    def __init__(
        self, parameters: Sequence[Tensor], hand_over: Callable[[list[Tensor]], None], *, bucket_bytes: int
    ) -> None:
        self._parameters, self._hand_over, self._bucket_bytes = tuple(parameters), hand_over, bucket_bytes
        self._readers = {id(parameter): 0 for parameter in parameters}  # live regions that read it
        self._regions: dict[weakref.ref[Region], list[int]] = {}
        self._complete: dict[int, Tensor] = {}
        self._complete_bytes = 0
        self._handles: list[RemovableHandle] = []
        self._end_listening: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        """Watch the gradients from now on, and the regions."""
        # Weak: neither the process nor, through PyTorch's own structures, a weight must keep this and so the model alive.
        complete, listen = _weakly(self._on_gradient), _weakly(self._on_region)
        self._handles = [p.register_post_accumulate_grad_hook(complete) for p in self._parameters]
        PROCESS.region_listeners = (*PROCESS.region_listeners, listen)
        self._end_listening = weakref.finalize(self, _unlisten, listen)
        self._end_listening.atexit = False

    def stop(self) -> None:
        """Stop watching; what is complete stays where it is."""
        for handle in self._handles:
            handle.remove()
        if self._end_listening is not None:
            self._end_listening()
        self._forget_all()

    def take_rest(self) -> list[Tensor]:
        """Return all parameters that were not passed on, even if a region reads them: backward is over."""
        rest = [parameter for parameter in self._complete.values() if parameter.grad is not None]
        self._forget_all()
        return rest

    def _forget_all(self) -> None:
        self._complete.clear()
        self._complete_bytes = 0

    def _on_region(self, region: Region) -> None:
        """Count a region as a reader of its parameters while it lives, which is until autograd has freed its last slot."""
        read = [id(tensor) for tensor in region.reads() if id(tensor) in self._readers]
        if read:
            self._regions[weakref.ref(region, self._region_ended)] = read
            for number in read:
                self._readers[number] += 1

    def _region_ended(self, reference: weakref.ref[Region]) -> None:
        for number in self._regions.pop(reference, ()):
            self._readers[number] -= 1

    def _on_gradient(self, parameter: Tensor) -> None:
        self._complete[id(parameter)] = parameter
        self._complete_bytes += parameter.nbytes
        if self._complete_bytes < self._bucket_bytes:
            return
        found = self._complete.items()
        ready = [each for number, each in found if not self._readers[number] and each.grad is not None]
        size = sum(each.nbytes for each in ready)
        if ready and size >= self._bucket_bytes:
            self._complete_bytes -= size
            for each in ready:
                del self._complete[id(each)]
            self._hand_over(ready)


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    @compiler_internals.left_alone
    def call(argument: Any) -> None:
        own = reference()
        if own is not None:
            own(argument)

    return call


def _unlisten(listen: Callable[[Region], None]) -> None:
    PROCESS.region_listeners = tuple(each for each in PROCESS.region_listeners if each is not listen)


# --- what is left of a gradient ---------------------------------------------------------------------------------------


class ConsumedGradient(Tensor):
    """The place of a gradient that was used for an update and freed. It has no memory, and raises when it is read."""

    @staticmethod
    def __new__(cls: Any, parameter: Tensor) -> Any:
        return hook_internals.tensor_without_memory(cls, parameter)

    def __repr__(self) -> str:  # type: ignore[override]  # that of Tensor takes contents
        return f"ConsumedGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub of Tensor's is a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise InvalidInput(
            f"The loop reads a gradient ({func}) that was used for an update in backward and freed ({_FLAG}). Clipping by a norm, "
            "GradScaler, gradients that accumulate over several backwards, zero_grad(set_to_none=False) and logged norms need all "
            f"gradients: leave them out, or {_FLAG}. Updates of this backward were made: continue from the last saved state. A model is "
            "moved or converted (.to(), .half()) after zero_grad()."
        )


# --- the step ---------------------------------------------------------------------------------------------------------


class _Consumed(NamedTuple):
    """A weight that was updated in backward and its state, as the update left them."""

    parameter: Tensor
    version: int
    address: int
    state: tuple[int, dict[str, Any]]

    @classmethod
    def now(cls, parameter: Tensor, optimizer: Optimizer, states: HostStates | None) -> _Consumed:
        state = optimizer.state.get(parameter)
        values = (state or {}) if states is None else states.at_rest(parameter, state or {})
        compared = {name: _comparable(value) for name, value in values.items()}
        return cls(parameter, parameter._version, parameter.data_ptr(), (id(state), compared))


class StepInBackward:
    """Updates `parameters` of an optimizer inside backward, until `remove` is called; `optimizer.step()` updates the rest.

    `states` are those of the optimizer if they wait on the host: a bucket is updated when the next one is complete, so that its states
    arrive meanwhile.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        *,
        states: HostStates | None = None,
        bucket_bytes: int,
    ) -> None:
        refuse_in_backward(optimizer)
        self._optimizer, self._states = optimizer, states
        self._step = BucketStep(optimizer, _FLAG)
        self._parameters = tuple(parameters)
        self._consumed: dict[int, _Consumed] = {}  # updated since the last step
        self._settings: list[Any] | None = None  # of the groups at the first of those updates
        self._waiting: tuple[Bucket, Flight] | None = None  # its states are on their way
        self._gradients = CompleteGradients(parameters, self._update, bucket_bytes=bucket_bytes)
        self._gradients.start()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._before_load()),
        ]

    def remove(self) -> None:
        """Leave every later update to `optimizer.step()`. What is complete now is updated by the next one."""
        self._gradients.stop()
        if self._waiting is not None and self._states is not None:
            self._states.finish(self._waiting[1])
        self._waiting = None
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            if isinstance(parameter.grad, ConsumedGradient):
                parameter.grad = None
        self._consumed.clear()

    # --- in backward --------------------------------------------------------------------------------------------------

    def _update(self, parameters: list[Tensor]) -> None:
        """Update a bucket, or with states on the host the one before it, and free its gradients."""
        again = next((parameter for parameter in parameters if id(parameter) in self._consumed), None)
        if again is not None:
            raise InvalidInput(
                f"A weight of shape {tuple(again.shape)} was updated in an earlier backward ({_FLAG}), and optimizer.step() was not called "
                f"since: it ends each step. Call it after every backward; or leave {_FLAG} out, if the loop skips steps or accumulates. "
                "Updates of this backward were made: continue from the last saved state."
            )
        if any(parameter.grad is not None and parameter.grad.requires_grad for parameter in parameters):
            raise InvalidInput(f"backward(create_graph=True) needs weights as they were. Leave {_FLAG} out.")
        if self._settings is None:
            self._settings = self._present_settings()
        bucket = Bucket.of(self._optimizer, parameters, sum(parameter.nbytes for parameter in parameters))
        if self._states is None:
            self._step(bucket)
            self._consume(bucket)
            return
        following = bucket, self._states.fetch(bucket)
        self._update_waiting()
        self._waiting = following

    def _update_waiting(self) -> None:
        if self._waiting is None or self._states is None:
            return
        bucket, arriving = self._waiting
        self._waiting = None
        self._states.update(bucket, arriving)
        self._consume(bucket)

    def _consume(self, bucket: Bucket) -> None:
        increment_version(bucket.parameters)
        for parameter in bucket.parameters:
            self._consumed[id(parameter)] = _Consumed.now(parameter, self._optimizer, self._states)
            parameter.grad = ConsumedGradient(parameter)

    # --- in the loop's own step ---------------------------------------------------------------------------------------

    def _present_settings(self) -> list[Any]:
        return [
            {name: _comparable(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def _before_step(self, optimizer: Optimizer, args: Any, keywords: Any) -> tuple[Any, Any] | None:
        """Finish the updates of a backward that has ended; with a closure, of the one that it runs."""
        closure = args[1] if len(args) > 1 else keywords.get("closure")
        if closure is None:
            self._finish()
            return None

        def then_finish() -> Any:
            loss = closure()
            self._finish()
            return loss

        return (args[0], then_finish), {name: value for name, value in keywords.items() if name != "closure"}

    def _finish(self) -> None:
        """Update what is complete and was not updated in backward; leave other gradients to the optimizer's own step."""
        if hook_internals.step_pre_hooks(self._optimizer)[-1] != self._before_step:
            raise InvalidInput(
                f"A hook of optimizer.step() was registered after the fit, which finds no gradients ({_FLAG}). Register it before, if it "
                f"does not need them; or leave {_FLAG} out."
            )
        if self._settings is not None and self._settings != self._present_settings():
            raise InvalidInput(
                f"Settings of the optimizer (a learning rate) were changed between backward and optimizer.step(), and most weights were "
                f"updated in backward ({_FLAG}). Change them before backward; continue from the last saved state."
            )
        if not all(isinstance(each.parameter.grad, ConsumedGradient) for each in self._consumed.values()):
            raise InvalidInput(
                f"Gradients were removed (zero_grad) or replaced between backward and optimizer.step(), and weights were updated by then "
                f"({_FLAG}). Remove them before backward, or after the step; continue from the last saved state."
            )
        self._refuse_changes()
        rest = self._gradients.take_rest()
        if rest:
            self._update(rest)
        self._update_waiting()
        if self._states is not None:
            self._states.finish()
        for each in self._consumed.values():
            each.parameter.grad = None  # the optimizer's own step has nothing to do for it

    def _refuse_changes(self) -> None:
        """Raise if a weight that was updated in backward, or its state, was changed since."""
        before = list(self._consumed.values())
        now = [_Consumed.now(each.parameter, self._optimizer, self._states) for each in before]
        if any(one.state != other.state for one, other in zip(before, now, strict=True)):
            raise InvalidInput(
                f"States of the optimizer (momentum) were changed between backward and optimizer.step(), and weights were updated with "
                f"what they were before ({_FLAG}). Change them before backward, or after the step; continue from the last saved state."
            )
        if before != now:
            raise InvalidInput(
                f"Weights were written to between backward and optimizer.step(), and were updated by then ({_FLAG}): the order of both "
                "matters. Write to them before the forward, or after the step; continue from the last saved state."
            )

    def _before_load(self) -> None:
        if self._consumed:
            raise InvalidInput(
                f"optimizer.load_state_dict() was called between backward and optimizer.step(), and weights were updated with the states "
                f"from before ({_FLAG}). Call it before backward or after the step. To give up this step and continue from a saved state, "
                "call remove() of the fit first, then load weights and states, and fit again."
            )

    def _after_step(self) -> None:
        for each in self._consumed.values():
            # One that the loop does not remove is an error in the next backward: it would accumulate.
            each.parameter.grad = ConsumedGradient(each.parameter)
        self._consumed.clear()
        self._settings = None


def _comparable(value: Any) -> Any:
    """Return a setting or a state as a value to compare: a tensor by its identity and version."""
    if isinstance(value, (list, tuple)):
        return [_comparable(part) for part in value]
    return (id(value), value._version, value) if isinstance(value, Tensor) else value
