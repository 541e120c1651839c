"""The ways to treat one measured region, as the options of a stage: select, offload, its input moved, tiles, recompute.

Its sizes are told from how many bytes lived when it began. What becomes of the regions together is in `modelling.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from retape.core.problem import Option, OptionKind, Stage, Tier
from retape.core.units import format_bytes
from retape.torch.engine.trace import RegionTrace
from retape.torch.planning.chain.glue import Levels
from retape.torch.planning.chain.treatments import (
    Treatment,
    forward_bytes,
    offload_treatments,
    rerun_share,
    tape_storages,
    treat,
)
from retape.torch.planning.profile import RegionCall
from retape.torch.planning.profile_intervals import RegionBytes, RegionSeconds
from retape.torch.planning.variants.tiling import Tiling

MOST_OFFLOADS = 12  # ways to move a region's slots that a plan may choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What the engine itself costs: seconds for each op under a recipe, which no profile shows, and for each slot to pack and to
    unpack it, which every profile shows and a region that is kept does not pay.
    """

    op_seconds: float = 0.0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledStage:
    """A stage of the chain: the region's number in the profile (None for glue), the slots that each choice holds and moves, the
    inputs that it moves, and in how many tiles it runs the parts `tiled`.

    The first choice keeps everything and is no region at all; the last recomputes everything.
    """

    region: int | None
    held: tuple[frozenset[int] | None, ...] = (None,)
    moved: tuple[frozenset[int], ...] = (frozenset(),)
    moved_inputs: tuple[frozenset[int], ...] = (frozenset(),)
    tiles: tuple[int, ...] = (1,)
    tiled: tuple[str, ...] = ()
    saved_shares: tuple[float | None, ...] = (None,)

    def only(self, choices: list[int]) -> ModelledStage:
        """The same stage with fewer choices."""
        if len(self.held) == 1:
            return self
        return replace(
            self,
            held=tuple(self.held[i] for i in choices),
            moved=tuple(self.moved[i] for i in choices),
            moved_inputs=tuple(self.moved_inputs[i] for i in choices),
            tiles=tuple(self.tiles[i] for i in choices),
            saved_shares=tuple(self.saved_shares[i] for i in choices),
        )


def has_room(host: Tier, size: int, regions: int) -> bool:
    """Whether the host can take so much of every region."""
    return host.capacity_bytes is None or size * regions <= host.capacity_bytes


