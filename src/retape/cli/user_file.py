"""FILE.py:FUNCTION of a command line: the user's file is run, and the function called; whatever goes wrong there is a message."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from retape.core.errors import InvalidInput

_HOW = "Give FILE.py:FUNCTION, where FUNCTION() returns (model, batch) or (model, batch, step)."
_MODULE = "retape_user_file"


def load_function(place: str) -> Callable[[], Any]:
    """The function that `place` names, in a file that is run for it."""
    file, colon, name = place.rpartition(":")
    if not colon or not file or not name:
        raise InvalidInput(f"{place!r} names no function. {_HOW}")
    path = Path(file)
    if not path.is_file():
        raise InvalidInput(f"There is no file {file!r}. {_HOW}")
    function = getattr(_run(path), name, None)
    if not callable(function):
        raise InvalidInput(f"{file!r} has no function {name!r}. {_HOW}")
    return function  # type: ignore[no-any-return]


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{str(path)!r} is no Python file. {_HOW}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # classes of the file look themselves up there, as for pickling
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` does
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(f"Running {str(path)!r}", path, error) from error
    return module


def call(function: Callable[[], Any], place: str) -> tuple[Any, Any, Any]:
    """Call the user's function: a model, a batch, and a step or None."""
    try:
        made = function()
    except Exception as error:
        raise _failed(f"{place}()", Path(place.rpartition(":")[0]), error) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"{len(made)} things" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise InvalidInput(f"{place}() returned {what}. {_HOW}")
    model, batch, *step = made
    return model, batch, step[0] if step else None


def _failed(what: str, path: Path, error: Exception) -> InvalidInput:
    """The user's own error, with the line of their file that it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    where = "" if line is None else f" at line {line}"
    return InvalidInput(f"{what} failed{where}: {type(error).__name__}: {error}. Mend the file and run again.")
