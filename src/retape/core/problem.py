"""What is to be planned, as frozen values that are validated when made: Stage, Option, Chain, Loop, Graph, Tier, Budget.

No measuring and no solving here. Sizes are whole bytes, times are seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TypeAlias

from retape.core.errors import InvalidInput
from retape.core.units import parse_bytes


class OptionKind(Enum):
    """The ways to treat a region."""

    KEEP = "keep"
    SELECT = "select"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    TILE = "tile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to tape a stage: what it holds from its forward to its backward, and what both cost.

    `held_bytes` contains the stage's output, as a tape does; `moved_bytes` go to the host tier meanwhile.
    `rerun_seconds` is what backward pays to refill what was not held.
    """

    kind: OptionKind
    held_bytes: int
    forward_seconds: float
    backward_seconds: float
    label: str = ""
    rerun_seconds: float = 0.0
    moved_bytes: int = 0
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0

    def __post_init__(self) -> None:
        _check_fields(self, "Option")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One element of a chain: a forward, its backward, their sizes and times.

    `state_bytes` is its input; `tape_bytes` holds its saved tensors and its output. The transient bytes are what
    each run needs beyond what stands before and after it. `options` are further ways to tape it.
    """

    forward_seconds: float
    backward_seconds: float
    state_bytes: int
    tape_bytes: int
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    rerun_transient_bytes: int = 0
    options: tuple[Option, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        _check_fields(self, "Stage")

    @property
    def choices(self) -> tuple[Option, ...]:
        """Every way to tape this stage; the first is to keep all of its tape."""
        keep = Option(
            kind=OptionKind.KEEP,
            label="keep",
            held_bytes=self.tape_bytes,
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
            forward_transient_bytes=self.forward_transient_bytes,
            backward_transient_bytes=self.backward_transient_bytes,
        )
        return (keep, *self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Where snapshots and tapes live. `capacity_bytes` of None is unlimited; an infinite speed is free."""

    name: str
    capacity_bytes: int | None = None
    write_bytes_per_second: float = math.inf
    read_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if self.capacity_bytes is not None and (not isinstance(self.capacity_bytes, int) or self.capacity_bytes < 0):
            raise InvalidInput(
                f"Tier {self.name!r} has a capacity of {self.capacity_bytes!r} bytes; give a whole number >= 0, or None for no limit."
            )
        for field in ("write_bytes_per_second", "read_bytes_per_second"):
            speed = getattr(self, field)
            if not isinstance(speed, (int, float)) or math.isnan(speed) or speed <= 0:
                raise InvalidInput(
                    f"Tier {self.name!r} has {field} = {speed!r}; give a positive number, or math.inf for a free copy."
                )

    def write_seconds(self, count: int) -> float:
        return count / self.write_bytes_per_second

    def read_seconds(self, count: int) -> float:
        return count / self.read_bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages in a row, each fed by the one before; `fixed_bytes` (weights, gradients, glue) are always there."""

    stages: tuple[Stage, ...]
    fixed_bytes: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.stages, tuple) or not all(isinstance(s, Stage) for s in self.stages):
            raise InvalidInput("Chain.stages must be a tuple of Stage values.")
        if not self.stages:
            raise InvalidInput("A chain needs at least one stage.")
        _check_fields(self, "Chain")

    @property
    def length(self) -> int:
        return len(self.stages)

    def stage_name(self, index: int) -> str:
        return self.stages[index].name or f"stage {index}"

    def digest(self) -> str:
        return _digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Equal steps in a row; `steps` of None means that the end is not known beforehand.

    The bytes of a tier count what is stored there; the working state and the working tape of the one step at hand come on top.
    """

    steps: int | None
    state_bytes: int = 1
    tape_bytes: int = 1
    forward_seconds: float = 1.0
    backward_seconds: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        if self.steps is not None and (
            not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1
        ):
            raise InvalidInput(
                f"A loop of {self.steps!r} steps cannot be scheduled; give a whole number >= 1, or None if it is not known."
            )
        _check_fields(self, "Loop")

    @property
    def working_bytes(self) -> int:
        """What the one step at hand needs beside everything stored: its state and its tape."""
        return self.state_bytes + self.tape_bytes

    def digest(self) -> str:
        return _digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a graph. An op that may not be run again (`recomputable=False`) has its outputs held if needed."""

    name: str
    seconds: float
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    recomputable: bool = True

    def __post_init__(self) -> None:
        _check_fields(self, f"Op {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensor:
    """One tensor of a graph and the bytes that holding it costs (0 for what is held anyway)."""

    name: str
    bytes: int

    def __post_init__(self) -> None:
        _check_fields(self, f"GraphTensor {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The op graph of one region, in the order it ran. `inputs` are at hand in the re-run; `saved` is what backward reads."""

    ops: tuple[Op, ...]
    tensors: tuple[GraphTensor, ...]
    inputs: tuple[str, ...]
    saved: tuple[str, ...]
    name: str = ""

    def __post_init__(self) -> None:
        known = {tensor.name for tensor in self.tensors}
        if len(known) != len(self.tensors):
            raise InvalidInput("Two tensors of the graph have the same name; every tensor needs its own.")
        made = set(self.inputs)
        for op in self.ops:
            missing = [name for name in op.inputs if name not in made]
            if missing:
                raise InvalidInput(f"Op {op.name!r} reads {missing[0]!r} before anything makes it.")
            again = [name for name in op.outputs if name in made]
            if again:
                raise InvalidInput(f"Op {op.name!r} makes {again[0]!r}, which was made already.")
            made.update(op.outputs)
        for name in (*sorted(made), *self.saved):
            if name not in known or name not in made:
                raise InvalidInput(f"The graph speaks of tensor {name!r}, which is not listed or never made.")

    def digest(self) -> str:
        return _digest(self)


