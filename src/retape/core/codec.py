"""Dataclasses as JSON and back, driven by their annotations: plans, records, fits, schedules and assignments use this one codec.

A dataclass is an object with one key per field, in field order; a tuple is a list, an enum its value, an action the list
`[name, *values]`. A class whose text differs from that says how in a `__json_form__` attribute (`JsonForm`). Numbers are kept as they
are written, so that text that is read and written again does not change.
The same annotations validate values that are made in code: `check_fields`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, NoReturn, Protocol, TypeVar, get_args, get_origin, get_type_hints

from retape.core.errors import InvalidInput, PlanFormatError
from retape.core.units import MOST_BYTES, MOST_SECONDS, is_amount, is_count, is_whole, shown

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """The text of a class, where it is more than an object of its fields.

    `noun` and `remedy` are for messages. `format` and `version` begin the object, where a format is given. `keys` renames
    fields. `required` names the fields with a default that text must have all the same: files of earlier versions may lack
    the others. With `row` the values are a list without keys, with `bare` the value of the only field stands alone. `pairs`
    names the fields whose (key, value) pairs are an object.
    """

    noun: str = ""
    remedy: str = ""
    format: str = ""
    version: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    row: bool = False
    bare: bool = False
    pairs: tuple[str, ...] = ()


def to_data(value: Any) -> Any:
    """Return a dataclass as lists, dicts and plain values."""
    return _Object(type(value)).encode(value)


def to_json(value: Any) -> str:
    """Return a dataclass as JSON text; `from_json` reads it back, every float exactly."""
    return json.dumps(to_data(value), allow_nan=False)


def from_data(kind: type[_T], data: Any) -> _T:
    """Return the dataclass that `to_data` wrote; raise PlanFormatError with the reason for any other data."""
    form = _form(kind)
    try:
        made: _T = _Object(kind).decode(data, "")
    except PlanFormatError:
        raise
    except InvalidInput as error:
        raise PlanFormatError(f"This {form.noun} is invalid: {error} {form.remedy}") from error
    return made


def from_json(kind: type[_T], text: str) -> _T:
    """Return the dataclass that `to_json` wrote; raise PlanFormatError with the reason for any other text."""
    form = _form(kind)

    def refuse(name: str) -> NoReturn:
        raise PlanFormatError(f"This {form.noun} contains {name}, which is not a number. {form.remedy}")

    if not isinstance(text, str):
        raise PlanFormatError(f"A {form.noun} is text, not {type(text).__name__}. {form.remedy}")
    try:
        data = json.loads(text, parse_constant=refuse)
    except PlanFormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(
            f"This is no {form.noun}: not valid JSON ({error}); it may be truncated. {form.remedy}"
        ) from error
    return from_data(kind, data)


def check_fields(value: Any, what: str = "") -> None:
    """Raise InvalidInput for the first field of a dataclass that does not hold what its annotation says.

    Numbers are finite and >= 0; fields that end in `bytes` or `seconds` are bounded, so that solvers can add them up.
    """
    kind: Any = type(value)
    for each in _fields_of(kind):
        found = getattr(value, each.name)
        if not each.kind.fits(found):
            raise InvalidInput(f"{what or kind.__name__}.{each.name} = {shown(found)}; give {each.kind.wanted}.")


class _Kind(Protocol):
    """The values of one annotation: a test, words for a message, and both directions."""

    wanted: str

    def fits(self, value: object) -> bool: ...
    def encode(self, value: Any) -> Any: ...
    def decode(self, data: Any, where: str) -> Any: ...


class _Plain:
    """A value that JSON has too."""

    def __init__(self, wanted: str, fits: Callable[[object], bool]) -> None:
        self.wanted, self.fits = wanted, fits

    def encode(self, value: Any) -> Any:
        return value

    def decode(self, data: Any, where: str) -> Any:
        return data if self.fits(data) else _refuse(where, data, self.wanted)


class _Member:
    """A member of an enum, by its value."""

    def __init__(self, kind: type[Enum]) -> None:
        self._kind = kind
        self._values = [member.value for member in kind]
        self.wanted = f"a member of {kind.__name__}"

    def fits(self, value: object) -> bool:
        return isinstance(value, self._kind)

    def encode(self, value: Any) -> Any:
        return value.value

    def decode(self, data: Any, where: str) -> Any:
        known = ", ".join(map(repr, self._values))
        return self._kind(data) if data in self._values else _refuse(where, data, f"one of {known}")


class _Maybe:
    """Another kind, or None."""

    def __init__(self, inner: _Kind) -> None:
        self._inner = inner
        self.wanted = f"{inner.wanted}, or None"

    def fits(self, value: object) -> bool:
        return value is None or self._inner.fits(value)

    def encode(self, value: Any) -> Any:
        return None if value is None else self._inner.encode(value)

    def decode(self, data: Any, where: str) -> Any:
        return None if data is None else self._inner.decode(data, where)


class _Tuple:
    """A tuple of any length, all of one kind; a list in JSON."""

    def __init__(self, inner: _Kind) -> None:
        self._inner = inner
        self.wanted = f"a tuple, each item {inner.wanted}"

    def fits(self, value: object) -> bool:
        return isinstance(value, tuple) and all(map(self._inner.fits, value))

    def encode(self, value: Any) -> Any:
        return [self._inner.encode(item) for item in value]

    def decode(self, data: Any, where: str) -> Any:
        items = data if isinstance(data, list) else _refuse(where, data, "a list")
        return tuple(self._inner.decode(item, f"{where}[{place}]") for place, item in enumerate(items))


class _Pairs:
    """(text, text) pairs; an object in JSON."""

    wanted = "a tuple of (text, text) pairs"

    def fits(self, value: object) -> bool:
        return isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)

    def encode(self, value: Any) -> Any:
        return dict(value)

    def decode(self, data: Any, where: str) -> Any:
        items = data if isinstance(data, dict) else _refuse(where, data, "an object")
        return tuple((name, str(text)) for name, text in items.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """One field of a dataclass: its name, its key in JSON, and what it holds."""

    name: str
    key: str
    kind: _Kind
    required: bool


class _Object:
    """A dataclass; an object, a list or a bare value in JSON, as its `JsonForm` says."""

    def __init__(self, kind: type) -> None:
        self._kind, self._form = kind, _form(kind)
        self.wanted = f"an instance of {kind.__name__}"

    def fits(self, value: object) -> bool:
        return isinstance(value, self._kind)

    def encode(self, value: Any) -> Any:
        form, own = self._form, _fields_of(self._kind)
        if form.row:
            return self.values(value)
        if form.bare:
            return own[0].kind.encode(getattr(value, own[0].name))
        written = {"format": form.format, "version": form.version} if form.format else {}
        for each in own:
            written[each.key] = each.kind.encode(getattr(value, each.name))
        return written

    def values(self, value: Any) -> list[Any]:
        return [each.kind.encode(getattr(value, each.name)) for each in _fields_of(self._kind)]

    def decode(self, data: Any, where: str) -> Any:
        if self._form.row:
            return self.made_of(data, where)
        if self._form.bare:
            (only,) = _fields_of(self._kind)
            return self._kind(**{only.name: only.kind.decode(data, where or self._form.noun)})
        if not isinstance(data, dict):
            if where:
                _refuse(where, data, "an object")
            raise PlanFormatError(f"This is no {self._form.noun}: {shown(data)} is not an object. {self._form.remedy}")
        return self._kind(**self._keywords(self._without_header(data), where))

    def made_of(self, values: Any, where: str) -> Any:
        """Return the dataclass that a list of its values, in field order, stands for."""
        own = _fields_of(self._kind)
        if not isinstance(values, list) or len(values) != len(own):
            _refuse(where, values, f"a list of {len(own)} values: {', '.join(each.key for each in own)}")
        pairs = zip(own, values, strict=True)
        return self._kind(**{each.name: each.kind.decode(value, f"{where}.{each.key}") for each, value in pairs})

    def _without_header(self, data: dict[str, Any]) -> dict[str, Any]:
        form = self._form
        if not form.format:
            return data
        if data.get("format") != form.format:
            raise PlanFormatError(
                f"This is no {form.noun}: its format is {shown(data.get('format'))}, not {form.format!r}. {form.remedy}"
            )
        version = data.get("version")
        if not is_whole(version) or version != form.version:
            raise PlanFormatError(
                f"This {form.noun} has version {shown(version)}; this retape reads version {form.version}. "
                f"{form.remedy} Or use the retape that wrote it."
            )
        return {key: value for key, value in data.items() if key not in ("format", "version")}

    def _keywords(self, data: dict[str, Any], where: str) -> dict[str, Any]:
        own = {each.key: each for each in _fields_of(self._kind)}
        missing = [key for key, each in own.items() if each.required and key not in data]
        unknown = sorted(data.keys() - own.keys())
        if missing or unknown:
            what = f"lacks {missing}" if missing else f"has unknown keys {unknown}"
            raise InvalidInput(f"{where or 'It'} {what}.")
        before = f"{where}." if where else ""
        return {own[key].name: own[key].kind.decode(value, before + key) for key, value in data.items()}


class _Tagged:
    """One of several dataclasses; the list [name, *values] in JSON."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = {kind.__name__.lower(): kind for kind in kinds}
        self.wanted = f"one of {', '.join(kind.__name__ for kind in kinds)}"

    def fits(self, value: object) -> bool:
        return isinstance(value, tuple(self._kinds.values()))

    def encode(self, value: Any) -> Any:
        return [type(value).__name__.lower(), *_Object(type(value)).values(value)]

    def decode(self, data: Any, where: str) -> Any:
        if not isinstance(data, list) or not data or data[0] not in list(self._kinds):
            _refuse(where, data, f"a list that begins with one of {sorted(self._kinds)}")
        return _Object(self._kinds[data[0]]).made_of(data[1:], f"{where} ({data[0]})")


