"""The letters of a plan's text: strict JSON, actions as short lists. Anything else is a PlanFormatError that says what to do.

The words, the fields of a plan, are in `plan.py`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any, NoReturn

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Offload, Prefetch, Save, Tape
from retape.core.errors import PlanFormatError
from retape.core.quantities import is_whole

FORMAT = "retape.plan"
REMEDY = "Write the plan again with Plan.to_json, or solve the problem again."
_ACTIONS: dict[str, type[Action]] = {
    kind.__name__.lower(): kind for kind in (Forward, Tape, Save, Load, Free, Offload, Prefetch, Backward)
}
_FIELDS = {name: tuple(field.name for field in fields(kind)) for name, kind in _ACTIONS.items()}


def parse(text: str) -> dict[str, Any]:
    """One JSON object, whole, without NaN."""
    if not isinstance(text, str):
        bad(f"A plan is text, not {type(text).__name__}.")
    try:
        data = json.loads(text, parse_constant=lambda name: bad(f"The plan contains {name}, which is not a number."))
    except PlanFormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(f"The plan is not whole JSON ({error}); it may be truncated. {REMEDY}") from error
    if not isinstance(data, dict):
        bad(f"A plan is a JSON object, not {type(data).__name__}.")
    return data


def check_keys(data: dict[str, Any], version: int, keys: set[str]) -> None:
    """Another format, another version, a missing or an unknown key: each is said."""
    if data.get("format") != FORMAT:
        bad(f"The text is no plan: its format is {data.get('format')!r}, not {FORMAT!r}.")
    if data.get("version") != version or not is_whole(data.get("version")):
        raise PlanFormatError(
            f"The plan has version {data.get('version')!r}, and this retape reads version {version}. "
            "Solve the problem again, or use the retape that wrote the plan."
        )
    missing, unknown = sorted(keys - data.keys()), sorted(data.keys() - keys)
    if missing or unknown:
        bad(f"The plan lacks {missing}." if missing else f"The plan has unknown keys {unknown}.")


def write_action(action: Action) -> list[str | int]:
    name = type(action).__name__.lower()
    values = [getattr(action, field) for field in _FIELDS[name]]
    return [name, *(value.value if isinstance(value, Item) else value for value in values)]


def read_action(entry: object) -> Action:
    if not isinstance(entry, list) or not entry or entry[0] not in list(_ACTIONS):
        bad(f"The plan has an unknown action {entry!r}; it may have {sorted(_ACTIONS)}.")
    name, *values = entry
    if len(values) != len(_FIELDS[name]):
        bad(f"The action {entry!r} needs {len(_FIELDS[name])} values: {_FIELDS[name]}.")
    pairs = zip(_FIELDS[name], values, strict=True)
    return _ACTIONS[name](**{field: _action_value(field, value, entry) for field, value in pairs})


def _action_value(field: str, value: object, entry: list[object]) -> Any:
    if field != "item":
        return count(value, f"the action {entry!r}")
    if value not in [item.value for item in Item]:
        bad(f"The action {entry!r} is about {value!r}, which is neither a state nor a tape.")
    return Item(value)


def member_of(kind: Any, data: dict[str, Any], key: str) -> Any:
    known = [member.value for member in kind]
    if data[key] not in known:
        bad(f"The plan's {key} is {data[key]!r}; it must be one of {known}.")
    return kind(data[key])


def typed(value: object, kind: type, key: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        bad(f"The plan's {key} is {value!r}, and must be of type {kind.__name__}.")
    return value


def count(value: object, key: str) -> int:
    number: int = typed(value, int, key)
    if number < 0:
        bad(f"The plan's {key} holds {number}, and must not be negative.")
    return number


def seconds(value: object, key: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        bad(f"The plan's {key} is {value!r}, and must be a finite number of seconds >= 0.")
    return float(value)


def bad(what: str) -> NoReturn:
    raise PlanFormatError(f"{what} {REMEDY}")
