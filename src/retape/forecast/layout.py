"""Layouts of a training run over GPUs, and the bytes of weights, gradients and optimizer states that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import SGD, Optimizer

from retape.core import codec
from retape.core.errors import InvalidInput

_ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """Bytes of an optimizer per trained weight. `state_bytes` of None has the size of the weight, for each of `states`.

    `gradient_bytes` of None is the size of the weight. `master_bytes` are of a copy of the weights.
    """

    name: str
    states: int = 0
    state_bytes: int | None = None
    master_bytes: int = 0
    gradient_bytes: int | None = None

    def each_state_bytes(self, count: int, size: int) -> int:
        """Return the bytes of one state of `count` trained weights, which have `size` bytes."""
        return size if self.state_bytes is None else count * self.state_bytes

    def states_bytes(self, count: int, size: int) -> int:
        """Return the bytes of all states and of the copy of `count` trained weights, which have `size` bytes."""
        return self.states * self.each_state_bytes(count, size) + count * self.master_bytes

    def gradients_bytes(self, count: int, size: int) -> int:
        """Return the bytes of the gradients of `count` trained weights, which have `size` bytes."""
        return size if self.gradient_bytes is None else count * self.gradient_bytes


_OPTIMIZERS = {
    kind.name: kind
    for kind in (
        OptimizerKind(name="none"),
        OptimizerKind(name="sgd"),
        OptimizerKind(name="sgd-momentum", states=1),
        OptimizerKind(name="lion", states=1),
        OptimizerKind(name="adamw", states=2),
        OptimizerKind(name="adamw-amsgrad", states=3),
        OptimizerKind(name="adamw-8bit", states=2, state_bytes=1),
        OptimizerKind(name="adamw-fp32", states=2, state_bytes=4, master_bytes=4, gradient_bytes=4),
    )
}


_SAME_STATES = {"adam": "adamw", "adam-amsgrad": "adamw-amsgrad"}


def optimizer_kind(given: Any) -> OptimizerKind:
    """Return an optimizer by name, or of torch.optim; None is none. adamw has states of the weights' dtype; adamw-fp32 is Megatron's."""
    if isinstance(given, OptimizerKind):
        return given
    if isinstance(given, Optimizer):
        momentum = "-momentum" if isinstance(given, SGD) and given.defaults["momentum"] else ""
        amsgrad = "-amsgrad" if given.defaults.get("amsgrad") else ""
        given = type(given).__name__ + momentum + amsgrad
    elif isinstance(given, type) and issubclass(given, Optimizer):
        given = given.__name__
    name = "none" if given is None else str(given).lower()
    name = _SAME_STATES.get(name, name)
    if name not in _OPTIMIZERS:
        raise InvalidInput(
            f"There is no optimizer {given!r}. Known: {', '.join(sorted({*_OPTIMIZERS, *_SAME_STATES}))}."
        )
    return _OPTIMIZERS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The division of a step over GPUs.

    `fsdp` GPUs share weights, gradients and states as ZeRO's `zero` stage says; replicas of that group are the rest of the data
    parallelism. `tensor` parallelism is with sequence parallelism. Of a `pipeline`, each GPU has `interleave` parts. `accumulate` is
    the number of micro-batches of a step on each GPU.
    """

    gpus: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    interleave: int = 1
    accumulate: int = 1
    zero: int = 3

    def __post_init__(self) -> None:
        codec.check_fields(self)
        for name in ("gpus", "fsdp", "tensor", "context", "pipeline", "expert", "interleave", "accumulate"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"A mesh with {name} = {getattr(self, name)}; give a whole number >= 1.")
        if self.zero not in _ZERO_STAGES:
            raise InvalidInput(f"zero = {self.zero}; ZeRO has the stages 0 (none), 1, 2 and 3 (FSDP).")
        model = self.tensor * self.context * self.pipeline
        if self.gpus % model:
            raise InvalidInput(
                f"{self.gpus} GPUs cannot be divided by tensor {self.tensor} x context {self.context} x pipeline {self.pipeline} "
                f"= {model}. Choose factors whose product divides the GPUs."
            )
        if self.sharing % self.fsdp:
            raise InvalidInput(
                f"{self.sharing} GPUs hold the same weights (of {self.gpus}, divided by tensor {self.tensor} x pipeline "
                f"{self.pipeline}), which cannot be divided into groups of fsdp {self.fsdp}. Choose a factor of {self.sharing}."
            )
        if self.sharing % self.expert:
            raise InvalidInput(
                f"expert = {self.expert} does not divide the {self.sharing} GPUs that hold the same layers."
            )

    @property
    def data(self) -> int:
        """The number of GPUs that have different rows."""
        return self.gpus // (self.tensor * self.context * self.pipeline)

    @property
    def sharing(self) -> int:
        """The number of GPUs that hold the same weights: those with different rows or other parts of a sequence."""
        return self.data * self.context

    def in_flight(self, stage: int) -> float:
        """Return how many micro-batches of a GPU's layers are alive at once on pipeline stage `stage` (1F1B, or interleaved)."""
        if self.interleave == 1:
            return float(min(self.pipeline - stage, self.accumulate))
        parts = (self.pipeline - stage - 1) * 2 + (self.interleave - 1) * self.pipeline + 1
        return min(parts, self.accumulate * self.interleave) / self.interleave

    @property
    def bubble(self) -> float:
        """The share of a step's work that the pipeline adds by waiting."""
        return (self.pipeline - 1) / (self.accumulate * self.interleave)

    def described(self) -> str:
        """Return the layout as words: those of its parts that are used."""
        names = ("fsdp", "tensor", "context", "pipeline", "expert", "interleave", "accumulate")
        used = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        if self.fsdp > 1 and self.zero != 3:
            used.append(f"ZeRO-{self.zero}")
        return ", ".join([f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}", *used])


def layout_from(given: Any) -> Layout:
    """Return a layout, from one, a dict of its fields, or None for one GPU; without `gpus` it is as large as its parts."""
    if given is None:
        return Layout()
    if isinstance(given, Layout):
        return given
    if not isinstance(given, dict):
        raise InvalidInput(f"mesh = {given!r}; give a dict such as {{'gpus': 64, 'fsdp': 8, 'tensor': 8}}.")
    known = set(Layout.__dataclass_fields__)
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidInput(f"mesh has unknown keys {unknown}; known: {', '.join(sorted(known))}.")
    values = dict(given)
    if "gpus" not in values:
        sharing = math.lcm(values.get("fsdp", 1), values.get("context", 1))
        values["gpus"] = sharing * values.get("tensor", 1) * values.get("pipeline", 1)
    return Layout(**values)
