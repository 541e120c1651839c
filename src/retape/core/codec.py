"""Dataclasses as JSON and back, driven by their annotations: the one codec of plans, records, fits, schedules and assignments.

A dataclass is an object with one key per field, in field order; a tuple is a list, an enum its value, an action the list
`[name, *values]`. A class whose text differs from that says so in a `__json_form__` attribute (`JsonForm`). Numbers are not converted,
so that text that is read and written again does not change. The same annotations validate values made in code: `check_fields`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from retape.core.errors import InvalidInput, PlanFormatError
from retape.core.units import MOST_BYTES, MOST_SECONDS, is_amount, is_count, is_whole, shown

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """The JSON of a class, if it is more than an object of its fields.

    `noun` and `remedy` are for messages. `format` and `version` are the first keys of the object, if a format is given. `keys`
    renames fields. `required` names fields with a default that the text must contain: files of earlier versions may lack the other
    ones. `omitted` names fields that are not written while they are None or 0. With `row` the values are a list without keys, with
    `bare` the JSON is the value of the only field. `pairs` names fields whose (key, value) pairs are an object.
    """

    noun: str = ""
    remedy: str = ""
    format: str = ""
    version: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    row: bool = False
    bare: bool = False
    pairs: tuple[str, ...] = ()


def to_data(value: Any) -> Any:
    """Return a dataclass as lists, dicts and plain values."""
    return _object(type(value)).encode(value)


def to_json(value: Any) -> str:
    """Return a dataclass as JSON text; `from_json` reads it back, every float exactly."""
    return json.dumps(to_data(value), allow_nan=False)


def from_data(kind: type[_T], data: Any) -> _T:
    """Return the dataclass that `to_data` wrote; raise PlanFormatError with the reason for any other data."""
    form = _form(kind)
    try:
        made: _T = _object(kind).decode(data, "")
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


@dataclass(frozen=True, slots=True)
class _Kind:
    """The values of one annotation: words for a message, a test, and both directions. `decode` takes the data and its place."""

    wanted: str
    fits: Callable[[Any], bool]
    encode: Callable[[Any], Any]
    decode: Callable[[Any, str], Any]


def _refuse(where: str, data: object, wanted: str) -> NoReturn:
    raise InvalidInput(f"{where} = {shown(data)}; give {wanted}.")


def _plain(wanted: str, fits: Callable[[Any], bool]) -> _Kind:
    """Values that JSON has too."""
    return _Kind(
        wanted, fits, lambda value: value, lambda data, where: data if fits(data) else _refuse(where, data, wanted)
    )


def _enum(kind: type[Enum]) -> _Kind:
    values = [member.value for member in kind]

    def decode(data: Any, where: str) -> Any:
        return kind(data) if data in values else _refuse(where, data, f"one of {', '.join(map(repr, values))}")

    return _Kind(
        f"a member of {kind.__name__}", lambda value: isinstance(value, kind), lambda member: member.value, decode
    )


def _optional(inner: _Kind) -> _Kind:
    return _Kind(
        f"{inner.wanted}, or None",
        lambda value: value is None or inner.fits(value),
        lambda value: None if value is None else inner.encode(value),
        lambda data, where: None if data is None else inner.decode(data, where),
    )


def _tuple(inner: _Kind) -> _Kind:
    def decode(data: Any, where: str) -> Any:
        items = data if isinstance(data, list) else _refuse(where, data, "a list")
        return tuple(inner.decode(item, f"{where}[{place}]") for place, item in enumerate(items))

    return _Kind(
        f"a tuple, each item {inner.wanted}",
        lambda value: isinstance(value, tuple) and all(map(inner.fits, value)),
        lambda value: [inner.encode(item) for item in value],
        decode,
    )


def _decode_pairs(data: Any, where: str) -> Any:
    items = data if isinstance(data, dict) else _refuse(where, data, "an object")
    return tuple((name, str(text)) for name, text in items.items())


_PAIRS = _Kind(
    "a tuple of (text, text) pairs",
    lambda value: isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value),
    dict,
    _decode_pairs,
)


def _tagged(kinds: tuple[type, ...]) -> _Kind:
    """One of several dataclasses; the list [name, *values] in JSON."""
    known = {kind.__name__.lower(): kind for kind in kinds}

    def decode(data: Any, where: str) -> Any:
        if not isinstance(data, list) or not data or data[0] not in list(known):
            _refuse(where, data, f"a list that begins with one of {sorted(known)}")
        return _from_row(known[data[0]], data[1:], f"{where} ({data[0]})")

    return _Kind(
        f"one of {', '.join(kind.__name__ for kind in kinds)}",
        lambda value: isinstance(value, kinds),
        lambda value: [type(value).__name__.lower(), *_to_row(value)],
        decode,
    )


# --- dataclasses --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """One field of a dataclass: its name, its key in JSON, and its kind of values."""

    name: str
    key: str
    kind: _Kind
    required: bool


def _object(kind: Any) -> _Kind:
    form = _form(kind)

    def decode(data: Any, where: str) -> Any:
        if form.row:
            return _from_row(kind, data, where)
        if form.bare:
            (only,) = _fields_of(kind)
            return kind(**{only.name: only.kind.decode(data, where or form.noun)})
        if not isinstance(data, dict):
            if where:
                _refuse(where, data, "an object")
            raise PlanFormatError(f"This is no {form.noun}: {shown(data)} is not an object. {form.remedy}")
        return kind(**_keywords(kind, _without_header(form, data), where))

    return _Kind(f"an instance of {kind.__name__}", lambda value: isinstance(value, kind), _encode_object, decode)


def _encode_object(value: Any) -> Any:
    kind: Any = type(value)
    form = _form(kind)
    if form.row or form.bare:
        row = _to_row(value)
        return row if form.row else row[0]
    written = {"format": form.format, "version": form.version} if form.format else {}
    for each in _fields_of(kind):
        own = getattr(value, each.name)
        if own or each.name not in form.omitted:
            written[each.key] = each.kind.encode(own)
    return written


def _to_row(value: Any) -> list[Any]:
    kind: Any = type(value)
    return [each.kind.encode(getattr(value, each.name)) for each in _fields_of(kind)]


def _from_row(kind: type, values: Any, where: str) -> Any:
    known = _fields_of(kind)
    if not isinstance(values, list) or len(values) != len(known):
        _refuse(where, values, f"a list of {len(known)} values: {', '.join(each.key for each in known)}")
    pairs = zip(known, values, strict=True)
    return kind(**{each.name: each.kind.decode(value, f"{where}.{each.key}") for each, value in pairs})


def _without_header(form: JsonForm, data: dict[str, Any]) -> dict[str, Any]:
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


def _keywords(kind: type, data: dict[str, Any], where: str) -> dict[str, Any]:
    known = {each.key: each for each in _fields_of(kind)}
    missing = [key for key, each in known.items() if each.required and key not in data]
    unknown = sorted(data.keys() - known.keys())
    if missing or unknown:
        what = f"lacks {missing}" if missing else f"has unknown keys {unknown}"
        raise InvalidInput(f"{where or 'It'} {what}.")
    before = f"{where}." if where else ""
    return {known[key].name: known[key].kind.decode(value, before + key) for key, value in data.items()}


@cache
def _fields_of(kind: Any) -> tuple[_Field, ...]:
    hints, form = get_type_hints(kind), _form(kind)
    return tuple(
        _Field(
            name=each.name,
            key=form.keys.get(each.name, each.name),
            kind=_PAIRS if each.name in form.pairs else _kind_of(hints[each.name], each.name.rpartition("_")[2]),
            required=each.name in form.required or (each.default is MISSING and each.default_factory is MISSING),
        )
        for each in fields(kind)
    )


def _form(kind: type) -> JsonForm:
    form: JsonForm = getattr(kind, "__json_form__", None) or JsonForm(noun=kind.__name__)
    return form


# --- annotations --------------------------------------------------------------------------------------------------

_PLAIN = {
    (str, ""): _plain("a text", lambda value: isinstance(value, str)),
    (bool, ""): _plain("True or False", lambda value: isinstance(value, bool)),
    (int, ""): _plain("a whole number >= 0", is_count),
    (int, "bytes"): _plain(
        "a whole number of bytes >= 0, below 2**62", lambda value: is_count(value) and value < MOST_BYTES
    ),
    (float, ""): _plain("a finite number >= 0", lambda value: is_amount(value) and value >= 0),
    (float, "seconds"): _plain(
        f"a finite number of seconds >= 0, at most {MOST_SECONDS:g}",
        lambda value: is_amount(value) and 0 <= value <= MOST_SECONDS,
    ),
}


@cache
def _kind_of(hint: Any, unit: str = "") -> _Kind:
    """Return the kind of an annotation; `unit` is the last word of the field's name."""
    if (hint, "") in _PLAIN:
        return _PLAIN.get((hint, unit), _PLAIN[hint, ""])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if is_dataclass(hint):
        return _object(hint)
    parts = get_args(hint)
    if get_origin(hint) is tuple and parts[1:] == (...,):
        return _tuple(_kind_of(parts[0], unit))
    if NoneType in parts:
        return _optional(_kind_of(parts[0], unit))
    if parts and all(map(is_dataclass, parts)):
        return _tagged(parts)
    raise TypeError(f"The codec does not support the annotation {hint}.")
