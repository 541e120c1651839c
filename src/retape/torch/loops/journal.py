"""The journal of a loop that can be resumed: its snapshots, its results so far and the gradients so far, in files of one folder.

A run is known by what `fingerprint.py` says about its inputs, its step and its schedule; a folder that holds another run is refused.
Files are written in full before the ones they replace are removed, so a kill at any moment leaves something to go on from.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from retape.core.errors import InvalidInput
from retape.torch.loops.disk import SnapshotLost, cannot_write, read_file, write_file
from retape.torch.loops.fingerprint import Texts, differences

_RUN = "run.json"
_FORMAT = "retape loop 2"
_PLAIN = (type(None), bool, int, str)


class Entry(NamedTuple):
    """One file of a journal: where the loop stood, plain values, and groups of tensors, each of which may be missing."""

    step: int
    values: dict[str, Any]
    tensors: dict[str, list[Tensor | None]]


class Journal:
    """The files of one run in one folder."""

    def __init__(self, folder: str | Path, about: Texts) -> None:
        self.folder = Path(folder)
        try:
            self._created = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open(about)
        except OSError as error:
            raise cannot_write(self.folder / _RUN, error) from error

    def _open(self, about: Texts) -> None:
        path = self.folder / _RUN
        if not path.exists():
            self._begin(path, about)
            return
        try:
            found = json.loads(path.read_text())
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise self._of_another_run("it was written by another version of retape, or is damaged")
        if found.get("run") != about:
            raise self._of_another_run(differences(found.get("run") or {}, about))
        self._created = bool(found.get("created"))

    def _begin(self, path: Path, about: Texts) -> None:
        others = [entry.name for entry in self.folder.iterdir() if entry.suffix not in (".tensors", ".part")]
        if others:
            raise InvalidInput(
                f"The folder {self.folder} holds {others[0]!r} and no journal of a loop. Give resume= a folder of its own."
            )
        for stale in self.folder.iterdir():
            stale.unlink()
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps({"format": _FORMAT, "run": about, "created": self._created}))
        draft.replace(path)

    def _of_another_run(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"The folder {self.folder} holds the journal of another run: {why}. A run goes on only where inputs, parameters, step, all "
            "that it reads, schedule and PyTorch version are the same. Give resume= another folder, or remove that one if its run is not "
            "wanted any more."
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
        """Read one entry; SnapshotLost if it is not as it was written."""
        about, present = read_file(self._path(kind, step))
        if (about["kind"], about["step"]) != (kind, step):
            raise SnapshotLost(f"{self._path(kind, step).name} belongs to step {about['step']}")
        rest = iter(present)
        groups = {name: [next(rest) if there else None for there in mask] for name, mask in about["groups"].items()}
        return Entry(step, decode(about["values"]), groups)

    def steps(self, kind: str) -> list[int]:
        """The steps for which there is an entry, in order."""
        return sorted(int(path.stem.rsplit("-", 1)[1]) for path in self.folder.glob(f"{kind}-*.tensors"))

    def remove(self, kind: str, steps: Iterable[int]) -> None:
        for step in list(steps):
            self._path(kind, step).unlink(missing_ok=True)

    def finish(self) -> None:
        """The run is over: leave nothing behind."""
        for path in [*self.folder.glob("*.tensors"), *self.folder.glob("*.part"), self.folder / _RUN]:
            path.unlink(missing_ok=True)
        if self._created and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _path(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}-{step:012d}.tensors"


# --- plain values as JSON ------------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """A plain value as JSON that `decode` reads back exactly; what is none is an InvalidInput."""
    if type(value) in _PLAIN:
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
