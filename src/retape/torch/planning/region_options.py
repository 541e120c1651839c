"""Options of one region: select, offload, input moved, tiles and recompute, with their bytes and seconds.

The first half works on a trace alone: which storages a partial re-run holds, and what it costs (`PartialRerun`). Select is solved
on the region's op graph (`core/solvers/graph.py`), from holding nothing to holding everything; the recipe that the engine
would follow gives the ops that a re-run runs. The second half adds what was measured of a region (`MeasuredRegion`) and makes its
`RegionOption`s. Options that need other ranks are in `rank_options.py`, chains of regions in `chain_builder.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from retape.core.assignment import RegionOption
from retape.core.problem import Graph, GraphTensor, Op, Option, OptionKind, Stage, Tier
from retape.core.solvers.coarse_graph import coarsen_graph
from retape.core.solvers.graph import GraphPlanner
from retape.core.units import format_bytes
from retape.torch.engine.recipe_mode import Step
from retape.torch.engine.select import plan_recipe
from retape.torch.engine.trace import RegionTrace, TracedOp

if TYPE_CHECKING:
    from retape.torch.planning.instruments import Overheads
    from retape.torch.planning.region_variants import TiledRun
    from retape.torch.planning.tuning import PlanningTuning

_ANSWERED = (Step.ANSWER, Step.BECOME)
_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


# --- partial re-runs, from a trace alone ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRerun:
    """Slots that are held and moved, and what the re-run that refills the others costs, according to a trace.

    `held_bytes` come on top of the region's output; the re-run does `share` of the ops' seconds and passes `ops_left` ops.
    `forward_bytes` is the peak of a forward above its start before anything is moved, its output included; `rerun_bytes` that of the
    re-run, with what is held and what was moved back. The results of
    the first `hold_collectives` collectives are held too.
    """

    held: frozenset[int]
    held_bytes: int
    share: float
    ops_left: int
    forward_bytes: int
    rerun_bytes: int
    moved: frozenset[int] = field(default_factory=frozenset)
    moved_bytes: int = 0
    hold_collectives: int = 0


def is_steady(trace: RegionTrace | None) -> bool:
    """True if a region runs the same ops for every batch of one shape, so that a slot's number identifies it.

    A collective whose result is written to in place cannot be held: a region with one is re-run whole.
    """
    if trace is None or trace.opaque:
        return trace is not None and trace.compiled
    received = {storage for op in trace.ops if op.collective is not None for storage in op.makes}
    if received and any(not received.isdisjoint(op.writes) for op in trace.ops):
        return False
    return not any(tag in op.op.tags for op in trace.ops for tag in _DATA_DEPENDENT)


def tape_storages(trace: RegionTrace) -> dict[int, int]:
    """Return the storages that a tape holds beyond inputs, weights and the output, with their bytes."""
    made = {storage for op in trace.ops for storage in op.makes}
    return {s: trace.storage_bytes[s] for s in trace.slots if s in made and s not in trace.outputs}


def partial_rerun(
    trace: RegionTrace,
    held_storages: frozenset[int],
    moved_storages: frozenset[int] = frozenset(),
    *,
    hold_collectives: int = 0,
) -> PartialRerun:
    """Return what it costs to hold and move these storages and to recompute the rest."""
    results = trace.collective_storages - trace.outputs if hold_collectives else frozenset[int]()
    there = held_storages | moved_storages
    free = set(range(len(trace.storage_bytes))) - tape_storages(trace).keys()
    held = frozenset(i for i, s in enumerate(trace.slots) if s in held_storages or (there and s in free))
    moved = frozenset(i for i, s in enumerate(trace.slots) if s in moved_storages)
    recipe = plan_recipe(trace, held | moved) if there else None
    steps = recipe.steps if recipe is not None else (Step.RUN,) * len(trace.ops)
    stop, whole = last_missing(trace, held | moved), last_missing(trace, frozenset())
    if recipe is not None:  # a re-run goes on until it has seen again what it was answered with
        stop = max(stop, *(trace.saved_at[slot] for slot in recipe.checked), 0)
    total = sum(op.seconds for op in trace.ops[:whole]) or 1.0
    rows = zip(trace.ops[:stop], steps, strict=False)
    run = sum(op.seconds for op, step in rows if step is Step.RUN and not (hold_collectives and op.collective))
    return PartialRerun(
        held=held,
        held_bytes=sum(trace.storage_bytes[storage] for storage in held_storages | results),
        share=run / total,
        ops_left=stop if recipe is not None else 0,
        forward_bytes=forward_bytes(trace, there | results),
        rerun_bytes=rerun_bytes(trace, there | results, steps, stop),
        hold_collectives=hold_collectives,
        moved=moved,
        moved_bytes=sum(trace.storage_bytes[storage] for storage in moved_storages),
    )


def select_reruns(
    trace: RegionTrace | None, *, most_ops: int | None = None, groups: int = 1, few: bool = False
) -> tuple[PartialRerun, ...]:
    """Return the undominated ways to hold a part of the tape; empty if the region cannot be re-run in part.

    In a graph of more than `most_ops` ops, small ones are joined until at most `groups` are left. With `few`, only ways that hold
    little.
    """
    if trace is None or trace.compiled or not is_steady(trace) or not tape_storages(trace):
        return ()
    graph, names = _graph_of(trace)
    whole = sum(tape_storages(trace).values())
    is_small = most_ops is None or len(graph.ops) <= most_ops
    coarse = coarsen_graph(graph, len(graph.ops) if is_small else groups, whole)
    solved = [coarse.expand(each.held) for each in GraphPlanner(coarse.graph).holdings(few=few)]
    holdings = {frozenset(names[n] for n in held if n in names) for held in solved}
    communicates = len(trace.collectives())
    reruns = [partial_rerun(trace, held, hold_collectives=communicates) for held in holdings if held or communicates]
    found = sorted(reruns, key=lambda each: (each.held_bytes, each.share))
    kept: list[PartialRerun] = []
    for each in found:
        if each.held_bytes < whole and (not kept or each.share < kept[-1].share):
            kept.append(each)
    return tuple(kept)


def same_selections(
    trace: RegionTrace | None, other: RegionTrace | None, selections: tuple[PartialRerun, ...]
) -> tuple[PartialRerun, ...]:
    """Return selections of another trace for this one, if both have the same number of slots and can be re-run in part."""
    if trace is other:
        return selections
    if trace is None or other is None or not is_steady(trace) or len(trace.slots) != len(other.slots):
        return ()
    tape = tape_storages(trace).keys()
    storages = [frozenset(trace.slots[slot] for slot in each.held) & tape for each in selections]
    return tuple(partial_rerun(trace, held) for held in storages if held)


def offload_reruns(
    trace: RegionTrace | None,
    selections: tuple[PartialRerun, ...],
    targets: Iterable[int],
    *,
    small_parts: int,
    small_bytes: int,
) -> tuple[PartialRerun, ...]:
    """Return ways to move about as many bytes as each of `targets`: of the whole tape, and of what each selection holds.

    The largest storages go first, which takes the fewest copies; those below `small_bytes`, or below 1/`small_parts` of the tape if
    that is less, stay on the device.
    """
    if trace is None or not is_steady(trace):
        return ()
    tape = tape_storages(trace)
    least = min(sum(tape.values()) // small_parts, small_bytes)
    wholes = [
        frozenset(tape),
        *(frozenset(tape.keys() & {trace.slots[slot] for slot in each.held}) for each in selections),
    ]
    found: dict[tuple[frozenset[int], frozenset[int]], None] = {}
    for whole in wholes:
        large = sorted((s for s in whole if tape[s] > least), key=lambda storage: (-tape[storage], storage))
        for target in targets:
            moved = _up_to(target, large, tape)
            if moved:
                found[whole - moved, moved] = None
    communicates = len(trace.collectives())
    return tuple(partial_rerun(trace, held, moved, hold_collectives=communicates) for held, moved in found)


def _up_to(target: int, storages: list[int], sizes: dict[int, int]) -> frozenset[int]:
    """Return the first of the storages that fit into `target` bytes together."""
    chosen, total = [], 0
    for storage in storages:
        if total + sizes[storage] <= target:
            chosen.append(storage)
            total += sizes[storage]
    return frozenset(chosen)


def _graph_of(trace: RegionTrace) -> tuple[Graph, dict[str, int]]:
    """Return the region's ops as a graph of storages, and which of its tensors are storages that can be held.

    Each write to a storage makes a new tensor, unless nothing read it before: then the op that makes it and the writes are one op.
    """
    return _GraphMaker(trace).graph()


class _GraphMaker:
    def __init__(self, trace: RegionTrace) -> None:
        self._trace = trace
        answered = trace.collective_storages  # held in any case: for the ops after them they are inputs
        self._tape = {s: size for s, size in tape_storages(trace).items() if s not in answered}
        self._too_much = sum(self._tape.values()) + 1  # a size that no holding has room for
        self._settled = trace.settled()
        self._made = {storage for op in trace.ops if op.collective is None for storage in op.makes}
        self._rewritten = {storage for op in trace.ops for storage in op.writes} - self._settled
        self._write_counts: dict[int, int] = defaultdict(int)
        self._sizes: dict[str, int] = {}

    def _name(self, storage: int) -> str:
        text = f"{storage}.{self._write_counts[storage]}"
        holdable = storage in self._tape and storage not in self._rewritten
        size = self._tape[storage] if holdable else self._too_much if storage in self._made else 0
        self._sizes.setdefault(text, size)
        return text

    def graph(self) -> tuple[Graph, dict[str, int]]:
        trace = self._trace
        inputs = {self._name(s) for s in range(len(trace.storage_bytes)) if s not in self._made}
        ops = [self._op(number, group) for number, group in enumerate(self._groups())]
        saved = tuple(dict.fromkeys(self._name(storage) for storage in trace.slots))
        graph = Graph(
            ops=tuple(ops),
            tensors=tuple(GraphTensor(name=text, bytes=size) for text, size in self._sizes.items()),
            inputs=tuple(sorted(inputs)),
            saved=saved,
        )
        return graph, {f"{storage}.0": storage for storage in self._tape}

    def _groups(self) -> list[list[TracedOp]]:
        """Return the ops that compute something, in groups: writes to a settled storage go with the op that makes it."""
        pending: dict[int, list[TracedOp]] = {}
        last = {s: i for i, op in enumerate(self._trace.ops) for s in op.writes if s in self._settled}
        groups: list[list[TracedOp]] = []
        for number, op in enumerate(self._trace.ops):
            if op.is_view or op.collective is not None or not (op.makes or op.writes):
                continue
            touched = [s for s in dict.fromkeys((*op.makes, *op.writes)) if s in self._settled]
            group = [*(pending.pop(touched[0], []) if touched else []), op]
            if touched and number < last[touched[0]]:
                pending[touched[0]] = group
            else:
                groups.append(group)
        return groups

    def _op(self, number: int, group: list[TracedOp]) -> Op:
        reads: dict[str, None] = {}
        outputs: dict[str, None] = {}
        for op in group:
            own = {s for each in group for s in each.makes}
            if not op.uninitialised:
                reads.update(dict.fromkeys(self._name(s) for s in op.reads if s not in own))
            for storage in op.writes:
                if storage not in self._settled:
                    self._write_counts[storage] += 1
            outputs.update(dict.fromkeys(self._name(s) for s in (*op.makes, *op.writes)))
        seconds = sum(op.seconds for op in group)
        return Op(name=f"{number} {group[-1].op}", seconds=seconds, inputs=tuple(reads), outputs=tuple(outputs))


def forward_bytes(trace: RegionTrace, held_storages: frozenset[int]) -> int:
    """Return the peak of a forward above its start if it holds these storages; temporaries live as long as in the trace."""
    return _highest(trace, held_storages | trace.outputs, (Step.RUN,) * len(trace.ops), len(trace.ops))


def rerun_bytes(trace: RegionTrace, held_storages: frozenset[int], steps: tuple[Step, ...], stop: int) -> int:
    """Return the peak of a re-run of the first `stop` ops above the region's start: held, refilled and made bytes."""
    held = sum(trace.storage_bytes[storage] for storage in held_storages)
    refilled = frozenset(storage for storage in trace.slots if storage not in held_storages)
    return held + _highest(trace, refilled, steps, stop)


