"""The text of a plan: strict JSON, one version. Anything else is a PlanFormatError that says what and what to do."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any, NoReturn

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Offload, Prefetch, Save, Tape
from retape.core.errors import InvalidInput, PlanFormatError
from retape.core.plan import VERSION, Plan, ProblemKind, Status

FORMAT = "retape.plan"
_REMEDY = "Write the plan again with Plan.to_json, or solve the problem again."
_ACTIONS: dict[str, type[Action]] = {
    kind.__name__.lower(): kind for kind in (Forward, Tape, Save, Load, Free, Offload, Prefetch, Backward)
}
_FIELDS = {name: tuple(field.name for field in fields(kind)) for name, kind in _ACTIONS.items()}
_COUNTS = ("budget_bytes", "floor_bytes", "promised_peak_bytes")
_KEYS = {
    *("format", "version", "problem", "digest", "status", "choices", "actions", "schedule", "held"),
    *("promised_seconds", "lower_bound_seconds", *_COUNTS),
}


def write_plan(plan: Plan) -> str:
    """One JSON object; floats survive the round trip exactly."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": plan.version,
            "problem": plan.problem.value,
            "digest": plan.digest,
            "status": plan.status.value,
            **{name: getattr(plan, name) for name in _COUNTS},
            "promised_seconds": plan.promised_seconds,
            "lower_bound_seconds": plan.lower_bound_seconds,
            "choices": plan.choices,
            "actions": [_write_action(action) for action in plan.schedule_actions],
            "schedule": plan.schedule.to_dict() if plan.schedule is not None else None,
            "held": plan.held,
        },
        allow_nan=False,
    )


def read_plan(text: str) -> Plan:
    """Read what `write_plan` wrote, and nothing else."""
    data = _parse(text)
    _check_envelope(data)
    try:
        return _build(data)
    except PlanFormatError:
        raise
    except InvalidInput as error:
        raise PlanFormatError(f"This plan cannot be meant: {error} {_REMEDY}") from error


def _parse(text: str) -> dict[str, Any]:
    if not isinstance(text, str):
        _bad(f"A plan is text, not {type(text).__name__}.")
    try:
        data = json.loads(text, parse_constant=lambda name: _bad(f"The plan contains {name}, which is not a number."))
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanFormatError(f"The plan is not whole JSON ({error}); it may be truncated. {_REMEDY}") from error
    if not isinstance(data, dict):
        _bad(f"A plan is a JSON object, not {type(data).__name__}.")
    return data


def _check_envelope(data: dict[str, Any]) -> None:
    if data.get("format") != FORMAT:
        _bad(f"The text is no plan: its format is {data.get('format')!r}, not {FORMAT!r}.")
    if data.get("version") != VERSION or isinstance(data.get("version"), bool):
        raise PlanFormatError(
            f"The plan has version {data.get('version')!r}, and this retape reads version {VERSION}. "
            "Solve the problem again, or use the retape that wrote the plan."
        )
    missing, unknown = sorted(_KEYS - data.keys()), sorted(data.keys() - _KEYS)
    if missing or unknown:
        _bad(f"The plan lacks {missing}." if missing else f"The plan has unknown keys {unknown}.")


def _build(data: dict[str, Any]) -> Plan:
    bound = data["lower_bound_seconds"]
    return Plan(
        problem=_enum(ProblemKind, data, "problem"),
        digest=_typed(data["digest"], str, "digest"),
        status=_enum(Status, data, "status"),
        budget_bytes=_typed(data["budget_bytes"], int, "budget_bytes"),
        floor_bytes=_typed(data["floor_bytes"], int, "floor_bytes"),
        promised_peak_bytes=_typed(data["promised_peak_bytes"], int, "promised_peak_bytes"),
        promised_seconds=_seconds(data["promised_seconds"], "promised_seconds"),
        lower_bound_seconds=None if bound is None else _seconds(bound, "lower_bound_seconds"),
        choices=tuple(_count(item, "choices") for item in _typed(data["choices"], list, "choices")),
        schedule_actions=tuple(_read_action(item) for item in _typed(data["actions"], list, "actions")),
        schedule=_read_schedule(data["schedule"]),
        held=tuple(_typed(item, str, "held") for item in _typed(data["held"], list, "held")),
    )


def _write_action(action: Action) -> list[str | int]:
    name = type(action).__name__.lower()
    values = [getattr(action, field) for field in _FIELDS[name]]
    return [name, *(value.value if isinstance(value, Item) else value for value in values)]


def _read_action(entry: object) -> Action:
    if not isinstance(entry, list) or not entry or entry[0] not in _ACTIONS:
        _bad(f"The plan has an unknown action {entry!r}; it may have {sorted(_ACTIONS)}.")
    name, *values = entry
    if len(values) != len(_FIELDS[name]):
        _bad(f"The action {entry!r} needs {len(_FIELDS[name])} values: {_FIELDS[name]}.")
    pairs = zip(_FIELDS[name], values, strict=True)
    return _ACTIONS[name](**{field: _action_value(field, value, entry) for field, value in pairs})


def _action_value(field: str, value: object, entry: list[object]) -> Any:
    if field != "item":
        return _count(value, f"the action {entry!r}")
    if value not in {item.value for item in Item}:
        _bad(f"The action {entry!r} is about {value!r}, which is neither a state nor a tape.")
    return Item(value)


def _read_schedule(entry: object) -> Any:
    if entry is None:
        return None
    from retape.core.schedules import Schedule

    return Schedule.from_dict(_typed(entry, dict, "schedule"))


def _enum(kind: Any, data: dict[str, Any], key: str) -> Any:
    known = [member.value for member in kind]
    if data[key] not in known:
        _bad(f"The plan's {key} is {data[key]!r}; it must be one of {known}.")
    return kind(data[key])


def _typed(value: object, kind: type, key: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        _bad(f"The plan's {key} is {value!r}, and must be of type {kind.__name__}.")
    return value


def _count(value: object, key: str) -> int:
    number: int = _typed(value, int, key)
    if number < 0:
        _bad(f"The plan's {key} holds {number}, and must not be negative.")
    return number


def _seconds(value: object, key: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        _bad(f"The plan's {key} is {value!r}, and must be a finite number of seconds >= 0.")
    return float(value)


def _bad(what: str) -> NoReturn:
    raise PlanFormatError(f"{what} {_REMEDY}")
