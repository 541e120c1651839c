"""The journal of a loop in a folder, from which a killed run continues.

In the forward every snapshot is written as it is taken, with the ys since the one before, and the results at the end. In the backward
pass the gradients so far are written whenever a snapshot of the forward is used up, and every few seconds. A file is complete before
the ones it replaces are removed, so a kill at any moment leaves a state to continue from.

A run is identified by its inputs, its schedule and everything that its step depends on, as texts by name; a folder of another run is
refused. Tensors and arrays count by their values, code by its instructions. An object that cannot be entered (a lock, a file, a
generator) counts by its type alone: its address differs between processes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retape.core.errors import InvalidInput
from retape.torch.capture.call import Call
from retape.torch.capture.mutation import inner_tensors
from retape.torch.capture.settings import Walk, ambient, digest, path_text
from retape.torch.loops.side_state import SideState
from retape.torch.loops.snapshots import LoopSnapshot, SnapshotLost, cannot_write, read_file, write_file
from retape.torch.loops.state import State
from retape.torch.loops.step import Body, Grads, LoopGradients

# --- the identity of a run -------------------------------------------------------------------------------------------

RunTexts = dict[str, str]


def describe_run(
    functions: dict[str, Callable[..., Any] | None], call: Call, inputs: Iterable[Any], schedule: dict[str, Any]
) -> RunTexts:
    """Return everything that must be equal for a run to continue: names, with values or digests."""
    walk = _PortableWalk()
    walk.enter(functions)
    found = {name: str(value) for name, value in schedule.items()}
    found["the inputs and params"] = digest_of(inputs)
    rest = [tensor for tensor in (*call.extras, *call.state) if id(tensor) not in walk.digests]
    found["other tensors that the step reads"] = digest_of(rest)
    found |= {name: str(value) for name, value in ambient().items()}
    found["PyTorch"] = torch.__version__
    for path, token in zip(walk.paths, walk.tokens, strict=True):
        name = text = path_text(path)
        number = 1
        while name in found:
            number += 1
            name = f"{text} ({number})"
        found[name] = " ".join(map(str, token))
    return found


def _differences(stored: RunTexts, now: RunTexts, most: int = 3) -> str:
    """Return the first `most` differences between a folder and this run, in words."""
    names = [name for name in {**stored, **now} if stored.get(name) != now.get(name)]
    said = [f"{n}: {stored.get(n, 'absent')} in the folder, {now.get(n, 'absent')} now" for n in names[:most]]
    return "; ".join([*said, *([f"and {len(names) - most} more"] if len(names) > most else [])])


class _PortableWalk(Walk):
    """A walk whose texts are the same in another process."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[int, str] = {}  # by the ids of tensors

    def atom(self, value: Any, longest: int = 80) -> str:
        text = repr(value)
        if len(text) <= longest:
            return text
        return f"{text[:longest]}... ({len(text)} characters, {digest(text.encode())})"

    def tensor(self, value: Tensor) -> str:
        if id(value) not in self.digests:
            self.digests[id(value)] = f"tensor of {value.dtype} {tuple(value.shape)}, values {digest_of([value])}"
        return self.digests[id(value)]

    def code(self, value: types.CodeType) -> str:
        return f"{value.co_name}, code {digest(_code_text(value).encode())}"

    def thing(self, value: Any) -> str:
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
        return f"{getattr(named, '__module__', None)}.{named.__qualname__}"

    def again(self, first: int) -> str:
        return f"the same as {path_text(self.paths[first])}"


def _code_text(code: types.CodeType) -> str:
    """Return a text that is equal for the same instructions, constants and names, at any line of any file."""
    return f"{code.co_code.hex()} {code.co_names} {[_constant_text(item) for item in code.co_consts]}"


