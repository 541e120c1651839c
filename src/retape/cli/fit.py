"""`retape fit`: fit the model of a user's file into a budget, explain the plan, and save it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from retape.cli import terminal
from retape.core.errors import InvalidInput, RetapeError
from retape.core.problem import Budget
from retape.report.fit_text import explain
from retape.report.frontier import chosen_point, draw_frontier
from retape.report.svg import write_file

if TYPE_CHECKING:
    from retape.core.fit_record import FitRecord

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_USAGE = "Give FILE.py:FUNCTION, where FUNCTION() returns (model, batch) or (model, batch, step)."
_MODULE = "retape_user_file"


def add_parser(commands: _Commands) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "fit",
        help="fit a model into a number of bytes and explain the plan",
        description="Profile the model that FILE.py:FUNCTION returns, find the fastest step inside the budget, measure it and explain it.",
    )
    parser.add_argument(
        "place", metavar="FILE.py:FUNCTION", help="FUNCTION() returns (model, batch) or (model, batch, step)"
    )
    parser.add_argument(
        "--budget",
        required=True,
        metavar="B",
        help="bytes such as 8GiB, a fraction of keeping everything such as 0.5, or auto",
    )
    parser.add_argument("--activations", action="store_true", help="the budget is above weights and gradients")
    parser.add_argument("--json", metavar="FILE", help="also save the fit, for retape.apply")
    parser.add_argument("--plot", metavar="FILE", help="also draw the frontier, as .svg or .png")
    parser.add_argument("--report", metavar="FILE", help="also write a page about the fit, as .html")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fit, explain, save."""
    budget = read_budget(options.budget, activations=options.activations)
    model, batch, step = call(load_function(options.place), options.place)
    made = _fitted(model, batch, step, budget, options.place)
    if options.json is not None:
        write_file(made.record.to_json() + "\n", options.json, "fit")
    if options.plot is not None:
        made.plot(options.plot)
    if options.report is not None:
        made.report(options.report)
    print(_as_text(made.record))
    return 0


def read_budget(text: str, *, activations: bool = False) -> Budget:
    """Read a budget from a command line: a number without a unit is bytes if it is whole and above 1, else a fraction."""
    if activations:
        return Budget.activations(int(text) if text.isdecimal() else text)
    if text.isdecimal() and int(text) > 1:
        return Budget.of(int(text))
    try:
        return Budget.fraction(float(text))
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
    return Budget.of(text)


def _fitted(model: Any, batch: Any, step: Any, budget: Budget, place: str) -> Any:
    from retape.api import fit

    try:
        return fit(model, batch, budget=budget, step=step)
    except (RetapeError, KeyboardInterrupt):
        raise
    except Exception as error:  # raised by the user's model or step
        raise InvalidInput(
            f"The step of {place} failed: {type(error).__name__}: {error}. Check that it runs without retape, then fit again."
        ) from error


def _as_text(record: FitRecord) -> str:
    width, ascii_only = terminal.width(), terminal.ascii_only()
    picture = draw_frontier(record.frontier, chosen=chosen_point(record), width=width, ascii_only=ascii_only)
    return f"{explain(record, width=width, ascii_only=ascii_only)}\n\nseconds of a step over bytes\n{picture}"


# --- the user's file ----------------------------------------------------------------------------------------------


def load_function(place: str) -> Callable[[], Any]:
    """Run the file that `place` names and return its function."""
    file, colon, name = place.rpartition(":")
    if not colon or not file or not name:
        raise InvalidInput(f"{place!r} names no function. {_USAGE}")
    path = Path(file)
    if not path.is_file():
        raise InvalidInput(f"There is no file {file!r}. {_USAGE}")
    function = getattr(_imported(path), name, None)
    if not callable(function):
        raise InvalidInput(f"{file!r} has no function {name!r}. {_USAGE}")
    return function  # type: ignore[no-any-return]


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{str(path)!r} is no Python file. {_USAGE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # pickling looks up the classes of the file here
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` does
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(f"Running {str(path)!r}", path, error) from error
    return module


def call(function: Callable[[], Any], place: str) -> tuple[Any, Any, Any]:
    """Call the user's function; return a model, a batch, and a step or None."""
    try:
        made = function()
    except Exception as error:
        raise _failed(f"{place}()", Path(place.rpartition(":")[0]), error) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"{len(made)} things" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise InvalidInput(f"{place}() returned {what}. {_USAGE}")
    model, batch, *step = made
    return model, batch, step[0] if step else None


def _failed(what: str, path: Path, error: Exception) -> InvalidInput:
    """Return the user's error with the line of their file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    where = "" if line is None else f" at line {line}"
    return InvalidInput(f"{what} failed{where}: {type(error).__name__}: {error}. Correct the file and run again.")
