"""The plan of a fit as rows, one for regions with equal treatment: what they hold and recompute. Draws nothing.

The seconds are those of the plan's actions, so that the rows sum to the promised seconds above a step that keeps everything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from retape.core.actions import Backward, Forward, Item, Save, Tape
from retape.core.assignment import Choice
from retape.core.fit_record import FitRecord
from retape.core.problem import Chain, OptionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """One stage under a plan: bytes held when the backward pass begins, and seconds above keeping everything.

    `runs` counts the forwards that the chain's actions run; a re-run inside the stage's own backward is not among them.
    """

    held_bytes: int
    extra_seconds: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRow:
    """Regions of one kind that are treated alike. Bytes and seconds are per region; seconds are the mean.

    `rerun_seconds` refill the dropped slots, `spared_seconds` are saved by the held ones compared to recomputing all.
    `moved_bytes` are on the host, or `on_disk`, between forward and backward, a moved input included. `start` is the first region of
    a segment whose regions drop their inputs as well. `sharded_bytes` of the input are held by other ranks; with
    `keep_gathered` FSDP2's gathered weights stay until backward. `saved_share` identifies the compiled form; None is eager.
    """

    names: tuple[str, ...]
    option: OptionKind
    held_slots: int
    slots: int
    held_bytes: int
    all_bytes: int
    extra_seconds: float
    rerun_seconds: float
    spared_seconds: float
    moved_bytes: int = 0
    input_moved: bool = False
    on_disk: bool = False
    sharded_bytes: int = 0
    keep_gathered: bool = False
    tiles: int = 1
    start: str = ""
    saved_share: float | None = None

    @property
    def plan(self) -> str:
        """The treatment in one to three words."""
        word = "segment" if self.start else self.option.value
        return word if self.saved_share is None else f"{word}, compiled {self.saved_share:g}"

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def dropped_bytes(self) -> int:
        return max(0, self.all_bytes - self.held_bytes - self.moved_bytes - self.sharded_bytes)

    @property
    def label(self) -> str:
        """The names of the regions, with numbers as ranges."""
        return folded(self.names)

    def below(self, prefix: str) -> RegionRow:
        """Return the row with names that leave a prefix out."""
        names = tuple(name.removeprefix(prefix) for name in self.names)
        return replace(self, names=names, start=self.start.removeprefix(prefix))


@dataclass(frozen=True, slots=True, kw_only=True)
class GlueRow:
    """Everything outside the regions: the number of stages, and the bytes that they always hold."""

    places: int
    held_bytes: int


_LEAST_PREFIX = 2  # parts of a name: a shorter prefix says where a region is, and takes little room


def common_prefix(record: FitRecord) -> str:
    """Return what the names of all regions begin with, up to a point, if it is several parts long (wrappers of a model)."""
    names = [choice.name for choice in record.assignment.choices]
    if len(set(names)) < 2 or any("(" in name for name in names):
        return ""
    parts = [name.split(".") for name in names]
    same = [each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))]
    if any(name[len(same) :][:1] == [] or name[len(same)][0].isdecimal() for name in parts):
        same = same[:-1]  # a number alone does not name a region
    return "".join(f"{each}." for each in same) if len(same) >= _LEAST_PREFIX else ""


def shortened(labels: Sequence[str], most: int) -> list[str]:
    """Return the labels with the middle of long ones left out; those that would look alike stay whole."""
    short = [without_middle(label, most) for label in labels]
    counts = Counter(dict(zip(labels, short, strict=True)).values())
    return [label if counts[cut] > 1 else cut for label, cut in zip(labels, short, strict=True)]


def without_middle(label: str, most: int) -> str:
    """Return a label of at most this many characters; of a longer one the middle is left out."""
    if len(label) <= most:
        return label
    head = (most - 1) // 3  # names differ at their end
    return f"{label[:head]}…{label[len(label) - (most - 1 - head) :]}"


def stage_uses(chain: Chain, plan_actions: Iterable[object]) -> tuple[StageUse, ...]:
    """Return the held bytes, extra seconds and runs of each stage under the actions of a plan."""
    count = chain.length
    held, seconds, runs, option = [0] * count, [0.0] * count, [0] * count, [0] * count
    first = True
    for action in plan_actions:
        if isinstance(action, Forward):
            for step in range(action.start, action.stop):
                seconds[step] += chain.stages[step].forward_seconds
                runs[step] += 1
        elif isinstance(action, Tape):
            choice = chain.stages[action.step].choices[action.option]
            option[action.step] = action.option
            seconds[action.step] += choice.forward_seconds
            runs[action.step] += 1
            if first:
                held[action.step] = choice.held_bytes
        elif isinstance(action, Save) and first and action.item is Item.STATE:
            held[action.step] = chain.stages[action.step].state_bytes
        elif isinstance(action, Backward):
            first = False
            choice = chain.stages[action.step].choices[option[action.step]]
            seconds[action.step] += choice.backward_seconds + choice.rerun_seconds
    plain = [stage.forward_seconds + stage.backward_seconds for stage in chain.stages]
    return tuple(StageUse(held_bytes=held[i], extra_seconds=seconds[i] - plain[i], runs=runs[i]) for i in range(count))


def region_rows(record: FitRecord) -> tuple[RegionRow, ...]:
    """Return one row per kind of region and treatment, in the order of their first call."""
    found: dict[tuple[object, ...], list[tuple[Choice, int]]] = {}
    stages = [number for number, stage in enumerate(record.chain.stages) if not stage.pinned]
    starts = _segment_starts(record.assignment.choices)
    for place, (choice, stage) in enumerate(zip(record.assignment.choices, stages, strict=True)):
        moved = (choice.moved, choice.moved_inputs, choice.on_disk)
        treated = (choice.option, choice.held, *moved, choice.tiles, choice.saved_share)
        key = (choice.kind, *treated, choice.sharded_inputs, choice.keep_gathered, starts[place])
        found.setdefault(key, []).append((choice, stage))
    uses = stage_uses(record.chain, record.plan.actions())
    return tuple(_row(record, members, uses, str(key[-1])) for key, members in found.items())


def _segment_starts(choices: tuple[Choice, ...]) -> list[str]:
    """Return for each region the first region of its segment; empty for a region outside a segment."""
    starts = [""] * len(choices)
    for place, choice in enumerate(choices):
        if choice.drop_input and place:
            starts[place - 1] = starts[place - 1] or choices[place - 1].name
            starts[place] = starts[place - 1]
    return starts


def _row(record: FitRecord, members: list[tuple[Choice, int]], uses: tuple[StageUse, ...], start: str) -> RegionRow:
    choice, number = members[0]
    stage = record.chain.stages[number]
    chosen = stage.choices[record.plan.choices[number]]
    whole = min((o.rerun_seconds for o in stage.options if o.kind is OptionKind.RECOMPUTE), default=0.0)
    keeps = choice.option is OptionKind.KEEP
    return RegionRow(
        names=tuple(member.name for member, _ in members),
        option=choice.option,
        held_slots=choice.slots if keeps else len(choice.held),
        slots=choice.slots,
        held_bytes=max(uses[at].held_bytes for _, at in members),
        all_bytes=stage.tape_bytes,
        extra_seconds=sum(uses[at].extra_seconds for _, at in members) / len(members),
        rerun_seconds=chosen.rerun_seconds,
        spared_seconds=whole if keeps else max(0.0, whole - chosen.rerun_seconds),
        moved_bytes=0 if start else chosen.moved_bytes,
        input_moved=bool(choice.moved_inputs),
        on_disk=choice.on_disk,
        sharded_bytes=chosen.sharded_bytes if choice.sharded_inputs else 0,
        keep_gathered=choice.keep_gathered,
        tiles=choice.tiles,
        start=start,
        saved_share=choice.saved_share,
    )


def floor_binding(record: FitRecord) -> str:
    """Return the name of what determines the floor, as the other names are shown."""
    return record.frontier.binding.replace(common_prefix(record), "")


def glue_row(record: FitRecord) -> GlueRow:
    """Return the glue stages as one row."""
    glue = [stage for stage in record.chain.stages if stage.pinned]
    return GlueRow(places=len(glue), held_bytes=sum(stage.tape_bytes for stage in glue))


def folded(names: Iterable[str]) -> str:
    """Join names that differ in their last number only: blocks.0, blocks.1, blocks.2, head -> blocks.0-2, head."""
    return ", ".join(_folded(list(dict.fromkeys(names))))


def _folded(names: list[str]) -> Iterator[str]:
    parts = [(name, *_split(name)) for name in names]
    counted = enumerate(parts)
    for _, group in groupby(counted, key=lambda item: (item[1][1], item[1][3], item[1][2] - item[0])):
        run = [part for _, part in group]
        (first, before, low, after), (_, _, high, _) = run[0], run[-1]
        yield first if len(run) == 1 or low < 0 else f"{before}{low}-{high}{after}"


def _split(name: str) -> tuple[str, int, str]:
    """Split a name around its last number, which is -1 if there is none."""
    match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
    return (match[1], int(match[2]), match[3]) if match else (name, -1, "")
