"""Bytes and seconds of a Loop, a Chain or a Graph while it runs. The rules of the machine are in `machine.py`.

A Chain counts by identity: state `i` is counted once however often it is held (as a snapshot, as the working state, as the
input of tape `i`), and not at all while tape `i - 1`, which contains it, is held. A Loop counts stored items alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from retape.core.actions import Item
from retape.core.errors import InvalidInput
from retape.core.problem import Chain, Graph, Loop, Op, Option


class LoopLedger:
    """Sizes and times of equal steps. The machine counts what is stored, so the ledger itself holds nothing."""

    def __init__(self, loop: Loop) -> None:
        assert loop.steps is not None
        self.length = loop.steps
        self._loop = loop

    def option_count(self, step: int) -> int:
        return 1

    def option_of(self, step: int) -> Option | None:
        """Return the option with which a stage was taped last."""
        return None

    def pinned_within(self, start: int, stop: int) -> int | None:
        """Return the first pinned stage from `start` on, before `stop`."""
        return None

    def is_pinned(self, step: int) -> bool:
        return False

    def advances(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts in which to advance: all at once, or a stage at a time if their sizes differ."""
        yield start, stop

    def forward_seconds(self, start: int, stop: int) -> float:
        return self._loop.forward_seconds * (stop - start)

    def tape_seconds(self, step: int, option: int) -> float:
        return self._loop.forward_seconds

    def backward_seconds(self, step: int) -> float:
        return self._loop.backward_seconds

    def forward_transient(self, step: int, rerun: bool) -> int:
        return 0

    def tape_transient(self, step: int, option: int, rerun: bool) -> int:
        return 0

    def backward_transient(self, step: int) -> int:
        return 0

    def keep_gradients(self, step: int) -> None:
        """Count the gradients that the backward of a stage leaves, to the end."""

    def bytes_of(self, item: Item, step: int) -> int:
        return self._loop.state_bytes if item is Item.STATE else self._loop.tape_bytes

    def within_tape(self, key: tuple[Item, int]) -> bool:
        """True if a held tape contains the item, so that loading it needs no copy."""
        return False

    def device_bytes(self, stored_bytes: int) -> int:
        return stored_bytes

    def hold_state(self, step: int) -> None: ...

    def drop_state(self, step: int) -> None: ...

    def hold_tape(self, step: int, option: int | None, *, rerun: bool = False) -> None: ...

    def drop_tape(self, step: int) -> None: ...

    def hold(self, key: tuple[Item, int]) -> None:
        if key[0] is Item.STATE:
            self.hold_state(key[1])
        else:
            self.hold_tape(key[1], None)

    def drop(self, key: tuple[Item, int]) -> None:
        if key[0] is Item.STATE:
            self.drop_state(key[1])
        else:
            self.drop_tape(key[1])


