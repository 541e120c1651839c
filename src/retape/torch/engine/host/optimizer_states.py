"""Optimizer states that wait in host memory between steps and pass through the device in buckets.

The optimizer's own code does every update: its step runs once for each bucket, with the parameter groups narrowed to the parameters of
that bucket, so the bits are those of one step over all of them. While a bucket is updated the states of the next one arrive, and those
of the one before leave. Between steps `optimizer.state` has host tensors, so that `state_dict()` works as before.

Hooks of the step run once, around all buckets. A step that does not come through `optimizer.step` (a wrapper that kept the method which
it found earlier) finds all states on the device, which is right, and needs their bytes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from retape.torch.compat import hook_internals
from retape.torch.engine.host.copy_streams import STREAMS, TUNING, CopyStreams, Event
from retape.torch.engine.optimizer.buckets import Bucket, BucketStep, refuse_unknown

_FLAG = "OPTIMIZER_ON_HOST"


def refuse_moving(optimizer: Optimizer) -> None:
    """Raise InvalidInput for an optimizer whose step may not be divided by parameters, or whose states cannot leave."""
    refuse_unknown(optimizer, f"The states of {type(optimizer).__name__} cannot wait on the host", _FLAG)


class Flight:
    """States of a bucket that are being copied: device tensors, which are alive until the copy is done."""

    def __init__(self, places: list[tuple[Tensor, str, Tensor]], event: Event | None) -> None:
        self.places, self.event = places, event


class HostStates:
    """The states of one optimizer, on the host until `remove` is called. Making it moves those that exist.

    `bucket_bytes` is the size of a bucket of states; at most three are on the device at once.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        bucket_bytes: int = TUNING.state_bucket_bytes,
        streams: CopyStreams | None = None,
    ) -> None:
        refuse_moving(optimizer)
        self._optimizer, self._bucket_bytes = optimizer, bucket_bytes
        self._streams = streams or STREAMS.of(optimizer.param_groups[0]["params"][0].device)
        self._host: dict[tuple[Tensor, str], Tensor] = {}
        self._step = BucketStep(optimizer, _FLAG)
        self._leaving: Flight | None = None  # states of the bucket that was updated last
        self._in_step = False
        self._moved_back: dict[tuple[Tensor, str], Any] = {}  # for a step that does not come through `optimizer.step`
        self._removed = False
        try:
            self._move_out()
            self._replaced = optimizer.__dict__.get("step")
            self._wrapper = self._wrapped(optimizer)
            optimizer.step = self._wrapper  # type: ignore[method-assign]
            self._handles = [
                optimizer.register_step_pre_hook(lambda *_: self._before_other_step()),
                optimizer.register_step_post_hook(lambda *_: self._after_other_step()),
                optimizer.register_load_state_dict_post_hook(lambda *_: self._move_out()),
            ]
        except BaseException:
            self._move_back()
            raise

    @property
    def host_bytes(self) -> int:
        """Bytes of the states that wait on the host."""
        return sum(value.nbytes for value in self._host.values())

    def at_rest(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with the host tensors of those that were moved back for a step."""
        moved = self._moved_back
        places = {name: (parameter, name) for name in state}
        return {
            name: self._host[place] if place in moved and moved[place] is state[name] else state[name]
            for name, place in places.items()
        }

    def remove(self) -> None:
        """Copy all states back to the device and restore `optimizer.step`."""
        if self._removed:
            return
        self._removed = True
        for handle in self._handles:
            handle.remove()
        if self._optimizer.__dict__.get("step") is self._wrapper:
            if self._replaced is None:
                del self._optimizer.__dict__["step"]
            else:
                self._optimizer.step = self._replaced  # type: ignore[method-assign]
        self._move_back()
        self._host.clear()

    # --- the step -----------------------------------------------------------------------------------------------------

    def _wrapped(self, optimizer: Optimizer) -> MethodType:
        """Return what replaces `optimizer.step`: a bound method, which a learning rate scheduler may wrap once more."""
        before: Callable[..., Any] = optimizer.step
        hooked = Optimizer.profile_hook_step(self._update)

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self._removed:
                return before(closure)
            self._in_step = True
            try:
                return hooked(optimizer, closure)
            finally:
                self._in_step = False
                hook_internals.note_step(optimizer)

        update_wrapper(step, before)
        return MethodType(step, optimizer)

    def _update(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pass_through(self.buckets())
        return loss

    def largest_bucket(self) -> tuple[float, int]:
        """Return the share of all states in the largest bucket, and the most bytes of three buckets in a row."""
        sizes = [bucket.nbytes for bucket in self.buckets(every=True)]
        together = max((sum(sizes[i : i + 3]) for i in range(len(sizes))), default=0)
        return max(sizes, default=0) / max(1, sum(sizes)), together

    def buckets(self, *, every: bool = False) -> list[Bucket]:
        """Return the parameters that have gradients in buckets, in the order of their groups; with `every`, all that are trained."""
        groups = self._optimizer.param_groups
        found: list[Bucket] = []
        current: list[list[Tensor]] = [[] for _ in groups]
        size = 0
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.grad is None and not (every and parameter.requires_grad):
                    continue
                own = self._bytes_of(parameter)
                if size and size + own > self._bucket_bytes:
                    found.append(Bucket(groups=tuple(map(tuple, current)), nbytes=size))
                    current, size = [[] for _ in groups], 0
                current[number].append(parameter)
                size += own
        return [*found, Bucket(groups=tuple(map(tuple, current)), nbytes=size)] if size else found

    def _bytes_of(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter's states; before its first step, as if there were two of its own size."""
        state = self._optimizer.state.get(parameter) or {}
        known = sum(value.nbytes for value in state.values() if isinstance(value, Tensor) and value.dim())
        return known or 2 * parameter.nbytes

    def _pass_through(self, buckets: Sequence[Bucket]) -> None:
        """Update bucket after bucket; at the end every copy is done, so that the host may read the states."""
        arriving = self.fetch(buckets[0]) if buckets else None
        try:
            for number, bucket in enumerate(buckets):
                here, arriving = arriving, None
                if number + 1 < len(buckets):
                    arriving = self.fetch(buckets[number + 1])
                assert here is not None
                self.update(bucket, here)
        finally:
            self.finish(arriving)

    def update(self, bucket: Bucket, arriving: Flight) -> None:
        """Update a bucket whose states were fetched, and start to copy them back to the host."""
        self._put(arriving)
        self._step(bucket)
        if self._leaving is not None and self._leaving.event is not None:
            # Device tensors are freed that were copied out; what the device does with their memory waits for the copy.
            self._streams.wait(self._leaving.event, self._streams.stream())
            self._leaving.places = []
        self._leaving = self._send(bucket.parameters)

    def finish(self, arriving: Flight | None = None) -> None:
        """Wait for copies on the host, and move out what is left on the device, as an error leaves it."""
        leaving, self._leaving = self._leaving, None
        _wait_for((leaving, arriving))
        _wait_for([self._send([p for group in self._optimizer.param_groups for p in group["params"]])])

    # --- copies -------------------------------------------------------------------------------------------------------

    def fetch(self, bucket: Bucket) -> Flight:
        """Start to copy the states of a bucket to the device."""
        places, pairs = [], []
        for parameter in bucket.parameters:
            for name, value in (self._optimizer.state.get(parameter) or {}).items():
                host = self._host.get((parameter, name))
                if host is not None and host is value:
                    there = torch.empty_like(host, device=parameter.device)
                    places.append((parameter, name, there))
                    pairs.append((host, there))
        return Flight(places, self._streams.fetch(pairs) if pairs else None)

    def _put(self, flight: Flight) -> None:
        """Give the optimizer states that have arrived; later work of the device waits for them."""
        if flight.event is not None:
            self._streams.wait(flight.event, self._streams.stream())
        for parameter, name, value in flight.places:
            self._optimizer.state[parameter][name] = value
        flight.places = []

    def _send(self, parameters: Sequence[Tensor]) -> Flight:
        """Start to copy states to the host, and give the optimizer the host tensors."""
        places, pairs = [], []
        for parameter in parameters:
            state = self._optimizer.state.get(parameter) or {}
            for name, value in state.items():
                if self._can_leave(parameter, name, value):
                    places.append((parameter, name, value))
                    pairs.append((self._host_tensor(parameter, name, value), value))
        event = self._streams.send(pairs, []) if pairs else None
        for parameter, name, _ in places:
            self._optimizer.state[parameter][name] = self._host[parameter, name]
        return Flight(places, event)

    def _can_leave(self, parameter: Tensor, name: str, value: Any) -> bool:
        """True for a plain tensor on the parameter's device with memory of its own; counters of steps stay."""
        return (
            type(value) is Tensor
            and value.dim() > 0
            and value.device == parameter.device
            and value is not self._host.get((parameter, name))
            and value.untyped_storage().nbytes() == value.nbytes
        )

    def _host_tensor(self, parameter: Tensor, name: str, like: Tensor) -> Tensor:
        """Return the host memory of a state; the same in every step."""
        found = self._host.get((parameter, name))
        if found is None or (found.shape, found.stride(), found.dtype) != (like.shape, like.stride(), like.dtype):
            memory = self._streams.pool.take_whole(like.nbytes).view(like.dtype)
            found = self._host[parameter, name] = memory.as_strided(like.shape, like.stride())
        return found

    def _move_out(self) -> None:
        self.finish()

    def _move_back(self) -> None:
        """Bring all states to the device."""
        everything = tuple(tuple(group["params"]) for group in self._optimizer.param_groups)
        arriving = self.fetch(Bucket(groups=everything, nbytes=0))
        self._put(arriving)
        _wait_for([arriving])  # the host memory may be freed or written to next

    def _before_other_step(self) -> None:
        if not self._in_step:
            self._move_back()
            self._moved_back = {(p, name): self._optimizer.state.get(p, {}).get(name) for p, name in self._host}

    def _after_other_step(self) -> None:
        if not self._in_step:
            self._moved_back = {}
            self._move_out()


def _wait_for(flights: Sequence[Flight | None]) -> None:
    """Let the host wait for copies."""
    for flight in flights:
        if flight is not None and flight.event is not None:
            flight.event.synchronize()
