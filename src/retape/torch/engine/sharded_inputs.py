"""Inputs that are equal on all ranks: each holds a part, and all gather them before a re-run.

These are the partitioned activations of Megatron-LM, for the input of a tensor-parallel block. All ranks of the group follow one plan, so
all of them gather at the same place, before the re-run and outside of its modes (Rule 9). A fit uses this only where it found the inputs
equal; whether they still are is checked in each backward pass: what was gathered is compared with a checksum of the forward, and at
the end of the pass the ranks ask each other, so that all of them raise or none does. Nothing waits for a device before that.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from retape.core.errors import StateChanged
from retape.torch.capture.mutation import Digest, digest, hold, inner_tensors, same_digests, version_of
from retape.torch.compat import internals
from retape.torch.engine.host.copy_streams import TUNING
from retape.torch.engine.slots import NOT_LOADED, HeldOrLoaded

if TYPE_CHECKING:
    from retape.torch.engine.slots import SlotOwner


def can_be_sharded(tensor: Tensor) -> bool:
    """True if it is a plain tensor, or a DTensor around one, that fills a storage of its own."""
    plain = _plain(tensor)
    if plain is None or plain.layout is not torch.strided or plain.is_inference() or internals.is_fake(plain):
        return False
    return not (plain.is_conj() or plain.is_neg()) and 0 < plain.nbytes == internals.untyped_storage(plain).nbytes()


def shard_bytes(tensor: Tensor, ranks: int) -> int:
    """Return how many bytes of a tensor each of some ranks holds."""
    plain = _plain(tensor)
    return 0 if plain is None else -(-plain.nbytes // ranks)


def _plain(tensor: Tensor) -> Tensor | None:
    """Return the tensor itself, or the only one inside it; None if there is no such one."""
    if type(tensor) is Tensor:
        return tensor
    inner = inner_tensors(tensor)
    return inner[0] if len(inner) == 1 and type(inner[0]) is Tensor else None


class ShardedInput:
    """An input of which this rank holds one part; `load` gathers all parts.

    `_witness` shares the tensor's version counter and none of its memory: a write to the tensor is noticed (Rule 3).
    """

    __slots__ = ("_around", "_digest", "_group", "_layout", "_part", "_then", "_witness")

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        plain = _plain(tensor)
        assert plain is not None
        self._group = group
        with internals.unobserved(), torch.no_grad():
            self._around = None if plain is tensor else _Wrapper(tensor)
            self._then, self._digest = version_of(plain), digest(plain)
            self._layout = (plain.dtype, plain.shape, plain.stride())
            self._witness = plain.detach()
            octets = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(internals.untyped_storage(plain))
            size = shard_bytes(plain, group.size())
            own = octets[group.rank() * size : (group.rank() + 1) * size]
            self._part = own.clone() if own.numel() == size else octets.new_zeros(size)
            if own.numel() < size:
                self._part[: own.numel()] = own
            self._witness.data = NOT_LOADED

    def load(self, region: SlotOwner, index: int) -> Tensor:
        """Gather the parts of all ranks; raise if the input was written to since."""
        if version_of(self._witness) != self._then:
            raise region.snapshot.has_changed(index)
        with internals.unobserved(), torch.no_grad():
            plain = self.gathered()
            _COMPARISONS.add(_Gathered(self._group, plain.device, region.name, self._digest, digest(plain)))
            return plain if self._around is None else self._around.of(plain)

    def gathered(self) -> Tensor:
        """Return the tensor without its wrapper, put together from the parts of all ranks."""
        whole = self._part.new_empty(self._group.size() * self._part.numel())
        dist.all_gather_into_tensor(whole, self._part, group=self._group)
        dtype, shape, stride = self._layout
        return torch.empty(0, dtype=dtype, device=whole.device).set_(internals.untyped_storage(whole), 0, shape, stride)


class _Wrapper:
    """A tensor subclass around one tensor, without that tensor."""

    __slots__ = ("_about", "_kind", "_parts", "_shape", "_stride")

    def __init__(self, tensor: Any) -> None:
        names, self._about = tensor.detach().__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}  # of a DTensor its mesh too
        self._parts = {name: None if isinstance(part, Tensor) else part for name, part in parts.items()}
        self._kind, self._shape, self._stride = type(tensor), tensor.shape, tensor.stride()

    def of(self, plain: Tensor) -> Tensor:
        parts = {name: plain if part is None else part for name, part in self._parts.items()}
        made: Tensor = self._kind.__tensor_unflatten__(parts, self._about, self._shape, self._stride)
        return made


def held_in_parts(tensors: list[Tensor], sharded: Collection[int], group: dist.ProcessGroup) -> HeldOrLoaded:
    """Hold this rank's part of those of a region's inputs that have the numbers `sharded`, and the rest whole."""
    return HeldOrLoaded(
        [
            ShardedInput(tensor, group) if index in sharded and can_be_sharded(tensor) else hold(tensor)
            for index, tensor in enumerate(tensors)
        ]
    )


# --- are they still equal? --------------------------------------------------------------------------------------------


class _Gathered(NamedTuple):
    """An input of a region that was gathered, and its digest then and now."""

    group: dist.ProcessGroup
    device: torch.device
    name: str
    then: Digest
    now: Digest


class _Comparisons:
    """Inputs that were gathered in each backward pass, until the pass ends."""

    def __init__(self) -> None:
        self._by_pass: dict[int, list[_Gathered]] = {}

    def add(self, gathered: _Gathered) -> None:
        """Compare two digests when this backward pass ends, or at once outside of one."""
        task = internals.graph_task()
        if task < 0:
            _require_equal([gathered])
            return
        if task not in self._by_pass:
            self._by_pass[task] = []
            internals.at_end_of_backward(partial(self._end, task))
            while len(self._by_pass) > TUNING.max_backward_passes:  # passes that an exception ended
                del self._by_pass[next(iter(self._by_pass))]
        self._by_pass[task].append(gathered)

    def _end(self, task: int) -> None:
        _require_equal(self._by_pass.pop(task, []))


_COMPARISONS = _Comparisons()


def _require_equal(compared: list[_Gathered]) -> None:
    """Raise StateChanged on every rank of a group if one of them had another input than what was gathered."""
    for group in {id(each.group): each.group for each in compared}.values():
        own = [each for each in compared if each.group is group]
        wrong = [number for number, each in enumerate(own) if not same_digests(each.then, each.now)]
        first = torch.tensor([min(wrong, default=len(own))], device=own[0].device)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
        if int(first) < len(own):
            raise StateChanged(
                f"Region {own[int(first)].name}: its input differs between the {group.size()} ranks of its tensor-parallel group, and was "
                "equal when the plan was made: each rank holds a part of it, and the gradients of this step are wrong. Call retape.fit "
                "again with the model and the batch as in training."
            )
