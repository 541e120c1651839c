"""How steps whose tape nobody wants are run again: without gradients where that is seen to come to the same bits, else with them.

A step that records no graph is cheaper, but PyTorch or the step itself may compute otherwise then. Nothing is taken on trust:

- the first such step of a backward pass starts at a snapshot, and must come to what the first run came to one step after it;
- from then on a tape must end in the very state that the tape after it was started from, with the random streams where they stood.
  Tapes are made with gradients and the first of them starts where the loop began, so every one of them is that of the first run.

Where the first question is answered with no, the step is run once more, and all others with gradients. Where the second one is, or where a
step raises on the way, the pass starts again with gradients from the first step (`Differed`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from retape.torch import _compat_compiler
from retape.torch.loop_body import Body
from retape.torch.loop_state import State
from retape.torch.reads import Call
from retape.torch.state import Stream

_MOST_KINDS = 64  # changes of which leaves need gradients that are remembered: nothing may grow with the length
_COMPILER = ("_dynamo", "eval_frame")


class Differed(Exception):
    """Steps without gradients came to something else than with them; the backward pass has to start again."""


class Untaped:
    """Decides for one loop how its untaped steps are run again, and runs them."""

    def __init__(self, body: Body, initial: State, streams: Sequence[Stream], *, allowed: bool) -> None:
        self._body = body
        self._streams = streams
        self._drawn = streams  # those that steps draw from
        self._allowed = allowed
        self._after: dict[int, int] = {}  # checksums of the states one step after snapshots
        self._saved: int | None = None  # the snapshot that was taken last, until a step follows it
        self._since = [0]  # steps from which on other leaves of the carry need gradients
        self._needs_grad = [initial.needs_grad]
        self._proved = False
        self._starts: dict[int, tuple[int, list[Any]]] = {}  # of tapes: where the tape before must end
        self._goes_on = False  # the working state is the end of a tape
        self.used = False  # states come from steps without gradients
        self.ran = False  # some step was run without, if only to see

    # --- the first run -----------------------------------------------------------------------------------------

    def saved(self, step: int) -> None:
        self._saved = step

    def dropped(self, step: int) -> None:
        self._after.pop(step, None)

    def stepped(self, start: int, stop: int, state: State) -> None:
        """Steps of the first run have come to a state."""
        if not self._allowed:
            return
        if state.needs_grad != self._needs_grad[-1]:
            self._since.append(stop)
            self._needs_grad.append(state.needs_grad)
            self._allowed = len(self._since) <= _MOST_KINDS
        if self._saved is not None:
            mark = state.mark() if (self._saved, start + 1) == (start, stop) else None
            if mark is not None:
                self._after[start] = mark
            self._saved = None

    def settle(self, start: Sequence[Any]) -> None:
        """The first run is over, before which the random streams stood at `start`. Of the others, threads of others may draw meanwhile."""
        pairs = zip(self._streams, start, strict=True)
        self._drawn = [stream for stream, token in pairs if stream.peek() != token]

    # --- the backward pass -------------------------------------------------------------------------------------

    def begin(self, *, allowed: bool) -> None:
        """A backward pass begins. It may not be `allowed`: where steps hide state, that would have to be compared, too."""
        self.ran = False
        self._allowed = self._allowed and allowed
        self._forget()

    def give_up(self) -> None:
        """From now on all steps are run with gradients."""
        self._allowed = False
        self._forget()

    def _forget(self) -> None:
        self._proved = self.used = self._goes_on = False
        self._starts.clear()

    def loaded(self) -> None:
        """The working state is that of a snapshot now."""
        self._goes_on = False

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps again, keeping nothing but the state after them."""
        self._goes_on = False
        if self._allowed and not self._proved and start in self._after:
            state = self._try(state, start)
            start += 1
        if start == stop:
            return state
        if not self._proved:
            return self._body.advance(state, start, stop)
        try:
            return self._bare(state, start, stop)
        except Exception as error:
            raise Differed from error

    def _try(self, state: State, start: int) -> State:
        """One step without gradients, which must come to what is known; if it does not, the same with gradients."""
        stood = [stream.peek() for stream in self._streams]
        try:
            after = self._bare(state, start, start + 1)
            self._proved = after.mark() == self._after[start]
        except Exception:  # some steps need a graph: they take gradients themselves
            self._proved = False
        if self._proved:
            self.used = True
            return after
        self._allowed = False
        for stream, token in zip(self._streams, stood, strict=True):
            stream.seek(token)
        return self._body.advance(state, start, start + 1)

    def _bare(self, state: State, start: int, stop: int) -> State:
        self.ran = True
        needs_grad = self._needs_grad[bisect_right(self._since, stop) - 1]
        try:
            return self._body.advance_bare(state, start, stop, needs_grad)
        finally:
            if (
                _in_autocast()
            ):  # a weight that was cast without a graph is for no taped step, and not every PyTorch sees to that
                torch.clear_autocast_cache()

    # --- where tapes begin and end -----------------------------------------------------------------------------

    def taping(self, start: int, state: State) -> None:
        """Steps from `start` on are about to be taped."""
        if self.used and not self._goes_on:
            self._starts[start] = self._look(state)

    def taped(self, stop: int, state: State) -> None:
        """Steps before `stop` were taped, and came to a state."""
        self._goes_on = True
        start = self._starts.pop(stop, None)
        if start is not None and start != self._look(state):
            raise Differed

    def finish(self) -> None:
        """The pass is over: every tape but the very first has been met by the one before it."""
        if self._starts.keys() - {0}:
            raise Differed

    def _look(self, state: State) -> tuple[int, list[Any]]:
        mark = state.mark()
        if mark is None:  # a carry that was plain before
            raise Differed
        return mark, [stream.peek() for stream in self._drawn]


def _in_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def runs_compiled_code(step: Any, call: Call) -> bool:
    """Whether a step is compiled, or calls something that is: without gradients it would be compiled once more."""
    if _compat_compiler.is_compiled(step) or any(map(_compat_compiler.is_compiled, call.modules)):
        return True
    return any(all(part in code.co_filename for part in _COMPILER) for code in call.codes)
