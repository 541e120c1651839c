"""Options of a region that need several ranks: inputs held in parts, and weights that stay gathered.

Both change another option of the region, with what was measured of the ranks: `EqualInputs` and `GatheredWeights`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from retape.core.units import format_bytes

if TYPE_CHECKING:
    from retape.core.assignment import RegionOption
    from retape.core.problem import Stage
    from retape.torch.engine.trace import RegionTrace
    from retape.torch.planning.profiles.rank_facts import EqualInputs, GatheredWeights


def with_input_in_parts(option: RegionOption, trace: RegionTrace | None, equal: EqualInputs) -> RegionOption:
    """Return the option with a part of the input held instead of all of it, which is gathered before the re-run.

    Of slots, those that show inputs are not held: they would hold the input. The region that made the input counts its bytes.
    """
    cost = option.cost
    less = min(equal.whole_bytes - equal.part_bytes, cost.held_bytes)
    changed = replace(
        cost,
        label=f"{cost.label}, {format_bytes(equal.part_bytes)} of its input of {format_bytes(equal.whole_bytes)}",
        held_bytes=cost.held_bytes - less,
        sharded_bytes=less,
        forward_seconds=cost.forward_seconds + equal.divide_seconds,
        rerun_seconds=cost.rerun_seconds + equal.gather_seconds,
        forward_transient_bytes=cost.forward_transient_bytes + less + equal.part_bytes,
        backward_transient_bytes=cost.backward_transient_bytes + less + equal.part_bytes,
    )
    made = {s for op in trace.ops for s in op.makes} if trace is not None else set()
    held = frozenset(slot for slot in option.held if trace is None or trace.slots[slot] in made)
    return replace(option, cost=changed, held=held, sharded_inputs=equal.numbers)


def with_weights_gathered(option: RegionOption, gathered: GatheredWeights) -> RegionOption:
    """Return the option with the gathered weights held from forward to backward, which then gathers none.

    The weights are among the peaks of both anyway.
    """
    cost = option.cost
    changed = replace(
        cost,
        label=f"{cost.label}, {format_bytes(gathered.bytes)} of weights gathered",
        held_bytes=cost.held_bytes + gathered.bytes,
        backward_seconds=max(0.0, cost.backward_seconds - gathered.seconds),
        forward_transient_bytes=max(0, cost.forward_transient_bytes - gathered.bytes),
        backward_transient_bytes=max(0, cost.backward_transient_bytes - gathered.bytes),
    )
    return replace(option, cost=changed, keep_gathered=True)


def or_weights_gathered(
    stage: Stage, options: tuple[RegionOption, ...], gathered: GatheredWeights
) -> tuple[Stage, tuple[RegionOption, ...]]:
    """Return a stage with each of its options also with weights that stay gathered; the last option stays the last.

    Not those that move something to the host: where that pays, there is no room for weights.
    """
    more = [with_weights_gathered(option, gathered) for option in options if not option.cost.moved_bytes]
    every = (*options[:-1], *more, options[-1]) if len(options) > 1 else (*options, *more)
    return replace(stage, options=tuple(option.cost for option in every[1:])), every