def _constant_text(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code_text(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return f"{{{sorted(map(_constant_text, value))}}}"
    return f"({[_constant_text(item) for item in value]})" if isinstance(value, tuple) else repr(value)


def digest_of(values: Iterable[Any]) -> str:
    """Return a digest of tensors and plain values, in order."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in values:
        if not isinstance(tensor, Tensor):
            total.update(repr(tensor).encode())
            continue
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in inner_tensors(tensor) or [tensor]:
            total.update(_bytes_of(part.detach()))
    return total.hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.device.type == "meta":
        return b""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    plain = dense.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""


# --- the journal's files ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JournalFolder:
    """A folder for `resume=`, with the seconds after which the gradients so far are written at the latest."""

    path: str | PathLike[str]
    progress_seconds: float = 10.0  # writing the gradients of a large model takes about a second

    def __fspath__(self) -> str:
        return fspath(self.path)


class Entry(NamedTuple):
    """One file of a journal: a step, plain values, and groups of tensors, each of which may be None."""

    step: int
    values: dict[str, Any]
    tensors: dict[str, list[Tensor | None]]


class Journal:
    """The files of one run in one folder."""

    def __init__(self, folder: str | PathLike[str], about: RunTexts) -> None:
        self._folder = Path(folder)
        self._run_file = self._folder / "run.json"
        try:
            self._created = not self._folder.exists()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open(about)
        except OSError as error:
            raise cannot_write(self._run_file, error) from error

    def _open(self, about: RunTexts, version: str = "retape loop 3") -> None:
        if not self._run_file.exists():
            self._begin({"format": version, "run": about, "created": self._created})
            return
        try:
            found = json.loads(self._run_file.read_text())
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != version:
            raise self._of_another_run("it was written by another version of retape, or is damaged")
        if found.get("run") != about:
            raise self._of_another_run(_differences(found.get("run") or {}, about))
        self._created = bool(found.get("created"))

    def _begin(self, contents: dict[str, Any]) -> None:
        others = [entry.name for entry in self._folder.iterdir() if entry.suffix not in (".tensors", ".part")]
        if others:
            raise InvalidInput(
                f"The folder {self._folder} holds {others[0]!r} and no journal of a loop. Give resume= a folder of its own."
            )
        for stale in self._folder.iterdir():
            stale.unlink()
        draft = self._run_file.with_suffix(".part")
        draft.write_text(json.dumps(contents))
        draft.replace(self._run_file)

    def _of_another_run(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"The folder {self._folder} holds the journal of another run: {why}. A run continues only if inputs, parameters, step, all "
            "that it reads, schedule and PyTorch version are the same. Give resume= another folder, or remove that one if its run is no "
            "longer wanted."
        )

    def write(self, kind: str, entry: Entry) -> None:
        """Write one entry, and wait until it is on the disk."""
        about = {
            "kind": kind,
            "step": entry.step,
            "values": encode(entry.values),
            "groups": {name: [tensor is not None for tensor in group] for name, group in entry.tensors.items()},
        }
        present = [tensor for group in entry.tensors.values() for tensor in group if tensor is not None]
        write_file(self._path(kind, entry.step), about, present, durable=True)

    def read(self, kind: str, step: int) -> Entry:
        """Read one entry; SnapshotLost if it is missing or damaged."""
        about, present = read_file(self._path(kind, step))
        if (about["kind"], about["step"]) != (kind, step):
            raise SnapshotLost(f"{self._path(kind, step).name} belongs to step {about['step']}")
        rest = iter(present)
        groups = {name: [next(rest) if there else None for there in mask] for name, mask in about["groups"].items()}
        return Entry(step, decode(about["values"]), groups)

    def steps(self, kind: str) -> list[int]:
        """Return the steps that have an entry, in order."""
        return sorted(int(path.stem.rsplit("-", 1)[1]) for path in self._folder.glob(f"{kind}-*.tensors"))

    def remove(self, kind: str, steps: Iterable[int]) -> None:
        for step in list(steps):
            self._path(kind, step).unlink(missing_ok=True)

    def finish(self) -> None:
        """Remove all files, after the run has ended."""
        for path in [*self._folder.glob("*.tensors"), *self._folder.glob("*.part"), self._run_file]:
            path.unlink(missing_ok=True)
        if self._created and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _path(self, kind: str, step: int) -> Path:
        return self._folder / f"{kind}-{step:012d}.tensors"


def encode(value: Any) -> Any:
    """Return a plain value as JSON that `decode` reads back exactly; InvalidInput for other values."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(item) for item in value]}
    if type(value) is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise InvalidInput(
        f"A loop that can be resumed keeps a {type(value).__name__} in its carry, its ys or its random state, which a file cannot hold. "
        "Use tensors, numbers, texts and containers of those, or leave resume= out."
    )


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return float.fromhex(inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in inner}
    items = [decode(item) for item in inner]
    return items if kind == "list" else tuple(items)


# --- writing and reading a loop ----------------------------------------------------------------------------------------

_FORWARD, _END, _BACKWARD, _ROWS = "forward", "end", "backward", "rows"


class Resume:
    """Writes a loop to its journal and reads it back. `model`: a state of the same structure, on the same devices."""

    TO_THE_END = -1  # in files, in place of a step

    def __init__(
        self,
        journal: Journal,
        body: Body,
        side_state: SideState,
        model: State,
        *,
        progress_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._body = body
        self._side_state = side_state
        self._model = model
        self._progress_seconds, self._clock = progress_seconds, clock
        self._written_rows = 0
        self._written_end = self.TO_THE_END
        self._last_write = clock()
        self._incoming = ""

    # --- the forward -------------------------------------------------------------------------------------------

    def saved(self, step: int, snapshot: LoopSnapshot) -> None:
        """Write a snapshot of the first run; the state before the first step is given again by the caller."""
        if step:
            self._write(_FORWARD, step, snapshot)

    def freed(self, step: int) -> None:
        self._journal.remove(_FORWARD, [step])

    def ended(self, steps: int, snapshot: LoopSnapshot) -> None:
        """Write the state after the first run, with all ys: the snapshots are removed in the backward pass."""
        self._written_rows = 0
        self._write(_END, steps, snapshot)

    def _write(self, kind: str, step: int, snapshot: LoopSnapshot) -> None:
        leaves, ys = snapshot.state.leaves, self._body.ys
        indices, tensors, values = self._side_state.exported(snapshot.side_state)
        rows, plain = ([], []) if ys is None else ys.rows(self._written_rows, step)
        entry = Entry(
            step,
            {
                "leaves": [None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
                "needs_grad": list(snapshot.state.needs_grad),
                "same_as": snapshot.state.same_as and list(snapshot.state.same_as),
                "tokens": list(snapshot.tokens),
                "hidden": [indices, values, sorted(self._side_state.changed)],
                "rows": [self._written_rows, plain, [] if ys is None else list(ys.needs_grad)],
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

    def restore(self) -> tuple[dict[int, LoopSnapshot], int, LoopSnapshot | None]:
        """Return the journal's snapshots, the step reached, and the final state if the forward ended; restores ys."""
        for step in self._journal.steps(_END):
            end = self._read(_END, step)
            if end is not None:
                read = {s: self._read(_FORWARD, s) for s in self._journal.steps(_FORWARD)}
                self._take_rows(end[0])
                return {s: pair[1] for s, pair in read.items() if pair is not None}, step, end[1]
        found: dict[int, LoopSnapshot] = {}
        stacks = self._body.ys is not None
        for step in self._journal.steps(_FORWARD):
            pair = self._read(_FORWARD, step)
            if pair is not None and (not stacks or pair[0].values["rows"][0] == self._written_rows):
                self._take_rows(pair[0])
                found[step], self._written_rows = pair[1], step
            elif stacks:
                break  # the ys in this entry are lost, too
        return found, self._written_rows, None

    def _read(self, kind: str, step: int) -> tuple[Entry, LoopSnapshot] | None:
        try:
            entry = self._journal.read(kind, step)
            return entry, self._snapshot(entry)
        except SnapshotLost:
            return None

    def _take_rows(self, entry: Entry) -> None:
        start, plain, needs_grad = entry.values["rows"]
        if self._body.ys is not None:
            self._body.ys.put_rows(start, entry.step, entry.tensors["ys"], plain, needs_grad)
        self._body.alias.update({key: tuple(alias) for key, alias in entry.values["alias"].items()})
        self._side_state.changed |= set(entry.values["hidden"][2])

    def _snapshot(self, entry: Entry) -> LoopSnapshot:
        model = self._model.leaves
        if len(model) != len(entry.tensors["state"]):
            raise SnapshotLost(f"step {entry.step} has another number of leaves")
        leaves = [
            plain if tensor is None else _on_device_of(like, tensor)
            for like, tensor, plain in zip(model, entry.tensors["state"], entry.values["leaves"], strict=True)
        ]
        indices, values, changed = entry.values["hidden"]
        if max((*indices, *values, *changed), default=-1) >= self._side_state.places:
            raise SnapshotLost("its step keeps state in places that do not exist now")
        side_state = self._side_state.imported(indices, entry.tensors["hidden"], values)
        same_as = entry.values.get("same_as")  # a journal of before has none
        needs_grad = tuple(entry.values["needs_grad"])
        state = State(leaves, self._model.spec, needs_grad, None if same_as is None else tuple(same_as))
        return LoopSnapshot(state, entry.values["tokens"], side_state)

    # --- the backward pass -------------------------------------------------------------------------------------

    def progress(
        self, carry: Sequence[Any], ys: Sequence[Any], xs: Grads, captured: Sequence[Tensor]
    ) -> LoopGradients | None:
        """Return how far a killed backward pass from the same gradients had come; rows of `xs` are written in place."""
        self._incoming = digest_of([*carry, *ys])
        for step in self._journal.steps(_BACKWARD):
            try:
                entry = self._journal.read(_BACKWARD, step)
                if entry.values["incoming"] == self._incoming and self._read_rows(step, xs):
                    self._written_end = step
                    carried = _on_devices_of(self._model.leaves, entry.tensors["carry"])
                    return LoopGradients(step, carried, xs, _on_devices_of(captured, entry.tensors["sums"]))
            except SnapshotLost:
                continue
        for kind in (_BACKWARD, _ROWS):
            self._journal.remove(kind, self._journal.steps(kind))
        return None

    def _read_rows(self, end: int, xs: Grads) -> bool:
        """Read the gradients of xs from step `end` on; True if all of them are there."""
        if all(rows is None for rows in xs):
            return True
        start = end
        while start != self.TO_THE_END:
            entry = self._journal.read(_ROWS, start)
            if entry.values["incoming"] != self._incoming:
                return False
            for total, rows in zip(xs, entry.tensors["xs"], strict=True):
                if total is not None and rows is not None:
                    total[start : start + rows.shape[0]].copy_(rows)
            start = entry.values["before"]
        return True

    def reversed_to(self, now: LoopGradients) -> None:
        """Write the gradients so far if a snapshot is used up or the progress interval has passed."""
        used_up = [step for step in self._journal.steps(_FORWARD) if step >= now.end]
        due = self._clock() - self._last_write >= self._progress_seconds
        if now.end == 0 or not (used_up or due):
            return
        about = {"incoming": self._incoming, "before": self._written_end}
        if any(grad is not None for grad in now.xs):
            stop = None if self._written_end == self.TO_THE_END else self._written_end
            rows = [None if grad is None else grad[now.end : stop] for grad in now.xs]
            self._journal.write(_ROWS, Entry(now.end, about, {"xs": rows}))
        self._journal.write(_BACKWARD, Entry(now.end, about, {"carry": list(now.carry), "sums": list(now.sums)}))
        self._journal.remove(_BACKWARD, [step for step in self._journal.steps(_BACKWARD) if step > now.end])
        self._journal.remove(_FORWARD, used_up)
        self._written_end, self._last_write = now.end, self._clock()

    def finish(self) -> None:
        self._journal.finish()


def _on_device_of(like: Any, tensor: Tensor) -> Tensor:
    if not isinstance(like, Tensor) or (like.shape, like.dtype) != (tensor.shape, tensor.dtype):
        raise SnapshotLost("a tensor of the carry has another shape or dtype")
    return tensor.to(like.device)


def _on_devices_of(tensors: Sequence[Any], grads: Sequence[Tensor | None]) -> Grads:
    return [None if grad is None else grad.to(like.device) for like, grad in zip(tensors, grads, strict=True)]


def check_generators(generators: Sequence[Any]) -> None:
    """Raise InvalidInput for generator objects other than torch's, whose state a file cannot hold."""
    for generator in generators:
        if not isinstance(generator, torch.Generator):
            raise InvalidInput(
                f"A loop that can be resumed draws from a {type(generator).__name__} object, whose state a file cannot hold. "
                "Draw from torch's generators, or leave resume= out."
            )
