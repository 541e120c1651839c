"""The reference is the code's: every public name has an entry in docs/api.md, with its signature, its parameters and its members."""

import argparse
import dataclasses
import enum
import importlib
import inspect
import re
from pathlib import Path

import pytest

import retape
from retape.cli.main import _parser
from retape.core.record import Record
from retape.torch.adaptive.manager import AdaptiveStats
from retape.torch.measure.verify import Verification

TEXT = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
FUNCTIONS = [name for name in retape.__all__ if inspect.isfunction(getattr(retape, name)) or name == "forecast"]
CLASSES = {"Fit", "Plan", "Budget"}
CODE = re.compile(r"`([^`]+)`")


def section(title):
    """What stands under a heading, up to the next of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", TEXT, re.M | re.S)
    assert found, f"docs/api.md has no section {title!r}"
    return found[2]


def first_cells(text):
    """The code in the first column of the tables of a section."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return [code for row in rows for code in CODE.findall(row)]


def written(function):
    """A signature without annotations, as people write it."""
    parts, only_keywords = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not only_keywords:
            parts.append("*")
        only_keywords |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        parts.append(f"{stars}{parameter.name}{default}")
    return f"{function.__name__.rpartition('.')[2]}({', '.join(parts)})"


def _default(value):
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        return f'"{value}"'
    return value.__name__ if callable(value) else repr(value)


def test_every_public_name_has_an_entry():
    headings = {code for line in TEXT.splitlines() if line.startswith("### ") for code in CODE.findall(line)}
    assert headings == set(retape.__all__)
    assert CLASSES | {"RetapeError", "errors"} | set(FUNCTIONS) == headings


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name):
    assert written(getattr(retape, name)) in CODE.findall(section(f"`{name}`"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_explained(name):
    parameters = list(inspect.signature(getattr(retape, name)).parameters)
    explained = first_cells(section(f"`{name}`"))
    assert sorted(explained) == sorted(parameters)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_member_is_explained(name):
    kind = getattr(retape, name)
    members = {member for member in dir(kind) if not member.startswith("_")} | ({"record"} if name == "Fit" else set())
    text = section("The class `Fit`" if name == "Fit" else f"`{name}`")
    assert {cell.partition("(")[0] for cell in first_cells(text)} == members


@pytest.mark.parametrize("kind", [Record, Verification, AdaptiveStats], ids=lambda kind: kind.__name__)
def test_every_field_of_a_result_is_named(kind):
    row = next(line for line in section("What they return").splitlines() if line.startswith(f"| `{kind.__name__}`"))
    assert {field.name for field in dataclasses.fields(kind)} <= set(CODE.findall(row))


MODULES = [
    "retape.core",
    "retape.core.schedules",
    "retape.integrations.accelerate",
    "retape.integrations.huggingface",
    "retape.integrations.huggingface_loss",
    "retape.integrations.lightning",
]


@pytest.mark.parametrize("name", MODULES)
def test_every_name_of_a_module(name):
    names = {cell.partition("(")[0] for cell in first_cells(section(f"`{name}`"))}
    assert names == set(importlib.import_module(name).__all__)


def test_every_error_is_named():
    assert set(retape.errors.__all__) <= set(CODE.findall(section("`errors`")))


def test_every_command_and_option_is_named():
    commands = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    rows = section("The command").splitlines()
    for name, parser in commands.items():
        text = "".join(row for row in rows if row.startswith(f"| `retape {name}"))
        shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
        options = {option for action in shown for option in action.option_strings if option.startswith("--")} - {
            "--help"
        }
        assert text, name
        assert "%%" not in parser.format_help()
        assert [option for option in sorted(options) if not re.search(rf"(?<![\w-]){option}\b", text)] == []
