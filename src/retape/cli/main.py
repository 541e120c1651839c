"""The `retape` command: finds the subcommand, and turns errors into messages and exit codes. Each command has its own file.

To add a command, write a module with `add_parser(commands)`, which sets `run` as the parser's default, and list it below.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from retape.cli import schedule
from retape.core.errors import RetapeError

_COMMANDS = (schedule,)
_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except RetapeError as error:
        print(f"retape: {error}", file=sys.stderr)
        return _BAD_INPUT
    except BrokenPipeError:
        # The reader has gone (`retape ... | head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


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
    """Asks for the version only when it is wanted: reading the installed metadata takes longer than the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"retape {version('retape')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
