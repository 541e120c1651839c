"""`retape forecast`: peak, time and plan of a model on GPUs that are not here, or the best few layouts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retape.cli import fit as fit_command
from retape.core.errors import InvalidInput
from retape.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_PARTS = {
    "fsdp": "fsdp",
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "ep": "expert",
    "interleave": "interleave",
    "accumulate": "accumulate",
    "zero": "zero",
}
_MOST_LAYOUTS = 5


def add_parser(commands: _Commands) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "forecast",
        help="forecast the memory and time of training, without the hardware",
        description="Forecast the peak, the time and the best plan of a known model, or of the one that FILE.py:FUNCTION returns. "
        "With --gpus and no layout, search for the fastest layouts.",
    )
    parser.add_argument("model", metavar="MODEL", help="a known model such as llama-70b, or FILE.py:FUNCTION")
    parser.add_argument("--gpu", default="h200", metavar="NAME", help="a known device, or a file of `retape calibrate`")
    parser.add_argument("--gpus", type=int, default=1, metavar="N")
    parser.add_argument("--fsdp", type=int, metavar="N", help="GPUs that share weights, gradients and optimizer states")
    parser.add_argument("--tp", type=int, metavar="N", help="tensor parallel, with sequence parallel")
    parser.add_argument("--cp", type=int, metavar="N", help="context parallel")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline stages")
    parser.add_argument("--ep", type=int, metavar="N", help="expert parallel")
    parser.add_argument("--interleave", type=int, metavar="N", help="parts of the model on each pipeline stage")
    parser.add_argument("--zero", type=int, metavar="STAGE", help="0 to 3; 3 is FSDP and the default")
    parser.add_argument("--accumulate", type=int, metavar="N", help="micro-batches of a step")
    parser.add_argument("--seq", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="ROWS")
    parser.add_argument(
        "--optimizer",
        default="none",
        metavar="NAME",
        help="adamw, adamw-amsgrad, adamw-fp32, adamw-8bit, sgd, sgd-momentum, lion, none",
    )
    parser.add_argument(
        "--budget", metavar="B", help="bytes of each GPU such as 130GiB; by default what the device has"
    )
    parser.add_argument(
        "--float8", metavar="SCALING", help="linear layers of the blocks in float8: tensorwise or rowwise"
    )
    parser.add_argument("--offload", action="store_true", help="let plans move activations to the host")
    parser.add_argument("--report", metavar="FILE", help="also write a page, as .html")
    parser.add_argument(
        "--export", metavar="PROGRAM", help="also print settings: megatron, torchtitan, huggingface, deepspeed"
    )
    parser.add_argument(
        "--largest", action="store_true", help="also find the largest micro-batch and the longest sequence"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Forecast one layout, or search."""
    if options.report is not None and Path(options.report).suffix != ".html":
        raise InvalidInput(f"--report {options.report!r}: give a file that ends in .html.")
    if options.report is not None and not Path(options.report).parent.is_dir():
        raise InvalidInput(f"--report {options.report!r}: there is no folder {str(Path(options.report).parent)!r}.")
    from retape.forecast.export import check_export

    if options.export is not None:
        check_export(options.export)
    model, batch, step = _given(options)
    mesh = {field: getattr(options, name) for name, field in _PARTS.items() if getattr(options, name) is not None}
    from retape.forecast.forecasting import forecast

    if options.gpus > 1 and not any(name in mesh for name in ("fsdp", "tensor", "pipeline", "context")):
        mesh = _searched(model, batch, step, options, mesh)
    found = forecast(
        model,
        batch,
        device=options.gpu,
        mesh={"gpus": options.gpus, **mesh},
        optimizer=options.optimizer,
        budget=options.budget,
        step=step,
        offload=options.offload,
        float8=options.float8,
    )
    print(found.explain())
    if options.largest:
        print(f"  largest micro-batch {found.largest_batch()}, longest sequence {found.longest_sequence()}")
    if options.export is not None:
        print(found.export(options.export))
    if options.report is not None:
        found.report(options.report)
    return 0


def _given(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    if min(options.gpus, options.seq, options.micro_batch) < 1:
        raise InvalidInput("--gpus, --seq and --micro-batch are whole numbers >= 1.")
    if ":" in options.model:
        made = fit_command.call(fit_command.load_function(options.model), options.model)
        return made.model, made.batch, made.step
    return options.model, (options.micro_batch, options.seq), None


def _searched(model: Any, batch: Any, step: Any, options: argparse.Namespace, mesh: dict[str, int]) -> dict[str, int]:
    """Print the best layouts and return the parts of the fastest; raise if none fits."""
    from retape.forecast.forecasting import search_layouts

    found = search_layouts(
        model,
        batch,
        gpus=options.gpus,
        device=options.gpu,
        optimizer=options.optimizer,
        budget=options.budget,
        fixed=mesh,
        step=step,
        float8=options.float8,
        tell=lambda text: print(text, file=sys.stderr),
    )
    print(f"layouts of {options.gpus} GPUs, the fastest first")
    for choice in found[:_MOST_LAYOUTS]:
        made = choice.forecast
        if made is None:
            print(f"  {choice.layout.described()}: {choice.reason}")
            continue
        rate = f"{made.tokens_per_second:,.0f} tokens/s"
        print(
            f"  {choice.layout.described()}: {rate}, {format_seconds(made.seconds)}, {format_bytes(made.peak_bytes)}; {choice.reason}"
        )
    best = found[0]
    if best.forecast is None:
        raise InvalidInput(f"No layout of {options.gpus} GPUs fits: the best {best.reason}.")
    return {field: getattr(best.layout, field) for field in _PARTS.values()}
