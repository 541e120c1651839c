"""What each region of a model does under a plan: slots held, input dropped, and what a re-run on the way leaves behind.

A plan for a chain speaks of stages and options; an assignment says the same of the calls of a model's modules. Frozen values,
JSON both ways. Compiled from a plan's actions here, executed by `executor.py`.
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
    """What becomes of region number `region` when it is run again on the way to another one's input."""

    region: int
    fill_all: bool = False
    fill: tuple[int, ...] = ()
    hold_input: bool = False

    __json_form__: ClassVar[codec.JsonForm] = codec.JsonForm(required=("fill",))

    def __post_init__(self) -> None:
        codec.check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One call of a module: the `call`-th of the module called `name` in the `root_call`-th forward of the model.

    `held` are the numbers of the slots to hold of `slots` in all, `moved` of those that go to the host meanwhile. With
    `drop_input` the input that the region before hands over is dropped, and `passing` says how it is made again; of the tensors
    among its arguments those with the numbers `moved_inputs` go to the host. Its parts called `tiled` are run in `tiles` slices.
    `elements` is how many numbers its inputs had when it was profiled, `shapes` their shapes. `saved_share` is that of the compiled
    form to run; None is eager. `training` is the mode it was profiled in; None is unknown.
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
    """The choices of all regions, in the order in which the model calls them."""

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
    """What a stage of the chain stands for: a region and what each of its choices holds and moves, or glue (`choice` is None).

    `saved_shares` has the compiled form of each choice; where it is empty all are eager.
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
        """The form of a region that is run over without a tape: that of the last choice."""
        return self.saved_shares[-1] if self.saved_shares else None


def _in_tiles(choice: Choice, meaning: StageMeaning, option: int) -> Choice:
    """The choice with its parts in as many tiles as the option says."""
    tiles = meaning.tiles[option] if meaning.tiles else 1
    return choice if tiles == 1 else replace(choice, tiles=tiles, tiled=meaning.tiled)


def assign(meanings: tuple[StageMeaning, ...], actions: Iterable[Action]) -> Assignment:
    """Say what a persistent schedule of a chain asks of each region."""
    return _Compiler(meanings).run(actions)


class _Compiler:
    """Plays the actions: the first run up to the first backward, and then one pass before each backward that needs one."""

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
                self._turn(action.step)
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
            if meaning.saved_shares:  # the slots to fill are those of this form
                share = meaning.saved_shares[option]
                self._choices[stage] = replace(self._choices[stage], saved_share=share)
            # What a re-run on the way makes again is needed soon: none of it is moved.
            self._pass[stage] = Passing(region=number, fill_all=keep, fill=(*held, *moved), hold_input=not keep)
            if stage in self._choices:  # all runs of a region are alike, so it is in tiles from the first on
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
                # The segment that is run over keeps its own input, to be reversed from there later.
                self._pass[stage] = Passing(region=self._number[stage], hold_input=stage == start)

    def _turn(self, stage: int) -> None:
        """The pass ends at the stage whose backward asked for it."""
        if self._pass:
            way = tuple(passing for at, passing in sorted(self._pass.items()) if at < stage)
            if way and stage in self._choices:
                self._choices[stage] = replace(self._choices[stage], passing=way)
        self._pass = None
