"""What every record in benchmarks/results/ says of itself: device, versions, command, seed, date."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from pathlib import Path

import torch


def record(theme: str, seed: int, results: dict, out: str | None) -> Path:
    """Write results with what they were measured on; returns the file."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if cuda else "cpu"
    hardware = device.replace("NVIDIA ", "").replace(" ", "-").lower()
    path = (
        Path(out) if out else Path(__file__).parent / "results" / f"{theme}_{hardware}_{date.today().isoformat()}.json"
    )
    text = {
        "theme": theme,
        "device": device,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": " ".join(["python -m", f"benchmarks.{theme}", *_arguments()]),
        "seed": seed,
        "date": date.today().isoformat(),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(text, indent=1) + "\n")
    return path


def _arguments() -> list[str]:
    """The command's arguments, without where its record went."""
    given = sys.argv[1:]
    return [word for word, before in zip(given, ["", *given], strict=False) if "--out" not in (word, before)]