_TEXT = _Plain("a text", lambda value: isinstance(value, str))
_FLAG = _Plain("True or False", lambda value: isinstance(value, bool))
_NUMBERS: dict[tuple[type, str], _Plain] = {
    (int, ""): _Plain("a whole number >= 0", is_count),
    (int, "bytes"): _Plain(
        "a whole number of bytes >= 0, below 2**62", lambda value: is_count(value) and value < MOST_BYTES
    ),
    (float, ""): _Plain("a finite number >= 0", lambda value: is_amount(value) and value >= 0),
    (float, "seconds"): _Plain(
        f"a finite number of seconds >= 0, at most {MOST_SECONDS:g}",
        lambda value: is_amount(value) and 0 <= value <= MOST_SECONDS,
    ),
}


@cache
def _kind_of(hint: Any, unit: str = "") -> _Kind:
    if hint is str or hint is bool:
        return _TEXT if hint is str else _FLAG
    if hint in (int, float):
        return _NUMBERS.get((hint, unit), _NUMBERS[hint, ""])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Member(hint)
    if is_dataclass(hint):
        return _Object(hint)  # type: ignore[arg-type]
    parts = get_args(hint)
    if get_origin(hint) is tuple and parts[1:] == (...,):
        return _Tuple(_kind_of(parts[0], unit))
    if NoneType in parts:
        return _Maybe(_kind_of(parts[0], unit))
    if parts and all(map(is_dataclass, parts)):
        return _Tagged(parts)
    raise TypeError(f"The codec knows no {hint}.")


@cache
def _fields_of(kind: type) -> tuple[_Field, ...]:
    hints, form = get_type_hints(kind), _form(kind)
    return tuple(
        _Field(
            name=each.name,
            key=form.keys.get(each.name, each.name),
            kind=_Pairs() if each.name in form.pairs else _kind_of(hints[each.name], each.name.rpartition("_")[2]),
            required=each.name in form.required or (each.default is MISSING and each.default_factory is MISSING),
        )
        for each in fields(kind)
    )


def _form(kind: type) -> JsonForm:
    form: JsonForm = getattr(kind, "__json_form__", None) or JsonForm(noun=kind.__name__)
    return form


def _refuse(where: str, data: object, wanted: str) -> NoReturn:
    raise InvalidInput(f"{where} = {shown(data)}; give {wanted}.")
