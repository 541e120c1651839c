"""Updates in backward during a fit: gradients freed without an update, and the proof that no weight is read later.

The proof runs two steps. In the second the bits of each weight are inverted where training would update it, and restored at the end: if
anything in the backward pass still reads the weight, by whatever way, later gradients are far from those of the first step: in their
norms or, where only signs change, in their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput, StateChanged
from retape.core.problem import Budget
from retape.torch.compat import internals, process_internals
from retape.torch.engine.host.optimizer_states import HostStates
from retape.torch.engine.optimizer.in_backward import CompleteGradients, StepInBackward, refuse_in_backward
from retape.torch.measure.tuning import TUNING

_FLAG = "OPTIMIZER_IN_BACKWARD"


class UpdatesInBackward:
    """The weights of a fit that are updated inside backward; none if that was not allowed.

    `temporary_share` are the bytes that an update needs for temporary tensors over those of the weights, and `state_share` those of states
    that wait on the host. `trained` are all parameters that get gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter] = (),
        optimizer: Any = None,
        *,
        trained: Sequence[nn.Parameter] = (),
        states: HostStates | None = None,
        temporary_share: float = 0.0,
        state_share: float = 0.0,
        bucket_bytes: int = 0,
    ) -> None:
        self.parameters, self._trained = tuple(parameters), tuple(trained)
        self._optimizer, self._states, self._bucket_bytes = optimizer, states, bucket_bytes
        self._temporary_share, self._state_share = temporary_share, state_share
        self._attached: StepInBackward | None = None
        self._waiting: list[Tensor] = []  # weights whose states would be arriving
        self._buffers: list[Tensor] = []  # in the place of states that arrive, are here, or leave
        self._inverted: list[Tensor] | None = None  # weights that a proof has overwritten so far
        self._norms: dict[int, Tensor] | None = None  # of gradients, with their sums, where a proof asks for them

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def others(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters whose gradients stay to the end of a step."""
        mine = set(map(id, self.parameters))
        return [parameter for parameter in parameters if id(parameter) not in mine]

    def attach(self) -> None:
        """Update weights in backward from now on."""
        if self.parameters:
            self._attached = StepInBackward(
                self._optimizer, self.parameters, states=self._states, bucket_bytes=self._bucket_bytes
            )

    def remove(self) -> None:
        """Leave updates to `optimizer.step()`."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None

    # --- trial steps --------------------------------------------------------------------------------------------------

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Free gradients where training would, and need the room that an update needs; no weight changes."""
        watched = CompleteGradients(self.parameters, self._free, bucket_bytes=self._bucket_bytes)
        watched.start()
        try:
            yield
        finally:
            watched.stop()

    def end_step(self) -> None:
        """Free what an update would have on the device until the optimizer's step."""
        self._waiting, self._buffers = [], []

    def _free(self, parameters: list[Tensor]) -> None:
        """Free the gradients of a bucket; with states on the host, those of the bucket before, whose states have arrived."""
        if self._state_share:
            self._buffers.append(_buffer(self._state_share, parameters))
            parameters, self._waiting = self._waiting, parameters
        if parameters:
            _buffer(self._temporary_share, parameters)
        self._buffers = self._buffers[-2:]
        for parameter in parameters:
            self._note(parameter)
            parameter.grad = None
            if self._inverted is not None:
                _invert(parameter)
                self._inverted.append(parameter)

    def _note(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if self._norms is not None and gradient is not None:
            values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
            values = torch.view_as_real(values) if values.is_complex() else values
            wide = torch.promote_types(values.dtype, torch.float32)
            self._norms[id(parameter)] = torch.stack(
                (torch.linalg.vector_norm(values, dtype=wide), values.sum(dtype=wide))
            )

    def prove(self, run_step: Callable[[], None]) -> None:
        """Raise InvalidInput if a weight is read in backward after its update; `run_step` runs a step from its start."""
        if not self.parameters:
            return
        first = self._norms_of(run_step)
        self._inverted = []
        with internals.versions_kept(self.parameters):
            try:
                second = self._norms_of(run_step)
            except (RuntimeError, StateChanged) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise _read_later(str(error).splitlines()[0]) from error
            finally:
                for parameter in reversed(self._inverted):
                    _invert(parameter)
                self._inverted = None
        for number, (norm, total) in first.items():
            other, other_total = second.get(number, torch.full((2,), torch.nan, dtype=norm.dtype))
            if not torch.allclose(norm, other, rtol=TUNING.equal_norms, atol=0.0, equal_nan=True):
                raise _read_later(f"a gradient of norm {float(norm):.3g} became one of {float(other):.3g}")
            if not torch.allclose(total, other_total, rtol=0.0, atol=TUNING.equal_sums * float(norm), equal_nan=True):
                raise _read_later(f"the sum {float(total):.3g} of a gradient became {float(other_total):.3g}")

    def _norms_of(self, run_step: Callable[[], None]) -> dict[int, Tensor]:
        """Run a step and return the norms and sums of its gradients, by the id of the parameter."""
        found: dict[int, Tensor] = {}
        self._norms = found
        try:
            run_step()
            for parameter in self._trained:
                self._note(parameter)
        finally:
            self._norms = None
        return {number: norm.cpu() for number, norm in found.items()}


def _buffer(share: float, parameters: list[Tensor]) -> Tensor:
    """Return device memory of a share of the bytes of some weights."""
    size = sum(parameter.nbytes for parameter in parameters)
    return torch.empty(int(share * size), dtype=torch.uint8, device=parameters[0].device)


def updates_in_backward(
    model: nn.Module,
    optimizer: Any,
    budget: Budget,
    *,
    alone: bool,
    states: HostStates | None,
    states_bytes: int,
    step_bytes: Callable[..., int],
    bucket_bytes: int,
) -> UpdatesInBackward:
    """Return the updates of the weights that an optimizer and a model share; raise InvalidInput if they cannot be in backward.

    `alone` is False if several processes train the model. `states` wait on the host, and take `states_bytes` there.
    `step_bytes` returns the temporary bytes of an update. Gradients of at least `bucket_bytes` are used at once.
    """
    if not alone or any(map(process_internals.is_wrapper, model.modules())):
        raise InvalidInput(f"{_FLAG} is for one process: gradients of several are reduced first. Leave it out.")
    if optimizer is None:
        raise InvalidInput(f"options={_FLAG} needs the optimizer: give fit(..., optimizer=...).")
    refuse_in_backward(optimizer)
    if budget.in_flight > 1:
        raise InvalidInput(f"With {budget.in_flight} microbatches in flight, gradients accumulate. Leave {_FLAG} out.")
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) in optimized]
    if not parameters:
        raise InvalidInput(
            f"The optimizer has no trained parameter of the model. Give the one that trains it, or leave {_FLAG} out."
        )
    if any(parameter.grad is not None for parameter in parameters):
        raise InvalidInput(
            f"The model has gradients, and with {_FLAG} none may be left from before. Call zero_grad() first."
        )
    weights, largest = sum(parameter.nbytes for parameter in parameters), max(parameters, key=lambda p: p.nbytes)
    return UpdatesInBackward(
        parameters,
        optimizer,
        trained=[parameter for parameter in model.parameters() if parameter.requires_grad],
        states=states,
        temporary_share=step_bytes(optimizer, largest.device, largest) / max(1, largest.nbytes),
        state_share=0.0 if states is None else states_bytes / max(1, weights),
        bucket_bytes=bucket_bytes,
    )


def _read_later(why: str) -> InvalidInput:
    return InvalidInput(
        f"A weight is read in backward after its gradient is complete, so that an update there would change other gradients ({why}). "
        f"Leave {_FLAG} out, or find where the model uses a weight without its gradient (.data, .detach(), a Function that keeps it)."
    )


def _invert(parameter: Tensor) -> None:
    """Invert every bit of a weight: a second time puts it back."""
    with torch.no_grad():
        plain = parameter.detach()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        plain.view(_INTEGERS[plain.element_size()]).bitwise_not_()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