class MeasuredRegion:
    """The figures of one region, and the stage that they make."""

    def __init__(
        self,
        call: RegionCall,
        measured: RegionBytes,
        seconds: RegionSeconds,
        *,
        levels: Levels,
        trace: RegionTrace | None,
        overheads: Overheads,
        saved_share: float | None = None,
        tiles: int = 1,
        lane_seconds: float,
    ) -> None:
        """`lane_seconds` is the region's share of the lane out where it moves its input."""
        self._call, self._seconds, self._overheads = call, seconds, overheads
        self._forward_seconds, self._lane_seconds = seconds.forward + seconds.body, lane_seconds
        self._trace = trace
        self._saved_share, self._tiles = saved_share, tiles
        self.kind = call.kind
        begin = levels.starts[call.stage]
        self._output_bytes = levels.ends[call.stage] - begin
        self._forward_bytes = measured.forward_peak - begin
        self._rerun_bytes = measured.rerun_peak - begin
        self._backward_bytes = measured.backward_peak - begin
        self._unseen_forward = self._unseen_rerun = 0  # what was measured and no op of the trace shows
        self._rerun_share = 1.0
        if trace is not None:
            dropped = treat(trace, frozenset())
            self._unseen_forward = max(0, self._forward_bytes - dropped.forward_bytes)
            self._unseen_rerun = max(0, self._rerun_bytes - dropped.rerun_bytes)
            self._rerun_share = rerun_share(trace)

    def stage(self, ways: list[Way], *, state_bytes: int, tiled: tuple[str, ...]) -> tuple[Stage, ModelledStage]:
        forward, backward = self._kept_seconds()
        tape = {} if self._trace is None else tape_storages(self._trace)
        held = self._output_bytes + sum(tape.values())
        options = (*(way.option for way in ways), self._recompute()) if self._call.has_tape else ()
        stage = Stage(
            name=self._call.name,
            forward_seconds=forward,
            backward_seconds=backward,
            state_bytes=state_bytes,
            tape_bytes=held,
            forward_transient_bytes=max(0, self._forward_peak(frozenset(tape)) - held),
            backward_transient_bytes=max(0, self._backward_bytes - held),
            rerun_transient_bytes=max(0, self._rerun_bytes - held),
            untaped_transient_bytes=max(0, self._forward_bytes - self._output_bytes),
            options=options,
        )
        own = self._saved_share
        if not options:
            return stage, ModelledStage(region=self._call.stage, saved_shares=(own,))
        nothing = frozenset[int]()
        return stage, ModelledStage(
            region=self._call.stage,
            held=(None, *(way.held for way in ways), nothing),
            moved=(nothing, *(way.moved for way in ways), nothing),
            moved_inputs=(nothing, *(way.moved_inputs for way in ways), nothing),
            tiles=(1, *(way.tiles for way in ways), 1),
            tiled=tiled,
            saved_shares=(own, *(way.saved_share for way in ways), own),
        )

    def kept(self) -> Way:
        """To keep all of the tape of this form."""
        tape = {} if self._trace is None else tape_storages(self._trace)
        option = self._option(
            OptionKind.KEEP,
            sum(tape.values()),
            0.0,
            forward=self._forward_peak(frozenset(tape)),
            rerun_peak=self._backward_bytes,
        )
        forward, backward = self._kept_seconds()
        label = f"keep {format_bytes(option.held_bytes)}{self._in_tiles}"
        option = replace(option, label=label, forward_seconds=forward, backward_seconds=backward)
        slots = frozenset(range(len(self._trace.slots) if self._trace is not None else 0))
        return Way(option=option, held=slots, saved_share=self._saved_share, tiles=self._tiles)

    @property
    def _in_tiles(self) -> str:
        return f", in {self._tiles} tiles" if self._tiles > 1 else ""

    def _kept_seconds(self) -> tuple[float, float]:
        """Forward and backward without the engine."""
        slots = 0 if self._trace is None else len(self._trace.slots)
        pack, unpack = slots * self._overheads.pack_seconds, slots * self._overheads.unpack_seconds
        return max(0.0, self._seconds.body - pack), max(0.0, self._seconds.backward - unpack)

    def _forward_peak(self, held: frozenset[int]) -> int:
        """How high its forward stands when it holds these storages: as played through, and as much more as was measured without."""
        if self._trace is None:
            return self._forward_bytes
        return forward_bytes(self._trace, held) + self._unseen_forward

    def _recompute(self) -> Option:
        return self._option(
            OptionKind.RECOMPUTE, 0, self._seconds.rerun, forward=self._forward_bytes, rerun_peak=self._rerun_bytes
        )

    def _rerun_seconds(self, way: Treatment) -> float:
        if not way.ops_left and not way.share:
            return 0.0  # nothing is missing
        # Of a whole re-run, what is not the function itself is the engine's, and stays however few ops are run.
        function = min(self._seconds.rerun, self._seconds.body * self._rerun_share)
        return function * way.share + self._seconds.rerun - function + way.ops_left * self._overheads.op_seconds

    def select(self, way: Treatment) -> Way:
        option = self._option(
            OptionKind.SELECT,
            way.held_bytes,
            self._rerun_seconds(way),
            forward=way.forward_bytes + self._unseen_forward,
            rerun_peak=way.rerun_bytes + self._unseen_rerun,
        )
        return Way(option=option, held=way.held, saved_share=self._saved_share, tiles=self._tiles)

    def tiled(self, tiling: Tiling) -> list[Way]:
        """Recompute, with parts in tiles: as much lower and as much longer as one region by itself was with them."""
        whole, *others = tiling.runs or (None,)
        found = []
        for run in others:
            assert whole is not None
            back = max(self._rerun_bytes, self._backward_bytes) - max(0, whole.backward_bytes - run.backward_bytes)
            option = self._option(
                OptionKind.TILE,
                0,
                max(0.0, self._seconds.rerun + run.seconds - whole.seconds),
                forward=self._forward_bytes - max(0, whole.forward_bytes - run.forward_bytes),
                rerun_peak=back,
                backward=back,
            )
            option = replace(option, label=f"recompute, in {run.tiles} tiles")
            found.append(Way(option=option, tiles=run.tiles))
        return found

    def targets_moved(self, selections: tuple[Treatment, ...], host: Tier, regions: int) -> tuple[Treatment, ...]:
        """What may be moved: as much as the computation hides, half and twice of that, and all, if the host has room for all regions."""
        seconds = self._seconds
        free = min(
            host.write_bytes_per_second * self._forward_seconds,
            host.read_bytes_per_second * seconds.backward,
        )
        most = float("inf") if host.capacity_bytes is None else host.capacity_bytes // regions
        whole = sum(tape_storages(self._trace).values()) if self._trace is not None else 0
        targets = sorted({int(min(size, most, whole)) for size in (free / 2, free, 2 * free, whole)})
        return offload_treatments(self._trace, selections, targets)

    def moving(self, ways: tuple[Treatment, ...], host: Tier) -> list[Way]:
        """The ways to move slots that are worth it: no other is at least as good in every respect."""
        made = [Way(self._offload(way, host), way.held, way.moved) for way in ways]
        return worth_having([way._replace(saved_share=self._saved_share, tiles=self._tiles) for way in made])

    def moving_input(self, ways: list[Way], size: int, host: Tier, regions: int) -> list[Way]:
        """What is worth it of recomputing with the input moved, and of `ways` with the input moved too."""
        if not self._call.has_tape:
            return []
        made = [self._with_input_moved(way, size, host) for way in ways]
        fitting = [way for way in made if has_room(host, way.option.moved_bytes, regions)]
        in_tiles = [way for way in fitting if way.tiles > self._tiles]
        others = worth_having([way for way in fitting if way.tiles == self._tiles])
        bare = Way(option=self._recompute(), saved_share=self._saved_share, tiles=self._tiles)
        return [*others, *in_tiles, self._with_input_moved(bare, size, host)]

    def _with_input_moved(self, way: Way, size: int, host: Tier) -> Way:
        """The input is counted by whoever made it, and leaves beside this forward or the next: so much less is held from there on.

        Since it has the next forward too, what counts is the region's share of the lane; and so many more bytes are on their way beside
        each forward. The input of the region before this one comes back beside this backward.
        """
        option, seconds = way.option, self._seconds
        moved = option.moved_bytes + size
        less = min(size, option.held_bytes)
        out = max(0.0, host.write_seconds(moved) - self._lane_seconds)
        back = max(0.0, host.read_seconds(moved) - seconds.backward - option.rerun_seconds)
        changed = replace(
            option,
            kind=OptionKind.OFFLOAD,
            label=f"{option.label}, input of {format_bytes(size)} moved",
            held_bytes=option.held_bytes - less,
            moved_bytes=moved,
            input_bytes=size,
            forward_seconds=self._forward_seconds + out,
            forward_stall_seconds=out,
            backward_seconds=seconds.backward + back,
            backward_stall_seconds=back,
            forward_transient_bytes=option.forward_transient_bytes + less + size,
            forward_flight_bytes=option.forward_flight_bytes + size,
            backward_transient_bytes=option.backward_transient_bytes + less + size,
            backward_flight_bytes=option.backward_flight_bytes + size,
        )
        return way._replace(option=changed, moved_inputs=self._call.linked)

    def _offload(self, way: Treatment, host: Tier) -> Option:
        """Beside its own, the bytes are on their way that the region before it moved: out in its forward, back in its backward."""
        rerun, moved = self._rerun_seconds(way), way.moved_bytes
        out = max(
            0.0, host.write_seconds(moved) - self._forward_seconds
        )  # when the next region ends, the device waits for it
        back = max(0.0, host.read_seconds(moved) - self._seconds.backward - rerun)
        option = self._option(
            OptionKind.OFFLOAD,
            way.held_bytes,
            rerun,
            forward=way.forward_bytes + self._unseen_forward + moved,
            rerun_peak=max(way.rerun_bytes + self._unseen_rerun, self._backward_bytes) + moved,
        )
        return replace(
            option,
            label=f"offload {format_bytes(moved)}, hold {format_bytes(way.held_bytes)}{self._in_tiles}",
            moved_bytes=moved,
            backward_seconds=option.backward_seconds + back,
            backward_stall_seconds=back,
            forward_seconds=option.forward_seconds + out,
            forward_stall_seconds=out,
            forward_flight_bytes=min(moved, option.forward_transient_bytes),
            backward_flight_bytes=min(moved, option.backward_transient_bytes),
        )

    def _option(
        self,
        kind: OptionKind,
        more_bytes: int,
        rerun: float,
        *,
        forward: int,
        rerun_peak: int,
        backward: int | None = None,
    ) -> Option:
        held = self._output_bytes + more_bytes
        backward = self._backward_bytes if backward is None else backward
        return Option(
            kind=kind,
            label=kind.value if not more_bytes else f"{kind.value} {format_bytes(more_bytes)}",
            held_bytes=held,
            forward_seconds=self._forward_seconds,
            backward_seconds=self._seconds.backward,
            rerun_seconds=rerun,
            forward_transient_bytes=max(0, forward - held),
            backward_transient_bytes=max(0, max(rerun_peak, backward) - held),
        )


class Way(NamedTuple):
    """An option of a stage, and what it asks of the region."""

    option: Option
    held: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    moved_inputs: frozenset[int] = frozenset()
    tiles: int = 1
    saved_share: float | None = None


def undominated(ways: list[Way]) -> list[Way]:
    """Those that no other is as good as in every respect."""
    kept: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.option.held_bytes, _taken(way.option))):
        if not any(_is_as_good(other.option, way.option) for other in kept):
            kept.append(way)
    return kept


def worth_having(ways: list[Way]) -> list[Way]:
    """The same, and of very many some."""
    kept = undominated(ways)
    return kept[:: -(-len(kept) // MOST_OFFLOADS)] if kept else []


def _taken(option: Option) -> float:
    return option.forward_seconds + option.backward_seconds + option.rerun_seconds


def _is_as_good(one: Option, other: Option) -> bool:
    return (
        one.held_bytes <= other.held_bytes
        and _taken(one) <= _taken(other)
        and one.forward_transient_bytes <= other.forward_transient_bytes
        and one.backward_transient_bytes <= other.backward_transient_bytes
    )
