"""Facts about regions that several ranks measure together: inputs that are equal on them, and weights that FSDP2 gathers.

The options that follow from them are in `rank_options.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from retape.torch.capture.mutation import digest
from retape.torch.compat import fsdp_internals
from retape.torch.distributed.ranks import OTHER_MODELS, Ranks
from retape.torch.distributed.replicas import replicated
from retape.torch.engine.sharded_inputs import ShardedInput, shard_bytes
from retape.torch.measure.memory_meter import storage_bytes, storages_of, synchronize

if TYPE_CHECKING:
    from retape.torch.planning.instruments import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualInputs:
    """Inputs of a region, by their numbers, that are equal on all ranks of its tensor-parallel group.

    Each rank can hold `part_bytes` of their `whole_bytes`, which takes `divide_seconds` in the forward and `gather_seconds` in a re-run.
    """

    numbers: frozenset[int]
    whole_bytes: int
    part_bytes: int
    divide_seconds: float = 0.0
    gather_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredWeights:
    """Bytes of a region's gathered weights, and the seconds of one gather."""

    bytes: int
    seconds: float


class InputComparison:
    """Finds inputs of regions that are equal on the ranks of the process group `replicas`, and times how parts of them are held.

    Each time is the shortest of `runs`. All `ranks` ask for the same regions.
    """

    def __init__(self, ranks: Ranks, replicas: Any, *, clock: Clock, runs: int) -> None:
        self._ranks, self._replicas, self._clock, self._runs = ranks, replicas, clock, runs
        self._seconds: dict[int, tuple[float, float]] = {}  # to divide and to gather, by the number of bytes
        self._readers: dict[int, tuple[StorageWeakRef, int]] = {}  # the last region that read each storage

    def begin_step(self) -> None:
        """Forget which regions read which storages."""
        self._readers = {}

    def earlier_readers(self, stage: int, inputs: list[Tensor]) -> set[int]:
        """Return the stages before that read activations which this one reads too: this one holds them, so those have nothing to gain."""
        found: set[int] = set()
        for storage in storages_of(_activations(inputs).values()):
            reference = StorageWeakRef(storage)
            known, earlier = self._readers.get(reference.cdata, (None, stage))
            if known is not None and not known.expired() and earlier != stage:
                found.add(earlier)
            self._readers[reference.cdata] = (reference, stage)
        return found

    def equal_inputs(self, inputs: list[Tensor], home: torch.device) -> EqualInputs | None:
        """Return which activations are equal on all ranks of the tensor-parallel group, and what it takes to hold parts of them."""
        made = _activations(inputs)
        numbers = replicated(self._ranks, self._replicas, made)
        if not numbers:
            return None
        tensors, ranks = [made[number] for number in sorted(numbers)], self._replicas.size()
        whole = storage_bytes(tensors, home)
        if whole not in self._seconds:
            self._seconds[whole] = self._shortest_seconds(tensors, home)
        divide, gather = self._seconds[whole]
        return EqualInputs(
            numbers=numbers,
            whole_bytes=whole,
            part_bytes=sum(shard_bytes(tensor, ranks) for tensor in tensors),
            divide_seconds=divide,
            gather_seconds=gather,
        )

    def _shortest_seconds(self, tensors: list[Tensor], home: torch.device) -> tuple[float, float]:
        """Return the seconds to keep a part of each tensor, and to gather it and take its checksum."""
        taken: list[tuple[float, float]] = []
        for _ in range(self._runs):
            start = _now([home], self._clock)
            parts = [ShardedInput(tensor, self._replicas) for tensor in tensors]
            between = _now([home], self._clock)
            for part in parts:
                digest(part.gathered())
            taken.append((between - start, _now([home], self._clock) - between))
        return min(one for one, _ in taken), min(other for _, other in taken)


def is_new_to_a_rank(ranks: Ranks, name: str, is_new: bool) -> bool:
    """True if a region of this kind is new to any rank; raise on every rank if they call different regions."""
    calls = ranks.of_all((name, is_new))
    if len({name for name, _ in calls}) > 1:
        ranks.require_equal("call different regions", name, OTHER_MODELS)
    return any(new for _, new in calls)


def _activations(inputs: list[Tensor]) -> dict[int, Tensor]:
    return {number: tensor for number, tensor in enumerate(inputs) if tensor.grad_fn is not None}


def gathered_weights(
    regions: Mapping[str, nn.Module], devices: Sequence[torch.device], *, clock: Clock, runs: int
) -> dict[str, GatheredWeights]:
    """Gather and free the weights of each sharded region a few times; the shortest time counts. All ranks do so together.

    Regions whose weights are not freed and gathered as a whole are left out.
    """
    found: dict[str, GatheredWeights] = {}
    for name, module in regions.items():
        if fsdp_internals.freed_after_forward(module) is None:
            continue
        taken = [_gathered(module, devices, clock) for _ in range(runs)]
        found[name] = GatheredWeights(bytes=taken[0][0], seconds=min(seconds for _, seconds in taken))
    return found


def _gathered(module: Any, devices: Sequence[torch.device], clock: Clock) -> tuple[int, float]:
    start = _now(devices, clock)
    module.unshard()
    seconds = _now(devices, clock) - start
    storages = {storage._cdata: storage.nbytes() for storage in storages_of(fsdp_internals.gathered_weights(module))}
    module.reshard()
    return sum(storages.values()), seconds


def _now(devices: Sequence[torch.device], clock: Clock) -> float:
    """Return the time once the devices have done their work."""
    for device in devices:
        synchronize(device)
    return clock()
