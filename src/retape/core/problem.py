"""Problems for the planner, as frozen values that are validated when made: Stage, Option, Chain, Loop, Graph, Tier, Budget.

Nothing is measured or solved here. Sizes are whole bytes, times are seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum, Flag, auto
from typing import ClassVar, TypeAlias, TypeVar

from retape.core.codec import JsonForm, check_fields
from retape.core.errors import InvalidInput
from retape.core.pipelines import NO_BUFFERS, ScheduleBuffers, buffers_of, microbatches_in_flight
from retape.core.units import MOST_BYTES, MOST_STEPS, is_amount, is_whole, parse_bytes, shown


class OptionKind(Enum):
    """The treatments of a region."""

    KEEP = "keep"
    SELECT = "select"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    TILE = "tile"


class OptionSet(Flag):
    """The options that a plan may use; `ALL | OPTIMIZER_ON_HOST` allows both.

    EXACT: keep, select, recompute, offload; gradients bit for bit. ALL adds tiles and the fused loss, which sum in another order.
    OPTIMIZER_ON_HOST: the optimizer's states wait on the host during forward and backward; its updates are the same bit for bit.
    OPTIMIZER_IN_BACKWARD: each weight is updated in backward, as soon as its gradient is complete, which is freed then. The loop must not
    clip, scale or accumulate gradients.
    """

    EXACT = 0
    ALL = auto()
    OPTIMIZER_ON_HOST = auto()
    OPTIMIZER_IN_BACKWARD = auto()

    @classmethod
    def of(cls, value: OptionSet | str) -> OptionSet:
        named = {"exact": cls.EXACT, "all": cls.ALL}.get(value) if isinstance(value, str) else value
        if not isinstance(named, cls):
            raise InvalidInput(
                f"options={value!r} is unknown; give retape.EXACT or retape.ALL, optionally with | "
                "retape.OPTIMIZER_ON_HOST or | retape.OPTIMIZER_IN_BACKWARD."
            )
        return named

    @property
    def slices(self) -> bool:
        """True if the loss and parts of regions may be computed in slices."""
        return OptionSet.ALL in self


EXACT = OptionSet.EXACT
ALL = OptionSet.ALL
OPTIMIZER_ON_HOST = OptionSet.OPTIMIZER_ON_HOST
OPTIMIZER_IN_BACKWARD = OptionSet.OPTIMIZER_IN_BACKWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One treatment of a stage: bytes held from its forward to its backward, and the cost of both.

    `held_bytes` contains the stage's output, as a tape does; `moved_bytes` are on the host tier between forward and backward,
    `input_bytes` of them being the stage's input; with `on_disk` they are on the disk instead. `rerun_seconds` refill in backward what
    was not held. Bytes and seconds estimate the host copies as if every stage were alike: `*_flight_bytes` of the transient bytes are
    those of neighbouring stages, `*_stall_seconds` are waiting. For a chain with a `host` the abstract machine replaces them by what it
    finds.
    `sharded_bytes` of the input are held by other ranks meanwhile; a stage that is taped in a re-run holds them itself.
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
    input_bytes: int = 0
    forward_stall_seconds: float = 0.0
    backward_stall_seconds: float = 0.0
    forward_flight_bytes: int = 0
    backward_flight_bytes: int = 0
    on_disk: bool = False
    sharded_bytes: int = 0

    __json_form__: ClassVar[JsonForm] = JsonForm(omitted=("on_disk", "sharded_bytes"))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def in_rerun(self) -> Option:
        """The same in a re-run, whose backward follows soon: no part of its input is left to other ranks."""
        whole = self.held_bytes + self.sharded_bytes
        return replace(self, held_bytes=whole, sharded_bytes=0) if self.sharded_bytes else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One element of a chain: a forward, its backward, their sizes and times.

    `state_bytes` is its input; `tape_bytes` are its saved tensors and its output. The transient bytes are needed
    only while a forward, re-run or backward runs; a run without a tape needs at least `untaped_transient_bytes`, because its
    intermediate results are in no tape. `options` are further treatments.
    `pinned`: its forward is never run again, so its tape is always kept. That is the glue between regions (an embedding, the head
    and the loss, ops outside every region), which is part of the chain but not managed.
    `gradient_bytes` are gradients of weights that its backward makes and that stay to the end of the step: those of a step that
    begins without gradients. Gradients that are there from the start are among the chain's fixed bytes instead.
    """

    forward_seconds: float
    backward_seconds: float
    state_bytes: int
    tape_bytes: int
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    rerun_transient_bytes: int = 0
    untaped_transient_bytes: int = 0
    options: tuple[Option, ...] = ()
    name: str = ""
    pinned: bool = False
    gradient_bytes: int = 0

    __json_form__: ClassVar[JsonForm] = JsonForm(required=("options",), omitted=("gradient_bytes",))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pinned and self.options:
            raise InvalidInput(
                f"A pinned stage has {len(self.options)} options, but its tape is always kept whole; "
                "leave options out, or pinned."
            )

    @property
    def all_bytes(self) -> int:
        """The sum of all sizes of the stage and its options: no plan holds more of it."""
        return _sum_of_sizes(self) + sum(_sum_of_sizes(option) for option in self.options)

    @property
    def choices(self) -> tuple[Option, ...]:
        """All options of this stage; the first keeps the whole tape."""
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
    """A memory that stores snapshots and tapes. `capacity_bytes` of None is unlimited; copies at infinite speed take no time."""

    name: str
    capacity_bytes: int | None = None
    write_bytes_per_second: float = math.inf
    read_bytes_per_second: float = math.inf

    __json_form__: ClassVar[JsonForm] = JsonForm(omitted=("write_bytes_per_second", "read_bytes_per_second"))

    def __post_init__(self) -> None:
        if self.capacity_bytes is not None and (not is_whole(self.capacity_bytes) or self.capacity_bytes < 0):
            raise InvalidInput(
                f"Tier {self.name!r} has a capacity of {shown(self.capacity_bytes)} bytes; give a whole number >= 0, or None for no limit."
            )
        for field in ("write_bytes_per_second", "read_bytes_per_second"):
            speed = getattr(self, field)
            if speed != math.inf and not (is_amount(speed) and speed > 0):
                raise InvalidInput(
                    f"Tier {self.name!r} has {field} = {shown(speed)}; give a positive number, or math.inf for a free copy."
                )

    @property
    def is_disk(self) -> bool:
        return self.name == "disk"

    def write_seconds(self, count: int) -> float:
        return count / self.write_bytes_per_second

    def read_seconds(self, count: int) -> float:
        return count / self.read_bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages in a row, each with the output of the one before as input.

    `fixed_bytes` (weights, gradients, glue) are always held.

    `left_bytes` of them belong to one microbatch: its regions leave them until their backward whatever a plan does (copies of
    buffers), and so does each other microbatch in flight.
    `host` is the tier to which options move bytes, and `disk` that of options `on_disk`. With a host the abstract machine plays their
    copies one by one; without it, it uses the options' estimates.
    """

    stages: tuple[Stage, ...]
    fixed_bytes: int = 0
    name: str = ""
    host: Tier | None = None
    left_bytes: int = 0
    disk: Tier | None = None

    __json_form__: ClassVar[JsonForm] = JsonForm(omitted=("host", "left_bytes", "disk"))

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stages:
            raise InvalidInput("A chain needs at least one stage.")
        total = self.fixed_bytes + sum(stage.all_bytes for stage in self.stages)
        if total >= MOST_BYTES:
            raise InvalidInput(
                f"The sizes of the chain sum to {total} bytes, and must be below 2**62 ({MOST_BYTES}). "
                "Give smaller sizes, or fewer stages."
            )

    @property
    def length(self) -> int:
        return len(self.stages)

    def accumulating(self) -> Chain:
        """Return the chain of a step that begins with all gradients."""
        there = sum(stage.gradient_bytes for stage in self.stages)
        stages = tuple(replace(stage, gradient_bytes=0) for stage in self.stages)
        return replace(self, stages=stages, fixed_bytes=self.fixed_bytes + there)

    def stage_name(self, index: int) -> str:
        return self.stages[index].name or f"stage {index}"

    def digest(self) -> str:
        return _digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Equal steps in a row; `steps` of None means an unknown number.

    The bytes of a tier count what is stored there; the working state and working tape of the current step are not included.
    """

    steps: int | None
    state_bytes: int = 1
    tape_bytes: int = 1
    forward_seconds: float = 1.0
    backward_seconds: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        if self.steps is not None and (not is_whole(self.steps) or not 1 <= self.steps <= MOST_STEPS):
            raise InvalidInput(
                f"A loop of {shown(self.steps)} steps cannot be scheduled; "
                f"give a whole number >= 1 (at most {MOST_STEPS:,}), or None if it is not known."
            )
        check_fields(self)

    @property
    def working_bytes(self) -> int:
        """The bytes of the current step beside everything stored: its state and its tape."""
        return self.state_bytes + self.tape_bytes

    def digest(self) -> str:
        return _digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a graph. The outputs of an op with `recomputable=False` are held if they are needed."""

    name: str
    seconds: float
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    recomputable: bool = True

    def __post_init__(self) -> None:
        check_fields(self, f"Op {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensor:
    """One tensor of a graph and the bytes that holding it costs (0 if it is held anyway)."""

    name: str
    bytes: int

    def __post_init__(self) -> None:
        check_fields(self, f"GraphTensor {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The op graph of one region, in execution order. `inputs` are available to a re-run; `saved` is what backward reads."""

    ops: tuple[Op, ...]
    tensors: tuple[GraphTensor, ...]
    inputs: tuple[str, ...]
    saved: tuple[str, ...]
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
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
                raise InvalidInput(f"The graph uses tensor {name!r}, which is not listed or never made.")

    def digest(self) -> str:
        return _digest(self)


