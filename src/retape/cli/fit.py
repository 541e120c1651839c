"""`retape fit`: fit the model of a user's file into a budget, explain the plan, and save it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from retape.cli import terminal
from retape.cli.user_file import call, load_function
from retape.core.errors import InvalidInput, RetapeError
from retape.core.problem import Budget
from retape.report import frontier_text
from retape.report.fit_text import explain
from retape.report.frontier_file import chosen_point

if TYPE_CHECKING:
    from retape.core.fit_record import FitRecord

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


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
        _save(made, options.json)
    if options.plot is not None:
        made.plot(options.plot)
    if options.report is not None:
        made.report(options.report)
    print(_as_text(made.record))
    return 0


def read_budget(text: str, *, activations: bool = False) -> Budget:
    """A budget from a command line: a number without a unit is a fraction where it is written as one, else bytes."""
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
    except Exception as error:  # the user's model or step, which runs inside
        raise InvalidInput(
            f"The step of {place} failed: {type(error).__name__}: {error}. See that it runs without retape, then fit again."
        ) from error


def _save(made: Any, path: str) -> None:
    try:
        made.save(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"Cannot save the fit to {path!r}: {reason}. Give another file.") from error


def _as_text(record: FitRecord) -> str:
    width, ascii_only = terminal.width(), terminal.ascii_only()
    marks = frontier_text.ASCII if ascii_only else frontier_text.UNICODE
    picture = frontier_text.draw_frontier(record.frontier, chosen=chosen_point(record), width=width, marks=marks)
    return f"{explain(record, width=width, ascii_only=ascii_only)}\n\nseconds of a step over bytes\n{picture}"
