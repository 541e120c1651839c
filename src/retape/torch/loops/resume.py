"""How a loop goes on after it was killed: what is written to its journal on the way, and how it is read back.

In the forward every snapshot is written as it is taken, with the ys since the one before, and the results at the end. In the backward
pass the gradients so far are written whenever a snapshot of the forward has been used up, and every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.torch.loops.body import Body
from retape.torch.loops.disk import SnapshotLost
from retape.torch.loops.fingerprint import digest_of
from retape.torch.loops.journal import Entry, Journal
from retape.torch.loops.side_state import Hidden
from retape.torch.loops.snapshots import Snapshot
from retape.torch.loops.state import State
from retape.torch.loops.tape import Grads

PROGRESS_SECONDS = 10.0  # how often the gradients so far are written at least
_FORWARD, _END, _BACKWARD, _ROWS = "forward", "end", "backward", "rows"
_ALL = -1  # instead of a step: up to the end of the loop


class Progress(NamedTuple):
    """How far a backward pass has come: the steps before `end` are left; with the gradients so far."""

    end: int
    carry: Grads
    sums: Grads
    xs: Grads


class Resume:
    """The journal of one loop, in the loop's own words."""

    def __init__(self, journal: Journal, body: Body, hidden: Hidden, model: State) -> None:
        self._journal = journal
        self._body = body
        self._hidden = hidden
        self._model = model  # a state of the same structure, on the same devices
        self._written_rows = 0
        self._written_end = _ALL
        self._last_write = time.monotonic()
        self._incoming = ""

    # --- the forward -------------------------------------------------------------------------------------------

    def saved(self, step: int, snapshot: Snapshot) -> None:
        """A snapshot was taken in the first run."""
        if step:  # the state before the first step is given again
            self._write(_FORWARD, step, snapshot)

    def freed(self, step: int) -> None:
        self._journal.remove(_FORWARD, [step])

    def ended(self, steps: int, snapshot: Snapshot) -> None:
        """The first run is over; `snapshot` is how it ended."""
        self._written_rows = 0  # all of the ys: the snapshots go in the backward pass
        self._write(_END, steps, snapshot)

    def _write(self, kind: str, step: int, snapshot: Snapshot) -> None:
        leaves = snapshot.state.leaves
        indices, tensors, values = self._hidden.exported(snapshot.hidden)
        rows, plain = self._body.rows(self._written_rows, step)
        entry = Entry(
            step,
            {
                "leaves": [None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
                "needs_grad": list(snapshot.state.needs_grad),
                "tokens": list(snapshot.tokens),
                "hidden": [indices, values, sorted(self._hidden.changed)],
                "rows": [self._written_rows, plain, self._body.ys_need_grad],
                "alias": {key: list(alias) for key, alias in self._body.alias.items()},
            },
            {
                "state": [leaf if isinstance(leaf, Tensor) else None for leaf in leaves],
                "hidden": list(tensors),
                "ys": rows,
            },
        )
        self._body.refuse_kept()
        self._journal.write(kind, entry)
        self._written_rows = step

    def restore(self) -> tuple[dict[int, Snapshot], int, Snapshot | None]:
        """The snapshots in the journal, the step that was reached, and how the run ended if it did; ys are put back."""
        for step in self._journal.steps(_END):
            end = self._read(_END, step)
            if end is not None:
                found = {
                    s: read[1] for s in self._journal.steps(_FORWARD) if (read := self._read(_FORWARD, s)) is not None
                }
                self._take_rows(end[0])
                return found, step, end[1]
        found = {}
        for step in self._journal.steps(_FORWARD):
            read = self._read(_FORWARD, step)
            usable = read is not None and read[0].values["rows"][0] == self._written_rows
            if read is not None and (usable or not self._body.stacks):
                self._take_rows(read[0])
                found[step], self._written_rows = read[1], step
            elif self._body.stacks:
                break  # the ys that stood in it are lost, too
        return found, self._written_rows, None

    def _read(self, kind: str, step: int) -> tuple[Entry, Snapshot] | None:
        try:
            entry = self._journal.read(kind, step)
            return entry, self._snapshot(entry)
        except SnapshotLost:
            return None

    def _take_rows(self, entry: Entry) -> None:
        start, plain, needs_grad = entry.values["rows"]
        self._body.put_rows(start, entry.step, entry.tensors["ys"], plain, needs_grad)
        self._body.alias.update({key: tuple(alias) for key, alias in entry.values["alias"].items()})
        self._hidden.changed |= set(entry.values["hidden"][2])

    def _snapshot(self, entry: Entry) -> Snapshot:
        model = self._model.leaves
        if len(model) != len(entry.tensors["state"]):
            raise SnapshotLost(f"step {entry.step} has another number of leaves")
        leaves = [
            plain if tensor is None else _as(like, tensor)
            for like, tensor, plain in zip(model, entry.tensors["state"], entry.values["leaves"], strict=True)
        ]
        indices, values, changed = entry.values["hidden"]
        hidden = self._hidden.adopted(indices, entry.tensors["hidden"], values, changed)
        state = State(leaves, self._model.spec, tuple(entry.values["needs_grad"]))
        return Snapshot(state, entry.values["tokens"], hidden)

    # --- the backward pass -------------------------------------------------------------------------------------

    def progress(
        self, carry: Sequence[Any], ys: Sequence[Any], xs: Grads, captured: Sequence[Tensor]
    ) -> Progress | None:
        """How far a killed backward pass from the same gradients had come; the rows of `xs` are put in place."""
        self._incoming = digest_of([*carry, *ys])
        for step in self._journal.steps(_BACKWARD):
            try:
                entry = self._journal.read(_BACKWARD, step)
                if entry.values["incoming"] == self._incoming and self._rows_from(step, xs):
                    self._written_end = step
                    carried = [
                        _like(like, g) for like, g in zip(self._model.leaves, entry.tensors["carry"], strict=True)
                    ]
                    sums = [_like(like, g) for like, g in zip(captured, entry.tensors["sums"], strict=True)]
                    return Progress(step, carried, sums, xs)
            except SnapshotLost:
                continue
        for kind in (_BACKWARD, _ROWS):
            self._journal.remove(kind, self._journal.steps(kind))
        return None

    def _rows_from(self, end: int, xs: Grads) -> bool:
        """Put the gradients of xs from step `end` on in place; whether all of them are there."""
        if all(place is None for place in xs):
            return True
        start = end
        while start != _ALL:
            entry = self._journal.read(_ROWS, start)
            if entry.values["incoming"] != self._incoming:
                return False
            for place, rows in zip(xs, entry.tensors["xs"], strict=True):
                if place is not None and rows is not None:
                    place[start : start + rows.shape[0]].copy_(rows)
            start = entry.values["before"]
        return True

    def reversed_to(self, now: Progress) -> None:
        """The steps from `now.end` on are reversed; write that down if a snapshot is used up or some time has passed."""
        used_up = [step for step in self._journal.steps(_FORWARD) if step >= now.end]
        if now.end == 0 or not (used_up or time.monotonic() - self._last_write >= PROGRESS_SECONDS):
            return
        about = {"incoming": self._incoming, "before": self._written_end}
        if any(grad is not None for grad in now.xs):
            stop = None if self._written_end == _ALL else self._written_end
            rows = [None if grad is None else grad[now.end : stop] for grad in now.xs]
            self._journal.write(_ROWS, Entry(now.end, about, {"xs": rows}))
        self._journal.write(_BACKWARD, Entry(now.end, about, {"carry": list(now.carry), "sums": list(now.sums)}))
        self._journal.remove(_BACKWARD, [step for step in self._journal.steps(_BACKWARD) if step > now.end])
        self._journal.remove(_FORWARD, used_up)
        self._written_end, self._last_write = now.end, time.monotonic()

    def finish(self) -> None:
        self._journal.finish()


def _as(like: Any, tensor: Tensor) -> Tensor:
    if not isinstance(like, Tensor) or (like.shape, like.dtype) != (tensor.shape, tensor.dtype):
        raise SnapshotLost("a tensor of the carry has another shape or dtype")
    return tensor.to(like.device)


def _like(like: Any, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to(like.device)


def check_generators(generators: Sequence[Any]) -> None:
    """Only torch's, Python's and numpy's own streams have states that a file can hold."""
    for generator in generators:
        if not isinstance(generator, torch.Generator):
            raise InvalidInput(
                f"A loop that can be resumed draws from a {type(generator).__name__} object, whose state a file cannot hold. "
                "Draw from torch's generators, or leave resume= out."
            )