class ChainLedger(LoopLedger):
    """Sizes and times of unequal stages, and the bytes that the device holds, each counted once."""

    def __init__(self, chain: Chain) -> None:
        self.length = chain.length
        self._stages = chain.stages
        self._choices: list[tuple[Option, ...]] = [stage.choices for stage in chain.stages]
        self._pinned = [step for step, stage in enumerate(chain.stages) if stage.pinned]
        self._states: dict[int, int] = {}
        self._tapes: dict[int, int] = {}
        self._taped_as: dict[int, Option] = {}
        self._bytes = chain.fixed_bytes

    def option_count(self, step: int) -> int:
        return len(self._choices[step])

    def pinned_within(self, start: int, stop: int) -> int | None:
        place = bisect_left(self._pinned, start)
        return self._pinned[place] if place < len(self._pinned) and self._pinned[place] < stop else None

    def is_pinned(self, step: int) -> bool:
        return self._stages[step].pinned

    def option_of(self, step: int) -> Option | None:
        return self._taped_as[step]

    def advances(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for step in range(start, stop):
            yield step, step + 1

    def forward_transient(self, step: int, rerun: bool) -> int:
        stage = self._stages[step]
        taped = stage.rerun_transient_bytes if rerun else stage.forward_transient_bytes
        return max(taped, stage.untaped_transient_bytes)

    def forward_seconds(self, start: int, stop: int) -> float:
        return sum(self._stages[step].forward_seconds for step in range(start, stop))

    def tape_seconds(self, step: int, option: int) -> float:
        return self._choices[step][option].forward_seconds

    def backward_seconds(self, step: int) -> float:
        option = self._taped_as[step]
        return option.backward_seconds + option.rerun_seconds

    def tape_transient(self, step: int, option: int, rerun: bool) -> int:
        choice = self._choices[step][option]
        return max(choice.forward_transient_bytes, self._stages[step].rerun_transient_bytes if rerun else 0)

    def backward_transient(self, step: int) -> int:
        return self.backward_transient_of(step, self._taped_as[step])

    def backward_transient_of(self, step: int, option: Option) -> int:
        """Return the transient bytes of a stage's backward under an option; its own gradients are among them."""
        return max(option.backward_transient_bytes, self._stages[step].gradient_bytes)

    def keep_gradients(self, step: int) -> None:
        self._bytes += self._stages[step].gradient_bytes

    def bytes_of(self, item: Item, step: int) -> int:
        if item is Item.TAPE:
            return self._taped_as[step].held_bytes
        return self._state_bytes(step)

    def within_tape(self, key: tuple[Item, int]) -> bool:
        item, step = key
        return item is Item.STATE and (step in self._tapes or step - 1 in self._tapes)

    def device_bytes(self, stored_bytes: int) -> int:
        return self._bytes

    def hold_state(self, step: int) -> None:
        holders = self._states.get(step, 0)
        self._states[step] = holders + 1
        if not holders and step - 1 not in self._tapes:
            self._bytes += self._state_bytes(step)

    def drop_state(self, step: int) -> None:
        holders = self._states[step] - 1
        if holders:
            self._states[step] = holders
            return
        del self._states[step]
        if step - 1 not in self._tapes:
            self._bytes -= self._state_bytes(step)

    def hold_tape(self, step: int, option: int | None, *, rerun: bool = False) -> None:
        """Add a holder of a tape; `option` of None is the recorded one. A tape holds its input and contains its output."""
        holders = self._tapes.get(step, 0)
        if option is not None:
            chosen = self._choices[step][option]
            self._taped_as[step] = chosen.in_rerun if rerun else chosen
        self._tapes[step] = holders + 1
        if not holders:
            self.hold_state(step)
            self._bytes += self._taped_as[step].held_bytes
            if step + 1 in self._states:
                self._bytes -= self._state_bytes(step + 1)

    def drop_tape(self, step: int) -> None:
        holders = self._tapes[step] - 1
        if holders:
            self._tapes[step] = holders
            return
        del self._tapes[step]
        self._bytes -= self._taped_as[step].held_bytes
        if step + 1 in self._states:
            self._bytes += self._state_bytes(step + 1)
        self.drop_state(step)

    def _state_bytes(self, step: int) -> int:
        # The output of the last stage is in its tape only: a chain is never advanced past its end without one.
        return self._stages[step].state_bytes if step < self.length else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Tensors of a graph to hold, their bytes, the seconds of the ops that run again, and a lower bound of those."""

    held: tuple[str, ...]
    held_bytes: int
    rerun_seconds: float
    bound_seconds: float


def rerun_ops(graph: Graph, held: tuple[str, ...]) -> tuple[Op, ...]:
    """Return the ops that must run again to make everything in `saved`; raise InvalidInput if one of them may not."""
    makers = {name: op for op in graph.ops for name in op.outputs}
    at_hand = {*graph.inputs, *held}
    needed = [name for name in graph.saved if name not in at_hand]
    again: dict[str, Op] = {}
    while needed:
        name = needed.pop()
        op = makers[name]
        if not op.recomputable:
            raise InvalidInput(f"{name!r} is not held, and op {op.name!r}, which makes it, may not be run again.")
        if op.outputs[0] not in again:
            again[op.outputs[0]] = op
            needed += [source for source in op.inputs if source not in at_hand]
    return tuple(op for op in graph.ops if op.outputs and op.outputs[0] in again)


def evaluate_holding(graph: Graph, held: tuple[str, ...], bound_seconds: float = 0.0) -> Holding:
    """Return the bytes of these tensors and the seconds of the ops that must run again."""
    sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
    seconds = float(sum(op.seconds for op in rerun_ops(graph, held)))
    return Holding(
        held=held,
        held_bytes=sum(sizes[name] for name in held),
        rerun_seconds=seconds,
        bound_seconds=min(bound_seconds, seconds),
    )
