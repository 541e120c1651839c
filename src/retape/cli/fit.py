"""`retape fit`: fit the model of a user's file into a budget, explain the plan, and save it.

Files are checked before the fit and written whole after it: an error leaves none of them half written.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from retape.cli import terminal
from retape.core.errors import InvalidInput, RetapeError
from retape.core.problem import Budget, OptionSet
from retape.report.fit_text import explain
from retape.report.frontier import check_picture, chosen_point, draw_frontier, frontier_picture
from retape.report.page.html import render_report
from retape.report.svg import check_writable, write_file

if TYPE_CHECKING:
    from retape.core.fit_record import FitRecord

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_RETURNS = "(model, batch), (model, batch, step) or (model, batch, step, optimizer)"
_USAGE = f"Give FILE.py:FUNCTION, where FUNCTION() returns {_RETURNS}."
_MODULE = "retape_user_file"


def add_parser(commands: _Commands) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "fit",
        help="fit a model into a number of bytes and explain the plan",
        description="Profile the model that FILE.py:FUNCTION returns, find the fastest step inside the budget, measure it and explain it.",
    )
    parser.add_argument(
        "place", metavar="FILE.py:FUNCTION", help=f"FUNCTION() returns {_RETURNS}; a step or an optimizer may be None"
    )
    parser.add_argument(
        "--budget",
        required=True,
        metavar="B",
        help="as in Python: bytes such as 8GiB or 8589934592; with a decimal point a fraction of the activations of a step that keeps "
        "everything, such as 0.5 or 1.0 (1 is one byte); or auto, what is free on the device",
    )
    parser.add_argument("--activations", action="store_true", help="the budget is bytes above weights and gradients")
    parser.add_argument(
        "--options",
        choices=["exact", "all"],
        default="exact",
        help="exact: gradients equal bit for bit (default); all: also the loss and parts of regions in slices",
    )
    parser.add_argument(
        "--optimizer-on-host", action="store_true", help="optimizer states wait on the host during forward and backward"
    )
    parser.add_argument(
        "--optimizer-in-backward",
        action="store_true",
        help="update each weight in backward, when its gradient is complete",
    )
    parser.add_argument("--host-budget", metavar="B", help="bytes of host memory to use, such as 64GiB")
    parser.add_argument("--disk", metavar="FOLDER", help="where slots go that the host has no memory for")
    parser.add_argument("--disk-budget", metavar="B", help="bytes of the disk to use, such as 500GiB")
    parser.add_argument("--compile", action="store_true", help="compile the regions in several variants")
    parser.add_argument(
        "--longest", action="store_true", help="also print the longest sequence that fits in the budget"
    )
    parser.add_argument("--cache", metavar="FOLDER", help="keep the plan in FOLDER; the next fit only checks it")
    parser.add_argument("--json", metavar="FILE", help="also save the fit, for retape.apply")
    parser.add_argument("--plot", metavar="FILE", help="also draw the frontier, as .svg or .png")
    parser.add_argument("--report", metavar="FILE", help="also write a page about the fit, as .html")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fit, explain, save."""
    budget = (Budget.activations if options.activations else Budget.of)(options.budget)
    check_outputs(options)
    training = call(load_function(options.place), options.place)
    made = _fitted(training, budget, options)
    _write(made.record, options)
    print(_as_text(made.record))
    if options.longest:
        print(f"\nlongest sequence in this budget: {made.longest_sequence()} (fitted: {made.record.length})")
    return 0


def check_outputs(options: argparse.Namespace) -> None:
    """Raise InvalidInput for a file that could not be written after the fit, before anything runs."""
    if options.plot is not None:
        check_picture(options.plot)
    for path, what in ((options.json, "fit"), (options.plot, "picture"), (options.report, "report")):
        if path is not None:
            check_writable(path, what)


def _write(record: FitRecord, options: argparse.Namespace) -> None:
    """Write the files that were asked for; all are made before the first is written."""
    files: list[tuple[str | bytes, str, str]] = []
    if options.json is not None:
        files.append((record.to_json() + "\n", options.json, "fit"))
    if options.plot is not None:
        files.append((frontier_picture(record.view(), options.plot), options.plot, "picture"))
    if options.report is not None:
        files.append((render_report(record.view()), options.report, "report"))
    for content, path, what in files:
        write_file(content, path, what)


def _fitted(training: Training, budget: Budget, options: argparse.Namespace) -> Any:
    from retape.api import fit

    more = OptionSet.OPTIMIZER_ON_HOST if options.optimizer_on_host else OptionSet.EXACT
    more |= OptionSet.OPTIMIZER_IN_BACKWARD if options.optimizer_in_backward else OptionSet.EXACT
    try:
        return fit(
            training.model,
            training.batch,
            budget=budget,
            step=training.step,
            optimizer=training.optimizer,
            options=OptionSet.of(options.options) | more,
            host_budget=options.host_budget,
            disk=options.disk,
            disk_budget=options.disk_budget,
            compile=options.compile,
            cache=options.cache,
        )
    except (RetapeError, KeyboardInterrupt):
        raise
    except Exception as error:  # raised by the user's model or step
        raise InvalidInput(
            f"The step of {options.place} failed: {type(error).__name__}: {error}. Check that it runs without retape, then fit again."
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


class Training(NamedTuple):
    """A model with a batch, and optionally a step and an optimizer, as the user's function returned them."""

    model: Any
    batch: Any
    step: Any = None
    optimizer: Any = None


def call(function: Callable[[], Any], place: str) -> Training:
    """Call the user's function and return what it made; raise InvalidInput if that is no training."""
    try:
        made = function()
    except Exception as error:
        raise _failed(f"{place}()", Path(place.rpartition(":")[0]), error) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3, 4):
        what = f"{len(made)} things" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise InvalidInput(f"{place}() returned {what}. {_USAGE}")
    found = Training(*made)
    if found.step is not None and not callable(found.step):
        raise InvalidInput(
            f"{place}() returned a {type(found.step).__name__} as its step, which is not callable. {_USAGE}"
        )
    return found


def _failed(what: str, path: Path, error: Exception) -> InvalidInput:
    """Return the user's error with the line of their file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    where = "" if line is None else f" at line {line}"
    return InvalidInput(f"{what} failed{where}: {type(error).__name__}: {error}. Correct the file and run again.")
