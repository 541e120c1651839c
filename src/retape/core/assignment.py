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
from retape.core.problem import OptionKind


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
class Choice:
    """The treatment of one region: call number `call` of module `name` in forward number `root_call` of the model.

    `held` are the numbers of the slots to hold, of `slots` in all; `moved` those to offload. With `drop_input` the input from the
    region before is dropped, and `passing` recomputes it; `moved_inputs` are the numbers of the argument tensors to
    offload. Submodules named in `tiled` run in `tiles` slices. `elements` and `shapes` describe the inputs of the profiled
    call. `saved_share` identifies the compiled form to run; None is eager. `training` is the mode of the profile; None is unknown.
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

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(required=("option", "passing"))

    def __post_init__(self) -> None:
        codec.check_fields(self)

    @property
    def moves(self) -> bool:
        return bool(self.moved or self.moved_inputs)


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
class StageMeaning:
    """The region of a stage with the slots that each option holds and moves; glue if `choice` is None.

    `saved_shares` has the compiled form of each option; if it is empty, all are eager.
    """

    choice: Choice | None
    held: tuple[tuple[int, ...], ...] = ()
    moved: tuple[tuple[int, ...], ...] = ()
    moved_inputs: tuple[tuple[int, ...], ...] = ()
    tiles: tuple[int, ...] = ()
    tiled: tuple[str, ...] = ()
    kinds: tuple[OptionKind, ...] = ()
    saved_shares: tuple[float | None, ...] = ()

    @property
    def recomputed_share(self) -> float | None:
        """The compiled form of a region that runs without a tape: that of the last option."""
        return self.saved_shares[-1] if self.saved_shares else None


def _in_tiles(choice: Choice, meaning: StageMeaning, option: int) -> Choice:
    """Return the choice with the tiles of an option."""
    tiles = meaning.tiles[option] if meaning.tiles else 1
    return choice if tiles == 1 else replace(choice, tiles=tiles, tiled=meaning.tiled)


def assign(meanings: tuple[StageMeaning, ...], actions: Iterable[Action]) -> Assignment:
    """Translate a persistent schedule of a chain to the treatment of each region."""
    return _Compiler(meanings).run(actions)


class _Compiler:
    """Reads the actions: the first forward pass, then one re-run pass before each backward that needs one."""

    def __init__(self, meanings: tuple[StageMeaning, ...]) -> None:
        self._meanings = meanings
        numbers = [i for i, meaning in enumerate(meanings) if meaning.choice is not None]
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

    def _tape(self, stage: int, option: int, first: bool) -> None:
        meaning = self._meanings[stage]
        if meaning.choice is None:
            return
        held, moved = meaning.held[option], meaning.moved[option] if meaning.moved else ()
        if first:
            choice = replace(
                meaning.choice,
                option=meaning.kinds[option],
                held=held,
                moved=moved,
                moved_inputs=meaning.moved_inputs[option] if meaning.moved_inputs else (),
                saved_share=meaning.saved_shares[option] if meaning.saved_shares else None,
            )
            self._choices[stage] = _in_tiles(choice, meaning, option)
        elif self._pass is not None:
            keep = meaning.kinds[option] is OptionKind.KEEP
            number = self._number[stage]
            if meaning.saved_shares:  # the slots to fill are those of this compiled form
                share = meaning.saved_shares[option]
                self._choices[stage] = replace(self._choices[stage], saved_share=share)
            # The backward of a re-run region follows soon: none of its slots is moved.
            self._pass[stage] = Passing(region=number, fill_all=keep, fill=(*held, *moved), hold_input=not keep)
            if stage in self._choices:  # all runs of a region use the same tiles
                self._choices[stage] = _in_tiles(self._choices[stage], meaning, option)

    def _forward(self, start: int, stop: int, first: bool) -> None:
        for stage in range(start, stop):
            meaning = self._meanings[stage]
            choice = meaning.choice
            if choice is None:
                continue
            if first:
                recomputed = replace(choice, option=OptionKind.RECOMPUTE, drop_input=stage > start)
                self._choices[stage] = replace(recomputed, saved_share=meaning.recomputed_share)
            elif self._pass is not None:
                # The first region of a skipped segment keeps its input, from which the segment is reversed later.
                self._pass[stage] = Passing(region=self._number[stage], hold_input=stage == start)

    def _end_pass(self, stage: int) -> None:
        """End the pass at the stage whose backward needs it."""
        if self._pass:
            before = tuple(passing for at, passing in sorted(self._pass.items()) if at < stage)
            if before and stage in self._choices:
                self._choices[stage] = replace(self._choices[stage], passing=before)
        self._pass = None
