"""Persistent schedules of a heterogeneous chain: a tree of moves, streamed as actions.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory" (2019). A segment of stages whose input is the working state is reversed in one of two ways:

- Take: tape its first stage, keep that tape, reverse the rest of the segment, reverse the first stage.
- Split: keep the input, run some stages without tapes, reverse the rest of the segment, then reload the input and reverse those.

A pinned stage is never run again: it is taken, and no split starts at it or skips it, so that it runs only in the first
forward. Its tape contains its output, which is the state of the next stage.

*Persistent* means that kept items stay until their own stage is reversed. Each stage is taped exactly once, so
there are fewer than two moves per stage. `solvers/chain.py` finds the best moves; here they become actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Save, Tape


@dataclass(frozen=True, slots=True)
class Take:
    """Tape the first stage of the segment as its choice `option`, and keep the tape."""

    option: int


@dataclass(frozen=True, slots=True)
class Split:
    """Keep the input of the segment, run `advance` stages without tapes, and reverse those last."""

    advance: int


Move: TypeAlias = Take | Split


@dataclass(frozen=True, slots=True)
class _Segment:
    """Stages `start` to `stop`, not yet reversed; `load` loads the input first."""

    start: int
    stop: int
    load: bool = False


def walk(length: int, moves: Iterable[Move]) -> Iterator[tuple[int, int, Move]]:
    """Yield (start, stop, move) for each move: the segment of which it is the first move."""
    todo = [(0, length)]
    for move in moves:
        start, stop = todo.pop()
        while start == stop:
            start, stop = todo.pop()
        yield start, stop, move
        if isinstance(move, Take):
            todo.append((start + 1, stop))
        else:
            todo += [(start, start + move.advance), (start + move.advance, stop)]


def chain_actions(length: int, moves: Iterable[Move]) -> Iterator[Action]:
    """Yield the actions of `moves`, in the order in which their segments begin, on a chain of `length` stages."""
    return _Player(length, moves).actions()


class _Player:
    """Translates moves to actions, and tracks what the device stores."""

    def __init__(self, length: int, moves: Iterable[Move]) -> None:
        self._moves = iter(moves)
        self._todo: list[_Segment | Backward] = [_Segment(0, length)]
        self._snapshots: set[int] = set()
        self._tapes: set[int] = set()

    def actions(self) -> Iterator[Action]:
        while self._todo:
            task = self._todo.pop()
            if isinstance(task, Backward):
                self._tapes.discard(task.step)
                yield task
            elif task.start < task.stop:
                yield from self._begin(task)

    def _begin(self, segment: _Segment) -> Iterator[Action]:
        if segment.load:
            yield Load(segment.start)
        move = next(self._moves)
        if isinstance(move, Take):
            yield from self._take(segment, move.option)
        else:
            yield from self._split(segment, segment.start + move.advance)

    def _take(self, segment: _Segment, option: int) -> Iterator[Action]:
        step = segment.start
        if step in self._snapshots:  # its tape holds the state now
            self._snapshots.remove(step)
            yield Free(step)
        yield Tape(step, option)
        if step + 1 < segment.stop:
            yield Save(step, item=Item.TAPE)
        self._tapes.add(step)
        self._todo += [Backward(step), _Segment(step + 1, segment.stop)]

    def _split(self, segment: _Segment, middle: int) -> Iterator[Action]:
        step = segment.start
        if step not in self._snapshots and step - 1 not in self._tapes:  # the previous tape contains this state
            self._snapshots.add(step)
            yield Save(step)
        yield Forward(step, middle)
        self._todo += [_Segment(step, middle, load=True), _Segment(middle, segment.stop)]
