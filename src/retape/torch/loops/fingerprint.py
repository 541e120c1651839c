"""What tells the runs of a loop apart, as texts by name: inputs, schedule, and everything that the step depends on.

The walk is that of `settings.py`. Tensors and arrays count by their values, code by its instructions. An object that cannot be entered
(a lock, a file, a generator) counts by its type alone: its address is another one in every process.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from retape.torch.capture.call import Call
from retape.torch.capture.checksum import inner_tensors
from retape.torch.capture.settings import Walk, ambient, path_text
from retape.torch.capture.settings_values import digest

Texts = dict[str, str]
_SHOWN = 80  # characters of a value; of a longer one the rest is in a digest
_NAMED = 3  # differences in a message


def texts_of(
    functions: dict[str, Callable[..., Any] | None], call: Call, inputs: Iterable[Any], schedule: dict[str, Any]
) -> Texts:
    """All that has to be the same for a run to go on: what it is called, and its value or a digest of it."""
    walk = _Texts()
    walk.enter(functions)
    found = {name: str(value) for name, value in schedule.items()}
    found["the inputs and params"] = digest_of(inputs)
    rest = [tensor for tensor in (*call.extras, *call.state) if id(tensor) not in walk.met]
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


def differences(then: Texts, now: Texts) -> str:
    """What differs between a folder and the run at hand, in words; the first few of them."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    said = [f"{n}: {then.get(n, 'absent')} in the folder, {now.get(n, 'absent')} now" for n in names[:_NAMED]]
    return "; ".join([*said, *([f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else [])])


class _Texts(Walk):
    """A walk that writes what another process would write, too."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[int, str] = {}  # by the ids of tensors

    def atom(self, value: Any) -> str:
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters, {digest(text.encode())})"

    def tensor(self, value: Tensor) -> str:
        if id(value) not in self.met:
            self.met[id(value)] = f"tensor of {value.dtype} {tuple(value.shape)}, values {digest_of([value])}"
        return self.met[id(value)]

    def code(self, value: types.CodeType) -> str:
        return f"{value.co_name}, code {digest(_shown(value).encode())}"

    def thing(self, value: Any) -> str:
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
        return f"{getattr(named, '__module__', None)}.{named.__qualname__}"

    def again(self, first: int) -> str:
        return f"the same as {path_text(self.paths[first])}"


def _shown(code: types.CodeType) -> str:
    """Equal for the same instructions over the same constants and names, wherever they stand in a file."""
    return f"{code.co_code.hex()} {code.co_names} {[_constant(item) for item in code.co_consts]}"


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _shown(value)
    if isinstance(value, frozenset):  # its order is another one in every process
        return f"{{{sorted(map(_constant, value))}}}"
    return f"({[_constant(item) for item in value]})" if isinstance(value, tuple) else repr(value)


def digest_of(values: Iterable[Any]) -> str:
    """A fingerprint of tensors and plain values, in order."""
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
