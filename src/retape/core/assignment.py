"""Assignment: the treatment of every region under a plan: held slots, dropped input, and what an intermediate re-run refills.

A plan for a chain has stages and options; an assignment translates it to calls of a model's modules. It is made from a
plan's actions here and executed by `retape.torch.planning`. JSON both ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from retape.core import codec
from retape.core.actions import Action, Backward, Forward, Load, Tape
from retape.core.problem import Option, OptionKind

OUTSIDE_REGIONS = "saved outside regions"  # the term for glue in tables, messages and names of stages
_CHECKPOINT = "checkpoint("  # no module has a name that begins so


def checkpoint_name(function: str) -> str:
    """Return the name of the regions that are `retape.checkpoint` calls of a function."""
    return f"{_CHECKPOINT}{function})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """The treatment of region number `region` when it is re-run to recompute the input of a later one."""

    region: int
    fill_all: bool = False
    fill: tuple[int, ...] = ()
    hold_input: bool = False

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(required=("fill",))

    def __post_init__(self) -> None:
        codec.check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOption:
    """One option of a region: what it asks of the region, and its bytes and seconds (`cost`).

    Slots in `held` stay on the device, those in `moved` go to the host meanwhile, the others are recomputed. The inputs with the
    numbers `moved_inputs` go to the host too. The parts `tiled` are run in `tiles` slices. `saved_share` names the compiled variant
    to run; None is eager. The results of the first `hold_collectives` collectives stay on the device too. Of the inputs with the numbers
    `sharded_inputs` each rank of a tensor-parallel group holds a part. With `keep_gathered` the weights that FSDP2 gathers stay until
    backward. `slots` is how many there are in a run like this; None if that is not known. `Choice.taking` is the only
    place where it becomes a saved choice.
    """

    cost: Option
    held: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    moved_inputs: frozenset[int] = frozenset()
    tiles: int = 1
    tiled: tuple[str, ...] = ()
    saved_share: float | None = None
    hold_collectives: int = 0
    sharded_inputs: frozenset[int] = frozenset()
    keep_gathered: bool = False
    slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The treatment of one region: call number `call` of module `name` in forward number `root_call` of the model.

    `held` are the numbers of the slots to hold, of `slots` in all; `moved` those to offload. With `drop_input` the input from the
    region before is dropped, and `passing` recomputes it; `moved_inputs` are the numbers of the argument tensors to
    offload. Submodules named in `tiled` run in `tiles` slices. `elements` and `shapes` describe the inputs of the profiled
    call. `saved_share` identifies the compiled form to run; None is eager. `training` is the mode of the profile; None is unknown.
    A re-run gets what the first `hold_collectives` collectives of the forward returned, and gathers the argument tensors with the numbers
    `sharded_inputs` from the ranks of its tensor-parallel group. With `keep_gathered` the weights that FSDP2 gathers stay until backward.
    With `on_disk` what is moved goes to the disk.
    """

    name: str
    root_call: int = 0
    call: int = 0
    kind: int = 0
    option: OptionKind = OptionKind.KEEP
    held: tuple[int, ...] = ()
    slots: int = 0
    elements: int = 0
    drop_input: bool = False
    passing: tuple[Passing, ...] = ()
    moved: tuple[int, ...] = ()
    saved_share: float | None = None
    moved_inputs: tuple[int, ...] = ()
    tiles: int = 1
    tiled: tuple[str, ...] = ()
    training: bool | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    hold_collectives: int = 0
    on_disk: bool = False
    sharded_inputs: tuple[int, ...] = ()
    keep_gathered: bool = False

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(
        required=("option", "passing"), omitted=("hold_collectives", "on_disk", "sharded_inputs", "keep_gathered")
    )

    def __post_init__(self) -> None:
        codec.check_fields(self)

    @property
    def moves(self) -> bool:
        return bool(self.moved or self.moved_inputs)

    @property
    def is_kept(self) -> bool:
        """True if the region is simply called."""
        return self.option is OptionKind.KEEP

    @property
    def is_checkpoint_call(self) -> bool:
        """True for a `retape.checkpoint` call in the model's code, which is named after its function."""
        return self.name.startswith(_CHECKPOINT)

    def taking(self, option: RegionOption) -> Choice:
        """Return this call with what the option asks of it."""
        return replace(
            self,
            option=option.cost.kind,
            held=tuple(sorted(option.held)),
            moved=tuple(sorted(option.moved)),
            moved_inputs=tuple(sorted(option.moved_inputs)),
            saved_share=option.saved_share,
            hold_collectives=option.hold_collectives,
            on_disk=option.cost.on_disk,
            sharded_inputs=tuple(sorted(option.sharded_inputs)),
            keep_gathered=option.keep_gathered,
            slots=self.slots if option.slots is None else option.slots,
        ).sliced_as(option)

    def recomputed_eagerly(self) -> Choice:
        """Return this call with no slot held, without a compiled form and tiles."""
        return replace(self, option=OptionKind.RECOMPUTE, held=(), moved=(), saved_share=None, tiles=1, tiled=())

    def sliced_as(self, option: RegionOption) -> Choice:
        """Return this call with its parts in as many tiles as the option asks for, if it asks for any."""
        return self if option.tiles == 1 else replace(self, tiles=option.tiles, tiled=option.tiled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The choices of all regions, in the order of their calls."""

    choices: tuple[Choice, ...] = ()

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(
        noun="list of regions", remedy="Save the fit again.", bare=True
    )

    @property
    def keeps_everything(self) -> bool:
        return all(
            choice.option is OptionKind.KEEP and (choice.saved_share is None or choice.saved_share >= 1)
            for choice in self.choices
        )

    @property
    def is_compiled(self) -> bool:
        return any(choice.saved_share is not None for choice in self.choices)

    @property
    def changes_nothing(self) -> bool:
        """True if the model as it is written does what the plan asks; its own `retape.checkpoint` calls would drop."""
        return self.keeps_everything and not any(
            c.saved_share is not None or c.is_checkpoint_call or c.keep_gathered for c in self.choices
        )

    @property
    def moves_something(self) -> bool:
        return any(choice.moves for choice in self.choices)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the choices as JSON has them; `Assignment.from_dict` reads them back."""
        written: list[dict[str, Any]] = codec.to_data(self)
        return written

    @staticmethod
    def from_dict(data: Any) -> Assignment:
        """Read what `to_dict` wrote; raise PlanFormatError with the reason for any other data."""
        return codec.from_data(Assignment, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStage:
    """A stage of a chain: the call of a region with its options, in the order of `Stage.choices`, or glue (`choice` is None)."""

    choice: Choice | None = None
    options: tuple[RegionOption, ...] = ()

    def only(self, numbers: Iterable[int]) -> RegionStage:
        """Return the same stage with the options of these numbers."""
        return replace(self, options=tuple(self.options[number] for number in numbers)) if self.options else self


def assign(stages: tuple[RegionStage, ...], actions: Iterable[Action]) -> Assignment:
    """Return what a persistent schedule of a chain asks of each region."""
    return _Compiler(stages).run(actions)


class _Compiler:
    """Reads the actions: the first forward pass, then one re-run pass before each backward that needs one."""

    def __init__(self, stages: tuple[RegionStage, ...]) -> None:
        self._stages = stages
        numbers = [i for i, stage in enumerate(stages) if stage.choice is not None]
        self._number = {stage: number for number, stage in enumerate(numbers)}
        self._choices: dict[int, Choice] = {}
        self._pass: dict[int, Passing] | None = None

    def run(self, actions: Iterable[Action]) -> Assignment:
        first = True
        for action in actions:
            if isinstance(action, Backward):
                first = False
                self._end_pass(action.step)
            elif isinstance(action, Load):
                self._pass = {}
            elif isinstance(action, Tape):
                self._tape(action.step, action.option, first)
            elif isinstance(action, Forward):
                self._forward(action.start, action.stop, first)
        ordered = sorted(self._choices.items(), key=lambda item: self._number[item[0]])
        return Assignment(choices=tuple(choice for _, choice in ordered))

    def _tape(self, number: int, taken: int, first: bool) -> None:
        choice = self._stages[number].choice
        if choice is None:
            return
        option = self._stages[number].options[taken]
        if first:
            self._choices[number] = choice.taking(option)
        elif self._pass is not None:
            keep = option.cost.kind is OptionKind.KEEP
            # The backward of a re-run region follows soon: none of its slots is moved.
            fill = (*sorted(option.held), *sorted(option.moved))
            self._pass[number] = Passing(region=self._number[number], fill_all=keep, fill=fill, hold_input=not keep)
            if number in self._choices:
                # The slots to fill are those of this variant; all runs of a region are alike, so it is in tiles from the first on.
                same_variant = replace(self._choices[number], saved_share=option.saved_share)
                self._choices[number] = same_variant.sliced_as(option)

    def _forward(self, start: int, stop: int, first: bool) -> None:
        for number in range(start, stop):
            stage = self._stages[number]
            if stage.choice is None:
                continue
            if first:
                # A region that is run over without a tape runs in the variant of its last option.
                self._choices[number] = replace(
                    stage.choice,
                    option=OptionKind.RECOMPUTE,
                    drop_input=number > start,
                    saved_share=stage.options[-1].saved_share,
                )
            elif self._pass is not None:
                # The first region of a skipped segment keeps its input, from which the segment is reversed later.
                self._pass[number] = Passing(region=self._number[number], hold_input=number == start)

    def _end_pass(self, stage: int) -> None:
        """End the pass at the stage whose backward asked for it."""
        if self._pass:
            before = tuple(passing for at, passing in sorted(self._pass.items()) if at < stage)
            if before and stage in self._choices:
                self._choices[stage] = replace(self._choices[stage], passing=before)
        self._pass = None