class BudgetKind(Enum):
    """The meaning of a budget's number."""

    TOTAL = "total"
    ACTIVATIONS = "activations"
    FRACTION = "fraction"
    AUTO = "auto"
    PER_DEVICE = "per_device"


_Given = TypeVar("_Given")
BudgetLike: TypeAlias = "Budget | str | int | float | Mapping[str, Budget | str | int | float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The bytes that the peak must not exceed. Make one with `Budget.of`, `Budget.activations` or `Budget.fraction`.

    `in_flight` is the number of microbatches whose tapes are alive at once (pipelines): one runs, the others hold what their forwards
    left. `buffers` are what the pipeline's schedule has beside them.
    """

    kind: BudgetKind
    limit_bytes: int | None = None
    share: float | None = None
    devices: tuple[tuple[str, Budget], ...] = ()
    in_flight: int = 1
    buffers: ScheduleBuffers = NO_BUFFERS

    def __post_init__(self) -> None:
        if not isinstance(self.kind, BudgetKind):
            raise InvalidInput(f"Budget.kind = {shown(self.kind)}; make a budget with Budget.of('24GiB').")
        if not is_whole(self.in_flight) or self.in_flight < 1:
            raise InvalidInput(f"in_flight = {shown(self.in_flight)}; give a whole number of microbatches >= 1.")
        if self.kind in (BudgetKind.TOTAL, BudgetKind.ACTIVATIONS):
            _positive_bytes(self.limit_bytes)
        elif self.limit_bytes is not None:
            raise InvalidInput(f"A budget of kind {self.kind.value!r} has no bytes; leave limit_bytes out.")
        if self.kind is BudgetKind.FRACTION:
            _check_share(self.share)
        elif self.share is not None:
            raise InvalidInput(f"A budget of kind {self.kind.value!r} has no share; leave share out.")
        if (self.kind is BudgetKind.PER_DEVICE) != bool(self.devices) or not _are_devices(self.devices):
            raise InvalidInput(
                "A budget per device, and no other, has devices: make it with Budget.of({'cuda:0': '24GiB'})."
            )

    @classmethod
    def of(cls, value: BudgetLike, *, in_flight: int | None = None) -> Budget:
        """Return a budget: "24GiB" or an int is all bytes on the device, 0.5 a fraction of store-all, "auto", or a dict per device.

        A number in a text means the same: "1" is one byte, "1.0" everything. `in_flight` of None is 1, or that of a given Budget.
        """
        if isinstance(value, Budget):
            return value if in_flight is None else replace(value, in_flight=in_flight)
        in_flight = 1 if in_flight is None else in_flight
        if isinstance(value, Mapping):
            if not value:
                raise InvalidInput("A budget per device needs at least one device, such as {'cuda:0': '24GiB'}.")
            devices = tuple((str(device), cls.of(part)) for device, part in value.items())
            return cls(kind=BudgetKind.PER_DEVICE, devices=devices, in_flight=in_flight)
        if isinstance(value, str) and value.strip().lower() == "auto":
            return cls(kind=BudgetKind.AUTO, in_flight=in_flight)
        value = _number_in(value)
        if isinstance(value, float):
            return cls.fraction(value, in_flight=in_flight)
        return cls(kind=BudgetKind.TOTAL, limit_bytes=_positive_bytes(value), in_flight=in_flight)

    @classmethod
    def activations(cls, value: str | int, *, in_flight: int = 1) -> Budget:
        """Return a budget of bytes above weights and gradients."""
        number = _number_in(value)
        if isinstance(number, float):
            raise InvalidInput(
                f"Budget.activations counts bytes, and got {shown(number)}. Give bytes such as '10GiB', or the fraction itself as the "
                "budget."
            )
        return cls(kind=BudgetKind.ACTIVATIONS, limit_bytes=_positive_bytes(number), in_flight=in_flight)

    @classmethod
    def fraction(cls, share: float, *, in_flight: int = 1) -> Budget:
        """Return a budget that is a fraction of the activations if everything is stored."""
        _check_share(share)
        return cls(kind=BudgetKind.FRACTION, share=float(share), in_flight=in_flight)

    def schedule(
        self, name: str, *, stage: int, stages: int, microbatches: int, chunks: int = 2, chunk: int | None = None
    ) -> Budget:
        """Return this budget for one stage of a pipeline: with the microbatches in flight and the buffers that its schedule has there.

        `name` is "gpipe", "1f1b", "looped_bfs", "interleaved", "zero_bubble", "zbv" or "dualpipe_v". In a schedule with `chunks` of layers
        in each rank, the model is all chunks of the rank, or number `chunk` of them.
        """
        about = (name, stage, stages, microbatches, chunks)
        in_flight = microbatches_in_flight(*about, chunk=chunk)
        return replace(self, in_flight=in_flight, buffers=buffers_of(*about, in_flight=in_flight, chunk=chunk))


def _number_in(value: _Given) -> _Given | int | float:
    """Return the number that a text without a unit is in Python, an int or a float; any other value as it is."""
    for read in (int, float):
        try:
            return read(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return value


def _positive_bytes(value: object) -> int:
    if isinstance(value, str):
        count = parse_bytes(value)
    elif is_whole(value):
        count = value
    else:
        raise InvalidInput(
            f"{shown(value)} is not a budget. Give bytes ('24GiB' or an int), a fraction (0.5), 'auto', or a dict per device."
        )
    if not 0 < count < MOST_BYTES:
        what = "cannot hold anything; give a positive number of bytes" if count <= 0 else "is 2**62 or more; give fewer"
        raise InvalidInput(f"A budget of {shown(count)} bytes {what}.")
    return count


def _check_share(share: object) -> None:
    if not is_amount(share) or not 0.0 < share <= 1.0:
        raise InvalidInput(
            f"A budget of {shown(share)} is not a fraction: give a number above 0 and up to 1, or bytes with a unit such as '8GiB'."
        )


def _are_devices(devices: object) -> bool:
    pairs = devices if isinstance(devices, tuple) else (None,)
    return all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Budget)
        for pair in pairs
    )


def _sum_of_sizes(part: Stage | Option) -> int:
    return sum(getattr(part, field) for field in part.__dataclass_fields__ if field.endswith("bytes"))


def _digest(value: object) -> str:
    """Return a short hash of a problem, the same on every machine."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain).encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    """Return an enum or a dataclass as JSON has it. Not `asdict`, which deep-copies a chain of thousands of stages."""
    if isinstance(value, Enum):
        return value.value
    names = [each.name for each in fields(value)]  # type: ignore[arg-type]
    # Fields added later are left out while they are empty: plans on disk refer to a chain by its earlier digest.
    return {name: getattr(value, name) for name in names if name not in _ADDED_LATER or getattr(value, name)}


_ADDED_LATER = frozenset(
    {
        "pinned",
        "left_bytes",
        "gradient_bytes",
        "host",
        "disk",
        "on_disk",
        "untaped_transient_bytes",
        "input_bytes",
        "forward_stall_seconds",
        "backward_stall_seconds",
        "forward_flight_bytes",
        "backward_flight_bytes",
        "sharded_bytes",
    }
)