class BudgetKind(Enum):
    """What the number of a budget means."""

    TOTAL = "total"
    ACTIVATIONS = "activations"
    FRACTION = "fraction"
    AUTO = "auto"
    PER_DEVICE = "per_device"


BudgetLike: TypeAlias = "Budget | str | int | float | Mapping[str, Budget | str | int | float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The bytes that the peak must not pass. Make one with `Budget.of`, `Budget.activations` or `Budget.fraction`.

    `in_flight` is the number of microbatches whose tapes live at once (pipelines).
    """

    kind: BudgetKind
    limit_bytes: int | None = None
    share: float | None = None
    devices: tuple[tuple[str, Budget], ...] = ()
    in_flight: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise InvalidInput(f"in_flight = {self.in_flight!r}; give a whole number of microbatches >= 1.")

    @classmethod
    def of(cls, value: BudgetLike, *, in_flight: int = 1) -> Budget:
        """Read a budget: "24GiB" or an int is all bytes on the device, 0.5 a fraction of store-all, "auto", or a dict per device."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, Mapping):
            if not value:
                raise InvalidInput("A budget per device needs at least one device, such as {'cuda:0': '24GiB'}.")
            devices = tuple((str(device), cls.of(part)) for device, part in value.items())
            return cls(kind=BudgetKind.PER_DEVICE, devices=devices, in_flight=in_flight)
        if isinstance(value, str) and value.strip().lower() == "auto":
            return cls(kind=BudgetKind.AUTO, in_flight=in_flight)
        if isinstance(value, float):
            return cls.fraction(value, in_flight=in_flight)
        return cls(kind=BudgetKind.TOTAL, limit_bytes=_positive_bytes(value), in_flight=in_flight)

    @classmethod
    def activations(cls, value: str | int, *, in_flight: int = 1) -> Budget:
        """Bytes above weights and gradients."""
        return cls(kind=BudgetKind.ACTIVATIONS, limit_bytes=_positive_bytes(value), in_flight=in_flight)

    @classmethod
    def fraction(cls, share: float, *, in_flight: int = 1) -> Budget:
        """A fraction of what the activations take when everything is stored."""
        if math.isnan(share) or not 0.0 < share <= 1.0:
            raise InvalidInput(
                f"A budget of {share!r} is not a fraction: give a number above 0 and up to 1, or bytes with a unit such as '8GiB'."
            )
        return cls(kind=BudgetKind.FRACTION, share=float(share), in_flight=in_flight)


def _positive_bytes(value: object) -> int:
    if isinstance(value, str):
        count = parse_bytes(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        count = value
    else:
        raise InvalidInput(
            f"{value!r} is not a budget. Give bytes ('24GiB' or an int), a fraction (0.5), 'auto', or a dict per device."
        )
    if count <= 0:
        raise InvalidInput(f"A budget of {count} bytes cannot hold anything; give a positive number of bytes.")
    return count


def _check_fields(value: object, what: str) -> None:
    """Sizes are whole and not negative, times are finite and not negative."""
    for field in value.__dataclass_fields__:  # type: ignore[attr-defined]
        number = getattr(value, field)
        if field.endswith("bytes"):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise InvalidInput(f"{what}.{field} = {number!r}; give a whole number of bytes >= 0.")
        elif field.endswith("seconds"):
            bad = not isinstance(number, (int, float)) or isinstance(number, bool)
            if bad or not math.isfinite(number) or number < 0:
                raise InvalidInput(f"{what}.{field} = {number!r}; give a finite number of seconds >= 0.")


def _digest(value: object) -> str:
    """A short name for a problem, equal for equal problems on every machine."""
    text = json.dumps(asdict(value), sort_keys=True, default=lambda enum: enum.value)  # type: ignore[call-overload]
    return hashlib.sha256(text.encode()).hexdigest()[:16]
