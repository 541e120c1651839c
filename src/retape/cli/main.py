"""The `retape` command: runs a subcommand and turns errors into messages and exit codes. Each command has its own module.

To add a command, write a module with `add_parser(commands)`, which sets `run` as the parser's default, and list it below.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from retape.cli import calibrate, demo, fit, forecast, report, schedule
from retape.core.errors import RetapeError

_COMMANDS = (fit, report, demo, schedule, forecast, calibrate)
_NOT_WRITTEN = 1
_BAD_INPUT = 2
_INTERRUPTED = 130  # as shells report it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 if the output cannot be written, 2 for invalid input, or 130 if it was interrupted."""
    try:
        return _run(arguments)
    except RetapeError as error:
        print(f"retape: {' '.join(str(error).split())}", file=sys.stderr)
        return _BAD_INPUT
    except KeyboardInterrupt:
        print("retape: interrupted; nothing was written.", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has exited (`retape ... | head`)
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        print(
            f"retape: Cannot write to standard output: {error.strerror}. Redirect it to another file.", file=sys.stderr
        )
        return _NOT_WRITTEN


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        return code
    finally:  # argparse prints and exits too
        if sys.stdout is None:  # as after `retape ... >&-`
            raise OSError(errno.EBADF, "standard output is closed")
        sys.stdout.flush()


def _discard_output() -> None:
    """Redirect standard output to the null device, so that Python's flush at exit raises no second error."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retape", description="Train models that do not fit: activation recomputation inside a budget in bytes."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


class _Version(argparse.Action):
    """Reads the version only if it is asked for: reading the installed metadata takes longer than starting the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"retape {version('retape')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
