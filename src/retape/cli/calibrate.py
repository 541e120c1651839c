"""`retape calibrate`: measure this machine's device and write its rates to a file, for `retape forecast --gpu FILE.json`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from retape.core.errors import InvalidInput
from retape.report.svg import check_writable

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(commands: _Commands) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "calibrate",
        help="measure a device and write its rates to a file",
        description="Measure matrix products, memory, attention, optimizers and host copies of a device; about a minute on a GPU.",
    )
    parser.add_argument("file", metavar="FILE.json", help="the device file to write")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default the first CUDA device, else the CPU")
    parser.add_argument("--name", default="", help="the name of the device in forecasts")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and write."""
    import torch

    from retape.forecast.calibration.meter import CPU
    from retape.forecast.calibration.run import calibrate
    from retape.forecast.device import write_device

    check_writable(options.file, "device")
    try:
        where = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InvalidInput(f"{options.device!r} is no device: {str(error).splitlines()[0]}") from error
    if where.type not in ("cpu", "cuda") or (where.type == "cuda" and not torch.cuda.is_available()):
        raise InvalidInput(f"There is no device {options.device!r} here; give cuda or cpu.")
    tuning = CPU if where.type == "cpu" else None
    found = calibrate(where, name=options.name, tuning=tuning, tell=lambda text: print(text, file=sys.stderr))
    write_device(found, options.file)
    print(
        f"{options.file}: {found.name}, {len(found.matmuls)} products, {len(found.ops)} ops, {len(found.attentions)} attentions"
    )
    return 0