def _highest(trace: RegionTrace, kept: frozenset[int], steps: tuple[Step, ...], stop: int) -> int:
    """Return the most bytes that ops make and that live at once; `kept` live to the end, and answered ops make nothing."""
    gone: dict[int, int] = defaultdict(int)
    live = peak = 0
    for number, (op, step) in enumerate(zip(trace.ops[:stop], steps, strict=False)):
        live -= gone.pop(number, 0)
        for storage in () if step in _ANSWERED else op.makes:
            live += trace.storage_bytes[storage]
            if storage not in kept:
                gone[trace.died[storage]] += trace.storage_bytes[storage]
        peak = max(peak, live)
    return peak


def rerun_share(trace: RegionTrace) -> float:
    """Return the share of a forward's seconds that a whole re-run takes: it stops after the last slot."""
    total = sum(op.seconds for op in trace.ops)
    return sum(op.seconds for op in trace.ops[: last_missing(trace, frozenset())]) / total if total else 1.0


def last_missing(trace: RegionTrace, held: frozenset[int]) -> int:
    """Return after how many ops a re-run has refilled the last slot that is not held, and stops."""
    return max((at for slot, at in enumerate(trace.saved_at) if slot not in held), default=0)


# --- options, from what was measured ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRegion:
    """Figures of one call of a region while it was recomputed, and the options that follow from them.

    Bytes are above what lived when the region began. `linked` are the inputs that other regions made, by their numbers among the
    call's tensors. `lane_seconds` is the region's share of the copy stream to the host if it moves its input. `saved_share` and
    `tiles` name the compiled variant that it ran in. `gradient_bytes` of weights appear in its backward, and are in `backward_bytes`.
    """

    name: str
    has_tape: bool
    linked: frozenset[int]
    trace: RegionTrace | None
    output_bytes: int
    forward_bytes: int
    rerun_bytes: int
    backward_bytes: int
    engine_seconds: float
    body_seconds: float
    rerun_seconds: float
    backward_seconds: float
    lane_seconds: float
    overheads: Overheads
    tuning: PlanningTuning
    saved_share: float | None = None
    tiles: int = 1
    tiled: tuple[str, ...] = ()
    gradient_bytes: int = 0

    # Bytes that were measured and that no op of the trace shows, and the share of a forward that a whole re-run does.
    _unseen_forward: int = field(init=False)
    _unseen_rerun: int = field(init=False)
    _rerun_share: float = field(init=False)

    def __post_init__(self) -> None:
        forward = rerun = 0
        share = 1.0
        if self.trace is not None:
            dropped = partial_rerun(self.trace, frozenset())
            forward = max(0, self.forward_bytes - dropped.forward_bytes)
            rerun = max(0, self.rerun_bytes - dropped.rerun_bytes)
            share = rerun_share(self.trace)
        for name, value in (("_unseen_forward", forward), ("_unseen_rerun", rerun), ("_rerun_share", share)):
            object.__setattr__(self, name, value)

    @property
    def forward_seconds(self) -> float:
        return self.engine_seconds + self.body_seconds

    def stage(self, options: list[RegionOption], *, state_bytes: int) -> tuple[Stage, tuple[RegionOption, ...]]:
        """Return the region as a stage of a chain, and what each of its choices asks: keep first, recompute last."""
        forward, backward = self._kept_seconds()
        tape = {} if self.trace is None else tape_storages(self.trace)
        held = self.output_bytes + sum(tape.values())
        own = [*options, self.recompute()] if self.has_tape else []
        stage = Stage(
            name=self.name,
            forward_seconds=forward,
            backward_seconds=backward,
            state_bytes=state_bytes,
            tape_bytes=held,
            forward_transient_bytes=max(0, self._forward_peak(frozenset(tape)) - held),
            backward_transient_bytes=max(0, self.backward_bytes - held),
            rerun_transient_bytes=max(0, self.rerun_bytes - held),
            untaped_transient_bytes=max(0, self.forward_bytes - self.output_bytes),
            options=tuple(option.cost for option in own),
            gradient_bytes=self.gradient_bytes,
        )
        return stage, (RegionOption(cost=stage.choices[0], saved_share=self.saved_share), *own)

    def _asking(self, cost: Option, rerun: PartialRerun | None = None) -> RegionOption:
        """Return an option of this region in the variant that it was measured in."""
        slots = None if self.trace is None else len(self.trace.slots)
        option = RegionOption(cost=cost, saved_share=self.saved_share, tiles=self.tiles, tiled=self.tiled, slots=slots)
        if rerun is None:
            return option
        return replace(option, held=rerun.held, moved=rerun.moved, hold_collectives=rerun.hold_collectives)

    def keep(self) -> RegionOption:
        """Return the option to keep all of the tape of this compiled variant."""
        tape = {} if self.trace is None else tape_storages(self.trace)
        cost = self._cost(
            OptionKind.KEEP,
            sum(tape.values()),
            0.0,
            forward=self._forward_peak(frozenset(tape)),
            rerun_peak=self.backward_bytes,
        )
        forward, backward = self._kept_seconds()
        label = f"keep {format_bytes(cost.held_bytes)}{self._in_tiles}"
        cost = replace(cost, label=label, forward_seconds=forward, backward_seconds=backward)
        slots = frozenset(range(len(self.trace.slots) if self.trace is not None else 0))
        return replace(self._asking(cost), held=slots)

    @property
    def _in_tiles(self) -> str:
        some = f"{len(self.tiled)} parts " if len(self.tiled) > 1 else ""
        return f", {some}in {self.tiles} tiles" if self.tiles > 1 else ""

    def _kept_seconds(self) -> tuple[float, float]:
        """Return forward and backward seconds without the engine."""
        slots = 0 if self.trace is None else len(self.trace.slots)
        pack, unpack = slots * self.overheads.pack_seconds, slots * self.overheads.unpack_seconds
        return max(0.0, self.body_seconds - pack), max(0.0, self.backward_seconds - unpack)

    def _forward_peak(self, held: frozenset[int]) -> int:
        """Return the peak of a forward that holds these storages: by the trace, plus what was measured beyond it."""
        if self.trace is None:
            return self.forward_bytes
        return forward_bytes(self.trace, held) + self._unseen_forward

    def _recompute(self) -> Option:
        return self._cost(
            OptionKind.RECOMPUTE, 0, self.rerun_seconds, forward=self.forward_bytes, rerun_peak=self.rerun_bytes
        )

    def recompute(self) -> RegionOption:
        """Return the option to recompute this region."""
        return self._asking(self._recompute())

    def _partial_seconds(self, rerun: PartialRerun) -> float:
        if not rerun.ops_left and not rerun.share:
            return 0.0  # nothing is missing
        # Of a whole re-run, what is not the function itself is the engine's, and stays however few ops are run.
        function = min(self.rerun_seconds, self.body_seconds * self._rerun_share)
        return function * rerun.share + self.rerun_seconds - function + rerun.ops_left * self.overheads.op_seconds

    def select(self, rerun: PartialRerun) -> RegionOption:
        """Return the option to hold some slots and recompute the others."""
        cost = self._cost(
            OptionKind.SELECT,
            rerun.held_bytes,
            self._partial_seconds(rerun),
            forward=rerun.forward_bytes + self._unseen_forward,
            rerun_peak=rerun.rerun_bytes + self._unseen_rerun,
        )
        return self._asking(cost, rerun)

    def in_tiles(self, runs: tuple[TiledRun, ...]) -> list[MeasuredRegion]:
        """Return the region with its parts in tiles: lower and slower by as much as one region alone was."""
        return [self._in_run(runs[0], run) for run in runs[1:]]

    def _in_run(self, whole: TiledRun, run: TiledRun) -> MeasuredRegion:
        back = max(self.rerun_bytes, self.backward_bytes) - max(0, whole.backward_bytes - run.backward_bytes)
        # A re-run ends before the parts in tiles; these are run again in the backward.
        shares = self._rerun_share, 1.0 if run.trace is None else rerun_share(run.trace)
        less = min(self.rerun_seconds, max(0.0, self.body_seconds * (shares[0] - shares[1])))
        return replace(
            self,
            trace=run.trace,
            tiles=run.tiles,
            tiled=run.parts,
            forward_bytes=self.forward_bytes - max(0, whole.forward_bytes - run.forward_bytes),
            rerun_bytes=back,
            backward_bytes=back,
            rerun_seconds=self.rerun_seconds - less,
            backward_seconds=self.backward_seconds + max(0.0, less + run.seconds - whole.seconds),
        )

    def recompute_in_tiles(self) -> RegionOption:
        """Return the option to recompute this region, whose parts are in tiles."""
        cost = replace(self._recompute(), kind=OptionKind.TILE, label=f"recompute{self._in_tiles}")
        return self._asking(cost)

    def offload_candidates(
        self, selections: tuple[PartialRerun, ...], host: Tier, shares: tuple[float, ...]
    ) -> tuple[PartialRerun, ...]:
        """Return ways to move slots: shares of the bytes that the computation hides, and all that the host has room for."""
        free = min(
            host.write_bytes_per_second * self.forward_seconds, host.read_bytes_per_second * self.backward_seconds
        )
        most = float("inf") if host.capacity_bytes is None else host.capacity_bytes
        whole = sum(tape_storages(self.trace).values()) if self.trace is not None else 0
        sizes = (*(share * free for share in shares), whole)
        targets = sorted({int(min(size, most, whole)) for size in sizes})
        small_parts, small_bytes = self.tuning.small_storage_parts, self.tuning.small_storage_bytes
        return offload_reruns(self.trace, selections, targets, small_parts=small_parts, small_bytes=small_bytes)

    def offload(self, reruns: tuple[PartialRerun, ...], host: Tier) -> list[RegionOption]:
        """Return the undominated options to move slots."""
        return self._some([self._asking(self._offload_cost(rerun, host), rerun) for rerun in reruns])

    def input_moved(self, options: list[RegionOption], size: int, host: Tier) -> list[RegionOption]:
        """Return the undominated options to recompute, and to do as `options` do, with the input of `size` bytes moved too."""
        if not self.has_tape:
            return []
        made = [self._with_input_moved(option, size, host) for option in options]
        fitting = [option for option in made if has_room(host, option.cost.moved_bytes)]
        in_tiles = [option for option in fitting if option.tiles > self.tiles]
        others = self._some([option for option in fitting if option.tiles == self.tiles])
        return [*others, *in_tiles, self._with_input_moved(self.recompute(), size, host)]

    def _with_input_moved(self, option: RegionOption, size: int, host: Tier) -> RegionOption:
        """Return the option with the input moved to the host beside this forward or the next.

        The region that made the input counts its bytes, so that many fewer are held from there on. The copy may also use the next
        forward: what counts is the region's share of the copy stream, and the bytes in flight are added to each forward. The input of
        the region before this one comes back beside this backward.
        """
        cost = option.cost
        moved = cost.moved_bytes + size
        less = min(size, cost.held_bytes)
        # Without the waits for the slots of the option alone: its copies and that of the input share the copy streams.
        forward = cost.forward_seconds - cost.forward_stall_seconds
        backward = cost.backward_seconds - cost.backward_stall_seconds
        out = max(0.0, host.write_seconds(moved) - self.lane_seconds)
        back = max(0.0, host.read_seconds(moved) - backward - cost.rerun_seconds)
        changed = replace(
            cost,
            kind=OptionKind.OFFLOAD,
            on_disk=host.is_disk,
            label=f"{cost.label}, input of {format_bytes(size)} moved",
            held_bytes=cost.held_bytes - less,
            moved_bytes=moved,
            input_bytes=size,
            forward_seconds=forward + out,
            forward_stall_seconds=out,
            backward_seconds=backward + back,
            backward_stall_seconds=back,
            forward_transient_bytes=cost.forward_transient_bytes + less + size,
            forward_flight_bytes=cost.forward_flight_bytes + size,
            backward_transient_bytes=cost.backward_transient_bytes + less + size,
            backward_flight_bytes=cost.backward_flight_bytes + size,
        )
        return replace(option, cost=changed, moved_inputs=self.linked)

    def _offload_cost(self, rerun: PartialRerun, host: Tier) -> Option:
        """Return the cost of moving slots; the bytes that the region before it moved are in flight beside its own."""
        seconds, moved = self._partial_seconds(rerun), rerun.moved_bytes
        out = max(0.0, host.write_seconds(moved) - self.forward_seconds)  # the device waits when the next region ends
        back = max(0.0, host.read_seconds(moved) - self.backward_seconds - seconds)
        cost = self._cost(
            OptionKind.OFFLOAD,
            rerun.held_bytes,
            seconds,
            forward=rerun.forward_bytes + self._unseen_forward + moved,
            rerun_peak=max(rerun.rerun_bytes + self._unseen_rerun, self.backward_bytes) + moved,
        )
        return replace(
            cost,
            label=f"offload {format_bytes(moved)}, hold {format_bytes(rerun.held_bytes)}{self._in_tiles}",
            moved_bytes=moved,
            on_disk=host.is_disk,
            backward_seconds=cost.backward_seconds + back,
            backward_stall_seconds=back,
            forward_seconds=cost.forward_seconds + out,
            forward_stall_seconds=out,
            forward_flight_bytes=min(moved, cost.forward_transient_bytes),
            backward_flight_bytes=min(moved, cost.backward_transient_bytes),
        )

    def _cost(
        self,
        kind: OptionKind,
        more_bytes: int,
        rerun: float,
        *,
        forward: int,
        rerun_peak: int,
        backward: int | None = None,
    ) -> Option:
        held = self.output_bytes + more_bytes
        backward = self.backward_bytes if backward is None else backward
        return Option(
            kind=kind,
            label=f"{kind.value} {format_bytes(more_bytes)}{self._in_tiles}" if more_bytes else kind.value,
            held_bytes=held,
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
            rerun_seconds=rerun,
            forward_transient_bytes=max(0, forward - held),
            backward_transient_bytes=max(0, max(rerun_peak, backward) - held),
        )

    def _some(self, options: list[RegionOption]) -> list[RegionOption]:
        """Return the undominated options, evenly thinned if there are too many."""
        kept = undominated(options)
        return kept[:: -(-len(kept) // self.tuning.most_offload_options)] if kept else []


def has_room(host: Tier, size: int) -> bool:
    """True if the host, or a region's part of it, can take this many bytes."""
    return host.capacity_bytes is None or size <= host.capacity_bytes


def undominated(options: list[RegionOption]) -> list[RegionOption]:
    """Return the options that no other is at least as good as in bytes, seconds and both peaks."""
    kept: list[RegionOption] = []
    for option in sorted(options, key=lambda option: (option.cost.held_bytes, _seconds(option.cost))):
        if not any(_is_as_good(other.cost, option.cost) for other in kept):
            kept.append(option)
    return kept


def _seconds(cost: Option) -> float:
    return cost.forward_seconds + cost.backward_seconds + cost.rerun_seconds


def _is_as_good(one: Option, other: Option) -> bool:
    return (
        one.held_bytes <= other.held_bytes
        and _seconds(one) <= _seconds(other)
        and one.forward_transient_bytes <= other.forward_transient_bytes
        and one.backward_transient_bytes <= other.backward_transient_bytes
    )
